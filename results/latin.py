# SPDX-License-Identifier: MIT
"""6×6 Latin squares: six different digits in every row and column, without a rule for boxes.

    python results/latin.py    # writes data/latin, in the format of data/sudoku
"""

import functools
import itertools
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data  # noqa: E402

OUT = "data/latin"


@functools.cache
def canonical():
    """All Latin squares with the first row 123456: (1128960, 36) uint8, digits from 0."""
    rows = torch.tensor(list(itertools.permutations(range(6))))                      # (720, 6)
    apart = (rows[:, None] != rows).all(-1)                                          # (720, 720)
    found = torch.zeros(1, 1, dtype=torch.long)  # n grids of h rows, as row numbers: (n, h)
    for _ in range(5):
        parts = []
        for part in found.split(50_000):
            fits = apart[part[:, 0]]                                                 # (n, 720)
            for above in part[:, 1:].unbind(1):
                fits = fits & apart[above]
            grid, row = fits.nonzero(as_tuple=True)
            parts.append(torch.cat((part[grid], row[:, None]), dim=1))               # (n', h + 1)
        found = torch.cat(parts)
    return rows.to(torch.uint8)[found].flatten(1)


def texts(n, generator):
    """n squares drawn uniformly, as texts of 36 digits."""
    which = torch.randint(len(canonical()), (n,), generator=generator)               # (n,)
    digits = torch.rand(n, 6, generator=generator).argsort(-1)                       # (n, 6)
    cells = digits.gather(1, canonical()[which].long()) + 1                          # (n, 36)
    return ["".join(map(str, row)) for row in cells.tolist()]


def right(cells):
    """Whether 36 characters are a Latin square."""
    rows = [cells[i:i + 6] for i in range(0, 36, 6)]
    columns = [cells[i::6] for i in range(6)]
    return all("".join(sorted(group)) == "123456" for group in rows + columns)


def main():
    assert len(canonical()) == 1_128_960  # of 812,851,200 / 6! in the literature
    docs = texts(200_000, data.rng("latin", "train")) + texts(2000, data.rng("latin", "val"))
    assert all(map(right, docs))
    print(data.prepare(docs, OUT, data.tokenizer("bytes"), 2000, "latin"))


if __name__ == "__main__":
    main()
