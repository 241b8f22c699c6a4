# SPDX-License-Identifier: MIT
"""What every script does around its own work, in the order in which a run does it.

    the command line         run, from_cli                       the log    Log, progress
    the machine              machine, join, to_device            files      atomic, append_jsonl
    stopping and going on    goes_on, lock, signals, leave
"""

import argparse
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import math
import os
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
    """Bad input, in one sentence: the value, the limit, the remedy. `run` makes it exit code 2."""


# Types of fields with their smallest and largest value.
Size = typing.Annotated[int, 1, 2**31]
Count = typing.Annotated[int, 0, 2**62]
Share = typing.Annotated[float, 0, 1]
Rate = typing.Annotated[float, 0, 10]
Positive = typing.Annotated[float, 1e-6, 1e9]
Negative = typing.Annotated[float, -1e9, -1e-6]
DType = typing.Literal["auto", "float32", "bfloat16"]  # in float16 the loss, nats / t, overflows

WORDS = {"true": True, "false": False, "none": None}
OTHER_NAMES = {"lr": "eta_bb", "epochs": "steps", "top_k": "k"}  # what other programs call them
PIP_NAMES = {"mauve": "mauve-text", "lm_eval": "lm-eval"}  # the others are imported by this name


def run(main, Config, presets=None, paths=None):
    """The last line of every script. Bad input gives one line on stderr instead of a traceback."""
    status = 2
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace", line_buffering=True)  # not every terminal can show ω
    try:
        return main(from_cli(Config, sys.argv[1:], presets, paths))
    except ImportError as e:
        reason = f"{e}: pip install {PIP_NAMES.get(e.name, e.name)}"
    except (Refused, OSError, argparse.ArgumentError) as e:
        reason = e
    except KeyboardInterrupt:
        reason, status = "stopped by Ctrl-C", 130
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # rank 0 mostly says the same, and then torchrun ends this rank
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    raise SystemExit(status)


def from_cli(Config, argv, presets=None, paths=None):
    """A dataclass from `[preset] --key=value --key value --flag …`. A flag overrides the preset.

    The names of the flags are in its attribute `flags`, which a Config built in Python lacks.
    """
    if {"-h", "--help"} & set(argv):
        for cls in reversed(Config.__mro__[:-1]):  # a commented class is the table of the flags
            print(inspect.getsource(cls))
        for name, fields in (presets or {}).items():
            print(f"preset {name}: {fields}")
        raise SystemExit(0)
    values = {}
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if presets and words and words[0] in presets:
        values, argv = presets[words[0]], argv[1:]
    elif paths and words:  # PATH…, for the field of this name
        values, argv = {paths: os.pathsep.join(words)}, argv[len(words):]
    kinds = typing.get_type_hints(Config)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False,
                                     argument_default=argparse.SUPPRESS)
    for name, kind in kinds.items():
        argument = parser.add_argument(f"--{name}", type=functools.partial(parse_value, kind=kind))
        if bool in (kind, *typing.get_args(kind)):
            argument.nargs, argument.const = "?", True  # its value may be left out
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].strip("-").partition("=")[0]
        near = difflib.get_close_matches(OTHER_NAMES.get(word, word), kinds, 1) or ["help"]
        remedy = f"did you mean --{near[0]}?"
        if presets and not unknown[0].startswith("-"):
            remedy = f"the first word may be {', '.join(presets)}"
        raise Refused(f"unknown argument {unknown[0]!r}: {remedy}")
    cfg = Config(**values | vars(given))
    cfg.flags = frozenset(vars(given))
    check_ranges(cfg)
    return cfg


def parse_value(text, kind):
    """Convert a text to its type: int, float, str, bool or Literal, alone or in a union."""
    parts = typing.get_args(kind) or (kind,)
    options = [option for part in parts for option in typing.get_args(part) or (part,)]
    value = text if text in options else WORDS.get(text.lower(), text)  # "none" may be a name
    if value in options or type(value) in options:
        return value
    with contextlib.suppress(ValueError):
        if options[0] in (int, float, str):
            return options[0](text)
    raise argparse.ArgumentTypeError(f"{text} is not {inspect.formatannotation(kind)}")


