"""What protects a run of either trainer: it is refused, and its files stay what they were."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import data
import finetune_dream
import launch
import mdlm
import oracles
import train
from conftest import ROOT, refused, spy
from mdlm import TwoPass

BOTH = dict(seed=5, steps=3, p_sm=0.7, eta_bb=2e-3, eta_sm=0.03, k=2, omega_s=0.3, b_l=0.1,
            b_h=0.9, eval_every=2, save_every=2, device="cpu")
# What makes another run, if it changes. All else may change, and is printed.
FIXED = {"train": "n_layer n_head n_embd n_cond length time_conditioning k two_updates p_sm seed "
                  "batch_size", "finetune_dream": "k p_sm seed batch_size r alpha loss"}
FREE = {"train": dict(dropout=0.3, omega_s=0.2, eta_bb=1e-3, micro_batch=6, ema=0.5, p_sm=0.5),
        "finetune_dream": dict(eta_sm=1e-3, coin="dialogue", warmup=0.1, p_sm=0.5)}
OUT = {"train": "out_dir", "finetune_dream": "out"}
both = pytest.mark.parametrize("script", FIXED)


def write_data(script, path, seen="some text to train on. ", held_out="held out. "):
    if script == "train":
        texts = seen * 30, held_out * 30
        data.prepare(enumerate(texts), path, data.tokenizer("bytes"), val_docs=1)
    else:
        kept = oracles.order(30, "held out", 5)[:3]
        texts = (f"{i} {held_out if i in kept else seen}" for i in range(30))
        launch.append_jsonl(path, *[{"prompt": "a", "response": text} for text in texts])
    return str(path)


def files(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """{script: (its main function, Config, folder)} of two runs of three updates"""
    path = tmp_path_factory.mktemp("runs")
    of_train = train.Config(
        data=write_data("train", path / "data"), out_dir=str(path / "train"), n_layer=1, n_head=2,
        n_embd=16, n_cond=8, length=22, dropout=0.2, batch_size=12, micro_batch=2, warmup=1,
        eval_rows=3, keep_every=2, **BOTH)
    dream = finetune_dream.Config(
        data=write_data("finetune_dream", path / "data.jsonl"), out=str(path / "dream"),
        model=tiny[0], r=4, alpha=6, n_val=3, n_train=5, batch_size=3, **BOTH)
    train.train(of_train)
    finetune_dream.finetune(dream)
    return {"train": (train.train, of_train, of_train.out_dir),
            "finetune_dream": (finetune_dream.finetune, dream, dream.out)}


def refuses(run, message, **changes):
    """The run with some fields changed must be refused, and leave all files alone."""
    main, cfg, out = run
    before = files(out)
    refused(message, main, replace(cfg, **changes))
    assert files(out) == before and f"{out}/last.pt" in before


def other(name, value):
    if name == "p_sm":
        return 0.0  # a binary model
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"loss": "paper", "coin": "dialogue", "dtype": "float32"}.get(name, "other")
    return value * (0.9 if isinstance(value, float) else 2)


@both
def test_a_run_is_not_resumed_with_another_setting_data_or_draws(
        runs, tmp_path, monkeypatch, script):
    for name in FIXED[script].split():
        change = {name: other(name, getattr(runs[script][1], name))}
        there = {"p_sm": "p_sm > 0|soft_mask"}.get(name, name)
        refuses(runs[script], rf"other settings: .*\b({there}) \(", resume=True, **change)
    for split in "seen", "held_out":
        path = write_data(script, tmp_path / split, **{split: "other text. "})
        refuses(runs[script], r"settings: (train|val|dialogues) \(", resume=True, data=path)
    monkeypatch.setattr(data, "KEYS", data.KEYS + 1)
    refuses(runs[script], r"settings: keys \(", resume=True)


@both
def test_all_else_may_change_and_is_printed(runs, tmp_path, capsys, script):
    main, cfg, out = runs[script]
    copy = shutil.copytree(out, tmp_path / "run")
    main(replace(cfg, resume=True, steps=5, **{OUT[script]: str(copy)}, **FREE[script]))
    printed = capsys.readouterr().out
    for field, value in {**FREE[script], "steps": 5}.items():
        assert printed.count(f"{field} {getattr(cfg, field)} → {value}\n") == 1
    assert torch.load(copy / "last.pt")["step"] == 5


@both
def test_a_folder_has_one_writer_and_one_run(runs, monkeypatch, script):
    """It is locked before its last save is read."""
    reading = spy(monkeypatch, mdlm, "read_checkpoint")
    with launch.lock(runs[script][2]):
        refuses(runs[script], "another process is writing into", resume=True)
    assert not reading
    refuses(runs[script], "holds a run: give --resume", resume=False)


@both
def test_what_a_run_has_left_is_never_overwritten(runs, tmp_path, script):
    main, cfg, out = runs[script]
    copy = shutil.copytree(out, tmp_path / "run")
    os.remove(copy / "last.pt")
    cfg = replace(cfg, **{OUT[script]: str(copy)})
    refused("holds a run", main, cfg)  # there is still its log
    refused("no last.pt", main, replace(cfg, resume=True))
    shutil.rmtree(copy)
    copy.mkdir()
    (copy / "log.jsonl").touch()
    main(replace(cfg, resume=True))  # a run that was killed before its first save


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])  # the other end is closed
def test_printing_ends_no_run(tmp_path, opened):
    code = """
