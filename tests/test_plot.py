# SPDX-License-Identifier: MIT
"""plot.py: what it reads out of logs, traces and results, and how tables are laid out."""

import dataclasses
import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest

import data
import eval as evaluation
import plot
import sample
import train
from launch import Refused, read_jsonl
from show import cell_text


def log(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(message, function, *args):
    with pytest.raises(Refused, match=message):
        function(*args)


# tables ------------------------------------------------------------------------------------------


def test_a_missing_cell_is_empty():
    rows = [{"run": "a", "PPL": "1"}, {"run": "b", "new": "2"}]
    assert plot.markdown(rows, ["run", "PPL", "new"]) == (
        "| run | PPL | new |\n|---|--:|--:|\n| a | 1 |  |\n| b |  | 2 |")


def result_file(path, value, metric="gen_ppl", run=None, label="", **settings):
    """A result of eval.py: settings are those of the samples or the checkpoint."""
    settings = {"checkpoint": "x.pt", "sampler": "mdlm", "steps": 128, "soft": True, "top_p": 0.9,
                "tokenizer": "gpt2", "L": 1024, "n": 5000} | settings
    values = {metric: value}
    if metric == "ppl":
        values = {"soft" if settings["soft"] else "binary": {"ppl": value}}
    cfg = evaluation.Config(metric, label=label, checkpoint=str(path), samples=run or str(path))
    path.write_text(json.dumps({"metric": metric, "values": values, "settings": settings,
                                "evaluation": vars(cfg)}))


def test_table_lays_results_out_as_the_paper_does(tmp_path, capsys):
    numbers = {("mdlm", False): (60.02, 50.46), ("mdlm", True): (39.61, 23.53),
               ("remdm", False): (42.53, 28.62), ("remdm", True): (29.62, 16.72)}
    for (sampler, soft), values in numbers.items():
        names = ["mdlm"] * 2 if sampler == "mdlm" else ["remdm-cap", "remdm-loop"]
        for steps, name, value in zip((128, 1024), names, values):
            path = tmp_path / f"{sampler}{soft}{steps}.json"
            result_file(path, value, label="1M", sampler=name, soft=soft, steps=steps)
    plot.main(plot.Config(table=f"{tmp_path}/*.json", out=str(tmp_path / "table.md")))
    assert (tmp_path / "table.md").read_text() == capsys.readouterr().out == (
        "| unmasking | feedback | model | gen. PPL ↓ 1/8 | gen. PPL ↓ 1/1 |\n"
        "|---|---|---|--:|--:|\n"
        "| standard | binary | 1M | 60.02 | 50.46 |\n| standard | soft | 1M | 39.61 | 23.53 |\n"
        "|  | gain |  | -20.41 | -26.93 |\n"
        "| ReMDM | binary | 1M | 42.53 | 28.62 |\n| ReMDM | soft | 1M | 29.62 | 16.72 |\n"
        "|  | gain |  | -12.91 | -11.90 |\n")


def test_table_gives_mean_and_deviation_of_runs(tmp_path):
    for seed, value in (1, 0.2), (2, 0.3), (3, 0.4):
        result_file(tmp_path / f"{seed}.json", value, "mauve", label="1M+100k")
    # measured twice, one run
    result_file(tmp_path / "4.json", 0.4, "mauve", label="1M+100k", run=str(tmp_path / "3.json"))
    assert "| standard | soft | 1M+100k | 0.300 ± 0.100 |" in plot.table(f"{tmp_path}/*.json")


def test_table_of_perplexities(tmp_path):
    result_file(tmp_path / "a.json", 23.21, "ppl", label="1M", soft=False)
    result_file(tmp_path / "b.json", 21.47, "ppl", label="1M, soft", soft=True)
    assert plot.table(f"{tmp_path}/*.json").splitlines()[2:] == [
        "|  | binary | 1M | 23.21 |", "|  | soft | 1M, soft | 21.47 |", "|  | gain |  | -1.74 |"]


def test_results_that_do_not_compare_are_refused(tmp_path):
    """Neither in one table, nor as seeds of each other: such as two samplers, or two states."""
    one, two = tmp_path / "a.json", tmp_path / "b.json"
    for place, key, a, b in [
            ("table", "n", 5000, 100), ("table", "L", 1024, 512), ("table", "top_p", 0.9, 1.0),
            ("table", "tokenizer", "gpt2", "bytes"), ("row, --label", "ema", True, False),
            ("row, --label", "sampler", "remdm-loop", "remdm-cap"), ("row, --label", "step", 9, 7),
            ("row, --label", "eta", 0.02, 0.1)]:
        result_file(one, 1.0, label="1M", **{key: a})
        result_file(two, 2.0, label="1M", **{key: b})
        message = rf"a.json and .*b.json differ in {key} \({a}, {b}\): .* one {place}$"
        refused(message, plot.table, f"{tmp_path}/*.json")


def test_tables_of_nothing_of_nan_and_of_other_files_are_refused(tmp_path):
    pattern = f"{tmp_path}/*.json"
    refused("no file matches", plot.table, pattern)
    refused("has no results of eval_dream.py", plot.benchmarks, str(tmp_path))
    result_file(tmp_path / "a.json", math.nan)
    refused("gen_ppl in .*a.json is nan", plot.table, pattern)
    for foreign in "{}", "[]", "no json":
        (tmp_path / "a.json").write_text(foreign)
        refused("is not a result of eval.py", plot.table, pattern)
        refused("is not a result of `eval.py ppl`", plot.bounds, pattern)


def test_bounds_are_averaged_over_seeds(tmp_path):
    for seed, ppl, nats in (1, 7.0, 0.02), (2, 8.0, 0.04):
        below = {"nats_per_token": nats, "nats_per_token_se": 0.005 * seed}
        values = {"soft": {"ppl": ppl}, "binary": {"ppl": 9.0}, "below_against": below,
                  "gain": {"nats_per_token": 0.1 * seed}}
        path = tmp_path / f"{seed}.json"
        path.write_text(json.dumps({"values": values, "evaluation": {"label": "SM"},
                                    "settings": {"step": 1400}}))
    result_file(tmp_path / "binary.json", 9.5, "ppl", label="binary", soft=False, step=2000)
    assert plot.bounds(f"{tmp_path}/*.json").splitlines()[2:] == [
        "| binary | 2,000 | 1 | 9.500 |  |  |",
        "| SM | 1,400 | 2 | 7.500 ± 0.707 | 0.1500 | +0.0300 ± 0.0141; ± 0.0075 |"]


def test_where_runs_ended(tmp_path):
    line = {"step": 500, "lam": 0.0, "tokens_per_s": 2000, "seconds": 60}
    omega = [{"omega_s": s, "omega_a": 1.0, "omega_b": -2.5, "lam": 0.25} for s in (0.001, 0.5)]
    log(tmp_path / "binary-10.jsonl", line)
    log(tmp_path / "sm-9" / "log.jsonl", {"step": 0, "val_soft": 2.0}, line | omega[0],
        line | omega[1] | {"step": 1000})
    log(tmp_path / "sm-10" / "log.jsonl", line | omega[0])
    found = plot.logs(f"{tmp_path}/*.jsonl,{tmp_path}/*/log.jsonl").splitlines()
    assert found[2:] == ["| binary-10 |  | 500 | 0.000 |  | 2,000 | 1 |",
                         "| sm-9 | 0.500, 1.000, -2.500 | 1,000 | 0.250 | 1,000 | 2,000 | 1 |",
                         "| sm-10 | 0.001, 1.000, -2.500 | 500 | 0.250 | never | 2,000 | 1 |"]
    for foreign in {"step": 1}, [1], {"step": 1, "lam": "x", "tokens_per_s": 1, "seconds": 1}:
        log(tmp_path / "a.jsonl", foreign)
        refused("is no log of train.py", plot.logs, f"{tmp_path}/a.jsonl")


def test_the_scripts_in_results_use_flags_that_exist():
    folder = Path(plot.__file__).parent / "results"
    commands = re.findall(r"python (\w+)\.py((?:.*\\\n)*.*)", (folder / "measure.sh").read_text())
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
        log(tmp_path / f"sm-{seed}.jsonl", {"step": 5, "omega_s": omega},
            {"step": 10, "omega_s": 0.2, **held_out})
    log(tmp_path / "binary" / "log.jsonl", {"step": 5}, {"step": 10, "val_plain": math.log(4)})
    return f"{tmp_path}/*.jsonl,{tmp_path}/binary/log.jsonl"


def test_runs_are_grouped_by_name_and_seed(logs):
    assert plot.runs_series(logs) == {
        "sm": {"ppl": {10: pytest.approx([8, 6])}, "omega_s": {5: [0.1, 0.3], 10: [0.2, 0.2]}},
        "binary": {"ppl": {10: pytest.approx([4])}, "omega_s": {}}}


def test_a_log_counts_once_and_dreams_do_not(logs, tmp_path):
    log(tmp_path / "dream" / "log.jsonl", {"step": 1, "val_soft": 4.0, "val_soft_ce": 2.0})
    more = f"{logs},{tmp_path}/sm-1.jsonl,{tmp_path}/dream/log.jsonl"
    assert plot.runs_series(more) == plot.runs_series(logs)


def test_what_is_no_log_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    log(path, {"step": 1})
    refused("no log with a held-out bound", plot.runs_series, str(path))
    for line in ({"val_plain": 1.0}, {"step": 1, "val_plain": 1e4}, [1], 3,
                 {"step": "x", "val_plain": 1.0}, {"step": None, "val_plain": 1.0}):
        log(path, line)
        refused("is no log of train.py", plot.runs_series, str(path))
    path.write_text("{\n")
    refused("is not JSON", plot.runs_series, str(path))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A small soft-masked model, trained for two updates, and the way of one sample."""
    out = tmp_path_factory.mktemp("traced")
    texts = ("a small text " * 20, "another one " * 9)
    data.prepare(((text, True) for text in texts), out, data.tokenizer("bytes"), val_docs=1)
    train.train(train.Config(
        data=str(out), out_dir=str(out), steps=2, n_layer=1, n_head=2, n_embd=16, n_cond=8,
        length=12, batch_size=2, micro_batch=2, eval_every=0, keep_every=0, omega_s=0.5,
        omega_a=1.0, omega_b=-5.0, device="cpu"))
    cfg = sample.Config(checkpoint=str(out / "last.pt"), out=str(out / "s.jsonl"), steps=6,
                        trace=str(out / "trace.jsonl"), device="cpu")
    sample.main(cfg)
    return cfg


def test_trace_follows_the_sample(traced):
    """Cells are masks with 0 < λ < ω_s, or tokens without λ. Nothing revealed changes."""
    steps, (line,) = read_jsonl(traced.trace), read_jsonl(traced.out)
    text_of = cell_text(data.tokenizer("bytes"), -1)
    assert "".join(cell for cell, _ in steps[-1]) == "".join(map(text_of, line["ids"]))
    assert line["text"] and all(lam is None for _, lam in steps[-1])
    assert any(lam is not None for _, lam in steps[0])
    assert all(0 < lam < 0.51 for step in steps for _, lam in step if lam is not None)
    for before, after in zip(steps, steps[1:]):
        assert all(new == old for old, new in zip(before, after) if old[1] is None)


def test_trace_is_of_one_sample(traced):
    for more in {"count": 2}, {"show": True}, {"out": "./t.jsonl"}:
        cfg = sample.Config(checkpoint=traced.checkpoint, trace="t.jsonl", device="cpu", **more)
        refused("follows one sample, into a file of its own", sample.main, cfg)


def test_figures_are_drawn(logs, traced, tmp_path):
    pytest.importorskip("matplotlib", reason="would draw Fig. 3, 5 and 7, and look into the axes")
    left, right = plot.runs(logs).axes
    colors = {line.get_label(): line.get_color() for line in left.lines}
    assert colors == {"binary": "C0", "sm": "C1"}
    assert [line.get_color() for line in right.lines] == ["C1"]
    assert len(plot.ablation(logs).axes[0].get_yticks()) == 2
    cells = plot.trajectory(traced.trace).axes[0].texts
    assert len(cells) == len(read_jsonl(traced.trace)) * 12
    for kind in "png", "svg":
        plot.main(plot.Config(trajectory=traced.trace, out=str(tmp_path / f"f.{kind}")))
        assert (tmp_path / f"f.{kind}").stat().st_size > 1000
    log(tmp_path / "a.jsonl", {"step": 1})
    refused("is no trajectory", plot.trajectory, str(tmp_path / "a.jsonl"))
    refused("is empty", plot.trajectory, str(tmp_path / "nowhere.jsonl"))


def test_without_matplotlib_one_sentence(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused("pip install matplotlib", plot.runs, logs)


def test_one_source_and_a_file_of_a_known_kind():
    for given in {}, {"runs": "a", "curves": "b"}:
        refused("give one of --table, --bounds, --logs, --bench", plot.main, plot.Config(**given))
    for given in {"runs": "a", "out": "x.md"}, {"table": "a", "out": "x.png"}:
        refused(r"must end in .png, .pdf or .svg, or in .md", plot.main, plot.Config(**given))
