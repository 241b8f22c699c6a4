"""What protects a run of either trainer: it is refused, and its files stay what they were."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checkpoint
import data
import launch
import oracles
from conftest import ROOT, configure, refused, spy
from mdlm import TwoPass

WORDS = {
    "train": "--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=22 --dropout=0.2 "
             "--batch_size=12 --micro_batch=2 --warmup=1 --eval_rows=3 --keep_every=2",
    "finetune_dream": "--model={model} --r=4 --alpha=6 --n_val=3 --n_train=5 --batch_size=3"}
BOTH = ("--data={data} --{out}={folder} --seed=5 --steps=3 --p_sm=0.7 --eta_bb=2e-3 --eta_sm=0.03 "
        "--k=2 --omega_s=0.3 --b_l=0.1 --b_h=0.9 --eval_every=2 --save_every=2 --device=cpu")
# What may change when a run is resumed. Model and data may move, but not change.
FREE = {"train": {"data", "out_dir", "resume", "overwrite", "steps", "log_every", "eval_every",
                  "eval_rows", "save_every", "keep_every", "show", "device", "dtype", "compile"},
        "finetune_dream": {"model", "data", "out", "resume", "overwrite", "checkpointing",
                           "device", "log_every", "save_every", "eval_every"}}
FROM_DATA = {"vocab_size", "mask_id", "soft_mask"}  # soft_mask: from p_sm
FIXED = [(script, field.name) for script in WORDS
         for field in dataclasses.fields(configure(script, [])[1])
         if field.name not in FREE[script] | FROM_DATA]


def write_data(script, path, seen="seen", held_out="held out"):
    texts = [f"{i} {held_out} {i * i}. " if i in oracles.order(30, "held out", 5)[:3] else
             f"{i} {seen} {i * i}. " for i in range(30)]
    if script == "train":
        data.prepare([*texts, held_out * 30], path, data.tokenizer("bytes"), val_docs=1)
    else:
        lines = (json.dumps({"prompt": text, "response": text}) for text in texts)
        Path(path).write_text("\n".join(lines))
    return str(path)


def other(name, value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {"loss": "paper", "coin": "dialogue", "dtype": "float32"}.get(name, "other")
    return value * (0.9 if isinstance(value, float) else 2)


def files(folder):
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """{script: (its main function, Config, folder and words)} of two runs of three updates"""
    found = {}
    for script, words in WORDS.items():
        folder = tmp_path_factory.mktemp(script)
        out = "out_dir" if script == "train" else "out"
        words = f"{words} {BOTH}".format(
            model=tiny[0], out=out, folder=folder / "run",
            data=write_data(script, folder / "data")).split()
        main, cfg = configure(script, words)
        main(cfg)
        found[script] = main, cfg, str(folder / "run"), words
    return found


@pytest.fixture
def refuses(runs):
    """Runs the script with some fields changed, which must be refused and leave all files alone."""
    def refuses(script, message, **fields):
        main, cfg, folder, _ = runs[script]
        before = files(folder)
        assert f"{folder}/last.pt" in before
        refused(message, main, dataclasses.replace(cfg, **fields))
        assert files(folder) == before
    return refuses


@pytest.mark.parametrize("script, name", FIXED)
def test_a_run_is_not_resumed_with_another_setting(runs, refuses, script, name):
    value = other(name, getattr(runs[script][1], name))
    refuses(script, rf"last.pt has other settings: .*\b{name} \(", resume=True, **{name: value})


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize("part", ["seen", "held_out"])
def test_a_run_is_not_resumed_with_other_data(runs, refuses, tmp_path, script, part):
    path = write_data(script, tmp_path / "data", **{part: "other"})
    refuses(script, "on the text that was in|other settings: dialogues", resume=True, data=path)


@pytest.mark.parametrize("script", WORDS)
def test_a_run_is_not_resumed_with_other_draws(refuses, monkeypatch, script):
    monkeypatch.setattr(data, "KEYS", data.KEYS + 1)
    refuses(script, "other settings: keys", resume=True)


@pytest.mark.parametrize("script", WORDS)
def test_what_may_change_stops_no_resume(runs, tmp_path, script):
    main, cfg, folder, _ = runs[script]
    names = FREE[script] - {"model", "data", "out", "out_dir", "overwrite", "device", "dtype",
                            "compile"}
    fields = {name: other(name, getattr(cfg, name)) for name in names}
    fields["out_dir" if script == "train" else "out"] = moved = str(tmp_path / "moved")
    shutil.copytree(folder, moved)
    main(dataclasses.replace(cfg, **fields))
    assert checkpoint.load(moved)["step"] == fields.get("steps", 3)


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_folder_has_one_writer(refuses, runs, monkeypatch, script, how):
    """It is locked before its last save is read."""
    reading = spy(monkeypatch, checkpoint, "load")
    with launch.lock(runs[script][2]):
        refuses(script, "another process is writing into", **{how: True})
    assert not reading


def test_a_second_process_ends_with_one_line_and_code_2(runs):
    *_, folder, words = runs["train"]
    with launch.lock(folder):
        done = subprocess.run([sys.executable, "train.py", *words, "--resume"], cwd=ROOT,
                              capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"train.py: another process is writing into {folder}")


HARM = {"loss NaN": lambda nll: nll + math.nan, "loss infinite": lambda nll: nll + math.inf,
        "gradient NaN": lambda nll: nll + (0 * nll.sum()).sqrt()}


@pytest.mark.parametrize("script", WORDS)
@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_finite_is_neither_saved_nor_kept(runs, tmp_path, monkeypatch, script, harm):
    """One micro-batch of update 3 does harm, and the next line, save and evaluation are due at 4.
    While the loss alone is not finite, the gradient and all weights are."""
    main, cfg, *_ = runs[script]
    out, M = str(tmp_path), cfg.batch_size // getattr(cfg, "micro_batch", 1)
    cfg = dataclasses.replace(cfg, steps=4, **{"out_dir" if script == "train" else "out": out})
    whole, calls, before = TwoPass.token_nll, [], {}

    def token_nll(self, *args):
        nll, masks = whole(self, *args)
        calls.extend([self] * torch.is_grad_enabled())
        if len(calls) == 2 * M + 2 and not before:
            before.update(files(out))
            nll = HARM[harm](nll)
        return nll, masks
    monkeypatch.setattr(TwoPass, "token_nll", token_nll)
    refused("not finite: restart with a lower --eta_bb", main, cfg)
    assert len(calls) == 4 * M and files(out) == before and checkpoint.load(out)["step"] == 2
    assert harm == "gradient NaN" or all(p.isfinite().all() for p in calls[-1].parameters())


@pytest.mark.parametrize("name", ["n_layer", "n_head", "n_embd", "n_cond", "time_conditioning",
                                  "mask_id", "k", "tokenizer"])
def test_another_model_is_not_continued(runs, refuses, tmp_path, name):
    """Its tensors may fit."""
    ckpt, path = checkpoint.load(runs["train"][2]), str(tmp_path / "other.pt")
    if name == "tokenizer":
        ckpt["tokenizer"]["name"] = "gpt2"
    else:
        ckpt["config"][name] = other(name, ckpt["config"][name])
    checkpoint.save(path, **ckpt)
    refuses("train", rf"other.pt has other settings: {name} \(", init_from=path,
            out_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "last.pt").exists()
