# SPDX-License-Identifier: MIT
"""At which t soft-masking pays, and whether it is the content of the feedback that helps.    Eq. 2

The bound of `eval.py ppl --floor=0`, with its flags, split by t and by what is fed back:

    python lab/feedback.py --checkpoint=out/last.pt --data=data/owt

Not here: the bound itself (eval.py), its table and its figure (plot.py --feedback).
"""

import os
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from eval import Config, corrupted, held_out_rows, mean_and_se, write_result
from launch import machine, run
from mdlm import MDLM


@torch.no_grad()
def bound_by_feedback(model, x0, xt, t, other):
    """The terms of Eq. 2, in nats per sequence, under four feedbacks: {name: (B,) float64}

    none      plain masks, in one pass
    own       what the model thinks of this mask, as in training
    permuted  what it thinks of a mask in another text: as sure on average, but of other tokens
    truth     the masked token itself, with H = 0 and the largest λ: all that feedback could do

    x0, xt: (B, L) ids.   t: (B,).   other: (B, L) ids of other texts, masked where xt is.
    """
    net, (B, L) = model.net, xt.shape
    at = (xt == model.mask_id).flatten().nonzero().squeeze(1)              # (N,)
    tokens, plain = x0.flatten()[at], F.embedding(xt, net.table)           # (N,), (B, L, D)

    def after(mixed):
        emb = plain.flatten(0, 1).index_copy(0, at, mixed.to(plain.dtype)).view_as(plain)
        nll = model.cross_entropy(net.hidden(emb, at, t), tokens)          # (N,)
        return nll.new_zeros(B).index_add(0, at // L, nll) / t             # (B,)

    theirs = net.hidden(F.embedding(other, net.table), at, t)              # (N, D)
    terms = {"none": model(x0, xt, t, soft=False), "own": model(x0, xt, t, soft=True),
             "permuted": after(model.feedback(theirs)[0]),
             "truth": after(model.feedback_of_certain(tokens)[0])}
    return {name: term.cpu().double() for name, term in terms.items()}


def main(cfg):
    device, dtype = machine(cfg.device, cfg.dtype)[2:]
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    rows, _ = held_out_rows(cfg, model.info["tokenizer"], model.cfg.length)          # (n, L)
    n, L = rows.shape
    parts = []
    for index, x0, xt, t in corrupted(rows, model.mask_id, cfg.seed, cfg.repeats, cfg.batch_size,
                                      floor=0.0):
        other = rows[(index + 1) % n].masked_fill(xt == model.mask_id, model.mask_id)  # (b, L)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            terms = bound_by_feedback(model, *(v.to(device) for v in (x0, xt, t, other)))
        parts.append({"t": t} | {name: term / L for name, term in terms.items()})
    nats = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    t, none = nats.pop("t"), nats.pop("none")                                        # (m,) each
    tenth = (10 * t).long().clamp_max(9)                                             # (m,)
    groups = {f"{b / 10:.1f} to {(b + 1) / 10:.1f}": tenth == b for b in tenth.unique().tolist()}
    values = {}
    for group, chosen in ({"all": tenth >= 0} | groups).items():
        draws = int(chosen.sum())
        values[group] = row = {"t": t[chosen].mean().item(), "draws": draws,
                               "none": none[chosen].mean().item()}
        for name, term in nats.items():
            row[name] = term[chosen].mean().item()
            # Its error takes draws for independent: many --repeats of few rows make it too small.
            gain = mean_and_se((none - term)[chosen], torch.ones(draws))
            row[f"{name}_gain"], row[f"{name}_gain_se"] = gain
    write_result(replace(cfg, metric="feedback"), cfg.checkpoint, values,
                 {"step": model.info["step"], "L": L, "n": n})


if __name__ == "__main__":
    run(main, Config)
