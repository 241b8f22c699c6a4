"""eval_dream.py and tasks/: prompts, extraction and scores as recorded; answers that are kept."""

import gzip
import json
import os
import re
import sys
import types
from dataclasses import replace

import pytest

import eval_dream as E
from conftest import GOLDEN, dying, refused, spy
from dream import Tokenizer
from launch import read_json, read_jsonl
from tasks import benchmarks as B

RECORDED = read_json(os.path.join(GOLDEN, "decode_prompts.json"))
VERDICTS = read_json(os.path.join(GOLDEN, "benchmark_verdicts.json"))

# Invented rows, in the layouts of the published data
SHIFT = {"entry_point": "back", "canonical_solution": "    return x - STEP\n",
         "prompt": "STEP = 2\ndef forth(x):\n    return x + STEP\n\ndef back(x):\n",
         "test": "def check(candidate):\n    assert candidate(forth(1)) == 1\n"}
TWICE = {"text": "Write a function to double.", "code": "def twice(x):\r\n    return 2 * x",
         "test_list": ["assert twice(1) == 2", "assert twice(0) == 0", "assert twice(-1) == -2"]}
PLUS = TWICE | {"test": "inputs = [1, 7]\nfor x in inputs:\n    assert twice(x) == x + x\n"}
WORDS = {"question": "How many?", "answer": "#### 1"}
LATEX = {"problem": "What is it?", "answer": "1", "solution": "\\boxed{1}"}
ROWS = {"humaneval_instruct": SHIFT,
        "humaneval_plus_instruct": SHIFT | {"test": "inputs = []\n"}, "mbpp_instruct": TWICE,
        "mbpp_plus_instruct": PLUS, "gsm8k_cot": WORDS, "math500": LATEX}
CHAT = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}")


@pytest.fixture
def config(tmp_path, tiny):
    """The Config of a task with data: a list, or lines with a BOM, blank ones and CRLF"""
    pytest.importorskip("lm_eval")

    def config(task, rows, **flags):
        path = tmp_path / f"data{len(os.listdir(tmp_path))}.gz"
        lines = "\r\n \n".join(map(json.dumps, rows))
        text = json.dumps(rows) if len(rows) == 1 else f"\ufeff\n{lines}"
        path.write_bytes(gzip.compress(text.encode()))
        return E.Config(**{
            "task": task, "data": str(path), "timeout": 10.0, "model": tiny[0], "gen_len": 4,
            "out": str(tmp_path / "results"), "confirm_run_unsafe_code": "gsm8k" not in task,
            "compile": False} | flags)
    return config


class Answers(E.DreamInHarness):
    def __init__(self, texts):
        self.texts, self.tok = texts, types.SimpleNamespace(chat=str)

    def generate_until(self, requests):
        return [re.split("|".join(map(re.escape, request.args[1]["until"])), text)[0]
                for request, text in zip(requests, self.texts, strict=True)]


def judge(config, task, pairs):
    """[right?] of [(row, raw answer)], as the harness finds"""
    rows, texts = zip(*pairs)
    found = E.ask(Answers(texts), E.load_task(config(task, rows)), 0, True)["samples"][task]
    found = [s for s in found if s["filter"] == found[-1]["filter"]]
    [metric] = found[0]["metrics"]
    return [s[metric] == 1 for s in sorted(found, key=lambda s: s["doc_id"])]


