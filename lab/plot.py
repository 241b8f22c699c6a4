# SPDX-License-Identifier: MIT
"""Every figure and every markdown table, from logs and results.     Tables 1-7, Fig. 3-9

    python lab/plot.py --table="runs/*.json"                    # eval.py's results, as in Table 1
    python lab/plot.py --runs="out/*/log.jsonl" --out=fig3.png  # held-out bounds, as in Fig. 3

Each source in Config is a flag, which makes one table or one figure. Only figures need matplotlib
(pip install matplotlib).

Not here: any measurement. Every number comes from JSON that another script has written. Only the
anatomy looks into a model.
"""

import collections
import contextlib
import glob
import html
import itertools
import json
import math
import os
import re
import statistics
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import sudoku
from launch import Count, Refused, atomic, read_json, read_jsonl, run, write_text
from mdlm import MDLM, corrupt
from sample import generate
from show import trace


@dataclass
class Config:
    """One source, and where to write. A pattern may be several, with commas between them."""
    # markdown tables
    table: str = ""          # pattern of eval.py's results: Tables 1, 2, 4-7
    bounds: str = ""         # pattern of results of `eval.py ppl`, best with --against
    logs: str = ""           # pattern of train.py's logs: where ω, λ and the speed ended
    benchmarks: str = ""     # folder of eval_dream.py's results: Table 3
    feedback: str = ""       # a result of feedback.py: a table, or a figure if out is one
    # figures
    runs: str = ""           # pattern of train.py's logs, -1, -2 of a name are seeds: Fig. 3
    throughput: str = ""     # folder of results of eval_dream.py --blocks=16,32,48: Fig. 4
    ablation: str = ""       # pattern of results of `eval.py ppl --against`: Fig. 5
    overhead: str = ""       # file of bench.py --parts=overhead --json: Fig. 6
    trajectory: str = ""     # file of sample.py --trace: Fig. 7. A page shows those of a pattern
    learned: str = ""        # pattern of logs of train.py or finetune_dream.py: Fig. 8
    frontier: str = ""       # pattern of eval.py's results: Fig. 9
    curves: str = ""         # file of bench.py --json: cost over sizes
    anatomy: str = ""        # an SM model of `data.py sudoku`: Alg. 1 and 2 on a row of a grid
    out: str = ""            # .png, .pdf or .svg (default: plot.png), .md of a table, .html of
                             # trajectories
    entropy: float = 0.0     # of --runs: nats per token that no bound can pass, drawn unless 0
    columns: Count = 0       # width of the square grid after a page's first token, as in a Sudoku


def files(patterns):
    """The files of all patterns, each once. They are sorted by name, the numbers in it by size.

    Raises Refused if there is no file.
    """
    found = [path for pattern in patterns.split(",") for path in glob.glob(pattern)]
    if not found:
        raise Refused(f"no file matches {patterns!r}: correct the pattern")
    return sorted(set(map(os.path.abspath, found)), key=lambda path: [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])


@contextlib.contextmanager
def reading(path, wrong):
    """Raises Refused, "path wrong", if the block finds another file than it needs."""
    try:
        yield
    except (Refused, LookupError, TypeError, ValueError, AttributeError, AssertionError):
        raise Refused(f"{path} {wrong}")


def name_of(path):
    """What a run is called: its file, or its folder if the file is log.jsonl."""
    folder, file = os.path.split(path)
    name = os.path.basename(folder) if file == "log.jsonl" else file.removesuffix(".jsonl")
    return name.removesuffix(".log")


# -------------------------------------------------------------------------------------------------
# tables


def markdown(rows, columns, text=1):
    """A markdown table, as one string without the last line break.

    rows: dicts {heading: cell}. A cell that is missing stays empty.   columns: headings, in order.
    text: so many columns, from the left, hold words. Numbers stand at the right of their cells.
    """
    lines = [" | ".join(row.get(column, "") for column in columns) for row in rows]
    rule = "|---" * text + "|--:" * (len(columns) - text) + "|"
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {line} |" for line in lines)])


def mean_sd(values, spec):
    """Mean ± standard deviation, or one number alone. spec: how to format them, such as ".2f"."""
    values = list(values)
    sd = f" ± {statistics.stdev(values):{spec.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{spec}}{sd}"


# What eval.py measures: heading, format, and settings that must be the same in a whole table.
METRICS = {
    "mauve": ("MAUVE ↑", ".3f", ("scorer", "scale", "seed", "data", "references")),
    "gen_ppl": ("gen. PPL ↓", ".2f", ("scorer",)),
    "entropy": ("entropy ↑", ".3f", ()),
    "ppl": ("PPL ↓", ".2f", ("seed", "repeats", "ema")),
}
ALIKE, OF_MODELS = ("L", "n", "tokenizer", "text"), ("top_p", "dtype")
IN_A_ROW = ("step", "prompt", "infill", "given", "passes", "fresh", "every",
            "omega_s", "omega_a", "omega_b")
IN_A_CELL = ("sampler", "eta", "t_on", "t_off", "alpha_on", "ema")
COST = ("updates", "passes", "loss tokens")


