# SPDX-License-Identifier: MIT
"""Dream-7B and Dream-Coder-7B: the backbone, its files and its tokenizer.                                    App. B.2

A Qwen2.5 transformer without the causal mask, adapted to fill in [MASK]s, on torch alone. As every backbone here it is
three calls: `table` (what an embedding is), `trunk` (embeddings to hidden states) and a head on rows. Soft masks, or
anything else with the right width, go in between the first two:

    model, tok = Dream.load(folder), Tokenizer(folder)                  # the folder as published on the model hub
    x = torch.tensor([tok.encode(tok.chat(messages), special=True) + 32 * [model.cfg.mask_token_id]])   # (B, L)
    h, kv = model.trunk(F.embedding(x, model.table))                    # (B, L, D)
    logits = model.head_at(h, x == model.cfg.mask_token_id)             # (N, V)  one row per [MASK]

The module tree has the published names, so no table of keys can be wrong. Dream can predict [MASK] itself, and the few
hundred unused ids above it: nothing here suppresses them [code].

Not here: decoding (sample_dream.py), training (finetune_dream.py), the maths of the adapter (dora.py).
"""

import hashlib
import json
import os
import unicodedata
from dataclasses import dataclass, fields

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dora
from checkpoint import read_safetensors
from launch import Refused
from softmask import SoftMask


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
    except FileNotFoundError:
        raise Refused(f"{path} does not exist: give the folder of a model or adapter with all its files")
    except ValueError as e:
        raise Refused(f"{path} is not JSON ({e}): fetch it again")
    if not isinstance(values, dict):
        raise Refused(f"{path} holds no JSON object but a {type(values).__name__}: fetch it again")
    return values


# ---------------------------------------------------------------------------------------------------------------------
# the model


@dataclass
class DreamConfig:
    """The fields of config.json that decide something. No defaults: a model says what it is."""
    vocab_size: int           # V, rows of the table; more than the tokenizer uses
    hidden_size: int          # D
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than heads: queries share keys and values in groups
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    mask_token_id: int
    pad_token_id: int         # also what stands after the end of an answer
    eos_token_id: int

    @classmethod
    def read(cls, folder):
        """config.json of a model folder. Raises Refused when it describes another architecture than this file's."""
        raw = read_json(os.path.join(folder, "config.json"))
        rope = raw.get("rope_parameters") or {}  # transformers 5 and later: rope_theta is in here
        theta = raw.setdefault("rope_theta", rope.get("rope_theta"))
        if rope and rope != {"rope_type": "default", "rope_theta": theta}:
            raise Refused(f"{folder}/config.json has rope_parameters = {rope}, only rope_type "
                          f"'default' with one rope_theta is implemented")
        missing = [f.name for f in fields(cls) if not isinstance(raw.get(f.name), (int, f.type))]
        if missing:
            raise Refused(f"{folder}/config.json has no number for {', '.join(missing)}: not the configuration of a Dream model")
        for name, want in {"tie_word_embeddings": False, "rope_scaling": None, "use_sliding_window": False,
                           "hidden_act": "silu", "attention_dropout": 0.0}.items():
            # Absent means Qwen2's default, which is the wanted value for each of them.
            if raw.get(name, want) != want:
                raise Refused(f"{folder}/config.json has {name} = {raw[name]!r}, only {want!r} is implemented")
        cfg = cls(**{f.name: raw[f.name] for f in fields(cls)})
        if cfg.mask_token_id >= cfg.vocab_size:
            raise Refused(f"{folder}/config.json: mask_token_id = {cfg.mask_token_id} is beyond vocab_size = {cfg.vocab_size}")
        return cfg

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