def test_prompts_stop_strings_and_lengths(config, tiny):
    """As recorded from the authors' harness; GSM8K and MATH-500 as in its source."""
    mbpp, human = RECORDED["mbpp_instruct"], RECORDED["humaneval_instruct"]
    expected = {  # of a family: fields of its row, the prompt, the length
        "humaneval": (human, human["text"], 768),
        "mbpp": (mbpp | {"text": mbpp["text_field"]}, mbpp["text"], 512),
        "gsm8k": ({}, CHAT.format("Q: How many?\nA:", ""), 256),
        "math500": ({}, CHAT.format(
            "Please reason step by step, and put your final answer within \\boxed{{}}. Problem:\n"
            "What is it?\n\nSolution:", ""), 512)}
    lm = E.DreamInHarness(None, Tokenizer(tiny[0]), None, config("math500", [LATEX]), {})
    for name, row in ROWS.items():
        family = name.split("_")[0]
        fields, text, length = expected[family]
        row = row | fields | {"test": row.get("test")}
        if name == "mbpp_plus_instruct":  # published with prompt for text
            row["prompt"] = row.pop("text")
        task = E.load_task(config(name, [row]))["tasks"][name]
        task.build_all_requests(apply_chat_template=True, fewshot_as_multiturn=True,
                                chat_template=lm.apply_chat_template)
        [(prompt, how)] = [request.args for request in task.instances]
        [until] = [v for k, v in RECORDED["until"].items() if k.startswith(family)]
        assert (prompt, how["until"], how["max_gen_toks"]) == (text, until, length), name
        refused("each row needs a text", E.load_task, config(name, [{"test": "a"}]))


def test_a_program_passes_only_by_coming_to_its_end(monkeypatch):
    """Output goes to a file, which ends at 16 MB. A pipe would fill our memory."""
    monkeypatch.setenv("SECRET", "1")
    right = ["import os; assert 'SECRET' not in os.environ", "s = '\udc80'", "print('x', end='')",
             "import sys; print('x' * (64 << 20), file=sys.stderr)",
             "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nA(1)",
             "if __name__ == '__main__': assert False"]
    wrong = ["assert False", "def f(:", "import sys; sys.exit(0)", "import os; os._exit(0)",
             "while True: pass", "input()"]
    if sys.platform == "linux":
        wrong += ["import mmap; mmap.mmap(-1, 5 << 30)", "print('x' * (64 << 20))"]
    for program in right + wrong:
        assert B.passes(program, 0.5 if "while" in program else 10) is (program in right), program


def test_extracted_code_and_verdicts_equal_the_recorded(config):
    """References, empty answers and spoilt ones, scored by a scorer without the harness. Plus tests
    run only in tasks with plus. A test may call what stands in the prompt."""
    for case in RECORDED["sanitize_cases"]:
        code = case["response"].split("```python\n", 1)[-1].split("```")[0]
        found = B.sanitize(case["prompt"] + "\n" + code, case["entry_point"])
        assert found == case["prediction"], case
    for task, cases in VERDICTS.items():
        right = judge(config, task, [(case["row"], case["answer"]) for case in cases])
        assert right == [case["right"] for case in cases], task
    by_heart = "def twice(x):\n    return {1: 2, 0: 0, -1: -2}[x]\n"  # right in the base tests
    assert judge(config, "mbpp_instruct", [(PLUS, by_heart)]) == [True]
    assert judge(config, "mbpp_plus_instruct", [(PLUS, by_heart)]) == [False]
    broken = ["    return x" + "()" * 900, "    return \udc80", "    return " + "[" * 99]
    pairs = [(SHIFT, text) for text in (*broken, SHIFT["canonical_solution"])]
    assert judge(config, "humaneval_instruct", pairs) == [False, False, False, True]


def test_a_model_at_several_nfe_budgets_and_blocks(config, tiny, monkeypatch):
    """The prompt is cut to its last tokens. The name of [MASK] in it is text, and not filled."""
    monkeypatch.setattr(E, "PROMPT_TOKENS", 50)
    asked = spy(monkeypatch, E, "answer")
    rows = 2 * [WORDS | {"question": "<|mask|>?"}]
    cfg = config("gsm8k_cot", rows, limit=1, gen_len=8, nfe="1/4,1/1", blocks="4,8")
    found = [(r["budget"], r["settings"]["block"], r["nfe"], r["tokens"]) for r in E.evaluate(cfg)]
    assert found == [("1/4", 4, 2, 8), ("1/4", 8, 2, 8), ("1/1", 4, 8, 8), ("1/1", 8, 8, 8)]
    assert len(asked) == 4 and len(asked[0][3]) == 50
    assert CHAT.format("Q: <|mask|>?\nA:", "").endswith(Tokenizer(tiny[0]).decode(asked[0][3]))


