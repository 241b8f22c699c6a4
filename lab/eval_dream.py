# SPDX-License-Identifier: MIT
"""Dream in lm-evaluation-harness: answers, scores, tokens/s.           §4.2, App. B.2, C.6-C.9

The harness asks and scores. Here is the model that it asks, at several NFE budgets and block
lengths in one call, with answers that outlive a killed run. In tasks/ are the paper's:

    task                      length  --data, a .json or .jsonl(.gz) file    right is what
    humaneval_instruct           768  openai/openai_humaneval                passes the tests
    humaneval_plus_instruct      768  evalplus/humanevalplus                 passes the plus tests
    mbpp_instruct                512  google-research-datasets/mbpp, test    passes three asserts
    mbpp_plus_instruct           512  evalplus/mbppplus                      passes the plus tests
    gsm8k_cot                    256  openai/gsm8k, test                     ends on the number
    math500                      512  HuggingFaceH4/MATH-500                 has it in the last box

MBPP+ in the authors' harness counts three asserts [code]: so does mbpp_instruct with its data. Code
from a model is executed only after --confirm_run_unsafe_code, with limits, but in no sandbox: use a
container. Without the flag the answers are stored, for a second run with it.

    python lab/eval_dream.py --model=DIR --adapter=DIR --task=gsm8k_cot --data=F --nfe=1/4,1/2,1/1
    python lab/eval_dream.py --model=DIR --data=F --blocks=16,32,48,96 --threshold=0.9
"""

import itertools
import json
import logging
import os
import sys
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from checkpoint import git_version
from launch import Count, Positive, Refused
from plot import benchmarks, name_and_seed
from sample_dream import Decoding, answer, check, feedback_label, load_for_decoding

TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")
Task = Literal["humaneval_instruct", "humaneval_plus_instruct", "mbpp_instruct",
               "mbpp_plus_instruct", "gsm8k_cot", "math500"]
PROMPT_TOKENS = 1024  # longer prompts lose their beginning [code]

# Fields that shape no answer. Files are named after all others.
SHAPE_NOTHING = {"task", "data", "nfe", "blocks", "out", "confirm_run_unsafe_code", "timeout"}
# Results that are averaged share these.
SHARED = ("model", "data", "limit", "gen_len", "block", "cache", "threshold", "algorithm",
          "temperature", "top_p", "merge", "dtype")


@dataclass
class Config(Decoding):
    task: Task = "humaneval_instruct"
    data: str = ""                    # the task's file
    nfe: str = "1/1"                  # NFE budgets, Eq. 4, comma-separated: steps / gen_len
    blocks: str = ""                  # Fast-dLLM block lengths, comma-separated (default: block)
    gen_len: Count = 0                # (default: the task's, App. B.2)
    limit: Count = 0                  # only the first so many problems (default: all)
    out: str = "out/answers"          # a .json and a .jsonl of answers for each cell of the grid
    confirm_run_unsafe_code: bool = False
    timeout: Positive = 30.0          # seconds for one program


def load_task(cfg):
    """{"tasks": {name: task}} of the harness, of this task alone."""
    from lm_eval.tasks import TaskManager
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is intended here
    # The harness needs ten seconds to list its own 14,000 tasks. None of them is wanted here.
    manager = TaskManager(include_path=TASKS, include_defaults=False,
                          metadata={"data": cfg.data, "timeout": cfg.timeout})
    return manager.load([cfg.task])


def cells(cfg, length):
    """[(budget, cfg)], every NFE budget with every block length. length: of a response."""
    if cfg.steps:
        raise Refused(f"--steps={cfg.steps}: here steps follow from --nfe, a share of the tokens")
    grid, L = [], cfg.gen_len or length
    blocks = (cfg.blocks or str(cfg.block)).split(",")
    for budget, block in itertools.product(cfg.nfe.split(","), blocks):
        budget = Fraction(budget)
        steps = budget * L
        if steps < 1 or steps.denominator > 1:
            raise Refused(f"--nfe={budget} of {L} tokens is no number of steps")
        cell = replace(cfg, gen_len=L, steps=int(steps), block=int(block))
        check(**asdict(cell))
        grid.append((f"{budget.numerator}/{budget.denominator}", cell))
    return grid


def cell_path(cell):
    """The files of a cell, without ending. Every setting that is not the default is in the name."""
    default = asdict(Config())
    given = [f"{name}={value}" for name, value in asdict(cell).items()
             if name not in SHAPE_NOTHING and value != default[name]]
    return os.path.join(cell.out, "_".join([cell.task, *given]).replace("/", "-"))


def newest_file(*folders):
    """When the newest file in the folders was written: after more training it is another model."""
    files = [entry for folder in folders if folder for entry in os.scandir(folder)]
    return max(entry.stat().st_mtime for entry in files)


