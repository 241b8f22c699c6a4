# SPDX-License-Identifier: MIT
"""Every figure and every markdown table, from logs and results.     Tables 1-12, Fig. 3-5, 7-9

    python lab/plot.py --table="out/*/*.json"                   # eval.py's results, as in Table 1
    python lab/plot.py --runs="out/*/log.jsonl" --out=fig3.png  # loss and bounds, as in Fig. 3

A number at the end of a run's name is its seed: sm-1 and sm-2 are two seeds of sm. Tables and
figures are means over seeds. ± and bands are the standard deviation over seeds.

README's picture, and its page to step through, are of puzzle 2 of `python sudoku.py`:

    model="--checkpoint=results/sudoku.safetensors --sampler=entropy --steps=12 --top_p=1e-12"
    puzzle="$model --given=2.....65..3....6...65......256..6.1."
    python sample.py $puzzle --trace=with-feedback.jsonl --out=on.jsonl
    python sample.py $puzzle --trace=without.jsonl --out=off.jsonl --soft=False
    python lab/plot.py --sudoku="with*.jsonl" --out=results/figures/sudoku.svg
    note="Puzzle 2 of python sudoku.py, two cells a call: the first that only one side solves."
    python lab/plot.py --page="with*.jsonl" --note="$note" --out=results/trajectory.html
"""

import glob
import html
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from launch import Refused, atomic, read_json, read_jsonl, run, write_text


@dataclass
class Config:
    """One source, and where to write. A pattern may be several, with commas between them."""
    # markdown tables
    table: str = ""          # pattern of eval.py's results, a row per --label: Tables 1, 2, 4-7
    logs: str = ""           # pattern of train.py's logs: where ω, λ and the speed ended
    benchmarks: str = ""     # folder of eval_dream.py's results: Tables 3, 8-12
    # figures
    runs: str = ""           # pattern of train.py's logs: Fig. 3
    throughput: str = ""     # folder of results of eval_dream.py --blocks=16,32,48: Fig. 4
    ablation: str = ""       # pattern of results of `eval.py ppl`: Fig. 5
    learned: str = ""        # pattern of logs of train.py or finetune_dream.py: Fig. 8
    frontier: str = ""       # pattern of eval.py's results: Fig. 9
    # files of sample.py --trace
    trajectory: str = ""     # .svg, a row per network call: Fig. 7
    sudoku: str = ""         # .svg of a pattern: grids that fill, a picture per network call
    page: str = ""           # .html of a pattern, to step through
    note: str = ""           # a sentence at the top of that page: why it shows these samples
    out: str = ""            # (default: plot.png of a figure, else the screen)


def files(patterns):
    """The files of all patterns, each once, sorted."""
    found = {path for pattern in patterns.split(",") for path in glob.glob(pattern)}
    if not found:
        raise Refused(f"no file matches {patterns!r}: correct the pattern")
    return sorted(found)


def name_and_seed(path):
    """("sm", "1") of out/sm-1/log.jsonl, of out/sm-1/step-9.pt and of logs/sm-1.jsonl."""
    path = Path(path)
    run = path.stem if path.suffix == ".jsonl" and path.stem != "log" else path.parent.name
    name, _, seed = run.rpartition("-")
    return (name, seed) if seed.isdigit() else (run, "")


def markdown(rows, columns, text=1):
    """A markdown table.   rows: {heading: cell}.   text: so many columns hold words."""
    lines = [" | ".join(row.get(column, "") for column in columns) for row in rows]
    rule = "|---" * text + "|--:" * (len(columns) - text) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {line} |" for line in lines)])


def mean_sd(values, spec):
    """Mean ± standard deviation, or one number alone. spec: how to format them, such as ".2f"."""
    if len(values) == 1:
        return f"{statistics.mean(values):{spec}}"
    return f"{statistics.mean(values):{spec}} ± {statistics.stdev(values):{spec.lstrip('+')}}"


# What eval.py measures, in the order of the columns.
METRICS = {"right": ("grids right ↑", ".3f"), "mauve": ("MAUVE ↑", ".3f"),
           "gen_ppl": ("gen. PPL ↓", ".2f"), "entropy": ("entropy ↑", ".3f"),
           "ppl": ("PPL ↓", ".3f"), "nats": ("nats ↓", ".4f"),
           "off": ("nats, feedback off", ".4f")}
