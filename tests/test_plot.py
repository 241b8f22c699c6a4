# SPDX-License-Identifier: MIT
"""plot.py: what it reads out of logs, traces and results, and how tables are laid out."""

import dataclasses
import html
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import checkpoint
import data
import eval as evaluation
import plot
import sample
from conftest import ROOT, refused
from launch import read_jsonl
from mdlm import MDLM, ModelConfig
from show import cell_text

BYTES = data.tokenizer("bytes")


def drawing():
    pytest.importorskip("matplotlib", reason="would draw the figures and look into their axes")


def log(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# tables ------------------------------------------------------------------------------------------


def cells(table, start=0):
    """The cells of a markdown table, line by line."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[start:]]


def result_file(path, values, metric="gen_ppl", run="", label="", **settings):
    """A result of eval.py: settings are those of the samples or the checkpoint."""
    settings = {"checkpoint": "x.pt", "sampler": "mdlm", "steps": 128, "soft": True, "top_p": 0.9,
                "tokenizer": "gpt2", "L": 1024, "n": 5000, "dtype": "bfloat16"} | settings
    if not isinstance(values, dict):
        values = {metric: values}
    cfg = evaluation.Config(metric, label=label, checkpoint=str(path), samples=run or str(path))
    log(path, {"metric": metric, "values": values, "settings": settings, "evaluation": vars(cfg)})


def test_table_lays_results_out_as_the_paper_does(tmp_path, capsys):
    """Tables 1 and 6: the data have one value for all budgets, and training its cost."""
    cost = lambda step, start, passes, tokens: {"step": step, "training": {
        "start": start, "passes": passes, "loss tokens": tokens}}
    rows = [("mdlm", "mdlm", False, "1M", cost(10**6, "", 1e6, 1e6 * 512**2), 60.02, 50.46),
            ("mdlm", "mdlm", False, "of others", {"step": 7}, 50.0, None),
            ("mdlm", "mdlm", True, "0.5M", cost(500_000, "mdlm.ckpt", 9e5, 999), 39.61, 23.53),
            ("remdm-cap", "remdm-loop", False, "1M", {}, 42.53, 28.62),
            ("remdm-cap", "remdm-loop", True, "1M", {}, 29.62, 16.72)]
    for i, (few, many, soft, label, how, *values) in enumerate(rows):
        for steps, sampler, value in zip((128, 1024), (few, many), values):
            if value:
                result_file(tmp_path / f"{i}-{steps}.json", value, label=label, sampler=sampler,
                            soft=soft, steps=steps, **how)
    result_file(tmp_path / "data.json", 14.8, sampler="data", checkpoint="data/owt")
    pattern, out = f"{tmp_path}/*.json", tmp_path / "table.md"
    plot.main(plot.Config(table=pattern, out=str(out)))
    assert out.read_text() == capsys.readouterr().out
    found = cells(out.read_text())
    assert found[:2] == [["unmasking", "feedback", "model", "updates", "passes", "loss tokens",
                          "gen. PPL ↓ 1/8", "gen. PPL ↓ 1/1"], ["---"] * 3 + ["--:"] * 5]
    none = [""] * 3
    assert found[2:] == [
        ["standard", "binary", "1M", "1M", "1M", "262.1B", "60.02", "50.46"],
        ["standard", "binary", "of others", "7", "", "", "50.00", ""],
        ["standard", "soft", "0.5M", "+500k", "900k", "999", "39.61", "23.53"],
        ["", "gain", "", *none, "-10.39", ""],
        ["ReMDM", "binary", "1M", *none, "42.53", "28.62"],
        ["ReMDM", "soft", "1M", *none, "29.62", "16.72"],
        ["", "gain", "", *none, "-12.91", "-11.90"],
        ["data", "", "data/owt", *none, "14.80", "14.80"]]
    how = {"label": "1M", "sampler": "remdm-cap"}
    for seed, value in (2, 29.72), (3, 29.82):  # means over runs; the last one is measured twice
        result_file(tmp_path / f"{seed}.json", value, **how)
    result_file(tmp_path / "4.json", 29.82, run=str(tmp_path / "3.json"), **how)
    assert cells(plot.table(pattern))[7][6:] == ["29.72 ± 0.10", "16.72"]
    found = cells(plot.table(f"{tmp_path}/data.json"))
    assert found[0][3:] == ["gen. PPL ↓"] and found[2:] == [["data", "", "data/owt", "14.80"]]


def test_results_that_do_not_compare_are_refused(tmp_path):
    """Neither in one table, nor as seeds of each other: such as two samplers, or two states."""
    one, two, pattern = tmp_path / "a.json", tmp_path / "b.json", f"{tmp_path}/*.json"
    refused("no file matches", plot.table, pattern)
    refused("has no results of eval_dream.py", plot.benchmarks, str(tmp_path))
    for place, key, a, b in [
            ("table", "n", 5000, 100), ("table", "L", 1024, 512), ("table", "top_p", 0.9, 1.0),
            ("row, --label", "sampler", "remdm-loop", "remdm-cap"), ("row, --label", "step", 9, 7),
            ("row, --label", "passes", 2, None)]:
        result_file(one, 1.0, label="1M", **{key: a})
        result_file(two, 2.0, label="1M", **{key: b})
        message = rf"a.json and .*b.json differ in {key} \({a}, {b}\): .* one {place}$"
        refused(message, plot.table, pattern)
    for path, passes in (one, 9.0), (two, 16.2):  # a binary model, and one with SM that is off
        result_file(path, 1.0, label="1M", soft=False, training={"start": "", "passes": passes})
    refused("differ in cost of training", plot.table, pattern)
    result_file(one, math.nan)
    refused("gen_ppl in .*a.json is nan", plot.table, pattern)
    refused("give one of --table, --bounds, --logs", plot.main, plot.Config(runs="a", curves="b"))
    for given in {"runs": "a", "out": "x.md"}, {"table": "a", "out": "x.png"}:
        refused(r"must end in .png, .pdf or .svg, or in .md", plot.main, plot.Config(**given))


def test_other_files_than_wanted_are_refused(tmp_path):
    path = log(tmp_path / "a", {"step": 1, "lam": "x", "val_plain": "2", "overhead": {"SM": {}}})
    for what, function, *more in (
            ("not a result of eval.py", plot.table), ("not a result of `eval.py ppl`", plot.bounds),
            ("not a result of `eval.py feedback`", plot.feedback),
            ("no log of train.py", plot.logs), ("no log of a run", plot.log_series, "bound"),
            ("no overhead", plot.overhead), ("no curves", plot.curves),
            ("no trajectory", plot.trajectory)):
        refused(what, function, path, *more)
    log(tmp_path / "a", {"step": 1})
    for needed, name in ("bound", "held-out bound"), ("omega_s", "ω_s"):
        refused(f"no log with {name}", plot.log_series, path, needed)
    for line in [1], {"val_plain": 1.0}:
        log(tmp_path / "a", line)
        refused("no log of a run", plot.log_series, path, "bound")
    for cell in ["a"], ["a", 0.5, -1.0, [["b"]]], [1, None], ["a", "b"]:
        log(tmp_path / "a", [cell])
        refused("no trajectory", plot.trajectory_page, path, 0)
    log(tmp_path / "a", [["a", None]], [["a", None]] * 2)  # steps of one cell and of two
    refused("no trajectory", plot.trajectory_page, path, 0)


def test_bounds_are_averaged_over_seeds(tmp_path):
    for seed, ppl, nats in (1, 7.0, 0.02), (2, 8.0, 0.04):
        below = {"nats_per_token": nats, "nats_per_token_se": 0.005 * seed}
        values = {"soft": {"ppl": ppl}, "binary": {"ppl": 9.0}, "below_against": below,
                  "gain": {"nats_per_token": 0.1 * seed}}
        result_file(tmp_path / f"{seed}.json", values, "ppl", label="SM", step=1400)
    for label, ppl in ("binary", 9.5), ("soft", 7.5):
        values = {label: {"ppl": ppl}}
        result_file(tmp_path / f"{label}.json", values, "ppl", label=label, step=2000)
    assert cells(plot.bounds(f"{tmp_path}/[12b]*.json"), 2) == [
        ["binary", "2,000", "1", "9.500", "", "", ""],
        ["SM", "1,400", "2", "7.500 ± 0.707", "0.1500", "+0.0300 ± 0.0141; ± 0.0075", "3.0"]]
    assert cells(plot.table(f"{tmp_path}/[bs]*.json"), 2) == [
        ["", "binary", "binary", "2k", "9.50"], ["", "soft", "soft", "2k", "7.50"],
        ["", "gain", "", "", "-2.00"]]
    refused("run eval.py ppl with --against", plot.ablation, f"{tmp_path}/binary.json")
    both = f"{tmp_path}/2.json,{tmp_path}/x.json"
    for more, message in ({"n": 9}, r"differ in n \(5000, 9\)"), ({"step": 9}, "differ in step"):
        result_file(tmp_path / "x.json", values | {"soft": {"ppl": 1}}, "ppl", label="SM",
                    **{"step": 1400} | more)
        refused(message, plot.bounds, both)
    result_file(tmp_path / "x.json", values, "ppl", label="soft", step=2000)
    twice = (tmp_path / "x.json").read_text().replace("x.json", "soft.json")
    (tmp_path / "x.json").write_text(twice)  # such as one with --against, and one without
    refused("soft.json and .*x.json are both of .*soft.json", plot.bounds, f"{tmp_path}/[sx]*.json")
    result_file(tmp_path / "x.json", values, "ppl", step=1)  # no label: that of the checkpoint
    assert cells(plot.bounds(f"{tmp_path}/x.json"), 2)[0][0] == f"{tmp_path}/x.json"
    (tmp_path / "x.json").unlink()
    drawing()
    [ax] = plot.ablation(f"{tmp_path}/*.json").axes  # a dot for a seed, a bar for its error
    assert ax.containers[0][0].get_xdata().tolist() == [0.02, 0.04]
    assert ax.containers[0][2][0].get_segments()[1][:, 0] == pytest.approx([0.03, 0.05])


def test_feedback_is_a_table_or_a_figure(tmp_path, capsys):
    gains = {"own": 0.25, "permuted": -0.5, "truth": 1.0}
    row = {"t": 0.5, "none": 2.0} | {f"{kind}_gain": gain for kind, gain in gains.items()}
    row |= {f"{kind}_gain_se": 0.125 for kind in gains}
    path = log(tmp_path / "f.json", {"values": {"all": row, "0.4 to 0.5": row | {"t": 0.45}}})
    plot.main(plot.Config(feedback=path))
    assert cells(capsys.readouterr().out, 2) == [
        [name, "2.0000", "+0.2500 ± 0.1250", "-0.5000 ± 0.1250", "+1.0000 ± 0.1250"]
        for name in ("all", "0.4 to 0.5")]
    drawing()
    plot.main(plot.Config(feedback=path, out=str(tmp_path / "f.svg")))
    [ax] = plot.feedback_figure(path).axes
    lines = ax.lines
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "its own feedback", "that of another text", "the truth"]
    assert [line.get_xydata().tolist() for line in lines[:3]] == [
        [[0.45, gain]] for gain in gains.values()]


def test_where_runs_ended(tmp_path):
    line = {"step": 500, "lam": 0.25, "tokens_per_s": 2000, "seconds": 60}
    omega = [{"omega_s": s, "omega_a": 1.0, "omega_b": -2.5} for s in (0.001, 0.5)]
    log(tmp_path / "binary-10.jsonl", line)
    log(tmp_path / "sm-9" / "log.jsonl", {"step": 0, "val_soft": 2.0}, line | omega[0],
        line | omega[1] | {"step": 1000})
    log(tmp_path / "sm-10" / "log.jsonl", line | omega[0])
    assert cells(plot.logs(f"{tmp_path}/*.jsonl,{tmp_path}/*/log.jsonl"), 2) == [
        ["binary-10", "", "500", "0.250", "", "2,000", "1"],
        ["sm-9", "0.500, 1.000, -2.500", "1,000", "0.250", "1,000", "2,000", "1"],
        ["sm-10", "0.001, 1.000, -2.500", "500", "0.250", "never", "2,000", "1"]]


def test_the_scripts_in_results_use_flags_that_exist():
    folder = Path(ROOT, "results")
    text = "".join((folder / name).read_text() for name in ("measure.sh", "draw.sh"))
    commands = re.findall(r"python (\w+)\.py((?:.*\\\n)*.*)", text)
    lines = (folder / "run.sh").read_text().splitlines()
    commands += [("train", line) for line in lines if not line.startswith("#")]
    assert len(commands) > 20
    for script, words in commands:
        fields = {f.name for f in dataclasses.fields(importlib.import_module(script).Config)}
        assert set(re.findall(r"--(\w+)", words)) <= fields, words


# figures -----------------------------------------------------------------------------------------


@pytest.fixture
def logs(tmp_path):
    """Two seeds with feedback in files of their names, one binary run as train.py leaves it."""
    for seed, omega, ppl in (1, 0.1, 8), (2, 0.3, 6):
        held_out = {"val_soft": math.log(ppl), "val_plain": math.log(9)}
        gate = {"omega_a": 4.0 * seed, "omega_b": -0.5}
        log(tmp_path / f"sm-{seed}.jsonl", {"step": 5, "omega_s": omega, **gate},
            {"step": 10, "omega_s": 0.2, **gate, **held_out})
    log(tmp_path / "binary" / "log.jsonl", {"step": 5}, {"step": 10, "val_plain": math.log(4)})
    return f"{tmp_path}/*.jsonl,{tmp_path}/binary/log.jsonl"


def test_runs_are_grouped_by_name_and_seed(logs, tmp_path):
    """A log counts once, and Dream's has no bound."""
    dream = {"step": 1, "val_soft": 4.0, "val_soft_ce": 2.0, "omega_s": 0.1, "tau": 0.9}
    more = log(tmp_path / "dream-1231" / "log.jsonl", dream)
    more += f",{logs},{tmp_path}/sm-1.jsonl"
    found = plot.log_series(more, "bound")
    shown = ("bound", "share", "omega_s", "omega_a", "tau")
    assert {name: tuple(map(q.get, shown)) for name, q in found.items()} == {
        "sm": ({10: [math.log(8), math.log(6)]}, {10: pytest.approx([0.117783, 0.405465])},
               {5: [0.1, 0.3], 10: [0.2, 0.2]}, {5: [4.0, 8.0], 10: [4.0, 8.0]}, {}),
        "binary": ({10: [math.log(4)]}, {}, {}, {}, {})}
    found = plot.log_series(more, "omega_s")  # of a binary run nothing is learned
    assert set(found) == {"sm", "dream"}
    assert [found["dream"][name] for name in shown] == [{}, {}, {1: [0.1]}, {}, {1: [0.9]}]
    more += "," + log(tmp_path / "other" / "dream-1231" / "log.jsonl", dream)
    refused("2 logs are of runs called dream-1231", plot.log_series, more, "tau")


def test_a_method_looks_the_same_in_every_figure():
    found = plot.styles(["new-binary", "new-sm", "new-sm-k1", "new-owt", "new-MBPP, SM k=1"])
    assert [" ".join(style.values()) for style in found.values()] == [
        "binary C0 -", "SM C1 -", "SM, k = 1 C1 --", "owt C5 -", "MBPP, SM k=1 C1 -."]
    assert plot.styles(["owt"])["owt"]["label"] == "owt"


def test_figures_are_drawn(logs, page, tmp_path, monkeypatch):
    """Fig. 3 and 7, also where a seed is not there yet, and where no bound was measured."""
    drawing()
    log(tmp_path / "sm-3.log.jsonl", {"step": 20, "val_soft": 1.0})
    bound, *others = plot.runs(f"{logs},{tmp_path}/sm-3.log.jsonl", entropy=0.25).axes
    colors = {line.get_label(): line.get_color() for line in bound.lines}
    assert colors == {"binary (n = 1)": "C0", "SM (n = 2)": "C1", "entropy of the data": "gray"}
    assert [line.get_xdata().tolist() for line in bound.lines[:2]] == [[10], [10]]
    assert [[line.get_color() for line in ax.lines] for ax in others] == [["C1"], ["C1"]]
    path = log(tmp_path / "q" / "log.jsonl", {"step": 1, "loss": 2.0, "omega_s": 0.1})
    assert plot.runs(path).axes[0].get_ylabel().startswith("loss in")
    trace = str(page.parent / "on.jsonl")
    for source in trace, read_jsonl(trace):
        ax, _ = plot.trajectory(source).axes
        assert ax.get_ylabel() == "network call" and len(ax.texts) == 2 * 5
    for kind in "png", "svg":
        plot.main(plot.Config(trajectory=trace, out=str(tmp_path / f"f.{kind}")))
        assert (tmp_path / f"f.{kind}").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused("pip install matplotlib", plot.runs, logs)


def test_learned_parameters_are_drawn_with_the_gate_that_they_make(logs, tmp_path):
    """Fig. 8: four panels, five where k = |V|. The last one is Eq. 3 of the logged ω."""
    drawing()
    with open(tmp_path / "sm-2.jsonl", "a") as f:  # an update that the other seed does not have
        f.write('{"step": 11, "omega_s": 0.9, "omega_a": 9, "omega_b": -9}\n')
    panels = plot.learned(logs).axes
    assert [ax.get_ylabel() for ax in panels] == ["ω_s", "ω_a (1/nat)", "ω_b (nats)", "λ"]
    assert panels[1].lines[0].get_xydata().tolist() == [[5, 6], [10, 6]]  # means over two seeds
    gates = panels[-1].lines
    assert len(gates) == 4 and gates[0].get_alpha() < gates[3].get_alpha() == 1
    for line in gates[0], gates[3]:
        for x, lam in line.get_xydata()[::40].tolist():
            assert lam == pytest.approx(0.2 / (1 + math.exp(-6 * (x + 0.5))))
    log(tmp_path / "kV.jsonl", {"step": 1, "omega_s": 0.4, "omega_a": 1, "omega_b": -1, "tau": 0.9})
    panels = plot.learned(logs).axes
    assert [ax.get_ylabel() for ax in panels][3:] == ["τ", "λ"]
    assert panels[3].lines[0].get_xydata().tolist() == [[1, 0.9]] and len(panels[-1].lines) == 8


def test_frontier_has_a_line_per_row_and_a_dot_per_budget(tmp_path):
    """Fig. 9, means over runs, budgets from small to large."""
    for T, ppl, nats in (1024, 23.0, 5.3), (128, 40.0, 5.5), (128, 42.0, 5.4):
        values = {"gen_ppl": ppl, "entropy": nats}
        result_file(tmp_path / f"{ppl}.json", values, label="1M", steps=T)
    result_file(tmp_path / "mauve.json", {"mauve": 0.5, "entropy": 5.4}, "mauve", label="1M")
    result_file(tmp_path / "data.json", {"gen_ppl": 14.8, "entropy": 5.44}, sampler="data")
    drawing()
    refused("run eval.py gen_ppl first", plot.frontier, f"{tmp_path}/mauve.json")
    [ax] = plot.frontier(f"{tmp_path}/*.json").axes
    soft, of_data = ax.lines
    assert soft.get_label() == "standard SM 1M" and soft.get_color() == "C1"
    assert of_data.get_xydata().tolist() == [[5.44, 14.8]]
    assert soft.get_xydata().tolist() == [[pytest.approx(5.4333, abs=1e-4), 41.0], [5.3, 23.0]]
    assert [text.get_text() for text in ax.texts] == ["1/8", "1/1", ""]


def test_costs_are_drawn_as_they_are(tmp_path):
    """Fig. 6 stacks what a sample spends. Sizes that are no numbers have no line."""
    drawing()
    case = lambda calls, **sections: {"calls": calls, "s/call": sum(sections.values()) / calls,
                                      "sections": sections}
    curves = {name: [{"x": x, "SM": 2.0} for x in sizes]
              for name, sizes in {"update over L": (64, 512), "update over k": (1, "|V|")}.items()}
    overhead = {"binary": case(636, trunk=10.0, rest=2.0),
                "SM": case(651, trunk=11.0, topk=1.5, rest=2.0)}
    path = log(tmp_path / "bench.json", {"curves": curves, "overhead": overhead})
    [ax] = plot.overhead(path).axes
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*ax.containers)]
    assert ends == [12.0, 14.5]
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "binary: 636 calls\n18.9 ms a call", "SM: 651 calls\n22.3 ms a call"]
    assert [text.get_text() for text in ax.get_legend().texts] == ["trunk", "rest", "topk"]
    [L], [k] = (ax.lines for ax in plot.curves(path).axes)
    assert L.get_xdata().tolist() == [64, 512] and L.get_linestyle() == "-"
    assert list(k.get_xdata()) == ["1", "|V|"] and k.get_linestyle() == "None"


