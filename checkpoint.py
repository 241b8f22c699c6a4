# SPDX-License-Identifier: MIT
"""Checkpoints: one format of our own, and readers for the formats of others.

A checkpoint is one dict of tensors and plain values, so `torch.load(weights_only=True)` opens it:

    format     "soft-masked-mdlm/1"                  kind     "mdlm" or "dream-adapter"
    config     {field: value}                        step, seed
    model      {name: tensor}                        ema      {name: tensor}, backbone only [code]
    optimizer  {...}, only where the run goes on     data     {path, n_tokens, sha256}
    tokenizer  {name, vocab_size, mask_id, bos, eos}
    git, versions, metrics

step and seed are the whole state of the random numbers, because every draw is keyed by them
(data.rng). `load` gives the files of others as the same dict. None of these files can run code
here: see `load_inert`.

    python checkpoint.py --checkpoint=mdlm.ckpt                  # what is it?
    python checkpoint.py --checkpoint=mdlm.ckpt --out=mdlm.pt    # convert it to ours
    python checkpoint.py --checkpoint=mdlm.ckpt --out=mdlm.safetensors
    python checkpoint.py --checkpoint=mdlm.pt --out=FOLDER/      # for MDLM's class on the hub

Not here: model classes, adapters of Dream (dream.py).
"""

import dataclasses
import json
import os
import pickle
import platform
import subprocess
import types

import numpy as np
import torch

from launch import Refused, atomic, read_json, run, write_text
from softmask import SoftMask

FORMAT = "soft-masked-mdlm/1"
PARTS = {"kind": str, "config": dict, "step": int, "model": dict, "tokenizer": dict, "ema": dict,
         "optimizer": dict, "data": dict, "metrics": dict}

# -------------------------------------------------------------------------------------------------
# ours


