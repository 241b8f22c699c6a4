# SPDX-License-Identifier: MIT
"""bench.py: what it reports is what happened, and every part runs. No test looks at a clock."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench
from bench import PRESETS, Config, interleaved, main, peak
from conftest import ROOT, configure, refused, torchrun
from data import rng
from mdlm import MDLM, corrupt
from train import flops_per_token

CPU = torch.device("cpu")
QUICK = PRESETS["quick"] | dict(device="cpu")


# measuring ---------------------------------------------------------------------------------------


def test_cases_take_turns_and_ratios_are_within_a_turn(monkeypatch):
    """A machine that is three times as slow in every other turn changes no ratio."""
    now, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: 2 * now[0])

    def case(name, seconds):
        calls.append(name)
        now[0] += seconds * (3 if (len(calls) - 1) // 2 % 2 else 1)

    found = interleaved({"a": lambda: case("a", 1.0), "b": lambda: case("b", 1.5)}, 4, CPU)
    assert calls == ["a", "b"] * 5  # the first two do not count
    assert found["a"] == {"seconds": 2.0, "cpu": 4.0, "ratio": 1.0}
    assert found["b"]["ratio"] == pytest.approx(1.5)


def end_abruptly(cfg, device):
    os._exit(3)


def test_peak_memory_is_what_a_fresh_process_held_at_once():
    found = peak(bench.three_updates, Config(**QUICK), CPU, None, True)
    assert 0 < found["before GB"] < min(found["peak GB"], 1.5)  # whatever this one has held
    refused("memory was not measured", peak, end_abruptly, None, CPU)


# what is measured --------------------------------------------------------------------------------


def test_hours_are_tokens_by_rate(capsys):
    """At the paper's size, a second for 32 × 1024 tokens is 16 s for an update, and 1M of them."""
    rows = bench.hours(bench.ModelConfig(), 32, {"seconds": 1.0}, {"seconds": 2.0})
    assert rows["from scratch, binary"]["1 device"] == pytest.approx(1e6 * 16 / 3600)
    hours = rows["continuation, SM 0.8"]["8 devices"]
    assert hours == pytest.approx(1e5 * 16 * 1.8 / 8 / 3600)


def test_flops_are_those_of_the_matrices():
    cfg = Config(**QUICK)
    model, L = bench.build(replace(cfg, dropout=0.0, n_cond=8), CPU), cfg.length
    assert model.cfg.n_cond == 8
    emb = model.net.table[torch.zeros(2, L, dtype=torch.long)].detach()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        h = model.net.trunk(emb, torch.full((2,), 0.5))
        model.net.head(h.flatten(0, 1)[:L])  # half of the rows
    found = counter.get_total_flops()
    assert flops_per_token(model.cfg, 0) / 3 * 2 * L == pytest.approx(found, rel=0.1)


def test_dream_has_its_real_size():
    """7.6 billion parameters, as many as the released Dream-7B. Counted, not allocated."""
    cfg = Config(**PRESETS["gpu"])
    dream, _ = bench.build_dream(cfg, torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in dream.parameters()) == 7_615_616_512


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: would check the same on it"))])
def test_cuda_and_cpu_compile_once_whatever_the_number_of_masks(device, monkeypatch):
    """One graph, and 25 updates make no other. Names in checkpoints stay."""
    if device == "cpu":  # C++ takes two minutes to build; the graphs are the same without it
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters, cfg = torch._dynamo.utils.counters, replace(Config(**QUICK), compile=True)
    device, graphs, breaks = torch.device(device), counters["stats"], counters["graph_break"]
    names = list(bench.build(cfg, CPU).state_dict())
    breaks.clear()
    step, model = bench.training(cfg, device, None)
    step(False)
    step(True)
    warm, sizes = graphs["unique_graphs"], set()
    x0 = torch.zeros(cfg.batch, cfg.length, dtype=torch.long)
    for i in range(25):
        t = torch.full((cfg.batch,), (i + 1) / 25)
        xt = corrupt(x0, t, model.mask_id, rng(i))
        sizes.add((xt == model.mask_id).sum().item())
        step(i % 5 > 0, xt.to(device))
    assert warm > 0 and len(sizes) > 10
    assert graphs["unique_graphs"] == warm and not breaks and list(model.state_dict()) == names


