# SPDX-License-Identifier: MIT
"""Text from masks: the reverse process of an MDLM with soft-masking.             §2.1, §2.2, App. A

    whether a token appears or vanishes    step_probs, schedule_flips     needs no network
    which token appears                    nucleus, sample_categorical    needs its prediction
    Alg. 2                                 generate
    Alg. 2, equally many tokens a step     generate_in_order

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She ran. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.ckpt --count=5000 --sampler=remdm-loop

The last command makes the samples of one cell of Tables 1 and 2. Each sample is one JSON line at
the end of --out: ids, text, nfe, seed, index, settings. The same command goes on after a stop.
Under torchrun each rank makes its share, in a file of its own: samples.RANK.jsonl.

Not here: training, metrics (eval.py), drawing (show.py), Dream (sample_dream.py).
"""

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F

from arms import with_omega
from data import rng, tokenizer
from launch import (
    Refused,
    append_jsonl,
    line_breaks,
    machine,
    progress,
    read_jsonl,
    run,
    to_device,
    write_text,
)
from mdlm import MDLM, in_chunks, likeliest
from show import show, trace

T_END = 1e-5  # the time after the last step. It is not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # η, App. B.1
ORDERS = "random", "entropy"


# -------------------------------------------------------------------------------------------------
# whether a token appears or vanishes


def step_probs(t, s, sampler="mdlm", eta=None, t_on=0.55, t_off=0.05, alpha_on=0.9):
    """One reverse step t → s < t: (P[reveal a masked token], P[re-mask a visible one])        Eq. 1

    t, s: times in [0, 1]. Here α_t = 1 − t, without the floor of training [code].
    eta: the largest P[re-mask] (default: SAMPLERS[sampler]).
    t_on, t_off, alpha_on: remdm-loop holds α at alpha_on between these times. Before and after
        them, it is mdlm with a faster clock.
    Raises Refused for values out of range.

    The network decides *which* token appears, and the schedule alone decides *whether* one does. So
    a sampler is just this pair. A new sampler must take the masked share from t to s:
    t (1 − reveal) + (1 − t) remask = s. The share of remdm-loop is not t but its own 1 − α: from 1
    to 1 − alpha_on before t_on, then constant to t_off, then to 0.
    """
    remask, eta = 0.0, (SAMPLERS.get(sampler) if eta is None else eta)
    if sampler not in SAMPLERS:
        raise Refused(f"sampler={sampler} is none of {', '.join(SAMPLERS)}")
    if not (0 <= eta <= 1 and 0 < t_off < t_on < 1 and 0 < alpha_on < 1):
        raise Refused(f"eta={eta}, t_on={t_on}, t_off={t_off}, alpha_on={alpha_on}: eta must be in "
                      f"[0, 1], 0 < t_off < t_on < 1 and 0 < alpha_on < 1")
    if sampler == "remdm-loop":
        if t_off < t <= t_on:  # the plateau: as many tokens appear as vanish
            return min(1.0, eta * alpha_on / (1 - alpha_on)), eta
        if t > t_on:  # α goes from 0 to alpha_on
            t, s = (1 - (1 - time) * alpha_on / (1 - t_on) for time in (t, s))
        else:  # α goes from alpha_on to 1
            t, s = (time * (1 - alpha_on) / t_off for time in (t, s))
    if sampler == "remdm-cap":
        remask = min(eta, s / max(1 - t, 1e-9))  # the cap keeps P[reveal] at most 1
    reveal = (t - s + remask * (1 - t)) / t
    # The quotient is above 1 when a step of remdm-loop goes from before t_on to long after it.
    return min(1.0, reveal), remask


