# SPDX-License-Identifier: MIT
"""A bound on the perplexity of held-out text, with feedback and without.          Eq. 2, App. C.1

    python lab/eval.py                                # of the model that `train.py small` trains
    python lab/eval.py --checkpoint=out/owt/last.pt --data=data/owt --label=1M
    torchrun --nproc_per_node=8 lab/eval.py --checkpoint=out/owt/last.pt       # the same, sooner

The result is a JSON file. lab/eval_samples.py measures samples.
"""

import json
import math
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import launch
from launch import Count, Refused, Size, machine, read_json, run, write_text
from mdlm import ALPHA_FLOOR, MDLM
from train import bound

TITLES = {"soft": "with feedback", "plain": "without feedback", "binary": "without SM"}


@dataclass
class Config:
    checkpoint: str = "out/small/last.pt"
    code: str = ""                  # a Python file to run first: its SoftMask replaces ours
    ema: bool = True                # use the averaged backbone
    data: str | None = None         # a folder made by data.py (default: that of the training)
    rows: Count = 0                 # how many rows of its val.bin, evenly spaced (0: all)
    repeats: Size = 1               # draws of times and masks per row
    seed: int = 1                   # for times and masks
    # Smallest t and α (default: as in published numbers). With 0, the bound is Eq. 2 itself, which
    # is slightly higher (REPRODUCE.md, 2).
    floor: Annotated[float, 0, 0.01] = ALPHA_FLOOR
    dtype: launch.DType = "auto"    # bfloat16 where the GPU has it [code], else float32
    out: str = ""                   # the result (default: CHECKPOINT.ppl.json)
    label: str = ""                 # its row in `lab/plot.py --table` (default: the checkpoint)
    batch_size: Size = 8            # affects the speed only
    device: str = "auto"            # cuda, else mps, else cpu


def mean_and_se(total, count):
    """Σ total / Σ count, both (n,), and its standard error for independent rows (n = 1: NaN)"""
    total = np.asarray(total, np.float64)
    count = np.asarray(count, np.float64)
    n = len(total)
    mean = total.sum() / count.sum()
    squares = ((total - mean * count) ** 2).sum()
    return mean, math.sqrt(n / (n - 1) * squares) / count.sum() if n > 1 else math.nan


def bits_per_byte(nats_per_token, L, split):
    """The bound in a unit that is the same for all tokenizers. split: {tokens, bytes} of a text."""
    bytes_in_a_row = (L - 2) * split["bytes"] / split["tokens"]  # on average
    return nats_per_token / math.log(2) * L / bytes_in_a_row


def held_out_rows(cfg, info, L):
    """Rows (n, L) of val.bin, and its {tokens, bytes, …} with its path.   info: of the model"""
    special = info["tokenizer"]
    trained_on = info.get("data") or {"path": "data/owt"}
    path = trained_on["path"] if cfg.data is None else cfg.data
    tokens, meta = data.open_split(path, "val")
    meta["val"]["bytes"]  # if it is missing, fail now, not after the work
    sha256 = meta["train"]["sha256"]
    if cfg.data is None and trained_on.get("sha256") not in (None, sha256):
        raise Refused(f"{path} has changed since {cfg.checkpoint} was trained on it: give --data")
    launch.check_same(path, tokens.tokenizer, special, special.keys(),
                      ": give the data that the model was trained on")
    index = data.evenly(data.n_rows(tokens, L), cfg.rows)                            # (n,)
    return data.rows(tokens, index, L), meta["val"] | {"path": path}


# ---- the result ----------------------------------------------------------------------------------
def result_path(cfg, source, metric, settings):
    """SOURCE.METRIC.json or --out. Raises Refused if that has a result of other settings."""
    path = cfg.out or f"{source.rstrip('/')}.{metric}.json"
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tempfile.TemporaryFile(dir=folder).close()  # an unwritable path fails now, too
    except OSError as e:
        raise OSError(e.errno, e.strerror, path)
    if os.path.exists(path):
        result = read_json(path)
        free = "out", "label", "batch_size", "device", "dtype"  # settings have the dtype used
        asked = {name: value for name, value in asdict(cfg).items() if name not in free}
        for part, now in ("settings", settings), ("evaluation", asked):
            launch.check_same(path, result[part], now, now, ": give another --out, or remove it")
    return path


def write_result(cfg, path, metric, values, settings):
    """Print the values {name: {key: number}}, and write them with what they depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {"metric": metric, "values": values, "settings": settings, "evaluation": asdict(cfg),
              "versions": versions, "git": launch.git_version()}
    result = json.loads(json.dumps(result), parse_constant=lambda nan: None)  # JSON has no NaN
    try:
        write_text(path, json.dumps(result, indent=2))  # first: `| head` may kill the process
    finally:  # the disk may be full
        for name, row in values.items():
            numbers = ", ".join(f"{key} {value:.5g}" for key, value in row.items())
            print(f"{TITLES.get(name, name)}: {numbers}")
    print(f"written to {path}")


def main(cfg):
    """A checkpoint on held-out text, with feedback and without."""
    here = machine(cfg.device, cfg.dtype)
    launch.join(here)
    own = launch.soft_mask_class(cfg.code)
    with launch.input_errors():
        model = MDLM.load(cfg.checkpoint, cfg.ema, own).to(here.device)
    L = model.cfg.length
    rows, text = held_out_rows(cfg, model.info, L)                                   # (n, L)
    n = len(rows)
    cfg = replace(cfg, data=text["path"])
    settings = {"step": model.info["step"], "L": L, "tokenizer": model.info["tokenizer"]["name"],
                "n": n, "data": text["path"], "text": text,
                "dtype": str(here.dtype or torch.float32).removeprefix("torch.")}
    path = result_path(cfg, cfg.checkpoint, "ppl", settings)
    tokens = np.full(n, L)                                                           # (n,)
    bounds = {}
    values = {}
    for name in ["soft", "plain"] if model.sm else ["binary"]:
        with here.autocast():
            found = bound(model, rows, name == "soft", cfg.seed, cfg.repeats, cfg.batch_size,
                          here.rank, here.world, cfg.floor)                          # (3, n)
        bounds[name], ce, masked = launch.over_ranks(found)                          # (n,) each
        # The rows' times are stratified, so the true error is smaller than this.
        nats, se = mean_and_se(bounds[name], tokens)
        values[name] = {"nats_per_token": nats, "nats_per_token_se": se,
                        "ppl": math.exp(nats), "ppl_se": math.exp(nats) * se,
                        "bits_per_byte": bits_per_byte(nats, L, text),
                        "ce_per_masked_token": float(ce.sum() / masked.sum())}
    if model.sm:
        # On the same masks, so the difference has a smaller standard error.
        gain, se = mean_and_se(bounds["plain"] - bounds["soft"], tokens)
        values["gain"] = {"nats_per_token": gain, "nats_per_token_se": se}
    if here.rank == 0:
        write_result(cfg, path, "ppl", values, settings)
    if here.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run(main, Config, ranks=True)
