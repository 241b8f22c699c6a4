# SPDX-License-Identifier: MIT
"""Dream-7B and Dream-Coder-7B: the backbone, its files and its tokenizer.                 App. B.2

A Qwen2.5 transformer without the causal mask, on torch alone. Like every backbone here it is
three things: `table` (what an embedding is), `hidden` (embeddings to the hidden states that
predict some positions) and `head` (hidden states to logits). Soft masks go in between the first
two:

    model, tok = Dream.load(folder), Tokenizer(folder)   # the folder as published on the model hub
    ids = tok.encode(tok.chat(messages), special=True)
    x = torch.tensor([ids + 32 * [model.cfg.mask_token_id]])            # (B, L)
    rows = (x == model.cfg.mask_token_id).flatten().nonzero().squeeze(1)  # (N,)
    h = model.hidden(F.embedding(x, model.table), rows)                 # (N, D)
    logits = model.head(h)                                              # (N, V)

The modules have the published names, so weights load without a table of names. Dream can predict
[MASK] itself, and the few hundred unused ids above it: nothing here suppresses them [code].

Not here: decoding (sample_dream.py), training (finetune_dream.py), the maths of the adapter
(dora.py).
"""

import hashlib
import os
import unicodedata
from dataclasses import dataclass, fields, replace

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dora
from arms import soft_mask
from checkpoint import load as load_checkpoint
from checkpoint import read_safetensors
from launch import Refused, read_json

# -------------------------------------------------------------------------------------------------
# the model


@dataclass
class DreamConfig:
    """The fields of config.json that this file needs. No defaults: a model says what it is."""
    vocab_size: int           # V, rows of the table; the tokenizer uses fewer
    hidden_size: int          # D
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than heads: several queries share one key and value
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    mask_token_id: int
    pad_token_id: int         # fills the space after the end of an answer, too
    eos_token_id: int

    @classmethod
    def read(cls, folder):
        """config.json of a model folder. Raises Refused when it describes another architecture."""
        path = os.path.join(folder, "config.json")
        raw = read_json(path)
        nested = raw.get("rope_parameters") or {}  # transformers 5 puts rope_theta in here
        if isinstance(nested, dict):
            raw.setdefault("rope_theta", nested.get("rope_theta"))
        if nested and nested != {"rope_type": "default", "rope_theta": raw.get("rope_theta")}:
            raise Refused(f"{path} has rope_parameters = {nested}, only rope_type 'default' with "
                          f"one rope_theta is implemented")
        for f in fields(cls):
            value = raw.get(f.name)
            low, high = (0, raw["vocab_size"]) if f.name.endswith("_id") else (1e-12, 2**31)
            if not isinstance(value, (int, f.type)) or not low <= value < high:
                raise Refused(f"{path} has {f.name} = {value!r}, which must be a number from {low} "
                              f"to {high}: not the configuration of a Dream model")
        for name, want in {"tie_word_embeddings": False, "rope_scaling": None,
                           "hidden_act": "silu", "use_sliding_window": False,
                           "attention_dropout": 0.0}.items():
            # A missing field has Qwen2's default, which is the wanted value for each of these.
            if raw.get(name, want) != want:
                raise Refused(f"{path} has {name} = {raw[name]!r}, only {want!r} is implemented")
        cfg = cls(**{f.name: raw[f.name] for f in fields(cls)})
        heads, groups = cfg.num_attention_heads, cfg.num_key_value_heads
        if cfg.hidden_size % (2 * heads) or heads % groups:
            raise Refused(f"{path} has {heads} heads and {groups} groups of them for "
                          f"{cfg.hidden_size} dimensions: they cannot be shared evenly")
        return cfg

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


