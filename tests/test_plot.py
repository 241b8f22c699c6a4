# SPDX-License-Identifier: MIT
"""plot.py: what it reads out of logs and traces; that every figure is drawn, where matplotlib is installed."""

import json
import math
import sys

import pytest

import data
import plot
import sample
import train
from launch import Refused


def log(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def logs(tmp_path):
    """Two seeds with feedback in files of their names, one binary run as train.py leaves it."""
    log(tmp_path / "sm-1.jsonl", [{"step": 5, "omega_s": 0.1}, {"step": 10, "omega_s": 0.2, "val_soft": math.log(8), "val_plain": math.log(9)}])
    log(tmp_path / "sm-2.jsonl", [{"step": 5, "omega_s": 0.3}, {"step": 10, "omega_s": 0.2, "val_soft": math.log(6), "val_plain": math.log(9)}])
    log(tmp_path / "binary" / "log.jsonl", [{"step": 5}, {"step": 10, "val_plain": math.log(4)}])
    return f"{tmp_path}/*.jsonl,{tmp_path}/binary/log.jsonl"


def test_runs_are_grouped_by_name_and_seed(logs):
    series = plot.runs_series(logs)
    assert set(series) == {"sm", "binary"}
    assert series["sm"]["ppl"] == {10: pytest.approx([8, 6])}
    assert series["sm"]["omega_s"] == {5: [0.1, 0.3], 10: [0.2, 0.2]}
    assert series["binary"] == {"ppl": {10: pytest.approx([4])}, "omega_s": {}}


def test_what_is_no_log_is_refused(tmp_path):
    log(tmp_path / "a.jsonl", [{"step": 1}])
    with pytest.raises(Refused, match="no log with a held-out bound"):
        plot.runs_series(f"{tmp_path}/a.jsonl")
    log(tmp_path / "b.jsonl", [{"val_plain": 1.0}])
    with pytest.raises(Refused, match="is no log of train.py"):
        plot.runs_series(f"{tmp_path}/b.jsonl")
    (tmp_path / "c.jsonl").write_text("{")
    with pytest.raises(Refused, match="no file of JSON lines"):
        plot.runs_series(f"{tmp_path}/c.jsonl")


@pytest.mark.parametrize("line", [{"step": 1, "val_plain": 1e4}, {"step": "x", "val_plain": 1.0}, {"step": None, "val_plain": 1.0}, [1], 3])
def test_odd_lines_are_refused_in_a_sentence(tmp_path, line):
    log(tmp_path / "a.jsonl", [line])
    with pytest.raises(Refused, match="is no log of train.py"):
        plot.runs_series(f"{tmp_path}/a.jsonl")


def test_a_log_counts_once_and_dreams_do_not(logs, tmp_path):
    log(tmp_path / "dream" / "log.jsonl", [{"step": 1, "val_soft": 4.0, "val_soft_ce": 2.0}])
    assert plot.runs_series(f"{logs},{tmp_path}/sm-1.jsonl,{tmp_path}/dream/log.jsonl") == plot.runs_series(logs)


@pytest.mark.parametrize("given", [{}, {"runs": "a", "curves": "b"}])
def test_one_thing_at_a_time(given):
    with pytest.raises(Refused, match="give one of --runs, --ablation, --trajectory, --throughput, --curves"):
        plot.main(plot.Config(**given))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A small soft-masked model, trained for two updates, and the way of one sample."""
    out = tmp_path_factory.mktemp("traced")
    data.prepare(iter([("a small text " * 20, True), ("another one " * 9, True)]), str(out), data.tokenizer("bytes"), val_docs=1)
    train.train(train.Config(data=str(out), out_dir=str(out), steps=2, n_layer=1, n_head=2, n_embd=16, n_cond=8, length=12, batch_size=2,
                             micro_batch=2, eval_every=0, keep_every=0, omega_s=0.5, omega_a=1.0, omega_b=-5.0, device="cpu"))
    cfg = sample.Config(checkpoint=str(out / "last.pt"), out=str(out / "s.jsonl"), trace=str(out / "trace.jsonl"), steps=6, device="cpu")
    sample.main(cfg)
    return cfg


def test_trace_follows_the_sample(traced):
    """Cells are masks with 0 < λ < ω_s or tokens without; the last step is the sample, and nothing revealed changes."""
    steps = plot.read_lines(traced.trace)
    text = plot.read_lines(traced.out)[0]["text"]
    word = sample.spell(sample.tokenizer("bytes"), -1)
    assert "".join(cell for cell, _ in steps[-1]) == "".join(map(word, plot.read_lines(traced.out)[0]["ids"])) and text
    assert all(lam is None for _, lam in steps[-1])
    assert any(lam is not None for _, lam in steps[0]) and all(0 < lam < 0.51 for step in steps for _, lam in step if lam is not None)
    for before, after in zip(steps, steps[1:]):
        assert all(new == old for old, new in zip(before, after) if old[1] is None)


def test_trace_is_of_one_sample(traced):
    for more in ({"count": 2}, {"show": True}, {"out": "./t.jsonl"}):
        with pytest.raises(Refused, match="follows one sample, into a file of its own"):
            sample.main(sample.Config(checkpoint=traced.checkpoint, trace="t.jsonl", device="cpu", **more))


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_are_drawn(logs, traced, tmp_path, kind):
    pytest.importorskip("matplotlib", reason="would draw Fig. 2, App. C.3 and Fig. 4, and look into the axes")
    left, right = plot.runs(logs).axes
    assert {line.get_label() for line in left.lines} == {"sm", "binary"} and len(right.lines) == 1
    assert len(plot.ablation(logs).axes[0].get_yticks()) == 2
    steps = plot.read_lines(traced.trace)
    assert len(plot.trajectory(traced.trace).axes[0].texts) == len(steps) * 12
    plot.main(plot.Config(trajectory=traced.trace, out=str(tmp_path / f"f.{kind}")))
    assert (tmp_path / f"f.{kind}").stat().st_size > 1000


def test_without_matplotlib_one_sentence(logs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match="pip install matplotlib"):
        plot.runs(logs)


def test_what_is_no_trajectory_is_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="would refuse a log given as a trajectory")
    log(tmp_path / "a.jsonl", [{"step": 1}])
    with pytest.raises(Refused, match="is no trajectory"):
        plot.trajectory(str(tmp_path / "a.jsonl"))
