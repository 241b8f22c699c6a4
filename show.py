# SPDX-License-Identifier: MIT
"""A sample while it is made, on a terminal or in a file.                                   App. C.5

    generate(model, 1, steps, on_step=show(tok, mask_id))          # drawn in place, λ in green
    generate(model, 1, steps, on_step=trace(tok, model, states))   # a list of states, for plot.py

`show` and `trace` return functions of (x, lam, guess, rows, h). x (n, L) are the token ids. Where
they are [MASK], lam is the strength of the feedback and guess is the most likely token. rows (m,)
are the masks of the flat batch that were predicted, from h (m, D). Only the first sequence is
followed.

Not here: decoding (sample.py), figures (plot.py).
"""

import shutil
import sys
import time

import torch


def cell_text(tok, mask_id):
    """A function from a token id to the text that stands for it.

    A dot stands for [MASK] and for what cannot be printed, ↵ for the end of a line.
    """
    def text_of(token):
        if token == mask_id:
            return "·"
        text = tok.decode([token])
        return "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in text)
    return text_of


def trace(tok, model, states):
    """An `on_step` that appends the cells of the first sequence to the list `states`.

    model: TwoPass.
    A cell is [text, None] for a token. For a mask it is [guess, λ, −H in nats, [[text, share], …]].
    The list has the k guesses that SM mixes, with their shares π. Without SM it has three guesses,
    and with k = |V| the five largest.
    """
    text_of, sm = cell_text(tok, model.mask_id), model.sm
    dense = sm is not None and sm.k is None  # k = |V|
    k = 5 if dense else sm.k if sm else 3

    def prediction(h):
        logits = model.net.head(h)                                                 # (m, V)
        logp = (logits / sm.tau if dense else logits).log_softmax(-1)              # (m, V)
        shares, ids = logp.exp().topk(k)                                           # (m, k)
        shares = shares if dense else shares / shares.sum(-1, keepdim=True)
        neg_entropy = (logp.exp() * logp.clamp_min(-100)).sum(-1)                  # (m,)
        return neg_entropy.tolist(), ids.tolist(), shares.tolist()

    @torch.no_grad()
    def on_step(x, lam, guess, rows, h):
        L = x.shape[1]
        mine = rows < L                                                            # (m,)
        predicted = dict(zip(rows[mine].tolist(), zip(*prediction(h[mine]))))
        cells = []
        positions = zip(x[0].tolist(), lam[0].tolist(), guess[0].tolist())
        for i, (token, strength, top) in enumerate(positions):
            if token != model.mask_id:
                cells.append([text_of(token), None])
                continue
            # A token that was just re-masked had p = 1.
            neg_entropy, ids, shares = predicted.get(i, (0.0, [top], [1.0]))
            mixed = [[text_of(j), round(share, 4)] for j, share in zip(ids, shares)]
            cells.append([mixed[0][0], round(strength, 4), round(neg_entropy, 4), mixed])
        states.append(cells)
    return on_step


def frame(x, lam, guess, mask_id, text_of, width):
    """The lines of one picture. A token is bold. A mask shows its guess on green, deeper with λ.

    x, lam, guess: lists of length L.   width: characters in a line.   Returns a list of strings.
    Six by six digits are drawn as a Sudoku.
    """
    cells, styles = [], []
    for token, strength, top in zip(x, lam, guess):
        masked, pale = token == mask_id, int(220 * (1 - strength))
        cells.append(text_of(top if masked else token)[:width])
        styles.append(f"48;2;{pale};{100 + pale * 2 // 3};{pale};38;2;0;0;0" if masked else "1")
    if len(cells) == 39 and set(cells[1:37]) <= set("123456·"):  # between BOS and two EOS
        return grid_lines(cells[1:37], styles[1:37])
    lines, used = [""], 0
    for cell, style in zip(cells, styles):
        if used + len(cell) > width:
            lines.append("")
            used = 0
        lines[-1] += f"\x1b[{style}m{cell}\x1b[0m"
        used += len(cell)
    return lines


def grid_lines(cells, styles):
    """The lines of a 6×6 Sudoku, with room between its boxes of 2×3.   cells, styles: 36 each."""
    lines = []
    for i in range(0, 36, 3):  # three cells of a box
        if i in (12, 24):
            lines.append("")
        if i % 6 == 0:
            lines.append("")
        three = zip(cells[i:i + 3], styles[i:i + 3])
        lines[-1] += "".join(f"\x1b[{style}m {cell} \x1b[0m" for cell, style in three) + "  "
    return lines


def show(tok, mask_id, pause=0.05):
    """An `on_step` that redraws the first sequence in place, or prints up to five lines of it.

    tok: tiktoken.Encoding.
    pause: seconds per picture. Without it a small model is too fast to watch.
    """
    text_of = cell_text(tok, mask_id)
    drawn = 0    # lines of the last picture
    shown = -1   # quarters that were visible in the last plain line

    def on_step(x, lam, guess, *_):
        nonlocal drawn, shown
        x, lam, guess = x[0].tolist(), lam[0].tolist(), guess[0].tolist()
        if not sys.stdout.isatty():
            visible = 1 - x.count(mask_id) / len(x)
            quarters = int(4 * visible)
            if quarters > shown or quarters < shown - 1:  # or the next sequence begins
                print(f"{visible:4.0%} " + "".join(map(text_of, x)), flush=True)
                shown = quarters
            return
        width, height = shutil.get_terminal_size()
        lines = frame(x, lam, guess, mask_id, text_of, width)[1 - max(2, height):]
        # Go back to the start of the last picture, and clear it.
        back = f"\x1b[{drawn}F\x1b[J" if drawn else ""
        print(back + "\n".join(lines), flush=True)
        drawn = len(lines)
        time.sleep(pause)
    return on_step
