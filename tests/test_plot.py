"""plot.py: tables and figures."""

import pytest

import plot
from conftest import refused
from launch import append_jsonl


def cells(table):
    return [line[2:-2].split(" | ") for line in table.splitlines()]


def test_table_lays_results_out_as_the_paper_does(tmp_path, capsys):
    """Tables 1, 2 and 4: means over seeds, and gains over the last binary row."""
    def write(file, metric, values, label, **settings):
        append_jsonl(tmp_path / f"{file}.json", {
            "metric": metric, "values": values, "settings": settings,
            "evaluation": {"label": label, "checkpoint": ""}})

    for sampler, label, values in (
            ("mdlm", "binary", {"gen_ppl": 60.02}), ("mdlm", "sm", {"gen_ppl": 39.61}),
            ("remdm-cap", "binary", {"gen_ppl": 42.53, "entropy": 5.5}),
            ("remdm-cap", "sm", {"gen_ppl": 29.5, "entropy": 5.4}),
            ("remdm-loop", "sm", {"gen_ppl": 29.7, "entropy": 5.4})):
        write(f"{sampler}-{label}", "samples", {"samples": values}, label, sampler=sampler,
              soft=label == "sm", steps=128, L=1024)
    text = {"path": "data/owt"}
    write("ppl-1", "ppl", {"binary": {"ppl": 8.0}}, "binary", text=text)
    write("ppl-2", "ppl", {"plain": {"ppl": 7.0}, "soft": {"ppl": 5.0}}, "sm", text=text)
    append_jsonl(tmp_path / "finetune.json", {"epochs": 1})  # another file
    plot.main(plot.Config(table=f"{tmp_path}/*.json", out=f"{tmp_path}/table.md"))
    assert capsys.readouterr().out == f"written to {tmp_path}/table.md\n"
    found = cells((tmp_path / "table.md").read_text())
    assert found[0][2:] == ["model", "gen. PPL ↓ 1/8", "entropy ↑ 1/8", "PPL ↓ owt"]
    assert found[2:] == [
        ["", "binary", "binary", "", "", "8.000"], ["", "soft", "sm", "", "", "5.000"],
        ["", "gain", "", "", "", "-3.000"],
        ["mdlm", "binary", "binary", "60.02", "", ""], ["mdlm", "soft", "sm", "39.61", "", ""],
        ["", "gain", "", "-20.41", "", ""],
        ["remdm", "binary", "binary", "42.53", "5.500", ""],
        ["remdm", "soft", "sm", "29.60 ± 0.14", "5.400 ± 0.000", ""],
        ["", "gain", "", "-12.93", "-0.100", ""]]


def dream_result(folder, name, score, feedback="binary", FT="-", budget="1/4", **settings):
    group = {"block": 0, "threshold": None, "budget": budget, "model": "Dream", "FT": FT,
             "feedback": feedback, "data": "d1"} | settings
    append_jsonl(folder / f"{name}.json", {
        "column": "MBPP", "score": score, "tokens": 30, "seconds": 2, "group": group})


def test_benchmarks_are_table_3(tmp_path):
    """A row per budget, finetuning and feedback. Only what shares all settings is averaged."""
    dream_result(tmp_path, "a", 50.0, budget="1/2")
    for i, score in enumerate((20.0, 30.0)):
        dream_result(tmp_path, f"b{i}", score, FT="1 epochs", p_sm=0)
        dream_result(tmp_path, f"c{i}", score + 2, "SM k=1", "1 epochs", p_sm=0.5)
    dream_result(tmp_path, "d", 40.0, "SM k=1", "1 epochs", p_sm=0.8)
    dream_result(tmp_path, "e", None, budget="1/1")
    found = cells(plot.benchmarks(str(tmp_path)))
    assert found[0] == ["NFE budget", "model", "FT", "feedback", "MBPP"]
    assert [[line[0], *line[2:]] for line in found[2:]] == [
        ["1/4", "1 epochs", "binary", "25.0 ± 7.1"],
        ["1/4", "1 epochs", "SM k=1", "27.0 ± 7.1"], ["", "", "gain", "+2.0"],
        ["1/4", "1 epochs", "SM k=1", "40.0"], ["", "", "gain", "+15.0"],
        ["1/2", "-", "binary", "50.0"]]
    for block in 16, 32:
        dream_result(tmp_path, f"f{block}", block, block=block, threshold=0.9)
    pytest.importorskip("matplotlib")
    line = plot.throughput(str(tmp_path)).axes[0].lines[-1]
    assert line.get_label() == "MBPP, Dream, -, binary, p ≥ 0.9"
    assert line.get_xydata().tolist() == [[15, 16], [15, 32]]


def test_figures_3_and_8_are_means_over_seeds(tmp_path):
    pytest.importorskip("matplotlib")
    for seed, omega_s in (1, 0.1), (2, 0.3):
        gate = {"omega_s": omega_s, "omega_a": 4.0 * seed, "omega_b": -0.5}
        append_jsonl(tmp_path / f"sm-{seed}/log.jsonl", {"step": 5} | gate,
                     {"step": 10, "val_soft": 2.0, "val_plain": 2.2} | gate)
    append_jsonl(tmp_path / "binary/log.jsonl", {"step": 10, "loss": 1.5, "val_plain": 1.4})
    loss, bound, omega_s = plot.MAKERS["runs"](f"{tmp_path}/*/log.jsonl").axes
    assert [line.get_xydata().tolist() for line in loss.lines] == [[[10, 1.5]]]
    assert [line.get_xydata().tolist() for line in bound.lines] == [[[10, 1.4]], [[10, 2.0]]]
    assert [line.get_label() for line in bound.lines] == ["binary (n = 1)", "sm (n = 2)"]
    append_jsonl(tmp_path / "text.jsonl", {"text": "a"})
    refused("text.jsonl is no log", plot.MAKERS["runs"], f"{tmp_path}/text.jsonl")
    *omega, tau = plot.MAKERS["learned"](f"{tmp_path}/*/log.jsonl").axes
    assert not tau.lines and [panel.lines[0].get_xydata().tolist() for panel in omega] == [
        [[5, pytest.approx(y)], [10, pytest.approx(y)]] for y in (0.2, 6.0, -0.5)]
