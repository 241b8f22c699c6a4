# SPDX-License-Identifier: MIT
"""Text from masks: the reverse process of an MDLM with soft-masking.             §2.1, §2.2, App. A

    whether a token appears or vanishes    step_probs, coins              needs no network
    Alg. 2                                 generate
    Alg. 2, equally many tokens a step     generate_in_order
    which token appears                    nucleus, sample_categorical

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She ran. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.ckpt --count=5000 --out=samples.jsonl

A sample is printed, or with --out becomes a JSON line. The last command makes those of one cell of
Tables 1 and 2, and goes on after a stop. Each of its ranks has a file: samples.RANK.jsonl.
"""

import math
import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F

import launch
from checkpoint import with_omega
from chunks import compile_parts, in_chunks, likeliest
from data import rng, tokenizer
from launch import Refused, Share, Size, append_jsonl, progress, read_jsonl, to_device
from mdlm import MDLM
from show import show, trace
from softmask import neg_entropy

T_END = 1e-5  # the time after the last step. It is not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
T_ON, T_OFF, ALPHA_ON = 0.55, 0.05, 0.9  # the plateau of remdm-loop, App. B.1
ORDERS = "entropy", "random"
NOT_IN_SETTINGS = "count", "batch_size", "seed", "out", "show", "trace", "tokenizer_dir", "device"
GRAPHS_PAY = 5000  # network calls from which CUDA graphs, 12 ms a call faster, are worth a minute


def step_probs(t, s, sampler="mdlm", eta=None):
    """One reverse step t → s < t: P[reveal a mask], P[re-mask a token]              Eq. 1, App. B.1

    In §2.1's posterior a mask becomes x_0 with probability (α_s − α_t) / (1 − α_t), and a token
    stays. Eq. 1 puts the network's prediction in the place of x_0. So the network decides *which*
    token appears, the schedule alone *whether* one does, and a sampler is just this pair.

    Here α_t = 1 − t, without the floor of training [code]. So t is the share of masks. ReMDM also
    turns tokens into masks, with probability σ. The share of masks still has to go from t to s:

        t (1 − reveal) + (1 − t) σ = s,    so    reveal = (t − s + σ (1 − t)) / t

    mdlm         σ = 0, the posterior.
    remdm-cap    σ = η, but at most s / (1 − t), where every mask is revealed.
    remdm-loop   has another share of masks than t. It falls from 1 to 1 − ALPHA_ON until T_ON, with
                 σ = 0. It rests there until T_OFF, with σ = η. Then it falls to 0, with σ = 0.

    t, s: times in [0, 1].   eta: η (default: that of App. B.1).
    """
    if eta is None:
        eta = SAMPLERS[sampler]
    sigma, share_t, share_s = 0.0, t, s  # 1 − α: the shares of masks before and after the step
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
    # In remdm-loop it can be above 1, and the share is missed: at rest, with nine tokens to a mask,
    # it is nine times η, and a long step from before T_ON falls too far.
    return min(1.0, reveal), sigma


def coins(free, steps, generator, sampler="mdlm", eta=None, every=False):
    """The turns of one sequence: which positions change, and when                        Alg. 2 l.5

    free: (L,) bool, the masks at the start. No other position changes.
    sampler, eta: for `step_probs`.   every: see `generate`.
    Returns [(t, appear, stay, vanish, u)]. At time t, the masks of `appear` (L,) become tokens,
        those of `stay` (L,) do not, and the tokens of `vanish` (L,) become masks. u: float64 in
        [0, 1), one for each token that appears, for `sample_categorical`. If masks are left after
        the last step, they appear in one more turn [code], with NaN for u.
    """
    turns, masked = [], free
    dt = (1 - T_END) / steps
    for i in range(steps):
        t = 1 - i * dt
        reveal, remask = step_probs(t, t - dt, sampler, eta)
        # Always 2 L numbers, so that they do not depend on what happened before.
        draws = torch.rand(2, len(free), dtype=torch.float64, generator=generator)
        coin, u = draws.numpy()                                                # 2 × (L,)
        appear = masked & (coin < reveal)                                      # (L,)
        stay = masked & ~appear                                                # (L,)
        vanish = free & ~masked & (coin < remask)                              # (L,)
        # If masks are left in the last step, the network is called even without a change [code].
        needed = i == steps - 1 and masked.any()
        if appear.any() or vanish.any() or every or needed:
            turns.append((t, appear, stay, vanish, u[appear]))
        masked = stay | vanish
    if masked.any():  # few, but a tenth of L with remdm-loop and 20 steps
        none = np.zeros_like(free)
        turns.append((T_END, masked, none, none, np.full(masked.sum(), np.nan)))
    return turns


