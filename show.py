# SPDX-License-Identifier: MIT
"""Watch a sample being decoded on a terminal.                                              App. C.5

    generate(model, 1, steps, on_step=show(tok, mask_id))           # drawn in place, λ in green

sample.generate describes what an `on_step` gets. Only the first sequence of a batch is shown.
"""

import shutil
import sys
import time


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
    lines = lines[1 - max(2, shutil.get_terminal_size().lines):]  # the last ones that fit
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
