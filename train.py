# SPDX-License-Identifier: MIT
"""Train a soft-masked MDLM: the loop of Alg. 1, from one CPU to many nodes.  §3.2, Alg. 1, App. B.1

    python train.py quickstart                    # 6×6 Sudoku: minutes on two CPU cores, no network
    python train.py stdlib                        # text: the source code of Python itself
    torchrun --nproc_per_node=8 train.py            # the paper's run: 169M, OpenWebText, 1M updates
    torchrun --nproc_per_node=8 train.py binary           # its baseline, p_sm = 0
    torchrun --nproc_per_node=8 train.py continue --init_from=mdlm.ckpt       # 100k updates more
    python train.py owt --data=data/yours --n_layer=6 --length=256 --resume   # any field of Config

The first word is a preset, below.

Every random number is a function of what it is for: (seed, "t", step) for times, (seed, "q", step,
j) for masks. Steps count from 0: update 17 of the log has step 16. Micro-batches j count over all
ranks: one process with 4 of them and two with 2 make the same run. (Except for dropout in a
compiled trunk: DDP cuts it into pieces, and each draws its own.) And a run that was stopped or
killed goes on as if never stopped: there is no random state to save.
"""

import contextlib
import copy
import functools
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import data
import launch
import sudoku
from data import rng
from eval import bits_per_byte, val_ppl
from launch import Count, Positive, Rate, Refused, Share, Size
from mdlm import MDLM, T_MIN, ModelConfig, compile_parts, corrupt, sample_times
from sample import generate
from show import show


@dataclass
class Config(ModelConfig):
    """What mdlm.ModelConfig has (the data decide the vocabulary), and how to train it: App. B.1"""
    data: str = "data/owt"           # a folder made by data.py
    out_dir: str = "out/owt"         # last.pt, step-N.pt, log.jsonl
    init_from: str = ""              # any file that checkpoint.py describes; of a step-N.pt the EMA
    resume: bool | Literal["auto"] = False  # go on from out_dir/last.pt; auto: if it is there
    overwrite: bool = False          # start anew although out_dir holds a run
    seed: Count = 1
    # optimisation
    steps: Size = 1_000_000          # updates; the continuation takes 100k
    batch_size: Size = 512           # sequences per update, all devices together
    micro_batch: Size = 32           # sequences per device and pass; the rest is accumulated
    eta_bb: Rate = 3e-4              # learning rate of the backbone θ
    eta_sm: Rate = 1e-2              # of ω: it has far to go, App. B.2
    warmup: Count = 2500             # linear, then constant
    clip: Positive = 1.0             # of the norm over θ and ω together [code]
    ema: Share = 0.9999              # decay of the average over θ, not ω [code]
    # soft-masking, §3.2
    p_sm: Share = 0.8                # probability of two passes; 0 trains a binary MDLM
    b_l: Positive = T_MIN            # t ~ U(b_l, b_h); the paper narrows it for Dream only
    b_h: Share = 1.0
    # reporting
    log_every: Size = 10
    eval_every: Count = 10_000       # 0: never
    eval_rows: Size = 512            # rows of val.bin, evenly spaced; eval.py takes all of them
    save_every: Size = 1000          # last.pt
    keep_every: Count = 100_000      # step-N.pt, EMA and ω only; 0: only the last one
    show: bool = False               # end with the bound, ω over time, and one sample on screen
    # the machine
    device: str = "auto"             # cuda, else mps, else cpu
    dtype: launch.DType = "auto"     # bfloat16 where the GPU has it, else float32
    compile: bool | None = None      # trunk, loss and feedback (default: on CUDA)


