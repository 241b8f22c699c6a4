# SPDX-License-Identifier: MIT
"""Speed and memory of training and sampling, with random weights.         §4, App. B.1, App. C.4

    python lab/bench.py --json=bench.json      # the paper's sizes, which need an 80 GB GPU
    python lab/bench.py cpu --parts=train      # 8 blocks of width 256: some minutes

The speed of a machine drifts. So the functions of a case take turns, A B A B …, and a ratio is the
median over turns. `cpu` is CPU time, summed over threads: the better measure on a shared machine.
Dream's speed is in the log of finetune_dream.py and in the results of eval_dream.py.
"""

import copy
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn as nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import checkpoint
import launch
from chunks import compile_parts
from data import rng
from launch import Size
from mdlm import MDLM, ModelConfig, corrupt, sample_times
from sample import generate
from train import update_ema


@dataclass
class Config(ModelConfig):
    """The fields of mdlm.ModelConfig, and what to measure."""
    parts: Literal["all", "train", "sample"] = "all"
    repeats: Size = 5                  # turns that count; for sampling, half as many
    json: str = ""                     # where to write the numbers
    batch: Size = 32                   # sequences per update
    steps: Size = 1024                 # T for one sequence, sampled alone
    many: Size = 64                    # sequences sampled together
    many_steps: Size = 128             # T for these
    top_p: float = 0.9
    device: str = "auto"
    compile: bool | None = None        # and CUDA graphs in sample (default: on CUDA)


PRESETS = {
    "gpu": {},
    "cpu": dict(
        n_layer=8, n_head=8, n_embd=256, length=256, batch=4, steps=64, many=8, many_steps=64),
    "quick": dict(
        n_layer=2, n_head=2, n_embd=32, vocab_size=500, length=32, batch=2, steps=8, many=2,
        many_steps=8, repeats=2),
}

SHARPNESS = 3.5  # standard deviation of the random logits, about that of a trained model


def timed(fn, device):
    """The cost of one call: {"seconds", "cpu"} and, on CUDA, "peak GB" of device memory.

    The peak leaves out what CUDA graphs allocated when they were captured.
    """
    synchronize = getattr(torch, device.type).synchronize  # torch.cuda, torch.mps, torch.cpu
    synchronize()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    fn()
    synchronize()
    found = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if device.type == "cuda":
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def interleaved(cases, repeats, device, tokens):
    """{name: {column: median}} of functions that take turns. The first turn does not count."""
    turns, found = [], {}
    for _ in launch.progress(range(repeats + 1), f"turns of {len(cases)}", leave=False):
        turns.append({name: timed(fn, device) for name, fn in cases.items()})
    first = next(iter(cases))
    for name in cases:
        columns = {key: [turn[name][key] for turn in turns[1:]] for key in turns[0][name]}
        for ratio, key in ("ratio", "seconds"), ("cpu ratio", "cpu"):
            # Within a turn, so that what slows the whole turn cancels out.
            columns[ratio] = [turn[name][key] / turn[first][key] for turn in turns[1:]]
        found[name] = {key: statistics.median(values) for key, values in columns.items()}
        found[name]["tokens/s"] = tokens / found[name]["seconds"]
    return found


