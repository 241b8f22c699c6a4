# SPDX-License-Identifier: MIT
"""launch.py: flags, the machine, ranks, signals, files that survive, the log of both trainers."""

import errno
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch

import launch
from conftest import ROOT, full_disk, refused, torchrun
from launch import Log, append_jsonl, atomic, from_cli, read_json, read_jsonl, write_text


@dataclass
class Config:
    steps: int = 3    # how many
    rate: launch.Positive = 0.1
    name: str = "a"
    fast: bool = False
    k: launch.Size | None = 3
    resume: bool | Literal["auto"] = False


@dataclass
class More(Config):
    perhaps: bool | None = None  # or not


# ---- the command line


def test_flags_become_typed_fields():
    assert from_cli(Config, []) == Config()
    argv = ["--steps=7", "--rate=1e-3", "--name=x=y", "--fast", "--k=none"]
    assert from_cli(Config, argv) == Config(7, 1e-3, "x=y", True, None)
    assert from_cli(Config, ["--fast=false", "--k=5"]) == Config(k=5)
    for text, value in (("", True), ("=auto", "auto"), ("=True", True), ("=0", False)):
        assert from_cli(Config, ["--resume" + text]).resume == value
    assert from_cli(More, ["--perhaps", "--steps=2"]) == More(steps=2, perhaps=True)
    presets = {"quick": dict(steps=1, rate=0.5)}
    assert from_cli(Config, ["quick", "--steps=2"], presets) == Config(2, 0.5)
    spaced = ["quick", "--steps", "2", "--fast", "--rate", "1", "--name", "-x", "--resume", "auto"]
    assert from_cli(Config, spaced, presets) == Config(2, 1, "-x", True, resume="auto")


