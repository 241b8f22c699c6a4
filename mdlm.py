# SPDX-License-Identifier: MIT
"""Masked diffusion language model: the corruption, the network, and the two-pass soft-masked loss.

    Alg. 1 l.3, §3.2         sample_times    times t, stratified over the batch
    Alg. 1 l.4, §2.1         corrupt         tokens become [MASK] with probability 1 − α_t
    §2.1 g_θ, App. B.1       DiT             a bidirectional transformer, 169M in the paper
    Alg. 1 l.5-8             TwoPass         predict, feed back, predict again, for any backbone
    Eq. 2                    MDLM.forward    the loss: −log p of the masked tokens, times 1/t

A backbone, for TwoPass and for sample_dream.decode, is three things. Soft-masking works between the
first and the second:

    table                   (V, D)                           the embeddings
    hidden(emb, rows, t)    (B, L, D), (N,), (B,) → (N, D)   last hidden states that predict `rows`,
                                                             which are positions in the flat batch
    head(h)                 (n, D) → (n, V)                  logits, fp32 always

One convention holds in this file. A tensor with a vocabulary axis is (n, V), with one row for each
*masked* position, and it exists only inside `in_chunks`. Unmasked positions have no loss and no
feedback, so their logits are not computed: on average half of the rows (E[t] = ½). The tensor
(B, L, V) is never made. In fp32 it takes 6.6 GB for one micro-batch of the paper.

Submodules and parameters have the names and the order of the released MDLM checkpoints. So these
weights load without a table of names that could be wrong.

Not here: the reverse process (sample.py), optimizers, DDP, EMA, files. This file is a module, and
train.py runs it. Only initial weights and dropout come from torch's global generators.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import checkpoint
from arms import ARMS
from launch import Count, Negative, Positive, Refused, Size

ALPHA_FLOOR = 1e-3  # α_t = 1 − (1 − floor) t never reaches 0: at t = 1 a few tokens are left [code]
BUDGET = 1e9        # bytes of a chunk's (n, V) tensors, and of all those kept for a backward
CPU_LOGITS = 52e6   # bytes of a chunk's logits on a CPU, so that its allocator reuses one buffer
CPU_CACHE = 1.6e6   # bytes of the logits that SM goes over again and again, for a CPU's caches
COMPILED = 4096     # rows of a chunk where chunks are compiled: large products, 0.4 GB of logits


@dataclass
class ModelConfig:
    # the backbone, App. B.1
    n_layer: Annotated[int, 1, 1000] = 12
    n_head: Size = 12
    n_embd: Size = 768
    n_cond: Size = 128               # width of the time embedding, which adaLN reads [code]
    vocab_size: Size = 50258         # GPT-2's 50,257 and [MASK]
    mask_id: Count = 50257
    length: Annotated[int, 3, 2**20] = 1024  # L, tokens per sequence
    dropout: Annotated[float, 0, 0.999] = 0.1
    time_conditioning: bool = False  # on in §4.1, but off in both released configurations [code]
    # soft-masking, §3.1
    soft_mask: bool = True           # False: a binary MDLM, without ω
    k: Size | None = 3               # none: all of |V|, through a trainable temperature, App. C.3
    omega_s: float = 1e-6            # ω at the start, App. B.2: SM is almost off
    omega_a: Positive = 10 / 1.5
    omega_b: Negative = -0.75
    two_updates: bool = False        # the first pass gets gradients too, App. C.3
    arm: str = ""                    # another gate or mix: its name in arms.py


# -------------------------------------------------------------------------------------------------
# forward process


def sample_times(n, generator, low=ALPHA_FLOOR, high=1.0):
    """n times in [b_l, b_h], one from each of n equal slices                       Alg. 1 l.3, §3.2

    Each time is uniform in its slice, and together they cover the interval. So the loss of a batch
    has far less variance than with n independent draws [code].
    Returns t: (n,) fp32, ascending. b_l > 0, because Eq. 2 divides by t.
    """
    u = (torch.arange(n) + torch.rand(n, generator=generator)) / n             # (n,)
    return low + (high - low) * u                                              # (n,)


def corrupt(x0, t, mask_id, generator, floor=ALPHA_FLOOR):
    """x_t ~ q(x_t | x_0): a token is [MASK] with probability 1 − α_t      §2.1 marginal, Alg. 1 l.4

    x0: (B, L) ids.   t: (B,) in (0, 1].   floor: α_1.   Returns x_t: (B, L).
    The draws are made on the CPU, so that x_t is the same for every device.
    """
    u = torch.rand(x0.shape, generator=generator)                              # (B, L)
    return torch.where(u < (1 - floor) * t[:, None], mask_id, x0)              # (B, L)


# -------------------------------------------------------------------------------------------------
# backbone


class LayerNorm(nn.Module):
    """LayerNorm with a gain and without a bias, then adaLN's shift and scale, (B | 1, 1, D).

    Always in fp32, also under autocast [code].
    """

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, shift, scale):
        gain, shift = self.weight * (1 + scale), shift.float()                 # 2 × (B | 1, 1, D)
        if len(gain) == 1:  # all sequences share it: layer_norm applies it, and saves a pass over x
            return F.layer_norm(x.float(), x.shape[-1:], gain[0, 0], shift[0, 0])
        return F.layer_norm(x.float(), x.shape[-1:]) * gain + shift            # (B, L, D)


def adaLN(n_cond, n_out):
    """From the time embedding to shifts, scales and gates.

    It is zero at the start, so that every block starts as the identity.
    """
    linear = nn.Linear(n_cond, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotate(x, cos, sin):
    """Rotary positions. They turn the pairs (i, i + d/2), not neighbours [code].

    x: (B, L, 2, H, d).   cos, sin: (L, 1, 1, d), of the angle, with a minus in the first half.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)           # (B, L, 2, H, d)