# the way of a sample -----------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A function that saves a random model, of any size, as a checkpoint."""
    def save(name, **fields):
        torch.manual_seed(0)
        model = MDLM(ModelConfig(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=259,
                                 mask_id=258, omega_s=0.5, omega_a=1.0, omega_b=-5.0, **fields))
        torch.nn.init.normal_(model.net.output_layer.linear.weight)
        checkpoint.save(tmp_path / name, kind="mdlm", step=1, seed=1, config=vars(model.cfg),
                        model=model.state_dict(), tokenizer=data.describe(BYTES))
        return model.eval(), str(tmp_path / name)
    return save


def test_trace_follows_the_sample(saved, tmp_path):
    """Cells are masks with 0 < λ < ω_s, or tokens without λ. Nothing revealed changes."""
    model, path = saved("sm.pt", length=12)
    cfg = sample.Config(checkpoint=path, out=str(tmp_path / "s.jsonl"), steps=6, device="cpu",
                        trace=str(tmp_path / "trace.jsonl"))
    sample.main(cfg)
    steps, (line,) = read_jsonl(cfg.trace), read_jsonl(cfg.out)
    assert [cell for cell, _ in steps[-1]] == [cell_text(BYTES, token) for token in line["ids"]]
    assert line["text"] and all(lam is None for _, lam in steps[-1])
    omega_s, omega_a, omega_b = (w.item() for w in model.sm.omega)
    masks = [cell for step in steps for cell in step if cell[1] is not None]
    assert len(masks) > 12
    for guess, lam, neg_entropy, mixed in masks:
        gate = omega_s / (1 + math.exp(-omega_a * (neg_entropy - omega_b)))
        assert lam == pytest.approx(gate, abs=1e-4) and guess == mixed[0][0]
        shares = [share for _, share in mixed]
        assert len(shares) == 3 and sum(shares) == pytest.approx(1, abs=2e-4)
        assert shares == sorted(shares, reverse=True)
    for before, after in zip(steps, steps[1:]):
        assert all(new == old for old, new in zip(before, after) if old[1] is None)
    refused("follows one sample, into a file of its own", sample.main,
            dataclasses.replace(cfg, count=2))
    for kind in {"order": "entropy"}, {"soft": False}:  # guesses are there, too
        sample.main(dataclasses.replace(cfg, **kind))
        masks = [cell for step in read_jsonl(cfg.trace) for cell in step if cell[1] is not None]
        assert masks and all(mixed[0][0] == guess for guess, _, _, mixed in masks)
        assert all((lam > 0) == ("order" in kind) for _, lam, _, _ in masks)


