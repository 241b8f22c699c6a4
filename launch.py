# SPDX-License-Identifier: MIT
"""What every script of this project does before and around its own work: nothing here is about diffusion.

    the command line      from_cli, run           flags from a commented dataclass; bad input in one sentence
    the machine           machine, join, leave    which rank this process is, on which device, in which dtype
    other processes       over_ranks, any_rank    sums and decisions that all ranks share
    the outside world     signals                 Ctrl-C and SIGTERM end a run after the update that is under way
    files                 atomic, *_json*         a good file is never half overwritten; JSON lines survive a kill
    the log               Log                     one line on screen and one in log.jsonl, for both trainers

Not here: models, checkpoints (checkpoint.py), text (data.py).
"""

import contextlib
import dataclasses
import inspect
import json
import math
import os
import signal
import sys
import time
import typing

import torch
import torch.distributed as dist

# ---------------------------------------------------------------------------------------------------
# the command line


class Refused(ValueError):
    """Bad input, in one sentence: the value, the limit, the remedy. `run` turns it into exit code 2."""


def parse_value(name, text, kind):
    """`--name=text` as `kind`, one of the annotations that our Config classes use."""
    options = typing.get_args(kind) or (kind,)  # `int | None` has two
    if type(None) in options and text.lower() == "none":
        return None
    kind = options[0]
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        wanted = "true or false" if kind is bool else f"of type {kind.__name__}"
        raise Refused(f"--{name}={text} is not {wanted}")


def print_help(Config, presets):
    """The table of hyperparameters is the source of the class itself, with its comments."""
    classes = [c for c in reversed(Config.__mro__) if dataclasses.is_dataclass(c)]
    for c in classes:  # inherited fields first
        print(inspect.getsource(c))
    for name, fields in presets.items():
        print(f"preset {name}: {fields}")


def from_cli(Config, argv=None, presets=None):
    """A dataclass from `[preset] --key=value --flag …`.

    argv: list of words (default: the command line of this process).
    presets: {name: {field: value}}. One may stand first on the line; the flags after it override it.
    Raises Refused for an unknown preset or key, and for a value of the wrong type.
    """
    argv, presets = list(sys.argv[1:] if argv is None else argv), presets or {}
    if {"-h", "--help"} & set(argv):
        print_help(Config, presets)
        raise SystemExit(0)
    values, kinds = {}, typing.get_type_hints(Config)
    if argv and not argv[0].startswith("--"):
        if argv[0] not in presets:
            known = " or ".join(presets) or "only --key=value"
            raise Refused(f"unknown preset {argv[0]!r}: use {known}")
        values.update(presets[argv.pop(0)])
    for arg in argv:
        name, has_value, text = arg.removeprefix("--").partition("=")  # a value may hold = itself
        if not arg.startswith("--") or name not in kinds:
            keys = ", ".join(sorted(kinds))
            raise Refused(f"unknown argument {arg!r}: fields are --key=value with key in {keys}")
        if has_value:
            values[name] = parse_value(name, text, kinds[name])
        elif bool in (kinds[name], *typing.get_args(kinds[name])):
            values[name] = True
        else:
            raise Refused(f"--{name} needs a value: --{name}=…")
    return Config(**values)