def check_ranges(cfg):
    """Raises Refused when a field of cfg is outside the range of its type. None is allowed."""
    for name, kind in typing.get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        for part in (kind, *typing.get_args(kind)):  # a range may be inside `Size | None`
            low, high = getattr(part, "__metadata__", (-math.inf, math.inf))
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise Refused(f"--{name}={value} must be a number from {low} to {high}")


def in_short(e):
    """The kind and the first sentence of an exception that is not ours."""
    return f"{type(e).__name__}: {e}".partition("\n")[0].partition(". ")[0]


# ---- the machine ---------------------------------------------------------------------------------
class Machine(typing.NamedTuple):
    rank: int
    world: int                  # processes; torchrun sets both
    device: torch.device
    dtype: torch.dtype | None   # of autocast; None: float32 throughout

    def autocast(self):
        # With a cache of casts, older torch (2.6 does, 2.13 does not) takes the bf16 weights of
        # pass 1, which have no graph, for pass 2 too. Then they silently get no gradient.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None,
                              cache_enabled=False)


def machine(device="auto", dtype="auto"):
    """The Machine of this process.   device: as torch names it.   dtype: see DType."""
    if device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        device = "cuda" if torch.cuda.device_count() else device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:  # AssertionError: torch was built without it
        raise Refused(f"--device={device} does not work here ({in_short(e)}): --device=cpu does")
    if dtype == "auto":
        dtype = "float32"
        if device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False):
            dtype = "bfloat16"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # CUDA graphs are captured on the current device
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    autocast = {"float32": None, "bfloat16": torch.bfloat16}
    return Machine(rank, world, torch.device(device), autocast[dtype])


def join(here):
    """Connect to the other ranks, if any. NCCL moves tensors on GPUs, gloo those on the CPU."""
    if here.world > 1:
        gpu = here.device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")


def accumulate(model, last):
    """A block whose backward pass adds to the gradients. The last micro-batch averages over ranks.

    model: DDP, or a module without it.
    """
    return contextlib.nullcontext() if last or not dist.is_initialized() else model.no_sync()


def to_device(x, device):
    """Copy a CPU tensor to the device. The host does not wait until a GPU has it."""
    if device.type == "cuda":
        # A copy from memory that is not pinned, or not contiguous, would make the host wait.
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def over_ranks(tensor, operation=dist.ReduceOp.SUM):
    if dist.is_initialized():
        dist.all_reduce(tensor, operation)
    return tensor


def any_rank(number):
    """The maximum of a number over all ranks, so that all decide alike."""
    return over_ranks(torch.tensor(number), dist.ReduceOp.MAX).item()


# ---- stopping and going on -----------------------------------------------------------------------
def goes_on(last, resume, overwrite):
    """Whether a run goes on from the checkpoint `last`. Every rank must call it."""
    exists = any_rank(os.path.exists(last))
    folder = Path(last).parent
    kept = any_rank(any(folder.glob("step-*.pt")) or any(folder.glob("*/adapter_config.json")))
    if (exists or kept) and not overwrite and not (exists and resume):
        raise Refused(f"{folder} already holds a run: --resume goes on with last.pt, "
                      f"--overwrite replaces it, another folder starts another")
    return resume is True or resume == "auto" and exists


def check_same(path, before, here, names, remedy=""):
    """Raises Refused unless the settings of a checkpoint are those of this run."""
    different = [f"{name} ({before.get(name)!r} there, {here[name]!r} here)"
                 for name in sorted(names) if before.get(name) != here[name]]
    if different:
        raise Refused(f"{path} is of other settings: {', '.join(different)}{remedy}")


