# SPDX-License-Identifier: MIT
"""Figures from logs and result files.                                                      Fig. 2, 3, 4, App. C.3

Not here: any measurement. Every number comes from JSON that another script has written.

    python plot.py --runs="out/binary-*/log.jsonl,out/sm-*/log.jsonl" --out=fig2.png                    # Fig. 2; -1, -2, … are seeds
    python plot.py --ablation="out/*/log.jsonl" --out=ablation.png                                      # App. C.3
    python sample.py --checkpoint=out/last.pt --length=16 --trace=trace.jsonl && python plot.py --trajectory=trace.jsonl    # Fig. 4
    python eval_dream.py --model=DIR --adapter=DIR --blocks=16,32,48,96,128,192,256 --threshold=0.9     # and --soft=false
    python plot.py --throughput=out/answers --out=throughput.png                                        # Fig. 3
    python bench.py --json=bench.json && python plot.py --curves=bench.json --out=curves.png            # cost over sizes

Needs matplotlib (pip install matplotlib), which nothing else in this project does.
"""

import contextlib
import glob
import json
import math
import os
import re
import statistics
from dataclasses import dataclass

from launch import Refused, atomic, run


@dataclass
class Config:
    runs: str = ""           # patterns of train.py's logs, a comma between them
    ablation: str = ""       # likewise
    trajectory: str = ""     # file of sample.py --trace
    throughput: str = ""     # folder of eval_dream.py's results with block lengths
    curves: str = ""         # file of bench.py --json
    out: str = "plot.png"    # or .pdf, .svg


def figure(panels, width=5, height=4):
    """matplotlib's figure, without a window, and its axes, at most three in a row."""
    try:
        import matplotlib
    except ImportError:
        raise Refused("plotting needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows, columns = -(-panels // 3), min(3, panels)
    fig, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")
    return fig, axes.flatten()


def read_lines(path):
    try:
        with open(path, encoding="utf-8") as f:
            return [json.loads(line) for line in f]
    except (OSError, ValueError) as e:
        raise Refused(f"{path} is no file of JSON lines ({e})")


def runs_series(patterns):
    """{label: {quantity: {update: [a value per seed]}}} for PPL and ω_s, from logs of train.py.

    A run is called by its file, or by its folder where the file is log.jsonl; what is left without -SEED is the label.
    PPL is the two-pass bound where the model has feedback, Eq. 2 itself where it has none. A file counts once.        §4.1
    """
    series = {}
    for path in sorted({os.path.abspath(path) for pattern in patterns.split(",") for path in glob.glob(pattern)}):
        folder, file = os.path.split(path)
        name = os.path.basename(folder) if file == "log.jsonl" else file.removesuffix(".jsonl")
        lines = read_lines(path)
        if any("val_soft_ce" in line or "val_binary" in line for line in lines if isinstance(line, dict)):
            continue  # finetune_dream.py's: its loss is no bound
        into = series.setdefault(re.sub(r"-\d+$", "", name), {"ppl": {}, "omega_s": {}})
        for line in lines:
            try:
                values = {"ppl": math.exp(line.get("val_soft", line.get("val_plain", math.nan))), "omega_s": line.get("omega_s", math.nan)}
                for quantity, value in values.items():
                    if math.isfinite(value):
                        into[quantity].setdefault(int(line["step"]), []).append(value)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                raise Refused(f"{path} is no log of train.py: each of its lines has a step and numbers")
    if not any(into["ppl"] for into in series.values()):
        raise Refused(f"no log with a held-out bound matches {patterns!r}: train.py writes one with --eval_every")
    return series


def runs(patterns):
    """Left: held-out perplexity over updates. Right: ω_s. Mean over seeds, a band of one standard deviation           Fig. 2"""
    fig, axes = figure(2)
    for i, (label, quantities) in enumerate(runs_series(patterns).items()):
        for ax, points in zip(axes, quantities.values()):
            steps = sorted(points)
            mean = [statistics.mean(points[step]) for step in steps]
            sd = [statistics.stdev(points[step]) if len(points[step]) > 1 else 0.0 for step in steps]
            if steps:
                ax.plot(steps, mean, label=label, color=f"C{i}")  # C0, C1, …: a run without ω must not shift the other panel's
                ax.fill_between(steps, [m - d for m, d in zip(mean, sd)], [m + d for m, d in zip(mean, sd)],
                                alpha=0.25, color=f"C{i}", linewidth=0)
    axes[0].set(xlabel="updates", ylabel="held-out perplexity (bound)")
    axes[1].set(xlabel="updates", ylabel="ω_s", ylim=(0, None))
    axes[0].legend()
    return fig


def ablation(patterns):
    """The last held-out perplexity of every label, best on top, a bar of one standard deviation where there are seeds  App. C.3"""
    last = {label: q["ppl"][max(q["ppl"])] for label, q in runs_series(patterns).items() if q["ppl"]}
    labels = sorted(last, key=lambda label: -statistics.mean(last[label]))
    fig, [ax] = figure(1, width=6, height=1 + 0.35 * len(labels))
    ax.errorbar([statistics.mean(last[k]) for k in labels], labels, fmt="o",
                xerr=[statistics.stdev(last[k]) if len(last[k]) > 1 else 0.0 for k in labels])
    ax.set(xlabel="held-out perplexity (bound)")
    ax.grid(axis="x")
    return fig


def trajectory(path):
    """A sample appearing: a row per step. Green cells are masks, deeper with λ, and say the top guess; bold is text       Fig. 4"""
    steps = read_lines(path)
    if not steps:
        raise Refused(f"{path} is empty: make it again with sample.py --trace={path}")
    try:
        strength = [[math.nan if lam is None else lam for _, lam in step] for step in steps]
        fig, [ax] = figure(1, width=0.55 * len(steps[0]) + 1, height=0.3 * len(steps) + 1)
        image = ax.imshow(strength, cmap="Greens", vmin=0, aspect="auto")
        for i, step in enumerate(steps):
            for j, (text, lam) in enumerate(step):
                ax.text(j, i, "␣" if text == " " else text, ha="center", va="center", size=8, parse_math=False,
                        weight="bold" if lam is None else "normal",
                        color="white" if lam is not None and lam > 0.6 * image.norm.vmax else "black")
    except (TypeError, ValueError, IndexError):
        raise Refused(f"{path} is no trajectory: make one with sample.py --trace={path}")
    ax.set(xlabel="position", ylabel="step", xticks=[])
    fig.colorbar(image, label="strength λ")
    return fig


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
    fig, [speed, quality] = figure(2)
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
    fig, axes = figure(len(found))
    for ax, (name, points) in zip(axes, found.items()):
        for case in [c for c in points[0] if c != "x"]:
            ax.plot([str(p["x"]) for p in points], [p[case] for p in points], "o-", label=case)
        ax.set(title=name, xlabel=name.split()[-1], ylabel="seconds", ylim=(0, None))
        ax.legend()
    return fig


KINDS = {f.__name__: f for f in (runs, ablation, trajectory, throughput, curves)}


def main(cfg):
    wanted = [name for name in KINDS if getattr(cfg, name)]
    if len(wanted) != 1:
        raise Refused(f"{len(wanted)} things to plot: give one of --{', --'.join(KINDS)}")
    kind = os.path.splitext(cfg.out)[1].lstrip(".")
    if kind not in ("png", "pdf", "svg"):
        raise Refused(f"--out={cfg.out} must end in .png, .pdf or .svg")
    fig = KINDS[wanted[0]](getattr(cfg, wanted[0]))
    with atomic(cfg.out) as tmp:
        fig.savefig(tmp, format=kind)
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    run(main, Config)
