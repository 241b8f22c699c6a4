# SPDX-License-Identifier: MIT
"""A bound on the perplexity of held-out text, with feedback and without.          Eq. 2, App. C.1

    python eval.py ppl                                # of the model that `train.py stdlib` trains
    python eval.py ppl --checkpoint=out/owt/last.pt --data=data/owt --label=1M

The result is a JSON file. lab/eval_samples.py measures samples.
"""

import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch

import checkpoint
import data
import launch
from launch import Count, Refused, Size, machine, progress, read_json, run, write_text
from mdlm import ALPHA_FLOOR, corrupt, sample_times

PRESETS = {"ppl": {}}  # the first word may be the metric, the only one here
TITLES = {"soft": "with feedback", "plain": "without feedback", "binary": "without SM"}


@dataclass
class Config:
    checkpoint: str = "out/stdlib/last.pt"  # any MDLM that `python checkpoint.py` can describe
    ema: bool = True                # use the averaged backbone
    data: str | None = None         # a folder made by data.py (default: that of the training)
    rows: Count = 0                 # how many rows of its val.bin, evenly spaced (0: all)
    repeats: Size = 1               # draws of times and masks per row
    seed: int = 1                   # for times and masks
    # Smallest t and α (default: as in published numbers). With 0, the bound is Eq. 2 itself, which
    # is 0.1 to 0.3 % higher.
    floor: Annotated[float, 0, 0.01] = ALPHA_FLOOR
    dtype: launch.DType = "auto"    # bfloat16 where the GPU has it [code], else float32
    out: str = ""                   # the result (default: CHECKPOINT.ppl.json)
    label: str = ""                 # its row in `lab/plot.py --table` (default: the checkpoint)
    batch_size: Size = 8            # affects the speed only
    device: str = "auto"            # cuda, else mps, else cpu


def mean_and_se(total, count):
    """Σ total / Σ count, both (n,), and its standard error over n sequences: NaN if n is 1."""
    total, count = np.asarray(total, np.float64), np.asarray(count, np.float64)
    n, mean = len(total), total.sum() / count.sum()
    squares = ((total - mean * count) ** 2).sum()
    return mean, math.sqrt(n / (n - 1) * squares) / count.sum() if n > 1 else math.nan


# ---- held-out text -------------------------------------------------------------------------------
def corrupted(rows, mask_id, seed=0, repeats=1, batch_size=8, rank=0, world=1, floor=ALPHA_FLOOR):
    """Yields (index (b,), x0 (b, L), x_t (b, L), t (b,)): every row, at `repeats` times each.

    Arguments: see `bound`. Masks are keyed by row and repeat, not by batch or rank. Each row gets
    one time from each of `repeats` equal slices of [floor, 1], dealt by the same permutation.
    """
    n = len(rows)
    times = sample_times(n * repeats, data.rng("times", seed), b_l=max(floor, 1e-6))
    deal = torch.randperm(n, generator=data.rng("deal", seed))
    times = times.view(repeats, n)[:, deal]                                          # (repeats, n)
    mine = torch.arange(n).split(batch_size)[rank::world]
    for index in progress(mine, f"{n:,} held-out rows", leave=False):
        for r, t in enumerate(times[:, index]):                                      # (b,)
            xt = torch.cat([
                corrupt(x[None], s[None], mask_id, data.rng("masks", seed, r, int(i)), floor)
                for i, x, s in zip(index, rows[index], t)])                          # (b, L)
            yield index, rows[index], xt, t


@torch.no_grad()
def bound(model, rows, soft, seed=0, repeats=1, batch_size=8, rank=0, world=1, floor=ALPHA_FLOOR):
    """Eq. 2 of each row, with fixed times and masks                               Eq. 2, App. C.1

    rows: (n, L) ids, on the CPU.   soft: with feedback.   repeats: draws of t and x_t per row.
    rank, world: this process takes every world-th batch, m of the n rows.   floor: see Config.
    Returns (3, m) float64, means over the repeats: the bound in nats, the cross-entropy in nats
    without the weight 1/t, and the number of masks. Masks depend on the seed, not on `soft`.
    """
    device, was_training = next(model.parameters()).device, model.training
    drawn, losses = [torch.zeros(3, 0)], [torch.zeros(0, device=device)]  # a rank may have none
    model.eval()
    for index, x0, xt, t in corrupted(rows, model.cfg.mask_id, seed, repeats, batch_size, rank,
                                      world, floor):
        masked = xt == model.cfg.mask_id                                             # (b, L)
        drawn.append(torch.stack((index, t.double(), masked.sum(1))))                # (3, b)
        inputs = x0, xt, t, *masked.nonzero(as_tuple=True)
        x0, xt, t, *masks = (launch.to_device(x, device) for x in inputs)
        losses.append(model(x0, xt, t, soft, tuple(masks)))                          # (b,)
    model.train(was_training)
    loss = torch.cat(losses).cpu().double()  # the only host sync
    index, t, masked = torch.cat(drawn, dim=1)                                       # (m·repeats,)
    index, values = index.long(), torch.stack((loss, loss * t, masked)) / repeats
    total = torch.zeros(3, len(rows), dtype=torch.float64).index_add(1, index, values)
    return total[:, index.unique()]                                                  # (3, m)


