# SPDX-License-Identifier: MIT
"""6×6 Sudokus: a language whose entropy is known, so that a bound can be compared with the truth.

    python sudoku.py                                                # the shipped model, 100 puzzles
    python sudoku.py --given=1..4......2........3.......5......6.   # your own puzzle
    python sudoku.py --checkpoint=out/quickstart/last.pt            # your own model
"""

import functools
import itertools
import math
import os
import re
import sys
from dataclasses import dataclass

import torch

# Entropy of a grid drawn uniformly: any is one of `grids` with its digits exchanged, in 6! ways.
NATS = math.log(39_168 * 720)


@functools.cache
def grids():
    """All 6×6 Sudoku grids with the first row 123456: (39168, 36) uint8, digits from 0."""
    rows = torch.tensor(list(itertools.permutations(range(6))))                      # (720, 6)
    # Which two rows may stand in one grid, and which in one box, where no left half may repeat.
    apart = (rows[:, None] != rows).all(-1)                                          # (720, 720)
    boxed = (rows[:, None, :3, None] != rows[:, None, :3]).flatten(2).all(-1)        # (720, 720)
    found = torch.zeros(1, 1, dtype=torch.long)  # n grids of h rows, as numbers of rows: (n, h)
    for h in range(1, 6):
        fits = apart[found].all(1)                                                   # (n, 720)
        if h % 2:  # the second row of a box
            fits &= boxed[found[:, -1]]
        grid, row = fits.nonzero(as_tuple=True)
        found = torch.cat((found[grid], row[:, None]), dim=1)                        # (n', h + 1)
    return rows[found].flatten(1).to(torch.uint8)


def texts(n, generator):
    """n grids drawn uniformly, as texts of 36 digits. With EOS, one fills a row of L = 39."""
    which = torch.randint(len(grids()), (n,), generator=generator)                   # (n,)
    digits = torch.rand(n, 6, generator=generator).argsort(-1)                       # (n, 6)
    cells = digits.gather(1, grids()[which].long()) + 1                              # (n, 36)
    return ["".join(map(str, row)) for row in cells.tolist()]


def puzzles(x, given, mask_id, generators):
    """Grids x (n, 39), of which `given` random cells are left. generators: one for each grid."""
    x = x.clone()                                                                    # (n, 39)
    for row, generator in zip(x, generators):
        order = torch.randperm(36, generator=generator)                              # (36,)
        row[1 + order[given:]] = mask_id
    return x


def mistake(cells):
    """The first rule that these cells break, in words, or "". cells: digits, dots where empty."""
    if not re.fullmatch("[1-6.]{36}", cells):
        return "not 36 digits"
    seen = set()
    for i, digit in enumerate(cells):
        row, column = divmod(i, 6)
        box = row // 2 * 2 + column // 3  # of two rows and three columns
        for place in f"row {row + 1}", f"column {column + 1}", f"box {box + 1}":
            if digit != "." and (digit, place) in seen:
                return f"{digit} twice in {place}"
            seen.add((digit, place))
    return ""


def right(samples):
    """{right: share of whole grids, right_se: its standard error, distinct: how many differ}"""
    texts = [re.sub(r"<\|\w+\|>", "", text) for text in samples]  # without ends of a document
    found = [text for text in texts if "." not in text and not mistake(text)]
    share = len(found) / len(samples)
    return {"right": share, "right_se": math.sqrt(share * (1 - share) / len(samples)),
            "distinct": len(set(found))}


def ids_of(cells, mask_id):
    """(n, 39) ids of n texts of 36 cells: BOS, the cells, EOS and EOS. A dot is a mask."""
    x = torch.tensor([[256, *text.encode(), 257, 257] for text in cells])            # (n, 39)
    return x.masked_fill(x == ord("."), mask_id)


def cells_of(x, mask_id):
    """The reverse: n texts of the cells of x (n, 39), in which ? is neither a digit nor a mask."""
    cells = {mask_id: "."} | {ord(digit): digit for digit in "123456"}
    return ["".join(cells.get(i, "?") for i in row) for row in x[:, 1:37].tolist()]


