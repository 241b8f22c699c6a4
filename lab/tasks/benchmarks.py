# SPDX-License-Identifier: MIT
"""What the task files beside it ask of Python: data, extraction, execution.       App. B.2, C.6

    data         documents, mbpp_layouts    rows of a local file, in any of the published layouts
    extraction   sanitize, boxed, plain     from a response to the code, or the answer, that counts
    execution    passes, run_*, pass_at_1   code from a model, in a process with limits

Prompts, stop strings and lengths stand in the .yaml files. They are zero-shot, and they are those
of the authors' harness [code]. eval_dream.py runs them with Dream. Any other model can take them,
from the folder above this one:

    python -m lm_eval --include_path tasks --tasks gsm8k_cot --metadata '{"data": "gsm8k.jsonl"}'

The harness executes code from a model only after --confirm_run_unsafe_code. The subprocess has
limits on time, memory and output, but it is no sandbox: use a container.

Not here: the model and its answers (eval_dream.py).
"""

import ast
import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from launch import Refused

# -------------------------------------------------------------------------------------------------
# data


class Documents(list):
    """Rows as the harness takes a data set: it wants the names of the fields, too."""

    @property
    def features(self):
        return self[0]


def read_rows(path):
    """The rows of a .json or .jsonl file, gzipped or not. Raises Refused if it is none."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as f:
            text = f.read().strip()
        if text.startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n")]
    except (OSError, EOFError, ValueError) as e:
        raise Refused(f"cannot read {path!r} as JSON or JSONL ({e}): give the data in --data")


def has_plus(row):
    """Does a row hold plus tests: as inputs (evalplus's release), or in a script (its exports)?"""
    return "plus_input" in row or bool(re.search(r"^ *inputs = ", str(row.get("test")), re.M))


def documents(data="", timeout=30.0, column="", needs=(), package="", plus="ignored", **_):
    """{"test": rows}, each with the field `scoring`: column, plus, timeout.

    data: path of the file (default: the file of `package`, where that is installed).
    timeout: seconds that one program may run.   needs: fields of a row; a|b is one of them.
    plus: what to do with plus tests: wanted, ignored, refused.   column: of Table 3. It gets a +
    where the plus tests count. It gets "+ (base tests)" where one could expect that, but the base
    tests count.
    Raises Refused if the file is not this task's data.
    """
    if package and not data and importlib.util.find_spec(package):
        [folder] = importlib.util.find_spec(package).submodule_search_locations
        data = os.path.join(folder, "data", "HumanEval.jsonl.gz")
    rows = read_rows(data)
    for names in needs:
        fields = set(names.split("|"))
        if not rows or not all(isinstance(row, dict) and fields & set(row) for row in rows):
            raise Refused(f"{data} is empty or has rows without {names.replace('|', ' or ')}: "
                          "not the data of this task")
    holds = {has_plus(row) for row in rows}
    if len(holds) > 1 or holds == {True} and plus == "refused":
        raise Refused(f"{data} holds plus tests: use --task={column.lower()}_plus_instruct, "
                      "with them in every row")
    counts = holds == {True} and plus == "wanted"
    if counts:
        column += "+"
    elif holds == {True} or plus == "wanted":
        column += "+ (base tests)"
    scoring = {"column": column, "plus": counts, "timeout": timeout}
    return {"test": Documents(row | {"scoring": scoring} for row in rows)}


def mbpp_layouts(docs):
    """MBPP in one layout, from three: the original, an export with prompt and test, evalplus's."""
    def one_layout(row):
        if "assertion" in row:
            text = row["prompt"].strip('" \n').split("\nassert")[0]
            tests = row["assertion"].strip().split("\n")[:3]
        else:
            text = row.get("text") or row["prompt"]
            tests = row.get("test_list") or row["test"]
        code = row.get("code") or row["canonical_solution"]
        return row | {"text": text, "test_list": tests, "code": code}

    return Documents(map(one_layout, docs))


# -------------------------------------------------------------------------------------------------
# from a response to what counts


def longest_code(text):
    """The longest run of lines, of the first 100, that parses as Python, as a tree [code]."""
    lines = text.splitlines()[:100]
    # Spans come by their start, and the sort keeps that order among spans of one length.
    spans = itertools.combinations(range(len(lines) + 1), 2)
    for i, j in sorted(spans, key=lambda span: -sum(bool(s.strip()) for s in lines[slice(*span)])):
        try:
            return ast.parse("\n".join(lines[i:j]))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            pass
    return ast.parse("")


def sanitize(text, *wanted):
    """Imports, and the definitions that the wanted names lead to [code].

    A function without a return is dropped, as in the authors' harness.
    """
    imports, found, keep, todo = [], {}, set(), list(wanted)
    for node in longest_code(text.replace("\t", "    ").strip()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.FunctionDef):
            if any(isinstance(n, ast.Return) for n in ast.walk(node)):
                found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    while todo:
        name = todo.pop()
        if name in found and name not in keep:
            keep.add(name)
            todo += [n.id for n in ast.walk(found[name]) if isinstance(n, ast.Name)]
    kept = [node for name, node in found.items() if name in keep]
    return "\n".join(map(ast.unparse, imports + kept))


def boxed(text):
    """What stands in the last \\boxed{…}, braces matched. None if there is no such box."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, c in enumerate(rest if box else ""):
        depth += (c == "{") - (c == "}")
        if not depth:
            return rest[:end]


def plain(latex):
    """A LaTeX answer without differences that do not count: spacing, units, degrees, $ and %."""
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
    """Is what stands in the last box the reference? Without a box the answer is empty."""
    return {"exact_match": float(plain(boxed(results[0]) or "") == plain(doc["answer"]))}


# -------------------------------------------------------------------------------------------------
# programs

# The check of evalplus for rows of its own release. It limits time and memory by itself.
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
    expected, seconds = trusted_exec(
        row["prompt"] + row["canonical_solution"], inputs, name, record_time=True,
        output_not_none=kind == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS)
    assert PASS == untrusted_check(
        kind, code, inputs, name, expected, row["atol"], seconds, fast_check=True)[0]
"""

# Problem 367 of MBPP is tested on trees that its test_setup_code builds. Some copies of the data
# lack that field.
TREES = """def tree(*kids):
    node = Node(0)
    node.left, node.right = (*kids, None, None)[:2]
    return node
root = root2 = tree(tree(tree(tree()), tree()), tree())
root1 = tree(tree(tree(tree()), tree()), tree(tree()))
"""

# On Linux this process is a guard: all that the answer starts becomes its child, also a daemon that
# has left its group, and ends with the answer. The answer runs in a fork, in a module of its own,
# because dataclasses look up the module that they are in. RLIMIT_FSIZE also limits its output,
# which goes to a file. The first line of stdin is held by the interpreter while the answer runs,
# in no variable, and printed after it: an answer that ends early cannot print it.
RUNNER = """import os, signal, sys, types
if sys.platform == "linux":
    import ctypes, resource
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with us, too
    answer = os.fork()
    if answer:
        try:
            status = os.waitpid(answer, 0)[1]
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            try:
                while True:
                    for child in open("/proc/thread-self/children").read().split():
                        os.kill(int(child), signal.SIGKILL)
                    os.wait()
            except ChildProcessError:
                pass
        os._exit(status != 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
sys.modules["answer"] = answer = types.ModuleType("answer")
print(sys.stdin.readline() +
      (exec(compile(sys.stdin.read(), "answer", "exec"), answer.__dict__) or ""))"""


def humaneval_program(doc, response):
    """Code that comes to its end if the response is right."""
    code = response.split("```python\n", 1)[-1].split("```")[0]
    # Names in the tests are wanted, too [ours]. The test of HumanEval/50 calls encode_shift, which
    # stands in its prompt; [code] drops that function, so no answer could pass.
    named = [n.id for n in ast.walk(ast.parse(doc.get("test", ""))) if isinstance(n, ast.Name)]
    code = sanitize(doc["prompt"] + "\n" + code, doc["entry_point"], *named)
    if doc["scoring"]["plus"] and "plus_input" in doc:
        return EVALPLUS.format(row=json.dumps(doc), code=code)
    return f"{code}\n{doc['test']}\ncheck({doc['entry_point']})\n"


def mbpp_program(doc, response):
    """Code that comes to its end if the response is right."""
    code = response.split("```")[0]
    if doc["scoring"]["plus"] and "plus_input" in doc:
        return EVALPLUS.format(row=json.dumps(doc), code=code)
    tests = doc["test"] if doc["scoring"]["plus"] else "\n".join(doc["test_list"])
    setup = doc.get("test_setup_code") or TREES * (doc.get("task_id") == 367)
    return f"{code}\n{setup}\n{tests}\n"


def passes(program, timeout):
    """Does the program come to its end within `timeout` seconds?

    It runs in another process, in an empty folder, with none of our environment. Its output goes
    to a file, of which the end is read. The processes that it has started end with it: all of them
    on Linux, elsewhere those that stay in its group. A folder that cannot be removed stays.
    """
    word = secrets.token_hex(8)  # printed after the last test, so that an early exit is not a pass
    env = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    # With a thread for each core, numpy would reserve more memory than the program may have.
    env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    program = f"{word}\n{program}".encode(errors="replace")
    with (tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
          tempfile.TemporaryFile() as out):
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER], cwd=folder, env=env | {"HOME": folder},
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            child.communicate(program, timeout)
        except subprocess.TimeoutExpired:
            return False
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)  # the guard has ended all others by then
            with contextlib.suppress(OSError, AttributeError):  # no such group; no groups at all
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
        out.seek(max(0, out.seek(0, os.SEEK_END) - 64))
        said = out.read().decode(errors="replace").strip()
        return child.returncode == 0 and said.endswith(word)


def run_all(program, responses, docs):
    """[[passed]] for every [response], one process per core at a time."""
    def passed(response, doc):
        return passes(program(doc, response[0]), doc["scoring"]["timeout"])

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        done = pool.map(passed, responses, docs)
        return [[one] for one in tqdm(done, "scoring", len(docs), leave=False)]
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no other program is started


def run_humaneval(responses, docs):
    return run_all(humaneval_program, responses, docs)


def run_mbpp(responses, docs):
    return run_all(mbpp_program, responses, docs)


def pass_at_1(doc, results):
    return {"pass_at_1": float(results[0][0])}
