# SPDX-License-Identifier: MIT
"""Masked diffusion LM: times, corruption (Alg. 1 l.3-4), two-pass loss (l.5-8), network.

    Alg. 1 l.3, §3.2      sample_times         times t, stratified over the batch
    Alg. 1 l.4, §2.1      corrupt              each token becomes [MASK] with probability 1 − α_t
    Alg. 1 l.5-8          TwoPass.token_nll    predict, feed back, predict again
    Eq. 2                 MDLM.forward         the loss: −log p of the masked tokens, times 1/t
    §2.1 g_θ, §4.1        DiT                  a bidirectional transformer, 169M in the paper

This file needs only torch and softmask.py: copy both. TwoPass uses three members of a backbone. SM
sits between the first two: at the masks, it mixes what `head` predicted into the embeddings.
(`compile_parts` also needs `trunk`: all layers between the embeddings and `head`.)

    table                     (V, D)                              the embeddings
    hidden(emb, masks, t)     (B, L, D), 2 × (N,), (B,) → (N, D)  hidden states that predict the
                                                                  masks (DiT: those of `trunk`)
    head(h)                   (n, D) → (n, V)                     logits, always fp32

N is the number of masked positions in the batch. `masks` is their index pair (b, l), each (N,), so
x0[masks] are their true tokens. Only these positions get logits: (N, V), never (B, L, V).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from softmask import SoftMask

ALPHA_FLOOR = 1e-3  # α_t = 1 − (1 − floor) t: at t = 1, a token is visible with p = floor [code]
T_MIN = 1e-3        # the smallest time, because the loss divides by t [code]


@dataclass
class ModelConfig:
    # The backbone, App. B.1
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_cond: int = 128                # width of the time embedding, for adaLN [code]
    vocab_size: int = 50258          # GPT-2's 50,257 and [MASK]; train.py takes it from the data
    mask_id: int = 50257             # also from the data
    length: int = 1024               # L, tokens per sequence
    dropout: float = 0.1
    time_conditioning: bool = False  # on in §4.1, off in the authors' configurations [code]
    # Soft-masking, §3.1
    soft_mask: bool = True           # False: a binary MDLM, without ω. In train.py: p_sm > 0
    k: int | None = 3                # None: all of V, with a trainable temperature, App. C.3
    omega_s: float = 1e-6            # initial ω, App. B.2; this value of ω_s: [code]
    omega_a: float = 10 / 1.5
    omega_b: float = -0.75
    two_updates: bool = False        # the first pass gets gradients too, App. C.3


# ---- Alg. 1 --------------------------------------------------------------------------------------
def sample_times(n, generator, b_l=T_MIN, b_h=1.0):
    """n times (n,) in [b_l, b_h], ascending, one from each of n equal slices       Alg. 1 l.3, §3.2

    Alg. 1 draws them independently. Stratified times [code] make the loss vary far less.
    """
    u = (torch.arange(n) + torch.rand(n, generator=generator)) / n             # (n,)
    return b_l + (b_h - b_l) * u                                               # (n,)


def corrupt(x0, t, mask_id, generator, floor=ALPHA_FLOOR):
    """x_t ~ q(x_t | x_0): a token is [MASK] with probability 1 − α_t      §2.1 marginal, Alg. 1 l.4

    x0: (B, L) ids.   t: (B,) in (0, 1].   floor: α_1.   Returns x_t: (B, L).
    """
    # Drawn on the CPU, so that a seed gives the same masks with or without a GPU.
    u = torch.rand(x0.shape, generator=generator)                              # (B, L)
    return torch.where(u < (1 - floor) * t[:, None], mask_id, x0)              # (B, L)


class TwoPass(nn.Module):
    """Predict, feed back, predict again, for any backbone                        §3.2, Alg. 1 l.5-8

        θ~ = detach(θ)                                                               l.5
        p~ = g_θ~(x_t)         a forward pass over plain [MASK]s, without gradients  l.6
        x' = sm_ω(x_t, p~)     each [MASK] becomes (1 − λ) m + λ Σ_i π_i v_i: `emb`  l.7
        p  = g_θ(x')           a forward pass with gradients for θ, and for ω via x' l.7
        L  = 1/t Σ_l 1[x_t^l = m] (−log p(x_0^l))        1/t is in MDLM.forward      l.8

    The paper's l.8 lacks the minus sign of Eq. 2, and has indices i in a sum over l.

    net: a backbone (see the top of this file).   sm: SoftMask, or None for a binary model.
    A subclass calls token_nll in `forward`, so that DDP sees one forward call per backward pass.
    """

    def __init__(self, net, sm, mask_id, two_updates=False):
        super().__init__()
        self.net = net
        self.sm = sm
        self.mask_id = mask_id
        self.two_updates = two_updates      # the first pass gets gradients too, App. C.3
        self.lam = torch.tensor(torch.nan)  # 0-d: mean λ of the last batch with feedback

    def token_nll(self, x0, xt, t, soft, masks=None):
        """−log p(x0) of every masked token, in nats                                    Alg. 1 l.5-8

        x0, xt: (B, L) ids.   t: (B,) times.   soft: True for two passes with feedback, else one.
        masks: where xt is [MASK], as an index pair (b, l) (default: found here, with a host sync).
        Returns nll (N,) fp32, and masks.
        """
        net = self.net
        sm = self.sm
        if masks is None:
            masks = (xt == self.mask_id).nonzero(as_tuple=True)                # 2 × (N,)
        emb = F.embedding(xt, net.table)                                       # (B, L, D)
        if soft:
            with self.first_pass():                                            # θ~              l.5
                h = net.hidden(emb, masks, t)  # dropout is on here, too [code]  (N, D)          l.6
            lam, ids, pi = self.predict_sm(h)                              # (N,), 2 × (N, k)  l.6-7
            emb = emb.index_put(masks, sm.mix(net.table, lam, ids, pi))        # (B, L, D)       l.7
            # For the log. Not mean(), which would be NaN if nothing is masked.
            self.lam = lam.detach().sum() / max(1, len(lam))
        h = net.hidden(emb, masks, t)                                          # (N, D)          l.7
        nll = self.score(h, x0[masks])                                         # (N,)            l.8
        if sm:  # DDP wants a gradient for every parameter, ω too, in every backward pass
            nll = nll + sum((0 * p).sum() for p in sm.parameters())
        return nll, masks

    def first_pass(self):
        """Context manager: no gradients, unless two_updates (App. C.3)                Alg. 1 l.5"""
        return torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled())

    def predict_sm(self, h):
        """λ (N,), ids and π (N, k), from hidden states h (N, D)    Alg. 1 l.6-7, Alg. 2 l.3, l.6"""
        with self.first_pass():
            logits = self.net.head(h)                                          # (N, V)          l.6
        return self.sm(logits)

    def score(self, h, x0):
        """−log p(x0) in nats, (N,) fp32, for tokens x0 (N,) and h (N, D)              Alg. 1 l.8"""
        return F.cross_entropy(self.net.head(h), x0, reduction="none")


class MDLM(TwoPass):
    """A network, its SoftMask, and Eq. 2. Raises ValueError if no network can be built from cfg.

    cfg: ModelConfig.   net: a backbone (default: a new DiT).
    sm_class: called as SoftMask(mask_id, k, omega_s, omega_a, omega_b) (default: SoftMask).
    """

    def __init__(self, cfg, net=None, sm_class=None):
        if (min(cfg.n_layer, cfg.n_head, cfg.n_cond) < 1 or cfg.length < 3
                or not 0 <= cfg.dropout < 1):
            raise ValueError("an MDLM needs n_layer, n_head and n_cond >= 1, length >= 3, and a "
                             "dropout from 0 to below 1")
        if cfg.n_embd < 1 or cfg.n_embd % (2 * cfg.n_head):  # the rotation pairs entries of a head
            raise ValueError(f"n_embd={cfg.n_embd} is no multiple of 2 n_head = {2 * cfg.n_head}")
        if cfg.k and cfg.k > cfg.vocab_size:
            raise ValueError(f"k={cfg.k} is more than all {cfg.vocab_size} tokens")
        soft_mask = None
        if cfg.soft_mask:
            soft_mask = (sm_class or SoftMask)(cfg.mask_id, cfg.k, cfg.omega_s, cfg.omega_a,
                                               cfg.omega_b)
        super().__init__(net or DiT(cfg), soft_mask, cfg.mask_id, cfg.two_updates)
        self.cfg = cfg

    def forward(self, x0, xt, t, soft, masks=None):
        """One draw of Eq. 2 for each sequence, (B,) in nats                     Eq. 2, Alg. 1 l.5-8

        L = E_{t, x_t}[ 1/t Σ_l 1[x_t^l = m] (−log p_θ(x_0^l | x_t)) ] ≥ −log p_θ(x_0)

        Returns the bracket at the given t and x_t. Its weight −α′_t / (1 − α_t) is 1/t. ALPHA_FLOOR
        and T_MIN make L slightly too small (REPRODUCE.md, 2). With feedback, p_θ(x_0 | x_t) is both
        passes together. Alg. 2 does not sample from this p_θ: it replaces pass 1 with the previous
        step's prediction.
        """
        nll, masks = self.token_nll(x0, xt, t, soft, masks)                    # (N,), 2 × (N,)
        return nll.new_zeros(len(xt)).index_add(0, masks[0], nll) / t          # (B,)            l.8

    @classmethod
    def load(cls, path, ema=True, sm_class=None):
        """An MDLM in eval mode, from a checkpoint of train.py. Its `info` is the rest of the file.

        ema: take the averaged θ, or the only θ in the file (in a step-N.pt, the average). False: θ
        as trained. ω is never averaged [code].   sm_class: see MDLM.
        Raises ValueError if the file is not such a checkpoint, or its classes are different.
        """
        info = read_checkpoint(path, "mdlm")
        names = info["config"].keys() & ModelConfig.__dataclass_fields__  # train.Config has more
        cfg = ModelConfig(**{name: info["config"][name] for name in names})
        model = cls(cfg, sm_class=sm_class)
        check_class(path, info.get("net"), model.net)
        check_class(path, info.get("SoftMask"), model.sm)
        state = info.pop("model")
        average = info.pop("ema", None)
        if not (ema or average):
            raise ValueError(f"{path} has one set of weights: leave out --ema=False")
        check_finite(state | (average or {}), path)
        try:
            model.load_state_dict(state)
            if ema and average:
                model.net.load_state_dict(average)
        except RuntimeError as e:  # the user's own class has changed since
            raise ValueError(f"{path}: {' '.join(str(e).split())}")
        info.pop("optimizer", None)
        model.info = info
        return model.eval()


# ---- the network ---------------------------------------------------------------------------------
class LayerNorm(nn.Module):
    """LayerNorm without a bias, then adaLN's shift and scale, in fp32 except 1 + scale [code]"""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, shift, scale):
        x = x.float()                                                          # (B, L, D)
        shift = shift.float()                                                  # (B or 1, 1, D)
        gain = self.weight * (1 + scale)                                       # (B or 1, 1, D)
        if len(gain) == 1:  # B = 1, or no time conditioning: layer_norm applies it, a kernel fewer
            return F.layer_norm(x, x.shape[-1:], gain[0, 0], shift[0, 0])
        return F.layer_norm(x, x.shape[-1:]) * gain + shift                    # (B, L, D)


def zero_linear(n_in, n_out):
    """A linear layer that starts at 0 [code]: blocks start as the identity, and p as uniform."""
    linear = nn.Linear(n_in, n_out)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotation(l, d, base=10000):
    """cos and sin of l · base^(−i/d), i = 0, 2, …, of positions l (L,): 2 × (L, 1, d), fp32"""
    i = torch.arange(0, d, 2, device=l.device).float()                         # (d/2,)
    # In fp32, because bf16 would lose the phase of distant positions.
    angles = l[:, None] * base ** (-i / d)                                     # (L, d/2)
    angles = angles.repeat(1, 2)[:, None]                                      # (L, 1, d)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotary embedding of queries or keys. It pairs i and i + d/2, not neighbours [code]."""
    x1, x2 = x.chunk(2, dim=-1)                                                # 2 × (B, L, H, d/2)
    turned = torch.cat((-x2, x1), dim=-1)                                      # (B, L, H, d)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)  # cos, sin: fp32     (B, L, H, d)


class Block(nn.Module):
    """Bidirectional attention, then an MLP. The time embedding shifts, scales and gates both."""

    def __init__(self, cfg):
        super().__init__()
        D = cfg.n_embd
        self.n_head = cfg.n_head
        self.dropout = nn.Dropout(cfg.dropout)
        self.norm1 = LayerNorm(D)
        self.attn_qkv = nn.Linear(D, 3 * D, bias=False)
        self.attn_out = nn.Linear(D, D, bias=False)
        self.norm2 = LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * D, D))
        self.adaLN_modulation = zero_linear(cfg.n_cond, 6 * D)

    def forward(self, x, c, cos, sin):
        # x: (B, L, D).   c: (B or 1, cond), the time embedding.   cos, sin: (L, 1, d)
        modulation = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)        # 6 × (B or 1, 1, D)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        qkv = self.attn_qkv(self.norm1(x, shift1, scale1))                     # (B, L, 3D)
        q, k, v = qkv.unflatten(-1, (3, self.n_head, -1)).unbind(2)            # 3 × (B, L, H, d)
        q = rotate(q, cos, sin)                                                # (B, L, H, d)
        k = rotate(k, cos, sin)                                                # (B, L, H, d)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))                 # 3 × (B, H, L, d)
        y = F.scaled_dot_product_attention(q, k, v)                            # (B, H, L, d)
        y = self.attn_out(y.transpose(1, 2).flatten(2))                        # (B, L, D)
        # Dropout before the gate [code]
        x = x + gate1 * self.dropout(y)                                        # (B, L, D)
        y = self.mlp(self.norm2(x, shift2, scale2))                            # (B, L, D)
        return x + gate2 * self.dropout(y)                                     # (B, L, D)


