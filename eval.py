# SPDX-License-Identifier: MIT
"""Every measure in the paper's language-modelling tables.                §4.1, App. B.1, C.1, C.2

A bound on the perplexity of held-out text, with feedback and without:

    python eval.py ppl --checkpoint=out/owt/last.pt --data=data/owt
    python eval.py zero_shot --checkpoint=out/owt/last.pt --text=yours.txt  # any other text

Three measures of samples: the entropy of their tokens (low if a sample repeats itself), how likely
GPT-2 large finds them, and how close they are to held-out text (MAUVE):

    python eval.py samples --samples=samples.jsonl --data=data/owt
    python eval.py samples --samples= --data=data/owt --rows=5000  # held-out text: Data in Table 1

Each result is a JSON file with all settings, versions, n and seed. GPT-2 large and MAUVE need
`pip install transformers mauve-text`, because published numbers depend on exactly these tools.
"""

import contextlib
import glob
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import data
import launch
from checkpoint import load_mdlm
from launch import Count, Refused, Size, machine, progress, run, write_text
from mdlm import ALPHA_FLOOR, corrupt, sample_times

METRICS = "ppl", "zero_shot", "samples"
PRESETS = {metric: {"metric": metric} for metric in METRICS}
TITLES = {"soft": "with feedback", "plain": "without feedback", "binary": "without SM"}


@dataclass
class Config:
    metric: Literal[METRICS] = "ppl"  # the first word
    out: str = ""                   # result (default: beside the input, NAME.METRIC.SETTINGS.json)
    label: str = ""                 # its row in `lab/plot.py --table` (default: the checkpoint)
    device: str = "auto"            # cuda, else mps, else cpu
    batch_size: Size = 8            # affects the speed only
    seed: int = 1                   # for masks and times; for MAUVE's reference rows and clusters
    tokenizer_dir: str = ""         # GPT-2's vocabulary, for machines without internet
    # ppl, zero_shot
    checkpoint: str = ""            # any MDLM that `python checkpoint.py` can describe
    ema: bool = True                # use the averaged backbone
    # A folder made by data.py. ppl measures its val.bin (default: that of the model's training).
    # MAUVE compares samples with it (default: data/owt; "": skip).
    data: str | None = None
    text: str = ""                  # files that zero_shot measures, in any format of data.py
    rows: Count = 0                 # how many (default: all; with an empty --samples=, half)
    repeats: Size = 1               # draws of times and masks per row
    # Smallest t and α (default: as in published numbers). With 0, the bound is Eq. 2 itself, which
    # is 0.1 to 0.3 % higher.
    floor: Annotated[float, 0, 0.01] = ALPHA_FLOOR
    dtype: launch.DType = "auto"    # bfloat16 where the GPU has it [code], else float32
    # samples
    samples: str | None = None      # from sample.py; NAME.jsonl includes all NAME.RANK.jsonl
    length: Size = 1024             # tokens in a held-out row, if --samples= is empty
    scorer: str = "gpt2-large"      # a causal LM: its name on the hub, or its folder
    scale: float = 5.0              # MAUVE's scaling factor, App. B.1


def mean_and_se(total, count):
    """Σ total / Σ count, both (n,), and its standard error over n sequences: NaN if n is 1."""
    total, count = np.asarray(total, np.float64), np.asarray(count, np.float64)
    n, mean = len(total), total.sum() / count.sum()
    if n == 1:
        return mean, math.nan
    squares = ((total - mean * count) ** 2).sum()
    return mean, math.sqrt(n / (n - 1) * squares) / count.sum()


