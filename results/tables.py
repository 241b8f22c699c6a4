# SPDX-License-Identifier: MIT
"""The tables of results/README.md from results/ppl/*.json and results/logs/*.jsonl:  python results/tables.py

"below" is nats per token under what the run is compared with, on the same masks (eval.py ppl --against), row by row. Seeds
share their rows, so the error over rows does not shrink with more of them: it is the mean of theirs.
"""

import glob
import json
import os
import re
import statistics

HERE = os.path.dirname(os.path.abspath(__file__))
mean = statistics.mean


def name_of(path):
    return os.path.splitext(os.path.basename(path))[0]


def bounds(pattern):
    """A line per label: seeds, PPL, what feedback gains within the model, and how far the model is below its binary one."""
    groups = {}
    for path in sorted(glob.glob(os.path.join(HERE, "ppl", pattern))):
        with open(path) as f:
            result = json.load(f)
        groups.setdefault(result["evaluation"]["label"], []).append(result)
    print("\n| model | updates | seeds | PPL (± sd of seeds) | feedback on, nats below off | nats below binary (± sd of seeds; ± SE of rows) |")
    print("|---|--:|--:|--:|--:|--:|")
    for label, runs in sorted(groups.items(), key=lambda group: (group[0] != "binary", group[0])):
        values = [run["values"] for run in runs]
        sd = lambda numbers, digits: f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
        ppl = [(v.get("soft") or v["binary"])["ppl"] for v in values]
        gain = [v["gain"]["nats_per_token"] for v in values if "gain" in v]
        below = [v["below_against"] for v in values if "below_against" in v]
        nats, rows = [b["nats_per_token"] for b in below], [b["nats_per_token_se"] for b in below]
        print(f"| {label} | {runs[0]['settings']['step']:,} | {len(runs)} | {mean(ppl):.3f}{sd(ppl, 3)} | "
              + (f"{mean(gain):.4f}" if gain else "") + " | "
              + (f"{mean(nats):+.4f}{sd(nats, 4)}; ± {mean(rows):.4f}" if below else "") + " |")


def ends():
    """Where ω and λ went, and the first of the logged updates with ω_s at 0.01 or more, for runs that start below."""
    print("\n| run | updates | ω_s, ω_a, ω_b | mean λ | take-off | tokens/s (median) | minutes |\n|---|--:|---|--:|--:|--:|--:|")
    for path in sorted(glob.glob(os.path.join(HERE, "logs", "*.jsonl")), key=lambda p: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", p)]):
        with open(path) as f:
            lines = [json.loads(line) for line in f]
        last, speed = lines[-1], statistics.median(line["tokens_per_s"] for line in lines)
        omega = ", ".join(f"{last['omega_' + s]:.3f}" for s in "sab") if "omega_s" in last else ""
        below = omega and lines[0]["omega_s"] < 0.01
        off = next((f"{line['step']:,}" for line in lines if line["omega_s"] >= 0.01), "never") if below else ""
        print(f"| {name_of(path)} | {last['step']:,} | {omega} | {last['lam']:.3f} | {off} | {speed:,.0f} | {last['seconds'] / 60:.0f} |")


for pattern in "scratch-*", "cont-*", "stdlib-*":
    bounds(pattern)
ends()