def schedule_flips(free, steps, generator, every=False, **schedule):
    """At which steps each position of one sequence turns: this needs no network               Eq. 1

    free: (L,) bool, True where the position may change.   steps: T.   schedule: for `step_probs`.
    every: yield the steps without a change too.
    Yields (t, flips, u): at time t the positions `flips` (L,) bool turn, from [MASK] to a token or
    back. u: (L,) float64 in [0, 1), for `sample_categorical`.

    Steps without a change are left out. A binary model would only repeat its prediction there. A
    model with SM would predict something else, from its own feedback. App. C.4 and the released
    code skip these steps too, App. C.5 and Alg. 2 do not. Every step draws 2 L numbers, whether it
    needs them or not, so that the numbers of a step do not depend on what happened before it.
    """
    masked, dt = free.copy(), (1 - T_END) / steps
    for i in range(steps):
        t = 1 - i * dt
        reveal, remask = step_probs(t, t - dt, **schedule)
        draws = torch.rand(2, len(free), dtype=torch.float64, generator=generator)
        coin, u = draws.numpy()                                                # (L,), (L,)
        flips = free & (coin < np.where(masked, reveal, remask))               # (L,)
        # If masks are left in the last step, the network is called even without a change [code].
        if every or flips.any() or (i == steps - 1 and masked.any()):
            yield t, flips, u
        masked ^= flips


def one_each(generator, n):
    """A list of n CPU generators: the list that is given, or new ones, with seeds from a generator.

    generator: a torch.Generator, None for torch's own, or a list of n.
    """
    if isinstance(generator, list):
        return generator
    seeds = torch.randint(2**62, (n,), generator=generator).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def schedule_batch(free, steps, generator, every, **schedule):
    """`schedule_flips` of n sequences. In each turn, every sequence takes its own next step [ours].

    free: (n, L) bool.   every, schedule: see `schedule_flips`.   generator: see `one_each`.
    Yields (t, flips, u): (n,), (n, L), (n, L). A finished sequence has t = T_END and no flips.
    """
    n, L = free.shape
    sequences = [schedule_flips(row, steps, g, every, **schedule)
                 for row, g in zip(free, one_each(generator, n))]
    finished = T_END, np.zeros(L, bool), np.zeros(L)
    for turn in zip_longest(*sequences, fillvalue=finished):
        yield tuple(map(np.stack, zip(*turn)))


# -------------------------------------------------------------------------------------------------
# which token appears


def nucleus(probs, p):
    """The likeliest tokens, as long as their sum is at most p, renormalised                App. B.1

    probs: (n, V).   p: in (0, 1].   Returns (n, V). Checked against tests/oracles.py nucleus.
    The likeliest token is always kept. The token that crosses p is dropped [code]. The usual
    rule keeps it. Dream follows that rule: see sample_dream.filtered.
    """
    if p == 1:
        return probs
    top, ids = likeliest(probs, p)                                             # 2 × (n, m)
    out = top.cumsum(-1) > p                                                   # (n, m)
    out[:, 0] = False
    top = top.masked_fill(out, 0)                                              # (n, m)
    return torch.zeros_like(probs).scatter(1, ids, top / top.sum(-1, keepdim=True))  # (n, V)


def sample_categorical(probs, u):
    """One token per row, drawn with its probability, in float64

    probs: (n, V), not negative, of any positive sum.
    u: (n,) float64, uniform in [0, 1). The drawn token is where u falls in the cumulative sum.
    Returns (n,). Checked against tests/oracles.py draw.

    With fp32 noise, tokens rarer than 6e-8 would never come. Then entropy falls, and generative
    perplexity falls with it, although the text is no better. One number per row [ours] gives the
    same distribution as V exponentials per row [code].
    """
    cdf = probs.to(u.device, torch.float64).cumsum(-1)                         # (n, V)
    # right=True: a token with p = 0 is never drawn.
    drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)      # (n, 1)
    return drawn[:, 0].to(probs.device)


# -------------------------------------------------------------------------------------------------
# Alg. 2


def check_settings(model, n, steps, top_p, soft, passes, fresh):
    """Raises Refused for settings of `generate` that are out of range."""
    if min(steps, n, passes) < 1 or not 0 < top_p <= 1:
        raise Refused(f"steps={steps}, n={n}, passes={passes}, top_p={top_p}: the first three must "
                      f"be at least 1, and top_p in (0, 1]")
    if (passes > 1 or fresh) and not (soft and model.sm):
        raise Refused(f"passes={passes}, fresh={fresh} are about feedback, and there is none here")


