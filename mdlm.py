# SPDX-License-Identifier: MIT
"""Masked diffusion language model: the corruption, the network, and the two-pass soft-masked loss.

    §2.1 marginal           corrupt            Alg. 1 l.4       tokens turn into [MASK] with probability 1 − α_t
    Alg. 1 l.3, §3.2        sample_times                        t, stratified over the batch
    §2.1 g_θ, App. B.1      DiT                      a bidirectional transformer, 169M in the paper
    Alg. 1 l.5-8            TwoPass             predict, feed back, predict again; for any backbone
    Eq. 2                   MDLM.forward                        pay for the masks, over t

A backbone is three things, and soft-masking lives between the first and the second:

    table                     (V, D)                            the embeddings
    hidden(emb, rows, t)      (B, L, D), (N,), (B,) → (N, D)    last hidden states that predict the flat positions `rows`
    head(h)                   (n, D) → (n, V)                   logits, fp32 always

The one convention of this file: tensors with a vocabulary axis are (n, V), one row per *masked* position, and exist
only inside `in_chunks`. Unmasked positions have no loss, no feedback, and so no logits. Half of the rows are never
computed (E[t] = ½), and (B, L, V), 6.6 GB in fp32 for one micro-batch of the paper, never is.

Submodules and parameters have the names of the released MDLM checkpoints, in the same order. Some are not pretty, but
their weights load without a translation table that could be wrong.

Not here: the reverse process (sample.py), optimizers, DDP, EMA, files. No draw from a global generator except dropout's.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

import checkpoint
from launch import Refused
from softmask import SoftMask

ALPHA_FLOOR = 1e-3  # α_t = 1 − (1 − floor) t never reaches 0: at t = 1 a few tokens are left [code]
BUDGET = 1e9        # bytes that (n, V) tensors may take together
CPU_LOGITS = 50e6   # bytes of logits made at once on a CPU: its allocator then reuses one buffer


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


# -------------------------------------------------------------------------------------------------
# forward process


def sample_times(n, generator, low=ALPHA_FLOOR, high=1.0):
    """n times in [b_l, b_h], one from each of n equal slices                      Alg. 1 l.3, §3.2

    Each is uniform in its slice, together they cover the interval: the loss of a batch has far less
    variance than with n independent draws [code].
    Returns t: (n,) fp32, ascending. b_l > 0, because Eq. 2 divides by t.
    """
    u = (torch.arange(n) + torch.rand(n, generator=generator)) / n             # (n,)
    return low + (high - low) * u                                              # (n,)


def corrupt(x0, t, mask_id, generator):
    """x_t ~ q(x_t | x_0): every token is [MASK] with probability 1 − α_t              §2.1 marginal, Alg. 1 l.4

    x0: (B, L) ids.   t: (B,) in (0, 1].   Returns x_t: (B, L).
    Draws on the CPU, so that every device sees the same x_t.
    """
    u = torch.rand(x0.shape, generator=generator)                              # (B, L)
    return torch.where(u < (1 - ALPHA_FLOOR) * t[:, None], mask_id, x0)        # (B, L)


# -------------------------------------------------------------------------------------------------
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
        i = torch.arange(128, device=sigma.device)
        angles = sigma[:, None] * torch.exp(-math.log(10000) * i / 128)        # (B, 128)
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))       # (B, cond)


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
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * D, D))
        self.adaLN_modulation = adaLN(cfg.n_cond, 6 * D)

    def forward(self, x, c, cos, sin):
        B, L, D = x.shape
        modulation = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)        # 6 × (B | 1, 1, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        qkv = self.attn_qkv(modulate(self.norm1(x), shift1, scale1))           # (B, L, 3D)
        q, k, v = qkv.view(B, L, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)    # 3 × (B, H, L, d)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)                        # (B, H, L, d)
        y = F.scaled_dot_product_attention(q, k, v)                         # (B, H, L, d)  no mask
        y = self.attn_out(y.transpose(1, 2).reshape(B, L, D))                  # (B, L, D)
        x = x + gate1 * F.dropout(y, self.dropout, self.training)  # dropout before the gate [code]
        y = self.mlp(modulate(self.norm2(x), shift2, scale2))                  # (B, L, D)
        return x + gate2 * F.dropout(y, self.dropout, self.training)           # (B, L, D)


class OutputLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm_final = LayerNorm(cfg.n_embd)
        self.linear = adaLN(cfg.n_embd, cfg.vocab_size)  # zero as well: the first prediction is uniform
        self.adaLN_modulation = adaLN(cfg.n_cond, 2 * cfg.n_embd)


class DiT(nn.Module):
    """g_θ as a backbone: table, hidden (the trunk, and the rows that are wanted), head.          §2.1, App. B.1"""

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
        """(B,) → (B, cond), or (1, cond) without time conditioning. In fp32, whatever the autocast.

        Without it the released code still runs the map, at σ = 0: a learned constant [code].
        """
        with torch.autocast(t.device.type, enabled=False):
            sigma = -torch.log1p(-(1 - ALPHA_FLOOR) * t) if self.cfg.time_conditioning else t.new_zeros(1)
            return F.silu(self.sigma_map(sigma.float()))

    def trunk(self, emb, t):
        """Embeddings to the last hidden states, normed and modulated, ready for `head`.

        emb: (B, L, D) fp32.   t: (B,) times, unused without time conditioning.   Returns h: (B, L, D) fp32.
        The residual stream stays fp32 under bf16 autocast; the matrix products do not [code].
        """
        kind, d = emb.device.type, self.cfg.n_embd // self.cfg.n_head
        inv_freq = 10000 ** (-torch.arange(0, d, 2, device=emb.device).float() / d)        # (d/2,)
        # Angles in fp32: bf16 would lose the phase of far positions.
        angles = torch.arange(emb.shape[1], device=emb.device).float()[:, None] * inv_freq   # (L, d/2)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else emb.dtype
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)              # (L, d/2)
        c, x = self.time_embedding(t), emb                               # (B | 1, cond), (B, L, D)
        for block in self.blocks:
            x = block(x, c, cos, sin)                                          # (B, L, D)
        shift, scale = self.output_layer.adaLN_modulation(c)[:, None].chunk(2, dim=-1)       # (B | 1, 1, D)
        return modulate(self.output_layer.norm_final(x), shift, scale)         # (B, L, D)

    def hidden(self, emb, rows, t):
        return self.trunk(emb, t).flatten(0, 1)[rows]                          # (N, D)

    def head(self, h):
        """(n, D) → logits (n, V), fp32. [MASK] is never the answer (SUBS [code]).

        Its bias is −1e6: its p is 0, its gradient is 0, and no (n, V) tensor is written twice.
        """
        linear = self.output_layer.linear
        bias = linear.bias.index_fill(0, self.mask_row, -1e6)                  # (V,)
        return F.linear(h, linear.weight, bias).float()                        # (n, V)


# -------------------------------------------------------------------------------------------------
# two passes


def in_chunks(fn, *rows, V, keeps=0):
    """fn(*rows), some rows at a time, outputs concatenated: the only place where an (n, V) tensor may exist.

    fn: row tensors (n, …) → a tensor (n, …) or a tuple of them; each row by itself.
    rows: tensors of one length N, which may be 0.   V: size of the vocabulary.
    keeps: fp32 (n, V) tensors that fn leaves behind for its backward. If all chunks together would leave
        more than BUDGET, they are dropped, and computed again in the backward.
    """
    N, one_row, on_cpu = len(rows[0]), 4 * V, rows[0].device.type == "cpu"
    # While fn works, up to 6.7 tensors as large as the fp32 logits are alive (SM over all of |V|; 5.6 for
    # top-k, 3.5 for the loss).
    size = max(1, int((CPU_LOGITS if on_cpu else BUDGET / 6.7) / one_row))
    if N <= size:
        return fn(*rows)
    run = fn
    if torch.is_grad_enabled() and keeps * N * one_row > BUDGET:
        def run(*chunk):
            return recomputed(fn, *chunk, use_reentrant=False, preserve_rng_state=False)
    parts = [run(*chunk) for chunk in zip(*(r.split(size) for r in rows))]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part) for part in zip(*parts))
    return torch.cat(parts)


class TwoPass(nn.Module):
    """Predict, feed back, predict again: Alg. 1 l.5-8 for any backbone                        §3.2

    net: a backbone (see the top of this file).   sm: SoftMask, or None for a binary model.
    mask_id: id of [MASK].   two_updates: gradients through the first pass too, App. C.3.
    lam: mean λ of the last forward with feedback, a 0-d tensor, for the log.

    A subclass adds its loss as `forward`, so that a DDP wrapper sees one forward per backward.
    """

    def __init__(self, net, sm, mask_id, two_updates=False):
        super().__init__()
        self.net, self.sm, self.mask_id, self.two_updates = net, sm, mask_id, two_updates
        self.lam = torch.zeros(())

    def feedback(self, h):
        """Hidden states of masked positions (n, D) → what they look like in the next pass       Alg. 1 l.6-7, Alg. 2 l.6

        Returns mixed (n, D), λ (n,), and the most likely token (n,).
        """
        table, sm = self.net.table, self.sm

        def lambda_and_topk(h):
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):
                logits = self.net.head(h)                                      # (n, V)
            return sm(logits)                                      # the gradient for ω starts here

        def dense_mix(h):
            lam, _, pi = lambda_and_topk(h)                                    # (n,), (n, V)
            return sm.mix(table, lam, None, pi), lam, pi.argmax(-1)            # (n, D), (n,), (n,)

        if sm.k is None:
            return in_chunks(dense_mix, h, V=len(table), keeps=5)
        lam, ids, pi = in_chunks(lambda_and_topk, h, V=len(table), keeps=5 * self.two_updates)
        # One mix for all chunks: every look into the table has a dense (V, D) gradient.
        return sm.mix(table, lam, ids, pi), lam, ids[:, 0]                     # (n, D), (n,), (n,)

    def cross_entropy(self, h, x):
        """−log p(x) in nats: hidden states (N, D), tokens (N,) → (N,)                Alg. 1 l.8"""
        def score(h, x):
            return F.cross_entropy(self.net.head(h), x, reduction="none")      # (n,)
        return in_chunks(score, h, x, V=len(self.net.table), keeps=1)

    def token_nll(self, x0, xt, t, soft, **context):
        """−log p(x0) of every masked token, in nats                                   Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) times.   soft: two passes; False is one pass on plain masks.
        context: what only this backbone needs, for `hidden`.
        Returns nll (N,) fp32, and rows (N,), the flat positions of [MASK] in x_t.
        """
        net = self.net
        rows = (xt == self.mask_id).flatten().nonzero().squeeze(1)      # (N,)  the one device sync
        emb = F.embedding(xt, net.table)                                       # (B, L, D)
        if soft:
            # Pass 1 keeps dropout on [code]. It has no graph unless two updates are asked for.
            with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):        # l.5
                h = net.hidden(emb, rows, t, **context)                       # (N, D)          l.6
            mixed, lam, _ = self.feedback(h)                                  # (N, D), (N,)    l.7
            emb = emb.flatten(0, 1).index_copy(0, rows, mixed.to(emb.dtype)).view_as(emb)
            self.lam = lam.detach().sum() / max(1, len(rows))
        h = net.hidden(emb, rows, t, **context)                               # (N, D)          l.7
        nll = self.cross_entropy(h, x0.flatten()[rows])                       # (N,)            l.8
        if self.sm is not None:
            # ω is in the graph of every step. Without this, DDP would wait for its gradient when SM is
            # off, and apply a wrong one.
            nll = nll + 0 * sum(p for p in self.sm.parameters())
        return nll, rows


class MDLM(TwoPass):
    """The DiT, its soft mask, and Eq. 2.   cfg: ModelConfig. Raises Refused for sizes that do not fit."""

    def __init__(self, cfg):
        if cfg.n_embd % (2 * cfg.n_head):
            raise Refused(f"n_embd={cfg.n_embd} does not divide into n_head={cfg.n_head} heads of even width")
        if not 0 <= cfg.mask_id < cfg.vocab_size:
            raise Refused(f"mask_id={cfg.mask_id} is outside the vocabulary of {cfg.vocab_size}")
        net, sm = DiT(cfg), None
        if cfg.soft_mask:
            try:
                sm = SoftMask(cfg.mask_id, cfg.k, cfg.omega_s, cfg.omega_a, cfg.omega_b)
            except ValueError as e:
                raise Refused(str(e))
        super().__init__(net, sm, cfg.mask_id, cfg.two_updates)
        self.cfg = cfg

    def forward(self, x0, xt, t, soft):
        """Cross-entropy of the masked tokens, over t                           Eq. 2, Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) in (0, 1].   soft: two passes (§3.2); False is the plain MDLM loss.
        Returns nll: (B,) nats per sequence. Times t, it is the plain cross-entropy of its masks.

        Its expectation over t and x_t is a bound on −log p(x0). With soft = True it bounds nothing exactly:
        the state fed to pass 2 is a proxy of the one met in decoding (§3.2).
        """
        B, L = xt.shape
        nll, rows = self.token_nll(x0, xt, t, soft)                            # (N,), (N,)
        return nll.new_zeros(B).index_add(0, rows // L, nll) / t               # (B,)

    @classmethod
    def load(cls, path, ema=True):
        """A model from any checkpoint that checkpoint.load reads, in eval mode; the rest of it is in `.info`.

        ema: use the averaged backbone if there is one, as every published number does; ω has no average [code].
        Raises Refused when the file is another kind of model, or its weights do not fit its configuration.
        """
        ckpt = checkpoint.load(path)
        if ckpt["kind"] != "mdlm":
            raise Refused(f"{path} holds a {ckpt['kind']}, not an MDLM")
        known = {f.name for f in dataclasses.fields(ModelConfig)}
        try:
            model = cls(ModelConfig(**{k: v for k, v in ckpt["config"].items() if k in known}))
            model.load_state_dict(ckpt["model"] | ((ckpt.get("ema") if ema else None) or {}))
        except Exception as e:  # somebody else's file can hold anything
            # torch's message has a heading, then one line for each problem: the first problem says enough.
            lines = str(e).splitlines() or [""]
            reason = f"{type(e).__name__}, {lines[min(1, len(lines) - 1)].strip()}"
            raise Refused(f"the weights in {path} do not fit its configuration: {reason}")
        if not all(t.isfinite().all() for t in model.state_dict().values()):
            raise Refused(f"the weights in {path} are not all numbers: its run diverged, take an earlier file")
        model.info = {k: v for k, v in ckpt.items() if k not in ("model", "ema", "optimizer")}
        return model.eval()