def test_marks_change_nothing_and_go_away():
    """The sections of an SM update follow Alg. 1; weights and methods are as without them.

    The update is that of train.py: all parameters move, ω with them.
    """
    (step, model), (other, plain) = (bench.training(Config(**QUICK), CPU, None) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    methods = lambda: (model.net.trunk, model.feedback, model.cross_entropy, model.sm.forward,
                       model.sm.mix)
    unmarked = methods()
    torch.manual_seed(3)
    other(True)
    other(True)
    torch.manual_seed(3)
    step(True)
    seconds = bench.sections_of(lambda mark: step(True, mark=mark), model, "the rest", CPU)
    made = ("trunk", "SM: head", "head and loss")
    parts = {f"{name}, backward" for name in made} | {"SM: λ, top k", "SM: look-up"}
    assert set(seconds) == {"the rest", "clip, optimizer, EMA", *made, *parts}
    assert methods() == unmarked
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(p, q) and p.isfinite().all()
        # Without time conditioning σ is 0, and the layer that embeds it has no gradient.
        assert not torch.equal(p, before[name]) or name.startswith("net.sigma_map"), name


# the commands ------------------------------------------------------------------------------------


def test_every_part_runs_and_lands_in_the_json(tmp_path):
    out = tmp_path / "bench.json"
    parts = ["train", "sample", "curves", "overhead", "profile", "attention", "dream", "against"]
    main(Config(**QUICK, parts=",".join(parts), against=ROOT, json=str(out)))
    found = json.loads(out.read_text())
    assert set(found) == {"machine", "settings", *parts}
    seconds = {name: row["seconds"] for name, row in found["train"].items() if "SM" in name}
    expected = 0.2 * found["train"]["binary"]["seconds"] + 0.8 * seconds["SM, p_sm = 1"]
    assert seconds["SM, p_sm = 0.8 (expected)"] == pytest.approx(expected)
    assert [p["x"] for p in found["curves"]["update over L"]] == [8, 16, 32, 64]
    assert [p["x"] for p in found["curves"]["update over k"]] == [1, 3, 10, "|V|"]
    assert {len(rows) for rows in found["dream"].values()} == {4, 6}
    common = {"the rest", "trunk", "draw: head, nucleus, token"}
    for name, more in ("binary", set()), ("SM", {"SM: head", "SM: λ, top k", "SM: look-up"}):
        row = found["overhead"][name]
        assert row["s/call"] == pytest.approx(row["seconds"] / row["calls"]) and row["calls"] <= 9
        assert set(row["sections"]) == common | more
    assert set(found["against"]) == {f"{kind}, {how}" for kind in ("update", "sample")
                                     for how in ("binary", "SM")} | {"commit"}
    assert sys.modules["mdlm"].MDLM is MDLM  # the modules of the other checkout are away again
    for case in found["profile"].values():
        assert sum(row["%"] for row in case["sections"].values()) == pytest.approx(100)


def test_vocabulary_work_is_a_soft_update():
    """Gradients reach ω. The part takes 2,048 tokens and a GB; here it takes three tokens."""
    model = bench.vocabulary_work(None, CPU, 1, 3)
    assert all(p.grad is not None and p.grad.isfinite() for p in model.sm.parameters())
    assert model.sm.raw_s.grad != 0


def test_bad_input_is_refused(tmp_path):
    (tmp_path / "bench.py").write_text("def build(cfg, device): pass\n")
    refused("has no sampling and no training: check out a later", main,
            Config(**QUICK, parts="against", against=str(tmp_path)))
    for how, message in ((dict(parts="train,speed"), "none of train"),
                         (dict(parts="scaling"), "under torchrun"),
                         (dict(parts="against", against="nowhere"), "--against=nowhere"),
                         (dict(repeats=0), "repeats=0"), (dict(length=2), "length=2")):
        refused(message, main, Config(**QUICK | how))


def test_scaling_runs_on_two_processes(tmp_path):
    out = tmp_path / "scaling.json"
    flags = [f"--{name}={value}" for name, value in QUICK.items()]
    torchrun("lab/bench.py", "scaling", *flags, f"--json={out}", check=True)
    rows = json.loads(out.read_text())["scaling"]
    assert list(rows) == ["1 process, batch 2", "strong: 2 × 1", "weak: 2 × 2"]


# results/gpu.sh ----------------------------------------------------------------------------------


STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> commands
for word; do
    case $word in
        --json=* | --out=*.json | --out=*.jsonl) echo > "${word#*=}" ;;
        --out_dir=*) mkdir -p "${word#*=}" && echo > "${word#*=}/log.jsonl" ;;
    esac
done
"""


def test_gpu_sh_gives_flags_that_exist_and_repeats_no_block(tmp_path):
    """A stand-in for Python keeps the commands."""
    stand_in, kept = tmp_path / "python", tmp_path / "commands"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    (tmp_path / "results").mkdir()
    shutil.copy(os.path.join(ROOT, "results", "gpu.sh"), tmp_path / "results")
    own = {"PYTHON": str(stand_in), "TEXT": "stdlib", "WORK": "work"}
    for size in "toy", "gpu":
        env = os.environ | own | {"SIZE": size, "OUT": str(tmp_path / size)}
        for again in False, True:
            kept.write_text("")
            subprocess.run(["bash", "results/gpu.sh"], cwd=tmp_path, check=True,
                           capture_output=True, env=env)
            commands = [line.split() for line in kept.read_text().splitlines()]
            assert len(commands) == 0 if again else len(commands) > 10
            for script, *words in commands:
                if script != "-m":  # pytest
                    configure(os.path.basename(script).removesuffix(".py"), words)


def test_gpu_sh_runs_every_test_that_needs_cuda():
    """Its -k names them all, so that none is left out because of its name."""
    words = re.search(r'-k "(.*?)"', Path(ROOT, "results", "gpu.sh").read_text())[1].split(" or ")
    names = []
    for file in Path(ROOT, "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            marks = " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))
            if "skipif(not torch.cuda" in marks:
                names.append(node.name)
    assert len(names) > 3
    assert not [name for name in names if not any(word in name for word in words)]
