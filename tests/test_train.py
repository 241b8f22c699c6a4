# SPDX-License-Identifier: MIT
"""train.py: Alg. 1 line by line, and one run, however it is cut into devices, stops and saves.

Not here: the loss (test_mdlm.py), flags, signals and the log by themselves (test_launch.py).
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import checkpoint
import data
import launch
import oracles
import train as script
from conftest import ROOT, full_disk, refused, sigterm, spy, torchrun
from eval import val_ppl
from mdlm import MDLM
from train import Config, flops_per_token, lr_at, train, update_ema


def prepared(folder):
    documents = data.documents(sorted(folder.glob("*.txt"), reverse=True))
    data.prepare(documents, str(folder), data.tokenizer("bytes"), val_docs=1)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small prepared folder of bytes, in data.py's format."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"{i} is {'odd' if i % 2 else 'even'}, {i * i} is its square. "
                   for i in range(600))
    (folder / "text.txt").write_text(text)
    (folder / "more.txt").write_text(text[:4000])
    return prepared(folder)


@pytest.fixture
def tiny(corpus, tmp_path):
    return Config(data=corpus, out_dir=str(tmp_path / "run"), device="cpu", n_layer=2, n_head=2,
                  n_embd=32, n_cond=16, length=32, dropout=0.1,
                  omega_s=0.5, omega_a=1.0, omega_b=-4.0,
                  steps=6, batch_size=8, micro_batch=4, warmup=2,
                  log_every=1, eval_every=0, keep_every=0, save_every=3)


def beside(cfg, name, **change):
    """The same run with some changes, in a folder of its own."""
    return replace(cfg, out_dir=f"{cfg.out_dir}-{name}", **change)


def file(cfg, name="last.pt"):
    return os.path.join(cfg.out_dir, name)


def log(cfg):
    with open(file(cfg, "log.jsonl")) as f:
        return [json.loads(line) for line in f]


def bounds(cfg):
    return {line["step"]: line["val_soft"] for line in log(cfg) if "val_soft" in line}


def weights(cfg):
    ckpt = checkpoint.load(file(cfg))
    return ckpt["model"] | {"ema." + k: v for k, v in ckpt["ema"].items()}


def assert_same_bits(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def at_start(cfg, seed):
    """The model before its first update.   cfg: that of the model."""
    torch.manual_seed(seed)
    return MDLM(cfg)


def unmoved(model, seed):
    start = at_start(model.cfg, seed).parameters()
    return [name for (name, p), q in zip(model.named_parameters(), start) if torch.equal(p, q)]


# ---- Alg. 1


def test_six_updates_are_alg1_with_adamw(tiny):
    """All lines at once, against oracles.alg1."""
    cfg = replace(tiny, dropout=0.0, p_sm=0.5, b_l=0.1, b_h=0.9, clip=0.3, ema=0.15, eta_bb=2e-3,
                  eta_sm=3e-2)
    model, ema = train(cfg)
    tokens = data.open_split(cfg.data, "train")[0]
    order = data.order(data.n_rows(tokens, 32), 0, cfg.seed)
    ours = at_start(replace(cfg, vocab_size=259, mask_id=258), cfg.seed)
    updates = oracles.alg1(ours, lambda step: data.rows(tokens, order[8 * step:8 * step + 8], 32),
                           data.rng, cfg, mask_id=258)
    for line in log(cfg):
        expected, average = next(updates)
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, value in expected.items():
            assert line[name] == pytest.approx(value, rel=1e-4), name
    for (name, p), q in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-5, msg=name)
    for p, q in zip(ema.net.parameters(), average, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=0, atol=5e-5)
    assert not torch.allclose(ema.net.table, model.net.table, atol=5e-5)


def test_l2_every_row_once_in_an_epoch(tiny, monkeypatch):
    calls = spy(monkeypatch, data, "rows")
    n = data.n_rows(data.open_split(tiny.data, "train")[0], 350)
    assert n % 4  # an epoch ends inside an update
    train(replace(tiny, length=350, batch_size=4, steps=n // 2, log_every=99, save_every=99))
    seen = [int(i) for _, index, _ in calls for i in index]
    first, second = seen[:n], seen[n:]
    assert sorted(first) == list(range(n))
    assert len(set(second)) == len(second) >= n - 4 and first[:len(second)] != second


def test_p_sm_decides_about_two_passes_and_omega_rests_after_one(tiny):
    """A zero gradient would still move ω, by Adam's momentum."""
    binary = beside(tiny, "binary", p_sm=0.0, steps=2)
    model, _ = train(binary)
    assert model.sm is None and not any(k.startswith("sm.") for k in weights(binary))
    always = beside(tiny, "always", p_sm=1.0, k=None)
    train(always)
    assert all(line["lam"] > 0 for line in log(always))
    line = log(always)[-1]  # what the feedback looks like
    assert line["tau"] == pytest.approx(1, abs=0.1) and line["tau"] != 1
    assert 0 < line["lam"] < 0.5 and line["lam_sd"] >= 0 and 0 < line["mix_norm"] < 2
    train(replace(tiny, p_sm=0.5, steps=16))
    # ω has no gradient in update 1, because the head starts at zero. The first learning rate is 0.
    lines = log(tiny)[2:]
    soft = [line["lam"] > 0 for line in lines[1:]]
    assert set(soft) == {True, False}
    assert [a["omega_s"] != b["omega_s"] for a, b in zip(lines, lines[1:])] == soft


