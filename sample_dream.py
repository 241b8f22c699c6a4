# SPDX-License-Identifier: MIT
"""Decoding with Dream: fill a masked response, a few tokens per pass, with soft-masked feedback in between.

    §2.2 conditional generation   canvas            the prompt stands before a response of [MASK]s and is never touched
    §2.2 unmasking strategies     propose, reveal   the most confident tokens first, a counted number per pass
    App. A, Alg. 2; App. C.9      decode            the whole response at once
    App. B.2 Fast-dLLM            decode_blocks     block after block, with cached keys and values, or by a threshold

Dream counts tokens where MDLM flips coins (sample.py), so the two samplers share soft-masking and nothing else. Tensors
with a vocabulary axis are (N, V), a row per masked position, row-major.

Not here: training, benchmarks (eval_dream.py), re-masking (Dream never takes a token back).

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn; watch the canvas fill
    python sample_dream.py --model=DIR --adapter=DIR --chat                       # turns from stdin, with SM feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"  # ___ becomes gen_len tokens
"""

import hashlib
import itertools
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import dora
from launch import Refused, machine, run
from dream import Dream, Tokenizer, load_adapter
from softmask import SoftMask, time_gain

ALGORITHMS = ("entropy", "maskgit_plus", "topk_margin", "origin")  # Dream's names


@dataclass
class Decoding:
    model: str = ""                 # folder of a Dream or Dream-Coder model: config.json, safetensors, vocabulary
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if it was trained with SM
    merge: bool = True              # fold DoRA into the weights; false: beside them, slower, the same up to rounding
    soft: bool = True               # false: binary feedback, though the adapter has an ω
    gen_len: int = 256              # L, tokens of the response
    steps: int = 0                  # T; 0: gen_len. NFE budget = steps / gen_len, Eq. 4
    algorithm: str = "entropy"      # unmasked first: lowest entropy, maskgit_plus (highest p), topk_margin, origin (random)
    temperature: float = 0.1        # App. B.2; 0: argmax
    top_p: float = 0.9              # App. B.2; Dream's rule, see `filtered`
    top_k: int = 0                  # 0: off, as the authors pass; the hub's diffusion_generate has a silent 50 [code]
    schedule: str = "none"          # App. C.9: none, linear, stepwise, linear-late, stepwise-late
    switch: float = 0.5             # t', the share of masks where the stepwise ones switch
    block: int = 0                  # Fast-dLLM block length; 0: the whole response at once
    cache: str = "prefix"           # with block: none, prefix, dual
    threshold: float | None = None  # with block: commit all that is at least so sure, instead of a counted number
    seed: int = 0
    device: str = "auto"            # cuda > mps > cpu
    dtype: str = "auto"             # as stored; or float32, bfloat16


@dataclass
class Config(Decoding):
    prompt: str = ""                # one user turn
    raw: bool = False               # the prompt is text to continue, no chat template
    chat: bool = False              # user turns from stdin, a line each
    infill: str = ""                # text with one ___ for the model to write; \n is a new line
    stop: str = ""                  # the response ends before any of these, separated by |; \n is a new line
    show: bool = True               # on a terminal: draw the canvas as it fills