def git_version():
    """{commit, dirty} of this source, which a checkpoint records. {} where there is no git."""
    def git(*args):
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.check_output(["git", *args], cwd=folder, stderr=subprocess.DEVNULL,
                                       text=True).strip()
    try:
        dirty = bool(git("status", "--porcelain", "-uno"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        return {}


def save(path, **parts):
    """Write the dict described above, atomically."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with atomic(path) as tmp:
        torch.save({"format": FORMAT, "git": git_version(), "versions": versions, **parts}, tmp)


# -------------------------------------------------------------------------------------------------
# safetensors: 8 bytes with the length of the header, the header in JSON, the raw tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool}


def read_safetensors(path, metadata=None):
    """{name: tensor}, memory-mapped: a tensor is read from disk when it is used.

    metadata: a dict to which the metadata of the header is added.
    Raises Refused when the file is not whole.
    """
    try:
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(min(n, os.path.getsize(path))))
        # Torch wants memory that can be written. Mode "c" is copy on write: the file never changes.
        data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=8 + n))
        own = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
            part = data[start:end]
            if start % dtype.itemsize:  # view() refuses an address that is not aligned
                part = part.clone()
            tensors[name] = part.view(dtype).view(entry["shape"])
    except FileNotFoundError:
        raise Refused(f"{path} does not exist")
    except (OverflowError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise Refused(f"{path} is truncated or not a safetensors file ({type(e).__name__}): "
                      f"fetch it again")
    if metadata is not None:
        metadata.update(own)
    return tensors


def write_safetensors(path, tensors, metadata=None):
    """Write such a file, atomically.   tensors: {name: tensor}.   metadata: {str: str}."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data at a multiple of 8 bytes
    with atomic(path) as tmp, open(tmp, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            f.write(raw.numpy().data)


# -------------------------------------------------------------------------------------------------
# pickles of others, read without running code


class Inert(dict):
    """Replaces every foreign class in a pickle. It takes any arguments and only keeps its state."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __call__(self, *args, **kwargs):
        return Inert()

    def __setstate__(self, state):
        self.update(state if isinstance(state, dict) else {"state": state})

    def append(self, item):
        self.setdefault("items", []).append(item)

    def extend(self, items):
        for item in items:
            self.append(item)


HARMLESS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2",
            "torch._utils _rebuild_parameter", "torch Size"}
HARMLESS |= {f"{module} {name}" for module in ("builtins", "__builtin__") for name in
             ("dict", "list", "tuple", "set", "frozenset", "int", "float", "bool", "str", "bytes",
              "complex")}


class InertUnpickler(pickle.Unpickler):
    """Loads tensors and plain values. A pickle could call any function, but here it finds none."""

    def find_class(self, module, name):
        if f"{module} {name}" in HARMLESS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return Inert  # never for the data of a tensor: torch's own reader takes that first


def load_inert(path):
    """torch.load for the checkpoint of a training framework that is not installed."""
    reader = types.SimpleNamespace(__name__="inert", Unpickler=InertUnpickler,
                                   load=lambda f, **kw: InertUnpickler(f, **kw).load())
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)


def plain_values(node):
    """The values in an inert configuration tree. omegaconf keeps them in _content and _val."""
    if isinstance(node, dict):
        node = node.get("_content", node.get("_val", node))
    if isinstance(node, dict):
        return {k: plain_values(v) for k, v in node.items()}
    return node


# -------------------------------------------------------------------------------------------------
# models of others

OMEGA = {"sm.raw_s": "raw_scale", "sm.raw_a": "raw_steep", "sm.raw_b": "raw_centre_neg"}
# Fields in the config.json of MDLM's class on the hub, and our names for them.
HUB = {"n_blocks": "n_layer", "n_heads": "n_head", "hidden_dim": "n_embd", "cond_dim": "n_cond",
       "vocab_size": "vocab_size", "model_length": "length", "dropout": "dropout",
       "time_conditioning": "time_conditioning"}
# The configuration of a training run has two other names.
NAMES = HUB | {"hidden_size": "n_embd", "length": "length"}
HUB_FILES = "model.safetensors", "pytorch_model.bin"
# Only these values are implemented. With others, the same tensors are another model, or SM is on
# only at some t.
ONLY = {"model_type": "mdlm", "parameterization": "subs", "causal_attention": False,
        "tokenizer_name_or_path": "gpt2", "sm_t_min": 0, "sm_t_max": 1}
# Names of mixes in the authors' code and in a fork of it, and their names in arms.py. slerp_sm is
# left out: it goes towards the Fréchet mean of the k directions, Slerp towards the direction of
# their mean.
MIXES = {"mixinputs_with_topk": "", "mixinputs_with_temp": "", "lerp_renorm": "renorm",
         "slerp_euclid_mean": "slerp"}


def sizes(model):
    """The fields of the configuration that the tensors of an MDLM show."""
    V, D = model["net.vocab_embed.embedding"].shape
    blocks = {name.split(".")[2] for name in model if name.startswith("net.blocks.")}
    return {"n_layer": len(blocks), "n_embd": D, "vocab_size": V,
            "n_cond": len(model["net.sigma_map.mlp.2.weight"])}


def rotary_frequencies(width):
    """rotary_emb.inv_freq, a buffer of their models, for heads of this width: (width/2,)"""
    return 1 / 10000 ** (torch.arange(0, width, 2) / width)


def read_soft_mask(head, state):
    """A soft mask of the authors' code, or of a fork: (fields of our configuration, tensors).

    head: its settings.   state: all tensors of the file.
    Raises Refused if its mix is neither the paper's nor in arms.py.
    """
    mix, fixed = head.get("transparency_alg", "mixinputs_with_topk"), head.get("fixed_lambda")
    arm, k = MIXES.get(mix), head.get("mixinputs_k", 3)
    names = OMEGA
    if mix == "mixinputs_with_temp":  # top-k has a temperature too, but does not use it [code]
        k, names = None, OMEGA | {"sm.raw_tau": "raw_temperature"}
    omega = {ours: state["tran_head." + theirs] for ours, theirs in names.items()}
    if fixed is not None:  # then every λ is this number
        arm = "constant" if mix == "mixinputs_with_topk" and 0 <= fixed <= 1 else None
        omega["sm.raw_s"] = torch.logit(torch.tensor(float(fixed)), eps=1e-6)
    if arm is None:
        raise Refused(f"a soft mask with transparency_alg = {mix!r}, fixed_lambda = {fixed!r} is "
                      f"not implemented: known are {', '.join(MIXES)}, and a fixed_lambda in "
                      f"[0, 1] for the first of them")
    start = {"omega_s": min(fixed, 1 - 1e-6)} if arm == "constant" else {}  # Constant needs it
    return {"arm": arm, "k": k} | start, omega


def from_mdlm_family(state, shadow=None, settings=None, step=0):
    """Weights of MDLM, or of the authors' SM, as our dict. Only the prefix of the names changes.

    state: {name: tensor} under any prefix.
    shadow: the EMA, a bare list in the order of the parameters [code].
    settings: config.json of a folder from the hub, or the configuration of a run. What no setting
        and no tensor shows has the paper's value.
    Raises Refused when there is no MDLM in it, or one that would compute something else here.
    """
    anchor = next((name for name in state if name.endswith("vocab_embed.embedding")), None)
    if anchor is None:
        raise Refused(f"no MDLM in this checkpoint: none of its {len(state)} tensors is called "
                      f"…vocab_embed.embedding")
    said = dict(settings or {})
    for section in ("algo", "model", "data", "optim"):
        said |= said.get(section) or {}
    for name, want in ONLY.items():
        if said.get(name, want) != want:
            raise Refused(f"this checkpoint has {name} = {said[name]!r}, only {want!r} is "
                          f"implemented")
    prefix = anchor.removesuffix("vocab_embed.embedding")
    net = {"net." + name.removeprefix(prefix): t for name, t in state.items()
           if name.startswith(prefix)}
    unread = [name for name in state if not name.startswith((prefix, "tran_head.raw_"))]
    if unread:
        raise Refused(f"this checkpoint has tensors that nothing here reads, as {unread[0]}: its "
                      f"model works in another way")
    inv_freq = net.pop("net.rotary_emb.inv_freq", None)
    if shadow is not None and len(shadow) != len(net):
        raise Refused(f"the EMA has {len(shadow)} tensors for {len(net)} parameters: not a "
                      f"checkpoint of this model")
    config, omega = sizes(net), {}
    V, D = config["vocab_size"], config["n_embd"]
    config |= {"n_head": max(1, D // 64 if inv_freq is None else D // (2 * len(inv_freq))),
               "mask_id": V - 1, "length": 1024, "dropout": 0.1, "time_conditioning": False,
               "soft_mask": "tran_head.raw_scale" in state}
    config |= {ours: said[theirs] for theirs, ours in NAMES.items() if theirs in said}
    if config["soft_mask"]:
        fields, omega = read_soft_mask(said.get("tran_head") or {}, state)
        config |= fields
    if inv_freq is not None:
        here = rotary_frequencies(D // config["n_head"])
        # A copy in bf16 is off by at most 0.4 %, base 11000 by more than 1 % from width 4 on.
        if len(inv_freq) != len(here) or not torch.allclose(inv_freq.float(), here, rtol=0.01):
            raise Refused(f"rotary_emb.inv_freq of this checkpoint is not that of base 10000 with "
                          f"{config['n_head']} heads: nothing else is implemented")
    special = {"name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}
    return {"format": FORMAT, "kind": "mdlm", "config": config, "step": step,
            "model": net | omega, "ema": None if shadow is None else dict(zip(net, shadow)),
            "tokenizer": said.get("tokenizer", special)}


def export(folder, ckpt):
    """Write the folder that MDLM's class on the hub reads: config.json and model.safetensors.

    It holds the EMA, like the published one. It never holds ω: that class has no place for it.
    Raises Refused for a model that this class would read as another one.
    """
    config = ckpt["config"]
    if ckpt["kind"] != "mdlm" or config["mask_id"] != config["vocab_size"] - 1:
        raise Refused(f"{folder} can only be written of an MDLM whose [MASK] is the last token")
    weights = ckpt["model"] | (ckpt.get("ema") or {})
    state = {"backbone." + name.removeprefix("net."): t for name, t in weights.items()
             if name.startswith("net.")}
    width = config["n_embd"] // config["n_head"]
    state["backbone.rotary_emb.inv_freq"] = rotary_frequencies(width)  # without it, no strict load
    write_safetensors(os.path.join(folder, "model.safetensors"), state, {"format": "pt"})
    fields = {theirs: config[ours] for theirs, ours in HUB.items()}
    fields |= {"architectures": ["MDLM"], "model_type": "mdlm", "tokenizer": ckpt["tokenizer"]}
    write_text(os.path.join(folder, "config.json"), json.dumps(fields, indent=2) + "\n")


# -------------------------------------------------------------------------------------------------
# files of any format


def check_config(ckpt, path):
    """Raises Refused when the configuration of an MDLM contradicts its tensors.

    This is checked before a model is built: 1e7 layers, or a length of 1e9, would take all memory.
    """
    ids = {"tokenizer's " + name: ckpt["tokenizer"].get(name) for name in ("mask_id", "bos", "eos")}
    config = ckpt["config"] | ids
    allowed = {name: [size] for name, size in sizes(ckpt["model"]).items()}
    V, D = allowed["vocab_size"][0], allowed["n_embd"][0]
    drop = config.get("dropout", 0)
    allowed |= {"n_head": range(1, D + 1), "length": range(1, 2**20), "mask_id": range(V),
                "k": [None] if config.get("k") is None else range(1, V + 1),
                "dropout": [drop] if 0 <= drop < 1 else [0, 1],
                "time_conditioning": [False, True], "soft_mask": ["sm.raw_s" in ckpt["model"]]}
    allowed |= dict.fromkeys(ids, range(V))
    for name, values in allowed.items():
        if config.get(name) not in values:
            limits = f"{values[0]} to {values[-1]}" if len(values) > 1 else values[0]
            raise Refused(f"the weights in {path} do not fit its configuration: {name} = "
                          f"{config.get(name)!r}, they need {limits}")


def load(path):
    """Any checkpoint as the dict at the top of this file.

    path: ours, a Lightning .ckpt (MDLM's and the authors'), .safetensors, pytorch_model.bin, or a
        folder: of the hub, with one of the last two and config.json, or of a run, with last.pt.
    Raises Refused for a file that is none of them, or whose parts contradict each other.
    """
    if os.path.isdir(path):
        files = [os.path.join(path, name) for name in (*HUB_FILES, "last.pt")]
        there = list(filter(os.path.exists, files))
        if files[-1] in there[1:]:
            raise Refused(f"{path} is a run's folder with an export in it: give one of the files, "
                          f"{' or '.join(there)}")
        path = there[0] if there else path
    if not os.path.isfile(path):
        raise Refused(f"no checkpoint at {path or '(no path given)'}: give the path of a file, or "
                      f"of a folder with last.pt or {' or '.join(HUB_FILES)}")
    try:
        ckpt = interpret(path)
        there = {name for name, part in ckpt.items() if part is not None}
        needed = ["kind", "config", "step", "model"] + ["tokenizer"] * (ckpt.get("kind") == "mdlm")
        odd = [name for name, kind in PARTS.items()
               if name in there.union(needed) and not isinstance(ckpt.get(name), kind)]
        if ckpt["format"] != FORMAT or odd:
            found = ", ".join(odd) or ckpt["format"]
            raise Refused(f"{path} is not a whole checkpoint of format {FORMAT}: {found}")
        if ckpt["kind"] == "mdlm":
            check_config(ckpt, path)
    except Refused:
        raise
    except Exception as e:  # a broken or hostile file can raise anything
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise Refused(f"{path} is truncated or not a checkpoint ({reason})")
    return ckpt


def interpret(path):
    """The file as our dict, from any of the formats. It can raise anything for other files."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, "config.json")
    hub = read_json(beside) if name in HUB_FILES and os.path.exists(beside) else None
    if path.endswith(".safetensors"):
        metadata = {}
        tensors = read_safetensors(path, metadata)
        ours = json.loads(metadata.get(FORMAT, "null"))  # written by `main` below
        return {**ours, "model": tensors} if ours else from_mdlm_family(tensors, settings=hub)
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        ckpt = load_inert(path)
    if "format" in ckpt:
        return ckpt
    if "state_dict" in ckpt:
        shadow = (ckpt.get("ema") or {}).get("shadow_params")
        settings = plain_values((ckpt.get("hyper_parameters") or {}).get("config", {}))
        return from_mdlm_family(ckpt["state_dict"], shadow, settings, ckpt.get("global_step", 0))
    tensors = {k: t for k, t in ckpt.items() if isinstance(t, torch.Tensor)}
    return from_mdlm_family(tensors, settings=hub)


@dataclasses.dataclass
class Config:
    checkpoint: str = ""  # the file or folder to describe
    out: str = ""         # also convert it: NAME.safetensors or FOLDER/ hold the EMA weights, and
                          # any other name is a checkpoint of our format
    bf16: bool = False    # NAME.safetensors: the backbone in bfloat16, half the size. ω stays fp32


def main(cfg):
    if cfg.bf16 and not cfg.out.endswith(".safetensors"):
        raise Refused(f"--bf16 is of a file NAME.safetensors, and --out={cfg.out} is none")
    ckpt = load(cfg.checkpoint)
    ema, optimizer = ("with" if ckpt.get(name) else "no" for name in ("ema", "optimizer"))
    n_params = sum(t.numel() for t in ckpt["model"].values())
    print(f"{cfg.checkpoint}: {ckpt['kind']}, {n_params:,} parameters, step {ckpt['step']}, "
          f"{ema} EMA, {optimizer} optimizer")
    if ckpt["kind"] == "mdlm" and not ckpt.get("ema"):
        print("  No EMA beside the weights: published ones are the EMA (reported of mdlm-owt).\n"
              "  The paper continues from raw weights, so that a continuation from an EMA is not "
              "the paper's.")
    for part in ("config", "tokenizer", "data", "git", "versions", "metrics"):
        print(f"  {part}: {ckpt.get(part)}")
    raw = {name.removeprefix("sm."): t for name, t in ckpt["model"].items()
           if name.startswith("sm.")}
    if raw:
        sm = SoftMask(0, k=None if "raw_tau" in raw else 1)
        sm.load_state_dict(raw)
        omega = dict(zip(("ω_s", "ω_a", "ω_b"), sm.omega)) | ({} if sm.k else {"τ": sm.tau})
        print("  omega:", ", ".join(f"{name} {value:.4g}" for name, value in omega.items()))
    if cfg.out.endswith("/"):
        export(cfg.out, ckpt)
        if raw:
            print(f"ω is not in {cfg.out}, so the model there decodes with plain masks only")
    elif cfg.out.endswith(".safetensors"):
        rest = {k: v for k, v in ckpt.items() if k not in ("model", "ema", "optimizer")}
        weights = ckpt["model"] | (ckpt.get("ema") or {})
        if cfg.bf16:
            weights = {name: t if name.startswith("sm.") else t.bfloat16()
                       for name, t in weights.items()}
        write_safetensors(cfg.out, weights, {FORMAT: json.dumps(rest)})
    elif cfg.out:
        save(cfg.out, **{k: v for k, v in ckpt.items() if k not in ("format", "git", "versions")})


if __name__ == "__main__":
    run(main, Config)
