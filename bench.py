# SPDX-License-Identifier: MIT
"""Every claim about speed and memory, by one command: training, sampling, scaling, Dream.                §4, App. B, App. C

    python bench.py                                         # what the machine at hand holds: GPU, the paper's size; CPU, `cpu`
    python bench.py cpu --json=bench.json                   # 8 blocks of 256, V = 50,258, L = 256, batch 4, fp32: minutes
    python bench.py cpu --parts=train,sample --repeats=9    # some of PARTS
    torchrun --nproc_per_node=2 bench.py scaling            # DDP: strong, weak, and what the exchange of gradients costs

Machines are shared and clocks drift, so that cases are timed in turns, A B C A B C …, beside a plain matrix product, and
compared within a turn: a ratio is the median over turns. Seconds are medians too; `cpu` is processor time, all threads.
Weights are random, speed does not mind; but the head is scaled until its predictions are as peaked as a trained model's
(`--sharpness`), for the nucleus' work depends on that. `flat` shows an untrained head, the worst case.

Not here: quality, profiles (torch.profiler), anything that trains. plot.py draws the curves from the JSON.
"""

import contextlib
import copy
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import launch
import dora
from launch import Refused, atomic, machine
from data import rng
from dream import Dream, DreamConfig
from finetune_dream import TARGETS, TwoPassDream, objective
from mdlm import MDLM, ModelConfig, corrupt, sample_times
from sample import generate, nucleus, sample_categorical
from sample_dream import decode, decode_blocks, pad_prompts
from softmask import SoftMask
from train import PEAK_FLOPS, flops_per_token, update_ema

PARTS = ("train", "memory", "sample", "cost", "curves", "dream", "vocabulary")


@dataclass
class Config:
    parts: str = ",".join(PARTS)  # what to measure
    repeats: int = 5              # turns
    json: str = ""                # also write all of it here
    # MDLM; 0: as the preset of the machine at hand has it
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    vocab_size: int = 0
    length: int = 0               # L
    batch: int = 0                # sequences per step
    steps: int = 0                # T
    many: int = 0                 # sequences sampled at once, beside 1
    k: int | None = 3
    top_p: float = 0.9
    sharpness: float = 3.5        # standard deviation of the random logits
    # Dream, random
    dream_layers: int = 0
    dream_width: int = 0
    dream_vocab: int = 0
    dream_length: int = 0         # prompt and response, half each
    # the machine
    device: str = "auto"          # cuda, else mps, else cpu
    dtype: str = "auto"           # bfloat16 where the GPU has it, else float32
    compile: bool | None = None   # the trunk; none: on CUDA
    peak_flops: float = 0.0       # of one device, for MFU; 0: look it up, on a CPU the matrix product's


PRESETS = {
    "cpu": dict(n_layer=8, n_head=8, n_embd=256, vocab_size=50258, length=256, batch=4, steps=64, many=8,
                dream_layers=4, dream_width=256, dream_vocab=20000, dream_length=128),
    "gpu": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50258, length=1024, batch=32, steps=1024, many=64,
                dream_layers=28, dream_width=3584, dream_vocab=152064, dream_length=1024),
    "quick": dict(n_layer=2, n_head=2, n_embd=32, vocab_size=500, length=32, batch=2, steps=8, many=2, repeats=2,
                  dream_layers=2, dream_width=32, dream_vocab=300, dream_length=32),
    "scaling": dict(parts="scaling"),
}


