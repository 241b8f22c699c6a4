# SPDX-License-Identifier: MIT
"""Dream in lm-evaluation-harness: answers, scores, tokens/s.           §4.2, App. B.2, C.6-C.9

    python lab/eval_dream.py --model=DIR --adapter=DIR --task=gsm8k_cot --data=F --nfe=1/4,1/2,1/1
    python lab/eval_dream.py --model=DIR --data=F --blocks=16,32,48,96 --threshold=0.9

The harness asks and scores. This file is the model that it asks. A killed run keeps its answers.
The paper's tasks, their prompts and lengths are in tasks/. REPRODUCE.md downloads their problems.
"""

import itertools
import json
import logging
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from launch import Count, Positive, Refused
from plot import benchmarks
from sample_dream import Decoding, answer, check_blocks, load_for_decoding

PROMPT_TOKENS = 1024  # longer prompts lose their beginning [code]

# Fields that do not change an answer. Files are named after all the others.
NOT_IN_NAME = {"task", "data", "nfe", "blocks", "out", "confirm_run_unsafe_code", "timeout"}
# Fields that must agree before results are averaged.
SHARED = ("model", "data", "limit", "gen_len", "block", "cache", "threshold", "algorithm",
          "temperature", "top_p", "merge", "dtype")


@dataclass
class Config(Decoding):
    task: Literal["humaneval_instruct", "humaneval_plus_instruct", "mbpp_instruct",
                  "mbpp_plus_instruct", "gsm8k_cot", "math500"] = "humaneval_instruct"
    data: str = ""                    # the task's problems, a .json or .jsonl(.gz) file
    nfe: str = "1/1"                  # NFE budgets, Eq. 4, comma-separated: steps / gen_len
    blocks: str = ""                  # Fast-dLLM block lengths, comma-separated (default: block)
    gen_len: Count = 0                # (default: the task's, App. B.2)
    limit: Count = 0                  # use only the first `limit` problems (default: all)
    out: str = "out/answers"          # a .json and a .jsonl (answers) for each budget and block
    # Run the programs that the model writes. They have limits, but no sandbox: use a container.
    # Without this flag the answers are stored, and a second run with it scores them.
    confirm_run_unsafe_code: bool = False
    timeout: Positive = 30.0          # seconds for one program


def load_task(cfg):
    """{"tasks": {name: task}}, as the harness wants it, with only this task."""
    from lm_eval.tasks import TaskManager
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about what we intend
    # Without its own 14,000 tasks, the harness starts ten seconds sooner.
    tasks = TaskManager(include_path=f"{os.path.dirname(__file__)}/tasks", include_defaults=False,
                        metadata={"data": cfg.data, "timeout": cfg.timeout})
    return tasks.load([cfg.task])


def cells(cfg, length):
    """[(budget, cfg)] for every NFE budget and block length. length: of the task's response."""
    if cfg.steps:
        raise Refused(f"--steps={cfg.steps}: here steps follow from --nfe, a share of the tokens")
    grid = []
    L = cfg.gen_len or length
    blocks = (cfg.blocks or str(cfg.block)).split(",")
    for share, block in itertools.product(cfg.nfe.split(","), blocks):
        if not re.fullmatch(r"\d+/[1-9]\d*", share) or not block.isdecimal():
            raise Refused(f"--nfe={share}, a block of {block}: give shares such as 1/4,1/2, and "
                          "lengths such as 16,32")
        budget = Fraction(share)
        steps = budget * L
        if steps < 1 or steps.denominator > 1:
            raise Refused(f"--nfe={budget} of {L} tokens is not a number of steps")
        cell = replace(cfg, gen_len=L, steps=int(steps), block=int(block))
        check_blocks(cell.gen_len, cell.steps, cell.block, cell.threshold)
        grid.append((f"{budget.numerator}/{budget.denominator}", cell))
    return grid


def cell_path(cell):
    """Path of a cell's files, without suffix. It names all settings that are not the default."""
    given = [f"{name}={value}" for name, value in asdict(cell).items()
             if name not in NOT_IN_NAME and value != getattr(Config, name)]
    return os.path.join(cell.out, "_".join([cell.task, *given]).replace("/", "-"))


class DreamInHarness:
    """The model as the harness wants it, for one cell. Answers that are in its file are kept."""
    rank = 0
    world_size = 1
    tokenizer_name = "dream"

    def __init__(self, model, tok, sm, cell, here):
        self.model, self.tok, self.sm, self.cell, self.here = model, tok, sm, cell, here
        self.path = cell_path(cell) + ".jsonl"

    def apply_chat_template(self, messages, add_generation_prompt=True):
        if add_generation_prompt:
            return self.tok.chat(messages)
        # The last message is the beginning of the assistant's answer.
        return self.tok.chat(messages[:-1]) + messages[-1]["content"]

    def encode(self, prompt):
        """The last ids of a prompt. If it names [MASK], that is text, not a mask to fill."""
        mask_id, ids = self.model.cfg.mask_token_id, []
        for i in self.tok.encode(prompt, special=True):
            ids += self.tok.encode(self.tok.decode([i])) if i == mask_id else [i]
        return ids[-PROMPT_TOKENS:]

    def generate_until(self, requests):
        folders = [folder for folder in (self.cell.model, self.cell.adapter) if folder]
        # The times of the newest files tell whether the model was trained further.
        weights = [max(file.stat().st_mtime for file in os.scandir(folder)) for folder in folders]
        if self.cell.code:
            weights.append(os.stat(self.cell.code).st_mtime)
        lines = launch.read_jsonl(self.path)
        for line, request in zip(lines, requests):
            if (line["prompt"], line["weights"]) != (request.args[0], weights):
                raise Refused(f"{self.path} holds answers to other prompts or of other weights: "
                              f"remove it, or give another --out")
        rest = requests[len(lines):]
        for request in launch.progress(rest, "answers", len(requests), initial=len(lines)):
            prompt, until = request.args[0], request.args[1]["until"]
            ids = self.encode(prompt)
            if self.here["compiled"] and request is rest[0]:  # compiles: not timed
                answer(self.model, self.tok, self.sm, ids, self.cell, until)
            text, stats = answer(self.model, self.tok, self.sm, ids, self.cell, until)
            line = {"prompt": prompt, "response": text, "weights": weights}
            lines.append(line | stats | self.here)
            launch.append_jsonl(self.path, lines[-1])
        return [line["response"] for line in lines]