def rope(pos, cfg):
    """The rotation of each position: (cos, sin), each (1 or B, L, 1, head_dim), fp32.

    pos: (1 or B, L) int. The frequencies are computed here. If they were stored, they would be
    rounded to bf16 with the rest of the model, and angles would be off by more than half a radian
    at position 500. The released evaluation of finetuned models has this error.
    """
    even = torch.arange(0, cfg.head_dim, 2, device=pos.device).float()
    inv_freq = 1.0 / cfg.rope_theta ** (even / cfg.head_dim)            # (head_dim/2,)
    angle = (pos[..., None].float() * inv_freq).repeat(1, 1, 2)         # (B, L, head_dim)
    angle = angle[:, :, None]                                           # (B, L, 1, head_dim)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)  # halves, not even and odd: the NeoX convention
    return x * cos + torch.cat([-x2, x1], -1) * sin


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        heads = cfg.num_attention_heads * cfg.head_dim
        groups = cfg.num_key_value_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, heads)
        self.k_proj = nn.Linear(cfg.hidden_size, groups)
        self.v_proj = nn.Linear(cfg.hidden_size, groups)
        self.o_proj = nn.Linear(heads, cfg.hidden_size, bias=False)

    def forward(self, x, cos, sin, past, at, keep):
        split = lambda y: y.unflatten(-1, (-1, self.head_dim))
        q = rotate(split(self.q_proj(x)), cos, sin)                     # (B, L, heads, head_dim)
        k = rotate(split(self.k_proj(x)), cos, sin)                     # (B, L, groups, head_dim)
        v = split(self.v_proj(x))                                       # (B, L, groups, head_dim)
        if past is not None:
            # In place: to join old and new pieces, 28 layers would copy the whole cache.
            k = past[0].index_copy_(1, at, k)                           # (B, S, groups, head_dim)
            v = past[1].index_copy_(1, at, v)                           # (B, S, groups, head_dim)
        q, ks, vs = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, ks, vs, attn_mask=keep, enable_gqa=True)
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
    """The transformer. Checked against tests/oracles.py slow_forward.

    With `checkpointing` on, each layer keeps only one (B, L, D) for the backward pass, which
    computes the rest again: a third more work, and 0.4 GB instead of 11 at 2,048 tokens (28
    layers, bf16).
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.checkpointing = cfg, False
        self.model = nn.ModuleDict({  # the published names want this nesting
            "embed_tokens": nn.Embedding(cfg.vocab_size, cfg.hidden_size),
            "layers": nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers)),
            "norm": nn.RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)})
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    @property
    def table(self):
        return self.model["embed_tokens"].weight                        # (V, D)

    def trunk(self, emb, valid=None, past=None, start=0):
        """Embeddings to final hidden states; every position sees every valid one.

        emb: (B, L, D).
        valid: (B, S) bool, False for padding (default: all valid). Positions are counted along the
            valid ones. The hidden states of padding are finite and mean nothing.
        past: what an earlier call over S positions returned, (k, v) per layer. emb then stands
            for the positions start .. start + L − 1 of these S. Their keys and values are
            replaced *in place*, all others are used as they were.
        start: int, or 0-d on the device, which a compiled trunk wants: it is compiled again for
            another int.
        Returns h (B, L, D) and kv, (k, v) per layer, each (B, S, groups, head_dim), the keys
        rotated already. While checkpointing, kv is empty.
        """
        at = torch.arange(emb.shape[1], device=emb.device) + start      # (L,)
        pos = at[None]                                                  # (1, L)
        if valid is not None:
            pos = (valid.long().cumsum(1) - 1)[:, at]                   # (B, L)
        cos, sin = (turn.to(emb.dtype) for turn in rope(pos, self.cfg))
        keep = None if valid is None else valid[:, None, None]          # (B, 1, 1, S) over keys
        h, kv = emb, []
        for i, layer in enumerate(self.model["layers"]):
            context = (cos, sin, None if past is None else past[i], at, keep)
            if self.checkpointing and torch.is_grad_enabled():
                h, _ = checkpoint(layer, h, *context, use_reentrant=False)
            else:
                h, new = layer(h, *context)                             # (B, L, D)
                kv.append(new)
        return self.model["norm"](h), kv

    def before(self, h, rows):
        """h (B, L, D) → (N, D), the hidden states that predict the positions `rows` (N,).

        Dream grew out of a next-token model and kept its shift: position i is predicted from
        hidden state i − 1. So position 0 must never be masked: nothing here would notice, because
        a GPU would have to be waited for. `sample_dream.pad_prompts` refuses it.
        """
        return h.flatten(0, 1)[rows - 1]                                # (N, D)  the shift

    def hidden(self, emb, rows, t=None, valid=None):
        """The hidden states (N, D) that predict the positions `rows` (N,) of the flat batch.

        emb: (B, L, D).   t: not used, Dream has no time embedding.   valid: see `trunk`.
        """
        return self.before(self.trunk(emb, valid)[0], rows)

    def head(self, h):
        """Hidden states (n, D) → logits (n, V), fp32. The product is in the weights' dtype [code].

        A loss in bf16 would round its gradients.
        """
        return self.lm_head(h).float()                                  # (n, V)

    def compile_trunk(self):
        """Compile the trunk, in place: once for all positions, once for a part of them.

        It takes a minute, and pays where the host cannot launch 28 layers as fast as they run.
        Lengths are symbols: the next prompt and the next block, at another start, compile nothing.
        """
        self.trunk = torch.compile(self.trunk, dynamic=True)  # not a submodule: names stay

    def fingerprint(self):
        """16 hex digits that tell these weights from others of the same shapes.

        They depend neither on the dtype, because values are rounded to bf16, nor on an adapter.
        """
        digest = hashlib.sha256()
        for name, p in self.named_parameters():
            if ".lora_" not in name:
                first = p.detach().flatten()[:64].bfloat16().view(torch.int16)
                digest.update(first.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @classmethod
    def load(cls, folder, device="cpu", dtype=None):
        """The published folder, frozen, in evaluation mode.

        dtype: of the weights (default: as stored).
        On the CPU the weights are the mapped files themselves: processes that load the same
        folder share the memory. Raises Refused when a shard or tensor is missing, unknown, of
        another shape than config.json says, or not finite.
        """
        cfg, state = DreamConfig.read(folder), {}
        for shard in shards(folder):
            state |= read_safetensors(shard)
        layers = min(cfg.num_hidden_layers, len(state))  # not the million that a file may claim
        with torch.device("meta"):  # shapes without memory
            model = cls(replace(cfg, num_hidden_layers=layers))
        want, have = ({name: tuple(t.shape) for name, t in tensors.items()}
                      for tensors in (model.state_dict(), state))
        for name in sorted(want.keys() | have.keys()):
            if want.get(name) != have.get(name):
                raise Refused(f"{folder}: {name} is {have.get(name, 'missing')} in the "
                              f"safetensors, and {want.get(name, 'missing')} by config.json: they "
                              f"are not of one model, fetch both again")
        state = {name: t.to(device, dtype) for name, t in state.items()}
        check_numbers(state, folder)
        model.load_state_dict(state, assign=True)
        return model.requires_grad_(False).eval()


def shards(folder):
    """The paths of a model's safetensors files. Raises Refused when its index names none."""
    whole = os.path.join(folder, "model.safetensors")
    if os.path.exists(whole):
        return [whole]
    index = whole + ".index.json"
    weight_map = read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise Refused(f"{index} has no weight_map with the names of files: fetch it again")
    return sorted(os.path.join(folder, name) for name in set(names))


