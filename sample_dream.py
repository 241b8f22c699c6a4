# SPDX-License-Identifier: MIT
"""Decode with Dream: each pass reveals the surest tokens and soft-masks the rest.

    §2.2 conditional generation   pad_prompt       a response of [MASK]s after the prompt
    App. A, Alg. 2                sample.decode    the whole response at once
           l.5, §2.2 L/T          reveal_shares    the share of masks that each step reveals
           l.6, App. C.9          time_gain        a factor on λ that changes with time
    App. B.2 Fast-dLLM            decode_blocks    block by block, with cached keys and values

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import re
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

import dora
import launch
from data import rng
from dream import Dream, Tokenizer, load_adapter
from launch import Count, NotNegative, Refused, Share, Size, machine, progress, to_device
from mdlm import TwoPass
from sample import Pick, decode, indices, masks_left, propose, reveal, with_omega
from softmask import feed_back


@dataclass
class Decoding:
    """How to decode. lab/eval_dream.py has these settings, too."""
    model: str = "Dream-v0-Instruct-7B"  # folder of Dream, Dream-Coder, open-dCoder as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights: faster, the same up to rounding
    soft: bool = True               # false: no feedback, even if the adapter has an ω
    gen_len: Size = 256             # the paper's L: tokens of the response
    steps: Count = 0                # T (default: one for each mask). steps / gen_len: Eq. 4
    algorithm: Literal["entropy", "maskgit_plus", "topk_margin"] = "entropy"  # see Pick
    temperature: NotNegative = 0.1  # App. B.2; 0: argmax
    top_p: Share = 0.9              # App. B.2; 1: off
    # A factor on λ that changes over time, App. C.9
    schedule: Literal["none", "linear", "stepwise", "linear-late", "stepwise-late"] = "none"
    switch: Share = 0.5             # t' of the stepwise schedules: see `time_gain`
    block: Count = 0                # Fast-dLLM's block length; 0: the whole response at once
    cache: Literal["none", "prefix", "dual"] = "prefix"  # with block, see `decode_blocks`
    # Fast-dLLM's rule, in place of algorithm and steps. A pass reveals the surest token, and every
    # other with at least this probability. With block, only tokens of the block count, and its
    # first pass reveals one. Temperature and top_p come first: after them, even a token with a
    # small lead can have a probability of 1 (REPRODUCE.md, 9).
    threshold: Share | None = None
    code: str = ""                  # a Python file to run first: its SoftMask replaces ours
    # Give all three or none. They replace the adapter's SoftMask, with τ = 1. Without an adapter,
    # they turn SM on (k = 3) in a model not trained with it. (Not tried here: see RECIPES.md.)
    omega_s: float | None = None
    omega_a: float | None = None
    omega_b: float | None = None
    seed: int = 0
    device: str = "auto"            # cuda, else mps, else cpu
    dtype: launch.DType = "auto"    # (default: as stored)
    compile: bool | None = None     # takes a minute (default: off, but on for CUDA in eval_dream)


@dataclass
class Config(Decoding):
    # In prompt and infill, the two characters \n stand for a line break.
    prompt: str = ""                # one user turn
    chat: bool = False              # user turns from stdin, one per line
    # The model fills the first blank ___ in this text. Without a blank, it continues the text. No
    # chat template is added, so this works with a base model, too: --infill="def f(x):\n"
    infill: str = ""


def pad_prompt(cfg, prompt, gen_len):
    """A list of ids → x (1, L): these, then gen_len [MASK]s          §2.2 conditional generation

    For an infill, gen_len is 0, and the masks are among the ids.
    """
    x = torch.tensor([prompt + gen_len * [cfg.mask_token_id]])          # (1, L)
    if x[0, 0] == cfg.mask_token_id:
        raise Refused("position 0 is masked, and nothing before it can predict it: put text first")
    return x


def reveal_shares(steps):
    """The share of the masks that each step reveals: 1 − s/t, from time t to s < t        §2.2, L/T

    The number of tokens is rounded down, and the last step reveals all that are left. App. B.2 says
    that T = gen_len steps reveal one token each. For 768, it is 0, 1, …, 1, 2 here [code].
    """
    times = torch.linspace(1, 1e-3, steps + 1)                          # (T + 1,)
    shares = 1 - times[1:] / times[:-1]                                 # (T,)  on the CPU
    shares[-1] = 1
    return shares


def time_gain(t, schedule, switch):
    """The factor on λ at this point of decoding, from 0 to 1                               App. C.9

    t: time left: the share of the initial masks that are still masked [code], not t/T. It is taken
        after the reveal, so "linear" can start below 1 [code].   switch: t' of App. C.9.
    """
    gains = {"none": 1.0,
             "linear": t,                          # SM → binary, gradually
             "stepwise": float(t > switch),        # SM → binary, abruptly (strictly above [code])
             "linear-late": 1 - t,                 # binary → SM, gradually
             "stepwise-late": float(t <= switch)}  # binary → SM, abruptly
    return gains[schedule]


@torch.no_grad()
def decode_blocks(model, x, shares, block, cache, pick, gain=lambda left: 1.0,
                  on_step=lambda *_: None):
    """Fill the masks at the end of x, block by block                  Alg. 2, App. B.2, Fast-dLLM

    model: TwoPass, see `sample.decode`.   x: (1, L), from `pad_prompt`; its prompt has no masks.
    shares: one for each pass over a block; with a threshold, 1 for each token of a block. If there
        are several, the first is not used: that pass reveals one token, see below.
    Other arguments, and the result: see `sample.decode`.

    The first pass of a block computes all positions. Later passes compute the parts marked =. For
    those marked ·, they reuse the first pass's keys and values:

                     prompt and blocks before    block    blocks after
        none         ========================    =====    ============
        prefix       ························    =====    ============
        dual         ························    =====    ············

    The first pass reveals the block's first token, however unsure the model is: the state before
    the block predicts this token, and with a cache, only this pass computes that state. Fast-dLLM's
    code does so without a cache, too. If a block has one step, that step fills it [ours], where
    Fast-dLLM's code would leave masks.

    The authors' SM with Fast-dLLM is not released. Here, each mask keeps the feedback from the last
    pass that predicted it, also across blocks [ours].
    """
    model.eval()
    net = model.net
    sm = model.sm
    L = x.shape[1]
    masked = x == model.mask_id                                         # (1, L)  on the CPU
    n_masks = masked.sum().item()
    x = to_device(x, net.table.device)                                  # (1, L)
    emb = F.embedding(x, net.table)                                     # (1, L, D)             l.1
    kv = None
    for first in range(L - n_masks, L, block):                          #                 Fast-dLLM
        end = first + block
        later = {"none": (0, L), "prefix": (first, L), "dual": (first, end)}[cache]
        for i, share in enumerate(shares):                              #                l.2, l.7-8
            # Prompt and earlier blocks have no masks, so the first n masks of x are this block's.
            n = masked[0, first:end].sum().item()
            if n == 0:
                break
            if i == 0 and len(shares) > 1:
                n = 1  # only the block's first mask: see the docstring                 l.5
                share = 1
            lo, hi = later if i else (0, L)                             # what the pass computes
            # Masks of later blocks are predicted only for their feedback.
            stop = hi if sm else end
            b, l = indices(masked[:, :stop], x.device)                  # 2 × (N,)
            # lo = 0: a whole pass, without cached keys. Else no mask is left at `first`: l > lo.
            h, kv = net.trunk(emb[:, lo:hi], kv if lo else None, lo)    # (1, hi − lo, D)       l.3
            h = net.shift(h, (b, l - lo))                               # (N, D)                l.3
            logits = net.head(h)                                        # (N, V)                l.3
            x0, conf = propose(logits[:n], model.mask_id, share == 1, pick)  # 2 × (n,)       l.4-5
            x = reveal(x, (b[:n], l[:n]), x0, conf, share, pick.threshold)  # (1, L)            l.5
            masked = masks_left(x, conf, model.mask_id)                 # (1, L)  on the CPU
            left = masked.sum().item() / n_masks
            predicted = sm(logits) if sm else None                      # (N,), 2 × (N, k)      l.6
            emb, lam = feed_back(sm, net.table, emb, x, (b, l), predicted, gain(left))  #       l.6
            on_step(x, lam, (b, l), h, x[b, l] != model.mask_id)
    return x.cpu()


def check_blocks(gen_len, steps, block, threshold):
    if block and (gen_len % block or (threshold is None and steps % (gen_len // block))):
        raise Refused(f"blocks of {block} do not divide gen_len {gen_len} and steps {steps} evenly")


def load_for_decoding(cfg):
    """The model that cfg names: Dream, Tokenizer, and SoftMask or None."""
    check_blocks(cfg.gen_len, cfg.steps or cfg.gen_len, cfg.block, cfg.threshold)
    device = machine(cfg.device).device
    dtype = None if cfg.dtype == "auto" else getattr(torch, cfg.dtype)  # None: as stored
    tok = Tokenizer(cfg.model)
    model = Dream.load(cfg.model, device, dtype)
    own = launch.soft_mask_class(cfg.code)
    sm = load_adapter(model, cfg.adapter, own) if cfg.adapter else None
    sm = with_omega(sm, own, model.cfg.mask_token_id, cfg)
    if cfg.schedule != "none" and not sm:
        raise Refused(f"--schedule={cfg.schedule} scales the feedback, but there is none")
    if cfg.merge:
        change = dora.merge_(model)
        if 1e-6 < change < 1e-3 and model.table.dtype != torch.float32:
            print(f"the adapter changes weights by {change:.0e} at most, and {model.table.dtype} "
                  "rounds much of it away: --merge=False keeps all", file=sys.stderr)
    if cfg.compile:  # one graph for whole sequences, another for cached parts
        model.trunk = torch.compile(model.trunk, dynamic=True)
    return model, tok, sm and sm.to(device)


def answer(model, tok, sm, ids, cfg, until=(), on_step=lambda *_: None):
    """The text that fills the masks of a prompt, and {"nfe", "tokens", "kept", "seconds"}.

    ids: of the prompt, a list.   until: the text ends before the first of these strings [code].
    kept: tokens before the end token.
    """
    nfe = 0

    def count(*now):
        nonlocal nfe
        nfe += 1
        on_step(*now)

    begin = time.perf_counter()
    two_pass = TwoPass(model, sm, model.cfg.mask_token_id)
    x = pad_prompt(model.cfg, ids, cfg.gen_len)                         # (1, L)
    masked = x == two_pass.mask_id                                      # (1, L)
    # Seeded by the prompt, too, so that answers do not depend on the order of the prompts.
    pick = Pick(cfg.algorithm, cfg.temperature, cfg.top_p, cfg.threshold, rng(cfg.seed, ids))
    gain = partial(time_gain, schedule=cfg.schedule, switch=cfg.switch)
    n_masks = int(masked.sum())
    n = cfg.block or n_masks  # masks that are filled together
    shares = n * [1]
    if cfg.threshold is None:
        shares = reveal_shares((cfg.steps or n_masks) * n // n_masks)
    if cfg.block:
        x = decode_blocks(two_pass, x, shares, cfg.block, cfg.cache, pick, gain, count)
    else:
        x = decode(two_pass, x, shares, pick, gain, count)
    new = x[masked].tolist()
    ends = (i for i, token in enumerate(new) if token in model.cfg.eos_token_id)
    kept = new[:next(ends, None)]
    text = tok.decode(kept)
    for stop in until:
        text = text.split(stop)[0]
    return text, {"nfe": nfe, "tokens": len(new), "kept": len(kept),
                  "seconds": time.perf_counter() - begin}


def main(cfg):
    if [bool(cfg.prompt), cfg.chat, bool(cfg.infill)].count(True) != 1:
        raise Refused("give one of --prompt=TEXT, --chat and --infill=TEXT")
    if cfg.threshold is not None and cfg.steps:
        raise Refused("--threshold decides how many steps there are: leave --steps out")
    if cfg.infill and cfg.block:
        raise Refused("blocks fill a response only: use --block=0 to infill")
    model, tok, sm = load_for_decoding(cfg)
    mask_id = model.cfg.mask_token_id
    text = (cfg.infill or cfg.prompt).replace("\\n", "\n")

    def ask(ids, cfg, until):
        """The answer to the ids of a prompt. What it cost is printed on stderr."""
        total = cfg.steps or ids.count(mask_id) + cfg.gen_len
        with progress(total=total, unit="pass", leave=False) as bar:
            text, stats = answer(model, tok, sm, ids, cfg, until, lambda *_: bar.update())
        print("{tokens} tokens ({kept} before the end) in {nfe} passes and {seconds:.1f} s, "
              "{speed:.1f} tokens per second; {feedback}".format(
                  **stats, speed=stats["tokens"] / stats["seconds"],
                  feedback=sm or "without feedback"), file=sys.stderr)
        return text

    def encode(text, special=False):
        ids = tok.encode(text, special=special)
        if mask_id in tok.encode(text, special=True):
            raise Refused(f"{tok.decode([mask_id])} would become a [MASK]: use --infill, with ___")
        return ids

    if cfg.infill:
        before, *rest = re.split("_{3,}", text, maxsplit=1)
        after = "".join(rest)
        ids = encode(before) + cfg.gen_len * [mask_id] + encode(after)
        print(before + ask(ids, replace(cfg, gen_len=0), until=()) + after)
    else:
        turns = (line.removesuffix("\n") for line in sys.stdin) if cfg.chat else [text]
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            reply = ask(encode(tok.chat(messages), special=True), cfg, ["<|im_end|>"])
            messages.append({"role": "assistant", "content": reply})
            print(reply)


if __name__ == "__main__":
    launch.run(main, Config)
