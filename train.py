# SPDX-License-Identifier: MIT
"""Train a soft-masked MDLM: the loop of Alg. 1, from one CPU to many nodes.                           §3.2, Alg. 1, App. B.1

    python train.py quickstart                              # minutes on two CPU cores: no data, network or GPU needed
    torchrun --nproc_per_node=8 train.py                    # the paper's run from scratch: 169M, OpenWebText, 1M updates
    torchrun --nproc_per_node=8 train.py binary             # its baseline, p_sm = 0
    torchrun --nproc_per_node=8 train.py continue --init_from=mdlm.ckpt        # 100k more from a pretrained MDLM
    python train.py owt --data=data/novels --n_layer=6 --length=256 --resume   # any field of Config as --key=value

Every random number is a function of what it is for: (seed, "t", step), (seed, "q", step, micro-batch), … So the same run
comes out of 1 GPU × 4 micro-batches and of 2 × 2; ranks cannot disagree; a run that was stopped, or killed, goes on as if
it had not been; and there is no random state to save.

Not here: the model and its loss (mdlm.py), sampling, metrics (eval.py), wandb: log.jsonl has a line to plot per entry.
"""

import contextlib
import copy
import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import launch
import data
from launch import Refused
from data import rng
from eval import bits_per_byte, val_ppl
from mdlm import ALPHA_FLOOR, MDLM, ModelConfig, corrupt, sample_times
from sample import generate
from show import show


@dataclass
class Config(ModelConfig):
    """The model's fields (mdlm.ModelConfig; the vocabulary is the data's), and App. B.1."""
    data: str = "data/owt"           # a folder made by data.py
    out_dir: str = "out/owt"         # last.pt, step-N.pt, log.jsonl
    init_from: str = ""              # weights to start from: any checkpoint that `python checkpoint.py` can describe
    resume: bool = False             # go on from out_dir/last.pt
    overwrite: bool = False          # start anew although out_dir holds a run
    seed: int = 1
    # optimisation
    steps: int = 1_000_000           # updates; the continuation takes 100k
    batch_size: int = 512            # sequences per update, all devices together
    micro_batch: int = 32            # sequences per device and pass; the rest is accumulated
    eta_bb: float = 3e-4             # learning rate of the backbone θ
    eta_sm: float = 1e-2             # of ω: it has far to go, App. B.2
    warmup: int = 2500               # linear, then constant
    clip: float = 1.0                # of the norm over θ and ω together [code]
    ema: float = 0.9999              # over θ, not ω [code]
    # soft-masking, §3.2
    p_sm: float = 0.8                # probability of two passes; 0 trains a binary MDLM
    b_l: float = ALPHA_FLOOR         # t ~ U(b_l, b_h); the paper narrows it for Dream only
    b_h: float = 1.0
    # reporting
    log_every: int = 10
    eval_every: int = 10_000         # 0: never
    eval_rows: int = 512             # of val.bin, evenly spaced, the same every time; eval.py does them all
    save_every: int = 1000           # last.pt
    keep_every: int = 100_000        # step-N.pt, EMA and ω only; 0: only the last one
    show: bool = False               # end with the bound, ω over time, and one sample unmasked on screen
    # the machine
    device: str = "auto"             # cuda, else mps, else cpu
    dtype: str = "auto"              # bfloat16 where the GPU has it, else float32
    compile: bool | None = None      # the trunk; none: on CUDA
    peak_flops: float = 0.0          # of one device, for MFU; 0: look it up