def check(gen_len, steps, algorithm="entropy", temperature=0.0, top_p=1.0, top_k=0, schedule="none", block=0,
          switch=0.5, cache="prefix", threshold=None, **others):
    """All that can be wrong with the settings themselves, before a model is touched. Raises Refused."""
    try:
        time_gain(schedule, 1.0)
    except ValueError as e:
        raise Refused(str(e))
    for wrong, sentence in (
        (gen_len < 1, f"gen_len {gen_len} leaves nothing to fill: it must be at least 1"),
        (not 1 <= steps <= gen_len, f"steps {steps} must be between 1 and gen_len {gen_len}, a token for each step"),
        (algorithm not in ALGORITHMS, f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}"),
        (not 0 <= temperature < math.inf, f"temperature {temperature} must be at least 0, which is the argmax, and finite"),
        (not 0 < top_p <= 1, f"top_p {top_p} must be in (0, 1]; 1 is off"),
        (top_k < 0, f"top_k {top_k} must not be negative; 0 is off"),
        (not 0 <= switch <= 1, f"switch {switch} must be in [0, 1]: it is a share of masks"),
        (cache not in ("none", "prefix", "dual"), f"unknown cache {cache!r}: use none, prefix or dual"),
        (block < 0 or block and gen_len % block, f"gen_len {gen_len} is not a multiple of block {block}: change one of them"),
        (threshold is not None and not 0 < threshold <= 1, f"threshold {threshold} must be in (0, 1]: it is a probability"),
        (threshold is not None and not block, f"threshold {threshold} works on blocks: add --block=32"),
        (block and threshold is None and steps % (gen_len // max(block, 1)),
         f"steps {steps} cannot be shared evenly by {gen_len // max(block, 1)} blocks: change steps or block"),
    ):
        if wrong:
            raise Refused(sentence)


# ---------------------------------------------------------------------------------------------------------------------
# one step


def filtered(logits, temperature=0.0, top_p=1.0, top_k=0):
    """Probabilities after temperature, top-p and top-k, in this order [code].   logits: (n, V).   Returns (n, V) fp32

    Temperature 0 stands for the argmax, which `propose` takes; here it divides nothing. Top-p keeps the token that crosses
    p, where the nucleus of MDLM drops it (sample.nucleus): the two give different texts and must not be exchanged.
    """
    logits = logits.float()
    if temperature > 0:
        logits = logits / temperature
    if top_p < 1:
        p = logits.softmax(-1)                                                   # (n, V)
        for m in (min(256, p.shape[-1]), p.shape[-1]):  # all of V is slow to sort and seldom needed
            ranked, order = p.topk(m)                                            # (n, m)
            if (ranked.sum(-1) > top_p).all():
                break
        before = F.pad(ranked.cumsum(-1)[:, :-1], (1, 0))                        # (n, m)  mass of the more likely tokens
        keep = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before <= top_p)
        logits = logits.masked_fill(~keep, -torch.inf)
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]         # (n, 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(-1)


def propose(logits, algorithm="entropy", temperature=0.0, top_p=1.0, top_k=0, generator=None):
    """A token and a confidence for every masked row.   logits: (N, V).   Returns x0: (N,), conf: (N,), high goes first

    Both come from the filtered probabilities, so temperature and top-p also decide the order [code]. A few rows at a
    time: sorting the vocabulary for a whole response would take gigabytes. Raises Refused for a draw without a generator.
    """
    if generator is None and (temperature > 0 or algorithm == "origin"):
        raise Refused(f"temperature {temperature} and {algorithm} make draws: give generator=torch.Generator(…) to key them")
    pieces = []
    for rows in logits.split(128):
        p = filtered(rows, temperature, top_p, top_k)                            # (n, V)
        if temperature > 0:  # float64, as fp32 noise cuts the tail; where the generator lives, as MPS has no float64
            x0 = torch.multinomial(p.to(generator.device, torch.float64), 1, generator=generator)[:, 0].to(p.device)
        else:
            x0 = p.argmax(-1)                                                    # (n,)
        if algorithm == "entropy":
            conf = (p * (p + 1e-10).log()).sum(-1)                               # (n,)  −H, guarded as in [code]
        elif algorithm == "maskgit_plus":
            conf = p.gather(-1, x0[:, None])[:, 0]
        elif algorithm == "topk_margin":
            conf = -p.topk(2).values.diff()[:, 0]
        else:                                                                    # origin: chance
            conf = torch.rand(len(x0), generator=generator, device=generator.device).to(p.device)
        pieces.append((x0, conf))
    x0, conf = (torch.cat(piece) for piece in zip(*pieces))
    return x0, conf


def reveal_count(masked, t, s, last):
    """How many of `masked` (B,) tokens a step from time t to s < t unmasks.   Returns (B,) int64               §2.2, n ≈ L/T

    Rounded down, so early steps reveal less and the last one takes what is left: with T = L not one token each (App. B.2)
    but 0, 1, …, 1, 2 [code].
    """
    return masked if last else (masked * (1 - s / t)).long()


