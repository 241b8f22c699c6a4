# SPDX-License-Identifier: MIT
"""What all scripts share: flags, devices and ranks, stopping and resuming, the log, files."""

import argparse
import contextlib
import difflib
import errno
import functools
import inspect
import json
import math
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import typing
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm


# ---- the command line ----------------------------------------------------------------------------
class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` exits with code 2."""


# Types of Config fields. The bounds catch what would silently spoil a run, such as --p_sm=80.
Size = typing.Annotated[int, 1, math.inf]
Count = typing.Annotated[int, 0, math.inf]
Share = typing.Annotated[float, 0, 1]
Positive = typing.Annotated[float, 1e-6, math.inf]
NotNegative = typing.Annotated[float, 0, math.inf]
DType = typing.Literal["auto", "float32", "bfloat16"]  # float16 would need a GradScaler

NAMES = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
OPTIONAL = {"datasets": "datasets", "lm_eval": "lm-eval", "matplotlib": "matplotlib",
            "mauve": "mauve-text", "pyarrow": "pyarrow", "transformers": "transformers"}
# A full disk or a closed pipe is no bug of ours: no traceback
FULL_OR_CLOSED = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE
REFUSED = Refused, argparse.ArgumentError, ConnectionError


def run(main, Config, presets=(), ranks=False):
    """Run a script's main. Bad input: one line on stderr, exit code 2. Other errors: a traceback.

    presets: see `from_cli`.   ranks: whether the script shares its work among torchrun's ranks.
    """
    for stream in sys.stdin, sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):  # not in a notebook, nor if it is closed
            stream.reconfigure(errors="replace", line_buffering=True)  # some terminals have no ω
    try:
        if {"-h", "--help"} & {*sys.argv}:
            return print_help(Config, presets)
        if not ranks and os.environ.get("WORLD_SIZE", "1") != "1":
            raise Refused("this script runs in one process: start it without torchrun")
        return main(from_cli(Config, sys.argv[1:], presets))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as e:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Rank 0 usually prints the same line: wait until torchrun ends this rank by SIGTERM.
            time.sleep(5)
        if isinstance(e, ModuleNotFoundError) and e.name in OPTIONAL:
            message = f"{e}: pip install {OPTIONAL[e.name]}"
        elif isinstance(e, OSError) and e.filename is not None:
            message = f"{e.filename or 'an empty path'}: {e.strerror}"
        elif isinstance(e, REFUSED) or getattr(e, "errno", None) in FULL_OR_CLOSED:
            message = e
        else:
            raise
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        sys.exit(2)


def print_help(Config, presets):
    """Print the commands in the script's docstring, the fields with their comments, the presets."""
    doc = sys.modules["__main__"].__doc__ or ""
    print(*re.findall(r"^ +(?:python|torchrun) .*", doc, re.M), "", sep="\n")
    for cls in reversed(Config.__mro__[:-1]):
        print(inspect.getsource(cls))
    for name in presets:
        print(f"preset {name}: {presets[name]}")


def from_cli(Config, argv, presets=()):
    """A Config from the words of a command line: `[first words] --key=value --key value --flag …`

    presets: {name: fields}. The first word may be such a name, and flags override its fields.
    A field of type list takes all other first words. Config.NO_FLAGS names fields without a flag.
    """
    values = {}
    if argv and argv[0] in presets:
        values = presets[argv[0]]
        argv = argv[1:]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False,
                                     argument_default=argparse.SUPPRESS)
    names = []
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        bare = {"nargs": "?", "const": True} if bool in (kind, *typing.get_args(kind)) else {}
        if kind is list and name not in values:  # else `data.py stdlib mine.txt` drops stdlib
            parser.add_argument(name, nargs="*")
        elif kind is not list and name not in getattr(Config, "NO_FLAGS", ()):
            parser.add_argument(f"--{name}", type=functools.partial(parse, kind=kind), **bare)
            names.append(name)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise Refused(unknown_word(unknown[0], names, presets))
    return Config(**values | vars(known))


def unknown_word(word, names, presets):
    """The error message for an unknown word on the command line."""
    if not word.startswith("-"):
        return f"unknown word {word!r}: presets are {', '.join(presets) or 'none'}; see --help"
    flag = word.partition("=")[0]
    nearest = difflib.get_close_matches(flag.strip("-"), names, n=1, cutoff=0.7)
    return f"unknown flag {flag}: {f'did you mean --{nearest[0]}?' if nearest else 'see --help'}"


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
    span = f", from {low:g} to {high:g}" if limits else ""
    raise argparse.ArgumentTypeError(f"{text} is not allowed: it takes {names}{span}")


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
        # No cache: pass 2 would reuse pass 1's bf16 weights, which have no autograd graph.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None,
                              cache_enabled=False)


def machine(device="auto", dtype="auto"):
    """The Machine this process runs on.   device: a name for torch, or auto.   dtype: see DType."""
    if device == "auto":
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


def join(machine):
    """Connect to the other ranks, if any: over NCCL for GPU tensors, over gloo for CPU tensors."""
    if machine.world > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if machine.device.type == "cuda" else "gloo")


def first_rank(machine, make):
    """Call make() on rank 0. The others wait for it."""
    if machine.rank == 0:
        make()
    if machine.world > 1:
        dist.barrier()


def ddp(model, machine):
    """The model, inside DDP if there are other ranks."""
    if machine.world > 1:  # as views of DDP's buckets, gradients need no memory of their own
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    return model


def end_run(machine, log, command, code, step, stopped):
    """End a run, on every rank. Rank 0 prints what is next. After a signal (stopped), exit.

    log: Log.   command: the words to run next.   code: see `soft_mask_class`.   step: updates made.
    """
    log.bar.close()
    if machine.world > 1:
        # Wait: if a rank exits with a nonzero status, torchrun kills the others, even mid-save.
        dist.barrier()
        dist.destroy_process_group()
    if code:
        command = [*command, f"--code={code}"]
    message = warning(log.newest) + shlex.join(command)
    if stopped:
        message = (f"stopped after update {step:,}, which is saved: to continue, run the same "
                   f"command with --resume")
    if machine.rank == 0:
        print(message)
    if stopped:
        sys.exit(128 + stopped)


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
class Stop:
    """stop() returns the number of a signal that any rank received, else 0. Call it on all ranks.

    with Stop() as stop: in this block, after the first call, a signal no longer ends the process.
    A second Ctrl-C does.
    """

    def __enter__(self):
        self.number = 0
        self.before = {}  # {signal: its handler}
        return self

    def __call__(self):
        # SIGHUP: a closed terminal; nohup ignores it. SIGUSR1: Slurm can send it before the time is
        # up. Windows lacks some of these.
        names = "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"
        self.before = self.before or {
            n: signal.signal(n, self.take) for n in signal.Signals if n.name in names
            and (n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN)}
        return over_ranks(torch.tensor(self.number), dist.ReduceOp.MAX).item()

    def take(self, number, frame):
        self.number = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def resumes(folder, resume, *results):
    """Whether to continue a folder's run from last.pt. Call it on every rank, inside `lock`.

    results: patterns of the run's other files. Without last.pt, they must not be overwritten.
    """
    holds = [any(Path(folder).glob(name)) for name in ("last.pt", "log.jsonl", *results)]
    last, log, *left = over_ranks(torch.tensor(holds).int(), dist.ReduceOp.MAX).tolist()
    if not resume and (last or log):
        raise Refused(f"{folder} holds a run: give --resume to go on, or another folder")
    if any(left) and not last:
        raise Refused(f"{folder} holds what a run has left, but no last.pt: give another folder")
    return bool(last)


def is_due(step, every, steps):
    """Whether something is due after update `step`: every so many (0: never), and at the end."""
    return every > 0 and (step % every == 0 or step == steps)


def check_same(path, before, now, names, remedy=""):
    """Raises Refused unless the settings in a file (before) equal those of this command (now)."""
    different = [f"{name} ({before.get(name)!r} there, {now[name]!r} here)"
                 for name in sorted(names) if before.get(name) != now[name]]
    if different:
        raise Refused(f"{path} has other settings: {', '.join(different)}{remedy}")


def check_run(path, ckpt, identity, config):
    """Print which settings differ. Raises Refused if this is not the run that last.pt is from.

    identity: {name: value} of all that must be the same.   config: the settings.
    """
    for name, value in config.items():
        before = ckpt["config"].get(name)
        if before != value and name != "resume" and os.environ.get("RANK", "0") == "0":
            print(f"{name} {before} → {value}")
    check_same(path, ckpt["identity"], identity, identity)


@contextlib.contextmanager
def lock(folder, master=True):
    """Let one process at a time into a folder. Only rank 0, the master, writes: only it locks."""
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
        else:
            for name in ("*.pt", "*.bin", "*/*.safetensors") if master else ():
                for half in Path(folder).glob(f"{name}.[0-9]*.tmp"):
                    half.unlink()  # a large file of a process that was killed
        yield


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
        self.path = path
        self.start = start
        self.steps = steps
        self.master = master
        self.bar = progress(initial=start, total=steps, unit=" updates", leave=False,
                            disable=None)  # None: off without a terminal
        self.first = None         # (update, time) of the first line
        self.newest = {}          # the last of `line`, for `warning`
        self.sums = {}            # since the last line
        self.last = time.time()   # of the last line
        self.began = self.last
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

    def line(self, step, optimizer, sm, norm):
        """The line for all updates since the last line, up to `step`. Raises Refused on NaN."""
        values = [float(value) for value in self.sums.values()]  # a host sync for each tensor
        values = over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        sums = dict(zip(self.sums, values), norm=norm.item())
        if not math.isfinite(sum(sums.values())):
            self.bar.close()  # else the message would share its line
            raise Refused("the loss or its gradient is not finite: try a lower --eta_bb, or other "
                          "weights")
        self.sums = {}
        line = {"step": step, "loss": sums["loss"] / sums["n"],
                "ce_per_mask": sums["ce"] / max(1, sums["masks"]),
                "eta_bb": optimizer.param_groups[0]["lr"], "grad_norm": sums["norm"],
                "tokens_per_s": sums["tokens"] / (time.time() - self.last)}
        if sums["soft"]:
            line["lam"] = sums["lam"] / sums["soft"]
        if sm:
            line |= zip(("omega_s", "omega_a", "omega_b"), torch.stack(sm.omega).tolist())
            if sm.k is None:
                line["tau"] = sm.tau.item()
        self.newest = line
        return line

    def write(self, line):
        """Append `line` and the seconds to log.jsonl, and print it with the time left."""
        self.last = time.time()  # an evaluation after `line` must not lower tokens/s
        if not self.master:
            return
        step = line["step"]
        seconds = self.last - self.began
        append_jsonl(self.path, line | {"seconds": seconds})
        formats = {"loss": "loss {:.4g}", "val_soft": "with feedback {:.4g}",
                   "val_plain": "without feedback {:.4g}", "lam": "lam {:.4f}",
                   "omega_s": "omega_s {:.4g}", "tokens_per_s": "{:,.0f} tokens/s"}
        words = [f"update {step:,} of {self.steps:,}"]
        words += [formats[name].format(line[name]) for name in formats if name in line]
        if self.first:  # measured from there, because the first update takes longer
            update, then = self.first
            rest = (self.last - then) / (step - update) * (self.steps - step)
            words.append(f"{tqdm.format_interval(rest)} left")
        elif step > self.start:
            self.first = step, self.last
        try:
            self.bar.write("  ".join(words))
        except OSError:  # `train.py | head`, or a closed terminal: keep running, print nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warning(line):
    """A line for the user if λ is near 0 in a line of the log, else ""."""
    if line.get("lam", 1.0) >= 1e-3:  # 1.0: if no update had feedback
        return ""
    # The cross-entropy per mask estimates the mean H. With ω_b = −H, λ is ω_s / 2 there.
    H = max(0.01, line["ce_per_mask"])
    return (f"feedback is off: λ is {line['lam']:.1g} on average. Train longer, or start with "
            f"--omega_s=0.5 --omega_a=1 --omega_b={-H:.2g}\n")


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
        clear = isinstance(e, (Refused, ImportError)) or getattr(e, "filename", None)
        if clear or not broken:
            raise
        raise Refused(f"{place}: {in_short(e)}{remedy}")


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path. It is renamed to `path` if the block ends without an exception."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tmp = f"{path}.{os.getpid()}.tmp"  # another process may write the same file
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


def save(path, **parts):
    """A checkpoint: a dict of tensors and plain values, by torch.save. Raises OSError if it fails.

    kind              "mdlm", "dream-adapter" or "soft mask"
    config            {field: value}
    identity          what must be the same when a run is resumed
    step, metrics     updates made, and the last evaluation
    model, ema        {name: tensor}; ema: the backbone only [code]
    optimizer         only to resume the run
    tokenizer, data   as in meta.json; {path, sha256, val}
    net, SoftMask     names of classes that are not ours; k: of a soft mask
    git, versions     of this code; of Python and torch

    Every random draw is keyed by seed and step, so no other random state is saved.
    """
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        with atomic(path) as tmp, open(tmp, "wb") as f:
            torch.save({"git": git_version(), "versions": versions, **parts}, f)
    except (OSError, RuntimeError) as e:
        if isinstance(e, RuntimeError):  # torch.save may hide the disk's error behind its own
            e = e.__context__ or e
        raise OSError(*e.args, path)


def git_version():
    """{commit, dirty} of this source code, or {commit: "unknown"}"""
    # Without --git-dir, a copy inside another repository would report the other's commit.
    command = "git --git-dir=.git --work-tree=. describe --always --exclude=* --abbrev=40 --dirty"
    try:
        version = subprocess.check_output(command.split(), cwd=os.path.dirname(__file__) or ".",
                                          stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown"}
    return {"commit": version.strip().removesuffix("-dirty"), "dirty": "-dirty" in version}


@contextlib.contextmanager
def input_errors():
    """A ValueError in this block is about the user's input. It becomes Refused."""
    try:
        yield
    except ValueError as e:
        raise Refused(e)


def soft_mask_class(code):
    """The class SoftMask that a Python file defines, or None. This runs the file: --code=FILE."""
    if not code:
        return None
    open(code).close()  # a folder would be run as a package
    sys.path.append(os.path.dirname(code))  # for its imports
    own = runpy.run_path(code).get("SoftMask")
    if own is None or own.__module__ == "softmask":  # else the paper's rule would run in its place
        raise Refused(f"{code} defines no SoftMask of its own, such as `SoftMask = YourClass`")
    return own


def read_json(path):
    """The JSON object in a file. There and in all objects inside, a missing field is Refused."""
    class Fields(dict):
        def __missing__(self, name):
            raise Refused(f"{path} has no field {name!r}")
    with readable(path, ": this is no complete JSON object"):
        fields = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=Fields)
        if not isinstance(fields, Fields):
            raise TypeError(f"a {type(fields).__name__}")
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
