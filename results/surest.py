# SPDX-License-Identifier: MIT
"""Sudoku grids filled surest cell first, checked after every cell: can the grid still end right?

    python results/surest.py --checkpoint=results/sudoku.safetensors              # empty grids
    python results/surest.py --checkpoint=results/sudoku.safetensors --given=12   # puzzles
    python results/tied.py results/surest.py --checkpoint=…       # so with exact.py, permuted.py

Only digits can be drawn: without this rule, a model that is sure of <|eos|> in one cell of an empty
grid writes it there first. The feedback still sees all tokens. All completions of a grid are known
(grids.canonical), so what is left of them after each cell is exact, and so is the true probability
of a digit. Puzzles are cells of held-out grids; any completion by the rules is right.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data  # noqa: E402
import grids as sudoku  # noqa: E402
import sample  # noqa: E402
from checkpoint import git_version  # noqa: E402
from launch import run, write_text  # noqa: E402
from mdlm import MDLM  # noqa: E402
from sample import nucleus  # noqa: E402

DIGITS = slice(ord("1"), ord("7"))


@dataclass
class Config:
    checkpoint: str = "results/sudoku.safetensors"  # what `python checkpoint.py` can describe
    given: Annotated[int, 0, 35] = 0                # cells of 36
    calls: Annotated[int, 1, 36] | None = None      # of the model (default: one for each cell)
    top_p: Annotated[float, 1e-12, 1] = 1.0         # nucleus, of the digits
    count: Annotated[int, 1, 2000] = 1000
    out: str = "out/surest.json"


def only_digits(probs, top_p=1.0):
    """The nucleus of the digits alone, in the place of sample.nucleus. probs: (n, V)."""
    digits = torch.zeros_like(probs)                                               # (n, V)
    digits[:, DIGITS] = probs[:, DIGITS]
    return nucleus(digits / digits.sum(-1, keepdim=True), top_p)                   # (n, V)


class Completions:
    """The grids that a partly filled grid can become.

    fit: (n, 36) uint8, those of grids.canonical that fit. Each stands for all exchanges of digits,
    so what counts is which cells are equal, and a digit that is not seen yet may be any.
    """

    def __init__(self, cells):
        self.fit, self.seen = sudoku.canonical().numpy(), {}
        for cell, digit in cells.items():
            self.add(cell, digit)

    def probability(self, cell, digit):
        """Of a digit, if all completions are equally likely."""
        if digit in self.seen:
            return (self.fit[:, cell] == self.fit[:, self.seen[digit]]).mean().item()
        old = sum(self.probability(cell, other) for other in self.seen)
        return (1 - old) / (6 - len(self.seen))

    def add(self, cell, digit):
        fits = np.ones(len(self.fit), bool)                                        # (n,)
        for other, place in self.seen.items():
            equal = self.fit[:, cell] == self.fit[:, place]                        # (n,)
            fits &= equal if other == digit else ~equal
        self.fit = self.fit[fits]
        self.seen.setdefault(digit, cell)


def fill(model, x, calls, soft, top_p=1.0):
    """Every cell that is filled, in order (those of one call: from the left), for x (n, 39).

    Returns [[(cell, digit, probability of the digit, likeliest digit, its probability)]], digits
    from 1, probabilities of the model, before the nucleus.
    """
    order = [[] for _ in x]

    def on_step(now, lam, guess, masks, h):
        p = only_digits(model.net.head(h).softmax(-1))                             # (m, V)
        best, token = p.max(-1)                                                    # 2 × (m,)
        row, column = masks                                                        # 2 × (m,)
        drawn = now[masks]                                                         # (m,)
        for i in (drawn != model.mask_id).nonzero()[:, 0].tolist():
            digit = drawn[i].item() - ord("0")
            order[row[i]].append((column[i].item() - 1, digit, p[i, drawn[i]].item(),
                                  token[i].item() - ord("0"), best[i].item()))

    generators = [data.rng("sample", 1, i) for i in range(len(x))]
    sample.generate_in_order(model, len(x), calls, "entropy", top_p, generators, on_step, x, soft)
    return order


def judge(given, order):
    """What became of each grid.   given: [{cell: digit}].   order: from `fill`.

    Lists by the number of cells filled before. completable: share of all grids, after the cell.
    The others are about grids that could still be completed: count (how many), sure (the model's
    probability of its likeliest digit), true (that of the exact posterior), wrong (share of digits
    with which the grid cannot end right), sure_wrong (the model's probability of these digits).
    """
    n, cells = len(order), len(order[0])
    total = {name: [0.0] * cells for name in ("count", "sure", "true", "wrong", "sure_wrong")}
    for known, picks in zip(given, order):
        completions = Completions(known)
        for i, (cell, digit, p, likeliest, sure) in enumerate(picks):
            true = completions.probability(cell, likeliest)
            completions.add(cell, digit)
            wrong = not len(completions.fit)
            for name, value in zip(total, (1, sure, true, wrong, wrong * p)):
                total[name][i] += value
            if wrong:
                break
    alive = [count - wrong for count, wrong in zip(total["count"], total["wrong"])]
    found = {"right": alive[-1] / n, "completable": [x / n for x in alive]}
    for name, values in total.items():
        of = total["wrong"] if name == "sure_wrong" else total["count"]
        means = [round(value / max(1, m), 5) for value, m in zip(values, of)]
        found[name] = total[name] if name == "count" else means
    return found


def main(cfg):
    sample.nucleus = only_digits
    model = MDLM.load(cfg.checkpoint)
    texts = sudoku.texts(2000, data.rng("sudoku", "val"))[:cfg.count]
    draws = [data.rng("puzzle", i) for i in range(cfg.count)]
    grids = sudoku.ids_of(texts, model.mask_id)                                    # (n, 39)
    x = sudoku.puzzles(grids, cfg.given, model.mask_id, draws)                     # (n, 39)
    given = [{i: int(c) for i, c in enumerate(cells) if c != "."}
             for cells in sudoku.cells_of(x, model.mask_id)]
    calls, found = cfg.calls or 36 - cfg.given, {}
    for soft in (True, False) if model.sm else (False,):
        kind = "soft" if soft else "binary"
        found[kind] = judge(given, fill(model, x, calls, soft, cfg.top_p))
        print(f"{cfg.checkpoint}, {cfg.given} given, {kind}: {100 * found[kind]['right']:.1f} %")
    settings = {"checkpoint": cfg.checkpoint, "given": cfg.given, "calls": calls,
                "top_p": cfg.top_p, "n": cfg.count}
    write_text(cfg.out, json.dumps({**settings, "git": git_version(), **found}) + "\n")


if __name__ == "__main__":
    run(main, Config)
