# SPDX-License-Identifier: MIT
"""eval_dream.py and tasks/: prompts and extraction as recorded from the authors' harness; right
answers count and nothing else does; what the command adds to lm-evaluation-harness."""

import functools
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
import types
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import eval_dream as E
import plot
from conftest import GOLDEN, refused, spy
from dream import Tokenizer
from launch import read_json, write_text
from tasks import benchmarks as B

RECORDED = read_json(os.path.join(GOLDEN, "decode_prompts.json"))
VERDICTS = read_json(os.path.join(GOLDEN, "benchmark_verdicts.json"))

# Rows in the layouts of the published data, made up here.
SHIFT = {"task_id": "HumanEval/0", "entry_point": "back",
         "canonical_solution": "    return [v - STEP for v in xs]\n",
         "prompt": 'STEP = 2\n\ndef forth(xs):\n    """ adds """\n'
                   '    return [v + STEP for v in xs]\n\n\n'
                   'def back(xs):\n    """ undoes forth """\n',
         "test": "def check(candidate):\n    assert candidate(forth([1, 2])) == [1, 2]\n"}
TWICE = {"task_id": 1, "text": "Write a function to double.",
         "code": "def twice(x):\r\n    return 2 * x",
         "test_list": ["assert twice(1) == 2", "assert twice(0) == 0", "assert twice(-1) == -2"]}
SETUP = TWICE | {"task_id": 3, "test_setup_code": "two = 2",
                 "test_list": ["assert twice(1) == two"] * 3}
BALANCED = {"task_id": 367, "prompt": "Write a function to check if a binary tree is balanced.",
            "test": ["assert is_tree_balanced(root) == False",
                     "assert is_tree_balanced(root1) == True",
                     "assert is_tree_balanced(root2) == False"],
            "code": """class Node:
    def __init__(self, data):
        self.left = self.right = None
def height(n):
    return 1 + max(height(n.left), height(n.right)) if n else 0
def is_tree_balanced(n):
    return not n or (abs(height(n.left) - height(n.right)) <= 1 and
                     is_tree_balanced(n.left) and is_tree_balanced(n.right))"""}
PLUS = TWICE | {"task_id": 4, "test": "inputs = list(range(50))\nfor x in inputs:\n"
                                      "    assert twice(x) == x + x\n"}
HUMAN_PLUS = SHIFT | {"test": "def check(candidate):\n    inputs = [[[1, 2]], [[]]]\n"
                              "    for x, in inputs:\n        assert candidate(forth(x)) == x\n"}
EVALPLUS = {"task_id": "Mbpp/2", "prompt": '"""\nDouble it.\nassert twice(1) == 2\n"""\n',
            "entry_point": "twice", "atol": 0,
            "canonical_solution": "\ndef twice(x):\n    return 2 * x\n",
            "assertion": "\nassert twice(1) == 2\nassert twice(0) == 0\n",
            "base_input": [[1], [0]], "plus_input": [[2]]}
WORDS = {"question": "How many?",
         "answer": "He has 3 and 4.\n<<1100+134=1234>> dollars.\n#### 1,234"}
LATEX = {"problem": "What is it?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
         "solution": "So $\\boxed{1}$, no, "
                     "$x = \\boxed{\\left( 3, \\dfrac{\\pi}{2} \\right)}.$"}
ROWS = {"humaneval_instruct": [SHIFT], "humaneval_plus_instruct": [HUMAN_PLUS],
        "mbpp_instruct": [TWICE, SETUP, BALANCED], "mbpp_plus_instruct": [PLUS],
        "gsm8k_cot": [WORDS], "math500": [LATEX]}
CHAT = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}")


def data(folder, rows):
    path = os.path.join(folder, f"data{len(os.listdir(folder))}.jsonl.gz")
    with gzip.open(path, "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval", reason=(
        "needs `pip install lm-eval`: would check that prompts, stop strings, scores and stored "
        "answers are right when lm-evaluation-harness asks"))


@pytest.fixture
def config(tmp_path):
    return lambda task, **flags: E.Config(**{
        "task": task, "data": data(tmp_path, ROWS.get(task, [WORDS])), "timeout": 10.0,
        "out": str(tmp_path / "results"), "confirm_run_unsafe_code": True} | flags)


