# SPDX-License-Identifier: MIT
"""6×6 Sudokus: a language whose entropy is known, so that a model's bound can be compared with it.

    python data.py sudoku    # grids to train on
    python sudoku.py         # a model trained on them solves puzzles
"""

import functools
import itertools
import math
import re

import torch

# Entropy of a uniform draw: there are 39,168 `canonical` grids, each with 6! = 720 relabelings.
NATS = math.log(39_168 * 720)


@functools.cache
def canonical():
    """All 6×6 Sudoku grids whose first row is 123456: (39168, 36) uint8, with 1 stored as 0."""
    rows = torch.tensor(list(itertools.permutations(range(6))))                      # (720, 6)
    # apart: rows that differ in every column can be in one grid. boxed: they can share boxes if no
    # digit is in both of their left halves. Then none is in both right halves, either.
    apart = (rows[:, None] != rows).all(-1)                                          # (720, 720)
    boxed = (rows[:, None, :3, None] != rows[:, None, :3]).flatten(2).all(-1)        # (720, 720)
    found = torch.zeros(1, 1, dtype=torch.long)  # n grids of h rows, as row numbers: (n, h)
    for h in range(1, 6):
        fits = apart[found].all(1)                                                   # (n, 720)
        if h % 2:  # the second row of its boxes
            fits &= boxed[found[:, -1]]
        grid, row = fits.nonzero(as_tuple=True)
        found = torch.cat((found[grid], row[:, None]), dim=1)                        # (n', h + 1)
    return rows[found].flatten(1).to(torch.uint8)


def texts(n, generator):
    """n grids drawn uniformly, as texts of 36 digits. With EOS, each fills a row of L = 39."""
    which = torch.randint(len(canonical()), (n,), generator=generator)               # (n,)
    digits = torch.rand(n, 6, generator=generator).argsort(-1)                       # (n, 6)
    cells = digits.gather(1, canonical()[which].long()) + 1                          # (n, 36)
    return ["".join(map(str, row)) for row in cells.tolist()]


def puzzles(x, given, mask_id, generators):
    """Grids x (n, 39) with all but `given` random cells masked. generators: one per grid."""
    x = x.clone()                                                                    # (n, 39)
    for row, generator in zip(x, generators):
        order = torch.randperm(36, generator=generator)                              # (36,)
        row[1 + order[given:]] = mask_id
    return x


def mistake(cells):
    """The first broken rule, in words, or "". cells: 36 digits, with dots for empty cells."""
    if not re.fullmatch("[1-6.]{36}", cells):
        return "not 36 digits"
    seen = set()
    for i, digit in enumerate(cells):
        row, column = divmod(i, 6)
        box = row // 2 * 2 + column // 3  # boxes have two rows and three columns
        for place in f"row {row + 1}", f"column {column + 1}", f"box {box + 1}":
            if digit != "." and (digit, place) in seen:
                return f"{digit} twice in {place}"
            seen.add((digit, place))
    return ""


def right(samples):
    """{right: share of correct grids, right_se: its standard error, distinct: different ones}"""
    texts = [re.sub(r"<\|\w+\|>", "", text) for text in samples]  # drop BOS and EOS
    found = [text for text in texts if "." not in text and not mistake(text)]
    share = len(found) / len(samples)
    return {"right": share, "right_se": math.sqrt(share * (1 - share) / len(samples)),
            "distinct": len(set(found))}


def ids_of(cells, mask_id):
    """Ids (n, 39) of n texts of 36 cells: BOS, the cells, two EOS. A dot becomes a mask."""
    x = torch.tensor([[256, *text.encode(), 257, 257] for text in cells])            # (n, 39)
    return x.masked_fill(x == ord("."), mask_id)


def cells_of(x, mask_id):
    """The reverse of `ids_of`, for x (n, 39). A ? is neither a digit nor a mask."""
    cells = {mask_id: "."} | {ord(digit): digit for digit in "123456"}
    return ["".join(cells.get(i, "?") for i in row) for row in x[:, 1:37].tolist()]