PRESETS = {
    # 6×6 Sudoku, whose entropy is known, from the paper's ω. With four heads, some seeds stay for
    # thousands of updates on the plateau where only the digits' frequencies are known.
    "quickstart": dict(
        data="data/sudoku", out_dir="out/quickstart", show=True,
        n_layer=2, n_head=8, n_embd=128, n_cond=32, length=39, dropout=0.0,
        steps=3500, batch_size=32, micro_batch=32, eta_bb=1e-3, warmup=200, ema=0.995,
        log_every=50, eval_every=0, eval_rows=2000, save_every=500, keep_every=0),
    # Text that every machine has. Bytes have entropies at which the paper's ω_b keeps λ near 0, and
    # in so few updates ω_s would hardly grow. So ω starts where small runs drift to [ours].
    "stdlib": dict(
        data="data/stdlib", out_dir="out/stdlib", show=True,
        n_layer=4, n_head=4, n_embd=128, n_cond=64, length=128, dropout=0.0,
        omega_s=0.5, omega_a=1.0, omega_b=-2.8,
        steps=2000, batch_size=16, micro_batch=16, eta_bb=2e-3, warmup=100, ema=0.995,
        log_every=50, eval_every=0, eval_rows=256, save_every=500, keep_every=0),
    "owt": {},
    "continue": dict(steps=100_000, out_dir="out/continue", init_from="mdlm.ckpt"),  # MDLM's own
    "binary": dict(p_sm=0.0, out_dir="out/binary"),
}

# Seed of the times and masks of held-out rows, as in `eval.py ppl`: all runs meet the same masks.
EVAL_SEED = 1

# What may differ when a run is resumed. Everything else decides what the next update does.
MAY_DIFFER_ON_RESUME = {
    "out_dir", "resume", "overwrite", "steps", "log_every", "eval_every", "eval_rows", "save_every",
    "keep_every", "show", "device", "dtype", "compile"}


