# SPDX-License-Identifier: MIT
"""Checkpoints: one format of our own, and readers for others.

    python checkpoint.py mdlm.ckpt          # what is in a file: ours, MDLM's or the authors'

A checkpoint is one dict of tensors and plain values, so `torch.load(weights_only=True)` opens it:

    format     "soft-masked-mdlm/1"                  kind     "mdlm" or "dream-adapter"
    config     {field: value}                        step, seed
    model      {name: tensor}                        ema      {name: tensor}, backbone only [code]
    optimizer  {...}, only to resume the run         data     {path, n_tokens, sha256, val, keys}
    tokenizer  {name, vocab_size, mask_id, bos, eos}
    git, versions, metrics

keys: see data.KEYS. A dream-adapter has no ema and no tokenizer, and its data are {dialogues, base,
keys}. Every random draw is keyed by seed and step (data.rng), so no other random state is saved.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import platform
import subprocess
import types

import numpy as np
import torch

from launch import Refused, atomic, check_same, in_short, read_json, run
from mdlm import MDLM, ModelConfig
from softmask import SoftMask

# ---- any file ------------------------------------------------------------------------------------
FORMAT = "soft-masked-mdlm/1"
HUB_FILES = "model.safetensors", "pytorch_model.bin"


def load(path, kind=None):
    """The dict above, from a .pt, .ckpt, .safetensors or .bin, or the folder of a run or model.

    kind: raise Refused if one of our own files is of another kind.
    """
    if not path:
        raise Refused("--checkpoint=FILE is missing, such as out/stdlib/last.pt, which "
                      "`python train.py stdlib` makes")
    for name in ("last.pt", *HUB_FILES):
        if os.path.exists(os.path.join(path, name)):
            path = os.path.join(path, name)
    try:
        ckpt = read(path)
    except Exception as e:  # another file can raise anything
        if isinstance(e, OSError) and e.filename:  # cannot be opened
            raise
        raise Refused(f"{path} is not a complete checkpoint ({in_short(e)})")
    if "format" in ckpt:
        if kind:
            require(ckpt, path, kind=kind)
        # Refused if set: only our earlier studies set these, for another λ or another mix.
        require(ckpt.get("config", {}), path, arm="", variant="")
        return ckpt
    state = ckpt.get("state_dict", ckpt)
    if not any(name.endswith("vocab_embed.embedding") for name in state):
        raise Refused(f"{path} is not a model of MDLM's family: it has no vocab_embed.embedding")
    if state is ckpt:
        beside = os.path.join(os.path.dirname(path), "config.json")
        hub = os.path.basename(path) in HUB_FILES and os.path.exists(beside)
        return from_mdlm_family(state, settings=read_json(beside) if hub else None)
    shadow = (ckpt.get("ema") or {}).get("shadow_params")
    settings = plain_values((ckpt.get("hyper_parameters") or {}).get("config", {}))
    return from_mdlm_family(state, shadow, settings, ckpt["global_step"])


def read(path):
    """The dict in a file: one of ours, a training framework's, or bare weights."""
    if path.endswith(".safetensors"):
        _, metadata, _ = read_header(path)
        tensors = read_safetensors(path)
        if FORMAT in metadata:  # as in results/: the header holds the rest of the dict
            return json.loads(metadata[FORMAT]) | {"model": tensors}
        return tensors
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # a training framework's, which need not be installed
        # In place of the module pickle:
        reader = types.SimpleNamespace(__name__="inert", Unpickler=InertUnpickler,
                                       load=lambda f, **kw: InertUnpickler(f, **kw).load())
        ckpt = torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
    if not isinstance(ckpt, dict):
        raise TypeError(f"it holds a {type(ckpt).__name__}")
    return ckpt


def weights(path, ema=True):
    """A model's state_dict, and the rest of the checkpoint.

    ema: take the averaged θ, or the file's only one (in a step-N.pt, it is the average). False:
    take θ as trained, and raise Refused if the file has only one. ω is not averaged [code].
    """
    ckpt = load(path, "mdlm")
    state, average = ckpt.pop("model"), ckpt.pop("ema", None)
    if ema:
        state = state | (average or {})
    elif not average:
        raise Refused(f"{path} has one set of weights (in a step-N.pt, their average): leave out "
                      f"--ema=False, or give a last.pt")
    check_numbers(state, path)
    ckpt.pop("optimizer", None)
    return state, ckpt


def load_mdlm(path, ema=True):
    """An MDLM in eval mode, from any file that `load` reads. Its attribute `info` has the rest.

    ema: use the averaged backbone, as the authors' code does [code].
    """
    state, info = weights(path, ema)
    config = {name: value for name, value in info["config"].items()
              if name in ModelConfig.__dataclass_fields__}  # train.Config has more fields
    model = MDLM(ModelConfig(**config))
    model.load_state_dict(state)
    model.info = info
    return model.eval()


