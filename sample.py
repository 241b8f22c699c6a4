# SPDX-License-Identifier: MIT
"""Text from masks: the reverse process of an MDLM with soft-masking.                                  §2.1, §2.2, App. A

    whether a token appears or vanishes      rates, plan       the schedule's business, known before the network is asked
    which one appears                        nucleus, draw     the network's business
    Alg. 2                                   generate
    App. C.5                                 show              the paper's figure of a trajectory, alive in the terminal

    python sample.py --checkpoint=out/owt/last.pt --prompt="The night was" --show
    python sample.py --checkpoint=out/owt/last.pt --infill="She opened the door. ___ Nobody spoke." --length=64
    torchrun --nproc_per_node=8 sample.py --checkpoint=mdlm.ckpt --count=5000 --sampler=remdm-loop     # Tables 1 and 2

Samples are appended to --out, a JSON line each: ids, text, nfe, seed, index, settings. The same command goes on where it
was stopped. Under torchrun each rank makes its share, in its own file: samples.RANK.jsonl.

Not here: training, metrics (eval.py), and Dream, which reveals a counted number of tokens per step (sample_dream.py).
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from launch import Refused, atomic, machine, run
from data import rng, tokenizer
from mdlm import MDLM, at_once, in_chunks

T_END = 1e-5  # time of the last step, not quite 0 [code]
SAMPLERS = {"mdlm": 0.0, "remdm-cap": 0.04, "remdm-loop": 0.02}  # and the η of App. B.1


def rates(t, s, sampler="mdlm", eta=None, t_on=0.55, t_off=0.05, alpha_on=0.9):
    """One reverse step t → s < t as two numbers: P[reveal a masked token], P[re-mask a visible one]                Eq. 1

    t, s: times in [0, 1]; α_t = 1 − t here, without training's floor [code].   eta: None is SAMPLERS[sampler].
    t_on, t_off, alpha_on: between these times remdm-loop holds α at alpha_on, before and after it is a faster mdlm.

    The network chooses *which* token appears, the schedule alone *whether* one does. Whatever the two numbers are, they
    must carry the masked share from t to s:   t (1 − reveal) + (1 − t) remask = s.   Another sampler is another pair.
    """
    eta, remask = SAMPLERS.get(sampler) if eta is None else eta, 0.0
    if sampler not in SAMPLERS or not (0 <= eta <= 1 and 0 < t_off < t_on < 1 and 0 < alpha_on < 1):
        raise Refused(f"sampler={sampler}, eta={eta}, t_on={t_on}, t_off={t_off}, alpha_on={alpha_on}: the sampler must be one of "
                      f"{', '.join(SAMPLERS)}, eta in [0, 1], 0 < t_off < t_on < 1 and 0 < alpha_on < 1")
    if sampler == "remdm-loop":
        if t_off < t <= t_on:  # as many come as go
            return min(1.0, eta * alpha_on / (1 - alpha_on)), eta
        clock = (lambda t: 1 - (1 - t) * alpha_on / (1 - t_on)) if t > t_on else (lambda t: t * (1 - alpha_on) / t_off)
        t, s = clock(t), clock(s)
    if sampler == "remdm-cap":
        remask = min(eta, s / max(1 - t, 1e-9))  # the cap: more could not be paid back
    reveal = (t - s + remask * (1 - t)) / t
    return min(1.0, reveal), remask  # above 1 when one step spans more than is left of the loop's clock


def nucleus(probs, p):
    """The likeliest tokens while their sum is at most p, and the first in any case; renormalised                   App. B.1

    probs: (n, V).   p: in (0, 1].   Returns (n, V).
    The token that crosses p is dropped [code]. Dream's rule, and the usual one, keeps it: the two are not shared.
    """
    if p == 1:
        return probs
    V = probs.shape[1]
    # On a CPU, sorting all of V costs as much as the network, and is seldom needed. On CUDA, asking would make the host wait.
    for m in (V,) if probs.is_cuda else (min(1024, V), V):
        top, ids = probs.topk(m)                                                     # (n, m)
        out = top.cumsum(-1) > p                                                     # (n, m)
        if out[:, -1].all():
            break
    out[:, 0] = False
    top = top.masked_fill(out, 0)                                                    # (n, m)
    return torch.zeros_like(probs).scatter(1, ids, top / top.sum(-1, keepdim=True))  # (n, V)


def draw(probs, generator):
    """A token for every row with its probability: where a uniform number falls among the cumulated ones, in float64.

    probs: (n, V), p ≥ 0 of any positive sum.   generator: a torch.Generator, or the uniforms: (n,) float64.   Returns (n,).

    fp32 noise ends at 6e-8, rarer tokens would never come: entropy sinks, and generative perplexity with it, unearned.
    One number per row [ours]; the race of V exponentials [code] has the same distribution at V times the noise.
    """
    u = generator if isinstance(generator, torch.Tensor) else \
        torch.rand(len(probs), dtype=torch.float64, device=generator.device, generator=generator)     # (n,)
    cdf = probs.to(u.device, torch.float64).cumsum(-1)                                                # (n, V)
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].to(probs.device)       # p = 0 never wins


def plan(free, steps, generator, every=False, **schedule):
    """When each position of a sequence appears and vanishes: what a sampler decides without the network            Eq. 1

    free: (L,) bool, what may change.   every: keep steps that change nothing.   schedule: for `rates`.
    Returns [(t, at, u)]: at time t the positions `at` (m,) turn, mask to token or back; u (m,) is for `draw`.

    Steps that change nothing drop out. For a binary model they would repeat a prediction; with SM they must not be made,
    it would react to its own feedback [code]. 2 L draws a step whatever comes of them: samples do not touch each other.
    """
    events, masked, dt = [], free.copy(), (1 - T_END) / steps
    for i in range(steps):
        t = 1 - i * dt
        reveal, remask = rates(t, t - dt, **schedule)
        coin, u = torch.rand(2, len(free), dtype=torch.float64, generator=generator).numpy()          # (L,) each
        at = np.flatnonzero(free & (coin < np.where(masked, reveal, remask)))                         # (m,)
        if len(at) or every or (i == steps - 1 and masked.any()):  # masks that stay to the end get one more look [code]
            events.append((t, at, u[at]))
        masked[at] ^= True
    return events


@torch.no_grad()
def generate(model, n, steps, sampler="mdlm", top_p=0.9, generator=None, on_step=None, x=None, soft=True, **schedule):
    """Inference with soft-masking                                                                          Alg. 2, App. A

    model: MDLM.   n: sequences, one batch.   steps: T.   sampler, schedule: for `rates`.   top_p: for `nucleus`.
    generator: a torch.Generator on the CPU, or a list of n, one per sequence: then a sample is the same in any batch.
    on_step(x, lam, ids): called after every round with x (n, L) and, where it is masked, λ (n, L) and top guess (n, L).
    x: (L,) or (n, L) ids to start from, all but [MASK] is kept; None is all masks.   soft: False decodes in binary.
    Returns ids (n, L) on the CPU, and nfe (n,), the network calls that each needed. Raises Refused for bad settings.

    A round takes every sequence to its next event, each at its own time: steps that one skips cost nobody a call. The host
    knows the rows in advance and never waits for the device. The head runs on rows that appear; with SM, on those that
    stay masked too. Finished sequences stay in the batch: static shapes, for CUDA graphs.
    """
    if steps < 1 or n < 1 or not 0 < top_p <= 1:
        raise Refused(f"steps={steps}, n={n}, top_p={top_p}: steps and n must be at least 1, top_p in (0, 1]")
    if not isinstance(generator, list):
        generator = [torch.Generator().manual_seed(s) for s in torch.randint(2**62, (n,), generator=generator).tolist()]
    net, sm, mask, training = model.net, model.sm if soft else None, model.cfg.mask_id, model.training
    table, device = net.table, net.table.device                                                # (V, D)
    model.eval()  # important: no dropout
    x = torch.full((n, model.cfg.length), mask) if x is None else x.expand(n, -1)              # (n, L)
    (n, L), masked = x.shape, (x == mask).numpy().flatten()                                    # (nL,)      on the host
    plans = [plan(free, steps, g, model.cfg.time_conditioning, sampler=sampler, **schedule)
             for free, g in zip(masked.reshape(n, L), generator)]
    nfe = torch.tensor([len(events) for events in plans])                                      # (n,)
    x = x.flatten().to(device, copy=True)                                                      # (nL,)
    emb, lam, ids = F.embedding(x, table), torch.zeros(n * L, device=device), x.clone()        # (nL, D), (nL,), (nL,)
    to = lambda array, where=device: torch.from_numpy(array).to(where, non_blocking=True)
    noise = "cpu" if device.type == "mps" else device  # no float64 there
    watch = lambda: on_step and on_step(x.view(n, L), lam.view(n, L), ids.view(n, L))
    trunk = lambda t: net.trunk(emb.view(n, L, -1), to(np.array(t, np.float32))).flatten(0, 1)  # (nL, D)
    pick = lambda h, u: draw(nucleus(net.head(h).softmax(-1), top_p), u)                       # (m,)

    def feedback(h):
        lam, ids, pi = model.gauge(h)
        return sm.mix(table, lam, ids, pi), lam, pi.argmax(-1) if ids is None else ids[:, 0]   # (m, D), (m,), (m,)

    for events in tqdm(zip_longest(*plans), "network calls", max(nfe).item(), leave=False, disable=True if on_step else None):
        at = np.concatenate([j * L + e[1] for j, e in enumerate(events) if e])                 # (m,)  rows of the batch
        u = np.concatenate([e[2] for e in events if e])                                        # (m,)
        live, was = np.repeat([e is not None for e in events], L), masked.copy()               # (nL,)
        masked[at] ^= True
        new, gone, stay = to(at[was[at]]), to(at[~was[at]]), to(np.flatnonzero(live & was & masked))
        h = trunk([e[0] if e else T_END for e in events])                                      # (nL, D)             l.3
        x[new] = in_chunks(pick, h[new], to(u[was[at]], noise))                                #                     l.4-5
        emb[new] = F.embedding(x[new], table)
        if sm:
            emb[stay], lam[stay], ids[stay] = in_chunks(feedback, h[stay], size=at_once(h))  #                     l.6
            # What vanishes was certain a step ago, so its mask remembers it: a point mass, H = 0, λ at its highest [code].
            lam[gone], ids[gone] = sm.strength(0.0), x[gone]
            emb[gone] = sm.mix(table, lam[gone], ids[gone, None], torch.ones_like(lam[gone, None]))
        else:
            emb[gone] = table[mask]
        x[gone] = mask
        watch()
    if masked.any():  # about one position in 1e5: the likeliest token, without nucleus [code]
        rows = to(np.flatnonzero(masked))
        x[rows] = in_chunks(lambda h: net.head(h).argmax(-1), trunk([T_END] * n)[rows])
        nfe += torch.from_numpy(masked).view(n, L).any(1)
        watch()
    model.train(training)
    return x.view(n, L).cpu(), nfe


def spell(tok, mask_id):
    """A function from an id to what stands for it in a cell: a dot for [MASK], ↵ for a line's end, nothing that breaks a line."""
    printable = lambda c: c if c.isprintable() else "↵" if c == "\n" else "·"
    return lambda i: "·" if i == mask_id else "".join(map(printable, tok.decode([i])))