def reveal(x, masked, logits, mask_id, t=1.0, s=0.0, last=False, threshold=None, **pick):
    """x with some of its masked positions filled                                          Alg. 2 l.4-5; threshold: Fast-dLLM

    x, masked: (B, L).   logits: (N, V), row-major for `masked`.   pick: arguments of `propose`.
    With a threshold: the surest position of each sequence, and every other that is at least so sure.

    Dream may predict [MASK] itself; the position then stays masked [code]. A step that has to make an end takes the best
    real token there [ours]: the original leaves masks in its answers, or with a threshold never returns.
    """
    if threshold is not None:
        pick["algorithm"] = "maskgit_plus"
    x0, conf = propose(logits, **pick)                                           # (N,), (N,)
    if last or threshold is not None:
        first, second = logits.topk(2).indices.unbind(-1)                        # (N,), (N,)
        x0 = torch.where(x0 == mask_id, torch.where(first == mask_id, second, first), x0)
    score = torch.full(x.shape, -torch.inf, device=x.device).masked_scatter(masked, conf)  # (B, L)
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)       # (B, L)  0: the surest
    if threshold is not None:
        chosen = (rank == 0) | (score >= threshold)                              # (B, L)
    elif pick.get("algorithm") == "origin":
        chosen = score < (1.0 if last else 1 - s / t)                            # a coin for each token, as in Eq. 1
    else:
        chosen = rank < reveal_count(masked.sum(-1), t, s, last)[:, None]
    return torch.where(masked & chosen, x.masked_scatter(masked, x0), x)


# ---------------------------------------------------------------------------------------------------------------------
# whole responses


def canvas(model, prompt, gen_len, **settings):
    """[padding | prompt | gen_len masks] for each prompt of a batch                               §2.2 conditional generation

    prompt: (B, P) ids, or B lists of ids of any length. A mask inside a prompt is a place to fill, too.
    Returns x (B, L) and valid (B, L), False on padding; None if there is none. Raises Refused if it does not fit.
    """
    cfg, device = model.cfg, model.table.device
    rows = [torch.as_tensor(row).tolist() + gen_len * [cfg.mask_token_id] for row in prompt]
    L = max(map(len, rows))
    if L > cfg.max_position_embeddings:
        raise Refused(f"prompt and response are {L} tokens, the model takes {cfg.max_position_embeddings}: shorten one")
    x = torch.tensor([(L - len(row)) * [cfg.pad_token_id] + row for row in rows], device=device)           # (B, L)
    valid = torch.tensor([(L - len(row)) * [False] + len(row) * [True] for row in rows], device=device)    # (B, L)
    check(int((x == cfg.mask_token_id).sum(-1).max()), **settings)
    return x, None if valid.all() else valid


def gains(schedule, switch, left, start, rows):
    """Factor on λ for each row, (N,).   left: (B, L) masks that are left of start: (B,); rows: (B, l) the N wanted    App. C.9

    Per sequence, so that it does not feel its neighbours [ours]; exact fractions, as the switch is strict.
    """
    shares = [now / max(of, 1) for now, of in zip(left.sum(-1).tolist(), start.tolist())]  # a prompt may have no mask
    gain = torch.tensor([[time_gain(schedule, share, switch)] for share in shares], device=left.device)      # (B, 1)
    return gain.expand_as(rows)[rows]


@torch.no_grad()
def decode(model, prompt, gen_len, steps, sm=None, schedule="none", switch=0.5, on_step=None, **pick):
    """Fill gen_len masks behind each prompt, in `steps` passes                                                     Alg. 2

    model: Dream.   prompt: see `canvas`.   sm: SoftMask, or None for binary feedback.   schedule, switch: `time_gain`.
    pick: algorithm, temperature, top_p, top_k, generator of `propose`.   on_step(x) follows every pass.
    Returns (B, P + gen_len) ids without any mask. At temperature 0 a sequence does not depend on the rest of its batch.
    """
    x, valid = canvas(model, prompt, gen_len, steps=steps, schedule=schedule, switch=switch, **pick)
    times = torch.linspace(1, 1e-3, steps + 1)
    masked = x == model.cfg.mask_token_id                                        # (B, L)
    start = masked.sum(-1)                                                       # (B,)
    emb = F.embedding(x, model.table)                                            # (B, L, D)  no feedback in the first pass
    for i in range(steps):
        h, _ = model.trunk(emb, valid=valid)                                     # (B, L, D)
        logits = model.head_at(h, masked)                                        # (N, V)
        x = reveal(x, masked, logits, model.cfg.mask_token_id, times[i], times[i + 1], i == steps - 1, **pick)
        left = x == model.cfg.mask_token_id                                      # (B, L)
        if sm is None:
            emb = F.embedding(x, model.table)                                    # (B, L, D)
        else:  # from the logits themselves: no temperature, no top-p [code]
            gain = gains(schedule, switch, left, start, left)                    # (N',)
            emb = sm.embed(model.table, x, logits[left[masked]], gain)           # (B, L, D)
        masked = left
        if on_step:
            on_step(x)
    return x


