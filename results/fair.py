# SPDX-License-Identifier: MIT
"""Puzzles solved against calls, by thresholds and by numbers of cells: the plan is in fair.md.

    python results/fair.py --checkpoint=out/fair/ours-31/step-6000.pt --name=ours-31
    python results/fair.py --keep=FILE --checkpoint=…    # its averaged weights, rounded to bfloat16
    python results/fair.py --table                       # of the lines in results/fair.jsonl
    python results/fair.py --figure=out/fair.svg

A run appends one line for each way to decode. A line that is there is not made again.
"""

import itertools
import json
import math
import os
import sys
from dataclasses import dataclass
from statistics import mean, stdev

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import latin  # noqa: E402
from constant import Constant  # noqa: E402

import checkpoint  # noqa: E402
import data  # noqa: E402
import grids  # noqa: E402
import sample  # noqa: E402
from checkpoint import git_version  # noqa: E402
from launch import append_jsonl, read_jsonl, run  # noqa: E402
from mdlm import MDLM  # noqa: E402
from softmask import neg_entropy  # noqa: E402

MASKS = 24                                                     # of 36 cells
WAYS = [("cells", cells) for cells in (1, 2, 3, 4, 6)]
WAYS += [("p", threshold) for threshold in (0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)]
LIKELIEST = 1e-12                                              # as top_p: one digit is left
DIGITS = slice(ord("1"), ord("7"))
nucleus = sample.nucleus

# {pair: (SM, binary, seeds)}
PRIMARY = {"the paper's start, rate 1e-3": ("sm", "binary", range(1, 6)),
           "from 0.5, rate 5e-4": ("ours", "binary", range(31, 34))}


@dataclass
class Config:
    checkpoint: str = ""
    name: str = ""               # ARM-SEED
    keep: str = ""
    count: int = 500
    out: str = os.path.join(HERE, "fair.jsonl")
    table: bool = False
    figure: str = ""


# ---- decoding ------------------------------------------------------------------------------------
def only_digits(probs, top_p=1.0):
    """The nucleus of the digits alone, in the place of sample.nucleus. probs: (n, V)."""
    digits = torch.zeros_like(probs)                                           # (n, V)
    digits[:, DIGITS] = probs[:, DIGITS]
    return nucleus(digits / digits.sum(-1, keepdim=True), top_p)               # (n, V)


def by_cells(model, x, cells, soft):
    """`cells` a call, those of lowest entropy first. Returns ids (n, 39) and calls (n,)."""
    generators = [data.rng("sample", 1, i) for i in range(len(x))]
    return sample.generate_in_order(model, len(x), MASKS // cells, "entropy", LIKELIEST,
                                    generators, x=x, soft=soft)


@torch.no_grad()
def by_threshold(model, x, threshold, soft):
    """Every mask whose likeliest token has p >= threshold; if a row has none, its surest mask.

    p is the largest share of the whole prediction. The surest mask has the lowest entropy. A row
    makes no call after its last mask. Returns ids (n, 39) and calls (n,).
    """
    net, mask_id = model.net, model.mask_id
    x, calls = x.clone(), torch.zeros(len(x), dtype=torch.long)                # (n, L), (n,)
    emb = F.embedding(x, net.table)                                            # (n, L, D)
    while (x == mask_id).any():
        rows = (x == mask_id).any(-1)                                          # (n,)
        now, e = x[rows], emb[rows]                                            # (m, L), (m, L, D)
        masked = now == mask_id                                                # (m, L)
        masks = masked.nonzero(as_tuple=True)                                  # 2 × (N,)
        h = net.hidden(e, masks, masked.float().mean(-1))                      # (N, D)
        logits = net.head(h)                                                   # (N, V)
        logp = logits.log_softmax(-1)                                          # (N, V)
        p = torch.zeros(now.shape).index_put(masks, logp.amax(-1).exp())       # (m, L)
        minus_H = torch.zeros(now.shape).index_put(masks, neg_entropy(logp))   # (m, L)
        digit = logits[:, DIGITS].argmax(-1) + DIGITS.start                    # (N,)
        certain = masked & (p >= threshold)                                    # (m, L)
        surest = sample.next_masks(minus_H, masked, now.shape[1])              # (m, L)
        chosen = torch.where(certain.any(-1, keepdim=True), certain, surest)   # (m, L)
        if soft:
            e[masks] = model.feedback_chunk(h, logits)[0]
        now = torch.where(chosen, now.index_put(masks, digit), now)            # (m, L)
        x[rows], calls[rows] = now, calls[rows] + 1
        emb[rows] = torch.where(chosen[..., None], F.embedding(now, net.table), e)
    return x, calls