import sys, launch, train
def main(cfg):
    log = launch.Log("log.jsonl", 0, 10, True)
    for step in range(10):
        log.write({"step": step + 1, "omega_s": 0.5})
    print("ω", sys.stdin.read(), "end", file=sys.stderr)
launch.run(main, train.Config, ranks=True)"""
    env = os.environ | {"PYTHONPATH": ROOT, "PYTHONIOENCODING": "cp1252"}
    end, stdout = opened()
    os.close(end)
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=stdout,
                          stderr=subprocess.PIPE, input=b"\x81")  # no character of cp1252
    os.close(stdout)
    assert done.stderr == b"? ? end\n" and done.returncode == 0
    assert len(launch.read_jsonl(tmp_path / "log.jsonl")) == 10


HARM = {"loss infinite": lambda nll: nll + math.inf,
        "gradient NaN": lambda nll: nll + (0 * nll.sum()).sqrt()}


@both
@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_finite_is_neither_saved_nor_kept(runs, tmp_path, monkeypatch, script, harm):
    """In one micro-batch, at update 3. The next line, save and evaluation are due at update 4."""
    main, cfg, _ = runs[script]
    out, M = str(tmp_path), cfg.batch_size // getattr(cfg, "micro_batch", 1)
    whole, calls, before = TwoPass.token_nll, [], {}
    harmful = (3 if harm == "gradient NaN" else 2) * M + 2  # the loss: of update 3

    def token_nll(self, *args):
        nll, masks = whole(self, *args)
        calls.extend([self] * torch.is_grad_enabled())
        if len(calls) == harmful and not before:
            before.update(files(out))
            nll = HARM[harm](nll)
        return nll, masks
    monkeypatch.setattr(TwoPass, "token_nll", token_nll)
    refused("not finite", main, replace(cfg, steps=4, **{OUT[script]: out}))
    assert len(calls) == 4 * M and files(out) == before
    assert torch.load(f"{out}/last.pt")["step"] == 2


def test_another_model_is_not_continued(runs, tmp_path):
    """Its tensors may fit."""
    path, ckpt = str(tmp_path / "other.pt"), torch.load(f"{runs['train'][2]}/last.pt")
    changes = {"tokenizer": ckpt | {"tokenizer": ckpt["tokenizer"] | {"name": "other"}}}
    for name in "n_layer n_head n_embd n_cond time_conditioning k mask_id".split():
        config = ckpt["config"] | {name: other(name, ckpt["config"][name])}
        changes[name] = ckpt | {"config": config}
    for name, changed in changes.items():
        launch.save(path, **changed)
        refuses(runs["train"], rf"other.pt has other settings: {name} \(", init_from=path,
                out_dir=str(tmp_path / "run"))
