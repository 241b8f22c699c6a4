# SPDX-License-Identifier: MIT
"""Decode with Dream: each pass reveals the surest tokens and soft-masks the rest.

    §2.2 conditional generation   pad_prompt       a response of [MASK]s after the prompt
    App. A, Alg. 2                decode           the whole response at once
           l.4, App. B.2          propose          a token for each mask, and how sure the model is
           l.5, §2.2 unmasking    reveal           the surest of these tokens, placed in x
           l.6                    SoftMask         soft masks for the others (softmask.py)
           l.6, App. C.9          time_gain        a factor on their λ, if it is to change with time
    App. B.2 Fast-dLLM            decode_blocks    block after block, with cached keys and values

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import re
import sys
import time
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

import dora
import launch
from data import seed_of
from dream import Dream, Tokenizer, load_adapter
from launch import Count, Refused, Share, Size, machine, progress, to_device
from mdlm import TwoPass
from sample import categorical, likeliest, with_omega

Algorithm = Literal["entropy", "maskgit_plus"]  # Dream's names: lowest H first, highest p first


@dataclass
class Decoding:
    model: str = "Dream-v0-Instruct-7B"  # folder of Dream, Dream-Coder, open-dCoder as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights: faster, the same up to rounding
    soft: bool = True               # false: no feedback, even if the adapter has an ω
    gen_len: Size = 256             # the paper's L: tokens of the response
    steps: Count = 0                # T (default: gen_len). NFE budget = steps / gen_len, Eq. 4
    algorithm: Algorithm = "entropy"
    temperature: float = 0.1        # App. B.2; 0: argmax
    top_p: Share = 0.9              # App. B.2; 1: off. Dream's rule, see `filtered`
    schedule: Literal["none", "linear", "stepwise", "linear-late", "stepwise-late"] = "none"
    switch: Share = 0.5             # t' of the stepwise schedules, App. C.9: see `time_gain`
    block: Count = 0                # Fast-dLLM's block length; 0: the whole response at once
    cache: Literal["none", "prefix", "dual"] = "prefix"  # with block, see `decode_blocks`
    # With block: whatever the algorithm, reveal all tokens with at least this probability p. After
    # temperature and top_p, a small lead can make p 1 (REPRODUCE.md, "Where this differs", 5).
    threshold: Share | None = None
    # These replace the adapter's ω. Without an adapter, --omega_s=0.3 turns SM on, with k = 3, in a
    # model that never saw feedback. Add --omega_a=1 --omega_b=-3, or λ is near 0 where H is above 1
    # nat. Not tried here. At four tokens a step, arXiv 2609.37391 reports, for a frozen Dream-7B on
    # HumanEval: 17.7 % without feedback, 23.8 % with a linear mix, 32.3 % with one on the sphere.
    code: str = ""                  # a Python file to run first: its SoftMask replaces ours
    omega_s: float | None = None
    omega_a: float | None = None
    omega_b: float | None = None
    seed: int = 0
    device: str = "auto"            # cuda, else mps, else cpu
    dtype: launch.DType = "auto"    # auto: as stored
    compile: bool | None = None     # takes a minute (default: off, but on for CUDA in eval_dream)


@dataclass
class Config(Decoding):
    # In prompt and infill, the two characters \n stand for a line break.
    prompt: str = ""                # one user turn
    chat: bool = False              # user turns from stdin, one per line
    # The model replaces the first blank in this text, of three or more _, or continues it if there
    # is none. No chat template is added, so a base model can do it, too: --infill="def f(x):\n"
    infill: str = ""


class Pick(NamedTuple):
    """How a pass picks tokens                                             Alg. 2 l.4-5, App. B.2"""
    algorithm: Algorithm = "entropy"
    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None  # needed at a temperature above 0


def pad_prompt(cfg, prompt, gen_len):
    """A list of ids → x (L,): these, then gen_len [MASK]s            §2.2 conditional generation"""
    x = torch.tensor(prompt + gen_len * [cfg.mask_token_id])            # (L,)
    # `decode` fills masks inside the prompt, too.
    if x[0] == cfg.mask_token_id:
        raise Refused("position 0 is masked, and nothing before it can predict it: put text first")
    return x


@torch.no_grad()
def decode(model, x, steps, pick, schedule="none", switch=0.5, on_step=lambda x: None):
    """Fill the masks of x in `steps` steps                                        Alg. 2, App. C.9

    model: TwoPass, of a backbone that ignores t.   x: (L,) ids on the CPU.   pick: Pick.
    schedule, switch: see `time_gain`.   on_step(x): called after every step.
    Returns (L,) ids without any mask, on the device.
    """
    net, sm, mask_id, table = model.net, model.sm, model.mask_id, model.net.table
    masked = x == mask_id                                               # (L,)  on the host
    start, x = int(masked.sum()), to_device(x, table.device)            # (L,)
    emb = F.embedding(x, table)                                         # (L, D)                l.1
    for share in reveal_shares(steps):                                  #                       l.2
        masks = to_device(masked.nonzero()[:, 0], x.device)             # (N,)
        logits = net.head(net.hidden(emb[None], (0, masks)))            # (N, V)                l.3
        x0, conf = propose(logits, pick, mask_id, forced=share == 1)    # 2 × (N,)              l.4
        x = reveal(x, masks, x0, conf, share)                           # (L,)                  l.5
        masked = masks_left(x, conf, mask_id)                           # (L,)  on the host
        # The next step sees the revealed tokens, and soft masks where [MASK] is left.
        emb[masks] = F.embedding(x[masks], table)                       # (N, D)
        if sm:
            gain = time_gain(schedule, masked.sum().item() / max(1, start), switch)
            lam, ids, pi = sm(logits)                                   # (N,), 2 × (N, k)
            soft = sm.mix(table, gain * lam, ids, pi)                   # (N, D)                l.6
            emb[masks] = torch.where((x[masks] == mask_id)[:, None], soft, emb[masks])
        on_step(x)
    return x


def propose(logits, pick, mask_id, forced=False):
    """A token for each mask, and how sure the model is of it                            Alg. 2 l.4

    logits: (n, V). Temperature and top-p change tokens and conf, but not the soft masks [code].
    forced: every mask that this pass may reveal must be filled. So where the model predicts [MASK]
    itself, take the best other token [ours]. The authors' code leaves masks in its answers.
    Returns x0 (n,) and conf (n,). The token with the highest conf is revealed first.
    """
    p = filtered(logits, pick.temperature, pick.top_p)                  # (n, V)
    x0 = p.argmax(-1)                                                   # (n,)
    if pick.temperature > 0:
        source = pick.generator
        u = torch.rand(len(p), generator=source, device=source.device, dtype=torch.float64)  # (n,)
        x0 = categorical(p, u).clamp_max(p.shape[1] - 1)                # (n,)  it is V if p is NaN
    if forced:  # before conf, because a threshold must test the token that is written
        first, second = logits.topk(2).indices.unbind(-1)               # 2 × (n,)
        best = torch.where(first == mask_id, second, first)             # (n,)
        x0 = torch.where(x0 == mask_id, best, x0)                       # (n,)
    if pick.algorithm == "entropy":
        # −H of what the filter leaves [code], guarded against log 0. At App. B.2's settings, it can
        # leave a single token, with H = 0.
        conf = (p * (p + 1e-10).log()).sum(-1)                          # (n,)
    elif pick.algorithm == "maskgit_plus":
        conf = p.gather(-1, x0[:, None])[:, 0]                          # (n,)
    else:
        raise ValueError(f"no algorithm is called {pick.algorithm!r}")
    return x0, conf


def filtered(logits, temperature=0.0, top_p=1.0):
    """Probabilities (n, V) of logits after temperature and top-p, in this order [code]  App. B.2"""
    scaled = logits / temperature if temperature > 0 else logits        # (n, V)
    p = scaled.softmax(-1)                                              # (n, V)
    if top_p == 1:
        return p
    # The token at which the sum crosses top_p is kept here, and dropped by sample.nucleus.
    top, ids = likeliest(p, top_p)                                      # 2 × (n, m)
    before = F.pad(top.cumsum(-1)[:, :-1], (1, 0))                      # (n, m)  total before each
    p = torch.zeros_like(p).scatter(-1, ids, top.masked_fill(before > top_p, 0))
    return p / p.sum(-1, keepdim=True)


def reveal(x, masks, x0, conf, share=1.0, threshold=None):
    """x (L,) with the surest proposals written into it                            Alg. 2 l.5, §2.2

    masks: (n,) positions that may be revealed.   x0, conf: (n,) from `propose`.
    share: of these masks, see `reveal_shares`.   threshold: instead of a share, reveal the surest
    token, and all with at least this conf (Fast-dLLM).
    A proposal can be [MASK] itself. Then the position stays masked [code].
    """
    # 0 for the surest. Ties go left to right [ours]; in the authors' topk, in no fixed order.
    rank = conf.argsort(descending=True, stable=True).argsort()         # (n,)
    chosen = rank < int(len(masks) * share)                             # (n,)
    if threshold is not None:
        chosen = (rank == 0) | (conf >= threshold)                      # (n,)
    return x.index_put((masks,), torch.where(chosen, x0, x[masks]))     # (L,)


def masks_left(x, conf, mask_id):
    """Where x (L,) is [MASK], on the host. Raises Refused if the logits behind conf are broken."""
    both = torch.cat((x, conf.isnan().any()[None])).cpu()               # (L + 1,)  a host sync
    if both[-1]:
        raise Refused("the model's logits are not finite: try --dtype=float32 or other weights")
    return both[:-1] == mask_id                                         # (L,)


def reveal_shares(steps):
    """The share of the masks that each step reveals: 1 − s/t, from time t to s < t        §2.2, L/T

    The number of tokens is rounded down, and the last step reveals all that are left. App. B.2 says
    that with T = L, each step reveals one token. Here it is 0, 1, …, 1, 2 for L = 768 [code].
    """
    times = torch.linspace(1, 1e-3, steps + 1)                          # (T + 1,)
    shares = 1 - times[1:] / times[:-1]                                 # (T,)  on the host
    shares[-1] = 1
    return shares


def time_gain(schedule, t, switch):
    """The factor on λ at this point of decoding, from 0 to 1                               App. C.9

    t: time left: the share of the initial masks that are still masked [code], not t/T. It is taken
        after a reveal, so the first gain of "linear" is below 1 [code].   switch: t' of App. C.9.
    """
    gains = {"none": 1.0,
             "linear": t,                          # SM → binary, fading
             "stepwise": float(t > switch),        # SM → binary, abruptly (strictly above [code])
             "linear-late": 1 - t,                 # binary → SM, fading in
             "stepwise-late": float(t <= switch)}  # binary → SM, abruptly
    return gains[schedule]


@torch.no_grad()
def decode_blocks(model, x, gen_len, steps, block, cache="prefix", threshold=None, *, pick,
                  schedule="none", switch=0.5, on_step=lambda x: None):
    """Fill the last gen_len positions, block after block from the left        App. B.2, Fast-dLLM

    x: from `pad_prompt`.   steps: passes, divided among the blocks. With a threshold (see
    `reveal`), their number depends on the text.   Other arguments, and the result: see `decode`.

    The first pass of a block computes all positions. What later ones compute (=), and where they
    reuse the first one's keys and values (·), depends on the cache:

                     prompt and blocks before    block    blocks after
        none         ========================    =====    ============
        prefix       ························    =====    ============
        dual         ························    =====    ············

    The first pass reveals the block's first token, however unsure the model is [code], because with
    a cache later passes do not compute the state that predicts it. A block with one step is filled
    by this step [ours]. Fast-dLLM would leave all but one of its masks.
    Each mask has the feedback of the last pass that predicted it, across blocks, too [ours].
    """
    net, sm, mask_id, table = model.net, model.sm, model.mask_id, model.net.table
    L, masked = len(x), x == mask_id                                    # (L,)  on the host
    if masked[:L - gen_len].any():
        raise Refused("blocks fill a response only: use --block=0 to infill")
    check(gen_len, steps, block, threshold)
    if threshold is not None:
        pick = pick._replace(algorithm="maskgit_plus")
        shares = torch.ones(block)  # only counts the passes: each reveals at least one token
    else:
        shares = reveal_shares(steps * block // gen_len)
        shares[0] = 1  # all that the first pass may reveal: one token, unless it is the only pass
    start, x = int(masked.sum()), to_device(x, table.device)            # (L,)
    emb, kv = F.embedding(x, table), None                               # (L, D)                l.1
    for first in range(L - gen_len, L, block):
        end = first + block
        later = {"none": (0, L), "prefix": (first, L), "dual": (first, end)}[cache]
        for i, share in enumerate(shares):                              #                       l.2
            lo, hi = later if i else (0, L)                             # what the pass computes
            # The first n masks may be revealed. The others only get feedback.
            n = 1 if i == 0 and len(shares) > 1 else int(masked[first:end].sum())
            masks = masked[:hi].nonzero()[:, 0]                         # (N,)  on the host
            masks = to_device(masks if sm else masks[:n], x.device)     # (N,)
            # lo = 0 computes all afresh. With a cache, lo ≥ first ≥ 1: no prompt is empty.
            h, kv = net.trunk(emb[None, lo:hi], kv if lo else None, lo)  # (1, hi − lo, D)      l.3
            logits = net.head(net.predictors(h, (0, masks - lo)))       # (N, V)                l.3
            x0, conf = propose(logits[:n], pick, mask_id, share == 1)   # 2 × (n,)              l.4
            x = reveal(x, masks[:n], x0, conf, share, threshold)        # (L,)                  l.5
            masked = masks_left(x, conf, mask_id)                       # (L,)  on the host
            emb[masks] = F.embedding(x[masks], table)                   # (N, D)
            if sm:
                gain = time_gain(schedule, masked.sum().item() / max(1, start), switch)
                lam, ids, pi = sm(logits)                               # (N,), 2 × (N, k)
                soft = sm.mix(table, gain * lam, ids, pi)               # (N, D)                l.6
                emb[masks] = torch.where((x[masks] == mask_id)[:, None], soft, emb[masks])
            on_step(x)
            if not masked[first:end].any():
                break
    return x


def check(gen_len, steps, block, threshold):
    if threshold is not None and not block:
        raise Refused(f"threshold {threshold} works on blocks: add --block=32")
    if block and (gen_len % block or (threshold is None and steps % (gen_len // block))):
        raise Refused(f"blocks of {block} cannot share gen_len {gen_len} and steps {steps} evenly")


def load_for_decoding(cfg):
    """The model that cfg names: Dream, Tokenizer, and SoftMask or None."""
    check(cfg.gen_len, cfg.steps or cfg.gen_len, cfg.block, cfg.threshold)
    *_, device, dtype = machine(cfg.device, cfg.dtype)
    dtype = None if cfg.dtype == "auto" else dtype or torch.float32  # None: as stored
    tok, model = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtype)
    sm = load_adapter(model, cfg.adapter, launch.soft_mask(cfg.code)) if cfg.adapter else None
    sm = with_omega(sm, model.cfg.mask_token_id, cfg)
    if cfg.merge:
        dora.merge_(model)
    if cfg.compile:  # one graph for whole sequences, another for cached parts
        model.trunk = torch.compile(model.trunk, dynamic=True)
    return model, tok, (sm.to(device) if sm and cfg.soft else None)


def answer(model, tok, sm, ids, cfg, until=(), on_step=lambda x: None):
    """The text that fills the masks of a prompt, and {"nfe", "tokens", "kept", "seconds"}.

    ids: of the prompt, a list.   until: the text is cut at each of these strings in turn [code].
    kept: tokens before the end token.
    """
    def count(x):
        stats["nfe"] += 1
        on_step(x)

    stats, begin = {"nfe": 0}, time.perf_counter()
    mask_id, device = model.cfg.mask_token_id, model.table.device
    # Seeded by the prompt, too, so that the order of several prompts does not change answers.
    generator = torch.Generator("cpu" if device.type == "mps" else device)
    generator.manual_seed(seed_of(cfg.seed, ids))
    how = {"pick": Pick(cfg.algorithm, cfg.temperature, cfg.top_p, generator),
           "schedule": cfg.schedule, "switch": cfg.switch, "on_step": count}
    x = pad_prompt(model.cfg, ids, cfg.gen_len)                         # (L,)
    gaps = x == mask_id                                                 # (L,)  on the host
    two = TwoPass(model, sm, mask_id)
    steps = cfg.steps or int(gaps.sum())
    if cfg.block:
        x = decode_blocks(two, x, cfg.gen_len, steps, cfg.block, cfg.cache, cfg.threshold, **how)
    else:
        x = decode(two, x, steps, **how)
    new = x.cpu()[gaps].tolist()
    ends = (i for i, token in enumerate(new) if token in model.cfg.eos_token_id)
    kept = new[:next(ends, None)]
    text = tok.decode(kept)
    for stop in until:
        text = text.split(stop)[0]
    return text, stats | {"tokens": len(new), "kept": len(kept),
                          "seconds": time.perf_counter() - begin}


def main(cfg):
    model, tok, sm = load_for_decoding(cfg)
    mask_id, messages, before, after = model.cfg.mask_token_id, [], "", ""
    settings, until = cfg, ["<|im_end|>"]
    typed = [(cfg.infill or cfg.prompt).replace("\\n", "\n")]
    for text in sys.stdin if cfg.chat and not cfg.infill else typed:
        if mask_id in tok.encode(text, special=True):
            raise Refused(f"{tok.decode([mask_id])} would become a [MASK]: use --infill, with ___")
        if cfg.infill:
            before, after = (*re.split("_{3,}", text, maxsplit=1), "")[:2]
            ids = tok.encode(before) + cfg.gen_len * [mask_id] + tok.encode(after)
            settings, until = replace(cfg, gen_len=0), ()
        else:
            messages.append({"role": "user", "content": text.removesuffix("\n")})
            ids = tok.encode(tok.chat(messages), special=True)
        total = None if cfg.threshold else cfg.steps or cfg.gen_len
        with progress(total=total, unit="pass", leave=False) as bar:
            text, stats = answer(model, tok, sm, ids, settings, until, lambda _: bar.update())
        messages.append({"role": "assistant", "content": text})
        print(before + text + after)
        n, nfe, s = (stats[name] for name in ("tokens", "nfe", "seconds"))
        print(f"{n} tokens ({stats['kept']} before the end), {n / s:.1f} per second; NFE {nfe}",
              f"{n / nfe:.2f} tokens per forward pass, {nfe / s:.1f} passes per second; {s:.1f} s",
              sm or "without feedback", sep="; ", file=sys.stderr)


if __name__ == "__main__":
    launch.run(main, Config)