# ---- held-out text -------------------------------------------------------------------------------
def corrupted(rows, mask_id, seed=0, repeats=1, batch_size=8, rank=0, world=1, floor=ALPHA_FLOOR):
    """Yields (index (b,), x0 (b, L), x_t (b, L), t (b,)): every row, at `repeats` times each.

    The arguments are those of `bound`. Masks are keyed by row and repeat, so they depend on neither
    batch_size nor world. Each row gets one time from each of `repeats` equal slices of [floor, 1].
    One permutation, the same in every repeat, deals the n times of a slice to the rows.
    """
    n = len(rows)
    rng = data.rng("times", seed)
    times = sample_times(n * repeats, rng, b_l=max(floor, 1e-6))                     # (repeats·n,)
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

    model: MDLM, in eval mode during the call.   rows: (n, L) ids, on the CPU.
    soft: with feedback, in two passes.   repeats: draws of t and x_t per row.
    rank, world: this process takes every world-th batch, m of the n rows.
    floor: smallest t and α, see Config.
    Returns (3, m) float64, means over the repeats: the bound in nats, the cross-entropy in nats
    without the weight 1/t, and the number of masks. Masks depend on the seed, not on `soft`.
    """
    device, was_training = next(model.parameters()).device, model.training
    batches, losses = [], [torch.zeros(0, device=device)]  # a rank may have no batch
    model.eval()
    for index, x0, xt, t in corrupted(rows, model.cfg.mask_id, seed, repeats, batch_size, rank,
                                      world, floor):
        masked = xt == model.cfg.mask_id                                             # (b, L)
        batches.append((index, t, masked.sum(1)))
        inputs = x0, xt, t, *masked.nonzero(as_tuple=True)
        x0, xt, t, *masks = (launch.to_device(x, device) for x in inputs)
        losses.append(model(x0, xt, t, soft, tuple(masks)))                          # (b,)
    model.train(was_training)
    losses = torch.cat(losses).cpu().double()  # the only host sync
    total = torch.zeros(3, len(rows), dtype=torch.float64)                           # (3, n)
    mine = torch.zeros(len(rows), dtype=torch.bool)                                  # (n,)
    for (index, t, masked), loss in zip(batches, losses.split([len(t) for _, t, _ in batches])):
        total[:, index] += torch.stack((loss, loss * t, masked)) / repeats
        mine[index] = True
    return total[:, mine]                                                            # (3, m)


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
    """(rows (n, L), counts): val.bin of cfg.data, or cfg.text in rows of the same layout.

    info: of the model.   counts: {documents, tokens, bytes} of the whole text, and its path.
    """
    special = info["tokenizer"]
    if cfg.metric == "zero_shot":
        if not cfg.text:
            raise Refused("zero_shot needs --text=PATH, such as --text=yours.txt")
        tok = data.tokenizer(special["name"], cfg.tokenizer_dir)
        rows, counts = data.text_rows(data.documents(data.find_files(cfg.text)), tok, L)
        return rows[data.evenly(len(rows), cfg.rows)], counts | {"path": cfg.text}
    launch.unused(cfg, "with ppl: zero_shot measures it", "text")
    trained_on = info.get("data") or {"path": "data/owt"}
    path = trained_on["path"] if cfg.data is None else cfg.data
    tokens, meta = data.open_split(path, "val")
    if cfg.data is None and trained_on.get("sha256") not in (None, meta["train"]["sha256"]):
        raise Refused(f"{path} has changed since {cfg.checkpoint} was trained on it: give --data")
    launch.check_same(path, tokens.tokenizer, special, special.keys(),
                      ": give the data that the model was trained on")
    index = data.evenly(data.n_rows(tokens, L), cfg.rows)                            # (n,)
    return data.rows(tokens, index, L), meta["val"] | {"path": path}


def measure_bound(cfg):
    """ppl and zero_shot: a checkpoint on held-out text, with feedback and without."""
    here = machine(cfg.device, cfg.dtype)
    model = load_mdlm(cfg.checkpoint, cfg.ema).to(here.device)
    special, L = model.info["tokenizer"], model.cfg.length
    rows, text = held_out_rows(cfg, model.info, L)                                   # (n, L)
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
    settings = {"step": model.info["step"], "L": L, "tokenizer": special["name"], "n": len(rows),
                "text": text, "dtype": str(here.dtype or torch.float32).removeprefix("torch.")}
    write_result(cfg, cfg.checkpoint, values, settings)


# ---- samples -------------------------------------------------------------------------------------
def read_samples(path):
    """(samples, settings): the lines of a file from sample.py, and what they were made with.

    NAME.jsonl includes NAME.RANK.jsonl. Lines with the same seed and index count once.
    """
    shards = glob.glob(glob.escape(path.removesuffix(".jsonl")) + ".[0-9]*.jsonl")
    lines = [line for file in (path, *shards) for line in launch.read_samples(file)]
    if not lines:
        raise Refused(f"no samples in {path}: make some with sample.py, or correct --samples")
    settings = lines[0]["settings"]
    if any(line["settings"] != settings for line in lines):
        raise Refused(f"{path} mixes samples of different settings: evaluate them separately")
    samples = {(line["seed"], line["index"]): line for line in lines}
    return [samples[key] for key in sorted(samples)], settings


def held_out_samples(cfg, L, n=None):
    """(samples, settings), as from `read_samples`, but of held-out rows of cfg.data, shuffled

    n: the first n rows, which MAUVE compares samples with. None: rows to measure as if they were
        samples ("Data" in Table 1), the last --rows, at most half, so that none is a reference.
    """
    tokens, _ = data.open_split(cfg.data, "val")
    name = tokens.tokenizer["name"]
    tok = data.tokenizer(name, cfg.tokenizer_dir)
    shuffled = torch.randperm(data.n_rows(tokens, L), generator=data.rng("reference", cfg.seed))
    half = len(shuffled) // 2
    index = shuffled[:n] if n else shuffled[-min(cfg.rows or half, half):]
    samples = [{"ids": row, "text": tok.decode(row), "nfe": 0, "seed": cfg.seed}
               for row in data.rows(tokens, index, L).tolist()]
    return samples, {"sampler": "data", "checkpoint": cfg.data, "tokenizer": name}


def entropy(ids):
    """Entropy of the tokens in one sample, ids (L,), in nats [code]; at most log L      App. B.1"""
    counts = torch.unique(torch.as_tensor(ids), return_counts=True)[1]
    return torch.special.entr(counts.double() / counts.sum()).sum().item()


@torch.no_grad()
def score(texts, scorer="gpt2-large", batch_size=8, device="cpu"):
    """Scores of texts under a causal LM                                                   App. B.1

    The authors' rule [code]: each text is tokenized again and cut at 1,024 tokens. Its first token
    is not scored. Of its EOS tokens, only the first is scored, and none if the text begins with
    one, because GPT-2's BOS is the same token.
    Returns nats (n,), the number of tokens scored (n,), and the last hidden states (n, D).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok = AutoTokenizer.from_pretrained(scorer)
    lm = AutoModelForCausalLM.from_pretrained(scorer).to(device).float().eval()
    nats, tokens, features = [], [], []
    for start in progress(range(0, len(texts), batch_size), f"scoring {len(texts)} texts"):
        # Special tokens of GPT-2 and of `data.tokenizer("bytes")` become the scorer's EOS.
        batch = [re.sub(r"<\|(endoftext|bos|eos)\|>", tok.eos_token, text)
                 for text in texts[start:start + batch_size]]
        ids = [torch.tensor(tok(text, truncation=True, max_length=1024).input_ids)
               for text in batch]
        lengths = torch.tensor([len(row) for row in ids])                            # (b,)
        x = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)        # (b, T)
        real = (torch.arange(x.shape[1]) < lengths[:, None]).to(device)              # (b, T)
        out = lm(input_ids=x, attention_mask=real.long(), output_hidden_states=True)
        # Keep V last. With (b, V, T−1), torch's log-softmax on the CPU would be ten times less
        # exact (an error of 1e-4 nats per token).
        logits = out.logits[:, :-1].flatten(0, 1)                                    # (b·(T−1), V)
        nll = F.cross_entropy(logits, x[:, 1:].flatten(), reduction="none")          # (b·(T−1),)
        eos = x == tok.eos_token_id                                                  # (b, T)
        scored = (real & (~eos | (eos.cumsum(1) == 1)))[:, 1:]                       # (b, T−1)
        nats += torch.where(scored, nll.view(scored.shape), 0).cpu().double().sum(1).tolist()
        tokens += scored.sum(1).tolist()
        features.append(out.hidden_states[-1][range(len(x)), lengths - 1].cpu().numpy())  # (b, D)
    return np.array(nats), np.array(tokens), np.concatenate(features)


