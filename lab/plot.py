# SPDX-License-Identifier: MIT
"""The paper's figures and markdown tables, from logs and results.      Tables 1-12, Fig. 3-5, 8

    python lab/plot.py --table="out/*/*.json"                   # results of eval.py, as in Table 1
    python lab/plot.py --runs="out/*/log.jsonl" --out=fig3.png  # loss and bounds, as in Fig. 3

The number at the end of a run's name is its seed: sm-1 and sm-2 are two seeds of sm. (--table takes
results with the same --label as seeds.) Tables and figures show means over seeds, and ± and bands
are standard deviations over seeds.
"""

import glob
import math
import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch import Refused, atomic, check_same, read_json, read_jsonl, readable, run, write_text


@dataclass
class Config:
    """Give one source. Where it is a pattern, several may be given with commas between them."""
    table: str = ""          # results of eval.py and eval_samples.py: Tables 1, 2, 4-7, Fig. 5
    benchmarks: str = ""     # folder of eval_dream.py's results: Tables 3, 8-12
    runs: str = ""           # pattern of train.py's logs: Fig. 3
    throughput: str = ""     # folder of results of eval_dream.py --blocks=16,32,48: Fig. 4
    learned: str = ""        # pattern of logs of train.py or finetune_dream.py: Fig. 8
    out: str = ""            # (default: plot.png of a figure, else the screen)


def files(patterns):
    """The sorted files of all patterns."""
    found = {path for pattern in patterns.split(",") for path in glob.glob(pattern)}
    if not found:
        raise Refused(f"no file matches {patterns!r}: correct the pattern")
    return sorted(found)


def run_name(path):
    """"sm" of out/sm-1/log.jsonl and of out/sm-2/step-9.pt: the number at the end is a seed."""
    return re.sub(r"-\d+$", "", Path(path).parent.name)