def check_numbers(state, folder):
    """Raises Refused when a value of {name: tensor} is infinite or not a number.

    With such weights, decoding would print nonsense without an error. The check takes no memory.
    """
    for name, t in state.items():
        if not all(value.isfinite() for value in t.aminmax()):
            raise Refused(f"{folder}: {name} has values that are not finite numbers: fetch it "
                          f"again, or take an earlier save")


# -------------------------------------------------------------------------------------------------
# the adapter folder


def load_adapter(model, folder):
    """Attach the adapter in `folder`, in place. Returns the arguments of arms.soft_mask, or None.

    DoRA is read as peft writes it, ω by `read_omega`. None: the adapter was trained with binary
    masks. Raises Refused for another kind of adapter, or for one of another model. Two models of
    the same shapes are told apart by finetune.json, if it is there.
    """
    # A missing field has peft's default, which is the wanted value for all but use_dora.
    cfg = {"use_dora": None} | read_json(os.path.join(folder, "adapter_config.json"))
    state = read_safetensors(os.path.join(folder, "adapter_model.safetensors"))
    for name, want in {"peft_type": "LORA", "use_dora": True, "bias": "none", "use_rslora": False,
                       "rank_pattern": {}, "alpha_pattern": {}}.items():
        if cfg.get(name, want) != want:
            raise Refused(f"{folder}/adapter_config.json has {name} = {cfg[name]!r}, only {want!r} "
                          f"is implemented")
    ours = os.path.join(folder, "finetune.json")
    base = read_json(ours).get("base") if os.path.exists(ours) else None
    if base not in (None, model.fingerprint()):
        raise Refused(f"{folder} is not an adapter of this model but of the one that was in "
                      f"{cfg.get('base_model_name_or_path')}: same shapes, other weights")
    omega = read_omega(model.cfg, folder)
    try:
        dora.attach(model, cfg["target_modules"], cfg["r"], cfg["lora_alpha"], torch.Generator())
        dora.load_adapter_state(model, state)
    except (KeyError, TypeError, ValueError) as e:
        raise Refused(f"{folder} is not an adapter of this model: {e}")
    check_numbers(state, folder)
    return omega


