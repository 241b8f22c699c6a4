# SPDX-License-Identifier: MIT
"""Train a soft-masked MDLM: Alg. 1, from one CPU to many nodes.                            App. B.1

    python train.py small           # the source code of Python itself: minutes on two CPU cores
    torchrun --nproc_per_node=8 train.py            # the paper's run: 169M, OpenWebText, 1M updates
    torchrun --nproc_per_node=8 train.py binary           # its baseline, p_sm = 0
    torchrun --nproc_per_node=8 train.py continue         # 100k more updates, from mdlm.pt
    python train.py owt --data=data/yours --out_dir=out/yours --n_layer=6    # flags: see Config

`train` is the whole run, from top to bottom. Alg. 1 l.5 to l.8 are one call to mdlm.MDLM. `bound`
measures Eq. 2 on held-out rows.

Every random draw in an update has a key that says what it is for (data.seed_of). The times have
(seed, "t", step), and the masks of micro-batch j have (seed, "q", step, j). Micro-batches are
numbered across all ranks. So one process with four of them gives the same run as two with two each,
up to rounding. A stopped or killed run resumes from its last save as if nothing had happened. The
log of a stopped run has one extra line, for the stop. (Update 1 of the log is step 0 in the keys.)
"""

import copy
from dataclasses import asdict, dataclass, replace

import torch

import data
import launch
import mdlm
from data import rng
from launch import Refused, Share, Size
from mdlm import ALPHA_FLOOR, MDLM, T_MIN, ModelConfig, corrupt, own_class, sample_times


@dataclass
class Config(ModelConfig):
    """mdlm.ModelConfig, and how to train: App. B.1"""
    NO_FLAGS = "vocab_size", "mask_id", "soft_mask"  # they follow from the data and from p_sm
    data: str = "data/owt"           # a folder made by data.py
    out_dir: str = "out/owt"         # last.pt, step-N.pt, log.jsonl
    init_from: str = ""              # a checkpoint to start from; with its --seed, masks repeat
    new_omega: bool = False          # with init_from: take ω from the settings, not the file
    resume: bool = False             # continue from out_dir/last.pt, or start if there is none
    seed: int = 1
    # optimisation
    steps: Size = 1_000_000          # updates (100k in a continuation)
    batch_size: Size = 512           # sequences per update, over all devices
    micro_batch: Size = 32           # sequences per device and pass; gradients are accumulated
    eta_bb: launch.NotNegative = 3e-4  # learning rate of the backbone θ
    eta_sm: launch.NotNegative = 1e-2  # learning rate of ω, which has a long way to go, App. B.2
    warmup: launch.Count = 2500      # updates of linear warm-up; then both rates are constant
    clip: launch.Positive = 1.0      # largest gradient norm, over θ and ω together [code]
    ema: Share = 0.9999              # decay of the average of θ; ω is not averaged [code]
    # soft-masking, §3.2
    p_sm: Share = 0.8                # probability of two passes; 0 trains a binary MDLM
    b_l: launch.Positive = T_MIN     # t ~ U(b_l, b_h); the paper narrows it for Dream only
    b_h: Share = 1.0
    # reporting, every so many updates and after the last
    log_every: Size = 10
    eval_every: launch.Count = 10_000  # 0: never
    eval_rows: Size = 512            # rows of val.bin, evenly spaced; lab/eval.py takes all of them
    save_every: Size = 1000          # last.pt
    keep_every: launch.Count = 100_000  # step-N.pt, with EMA and ω only; 0: only at the end
    # the machine
    device: str = "auto"             # cuda, else mps, else cpu
    dtype: launch.DType = "auto"     # bfloat16 where the GPU has it, else float32
    compile: bool | None = None      # trunk, loss and feedback (default: on CUDA)
    code: str = ""                   # a Python file to run first: its SoftMask replaces ours