# ---------------------------------------------------------------------------------------------------------------------
# measuring


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def interleaved(cases, repeats, device):
    """Time functions in turns, after one call of each that does not count.

    cases: {name: function}; the first is what the others are compared with.
    Returns {name: {"seconds", "cpu", "ratio"}}, medians; ratio is within a turn, so that what slows a whole turn cancels.
    """
    for fn in cases.values():
        fn()
    turns = {name: [] for name in cases}
    for _ in range(repeats):
        for name, fn in cases.items():
            wait(device)
            wall, cpu = time.perf_counter(), time.process_time()
            fn()
            wait(device)
            turns[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    base = next(iter(turns.values()))
    middle = statistics.median
    return {name: {"seconds": middle(wall for wall, _ in turn), "cpu": middle(cpu for _, cpu in turn),
                   "ratio": middle(mine[0] / of[0] for mine, of in zip(turn, base))} for name, turn in turns.items()}


def matmul(device, dtype):
    """The calibration: 2 n³ FLOPs as fast as this machine's library does them. Returns (function, FLOPs)."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device, dtype=dtype or torch.float32)
    return lambda: a @ a, 2 * n ** 3


def high_water(send, fn, args):
    """In a process of its own: run fn and send how many bytes were held at once, before it (imports) and in all."""
    def resident():  # VmHWM, since ru_maxrss survives exec and would be our parent's
        with contextlib.suppress(OSError), open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    before = resident()
    fn(*args)
    send.send((before, resident()))


def peak(fn, *args):
    """Peak memory of fn(*args) in bytes: the device's on CUDA, else of a fresh process with all its libraries.

    fn: a function of this module. Returns (before it ran, peak); the first is what Python and torch take by themselves.
    """
    if torch.cuda.is_available() and args[0].device != "cpu":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn(*args)
        return before, torch.cuda.max_memory_allocated()
    receive, send = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=high_water, args=(send, fn, args))
    child.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        raise Refused(f"the process that measures memory ended with {child.exitcode}: is there enough of it?")
    finally:
        child.join()


def table(title, rows, note=""):
    """Print measurements: rows {name: {column: number}}."""
    columns = list(dict.fromkeys(c for row in rows.values() for c in row))
    print(f"\n{title}\n{'':34}" + "".join(f"{c:>13}" for c in columns))
    show = lambda v: "" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}"
    for name, row in rows.items():
        print(f"{name:34}" + "".join(f"{show(row.get(c)):>13}" for c in columns))
    print(note, end="\n" * bool(note), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# MDLM


def build(cfg, device, **changes):
    """A random MDLM with feedback as strong as after training, ω_s = ½.   changes: fields of ModelConfig."""
    sizes = {name: getattr(cfg, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size", "length", "k")}
    sizes |= changes
    model = MDLM(ModelConfig(**sizes, mask_id=sizes["vocab_size"] - 1, omega_s=0.5, omega_a=1.0, omega_b=-5.0))
    nn.init.normal_(model.net.output_layer.linear.weight, std=cfg.sharpness / sizes["n_embd"] ** 0.5)  # |h|² = D
    return model.to(device)


def training(cfg, device, dtype, ddp=False, batch=None, **changes):
    """A function that makes one update of train.py on random tokens, step(soft, exchange=True), and the model."""
    model = build(cfg, device, **changes)
    ema = copy.deepcopy(model.net).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, lr=1e-5, fused=device.type in ("cuda", "cpu"))
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        model.net.trunk = torch.compile(model.net.trunk)
    net = DistributedDataParallel(model) if ddp else model
    B, L, V = batch or cfg.batch, model.cfg.length, model.cfg.vocab_size
    generator = rng("bench")
    x0 = torch.randint(V - 1, (B, L), generator=generator)
    t = sample_times(B, generator)
    xt = corrupt(x0, t, V - 1, generator)  # the same masks for all cases: the number of rows must not differ
    x0, xt, t = x0.to(device), xt.to(device), t.to(device)

    def step(soft, exchange=True):
        with net.no_sync() if ddp and not exchange else contextlib.nullcontext():
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                nll = net(x0, xt, t, soft)
            (nll.sum() / x0.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ema(ema, model.net, 1)
    return step, model


def three_updates(cfg, device, dtype, soft):
    step, _ = training(cfg, device, dtype)
    for _ in range(3):
        step(soft)


def hours(model, batch, binary, soft):
    """The paper's four runs (App. B.1) on 1, 4 and 8 of these, by this run's tokens/s and FLOPs; scaling taken as perfect."""
    paper, rows = ModelConfig(), {}
    for run, updates, p_sm in (("from scratch, binary", 1e6, 0), ("from scratch, SM 0.8", 1e6, 0.8),
                               ("continuation, binary", 1e5, 0), ("continuation, SM 0.8", 1e5, 0.8)):
        seconds = (1 - p_sm) * binary["seconds"] + p_sm * soft["seconds"]
        rate = batch * model.length / seconds * flops_per_token(model, p_sm)  # FLOP/s
        alone = updates * 512 * 1024 * flops_per_token(paper, p_sm) / rate / 3600
        rows[run] = {f"{n} device{'s' * (n > 1)}": alone / n for n in (1, 4, 8)}
    table("hours for the paper's runs, 512 × 1024 tokens an update", rows)
    return rows


def bench_train(cfg, device, dtype):
    """An update in binary and with SM, against each other and against what a matrix product makes of this machine."""
    product, flops = matmul(device, dtype)
    step, model = training(cfg, device, dtype)
    found = interleaved({"binary": lambda: step(False), "SM, p_sm = 1": lambda: step(True), "matrix product": product},
                        cfg.repeats, device)
    binary, soft, gauge = found.values()
    mixed = {key: 0.2 * binary[key] + 0.8 * soft[key] for key in binary}
    rate = flops / gauge["seconds"]
    limit = cfg.peak_flops or next((f for name, f in PEAK_FLOPS.items() if device.type == "cuda" and
                                    name in torch.cuda.get_device_name(device)), rate)
    rows = {"binary": binary, "SM, p_sm = 1": soft, "SM, p_sm = 0.8 (expected)": mixed}
    for row, p_sm in zip(rows.values(), (0, 1, 0.8)):
        row["tokens/s"] = cfg.batch * cfg.length / row["seconds"]
        row["TFLOP/s"] = row["tokens/s"] * flops_per_token(model.cfg, p_sm) / 1e12
        row["MFU %"] = 100 * row["TFLOP/s"] * 1e12 / limit
    table("training, one update", rows, f"matrix product of this run: {rate / 1e12:.3g} TFLOP/s; MFU against {limit / 1e12:.3g}; "
          f"binary = {binary['seconds'] / gauge['seconds']:.1f} products")
    return rows | {"matrix product": gauge | {"TFLOP/s": rate / 1e12}, "hours": hours(model.cfg, cfg.batch, binary, soft)}


def bench_memory(cfg, device, dtype):
    rows = {}
    for soft in (False, True):
        before, most = peak(three_updates, cfg, device, dtype, soft)
        rows["SM" if soft else "binary"] = {"peak GB": most / 1e9, "before GB": before / 1e9}
    table("peak memory of three updates", rows, "on a CPU: of a whole fresh process; before: Python and its libraries")
    return rows


def bench_sample(cfg, device, dtype):
    """Whole samples (Alg. 2), one at a time and many at once, binary and with SM."""
    model = build(cfg, device).eval()
    flat = copy.deepcopy(model)
    nn.init.zeros_(flat.net.output_layer.linear.weight)
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        model.net.trunk = torch.compile(model.net.trunk, mode="reduce-overhead")
    calls = {}

    def sampling(name, model, n, soft):
        def case():
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                generators = [rng("bench", i) for i in range(n)]
                calls[name] = generate(model, n, cfg.steps, "mdlm", cfg.top_p, generators, soft=soft)[1].double().mean().item()
        return case
    cases = {("SM" if soft else "binary") + f", batch {n}": (model, n, soft) for n in (1, cfg.many) for soft in (False, True)}
    cases["binary, batch 1, flat"] = (flat, 1, False)
    found = interleaved({name: sampling(name, *case) for name, case in cases.items()}, max(2, cfg.repeats // 2), device)
    for (name, row), (_, n, _) in zip(found.items(), cases.values()):
        row |= {"s/step": row["seconds"] / cfg.steps, "s/call": row["seconds"] / calls[name],
                "s/sequence": row["seconds"] / n, "tokens/s": n * cfg.length / row["seconds"]}
    table(f"sampling, L = {cfg.length}, T = {cfg.steps}, nucleus {cfg.top_p}", found, "a call: a network call that a sequence needed")
    return found


@torch.no_grad()
def bench_cost(cfg, device, dtype):
    """Where an update and a sampling step spend their time; the parts that only SM has say what it costs."""
    model = build(cfg, device).eval()
    net, sm, B, L = model.net, model.sm, cfg.batch, cfg.length
    emb, t = F.embedding(torch.randint(cfg.vocab_size - 1, (B, L), device=device), net.table), torch.full((B,), 0.5, device=device)
    context = lambda: torch.autocast(device.type, dtype, enabled=dtype is not None)
    with context():
        h = net.trunk(emb, t).flatten(0, 1)[:B * L // 2]
    few = {"appear": h[:max(1, L // cfg.steps)], "stay": h[:L // 2]}

    def training_pass():
        with torch.enable_grad(), context():
            net.trunk(emb, t).sum().backward()
    def loss_pass():
        rows, y = h.clone().requires_grad_(), torch.zeros(len(h), dtype=torch.long, device=device)
        with torch.enable_grad(), context():
            model.cross_entropy(rows, y).sum().backward()
    def under(fn):
        def case():
            with context():
                fn()
        return case
    rows = interleaved({
        f"trunk, {B} × {L}": under(lambda: net.trunk(emb, t)),
        "trunk, forward and backward": training_pass,
        f"head and loss, {len(h)} rows, both": loss_pass,
        f"SM: head, {len(h)} rows": under(lambda: [net.head(rows) for rows in h.split(256)]),
        f"SM: head, λ, top k, mix, {len(h)} rows": under(lambda: model.feedback(h)),
        f"sampling: trunk, 1 × {L}": under(lambda: net.trunk(emb[:1], t[:1])),
        f"sampling: {len(few['appear'])} rows appear": under(
            lambda: sample_categorical(nucleus(net.head(few["appear"]).softmax(-1), cfg.top_p), torch.rand(len(few["appear"]), dtype=torch.float64, device=device))),
        f"sampling: SM, {len(few['stay'])} rows stay": under(lambda: model.feedback(few["stay"])),
    }, cfg.repeats, device)
    table("parts, forward unless it says more", rows, "ratio: to the first line")
    return rows


def bench_curves(cfg, device, dtype):
    """Time over one size at a time, the others as configured. A point is {"x", "binary", "SM"} in seconds."""
    repeats, out = max(2, cfg.repeats // 2), {}
    update = lambda **changes: training(cfg, device, dtype, **changes)[0]
    around = lambda x, least=1: [max(least, x // 4), max(least, x // 2), x, 2 * x]
    for name, key, values in (("update over L", "length", around(cfg.length)), ("update over V", "vocab_size", around(cfg.vocab_size, 8)),
                              ("update over batch", "batch", around(cfg.batch))):
        out[name] = []
        for x in dict.fromkeys(values):
            step = update(**{key: x})
            found = interleaved({"binary": lambda: step(False), "SM": lambda: step(True)}, repeats, device)
            out[name].append({"x": x} | {case: row["seconds"] for case, row in found.items()})
    steps = {k: update(k=k) for k in (1, 3, 10, None)}
    found = interleaved({k: lambda step=step: step(True) for k, step in steps.items()}, repeats, device)
    out["update over k"] = [{"x": "|V|" if k is None else k, "SM": row["seconds"]} for k, row in found.items()]
    for name, key in (("sample over T", "steps"), ("sample over L", "length")):
        out[name] = []
        for x in around(getattr(cfg, key))[:3]:
            here = replace(cfg, **{key: x})
            model = build(here, device).eval()

            def case(soft):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    generate(model, 1, here.steps, "mdlm", cfg.top_p, [rng("bench")], soft=soft)
            found = interleaved({"binary": lambda: case(False), "SM": lambda: case(True)}, 2, device)
            out[name].append({"x": x} | {case: row["seconds"] for case, row in found.items()})
    for name, points in out.items():
        table(f"{name}, seconds", {str(p["x"]): {c: v for c, v in p.items() if c != "x"} for p in points})
    return out


def bench_scaling(cfg, device, dtype):
    """Under torchrun: the same update by one process and by all, total batch fixed (strong) or per process (weak).

    Gradients are exchanged in the backward of the last micro-batch only, so `exchange` is what one optimizer step pays.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if cfg.batch % world:
        raise Refused(f"--batch={cfg.batch} is not a multiple of {world} processes")
    alone, _ = training(cfg, device, dtype)
    strong, model = training(cfg, device, dtype, ddp=True, batch=cfg.batch // world)
    weak, _ = training(cfg, device, dtype, ddp=True)
    if rank == 0:
        one = interleaved({"one process": lambda: alone(True)}, cfg.repeats, device)["one process"]["seconds"]
    dist.barrier()  # the others wait, so that `one` has the machine to itself
    found = interleaved({"strong": lambda: strong(True), "strong, no exchange": lambda: strong(True, exchange=False),
                         "weak": lambda: weak(True), "weak, no exchange": lambda: weak(True, exchange=False)}, cfg.repeats, device)
    if rank:
        return
    row = lambda name, work: {"seconds": found[name]["seconds"], "speed-up": work * one / found[name]["seconds"],
                              "efficiency %": 100 * work * one / found[name]["seconds"] / world,
                              "exchange s": found[name]["seconds"] - found[name + ", no exchange"]["seconds"]}
    rows = {f"1 process, batch {cfg.batch}": {"seconds": one, "speed-up": 1.0, "efficiency %": 100.0},
            f"strong: {world} × {cfg.batch // world}": row("strong", 1), f"weak: {world} × {cfg.batch}": row("weak", world)}
    size = sum(p.numel() for p in model.parameters()) * 4
    table(f"scaling, SM update, {world} processes of {torch.get_num_threads()} threads, {dist.get_backend()}", rows,
          f"an exchange is {size / 1e6:.0f} MB of gradients, once per optimizer step")
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Dream


def build_dream(cfg, device, dtype, adapter):
    """Dream's shape in any size, random: heads of 128 where they fit, a quarter as many for keys, MLP of 16/3 D."""
    D = cfg.dream_width
    heads = max(2, D // 128)
    model = DreamConfig(vocab_size=cfg.dream_vocab, hidden_size=D, intermediate_size=16 * D // 3,
                        num_hidden_layers=cfg.dream_layers, num_attention_heads=heads,
                        num_key_value_heads=next(n for n in (heads // 7, heads // 4, heads // 2, 1) if n and heads % n == 0),
                        rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=2048,
                        mask_token_id=cfg.dream_vocab - 1, pad_token_id=cfg.dream_vocab - 2, eos_token_id=cfg.dream_vocab - 2)
    with torch.device(device):
        dream = Dream(model).to(dtype or torch.float32).requires_grad_(False).eval()
    if adapter:
        dora.attach(dream, TARGETS, 16, 16, rng("bench"))
    return dream, SoftMask(model.mask_token_id, 1, omega_s=0.5).to(device)


def finetuning(cfg, device, dtype):
    """step(soft, checkpointing) makes one micro-step of finetune_dream.py on a random dialogue, and its update."""
    dream, sm = build_dream(cfg, device, dtype, adapter=True)
    two_pass = TwoPassDream(dream, sm, dream.cfg.mask_token_id)
    theta = [p for p in two_pass.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(theta, lr=1e-5, weight_decay=0.0)
    x0 = torch.randint(cfg.dream_vocab - 2, (1, cfg.dream_length), generator=rng("bench")).to(device)
    xt = x0.clone()
    xt[:, cfg.dream_length // 2::2] = dream.cfg.mask_token_id

    def step(soft, checkpointing):
        dream.checkpointing = checkpointing
        objective(two_pass(x0, xt, soft), 0.5, "authors", 1).backward()
        nn.utils.clip_grad_norm_(theta, 7.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def two_finetunings(cfg, device, dtype, soft, checkpointing):
    step = finetuning(cfg, device, dtype)
    for _ in range(2):
        step(soft, checkpointing)


def vocabulary_work(cfg, device, k, T):
    """Both passes and the backward of finetune_dream.py at Dream's own V, all of T positions but the first at [MASK]s.

    In bf16, without layers, on a narrow model: what is left is the work on rows × V. T = 1: just the model.
    """
    mask_id = 151666
    dream = Dream(DreamConfig(152064, 64, 64, 0, 1, 1, 1e-6, 1e6, 4096, mask_id, 151643, 151643))
    dream.to(device, torch.bfloat16).requires_grad_(False)
    x0 = torch.randint(mask_id, (1, T), generator=rng("bench")).to(device)
    xt = torch.where(torch.arange(T, device=device) > 0, mask_id, x0)
    if T > 1:
        TwoPassDream(dream, SoftMask(mask_id, k, omega_s=0.5).to(device), mask_id)(x0, xt, True).mean().backward()


def bench_vocabulary(cfg, device, dtype, T=2048):
    """How far memory rises for logits, feedback and loss alone, at the size of Dream's vocabulary and longest dialogue."""
    base, rows = peak(vocabulary_work, cfg, device, 1, 1)[1], {}
    for k in (1, None):
        most = peak(vocabulary_work, cfg, device, k, T)[1]
        rows[f"k = {k or '|V|'}"] = {"rise GB": (most - base) / 1e9}
    table(f"Dream's vocabulary work: V = 152,064, {T:,} tokens, bf16", rows,
          f"one (T, V) tensor in fp32 is {T * 152064 * 4 / 1e9:.3g} GB")
    return rows


def bench_dream(cfg, device, dtype):
    """Finetuning with and without checkpointing, decoding at once and in blocks, binary and with SM."""
    step, rows = finetuning(cfg, device, dtype), {}
    cases = {f"{'SM' if soft else 'binary'}, {'checkpointing' if again else 'all kept'}": (soft, again)
             for again in (False, True) for soft in (False, True)}
    rows = interleaved({name: lambda case=case: step(*case) for name, case in cases.items()}, cfg.repeats, device)
    del step
    if "memory" in cfg.parts:
        for name, case in cases.items():
            before, most = peak(two_finetunings, cfg, device, dtype, *case)
            rows[name] |= {"peak GB": most / 1e9, "before GB": before / 1e9}
    for row in rows.values():
        row["tokens/s"] = cfg.dream_length / row["seconds"]
    dream, sm = build_dream(cfg, device, dtype, adapter=False)
    n = sum(p.numel() for p in dream.parameters())
    table(f"Dream, {n / 1e6:,.0f}M random: finetuning, 1 × {cfg.dream_length}", rows)
    half = cfg.dream_length // 2
    prompt = torch.randint(cfg.dream_vocab - 2, (1, half), generator=rng("bench"))
    x, _ = pad_prompts(dream.cfg, prompt, half, device)
    how = dict(temperature=0.1, top_p=0.9)
    generator = lambda: torch.Generator(device).manual_seed(0)
    cases = {f"{'SM' if soft else 'binary'}, {where}": (soft, where) for where in ("at once", "blocks, prefix", "blocks, dual")
             for soft in (False, True)}

    def decoding(soft, where):
        feedback = sm if soft else None
        if where == "at once":
            return lambda: decode(dream, x, dream.cfg.mask_token_id, half // 2, feedback, generator=generator(), **how)
        return lambda: decode_blocks(dream, x, half, half // 2, half // 4, where.split()[-1], sm=feedback,
                                     generator=generator(), **how)
    decoded = interleaved({name: decoding(*case) for name, case in cases.items()}, max(2, cfg.repeats // 2), device)
    for row in decoded.values():
        row["tokens/s"] = half / row["seconds"]
    table(f"Dream: decoding {half} tokens in {half // 2} passes, blocks of {half // 4}", decoded)
    return {"finetuning": rows, "decoding": decoded}


# ---------------------------------------------------------------------------------------------------------------------


def main(cfg):
    rank, world, device, dtype = machine(cfg.device, cfg.dtype)
    parts = cfg.parts.split(",")
    for part in parts:
        if part not in (*PARTS, "scaling"):
            raise Refused(f"--parts={part} is none of {', '.join(PARTS)}")
    if (world > 1) != (parts == ["scaling"]):
        raise Refused(f"{world} processes, --parts={cfg.parts}: scaling runs under torchrun, alone, and nothing else does")
    sizes = PRESETS["gpu" if device.type == "cuda" else "cpu"]
    cfg = replace(cfg, device=device.type, **{name: v for name, v in sizes.items() if not getattr(cfg, name)})
    if cfg.repeats < 1 or cfg.length < 4 or cfg.many < 1 or cfg.vocab_size < 16:
        raise Refused(f"--repeats={cfg.repeats} --length={cfg.length} --many={cfg.many} --vocab_size={cfg.vocab_size}: at least 1, 4, 1, 16")
    torch.manual_seed(0)
    launch.join(world, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    where = {"device": name, "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__,
             "python": platform.python_version(), "dtype": str(dtype or torch.float32), "load": os.getloadavg()[0],
             **checkpoint.git_version()}
    found = {"machine": where, "settings": asdict(cfg)}
    if rank == 0:
        print("  ".join(f"{key} {value}" for key, value in where.items()))
        print(f"MDLM {cfg.n_layer} × {cfg.n_embd}, V = {cfg.vocab_size:,}, L = {cfg.length}, batch {cfg.batch}", flush=True)
    for part in parts:
        start = time.time()
        found[part] = globals()["bench_" + part](cfg, device, dtype)
        if rank == 0:
            print(f"({part}: {time.time() - start:.0f} s)", flush=True)
    if cfg.json and rank == 0:
        with atomic(cfg.json) as tmp, open(tmp, "w") as f:
            json.dump(found, f, indent=1)
    if world > 1:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    launch.run(main, Config, PRESETS)
