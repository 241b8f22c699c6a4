# SPDX-License-Identifier: MIT
"""Soft-masking (SM), sm_ω in Alg. 1 l.7 and Alg. 2 l.6: one layer, ready to copy.       §3.1, Eq. 3

At every decoding step, a masked diffusion model predicts all masked positions, but unmasks only
some. Binary masking throws the other predictions away. Soft-masking feeds them back: at a position
that stays masked, the next step sees

    sm(m, p) = (1 − λ) m + λ Σ_i π_i v_i        π_i = p_i / Σ_j p_j, over the k likeliest tokens
    λ(p)     = ω_s σ(ω_a (−H(p) − ω_b))         more feedback where the model is more confident

Here p is the last prediction at this position, and H(p) is its entropy in nats. m and v_i are the
embeddings of [MASK] and of token i. Three scalars are learned: ω_s, ω_a and ω_b. To use SM with any
model that takes embeddings:

    sm = SoftMask(mask_id=tokenizer.mask_token_id, omega_s=0.3, omega_a=1.0, omega_b=-3.0)
    table = model.get_input_embeddings().weight           # (V, D)
    with torch.no_grad():
        logits = model(input_ids=x).logits                # (B, L, V)  what it predicts at the masks
    emb = sm.embed(table, x, logits)                      # (B, L, D)  only the [MASK]s change
    logits = model(inputs_embeds=emb).logits              # (B, L, V)  train or decode from these

Where comments describe the method, no tag means that the paper says so. [code] is what the authors'
code does where the paper is silent or differs. [ours] is our choice.

What can go wrong:

1. λ can stay near 0. Then feedback is off, and the loss does not show it. So print λ, which is the
   first output of sm(logits[x == mask_id]). Start with ω_a = 1, and ω_b = minus the mean entropy at
   the masks, in nats [ours]: about −3 on text. The paper's ω, the default, is for confident models.
2. ω barely moves at the backbone's learning rate. Give it its own optimizer group, with a learning
   rate near 1e-2 (App. B.2) and no weight decay [code]: decay would pull ω_s = σ(raw_s) to 0.5.
3. The first decoding step has no feedback, so the model must also work without it. Switch feedback
   off in some updates (§3.2): 20 % of them for MDLM (App. C.3), 50 % for Dream (App. B.2).
4. Row l of the logits must predict position l. If the model predicts the next token, shift them.
5. SoftMask detaches nothing. To keep gradients out of the first pass, run it under no_grad.

RECIPES.md covers further pitfalls: autocast, DDP, and models that predict [MASK].
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6  # keeps raw_s finite, and ω_a, ω_b and τ away from 0 [code]


class SoftMask(nn.Module):
    """sm_ω(x̂, p) of §3.1. Your own model calls `embed`, which is made of two methods. This project
    calls these for the masks only: `forward` returns λ, the likeliest tokens and their shares π,
    and `mix` mixes them.

    mask_id: the id of [MASK]. Its row of the table is m.
    k: tokens in the mix. None: all of V, with a learned temperature that starts at tau (App. C.3).
    omega_s in [0, 1): amplitude. 0 becomes EPS, because raw_s = −∞ could not learn.
    omega_a > 0: steepness, per nat.   omega_b < 0: offset, in nats.
    Defaults: k from §4.1, ω_a and ω_b from App. B.2, ω_s [code].
    Parameters: raw_s, raw_a, raw_b; raw_tau for k = |V|. See `omega` and `tau`.
    """

    def __init__(self, mask_id, k=3, omega_s=1e-6, omega_a=10 / 1.5, omega_b=-0.75, tau=1.0):
        super().__init__()
        if not (0 <= omega_s < 1 and omega_a > 0 and omega_b < 0 and tau > 0):
            raise ValueError(f"omega_s = {omega_s}, omega_a = {omega_a}, omega_b = {omega_b}, "
                             f"tau = {tau}: give 0 <= omega_s < 1, omega_a > 0 > omega_b, tau > 0")
        if mask_id is None or k is not None and k < 1:
            raise ValueError(f"mask_id = {mask_id}, k = {k}: SoftMask needs an id, and k > 0")
        self.mask_id = mask_id
        self.k = k
        self.raw_s = nn.Parameter(torch.logit(fp32(omega_s), eps=EPS))
        self.raw_a = nn.Parameter(softplus_inverse(fp32(omega_a)))
        self.raw_b = nn.Parameter(softplus_inverse(fp32(-omega_b)))
        if k is None:  # with top-k, nothing depends on τ
            self.raw_tau = nn.Parameter(softplus_inverse(fp32(tau)))

    def forward(self, logits):
        """How much feedback each mask gets, from which tokens, and in what shares       §3.1, Eq. 3

        logits: (N, V), one row per masked position, any float dtype.
        Returns λ (N,), ids (N, k), π (N, k), with λ and π in fp32. For k = |V|: ids None, π (N, V).
        """
        logits = logits.float()                                                    # (N, V)
        if self.k is None:
            # τ changes λ, too [code]. The gradient of τ sums p · logit over the tokens, and a logit
            # of −inf would add 0 · −inf = NaN. Hence the clamp.
            logits = logits.clamp_min(-1e30) / self.tau                            # (N, V)
        logp = logits.log_softmax(-1)                                              # (N, V)
        lam = self.strength(neg_entropy(logp))                                     # (N,)
        if self.k is None:
            return lam, None, logp.exp()                                           # π (N, V)
        if self.k > logits.shape[1]:
            raise ValueError(f"k = {self.k} for logits of {logits.shape[1]} tokens")
        top, ids = largest(logits, self.k)                                         # (N, k)
        return lam, ids, top.softmax(-1)             # π_i = p_i / Σ p, over the top k

    def strength(self, minus_h):
        """λ(p) = ω_s · σ(ω_a (−H(p) − ω_b)), the share of predicted tokens in the mix        Eq. 3

        minus_h: (…) −H(p) in nats, at most 0.   Returns λ (…) in [0, ω_s], near ω_s where the
        model is confident. ω_s = 0 would be binary masking (§3.3).
        """
        omega_s, omega_a, omega_b = self.omega
        return omega_s * torch.sigmoid(omega_a * (minus_h - omega_b))              # (…)

    def mix(self, table, lam, ids, pi):
        """(1 − λ) m + λ Σ_i π_i v_i, on embeddings instead of one-hot vectors         §3.1 sm(·,·)

        table: (V, D), the embeddings.   lam (N,), ids, pi: from `forward`.
        Returns (N, D) in the table's dtype.
        """
        lam = lam[:, None]                                                         # (N, 1)
        if ids is not None:
            # [MASK] is looked up along with the k tokens. In the backward pass, every lookup fills
            # a (V, D) gradient of the table, so a second one would cost as much as the first.
            mask_ids = torch.full_like(ids[:, :1], self.mask_id)                   # (N, 1)
            vectors = F.embedding(torch.cat((ids, mask_ids), 1), table)            # (N, k+1, D)
            weights = torch.cat((lam * pi, 1 - lam), 1)  # of v_i, then of m         (N, k+1)  fp32
            return (weights[..., None] * vectors).sum(1).to(table.dtype)           # (N, D)
        # Autocast would round this product, and so the gradient of ω, to bf16.
        with torch.autocast(table.device.type, enabled=False):
            guess = pi.to(table.dtype) @ table                                     # (N, D)
        return ((1 - lam) * table[self.mask_id] + lam * guess).to(table.dtype)     # (N, D)

    def embed(self, table, x, logits):
        """sm(x̂, p) for a whole batch: mixed where x is [MASK], plain elsewhere    §3.1, both cases

        table: (V, D).   x: (B, L) token ids.
        logits: the last prediction, (B, L, V), or only its rows logits[x == mask_id], (N, V).
            The first form has static shapes, for torch.compile. The second is cheaper.
        Returns (B, L, D) in the table's dtype. λ = 0 gives F.embedding(x, table) bit for bit.
        """
        if logits.shape[-1] != len(table):
            raise ValueError(f"logits of {logits.shape[-1]} tokens for a table of {len(table)}")
        masked = x == self.mask_id                                                 # (B, L)
        plain = F.embedding(x, table)                                              # (B, L, D)
        if logits.dim() == 3:
            # Logits at padding may be NaN. `where` below drops them, but ω's gradient would be NaN.
            logits = logits.masked_fill(~masked[..., None], 0)                     # (B, L, V)
            mixed = self.mix(table, *self(logits.flatten(0, 1)))                   # (B·L, D)
            return torch.where(masked[..., None], mixed.view_as(plain), plain)     # (B, L, D)
        masks = masked.nonzero(as_tuple=True)  # (b, l)                              2 × (N,)
        if len(logits) != len(masks[0]):  # a single row would silently broadcast to all masks
            raise ValueError(f"{len(logits)} rows of logits for {len(masks[0])} [MASK]s in x")
        return plain.index_put(masks, self.mix(table, *self(logits)))              # (B, L, D)

    @property
    def omega(self):
        """(ω_s, ω_a, ω_b) with their constraints, as 0-d fp32 tensors                   App. B.1"""
        if self.raw_s.dtype != torch.float32:  # load_state_dict(assign=True) bypasses _apply
            raise ValueError(f"ω is in {self.raw_s.dtype}, not float32: call SoftMask.float()")
        omega_a = F.softplus(self.raw_a) + EPS
        omega_b = -F.softplus(self.raw_b) - EPS
        return torch.sigmoid(self.raw_s), omega_a, omega_b

    @property
    def tau(self):
        """The temperature for k = |V|, a 0-d fp32 tensor                                App. C.3"""
        return F.softplus(self.raw_tau) + EPS

    def _apply(self, fn, recurse=True):
        """.to(), .cuda() and .bfloat16() call this. They may move SM, but not take it out of fp32.

        raw_s starts near −14, where bf16 numbers are 1/16 apart. Adam's steps of 1e-2 would all be
        rounded away: ω_s would never move, and SM would silently stay off.
        """
        def move(tensor):
            new = fn(tensor)
            if not tensor.is_floating_point() or new.dtype == torch.float32:
                return new
            return tensor.to(new.device, torch.float32)  # `new` is rounded already
        return super()._apply(move, recurse)

    def extra_repr(self):
        if self.raw_s.is_meta or self.raw_s.dtype != torch.float32:  # no values, or rounded ones
            return f"k={self.k}"
        words = "k={}, omega_s={:.4g}, omega_a={:.4g}, omega_b={:.4g}"
        return words.format(self.k, *self.omega)


def feed_back(sm, table, emb, x, masks, predicted, gain=1.0):
    """What the next pass reads: sm(x̂, p) at `masks`, and emb elsewhere                  Alg. 2 l.6

    A revealed position gets its token's embedding. One that stays masked gets the mix.

    sm: SoftMask, or None for binary masking.   table: (V, D).   emb: (…, D), the embeddings to
        change: what the last pass read, or plain embeddings of x.
    x: (…) ids, after the reveal.   masks: an index into x, such as a pair (b, l), each (N,).
    predicted: λ (N,), ids and π (N, k), usually from sm(logits); None without sm.
    gain: a factor on λ, App. C.9.
    Returns emb (…, D), and λ (…): gain · λ where feedback was mixed in, 0 elsewhere.
    """
    new = F.embedding(x[masks], table)  # plain, so far                          (N, D)
    lam_map = torch.zeros(x.shape, device=x.device)                            # (…)
    if sm:
        lam, ids, pi = predicted
        soft = sm.mix(table, gain * lam, ids, pi)                              # (N, D)
        stays = x[masks] == sm.mask_id                                         # (N,)
        new = torch.where(stays[:, None], soft, new)                           # (N, D)
        lam_map = lam_map.index_put(masks, gain * lam * stays)                 # (…)
    return emb.index_put(masks, new), lam_map


def neg_entropy(logp):
    """−H(p) = Σ p log p in nats, at most 0.   logp: (…, V) log-probabilities.   Returns (…)."""
    return (logp.exp() * logp.clamp_min(-100)).sum(-1)  # without the clamp, 0 · −inf would be NaN


def fp32(number):
    return torch.tensor(number, dtype=torch.float32)


def softplus_inverse(y):
    return y + torch.log(-torch.expm1(-y))  # log(e^y − 1), without overflow


def largest(logits, k):
    """logits.topk(k) for logits (N, V), but faster. Ties may be broken differently [ours].

    `topk` reads its input several times. Here, one pass finds the maximum of each group of 128
    logits, and then `topk` reads only the k groups with the largest maxima, plus the last V mod 128
    logits. No logit of another group exceeds these k maxima, so none of the top k is missed.
    """
    width = 128
    V = logits.shape[1]
    if V < 8 * k * width:  # the k groups would be a large part of V
        return logits.topk(k)
    whole = V // width * width
    groups = logits.detach()[:, :whole].unflatten(1, (-1, width))              # (N, V/128, 128)
    best = groups.amax(-1).topk(k).indices                                     # (N, k)
    inside = torch.arange(width, device=best.device)                           # (128,)
    ids = (best[..., None] * width + inside).flatten(1)                        # (N, k·128)
    rest = torch.arange(whole, V, device=best.device).expand(len(ids), -1)     # (N, < 128)
    ids = torch.cat((ids, rest), 1)                                            # (N, < (k+1)·128)
    top, place = logits.gather(1, ids).topk(k)                                 # 2 × (N, k)
    return top, ids.gather(1, place)                                           # 2 × (N, k)
