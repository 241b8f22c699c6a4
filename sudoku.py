# SPDX-License-Identifier: MIT
"""6×6 Sudokus: a language whose entropy is known, so that a bound can be compared with the truth.

    grids       all grids, by a count             NATS       the entropy of a grid drawn uniformly
    texts       grids as documents to learn       puzzles    grids of which some cells are given
    right       how many samples are whole grids without a mistake

Not here: the stream of tokens (data.py), the model of it (`train.py quickstart`).
"""

import functools
import itertools
import math
import re

import numpy as np
import torch

NATS = math.log(28_200_960)  # entropy of a grid drawn uniformly, by the count below


@functools.cache
def grids():
    """All 6×6 Sudoku grids with the first row 123456: (39168, 36) uint8, digits from 0.

    Rows, columns and boxes of 2×3 hold each digit once. Any grid is one of these with its digits
    exchanged, so there are 39,168 · 6! = 28,200,960 of them.
    """
    rows = list(itertools.permutations(range(6)))
    # The rows that can be in one grid with this row: they differ from it in every column.
    fits = {row: {other for other in rows if all(a != b for a, b in zip(row, other))}
            for row in rows}

    def complete(grid, candidates):
        if len(grid) == 6:
            yield sum(grid, ())
        for row in candidates:
            # The second row of a box must not repeat the three digits above it.
            if len(grid) % 2 == 0 or not set(row[:3]) & set(grid[-1][:3]):
                yield from complete(grid + [row], [c for c in candidates if c in fits[row]])

    first = rows[0]
    return torch.tensor(list(complete([first], sorted(fits[first]))), dtype=torch.uint8)


def texts(n, generator):
    """n grids drawn uniformly, as texts of 36 digits, row by row.

    With its EOS, a grid is a document of 37 tokens. So rows of L = 39, which hold 37 tokens of the
    stream, hold one whole grid each.
    """
    which = torch.randint(len(grids()), (n,), generator=generator)                   # (n,)
    digits = torch.rand(n, 6, generator=generator).argsort(-1)                       # (n, 6)
    cells = digits.gather(1, grids()[which].long()) + 1                              # (n, 36)
    return ["".join(map(str, row)) for row in cells.tolist()]


def puzzles(x, given, mask_id, generators):
    """Grids of which `given` random cells are left, and their ends. All others become masks.

    x: (n, 39) ids.   given: 0 to 36.   generators: one for each grid.   Returns (n, 39).
    """
    x = x.clone()                                                                    # (n, 39)
    for row, generator in zip(x, generators):
        order = torch.randperm(36, generator=generator)                              # (36,)
        row[1 + order[given:]] = mask_id
    return x


def right(samples):
    """How many samples are whole 6×6 grids, and how varied these are.

    samples: n texts. Ends of a document are left out; what is left must be 36 digits, of which each
        row, column and box of 2×3 has all six.
    Returns {right: share, right_se: its standard error, distinct: different grids among the right
    ones, commonest: share of the most frequent one, where two grids that differ by an exchange
    of digits count as one}.
    """
    found = []
    for text in samples:
        text = re.sub(r"<\|\w+\|>", "", text)
        if re.fullmatch("[1-6]{36}", text):
            grid = np.array(list(text)).reshape(6, 6)
            boxes = grid.reshape(3, 2, 2, 3).transpose(0, 2, 1, 3).reshape(6, 6)
            units = np.sort(np.concatenate((grid, grid.T, boxes)))                   # (18, 6)
            if (units == list("123456")).all():
                found.append(text)
    relabelled = [grid.translate(str.maketrans(grid[:6], "123456")) for grid in found]
    commonest = max(map(relabelled.count, set(relabelled)), default=0)
    share = len(found) / len(samples)
    return {"right": share, "right_se": math.sqrt(share * (1 - share) / len(samples)),
            "distinct": len(set(found)), "commonest": commonest / max(1, len(found))}