def predict(model, emb, t, waiting, passes, fresh):
    """The network in one step, called `passes` times                                     Alg. 2 l.3

    emb: (n·L, D). Every call but the first overwrites its masked rows `waiting` (m,).
    t: (n,) times, fp32.   Returns h: (n·L, D).
    """
    if fresh:
        emb[waiting] = model.net.table[model.mask_id]
    shape = len(t), -1, emb.shape[1]
    h = model.net.trunk(emb.view(shape), t).flatten(0, 1)                      # (nL, D)
    for _ in range(passes - 1):
        emb[waiting] = model.feedback(h[waiting])[0]
        h = model.net.trunk(emb.view(shape), t).flatten(0, 1)                  # (nL, D)
    return h


@torch.no_grad()
def generate(model, n, steps, sampler="mdlm", top_p=0.9, generator=None, on_step=None, x=None,
             soft=True, passes=1, fresh=False, every=False, **schedule):
    """Inference with soft-masking                                                    Alg. 2, App. A

    model: MDLM.   n: sequences, one batch.   steps: T.   sampler, schedule: for `step_probs`.
    top_p: for `nucleus`.   soft: False decodes in binary.
    passes: network calls in each step. Each call gets the feedback of the call before. The first
        gets that of the last step (Alg. 2).
    fresh: the first call of a step gets plain masks instead. With passes=2, top_p=1 and many steps,
        this is the sampler that the two-pass loss bounds (mdlm.MDLM.forward).
    every: also make the steps without a change, as Alg. 2 and App. C.5 do. Then the feedback
        changes in these steps. In the released code it does not [code].
    generator: a torch.Generator on the CPU, or a list of n, one per sequence. With a list, a sample
        is the same in any batch.
    on_step(x, lam, guess, rows, h): called after every turn, with the ids (n, L). Where they are
        [MASK], lam (n, L) is λ and guess (n, L) is the most likely token. rows (m,) are the masks
        of the flat batch that stay, and h (m, D) are the hidden states that predict them.
    x: (L,) or (n, L) ids to start from. All but [MASK] stays as it is (default: all [MASK]).
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each sequence needed.
    Raises Refused for settings out of range. Checked against tests/oracles.py alg2.

    In each turn every sequence takes its own next step, at its own time. The schedules are known in
    advance, so the host never waits for the device. A finished sequence stays in the batch, so that
    shapes are static, as CUDA graphs need. The head is computed for positions that appear. SM adds
    the cost of the head, λ, the top k and a mix for positions that stay masked (App. C.4).
    """
    check_settings(model, n, steps, top_p, soft, passes, fresh)
    net, mask_id, table, was_training = model.net, model.mask_id, model.net.table, model.training
    device, V, soft = table.device, len(table), soft and model.sm is not None
    model.eval()  # no dropout
    x = torch.full((n, model.cfg.length), mask_id) if x is None else x.expand(n, -1)
    (n, L), masked = x.shape, (x == mask_id).numpy()                           # (n, L), on the host
    every = every or model.cfg.time_conditioning  # a network that knows t predicts anew each time
    turns = schedule_batch(masked.copy(), steps, generator, every, sampler=sampler, **schedule)
    nfe = np.zeros(n, np.int64)                                                # (n,)
    x = x.flatten().to(device, copy=True)                                      # (nL,)
    emb = F.embedding(x, table)                                                # (nL, D)
    lam, guess = torch.zeros(n * L, device=device), x.clone()                  # (nL,), (nL,)

    def on_device(array, where=device):
        return to_device(torch.from_numpy(array), torch.device(where))

    def rows(at):
        return on_device(np.flatnonzero(at))

    def pick(h, u):
        return sample_categorical(nucleus(net.head(h).softmax(-1), top_p), u)

    def watch(rows):
        if on_step:
            on_step(x.view(n, L), lam.view(n, L), guess.view(n, L), rows, h[rows])

    silent = True if on_step else None  # None: no bar where there is no terminal
    for t, flips, u in progress(turns, "steps", steps, leave=False, disable=silent):
        live = t > T_END                                                       # (n,)
        appear, vanish = rows(masked & flips), rows(~masked & flips)
        waiting, stay = rows(masked & live[:, None]), rows(masked & ~flips & live[:, None])
        # MPS has no float64.
        u = on_device(u[masked & flips], "cpu" if device.type == "mps" else device)
        masked ^= flips
        nfe += live * passes
        t = on_device(t.astype(np.float32))                                    # (n,)
        h = predict(model, emb, t, waiting, passes, fresh)                     # (nL, D)         l.3
        x[appear] = in_chunks(pick, h[appear], u, V=V)                         #               l.4-5
        emb[appear] = F.embedding(x[appear], table)
        if soft:
            emb[stay], lam[stay], guess[stay] = model.feedback(h[stay])        #                 l.6
            # A re-masked token was visible in this call. So the model predicts this very
            # token, with p = 1 (SUBS [code]).
            emb[vanish], lam[vanish], guess[vanish] = model.feedback_of_certain(x[vanish])
        else:
            emb[vanish] = table[mask_id]
        x.index_fill_(0, vanish, mask_id)  # x[vanish] = mask_id, but a GPU is not waited for
        watch(stay)
    if masked.any():  # rare, except for remdm-loop: a tenth of L after 20 steps
        left = rows(masked)
        t = torch.full((n,), T_END, device=device)                             # (n,)
        h = predict(model, emb, t, left, passes, fresh)                        # (nL, D)
        x[left] = in_chunks(lambda h: net.head(h).argmax(-1), h[left], V=V)  # no nucleus [code]
        nfe += masked.any(1) * passes
        watch(left[:0])
    model.train(was_training)
    return x.view(n, L).cpu(), torch.from_numpy(nfe)