UNMASKING = "", "standard", "random", "entropy", "ReMDM", "data"    # the order of the rows


def read_cells(pattern):
    """{(unmasking, feedback, label): {(metric, NFE / L or text): {seed: value}}} of results."""
    cells = {}
    for result in map(read_json, files(pattern)):
        if result.get("metric") in (None, "feedback"):  # other files beside them
            continue
        values, settings, evaluation = (result[k] for k in ("values", "settings", "evaluation"))
        unmasking, feedback, budget = "data", "", ""  # held-out rows can be scored like samples
        if result["metric"] in ("ppl", "zero_shot"):
            unmasking, feedback = "", "soft" if "soft" in values else "binary"
            budget = os.path.basename(evaluation["text"] or evaluation["data"])
            own, off = values[feedback], values["binary"]
            values = {"ppl": own["ppl"], "nats": own["nats_per_token"]}
            if own is not off:
                values["off"] = off["nats_per_token"]
        elif settings["sampler"] != "data":
            sampler = settings["sampler"].partition("-")[0]
            unmasking = {"mdlm": "standard", "remdm": "ReMDM"}.get(sampler, sampler)
            feedback = "soft" if settings["soft"] else "binary"
            budget = "{}/{}".format(*Fraction(settings["steps"], settings["L"]).as_integer_ratio())
        checkpoint = settings.get("checkpoint") or evaluation["checkpoint"]
        _, seed = name_and_seed(checkpoint)
        row = cells.setdefault((unmasking, feedback, evaluation["label"] or checkpoint), {})
        for metric in METRICS.keys() & values.keys():
            row.setdefault((metric, budget), {})[seed] = values[metric]
    return dict(sorted(cells.items(), key=lambda item: (UNMASKING.index(item[0][0]), item[0][1:])))


def table(pattern):
    """Results of eval.py side by side, mean ± deviation over seeds.              Tables 1, 2, 4-7

    After a soft row comes its gain over the last binary row of the same unmasking, in pairs of a
    seed where there are any: bounds of a pair have the same masks.
    """
    cells, bases, lines = read_cells(pattern), {}, []
    columns = sorted({column for row in cells.values() for column in row}, key=lambda column: (
        list(METRICS).index(column[0]), Fraction(column[1]) if "/" in column[1] else 0, column[1]))
    headings = {column: f"{METRICS[column[0]][0]} {column[1]}".strip() for column in columns}
    for (unmasking, feedback, label), row in cells.items():
        line = {"unmasking": unmasking, "feedback": feedback, "model": label}
        gain = {"feedback": "gain"}
        for column, seeds in row.items():
            form = METRICS[column[0]][1]
            line[headings[column]] = mean_sd(seeds.values(), form)
            base = bases.get(unmasking, {}).get(column, {})
            pairs = [seeds[seed] - base[seed] for seed in seeds if seed in base]
            if base and not pairs:
                pairs = [statistics.mean(seeds.values()) - statistics.mean(base.values())]
            if pairs:
                gain[headings[column]] = mean_sd(pairs, f"+{form}")
        lines.append(line)
        if feedback == "binary":
            bases[unmasking] = row
        elif len(gain) > 1:
            lines.append(gain)
    return markdown(lines, ["unmasking", "feedback", "model", *headings.values()], text=3)


def logs(patterns):
    """Where ω, λ and the speed of each run of train.py ended."""
    rows = []
    for path in files(patterns):
        # A continuation also logs the bound at update 0, before it has a speed.
        lines = [line for line in read_jsonl(path) if "tokens_per_s" in line]
        last, speed = lines[-1], statistics.median(line["tokens_per_s"] for line in lines)
        omega = [f"{last[name]:.3f}" for name in OMEGA if name in last]
        lam = [f"{line['lam']:.3f}" for line in lines if "lam" in line][-1:]  # of the last with SM
        rows.append({
            "run": " ".join(name_and_seed(path)), "ω_s, ω_a, ω_b": ", ".join(omega),
            "updates": f"{last['step']:,}", "mean λ": "".join(lam),
            "tokens/s (median)": f"{speed:,.0f}", "minutes": f"{last['seconds'] / 60:.0f}"})
    return markdown(rows, list(rows[0]), text=2)