def batch(tokens, cfg, step, j, M):
    """x0 (b, L): sequences j, j + M, j + 2M, … of an update in M micro-batches.        Alg. 1 l.2

    A function of step and j: no row is seen twice in an epoch, whatever happens to the run.
    """
    n = data.n_rows(tokens, cfg.length)
    numbers = range(step * cfg.batch_size + j, (step + 1) * cfg.batch_size, M)
    index = [data.order(n, i // n, cfg.seed)[i % n] for i in numbers]
    return data.rows(tokens, index, cfg.length)                                # (b, L)


def lr_at(step, cfg):
    """Factor on both learning rates after `step` updates: 0 at first [code], linear, then 1."""
    return min(1.0, step / cfg.warmup) if cfg.warmup else 1.0


@torch.no_grad()
def update_ema(ema, model, step, decay=0.9999):
    """ema ← d ema + (1 − d) model, in place, with d = min(decay, (1 + step)/(10 + step)) [code]

    step: updates made. Without this warm-up of d, the average would remember the random start for
    1/(1 − decay) updates.
    """
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - d)


def train(cfg):
    """Alg. 1: the data, the model, one update, and the loop. Returns (the MDLM, its average).

    Checked against tests/oracles.py alg1.
    """
    # ---- the data
    rank, world, device, dtype = launch.machine(cfg.device, cfg.dtype)
    launch.join(world, device)
    master = rank == 0
    if master:
        data.prepare_preset(cfg.data)
    if world > 1:
        dist.barrier()
    tokens, meta = data.open_split(cfg.data, "train")
    cfg = with_vocabulary(cfg, meta["tokenizer"])
    accum, rest = divmod(cfg.batch_size, cfg.micro_batch * world)  # micro-batches of a rank
    if rest or not accum:
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of --micro_batch="
                      f"{cfg.micro_batch} times {world} processes: change one of them")
    n_train = data.n_rows(tokens, cfg.length)
    source = {"path": cfg.data, "n_tokens": len(tokens.ids), "sha256": meta["train"]["sha256"]}
    if cfg.eval_every or cfg.show:
        val = data.open_split(cfg.data, "val")[0]
        n_val = data.n_rows(val, cfg.length)
        m = min(cfg.eval_rows, n_val)
        held_out = data.rows(val, torch.arange(m) * n_val // m, cfg.length)    # (m, L)

    # ---- the model, its average, the optimizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)  # the same weights on every rank
        model = MDLM(cfg)
    last, start, metrics, ckpt = os.path.join(cfg.out_dir, "last.pt"), 0, {}, None
    if launch.goes_on(last, cfg.resume, cfg.overwrite):
        ckpt = checkpoint.load(last)
        # Data are compared by their content: their folder may have moved.
        before = ckpt["config"] | {"data": ckpt["data"]["sha256"], "keys": ckpt["keys"]}
        here = asdict(cfg) | {"data": source["sha256"], "keys": data.KEYS}
        launch.check_same(last, before, here, here.keys() - MAY_DIFFER_ON_RESUME)
        model.load_state_dict(ckpt["model"])
        start, metrics = ckpt["step"], ckpt["metrics"]
    elif cfg.init_from:
        load_initial(model, cfg, meta["tokenizer"])
    model.to(device)
    # The EMA is a second backbone around the same ω: the average that is published and evaluated
    # [code]. In a continuation it starts at the loaded weights [ours]. That of the authors starts
    # at random ones, which twenty updates forget.
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    ema.sm = model.sm
    average = {"net." + name: t for name, t in ema.net.state_dict().items()}  # no copy
    theta = list(model.net.parameters())
    omega = list(model.sm.parameters()) if model.sm else []
    groups = [{"params": params} for params in (theta, omega) if params]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=0.0,  # [code]
                                  fused=device.type in ("cuda", "cpu"))
    if ckpt:
        ema.load_state_dict(model.state_dict() | ckpt["ema"])
        optimizer.load_state_dict(ckpt["optimizer"])
        del ckpt  # it is as large as the model and its optimizer
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        compile_parts(model)
    parallel = model
    if world > 1:
        parallel = DistributedDataParallel(model)
    # cache_enabled: with a cache, older torch (2.6 does, 2.13 does not) takes the bf16 weights of
    # pass 1, which have no graph, for pass 2 too. Then they get no gradient, and nothing says so.
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=dtype is not None,
                                 cache_enabled=False)

    def update(step):
        """One update of θ and ω. Returns the norm of the gradient, 0-d.             Alg. 1 l.2-9"""
        # One coin per update, the same on every rank [ours]. The authors draw one per micro-batch.
        coin = torch.rand((), generator=rng(cfg.seed, "p_sm", step)).item()
        soft = bool(omega) and coin < cfg.p_sm
        times = sample_times(cfg.batch_size, rng(cfg.seed, "t", step), cfg.b_l, cfg.b_h)       # l.3
        for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):
            group["lr"] = eta * lr_at(step, cfg)
        for i in range(accum):
            j = i * world + rank        # counted over all ranks: any rank may compute it
            x0 = batch(tokens, cfg, step, j, accum * world)                    # (b, L)          l.2
            # With the stride, every micro-batch spans all times, and half of its tokens are
            # masked. A slice of the last times would have twice as many masks [ours].
            t = times[j::accum * world]                                        # (b,)            l.3
            xt = corrupt(x0, t, cfg.mask_id, rng(cfg.seed, "q", step, j))      # (b, L)          l.4
            # Found on the CPU: the host need not wait for a GPU to know the number of masks N.
            at = (xt == cfg.mask_id).flatten().nonzero().squeeze(1)            # (N,)
            x0, xt, t, at = (launch.to_device(x, device) for x in (x0, xt, t, at))
            if cfg.dropout:
                torch.manual_seed(data.seed_of(cfg.seed, "dropout", step, j))
            more = i + 1 < accum        # ranks add up their gradients in the last micro-batch
            with parallel.no_sync() if world > 1 and more else contextlib.nullcontext():
                with autocast():
                    nll = parallel(x0, xt, t, soft, at)                      # (b,)            l.5-8
                # Divided by all tokens, not by the masks [code]: so any split gives the same.
                (nll.sum() / (accum * x0.numel())).backward()
            nll = nll.detach()
            # nll @ t is the cross-entropy without its weight 1/t.
            log.add(nll=nll.sum(), ce=nll @ t, masks=len(at), tokens=x0.numel(), soft=soft,
                    lam=model.lam if soft else 0)
        if not soft:
            # The gradient of ω is 0, which DDP needed (TwoPass). Adam would still move ω by its
            # momentum [ours].
            for p in omega:
                p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(theta + omega, cfg.clip)
        optimizer.step()                                                       #                 l.9
        optimizer.zero_grad(set_to_none=True)
        update_ema(ema.net, model.net, step + 1, cfg.ema)
        return norm

    def evaluate():
        """{name: nats per token} of the EMA on fixed rows, with feedback and without."""
        bounds = {}
        for soft in [True, False] if omega else [False]:
            with autocast():
                total = val_ppl(ema, held_out, soft, EVAL_SEED, rank=rank, world=world)
            nll, count = launch.over_ranks(torch.tensor(total, dtype=torch.float64)).tolist()
            bounds["val_soft" if soft else "val_plain"] = nll / count
        return bounds

    def log_line(norm):
        """The line of log.jsonl for the updates since the last line. It refuses a nan."""
        sums = log.collect(norm)
        line = {"step": done, "loss": sums["nll"] / sums["tokens"],
                "ce_per_mask": sums["ce"] / max(1, sums["masks"]),
                "eta_bb": lr_at(done - 1, cfg) * cfg.eta_bb, "grad_norm": sums["grad_norm"],
                "tokens_per_s": sums["tokens"] / sums["seconds"],
                "lam": sums["lam"] / max(1, sums["soft"])}
        if omega:
            line |= {"omega_" + name: w.item() for name, w in zip("sab", model.sm.omega)}
        if omega and cfg.k is None:
            line["tau"] = model.sm.tau.item()
        return line

    def save(name, **parts):
        if master:
            checkpoint.save(os.path.join(cfg.out_dir, name), kind="mdlm", config=asdict(cfg),
                            step=done, seed=cfg.seed, keys=data.KEYS, metrics=metrics,
                            tokenizer=meta["tokenizer"], data=source, **parts)

    def due(every):
        return every and (done % every == 0 or done == cfg.steps)

    # ---- the loop
    done, stop = start, 0  # updates made, which `save` and `due` read; the signal that stops it
    # Rank 0 alone writes, so it alone locks.
    locked = launch.lock(cfg.out_dir) if master else contextlib.nullcontext()
    with locked, launch.signals() as caught:
        log = launch.Log(os.path.join(cfg.out_dir, "log.jsonl"), start, cfg.steps, master)
        if master and cfg.overwrite and not start:
            # Of the old run, weights and the results beside them go: they are not of this run.
            for pattern in "last.pt*", "step-*.pt*":
                for path in Path(cfg.out_dir).glob(pattern):
                    path.unlink()
        if master:
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device} × {world}, "
                  f"{dtype or 'float32'}; {n_train:,} rows of {cfg.length}, "
                  f"{cfg.batch_size} a step = {accum} × {world} × {cfg.micro_batch}; "
                  f"updates {start:,} to {cfg.steps:,}")
        # A continuation first measures the bound where it starts (Fig. 3): the best check that the
        # weights were read correctly.
        if cfg.eval_every and cfg.init_from and not start:
            metrics = {"step": 0, **evaluate()}
            log.write(metrics)
        model.train()
        for step in range(start, cfg.steps):
            norm = update(step)
            done = step + 1
            # One rank's signal counts for all: they stop after the same update.
            stop = launch.any_rank(max(caught, default=0))
            evaluated = due(cfg.eval_every) and not stop
            saved = stop or due(cfg.save_every) or due(cfg.keep_every)
            if saved or evaluated or due(cfg.log_every) or done == 1:  # 1: a line at once
                line = log_line(norm)  # a nan is refused here, before it is saved
                if evaluated:
                    metrics = {"step": done, **evaluate()}
                    line |= metrics
                log.write(line)
            if due(cfg.save_every) or stop:
                save("last.pt", model=model.state_dict(), ema=average,
                     optimizer=optimizer.state_dict())
            if due(cfg.keep_every) or done == cfg.steps:
                save(f"step-{done}.pt", model=model.state_dict() | average)
            if stop:
                break

    if cfg.show and done == cfg.steps and not stop:
        bounds = evaluate()
        if master:
            demonstrate(cfg, ema, bounds, meta)
    if stop:
        launch.leave(world, f"stopped after update {done:,}, saved in {last}: the same command "
                            f"with --resume goes on", 128 + stop)
    launch.leave(world, model.warning(), 0)
    return model, ema


