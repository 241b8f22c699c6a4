# SPDX-License-Identifier: MIT
"""The Python behind the task files: read data, extract answers, run code.     App. B.2, C.6

Prompts, stop strings and lengths are in the .yaml files. Other models can take these tasks, too:

    python -m lm_eval --include_path lab/tasks --tasks math500 --metadata '{"data": "math.jsonl"}'
"""

import ast
import contextlib
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import UserList
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from launch import Refused, in_short


def documents(data="", timeout=30.0, column="", plus="none", needs=(), **_):
    """{"test": rows} of a .json or .jsonl(.gz) file, each with its column in Table 3."""
    rows = read(data)
    if not all(isinstance(row.get(name), str) for row in rows for name in needs):
        raise Refused(f"{data}: each row needs a text in the fields {', '.join(needs)}")
    holds = {bool(re.search("^ *inputs = ", str(row.get("test")), re.M)) for row in rows}
    # plus: whether the rows' plus tests are wanted or ignored. none: the rows must have none.
    if len(holds) > 1 or (plus != "ignored" and holds != {plus == "wanted"}):
        raise Refused(f"{data}: rows with plus tests, and only these, are for a task with plus in "
                      f"its name")
    if holds == {True}:
        column += "+" if plus == "wanted" else "+ (base tests)"
    scoring = {"column": column, "plus": plus == "wanted", "timeout": timeout}
    docs = UserList(row | {"scoring": scoring} for row in rows)
    docs.features = docs[0]  # the harness also asks for the names of the fields
    return {"test": docs}


def read(path):
    """The objects of a .json list or of JSON lines. Blank lines and a BOM are skipped."""
    rows, number = [], 1
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as f:
            text = f.read()
        parts = [text] if text.lstrip()[:1] == "[" else text.split("\n")
        for number, part in enumerate(parts, 1):  # noqa: B007
            value = json.loads(part) if part.strip() else []
            rows += value if isinstance(value, list) else [value]
    except (ValueError, EOFError, gzip.BadGzipFile) as e:
        raise Refused(f"{path}, line {number}: {in_short(e)}")
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"{path} has no problems: give JSON lines, or a list of objects")
    return rows


def longest_code(text):
    """The syntax tree of the longest run of lines that parses, among the first 100 [code]."""
    lines = text.split("\n")[:100]  # splitlines would cut a string at U+2028
    # The sort is stable: among spans of the same length, the one that starts first wins.
    spans = itertools.combinations(range(len(lines) + 1), 2)
    for i, j in sorted(spans, key=lambda span: -sum(bool(s.strip()) for s in lines[slice(*span)])):
        with contextlib.suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            return ast.parse("\n".join(lines[i:j]))
    return ast.parse("")


def sanitize(text, *wanted):
    """The imports, and the definitions that the wanted names need, directly or not [code].

    As in EvalPlus, annotated assignments and `async def` count, too [ours]. EvalPlus drops
    decorated functions, and keeps the first of two definitions. Here the last one counts [code].
    """
    imports, found, keep, todo = [], {}, set(), list(wanted)
    for node in longest_code(text.replace("\t", "    ").strip()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            returns = any(isinstance(n, ast.Return) for n in ast.walk(node))
            if returns or isinstance(node, ast.ClassDef):  # other functions are dropped [code]
                found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    while todo:
        name = todo.pop()
        if name in found and name not in keep:
            keep.add(name)
            todo += [n.id for n in ast.walk(found[name]) if isinstance(n, ast.Name)]
    kept = [node for name, node in found.items() if name in keep]
    return "\n".join(map(ast.unparse, imports + kept))


def boxed(text):
    """The content of the last \\boxed{…}, with matching braces. None if there is no box."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, c in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(c, 0)
        if not depth:
            return rest[:end]


def plain(latex):
    """A LaTeX answer in one form: no spaces, units, degrees, $ or %, fractions as \\frac{a}{b}."""
    s = re.sub(r"\\text\{ .*?\}$", "", latex.strip())
    s = re.sub(r"\\!|\\,|\\left|\\right|\^\{?\\circ\}?|\\?\$|\\?%|\s", "", s)
    s = re.sub(r"\\[dt]frac", r"\\frac", s)
    s = re.sub(r"\\(frac|sqrt)([^{\[])", r"\\\1{\2}", s)     # \frac12 -> \frac{1}2
    s = re.sub(r"(\\frac\{[^{}]*\})([^{])", r"\1{\2}", s)    # \frac{1}2 -> \frac{1}{2}
    s = re.sub(r"^[a-zA-Z]{1,2}=", "", s).removesuffix(".")
    s = re.sub(r"(?<!\d)\.(\d)", r"0.\1", s)
    s = "1/2" if s == "0.5" else s
    return re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", s)


def boxed_match(doc, results):
    """Whether the last box holds the reference answer. Without a box, the answer is empty."""
    return {"exact_match": float(plain(boxed(results[0]) or "") == plain(doc["answer"]))}


# The program is imported: dataclasses need a module, and `if __name__ == "__main__"` must not run.
# WORD is printed after its last test, so that an early exit is not a pass.
WORD = "5d2f8a1c came to its end"
RUNNER = f"""import sys
if sys.platform == "linux":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))  # its output is a file, too
sys.path.insert(0, "")
import program
print("\\n{WORD}")"""


def passes(program, timeout):
    """Whether the program runs to its end within `timeout` seconds.

    It runs in another process, in a folder of its own, without our environment variables. The
    processes that it starts are killed with it, if they stay in its group. This is no sandbox.
    """
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
          tempfile.TemporaryFile() as out):
        with open(os.path.join(folder, "program.py"), "wb") as f:
            f.write(program.encode(errors="replace"))
        # With a thread per core, numpy would reserve more memory than the limit allows.
        env = {"PATH": os.environ["PATH"], "HOME": folder, "OPENBLAS_NUM_THREADS": "1",
               "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER], cwd=folder, env=env,
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        out.seek(0)
        return child.returncode == 0 and out.read().rstrip().endswith(WORD.encode())


def run_all(program_of, responses, docs):
    """Whether the program of each answer passes. One process per core runs at a time."""
    programs = []
    for [response], doc in zip(responses, docs):
        try:
            programs.append(program_of(response, doc))
        except (RecursionError, MemoryError, ValueError):  # ast fails, as for 400 nested brackets
            programs.append("assert False")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(passes, programs, [doc["scoring"]["timeout"] for doc in docs]))


def humaneval_program(response, doc):
    code = response.split("```python\n", 1)[-1].split("```")[0]
    # Names in the tests are wanted, too [ours]. The test of HumanEval/50 calls encode_shift, which
    # is in its prompt. The authors drop that function, so no answer can pass [code].
    named = [n.id for n in ast.walk(ast.parse(doc["test"])) if isinstance(n, ast.Name)]
    code = sanitize(doc["prompt"] + "\n" + code, doc["entry_point"], *named)
    return f"{code}\n{doc['test']}\ncheck({doc['entry_point']})\n"


def mbpp_program(response, doc):
    tests = doc.get("test")  # the plus tests, or, in some copies of MBPP, the three asserts
    if not doc["scoring"]["plus"]:
        tests = "\n".join(doc.get("test_list", tests))
    return "\n".join([response.split("```")[0], doc.get("test_setup_code") or "", tests])


run_humaneval, run_mbpp = partial(run_all, humaneval_program), partial(run_all, mbpp_program)


def pass_at_1(doc, results):
    return {"pass_at_1": float(results[0])}
