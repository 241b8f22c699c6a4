# SPDX-License-Identifier: MIT
"""Dream-7B, Dream-Coder-7B and smaller models like them: backbone, files, tokenizer.     App. B.2

A Qwen2.5 transformer without the causal mask, in plain torch. Like every backbone here (mdlm.py),
it has a `table`, `hidden` and `head`. SM goes in between the first two (mdlm.TwoPass). Without SM:

    model, tok = Dream.load(folder), Tokenizer(folder)   # the folder as published on the model hub
    x = torch.tensor([tok.encode(tok.chat(messages), special=True) + 32 * [mask_id]])   # (B, L)
    masks = (x == mask_id).nonzero(as_tuple=True)                       # (b, l), (N,) each
    h = model.hidden(F.embedding(x, model.table), masks)                # (N, D)
    logits = model.head(h)                                              # (N, V)

Modules have the published names, so weights load without renaming. Dream can predict [MASK] itself,
and the few hundred unused ids above it. Nothing here suppresses them [code].
"""

import hashlib
import json
import os
import unicodedata
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dora
from launch import Refused, atomic, input_errors, read_json, readable
from mdlm import check_class, check_finite, read_checkpoint, rotate, rotation
from softmask import SoftMask


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        D = cfg.hidden_size
        kv_width = cfg.num_key_value_heads * cfg.head_dim
        self.q_proj = nn.Linear(D, D)
        self.k_proj = nn.Linear(D, kv_width)
        self.v_proj = nn.Linear(D, kv_width)
        self.o_proj = nn.Linear(D, D, bias=False)

    def forward(self, x, cos, sin, past, positions):  # past: see Dream.trunk.   positions: (L,)
        split = lambda y: y.unflatten(-1, (-1, self.head_dim))
        q = rotate(split(self.q_proj(x)), cos, sin)                     # (B, L, H, d)
        k = rotate(split(self.k_proj(x)), cos, sin)                     # (B, L, H_kv, d)
        v = split(self.v_proj(x))                                       # (B, L, H_kv, d)
        if past is not None:
            # In place, because concatenation would copy the whole cache in every layer.
            k = past[0].index_copy_(1, positions, k)                    # (B, S, H_kv, d)
            v = past[1].index_copy_(1, positions, v)                    # (B, S, H_kv, d)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           enable_gqa=True)             # (B, H, L, d)  not causal
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)        # (B, L, D)


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
        x = x + y                                                       # (B, L, D)
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Dream(nn.Module):
    """The transformer. Checked against recorded logits of the published code.

    With `checkpointing`, a layer keeps only its input, and the backward pass recomputes the rest,
    one layer at a time. That is a third to a half more work, but takes far less memory.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.checkpointing = False
        self.model = nn.ModuleDict({  # nested as the published names are
            "embed_tokens": nn.Embedding(cfg.vocab_size, cfg.hidden_size),
            "layers": nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers)),
            "norm": nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)})
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @property
    def table(self):
        return self.model["embed_tokens"].weight                        # (V, D)

    def trunk(self, emb, past=None, start=0):
        """Embeddings (B, L, D) to final hidden states. Every position sees every other.

        past: kv of an earlier pass over S positions. Then emb is for positions start to
            start + L − 1 of these, and their keys and values are replaced *in place*.
        Returns h (B, L, D) and kv: for each layer (k, v), both (B, S, H_kv, d), with keys already
        rotated. (S = L without past.) With checkpointing and gradients, kv is empty.
        """
        positions = torch.arange(emb.shape[1], device=emb.device) + start  # (L,)
        # Computed in every pass, in fp32 [ours]. A buffer would be cast to bf16 with the model, and
        # far positions would get wrong angles, as in the authors' evaluation of finetuned models.
        cos, sin = rotation(positions, self.cfg.head_dim, self.cfg.rope_theta)  # 2 × (L, 1, d)
        h = emb
        kv = []
        for i, layer in enumerate(self.model["layers"]):
            context = (cos, sin, None if past is None else past[i], positions)
            if self.checkpointing and torch.is_grad_enabled():
                h, _ = checkpoint(layer, h, *context, use_reentrant=False)
            else:
                h, new = layer(h, *context)                             # (B, L, D)
                kv.append(new)
        return self.model["norm"](h), kv

    def shift(self, h, masks):
        """h (B, L, D) → (N, D), the hidden states that predict the masked positions (b, l)."""
        # Dream was a next-token model, and kept its shift [code]: state l − 1 predicts position l.
        # If position 0 were masked, l − 1 would silently be the last state. pad_prompt checks this.
        b, l = masks
        return h[b, l - 1]                                              # (N, D)

    def hidden(self, emb, masks, t=None):
        """emb (B, L, D) → (N, D), the hidden states that predict `masks`. Dream ignores t."""
        return self.shift(self.trunk(emb)[0], masks)

    def head(self, h):
        """Hidden states (n, D) → logits (n, V). The product is in the weights' dtype [code]."""
        y = F.linear(h, self.table) if self.cfg.tie_word_embeddings else self.lm_head(h)  # (n, V)
        return y.float()  # a loss in bf16 would round its gradients

    def fingerprint(self):
        """A hash of each tensor's first 4,096 signs: the same in any dtype and with an adapter."""
        signs = [p.detach().flatten()[:4096].signbit() for name, p in self.named_parameters()
                 if ".lora_" not in name]
        return hashlib.sha256(torch.cat(signs).cpu().numpy()).hexdigest()[:16]

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """A frozen model in eval mode, from its published folder, in dtype (default: as stored)."""
        with torch.device("meta"), readable(folder):  # shapes without memory
            model = cls(DreamConfig.read(folder))
        names = {"model.safetensors"}
        index = f"{folder}/model.safetensors.index.json"
        with readable(folder):
            if os.path.exists(index):
                names = set(read_json(index)["weight_map"].values())
            files = [read_safetensors(f"{folder}/{name}") for name in names]
            state = {name: t for file in files for name, t in file.items()
                     if not name.endswith("rotary_emb.inv_freq")}
            if model.cfg.tie_word_embeddings:
                state.pop("lm_head.weight", None)  # it is the table
            model.load_state_dict(state, assign=True)
        model.to(device, dtype or model.table.dtype)
        with input_errors():
            check_finite(model.state_dict(), folder)
        return model.requires_grad_(False).eval()