def test_the_anatomy_is_that_of_both_algorithms(saved, monkeypatch):
    """Its cells and losses are those of MDLM.forward, and what it ends with is a whole text."""
    model, path = saved("sm.pt", length=39)
    _, binary = saved("off.pt", length=39, soft_mask=False)
    grid = "123456456123231564564231312645645312"
    monkeypatch.setattr(data, "sudoku", lambda n, split: [(grid, True)])
    found = plot.two_passes_and_a_loop(path)
    x0 = torch.tensor([[256, *map(ord, grid), 257, 257]])
    masked = [cell[1] is not None for cell in found["passes"][0]]
    xt = x0.masked_fill(torch.tensor([[False, *masked, False, False]]), model.mask_id)
    with torch.no_grad():
        losses = [model(x0, xt, torch.ones(1), soft).item() for soft in (False, True)]
    assert [sum(nll) for nll in found["nll"]] == pytest.approx(losses) and 9 < sum(masked) < 36
    assert found["passes"][0] != found["passes"][1]
    assert not any(cell[1] for cell in found["calls"][-1])
    refused("soft masks: False", plot.anatomy, binary)
    drawing()
    words = [text.get_text() for text in plot.anatomy(path).axes[0].texts]
    most = max(sum(masked[i:i + 6]) for i in range(0, 36, 6))
    assert sum(word.startswith("−log p") for word in words) == most


