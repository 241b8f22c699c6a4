# SPDX-License-Identifier: MIT
"""Checkpoints: one format of our own, and readers for others.

    python checkpoint.py mdlm.ckpt          # what is in a file: ours, MDLM's or the authors'

A checkpoint is one dict of tensors and plain values, so `torch.load(weights_only=True)` opens it:

    format     "soft-masked-mdlm/1"                  kind     "mdlm" or "dream-adapter"
    config     {field: value}; SoftMask: class_of    step, seed, metrics, git, versions
    model      {name: tensor}                        ema      {name: tensor}, backbone only [code]
    optimizer  {...}, only to resume the run         data     {path, n_tokens, sha256, val, keys}
    tokenizer  {name, vocab_size, mask_id, bos, eos}

A dream-adapter has no ema and no tokenizer, and its data are {dialogues, base, keys}. keys is
data.KEYS: every random draw is keyed by seed and step, so no other random state is saved.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import platform
import subprocess

import numpy as np
import torch

from launch import Refused, atomic, check_same, read_json, run
from mdlm import MDLM, ModelConfig
from softmask import SoftMask

FORMAT = "soft-masked-mdlm/1"
OMEGA = {"tran_head.raw_scale": "sm.raw_s", "tran_head.raw_steep": "sm.raw_a",
         "tran_head.raw_centre_neg": "sm.raw_b", "tran_head.raw_temperature": "sm.raw_tau"}


def load(path, kind=None):
    """The dict above, from a .pt, .ckpt, .safetensors or .bin, or the folder of a run or model."""
    for name in "last.pt", "model.safetensors", "pytorch_model.bin":
        if os.path.exists(os.path.join(path, name)):
            path = os.path.join(path, name)
    with readable(path):
        if path.endswith(".safetensors"):
            ckpt, metadata = read_safetensors(path, with_metadata=True)
            if FORMAT in metadata:  # as in results/: the header holds the rest of the dict
                ckpt = json.loads(metadata[FORMAT]) | {"model": ckpt}
        else:
            try:
                ckpt = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError:  # a training framework's, which need not be installed
                ckpt = torch.load(path, "cpu", InertPickle, weights_only=False)
        if ckpt.get("format") != FORMAT:
            ckpt = from_mdlm_family(ckpt, path)
        require(ckpt, path, kind=kind or ckpt.get("kind"))
    return ckpt


@contextlib.contextmanager
def readable(path):
    """Whatever a broken or foreign file raises in this block becomes Refused, in one line."""
    try:
        yield
    except BaseException as e:  # a panic of tiktoken is not an Exception
        if isinstance(e, (Refused, KeyboardInterrupt, SystemExit)) or getattr(e, "filename", None):
            raise
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise Refused(f"{path} is not a complete checkpoint that can be read here ({reason})")


def load_mdlm(path, ema=True, SoftMask=SoftMask):
    """An MDLM in eval mode, from any file that `load` reads. Its `info` is the rest of the dict.

    ema: take the averaged θ, or the file's only one (a step-N.pt has its average). False: take θ as
    trained. ω is not averaged [code].   SoftMask: the class that it was trained with.
    Raises Refused if the file has no such θ, or another class.
    """
    info = load(path, "mdlm")
    with readable(path):
        state, average, _ = (info.pop(name, None) for name in ("model", "ema", "optimizer"))
        if not (ema or average):
            raise Refused(f"{path} has one set of weights: leave out --ema=False")
        names = info["config"].keys() & ModelConfig.__dataclass_fields__  # train.Config has more
        cfg = ModelConfig(**{name: info["config"][name] for name in names})
        model = MDLM(cfg)
        if model.sm:
            model.sm = SoftMask(cfg.mask_id, cfg.k, cfg.omega_s, cfg.omega_a, cfg.omega_b)
        theirs = info["config"].get("SoftMask")
        if theirs != class_of(model.sm):
            raise Refused(f"{path} has a soft mask of the class {theirs or 'SoftMask'}: in Python, "
                          f"checkpoint.load_mdlm(path, SoftMask={theirs or 'SoftMask'}) loads it")
        state |= (average or {}) if ema else {}
        check_numbers(state, path)
        model.load_state_dict(state)
    model.info = info
    return model.eval()


def class_of(sm):
    """`SoftMask` in a file: the class of sm, if it is one's own. With another, ω says another λ."""
    name = type(sm).__name__
    return None if sm is None or (type(sm).__module__, name) == ("softmask", "SoftMask") else name


