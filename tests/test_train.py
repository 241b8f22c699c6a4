"""train.py: Alg. 1's loop, and the promises of its randomness: one run, however it is cut into devices, stops and saves."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import checkpoint
import data
import train as script
from launch import Refused
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


def test_updates_are_alg1_with_adamw(tiny):
    """Six updates again, by hand: coin, times, masks, two passes, clip of the joint norm, AdamW with two rates, EMA of θ."""
    cfg = replace(tiny, steps=6, dropout=0.0, p_sm=0.5, b_l=0.1, b_h=0.9, clip=0.3, ema=0.15, eta_bb=2e-3, eta_sm=3e-2)
    model, ema = train(cfg)
    tokens = data.open_split(cfg.data, "train")[0]
    order = data.order(data.n_rows(tokens, 32), 0, cfg.seed)
    torch.manual_seed(cfg.seed)
    ours = MDLM(replace(cfg, vocab_size=259, mask_id=258))
    params = [(p, cfg.eta_sm if name.startswith("sm.") else cfg.eta_bb) for name, p in ours.named_parameters()]
    m, v, n = [torch.zeros_like(p) for p, _ in params], [torch.zeros_like(p) for p, _ in params], [0] * len(params)
    average = [p.detach().clone() for p in ours.net.parameters()]
    for step in range(6):
        soft = torch.rand((), generator=script.rng(cfg.seed, "p_sm", step)).item() < 0.5
        t = script.sample_times(8, script.rng(cfg.seed, "t", step), 0.1, 0.9)
        loss = 0
        for j in (0, 1):
            x0 = data.rows(tokens, order[8 * step:8 * step + 8][j::2], 32)
            xt = script.corrupt(x0, t[j::2], 258, script.rng(cfg.seed, "q", step, j))
            loss = loss + ours(x0, xt, t[j::2], soft).sum() / (8 * 32)
        grads = torch.autograd.grad(loss, [p for p, _ in params])
        used = [soft or lr == cfg.eta_bb for _, lr in params]
        norm = math.sqrt(sum(g.square().sum().item() for g, u in zip(grads, used) if u))
        for i, ((p, lr), g) in enumerate(zip(params, grads)):
            if used[i]:
                g, n[i] = g * min(1, 0.3 / (norm + 1e-6)), n[i] + 1
                m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
                step_size = lr * min(1, step / cfg.warmup) / (1 - 0.9 ** n[i])
                p.data -= step_size * m[i] / ((v[i] / (1 - 0.999 ** n[i])).sqrt() + 1e-8)
        d = min(0.15, (2 + step) / (11 + step))
        average = [d * a + (1 - d) * p.detach() for a, p in zip(average, ours.net.parameters())]
        assert log(cfg.out_dir)[step]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for (name, p), q in zip(model.named_parameters(), ours.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-5, msg=name)
    for p, q in zip(ema.net.parameters(), average):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-5)
    assert not torch.allclose(ema.net.table, model.net.table, atol=5e-5)


def test_every_gradient_is_there_under_bf16(tiny):
    """Pass 1 casts weights without a graph; pass 2 must not be handed those casts (older torch keeps them)."""
    model, _ = train(replace(tiny, dtype="bfloat16", steps=20, p_sm=1.0, eta_bb=1e-3))
    torch.manual_seed(tiny.seed)
    start = MDLM(model.cfg)
    still = [name for (name, a), b in zip(model.named_parameters(), start.parameters()) if torch.equal(a, b)]
    assert not still


@pytest.mark.parametrize("change", [dict(k=None), dict(k=None, two_updates=True), dict(k=1, time_conditioning=True)])
def test_ablations_train(tiny, change):
    """App. C.3 and §4.1 as runs: every parameter moves, the loss falls, nothing is not a number."""
    model, _ = train(replace(tiny, steps=40, log_every=20, eta_bb=3e-3, **change))
    lines = log(tiny.out_dir)
    assert lines[-1]["loss"] < lines[0]["loss"] and (model.cfg.k is None) == hasattr(model.sm, "raw_tau")
    torch.manual_seed(tiny.seed)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), MDLM(model.cfg).parameters()))


def test_evaluation_is_of_the_average_on_fixed_rows_and_masks(tiny):
    """The numbers of `eval.py ppl --rows=6`, whatever the seed of the run: seeds are compared on the same masks."""
    model, ema = train(replace(tiny, steps=4, eval_every=2, eval_rows=6, ema=0.5, eta_bb=3e-3, seed=5))
    val = data.open_split(tiny.data, "val")[0]
    n = data.n_rows(val, 32)
    rows = data.rows(val, torch.arange(6) * n // 6, 32)
    line = log(tiny.out_dir)[-1]
    for name, soft in (("val_soft", True), ("val_plain", False)):
        total, count = script.val_ppl(ema, rows, soft, script.EVAL_SEED)
        assert line[name] == pytest.approx(total / count, rel=1e-5)
        assert line[name] != pytest.approx(script.val_ppl(model, rows, soft, script.EVAL_SEED)[0] / count, rel=1e-5)
    assert [l["step"] for l in log(tiny.out_dir) if "val_soft" in l] == [2, 4]
    assert checkpoint.load(os.path.join(tiny.out_dir, "last.pt"))["metrics"]["val_soft"] == line["val_soft"]


def test_show_ends_with_bounds_omega_and_a_sample(tiny, capsys):
    train(replace(tiny, show=True, eval_rows=4))
    out = capsys.readouterr().out
    assert "with feedback" in out and "without" in out and "mean λ on these rows" in out and "100% " in out and "network calls" in out
    train(replace(tiny, show=True, eval_rows=4, p_sm=0.0, out_dir=tiny.out_dir + "-binary"))
    out = capsys.readouterr().out
    assert "with feedback" not in out and "without" in out and "network calls" in out


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
    """With p_sm, dropout, evaluations, an epoch boundary (63 rows of 350), and a log that went on after the checkpoint."""
    whole = replace(tiny, steps=8, p_sm=0.5, length=350, batch_size=12, eval_every=4, eval_rows=2)
    cut = replace(whole, out_dir=tiny.out_dir + "-cut")
    assert data.n_rows(data.open_split(tiny.data, "train")[0], 350) < 8 * 12
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
    env = ENV | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums are cut by threads: bits are those of as many
    process = subprocess.Popen(command(cfg), cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
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


def test_sigterm_to_two_ranks_saves_once_and_goes_on(tiny):
    """Sent to torchrun's whole group, as a scheduler does; torchrun passes it on to the ranks a second time."""
    cfg = replace(tiny, steps=3000, micro_batch=2, save_every=3000)
    process = subprocess.Popen(command(cfg, processes=2), cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, start_new_session=True)
    while '"step": 3' not in (open(path).read() if os.path.exists(path := os.path.join(cfg.out_dir, "log.jsonl")) else ""):
        time.sleep(0.05)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    step = checkpoint.load(os.path.join(cfg.out_dir, "last.pt"))["step"]
    assert 3 <= step < 3000 and output.count(f"stopped after update {step:,}") == 1
    assert sorted(os.listdir(cfg.out_dir)) == ["last.pt", "log.jsonl"]