def side_by_side(plans, L, device):
    """Turn 1 of every sequence, then turn 2 of every sequence, …                             [ours]

    Each leaves out steps of its own, so in one turn they are at different times. One that is
    finished stays, at T_END: CUDA graphs need static shapes.

    plans: of n sequences of length L, by `coins`.
    Yields t (n,), the index pairs (b, l) where a token appears, a mask stays, a token vanishes,
        and u (m,) of the tokens that appear. All but u are moved to `device`.
    """
    none = np.zeros(L, bool)
    for turn in zip_longest(*plans, fillvalue=(T_END, none, none, none, np.zeros(0))):
        t, *sets, u = zip(*turn)
        t, u = torch.tensor(t), torch.from_numpy(np.concatenate(u))            # (n,), (m,)
        sets = [indices(torch.from_numpy(np.stack(rows)), device) for rows in sets]
        yield to_device(t, device), *sets, u


def indices(where, device):
    """The index pair (b, l), on the device, of `where` (n, L) bool, which is on the CPU."""
    return tuple(to_device(part, device) for part in where.nonzero(as_tuple=True))


def beginning(model, n, x, generator):
    """The ids (n, L) to start from, and n generators: those of a list, or n seeded by one."""
    if x is None:
        x = torch.full((n, model.cfg.length), model.mask_id)
    if not isinstance(generator, list):
        seeds = torch.randint(2**62, (n,), generator=generator).tolist()
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
    return x.expand(n, -1), generator


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

    Whether a position changes does not depend on the network. So all coins of l.5 are tossed before
    the first l.3, and l.4 draws only the tokens that appear. Turns in which nothing changes are
    left out (App. C.4) [code], unless `every` asks for them (App. C.5): SM iterates its feedback in
    those.

    n: sequences.   steps: T.   sampler, eta: for `step_probs`.   top_p: for `nucleus`.
    generator: a torch.Generator on the CPU, or a list of n: then a sample is the same in any batch.
    on_step(x, lam, guess, masks, h): called after every turn. x (n, L): ids. Where they are [MASK],
        lam (n, L) is λ, guess (n, L) the likeliest token. masks: the index pair (b, l) of the masks
        that stay. h (m, D): what predicts them.
    x: (L,) or (n, L) ids on the CPU to start from. All but [MASK] stays (default: all [MASK]).
    soft: False decodes without feedback.
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each sequence needed.
    The host runs ahead of the device. Only `likeliest` makes it wait.
    Checked against tests/oracles.py alg2.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    soft = soft and model.sm is not None
    every = every or model.cfg.time_conditioning  # a network that knows t predicts anew each time
    x, generators = beginning(model, n, x, generator)                          # (n, L)
    plans = [coins(row, steps, g, sampler, eta, every)
             for row, g in zip((x == mask_id).numpy(), generators, strict=True)]
    nfe = torch.tensor([len(plan) for plan in plans])                          # (n,)
    turns = progress(side_by_side(plans, x.shape[1], device), "calls", int(nfe.max()),
                     leave=False, disable=bool(on_step) or None)
    x = x.to(device, copy=True)                                                # (n, L)
    emb = F.embedding(x, table)                                                # (n, L, D)
    lam, guess = torch.zeros(x.shape, device=device), x.clone()  # only for on_step
    mask = torch.tensor(mask_id, device=device)  # to write a number, the host would wait

    def draw(h, u):
        logits = net.head(h)                                                   # (m, V)
        drawn = sample_categorical(nucleus(logits.softmax(-1), top_p), u)      # (m,)
        last = to_device(u.isnan(), device)  # no nucleus in the last turn [code]
        return torch.where(last, logits.argmax(-1), drawn)                     # (m,)

    for t, appear, stay, vanish, u in turns:
        h = net.trunk(emb, t)                                                  # (n, L, D)       l.3
        x[appear] = in_chunks(draw, h[appear], u, V=len(table))                #               l.4-5
        emb[appear] = F.embedding(x[appear], table)
        if soft:
            emb[stay], lam[stay], guess[stay] = model.feedback(h[stay])        #                 l.6
        if len(vanish[0]):  # only with a remdm sampler
            guess[vanish] = x[vanish]
            x[vanish] = mask
            emb[vanish] = table[mask_id]
            if soft:
                emb[vanish], lam[vanish], _ = model.feedback_of_certain(guess[vanish])
        if on_step:
            on_step(x, lam, guess, stay, h[stay])
    model.train(was_training)
    return x.cpu(), nfe


