# SPDX-License-Identifier: MIT
"""Flags in, tensors out: one command line for every script, one checkpoint format, and readers for other people's.
What a process is told from outside is here too: which of how many ranks it is, on what device, and that it shall stop.

A checkpoint is one dict of tensors and plain values, so `torch.load(weights_only=True)` opens it:

    format "soft-masked-mdlm/1"   kind "mdlm" | "dream-adapter"   config {field: value}   step   seed
    model {name: tensor}   ema {name: tensor}, backbone only [code]   optimizer {...} or absent
    tokenizer {name, vocab_size, mask_id, bos, eos}   data {...}   git {commit, dirty}   versions   metrics

step and seed are the whole state of the random numbers, since every draw is keyed by them (data.rng). Foreign files
come out of `load` as the same dict. None of them can run code here: see `inert`.

    python checkpoint.py --checkpoint=mdlm.ckpt                  # what is it?
    python checkpoint.py --checkpoint=mdlm.ckpt --out=mdlm.pt    # convert to ours, or by the name to .safetensors

Not here: model classes, and what the numbers mean.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import platform
import signal
import subprocess
import sys
import types
import typing

import numpy as np
import torch
import torch.distributed as dist

FORMAT = "soft-masked-mdlm/1"


# ---------------------------------------------------------------------------------------------------------------------
# the command line


class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` turns it into exit code 2."""


