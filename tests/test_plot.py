"""plot.py: tables and figures."""

import pytest

import plot
from conftest import start
from launch import append_jsonl


def test_table_lays_results_out_as_the_paper_does(tmp_path, monkeypatch, capsys):
    """Means over seeds, and gains over the last binary row. remdm-cap and -loop share a row."""
    monkeypatch.chdir(tmp_path)
    for sampler, label, ppl in (("remdm-cap", "binary", 42.53), ("remdm-cap", "sm", 29.5),
                                ("remdm-loop", "sm", 29.7)):
        append_jsonl(f"{sampler}-{label}.json", {
            "metric": "samples", "values": {"samples": {"gen_ppl": ppl}},
            "settings": {"sampler": sampler, "soft": label == "sm", "steps": 128, "L": 1024},
            "evaluation": {"label": label}})
    append_jsonl("ppl.json", {
        "metric": "ppl", "values": {"plain": {"ppl": 7.0}, "soft": {"ppl": 5.0}},
        "settings": {"text": {"path": "data/owt"}}, "evaluation": {"label": "sm"}})
    append_jsonl("finetune.json", {"epochs": 1})  # another file
    start("plot", "--table=*.json")
    cells = [line[2:-2].split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert cells == [
        ["unmasking", "feedback", "model", "gen. PPL ↓ 1/8", "PPL ↓ owt"], 5 * ["---"],
        ["", "soft", "sm", "", "5.000"], ["remdm", "binary", "binary", "42.53", ""],
        ["remdm", "soft", "sm", "29.60 ± 0.14", ""], ["", "gain", "", "-12.93", ""]]


def test_benchmarks_are_table_3_and_figures_are_means_over_seeds(tmp_path, monkeypatch):
    """Only what shares all settings is averaged. A gain is over binary, finetuned for as long."""
    monkeypatch.chdir(tmp_path)
    soft = {"feedback": "SM k=1", "p_sm": 0.5}
    for i, (score, changes) in enumerate((
            (20.0, {}), (30.0, {}), (22.0, soft), (32.0, soft), (40.0, soft | {"p_sm": 0.8}),
            (50.0, {"FT": "-"}), (None, {"budget": "1/1"}))):
        group = {"block": 16, "threshold": None, "budget": "1/4", "model": "Dream", "data": "d1",
                 "FT": "1 epochs", "feedback": "binary"}
        append_jsonl(f"{i}.json", {"column": "MBPP", "score": score, "tokens": 30, "seconds": 2,
                                   "group": group | changes})
    cells = [line[2:-2].split(" | ") for line in plot.benchmarks(".").splitlines()]
    assert [row[3:] for row in cells[2:]] == [
        ["binary", "50.0"], ["binary", "25.0 ± 7.1"], ["SM k=1", "27.0 ± 7.1"], ["gain", "+2.0"],
        ["SM k=1", "40.0"], ["gain", "+15.0"]]
    pytest.importorskip("matplotlib")
    for seed, omega_s in (1, 0.1), (2, 0.3):
        append_jsonl(f"sm-{seed}/log.jsonl", {"step": 5, "loss": 1.5, "omega_s": omega_s},
                     {"step": 10, "val_soft": 2.0, "val_plain": 2.2})
    panels = (*plot.throughput(".").axes, *plot.MAKERS["runs"]("*/log.jsonl").axes)
    assert [ax.lines[0].get_xydata().tolist() for ax in panels] == [
        [[15, 50]], [[5, 1.5]], [[10, 2.0]], [[5, pytest.approx(0.2)]]]
    start("plot", "--learned=*/log.jsonl")
    assert (tmp_path / "plot.png").exists()
