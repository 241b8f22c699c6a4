"""eval_dream.py: prompts and extraction as recorded from the authors' harness; right answers count and nothing else does."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import time
import types

import pytest
import torch

import eval_dream as E
import plot
import sample_dream
from launch import Refused
from dream import Tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(ROOT, "tests", "golden", "decode_prompts.json")) as file:
    RECORDED = json.load(file)

# Rows in the layouts of the published data, made up here.
SHIFT = {"task_id": "HumanEval/0", "entry_point": "back", "canonical_solution": "    return [v - STEP for v in xs]\n",
         "prompt": "STEP = 2\n\ndef forth(xs):\n    \"\"\" adds \"\"\"\n    return [v + STEP for v in xs]\n\n\ndef back(xs):\n    \"\"\" undoes forth \"\"\"\n",
         "test": "def check(candidate):\n    assert candidate(forth([1, 2])) == [1, 2]\n"}
TWICE = {"task_id": 1, "text": "Write a function to double.", "code": "def twice(x):\r\n    return 2 * x",
         "test_list": ["assert twice(1) == 2", "assert twice(0) == 0", "assert twice(-1) == -2"]}
EXPORT = {"task_id": 2, "prompt": "Write a function to double.", "code": TWICE["code"], "test": TWICE["test_list"]}
SETUP = TWICE | {"task_id": 3, "test_setup_code": "two = 2", "test_list": ["assert twice(1) == two"] * 3}
BALANCED = {"task_id": 367, "prompt": "Write a function to check if a binary tree is balanced or not.",
            "test": [f"assert is_tree_balanced({r}) == {v}" for r, v in (("root", False), ("root1", True), ("root2", False))],
            "code": "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
                    "def height(n):\n    return 0 if n is None else 1 + max(height(n.left), height(n.right))\n"
                    "def is_tree_balanced(n):\n    return n is None or (abs(height(n.left) - height(n.right)) <= 1 and "
                    "is_tree_balanced(n.left) and is_tree_balanced(n.right))"}
PLUS = {"task_id": 4, "prompt": "Write a function to double.", "code": TWICE["code"], "test_list": TWICE["test_list"],
        "test": "inputs = list(range(50))\nfor x in inputs:\n    assert twice(x) == x + x\n"}
HUMAN_PLUS = SHIFT | {"test": "def check(candidate):\n    inputs = [[[1, 2]], [[]]]\n    for x, in inputs:\n        assert candidate(forth(x)) == x\n"}
WORDS = {"question": "How many?", "answer": "He has 3 and 4.\n<<1100+134=1234>> dollars.\n#### 1,234"}
LATEX = {"problem": "What is it?", "solution": "So $\\boxed{1}$, no, $x = \\boxed{\\left( 3, \\dfrac{\\pi}{2} \\right)}.$",
         "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"}
ROWS = {"humaneval_instruct": [SHIFT], "humaneval_plus_instruct": [HUMAN_PLUS], "mbpp_instruct": [TWICE, EXPORT, SETUP, BALANCED],
        "mbpp_plus_instruct": [PLUS], "gsm8k_cot": [WORDS], "math500": [LATEX]}


def data(folder, rows):
    path = os.path.join(folder, f"data{len(os.listdir(folder))}.jsonl.gz")
    with gzip.open(path, "wt") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def config(tmp_path):
    return lambda task, **flags: E.Config(**{
        "task": task, "data": data(tmp_path, ROWS.get(task, [WORDS])), "out": str(tmp_path / "results"),
        "confirm_run_unsafe_code": True, "timeout": 10.0} | flags)


# --- prompts, extraction ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, row", [
    ("humaneval_instruct", RECORDED["humaneval_instruct"]),
    ("mbpp_instruct", {"text": RECORDED["mbpp_instruct"]["text_field"], "test_list": RECORDED["mbpp_instruct"]["test_list"]})])
def test_prompts_equal_the_recorded(talking_dream, name, row):
    assert E.prompt(E.TASKS[name], Tokenizer(talking_dream), row) == RECORDED[name]["text"]


def test_stop_strings_equal_the_recorded():
    for name, until in RECORDED["until"].items():
        tasks = [task for key, task in E.TASKS.items() if key.startswith(name)]
        assert tasks and all(list(task.until) == until for task in tasks)


def test_prompts_without_a_recording():
    assert E.TASKS["gsm8k_cot"].user(WORDS) == "Q: How many?\nA:"
    assert E.TASKS["math500"].user(LATEX) == ("Please reason step by step, and put your final answer within \\boxed{{}}. "
                                              "Problem:\nWhat is it?\n\nSolution:")


def test_lengths_are_the_papers():
    assert [task.length for task in E.TASKS.values()] == [768, 768, 512, 512, 256, 512]


@pytest.mark.parametrize("case", RECORDED["sanitize_cases"])
def test_extracted_code_equals_the_recorded(case):
    code = case["response"].split("```python\n", 1)[-1].split("```")[0]
    assert E.sanitize(case["prompt"] + "\n" + code, case["entry_point"]) == case["prediction"]


def test_extraction_follows_names_and_drops_the_rest():
    code = "import os\nA = 1\nB = 2\nclass C:\n    pass\ndef f():\n    return g() + A\ndef g():\n    return C\ndef h():\n    return B\nfor"
    assert E.sanitize(code, "f") == ("import os\nA = 1\n\nclass C:\n    pass\n\ndef f():\n    return g() + A\n\n"
                                     "def g():\n    return C").replace("\n\nclass", "\nclass").replace("\n\ndef", "\ndef")


def test_only_the_first_hundred_lines_count():
    assert E.sanitize("\n" .join(["# talk"] * 99 + ["def f():", "    return 1"]), "f") == ""
    assert E.sanitize("\n" .join(["# talk"] * 98 + ["def f():", "    return 1"]), "f") == "def f():\n    return 1"


@pytest.mark.parametrize("text, number", [
    ("#### 18", "18"), ("so $1,234.50.", "1234.50"), ("it is -7", "-7"), ("5 or 6.", "6"), ("The answer is 3 apples.", "3"), ("none", None)])
def test_the_last_number(text, number):
    assert E.last_number(text) == number


@pytest.mark.parametrize("text, inside", [
    ("\\boxed{1} then \\boxed{\\frac{1}{2}}!", "\\frac{1}{2}"), ("\\boxed{{a}{b}}", "{a}{b}"), ("\\boxed{never", None), ("no box", None),
    ("\\boxed{}", "")])
def test_the_last_box(text, inside):
    assert E.boxed(text) == inside


@pytest.mark.parametrize("a, b", [
    ("\\frac12", "\\frac{1}{2}"), ("\\dfrac{1}{2}", "\\frac{1}{2}"), ("\\frac{1}2", "1/2"), ("0.5", "\\frac{1}{2}"), (".75", "0.75"),
    ("90^\\circ", "90"), ("90^{\\circ}", "90"), ("50\\%", "50"), ("\\$3", "3"), ("5\\text{ cm}", "5"), ("x=5", "5"), ("\\sqrt3", "\\sqrt{3}"),
    ("\\left(1,2\\right)", "(1, 2)"), ("1,\\!000", "1,000"), ("7.", "7")])
def test_answers_that_are_the_same(a, b):
    assert E.plain(a) == E.plain(b)


@pytest.mark.parametrize("a, b", [("1", "2"), ("\\text{Evelyn}", "\\text{Angela}"), ("\\frac{1}{2}", "\\frac{2}{1}"), ("-1", "1"), ("", "0")])
def test_answers_that_are_not(a, b):
    assert E.plain(a) != E.plain(b)


# --- execution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program, passes", [
    ("x = 1", True), ("assert False", False), ("def f(:", False), ("import sys; sys.exit(0)", False), ("import os; os._exit(0)", False),
    ("while True: pass", False), ("from __future__ import annotations\nx = 1", True), ("print('talk')", True), ("input()", False),
    ("import os; assert 'SECRET' not in os.environ", True), ("import os; assert os.listdir() == []", True),
    ("x = bytearray(1 << 34)", sys.platform != "linux"), ("s = '\udc80'", True), ("import os; assert os.environ['OMP_NUM_THREADS'] == '1'", True),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nassert A(1).x == 1", True),
    ("class A: pass\nassert A.__module__ == 'answer' and __name__ == 'answer'", True)])
def test_a_program_passes_only_by_coming_to_its_end(monkeypatch, program, passes):
    monkeypatch.setenv("SECRET", "1")
    assert E.passes(program, 10 if "while" not in program else 0.5) is passes


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: would check the limits")
def test_a_flood_of_output_does_not_reach_our_memory():
    """256 MB would be ours with a pipe; the file that takes them ends the program at 16."""
    code = ("import resource, eval_dream\nbefore = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "print(eval_dream.passes('for _ in range(256): print(\"x\" * (1 << 20))', 30),\n"
            "      eval_dream.passes('import sys\\nfor _ in range(64): print(\"x\" * (1 << 20), file=sys.stderr)', 30),\n"
            "      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False True True\n"


@pytest.mark.parametrize("end, passes", [("", True), ("\nassert False", False), ("\nwhile True: pass", False)])
def test_processes_that_a_program_started_end_with_it(tmp_path, end, passes):
    note = tmp_path / "pid"
    program = (f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
               f"open({str(note)!r}, 'w').write(str(child.pid))" + end)
    started = time.monotonic()
    assert E.passes(program, 5) is passes and time.monotonic() - started < 30  # a pipe that the child holds would be waited for
    pid = int(note.read_text())
    for _ in range(100):  # until the system has buried it
        try:
            with open(f"/proc/{pid}/stat") as f:
                gone = f.read().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError:
            gone = True
        if gone:
            break
        time.sleep(0.05)
    assert gone


@pytest.mark.parametrize("task", E.TASKS)
def test_reference_answers_score_100_and_empty_ones_0(config, task):
    [best], [worst] = (E.evaluate(config(task, model=model)) for model in ("reference", "empty"))
    assert best["score"] == 100 and worst["score"] == 0 and best["n"] == len(ROWS[task]) == len(best["right"])


@pytest.mark.parametrize("task, row, response", [
    ("humaneval_instruct", SHIFT, "    return xs\n"), ("mbpp_instruct", TWICE, "def twice(x):\n    return x\n"),
    ("mbpp_plus_instruct", PLUS, "def twice(x):\n    return {1: 2, 0: 0, -1: -2}[x]\n")])
def test_wrong_code_fails(task, row, response):
    assert not E.passes(E.TASKS[task].program(row, response, "plus" in task), 10)
    assert E.passes(E.TASKS[task].program(row, E.TASKS[task].reference(row), "plus" in task), 10)


@pytest.mark.parametrize("task, row, response", [
    ("gsm8k_cot", WORDS, "1234 of 5"), ("gsm8k_cot", WORDS, "-1234"), ("math500", LATEX, "\\boxed{(3, \\pi)}"), ("math500", LATEX, LATEX["answer"])])
def test_wrong_answers_fail(task, row, response):
    assert not E.TASKS[task].right(row, response) and E.TASKS[task].right(row, E.TASKS[task].reference(row))


@pytest.mark.parametrize("task, row, label", [
    ("humaneval_instruct", SHIFT, "HumanEval"), ("humaneval_plus_instruct", HUMAN_PLUS, "HumanEval+"),
    ("humaneval_plus_instruct", SHIFT, "HumanEval+ (base tests)"), ("mbpp_instruct", TWICE, "MBPP"), ("mbpp_plus_instruct", PLUS, "MBPP+"),
    ("mbpp_plus_instruct", TWICE, "MBPP+ (base tests)"), ("mbpp_plus_instruct", EXPORT, "MBPP+ (base tests)"),
    ("mbpp_instruct", PLUS, "MBPP+ (base tests)")])
def test_a_column_with_a_plus_is_plus_tests_or_says_that_it_is_not(config, tmp_path, monkeypatch, task, row, label):
    programs, passes = [], E.passes
    monkeypatch.setattr(E, "passes", lambda program, timeout: (programs.append(program), passes(program, timeout))[1])
    [r] = E.evaluate(config(task, model="reference", data=data(tmp_path, [row])))
    assert (r["column"], r["score"]) == (label, 100)
    assert all(("inputs = " in program) == label.endswith("+") for program in programs)


def test_plus_tests_are_not_taken_for_base_ones(config, tmp_path):
    for task, rows in (("humaneval_instruct", [HUMAN_PLUS]), ("humaneval_plus_instruct", [HUMAN_PLUS, SHIFT])):
        with pytest.raises(Refused, match="holds plus tests: use --task=humaneval_plus_instruct, with them in every row"):
            E.evaluate(config(task, model="reference", data=data(tmp_path, rows)))


def test_a_row_of_evalplus_is_read_and_scored_by_it_or_refused(config, tmp_path, monkeypatch):
    row = {"task_id": "Mbpp/2", "prompt": '"""\nDouble it.\nassert twice(1) == 2\n"""\n', "entry_point": "twice", "atol": 0,
           "canonical_solution": "\ndef twice(x):\n    return 2 * x\n", "assertion": "\nassert twice(1) == 2\nassert twice(0) == 0\n",
           "base_input": [[1], [0]], "plus_input": [[2]]}
    assert E.mbpp_parts(row) == ("Double it.", ["assert twice(1) == 2", "assert twice(0) == 0"])
    program = E.TASKS["mbpp_plus_instruct"].program(row, row["canonical_solution"], True)

    def trusted_exec(code, inputs, name, record_time, output_not_none):  # what of evalplus is called, without its limits
        exec(code, space := {})
        return [space[name](*i) for i in inputs], [0.1] * len(inputs)

    def untrusted_check(kind, code, inputs, name, expected, atol, seconds, fast_check):
        return "pass" if trusted_exec(code, inputs, name, True, False)[0] == expected else "fail", None

    for name, content in {"evalplus": {}, "evalplus.data": {}, "evalplus.gen": {},
                          "evalplus.data.mbpp": {"mbpp_deserialize_inputs": lambda task_id, inputs: inputs},
                          "evalplus.eval": {"PASS": "pass", "untrusted_check": untrusted_check},
                          "evalplus.eval._special_oracle": {"MBPP_OUTPUT_NOT_NONE_TASKS": []},
                          "evalplus.gen.util": {"trusted_exec": trusted_exec}}.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    exec(program, {})
    with pytest.raises(AssertionError):
        exec(E.TASKS["mbpp_plus_instruct"].program(row, "def twice(x):\n    return 2\n", True), {})
    monkeypatch.setattr(E, "RUNNER", "import sys; sys.modules['evalplus'] = None\n" + E.RUNNER)
    with pytest.raises(Refused, match="pip install evalplus"):
        E.evaluate(config("mbpp_plus_instruct", model="reference", data=data(tmp_path, [row])))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_model_from_end_to_end(config, talking_dream):
    cfg = config("gsm8k_cot", model=talking_dream, gen_len=8, nfe="1/4,1/2,1/1", temperature=0.0)
    results = E.evaluate(cfg)
    assert [(r["budget"], r["nfe"], r["tokens"], r["settings"]["steps"]) for r in results] == [
        ("1/4", 2, 8, 2), ("1/2", 4, 8, 4), ("1/1", 8, 8, 8)]
    for r in results:
        assert r["feedback"] == "binary" and r["seconds"] > 0 and r["score"] == 0 and r["torch"] == torch.__version__
        assert {f.name for f in dataclasses.fields(E.Config)} == set(r["settings"])


def test_a_sweep_over_blocks_is_json_and_a_figure(config, talking_dream, tmp_path, monkeypatch):
    cfg = config("gsm8k_cot", model=talking_dream, gen_len=48, blocks="8,16,24,48", threshold=0.9, temperature=0.0)
    results = E.evaluate(cfg)
    assert [r["settings"]["block"] for r in results] == [8, 16, 24, 48] and all(r["nfe"] == 48 for r in results)
    assert plot.throughput_series(cfg.out) == {
        "GSM8K, binary, p ≥ 0.9": [(r["settings"]["block"], r["tokens"] / r["seconds"], 0.0) for r in results]}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Refused, match="pip install matplotlib"):
        plot.main(plot.Config(throughput=cfg.out))


def test_the_prompt_is_cut_to_its_last_1024_tokens(config, talking_dream, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(E, "answer", lambda model, tok, sm, ids, *rest: (seen.append(ids), ("", dict.fromkeys(E.STATS, 1)))[1])
    E.evaluate(config("gsm8k_cot", model=talking_dream, data=data(tmp_path, [WORDS | {"question": "how " * 2000}]), limit=1))
    assert len(seen[0]) == 1024 and Tokenizer(talking_dream).decode(seen[0]).endswith("<|im_start|>assistant\n")


def test_code_is_not_executed_without_the_flag_and_stored_answers_are_scored_with_it(config, monkeypatch):
    cfg = config("mbpp_instruct", model="reference", confirm_run_unsafe_code=False)
    with monkeypatch.context() as m:
        m.setattr(E, "passes", lambda *_: pytest.fail("executed"))
        [first] = E.evaluate(cfg)
    assert first["score"] is None and first["right"] is None
    with monkeypatch.context() as m:
        m.setattr(E, "cut", lambda *_: pytest.fail("answered again"))
        [second] = E.evaluate(dataclasses.replace(cfg, confirm_run_unsafe_code=True))
    assert second["score"] == 100
    assert len(os.listdir(cfg.out)) == 2  # the same answers, the same result file


def test_a_killed_run_resumes_where_it_was(config, monkeypatch):
    cfg = config("mbpp_instruct", model="reference")
    [whole] = E.evaluate(cfg)
    [answers] = [os.path.join(cfg.out, name) for name in os.listdir(cfg.out) if name.endswith(".jsonl")]
    with open(answers, "rb") as f:
        text = f.read()
    with open(answers, "wb") as f:
        f.write(text[:len(text) // 2])  # within a line
    asked, cut = [], E.cut
    monkeypatch.setattr(E, "cut", lambda *args: (asked.append(1), cut(*args))[1])
    [resumed] = E.evaluate(cfg)
    assert resumed == whole and 0 < len(asked) < 4
    with open(answers, "rb") as f:
        assert f.read() == text


def test_other_settings_or_another_adapter_are_other_answers(config, tmp_path):
    cfg = config("gsm8k_cot", model="empty")
    names = {E.cell_name(cfg, "d"), E.cell_name(cfg, "e")} | {E.cell_name(dataclasses.replace(cfg, **flags), "d") for flags in (
        {"seed": 1}, {"steps": 3}, {"soft": False}, {"threshold": 0.5}, {"limit": 2}, {"device": "cpu"}, {"merge": False},
        {"adapter": str(tmp_path)})}
    (tmp_path / "adapter_model.safetensors").write_text("trained on")
    names.add(E.cell_name(dataclasses.replace(cfg, adapter=str(tmp_path)), "d"))
    assert len(names) == 11
    assert E.cell_name(cfg, "d") == E.cell_name(dataclasses.replace(cfg, confirm_run_unsafe_code=False, timeout=1.0), "d")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A function that records results with settings and an adapter's training, in one folder."""
    monkeypatch.setattr(E, "git_version", dict)
    out = tmp_path / "results"

    def make(column, score, kind="binary", training=None, seed=0, budget="1/4", digest="d1", **flags):
        if training is not None:
            flags["adapter"] = str(tmp_path / f"run{len(list(tmp_path.iterdir()))}" / "last")
            os.makedirs(flags["adapter"])
            with open(os.path.join(flags["adapter"], "finetune.json"), "w") as f:
                json.dump({"seed": seed, "epochs": 1.0, "steps": 0, "p_sm": 0.5, "k": 1, "out": flags["adapter"]} | training, f)
        cell = E.Config(**{"model": "x/Dream-7B", "gen_len": 768, "seed": seed, "out": str(out)} | flags)
        E.record(cell, budget, kind, column, score, dict.fromkeys(E.STATS, 1), data_sha256=digest)

    make.folder = str(out)
    make.table = lambda: [[c.strip() for c in line.split("|")[1:-1]] for line in E.table(str(out)).split("\n")]
    return make