@torch.no_grad()
def decode_blocks(model, prompt, gen_len, steps, block, cache="prefix", threshold=None, sm=None, schedule="none",
                  switch=0.5, on_step=None, **pick):
    """The same, block after block from the left                                                       App. B.2, Fast-dLLM

    A block begins with a pass over everything. It commits the block's first token whatever its confidence [code]: later
    passes may begin there, and Dream reads a token off the hidden state to its left. They go on until the block is full:

    cache     a later pass sees        and reuses, from the block's first pass, keys and values of
    none      everything               nothing
    prefix    the block and the rest   what is before the block
    dual      the block                what is before it and after it, which goes stale until the next block

    With a threshold the number of passes depends on the text, otherwise it is `steps`, shared by the blocks. A block with
    a single step is filled by its first pass [ours]: the original leaves all but one of its masks.

    The feedback is [ours], theirs was not released: a mask looks as the last pass that predicted it made it look, so
    feedback crosses block boundaries, and under `dual` the rest stands still together with its keys and values.
    """
    mask_id = model.cfg.mask_token_id
    if any((torch.as_tensor(row) == mask_id).any() for row in prompt):
        raise Refused(f"the prompt contains the mask token {mask_id}: blocks fill a response only, use block 0 to infill")
    x, valid = canvas(model, prompt, gen_len, steps=steps, block=block, cache=cache, threshold=threshold,
                      schedule=schedule, switch=switch, **pick)
    (B, L), per_block = x.shape, steps * block // gen_len
    times = torch.linspace(1, 1e-3, per_block + 1)
    soft = model.table[mask_id].repeat(B, L, 1)                                  # (B, L, D)  how a mask looks, everywhere
    for b in range(L - gen_len, L, block):
        for i in itertools.count():
            last = threshold is None and i == per_block - 1
            lo, hi = (0, L) if i == 0 or cache == "none" else (b, b + block if cache == "dual" else L)
            seen = x[:, lo:hi]                                                   # (B, l)
            masked = seen == mask_id                                             # (B, l)
            emb = torch.where(masked[..., None], soft[:, lo:hi], F.embedding(seen, model.table))     # (B, l, D)
            h, kv = model.trunk(emb, past=None if lo == 0 else frozen, start=lo, valid=valid)
            if i == 0:
                frozen = kv                                                      # all L positions, as the block found them
            at = torch.arange(lo, hi, device=x.device)
            open_ = masked & (at >= b) & (at <= (b if i == 0 and not last else b + block - 1))       # (B, l)
            wanted = masked if sm else open_                                     # feedback needs every mask's logits
            logits = model.head_at(h, wanted)                                    # (N, V)
            step = {} if threshold is not None else {"t": times[i], "s": times[i + 1], "last": last or i == 0}
            seen = reveal(seen, open_, logits[open_[wanted]], mask_id, **step, threshold=threshold, **pick)
            x = torch.cat([x[:, :lo], seen, x[:, hi:]], 1)                       # (B, L)
            left = x == mask_id                                                  # (B, L)
            if sm:
                again = left[:, lo:hi] & open_.any(1, keepdim=True)              # (B, l)  not where a block is full already
                gain = gains(schedule, switch, left, torch.full((B,), gen_len), again)               # (N',)
                soft[:, lo:hi][again] = sm.mix(model.table, *sm(logits[again[wanted]], gain))
            if on_step:
                on_step(x)
            if not left[:, b:b + block].any():
                break
    return x


# ---------------------------------------------------------------------------------------------------------------------
# texts


def load(cfg):
    """The model that cfg names: (Dream, Tokenizer, SoftMask or None). Raises Refused before anything large is read."""
    check(**asdict(cfg) | {"steps": cfg.steps or cfg.gen_len})
    dtypes, device = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}, machine(cfg.device)[2]
    if cfg.dtype not in dtypes or not cfg.model:
        raise Refused(f"dtype {cfg.dtype!r} is none of {', '.join(dtypes)}" if cfg.model else "no model: add --model=DIR")
    tok, model = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtypes[cfg.dtype])
    omega = load_adapter(model, cfg.adapter) if cfg.adapter else None
    if cfg.merge:
        dora.merge_(model)
    return model, tok, SoftMask(**omega).to(device) if omega and cfg.soft else None


def feedback(cfg, sm):
    """What the masks of a run were fed, in words: for results, which must not be taken for those of another feedback."""
    if sm:
        schedule = cfg.schedule + f" {cfg.switch}" * ("stepwise" in cfg.schedule)
        return f"SM k={sm.k or '|V|'}" + f", {schedule}" * (schedule != "none")
    files = (os.path.join(cfg.adapter, name) for name in ("softmask.json", "transparency_config.json"))
    return "SM off" if cfg.adapter and any(map(os.path.exists, files)) else "binary"


