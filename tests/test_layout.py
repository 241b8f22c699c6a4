"""Who may import whom."""

import re
from pathlib import Path

from conftest import FOLDERS, ROOT

# A file imports only files of the layers before its own. lab and examples import all of them.
LAYERS = [{*layer.split()} for layer in (
    "softmask launch", "mdlm data", "sample train",
    "dora", "dream", "sample_dream finetune_dream")]  # these are for Dream
TEXTS = {path.stem: path.read_text("utf-8")
         for folder in FOLDERS for path in Path(folder).glob("*.py")}


def imports(name):
    lines = re.findall(r"^ *(?:from (\w+)|import (.*))", TEXTS[name], re.M)
    return TEXTS.keys() & re.findall(r"\w+", str(lines))


def test_every_file_has_its_layer_and_imports_follow_the_layers():
    assert {path.stem for path in Path(ROOT).glob("*.py")} == set().union(*LAYERS)
    above = set()
    for layer in LAYERS:
        for name in layer:
            assert imports(name) <= above, f"{name}.py imports {imports(name) - above}"
        above |= layer
    assert imports("mdlm") == {"softmask"}  # both are to be copied
