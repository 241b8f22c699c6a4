"""train.py: Alg. 1's loop, and the promises of its randomness: one run, however it is cut into devices, stops and saves."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import checkpoint
import data
import train as script
from checkpoint import Refused
from mdlm import MDLM
from train import Config, flops_per_token, lr_at, train, update_ema

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def prepared(folder):
    data.prepare(data.documents(sorted(folder.glob("*.txt"), reverse=True)), str(folder), data.tokenizer("bytes"), val_docs=1)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small prepared folder of bytes, in data.py's format."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}, {i * i} is its square. " for i in range(600))
    (folder / "text.txt").write_text(text)
    (folder / "more.txt").write_text(text[:4000])
    return prepared(folder)


@pytest.fixture
def tiny(corpus, tmp_path):
    return Config(data=corpus, out_dir=str(tmp_path / "run"), n_layer=2, n_head=2, n_embd=32, n_cond=16, length=32, steps=6,
                  batch_size=8, micro_batch=4, warmup=2, log_every=1, eval_every=0, keep_every=0, save_every=3, device="cpu",
                  omega_s=0.5, omega_a=1.0, omega_b=-4.0, dropout=0.1)


def weights(folder):
    ckpt = checkpoint.load(os.path.join(folder, "last.pt"))
    return {**ckpt["model"], **{"ema." + k: v for k, v in ckpt["ema"].items()}}


def log(folder):
    return [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]


def command(cfg, *more, processes=1):
    """The command line that makes this configuration."""
    flags = [f"--{k}={v}" for k, v in vars(cfg).items() if v != getattr(Config(), k)]
    runner = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *runner, os.path.join(ROOT, "train.py"), *flags, *more]


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


# ---- the pieces


def test_warm_up_starts_at_zero_and_then_stays():
    cfg = Config(warmup=2500)
    assert [lr_at(s, cfg) for s in (0, 1250, 2500, 10**6)] == [0, 0.5, 1, 1]
    assert lr_at(0, Config(warmup=0)) == 0 and lr_at(1, Config(warmup=0)) == 1


def test_ema_warms_up():
    ema, model = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    shadow = ema.weight.item()
    for n, w in enumerate((1.0, -2.0, 5.0), start=1):
        model.weight.data.fill_(w)
        update_ema(ema, model, n)
        d = min(0.9999, (1 + n) / (10 + n))
        shadow = d * shadow + (1 - d) * w
        assert ema.weight.item() == pytest.approx(shadow)
    update_ema(ema, model, 10**9)
    assert ema.weight.item() == pytest.approx(0.9999 * shadow + 0.0001 * 5.0)


def test_flops_of_the_paper_s_model():
    """Twice the matrix parameters a token meets, and attention; the head on half of the rows; three passes, 3.8 with SM."""
    cfg = Config()
    matmuls = 12 * (3 + 1 + 8) * 768**2 + 50258 * 768 / 2 + 12 * 2 * 1024 * 768
    assert flops_per_token(cfg, 0) == pytest.approx(2 * matmuls * 3)
    assert flops_per_token(cfg, 0.8) == pytest.approx(2 * matmuls * 3.8)


# ---- the run


def test_everything_learns_and_is_logged(tiny):
    model, ema = train(replace(tiny, steps=60, log_every=20, save_every=60, eta_bb=3e-3))
    lines = log(tiny.out_dir)
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert {"step", "loss", "lr", "grad_norm", "omega_s", "omega_a", "omega_b", "lam", "tokens_per_s"} <= lines[0].keys()
    assert lines[-1]["omega_s"] != pytest.approx(0.5, abs=1e-3) and lines[-1]["lam"] > 0.01  # ω moves, SM is on
    start = MDLM(model.cfg)
    torch.manual_seed(tiny.seed)
    start = MDLM(model.cfg)
    assert all(not torch.equal(a, b) for a, b in zip(start.parameters(), model.parameters()))
    assert ema.sm is model.sm and not torch.equal(ema.net.table, model.net.table)


def test_loss_is_the_sum_over_masks_by_all_tokens(tiny):
    """The first logged loss, computed again from the generators alone."""
    cfg = replace(tiny, steps=1, dropout=0.0)
    train(cfg)
    tokens = data.open_split(cfg.data, "train")[0]
    order = data.order(data.n_rows(tokens, 32), 0, cfg.seed)[:8]
    torch.manual_seed(cfg.seed)
    model = MDLM(replace(cfg, vocab_size=259, mask_id=258))
    t = script.sample_times(8, script.rng(cfg.seed, "t", 0), cfg.b_l, cfg.b_h)
    total = 0.0
    for j in (0, 1):
        x0 = data.rows(tokens, order[j::2], 32)
        xt = script.corrupt(x0, t[j::2], 258, script.rng(cfg.seed, "q", 0, j))
        total += model(x0, xt, t[j::2], soft=True).sum().item()
    assert log(cfg.out_dir)[0]["loss"] == pytest.approx(total / (8 * 32), rel=1e-5)


def test_p_sm_one_is_always_soft_and_zero_is_a_binary_model(tiny):
    model, _ = train(replace(tiny, p_sm=0.0, steps=2))
    assert model.sm is None and not any(k.startswith("sm.") for k in weights(tiny.out_dir))
    lams = []
    for p_sm in (1.0, 0.5):
        out = tiny.out_dir + str(p_sm)
        train(replace(tiny, p_sm=p_sm, steps=12, out_dir=out))
        lams.append([line["lam"] > 0 for line in log(out)])
    assert all(lams[0]) and any(lams[1]) and not all(lams[1])


def test_omega_rests_in_a_step_without_sm(tiny):
    """A zero gradient would still move it, by Adam's momentum. The log has one line per update; the head's zero start and
    the zero first learning rate leave ω without a gradient in the first two."""
    train(replace(tiny, p_sm=0.5, steps=16))
    lines = log(tiny.out_dir)[2:]
    assert {line["lam"] > 0 for line in lines[1:]} == {True, False}
    moved = [a["omega_s"] != b["omega_s"] for a, b in zip(lines, lines[1:])]
    assert moved == [line["lam"] > 0 for line in lines[1:]]


def test_two_ranks_equal_one(tiny):
    """1 process × 4 micro-batches is 2 × 2: the same losses, and both ranks end with the same bits."""
    cfg = replace(tiny, micro_batch=2, p_sm=0.5, eval_every=6, eval_rows=4)
    train(cfg)
    two = replace(cfg, out_dir=cfg.out_dir + "2")
    subprocess.run(command(two, processes=2), cwd=ROOT, env=ENV, check=True)
    for a, b in zip(log(cfg.out_dir), log(two.out_dir), strict=True):
        for name in ("loss", "ce_per_mask", "grad_norm", "omega_s", "lam"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name
    assert log(cfg.out_dir)[-1]["val_soft"] == pytest.approx(log(two.out_dir)[-1]["val_soft"], rel=1e-5)
    for name, tensor in weights(cfg.out_dir).items():
        torch.testing.assert_close(tensor, weights(two.out_dir)[name], rtol=1e-4, atol=1e-5)


def test_ranks_end_bitwise_equal(tiny, tmp_path):
    """Each rank writes what it holds; the coin, the clip and the buckets gave all of them the same bits."""
    probe = tmp_path / "probe.py"
    probe.write_text(f"import os, sys, torch\nsys.path.insert(0, {ROOT!r})\nfrom train import *\n"
                     f"model, ema = train(Config(**{vars(replace(tiny, micro_batch=2, p_sm=0.5))!r}))\n"
                     f"torch.save(model.state_dict(), {str(tmp_path)!r} + '/rank' + os.environ['RANK'])\n")
    run = command(tiny, processes=2)
    run[run.index(os.path.join(ROOT, "train.py")):] = [str(probe)]
    subprocess.run(run, cwd=ROOT, env=ENV, check=True, capture_output=True)
    a, b = (torch.load(tmp_path / f"rank{r}", weights_only=True) for r in (0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- stopping and going on


def test_resume_is_the_uninterrupted_run_bit_for_bit(tiny):
    """With p_sm, dropout, an epoch boundary and a log cut at the checkpoint."""
    whole, cut = replace(tiny, steps=8, p_sm=0.5), replace(tiny, steps=8, p_sm=0.5, out_dir=tiny.out_dir + "-cut")
    train(whole)
    train(replace(cut, steps=5, save_every=3))
    with open(os.path.join(cut.out_dir, "log.jsonl"), "a") as f:
        f.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')  # updates after the last save, and a line cut by a kill
    train(replace(cut, resume=True))
    a, b = weights(whole.out_dir), weights(cut.out_dir)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [line["loss"] for line in log(whole.out_dir)] == [line["loss"] for line in log(cut.out_dir)]


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_from_outside(tiny, sig):
    """SIGTERM saves the update it is in. SIGKILL, in the middle of anything, a save too, leaves the last good file."""
    cfg = replace(tiny, steps=300, save_every=1)
    process = subprocess.Popen(command(cfg), cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    path = os.path.join(cfg.out_dir, "last.pt")
    while not os.path.exists(path):
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(sig)
    output = process.communicate(timeout=60)[0]
    step = checkpoint.load(path)["step"]
    assert 0 < step < 300
    if sig == signal.SIGTERM:
        assert process.returncode == 128 + sig and f"stopped after update {step}" in output and "--resume" in output
    train(replace(cfg, resume=True, steps=step + 2))
    straight = replace(cfg, steps=step + 2, out_dir=cfg.out_dir + "-straight", save_every=1000)
    train(straight)
    a, b = weights(cfg.out_dir), weights(straight.out_dir)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [line["step"] for line in log(cfg.out_dir)] == list(range(1, step + 3))  # no line twice, none missing


def test_no_row_twice_in_an_epoch(tiny, monkeypatch):
    seen = []
    rows = data.rows
    monkeypatch.setattr(data, "rows", lambda tokens, index, L: (seen.extend(map(int, index)), rows(tokens, index, L))[1])
    n = data.n_rows(data.open_split(tiny.data, "train")[0], tiny.length)
    train(replace(tiny, steps=n // 4, batch_size=4, log_every=1000))
    assert len(seen) <= n and len(set(seen)) == len(seen)


def test_continuation_starts_from_the_weights_and_a_fresh_omega(tiny):
    binary, _ = train(replace(tiny, p_sm=0.0))
    soft, _ = train(replace(tiny, init_from=os.path.join(tiny.out_dir, "last.pt"), out_dir=tiny.out_dir + "-sm", steps=1, warmup=100))
    assert all(torch.equal(a, b) for a, b in zip(binary.net.parameters(), soft.net.parameters()))  # the first update has lr 0
    assert soft.sm.omega[0].item() == pytest.approx(0.5, rel=1e-4)


def test_step_file_holds_what_evaluation_wants(tiny):
    model, ema = train(replace(tiny, keep_every=3))
    assert sorted(f for f in os.listdir(tiny.out_dir)) == ["last.pt", "log.jsonl", "step-3.pt", "step-6.pt"]
    kept, last = MDLM.load(os.path.join(tiny.out_dir, "step-6.pt")), MDLM.load(os.path.join(tiny.out_dir, "last.pt"))
    for loaded in (kept, last):
        assert torch.equal(loaded.net.table, ema.net.table) and torch.equal(loaded.sm.raw_s, model.sm.raw_s)
    assert torch.equal(MDLM.load(os.path.join(tiny.out_dir, "last.pt"), ema=False).net.table, model.net.table)
    assert last.info["tokenizer"]["name"] == "bytes" and last.info["step"] == 6


# ---- bad input


@pytest.mark.parametrize("change, message", [
    (dict(steps=0), "--steps=0"), (dict(p_sm=1.5), "--p_sm=1.5"), (dict(b_l=0.0), "--b_l=0.0"), (dict(b_h=1.5), "--b_h=1.5"),
    (dict(k=1000), "--k=1000"), (dict(batch_size=6), "--batch_size=6 is not a multiple of --micro_batch=4"),
    (dict(batch_size=2), "--batch_size=2 is not a multiple"), (dict(device="cuda"), "--device=cuda for local process 0"),
    (dict(device="tpu"), "--device=tpu for local process 0, but this machine has 0"), (dict(dtype="int8"), "--dtype=int8"), (dict(data="nowhere"), "nowhere"),
    (dict(resume=True), "no checkpoint at"), (dict(init_from="nowhere.pt"), "no checkpoint at nowhere.pt"),
    (dict(length=10**6), "tokens do not fill one row")])
def test_bad_values_are_refused(tiny, change, message):
    if change.get("device") == "cuda" and torch.cuda.is_available():
        change = dict(device="cuda:77")
    with pytest.raises(Refused, match=message):
        train(replace(tiny, **change))
    assert not os.path.exists(tiny.out_dir)  # a wrong flag never starts a run


def test_a_run_is_not_overwritten_by_accident(tiny):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match="already holds a run: --resume"):
        train(tiny)
    train(replace(tiny, overwrite=True, steps=2))
    assert [line["step"] for line in log(tiny.out_dir)] == [1, 2]


def test_resume_with_other_fields_or_data_is_refused(tiny, corpus, tmp_path):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match=r"n_layer \(2 there, 1 here\), seed \(1 there, 2 here\)"):
        train(replace(tiny, resume=True, n_layer=1, seed=2))
    (tmp_path / "a.txt").write_text("other text " * 500)
    (tmp_path / "b.txt").write_text("held out " * 50)
    with pytest.raises(Refused, match="the data differ"):
        train(replace(tiny, resume=True, data=prepared(tmp_path)))


def test_weights_of_another_size_are_refused(tiny):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match="another model than this configuration"):
        train(replace(tiny, out_dir=tiny.out_dir + "2", init_from=os.path.join(tiny.out_dir, "last.pt"), n_embd=64))
    with pytest.raises(Refused, match="another model than this configuration"):
        train(replace(tiny, out_dir=tiny.out_dir + "2", init_from=os.path.join(tiny.out_dir, "last.pt"), n_layer=3))


def test_float16_falls_back_in_a_sentence(tiny, capsys):
    train(replace(tiny, dtype="float16", steps=1))
    assert "using float32" in capsys.readouterr().out


def test_command_line_says_it_in_one_line():
    for flags in (["--no_such_field=1"], ["quickstrat"], ["--steps=many"], ["--steps=0", "--data=nowhere"]):
        done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, env=ENV, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("train.py: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: would check that a compiled bf16 step follows the fp32 one")
def test_compiled_bf16_step_on_the_gpu(tiny):
    train(replace(tiny, device="cuda", dtype="float32", compile=False))
    train(replace(tiny, device="cuda", dtype="bfloat16", compile=True, out_dir=tiny.out_dir + "16"))
    for a, b in zip(log(tiny.out_dir), log(tiny.out_dir + "16")):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
