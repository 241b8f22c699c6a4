# SPDX-License-Identifier: MIT
"""Decode with Dream: each pass reveals the surest tokens and soft-masks the rest.

    §2.2 conditional generation   pad_prompts      a response of [MASK]s after each prompt
    App. A, Alg. 2; App. C.9      decode           the whole response at once
    Alg. 2 l.4, App. B.2          propose          a token for each mask, and how sure the model is
    Alg. 2 l.5, §2.2 unmasking    reveal           the surest of these tokens, placed in x
    Alg. 2 l.6, App. C.9          propose, faded   soft masks for the others
    App. B.2 Fast-dLLM            decode_blocks    block after block, with cached keys and values

    python sample_dream.py --model=DIR --prompt="Write a haiku about masks."      # one turn
    python sample_dream.py --model=DIR --adapter=DIR --chat       # turns from stdin, with feedback
    python sample_dream.py --model=DIR --infill="def f(x):\\n    ___\\n    return y"
"""

import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F

import dora
import launch
from checkpoint import with_omega
from sample import categorical, likeliest
from data import seed_of
from dream import Dream, Tokenizer, load_adapter
from launch import Count, Negative, Positive, Refused, Share, Size, machine, progress, to_device
from mdlm import TwoPass
from softmask import SoftMask

Algorithm = Literal["entropy", "maskgit_plus"]  # Dream's names: lowest H first, highest p first
Schedule = Literal["none", "linear", "stepwise", "linear-late", "stepwise-late"]  # see `time_gain`
AtLeast0, Probability = Annotated[float, 0, 1e9], Annotated[float, 1e-12, 1]  # see launch.Share


@dataclass
class Decoding:
    model: str = ""                 # folder of a Dream, Dream-Coder or open-dCoder, as published
    adapter: str = ""               # folder from finetune_dream.py: DoRA, and ω if SM was trained
    merge: bool = True              # fold DoRA into the weights: faster, the same up to rounding
    soft: bool = True               # false: no feedback, even if the adapter has an ω
    gen_len: Size = 256             # the paper's L: tokens of the response
    steps: Count = 0                # T (default: gen_len). NFE budget = steps / gen_len, Eq. 4
    algorithm: Algorithm = "entropy"
    temperature: AtLeast0 = 0.1     # App. B.2; 0: argmax
    top_p: Probability = 0.9        # App. B.2; 1: off. Dream's rule, see `filtered`
    schedule: Schedule = "none"     # App. C.9
    switch: Share = 0.5             # t', share of masks left when a stepwise schedule switches
    block: Count = 0                # Fast-dLLM's block length; 0: the whole response at once
    cache: Literal["none", "prefix", "dual"] = "prefix"  # with block, see `decode_blocks`
    # With block: whatever the algorithm, reveal all tokens with at least this probability p, after
    # temperature and top_p. If these are 0.1 and 0.9, p can be 1 even for a token that leads by
    # little (REPRODUCE.md, "Where this differs", 5).
    threshold: Probability | None = None
    # Replace the adapter's ω. If there is none, omega_s turns SM on, with k = 3 and the paper's
    # values for the other two.
    omega_s: Annotated[float, 1e-6, 1 - 1e-6] | None = None
    omega_a: Positive | None = None
    omega_b: Negative | None = None
    seed: int = 0
    device: str = "auto"            # cuda, else mps, else cpu
    dtype: launch.DType = "auto"    # auto: as stored
    compile: bool | None = None     # takes a minute (default: off, but on for CUDA in eval_dream)


@dataclass
class Config(Decoding):
    # In prompt and infill, the two characters \n stand for a line break.
    prompt: str = ""                # one user turn
    chat: bool = False              # user turns from stdin, one per line
    # The model replaces the first ___ in this text, or continues it if there is none. No chat
    # template is added, so a base model can do it, too: --infill="def f(x):\n"
    infill: str = ""


class Pick(NamedTuple):
    """How a pass picks tokens                                             Alg. 2 l.4-5, App. B.2"""
    algorithm: Algorithm = "entropy"
    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None  # for the draws at a temperature above 0


GREEDY = Pick()


def pad_prompts(cfg, prompt, gen_len):
    """prompt (B, P) → x (B, P + gen_len): prompt, [MASK]s            §2.2 conditional generation"""
    # Masks inside the prompt are filled, too.
    x = F.pad(torch.as_tensor(prompt).long(), (0, gen_len), value=cfg.mask_token_id)
    if (x[:, 0] == cfg.mask_token_id).any():
        raise Refused("position 0 is masked, and nothing before it can predict it: put text first")
    return x


