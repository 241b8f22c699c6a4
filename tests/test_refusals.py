"""What protects a run of either trainer: it is refused, and its files stay what they were."""

import math
import os
import shutil
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
from conftest import refused, spy
from mdlm import TwoPass

OUT = {"train": "out_dir", "finetune_dream": "out"}
# What makes another run, if it changes. All else may change, and is printed.
FIXED = {"train": dict(n_layer=2, n_head=1, n_embd=32, n_cond=16, length=44, k=4, p_sm=0.0, seed=6,
                       batch_size=24, time_conditioning=True, two_updates=True),
         "finetune_dream": dict(k=4, p_sm=0.0, seed=6, batch_size=6, r=8, alpha=12, loss="paper")}


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


@pytest.fixture(scope="module", params=OUT)
def run(request, tiny, tmp_path_factory):
    """(script, its main function, Config, folder) of a run of three updates"""
    script, path = request.param, tmp_path_factory.mktemp("run")
    out = str(path / "out")
    both = dict(seed=5, steps=3, p_sm=0.7, eta_bb=2e-3, eta_sm=0.03, k=2, omega_s=0.3, b_l=0.1,
                b_h=0.9, eval_every=2, save_every=2, device="cpu",
                data=write_data(script, path / "data"))
    if script == "train":
        main, cfg = train.train, train.Config(
            n_layer=1, n_head=2, n_embd=16, n_cond=8, length=22, dropout=0.2, batch_size=12,
            micro_batch=2, warmup=1, eval_rows=3, keep_every=2, out_dir=out, **both)
    else:
        main, cfg = finetune_dream.finetune, finetune_dream.Config(
            model=tiny[0], r=4, alpha=6, n_val=3, n_train=5, batch_size=3, out=out, **both)
    main(cfg)
    return script, main, cfg, out


def refuses(run, message, **changes):
    """The run with some fields changed must be refused, and leave all files alone."""
    _, main, cfg, out = run
    before = files(out)
    refused(message, main, replace(cfg, **changes))
    assert files(out) == before and f"{out}/last.pt" in before


def test_a_run_is_not_resumed_with_another_setting_data_or_draws(run, tmp_path, monkeypatch):
    script = run[0]
    for name, value in FIXED[script].items():
        there = {"p_sm": "p_sm > 0|soft_mask"}.get(name, name)
        refuses(run, rf"other settings: .*\b({there}) \(", resume=True, **{name: value})
    for split in "seen", "held_out":
        path = write_data(script, tmp_path / split, **{split: "other text. "})
        refuses(run, r"settings: (train|val|dialogues) \(", resume=True, data=path)
    refuses(run, "k=9999 is more than all", resume=True, k=9999)
    refuses(run, "--code does nothing", resume=True, p_sm=0.0, code="mine.py")
    monkeypatch.setattr(data, "KEYS", data.KEYS + 1)
    refuses(run, r"settings: keys \(", resume=True)


def test_a_folder_has_one_writer_and_one_run(run, monkeypatch):
    """It is locked before its last save is read."""
    reading = spy(monkeypatch, mdlm, "read_checkpoint")
    with launch.lock(run[3]):
        refuses(run, "another process is writing into", resume=True)
    assert not reading
    refuses(run, "holds a run: give --resume", resume=False)


def test_a_copy_goes_on_with_other_settings_and_is_never_overwritten(run, tmp_path, capsys):
    script, main, cfg, out = run
    copy = shutil.copytree(out, tmp_path / "run")
    cfg = replace(cfg, **{OUT[script]: str(copy)})
    main(replace(cfg, resume=True, steps=5, p_sm=0.5, eta_sm=1e-3))
    assert "p_sm 0.7 → 0.5\n" in capsys.readouterr().out
    assert torch.load(copy / "last.pt")["step"] == 5
    others = dict(omega_s=0.2, omega_a=9.0, omega_b=-9.0)
    others |= dict(init_from="x") if script == "train" else dict(b_l=0.3, b_h=0.7)
    for name, value in others.items():
        refused(f"{name} .* there, ", main, replace(cfg, resume=True, **{name: value}))
    os.remove(copy / "last.pt")
    refused("holds a run", main, cfg)  # there is still its log
    refused("no last.pt", main, replace(cfg, resume=True))
    if script == "train":
        weights = torch.load(copy / "step-5.pt")
        del weights["identity"]  # which a file of lab/convert.py lacks, too
        torch.save(weights, copy / "last.pt")
        refused("last.pt has only weights", main, replace(cfg, resume=True))
    shutil.rmtree(copy)
    copy.mkdir()
    (copy / "log.jsonl").touch()
    main(replace(cfg, resume=True))  # a run that was killed before its first save


@pytest.mark.parametrize("update, harm", [
    (3, lambda nll: nll + math.inf), (4, lambda nll: nll + (0 * nll.sum()).sqrt())])
def test_what_is_not_finite_is_neither_saved_nor_kept(run, tmp_path, monkeypatch, update, harm):
    """A loss or a gradient, in one micro-batch. The next line and save are due at update 4."""
    script, main, cfg, _ = run
    M = cfg.batch_size // getattr(cfg, "micro_batch", 1)
    whole, calls, before = TwoPass.token_nll, [], {}

    def token_nll(self, *args):
        nll, masks = whole(self, *args)
        calls.extend([self] * torch.is_grad_enabled())
        if len(calls) == (update - 1) * M + 2 and not before:
            before.update(files(tmp_path))
            nll = harm(nll)
        return nll, masks
    monkeypatch.setattr(TwoPass, "token_nll", token_nll)
    refused("not finite", main, replace(cfg, steps=4, **{OUT[script]: str(tmp_path)}))
    assert len(calls) == 4 * M and files(tmp_path) == before
    assert torch.load(tmp_path / "last.pt")["step"] == 2


@pytest.mark.parametrize("run", ["train"], indirect=True)
def test_another_model_is_not_continued(run, tmp_path):
    """Its tensors may fit."""
    path, ckpt = str(tmp_path / "other.pt"), torch.load(f"{run[3]}/last.pt")
    others = {"mask_id": 9, **FIXED["train"]}
    changes = {"tokenizer": ckpt | {"tokenizer": ckpt["tokenizer"] | {"name": "other"}}}
    for name in "n_layer n_head n_embd n_cond time_conditioning k mask_id".split():
        changes[name] = ckpt | {"config": ckpt["config"] | {name: others[name]}}
    for name, changed in changes.items():
        launch.save(path, **changed)
        refuses(run, rf"other.pt has other settings: {name} \(", init_from=path,
                out_dir=str(tmp_path / "run"))
