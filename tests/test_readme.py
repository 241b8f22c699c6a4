# SPDX-License-Identifier: MIT
"""README.md and REPRODUCE.md: every command parses, reads what an earlier one writes, and writes
where no other does. Those of README.md run, cut short."""

import glob
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import types
from fnmatch import fnmatch

import pytest
import torch

from conftest import ROOT, configure
from launch import Refused

PAGES = ("README.md", "REPRODUCE.md")
OF_OTHERS = {"pip", "hf"}
YAML = glob.glob(os.path.join(ROOT, "lab", "tasks", "*.yaml"))
TASKS = {os.path.basename(path)[:-5] for path in YAML}


def page(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as f:
        return f.read()


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.S)


def commands(name):
    """[[word]]: what bash would start, if it ran all blocks of the page.

    The programs are functions here that print their words, so loops and quotes are bash's.
    """
    say = "{ printf '%s\\x1f' $name \"$@\"; printf '\\x1e'; }"
    programs = [f"{p}() {say.replace('$name', p)}" for p in ("python", "torchrun", *OF_OTHERS)]
    script = "\n".join(["set -u", "PATH=", *programs, *blocks(name, "sh")])
    done = subprocess.run([shutil.which("bash"), "-c", script], capture_output=True, text=True)
    assert not done.stderr and not done.returncode, done.stderr
    return [line.split("\x1f")[:-1] for line in done.stdout.split("\x1e")[:-1]]


def ours(name):
    """[(script, its words, started by torchrun)]. Asserts that there is nothing else."""
    found = []
    for words in commands(name):
        script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if script is None or words[:4] == ["python", "-m", "pytest", "-q"]:
            assert words[0] in ("python", *OF_OTHERS), words
        else:
            launcher = [word for word in words[1:script] if not word.startswith("--")]
            assert words[0] in ("python", "torchrun") and not launcher, words
            found.append((words[script][:-3], words[script + 1:], words[0] == "torchrun"))
    return found


def parsed(name):
    """[(script, its Config, started by torchrun)]. Blocks and budgets divide a task's length."""
    found = []
    for script, words, ranks in ours(name):
        module, cfg = configure(script, words)
        script = os.path.basename(script)
        if script == "eval_dream":
            task = page(f"lab/tasks/{cfg.task.replace('_plus', '')}.yaml")
            module.cells(cfg, int(re.search(r"max_gen_toks: (\d+)", task)[1]))
        found.append((script, cfg, ranks))
    assert len(found) > 20
    return found


# what a command reads and writes -----------------------------------------------------------------


BROUGHT = {"mdlm.ckpt", "sm.ckpt", "lambada.jsonl"}  # the page says where to get them


def writes(script, cfg, ranks):
    """Its files. Where a name depends on what is in other files, one that is like it."""
    if script == "data":
        return {f"{cfg.out}/train.bin", f"{cfg.out}/val.bin"}
    if script == "train":
        every = cfg.keep_every or cfg.steps
        steps = [f"step-{step}.pt" for step in {*range(every, cfg.steps, every), cfg.steps}]
        return {f"{cfg.out_dir}/{file}" for file in ("last.pt", "log.jsonl", *steps)}
    if script == "finetune_dream":
        return {f"{cfg.out}/{file}" for file in ("best", "last", "last.pt", "log.jsonl")}
    if script == "sample":
        stem = cfg.out.removesuffix(".jsonl")
        shards = {f"{stem}.{rank}.jsonl" for rank in range(8)} if ranks else {cfg.out}
        return shards | ({cfg.trace} if cfg.trace else set())
    if script in ("eval", "feedback"):
        of = cfg.checkpoint or cfg.samples.removesuffix(".jsonl") or f"{cfg.data}/val"
        return {cfg.out or f"{of.removesuffix('.pt')}.{cfg.metric}.of-what.json"}
    if script == "eval_dream":
        return {f"{cfg.out}/{hash(str(cfg))}.json"}
    if script == "bench":
        return {cfg.json} - {""}
    return {cfg.out} if getattr(cfg, "out", "") else set()