def test_l9_warm_up_starts_at_zero_and_then_stays():
    cfg = Config(warmup=2500)
    assert [lr_at(s, cfg) for s in (0, 1250, 2500, 10**6)] == [0, 0.5, 1, 1]
    assert [lr_at(s, Config(warmup=0)) for s in (0, 1)] == [0, 1]


def test_ema_warms_up():
    ema, model = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    shadow = ema.weight.item()
    for n, w, d in ((1, 1.0, 2 / 11), (2, -2.0, 3 / 12), (3, 5.0, 4 / 13), (10**9, 7.0, 0.9999)):
        model.weight.data.fill_(w)
        update_ema(ema, model, n)
        shadow = d * shadow + (1 - d) * w
        assert ema.weight.item() == pytest.approx(shadow)


def test_everything_learns_also_in_the_ablations(tiny):
    """§4.1 and App. C.3 as runs: every parameter moves, and the loss falls.

    With bf16, older torch hands the casts of pass 1, made without a graph, to pass 2.
    """
    for i, change in enumerate((dict(), dict(k=None), dict(k=None, two_updates=True),
                                dict(k=1, time_conditioning=True),
                                dict(dtype="bfloat16", p_sm=1.0))):
        cfg = beside(tiny, i, steps=24, log_every=8, save_every=24, eta_bb=6e-3, **change)
        model, ema = train(cfg)
        first, *_, last = lines = log(cfg)
        assert [line["step"] for line in lines] == [1, 8, 16, 24]
        assert last["loss"] < 0.8 * first["loss"], change
        assert {"loss", "ce_per_mask", "lr", "grad_norm", "tokens_per_s", "omega_s", "omega_a",
                "omega_b", "lam"} <= first.keys()
        assert last["omega_s"] != pytest.approx(0.5, abs=1e-3) and last["lam"] > 0.01
        assert not unmoved(model, tiny.seed), change
        assert ema.sm is model.sm and not torch.equal(ema.net.table, model.net.table)
        assert hasattr(model.sm, "raw_tau") == (model.cfg.k is None)


# ---- what a run reports and leaves


def test_flops_of_the_paper_s_model():
    """Twice the matrix parameters a token meets, and attention; the head on half of the rows.

    Forward and backward are three passes, 3.8 with SM.
    """
    cfg = Config()
    matmuls = 12 * (3 + 1 + 8) * 768**2 + 50258 * 768 / 2 + 12 * 2 * 1024 * 768
    assert flops_per_token(cfg, 0) == pytest.approx(2 * matmuls * 3)
    assert flops_per_token(cfg, 0.8) == pytest.approx(2 * matmuls * 3.8)


