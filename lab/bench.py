# SPDX-License-Identifier: MIT
"""Speed and memory of training, sampling and Dream, with random weights.    §4, App. B.1, C.4

    python lab/bench.py --json=bench.json      # the paper's sizes, which need an 80 GB GPU
    python lab/bench.py cpu --parts=train      # 8 blocks of width 256: some minutes

The speed of a machine drifts. So the functions of a case take turns, A B A B …, and a ratio is the
median over turns. `cpu` is CPU time, summed over threads: the better measure on a shared machine.
"""

import copy
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import dora
import launch
from data import rng
from dream import Dream, DreamConfig
from finetune_dream import TARGETS, TwoPassDream
from launch import Refused, Size
from mdlm import MDLM, ModelConfig, TwoPass, compile_parts, corrupt, sample_times
from sample import Pick, decode, generate
from sample_dream import decode_blocks, reveal_shares
from softmask import SoftMask
from train import update_ema


@dataclass
class Config(ModelConfig):
    """The fields of mdlm.ModelConfig, and what to measure."""
    NO_FLAGS = "mask_id", "soft_mask", "omega_s", "omega_a", "omega_b"  # see build
    parts: Literal["all", "train", "sample", "dream"] = "all"
    repeats: Size = 5                  # turns that count; for sampling and decoding at most three
    seconds: Size | None = None        # after this time, no case is started (default: no limit)
    json: str = ""                     # written after every case; cases already in it are skipped
    batch: Size = 32                   # sequences per update
    steps: Size = 1024                 # T of a sample
    dream_layers: Size = 28
    dream_width: Size = 3584
    dream_vocab: Size = 152064
    dream_length: Size = 2048          # tokens of a dialogue in finetuning
    dream_masks: Size = 1600           # how many of them are masked
    dream_answer: Size = 256           # tokens of a prompt, and as many for its answer
    device: str = "auto"
    compile: bool | None = None        # (default: on CUDA)


PRESETS = {
    "gpu": {},
    "cpu": dict(n_layer=8, n_head=8, n_embd=256, length=256, batch=4, steps=64,
                dream_layers=4, dream_width=256, dream_vocab=20000, dream_length=128,
                dream_masks=100, dream_answer=64),
    "quick": dict(n_layer=2, n_head=2, n_embd=32, length=32, vocab_size=500, batch=2, steps=8,
                  repeats=2, dream_layers=2, dream_width=32, dream_vocab=300, dream_length=32,
                  dream_masks=20, dream_answer=16),
}

SHARPNESS = 3.5  # standard deviation of the random logits, about that of a trained model


def timed(fn, device):
    """The cost of one call: {"seconds", "cpu"} and, on CUDA, "peak GB" of device memory."""
    synchronize = getattr(torch, device.type).synchronize  # torch.cuda, torch.mps, torch.cpu
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    synchronize()
    found = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if device.type == "cuda":
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9  # without what CUDA graphs hold
        torch.cuda.reset_peak_memory_stats()  # for the next call
    return found


