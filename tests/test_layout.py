"""The house: who may import whom, five packages, nothing runs at import, and a README whose commands exist."""

import ast
import dataclasses
import importlib
import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# leaves → models → verbs; a file imports only from what stands before it
MAY_IMPORT = {
    "softmask": set(), "dora": set(), "launch": set(), "checkpoint": {"launch"}, "show": set(),
    "data": {"checkpoint"},
    "arms": {"softmask"}, "mdlm": {"arms", "softmask", "checkpoint"}, "dream": {"checkpoint", "dora", "softmask"},
    "sample": {"arms", "mdlm", "data", "checkpoint", "show"}, "eval": {"mdlm", "data", "checkpoint"},
    "train": {"mdlm", "data", "checkpoint", "sample", "eval", "show"},
    "finetune_dream": {"dream", "dora", "softmask", "mdlm", "checkpoint", "data"},
    "sample_dream": {"dream", "dora", "softmask", "checkpoint"}, "eval_dream": {"sample_dream", "checkpoint", "plot"},
    "plot": {"checkpoint"},
}
for name in set(MAY_IMPORT) - {"softmask", "dora", "launch"}:
    MAY_IMPORT[name] |= {"launch"}
MAY_IMPORT["bench"] = set(MAY_IMPORT)  # it times all of them
FILES = sorted(MAY_IMPORT)
PACKAGES = {"torch", "numpy", "tiktoken", "tqdm"}
COPYABLE = {"softmask": {"torch"}, "dora": {"torch"}}  # made to be copied: torch alone
OPTIONAL = {"transformers", "mauve", "lm_eval", "datasets", "matplotlib", "pyarrow", "sklearn", "gguf"}


def tree(name):
    with open(os.path.join(ROOT, name + ".py"), encoding="utf-8") as f:
        return ast.parse(f.read())


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def foreign(names):
    return {n for n in names if n not in FILES and n not in sys.stdlib_module_names}


def test_every_file_is_there():
    assert all(os.path.exists(os.path.join(ROOT, name + ".py")) for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_imports_follow_the_layers(name):
    everywhere = set(imports(ast.walk(tree(name))))
    assert everywhere & set(FILES) <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", FILES)
def test_five_packages_and_optional_ones_only_where_they_are_used(name):
    module = tree(name)
    assert foreign(imports(module.body)) <= COPYABLE.get(name, PACKAGES)
    assert foreign(imports(ast.walk(module))) <= COPYABLE.get(name, PACKAGES | OPTIONAL)


@pytest.mark.parametrize("name", FILES)
def test_nothing_runs_at_import(name):
    """Definitions, constants and the __main__ line; no bare calls, loops or branches."""
    for node in tree(name).body:
        plain = isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign, ast.AnnAssign))
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        assert plain or docstring or main, f"{name}.py line {node.lineno}"


@pytest.mark.parametrize("name", FILES)
def test_files_say_what_they_are_and_what_they_are_not(name):
    with open(os.path.join(ROOT, name + ".py"), encoding="utf-8") as f:
        first = f.readline()
    assert first == "# SPDX-License-Identifier: MIT\n"
    assert "Not here" in ast.get_docstring(tree(name))


@pytest.mark.parametrize("name", FILES)
def test_public_functions_are_documented(name):
    for node in tree(name).body:
        if isinstance(node, ast.FunctionDef) and node.name != "main" and node.end_lineno - node.lineno > 12:
            assert ast.get_docstring(node), f"{name}.{node.name}"


def test_softmask_works_as_a_lone_copy(tmp_path):
    with open(os.path.join(ROOT, "softmask.py")) as f:
        (tmp_path / "sm_copy.py").write_text(f.read())
    code = "import torch, sm_copy; print(sm_copy.SoftMask(3)(torch.zeros(2, 4))[1].shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([2, 3])\n"


def test_requirements_are_the_five():
    with open(os.path.join(ROOT, "requirements.txt")) as f:
        assert {re.split(r"[<>=]", line)[0].strip() for line in f} == PACKAGES | {"pytest"}


def readme():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return f.read()


def test_readme_names_only_fields_that_exist():
    """Every `python x.py … --key=…` in the README is a script of ours with such a preset and such fields."""
    sys.path.insert(0, ROOT)
    commands = re.findall(r"(?:python|torchrun[^\n]*?) (\w+)\.py((?: +[^\s`#|]+)*)", readme())
    assert len(commands) > 10
    for name, rest in commands:
        assert name in FILES, name
        module = importlib.import_module(name)
        for arg in rest.replace("\\", " ").split():
            if arg.startswith("--"):
                field = arg[2:].split("=")[0]
                assert field in {f.name for f in dataclasses.fields(module.Config)} | {"help"}, f"{name}.py {arg}"


def test_readme_lists_every_file_and_is_finished():
    text = readme()
    assert "@@" not in text
    for name in FILES:
        assert f"{name}.py" in text, name