PRESETS = {  # the first word of a command
    # Text that every machine has. A small model is so unsure of each byte that the paper's ω_b
    # keeps λ near 0, and ω_s would grow too slowly. So ω starts near its final values [ours].
    "small": dict(
        data="data/stdlib", out_dir="out/small",
        n_layer=4, n_head=4, n_embd=128, n_cond=64, length=128, dropout=0.0,
        omega_s=0.5, omega_a=1.0, omega_b=-2.8,
        steps=2000, batch_size=16, micro_batch=16, eta_bb=2e-3, warmup=100, ema=0.995,
        log_every=50, eval_every=500, eval_rows=256, save_every=500, keep_every=0),
    "owt": {},
    # mdlm.pt: the checkpoint that MDLM's authors released (lab/convert.py), App. B.1
    "continue": dict(steps=100_000, out_dir="out/continue", init_from="mdlm.pt"),
    "binary": dict(p_sm=0.0, out_dir="out/binary"),
}

# If one of these has changed, a run cannot be resumed. Other changes are only printed.
IDENTITY = ("n_layer n_head n_embd n_cond length time_conditioning soft_mask k two_updates seed "
            "batch_size init_from new_omega omega_s omega_a omega_b").split()


def train(cfg, sm_class=None):
    """Alg. 1, or the rest of it. Returns the MDLM and its EMA.

    sm_class: see mdlm.MDLM (default: that of cfg.code, or SoftMask).
    """
    # ---- the machine and the data
    machine = launch.machine(cfg.device, cfg.dtype)
    launch.join(machine)
    master = machine.rank == 0
    launch.first_rank(machine, lambda: data.prepare_preset(cfg.data))
    tokens, meta = data.open_split(cfg.data, "train")
    tokenizer = tokens.tokenizer
    cfg = replace(cfg, vocab_size=tokenizer["vocab_size"], mask_id=tokenizer["mask_id"],
                  soft_mask=cfg.p_sm > 0)
    M = cfg.batch_size // cfg.micro_batch     # micro-batches of an update, over all ranks
    n_tokens = cfg.batch_size * cfg.length    # masked or not
    if cfg.batch_size % (cfg.micro_batch * machine.world):
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of --micro_batch × ranks = "
                      f"{cfg.micro_batch * machine.world}")
    if cfg.new_omega and not cfg.init_from:
        raise Refused("--new_omega needs --init_from: without it, ω is new anyway")
    if cfg.b_l > cfg.b_h:
        raise Refused(f"--b_l={cfg.b_l} is above --b_h={cfg.b_h}")
    if cfg.code and not cfg.p_sm:
        raise Refused("--code does nothing with --p_sm=0: there is no soft mask")
    sm_class = sm_class or launch.soft_mask_class(cfg.code)
    held_out = held_out_rows(cfg) if cfg.eval_every else None                  # (m, L)

    # ---- the model: θ and ω, random, and the same on every rank
    torch.manual_seed(cfg.seed)
    with launch.input_errors():
        model = MDLM(cfg, sm_class=sm_class)
    classes = {"net": own_class(model.net), "SoftMask": own_class(model.sm)}
    # Hashes of the text as it was prepared: train.bin is too long to hash at every start.
    source = {"path": cfg.data, "sha256": meta["train"]["sha256"], "val": meta["val"]["sha256"]}
    identity = {name: getattr(cfg, name) for name in IDENTITY} | classes | {
        "tokenizer": tokenizer, "keys": data.KEYS,
        "train": source["sha256"][:12], "val": source["val"][:12]}
    about = dict(kind="mdlm", config=asdict(cfg), identity=identity, tokenizer=tokenizer,
                 data=source, **classes)

    with launch.lock(cfg.out_dir, master), launch.Stop() as stop:
        # ---- what to start from
        last = f"{cfg.out_dir}/last.pt"
        ckpt = None
        start = 0      # updates made
        metrics = {}   # of the last evaluation
        omega_from = ""
        if launch.resumes(cfg.out_dir, cfg.resume, "step-*.pt"):
            with launch.input_errors():
                ckpt = mdlm.read_checkpoint(last, "mdlm")
            if "optimizer" not in ckpt:  # a renamed step-N.pt, or a converted file
                raise Refused(f"{last} has only weights: start from them with --init_from")
            launch.check_run(last, ckpt, identity, asdict(cfg))
            model.load_state_dict(ckpt["model"])
            start = ckpt["step"]
            metrics = ckpt["metrics"]
        elif cfg.init_from:
            if load_initial(model, cfg, tokenizer):
                omega_from = f", ω from {cfg.init_from}"
        model.to(machine.device)
        # The EMA: a second backbone. ω is not averaged [code], so the EMA shares the model's. In a
        # continuation, it starts from the file's weights [ours]. Theirs starts from random ones.
        ema = copy.deepcopy(model).eval().requires_grad_(False)
        ema.sm = model.sm
        omega = model.sm.parameters() if model.sm else []
        optimizer = torch.optim.AdamW([{"params": model.net.parameters()},     # θ
                                       {"params": omega}],                     # ω       App. B.1
                                      betas=(0.9, 0.999), weight_decay=0.0,  # [code]
                                      fused=machine.device.type in ("cuda", "cpu"))
        if ckpt:
            ema.net.load_state_dict(ckpt["ema"])
            optimizer.load_state_dict(ckpt["optimizer"])
        compiled = machine.device.type == "cuda" if cfg.compile is None else cfg.compile
        if compiled:  # after the deepcopy: see compile_parts
            mdlm.compile_parts(model)
        parallel = launch.ddp(model, machine)
        if master:
            note = ", the first after a minute or more of compiling" if compiled else ""
            if start >= cfg.steps:
                note = ": all are made"
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters, "
                  f"{model.sm or 'no feedback'}{omega_from}; {machine.device} × {machine.world}, "
                  f"{machine.dtype or 'float32'}; "
                  f"{data.n_rows(tokens, cfg.length):,} rows of {cfg.length} from {cfg.data}; "
                  f"updates {start:,} to {cfg.steps:,}{note}")

        log = launch.Log(f"{cfg.out_dir}/log.jsonl", start, cfg.steps, master)
        made = start

        def save_last():  # uses `made` and `metrics` as they are when it is called
            if master:
                launch.save(last, **about, step=made, metrics=metrics, model=model.state_dict(),
                            ema=ema.net.state_dict(), optimizer=optimizer.state_dict())

        # A continuation measures the bound before its first update, as in Fig. 3a.
        if cfg.init_from and cfg.eval_every and not start:
            metrics = {"step": 0, **evaluate(ema, held_out, machine)}
            log.write(metrics)
        if not ckpt:  # A full disk fails here, not later. And every step-N.pt has a last.pt.
            save_last()

        # ---- Alg. 1
        stopped = stop()  # from here on, the first signal ends the run between two updates
        for step in range(start, cfg.steps):                                   #          l.1, l.10
            # One coin per update, the same on every rank [ours]. The authors draw one per
            # micro-batch.
            soft = torch.rand((), generator=rng(cfg.seed, "p_sm", step)).item() < cfg.p_sm  #  §3.2
            model.train()  # evaluate() puts the soft mask into eval mode: the EMA shares it
            times = sample_times(cfg.batch_size, rng(cfg.seed, "t", step), cfg.b_l, cfg.b_h)  # l.3
            for j in range(machine.rank, M, machine.world):
                x0 = batch(tokens, cfg, step, j, M)                            # (B, L)         l.2
                t = times[j::M]  # small and large ones, see `batch`             (B,)           l.3
                xt = corrupt(x0, t, cfg.mask_id, rng(cfg.seed, "q", step, j))  # (B, L)         l.4
                # Found on the CPU: on a GPU, nonzero() would be a host sync.
                masks = (xt == cfg.mask_id).nonzero(as_tuple=True)             # 2 × (N,)
                x0, xt, t, b, l = (launch.to_device(x, machine.device) for x in (x0, xt, t, *masks))
                if cfg.dropout:  # keyed by step and j, like the masks
                    torch.manual_seed(data.seed_of(cfg.seed, "dropout", step, j))
                # DDP: average gradients only in this rank's last micro-batch
                parallel.require_backward_grad_sync = j + machine.world >= M
                with machine.autocast():
                    loss = parallel(x0, xt, t, soft, (b, l))  # MDLM.forward     (B,)         l.5-8
                # Alg. 1 l.8 sums over a sequence. Here it is the mean over all tokens, masked or
                # not [code]. DDP averages gradients over ranks, and `world` undoes that.
                (loss.sum() * machine.world / n_tokens).backward()
                loss = loss.detach()
                # loss @ t: the cross-entropy without the weight 1/t. n: what the log divides the
                # loss by: tokens here, dialogues in finetune_dream.py.
                log.add(loss=loss.sum(), n=x0.numel(), ce=loss @ t, masks=len(b),
                        tokens=x0.numel(), soft=soft, lam=model.lam if soft else 0)
            if model.sm and not soft:
                # ω's gradient is 0 (TwoPass.token_nll), and Adam's momentum would still move ω.
                # Without a gradient, Adam skips it [ours].
                model.sm.zero_grad(set_to_none=True)
            norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), cfg.clip)
            for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):  # θ, ω
                group["lr"] = eta * lr_at(step, cfg)
            optimizer.step()                                                   #                l.9
            optimizer.zero_grad()
            made = step + 1
            log.bar.update()
            update_ema(ema.net, model.net, made, cfg.ema)

            # ---- report and save: the log's line, step-N.pt, last.pt
            stopped = made < cfg.steps and stop()
            evaluating = launch.is_due(made, cfg.eval_every, cfg.steps)
            keeping = launch.is_due(made, cfg.keep_every or cfg.steps, cfg.steps)
            saving = launch.is_due(made, cfg.save_every, cfg.steps) or stopped
            logging = launch.is_due(made, cfg.log_every, cfg.steps) or made == 1
            if logging or evaluating or keeping or saving:
                line = log.line(made, optimizer, model.sm, norm)  # refuses NaN
                if evaluating:
                    metrics = {"step": made, **evaluate(ema, held_out, machine)}
                    line |= metrics
                log.write(line)
            if keeping and master:
                launch.save(f"{cfg.out_dir}/step-{made}.pt", **about, step=made, metrics=metrics,
                            model=ema.state_dict())
            if saving:  # last of all: a kill before this costs repeated updates, but no data
                save_last()
            if stopped:
                break

    command = ["python", "sample.py", f"--checkpoint={last}", "--show"]
    launch.end_run(machine, log, command, cfg.code, made, stopped)
    return model, ema