def test_evaluation_is_of_the_average_on_fixed_rows_and_masks(tiny):
    """The numbers of `eval.py ppl --rows=6`, whatever the seed of the run."""
    model, ema = train(replace(tiny, steps=4, eval_every=2, eval_rows=6, ema=0.5, eta_bb=3e-3,
                               seed=5))
    val = data.open_split(tiny.data, "val")[0]
    rows = data.rows(val, torch.arange(6) * data.n_rows(val, 32) // 6, 32)
    line = log(tiny)[-1]
    for name, soft in (("val_soft", True), ("val_plain", False)):
        total, count = val_ppl(ema, rows, soft, script.EVAL_SEED)
        assert line[name] == pytest.approx(total / count, rel=1e-5)
        of_raw_weights = val_ppl(model, rows, soft, script.EVAL_SEED)[0] / count
        assert line[name] != pytest.approx(of_raw_weights, rel=1e-5)
    assert list(bounds(tiny)) == [2, 4]
    assert log(tiny)[0]["step"] == 1  # a run from scratch begins at ln V, which is not measured
    assert checkpoint.load(file(tiny))["metrics"]["val_soft"] == line["val_soft"]


def test_files_hold_what_evaluation_wants(tiny):
    model, ema = train(replace(tiny, keep_every=3))
    assert sorted(os.listdir(tiny.out_dir)) == [
        ".lock", "last.pt", "log.jsonl", "step-3.pt", "step-6.pt"]
    kept, last = MDLM.load(file(tiny, "step-6.pt")), MDLM.load(file(tiny))
    for loaded in (kept, last):
        assert torch.equal(loaded.net.table, ema.net.table)
        assert torch.equal(loaded.sm.raw_s, model.sm.raw_s)
    assert torch.equal(MDLM.load(file(tiny), ema=False).net.table, model.net.table)
    assert last.info["tokenizer"]["name"] == "bytes" and last.info["step"] == 6


def test_show_ends_with_bounds_omega_and_a_sample(tiny, capsys):
    cfg = replace(tiny, show=True, eval_rows=4, steps=2)
    train(cfg)
    out = capsys.readouterr().out
    for text in "with feedback", "without", "bits per byte", "mean λ", "100% ", "More: python":
        assert text in out
    train(beside(cfg, "binary", p_sm=0.0))
    out = capsys.readouterr().out
    assert "with feedback" not in out and "without" in out and "100% " in out


# ---- one run, however it is cut


# train.py's own command line, twice in the processes of one torchrun. The first run is whole. In
# update 4 of the second, rank 0 sends SIGTERM to the group of torchrun, as a scheduler does. It
# waits for its own, which torchrun passes on.
TWO_RANKS = """
import functools, inspect, os, runpy, signal, sys, time, torch
import torch.distributed as dist
clip, updates = torch.nn.utils.clip_grad_norm_, []

def watched(params, limit):
    updates.append([p.detach() for p in params])
    if len(updates) == 6 + 4 and os.environ["RANK"] == "0":
        os.killpg(os.getppid(), signal.SIGTERM)
        handler = signal.getsignal(signal.SIGTERM)
        while not inspect.getclosurevars(handler).nonlocals["caught"]:
            time.sleep(0.01)
    return clip(params, limit)
torch.nn.utils.clip_grad_norm_ = watched
dist.init_process_group = functools.cache(dist.init_process_group)  # one group for both runs
dist.destroy_process_group = lambda: None
for out in {outs!r}:
    sys.argv[1:] = {flags!r} + ["--out_dir=" + out]
    try:
        runpy.run_path({root!r} + "/train.py", run_name="__main__")
    finally:
        torch.save(updates[-1], out + ".rank" + os.environ["RANK"])
"""


def test_two_ranks_are_one_and_stop_together(tiny, tmp_path):
    """1 process × 4 micro-batches is 2 × 2: the same losses; both ranks end with the same bits."""
    one = replace(tiny, micro_batch=2, p_sm=0.5, eval_every=3, eval_rows=4)
    two, stopped = beside(one, "two"), beside(one, "stopped", save_every=1000)
    flags = [f"--{k}={v}" for k, v in vars(one).items()]
    code = TWO_RANKS.format(root=ROOT, flags=flags, outs=[two.out_dir, stopped.out_dir])
    (tmp_path / "probe.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen([*torchrun, str(tmp_path / "probe.py")], start_new_session=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    train(one)
    output = process.communicate(timeout=120)[0]
    assert output.count("stopped after update 4, saved in") == 1, output
    for cfg in two, stopped:
        ranks = [torch.load(f"{cfg.out_dir}.rank{r}", weights_only=True) for r in (0, 1)]
        assert len(ranks[0]) and all(map(torch.equal, *ranks))
    assert sorted(os.listdir(stopped.out_dir)) == [".lock", "last.pt", "log.jsonl"]
    assert checkpoint.load(file(stopped))["step"] == 4
    train(replace(stopped, resume=True, save_every=3))  # by one process what two have begun
    for cfg in two, stopped:
        for a, b in zip(log(one), log(cfg), strict=True):
            for name in ("loss", "ce_per_mask", "grad_norm", "omega_s", "lam"):
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), name
        assert bounds(cfg) == pytest.approx(bounds(one), rel=1e-5)
        for name, tensor in weights(one).items():
            torch.testing.assert_close(tensor, weights(cfg)[name], rtol=1e-4, atol=1e-5)


def test_resume_is_the_uninterrupted_run_bit_for_bit(tiny):
    """With p_sm, dropout, evaluations, the end of an epoch, and lines after the checkpoint."""
    whole = replace(tiny, steps=8, p_sm=0.5, length=350, batch_size=12, eval_every=4, eval_rows=2)
    cut = beside(whole, "cut")
    assert data.n_rows(data.open_split(tiny.data, "train")[0], 350) < 8 * 12
    train(whole)
    train(replace(cut, steps=5, save_every=3))
    with open(file(cut, "log.jsonl"), "a") as f:
        f.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')  # the last line was cut by a kill
    train(replace(cut, resume=True))
    assert_same_bits(whole, cut)
    assert [line["loss"] for line in log(whole)] == [line["loss"] for line in log(cut)]


def test_sigterm_saves_the_update_and_what_was_due_is_made_on_resume(tiny, monkeypatch, capsys):
    """In an update after which an evaluation is due, and again in the last one."""
    whole = replace(tiny, steps=4, eval_every=2, eval_rows=4)
    cut = beside(whole, "cut", resume="auto")
    train(whole)
    told = lambda patch: spy(patch, torch.nn.utils, "clip_grad_norm_", 2, sigterm)
    capsys.readouterr()
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        told(patch)
        train(cut)
    assert stop.value.code == 128 + signal.SIGTERM and checkpoint.load(file(cut))["step"] == 2
    out = capsys.readouterr().out
    assert "stopped after update 2, saved in" in out and "--resume goes on" in out
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        told(patch)
        train(cut)
    assert stop.value.code == 128 + signal.SIGTERM
    assert list(bounds(cut)) == [2]  # the one of update 4 was prevented again
    train(cut)
    assert bounds(cut) == bounds(whole)
    for name in ("last.pt", "step-4.pt"):
        assert checkpoint.load(file(cut, name))["metrics"]["val_soft"] == bounds(whole)[4]
    assert_same_bits(whole, cut)
    assert [line["step"] for line in log(cut) if "loss" in line] == [1, 2, 3, 4]


KILLED = """
import os, torch
from train import Config, train
write = torch.save

def die(parts, path):
    write(parts, path)
    if parts["step"] == 4:
        os.truncate(path, 1000)
        os.kill(os.getpid(), 9)
torch.save = die
train(Config(**{fields!r}))
"""


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_good_file(tiny):
    """The save of update 4 dies between its bytes. The file of update 2 is whole, and goes on."""
    cfg = replace(tiny, steps=6, save_every=2)
    code = KILLED.format(fields=vars(cfg))
    # Sums are cut by threads, so the bits are those of as many threads as here.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | threads)
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.load(file(cfg))["step"] == 2 and log(cfg)[-1]["step"] == 4
    assert any(name.endswith(".tmp") for name in os.listdir(cfg.out_dir))
    train(replace(cfg, resume=True))
    assert sorted(os.listdir(cfg.out_dir)) == [".lock", "last.pt", "log.jsonl", "step-6.pt"]
    train(beside(cfg, "straight"))
    assert_same_bits(cfg, beside(cfg, "straight"))
    assert [line["step"] for line in log(cfg)] == [1, 2, 3, 4, 5, 6]  # none twice, none missing


def test_a_continuation_starts_from_weights_a_fresh_omega_and_the_bound_of_its_start(tiny):
    """Update 0 is in the log: it tells whether the weights were read correctly (Fig. 3)."""
    binary, _ = train(replace(tiny, p_sm=0.0, steps=4, eval_every=4, eval_rows=4, ema=0.0))
    known = log(tiny)[-1]["val_plain"]  # EMA 0 is the raw weights, where continuations start
    cfg = beside(tiny, "sm", init_from=file(tiny), eval_every=3, eval_rows=4)
    train(cfg)
    first = log(cfg)[0]
    assert first["step"] == 0 and first["val_plain"] == pytest.approx(known, rel=1e-6)
    assert list(bounds(cfg)) == [0, 3, 6]
    soft, _ = train(replace(cfg, overwrite=True, steps=1, eval_every=0))  # its learning rate is 0
    assert all(map(torch.equal, binary.net.parameters(), soft.net.parameters()))
    assert soft.sm.omega[0].item() == pytest.approx(0.5, rel=1e-4)
    assert script.PRESETS["continue"]["init_from"]


KILLED_ONCE = """
import os, torch, train
clip, updates = torch.nn.utils.clip_grad_norm_, []
def clip_or_die(*args):
    updates.append(1)
    if len(updates) == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
    return clip(*args)
torch.nn.utils.clip_grad_norm_ = clip_or_die
train.launch.run(train.train, train.Config, train.PRESETS)
"""


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    """One command starts, goes on after the kill, and has nothing to do when all is done.

    The variable is needed: torch 2.5 to 2.13 would tell new workers the addresses of dead ones.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cfg = replace(tiny, save_every=1, resume="auto")
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    flags = [f"--{k}={v}" for k, v in vars(cfg).items()]
    done = torchrun("--max_restarts=1", tmp_path / "killed.py", *flags)
    assert done.returncode == 0 and "FutureWarning" not in done.stderr, done.stderr
    assert "updates 0 to 6" in done.stdout and "updates 3 to 6" in done.stdout
    train(beside(tiny, "straight"))
    straight = weights(beside(tiny, "straight"))
    for name, tensor in weights(cfg).items():
        torch.testing.assert_close(tensor, straight[name], rtol=1e-4, atol=1e-5)
    train(cfg)
    assert [line["step"] for line in log(cfg)] == [1, 2, 3, 4, 5, 6]


# ---- bad input


def test_bad_values_are_refused(tiny):
    out_of_range = dict(n_head=0, steps=0, b_l=0.0, eta_bb=math.nan, p_sm=1.5, omega_a=math.inf)
    cases = [({name: value}, f"--{name}={value} must be ")
             for name, value in out_of_range.items()]
    cases += [(dict(b_l=0.5, b_h=0.5), "--b_l=0.5 must be below --b_h=0.5"),
              (dict(vocab_size=7), "--vocab_size=7 is not"),
              (dict(out_dir=""), "--out_dir= is empty"),
              (dict(batch_size=6), "--batch_size=6 is not a multiple of --micro_batch=4"),
              (dict(length=10**6), "tokens do not fill one row"),
              (dict(data="nowhere"), "no train.bin with a meta.json in nowhere"),
              (dict(resume=True), "no checkpoint at"),
              (dict(init_from="nowhere.pt"), "no checkpoint at nowhere.pt")]
    for change, message in cases:
        refused(message, train, replace(tiny, **change))
        assert not os.path.exists(tiny.out_dir)  # a wrong flag never starts a run


def test_a_run_is_not_overwritten_by_accident_nor_mixed_with_an_older_one(tiny):
    train(replace(tiny, steps=2))
    refused("already holds a run: --resume", train, tiny)
    refused("--steps=1, but .*last.pt has made 2: give more", train,
            replace(tiny, steps=1, resume="auto"))
    again = replace(tiny, steps=3, resume=True)
    with launch.lock(tiny.out_dir):
        for cfg in again, replace(tiny, overwrite=True):
            refused("another process is writing into", train, cfg)
    with full_disk():
        refused("could not write .*log.jsonl", train, again)
    assert checkpoint.load(file(tiny))["step"] == 2
    with open(file(tiny, "log.jsonl"), "a") as f:
        f.write("not a line of ours\n\n")
    train(replace(tiny, overwrite=True, steps=2))
    assert [line["step"] for line in log(tiny)] == [1, 2]
    ckpt = checkpoint.load(file(tiny))
    broken = {k: t * math.nan if k.startswith("net.") else t for k, t in ckpt["model"].items()}
    path = tiny.out_dir + "-broken.pt"
    checkpoint.save(path, **ckpt | {"model": broken})
    refused("not a number by update 1", train, replace(tiny, overwrite=True, init_from=path))
    # Neither what is not a number, nor the old run, which --resume would take by mistake.
    assert "last.pt" not in os.listdir(tiny.out_dir)


def test_another_run_and_weights_of_another_model_are_refused(tiny, tmp_path, monkeypatch):
    train(replace(tiny, steps=1))
    for i, text in enumerate(("other text " * 500, "held out " * 50)):
        (tmp_path / f"{i}.txt").write_text(text)
    for change, message in (
            (dict(n_layer=1, seed=2), r"n_layer \(2 there, 1 here\), seed \(1 there, 2 here\)"),
            (dict(data=prepared(tmp_path)), "cannot resume: the data differ"),
            (dict(micro_batch=8), r"cannot resume: micro_batch \(")):
        refused(message, train, replace(tiny, resume=True, **change))
    with monkeypatch.context() as patch:
        patch.setattr(data, "KEYS", data.KEYS + 1)
        refused("the random numbers of data.rng differ", train, replace(tiny, resume=True))
    whole = checkpoint.load(file(tiny))
    for part in "optimizer", "ema":
        checkpoint.save(file(tiny), **whole | {part: {}})
        refused("last.pt is not whole", train, replace(tiny, resume=True))
    checkpoint.save(file(tiny), **whole)
    other = tiny.out_dir + "-other.pt"
    checkpoint.save(other, **whole | {"tokenizer": whole["tokenizer"] | {"name": "gpt2"}})
    for change, message in (
            (dict(n_head=4), r"n_head \(2 there, 4 here\)"),  # the shapes would fit
            (dict(arm="slerp"), r"arm \('' there, 'slerp' here\)"),
            (dict(k=None), r"k \(3 there, None here\)"),
            (dict(init_from=other), r"tokenizer \(gpt2 there, bytes in")):
        cfg = beside(tiny, "2", **dict(init_from=file(tiny)) | change)
        refused("another model than this configuration: " + message, train, cfg)
    shutil.copy(file(tiny, "step-1.pt"), file(tiny))
    refused("not written by a running train.py: start from its weights", train,
            replace(tiny, resume=True))


@pytest.mark.skipif(not torch.cuda.is_available(),
                    reason="needs CUDA: would check that a compiled bf16 step follows the fp32 one")
def test_compiled_bf16_step_on_the_gpu(tiny):
    full = beside(tiny, "32", device="cuda", dtype="float32", compile=False)
    half = beside(tiny, "16", device="cuda", dtype="bfloat16", compile=True)
    for cfg in full, half:
        train(cfg)
    for a, b in zip(log(full), log(half), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.02)
