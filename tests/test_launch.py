"""launch.py: flags, the machine, signals, files that survive, the log. Ranks: test_train.py."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint
import data
import dora
import finetune_dream
import launch
import tiny_dream
from conftest import ROOT, random_mdlm, refused, save_mdlm, start
from dream import Dream
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


def needs_a_package(cfg):
    raise ModuleNotFoundError("No module named 'mauve'", name="mauve")


@pytest.mark.parametrize("main, flags, message", [
    (print, ["--stepz=1"], "unknown argument '--stepz=1': did you mean --steps?"),
    (print, ["--steps=1.5"], "argument --steps: 1.5 is not a whole number\n"),
    (print, ["--k=ten"], "argument --k: ten is not a whole number or none\n"),
    (print, ["--resume=yes"], "argument --resume: yes: choose true or false, auto\n"),
    (print, ["--dtype=float16"], "argument --dtype: float16: choose auto, float32, bfloat16\n"),
    (print, ["--k=0"], "--k=0 must be a number from 1 to"),
    (lambda cfg: open("no/x"), [], "[Errno 2] No such file or directory: 'no/x'"),
    (needs_a_package, [], "No module named 'mauve': pip install mauve-text\n"),
    (lambda cfg: launch.machine("cuda:99"), [], "--device=cuda:99 does not work here ("),
])
def test_bad_input_is_one_line_and_an_exit_code(monkeypatch, capsys, main, flags, message):
    monkeypatch.setattr(sys, "argv", ["folder/x.py", *flags])
    with pytest.raises(SystemExit) as stop:
        launch.run(main, Config)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith(f"x.py: {message}") and err.count("\n") == 1


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of small files of every kind, each of them good."""
    monkeypatch.chdir(tmp_path)
    data.prepare(["a text of some length"] * 99, "data", data.tokenizer("bytes"))
    tiny_dream.make("dream", "dialogues.jsonl")
    save_mdlm("mdlm.pt", random_mdlm(vocab_size=259, mask_id=258, length=20, omega_s=0.5))
    checkpoint.save("adapter.pt", kind="dream-adapter", config={}, model={}, step=1, metrics={})
    dream = Dream.load("dream")
    dora.attach(dream, finetune_dream.TARGETS, 4, 8)
    cfg = finetune_dream.Config(r=4, alpha=8)
    finetune_dream.save_adapter("adapter", dream, None, cfg)


def change(path, old, new):
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def cut(path, share=0.7):
    os.truncate(path, int(os.path.getsize(path) * share))


@pytest.mark.parametrize("break_it, words, message", [
    (None, "sample --checkpoint=adapter.pt", "adapter.pt has kind = 'dream-adapter'"),
    (None, "train --data=data --length=20 --init_from=adapter.pt", "adapter.pt has kind = 'dream-"),
    (lambda: cut("data/meta.json"), "train --data=data", "data/meta.json is not a complete JSON"),
    (lambda: cut("dream/added_tokens.json"), "sample_dream --model=dream",
     "dream/added_tokens.json is not a complete JSON"),
    (lambda: change("dream/config.json", '"rope_theta"', '"theta"'), "sample_dream --model=dream",
     "dream/config.json has no field 'rope_theta'"),
    (lambda: change("adapter/adapter_config.json", '"lora_alpha"', '"alpha"'),
     "sample_dream --model=dream --adapter=adapter", "adapter_config.json has no field 'lora_alph"),
    (lambda: change("adapter/adapter_config.json", '"r": 4', '"r": 5'),
     "sample_dream --model=dream --adapter=adapter", "adapter: .* has another shape in the model"),
    (lambda: cut("dream/model.safetensors"), "sample_dream --model=dream",
     "dream/model.safetensors is no safetensors file, or cut short"),
    (lambda: Path("x.jsonl").write_text("42"), "sample --checkpoint=mdlm.pt --out=x.jsonl",
     "x.jsonl has lines that are not from sample.py"),
    (lambda: Path("x.jsonl").touch(), "eval zero_shot --checkpoint=mdlm.pt --text=x.jsonl",
     "the text: 0 tokens do not fill one row"),
    (None, "sample_dream --model=nowhere", "there is no nowhere/vocab.json: .* `hf download"),
    (lambda: os.renames("adapter", "run/best"), "sample_dream --model=dream --adapter=run",
     "run is the folder of a run: give its adapter, run/best"),
    (None, "train --data=dta", "there is no folder dta: give --data"),
    (None, "train --data=dream", "no data in dream, .*`python data.py dream --out=data/NAME`"),
    (None, "train --data=data --length=300", "217 tokens do not fill one row"),
    (None, "train --data=data --length=20 --init_from=mdlm.pt", "n_cond .*`train.py stdlib --init"),
    (None, "eval ppl --checkpoint=mdlm.pt --data=data --text=x", "--text does nothing with ppl"),
    (None, "eval ppl --floor=0.5", "--floor=0.5 must be a number from 0 to 0.01"),
    (None, "train --data=data --vocab_size=7", "--vocab_size does nothing in train.py"),
    (None, "train --data=data --p_sm=0 --omega_s=0.5", "--omega_s does nothing with --p_sm=0"),
    (None, "finetune_dream --model=dream --p_sm=0 --k=3", "--k does nothing with --p_sm=0"),
    (None, "finetune_dream --model=dream --steps=3 --epochs=1", "--epochs does nothing with --st"),
    (None, "sample_dream --model=dream --cache=dual", "--cache does nothing without --block"),
    (None, "sample_dream --model=dream --schedule=linear", "--schedule does nothing without feed"),
    (None, "sample_dream --model=dream --infill=a___ --prompt=b", "--prompt does nothing with --i"),
])
def test_a_bad_file_or_flag_is_refused_in_one_line(files, break_it, words, message):
    """And what the same words do with good files is tested elsewhere."""
    if break_it:
        break_it()
    refused(message, start, *words.split())


def test_under_torchrun_the_line_is_in_its_report_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--stepz=1"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit):
        launch.run(print, Config)
    message = launch.read_json(tmp_path / "error.json")["message"]["message"]
    assert message == "unknown argument '--stepz=1': did you mean --steps?"


def test_printing_ends_no_run(tmp_path):
    code = f"""
import sys
import launch, train
def main(cfg):
    log = launch.Log({str(tmp_path / "log.jsonl")!r}, 0, 10_000, True)
    for step in range(10_000):
        log.write({{"step": step + 1, "omega_s": 0.5}})
    print('ω end', file=sys.stderr)
launch.run(main, train.Config)"""
    env = os.environ | {"PYTHONPATH": ROOT, "PYTHONIOENCODING": "cp1252"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=100)[1] == b"? end\n" and process.returncode == 0
    assert len(read_jsonl(tmp_path / "log.jsonl")) == 10_000


def test_the_first_signal_is_collected_and_a_second_ctrl_c_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    with launch.signals() as caught:
        os.kill(os.getpid(), signal.SIGINT)
        assert caught == [signal.SIGINT] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_a_file_is_replaced_when_the_new_one_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "f"
    write_text(path, "old ω")
    with pytest.raises(KeyboardInterrupt):
        with atomic(path) as tmp:
            with open(tmp, "w") as f:
                f.write("half")
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
