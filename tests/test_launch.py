"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import os
import re
import signal
import subprocess
import sys

import pytest

import checkpoint
import data
import launch
from conftest import ROOT, random_mdlm, refused, save_mdlm, start
from launch import append_jsonl, atomic, from_cli, read_jsonl, write_text
from train import Config


@pytest.mark.parametrize("words, fields", [
    ([], {}),
    (["--resume", "--k=None"], dict(resume=True, k=None)),
    (["--resume=auto", "--compile=false"], dict(resume="auto", compile=False)),
    (["--resume", "auto", "--show", "--steps", "7"], dict(resume="auto", show=True, steps=7)),
    (["--data=x=y", "--init_from=", "--omega_b", "-2"], dict(data="x=y", omega_b=-2.0)),
    (["quick", "--steps=2"], dict(steps=2, k=5)),
])
def test_flags_become_typed_fields(words, fields):
    assert repr(from_cli(Config, words, {"quick": dict(steps=1, k=5)})) == repr(Config(**fields))


@pytest.mark.parametrize("main, flags, message", [
    (print, ["--stepz=1"], "unknown argument '--stepz=1': did you mean --steps?"),
    (print, ["--k=ten"], "argument --k: ten is not a whole number or none"),
    (print, ["--resume=yes"], "argument --resume: yes: choose true or false, auto"),
    (print, ["--k=0"], "--k=0 must be a number from 1"),
    (lambda cfg: open("no/x"), [], "no/x: No such file or directory"),
    (lambda cfg: __import__("mauve"), [], ": pip install mauve-text"),
    (lambda cfg: launch.machine("cuda:99"), [], "--device=cuda:99 does not work"),
])
def test_bad_input_is_one_line_and_code_2(monkeypatch, capsys, main, flags, message):
    monkeypatch.setitem(sys.modules, "mauve", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    with pytest.raises(SystemExit) as stop:
        launch.run(main, Config)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and re.fullmatch(f"x.py: .*{re.escape(message)}.*\n", err)


@pytest.mark.parametrize("words, message", [
    ("sample --checkpoint=adapter.pt", "adapter.pt has kind = 'dream-adapter'"),
    ("sample --checkpoint=mdlm.pt --out=x.jsonl", "x.jsonl has lines that are not from"),
    ("train --data=x", "x/meta.json is not a complete JSON object"),
    ("train --data=dta", "there is no folder dta"),
    ("train --data=x/best", "no data in x/best, which has no meta.json"),
    ("train --data=data --length=20 --init_from=mdlm.pt", "n_cond .*`train.py stdlib --init_from"),
    ("eval ppl --checkpoint=mdlm.pt --data=data --text=x", "--text does nothing"),
    ("train --data=data --vocab_size=7", "--vocab_size does nothing"),
    ("train --data=data --p_sm=0 --omega_s=0.5", "--omega_s does nothing"),
    ("sample --checkpoint=mdlm.pt --infill=b", "--infill has no ___"),
    ("sample_dream --model=TINY --cache=dual", "--cache does nothing"),
    ("sample_dream --model=TINY --schedule=linear", "--schedule does nothing"),
    ("sample_dream --model=TINY --infill=a___ --prompt=b", "--prompt does nothing"),
    ("sample --checkpoint=mdlm.pt --soft=False --omega_s=0.5", "--omega_s does nothing"),
])
def test_a_bad_file_or_flag_is_refused(tmp_path, monkeypatch, tiny, words, message):
    monkeypatch.chdir(tmp_path)
    data.prepare(["a text of some length"] * 99, "data", data.tokenizer("bytes"))
    save_mdlm("mdlm.pt", random_mdlm(vocab_size=259, mask_id=258, length=20))
    checkpoint.save("adapter.pt", kind="dream-adapter", config={}, model={})
    for name, text in (("x.jsonl", "42"), ("x/meta.json", '{"cut'), ("x/config.json", "{}"),
                       ("x/best/a", "")):
        write_text(name, text)
    refused(message, start, *words.replace("TINY", tiny[0]).split())


def test_printing_ends_no_run(tmp_path):
    code = """
import sys, launch, train
def main(cfg):
    log = launch.Log("log.jsonl", 0, 10, True)
    for step in range(10):
        log.write({"step": step + 1, "omega_s": 0.5})
    print("ω end", file=sys.stderr)
launch.run(main, train.Config)"""
    env = os.environ | {"PYTHONPATH": ROOT, "PYTHONIOENCODING": "cp1252"}
    end, pipe = os.pipe()
    os.close(end)  # nobody reads
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, stdout=pipe,
                          stderr=subprocess.PIPE)
    os.close(pipe)
    assert done.stderr == b"? end\n" and done.returncode == 0
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 10


def test_the_first_signal_is_collected_and_a_second_ctrl_c_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    with launch.signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_a_file_is_replaced_when_the_new_one_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "very/deep/f"
    write_text(path, "old ω")
    with pytest.raises(KeyboardInterrupt), atomic(path) as tmp:
        write_text(tmp, "half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old ω" and os.listdir(path.parent) == ["f"]
    calls, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    write_text(path, "new")
    assert calls == ["fsync", "replace"] and os.listdir(path.parent) == ["f"]


def test_json_lines_survive_a_kill_at_any_byte(tmp_path):
    path, lines = tmp_path / "deep" / "x.jsonl", [{"a": 1}, {"b": "ω"}, {"c": [1.5, None]}]
    assert read_jsonl(path) == []
    append_jsonl(path, *lines[:2])
    append_jsonl(path, lines[2])
    whole = path.read_bytes()
    assert read_jsonl(path) == lines and whole.count(b"\n") == 3
    for size in range(whole.rindex(b"{"), len(whole)):
        path.write_bytes(whole[:size])
        left = lines if size == len(whole) - 1 else lines[:2]  # only the line break is missing
        assert read_jsonl(path) == left
        append_jsonl(path, lines[2])
        assert read_jsonl(path) == [*left, lines[2]]
