# SPDX-License-Identifier: MIT
"""Text from masks: Alg. 2, the reverse process.                                         §2.1, §2.2

    Alg. 2        generate             each mask is revealed at random, whatever the others do
                  generate_in_order    about as many in every step, for example the surest first
           l.3    DiT.trunk, DiT.head (mdlm.py)
           l.4    nucleus, categorical    which token
           l.5    step_probs              how likely a mask is revealed, known before the call
                  masks_to_reveal         which masks are revealed, after the call
           l.6    SoftMask.forward (in generate, by TwoPass.predict_sm) and SoftMask.mix

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She ran. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.pt --count=5000 --out=samples.jsonl

The last command makes the samples behind "Standard, Binary, 1M, 1/1" in Tables 1 and 2, one by one.
If it is stopped, it makes the rest the next time. Each rank has its own file, samples.RANK.jsonl.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

import launch
from data import rng, tokenizer
from launch import Refused, Share, Size, append_jsonl, progress, read_jsonl, to_device
from mdlm import MDLM, compile_parts
from show import show
from softmask import SoftMask, neg_entropy

T_END = 1e-5  # the time at which the last step ends, not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
T_ON, T_OFF, ALPHA_ON = 0.55, 0.05, 0.9  # the plateau of remdm-loop, App. B.1
ORDERS = "entropy", "random"
NOT_IN_SETTINGS = "count", "seed", "out", "show", "device", "compile"
GRAPHS_PAY = 5000  # steps: CUDA graphs take a minute to build, and save 12 ms a call


def step_probs(t, s, sampler="mdlm", eta=None):
    """One reverse step t → s < t: P[reveal a mask], P[re-mask a token]              Eq. 1, App. B.1

    In the posterior of §2.1, a mask becomes x_0 with probability (α_s − α_t) / (1 − α_t), and a
    token never changes. Eq. 1 replaces x_0 with the network's prediction. So the schedule alone
    decides *whether* a token appears, and the network decides *which*. The samplers below differ
    only in these two probabilities.

    At time t, a share 1 − α_t = t of the positions is masked (without the floor used in training
    [code]). ReMDM also turns tokens back into masks, with probability σ, and then has to reveal
    more, because the share must still fall to s:

        t (1 − reveal) + (1 − t) σ = s,    so    reveal = (t − s + σ (1 − t)) / t

    mdlm         σ = 0: the posterior.
    remdm-cap    σ = η, or s / (1 − t) if that is smaller [code]: then every mask is revealed.
    remdm-loop   The share of masks is not t. While t > T_ON, it falls from 1 to 1 − ALPHA_ON, with
                 σ = 0. Until T_OFF, it is constant, with σ = η. Then it falls to 0 (σ = 0) [code].

    t, s: times in [0, 1].   eta: η (default: that of App. B.1).
    """
    eta = SAMPLERS[sampler] if eta is None else eta
    sigma, share_t, share_s = 0.0, t, s  # 1 − α: shares of masks before and after the step
    if sampler == "remdm-cap":
        sigma = min(eta, s / max(1 - t, 1e-9))
    elif sampler == "remdm-loop" and t > T_ON:
        speed = ALPHA_ON / (1 - T_ON)
        share_t, share_s = 1 - (1 - t) * speed, 1 - (1 - s) * speed
    elif sampler == "remdm-loop" and t > T_OFF:
        sigma, share_t, share_s = eta, 1 - ALPHA_ON, 1 - ALPHA_ON
    elif sampler == "remdm-loop":
        speed = (1 - ALPHA_ON) / T_OFF
        share_t, share_s = t * speed, s * speed
    reveal = (share_t - share_s + sigma * (1 - share_t)) / share_t
    # With remdm-loop, a long step across T_ON has share_s < 0, and reveals every mask. On the
    # plateau, reveal is 9 η. With η > 1/9, even revealing every mask leaves more than share_s.
    return min(1.0, reveal), sigma


@torch.no_grad()
def generate(model, steps, sampler="mdlm", top_p=0.9, generator=None, on_step=None, x=None,
             soft=True, every=False, eta=None):
    """Inference with soft-masking, for one sequence                                  Alg. 2, App. A

        x = (m, …, m)                                                                l.1
        for each of T steps:                                                         l.2, 7
            p  = g_θ(x)         a forward pass                                       l.3
            x~ = sample(p)      a token for every mask, from the nucleus of p        l.4
            x^ = unmask(x~)     a coin for every mask: this token, or still [MASK]?  l.5
            x  = sm_ω(x^, p)    each [MASK] becomes (1 − λ) m + λ Σ_i π_i v_i        l.6

    Training feeds back a plain pass over the same masks. Here, the pass that is fed back had other
    masks and (later) feedback. In the code, `x` holds the ids x^, and `emb` the embeddings x. The
    paper's l.6 has x^ and p of the step before. Here both are of this step, as in §3.1 [ours].
    Whether a position changes does not depend on the network. So the coins of l.5 are tossed before
    l.3, and l.4 draws only the tokens that appear. ReMDM tosses coins for tokens, too.

    Steps that change no token are skipped (App. C.4), although they would renew SM's feedback
    [code]. So SM makes as many calls as binary masking. The last step is not skipped if it starts
    with masks. With every=True (App. C.5) or time conditioning, none is skipped. Masks left at the
    end are filled by one more call, by argmax [code].

    steps: T.   sampler, eta: for `step_probs`.   top_p: for `nucleus`.   generator: on the CPU.
    on_step(x, lam, guess, masks, h): called after every call of the network. x (1, L): ids. With
        feedback, where x is [MASK], lam (1, L) is λ and guess (1, L) the likeliest token. masks:
        the index pair (b, l) of the masks that stay. h (m, D): the hidden states that predict them.
    x: (L,) ids on the CPU to start from (default: all [MASK]). Tokens in it never change.
    soft: False decodes without feedback.
    Returns ids (L,) on the CPU, and the number of network calls.
    """
    net, sm, mask_id, table = model.net, model.sm, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    every = every or model.cfg.time_conditioning  # a network that sees t predicts anew each time
    x = torch.full((model.cfg.length,), mask_id) if x is None else x           # (L,)            l.1
    free = masked = x == mask_id                                               # (L,)  on the CPU
    x = to_device(x, device)                                                   # (L,)
    emb = F.embedding(x, table)                                                # (L, D)
    lam, guess = torch.zeros(len(x), device=device), x.clone()  # guess: only for on_step
    dt, nfe = (1 - T_END) / steps, 0
    for i in progress(range(steps + 1), "steps", leave=False, disable=bool(on_step) or None):  # l.2
        t, filling = 1 - i * dt, i == steps  # filling: one more call, for masks that are left
        reveal, remask = (1, 0) if filling else step_probs(t, t - dt, sampler, eta)
        coin, u = torch.rand(2, len(x), dtype=torch.float64, generator=generator)  # 2 × (L,)
        appear, vanish = masked & (coin < reveal), free & ~masked & (coin < remask)  # (L,)      l.5
        stay = masked & ~appear                                                # (L,)
        last = i == steps - 1 and masked.any()
        if not ((appear | vanish).any() or last or every and not filling):
            continue
        masked, nfe, u = stay | vanish, nfe + 1, u[appear]                     # u: (m,)
        (appear,), (stay,), (vanish,) = (indices(each, device) for each in (appear, stay, vanish))
        h = net.trunk(emb[None], to_device(torch.tensor([t]), device))[0]      # (L, D)          l.3
        p = net.head(h[appear]).softmax(-1)                                    # (m, V)          l.3
        drawn = p.argmax(-1) if filling else categorical(nucleus(p, top_p), u)  # (m,)  of x~    l.4
        lost = x[vanish]                                                       # (r,)  with ReMDM
        x = x.index_put((appear,), drawn).index_fill(0, vanish, mask_id)       # (L,)         x^ l.5
        emb[appear], emb[vanish], guess[vanish] = F.embedding(drawn, table), table[mask_id], lost
        if soft and sm:
            lam[stay], ids, pi = model.predict_sm(h[stay])                     # (s,), (s, k)  l.3 6
            emb[stay] = sm.mix(table, lam[stay], ids, pi)                      # (s, D)          l.6
            guess[stay] = pi.argmax(-1) if ids is None else ids[:, 0]          # (s,)
            # A token that was just re-masked was visible at l.3. So its p is 1 [code], and H is 0.
            lam[vanish] = sm.strength(torch.zeros(len(lost), device=device))   # (r,)
            emb[vanish] = sm.mix(table, lam[vanish], lost[:, None], torch.ones_like(lost[:, None]))
        if on_step:
            on_step(x[None], lam[None], guess[None], (torch.zeros_like(stay), stay), h[stay])
    model.train(was_training)
    return x.cpu(), nfe


def indices(where, device):
    """Where a bool tensor on the CPU is True: an index for each dimension, without a host sync."""
    return tuple(to_device(part, device) for part in where.nonzero(as_tuple=True))


@torch.no_grad()
def generate_in_order(model, n, steps, order, top_p=0.9, generator=None, on_step=None, x=None,
                      soft=True, threshold=None):
    """Alg. 2 with about the same number of tokens in every step, in an order                   §2.2

    n: sequences, side by side.   steps: network calls, at most. With as many steps as masks, each
        reveals one token. With a threshold, give as many steps as masks, or some may be left.
    order: "entropy", the positions of lowest entropy first, or "random", the control. The entropy
        is that of the whole prediction, not of its nucleus, which is often a single token [ours].
    threshold: reveal every position whose likeliest token has at least this probability (before
        the nucleus). A sequence without such a position reveals as many as without a threshold
        [ours], so one if there are as many steps as masks.
    generator: a torch.Generator on the CPU, which seeds one for each sequence, or a list of n. A
        sample does not depend on the others.
    x: (L,) or (n, L) ids to start from.   Other arguments: see `generate`, with n in place of 1.
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each sequence needed.
    """
    net, sm, mask_id, table = model.net, model.sm, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    by_entropy = {"entropy": True, "random": False}[order]  # KeyError for any other word
    model.eval()
    x = torch.full((model.cfg.length,), mask_id) if x is None else x           # (L,)            l.1
    x = x.expand(n, -1)                                                        # (n, L)
    if not isinstance(generator, list):
        seeds = torch.randint(2**62, (n,), generator=generator).tolist()
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    masked_cpu = x == mask_id                                                  # (n, L)
    x = to_device(x, device)                                                   # (n, L)
    emb = F.embedding(x, table)                                                # (n, L, D)
    nfe = torch.zeros(n, dtype=torch.long)                                     # (n,)
    for steps_left in range(steps, 0, -1):                                     #              l.2, 7
        if not masked_cpu.any():
            break
        masked = to_device(masked_cpu, device)                                 # (n, L)
        masks = indices(masked_cpu, device)                                    # 2 × (N,)
        draws = [torch.rand(x.shape[1], 2, dtype=torch.float64, generator=g) for g in generator]
        u, chance = torch.stack(draws).unbind(-1)                              # 2 × (n, L)
        t = masked.float().mean(-1)  # the share of masks, as if α_t = 1 − t      (n,)  [ours]
        h = net.hidden(emb, masks, t)                                          # (N, D)          l.3
        logits = net.head(h)                                                   # (N, V)          l.3
        logp = logits.log_softmax(-1)                                          # (N, V)
        score = to_device(chance.float(), device)                              # (n, L)
        if by_entropy:
            # From masks alone, a DiT predicts the same everywhere: attention averages equal values.
            # Rounding would break these ties, differently in every batch. So the order stays random
            # there [ours].
            only_masks = masked.all(-1, keepdim=True)                          # (n, 1)
            score = torch.where(only_masks, score, score.index_put(masks, neg_entropy(logp)))
        chosen = masks_to_reveal(score, masked, steps_left)                    # (n, L)          l.5
        if threshold is not None:
            sure = logp.amax(-1).exp() >= threshold                            # (N,)
            sure = torch.zeros_like(masked).index_put(masks, sure)             # (n, L)
            chosen = torch.where(sure.any(-1, keepdim=True), sure, chosen)     # (n, L)
        chosen = chosen.cpu()  # a host sync                                     (n, L)
        nfe += masked_cpu.any(-1)
        (new,) = indices(chosen[masked_cpu], device)  # which rows of h appear   (m,)
        (left,) = indices(~chosen[masked_cpu], device)  # and which stay         (s,)
        drawn = categorical(nucleus(logp[new].exp(), top_p), u[chosen])        # (m,)            l.4
        x = x.index_put(indices(chosen, device), drawn)                        # (n, L)          l.5
        emb = F.embedding(x, table)                                            # (n, L, D)
        masked_cpu = masked_cpu & ~chosen                                      # (n, L)
        stay = indices(masked_cpu, device)                                     # 2 × (s,)
        lam, guess = torch.zeros_like(score), x.clone()  # guess: only for on_step
        if soft and sm:
            lam_all, ids, pi = sm(logits)                                      # (N,), (N, k)    l.6
            lam[stay], pi = lam_all[left], pi[left]                            # (s,), (s, k)
            ids = ids if ids is None else ids[left]                            # (s, k)
            emb[stay] = sm.mix(table, lam[stay], ids, pi)                      # (s, D)          l.6
            guess[stay] = pi.argmax(-1) if ids is None else ids[:, 0]          # (s,)
        if on_step:
            on_step(x, lam, guess, stay, h[left])
    model.train(was_training)
    return x.cpu(), nfe


def masks_to_reveal(score, masked, steps_left):
    """Which masks to reveal: in each row, 1 / steps_left of them, those of the largest scores

    The number is rounded up. Ties are broken from left to right [ours].
    """
    score = score.masked_fill(~masked, -torch.inf)
    ranking = score.argsort(dim=-1, descending=True, stable=True)              # (n, L)  positions
    count = (masked.sum(-1, keepdim=True) + steps_left - 1) // steps_left      # (n, 1)
    among = torch.arange(masked.shape[1], device=masked.device) < count        # (n, L)  by rank
    return torch.zeros_like(masked).scatter(1, ranking, among)                 # (n, L)


def nucleus(probs, p):
    """Keep the likeliest tokens while their sum is at most p, and renormalise              App. B.1

    probs: (n, V).   Returns (n, V).
    The likeliest token is always kept. The token that crosses p is dropped [code]. The usual rule
    keeps it, and so does Dream (sample_dream.filtered).
    """
    if p == 1:
        return probs
    top, ids = likeliest(probs, p)                                             # 2 × (n, m)
    dropped = top.cumsum(-1) > p                                               # (n, m)
    dropped[:, 0] = False
    top = top.masked_fill(dropped, 0)                                          # (n, m)
    return torch.zeros_like(probs).scatter(1, ids, top / top.sum(-1, keepdim=True))  # (n, V)


def likeliest(probs, p):
    """The m largest of each row of probs (n, V), descending: values and ids (n, m).

    m is V, or large enough for the m values of every row to add up to more than p. Sorting all of V
    costs too much, so m grows until they do.
    """
    V = probs.shape[1]
    sizes = (min(1024, V), min(8192, V), V)
    if probs.is_cuda and probs.numel() < 1e6:
        sizes = (V,)  # a small sort costs less than waiting; 1e6 is a guess, not measured
    for m in sizes:
        top, ids = probs.topk(m)                                               # 2 × (n, m)
        if m == V or (top.cumsum(-1)[:, -1] > p).all():  # .all() syncs. Callers repeat the cumsum
            return top, ids


def categorical(probs, u):
    """Draw one token per row, (n,): the first whose cumulative sum exceeds u Σ p

    probs: (n, V), with any positive sum per row.   u: (n,) float64, uniform in [0, 1).
    One number per row [ours] gives the same distribution as V exponentials [code]. With an fp32 u,
    only a few of the tokens rarer than 6e-8 could be drawn, and those too often. torch.multinomial
    would cost two host syncs.
    """
    device = "cpu" if probs.device.type == "mps" else probs.device  # MPS has no float64
    cdf = probs.to(device, torch.float64).cumsum(-1)                           # (n, V)
    if u.device != cdf.device:
        u = to_device(u, cdf.device)
    drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # never one with p = 0
    return drawn[:, 0].to(probs.device)                                        # (n,)


@dataclass
class Config:
    checkpoint: str = "out/stdlib/last.pt"  # made by train.py, or by lab/convert.py
    count: Size = 1             # samples to make (not --n: torchrun refuses it)
    length: Size | None = None  # L (default: the model's)
    steps: Size | None = None   # T (default: L; with entropy and random, one per mask)
    # mdlm, remdm-cap (in the paper for T < L) and remdm-loop reveal at random, App. B.1. The others
    # reveal about the same number per step: the surest first (§2.2), or in random order.
    sampler: Literal[tuple(SAMPLERS) + ORDERS] = "mdlm"
    eta: Share | None = None    # largest P[re-mask] of a remdm sampler (default: as in App. B.1)
    # For entropy and random: reveal every position whose likeliest token has at least this
    # probability, or, if there is none, the first in the order.
    threshold: Share | None = None
    top_p: Share = 0.9          # nucleus
    soft: bool = True           # False: decode an SM model without feedback
    # All three replace the model's soft mask. So a binary model decodes with feedback too (k = 3).
    omega_s: float | None = None
    omega_a: float | None = None
    omega_b: float | None = None
    # In prompt and infill, the two characters \n stand for a line break.
    prompt: str = ""            # text to continue; a ___ in it is filled as in infill
    infill: str = ""            # text after the prompt: its blanks ___ share all free positions
    seed: int = 1
    out: str = ""               # file to append to; its samples are not made again (default: print)
    show: bool = False          # watch the samples appear
    code: str = ""              # a Python file to run first: its SoftMask replaces ours
    device: str = "auto"        # cuda, else mps, else cpu
    compile: bool | None = None  # CUDA graphs (default: where they pay off)


def starting_ids(cfg, tok, special):
    """Ids (L,) to start from: a row as in training (data.rows), with masks for missing text."""
    encode, L = tok.encode_ordinary, cfg.length
    bos, eos, mask = special["bos"], special["eos"], special["mask_id"]
    text = (cfg.prompt + cfg.infill).replace("\\n", "\n")
    first, *parts = [encode(part) for part in re.split("_{3,}", text)]
    ids = [bos, *first] if text else []
    if parts:
        room = L - len(ids) - sum(map(len, parts)) - 1  # masks to distribute
        for i, part in enumerate(parts):
            width = math.ceil(room / (len(parts) - i))  # an even share
            room -= width
            ids += width * [mask] + part
        ids.append(eos)
    else:
        ids += (L - len(ids)) * [mask]
    if len(ids) != L or mask not in ids:
        raise Refused(f"the text fills all {L} positions and leaves no masks: shorten it")
    return torch.tensor(ids)


def with_omega(sm, mask_id, cfg):
    """sm, or a SoftMask of cfg's ω_s, ω_a and ω_b if they are given, with k as in sm, or 3"""
    omega = cfg.omega_s, cfg.omega_a, cfg.omega_b
    if omega == (None, None, None):
        return sm
    if None in omega:
        raise Refused("--omega_s, --omega_a and --omega_b replace the learned ω: give all three")
    with launch.one_line():
        return SoftMask(mask_id, sm.k if sm else 3, *omega)


