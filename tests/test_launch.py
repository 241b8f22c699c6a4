"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import errno
import inspect
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

import checkpoint
import launch
from conftest import refused, start
from launch import append_jsonl, atomic, from_cli, read_jsonl, write_text
from train import Config


@pytest.mark.parametrize("words, fields", [
    ([], {}),
    (["--resume", "--k=None"], dict(resume=True, k=None)),
    (["--compile=false", "--resume", "--steps", "7"], dict(compile=False, resume=True, steps=7)),
    (["--dtype", "bfloat16", "--p_sm=1", "--k=7"], dict(dtype="bfloat16", p_sm=1.0, k=7)),
    (["--data=x=y", "--init_from=", "--omega_b", "-2"], dict(data="x=y", omega_b=-2.0)),
    (["quick", "--steps=2"], dict(steps=2, k=5)),
])
def test_flags_become_typed_fields(words, fields):
    assert repr(from_cli(Config, words, {"quick": dict(steps=1, k=5)})) == repr(Config(**fields))


@dataclass
class Files:
    words: list = ()
    b_h: launch.Share = 0.5


def test_a_list_takes_the_first_words_and_help_is_the_source(capsys):
    presets = {"quick": dict(words=["d"])}
    assert from_cli(Files, ["s3:a b", "c", "--b_h=1"], presets) == Files(["s3:a b", "c"], 1.0)
    assert from_cli(Files, ["quick"], presets) == Files(["d"])
    with pytest.raises(SystemExit, match="0"):
        from_cli(Files, ["a", "--b_h=9", "--help"], presets)
    assert capsys.readouterr().out.startswith(inspect.getsource(Files) + "\npreset quick: {")


def run_with(monkeypatch, main, *flags):
    monkeypatch.setattr(sys, "stdin", None)  # some schedulers close it
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    launch.run(main, Config)


@pytest.mark.parametrize("main, flags, message", [
    (print, ["--step=1"], "unknown argument '--step=1': see --help"),
    (print, ["--k=ten"], "argument --k: ten is not a whole number or none"),
    (print, ["--dtype=half"], "argument --dtype: half is not auto or float32 or bfloat16"),
    (print, ["--p_sm=nan"], "argument --p_sm: nan is not a number (from 0 to 1)"),
    (print, ["--save_every=0"], "argument --save_every: 0 is not a whole number (from 1 to inf)"),
    (lambda cfg: open("no/x"), [], "No such file or directory: 'no/x'"),
    (Mock(side_effect=OSError(errno.ENOSPC, "no room")), [], "no room"),
    (Mock(side_effect=BrokenPipeError(errno.EPIPE, "nobody reads")), [], "nobody reads"),
    (lambda cfg: __import__("mauve"), [], ": pip install mauve-text"),
    (lambda cfg: launch.machine("cuda:99"), [], "--device=cuda:99 does not work"),
])
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


@pytest.mark.parametrize("e", [ValueError("x"), OSError(errno.EIO, "x"), KeyboardInterrupt("x"),
                               ImportError("x"), ModuleNotFoundError("x", name="torch.x")])
def test_all_else_keeps_its_traceback(monkeypatch, e):
    with pytest.raises(type(e), match="x"):
        run_with(monkeypatch, Mock(side_effect=e))


def test_a_file_of_another_kind_or_cut_short_is_refused(tmp_path):
    adapter, meta = str(tmp_path / "adapter.pt"), tmp_path / "meta.json"
    checkpoint.save(adapter, kind="dream-adapter")
    meta.write_text('{"cut')
    refused("adapter.pt has kind = 'dream-adapter'", start, "sample", f"--checkpoint={adapter}")
    refused("meta.json is not a complete JSON object", start, "train", f"--data={tmp_path}")


def test_one_more_update_after_a_signal_then_every_handler_is_back():
    """A second Ctrl-C ends the process. What nohup ignores stays ignored."""
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    here, every = launch.machine("cpu"), {"log": 4, "save": 3, "eval": 0}
    assert [*launch.updates(here, 0, 5, **every)] == [
        (1, {"log"}), (2, set()), (3, {"save"}), (4, {"log"}), (5, {"log", "save"})]
    loop = launch.updates(here, 2, 7, **every)
    assert next(loop) == (3, {"save"})
    signal.raise_signal(signal.SIGHUP)
    assert next(loop) == (4, {"log"})
    signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert next(loop) == (5, {"save"})
    with pytest.raises(SystemExit, match="130"):
        next(loop)
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
