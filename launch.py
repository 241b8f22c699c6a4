# SPDX-License-Identifier: MIT
"""What all scripts share: flags, devices and ranks, stopping and resuming, the log, files."""

import argparse
import contextlib
import errno
import functools
import inspect
import json
import math
import os
import signal
import sys
import textwrap
import time
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm


# ---- the command line ----------------------------------------------------------------------------
class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` exits with code 2."""


# Types of Config fields. The bounds refuse what would spoil a run without a word: --p_sm=80.
Size = typing.Annotated[int, 1, math.inf]
Count = typing.Annotated[int, 0, math.inf]
Share = typing.Annotated[float, 0, 1]
Positive = typing.Annotated[float, 1e-6, math.inf]
DType = typing.Literal["auto", "float32", "bfloat16"]  # float16 would need a GradScaler

NAMES = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
OPTIONAL = {"datasets": "datasets", "lm_eval": "lm-eval", "matplotlib": "matplotlib",
            "mauve": "mauve-text", "pyarrow": "pyarrow", "transformers": "transformers"}
FULL_OR_CLOSED = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE  # a disk, a pipe


def run(main, Config, presets=()):
    """Run a script's main. Bad input is one line on stderr and code 2, all else a traceback."""
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace", line_buffering=True)  # some terminals have no ω
    try:
        return main(from_cli(Config, sys.argv[1:], presets))
    except Exception as e:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Rank 0 usually says the same first. Then torchrun sends SIGTERM to this rank.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        package = OPTIONAL.get(e.name) if isinstance(e, ModuleNotFoundError) else None
        file = isinstance(e, OSError) and (e.filename or e.errno in FULL_OR_CLOSED)
        if not (package or file or isinstance(e, (Refused, argparse.ArgumentError))):
            raise
        remedy = f": pip install {package}" if package else ""
        print(f"{Path(sys.argv[0]).name}: {e}{remedy}", file=sys.stderr)
        sys.exit(2)


def from_cli(Config, argv, presets=()):
    """A Config from the words of a command line: `[first words] --key=value --key value --flag …`

    presets: {name: fields}. The first word may be such a name, and flags override its fields.
    A field of type list takes all other first words.
    """
    if {"-h", "--help"} & {*argv}:
        for cls in reversed(Config.__mro__[:-1]):  # the source of the class, with its comments
            print(inspect.getsource(cls))
        for name in presets:
            print(f"preset {name}: {presets[name]}")
        sys.exit(0)
    values = {}
    if argv and argv[0] in presets:
        values, argv = presets[argv[0]], argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False,
                                     argument_default=argparse.SUPPRESS)
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        alone = {"nargs": "?", "const": True} if bool in (kind, *typing.get_args(kind)) else {}
        if kind is not list:
            parser.add_argument(f"--{name}", type=functools.partial(parse, kind=kind), **alone)
        elif name not in values:  # else `data.py stdlib mine.txt` would take only the second
            parser.add_argument(name, nargs="*")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise Refused(f"unknown argument {unknown[0]!r}: see --help")
    return Config(**values | vars(given))


def parse(text, kind):
    """The value of a flag.   kind: int, float, str, bool, Literal, Annotated, or their union."""
    parts = []  # of Share | None: float, 0, 1, NoneType
    for part in typing.get_args(kind) or (kind,):
        parts += typing.get_args(part) or (part,)
    word = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    if type(word) in parts:
        return word
    if str in parts or text in parts:
        return text
    limits = [part for part in parts if isinstance(part, (int, float))]
    low, high = limits or (-math.inf, math.inf)
    for number in {int, float}.intersection(parts):
        with contextlib.suppress(ValueError):
            if low <= number(text) <= high:
                return number(text)
    names = " or ".join(NAMES.get(part, part) for part in parts if part not in limits)
    span = f" (from {low:g} to {high:g})" if limits else ""
    raise argparse.ArgumentTypeError(f"{text} is not {names}{span}")


def in_short(e):
    """The type and the message of an exception, on one line, cut between two words."""
    return textwrap.shorten(f"{type(e).__name__}: {e}", 150, placeholder=" …")


# ---- the machine ---------------------------------------------------------------------------------
class Machine(typing.NamedTuple):
    rank: int                   # torchrun sets rank and world
    world: int                  # number of processes
    device: torch.device
    dtype: torch.dtype | None   # for autocast; None: float32 throughout

    def autocast(self):
        # No cache: pass 2 would get pass 1's bf16 weights, which have no graph.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None,
                              cache_enabled=False)


def machine(device="auto", dtype="auto"):
    """The Machine this process runs on.   device: a name for torch, or auto.   dtype: see DType."""
    if device == "auto":  # cuda, else mps, else cpu
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        device = "cuda" if torch.cuda.device_count() else device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:  # AssertionError: not in this build of torch
        raise Refused(f"--device={device} does not work here ({in_short(e)}): --device=cpu does")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # CUDA captures graphs on the current device
        if dtype == "auto" and torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
    return Machine(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)),
                   torch.device(device), torch.bfloat16 if dtype == "bfloat16" else None)


def join(here):
    """Connect to the other ranks, if any: over NCCL for GPU tensors, over gloo for CPU tensors."""
    if here.world > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo")


def first_rank(here, make):
    """Call make() on rank 0. The others wait for it."""
    if here.rank == 0:
        make()
    if here.world > 1:
        dist.barrier()


def to_device(x, device):
    """Copy a CPU tensor to the device, without a host sync."""
    if device.type == "cuda":
        # A copy from memory that is not pinned, or not contiguous, would sync.
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def over_ranks(tensor, operation=dist.ReduceOp.SUM):
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


# ---- stopping and resuming -----------------------------------------------------------------------
def resumes(last, resume):
    """Whether to resume from the checkpoint `last`. Call it on every rank, with the lock."""
    exists = over_ranks(torch.tensor(os.path.exists(last)), dist.ReduceOp.MAX).item()
    if exists and not resume:
        raise Refused(f"{last} exists already: --resume continues it, or give another folder")
    return exists


def check_same(path, before, here, names, remedy=""):
    """Raises Refused unless a checkpoint's settings (before) equal this run's (here)."""
    different = [f"{name} ({before.get(name)!r} there, {here[name]!r} here)"
                 for name in sorted(names) if before.get(name) != here[name]]
    if different:
        raise Refused(f"{path} has other settings: {', '.join(different)}{remedy}")


def check_batch_size(cfg, batch):
    """Raises Refused for a batch_size that would be cut short.   batch: per pass, all ranks."""
    if cfg.batch_size % batch:
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of {batch}, the sequences "
                      "in a pass of all ranks (train.py: --micro_batch × ranks)")


@contextlib.contextmanager
def lock(folder, master=True):
    """Let one process at a time into a folder. Only rank 0, the master, writes: it alone locks."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/.lock", "a") as f:
        try:
            import fcntl
            if master:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is writing into {folder}: wait, or use another folder")
        except (ImportError, OSError):
            pass  # Windows and some network disks have no locks: do without
        yield


def updates(here, start, steps, **every):
    """Yields the number of each update, and what is due after it: a set of the names in `every`.

    every: {name: n}. A name is due every n updates (0: never), and after the last one; "log" after
    the first one, too. After a signal there is one more update, and "save" is due. Then all exit.
    """
    caught = []

    def take(number, frame):
        caught.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    # SIGHUP: a closed terminal; nohup ignores it. SIGUSR1: Slurm can send it before the time is up.
    stops = [n for n in signal.Signals if n.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")]
    before = {n: signal.signal(n, take) for n in stops
              if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN}
    try:
        for done in range(start + 1, steps + 1):
            # A signal to one rank stops all of them.
            stop = over_ranks(torch.tensor(max(caught, default=0)), dist.ReduceOp.MAX).item()
            due = {name for name, n in every.items()
                   if n and (done % n == 0 or done == steps) or done == 1 and name == "log"}
            yield done, due | {"save"} if stop else due
            if stop:
                leave(here, f"stopped after update {done:,}, which is saved: to continue, run the "
                            f"same command with --resume", 128 + stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(here, message, status):
    """End a run on every rank. Rank 0 prints the message. A nonzero status exits the process."""
    if here.world > 1:
        # Wait: if a rank exits with a nonzero status, torchrun kills the others, even mid-save.
        dist.barrier()
        dist.destroy_process_group()
    if message and here.rank == 0:
        print(message)
    if status:
        sys.exit(status)


# ---- the log -------------------------------------------------------------------------------------
def progress(*args, **options):
    """tqdm, on rank 0 only. Without a terminal: a line twice a minute, after ten seconds."""
    if os.environ.get("RANK", "0") != "0":
        options["disable"] = True
    if not sys.stderr.isatty():
        options |= {"mininterval": 30, "maxinterval": 60, "delay": 10}
    return tqdm(*args, **{"mininterval": 1, "dynamic_ncols": True} | options)


class Log:
    """The log of a training run from update `start` to `steps`: on the screen, and in log.jsonl."""

    def __init__(self, path, start, steps, master):
        self.path, self.steps, self.master = path, steps, master
        self.sums = {}        # since the last line
        self.began = self.last = time.time()
        if master:
            # Drop the lines of updates that will be repeated, and a line that a kill cut short.
            lines = [line for line in read_jsonl(path) if start and line["step"] <= start]
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
            if lines:
                self.began -= lines[-1]["seconds"]  # count from where the run stopped

    def add(self, **sums):
        """Add numbers or 0-d tensors to the sums of these names, without a host sync."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def line(self, done, eta_bb, sm, norm):
        """The line for all updates since the last line, up to `done`. Raises Refused on NaN."""
        values = torch.stack([torch.as_tensor(v, dtype=torch.float32, device=norm.device)
                              for v in (*self.sums.values(), norm)]).cpu().double()  # a host sync
        sums = dict(zip(self.sums, over_ranks(values[:-1]).tolist()), norm=values[-1].item())
        if not math.isfinite(sum(sums.values())):
            raise Refused("the loss or its gradient is not finite: restart with a lower --eta_bb")
        self.sums = {}
        line = {"step": done, "loss": sums["loss"] / sums["n"],
                "ce_per_mask": sums["ce"] / max(1, sums["masks"]), "eta_bb": eta_bb,
                "grad_norm": sums["norm"],
                "tokens_per_s": sums["tokens"] / (time.time() - self.last)}
        if sums["soft"]:
            line["lam"] = sums["lam"] / sums["soft"]
        if sm:
            line |= zip(("omega_s", "omega_a", "omega_b"), torch.stack(sm.omega).tolist())
            if sm.k is None:
                line["tau"] = sm.tau.item()
        return line

    def write(self, line):
        """Append `line` and the seconds to log.jsonl, and print them."""
        self.last = time.time()  # an evaluation after `line` must not lower tokens/s
        if not self.master:
            return
        done, seconds = line["step"], self.last - self.began
        append_jsonl(self.path, line | {"seconds": seconds})
        titles = {"loss": "loss", "val_soft": "with feedback", "val_plain": "without feedback",
                  "lam": "lam", "omega_s": "omega_s", "tokens_per_s": "tokens_per_s"}
        numbers = [f"{titles[name]} {line[name]:,.6g}" for name in titles if name in line]
        left = tqdm.format_interval(seconds / max(1, done) * (self.steps - done)) + " left"
        try:
            print(f"update {done:,} of {self.steps:,}", *numbers, left, sep="  ")
        except OSError:  # `train.py | head`, or a closed terminal: keep running, print nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warning(line, V):
    """A sentence for the user if λ is near 0 in a line of the log, else "".   V: vocabulary"""
    if line.get("lam", 1.0) >= 1e-3:  # 1.0: if no update had feedback
        return ""
    # The cross-entropy per mask estimates the mean H. With ω_b = −H, λ is ω_s / 2 there.
    H = min(max(0.01, line["ce_per_mask"]), math.log(V))
    return (f"feedback is off: λ is {line['lam']:.1g} on average. Train longer, or start with "
            f"--omega_s=0.5 --omega_a=1 --omega_b={-H:.2g}")


# ---- files ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def readable(place, remedy=""):
    """Whatever a broken file raises in this block becomes Refused, in one line with its place.

    Keep the block small, or it hides a bug of ours as a broken file.
    """
    try:
        yield
    except BaseException as e:
        broken = isinstance(e, Exception) or type(e).__name__ == "PanicException"  # tiktoken's
        ours = isinstance(e, (Refused, ImportError)) or getattr(e, "filename", None)  # as they are
        if ours or not broken:
            raise
        raise Refused(f"{place}: {in_short(e)}{remedy}")


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path. It is renamed to `path` if the block ends without an exception."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tmp = f"{path}.tmp"
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # else a power cut could leave an empty file at `path`
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)  # a full disk needs the room


def write_text(path, text):
    with atomic(path) as tmp:
        Path(tmp).write_text(text, encoding="utf-8")


class Fields(dict):
    """A JSON object. A missing field raises Refused with the name of the file."""

    def __missing__(self, name):
        raise Refused(f"{self.path} has no field {name!r}")


def read_json(path):
    """The JSON object in a file, as Fields."""
    try:
        fields = Fields(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as e:
        raise Refused(f"{path} is not a complete JSON object ({in_short(e)})")
    fields.path = path
    return fields


def append_jsonl(path, *values):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as f:
        f.seek(max(0, f.tell() - 1))
        if f.read(1) not in (b"", b"\n"):  # a kill left half a line
            f.write(b"\n")
        f.writelines(json.dumps(value).encode() + b"\n" for value in values)


def read_jsonl(path):
    """The values of all complete lines: a kill may have cut one short. [] if there is no file."""
    values = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return values