def parse(name, text, kind):
    """`--name=text` as `kind`, one of the annotations that our Config classes use."""
    options = typing.get_args(kind) or (kind,)  # int | None has two
    if type(None) in options and text.lower() == "none":
        return None
    kind = options[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise Refused(f"--{name}={text} is not {'true or false' if kind is bool else 'of type ' + kind.__name__}")


def from_cli(Config, argv=None, presets=None):
    """A dataclass from `[preset] --key=value --flag …`.

    presets: {name: {field: value}}, at most one, first on the line; what follows overrides it.
    Raises Refused for an unknown preset or key, and for a value of the wrong type. `--help` prints the class itself,
    comments and all: the table of hyperparameters is the source.
    """
    argv, presets = list(sys.argv[1:] if argv is None else argv), presets or {}
    if {"-h", "--help"} & set(argv):
        classes = [c for c in reversed(Config.__mro__) if dataclasses.is_dataclass(c)]  # its own fields come last
        print(*map(inspect.getsource, classes), *(f"preset {name}: {fields}" for name, fields in presets.items()), sep="\n")
        raise SystemExit(0)
    values, known = {}, {f.name for f in dataclasses.fields(Config)}
    if argv and not argv[0].startswith("--"):
        if argv[0] not in presets:
            raise Refused(f"unknown preset {argv[0]!r}: use {' or '.join(presets) or 'only --key=value'}")
        values.update(presets[argv.pop(0)])
    for arg in argv:
        name, has_value, text = arg.removeprefix("--").partition("=")  # a value may hold = itself
        if not arg.startswith("--") or name not in known:
            raise Refused(f"unknown argument {arg!r}: fields are --key=value with key in {', '.join(sorted(known))}")
        kind = typing.get_type_hints(Config)[name]
        if not has_value and bool not in (kind, *typing.get_args(kind)):
            raise Refused(f"--{name} needs a value: --{name}=…")
        values[name] = parse(name, text, kind) if has_value else True
    return Config(**values)


def run(main, Config, presets=None):
    """The last line of every script: parse, run, and say bad input in a line instead of a traceback."""
    try:
        main(from_cli(Config, presets=presets))
    except Refused as refused:
        print(f"{os.path.basename(sys.argv[0])}: {refused}", file=sys.stderr)
        raise SystemExit(2)


def machine(device="auto", dtype="auto"):
    """(rank, world, device, autocast dtype or None) of this process: torchrun's variables, and two flags.

    device: cuda, mps, cpu; auto: the first of them that is there.   dtype: bfloat16, float32; auto: bfloat16 on a GPU that
    has it. A dtype that the device does not have falls back to float32, in a sentence.
    Raises Refused when this process has no such device.
    """
    rank, world, local = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": local + 1}
    kind = device if device != "auto" else next(name for name, n in there.items() if n)
    if there.get(kind, 0) <= local:
        raise Refused(f"--device={device} for local process {local}, but this machine has {there.get(kind, 0)} of it: use "
                      f"--device=cpu, or fewer processes")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise Refused(f"--dtype={dtype}: use auto, bfloat16 or float32")
    native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    half = torch.bfloat16 if native and dtype != "float32" or kind == "cpu" and dtype == "bfloat16" else None
    if rank == 0 and (dtype == "float16" or dtype == "bfloat16" and half is None):  # the loss needs more range than float16's
        print(f"--dtype={dtype} cannot be had here: using {'bfloat16' if half else 'float32'}")
    return rank, world, torch.device(kind, local) if kind == "cuda" else torch.device(kind), half


def join(world, device):
    """Find the other ranks, if there are any: gloo beside NCCL, for the flags that live on the CPU."""
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def leave(world, message, status):
    """The end of a run, complete or not, on every rank. Raises SystemExit where a status says so; message: for rank 0."""
    rank = 0
    if world > 1:
        rank = dist.get_rank()
        dist.barrier()  # a rank that left earlier would have torchrun kill the one that still saves
        dist.destroy_process_group()
    if message and rank == 0:
        print(message)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def signals():
    """A list that takes up SIGTERM and Ctrl-C instead of dying of them: a training step ends, and saves."""
    caught = []
    def take(number, frame):
        caught.append(number)
        if number == signal.SIGINT:  # the second Ctrl-C kills; a second SIGTERM, as torchrun sends, must not: we are saving
            signal.signal(number, signal.SIG_DFL)
    before = {s: signal.signal(s, take) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------------------------
# files


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path that becomes `path` only if the block ends well: a good file is never half overwritten.

    Raises Refused when the disk is full or the folder cannot be written; the old file is then still there.
    """
    tmp = f"{path}.tmp"  # one name, so that what a killed process leaves is overwritten by the next
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        yield tmp
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())  # else a power cut can leave the new name on old, empty blocks
        os.replace(tmp, path)
    except OSError as e:
        raise Refused(f"could not write {path} ({e}): free some space or choose another folder; an older file is unharmed")
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(tmp)


def log_line(path, line):
    """Append a dict to a log. A full disk must not end a run that could still be saved elsewhere."""
    try:
        with open(path, "a") as f:
            f.write(json.dumps(line) + "\n")
    except OSError as e:
        print(f"log line lost: {e}")


def log_until(path, step):
    """The lines of a log.jsonl up to this update: what a resumed run keeps, since it makes the later ones again.

    Lines that were cut when the run died, or its disk was full, are dropped.
    """
    kept = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as f:
        for line in f:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    kept.append(line.rstrip("\n") + "\n")
    return kept


def git_version():
    """{commit, dirty} of this source, for the checkpoint to remember; {} where there is no git."""
    def git(*args):
        return subprocess.run(["git", *args], cwd=os.path.dirname(os.path.abspath(__file__)), check=True,
                              capture_output=True, text=True).stdout.strip()
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def save(path, **parts):
    """Write the dict described above, atomically. Raises Refused as `atomic` does."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with atomic(path) as tmp:
        try:
            torch.save({"format": FORMAT, "git": git_version(), "versions": versions, **parts}, tmp)
        except RuntimeError as e:  # its word for a full disk
            raise OSError(e)


# safetensors: 8 bytes of header length, a JSON header, the raw tensors
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def read_safetensors(path, metadata=None):
    """{name: tensor}, memory-mapped: nothing is read before it is used, and nothing twice. Do not write into them.

    metadata: a dict that takes up the header's own, if wanted. Raises Refused when the file is not whole.
    """
    try:
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            if 8 + n > os.path.getsize(path):
                raise ValueError("header longer than the file")
            header = json.loads(f.read(n))
        data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=8 + n))  # "c": torch wants it writable
        (metadata if metadata is not None else {}).update(header.pop("__metadata__", {}))
        spans = {name: (slice(*v["data_offsets"]), DTYPES[v["dtype"]], v["shape"]) for name, v in header.items()}
        aligned = lambda span, size: data[span] if span.start % size == 0 else data[span].clone()  # view() needs it
        return {name: aligned(span, dtype.itemsize).view(dtype).view(shape) for name, (span, dtype, shape) in spans.items()}
    except FileNotFoundError:
        raise Refused(f"{path} does not exist")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        raise Refused(f"{path} is truncated or not a safetensors file ({type(e).__name__}): fetch it again")


