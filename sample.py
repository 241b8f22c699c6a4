# SPDX-License-Identifier: MIT
"""Text from masks: Alg. 2, the reverse process (l.3 and l.6 call mdlm.py).              §2.1, §2.2

    Alg. 2        generate, where each position changes at random; generate_in_order
           l.1    starting_rows
           l.3    DiT.trunk, a call of the network (mdlm.py)
           l.4    nucleus, chunks.categorical    which token
           l.5    step_probs, plan, Turn         whether it appears, known before any call
                  masks_to_reveal                the same for generate_in_order, but after the call
           l.6    TwoPass.feedback (mdlm.py)

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She ran. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.ckpt --count=5000 --out=samples.jsonl

The last command makes the samples behind "Standard, Binary, 1M, 1/1" in Tables 1 and 2. If
it is stopped, the same command makes the rest. Each rank writes its own file, samples.RANK.jsonl.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import launch
from checkpoint import with_omega
from chunks import categorical, compile_parts, in_chunks, likeliest
from data import rng, tokenizer
from launch import Refused, Share, Size, append_jsonl, progress, read_samples, to_device
from mdlm import MDLM
from show import show
from softmask import neg_entropy

T_END = 1e-5  # the time at which the last step ends, not quite 0 [code]
ARGMAX = -1.0  # a Turn.u that is not a random number: take the likeliest token
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
T_ON, T_OFF, ALPHA_ON = 0.55, 0.05, 0.9  # the plateau of remdm-loop, App. B.1
ORDERS = "entropy", "random"
NOT_IN_SETTINGS = "count", "batch_size", "seed", "out", "show", "tokenizer_dir", "device"
GRAPHS_PAY = 5000  # network calls: CUDA graphs take a minute to build, and save 12 ms a call


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
    if eta is None:
        eta = SAMPLERS[sampler]
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
def generate(model, n, steps, sampler="mdlm", top_p=0.9, generator=None, on_step=None, x=None,
             soft=True, every=False, eta=None):
    """Inference with soft-masking                                                    Alg. 2, App. A

        x = (m, …, m)                                                                l.1
        for each of T steps:                                                         l.2, 7
            p  = g_θ(x)         a forward pass                                       l.3
            x~ = sample(p)      a token for every position, from the nucleus of p    l.4
            x^ = unmask(x~)     a coin for every position: this token, or [MASK]?    l.5
            x  = sm_ω(x^, p)    each [MASK] becomes (1 − λ) m + λ Σ_i π_i v_i        l.6

    The paper's l.6 has x^ and p of the step before. Here both are those of this step, as in §3.1
    [ours]. Whether a position changes does not depend on the network. So all coins of l.5 are
    tossed before the first l.3, and l.4 draws only the tokens that appear. Steps that change no
    token are skipped (App. C.4), although they would renew SM's feedback [code]. So SM makes as
    many calls as binary masking (648 ± 10 for 1,024 steps, so C.4's 651 and 636 may be chance). The
    last step is never skipped if it starts with masks. With every=True (App. C.5) or time
    conditioning, no step is skipped. Masks left at the end are filled by one more call [code].

    n: sequences.   steps: T.   sampler, eta: for `step_probs`.   top_p: for `nucleus`.
    generator: a torch.Generator on the CPU, which seeds one for each sequence, or a list of n. A
        sample does not depend on the others in its batch.
    on_step(x, lam, guess, masks, h): called after every call of the network. x (n, L): ids. With
        feedback, where x is [MASK], lam (n, L) is λ and guess (n, L) the likeliest token. masks:
        the index pair (b, l) of the masks that stay. h (m, D): the hidden states that predict them.
    x: (L,) or (n, L) ids on the CPU to start from (default: all [MASK]). Tokens in it never change.
    soft: False decodes without feedback.
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each sequence needed.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    soft = soft and model.sm is not None
    every = every or model.cfg.time_conditioning  # a network that sees t predicts anew each time
    x, generators = starting_rows(model, n, x, generator)                      # (n, L)          l.1
    # The coins of l.5 decide which calls each sequence needs, and which positions change in them.
    plans = [plan(row, steps, g, sampler, eta, every)
             for row, g in zip((x == mask_id).numpy(), generators, strict=True)]
    nfe = torch.tensor([len(turns) for turns in plans])                        # (n,)
    turns = progress(side_by_side(plans, x.shape[1], device), "calls", int(nfe.max()),
                     leave=False, disable=bool(on_step) or None)  # None: only on a terminal
    x = to_device(x, device)                                                   # (n, L)
    emb = F.embedding(x, table)                                                # (n, L, D)
    lam, guess = torch.zeros(x.shape, device=device), x.clone()  # only for on_step
    as_mask = torch.full((), mask_id, device=device)  # copying a number would be a host sync

    def draw(h, u):  # u stays on the CPU until it is needed: MPS has no float64
        logits = net.head(h)                                                   # (m, V)
        drawn = categorical(nucleus(logits.softmax(-1), top_p), u)             # (m,)
        by_argmax = to_device(u == ARGMAX, device)  # where `drawn` is nonsense  (m,)
        return torch.where(by_argmax, logits.argmax(-1), drawn)                # (m,)

    # One turn for all n: t (n,), index pairs (b, l) of what appears, stays and vanishes. p is never
    # stored: the head runs in `draw` and in `feedback`. x may be the caller's: keep it unchanged.
    for t, appear, stay, vanish, u in turns:
        h = net.trunk(emb, t)                                                  # (n, L, D)       l.3
        drawn = in_chunks(draw, h[appear], u, V=len(table))                    # (m,)  of x~     l.4
        lost = x[vanish]                                                       # (r,)  with ReMDM
        x = x.index_put(appear, drawn).index_put(vanish, as_mask)              # (n, L)       x^ l.5
        emb[appear] = F.embedding(drawn, table)
        if soft:
            emb[stay], lam[stay], guess[stay] = model.feedback(h[stay])        #                 l.6
        if len(lost):  # re-masked. At this step's l.3 they were still tokens: their p is 1 [code]
            emb[vanish], guess[vanish] = table[mask_id], lost
            if soft:
                emb[vanish], lam[vanish], _ = model.feedback_of_certain(lost)  #                 l.6
        if on_step:
            on_step(x, lam, guess, stay, h[stay])
    model.train(was_training)
    return x.cpu(), nfe


class Turn(NamedTuple):
    """What one call of the network is for, in one sequence                            Alg. 2 l.5"""
    t: float             # the time
    appear: np.ndarray   # (L,) bool: masks that become tokens
    stay: np.ndarray     # (L,) bool: masks that remain
    vanish: np.ndarray   # (L,) bool: tokens that become masks
    u: np.ndarray        # (m,) float64 in [0, 1) for the m tokens that appear; or ARGMAX


def plan(free, steps, generator, sampler="mdlm", eta=None, every=False):
    """The turns of one sequence: the steps that need the network                         Alg. 2 l.5

    free: (L,) bool, the masks at the start. Other positions never change.
    Returns [Turn]. Masks left after the last step are filled by one more turn, by argmax [code].
    """
    turns, masked = [], free
    dt = (1 - T_END) / steps
    for i in range(steps):
        t = 1 - i * dt
        reveal, remask = step_probs(t, t - dt, sampler, eta)
        # Always 2 L numbers, so that later draws do not depend on how many masks are left.
        draws = torch.rand(2, len(free), dtype=torch.float64, generator=generator)
        coin, u = draws.numpy()                                                # 2 × (L,)
        appear = masked & (coin < reveal)                                      # (L,)
        stay = masked & ~appear                                                # (L,)
        vanish = free & ~masked & (coin < remask)                              # (L,)
        # The last step calls the network if masks are left, even if nothing changes [code].
        needed = i == steps - 1 and masked.any()
        if appear.any() or vanish.any() or every or needed:
            turns.append(Turn(t, appear, stay, vanish, u[appear]))
        masked = stay | vanish
    if masked.any():  # usually few; up to a tenth if remdm-loop has no step below T_OFF (T ≤ 20)
        none = np.zeros_like(free)
        turns.append(Turn(T_END, masked, none, none, np.full(masked.sum(), ARGMAX)))
    return turns


def side_by_side(plans, L, device):
    """The first turns of all sequences together, then the second ones, and so on            [ours]

    Each sequence skips different steps, so its i-th turn has its own time. Because CUDA
    graphs need static shapes, a finished sequence stays in the batch, unchanged.

    plans: the turns of n sequences of length L, from `plan`.   Yields the fields of Turn for all n:
    t (n,); appear, stay and vanish as index pairs (b, l); and u (m,), which is on the CPU.
    """
    none = np.zeros(L, bool)
    nothing = Turn(T_END, none, none, none, np.zeros(0))
    for turns in zip_longest(*plans, fillvalue=nothing):
        t, appear, stay, vanish, u = zip(*turns)  # n of each
        t, u = torch.tensor(t), torch.from_numpy(np.concatenate(u))            # (n,), (m,)
        pairs = [indices(torch.from_numpy(np.stack(rows)), device)
                 for rows in (appear, stay, vanish)]
        yield to_device(t, device), *pairs, u


def indices(where, device):
    """Where a bool tensor on the CPU is True: an index for each dimension, without a host sync."""
    return tuple(to_device(part, device) for part in where.nonzero(as_tuple=True))


def starting_rows(model, n, x, generator):
    """Ids (n, L) to start from, and n generators: as given, or seeded by one         Alg. 2 l.1"""
    if x is None:
        x = torch.full((n, model.cfg.length), model.mask_id)
    if not isinstance(generator, list):
        seeds = torch.randint(2**62, (n,), generator=generator).tolist()
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    return x.expand(n, -1), generator


@torch.no_grad()
def generate_in_order(model, n, steps, order, top_p=0.9, generator=None, on_step=None, x=None,
                      soft=True, threshold=None):
    """Alg. 2 with about the same number of tokens in every step, the surest first              §2.2

    steps: network calls, at most. With as many steps as masks, each reveals one token.
    order: "entropy", the positions of lowest entropy first, or "random", the control. The entropy
        is that of the whole prediction: a nucleus is often a single token, with entropy 0 [ours].
    threshold: reveal every position whose likeliest token has at least this probability (before
        the nucleus). A sequence without such a position reveals as many as without a threshold
        [ours], so one if there are as many steps as masks.
    All else is as in `generate`.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    by_entropy = {"entropy": True, "random": False}[order]  # KeyError for any other word
    model.eval()
    soft = soft and model.sm is not None
    x, generators = starting_rows(model, n, x, generator)                      # (n, L)          l.1
    masked_cpu = x == mask_id                                                  # (n, L)
    x = to_device(x, device)                                                   # (n, L)
    emb = F.embedding(x, table)                                                # (n, L, D)
    nfe = torch.zeros(n, dtype=torch.long)                                     # (n,)

    def predict(h, u):
        logits = net.head(h)                                                   # (m, V)
        logp = logits.log_softmax(-1)                                          # (m, V)
        drawn = categorical(nucleus(logp.exp(), top_p), u)                     # (m,)
        weighed = model.weigh(h, logits) if soft else ()
        return drawn, neg_entropy(logp), logp.amax(-1).exp(), *weighed

    for steps_left in range(steps, 0, -1):
        if not masked_cpu.any():
            break
        masked = to_device(masked_cpu, device)                                 # (n, L)
        masks = indices(masked_cpu, device)                                    # 2 × (N,)
        draws = [torch.rand(x.shape[1], 2, dtype=torch.float64, generator=g) for g in generators]
        u, chance = torch.stack(draws).unbind(-1)                              # 2 × (n, L)
        t = masked.float().mean(-1)  # the share of masks, as if α_t = 1 − t      (n,)  [ours]
        h = net.hidden(emb, masks, t)                                          # (N, D)          l.3
        # u[masked_cpu] has the draws of the masked positions, in the order of h.
        found = in_chunks(predict, h, u[masked_cpu], V=len(table))             #                 l.4
        drawn, minus_H, p, *weighed = found    # (N,) each; if soft, what TwoPass.weigh returns
        score = to_device(chance.float(), device)                              # (n, L)
        if by_entropy:
            # From masks alone, a DiT predicts the same everywhere: attention averages equal values.
            # Rounding would break these ties, differently in every batch. So the order stays random
            # there [ours].
            only_masks = masked.all(-1, keepdim=True)                          # (n, 1)
            score = torch.where(only_masks, score, score.index_put(masks, minus_H))
        chosen = masks_to_reveal(score, masked, steps_left)                    # (n, L)
        if threshold is not None:
            sure = torch.zeros_like(masked).index_put(masks, p >= threshold)   # (n, L)
            chosen = torch.where(sure.any(-1, keepdim=True), sure, chosen)     # (n, L)
        x = torch.where(chosen, x.index_put(masks, drawn), x)                  # (n, L)          l.5
        emb = F.embedding(x, table)                                            # (n, L, D)
        nfe += masked_cpu.any(-1)
        was_masked = masked_cpu                                                # (n, L)
        masked_cpu = (x == mask_id).cpu()  # a host sync                         (n, L)
        stay = indices(masked_cpu, device)                                     # 2 × (r,)
        (rows_that_stay,) = indices(masked_cpu[was_masked], device)  # which of h  (r,)
        lam, guess = torch.zeros_like(score), x.clone()  # only for on_step
        if soft:
            weighed = [each[rows_that_stay] for each in weighed]
            emb[stay], lam[stay], guess[stay] = model.feedback(weighed=weighed)  #               l.6
        if on_step:
            on_step(x, lam, guess, stay, h[rows_that_stay])
    model.train(was_training)
    return x.cpu(), nfe


def masks_to_reveal(score, masked, steps_left):
    """Which masks to reveal: in each row, a share 1 / steps_left of the masks, by score

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


@dataclass
class Config:
    checkpoint: str = ""        # any MDLM that `python checkpoint.py` can describe
    count: Size = 1             # samples to make (not --n: torchrun refuses it)
    batch_size: Size = 16       # sequences per forward pass; it changes samples only by rounding
    length: Annotated[int, 3, 2**20] | None = None  # L (default: the model's)
    steps: Size | None = None   # T (default: L; with entropy and random, one per mask)
    # mdlm, remdm-cap (in the paper for T < L) and remdm-loop reveal at random, App. B.1. The others
    # reveal about the same number per step: the surest first (§2.2), or in random order.
    sampler: Literal[tuple(SAMPLERS) + ORDERS] = "mdlm"
    eta: Share | None = None    # largest P[re-mask] of a remdm sampler (default: as in App. B.1)
    # For entropy and random: reveal every position whose likeliest token has at least this
    # probability, or, if there is none, the first in the order.
    threshold: Annotated[float, 1e-6, 1] | None = None
    top_p: Annotated[float, 1e-12, 1] = 0.9  # nucleus
    soft: bool = True           # False: decode an SM model without feedback
    # These replace the model's ω. With --omega_s, a binary model decodes with feedback too (k = 3).
    omega_s: Annotated[float, 1e-6, 1 - 1e-6] | None = None
    omega_a: launch.Positive | None = None  # (default for a binary model: the paper's initial ω)
    omega_b: launch.Negative | None = None  # (the same)
    # In prompt and infill, the two characters \n stand for a line break.
    prompt: str = ""            # text to continue; a ___ in it is filled as in infill
    infill: str = ""            # text after the prompt; its blanks ___ share all free positions
    seed: int = 1
    out: str = ""               # file to append to; its samples are not made again (default: print)
    show: bool = False          # watch the first sequence of every batch
    tokenizer_dir: str = ""     # folder with GPT-2's vocabulary, for machines without internet
    device: str = "auto"        # cuda, else mps, else cpu
    compile: bool | None = None  # CUDA graphs (default: where they pay off)


def starting_ids(cfg, tok, special):
    """Ids (L,) to start from: a row as in training (data.rows), with masks for missing text."""
    if cfg.infill and "___" not in cfg.infill:
        raise Refused("--infill has no ___ to fill: --prompt continues a text")
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


def load(cfg):
    """The MDLM with ω from cfg, on the CPU; its tokenizer; cfg with defaults from the model."""
    model = MDLM.load(cfg.checkpoint)
    model.sm = with_omega(model.sm, model.mask_id, cfg)
    tok = tokenizer(model.info["tokenizer"]["name"], cfg.tokenizer_dir)
    cfg = replace(cfg, length=cfg.length or model.cfg.length, soft=cfg.soft and bool(model.sm))
    if model.mask_id != tok.n_vocab:  # [MASK] follows the last token
        raise Refused(f"{cfg.checkpoint} has {model.mask_id} tokens, but {tok.name} {tok.n_vocab}")
    if cfg.length > model.cfg.length:
        raise Refused(f"--length={cfg.length} exceeds the {model.cfg.length} that {cfg.checkpoint} "
                      f"was trained on")
    return model, tok, cfg


def file_and_lines(cfg, here):
    """This rank's file, and all ranks' lines, so that all ranks make the same decisions."""
    if here.world > 1 and not cfg.out:
        raise Refused("torchrun needs --out=FILE, such as --out=samples.jsonl")
    paths = [cfg.out]
    if here.world > 1:
        paths = [f"{cfg.out.removesuffix('.jsonl')}.{r}.jsonl" for r in range(here.world)]
    return paths[here.rank], [line for path in paths for line in read_samples(path)]


def resolved(cfg, n_masks, here):
    """cfg with its defaults filled in.   n_masks: masks at the start."""
    if cfg.eta is not None and not cfg.sampler.startswith("remdm"):
        raise Refused(f"--eta does nothing with --sampler={cfg.sampler}: choose a remdm sampler")
    if cfg.threshold is not None and (cfg.steps or cfg.sampler not in ORDERS):
        raise Refused("--threshold needs --sampler=entropy or random, and no --steps: it decides "
                      "how many there are")
    steps, compiled = cfg.steps, cfg.compile
    if steps is None:
        steps = n_masks if cfg.sampler in ORDERS else cfg.length
    if compiled is None:
        calls = steps * math.ceil(cfg.count / cfg.batch_size / here.world)
        compiled = here.device.type == "cuda" and calls >= GRAPHS_PAY
    return replace(cfg, steps=steps, compile=compiled)


def settings_of(cfg, model, tok, here):
    """All that a sample depends on, besides its seed and index. Every line of --out holds it."""
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_SETTINGS}
    # The model is still on the CPU here: MPS has no float64.
    weights = sum(p.double().sum().item() for p in model.parameters())
    return settings | {"step": model.info["step"], "weights": weights, "tokenizer": tok.name,
                       "dtype": str(here.dtype or torch.float32)}