@torch.no_grad()
def decode(model, x, steps, pick=GREEDY, schedule="none", switch=0.5, on_step=None):
    """Fill the masks of x in `steps` steps                                        Alg. 2, App. C.9

    model: TwoPass, of a backbone that ignores t.   x: (B, L) ids on the CPU.   schedule, switch:
    see `time_gain`.   on_step(x): called after every step.
    Returns (B, L) ids without any mask, on the device.
    """
    net, mask_id = model.net, model.mask_id
    plain = net.table[mask_id]                                          # (D,)
    masked = x == mask_id                                               # (B, L)  on the host
    start, x = masked.sum(-1), to_device(x, plain.device)               # (B,), (B, L)
    emb = F.embedding(x, net.table)                                     # (B, L, D)             l.1
    for share in reveal_shares(steps):
        b, l = masked.nonzero(as_tuple=True)                            # 2 × (N,)  on the host
        masks = to_device(b, x.device), to_device(l, x.device)          # 2 × (N,)
        h = net.hidden(emb, masks, None)                                # (N, D)                l.3
        x0, conf, mixed = propose(model, h, len(h), pick, forced=share == 1)  #                 l.4
        x = reveal(x, masks, x0, conf, share)                           # (B, L)                l.5
        masked = x.cpu() == mask_id                                     # (B, L)  on the host
        # The next step sees the revealed tokens, and soft masks where [MASK] is left.
        emb[masks] = F.embedding(x[masks], net.table)                   # (N, D)
        if model.sm:
            soft = faded(mixed, plain, b, schedule, switch, masked.sum(-1), start)   # (N, D)
            emb[masks] = torch.where((x[masks] == mask_id)[:, None], soft, emb[masks])  #       l.6
        if on_step:
            on_step(x)
    return x


def propose(model, h, n, pick, forced=False):
    """A token for each mask, how sure the model is of it, and its soft mask         Alg. 2 l.4, l.6

    h: (N, D) hidden states that predict N masks. The first n of these masks may be revealed, and
    get a token and a soft mask, the others a soft mask alone.
    forced: this may be the last chance to fill them. So where the model predicts [MASK] itself,
    take the best other token [ours]. The authors' code leaves masks in its answers.
    Returns x0 (n,), conf (n,) (the highest is revealed first), and soft masks (N, D) or None.
    Temperature and top-p change tokens and conf [code], but not the soft masks [code].
    """
    def of_rows(h):
        logits = model.net.head(h)                                      # (m, V)
        p = filtered(logits, pick.temperature, pick.top_p)              # (m, V)
        x0 = p.argmax(-1)                                               # (m,)
        if pick.temperature > 0:
            source = pick.generator
            u = torch.rand(len(p), generator=source, device=source.device if source else "cpu",
                           dtype=torch.float64)                         # (m,)
            x0 = categorical(p, u)                                      # (m,)
        if forced:  # before conf, because a threshold must test the token that is written
            first, second = logits.topk(2).indices.unbind(-1)           # 2 × (m,)
            best = torch.where(first == model.mask_id, second, first)   # (m,)
            x0 = torch.where(x0 == model.mask_id, best, x0)             # (m,)
        if pick.algorithm == "entropy":
            # −H of what the filter leaves [code], guarded against log 0. At App. B.2's settings, it
            # can leave a single token, with H = 0.
            conf = (p * (p + 1e-10).log()).sum(-1)                      # (m,)
        elif pick.algorithm == "maskgit_plus":
            conf = p.gather(-1, x0[:, None])[:, 0]                      # (m,)
        else:
            raise ValueError(f"no algorithm is called {pick.algorithm!r}")
        if model.sm is None:
            return x0, conf
        return x0, conf, *model.weigh(h, logits)                        # (m,), (m,), …

    x0, conf, *weighed = in_chunks(of_rows, h[:n], V=len(model.net.table))
    if not model.sm:
        return x0, conf, None
    mixed = model.feedback(weighed=weighed)[0]                          # (n, D)
    if n < len(h):
        mixed = torch.cat((mixed, model.feedback(h[n:])[0]))            # (N, D)
    return x0, conf, mixed


def filtered(logits, temperature=0.0, top_p=1.0):
    """Probabilities (n, V) of logits after temperature and top-p, in this order [code]  App. B.2"""
    if temperature > 0:
        logits = logits / temperature
    p = logits.softmax(-1)                                              # (n, V)
    if top_p == 1:
        return p
    # The token at which the sum crosses top_p is kept here, and dropped by sample.nucleus.
    top, ids = likeliest(p, top_p)                                      # 2 × (n, m)
    before = F.pad(top.cumsum(-1)[:, :-1], (1, 0))                      # (n, m)  total before each
    p = torch.zeros_like(p).scatter(-1, ids, top.masked_fill(before > top_p, 0))
    return p / p.sum(-1, keepdim=True)


