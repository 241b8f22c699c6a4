# SPDX-License-Identifier: MIT
"""Masked diffusion language model: the corruption, the network, and the two-pass soft-masked loss.

    Alg. 1 l.3, §3.2         sample_times    times t, stratified over the batch
    Alg. 1 l.4, §2.1         corrupt         tokens become [MASK] with probability 1 − α_t
    §2.1 g_θ, App. B.1       DiT             a bidirectional transformer, 169M in the paper
    Alg. 1 l.5-8             TwoPass         predict, feed back, predict again, for any backbone
    Eq. 2                    MDLM.forward    the loss: −log p of the masked tokens, times 1/t

A backbone is three things. Soft-masking works between the first and the second:

    table                   (V, D)                           the embeddings
    hidden(emb, at, t)      (B, L, D), (N,), (B,) → (N, D)   last hidden states that predict `at`,
                                                             which are positions in the flat batch
    head(h)                 (n, D) → (n, V)                  logits, fp32 always

Logits have a row for each *masked* position, N in a batch, and exist only in `in_chunks`, n at a
time: (B, L, V) in fp32 would take 6.6 GB for one micro-batch of the paper. Submodules have the
names and the order of the released checkpoints.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import checkpoint
from arms import ARMS
from launch import Count, Negative, Positive, Refused, Size

ALPHA_FLOOR = 1e-3  # α_t = 1 − (1 − floor) t never reaches 0: at t = 1 a few tokens are left [code]
T_MIN = 1e-3        # the smallest time: the loss divides by t [code]
BUDGET = 1e9        # bytes of a chunk's (n, V) tensors, and of all those kept for a backward
CPU_LOGITS = 52e6   # bytes of a chunk's logits on a CPU, so that its allocator reuses one buffer
CPU_CACHE = 1.6e6   # bytes of logits that stay in a CPU's caches while SM passes over them often
COMPILED_ROWS = 4096  # of a chunk, if chunks are compiled: large products, 0.4 GB of logits


@dataclass
class ModelConfig:
    # the backbone, App. B.1; Annotated[int, 1, 1000]: from 1 to 1000, checked by launch.py
    n_layer: Annotated[int, 1, 1000] = 12
    n_head: Size = 12
    n_embd: Size = 768
    n_cond: Size = 128               # width of the time embedding, for adaLN [code]
    vocab_size: Size = 50258         # GPT-2's 50,257 and [MASK]
    mask_id: Count = 50257
    length: Annotated[int, 3, 2**20] = 1024  # L, tokens per sequence
    dropout: Annotated[float, 0, 0.999] = 0.1
    time_conditioning: bool = False  # on in §4.1, but off in both released configurations [code]
    # soft-masking, §3.1
    soft_mask: bool = True           # False: a binary MDLM, without ω
    k: Size | None = 3               # None: all of |V|, through a trainable temperature, App. C.3
    omega_s: Annotated[float, 0, 1 - 1e-6] = 1e-6  # ω at the start: close to 0, App. B.2 [code]
    omega_a: Positive = 10 / 1.5
    omega_b: Negative = -0.75
    two_updates: bool = False        # the first pass gets gradients too, App. C.3
    arm: Literal[tuple(ARMS)] = ""   # another gate or mix: its name in arms.py


def sample_times(n, generator, b_l=T_MIN, b_h=1.0):
    """n times in [b_l, b_h], one from each of n equal slices                       Alg. 1 l.3, §3.2

    Returns t: (n,) fp32, ascending. The loss varies far less than with independent draws [code].
    """
    u = (torch.arange(n) + torch.rand(n, generator=generator)) / n             # (n,)
    return b_l + (b_h - b_l) * u                                               # (n,)


def corrupt(x0, t, mask_id, generator, floor=ALPHA_FLOOR):
    """x_t ~ q(x_t | x_0): a token is [MASK] with probability 1 − α_t      §2.1 marginal, Alg. 1 l.4

    x0: (B, L) ids.   t: (B,) in (0, 1].   floor: α_1.   Returns x_t: (B, L).
    """
    # Drawn on the CPU: the same masks for every device.
    u = torch.rand(x0.shape, generator=generator)                              # (B, L)
    return torch.where(u < (1 - floor) * t[:, None], mask_id, x0)              # (B, L)


class LayerNorm(nn.Module):
    """LayerNorm without a bias, then adaLN's shift and scale, in fp32 [code]"""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, shift, scale):
        x, shift = x.float(), shift.float()
        gain = self.weight * (1 + scale)                                       # (B or 1, 1, D)
        if len(gain) == 1:  # all sequences share it: layer_norm applies it, and saves a pass over x
            return F.layer_norm(x, x.shape[-1:], gain[0, 0], shift[0, 0])
        return F.layer_norm(x, x.shape[-1:]) * gain + shift                    # (B, L, D)