def test_the_table_is_table_3(results):
    results("MBPP", 50.0, budget="1/2")
    for seed, score in ((1, 20.0), (2, 30.0)):
        results("MBPP", score, training={"p_sm": 0.0, "omega_s": seed}, seed=seed)  # ω of a binary run means nothing
    for seed, score in ((1, 31.0), (2, 33.0)):
        results("MBPP", score, "SM k=1", training={}, seed=seed, task="mbpp_instruct", gen_len=512)
    results("HumanEval", 40.0, "SM k=1", training={}, seed=1)
    results("GSM8K", None, "SM k=1", training={}, seed=1)
    table = [[cell for name, cell in zip(results.table()[0], line) if name != "Settings"] for line in results.table()]
    assert table == [
        ["NFE budget", "Model", "FT", "Feedback", "HumanEval", "MBPP"], ["---"] * 6,
        ["1/4", "x/Dream-7B", "1.0 epochs", "binary", "", "25.0 ± 7.1"], ["1/4", "x/Dream-7B", "1.0 epochs", "SM k=1", "40.0", "32.0 ± 1.4"],
        ["1/4", "x/Dream-7B", "1.0 epochs", "Gain", "", "+7.0"], ["1/2", "x/Dream-7B", "-", "binary", "50.0"][:4] + ["", "50.0"]]