def batches(todo, cfg):
    """Yields the indices of samples to make together. With CUDA graphs, the last is padded."""
    size = min(len(todo), cfg.batch_size)
    for start in range(0, len(todo), cfg.batch_size):
        batch = todo[start:start + size]
        if cfg.compile:  # pad with the last sample: a new size would take a minute to compile
            batch += (size - len(batch)) * batch[-1:]
        yield batch


def main(cfg):
    here = launch.machine(cfg.device)
    path, lines = file_and_lines(cfg, here)

    # ---- the model, and the samples that exist already
    model, tok, cfg = load(cfg)
    x = starting_ids(cfg, tok, model.info["tokenizer"])                        # (L,)
    cfg = resolved(cfg, x.tolist().count(model.mask_id), here)
    settings = settings_of(cfg, model, tok, here)
    now = settings | {"seed": cfg.seed}
    for line in lines:  # a different --count may be refused, too: `compile` can depend on it
        launch.check_same(path, line["settings"] | {"seed": line["seed"]}, now,
                          list(now), ": give the same flags, or another --out")
    texts = {line["index"]: line["text"] for line in lines}

    # ---- the device
    model.to(here.device)
    if here.dtype:
        model.net.cast_linears_(here.dtype)
    if cfg.compile:
        compile_parts(model, "reduce-overhead")

    # ---- the samples
    decode = partial(generate, sampler=cfg.sampler, eta=cfg.eta)
    if cfg.sampler in ORDERS:
        decode = partial(generate_in_order, order=cfg.sampler, threshold=cfg.threshold)
    # With --show, rank 0 makes all its samples again, even if --out holds them.
    on_step = show(tok, model.mask_id) if here.rank == 0 and cfg.show else None
    todo = [i for i in range(here.rank, cfg.count, here.world) if i not in texts or on_step]
    title = "samples, the first after a minute of compiling" if cfg.compile else "samples"
    bar = progress(total=len(todo), desc=title, disable=here.rank > 0 or cfg.show or not todo)
    for batch in batches(todo, cfg):
        generators = [rng("sample", cfg.seed, i) for i in batch]
        with here.autocast():
            ids, nfe = decode(model, len(batch), cfg.steps, top_p=cfg.top_p, generator=generators,
                              on_step=on_step, x=x, soft=cfg.soft)
        for i, row, calls in zip(batch, ids.tolist(), nfe.tolist()):
            if i in texts:  # made only to be watched, or to pad the batch
                continue
            texts[i] = tok.decode(row)
            if path:
                append_jsonl(path, {"ids": row, "text": texts[i], "nfe": calls, "seed": cfg.seed,
                                    "index": i, "settings": settings})
            else:
                bar.write("\n---\n" * (len(texts) > 1) + texts[i])
        bar.update(len({*batch}))  # a set: without the padding
    bar.close()
    if path and here.rank == 0:
        print(f"{texts[0]}\nsamples are in {path}")


if __name__ == "__main__":
    launch.run(main, Config)