@contextlib.contextmanager
def lock(folder):
    """A block that one process at a time may run for this folder. A kill releases the lock, too."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/.lock", "a") as f:
        try:
            import fcntl
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is writing into {folder} (a run, or a rank that its "
                          f"torchrun left behind): wait, end it, or give another folder")
        except (ImportError, OSError):
            pass  # Windows, and some network disks, cannot lock: nothing is locked
        yield


def due(every, done, steps):
    """Whether it is time for what happens every so many updates, and after the last. 0: never."""
    return every and (done % every == 0 or done == steps)


@contextlib.contextmanager
def signals():
    """Yields a list that collects SIGTERM and Ctrl-C, so that a loop can save before it stops."""
    caught = []

    def take(number, frame):
        caught.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process at once

    before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(here, message, status):
    """End a run, on every rank. Rank 0 prints the message. A status other than 0 exits with it."""
    if here.world > 1:
        # torchrun kills all ranks when one exits with a status, even one that is still saving.
        dist.barrier()
        dist.destroy_process_group()
    if message and here.rank == 0:
        print(message)
    if status:
        raise SystemExit(status)


# ---- the log -------------------------------------------------------------------------------------
def progress(*args, **options):
    """tqdm, on rank 0 alone. Redrawn once a second at most: a log file keeps all drawings."""
    if os.environ.get("RANK", "0") != "0":
        options["disable"] = True
    return tqdm(*args, mininterval=1, dynamic_ncols=True, **options)


class Log:
    """What a trainer reports, from update `start` to `steps`: sums since the last line."""
    on_screen = "loss", "val_soft", "val_plain", "lam", "omega_s", "tokens_per_s"

    def __init__(self, path, start, steps, master):
        self.path, self.steps, self.master = path, steps, master
        self.sums = {}        # since the last line
        self.began = self.last = time.time()
        if master:
            # Drop the lines of updates that will be made again, and one that a kill cut short.
            lines = [line for line in read_jsonl(path) if start and line["step"] <= start]
            write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
            if lines:
                self.began -= lines[-1]["seconds"]  # the run goes on counting

    def add(self, **sums):
        """Add numbers, or 0-d tensors, to the sums of these names. It never waits for a device."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def collect(self, norm):
        """{name: sum over all ranks, "grad_norm", "seconds"} since the last line. Refuses a nan."""
        values = [torch.as_tensor(v, device=norm.device).float() for v in self.sums.values()]
        values = torch.stack([*values, norm.float()]).cpu().double()  # the one wait for the device
        totals = over_ranks(values[:-1]).tolist()
        found = dict(zip(self.sums, totals), grad_norm=values[-1].item())
        if not math.isfinite(sum(found.values())):
            raise Refused("the loss or its gradient is not a number: start again, lower --eta_bb")
        self.sums = {}
        return found | {"seconds": time.time() - self.last}

    def write(self, line):
        """Append a dict to log.jsonl, with the seconds of the run, and print its numbers."""
        self.last = time.time()  # so an evaluation after `collect` does not lower tokens/s
        if not self.master:
            return
        done = line["step"]
        seconds = self.last - self.began
        append_jsonl(self.path, line | {"seconds": seconds})
        numbers = [f"{name} {line[name]:,.6g}" for name in self.on_screen if name in line]
        if done > 1:  # the first update compiles, and an evaluation comes before it
            numbers.append(tqdm.format_interval(seconds / done * (self.steps - done)) + " left")
        try:
            print(f"update {done:,} of {self.steps:,}", *numbers, sep="  ")
        except BrokenPipeError:  # `train.py | head`: the run goes on, and prints nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- files ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path, which becomes `path` if the block ends without an exception."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tmp = f"{path}.tmp"
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # without it, a power cut can leave an empty file under this name
        os.replace(tmp, path)
    except BaseException:  # Ctrl-C, too
        Path(tmp).unlink(missing_ok=True)
        raise


def write_text(path, text):
    with atomic(path) as tmp:
        Path(tmp).write_text(text, encoding="utf-8")


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def append_jsonl(path, *values):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as f:
        f.seek(max(0, f.tell() - 1))
        if f.read(1) not in (b"", b"\n"):  # a kill left half a line: start a new one
            f.write(b"\n")
        f.writelines(json.dumps(value).encode() + b"\n" for value in values)


def read_jsonl(path):
    """The values of all whole lines: a kill may have cut one. [] for a file that does not exist."""
    values = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return values
