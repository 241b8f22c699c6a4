"""Every command of the pages parses, and those of README run, cut short."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import data
import eval_dream
import mdlm
import softmask
import tiny_dream
from conftest import ROOT, configure, start
from launch import append_jsonl


def page(name):
    return Path(ROOT, name).read_text("utf-8")


def commands(name):
    """[(script, its words)] of this project, as bash itself reads the blocks of a page."""
    programs = [f"{name}() {{ printf '%s\\x1f' \"$@\"; printf '\\x1e'; }}"
                for name in ("python", "torchrun", "pip", "hf")]
    blocks = re.findall(r"```sh\n(.*?)```", page(name), re.S)
    script = "\n".join(["set -u", "PATH=", *programs, *blocks])
    done = subprocess.run([shutil.which("bash"), "-c", script], capture_output=True, text=True)
    assert not done.stderr and not done.returncode, done.stderr
    found = []
    for line in done.stdout.split("\x1e")[:-1]:
        words = line.split("\x1f")[:-1]
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        if scripts and "pytest" not in words:
            found.append((words[scripts[0]][:-3], words[scripts[0] + 1:]))
    return found


def test_every_command_of_reproduce_parses():
    found = commands("REPRODUCE.md")
    assert len(found) > 100
    for script, words in found:
        _, cfg = configure(script, words)
        if script == "lab/eval_dream":
            task = page(f"lab/tasks/{cfg.task.replace('_plus', '')}.yaml")
            eval_dream.cells(cfg, int(re.search(r"max_gen_toks: (\d+)", task)[1]))


def test_the_paper_map_names_what_exists():
    [table] = re.findall(r"\| paper \| code \|.*?\n\n", page("REPRODUCE.md"), re.S)
    classes = {"SoftMask": softmask.SoftMask, "MDLM": mdlm.MDLM}
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    assert len(named) > 12
    for owner, name in named:
        assert hasattr(classes.get(owner) or importlib.import_module(owner), name), (owner, name)


CUT_SHORT = {  # flags behind a script, or behind a command with this word
    "train": ("--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=64 --batch_size=4 "
              "--micro_batch=4 --steps=2 --eval_rows=4 --device=cpu").split(),
    "openwebtext": ["--out=data/openwebtext", "--tokenizer=bytes"],
    "lab/eval": ["--device=cpu", "--rows=4"],
    "finetune_dream": ["--steps=2", "--batch_size=2", "--device=cpu"],
    "--model=Dream-v0-Instruct-7B": ["--model=dream"],
    "--data=mix": ["--data=dialogues.jsonl"]}


def start_short(script, *words):
    short = [flag for key in (script, *words) for flag in CUT_SHORT.get(key, [])]
    start(script, *words, *short)


def test_commands_of_the_readme_run(tmp_path, monkeypatch):
    """Those that .ci/run does not run in full"""
    todo = commands("README.md")
    text = lambda one: f"python {one[0]}.py {' '.join(one[1])}"
    for begin in re.findall(r'first "(python \S+\.py.*?)"', page(".ci/run")):
        todo.remove(next(one for one in todo if text(one).startswith(begin)))
    # What a reader already has: texts, OpenWebText, a pretrained MDLM, a Dream.
    monkeypatch.chdir(tmp_path)
    words = [" ".join(str(i * j) for i in range(1, 90)) for j in range(1, 12)]
    append_jsonl("yours.jsonl", *[{"text": text} for text in words * 30])
    monkeypatch.setattr(data, "stdlib_files", data.stdlib_files()[:60].copy)
    start("data", "yours.jsonl", "--val_docs=9", "--tokenizer=bytes", "--out=data/owt")
    start_short("train", "--out_dir=.", "--p_sm=0")
    os.rename("last.pt", "mdlm.ckpt")
    tiny_dream.make("dream", "dialogues.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)  # it would fetch GB
    for script, words in todo:
        try:
            start_short(script, *words)
        except ImportError:
            assert "openwebtext" in words  # which needs a package
    assert {"yours", "owt", "binary", "continue", "small", "dream"} <= {*os.listdir("out")}