@torch.no_grad()
def generate_in_order(model, n, steps, order, top_p=0.9, generator=None, on_step=None, x=None,
                      soft=True, passes=1):
    """Alg. 2 with a fixed number of tokens a step: `order` decides only *which* positions come next

    order: "entropy", the surest first (§2.2), or "random", its control.
    steps: T. Each step reveals its share of what is left, rounded up. With as many steps as masks,
        it is exactly one token a step.
    Others, and what is returned: see `generate`. Raises Refused for settings out of range. Checked
    against tests/oracles.py in_order.

    The entropy is taken after `nucleus`. Where only one token is left, it is 0. The host has a copy
    of the masks, for which it waits once in a step.
    """
    check_settings(model, n, steps, top_p, soft, passes, fresh=False)
    if order not in ORDERS:
        raise Refused(f"order={order!r} is none of {', '.join(ORDERS)}")
    net, mask_id, table, was_training = model.net, model.mask_id, model.net.table, model.training
    device, V, soft = table.device, len(table), soft and model.sm is not None
    model.eval()  # no dropout
    x = torch.full((n, model.cfg.length), mask_id) if x is None else x.expand(n, -1)
    (n, L), masked = x.shape, x == mask_id                                     # (n, L), on the host
    generators, x = one_each(generator, n), x.to(device)
    emb, nfe = F.embedding(x, table).flatten(0, 1), torch.zeros(n, dtype=torch.int64)  # (nL, D)

    def on_device(tensor):
        return to_device(tensor, device)

    def propose(h, u):
        p = nucleus(net.head(h).softmax(-1), top_p)                            # (m, V)
        return sample_categorical(p, u), (p * (p + 1e-10).log()).sum(-1)       # (m,), (m,)  −H

    for left in range(steps, 0, -1):
        rows = on_device(masked.flatten().nonzero()[:, 0])                     # (m,)
        u = torch.stack([torch.rand(L, 2, dtype=torch.float64, generator=g) for g in generators])
        u, chance = u[masked], masked.all(1, keepdim=True) | (order == "random")  # (m, 2), (n, 1)
        t = on_device(masked.float().mean(1))                                  # (n,)  shares masked
        h = predict(model, emb, t, rows, passes, fresh=False)                  # (nL, D)         l.3
        place = to_device(u[:, 0], torch.device("cpu" if device.type == "mps" else device))
        x0, conf = in_chunks(propose, h[rows], place, V=V)                     # (m,), (m,)      l.4
        # From masks alone, a DiT predicts the same at every position. So chance chooses one, not
        # rounding errors, which differ from batch to batch [ours].
        by_chance = on_device(chance.expand(n, L)[masked])                     # (m,)
        conf = torch.where(by_chance, on_device(u[:, 1].float()), conf)        # (m,)
        before = on_device(masked)                                             # (n, L)
        score = torch.full((n, L), -torch.inf, device=device).masked_scatter(before, conf)
        rank = score.argsort(descending=True, stable=True).argsort()           # (n, L)
        count = on_device((masked.sum(1, keepdim=True) + left - 1) // left)    # (n, 1)
        x = torch.where(before & (rank < count), x.masked_scatter(before, x0), x)  # (n, L)      l.5
        nfe += passes * masked.any(1)
        masked = (x == mask_id).cpu()                                          # (n, L), on the host
        emb = F.embedding(x, table).flatten(0, 1)                              # (nL, D)
        stay = on_device(masked.flatten().nonzero()[:, 0])                     # (m,)
        lam, guess = torch.zeros(n * L, device=device), x.flatten().clone()    # (nL,), (nL,)
        if soft:
            emb[stay], lam[stay], guess[stay] = model.feedback(h[stay])        #                 l.6
        if on_step:
            on_step(x, lam.view(n, L), guess.view(n, L), stay, h[stay])
    model.train(was_training)
    return x.cpu(), nfe


# -------------------------------------------------------------------------------------------------
# the command


@dataclass
class Config:
    checkpoint: str = ""        # anything that `python checkpoint.py` can describe
    ema: bool = True            # take the averaged backbone
    count: int = 1              # samples (torchrun would take --n as one of its own flags)
    batch_size: int = 16        # sequences at a time, which changes no sample
    length: int | None = None   # L (default: the model's)
    steps: int | None = None    # T (default: L, with --order one step for each mask)
    order: str = ""             # "": the sampler flips coins. entropy: the surest tokens first, the
                                # same number in each step. random: this number, at any positions
    sampler: str = "mdlm"       # App. B.1: remdm-cap for T < L, remdm-loop for T >= L
    eta: float | None = None    # P[re-mask] at most (default: the sampler's in App. B.1)
    t_on: float = 0.55          # remdm-loop starts to re-mask at this time
    t_off: float = 0.05         # and stops at this one
    alpha_on: float = 0.9       # between them, this share of the tokens is visible
    top_p: float = 0.9          # nucleus
    soft: bool = True           # False: decode an SM model in binary
    passes: int = 1             # network calls in each step, each with feedback of the one before
    fresh: bool = False         # the first call of each step gets plain masks
    every: bool = False         # also make the steps without a change, as --trace always does
    # Another ω than the model's. A binary model then decodes with feedback, with k = 3.
    omega_s: float | None = None
    omega_a: float | None = None  # (default for a binary model: the paper's start)
    omega_b: float | None = None  # (the same)
    # In these texts, the two characters \n are a line break.
    prompt: str = ""            # text that the sample starts with
    infill: str = ""            # text with ___ where some is missing
    given: str = ""             # a puzzle: one character a token, and a dot for each to be filled
    seed: int = 1
    out: str = "samples.jsonl"  # appended to. A sample that it already holds is not made again
    show: bool = False          # watch the first sequence of every batch
    trace: str = ""             # a file for one trajectory, a JSON line per step, for plot.py
    tokenizer_dir: str = ""     # GPT-2's vocabulary, for machines without a network
    device: str = "auto"        # cuda, else mps, else cpu
    dtype: str = "auto"         # bfloat16 where the GPU has it, else float32
    compile: bool = False       # CUDA graphs of the trunk. They take a minute to build


def starting_ids(prompt, infill, tok, special, L):
    """The ids to start from (L,): BOS, as in training's rows, then the given text and masks.

    prompt: masks follow this text.
    infill: masks stand for each ___ in this text, as many for each. EOS follows it.
    special: {name: id}.
    Raises Refused when the text does not fit, or when both are given.
    """
    parts = [tok.encode_ordinary(text) for text in (infill.split("___") if infill else [prompt])]
    if prompt and infill or infill and len(parts) == 1:
        raise Refused(f"--infill={infill!r} needs ___ where text is missing, and no --prompt "
                      f"beside it")
    n_text, gaps = sum(map(len, parts)), max(1, len(parts) - 1)
    room = L - 1 - bool(infill) - n_text
    if room < gaps:
        raise Refused(f"the text has {n_text} tokens and leaves no room in length {L}: shorten it, "
                      f"or raise --length")
    ids = [special["bos"]] * bool(prompt or infill) + parts[0]
    for i, part in enumerate(parts[1:]):
        width = room // gaps + (i < room % gaps)
        ids += [special["mask_id"]] * width + part
    ids += [special["eos"]] if infill else [special["mask_id"]] * (L - len(ids))
    return torch.tensor(ids)


def puzzle_ids(given, tok, special, L):
    """The row (L,) of a document with a mask for each dot: BOS, the document, EOS, EOS.

    given: L − 3 characters, of one token each. The ends are known, too: a row of training is BOS,
    L − 2 tokens of the text and EOS, and in the text each document ends with EOS (data.rows). So a
    6×6 Sudoku has 36 characters in L = 39.
    special: {name: id}.   Raises Refused for other characters, and for another number of them.
    """
    ids = [tok.encode_ordinary(character) for character in given]
    unknown = sorted({c for c, tokens in zip(given, ids) if len(tokens) != 1})
    if len(given) != L - 3 or unknown or "." not in given:
        found = f"{''.join(unknown)!r} is not" if unknown else f"it has {len(given)}"
        raise Refused(f"--given={given!r} must have {L - 3} characters in length {L}, one token "
                      f"each, and dots for what is to be filled: {found}")
    cells = [special["mask_id"] if c == "." else token for c, [token] in zip(given, ids)]
    return torch.tensor([special["bos"], *cells, special["eos"], special["eos"]])


def digest(model):
    """A hash of the weights. Another run may have the same path and the same step."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def existing_texts(path, settings, seed):
    """{index: text} of the samples in `path` that have these settings and this seed."""
    try:
        return {line["index"]: line["text"] for line in read_jsonl(path)
                if (line["settings"], line["seed"]) == (settings, seed)}
    except (Refused, KeyError, TypeError):
        raise Refused(f"{path} holds something else than samples: choose another --out")


def check(cfg, model, tok, L):
    """Raises Refused for flags that cannot be run with this model and tokenizer."""
    if not 3 <= L <= model.cfg.length:
        raise Refused(f"--length={L} is not in 3 to {model.cfg.length}, the model's length")
    if cfg.count < 1 or cfg.batch_size < 1:
        raise Refused(f"--count={cfg.count} --batch_size={cfg.batch_size}: both must be at least 1")
    if tok.n_vocab != model.mask_id:
        raise Refused(f"{tok.name} has {tok.n_vocab} ids, but {model.mask_id} come before the "
                      f"[MASK] of {cfg.checkpoint}: the two do not belong together")
    if cfg.order and cfg.order not in ORDERS:
        raise Refused(f"--order={cfg.order} is none of {', '.join(ORDERS)}")
    for name in ("sampler", "eta", "t_on", "t_off", "alpha_on", "fresh", "every"):
        if cfg.order and getattr(cfg, name) != getattr(Config, name):
            raise Refused(f"--{name} belongs to the samplers that flip coins, and --order="
                          f"{cfg.order} flips none: leave out one of them")
    unused = {"mdlm": ("eta", "t_on", "t_off", "alpha_on"),
              "remdm-cap": ("t_on", "t_off", "alpha_on")}
    for name in unused.get(cfg.sampler, ()):
        if getattr(cfg, name) != getattr(Config, name):
            raise Refused(f"--{name} is not used by --sampler={cfg.sampler}: leave it out, or take "
                          f"another sampler")
    if cfg.given and (cfg.prompt or cfg.infill):
        raise Refused("--given stands alone: leave out --prompt and --infill")
    same_file = os.path.realpath(cfg.trace) == os.path.realpath(cfg.out)
    if cfg.trace and (cfg.count > 1 or cfg.show or same_file):
        raise Refused(f"--trace={cfg.trace} follows one sample, into a file of its own: leave out "
                      f"--count and --show, and name another file than --out")


def main(cfg):
    rank, world, device, dtype = machine(cfg.device, cfg.dtype)
    model = MDLM.load(cfg.checkpoint, cfg.ema)
    model.sm = with_omega(model.sm, model.mask_id, cfg.omega_s, cfg.omega_a, cfg.omega_b)
    model.to(device)
    mask_id, L = model.mask_id, model.cfg.length if cfg.length is None else cfg.length
    special = model.info["tokenizer"]
    tok = tokenizer(special["name"], cfg.tokenizer_dir)
    check(cfg, model, tok, L)
    if cfg.given:
        x = puzzle_ids(cfg.given, tok, special, L)
    else:
        x = starting_ids(line_breaks(cfg.prompt), line_breaks(cfg.infill), tok, special, L)
    how = {name: getattr(cfg, name) for name in ("sampler", "top_p", "t_on", "t_off", "alpha_on")}
    n_steps = int((x == mask_id).sum()) if cfg.order else L
    how |= {"steps": n_steps if cfg.steps is None else cfg.steps,
            "soft": cfg.soft and model.sm is not None,
            "eta": SAMPLERS.get(cfg.sampler) if cfg.eta is None else cfg.eta}
    # Defaults are not written, so that older files of samples, without these flags, stay valid.
    loops = {"passes": cfg.passes, "fresh": cfg.fresh, "order": cfg.order,
             "every": cfg.every or bool(cfg.trace) and not cfg.order}
    how |= {name: v for name, v in loops.items() if v != getattr(Config, name)}
    given = {name: getattr(cfg, name) for name in ("checkpoint", "ema", "prompt", "infill")}
    given |= {name: getattr(cfg, name) for name in ("omega_s", "omega_a", "omega_b", "given")
              if getattr(cfg, name) not in (None, "")}
    settings = how | given | {
        "weights": digest(model), "step": model.info["step"], "tokenizer": tok.name, "length": L,
        "dtype": str(dtype or torch.float32).removeprefix("torch.")}
    make = functools.partial(generate, **how)
    if cfg.order:
        make = functools.partial(generate_in_order, steps=how["steps"], order=cfg.order,
                                 top_p=cfg.top_p, soft=how["soft"], passes=cfg.passes)
    path = f"{cfg.out.removesuffix('.jsonl')}.{rank}.jsonl" if world > 1 else cfg.out
    found, steps = existing_texts(path, settings, cfg.seed), []
    done = set(found)
    watch = show(tok, mask_id) if cfg.show and rank == 0 else None
    watch = trace(tok, model, steps) if cfg.trace else watch
    todo = [i for i in range(rank, cfg.count, world) if i not in done or watch]
    if cfg.compile:
        model.net.trunk = torch.compile(model.net.trunk, mode="reduce-overhead")
    batches = range(0, len(todo), cfg.batch_size)
    silent = rank > 0 or cfg.show or not todo
    for start in progress(batches, f"{len(todo)} samples", disable=silent):
        batch = todo[start:start + cfg.batch_size]
        # A compiled trunk would be compiled again for a smaller batch. So the last batch is filled
        # with copies of its last sample, which costs less, and `zip` leaves them out.
        copies = min(len(todo), cfg.batch_size) - len(batch) if cfg.compile else 0
        generators = [rng("sample", cfg.seed, i) for i in batch + copies * batch[-1:]]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            ids, nfe = make(model, len(generators), generator=generators, x=x, on_step=watch)
        lines = [{"ids": row, "text": tok.decode(row), "nfe": calls, "seed": cfg.seed, "index": i,
                  "settings": settings} for row, calls, i in zip(ids.tolist(), nfe.tolist(), batch)]
        append_jsonl(path, *(line for line in lines if line["index"] not in done))
        found |= {line["index"]: line["text"] for line in lines}
    if cfg.trace and rank == 0:
        write_text(cfg.trace, "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in steps))
    if rank == 0:
        print(found[0])
    print(f"{path}: {len(todo)} samples made, {len(done)} were there")


if __name__ == "__main__":
    run(main, Config)
