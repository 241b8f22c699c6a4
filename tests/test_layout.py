# SPDX-License-Identifier: MIT
"""The house: who may import whom, five packages, short functions, nothing from outside."""

import ast
import glob
import json
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT

# A file imports only from the lines above its own.
LAYERS = [
    {"softmask", "dora", "launch", "sudoku"},
    {"arms", "checkpoint", "data", "show"},
    {"mdlm", "dream"},                            # models
    {"sample_dream", "finetune_dream"},           # verbs
    {"sample"},                                   # and those that use other verbs
    {"eval"},
    {"train"},
]
ROOT_FILES = sorted(set().union(*LAYERS))
LAB = {"bench", "plot", "eval_dream", "feedback"}  # scripts for those who measure
FILES = sorted({*ROOT_FILES, *LAB})
PACKAGES = {"torch", "numpy", "tiktoken", "tqdm"}
IMPORT_INSIDE = {"sudoku"}  # its demonstration imports model and sampler, the language is a leaf
COPYABLE = {"softmask": {"torch"}, "dora": {"torch"}}  # made to be copied: torch alone
OPTIONAL = {"transformers", "mauve", "lm_eval", "datasets", "matplotlib", "pyarrow", "sklearn",
            "gguf"}
LINES = 60
LONG_FUNCTIONS = {
    "train.train": "one flat script: what is set up is used by the update and the loop below it",
    "finetune_dream.finetune": "the same for Dream",
}
SHORT_FUNCTIONS = {"train.update": 40, "sample.generate": 60}  # Alg. 1 and Alg. 2, on one screen


def text(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def source(name):
    return text(f"lab/{name}.py" if name in LAB else f"{name}.py")


TREES = {name: ast.parse(source(name)) for name in FILES}


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def foreign(nodes):
    return {n for n in imports(nodes) if n not in FILES and n not in sys.stdlib_module_names}


def test_every_file_has_its_layer_and_imports_follow_the_layers():
    for folder, names in ((ROOT, ROOT_FILES), (os.path.join(ROOT, "lab"), LAB)):
        there = {os.path.basename(path)[:-3] for path in glob.glob(os.path.join(folder, "*.py"))}
        assert there == set(names)
    above = set()
    for layer in LAYERS:
        for name in layer:
            nodes = TREES[name].body if name in IMPORT_INSIDE else ast.walk(TREES[name])
            used = set(imports(nodes)) & set(FILES)
            assert used <= above, f"{name}.py imports {used - above}"
        above |= layer


def test_the_spine_loads_no_dream_and_the_root_no_lab():
    loaded = subprocess.check_output(
        [sys.executable, "-c", "import sys, train, sample; print(*sys.modules)"], cwd=ROOT,
        text=True).split()
    dream = {"dream", "dora", "finetune_dream", "sample_dream"}
    assert {"train", "sample"} <= set(loaded) and not (dream | LAB) & set(loaded)
    for name in ROOT_FILES:
        assert not set(imports(ast.walk(TREES[name]))) & LAB, name


def test_five_packages_and_optional_ones_only_where_they_are_used():
    for name, module in TREES.items():
        assert foreign(module.body) <= COPYABLE.get(name, PACKAGES), name
        assert foreign(ast.walk(module)) <= COPYABLE.get(name, PACKAGES | OPTIONAL), name
    lines = text("requirements.txt").splitlines()
    [dependencies] = re.findall(r"^dependencies = (\[.*\])", text("pyproject.toml"), re.M)
    assert json.loads(dependencies) == lines
    assert {re.split(r"[<>=]", line)[0].strip() for line in lines} == PACKAGES | {"pytest"}


def lines_of(function):
    """Lines of a function, its docstring not counted."""
    start, body = function.lineno - 1, function.body
    if ast.get_docstring(function):
        start += body[0].end_lineno - body[0].lineno + 1
    return function.end_lineno - start


def test_functions_are_short():
    sizes = {}
    for name, module in TREES.items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                function = f"{name}.{node.name}"
                sizes[function] = max(lines_of(node), sizes.get(function, 0))
    long = {function for function, n in sizes.items() if n > SHORT_FUNCTIONS.get(function, LINES)}
    assert long <= LONG_FUNCTIONS.keys(), long
    assert SHORT_FUNCTIONS.keys() | LONG_FUNCTIONS.keys() <= sizes.keys()


def test_nothing_points_out_of_the_folder():
    """No link is tracked, and no result names a folder of the machine that made it."""
    if not os.path.exists(os.path.join(ROOT, ".git")):
        pytest.skip("no git: would look for links among the tracked files")
    listed = subprocess.check_output(["git", "ls-files", "-s"], cwd=ROOT, text=True).splitlines()
    assert len(listed) > 80 and not [line for line in listed if line.startswith("120000")]
    for path in glob.glob(os.path.join(ROOT, "results", "**", "*.json*"), recursive=True):
        with open(path, encoding="utf-8") as f:
            assert not re.search(r'"/\w', f.read()), path
