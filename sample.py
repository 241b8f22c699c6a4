# SPDX-License-Identifier: MIT
"""Text from masks: Alg. 2, the reverse process.                                         §2.1, §2.2

    generate    Alg. 2, each mask revealed at random (MDLM, ReMDM)
    decode      Alg. 2, the surest masks first (§2.2)

    Alg. 2      in generate             in decode
    l.3         hidden, head            hidden, head       the forward pass (mdlm.py)
    l.4         nucleus, categorical    propose            which token
    l.5         step_probs              propose, reveal    which masks become tokens
    l.6         feed_back               feed_back          what the next pass reads (softmask.py)

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --prompt="She ran. ___ Nobody spoke." --length=64
    python lab/convert.py mdlm.ckpt mdlm.pt     # MDLM's released checkpoint
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.pt --count=5000 --compile \
        --out=samples.jsonl

The last command makes the samples of the row "Standard, Binary, 1M, 1/1" of Tables 1 and 2, one at
a time. Each rank has its own file, samples.rankN.jsonl. If the command is stopped, run it again to
make the rest, even with another number of ranks.
"""

import glob
import hashlib
import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

import launch
from data import rng, text_of, tokenizer
from launch import NotNegative, Refused, Share, Size, append_jsonl, progress, read_jsonl, to_device
from mdlm import MDLM, compile_parts
from softmask import SoftMask, feed_back

T_END = 1e-5  # the time at which the last step ends, not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
T_ON = 0.55     # remdm-loop: the time at which α stops rising, App. B.1
T_OFF = 0.05    # and at which it rises again
ALPHA_ON = 0.9  # α in between: the share of visible tokens
ORDERS = "entropy", "maskgit_plus", "topk_margin", "random"


# ---- each mask at random -------------------------------------------------------------------------
def step_probs(t, s, sampler):
    """One reverse step t → s < t: P[reveal a mask], P[re-mask a token]              Eq. 1, App. B.1

    In the posterior of §2.1, a mask becomes x_0 with probability (α_s − α_t) / (1 − α_t), and a
    token never changes. Eq. 1 replaces x_0 with the network's prediction. So the schedule alone
    decides *whether* a token appears, and the network decides *which*. The samplers below differ
    only in P[reveal] and P[re-mask].

    At time t, a share 1 − α_t = t of the positions is masked (without the floor used in training
    [code]). ReMDM also turns tokens back into masks, with probability σ, and then has to reveal
    more, because the share must still fall to s:

        t (1 − reveal) + (1 − t) σ = s,    so    reveal = (t − s + σ (1 − t)) / t

    mdlm         σ = 0: the posterior.
    remdm-cap    σ = η, or s / (1 − t) if that is smaller [code]: then every mask is revealed.
    remdm-loop   The share of masks is not t. While t > T_ON, it falls from 1 to 1 − ALPHA_ON, with
                 σ = 0. Until T_OFF, it is constant, with σ = η. Then it falls to 0 (σ = 0) [code].

    t, s: times in [0, 1].
    """
    eta = SAMPLERS[sampler]
    sigma = 0.0
    share_t = t  # the share of masks, 1 − α, before the step
    share_s = s  # and after the step
    if sampler == "remdm-cap":
        sigma = min(eta, s / max(1 - t, 1e-9))
    elif sampler == "remdm-loop" and t > T_ON:
        share_t = 1 - (1 - t) * ALPHA_ON / (1 - T_ON)
        share_s = 1 - (1 - s) * ALPHA_ON / (1 - T_ON)
    elif sampler == "remdm-loop" and t > T_OFF:
        sigma = eta
        share_t = share_s = 1 - ALPHA_ON
    elif sampler == "remdm-loop":
        share_t = t * (1 - ALPHA_ON) / T_OFF
        share_s = s * (1 - ALPHA_ON) / T_OFF
    reveal = (share_t - share_s + sigma * (1 - share_t)) / share_t
    # With remdm-loop, a long step across T_ON has share_s < 0, and reveals every mask. On the
    # plateau, reveal is 9 η. With η > 1/9, even revealing every mask leaves more than share_s.
    return min(1.0, reveal), sigma


