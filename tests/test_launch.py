"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import math
import os
import signal
import subprocess
import sys
import time
from textwrap import indent

import pytest
import torch

import launch
from conftest import ROOT, refused
from launch import Log, append_jsonl, atomic, from_cli, read_jsonl, write_text
from train import Config

SCRIPT = """
import dataclasses, sys, time, torch
import launch
def main(cfg):
{body}
launch.run(main, dataclasses.make_dataclass("Config", []))
"""


def script(body, **env):
    """A process that runs a script with this main."""
    code = SCRIPT.format(body=indent(body, "    "))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ROOT} | env)


# ---- the command line


@pytest.mark.parametrize("words, fields", [
    ([], {}),
    (["--resume", "--k=None"], dict(resume=True, k=None)),
    (["--resume=auto", "--compile=false"], dict(resume="auto", compile=False)),
    (["--show", "--seed=3"], dict(show=True, seed=3)),
    (["--resume", "auto", "--show", "--steps", "7"], dict(resume="auto", show=True, steps=7)),
    (["--data=x=y", "--variant=", "--omega_b", "-2"], dict(data="x=y", variant="", omega_b=-2.0)),
    (["quick", "--steps=2"], dict(steps=2, k=5)),
])
def test_flags_become_typed_fields(words, fields):
    assert repr(from_cli(Config, words, {"quick": dict(steps=1, k=5)})) == repr(Config(**fields))


def test_words_before_the_flags_are_a_preset_or_paths():
    read = lambda *words: from_cli(Config, words, {"quick": dict(steps=1)}, paths="data")
    assert read("a", "b/", "--steps=2") == Config(data=os.pathsep.join(("a", "b/")), steps=2)
    assert read("quick", "--seed=3") == Config(steps=1, seed=3) and read() == Config()
    for words in ("quick", "a"), ("--seed=3", "a"):
        refused("unknown argument 'a': the first word may be quick$", read, *words)
    assert read("quick", "--seed=3", "--k=5").flags == {"seed", "k"}  # and no field of the preset


def test_help_is_the_commented_class(capsys):
    with pytest.raises(SystemExit):
        from_cli(Config, ["--help"], {"quick": dict(steps=1)})
    out = capsys.readouterr().out
    assert "preset quick" in out and "# largest gradient norm, over θ and ω together" in out


def needs_a_package(cfg):
    raise ModuleNotFoundError("No module named 'mauve'", name="mauve")


@pytest.mark.parametrize("main, flags, message", [
    (print, ["--stepz=1"], "unknown argument '--stepz=1': did you mean --steps?"),
    (print, ["--lr=1"], "unknown argument '--lr=1': did you mean --eta_bb?"),
    (print, ["--steps"], "argument --steps: expected one argument"),
    (print, ["--steps=1.5"], "argument --steps: 1.5 is not int"),
    (print, ["--resume=maybe"], "argument --resume: maybe is not "),
    (print, ["--k=0"], "--k=0 must be a number from 1 to"),
    (lambda cfg: open("no/x"), [], "[Errno 2] No such file or directory: 'no/x'"),
    (needs_a_package, [], "No module named 'mauve': pip install mauve-text\n"),
    (lambda cfg: launch.machine("tpu"), [], "--device=tpu does not work here (RuntimeError: "),
    (lambda cfg: launch.machine("cuda:99"), [], "--device=cuda:99 does not work here ("),
])
def test_bad_input_is_one_line_and_an_exit_code(monkeypatch, capsys, main, flags, message):
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    with pytest.raises(SystemExit) as stop:
        launch.run(main, Config)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith(f"x.py: {message}") and err.count("\n") == 1


def test_printing_ends_no_run(tmp_path):
    """Nobody reads it any more, and the terminal does not know the letter."""
    body = f"""
log = launch.Log({str(tmp_path / "log.jsonl")!r}, 0, 10_000, True)
for step in range(10_000):
    log.collect(torch.tensor(1.0))
    log.write({{"step": step + 1, "omega_s": 0.5}})
print('ω end', file=sys.stderr)"""
    process = script(body, PYTHONIOENCODING="cp1252")
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=100)[1] == b"? end\n" and process.returncode == 0
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 10_000


# ---- signals


def test_signals_are_collected_and_only_a_second_ctrl_c_ends_the_process():
    outside = signal.getsignal(signal.SIGTERM)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # & ignores it
    with launch.signals() as caught:
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGTERM:
            assert signal.getsignal(number) != signal.SIG_DFL  # or this would end pytest
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.signal(signal.SIGINT, handler) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == outside


def test_ctrl_c_is_one_line_and_leaves_no_half_a_file(tmp_path):
    body = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # & ignores it
with launch.atomic({str(tmp_path / "f")!r}) as tmp:
    open(tmp, "w").close()
    print("ready")
    time.sleep(100)"""
    process = script(body)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=100)[1] == b"-c: stopped by Ctrl-C\n"
    assert process.returncode == 130 and not os.listdir(tmp_path)


# ---- files


def test_one_process_has_the_lock_until_it_is_killed(tmp_path):
    folder = str(tmp_path / "run")
    process = script(f"with launch.lock({folder!r}):\n    print('ready')\n    time.sleep(100)")
    assert process.stdout.readline() == b"ready\n"
    refused("another process is writing into .*run .*: wait", launch.lock(folder).__enter__)
    process.kill()
    process.communicate()
    for _ in range(2):  # it is free again after the block
        with launch.lock(folder):
            pass


def test_a_file_is_replaced_when_the_new_one_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "f"
    write_text(path, "old ω")
    with pytest.raises(ZeroDivisionError):
        with atomic(path) as tmp:
            with open(tmp, "w") as f:
                f.write("half")
            raise ZeroDivisionError
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
        left = lines if size == len(whole) - 1 else lines[:2]  # only the end of the line is missing
        assert read_jsonl(path) == left
        append_jsonl(path, lines[2])
        assert read_jsonl(path) == [*left, lines[2]]


# ---- the log


def test_a_resumed_log_has_no_line_of_an_update_that_is_made_again(tmp_path):
    """Five updates were logged. The last checkpoint is of update 2."""
    path = str(tmp_path / "log.jsonl")
    append_jsonl(path, *[{"step": n, "seconds": 1000.0} for n in range(1, 6)])
    Log(path, 2, 9, master=False)
    assert len(read_jsonl(path)) == 5
    for start, kept in ((2, [1, 2]), (0, [])):
        log = Log(path, start, 9, master=True)
        assert [line["step"] for line in read_jsonl(path)] == kept
        assert (time.time() - log.began > 999) == bool(kept)  # the seconds of the run go on


def test_log_sums_until_it_is_collected_and_refuses_what_is_not_a_number(tmp_path):
    log = Log(str(tmp_path / "log.jsonl"), 4, 10, master=True)
    for _ in range(3):
        log.add(nll=torch.tensor(2.0), masks=5)
    before = log.last
    found = log.collect(torch.tensor(1.5))
    assert found.pop("seconds") > 0 and found == {"nll": 6.0, "masks": 15.0, "grad_norm": 1.5}
    assert log.last == before
    log.write({"step": 8, "loss": 0.25})
    assert log.last > before  # the time of an evaluation before this line is not counted
    [line] = read_jsonl(tmp_path / "log.jsonl")
    assert line["loss"] == 0.25 and line["seconds"] >= 0
    log.add(nll=torch.tensor(1.0))
    refused("not a number: start again", log.collect, torch.tensor(math.inf))
    log.add(nll=torch.tensor(math.nan))
    refused("not a number: start again", log.collect, torch.tensor(1.0))