# The quickstart is a demonstration, not the paper's start: at byte level entropies stay near 2 nats, where the paper's
# ω_b would hold λ shut, and ω_s would need a thousand updates to leave 1e-6. It starts where small runs drift to [ours].
PRESETS = {
    "quickstart": dict(data="data/stdlib", out_dir="out/quickstart", overwrite=True, show=True, n_layer=4, n_head=4,
                       n_embd=128, n_cond=64, length=128, dropout=0.0, omega_s=0.5, omega_a=1.0, omega_b=-2.8, steps=2000,
                       batch_size=16, micro_batch=16, eta_bb=2e-3, warmup=100, ema=0.995, log_every=50, eval_every=0,
                       eval_rows=256, save_every=500, keep_every=0),
    "owt": {},
    "continue": dict(steps=100_000, out_dir="out/continue", init_from="mdlm.ckpt"),  # the released MDLM, by its name
    "binary": dict(p_sm=0.0, out_dir="out/binary"),
}

EVAL_SEED = 1  # of held-out times and masks, whatever cfg.seed: runs are compared on the same ones, `eval.py ppl` has them too

# Dense bf16 peak of one device, FLOP/s, by the first of these that is a part of its name
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12,
              "L40": 181e12, "L4": 121e12, "A10G": 70e12, "4090": 165e12, "3090": 71e12}


def lr_at(step, cfg):
    """Factor on both learning rates before update `step` (from 0): linear warm-up, then 1. The first update has 0 [code]."""
    return min(1.0, step / max(1, cfg.warmup))


@torch.no_grad()
def update_ema(ema, model, step, decay=0.9999):
    """ema ← d ema + (1 − d) model, with d = min(decay, (1 + n)/(10 + n)) after update n [code]

    ema, model: modules with the same parameters; in place. Without the warm-up it would remember the random start for
    1/(1 − decay) updates.
    """
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - d)


def flops_per_token(cfg, p_sm):
    """Useful FLOPs of one training token, forward and backward: the trunk everywhere, the head on the masked half."""
    D, L = cfg.n_embd, cfg.length
    forward = 2 * (12 * cfg.n_layer * D * D + 2 * cfg.n_layer * D * L + cfg.vocab_size * D / 2)
    return forward * (3 + p_sm)  # backward is two forwards, the first pass of SM is one more


def checked(cfg, special):
    """cfg with what follows from it and the data filled in. Raises Refused for values that cannot be run."""
    least = dict(steps=1, batch_size=1, micro_batch=1, n_layer=1, n_head=1, n_embd=1, n_cond=1, length=3, log_every=1,
                 save_every=1, eval_rows=1, warmup=0, eval_every=0, keep_every=0, peak_flops=0)
    ranges = {name: (low, math.inf) for name, low in least.items()}
    ranges |= dict(p_sm=(0, 1), b_l=(1e-6, cfg.b_h - 1e-6), b_h=(0, 1), dropout=(0, 0.999), ema=(0, 0.999999),
                   clip=(1e-9, 1e9), eta_bb=(0, 10), eta_sm=(0, 10), k=(1, special["vocab_size"] - 1), seed=(0, 2**63 - 1))
    for name, (low, high) in ranges.items():
        value = getattr(cfg, name)
        if value is not None and not low <= value <= high:
            raise Refused(f"--{name}={value} must be at least {low}" + f" and at most {high}" * (high < math.inf))
    if not cfg.out_dir:
        raise Refused("--out_dir= is empty: name a folder for checkpoints and log")
    for name in ("vocab_size", "mask_id"):  # never a choice: the ids of the data decide
        if getattr(cfg, name) not in (getattr(ModelConfig, name), special["mask_id"] + (name == "vocab_size")):
            raise Refused(f"--{name}={getattr(cfg, name)} is not that of {cfg.data}: leave it out, the tokenizer decides")
    return replace(cfg, vocab_size=special["mask_id"] + 1, mask_id=special["mask_id"],
                   soft_mask=cfg.soft_mask and cfg.p_sm > 0)


# What may differ when a run is resumed: all else decides what the next update does
FREE = {"data", "out_dir", "init_from", "resume", "overwrite", "steps", "omega_s", "omega_a", "omega_b", "log_every", "eval_every",
        "eval_rows", "save_every", "keep_every", "show", "device", "dtype", "compile", "peak_flops"}