@pytest.mark.parametrize("name, value", [
    ("dtype", "float32"), ("merge", False), ("device", "cpu"), ("gen_len", 512), ("algorithm", "origin"), ("temperature", 0.5), ("top_p", 0.5),
    ("top_k", 5), ("block", 32), ("cache", "dual"), ("threshold", 0.5), ("limit", 3), ("model", "y/Dream-7B")])
def test_results_of_other_settings_are_other_rows_and_other_curves(results, name, value):
    results("HumanEval", 10.0, **{"block": 64})
    results("HumanEval", 20.0, **{"block": 64} | {name: value})
    table = results.table()
    assert [line[4] for line in table[2:]] in (["10.0", "20.0"], ["20.0", "10.0"]) and len({str(line[:4] + line[5:]) for line in table}) == 4
    points = sum(plot.throughput_series(results.folder).values(), [])
    assert sorted(score for _, _, score in points) == [10, 20]


@pytest.mark.parametrize("training", [{"epochs": 0.5}, {"steps": 7}, {"k": 3}, {"p_sm": 0.8}, {"data": "coding"}, {"loss": "paper"}, {"omega_s": 0.5}])
def test_adapters_of_other_training_are_other_rows(results, training):
    base = {"data": "mix", "loss": "authors", "omega_s": 1e-6}
    results("MBPP", 10.0, "SM k=1", training=base, seed=1)
    results("MBPP", 20.0, "SM k=1", training=base, seed=2)
    results("MBPP", 40.0, "SM k=1", training=base | training, seed=1)
    table = results.table()
    assert sorted(line[4] for line in table[2:]) == ["15.0 ± 7.1", "40.0"] and table[2] != table[3]