def with_vocabulary(cfg, special):
    """cfg with the vocabulary of the data, checked.   special: its tokenizer, as in meta.json."""
    if not cfg.b_l < cfg.b_h:
        raise Refused(f"--b_l={cfg.b_l} must be below --b_h={cfg.b_h}")
    if cfg.k is not None and cfg.k >= special["vocab_size"]:
        raise Refused(f"--k={cfg.k} must be below the {special['vocab_size']} tokens of {cfg.data}")
    return replace(cfg, vocab_size=special["mask_id"] + 1, mask_id=special["mask_id"],
                   soft_mask=cfg.soft_mask and cfg.p_sm > 0)


def load_initial(model, cfg, special):
    """Start from the raw weights of a file [code], or its average alone, and from its ω, if any."""
    path = os.path.realpath(cfg.init_from)
    if os.path.realpath(cfg.out_dir) in (path, os.path.dirname(path)):
        raise Refused(f"--init_from={cfg.init_from} is in --out_dir={cfg.out_dir}, where this run "
                      f"replaces files: give another --out_dir")
    ckpt = checkpoint.load(path)
    before = asdict(ModelConfig()) | ckpt["config"] | {"tokenizer": ckpt["tokenizer"]["name"]}
    here = asdict(cfg) | {"tokenizer": special["name"]}
    # Not all of these show in a shape.
    names = ["n_layer", "n_head", "n_embd", "n_cond", "time_conditioning", "mask_id", "tokenizer"]
    if cfg.soft_mask and before["soft_mask"]:
        names += ["arm", "k"]
    launch.check_same(cfg.init_from, before, here, names)
    # A model without SM drops the ω of the file. If the file has none, the model keeps its own.
    omega = {name: p for name, p in model.state_dict().items() if name.startswith("sm.")}
    state = {name: p for name, p in ckpt["model"].items() if model.sm or name.startswith("net.")}
    model.load_state_dict(omega | state)


