"""bench.py: what it reports is what happened, and every part runs; no test looks at a clock."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

import bench
import plot
from bench import PARTS, PRESETS, Config, interleaved, main, peak
from launch import Refused
from train import flops_per_token

QUICK = PRESETS["quick"] | dict(device="cpu")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def test_cases_take_turns_and_ratios_are_within_a_turn(monkeypatch):
    """A machine that is three times as slow in every other turn changes no ratio."""
    now, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: 2 * now[0])

    def case(name, seconds):
        calls.append(name)
        now[0] += seconds * (3 if (len(calls) - 1) // 2 % 2 else 1)
    found = interleaved({"a": lambda: case("a", 1.0), "b": lambda: case("b", 1.5)}, 4, torch.device("cpu"))
    assert calls == ["a", "b"] * 5  # the first two do not count
    assert found["a"]["ratio"] == 1 and found["b"]["ratio"] == pytest.approx(1.5)
    assert found["a"]["seconds"] == pytest.approx(2.0) and found["a"]["cpu"] == pytest.approx(4.0)



def test_peak_memory_is_what_was_held_at_once():
    before, most = peak(bench.three_updates, Config(**QUICK), torch.device("cpu"), None, True)
    assert 0 < before < most
    assert before < 1.5e9  # of a fresh process, whatever this one has held


def test_an_update_is_the_one_of_train():
    """All parameters move, ω with them, in an SM update; the loss is finite."""
    cfg = Config(**QUICK)
    step, model = bench.training(cfg, torch.device("cpu"), None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(True), step(True)
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if not name.startswith("net.sigma_map")]  # without time conditioning σ is 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_hours_are_tokens_by_rate(capsys):
    """One device at the paper's size and one second an update of 32 × 1024: 16 s an update, 1M of them."""
    row = {"seconds": 1.0}
    rows = bench.hours(bench.ModelConfig(), 32, row, {"seconds": 2.0})
    assert rows["from scratch, binary"]["1 device"] == pytest.approx(1e6 * 16 / 3600)
    assert rows["continuation, SM 0.8"]["8 devices"] == pytest.approx(1e5 * 16 * 1.8 / 8 / 3600)


def test_flops_are_those_of_the_matrices():
    from torch.utils.flop_counter import FlopCounterMode
    cfg = Config(**QUICK)
    model = bench.build(cfg, torch.device("cpu"), dropout=0.0)
    emb, L = model.net.table[torch.zeros(2, cfg.length, dtype=torch.long)].detach(), cfg.length
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        h = model.net.trunk(emb, torch.full((2,), 0.5))
        model.net.head(h.flatten(0, 1)[:L])  # half of the rows
    assert flops_per_token(model.cfg, 0) / 3 * 2 * L == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_every_part_runs_and_lands_in_the_json(tmp_path):
    out = tmp_path / "bench.json"
    parts = [part for part in PARTS if part not in ("memory", "vocabulary")]  # they have tests of their own
    main(Config(**QUICK, parts=",".join(parts), json=str(out)))
    found = json.loads(out.read_text())
    assert set(found) == {"machine", "settings", *parts}
    train = found["train"]
    expected = train["SM, p_sm = 0.8 (expected)"]
    assert expected["seconds"] == pytest.approx(0.2 * train["binary"]["seconds"] + 0.8 * train["SM, p_sm = 1"]["seconds"])
    assert [p["x"] for p in found["curves"]["update over L"]] == [8, 16, 32, 64]
    assert [p["x"] for p in found["curves"]["update over k"]] == [1, 3, 10, "|V|"]


@pytest.mark.parametrize("how, message", [
    (dict(parts="train,speed"), "none of train"), (dict(parts="scaling"), "under torchrun"),
    (dict(repeats=0), "repeats=0"), (dict(length=2), "length=2")])
def test_bad_input_is_refused(how, message):
    with pytest.raises(Refused, match=message):
        main(Config(**QUICK | how))


def test_scaling_runs_on_two_processes(tmp_path):
    out = tmp_path / "scaling.json"
    flags = [f"--{name}={value}" for name, value in QUICK.items()]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "bench.py", "scaling", *flags,
                    f"--json={out}"], cwd=ROOT, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = json.loads(out.read_text())["scaling"]
    assert list(rows) == ["1 process, batch 2", "strong: 2 × 1", "weak: 2 × 2"]


@pytest.mark.parametrize("text", [None, "no json", "[]", '{"train": {}}'])
def test_plot_refuses_files_without_curves(tmp_path, text):
    path = tmp_path / "bench.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refused, match="has no curves"):
        plot.curves(path)