def trace(tok, mask_id, steps):
    """An `on_step` that appends the first sequence's cells to the list `steps`: [text, λ], None for λ where visible   App. C.5"""
    word = spell(tok, mask_id)

    def on_step(x, lam, ids):
        cells = zip(x[0].tolist(), lam[0].tolist(), ids[0].tolist())
        steps.append([[word(guess), round(strength, 4)] if token == mask_id else [word(token), None] for token, strength, guess in cells])
    return on_step


def show(tok, mask_id, pause=0.05):
    """An `on_step` that redraws the first sequence in place; where no terminal listens, five plain lines           App. C.5

    tok: tiktoken.Encoding.   pause: seconds per frame, for small models outrun the eye.
    Tokens are bold. A masked cell is the top guess on green, the deeper the higher λ; a dot before the first guess.
    """
    word = spell(tok, mask_id)
    drawn = share = 0

    def on_step(x, lam, ids):
        nonlocal drawn, share
        x, lam, ids = x[0].tolist(), lam[0].tolist(), ids[0].tolist()
        if not sys.stdout.isatty():
            now = 1 - x.count(mask_id) / len(x)
            if now >= share:
                print(f"{now:4.0%} " + "".join(map(word, x)), flush=True)
                share = min(1, now + 0.25)
            return
        (width, height), lines, used = shutil.get_terminal_size(), [""], 0
        for token, strength, guess in zip(x, lam, ids):
            cell = word(guess if token == mask_id else token)[:width]
            if used + len(cell) > width:
                lines, used = lines + [""], 0
            rest = int(220 * (1 - strength))
            style = f"48;2;{rest};{100 + rest * 2 // 3};{rest};38;2;0;0;0" if token == mask_id else "1"
            lines[-1] += f"\x1b[{style}m{cell}\x1b[0m"
            used += len(cell)
        lines = lines[:height - 1]
        print(f"\x1b[{drawn}F\x1b[J" * (drawn > 0) + "\n".join(lines), flush=True)
        drawn = len(lines)
        time.sleep(pause)
    return on_step


