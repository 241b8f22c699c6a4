"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import errno
import json
import os
import re
import signal
import sys
from unittest.mock import Mock

import pytest

import data
import launch
from conftest import refused, spy
from launch import append_jsonl, atomic, from_cli, read_jsonl, write_text
from train import Config


def test_flags_override_a_preset_and_have_types(capsys):
    presets = {"quick": dict(steps=1, k=5)}
    found = from_cli(Config, "quick --steps 2 --p_sm=1 --k=None --resume".split(), presets)
    assert repr(found) == repr(Config(steps=2, p_sm=1.0, k=None, resume=True))
    found = from_cli(data.Config, ["s3:a b", "c", "--val_docs=1"])
    assert found == data.Config(["s3:a b", "c"], val_docs=1)
    launch.print_help(data.Config, presets)
    assert "val_docs: Size | None = None\n\npreset quick: {" in capsys.readouterr().out


def run_with(monkeypatch, main, *flags):
    monkeypatch.setattr(sys, "stdin", None)  # some schedulers close it
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    launch.run(main, Config)


@pytest.mark.parametrize("main, flags, message", [
    *((print, f"--{name}={value}", f"--{name}: {value} is not") for name, value in (
        ("p_sm", 80), ("p_sm", "nan"), ("k", "ten"), ("dtype", "half"), ("eta_bb", -1),
        ("eval_every", -1), ("save_every", 0))),
    (print, "--eta_b=1", "--eta_b: did you mean --eta_bb?"), (print, "stdlb", "'stdlb'"),
    (print, "--mask_id=9", "--mask_id"),
    (lambda cfg: open("no/x"), "", "no/x: No such file or directory"),
    (Mock(side_effect=OSError(errno.ENOSPC, "no room")), "", "no room"),
    (Mock(side_effect=ConnectionError("no network")), "", "no network"),
    (lambda cfg: __import__("mauve"), "", ": pip install mauve-text"),
    (lambda cfg: launch.machine("cuda:99"), "", "--device=cuda:99 does not work")])
def test_bad_input_is_one_line_and_code_2(monkeypatch, capsys, main, flags, message):
    monkeypatch.setitem(sys.modules, "mauve", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        run_with(monkeypatch, main, *flags.split())
    err = capsys.readouterr().err
    assert re.fullmatch(f"x.py: .*{re.escape(message)}.*\n", err)


@pytest.mark.parametrize("raised, seen, message", [
    (KeyboardInterrupt, SystemExit, "130"), (ValueError("x"), ValueError, "x"),
    (OSError(errno.EIO, "x"), OSError, "x")])
def test_ctrl_c_is_130_and_all_else_keeps_its_traceback(monkeypatch, raised, seen, message):
    with pytest.raises(seen, match=message):
        run_with(monkeypatch, Mock(side_effect=raised))


@pytest.mark.parametrize("text, message", [
    ('{"cut', "JSONDecodeError: .*: this is no complete JSON object"),
    ('{"tokenizer": {}}', "has no field 'name'"), ('{"tokenizer": "bytes"}', "TypeError"),
    (json.dumps({"tokenizer": dict.fromkeys(data.TOKENIZER, 1)}), "has no field 'train'")])
def test_a_field_that_is_missing_has_its_file(tmp_path, text, message):
    (tmp_path / "meta.json").write_text(text)
    refused(f"meta.json:? {message}", data.open_split, tmp_path, "train")


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
    path, folder = tmp_path / "very/deep/f", tmp_path / "very/deep"
    write_text(path, "old ω")
    with pytest.raises(KeyboardInterrupt), atomic(path) as tmp:
        assert str(os.getpid()) in tmp  # another process may write the same file
        write_text(tmp, "half")
        raise KeyboardInterrupt
    assert path.read_text(encoding="utf-8") == "old ω"
    calls = spy(monkeypatch, os, "fsync")
    spy(monkeypatch, os, "replace", 1, lambda: calls.append("replace"))
    write_text(path, "new")
    assert len(calls) == 2 and calls[1] == "replace" and os.listdir(folder) == ["f"]
    for name in "last.pt.123.tmp", "my.2024.tmp", "best/adapter_model.safetensors.123.tmp":
        write_text(folder / name, "")
    with launch.lock(folder):  # only one process can be here: large halves are of dead ones
        assert {*os.listdir(folder)} == {"f", "my.2024.tmp", ".lock", "best"}
        assert not os.listdir(folder / "best")


def test_a_closed_terminal_ends_no_run(tmp_path, monkeypatch):
    """Nor does the end of `train.py | head`. From then on, stdout goes nowhere."""
    monkeypatch.setattr(os, "dup2", calls := Mock())
    monkeypatch.setattr(launch.tqdm, "write", Mock(side_effect=BrokenPipeError))
    launch.Log(tmp_path / "log.jsonl", 0, 1, True).write({"step": 1})
    assert calls.called and len(read_jsonl(tmp_path / "log.jsonl")) == 1


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


def test_code_without_a_soft_mask_of_its_own_is_refused(tmp_path):
    """Else the paper's rule would silently run in its place."""
    path = tmp_path / "mine.py"
    for text in "", "from softmask import SoftMask\n":
        path.write_text(text)
        refused("defines no SoftMask of its own", launch.soft_mask_class, str(path))