class VocabEmbed(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, dim))            # (V, D)  not tied
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))


class SigmaMap(nn.Module):
    """Embeds the noise level: cosines and sines of 128 frequencies, then a small MLP."""

    def __init__(self, n_cond):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, n_cond), nn.SiLU(), nn.Linear(n_cond, n_cond))

    def forward(self, sigma):
        i = torch.arange(128, device=sigma.device)
        angles = sigma[:, None] * torch.exp(-math.log(10000) * i / 128)        # (B, 128)
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))       # (B, cond)


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
        self.adaLN_modulation = adaLN(cfg.n_cond, 6 * D)

    def forward(self, x, c, cos, sin):
        B, L, D = x.shape
        modulation = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)        # 6 × (B | 1, 1, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        qkv = self.attn_qkv(self.norm1(x, shift1, scale1))                     # (B, L, 3D)
        qk, v = qkv.view(B, L, 3, self.n_head, -1).split((2, 1), dim=2)        # (B, L, 2|1, H, d)
        q, k = rotate(qk, cos, sin).permute(2, 0, 3, 1, 4)                     # 2 × (B, H, L, d)
        y = F.scaled_dot_product_attention(q, k, v.squeeze(2).transpose(1, 2))  # (B, H, L, d)
        y = self.attn_out(y.transpose(1, 2).reshape(B, L, D))                  # (B, L, D)
        # Dropout comes before the gate [code].
        x = x + gate1 * F.dropout(y, self.dropout, self.training)              # (B, L, D)
        y = self.mlp(self.norm2(x, shift2, scale2))                            # (B, L, D)
        return x + gate2 * F.dropout(y, self.dropout, self.training)           # (B, L, D)


class OutputLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm_final = LayerNorm(cfg.n_embd)
        self.linear = adaLN(cfg.n_embd, cfg.vocab_size)  # also zero: a new model predicts uniformly
        self.adaLN_modulation = adaLN(cfg.n_cond, 2 * cfg.n_embd)


