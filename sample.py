# SPDX-License-Identifier: MIT
"""Text from masks: the reverse process of an MDLM with soft-masking.             §2.1, §2.2, App. A

    whether a token appears or vanishes    step_probs, schedule_flips     needs no network
    which token appears                    nucleus, sample_categorical    needs its prediction
    Alg. 2                                 generate
    Alg. 2, equally many tokens a step     generate_in_order

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She ran. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.ckpt --count=5000 --sampler=remdm-loop

The last command makes the samples of one cell of Tables 1 and 2, one JSON line each, and goes on
after a stop. Under torchrun each rank has a file: samples.RANK.jsonl.
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
from launch import Refused, Share, Size, append_jsonl, machine, progress, read_jsonl, to_device
from mdlm import MDLM
from show import show, trace

T_END = 1e-5  # the time after the last step. It is not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
T_ON, T_OFF, ALPHA_ON = 0.55, 0.05, 0.9  # the plateau of remdm-loop, App. B.1
ORDERS = "entropy", "random"
NOT_IN_SETTINGS = "count", "batch_size", "seed", "out", "show", "trace", "tokenizer_dir", "device"
GRAPHS_PAY = 5000  # network calls from which CUDA graphs, 12 ms a call faster, are worth a minute


def step_probs(t, s, sampler="mdlm", eta=None):
    """One reverse step t → s < t: P[reveal a mask], P[re-mask a token]              Eq. 1, App. B.1

    t, s: times in [0, 1]. Here α_t = 1 − t, without the floor of training [code]. remdm-loop holds
    α at ALPHA_ON between T_ON and T_OFF. Before and after, it is mdlm with a faster clock.
    The network decides *which* token appears, the schedule alone *whether* one does. So a sampler
    is just this pair. It must take the masked share from t to s: t (1 − reveal) + (1 − t) remask =
    s. With remdm-loop this share is not t, but 1 − α of its own clock.
    """
    remask = 0.0
    if eta is None:
        eta = SAMPLERS[sampler]
    if sampler == "remdm-loop":
        if T_OFF < t <= T_ON:  # the plateau: as many tokens appear as vanish, up to η = 1/9
            return min(1.0, eta * ALPHA_ON / (1 - ALPHA_ON)), eta
        if t > T_ON:  # α goes from 0 to ALPHA_ON
            speed = ALPHA_ON / (1 - T_ON)
            t = 1 - (1 - t) * speed
            s = 1 - (1 - s) * speed
        else:  # α goes from ALPHA_ON to 1
            speed = (1 - ALPHA_ON) / T_OFF
            t, s = t * speed, s * speed
    if sampler == "remdm-cap":
        remask = min(eta, s / max(1 - t, 1e-9))  # the cap keeps P[reveal] at most 1
    reveal = (t - s + remask * (1 - t)) / t  # solves t (1 − reveal) + (1 − t) remask = s
    # The quotient is above 1 when a step of remdm-loop goes from before T_ON to long after it.
    return min(1.0, reveal), remask


def schedule_flips(free, steps, generator, every, sampler, eta):
    """At which steps each position of one sequence flips: this needs no network               Eq. 1

    free: (L,) bool, True where the position may change.   sampler, eta: for `step_probs`.
    every: yield the steps without a change too, as Alg. 2 and App. C.5 do. App. C.4 and the
        released code skip them [code]. A binary model would only repeat its prediction there, one
        with SM would iterate its feedback.
    Yields (t, flips, u): at time t the positions `flips` (L,) bool go from [MASK] to a token or
    back. u: (L,) float64 in [0, 1), for `sample_categorical`.
    """
    masked, dt = free.copy(), (1 - T_END) / steps
    for i in range(steps):
        t = 1 - i * dt
        reveal, remask = step_probs(t, t - dt, sampler, eta)
        # Always 2 L numbers, so that they do not depend on what happened before.
        draws = torch.rand(2, len(free), dtype=torch.float64, generator=generator)
        coin, u = draws.numpy()                                                # (L,), (L,)
        flips = free & (coin < np.where(masked, reveal, remask))               # (L,)
        # If masks are left in the last step, the network is called even without a change [code].
        if every or flips.any() or (i == steps - 1 and masked.any()):
            yield t, flips, u
        masked ^= flips


def schedule_batch(free, steps, generators, every, sampler, eta):
    """`schedule_flips` of n sequences. Yields t (n,), flips (n, L), u (n, L).

    In each turn, every sequence takes its own next step, at its own t [ours]. A finished one has
    t = T_END, and stays in the batch: CUDA graphs need static shapes.
    """
    sequences = [schedule_flips(row, steps, g, every, sampler, eta)
                 for row, g in zip(free, generators)]
    finished = T_END, np.zeros(free.shape[1], bool), np.zeros(free.shape[1])
    for turn in zip_longest(*sequences, fillvalue=finished):
        yield tuple(map(np.stack, zip(*turn)))


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

    n: sequences.   steps: T.   sampler, every, eta: see `schedule_flips`.
    soft: False decodes without feedback.   top_p: for `nucleus`.
    generator: a torch.Generator on the CPU, or a list of n: then a sample is the same in any batch.
    on_step(x, lam, guess, at, h): called after every turn. x (n, L): ids. Where they are [MASK],
        lam (n, L) is λ, guess (n, L) the likeliest token. at (m,): the masks of the flat batch that
        stay, predicted from h (m, D).
    x: (L,) or (n, L) ids on the CPU to start from. All but [MASK] stays (default: all [MASK]).
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each sequence needed.
    Flips need no prediction, so the host runs ahead of the device. Only `likeliest` makes it wait.
    Checked against tests/oracles.py alg2.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    soft = soft and model.sm is not None
    every = every or model.cfg.time_conditioning  # a network that knows t predicts anew each time
    x, generators = beginning(model, n, x, generator)                          # (n, L)
    L, masked = x.shape[1], (x == mask_id).numpy()                             # (n, L), on the host
    turns = schedule_batch(masked, steps, generators, every, sampler, eta)
    nfe = np.zeros(n, np.int64)                                                # (n,)
    x = x.flatten().to(device, copy=True)                                      # (nL,)
    emb = F.embedding(x, table)                                                # (nL, D)
    lam, guess = torch.zeros(n * L, device=device), x.clone()                  # (nL,), (nL,)
    state = [part.view(n, L) for part in (x, lam, guess)]  # views: they see every change

    def positions(which):
        return to_device(torch.from_numpy(np.flatnonzero(which)), device)      # (m,) of n·L

    def predict(t):
        t = to_device(torch.from_numpy(t).float(), device)                     # (n,)
        return net.trunk(emb.view(n, L, -1), t).flatten(0, 1)                  # (nL, D)

    def pick(h, u):
        return sample_categorical(nucleus(net.head(h).softmax(-1), top_p), u)  # (m,)

    for t, flips, u in progress(turns, "steps", steps, leave=False, disable=bool(on_step) or None):
        live = t > T_END                                                       # (n,)
        appear, vanish = positions(masked & flips), positions(~masked & flips)
        stay = positions(masked & ~flips & live[:, None])
        u = torch.from_numpy(u[masked & flips])                                # (m,)
        masked = masked ^ flips
        nfe += live
        h = predict(t)                                                         # (nL, D)         l.3
        x[appear] = in_chunks(pick, h[appear], u, V=len(table))                #               l.4-5
        emb[appear] = F.embedding(x[appear], table)
        if soft:
            emb[stay], lam[stay], guess[stay] = model.feedback(h[stay])        #                 l.6
        if len(vanish) and soft:  # with the sampler mdlm, no token vanishes
            emb[vanish], lam[vanish], guess[vanish] = model.feedback_of_certain(x[vanish])
        elif len(vanish):
            emb[vanish] = table[mask_id]
        x.index_fill_(0, vanish, mask_id)  # x[vanish] = mask_id, but a GPU is not waited for
        if on_step:
            on_step(*state, stay, h[stay])
    if masked.any():  # few, but a tenth of L with remdm-loop and 20 steps; no nucleus [code]
        left = positions(masked)
        h = predict(np.full(n, T_END))                                         # (nL, D)
        x[left] = in_chunks(lambda h: net.head(h).argmax(-1), h[left], V=len(table))
        nfe += masked.any(1)
        if on_step:
            on_step(*state, left[:0], h[:0])
    model.train(was_training)
    return state[0].cpu(), torch.from_numpy(nfe)


@torch.no_grad()
def generate_in_order(model, n, steps, order, top_p=0.9, generator=None, on_step=None, x=None,
                      soft=True):
    """Alg. 2 with a fixed number of tokens a step: `order` decides only *which* positions come next

    order: "entropy", the surest first (§2.2), or "random", its control. The entropy is that of the
        whole prediction, not of its nucleus. Equal entropies go from left to right [ours].
    A step reveals 1 / steps_left of the masks that are left, rounded up [ours].
    The rest is as in `generate`, but `at` of on_step are all masks before the step.
    Checked against tests/oracles.py in_order.
    """
    net, mask_id, table = model.net, model.mask_id, model.net.table
    device, was_training = table.device, model.training
    model.eval()
    soft = soft and model.sm is not None
    x, generators = beginning(model, n, x, generator)                          # (n, L)
    L, x = x.shape[1], x.flatten().to(device)                                  # (nL,)
    emb = F.embedding(x, table)                                                # (nL, D)
    nfe = torch.zeros(n, dtype=torch.long, device=device)                      # (n,)

    def choose(h, u):
        logits = net.head(h)                                                   # (m, V)
        logp = logits.log_softmax(-1)                                          # (m, V)
        p = logp.exp()                                                         # (m, V)
        # Before the nucleus: after it, many masks have one token left, and their entropies tie.
        neg_entropy = (p * logp.clamp_min(-100)).sum(-1)                       # (m,)
        drawn = sample_categorical(nucleus(p, top_p), u)                       # (m,)
        if not soft:
            return drawn, neg_entropy
        return drawn, neg_entropy, *model.feedback_chunk(h, logits)

    for steps_left in range(steps, 0, -1):
        masked = (x == mask_id).view(n, L)                                     # (n, L)
        at = masked.flatten().nonzero().squeeze(1)                             # (N,)
        if not len(at):
            break
        t = masked.float().mean(-1)                                            # (n,)
        draws = [torch.rand(L, 2, dtype=torch.float64, generator=g) for g in generators]
        u, chance = torch.cat(draws).unbind(1)                                 # 2 × (nL,)
        chance = chance.float().view(n, L).to(device)                          # (n, L)
        h = net.hidden(emb.view(n, L, -1), (at // L, at % L), t)               # (N, D)          l.3
        u = u[at.cpu()]                                                        # (N,)
        drawn, neg_entropy, *feedback = in_chunks(choose, h, u, V=len(table))  #            l.4, l.6
        score = chance
        if order == "entropy":
            score = torch.zeros(n * L, device=device).index_copy(0, at, neg_entropy).view(n, L)
            # From masks alone, a DiT predicts the same everywhere. There chance chooses, not
            # rounding errors, which differ from batch to batch [ours].
            score = torch.where(masked.all(-1, keepdim=True), chance, score)
        score = score.masked_fill(~masked, -torch.inf)                         # (n, L)
        place = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # (n, L)  0: first
        count = (masked.sum(-1, keepdim=True) + steps_left - 1) // steps_left  # (n, 1)  rounded up
        chosen = (place < count).flatten()[at]                                 # (N,)
        x = x.index_copy(0, at, torch.where(chosen, drawn, mask_id))           # (nL,)           l.5
        nfe += masked.any(-1)
        emb = F.embedding(x, table)                                            # (nL, D)
        lam, guess = torch.zeros(n * L, device=device), x.clone()              # 2 × (nL,)
        if soft:
            rest = (~chosen).nonzero().squeeze(1)                              # (m,) of N
            stay = at[rest]                                                    # (m,) of n·L
            emb[stay], lam[stay], guess[stay] = (part[rest] for part in feedback)      #         l.6
        if on_step:
            on_step(x.view(n, L), lam.view(n, L), guess.view(n, L), at, h)
    model.train(was_training)
    return x.view(n, L).cpu(), nfe.cpu()


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
    omega_s: Annotated[float, 0, 1 - 1e-6] | None = None  # (a binary model needs this one)
    omega_a: launch.Positive | None = None  # (default for a binary model: the paper's start)
    omega_b: launch.Negative | None = None  # (the same)
    # In these texts, the two characters \n are a line break.
    prompt: str = ""            # text that the sample starts with
    infill: str = ""            # text with ___ where some is missing
    given: str = ""             # a puzzle: one character a token, and a dot for each to be filled
    seed: int = 1
    out: str = "samples.jsonl"  # appended to. A sample that it already holds is not made again
    show: bool = False          # watch the first sequence of every batch
    trace: str = ""             # a file for one trajectory, a JSON line per step, for lab/plot.py
    tokenizer_dir: str = ""     # folder of GPT-2's vocabulary, for machines without a network
    device: str = "auto"        # cuda, else mps, else cpu
    compile: bool | None = None  # CUDA graphs: a minute (default: as in --out, else where it pays)


def starting_ids(cfg, tok, special):
    """The ids (L,) to start from: a row as in training (data.rows), masks where text is missing."""
    encode, L = tok.encode_ordinary, cfg.length
    bos, eos, mask = special["bos"], special["eos"], special["mask_id"]
    text = (cfg.infill or cfg.prompt).replace("\\n", "\n")
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
        raise Refused(f"{len(ids)} tokens, {ids.count(mask)} of them masks, for length {L}: "
                      f"--infill needs ___, --given needs L − 3 cells and dots")
    return torch.tensor(ids)


def files_of(cfg, rank, world):
    """The file of this rank, and the lines of all ranks, so that all decide alike."""
    paths = [cfg.out]
    if world > 1:
        paths = [f"{cfg.out.removesuffix('.jsonl')}.{r}.jsonl" for r in range(world)]
    if cfg.trace and os.path.realpath(cfg.trace) in map(os.path.realpath, [cfg.out, *paths]):
        raise Refused(f"--trace={cfg.trace} is a file of samples: give another --trace")
    return paths[rank], [line for path in paths for line in read_jsonl(path)]


def resolved(cfg, n_masks, device, world, lines):
    """cfg with numbers where it has defaults.

    n_masks: in the ids to start from.   lines: of --out. New samples are compiled if these are.
    """
    if cfg.eta is not None and not cfg.sampler.startswith("remdm"):
        raise Refused(f"--eta does nothing with --sampler={cfg.sampler}: give it a remdm sampler")
    steps, compiled = cfg.steps, cfg.compile
    if steps is None:
        steps = n_masks if cfg.sampler in ORDERS else cfg.length
    if compiled is None and lines:
        compiled = lines[0].get("settings", {}).get("compile")
    if compiled is None:
        calls = steps * math.ceil(cfg.count / cfg.batch_size / world)
        compiled = device.type == "cuda" and calls >= GRAPHS_PAY
    return replace(cfg, steps=steps, compile=compiled, every=cfg.every or cfg.trace != "")


def settings_of(cfg, step, weights, tokenizer, dtype):
    """What decides how a sample looks, for every line of --out. weights: a sum that tells them."""
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_SETTINGS}
    if cfg.sampler == "entropy":
        settings["surest"] = "by the whole prediction"  # it was by the nucleus once
    return settings | {"step": step, "weights": weights, "tokenizer": tokenizer,
                       "dtype": str(dtype or torch.float32)}


def main(cfg):
    rank, world, device, dtype = machine(cfg.device)
    model = MDLM.load(cfg.checkpoint)
    model.sm = with_omega(model.sm, model.mask_id, cfg.omega_s, cfg.omega_a, cfg.omega_b)
    weights = model.net.table.double().sum().item()  # before it is moved: MPS has no float64
    model.to(device)
    special = model.info["tokenizer"]
    tok = tokenizer(special["name"], cfg.tokenizer_dir)
    cfg = replace(cfg, length=cfg.length or model.cfg.length, soft=cfg.soft and bool(model.sm))
    if tok.n_vocab != model.mask_id or cfg.length > model.cfg.length:
        raise Refused(f"{cfg.checkpoint} has {model.mask_id} tokens and length {model.cfg.length}, "
                      f"not the {tok.n_vocab} of {tok.name} or --length={cfg.length}")
    path, lines = files_of(cfg, rank, world)
    x = starting_ids(cfg, tok, special)                                        # (L,)
    cfg = resolved(cfg, x.tolist().count(model.mask_id), device, world, lines)
    decode = partial(generate, sampler=cfg.sampler, eta=cfg.eta, every=cfg.every)
    if cfg.sampler in ORDERS:
        decode = partial(generate_in_order, order=cfg.sampler)
    settings = settings_of(cfg, model.info["step"], weights, tok.name, dtype)
    texts = {}  # {index: text}
    for line in read_jsonl(path):
        if (line.get("settings"), line.get("seed")) != (settings, cfg.seed):
            raise Refused(f"{path} holds samples of other settings: choose another --out")
        texts[line["index"]] = line["text"]
    watch = None
    if cfg.trace and rank == 0:
        launch.write_text(cfg.trace, "")
        watch = trace(tok, model, cfg.trace)
    elif cfg.show and rank == 0:
        watch = show(tok, model.mask_id)
    watched = [0] if cfg.trace else range(cfg.count)
    todo = [i for i in range(rank, cfg.count, world)
            if i not in texts or (watch and i in watched)]
    title = f"{len(todo)} samples"
    if dtype:
        model.net.cast_linears_(dtype)
    if cfg.compile:
        compile_parts(model, "reduce-overhead")
        title += ", the first after a minute of compiling"
    size = min(len(todo), cfg.batch_size)
    batches = range(0, len(todo), cfg.batch_size)
    for start in progress(batches, title, disable=rank > 0 or cfg.show or not todo):
        batch = todo[start:start + size]
        if cfg.compile:  # a smaller batch would compile again: copies of the last sample fill it
            batch += (size - len(batch)) * batch[-1:]
        generators = [rng("sample", cfg.seed, i) for i in batch]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            ids, nfe = decode(model, len(batch), cfg.steps, top_p=cfg.top_p, generator=generators,
                              on_step=watch, x=x, soft=cfg.soft)
        if cfg.trace:
            watch = None  # its file is for one trajectory
        for i, row, calls in zip(batch, ids.tolist(), nfe.tolist()):
            if i not in texts:  # else it was made to be watched
                texts[i] = tok.decode(row)
                append_jsonl(path, {"ids": row, "text": texts[i], "nfe": calls, "seed": cfg.seed,
                                    "index": i, "settings": settings})
    if rank == 0:
        print(f"{texts[0]}\n{path}: {len(texts)} samples")


if __name__ == "__main__":
    launch.run(main, Config)