# Settings of config.json and adapter_config.json. Most other values would load without an error and
# give wrong results, because no tensor's name or shape depends on them.
ONLY = {
    "hidden_act": "silu", "rope_scaling": None, "rope_type": "default", "partial_rotary_factor": 1,
    "quantization_config": None, "use_sliding_window": False,
    "peft_type": "LORA", "use_dora": True, "use_rslora": False, "bias": "none", "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": [], "init_lora_weights": True}


def check_settings(raw, path, only):
    """Raises Refused if a setting differs from its value in `only`. A missing one is fine."""
    for name, value in only.items():
        if raw.get(name) not in (None, value):
            raise Refused(f"{path} has {name} = {raw[name]!r}, but only {value!r} works here")


@dataclass
class DreamConfig:
    """The fields of config.json that are used here. Sizes have no defaults: models differ."""
    vocab_size: int           # V, rows of the table; the tokenizer uses fewer
    hidden_size: int          # D
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than heads: several queries share one key and value
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    pad_token_id: int         # also fills an answer after its end
    eos_token_id: list        # each of these ends an answer
    tie_word_embeddings: bool = False  # the table is also the head, as in small models

    @classmethod
    def read(cls, folder):
        """config.json of a model folder. Raises Refused if it is, or may be, another model."""
        if not os.path.exists(folder):
            raise Refused(f"there is no {folder}: `hf download Dream-org/Dream-v0-Instruct-7B "
                          f"--local-dir={folder}`")
        if os.path.exists(f"{folder}/adapter_config.json"):
            raise Refused(f"{folder} is an adapter: give it as --adapter, and its model as --model")
        path = f"{folder}/config.json"
        added = f"{folder}/added_tokens.json"
        if not os.path.exists(path):
            raise Refused(f"{folder} is not a Dream model: it has no config.json. For an MDLM, use "
                          "sample.py")
        raw = {name: value for name, value in read_json(path).items() if value is not None}
        if "mask_token_id" not in raw and os.path.exists(added):  # open-dCoder
            raw["mask_token_id"] = read_json(added).get("<M>")
        with readable(path):
            raw |= raw.get("rope_parameters", {})  # transformers 5 nests rope_theta
            ends = raw.get("eos_token_id")
            ends = ends if isinstance(ends, list) else [ends]
            raw = {"pad_token_id": ends[0], "tie_word_embeddings": False, **raw,
                   "eos_token_id": ends}
            for name, kind in cls.__annotations__.items():
                if type(raw.get(name)) not in (kind, int):  # isinstance takes true for an int
                    raise ValueError(f"{name} is {raw.get(name)!r}, not of type {kind.__name__}. "
                                     "Is this a Dream model? For an MDLM, use sample.py")
            ids = [raw["mask_token_id"], raw["pad_token_id"], *ends]
            if not all(i in range(raw["vocab_size"]) for i in ids):
                raise ValueError(f"mask, pad and eos_token_id are {ids}, beyond vocab_size")
            head_dim = raw["hidden_size"] // raw["num_attention_heads"]
            layer_types = raw["num_hidden_layers"] * ["full_attention"]
        check_settings(raw, path, ONLY | {"head_dim": head_dim, "layer_types": layer_types})
        return cls(**{name: raw[name] for name in cls.__annotations__})

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