class DiT(nn.Module):
    """g_θ as a backbone: table, hidden, head                                      §2.1, App. B.1"""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.vocab_embed = VocabEmbed(cfg.vocab_size, cfg.n_embd)
        self.sigma_map = SigmaMap(cfg.n_cond)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.output_layer = OutputLayer(cfg)
        self.register_buffer("mask_row", torch.tensor([cfg.mask_id]), persistent=False)

    @property
    def table(self):
        return self.vocab_embed.embedding                                      # (V, D)

    def time_embedding(self, t):
        """t (B,) → (B, cond). Without time conditioning (1, cond), the same for all t.

        Without time conditioning the released code still runs the map, at σ = 0. The result is a
        learned constant [code]. It is computed in fp32, also under autocast.
        """
        with torch.autocast(t.device.type, enabled=False):
            sigma = t.new_zeros(1)                                             # (1,)
            if self.cfg.time_conditioning:
                sigma = -torch.log1p(-(1 - ALPHA_FLOOR) * t)                   # (B,)
            return F.silu(self.sigma_map(sigma.float()))                       # (B | 1, cond)

    def trunk(self, emb, t):
        """Embeddings to the last hidden states, normed and modulated, ready for `head`.

        emb: (B, L, D) fp32.   t: (B,) times, not used without time conditioning.
        Returns h: (B, L, D) fp32.
        Under bf16 autocast the matrix products are in bf16, the residual stream stays fp32 [code].
        """
        kind, d = emb.device.type, self.cfg.n_embd // self.cfg.n_head
        i = torch.arange(0, d, 2, device=emb.device).float()                   # (d/2,)
        position = torch.arange(emb.shape[1], device=emb.device).float()       # (L,)
        # Angles in fp32: bf16 would lose the phase of far positions.
        angles = position[:, None] * 10000 ** (-i / d)                         # (L, d/2)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else emb.dtype
        angles = torch.cat((-angles, angles), dim=-1)[:, None, None]           # (L, 1, 1, d)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)              # (L, 1, 1, d)
        c, x = self.time_embedding(t), emb                                     # (B | 1, cond)
        for block in self.blocks:
            x = block(x, c, cos, sin)                                          # (B, L, D)
        modulation = self.output_layer.adaLN_modulation(c)[:, None]            # (B | 1, 1, 2D)
        shift, scale = modulation.chunk(2, dim=-1)                             # 2 × (B | 1, 1, D)
        return self.output_layer.norm_final(x, shift, scale)                   # (B, L, D)

    def hidden(self, emb, rows, t):
        return self.trunk(emb, t).flatten(0, 1)[rows]                          # (N, D)

    def head(self, h):
        """h (n, D) → logits (n, V), fp32. They never predict [MASK] [code].

        Under bf16 autocast, the product rounds their values to bf16 [code].
        [MASK] has a bias of −1e6, so that its p and its gradient are 0. Writing −inf into the
        logits would cost one more pass over an (n, V) tensor.
        """
        linear = self.output_layer.linear
        bias = linear.bias.index_fill(0, self.mask_row, -1e6)                  # (V,)
        return vocabulary(h, linear.weight, bias)                              # (n, V)


def padded(*tensors):
    """Tensors (V, …) with rows of zeros up to a multiple of 64, as fast matrix products need."""
    return [F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % 64)) for x in tensors]


def vocabulary(h, weight, *bias):
    """Logits (n, V), fp32: h (n, D) times weight (V, D), plus bias (V,) if there is one.

    Where V is no multiple of 64, as GPT-2's, CUDA takes an old kernel for the gradient of weight.
    Compiled code pads V inside of the product [ours]. Eager code would copy the weights each time.
    """
    V = len(weight)
    if torch.compiler.is_compiling() and h.is_cuda and V % 64:
        weight, *bias = padded(weight, *bias)
    return F.linear(h, weight, *bias)[:, :V].float()                           # (n, V)


def likeliest(probs, p):
    """The tokens that a nucleus can hold: the largest of each row, until their sum is above p.

    probs: (n, V).   p: in (0, 1).   Returns values and ids, both (n, m), the largest first.
    Mostly a few tokens reach p, and to sort all of V would cost as much as the network. To know
    whether they do, the host waits for a GPU: of few rows, it sorts all of V instead [ours].
    """
    V = probs.shape[1]
    sizes = (min(1024, V), min(8192, V), V)
    if probs.is_cuda and len(probs) <= 16:
        sizes = (V,)
    for m in sizes:
        top, ids = probs.topk(m)                                               # 2 × (n, m)
        if m == V or (top.cumsum(-1)[:, -1] > p).all():
            return top, ids