def load_last(path, kind, cfg, facts, may_differ, remedy=""):
    """A run's last.pt. Raises Refused unless its `config` equals cfg, and its `data` has the facts.

    facts: {name: value}.   may_differ: names of settings.   remedy: the end of the message.
    """
    ckpt = load(path, kind)
    now = dataclasses.asdict(cfg) | facts
    check_same(path, ckpt["config"] | ckpt["data"], now, now.keys() - may_differ, remedy)
    return ckpt


def check_numbers(state, path):
    """Raises Refused if a weight is not finite: decoding would silently produce nonsense."""
    for name, t in state.items():
        if not all(value.isfinite() for value in t.aminmax()):  # t.isfinite() would take memory
            raise Refused(f"{path}: {name} has values that are not finite numbers: download it "
                          f"again, or use an earlier checkpoint")


def save(path, **parts):
    """Write the dict described above, atomically. Raises OSError if the disk is full."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    ckpt = {"format": FORMAT, "git": git_version(), "versions": versions, **parts}
    try:
        with atomic(path) as tmp, open(tmp, "wb") as f:
            torch.save(ckpt, f)
    except (OSError, RuntimeError) as e:  # torch.save may hide the disk's error behind its own
        reason = e if isinstance(e, OSError) else e.__context__ or e
        raise OSError(f"{path}: {reason}")


def git_version():
    """{commit, dirty} of this source code, or {commit: "unknown"}"""
    folder = os.path.dirname(os.path.abspath(__file__))
    # Without --git-dir, a copy inside another repository would report the other's commit.
    command = ["git", f"--git-dir={folder}/.git", f"--work-tree={folder}", "describe", "--always",
               "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        found = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown"}
    return {"commit": found.removesuffix("-dirty"), "dirty": found.endswith("-dirty")}


# ---- another ω -----------------------------------------------------------------------------------
def with_omega(sm, mask_id, cfg):
    """sm with each ω that cfg gives, for decoding. Without sm, omega_s makes one, k = 3 [ours]."""
    names = "omega_s", "omega_a", "omega_b"
    given = {name: getattr(cfg, name) for name in names if getattr(cfg, name) is not None}
    if not given:
        return sm
    if sm is None and "omega_s" not in given:  # the default ω_s is almost 0
        raise Refused(f"{' and '.join(given)} for a model without SM: give it --omega_s, too")
    start = SoftMask(mask_id, **given)
    if sm is None:
        return start
    for name in given:
        raw = name.replace("omega", "raw")
        getattr(sm, raw).data.copy_(getattr(start, raw).data)
    return sm


# ---- MDLM's family -------------------------------------------------------------------------------
def from_mdlm_family(state, shadow=None, settings=None, step=0):
    """Our dict from weights of MDLM or of the authors' SM. Only prefixes and ω's names change.

    state: {name: tensor} with any prefix. The rotary embedding's buffer is checked, then dropped.
    shadow: the EMA, a bare list in the order of the parameters [code].
    settings: a hub model's config.json, or the configuration of a run (default: as released).
    """
    settings = settings or {}  # a run's are nested, a hub model's are not
    for section in ("algo", "model", "data", "optim"):
        settings = settings | settings.get(section, {})
    # sm_t_min, sm_t_max: the authors' code can limit SM to some times t.
    require(settings, "this checkpoint", model_type="mdlm", parameterization="subs", sm_t_min=0,
            sm_t_max=1, causal_attention=False, tokenizer_name_or_path="gpt2")
    [table] = [name for name in state if name.endswith("vocab_embed.embedding")]
    prefix = table.removesuffix("vocab_embed.embedding")
    unread = [name for name in state if not name.startswith((prefix, "tran_head.raw_"))]
    if unread:
        raise Refused(f"this checkpoint has tensors that nothing here reads, such as {unread[0]}")
    net = {"net." + name.removeprefix(prefix): t for name, t in state.items()
           if name.startswith(prefix)}
    V, D = net["net.vocab_embed.embedding"].shape
    blocks = {name.split(".")[2] for name in net if name.startswith("net.blocks.")}
    inv_freq = net.pop("net.rotary_emb.inv_freq")                              # (head width / 2,)
    n_head = D // (2 * len(inv_freq))
    expected = 10000 ** (-torch.arange(len(inv_freq)) / len(inv_freq))
    # A file in bf16 is off by up to 0.4 %.
    same_base = torch.allclose(inv_freq.float(), expected, rtol=0.01)
    n_heads = settings.get("n_heads", n_head)
    if not same_base or n_heads != n_head:
        raise Refused(f"rotary_emb.inv_freq is not that of base 10000 with n_heads = {n_heads}")
    config = {"n_layer": len(blocks), "n_embd": D, "n_head": n_head, "vocab_size": V,
              "n_cond": len(net["net.sigma_map.mlp.2.weight"]), "mask_id": V - 1,
              "length": settings.get("length", settings.get("model_length", 1024)),
              "dropout": settings.get("dropout", 0.1), "soft_mask": "tran_head.raw_scale" in state,
              "time_conditioning": settings.get("time_conditioning", False)}
    omega = {}
    if config["soft_mask"]:
        config["k"], omega = omega_of_authors(settings.get("tran_head") or {}, state)
    special = {"name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}
    return {"format": FORMAT, "kind": "mdlm", "config": config, "step": step, "model": net | omega,
            "ema": dict(zip(net, shadow, strict=True)) if shadow else None, "tokenizer": special}


def omega_of_authors(settings, state):
    """(k, tensors of ω) of the authors' soft mask, from its settings and the file's tensors"""
    require(settings, "the soft mask", fixed_lambda=None)
    names = {"sm.raw_s": "raw_scale", "sm.raw_a": "raw_steep", "sm.raw_b": "raw_centre_neg"}
    mix = settings.get("transparency_alg", "mixinputs_with_topk")
    k = {"mixinputs_with_topk": settings.get("mixinputs_k", 3), "mixinputs_with_temp": None}[mix]
    if k is None:  # top-k has a temperature, too, but ignores it [code]
        names["sm.raw_tau"] = "raw_temperature"
    return k, {ours: state["tran_head." + theirs] for ours, theirs in names.items()}


def require(settings, where, **wanted):
    """Raises Refused if a setting is there, but not as wanted: results would be silently wrong."""
    for name, want in wanted.items():
        if settings.get(name, want) != want:
            raise Refused(f"{where} has {name} = {settings[name]!r}, but only {want!r} works here")


# ---- training files ------------------------------------------------------------------------------
HARMLESS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2",
            "torch._utils _rebuild_parameter"}


class InertUnpickler(pickle.Unpickler):
    """Loads tensors and plain values. Any other class or function that a pickle names is Inert."""

    def find_class(self, module, name):
        if f"{module} {name}" in HARMLESS:
            return super().find_class(module, name)
        return Inert  # torch.load reads the tensors' data itself, without find_class


class Inert(dict):
    """Stands in for any foreign class: accepts all arguments, and keeps only the pickled state."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __setstate__(self, state):
        self.update(state if isinstance(state, dict) else {"state": state})

    def append(self, item):  # for a deque and its like
        pass