def zero_linear(n_in, n_out):
    """A linear map that starts at zero [code]: blocks start as the identity, and p as uniform."""
    linear = nn.Linear(n_in, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotate(x, cos, sin):
    """Rotary positions of queries and keys: they turn pairs (i, i + d/2), not neighbours [code]"""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)           # (B, L, 2, H, d)


class Block(nn.Module):
    """Attention without a mask, then an MLP. The time embedding shifts, scales and gates both."""

    def __init__(self, cfg):
        super().__init__()
        D = cfg.n_embd
        self.n_head, self.dropout = cfg.n_head, cfg.dropout
        self.norm1 = LayerNorm(D)
        self.attn_qkv = nn.Linear(D, 3 * D, bias=False)
        self.attn_out = nn.Linear(D, D, bias=False)
        self.norm2 = LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * D, D))
        self.adaLN_modulation = zero_linear(cfg.n_cond, 6 * D)

    def forward(self, x, c, cos, sin):
        B, L, D = x.shape  # c: (B or 1, cond), the time embedding.   cos, sin: (L, 1, 1, d)
        modulation = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)        # 6 × (B or 1, 1, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        qkv = self.attn_qkv(self.norm1(x, shift1, scale1))                     # (B, L, 3D)
        qk, v = qkv.view(B, L, 3, self.n_head, -1).split((2, 1), dim=2)        # (B, L, 2, H, d)
        q, k = rotate(qk, cos, sin).permute(2, 0, 3, 1, 4)                     # 2 × (B, H, L, d)
        y = F.scaled_dot_product_attention(q, k, v.squeeze(2).transpose(1, 2))  # (B, H, L, d)
        y = self.attn_out(y.transpose(1, 2).reshape(B, L, D))                  # (B, L, D)
        # Dropout comes before the gate [code].
        x = x + gate1 * F.dropout(y, self.dropout, self.training)              # (B, L, D)
        y = self.mlp(self.norm2(x, shift2, scale2))                            # (B, L, D)
        return x + gate2 * F.dropout(y, self.dropout, self.training)           # (B, L, D)


