# SPDX-License-Identifier: MIT
"""launch.py: flags, the machine, ranks, signals, files that survive, the log of both trainers."""

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from textwrap import indent

import pytest
import torch

import launch
from conftest import ROOT, Killed, full_disk, kill, refused, torchrun
from launch import Log, append_jsonl, atomic, from_cli, read_json, read_jsonl, write_text
from train import Config

SCRIPT = """
import dataclasses, sys, time, torch
import launch
def main(cfg):
{body}
launch.run(main, dataclasses.make_dataclass("Config", []))
"""


def script(body, stdout=subprocess.PIPE, **env):
    """A process that runs a script with this main."""
    code = SCRIPT.format(body=indent(body, "    "))
    return subprocess.Popen([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE,
                            env=os.environ | {"PYTHONPATH": ROOT} | env)


# ---- the command line


def test_flags_become_typed_fields():
    assert from_cli(Config, []) == Config()
    argv = ["--steps=7", "--eta_bb=1e-3", "--data=x=y", "--show", "--k=none", "--compile=false"]
    assert from_cli(Config, argv) == Config(steps=7, eta_bb=1e-3, data="x=y", show=True, k=None,
                                            compile=False)
    for text, value in (("", True), ("=auto", "auto"), ("=True", True), ("=0", False)):
        assert from_cli(Config, ["--resume" + text]).resume == value
    spaced = ["quick", "--steps", "2", "--show", "--ema", "1", "--data", "-x", "--resume", "auto"]
    assert from_cli(Config, spaced, {"quick": dict(steps=1, k=5)}) == Config(
        steps=2, k=5, show=True, ema=1.0, data="-x", resume="auto")


def test_bad_flags_are_refused():
    for word, message in (("-steps", "did you mean --steps[?]"),
                          ("--stepz=1", "'--stepz=1': did you mean --steps[?] --help shows"),
                          ("--steps=1.5", "--steps=1.5 is not of type int"),
                          ("--resume=maybe", "--resume=maybe is not true or false or auto"),
                          ("--clip=inf", "--clip=inf must be at most 1000000000.0"),
                          ("--clip=nan", "--clip=nan must be a number"),
                          ("--steps", "--steps needs a value"),
                          ("fast", "unknown preset 'fast': use quick")):
        refused(message, from_cli, Config, [word], {"quick": {}})
    refused("unknown argument 'stray': --help shows", from_cli, Config, ["--show", "stray"])


def test_help_is_the_commented_class(capsys):
    with pytest.raises(SystemExit) as stop:
        from_cli(Config, ["--help"], {"quick": dict(steps=1)})
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "preset quick" in out and "# of the norm over θ and ω together" in out
    assert out.index("n_layer: ") < out.index("steps: ")  # of the parent


def run(monkeypatch, main, *flags):
    """The exit code of a script with this main."""
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    with pytest.raises(SystemExit) as stop:
        launch.run(main, Config)
    return stop.value.code


def test_run_says_in_one_line_what_is_wrong(monkeypatch, capsys):
    def ctrl_c(cfg):
        raise KeyboardInterrupt
    for main, flags, code, said in (
            (print, ["--k=0"], 2, "--k=0 must be at least 1"),
            (lambda cfg: open("no/x"), [], 2, "[Errno 2] No such file or directory: 'no/x'"),
            (lambda cfg: torch.empty(10**15), [], 2, "not enough memory ("),
            (ctrl_c, [], 130, "stopped by Ctrl-C")):
        assert run(monkeypatch, main, *flags) == code
        err = capsys.readouterr().err
        assert err.startswith(f"x.py: {said}") and err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a defect of the code keeps its traceback
        run(monkeypatch, lambda cfg: 1 / 0)


def test_under_torchrun_a_refusal_is_said_once(monkeypatch, capsys):
    """Rank 0 says it at once. The others wait, and torchrun ends them meanwhile."""
    monkeypatch.setattr(time, "sleep", lambda seconds: kill())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of Ctrl-C, in this very process
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run(monkeypatch, print, "--k=0") == 2
    assert capsys.readouterr().err.count("--k=0 must be") == 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(Killed):
        run(monkeypatch, print, "--k=0")
    assert capsys.readouterr().err == ""


def test_output_that_cannot_be_written_does_not_end_a_script():
    """Nobody reads it any more, the disk is full, the terminal does not know the letter."""
    body = "for i in range(10000): print('ω', i)\nprint('ω end', file=sys.stderr)"
    process = script(body, PYTHONIOENCODING="cp1252")
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=100)[1] == b"? end\n" and process.returncode == 0
    if os.path.exists("/dev/full"):
        process = script(body, open("/dev/full", "w"), PYTHONIOENCODING="cp1252")
        err = process.communicate(timeout=100)[1]
        assert err.startswith(b"? end\n-c: a part of what it printed is lost ([Errno 28]")
        assert process.returncode == 1


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
rank, world, device, _ = launch.machine("cpu", "auto")
launch.join(world, device)
log = launch.Log("log.jsonl", 0, 2, rank == 0)
log.begin()
log.add(nll=torch.tensor(1.0 + rank), masks=2)
sums, updates, _, norm = log.collect(1, torch.tensor(0.5))
log.write({"step": 1, "rank": rank, **sums})
assert (sums, updates, norm) == ({"nll": 3.0, "masks": 4.0}, 1, 0.5)
assert launch.any_rank(15 * rank) == 15
launch.leave(world, "both are here", 3)
"""


def test_two_ranks_share_sums_and_decisions_and_leave_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [script(TWO_RANKS, RANK=str(rank), WORLD_SIZE="2", OMP_NUM_THREADS="1",
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == [b"both are here\n", b""]
    assert [rank.returncode for rank in ranks] == [3, 3]
    assert [line["rank"] for line in read_jsonl("log.jsonl")] == [0]


def test_signals_are_collected_and_only_a_second_ctrl_c_ends_the_process():
    """A signal that is ignored from outside, as SIGHUP under nohup, stays ignored."""
    term, hangup, ctrl_c = numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
    outside = [signal.getsignal(number) for number in numbers]
    for ignored in True, False:
        signal.signal(hangup, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.signal(ctrl_c, signal.default_int_handler)
        before = [signal.getsignal(number) for number in numbers]
        with launch.signals() as caught:
            for number in (term, term, hangup, ctrl_c):
                assert signal.getsignal(number) != signal.SIG_DFL  # or this would end pytest
                os.kill(os.getpid(), number)
            assert caught == [term, term, *[hangup] * (not ignored), ctrl_c]
            assert signal.getsignal(ctrl_c) == signal.SIG_DFL
        assert [signal.getsignal(number) for number in numbers] == before
    for number, handler in zip(numbers, outside):
        signal.signal(number, handler)


# ---- files


def test_one_process_at_a_time_has_the_lock_until_it_dies(tmp_path):
    """What it leaves is removed by the next, but nothing else is."""
    folder = tmp_path / "run"
    best = str(folder / "best" / "w")
    process = script(f"with launch.lock({str(folder)!r}), launch.atomic({best!r}) as tmp:\n"
                     f"    open(tmp, 'w').close()\n    print('ready')\n    time.sleep(100)")
    assert process.stdout.readline() == b"ready\n"
    refused("another process is writing into .*run: wait", launch.lock(folder).__enter__)
    [left] = os.listdir(folder / "best")
    assert left.endswith(".tmp")
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


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("replace") or replace(*paths))
    write_text(tmp_path / "f", "text")
    assert calls == ["fsync", "replace"]


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


def test_a_full_disk_is_refused_and_keeps_the_old_file(tmp_path, monkeypatch):
    """The real error, from the kernel. On a read-only disk, a removal is refused, too."""
    path, lines = tmp_path / "f", tmp_path / "lines"
    write_text(path, "old")
    append_jsonl(lines, 1)
    with full_disk():
        refused("could not write .*free some space", write_text, path, "new")
        refused("could not write .*the same command goes on", append_jsonl, lines, 2)
        assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["f", "lines"]
        monkeypatch.setattr(os, "remove", os.rmdir)
        refused("could not write .*File too large", write_text, path, "new")
    assert path.read_text() == "old" and read_jsonl(lines) == [1]


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
    path.write_text('{"step": 2, "seconds": 60}\n')
    log = Log(str(path), 2, 9, master=True)
    log.begin()
    log.write({"step": 3})  # its time is that of the whole run
    assert 60 < read_jsonl(path)[1]["seconds"] < 90


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
    for stream, seconds in ((io.StringIO(), 30), (Terminal(), 0.1)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(launch.progress(range(3))) == [0, 1, 2] and "3/3" in stream.getvalue()
        assert launch.progress([]).mininterval == seconds


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


def test_two_ranks_refuse_once():
    """One sentence, and then torchrun's report of rank 0, which ended with 2."""
    done = torchrun("sample.py", "--checkpoint=nowhere.pt", "--device=cpu")
    assert done.stderr.count("sample.py: no checkpoint at nowhere.pt") == 1
    assert done.returncode and "exitcode  : 2 (" in done.stderr
