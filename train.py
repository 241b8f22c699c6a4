# SPDX-License-Identifier: MIT
"""Train a soft-masked MDLM: Alg. 1, from one CPU to many nodes.                            App. B.1

    python train.py stdlib          # the source code of Python itself: minutes on two CPU cores
    torchrun --nproc_per_node=8 train.py            # the paper's run: 169M, OpenWebText, 1M updates
    torchrun --nproc_per_node=8 train.py binary           # its baseline, p_sm = 0
    torchrun --nproc_per_node=8 train.py continue         # 100k more updates, from mdlm.ckpt
    python train.py owt --data=data/yours --out_dir=out/yours --n_layer=6    # flags: see Config

    update, batch      one update of θ and ω, l.2 to l.9; l.5 to l.8 are a call of mdlm.MDLM
    train, loop        the data, the model, and the loop around `update`, l.1 and l.10

Every random draw in an update has a key (data.rng), which says what it is for: (seed, "t", step)
for the times, (seed, "q", step, j) for the masks of micro-batch j. Micro-batches are numbered
across all ranks. So, up to rounding, one process with four of them gives the same run as two with
two each. And a stopped or killed run resumes from its last save as if nothing had happened, but
the log has a line more, where it was stopped. (Update 1 of the log is step 0 in the keys.)
"""

import copy
import os
from dataclasses import asdict, dataclass, replace

import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import data
import launch
from eval import val_nats
from launch import Refused, Share, Size
from mdlm import MDLM, T_MIN, ModelConfig, compile_parts, corrupt, sample_times


@dataclass
class Config(ModelConfig):
    """mdlm.ModelConfig (with the vocabulary of the data), and how to train: App. B.1"""
    data: str = "data/owt"           # a folder made by data.py
    out_dir: str = "out/owt"         # last.pt, step-N.pt, log.jsonl
    # Start from θ and ω of any MDLM that `python checkpoint.py FILE` can read (in a step-N.pt, θ is
    # the EMA). An ω that is set to another value than its default replaces the file's.
    init_from: str = ""
    resume: bool = False             # continue from out_dir/last.pt, or start if there is none
    seed: int = 1
    # optimisation
    steps: Size = 1_000_000          # updates (100k in a continuation)
    batch_size: Size = 512           # sequences per update, over all devices
    micro_batch: Size = 32           # sequences per device and pass; gradients are accumulated
    eta_bb: float = 3e-4             # learning rate of the backbone θ
    eta_sm: float = 1e-2             # learning rate of ω, which has a long way to go, App. B.2
    warmup: launch.Count = 2500      # updates of linear warm-up; then both rates are constant
    clip: launch.Positive = 1.0      # largest gradient norm, over θ and ω together [code]
    ema: Share = 0.9999              # decay of the average of θ; ω is not averaged [code]
    # soft-masking, §3.2
    p_sm: Share = 0.8                # probability of two passes; 0 trains a binary MDLM
    b_l: launch.Positive = T_MIN     # t ~ U(b_l, b_h); the paper narrows it for Dream only
    b_h: Share = 1.0
    # reporting: what is due every so many updates is also done after the last
    log_every: int = 10
    eval_every: int = 10_000         # 0: never
    eval_rows: Size = 512            # rows of val.bin, evenly spaced; eval.py takes all of them
    save_every: Size = 1000          # last.pt
    keep_every: int = 100_000        # step-N.pt, with EMA and ω only; 0: only at the end
    # the machine
    device: str = "auto"             # cuda, else mps, else cpu
    dtype: launch.DType = "auto"     # bfloat16 where the GPU has it, else float32
    compile: bool | None = None      # trunk, loss and feedback (default: on CUDA)


PRESETS = {  # the first word of a command
    # Text that every machine has. A small model is so unsure of each byte that the paper's ω_b
    # keeps λ near 0, and ω_s would grow too slowly. So ω starts near its final values [ours].
    "stdlib": dict(
        data="data/stdlib", out_dir="out/stdlib",
        n_layer=4, n_head=4, n_embd=128, n_cond=64, length=128, dropout=0.0,
        omega_s=0.5, omega_a=1.0, omega_b=-2.8,
        steps=2000, batch_size=16, micro_batch=16, eta_bb=2e-3, warmup=100, ema=0.995,
        log_every=50, eval_every=2000, eval_rows=256, save_every=500, keep_every=0),
    "owt": {},
    # mdlm.ckpt: the checkpoint that MDLM's authors released, App. B.1
    "continue": dict(steps=100_000, out_dir="out/continue", init_from="mdlm.ckpt"),
    "binary": dict(p_sm=0.0, out_dir="out/binary"),
}