# -------------------------------------------------------------------------------------------------
# two passes


def in_chunks(fn, *rows, V, keeps=0, compiled=False):
    """fn(*rows) in chunks of rows, outputs concatenated. (n, V) tensors exist only in here.

    fn: maps tensors (n, …) to a tensor (n, …), or to a tuple of them. Rows must not interact.
    rows: tensors of one length N, which may be 0.   V: size of the vocabulary.
    keeps: number of fp32 (n, V) tensors that fn keeps for its backward. If those of all chunks
        together would take more than BUDGET, none is kept, and the backward runs fn again.
    compiled: fn is compiled. It writes no fp32 logits, and nothing runs again.
    """
    N, one_row, on_cpu = len(rows[0]), 4 * V, rows[0].device.type == "cpu"
    # Measured peak while fn works, in tensors of the size of the fp32 logits: 6.7 for SM over all
    # of |V|, 5.6 for SM with top-k, 3.5 for the cross-entropy. Most of them are gone when fn
    # returns.
    size = max(1, int((CPU_LOGITS if on_cpu else BUDGET / 6.7) / one_row))
    if compiled:
        size = COMPILED
    elif N <= size:
        return fn(*rows)
    run = fn
    if torch.is_grad_enabled() and keeps * N * one_row > BUDGET and not compiled:
        def run(*chunk):
            return recomputed(fn, *chunk, use_reentrant=False, preserve_rng_state=False)
    parts = [run(*chunk) for chunk in zip(*(r.split(size) for r in rows))]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part) for part in zip(*parts))
    return torch.cat(parts)