def reads(script, cfg):
    """Its files, folders and patterns of files."""
    if script == "train":
        found = [f"{cfg.data}/train.bin", cfg.init_from]
    elif script in ("sample", "checkpoint"):
        found = [cfg.checkpoint]
    elif script == "eval":
        samples = cfg.samples.replace(".jsonl", "*.jsonl")  # the shards of all ranks
        found = [cfg.checkpoint or samples, cfg.text or f"{cfg.data}/val.bin"]
    elif script == "plot":
        found = [pattern for name, value in vars(cfg).items() if isinstance(value, str)
                 for pattern in value.split(",") if name not in ("out", "throughput", "benchmarks")]
        found += [f"{folder}/*.json" for folder in (cfg.throughput, cfg.benchmarks) if folder]
    elif script == "eval_dream":
        found = [cfg.model, cfg.adapter, cfg.data]
    else:
        found = [getattr(cfg, name, "") for name in ("model", "adapter")]
    return set(filter(None, found))


def test_reproduce_reads_what_is_there_and_writes_nothing_twice():
    made = dict.fromkeys(BROUGHT)  # file: the command that writes it
    made |= {f"data/{task}.jsonl": None for task in TASKS}
    for words in commands("REPRODUCE.md"):
        if words[0] == "hf":
            made[words[words.index("--local-dir") + 1]] = None
    for command in parsed("REPRODUCE.md"):
        for pattern in reads(*command[:2]):
            found = [file for file in made if fnmatch(file, pattern)]
            assert found, f"{command} reads {pattern}, which nothing before it writes"
            if command[0] == "eval":  # the shards of one run of sample.py, not of two
                assert len({str(made[file]) for file in found}) == 1, (command, found)
        for file in writes(*command):
            assert file not in made, f"{command} writes {file}, as {made[file]} does"
            made[file] = command


def test_every_command_parses_and_git_ignores_what_it_writes():
    patterns = page(".gitignore").split()
    patterns = [(p if p[0] == "/" else f"*/{p}") + "*" * p.endswith("/") for p in patterns]
    for file in {file for name in PAGES for command in parsed(name) for file in writes(*command)}:
        assert any(fnmatch(f"/{file}", pattern) for pattern in patterns), file


def test_reproduce_fetches_the_problems_of_every_task():
    [fetch] = blocks("REPRODUCE.md", "python")
    compile(fetch, "REPRODUCE.md", "exec")
    scope = {}
    exec(fetch[fetch.index("SOURCES"):fetch.index("for ")], scope)
    assert set(scope["SOURCES"]) == TASKS


# what the pages say about files and names --------------------------------------------------------


def test_readme_stays_short():
    assert len(page("README.md").encode()) <= 12_000 and page("README.md").count("\n") <= 190


def test_links_within_the_project_lead_somewhere():
    for name in (*PAGES, "RECIPES.md"):
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
                   for title in re.findall(r"^#+ (.*)$", page(name), re.M)}
        for link in re.findall(r"\]\(([^)]+)\)", page(name)):
            if link.startswith("#"):
                assert link[1:] in anchors, link
            elif not link.startswith("https://"):
                assert os.path.exists(os.path.join(ROOT, link)), link


def test_the_paper_map_names_what_exists():
    [table] = re.findall(r"\| paper \| code \|.*?\n\n", page("README.md"), re.S)
    named = re.findall(r"`(\w+)\.(\w+)`|`\.(\w+)`", table)
    assert len(named) > 12
    classes = {"SoftMask": "softmask", "MDLM": "mdlm"}
    owner = None
    for first, second, short in named:
        if first:
            owner = importlib.import_module(classes.get(first, first))
            owner = getattr(owner, first) if first in classes else owner
        assert hasattr(owner, second or short), (first, second or short)


# README's commands run ---------------------------------------------------------------------------


SMALL = ("--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=64 --batch_size=4 "
         "--micro_batch=4 --steps=2 --eval_rows=4 --device=cpu").split()
CUT_SHORT = {"sample": ["--device=cpu"], "eval": ["--device=cpu", "--rows=4"],
             "lab/feedback": ["--device=cpu", "--rows=4"],
             "finetune_dream": ["--steps=2", "--device=cpu"]}