def resumable(ckpt, cfg, source):
    """Raises Refused unless going on from this checkpoint repeats the run that it was cut from, up to rounding."""
    last = f"{cfg.out_dir}/last.pt"
    if ckpt["kind"] != "mdlm" or not ({"optimizer", "ema", "data", "metrics"} <= ckpt.keys()):
        raise Refused(f"{last} was not written by a running train.py: start from its weights, --init_from={last} --out_dir=…")
    different = [f"{name} ({ckpt['config'].get(name)} there, {value} here)" for name, value in asdict(cfg).items()
                 if name not in FREE and ckpt["config"].get(name) != value]
    different += ["the data"] if ckpt["data"]["sha256"] != source["sha256"] else []
    if different:
        raise Refused(f"cannot resume: {', '.join(different)} differ from {last}; give the same, or another --out_dir")


def fitting(ckpt, cfg, special):
    """Raises Refused unless these weights can start a model of this configuration on data of this tokenizer."""
    if ckpt["kind"] != "mdlm":
        raise Refused(f"{cfg.init_from} holds a {ckpt['kind']}, not an MDLM")
    names = ("n_layer", "n_head", "n_embd", "n_cond", "vocab_size", "mask_id", "time_conditioning")
    different = [f"{name} ({ckpt['config'][name]} there, {getattr(cfg, name)} here)" for name in names
                 if ckpt["config"].get(name) != getattr(cfg, name)]
    if ckpt.get("tokenizer") and ckpt["tokenizer"]["name"] != special["name"]:
        different.append(f"tokenizer ({ckpt['tokenizer']['name']} there, {special['name']} in {cfg.data})")
    if different:
        raise Refused(f"{cfg.init_from} holds another model than this configuration: {', '.join(different)}; give the same")


