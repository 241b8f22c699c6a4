# SPDX-License-Identifier: MIT
"""Figures from result files.                                                                                      Fig. 3

Not here: any measurement. Every number comes from JSON that another script has written.

    python eval_dream.py --model=DIR --adapter=DIR --blocks=16,32,48,96,128,192,256 --threshold=0.9     # and --soft=false
    python plot.py --throughput=results --out=throughput.png                                            # Fig. 3
    python bench.py --json=bench.json && python plot.py --curves=bench.json --out=curves.png            # cost over sizes

Needs matplotlib (pip install matplotlib), which nothing else in this project does.
"""

import contextlib
import glob
import json
import os
from dataclasses import dataclass

from checkpoint import Refused, atomic, run


@dataclass
class Config:
    throughput: str = ""     # folder of eval_dream.py's results with block lengths
    curves: str = ""         # file of bench.py --json
    out: str = "plot.png"    # or .pdf, .svg


def figure(panels):
    """matplotlib's figure and axes, without a window."""
    try:
        import matplotlib
    except ImportError:
        raise Refused("plotting needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt.subplots(1, panels, figsize=(5 * panels, 4), squeeze=False, layout="constrained")


def throughput_series(folder):
    """{label: [(block, tokens/s, score or None)]}, by block, from a folder of eval_dream.py's results.

    A label is a task, the threshold or NFE budget, the feedback, and what else differs: only seeds are averaged.
    """
    runs, series = [], {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with contextlib.suppress(ValueError), open(path, encoding="utf-8") as f:
            r = json.load(f)
            if isinstance(r, dict) and r.get("by") == "eval_dream.py" and r["group"]["block"] and r["seconds"]:
                runs.append((r["group"].pop("block"), r["group"], r))
    if not runs:
        raise Refused(f"{folder} has no results with a block length: run eval_dream.py with --blocks=16,32,… first")
    for block, g, r in runs:
        budget = f"p ≥ {g['threshold']}" if g["threshold"] else f"NFE {g['budget']}"
        rest = [k for k in g if k not in ("threshold", "budget", "feedback")]
        differ = [k for k in rest if any(h.get(k, g[k]) != g[k] for _, h, _ in runs)]
        label = ", ".join([r["column"], g["feedback"], budget, *(f"{k}={g[k]}" for k in differ)])
        series.setdefault(label, {}).setdefault(block, []).append((r["tokens"] / r["seconds"], r["score"]))
    mean = lambda values: sum(values) / len(values) if None not in values else None
    return {label: [(block, *map(mean, zip(*runs))) for block, runs in sorted(blocks.items())] for label, blocks in series.items()}


def throughput(folder):
    """Left: tokens/s over block length. Right: score over tokens/s, where answers were scored                     Fig. 3"""
    series = throughput_series(folder)
    fig, [[speed, quality]] = figure(2)
    for label, points in series.items():
        speed.plot([block for block, _, _ in points], [rate for _, rate, _ in points], "o-", label=label)
        scored = [(rate, score) for _, rate, score in points if score is not None]
        quality.plot([rate for rate, _ in scored], [score for _, score in scored], "o-", label=label)
    speed.set(xlabel="block length (tokens)", ylabel="tokens/s")
    quality.set(xlabel="tokens/s", ylabel="score (%)")
    speed.legend()
    return fig


def curves(path):
    """A panel for each size that bench.py has varied: seconds of an update or a sample, binary and with SM."""
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)["curves"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused(f"{path} has no curves: run bench.py --parts=curves --json={path} first")
    fig, [axes] = figure(len(found))
    for ax, (name, points) in zip(axes, found.items()):
        for case in [c for c in points[0] if c != "x"]:
            ax.plot([str(p["x"]) for p in points], [p[case] for p in points], "o-", label=case)
        ax.set(title=name, xlabel=name.split()[-1], ylabel="seconds", ylim=(0, None))
        ax.legend()
    return fig


def main(cfg):
    if bool(cfg.throughput) == bool(cfg.curves):
        raise Refused("nothing to plot, or two things: give --throughput=FOLDER or --curves=FILE")
    kind = os.path.splitext(cfg.out)[1].lstrip(".")
    if kind not in ("png", "pdf", "svg"):
        raise Refused(f"--out={cfg.out} must end in .png, .pdf or .svg")
    fig = throughput(cfg.throughput) if cfg.throughput else curves(cfg.curves)
    with atomic(cfg.out) as tmp:
        fig.savefig(tmp, format=kind)
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    run(main, Config)
