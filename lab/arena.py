# SPDX-License-Identifier: MIT
"""Which feedback is best? Eight arms on the Sudokus of examples/sudoku.py, six seeds each.

    python lab/arena.py --seeds=41,42 --arms=binary,sm,slerp   # times all arms once; resumes
    python lab/arena.py table                                  # as results/README.md shows it

The plan, written before any run was measured (commit 7f8ce79):
- Seeds 41 to 46, none used before. 6,000 updates at a rate of 5e-4 (deep: 1e-3), ω from (0.5, 1,
  −2.8), and examples/sudoku.py's settings. All were chosen for binary, sm and deep, on seeds 1 to
  5, 11 to 16 and 31 to 36. Nothing was tuned for the other arms or on these.
- Primary: % of 500 puzzles (12 of 36 cells given) solved at two cells per call, surest first, with
  the likeliest digits, and with feedback where the arm has it. Measured after as many updates, and
  after the CPU time of binary's 6,000 (one core; the last file before it, one per 250 updates).
- In both columns, each arm is compared with sm: a paired t-test over the six seeds, p corrected by
  Holm for the seven arms. ± is the standard deviation over seeds.
- Described, not tested: feedback off, 1, 3, 4 and 6 cells per call, random order, a threshold of
  0.9 with its calls, and the bound (nats per grid).
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from statistics import mean

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(1, os.path.join(sys.path[0], "examples"))
import launch
import sudoku
from bench import interleaved
from data import rng
from launch import git_version
from mdlm import MDLM, TwoPass
from plot import markdown, p_values, with_gain
from sample import Pick, decode, shares_of
from softmask import SoftMask
from train import val_nats


class Slerp(SoftMask):  # m, turned towards the mean Σ π v by the share λ of the angle; |m| stays
    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                              # (D,)
        mean = super().mix(table, torch.ones_like(lam), ids, pi).float()             # (N, D)
        along = (mean * F.normalize(m, dim=0)).sum(-1, keepdim=True)                 # (N, 1)
        across = mean - along * F.normalize(m, dim=0)  # at a right angle to m         (N, D)
        angle = torch.atan2(across.norm(dim=-1, keepdim=True), along)                # (N, 1)
        turn, side = lam[:, None] * angle, m.norm() * F.normalize(across, dim=-1)
        return (turn.cos() * m + turn.sin() * side).to(table.dtype)                  # (N, D)


class Additive(SoftMask):  # m + λ Σ π v: nothing of m is taken away
    def mix(self, table, lam, ids, pi):
        return super().mix(table, lam, ids, pi) + lam[:, None] * table[self.mask_id]  # (N, D)


ARMS = {  # what differs from sm
    "binary": (SoftMask, dict(p_sm=0.0)), "sm": (SoftMask, {}), "slerp": (Slerp, {}),
    "constant": (SoftMask, dict(omega_b=-100.0)),  # the gate is open: λ = ω_s
    "additive": (Additive, {}), "always": (SoftMask, dict(p_sm=1.0)),
    "frozen": (SoftMask, dict(eta_sm=0.0)),
    "deep": (SoftMask, dict(p_sm=0.0, n_layer=4, eta_bb=1e-3))}
STEPS, KEEP_EVERY, PUZZLES, PATH = 6000, 250, 500, "results/arena.jsonl"
SETTINGS = sudoku.SETTINGS | dict(eta_bb=5e-4, omega_s=0.5, omega_a=1.0, omega_b=-2.8, eval_every=0,
                                  device="cpu")
WAYS = {str(n): (24 // n, "entropy", None) for n in (1, 2, 3, 4, 6)}  # cells per call
WAYS |= {"random order": (24, "random", None), "p ≥ 0.9": (24, "entropy", 0.9)}
COLUMNS = {"2": ("updates", "2"), "2, equal time": ("time", "2"), "2, feedback off": ("off", "2")}
COLUMNS |= {what: ("updates", what) for what in (*WAYS, "calls", "bound")}


@dataclass
class Config:
    table: bool = False  # print the table; "table" as the first word does the same
    seeds: str = "41,42,43,44,45,46"
    arms: str = ",".join(ARMS)


def train_arm(arm, **settings):
    sm, changes = ARMS[arm]
    sudoku.train_model(sudoku.TrainConfig(**SETTINGS | changes | settings), sm)


def time_arms():
    """{arm: CPU seconds of an update}, also a line of the file, from runs of 100 in turns."""
    def case(arm):  # of the first 100 updates of seed 14, 80 have feedback
        with tempfile.TemporaryDirectory() as folder:
            train_arm(arm, seed=14, steps=100, out_dir=folder)
    found = interleaved({arm: partial(case, arm) for arm in ARMS}, 5, torch.device("cpu"), 1)
    cpu = {arm: columns["cpu"] / 100 for arm, columns in found.items()}
    launch.append_jsonl(PATH, {"cpu": cpu, "git": git_version()})
    return cpu


def run(arm, seed, cpu):
    """Train an arm, and write a line with % of puzzles solved, calls at the threshold, and nats."""
    folder = f"out/arena/{arm}-{seed}"
    train_arm(arm, seed=seed, steps=STEPS, keep_every=KEEP_EVERY, out_dir=folder, resume=True)
    in_time = min(STEPS, int(STEPS * cpu["binary"] / cpu[arm]) // KEEP_EVERY * KEEP_EVERY)
    line = {"arm": arm, "seed": seed, "in time": in_time, "git": git_version()}
    for name, step in ("updates", STEPS), ("time", in_time), ("off", STEPS):
        model, found = MDLM.load(f"{folder}/step-{step}.pt", sm=ARMS[arm][0]), {}
        soft = name != "off" and model.sm is not None
        rows = sudoku.ids_of(sudoku.texts(sudoku.HELD_OUT, rng("sudoku", "val")), model.mask_id)
        draws = [rng("puzzle", i) for i in range(PUZZLES)]
        x = sudoku.puzzles(rows[:PUZZLES], 12, model.mask_id, draws)                 # (n, 39)
        for way, (steps, order, threshold) in WAYS.items():
            calls = torch.zeros(PUZZLES)  # passes of each puzzle

            def on_step(x, lam, masks, h, revealed):
                calls[masks[0].unique()] += 1  # noqa: B023
            shares = shares_of(steps * [1]) if threshold is None else repeat(1)
            pick = Pick(order, threshold=threshold, generator=rng("fill"))
            ids = decode(TwoPass(model.net, model.sm if soft else None, model.mask_id), x, shares,
                         pick, on_step=on_step)
            cells = sudoku.cells_of(ids, model.mask_id)
            found[way] = 100 * mean(not mistake for mistake in map(sudoku.mistake, cells))
        nats, _ = val_nats(model, rows, soft, seed=1, batch_size=100, floor=0.0)
        line[name] = found | {"calls": calls.double().mean().item(), "bound": nats / len(rows)}
    launch.append_jsonl(PATH, line)


def table(runs):
    """Markdown of {arm: {seed: line}}. In brackets: the difference from sm, and its corrected p."""
    found, rows = {}, {}
    for arm in filter(runs.get, ARMS):
        found[arm] = {title: [line[name][what] for _, line in sorted(runs[arm].items())]
                      for title, (name, what) in COLUMNS.items()}
        [rows[arm]] = with_gain({"arm": arm}, found[arm], {}, dict.fromkeys(COLUMNS, ".1f"))
    whole = [arm for arm in rows if runs[arm].keys() == runs["sm"].keys() and len(runs[arm]) == 6]
    for title in "2", "2, equal time":
        gaps = {arm: [a - b for a, b in zip(found[arm][title], found["sm"][title])]
                for arm in whole if arm != "sm"}
        for arm, p in p_values(gaps, 7).items():
            rows[arm][title] += f" ({mean(gaps[arm]):+.1f}, p = {p:.2g})"
    return markdown(rows.values(), ["arm", *COLUMNS])


def main(cfg):
    torch.set_num_threads(1)
    lines = launch.read_jsonl(PATH)
    runs = {arm: {line["seed"]: line for line in lines if line.get("arm") == arm} for arm in ARMS}
    if cfg.table:
        return print(table(runs))
    cpu = next((line["cpu"] for line in lines if "cpu" in line), None) or time_arms()
    for seed in map(int, cfg.seeds.split(",")):
        for arm in cfg.arms.split(","):
            if seed not in runs[arm]:
                run(arm, seed, cpu)


if __name__ == "__main__":
    launch.run(main, Config, {"table": {"table": True}})
