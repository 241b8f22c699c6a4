# SPDX-License-Identifier: MIT
"""Whole scripts where things go wrong: pipes, disks, signals, a second process, a killed worker.

Not here: the pieces that they share (test_launch.py), bad flags and files (each script's own).
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import checkpoint
import data
from conftest import configure, full_disk, refused
from dream import Tokenizer
from train import Config, train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": ROOT}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("corpus"))
    texts = [("one and two and three. " * 200, True)] * 4
    data.prepare(iter(texts), folder, data.tokenizer("bytes"))
    return folder


@pytest.fixture
def flags(corpus, tmp_path):
    """A small run in tmp_path/run, as fields of Config."""
    return dict(data=corpus, out_dir=str(tmp_path / "run"), device="cpu", n_layer=1, n_head=1,
                n_embd=16, n_cond=8, length=16, omega_s=0.5, steps=8, batch_size=4, micro_batch=2,
                log_every=1, eval_every=0, keep_every=0, save_every=1)


def words(flags):
    return [f"--{name}={value}" for name, value in flags.items()]


def start(script, *argv, **kwargs):
    """A process that runs a script of ours."""
    return subprocess.Popen([sys.executable, os.path.join(ROOT, script), *argv], env=ENV,
                            stderr=subprocess.PIPE, text=True, **kwargs)


def wait_for(path, process):
    while not os.path.exists(path):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def made(folder):
    """Updates in last.pt."""
    return checkpoint.load(os.path.join(folder, "last.pt"))["step"]


# ---- the terminal


def test_training_goes_on_when_nobody_reads_it(flags):
    """As in `train.py | head -1`."""
    process = start("train.py", *words(flags), stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=100) == 0 and process.stderr.read() == ""
    assert made(flags["out_dir"]) == 8


def test_a_closed_terminal_saves_the_run(flags):
    folder = flags["out_dir"]
    process = start("train.py", *words(flags | {"steps": 100_000}), stdout=subprocess.PIPE)
    wait_for(f"{folder}/last.pt", process)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGHUP
    assert f"stopped after update {made(folder):,}" in out


def test_ctrl_c_keeps_the_samples_that_are_there(flags, tmp_path):
    train(Config(**flags))
    out = str(tmp_path / "samples.jsonl")
    process = start("sample.py", f"--checkpoint={flags['out_dir']}/last.pt", f"--out={out}",
                    "--count=100000", "--batch_size=1", "--device=cpu", stdout=subprocess.DEVNULL)
    wait_for(out, process)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=100)[1]
    assert process.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("sample.py: stopped by Ctrl-C")
    with open(out) as f:
        assert [json.loads(line)["index"] for line in f][0] == 0


# ---- the disk


def test_a_full_disk_ends_a_run_in_a_sentence(flags):
    train(Config(**flags | {"steps": 2}))
    with full_disk():
        refused("could not write .*log.jsonl", train, Config(**flags, resume=True))
    assert made(flags["out_dir"]) == 2


def test_an_old_run_that_cannot_be_removed_is_said_in_a_sentence(flags, tmp_path):
    """A folder of this name stands for any file that the system keeps."""
    os.makedirs(f"{flags['out_dir']}/last.pt")
    process = start("train.py", *words(flags), "--overwrite", stdout=subprocess.DEVNULL)
    err = process.communicate(timeout=100)[1]
    assert process.returncode == 2 and err.count("\n") == 1 and "last.pt" in err


# ---- other processes


def test_a_second_process_in_the_folder_is_refused_and_harms_nothing(flags):
    folder = flags["out_dir"]
    first = start("train.py", *words(flags | {"steps": 100_000}), stdout=subprocess.DEVNULL)
    wait_for(f"{folder}/last.pt", first)
    for more in {"resume": True}, {"overwrite": True}:
        cfg = Config(**flags | {"steps": 100_000} | more)
        refused("another process is writing into", train, cfg)
    assert os.path.exists(f"{folder}/last.pt")
    first.send_signal(signal.SIGKILL)  # the kernel releases the lock of a process that is killed
    first.wait(timeout=100)
    n = made(folder)
    train(Config(**flags | {"steps": n + 1, "resume": True}))
    with open(f"{folder}/log.jsonl") as f:
        assert [json.loads(line)["step"] for line in f] == list(range(1, n + 2))


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


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(flags, tmp_path):
    """One command starts, goes on after the kill, and has nothing to do when all is done.

    The variable is needed: torch 2.5 to 2.13 would tell new workers the addresses of dead ones.
    """
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
           "--max_restarts=1", str(tmp_path / "killed.py"), *words(flags), "--resume=auto"]
    env = ENV | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "updates 0 to 8" in done.stdout and "updates 3 to 8" in done.stdout
    assert "FutureWarning" not in done.stderr
    straight = flags | {"out_dir": flags["out_dir"] + "-straight"}
    train(Config(**straight))
    one, two = (checkpoint.load(f"{f['out_dir']}/last.pt")["model"] for f in (flags, straight))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    train(Config(**flags, resume="auto"))
    with open(f"{flags['out_dir']}/log.jsonl") as f:
        assert [json.loads(line)["step"] for line in f] == list(range(1, 9))


# ---- what cannot be run


def test_a_flag_out_of_range_is_named(flags):
    for change, said in ((dict(omega_a=float("inf")), "--omega_a=inf must be at most"),
                         (dict(omega_b=float("-inf")), "--omega_b=-inf must be at least"),
                         (dict(b_l=0.5, b_h=0.5), "--b_l=0.5 must be below --b_h=0.5")):
        refused(said, train, Config(**flags | change))
    assert not os.path.exists(flags["out_dir"])


def test_a_model_that_does_not_fit_into_memory_is_said_in_a_sentence(flags):
    process = start("train.py", *words(flags | {"n_embd": 2_000_000}), stdout=subprocess.DEVNULL)
    err = process.communicate(timeout=100)[1]
    assert process.returncode == 2 and err.count("\n") == 1
    assert err.startswith("train.py: not enough memory (")


def test_files_of_odd_values_are_refused(flags, corpus, tmp_path):
    train(Config(**flags | {"steps": 1}))
    path, ckpt = str(tmp_path / "odd.pt"), checkpoint.load(f"{flags['out_dir']}/last.pt")
    for part, value, said in (("config", ckpt["config"] | {"dropout": 7}, "dropout = 7, they need"),
                              ("tokenizer", {}, "tokenizer's mask_id = None, they need 0 to 258"),
                              ("tokenizer", 5, "not a whole checkpoint of .*: tokenizer"),
                              ("ema", 5, "not a whole checkpoint of .*: ema")):
        torch.save(ckpt | {part: value}, path)
        refused(said, checkpoint.load, path)
    with open(f"{corpus}/meta.json") as f:
        meta = f.read()
    for old, new in ('"bytes"', '"size"'), ('"bytes": ', '"bytes": -'), ('"bos": 256', '"bos": -3'):
        (tmp_path / "meta.json").write_text(meta.replace(old, new))
        (tmp_path / "val.bin").write_bytes(b"")
        refused("does not describe data in the format", data.open_split, tmp_path, "val")
    (tmp_path / "added_tokens.json").write_text('{"<|mask|>": 300}')
    for vocabulary in '{}', '{"": 5}':
        (tmp_path / "vocab.json").write_text(vocabulary)
        refused("not whole numbers from 0 on, each once", Tokenizer, tmp_path)
    refused("--batch=-1 must be at least 0", configure, "bench", ["--batch=-1"])


def test_fewer_steps_than_were_made_are_refused(flags):
    train(Config(**flags))
    cfg = Config(**flags | {"steps": 4}, resume="auto")
    refused("--steps=4, but .*last.pt has made 8: give more", train, cfg)