def load_adapter(model, folder, sm_class=None):
    """Attach the DoRA in `folder` to model, in place. Returns the folder's soft mask, or None.

    sm_class: the class of the soft mask (default: SoftMask).
    """
    if not os.path.exists(f"{folder}/adapter_config.json"):
        raise Refused(f"{folder} is not an adapter folder, such as out/dream/best")
    cfg = read_json(f"{folder}/adapter_config.json")
    state = read_safetensors(f"{folder}/adapter_model.safetensors")
    if cfg.get("init_lora_weights") in (False, "gaussian", "orthogonal", "eva"):
        cfg["init_lora_weights"] = True  # the adapter's start only. Others change the base: refused
    check_settings(cfg, f"{folder}/adapter_config.json", ONLY | {
        "layers_to_transform": [*range(model.cfg.num_hidden_layers)]})
    ours = f"{folder}/finetune.json"  # tells apart models of the same shapes
    if os.path.exists(ours) and read_json(ours)["base"] != model.fingerprint():
        raise Refused(f"{folder} is not an adapter of this model but of the one that was in "
                      f"{cfg['base_model_name_or_path']}: same shapes, other weights")
    with input_errors():
        check_finite(state, folder)
    with readable(folder):
        dora.attach(model, cfg["target_modules"], cfg["r"], cfg["lora_alpha"], torch.Generator())
        dora.load_adapter_state(model, state)
    return load_soft_mask(folder, model.cfg.mask_token_id, sm_class or SoftMask)


def load_soft_mask(folder, mask_id, sm_class):
    """The soft mask in the folder of an adapter, or None."""
    path = f"{folder}/softmask.pt"
    theirs = f"{folder}/transparency_config.json"
    if not os.path.exists(path):
        if os.path.exists(theirs):
            raise Refused(f"{folder} has ω in the authors' format only: run python lab/convert.py "
                          f"{theirs} {path}")
        return None
    with input_errors():
        ckpt = read_checkpoint(path, "soft mask")
        if ckpt["model"] is None:
            return None
        soft_mask = sm_class(mask_id, ckpt["k"], 0.5, 1.0, -1.0)  # any ω: the next lines set it
        check_class(path, ckpt["SoftMask"], soft_mask)
        check_finite(ckpt["model"], path)
    with readable(path):
        soft_mask.load_state_dict(ckpt["model"])
    return soft_mask


# ---- safetensors: the header's length in 8 bytes, the header in JSON, the raw tensors ------------
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool}


def read_safetensors(path):
    """{name: tensor} of a safetensors file. A tensor is read from disk when it is used."""
    tensors = {}
    with readable(path), open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        header.pop("__metadata__", None)
        begin = f.tell()
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            # torch wants writable memory. Mode "c" is copy-on-write, so the file never changes.
            part = torch.from_numpy(np.memmap(path, np.uint8, "c", begin + start, end - start))
            tensors[name] = part.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    """Write a safetensors file, atomically.   tensors: {name: tensor}."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header = {"__metadata__": {"format": "pt"}}  # transformers wants it
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to start at a multiple of 8
    with atomic(path) as tmp, open(tmp, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters():
    """{character: byte}. Vocabulary files write unprintable bytes as U+0100, U+0101, and so on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # ! to ~, ¡ to ¬, ® to ÿ
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Tokenizer:
    """The tokenizer of a model folder, on tiktoken"""
    def __init__(self, folder):
        V = DreamConfig.read(folder).vocab_size  # first: its error says if this is not Dream
        vocab = read_json(f"{folder}/vocab.json")
        self.special = read_json(f"{folder}/added_tokens.json")
        to_byte = byte_characters()
        with readable(folder):
            ranks = {bytes(to_byte[c] for c in token): i for token, i in vocab.items()
                     if token not in self.special}
            self.bpe = tiktoken.Encoding(folder, pat_str=PATTERN, mergeable_ranks=ranks,
                                         special_tokens=self.special)
            self.ids = {*ranks.values(), *self.special.values()}
            if max(self.ids) >= V:
                raise Refused(f"{folder} has a token {max(self.ids)}, beyond config's vocab_size")

    def encode(self, text, special=False):
        """The token ids of a text, a list.   special: <|im_end|> and the like are one token."""
        # A whole chat is encoded with special=True, including what its users typed [code].
        text = unicodedata.normalize("NFC", text)  # a letter and its accent become one [code]
        allowed = "all" if special else set()
        return self.bpe.encode(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids):
        """The text of token ids. Ids without a token, which Dream can predict, are skipped."""
        return self.bpe.decode([i for i in ids if i in self.ids])

    def chat(self, messages):
        """[{"role": …, "content": …}, …] as one text, up to where the next answer begins."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return "".join(turns) + "<|im_start|>assistant\n"