@torch.no_grad()
def generate_in_order(model, n, steps, order, top_p=0.9, generator=None, on_step=None, x=None,
                      soft=True):
    """Alg. 2 with equally many tokens a step: the prediction decides which positions come next

    steps: network calls. With as many as there are masks, each reveals one token.
    order: "entropy", the surest first (§2.2), or "random", its control. The entropy is that of the
        whole prediction. Its nucleus is often a single token, and many entropies would be 0.
    The rest is as in `generate`, but the masks of on_step are all those before the step.
    Checked against tests/oracles.py in_order.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    soft = soft and model.sm is not None
    x, generators = beginning(model, n, x, generator)                          # (n, L)
    L, x = x.shape[1], x.to(device)                                            # (n, L)
    emb = F.embedding(x, table)                                                # (n, L, D)
    nfe = torch.zeros(n, dtype=torch.long, device=device)                      # (n,)

    def predict(h, u):
        logits = net.head(h)                                                   # (m, V)
        logp = logits.log_softmax(-1)                                          # (m, V)
        drawn = sample_categorical(nucleus(logp.exp(), top_p), u)              # (m,)
        feedback = model.feedback_chunk(h, logits) if soft else ()
        return drawn, neg_entropy(logp), *feedback

    for steps_left in range(steps, 0, -1):
        masked = x == mask_id                                                  # (n, L)
        on_host = masked.cpu()  # the host waits here
        if not on_host.any():
            break
        masks = indices(on_host, device)                                       # 2 × (N,)
        draws = [torch.rand(L, 2, dtype=torch.float64, generator=g) for g in generators]
        u, chance = torch.stack(draws).unbind(-1)                              # 2 × (n, L)
        h = net.hidden(emb, masks, masked.float().mean(-1))                    # (N, D)          l.3
        drawn, minus_H, *feedback = in_chunks(predict, h, u[on_host], V=len(table))  #           l.4
        score = to_device(chance.float(), device)                              # (n, L)
        if order == "entropy":
            # From masks alone, a DiT predicts the same everywhere. There chance chooses, not
            # rounding errors, which differ from batch to batch [ours].
            blank = masked.all(-1, keepdim=True)                               # (n, 1)
            score = torch.where(blank, score, score.index_put(masks, minus_H))
        chosen = next_masks(score, masked, steps_left)                         # (n, L)
        x = torch.where(chosen, x.index_put(masks, drawn), x)                  # (n, L)          l.5
        nfe += masked.any(-1)
        lam, guess = torch.zeros_like(score), x.clone()  # only for on_step
        if soft:
            emb[masks], lam[masks], guess[masks] = feedback                    #                 l.6
        emb = torch.where(chosen[..., None], F.embedding(x, table), emb)       # (n, L, D)
        if on_step:
            on_step(x, lam, guess, masks, h)
    model.train(was_training)
    return x.cpu(), nfe.cpu()


def next_masks(score, masked, steps_left):
    """Where to reveal: of each row, the masks with the highest scores. (n, L) bool           [ours]

    They are 1 / steps_left of the row's masks, rounded up. Equal scores go from left to right.
    score, masked: (n, L).
    """
    score = score.masked_fill(~masked, -torch.inf)
    ranking = score.argsort(dim=-1, descending=True, stable=True)              # (n, L)  positions
    count = (masked.sum(-1, keepdim=True) + steps_left - 1) // steps_left      # (n, 1)
    among = torch.arange(masked.shape[1], device=masked.device) < count        # (n, L)  by rank
    return torch.zeros_like(masked).scatter(1, ranking, among)                 # (n, L)


def nucleus(probs, p):
    """The likeliest tokens, as long as their sum is at most p, renormalised                App. B.1

    probs: (n, V).   Returns (n, V). The likeliest token is always kept. The token that crosses p is
    dropped [code]. The usual rule, which Dream follows, keeps it (sample_dream.filtered).
    Checked against tests/oracles.py nucleus.
    """
    if p == 1:
        return probs
    top, ids = likeliest(probs, p)                                             # 2 × (n, m)
    dropped = top.cumsum(-1) > p                                               # (n, m)
    dropped[:, 0] = False
    top = top.masked_fill(dropped, 0)                                          # (n, m)
    return torch.zeros_like(probs).scatter(1, ids, top / top.sum(-1, keepdim=True))  # (n, V)


def sample_categorical(probs, u):
    """One token (n,) per row, drawn with its probability: where u falls in the cumulative sum

    probs: (n, V), of any positive sum.   u: (n,) float64, uniform in [0, 1). One number per row
    [ours] gives the same distribution as V exponentials [code]. With fp32 noise, tokens rarer than
    6e-8 would never come: entropy and generative perplexity would fall, the text be no better.
    Checked against tests/oracles.py draw.
    """
    device = "cpu" if probs.device.type == "mps" else probs.device  # MPS has no float64
    cdf = probs.to(device, torch.float64).cumsum(-1)                           # (n, V)
    u = to_device(u, cdf.device)[:, None] * cdf[:, -1:]                        # (n, 1)
    drawn = torch.searchsorted(cdf, u, right=True)  # right: p = 0 is never drawn
    return drawn[:, 0].to(probs.device)                                        # (n,)


@dataclass
class Config:
    checkpoint: str = ""        # anything that `python checkpoint.py` can describe
    count: Size = 1             # samples (torchrun would take --n as one of its own flags)
    batch_size: Size = 16       # sequences at a time, which changes no sample
    length: Annotated[int, 3, 2**20] | None = None  # L (default: the model's)
    steps: Size | None = None   # T (default: L, with an order one step for each mask)
    # mdlm, remdm-cap (for T < L) and remdm-loop toss coins, App. B.1. entropy and random reveal
    # equally many tokens a step: the surest first (§2.2), or any.
    sampler: Literal[tuple(SAMPLERS) + ORDERS] = "mdlm"
    eta: Share | None = None    # P[re-mask] at most (default: the sampler's in App. B.1)
    top_p: Annotated[float, 1e-12, 1] = 0.9  # nucleus
    soft: bool = True           # False: decode an SM model in binary
    every: bool = False         # also make the steps without a change, as --trace always does
    # Another ω than the model's. A binary model then decodes with feedback, with k = 3.
    omega_s: Annotated[float, 1e-6, 1 - 1e-6] | None = None  # (a binary model needs this one)
    omega_a: launch.Positive | None = None  # (default for a binary model: the paper's start)
    omega_b: launch.Negative | None = None  # (the same)
    # In these texts, the two characters \n are a line break.
    prompt: str = ""            # text that the sample starts with
    infill: str = ""            # text with ___ where some is missing; it follows the prompt
    given: str = ""             # a puzzle: one character a token, and a dot for each to be filled
    seed: int = 1
    out: str = ""               # appended to; what it holds is not made again (default: print)
    show: bool = False          # watch the first sequence of every batch
    trace: str = ""             # a file for one trajectory, a JSON line per step, for lab/plot.py
    tokenizer_dir: str = ""     # folder of GPT-2's vocabulary, for machines without a network
    device: str = "auto"        # cuda, else mps, else cpu
    compile: bool | None = None  # CUDA graphs: a minute (default: as in --out, else where it pays)


def starting_ids(cfg, tok, special):
    """The ids (L,) to start from: a row as in training (data.rows), masks where text is missing."""
    encode, L = tok.encode_ordinary, cfg.length
    bos, eos, mask = special["bos"], special["eos"], special["mask_id"]
    text = (cfg.prompt + cfg.infill).replace("\\n", "\n")
    if cfg.given:
        cells = [mask if c == "." else encode(c)[0] for c in cfg.given]
        ids = [bos, *cells, eos, eos]  # the EOS of the document, and that of the row
    elif cfg.infill:
        first, *parts = [encode(part) for part in text.split("___")]
        ids = [bos, *first]
        room = L - len(ids) - sum(map(len, parts)) - 1  # for masks, between BOS and EOS
        for i, part in enumerate(parts):
            width = math.ceil(room / (len(parts) - i))  # an even share
            room -= width
            ids += width * [mask] + part
        ids.append(eos)
    else:
        ids = [bos, *encode(text)] if text else []
        ids += (L - len(ids)) * [mask]
    if len(ids) != L or mask not in ids:
        raise Refused(f"{len(ids)} tokens with BOS and EOS, {ids.count(mask)} of them masks, for "
                      f"length {L}: a text may take {L - 1}, --infill needs ___, and --given "
                      f"needs {L - 3} characters, some of them dots")
    return torch.tensor(ids)


def load(cfg):
    """The MDLM with the ω of cfg, on the CPU, its tokenizer, and cfg with the model's defaults."""
    model = MDLM.load(cfg.checkpoint)
    model.sm = with_omega(model.sm, model.mask_id, cfg.omega_s, cfg.omega_a, cfg.omega_b)
    tok = tokenizer(model.info["tokenizer"]["name"], cfg.tokenizer_dir)
    cfg = replace(cfg, length=cfg.length or model.cfg.length, soft=cfg.soft and bool(model.sm))
    if tok.n_vocab != model.mask_id:
        raise Refused(f"{cfg.checkpoint} has {model.mask_id} tokens, but {tok.name} has "
                      f"{tok.n_vocab}")
    if cfg.length > model.cfg.length:
        raise Refused(f"--length={cfg.length} is over the {model.cfg.length} that {cfg.checkpoint} "
                      f"was trained on")
    return model, tok, cfg