def load(cfg):
    model = MDLM.load(cfg.checkpoint)
    if cfg.name.startswith("constant"):
        model.sm.__class__ = Constant
    return model


def puzzles(name, count, mask_id):
    """Puzzles x (n, 39) with 12 cells given. Those of Sudoku are the ones of "Fewer calls"."""
    key = "fair latin" if name.startswith("latin") else "fewer calls"
    texts = (latin if name.startswith("latin") else grids).texts(count, data.rng(key))
    draws = [data.rng(key, i) for i in range(count)]
    return grids.puzzles(grids.ids_of(texts, mask_id), 36 - MASKS, mask_id, draws)


def sudoku(cells):
    return "." not in cells and not grids.mistake(cells)


def decode(cfg):
    """Appends solved and calls for each way to decode, with feedback and without."""
    sample.nucleus = only_digits
    model = load(cfg)
    x = puzzles(cfg.name, cfg.count, model.mask_id)                            # (n, 39)
    there = {(line["name"], line["way"], line["value"], line["soft"])
             for line in read_jsonl(cfg.out)}
    for (way, value), soft in itertools.product(WAYS, (True, False) if model.sm else (False,)):
        if (cfg.name, way, value, soft) in there:
            continue
        fill = by_cells if way == "cells" else by_threshold
        ids, calls = fill(model, x, value, soft)
        right = latin.right if cfg.name.startswith("latin") else sudoku
        solved = [right(text) for text in grids.cells_of(ids, model.mask_id)]
        config = model.info["config"]
        line = {"name": cfg.name, "way": way, "value": value, "soft": soft,
                "solved": sum(solved) / cfg.count, "calls": calls.double().mean().item(),
                "n": cfg.count, "step": model.info["step"], "eta_bb": config["eta_bb"],
                "omega": [config["omega_s"], config["omega_a"], config["omega_b"]],
                "git": git_version()}
        append_jsonl(cfg.out, line)
        print(line, flush=True)


def keep(cfg):
    """The averaged weights, rounded to bfloat16 (ω is not), and what the file says of them."""
    weights, info = checkpoint.weights(cfg.checkpoint)
    small = {name: t if name.startswith("sm.") else t.bfloat16() for name, t in weights.items()}
    checkpoint.write_safetensors(cfg.keep, small, {checkpoint.FORMAT: json.dumps(info)})


# ---- what the lines say --------------------------------------------------------------------------
def read(path):
    """{(arm, soft, seed): {(way, value): (solved in %, calls)}}"""
    found = {}
    for line in read_jsonl(path):
        arm, _, seed = line["name"].rpartition("-")
        point = 100 * line["solved"], line["calls"]
        found.setdefault((arm, line["soft"], int(seed)), {})[line["way"], line["value"]] = point
    return found


def front(points):
    """[(calls, solved)], rising: the ways that no other way beats with as few calls."""
    kept = []
    for calls, solved in sorted((calls, solved) for solved, calls in points.values()):
        if not kept or solved > kept[-1][1]:
            kept.append((calls, solved))
    return kept