def batch(tokens, cfg, step, j, M):
    """x0 (B, L): micro-batch j of M                                                     Alg. 1 l.2

    Every epoch goes through the rows in its own order. Rows and times are dealt to the M
    micro-batches like cards [ours]: micro-batch j gets numbers j, j + M, j + 2M, … of the update.
    Times ascend, so each micro-batch has small and large ones, and about half of its tokens are
    masked. In a contiguous slice of the times, nearly all could be masked.
    """
    n = data.n_rows(tokens, cfg.length)
    numbers = range(step * cfg.batch_size + j, (step + 1) * cfg.batch_size, M)
    index = [data.order(n, i // n, cfg.seed)[i % n] for i in numbers]  # epoch i // n, place i % n
    return data.rows(tokens, index, cfg.length)                                # (B, L)


def lr_at(step, cfg):
    """Factor on both learning rates after `step` updates: rising linearly from 0 [code] to 1."""
    return min(1.0, step / cfg.warmup) if cfg.warmup else 1.0


@torch.no_grad()
def update_ema(ema, model, step, decay):
    """ema ← d ema + (1 − d) model, in place, after `step` updates [code]"""
    # Without this warm-up, the average would keep the random start for 1 / (1 − decay) updates.
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - d)


def load_initial(model, cfg, tokenizer):
    """Load θ from --init_from, and ω if the file has one. Returns whether ω was loaded.

    θ is the raw weights [code], or their average if the file is a step-N.pt, without raw ones.
    """
    with launch.input_errors():
        ckpt = mdlm.read_checkpoint(cfg.init_from, "mdlm")
        mdlm.check_finite(ckpt["model"], cfg.init_from)
    # `net` and `SoftMask` are names of classes, in the file itself. The others are in its config.
    before = ckpt | ckpt["config"] | {"tokenizer": ckpt["tokenizer"]["name"]}
    now = asdict(cfg) | {"tokenizer": tokenizer["name"], "net": own_class(model.net),
                         "SoftMask": own_class(model.sm)}
    # Some of these can differ without a mismatch in shapes.
    names = "n_layer n_head n_embd n_cond time_conditioning mask_id tokenizer net".split()
    takes_omega = cfg.soft_mask and before["soft_mask"] and not cfg.new_omega
    if takes_omega:
        names += ["k", "SoftMask"]
    launch.check_same(cfg.init_from, before, now, names, ": give the preset and the flags that it "
                      f"was trained with, as in `train.py small --init_from={cfg.init_from}`")
    if takes_omega:
        model.load_state_dict(ckpt["model"])
    else:
        model.net.load_state_dict({name.removeprefix("net."): p for name, p in
                                   ckpt["model"].items() if name.startswith("net.")})
    return takes_omega


# ---- held-out text -------------------------------------------------------------------------------
def held_out_rows(cfg):
    """cfg.eval_rows rows of val.bin (m, L), evenly spaced"""
    val, _ = data.open_split(cfg.data, "val")
    index = data.evenly(data.n_rows(val, cfg.length), cfg.eval_rows)           # (m,)
    return data.rows(val, index, cfg.length)                                   # (m, L)


def evaluate(ema, held_out, machine):
    """{name: nats per token} of the EMA on held-out rows, with feedback and without."""
    bounds = {}
    for soft in [True, False] if ema.sm else [False]:
        with machine.autocast():
            # seed=1, as in lab/eval.py: all runs are measured with the same times and masks.
            nats, *_ = bound(ema, held_out, soft, 1, rank=machine.rank, world=machine.world)  # (m,)
        total = launch.over_ranks(nats.sum()).item()
        # All L positions count, even BOS, EOS and those that were never masked [code].
        bounds["val_soft" if soft else "val_plain"] = total / held_out.numel()
    return bounds


def corrupted_batches(rows, mask_id, seed=0, repeats=1, batch_size=8, rank=0, world=1,
                      floor=ALPHA_FLOOR):
    """Yields (index (b,), x0 (b, L), x_t (b, L), t (b,)): every row, at `repeats` draws of t.

    Arguments: see `bound`. Masks are keyed by row and repeat, not by batch or rank. Each row gets a
    time from each of `repeats` equal slices of [floor, 1]. A slice has n ascending times, and
    `deal` says which of them a row gets.
    """
    n = len(rows)
    times = sample_times(n * repeats, rng("times", seed), b_l=max(floor, 1e-6))  # t > 0
    deal = torch.randperm(n, generator=rng("deal", seed))
    times = times.view(repeats, n)[:, deal]                                          # (repeats, n)
    mine = torch.arange(n).split(batch_size)[rank::world]
    for index in launch.progress(mine, f"{n:,} held-out rows", leave=False):
        for r, t in enumerate(times[:, index]):                                      # (b,)
            xt = torch.cat([
                corrupt(x[None], s[None], mask_id, rng("masks", seed, r, int(i)), floor)
                for i, x, s in zip(index, rows[index], t)])                          # (b, L)
            yield index, rows[index], xt, t


@torch.no_grad()
def bound(model, rows, soft, seed=0, repeats=1, batch_size=8, rank=0, world=1, floor=ALPHA_FLOOR):
    """Eq. 2 of each row, at times and masks that depend on the seed only          Eq. 2, App. C.1

    rows: (n, L) ids, on the CPU.   soft: with feedback.   repeats: draws of t and x_t per row.
    rank, world: this process takes every world-th batch of rows. Rows of other ranks are 0 here, so
        that the results of all ranks add up.   floor: the smallest t and α.
    Returns (3, n) float64, summed in fp32, means over the repeats: the bound in nats, the
    cross-entropy in nats without the weight 1/t, and the number of masks. Perplexity is
    exp(Σ bound / (n L)).
    """
    device = model.net.table.device
    total = torch.zeros(3, len(rows), device=device)                                 # (3, n)
    was_training = model.training
    model.eval()
    for index, x0, xt, t in corrupted_batches(rows, model.cfg.mask_id, seed, repeats, batch_size,
                                              rank, world, floor):
        masked = xt == model.cfg.mask_id                                             # (b, L)
        inputs = index, x0, xt, t, masked.sum(1), *masked.nonzero(as_tuple=True)
        index, x0, xt, t, n_masks, *masks = (launch.to_device(x, device) for x in inputs)
        loss = model(x0, xt, t, soft, tuple(masks))                                  # (b,)
        total.index_add_(1, index, torch.stack((loss, loss * t, n_masks)))
    model.train(was_training)
    return total.cpu().double() / repeats  # the only host sync


if __name__ == "__main__":
    launch.run(train, Config, PRESETS, ranks=True)