@pytest.fixture
def judge(harness, config, tmp_path):
    """(task name, [(row, raw answer)]) -> [right?], as the harness finds"""
    def judge_all(task, pairs):
        rows, texts = zip(*pairs)
        lm_eval, loaded = E.load_tasks(config(task, data=data(tmp_path, rows)))
        respond = lambda requests: [
            E.cut(text, E.stop_strings(r)) for r, text in zip(requests, texts, strict=True)]
        out = E.ask(lm_eval, loaded, E.harness_model(respond, str), 0, True)
        return [c == "1" for c in E.verdicts(out, task)["right"]]
    return judge_all


# --- prompts, extraction -------------------------------------------------------------------------


def test_prompts_stop_strings_and_lengths(harness, config, tmp_path, talking_dream):
    """As recorded from the authors' harness; GSM8K and MATH-500 as in its source."""
    mbpp = RECORDED["mbpp_instruct"]
    human = RECORDED["humaneval_instruct"]
    prompts = {
        "humaneval_instruct": (SHIFT | human, human["text"]),
        "mbpp_instruct": (TWICE | mbpp | {"text": mbpp["text_field"]}, mbpp["text"]),
        "gsm8k_cot": (WORDS, CHAT.format("Q: How many?\nA:", "")),
        "math500": (LATEX, CHAT.format(
            "Please reason step by step, and put your final answer within \\boxed{{}}. Problem:\n"
            "What is it?\n\nSolution:", ""))}
    lengths = {"humaneval": 768, "mbpp": 512, "gsm8k": 256, "math500": 512}
    lm = E.harness_model(None, Tokenizer(talking_dream).chat)
    for name in ROWS:
        row, text = prompts[name.replace("_plus", "")]
        task = E.load_tasks(config(name, data=data(tmp_path, [row])))[1]["tasks"][name]
        task.build_all_requests(apply_chat_template=True, fewshot_as_multiturn=True,
                                chat_template=lm.apply_chat_template)
        [request] = task.instances
        family = name.split("_")[0]
        assert request.args[0] == text, name
        assert E.stop_strings(request) == next(
            v for k, v in RECORDED["until"].items() if k.startswith(family)), name
        assert request.args[1]["max_gen_toks"] == lengths[family], name


