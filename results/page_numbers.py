# SPDX-License-Identifier: MIT
"""Numbers of results/README.md that no other script prints, from the lines of JSON beside it.

    python results/page_numbers.py

It prints how often ω_s grew over 0.1, SM against depth over eleven seeds, puzzles solved by models
that started at the paper's ω, and the losses on text in equal time.
"""

import math
import re
from statistics import fmean, median, stdev

from sudoku_table import HERE, lines_of, read, spread

from launch import read_json  # noqa: E402

# Arms that start at the paper's ω_s = 1e-6 and see the mask's own feedback.
LONG = "sm", "deepsm", "k1", "k6", "kV", "p05", "p10", "renorm", "slerp"         # 6,000 updates
SHORT = "heads4", "eta2", "width64", "batch16", "warmup0"                       # 2,000 updates
T_10 = 2.228                                       # t of a 95 % interval, 10 degrees of freedom


def take_off():
    """How many runs of each kind have ω_s over 0.1 within 6,000 updates, and after how many."""
    over = {}  # {run: first update, or None}
    for line in lines_of("sudoku_logs"):
        name = line["name"]
        over.setdefault(name, None)
        if over[name] is None and line["step"] <= 6000 and line.get("omega_s", 0) > 0.1:
            over[name] = line["step"]
    kinds = {"6,000 updates": LONG, "2,000 updates": SHORT, "continued": ["cont-sm"]}
    for title, arms in kinds.items():
        runs = [name for name in over if name.rpartition("-")[0] in arms]
        found = [over[name] for name in runs if over[name]]
        missed = [name for name in runs if not over[name]]
        print(f"ω_s over 0.1, {title}: {len(found)} of {len(runs)}, after {min(found)} to "
              f"{max(found)}; not {missed}")


def depth():
    """SM minus twice the layers, in points of empty grids right, over seeds 1 to 5 and 11 to 16."""
    shares = read()[1]
    for cell in "random-36", "surest-36":
        gaps = []
        for sm, deep in ("sm", "deep"), ("six-ours", "six-deep"):
            on, other = shares[sm, cell, True], shares[deep, cell, False]
            gaps += [100 * (on[seed] - other[seed]) for seed in sorted(on)]
        half = T_10 * stdev(gaps) / math.sqrt(len(gaps))
        print(f"SM − deep, {cell}: {fmean(gaps):+.1f} points "
              f"[{fmean(gaps) - half:+.1f}, {fmean(gaps) + half:+.1f}], {len(gaps)} seeds, "
              f"SM ahead in {sum(gap > 0 for gap in gaps)}: {[round(gap) for gap in gaps]}")


def likeliest():
    """Puzzles with 12 cells given, likeliest digit, surest first (results/likeliest.jsonl)."""
    found = {}
    for line in lines_of("likeliest"):
        kind = line["name"].rpartition("-")[0], line["cells"], line["soft"]
        found.setdefault(kind, []).append(100 * line["solved"])
    for (arm, cells, soft), x in found.items():
        word = "with" if soft else "without"
        print(f"{arm} {word} feedback, {cells} a call: {spread(x, '.1f')}")


def at(log, step, kind):
    """The loss after so many updates, on the straight line between two evaluations of a log."""
    known = [(line["step"], line[kind]) for line in log if kind in line]
    for (a, x), (b, y) in zip(known, known[1:]):
        if a <= step <= b:
            return x + (y - x) * (step - a) / (b - a)
    raise ValueError(f"no losses around {step}")


def text():
    """SM's loss below binary's, after as many updates, after half, and in equal time."""
    logs = {}
    for line in lines_of("text_logs"):
        logs.setdefault(line["name"], []).append(line)
    speed = [median(line["tokens_per_s"] for line in logs[f"scratch-{kind}-1"] if line["step"])
             for kind in ("binary", "sm")]
    bench = read_json(f"{HERE}/bench/arms.json")["text"]["train"]
    cost = {"scratch": speed[0] / speed[1], "cont": speed[0] / speed[1],
            "stdlib": bench["SM, p_sm = 0.8 (expected)"]["cpu ratio"]}  # of an update, to binary's
    for group, ratio in cost.items():
        pairs = [(logs[name], logs[name.replace("binary", "sm")]) for name in sorted(logs)
                 if re.fullmatch(group + r"-binary-\d+", name)]
        steps = pairs[0][0][-1]["step"]
        print(f"{group}: an update of SM costs {ratio:.2f} of binary's; SM below binary, nats, "
              f"256 rows of the logs, {len(pairs)} seeds")
        for title, step in (("as many updates", steps), ("half the updates", steps / 2),
                            ("equal time", steps / ratio)):
            gaps = [at(binary, steps, "val_plain") - at(sm, step, "val_soft")
                    for binary, sm in pairs]
            seeds = " ".join(f"{gap:+.3f}" for gap in gaps)
            print(f"    {title}, {step:,.0f} of {steps:,}: {spread(gaps)}: {seeds}")


def main():
    take_off()
    depth()
    likeliest()
    text()


if __name__ == "__main__":
    main()
