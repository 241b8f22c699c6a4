# SPDX-License-Identifier: MIT
"""Which feedback is best? Eight arms on the Sudokus of examples/sudoku.py, six seeds each.

    python lab/arena.py time                                   # first: CPU time of an update
    python lab/arena.py --seeds=41,42 --arms=binary,sm,slerp   # the same command resumes
    python lab/arena.py table                                  # as results/README.md shows it

The plan, written before any run was measured:

- Seeds 41 to 46, none used before. 6,000 updates at a rate of 5e-4 (deep: 1e-3), ω from (0.5, 1,
  −2.8), and examples/sudoku.py's settings. All of these were chosen for binary, sm and deep, on
  seeds 1 to 5, 11 to 16 and 31 to 36. Nothing was tuned for the other arms, nor on these seeds.
- Primary: % of 500 puzzles (12 of 36 cells given) solved at two cells per call, surest first, with
  the likeliest digits, and with feedback where the arm has it. Measured after as many updates, and
  after the CPU time of binary's 6,000 (one core; the last file before it, one per 250 updates).
- In both columns, each arm is compared with sm: a paired t-test over the six seeds, p corrected by
  Holm for the seven arms. ± is the standard deviation over seeds.
- Described, not tested: feedback off, other numbers of cells per call, random order, a threshold of
  0.9 with its calls, and the bound (nats per grid).
"""

import contextlib
import itertools
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import Literal

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "examples"))
import launch
import mdlm
import sudoku
from bench import interleaved
from checkpoint import git_version, load_mdlm
from data import rng
from eval import val_nats
from plot import markdown
from sample import generate_in_order
from softmask import SoftMask
from train import Config as TrainConfig
from train import train


class Slerp(SoftMask):
    """[MASK]'s m, turned towards the mean Σ π v by the share λ of the angle. |m| stays."""
    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                              # (D,)
        mean = super().mix(table, torch.ones_like(lam), ids, pi).float()             # (N, D)
        along = (mean * F.normalize(m, dim=0)).sum(-1, keepdim=True)                 # (N, 1)
        across = mean - along * F.normalize(m, dim=0)  # at a right angle to m         (N, D)
        angle = torch.atan2(across.norm(dim=-1, keepdim=True), along)                # (N, 1)
        turn, side = lam[:, None] * angle, m.norm() * F.normalize(across, dim=-1)
        return (turn.cos() * m + turn.sin() * side).to(table.dtype)                  # (N, D)


class Constant(SoftMask):
    """λ = ω_s, whatever the entropy."""
    def strength(self, minus_h):
        omega_s, omega_a, omega_b = self.omega
        return omega_s + 0 * (omega_a + omega_b + minus_h)                           # (N,)


class Additive(SoftMask):
    """m + λ Σ π v: nothing of m is taken away."""
    def mix(self, table, lam, ids, pi):
        return super().mix(table, lam, ids, pi) + lam[:, None] * table[self.mask_id]  # (N, D)


ARMS = {  # what differs from sm
    "binary": (SoftMask, dict(p_sm=0.0)), "sm": (SoftMask, {}), "slerp": (Slerp, {}),
    "constant": (Constant, {}), "additive": (Additive, {}), "always": (SoftMask, dict(p_sm=1.0)),
    "frozen": (SoftMask, dict(eta_sm=0.0)),
    "deep": (SoftMask, dict(p_sm=0.0, n_layer=4, eta_bb=1e-3))}
STEPS, KEEP_EVERY, PUZZLES, PATH = 6000, 250, 500, "results/arena.jsonl"
SETTINGS = sudoku.SETTINGS | dict(eta_bb=5e-4, omega_s=0.5, omega_a=1.0, omega_b=-2.8, eval_every=0,
                                  device="cpu")
