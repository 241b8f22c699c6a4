# SPDX-License-Identifier: MIT
"""6×6 Sudokus: a language whose entropy is known, so that a bound can be compared with the truth.

    python sudoku.py                                                # the shipped model, 100 puzzles
    python sudoku.py --given=1..4......2........3.......5......6.   # your own puzzle
    python sudoku.py --checkpoint=out/quickstart/last.pt            # your own model

Not here: the stream of tokens (data.py), training (`train.py quickstart`).
"""

import functools
import itertools
import math
import os
import re
import sys
from dataclasses import dataclass

import torch

NATS = math.log(28_200_960)  # entropy of a grid drawn uniformly, by the count below

# The cells of which each digit stands in one. Boxes have two rows and three columns.
UNITS = {f"row {n}": range(6 * n - 6, 6 * n) for n in range(1, 7)}
UNITS |= {f"column {n}": range(n - 1, 36, 6) for n in range(1, 7)}
UNITS |= {f"box {n}": [first + i for i in (0, 1, 2, 6, 7, 8)]
          for n, first in enumerate((0, 3, 12, 15, 24, 27), 1)}


@functools.cache
def grids():
    """All 6×6 Sudoku grids with the first row 123456: (39168, 36) uint8, digits from 0.

    Any grid is one of these with its digits exchanged, so there are 39,168 · 6! = 28,200,960.
    """
    def complete(grid, rows):
        """All grids that begin with `grid`. rows: those that repeat no digit in a column of it."""
        if len(grid) == 6:
            yield sum(grid, ())
        for row in rows:
            # The second row of a box must not repeat the three digits above it.
            if len(grid) % 2 == 0 or not set(row[:3]) & set(grid[-1][:3]):
                yield from complete(grid + [row], [other for other in rows if fit(row, other)])

    def fit(row, other):
        return all(a != b for a, b in zip(row, other))

    first, *others = itertools.permutations(range(6))
    found = complete([first], [row for row in others if fit(row, first)])
    return torch.tensor(list(found), dtype=torch.uint8)


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
    for name, unit in UNITS.items():
        digits = [cells[i] for i in unit if cells[i] != "."]
        for digit in digits:
            if digits.count(digit) > 1:
                return f"{digit} twice in {name}"
    return ""


def possible(cells):
    """Whether any grid has these cells. cells: digits, dots where empty."""
    at = [i for i in range(36) if cells[i] != "."]                                   # m of 36
    digits = torch.tensor([int(cells[i]) for i in at])                               # (m,)
    found = grids()[:, at]                                                           # (39168, m)
    # Any two digits of a grid may be exchanged: so only which cells are equal counts.
    alike = (found[:, :, None] == found[:, None]) == (digits[:, None] == digits)     # (…, m, m)
    return bool(alike.flatten(1).all(1).any())


def right(samples):
    """{right: share of whole grids, right_se: its standard error, distinct: how many differ among
    these, commonest: share of the most frequent one, if digits may be exchanged}.
    """
    texts = [re.sub(r"<\|\w+\|>", "", text) for text in samples]  # without ends of a document
    found = [text for text in texts if "." not in text and not mistake(text)]
    relabelled = [grid.translate(str.maketrans(grid[:6], "123456")) for grid in found]
    commonest = max(map(relabelled.count, set(relabelled)), default=0)
    share = len(found) / len(samples)
    return {"right": share, "right_se": math.sqrt(share * (1 - share) / len(samples)),
            "distinct": len(set(found)), "commonest": commonest / max(1, len(found))}


def ids_of(cells, mask_id):
    """(n, 39) ids of n texts of 36 cells: BOS, the cells, EOS and EOS. A dot is a mask."""
    ids = {".": mask_id} | {digit: ord(digit) for digit in "123456"}
    return torch.tensor([[256, *map(ids.get, text), 257, 257] for text in cells])


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
    n_masks = int((x[0] == model.mask_id).sum())
    with progress(total=len(sides) * n_masks, desc="filling", leave=False) as bar:
        for title, states in sides.items():
            def on_step(now, lam, guess, *_, states=states):
                cells = cells_of(now, model.mask_id)
                guesses = cells_of(guess, model.mask_id)
                states.append((cells, lam[:, 1:37].tolist(), guesses))
                bar.update()
            generators = [rng("fill", i) for i in range(len(x))]
            generate_in_order(model, len(x), n_masks, order, 1.0, generators, on_step, x,
                              soft=title == "with feedback")
    return sides