# What may change when a run is resumed (of the data, only the path). All else must stay as it was.
MAY_DIFFER_ON_RESUME = {
    "data", "out_dir", "resume", "steps", "log_every", "eval_every", "eval_rows", "save_every",
    "keep_every", "device", "dtype", "compile"}


def update(step, cfg, tokens, model, parallel, optimizer, here, log):
    """One update of θ and ω. Returns the gradient norm, 0-d.                          Alg. 1 l.2-9

    parallel: the model, or DDP around it.   here: launch.machine().   log: launch.Log.
    """
    M = cfg.batch_size // cfg.micro_batch    # micro-batches, over all ranks
    n_tokens = cfg.batch_size * cfg.length   # masked or not
    # One coin per update, the same on every rank [ours]. The authors draw one per micro-batch.
    coin = torch.rand((), generator=data.rng(cfg.seed, "p_sm", step)).item()
    soft = coin < cfg.p_sm
    times = sample_times(cfg.batch_size, data.rng(cfg.seed, "t", step), cfg.b_l, cfg.b_h)  #     l.3
    for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):  # θ, ω      l.9
        group["lr"] = eta * lr_at(step, cfg)
    for j in range(here.rank, M, here.world):
        x0 = batch(tokens, cfg, step, j, M)                                    # (B, L)          l.2
        t = times[j::M]  # small and large ones, see `batch`                     (B,)
        xt = corrupt(x0, t, cfg.mask_id, data.rng(cfg.seed, "q", step, j))     # (B, L)          l.4
        # Found on the CPU, because on a GPU, counting the N masks would be a host sync.
        masks = (xt == cfg.mask_id).nonzero(as_tuple=True)                     # 2 × (N,)
        x0, xt, t, b, l = (launch.to_device(x, here.device) for x in (x0, xt, t, *masks))
        if cfg.dropout:  # keyed by step and j, like the masks
            torch.manual_seed(data.seed_of(cfg.seed, "dropout", step, j))
        parallel.require_backward_grad_sync = j + here.world >= M  # DDP: only in the last one
        with here.autocast():
            loss = parallel(x0, xt, t, soft, (b, l))  # MDLM.forward             (B,)          l.5-8
        # Alg. 1 l.8 sums over a sequence. Here it is the mean over all tokens, masked or not
        # [code]. DDP averages gradients over ranks, and `world` undoes that.
        (loss.sum() * here.world / n_tokens).backward()
        loss = loss.detach()
        # loss @ t: the cross-entropy without the weight 1/t. n: what the log divides the loss by,
        # tokens here, and dialogues in finetune_dream.py.
        log.add(loss=loss.sum(), n=x0.numel(), ce=loss @ t, masks=len(b),
                tokens=x0.numel(), soft=soft, lam=model.lam if soft else 0)
    if model.sm and not soft:
        # ω has a gradient of 0 (TwoPass.token_nll), and Adam's momentum would move it [ours].
        model.sm.zero_grad(set_to_none=True)
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), cfg.clip)
    optimizer.step()                                                           #                 l.9
    optimizer.zero_grad(set_to_none=True)
    return norm


