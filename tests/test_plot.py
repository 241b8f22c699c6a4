"""plot.py: tables and figures."""

import os

import pytest

import plot
from conftest import start
from launch import append_jsonl


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a result into a file of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda **result: append_jsonl(f"{len(os.listdir())}.json", result)


def cells(table):
    return [line[2:-2].split(" | ") for line in table.splitlines()]


def test_table_lays_results_out_as_the_paper_does(write, capsys):
    """Means over seeds, and gains over the last binary row. remdm-cap and -loop share a row."""
    def result(metric, label, values, **settings):
        evaluation = {"label": label, "checkpoint": ""}
        write(metric=metric, values=values, settings=settings, evaluation=evaluation)
    for sampler, label, ppl in (("remdm-cap", "binary", 42.53), ("remdm-cap", "sm", 29.5),
                                ("remdm-loop", "sm", 29.7)):
        result("samples", label, {"samples": {"gen_ppl": ppl}}, sampler=sampler,
               soft=label == "sm", steps=128, L=1024)
    text = {"path": "data/owt"}
    result("ppl", "binary", {"binary": {"ppl": 8.0}}, text=text)
    result("ppl", "sm", {"plain": {"ppl": 7.0}, "soft": {"ppl": 5.0}}, text=text)
    write(epochs=1)  # another file
    start("plot", "--table=*.json")
    assert cells(capsys.readouterr().out.strip()) == [
        ["unmasking", "feedback", "model", "gen. PPL ↓ 1/8", "PPL ↓ owt"], 5 * ["---"],
        ["", "binary", "binary", "", "8.000"], ["", "soft", "sm", "", "5.000"],
        ["", "gain", "", "", "-3.000"], ["remdm", "binary", "binary", "42.53", ""],
        ["remdm", "soft", "sm", "29.60 ± 0.14", ""], ["", "gain", "", "-12.93", ""]]


def test_benchmarks_are_table_3_and_figures_are_means_over_seeds(write):
    """Only what shares all settings is averaged. A gain is over binary, finetuned for as long."""
    def result(score, **changes):
        group = {"block": 0, "threshold": None, "budget": "1/4", "model": "Dream",
                 "FT": "1 epochs", "feedback": "binary", "data": "d1"}
        write(column="MBPP", score=score, tokens=30, seconds=2, group=group | changes)
    for score in 20.0, 30.0:
        result(score)
        result(score + 2, feedback="SM k=1", p_sm=0.5)
    result(40.0, feedback="SM k=1", p_sm=0.8)
    result(50.0, FT="-", budget="1/2")
    result(None, budget="1/1")
    assert [[row[0], *row[2:]] for row in cells(plot.benchmarks("."))[2:]] == [
        ["1/4", "1 epochs", "binary", "25.0 ± 7.1"],
        ["1/4", "1 epochs", "SM k=1", "27.0 ± 7.1"], ["", "", "gain", "+2.0"],
        ["1/4", "1 epochs", "SM k=1", "40.0"], ["", "", "gain", "+15.0"],
        ["1/2", "-", "binary", "50.0"]]
    pytest.importorskip("matplotlib")
    for block in 16, 32:
        result(block, block=block, threshold=0.9)
    points = plot.throughput(".").axes[0].lines[-1]
    for seed, omega_s in (1, 0.1), (2, 0.3):
        append_jsonl(f"sm-{seed}/log.jsonl", {"step": 5, "loss": 1.5, "omega_s": omega_s},
                     {"step": 10, "val_soft": 2.0, "val_plain": 2.2})
    panels = plot.MAKERS["runs"]("*/log.jsonl").axes
    drawn = [line.get_xydata().tolist() for line in (points, *(ax.lines[0] for ax in panels))]
    assert drawn == [[[15, 16], [15, 32]], [[5, 1.5]], [[10, 2.0]], [[5, pytest.approx(0.2)]]]
    start("plot", "--learned=*/log.jsonl")
    assert os.path.getsize("plot.png")