def picture(title, cells, lam, guesses):
    """The lines of a grid, 21 wide, and its mistake. A mask is a guess on green, deeper with λ."""
    from show import painted
    parts, lines = [], [title]
    for cell, strength, guess in zip(cells, lam, guesses):
        parts.append(painted(f" {guess} ", strength) if cell == "." else f" {cell} ")
    for i in range(0, 36, 6):
        lines.append("".join(parts[i:i + 3]) + "│" + "".join(parts[i + 3:i + 6]) + "  ")
        if i in (6, 18):
            lines.append("─────────┼─────────")
    wrong, verdict = mistake(cells), ""
    if "." not in cells:
        verdict = f"✗ {wrong}" if wrong else "✓ right"
    return [*lines, verdict]


def compare(sides, i):
    """Draws puzzle i of what `fill` returns, side by side, or, if nobody watches, its end alone."""
    from show import draw
    drawn, calls = 0, list(zip(*sides.values()))
    if sys.stdout.isatty():
        print("green: what the next call sees of a guess, the deeper the larger λ")
    else:
        calls = calls[-1:]
    for call in calls:
        columns = []
        for title, (cells, lam, guesses) in zip(sides, call):
            columns.append(picture(title, cells[i], lam[i], guesses[i]))
        lines = ["     ".join(f"{part:21}" for part in parts) for parts in zip(*columns)]
        drawn = draw(lines, drawn, pause=0.2)


def demonstrate(model, count=100):
    """Prints how many puzzles a model of `data.py sudoku` gets right, and shows one of them."""
    from data import rng
    grids = texts(2000, rng("sudoku", "val"))[:count]  # of those that are held out
    draws = [rng("puzzle", i) for i in range(count)]
    x = puzzles(ids_of(grids, model.mask_id), 12, model.mask_id, draws)              # (count, 39)
    rows = []
    for name, order in ("any cell next", "random"), ("the surest cell next", "entropy"):
        sides = fill(model, x, order)
        solved = [[not mistake(cells) for cells in states[-1][0]] for states in sides.values()]
        rows.append(f"  {name:38}" + "".join(f"{sum(found):16}" for found in solved))
    title = f"{count} puzzles, 12 of 36 cells given: right"
    print(f"{title:40}" + "".join(f"{way:>16}" for way in sides))
    print(*rows, sep="\n")
    print(f"  ± at most {math.sqrt(count) / 2:.0f}: a standard error over puzzles, of one model")
    differ = [i for i, found in enumerate(zip(*solved)) if len(set(found)) > 1]
    if model.sm:
        print(f"\nThe surest cell next: the two differ in {len(differ)} of {count} puzzles.")
    shown, why = 0, ""
    if differ:
        shown, why = differ[0], ", because it is the first of these"
    print(f"Puzzle {shown + 1} is shown{why}:")
    compare(sides, shown)


@dataclass
class Config:
    given: str = ""     # your own puzzle: 36 characters, row by row, a dot for an empty cell
    checkpoint: str = os.path.join(os.path.dirname(__file__), "results", "sudoku.safetensors")


def main(cfg):
    from launch import Refused
    from mdlm import MDLM
    if cfg.given:
        wrong = mistake(cfg.given)
        if not wrong and not possible(cfg.given):
            wrong = "no grid has these cells"
        if wrong:
            raise Refused(f"--given={cfg.given} cannot be filled, {wrong}: give 36 digits from 1 "
                          f"to 6, row by row, with dots for empty cells")
    model = MDLM.load(cfg.checkpoint)
    if cfg.given:
        x = ids_of([cfg.given], model.mask_id)                                       # (1, 39)
        compare(fill(model, x, "entropy"), 0)
    else:
        demonstrate(model)


if __name__ == "__main__":
    from launch import run
    run(main, Config)