def rope(pos, cfg):
    """Rotation of each position as (cos, sin), 2 x (1 or B, L, 1, head_dim), fp32.   pos: (1 or B, L) int.

    Computed here, never stored: rounded to bf16 with the rest of the model, the frequencies would be off by more than
    half a radian at position 500 (the released evaluation of finetuned models does that).
    """
    even = torch.arange(0, cfg.head_dim, 2, device=pos.device).float()
    inv_freq = 1.0 / cfg.rope_theta ** (even / cfg.head_dim)                     # (head_dim/2,)
    angle = (pos[..., None].float() * inv_freq).repeat(1, 1, 2)[:, :, None]      # (B, L, 1, head_dim)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)  # halves, not even and odd: the NeoX convention
    return x * cos.to(x.dtype) + torch.cat([-x2, x1], -1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        heads, groups = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, heads)
        self.k_proj = nn.Linear(cfg.hidden_size, groups)
        self.v_proj = nn.Linear(cfg.hidden_size, groups)
        self.o_proj = nn.Linear(heads, cfg.hidden_size, bias=False)

    def forward(self, x, cos, sin, past, start, keep):
        split = lambda y: y.view(*y.shape[:2], -1, self.head_dim)
        q = rotate(split(self.q_proj(x)), cos, sin)                              # (B, L, heads, head_dim)
        k = rotate(split(self.k_proj(x)), cos, sin)                              # (B, L, groups, head_dim)
        v = split(self.v_proj(x))                                                # (B, L, groups, head_dim)
        if past is not None:  # L new positions replace those at start; the rest is as it was
            end = start + x.shape[1]
            k, v = (torch.cat([old[:, :start], new, old[:, end:]], 1) for old, new in zip(past, (k, v)))  # (B, S, ...)
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), attn_mask=keep, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)                 # (B, L, D)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))       # (B, L, D)


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x, *context):
        y, kv = self.self_attn(self.input_layernorm(x), *context)
        x = x + y                                                                # (B, L, D)
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Dream(nn.Module):
    """The transformer. With `checkpointing` on, one (B, L, D) per layer is kept for the backward pass and the rest is
    computed again: a third more work, and 0.4 instead of 11 GB at 2,048 tokens (28 layers, bf16)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.checkpointing = cfg, False
        self.model = nn.ModuleDict({  # this nesting for the published names
            "embed_tokens": nn.Embedding(cfg.vocab_size, cfg.hidden_size),
            "layers": nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers)),
            "norm": nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)})
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @property
    def table(self):
        return self.model["embed_tokens"].weight                                 # (V, D)

    def trunk(self, emb, pos=None, past=None, start=0, valid=None):
        """Embeddings to final hidden states; every position sees every valid one, before and after it.

        emb: (B, L, D).   pos: (L,) or (B, L) int, the positions of emb; default: counted from start, or along `valid`.
        valid: (B, S) bool over the S = L (or cached) positions, False for padding; None: all. Its hidden states are
            finite and mean nothing.
        past: what an earlier call returned, (k, v) per layer over S positions. emb then stands for positions
            start .. start + L − 1 of these S, whose keys and values it replaces; the rest are used as they were.
            (Prefix cache: give everything from the block's start on. Dual cache: give the block alone.)
        Returns h (B, L, D) and kv, 2 x (B, S, groups, head_dim) per layer, keys already rotated: they stay where they are,
        so it is the same as rotating them again in every call. kv is empty while checkpointing.
        """
        B, L, _ = emb.shape
        if pos is None:
            counted = torch.arange(start + L, device=emb.device)[None] if valid is None else valid.long().cumsum(1) - 1
            pos = counted[:, start:start + L]                                    # (1 or B, L)
        cos, sin = rope(pos if pos.dim() == 2 else pos[None], self.cfg)
        keep = None if valid is None else valid[:, None, None]                   # (B, 1, 1, S) over the keys
        h, kv = emb, []
        for i, layer in enumerate(self.model["layers"]):
            context = (cos, sin, None if past is None else past[i], start, keep)
            if self.checkpointing and torch.is_grad_enabled():
                h, _ = checkpoint(layer, h, *context, use_reentrant=False)
            else:
                h, one = layer(h, *context)                                      # (B, L, D)
                kv.append(one)
        return self.model["norm"](h), kv

    def rows_at(self, h, mask):
        """h: (B, L, D), mask: (B, L) bool -> (N, D), the hidden states that predict the masked positions.

        Dream grew out of a next-token model and kept its shift: position i is predicted from hidden state i − 1.
        """
        if mask[:, 0].any():
            raise Refused("position 0 is masked and has no position before it to be predicted from: put a prompt there")
        return h[:, :-1][mask[:, 1:]]                                            # (N, D)  the shift, here and only here

    def head_at(self, h, mask):
        """Logits of the masked positions only, row-major.   h: (B, L, D), mask: (B, L) bool.   Returns (N, V)"""
        return self.lm_head(self.rows_at(h, mask))

    def fingerprint(self):
        """16 hex digits that tell these weights from others of the same shapes, whatever adapter is attached to them.

        From the first values of every tensor, rounded to bf16: the same for a model loaded as stored or in float32.
        """
        digest = hashlib.sha256()
        for name, p in self.named_parameters():
            if ".lora_" not in name:
                digest.update(p.detach().flatten()[:64].bfloat16().view(torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """The published folder, frozen, in evaluation mode. dtype None: as stored.

        On the CPU the weights are the mapped files themselves: loading reads nothing, and RAM holds each page once.
        Raises Refused when a shard or tensor is missing, unknown, or of another shape than config.json says.
        """
        cfg = DreamConfig.read(folder)
        with torch.device("meta"):  # shapes without memory
            model = cls(cfg)
        index = os.path.join(folder, "model.safetensors.index.json")
        one = os.path.join(folder, "model.safetensors")
        weight_map = {"": "model.safetensors"} if os.path.exists(one) else read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise Refused(f"{index} has no weight_map, which says what the shards are: fetch it again")
        shards = sorted(os.path.join(folder, name) for name in set(weight_map.values()))
        state = {}
        for shard in shards:
            state.update({name: t.to(device, dtype) for name, t in read_safetensors(shard).items()})
        want = model.state_dict()
        for problem, names in (("lacks", want.keys() - state), ("has an unknown", state.keys() - want)):
            if names:
                raise Refused(f"{folder} {problem} {min(names)} ({len(names)} such tensors): fetch its safetensors again, "
                              f"or is num_hidden_layers = {cfg.num_hidden_layers} in config.json of another model?")
        for name, t in want.items():
            if t.shape != state[name].shape:
                raise Refused(f"{folder}: {name} is {tuple(state[name].shape)}, but {tuple(t.shape)} by config.json: "
                              "the two are not of one model")
        model.load_state_dict(state, assign=True)
        return model.requires_grad_(False).eval()


# ---------------------------------------------------------------------------------------------------------------------
# the adapter folder


def load_adapter(model, folder):
    """Attach the adapter in `folder`, in place. Returns the arguments of its SoftMask, or None for a binary one.

    DoRA as peft writes it (adapter_config.json, adapter_model.safetensors); ω as `read_omega` finds it. Raises Refused for
    another kind of adapter, or another model's; finetune.json, where there is one, tells models of one shape apart.
    """
    at = lambda name: os.path.join(folder, name)
    cfg, state = read_json(at("adapter_config.json")), read_safetensors(at("adapter_model.safetensors"))
    for name, want in {"peft_type": "LORA", "use_dora": True, "bias": "none", "use_rslora": False, "rank_pattern": {},
                       "alpha_pattern": {}}.items():
        if cfg.get(name, None if want is True else want) != want:
            raise Refused(f"{folder}/adapter_config.json has {name} = {cfg.get(name)!r}, only {want!r} is implemented")
    base = read_json(at("finetune.json")).get("base") if os.path.exists(at("finetune.json")) else None
    if base not in (None, model.fingerprint()):
        raise Refused(f"{folder} is not an adapter of this model but of the one that was in "
                      f"{cfg.get('base_model_name_or_path')}: same shapes, other weights")
    omega = read_omega(model.cfg, folder)
    try:
        dora.attach(model, cfg["target_modules"], cfg["r"], cfg["lora_alpha"], torch.Generator())
        dora.load_adapter_state(model, state)
    except (KeyError, TypeError, ValueError) as e:
        raise Refused(f"{folder} is not an adapter of this model: {e}")
    return omega


def read_omega(cfg, folder):
    """Arguments of SoftMask from softmask.json, or else from the authors' transparency_config.json (rounded to bf16);
    None where neither is. Raises Refused for what is not a soft mask of this model, or would be another one here."""
    found = [path for name in ("softmask.json", "transparency_config.json") if os.path.exists(path := os.path.join(folder, name))]
    if not found:
        return None
    raw = read_json(path := found[0])
    try:
        if path.endswith("softmask.json"):
            sm = {"tau": 1.0} | {name: raw[name] for name in ("mask_id", "k", "omega_s", "omega_a", "omega_b")} | raw
        else:
            k = {"mixinputs_with_topk": raw["mixinputs_k"], "mixinputs_with_temp": None}[raw["transparency_alg"]]
            sm = dict(mask_id=cfg.mask_token_id, k=k, omega_s=raw["transparency_scale"], tau=raw["mixture_temp"],
                      omega_a=raw["transparency_steepness"], omega_b=raw["transparency_centre"])
        if sm["omega_s"] == 1:  # rounded up: the sigmoid in fp32, and 0.999 in bf16
            sm["omega_s"] = 1 - 1e-6
        SoftMask(**sm)
    except KeyError as e:
        raise Refused(f"{path} is not a soft mask: {e} is missing, or not known here")
    except (TypeError, ValueError) as e:
        raise Refused(f"{path} is not a soft mask: {e}")
    if sm["mask_id"] != cfg.mask_token_id or not (sm["k"] is None or type(sm["k"]) is int and sm["k"] <= cfg.vocab_size):
        raise Refused(f"{path} has mask_id = {sm['mask_id']}, k = {sm['k']}: of another model than this one with mask "
                      f"{cfg.mask_token_id} and {cfg.vocab_size} tokens")
    if raw.get("transparency_scheduling") not in (None, "none"):
        raise Refused(f"{path} has transparency_scheduling = {raw['transparency_scheduling']!r}, which is a setting of decoding "
                      f"here: write \"none\" there, and decode with --schedule={raw['transparency_scheduling']}")
    return sm


# ---------------------------------------------------------------------------------------------------------------------
# the tokenizer

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters():
    """{character: byte} of a byte-level vocabulary file: printable bytes as themselves, others from U+0100 on (GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Tokenizer:
    """The tokenizer in a model folder: vocab.json or merges.txt, and added_tokens.json, through tiktoken.

    n_vocab: its largest id + 1. The model's table has more rows. Raises Refused when a file is missing or another kind.
    """

    def __init__(self, folder):
        vocab, merges = (os.path.join(folder, name) for name in ("vocab.json", "merges.txt"))
        to_byte = byte_characters()
        if os.path.exists(vocab):
            ids = read_json(vocab)
        elif os.path.exists(merges):  # alone it is enough: 256 bytes, then every merge makes the next id
            with open(merges, encoding="utf-8") as f:
                pairs = [line.split() for line in f if not line.startswith("#version")]
            ids = {token: i for i, token in enumerate([*to_byte, *("".join(pair) for pair in pairs if pair)])}
        else:
            raise Refused(f"{folder} has neither vocab.json nor merges.txt: fetch the tokenizer's files too")
        self.special = read_json(os.path.join(folder, "added_tokens.json"))
        try:
            ranks = {bytes(to_byte[c] for c in token): i for token, i in ids.items() if token not in self.special}
        except KeyError as e:
            raise Refused(f"{vocab} holds {e}, not a character of a byte-level vocabulary")
        self.bpe = tiktoken.Encoding(folder, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special)
        self.known = {*ranks.values(), *self.special.values()}
        self.n_vocab = max(self.known) + 1

    def encode(self, text, special=False):
        """Token ids of a text. special: let <|im_end|> and the like be one token; only for text from `chat`."""
        text = unicodedata.normalize("NFC", text)  # as the published tokenizer: é is one character
        return self.bpe.encode(text, allowed_special="all" if special else set(), disallowed_special=())

    def decode(self, ids):
        """Text of token ids. Ids without a token, which the model can produce, give nothing."""
        return self.bpe.decode([i for i in ids if i in self.known])

    def chat(self, messages, generate=True):
        """The chat template as text.   messages: [{"role", "content"}].   generate: end where the next answer begins."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * generate