class DiT(nn.Module):
    """g_θ as a backbone: table, hidden, head                                      §2.1, App. B.1"""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        V, D, cond = cfg.vocab_size, cfg.n_embd, cfg.n_cond
        self.vocab_embed = nn.ParameterDict({"embedding": torch.empty(V, D)})  # not `head`'s [code]
        nn.init.kaiming_uniform_(self.table, a=math.sqrt(5))
        mlp = nn.Sequential(nn.Linear(256, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.sigma_map = nn.ModuleDict({"mlp": mlp})
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.output_layer = nn.ModuleDict({
            "norm_final": LayerNorm(D),
            "linear": zero_linear(D, V),
            "adaLN_modulation": zero_linear(cond, 2 * D)})

    @property
    def table(self):
        return self.vocab_embed.embedding                                      # (V, D)

    def time_embedding(self, t):
        """(B, cond) fp32, of σ = −log α_t. Without time conditioning (1, cond), of σ = 0 [code]"""
        with torch.autocast(t.device.type, enabled=False):
            sigma = t.new_zeros(1)                                             # (1,)
            if self.cfg.time_conditioning:
                sigma = -torch.log1p(-(1 - ALPHA_FLOOR) * t)                   # (B,)
            i = torch.arange(128, device=t.device)
            frequencies = torch.exp(-math.log(10000) * i / 128)                # (128,)
            angles = sigma.float()[:, None] * frequencies                      # (B or 1, 128)
            waves = torch.cat((angles.cos(), angles.sin()), dim=-1)            # (B or 1, 256)
            return F.silu(self.sigma_map.mlp(waves))                           # (B or 1, cond)

    def trunk(self, emb, t):
        """emb (B, L, D) → last hidden states (B, L, D), both fp32, under autocast too [code]"""
        device = emb.device
        d = self.cfg.n_embd // self.cfg.n_head
        i = torch.arange(0, d, 2, device=device).float()                       # (d/2,)
        position = torch.arange(emb.shape[1], device=device).float()           # (L,)
        # Angles in fp32: bf16 would lose the phase of far positions.
        angles = position[:, None] * 10000 ** (-i / d)                         # (L, d/2)
        # As cos(−a) = cos a and sin(−a) = −sin a, this negates sin for the first of each pair.
        angles = torch.cat((-angles, angles), dim=-1)[:, None, None]           # (L, 1, 1, d)
        dtype = emb.dtype  # that of queries and keys
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        cos = angles.cos().to(dtype)                                           # (L, 1, 1, d)
        sin = angles.sin().to(dtype)                                           # (L, 1, 1, d)
        c = self.time_embedding(t)                                             # (B or 1, cond)
        for block in self.blocks:
            emb = block(emb, c, cos, sin)                                      # (B, L, D)
        modulation = self.output_layer.adaLN_modulation(c)[:, None]            # (B or 1, 1, 2D)
        shift, scale = modulation.chunk(2, dim=-1)                             # 2 × (B or 1, 1, D)
        return self.output_layer.norm_final(emb, shift, scale)                 # (B, L, D)

    def hidden(self, emb, at, t):
        return self.trunk(emb, t).flatten(0, 1)[at]                            # (N, D)

    def head(self, h):
        """h (n, D) → logits (n, V), fp32. They never predict [MASK] [code]."""
        V = self.cfg.vocab_size
        weight = self.output_layer.linear.weight                               # (V, D)
        bias = self.output_layer.linear.bias.clone()                           # (V,)
        bias[self.cfg.mask_id] = -1e6  # p = 0 without one more pass over an (n, V) tensor
        if torch.compiler.is_compiling() and h.is_cuda:
            # Where 64 does not divide V, CUDA takes an old kernel for the gradient of weight. So V
            # is padded inside of the product [ours]. Eager code would copy the weights each time.
            weight = F.pad(weight, (0, 0, 0, -V % 64))
            bias = F.pad(bias, (0, -V % 64))
        return F.linear(h, weight, bias)[:, :V].float()                        # (n, V)


def likeliest(probs, p):
    """The m largest of each row of probs (n, V). In every row, their sum is above p, or m = V.

    Returns values and ids (n, m), descending. To sort all of V costs as much as the network [ours].
    """
    V = probs.shape[1]
    sizes = (min(1024, V), min(8192, V), V)
    if probs.is_cuda and probs.numel() < 1e6:
        sizes = (V,)  # `all` makes the host wait for a GPU; 1e6 is a guess, not measured [ours]
    for m in sizes:
        top, ids = probs.topk(m)                                               # 2 × (n, m)
        if m == V or (top.cumsum(-1)[:, -1] > p).all():
            return top, ids


def in_chunks(fn, *rows, V, keeps=0, compiled=False):
    """fn(*rows) in chunks of rows, outputs concatenated. (n, V) tensors exist only in here.

    fn: maps tensors (n, …) to one (n, …), or a tuple of them.   rows: tensors (N, …), N may be 0.
    keeps: number of fp32 (n, V) tensors that fn keeps for its backward. If those of all chunks take
        more than BUDGET, none is kept, and the backward runs fn again.   compiled: fn keeps its
        logits, in the dtype of the product, and nothing runs again.
    """
    N, one_row = len(rows[0]), 4 * V  # bytes of a row of fp32 logits
    # While fn works it holds at most 6.7 tensors (n, V) in fp32, measured for SM over all of |V|.
    room = CPU_LOGITS if rows[0].device.type == "cpu" else BUDGET / 6.7
    size = max(1, int(room / one_row))
    if compiled:
        size = COMPILED_ROWS  # always split: a whole tensor would be compiled for once more
    elif N <= size:
        return fn(*rows)
    if torch.is_grad_enabled() and keeps * N * one_row > BUDGET and not compiled:
        fn = partial(recomputed, fn, use_reentrant=False, preserve_rng_state=False)
    parts = [fn(*chunk) for chunk in zip(*(r.split(size) for r in rows))]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part) for part in zip(*parts))
    return torch.cat(parts)


