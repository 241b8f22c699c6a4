# SPDX-License-Identifier: MIT
"""Every claim about speed and memory, by one command.                       §4, App. B, App. C

    python lab/bench.py                                # the paper's size on a GPU, `cpu` elsewhere
    python lab/bench.py cpu --json=bench.json          # 8 blocks of 256 on a CPU: some minutes
    python lab/bench.py cpu --parts=train,sample       # some of the functions bench_… below
    python lab/bench.py cpu --parts=against --against=../old --repeats=15  # an older checkout
    torchrun --nproc_per_node=2 lab/bench.py scaling       # several processes, one model

Machines are shared and clocks drift. So the cases of a table take turns, A B C A B C …, and are
compared within a turn: a ratio is the median over turns. Seconds are medians too. `cpu` is
processor time, summed over threads. A matrix product takes turns with the updates and says what
the machine can do at best.

Weights are random, and speed depends on them in one place only: the nucleus has less to do when
predictions are peaked. So the head is scaled until they are as peaked as a trained model's
(--sharpness). `flat` shows the worst case, an untrained head.

Not here: quality, and anything that trains. plot.py draws the curves from the JSON. results/gpu.sh
runs all that needs a GPU.
"""

import contextlib
import copy
import glob
import importlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import checkpoint
import dora
import launch
from data import rng
from dream import Dream, DreamConfig
from finetune_dream import TARGETS, TwoPassDream, objective
from launch import Count, Refused, Share, Size, progress, write_text
from mdlm import MDLM, ModelConfig, TwoPass, corrupt, sample_times
from sample import generate
from sample_dream import decode, decode_blocks, pad_prompts
from softmask import SoftMask
from train import PEAK_FLOPS, flops_per_token, update_ema


@dataclass
class Config:
    # what to measure. Only if they are named: overhead, profile, attention, against, scaling
    parts: str = "train,memory,sample,curves,dream,vocabulary"
    repeats: int = 5              # turns that count
    against: str = ""             # folder of another checkout, for the part of this name
    json: str = ""                # also write everything to this file
    # MDLM (default of every 0: as in the preset gpu on CUDA, else as in the preset cpu)
    n_layer: Count = 0
    n_head: Count = 0
    n_embd: Count = 0
    vocab_size: Count = 0
    length: Count = 0             # L
    batch: Count = 0              # sequences per update
    steps: Count = 0              # T of a sequence that is sampled alone
    many: Count = 0               # sequences that are sampled together
    many_steps: Count = 0         # and their T, smaller on a GPU because such a step takes long
    n_cond: Size = 128
    dropout: Share = 0.1          # in training
    k: int | None = 3
    top_p: float = 0.9
    sharpness: float = 3.5        # standard deviation of the random logits
    # Dream
    dream_layers: Count = 0
    dream_width: Count = 0
    dream_vocab: Count = 0
    dream_length: Count = 0       # tokens of a dialogue, for finetuning
    dream_answer: Count = 0       # tokens of a prompt, and of its answer
    # the machine
    device: str = "auto"          # cuda, else mps, else cpu
    dtype: str = "auto"           # bfloat16 where the GPU has it, else float32
    compile: bool | None = None   # the trunk (default: on CUDA)


PRESETS = {
    "cpu": dict(
        n_layer=8, n_head=8, n_embd=256, vocab_size=50258, length=256, batch=4, steps=64, many=8,
        many_steps=64, dream_layers=4, dream_width=256, dream_vocab=20000, dream_length=128,
        dream_answer=64),
    "gpu": dict(
        n_layer=12, n_head=12, n_embd=768, vocab_size=50258, length=1024, batch=32, steps=1024,
        many=64, many_steps=128, dream_layers=28, dream_width=3584, dream_vocab=152064,
        dream_length=2048, dream_answer=256),
    "quick": dict(
        n_layer=2, n_head=2, n_embd=32, vocab_size=500, length=32, batch=2, steps=8, many=2,
        many_steps=8, repeats=2, dream_layers=2, dream_width=32, dream_vocab=300, dream_length=32,
        dream_answer=16),
    "scaling": dict(parts="scaling"),
}


# -------------------------------------------------------------------------------------------------
# measuring


def synchronize(device):
    getattr(torch, device.type).synchronize()  # torch.cuda, torch.mps, torch.cpu