def file_and_lines(cfg, here):
    """The file of this rank, and the lines of all ranks, so that all decide alike."""
    if here.world > 1 and not cfg.out:
        raise Refused("torchrun needs --out=FILE, such as --out=samples.jsonl")
    paths = [cfg.out]
    if here.world > 1:
        paths = [f"{cfg.out.removesuffix('.jsonl')}.{r}.jsonl" for r in range(here.world)]
    if cfg.trace and os.path.realpath(cfg.trace) in map(os.path.realpath, [cfg.out, *paths]):
        raise Refused(f"--trace={cfg.trace} is a file of samples: give another --trace")
    return paths[here.rank], [line for path in paths for line in read_jsonl(path)]


def resolved(cfg, n_masks, here, lines):
    """cfg with numbers where it has defaults.   n_masks: at the start.   lines: of --out."""
    if cfg.eta is not None and not cfg.sampler.startswith("remdm"):
        raise Refused(f"--eta does nothing with --sampler={cfg.sampler}: choose a remdm sampler")
    steps, compiled = cfg.steps, cfg.compile
    if steps is None:
        steps = n_masks if cfg.sampler in ORDERS else cfg.length
    if compiled is None and lines:  # CUDA graphs change the last bits of a sample
        compiled = lines[0].get("settings", {}).get("compile")
    if compiled is None:
        calls = steps * math.ceil(cfg.count / cfg.batch_size / here.world)
        compiled = here.device.type == "cuda" and calls >= GRAPHS_PAY
    return replace(cfg, steps=steps, compile=compiled, every=cfg.every or cfg.trace != "")


