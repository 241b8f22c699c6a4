"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import errno
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

import data
import launch
from conftest import ROOT, refused, start
from launch import append_jsonl, atomic, from_cli, read_jsonl, write_text
from train import PRESETS, Config


@dataclass
class Files:
    words: list = ()
    b_h: launch.Share = 0.5


def test_words_become_typed_fields_and_help_is_the_source(capsys):
    presets = {"quick": dict(steps=1, k=5)}
    for words, fields in (
            ("", {}), ("--resume --k=None", dict(resume=True, k=None)),
            ("--compile=false --resume --steps 7", dict(compile=False, resume=True, steps=7)),
            ("--dtype bfloat16 --p_sm=1 --k=7", dict(dtype="bfloat16", p_sm=1.0, k=7)),
            ("--data=x=y --init_from= --omega_b -2", dict(data="x=y", omega_b=-2.0)),
            ("quick --steps=2", dict(steps=2, k=5))):
        assert repr(from_cli(Config, words.split(), presets)) == repr(Config(**fields))
    presets = {"quick": dict(words=["d"])}
    assert from_cli(Files, ["s3:a b", "c", "--b_h=1"], presets) == Files(["s3:a b", "c"], 1.0)
    assert from_cli(Files, ["quick"], presets) == Files(["d"])
    launch.print_help(Files, presets)
    assert inspect.getsource(Files) + "\npreset quick: {" in capsys.readouterr().out


def run_with(monkeypatch, main, *flags):
    monkeypatch.setattr(sys, "stdin", None)  # some schedulers close it
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    launch.run(main, Config, PRESETS)


@pytest.mark.parametrize("main, flags, message", [
    *((print, [f"--{name}={value}"], f"--{name}: {value} is not") for name, value in (
        ("p_sm", 80), ("p_sm", "nan"), ("k", "ten"), ("dtype", "half"), ("eta_bb", -1),
        ("eval_every", -1), ("save_every", 0))),
    (print, ["--eta_b=1"], "--eta_b: did you mean --eta_bb?"), (print, ["stdlb"], "'stdlb'"),
    (print, ["--mask_id=9"], "--mask_id"),
    (lambda cfg: open("no/x"), [], "no/x: No such file or directory"),
    (Mock(side_effect=OSError(errno.ENOSPC, "no room")), [], "no room"),
    (Mock(side_effect=ConnectionError("no network")), [], "no network"),
    (lambda cfg: __import__("mauve"), [], ": pip install mauve-text"),
    (lambda cfg: launch.machine("cuda:99"), [], "--device=cuda:99 does not work")])
