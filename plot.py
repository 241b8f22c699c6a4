# SPDX-License-Identifier: MIT
"""Figures from result files.                                                                                      Fig. 3

Not here: any measurement. Every number comes from JSON that another script has written.

    python eval_dream.py --model=DIR --adapter=DIR --blocks=16,32,48,96,128,192,256 --threshold=0.9     # and --soft=false
    python plot.py --throughput=results --out=throughput.png                                            # Fig. 3

Needs matplotlib (pip install matplotlib), which nothing else in this project does.
"""

import glob
import json
import os
from dataclasses import dataclass

from checkpoint import Refused, atomic, run


@dataclass
class Config:
    throughput: str = ""     # folder of eval_dream.py's results with block lengths
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
    """{(column, feedback): [(block, tokens/s, score or None)], by block} from a folder of eval_dream.py's results."""
    series = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path) as f:
            r = json.load(f)
        if r["settings"]["block"] and r["seconds"]:
            point = r["settings"]["block"], r["tokens"] / r["seconds"], r["score"]
            series.setdefault((r["column"], r["feedback"]), []).append(point)
    if not series:
        raise Refused(f"{folder} has no results with a block length: run eval_dream.py with --blocks=16,32,… first")
    return {key: sorted(points, key=lambda p: p[0]) for key, points in series.items()}


def throughput(folder):
    """Left: tokens/s over block length. Right: score over tokens/s, where answers were scored                     Fig. 3"""
    series = throughput_series(folder)
    fig, [[speed, quality]] = figure(2)
    for (column, feedback), points in series.items():
        speed.plot([b for b, *_ in points], [v for _, v, _ in points], "o-", label=f"{column}, {feedback}")
        scored = [(v, score) for _, v, score in points if score is not None]
        quality.plot([v for v, _ in scored], [score for _, score in scored], "o-", label=f"{column}, {feedback}")
    speed.set(xlabel="block length (tokens)", ylabel="tokens/s")
    quality.set(xlabel="tokens/s", ylabel="score (%)")
    speed.legend()
    return fig


def main(cfg):
    if not cfg.throughput:
        raise Refused("nothing to plot: give --throughput=FOLDER")
    fig = throughput(cfg.throughput)
    with atomic(cfg.out) as tmp:
        fig.savefig(tmp, format=os.path.splitext(cfg.out)[1].lstrip(".") or "png")
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    run(main, Config)