class DiT(nn.Module):
    """g_θ as a backbone: table, hidden, head                                §2.1, §4.1, App. B.1

    Submodules have the names and the order of the released checkpoints. Hence the dicts.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        V = cfg.vocab_size
        D = cfg.n_embd
        cond = cfg.n_cond
        self.vocab_embed = nn.ParameterDict({"embedding": torch.empty(V, D)})  # not tied [code]
        nn.init.kaiming_uniform_(self.table, a=math.sqrt(5))  # uniform in ±1/√D [code]
        # 256: cos and sin at 128 frequencies, see time_embedding
        mlp = nn.Sequential(nn.Linear(256, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.sigma_map = nn.ModuleDict({"mlp": mlp})
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.output_layer = nn.ModuleDict({
            "norm_final": LayerNorm(D), "linear": zero_linear(D, V),
            "adaLN_modulation": zero_linear(cond, 2 * D)})
        cos, sin = rotation(torch.arange(cfg.length), D // cfg.n_head)         # 2 × (L, 1, d)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def table(self):
        return self.vocab_embed.embedding                                      # (V, D)

    def hidden(self, emb, masks, t):
        return self.trunk(emb, t)[masks]                                       # (N, D)

    def trunk(self, emb, t):
        """emb (B, L, D) → last hidden states (B, L, D), both fp32 even under autocast [code]"""
        L = emb.shape[1]
        c = self.time_embedding(t)                                             # (B or 1, cond)
        for block in self.blocks:
            emb = block(emb, c, self.cos[:L], self.sin[:L])                    # (B, L, D)
        modulation = self.output_layer.adaLN_modulation(c)[:, None]            # (B or 1, 1, 2D)
        shift, scale = modulation.chunk(2, dim=-1)                             # 2 × (B or 1, 1, D)
        return self.output_layer.norm_final(emb, shift, scale)                 # (B, L, D)

    def head(self, h):
        """h (n, D) → logits (n, V), fp32. [MASK] is never predicted [code]."""
        V = self.cfg.vocab_size
        weight = self.output_layer.linear.weight                               # (V, D)
        bias = self.output_layer.linear.bias.clone()                           # (V,)
        # This makes p([MASK]) 0 with no extra kernel on an (n, V) tensor. `bias[i] = …` would sync.
        bias[self.cfg.mask_id].fill_(-1e6)
        if torch.compiler.is_compiling():
            # Unless 64 divides V, CUDA uses an old, slow kernel for the weight's gradient. So V is
            # padded [ours], but not in eager mode: each pass would copy the weight once more.
            weight = F.pad(weight, (0, 0, 0, -V % 64))
            bias = F.pad(bias, (0, -V % 64))
        return F.linear(h, weight, bias)[:, :V].float()                        # (n, V)

    def time_embedding(self, t):
        """Embedding of σ = −log α_t in fp32: (B, cond), or (1, cond) without time conditioning"""
        with torch.autocast(t.device.type, enabled=False):
            sigma = t.new_zeros(1)  # without time conditioning [code]           (1,)
            if self.cfg.time_conditioning:
                sigma = -torch.log1p(-(1 - ALPHA_FLOOR) * t)                   # (B,)
            i = torch.arange(128, device=t.device)
            frequencies = torch.exp(-math.log(10000) * i / 128)                # (128,)
            angles = sigma.float()[:, None] * frequencies                      # (B or 1, 128)
            waves = torch.cat((angles.cos(), angles.sin()), dim=-1)            # (B or 1, 256)
            return F.silu(self.sigma_map.mlp(waves))                           # (B or 1, cond)

    def cast_linears_(self, dtype):
        """For decoding: cast once what autocast casts in every pass. Outputs are bit-identical."""
        for part in (self.blocks, self.output_layer):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    module.to(dtype)


# ---- compiling -----------------------------------------------------------------------------------
def compile_parts(model, mode=None):
    """Compile the slow parts of a TwoPass: its trunk, and its work on rows (N, V).           [ours]

    mode: of the trunk; "reduce-overhead" uses CUDA graphs. The work on rows cannot use them,
        because the number of rows varies.
    """
    # DDP would split the trunk every 25 MB, to send gradients during the backward pass. The splits
    # would break fused kernels and change the dropout masks.
    torch._dynamo.config.optimize_ddp = False
    # Methods, because compiling a module renames its entries in the state_dict. Copy the model
    # before this call: a deepcopy's compiled methods would use the original's weights.
    model.net.trunk = torch.compile(model.net.trunk, mode=mode)
    model.score = compiled_rows(model.score)
    model.predict_sm = compiled_rows(model.predict_sm)


def compiled_rows(fn):
    """fn, compiled once for any number of rows."""
    fast = torch.compile(fn)

    def call(*rows):
        if len(rows[0]) < 2:  # torch would compile again for 0 rows and for 1 row
            return fn(*rows)
        for x in rows:
            # dynamic=True would make V symbolic too, and torch 2.6 cannot pad by a symbolic size.
            # Without maybe_mark_dynamic, torch would compile again when n happens to equal n_embd.
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return fast(*rows)
    return call


# ---- checkpoints ---------------------------------------------------------------------------------
def read_checkpoint(path, kind):
    """The dict that launch.save wrote to a file, on the CPU. ValueError if its kind is not `kind`.

    It holds tensors and plain values. Nothing in the file can run.
    """
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        there = ckpt["kind"]
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: `python train.py small` trains out/small/last.pt, "
                         "and lab/convert.py makes mdlm.pt")
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: give a file, such as {path}/last.pt. (Folders of "
                         "Dream's models and adapters are for sample_dream.py)")
    except OSError:  # such as a bad disk: its own message is better
        raise
    except Exception as e:
        raise ValueError(f"{path} is not a whole checkpoint of this project ({type(e).__name__}). "
                         f"If another wrote it: python lab/convert.py {path} OUT.pt")
    if there != kind:
        raise ValueError(f"{path} is of kind {there!r}, but {kind!r} is needed here")
    return ckpt


def own_class(part):
    """The class name of a network or soft mask, or None if it is DiT, SoftMask or missing."""
    return None if part is None or type(part) in (DiT, SoftMask) else type(part).__name__


def check_class(path, name, part):
    """Raises ValueError unless a file's network or SoftMask is of the same class as `part`."""
    if name != own_class(part):
        raise ValueError(f"{path} was trained with class {name}, not {own_class(part)} (None: this "
                         "project's). Give the --code=FILE.py of the training, if it had one. A "
                         "network of your own needs Python: MDLM(cfg, net)")


def check_finite(state, path):
    """Raises ValueError if a weight is not finite: decoding would silently produce nonsense."""
    for name, t in state.items():
        # t.isfinite() would allocate a bool for each weight.
        if t.numel() and not all(value.isfinite() for value in t.aminmax()):
            raise ValueError(f"{path}: {name} has values that are not finite")