def test_kill_in_the_middle_of_a_save_leaves_the_last_good_file(tiny, monkeypatch):
    """The save of update 4 dies between its bytes; so does the process. The file of update 2 is whole, and goes on."""
    cfg = replace(tiny, steps=8, save_every=2)
    probe = (f"import os, sys, torch\nsys.path.insert(0, {ROOT!r})\nfrom train import *\nwrite = torch.save\n"
             "def die(parts, path):\n    write(parts, path)\n    if parts['step'] == 4:\n        os.truncate(path, 1000)\n"
             f"        os.kill(os.getpid(), 9)\ntorch.save = die\ntrain(Config(**{vars(cfg)!r}))\n")
    assert subprocess.run([sys.executable, "-c", probe], env=ENV, capture_output=True).returncode == -9
    assert checkpoint.load(os.path.join(cfg.out_dir, "last.pt"))["step"] == 2
    train(replace(cfg, resume=True))
    train(replace(cfg, out_dir=cfg.out_dir + "-straight"))
    a, b = weights(cfg.out_dir), weights(cfg.out_dir + "-straight")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not [f for f in os.listdir(cfg.out_dir) if f.endswith(".tmp")]


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


def test_a_continuation_begins_with_the_bound_of_its_start(tiny):
    """Update 0 in the log, before anything is learned: it tells whether weights were read correctly."""
    train(replace(tiny, p_sm=0.0, steps=4, eval_every=4, eval_rows=4, ema=0.0))
    known = log(tiny.out_dir)[-1]["val_plain"]  # EMA 0 is the raw weights, where continuations start
    start = os.path.join(tiny.out_dir, "last.pt")
    cfg = replace(tiny, init_from=start, out_dir=tiny.out_dir + "-sm", eval_every=3, eval_rows=4)
    train(cfg)
    lines = log(cfg.out_dir)
    assert lines[0]["step"] == 0 and lines[0]["val_plain"] == pytest.approx(known, rel=1e-6)
    assert [line["step"] for line in lines if "val_soft" in line] == [0, 3, 6]
    train(replace(tiny, out_dir=tiny.out_dir + "-new", eval_every=3, eval_rows=4))
    assert log(tiny.out_dir + "-new")[0]["step"] == 1  # from scratch it would be ln V


