# SPDX-License-Identifier: MIT
"""Sudoku puzzles: cells of held-out grids are given, a model fills the others, surest first.

    python results/puzzles.py --checkpoint=results/sudoku.safetensors --given=18

Any completion by the rules is right, so a puzzle need not have a single solution.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data  # noqa: E402
import sudoku  # noqa: E402
from checkpoint import git_version  # noqa: E402
from launch import run, write_text  # noqa: E402
from mdlm import MDLM  # noqa: E402
from sample import generate_in_order  # noqa: E402


@dataclass
class Config:
    checkpoint: str = "results/sudoku.safetensors"  # what `python checkpoint.py` can describe
    given: Annotated[int, 0, 35] = 18               # cells of 36
    count: Annotated[int, 1, 2000] = 1000           # puzzles, of the grids that data.py holds out
    out: str = "out/puzzles.json"


def main(cfg):
    model, tok, shares = MDLM.load(cfg.checkpoint), data.tokenizer("bytes"), {}
    texts = sudoku.texts(2000, data.rng("sudoku", "val"))[:cfg.count]
    grids = torch.tensor([[256, *text.encode(), 257, 257] for text in texts])      # (n, 39)
    draws = [data.rng("puzzle", i) for i in range(len(grids))]
    x = sudoku.puzzles(grids, cfg.given, model.mask_id, draws)                     # (n, 39)
    for soft in (True, False) if model.sm else (False,):
        generators = [data.rng("sample", 1, i) for i in range(cfg.count)]
        ids, _ = generate_in_order(model, cfg.count, 36 - cfg.given, "entropy", 1.0, generators,
                                   x=x, soft=soft)
        texts = [tok.decode(row) for row in ids.tolist()]
        shares["soft" if soft else "binary"] = sudoku.right(texts)
    print(cfg.given, shares)
    settings = {"checkpoint": cfg.checkpoint, "given": cfg.given, "n": cfg.count}
    write_text(cfg.out, json.dumps({**settings, "git": git_version(), **shares}) + "\n")


if __name__ == "__main__":
    run(main, Config)