def dream_results(folder):
    """{row: {task: [result]}} of the results of eval_dream.py in a folder that have a score.

    row: (block, NFE budget or threshold, in words, model, whether with SM, FT, feedback, all else
    that its results share, so that no others are averaged). It sorts from few passes to many.
    """
    rows, problems = {}, {}
    for result in map(read_json, files(f"{folder}/*.json")):
        group, task = dict(result["group"]), result["column"]
        if problems.setdefault(task, group["data"]) != group.pop("data"):
            raise Refused(f"{folder} has results of {task} on different problems: separate them")
        passes, words = Fraction(group["budget"]), group["budget"]
        if group["threshold"]:
            passes, words = group["threshold"], f"p ≥ {group['threshold']}"
        row = (group["block"], passes, words, group["model"], group["feedback"].startswith("SM k"),
               group["FT"], group["feedback"], str(sorted(group.items())))
        if result["score"] is not None:
            rows.setdefault(row, {}).setdefault(task, []).append(result)
    return dict(sorted(rows.items()))


def benchmarks(folder):
    """Results of eval_dream.py, mean ± deviation over seeds.                      Tables 3, 8-12

    A gain is that over the binary model that was finetuned for as long, else the last one.
    """
    rows, bases, lines = dream_results(folder), {}, []
    for (block, _, words, model, soft, FT, feedback, _), row in rows.items():
        words += f", block {block}" if block else ""
        line = {"NFE budget": words, "Model": model, "FT": FT, "Feedback": feedback}
        scores = {task: [result["score"] for result in results] for task, results in row.items()}
        lines.append(line | {task: mean_sd(each, ".1f") for task, each in scores.items()})
        if feedback == "binary" and FT != "-":
            bases[words, model] = bases[words, model, FT] = scores
        base = bases.get((words, model, FT)) or bases.get((words, model))
        if soft and FT != "-" and base:
            lines.append(line | {"Feedback": "Gain"} | {
                task: f"{statistics.mean(scores[task]) - statistics.mean(base[task]):+.1f}"
                for task in scores.keys() & base.keys()})
    tasks = sorted({task for row in rows.values() for task in row})
    return markdown(lines, ["NFE budget", "Model", "FT", "Feedback", *tasks], text=4)


# Twenty: the palette of Okabe and Ito, for color-blind readers, then Tol's of twelve, and gray
COLORS = ("#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #332288 #6699CC #88CCEE #44AA99 "
          "#117733 #999933 #DDCC77 #661100 #CC6677 #AA4466 #882255 #AA4499 #999999").split()
OMEGA = {"omega_s": "ω_s", "omega_a": "ω_a (1/nat)", "omega_b": "ω_b (nats)"}
AXES = {"loss": "training loss (nats per token)", "bound": "held-out bound (nats per token)",
        "share": "feedback on, nats below off", **OMEGA, "tau": "τ"}


def figure(panels, width=4, height=3.6):
    """A figure that needs no screen, and its axes side by side. Three fill a page of GitHub."""
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLORS)
    matplotlib.rcParams["font.size"] = 12
    fig = Figure(figsize=(width * panels, height), layout="constrained")
    return fig, fig.subplots(1, panels, squeeze=False)[0]


def logged(path):
    """{quantity of AXES: {update: value}} of a log of either trainer.                §4.1, Eq. 3"""
    found = {quantity: {} for quantity in AXES}
    for line in read_jsonl(path):
        values = {name: line[name] for name in ("loss", *OMEGA, "tau") if name in line}
        if "val_plain" in line:
            values["bound"] = line.get("val_soft", line["val_plain"])
        if "val_soft" in line:
            values["share"] = line["val_plain"] - line["val_soft"]
        for quantity, value in values.items():
            found[quantity][line["step"]] = value
    return found