def reveal(x, masks, x0, conf, share=1.0, threshold=None):
    """x (B, L) with the surest proposals written into it                          Alg. 2 l.5, §2.2

    masks: 2 × (n,) positions that may be revealed.   x0, conf: (n,) from `propose`.
    share: of each sequence's masks, see `reveal_shares`.   threshold: instead of a share, reveal
    the surest token of each sequence, and all with at least this conf (Fast-dLLM).
    A proposal can be [MASK] itself. Then the position stays masked [code].
    """
    b, _ = masks
    score = torch.full(x.shape, -torch.inf, device=x.device).index_put(masks, conf)     # (B, L)
    # 0 for the surest. Ties go left to right [ours]; in the authors' topk, in no fixed order.
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)[masks]        # (n,)
    if threshold is not None:
        chosen = (rank == 0) | (conf >= threshold)                      # (n,)
    else:  # a share of the sequence's own masks [ours]; the authors take the mean over the batch
        count = (score.isfinite().sum(-1) * share).long()               # (B,)
        chosen = rank < count[b]                                        # (n,)
    return x.index_put(masks, torch.where(chosen, x0, x[masks]))        # (B, L)


def reveal_shares(steps):
    """The share of the masks that each step reveals: 1 − s/t, from time t to s < t        §2.2, L/T

    The number of tokens is rounded down, and the last step reveals all that are left. App. B.2 says
    that with T = L, each step reveals one token. Here it is 0, 1, …, 1, 2 for L = 768 [code].
    """
    times = torch.linspace(1, 1e-3, steps + 1)                          # (T + 1,)
    shares = 1 - times[1:] / times[:-1]                                 # (T,)  on the host
    shares[-1] = 1
    return shares


def faded(mixed, plain, b, schedule, switch, left, start):
    """Soft masks (N, D) with the schedule's factor on λ                                    App. C.9

    With a factor g on λ, the mix becomes [MASK] + g (mix − [MASK]), because it is linear in λ.
    mixed: (N, D) with the full λ.   plain: (D,) the embedding of [MASK].   b: (N,) the sequence of
    each.   left, start: (B,) masks now and at the start: each sequence has its own time [ours].
    """
    if schedule == "none":
        return mixed
    # In Python's floats: 3/15 in fp32, read back, would be above 0.2.
    shares = [now / max(of, 1) for now, of in zip(left.tolist(), start.tolist())]
    gain = torch.tensor([time_gain(schedule, share, switch) for share in shares])        # (B,)
    gain = to_device(gain[b], mixed.device)[:, None]                    # (N, 1)
    return torch.lerp(plain.float(), mixed.float(), gain).to(mixed.dtype)


