"""train.py: Alg. 1 line by line, and the same run on any number of ranks, with stops and kills.

Not here: the loss (test_mdlm.py), flags, signals and the log by themselves (test_launch.py).
"""

import os
import signal
from dataclasses import asdict, replace

import pytest
import torch

import data
import launch
import oracles
import train as script
from conftest import dying, kill, logged, refused, sigterm, spy, start, torchrun
from mdlm import MDLM
from train import Config, bound, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("corpus"))
    text = "".join(f"{i} is {['even', 'odd'][i % 2]}, {i * i} is its square. " for i in range(600))
    data.prepare(enumerate([text, text[:4000]]), folder, data.tokenizer("bytes"), val_docs=1)
    return folder


@pytest.fixture
def tiny(corpus, tmp_path):
    return replace(TINY, data=corpus, out_dir=str(tmp_path / "run"))


TINY = Config(device="cpu", n_layer=2, n_head=2, n_embd=32, n_cond=16, length=32, omega_s=0.5,
              omega_a=1.0, omega_b=-4.0, steps=6, batch_size=8, micro_batch=4, warmup=2,
              log_every=1, eval_every=0, keep_every=0, save_every=3)
beside = lambda cfg, name, **change: replace(cfg, out_dir=f"{cfg.out_dir}-{name}", **change)
file = lambda cfg, name="last.pt": os.path.join(cfg.out_dir, name)
log = lambda cfg: logged(cfg.out_dir)
steps = lambda cfg: [line["step"] for line in log(cfg)]
bounds = lambda cfg: {line["step"]: line["val_soft"] for line in log(cfg) if "val_soft" in line}


def at_start(cfg):
    torch.manual_seed(cfg.seed)
    return MDLM(cfg)


@pytest.mark.parametrize("ablation", [
    dict(time_conditioning=True), dict(k=None, two_updates=True)])
def test_six_updates_are_alg1_with_adamw(tiny, ablation):
    """All lines of Alg. 1 at once, and App. C.3. An epoch ends inside an update."""
    cfg = replace(tiny, dropout=0.0, p_sm=0.25, b_l=0.1, b_h=0.9, clip=0.3, ema=0.6, eta_bb=4e-3,
                  eta_sm=3e-2, length=350, batch_size=12, **ablation)
    model, ema = train(cfg)
    tokens, _ = data.open_split(cfg.data, "train")
    n, ours = data.n_rows(tokens, 350), at_start(model.cfg)
    assert 60 > n > 48
    theta, omega = list(ours.net.parameters()), list(ours.sm.parameters())
    rows, draws = data.rows(tokens, range(n), 350), asdict(model.cfg)
    updates = oracles.alg1(ours, theta, omega, rows, **draws)
    for line in log(cfg):
        expected, average = next(updates)
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        expected |= zip(("omega_s", "omega_a", "omega_b"), torch.stack(ours.sm.omega).tolist())
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    close = dict(rtol=0, atol=5e-5)
    torch.testing.assert_close([*model.parameters()], [*ours.parameters()], **close)
    torch.testing.assert_close([p.double() for p in ema.net.parameters()], average, **close)
    assert not torch.allclose(ema.net.table, model.net.table, atol=5e-5)
    assert all(map(torch.equal, ema.sm.parameters(), model.sm.parameters()))  # ω has no average
    soft = ["lam" in line for line in log(cfg)]
    assert (True, False) in zip(soft, soft[1:])  # ω rests, whatever its momentum


def test_defaults_are_the_papers():
    """App. B.1. b_l, ema and clip are those of the released code."""
    theirs = dict(n_layer=12, length=1024, dropout=0.1, k=3, omega_s=1e-6, omega_a=10 / 1.5,
                  omega_b=-0.75, p_sm=0.8, eta_bb=3e-4, eta_sm=1e-2, warmup=2500, steps=10**6,
                  batch_size=512, b_l=1e-3, b_h=1.0, ema=0.9999, clip=1.0, mask_id=50257)
    assert vars(Config()).items() >= theirs.items()