def run(main, Config, presets=None):
    """The last line of every script: parse, run, and say bad input in a line instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without ω or λ shows a question mark there
            stream.reconfigure(errors="replace")
    try:
        main(from_cli(Config, presets=presets))
    except Refused as refused:
        print(f"{os.path.basename(sys.argv[0])}: {refused}", file=sys.stderr)
        raise SystemExit(2)


# ---------------------------------------------------------------------------------------------------
# the machine, and the other processes


def machine(device="auto", dtype="auto"):
    """(rank, world, device, autocast dtype or None) of this process: torchrun's variables, and two flags.

    device: cuda, mps or cpu; auto is the first of them that is there.
    dtype: bfloat16 or float32; auto is bfloat16 on a GPU that has it. A dtype that the device does not
        have becomes float32, and a sentence says so.
    Raises Refused when this process has no such device.
    """
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()),
             "cpu": local + 1}
    kind = device if device != "auto" else next(name for name, n in count.items() if n)
    if count.get(kind, 0) <= local:
        raise Refused(f"--device={device} for local process {local}, but this machine has "
                      f"{count.get(kind, 0)} of it: use --device=cpu, or fewer processes")
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise Refused(f"--dtype={dtype}: use auto, bfloat16 or float32")
    on_gpu = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = dtype != "float32" if on_gpu else kind == "cpu" and dtype == "bfloat16"
    half = torch.bfloat16 if wanted else None
    # float16 is never used: the loss, a sum of nats over t, needs more range than it has.
    if rank == 0 and (dtype == "float16" or dtype == "bfloat16" and half is None):
        print(f"--dtype={dtype} cannot be had here: using {'bfloat16' if half else 'float32'}")
    return rank, world, torch.device(kind, local) if kind == "cuda" else torch.device(kind), half


def join(world, device):
    """Find the other ranks, if there are any. NCCL for tensors on GPUs, gloo for flags on the CPU."""
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def over_ranks(tensor, how=dist.ReduceOp.SUM):
    """The tensor, summed over all ranks in place (or their maximum). Alone: the tensor."""
    if dist.is_initialized():
        dist.all_reduce(tensor, how)
    return tensor


def any_rank(number):
    """The largest of all ranks' numbers, so that all ranks take the same decision."""
    return over_ranks(torch.tensor(number), dist.ReduceOp.MAX).item()


def leave(world, message, status):
    """The end of a run, complete or not, on every rank.

    message: what rank 0 prints, or "". Raises SystemExit(status) unless it is 0.
    """
    rank = 0
    if world > 1:
        rank = dist.get_rank()
        dist.barrier()  # torchrun kills all ranks when one ends early, also the one that still saves
        dist.destroy_process_group()
    if message and rank == 0:
        print(message)
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def signals():
    """A list that takes up SIGTERM and Ctrl-C, so that the training step can end and save first."""
    caught = []

    def take(number, frame):
        caught.append(number)
        # A second Ctrl-C kills. A second SIGTERM does not: torchrun sends several, and the run is saving.
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    before = {s: signal.signal(s, take) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------------------------
# files


@contextlib.contextmanager
def atomic(path):
    """Yields a temporary path that becomes `path` only if the block ends well.

    So a good file is never half overwritten. Raises Refused when the disk is full or the folder cannot
    be written; an older file is then still there.
    """
    tmp = f"{path}.tmp"  # always the same name: the next run overwrites what a killed process left
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # without it a power cut can leave the new name on empty blocks
        os.replace(tmp, path)
    except OSError as e:
        raise Refused(f"could not write {path} ({e}): free some space or choose another folder; "
                      f"an older file is unharmed")
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(tmp)


def write_text(path, text):
    """A whole text file at once. Raises Refused as `atomic` does."""
    with atomic(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
        f.write(text)


def read_json(path):
    """The JSON object in a file, as a dict. Raises Refused when there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
    except FileNotFoundError:
        raise Refused(f"{path} does not exist: give the folder of a model or adapter with all its files")
    except (OSError, ValueError, RecursionError) as e:
        raise Refused(f"{path} is not JSON ({e}): fetch it again")
    if not isinstance(values, dict):
        raise Refused(f"{path} holds no JSON object but a {type(values).__name__}: fetch it again")
    return values


def append_jsonl(path, *values):
    """One line of JSON for each value, at the end of a file. Raises Refused if it cannot be written."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a+b") as f:
            f.seek(max(0, f.tell() - 1))
            # A kill or a full disk can have left half a line: the next one must not stick to it.
            if f.read() not in (b"", b"\n"):
                f.write(b"\n")
            f.writelines(json.dumps(value).encode() + b"\n" for value in values)
    except OSError as e:
        raise Refused(f"could not write {path} ({e}): what is there stays; free some space, and the "
                      f"same command goes on")


def read_jsonl(path, repair=False, skip_broken=False):
    """The values of all whole lines of a file. A file that does not exist has none.

    A process that was killed can leave a last line without its end. It is left out.
    repair: also cut it off the file, so that the next line does not stick to it.
    skip_broken: leave out other broken lines too. A full disk makes them in the middle of a log.
    Raises Refused for a file that is something else, which is then left as it is.
    """
    try:
        with open(path, "rb") as f:
            lines = f.read().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise Refused(f"{path} cannot be read ({e}): give the path of a file")
    values, rest = [], lines.pop()
    for i, line in enumerate(lines + [rest] * (rest != b""), 1):
        cut = i > len(lines) and line.startswith(b'{"')
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError) as e:
            if not (cut or skip_broken):
                raise Refused(f"line {i} of {path} is not JSON ({e}): damaged, or another file")
            if cut and repair:
                os.truncate(path, sum(len(line) + 1 for line in lines))
    return values