@torch.no_grad()
def generate(model, x, steps, sampler="mdlm", top_p=0.9, generator=None, every_step=False,
             on_step=lambda *_: None):
    """Inference with soft-masking, for one sequence                                  Alg. 2, App. A

        x = (m, …, m)                                                                l.1
        for each of T steps:                                                         l.2, 7-8
            p  = g_θ(x)         a forward pass                                       l.3
            x~ = sample(p)      a token for every mask, from the nucleus of p        l.4
            x^ = unmask(x~)     a coin for every mask: this token, or still [MASK]?  l.5
            x  = sm_ω(x^, p)    each [MASK] becomes (1 − λ) m + λ Σ_i π_i v_i        l.6

    In the code, `x` holds the ids x^, and `emb` the embeddings x. The paper's l.6 has the indices t
    of the step before, a misprint: §3.1 and the authors' code take x^ and p of this step.

    The coins of l.5 do not depend on the network. So they are tossed before l.3, and l.4 draws only
    the tokens that appear. ReMDM tosses coins for tokens, too.

    A step that changes no position makes no pass (App. C.4), although a pass would renew the
    feedback [code]. So with the same coins, SM makes as many passes as binary masking. If the last
    step leaves masks, one more pass fills them by argmax [code]. That pass needs new feedback, so
    the last step always makes a pass if there are masks.

    In training, the feedback comes from a plain pass over the same masks. Here, it comes from the
    previous pass, usually over more masks. Unless that was the first, it had feedback itself.

    model: TwoPass or MDLM. This puts it in eval mode. If its sm is None, there is no feedback.
    x: (L,) ids on the CPU. Its masks are filled, and its tokens never change.
    steps: T.   sampler: for `step_probs`.   top_p: for `nucleus`.   generator: on the CPU.
    every_step: make a pass even if nothing changes (App. C.5), as the authors do with time
        conditioning [code].
    on_step: see `decode`, with n = 1.
    Returns ids (L,) on the CPU.
    """
    model.eval()
    net = model.net
    sm = model.sm
    device = net.table.device
    masked = x == model.mask_id                                                # (L,)  on the CPU
    free = masked  # where ReMDM may turn a token into [MASK] again
    x = to_device(x, device)                                                   # (L,)
    emb = F.embedding(x, net.table)                                            # (L, D)          l.1
    dt = (1 - T_END) / steps
    for i in range(steps + 1):                                                 #          l.2, l.7-8
        t = 1 - i * dt
        extra = i == steps  # one more pass, for masks that are left
        p_reveal, p_remask = (1, 0) if extra else step_probs(t, t - dt, sampler)  #              l.5
        coin, u = torch.rand(2, len(x), dtype=torch.float64, generator=generator)  # 2 × (L,)
        appear = masked & (coin < p_reveal)                                    # (L,)            l.5
        vanish = free & ~masked & (coin < p_remask)                            # (L,)            l.5
        stay = masked & ~appear                                                # (L,)
        renew = i == steps - 1 and masked.any()  # feedback for the extra pass
        if not ((appear | vanish).any() or renew or (every_step and not extra)):
            continue
        masked = stay | vanish                                                 # (L,)
        revealed, staying, remasked = (indices(where, device)[0]
                                       for where in (appear, stay, vanish))    # (m,), (s,), (r,)
        l = torch.cat((revealed, staying))                                     # (N,)
        masks = torch.zeros_like(l), l                                         # 2 × (N,)
        h = net.hidden(emb[None], masks, torch.full((1,), t, device=device))   # (N, D)          l.3
        p = net.head(h[:len(revealed)]).softmax(-1)                            # (m, V)          l.3
        x0 = p.argmax(-1) if extra else categorical(nucleus(p, top_p), u[appear])  # (m,)        l.4
        lost = x[remasked]                                                     # (r,)
        x = x.index_put((revealed,), x0).index_fill(0, remasked, model.mask_id)  # (L,)  x^      l.5
        emb = F.embedding(x, net.table)                                        # (L, D)          l.6
        predicted = model.predict_sm(h[len(revealed):]) if sm else None  # (s,), 2 × (s, k)      l.6
        emb, lam = feed_back(sm, net.table, emb, x, (staying,), predicted)     # (L, D), (L,)    l.6
        if sm and len(remasked):
            # A token that was just re-masked was visible at l.3. So its p is one-hot [code].
            lam_1 = sm.strength(torch.zeros(len(remasked), device=device))     # (r,)
            certain = lam_1, lost[:, None], torch.ones_like(lost[:, None])     # (r,), 2 × (r, 1)
            emb, lam_r = feed_back(sm, net.table, emb, x, (remasked,), certain)  # (L, D), (L,)  l.6
            lam = lam + lam_r                                                  # (L,)
        on_step(x[None], lam[None], masks, h, x[l] != model.mask_id)
    return x.cpu()