def test_feedback_other_problems_and_unknown_training_keep_results_apart(results, tmp_path):
    results("MBPP", 10.0)
    results("MBPP", 20.0, "SM off", adapter="a")
    results("MBPP", 30.0, "SM off", adapter="b")  # no finetune.json: not known to be a seed of a
    results("MBPP", 40.0, digest="d2")
    for line in ("{\"some\": 1}", "[1]", "not json", ""):
        (tmp_path / "results" / f"{len(line)}.json").write_text(line)
    table = results.table()
    assert table[0][4:] == ["MBPP (d1)", "MBPP (d2)", "Settings"]
    assert [line[2:6] for line in table[2:]] == [["-", "binary", "10.0", "40.0"], ["yes", "SM off", "20.0", ""], ["yes", "SM off", "30.0", ""]]
    assert [line[6] for line in table[3:]] == ["FT adapter=a", "FT adapter=b"]


def test_every_setting_keeps_results_apart_or_is_named_as_free(results):
    """A field that is added to Config later is in one of the two."""
    group = E.group(E.Config(), "1/1", "binary", "d")
    assert {f.name for f in dataclasses.fields(E.Config)} == E.FREE | set(group) - {"budget", "feedback", "data", "FT"} | {"data"}


def test_gain_is_against_the_binary_run_of_the_same_length_or_the_only_one(results):
    results("MBPP", 10.0, training={"p_sm": 0.0, "epochs": 1.0})
    results("MBPP", 14.0, "SM k=1", training={"epochs": 0.5})
    gains = lambda: [line[4] for line in results.table() if line[3] == "Gain"]
    assert gains() == ["+4.0"]
    results("MBPP", 11.0, training={"p_sm": 0.0, "epochs": 0.5})
    assert gains() == ["+3.0"]
    results("MBPP", 15.0, "SM k=1, linear", training={"epochs": 1.0})
    assert sorted(gains()) == ["+3.0", "+5.0"]