def solved_in(points, calls):
    """What is solved in so many calls, on the lines between neighbours of the front."""
    line = front(points)
    for (a, low), (b, high) in zip(line, line[1:]):
        if a <= calls < b:
            return low + (high - low) * (calls - a) / (b - a)
    return line[-1][1] if calls >= line[-1][0] else math.nan


def calls_for(points, solved):
    """The fewest calls that solve so many, on these lines; at least the calls of the first way.

    Returns (calls, whether so many are solved at all). If not, the calls are one per mask.
    """
    line = front(points)
    if solved <= line[0][1]:
        return line[0][0], True
    for (a, low), (b, high) in zip(line, line[1:]):
        if low < solved <= high:
            return a + (b - a) * (solved - low) / (high - low), True
    return float(MASKS), False


def p_value(t, df):
    """Of a two-sided test: 2 ∫_t^∞ of Student's density, by the trapezoid rule."""
    scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    n = 100_000  # x = |t| + u / (1 − u) maps [0, 1) to the tail
    total = 0.0
    for i in range(n):
        u = (i + 0.5) / n
        x = abs(t) + u / (1 - u)
        total += (1 + x * x / df) ** (-(df + 1) / 2) / (1 - u) ** 2
    return 2 * scale * total / n


def paired(gaps):
    """(mean, its standard error, p) of differences, one a seed"""
    error = stdev(gaps) / math.sqrt(len(gaps))
    return mean(gaps), error, p_value(mean(gaps) / max(error, 1e-9), len(gaps) - 1)


def spread(x, form=".1f"):
    sd = f" ± {stdev(x):{form}}" if len(x) > 1 else ""
    return f"{mean(x):{form}}{sd}"


def primary(found):
    tests = {}
    for title, (sm, binary, seeds) in PRIMARY.items():
        pairs = [(found.get((sm, True, seed), {}), found.get((binary, False, seed), {}))
                 for seed in seeds]
        pairs = [pair for pair in pairs if all(len(points) == len(WAYS) for points in pair)]
        print(f"\n{title}: {len(pairs)} of {len(seeds)} seeds")
        if not pairs:
            continue
        one = [points["cells", 1][0] for _, points in pairs]
        needs = [calls_for(points, goal) for (points, _), goal in zip(pairs, one)]
        itself = [calls_for(points, goal) for (_, points), goal in zip(pairs, one)]
        print(f"  binary at one cell a call, {MASKS} calls: {spread(one)} % solved")
        print(f"  calls that SM needs for as many: {spread([c for c, _ in needs], '.2f')}  "
              f"{[round(c, 2) if enough else 'never' for c, enough in needs]}")
        itself = spread([calls for calls, _ in itself], ".2f")
        print(f"  calls that binary needs, with thresholds: {itself}")
        nines = [points["p", 0.9] for _, points in pairs]
        half = [solved_in(points, calls / 2) for (points, _), (_, calls) in zip(pairs, nines)]
        own = [solved_in(points, calls / 2) for (_, points), (_, calls) in zip(pairs, nines)]
        print(f"  binary at p >= 0.9: {spread([s for s, _ in nines])} % in "
              f"{spread([c for _, c in nines])} calls; in half of these SM {spread(half)}, "
              f"binary {spread(own)}")
        if len(pairs) > 1:
            tests[title, "calls: SM − 24"] = paired([c - MASKS for c, _ in needs])
            tests[title, "solved: SM in half the calls − binary"] = paired(
                [a - b for a, (b, _) in zip(half, nines)])
    worst = 0.0
    print(f"\nPaired t over seeds: difference ± standard error, p, p by Holm of {len(tests)}")
    for i, name in enumerate(sorted(tests, key=lambda name: tests[name][2])):
        gap, error, p = tests[name]
        worst = max(worst, min(1.0, (len(tests) - i) * p))
        print(f"{' | '.join(name):72} {gap:7.2f} ± {error:5.2f}  {p:.5f}  {worst:.5f}")