def test_bad_flags_are_refused():
    for argv, message in ((["-steps", "3"], "did you mean --steps[?]"),
                          (["--stepz=1"], "'--stepz=1': did you mean --steps[?] --help shows"),
                          (["--fast", "stray"], "unknown argument 'stray': --help shows"),
                          (["--steps=1.5"], "--steps=1.5 is not of type int"),
                          (["--fast=maybe"], "--fast=maybe is not true or false$"),
                          (["--resume=maybe"], "--resume=maybe is not true or false or auto"),
                          (["--rate=inf"], "--rate=inf must be at most 1000000000.0"),
                          (["--rate=nan"], "--rate=nan must be at least 1e-06"),
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


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import launch
from dataclasses import dataclass
import torch
@dataclass
class Config:
    steps: launch.Size = 3
def main(cfg):
{body}
launch.run(main, Config)
"""


def script(folder, body, *argv, **kwargs):
    """A process that runs a script with this main."""
    path = folder / "x.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(SCRIPT.format(root=ROOT, body=lines), encoding="utf-8")
    return subprocess.Popen([sys.executable, str(path), *argv], stderr=subprocess.PIPE, **kwargs)


def test_run_says_in_one_line_what_is_wrong(monkeypatch, capsys):
    def ctrl_c(cfg):
        raise KeyboardInterrupt
    for main, flags, code, said in (
            (print, ["--k=0"], 2, "--k=0 must be at least 1"),
            (lambda cfg: open("no/x"), [], 2, "[Errno 2] No such file or directory: 'no/x'"),
            (lambda cfg: torch.empty(10**15), [], 2, "not enough memory ("),
            (ctrl_c, [], 130, "stopped by Ctrl-C")):
        monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
        with pytest.raises(SystemExit) as stop:
            launch.run(main, Config)
        err = capsys.readouterr().err
        assert err.startswith(f"x.py: {said}") and err.count("\n") == 1 and stop.value.code == code
    with pytest.raises(ZeroDivisionError):  # a defect of the code keeps its traceback
        launch.run(lambda cfg: 1 / 0, Config)


def test_output_that_cannot_be_written_does_not_end_a_script(tmp_path):
    """Nobody reads it any more, the disk is full, the terminal does not know the letter."""
    body = f"for i in range(10000): print('ω', i)\nopen({str(tmp_path / 'end')!r}, 'w').close()"
    for case in "pipe", "disk", "letter":
        kwargs = {"stdout": subprocess.PIPE}
        if case == "disk":
            if not os.path.exists("/dev/full"):
                continue
            kwargs["stdout"] = open("/dev/full", "w")
        process = script(tmp_path, body, env=os.environ | {"PYTHONIOENCODING": "cp1252"}, **kwargs)
        if case == "pipe":
            process.stdout.close()
            process.stdout = None
        out, err = process.communicate(timeout=60)
        assert os.path.exists(tmp_path / "end"), err
        os.remove(tmp_path / "end")
        if case == "disk":
            assert process.returncode == 1 and b"what it printed is lost ([Errno 28]" in err
        else:
            assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"? 0\n? 1\n")


def test_under_torchrun_a_refusal_is_said_once(tmp_path):
    script(tmp_path, "raise launch.Refused('no such thing')").communicate(timeout=60)
    done = torchrun(tmp_path / "x.py", ranks=3)
    assert done.returncode == 1 and done.stderr.count("x.py: no such thing\n") == 1


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
    for device, dtype, message in (("abacus", "auto", "--device=abacus: use auto, cuda, "),
                                   ("mps", "auto", "process 1, .* has 0 of it: use --device=cpu"),
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
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            assert signal.getsignal(number) != signal.SIG_DFL  # or this would end pytest
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_signals_ignored_from_outside_stay_ignored():
    """nohup starts a process like this."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch.signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- files


def test_goes_on_only_where_that_is_meant(tmp_path):
    last = str(tmp_path / "run" / "last.pt")
    assert [launch.goes_on(last, resume, False) for resume in (False, True, "auto")] == [
        False, True, False]
    write_text(last, "")
    assert [launch.goes_on(last, resume, True) for resume in (False, True, "auto")] == [
        False, True, True]
    refused("run already holds a run: --resume goes on", launch.goes_on, last, False, False)


def test_one_process_at_a_time_has_the_lock_until_it_dies(tmp_path):
    """What it leaves is removed by the next, but nothing else is."""
    folder = tmp_path / "run"
    best = str(folder / "best" / "w")
    body = (f"with launch.lock({str(folder)!r}), launch.atomic({best!r}) as t:\n"
            f"    open(t, 'w').close()\n    print('ready')\n    time.sleep(100)")
    process = script(tmp_path, body, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    refused("another process is writing into .*run: wait", launch.lock(folder).__enter__)
    left = os.listdir(folder / "best")
    assert len(left) == 1 and left[0].endswith(".tmp")
    process.kill()
    process.communicate()
    write_text(folder / "mine.tmp", "")
    for _ in range(2):  # it is free again after the block
        with launch.lock(folder):
            assert os.listdir(folder / "best") == []
    assert sorted(os.listdir(folder)) == [".lock", "best", "mine.tmp"]


def test_a_file_is_whole_after_a_crash_and_of_one_of_two_writers(tmp_path):
    path = tmp_path / "deep" / "f"
    write_text(path, "old ω")
    with pytest.raises(ZeroDivisionError):
        with atomic(path) as tmp:
            with open(tmp, "w") as f:
                f.write("half")
            raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "old ω" and os.listdir(path.parent) == ["f"]
    with atomic(path) as one, atomic(path) as two:
        for tmp, text in ((one, "one" * 1000), (two, "two")):
            with open(tmp, "w") as f:
                f.write(text)
    assert path.read_text() == "one" * 1000 and os.listdir(path.parent) == ["f"]


def test_links_are_followed_and_only_files_are_written(tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk" / "f", tmp_path / "link")
    write_text(tmp_path / "link", "1\n")
    append_jsonl(tmp_path / "link", 2)
    assert os.path.islink(tmp_path / "link") and read_jsonl(tmp_path / "disk" / "f") == [1, 2]
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/null", tmp_path / "null")
    for path in tmp_path / "pipe", tmp_path / "null", "/dev/null", tmp_path:
        for write in (partial(write_text, path, "x"), partial(append_jsonl, path, 1),
                      partial(read_jsonl, path, repair=True)):
            refused("could not write .*, a folder, device or pipe", write)
    assert not os.path.isfile("/dev/null") and sorted(os.listdir(tmp_path)) == [
        "disk", "link", "null", "pipe"]


def test_a_read_only_disk_is_refused(tmp_path, monkeypatch):
    """There even the removal of a file that does not exist is an error of its own."""
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    write_text(tmp_path / "f", "old")
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "remove", refuse)
    refused("could not write .*Read-only file system", write_text, tmp_path / "f", "new")
    monkeypatch.undo()
    assert (tmp_path / "f").read_text() == "old"


def test_a_full_disk_is_refused_and_keeps_the_old_file(tmp_path):
    """The real error, from the kernel."""
    path, lines = tmp_path / "f", tmp_path / "lines"
    write_text(path, "old")
    append_jsonl(lines, 1)
    with full_disk():
        refused("could not write .*free some space", write_text, path, "new")
        refused("could not write .*the same command goes on", append_jsonl, lines, 2)
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["f", "lines"]
    assert read_jsonl(lines) == [1]


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


class Terminal(io.StringIO):
    isatty = lambda self: True


def test_a_terminal_has_a_bar_with_the_latest_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    log = Log(str(tmp_path / "log.jsonl"), 1, 1200, master=True)
    updates = log.updates()
    for step, bound in zip(updates, ({"val_soft": 2.0}, {})):
        log.collect(step + 1, torch.tensor(1.0))
        log.write({"step": step + 1, "loss": 0.5, "lr": 0.1} | bound)
        log.print()
    assert "\n" not in sys.stdout.getvalue()
    *_, last = sys.stdout.getvalue().split("\r")
    assert "of 1,200 |" in last and last.rstrip().endswith("left  loss 0.5  val_soft 2")
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 2


def test_a_file_gets_few_pictures_of_a_bar(monkeypatch):
    for stream, pictures in ((io.StringIO(), 2), (Terminal(), 4)):
        monkeypatch.setattr(sys, "stderr", stream)
        for _ in launch.progress(range(3)):
            time.sleep(0.11)
        assert stream.getvalue().count("\r") <= pictures + 1 and "3/3" in stream.getvalue()
    assert stream.getvalue().count("\r") >= 4


def test_times_in_words():
    words = "90 s", "3.0 min", "60.0 min", "2.5 h", "48.0 h", "237.5 days"
    times = 90, 180, 3600, 9000, 172799, 342_000 * 60
    assert tuple(map(launch.duration, times)) == words


def test_log_refuses_what_is_not_a_number(tmp_path):
    for nll, norm in ((math.nan, 1.0), (1.0, math.inf)):
        log = Log(str(tmp_path / "log.jsonl"), 0, 10, master=True)
        log.add(nll=torch.tensor(nll))
        refused("not a number by update 3: start again", log.collect, 3, torch.tensor(norm))


def test_a_log_line_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    log = Log(str(tmp_path), 0, 10, master=True)  # a folder instead of a file
    log.add(nll=1.0)
    log.collect(1, torch.tensor(1.0))
    log.write({"step": 1})
    assert "log line lost: could not write" in capsys.readouterr().out