def over_updates(patterns, quantities):
    """A figure with a panel for each quantity that is logged. Lines end with the shortest seed."""
    seeds_of = {}
    for path in files(patterns):
        seeds_of.setdefault(name_and_seed(path)[0], []).append(logged(path))
    every = [seed for seeds in seeds_of.values() for seed in seeds]
    shown = [quantity for quantity in quantities if any(seed[quantity] for seed in every)]
    fig, axes = figure(len(shown), height=3.6 + 0.22 * math.ceil(len(seeds_of) / len(shown)))
    legend = {}
    for ax, quantity in zip(axes, shown):
        for color, (name, seeds) in zip(itertools.cycle(COLORS), seeds_of.items()):
            seeds = [seed[quantity] for seed in seeds]                           # {update: value}
            steps = sorted(set.intersection(*map(set, seeds)))
            values = np.array([[seed[step] for seed in seeds] for step in steps])  # (steps, seeds)
            if steps:
                mean, sd = values.mean(1), values.std(1, ddof=min(1, len(seeds) - 1))
                [line] = ax.plot(steps, mean, "o" if len(steps) == 1 else "-", color=color)
                legend.setdefault(f"{name} (n = {len(seeds)})", line)
                ax.fill_between(steps, mean - sd, mean + sd, color=color, alpha=0.2, lw=0)
        ax.set(xlabel="updates", ylabel=AXES[quantity])
    fig.legend(legend.values(), legend, loc="outside upper left", ncols=len(shown),
               fontsize="small")
    return fig


def ablation(pattern):
    """The perplexity of each label, the best on top. A dot is a seed.           App. C.3, Fig. 5"""
    found = {label: list(seeds.values()) for (_, _, label), row in read_cells(pattern).items()
             for (metric, _), seeds in row.items() if metric == "ppl"}
    fig, [ax] = figure(1, width=7, height=1 + 0.35 * len(found))
    for label in sorted(found, key=lambda label: -statistics.mean(found[label])):
        ax.plot(found[label], [label] * len(found[label]), "o", color="C1")
    ax.set(xlabel="perplexity of held-out text")
    ax.grid(axis="x")
    return fig


def dots(ax, points, label):
    """A line through points (name, x, y), each with its name beside it."""
    _, x, y = zip(*points)
    ax.plot(x, y, marker="o", label=label)
    for name, *place in points:
        ax.annotate(name, place, xytext=(3, 3), textcoords="offset points", size=8)


def frontier(pattern):
    """Generative perplexity over entropy. A dot is an NFE budget.                 App. D, Fig. 9"""
    fig, [ax] = figure(1, width=7, height=5)
    for row, columns in read_cells(pattern).items():
        mean = {column: statistics.mean(seeds.values()) for column, seeds in columns.items()}
        points = [(budget, mean["entropy", budget], mean["gen_ppl", budget])
                  for metric, budget in mean if metric == "gen_ppl"]
        if points:
            dots(ax, sorted(points, key=lambda point: Fraction(point[0] or 0)), " ".join(row))
    ax.set(xlabel="entropy (nats)", ylabel="generative perplexity")
    ax.legend()
    return fig


def throughput(folder):
    """Score over tokens/s, means over seeds. A dot is a block length.           App. B.2, Fig. 4"""
    fig, [ax] = figure(1, width=7)
    series = {}
    for (block, _, budget, model, _, FT, label, _), row in dream_results(folder).items():
        for task, results in row.items():
            speed = statistics.mean(r["tokens"] / r["seconds"] for r in results)
            score = statistics.mean(r["score"] for r in results)
            name = f"{task}, {model}, {FT}, {label}, {budget}"
            series.setdefault(name, []).append((block, speed, score))
    for name, points in series.items():
        dots(ax, points, name)
    ax.set(xlabel="tokens/s", ylabel="score (%)")
    ax.legend()
    return fig


def drawn_cell(x, y, width, text, lam, *_):
    """A cell of a trace (show.py) in SVG: a bold token (lam None), or the top guess, green by λ."""
    fill, color, weight = "#fff", "#000", "bold"
    if lam is not None:
        pale = int(220 * (1 - lam))
        fill, weight = f"rgb({pale},{100 + pale * 2 // 3},{pale})", "normal"
        color = "#fff" if lam > 0.6 else "#000"
    return (f'<rect x="{x}" y="{y}" width="{width}" height="32" rx="4" fill="{fill}"/>'
            f'<text x="{x + width / 2:g}" y="{y + 22}" font-weight="{weight}" fill="{color}">'
            f'{html.escape(text)}</text>')


