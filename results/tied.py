# SPDX-License-Identifier: MIT
"""A control: the trunk runs twice, and what it found never passes through the vocabulary.

    python results/tied.py train.py owt --data=data/sudoku …     # or sample.py, or eval.py

Where soft-masking mixes embeddings of guesses, this adds a learned linear map of the mask's own
last hidden state to [MASK]: weight-tied layers of twice the depth, trained with the two passes of
Alg. 1 and no gradient through the first. The map starts at 0. ω stays where it starts. A token that
ReMDM masks again has no such state, and becomes a plain [MASK]. This is for one process.
"""

import os
import runpy
import sys

import torch
import torch.nn as nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import mdlm  # noqa: E402


class Tied(mdlm.MDLM):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.net.again = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        nn.init.zeros_(self.net.again.weight)

    def feedback(self, h):
        return self.feedback_chunk(h)

    def feedback_chunk(self, h, logits=None):
        """(embeddings (n, D), λ = 0 (n,), guesses (n,), of which there are none), as TwoPass."""
        emb = self.net.table[self.mask_id] + self.net.again(h.detach())            # (n, D)
        return emb, h.new_zeros(len(h)), torch.full_like(h[:, 0], self.mask_id, dtype=torch.long)


if __name__ == "__main__":
    mdlm.MDLM = Tied
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
