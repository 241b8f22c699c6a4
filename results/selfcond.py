# SPDX-License-Identifier: MIT
"""Self-conditioning, which is the ancestor of soft-masking: no gate, and a learned matrix.

    python results/selfcond.py train.py owt --data=data/sudoku …     # or sample.py, or eval.py

A mask sees m + W Σ_i π_i v_i: the guess of Alg. 1's first pass (its top k, with SM's shares π)
through a D × D matrix (arXiv 2208.04202). W starts at 0 and belongs to the backbone: its learning
rate, average and checkpoint. There is no λ, and ω stays where it starts. No gradient goes through
π. A token that ReMDM masks again is its own guess, with π = 1.
"""

import os
import runpy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import mdlm  # noqa: E402


class SelfConditioned(mdlm.MDLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.net.again = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        nn.init.zeros_(self.net.again.weight)

    def embedded(self, ids, pi):
        guess = (pi[..., None] * F.embedding(ids, self.net.table)).sum(1)          # (n, D)
        return self.net.table[self.mask_id] + self.net.again(guess)                # (n, D)

    def feedback(self, h, logits=None):
        """(embeddings (n, D), λ = 0 (n,), the most likely tokens (n,)), as TwoPass."""
        with torch.no_grad():
            logits = self.net.head(h) if logits is None else logits                # (n, V)
            top, ids = logits.topk(self.sm.k)                                      # 2 × (n, k)
        return self.embedded(ids, top.softmax(-1)), h.new_zeros(len(h)), ids[:, 0]

    def feedback_of_certain(self, ids):
        one = torch.ones(len(ids), 1, device=ids.device)                           # (m, 1)
        return self.embedded(ids[:, None], one), one[:, 0] * 0, ids


if __name__ == "__main__":
    mdlm.MDLM = SelfConditioned
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