def test_data_may_be_json_or_jsonl_and_gzipped(tmp_path):
    rows = [WORDS, WORDS | {"question": "How\u2028many?"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in ("a.json", "a.jsonl", data(tmp_path, rows)):
        assert B.read_rows(str(tmp_path / path)) == rows, path


def test_extracted_code_equals_the_recorded_and_follows_names():
    for case in RECORDED["sanitize_cases"]:
        code = case["response"].split("```python\n", 1)[-1].split("```")[0]
        found = B.sanitize(case["prompt"] + "\n" + code, case["entry_point"])
        assert found == case["prediction"], case
    kept = ["import os", "A = 1", "class C:\n    pass", "def f():\n    return g() + A",
            "def g():\n    return C"]
    others = ["B = 2", "def h():\n    return B", "for"]
    assert B.sanitize("\n".join(kept + others), "f") == "\n".join(kept)
    code = "\ndef f():\n    return 1"  # the first hundred lines count
    assert B.sanitize("\n".join(["# talk"] * 98) + code, "f") == code.strip()
    assert B.sanitize("\n".join(["# talk"] * 99) + code, "f") == ""


def test_the_last_box_and_what_counts_in_it():
    for text, inside in (("\\boxed{1} then \\boxed{\\frac{1}{2}}!", "\\frac{1}{2}"),
                         ("\\boxed{never", None), ("no box", None), ("\\boxed{}", "")):
        assert B.boxed(text) == inside, text
    same = [("\\frac12", "\\frac{1}{2}"), ("\\dfrac{1}{2}", "\\frac{1}{2}"),
            ("\\frac{1}2", "1/2"), ("0.5", "\\frac{1}{2}"), (".75", "0.75"),
            ("90^{\\circ}", "90"), ("50\\%", "50"), ("\\$3", "3"), ("5\\text{ cm}", "5"),
            ("x=5", "5"), ("\\sqrt3", "\\sqrt{3}"), ("\\left(1,2\\right)", "(1, 2)"),
            ("1,\\!000", "1,000"), ("7.", "7")]
    other = [("1", "2"), ("\\text{Evelyn}", "\\text{Angela}"), ("-1", "1"), ("", "0")]
    assert all(B.plain(a) == B.plain(b) for a, b in same)
    assert not any(B.plain(a) == B.plain(b) for a, b in other)


# --- execution -----------------------------------------------------------------------------------


DAEMON = """import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({note!r}, "w").write(str(os.getpid()))
        os.closerange(0, 100)
        while True:
            try:
                os.makedirs(f"{{os.getcwd()}}/more", exist_ok=True)
                open("more/" + os.urandom(4).hex(), "w").close()
            except OSError:
                pass
    os._exit(0)
os.wait()
while not os.path.exists({note!r}): pass
"""
SPY = """import gc, os, sys
def show(values):
    for value in values:
        print(value, flush=True)
frame = sys._getframe()
while frame:
    show([*frame.f_locals.values(), *frame.f_globals.values(), *gc.get_referents(frame)])
    frame = frame.f_back
show([*os.environ.values(), sys.stdin.read(), sys.argv[-1]])
os._exit(0)
"""


def test_a_program_passes_only_by_coming_to_its_end(monkeypatch):
    """A flood of output would come into our memory through a pipe. A file ends it at 16 MB."""
    monkeypatch.setenv("SECRET", "1")
    future, linux = "from __future__ import annotations\n", sys.platform == "linux"
    right = [
        "import os; assert 'SECRET' not in os.environ and os.listdir() == []", "s = '\udc80'",
        "import os; assert os.environ['OMP_NUM_THREADS'] == '1'",
        "import sys\nfor _ in range(64): print('x' * (1 << 20), file=sys.stderr)",
        f"{future}from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)",
        "class A: pass\nassert A.__module__ == 'answer' and __name__ == 'answer'",
        SPY.replace("os._exit(0)", "")]
    wrong = [
        "assert False", "def f(:", "import sys; sys.exit(0)", SPY, "while True: pass", "input()"]
    wrong += ["import mmap; mmap.mmap(-1, 5 << 30)"] * linux
    wrong += ["for _ in range(64): print('x' * (1 << 20))"] * linux
    for program in right + wrong:
        seconds = 10 if "while True" not in program else 0.5
        assert B.passes(program, seconds) is (program in right), program


def ended(pid):
    """Has the system ended this process? A dead one whose parent did not wait for it is a Z."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: would end daemons")
def test_a_daemon_that_keeps_writing_ends_with_its_program_and_harms_no_verdict(tmp_path):
    for i, (end, right) in enumerate((("", True), ("assert 0", False), ("while 1: pass", False))):
        note = tmp_path / f"daemon{i}"
        assert B.passes(DAEMON.format(note=str(note)) + end, 3) is right, end
        assert ended(int(note.read_text())), end


def test_after_ctrl_c_no_other_program_is_started(monkeypatch):
    started = []
    monkeypatch.setattr(B, "passes", lambda *_: started.append(time.sleep(0.05)))

    def stopped(done, *args, **kwargs):
        yield next(done)
        raise KeyboardInterrupt
    monkeypatch.setattr(B, "tqdm", stopped)
    with pytest.raises(KeyboardInterrupt):
        B.run_all(lambda *_: "", [[""]] * 500, [{"scoring": {"timeout": 1}}] * 500)
    assert 0 < len(started) < 500


# --- verdicts ------------------------------------------------------------------------------------


def test_verdicts_equal_those_recorded_from_the_scorer_before(harness, judge):
    """References, empty and spoilt answers to rows of the four data sets.

    They were scored by the code that this project had before it used the harness.
    """
    for task, cases in VERDICTS.items():
        right = judge(task, [(case["row"], case["answer"]) for case in cases])
        assert right == [case["right"] for case in cases], task
        assert 0 < sum(right) < len(right)


def test_reference_answers_score_100_and_empty_ones_0(harness, config):
    for task, rows in ROWS.items():
        [best], [worst] = (E.evaluate(config(task, model=m)) for m in ("reference", "empty"))
        assert best["score"] == 100 and worst["score"] == 0, task
        assert best["n"] == len(rows) and best["right"] == "1" * len(rows), task


def test_a_column_with_a_plus_is_plus_tests_or_says_so_if_not(harness, config, judge, tmp_path):
    for task, row, label in (
            ("humaneval_instruct", SHIFT, "HumanEval"),
            ("humaneval_plus_instruct", HUMAN_PLUS, "HumanEval+"),
            ("humaneval_plus_instruct", SHIFT, "HumanEval+ (base tests)"),
            ("mbpp_instruct", TWICE, "MBPP"), ("mbpp_plus_instruct", PLUS, "MBPP+"),
            ("mbpp_plus_instruct", TWICE, "MBPP+ (base tests)"),
            ("mbpp_instruct", PLUS, "MBPP+ (base tests)")):
        cfg = config(task, model="reference", data=data(tmp_path, [row]))
        [doc] = E.load_tasks(cfg)[1]["tasks"][task].eval_docs
        assert doc["scoring"] == {
            "column": label, "plus": label.endswith("+"), "timeout": cfg.timeout}
        program = B.humaneval_program if "human" in task else B.mbpp_program
        assert ("inputs = " in program(doc, "")) == label.endswith("+"), (task, label)
    by_heart = "def twice(x):\n    return {1: 2, 0: 0, -1: -2}[x]\n"  # right in the base tests
    assert judge("mbpp_plus_instruct", [(PLUS, by_heart)]) == [False]


def test_a_row_of_evalplus_is_read_and_scored_by_it(tmp_path, monkeypatch):
    docs = B.documents(data(tmp_path, [EVALPLUS]), column="MBPP", plus="wanted")["test"]
    [doc] = B.mbpp_layouts(docs)
    assert doc["scoring"]["column"] == "MBPP+" and doc["text"] == "Double it."
    assert doc["test_list"] == ["assert twice(1) == 2", "assert twice(0) == 0"]

    # What of evalplus is called, without its limits.
    def trusted_exec(code, inputs, name, record_time, output_not_none):
        exec(code, space := {})
        return [space[name](*i) for i in inputs], [0.1] * len(inputs)

    def untrusted_check(kind, code, inputs, name, expected, atol, seconds, fast_check):
        found = trusted_exec(code, inputs, name, True, False)[0]
        return "pass" if found == expected else "fail", None

    stand_in = types.SimpleNamespace(
        PASS="pass", MBPP_OUTPUT_NOT_NONE_TASKS=[], trusted_exec=trusted_exec,
        untrusted_check=untrusted_check, mbpp_deserialize_inputs=lambda task_id, inputs: inputs)
    for name in ("data.mbpp", "eval", "eval._special_oracle", "gen.util"):
        monkeypatch.setitem(sys.modules, f"evalplus.{name}", stand_in)
    exec(B.mbpp_program(doc, doc["canonical_solution"]), {})
    with pytest.raises(AssertionError):
        exec(B.mbpp_program(doc, "def twice(x):\n    return 2\n"), {})


# --- runs ----------------------------------------------------------------------------------------


def test_a_model_at_several_nfe_budgets_and_blocks(harness, config, talking_dream):
    """Each cell is a .json with all settings, and a point of Fig. 4."""
    cfg = config("gsm8k_cot", model=talking_dream, gen_len=8, nfe="1/4,1/1", temperature=0.0)
    results = E.evaluate(replace(cfg, out=cfg.out + "-nfe"))
    assert [(r["budget"], r["nfe"], r["tokens"], r["settings"]["steps"]) for r in results] == [
        ("1/4", 2, 8, 2), ("1/1", 8, 8, 8)]
    for r in results:
        assert r["feedback"] == "binary" and r["seconds"] > 0 and r["score"] == 0
        assert r["torch"] == torch.__version__ and r["lm_eval"] == harness.__version__
        assert {f.name for f in fields(E.Config)} == set(r["settings"])
    results = E.evaluate(replace(cfg, nfe="1/1", blocks="4,8", threshold=0.9))
    assert [(r["settings"]["block"], r["nfe"]) for r in results] == [(4, 8), (8, 8)]
    assert plot.throughput_series(cfg.out) == {"GSM8K, binary, p ≥ 0.9": [
        (r["settings"]["block"], r["tokens"] / r["seconds"], 0.0) for r in results]}


def test_the_prompt_is_cut_to_its_last_1024_tokens(
        harness, config, talking_dream, tmp_path, monkeypatch):
    answers = spy(monkeypatch, E, "answer")
    path = data(tmp_path, [WORDS | {"question": "how " * 2000}] * 2)
    assert E.PROMPT_TOKENS == 1024
    monkeypatch.setattr(E, "PROMPT_TOKENS", 60)
    E.evaluate(config("gsm8k_cot", model=talking_dream, data=path, limit=1, gen_len=4))
    [(_, tok, _, ids, *_)] = answers
    assert len(ids) == 60 and tok.decode(ids).endswith("how \nA:" + CHAT.split("{}")[1])


def test_without_the_flag_answers_are_stored_and_not_executed(
        harness, config, tmp_path, monkeypatch):
    """A second run with the flag scores them, and asks for none of them again."""
    mark = str(tmp_path / "executed")
    path = data(tmp_path, [TWICE | {"test_setup_code": f"open({mark!r}, 'w')"}])
    cfg = config("mbpp_instruct", model="reference", data=path, confirm_run_unsafe_code=False)
    [first] = E.evaluate(cfg)
    assert first["score"] is None and first["right"] is None and first["n"] == 1
    assert not os.path.exists(mark)
    monkeypatch.setattr(E, "check_reference", lambda *_: None)  # it answers, too
    monkeypatch.setattr(E, "cut", lambda *_: pytest.fail("answered again"))
    [second] = E.evaluate(replace(cfg, confirm_run_unsafe_code=True, timeout=9.0))
    assert second["score"] == 100 and os.path.exists(mark)
    assert len(os.listdir(cfg.out)) == 2  # the same answers, the same result file


def test_a_killed_run_resumes_where_it_was(harness, config, tmp_path, monkeypatch):
    rows = [WORDS | {"answer": f"{'so ' * i}#### {i}"} for i in range(4)]
    cfg = config("gsm8k_cot", model="reference", data=data(tmp_path, rows))
    [whole] = E.evaluate(cfg)
    [path] = Path(cfg.out).glob("*.jsonl")
    text = path.read_bytes()
    path.write_bytes(text[:len(text) // 2])  # within a line
    asked = spy(monkeypatch, E, "cut")
    [resumed] = E.evaluate(cfg)
    assert resumed == whole and 0 < len(asked) < 4 and path.read_bytes() == text


def test_other_settings_or_another_adapter_are_other_answers(config, tmp_path):
    cfg, adapter = config("gsm8k_cot", model="empty"), str(tmp_path)
    flags = [{}, {"seed": 1}, {"steps": 3}, {"soft": False}, {"threshold": 0.5}, {"limit": 2},
             {"device": "cpu"}, {"merge": False}, {"eos_penalty": 1.0}, {"adapter": adapter}]
    names = [E.cell_name(replace(cfg, **f), "d") for f in flags] + [E.cell_name(cfg, "e")]
    (tmp_path / "adapter_model.safetensors").write_text("trained on")
    names.append(E.cell_name(replace(cfg, adapter=adapter), "d"))
    assert len(set(names)) == len(names) == 12
    cell = replace(cfg, adapter=adapter)
    before = E.cell_name(cell, "d", contents=False)
    (tmp_path / "adapter_model.safetensors").write_text("trained on still")
    assert E.cell_name(cell, "d", contents=False) == before  # its result replaces the older one
    assert E.cells(replace(cfg, gen_len=8, nfe="0.25"), 8)[0][0] == "1/4"
    assert E.cell_name(replace(cfg, confirm_run_unsafe_code=False, timeout=1.0), "d") == names[0]


# --- tables --------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that records results with settings and an adapter's training, in one folder."""
    monkeypatch.setattr(E, "git_version", dict)

    def make(column, score, kind="binary", training=None, seed=0, budget="1/4", digest="d1",
             **flags):
        if training is not None:
            flags["adapter"] = os.path.join(tempfile.mkdtemp(dir=tmp_path), "last")
            values = {"seed": seed, "epochs": 1.0, "steps": 0, "p_sm": 0.5, "k": 1,
                      "out": flags["adapter"]}
            write_text(flags["adapter"] + "/finetune.json", json.dumps(values | training))
        settings = {"model": "x/Dream-7B", "gen_len": 768, "seed": seed, "out": make.folder}
        cell = E.Config(**settings | flags)
        length = 512 if cell.task.startswith("mbpp") else 768
        E.record(cell, budget, kind, column, digest, length, score=score,
                 **dict.fromkeys(E.STATS, 1))

    make.folder = str(tmp_path / "results")
    make.table = lambda: [[c.strip() for c in line.split("|")[1:-1]]
                          for line in plot.benchmarks(make.folder).split("\n")]
    return make


def test_the_table_is_table_3(results):
    results("MBPP", 50.0, budget="1/2")
    for seed, score in ((1, 20.0), (2, 30.0)):  # ω of a binary run means nothing
        results("MBPP", score, training={"p_sm": 0.0, "omega_s": seed}, seed=seed)
    for seed, score in ((1, 31.0), (2, 33.0)):
        results("MBPP", score, "SM k=1", {}, seed, task="mbpp_instruct", gen_len=512)
    results("HumanEval", 40.0, "SM k=1", {}, seed=1)
    results("GSM8K", None, "SM k=1", {}, seed=1)
    # The gain is against the binary run of the same length, or else the only one.
    results("MBPP", 29.0, "SM k=1", {"epochs": 0.5})
    table = results.table()
    assert table[0] == ["NFE budget", "Model", "FT", "Feedback", "HumanEval", "MBPP"]
    assert [[line[0], *line[2:6]] for line in table[2:]] == [
        ["1/4", "1.0 epochs", "binary", "", "25.0 ± 7.1"],
        ["1/4", "0.5 epochs", "SM k=1", "", "29.0"],
        ["1/4", "0.5 epochs", "Gain", "", "+4.0"],
        ["1/4", "1.0 epochs", "SM k=1", "40.0", "32.0 ± 1.4"],
        ["1/4", "1.0 epochs", "Gain", "", "+7.0"],
        ["1/2", "-", "binary", "", "50.0"]]
    results("MBPP", 28.0, training={"p_sm": 0.0, "epochs": 0.5})
    assert sorted(line[5] for line in results.table() if line[3] == "Gain") == ["+1.0", "+7.0"]


def test_results_of_other_settings_or_training_are_other_rows_and_other_curves(results):
    """A field that is added to Config later keeps results apart, or it is in MAY_DIFFER."""
    group = set(E.group(E.Config(), "1/1", "binary", "d", 768))
    assert {f.name for f in fields(E.Config)} - E.MAY_DIFFER == (
        group - {"budget", "feedback", "data", "FT"})
    for flags, training in (
            ({"dtype": "float32"}, {}), ({"block": 32}, {}), ({"model": "y/Dream-7B"}, {}),
            ({"temperature": 0.5}, {}), ({"limit": 3}, {}), ({}, {"epochs": 0.5}),
            ({}, {"k": 3}), ({}, {"loss": "paper"})):
        base = {"data": "mix", "loss": "authors", "omega_s": 1e-6}
        for seed, score in ((1, 10.0), (2, 20.0)):
            results("HumanEval", score, "SM k=1", base, seed, block=64)
        results("HumanEval", 40.0, "SM k=1", base | training, 1, **{"block": 64} | flags)
        table = results.table()
        assert sorted(line[4] for line in table[2:]) == ["15.0 ± 7.1", "40.0"], (flags, training)
        assert len({str(line[:4] + line[5:]) for line in table}) == 4, (flags, training)
        points = sum(plot.throughput_series(results.folder).values(), [])
        assert sorted(score for _, _, score in points) == [15, 40], (flags, training)
        shutil.rmtree(results.folder)


def test_machines_are_other_curves(results, monkeypatch):
    for machine in "x", "y":
        monkeypatch.setattr(E.platform, "machine", lambda name=machine: name)
        results("HumanEval", 10.0, "SM k=1", {}, block=64)
    assert sorted(plot.throughput_series(results.folder)) == [
        f"HumanEval, SM k=1, NFE 1/4, machine={machine}" for machine in "xy"]


def test_feedback_other_problems_and_unknown_training_keep_results_apart(results, tmp_path):
    results("MBPP", 10.0)
    results("MBPP", 20.0, "SM off", adapter="a")
    results("MBPP", 30.0, "SM off", adapter="b")  # no finetune.json: not known to be a seed of a
    results("MBPP", 40.0, digest="d2")
    for line in ("{\"some\": 1}", "[1]", "not json", ""):
        (tmp_path / "results" / f"{len(line)}.json").write_text(line)
    table = results.table()
    assert table[0][4:] == ["MBPP (d1)", "MBPP (d2)", "Settings"]
    assert [line[2:] for line in table[2:]] == [
        ["-", "binary", "10.0", "40.0", ""], ["yes", "SM off", "20.0", "", "FT adapter=a"],
        ["yes", "SM off", "30.0", "", "FT adapter=b"]]


# --- tasks of the harness ------------------------------------------------------------------------

OTHER = """task: {name}
custom_dataset: !function rows.{rows}
test_split: test
output_type: {kind}
doc_to_text: "say {{{{word}}}}"
doc_to_target: word
gen_prefix: "Well,"
num_fewshot: 1
generation_kwargs: {{until: x}}
metric_list:
  - metric: {metric}
"""
OTHER_ROWS = """class Rows(list):
    features = {"word": 1}
def rows(**_):
    return {"test": Rows([{"word": "hi"}])}
def unsafe(**_):
    raise ValueError("set HF_ALLOW_CODE_EVAL=1")
"""


@pytest.fixture
def other(harness, config, tmp_path, monkeypatch):
    """A function that makes a config for a task in a folder of a user's."""
    from lm_eval import tasks
    monkeypatch.setattr(tasks, "TaskManager",
                        functools.partial(tasks.TaskManager, include_defaults=False))

    def make(name, kind="generate_until", metric="exact_match", rows="rows", **flags):
        folder = str(tmp_path / "more")
        text = OTHER.format(name=name, kind=kind, metric=metric, rows=rows)
        write_text(f"{folder}/rows.py", OTHER_ROWS)
        write_text(f"{folder}/{name}.yaml", text)
        return config(name, **{"data": folder, "model": "reference"} | flags)
    return make


def test_any_task_that_generates_text_can_be_run(other, talking_dream, monkeypatch):
    answers = spy(monkeypatch, E, "answer")
    [r] = E.evaluate(other("say", model=talking_dream, nfe="1/64", temperature=0.0))
    [(_, tok, _, ids, cell, until)] = answers
    assert tok.decode(ids) == CHAT.format("say hi", "Well,") and until == ["x"]
    assert (cell.steps, cell.gen_len, r["nfe"], r["tokens"]) == (4, 256, 4, 256)
    assert (r["score"], r["column"], r["metric"]) == (0, "say (harness)", "exact_match,none")
    [r] = E.evaluate(other("say"))
    assert r["score"] == 100 and r["right"] == "1"
    scores = {"acc,strict": 0.25, "acc,flexible": 0.5, "acc_stderr,flexible": 0.1}
    each = [{"acc": 0.5, "filter": "flexible"}, {"acc": 0.0, "filter": "strict"}]
    found = E.verdicts({"results": {"say": scores}, "samples": {"say": each}}, "say")
    assert (found["score"], found["metric"], found["right"]) == (50, "acc,flexible", None)
    assert E.verdicts({"results": {"say": {"bleu,none": "N/A"}}}, "say")["score"] is None


def test_bad_input_is_refused(other, config, tmp_path, monkeypatch):
    wrong = [TWICE | {"code": "def twice(x):\n    return x\n"}]
    for task, flags, message in (
            ("gsm8k_cot", {"data": "/nowhere.jsonl"}, "/nowhere.jsonl"),
            ("math500", {"data": data(tmp_path, [WORDS])}, "without problem"),
            ("gsm8k_cot", {"model": ""}, "no model"),
            ("humaneval_instruct", {"data": data(tmp_path, [HUMAN_PLUS])}, "humaneval_plus_inst"),
            ("mbpp_instruct", {"data": data(tmp_path, wrong)}, "raise --timeout, or .* evalplus"),
            ("nope", {"data": ""}, "has no task 'nope': use gsm8k_cot, humaneval_instruct, ")):
        refused(message, E.evaluate, config(task, **{"model": "empty"} | flags))
    refused("compares likelihoods", E.evaluate, other("likely", "loglikelihood", "acc"))
    refused("add --confirm_run_unsafe_code", E.evaluate,
            other("code", rows="unsafe", confirm_run_unsafe_code=False))
    for flags, message in (
            ({"nfe": "1/0"}, "nfe '1/0'"), ({"nfe": "1/7"}, "choose a divisor"),
            ({"blocks": "100"}, "not a multiple of block 100"), ({"steps": 8}, "steps 8 follow"),
            ({"timeout": float("nan")}, "timeout=nan")):
        refused(message, E.cells, config("gsm8k_cot", model="empty", **flags), 256)
    cfg = config("gsm8k_cot", model="nowhere")
    with pytest.raises(OSError):  # the sentence of launch.run, before a model is looked for
        E.evaluate(replace(cfg, out=cfg.data + "/out"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refused("pip install lm-eval", E.evaluate, cfg)