# ---- surest first --------------------------------------------------------------------------------
class Pick(NamedTuple):
    """How a step of `decode` picks tokens                                 Alg. 2 l.4-5, App. B.2"""
    # Which masks are revealed first (the first three are Dream's; all are [ours] for an MDLM):
    #   entropy        the lowest H
    #   maskgit_plus   the highest p of the proposed token
    #   topk_margin    the largest p(likeliest) − p(second)
    #   random         a control
    #   a function     of p (N, V), after temperature and nucleus: the highest of its values (N,)
    confidence: Literal[ORDERS] | Callable = "entropy"
    temperature: float = 0.0        # 0: the likeliest token
    top_p: float = 1.0              # 1: no nucleus
    # See `reveal`. With a threshold, every word above acts as maskgit_plus.
    threshold: float | None = None
    generator: torch.Generator | None = None  # on the CPU (default: torch's own)


@torch.no_grad()
def decode(model, x, shares, pick, gain=lambda left: 1.0, on_step=lambda *_: None):
    """Fill the masks of x. Each step reveals a share of them, surest first             Alg. 2, §2.2

    model: TwoPass or MDLM. This puts it in eval mode. If its sm is None, there is no feedback.
    x: (n, L) ids on the CPU. Without a threshold, all rows must have the same number of masks at
        every step: else ValueError. (If the model can predict [MASK], decode one row at a time.)
    shares: for each step, the share of a row's remaining masks to reveal, rounded down to whole
        masks. See `shares_of`. With a threshold: 1 for each pass that may be needed.
    pick: Pick. All rows draw from its generator.
    gain: a factor on λ, App. C.9, as a function of the share of the initial masks that is still
        left, over all rows.
    on_step(x, lam, masks, h, revealed): called after every pass. x (n, L): ids. lam (n, L): λ times
        gain where a mask gets feedback from this pass, else 0. masks: the index pair (b, l), each
        (N,), of the masks that this pass predicts. h (N, D): the hidden states that predict them.
        revealed (N,): which of them are tokens now.
    Returns ids (n, L) on the CPU.
    """
    model.eval()
    net = model.net
    sm = model.sm
    masked = x == model.mask_id                                         # (n, L)  on the CPU
    n_masks = masked.sum().item()
    x = to_device(x, net.table.device)                                  # (n, L)
    emb = F.embedding(x, net.table)                                     # (n, L, D)             l.1
    for share in shares:                                                #                l.2, l.7-8
        if not masked.any():
            break
        if pick.threshold is None and len(masked.sum(-1).unique()) > 1:
            raise ValueError("all rows of x must have equally many masks")
        masks = indices(masked, x.device)                               # 2 × (N,)
        # For time conditioning: the share of masks, as if α_t = 1 − t [ours]
        t = (x == model.mask_id).float().mean(-1)                       # (n,)
        h = net.hidden(emb, masks, t)                                   # (N, D)                l.3
        logits = net.head(h)                                            # (N, V)                l.3
        x0, conf = propose(logits, model.mask_id, share == 1, pick)     # 2 × (N,)            l.4-5
        x = reveal(x, masks, x0, conf, share, pick.threshold)           # (n, L)                l.5
        masked = masks_left(x, conf, model.mask_id)                     # (n, L)  on the CPU
        left = masked.sum().item() / n_masks
        predicted = sm(logits) if sm else None                          # (N,), 2 × (N, k)      l.6
        emb, lam = feed_back(sm, net.table, emb, x, masks, predicted, gain(left))  #            l.6
        on_step(x, lam, masks, h, x[masks] != model.mask_id)
    return x.cpu()


def shares_of(counts):
    """Shares for `decode`: [2, 2, 1] is 2/5 of the masks, 2/3 of those left, and all of the rest.

    Only ratios matter: T equal counts share any number of masks evenly, L/T in each step (§2.2).
    They are fractions, because in floats 49 · (1 / 49) is below 1.
    """
    return [Fraction(n, sum(counts[i:]) or 1) for i, n in enumerate(counts)]


