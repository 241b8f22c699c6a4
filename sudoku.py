# SPDX-License-Identifier: MIT
"""What feedback does: a small model solves 6×6 Sudokus with it, and without.

    python sudoku.py                                                # the shipped model, 100 puzzles
    python sudoku.py --given=1..4......2........3.......5......6.   # your own, two cells per call
    python sudoku.py --checkpoint=out/quickstart/last.pt            # your own model, and its bound

Not here: the grids themselves (grids.py), and training (`python train.py quickstart`).
"""

import math
import os
import sys
from dataclasses import dataclass

from data import rng
from eval import val_ppl
from grids import NATS, cells_of, ids_of, mistake, puzzles, texts
from launch import Refused, progress, run
from mdlm import MDLM
from sample import generate_in_order
from show import draw, painted

SHIPPED = os.path.join(os.path.dirname(__file__), "results", "sudoku.safetensors")
HELD_OUT = 2000  # grids, the same as in data/sudoku
SHOWN = "entropy", 2  # the way of decoding that is drawn, and that fills --given
# Ways of decoding: (order of sample.py, cells per call)
WAYS = {("entropy", 1): "surest cell first, one per call",
        SHOWN: "surest cells first, two per call",
        ("entropy", 3): "surest cells first, three per call",
        ("random", 1): "random order, one per call"}


def sides_of(model):
    """{title: whether with feedback}, the columns of the table. A binary model has only one."""
    return {"with feedback": True, "without": False} if model.sm else {"without": False}


def fill(model, x, order, cells):
    """Fill puzzles x (n, 39) with the likeliest digits, `cells` per call.

    All puzzles must have the same number of masks.
    Returns {title: [(cells, λ, guesses) after each call]}: n texts, n lists of 36 λ, n texts.
    """
    mask, n_masks = model.mask_id, int((x[0] == model.mask_id).sum())
    steps, sides = math.ceil(n_masks / cells), {title: [] for title in sides_of(model)}
    with progress(total=len(sides) * steps, desc=WAYS[order, cells], leave=False) as bar:
        for title, soft in sides_of(model).items():

            def on_step(now, lam, guess, *_, states=sides[title]):
                states.append((cells_of(now, mask), lam[:, 1:37].tolist(), cells_of(guess, mask)))
                bar.update()
            generators = [rng("fill", i) for i in range(len(x))]
            generate_in_order(model, len(x), steps, order, top_p=1e-12, generator=generators,
                              on_step=on_step, x=x, soft=soft)
    return sides


def solved(sides):
    """For each side of `fill`'s result: a list that says which puzzles are solved."""
    return [[not mistake(cells) for cells in states[-1][0]] for states in sides.values()]


def picture(title, cells, lam, guesses):
    """A grid in lines of 21 characters, and its mistake. Guesses are darker for larger λ."""
    parts, lines = [], [f"{title:21}"]
    for cell, strength, guess in zip(cells, lam, guesses):
        parts.append(painted(f" {guess} ", strength) if cell == "." else f" {cell} ")
    for i in range(0, 36, 6):
        lines.append("{}{}{}│{}{}{}  ".format(*parts[i:i + 6]))
        if i in (6, 18):
            lines.append("─────────┼─────────  ")
    wrong = mistake(cells)
    verdict = f"✗ {wrong}" if wrong else "✓ no rule broken"
    return [*lines, f"{verdict:21}"]


def compare(sides, i):
    """Draw puzzle i of `fill`'s result, side by side: every call on a terminal, else the last."""
    drawn, calls = 0, list(zip(*sides.values()))
    if sys.stdout.isatty():
        print("Empty cells are green, darker for larger λ. The next call sees the guesses in them.")
    else:
        calls = calls[-1:]
    for call in calls:
        columns = [picture(title, cells[i], lam[i], guesses[i])
                   for title, (cells, lam, guesses) in zip(sides, call)]
        lines = ["     ".join(parts) for parts in zip(*columns)]
        drawn = draw(lines, drawn, pause=0.4)


def print_bound(model):
    """Print the bound on held-out grids in nats a grid, and their entropy.                 Eq. 2"""
    rows, bounds = ids_of(texts(HELD_OUT, rng("sudoku", "val")), model.mask_id), []  # (n, 39)
    for title, soft in sides_of(model).items():
        nats, _ = val_ppl(model, rows, soft, seed=1, batch_size=100, floor=0.0)
        bounds.append(f"{nats / HELD_OUT:.1f} {title}")
    print(f"Bound on {HELD_OUT:,} held-out grids, in nats a grid: {', '.join(bounds)}\n"
          f"(their entropy is {NATS:.1f})\n")


def demonstrate(model, count=100):
    """Print how many puzzles a model trained on data/sudoku solves, and show one of them."""
    held_out = ids_of(texts(HELD_OUT, rng("sudoku", "val"))[:count], model.mask_id)  # (count, 39)
    draws = [rng("puzzle", i) for i in range(count)]
    x = puzzles(held_out, 12, model.mask_id, draws)                                  # (count, 39)
    filled = {way: fill(model, x, *way) for way in WAYS}
    title = f"Solved of {count} puzzles, 12 of 36 cells given"
    print(f"{title:44}" + "".join(f"{side:>16}" for side in filled[SHOWN]))
    for way, name in WAYS.items():
        print(f"  {name:42}" + "".join(f"{sum(side):16}" for side in solved(filled[way])))
    print(f"  Standard error over puzzles, for one model: at most ±{math.sqrt(count) / 2:.0f}\n")
    differ = [i for i, each in enumerate(zip(*solved(filled[SHOWN]))) if len(set(each)) > 1]
    shown = differ[0] if differ else 0
    if differ:
        print(f"Two cells filled in one call do not see each other. With feedback, each has at\n"
              f"least seen the previous call's guess for the other. At two per call, {len(differ)} "
              f"puzzles are\nsolved by one side only. The first is puzzle {shown + 1}:\n")
    elif model.sm:
        print("At two per call, both sides agree on every puzzle. Puzzle 1:\n")
    else:
        print("Puzzle 1, two cells per call:\n")
    compare(filled[SHOWN], shown)


@dataclass
class Config:
    given: str = ""       # your own puzzle: 36 characters, row by row, with dots for empty cells
    checkpoint: str = ""  # a model from train.py (default: the shipped one)


def main(cfg):
    model = MDLM.load(cfg.checkpoint or SHIPPED)
    if model.cfg.length != 39:
        raise Refused(f"{cfg.checkpoint} is no model of Sudokus: its rows have {model.cfg.length} "
                      f"tokens, not 39")
    if cfg.given:
        wrong = mistake(cfg.given) or ("" if "." in cfg.given else "no cell is empty")
        if wrong:
            raise Refused(f"--given={cfg.given} cannot be filled, {wrong}: give 36 digits from 1 "
                          f"to 6, row by row, with dots for empty cells")
        return compare(fill(model, ids_of([cfg.given], model.mask_id), *SHOWN), 0)
    if cfg.checkpoint:
        print_bound(model)
    demonstrate(model)


if __name__ == "__main__":
    run(main, Config)