def plain_values(node):
    """The plain values in an inert omegaconf tree, which keeps them in _content and _val."""
    if isinstance(node, dict):
        node = node.get("_content", node.get("_val", node))
    if isinstance(node, dict):
        return {k: plain_values(v) for k, v in node.items()}
    return node


# ---- safetensors: the header's length in 8 bytes, the header in JSON, the raw tensors ------------
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool}


def read_safetensors(path):
    """{name: tensor} of a safetensors file. A tensor is read from disk when it is used."""
    header, _, offset = read_header(path)
    # torch wants writable memory. Mode "c" is copy-on-write, so the file never changes.
    data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset))
    tensors = {}
    for name, entry in header.items():
        dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
        part = data[start:end]
        if start % dtype.itemsize:  # view() needs an aligned address
            part = part.clone()
        tensors[name] = part.view(dtype).view(entry["shape"])
    return tensors


def write_safetensors(path, tensors, metadata=None):
    """Write a safetensors file, atomically.   tensors: {name: tensor}.   metadata: {str: str}."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to start at a multiple of 8
    with atomic(path) as tmp, open(tmp, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            f.write(raw.numpy().data)


def read_header(path):
    """({name: dtype, shape, offsets}, metadata, bytes before the tensors) of a safetensors file"""
    with open(path, "rb") as f:
        offset, size = 8 + int.from_bytes(f.read(8), "little"), os.path.getsize(path)
        with contextlib.suppress(ValueError):  # not JSON
            header = json.loads(f.read(min(offset - 8, size)))
            metadata = header.pop("__metadata__", {})
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if offset + end <= size:
                return header, metadata, offset
    raise Refused(f"{path} is not a safetensors file, or is cut short: download it again")


# ---- what is in a file ---------------------------------------------------------------------------
@dataclasses.dataclass
class Config:
    checkpoint: str = ""  # the file or folder to describe


def main(cfg):
    ckpt = load(cfg.checkpoint)
    ema, optimizer = ("with" if ckpt.get(name) else "no" for name in ("ema", "optimizer"))
    n_params = sum(t.numel() for t in ckpt["model"].values())
    print(f"{cfg.checkpoint}: {ckpt['kind']}, {n_params:,} parameters, step {ckpt['step']}, "
          f"{ema} EMA, {optimizer} optimizer")
    for part in ("config", "tokenizer", "data", "git", "versions", "metrics"):
        print(f"  {part}: {ckpt.get(part)}")
    omega = {name.removeprefix("sm."): t for name, t in ckpt["model"].items()
             if name.startswith("sm.")}
    if omega:
        sm = SoftMask(0, ckpt["config"]["k"])
        sm.load_state_dict(omega)
        print(f"  {sm}")


if __name__ == "__main__":
    run(main, Config, paths="checkpoint")