def fill(model, x, order):
    """Puzzles x (n, 39) with equally many masks, filled with and without feedback, one cell a call:
    {title: [(cells, λ, guesses) after each call]}, each of them n texts or lists of 36.
    """
    from data import rng
    from launch import progress
    from sample import generate_in_order
    sides = {"with feedback": [], "without": []} if model.sm else {"without": []}
    mask, n_masks = model.mask_id, int((x[0] == model.mask_id).sum())
    with progress(total=len(sides) * n_masks, desc="filling", leave=False) as bar:
        for title, states in sides.items():
            def on_step(now, lam, guess, *_, states=states):
                states.append((cells_of(now, mask), lam[:, 1:37].tolist(), cells_of(guess, mask)))
                bar.update()
            generators = [rng("fill", i) for i in range(len(x))]
            generate_in_order(model, len(x), n_masks, order, 1.0, generators, on_step, x,
                              soft=title == "with feedback")
    return sides


def picture(title, cells, lam, guesses):
    """The lines of a grid, 21 wide, and its mistake. A mask is a guess on green, deeper with λ."""
    from show import painted
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
    """Draws puzzle i of what `fill` returns, side by side, or, if nobody watches, its end alone."""
    from show import draw
    drawn, calls = 0, list(zip(*sides.values()))
    if not sys.stdout.isatty():
        calls = calls[-1:]
    for call in calls:
        columns = [picture(title, cells[i], lam[i], guesses[i])
                   for title, (cells, lam, guesses) in zip(sides, call)]
        lines = ["     ".join(parts) for parts in zip(*columns)]
        drawn = draw(lines, drawn, pause=0.2)


def demonstrate(model, count=100):
    """Prints how many puzzles a model of `data.py sudoku` gets right, and shows one of them."""
    from data import rng
    held_out = ids_of(texts(2000, rng("sudoku", "val"))[:count], model.mask_id)      # (count, 39)
    draws = [rng("puzzle", i) for i in range(count)]
    x = puzzles(held_out, 12, model.mask_id, draws)                                  # (count, 39)
    rows = []
    for name, order in ("any cell next", "random"), ("the surest cell next", "entropy"):
        sides = fill(model, x, order)
        solved = [[not mistake(cells) for cells in states[-1][0]] for states in sides.values()]
        rows.append(f"  {name:38}" + "".join(f"{sum(found):16}" for found in solved))
    title = f"{count} puzzles, 12 of 36 cells given: right"
    print(f"{title:40}" + "".join(f"{way:>16}" for way in sides), *rows, sep="\n")
    print(f"  ± at most {math.sqrt(count) / 2:.0f}: a standard error over puzzles, of one model")
    differ = [i for i, found in enumerate(zip(*solved)) if len(set(found)) > 1]
    shown = differ[0] if differ else 0
    print(f"\nSurest next, the two differ in {len(differ)} of {count}. Puzzle {shown + 1} is the "
          f"first:\ngreen is a guess that the next call sees, the deeper the larger λ")
    compare(sides, shown)


@dataclass
class Config:
    given: str = ""     # your own puzzle: 36 characters, row by row, a dot for an empty cell
    checkpoint: str = os.path.join(os.path.dirname(__file__), "results", "sudoku.safetensors")


def main(cfg):
    from launch import Refused
    from mdlm import MDLM
    if cfg.given and mistake(cfg.given):
        raise Refused(f"--given={cfg.given} cannot be filled, {mistake(cfg.given)}: give 36 digits "
                      f"from 1 to 6, row by row, with dots for empty cells")
    model = MDLM.load(cfg.checkpoint)
    if not cfg.given:
        return demonstrate(model)
    compare(fill(model, ids_of([cfg.given], model.mask_id), "entropy"), 0)


if __name__ == "__main__":
    from launch import run
    run(main, Config)