class DreamInHarness:
    """What the harness asks of a model, for one cell of the grid. What its file has is kept."""
    rank, world_size, tokenizer_name = 0, 1, "dream"

    def __init__(self, model, tok, sm, cell, compiled=False):
        self.model, self.tok, self.sm, self.cell, self.compiled = model, tok, sm, cell, compiled
        self.path = cell_path(cell) + ".jsonl"

    def apply_chat_template(self, messages, add_generation_prompt=True):
        if add_generation_prompt:
            return self.tok.chat(messages)
        # The assistant goes on with the last message.
        return self.tok.chat(messages[:-1]) + messages[-1]["content"]

    def generate_until(self, requests):
        weights = newest_file(self.cell.model, self.cell.adapter)
        lines = launch.read_jsonl(self.path)
        for line, request in zip(lines, requests):
            if (line["prompt"], line["weights"]) != (request.args[0], weights):
                raise Refused(f"{self.path} holds answers to other prompts or of other weights: "
                              f"remove it, or give another --out")
        rest = requests[len(lines):]
        for request in launch.progress(rest, "answers", len(requests), initial=len(lines)):
            prompt, until = request.args[0], request.args[1].get("until", [])
            ids = self.tok.encode(prompt, special=True)[-PROMPT_TOKENS:]
            until = [until] if isinstance(until, str) else until
            if self.compiled and request is rest[0]:  # it may compile for a minute: not counted
                answer(self.model, self.tok, self.sm, ids, self.cell, until)
            text, stats = answer(self.model, self.tok, self.sm, ids, self.cell, until)
            lines.append({"prompt": prompt, "response": text, "weights": weights, **stats})
            launch.append_jsonl(self.path, lines[-1])
        return [line["response"] for line in lines]


def ask(lm, loaded, limit, scored):
    """What the harness finds when it asks lm, {} if not `scored`."""
    import lm_eval
    settings = {"limit": limit or None, "apply_chat_template": True, "fewshot_as_multiturn": True}
    if scored:
        return lm_eval.evaluate(lm, loaded, confirm_run_unsafe_code=True, bootstrap_iters=0,
                                **settings)
    [task] = loaded["tasks"].values()
    task.build_all_requests(chat_template=lm.apply_chat_template, **settings)
    lm.generate_until(task.instances)
    return {}


def group(cfg, budget, feedback):
    """What results share that the table averages: seeds of a run of finetuning have its name."""
    shared = {name: getattr(cfg, name) for name in SHARED}
    shared |= {"budget": budget, "feedback": feedback, "FT": "-"}
    if cfg.adapter:
        run, _ = name_and_seed(cfg.adapter)  # dream-sm of out/dream-sm-1231/best
        shared |= {"FT": "yes", "FT run": run, "FT folder": os.path.basename(cfg.adapter)}
        path = os.path.join(cfg.adapter, "finetune.json")
        if os.path.exists(path):  # other trainers leave none
            training = launch.read_json(path)
            steps, epochs = training["steps"], training["epochs"]
            shared["FT"] = f"{steps} updates" if steps else f"{epochs} epochs"
    return shared


def evaluate(cfg):
    """Answers and scores a task in every cell of the grid. Returns the results, a list of dicts."""
    import lm_eval
    cfg = replace(cfg, model=cfg.model.rstrip("/"), adapter=cfg.adapter.rstrip("/"))
    loaded = load_task(cfg)
    [task] = loaded["tasks"].values()
    scored = cfg.confirm_run_unsafe_code or not task.config.unsafe_code
    grid = cells(cfg, task.config.generation_kwargs["max_gen_toks"])
    gpu = launch.machine(cfg.device)[2].type == "cuda"
    compiled = gpu if cfg.compile is None else cfg.compile
    model, tok, sm = load_for_decoding(replace(grid[0][1], compile=compiled))
    feedback, results = feedback_label(cfg, sm), []
    for budget, cell in grid:
        lm = DreamInHarness(model, tok, sm, cell, compiled)
        out = ask(lm, loaded, cfg.limit, scored)
        found = out.get("results", {}).get(cfg.task, {})
        scores = [100 * value for name, value in found.items()
                  if isinstance(value, float) and "stderr" not in name]
        lines = launch.read_jsonl(lm.path)
        result = {
            "git": git_version(), "lm_eval": lm_eval.__version__, "n": len(lines),
            "machine": torch.cuda.get_device_name() if gpu else "CPU", "compiled": compiled,
            "column": task.eval_docs[0]["scoring"]["column"], "budget": budget,
            "feedback": feedback, "settings": asdict(cell),
            "group": group(replace(cfg, block=cell.block), budget, feedback),
            "prompt": lines[0]["prompt"], "score": scores[-1] if scores else None, "harness": found}
        for name in "nfe", "tokens", "kept", "seconds":
            result[name] = sum(line[name] for line in lines)
        launch.write_text(cell_path(cell) + ".json", json.dumps(result, indent=1))
        results.append(result)
    return results


def main(cfg):
    for result in evaluate(cfg):
        print("{column}: score {score}, {feedback}, NFE {nfe}, {tokens} tokens ({kept} before the "
              "end) in {seconds:.1f} s".format(**result))
    print(benchmarks(cfg.out))


if __name__ == "__main__":
    launch.run(main, Config)
