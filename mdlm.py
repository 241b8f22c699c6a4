# SPDX-License-Identifier: MIT
"""Masked diffusion language model: the corruption, the network, and the two-pass soft-masked loss.

    §2.1 marginal           corrupt            Alg. 1 l.4       tokens turn into [MASK] with probability 1 − α_t
    Alg. 1 l.3, §3.2        sample_times                        t, stratified over the batch
    §2.1 g_θ, App. B.1      DiT                                 a bidirectional transformer, 169M at the paper's size
    Eq. 2, Alg. 1 l.5-8     MDLM.forward                        predict, feed back, predict again, pay for the masks

Submodules and parameters are called what they are called in the released MDLM checkpoints, in the same order. Not
pretty everywhere, and worth it: their weights load without a translation table that could be wrong.

The one convention of this file: tensors with a vocabulary axis are (N, V), one row per *masked* position, and exist
only inside `in_chunks`. Unmasked positions have no loss, no feedback, and so no logits. Half of the rows are never
computed (E[t] = ½), and (B, L, V), 6.6 GB in fp32 for one micro-batch of the paper, never is.

Not here: the reverse process (sample.py), optimizers, DDP, EMA, files. No draw from a global generator, but dropout's.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import checkpoint
import launch
from softmask import SoftMask

ALPHA_FLOOR = 1e-3  # α_t = 1 − (1 − floor) t never reaches 0, so that t = 1 still leaves a few tokens [code]


@dataclass
class ModelConfig:
    # the backbone, App. B.1
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_cond: int = 128                # width of the time embedding; adaLN reads it [code]
    vocab_size: int = 50258          # GPT-2's 50,257 and [MASK]
    mask_id: int = 50257
    length: int = 1024               # L, tokens per sequence
    dropout: float = 0.1
    time_conditioning: bool = False  # §4.1 says with; both released configurations say without [code]
    # soft-masking, §3.1
    soft_mask: bool = True           # False: a binary MDLM, without ω
    k: int | None = 3                # none: all of |V| through a trainable temperature, App. C.3
    omega_s: float = 1e-6            # initial ω, App. B.2: almost off
    omega_a: float = 10 / 1.5
    omega_b: float = -0.75
    two_updates: bool = False        # gradients through the first pass too, App. C.3


# ---------------------------------------------------------------------------------------------------------------------
# forward process


def sample_times(n, generator, low=ALPHA_FLOOR, high=1.0):
    """n times in [b_l, b_h], one from each of n equal slices                                          Alg. 1 l.3, §3.2

    Each is uniform by itself, together they cover the interval: the loss of a batch has far less variance than with n
    independent draws [code].   Returns t: (n,) fp32, ascending. b_l > 0, because Eq. 2 divides by t.
    """
    u = (torch.arange(n) + torch.rand(n, generator=generator)) / n  # (n,)
    return low + (high - low) * u                                   # (n,)


def corrupt(x0, t, mask_id, generator):
    """x_t ~ q(x_t | x_0): every token is [MASK] with probability 1 − α_t                       §2.1 marginal, Alg. 1 l.4

    x0: (B, L) ids.   t: (B,) in (0, 1].   Returns x_t: (B, L). Draws on the CPU, so that every device sees the same x_t.
    """
    u = torch.rand(x0.shape, generator=generator)                              # (B, L)
    return torch.where(u < (1 - ALPHA_FLOOR) * t[:, None], mask_id, x0)        # (B, L)


# ---------------------------------------------------------------------------------------------------------------------
# backbone


class LayerNorm(nn.Module):
    """fp32 whatever the autocast, a gain and no bias [code]."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.layer_norm(x.float(), x.shape[-1:], self.weight)


def modulate(x, shift, scale):
    return x * (1 + scale) + shift


