# SPDX-License-Identifier: MIT
"""Does feedback pay on text? The question of lab/arena.py, on Python's standard library.

    python lab/arena_text.py                             # all runs, one after the other; it resumes
    python lab/arena_text.py --seeds=51 --arms=binary,sm # some of them
    python lab/arena_text.py table                       # the table of results/README.md

The plan, committed before any run:
- **Arms.** binary, sm and slerp of lab/arena.py: 4,000 updates from scratch. continue-binary and
  continue-sm: 2,000 more from binary's last file, on another permutation of the text.
- **Settings.** Seeds 51 to 56; `train.py small`, which is text as bytes, 1.1M parameters, and ω
  from (0.5, 1, −2.8), as a pilot of one seed had them. Nothing is tuned.
- **Infilling.** In 2,048 held-out rows, 24 of the 126 bytes between BOS and EOS are masked, at
  random or as one span, and filled in with the likeliest bytes, surest first: 1, 2, 4, 8 or 24 per
  pass. Told are % of bytes and of rows that are right, and the bound in nats per byte (same rows).
  Masks differ between seeds, and are the same for all arms of a seed: all differences are paired.
- After equal updates; in equal time, after the CPU time of the binary arm's updates (one core; the
  last file before it, one per 250 updates); and after equal updates with feedback off.
- **Primary.** % of bytes right at random masks, 4 per pass, after equal updates; the same in equal
  time beside it. Three tests in each: binary against sm, slerp against sm, and continue-binary
  against continue-sm. Paired t-tests over the six seeds, p corrected by Holm for the three tests.
  The table has the standard error over rows, too, from the same 2,048 pairs.
- **Reading.** As in lab/arena.py: clear is p < 0.05, no p before all seeds are in, and all else is
  described, not tested. The pilot saw about one point at random masks, and nothing in spans.

Since the runs: the largest standard error over rows stands below the table, and the table has the
differences of the bound, too (not planned).
"""

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import arena
import data
import launch
import train
from arena import row
from eval import mean_and_se
from feedback import spans
from plot import against, markdown
from sample import Pick, decode, shares_of
from train import bound

ARMS = {  # the arm of arena.py, and the updates
    "binary": ("binary", 4000), "sm": ("sm", 4000), "slerp": ("slerp", 4000),
    "continue-binary": ("binary", 2000), "continue-sm": ("sm", 2000)}
BASES = {"binary": "sm", "slerp": "sm", "continue-binary": "continue-sm"}  # what is tested
SEEDS = range(51, 57)
ROWS = 2048
WIDTH = 24
PER_PASS = 1, 2, 4, 8, 24
PATH = "results/arena_text.jsonl"
SETTINGS = train.PRESETS["small"] | dict(eval_every=0, device="cpu")


@dataclass
class Config:
    table: bool = False  # print the table; "table" as the first word does the same
    seeds: str = ",".join(map(str, SEEDS))
    arms: str = ",".join(ARMS)  # binary comes before what continues it


def train_arm(arm, seed, **settings):
    kind, _ = ARMS[arm]
    sm, changes = arena.ARMS[kind]
    if arm != kind:
        settings["init_from"] = f"out/arena_text/binary-{seed}/last.pt"
        seed += 100  # else it would begin with the rows that binary began with
    train.train(train.Config(**SETTINGS | changes | settings, seed=seed), sm)


def train_whole(arm, seed):
    """Train an arm, or go on. Returns its folder."""
    folder = f"out/arena_text/{arm}-{seed}"
    if arm.startswith("continue") and not os.path.exists(f"out/arena_text/binary-{seed}/last.pt"):
        train_whole("binary", seed)  # it was measured, but its files were lost
    train_arm(arm, seed, steps=ARMS[arm][1], keep_every=arena.KEEP_EVERY, out_dir=folder,
              resume=True)
    return folder


def held_out():
    """Rows (n, L) of the text, and its hash"""
    tokens, meta = data.open_split(SETTINGS["data"], "val")
    L = SETTINGS["length"]
    index = data.evenly(data.n_rows(tokens, L), ROWS)                                # (n,)
    return data.rows(tokens, index, L), {split: meta[split]["sha256"] for split in ("train", "val")}


def holes(n, seed):
    """{"random", "span": (n, L) bool}, True at the bytes to be filled in"""
    L = SETTINGS["length"]
    order = torch.rand(n, L - 2, generator=data.rng("holes", seed)).argsort(-1)      # (n, L − 2)
    ends = torch.zeros(n, 1, dtype=torch.bool)                                       # (n, 1)
    return {"random": torch.cat((ends, order < WIDTH, ends), dim=1),
            "span": spans(n, L, WIDTH, seed)}


