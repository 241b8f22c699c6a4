"""Every command in the README runs: in its order, in one folder, cut short by flags behind it."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import sys

import pytest

from launch import Refused, from_cli

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = "--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=64 --batch_size=4 --micro_batch=4 --steps=2 --eval_rows=4 --device=cpu".split()
DONE_BY_CI = {"pip install -r requirements.txt && python train.py quickstart", "python -m pytest -q"}


def commands():
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        for block in re.findall(r"```sh\n(.*?)```", f.read(), re.S):
            for line in block.splitlines():
                line = line.split("  #")[0].strip()
                if line and line not in DONE_BY_CI:
                    yield line


def shortened(script, argv):
    """The flags that make it small enough for a test, and nothing else."""
    if script == "data" and argv[0] not in ("openwebtext", "stdlib"):  # as its last lines do
        argv = ["--source=" + os.pathsep.join(a for a in argv if a[0] != "-")] + [a for a in argv if a[0] == "-"]
    if script == "train":
        argv = [a for a in argv if not re.match(r"--(n_layer|n_head|n_embd|length|batch_size)=", a)] + SMALL
        if not any(a.startswith("--data") or a == "quickstart" for a in argv):
            argv += ["--data=data/owt"]
        if "--resume" in argv:
            argv += ["--steps=3"]
    if script == "sample":
        argv += ["--device=cpu"] + [f for f in ("--count=2", "--steps=4") if "--count=" in " ".join(argv)]
    if script == "eval" and argv[0] != "table":
        argv += ["--device=cpu"]
    return argv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader would have: a text, some benchmark questions, a pretrained MDLM, the commands' earlier results."""
    folder = tmp_path_factory.mktemp("readme")
    words = [" ".join(str(i * j) for i in range(1, 90)) for j in range(1, 12)]
    (folder / "novels.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words * 30))
    (folder / "wikitext.txt").write_text("\n\n".join(words))
    (folder / "gsm8k.jsonl").write_text(json.dumps({"question": "What is 1 + 1?", "answer": "2\n#### 2"}) + "\n")
    return folder


def run(line, monkeypatch):
    match = re.search(r"(\w+)\.py(?: (.*))?$", line)
    module = importlib.import_module(match[1])
    argv = shortened(match[1], shlex.split(match[2] or ""))
    monkeypatch.setattr(sys, "argv", [match[1] + ".py", *argv])
    main = {"train": "train", "finetune_dream": "finetune"}.get(match[1], "main")
    getattr(module, main)(from_cli(module.Config, argv, getattr(module, "PRESETS", None)))


NEEDS = {"openwebtext": "datasets", "gen_ppl": "transformers", "mauve": "mauve", "plot.py --runs": "matplotlib"}  # optional packages, named by the README


def test_commands_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT)
    # what stands before the commands: the quickstart's run, prepared OpenWebText, and a checkpoint to continue
    small = " ".join(SMALL)
    run("train.py quickstart", monkeypatch)
    run("data.py novels.jsonl --val_docs=9 --tokenizer=bytes --out=data/owt", monkeypatch)
    run(f"train.py --out_dir=pretrained --p_sm=0 {small}", monkeypatch)
    os.rename("pretrained/last.pt", "mdlm.ckpt")
    ran = 0
    for line in commands():
        print("$", line)
        if line.startswith("python data.py novels"):
            line += " --tokenizer=bytes"  # GPT-2's vocabulary may not be here
        needs = next((package for word, package in NEEDS.items() if word in line), None)
        if "Dream-v0-Instruct-7B" in line:
            line = line.replace("Dream-v0-Instruct-7B", "out/tiny_dream/model").replace("--data=mix", "--data=out/tiny_dream/dialogues.jsonl") + " --steps=2"
        if "--nnodes" in line:
            line += " --overwrite"  # the reader has another machine for it
        if needs and not (needs == "matplotlib" and importlib.util.find_spec(needs)):  # not here, or no network: then one sentence that says what to do
            with pytest.raises(Refused, match=rf"pip install.*{needs}|not found|could not|no "):
                run(line, monkeypatch)
        else:
            run(line, monkeypatch)
        ran += 1
    assert ran >= 20
    assert {"novels", "owt", "binary", "continue", "quickstart", "tiny_dream"} <= set(os.listdir("out"))


def test_the_lines_for_copiers_run():
    """The Python block, on stand-ins for what it takes for granted."""
    import torch
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        block = re.search(r"```python\n(.*?)```", f.read(), re.S)[1]
    emb, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    class Model:
        get_input_embeddings = lambda self: emb

        def __call__(self, input_ids=None, inputs_embeds=None):
            return type("Out", (), {"logits": head(emb(input_ids) if inputs_embeds is None else inputs_embeds)})

    x0 = torch.arange(8).view(2, 4)
    scope = dict(torch=torch, tokenizer=type("T", (), {"mask_token_id": 8}), model=Model(), x0=x0,
                 x=x0.masked_fill(x0 % 2 == 0, 8), cross_entropy=torch.nn.functional.cross_entropy)
    exec(block, scope)
    assert all(p.grad is not None and p.grad != 0 for p in scope["sm"].parameters())
