# SPDX-License-Identifier: MIT
"""Soft-masking: the whole of the paper's method, made to be copied.                                       §3.1, Eq. 3

A masked diffusion model decides at every decoding step: commit a token here, or keep [MASK]. Binary masking throws the
prediction of every kept mask away. Soft-masking (SM) feeds it back: the next step sees, instead of [MASK], a convex mix
of the [MASK] embedding and the embeddings of the k tokens that the model last thought likely. How much gives way is λ,
a gate on the model's own entropy, and its three scalars ω_s, ω_a, ω_b are all that is learned here.

With any model that takes embeddings (Hugging Face's `inputs_embeds`):

    sm = SoftMask(mask_id=tokenizer.mask_token_id, k=3)
    table = model.get_input_embeddings().weight                  # (V, D)
    with torch.no_grad():
        logits = model(input_ids=x).logits                       # (B, L, V)   what the model thinks of the masks
    emb = sm.embed(table, x, logits)                             # (B, L, D)   [MASK]s softened, all else untouched
    logits = model(inputs_embeds=emb).logits                     # (B, L, V)   train or decode from this one

Train ω beside the model with a learning rate near 1e-2: it has far to go from its start at ω_s ≈ 0 (App. B.2). Give
plain masks too, with probability 1 − p_sm, for the first decoding step has no feedback (§3.2).

Not here: noise schedules, backbones, samplers, the two passes (mdlm.py). Nothing here detaches: whether the first pass
gets gradients is the caller's `no_grad`. If your model can predict [MASK] itself, set that logit to −inf first, or it
may be among the k (MDLM does so, Dream does not [code]).
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6  # keeps every inverse below finite [code]


def softplus_inverse(y):
    return y + torch.log(-torch.expm1(-y))  # log(e^y − 1), without overflow


class SoftMask(nn.Module):
    """sm_ω(x̂, p) as (λ, ids, π), the three quantities of §3.1, and as embeddings.

    mask_id: token id of [MASK].   k: tokens in the mix; None mixes all of them, through a trainable temperature (App. C.3).
    omega_s in [0, 1): amplitude; omega_a > 0: steepness, per nat; omega_b < 0: offset, nats; tau > 0: that temperature.
    Raises ValueError outside these ranges.

    The constraints of App. B.1 are kept by construction: the parameters are raw, a sigmoid and softplus stand before
    them. They stay fp32 whatever happens to the model around them (see `_apply`).
    """

    def __init__(self, mask_id, k=3, omega_s=1e-6, omega_a=10 / 1.5, omega_b=-0.75, tau=1.0):
        super().__init__()
        if not (0 <= omega_s < 1 and omega_a > 0 and omega_b < 0 and tau > 0 and (k is None or k >= 1)):
            raise ValueError(f"SoftMask needs 0 <= omega_s < 1, omega_a > 0, omega_b < 0, tau > 0, k >= 1 or None; got "
                             f"omega_s={omega_s}, omega_a={omega_a}, omega_b={omega_b}, tau={tau}, k={k}")
        self.mask_id, self.k = mask_id, k
        scalar = lambda v: torch.tensor(float(v), dtype=torch.float32)
        self.raw_s = nn.Parameter(torch.logit(scalar(omega_s).clamp(EPS, 1 - EPS)))  # 0 has no logit: starts at 1e-6 [code]
        self.raw_a = nn.Parameter(softplus_inverse(scalar(omega_a)))
        self.raw_b = nn.Parameter(softplus_inverse(scalar(-omega_b)))
        if k is None:  # only then: a parameter without a gradient stops DDP
            self.raw_tau = nn.Parameter(softplus_inverse(scalar(tau)))

    def _apply(self, fn, recurse=True):
        """`.to(bfloat16)` of the host moves ω along but never rounds it.

        raw_s starts near −14, where bf16 has a spacing of 1/16: Adam's steps of 1e-2 would all round away, ω_s would
        never move, and SM would be off without a sign of it.
        """
        def move(tensor):
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)
        return super()._apply(move, recurse)

    @property
    def omega(self):
        """(ω_s, ω_a, ω_b), constrained, three 0-d fp32 tensors                                                 App. B.1"""
        if self.raw_s.dtype != torch.float32:  # load_state_dict(assign=True) can do what `_apply` prevents
            raise ValueError(f"ω in {self.raw_s.dtype} would not learn: keep the parameters of SoftMask in float32")
        return torch.sigmoid(self.raw_s), F.softplus(self.raw_a) + EPS, -F.softplus(self.raw_b) - EPS

    def strength(self, neg_entropy):
        """λ(p) = ω_s · σ(ω_a (−H(p) − ω_b)), how much of the mask gives way to the guess                           Eq. 3

        neg_entropy: (...) −H(p) in nats, never above 0.   Returns λ: (...) in [0, ω_s).

        A sure model (−H → 0) gets nearly all of ω_s; an unsure one (−H far below ω_b) gets almost none and sees a plain
        [MASK] again. So ω_s = 0 is binary masking (§3.3), and a new SoftMask starts next to it; not at it, because the
        gradient of a sigmoid's argument scales with the sigmoid, and from 0 it would never leave [code].
        """
        omega_s, omega_a, omega_b = self.omega
        return omega_s * torch.sigmoid(omega_a * (neg_entropy - omega_b))  # (...)

    def forward(self, logits, gain=1.0):
        """What SM says of each row: how much feedback, of which tokens, in what shares                       §3.1, Eq. 3

        logits: (N, V) one row per masked position, any float dtype.   gain: factor on λ, see `time_gain`.
        Returns λ (N,), ids (N, k) or None for k = |V|, π (N, k) or (N, V); λ and π fp32.
        """
        logits = logits.float()                                          # (N, V)
        if self.k is None:
            logits = logits / (F.softplus(self.raw_tau) + EPS)           # (N, V)  λ sees the tempered p as well [code]
        logp = logits.log_softmax(-1)                                    # (N, V)
        p = logp.exp()                                                   # (N, V)
        # The clamp is for p = 0 only: 0 · −inf is a NaN here, and entr(0) would be one in the backward of two updates.
        lam = gain * self.strength((p * logp.clamp_min(-100)).sum(-1))   # (N,)
        if self.k is None:
            return lam, None, p
        top, ids = logits.topk(self.k, dim=-1)                           # (N, k)
        return lam, ids, top.softmax(-1)                                 # p renormalised over the top k: Σ π = 1

    def mix(self, table, lam, ids, pi):
        """(1 − λ) m + λ Σ_i π_i v_i, embedded                                                               §3.1 sm(·,·)

        table: (V, D) the model's embedding matrix; lam (N,), ids (N, k) | None, pi (N, k) | (N, V) from `forward`.
        Returns (N, D) in the table's dtype.

        One-hot vectors never exist: a mix of one-hots, embedded, is the mix of the rows. The bag is
        (shares[..., None] * table[ids]).sum(1) without its (N, k+1, D) intermediate; [MASK] is in it as one more token,
        since every look into the table has a dense (V, D) gradient of its own.
        """
        lam = lam[:, None]                                                                                     # (N, 1)
        if ids is None:
            return ((1 - lam) * table[self.mask_id] + lam * (pi.to(table.dtype) @ table)).to(table.dtype)      # (N, D)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], self.mask_id)), 1)                                   # (N, k+1)
        shares = torch.cat((lam * pi, 1 - lam), 1).to(table.dtype)                                             # (N, k+1)
        return F.embedding_bag(ids, table, per_sample_weights=shares, mode="sum")                              # (N, D)

    def embed(self, table, x, logits, gain=1.0):
        """sm(x̂, p) for a whole batch: soft where x is [MASK], plain embeddings elsewhere                      §3.1, both cases

        table: (V, D).   x: (B, L) token ids.   gain: factor on λ.   logits: the model's last prediction, either
          (B, L, V)  everywhere: static shapes, so `torch.compile(fullgraph=True)` takes it; or
          (N, V)     only its rows where x is [MASK], row-major, logits[x == mask_id]: the cheap way, no work elsewhere.
        Returns (B, L, D) in the table's dtype. λ = 0 gives F.embedding(x, table) bit for bit.
        """
        masked = x == self.mask_id                                       # (B, L)
        plain = F.embedding(x, table)                                    # (B, L, D)
        if logits.dim() == 3:
            soft = self.mix(table, *self(logits.flatten(0, 1), gain))    # (B·L, D)
            return torch.where(masked[..., None], soft.view_as(plain), plain)
        rows = masked.nonzero(as_tuple=True)
        if len(logits) != len(rows[0]):  # one row would broadcast over all masks
            raise ValueError(f"{len(logits)} rows of logits for {len(rows[0])} positions with x == {self.mask_id}")
        return plain.index_put(rows, self.mix(table, *self(logits, gain)))


def time_gain(schedule, t, switch=0.5):
    """Factor on λ that turns SM up or down while decoding                                                       App. C.9

    schedule      gain                    feedback
    none          1                       always
    linear        t                       SM → binary, fading
    stepwise      1 if t > switch         SM → binary, at the switch (strictly above it [code])
    linear-late   1 − t                   binary → SM
    stepwise-late 1 if t <= switch        binary → SM

    t: time left, a float from 1 (all masked) down to 0; in the released code the share of the response still masked.
    Returns a float in [0, 1]. Raises ValueError for an unknown schedule.
    """
    gains = {"none": 1.0, "linear": t, "stepwise": float(t > switch),
             "linear-late": 1 - t, "stepwise-late": float(t <= switch)}
    if schedule not in gains:
        raise ValueError(f"unknown schedule {schedule!r}: use one of {', '.join(gains)}")
    return gains[schedule]