def adaLN(n_cond, n_out):
    """A zero map from the time embedding to shifts, scales and gates: every block starts as the identity."""
    linear = nn.Linear(n_cond, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotate(x, cos, sin):
    """Rotary positions on pairs (i, i + d/2), not on neighbours [code]."""
    x1, x2 = x.chunk(2, dim=-1)                                                # (B, H, L, d/2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)       # (B, H, L, d)


class VocabEmbed(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, dim))  # (V, D), not tied to the head
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))


class SigmaMap(nn.Module):
    """Embeds the noise level: cosines and sines of 128 frequencies, then a small MLP."""

    def __init__(self, n_cond):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, n_cond), nn.SiLU(), nn.Linear(n_cond, n_cond))

    def forward(self, sigma):
        freqs = torch.exp(-math.log(10000) * torch.arange(128, device=sigma.device) / 128)  # (128,)
        angles = sigma[:, None] * freqs                                                     # (B, 128)
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))                    # (B, cond)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the time embedding (adaLN)."""

    def __init__(self, cfg):
        super().__init__()
        D = cfg.n_embd
        self.n_head, self.dropout = cfg.n_head, cfg.dropout
        self.norm1 = LayerNorm(D)
        self.attn_qkv = nn.Linear(D, 3 * D, bias=False)
        self.attn_out = nn.Linear(D, D, bias=False)
        self.norm2 = LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"), nn.Linear(4 * D, D))
        self.adaLN_modulation = adaLN(cfg.n_cond, 6 * D)

    def forward(self, x, c, cos, sin):
        B, L, D = x.shape
        drop = lambda y: F.dropout(y, self.dropout, self.training)                           # before the gate [code]
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)  # (B | 1, 1, D)
        qkv = self.attn_qkv(modulate(self.norm1(x), shift1, scale1))                         # (B, L, 3D)
        q, k, v = qkv.view(B, L, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)                  # (B, H, L, d) each
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)      # (B, H, L, d)  no mask
        x = x + gate1 * drop(self.attn_out(y.transpose(1, 2).reshape(B, L, D)))              # (B, L, D)
        return x + gate2 * drop(self.mlp(modulate(self.norm2(x), shift2, scale2)))           # (B, L, D)


class OutputLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm_final = LayerNorm(cfg.n_embd)
        self.linear = adaLN(cfg.n_embd, cfg.vocab_size)  # zero as well: the first prediction is uniform
        self.adaLN_modulation = adaLN(cfg.n_cond, 2 * cfg.n_embd)


class DiT(nn.Module):
    """g_θ as three calls, so that anything may happen to the embeddings in between: table, trunk, head.     §2.1, App. B.1"""

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
        return self.vocab_embed.embedding                                                    # (V, D)

    def trunk(self, emb, t):
        """Embeddings to the last hidden state, normed and modulated, ready for `head`.

        emb: (B, L, D) fp32.   t: (B,) times, unused without time conditioning.   Returns h: (B, L, D) fp32.
        The residual stream stays fp32 under bf16 autocast; the matrix products do not [code].
        """
        L, d = emb.shape[1], self.cfg.n_embd // self.cfg.n_head
        inv_freq = 10000 ** (-torch.arange(0, d, 2, device=emb.device).float() / d)          # (d/2,)
        angles = torch.arange(L, device=emb.device).float()[:, None] * inv_freq              # (L, d/2)  fp32: bf16 loses phase
        dtype = torch.get_autocast_dtype(emb.device.type) if torch.is_autocast_enabled(emb.device.type) else emb.dtype
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)                            # (L, d/2)
        with torch.autocast(emb.device.type, enabled=False):
            # Without time conditioning the released code still runs this, at σ = 0: a learned constant [code].
            sigma = -torch.log1p(-(1 - ALPHA_FLOOR) * t) if self.cfg.time_conditioning else emb.new_zeros(1)  # (B | 1,)
            c = F.silu(self.sigma_map(sigma))                                                # (B | 1, cond)
        x = emb                                                                              # (B, L, D)
        for block in self.blocks:
            x = block(x, c, cos, sin)                                                        # (B, L, D)
        shift, scale = self.output_layer.adaLN_modulation(c)[:, None].chunk(2, dim=-1)       # (B | 1, 1, D)
        return modulate(self.output_layer.norm_final(x), shift, scale)                       # (B, L, D)

    def head(self, h):
        """(N, D) → logits (N, V), fp32. [MASK] is never the answer (SUBS [code]): its bias is −1e6, so its p is 0 and its
        gradient too. Through the bias it costs nothing, and no (N, V) tensor is written twice."""
        linear = self.output_layer.linear
        return F.linear(h, linear.weight, linear.bias.index_fill(0, self.mask_row, -1e6)).float()  # (N, V)


