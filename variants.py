# SPDX-License-Identifier: MIT
"""Another λ and another mix, to compare with the paper's. They show how to extend SoftMask.

    constant   λ is the same for every mask and not learned, to see whether the entropy matters
    slerp      the mix is on a sphere, between the directions of [MASK] and of the predicted tokens

Both are [ours]. A new λ overrides `strength`, and a new mix overrides `mix`. VARIANTS has the names
for `train.py --variant=NAME`.
"""

import torch
import torch.nn.functional as F

from softmask import SoftMask


class Constant(SoftMask):
    """λ = ω_s for every mask, whatever the entropy. It is not learned: give omega_s, say 0.3."""

    def strength(self, minus_h):
        return self.omega[0].detach() + 0 * minus_h                                # (…)


class Slerp(SoftMask):
    """|m| · (sin((1 − λ)θ) m/|m| + sin(λθ) g/|g|) / sin θ, where g = Σ_i π_i v_i, θ = ∠(m, g)."""

    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                            # (D,)
        g = super().mix(table, torch.ones_like(lam), ids, pi).float()              # (N, D)
        start = F.normalize(m, dim=0)                                              # (D,)
        end = F.normalize(g, dim=-1)                                               # (N, D)
        lam = lam[:, None]                                                         # (N, 1)
        cos = (start * end).sum(-1, keepdim=True)                                  # (N, 1)
        # If the model predicts [MASK] itself, cos = 1, where the derivative of acos is infinite.
        theta = cos.clamp(-1 + 1e-6, 1 - 1e-6).acos()                              # (N, 1)
        mixed = ((1 - lam) * theta).sin() * start + (lam * theta).sin() * end      # (N, D)
        return (m.norm() * mixed / theta.sin()).to(table.dtype)                    # (N, D)


VARIANTS = {"constant": Constant, "slerp": Slerp}