@dataclass
class Config:
    checkpoint: str = ""           # anything that `python checkpoint.py` can describe
    ema: bool = True               # its averaged backbone
    count: int = 1                 # samples; torchrun would take --n for one of its own
    batch_size: int = 16           # sequences at a time; changes no sample
    length: int | None = None      # L; the model's
    steps: int | None = None       # T; L of them
    sampler: str = "mdlm"          # App. B.1: remdm-cap for T < L, remdm-loop for T >= L
    eta: float | None = None       # re-masked share; 0.04 for remdm-cap, 0.02 for remdm-loop
    t_on: float = 0.55             # remdm-loop re-masks from here
    t_off: float = 0.05            # to here,
    alpha_on: float = 0.9          # with this share visible
    top_p: float = 0.9             # nucleus
    soft: bool = True              # False: decode an SM model in binary
    prompt: str = ""               # text to go on from
    infill: str = ""               # text with ___ where some is missing
    seed: int = 1
    out: str = "samples.jsonl"     # appended to; a sample that it holds already is not made again
    show: bool = False             # watch the first sequence of every batch
    trace: str = ""                # write the way of one sample to this file, a line of JSON per step, for plot.py
    tokenizer_dir: str = ""        # GPT-2's vocabulary, for machines without a network
    device: str = "auto"           # cuda, else mps, else cpu
    dtype: str = "auto"            # bfloat16 where the GPU has it, else float32
    compile: bool = False          # CUDA graphs of the trunk: a minute to build, for many or long samples


