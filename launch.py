# SPDX-License-Identifier: MIT
"""What every script does around its own work: flags, ranks, stopping, whole files, the log.

Not here: checkpoints (checkpoint.py), or anything about diffusion.
"""

import argparse
import contextlib
import difflib
import inspect
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


class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` makes it exit code 2."""


# Types of fields with their smallest and largest value.
Size = typing.Annotated[int, 1, 2**31]
Count = typing.Annotated[int, 0, 2**62]
Share = typing.Annotated[float, 0, 1]
Rate = typing.Annotated[float, 0, 10]
Positive = typing.Annotated[float, 1e-6, 1e9]
Negative = typing.Annotated[float, -1e9, -1e-6]

WORDS = {bool: (True, False), type(None): (None,)}
# What other programs call our fields, where the words are not alike.
OTHER_NAMES = {"lr": "eta_bb", "learning_rate": "eta_bb", "epochs": "steps", "iters": "steps",
               "seq_len": "length", "block_size": "length", "dim": "n_embd", "top_k": "k",
               "temperature": "top_p", "rank": "r", "max_new_tokens": "gen_len"}
PIP_NAMES = {"mauve": "mauve-text", "lm_eval": "lm-eval"}  # the others are imported by this name


def check_ranges(cfg):
    """Raises Refused when a field of cfg is outside the range of its type. None is allowed."""
    for name, kind in typing.get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        for part in (kind, *typing.get_args(kind)):  # a range may be inside of `Size | None`
            low, high = getattr(part, "__metadata__", (-math.inf, math.inf))
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise Refused(f"--{name}={value} must be a number from {low} to {high}")


def parse_value(name, text, kind):
    """`--name=text` as its type: int, float, str, bool or Literal, alone or in a union."""
    options = typing.get_args(kind) or (kind,)  # the parts of a union, the words of a Literal
    for option in options:
        for value in WORDS.get(option) or typing.get_args(option) or (option,):
            if text.lower() == str(value).lower():
                return value
    if options[0] in (int, float, str):
        with contextlib.suppress(ValueError):
            return options[0](text)
    raise Refused(f"--{name}={text} is not {inspect.formatannotation(kind)}")


def from_cli(Config, argv=None, presets=None):
    """A dataclass from `[preset] --key=value --key value --flag …`. A flag overrides the preset."""
    argv = list(sys.argv[1:] if argv is None else argv)
    presets = presets or {}
    if {"-h", "--help"} & set(argv):
        for cls in reversed(Config.__mro__[:-1]):  # a commented class is the table of the flags
            print(inspect.getsource(cls))
        for name, fields in presets.items():
            print(f"preset {name}: {fields}")
        raise SystemExit(0)
    values = {}
    if argv and argv[0] in presets:
        values.update(presets[argv.pop(0)])
    kinds = typing.get_type_hints(Config)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False,
                                     argument_default=argparse.SUPPRESS)
    for name, kind in kinds.items():
        if bool in (kind, *typing.get_args(kind)):
            parser.add_argument(f"--{name}", nargs="?", const="True")  # its value may be left out
        else:
            parser.add_argument(f"--{name}")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].strip("-").partition("=")[0].replace("-", "_")
        near = difflib.get_close_matches(OTHER_NAMES.get(word, word), kinds, 1)
        meant = f"did you mean --{near[0]}? " if near else ""
        raise Refused(f"unknown argument {unknown[0]!r}: {meant}--help shows all flags and presets")
    for name, text in vars(given).items():
        values[name] = parse_value(name, text, kinds[name])
    cfg = Config(**values)
    check_ranges(cfg)
    return cfg


def run(main, Config, presets=None):
    """The last line of every script. Bad input gives one line on stderr instead of a traceback."""
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(errors="replace", line_buffering=True)  # not every terminal can show ω
    try:
        return main(from_cli(Config, presets=presets))
    except ImportError as e:
        package = str(e.name).partition(".")[0]
        reason = f"{e}: pip install {PIP_NAMES.get(package, package)}"
    except (Refused, OSError, argparse.ArgumentError) as e:
        reason = e
    if int(os.environ.get("LOCAL_RANK", 0)):
        time.sleep(5)  # rank 0 mostly says the same, and then torchrun ends this rank
    print(f"{os.path.basename(sys.argv[0])}: {reason}", file=sys.stderr)
    raise SystemExit(2)


def machine(device="auto", dtype="auto"):
    """(rank, world, device, autocast dtype or None). torchrun sets the first two."""
    if device == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        device = "cuda" if torch.cuda.device_count() else device
    if dtype == "auto":
        has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_bf16 else "float32"
    half = {"float32": None, "bfloat16": torch.bfloat16}  # in float16 the loss, nats / t, overflows
    if dtype not in half:
        raise Refused(f"--dtype={dtype}: use auto, bfloat16 or float32")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return rank, world, torch.device(device), half[dtype]


def to_device(x, device):
    """A tensor of the CPU, on the device. The host does not wait until a GPU has it."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # from other memory it may wait
    return x.to(device)


def join(world, device):
    """Connect to the other ranks, if any. NCCL moves tensors on GPUs, gloo those on the CPU."""
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def over_ranks(tensor, how=dist.ReduceOp.SUM):
    """The tensor, reduced over all ranks in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, how)
    return tensor


def any_rank(number):
    """The maximum of a number over all ranks, so that all take the same decision."""
    return over_ranks(torch.tensor(number), dist.ReduceOp.MAX).item()


def leave(world, message, status):
    """Ends a run. Every rank must call it. Rank 0 prints the message. A status but 0 is raised."""
    if world > 1:
        # torchrun kills all ranks when one ends with a status, also a rank that still saves.
        dist.barrier()
        dist.destroy_process_group()
    if message and os.environ.get("RANK", "0") == "0":
        print(message)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def signals():
    """Yields a list of the SIGTERM and Ctrl-C that came, for a loop that then saves and ends."""
    caught = []

    def take(number, frame):
        caught.append(number)
        # A second Ctrl-C ends the process. torchrun may send a second SIGTERM during a save.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def goes_on(last, resume, overwrite):
    """Whether a run goes on from the checkpoint `last`. Every rank must call it."""
    folder = os.path.dirname(last)
    exists = any_rank(os.path.exists(last))
    kept = any_rank(any(Path(folder).glob("step-*.pt")))
    if (exists or kept) and not overwrite and not (exists and resume):
        raise Refused(f"{folder} already holds a run: --resume goes on with its last.pt, "
                      f"--overwrite replaces it, another folder starts another")
    return resume is True or resume == "auto" and exists


@contextlib.contextmanager
def lock(folder):
    """A block that only one process runs for this folder. A kill releases the lock, too."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "a") as f:
        try:
            import fcntl
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is writing into {folder}: wait, or give another folder")
        except (ImportError, OSError):
            pass  # Windows, and some network disks, cannot lock: nothing is locked
        yield


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path, which becomes `path` if the block ends without an exception."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    tmp = f"{path}.tmp"
    yield tmp
    with open(tmp, "rb+") as f:
        os.fsync(f.fileno())  # without it, a power cut can leave an empty file under this name
    os.replace(tmp, path)


def write_text(path, text):
    with atomic(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def append_jsonl(path, *values):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a+b") as f:
        f.seek(max(0, f.tell() - 1))
        if f.read(1) not in (b"", b"\n"):  # a kill left half a line: no other is joined to it
            f.write(b"\n")
        f.writelines(json.dumps(value).encode() + b"\n" for value in values)


def read_jsonl(path):
    """The values of all whole lines: a kill may have cut one. [] for a file that does not exist."""
    values = []
    if os.path.exists(path):
        for line in Path(path).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return values


def progress(*args, **options):
    """tqdm's bar on stderr. A file keeps every picture, so there it is drawn each half minute."""
    seconds = 0.1 if sys.stderr.isatty() else 30
    return tqdm(*args, mininterval=seconds, maxinterval=30, dynamic_ncols=True, **options)


# The numbers on screen, if a line has them.
SHOWN = "loss", "val_soft", "val_plain", "val_binary", "lam", "omega_s", "tokens_per_s"


class Log:
    """What a trainer reports, from update `start` to `steps`: sums over all ranks since a line."""

    def __init__(self, path, start, steps, master):
        self.path, self.master = path, master
        self.start, self.steps = start, steps
        self.sums = {}        # since the last line
        self.before = 0.0     # seconds of earlier processes
        self.began = self.last = time.time()

    def begin(self):
        """Remove the lines of updates that will be made again, and one that a kill has cut."""
        if self.master:
            lines = read_jsonl(self.path) if self.start else []
            lines = [line for line in lines if line["step"] <= self.start]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
            self.before = lines[-1]["seconds"] if lines else 0.0

    def add(self, **sums):
        """Add numbers, or 0-d tensors, to the sums of these names. It never waits for a device."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def collect(self, norm):
        """{name: sum over all ranks, "grad_norm", "seconds"} since the last line. Refuses a nan."""
        values = [torch.as_tensor(v, device=norm.device).float() for v in self.sums.values()]
        *values, norm = torch.stack([*values, norm.float()]).tolist()  # the one wait for the device
        values = over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        if not math.isfinite(sum(values) + norm):
            raise Refused("the loss or its gradient is not a number: start again with a lower "
                          "--eta_bb; what was saved before is unharmed")
        found = dict(zip(self.sums, values), grad_norm=norm, seconds=time.time() - self.last)
        self.sums = {}
        return found

    def write(self, line):
        """Append a dict to log.jsonl, with the seconds of the run, and print its numbers."""
        self.last = time.time()  # so an evaluation after `collect` costs no tokens/s
        if not self.master:
            return
        line = line | {"seconds": self.before + self.last - self.began}
        append_jsonl(self.path, line)
        numbers = [f"{name} {line[name]:,.6g}" for name in SHOWN if name in line]
        seconds = (self.last - self.began) / max(1, line["step"] - self.start)
        left = tqdm.format_interval(seconds * (self.steps - line["step"])) + " left"
        try:
            print(f"update {line['step']:,} of {self.steps:,}", *numbers, left, sep="  ")
        except BrokenPipeError:  # `train.py | head`: the run goes on, and prints nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