def demonstrate(cfg, model, bounds, held_out, meta):
    """What a first run should let one see: that feedback helps this very model, how ω got there, and a text appearing."""
    generator, device = rng(cfg.seed, "demonstrate"), model.net.table.device
    print(f"\nheld-out bound, {len(held_out)} rows, in bits per byte (of the same model, on the same masks)")
    for name, text in (("val_soft", "with feedback"), ("val_plain", "without")):
        if name in bounds:
            print(f"  {text:15}{bits_per_byte(bounds[name], cfg.length, meta['val']):.4f}")
    if model.sm:
        t = sample_times(len(held_out), generator)
        batch = (x.to(device) for x in (held_out, corrupt(held_out, t, cfg.mask_id, generator), t))
        with torch.no_grad():
            model(*batch, soft=True)
        print(f"  mean λ on these rows: {model.lam:.3f}\n\n  update     ω_s     ω_a     ω_b   mean λ")
        with open(os.path.join(cfg.out_dir, "log.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        for line in lines[::max(1, len(lines) // 10)] + lines[-1:]:
            print("  {step:6,}{omega_s:8.3f}{omega_a:8.3f}{omega_b:8.3f}{lam:9.3f}".format(**line))
    print(f"\none sample of {cfg.length} tokens, as many steps")
    tok = data.tokenizer(meta["tokenizer"]["name"])
    ids, nfe = generate(model, 1, cfg.length, generator=generator, on_step=show(tok, cfg.mask_id))
    print(f"\n{tok.decode(ids[0].tolist())}\n\n{nfe.item()} network calls. "
          f"More: python sample.py --checkpoint={cfg.out_dir}/last.pt --show")


def train(cfg):
    """Alg. 1, top to bottom. Returns (the trained MDLM, its average), for tests and notebooks."""
    # ---- the data, and what is to be trained
    rank, world, device, dtype = launch.machine(cfg.device, cfg.dtype)
    master = rank == 0
    launch.join(world, device)
    if master and cfg.data == PRESETS["quickstart"]["data"] and not os.path.exists(os.path.join(cfg.data, "meta.json")):
        data.prepare_stdlib(cfg.data)
    if world > 1:
        dist.barrier()
    tokens, meta = data.open_split(cfg.data, "train")
    cfg = checked(cfg, meta["tokenizer"])
    accum, rest = divmod(cfg.batch_size, cfg.micro_batch * world)
    if rest or not accum:
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of --micro_batch={cfg.micro_batch} times {world} "
                      f"processes: change one of them")
    n = data.n_rows(tokens, cfg.length)
    source = {"path": cfg.data, "n_tokens": len(tokens), "sha256": meta["train"]["sha256"]}
    last = os.path.join(cfg.out_dir, "last.pt")
    if os.path.exists(last) and not (cfg.resume or cfg.overwrite):
        raise Refused(f"{cfg.out_dir} already holds a run: --resume goes on with it, --out_dir=… starts another")
    if cfg.eval_every or cfg.show:
        val = data.open_split(cfg.data, "val")[0]
        n_val = data.n_rows(val, cfg.length)
        m = min(cfg.eval_rows, n_val)
        held_out = data.rows(val, torch.arange(m) * n_val // m, cfg.length)  # the rows of `eval.py ppl --rows=m`

    with torch.random.fork_rng(devices=[]):  # same weights on every rank
        torch.manual_seed(cfg.seed)
        model = MDLM(cfg)
    start, metrics, ckpt = 0, {}, None
    if cfg.resume:
        ckpt = checkpoint.load(last)
        resumable(ckpt, cfg, source)
        model.load_state_dict(ckpt["model"])
        start, metrics = ckpt["step"], ckpt["metrics"]
    elif cfg.init_from:  # raw weights, new optimizer [code]; ω may be new
        initial = checkpoint.load(cfg.init_from)
        fitting(initial, cfg, meta["tokenizer"])
        model.load_state_dict({k: t for k, t in initial["model"].items() if k in model.state_dict()}, strict=False)
        del initial
    model.to(device)
    # The EMA is a second backbone around the same ω: evaluating it is evaluating the published average [code]. In a
    # continuation it starts at the loaded weights; theirs at random ones, forgotten in twenty updates [ours].
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    ema.sm = model.sm
    if ckpt:
        ema.load_state_dict(ckpt["ema"] | {k: v for k, v in ckpt["model"].items() if k.startswith("sm.")})
    theta, omega = list(model.net.parameters()), list(model.sm.parameters()) if model.sm else []
    optimizer = torch.optim.AdamW([{"params": theta}] + ([{"params": omega}] if omega else []), betas=(0.9, 0.999),
                                  weight_decay=0.0, fused=device.type in ("cuda", "cpu"))
    if ckpt:
        optimizer.load_state_dict(ckpt["optimizer"])
        del ckpt  # as large as the model and its optimizer
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        model.net.trunk = torch.compile(model.net.trunk)  # the method: wrapping the module would rename its state_dict
    net = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                  broadcast_buffers=False) if world > 1 else model
    # No cache: in older torch (2.6 does, 2.13 does not) it hands the casts of pass 1, made without a graph, to pass 2,
    # which then has no gradient for its weights, and says nothing.
    autocast = lambda: torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)

    # ---- what a step needs
    order = (None, None)  # (epoch, its permutation)

    def batch(step, j):
        """Sequences j, j + M, j + 2M, … of the update: x0 (b, L). A function of its number, so nothing is seen twice.   l.2"""
        nonlocal order
        index = []
        for i in range(j, cfg.batch_size, accum * world):
            epoch, row = divmod(step * cfg.batch_size + i, n)
            if order[0] != epoch:
                order = (epoch, data.order(n, epoch, cfg.seed))
            index.append(order[1][row])
        return data.rows(tokens, index, cfg.length)

    def save():
        if master:
            checkpoint.save(last, kind="mdlm", config=asdict(cfg), step=done, seed=cfg.seed, model=model.state_dict(),
                            ema={k: v for k, v in ema.state_dict().items() if k.startswith("net.")},
                            optimizer=optimizer.state_dict(), tokenizer=meta["tokenizer"], data=source, metrics=metrics)

    def evaluate():
        """Nats per token with feedback and without, of the EMA model on fixed rows, every rank a share."""
        bounds = {}
        for soft in [True, False] if omega else [False]:
            with autocast():
                total = torch.tensor(val_ppl(ema, held_out, soft, EVAL_SEED, rank=rank, world=world), dtype=torch.float64)
            if world > 1:
                dist.all_reduce(total)
            bounds["val_soft" if soft else "val_plain"] = (total[0] / total[1]).item()
        return bounds

    # ---- the log: on a resumed run without the lines of updates that will be made again
    done, log_path = start, os.path.join(cfg.out_dir, "log.jsonl")
    if master:
        old = launch.log_until(log_path, start) if start else []
        if not start and os.path.exists(last):
            os.remove(last)  # or a --resume of this run, killed before its first save, would go on with the old one
        with launch.atomic(log_path) as tmp, open(tmp, "w") as f:
            f.writelines(old)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device} × {world}, {dtype or 'float32'}; "
              f"{n:,} rows of {cfg.length}, {cfg.batch_size} a step = {accum} × {world} × {cfg.micro_batch}; "
              f"updates {start:,} to {cfg.steps:,}", flush=True)
    peak = cfg.peak_flops or next((f for name, f in PEAK_FLOPS.items() if device.type == "cuda" and
                                   name in torch.cuda.get_device_name(device)), 0.0)
    seen, tally = torch.zeros(5, dtype=torch.float64), torch.zeros(3, device=device)  # since the last line; see `report`
    mark, clock, first = start, time.time(), time.time()

    def report(norm):
        """One line on screen, one in log.jsonl: means since the last one, over all ranks. The only wait for the device."""
        nonlocal mark, clock
        seen[:3] = tally.cpu().double()
        if world > 1:
            dist.all_reduce(seen)
        nll, ce, lam, masks, softs = seen.tolist()
        if not math.isfinite(nll + norm.item()):
            raise Refused(f"the loss or its gradient is not a number by update {done:,}: --resume goes back to the last save, in "
                          f"{last}; a lower --eta_bb needs a run of its own")
        now, sequences = time.time(), (done - mark) * cfg.batch_size
        speed = sequences * cfg.length / (now - clock)
        line = {"step": done, "loss": nll / (sequences * cfg.length), "ce_per_mask": ce / max(1, masks),
                "lr": lr_at(done - 1, cfg) * cfg.eta_bb, "grad_norm": norm.item(), "lam": lam / max(1, softs),
                "tokens_per_s": speed, "seconds": now - first}
        line |= {"omega_" + name: w.item() for name, w in zip("sab", model.sm.omega)} if omega else {}
        line |= metrics if metrics.get("step") == done else {}
        mfu = f"  MFU {speed * flops_per_token(cfg, cfg.p_sm if omega else 0) / (peak * world):.1%}" if peak else ""
        left = (now - first) / (done - start) * (cfg.steps - done) / 60
        seen.zero_(), tally.zero_()
        mark, clock = done, now
        if not master:
            return
        print(f"step {done:,}/{cfg.steps:,}  loss {line['loss']:.4f}  ce/mask {line['ce_per_mask']:.3f}"
              f"  |g| {line['grad_norm']:.2f}  ω_s {line.get('omega_s', 0):.3g}  λ {line['lam']:.3g}"
              f"  {speed:,.0f} tokens/s{mfu}  {left:,.1f} min left"
              + "".join(f"  {k} {v:.4f}" for k, v in line.items() if k.startswith("val")), flush=True)
        launch.log_line(log_path, line)

    # ---- Alg. 1
    model.train()
    with launch.signals() as stop:
        for step in range(start, cfg.steps):
            # p_sm: one coin per update, the same on every rank [ours]; the released code tosses one per micro-batch
            soft = bool(omega) and torch.rand((), generator=rng(cfg.seed, "p_sm", step)).item() < cfg.p_sm
            t_all = sample_times(cfg.batch_size, rng(cfg.seed, "t", step), cfg.b_l, cfg.b_h)      # (batch,)        l.3
            for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):
                group["lr"] = eta * lr_at(step, cfg)
            for i in range(accum):
                j = i * world + rank                           # global micro-batch: who computes it changes nothing
                x0 = batch(step, j)                                                               # (b, L)          l.2
                # Strided, so that every micro-batch spans all times and has half of its tokens masked; in slices, one rank
                # would hold all of t ≈ 1, and twice the rows [ours].
                t = t_all[j::accum * world]                                                       # (b,)            l.3
                xt = corrupt(x0, t, cfg.mask_id, rng(cfg.seed, "q", step, j))                     # (b, L)          l.4
                seen[3] += (xt == cfg.mask_id).sum()  # on the CPU: no wait
                x0, xt, t = (x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
                             for x in (x0, xt, t))
                torch.manual_seed(rng(cfg.seed, "dropout", step, j).initial_seed())
                with net.no_sync() if world > 1 and i + 1 < accum else contextlib.nullcontext():
                    with autocast():
                        nll = net(x0, xt, t, soft)                                                # (b,)            l.5-8
                    (nll.sum() / (accum * x0.numel())).backward()  # over B·L: the same on any number of devices
                nll = nll.detach()
                tally += torch.stack((nll.sum(), nll @ t, model.lam.to(device) * soft))
                seen[4] += soft
            if not soft:  # DDP needs the zero gradient of ω that the loss made; Adam would still move ω by its momentum
                for p in omega:
                    p.grad = None
            norm = torch.nn.utils.clip_grad_norm_(theta + omega, cfg.clip)
            optimizer.step()                                                                      #                 l.9
            optimizer.zero_grad(set_to_none=True)
            done = step + 1
            update_ema(ema.net, model.net, done, cfg.ema)

            told = torch.tensor(max(stop, default=0))  # a signal, or 0: what one rank was told, all do after the same update
            if world > 1:
                dist.all_reduce(told, dist.ReduceOp.MAX)
            told = told.item()
            end = told or done == cfg.steps
            evaluating = cfg.eval_every and not told and (done % cfg.eval_every == 0 or done == cfg.steps)
            if evaluating:
                pause = time.time()
                metrics = {"step": done, **evaluate()}
                clock += time.time() - pause  # no part of tokens/s
            if done % cfg.log_every == 0 or done % cfg.save_every == 0 or end or evaluating:
                report(norm)  # refuses what is not a number, so before the save
            if done % cfg.save_every == 0 or end:
                save()
            if master and (cfg.keep_every and done % cfg.keep_every == 0 or done == cfg.steps):
                weights = model.state_dict() | {k: v for k, v in ema.state_dict().items() if k.startswith("net.")}
                checkpoint.save(os.path.join(cfg.out_dir, f"step-{done}.pt"), kind="mdlm", config=asdict(cfg), step=done,
                                seed=cfg.seed, model=weights, tokenizer=meta["tokenizer"], data=source, metrics=metrics)
            if end:
                break

    if cfg.show and done == cfg.steps:
        bounds = evaluate()
        if master:
            demonstrate(cfg, ema, bounds, held_out, meta)
    message = f"stopped after update {done:,}, saved in {last}: the same command with --resume goes on" if done < cfg.steps else ""
    launch.leave(world, message, 128 + told if message else 0)
    return model, ema


if __name__ == "__main__":
    launch.run(train, Config, PRESETS)
