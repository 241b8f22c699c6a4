# SPDX-License-Identifier: MIT
"""What is feedback for, and which is best? Six arms on the Sudokus of examples/sudoku.py.

    python lab/arena.py                                 # all runs, one after the other; it resumes
    python lab/arena.py --seeds=51,52 --arms=binary,sm  # some of them
    python lab/arena.py table                           # the tables of results/README.md

The plan, committed before any run:
- **Arms.** binary: no feedback. sm: the paper's rule. slerp: [MASK] is turned towards the tokens.
  constant: λ = ω_s. frozen: ω stays at its start. deep: binary with twice the layers.
- **Settings.** Seeds 51 to 62, none used before. 6,000 updates at a rate of 5e-4 (deep: 1e-3), ω
  from (0.5, 1, −2.8), and the settings of examples/sudoku.py. All were chosen for binary, sm and
  deep, on seeds up to 36. Nothing is tuned for the other arms or on the new seeds.
- **Measure.** % of 1,000 puzzles (12 of 36 cells given) that are solved, with the likeliest digits,
  surest first: two cells per pass, in the even schedule 2, …, 2 and in the odd one, 1, 2, …, 2, 1;
  1, 3, 4 and 6 per pass; one per pass in random order; and with a threshold of 0.9. Each is also
  told by number of solutions: 1, 2 to 6, 7 or more. All this after equal updates; in equal time,
  after the CPU time of binary's 6,000 updates (one core; the last file before it, one per 250
  updates); and after equal updates with feedback off.
- **Primary.** Two per pass, the mean of even and odd. Each arm against sm, after equal updates and
  in equal time: a paired t-test over seeds, p corrected by Holm for the five tests of a column.
- **Secondary.** sm in 12 passes (2, …, 2) against binary in 24 (one per pass), after equal updates
  and in equal time, corrected for these two tests.
- **Reading.** Clear: p < 0.05. No p before all twelve seeds are in. Twelve seeds resolve about 5 to
  9 points: the table says from which difference on each test would have been clear. All else is
  described, not tested: the other ways, solutions, feedback off, the bound (nats per grid).
"""

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
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
from mdlm import MDLM
from plot import against, markdown, with_gain
from sample import Pick, decode, shares_of
from softmask import SoftMask
from train import bound


class Slerp(SoftMask):  # m, turned towards the mean Σ π v by the share λ of the angle; |m| stays
    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                              # (D,)
        mean = super().mix(table, torch.ones_like(lam), ids, pi).float()             # (N, D)
        along = (mean * F.normalize(m, dim=0)).sum(-1, keepdim=True)                 # (N, 1)
        across = mean - along * F.normalize(m, dim=0)  # at a right angle to m         (N, D)
        angle = torch.atan2(across.norm(dim=-1, keepdim=True), along)                # (N, 1)
        turn = lam[:, None] * angle                                                  # (N, 1)
        side = m.norm() * F.normalize(across, dim=-1)                                # (N, D)
        return (turn.cos() * m + turn.sin() * side).to(table.dtype)                  # (N, D)


ARMS = {  # the class of the soft mask, and the settings that differ from sm's
    "binary": (SoftMask, dict(p_sm=0.0)),
    "sm": (SoftMask, {}),
    "slerp": (Slerp, {}),
    "constant": (SoftMask, dict(omega_b=-100.0)),  # the sigmoid is 1: λ = ω_s
    "frozen": (SoftMask, dict(eta_sm=0.0)),
    "deep": (SoftMask, dict(p_sm=0.0, n_layer=4, eta_bb=1e-3))}
BASIC = "binary", "sm", "deep"
SEEDS = range(51, 63)
STEPS = 6000
KEEP_EVERY = 250
PUZZLES = 1000
PATH = "results/arena2.jsonl"
SETTINGS = sudoku.SETTINGS | dict(eta_bb=5e-4, omega_s=0.5, omega_a=1.0, omega_b=-2.8, eval_every=0,
                                  device="cpu")
