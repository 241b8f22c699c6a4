# SPDX-License-Identifier: MIT
"""The tables of the Sudoku runs: means over seeds ± their standard deviation, from sudoku.jsonl.

    python results/sudoku_table.py > results/sudoku.md
    python results/sudoku_table.py results/figures/sudoku_cells.svg    # the shares, as a figure
    python results/sudoku_table.py results/figures/completable.svg     # and how grids go wrong

Nats per token are without the floor of α, on all held-out grids. "off" is an SM model without
feedback, which is a diagnosis and no baseline. Shares are whole grids right of 1,000 from each
run, in percent.
"""

import functools
import itertools
import math
import operator
import os
import re
import statistics
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
for folder in ("", "lab"):
    sys.path.insert(0, os.path.join(HERE, "..", folder))
from grids import NATS  # noqa: E402
from launch import read_json, read_jsonl  # noqa: E402
from plot import figure  # noqa: E402

ARMS = {
    "exact": "exact posterior", "binary": "binary", "sm": "SM",
    "deep": "binary, twice the layers", "deepsm": "SM, twice the layers",
    "tied": "tied layers, no vocabulary", "permuted": "SM, permuted feedback",
    "placebo": "SM, permuted at decoding only", "k1": "SM, k = 1",
    "k6": "SM, k = 6", "kV": "SM, k = V", "p05": "SM, p_sm = 0.5", "p10": "SM, p_sm = 1",
    "ours": "SM, ω from 0.5, 1, −2.8", "constant1": "constant λ = 0.1",
    "constant3": "constant λ = 0.3", "constant5": "constant λ = 0.5",
    "renorm": "SM, mix on the sphere", "slerp": "SM, slerp",
    "heads4": "SM, 4 heads", "eta2": "SM, η = 0.002", "width64": "SM, width 64",
    "batch16": "SM, 16 rows an update", "warmup0": "SM, no warm-up",
    "cont-binary": "continued: binary", "cont-sm": "continued: SM",
    "cont-ours": "continued: SM, ω from 0.5, 1, −2.8",
    "cont-probe": "continued: SM, ω_s = 0.05, before training"}
# Six arms with new seeds, each at its own learning rate, and what SM's weights become.
SIX = {"six-binary": "binary", "six-deep": "binary, twice the layers",
       "six-ours": "SM, ω from 0.5, 1, −2.8", "six-constant3": "constant λ = 0.3",
       "six-tied": "tied layers, no vocabulary", "six-selfcond": "self-conditioning"}
RATES = {"e5": "0.0005", "e10": "0.001", "e20": "0.002"}
# Steps in the names of results in the time of 6,000 updates of binary. Binary's own has none (""),
# but 6000 for seeds 13 to 15: of these, the name without a step is a second run (questions.md).
SIX_STEPS = "", "6000", "4550", "4700", "3050"
T_975 = 12.706, 4.303, 3.182, 2.776, 2.571  # t of 95 % intervals, 1 to 5 degrees of freedom
CURVES = "exact posterior", "binary", "SM", "binary, twice the layers", "constant λ = 0.3"
THEN = {"then-off": "SM, then 1,000 with p_sm = 0", "then-on": "SM, then 1,000 with p_sm = 0.8"}
CELLS = {
    "One or two cells a call": {
        "random-36": "any, one", "random-18": "any, two", "surest-36": "surest, one",
        "given-12": "surest, 12 given"},
    "The surest cell next": {
        "surest-18": "two a call", "surest-p9": "one, nucleus 0.9",
        "given-18": "one, 18 given", "given-24": "one, 24 given"},
    "Ancestral, T steps": {f"mdlm-{T}": str(T) for T in (5, 10, 20, 39, 156)},
    "ReMDM, T steps": {f"remdm-{T}": str(T) for T in (5, 10, 20, 39, 156)}}
DRAWN_CELLS = "One or two cells a call", "Ancestral, T steps"
DRAWN = "binary", "SM", "SM, off", "tied layers, no vocabulary", "binary, twice the layers"
KINDS = {"soft", "binary"}  # with feedback, and without
AFTER = 3, 6, 9, 12, 18, 24, 30, 36  # cells of the curve's table
ENTROPY = NATS / 39  # nats per token of a row
# What is compared seed by seed: (arm, cell, whether with feedback), twice.
PAIRS = [(("sm", cell, True), other) for cell in ("random-36", "surest-36")
         for other in (("sm", cell, False), ("binary", cell, False), ("tied", cell, True),
                       ("deep", cell, False))]
