# SPDX-License-Identifier: MIT
"""launch.py: flags, the machine, ranks, signals, files that survive, the log of both trainers."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

import launch
from conftest import refused
from launch import Log, append_jsonl, atomic, from_cli, read_json, read_jsonl, write_text

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Config:
    steps: int = 3    # how many
    rate: float = 0.1
    name: str = "a"
    fast: bool = False
    k: int | None = 3


@dataclass
class More(Config):
    perhaps: bool | None = None  # or not


# ---- the command line


def test_flags_become_typed_fields():
    assert from_cli(Config, []) == Config()
    argv = ["--steps=7", "--rate=1e-3", "--name=x=y", "--fast", "--k=none"]
    assert from_cli(Config, argv) == Config(7, 1e-3, "x=y", True, None)
    assert from_cli(Config, ["--fast=false", "--k=5"]) == Config(k=5)
    assert from_cli(More, ["--perhaps", "--steps=2"]) == More(steps=2, perhaps=True)
    presets = {"quick": dict(steps=1, rate=0.5)}
    assert from_cli(Config, ["quick", "--steps=2"], presets) == Config(2, 0.5)


def test_bad_flags_are_refused():
    for argv, message in ((["--stepz=1"], "unknown argument '--stepz=1'.*steps"),
                          (["--name=a", "stray"], "unknown argument 'stray'"),
                          (["--steps=1.5"], "--steps=1.5 is not of type int"),
                          (["--k=three"], "--k=three is not of type int"),
                          (["--fast=maybe"], "--fast=maybe is not true or false"),
                          (["--steps"], "--steps needs a value"),
                          (["fast"], "unknown preset 'fast'")):
        refused(message, from_cli, Config, argv, {"quick": {}})


def test_help_is_the_commented_class(capsys):
    with pytest.raises(SystemExit) as stop:
        from_cli(More, ["--help"], {"quick": dict(steps=1)})
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "steps: int = 3    # how many" in out and "preset quick" in out
    assert "perhaps: bool | None = None  # or not" in out


def test_run_says_bad_input_in_one_line_and_exits_2(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--steps=no"])
    with pytest.raises(SystemExit) as stop:
        launch.run(lambda cfg: None, Config)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "x.py: --steps=no is not of type int\n"


# ---- the machine, ranks and signals


def test_machine_takes_what_is_there_and_refuses_what_is_not(monkeypatch, capsys):
    assert launch.machine("cpu", "auto") == (0, 1, torch.device("cpu"), None)
    assert launch.machine("cpu", "bfloat16")[3] == torch.bfloat16
    assert capsys.readouterr().out == ""
    assert launch.machine("cpu", "float16")[3] is None  # it becomes float32, and says so
    assert capsys.readouterr().out == "--dtype=float16 cannot be had here: using float32\n"
    for name, value in dict(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1).items():
        monkeypatch.setenv(name, str(value))
    assert launch.machine("cpu", "auto")[:2] == (3, 4)
    for device, dtype, message in (("abacus", "auto", "--device=abacus for local process 1"),
                                   ("cuda:9", "auto", "--device=cuda:9 .*--device=cpu"),
                                   ("cpu", "int4", "--dtype=int4: use auto")):
        refused(message, launch.machine, device, dtype)


TWO_RANKS = """
import os, sys, torch
sys.path.insert(0, {root!r})
import launch
rank, world, device, _ = launch.machine("cpu", "auto")
launch.join(world, device)
log = launch.Log({path!r}, 0, 2, rank == 0)
log.begin()
log.add(nll=torch.tensor(1.0 + rank), masks=2)
sums, updates, _, norm = log.collect(1, torch.tensor(0.5))
log.write({{"step": 1, "rank": rank, **sums}})
assert (sums, updates, norm) == ({{"nll": 3.0, "masks": 4.0}}, 1, 0.5)
assert launch.any_rank(15 * rank) == 15
launch.leave(world, "both are here", 3)
"""


def test_two_ranks_share_sums_and_decisions_and_leave_together(tmp_path):
    path = str(tmp_path / "log.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port)}
    argv = [sys.executable, "-c", TWO_RANKS.format(root=ROOT, path=path)]
    ranks = [subprocess.Popen(argv, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE)
             for rank in range(2)]
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == [b"both are here\n", b""]
    assert [rank.returncode for rank in ranks] == [3, 3]
    assert [line["rank"] for line in read_jsonl(path)] == [0]


def test_signals_are_collected_and_only_a_second_ctrl_c_ends_the_process():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with launch.signals() as caught:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            assert signal.getsignal(number) != signal.SIG_DFL  # or this would end pytest
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# ---- files


def test_a_crash_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "deep" / "f"
    write_text(path, "old ω")
    with pytest.raises(ZeroDivisionError):
        with atomic(path) as tmp:
            with open(tmp, "w") as f:
                f.write("half")
            raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "old ω" and os.listdir(path.parent) == ["f"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full: a real full disk")
def test_a_full_disk_is_refused_and_keeps_the_old_file(tmp_path):
    """The real error, from a device that is always full."""
    path = tmp_path / "f"
    write_text(path, "old")
    os.symlink("/dev/full", f"{path}.tmp")
    refused("could not write .*No space left.*free some space", write_text, path, "new" * 10**6)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["f"]
    refused("could not write /dev/full.*No space left", append_jsonl, "/dev/full", {"a": 1})


def test_read_json_wants_an_object(tmp_path):
    path = tmp_path / "config.json"
    for text, message in ((None, "does not exist"), ("{", "is not JSON"), ("[" * 10**5, "not JSON"),
                          ("[1]", "holds no JSON object but a list")):
        if text is not None:
            path.write_text(text)
        refused(message, read_json, path)
    path.write_text('{"a": "ω"}', encoding="utf-8")
    assert read_json(path) == {"a": "ω"}


def test_json_lines_survive_a_kill_at_any_byte(tmp_path):
    path, lines = tmp_path / "deep" / "x.jsonl", [{"a": 1}, {"b": "ω"}, {"c": [1.5, None]}]
    assert read_jsonl(path) == []
    append_jsonl(path, *lines[:2])
    append_jsonl(path, lines[2])
    whole = path.read_bytes()
    assert read_jsonl(path) == lines and whole.count(b"\n") == 3
    start = whole.rindex(b"{")
    for size in range(start, len(whole)):
        left = lines if size == len(whole) - 1 else lines[:2]  # only the end of the line is missing
        for repair in (False, True):
            path.write_bytes(whole[:size])
            assert read_jsonl(path, repair=repair) == left
            cut = repair and len(left) == 2
            assert path.read_bytes() == (whole[:start] if cut else whole[:size])
        append_jsonl(path, lines[2])
        assert read_jsonl(path) == [*left, lines[2]]


def test_other_broken_lines_are_refused_or_skipped(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, line in (('{"a": 1}\n{"b": \n{"c": 2}\n', 2), ("my notes", 1), ("my notes\n", 1),
                       ('{"a": 1}\n\n', 2)):
        path.write_text(text)
        refused(f"line {line} of .*x.jsonl is not JSON", read_jsonl, path, repair=True)
        assert path.read_text() == text
    path.write_text('{"a": 1}\n{"b": \n{"c": 2}\n{"d"')
    assert read_jsonl(path, skip_broken=True) == [{"a": 1}, {"c": 2}]
    refused("cannot be read", read_jsonl, tmp_path)
    refused("could not write", append_jsonl, tmp_path, {"a": 1})


# ---- the log


def test_log_begins_where_the_run_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    text = '{"step": 1}\n{"st\n{"step": 2}\n3\n{"note": 1}\n{"step": 3}\n{"step": 4'
    for start, kept in ((2, [{"step": 1}, {"step": 2}]), (0, [])):
        path.write_text(text)
        Log(str(path), start, 9, master=False).begin()
        assert path.read_text() == text
        Log(str(path), start, 9, master=True).begin()
        assert read_jsonl(path) == kept


def test_log_sums_until_it_is_collected(tmp_path, capsys):
    log = Log(str(tmp_path / "log.jsonl"), 4, 10, master=True)
    for _ in range(3):
        log.add(nll=torch.tensor(2.0), masks=5)
    with log.pause():
        before = log.last
    assert log.last > before  # time in a pause is not counted
    sums, updates, seconds, norm = log.collect(7, torch.tensor(1.5))
    assert (sums, updates, norm) == ({"nll": 6.0, "masks": 15.0}, 3, 1.5) and seconds > 0
    log.add(nll=torch.tensor(1.0))
    assert log.collect(8, torch.tensor(1.5))[:2] == ({"nll": 1.0}, 1)
    log.write({"step": 8, "loss": 0.25})
    assert capsys.readouterr().out == ""
    log.print()
    log.print()  # nothing new
    out = capsys.readouterr().out
    assert out.startswith("update 8 of 10  loss 0.25  ") and out.count("\n") == 1
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line["step"] == 8 and line["loss"] == 0.25 and line["seconds"] >= 0


def test_log_refuses_what_is_not_a_number(tmp_path):
    for nll, norm in ((math.nan, 1.0), (1.0, math.inf)):
        log = Log(str(tmp_path / "log.jsonl"), 0, 10, master=True)
        log.add(nll=torch.tensor(nll))
        refused("not a number by update 3: --resume goes back", log.collect, 3, torch.tensor(norm))


def test_a_log_line_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    log = Log(str(tmp_path), 0, 10, master=True)  # a folder instead of a file
    log.add(nll=1.0)
    log.collect(1, torch.tensor(1.0))
    log.write({"step": 1})
    assert "log line lost: could not write" in capsys.readouterr().out