def indices(where, device):
    """Where a bool tensor on the CPU is True: an index for each dimension, without a host sync."""
    return tuple(to_device(part, device) for part in where.nonzero(as_tuple=True))


def propose(logits, mask_id, forced, pick):
    """A token for each mask, and how sure the model is of it                          Alg. 2 l.4-5

    logits: (N, V). Temperature comes first, then the nucleus [code]. Both change x0 and conf, but
        not the feedback [code]. The nucleus is Dream's, also for an MDLM [ours].
    forced: this step may reveal all of these masks. Dream can propose [MASK] itself. Then the
        likeliest other token is taken [ours]. The authors' code leaves [MASK] in the answer.
    Returns x0 (N,) and conf (N,). The token with the highest conf is revealed first.
    """
    if not callable(pick.confidence) and pick.confidence not in ORDERS:
        raise ValueError(f"unknown confidence {pick.confidence!r}")
    scaled = logits / pick.temperature if pick.temperature > 0 else logits  # (N, V)
    p = nucleus(scaled.softmax(-1), pick.top_p, keep_crossing=True)     # (N, V)
    x0 = p.argmax(-1)                                                   # (N,)
    if pick.temperature > 0:
        u = torch.rand(len(p), dtype=torch.float64, generator=pick.generator)  # (N,)
        x0 = categorical(p, u).clamp_max(p.shape[1] - 1)                # (N,)  it is V if p is NaN
    if forced:  # before conf, because a threshold must test the token that is written
        first, second = logits.topk(2).indices.unbind(-1)               # 2 × (N,)
        best = torch.where(first == mask_id, second, first)             # (N,)
        x0 = torch.where(x0 == mask_id, best, x0)                       # (N,)
    if callable(pick.confidence):
        conf = pick.confidence(p).float().clamp_min(-1e30)              # (N,)  above `reveal`'s −∞
    elif pick.confidence == "maskgit_plus" or pick.threshold is not None:
        conf = p.gather(-1, x0[:, None])[:, 0]                          # (N,)
    elif pick.confidence == "entropy":
        # −H of what the nucleus leaves [code], guarded against log 0. At App. B.2's settings, the
        # nucleus is often a single token. Then H is 0, and such positions tie.
        conf = (p * (p + 1e-10).log()).sum(-1)                          # (N,)
    elif pick.confidence == "topk_margin":
        best, second = p.topk(2).values.unbind(-1)                      # 2 × (N,)
        conf = best - second                                            # (N,)
    else:
        u = to_device(torch.rand(len(p), generator=pick.generator), p.device)  # (N,)
        conf = u + 0 * p[:, 0]  # NaN if p is                             (N,)
    return x0, conf