def entries(path):
    """The numbers in one result of eval.py: [(row, column, run, value, settings)].

    row: (unmasking, feedback, label).   column: (metric, name of the text or budget NFE/L, or "" of
    the data).   run: what was measured. If it was measured twice, a cell takes the later file.
    """
    with reading(path, "is not a result of eval.py: correct the pattern"):
        result = read_json(path)
        if "group" in result or result["metric"] == "feedback":  # for --benchmarks, --feedback
            return []
        values, evaluation = result["values"], result["evaluation"]
        settings = evaluation | result["settings"] | {"references": values.get("references")}
        cost = {k: v for k, v in settings.get("training", {}).items() if k != "start"}
        settings |= {"cost of training": cost} if cost else {}
        label = evaluation["label"] or settings["checkpoint"]
        if result["metric"] in ("ppl", "zero_shot"):
            feedback = "soft" if "soft" in values else "binary"
            column = "ppl", os.path.basename(evaluation["text"] or evaluation["data"])
            value = values[feedback]["ppl"]
            return [(("", feedback, label), column, evaluation["checkpoint"], value, settings)]
        if settings["sampler"] == "data":
            row, measured, budget = ("data", "", label), settings["checkpoint"], ""
        else:
            unmasking = "ReMDM" if settings["sampler"].startswith("remdm") else "standard"
            unmasking = settings.get("order", unmasking)
            row = unmasking, "soft" if settings["soft"] else "binary", label
            measured = evaluation["samples"]
            budget = "{}/{}".format(*Fraction(settings["steps"], settings["L"]).as_integer_ratio())
        return [(row, (metric, budget), measured, values[metric], settings)
                for metric in METRICS if metric in values]


def check_alike(first, key, made, fields, place):
    """Raises Refused if two (path, settings) differ in one of the fields: made and first[key].

    first: dict that remembers what was the first of each key, and takes `made` for a new key.
    """
    (path_1, a), (path_2, b) = first.setdefault(key, made), made
    differ = [f"{key} ({a.get(key)}, {b.get(key)})" for key in fields if a.get(key) != b.get(key)]
    if differ:
        raise Refused(f"{path_1} and {path_2} differ in {', '.join(differ)}: such numbers do not "
                      f"belong in one {place}")


def read_cells(pattern):
    """({row: {column: {run: value}}}, {row: settings}), see `entries`.

    Refuses results that do not compare.
    """
    cells, first = {}, {}
    for path in files(pattern):
        for row, column, measured, value, settings in entries(path):
            metric, made = column[0], (path, settings)
            if not math.isfinite(value):
                raise Refused(f"{metric} in {path} is {value}: measure it again")
            # All budgets of a metric are compared, perplexities of two texts are not.
            compared = column if metric == "ppl" else metric
            for field in ALIKE + METRICS[metric][2] + OF_MODELS * (row[0] != "data"):
                check_alike(first, (compared, field), made, [field], "table")
            check_alike(first, row, made, IN_A_ROW, "row, --label")
            # The cost tells a binary model from an SM model whose feedback is off. It is unknown
            # where the checkpoint is gone.
            if cost := settings.keys() & {"cost of training"}:
                check_alike(first, (row, "cost"), made, cost, "row, --label")
            check_alike(first, (row, column), made, IN_A_CELL, "row, --label")
            cells.setdefault(row, {}).setdefault(column, {})[measured] = value
    return cells, {row: first[row][1] for row in cells}


def place_of_row(row):
    """Sorts rows: standard, in an order, ReMDM, the data. Binary comes before soft."""
    return ("", "standard", "random", "entropy", "ReMDM", "data").index(row[0]), row[1]


