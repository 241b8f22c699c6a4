# SPDX-License-Identifier: MIT
"""Does feedback help a model fill gaps in your text in few passes?

    python lab/feedback.py --checkpoint=out/owt/last.pt --data=data/owt --width=6 --passes=6,3,2
    python lab/feedback.py --checkpoint=results/sudoku.pt --data=data/sudoku --width=12

In each held-out row, one span at a random place is masked. Each pass fills its surest positions
with their likeliest tokens (§2.2). The first lines are the share of spans that come out exactly
right, with feedback (soft) and without (plain), and the gain, each with its standard error. A
binary model has plain alone. Choose a width at which some spans come out right and some do not.
Expect a gain where a pass fills several tokens, because they do not see each other. The last lines
are, for ten ranges of t, the bound without feedback and what feedback gains.                  Eq. 2
"""

import os
import sys
from dataclasses import dataclass, replace
from typing import Annotated

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from data import rng
from eval import Config as EvalConfig
from eval import held_out_rows, mean_and_se, result_path, write_result
from launch import Count, Refused, Size, machine, progress, run
from mdlm import MDLM, TwoPass
from sample import Pick, decode, shares_of
from train import corrupted_batches


@dataclass
class Config(EvalConfig):
    """The flags of lab/eval.py but --label, two of them with other defaults, and two more."""
    rows: Count = 1000      # how many held-out rows, evenly spaced (0: all)
    floor: Annotated[float, 0, 0.01] = 0.0  # Eq. 2 itself
    width: Size = 6         # tokens in a span
    passes: str = "6,3,2"   # passes to fill a span in; the result has a line for each number

    NO_FLAGS = ("label",)


def means(**values):
    """{name: mean, name_se: its standard error} for values (n,)"""
    found = {}
    for name, x in values.items():
        found[name], found[f"{name}_se"] = mean_and_se(x, torch.ones_like(x))
    return found


def spans(n, L, width, seed):
    """(n, L) bool: True inside each row's span, which lies between BOS and EOS"""
    first = torch.randint(1, L - width, (n, 1), generator=rng("spans", seed))        # (n, 1)
    position = torch.arange(L)                                                       # (L,)
    return (first <= position) & (position < first + width)


def right(model, rows, span, passes, soft, batch_size):
    """(n,): 1 where all of a row's span comes back right, else 0. rows, span: (n, L)"""
    batches = rows.masked_fill(span, model.mask_id).split(batch_size)                # of (b, L)
    side = TwoPass(model.net, model.sm if soft else None, model.mask_id)
    found = [decode(side, x, shares_of(passes * [1]), Pick())
             for x in progress(batches, f"{len(rows):,} spans in {passes} passes", leave=False)]
    return (torch.cat(found) == rows).all(1).double()


@torch.no_grad()
def bound_by_t(model, rows, cfg):
    """{title: nats per token of Eq. 2} for each tenth of the draws of t, from small t to large"""
    draws, values, L = [], {}, rows.shape[1]
    for _, *batch in corrupted_batches(rows, model.mask_id, cfg.seed, cfg.repeats, cfg.batch_size,
                                       floor=cfg.floor):
        x0, xt, t = (part.to(model.net.table.device) for part in batch)
        plain = model(x0, xt, t, False)
        draws.append(torch.stack((t, plain, model(x0, xt, t, True) if model.sm else plain)))
    draws = torch.cat(draws, dim=1).cpu().double()                                   # (3, m)
    n = max(1, min(10, draws.shape[1] // 2))  # a single draw has no standard error
    for t, plain, soft in draws[:, draws[0].argsort()].tensor_split(n, dim=1):       # (m/n,) each
        # The errors assume independent draws. They are too small for many --repeats of few rows.
        title = f"nats per token, t from {t[0]:.2f} to {t[-1]:.2f}"
        gain = {"gain": (plain - soft) / L} if model.sm else {}
        values[title] = means(plain=plain / L, **gain)
    return values


def main(cfg):
    here = machine(cfg.device, cfg.dtype)
    own = launch.soft_mask_class(cfg.code)
    with launch.input_errors():
        model = MDLM.load(cfg.checkpoint, cfg.ema, own).to(here.device)
    L = model.cfg.length
    passes = [int(n) if n.isdecimal() else 0 for n in cfg.passes.split(",")]
    if not 1 <= min(passes) <= max(passes) <= cfg.width <= L - 2:
        raise Refused(f"--passes={cfg.passes} --width={cfg.width}: give passes from 1 to the "
                      f"width, and a width of at most {L - 2}, a row without its ends")
    rows, text = held_out_rows(cfg, model.info, L)                                   # (n, L)
    cfg = replace(cfg, data=text["path"])
    settings = {"step": model.info["step"], "L": L, "n": len(rows), "data": text["path"],
                "text": text, "dtype": str(here.dtype or torch.float32).removeprefix("torch.")}
    path = result_path(cfg, cfg.checkpoint, "feedback", settings)
    span, values = spans(len(rows), L, cfg.width, cfg.seed), {}                      # (n, L)
    with here.autocast():
        for n in passes:
            found = {"plain": right(model, rows, span, n, False, cfg.batch_size)}    # (n,)
            if model.sm:
                found["soft"] = right(model, rows, span, n, True, cfg.batch_size)
                found["gain"] = found["soft"] - found["plain"]
            values[f"spans right in {n} passes"] = means(**found)
        values |= bound_by_t(model, rows, cfg)
    write_result(cfg, path, "feedback", values, settings)


if __name__ == "__main__":
    run(main, Config)
