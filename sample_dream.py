# SPDX-License-Identifier: MIT
"""Decoding by confidence: fill the masks, some tokens per pass, with soft-masked feedback.

    §2.2 conditional generation   pad_prompts       a response of [MASK]s behind each prompt
    §2.2 unmasking strategies     propose, reveal   the surest tokens first, some in each pass
    Alg. 2 l.4-6                  advance           these, and the feedback, for one pass
    App. A, Alg. 2; App. C.9      decode            the whole response at once
    App. B.2 Fast-dLLM            decode_blocks     block after block, with cached keys and values

Tensors with a vocabulary axis are (n, V), a row per masked position, and exist only inside
`in_chunks`. In both loops the host has a copy of x, so it knows where masks are. In a pass it waits
for a GPU for this copy, and in `likeliest`. Not here: benchmarks (lab/eval_dream.py), re-masking.

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

import dora
import launch
from arms import with_omega
from data import seed_of
from dream import Dream, Tokenizer, load_adapter
from launch import Count, Negative, Positive, Refused, Share, Size, machine, progress, to_device
from mdlm import TwoPass, in_chunks, likeliest
from softmask import SoftMask, time_gain

Algorithm = Literal["entropy", "maskgit_plus"]  # Dream's names: lowest entropy, highest p first
Schedule = Literal["none", "linear", "stepwise", "linear-late", "stepwise-late"]  # see `time_gain`
AtLeast0, Probability = Annotated[float, 0, 1e9], Annotated[float, 1e-12, 1]  # see launch.Share


@dataclass
class Decoding:
    model: str = ""                 # folder of a Dream or Dream-Coder model, as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights: faster, the same up to rounding
    soft: bool = True               # false: binary feedback, even if the adapter has an ω
    gen_len: Size = 256             # L, tokens of the response
    steps: Count = 0                # T (default: gen_len). NFE budget = steps / gen_len, Eq. 4
    algorithm: Algorithm = "entropy"
    temperature: AtLeast0 = 0.1     # App. B.2; 0: argmax
    top_p: Probability = 0.9        # App. B.2; 1: off. Dream's rule, see `filtered`
    schedule: Schedule = "none"     # App. C.9
    switch: Share = 0.5             # t', the share of masks at which the stepwise schedules switch
    block: Count = 0                # Fast-dLLM's block length; 0: the whole response at once
    cache: Literal["none", "prefix", "dual"] = "prefix"  # with block, see `decode_blocks`
    # With block: reveal all tokens with such a p, after temperature and top_p, with any algorithm.
    # At 0.1 and 0.9, a small lead makes p 1 (REPRODUCE.md, 5).
    threshold: Probability | None = None
    # Another ω than the adapter's. A model without SM then gets k = 3, and the paper's other two.
    omega_s: Annotated[float, 0, 1 - 1e-6] | None = None
    omega_a: Positive | None = None
    omega_b: Negative | None = None
    seed: int = 0
    device: str = "auto"            # cuda > mps > cpu
    dtype: launch.DType = "auto"    # auto: as stored
    compile: bool | None = None     # the trunk, in a minute (default: off, eval_dream: on CUDA)


@dataclass
class Config(Decoding):
    # In these texts, the two characters \n are a line break.
    prompt: str = ""                # one user turn
    chat: bool = False              # user turns from stdin, one a line
    # Text with one ___ for the model to write, without a chat around it. A base model, which has
    # learnt no chat, completes a text that ends with it: --infill="def f(x):\n___"
    infill: str = ""


def check(gen_len, steps, block, threshold, **others):
    if threshold is not None and not block:
        raise Refused(f"threshold {threshold} works on blocks: add --block=32")
    if block and (gen_len % block or threshold is None and steps % (gen_len // block)):
        raise Refused(f"gen_len {gen_len} and steps {steps} cannot be shared evenly by blocks of "
                      f"{block}: change one of them")


def filtered(logits, temperature=0.0, top_p=1.0):
    """Probabilities (n, V) of logits after temperature and top-p, in this order [code]

    Checked against tests/oracles.py dream_filter.
    """
    if temperature > 0:
        logits = logits / temperature
    p = logits.softmax(-1)                                              # (n, V)
    if top_p == 1:
        return p
    # The token that crosses p is kept. sample.nucleus drops it: other texts come from it.
    top, ids = likeliest(p, top_p)                                      # 2 × (n, m)
    before = F.pad(top.cumsum(-1)[:, :-1], (1, 0))                      # (n, m)  of likelier ones
    p = torch.zeros_like(p).scatter(-1, ids, top.masked_fill(before > top_p, 0))
    return p / p.sum(-1, keepdim=True)


def draw(p, generator):
    """One token (n,) per row of p (n, V), in float64: fp32 noise would cut the tail."""
    # torch.multinomial would let the host wait twice. MPS has no float64, so draws are on the CPU.
    where = dict(device=generator.device, dtype=torch.float64)
    u = torch.rand(len(p), 1, generator=generator, **where)             # (n, 1)
    cdf = p.to(**where).cumsum(-1)                                      # (n, V)
    drawn = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)        # (n, 1)
    return drawn[:, 0].to(p.device)


def propose(logits, never=None, algorithm="entropy", temperature=0.0, top_p=1.0, generator=None):
    """A token and a confidence for every masked row                                 Alg. 2 l.4

    logits: (n, V) fp32.   never: a token to replace by the best other one (default: none).
    Returns x0 (n,), and conf (n,), where the highest goes first. Temperature and top-p also decide
    the order [code].
    """
    p = filtered(logits, temperature, top_p)                            # (n, V)
    x0 = p.argmax(-1) if temperature == 0 else draw(p, generator)       # (n,)
    if never is not None:  # before conf, so that a threshold is about the token that is written
        first, second = logits.topk(2).indices.unbind(-1)               # (n,), (n,)
        x0 = torch.where(x0 == never, torch.where(first == never, second, first), x0)
    if algorithm == "entropy":
        # −H is 0 where the filter leaves one token, as it often does at App. B.2's settings.
        conf = (p * (p + 1e-10).log()).sum(-1)                          # (n,)  −H, guarded [code]
    else:
        conf = p.gather(-1, x0[:, None])[:, 0]                          # (n,)
    return x0, conf


def predictions(model, h, n, never, **pick):
    """What one pass says of its masks, a few rows of logits at a time           Alg. 2 l.4, l.6

    h: (N, D) hidden states, the first n of masks that may be revealed. The others only get
    feedback: a proposal costs more than its logits.   Others, and x0, conf: see `propose`.
    Returns soft masks (N, D), too, or None. They do not depend on temperature and top-p [code].
    """
    def both(h):
        logits = model.net.head(h)                                      # (n, V)
        found = propose(logits, never, **pick)                          # 2 × (n,)
        return (*found, model.feedback(h, logits)[0]) if model.sm else found

    x0, conf, *mixed = in_chunks(both, h[:n], V=len(model.net.table))
    if model.sm and n < len(h):
        mixed.append(model.feedback(h[n:])[0])                          # (N − n, D)
    return x0, conf, torch.cat(mixed) if mixed else None


def reveal_shares(steps):
    """The share of the masks that each step, from time t to s < t, reveals: 1 − s/t      §2.2, L/T

    The product with their number is rounded down, and the last step takes what is left. So with
    T = L the steps do not reveal one token each, as App. B.2 says, but 0, 1, …, 1, 2 [code].
    """
    times = torch.linspace(1, 1e-3, steps + 1)                          # (T + 1,)
    shares = 1 - times[1:] / times[:-1]                                 # (T,)  on the host
    shares[-1] = 1
    return shares


def reveal(x, masked, x0, conf, share=1.0, threshold=None):
    """x with some of its masks replaced by their proposals                          Alg. 2 l.5

    x, masked: (B, L).   x0, conf: (N,) for the masks, row-major.   share: see `reveal_shares`.
    threshold: reveals the surest mask of each sequence, and all whose conf is at least this
    (Fast-dLLM).   A proposal can be [MASK] itself. Such a position stays masked [code].
    """
    score = torch.full(x.shape, -torch.inf, device=x.device).masked_scatter(masked, conf)  # (B, L)
    # Equal scores go from left to right [ours]. The authors' topk leaves their order open [code].
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)       # (B, L)
    if threshold is not None:
        chosen = (rank == 0) | (score >= threshold)                     # (B, L)
    else:  # each sequence by its own number of masks [ours], theirs by the batch's mean
        chosen = rank < (masked.sum(-1) * share).long()[:, None]
    return torch.where(masked & chosen, x.masked_scatter(masked, x0), x)


def advance(model, x, opened, h, n, share, threshold=None, **pick):
    """A pass, from the hidden states of its masks to the tokens that it reveals    Alg. 2 l.4-6

    opened: (B, L), the n masks that may be revealed.   Others: see `predictions` and `reveal`.
    Returns x, where it is masked (B, L) on the host, and the soft masks.
    """
    # Where the model predicts [MASK], a pass that must reveal takes the best real token [ours]. The
    # authors' code leaves masks in its answers.
    never = model.mask_id if share == 1 else None
    x0, conf, mixed = predictions(model, h, n, never, **pick)
    x = reveal(x, opened, x0, conf, share, threshold)                   # (B, L)
    return x, x.cpu() == model.mask_id, mixed


def pad_prompts(cfg, prompt, gen_len, device="cpu"):
    """prompt (B, P) → x (B, P + gen_len), with masks behind it       §2.2 conditional generation"""
    # A mask inside a prompt is a place to fill, too.
    x = F.pad(torch.as_tensor(prompt).long(), (0, gen_len), value=cfg.mask_token_id)
    if (x[:, 0] == cfg.mask_token_id).any():
        raise Refused("position 0 is masked, and no position before it predicts it: add a prompt")
    return x.to(device)


def faded(plain, mixed, sequence, schedule, switch, left, start):
    """Soft masks (N, D) with λ turned down by the schedule                            App. C.9

    plain: (D,) the embedding of [MASK].   mixed: (N, D) with the full λ.   sequence: (N,) of the
    batch: each has its own time [ours].   left, start: (B,) masks now and at first.
    """
    if schedule == "none":
        return mixed
    # Python's floats: in fp32, 3/15 is above 0.2, and the switch is strict. A row may have no mask.
    shares = [now / max(of, 1) for now, of in zip(left.tolist(), start.tolist())]
    gain = torch.tensor([time_gain(schedule, share, switch) for share in shares])        # (B,)
    gain = to_device(gain[sequence], mixed.device)[:, None]             # (N, 1)
    # The mix is linear in λ: a share of λ is this share of the way from [MASK] to the full mix.
    return torch.lerp(plain.float(), mixed.float(), gain).to(mixed.dtype)


@torch.no_grad()
def decode(model, x, steps, schedule="none", switch=0.5, on_step=None, **pick):
    """Fill the masks of x in `steps` steps                                              Alg. 2

    model: TwoPass, of a backbone that ignores t.   x: (B, L) ids.   schedule, switch: see
    `time_gain`.   on_step(x): called after every step.   pick: algorithm, generator and filters,
    see `propose`.
    Returns (B, L) ids without any mask. At temperature 0, a sequence does not depend on the rest of
    its batch. Checked against tests/oracles.py slow_decode.
    """
    net, mask_id, (B, L) = model.net, model.mask_id, x.shape
    masked = x.cpu() == mask_id                                         # (B, L)  on the host
    start = masked.sum(-1)                                              # (B,)    on the host
    plain = net.table[mask_id]                                          # (D,)
    soft = plain.repeat(B * L, 1)                                       # (BL, D)  at each mask
    for share in reveal_shares(steps):
        on_host = masked.flatten().nonzero().squeeze(1)                 # (N,)
        at = to_device(on_host, x.device)                               # (N,)
        emb = F.embedding(x, net.table)                                 # (B, L, D)
        emb = torch.where((x == mask_id)[..., None], soft.view_as(emb), emb)    # (B, L, D)  l.6
        h = net.hidden(emb, at, None)                                   # (N, D)             l.3
        x, masked, mixed = advance(model, x, x == mask_id, h, len(h), share, **pick)    # l.4-6
        if model.sm:
            soft[at] = faded(plain, mixed, on_host // L, schedule, switch, masked.sum(-1), start)
        if on_step:
            on_step(x)
    return x


@torch.no_grad()
def decode_blocks(model, x, gen_len, steps, block, cache="prefix", threshold=None,
                  schedule="none", switch=0.5, on_step=None, **pick):
    """Fill the last gen_len positions, block after block from the left    App. B.2, Fast-dLLM

    x: from `pad_prompts`.   steps: passes, shared by the blocks. With a threshold their number
    depends on the text.   Others, and what is returned: see `decode`.

    A block begins with a pass over everything, which reveals its first token, however unsure
    [code]: later passes may start there, and Dream predicts a token from the state to its left.
    More passes follow until the block is full:

    cache     a later pass sees        and reuses, from the block's first pass, keys and values of
    none      everything               nothing
    prefix    the block and the rest   what is before the block
    dual      the block                what is before it, and what is after it, which goes stale

    A block with a single step is filled by it [ours]: Fast-dLLM leaves all but one of its masks.
    The feedback is [ours]: a mask has that of the last pass that predicted it. So it crosses block
    boundaries. Checked against tests/oracles.py slow_blocks.
    """
    net, mask_id, (B, L) = model.net, model.mask_id, x.shape
    masked = x.cpu() == mask_id                                         # (B, L)  on the host
    if masked[:, :L - gen_len].any():
        raise Refused("blocks fill a response only: use --block=0 to infill")
    check(gen_len, steps, block, threshold)
    if threshold is not None:
        pick["algorithm"] = "maskgit_plus"
    shares = torch.ones(block)         # of the passes of a block, each of which reveals something
    if threshold is None:
        shares = reveal_shares(steps * block // gen_len)
    shares[0] = 1
    start, place = masked.sum(-1), torch.arange(L)                      # (B,), (L,)  on the host
    plain = net.table[mask_id]                                          # (D,)
    soft = plain.repeat(B * L, 1)                                       # (BL, D)  at each mask
    kv = None
    for b in range(L - gen_len, L, block):
        later = {"none": (0, L), "prefix": (b, L), "dual": (b, b + block)}[cache]
        for i, share in enumerate(shares):
            lo, hi = later if i else (0, L)                             # what the model sees
            end = b + block if i or len(shares) == 1 else b + 1         # of what may be revealed
            emb = F.embedding(x, net.table)                             # (B, L, D)
            emb = torch.where((x == mask_id)[..., None], soft.view_as(emb), emb)
            h, kv = net.trunk(emb[:, lo:hi], kv if lo else None, lo)    # (B, hi − lo, D)
            opened = masked & (place >= b) & (place < end)              # (B, L)  may be revealed
            on_host = opened.flatten().nonzero().squeeze(1)             # (n,)  of B·L
            n = len(on_host)
            if model.sm:  # feedback for all masks, but a sequence whose block is full keeps its own
                others = masked & ~opened & opened.any(1, keepdim=True) & (place < hi)   # (B, L)
                on_host = torch.cat([on_host, others.flatten().nonzero().squeeze(1)])    # (N,)
            at = to_device(on_host, x.device)                           # (N,)
            h = net.before(h, at // L * (hi - lo) + at % L - lo)        # (N, D)
            x, masked, mixed = advance(model, x, to_device(opened, x.device), h, n, share,
                                       threshold, **pick)
            if model.sm:
                soft[at] = faded(plain, mixed, on_host // L, schedule, switch, masked.sum(-1),
                                 start)
            if on_step:
                on_step(x)
            if not masked[:, b:b + block].any():
                break
    return x


def load_for_decoding(cfg):
    """The model that cfg names: (Dream, Tokenizer, SoftMask or None)."""
    check(cfg.gen_len, cfg.steps or cfg.gen_len, cfg.block, cfg.threshold)
    *_, device, dtype = machine(cfg.device, cfg.dtype)
    dtype = None if cfg.dtype == "auto" else dtype or torch.float32
    tok, model = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtype)
    omega = load_adapter(model, cfg.adapter) if cfg.adapter else None
    sm = SoftMask(**omega) if omega else None
    sm = with_omega(sm, model.cfg.mask_token_id, cfg.omega_s, cfg.omega_a, cfg.omega_b)
    if cfg.merge:
        dora.merge_(model)
    if cfg.compile:
        model.compile_trunk()
    return model, tok, sm.to(device) if sm and cfg.soft else None


def feedback_label(cfg, sm):
    """The feedback of a run in words, so that results with other feedback are not mixed with it."""
    if sm is None:
        return "binary" if cfg.soft else "SM off"
    label = f"SM k={sm.k or '|V|'}"
    for name in ("omega_s", "omega_a", "omega_b", "schedule", "switch"):
        if getattr(cfg, name) != getattr(Decoding, name):
            label += f", {name}={getattr(cfg, name)}"
    return label


def answer(model, tok, sm, ids, cfg, until=(), on_step=None):
    """The text that is filled in for a prompt, a list of ids, and what it cost.

    until: strings that end the text, in turn [code].   kept: tokens before the end token.
    """
    def count(x):
        stats["nfe"] += 1
        if on_step:
            on_step(x)

    stats, begin = {"nfe": 0}, time.perf_counter()
    mask_id, eos, device = model.cfg.mask_token_id, model.cfg.eos_token_id, model.table.device
    # By seed and prompt: an answer does not depend on what was asked before.
    generator = torch.Generator("cpu" if device.type == "mps" else device)
    generator.manual_seed(seed_of(cfg.seed, ids))
    names = "schedule", "switch", "algorithm", "temperature", "top_p"
    settings = {name: getattr(cfg, name) for name in names}
    settings |= {"generator": generator, "on_step": count}
    x = pad_prompts(model.cfg, [ids], cfg.gen_len, device)              # (1, L)
    gaps = x == mask_id                                                 # (1, L)
    two, steps = TwoPass(model, sm, mask_id), cfg.steps or cfg.gen_len + ids.count(mask_id)
    if cfg.block:
        x = decode_blocks(two, x, cfg.gen_len, steps, cfg.block, cfg.cache, cfg.threshold,
                          **settings)
    else:
        x = decode(two, x, steps, **settings)
    new = x[gaps].tolist()
    kept = new[:new.index(eos)] if eos in new else new
    text = tok.decode(kept)
    for stop in until:
        text = text.split(stop)[0]
    return text, stats | {"tokens": len(new), "kept": len(kept),
                          "seconds": time.perf_counter() - begin}


def main(cfg):
    model, tok, sm = load_for_decoding(cfg)
    label = feedback_label(cfg, sm)
    if sm:
        label += f", ω_s = {sm.omega[0].item():.3g}"
    before, _, after = cfg.infill.replace("\\n", "\n").partition("___")
    messages, settings, until = [], cfg, ["<|im_end|>"]
    for prompt in sys.stdin if cfg.chat else [cfg.prompt.replace("\\n", "\n")]:
        messages.append({"role": "user", "content": prompt.removesuffix("\n")})
        ids = tok.encode(tok.chat(messages), special=True)
        if cfg.infill:
            ids = tok.encode(before) + cfg.gen_len * [model.cfg.mask_token_id] + tok.encode(after)
            settings, until = replace(cfg, gen_len=0), ()
        total = None if cfg.threshold else cfg.steps or cfg.gen_len
        with progress(total=total, unit="pass", leave=False) as bar:
            text, stats = answer(model, tok, sm, ids, settings, until, lambda _: bar.update())
        messages.append({"role": "assistant", "content": text})
        print(before + text + after)
        cost = "{tokens} tokens, {kept} before the end token; NFE {nfe}, {seconds:.1f} s, "
        rate = stats["tokens"] / stats["seconds"]
        print(cost.format(**stats) + f"{rate:.1f} tokens/s; {label}", file=sys.stderr)


if __name__ == "__main__":
    launch.run(main, Config)