# --- the harness -----------------------------------------------------------------------------------------------------


class Harness(types.ModuleType):
    """lm_eval as far as it is used: one task, one document, likelihoods on demand."""
    __version__ = "0"

    def __init__(self, monkeypatch, likelihood=False, unsafe=False):
        super().__init__("lm_eval")
        self.likelihood, self.unsafe, self.seen = likelihood, unsafe, None
        self.scores = {"alias": "", "acc,strict": 0.25, "acc,flexible": 0.5, "acc_stderr,flexible": 0.1}
        api, tasks = types.ModuleType("lm_eval.api.model"), types.ModuleType("lm_eval.tasks")
        api.LM, tasks.TaskManager = object, lambda include_path: types.SimpleNamespace(all_tasks=["gsm8k_cot"])
        for name, module in {"lm_eval": self, "lm_eval.api": types.ModuleType("lm_eval.api"), "lm_eval.api.model": api,
                             "lm_eval.tasks": tasks}.items():
            monkeypatch.setitem(sys.modules, name, module)

    def simple_evaluate(self, model, tasks, confirm_run_unsafe_code, **settings):
        self.seen = settings
        if self.unsafe and not confirm_run_unsafe_code:
            raise ValueError("Attempted to run task marked as unsafe")
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
        request = types.SimpleNamespace(args=(model.apply_chat_template(begun, add_generation_prompt=False), {"until": "x"}))
        (model.loglikelihood if self.likelihood else model.generate_until)([request])
        return {"results": {tasks[0]: self.scores}}