def print_table(title, rows):
    columns = list(next(iter(rows.values())))
    print(f"\n{title:32}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        cells = [f"{row[column]:12,.3g}" if column in row else 12 * " " for column in columns]
        print(f"{name:32}" + "".join(cells), flush=True)


def build(cfg, device):
    """A random MDLM with feedback about as strong as after training."""
    model = MDLM(replace(cfg, mask_id=cfg.vocab_size - 1, omega_s=0.5, omega_a=1.0, omega_b=-5.0))
    std = SHARPNESS / cfg.n_embd ** 0.5  # hidden states have |h|² = D
    nn.init.normal_(model.net.output_layer.linear.weight, std=std)
    return model.to(device)


def training(cfg, device, dtype):
    """(a function that makes one update, as train.py does, on random tokens; its model)"""
    model = build(cfg, device)
    ema = copy.deepcopy(model.net).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, lr=1e-5,
                                  fused=device.type in ("cuda", "cpu"))
    if cfg.compile:
        torch.compiler.reset()  # a function keeps at most eight graphs: drop earlier models'
        compile_parts(model)
    generator, mask_id = rng("bench"), model.mask_id
    x0 = torch.randint(mask_id, (cfg.batch, cfg.length), generator=generator)
    t = sample_times(cfg.batch, generator)
    # The same x_t in all calls, because the time of an update depends on the number of masks.
    xt = corrupt(x0, t, mask_id, generator)                                    # (B, L)
    masks = (xt == mask_id).nonzero(as_tuple=True)                             # 2 × (N,)
    x0, xt, t, *masks = (x.to(device) for x in (x0, xt, t, *masks))

    def step(soft):
        with torch.autocast(device.type, dtype, enabled=bool(dtype), cache_enabled=False):
            nll = model(x0, xt, t, soft, tuple(masks))                         # (B,)
        (nll.sum() / x0.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update_ema(ema, model.net, 1, 0.9999)
    return step, model


def train_rows(cfg, device, dtype):
    """An update, binary and with SM. hours: for 1M updates of 512 × 1024 tokens.        App. B.1"""
    step, _ = training(cfg, device, dtype)
    cases = {"binary": partial(step, False), "SM, p_sm = 1": partial(step, True)}
    tokens = cfg.batch * cfg.length
    rows = interleaved(cases, cfg.repeats, device, tokens)
    binary, soft = rows.values()
    mixed = {key: 0.2 * binary[key] + 0.8 * soft[key] for key in binary if key != "peak GB"}
    rows["SM, p_sm = 0.8 (expected)"] = mixed | {"tokens/s": tokens / mixed["seconds"]}
    for row in rows.values():
        row["hours"] = 1e6 * 512 * 1024 / row["tokens/s"] / 3600
    return rows


def sample_rows(cfg, device, dtype, n, steps):
    """n samples, binary and with SM. s/call: seconds per network call of a sequence.    App. C.4"""
    model, calls = build(cfg, device).eval(), {}
    if dtype:
        model.net.cast_linears_(dtype)
    if cfg.compile:
        torch.compiler.reset()  # else two batch sizes would share one slower graph
        compile_parts(model, "reduce-overhead")

    def run(name):
        generators = [rng("bench", i) for i in range(n)]
        with torch.autocast(device.type, dtype, enabled=bool(dtype)):
            _, nfe = generate(model, n, steps, "mdlm", cfg.top_p, generators, soft=name == "SM")
        calls[name] = nfe.double().mean().item()
    cases = {name: partial(run, name) for name in ("binary", "SM")}
    rows = interleaved(cases, max(2, cfg.repeats // 2), device, n * cfg.length)
    for name, row in rows.items():
        row["s/call"] = row["seconds"] / calls[name]
    return rows


def main(cfg):
    _, _, device, dtype = launch.machine(cfg.device)
    cuda = device.type == "cuda"
    cfg = replace(cfg, compile=cuda if cfg.compile is None else cfg.compile)
    cases = {"train": train_rows, "sample, batch 1": partial(sample_rows, n=1, steps=cfg.steps),
             f"sample, batch {cfg.many}": partial(sample_rows, n=cfg.many, steps=cfg.many_steps)}
    found = {"machine": {"device": torch.cuda.get_device_name(device) if cuda else "CPU",
                         "threads": torch.get_num_threads(), "torch": torch.__version__,
                         "dtype": str(dtype or torch.float32), **checkpoint.git_version()},
             "settings": asdict(cfg)}
    print("  ".join(f"{key} {value}" for key, value in found["machine"].items()))
    for case, measure in cases.items():
        if cfg.parts in ("all", case.split(",")[0]):
            torch.manual_seed(0)
            found[case] = measure(cfg, device, dtype)
            print_table(case, found[case])
    if cfg.json:
        launch.write_text(cfg.json, json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    launch.run(main, Config, PRESETS)