def batch(tokens, cfg, step, j, M):
    """x0 (B, L): micro-batch j of M                                                     Alg. 1 l.2

    Every epoch has a permutation of its own, and no row occurs twice in it. Times are sorted, so
    micro-batch j takes every M-th time, and the sequences of these numbers [ours]: about half of
    its tokens are masked. If it took a slice of the times instead, nearly all could be masked.
    """
    n = data.n_rows(tokens, cfg.length)
    numbers = range(step * cfg.batch_size + j, (step + 1) * cfg.batch_size, M)
    index = [data.order(n, i // n, cfg.seed)[i % n] for i in numbers]
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


def train(cfg):
    """Check the settings, open the data, and run `loop`. Returns the MDLM and its EMA."""
    here = launch.machine(cfg.device, cfg.dtype)
    launch.join(here)
    launch.first_rank(here, lambda: data.prepare_preset(cfg.data))
    tokens, meta = data.open_split(cfg.data, "train")
    special = meta["tokenizer"]
    launch.check_batch_size(cfg, cfg.micro_batch * here.world)
    cfg = replace(cfg, vocab_size=special["vocab_size"], mask_id=special["mask_id"],
                  soft_mask=cfg.p_sm > 0)
    model = fresh(cfg)  # refuses sizes that cannot work before it touches a folder
    with launch.lock(cfg.out_dir, here.rank == 0):
        return loop(cfg, here, model, tokens, meta)


def loop(cfg, here, model, tokens, meta):
    """Alg. 1 from its start, or from a checkpoint: updates, evaluations, saves    Alg. 1 l.1, 10"""
    # train.bin is too long to hash at every start: if it is overwritten while meta.json stays the
    # same, this goes unnoticed. keys: the version of data.rng's keys.
    source = {"path": cfg.data, "n_tokens": len(tokens.ids), "sha256": meta["train"]["sha256"],
              "val": meta["val"]["sha256"], "keys": data.KEYS}
    held_out = held_out_rows(cfg) if cfg.eval_every else None      # (m, L)
    model, ema, optimizer, start, metrics, omega_from = starting(model, cfg, here, source, meta)
    compiled = here.device.type == "cuda" if cfg.compile is None else cfg.compile
    if compiled:  # after the EMA was copied: compiled methods of a copy use the original's weights
        compile_parts(model)
    parallel = model
    if here.world > 1:  # as views of DDP's buckets, gradients need no memory of their own
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True,
                                           broadcast_buffers=False)
    log = launch.Log(os.path.join(cfg.out_dir, "log.jsonl"), start, cfg.steps, here.rank == 0)
    if here.rank == 0:
        feedback = f"{model.sm}, ω from {omega_from}" if model.sm else "no feedback"
        wait = ", the first after a minute or more of compiling" if compiled else ""
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {feedback}; "
              f"{here.device} × {here.world}, {here.dtype or 'float32'}; "
              f"{data.n_rows(tokens, cfg.length):,} rows of {cfg.length} from {cfg.data}; "
              f"updates {start:,} to {cfg.steps:,}{wait}")
    # A continuation measures the bound before its first update (Fig. 3): a check of the weights
    if cfg.eval_every and cfg.init_from and not start:
        metrics = {"step": 0, **evaluate(ema, held_out, here)}
        log.write(metrics)
    model.train()
    line = {}
    for done, due in launch.updates(
            here, start, cfg.steps, log=cfg.log_every, eval=cfg.eval_every,
            keep=cfg.keep_every or cfg.steps, save=cfg.save_every):            #           l.1, l.10
        norm = update(done - 1, cfg, tokens, model, parallel, optimizer, here, log)
        update_ema(ema.net, model.net, done, cfg.ema)
        if due:
            line = log.line(done, lr_at(done - 1, cfg) * cfg.eta_bb, model.sm, norm)  # no NaN?
            if "eval" in due:
                metrics = {"step": done, **evaluate(ema, held_out, here)}
                line |= metrics
            log.write(line)
        facts = dict(step=done, metrics=metrics, data=source, tokenizer=meta["tokenizer"])
        if "keep" in due and here.rank == 0:
            save(f"step-{done}.pt", cfg, model, ema, **facts)
        # Last of all: a kill before this repeats updates, and loses nothing.
        if "save" in due and here.rank == 0:
            save("last.pt", cfg, model, ema, optimizer=optimizer.state_dict(), **facts)
    more = f"Now: sample.py --show, or eval.py ppl, with --checkpoint={cfg.out_dir}/last.pt"
    launch.leave(here, f"{launch.warning(line, cfg.vocab_size)}\n{more}".strip(), status=0)
    return model, ema


def fresh(cfg):
    """An MDLM with random weights, the same on every rank. Raises Refused for bad sizes or ω."""
    with torch.random.fork_rng(devices=[]):  # torch's own generator stays as it was
        torch.manual_seed(cfg.seed)
        try:
            return MDLM(cfg)
        except ValueError as e:
            raise Refused(e)


