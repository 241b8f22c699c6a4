# SPDX-License-Identifier: MIT
"""What all scripts share: flags, devices and ranks, stopping and resuming, the log, files."""

import argparse
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm


# ---- the command line ----------------------------------------------------------------------------
class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` exits with code 2."""


# Types of Config fields, with the smallest and largest value allowed.
Size = typing.Annotated[int, 1, 2**31]
Count = typing.Annotated[int, 0, 2**62]
Share = typing.Annotated[float, 0, 1]
Rate = typing.Annotated[float, 0, 10]
Positive = typing.Annotated[float, 1e-6, 1e9]
Negative = typing.Annotated[float, -1e9, -1e-6]
DType = typing.Literal["auto", "float32", "bfloat16"]  # float16 would need a GradScaler

WORDS = {"true": True, "false": False, "none": None}
WORD_FOR = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
PIP_NAMES = {"mauve": "mauve-text", "lm_eval": "lm-eval"}


def run(main, Config, presets=None, paths=None):
    """Run a script's main. Bad input prints one line to stderr, not a traceback."""
    status = 2
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace", line_buffering=True)  # some terminals have no ω
    try:
        return main(from_cli(Config, sys.argv[1:], presets, paths))
    except ImportError as e:
        reason = f"{e}: pip install {PIP_NAMES.get(e.name, e.name)}"
    except OSError as e:
        reason = f"{e.filename2 or e.filename}: {e.strerror}" if e.filename and e.strerror else e
    except (Refused, argparse.ArgumentError) as e:
        reason = e
    except KeyboardInterrupt:
        reason, status = "stopped by Ctrl-C", 130
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun quotes it at the end of its own long report
        message = {"message": str(reason), "extraInfo": {"timestamp": str(int(time.time()))}}
        write_text(report, json.dumps({"message": message}))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # rank 0 usually says the same first, and torchrun then ends this rank
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(status)


def from_cli(Config, argv, presets=None, paths=None):
    """A Config from the words of a command line: `[first words] --key=value --key value --flag …`

    presets: {name: fields}. The first word may be such a name, and flags override its fields.
    paths: the name of a field. First words that are not a preset become its value.
    The attribute `flags` has the names of the flags given. A Config built in Python lacks it.
    """
    if {"-h", "--help"} & set(argv):
        for cls in reversed(Config.__mro__[:-1]):  # the source of the class, with its comments
            print(inspect.getsource(cls))
        for name, fields in (presets or {}).items():
            print(f"preset {name}: {fields}")
        sys.exit(0)
    values = {}
    first = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if presets and first and first[0] in presets:
        values, argv = presets[first[0]], argv[1:]
    elif paths and first:
        values, argv = {paths: os.pathsep.join(first)}, argv[len(first):]
    kinds = typing.get_type_hints(Config)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False,
                                     argument_default=argparse.SUPPRESS)
    for name, kind in kinds.items():
        argument = parser.add_argument(f"--{name}", type=functools.partial(parse_value, kind=kind))
        if bool in (kind, *typing.get_args(kind)):
            argument.nargs, argument.const = "?", True  # --flag alone means True
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].strip("-").partition("=")[0]
        near = difflib.get_close_matches(word, kinds, 1)
        remedy = f"did you mean --{near[0]}?" if near else "--help shows all flags"
        if presets and not unknown[0].startswith("-"):
            remedy = f"the first word may be {', '.join(presets)}"
        raise Refused(f"unknown argument {unknown[0]!r}: {remedy}")
    cfg = Config(**values | vars(given))
    cfg.flags = frozenset(vars(given))
    check_ranges(cfg)
    return cfg


def parse_value(text, kind):
    """The value of a flag. kind: int, float, str, bool or Literal, alone or in a union."""
    parts = typing.get_args(kind) or (kind,)
    # Size | None gives [int, NoneType]. bool | Literal["auto"] gives [bool, "auto"].
    options = [option for part in parts for option in typing.get_args(part) or (part,)]
    word = WORDS.get(text.lower(), text)  # true, false or none
    if type(word) in options:
        return word
    if text in options or str in options:
        return text
    with contextlib.suppress(ValueError):
        if options[0] in (int, float):
            return options[0](text)
    names = [WORD_FOR.get(option, option) for option in options]
    if any(isinstance(option, str) for option in options):
        raise argparse.ArgumentTypeError(f"{text}: choose {', '.join(names)}")
    raise argparse.ArgumentTypeError(f"{text} is not {' or '.join(names)}")


def check_ranges(cfg):
    """Raises Refused if a field of cfg is out of range. None is allowed."""
    for name, kind in typing.get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        for part in (kind, *typing.get_args(kind)):  # the range may be in a union: Size | None
            low, high = getattr(part, "__metadata__", (-math.inf, math.inf))
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise Refused(f"--{name}={value} must be a number from {low} to {high}")


def in_short(e):
    """The type of an exception, and the first sentence of its message."""
    return f"{type(e).__name__}: {e}".partition("\n")[0].partition(". ")[0]


# ---- the machine ---------------------------------------------------------------------------------
class Machine(typing.NamedTuple):
    rank: int                   # torchrun sets rank and world
    world: int                  # number of processes
    device: torch.device
    dtype: torch.dtype | None   # for autocast; None: float32 throughout

    def autocast(self):
        # No cache: pass 2 would get pass 1's bf16 weights, which have no graph (softmask.py, 6).
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
    if dtype == "auto":
        dtype = "float32"
        if device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # CUDA captures graphs on the current device
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    autocast = {"float32": None, "bfloat16": torch.bfloat16}
    return Machine(rank, world, torch.device(device), autocast[dtype])


def join(here):
    """Connect to the other ranks, if any: over NCCL for GPU tensors, over gloo for CPU tensors."""
    if here.world > 1 and not dist.is_initialized():
        gpu = here.device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")


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


def any_rank(number):
    """The maximum of a number over all ranks, so that all make the same decision."""
    return over_ranks(torch.tensor(number), dist.ReduceOp.MAX).item()


# ---- stopping and resuming -----------------------------------------------------------------------
def resumes(last, resume):
    """Whether to resume from the checkpoint `last`, if there is one. Every rank must call this.

    Rank 0 must have locked the folder.
    """
    exists = any_rank(os.path.exists(last))
    if exists and not resume:
        raise Refused(f"{last} is there already: --resume continues this run, another folder "
                      f"starts a new one")
    return exists


def check_same(path, before, here, names, remedy=""):
    """Raises Refused unless a checkpoint's settings (before) equal this run's (here)."""
    different = [f"{name} ({before.get(name)!r} there, {here[name]!r} here)"
                 for name in sorted(names) if before.get(name) != here[name]]
    if different:
        raise Refused(f"{path} has other settings: {', '.join(different)}{remedy}")


def unused(cfg, why, *names):
    """Raises Refused if one of these flags is on the command line: it would do nothing."""
    for name in names:
        if name in getattr(cfg, "flags", ()):
            raise Refused(f"--{name} does nothing {why}")


def check_training(cfg, V, batch):
    """Raises Refused for settings that training cannot use.   batch: per pass, all ranks."""
    if cfg.p_sm == 0:
        unused(cfg, "with --p_sm=0: there is no feedback", "omega_s", "omega_a", "omega_b", "k",
               "two_updates", "coin", "eta_sm")
    if not cfg.b_l < cfg.b_h:
        raise Refused(f"--b_l={cfg.b_l} must be below --b_h={cfg.b_h}")
    if (cfg.k or 1) >= V:
        raise Refused(f"--k={cfg.k} must be below the {V} tokens of the vocabulary")
    if cfg.batch_size % batch:
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of the {batch} sequences "
                      f"in a pass of all processes (train.py: --micro_batch in each)")


@contextlib.contextmanager
def lock(folder, master=True):
    """A context that one process at a time may enter per folder. A kill releases the lock, too.
    Only rank 0, the master, writes, so only rank 0 locks. The others wait for it in `resumes`."""
    if not master:
        yield
        return
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/.lock", "a") as f:
        try:
            import fcntl
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is writing into {folder}: wait, or use another folder")
        except (ImportError, OSError):
            pass  # Windows and some network disks have no locks: do without
        yield


def updates(here, start, steps, **every):
    """Yields the number of each update, and what is due after it: a set of the names in `every`.

    every: {name: n}. A name is due every n updates (0: never), and after the last one. After a
    signal to stop there is one more update, after which "save" is due. Then every rank exits.
    """
    caught = []

    def take(number, frame):
        caught.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once

    # SIGHUP: the terminal was closed. SIGUSR1: Slurm is often told to send it before the time is up
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
    numbers = {getattr(signal, name) for name in names}
    if "SIGHUP" in names and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, take) for number in numbers}
    try:
        for done in range(start + 1, steps + 1):
            stop = any_rank(max(caught, default=0))  # a signal to one rank stops all of them
            due = {name for name, n in every.items() if n and (done % n == 0 or done == steps)}
            if done == 1:
                due.add("log")
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
    with contextlib.suppress(OSError):
        if not min(os.get_terminal_size(sys.stderr.fileno())):  # tqdm would draw nothing
            options |= {"ncols": 80, "nrows": 24, "dynamic_ncols": False}
    return tqdm(*args, **{"mininterval": 1, "dynamic_ncols": True} | options)


class Log:
    """The log of a training run from update `start` to `steps`: on the screen, and in log.jsonl."""
    on_screen = {"loss": "loss", "val_soft": "with feedback", "val_plain": "without feedback",
                 "lam": "lam", "omega_s": "omega_s", "tokens_per_s": "tokens_per_s"}

    def __init__(self, path, start, steps, master):
        self.path, self.steps, self.master = path, steps, master
        self.sums = {}        # since the last line
        self.began = self.last = time.time()
        if master:
            # Drop the lines of updates that will be repeated, and a line that a kill cut short.
            lines = [line for line in read_jsonl(path) if start and line["step"] <= start]
            write_jsonl(path, lines)
            if lines:
                self.began -= lines[-1]["seconds"]  # count from where the run stopped

    def add(self, **sums):
        """Add numbers or 0-d tensors to the sums of these names, without a host sync."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def line(self, done, eta_bb, sm, norm):
        """The line for the updates since the last line, up to update `done`. Raises Refused on NaN.

        It needs sums of loss, ce, masks, tokens, soft, lam, and n, which divides the loss.
        """
        values = [v.float() if torch.is_tensor(v) else norm.new_full((), v, dtype=torch.float32)
                  for v in self.sums.values()]
        values = torch.stack([*values, norm.float()]).cpu().double()  # a host sync
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
            omega = torch.stack(sm.omega).tolist()
            line |= {"omega_" + name: value for name, value in zip("sab", omega)}
            if sm.k is None:
                line["tau"] = sm.tau.item()
        return line

    def write(self, line):
        """Append `line` and the seconds to log.jsonl, and print them."""
        self.last = time.time()  # an evaluation after `line` must not lower tokens/s
        if not self.master:
            return
        done = line["step"]
        seconds = self.last - self.began
        line = line | {"seconds": seconds}
        append_jsonl(self.path, line)
        numbers = [f"{title} {line[name]:,.6g}" for name, title in self.on_screen.items()
                   if name in line]
        if done > 1:  # the first update is slow: it compiles
            numbers.append(tqdm.format_interval(seconds / done * (self.steps - done)) + " left")
        try:
            print(f"update {done:,} of {self.steps:,}", *numbers, sep="  ")
        except BrokenPipeError:  # `train.py | head`: keep running, print nowhere
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
def atomic(path):
    """Yields a temporary path. It is renamed to `path` if the block ends without an exception."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tmp = f"{path}.tmp"
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # else a power cut could leave an empty file at `path`
        os.replace(tmp, path)
    except BaseException:  # Ctrl-C, too
        Path(tmp).unlink(missing_ok=True)
        raise


def write_text(path, text):
    with atomic(path) as tmp:
        Path(tmp).write_text(text, encoding="utf-8")


def write_jsonl(path, values):
    write_text(path, "".join(json.dumps(value) + "\n" for value in values))


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


def read_samples(path):
    """The lines of a file from sample.py. Raises Refused for any other file."""
    needed, lines = {"ids", "text", "seed", "index", "settings"}, read_jsonl(path)
    if not all(isinstance(line, dict) and line.keys() >= needed for line in lines):
        raise Refused(f"{path} has lines that are not from sample.py")
    return lines