# ---------------------------------------------------------------------------------------------------
# the log


class Log:
    """What a trainer says while it runs: means since its last line, over all ranks.

    path: log.jsonl.   start, steps: the first update of this process, and the last of the run.
    master: this process writes and prints.   The trainer adds up sums, and turns them into a line:

        log.add(nll=nll.sum(), masks=n)                   # as often as it likes: nothing waits
        sums, updates, seconds = log.collect(done, norm)  # the one wait for the device
        log.write({"step": done, "loss": sums["nll"] / …})
        log.print()
    """

    def __init__(self, path, start, steps, master):
        self.path, self.start, self.steps, self.master = path, start, steps, master
        self.done, self.sums, self.text = start, {}, ""
        self.began = self.last = time.time()

    def begin(self):
        """Drops the lines of updates that a resumed run makes again, and lines that were cut."""
        if self.master:
            lines = [v for v in read_jsonl(self.path, skip_broken=True) if isinstance(v, dict)]
            kept = [v for v in lines if v.get("step", math.inf) <= self.start]
            write_text(self.path, "".join(json.dumps(v) + "\n" for v in kept if self.start))

    def add(self, **sums):
        """Numbers, or 0-d tensors on any device, to add to the sums of these names."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    @contextlib.contextmanager
    def pause(self):
        """Time spent inside is no part of the throughput."""
        start = time.time()
        yield
        self.last += time.time() - start

    def collect(self, done, norm):
        """({name: sum over all ranks}, updates, seconds) since the last call.

        done: updates made so far.   norm: 0-d tensor, the norm of the last gradient.
        Raises Refused if one of the numbers is none, so that no broken weights are saved after it.
        """
        names, values = zip(*self.sums.items())
        values = torch.stack([torch.as_tensor(v, dtype=torch.float64, device="cpu") for v in values])
        sums = dict(zip(names, over_ranks(values).tolist()))
        if not math.isfinite(sum(sums.values()) + norm.item()):
            folder = os.path.dirname(self.path)
            raise Refused(f"the loss or its gradient is not a number by update {done:,}: --resume goes "
                          f"back to the last save in {folder}; a lower --eta_bb needs a run of its own")
        now = time.time()
        updates, seconds = done - self.done, now - self.last
        self.done, self.last, self.sums = done, now, {}
        return sums, updates, seconds

    def write(self, line):
        """Append a dict to log.jsonl. A full disk loses the line and not the run, which can still save."""
        line = {**line, "seconds": time.time() - self.began}
        if self.master:
            try:
                append_jsonl(self.path, line)
            except Refused as refused:
                print(f"log line lost: {refused}")
        numbers = "  ".join(f"{k} {v:.4g}" for k, v in line.items() if k not in ("step", "seconds"))
        left = line["seconds"] / (self.done - self.start) * (self.steps - self.done) / 60
        self.text = f"update {self.done:,} of {self.steps:,}  {numbers}  {left:,.1f} min left"

    def print(self):
        """The last thing that an update does, so that a terminal that is gone loses nothing."""
        if self.master and self.text:
            print(self.text, flush=True)
        self.text = ""


def log_line(path, line):
    append_jsonl(path, line)


def log_until(path, step):
    kept = [v for v in read_jsonl(path, skip_broken=True) if isinstance(v, dict)]
    return [json.dumps(v) + "\n" for v in kept if v.get("step", math.inf) <= step]