@torch.no_grad()
def decode_blocks(model, x, gen_len, steps, block, cache="prefix", threshold=None, pick=GREEDY,
                  schedule="none", switch=0.5, on_step=None):
    """Fill the last gen_len positions, block after block from the left        App. B.2, Fast-dLLM

    x: from `pad_prompts`.   steps: passes, divided among the blocks. With a threshold (see
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
    Each mask has the feedback of the last pass that predicted it [ours]. So feedback crosses block
    boundaries.
    """
    net, mask_id, L = model.net, model.mask_id, x.shape[1]
    plain = net.table[mask_id]                                          # (D,)
    masked = x == mask_id                                               # (B, L)  on the host
    start, place = masked.sum(-1), torch.arange(L)                      # (B,), (L,)  on the host
    x = to_device(x, plain.device)                                      # (B, L)
    emb = F.embedding(x, net.table)                                     # (B, L, D)
    if masked[:, :L - gen_len].any():
        raise Refused("blocks fill a response only: use --block=0 to infill")
    check(gen_len, steps, block, threshold)
    if threshold is not None:
        pick = pick._replace(algorithm="maskgit_plus")
    # With a threshold, each pass reveals at least one token, and `shares` only counts the passes.
    shares = reveal_shares(block if threshold is not None else steps * block // gen_len)
    shares[0] = 1  # all that the first pass may reveal: one token, unless it is the only pass
    kv = None
    for first in range(L - gen_len, L, block):
        later = {"none": (0, L), "prefix": (first, L), "dual": (first, first + block)}[cache]
        for i, share in enumerate(shares):
            lo, hi = later if i else (0, L)                             # what the pass computes
            only_first = i == 0 and len(shares) > 1
            end = first + 1 if only_first else first + block            # of what may be revealed
            # lo = 0 computes all afresh. With a cache, lo ≥ first ≥ 1: no prompt is empty.
            h, kv = net.trunk(emb[:, lo:hi], kv if lo else None, lo)    # (B, hi − lo, D)
            opened = masked & (place >= first) & (place < end)          # (B, L)  may be revealed
            b, l = opened.nonzero(as_tuple=True)                        # 2 × (n,)  on the host
            n = len(b)
            if model.sm:  # feedback for other masks, too, unless their sequence's block is filled
                others = masked & ~opened & opened.any(1, keepdim=True) & (place < hi)   # (B, L)
                b, l = map(torch.cat, zip((b, l), others.nonzero(as_tuple=True)))        # 2 × (N,)
            masks = to_device(b, x.device), to_device(l, x.device)      # 2 × (N,)
            h = net.predictors(h, (masks[0], masks[1] - lo))            # (N, D)
            x0, conf, mixed = propose(model, h, n, pick, share == 1 or threshold is not None)
            x = reveal(x, (masks[0][:n], masks[1][:n]), x0, conf, share, threshold)      # (B, L)
            masked = x.cpu() == mask_id                                 # (B, L)  on the host
            emb[masks] = F.embedding(x[masks], net.table)               # (N, D)
            if model.sm:
                soft = faded(mixed, plain, b, schedule, switch, masked.sum(-1), start)   # (N, D)
                emb[masks] = torch.where((x[masks] == mask_id)[:, None], soft, emb[masks])
            if on_step:
                on_step(x)
            if not masked[:, first:first + block].any():
                break
    return x


def check(gen_len, steps, block, threshold):
    if threshold is not None and not block:
        raise Refused(f"threshold {threshold} works on blocks: add --block=32")
    if block and (gen_len % block or (threshold is None and steps % (gen_len // block))):
        raise Refused(f"gen_len {gen_len} and steps {steps} cannot be shared evenly by blocks of "
                      f"{block}: change one of them")


def load_for_decoding(cfg):
    """The model that cfg names: Dream, Tokenizer, and SoftMask or None."""
    check(cfg.gen_len, cfg.steps or cfg.gen_len, cfg.block, cfg.threshold)
    *_, device, dtype = machine(cfg.device, cfg.dtype)
    dtype = None if cfg.dtype == "auto" else dtype or torch.float32  # None: as stored
    tok, model = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtype)
    omega = load_adapter(model, cfg.adapter) if cfg.adapter else None
    sm = SoftMask(**omega) if omega else None
    sm = with_omega(sm, model.cfg.mask_token_id, cfg)
    if cfg.merge:
        dora.merge_(model)
    if cfg.compile:  # one graph for whole sequences, another for cached parts
        model.trunk = torch.compile(model.trunk, dynamic=True)
    return model, tok, (sm.to(device) if sm and cfg.soft else None)


def answer(model, tok, sm, ids, cfg, until=(), on_step=None):
    """The text that fills the masks of a prompt, and {"nfe", "tokens", "kept", "seconds"}.

    ids: of the prompt, a list.   until: the text is cut at each of these strings in turn [code].
    kept: tokens before the end token.
    """
    def count(x):
        stats["nfe"] += 1
        if on_step:
            on_step(x)

    stats, begin = {"nfe": 0}, time.perf_counter()
    mask_id, device = model.cfg.mask_token_id, model.table.device
    # Seeded by the prompt, too, so that the order of several prompts does not change answers.
    generator = torch.Generator("cpu" if device.type == "mps" else device)
    generator.manual_seed(seed_of(cfg.seed, ids))
    settings = {"pick": Pick(cfg.algorithm, cfg.temperature, cfg.top_p, generator),
                "schedule": cfg.schedule, "switch": cfg.switch, "on_step": count}
    x = pad_prompts(model.cfg, [ids], cfg.gen_len)                      # (1, L)
    gaps = x == mask_id                                                 # (1, L)  on the host
    two_pass = TwoPass(model, sm, mask_id)
    steps = cfg.steps or cfg.gen_len + ids.count(mask_id)  # gen_len is 0 when infilling
    if cfg.block:
        x = decode_blocks(two_pass, x, cfg.gen_len, steps, cfg.block, cfg.cache, cfg.threshold,
                          **settings)
    else:
        x = decode(two_pass, x, steps, **settings)
    new = x.cpu()[gaps].tolist()
    ends = (i for i, token in enumerate(new) if token in model.cfg.eos_token_id)
    kept = new[:next(ends, None)]
    text = tok.decode(kept)
    for stop in until:
        text = text.split(stop)[0]
    return text, stats | {"tokens": len(new), "kept": len(kept),
                          "seconds": time.perf_counter() - begin}


def main(cfg):
    if not cfg.block:
        launch.unused(cfg, "without --block", "cache")
    if cfg.infill:
        launch.unused(cfg, "with --infill", "prompt", "chat")
    model, tok, sm = load_for_decoding(cfg)
    if sm is None:
        launch.unused(cfg, "without feedback", "schedule", "switch")
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
        cost = "{tokens} tokens, {kept} before the end token; NFE {nfe}, {seconds:.1f} s; "
        print(cost.format(**stats) + str(sm or "without feedback"), file=sys.stderr)


if __name__ == "__main__":
    launch.run(main, Config)