class TwoPass(nn.Module):
    """Predict, feed back, predict again, for any backbone                        §3.2, Alg. 1 l.5-8

    net: a backbone (see the top of this file).   sm: SoftMask, or None for a binary model.
    mask_id: id of [MASK].   two_updates: the first pass gets gradients too (App. C.3).

    After a forward without feedback the gradient of ω is exactly 0. Set it to None before the
    optimizer's step, as train.py does. Otherwise Adam moves ω by its momentum. For the log, the
    last forward with feedback leaves `lam`, the mean of λ, 0-d.

    A subclass defines its loss as `forward`, so that DDP sees one forward per backward.
    """

    def __init__(self, net, sm, mask_id, two_updates=False):
        super().__init__()
        self.net, self.sm, self.mask_id, self.two_updates = net, sm, mask_id, two_updates
        self.lam, self.compiled = torch.zeros(()), False

    def weigh(self, h, logits=None):
        """A chunk of `feedback`: λ (n,), ids (n, k), π (n, k); for k = |V| their mix (n, D) as π.

        logits: (n, V) head(h), if they are known.
        """
        sm = self.sm
        if logits is None:
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):
                logits = self.net.head(h)                                      # (n, V)
        if sm.k is None:
            lam, _, pi = sm(logits)                                            # (n,), (n, V)
            return lam, pi.argmax(-1)[:, None], sm.mix(self.net.table, lam, None, pi)
        if self.compiled or not logits.is_cpu:
            return sm(logits)
        # In pieces that stay in a CPU's caches, SM is several times as fast.
        pieces = logits.split(max(1, int(CPU_CACHE / 4 / logits.shape[1])))
        return tuple(torch.cat(parts) for parts in zip(*map(sm, pieces)))

    def feedback(self, h, logits=None):
        """What masked positions look like in the next pass                 Alg. 1 l.6-7, Alg. 2 l.6

        h: (n, D) hidden states that predict them.
        logits: (n, V) head(h), if the caller has them: the head does not run again.
        Returns their embeddings (n, D), λ (n,), and the most likely tokens (n,).
        """
        sm, table, keeps = self.sm, self.net.table, 0
        if self.two_updates or sm.k is None:
            keeps = 5
        if logits is None:
            lam, ids, pi = in_chunks(self.weigh, h, V=len(table), keeps=keeps,
                                     compiled=self.compiled)
        else:
            lam, ids, pi = self.weigh(h, logits)
        # One mix for all chunks, because each lookup in the table costs a dense (V, D) gradient.
        mixed = pi if sm.k is None else sm.mix(table, lam, ids, pi)            # (n, D)
        return mixed, lam, ids[:, 0]

    def feedback_of_certain(self, ids):
        """`feedback` of re-masked tokens. Each was predicted with p = 1: H = 0, λ at its maximum.

        ids: (m,).   Returns embeddings (m, D), λ (m,) and ids, like `feedback`.
        """
        zero = torch.zeros(len(ids), device=ids.device)                        # (m,)  −H
        lam, one = self.sm.strength(zero), torch.ones_like(zero)[:, None]      # (m,), (m, 1)
        return self.sm.mix(self.net.table, lam, ids[:, None], one), lam, ids

    def warning(self):
        """What to tell the user if training has left feedback off, which no loss shows. Else "".

        In a continuation the paper's ω_s may fall from its start. Then this is a binary model.
        """
        if self.sm is None or not 0 < self.lam < 1e-3:
            return ""
        return (f"feedback is off: λ is {self.lam:.1g} on average. Train longer, or start with a "
                f"larger ω_s, such as --omega_s=0.5 --omega_a=1 --omega_b=-2.8")

    def cross_entropy(self, h, x):
        """−log p(x) in nats                                                              Alg. 1 l.8

        h: (N, D) hidden states.   x: (N,) tokens.   Returns (N,) fp32.
        """
        return in_chunks(self.score, h, x, V=len(self.net.table), keeps=1, compiled=self.compiled)

    def score(self, h, x):
        return F.cross_entropy(self.net.head(h), x, reduction="none")          # (n,)

    def token_nll(self, x0, xt, t, soft):
        """−log p(x0) of every masked token, in nats                                    Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) times.
        soft: True for two passes, False for one pass on plain masks.
        Returns nll (N,) fp32, and rows (N,), the positions of [MASK] in the flat batch.
        Checked against tests/oracles.py dense_nll.
        """
        net = self.net
        # Only this line waits for the device.
        rows = (xt == self.mask_id).flatten().nonzero().squeeze(1)             # (N,)
        emb = F.embedding(xt, net.table)                                       # (B, L, D)
        if soft:
            # Pass 1 keeps dropout on [code]. It has a graph only with two_updates.
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):         # l.5
                h = net.hidden(emb, rows, t)                                   # (N, D)          l.6
            mixed, lam, _ = self.feedback(h)                                   # (N, D), (N,) l.7 sm
            emb = emb.flatten(0, 1).index_copy(0, rows, mixed.to(emb.dtype)).view_as(emb)
            self.lam = lam.detach().sum() / max(1, len(lam))
        h = net.hidden(emb, rows, t)                                           # (N, D)        l.7 g
        nll = self.cross_entropy(h, x0.flatten()[rows])                        # (N,)            l.8
        if self.sm is not None:
            # This adds 0 to the gradient of ω, so it is in the graph of every step. Else DDP would
            # wait for the gradient of ω after a step without SM, and would then apply a wrong one.
            # 0 times each: the sums alone would give all of ω one gradient in one piece of memory.
            nll = nll + sum((0 * p).sum() for p in self.sm.parameters())
        return nll, rows


def compile_parts(model, mode=None):
    """Compile what takes the time of a TwoPass on CUDA: its trunk and its chunks of rows [ours]

    mode: of the trunk. "reduce-overhead" makes CUDA graphs, for sampling. Chunks have none, because
        their number of rows changes. So they are compiled for any number.
    Methods are compiled, not modules, so that the names in the state_dict stay.
    """
    def any_length(fn):
        fast = torch.compile(fn, dynamic=True)
        # torch would compile once more for 0 rows and for 1.
        return lambda h, *others: (fast if len(h) > 1 else fn)(h, *others)

    model.net.trunk = torch.compile(model.net.trunk, mode=mode)
    model.weigh, model.score = any_length(model.weigh), any_length(model.score)
    model.compiled = True


