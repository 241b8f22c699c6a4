# SPDX-License-Identifier: MIT
"""What every script does before and around its own work. Nothing here is about diffusion.

    the command line     from_cli, check_ranges  flags from a commented dataclass, their limits
                         run                     one sentence for what cannot be done
    the machine          machine, join, leave    which rank this process is, its device and dtype
                         to_device               a copy to a GPU that nobody waits for
    other ranks          over_ranks, any_rank    sums and decisions that all ranks share
    stopping             signals                 Ctrl-C and SIGTERM end a run after its update
    going on             goes_on, lock           whether to start or to resume, and alone
    files                atomic, write_text      a new file replaces the old one when it is whole
                         *_json, *_jsonl         JSON lines survive a kill
    how far it is        progress, duration      a bar where somebody watches, a time in words
                         Log                     what a trainer shows, and its log.jsonl

Not here: models, checkpoints (checkpoint.py), text (data.py). This file is a module: every script
of this project runs it.
"""

import contextlib
import dataclasses
import difflib
import errno
import glob
import inspect
import io
import json
import math
import os
import signal
import sys
import time
import typing

import torch
import torch.distributed as dist
from tqdm import tqdm

# -------------------------------------------------------------------------------------------------
# the command line


class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` makes it exit code 2."""


# Types of fields with their smallest and largest value. `check_ranges` refuses all other values.
Size = typing.Annotated[int, 1, 2**31]
Count = typing.Annotated[int, 0, 2**62]
Share = typing.Annotated[float, 0, 1]
Rate = typing.Annotated[float, 0, 10]
Positive = typing.Annotated[float, 1e-6, 1e9]
Negative = typing.Annotated[float, -1e9, -1e-6]

WORDS = {type(None): {"none": None},
         bool: {"true": True, "1": True, "false": False, "0": False}}


def check_ranges(cfg):
    """Raises Refused when a field of cfg is outside the range of its type. None is allowed."""
    for name, kind in typing.get_type_hints(type(cfg), include_extras=True).items():
        value = getattr(cfg, name)
        for part in (kind, *typing.get_args(kind)):  # a range may be inside of `Size | None`
            low, high = getattr(part, "__metadata__", (-math.inf, math.inf))
            if isinstance(value, (int, float)) and not low <= value <= high:
                limit = f"at most {high}" if value > high else f"at least {low}"
                limit = "a number" if math.isnan(value) else limit
                raise Refused(f"--{name}={value} must be {limit}")


def words_of(kind):
    """{word: value} of the values of an annotation that are words, such as none and true."""
    words = {}
    for option in typing.get_args(kind) or (kind,):  # two options for `int | None`
        words |= WORDS.get(option) or {word: word for word in typing.get_args(option)}
    return words


def parse_value(name, text, kind):
    """`--name=text` as `kind`, one of the annotations that our Config classes use."""
    options, words = typing.get_args(kind) or (kind,), words_of(kind)
    if text.lower() in words:
        return words[text.lower()]
    if options[0] is bool:
        known = " or ".join(filter(str.isalpha, words))
        raise Refused(f"--{name}={text} is not {known}")
    try:
        return options[0](text)
    except ValueError:
        raise Refused(f"--{name}={text} is not of type {options[0].__name__}")


def print_help(Config, presets):
    """Print the source of the class: with its comments, it is the table of the flags."""
    for c in reversed(Config.__mro__):  # the parent first, then what its child adds
        if dataclasses.is_dataclass(c):
            print(inspect.getsource(c))
    for name, fields in presets.items():
        print(f"preset {name}: {fields}")


def join_values(Config, argv):
    """argv with `--key value` written `--key=value`. A flag takes only a word that it knows."""
    kinds, joined = typing.get_type_hints(Config), []
    for word in argv:
        key = joined[-1].removeprefix("--") if joined and joined[-1][:2] == "--" else ""
        kind = None if word.startswith("--") else kinds.get(key)
        is_flag = bool in (kind, *typing.get_args(kind))
        if kind and (not is_flag or word.lower() in words_of(kind)):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def from_cli(Config, argv=None, presets=None):
    """A dataclass from `[preset] --key=value --key value --flag …`.

    argv: list of words (default: the command line of this process).
    presets: {name: {field: value}}. The first word may name a preset. Flags override it.
    Raises Refused for an unknown preset or key, and for a value of the wrong type or out of range.
    """
    argv, presets = list(sys.argv[1:] if argv is None else argv), presets or {}
    if {"-h", "--help"} & set(argv):
        print_help(Config, presets)
        raise SystemExit(0)
    values, kinds = {}, typing.get_type_hints(Config)
    if argv and not argv[0].startswith("-"):
        if argv[0] not in presets:
            known = " or ".join(presets) or "only --key=value"
            raise Refused(f"unknown preset {argv[0]!r}: use {known}")
        values.update(presets[argv.pop(0)])
    for arg in join_values(Config, argv):
        name, has_value, text = arg.removeprefix("--").partition("=")  # a value may hold = itself
        if not arg.startswith("--") or name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            meant = f"did you mean --{near[0]}? " if near else ""
            raise Refused(f"unknown argument {arg!r}: {meant}--help shows every flag")
        if has_value:
            values[name] = parse_value(name, text, kinds[name])
        elif bool in (kinds[name], *typing.get_args(kinds[name])):
            values[name] = True
        else:
            raise Refused(f"--{name} needs a value: --{name}=…")
    cfg = Config(**values)
    check_ranges(cfg)
    return cfg


def line_breaks(text):
    r"""A text of the command line, with a line break for each \n, which is hard to type there."""
    return text.replace("\\n", "\n")


class Output(io.FileIO):
    """stdout or stderr of a script. A closed pipe or a full disk does not end the run."""

    lost = None

    def write(self, data):
        try:
            return super().write(data)
        except OSError as e:
            if e.errno not in (errno.EPIPE, errno.EIO):  # these two mean that nobody reads it
                Output.lost = e
            return len(data)


def sentence(e):
    """What to say instead of a traceback, or "" for an exception that is a defect of the code."""
    if isinstance(e, (Refused, OSError)):
        return str(e)
    if isinstance(e, KeyboardInterrupt):
        return "stopped by Ctrl-C: what was written before is whole"
    if isinstance(e, MemoryError) or isinstance(e, RuntimeError) and "allocate" in str(e):
        reason = str(e).partition("\n")[0]
        return f"not enough memory ({reason}): make the model, the length or the batch smaller"
    return ""


def run(main, Config, presets=None):
    """The last line of every script. Bad input gives one line on stderr instead of a traceback."""
    for name in "stdout", "stderr":
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):  # a test may have put another there
            raw = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
            # A terminal that cannot show ω shows a question mark.
            text = io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, text)
    script = os.path.basename(sys.argv[0])
    try:
        main(from_cli(Config, presets=presets))
    except BaseException as e:
        said = sentence(e)
        if not said:
            raise
        if int(os.environ.get("LOCAL_RANK", 0)):
            # Rank 0 says the same, and then torchrun ends this rank. So the user reads it once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            time.sleep(5)
        print(f"{script}: {said}", file=sys.stderr)
        raise SystemExit(130 if isinstance(e, KeyboardInterrupt) else 2)
    if Output.lost:
        print(f"{script}: a part of what it printed is lost ({Output.lost})", file=sys.stderr)
        raise SystemExit(1)


# -------------------------------------------------------------------------------------------------
# the machine, and the other processes


def machine(device="auto", dtype="auto"):
    """(rank, world, device, autocast dtype or None) of this process.

    Rank and world come from the variables that torchrun sets.
    device: cuda, mps or cpu. auto takes the first of them that this machine has.
    dtype: bfloat16 or float32. auto takes bfloat16 on a GPU that has it. Where the device does not
        have the dtype, float32 is used, and a printed sentence says so.
    Raises Refused when there is no such device for this process.
    """
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()),
             "cpu": local + 1}
    kind = device if device != "auto" else next(name for name, n in count.items() if n)
    if kind not in count:
        raise Refused(f"--device={device}: use auto, {', '.join(count)}")
    if count[kind] <= local:
        raise Refused(f"--device={device} for local process {local}, but this machine has "
                      f"{count[kind]} of it: use --device=cpu, or fewer processes")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise Refused(f"--dtype={dtype}: use auto, bfloat16 or float32")
    on_gpu = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = dtype != "float32" if on_gpu else kind == "cpu" and dtype == "bfloat16"
    half = torch.bfloat16 if wanted else None
    # float16 is never used: the loss is a sum of nats divided by t, and can exceed its range.
    if rank == 0 and (dtype == "float16" or dtype == "bfloat16" and half is None):
        print(f"--dtype={dtype} cannot be had here: using {'bfloat16' if half else 'float32'}")
    return rank, world, torch.device(kind, local) if kind == "cuda" else torch.device(kind), half


def to_device(x, device):
    """A tensor of the CPU, on the device. The host does not wait until a GPU has it."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # from other memory it may wait
    return x.to(device)


def join(world, device):
    """Connect to the other ranks, if any. NCCL moves tensors on GPUs, gloo those on the CPU.

    `torchrun --max_restarts` needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment. Without
    it, torch (2.6 and 2.13 do) may tell restarted ranks the addresses of dead ones.
    """
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def over_ranks(tensor, how=dist.ReduceOp.SUM):
    """The tensor, reduced over all ranks in place. A process alone returns it as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor, how)
    return tensor


def any_rank(number):
    """The maximum of this number over all ranks, so that all ranks take the same decision."""
    return over_ranks(torch.tensor(number), dist.ReduceOp.MAX).item()


def leave(world, message, status):
    """Ends a run, complete or stopped. Every rank must call it.

    message: what rank 0 prints, or "".   status: raises SystemExit(status) unless it is 0.
    """
    rank = 0
    if world > 1:
        rank = dist.get_rank()
        # torchrun kills all ranks when one ends with a status, also a rank that still saves.
        dist.barrier()
        dist.destroy_process_group()
    if message and rank == 0:
        print(message)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def signals():
    """Yields a list that collects SIGTERM, SIGHUP and Ctrl-C, which then do not end the process.

    A training loop reads it after each update, saves, and ends. A signal that this process was
    started to ignore, as nohup does with SIGHUP (a closed terminal), stays ignored.
    """
    caught = []

    def take(number, frame):
        caught.append(number)
        # A second Ctrl-C ends the process. A second SIGTERM does not, because torchrun may send one
        # while the run is still saving.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    known = signal.Signals.__members__  # Windows has no SIGHUP
    numbers = [known[name] for name in ("SIGTERM", "SIGINT", "SIGHUP") if name in known]
    before = {n: signal.signal(n, take) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------------------
# files


def goes_on(last, resume, overwrite):
    """Whether a run goes on from the checkpoint `last`. Every rank must call it.

    resume: True, False, or "auto", which goes on if there is a checkpoint, and starts if not.
    Raises Refused when there is one, and neither `resume` nor `overwrite` says what to do with it.
    """
    there = any_rank(int(os.path.exists(last)))
    if there and not (resume or overwrite):
        raise Refused(f"{os.path.dirname(last)} already holds a run: --resume goes on with it, "
                      f"--overwrite replaces it, another folder starts another")
    return resume is True or resume == "auto" and bool(there)


@contextlib.contextmanager
def lock(folder):
    """A block in which no other process gets the lock of the same folder.

    The kernel releases it when the process ends, also when it is killed. So whoever has the lock
    may remove the temporary files of `atomic` that are left. On a disk that cannot lock, nothing
    is locked. Raises Refused when another process has the lock.
    """
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "a") as f:
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise Refused(f"another process is writing into {folder}: wait until it ends, or end "
                          f"it, or choose another folder")
        except OSError:
            pass
        for pattern in "*.????????.tmp", "*/*.????????.tmp":
            for name in glob.glob(pattern, root_dir=folder):
                os.remove(os.path.join(folder, name))
        yield


def regular_file(path):
    """The path of the file behind a link. Raises Refused for a device, a pipe and a folder."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"could not write {path}, a folder, device or pipe: name a file")
    return path


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path, which becomes `path` if the block ends without an exception.

    So an older file is never half overwritten. A link is followed. Raises Refused when the disk is
    full, or the file cannot be written. The older file is then still there.
    """
    path = regular_file(path)
    tmp = f"{path}.{os.urandom(4).hex()}.tmp"  # a name of its own: nobody else writes to it
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # without it, a power cut can leave an empty file under this name
        os.replace(tmp, path)
    except OSError as e:
        raise Refused(f"could not write {path} ({e}): free some space or choose another folder; "
                      f"an older file is unharmed")
    finally:
        with contextlib.suppress(OSError):
            os.remove(tmp)


def write_text(path, text):
    """Write a whole text file, atomically. Raises Refused like `atomic`."""
    with atomic(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)


def read_json(path):
    """The JSON object in a file, as a dict. Raises Refused when there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(f"{path} does not exist: give the folder of a model or adapter with all its "
                      f"files")
    except (OSError, ValueError, RecursionError) as e:
        raise Refused(f"{path} is not JSON ({e}): fetch it again")
    if not isinstance(values, dict):
        raise Refused(f"{path} holds no JSON object but a {type(values).__name__}: fetch it again")
    return values


def append_jsonl(path, *values):
    """Append one line of JSON for each value. Raises Refused when the file cannot be written."""
    path = regular_file(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a+b") as f:
            f.seek(max(0, f.tell() - 1))
            # A kill or a full disk may have left half a line. A new line must not be joined to it.
            if f.read(1) not in (b"", b"\n"):
                f.write(b"\n")
            f.writelines(json.dumps(value).encode() + b"\n" for value in values)
    except OSError as e:
        raise Refused(f"could not write {path} ({e}): what is there stays; free some space, and "
                      f"the same command goes on")


def read_jsonl(path, repair=False, skip_broken=False):
    """The values of all whole lines of a file: [] for a file that does not exist.

    A process that was killed can leave its last line cut short. This line is left out.
    repair: also remove it from the file.
    skip_broken: leave out broken lines before the last, too. A full disk can make them in a log.
    Raises Refused for any other broken line. The file is then left as it is.
    """
    try:
        with open(regular_file(path) if repair else path, "rb") as f:
            lines = f.read().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise Refused(f"{path} cannot be read ({e}): give the path of a file")
    values, rest = [], lines.pop()
    for i, line in enumerate([*lines, rest] if rest else lines, 1):
        cut = i > len(lines) and b'{"'.startswith(line[:2])  # the start of one of our lines
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as e:
            if not (cut or skip_broken):
                raise Refused(f"line {i} of {path} is not JSON ({e}): damaged, or another file")
            if cut and repair:
                os.truncate(path, sum(len(line) + 1 for line in lines))
    return values


# -------------------------------------------------------------------------------------------------
# how far it is


def progress(*args, **how):
    """tqdm's bar on stderr. A file keeps every picture, so there it is drawn every half minute,
    not every tenth of a second."""
    if not sys.stderr.isatty():
        how = {"mininterval": 30, "maxinterval": 30} | how
    return tqdm(*args, dynamic_ncols=True, **how)


def duration(seconds):
    """A time in words, in the largest unit of which it has at least two."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.0f} s"


SHOWN = "loss", "val_soft", "lam", "omega_s", "val_plain", "val_binary"  # on the bar


class Log:
    """What a trainer reports while it runs: means since its last line, over all ranks.

    path: log.jsonl.   start: the updates made before this process began.   steps: those of the run.
    master: True on the rank that writes and prints. On a terminal it prints a bar with the latest
    numbers, elsewhere a line at a time. The trainer adds up sums and makes a line:

        for step in log.updates():
            log.add(nll=nll.sum(), masks=n)                         # never waits for the device
            sums, updates, seconds, norm = log.collect(done, norm)  # waits once
            log.write({"step": done, "loss": sums["nll"] / …})
            log.print()
    """

    def __init__(self, path, start, steps, master):
        self.path, self.start, self.steps, self.master = path, start, steps, master
        self.done, self.sums, self.text = start, {}, ""
        self.bar, self.latest, self.before = None, {}, 0.0
        self.began = self.last = time.time()

    def begin(self):
        """Remove broken lines from the file, and lines of updates that will be made again."""
        if self.master:
            lines = [v for v in read_jsonl(self.path, skip_broken=True) if isinstance(v, dict)]
            kept = [v for v in lines if v.get("step", math.inf) <= self.start]
            write_text(self.path, "".join(json.dumps(v) + "\n" for v in kept if self.start))
            if kept and self.start:  # the seconds of a run that was stopped go on
                self.before = kept[-1].get("seconds", 0.0)

    def updates(self):
        """Yields the numbers, from start on, of the updates left to make. It draws the bar."""
        drawn = self.master and sys.stdout.isatty()
        how = "update {n:,} of {total:,} |{bar:10}| {desc}"  # its end is cut in a narrow terminal
        with tqdm(range(self.start, self.steps), initial=self.start, total=self.steps,
                  file=sys.stdout, disable=not drawn, dynamic_ncols=True, bar_format=how) as bar:
            self.bar = bar if drawn else None
            yield from bar
        self.bar = None

    def add(self, **sums):
        """Add numbers, or 0-d tensors on any device, to the sums of these names."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    @contextlib.contextmanager
    def pause(self):
        """Time spent in this block does not count as time between two lines."""
        start = time.time()
        yield
        self.last += time.time() - start

    def collect(self, done, norm):
        """({name: sum over all ranks}, updates, seconds, norm as a float) since the last call.

        done: updates made so far.   norm: 0-d tensor, the norm of the last gradient.
        Raises Refused if a sum or the norm is not finite, so that no broken weights are saved.
        """
        values = [torch.as_tensor(v, device=norm.device).float() for v in self.sums.values()]
        *values, norm = torch.stack([*values, norm.float()]).tolist()  # the one wait for the device
        values = over_ranks(torch.tensor(values, dtype=torch.float64)).tolist()
        if not math.isfinite(sum(values) + norm):
            raise Refused(f"the loss or its gradient is not a number by update {done:,}: start "
                          f"again with a lower --eta_bb; what was saved before is unharmed")
        sums, now = dict(zip(self.sums, values)), time.time()
        updates, seconds = done - self.done, now - self.last
        self.done, self.last, self.sums = done, now, {}
        return sums, updates, seconds, norm

    def write(self, line):
        """Append a dict to log.jsonl. A full disk loses this line, but does not end the run."""
        seconds = time.time() - self.began
        line = {**line, "seconds": self.before + seconds}
        if self.master:
            try:
                append_jsonl(self.path, line)
            except Refused as refused:
                tqdm.write(f"log line lost: {refused}")  # above the bar
        self.latest |= line  # numbers that not every line has stay on the bar
        names = [name for name in line if name not in ("step", "seconds")]
        if self.bar is not None:
            names = [name for name in SHOWN if name in self.latest]
        numbers = "  ".join(f"{name} {v:,.0f}" if v >= 1000 else f"{name} {v:.4g}"
                            for name, v in zip(names, map(self.latest.get, names)))
        updates = max(1, self.done - self.start)
        left = duration(seconds / updates * (self.steps - self.done)) + " left"
        self.text = f"update {self.done:,} of {self.steps:,}  {numbers}  {left}"
        if self.bar is not None:
            self.text = f"{left}  {numbers}"

    def print(self):
        """Print the line that was written last, once."""
        if self.bar is not None and self.text:
            self.bar.set_description_str(self.text)
        elif self.master and self.text:
            print(self.text)
        self.text = ""
