# SPDX-License-Identifier: MIT
"""Decoding by confidence: fill the masks, some tokens per pass, with soft-masked feedback.

    §2.2 conditional generation   pad_prompts       a response of [MASK]s behind each prompt
    §2.2 unmasking strategies     propose, reveal   the surest tokens first, some in each pass
    App. A, Alg. 2; App. C.9      decode            the whole response at once
    App. B.2 Fast-dLLM            decode_blocks     block after block, with cached keys and values

A step reveals a number of tokens here. In the samplers of sample.py, each token flips a coin. The
command decodes Dream. `decode` takes any backbone in a TwoPass: `sample.py --order=entropy` decodes
an MDLM by it. Tensors with a vocabulary axis are (n, V), a row per masked position, and exist only
inside `in_chunks`.

Not here: training, benchmarks (eval_dream.py), re-masking (Dream never takes a token back).

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import hashlib
import itertools
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated

import torch
import torch.nn.functional as F

import dora
from arms import soft_mask, with_omega
from dream import Dream, Tokenizer, load_adapter, soft_mask_file
from launch import (
    Count,
    Refused,
    Share,
    check_ranges,
    line_breaks,
    machine,
    progress,
    run,
    to_device,
)
from mdlm import TwoPass, in_chunks
from softmask import SoftMask, time_gain

# Dream's names. The last one is [ours], to compare the others with.
ALGORITHMS = "entropy", "maskgit_plus", "topk_margin", "origin", "random"
OMEGA = "omega_s", "omega_a", "omega_b"
AtLeast0, Probability = Annotated[float, 0, 1e9], Annotated[float, 1e-12, 1]  # see launch.Share


@dataclass
class Decoding:
    model: str = ""                 # folder of a Dream or Dream-Coder model, as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights: faster, the same up to rounding
    soft: bool = True               # false: binary feedback, even if the adapter has an ω
    gen_len: int = 256              # L, tokens of the response
    steps: int = 0                  # T (default: gen_len). NFE budget = steps / gen_len, Eq. 4
    algorithm: str = "entropy"      # lowest first. maskgit_plus (p), topk_margin: highest first.
                                    # origin: each by a coin. random: a fixed number, by chance
    temperature: AtLeast0 = 0.1     # App. B.2; 0: argmax
    top_p: Probability = 0.9        # App. B.2; 1: off. Dream's rule, see `filtered`
    top_k: Count = 0                # 0: off, as the authors pass it; the hub's own is 50 [code]
    eos_penalty: AtLeast0 = 0.0     # taken off the end token's logit: answers get longer [ours]
    schedule: str = "none"          # App. C.9: none, linear, stepwise, linear-late, stepwise-late
    switch: Share = 0.5             # t', the share of masks at which the stepwise schedules switch
    block: Count = 0                # Fast-dLLM's block length; 0: the whole response at once
    cache: str = "prefix"           # with block: none, prefix, dual
    threshold: Probability | None = None  # with block: reveal all tokens that are at least so sure
    # Another ω than the adapter's. A model without SM then decodes with feedback, with k = 3.
    omega_s: float | None = None
    omega_a: float | None = None    # (default for a model without SM: the paper's start)
    omega_b: float | None = None    # (the same)
    seed: int = 0
    device: str = "auto"            # cuda > mps > cpu
    dtype: str = "auto"             # auto: as stored; or float32, bfloat16
    compile: bool | None = None     # the trunk, in a minute (default: off, eval_dream: on CUDA)


@dataclass
class Config(Decoding):
    # In these texts, the two characters \n are a line break.
    prompt: str = ""                # one user turn
    raw: bool = False               # the prompt is text to continue, without the chat template
    chat: bool = False              # user turns from stdin, one a line
    infill: str = ""                # text with one ___ for the model to write
    stop: str = ""                  # the response ends before any of these, separated by |
    show: bool = True               # on a terminal: draw the text as it fills


def check(gen_len, steps, algorithm="entropy", schedule="none", block=0, cache="prefix",
          threshold=None, **others):
    """Raises Refused for settings that no model can be decoded with."""
    ranged = {f.name: others[f.name] for f in fields(Decoding) if f.name in others}
    check_ranges(Decoding(block=block, threshold=threshold, **ranged))
    try:
        time_gain(schedule, 1.0)
    except ValueError as e:
        raise Refused(str(e))
    blocks = gen_len // block if block else 1
    for wrong, sentence in (
        (gen_len < 1, f"gen_len {gen_len} leaves nothing to fill: it must be at least 1"),
        (not 1 <= steps <= gen_len,
         f"steps {steps} must be between 1 and {gen_len}, the number of masks to fill"),
        (algorithm not in ALGORITHMS,
         f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}"),
        (0 < others.get("temperature", 0) < 1e-6,
         f"temperature {others.get('temperature')} is too small to divide by: use 0, which takes "
         f"the argmax, or at least 1e-6"),
        (cache not in ("none", "prefix", "dual"),
         f"unknown cache {cache!r}: use none, prefix or dual"),
        (block and gen_len % block,
         f"gen_len {gen_len} is not a multiple of block {block}: change one of them"),
        (threshold is not None and not block,
         f"threshold {threshold} works on blocks: add --block=32"),
        (threshold is None and steps % max(blocks, 1),
         f"steps {steps} cannot be shared evenly by {blocks} blocks: change steps or block"),
    ):
        if wrong:
            raise Refused(sentence)


# -------------------------------------------------------------------------------------------------
# one step


def filtered(logits, temperature=0.0, top_p=1.0, top_k=0):
    """Probabilities after temperature, top-p and top-k, in this order [code].

    logits: (n, V) fp32.   Returns (n, V) fp32. At temperature 0, where `propose` takes the argmax,
    nothing is divided. Top-p keeps the token that crosses p, which MDLM's nucleus drops
    (sample.nucleus): the two rules give different texts and must not be exchanged. Checked against
    tests/oracles.py dream_filter.
    """
    if temperature > 0:
        logits = logits / temperature
    p = logits.softmax(-1)                                              # (n, V)
    if top_p < 1:
        top, ids = likeliest(p, top_p)                                  # (n, m), descending
        before = F.pad(top.cumsum(-1)[:, :-1], (1, 0))                  # (n, m)  of likelier ones
        p = torch.zeros_like(p).scatter(-1, ids, top.masked_fill(before > top_p, 0))
    if top_k:
        least = p.topk(min(top_k, p.shape[-1])).values[:, -1:]          # (n, 1)
        p = p.masked_fill(p < least, 0)                                 # (n, V)
    return p / p.sum(-1, keepdim=True) if top_p < 1 or top_k else p


def likeliest(probs, p):
    """The likeliest tokens of each row, (n, m), descending: enough of them for a sum above p."""
    V = probs.shape[-1]
    for m in (min(1024, V), V):  # all of V is slow to sort, rarely needed
        top, ids = probs.topk(m)                                        # (n, m), (n, m)
        if (top.sum(-1) > p).all():
            break
    return top, ids


def draw(p, generator):
    """One token (n,) per row of p (n, V), in float64: fp32 noise would cut the tail.

    It is where a random number falls in the cumulative sum. torch.multinomial would let the host
    wait twice. MPS has no float64, so this runs on the generator's device.
    """
    where = dict(device=generator.device, dtype=torch.float64)
    u = torch.rand(len(p), 1, generator=generator, **where)             # (n, 1)
    cdf = p.to(**where).cumsum(-1)                                      # (n, V)
    drawn = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)        # (n, 1)
    return drawn[:, 0].to(p.device)


def propose(logits, never=None, algorithm="entropy", temperature=0.0, top_p=1.0, top_k=0,
            generator=None, u=None, choose=None, eos=None, eos_penalty=0.0):
    """A token and a confidence for every masked row                                 Alg. 2 l.4

    logits: (n, V) fp32.   never: a token to replace by the best other one (default: none).
    u: (n, 2) float64 in [0, 1), the draws of each row, made before (default: none).
    choose: another filter and draw than Dream's, (logits, u (n,)) → p (n, V), x0 (n,).
    eos, eos_penalty: a token, and what is taken off its logits. Feedback does not see it.
    Returns x0 (n,) and conf (n,). The token with the highest conf goes first.

    Both come from the filtered probabilities: temperature and top-p also decide the order [code].
    Raises Refused for a draw without a generator.
    """
    chance = algorithm in ("origin", "random")
    if generator is None and (temperature > 0 or chance and u is None):
        raise Refused(f"temperature {temperature} and {algorithm} make draws: give "
                      f"generator=torch.Generator(…) to key them")
    if eos_penalty:
        logits = logits.clone()
        logits[:, eos] -= eos_penalty
    if choose:
        p, x0 = choose(logits, u[:, 0])                                 # (n, V), (n,)
    else:
        p = filtered(logits, temperature, top_p, top_k)                 # (n, V)
        x0 = p.argmax(-1) if temperature == 0 else draw(p, generator)            # (n,)
    if never is not None:  # before conf, so that a threshold is about the token that is written
        first, second = logits.topk(2).indices.unbind(-1)               # (n,), (n,)
        x0 = torch.where(x0 == never, torch.where(first == never, second, first), x0)
    if algorithm == "entropy":
        # Where the filter leaves a single token, −H is exactly 0. With App. B.2's settings this is
        # common, and among such rows `reveal` goes from left to right.
        conf = (p * (p + 1e-10).log()).sum(-1)                          # (n,)  −H, guarded [code]
    elif algorithm == "maskgit_plus":
        conf = p.gather(-1, x0[:, None])[:, 0]
    elif algorithm == "topk_margin":
        conf = -p.topk(2).values.diff()[:, 0]
    elif u is not None:
        conf = u[:, 1].to(p.device, torch.float32)
    else:
        conf = torch.rand(len(x0), generator=generator, device=generator.device).to(p.device)
    return x0, conf


def predictions(model, h, n, soft, never, algorithm, u=None, **pick):
    """What one pass says of its masks, a few rows of logits at a time           Alg. 2 l.4, l.6

    model: TwoPass.   h: (N, D) hidden states.   soft: whether there is feedback.
    n: so many of them, the first ones, can be revealed. A proposal costs more than its logits.
    never, algorithm, u (n, 2), pick: arguments of `propose`.
    Returns x0 and conf of these n, and, if soft, TwoPass.feedback of all N. The feedback comes from
    the logits without temperature and top-p [code].
    """
    V = len(model.net.table)

    def both(h, *u):
        logits = model.net.head(h)                                      # (n, V)
        found = propose(logits, never, algorithm, u=u[0] if u else None, **pick)    # (n,), (n,)
        return *found, *(model.feedback(h, logits) if soft else ())

    rows = [h[:n]] if u is None else [h[:n], u]
    x0, conf, *feedback = in_chunks(both, *rows, V=V)
    if soft and n < len(h):
        pairs = zip(feedback, model.feedback(h[n:]))
        feedback = [torch.cat(pair) for pair in pairs]
    return x0, conf, *feedback


def reveal_count(masked, t, s, last):
    """How many of `masked` (B,) tokens a step from time t to s < t reveals       §2.2, n ≈ L/T

    Returns (B,) int64. It is rounded down, and the last step takes what is left. So with T = L the
    steps do not reveal one token each, as App. B.2 says, but 0, 1, …, 1, 2 [code].
    """
    return masked if last else (masked * (1 - s / t)).long()


def reveal(x, masked, x0, conf, t=1.0, s=0.0, last=False, threshold=None, algorithm="entropy",
           count=None):
    """x with some of its masks replaced by their proposals                          Alg. 2 l.5

    x, masked: (B, L).   x0, conf: (N,) for the masks, row-major.   t, s: times before and after.
    threshold: reveals the surest mask of each sequence, and all whose conf is at least this
    (Fast-dLLM).   count: (B,), how many (default: Dream's `reveal_count`).
    A proposal can be [MASK] itself. Such a position stays masked [code].
    """
    score = torch.full(x.shape, -torch.inf, device=x.device).masked_scatter(masked, conf)  # (B, L)
    # Equal scores go from left to right [ours]. The authors' topk leaves their order open [code].
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)       # (B, L)
    if threshold is not None:
        chosen = (rank == 0) | (score >= threshold)                     # (B, L)
    elif algorithm == "origin":
        chosen = score < (1.0 if last else 1 - s / t)                   # a coin each, as Eq. 1
    else:
        count = reveal_count(masked.sum(-1), t, s, last) if count is None else count     # (B,)
        chosen = rank < count[:, None]
    return torch.where(masked & chosen, x.masked_scatter(masked, x0), x)


# -------------------------------------------------------------------------------------------------
# whole responses


def pad_prompts(cfg, prompt, gen_len, device="cpu"):
    """[padding | prompt | gen_len masks] for each prompt         §2.2 conditional generation

    cfg: DreamConfig.   prompt: (B, P) ids, or B lists of ids of any length. A mask inside a prompt
    is a place to fill, too.
    Returns x (B, L) and valid (B, L), False on padding, or None if there is none. Raises Refused
    for more tokens than the model takes.
    """
    rows = [torch.as_tensor(row).tolist() + gen_len * [cfg.mask_token_id] for row in prompt]
    L = max(map(len, rows))
    if L > cfg.max_position_embeddings:
        raise Refused(f"prompt and response are {L} tokens, the model takes "
                      f"{cfg.max_position_embeddings}: shorten one")
    if any(row[0] == cfg.mask_token_id for row in rows):
        raise Refused("position 0 is masked and has no position before it to be predicted from: "
                      "put a prompt there")
    x = [(L - len(row)) * [cfg.pad_token_id] + row for row in rows]
    valid = torch.tensor([[L - len(row)] for row in rows]) <= torch.arange(L)    # (B, L)
    return torch.tensor(x, device=device), None if valid.all() else valid.to(device)


def faded(plain, mixed, sequence, schedule, switch, left, start):
    """Soft masks with λ turned down by the schedule                                   App. C.9

    plain: (D,) the embedding of [MASK].   mixed: (N, D) with the full λ.
    sequence: (N,), of the batch. Each has its own time, so that it does not depend on the others
    [ours].   left: (B,), masks that remain.   start: (B,), how many there were. All on the host.
    Returns (N, D). The mix is linear in λ. So a share of λ is this share of the way from [MASK]
    to the full mix.
    """
    if schedule == "none":
        return mixed
    # Python's floats: in fp32, 3/15 is above 0.2, and the switch is strict. A row may have no mask.
    shares = [now / max(of, 1) for now, of in zip(left.tolist(), start.tolist())]
    gain = torch.tensor([time_gain(schedule, share, switch) for share in shares])        # (B,)
    gain = to_device(gain[sequence], mixed.device)[:, None]             # (N, 1)
    return torch.lerp(plain.float(), mixed.float(), gain).to(mixed.dtype)


def draws(generators, masked, real):
    """Two random numbers for each mask, (N, 2) float64 in [0, 1), row-major. None without a list.

    generators: a list with one CPU generator for each sequence of masked (B, L).
    real: (B, L), False on padding. Each generator draws two numbers for each of these positions,
    whatever is masked, so that a sequence is the same in any batch.
    """
    if not isinstance(generators, list):
        return None
    u = [torch.rand(n, 2, dtype=torch.float64, generator=g)
         for n, g in zip(real.sum(-1).tolist(), generators)]
    return torch.cat(u)[masked[real]]


@torch.no_grad()
def decode(model, x, steps, valid=None, schedule="none", switch=0.5, on_step=None,
           algorithm="entropy", generator=None, even=False, soft=True, passes=1, **pick):
    """Fill the masks of x in `steps` steps                                              Alg. 2

    model: TwoPass around any backbone. Without a soft mask, its feedback is binary.
    x: (B, L) ids.   soft: False decodes in binary.
    valid: (B, L), False on padding, for a backbone that takes it (default: there is none).
    schedule, switch: see `time_gain`.
    algorithm; pick: temperature, top_p, top_k, eos, eos_penalty, or choose: see `propose`.
    generator: one for Dream's draws, or a list with one per sequence, for `choose` and `random`.
    even: each step reveals its share of what is left, rounded up [ours]. So with as many steps as
        masks it is exactly one token a step (default: Dream's `reveal_count`). Needs a list of
        generators.
    passes: network calls in each step, each with the feedback of the one before.
    on_step(x, lam, guess, rows, h): called after every step. x, lam and guess are (B, L). At masks,
        lam is λ before the schedule, and guess the likeliest token, both of the prediction that is
        fed back. h (N, D) are its hidden states, and rows (N,) the positions masked before.
    Returns (B, L) ids without any mask, and nfe (B,), the network calls that each sequence needed.
    With a list of generators, or at temperature 0, a sequence does not depend on the rest of its
    batch. Raises Refused for settings that cannot be run. Checked against
    tests/oracles.py slow_decode and tests/oracles.py in_order.

    The host has a copy of x, so it knows the masks. It waits for this copy once in a pass.
    """
    net, mask_id, soft = model.net, model.mask_id, soft and model.sm is not None
    if passes < 1 or passes > 1 and not soft:
        raise Refused(f"passes={passes} must be at least 1, and without feedback no more than 1")
    (B, L), plain = x.shape, net.table[mask_id]                         # (D,)
    masked = x.cpu() == mask_id                                         # (B, L)  on the host
    real = torch.ones_like(masked) if valid is None else valid.cpu()    # (B, L)  on the host
    start = masked.sum(-1)                                              # (B,)    on the host
    check(int(start.max()), steps, algorithm, schedule=schedule, switch=switch, **pick)
    context = {} if valid is None else {"valid": valid}
    pick["generator"] = None if isinstance(generator, list) else generator
    times = torch.linspace(1, 1e-3, steps + 1)
    looks = plain.repeat(B * L, 1)                                      # (BL, D)  of each mask
    nfe = torch.zeros_like(start)                                       # (B,)

    def hidden():
        """The network, with soft masks where x is masked."""
        soft_masks = looks.view(B, L, -1)                               # (B, L, D)
        emb = torch.where((x == mask_id)[..., None], soft_masks, F.embedding(x, net.table))  # l.6
        return net.hidden(emb, rows, t, **context)                      # (N, D)             l.3

    for i in range(steps):
        last = i == steps - 1
        at = masked.flatten().nonzero().squeeze(1)                      # (N,)    on the host
        rows = to_device(at, x.device)                                  # (N,)
        t = to_device(masked.float().mean(-1), x.device)                # (B,)  the share of masks
        for _ in range(passes - 1):
            mixed = model.feedback(hidden())[0]                         # (N, D)
            looks[rows] = faded(plain, mixed, at // L, schedule, switch, masked.sum(-1), start)
        h = hidden()                                                    # (N, D)
        nfe += passes * masked.any(-1)
        # Where the model predicts [MASK], the last step takes the best real token [ours]. The
        # authors' code leaves masks in its answers.
        never = mask_id if last else None
        u, count = draws(generator, masked, real), None                 # (N, 2)
        if u is not None:
            where = "cpu" if x.device.type == "mps" else x.device       # MPS has no float64
            u = to_device(u, torch.device(where))
        x0, conf, *found = predictions(model, h, len(h), soft, never, algorithm, u=u, **pick)
        if even:
            count = to_device(-(-masked.sum(-1) // (steps - i)), x.device)      # (B,)  rounded up
            # From masks alone, a DiT predicts the same at every position. So chance chooses one,
            # not rounding errors, which differ from batch to batch [ours].
            blank = masked.all(-1, keepdim=True).expand_as(masked)[masked]       # (N,)
            conf = torch.where(to_device(blank, x.device), u[:, 1].to(conf), conf)       # (N,)
        x = reveal(x, x == mask_id, x0, conf, times[i], times[i + 1], last, None, algorithm,
                   count)                                               # (B, L)             l.5
        left = x.cpu() == mask_id                                       # (B, L)  on the host
        if soft:
            looks[rows] = faded(plain, found[0], at // L, schedule, switch, left.sum(-1), start)
        if on_step:
            lam, guess = torch.zeros(x.shape, device=x.device), x       # (B, L), (B, L)
            if soft:
                before, after = to_device(masked, x.device), x == mask_id
                lam = lam.masked_scatter(before, found[1]).where(after, lam)
                guess = guess.masked_scatter(before, found[2]).where(after, guess)
            on_step(x, lam, guess, rows, h)
        masked = left
    return x, nfe


@torch.no_grad()
def decode_blocks(model, x, gen_len, steps, block, cache="prefix", threshold=None, valid=None,
                  schedule="none", switch=0.5, on_step=None, algorithm="entropy", **pick):
    """Fill the last gen_len positions, block after block from the left    App. B.2, Fast-dLLM

    model: TwoPass around a Dream.   x, valid: from `pad_prompts`.   Others: see `decode`.
    on_step(x): called after every pass.   Returns (B, L) ids without any mask.
    steps: passes, shared by the blocks. With a threshold their number depends on the text.

    A block begins with a pass over everything. It reveals the block's first token whatever its
    confidence [code]: later passes may start there, and Dream predicts a token from the hidden
    state to its left. More passes follow until the block is full:

    cache     a later pass sees        and reuses, from the block's first pass, keys and values of
    none      everything               nothing
    prefix    the block and the rest   what is before the block
    dual      the block                what is before it, and what is after it, which goes stale

    A block with a single step is filled by its first pass [ours]: Fast-dLLM leaves all but one of
    its masks. The feedback is [ours], because theirs was not released: a mask has the feedback of
    the last pass that predicted it. So feedback crosses block boundaries, and with `dual` the masks
    after the block do not change, as their keys and values do not. Checked against
    tests/oracles.py slow_blocks.

    As in `decode`, the host has a copy of x and waits for it once in a pass.
    """
    net, mask_id, (B, L) = model.net, model.mask_id, x.shape
    masked = x.cpu() == mask_id                                         # (B, L)  on the host
    if masked[:, :L - gen_len].any():
        raise Refused(f"the prompt contains the mask token {mask_id}: blocks fill a response "
                      f"only, use block 0 to infill")
    check(gen_len, steps, algorithm, schedule=schedule, block=block, switch=switch, cache=cache,
          threshold=threshold, **pick)
    algorithm = algorithm if threshold is None else "maskgit_plus"
    times = torch.linspace(1, 1e-3, steps * block // gen_len + 1)       # of the steps of a block
    start, at = torch.full((B,), gen_len), torch.arange(L)              # (B,), (L,)  on the host
    starts = to_device(at, x.device)  # of this, a 0-d view is a start that nobody waits for
    plain = net.table[mask_id]                                          # (D,)
    looks = plain.repeat(B, L, 1)                                       # (B, L, D)  of each mask
    kv = None                                                           # keys and values
    for b in range(L - gen_len, L, block):
        for i in itertools.count():
            first, last = i == 0, threshold is None and i == len(times) - 2
            whole = first or cache == "none"
            lo, hi = 0 if whole else b, L if whole or cache == "prefix" else b + block
            end = b + 1 if first and not last else b + block
            part = slice(lo, hi)                                        # what the model sees
            opened = masked & (at >= b) & (at < end)                    # (B, L)  may be revealed
            # Others only get feedback. A sequence whose block is full waits, and keeps its own.
            others = masked & ~opened & opened.any(1, keepdim=True)     # (B, L)
            seen, emb = x[:, part], F.embedding(x[:, part], net.table)  # (B, hi − lo, D)
            emb = torch.where((seen == mask_id)[..., None], looks[:, part], emb)
            h, kv = net.trunk(emb, valid, kv if lo else None, starts[lo])       # (B, hi − lo, D)
            rows = opened[:, part].flatten().nonzero().squeeze(1)       # (n,)    on the host
            n = len(rows)
            if model.sm:
                rows = torch.cat([rows, others[:, part].flatten().nonzero().squeeze(1)])  # (N,)
            on_device = to_device(rows, x.device)                       # (N,)
            # A pass that has to reveal something takes a real token, not [MASK].
            never = mask_id if first or last or threshold is not None else None
            x0, conf, *found = predictions(model, net.before(h, on_device), n, bool(model.sm),
                                           never, algorithm, **pick)
            step = (times[i], times[i + 1], first or last) if threshold is None else ()
            x = reveal(x, to_device(opened, x.device), x0, conf, *step, threshold=threshold,
                       algorithm=algorithm)
            masked = x.cpu() == mask_id                                 # (B, L)  on the host
            if model.sm:
                mixed = faded(plain, found[0], rows // (hi - lo), schedule, switch,
                              masked.sum(-1), start)                    # (N, D)
                new = looks[:, part].flatten(0, 1).index_copy(0, on_device, mixed)
                looks[:, part] = new.view(B, hi - lo, -1)
            if on_step:
                on_step(x)
            if not masked[:, b:b + block].any():
                break
    return x


# -------------------------------------------------------------------------------------------------
# texts


def load_for_decoding(cfg):
    """The model that cfg names: (Dream, Tokenizer, SoftMask or None).

    Raises Refused for bad settings before anything large is read.
    """
    check(**asdict(cfg) | {"steps": cfg.steps or cfg.gen_len})
    given = {name: getattr(cfg, name) for name in OMEGA}
    with_omega(SoftMask(0), 0, **given)  # refuses what is out of range
    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    device = machine(cfg.device)[2]
    if cfg.dtype not in dtypes:
        raise Refused(f"dtype {cfg.dtype!r} is none of {', '.join(dtypes)}")
    if not cfg.model:
        raise Refused("no model: add --model=DIR")
    tok, model = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtypes[cfg.dtype])
    omega = load_adapter(model, cfg.adapter) if cfg.adapter else None
    sm = soft_mask(**omega) if omega else None
    sm = with_omega(sm, model.cfg.mask_token_id, **given)
    if cfg.schedule != "none" and sm and type(sm).mix is not SoftMask.mix:
        raise Refused(f"schedule {cfg.schedule} needs a mix that is linear in λ, and {cfg.adapter} "
                      f"was trained with {type(sm).__name__.lower()}: use --schedule=none")
    if cfg.merge:
        dora.merge_(model)
    if cfg.compile:
        model.compile_trunk()
    return model, tok, sm.to(device) if sm and cfg.soft else None


def feedback_label(cfg, sm):
    """The feedback of a run in words, so that results with other feedback are not mixed with it."""
    if sm:
        switch = f" {cfg.switch}" if "stepwise" in cfg.schedule else ""
        schedule = f", {cfg.schedule}{switch}" if cfg.schedule != "none" else ""
        arm = f", {type(sm).__name__.lower()}" if type(sm) is not SoftMask else ""
        given = "".join(f", {name}={getattr(cfg, name):g}" for name in OMEGA
                        if getattr(cfg, name) is not None)
        return f"SM k={sm.k or '|V|'}{arm}{given}{schedule}"
    return "SM off" if cfg.adapter and soft_mask_file(cfg.adapter) else "binary"


def cut(text, until):
    """The text, cut before the first of each of these strings, one after the other [code]."""
    for stop in until:
        text = text.split(stop)[0]
    return text


def answer(model, tok, sm, ids, cfg, until=(), on_step=None):
    """Decode one prompt as cfg says.

    ids: list; masks in it are filled, too.   until: what ends the text, see `cut`.
    Returns the text that was filled in, and {n: 1, nfe: passes, tokens: filled in, kept: those
    before the end token, seconds}. The draws are keyed by seed and prompt: an answer does not
    depend on what was asked before.
    """
    def count(x, *feedback):
        stats["nfe"] += 1
        if on_step:
            on_step(x)

    stats, begin = {"n": 1, "nfe": 0}, time.perf_counter()
    mask_id, eos, device = model.cfg.mask_token_id, model.cfg.eos_token_id, model.table.device
    key = hashlib.blake2b(repr((cfg.seed, ids)).encode(), digest_size=7).digest()
    generator = torch.Generator("cpu" if device.type == "mps" else device)
    generator.manual_seed(int.from_bytes(key, "big"))
    x, _ = pad_prompts(model.cfg, [ids], cfg.gen_len, device)           # (1, L)
    gaps = x == mask_id                                                 # (1, L)
    two, steps = TwoPass(model, sm, mask_id), cfg.steps or cfg.gen_len + ids.count(mask_id)
    names = ("schedule", "switch", "algorithm", "temperature", "top_p", "top_k", "eos_penalty")
    settings = {name: getattr(cfg, name) for name in names}
    settings |= {"generator": generator, "on_step": count, "eos": eos}
    if cfg.block:
        x = decode_blocks(two, x, cfg.gen_len, steps, cfg.block, cfg.cache, cfg.threshold,
                          **settings)
    else:
        x, _ = decode(two, x, steps, **settings)
    new = x[gaps].tolist()
    kept = new[:new.index(eos)] if eos in new else new
    stats |= {"tokens": len(new), "kept": len(kept), "seconds": time.perf_counter() - begin}
    return cut(tok.decode(kept), until), stats


def picture(tok, ids, cfg):
    """ids as text, ░ for a mask, nothing for the end tokens behind the answer."""
    text = ""
    for masked, part in itertools.groupby(ids, lambda i: i == cfg.mask_token_id):
        part = [i for i in part if i != cfg.eos_token_id]
        text += "░" * len(part) if masked else tok.decode(part)
    return text


def turn(cfg, model, tok, sm, ids, until, shown_from):
    """`answer`, while the user sees a bar, or the text as it fills."""
    drawn = cfg.show and sys.stdout.isatty()

    def watch(x):
        bar.update()
        if drawn:  # the screen cleared, then the text
            print("\x1b[H\x1b[J" + picture(tok, x[0, shown_from:].tolist(), model.cfg), flush=True)

    total = cfg.steps or cfg.gen_len + ids.count(model.cfg.mask_token_id)
    total = None if cfg.threshold else total
    with progress(total=total, unit="pass", leave=False, disable=drawn) as bar:
        return answer(model, tok, sm, ids, cfg, until, watch)


def typed_turns():
    """The lines of stdin that are not empty. On a terminal, a > asks for each."""
    sign = "> " if sys.stdin.isatty() else ""
    while True:
        print(sign, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line


def main(cfg):
    if sum(map(bool, (cfg.prompt, cfg.chat, cfg.infill))) != 1:
        raise Refused("nothing to do: give one of --prompt=…, --chat, --infill=…")
    cfg = replace(cfg, **{name: line_breaks(getattr(cfg, name))
                          for name in ("prompt", "infill", "stop")})
    before, gap, after = cfg.infill.partition("___")
    if cfg.infill and (not gap or "___" in after or cfg.block):
        raise Refused("--infill needs exactly one ___ where the model shall write, and --block=0")
    model, tok, sm = load_for_decoding(cfg)
    label = feedback_label(cfg, sm) + (f", ω_s = {sm.omega[0].item():.3g}" if sm else "")
    until = [stop for stop in cfg.stop.split("|") if stop]
    if not cfg.raw and not gap:
        until.append("<|im_end|>")
    messages = []
    for prompt in typed_turns() if cfg.chat else [cfg.prompt]:
        messages.append({"role": "user", "content": prompt.removesuffix("\n")})
        if gap:
            ids = tok.encode(before) + cfg.gen_len * [model.cfg.mask_token_id] + tok.encode(after)
            text, stats = turn(replace(cfg, gen_len=0), model, tok, sm, ids, until, 0)
        else:
            ids = tok.encode(prompt) if cfg.raw else tok.encode(tok.chat(messages), special=True)
            text, stats = turn(cfg, model, tok, sm, ids, until, len(ids))
        print(before + text + after)
        rate = stats["tokens"] / max(stats["seconds"], 1e-9)
        print(f"{stats['tokens']} tokens, {stats['kept']} before the end token; "
              f"NFE {stats['nfe']}, {stats['seconds']:.1f} s, {rate:.1f} tokens/s; {label}",
              file=sys.stderr)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    run(main, Config)