def write_safetensors(path, tensors, metadata=None):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data aligned to 8 bytes, as readers expect
    with atomic(path) as tmp, open(tmp, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


# ---------------------------------------------------------------------------------------------------------------------
# other people's checkpoints


class Inert(dict):
    """Stands in for every foreign class in a pickle: takes any arguments, keeps its state as data, does nothing."""

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


HARMLESS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch Size"}
HARMLESS |= {f"{module} {name}" for module in ("builtins", "__builtin__") for name in
             ("dict", "list", "tuple", "set", "frozenset", "int", "float", "bool", "str", "bytes", "complex")}


class InertUnpickler(pickle.Unpickler):
    """A pickle is a program: it names any function and calls it. This one finds tensors and plain values, no functions."""

    def find_class(self, module, name):
        if f"{module} {name}" in HARMLESS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return Inert  # torch's own reader knows the storages before it asks here


def inert(path):
    """torch.load for a training framework's checkpoint, without its framework and without running any of it."""
    reader = types.SimpleNamespace(__name__="inert", Unpickler=InertUnpickler, load=lambda f, **kw: InertUnpickler(f, **kw).load())
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)


def plain(node):
    """The values inside an inert configuration tree (omegaconf keeps them under _content and _val)."""
    if isinstance(node, dict):
        node = node.get("_content", node.get("_val", node))
    return {k: plain(v) for k, v in node.items()} if isinstance(node, dict) else node