WAYS = {str(n): dict(order="entropy", steps=24 // n) for n in (1, 2, 3, 4, 6)}  # cells per call
WAYS |= {"random order": dict(order="random", steps=24),
         "p ≥ 0.9": dict(order="entropy", steps=24, threshold=0.9)}


@dataclass
class Config:
    what: Literal["run", "time", "table"] = "run"  # the first word
    seeds: str = "41,42,43,44,45,46"
    arms: str = ",".join(ARMS)


def train_arm(arm, **settings):
    mdlm.SoftMask, changes = ARMS[arm]
    train(TrainConfig(**SETTINGS | changes | settings))


def time_arms():
    """Write the CPU seconds of an update of each arm, from runs of 100 that take turns."""
    if not os.path.exists("data/sudoku/meta.json"):
        sudoku.prepare(sudoku.Data())

    def case(arm):  # of the first 100 updates of seed 14, 80 have feedback
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
            train_arm(arm, seed=14, steps=100, out_dir=folder)
    found = interleaved({arm: partial(case, arm) for arm in ARMS}, 5, torch.device("cpu"), 1)
    cpu = {arm: columns["cpu"] / 100 for arm, columns in found.items()}
    launch.append_jsonl(PATH, {"cpu": cpu, "git": git_version()})


def measure(arm, path, soft):
    """{what: value}: % of puzzles solved, calls at the threshold, nats per grid (Eq. 2)"""
    model, found = load_mdlm(path, SoftMask=ARMS[arm][0]), {}
    rows = sudoku.ids_of(sudoku.texts(sudoku.HELD_OUT, rng("sudoku", "val")), model.mask_id)
    draws = [rng("puzzle", i) for i in range(PUZZLES)]
    x = sudoku.puzzles(rows[:PUZZLES], 12, model.mask_id, draws)                     # (n, 39)
    for way, how in WAYS.items():
        ids, calls = generate_in_order(model, PUZZLES, top_p=1e-12, generator=rng("fill"), x=x,
                                       soft=soft, **how)
        solved = [not sudoku.mistake(cells) for cells in sudoku.cells_of(ids, model.mask_id)]
        found[way] = 100 * mean(solved)
    soft = soft and model.sm is not None
    nats, _ = val_nats(model, rows, soft, seed=1, batch_size=100, floor=0.0)
    return found | {"calls": calls.double().mean().item(), "bound": nats / len(rows)}


def run(arm, seed, cpu):
    """Train and measure an arm, and write its line."""
    folder = f"out/arena/{arm}-{seed}"
    train_arm(arm, seed=seed, steps=STEPS, keep_every=KEEP_EVERY, out_dir=folder, resume=True)
    files = int(STEPS * cpu["binary"] / cpu[arm] / KEEP_EVERY)  # written in binary's time
    in_time = min(STEPS, files * KEEP_EVERY)
    line = {"arm": arm, "seed": seed, "in time": in_time, "git": git_version()}
    ways = ("updates", STEPS, True), ("time", in_time, True), ("off", STEPS, False)
    for name, step, soft in ways:
        line[name] = measure(arm, f"{folder}/step-{step}.pt", soft)
    launch.append_jsonl(PATH, line)


def p_value(x):
    """Two-sided p of a t-test that the mean of six differences is 0: 5 degrees of freedom."""
    angle = math.atan2(abs(mean(x)) * math.sqrt(6), stdev(x) * math.sqrt(5))
    more = math.sin(angle) * math.cos(angle) * (1 + 2 / 3 * math.cos(angle) ** 2)
    return 1 - 2 / math.pi * (angle + more)


def table(runs):
    """Markdown of {(arm, seed): line}. In brackets: the difference from sm, and its corrected p."""
    columns = {"2 per call": ("updates", "2"), "2, equal time": ("time", "2"),
               "2, feedback off": ("off", "2")}
    columns |= {what: ("updates", what) for what in (*WAYS, "calls", "bound") if what != "2"}
    rows = {arm: {"arm": arm} for arm in ARMS if arm in {arm for arm, _ in runs}}
    for i, (title, (name, what)) in enumerate(columns.items()):
        found = {arm: {seed: line[name][what] for (a, seed), line in runs.items() if a == arm}
                 for arm in rows}
        for arm, values in found.items():
            rows[arm][title] = f"{mean(values.values()):.1f}"
            if len(values) > 1:
                rows[arm][title] += f" ± {stdev(values.values()):.1f}"
        gaps = {arm: [found[arm][seed] - value for seed, value in found.get("sm", {}).items()]
                for arm in rows if i < 2 and found[arm].keys() == found.get("sm", {}).keys()}
        p, worst = {arm: p_value(x) for arm, x in gaps.items() if arm != "sm" and len(x) == 6}, 0.0
        for rank, arm in enumerate(sorted(p, key=p.get)):  # Holm's correction
            worst = max(worst, min(1.0, (7 - rank) * p[arm]))
            rows[arm][title] += f" ({mean(gaps[arm]):+.1f}, p = {worst:.2g})"
    return markdown(rows.values(), ["arm", *columns])


def main(cfg):
    torch.set_num_threads(1)
    lines = launch.read_jsonl(PATH)
    cpu = next((line["cpu"] for line in lines if "cpu" in line), None)
    runs = {(line["arm"], line["seed"]): line for line in lines if "arm" in line}
    if cfg.what == "time":
        return time_arms()
    if cfg.what == "table":
        return print(table(runs))
    if not cpu:
        raise launch.Refused(f"{PATH} has no CPU times: first run `python lab/arena.py time`")
    for seed, arm in itertools.product(cfg.seeds.split(","), cfg.arms.split(",")):
        if (arm, int(seed)) not in runs:
            run(arm, int(seed), cpu)


if __name__ == "__main__":
    launch.run(main, Config, {what: {"what": what} for what in ("time", "table")})
