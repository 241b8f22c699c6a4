# SPDX-License-Identifier: MIT
"""Self-conditioning, the ancestor of soft-masking: no gate, and a learned matrix.

    python results/selfcond.py train.py owt --data=data/sudoku …     # or sample.py, or eval.py

A mask sees m + W Σ_i π_i v_i: the guess of the first pass (top k, SM's shares π) through a D × D
matrix (arXiv 2208.04202), which starts at 0 and belongs to the backbone, as in tied.py. No gradient
goes through π. ω stays where it starts. A token that ReMDM masks again becomes a plain [MASK].
"""

import runpy
import sys

import torch
import torch.nn.functional as F
from tied import Tied, mdlm


class SelfConditioned(Tied):
    def feedback(self, h):
        return self.feedback_chunk(h)

    def feedback_chunk(self, h, logits=None):
        """(embeddings (n, D), λ = 0 (n,), the most likely tokens (n,)), as TwoPass."""
        with torch.no_grad():
            top, ids = (self.net.head(h) if logits is None else logits).topk(self.sm.k)
        guess = (top.softmax(-1)[..., None] * F.embedding(ids, self.net.table)).sum(1)  # (n, D)
        return self.net.table[self.mask_id] + self.net.again(guess), h.new_zeros(len(h)), ids[:, 0]


if __name__ == "__main__":
    mdlm.MDLM = SelfConditioned
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