def test_bad_input_is_one_line_and_code_2(monkeypatch, capsys, main, flags, message):
    """Rank 1 first waits, because torchrun ends it if rank 0 has said the same."""
    calls = []
    monkeypatch.setattr(signal, "signal", lambda *words: calls.append(words))
    monkeypatch.setattr(time, "sleep", calls.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setitem(sys.modules, "mauve", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        run_with(monkeypatch, main, *flags)
    err = capsys.readouterr().err
    assert re.fullmatch(f"x.py: .*{re.escape(message)}.*\n", err)
    assert calls == [(signal.SIGTERM, signal.SIG_DFL), 5]


def test_a_script_for_one_process_refuses_to_be_two(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in "data", "examples/sudoku":
        done = subprocess.run([sys.executable, f"{name}.py"], cwd=ROOT, capture_output=True)
        assert done.returncode == 2 and b"start it without torchrun" in done.stderr, name


def test_the_time_left_is_that_of_updates_after_the_first(tmp_path, monkeypatch, capsys):
    clock = iter([0.0, 100.0, 110.0, 118.0])  # the first update takes 100 s, all others 1 s
    monkeypatch.setattr(launch.time, "time", lambda: next(clock))
    log = launch.Log(str(tmp_path / "log.jsonl"), 0, 20, True)
    for step in 1, 11, 19:
        log.write({"step": step})
    assert re.findall(r"(\d\d:\d\d) left", capsys.readouterr().out) == ["00:09", "00:01"]


def test_code_runs_like_a_script_of_its_own(tmp_path, monkeypatch):
    """It can import what lies beside it. Its errors keep their tracebacks."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("from softmask import SoftMask as Ours\n")
    (tmp_path / "mine.py").write_text("import beside\nclass SoftMask(beside.Ours): pass\n")
    assert launch.soft_mask(str(tmp_path / "mine.py")).__name__ == "SoftMask"
    (tmp_path / "wrong.py").write_text("int('x')\n")
    for script, words in ("sample", ()), ("train", ("small",)):
        with pytest.raises(ValueError, match="invalid literal") as error:
            start(script, *words, f"--code={tmp_path}/wrong.py", "--device=cpu")
        assert not isinstance(error.value, launch.Refused)


@pytest.mark.parametrize("raised, seen, message", [
    (KeyboardInterrupt, SystemExit, "130"), (ValueError("x"), ValueError, "x"),
    (OSError(errno.EIO, "x"), OSError, "x")])
def test_ctrl_c_is_130_and_all_else_keeps_its_traceback(monkeypatch, raised, seen, message):
    with pytest.raises(seen, match=message):
        run_with(monkeypatch, Mock(side_effect=raised))


def test_a_field_that_is_missing_has_its_file(tmp_path):
    meta = tmp_path / "meta.json"
    (tmp_path / "train.bin").touch()
    for text, message in (
            ('{"cut', "JSONDecodeError: .*: this is no complete JSON object"),
            ('{"tokenizer": {}}', "has no field 'name'"),
            ('{"tokenizer": "bytes"}', "TypeError"),
            (json.dumps({"tokenizer": dict.fromkeys(data.TOKENIZER, 1)}), "has no field 'train'")):
        meta.write_text(text)
        refused(f"meta.json:? {message}", start, "train", f"--data={tmp_path}")


def test_a_run_ends_with_a_command_to_paste(capsys):
    command = ["python", "sample.py", "--checkpoint=my runs/last.pt"]
    launch.end_run(launch.machine("cpu"), "", command, "mine.py", 3, stopped=0)
    [line] = capsys.readouterr().out.splitlines()
    assert shlex.split(line) == [*command, "--code=mine.py"]


def test_a_signal_is_a_flag_and_then_every_handler_is_back():
    """A second Ctrl-C ends the process. What nohup ignores stays ignored."""
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with launch.Stop() as stop:
        assert stop() == 0
        signal.raise_signal(signal.SIGHUP)
        assert stop() == 0
        signal.raise_signal(signal.SIGINT)
        assert stop() == signal.SIGINT and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert stop() == signal.SIGUSR1
    after = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGHUP, before[1])
    assert after == (before[0], signal.SIG_IGN)


def test_a_file_is_replaced_when_the_new_one_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    path, calls, replace = tmp_path / "very/deep/f", [], os.replace
    write_text(path, "old ω")
    with pytest.raises(KeyboardInterrupt), atomic(path) as tmp:
        write_text(tmp, "half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old ω"
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    write_text(path, "new")
    assert calls == ["fsync", "replace"] and os.listdir(path.parent) == ["f"]
    with atomic(path) as tmp, monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        write_text(path, "of another process")
        assert not os.path.exists(tmp)
        write_text(tmp, "new")
    (path.parent / "last.pt.123.tmp").touch()
    (path.parent / "my.2024.tmp").touch()
    (path.parent / "best").mkdir()
    (path.parent / "best" / "adapter_model.safetensors.123.tmp").touch()
    with launch.lock(path.parent):  # only one process can be here
        assert {*os.listdir(path.parent)} == {"f", "my.2024.tmp", ".lock", "best"}
        assert not os.listdir(path.parent / "best")


def test_json_lines_survive_a_kill_at_any_byte(tmp_path):
    path, lines = tmp_path / "x.jsonl", [{"a": 1}, {"b": "ω"}, {"c": [1.5, None]}]
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