def load_last(path, kind, cfg, sm, facts, may_differ, remedy=""):
    """A run's last.pt. Raises Refused if cfg, sm's class or a fact differs and may not."""
    ckpt = load(path, kind)
    now = dataclasses.asdict(cfg) | facts | {"SoftMask": class_of(sm)}
    check_same(path, ckpt["config"] | ckpt["data"], now, now.keys() - may_differ, remedy)
    return ckpt


def check_numbers(state, path):
    """Raises Refused if a weight is not finite: decoding would silently produce nonsense."""
    for name, t in state.items():
        if not all(value.isfinite() for value in t.aminmax()):  # t.isfinite() would take memory
            raise Refused(f"{path}: {name} has values that are not finite: use another checkpoint")


def save(path, **parts):
    """Write the dict described above, atomically. Raises OSError if the disk is full."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        with atomic(path) as tmp, open(tmp, "wb") as f:
            torch.save({"format": FORMAT, "git": git_version(), "versions": versions, **parts}, f)
    except (OSError, RuntimeError) as e:  # torch.save may hide the disk's error behind its own
        raise OSError(*(e if isinstance(e, OSError) else e.__context__ or e).args, path)


def git_version():
    """{commit, dirty} of this source code, or {commit: "unknown"}"""
    # Without --git-dir, a copy inside another repository would report the other's commit.
    command = "git --git-dir=.git --work-tree=. describe --always --exclude=* --abbrev=40 --dirty"
    try:
        found = subprocess.check_output(command.split(), cwd=os.path.dirname(__file__) or ".",
                                        stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown"}
    return {"commit": found.strip().removesuffix("-dirty"), "dirty": "-dirty" in found}


def with_omega(sm, mask_id, cfg):
    """sm with each ω that cfg gives, for decoding. Without sm, omega_s makes one, k = 3 [ours]."""
    given = {k: v for k, v in vars(cfg).items() if k.startswith("omega_") and v is not None}
    if sm is None and given and "omega_s" not in given:  # the default ω_s is almost 0
        raise Refused(f"{' and '.join(given)} for a model without SM: give it --omega_s, too")
    try:
        start = SoftMask(mask_id, **given) if given else None
    except ValueError as e:
        raise Refused(e)
    for raw in (name.replace("omega", "raw") for name in given if sm):
        getattr(sm, raw).data.copy_(getattr(start, raw).data)
    return sm or start


# ---- MDLM's family -------------------------------------------------------------------------------
def from_mdlm_family(file, path):
    """Our dict from weights of MDLM or of the authors' SM. Only prefixes and ω's names change.

    file: a training checkpoint, or {name: tensor} with any prefix, as on the hub.
    Its settings are its own, or those of a config.json beside it (default: as released).
    """
    state, beside = file.get("state_dict", file), os.path.join(os.path.dirname(path), "config.json")
    tables = [name for name in state if name.endswith("vocab_embed.embedding")]
    if not tables:
        raise Refused(f"{path} is not a model of MDLM's family: it has no vocab_embed.embedding")
    prefix = min(tables, key=len).removesuffix("vocab_embed.embedding")
    settings = plain_values(file.get("hyper_parameters") or {}).get("config")
    settings = settings or (read_json(beside) if os.path.exists(beside) else {})
    for section in "algo", "model", "data", "optim", "tran_head":  # a hub model's are not nested
        settings |= settings.get(section) or {}
    require(settings, path, model_type="mdlm", parameterization="subs", causal_attention=False,
            tokenizer_name_or_path="gpt2", fixed_lambda=None, sm_t_min=0, sm_t_max=1)  # SM at all t
    model = {OMEGA.get(name, name.replace(prefix, "net.", 1)): t for name, t in state.items()}
    V, D = model["net.vocab_embed.embedding"].shape
    n_head = int(settings.get("n_heads") or 0)
    inv_freq = model.pop("net.rotary_emb.inv_freq", None)                      # (head width / 2,)
    if inv_freq is not None:
        d = 2 * len(inv_freq)
        n_head, expected = n_head or D // d, 10000 ** (-torch.arange(0, d, 2) / d)
        if n_head * d != D or not torch.allclose(inv_freq.float(), expected, rtol=0.01):  # bf16
            raise Refused(f"{path}: inv_freq is not that of base 10000 with n_heads = {n_head}")
    if not n_head:
        raise Refused(f"{path}: give n_heads, its number of heads, in a config.json beside it")
    k = {"mixinputs_with_topk": settings.get("mixinputs_k", 3),
         "mixinputs_with_temp": None}[settings.get("transparency_alg", "mixinputs_with_topk")]
    if k:  # top-k has a temperature, too, but ignores it [code]
        model.pop("sm.raw_tau", None)
    blocks = {name.split(".")[2] for name in model if name.startswith("net.blocks.")}
    cfg = ModelConfig(
        n_layer=int(settings.get("n_blocks") or len(blocks)), n_head=n_head, n_embd=D, vocab_size=V,
        n_cond=len(model["net.sigma_map.mlp.2.weight"]), mask_id=V - 1, k=k,
        length=settings.get("length", settings.get("model_length", 1024)),
        dropout=settings.get("dropout", 0.1), soft_mask="sm.raw_s" in model,
        time_conditioning=settings.get("time_conditioning", False))
    with torch.device("meta"):
        empty = MDLM(cfg)
    empty.load_state_dict(model, assign=True)  # raises if a tensor is missing, or nothing reads it
    ema = file.get("ema")
    if ema:  # a bare list in the order of the parameters [code]
        names = [f"net.{name}" for name, _ in empty.net.named_parameters()]
        ema = dict(zip(names, ema["shadow_params"], strict=True))
    return {"format": FORMAT, "kind": "mdlm", "config": vars(cfg), "model": model, "ema": ema,
            "step": int(file.get("global_step", 0)), "tokenizer": {
                "name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}}


def require(settings, where, **wanted):
    """Raises Refused if a setting is there, but not as wanted: results would be silently wrong."""
    for name, want in wanted.items():
        if settings.get(name, want) != want:
            raise Refused(f"{where} has {name} = {settings[name]!r}, but only {want!r} works here")


class InertPickle:
    """In place of the module pickle. Whatever a file names becomes Inert, except for tensors."""
    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if f"{module}.{name}" in ("collections.OrderedDict", "torch._utils._rebuild_tensor_v2",
                                      "torch._utils._rebuild_parameter"):
                return super().find_class(module, name)
            return Inert  # torch.load reads the tensors' data itself, without find_class

    def load(f, **options):
        return InertPickle.Unpickler(f, **options).load()


class Inert(dict):
    """Stands in for any foreign class: accepts all arguments, and keeps only the pickled state."""
    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.update(state if isinstance(state, dict) else {})

    def append(self, item):  # for a deque and its like
        pass


def plain_values(node):
    """The plain values in an inert omegaconf tree, which keeps them in _content and _val."""
    if isinstance(node, dict):
        node = node.get("_content", node.get("_val", node))
    return {k: plain_values(v) for k, v in node.items()} if isinstance(node, dict) else node


# ---- safetensors: the header's length in 8 bytes, the header in JSON, the raw tensors ------------
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool}


def read_safetensors(path, with_metadata=False):
    """{name: tensor} of a safetensors file. A tensor is read from disk when it is used."""
    tensors = {}
    with readable(path), open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        metadata = header.pop("__metadata__", None) or {}
        # torch wants writable memory. Mode "c" is copy-on-write, so the file never changes.
        data = torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=f.tell()))
        for name, entry in header.items():
            dtype, (start, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
            # view() needs an aligned address.
            part = data[start:end].clone() if start % dtype.itemsize else data[start:end]
            tensors[name] = part.view(dtype).view(entry["shape"])
    return (tensors, metadata) if with_metadata else tensors


def write_safetensors(path, tensors, metadata=None):
    """Write a safetensors file, atomically.   tensors: {name: tensor}.   metadata: {str: str}."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {"__metadata__": metadata or {}}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers expect the data to start at a multiple of 8
    with atomic(path) as tmp, open(tmp, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclasses.dataclass
class Config:
    checkpoint: list = ("out/stdlib/last.pt",)  # files or folders to describe


def main(cfg):
    for path in cfg.checkpoint:
        ckpt = load(path)
        print(f"{path}: {sum(t.numel() for t in ckpt.pop('model').values()):,} parameters")
        for name, value in ckpt.items():
            print(f"{name}: {'yes' if value and name in ('ema', 'optimizer') else value}")


if __name__ == "__main__":
    run(main, Config)