def drawing(width, height, parts):
    """A whole SVG on a gray ground."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="monospace" font-size="18" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#999"/>', *parts, "</svg>"])


def read_trace(path):
    """The steps of a trace, a list of cells each. Refuses another file, such as samples."""
    steps = read_jsonl(path)
    if not steps or not isinstance(steps[0], list):
        raise Refused(f"{path} is no trace: sample.py writes one with --trace=FILE")
    return steps


def trajectory(path):
    """A sample appearing, a row per network call.                               App. C.5, Fig. 7"""
    steps = read_trace(path)
    width = 10 + 11 * max(len(text) for step in steps for text, *_ in step)
    parts = [drawn_cell(8 + (width + 2) * column, 8 + 34 * row, width, *cell)
             for row, step in enumerate(steps) for column, cell in enumerate(step)]
    return drawing(14 + (width + 2) * len(steps[0]), 14 + 34 * len(steps), parts)


def sudoku(patterns):
    """Grids of 6×6 that fill, side by side, a picture per network call, and the green of four λ.

    It moves in a browser. A viewer that does not move shows the call in the middle.
    """
    traces = {Path(path).stem: read_trace(path) for path in files(patterns)}
    names = [f'<text x="{120 + 232 * column}" y="26">{html.escape(name.replace("-", " "))}</text>'
             for column, name in enumerate(traces)]
    legend = [drawn_cell(44 + 50 * i, 258, 48, f"{lam:g}", lam)
              for i, lam in enumerate((0, 0.2, 0.4, 0.6))]
    calls, parts = max(map(len, traces.values())), []
    seconds = 0.7 * calls + 4  # and four more for the last picture
    for i in range(calls):
        cells = [drawn_cell(16 + 232 * column + 34 * (j % 6) + 6 * (j % 6 // 3),
                            36 + 34 * (j // 6) + 6 * (j // 12), 32, *cell)
                 for column, steps in enumerate(traces.values())
                 for j, cell in enumerate(steps[min(i, len(steps) - 1)][1:37])]
        # It covers the pictures before it.
        parts.append(f'<g visibility="{"visible" if i <= calls // 2 else "hidden"}">'
                     f'<animate attributeName="visibility" calcMode="discrete" '
                     f'values="hidden;visible" keyTimes="0;{0.7 * i / seconds:.4f}" '
                     f'dur="{seconds:.2f}s" repeatCount="indefinite"/>{"".join(cells)}</g>')
    parts += [*names, '<text x="28" y="280">λ</text>', *legend]
    return drawing(8 + 232 * len(traces), 298, parts)


def page(patterns, note=""):
    """A page that goes through traces step by step, side by side: HTML that needs no network."""
    traces = [{"name": Path(path).stem, "steps": read_trace(path)} for path in files(patterns)]
    columns = 6 if len(traces[0]["steps"][0]) == 39 else 0  # of a Sudoku
    values = json.dumps({"columns": columns, "note": note, "traces": traces})
    template = Path(__file__).with_name("trajectory_template.html").read_text("utf-8").strip()
    # A token may be </script>. Without <, no text of a sample can end the element that holds it.
    return template.replace(">TRACES<", f">{values.replace('<', chr(92) + 'u003c')}<")


MAKERS = {
    "table": table, "logs": logs, "benchmarks": benchmarks, "throughput": throughput,
    "runs": partial(over_updates, quantities=("loss", "bound", "share", "omega_s")),     # Fig. 3
    "learned": partial(over_updates, quantities=(*OMEGA, "tau")),             # App. C.10, Fig. 8
    "ablation": ablation, "frontier": frontier, "trajectory": trajectory, "sudoku": sudoku,
    "page": page}


def main(cfg):
    wanted = [name for name in MAKERS if getattr(cfg, name)]
    if len(wanted) != 1:
        raise Refused(f"give one of --{', --'.join(MAKERS)}")
    source = getattr(cfg, wanted[0])
    made = page(source, cfg.note) if cfg.page else MAKERS[wanted[0]](source)
    if not isinstance(made, str):
        out = cfg.out or "plot.png"
        with atomic(out) as tmp:
            made.savefig(tmp, format=Path(out).suffix[1:])
    elif cfg.out:
        write_text(cfg.out, made + "\n")
    else:
        print(made)


if __name__ == "__main__":
    run(main, Config)