def settings_of(cfg, model, tok, here):
    """All that decides how a sample looks. It stands in every line of --out."""
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_SETTINGS}
    if cfg.sampler == "entropy":
        settings["surest"] = "by the whole prediction"  # by its nucleus, samples would be others
    weights = model.net.table.double().sum().item()  # before it is moved: MPS has no float64
    return settings | {"step": model.info["step"], "weights": weights, "tokenizer": tok.name,
                       "dtype": str(here.dtype or torch.float32)}


def batches(todo, cfg):
    """Yields the numbers of samples to make together, equally many each time for CUDA graphs."""
    size = min(len(todo), cfg.batch_size)
    for start in range(0, len(todo), cfg.batch_size):
        batch = todo[start:start + size]
        if cfg.compile:  # copies of the last sample fill it: another size compiles for a minute
            batch += (size - len(batch)) * batch[-1:]
        yield batch


def main(cfg):
    here = launch.machine(cfg.device)
    path, lines = file_and_lines(cfg, here)

    # ---- the model, and what there is already
    model, tok, cfg = load(cfg)
    x = starting_ids(cfg, tok, model.info["tokenizer"])                        # (L,)
    cfg = resolved(cfg, x.tolist().count(model.mask_id), here, lines)
    settings = settings_of(cfg, model, tok, here)
    if any((line.get("settings"), line.get("seed")) != (settings, cfg.seed) for line in lines):
        raise Refused(f"{path} holds samples made with other settings: choose another --out")
    texts = {line["index"]: line["text"] for line in lines}

    # ---- the device
    model.to(here.device)
    if here.dtype:
        model.net.cast_linears_(here.dtype)
    if cfg.compile:
        compile_parts(model, "reduce-overhead")

    # ---- the samples
    decode = partial(generate, sampler=cfg.sampler, eta=cfg.eta, every=cfg.every)
    if cfg.sampler in ORDERS:
        decode = partial(generate_in_order, order=cfg.sampler)
    watch, watched = None, []  # samples to make even if the file holds them
    if here.rank == 0 and cfg.trace:
        launch.write_text(cfg.trace, "")
        watch, watched = trace(tok, model, cfg.trace), [0]
    elif here.rank == 0 and cfg.show:
        watch, watched = show(tok, model.mask_id), range(cfg.count)
    todo = [i for i in range(here.rank, cfg.count, here.world) if i not in texts or i in watched]
    title = "samples, the first after a minute of compiling" if cfg.compile else "samples"
    bar = progress(total=len(todo), desc=title, disable=here.rank > 0 or cfg.show or not todo)
    for batch in batches(todo, cfg):
        generators = [rng("sample", cfg.seed, i) for i in batch]
        with here.autocast():
            ids, nfe = decode(model, len(batch), cfg.steps, top_p=cfg.top_p, generator=generators,
                              on_step=watch, x=x, soft=cfg.soft)
        if cfg.trace:
            watch = None  # its file is for one trajectory
        for i, row, calls in zip(batch, ids.tolist(), nfe.tolist()):
            if i in texts:  # it was made to be watched, or to fill a batch
                continue
            texts[i] = tok.decode(row)
            if path:
                append_jsonl(path, {"ids": row, "text": texts[i], "nfe": calls, "seed": cfg.seed,
                                    "index": i, "settings": settings})
            else:
                bar.write(texts[i])
        bar.update(len({*batch}))
    bar.close()
    if path and here.rank == 0:
        print(f"{texts[0]}\nwritten to {path}")


if __name__ == "__main__":
    launch.run(main, Config)