def host_syncs(fn):
    """Host syncs per call of fn, or per pass if fn returns how many. torch warns of each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        passes = fn() or 1
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA" in str(w.message) for w in caught) / passes


def interleaved(cases, repeats, device, tokens):
    """{name: {column: median, "turns": [seconds]}} of functions that take turns, after a warm-up"""
    turns = [{name: timed(fn, device) for name, fn in cases.items()}
             for _ in launch.progress(range(repeats + 1), f"turns of {len(cases)}", leave=False)]
    first = next(iter(cases))
    found = {}
    for name in cases:
        columns = {key: [turn[name][key] for turn in turns[1:]] for key in turns[0][name]}
        for ratio, key in ("ratio", "seconds"), ("cpu ratio", "cpu"):
            columns[ratio] = [turn[name][key] / turn[first][key] for turn in turns[1:]]
        found[name] = {key: statistics.median(values) for key, values in columns.items()}
        found[name]["tokens/s"] = tokens / found[name]["seconds"]
        found[name]["turns"] = columns["seconds"]
        if device.type == "cuda":
            found[name]["syncs"] = host_syncs(cases[name])
    return found


def print_table(title, rows):
    columns = [column for column in next(iter(rows.values())) if column != "turns"]
    print(f"\n{title:32}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        cells = [f"{row[column]:12,.3g}" if column in row else 12 * " " for column in columns]
        print(f"{name:32}" + "".join(cells), flush=True)


def build(cfg, device):
    """A random MDLM with feedback about as strong as after training."""
    model = MDLM(replace(cfg, mask_id=cfg.vocab_size - 1, omega_s=0.5, omega_a=1.0, omega_b=-5.0))
    std = SHARPNESS / cfg.n_embd ** 0.5  # hidden states have |h|² = D
    torch.nn.init.normal_(model.net.output_layer.linear.weight, std=std)
    return model.to(device)


def train_rows(cfg, device, dtype):
    """An update of train.py on random tokens, without SM and with it.                   App. B.1"""
    model = build(cfg, device)
    ema = copy.deepcopy(model.net).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, lr=1e-5,
                                  fused=device.type in ("cuda", "cpu"))
    if cfg.compile:
        compile_parts(model)
    generator, mask_id = rng("bench"), model.mask_id
    x0 = torch.randint(mask_id, (cfg.batch, cfg.length), generator=generator)
    t = sample_times(cfg.batch, generator)
    # The same x_t in all updates, because the time of an update depends on the number of masks.
    xt = corrupt(x0, t, mask_id, generator)                                    # (B, L)
    masks = (xt == mask_id).nonzero(as_tuple=True)                             # 2 × (N,)
    x0, xt, t, *masks = (x.to(device) for x in (x0, xt, t, *masks))

    def step(soft):
        with torch.autocast(device.type, dtype, enabled=bool(dtype), cache_enabled=False):
            nll = model(x0, xt, t, soft, tuple(masks))                         # (B,)
        (nll.sum() / x0.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ema(ema, model.net, 1, 0.9999)
    cases = {"binary": partial(step, False), "SM, p_sm = 1": partial(step, True)}
    tokens = cfg.batch * cfg.length
    rows = interleaved(cases, cfg.repeats, device, tokens)
    binary, soft = rows.values()
    mixed = {key: 0.2 * binary[key] + 0.8 * soft[key] for key in binary
             if key not in ("peak GB", "turns")}
    rows["SM, p_sm = 0.8 (expected)"] = mixed | {"tokens/s": tokens / mixed["seconds"]}
    return rows


def per_pass(rows, tokens, passes):
    """Add tokens per pass and passes per second to each row.   passes: {name: how many}"""
    for name, row in rows.items():
        row["tokens/pass"] = tokens / passes[name]
        row["passes/s"] = passes[name] / row["seconds"]
    return rows


def sample_rows(cfg, device, dtype, graphs):
    """A sample, binary and with SM.                                                     App. C.4"""
    model = build(cfg, device)
    sm = model.sm
    x = torch.full((cfg.length,), model.mask_id)                               # (L,)
    passes = {}
    if dtype:
        model.net.cast_linears_(dtype)
    if graphs:
        compile_parts(model, "reduce-overhead")

    def run(name):
        passes[name] = 0
        model.sm = sm if name == "SM" else None

        def on_step(*now):
            passes[name] += 1
        with torch.autocast(device.type, dtype, enabled=bool(dtype)):
            generate(model, x, cfg.steps, generator=rng("bench"), on_step=on_step)
        return passes[name]
    cases = {name: partial(run, name) for name in ("binary", "SM")}
    rows = interleaved(cases, min(3, cfg.repeats), device, cfg.length)
    return per_pass(rows, cfg.length, passes)


def build_dream(cfg, device, dtype):
    """A random Dream and its SoftMask. The defaults give the sizes of Dream-7B."""
    D, V = cfg.dream_width, cfg.dream_vocab
    heads = max(2, D // 128)
    size = DreamConfig(vocab_size=V, hidden_size=D, intermediate_size=D * 37 // 7,
                       num_hidden_layers=cfg.dream_layers, num_attention_heads=heads,
                       num_key_value_heads=max(1, heads // 7), rms_norm_eps=1e-6, rope_theta=1e6,
                       mask_token_id=V - 1, pad_token_id=V - 2, eos_token_id=V - 2)
    with torch.device(device):  # in fp32, Dream-7B briefly takes 30 GB
        dream = Dream(size).to(dtype or torch.float32).requires_grad_(False).eval()
    torch.nn.init.normal_(dream.lm_head.weight, std=SHARPNESS / D ** 0.5)
    return dream, SoftMask(V - 1, 1, omega_s=0.5).to(device)


def finetuning_rows(cfg, device, dtype):
    """Forward and backward pass of a random dialogue. The optimizer step costs next to nothing."""
    dream, sm = build_dream(cfg, device, dtype)
    dream.checkpointing = True
    dora.attach(dream, TARGETS, 16, 16, rng("bench"))
    model = TwoPassDream(dream, sm, sm.mask_id)
    x0 = torch.randint(sm.mask_id - 1, (1, cfg.dream_length), generator=rng("bench"))
    xt = x0.clone()
    xt[:, -cfg.dream_masks:] = sm.mask_id
    masks = (xt == sm.mask_id).nonzero(as_tuple=True)                          # 2 × (N,)
    x0, xt, *masks = (x.to(device) for x in (x0, xt, *masks))

    def step(soft):
        model.zero_grad(set_to_none=True)
        model(x0, xt, soft, tuple(masks)).mean().backward()
    cases = {"binary": partial(step, False), "SM": partial(step, True)}
    return interleaved(cases, cfg.repeats, device, cfg.dream_length)


def decoding_rows(cfg, device, dtype, compiling):
    """An answer as long as its prompt, in half as many steps as it has tokens."""
    dream, sm = build_dream(cfg, device, dtype)
    if compiling:
        dream.trunk = torch.compile(dream.trunk, dynamic=True)
    n = cfg.dream_answer
    x = torch.randint(sm.mask_id - 1, (1, 2 * n), generator=rng("bench"))
    x[:, n:] = sm.mask_id                                                      # (1, L)  on the CPU
    block = min(32, n // 4)
    passes = {}

    def run(name, feedback, cache):
        model = TwoPass(dream, feedback, sm.mask_id)
        passes[name] = 0
        pick = Pick("entropy", 0.1, 0.9, generator=rng("bench"))

        def on_step(*now):
            passes[name] += 1
        if cache:
            shares = reveal_shares(block // 2)
            decode_blocks(model, x, shares, block, cache, pick, on_step=on_step)
        else:
            decode(model, x, reveal_shares(n // 2), pick, on_step=on_step)
    ways = {"at once": "", "prefix cache": "prefix", "dual cache": "dual"}
    cases = {}
    for way, cache in ways.items():
        for side, feedback in ("binary", None), ("SM", sm):
            name = f"{side}, {way}"
            cases[name] = partial(run, name, feedback, cache)
    return per_pass(interleaved(cases, min(3, cfg.repeats), device, n), n, passes)


def main(cfg):
    began = time.perf_counter()
    *_, device, dtype = launch.machine(cfg.device)
    cuda = device.type == "cuda"
    cfg = replace(cfg, compile=cuda if cfg.compile is None else cfg.compile)
    found = {"machine": {"device": torch.cuda.get_device_name(device) if cuda else "CPU",
                         "threads": torch.get_num_threads(), "torch": torch.__version__,
                         "dtype": str(dtype or torch.float32), **launch.git_version()},
             "settings": asdict(replace(cfg, parts="", json="", seconds=None))}
    if os.path.exists(cfg.json):
        now = found
        found = launch.read_json(cfg.json)
        if not now.items() <= found.items():
            raise Refused(f"{cfg.json} is of another machine, commit or setting: give another name")
    print("  ".join(f"{key} {value}" for key, value in found["machine"].items()))

    # A case's name begins with the part that it belongs to.
    cases = [("train", train_rows), ("sample", sample_rows, False),
             ("dream, finetuning", finetuning_rows), ("dream, decoding", decoding_rows, False)]
    if cfg.compile:
        cases += [("sample, CUDA graphs", sample_rows, True),
                  ("dream, decoding, compiled", decoding_rows, True)]
    for name, measure, *args in cases:
        late = cfg.seconds and time.perf_counter() - began > cfg.seconds
        if name not in found and not late and cfg.parts in ("all", name.split(",")[0]):
            torch.manual_seed(0)
            torch.compiler.reset()  # else cases share graphs, or hit dynamo's limit of 8
            found[name] = measure(cfg, device, dtype, *args)
            if cfg.json:
                launch.write_text(cfg.json, json.dumps(found, indent=1))
        if name in found:
            print_table(name, found[name])
    return found


if __name__ == "__main__":
    launch.run(main, Config, PRESETS)