# ---------------------------------------------------------------------------------------------------------------------
# the loss


def in_chunks(fn, *rows, size=4096, recompute=False):
    """fn(*rows), `size` rows at a time, outputs concatenated: the only place where an (n, V) tensor may exist.

    fn: row tensors (n, …) → a tensor (n, …) or a tuple of them, row by row.   rows: tensors of equal length N, 0 allowed.
    recompute: fn holds (n, V) tensors for its backward; with more than one chunk, drop them and compute them again then.
    Few large chunks: the matrix products stay long, and memory is bounded by one of them. CPUs differ, see `at_once`.
    """
    if len(rows[0]) <= size:
        return fn(*rows)
    if recompute and torch.is_grad_enabled():
        run = lambda *chunk: recomputed(fn, *chunk, use_reentrant=False, preserve_rng_state=False)
    else:
        run = fn
    parts = [run(*chunk) for chunk in zip(*(r.split(size) for r in rows))]
    return tuple(map(torch.cat, zip(*parts))) if isinstance(parts[0], tuple) else torch.cat(parts)


def at_once(h):
    """Rows of logits to make together: as many as memory bears, but on a CPU 256, whose memory is found again for the next."""
    return 256 if h.device.type == "cpu" else 4096


class MDLM(nn.Module):
    """The backbone, the soft mask, and Eq. 2. A DDP wrapper sees one forward per backward: both passes are inside.

    net: DiT.   sm: SoftMask, or None for a binary model.   lam: mean λ of the last soft forward, a 0-d tensor, for the log.
    """

    def __init__(self, cfg):
        super().__init__()
        if cfg.n_embd % (2 * cfg.n_head):
            raise launch.Refused(f"n_embd={cfg.n_embd} does not divide into n_head={cfg.n_head} heads of even width")
        if not 0 <= cfg.mask_id < cfg.vocab_size:
            raise launch.Refused(f"mask_id={cfg.mask_id} is outside the vocabulary of {cfg.vocab_size}")
        self.cfg = cfg
        self.net = DiT(cfg)
        try:
            self.sm = SoftMask(cfg.mask_id, cfg.k, cfg.omega_s, cfg.omega_a, cfg.omega_b) if cfg.soft_mask else None
        except ValueError as e:
            raise launch.Refused(str(e))
        self.lam = torch.zeros(())

    def gauge(self, h):
        """Hidden states of masked positions (n, D) → their logits' (λ, ids, π). On a CPU λ is taken of a few rows at a time:
        between its passes they stay in the caches.                                                          Alg. 1 l.6"""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.cfg.two_updates):
            logits = self.net.head(h)                                                        # (n, V)
        return in_chunks(self.sm, logits, size=16 if h.device.type == "cpu" and self.sm.k else 4096)  # gradient for ω starts here

    def feedback(self, h):
        """Hidden states of masked positions → their soft masks, embedded, and λ                             Alg. 1 l.6-7

        h: (N, D).   Returns (N, D), (N,).
        """
        def soften(h):
            lam, ids, pi = self.gauge(h)
            return self.sm.mix(self.net.table, lam, ids, pi), lam                            # (n, D), (n,)
        if self.sm.k is None or self.cfg.two_updates:  # (n, V) tensors have a backward, and π may be one
            return in_chunks(soften, h, recompute=True)
        lam, ids, pi = in_chunks(self.gauge, h, size=at_once(h))                             # (N,), (N, k), (N, k)
        # One mix for all chunks: each has a dense (V, D) gradient.
        return self.sm.mix(self.net.table, lam, ids, pi), lam

    def cross_entropy(self, h, x):
        """−log p(x) in nats: hidden states (N, D), tokens (N,) → (N,)                                           Alg. 1 l.8"""
        score = lambda h, x: F.cross_entropy(self.net.head(h), x, reduction="none")          # (n,)
        several = lambda h, x: in_chunks(score, h, x, size=at_once(h))                       # (n,)
        return in_chunks(several, h, x, recompute=True)                                      # (N,)

    def forward(self, x0, xt, t, soft):
        """Cross-entropy of the masked tokens over t: a bound on −log p(x0), exact in expectation over t        Eq. 2, Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) in (0, 1].   soft: two passes (§3.2); False is the plain MDLM loss.
        Returns nll: (B,) nats per sequence, a sum over its masks divided by t. Times t, it is their plain cross-entropy.

        With soft = True it bounds nothing exactly: the state fed to pass 2 is a proxy of the one met in decoding (§3.2).
        """
        (B, L), net = xt.shape, self.net
        rows = (xt == self.cfg.mask_id).flatten().nonzero().squeeze(1)                       # (N,)  the one device sync
        emb = F.embedding(xt, net.table)                                                     # (B, L, D)
        if soft:
            # Pass 1 keeps dropout on [code], and no graph (l.5) unless the paper's two updates are asked for.
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.cfg.two_updates):
                h = net.trunk(emb, t).flatten(0, 1)[rows]                                    # (N, D)              l.6
            mixed, lam = self.feedback(h)                                                    # (N, D), (N,)        l.7
            emb = emb.flatten(0, 1).index_copy(0, rows, mixed.to(emb.dtype)).view_as(emb)    # (B, L, D)
            self.lam = lam.detach().sum() / max(1, len(rows))
        h = net.trunk(emb, t).flatten(0, 1)[rows]                                            # (N, D)              l.7
        nll = self.cross_entropy(h, x0.flatten()[rows])                                      # (N,)                l.8
        nll = nll.new_zeros(B).index_add(0, rows // L, nll) / t                              # (B,)
        # ω is in the graph of every step, or DDP would wait for its gradient, and apply a wrong one, when SM is off.
        return nll if self.sm is None else nll + 0 * sum(p for p in self.sm.parameters())

    @classmethod
    def load(cls, path, ema=True):
        """A model from any checkpoint that checkpoint.load reads, in eval mode; the rest of the file is in `.info`.

        ema: use the averaged backbone if there is one, as every published number does; ω has no average [code].
        Raises Refused when the file is another kind of model, or its weights do not fit its own configuration.
        """
        ckpt = checkpoint.load(path)
        if ckpt["kind"] != "mdlm":
            raise launch.Refused(f"{path} holds a {ckpt['kind']}, not an MDLM")
        names = {f.name for f in dataclasses.fields(ModelConfig)}
        try:
            model = cls(ModelConfig(**{name: v for name, v in ckpt["config"].items() if name in names}))
            model.load_state_dict(ckpt["model"] | ((ckpt.get("ema") if ema else None) or {}))
        except Exception as e:  # a configuration may be anything in a file of somebody else
            reason = (str(e).splitlines() or [""])[-1 if len(str(e).splitlines()) < 2 else 1].strip()
            raise launch.Refused(f"the weights in {path} do not fit its configuration: {type(e).__name__}, {reason}")
        if not all(t.isfinite().all() for t in model.state_dict().values()):
            raise launch.Refused(f"the weights in {path} are not all numbers: its run diverged, take an earlier file")
        model.info = {key: v for key, v in ckpt.items() if key not in ("model", "ema", "optimizer")}
        return model.eval()
