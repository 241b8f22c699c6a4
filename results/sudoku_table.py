# SPDX-License-Identifier: MIT
"""The table of the Sudoku runs: means over seeds ± their standard deviation, from results/sudoku.

    python results/sudoku_table.py > results/sudoku/table.md

Nats per token are without the floor of α, with feedback where there is an SM model. The share of
right grids is at one cell a call, 1,000 grids of each run; "off" is an SM model without feedback,
which is a diagnosis and no baseline. The second table is of the logs, run by run: the first update
with ω_s over 0.1, ω_s later, and the bound on 512 grids, with feedback where there is an SM model.
"""

import glob
import math
import os
import re
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from data import SUDOKU_NATS  # noqa: E402
from launch import read_json, read_jsonl  # noqa: E402

CELLS = {"random-36-on": "random, on", "random-36-off": "random, off",
         "entropy-36-on": "surest first, on", "entropy-36-off": "surest first, off"}


def spread(values):
    """mean ± standard deviation; a single value alone; nothing."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def from_logs():
    """The second table."""
    at = 1500, 3000, 3500, 6000
    heads = ["run", "ω_s > 0.1", "ω_s at 3,500", *(f"bound at {step:,}" for step in at)]
    print("\n| " + " | ".join(heads) + " |\n|---" + "|--:" * (len(heads) - 1) + "|")
    for path in sorted(glob.glob(f"{HERE}/sudoku/*.log.jsonl")):
        log = {line["step"]: line for line in read_jsonl(path)}
        first = [step for step, line in log.items() if line.get("omega_s", 0) > 0.1][:1]
        omega = [f"{log[3500]['omega_s']:.2f}"] if first else [""]
        bounds = [log[step].get("val_soft") or log[step]["val_plain"] if step in log else math.nan
                  for step in at]
        cells = [os.path.basename(path)[:-10], *(first or [""]), *omega,
                 *("" if math.isnan(nats) else f"{nats:.3f}" for nats in bounds)]
        print("| " + " | ".join(map(str, cells)) + " |")


def main():
    found = {}
    for path in sorted(glob.glob(f"{HERE}/sudoku/*.json")):
        run, _, cell = os.path.basename(path).removesuffix(".json").partition(".")
        arm, _, seed = run.rpartition("-")
        cell = cell.partition(".step-")[0]  # what sudoku_samples.sh adds where STEP is given
        if not re.fullmatch(r"\d+", seed) or cell and cell not in CELLS:
            continue
        result = read_json(path)
        row = found.setdefault((arm, result["settings"]["step"]), {})
        row.setdefault("seeds", set()).add(seed)
        if cell:
            row.setdefault(cell, []).append(result["values"]["right"])
            continue
        for kind in result["values"].keys() & {"soft", "binary"}:
            row.setdefault(kind, []).append(result["values"][kind]["unbiased_nats"])
    heads = ["arm", "updates", "seeds", "bound", "bound off", "gap", *CELLS.values()]
    print("| " + " | ".join(heads) + " |\n|---" + "|--:" * (len(heads) - 1) + "|")
    for (arm, step), row in sorted(found.items(), key=lambda item: (-item[0][1], item[0][0])):
        on, off = row.get("soft") or row.get("binary", []), row.get("binary", [])
        gap = [nats - SUDOKU_NATS / 39 for nats in on]
        cells = [arm, f"{step:,}", ", ".join(sorted(row["seeds"])), spread(on),
                 spread(off) if "soft" in row else "", spread(gap)]
        print("| " + " | ".join(cells + [spread(row.get(cell, [])) for cell in CELLS]) + " |")


if __name__ == "__main__":
    main()
    from_logs()
