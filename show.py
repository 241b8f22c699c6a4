# SPDX-License-Identifier: MIT
"""Watch a sample being decoded, on a terminal or in a file.                                App. C.5

    generate(model, 1, steps, on_step=show(tok, mask_id))           # drawn in place, λ in green
    generate(model, 1, steps, on_step=trace(tok, model, path))      # JSON lines, for lab/plot.py

sample.generate describes what an `on_step` gets. Only the first sequence of a batch is shown.
"""

import shutil
import sys
import time

import torch

from launch import append_jsonl
from softmask import neg_entropy


def cell_text(tok, token):
    """A token id as text: ↵ for a line break, a dot for [MASK] and for what cannot be printed."""
    text = tok.decode([token]) if token < tok.n_vocab else "·"
    return "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in text)


def painted(text, lam):
    """Text for a terminal: a token (lam None) in bold, a guess on green, darker for larger λ."""
    if not sys.stdout.isatty():
        return text
    if lam is None:
        return f"\x1b[1m{text}\x1b[0m"
    pale = int(220 * (1 - lam))
    return f"\x1b[48;2;{pale};{100 + pale * 2 // 3};{pale};38;2;0;0;0m{text}\x1b[0m"


def draw(lines, drawn, pause):
    """Print lines in place of the last `drawn`, then wait `pause` s. Returns their number."""
    lines = lines[1 - max(2, shutil.get_terminal_size().lines):]  # the last ones, if not all fit
    back = f"\x1b[{drawn}F\x1b[J" if drawn else ""
    print(back + "\n".join(lines), flush=True)
    time.sleep(pause)
    return len(lines)


def show(tok, mask_id):
    """An `on_step` that draws the first sequence in place, if stdout is a terminal."""
    drawn = 0

    def on_step(x, lam, guess, *_):
        nonlocal drawn
        if not sys.stdout.isatty():
            return
        lines, used = [""], 0
        for token, strength, top in zip(x[0].tolist(), lam[0].tolist(), guess[0].tolist()):
            masked = token == mask_id
            text = cell_text(tok, top if masked else token)
            if used + len(text) > shutil.get_terminal_size().columns:
                lines.append("")
                used = 0
            lines[-1] += painted(text, strength if masked else None)
            used += len(text)
        drawn = draw(lines, drawn, pause=0.05)
    return on_step


def trace(tok, model, path):
    """An `on_step` that appends the cells of the first sequence to a file, as a JSON line.

    The cell of a token is [text, None]. The cell of a mask is [guess, λ, −H in nats, [[text, π],
    …]] with the k tokens that SM mixes. Three are listed without SM, and five for k = |V|.
    """
    k = model.sm.k if model.sm else 3
    dense = k is None  # k = |V|
    k = k or 5

    def prediction(h):
        logits = model.net.head(h)                                                 # (m, V)
        logp = (logits / model.sm.tau if dense else logits).log_softmax(-1)        # (m, V)
        shares, ids = logp.exp().topk(k)                                           # (m, k)
        shares = shares if dense else shares / shares.sum(-1, keepdim=True)
        return neg_entropy(logp).tolist(), ids.tolist(), shares.tolist()

    @torch.no_grad()
    def on_step(x, lam, guess, masks, h):
        b, l = masks                                                               # 2 × (m,)
        mine = b == 0                                                              # (m,)
        predicted = dict(zip(l[mine].tolist(), zip(*prediction(h[mine]))))
        cells = [[cell_text(tok, token), None] for token in x[0].tolist()]
        for i in (x[0] == model.mask_id).nonzero()[:, 0].tolist():
            certain = 0.0, [guess[0, i].item()], [1.0]  # just re-masked
            minus_H, ids, shares = predicted.get(i, certain)
            mixed = [[cell_text(tok, j), round(share, 4)] for j, share in zip(ids, shares)]
            cells[i] = [mixed[0][0], round(lam[0, i].item(), 4), round(minus_H, 4), mixed]
        append_jsonl(path, cells)
    return on_step