def test_a_resumed_run_makes_the_evaluation_that_a_signal_prevented(tiny, monkeypatch):
    """SIGTERM in an update after which an evaluation is due, also in the last one."""
    whole = replace(tiny, steps=4, eval_every=2, eval_rows=4, out_dir=tiny.out_dir + "-whole")
    train(whole)
    want = {line["step"]: line["val_soft"] for line in log(whole.out_dir) if "val_soft" in line}
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clip_and_be_told(*args):
        calls.append(1)
        if len(calls) in (2, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return clip(*args)
    cut = replace(whole, out_dir=tiny.out_dir + "-cut")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_be_told)
    for part in (cut, replace(cut, resume=True)):
        with contextlib.suppress(SystemExit):
            train(part)
    assert [line["step"] for line in log(cut.out_dir) if "val_soft" in line] == [2]  # told again at 4
    train(replace(cut, resume=True))
    found = {line["step"]: line["val_soft"] for line in log(cut.out_dir) if "val_soft" in line}
    assert found == want
    for name in ("last.pt", "step-4.pt"):
        ckpt = checkpoint.load(os.path.join(cut.out_dir, name))
        assert ckpt["metrics"]["val_soft"] == want[4]


def test_the_log_has_tau_and_what_the_feedback_looks_like(tiny):
    train(replace(tiny, k=None, p_sm=1.0))
    line = log(tiny.out_dir)[-1]
    assert line["tau"] == pytest.approx(1, abs=0.1) and line["tau"] != 1
    assert 0 < line["lam"] < 0.5 and line["lam_sd"] >= 0 and 0 < line["mix_norm"] < 2


def test_resume_across_versions_of_the_random_numbers_is_refused(tiny, monkeypatch):
    train(replace(tiny, steps=2))
    monkeypatch.setattr(data, "KEYS", data.KEYS + 1)
    with pytest.raises(Refused, match="the random numbers of data.rng differ"):
        train(replace(tiny, steps=4, resume=True))


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
    (dict(n_head=0), "--n_head=0 must be at least 1"), (dict(clip=-1.0), "--clip=-1.0 must"), (dict(eta_bb=math.nan), "--eta_bb=nan must"),
    (dict(eval_every=2, eval_rows=0), "--eval_rows=0 must"), (dict(out_dir=""), "--out_dir= is empty"), (dict(vocab_size=7), "--vocab_size=7 is not"),
    (dict(steps=0), "--steps=0"), (dict(p_sm=1.5), "--p_sm=1.5"), (dict(b_l=0.0), "--b_l=0.0"), (dict(b_h=1.5), "--b_h=1.5"),
    (dict(k=1000), "--k=1000"), (dict(batch_size=6), "--batch_size=6 is not a multiple of --micro_batch=4"),
    (dict(batch_size=2), "--batch_size=2 is not a multiple"), (dict(device="cuda"), "--device=cuda for local process 0"),
    (dict(device="tpu"), "--device=tpu for local process 0, but this machine has 0"), (dict(dtype="int8"), "--dtype=int8"), (dict(data="nowhere"), "nowhere"),
    (dict(resume=True), "no checkpoint at"), (dict(init_from="nowhere.pt"), "no checkpoint at nowhere.pt"),
    (dict(length=10**6), "tokens do not fill one row")])
