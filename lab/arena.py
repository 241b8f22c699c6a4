# SPDX-License-Identifier: MIT
"""Which feedback is best? Eight arms on the Sudokus of examples/sudoku.py, six seeds each.

    python lab/arena.py time                                      # first: CPU time per update
    python lab/arena.py --seeds=41,42 --arms=binary,sm,slerp      # the same command resumes
    python lab/arena.py table                                     # what results/README.md shows

The plan, written before any run was measured:

- Seeds 41 to 46, none used before. 6,000 updates at a rate of 5e-4 (deep: 1e-3), ω from (0.5, 1,
  −2.8), and the other settings of examples/sudoku.py. Its settings, ω, the rates and 6,000 were
  chosen for binary, sm and deep on seeds 1 to 5, 11 to 16 and 31 to 36. Nothing was tuned for the
  other arms, or on seeds 41 to 46.
- Primary: the share of 500 puzzles with 12 of 36 cells given that are solved at two cells per call,
  surest first, with the likeliest digit, and with feedback where the arm has it.
- Twice: after as many updates, and after the CPU time of binary's (`time`, one core). For the
  second, the last file before that time is measured: there is one every 250 updates.
- Each arm is compared with sm by a paired t-test over the six seeds, in each of the two columns.
  Its p is Holm-corrected over the seven arms. ± is the standard deviation over seeds.
- All else is described and not tested: one, three, four and six cells per call, random order, a
  threshold of 0.9 with its calls, the bound (nats per grid), and feedback switched off.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import Literal

import torch
import torch.nn.functional as F

sys.path[:0] = [os.path.join(os.path.dirname(__file__), folder) for folder in ("..", "../examples")]
import launch
import mdlm
import sudoku
from bench import interleaved
from checkpoint import git_version
from data import rng
from eval import val_nats
from launch import Refused, Size
from sample import generate_in_order
from softmask import SoftMask
from train import Config as TrainConfig
from train import train


class Slerp(SoftMask):
    """[MASK]'s m, turned towards the mean of the v_i by the share λ of the angle. |m| stays."""
    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                            # (D,)
        mean = super().mix(table, torch.ones_like(lam), ids, pi).float()           # (N, D)  Σ π v
        unit = F.normalize(m, dim=0)
        along = (mean * unit).sum(-1, keepdim=True)                                # (N, 1)
        across = mean - along * unit                                               # (N, D)  ⟂ m
        turn = lam[:, None] * torch.atan2(across.norm(dim=-1, keepdim=True), along)    # (N, 1)
        side = m.norm() * F.normalize(across, dim=-1)                              # (N, D)
        return (turn.cos() * m + turn.sin() * side).to(table.dtype)                # (N, D)


class Constant(SoftMask):
    """λ = ω_s, whatever the entropy."""
    def strength(self, minus_h):
        omega_s, omega_a, omega_b = self.omega
        return omega_s + 0 * (omega_a + omega_b + minus_h)                         # (N,)


class Additive(SoftMask):
    """m + λ Σ π v: nothing of m is taken away."""
    def mix(self, table, lam, ids, pi):
        return super().mix(table, lam, ids, pi) + lam[:, None] * table[self.mask_id]   # (N, D)


ARMS = {  # what differs from sm
    "binary": (dict(p_sm=0.0), SoftMask), "sm": ({}, SoftMask), "slerp": ({}, Slerp),
    "constant": ({}, Constant), "additive": ({}, Additive), "always": (dict(p_sm=1.0), SoftMask),
    "gate frozen": (dict(eta_sm=0.0), SoftMask),
    "deep": (dict(p_sm=0.0, n_layer=4, eta_bb=1e-3), SoftMask)}
SETTINGS = sudoku.SETTINGS | dict(eta_bb=5e-4, omega_s=0.5, omega_a=1.0, omega_b=-2.8, show=False,
                                  device="cpu")
PRIMARY = "2"
WAYS = {n: dict(order="entropy", steps=24 // int(n)) for n in ("1", PRIMARY, "3", "4", "6")}
WAYS |= {"random": dict(order="random", steps=24),
         "p ≥ 0.9": dict(order="entropy", steps=24, threshold=0.9)}


@dataclass
class Config:
    what: Literal["run", "time", "table"] = "run"  # the first word
    seeds: str = "41,42,43,44,45,46"
    arms: str = ",".join(ARMS)
    steps: Size = 6000
    keep_every: Size = 250
    puzzles: Size = 500
    data: str = "data/sudoku"           # made if it does not exist
    runs: str = "out/arena"             # checkpoints and logs, in ARM-SEED
    out: str = "results/arena.jsonl"    # a line for `time`, and one for each arm and seed


PRESETS = {what: {"what": what} for what in ("run", "time", "table")}


def train_arm(cfg, arm, **settings):
    """train.py with an arm's settings and soft mask."""
    changes, mdlm.SoftMask = ARMS[arm]
    train(TrainConfig(**SETTINGS | changes | {"data": cfg.data} | settings))


def time_arms(cfg):
    """CPU seconds of an update, from runs of 100, with all that they need. They take turns."""
    def case(arm):  # in 80 of the first 100 updates of seed 14, the coin says feedback
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            train_arm(cfg, arm, seed=14, steps=100, out_dir=folder)
    found = interleaved({arm: partial(case, arm) for arm in ARMS}, 5, torch.device("cpu"), 1)
    cpu = {arm: columns["cpu"] / 100 for arm, columns in found.items()}
    launch.append_jsonl(cfg.out, {"cpu": cpu, "torch": torch.__version__, "git": git_version()})


def measure(path, arm, n):
    """{side: {way: % of n puzzles solved}}, with the calls at a threshold, and the bound."""
    model = mdlm.MDLM.load(path)
    rows = sudoku.ids_of(sudoku.texts(4 * n, rng("sudoku", "val")), model.mask_id)   # (4 n, 39)
    x = sudoku.puzzles(rows[:n], 12, model.mask_id, [rng("puzzle", i) for i in range(n)])
    found = {}
    for side, soft in sudoku.sides_of(model).items():
        values = found[side] = {}
        for way, options in WAYS.items():
            ids, nfe = generate_in_order(model, n, top_p=1e-12, x=x, soft=soft, **options,
                                         generator=[rng("fill", i) for i in range(n)])
            wrong = map(sudoku.mistake, sudoku.cells_of(ids, model.mask_id))
            values[way] = 100 * [*wrong].count("") / n
        values["calls"] = nfe.double().mean().item()  # of the last way, the threshold
        values["bound"] = val_nats(model, rows, soft, seed=1, batch_size=100, floor=0.0)[0] / 4 / n
    return found