def groups(found):
    """[(title, [points of each seed])], one for each arm and set of seeds, on and off"""
    kinds = {}
    for (arm, soft, seed), points in sorted(found.items()):
        kinds.setdefault((seed > 30, arm, soft), []).append((seed, points))
    for (_, arm, soft), seeds in kinds.items():
        names = ", ".join(str(seed) for seed, _points in seeds)
        word = "with" if soft else "without"
        yield f"{arm} {word} feedback, seeds {names}", [points for _, points in seeds]


def table(cfg):
    found = read(cfg.out)
    heads = [f"{value} a call" if way == "cells" else f"p ≥ {value}" for way, value in WAYS]
    print("% solved (calls), mean ± standard deviation over seeds\n")
    print("| | " + " | ".join(heads) + " |\n|---|" + len(heads) * "--:|")
    for title, seeds in groups(found):
        cells = []
        for way in WAYS:
            points = [each[way] for each in seeds if way in each]
            cells.append("")
            if points:
                solved, calls = zip(*points)
                cells[-1] = f"{spread(solved)} ({spread(calls)})"
        print(f"| {title} | " + " | ".join(cells) + " |")
    primary(found)


def figure(cfg):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"svg.hashsalt": "fair", "font.size": 9})
    found = read(cfg.out)
    panels = {"seeds 1 to 5, rate 1e-3": (
                  ("binary", False, "binary", "C7"), ("deep", False, "deep", "C1"),
                  ("sm", True, "SM, the paper's start", "C0"),
                  ("sm", False, "the same, without feedback", "C9"),
                  ("ours", True, "SM, ω from 0.5", "C2"),
                  ("constant", True, "constant λ", "C4")),
              "seeds 31 to 33, rate 5e-4": (
                  ("binary", False, "binary", "C7"), ("ours", True, "SM, ω from 0.5", "C2"),
                  ("ours", False, "the same, without feedback", "C8"),
                  ("constant", True, "constant λ", "C4"))}
    shown = [(title, arms) for title, arms in panels.items()
             if any((seed > 30) == ("31" in title) for _, _, seed in found)]
    fig, axes = plt.subplots(1, len(shown), figsize=(4.6 * len(shown), 3.6), sharey=True,
                             squeeze=False)
    for ax, (title, arms) in zip(axes[0], shown):
        for arm, soft, label, color in arms:
            seeds = [points for (a, s, seed), points in found.items()
                     if (a, s) == (arm, soft) and (seed > 30) == ("31" in title)]
            if not seeds:
                continue
            for kind, style in (("p", "o-"), ("cells", "s:")):
                ways = sorted(way for way in WAYS if way[0] == kind)
                solved = [[each[way][0] for each in seeds] for way in ways]
                calls = [mean(each[way][1] for each in seeds) for way in ways]
                middle = [mean(x) for x in solved]
                sd = [stdev(x) if len(x) > 1 else 0 for x in solved]
                name = f"{label} ({len(seeds)})" if kind == "p" else None
                if kind == "p":
                    ax.fill_between(calls, [m - s for m, s in zip(middle, sd)],
                                    [m + s for m, s in zip(middle, sd)], color=color, alpha=0.15,
                                    linewidth=0)
                ax.plot(calls, middle, style, color=color, label=name, markersize=3,
                        linewidth=1.5 if kind == "p" else 0.8)
        ax.set(xlabel="calls a puzzle", xlim=(0, 25), ylim=(0, 101), title=title)
        ax.grid(alpha=0.2)
        ax.legend(fontsize=7, loc="lower right")
    axes[0][0].set_ylabel("% of 500 puzzles solved")
    fig.tight_layout()
    fig.savefig(cfg.figure, metadata={"Date": None} if cfg.figure.endswith(".svg") else None)


def main(cfg):
    if cfg.table:
        table(cfg)
    elif cfg.figure:
        figure(cfg)
    elif cfg.keep:
        keep(cfg)
    else:
        decode(cfg)


if __name__ == "__main__":
    run(main, Config)