def measure(model, seed):
    """{way: [bytes right, rows right]}, bytes right in each row of the primary way, and the bound

    Bytes right in a row are a letter: a for none, y for all 24.
    """
    rows, _ = held_out()                                                             # (n, L)
    found = {}
    for kind, hole in holes(len(rows), seed).items():
        for n in PER_PASS:
            parts = rows.masked_fill(hole, model.mask_id).split(64)                  # of (b, L)
            title = f"{kind} masks, {n} per pass"
            ids = torch.cat([decode(model, x, shares_of(WIDTH // n * [1]), Pick())
                             for x in launch.progress(parts, title, leave=False)])   # (n, L)
            right = ((ids == rows) & hole).sum(1)                                    # (n,)
            found[f"{kind}, {n}"] = [right.sum().item(), (right == WIDTH).sum().item()]
            if (kind, n) == ("random", 4):
                found["letters"] = "".join(chr(ord("a") + i) for i in right.tolist())
    nats, *_ = bound(model, rows, model.sm is not None, seed=1, batch_size=64, floor=0.0)
    return found | {"bound": nats.sum().item() / rows.numel()}


def run(arm, seed, seconds):
    kind, steps = ARMS[arm]
    folder = train_whole(arm, seed)
    slower = seconds[kind] / seconds["binary"]
    found = arena.measured(folder, arena.ARMS[kind][0], steps, slower,
                           functools.partial(measure, seed=seed))
    return {"rows": ROWS, "text": held_out()[1]} | found


# ---- the table -----------------------------------------------------------------------------------
def values(lines, name, way):
    """% of bytes right for each line"""
    return [100 * line[name][way][0] / (line["rows"] * WIDTH) for line in lines]


def error_over_rows(lines, base, name):
    """The standard error of the mean difference, with fixed seeds, and rows as a sample"""
    gaps = [[ord(a) - ord(b) for a, b in zip(line[name]["letters"], other[name]["letters"])]
            for line, other in zip(lines, base)]                                     # seeds × n
    gap = torch.tensor(gaps).double().mean(0) * 100 / WIDTH                          # (n,)
    return mean_and_se(gap, torch.ones_like(gap))[1]


def table(runs):
    """% of bytes right at 4 per pass: at random masks, in spans; the bound; sm's differences"""
    rows = {arm: {} for arm in runs}
    errors = []
    for title, name in {"equal updates": "updates", "equal time": "time"}.items():
        found = {arm: values(lines, name, "random, 4") for arm, lines in runs.items()}
        pairs = {arm: (found[base], found[arm]) for arm, base in BASES.items()}
        gaps = against(pairs, len(SEEDS))
        for arm, x in found.items():
            rows[arm] |= row(arm, {title: x}) | {f"{title}: sm ahead by": gaps.get(arm, "")}
        errors += [error_over_rows(runs[base], runs[arm], name) for arm, base in BASES.items()]
    bounds = {arm: [line["time"]["bound"] for line in lines] for arm, lines in runs.items()}
    for arm, lines in runs.items():
        rows[arm] |= row(arm, {"span": values(lines, "updates", "span, 4")})
        rows[arm] |= row(arm, {"equal time: bound": bounds[arm]}, ".3f")
    for arm, base in BASES.items():
        gap = [x - y for x, y in zip(bounds[base], bounds[arm])]
        rows[arm] |= row(arm, {"sm higher by": gap}, ".3f")
    note = f"Standard error of the table's differences over rows: at most {max(errors):.2f} points"
    return markdown(rows.values(), [*rows["binary"]]) + "\n\n" + note


def main(cfg):
    torch.set_num_threads(1)
    if cfg.table:
        return print(table(arena.complete(PATH, [*ARMS])))
    data.prepare_preset(SETTINGS["data"])
    for line in launch.read_jsonl(PATH):  # another Python has another library
        if "arm" in line:
            launch.check_same(PATH, line, {"text": held_out()[1]}, ["text"])
    seconds = arena.cpu_seconds(PATH, ["binary", "sm", "slerp"], train_arm)
    arena.run_all(cfg, PATH, functools.partial(run, seconds=seconds))


if __name__ == "__main__":
    launch.run(main, Config, {"table": {"table": True}})
