"""plot.py: tables and figures."""

import pytest

import plot
from conftest import refused, start
from launch import append_jsonl


def test_table_lays_results_out_as_the_paper_does(tmp_path, monkeypatch, capsys):
    """Means over seeds, and gains over binary with this label. remdm-cap and -loop share a row."""
    monkeypatch.chdir(tmp_path)

    def write(name, ppl, label, **changed):
        settings = {"sampler": "remdm-cap", "soft": True, "soft_mask": True, "steps": 128,
                    "L": 1024, "seed": name, "seeds": [name], "weights": name, "checkpoint": name}
        append_jsonl(f"{name}.json", {
            "metric": "samples", "values": {"samples": {"gen_ppl": ppl}},
            "settings": settings | changed, "evaluation": {
                "label": label, "samples": name, "rows": name, "out": name, "device": name}})
    write("binary", 42.53, "A", soft=False, soft_mask=False)
    write("later", 9.5, "B", soft=False, soft_mask=False)
    write("off", 50.0, "A", soft=False)
    write("one", 29.5, "A")
    write("two", 29.7, "A")
    write("loop", 31.0, "A", sampler="remdm-loop", steps=1024)
    write("new", 10.5, "C")
    append_jsonl("ppl.json", {
        "metric": "ppl", "values": {"plain": {"ppl": 7.0}, "soft": {"ppl": 5.0}},
        "settings": {"text": {"path": "data/owt"}}, "evaluation": {"label": "A"}})
    append_jsonl("finetune.json", {"epochs": 1})  # another file
    start("plot", "--table=*.json")
    cells = [line[2:-2].split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert cells == [
        ["unmasking", "feedback", "model", "gen. PPL ↓ 1/8", "gen. PPL ↓ 1/1", "PPL ↓ owt"],
        6 * ["---"], ["", "soft", "A", "", "", "5.000"], ["remdm", "binary", "A", "42.53", "", ""],
        ["remdm", "binary", "B", "9.50", "", ""], ["remdm", "off", "A", "50.00", "", ""],
        ["remdm", "soft", "A", "29.60 ± 0.14", "31.00", ""],
        ["", "gain", "over A", "-12.93", "", ""],
        ["remdm", "soft", "C", "10.50", "", ""], ["", "gain", "over B", "+1.00", "", ""]]
    write("three", 29.0, "A", top_p=1.0)
    refused("one.json has other settings: top_p .*three.json would be", plot.table, "*.json")


def test_benchmarks_are_table_3_and_figures_are_means_over_seeds(tmp_path, monkeypatch):
    """Only what shares all settings is averaged. A gain is over binary, finetuned for as long.

    If settings differ in a folder, their rows say so, and gains are over the same settings.
    """
    monkeypatch.chdir(tmp_path)
    soft = {"feedback": "SM k=1", "FT run": "sm"}
    for i, (score, changes) in enumerate((
            (20.0, {}), (30.0, {}), (22.0, soft), (32.0, soft), (40.0, soft | {"FT run": "sm2"}),
            (50.0, {"FT": "-"}), (44.0, soft | {"FT": "2 epochs"}), (None, {"budget": "1/1"}))):
        group = {"block": 16, "threshold": None, "budget": "1/4", "model": "Dream", "data": "d1",
                 "FT": "1 epochs", "feedback": "binary"}
        append_jsonl(f"{i}.json", {"column": "MBPP", "score": score, "tokens": 30, "seconds": 2,
                                   "group": group | changes})
    cells = [line[2:-2].split(" | ") for line in plot.benchmarks(".").splitlines()]
    assert [row[3:] for row in cells[2:]] == [
        ["binary", "50.0"], ["binary", "25.0 ± 7.1"], ["SM k=1", "27.0 ± 7.1"], ["gain", "+2.0"],
        ["SM k=1", "40.0"], ["gain", "+15.0"], ["SM k=1", "44.0"], ["gain", "+19.0"]]
    for limit, share in (5, 1), (0, 0.5):
        for feedback, score in ("binary", 60.0), ("SM k=1", 66.0):
            append_jsonl(f"few/{limit}-{feedback}.json", {
                "column": "MBPP", "score": share * score, "tokens": 9, "seconds": 1,
                "group": group | {"limit": limit, "feedback": feedback}})
    cells = [line[2:-2].split(" | ") for line in plot.benchmarks("few").splitlines()]
    assert [row[3:] for row in cells[2:]] == [
        ["binary, limit=0", "30.0"], ["binary, limit=5", "60.0"], ["SM k=1, limit=0", "33.0"],
        ["gain", "+3.0"], ["SM k=1, limit=5", "66.0"], ["gain", "+6.0"]]
    pytest.importorskip("matplotlib")
    for seed, omega_s in (1, 0.1), (2, 0.3):
        append_jsonl(f"sm-{seed}/log.jsonl", {"step": 5, "loss": 1.5, "omega_s": omega_s},
                     {"step": 10, "val_soft": 2.0, "val_plain": 2.2})
    assert len(plot.throughput("few").axes[0].lines) == 4
    panels = (*plot.throughput(".").axes, *plot.MAKERS["runs"]("*/log.jsonl").axes)
    assert [ax.lines[0].get_xydata().tolist() for ax in panels] == [
        [[15, 50]], [[5, 1.5]], [[10, 2.0]], [[5, pytest.approx(0.2)]]]
    start("plot", "--learned=*/log.jsonl")
    assert (tmp_path / "plot.png").exists()