def val_nats(model, rows, soft, seed=0, **options):
    """(nats, tokens) of this rank. Summed over ranks: perplexity = exp(nats / tokens).  App. C.1"""
    nats = bound(model, rows, soft, seed, **options)[0]                              # (m,)
    # All L positions count, even BOS, EOS and those that were never masked [code].
    return nats.sum().item(), nats.numel() * rows.shape[1]


def bits_per_byte(nats_per_token, L, split):
    """The bound in a unit that is the same for all tokenizers. split: {tokens, bytes} of a text."""
    bytes_in_a_row = (L - 2) * split["bytes"] / split["tokens"]  # on average
    return nats_per_token / math.log(2) * L / bytes_in_a_row


def held_out_rows(cfg, info, L):
    """Rows (n, L) of val.bin, and its {tokens, bytes, …} with its path.   info: of the model"""
    special, trained_on = info["tokenizer"], info.get("data") or {"path": "data/owt"}
    path = trained_on["path"] if cfg.data is None else cfg.data
    tokens, meta = data.open_split(path, "val")
    if cfg.data is None and trained_on.get("sha256") not in (None, meta["train"]["sha256"]):
        raise Refused(f"{path} has changed since {cfg.checkpoint} was trained on it: give --data")
    launch.check_same(path, tokens.tokenizer, special, special.keys(),
                      ": give the data that the model was trained on")
    index = data.evenly(data.n_rows(tokens, L), cfg.rows)                            # (n,)
    return data.rows(tokens, index, L), meta["val"] | {"path": path}


# ---- the result ----------------------------------------------------------------------------------
def result_path(cfg, source, metric, settings):
    """SOURCE.METRIC.json or --out. Raises Refused if that has a result of other settings."""
    path = cfg.out or f"{source.rstrip('/')}.{metric}.json"
    if os.path.exists(path):
        before, here = read_json(path), asdict(cfg) | settings
        launch.check_same(path, before["evaluation"] | before["settings"], here,
                          here.keys() - {"out", "label", "batch_size", "device"},
                          ": give another --out, or remove this file")
    return path


def write_result(cfg, path, metric, values, settings):
    """Print the values {name: {key: number}}, and write them with what they depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    result = {"metric": metric, "values": values, "settings": settings, "evaluation": asdict(cfg),
              "versions": versions, "git": checkpoint.git_version()}
    result = json.loads(json.dumps(result), parse_constant=lambda nan: None)  # JSON has no NaN
    write_text(path, json.dumps(result, indent=2))  # first: `eval.py | head` may kill the process
    for name, row in values.items():
        numbers = ", ".join(f"{key} {value:.5g}" for key, value in row.items())
        print(f"{TITLES.get(name, name)}: {numbers}")
    print(f"written to {path}")


def main(cfg):
    """A checkpoint on held-out text, with feedback and without."""
    here = machine(cfg.device, cfg.dtype)
    model = checkpoint.load_mdlm(cfg.checkpoint, cfg.ema).to(here.device)
    L = model.cfg.length
    rows, text = held_out_rows(cfg, model.info, L)                                   # (n, L)
    settings = {"step": model.info["step"], "L": L, "tokenizer": model.info["tokenizer"]["name"],
                "n": len(rows), "data": text["path"], "text": text,
                "dtype": str(here.dtype or torch.float32).removeprefix("torch.")}
    path = result_path(cfg, cfg.checkpoint, "ppl", settings)
    tokens, bounds, values = np.full(len(rows), L), {}, {}                           # (n,)
    for name in ["soft", "plain"] if model.sm else ["binary"]:
        with here.autocast():
            bounds[name], ce, masked = bound(model, rows, name == "soft", cfg.seed, cfg.repeats,
                                             cfg.batch_size, floor=cfg.floor)        # (n,) each
        nats, se = mean_and_se(bounds[name], tokens)
        values[name] = {"nats_per_token": nats, "nats_per_token_se": se,
                        "ppl": math.exp(nats), "ppl_se": math.exp(nats) * se,
                        "bits_per_byte": bits_per_byte(nats, L, text),
                        "ce_per_masked_token": float(ce.sum() / masked.sum())}
    if model.sm:
        # On the same masks, so the difference has a smaller standard error.
        gain, se = mean_and_se(bounds["plain"] - bounds["soft"], tokens)
        values["gain"] = {"nats_per_token": gain, "nats_per_token_se": se}
    write_result(cfg, path, "ppl", values, settings)


if __name__ == "__main__":
    run(main, Config, PRESETS)