def test_the_harness_drives_the_same_decoder(config, talking_dream, monkeypatch):
    lm_eval, seen = Harness(monkeypatch), []
    monkeypatch.setattr(E, "answer", lambda model, tok, sm, ids, cell, until: (
        seen.append((tok.decode(ids), until, cell.steps, cell.gen_len)), sample_dream.answer(model, tok, sm, ids, cell, until))[1])
    [r] = E.harness(config("gsm8k_cot", model=talking_dream, data="", nfe="1/64", limit=3, temperature=0.0))
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"
    assert seen == [(text, ["x"], 4, 256)]
    assert lm_eval.seen["limit"] == 3 and lm_eval.seen["num_fewshot"] == 0 and lm_eval.seen["apply_chat_template"]
    assert r["score"] == 50 and r["metric"] == "acc,flexible" and (r["n"], r["nfe"], r["tokens"]) == (1, 4, 256)


def test_a_harness_task_without_a_number_is_recorded_without_a_score(config, talking_dream, monkeypatch, capsys):
    Harness(monkeypatch).scores = {"alias": "gsm8k", "sample_len": 3, "bleu_stderr,none": "N/A"}
    cfg = config("gsm8k_cot", model=talking_dream, data="", nfe="1/64", harness=True)
    E.main(cfg)
    assert capsys.readouterr().out.startswith("gsm8k_cot (harness): not scored, binary, NFE 4")
    [path] = os.listdir(cfg.out)
    with open(os.path.join(cfg.out, path)) as f:
        assert json.load(f)["harness"]["sample_len"] == 3