class TwoPass(nn.Module):
    """Predict, feed back, predict again, for any backbone                        §3.2, Alg. 1 l.5-8

    net: a backbone (see the top of this file).   sm: SoftMask, or None for a binary model.
    A subclass defines its loss as `forward`, so that DDP sees one forward per backward.
    """

    def __init__(self, net, sm, mask_id, two_updates=False):
        super().__init__()
        self.net, self.sm = net, sm
        self.mask_id = mask_id
        self.two_updates = two_updates      # the first pass gets gradients too, App. C.3
        self.lam = torch.tensor(torch.nan)  # 0-d, the mean of λ in the last forward with feedback
        self.compiled = False

    def weigh(self, h, logits=None):
        """λ (n,), ids (n, k), π (n, k) of a chunk. For k = |V|: λ, best id (n, 1), mix (n, D)."""
        sm = self.sm
        if logits is None:
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):
                logits = self.net.head(h)                                      # (n, V)
        if sm.k is None:
            lam, _, pi = sm(logits)                                            # (n,), (n, V)
            return lam, pi.argmax(-1)[:, None], sm.mix(self.net.table, lam, None, pi)
        if self.compiled or not logits.is_cpu:
            return sm(logits)
        # In pieces that stay in a CPU's caches, SM is faster.
        pieces = logits.split(max(1, int(CPU_CACHE / 4 / logits.shape[1])))
        return tuple(torch.cat(parts) for parts in zip(*map(sm, pieces)))

    def feedback(self, h, logits=None):
        """What masked positions look like in the next pass                 Alg. 1 l.6-7, Alg. 2 l.6

        h: (n, D) hidden states that predict them.   logits: (n, V) head(h), if already computed.
        Returns their embeddings (n, D), λ (n,), and the most likely tokens (n,).
        """
        if logits is None:
            # At most, of (n, V): logits, the same clamped, d, d clamped, e, π.
            keeps = 6 if self.two_updates or self.sm.k is None else 0
            lam, ids, pi = in_chunks(self.weigh, h, V=len(self.net.table), keeps=keeps,
                                     compiled=self.compiled)
        else:
            lam, ids, pi = self.weigh(h, logits)
        if self.sm.k is None:  # pi is the mix: π is (n, V), and stays in its chunk
            return pi, lam, ids[:, 0]
        # One mix for all chunks, because each lookup in the table costs a dense (V, D) gradient.
        return self.sm.mix(self.net.table, lam, ids, pi), lam, ids[:, 0]

    def feedback_of_certain(self, ids):
        """`feedback` of re-masked tokens ids (m,): H = 0, largest λ.

        The network has just seen them as tokens. Of such a token, MDLM predicts p = 1 [code].
        """
        neg_entropy = torch.zeros(len(ids), device=ids.device)                 # (m,)
        lam = self.sm.strength(neg_entropy)                                    # (m,)
        pi = torch.ones_like(lam)[:, None]                                     # (m, 1)
        return self.sm.mix(self.net.table, lam, ids[:, None], pi), lam, ids

    def warning(self):
        """What to tell the user if training has left feedback off, which no loss shows, else ""."""
        if self.sm is None or not self.lam < 1e-3:
            return ""
        return (f"feedback is off: λ is {self.lam:.1g} on average. Train longer, or start with "
                f"--omega_s=0.5 --omega_a=1 --omega_b=-2.8")

    def score(self, h, x):
        return F.cross_entropy(self.net.head(h), x, reduction="none")          # (n,)  of one chunk

    def cross_entropy(self, h, x):
        """−log p(x), (N,) fp32 nats, of tokens x (N,) from hidden states h (N, D)     Alg. 1 l.8"""
        return in_chunks(self.score, h, x, V=len(self.net.table), keeps=1, compiled=self.compiled)

    def token_nll(self, x0, xt, t, soft, at=None):
        """−log p(x0) of every masked token, in nats                                    Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) times.   soft: two passes, not one on plain masks.
        at: (N,) positions of [MASK] in the flat batch (default: found here).
        Returns nll (N,) fp32, and at. Checked against tests/oracles.py dense_nll.
        """
        net = self.net
        if at is None:  # the host waits for the device here, and nowhere else
            at = (xt == self.mask_id).flatten().nonzero().squeeze(1)           # (N,)
        emb = F.embedding(xt, net.table)                                       # (B, L, D)
        if soft:
            # Pass 1 keeps dropout on [code]. It has a graph only with two_updates.
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):         # l.5
                h = net.hidden(emb, at, t)                                     # (N, D)          l.6
            mixed, lam, _ = self.feedback(h)                                   # (N, D), (N,) l.7 sm
            emb = emb.flatten(0, 1).index_copy(0, at, mixed.to(emb.dtype)).view_as(emb)
            self.lam = lam.detach().sum() / max(1, len(lam))
        h = net.hidden(emb, at, t)                                             # (N, D)        l.7 g
        nll = self.cross_entropy(h, x0.flatten()[at])                          # (N,)            l.8
        if self.sm is not None:
            # This adds 0 to the gradient of ω, so it is in the graph of every step. Else DDP would
            # wait for the gradient of ω after a step without SM, and would then apply a wrong one.
            # 0 · p for each: the gradients of 0 · Σp would all be views of one number.
            nll = nll + sum((0 * p).sum() for p in self.sm.parameters())
        return nll, at