def test_a_grid_appears_picture_by_picture(tmp_path):
    """In green as long as it is masked; a viewer that does not move shows the last picture."""
    grid = [["<|bos|>", None], *([["<", 0.5, -1.0, [["<", 1.0]]]] * 36), ["", None], ["", None]]
    steps, out = [grid, [*grid[:7], ["4", None], *grid[8:]]], str(tmp_path / "t.svg")
    path = log(tmp_path / "t.jsonl", *steps)
    plot.main(plot.Config(trajectory=path, columns=6, out=out))
    first, second = ElementTree.parse(out).getroot().findall("{*}g")
    texts = [[text.text for text in picture.findall("{*}text")] for picture in (first, second)]
    assert texts == [["<"] * 36, ["<"] * 6 + ["4"] + ["<"] * 29]
    green, *others = dict.fromkeys(square.get("fill") for square in second.findall("{*}rect"))
    assert others == ["#fff"] and green.startswith("rgb(")
    assert first.get("visibility") == "hidden" and second.get("visibility") is None
    refused("only a Sudoku", plot.grid_animation, steps, 5)


EVIL = "</script><b>&"


@pytest.fixture
def page(tmp_path):
    """Two traces of 2 × 2 cells after the first one. In the second step a token has appeared."""
    folder, mask = tmp_path / "page", lambda lam: ["a", lam, -0.5, [["a", 0.75], [EVIL, 0.25]]]
    for name, lam in ("off", 0.0), ("on", 0.5):
        log(folder / f"{name}.jsonl", [["x", None], *[mask(lam)] * 4],
            [["x", None], *[mask(lam)] * 3, [EVIL, None]])
    plot.main(plot.Config(trajectory=f"{folder}/*.jsonl", columns=2, out=f"{folder}/t.html"))
    return folder / "t.html"


