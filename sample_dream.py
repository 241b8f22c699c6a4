# SPDX-License-Identifier: MIT
"""Decoding with Dream: fill a masked response, some tokens per pass, with soft-masked feedback.

    §2.2 conditional generation   pad_prompts       a response of [MASK]s behind each prompt
    §2.2 unmasking strategies     propose, reveal   the surest tokens first, a counted number a pass
    App. A, Alg. 2; App. C.9      decode            the whole response at once
    App. B.2 Fast-dLLM            decode_blocks     block after block, with cached keys and values

Dream counts tokens where MDLM flips coins (sample.py), so the two samplers share soft-masking and
nothing else. Tensors with a vocabulary axis are (n, V), a row per masked position, and exist only
inside `in_chunks`.

Not here: training, benchmarks (eval_dream.py), re-masking (Dream never takes a token back).

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import hashlib
import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import dora
from dream import Dream, Tokenizer, load_adapter, soft_mask_file
from launch import Refused, machine, run
from mdlm import in_chunks
from softmask import SoftMask, time_gain

ALGORITHMS = ("entropy", "maskgit_plus", "topk_margin", "origin")  # Dream's names


@dataclass
class Decoding:
    model: str = ""                 # folder of a Dream or Dream-Coder model, as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights; false: slower, the same up to rounding
    soft: bool = True               # false: binary feedback, even if the adapter has an ω
    gen_len: int = 256              # L, tokens of the response
    steps: int = 0                  # T (default: gen_len). NFE budget = steps / gen_len, Eq. 4
    algorithm: str = "entropy"      # first come low entropy, high p (maskgit_plus), a large
                                    # topk_margin, or any (origin)
    temperature: float = 0.1        # App. B.2; 0: argmax
    top_p: float = 0.9              # App. B.2; Dream's rule, see `filtered`
    top_k: int = 0                  # 0: off, as the authors pass it; the hub's own default is 50 [code]
    schedule: str = "none"          # App. C.9: none, linear, stepwise, linear-late, stepwise-late
    switch: float = 0.5             # t', the share of masks at which the stepwise schedules switch
    block: int = 0                  # Fast-dLLM's block length; 0: the whole response at once
    cache: str = "prefix"           # with block: none, prefix, dual
    threshold: float | None = None  # with block: reveal all tokens that are as sure as this, not n
    seed: int = 0
    device: str = "auto"            # cuda > mps > cpu
    dtype: str = "auto"             # auto: as stored; or float32, bfloat16


@dataclass
class Config(Decoding):
    prompt: str = ""                # one user turn
    raw: bool = False               # the prompt is text to continue, without the chat template
    chat: bool = False              # user turns from stdin, one a line
    infill: str = ""                # text with one ___ for the model to write; \n is a new line
    stop: str = ""                  # the response ends before any of these, separated by |; \n likewise
    show: bool = True               # on a terminal: draw the text as it fills


def check(gen_len, steps, algorithm="entropy", temperature=0.0, top_p=1.0, top_k=0,
          schedule="none", block=0, switch=0.5, cache="prefix", threshold=None, **others):
    """All that can be wrong with the settings themselves. Raises Refused."""
    try:
        time_gain(schedule, 1.0)
    except ValueError as e:
        raise Refused(str(e))
    blocks = gen_len // block if block > 0 else 1
    for wrong, sentence in (
        (gen_len < 1, f"gen_len {gen_len} leaves nothing to fill: it must be at least 1"),
        (not 1 <= steps <= gen_len,
         f"steps {steps} must be between 1 and gen_len {gen_len}, a token for each step"),
        (algorithm not in ALGORITHMS,
         f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}"),
        (not 0 <= temperature < math.inf,
         f"temperature {temperature} must be at least 0, which is the argmax, and finite"),
        (not 0 < top_p <= 1, f"top_p {top_p} must be in (0, 1]; 1 is off"),
        (top_k < 0, f"top_k {top_k} must not be negative; 0 is off"),
        (not 0 <= switch <= 1, f"switch {switch} must be in [0, 1]: it is a share of masks"),
        (cache not in ("none", "prefix", "dual"),
         f"unknown cache {cache!r}: use none, prefix or dual"),
        (block < 0 or block and gen_len % block,
         f"gen_len {gen_len} is not a multiple of block {block}: change one of them"),
        (threshold is not None and not 0 < threshold <= 1,
         f"threshold {threshold} must be in (0, 1]: it is a probability"),
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
    (sample.nucleus): the two rules give different texts and must not be exchanged.
    """
    if temperature > 0:
        logits = logits / temperature
    if top_p < 1:
        p = logits.softmax(-1)                                          # (n, V)
        for m in (min(256, p.shape[-1]), p.shape[-1]):  # sorting all of V is slow and rarely needed
            ranked, order = p.topk(m)                                   # (n, m)
            if (ranked.sum(-1) > top_p).all():
                break
        before = F.pad(ranked.cumsum(-1)[:, :-1], (1, 0))               # (n, m)  of likelier tokens
        keep = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before <= top_p)
        logits = logits.masked_fill(~keep, -torch.inf)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]        # (n, 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1)


