# SPDX-License-Identifier: MIT
"""The exact posterior of the Sudoku language, in the place of a model: no model can do better.

    python results/exact.py sample.py --checkpoint=results/sudoku.safetensors --top_p=1 …
    python results/exact.py eval.py ppl --checkpoint=results/sudoku.safetensors --data=data/sudoku

sample.py (without ω) and eval.py run with it. The checkpoint only gives the tokenizer and the
settings. A sampler that reveals two tokens at once draws them independently, so even the exact
posterior makes mistakes with it. Its share of right grids is the ceiling of the figures, with two
exceptions. Of several surest cells a call, which are equally sure, it takes neighbours, and these
depend on each other. With ReMDM a model can repair a mistake, and the exact posterior cannot: no
grid fits what is wrong, so it takes any digit.
"""

import os
import runpy
import sys

import numpy as np
import torch
import torch.nn as nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import grids as sudoku  # noqa: E402
import mdlm  # noqa: E402


def posterior(cells, grids):
    """P(digit | the cells that are known) of each cell: (36, 6) float64

    cells: (36,) ints, digits from 0, −1 where unknown.
    grids: (n, 36) uint8 of grids.canonical. Each stands for all exchanges of its digits.
    A grid fits if equal cells are equal in it, and different cells are different. All grids that
    fit count alike, because the unknown digits can be exchanged in as many ways in each of them.
    Where no grid fits, a mistake was made before, and every digit has the same probability.
    """
    known = [v for v in range(6) if v in cells]
    p = np.full((36, 6), 1 / 6)
    if not known:
        return p
    for v in known:
        there = grids[:, cells == v]                                            # (n, m)
        grids = grids[(there == there[:, :1]).all(1)]
    names = np.stack([grids[:, (cells == v).argmax()] for v in known])          # (u, n)
    different = np.bitwise_or.reduce(1 << names, 0) == (1 << names).sum(0)      # (n,)
    grids, names = grids[different], names[:, different]
    if not len(grids):
        return p
    for v, name in zip(known, names):
        p[:, v] = (grids == name[:, None]).mean(0)
    rest = (1 - p[:, known].sum(1, keepdims=True)).clip(0)  # rounded, it can be −2e-16   (36, 1)
    p[:, [v for v in range(6) if v not in known]] = rest / max(1, 6 - len(known))
    return p


class Posterior(nn.Module):
    """A backbone whose embeddings are one-hot, so that it can read the tokens off them."""

    def __init__(self, mask_id, bos, eos):
        super().__init__()
        self.table = nn.Parameter(torch.eye(mask_id + 1), requires_grad=False)  # (V, V)
        self.ends, self.grids = {0: bos, 37: eos, 38: eos}, sudoku.canonical().numpy()

    def trunk(self, emb, t):
        logp = torch.full_like(emb, -torch.inf)                                 # (B, L, V)
        for row, x in zip(logp, emb.argmax(-1).cpu().numpy()):
            cells = np.where(x[1:37] < 256, x[1:37] - ord("1"), -1)             # (36,)
            p = torch.from_numpy(posterior(cells, self.grids))                  # (36, 6)
            row[1:37, ord("1"):ord("7")] = p.log()
            for at, token in self.ends.items():
                row[at, token] = 0
        return logp

    def hidden(self, emb, masks, t):
        return self.trunk(emb, t)[masks]                                         # (N, V)

    def head(self, h):
        return h


class Exact(mdlm.MDLM):
    @classmethod
    def load(cls, path, ema=True):
        model = super().load(path, ema)
        special = model.info["tokenizer"]
        model.net, model.sm = Posterior(model.mask_id, special["bos"], special["eos"]), None
        return model


if __name__ == "__main__":
    mdlm.MDLM = Exact
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
