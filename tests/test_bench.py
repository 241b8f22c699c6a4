"""bench.py: every case runs, and its report is right. No test depends on a clock."""

import collections
import os
import re
import subprocess
from dataclasses import replace

import pytest

import bench
from conftest import ROOT, configure, dying, refused, spy
from launch import read_json, read_jsonl
from softmask import SoftMask
from test_readme import page


def test_every_case_lands_in_the_json_and_is_measured_once(tmp_path, monkeypatch):
    cfg = bench.Config(**bench.PRESETS["quick"], device="cpu", json=f"{tmp_path}/bench.json")
    with dying(bench, "decoding_rows", 1):
        bench.main(cfg)
    before = read_json(cfg.json)
    monkeypatch.setattr(bench, "train_rows", None)  # not called again
    found = bench.main(cfg)
    assert before.items() <= found.items() == read_json(cfg.json).items()
    binary, soft, expected = found["train"].values()
    assert expected["seconds"] == pytest.approx(0.2 * binary["seconds"] + 0.8 * soft["seconds"])
    assert all(32 / 9 <= row["tokens/pass"] <= 32 for row in found["sample"].values())
    assert found["dream, decoding"]["SM, at once"]["tokens/pass"] == 2  # half as many steps
    refused("another machine", bench.main, replace(cfg, batch=3))


def test_reports_are_medians_of_turns_and_only_sm_has_feedback(monkeypatch):
    """Pretends that a call with feedback takes 2, 3 and 7 seconds, one without a sixth of that."""
    mixes, turns = spy(monkeypatch, SoftMask, "mix"), collections.Counter()

    def timed(fn, device):
        mixes.clear()
        fn()
        turns[fn] += 1
        seconds = (0, 99, 2, 3, 7)[turns[fn]] / (1 if mixes else 6)
        return {"seconds": seconds, "cpu": 2 * seconds}
    monkeypatch.setattr(bench, "timed", timed)
    cfg = bench.Config(**bench.PRESETS["quick"] | {"repeats": 3}, device="cpu", compile=False)
    found = bench.main(cfg)
    tokens = {"train": 2 * 32, "sample": 32, "dream, finetuning": 32, "dream, decoding": 16}
    for part, rows in found.items():
        for name, row in rows.items() if part in tokens else ():
            seconds = 2.5 if "expected" in name else 3 if name[:2] == "SM" else 0.5
            assert row["seconds"] == pytest.approx(seconds), (part, name)
            assert row["ratio"] == row["cpu ratio"] == pytest.approx(seconds / 0.5)
            assert row["tokens/s"] == pytest.approx(tokens[part] / seconds)
            if "passes/s" in row:
                assert row["passes/s"] * row["tokens/pass"] == pytest.approx(row["tokens/s"])


def test_a_comparison_that_fails_is_not_kept(tmp_path):
    """A stand-in for Python that fails with the tests, and in the comparison of DDP"""
    stand_in, out = tmp_path / "python", tmp_path / "out"
    stand_in.write_text('#!/bin/sh\ncase "$*" in *pytest*|"- $WORK") exit 1;; esac\n')
    stand_in.chmod(0o755)
    env = os.environ | {"PYTHON": stand_in, "WORK": tmp_path / "work", "OUT": out, "SIZE": "toy"}
    for block in "first", "ddp", "tests":
        done = subprocess.run(["bash", f"{ROOT}/lab/gpu.sh", block], capture_output=True, env=env)
        assert done.returncode == 1, block
    assert os.listdir(out) == ["gpu.log"]


def test_gpu_sh_gives_flags_that_exist(tmp_path):
    """A stand-in for Python records the commands."""
    stand_in, kept = tmp_path / "python", tmp_path / "commands"
    stand_in.write_text(f"#!/bin/sh\n[ \"$1\" != - ] || echo 9\nprintf '%s\\n' \"$*\" >> {kept}\n")
    stand_in.chmod(0o755)
    env = os.environ | {"PYTHON": stand_in, "WORK": tmp_path / "work", "TEXT": tmp_path}
    for size, *blocks in ["toy"], ["toy", "first"], ["gpu"], ["gpu", "first"]:
        subprocess.run(["bash", f"{ROOT}/lab/gpu.sh", *blocks], capture_output=True,
                       env=env | {"OUT": tmp_path / size, "SIZE": size})
    scripts = re.findall(r"^(?:\S*/)?(\w+)\.py (.*)", kept.read_text(), re.M)
    for name, words in scripts:
        configure({"ddp": "train"}.get(name, name), words.split())
    assert len(scripts) == 62


def test_the_pages_have_the_recorded_times():
    folder = os.path.join(ROOT, "results", "bench")
    h100, cpu, dream = (read_json(f"{folder}/{name}.json")
                        for name in ("h100-112e5e7", "cpu", "dream"))
    updates = []
    for code in "bench", "authors":
        for side in "binary", "SM, p_sm = 1":
            updates.append(f"{1000 * h100['training'][code][side]['seconds']:.0f}")
    assert "| {} ms | {} ms | {} ms | {} ms |\n".format(*updates) in page("README.md")

    cells = [f"{a} | {b} | {int(b) / int(a):.1f}" for a, b in (updates[:2], updates[2:])]
    for step in h100["sampling, ms a step"].values():
        ratio = step["SM"] / step["binary"]
        cells.append(f"{round(step['binary'], 2)} | {round(step['SM'], 2)} | {ratio:.1f}")
    for batch, digits in (1, 3), (8, 2):
        calls = [cpu["sample"][f"{side}, batch {batch}"]["cpu"] for side in ("binary", "SM")]
        cells.append(" | ".join(f"{call / cpu['settings']['steps']:.{digits}f}" for call in calls))
    [decoding] = [h100[name] for name in h100 if name.startswith("Dream, decoding")]
    for rate in decoding.values():
        ratio = rate["binary"] / rate["SM"]
        cells.append(f"{rate['binary']} | {rate['SM']} | {ratio:.1f}")
    for table, digits, names in (
            (cpu["train"], 2, ("binary", "SM, p_sm = 0.8 (expected)")),
            (dream["dream"]["finetuning"], 3, ("binary, all kept", "SM, all kept")),
            (dream["dream"]["decoding"], 2, ("binary, at once", "SM, at once")),
            (dream["dream"]["decoding"], 2, ("binary, blocks, dual", "SM, blocks, dual"))):
        cells.append(" | ".join(f"{table[name]['cpu']:.{digits}f}" for name in names))
    for name in "arena2", "arena_text":
        first = read_jsonl(f"{folder}/../{name}.jsonl")[0]
        cells.append(f"{first['seconds']['binary']:.3f} | {first['seconds']['sm']:.3f}")
    assert len(cells) == 19
    assert all(f" | {pair} |" in page("results/bench/README.md") for pair in cells)