def test_bad_values_are_refused(tiny, change, message):
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here: would check that its absence is refused")
    with pytest.raises(Refused, match=message):
        train(replace(tiny, **change))
    assert not os.path.exists(tiny.out_dir)  # a wrong flag never starts a run


def test_a_run_is_not_overwritten_by_accident(tiny):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match="already holds a run: --resume"):
        train(tiny)
    with open(os.path.join(tiny.out_dir, "log.jsonl"), "a") as f:
        f.write("not a line of ours\n\n")
    train(replace(tiny, overwrite=True, steps=2))
    assert [line["step"] for line in log(tiny.out_dir)] == [1, 2]


def test_overwriting_forgets_the_old_run_before_its_own_first_save(tiny):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match="not a number by update 1"):
        train(replace(tiny, overwrite=True, init_from=broken(tiny)))
    assert "last.pt" not in os.listdir(tiny.out_dir)  # nothing to resume by mistake; and what is not a number is not saved


def broken(cfg):
    """Weights that are not numbers, beside the run."""
    path = os.path.join(os.path.dirname(cfg.out_dir), "broken.pt")
    ckpt = checkpoint.load(os.path.join(cfg.out_dir, "last.pt"))
    checkpoint.save(path, **{**ckpt, "model": {k: t * math.nan if k.startswith("net.") else t for k, t in ckpt["model"].items()}})
    return path


def test_resume_with_other_fields_or_data_is_refused(tiny, corpus, tmp_path):
    train(replace(tiny, steps=1))
    with pytest.raises(Refused, match=r"n_layer \(2 there, 1 here\), seed \(1 there, 2 here\)"):
        train(replace(tiny, resume=True, n_layer=1, seed=2))
    for name, value in (("p_sm", 0.3), ("eta_bb", 1.0), ("micro_batch", 8), ("b_l", 0.3), ("ema", 0.5)):
        with pytest.raises(Refused, match=rf"cannot resume: {name} \("):
            train(replace(tiny, resume=True, **{name: value}))
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
    with pytest.raises(Refused, match=r"n_head \(2 there, 4 here\)"):  # the shapes would fit
        train(replace(tiny, out_dir=tiny.out_dir + "2", init_from=os.path.join(tiny.out_dir, "last.pt"), n_head=4))
    other = os.path.join(tiny.out_dir, "other.pt")
    checkpoint.save(other, **{**checkpoint.load(os.path.join(tiny.out_dir, "last.pt")), "tokenizer": {"name": "gpt2"}})
    with pytest.raises(Refused, match=r"tokenizer \(gpt2 there, bytes in"):
        train(replace(tiny, out_dir=tiny.out_dir + "2", init_from=other))


def test_resume_of_something_else_is_refused(tiny):
    train(replace(tiny, steps=3, save_every=3))
    os.replace(os.path.join(tiny.out_dir, "step-3.pt"), os.path.join(tiny.out_dir, "last.pt"))
    with pytest.raises(Refused, match="not written by a running train.py: start from its weights"):
        train(replace(tiny, resume=True))


def test_continuation_needs_its_start():
    assert script.PRESETS["continue"]["init_from"]
    with pytest.raises(Refused):
        train(Config(**{**script.PRESETS["continue"], "data": "nowhere"}))


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