def cut(text, until):
    """The text before each of the strings, one after the other [code]."""
    for stop in until:
        text = text.split(stop)[0]
    return text


def answer(model, tok, sm, ids, cfg, until=(), on_step=None):
    """Decode one prompt as cfg says.   ids: list; masks in it are filled, too.   until: what ends the text, see `cut`.

    Returns the text that was filled in, and {n: 1, nfe: passes, tokens: filled in, kept: those before the end token, seconds}.
    Draws are keyed by seed and prompt: an answer does not depend on what was asked before.
    """
    def count(x):
        stats["nfe"] += 1
        if on_step:
            on_step(x)

    mask_id, eos, stats, begin = model.cfg.mask_token_id, model.cfg.eos_token_id, {"n": 1, "nfe": 0}, time.perf_counter()
    device = "cpu" if model.table.device.type == "mps" else model.table.device
    key = hashlib.blake2b(repr((cfg.seed, ids)).encode(), digest_size=7).digest()
    settings = {name: getattr(cfg, name) for name in ("schedule", "switch", "algorithm", "temperature", "top_p", "top_k")}
    settings |= {"sm": sm, "on_step": count, "generator": torch.Generator(device).manual_seed(int.from_bytes(key, "big")),
                 "gen_len": cfg.gen_len, "steps": cfg.steps or cfg.gen_len + ids.count(mask_id)}
    if cfg.block:
        x = decode_blocks(model, [ids], block=cfg.block, cache=cfg.cache, threshold=cfg.threshold, **settings)
    else:
        x = decode(model, [ids], **settings)
    new = [after for after, before in itertools.zip_longest(x[0].tolist(), ids, fillvalue=mask_id) if before == mask_id]
    kept = new[:new.index(eos)] if eos in new else new
    stats |= {"tokens": len(new), "kept": len(kept), "seconds": time.perf_counter() - begin}
    return cut(tok.decode(kept), until), stats


def picture(tok, ids, cfg):
    """The canvas as text, ░ for a mask, nothing for the end tokens behind the answer."""
    return "".join("░" * len(list(run)) if masked else tok.decode(i for i in run if i != cfg.eos_token_id)
                   for masked, run in itertools.groupby(ids, lambda i: i == cfg.mask_token_id))


def main(cfg):
    if sum(map(bool, (cfg.prompt, cfg.chat, cfg.infill))) != 1:
        raise Refused("nothing to do: give one of --prompt=…, --chat, --infill=…")
    before, gap, after = cfg.infill.replace("\\n", "\n").partition("___")
    if cfg.infill and (not gap or "___" in after or cfg.block):
        raise Refused("--infill needs exactly one ___ where the model shall write, and --block=0")
    model, tok, sm = load(cfg)
    kind = feedback(cfg, sm) + (f", ω_s = {sm.omega[0].item():.3g}" if sm else "")
    until = [stop for stop in cfg.stop.replace("\\n", "\n").split("|") if stop] + ["<|im_end|>"] * (not cfg.raw and not gap)
    messages, drawn = [], cfg.show and sys.stdout.isatty()
    for prompt in filter(str.strip, sys.stdin) if cfg.chat else [cfg.prompt]:
        messages.append({"role": "user", "content": prompt.removesuffix("\n")})
        ids, run_cfg = tok.encode(prompt) if cfg.raw else tok.encode(tok.chat(messages), special=True), cfg
        if gap:
            ids = tok.encode(before) + cfg.gen_len * [model.cfg.mask_token_id] + tok.encode(after)
            run_cfg = replace(cfg, gen_len=0)

        def watch(x):
            bar.update()
            if drawn:  # the screen cleared, then the text
                print("\x1b[H\x1b[J" + picture(tok, x[0, 0 if gap else len(ids):].tolist(), model.cfg), flush=True)

        with tqdm(total=None if cfg.threshold else cfg.steps or cfg.gen_len, unit="pass", leave=False, disable=drawn) as bar:
            text, stats = answer(model, tok, sm, ids, run_cfg, until, watch)
        print(before + text + after)
        print("{tokens} tokens, {kept} before the end token; NFE {nfe}, {seconds:.1f} s, {rate:.1f} tokens/s; {kind}".format(
            **stats, rate=stats["tokens"] / max(stats["seconds"], 1e-9), kind=kind), file=sys.stderr)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    run(main, Config)
