# SPDX-License-Identifier: MIT
"""At which t soft-masking pays, and whether it is the content of the feedback that helps.    Eq. 2

The bound of `eval.py ppl --floor=0`, with its flags, split by t and by what is fed back:

    python lab/feedback.py --checkpoint=out/owt/last.pt --data=data/owt
"""

import os
import sys
from dataclasses import replace

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from eval import Config, corrupted, held_out_rows, mean_and_se, write_result
from launch import machine, run
from mdlm import MDLM


@torch.no_grad()
def bound_by_feedback(model, x0, xt, t, other):
    """The terms of Eq. 2, in nats per sequence, under four feedbacks: (4, B)

    none      plain masks, in one pass
    own       what the model thinks of this mask, as in training
    permuted  what it thinks of the same mask in `other` (B, L): as sure, but of other tokens
    truth     the masked token itself, with H = 0 and the largest λ: all that feedback could do
    """
    net, L = model.net, xt.shape[1]
    at = (xt == model.mask_id).flatten().nonzero().squeeze(1)                        # (N,)
    tokens = x0.flatten()[at]                                                        # (N,)

    def after(mixed):
        emb = net.table[xt]                                                          # (B, L, D)
        emb.flatten(0, 1)[at] = mixed.to(emb.dtype)
        nll = model.cross_entropy(net.hidden(emb, at, t), tokens)                    # (N,)
        return torch.zeros_like(t).index_add(0, at // L, nll) / t                    # (B,)

    theirs = net.hidden(net.table[other], at, t)                                     # (N, D)
    none = model(x0, xt, t, soft=False)                                              # (B,)
    own = model(x0, xt, t, soft=True)                                                # (B,)
    permuted = after(model.feedback(theirs)[0])
    truth = after(model.feedback_of_certain(tokens)[0])
    return torch.stack((none, own, permuted, truth))


def main(cfg):
    device, dtype = machine(cfg.device, cfg.dtype)[2:]
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    rows, _ = held_out_rows(cfg, model.info["tokenizer"], model.cfg.length)          # (n, L)
    draws, values, L = [], {}, model.cfg.length
    for index, x0, xt, t in corrupted(rows, model.mask_id, cfg.seed, cfg.repeats, cfg.batch_size,
                                      floor=0.0):
        other = torch.where(xt == model.mask_id, xt, rows[(index + 1) % len(rows)])  # (b, L)
        batch = [part.to(device) for part in (x0, xt, t, other)]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            terms = bound_by_feedback(model, *batch)                                 # (4, b)
        terms = terms.cpu().double() / L  # on the CPU: MPS has no float64
        draws.append(torch.cat((t[None], terms)))
    draws = torch.cat(draws, dim=1)                                                  # (5, m)
    for tenth in draws[:, draws[0].argsort()].chunk(10, dim=1):
        t, none, *others = tenth                                                     # (m/10,) each
        row = {"t": t.mean().item(), "none": none.mean().item()}
        one = torch.ones_like(t)
        for name, term in zip(("own", "permuted", "truth"), others):
            # Its error takes draws for independent: many --repeats of few rows make it too small.
            gain, se = mean_and_se(none - term, one)
            row[f"{name}_gain"] = gain
            row[f"{name}_gain_se"] = se
        values[f"t from {t[0]:.2f} to {t[-1]:.2f}"] = row
    write_result(replace(cfg, metric="feedback", floor=0.0), cfg.checkpoint, values,
                 {"step": model.info["step"], "L": L, "n": len(rows)})


if __name__ == "__main__":
    run(main, Config)