def prepared(cfg, here):
    """The MDLM with ω from cfg, on the CPU; its tokenizer; ids to start from (L,); cfg in full."""
    with launch.one_line():
        model = MDLM.load(cfg.checkpoint, sm=launch.soft_mask(cfg.code))
    model.sm = with_omega(model.sm, model.mask_id, cfg)
    tok, in_order = tokenizer(model.info["tokenizer"]["name"]), cfg.sampler in ORDERS
    cfg = replace(cfg, length=cfg.length or model.cfg.length, soft=cfg.soft and bool(model.sm))
    if model.mask_id != tok.n_vocab:  # [MASK] follows the last token
        raise Refused(f"{cfg.checkpoint} has {model.mask_id} tokens, but {tok.name} {tok.n_vocab}")
    if cfg.length > model.cfg.length:
        raise Refused(f"--length={cfg.length} exceeds the {model.cfg.length} of training")
    if cfg.eta is not None and not cfg.sampler.startswith("remdm"):
        raise Refused(f"--eta does nothing with --sampler={cfg.sampler}: choose a remdm sampler")
    if cfg.threshold is not None and (cfg.steps or not in_order):
        raise Refused("--threshold needs --sampler=entropy or random, and no --steps")
    x = starting_ids(cfg, tok, model.info["tokenizer"])                        # (L,)
    steps = cfg.steps or (x.tolist().count(model.mask_id) if in_order else cfg.length)
    pays = here.device.type == "cuda" and steps * cfg.count / here.world >= GRAPHS_PAY
    return model, tok, x, replace(cfg, steps=steps,
                                  compile=pays if cfg.compile is None else cfg.compile)