def ask(lm, loaded, limit, scored):
    """The harness's results for the model `lm`. If not `scored`: {}, and lm only answers."""
    import lm_eval
    how = {"limit": limit or None, "apply_chat_template": True, "fewshot_as_multiturn": True}
    if scored:
        return lm_eval.evaluate(lm, loaded, confirm_run_unsafe_code=True, bootstrap_iters=0, **how)
    [task] = loaded["tasks"].values()
    task.build_all_requests(chat_template=lm.apply_chat_template, **how)
    lm.generate_until(task.instances)
    return {}


def group(cfg, budget, feedback, made):
    """What results must share to be averaged in the table. Seeds of one finetuning run do.

    made: {"machine", "compiled"} of the answers.
    """
    shared = {name: getattr(cfg, name) for name in SHARED}
    shared |= {name: made[name] for name in ("machine", "compiled")}
    shared |= {"budget": budget, "feedback": feedback, "FT": "-"}
    if cfg.adapter:
        folder, name = os.path.split(os.path.normpath(cfg.adapter))
        run = re.sub(r"-\d+$", "", folder)  # out/dream-sm of out/dream-sm-1/best
        shared |= {"FT": "yes", "FT run": run, "adapter": name}
        path = os.path.join(cfg.adapter, "finetune.json")
        if os.path.exists(path):  # adapters from other trainers have none
            made_by = launch.read_json(path)
            shared["FT"] = f"{made_by['epochs']} epochs"
            if made_by["steps"]:
                shared["FT"] = f"{made_by['steps']} updates"
    return shared


def evaluate(cfg):
    """Answer and score a task in every cell of the grid. Returns the results, a list of dicts."""
    import lm_eval
    if not cfg.data:
        raise Refused("--data is needed: the problems of the task")
    cfg = replace(cfg, model=cfg.model.rstrip("/"), adapter=cfg.adapter.rstrip("/"))
    loaded = load_task(cfg)
    [task] = loaded["tasks"].values()
    scored = cfg.confirm_run_unsafe_code or not task.config.unsafe_code
    grid = cells(cfg, task.config.generation_kwargs["max_gen_toks"])
    gpu = launch.machine(cfg.device).device.type == "cuda"
    compiled = gpu if cfg.compile is None else cfg.compile
    model, tok, sm = load_for_decoding(replace(grid[0][1], compile=compiled))
    feedback = f"SM k={sm.k or '|V|'}" if sm else "binary" if cfg.soft else "without feedback"
    for name in ("code", "omega_s", "omega_a", "omega_b", "schedule", "switch") if sm else ():
        if getattr(cfg, name) != getattr(Config, name):
            feedback += f", {name}={getattr(cfg, name)}"
    here = {"git": launch.git_version(), "compiled": compiled,
            "machine": torch.cuda.get_device_name() if gpu else "CPU"}
    results = []
    for budget, cell in grid:
        lm = DreamInHarness(model, tok, sm, cell, here)
        found = ask(lm, loaded, cfg.limit, scored).get("results", {}).get(cfg.task, {})
        # One metric, or none if the answers are not scored
        [score] = [100 * value for value in found.values() if isinstance(value, float)] or [None]
        lines = launch.read_jsonl(lm.path)
        made = {name: lines[-1][name] for name in here}  # an earlier run may have answered
        result = made | {
            "lm_eval": lm_eval.__version__, "n": len(lines),
            "column": task.eval_docs[0]["scoring"]["column"], "budget": budget,
            "feedback": feedback, "settings": asdict(cell), "prompt": lines[0]["prompt"],
            "group": group(replace(cfg, block=cell.block), budget, feedback, made),
            "score": score, "harness": found}
        for name in "nfe", "tokens", "kept", "seconds":
            result[name] = sum(line[name] for line in lines)
        result["tokens_per_pass"] = result["tokens"] / result["nfe"]
        result["passes_per_s"] = result["nfe"] / result["seconds"]
        result["tokens_per_s"] = result["tokens"] / result["seconds"]
        launch.write_text(cell_path(cell) + ".json", json.dumps(result, indent=1))
        print("{column}: score {score}, {feedback}, NFE {nfe}, {tokens} tokens ({kept} before the "
              "end) in {seconds:.1f} s: {tokens_per_pass:.2f} tokens per forward pass, "
              "{tokens_per_s:.1f} tokens and {passes_per_s:.1f} passes per second".format(**result))
        results.append(result)
    return results


def main(cfg):
    evaluate(cfg)
    print(benchmarks(cfg.out))


if __name__ == "__main__":
    launch.run(main, Config)