NEEDS = {"openwebtext": "datasets", "samples": "transformers",
         "--runs=out/*/log.jsonl": "matplotlib", "--task=gsm8k_cot": "lm_eval"}


def cut_short(script, words):
    """The words, with flags behind them that make the command small, and the reader's own files."""
    if script == "train":
        own = {"quickstart", "stdlib", "--data=data/novels"} & set(words)
        data = [] if own else ["--data=data/owt"]
        data += ["--length=39"] * ("quickstart" in words)  # a grid's: a line --given has its cells
        return [*words, *SMALL, *data, *["--steps=3"] * ("--resume" in words),
                *["--overwrite"] * (not {"--resume", "quickstart", "stdlib"} & set(words))]
    if script == "sample" and "--count=5000" in words:
        return [*words, "--device=cpu", "--count=2", "--steps=4"]
    if "--model=Dream-v0-Instruct-7B" in words:
        words = ["--model=out/tiny_dream/model", "--data=out/tiny_dream/dialogues.jsonl",
                 *[word for word in words if not word.startswith(("--model", "--data"))]]
    return [*words, *CUT_SHORT.get(script, []), *["--overwrite"] * ("openwebtext" in words)]


def start(script, words):
    module, cfg = configure(script, words)
    main = {"train": "train", "finetune_dream": "finetune"}.get(script, "main")
    getattr(module, main)(cfg)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What a reader has before the commands: texts, questions, OpenWebText, a pretrained MDLM."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("results")
    shutil.copy(os.path.join(ROOT, "results", "sudoku.safetensors"), "results")
    words = [" ".join(str(i * j) for i in range(1, 90)) for j in range(1, 12)]
    lines = [json.dumps({"text": text}) + "\n" for text in words * 30]
    (tmp_path / "novels.jsonl").write_text("".join(lines))
    (tmp_path / "wikitext.txt").write_text("\n\n".join(words))
    question = {"question": "What is 1 + 1?", "answer": "2\n#### 2"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(question) + "\n")
    library = importlib.import_module("data").stdlib_files()
    monkeypatch.setattr("data.stdlib_files", lambda: library[:60])
    monkeypatch.setitem(importlib.import_module("data").PRESETS["sudoku"], "grids", 300)
    start("data", ["novels.jsonl", "--val_docs=9", "--tokenizer=bytes", "--out=data/owt"])
    start("train", ["--out_dir=pretrained", "--p_sm=0", "--data=data/owt", *SMALL])
    os.rename("pretrained/last.pt", "mdlm.ckpt")
    return tmp_path


def test_commands_of_the_readme_run(folder):
    for script, words, _ in ours("README.md"):
        print("$", script, *words)
        small = cut_short(script, words)
        needs = next((package for word, package in NEEDS.items() if word in words), None)
        if needs in ("matplotlib", "lm_eval") and importlib.util.find_spec(needs):
            needs = None
        if needs:  # no package, or no network for what it loads: launch.run makes it one line
            with pytest.raises((Refused, ImportError, OSError)):
                start(script, small)
        else:
            start(script, small)
    runs = {"novels", "owt", "binary", "continue", "quickstart", "stdlib", "tiny_dream"}
    assert runs <= {*os.listdir("out")}


def test_the_lines_for_copiers_run():
    """The Python block, on stand-ins for what it takes for granted."""
    [block] = blocks("README.md", "python")
    emb, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def model(input_ids=None, inputs_embeds=None):
        logits = head(emb(input_ids) if inputs_embeds is None else inputs_embeds)
        return types.SimpleNamespace(logits=logits)

    model.get_input_embeddings = lambda: emb
    x0 = torch.arange(8).view(2, 4)
    tokenizer = types.SimpleNamespace(mask_token_id=8)
    scope = {"torch": torch, "tokenizer": tokenizer, "model": model, "x0": x0,
             "x": x0.masked_fill(x0 % 2 == 0, 8),
             "cross_entropy": torch.nn.functional.cross_entropy}
    exec(block, scope)
    learn = [*scope["sm"].parameters(), *emb.parameters(), *head.parameters()]
    assert all(p.grad is not None and p.grad.any() for p in learn)
