# SPDX-License-Identifier: MIT
"""A sample or a puzzle as it appears, with feedback and without: every pass of decoding.  App. C.5

    python lab/trajectory.py --checkpoint=out/small/last.pt --prompt="def main(" --steps=16
    model="--checkpoint=results/sudoku.pt"
    puzzle="$model --given=.5...1...5..5243..1.....6321........"
    puzzle="$puzzle --sampler=entropy --steps=12 --temperature=0 --top_p=1"
    python lab/trajectory.py $puzzle --out=results/figures/sudoku.svg            # README's picture
    note="Puzzle 5 of python examples/sudoku.py. Without feedback, pass 11 contradicts itself."
    python lab/trajectory.py $puzzle --note="$note" --out=results/trajectory.html

An .html steps through the passes (Fig. 7). An .svg, for 6×6 puzzles only, shows them fill.
"""

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(sys.path[0], "examples")))
import launch
import sample
from data import rng
from launch import Refused, write_text
from softmask import neg_entropy
from sudoku import broken


@dataclass
class Config(sample.Config):
    """The flags of sample.py that decide what one sample is, and two more.

    With feedback and a random sampler, it differs from sample.py's, as every step makes a pass.
    """
    given: str = ""  # a puzzle: one character per token, with a dot for each token to fill in
    note: str = ""   # a sentence at the top of the page
    out: str = "trajectory.html"

    NO_FLAGS = "count", "show", "compile"


def trace(tok, model, steps):
    """An `on_step` (sample.generate) that appends the cells of one sequence to `steps`.

    The cell of a token is [text, None]. The cell of a mask is [guess, λ, −H in nats, [[text, π],
    …]] with the k tokens that SM mixes. Three are listed without SM, and five for k = |V|.
    """
    k = model.sm.k if model.sm else 3  # None: |V|
    before = None                                                                  # (1, L)

    @torch.no_grad()
    def on_step(x, lam, masks, h, revealed):
        nonlocal before
        logits = model.net.head(h)                                                 # (m, V)
        logp = (logits if k else logits / model.sm.tau).log_softmax(-1)            # (m, V)
        pi, ids = logp.exp().topk(k or 5)                                          # (m, k)
        pi = pi / pi.sum(-1, keepdim=True) if k else pi                            # (m, k)
        predictions = zip(neg_entropy(logp).tolist(), ids.tolist(), pi.tolist())
        predicted = dict(zip(masks[1].tolist(), predictions))
        cells = [[sample.cell_text(tok, token), None] for token in x[0].tolist()]
        for i in (x[0] == model.mask_id).nonzero()[:, 0].tolist():
            if i in predicted:
                minus_H, tokens, shares = predicted[i]
            else:  # it was just re-masked
                minus_H = 0.0
                tokens, shares = [before[0, i].item()], [1.0]
            mixed = [[sample.cell_text(tok, j), round(share, 4)]
                     for j, share in zip(tokens, shares)]
            cells[i] = [mixed[0][0], round(lam[0, i].item(), 4), round(minus_H, 4), mixed]
        steps.append(cells)
        before = x
    return on_step


def traces(cfg):
    """{name: the cells of every step}, with feedback and without."""
    here = launch.machine(cfg.device)
    chosen = cfg.steps
    if cfg.given and cfg.prompt:
        raise Refused("--given is the whole text: leave --prompt out")
    model, tok, x, cfg = sample.load_for_sampling(cfg)                             # x: (L,)
    special, mask_id = model.info["tokenizer"], model.mask_id
    if cfg.given:  # BOS, the cells, EOS of the document, EOS of the row
        cells = [mask_id if c == "." else tok.encode_ordinary(c)[0] for c in cfg.given]
        x = torch.tensor([special["bos"], *cells, special["eos"], special["eos"]])  # (L,)
        if len(x) != model.cfg.length or mask_id not in x:
            raise Refused(f"--given has {len(cfg.given)} characters, {cfg.given.count('.')} of "
                          f"them dots: give {model.cfg.length - 3}, some of them dots")
        if cfg.sampler in sample.ORDERS and not chosen:
            cfg.steps = x.tolist().count(mask_id)
    model.to(here.device)
    sides = {"with-feedback": model.sm, "without": None} if model.sm else {"without": None}
    found = {name: [] for name in sides}
    for name, model.sm in sides.items():
        on_step, generator = trace(tok, model, found[name]), rng("sample", cfg.seed, 0)
        with here.autocast():
            if cfg.sampler in sample.SAMPLERS:
                sample.generate(model, x, cfg.steps, cfg.sampler, cfg.top_p, generator, True,
                                on_step)
            else:
                sample.sample(model, x, cfg, generator, on_step)
    return found