def markdown(rows, columns):
    """A markdown table.   rows: {heading: cell}, where cells may be missing."""
    lines = [columns, ["---"] * len(columns)]
    lines += [[row.get(column, "") for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# What eval.py and eval_samples.py measure, and the order of the columns
METRICS = {"mauve": ("MAUVE ↑", ".3f"), "gen_ppl": ("gen. PPL ↓", ".2f"),
           "entropy": ("entropy ↑", ".3f"), "ppl": ("PPL ↓", ".3f")}
# What may differ between results that are averaged
FREE = {"checkpoint", "samples", "weights", "seed", "seeds", "rows", "out", "label", "batch_size",
        "device", "transformers", "mauve-text"}


def read_cells(pattern):
    """{(unmasking, feedback, label): {(metric, NFE / L or text): [value]}} of results."""
    cells, first = {}, {}
    for path in files(pattern):
        result = read_json(path)
        if result.get("metric") not in ("ppl", "samples"):  # another file
            continue
        values, settings, evaluation = (result[k] for k in ("values", "settings", "evaluation"))
        unmasking, feedback, budget = "data", "", ""  # held-out rows can be scored like samples
        if result["metric"] == "ppl":
            unmasking, feedback = "", "soft" if "soft" in values else "binary"
            budget = Path(settings["text"]["path"]).name
            values = {"ppl": values[feedback]["ppl"]}
        elif settings["sampler"] != "data":
            unmasking = settings["sampler"].partition("-")[0]  # remdm-cap and -loop share a row
            feedback = "soft" if settings["soft"] else "off" if settings["soft_mask"] else "binary"
            budget = "{}/{}".format(*Fraction(settings["steps"], settings["L"]).as_integer_ratio())
        values = values.get("samples", values)
        label = evaluation["label"] or settings.get("checkpoint") or evaluation["checkpoint"]
        key = unmasking, feedback, label
        conditions = {name: value for name, value in (evaluation | settings).items()
                      if name not in FREE}
        other, before = first.setdefault((key, budget), (path, conditions))
        both = {name: conditions.get(name) for name in before | conditions}
        check_same(other, before, both, both,
                   f": {path} would be averaged with it as {label}, so give it another --label")
        row = cells.setdefault(key, {})
        for metric in METRICS.keys() & values.keys():
            row.setdefault((metric, budget), []).append(values[metric])
    return dict(sorted(cells.items()))


def with_gain(words, values, base, spec):
    """The row of a table, with mean ± deviation over seeds, and the row of its gain over a base"""
    row, gain = dict(words), {}  # values, base: {heading: [value]}, spec: {heading: format}
    for heading, seeds in values.items():
        form = spec[heading]
        row[heading] = f"{mean(seeds):{form}}"
        if len(seeds) > 1:
            row[heading] += f" ± {stdev(seeds):{form}}"
        if heading in base:
            gain[heading] = f"{mean(seeds) - mean(base[heading]):+{form}}"
    return [row, {"feedback": "gain"} | gain] if gain else [row]


def p_value(x):
    """p of a two-sided t-test that the mean of x is 0, for any number of differences x

    The distribution of t is in Abramowitz and Stegun, 26.7.3 (odd degrees of freedom) and 26.7.4.
    """
    df = len(x) - 1
    angle = math.atan2(abs(mean(x)) * math.sqrt(len(x)), stdev(x) * math.sqrt(df))  # atan(t / √df)
    odd = df % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for i in range(2 + odd, df + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (i - 1) / i
    inside = math.sin(angle) * total  # P[|T| < |t|]
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return 1 - inside


def holm(gaps):
    """{name: p} of the means of gaps {name: [difference]}, corrected by Holm for their number"""
    p = {name: p_value(gap) for name, gap in gaps.items()}
    found = {}
    worst = 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        worst = max(worst, min(1.0, (len(p) - rank) * p[name]))
        found[name] = worst
    return found


def clear_from(x, tests):
    """How large the mean of x must be for p < 0.05 in so many tests, if x scatters as it does

    By Holm's first and strictest step, so it does not depend on the other tests.
    """
    low = 0.0
    high = 100 * stdev(x)
    for _ in range(50):
        middle = (low + high) / 2
        if tests * p_value([value - mean(x) + middle for value in x]) < 0.05:
            high = middle
        else:
            low = middle
    return high


def against(pairs, seeds):
    """{name: "mean of x − y (p, clear_from)"} of pairs {name: (x, y)}, with a number for each seed

    There is no p before all planned seeds are in.
    """
    gaps = {name: [a - b for a, b in zip(x, y)] for name, (x, y) in pairs.items()}
    means = {name: mean(gap) for name, gap in gaps.items()}
    # What rounds to 0 has no sign.
    cells = {name: f"{x:+.1f}" if abs(x) >= 0.05 else "0.0" for name, x in means.items()}
    if all(len(gap) == seeds for gap in gaps.values()):
        for name, p in holm(gaps).items():
            limit = clear_from(gaps[name], len(gaps))
            words = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
            cells[name] += f" ({words}, clear from {limit:.1f})"
    return cells


def table(pattern):
    """Results of eval.py.                                                       Tables 1, 2, 4-7"""
    cells, bases, lines = read_cells(pattern), {}, []
    columns = sorted({column for row in cells.values() for column in row}, key=lambda column: (
        list(METRICS).index(column[0]), Fraction(column[1]) if "/" in column[1] else 0, column[1]))
    headings = {column: f"{METRICS[column[0]][0]} {column[1]}".strip() for column in columns}
    spec = {headings[column]: METRICS[column[0]][1] for column in columns}
    for (unmasking, feedback, label), row in cells.items():
        row = {headings[column]: values for column, values in row.items()}
        if feedback == "binary":
            bases[unmasking] = label, row
            bases[unmasking, label] = label, row
        # Gains are over the binary model with this label, or else the last one.
        over, base = bases.get((unmasking, label)) or bases.get(unmasking, ("", {}))
        words = {"unmasking": unmasking, "feedback": feedback, "model": label}
        found, *gain = with_gain(words, row, base if feedback == "soft" else {}, spec)
        lines += [found, *(line | {"model": f"over {over}"} for line in gain)]
    return markdown(lines, ["unmasking", "feedback", "model", *headings.values()])


def dream_results(folder):
    """{row: {task: [result]}} of all results of eval_dream.py in a folder that have a score

    Only results that agree in all settings are averaged. Few passes come first. The feedback column
    also has the settings in which rows differ.
    """
    rows, problems = {}, {}
    results = [*map(read_json, files(f"{folder}/*.json"))]
    shown = {"model", "data", "block", "threshold", "budget", "feedback", "FT", "FT run"}
    seen = {}
    for result in results:
        for name in result["group"].keys() - shown:
            seen.setdefault(name, set()).add(str(result["group"][name]))
    for result in results:
        group, task = dict(result["group"]), result["column"]
        others = "".join(f", {name}={group[name]}" for name in sorted(seen)
                         if name in group and len(seen[name]) > 1)
        if problems.setdefault(task, group["data"]) != group.pop("data"):
            raise Refused(f"{folder} has results of {task} on different problems: separate them")
        passes, words = Fraction(group["budget"]), group["budget"]
        if group["threshold"]:
            passes, words = group["threshold"], f"p ≥ {group['threshold']}"
        row = (group["block"], passes, words, group["model"], group["feedback"].startswith("SM k"),
               group["FT"], group["feedback"], others, str(sorted(group.items())))
        if result["score"] is not None:
            rows.setdefault(row, {}).setdefault(task, []).append(result)
    return dict(sorted(rows.items()))


def benchmarks(folder):
    """Results of eval_dream.py.                                                   Tables 3, 8-12"""
    rows, bases, lines = dream_results(folder), {}, []
    spec = dict.fromkeys(sorted({task for row in rows.values() for task in row}), ".1f")
    for (block, _, budget, model, soft, FT, feedback, others, _), row in rows.items():
        budget += f", block {block}" if block else ""
        scores = {task: [result["score"] for result in results] for task, results in row.items()}
        if feedback == "binary" and FT != "-":
            bases[budget, model, others] = scores
            bases[budget, model, others, FT] = scores
        # Gains are over the binary model that was finetuned for as long, or else the last one.
        same = budget, model, others
        base = bases.get((*same, FT)) or bases.get(same, {})
        words = {"NFE budget": budget, "model": model, "FT": FT, "feedback": feedback + others}
        lines += with_gain(words, scores, base if soft and FT != "-" else {}, spec)
    return markdown(lines, ["NFE budget", "model", "FT", "feedback", *spec])


AXES = {"loss": "training loss (nats per token)", "bound": "held-out bound (nats per token)",
        "omega_s": "ω_s", "omega_a": "ω_a (1/nat)", "omega_b": "ω_b (nats)", "tau": "τ"}


def figure(panels, width=4, height=3.6):
    """A figure that needs no screen, and its axes side by side."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(width * panels, height), layout="constrained")
    return fig, fig.subplots(1, panels, squeeze=False)[0]


def over_updates(patterns, quantities):
    """A panel for each quantity. A line ends where the first of its seeds ends.     §4.1, Eq. 3"""
    runs = {}
    for path in files(patterns):
        log = read_jsonl(path)
        if not any("step" in line for line in log):
            raise Refused(f"{path} is no log of a training run")
        runs.setdefault(run_name(path), []).append(log)
    fig, axes = figure(len(quantities))
    for ax, quantity in zip(axes, quantities):
        keys = ("val_plain", "val_soft") if quantity == "bound" else (quantity,)  # val_soft wins
        for i, (name, logs) in enumerate(runs.items()):
            seeds = [{line["step"]: line[key] for line in log for key in keys if key in line}
                     for log in logs]                                            # {update: value}
            steps = sorted(set.intersection(*map(set, seeds)))
            values = np.array([[seed[step] for seed in seeds] for step in steps])  # (steps, seeds)
            if steps:
                center, sd = values.mean(1), values.std(1, ddof=min(1, len(seeds) - 1))
                label, color = f"{name} (n = {len(seeds)})", f"C{i % 10}"
                ax.plot(steps, center, marker=".", color=color, label=label)
                ax.fill_between(steps, center - sd, center + sd, color=color, alpha=0.2, lw=0)
        ax.set(xlabel="updates", ylabel=AXES[quantity])
        ax.legend(handles=ax.lines, fontsize="small")
    return fig


def throughput(folder):
    """Score over tokens/s. Each dot is labelled with its block length.          App. B.2, Fig. 4"""
    series = {}
    for (block, _, budget, model, _, FT, label, others, _), row in dream_results(folder).items():
        for task, results in row.items():
            speed = mean(result["tokens"] / result["seconds"] for result in results)
            score = mean(result["score"] for result in results)
            name = f"{task}, {model}, {FT}, {label}{others}, {budget}"
            series.setdefault(name, []).append((block, speed, score))
    fig, [ax] = figure(1, width=7, height=5)
    for name, points in series.items():
        _, x, y = zip(*points)
        ax.plot(x, y, marker="o", label=name)
        for block, *place in points:
            ax.annotate(block, place, xytext=(3, 3), textcoords="offset points", size=8)
    ax.set(xlabel="tokens/s", ylabel="score (%)")
    ax.legend()
    return fig


MAKERS = {
    "table": table, "benchmarks": benchmarks, "throughput": throughput,
    "runs": partial(over_updates, quantities=("loss", "bound", "omega_s")),
    "learned": partial(over_updates, quantities=("omega_s", "omega_a", "omega_b", "tau"))}


def main(cfg):
    wanted = [name for name in MAKERS if getattr(cfg, name)]
    if len(wanted) != 1:
        raise Refused(f"give one of --{', --'.join(MAKERS)}")
    made = MAKERS[wanted[0]](getattr(cfg, wanted[0]))
    out = cfg.out or ("" if isinstance(made, str) else "plot.png")
    if not isinstance(made, str):
        with atomic(out) as tmp, readable(out):
            made.savefig(tmp, format=Path(out).suffix[1:])
    elif out:
        write_text(out, made + "\n")
    print(f"written to {out}" if out else made)


if __name__ == "__main__":
    run(main, Config)