def test_cuda_or_cpu_in_bf16_bounds_and_files_are_of_the_average(tiny):
    """The bounds are those of `lab/eval.py --rows=6`, whatever the seed of the run."""
    cfg = replace(tiny, steps=4, eval_every=2, eval_rows=6, keep_every=2, ema=0.5, eta_bb=3e-3,
                  p_sm=1.0, warmup=0, seed=5, dtype="bfloat16",
                  device="cuda" if torch.cuda.is_available() else "cpu")
    model, ema = train(cfg)
    # Older torch gave pass 2 the casts of pass 1, which have no graph.
    for p, before in zip(model.parameters(), at_start(model.cfg).parameters(), strict=True):
        assert not torch.equal(p.cpu(), before)
    line, val = log(cfg)[-1], data.open_split(cfg.data, "val")[0]
    rows = data.rows(val, torch.arange(6) * data.n_rows(val, 32) // 6, 32)
    for name, soft in ("val_soft", True), ("val_plain", False):
        with launch.machine(cfg.device, cfg.dtype).autocast():
            found = [bound(each, rows, soft, 1)[0].mean() / 32 for each in (ema, model)]
        averaged, raw = (pytest.approx(nats.item(), rel=1e-5) for nats in found)
        assert line[name] == averaged and line[name] != raw
    assert list(bounds(cfg)) == [2, 4]  # at a fresh start it is ln V, and not measured
    assert torch.load(file(cfg))["metrics"]["val_soft"] == line["val_soft"]
    for name in "step-4.pt", "last.pt":
        loaded = MDLM.load(file(cfg, name))
        assert torch.equal(loaded.net.table, ema.net.table.cpu())
        assert torch.equal(loaded.sm.raw_s, model.sm.raw_s.cpu())
        assert (loaded.info["step"], loaded.info["tokenizer"]["name"]) == (4, "bytes")


# train.py in two processes. Rank 0 is killed when half of a save and of a line is on the disk, and
# torchrun restarts both. In update 4, a signal comes to rank 0 alone.
TWO_RANKS = """
import os, signal, torch
import train
clip, save, updates = torch.nn.utils.clip_grad_norm_, torch.save, []
rank, again = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"

def watched(params, limit):
    updates.append([p.detach() for p in params])
    if again and rank == "0" and len(updates) == 2:
        signal.raise_signal(signal.SIGTERM)
    return clip(params, limit)

def half(parts, file):
    save(parts, file)
    if not again and parts["step"] == 4:
        os.truncate(file.name, 1000)
        with open("run-two/log.jsonl", "a") as log:
            log.write('{"step": 5, "lo')
        os.kill(os.getpid(), signal.SIGKILL)
torch.nn.utils.clip_grad_norm_ = watched
torch.save = half
try:
    train.launch.run(train.train, train.Config, train.PRESETS, True)
finally:
    save(updates[-1], "rank" + rank)
"""


def test_two_ranks_are_one_are_restarted_and_stop_together(tiny, mine, tmp_path, monkeypatch):
    """1 process × 4 micro-batches is 2 × 2, and both ranks end with the same bits.

    λ has parameters of its own, by flags alone, from training to evaluation.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # REPRODUCE.md says why
    one = replace(tiny, micro_batch=2, p_sm=0.5, eval_every=3, eval_rows=4, save_every=2, code=mine)
    two = beside(one, "two", resume=True)
    (tmp_path / "probe.py").write_text(TWO_RANKS)
    done = torchrun("--max_restarts=1", tmp_path / "probe.py", cfg=two, cwd=tmp_path)
    for text in "updates 0 to 6", "updates 2 to 6", "stopped after update 4, which":
        assert done.stdout.count(text) == 1, done.stdout + done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1)]
    assert len(ranks[0]) and all(map(torch.equal, *ranks))
    assert sorted(os.listdir(two.out_dir)) == [".lock", "last.pt", "log.jsonl"]
    assert torch.load(file(two))["step"] == 4
    train(one)
    train(two)  # one process continues the run of two
    assert log(one) == [pytest.approx(line, rel=1e-5, abs=1e-7) for line in log(two)]
    weights, others = (torch.load(file(cfg)) for cfg in (one, two))
    for part in "model", "ema":
        torch.testing.assert_close(weights[part], others[part], rtol=1e-4, atol=1e-5)
    assert weights["model"]["sm.bias"].abs().max() > 1e-3
    words = f"--checkpoint={file(one)}", "--device=cpu"
    refused("--code=FILE.py", start, "sample", *words)
    start("sample", *words, f"--code={mine}", "--steps=4")
    start("eval", *words, f"--code={mine}", "--rows=4")
    assert "gain" in launch.read_json(file(one) + ".ppl.json")["values"]
    refused("SoftMask .*there", train, replace(one, resume=True, code=""))


def test_a_signal_in_the_last_update_is_no_stop(tiny, monkeypatch):
    spy(monkeypatch, torch.nn.utils, "clip_grad_norm_", 6, sigterm)
    train(tiny)
    assert torch.load(file(tiny))["step"] == 6


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Six updates that nothing stops. Epochs end inside of updates."""
    folder = str(tmp_path_factory.mktemp("whole"))
    cfg = replace(TINY, data=corpus, out_dir=folder, p_sm=0.5, length=350, batch_size=12,
                  eval_every=2, eval_rows=2, save_every=2, keep_every=2)
    assert data.n_rows(data.open_split(corpus, "train")[0], 350) < 6 * 12
    train(cfg)
    return cfg


@pytest.mark.parametrize("then, module, name, at", [
    *((kill, torch.nn.utils, "clip_grad_norm_", n) for n in (1, 5)),
    (kill, script, "evaluate", 2), (kill, launch, "append_jsonl", 1),
    (kill, launch, "append_jsonl", 4),
    # The end of writing log.jsonl, last.pt, step-2.pt, last.pt, step-4.pt, last.pt
    *((kill, os, "replace", n) for n in range(1, 7)),
    # Before the question whether to stop, also without a save due; after it, and in a save
    *((sigterm, torch.nn.utils, "clip_grad_norm_", n) for n in (1, 2, 3)),
    (sigterm, script, "evaluate", 2), (sigterm, os, "replace", 5)])
def test_a_kill_or_a_stop_at_any_moment_loses_nothing(whole, tmp_path, then, module, name, at):
    """Bit for bit. Lines of the log, evaluations and step files are there once."""
    cut = replace(whole, out_dir=str(tmp_path / "cut"), resume=True)
    with dying(module, name, at, then) as stop:
        train(cut)
    if then is sigterm:
        done = torch.load(file(cut))["step"]
        assert stop.value.code == 128 + signal.SIGTERM and steps(cut) == [*range(1, done + 1)]
    train(cut)
    assert log(cut) == log(whole)
    seconds = [line["seconds"] for line in launch.read_jsonl(file(cut, "log.jsonl"))]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert sorted(os.listdir(cut.out_dir)) == sorted(os.listdir(whole.out_dir))
    for name in "last.pt", "step-2.pt", "step-4.pt", "step-6.pt":
        a, b = (torch.load(file(cfg, name)) for cfg in (whole, cut))
        assert a["metrics"]["step"] == a["step"]
        for part in a.keys() & {"step", "metrics", "model", "ema"}:
            torch.testing.assert_close(b[part], a[part], rtol=0, atol=0)


def test_a_continuation_starts_from_weights_and_their_omega_or_a_fresh_one(tiny, capsys):
    """The bound at update 0 shows whether the weights were read correctly (Fig. 3)."""
    binary, _ = train(replace(tiny, p_sm=0.0, steps=4, eval_every=4, eval_rows=4, k=5))
    assert binary.sm is None
    cfg = beside(tiny, "sm", init_from=file(tiny), eval_every=3, eval_rows=4)
    rows = script.held_out_rows(cfg)
    nats = bound(binary, rows, False, 1)[0].sum().item() / rows.numel()  # of the raw weights
    assert log(tiny)[-1]["val_plain"] != pytest.approx(nats, rel=1e-6)
    train(cfg)
    train(replace(cfg, resume=True, steps=7))
    train(replace(cfg, resume=True, steps=5))  # it has made more already
    assert torch.load(file(cfg))["step"] == 7
    first, second, *_ = log(cfg)
    assert first["val_plain"] == pytest.approx(nats, rel=1e-6)
    assert second["omega_s"] == pytest.approx(0.5, rel=1e-4)  # its learning rate is 0
    assert list(bounds(cfg)) == [0, 3, 6, 7] and steps(cfg) == [*range(8)]
    assert train(beside(tiny, "off", init_from=file(cfg), p_sm=0.0, steps=1))[0].sm is None
    assert "feedback is off" not in capsys.readouterr().out
    train(beside(cfg, "low", steps=1, eval_every=0, p_sm=1.0, omega_s=1e-6))
    assert "feedback is off: λ is 2e-07 on average" in capsys.readouterr().out
    assert "--omega_b=-9" in launch.warning({"lam": 0.0, "ce_per_mask": 9.0})
    trained, more = MDLM.load(file(cfg)).sm, replace(cfg, init_from=file(cfg), steps=1, omega_s=0.3)
    torch.testing.assert_close(train(beside(more, "more"))[0].sm.omega, trained.omega)
    assert f", ω from {file(cfg)}" in capsys.readouterr().out
    omega = train(beside(more, "new", new_omega=True, k=5))[0].sm.omega
    torch.testing.assert_close(torch.stack(omega), torch.tensor((0.3, 1.0, -4.0)))
    ckpt = torch.load(file(cfg))
    torch.save(ckpt | {"model": {n: t / 0 for n, t in ckpt["model"].items()}}, file(cfg))
    refused("values that are not finite", train, beside(more, "broken"))


def test_a_wrong_flag_never_starts_a_run(tiny):
    for change, message in (
            (dict(batch_size=6), "is not a multiple of"), (dict(k=300), "more than all 259"),
            (dict(new_omega=True), "--new_omega needs --init_from")):
        refused(message, train, replace(tiny, **change))
        assert not os.path.exists(tiny.out_dir)