def drawn_cell(x, y, width, text, lam, marked=False):
    """A cell: a token in bold (lam None), red if marked, or a guess, darker green for larger λ."""
    fill, color, weight = "#f99" if marked else "#fff", "#000", "bold"
    if lam is not None:
        pale = int(220 * (1 - lam))
        fill, weight = f"rgb({pale},{100 + pale * 2 // 3},{pale})", "normal"
        color = "#fff" if lam > 0.6 else "#000"
    return (f'<rect x="{x}" y="{y}" width="{width}" height="32" rx="4" fill="{fill}"/>'
            f'<text x="{x + width / 2:g}" y="{y + 22}" font-weight="{weight}" fill="{color}">'
            f'{html.escape(text)}</text>')


def grids(found):
    """An SVG of 6×6 grids: a frame for each pass, red cells that break a rule, λ's legend."""
    names = [f'<text x="{120 + 232 * column}" y="26">{name.replace("-", " ")}</text>'
             for column, name in enumerate(found)]
    legend = [drawn_cell(44 + 50 * i, 258, 48, f"{lam:g}", lam)
              for i, lam in enumerate((0, 0.2, 0.4, 0.6))]
    passes, width, frames = max(map(len, found.values())), 8 + 232 * len(found), []
    seconds = 0.7 * passes + 4  # the last frame stays for four more
    for i in range(passes):
        cells = []
        for column, steps in enumerate(found.values()):
            grid = steps[min(i, len(steps) - 1)][1:37]
            digits = [text if lam is None else "." for text, lam, *_ in grid]
            marked = set().union(*broken(digits).values())
            cells += [drawn_cell(16 + 232 * column + 34 * (j % 6) + 6 * (j % 6 // 3),
                                 36 + 34 * (j // 6) + 6 * (j // 12), 32, text, lam, j in marked)
                      for j, (text, lam, *_) in enumerate(grid)]
        # Each frame covers those before it. Viewers without animation show the one in the middle.
        frames.append(f'<g visibility="{"visible" if i <= passes // 2 else "hidden"}">'
                      f'<animate attributeName="visibility" calcMode="discrete" '
                      f'values="hidden;visible" keyTimes="0;{0.7 * i / seconds:.4f}" '
                      f'dur="{seconds:.2f}s" repeatCount="indefinite"/>{"".join(cells)}</g>')
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="298" '
        'font-family="monospace" font-size="18" text-anchor="middle">',
        f'<rect width="{width}" height="298" rx="8" fill="#999"/>', *frames, *names,
        '<text x="28" y="280">λ</text>', *legend, "</svg>"])


def page(found, columns, note=""):
    """A page that steps through the traces side by side.   columns: of a grid, or 0."""
    values = json.dumps({"columns": columns, "note": note, "traces": [
        {"name": name, "steps": steps} for name, steps in found.items()]})
    template = Path(__file__).with_name("trajectory_template.html").read_text("utf-8").strip()
    # A token may be </script>: without any <, it cannot end the element that holds it.
    return template.replace("TRACES<", values.replace("<", r"\u003c") + "<")


def main(cfg):
    grid = len(cfg.given) == 36
    if not cfg.out.endswith((".html", ".svg") if grid else ".html"):
        raise Refused(f"--out={cfg.out} must end in .html, or in .svg for a 6×6 puzzle")
    found = traces(cfg)
    made = grids(found) if cfg.out.endswith(".svg") else page(found, 6 if grid else 0, cfg.note)
    write_text(cfg.out, made + "\n")
    print(f"written to {cfg.out}")


if __name__ == "__main__":
    launch.run(main, Config)
