# SPDX-License-Identifier: MIT
"""Puzzles filled by several cells a call: the plan is in questions.md, "Fewer calls".

    python results/fewer.py --checkpoint=out/sudoku/six-ours-31/step-6000.pt --name=ours-31
    python results/selfcond.py results/fewer.py --checkpoint=… --name=selfcond-31
    python results/fewer.py --table             # of the lines in results/fewer.jsonl

A run appends one line for each decoding. A line that is there is not made again.
"""

import itertools
import math
import os
import sys
from dataclasses import dataclass
from statistics import mean, stdev

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from surest import only_digits  # noqa: E402

import data  # noqa: E402
import grids as sudoku  # noqa: E402
import sample  # noqa: E402
from checkpoint import git_version  # noqa: E402
from launch import append_jsonl, read_jsonl, run  # noqa: E402
from mdlm import MDLM  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
ARMS = "binary", "ours", "constant3", "selfcond", "deep"
SEEDS = range(31, 37)
MASKS = 24                                                     # of 36 cells
WAYS = [("entropy", cells) for cells in (1, 2, 3, 4, 6)] + [("random", 1)]
LIKELIEST = 1e-12                                              # as top_p: one digit is left


@dataclass
class Config:
    checkpoint: str = ""
    name: str = ""               # ARM-SEED
    count: int = 500
    out: str = os.path.join(HERE, "fewer.jsonl")
    table: bool = False


def decode(cfg):
    """Appends the share of puzzles solved, for each way to decode, with feedback and without."""
    sample.nucleus = only_digits
    model = MDLM.load(cfg.checkpoint)
    mask = model.mask_id
    texts = sudoku.texts(cfg.count, data.rng("fewer calls"))
    draws = [data.rng("fewer calls", i) for i in range(cfg.count)]
    x = sudoku.puzzles(sudoku.ids_of(texts, mask), 36 - MASKS, mask, draws)        # (n, 39)
    there = read_jsonl(cfg.out) if os.path.exists(cfg.out) else []
    there = {(line["name"], line["order"], line["cells"], line["soft"]) for line in there}
    for order, cells in WAYS:
        for soft in (True, False) if model.sm else (False,):
            if (cfg.name, order, cells, soft) in there:
                continue
            generators = [data.rng("sample", 1, i) for i in range(cfg.count)]
            ids, _ = sample.generate_in_order(model, cfg.count, MASKS // cells, order, LIKELIEST,
                                              generators, x=x, soft=soft)
            solved = [not sudoku.mistake(text) for text in sudoku.cells_of(ids, mask)]
            line = {"name": cfg.name, "order": order, "cells": cells, "soft": soft,
                    "solved": sum(solved) / cfg.count, "n": cfg.count,
                    "step": model.info["step"], "git": git_version()}
            append_jsonl(cfg.out, line)
            print(line, flush=True)


def p_value(t, df):
    """Of a two-sided test: 2 ∫_t^∞ of Student's density, by the trapezoid rule."""
    scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    n = 100_000  # x = |t| + u / (1 − u) maps [0, 1) to the tail
    total = 0.0
    for i in range(n):
        u = (i + 0.5) / n
        x = abs(t) + u / (1 - u)
        total += (1 + x * x / df) ** (-(df + 1) / 2) / (1 - u) ** 2
    return 2 * scale * total / n


def compare(found, a, b):
    """(mean difference, its standard error, p) of two cells, paired by the seeds of both."""
    pairs = [(found[(*a, seed)], found[(*b, seed)]) for seed in SEEDS
             if (*a, seed) in found and (*b, seed) in found]
    gaps = [100 * (x - y) for x, y in pairs]
    error = stdev(gaps) / math.sqrt(len(gaps))
    return mean(gaps), error, p_value(mean(gaps) / max(error, 1e-9), len(gaps) - 1)


def holm(tests):
    """{name: corrected p} of {name: (difference, error, p)}"""
    corrected, worst = {}, 0.0
    for i, name in enumerate(sorted(tests, key=lambda name: tests[name][2])):
        worst = max(worst, min(1.0, (len(tests) - i) * tests[name][2]))
        corrected[name] = worst
    return corrected


def table(cfg):
    found = {}  # {(arm, soft, order, cells, seed): share}
    for line in read_jsonl(cfg.out):
        arm, seed = line["name"].split("-")
        found[arm, line["soft"], line["order"], line["cells"], int(seed)] = line["solved"]
    heads = [f"{order} {cells}" for order, cells in WAYS]
    print("% of puzzles solved, mean ± standard deviation over seeds (number of seeds)\n")
    print("| arm | " + " | ".join(heads) + " |\n|---|" + len(heads) * "--:|")
    for arm, soft in itertools.product(ARMS, (True, False)):
        shares = [[100 * found[(arm, soft, *way, seed)] for seed in SEEDS
                   if (arm, soft, *way, seed) in found] for way in WAYS]
        if all(len(share) > 1 for share in shares):
            cells = [f"{mean(s):.1f} ± {stdev(s):.1f} ({len(s)})" for s in shares]
            print(f"| {arm} {'on' if soft else 'off'} | " + " | ".join(cells) + " |")
    two = "entropy", 2
    primary = {"SM on - off, 2 a call": (("ours", True, *two), ("ours", False, *two)),
               "SM on - binary, 2 a call": (("ours", True, *two), ("binary", False, *two))}
    secondary = {}
    for order, cells in WAYS:
        for arm in ("ours", "constant3", "selfcond"):
            name = f"{arm} on - off, {order} {cells}"
            secondary[name] = (arm, True, order, cells), (arm, False, order, cells)
        for arm in ("binary", "constant3", "selfcond", "deep"):
            name = f"ours on - {arm}, {order} {cells}"
            other = arm in ("constant3", "selfcond")
            secondary[name] = ("ours", True, order, cells), (arm, other, order, cells)
    secondary = {name: pair for name, pair in secondary.items() if pair not in primary.values()}
    for title, pairs in ("primary", primary), ("secondary", secondary):
        tests = {name: compare(found, *pair) for name, pair in pairs.items()}
        corrected = holm(tests)
        print(f"\n{title}: difference in points ± standard error, p, p by Holm of {len(tests)}")
        for name, (gap, error, p) in tests.items():
            print(f"{name:34} {gap:6.1f} ± {error:4.1f}  {p:.4f}  {corrected[name]:.4f}")


def main(cfg):
    if cfg.table:
        table(cfg)
    else:
        decode(cfg)


if __name__ == "__main__":
    run(main, Config)