def foreign(state, shadow=None, settings=None, step=0):
    """The MDLM family's weights as our dict. The names below the prefix are ours too, so nothing is translated but ω.

    state: {name: tensor} under any prefix.   shadow: the EMA, a bare list in the order of the parameters [code].
    settings: the run's configuration, if the file has one; every size is in the tensors, the rest has the paper's default.
    """
    anchor = next((name for name in state if name.endswith("vocab_embed.embedding")), None)
    if anchor is None:
        raise Refused(f"no MDLM in this checkpoint: none of its {len(state)} tensors is called …vocab_embed.embedding")
    prefix = anchor.removesuffix("vocab_embed.embedding")
    net = {"net." + name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    inv_freq = net.pop("net.rotary_emb.inv_freq", None)  # a buffer that we recompute; its length tells the head width
    V, D = net["net.vocab_embed.embedding"].shape
    if shadow is not None and len(shadow) != len(net):
        raise Refused(f"the EMA has {len(shadow)} tensors for {len(net)} parameters: not a checkpoint of this model")
    algo, model = (settings or {}).get("algo", {}), (settings or {}).get("model", {})
    head = algo.get("tran_head", {})
    dense = head.get("transparency_alg") == "mixinputs_with_temp"
    omega = {"sm.raw_s": "raw_scale", "sm.raw_a": "raw_steep", "sm.raw_b": "raw_centre_neg"}
    omega |= {"sm.raw_tau": "raw_temperature"} if dense else {}  # with top-k it is dead weight in their file
    soft = "tran_head.raw_scale" in state
    config = dict(n_layer=1 + max(int(name.split(".")[2]) for name in net if name.startswith("net.blocks.")),
                  n_head=D // (2 * len(inv_freq)) if inv_freq is not None else max(1, D // 64), n_embd=D,
                  n_cond=net["net.sigma_map.mlp.2.weight"].shape[0], vocab_size=V, mask_id=V - 1,
                  length=model.get("length", 1024), dropout=model.get("dropout", 0.1),
                  time_conditioning=algo.get("time_conditioning", False), soft_mask=soft,
                  k=None if dense else head.get("mixinputs_k", 3))
    return {"format": FORMAT, "kind": "mdlm", "config": config, "step": step,
            "model": net | ({ours: state[f"tran_head.{theirs}"] for ours, theirs in omega.items()} if soft else {}),
            "ema": None if shadow is None else dict(zip(net, shadow)),
            "tokenizer": {"name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}}


def load(path):
    """Any checkpoint as the dict at the top of this file: ours, a Lightning .ckpt (MDLM's and the authors'), safetensors,
    pytorch_model.bin, or a folder that holds one of the last two. Raises Refused for a file that is none of them."""
    names = (os.path.join(path, name) for name in ("model.safetensors", "pytorch_model.bin"))
    path = next(filter(os.path.exists, names), path) if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise Refused(f"no checkpoint at {path or '(no path given)'}: give the path of a file")
    try:
        ckpt = interpret(path)
        missing = {"kind", "config", "step", "model"} - ckpt.keys()
    except Refused:
        raise
    except Exception as e:  # whatever a broken or hostile file raises, the user needs the one sentence
        raise Refused(f"{path} is truncated or not a checkpoint ({type(e).__name__}: {e})".splitlines()[0])
    if ckpt["format"] != FORMAT or missing:
        raise Refused(f"{path} is not a whole checkpoint of format {FORMAT}: {', '.join(sorted(missing)) or ckpt['format']}")
    return ckpt


def interpret(path):
    """The file at this path as our dict, whatever its format; any exception means that it is not one of them."""
    if path.endswith(".safetensors"):
        tensors = read_safetensors(path, metadata := {})
        ours = json.loads(metadata.get(FORMAT, "null"))  # what a conversion of ours left in the header
        return {**ours, "model": tensors} if ours else foreign(tensors)
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        ckpt = inert(path)
    if "format" in ckpt:
        return ckpt
    if "state_dict" in ckpt:
        return foreign(ckpt["state_dict"], (ckpt.get("ema") or {}).get("shadow_params"),
                       plain((ckpt.get("hyper_parameters") or {}).get("config", {})), ckpt.get("global_step", 0))
    return foreign({name: t for name, t in ckpt.items() if isinstance(t, torch.Tensor)})


@dataclasses.dataclass
class Config:
    checkpoint: str = ""  # what to describe
    out: str = ""         # convert to this: .safetensors with the weights for evaluation (EMA), or any name for our format


def main(cfg):
    ckpt = load(cfg.checkpoint)
    n_params = sum(t.numel() for t in ckpt["model"].values())
    print(f"{cfg.checkpoint}: {ckpt['kind']}, {n_params:,} parameters, step {ckpt['step']}, "
          f"{'with' if ckpt.get('ema') else 'no'} EMA, {'with' if ckpt.get('optimizer') else 'no'} optimizer")
    for part in ("config", "tokenizer", "data", "git", "versions", "metrics"):
        print(f"  {part}: {ckpt.get(part)}")
    print("  omega, raw:", {name: t.item() for name, t in ckpt["model"].items() if name.startswith("sm.")})
    if cfg.out.endswith(".safetensors"):
        rest = {k: v for k, v in ckpt.items() if k not in ("model", "ema", "optimizer")}
        write_safetensors(cfg.out, ckpt["model"] | (ckpt.get("ema") or {}), {FORMAT: json.dumps(rest)})
    elif cfg.out:
        save(cfg.out, **{k: v for k, v in ckpt.items() if k not in ("format", "git", "versions")})


if __name__ == "__main__":
    run(main, Config)