def propose(logits, algorithm="entropy", temperature=0.0, top_p=1.0, top_k=0, generator=None,
            never=None):
    """A token and a confidence for every masked row                                 Alg. 2 l.4

    logits: (n, V) fp32.   never: a token id that is replaced by the best other one (default: none).
    generator: of the draws, if there are any.   Returns x0 (n,), conf (n,), the highest goes first.

    Both come from the filtered probabilities, so temperature and top-p also decide the order
    [code].
    """
    p = filtered(logits, temperature, top_p, top_k)                     # (n, V)
    if temperature > 0:
        # In float64, as fp32 noise cuts the tail; where the generator is, as MPS has no float64.
        drawn = torch.multinomial(p.to(generator.device, torch.float64), 1, generator=generator)
        x0 = drawn[:, 0].to(p.device)                                   # (n,)
    else:
        x0 = p.argmax(-1)                                               # (n,)
    if algorithm == "entropy":
        conf = (p * (p + 1e-10).log()).sum(-1)                          # (n,)  −H, guarded [code]
    elif algorithm == "maskgit_plus":
        conf = p.gather(-1, x0[:, None])[:, 0]
    elif algorithm == "topk_margin":
        conf = -p.topk(2).values.diff()[:, 0]
    else:  # origin: chance
        conf = torch.rand(len(x0), generator=generator, device=generator.device).to(p.device)
    if never is not None:
        first, second = logits.topk(2).indices.unbind(-1)               # (n,), (n,)
        x0 = torch.where(x0 == never, torch.where(first == never, second, first), x0)
    return x0, conf


def look(net, h, sm, **pick):
    """What one pass says of its masks, a few rows of logits at a time                Alg. 2 l.4, l.6

    h: (N, D) hidden states.   pick: arguments of `propose`.
    Returns x0 (N,), conf (N,) and, with an sm, how these masks look next (N, D): from the logits
    themselves, without temperature and top-p [code].
    """
    def rows(h):
        logits = net.head(h)                                            # (n, V)
        found = propose(logits, **pick)                                 # (n,), (n,)
        return (*found, sm.mix(net.table, *sm(logits))) if sm else found
    return in_chunks(rows, h, V=len(net.table))


def soften(net, h, sm):
    """(N, D) → (N, D), only the last of the three: masks that this pass cannot reveal        l.6"""
    return in_chunks(lambda h: sm.mix(net.table, *sm(net.head(h))), h, V=len(net.table))


def reveal_count(masked, t, s, last):
    """How many of `masked` (B,) tokens a step from time t to s < t reveals       §2.2, n ≈ L/T

    Returns (B,) int64, rounded down, so early steps reveal less and the last one takes what is
    left: with T = L not one token each (App. B.2) but 0, 1, …, 1, 2 [code].
    """
    return masked if last else (masked * (1 - s / t)).long()


def reveal(x, masked, x0, conf, t=1.0, s=0.0, last=False, threshold=None, algorithm="entropy"):
    """x with some of its masks replaced by their proposals                          Alg. 2 l.5

    x, masked: (B, L).   x0, conf: (N,) for the masks, row-major.   t, s: times before and after.
    threshold: instead of a count, the surest mask of each sequence and all that are as sure as this
    (Fast-dLLM). A proposal can be [MASK] itself; such a position stays masked [code].
    """
    score = torch.full(x.shape, -torch.inf, device=x.device).masked_scatter(masked, conf)  # (B, L)
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)       # (B, L)  0: surest
    if threshold is not None:
        chosen = (rank == 0) | (score >= threshold)                     # (B, L)
    elif algorithm == "origin":
        chosen = score < (1.0 if last else 1 - s / t)                   # a coin per token, as Eq. 1
    else:
        chosen = rank < reveal_count(masked.sum(-1), t, s, last)[:, None]
    return torch.where(masked & chosen, x.masked_scatter(masked, x0), x)
