# SPDX-License-Identifier: MIT
"""Other gates and mixes, to compare with the paper's, and an example of how to extend SoftMask.

    constant   λ is the same for every mask, and is not learned: is it the entropy that matters?
    renorm     the mix at the length of the [MASK] embedding: is it the length that matters?
    slerp      the mix on the sphere: from the direction of [MASK] towards that of the guess
    permuted   each mask gets the mix of another one: is it the content that matters?

A new gate overrides `strength`, a new mix `mix`, and a name in ARMS is known to `train.py --arm=…`.
All are [ours].
"""

import torch
import torch.nn.functional as F

from launch import Refused
from softmask import SoftMask


class Constant(SoftMask):
    """λ = ω_s for every mask, whatever the entropy. It is not learned: give omega_s, say 0.3."""

    def strength(self, neg_entropy):
        return self.omega[0].detach() + 0 * neg_entropy                            # (...)


class Renorm(SoftMask):
    """|m| · mix / |mix|: a mix of equally long vectors is shorter than they are."""

    def mix(self, table, lam, ids, pi):
        mixed = super().mix(table, lam, ids, pi)                                   # (N, D)
        return F.normalize(mixed, dim=-1) * table[self.mask_id].norm()             # (N, D)


class Slerp(SoftMask):
    """|m| · (sin((1 − λ)θ) m/|m| + sin(λθ) g/|g|) / sin θ, where g = Σ_i π_i v_i, θ = ∠(m, g)."""

    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                            # (D,)
        g = super().mix(table, torch.ones_like(lam), ids, pi).float()              # (N, D)
        start = F.normalize(m, dim=0)                                              # (D,)
        end = F.normalize(g, dim=-1)                                               # (N, D)
        lam = lam[:, None]                                                         # (N, 1)
        cos = (start * end).sum(-1, keepdim=True)                                  # (N, 1)
        # The derivative of acos is infinite at ±1, where the guess is [MASK] itself: stay inside.
        theta = cos.clamp(-1 + 1e-6, 1 - 1e-6).acos()                              # (N, 1)
        mixed = ((1 - lam) * theta).sin() * start + (lam * theta).sin() * end      # (N, D)
        return (m.norm() * mixed / theta.sin()).to(table.dtype)                    # (N, D)


class Permuted(SoftMask):
    """A placebo: of N masks, each gets the mix of the one N/2 further on, mostly in another row.

    So rows depend on each other, and a mask that is alone keeps its own mix.
    """

    def mix(self, table, lam, ids, pi):
        mixed = super().mix(table, lam, ids, pi)                                   # (N, D)
        return mixed.roll(len(mixed) // 2, 0)                                      # (N, D)


ARMS = {"": SoftMask, "constant": Constant, "renorm": Renorm, "slerp": Slerp, "permuted": Permuted}


def with_omega(sm, mask_id, omega_s=None, omega_a=None, omega_b=None):
    """sm, given another ω for decoding. None keeps its own. A binary model gets k = 3 [ours]."""
    given = {"omega_s": omega_s, "omega_a": omega_a, "omega_b": omega_b}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return sm
    if sm is None and omega_s is None:  # ω_s would start at almost 0
        raise Refused(f"{' and '.join(given)} of a model without SM: give it --omega_s, too")
    start = SoftMask(mask_id, **given)
    if sm is None:
        return start
    for name in given:
        raw = name.replace("omega", "raw")
        getattr(sm, raw).data.copy_(getattr(start, raw).data)
    return sm
