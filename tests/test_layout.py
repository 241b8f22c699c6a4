"""Who may import whom, and which packages are allowed."""

import ast
import glob
import json
import os
import re
import sys

from conftest import ROOT

# A file imports only files in the lines above its own.
LAYERS = [
    {"softmask", "launch"},
    {"chunks", "checkpoint", "data", "show"},
    {"mdlm"},
    {"sample"},
    {"eval"},
    {"train"},
    {"dora"},  # from here on, Dream
    {"dream"},
    {"sample_dream", "finetune_dream"},
]
ROOT_FILES = sorted(set().union(*LAYERS))
LAB = {"bench", "plot", "eval_dream", "feedback", "trajectory"}  # scripts for those who measure
EXAMPLES = {"sudoku", "tiny_dream"}  # the root never imports them
FILES = sorted({*ROOT_FILES, *LAB, *EXAMPLES})
FOLDERS = {"lab/": LAB, "examples/": EXAMPLES, "": ROOT_FILES}
PACKAGES = {"torch", "numpy", "tiktoken", "tqdm"}
COPYABLE = {"softmask": {"torch"}, "dora": {"torch"}}  # made to be copied
OPTIONAL = {"transformers", "mauve", "lm_eval", "datasets", "matplotlib", "pyarrow", "sklearn",
            "gguf"}


def text(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


TREES = {name: ast.parse(text(f"{folder}{name}.py"))
         for folder, names in FOLDERS.items() for name in names}


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_every_file_has_its_layer_and_imports_follow_the_layers():
    for folder, names in FOLDERS.items():
        there = {os.path.basename(path)[:-3] for path in glob.glob(f"{ROOT}/{folder}*.py")}
        assert there == set(names)
    above = set()
    for layer in LAYERS:
        for name in layer:
            used = set(imports(ast.walk(TREES[name]))) & set(FILES)
            assert used <= above, f"{name}.py imports {used - above}"
        above |= layer


def foreign(nodes):
    return {n for n in imports(nodes) if n not in FILES and n not in sys.stdlib_module_names}


def test_five_packages_and_optional_ones_only_where_they_are_used():
    for name, module in TREES.items():
        assert foreign(module.body) <= COPYABLE.get(name, PACKAGES), name
        assert foreign(ast.walk(module)) <= COPYABLE.get(name, PACKAGES | OPTIONAL), name
    lines = text("requirements.txt").splitlines()
    assert {re.split(r"[<>=]", line)[0].strip() for line in lines} == PACKAGES | {"pytest"}
    [dependencies] = re.findall(r"^dependencies = (\[.*\])", text("pyproject.toml"), re.M)
    assert json.loads(dependencies) == lines