def file_and_lines(cfg, here):
    """This rank's file, and all ranks' lines, so that all ranks make the same decisions."""
    if here.world > 1 and not cfg.out:
        raise Refused("torchrun needs --out=FILE, such as --out=samples.jsonl")
    paths = [cfg.out]
    if here.world > 1:
        paths = [f"{cfg.out.removesuffix('.jsonl')}.{r}.jsonl" for r in range(here.world)]
    return paths[here.rank], [line for path in paths for line in read_jsonl(path)]


def main(cfg):
    here = launch.machine(cfg.device)
    path, lines = file_and_lines(cfg, here)

    # ---- the model, and the samples that exist already
    model, tok, x, cfg = prepared(cfg, here)
    # All that a sample depends on, besides its seed and index. Every line of --out holds it. (The
    # weights are summed up on the CPU, because MPS has no float64.)
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_SETTINGS}
    settings |= {"step": model.info["step"], "tokenizer": tok.name,
                 "dtype": str(here.dtype or torch.float32),
                 "weights": sum(p.double().sum().item() for p in model.parameters())}
    for line in lines:
        before = line.get("settings", {}) | {"seed": line.get("seed")}
        launch.check_same(path, before, settings | {"seed": cfg.seed}, [*settings, "seed"],
                          ": give the same flags, or another --out")
    texts = {line["index"]: line["text"] for line in lines}

    # ---- the device
    model.to(here.device)
    if here.dtype:
        model.net.cast_linears_(here.dtype)
    if cfg.compile:
        compile_parts(model, "reduce-overhead")

    # ---- the samples
    todo = [i for i in range(here.rank, cfg.count, here.world) if i not in texts]
    title = "samples, the first after a minute of compiling" if cfg.compile else "samples"
    bar = progress(total=len(todo), desc=title, disable=cfg.show or not todo)
    how = {"top_p": cfg.top_p, "x": x, "soft": cfg.soft,
           "on_step": show(tok, model.mask_id) if here.rank == 0 and cfg.show else None}
    for i in todo:
        generator = rng("sample", cfg.seed, i)
        with here.autocast():
            if cfg.sampler in ORDERS:
                ids, nfe = generate_in_order(model, 1, cfg.steps, cfg.sampler, **how,
                                             generator=[generator], threshold=cfg.threshold)
            else:
                ids, nfe = generate(model, cfg.steps, cfg.sampler, **how, generator=generator,
                                    eta=cfg.eta)
        ids = ids.flatten().tolist()
        texts[i] = tok.decode(ids)
        if path:
            append_jsonl(path, {"ids": ids, "text": texts[i], "nfe": int(nfe), "seed": cfg.seed,
                                "index": i, "settings": settings})
        else:
            bar.write("\n---\n" * (len(texts) > 1) + texts[i])
        bar.update()
    bar.close()
    if path and here.rank == 0:
        print(f"{texts[0]}\nsamples are in {path}")


if __name__ == "__main__":
    launch.run(main, Config)