def test_the_harness_refuses_in_a_sentence(config, talking_dream, monkeypatch):
    cfg = config("gsm8k_cot", model=talking_dream, data="", nfe="1/64", confirm_run_unsafe_code=False)
    Harness(monkeypatch, unsafe=True)
    with pytest.raises(Refused, match="add --confirm_run_unsafe_code"):
        E.harness(cfg)
    Harness(monkeypatch, likelihood=True)
    with pytest.raises(Refused, match="compares likelihoods"):
        E.harness(cfg)
    with pytest.raises(Refused, match="no task 'nope'"):
        E.harness(dataclasses.replace(cfg, task="nope"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(Refused, match="pip install lm-eval"):
        E.harness(cfg)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, message", [
    ({"task": "arc"}, "unknown task 'arc'"), ({"nfe": "half"}, "nfe 'half'"), ({"nfe": "1/0"}, "nfe '1/0'"), ({"nfe": "1/7"}, "choose a divisor"),
    ({"nfe": "2/1"}, "steps 512"), ({"blocks": "16,x"}, "block 'x'"), ({"blocks": "100"}, "not a multiple of block 100"), ({"data": ""}, "--data"),
    ({"data": "/nowhere.jsonl"}, "/nowhere.jsonl"), ({"task": "math500"}, "without problem"), ({"threshold": 2.0, "block": 16}, "threshold 2.0"),
    ({"steps": 8}, "steps 8 follow"), ({"model": ""}, "no model"), ({"limit": -1}, "limit -1"),
    ({"temperature": float("nan")}, "temperature nan"), ({"model": "x", "device": "tpu"}, "device=tpu"), ({"schedule": "cosine"}, "unknown schedule")])