def demonstrate(cfg, model, bounds, meta):
    """What --show ends with: the bound, ω at five times, and a sample of the averaged model.

    bounds: {name: nats per token}.   meta: of the data.
    """
    is_sudoku = meta["source"] == "sudoku"
    unit = f"nats per grid (the entropy is {sudoku.NATS:.2f})" if is_sudoku else "bits per byte"
    print(f"\nheld-out bound in {unit}; one model, the same masks")
    for name, nats in bounds.items():
        value = nats * cfg.length if is_sudoku else bits_per_byte(nats, cfg.length, meta["val"])
        print(f"  {'with feedback' if name == 'val_soft' else 'without':15}{value:.4f}")
    if model.sm:
        lines = launch.read_jsonl(os.path.join(cfg.out_dir, "log.jsonl"))
        lines = [line for line in lines if "omega_s" in line]  # not those of an evaluation alone
        print(f"\n  update{'ω_s':>8}{'ω_a':>8}{'ω_b':>8}{'mean λ':>9}")
        for i in sorted({quarter * (len(lines) - 1) // 4 for quarter in range(5)}):
            row = "  {step:6,}{omega_s:8.3f}{omega_a:8.3f}{omega_b:8.3f}{lam:9.3f}"
            print(row.format(**lines[i]))
    print()
    if is_sudoku:
        sudoku.demonstrate(model)
        return
    tok = data.tokenizer(meta["tokenizer"]["name"])
    ids, _ = generate(model, 1, cfg.length, generator=[rng(cfg.seed, "demonstrate")],
                      on_step=show(tok, cfg.mask_id))
    print(f"{tok.decode(ids[0].tolist())}\n"
          f"More: python sample.py --checkpoint={cfg.out_dir}/last.pt --show")


if __name__ == "__main__":
    launch.run(train, Config, PRESETS)
