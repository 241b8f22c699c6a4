"""bench.py: every case runs, and its report is right. No test depends on a clock."""

import os
import re
import subprocess
from dataclasses import replace

import pytest

import bench
from conftest import ROOT, configure, dying, refused
from launch import read_json


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
    assert all(32 / 9 <= row["tokens/call"] <= 32 for row in found["sample"].values())
    assert found["dream, decoding"]["SM, at once"]["tokens/call"] == 2  # half as many steps
    refused("another machine", bench.main, replace(cfg, batch=3))


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