def canvas(prompt, infill, tok, special, L):
    """The ids to start from, (L,): kept text after BOS, as in training's rows; an infill ends in EOS, its gaps are equal."""
    parts = [tok.encode_ordinary(text) for text in (infill.split("___") if infill else [prompt])]
    room, gaps = L - 1 - bool(infill) - sum(map(len, parts)), max(1, len(parts) - 1)
    if prompt and infill or infill and len(parts) == 1:
        raise Refused(f"--infill={infill!r} needs ___ where text is missing, and no --prompt beside it")
    if room < gaps:
        raise Refused(f"the text has {sum(map(len, parts))} tokens and leaves no room in length {L}: shorten it, or raise --length")
    ids = [special["bos"]] * bool(prompt or infill) + parts[0]
    for i, part in enumerate(parts[1:]):
        ids += [special["mask_id"]] * (room // gaps + (i < room % gaps)) + part
    ids += [special["eos"]] if infill else [special["mask_id"]] * (L - len(ids))
    return torch.tensor(ids)


def finished(path, settings, seed):
    """Indices of the samples in `path` that have these settings. A last line that a kill cut short is cut off the file."""
    if path.is_dir():
        raise Refused(f"{path} is a folder: choose another --out")
    text = path.read_bytes() if path.exists() else b""
    whole = text[:text.rfind(b"\n") + 1]
    try:
        if text and not whole and not text.startswith(b'{"ids": ['):  # that one is a first line, cut short
            raise ValueError
        done = {line["index"] for line in map(json.loads, whole.splitlines()) if (line["settings"], line["seed"]) == (settings, seed)}
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{path} holds something else than samples: choose another --out")
    if whole != text:
        os.truncate(path, len(whole))
    return done


def main(cfg):
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot spell a sample must not end a long run
    rank, world, device, dtype = machine(cfg.device, cfg.dtype)
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    mask, L = model.cfg.mask_id, model.cfg.length if cfg.length is None else cfg.length
    tok = tokenizer(model.info["tokenizer"]["name"], cfg.tokenizer_dir)
    if tok.n_vocab != mask or not 3 <= L <= model.cfg.length or cfg.count < 1 or cfg.batch_size < 1:
        raise Refused(f"--length={L} --count={cfg.count} --batch_size={cfg.batch_size}, {tok.n_vocab} ids of {tok.name}: the length must be in "
                      f"3 to {model.cfg.length}, the other two at least 1, and {mask} ids come before the model's [MASK]")
    if cfg.trace and (cfg.count > 1 or cfg.show or os.path.realpath(cfg.trace) == os.path.realpath(cfg.out)):
        raise Refused(f"--trace={cfg.trace} follows one sample, into a file of its own: leave out --count and --show, and name another file than --out")
    x = canvas(cfg.prompt, cfg.infill, tok, model.info["tokenizer"], L)
    how = {name: getattr(cfg, name) for name in ("sampler", "top_p", "t_on", "t_off", "alpha_on")}
    how |= {"steps": L if cfg.steps is None else cfg.steps, "soft": cfg.soft and model.sm is not None,
            "eta": SAMPLERS.get(cfg.sampler) if cfg.eta is None else cfg.eta}
    settings = how | {"checkpoint": cfg.checkpoint, "step": model.info["step"], "ema": cfg.ema, "tokenizer": tok.name, "length": L,
                      "prompt": cfg.prompt, "infill": cfg.infill, "dtype": str(dtype or torch.float32).removeprefix("torch.")}
    path = Path(f"{cfg.out.removesuffix('.jsonl')}.{rank}.jsonl") if world > 1 else Path(cfg.out)
    done = finished(path, settings, cfg.seed)
    steps = []
    watch = show(tok, mask) if cfg.show else trace(tok, mask, steps) if cfg.trace else None
    todo = [i for i in range(rank, cfg.count, world) if i not in done or watch]
    if cfg.compile:
        model.net.trunk = torch.compile(model.net.trunk, mode="reduce-overhead")
    for start in tqdm(range(0, len(todo), cfg.batch_size), f"{len(todo)} samples", disable=rank > 0 or cfg.show):
        batch = todo[start:start + cfg.batch_size]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            ids, nfe = generate(model, len(batch), generator=[rng("sample", cfg.seed, i) for i in batch], x=x,
                                on_step=watch if rank == 0 else None, **how)
        lines = [{"ids": row, "text": tok.decode(row), "nfe": calls, "seed": cfg.seed, "index": i, "settings": settings}
                 for row, calls, i in zip(ids.tolist(), nfe.tolist(), batch)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in lines if line["index"] not in done)
        except OSError as e:
            raise Refused(f"could not write {path} ({e}): what is there stays, and with more space the same command goes on")
        if start == rank == 0 and not cfg.show:
            print(lines[0]["text"])
    if cfg.trace and rank == 0:
        with atomic(cfg.trace) as tmp, open(tmp, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(step, ensure_ascii=False) + "\n" for step in steps)
    print(f"{path}: {len(todo)} samples made, {len(done)} were there")


if __name__ == "__main__":
    run(main, Config)