def starting(model, cfg, here, source, meta):
    """(model, EMA, optimizer, updates made, last evaluation, where ω comes from) to start from"""
    last, ckpt, done, metrics = os.path.join(cfg.out_dir, "last.pt"), None, 0, {}
    omega_from = "the settings"
    if launch.resumes(last, cfg.resume):
        content = {name: source[name] for name in ("sha256", "val", "keys")}  # the path may differ
        ckpt = checkpoint.load_last(last, "mdlm", cfg, model.sm, content, MAY_DIFFER_ON_RESUME,
                                    ". sha256 and val are hashes of the text in --data")
        model.load_state_dict(ckpt["model"])
        omega_from, done, metrics = last, ckpt["step"], ckpt["metrics"]
    elif cfg.init_from:
        omega_from = load_initial(model, cfg, meta["tokenizer"])
    model.to(here.device)
    # The EMA: a second backbone. ω is not averaged [code], so it is the model's. A continuation's
    # average starts from the file's weights [ours]; the authors' starts from random ones.
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    ema.sm = model.sm
    parts = [model.net, model.sm] if model.sm else [model.net]  # θ, and ω: two groups  App. B.1
    optimizer = torch.optim.AdamW([{"params": list(part.parameters())} for part in parts],
                                  betas=(0.9, 0.999), weight_decay=0.0,  # [code]
                                  fused=model.net.table.device.type in ("cuda", "cpu"))
    if ckpt:
        ema.load_state_dict(model.state_dict() | ckpt["ema"])  # ω is the model's
        optimizer.load_state_dict(ckpt["optimizer"])
    return model, ema, optimizer, done, metrics, omega_from


def held_out_rows(cfg):
    """cfg.eval_rows rows of val.bin (m, L), evenly spaced"""
    val, _ = data.open_split(cfg.data, "val")
    index = data.evenly(data.n_rows(val, cfg.length), cfg.eval_rows)           # (m,)
    return data.rows(val, index, cfg.length)                                   # (m, L)


def load_initial(model, cfg, vocabulary):
    """Load θ from a file, and ω if the file has it. Returns where ω comes from.

    θ gets the raw weights [code], or their average from a step-N.pt, which has only that.
    """
    ckpt = checkpoint.load(cfg.init_from, "mdlm")
    before = asdict(ModelConfig()) | ckpt["config"] | {"tokenizer": ckpt["tokenizer"]["name"]}
    now = asdict(cfg) | {"tokenizer": vocabulary["name"], "SoftMask": checkpoint.class_of(model.sm)}
    # Some of these can differ without a mismatch in shapes.
    names = ["n_layer", "n_head", "n_embd", "n_cond", "time_conditioning", "mask_id", "tokenizer"]
    if cfg.soft_mask and before["soft_mask"]:
        names += ["k", "SoftMask"]
    launch.check_same(cfg.init_from, before, now, names, ": give the preset and the flags that it "
                      f"was trained with, as in `train.py stdlib --init_from={cfg.init_from}`")
    # ω comes from the settings where they are not the defaults, else from the file if it has one.
    default = ModelConfig()
    given = [name for name in ("omega_s", "omega_a", "omega_b")
             if getattr(cfg, name) != getattr(default, name)]
    state = {name: p for name, p in model.state_dict().items() if name.startswith("sm.")}
    for name, p in ckpt["model"].items():
        if name.startswith("net.") or model.sm and name.replace("sm.raw", "omega") not in given:
            state[name] = p
    checkpoint.check_numbers(state, cfg.init_from)
    model.load_state_dict(state)
    if "sm.raw_s" not in ckpt["model"]:
        return "the settings"
    return ", ".join([cfg.init_from, *(f"--{name}" for name in given)])


def evaluate(ema, held_out, here):
    """{name: nats per token} of the EMA on held-out rows, with feedback and without."""
    bounds = {}
    for soft in [True, False] if ema.sm else [False]:
        with here.autocast():
            # seed=1, as in `eval.py ppl`: all runs are measured with the same times and masks.
            found = val_nats(ema, held_out, soft, seed=1, rank=here.rank, world=here.world)
        nats, count = launch.over_ranks(torch.tensor(found, dtype=torch.float64)).tolist()
        bounds["val_soft" if soft else "val_plain"] = nats / count
    return bounds


def save(name, cfg, model, ema, **facts):
    """Write last.pt, with the optimizer, or a step-N.pt, with the EMA in place of the weights."""
    weights = model.state_dict()                                      # of θ and ω
    average = {"net." + name: t for name, t in ema.net.state_dict().items()}  # of θ
    if "optimizer" in facts:  # last.pt
        facts["ema"] = average
    else:
        weights |= average
    config = asdict(cfg) | {"SoftMask": checkpoint.class_of(model.sm)}
    checkpoint.save(os.path.join(cfg.out_dir, name), kind="mdlm", config=config, seed=cfg.seed,
                    model=weights, **facts)


if __name__ == "__main__":
    launch.run(train, Config, PRESETS)