def soft_mask_file(folder):
    """The path of softmask.json, or else of the authors' transparency_config.json, or None."""
    paths = (os.path.join(folder, name) for name in ("softmask.json", "transparency_config.json"))
    return next(filter(os.path.exists, paths), None)


def read_omega(cfg, folder):
    """The arguments of arms.soft_mask for an adapter, or None for binary masks.

    softmask.json is preferred to transparency_config.json, whose numbers are rounded to bf16.
    Raises Refused for what is not a soft mask of this model, or has a setting that means
    something else here.
    """
    path = soft_mask_file(folder)
    if path is None:
        return None
    raw = read_json(path)
    if raw.get("transparency_alg") == "none":
        return None
    # Forks have these settings. With other values of them, the same ω belongs to another mix.
    for name, want in {"interpolation": "linear", "fixed_lambda": None}.items():
        if raw.get(name, want) != want:
            raise Refused(f"{path} has {name} = {raw[name]!r}, only {want!r} is implemented")
    try:
        if path.endswith("softmask.json"):
            for name in ("mask_id", "k", "omega_s", "omega_a", "omega_b"):
                if name not in raw:  # SoftMask has defaults, which are not this adapter's
                    raise KeyError(name)
            sm = {"tau": 1.0} | raw
        else:
            mix, k = raw["transparency_alg"], raw["mixinputs_k"]
            if mix not in ("mixinputs_with_topk", "mixinputs_with_temp"):
                raise KeyError(mix)
            sm = dict(mask_id=cfg.mask_token_id, k=None if mix == "mixinputs_with_temp" else k,
                      tau=raw["mixture_temp"], omega_s=raw["transparency_scale"],
                      omega_a=raw["transparency_steepness"], omega_b=raw["transparency_centre"])
        if sm["omega_s"] == 1:  # bf16 rounds all above 0.998 up to 1
            sm["omega_s"] = 1 - 1e-6
        soft_mask(**sm)
    except KeyError as e:
        raise Refused(f"{path} is not a soft mask: {e} is missing, or not known here")
    except (TypeError, ValueError) as e:
        raise Refused(f"{path} is not a soft mask: {e}")
    k = sm["k"]
    k_fits = k is None or type(k) is int and k <= cfg.vocab_size
    if sm["mask_id"] != cfg.mask_token_id or not k_fits:
        raise Refused(f"{path} has mask_id = {sm['mask_id']}, k = {k}: of another model than this "
                      f"one with mask {cfg.mask_token_id} and {cfg.vocab_size} tokens")
    schedule = raw.get("transparency_scheduling")
    if schedule not in (None, "none"):
        raise Refused(f"{path} has transparency_scheduling = {schedule!r}, which is a setting of "
                      f"decoding here: write \"none\" there, and decode with "
                      f"--schedule={schedule}")
    return sm