def timed(fn, device):
    """What one call costs: {"seconds", "cpu"} and, on CUDA, "peak GB" of device memory."""
    cuda = device.type == "cuda"
    synchronize(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    synchronize(device)
    found = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return found | ({"peak GB": torch.cuda.max_memory_allocated() / 1e9} if cuda else {})


def interleaved(cases, repeats, device):
    """Time functions in turns. The first turn warms up and does not count.

    cases: {name: function}; the first one is what the others are compared with.
    Returns {name: {column of `timed`: median, "ratio": median}}. A ratio is taken within a turn, so
    whatever slows a whole turn cancels.
    """
    silent = dist.is_initialized() and dist.get_rank() > 0
    bar = progress(range(repeats + 1), f"turns of {len(cases)}", disable=silent, leave=False)
    turns = [{name: timed(fn, device) for name, fn in cases.items()} for _ in bar]
    first, found = next(iter(cases)), {}
    for name in cases:
        mine = [turn[name] for turn in turns[1:]]
        found[name] = {key: statistics.median(m[key] for m in mine) for key in mine[0]}
        ratios = [turn[name]["seconds"] / turn[first]["seconds"] for turn in turns[1:]]
        found[name]["ratio"] = statistics.median(ratios)
    return found


def resident():
    """The most memory that this process has held so far, in GB."""
    # Linux first: its ru_maxrss survives exec, and would be that of the parent process.
    with contextlib.suppress(OSError), open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 / 1e9
    import resource  # not on Windows
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def high_water(fn, *args):
    before = resident()
    fn(*args)
    return {"peak GB": resident(), "before GB": before}


def peak(fn, cfg, device, *args):
    """Peak memory of fn(cfg, device, *args): the device's on CUDA, else of a fresh process.

    fn: a function of this module.   Returns {"peak GB", "before GB"}: before fn runs, a process
    holds Python and its libraries. Raises Refused when the process dies.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() / 1e9
        return {"peak GB": timed(lambda: fn(cfg, device, *args), device)["peak GB"],
                "before GB": before}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        try:
            return fresh.submit(high_water, fn, cfg, device, *args).result()
        except (BrokenProcessPool, ImportError) as e:
            raise Refused(f"memory was not measured ({e}): the process may need more of it, and "
                          f"on Windows it cannot be asked for")


def print_table(title, rows, note=""):
    """Print measurements.   rows: {name: {column: number or None}}."""
    columns = list(dict.fromkeys(c for row in rows.values() for c in row))
    print(f"\n{title}\n{'':34}" + "".join(f"{c:>13}" for c in columns))
    for name, row in rows.items():
        values = [row.get(c) for c in columns]
        texts = ["" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}" for v in values]
        print(f"{name:34}" + "".join(f"{text:>13}" for text in texts))
    if note:
        print(note)


# -------------------------------------------------------------------------------------------------
# MDLM: what is measured


def build(cfg, device):
    """A random MDLM whose feedback is as strong as after training."""
    names = ("n_layer", "n_head", "n_embd", "n_cond", "vocab_size", "length", "dropout", "k")
    sizes = {name: getattr(cfg, name) for name in names}
    model = MDLM(ModelConfig(**sizes, mask_id=cfg.vocab_size - 1, omega_s=0.5, omega_a=1.0,
                             omega_b=-5.0))
    std = cfg.sharpness / cfg.n_embd ** 0.5  # hidden states have |h|² = D
    nn.init.normal_(model.net.output_layer.linear.weight, std=std)
    return model.to(device)


def compiled(cfg, device):
    return device.type == "cuda" if cfg.compile is None else cfg.compile


def compile_trunk(model, mode=None):
    """As train.py and sample.py do it, but with a graph of its own for each size.

    torch.compile would answer a second size with one slower graph for all sizes. And it keeps eight
    graphs of a function, so those of earlier models are dropped here.
    """
    torch.compiler.reset()
    model.net.trunk = torch.compile(model.net.trunk, mode=mode, dynamic=False)


def training(cfg, device, dtype, ddp=False):
    """One update of train.py on random tokens, as a function, and the model that it updates.

    Returns step(soft, xt=…, exchange=True, mark=None) and the MDLM.
    exchange: False keeps gradients from the other processes.   mark: see `sections_of`.
    """
    model = build(cfg, device)
    ema = copy.deepcopy(model.net).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, lr=1e-5,
                                  fused=device.type in ("cuda", "cpu"))
    if compiled(cfg, device):
        compile_trunk(model)
    net = DistributedDataParallel(model) if ddp else model
    generator, mask_id = rng("bench"), model.mask_id
    x0 = torch.randint(mask_id, (cfg.batch, cfg.length), generator=generator)
    t = sample_times(cfg.batch, generator)
    # One x_t for all calls, because the number of masked rows decides how long an update takes.
    masked = corrupt(x0, t, mask_id, generator).to(device)
    x0, t = x0.to(device), t.to(device)

    def step(soft, xt=masked, exchange=True, mark=None):
        with contextlib.nullcontext() if exchange or not ddp else net.no_sync():
            with torch.autocast(device.type, dtype, enabled=bool(dtype), cache_enabled=False):
                nll = net(x0, xt, t, soft)                                     # (B,)
            (nll.sum() / x0.numel()).backward()
        if mark:
            mark("clip, optimizer, EMA")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ema(ema, model.net, 1)
    return step, model


def sampling(cfg, device, dtype, model, n, steps, soft, mark=None):
    """n samples (Alg. 2). Returns the mean number of network calls that a sequence needed."""
    generators = [rng("bench", i) for i in range(n)]
    on_step = mark and (lambda *_: mark("the rest"))
    with torch.autocast(device.type, dtype, enabled=bool(dtype)):
        _, nfe = generate(model, n, steps, "mdlm", cfg.top_p, generators, on_step, soft=soft)
    return nfe.double().mean().item()


# -------------------------------------------------------------------------------------------------
# MDLM: the parts


def hours(model, batch, binary, soft):
    """Print and return the hours that the paper's four runs would take on this device     App. B.1

    model: ModelConfig.   binary, soft: rows of `interleaved` for an update of `batch` sequences.
    Another model is converted by its FLOPs. Several devices are assumed to lose nothing.
    Returns {run: {"1 device", "4 devices", "8 devices"}}.
    """
    runs = {"from scratch, binary": (1e6, 0), "from scratch, SM 0.8": (1e6, 0.8),
            "continuation, binary": (1e5, 0), "continuation, SM 0.8": (1e5, 0.8)}
    paper, rows = ModelConfig(), {}
    for run, (updates, p_sm) in runs.items():
        seconds = (1 - p_sm) * binary["seconds"] + p_sm * soft["seconds"]
        rate = batch * model.length / seconds * flops_per_token(model, p_sm)  # FLOP/s
        alone = updates * 512 * 1024 * flops_per_token(paper, p_sm) / rate / 3600
        rows[run] = {"1 device": alone, "4 devices": alone / 4, "8 devices": alone / 8}
    print_table("hours for the paper's runs, 512 × 1024 tokens an update", rows)
    return rows


def bench_train(cfg, device, dtype):
    """An update, binary and with SM, and how much of the device's arithmetic it uses."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device, dtype=dtype or torch.float32)
    step, model = training(cfg, device, dtype)
    cases = {"binary": lambda: step(False), "SM, p_sm = 1": lambda: step(True),
             "matrix product": lambda: a @ a}
    binary, soft, gauge = interleaved(cases, cfg.repeats, device).values()
    mixed = {key: 0.2 * binary[key] + 0.8 * soft[key] for key in ("seconds", "cpu", "ratio")}
    rate = 2 * n ** 3 / gauge["seconds"]  # FLOP/s
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    limit = next((flops for part, flops in PEAK_FLOPS.items() if part in name), rate)
    rows = {"binary": binary, "SM, p_sm = 1": soft, "SM, p_sm = 0.8 (expected)": mixed}
    for row, p_sm in zip(rows.values(), (0, 1, 0.8)):
        row["tokens/s"] = cfg.batch * cfg.length / row["seconds"]
        row["TFLOP/s"] = row["tokens/s"] * flops_per_token(model.cfg, p_sm) / 1e12
        row["MFU %"] = 100 * row["TFLOP/s"] * 1e12 / limit
    print_table("training, one update", rows,
                f"matrix product of this run: {rate / 1e12:.3g} TFLOP/s; MFU against "
                f"{limit / 1e12:.3g}; binary = {binary['seconds'] / gauge['seconds']:.1f} products")
    return rows | {"matrix product": gauge | {"TFLOP/s": rate / 1e12},
                   "hours": hours(model.cfg, cfg.batch, binary, soft)}


def three_updates(cfg, device, dtype, soft):
    step, _ = training(cfg, device, dtype)
    for _ in range(3):
        step(soft)


def bench_memory(cfg, device, dtype):
    rows = {name: peak(three_updates, cfg, device, dtype, soft)
            for name, soft in (("binary", False), ("SM", True))}
    print_table("peak memory of three updates", rows,
                "on a CPU: of a whole fresh process; before: Python and its libraries")
    return rows


def bench_sample(cfg, device, dtype):
    """Whole samples, one alone and many together, binary and with SM, eager and compiled."""
    eager = build(cfg, device).eval()
    flat = copy.deepcopy(eager)
    nn.init.zeros_(flat.net.output_layer.linear.weight)
    models, cases, calls = {"": eager}, {}, {}
    if compiled(cfg, device):
        for name, mode in ((", compiled", None), (", CUDA graphs", "reduce-overhead")):
            models[name] = copy.deepcopy(eager)
            compile_trunk(models[name], mode)
    for n, T in (1, cfg.steps), (cfg.many, cfg.many_steps):
        for name, model in models.items():
            for soft in (False, True):
                cases[f"{'SM' if soft else 'binary'}, batch {n}{name}"] = (model, n, T, soft)
    cases["binary, batch 1, flat"] = (flat, 1, cfg.steps, False)

    def run(name):
        calls[name] = sampling(cfg, device, dtype, *cases[name])

    found = interleaved({name: partial(run, name) for name in cases},
                        max(2, cfg.repeats // 2), device)
    for name, (_, n, T, _) in cases.items():
        s = found[name]["seconds"]
        found[name] |= {"s/step": s / T, "s/call": s / calls[name], "s/sequence": s / n,
                        "tokens/s": n * cfg.length / s}
    print_table(f"sampling, L = {cfg.length}, nucleus {cfg.top_p}, T = {cfg.steps} "
                f"({cfg.many_steps} for {cfg.many} together)", found,
                "a call: a network call that a sequence needed")
    return found


def around(x, least=1):
    return sorted({max(least, y) for y in (x // 4, x // 2, x, 2 * x)})


def bench_curves(cfg, device, dtype):
    """Time over one size, the others as configured: points {"x", "binary", "SM"} in seconds."""
    def update(key, x):
        step, _ = training(replace(cfg, **{key: x}), device, dtype)
        return step

    def sample(key, x):
        here = replace(cfg, **{key: x})
        model = build(here, device).eval()
        return partial(sampling, here, device, dtype, model, 1, here.steps)

    out = {}
    for name, make, key, values in (
            ("update over L", update, "length", around(cfg.length)),
            ("update over V", update, "vocab_size", around(cfg.vocab_size, 8)),
            ("update over batch", update, "batch", around(cfg.batch)),
            ("update over k", update, "k", [1, 3, 10, None]),
            ("sample over T", sample, "steps", around(cfg.steps)[:3]),
            ("sample over L", sample, "length", around(cfg.length)[:3])):
        out[name], rows = [], {}
        for x in values:
            fn = make(key, x)
            cases = {"binary": partial(fn, False), "SM": partial(fn, True)}
            found = interleaved(cases, max(2, cfg.repeats // 2), device)
            size = "|V|" if x is None else x
            rows[str(size)] = {case: row["seconds"] for case, row in found.items()}
            out[name].append({"x": size} | rows[str(size)])
        print_table(f"{name}, seconds", rows)
    return out


def sections_of(run, model, after_trunk, device):
    """{section: seconds} of run(mark=…), which waits for the device between sections.

    mark(name): from here on, time belongs to the section `name`.
    after_trunk: the section that follows the trunk.
    The model marks the trunk, the loss and the parts of the feedback. The backward of trunk, loss
    and feedback begins when the gradient of what they returned is ready.
    """
    seconds, last = {}, ["", 0.0]

    def mark(name):
        synchronize(device)  # otherwise only the host's time would be measured
        now = time.perf_counter()
        seconds[last[0]] = seconds.get(last[0], 0.0) + now - last[1]
        last[:] = name, now

    def begins(name, fn, after, backward=True):
        def call(*args):
            mark(name)
            out = fn(*args)
            made = out[0] if isinstance(out, tuple) else out
            if backward and made.requires_grad:
                made.register_hook(lambda _: mark(f"{name}, backward"))
            mark(after)
            return out
        return call

    trunk = model.net.trunk
    model.net.trunk = begins("trunk", trunk, after_trunk)
    model.feedback = begins("SM: head", model.feedback, "the rest")
    model.sm.forward = begins("SM: λ, top k", model.sm.forward, "SM: head", backward=False)
    model.sm.mix = begins("SM: look-up", model.sm.mix, "SM: head", backward=False)
    model.cross_entropy = begins("head and loss", model.cross_entropy, "the rest")
    mark("the rest")
    run(mark=mark)
    mark("")
    model.net.trunk = trunk
    # Without these attributes, the methods of the classes are visible again.
    del model.feedback, model.cross_entropy, model.sm.forward, model.sm.mix
    del seconds[""]
    return seconds


def where_time_goes(title, run, model, after_trunk, device):
    """Print and return what run(mark=…) spends by section, and its costliest operations.

    The sections come from a run that waits for the device between them. The operations come from
    torch.profiler. On CUDA, "gaps %" is the share of the time without any kernel.
    """
    whole = interleaved({title: run}, 3, device)[title]["seconds"]
    seconds = sections_of(run, model, after_trunk, device)
    total = sum(seconds.values())
    rows = {name: {"seconds": s, "%": 100 * s / total} for name, s in seconds.items()}
    print_table(title, rows, f"{whole:.3g} s when nothing waits between sections")
    with profile() as prof:
        run()
        synchronize(device)
    cuda, operations = device.type == "cuda", prof.key_averages()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    print(operations.table(sort_by=key, row_limit=10, max_name_column_width=50))
    found = {"sections": rows, "seconds": whole}
    if cuda:
        # Only kernels: the operations and annotations above them repeat their time.
        kernels = [e for e in operations
                   if e.device_type.name == "CUDA" and not e.is_user_annotation]
        found["gaps %"] = 100 - sum(e.self_device_time_total for e in kernels) / whole / 1e4
        print(f"the device has nothing to do in {found['gaps %']:.1f}% of the time")
    return found


def bench_profile(cfg, device, dtype):
    """Where an update and a sample spend their time, measured in the code that makes them."""
    step, model = training(cfg, device, dtype)
    sampler, T, found = build(cfg, device).eval(), min(cfg.steps, 16), {}
    if compiled(cfg, device):
        compile_trunk(sampler, "reduce-overhead")

    for name, soft in ("binary", False), ("SM", True):
        title, update = f"update, {name}", partial(step, soft)
        found[title] = where_time_goes(title, update, model, "the rest", device)
        title = f"sample in {T} steps, {name}"
        sample = partial(sampling, cfg, device, dtype, sampler, 1, T, soft)
        found[title] = where_time_goes(title, sample, sampler, "draw: head, nucleus, token", device)
    return found


def bench_overhead(cfg, device, dtype):
    """A sample, binary and with SM: network calls, seconds of one, and shares.     App. C.4, Fig. 6

    Returns {case: {"seconds", "calls", "s/call", …, "sections": {section: seconds}}}. The sections
    are of another sample, which waits for the device between them.
    """
    model, calls = build(cfg, device).eval(), {}
    if compiled(cfg, device):
        compile_trunk(model, "reduce-overhead")

    def sample(name, mark=None):
        calls[name] = sampling(cfg, device, dtype, model, 1, cfg.steps, name == "SM", mark)

    rows = interleaved({name: partial(sample, name) for name in ("binary", "SM")},
                       max(2, cfg.repeats // 2), device)
    for name, row in rows.items():
        row |= {"calls": calls[name], "s/call": row["seconds"] / calls[name]}
    print_table(f"a sample of {cfg.length} tokens, T = {cfg.steps}", rows)
    shares = {}
    for name, row in rows.items():
        sections = sections_of(partial(sample, name), model, "draw: head, nucleus, token", device)
        row["sections"], total = sections, sum(sections.values())
        for section, s in sections.items():
            shares[f"{name}: {section.removeprefix('SM: ')}"] = {
                "seconds": s, "%": 100 * s / total}
    print_table("what it is spent on, in a run that waits between sections", shares)
    return rows


def bench_attention(cfg, device, dtype):
    """The attention of one layer, forward and backward, by every kernel that works here."""
    shape = (cfg.batch, cfg.n_head, cfg.length, cfg.n_embd // cfg.n_head)
    how = dict(device=device, dtype=dtype or torch.float32, requires_grad=True)
    q, k, v, grad = (torch.randn(shape, **how) for _ in range(4))

    def both(backends):
        with sdpa_kernel(backends):
            y = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(y, (q, k, v), grad)

    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    choices = {name: [getattr(SDPBackend, name)] for name in names}
    choices = {"chosen by PyTorch": sum(choices.values(), [])} | choices
    cases = {}
    for name, choice in choices.items():
        with contextlib.suppress(RuntimeError):  # this device, dtype or size has no such kernel
            both(choice)
            cases[name] = partial(both, choice)
    rows = interleaved(cases, cfg.repeats, device)
    print_table(f"attention of one layer, {' × '.join(map(str, shape))}", rows)
    return rows


def checkout(folder):
    """The bench.py of another checkout, with the modules of that checkout."""
    folders = [os.path.join(os.path.abspath(folder), "lab"), os.path.abspath(folder)]
    files = glob.glob(os.path.join(folder, "*.py")) + glob.glob(os.path.join(folder, "lab", "*.py"))
    names = [os.path.basename(file).removesuffix(".py") for file in files]
    mine = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path = sys.path[:]
    sys.path[:0] = folders
    try:
        return importlib.import_module("bench")
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(mine)


def bench_against(cfg, device, dtype):
    """Updates and samples, by another checkout and by this one: how much faster this one is.

    Both run in this process and take turns. On a machine that is not idle, processor time is the
    better measure.
    """
    modules = {"that": checkout(cfg.against), "this": sys.modules[__name__]}
    if missing := {"build", "training", "sampling"} - vars(modules["that"]).keys():
        raise Refused(f"the bench.py of {cfg.against} has no {' and no '.join(sorted(missing))}: "
                      f"check out a later commit there")
    rows = {}

    def case(module, kind, soft):
        torch.manual_seed(0)  # the same weights for both
        if kind == "update":
            return partial(module.training(cfg, device, dtype)[0], soft)
        model = module.build(cfg, device).eval()
        return partial(module.sampling, cfg, device, dtype, model, 1, cfg.steps, soft)

    for kind in "update", "sample":
        for soft in False, True:
            found = interleaved({name: case(module, kind, soft) for name, module in
                                 modules.items()}, cfg.repeats, device)
            that, this = found.values()
            rows[f"{kind}, {'SM' if soft else 'binary'}"] = {
                "that s": that["seconds"], "this s": this["seconds"],
                "faster": 1 / this["ratio"], "that cpu": that["cpu"], "this cpu": this["cpu"],
                "faster, cpu": that["cpu"] / this["cpu"]}
    commit = modules["that"].checkpoint.git_version().get("commit", "unknown")
    print_table(f"this checkout against {commit[:7]}", rows)
    return rows | {"commit": commit}


def bench_scaling(cfg, device, dtype):
    """The same update by one process and by all, under torchrun.

    The total batch is fixed (strong), or grows with the processes (weak). `exchange s` is the price
    of exchanging gradients, which is paid once per optimizer step.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if cfg.batch % world:
        raise Refused(f"--batch={cfg.batch} is not a multiple of {world} processes: change one")
    alone, _ = training(cfg, device, dtype)
    share = cfg.batch // world
    strong, model = training(replace(cfg, batch=share), device, dtype, ddp=True)
    weak, _ = training(cfg, device, dtype, ddp=True)
    if rank == 0:
        one = interleaved({"": lambda: alone(True)}, cfg.repeats, device)[""]["seconds"]
    dist.barrier()  # the other processes wait, so that `alone` has the machine to itself
    found = interleaved({
        "strong": lambda: strong(True),
        "strong, no exchange": lambda: strong(True, exchange=False),
        "weak": lambda: weak(True),
        "weak, no exchange": lambda: weak(True, exchange=False)}, cfg.repeats, device)
    if rank:
        return None
    rows = {f"1 process, batch {cfg.batch}": {"seconds": one, "speed-up": 1.0, "efficiency %": 100}}
    for name, batch, work in (("strong", share, 1), ("weak", cfg.batch, world)):
        seconds, without = (found[name + end]["seconds"] for end in ("", ", no exchange"))
        gain = work * one / seconds
        rows[f"{name}: {world} × {batch}"] = {
            "seconds": seconds, "speed-up": gain, "efficiency %": 100 * gain / world,
            "exchange s": seconds - without}
    size = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    print_table(f"scaling, SM update, {world} processes of {torch.get_num_threads()} threads, "
                f"{dist.get_backend()}", rows, f"an exchange is {size:.0f} MB of gradients")
    return rows


# -------------------------------------------------------------------------------------------------
# Dream


def build_dream(cfg, device, dtype):
    """A random Dream of any width, and its SoftMask. At width 3584 it has the sizes of Dream-7B."""
    D, V = cfg.dream_width, cfg.dream_vocab
    heads = max(2, D // 128)
    groups = next(n for n in (heads // 7, heads // 4, heads // 2, 1) if n and heads % n == 0)
    size = DreamConfig(
        vocab_size=V, hidden_size=D, intermediate_size=18944 if D == 3584 else 16 * D // 3,
        num_hidden_layers=cfg.dream_layers, num_attention_heads=heads, num_key_value_heads=groups,
        rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=4096, mask_token_id=V - 1,
        pad_token_id=V - 2, eos_token_id=V - 2)
    with torch.device("meta"):
        dream = Dream(size)
    # In its dtype from the start: in fp32 Dream-7B would take 30 GB before it takes 15.
    dream = dream.to(dtype or torch.float32).to_empty(device=device)
    for name, p in dream.requires_grad_(False).named_parameters():
        if p.dim() == 1:
            nn.init.constant_(p, float("norm" in name))
        else:
            nn.init.normal_(p, std=(cfg.sharpness if "lm_head" in name else 1) / D ** 0.5)
    return dream.eval(), SoftMask(V - 1, 1, omega_s=0.5).to(device)


def finetuning_table(cfg, device, dtype):
    """An update of finetune_dream.py on one random dialogue.

    Either all its activations are kept, or they are computed again (checkpointing).
    """
    dream, sm = build_dream(cfg, device, dtype)
    mask_id = dream.cfg.mask_token_id
    dora.attach(dream, TARGETS, 16, 16, rng("bench"))
    model = TwoPassDream(dream, sm, mask_id)
    theta = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(theta, lr=1e-5, weight_decay=0.0)
    x0 = torch.randint(mask_id - 1, (1, cfg.dream_length), generator=rng("bench")).to(device)
    xt = x0.clone()
    xt[:, cfg.dream_length // 2::2] = mask_id  # half of an answer as long as its prompt

    def step(soft, checkpointing):
        dream.checkpointing = checkpointing
        objective(model(x0, xt, soft), 0.5, "authors", 1).backward()
        nn.utils.clip_grad_norm_(theta, 7.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    cases = {f"{'SM' if soft else 'binary'}, {'checkpointing' if again else 'all kept'}":
             partial(step, soft, again) for again in (False, True) for soft in (False, True)}
    rows = interleaved(cases, cfg.repeats, device)
    for row in rows.values():
        row["tokens/s"] = cfg.dream_length / row["seconds"]
    print_table(f"Dream: finetuning, 1 × {cfg.dream_length}", rows)
    return rows


def decoding_table(cfg, device, dtype):
    """An answer as long as its prompt, in half as many passes, at once and in blocks."""
    dream, sm = build_dream(cfg, device, dtype)
    mask_id, n = dream.cfg.mask_token_id, cfg.dream_answer
    steps, block = n // 2, min(32, n // 4)
    prompt = torch.randint(mask_id - 1, (1, n), generator=rng("bench"))
    x, _ = pad_prompts(dream.cfg, prompt, n, device)

    def run(feedback, cache):
        model = TwoPass(dream, feedback, mask_id)
        on = "cpu" if device.type == "mps" else device  # MPS has no float64 to draw in
        how = dict(temperature=0.1, top_p=0.9, generator=torch.Generator(on).manual_seed(0))
        if cache:
            decode_blocks(model, x, n, steps, block, cache, **how)
        else:
            decode(model, x, steps, **how)
    cases = {f"{'SM' if feedback else 'binary'}, {f'blocks, {cache}' if cache else 'at once'}":
             partial(run, feedback, cache)
             for cache in ("", "prefix", "dual") for feedback in (None, sm)}
    rows = interleaved(cases, max(2, cfg.repeats // 2), device)
    for row in rows.values():
        row["tokens/s"] = n / row["seconds"]
    size = sum(p.numel() for p in dream.parameters()) / 1e6
    print_table(f"Dream, {size:,.0f}M random: decoding {n} tokens in {steps} passes, blocks of "
                f"{block}", rows)
    return rows


def bench_dream(cfg, device, dtype):
    return {"finetuning": finetuning_table(cfg, device, dtype),
            "decoding": decoding_table(cfg, device, dtype)}


def vocabulary_work(cfg, device, k, T):
    """Both passes and the backward of finetune_dream.py on T tokens, of which T − 1 are [MASK].

    V and dtype are Dream's, but the model is narrow and has no layers: what is left is the work on
    rows × V. With T = 1 the model is made and nothing else. Returns the TwoPassDream.
    """
    mask_id = 151666
    size = DreamConfig(152064, 64, 64, 0, 1, 1, 1e-6, 1e6, 4096, mask_id, 151643, 151643)
    dream = Dream(size).to(device, torch.bfloat16).requires_grad_(False)
    x0 = torch.randint(mask_id, (1, T), generator=rng("bench")).to(device)
    xt = torch.where(torch.arange(T, device=device) > 0, mask_id, x0)
    model = TwoPassDream(dream, SoftMask(mask_id, k, omega_s=0.5).to(device), mask_id)
    if T > 1:
        model(x0, xt, True).mean().backward()
    return model


def bench_vocabulary(cfg, device, dtype):
    """How far Dream's logits, feedback and loss alone raise memory on its longest dialogue."""
    T, rows = 2048, {}
    base = peak(vocabulary_work, cfg, device, 1, 1)["peak GB"]
    for k in (1, None):
        most = peak(vocabulary_work, cfg, device, k, T)["peak GB"]
        rows[f"k = {k or '|V|'}"] = {"rise GB": most - base}
    print_table(f"Dream's vocabulary work: V = 152,064, {T:,} tokens, bf16", rows,
                f"one (T, V) tensor in fp32 is {T * 152064 * 4 / 1e9:.3g} GB")
    return rows


# -------------------------------------------------------------------------------------------------
# the command


def validate(cfg, world, device):
    """cfg with the sizes for this device. Raises Refused for what cannot be measured."""
    parts = cfg.parts.split(",")
    known = [name.removeprefix("bench_") for name in globals() if name.startswith("bench_")]
    for part in parts:
        if part not in known:
            raise Refused(f"--parts={part} is none of {', '.join(known)}")
    places = [os.path.join(cfg.against, *at) for at in (["bench.py"], ["lab", "bench.py"])]
    there = bool(cfg.against) and any(map(os.path.isfile, places))
    if ("against" in parts) != there:
        raise Refused(f"--against={cfg.against}, --parts={cfg.parts}: the part against needs "
                      f"--against=FOLDER, a checkout with a bench.py")
    if (world > 1) != (parts == ["scaling"]):
        raise Refused(f"{world} processes, --parts={cfg.parts}: scaling runs alone and under "
                      f"torchrun, and nothing else does")
    sizes = PRESETS["gpu" if device.type == "cuda" else "cpu"]
    cfg = replace(cfg, device=device.type,
                  **{name: v for name, v in sizes.items() if not getattr(cfg, name)})
    least = dict(repeats=1, length=4, many=1, vocab_size=16, dream_answer=4)
    for name, low in least.items():
        if getattr(cfg, name) < low:
            raise Refused(f"--{name}={getattr(cfg, name)} must be at least {low}")
    return cfg


def main(cfg):
    rank, world, device, dtype = launch.machine(cfg.device, cfg.dtype)
    cfg = validate(cfg, world, device)
    torch.manual_seed(0)
    launch.join(world, device)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor()
    where = {"device": name or platform.machine(), "threads": torch.get_num_threads(),
             "cores": os.cpu_count(), "torch": torch.__version__,
             "python": platform.python_version(), "dtype": str(dtype or torch.float32),
             "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
             **checkpoint.git_version()}
    found = {"machine": where, "settings": asdict(cfg)}
    if rank == 0:
        print("  ".join(f"{key} {value}" for key, value in where.items()))
        print(f"MDLM {cfg.n_layer} × {cfg.n_embd}, V = {cfg.vocab_size:,}, L = {cfg.length}, "
              f"batch {cfg.batch}")
    for i, part in enumerate(parts := cfg.parts.split(","), 1):
        start = time.time()
        if rank == 0:
            print(f"part {i} of {len(parts)}, {part} …")
        found[part] = globals()["bench_" + part](cfg, device, dtype)
        if rank == 0:
            print(f"({part}: {time.time() - start:.0f} s)")
    if cfg.json and rank == 0:
        write_text(cfg.json, json.dumps(found, indent=1))
    if world > 1:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    launch.run(main, Config, PRESETS)
