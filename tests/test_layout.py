"""Who may import whom."""

import ast
from pathlib import Path

from conftest import FOLDERS, ROOT

# A file imports only files in the lines above its own. lab and examples import all of them.
LAYERS = [{*layer.split()} for layer in (
    "softmask launch", "mdlm data show", "checkpoint", "sample eval", "train",
    "dora", "dream", "sample_dream finetune_dream")]  # these are for Dream
TREES = {path.stem: ast.parse(path.read_text("utf-8"))
         for folder in FOLDERS for path in Path(folder).glob("*.py")}


def imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


def test_every_file_has_its_layer_and_imports_follow_the_layers():
    assert {path.stem for path in Path(ROOT).glob("*.py")} == set().union(*LAYERS)
    above = set()
    for layer in LAYERS:
        for name in layer:
            used = TREES.keys() & imports(ast.walk(TREES[name]))
            assert used <= above, f"{name}.py imports {used - above}"
        above |= layer
    assert TREES.keys() & imports(ast.walk(TREES["mdlm"])) == {"softmask"}  # both are to be copied