def test_bad_input_is_refused_before_anything_runs(config, flags, message):
    cfg = dataclasses.replace(config("gsm8k_cot", model="empty"), **flags)
    with pytest.raises(Refused, match=message):
        E.main(cfg)
    assert not os.path.exists(cfg.out)


def test_other_data_or_none_is_refused(config, tmp_path):
    for text, message in (("", "cannot read"), ("[]", "is empty"), ("{\"a\": 1}\nnot json", "cannot read"), ("5\n6", "without question"),
                          ("[[1, 2]]", "without question")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(Refused, match=message):
            E.evaluate(config("gsm8k_cot", model="empty", data=str(tmp_path / "bad.jsonl")))


def test_a_truncated_gz_and_problems_without_tests_are_refused(config, tmp_path):
    with open(data(tmp_path, [SHIFT] * 50), "rb") as f:
        (tmp_path / "cut.jsonl.gz").write_bytes(f.read()[:-40])
    with pytest.raises(Refused, match="cannot read"):
        E.evaluate(config("humaneval_instruct", model="reference", data=str(tmp_path / "cut.jsonl.gz")))
    with pytest.raises(Refused, match="without test or plus_input"):
        E.evaluate(config("humaneval_instruct", model="reference", data=data(tmp_path, [{k: v for k, v in SHIFT.items() if k != "test"}])))


def test_plots_refuse_what_they_cannot_draw(tmp_path):
    with pytest.raises(Refused, match="no results with a block length"):
        plot.main(plot.Config(throughput=str(tmp_path)))
    with pytest.raises(Refused, match="0 things to plot"):
        plot.main(plot.Config())
    with pytest.raises(Refused, match="must end in .png, .pdf or .svg"):
        plot.main(plot.Config(throughput=str(tmp_path), out="x.xyz"))


def test_the_command_prints_score_speed_and_table(config, capsys):
    E.main(config("math500", model="reference"))
    out = capsys.readouterr().out.split("\n")
    assert out[0].startswith("MATH-500: 100.0%, stub, NFE 0") and out[3] == "| 1/1 | reference | - | stub | 100.0 |"
    E.main(config("math500", table=True))
    assert capsys.readouterr().out.split("\n") == out[1:]
