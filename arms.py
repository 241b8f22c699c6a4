# SPDX-License-Identifier: MIT
"""Other gates and mixes, to compare with the paper's. They also show how to extend SoftMask.

    constant   λ is the same for every mask, and is not learned: is it the entropy that matters?
    renorm     the mix at the length of the [MASK] embedding: is it the length that matters?
    slerp      the mix on the sphere: from the direction of [MASK] towards that of the guess
    permuted   each mask gets the mix of another one: is it the content that matters?

A new gate overrides `strength`, a new mix overrides `mix`. One more name in ARMS makes it known to
`train.py --arm=…`. Training, decoding and checkpoints of an MDLM need no other change, because
they ask SoftMask for nothing else. Before comparing losses, compare `mix_norm` and `lam_sd` in the
logs.

The first three are discussed in arXiv 2601.07351 and 2608.06529. The definitions are [ours].

`with_omega` gives feedback to a model that was not trained with it.

Not here: the paper's own method (softmask.py).
"""

import torch
import torch.nn.functional as F

from launch import Refused
from softmask import SoftMask


class Constant(SoftMask):
    """λ = ω_s for every mask, whatever the entropy. It is not learned, so it must be given."""

    def __init__(self, mask_id, k=3, omega_s=1e-6, **others):
        if omega_s < 1e-3:
            raise ValueError(f"a constant λ of {omega_s:g} is no feedback: give omega_s, say 0.3")
        super().__init__(mask_id, k, omega_s, **others)

    def strength(self, neg_entropy):
        return self.omega[0].detach() + 0 * neg_entropy                            # (...)


class Renorm(SoftMask):
    """The convex mix, stretched to the length of the [MASK] embedding m: |m| · mix / |mix|.

    A convex mix of equally long vectors in different directions is shorter than they are.
    """

    def mix(self, table, lam, ids, pi):
        mixed = super().mix(table, lam, ids, pi)                                   # (N, D)
        return F.normalize(mixed, dim=-1) * table[self.mask_id].norm()             # (N, D)


class Slerp(SoftMask):
    """|m| · (sin((1 − λ)θ) m/|m| + sin(λθ) g/|g|) / sin θ, where g = Σ_i π_i v_i, θ = ∠(m, g)."""

    def mix(self, table, lam, ids, pi):
        m = table[self.mask_id].float()                                            # (D,)
        g = super().mix(table, torch.ones_like(lam), ids, pi).float()              # (N, D)
        start, to = F.normalize(m, dim=0), F.normalize(g, dim=-1)                  # (D,), (N, D)
        cos, lam = (start * to).sum(-1, keepdim=True), lam[:, None]                # 2 × (N, 1)
        # The derivative of acos is infinite at ±1, where the guess is [MASK] itself: stay inside.
        theta = cos.clamp(-1 + 1e-6, 1 - 1e-6).acos()                              # (N, 1)
        mixed = ((1 - lam) * theta).sin() * start + (lam * theta).sin() * to       # (N, D)
        return (m.norm() * (mixed / theta.sin())).to(table.dtype)                  # (N, D)


class Permuted(SoftMask):
    """A placebo: of N masks, each gets the mix of the one N/2 further on, mostly in another row.

    So a sample depends on the rest of its batch, and a single mask keeps its own mix. If decoding
    makes the logits in several chunks, each chunk is permuted within itself. With k = None training
    would do so too, and a chunk of one row would not be permuted at all. So k = None is refused.
    """

    def __init__(self, mask_id, k=3, *omega, **others):
        if k is None:
            raise ValueError("the permuted arm with k=None depends on the size of chunks: give k")
        super().__init__(mask_id, k, *omega, **others)

    def mix(self, table, lam, ids, pi):
        mixed = super().mix(table, lam, ids, pi)                                   # (N, D)
        return mixed.roll(len(mixed) // 2, 0)                                      # (N, D)


ARMS = {"": SoftMask, "constant": Constant, "renorm": Renorm, "slerp": Slerp, "permuted": Permuted}


def soft_mask(arm="", **omega):
    """The SoftMask of an adapter, from the arguments that dream.read_omega returns."""
    return ARMS[arm](**omega)


def with_omega(sm, mask_id, omega_s=None, omega_a=None, omega_b=None):
    """A soft mask with this ω, for decoding without training [ours].

    sm: the model's SoftMask, or None for a binary model, which gets k = 3, and the paper's start
        for what is not given.
    Returns sm itself if no ω is given. Raises Refused for values out of range, and for a binary
    model without omega_s, where feedback would stay off.
    """
    given = {"omega_s": omega_s, "omega_a": omega_a, "omega_b": omega_b}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return sm
    if sm is None and omega_s is None:
        raise Refused(f"{given} leaves feedback off in a binary model: give --omega_s, say 0.5")
    arm, k, own = SoftMask, 3, {}
    if sm:
        arm, k = type(sm), sm.k
        own = dict(zip(("omega_s", "omega_a", "omega_b"), (w.item() for w in sm.omega)))
    try:
        new = arm(mask_id, k, **own | given)
    except ValueError as e:
        raise Refused(str(e))
    if sm and sm.k is None:
        new.raw_tau.data.copy_(sm.raw_tau)
    return new