def gen_ppl(nats, tokens):
    """Generative perplexity and its standard error over texts, from `score`.      §4.1, App. B.1"""
    mean, se = mean_and_se(nats, tokens)  # over the tokens of all texts
    return math.exp(mean), math.exp(mean) * se


def mauve(features, references, scale, seed, **scorer):
    """MAUVE of samples against texts.   features: (n, D), from `score`.           §4.1, App. B.1"""
    # It depends on the seed and both counts. The authors compare 5,000 with 5,000 [code].
    from mauve import compute_mauve
    theirs = score(references, **scorer)[2]                                          # (m, D)
    return float(compute_mauve(p_features=features, q_features=theirs, seed=seed,
                               mauve_scaling_factor=scale).mauve)


def measure_samples(cfg):
    """samples: measure a file of samples, or held-out rows if --samples= is empty.

    The entropy comes first: if it is low, generative perplexity flatters the samples (App. C.2).
    Results are written as they come in, so a missing package costs only the measures that need it.
    """
    if cfg.data is None:
        cfg = replace(cfg, data="data/owt")
    if cfg.samples is None:
        raise Refused(f"{cfg.metric} needs --samples=FILE from sample.py, such as "
                      f"--samples=samples.jsonl; an empty --samples= takes held-out rows of --data")
    if cfg.samples:
        samples, settings = read_samples(cfg.samples)
        stem = cfg.samples.removesuffix(".jsonl")
    else:
        samples, settings = held_out_samples(cfg, cfg.length)
        stem = os.path.join(cfg.data, "val")
    texts, L = [sample["text"] for sample in samples], len(samples[0]["ids"])
    settings |= {"L": L, "n": len(samples), "seeds": sorted({s["seed"] for s in samples})}
    entropies = [entropy(sample["ids"]) for sample in samples]
    values = {"entropy": statistics.mean(entropies), "entropy_min": min(entropies),
              "nfe": statistics.mean(sample["nfe"] for sample in samples), "n": len(samples)}
    write_result(cfg, stem, values, settings)
    device = machine(cfg.device).device
    scorer = {"scorer": cfg.scorer, "batch_size": cfg.batch_size, "device": device}
    nats, tokens, features = score(texts, **scorer)
    values["gen_ppl"], values["gen_ppl_se"] = gen_ppl(nats, tokens)
    write_result(cfg, stem, values, settings)
    if cfg.data:
        rows, theirs = held_out_samples(cfg, L, len(samples))
        launch.check_same(cfg.data, theirs, settings, ["tokenizer"],
                          ": give the data that the model was trained on")
        references = [row["text"] for row in rows]
        values["mauve"] = mauve(features, references, cfg.scale, cfg.seed, **scorer)
        values |= {"references": len(references), "seed": cfg.seed, "scale": cfg.scale}
        write_result(cfg, stem, values, settings)