def compile_parts(model, mode=None):
    """Compile the slow parts of a TwoPass on CUDA: its trunk and its work on a chunk [ours]

    mode: of the trunk; "reduce-overhead" makes CUDA graphs. Chunks have none: their length changes.
    Methods are compiled, not modules, because those would change the names in the state_dict.
    """
    def any_length(fn):
        fast = torch.compile(fn, dynamic=True)
        # torch would compile once more for 0 rows and for 1.
        return lambda h, *others: (fast if len(h) > 1 else fn)(h, *others)

    model.net.trunk = torch.compile(model.net.trunk, mode=mode)
    model.weigh, model.score = any_length(model.weigh), any_length(model.score)
    model.compiled = True


class MDLM(TwoPass):
    """The DiT, its soft mask, and Eq. 2.   cfg: ModelConfig."""

    def __init__(self, cfg):
        if cfg.n_embd % (2 * cfg.n_head):  # rotary positions turn pairs
            raise Refused(f"n_embd={cfg.n_embd} is no multiple of 2 × n_head={cfg.n_head}")
        net, sm = DiT(cfg), None
        if cfg.soft_mask:
            sm = ARMS[cfg.arm](cfg.mask_id, cfg.k, omega_s=cfg.omega_s, omega_a=cfg.omega_a,
                               omega_b=cfg.omega_b)
        super().__init__(net, sm, cfg.mask_id, cfg.two_updates)
        self.cfg = cfg

    def forward(self, x0, xt, t, soft, at=None):
        """Cross-entropy of the masked tokens, times 1/t                         Eq. 2, Alg. 1 l.5-8

        Returns nll: (B,) nats per sequence. Its mean over t and x_t bounds −log p(x0) from above
        for a sampler with two passes, as here. Alg. 2 is another one: its single pass has the
        feedback of the step before, of which pass 1 is a proxy (§3.2).
        """
        B, L = xt.shape
        nll, at = self.token_nll(x0, xt, t, soft, at)                          # (N,), (N,)
        return nll.new_zeros(B).index_add(0, at // L, nll) / t                 # (B,)        l.8 1/t

    @classmethod
    def load(cls, path, ema=True):
        """A model in eval mode, from any file that checkpoint.load reads. `.info`: the rest of it.

        ema: take the averaged backbone, as every published number does.
        """
        weights, info = checkpoint.weights(path, ema)
        config = {name: value for name, value in info["config"].items()
                  if name in ModelConfig.__dataclass_fields__}  # train.Config has more
        model = cls(ModelConfig(**config))
        model.load_state_dict(weights)
        model.info = info
        return model.eval()