WAYS = {"2, even": [2] * 12, "2, odd": [1] + [2] * 11 + [1]}  # cells of each pass
WAYS |= {str(n): [n] * (24 // n) for n in (1, 3, 4, 6)}
WAYS |= {"random order": [1] * 24, "p ≥ 0.9": None}
SHOWN = {"2, even": "2, …, 2", "2, odd": "1, 2, …, 2, 1", "passes": "p ≥ 0.9: passes"}
GROUPS = {"all": slice(0, 3), "1": slice(0, 1), "2–6": slice(1, 2), "7+": slice(2, 3)}


@dataclass
class Config:
    table: bool = False  # print the tables; "table" as the first word does the same
    seeds: str = ",".join(map(str, SEEDS))
    arms: str = ",".join(ARMS)


# ---- the runs; arena_text.py has these, too ------------------------------------------------------
def cpu_seconds(path, arms, train_arm):
    """{arm: CPU seconds of an update}, from `path`, or measured now: runs of 100 take turns"""
    for line in launch.read_jsonl(path):
        if "seconds" in line:
            return line["seconds"]

    def case(arm):  # of the first 100 updates of seed 14, 80 have feedback
        with tempfile.TemporaryDirectory() as folder:
            train_arm(arm, seed=14, steps=100, out_dir=folder)
    cases = {arm: functools.partial(case, arm) for arm in arms}
    found = interleaved(cases, 5, torch.device("cpu"), 1)
    seconds = {arm: columns["cpu"] / 100 for arm, columns in found.items()}
    launch.append_jsonl(path, {"seconds": seconds} | provenance(path))
    return seconds


def measured(folder, kind, steps, slower, measure):
    """measure(model) after equal updates, in equal time, without feedback; the final weights' hash

    kind: of SoftMask.   slower: CPU time of an update, as a multiple of binary's.
    """
    in_time = min(steps, int(steps / slower) // KEEP_EVERY * KEEP_EVERY)
    found = {"in time": in_time}
    known = {}  # binary has no feedback to switch off, and its time is that of its updates
    for name, step in ("updates", steps), ("time", in_time), ("off", steps):
        model = MDLM.load(f"{folder}/step-{step}.pt", sm_class=kind)
        if name == "updates":
            weights = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
            found["sha256"] = hashlib.sha256(weights).hexdigest()
        if name == "off":
            model.sm = None
        key = step, model.sm is None
        if key not in known:
            known[key] = measure(model)
        found[name] = known[key]
    return found


def provenance(path):
    """What numbers depend on: code, torch, CPU. A change of `path` itself is not dirty."""
    git = git_version()
    if git.get("dirty"):
        diff = ["git", "diff", "--quiet", "HEAD", "--", ".", f":!{path}"]
        git["dirty"] = subprocess.call(diff, cwd=os.path.dirname(launch.__file__)) != 0
    info = Path("/proc/cpuinfo")  # of Linux
    names = re.findall("model name\\s*: (.*)", info.read_text()) if info.exists() else []
    return {"git": git, "torch": torch.__version__, "cpu": (names or [platform.processor()])[0]}


def run_all(cfg, path, run):
    """Append the line of run(arm, seed) for each that has none yet, seed by seed."""
    done = {(line.get("arm"), line.get("seed")) for line in launch.read_jsonl(path)}
    for seed in map(int, cfg.seeds.split(",")):
        for arm in cfg.arms.split(","):
            if (arm, seed) not in done:
                found = run(arm, seed)
                launch.append_jsonl(path, {"arm": arm, "seed": seed} | found | provenance(path))


def complete(path, arms):
    """{arm: [line of each seed that all arms have]}"""
    runs = {arm: {} for arm in arms}
    for line in launch.read_jsonl(path):
        if line.get("arm") in runs:
            runs[line["arm"]][line["seed"]] = line
    seeds = sorted(set.intersection(*map(set, runs.values())))
    if not seeds:
        raise launch.Refused(f"{path} has no seed with all arms yet: run them first")
    return {arm: [lines[seed] for seed in seeds] for arm, lines in runs.items()}


# ---- Sudokus -------------------------------------------------------------------------------------
def train_arm(arm, **settings):
    sm_class, changes = ARMS[arm]
    sudoku.train_model(sudoku.TrainConfig(**SETTINGS | changes | settings), sm_class)


@functools.cache
def puzzles(mask_id):
    """Held-out rows (2000, 39), puzzles (n, 39), and each puzzle's group by solutions (n,)"""
    rows = sudoku.ids_of(sudoku.texts(sudoku.HELD_OUT, rng("sudoku", "val")), mask_id)
    draws = [rng("puzzle", i) for i in range(PUZZLES)]
    x = sudoku.puzzles(rows[:PUZZLES], 12, mask_id, draws)                           # (n, 39)
    solutions = torch.tensor([*map(sudoku.solutions, sudoku.cells_of(x, mask_id))])  # (n,)
    return rows, x, torch.bucketize(solutions, torch.tensor([1, 6]))


def measure(model):
    """{way: puzzles solved, by group}, the passes that the threshold takes, and the bound"""
    rows, x, group = puzzles(model.mask_id)
    found = {}
    for way, counts in WAYS.items():
        passes = torch.zeros(len(x))  # of each puzzle

        def on_step(x, lam, masks, h, revealed):
            passes[masks[0].unique()] += 1  # noqa: B023
        order = "random" if way == "random order" else "entropy"
        pick = Pick(order, threshold=None if counts else 0.9, generator=rng("fill"))
        ids = decode(model, x, shares_of(counts) if counts else repeat(1), pick, on_step=on_step)
        mistakes = map(sudoku.mistake, sudoku.cells_of(ids, model.mask_id))
        solved = torch.tensor([not wrong for wrong in mistakes])                     # (n,)
        found[way] = group[solved].bincount(minlength=3).tolist()
    nats, *_ = bound(model, rows, model.sm is not None, seed=1, batch_size=100, floor=0.0)
    # The last way is the threshold.
    return found | {"passes": passes.double().mean().item(), "bound": nats.mean().item()}


def run(arm, seed, seconds):
    folder = f"out/arena/{arm}-{seed}"
    train_arm(arm, seed=seed, steps=STEPS, keep_every=KEEP_EVERY, out_dir=folder, resume=True)
    group = puzzles(258)[2].bincount(minlength=3)                                    # (3,)
    slower = seconds[arm] / seconds["binary"]
    found = measured(folder, ARMS[arm][0], STEPS, slower, measure)
    return {"puzzles": group.tolist()} | found


# ---- the tables ----------------------------------------------------------------------------------
def values(lines, name, what, group="all"):
    """A number for each line.   name: updates, time, off.   what: see `measure`

    "2" is the primary measure, the mean of the even and the odd schedule.
    """
    if what in ("passes", "bound"):
        return [line[name][what] for line in lines]
    if what == "2":
        both = values(lines, name, "2, even", group), values(lines, name, "2, odd", group)
        return [mean(pair) for pair in zip(*both)]
    part = GROUPS[group]
    return [100 * sum(line[name][what][part]) / sum(line["puzzles"][part]) for line in lines]


def row(title, columns, form=".1f"):
    """The row of a table: mean ± standard deviation over seeds.   columns: {heading: [number]}"""
    return with_gain({"": title}, columns, {}, dict.fromkeys(columns, form))[0]


def by_solutions(runs):
    """% solved by number of solutions. off: sm with feedback off"""
    sides = {"2, …, 2: sm": ("sm", "updates", "2, even"), "2, …, 2: off": ("sm", "off", "2, even"),
             "2, …, 2: binary": ("binary", "updates", "2, even"),
             "2, …, 2: deep": ("deep", "updates", "2, even"),
             "1 per pass: sm": ("sm", "updates", "1"), "1 per pass: off": ("sm", "off", "1")}
    n = runs["sm"][0]["puzzles"]
    rows = []
    for group, part in GROUPS.items():
        cells = {"solutions": group, "puzzles": str(sum(n[part]))}
        for title, (arm, name, way) in sides.items():
            cells[title] = f"{mean(values(runs[arm], name, way, group)):.0f}"
        rows.append(cells)
    return markdown(rows, [*rows[0]])


def secondary(runs):
    """sm in 12 passes, binary in 12 and in 24, and the difference of the first and the last"""
    names = {"equal updates": "updates", "equal time": "time"}
    sm, binary, more = ({title: values(runs[arm], name, way) for title, name in names.items()}
                        for arm, way in (("sm", "2, even"), ("binary", "2, even"), ("binary", "1")))
    gap = against({title: (sm[title], more[title]) for title in names}, len(SEEDS))
    rows = [row("sm, 12 passes", sm), row("binary, 12 passes", binary),
            row("binary, 24 passes", more), {"": "sm in 12 − binary in 24"} | gap]
    return markdown(rows, ["", *names])


def primary(runs):
    """Each arm at two cells per pass, and how far sm is ahead of it"""
    rows = {arm: {} for arm in runs}
    for title, name in {"equal updates": "updates", "equal time": "time"}.items():
        gap = f"{title}: sm ahead by"
        found = {arm: values(lines, name, "2") for arm, lines in runs.items()}
        gaps = against({arm: (found["sm"], found[arm]) for arm in runs if arm != "sm"}, len(SEEDS))
        for arm, x in found.items():
            rows[arm] |= row(arm, {title: x}) | {gap: gaps.get(arm, "")}
    return markdown(rows.values(), [*rows["sm"]])


def full(runs, arms):
    """Mean ± standard deviation of all that is measured"""
    sides = {}
    for arm in arms:
        sides[arm] = runs[arm], "updates"
        if arm != "binary":
            sides[f"{arm}, equal time"] = runs[arm], "time"
        if arm == "sm":
            sides["off"] = runs[arm], "off"
    rows = []
    for what in (*WAYS, "passes", "bound"):
        found = {title: values(*side, what) for title, side in sides.items()}
        rows.append(row(SHOWN.get(what, what), found))
    return markdown(rows, ["", *sides])


def main(cfg):
    torch.set_num_threads(1)
    if cfg.table:
        runs = complete(PATH, [*ARMS])
        tables = [by_solutions(runs), secondary(runs), primary(runs)]
        tables += [full(runs, arms) for arms in (BASIC, [arm for arm in ARMS if arm not in BASIC])]
        return print(*tables, sep="\n\n")
    seconds = cpu_seconds(PATH, ARMS, train_arm)
    run_all(cfg, PATH, functools.partial(run, seconds=seconds))


if __name__ == "__main__":
    launch.run(main, Config, {"table": {"table": True}})