def short(number):
    """1.8M for 1,800,000."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.4g}"


def training_cells(settings):
    """{column: cell} of what training cost. Updates with a + continue another run.

    Iso-update rows have their updates in common, iso-compute rows (nearly) their passes.
    """
    run = {"updates": settings.get("step")} | settings.get("training", {})
    cells = {name: short(run[name]) for name in COST if run.get(name) is not None}
    return cells | ({"updates": "+" + cells["updates"]} if run.get("start") else {})


def table(pattern):
    """Results of eval.py side by side, mean ± deviation over runs.               Tables 1, 2, 4-7

    Unmasking and feedback go down, budgets (NFE / L) across. After a soft row comes its gain over
    the binary row of its label, else over the last binary row. The data's value holds for all
    budgets.
    """
    cells, settings = read_cells(pattern)
    columns = {column for row in cells.values() for column in row}
    with_budget = {metric for metric, budget in columns if budget}
    columns = sorted((c for c in columns if c[1] or c[0] not in with_budget), key=lambda c: (
        list(METRICS).index(c[0]), c[0] != "ppl" and Fraction(c[1] or 0), c[1]))
    headings = {column: f"{METRICS[column[0]][0]} {column[1]}".strip() for column in columns}
    first, lines = ("unmasking", "feedback", "model"), []
    for row in sorted(cells, key=place_of_row):
        lines.append(dict(zip(first, row)) | training_cells(settings[row]))
        for column, heading in headings.items():
            if runs := cells[row].get(column) or cells[row].get((column[0], "")):
                lines[-1][heading] = mean_sd(runs.values(), METRICS[column[0]][1])
        bases = [base for base in cells if base[:2] == (row[0], "binary")]
        if row[1] == "soft" and bases:
            base = max(bases, key=lambda base: (base[2] == row[2], base))
            lines.append({"feedback": "gain"})
            for column in cells[row].keys() & cells[base].keys():
                ours, theirs = (statistics.mean(cells[r][column].values()) for r in (row, base))
                lines[-1][headings[column]] = f"{ours - theirs:+{METRICS[column[0]][1]}}"
    cost = [name for name in COST if any(name in line for line in lines)]
    return markdown(lines, [*first, *cost, *headings.values()], text=3)


def bound_results(pattern):
    """{(has SM, --label): [result, one per seed]} of results of `eval.py ppl`.

    A result: updates, ppl, and in nats per token gain (feedback on below off), below (this model
    below that of --against) and its error over rows, se. They are None where not measured.
    """
    groups, first = {}, {}
    for path in files(pattern):
        with reading(path, "is not a result of `eval.py ppl`: correct the pattern"):
            result = read_json(path)
            values, settings = result["values"], result["evaluation"] | result["settings"]
            measured = result["evaluation"]["checkpoint"]
            row = "soft" in values, settings["label"] or measured
            below = values.get("below_against", {})
            found = {"updates": settings["step"],
                     "ppl": (values.get("soft") or values["binary"])["ppl"],
                     "gain": values.get("gain", {}).get("nats_per_token"),
                     "below": below.get("nats_per_token"), "se": below.get("nats_per_token_se")}
        made = path, settings
        fields = ALIKE + METRICS["ppl"][2] + OF_MODELS
        check_alike(first, "table", made, fields, "table")
        check_alike(first, row, made, ["step"], "row, --label")
        other, _ = first.setdefault((row, measured), made)
        if other != path:
            raise Refused(f"{other} and {path} are both of {measured}, which is one seed: "
                          "give one of them")
        groups.setdefault(row, []).append(found)
    return groups


def bounds(pattern):
    """Results of `eval.py ppl`, a row per --label: PPL, and differences in nats per token.

    A difference is that of the same rows and masks: with feedback and without, or of this model
    and another (--against). All seeds are measured on the same rows, so more of them do not lower
    the error over rows: it is the mean of their errors. Student's t asks whether the mean is 0.
    """
    columns = ["model", "updates", "seeds", "PPL (± sd of seeds)", "feedback on, nats below off",
               "nats below the other model (± sd of seeds; ± SE of rows)", "t"]
    rows = []
    for (_, label), found in sorted(bound_results(pattern).items(), key=lambda group: group[0]):
        ppls, gains, below, errors = ([result[key] for result in found if result[key] is not None]
                                      for key in ("ppl", "gain", "below", "se"))
        gain = f"{statistics.mean(gains):.4f}" if gains else ""
        nats = f"{mean_sd(below, '+.4f')}; ± {statistics.mean(errors):.4f}" if below else ""
        sd = statistics.stdev(below) if len(below) > 1 else 0.0
        t = f"{statistics.mean(below) / sd * math.sqrt(len(below)):.1f}" if sd else ""
        updates = f"{found[0]['updates']:,}"
        cells = label, updates, str(len(found)), mean_sd(ppls, ".3f"), gain, nats, t
        rows.append(dict(zip(columns, cells)))
    return markdown(rows, columns)


def logs(patterns):
    """Where ω, λ and the speed of each run of train.py ended.

    Take-off is the first logged update with ω_s ≥ 0.01, of a run that starts below.
    """
    columns = ["run", "ω_s, ω_a, ω_b", "updates", "mean λ", "take-off", "tokens/s (median)",
               "minutes"]
    rows = []
    for path in files(patterns):
        with reading(path, "is no log of train.py: each of its lines has a step and numbers"):
            # a continuation also logs the bound at update 0, before it has a speed
            lines = [line for line in read_jsonl(path) if "tokens_per_s" in line]
            last, speed = lines[-1], statistics.median(line["tokens_per_s"] for line in lines)
            omega, takeoff = "", ""
            if "omega_s" in last:
                omega = ", ".join(f"{last['omega_' + name]:.3f}" for name in "sab")
                steps = [line["step"] for line in lines if line["omega_s"] >= 0.01]
                if lines[0]["omega_s"] < 0.01:
                    takeoff = f"{steps[0]:,}" if steps else "never"
            cells = (name_of(path), omega, f"{last['step']:,}", f"{last['lam']:.3f}", takeoff,
                     f"{speed:,.0f}", f"{last['seconds'] / 60:.0f}")
        rows.append(dict(zip(columns, cells)))
    return markdown(rows, columns, text=2)


def feedback_rows(path):
    """{bin of t: values} of a result of `eval.py feedback`, the whole of it under "all"."""
    with reading(path, "is not a result of `eval.py feedback`: make one first"):
        rows = read_json(path)["values"]
        assert "own_gain" in rows["all"]
        return rows


def feedback(path):
    """The bound under four feedbacks, and how far each lies below none, a row per bin of t."""
    columns = ["t", "none (nats)", "own, below none (± SE)", "permuted", "truth"]
    rows = []
    for name, row in feedback_rows(path).items():
        gains = [f"{row[kind + '_gain']:+.4f} ± {row[kind + '_gain_se']:.4f}"
                 for kind in ("own", "permuted", "truth")]
        rows.append(dict(zip(columns, (name, f"{row['none']:.4f}", *gains))))
    return markdown(rows, columns)


def dream_results(folder):
    """The results of eval_dream.py in a folder, a list of dicts. Other files are left out."""
    found = []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with contextlib.suppress(Refused):
            found.append(read_json(path))
    return [result for result in found if result.get("by") == "eval_dream.py"]


def differing(groups):
    """The keys that do not have the same value in all of the dicts that have them."""
    keys = dict.fromkeys(key for group in groups for key in group)
    return [key for key in keys if len({str(g[key]) for g in groups if key in g}) > 1]


def place(group):
    """What a run with SM and the binary run that it is compared with have in common, sortable."""
    first = ("budget", "block", "threshold")
    rest = [str(value) for key, value in sorted(group.items())
            if key not in (*first, "feedback") and not key.startswith("FT")]
    return [group["block"], group["threshold"] or 0, Fraction(group["budget"]), *rest]


def binary_of(group, rows):
    """The scores that a finetuned model with SM is compared with, {} if it is not clear which.

    They are those of the binary model that was finetuned for as long, or of the only one.
    """
    base = [(other, scores) for other, scores in rows if other["feedback"] == "binary"
            and other["FT"] != "-" and place(other) == place(group)]
    alike = [scores for other, scores in base if other["FT"] == group["FT"] or len(base) == 1]
    soft = group["feedback"].startswith("SM k")
    return alike[0] if soft and group["FT"] != "-" and len(alike) == 1 else {}


def benchmarks(folder):
    """Results of eval_dream.py, mean ± deviation over seeds.                               Table 3

    A row per NFE budget (or threshold and block), model, finetuning, feedback, and any other
    setting that differs. A gain is that over the scores of `binary_of`.
    """
    groups, rows, results = {}, [], dream_results(folder)
    if not results:
        raise Refused(f"{folder} has no results of eval_dream.py: correct the folder")
    for result in results:
        if result["score"] is not None:
            group = {key: value for key, value in result["group"].items() if key != "data"}
            task = result["column"], result["group"]["data"]
            _, scores = groups.setdefault(str(sorted(group.items())), (group, {}))
            scores.setdefault(task, []).append(result["score"])
    found = sorted(groups.values(), key=lambda row: (
        place(row[0]), row[0]["feedback"].startswith("SM k"), row[0]["FT"] != "-", str(row[0])))
    tasks = sorted({task for _, scores in found for task in scores})
    names = [name for name, _ in tasks]
    heading = {task: task[0] + f" ({task[1]})" * (names.count(task[0]) > 1) for task in tasks}
    shown = ("budget", "block", "threshold", "model", "FT", "feedback")
    differ = [key for key in differing([group for group, _ in found]) if key not in shown]
    for group, scores in found:
        budget = f"p ≥ {group['threshold']}" if group["threshold"] else group["budget"]
        budget += f", block {group['block']}" if group["block"] else ""
        start = {"NFE budget": budget, "Model": group["model"], "FT": group["FT"],
                 "Settings": ", ".join(f"{key}={group[key]}" for key in differ if key in group)}
        cells = {heading[task]: mean_sd(values, ".1f") for task, values in scores.items()}
        rows.append(start | {"Feedback": group["feedback"]} | cells)
        if base := binary_of(group, found):
            gain = {heading[task]: statistics.mean(values) - statistics.mean(base[task])
                    for task, values in scores.items() if task in base}
            rows.append(start | {"Feedback": "Gain"} | {k: f"{v:+.1f}" for k, v in gain.items()})
    columns = ["NFE budget", "Model", "FT", "Feedback", *heading.values()]
    return markdown(rows, columns + ["Settings"] * bool(differ), text=4)


# -------------------------------------------------------------------------------------------------
# figures


# The palette of Okabe and Ito, for color-blind readers [ours].
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
LINES = "-", "--", "-.", ":"
# Parts of names that are methods: each has its color and its line in all figures.
METHODS = {"binary": ("C0", "-"), "sm": ("C1", "-"), "own": ("C1", "-"), "tied": ("C2", "-."),
           "permuted": ("C3", ":"), "deepsm": ("C4", "--"), "deep": ("C5", "--"),
           "paper": ("C6", ":"), "truth": ("black", "--")}
WORDS = {"sm": "SM", "tied": "tied layers, no vocabulary", "permuted": "SM, permuted feedback",
         "deepsm": "SM, twice the layers", "deep": "binary, twice the layers",
         "paper": "SM, the paper's start of ω", "p05": "p_sm = 0.5", "p10": "p_sm = 1",
         "k1": "k = 1", "k5": "k = 5", "k6": "k = 6", "kV": "k = |V|",
         "kV2": "k = |V|, two updates", "constant1": "λ = 0.1", "constant3": "λ = 0.3",
         "constant5": "λ = 0.5", "ours": "SM, our start of ω", "cont": "continued"}


def in_words(name):
    """A name, with the parts that are short for something said in full."""
    return re.sub(r"\w+", lambda part: WORDS.get(part[0], part[0]), name)


def styles(names):
    """{name: keywords of ax.plot}: label in words, color and line.

    The words leave out what all names have in common, unless it is a method. Where a method has
    several names, one has its line, and the next three another line in its color.
    """
    parts = {name: name.split("-") for name in names}
    common = set.intersection(*map(set, parts.values())) - METHODS.keys()
    found = {}
    for name, words in parts.items():
        methods = [METHODS[w] for w in re.findall(r"\w+", name.lower()) if w in METHODS]
        color, line = methods[-1] if methods else (f"C{2 + len(found) % 5}", "-")
        taken = [style["ls"] for style in found.values() if style["color"] == color]
        line = next((each for each in (line, *LINES) if each not in taken), line)
        words = ", ".join(word for word in words if word not in common) or name
        found[name] = {"label": in_words(words), "color": color, "ls": line}
    return found


def figure(panels, width=5, height=4):
    """matplotlib's figure, which needs no screen, and its axes, at most three in a row."""
    try:
        import matplotlib
    except ImportError:
        raise Refused("plotting needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams["axes.prop_cycle"] = matplotlib.cycler(color=COLORS)
    rows = -(-panels // 3)
    columns = -(-panels // rows)
    fig, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained",
                             figsize=(width * columns, height * rows))
    for ax in axes.flatten()[panels:]:
        ax.remove()
    return fig, axes.flatten()[:panels]


OMEGA = {"omega_s": "ω_s", "omega_a": "ω_a (1/nat)", "omega_b": "ω_b (nats)"}
AXES = {"bound": "held-out bound (nats per token)", "share": "feedback on, nats below off",
        "loss": "loss in training (nats per token)", **OMEGA, "tau": "τ"}


def points_of(line):
    """What a line of a log adds to the figures: {quantity: value}.                      §4.1, Eq. 3

    The bound is that with feedback if the model has it, else Eq. 2 itself. The share of feedback is
    how far it lies below the bound of the same model without feedback. The held-out loss of
    finetune_dream.py is no bound.
    """
    values = {name: line.get(name, math.nan) for name in (*OMEGA, "tau", "loss")}
    if not line.keys() & {"val_soft_ce", "val_binary"}:
        plain, soft = (line.get(name, math.nan) for name in ("val_plain", "val_soft"))
        values |= {"bound": line.get("val_soft", plain), "share": plain - soft}
    return {quantity: value for quantity, value in values.items() if math.isfinite(value)}


def log_series(patterns, needed):
    """{label: {quantity: {update: [a value per seed]}}} of both trainers' logs.

    A label is the name of a run without its last -NUMBER, which is the seed.
    needed: labels without this quantity are left out. Raises Refused if that leaves none.
    """
    series, paths = {}, files(patterns)
    for name, n in collections.Counter(map(name_of, paths)).items():
        if n > 1:
            raise Refused(f"{n} logs are of runs called {name}, and a figure would average them: "
                          f"give each run a name of its own, with -SEED at its end")
    for path in paths:
        label, lines = re.sub(r"-\d+$", "", name_of(path)), read_jsonl(path)
        into = series.setdefault(label, {quantity: {} for quantity in AXES})
        with reading(path, "is no log of a run: each of its lines has a step and numbers"):
            for line in lines:
                for quantity, value in points_of(line).items():
                    into[quantity].setdefault(int(line["step"]), []).append(value)
    series = {label: quantities for label, quantities in series.items() if quantities[needed]}
    if not series:
        raise Refused(f"no log with {AXES[needed]} matches {patterns!r}: train.py logs bounds with "
                      "--eval_every, and ω if the run has SM")
    return series


def common_steps(points):
    """The updates that all seeds have, in order. Dream's seeds can differ in their last update."""
    seeds = max(map(len, points.values()), default=0)
    return sorted(step for step in points if len(points[step]) == seeds)


def over_updates(series, quantities, more=0):
    """A figure with a panel for each quantity that a run has, and `more` empty ones.

    Lines are means over seeds, at the updates that all seeds have. Bands are one standard deviation
    on both sides.
    """
    shown = [name for name in quantities if any(points[name] for points in series.values())]
    fig, axes = figure(len(shown) + more)
    for label, style in styles(series).items():
        for ax, quantity in zip(axes, shown):
            points = series[label][quantity]
            if steps := common_steps(points):
                values = np.array([points[step] for step in steps])              # (steps, seeds)
                seeds, mean = values.shape[1], values.mean(1)
                sd = values.std(1, ddof=1) if seeds > 1 else 0
                ax.plot(steps, mean, **style | {"label": f"{style['label']} (n = {seeds})"})
                ax.fill_between(steps, mean - sd, mean + sd, color=style["color"], alpha=0.2, lw=0)
    for ax, quantity in zip(axes, shown):
        ax.set(xlabel="updates", ylabel=AXES[quantity])
        if quantity == "omega_s":
            ax.set_ylim(0, None)
    axes[0].legend()
    return fig, axes


def runs(patterns, entropy=0.0):
    """The held-out bound over updates, what feedback contributes to it, and ω_s.          Fig. 3

    entropy: nats per token, a line that no bound can pass, or 0 to draw none.
    Where no run has measured a bound, the first panel is the loss in training.
    """
    try:
        first, series = "bound", log_series(patterns, "bound")
    except Refused:
        first, series = "loss", log_series(patterns, "loss")
    fig, axes = over_updates(series, (first, "share", "omega_s"))
    if first == "bound":
        nats = lambda ppl: np.log(np.maximum(ppl, 1e-9))
        axes[0].secondary_yaxis("right", functions=(np.exp, nats)).set_ylabel("perplexity")
    if entropy:
        axes[0].axhline(entropy, color="gray", lw=1, label="entropy of the data")
        axes[0].legend()
    return fig


def learned(patterns):
    """ω, τ where k = |V|, and the gate that ω makes: λ over −H (Eq. 3).           App. C.10, Fig. 8

    The gate is drawn at four updates, from the first to the last, the later the darker.
    """
    series = log_series(patterns, "omega_s")
    fig, axes = over_updates(series, (*OMEGA, "tau"), more=1)
    neg_entropy = np.linspace(-8, 0, 161)
    for label, style in styles(series).items():
        quantities = series[label]
        steps = common_steps(quantities["omega_s"])
        for part in range(4):
            step = steps[(len(steps) - 1) * part // 3]
            s, a, b = (statistics.mean(quantities[name][step]) for name in OMEGA)
            lam = s / (1 + np.exp(-a * (neg_entropy - b)))                               # (161,)
            axes[-1].plot(neg_entropy, lam, **style, alpha=(part + 1) / 4)
    axes[-1].set(xlabel="−H (nats)", ylabel="λ", ylim=(0, None))
    return fig


def ablation(pattern):
    """How far each label lies below the model of --against, the best on top.     App. C.3, Fig. 5

    A dot is a seed. A bar is one standard error over rows of the difference, on both sides: each
    row has the same masks in both models.
    """
    below = {in_words(label): pairs for (_, label), found in bound_results(pattern).items()
             if (pairs := [(r["below"], r["se"]) for r in found if r["below"] is not None])}
    if not below:
        raise Refused(f"{pattern!r} has no differences: run eval.py ppl with --against first")
    fig, [ax] = figure(1, width=7, height=1 + 0.35 * len(below))
    for label in sorted(below, key=lambda label: statistics.mean(dict(below[label]))):
        nats, errors = zip(*below[label])
        ax.errorbar(nats, [label] * len(nats), xerr=errors, fmt="o", color="C1", capsize=3)
    ax.axvline(0, color="gray", lw=0.8)
    ax.set(xlabel="held-out bound, nats per token below the other model")
    ax.grid(axis="x")
    return fig


def frontier(pattern):
    """Generative perplexity over entropy, a line per row of `table`.                 App. D, Fig. 9

    A dot is an NFE budget. The data's star is where samples should be.
    """
    cells, _ = read_cells(pattern)
    fig, [ax] = figure(1, width=7, height=5)
    rows = sorted(cells, key=place_of_row)
    style = styles([" ".join(row).replace("soft", "SM") for row in rows])
    for row, look in zip(rows, style.values()):
        mean = {column: statistics.mean(runs.values()) for column, runs in cells[row].items()}
        budgets = sorted((budget for metric, budget in mean if metric == "gen_ppl"),
                         key=lambda budget: Fraction(budget or 0))
        points = [(mean["entropy", budget], mean["gen_ppl", budget]) for budget in budgets]
        if points:
            ax.plot(*zip(*points), marker="*" if row[0] == "data" else "o", **look)
        for budget, point in zip(budgets, points):
            ax.annotate(budget, point, xytext=(3, 3), textcoords="offset points", size=8)
    if not ax.lines:
        raise Refused(f"{pattern!r} has no generative perplexity: run eval.py gen_ppl first")
    ax.set(xlabel="entropy (nats)", ylabel="generative perplexity")
    ax.legend()
    return fig


def overhead(path):
    """What a sample costs, binary and with SM, by what the time is spent on.    App. C.4, Fig. 6"""
    with reading(path, f"has no overhead: run lab/bench.py --parts=overhead --json={path} first"):
        cases = read_json(path)["overhead"]
        names = [f"{case}: {row['calls']:,.0f} calls\n{1000 * row['s/call']:.3g} ms a call"
                 for case, row in cases.items()]
        sections = dict.fromkeys(name for row in cases.values() for name in row["sections"])
    fig, [ax] = figure(1, width=9, height=2.5)
    left = np.zeros(len(cases))
    for section in sections:
        seconds = np.array([row["sections"].get(section, 0.0) for row in cases.values()])
        ax.barh(names, seconds, left=left, label=section)
        left += seconds
    ax.invert_yaxis()
    ax.set(xlabel="seconds for a sample")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def read_trace(path):
    """The steps of a file of sample.py --trace, or the list that show.trace fills: lists of cells.

    Raises Refused for a file without a step, and for another file.
    """
    steps = path if isinstance(path, list) else read_jsonl(path)
    with reading(path, f"is no trajectory: make one with sample.py --trace={path}"):
        for text, lam, *rest in itertools.chain(*steps):
            neg_entropy, mixed = rest or (0.0, [])
            for word, number in [(text, lam or 0.0), (text, neg_entropy), *mixed]:
                assert isinstance(word, str) and math.isfinite(number)
        assert len({len(step) for step in steps}) == 1 and steps[0]
    return steps


def trajectory_page(patterns, columns):
    """A page that goes through traces step by step, side by side: HTML that needs no network.

    columns: with a number, the columns² cells after the first one are a grid. Else 0.
    """
    traces = [{"name": name_of(path), "steps": read_trace(path)} for path in files(patterns)]
    cells = min(len(trace["steps"][0]) for trace in traces)
    if columns**2 >= cells:
        raise Refused(f"--columns={columns} needs {columns**2} cells after the first, and a trace "
                      f"has {cells}: give a smaller number, or 0 for no grid")
    values = json.dumps({"columns": columns, "traces": traces})
    template = Path(__file__).with_name("trajectory.html").read_text(encoding="utf-8")
    # A token may be </script>. Without <, no text of a sample can end the element that holds it.
    return template.replace(">TRACES<", f">{values.replace('<', chr(92) + 'u003c')}<")


def grid_cells(step, columns):
    """One picture of a Sudoku in SVG: a square for each cell, with room between the boxes."""
    for i, (text, lam, *_) in enumerate(step[1:1 + columns**2]):
        row, column = divmod(i, columns)
        x, y = 8 + 34 * column + 6 * (column // 3), 8 + 34 * row + 6 * (row // 2)
        pale = 0 if lam is None else int(220 * (1 - lam))
        fill = "#fff" if lam is None else f"rgb({pale},{100 + pale * 2 // 3},{pale})"
        weight = "bold" if lam is None else "normal"
        color = "#fff" if lam is not None and lam > 0.6 else "#000"
        yield (f'<rect x="{x}" y="{y}" width="32" height="32" rx="4" fill="{fill}"/>'
               f'<text x="{x + 16}" y="{y + 22}" font-weight="{weight}" fill="{color}">'
               f'{html.escape(text)}</text>')


def grid_animation(path, columns):
    """A Sudoku appearing, a picture per network call: an SVG that moves in a browser.

    Green cells are masks, greener with a larger λ, and they hold the top guess. Bold is text.
    """
    steps = read_trace(path)
    if columns != 6 or len(steps[0]) != 39:
        raise Refused(f"--columns={columns}: only a Sudoku, 6 columns and 39 cells, is drawn so")
    seconds = 0.35 * len(steps) + 4  # and four more for the last picture
    parts = []
    for i, step in enumerate(steps):
        begin, end = 0.35 * i / seconds, 0.35 * (i + 1) / seconds
        last = i == len(steps) - 1
        # A viewer that does not move shows the last picture.
        hidden = "" if last else ' visibility="hidden"'
        values = "hidden;visible" + (";visible" if last else ";hidden")
        parts.append(f'<g{hidden}><animate attributeName="visibility" calcMode="discrete" '
                     f'values="{values}" keyTimes="0;{begin:.4f};{end:.4f}" dur="{seconds:.2f}s" '
                     f'repeatCount="indefinite"/>{"".join(grid_cells(step, columns))}</g>')
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" width="224" height="230" font-family="monospace" '
        'font-size="18" text-anchor="middle">',
        '<rect width="224" height="230" rx="8" fill="#999"/>', *parts, "</svg>\n"])


def trajectory(path):
    """A sample appearing, a row per network call.                                App. C.5, Fig. 7

    path: a file, or the list that show.trace fills.
    Green cells are masks, deeper green is a larger λ, and they hold the top guess. Bold is text.
    """
    steps = read_trace(path)
    strength = np.array([[lam for _, lam, *_ in step] for step in steps], float)  # None becomes nan
    fig, [ax] = figure(1, width=0.55 * len(steps[0]) + 1, height=0.3 * len(steps) + 1)
    image = ax.imshow(strength, cmap="Greens", vmin=0, aspect="auto")
    dark = 0.6 * image.norm.vmax
    for i, step in enumerate(steps):
        for j, (text, lam, *_) in enumerate(step):
            color = "white" if lam is not None and lam > dark else "black"
            ax.text(j, i, "␣" if text == " " else text, ha="center", va="center", size=8,
                    weight="bold" if lam is None else "normal", color=color, parse_math=False)
    ax.set(xlabel="position", ylabel="network call", xticks=[])
    fig.colorbar(image, label="strength λ")
    return fig


def feedback_figure(path):
    """The gains of three feedbacks over t: where SM pays, and whether its content matters.

    Bands are one standard error on both sides. What lies below the line at 0 does harm.
    """
    rows = [row for name, row in feedback_rows(path).items() if name != "all"]
    fig, [ax] = figure(1, width=6)
    t = [row["t"] for row in rows]
    words = {"own": "its own feedback", "permuted": "that of another text", "truth": "the truth"}
    for kind, style in styles(words).items():
        gain, se = (np.array([row[kind + end] for row in rows]) for end in ("_gain", "_gain_se"))
        ax.plot(t, gain, marker="o", **style | {"label": words[kind]})
        ax.fill_between(t, gain - se, gain + se, color=style["color"], alpha=0.2, lw=0)
    ax.axhline(0, color="gray", lw=0.8)
    ax.set(xlabel="t, the share of masks", ylabel="nats per token below no feedback")
    ax.legend()
    return fig


def throughput_series(folder):
    """{label: [(block, tokens/s, score or None)]}, by block, from results of eval_dream.py.

    A label is a task, the feedback, the threshold or NFE budget, and what else differs between the
    results in the folder. Only seeds are averaged.
    """
    results = [r for r in dream_results(folder) if r["group"]["block"] and r["seconds"]]
    if not results:
        raise Refused(f"{folder} has no results with a block length: run lab/eval_dream.py with "
                      f"--blocks=16,32,… first")
    named = "block", "feedback", "threshold", "budget"
    groups = [r["group"] | {"machine": r["machine"]} for r in results]  # machines differ in speed
    differ = [key for key in differing(groups) if key not in named]
    series = {}
    for r, group in zip(results, groups):
        budget = f"p ≥ {group['threshold']}" if group["threshold"] else f"NFE {group['budget']}"
        rest = [f"{key}={group[key]}" for key in differ if key in group]
        label = ", ".join([r["column"], group["feedback"], budget, *rest])
        point = r["tokens"] / r["seconds"], r["score"]
        series.setdefault(label, {}).setdefault(group["block"], []).append(point)
    mean = lambda values: None if None in values else statistics.fmean(values)
    return {label: [(block, *map(mean, zip(*points))) for block, points in sorted(blocks.items())]
            for label, blocks in series.items()}


def throughput(folder):
    """Left: tokens/s over block length. Right: score over tokens/s.            App. B.2, Fig. 4"""
    series = throughput_series(folder)
    fig, [speed, quality] = figure(2)
    for label, style in styles(series).items():
        blocks, rates, scores = zip(*series[label])
        speed.plot(blocks, rates, marker="o", **style)
        quality.plot(rates, np.array(scores, float), marker="o", **style)  # None becomes nan
    speed.set(xlabel="block length (tokens)", ylabel="tokens/s")
    quality.set(xlabel="tokens/s", ylabel="score (%)")
    speed.legend()
    return fig


def curves(path):
    """A panel for each size that bench.py has varied: seconds of an update or a sample.

    Both axes start at 0, so a cost that is in proportion to the size is a straight line. Sizes that
    are no numbers, such as |V|, stand side by side, without a line.
    """
    with reading(path, f"has no curves: run lab/bench.py --parts=curves --json={path} first"):
        found = read_json(path)["curves"]
    fig, axes = figure(len(found))
    for ax, (name, points) in zip(axes, found.items()):
        sizes = [point["x"] for point in points]
        words = any(isinstance(size, str) for size in sizes)
        sizes = list(map(str, sizes)) if words else sizes
        for case, style in styles([key for key in points[0] if key != "x"]).items():
            line = style | {"ls": ""} if words else style
            ax.plot(sizes, [point[case] for point in points], marker="o", **line)
        ax.set(title=name, xlabel=name.split()[-1], ylabel="seconds", ylim=(0, None))
        if not words:
            ax.set(xlim=(0, None))
        ax.legend()
    return fig


@torch.no_grad()
def two_passes_and_a_loop(path, t=0.6):
    """What a Sudoku model does with a held-out grid that is masked with probability t.

    Returns a dict. A cell is that of show.trace, and both algorithms start from the same x_t:
        x0      36 digits
        passes  of both passes of Alg. 1, 36 cells each
        nll     of both passes of Alg. 1, 36 floats each, 0 where there is no mask
        calls   of every network call of Alg. 2, 36 cells each
    Raises Refused for a model that cannot know Sudokus, or has no soft masks.
    """
    model = MDLM.load(path)
    special, sm = model.info["tokenizer"], model.sm
    if special["name"] != "bytes" or model.cfg.length != 39 or sm is None:
        raise Refused(f"{path} reads {special['name']} in rows of {model.cfg.length}, soft masks: "
                      f"{sm is not None}. The anatomy is that of an SM model of `data.py sudoku`")
    [text] = sudoku.texts(1, data.rng("sudoku", "val"))
    tok = data.tokenizer("bytes")
    x0 = torch.tensor([special["bos"], *tok.encode_ordinary(text), *2 * [special["eos"]]])[None]
    xt = corrupt(x0, torch.tensor([t]), model.mask_id, data.rng("anatomy"))                 # (1, L)
    xt[:, [0, -2, -1]] = x0[:, [0, -2, -1]]
    rows, emb = (xt[0] == model.mask_id).nonzero()[:, 0], F.embedding(xt, model.net.table)  # (N,)
    passes, nll, calls = [], [], []
    for _ in range(2):
        h = model.net.hidden(emb, rows, torch.tensor([t]))                                  # (N, D)
        mixed, lam, guess = model.feedback(h)                           # (N, D), (N,), (N,)
        at = lambda values: torch.zeros(1, 39, dtype=values.dtype).index_copy(1, rows, values[None])
        trace(tok, model, passes)(xt, at(lam), at(guess), rows, h)
        nll.append(at(model.cross_entropy(h, x0[0, rows]))[0, 1:37].tolist())
        emb = emb[0].index_copy(0, rows, mixed)[None]                                   # (1, L, D)
    generate(model, 1, 36, generator=[data.rng("anatomy", 1)], x=xt, every=True,
             on_step=trace(tok, model, calls))
    passes, calls = ([cells[1:37] for cells in each] for each in (passes, calls))
    return {"x0": text, "passes": passes, "nll": nll, "calls": calls}


def anatomy(path):
    """The two passes of Alg. 1 and the loop of Alg. 2, on the row of a Sudoku with the most masks.

    A color is a digit, gray is [MASK]. A cell is split by the shares of the embeddings in it.
    """
    found = two_passes_and_a_loop(path)
    first, second = found["passes"]
    masks = lambda row: sum(first[i][1] is not None for i in row)
    row = max((range(i, i + 6) for i in range(0, 36, 6)), key=masks)
    calls = [(f"call {n} sees", cells) for n, (before, cells) in
             enumerate(zip([first, *found["calls"]], found["calls"]), 2)
             if any((before[i][1] is None) != (cells[i][1] is None) for i in row)]
    none = lambda i: ""
    # A line: its name, its cells, the share of the guesses in masks (None: λ), notes below.
    lines = [("$x_0$", [[digit, None] for digit in found["x0"]], 0.0, none),
             ("$x_t$, pass 1 sees", first, 0.0, none),
             ("pass 1 predicts", first, 1.0,
              lambda i: f"−H {first[i][2]:.2f}, λ {first[i][1]:.2f}".replace("-", "−")),
             ("pass 2 sees", first, None, none),
             ("pass 2 predicts", second, 1.0,
              lambda i: "−log p {:.2f} → {:.2f}".format(*(nll[i] for nll in found["nll"])))]
    lines += [(name, cells, None, none) for name, cells in calls]
    fig, [ax] = figure(1, width=9, height=0.6 * len(lines) + 0.6)
    for n, (name, cells, share, note) in enumerate(lines):
        y = -n if n < 5 else -n - 0.7
        ax.text(-0.15, y, name, ha="right", va="center")
        for x, i in enumerate(row):
            draw_cell(ax, x, y, cells[i], share)
            if first[i][1] is not None:
                ax.text(x + 0.45, y - 0.43, note(i), ha="center", va="center", size=7)
    ax.text(0, 0.5, "Alg. 1: two passes, and the loss of either", weight="bold")
    ax.text(0, -5.1, "Alg. 2 from the same $x_t$: a line where a token has appeared", weight="bold")
    ax.set(xlim=(-1.6, 6), ylim=(-len(lines) - 0.3, 0.9))
    ax.axis("off")
    return fig


def draw_cell(ax, x, y, cell, share):
    """One cell of a trace. A token fills it. In a mask the guesses fill `share` of it (None: λ)."""
    share, mixed = (share, cell[3]) if cell[1] is not None else (1.0, [[cell[0], 1.0]])
    share = cell[1] if share is None else share
    for word, part in [["M", 1 - share], *([word, share * part] for word, part in mixed)]:
        color = "lightgray" if word == "M" else "C" + word if word in "123456" else "white"
        if part:
            ax.barh(y, 0.9 * part, 0.56, x, color=color, alpha=0.6, edgecolor="white")
        if part > 0.12:
            ax.text(x + 0.45 * part, y, word, ha="center", va="center", parse_math=False)
        x += 0.9 * part


TABLES = {f.__name__: f for f in (table, bounds, logs, benchmarks, feedback)}
FIGURES = {f.__name__: f for f in (
    runs, throughput, ablation, overhead, trajectory, learned, frontier, curves, anatomy)}
FIGURES |= {"feedback": feedback_figure}


def main(cfg):
    known = TABLES | FIGURES
    wanted = [name for name in known if getattr(cfg, name)]
    if len(wanted) != 1:
        raise Refused(f"{len(wanted)} things to plot: give one of --{', --'.join(known)}")
    name, source = wanted[0], getattr(cfg, wanted[0])
    out = cfg.out or ("" if name in TABLES else "plot.png")
    kind = os.path.splitext(out)[1].removeprefix(".")
    if kind in ("md", "") and name in TABLES:
        text = TABLES[name](source)
        print(text)
        if out:
            write_text(out, text + "\n")
        return
    if name == "trajectory" and kind == "html":
        write_text(out, trajectory_page(source, cfg.columns))
    elif name == "trajectory" and kind == "svg" and cfg.columns:
        write_text(out, grid_animation(source, cfg.columns))
    elif name in FIGURES and kind in ("png", "pdf", "svg"):
        fig = runs(source, cfg.entropy) if name == "runs" else FIGURES[name](source)
        with atomic(out) as tmp:
            fig.savefig(tmp, format=kind)
    else:
        raise Refused(f"--out={out} must end in .png, .pdf or .svg, or in .md if it is a table, "
                      f"or in .html if it is a trajectory")
    print(f"wrote {out}")


if __name__ == "__main__":
    run(main, Config)