def test_a_page_holds_its_traces_and_no_text_of_theirs_as_html(page):
    """The shipped page is made from the same template."""
    text = page.read_text()
    assert EVIL not in text and text.count("</script>") == 2
    assert "http" not in text.replace("http-equiv", "")
    held = json.loads(re.search(r'application/json">(.*?)</script>', text)[1])
    assert held == {"columns": 2, "traces": [
        {"name": name, "steps": read_jsonl(page.parent / f"{name}.jsonl")}
        for name in ("off", "on")]}
    refused("smaller number, or 0", plot.trajectory_page, str(page.parent / "on.jsonl"), 3)
    template, shipped = (Path(ROOT, *at).read_text(encoding="utf-8")
                         for at in (["lab", "trajectory.html"], ["results", "trajectory.html"]))
    before, mark, after = template.partition(">TRACES<")
    assert mark and shipped.startswith(before + ">{") and shipped.endswith("}<" + after)


def test_a_page_can_be_stepped_through_in_a_browser(page):
    """The right key, then the focus on the last cell of the first trace."""
    names = "chromium", "chromium-browser", "google-chrome"
    browser = next(filter(None, map(shutil.which, names)), None)
    if not browser:
        pytest.skip("no Chromium: would press keys on the page, and read its cells")
    keys = """<script>
        const at = () => traces.flatMap(t => t.buttons.map(b => [b.textContent, b.className]));
        const first = at();
        document.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
        traces[0].buttons[3].dispatchEvent(new FocusEvent("focus"));
        const about = traces[1].about.innerText, green = b => getComputedStyle(b).backgroundColor;
        const on = traces[1].buttons.map(green), off = traces[0].buttons.map(green);
        document.body.replaceChildren(JSON.stringify([first, at(), about, on, off]));
        </script>"""
    page.write_text(page.read_text() + keys)
    flags = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
             "--disable-background-networking --disable-component-update --dump-dom").split()
    dom = subprocess.run([browser, *flags, f"--user-data-dir={page.parent}/user", page.as_uri()],
                         capture_output=True, text=True, timeout=120).stdout
    body = html.unescape(re.search(r"<body>(.*)</body>", dom, re.S)[1])
    first, then, about, on, off = json.loads(body)
    assert [text for text, _ in first] == ["x", "a", "a", "a", "a"] * 2
    assert [text for text, _ in then] == ["x", "a", "a", "a", EVIL] * 2
    assert then[3][1].split() == ["mask", "picked"] and then[4][1].split() == ["token", "new"]
    assert about.split() == ["position", "3:", "mask,", "guess", "a", "−H", "−0.500", "nats,", "λ",
                             "0.500", "a", "0.750", EVIL, "0.250"]
    assert on[0] == on[4] == off[0] and on[1] != off[1]