class MDLM(TwoPass):
    """The DiT, its soft mask, and Eq. 2.

    cfg: ModelConfig. Raises Refused for sizes that do not fit together.
    """

    def __init__(self, cfg):
        if cfg.n_embd % (2 * cfg.n_head):
            raise Refused(f"n_embd={cfg.n_embd} does not divide into n_head={cfg.n_head} heads of "
                          f"even width")
        if not 0 <= cfg.mask_id < cfg.vocab_size:
            raise Refused(f"mask_id={cfg.mask_id} is outside the vocabulary of {cfg.vocab_size}")
        net, sm = DiT(cfg), None
        if cfg.soft_mask:
            try:
                sm = ARMS[cfg.arm](cfg.mask_id, cfg.k, omega_s=cfg.omega_s,
                                   omega_a=cfg.omega_a, omega_b=cfg.omega_b)
            except KeyError:
                raise Refused(f"arm={cfg.arm!r} is none of {', '.join(filter(None, ARMS))}")
            except ValueError as e:
                raise Refused(str(e))
        super().__init__(net, sm, cfg.mask_id, cfg.two_updates)
        self.cfg = cfg

    def forward(self, x0, xt, t, soft):
        """Cross-entropy of the masked tokens, times 1/t                         Eq. 2, Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) in (0, 1].
        soft: True for two passes (§3.2), False for the plain MDLM loss.
        Returns nll: (B,) nats per sequence. nll · t is the plain cross-entropy of its masks.
        Checked against tests/oracles.py dense_nll.

        Its mean over t and x_t is an upper bound of −log p(x0) for a sampler that calls the network
        as this loss does, with T → ∞ and without a nucleus. With soft = True, such a sampler makes
        both passes in every step, the first on plain masks: its prediction is then a function of
        x_t alone. For the sampler of Alg. 2 it is no bound: that one makes a single pass, with the
        feedback of the step before, and pass 1 of the loss is only a proxy of it (§3.2).

        ALPHA_FLOOR makes the mean too small by 0.1 to 0.3 %: even at t = 1 some tokens are visible,
        and a token costs most where none is. The released code does the same, so numbers compare
        [code]. `eval.bound` can compute it without the floor.
        """
        B, L = xt.shape
        nll, rows = self.token_nll(x0, xt, t, soft)                            # (N,), (N,)
        return nll.new_zeros(B).index_add(0, rows // L, nll) / t               # (B,)        l.8 1/t

    @classmethod
    def load(cls, path, ema=True):
        """A model in eval mode, from any file that checkpoint.load reads.

        ema: take the averaged backbone if there is one, as every published number does. ω has no
            average [code].
        `.info` holds what else is in the checkpoint.
        Raises Refused when the file holds another kind of model, or weights that do not fit its
        configuration or are not finite.
        """
        ckpt = checkpoint.load(path)
        if ckpt["kind"] != "mdlm":
            raise Refused(f"{path} holds a {ckpt['kind']}, not an MDLM: sample_dream.py and "
                          f"eval_dream.py take adapters of Dream")
        average = ckpt.get("ema") or {}
        if not (ema or average):
            raise Refused(f"{path} holds one set of weights, which in step-N.pt and in published "
                          f"files is the average: --ema=False needs both, as in last.pt")
        known = {f.name for f in fields(ModelConfig)}
        try:
            model = cls(ModelConfig(**{k: v for k, v in ckpt["config"].items() if k in known}))
            model.load_state_dict(ckpt["model"] | (average if ema else {}))
        except Exception as e:  # somebody else's file can hold anything
            # torch writes a heading, then a line for each problem. One problem says enough.
            lines = str(e).splitlines() or [""]
            reason = f"{type(e).__name__}, {lines[:2][-1].strip()}"
            raise Refused(f"the weights in {path} do not fit its configuration: {reason}")
        if not all(t.isfinite().all() for t in model.state_dict().values()):
            raise Refused(f"the weights in {path} are not all numbers: its run diverged, take an "
                          f"earlier file")
        model.info = {k: v for k, v in ckpt.items() if k not in ("model", "ema", "optimizer")}
        return model.eval()