# -------------------------------------------------------------------------------------------------
# the tokenizer

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters():
    """{character: byte}. A vocabulary file writes unprintable bytes as U+0100 and the next ones."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    shown = [b for first, last in ranges for b in range(ord(first), ord(last) + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def holds_mdlm(path):
    """Whether the path holds an MDLM, which is the model of the other scripts."""
    try:
        return load_checkpoint(path)["kind"] == "mdlm"
    except Refused:
        return False


class Tokenizer:
    """The tokenizer in a model folder, by tiktoken: added_tokens.json, vocab.json or merges.txt.

    n_vocab: its largest id + 1; the model's table has more rows. Raises Refused when a file is
    missing, or is of another kind of tokenizer.
    """

    def __init__(self, folder):
        vocab, merges = (os.path.join(folder, name) for name in ("vocab.json", "merges.txt"))
        to_byte = byte_characters()
        if os.path.exists(vocab):
            ids = read_json(vocab)
        elif os.path.exists(merges):  # it says the ids: the 256 bytes come first, then the merges
            with open(merges, encoding="utf-8", errors="replace") as f:
                pairs = [line.split() for line in f if not line.startswith("#version")]
            tokens = [*to_byte, *("".join(pair) for pair in pairs if pair)]
            ids = {token: i for i, token in enumerate(tokens)}
        elif holds_mdlm(folder):
            raise Refused(f"{folder} holds an MDLM, not a Dream: "
                          f"`python sample.py --checkpoint={folder}` samples it")
        else:
            raise Refused(f"{folder} has neither vocab.json nor merges.txt: fetch the "
                          f"tokenizer's files too")
        self.special = read_json(os.path.join(folder, "added_tokens.json"))
        ids = {token: i for token, i in ids.items() if token not in self.special}
        known = [*ids.values(), *self.special.values()]
        whole = all(type(i) is int and 0 <= i < 2**31 for i in known) and ids
        if not whole or len({*known}) < len(known) or "" in [*ids, *self.special]:
            raise Refused(f"{folder}: the ids of vocab.json and added_tokens.json are not whole "
                          f"numbers from 0 on, each once, of tokens with text: fetch both again")
        try:
            ranks = {bytes(to_byte[c] for c in token): i for token, i in ids.items()}
        except KeyError as e:
            raise Refused(f"{folder} has a vocabulary with {e}, not a character of a byte-level "
                          f"one")
        self.bpe = tiktoken.Encoding(folder, pat_str=PATTERN, mergeable_ranks=ranks,
                                     special_tokens=self.special)
        self.known = {*known}
        self.n_vocab = max(self.known) + 1

    def encode(self, text, special=False):
        """The token ids of a text, a list.   special: <|im_end|> and the like become one token.

        A whole chat is encoded in this way, even what its users typed [code]. Without `special`,
        they are ordinary text.
        """
        text = unicodedata.normalize("NFC", text)  # é becomes one character [code]
        allowed = "all" if special else set()
        return self.bpe.encode(text, allowed_special=allowed, disallowed_special=())

    def decode(self, ids):
        """The text of token ids. The model can produce ids without a token, which give no text."""
        return self.bpe.decode([i for i in ids if i in self.known])

    def chat(self, messages):
        """[{"role": …, "content": …}, …] as a text that ends where the next answer begins."""
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return "".join(turns) + "<|im_start|>assistant\n"