def test_seeds_of_one_run_are_averaged_and_nothing_else(tmp_path):
    def group(adapter, **flags):
        return E.group(E.Config(adapter=adapter, **flags), "1/1", "binary", made)
    made = {"machine": "CPU", "compiled": False}
    settings = dict(model="m", limit=3, gen_len=4, block=8, cache="dual", threshold=0.5, top_p=0.5,
                    algorithm="random", temperature=0.3, merge=False, dtype="float32")
    answers = settings | dict(adapter="a", seed=2, schedule="linear", switch=0.2, omega_s=0.3,
                              omega_a=1.0, omega_b=-3.0, soft=False, code="mine.py", compile=True)
    for name, value in settings.items():
        assert group("run/best", **{name: value}) != group("run/best"), name
    for name, value in answers.items():
        assert E.cell_path(E.Config(**{name: value})) != E.cell_path(E.Config()), name
    for steps, words in (0, "2.0 epochs"), (5, "5 updates"):
        (tmp_path / "finetune.json").write_text(json.dumps({"steps": steps, "epochs": 2.0}))
        assert group(str(tmp_path))["FT"] == words
    for nfe in "a", "1/0", "1/4,":
        refused("give shares such as", E.cells, E.Config(nfe=nfe), 8)
    refused("give shares such as", E.cells, E.Config(blocks="-8"), 8)
    assert group("out/sm-1/best") == group("./out/sm-2/best/")
    for other in "out/sm-1/last", "out/k3-1/best", "there/sm-1/best":
        assert group("out/sm-1/best") != group(other)
    assert group("run/checkpoint-500") != group("run/checkpoint-1000")


def test_a_killed_run_resumes_and_no_answer_is_run_unasked(config, tmp_path, monkeypatch, mine):
    """It does not take answers to other prompts, or of other weights or code, for its own."""
    mark = tmp_path / "executed"
    rows = [TWICE | {"text": f"{i}?", "test_setup_code": f"open({str(mark)!r}, 'w')"}
            for i in range(4)]
    cfg = config("mbpp_instruct", rows, confirm_run_unsafe_code=False)
    stats = dict.fromkeys(("nfe", "tokens", "kept", "seconds"), 1)
    answer = lambda model, tok, sm, ids, *_: (f"{TWICE['code']}  # {sum(ids)}", stats)
    monkeypatch.setattr(E, "answer", answer)
    with dying(E, "answer", 4):
        E.evaluate(cfg)
    [path] = tmp_path.glob("results/*.jsonl")
    os.truncate(path, path.stat().st_size - 9)  # within the third line
    asked = spy(monkeypatch, E, "answer")
    [resumed] = E.evaluate(cfg)
    assert len(asked) == 2 and resumed["n"] == 4 and resumed["score"] is None
    E.evaluate(replace(cfg, out=cfg.out + "-whole"))
    [whole] = tmp_path.glob("results-whole/*.jsonl")
    assert read_jsonl(path) == read_jsonl(whole) and not mark.exists()
    [scored] = E.evaluate(replace(cfg, confirm_run_unsafe_code=True, timeout=9.0))
    assert len(asked) == 6 and scored["score"] == 100 and mark.exists()  # it was asked no more
    monkeypatch.setattr(E.launch, "git_version", lambda: "later")
    again, new = E.evaluate(replace(cfg, nfe="1/1,1/2"))
    assert again["git"] == scored["git"] and new["git"] == "later"  # that of the answers
    own = replace(cfg, code=mine, omega_s=0.3, omega_a=1.0, omega_b=-3.0, schedule="linear",
                  switch=0.2)
    [coded] = E.evaluate(own)
    assert coded["feedback"] == (f"SM k=3, code={mine}, omega_s=0.3, omega_a=1.0, omega_b=-3.0, "
                                 "schedule=linear, switch=0.2")
    os.utime(mine, (3e9, 3e9))
    refused("holds answers to other", E.evaluate, own)
    refused("holds answers to other", E.evaluate, config("mbpp_instruct", rows[::-1]))
    os.utime(os.path.join(cfg.model, "config.json"), (3e9, 3e9))
    refused("holds answers to other", E.evaluate, cfg)