PAIRS += [(("sm", "mdlm-39", True), ("deep", f"mdlm-{T}", False)) for T in (39, 20)]
PAIRS += [(("sm", cell, True), ("deep", cell, False))
          for cell in ("mdlm-156", "remdm-39", "remdm-156")]
PAIRS += [(("sm", "random-36", True), ("deep", "random-18", False)),
          (("sm", "remdm-156", True), ("exact", "remdm-156", False)),
          (("placebo", "surest-36", True), ("sm", "surest-36", False)),
          (("sm", "surest-36", False), ("binary", "surest-36", False))]


def spread(values, form=".3f"):
    """mean ± standard deviation (number of values); nothing where there is none."""
    if not values:
        return ""
    error = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{error} ({len(values)})"


def table(heads, rows):
    if not rows:
        return
    print("\n| " + " | ".join(heads) + " |\n|---" + "|--:" * (len(heads) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


@functools.cache
def lines_of(file):
    return read_jsonl(f"{HERE}/{file}.jsonl")


def read(step=""):
    """({(arm, seed): {soft, binary: nats}}, {(arm, cell, feedback): {seed: share}}).

    step: after so many updates, "2000" or "12000" (default: at the end, after 6,000 from scratch).
    """
    bounds, shares = {}, {}
    for result in lines_of("sudoku"):
        name, _, at = result["name"].partition(".step-")
        run, _, cell = name.partition(".")
        arm, _, seed = run.rpartition("-") if "-" in run else (run, "", "")
        first, _, others = arm.partition("-")
        family = f"six-{others}" if first in RATES else arm
        if family not in ARMS | SIX | THEN or at != step:
            continue
        if not result.keys().isdisjoint(KINDS):
            for kind in result.keys() & KINDS:
                shares.setdefault((arm, cell, kind == "soft"), {})[seed] = result[kind]["right"]
        elif cell:
            cell, soft = re.fullmatch(r"(.*?)(-on|-off)?", cell).groups()
            shares.setdefault((arm, cell, soft != "-off"), {})[seed] = result["values"]["right"]
        else:
            kinds = result["values"].keys() & KINDS
            bounds[arm, seed] = {kind: result["values"][kind]["nats_per_token"] for kind in kinds}
    return bounds, shares


def at(step):
    """The bounds after so many updates."""
    return read("" if step == 6000 else str(step))[0]


def nats_of(bounds, arm):
    """{seed: nats with feedback where there is any}, [nats without it of models that have it]."""
    own = {seed: kinds for (other, seed), kinds in bounds.items() if other == arm}
    on = {seed: kinds.get("soft", kinds["binary"]) for seed, kinds in own.items()}
    return on, [kinds["binary"] for kinds in own.values() if "soft" in kinds]


def bounds_table(title, bounds, arms, base):
    """A row per arm: its bound with feedback and without, and how far it is above two others.

    base: an arm to compare with, in pairs of a seed, which have the same rows, times and masks.
    """
    other, rows = nats_of(bounds, base)[0], []
    for arm in arms:
        on, off = nats_of(bounds, arm)
        gap = [nats - ENTROPY for nats in on.values()]
        above = [on[seed] - other[seed] for seed in on if seed in other and arm != base]
        if on:
            rows.append([ARMS[arm], *map(spread, (list(on.values()), off, gap, above))])
    heads = [title, "nats per token", "off", "above the entropy", f"above {ARMS[base]}"]
    table(heads, rows)


def course(arms, steps):
    """A row per arm: how far its bound is above the entropy after so many updates. One for off."""
    found, rows = [at(step) for step in steps], []
    for arm in arms:
        on, off = zip(*(nats_of(bounds, arm) for bounds in found))
        for name, each in (ARMS[arm], [nats.values() for nats in on]), (ARMS[arm] + ", off", off):
            if any(each):
                rows.append([name, *(spread([x - ENTROPY for x in nats]) for nats in each)])
    table(["above the entropy after", *(f"{step:,}" for step in steps)], rows)


def equal_seconds(budgets):
    """A row per arm: its bound after as many updates, in steps of 500, as fit in the same time.

    budgets: [(updates, of this arm)], the time of so many updates of this arm.
    """
    seconds = {}
    for layers in 2, 4:
        timed = read_json(f"{HERE}/bench/sudoku.json")[f"train, {layers} layers"]["train"]
        for kind in "binary", "SM, p_sm = 0.8 (expected)":
            seconds[kind[:2], layers] = timed[kind]["seconds"]
    cost = {"binary": seconds["bi", 2], "sm": seconds["SM", 2], "tied": seconds["SM", 2],
            "deep": seconds["bi", 4], "deepsm": seconds["SM", 4]}
    rows, heads = [], ["equal seconds", "ms an update"]
    for updates, of in budgets:
        heads += [f"updates in the time of {updates:,} of {ARMS[of]}", "nats", "off"]
    for arm, each in cost.items():
        row = [ARMS[arm] + (" (timed as SM)" if arm == "tied" else ""), f"{1000 * each:.1f}"]
        for updates, of in budgets:
            step = int(updates * (cost[of] / each)) // 500 * 500
            on, off = nats_of(at(step), arm)
            row += [f"{step:,}", spread(list(on.values())), spread(off)]
        if any(row[3::3]):
            rows.append(row)
    table(heads, rows)


def shares_of(shares, cells):
    """{name: [percents of the seeds, for each cell]} of the arms that have any."""
    rows = {}
    for arm, name in ARMS.items():
        on, off = ([[100 * x for x in shares.get((arm, cell, soft), {}).values()]
                    for cell in cells] for soft in (True, False))
        found = {name: on, name + ", off": off} if any(on) else {name: off}
        rows |= {name: percents for name, percents in found.items() if any(percents)}
    return rows


def pairs_table(title, shares):
    """A row per pair: the difference in points, in brackets in standard errors, for each seed."""
    def named(arm, cell, soft):
        kind, _, number = cell.partition("-")
        words = {"mdlm": f"T = {number}", "remdm": f"ReMDM, T = {number}"}
        off = ", off" if arm == "sm" and not soft else ""
        return f"{ARMS[arm]}{off} ({words.get(kind) or CELLS['One or two cells a call'][cell]})"

    rows, seeds = [], [str(seed) for seed in range(1, 6)]
    for one, other in PAIRS:
        row = [f"{named(*one)} − {named(*other)}"]
        for seed in seeds:
            found = (shares.get(each, {}) for each in (one, other))
            p, q = (each.get(seed, each.get("", math.nan)) for each in found)  # "": no seeds
            error = math.sqrt((p * (1 - p) + q * (1 - q)) / 1000)
            row.append(f"{100 * (p - q):+.1f} ({(p - q) / error:+.1f})" if error > 0 else "")
        if any(row[1:]):
            rows.append(row)
    table([title, *(f"seed {seed}" for seed in seeds)], rows)


def run_cells(arm, seed, kinds, shares, cells, updates):
    """The row of one run: its bounds, how ω_s went in the first updates, shares in percent."""
    log = [line for line in lines_of("sudoku_logs")
           if line["name"] == f"{arm}-{seed}" and line["step"] <= updates]
    row = [f"{arm}-{seed}", f"{kinds.get('soft', kinds['binary']):.3f}"]
    row += [f"{kinds['binary']:.3f}" if "soft" in kinds else ""]
    if "soft" in kinds and log and not arm.startswith("constant"):
        over = (f"{line['step']:,}" for line in log if line.get("omega_s", 0) > 0.1)
        row += [next(over, "never"), f"{log[-1]['omega_s']:.2g}"]
    else:
        row += ["", ""]
    for cell in cells:
        on, off = (shares.get((arm, cell, soft), {}).get(seed) for soft in (True, False))
        row += [f"{100 * share:.1f}" if share is not None else ""
                for share in ((on, off) if "soft" in kinds else (off, None))]
    return row


def draw(shares):
    """Two groups of cells: means ± standard deviations over seeds, and what the best can do."""
    fig, axes = figure(len(DRAWN_CELLS), height=4.5)
    for ax, title in zip(axes, DRAWN_CELLS):
        cells = CELLS[title]
        found = shares_of(shares, cells)
        ceiling = found.get(ARMS["exact"], [[] for _ in cells])
        for i, (cell, percents) in enumerate(zip(cells, ceiling)):
            if cell == "given-12":
                percents = [100.0]  # one cell a call, from the true conditional
            ax.hlines(percents, i - 0.4, i + 0.4, color="black", label=ARMS["exact"])
        for n, name in enumerate(DRAWN):
            for i, percents in enumerate(found.get(name, [])):
                sd = [statistics.stdev(percents)] if len(percents) > 1 else None
                if percents:
                    ax.errorbar([i + 0.12 * n - 0.24], [statistics.fmean(percents)], sd, capsize=3,
                                fmt="o", color=f"C{n}", mfc="white" if "off" in name else None,
                                label=name)
        names = [name.replace(", ", "\n") for name in cells.values()]
        ax.set(title=title, ylim=(-3, 105), xticks=range(len(cells)),
               xticklabels=names, xlim=(-0.5, len(cells) - 0.5))
    axes[0].set(ylabel="whole grids right (%)")
    handles = {label: handle for ax in axes for handle, label in
               zip(*ax.get_legend_handles_labels())}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return fig


def fills():
    """{name: [what surest.py found, of each seed]} of empty grids, one cell a call."""
    results, found = lines_of("sudoku"), {}
    for arm, name in (ARMS | SIX | THEN).items():
        if arm in SIX:
            name = "new seeds: " + name
        seeds = [result for result in results if
                 re.fullmatch(arm + r"(-\d+)?\.surest-36", result["name"])]
        off = name + ", off" if any("soft" in result for result in seeds) else name
        for kind, title in ("soft", name), ("binary", off):
            if any(kind in result for result in seeds):
                found[title] = [result[kind] for result in seeds]
    return found


def over(seeds, column, of, cells):
    """The mean of a column over seeds and cells.   of: column with the number of grids in each."""
    weights = [result[of][i] for result in seeds for i in cells]
    values = [result[column][i] for result in seeds for i in cells]
    return sum(map(operator.mul, weights, values)) / max(1, sum(weights))


def fill_tables():
    """Surest cell next: how many grids can still be completed, and how sure a model is of cells."""
    rows, sure, first = [], [], []
    for name, seeds in fills().items():
        row = [spread([100 * result["completable"][n - 1] for result in seeds], ".0f")
               for n in AFTER]
        rows.append([name, *row])
        row = [name]
        for n in range(0, 36, 6):
            three = [over(seeds, column, "count", range(n, n + 6))
                     for column in ("sure", "true", "wrong")]
            row.append(" / ".join(f"{100 * value:.1f}" for value in three))
        sure.append(row)
        wrong = [[a * b for a, b in zip(result["count"], result["wrong"])] for result in seeds]
        grids = sum(map(sum, wrong))
        if grids:
            cells = sum(n * x for each in wrong for n, x in enumerate(each)) / grids
            p = sum(a * b for each, result in zip(wrong, seeds)
                    for a, b in zip(each, result["sure_wrong"])) / grids
            first.append([name, f"{grids:.0f}", f"{cells:.1f}", f"{p:.2f}"])
    table(["can still be completed (%), surest next, after cells", *map(str, AFTER)], rows)
    table(["sure / true / wrong (%), of grids that can, cells filled",
           *(f"{n} to {n + 5}" for n in range(0, 36, 6))], sure)
    table(["first wrong cell", "grids", "cells filled before", "p of its digit"], first)


def paired(values, base, form="+.3f"):
    """mean difference of two {seed: number}, with a 95 % interval of t, over seeds in both."""
    each = [values[seed] - base[seed] for seed in values if seed in base]
    if len(each) < 2:
        return ""
    mean = statistics.fmean(each)
    half = T_975[len(each) - 2] * statistics.stdev(each) / math.sqrt(len(each))
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


def in_order(values, form=None):
    """The numbers of {seed: number} by seed, or the seeds."""
    seeds = sorted(values, key=int)
    return " ".join(f"{values[seed]:{form}}" if form else seed for seed in seeds)


def six_tables():
    """Six arms on new seeds: the learning rate of each, bounds at equal seconds, each seed."""
    early = read("2000")[0]
    rows = []
    for arm, name in SIX.items():
        row = [name]
        for rate in RATES:
            on = nats_of(early, arm.replace("six", rate))[0]
            row.append(" ".join(f"{on[seed]:.3f}" for seed in sorted(on)))
        rows.append(row)
    table(["after 2,000 updates, seeds 6 and 7", *RATES.values()], rows if any(rows[0][1:]) else [])
    equal = {}
    for step in SIX_STEPS:
        equal |= read(step)[0]
    after, shares = read()
    for title, bounds in ("equal seconds", equal), ("6,000 updates", after):
        rows, base = [], nats_of(bounds, "six-ours")[0]
        for arm, name in SIX.items():
            on, off = nats_of(bounds, arm)
            on = {seed: on[seed] for seed in on if seed in base}
            rows.append([name, in_order(on, ".3f"), spread([x - ENTROPY for x in on.values()]),
                         spread([x - ENTROPY for x in off]),
                         paired(on, base) if arm != "six-ours" else ""])
        table([f"new seeds, {title}", f"nats of seeds {in_order(base)}", "above the entropy", "off",
               "above SM [95 %]"], rows if base else [])
    for cell in "random-36", "surest-36":
        rows, base = [], shares.get(("six-ours", cell, True), {})
        for arm, soft in itertools.product(SIX, (True, False)):
            right = shares.get((arm, cell, soft), {})
            off = not soft and (arm, cell, True) in shares  # compared with SM, off
            other = shares.get(("six-ours", cell, not off), {})
            binary = shares.get(("six-binary", cell, False), {})
            if right:
                rows.append([SIX[arm] + (", off" if off else ""), in_order(right, ".1%"),
                             paired(right, other, "+.1%") if arm != "six-ours" else "",
                             paired(right, binary, "+.1%") if arm != "six-binary" else ""])
        table([f"new seeds, {CELLS['One or two cells a call'][cell]}",
               f"right of seeds {in_order(base)}", "above SM, on or off alike [95 %]",
               "above binary [95 %]"], rows)


def draw_fills():
    """Grids that can still be completed, and the model's probability against the true one."""
    found, cells = fills(), range(1, 37)
    fig, (left, right) = figure(2, height=4.5)
    for n, name in enumerate(CURVES):
        for text in name, name + ", off":
            if text not in found:
                continue
            color, style = f"C{n}", "--" if text.endswith("off") else "-"
            means = [statistics.fmean(x) for x in
                     zip(*(result["completable"] for result in found[text]))]
            left.plot(cells, [100 * x for x in means], style, color=color, label=text)
            wrong = [100 * over(found[text], "wrong", "count", range(n, n + 3))
                     for n in range(0, 36, 3)]
            right.plot(range(2, 36, 3), wrong, style, color=color)
    left.set(xlabel="cells filled, the surest next", ylabel="grids that can be completed (%)",
             ylim=(0, 102))
    right.set(xlabel="cells filled, the surest next", ylim=(0, None),
              ylabel="digits written that cannot be (%)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def main(path=""):
    bounds, shares = read()
    if path:
        drawn = draw_fills() if "completable" in path else draw(shares)
        drawn.savefig(path)
        return
    continued = [arm for arm in ARMS if arm.startswith("cont-")]
    scratch = [arm for arm in ARMS if arm not in continued]
    bounds_table("after 6,000 updates", bounds, scratch, "sm")
    bounds_table("6,000 binary updates, then 4,000", bounds, continued, "cont-binary")
    bounds_table("after 12,000 updates", read("12000")[0], scratch, "sm")
    course(["binary", "sm", "deep", "deepsm", "tied", "heads4", "eta2", "width64", "batch16",
            "warmup0"],
           [2000, 4000, 6000, 8000, 10000, 12000])
    equal_seconds([(6000, "binary"), (6000, "sm"), (12000, "binary")])

    for step, after in ("", ""), ("12000", " (after 12,000 updates)"):
        found = read(step)[1]
        for title, cells in CELLS.items():
            cells = {cell: text for cell, text in cells.items()
                     if any(cell == other for _, other, _ in found)}
            table([title + after, *cells.values()],
                  [[name, *(spread(percents, ".1f") for percents in row)]
                   for name, row in shares_of(found, cells).items()])

    fill_tables()
    six_tables()
    for step, after in ("", "6,000"), ("12000", "12,000"):
        pairs_table(f"points, and standard errors, after {after} updates", read(step)[1])

    cells = {"random-36": "any", "surest-36": "surest", "given-12": "12 given"}
    heads = ["nats", "off", "ω_s > 0.1 after", "ω_s at the end"]
    heads += [text + off for text in cells.values() for off in (" (%)", ", off")]
    names = [*ARMS, *THEN]
    for step, title, updates in ("", "run", 6000), ("12000", "12,000 updates", 12000):
        bounds, shares = read(step)
        bounds = {run: kinds for run, kinds in bounds.items() if run[0] in names}
        runs = sorted(bounds.items(), key=lambda item: (names.index(item[0][0]), item[0][1]))
        table([title, *heads], [run_cells(*run, kinds, shares, cells, updates)
                                for run, kinds in runs])


if __name__ == "__main__":
    main(*sys.argv[1:])