def write_result(cfg, stem, values, settings):
    """Print the values, and write them as JSON with the settings and versions they depend on.
    stem: start of the file's name.   settings: how the samples or the model were made."""
    versions = {"python": platform.python_version(), "git": checkpoint.git_version()}
    for package in "torch", "transformers", "mauve-text":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    # Flags that affect the numbers are part of the name, so that no result replaces another.
    flags = [f"{name}-" + re.sub(r"\W+", "-", str(getattr(cfg, name)))[-60:].strip("-")
             for name in ("data", "text", "scorer", "seed", "rows", "repeats", "floor", "ema",
                          "dtype", "length", "scale")
             if getattr(cfg, name) != getattr(Config, name)]
    ours = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "")
    if os.path.abspath(stem).startswith(ours):  # of the shipped model, in a folder git tracks
        stem = os.path.join("out", os.path.basename(os.path.abspath(stem)))
    path = ".".join([stem.rstrip("/"), cfg.metric, *flags, "json"])
    in_folder = os.path.join(cfg.out, os.path.basename(path))
    path = in_folder if os.path.isdir(cfg.out) else cfg.out or path
    result = {"metric": cfg.metric, "values": values, "settings": settings,
              "evaluation": asdict(cfg), "versions": versions}
    rows = {cfg.metric: values} if cfg.metric == "samples" else values
    write_text(path, json.dumps(result, indent=2))  # first: `eval.py | head` may kill the process
    for name, row in rows.items():
        words = TITLES.get(name, name)
        print(f"{words}: " + ", ".join(f"{key} {value:.5g}" for key, value in row.items()))
    print(f"written to {path}")


def main(cfg):
    if cfg.metric in ("ppl", "zero_shot"):
        measure_bound(cfg)
    else:
        measure_samples(cfg)


if __name__ == "__main__":
    run(main, Config, PRESETS)