def reveal(x, masks, x0, conf, share, threshold):
    """x (n, L) with the surest proposals written into it                          Alg. 2 l.5, §2.2

    masks: (b, l), each (N,): what may be revealed.   x0, conf: (N,), from `propose`.
    share: of the N / n masks in each row, rounded down.   threshold: if not None, instead of a
        share: reveal a row's surest token, and all with at least this conf (Fast-dLLM).
    A proposal can be [MASK] itself. Then the position stays masked [code].
    """
    score = torch.full(x.shape, -torch.inf, device=x.device).index_put(masks, conf)  # (n, L)
    # 0 for the surest. Ties go left to right [ours]; in the authors' topk, in no fixed order.
    rank = score.argsort(descending=True, stable=True).argsort()[masks]  # (N,)
    chosen = rank < int(len(conf) // len(x) * share)                    # (N,)
    if threshold is not None:
        chosen = (rank == 0) | (conf >= threshold)                      # (N,)
    return x.index_put(masks, torch.where(chosen, x0, x[masks]))        # (n, L)


def masks_left(x, conf, mask_id):
    """Where x (n, L) is [MASK], on the CPU. Raises Refused if conf is NaN."""
    packed = torch.cat((x.flatten(), conf.isnan().any()[None])).cpu()   # (n·L + 1,)  a host sync
    if packed[-1]:
        raise Refused("the logits or the confidence are not finite: try float32, or other weights")
    return packed[:-1].view(x.shape) == mask_id                         # (n, L)


# ---- which token ---------------------------------------------------------------------------------
def nucleus(probs, p, keep_crossing=False):
    """Keep the likeliest tokens, up to a sum of p, and renormalise                         App. B.1

    probs: (n, V).   Returns (n, V).
    The likeliest token is always kept. MDLM's code drops the token at which the sum crosses p.
    Dream's keeps it, as most others do (keep_crossing) [code].
    """
    if p == 1:
        return probs
    top, ids = likeliest(probs, p)                                             # 2 × (n, m)
    dropped = top.cumsum(-1) > p                                               # (n, m)
    if keep_crossing:
        dropped = dropped.roll(1, -1)                                          # (n, m)
    dropped[:, 0] = False
    kept = torch.zeros_like(probs).scatter(1, ids, top.masked_fill(dropped, 0))  # (n, V)
    return kept / kept.sum(-1, keepdim=True)


def likeliest(probs, p):
    """The m largest of each row of probs (n, V), descending: values and ids (n, m).

    m is V, or large enough for the m values of every row to add up to more than p. Sorting all V
    would be slow, so m starts small and grows until this holds.
    """
    V = probs.shape[1]
    sizes = (1024, 8192, V)
    if probs.is_cuda and probs.numel() < 1e6:
        sizes = (V,)  # a small sort costs less than a host sync; 1e6 is a guess
    for m in sizes:
        top, ids = probs.topk(min(m, V))                                       # 2 × (n, m)
        if m >= V or (top.cumsum(-1)[:, -1] > p).all():  # a host sync
            return top, ids


def categorical(probs, u):
    """Draw one token per row, (n,): the first whose cumulative sum exceeds u Σ p

    probs: (n, V), with any positive sum per row.   u: (n,) float64, uniform in [0, 1), on the CPU.
    One number per row [ours] gives the same distribution as V exponentials [code]. With an fp32 u,
    only a few of the tokens rarer than 6e-8 could be drawn, and those too often. torch.multinomial
    would cost two host syncs.
    """
    device = "cpu" if probs.device.type == "mps" else probs.device  # MPS has no float64
    cdf = probs.to(device, torch.float64).cumsum(-1)                           # (n, V)
    u = to_device(u, cdf.device)[:, None] * cdf[:, -1:]                        # (n, 1)
    drawn = torch.searchsorted(cdf, u, right=True)  # never one with p = 0       (n, 1)
    return drawn[:, 0].to(probs.device)                                        # (n,)


# ---- the command ---------------------------------------------------------------------------------
@dataclass
class Config:
    checkpoint: str = "out/small/last.pt"
    count: Size = 1             # samples to make (not --n: torchrun refuses it)
    length: Size | None = None  # L (default: the model's)
    steps: Size | None = None   # T (default: L; with an order: one for each mask)
    # mdlm, remdm-cap (in the paper for T < L) and remdm-loop toss a coin for each mask, App. B.1.
    # The others are orders (see Pick): each step reveals about the same number of masks (§2.2).
    sampler: Literal[tuple(SAMPLERS) + ORDERS] = "mdlm"
    temperature: NotNegative = 1.0  # with an order; 0: the likeliest tokens
    threshold: Share | None = None  # with an order, in place of steps: see `reveal`
    top_p: Share = 0.9          # nucleus
    soft: bool = True           # False: decode an SM model without feedback
    # Give all three or none. They make a new SoftMask, of the class in --code if there is one, with
    # the model's k and τ = 1. A binary model gets one, too, with k = 3.
    omega_s: float | None = None
    omega_a: float | None = None
    omega_b: float | None = None
    # Text to continue. If it has blanks ___, they share all free positions. The two characters \n
    # stand for a line break.
    prompt: str = ""
    seed: int = 1
    out: str = ""               # file to append to; skips samples already in it (default: print)
    show: bool = False          # watch the samples appear
    code: str = ""              # a Python file to run first: its SoftMask replaces ours
    device: str = "auto"        # cuda, else mps, else cpu
    compile: bool = False       # CUDA graphs: a minute to build, then passes are much faster


def starting_ids(prompt, L, tok, special):
    """Ids (L,) to start from: a row as in training (data.rows), with masks for missing text."""
    mask = special["mask_id"]
    text = prompt.replace("\\n", "\n")
    first, *parts = [tok.encode_ordinary(part) for part in re.split("_{3,}", text)]
    ids = [special["bos"], *first] if text else []
    end = [special["eos"]] if parts else []
    room = L - len(ids) - sum(map(len, parts)) - len(end)  # masks to share
    for i, part in enumerate(parts):
        width = math.ceil(room / (len(parts) - i))
        room -= width
        ids += width * [mask] + part
    ids += end if parts else room * [mask]
    if len(ids) != L or mask not in ids:
        raise Refused(f"the text fills all {L} positions and leaves no masks: shorten it")
    return torch.tensor(ids)


def with_omega(sm, own, mask_id, cfg):
    """A soft mask with cfg's ω_s, ω_a, ω_b and sm's k (3 without sm), or sm if no ω is given

    None with --soft=False.   own: the class of --code (default: SoftMask).
    """
    omega = [cfg.omega_s, cfg.omega_a, cfg.omega_b]
    if omega == [None] * 3:
        if own and not sm:
            raise Refused("--code needs a soft mask: give --omega_s, --omega_a and --omega_b")
        return sm if cfg.soft else None
    if None in omega or not cfg.soft:
        raise Refused("--omega_s, --omega_a and --omega_b replace a soft mask: give all three, "
                      "without --soft=False")
    with launch.input_errors():
        return (own or SoftMask)(mask_id, sm.k if sm else 3, *omega)


def load_for_sampling(cfg):
    """The MDLM, its tokenizer, ids to start from (L,), and cfg with the defaults filled in."""
    if cfg.sampler in SAMPLERS and (cfg.temperature != 1 or cfg.threshold is not None):
        raise Refused(f"--temperature and --threshold do nothing with --sampler={cfg.sampler}: "
                      f"choose one of {', '.join(ORDERS)}")
    if cfg.threshold is not None and cfg.steps:
        raise Refused("--threshold decides how many steps there are: leave --steps out")
    own = launch.soft_mask_class(cfg.code)
    with launch.input_errors():
        model = MDLM.load(cfg.checkpoint, sm_class=own)
    model.sm = with_omega(model.sm, own, model.mask_id, cfg)
    special = model.info["tokenizer"]
    tok = tokenizer(special["name"])
    length = cfg.length or model.cfg.length
    if length > model.cfg.length:
        raise Refused(f"--length={length} exceeds the {model.cfg.length} of training")
    x = starting_ids(cfg.prompt, length, tok, special)                         # (L,)
    if markers := [name for name in tok.special_tokens_set if name in cfg.prompt]:
        print(f"{', '.join(markers)} in the prompt is text, not a token", file=sys.stderr)
    steps = cfg.steps or length
    if cfg.sampler in ORDERS:
        steps = min(steps, x.tolist().count(model.mask_id))
    return model, tok, x, replace(cfg, length=length, steps=steps, soft=bool(model.sm))


def sample(model, x, cfg, generator, on_step):
    """x (L,) with its masks filled, as cfg says"""
    if cfg.sampler in SAMPLERS:
        return generate(model, x, cfg.steps, cfg.sampler, cfg.top_p, generator,
                        model.cfg.time_conditioning, on_step)
    shares = cfg.steps * [1]
    if cfg.threshold is None:
        shares = shares_of(shares)
    pick = Pick(cfg.sampler, cfg.temperature, cfg.top_p, cfg.threshold, generator)
    return decode(model, x[None], shares, pick, on_step=on_step)[0]


def read_samples(path):
    """All samples of a run: the lines of NAME.jsonl, and of each rank's NAME.rankN.jsonl"""
    ranks = glob.glob(glob.escape(path.removesuffix(".jsonl")) + ".rank[0-9]*.jsonl")
    return [line for file in (path, *sorted(ranks)) for line in read_jsonl(file)]


def text_of_sample(tok, ids, special, given):
    """The text of a sample, without BOS and EOS. It ends at the first one after place `given`."""
    ends = special["bos"], special["eos"]
    stop = next((i for i in range(max(1, given), len(ids)) if ids[i] in ends), len(ids))
    return text_of(tok, [i for i in ids[:stop] if i not in ends])


def main(cfg):
    machine = launch.machine(cfg.device)
    if machine.world > 1 and not cfg.out:
        raise Refused("torchrun needs --out=FILE, such as --out=samples.jsonl")

    # ---- load the model, encode the prompt
    model, tok, x, cfg = load_for_sampling(cfg)                                # x: (L,)
    # All that a sample depends on besides its index. The last entry tells apart runs at the same
    # step: the weights' bits as integers, whose sum is exact in any order.
    settings = {name: value for name, value in asdict(cfg).items()
                if name not in ("count", "out", "show", "device", "compile")}
    code = cfg.code and hashlib.sha256(Path(cfg.code).read_bytes()).hexdigest()
    settings |= {"step": model.info["step"], "tokenizer": tok.name,
                 "soft_mask": model.cfg.soft_mask, "code": code,
                 "dtype": str(machine.dtype or torch.float32),
                 "weights": str(sum(p.detach().float().view(torch.int32).sum().item()
                                    for p in model.parameters()))}
    model.to(machine.device)
    if machine.dtype:
        model.net.cast_linears_(machine.dtype)
    if cfg.compile:
        compile_parts(model, "reduce-overhead")

    # ---- which samples are missing
    made = read_samples(cfg.out) if cfg.out else []
    with launch.readable(cfg.out, ": give another --out"):
        for line in made:
            launch.check_same(cfg.out, line["settings"], settings, settings.keys() - {"checkpoint"},
                              ": give the same flags and weights, or another --out")
        indices_made = {line["index"] for line in made}
    todo = [i for i in range(machine.rank, cfg.count, machine.world) if i not in indices_made]
    path = cfg.out
    if machine.world > 1:
        path = f"{cfg.out.removesuffix('.jsonl')}.rank{machine.rank}.jsonl"

    # ---- make them
    if path and todo:
        append_jsonl(path)  # an unwritable path fails now, not after the work
    bar = progress(total=len(todo) * cfg.steps, unit="step", disable=cfg.show or not todo)
    print_text = bar.write if sys.stderr.isatty() else print  # in a pipe, bar.write prints a bar
    watching = cfg.show and sys.stdout.isatty() and machine.rank == 0
    watch = show(tok, model) if watching else lambda *_: None
    text = (x != model.mask_id) & (x != model.info["tokenizer"]["eos"])        # (L,)
    given = max(text.nonzero()[:, 0].tolist(), default=0)  # the last of these
    for i in todo:
        nfe = 0

        def on_step(*now):
            nonlocal nfe
            nfe += 1
            bar.update()
            watch(*now)
        with machine.autocast():
            ids = sample(model, x, cfg, rng("sample", cfg.seed, i), on_step).tolist()
        bar.update(cfg.steps - nfe)  # steps that made no pass
        if path:
            append_jsonl(path, {"ids": ids, "text": text_of(tok, ids), "nfe": nfe, "seed": cfg.seed,
                                "index": i, "settings": settings})
        else:
            print_text(text_of_sample(tok, ids, model.info["tokenizer"], given) + "\n---")
    bar.close()
    if path and machine.rank == 0:
        print(f"samples are in {cfg.out}{', a file for each rank' if machine.world > 1 else ''}")


# ---- on a terminal -------------------------------------------------------------------------------
def cell_text(tok, token):
    """A token id as text: ↵ for a line break, a dot for [MASK] and for what cannot be printed."""
    text = text_of(tok, [token]) or "·"
    return "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in text)


def painted(text, lam):
    """Text for a terminal: a token (lam None) in bold, a guess on green, darker for larger λ."""
    if lam is None:
        return f"\x1b[1m{text}\x1b[0m"
    pale = int(220 * (1 - lam))
    return f"\x1b[48;2;{pale};{100 + pale * 2 // 3};{pale};38;2;0;0;0m{text}\x1b[0m"


def show(tok, model):
    """An `on_step` that draws the first row on a clear terminal, with the likeliest tokens in
    place of its masks"""
    def on_step(x, lam, masks, h, revealed):
        guess = x.index_put(masks, model.net.head(h).argmax(-1))               # (n, L)
        columns, lines = shutil.get_terminal_size()
        room = columns * (lines - 1)
        cells = []
        for token, strength, best in zip(x[0].tolist(), lam[0].tolist(), guess[0].tolist()):
            masked = token == model.mask_id
            text = cell_text(tok, best if masked else token)
            room -= len(text)
            if room > 0:
                cells.append(painted(text, strength if masked else None))
        print("\x1b[H\x1b[J" + "".join(cells), flush=True)
        time.sleep(0.05)
    return on_step


if __name__ == "__main__":
    launch.run(main, Config, ranks=True)
