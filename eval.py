# SPDX-License-Identifier: MIT
"""Every number of the paper's language-modelling tables: a bound on held-out text, and three opinions on samples.

    python eval.py ppl --checkpoint=out/last.pt --data=data/owt           # §4.1, App. C.1: the bound
    python eval.py zero_shot --checkpoint=out/last.pt --text=wikitext.txt # the same on another text
    python eval.py entropy --samples=samples.jsonl                        # App. B.1: low where a sample repeats itself
    python eval.py gen_ppl --samples=samples.jsonl                        # App. B.1: what GPT-2 large thinks of them
    python eval.py mauve --samples=samples.jsonl --data=data/owt          # App. B.1: how far they are from held-out text
    python eval.py table --results="runs/*.json"                          # Tables 1, 2, 4-7 from results

A result is a JSON file with all settings, versions, n and seed. The scorer and MAUVE are other people's instruments, and
published numbers hang on them: they come from `pip install transformers mauve-text`. Not here: generation, plots.
"""

import base64
import collections
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import tempfile
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import data
from checkpoint import git_version
from launch import Refused, atomic, machine, run
from data import rng
from mdlm import MDLM, corrupt, sample_times


@dataclass
class Config:
    metric: str = ""                # ppl, zero_shot, entropy, gen_ppl, mauve, table: the first word of the command line
    out: str = ""                   # result file; beside the checkpoint or the samples, NAME.METRIC.OF-WHAT.json
    label: str = ""                 # row of the table that this result belongs to, say 1M+100k; the checkpoint's path
    device: str = "auto"            # cuda, else mps, else cpu
    batch_size: int = 8             # changes nothing but speed
    seed: int = 1                   # of masks and times, of MAUVE's reference rows and clusters
    tokenizer_dir: str = ""         # GPT-2's vocabulary, for machines without a network
    # ppl, zero_shot
    checkpoint: str = ""            # anything that `python checkpoint.py` can describe
    ema: bool = True                # its averaged backbone
    data: str = "data/owt"          # its val.bin is what ppl measures, and MAUVE's reference
    text: str = ""                  # what zero_shot measures: files as data.py reads them
    rows: int = 0                   # evenly spaced ones; 0: all
    repeats: int = 1                # times and masks per row
    against: str = ""               # another checkpoint: how far the first is below it, on the same masks
    dtype: str = "auto"             # bfloat16 where the GPU has it, as in training [code], else float32
    # entropy, gen_ppl, mauve
    samples: str = "samples.jsonl"  # from sample.py; a pattern reads its shards together
    scorer: str = "gpt2-large"      # a causal LM, by its name on the hub or its folder
    scale: float = 5.0              # of MAUVE, App. B.1
    # table
    results: str = ""               # pattern of result files


PRESETS = {name: {"metric": name} for name in ("ppl", "zero_shot", "entropy", "gen_ppl", "mauve", "table")}


def mean_and_se(total, count):
    """Σ total / Σ count, and its standard error over sequences: (n,), (n,) → two floats. One sequence has no error: nan."""
    total, count = np.asarray(total, np.float64), np.asarray(count, np.float64)
    mean, n = total.sum() / count.sum(), len(total)
    return mean, math.sqrt(n / (n - 1) * ((total - mean * count) ** 2).sum()) / count.sum() if n > 1 else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# held-out text


@torch.no_grad()
def bound(model, rows, soft, seed=0, repeats=1, batch_size=8, rank=0, world=1):
    """Eq. 2 on fixed rows, row by row                                                                     Eq. 2, App. C.1

    model: MDLM; it is put in eval mode for the while.   rows: (n, L) ids, on the CPU.   soft: with feedback, two passes.
    repeats: draws of t and x_t per row.   rank, world: this process takes every world-th batch.
    Returns three (m,) float64 tensors for the m rows taken: the bound in nats, and of the same masks the plain
    cross-entropy in nats and their number, all means over repeats. Raises Refused where the bound is not a number.

    The times of all rows together are one stratified sample, dealt out at random, and a row's own repeats are spread
    over (0, 1]; masks are keyed by row. So the result does not depend on batch_size and world, and two calls with one
    seed, with and without feedback, see the same masks: their difference is much surer than either.
    """
    n, device, was_training = len(rows), next(model.parameters()).device, model.training
    deal = torch.randperm(n, generator=rng("deal", seed))
    times = sample_times(n * repeats, rng("times", seed)).view(repeats, n)[:, deal]            # (repeats, n)
    parts = []
    model.eval()
    mine = torch.arange(n).split(batch_size)[rank::world]
    for index in tqdm(mine, "held-out rows", leave=False, disable=True if rank else None):  # None: silent outside a terminal
        x0 = rows[index]                                                                       # (b, L)
        part = torch.zeros(3, len(index), dtype=torch.float64)                                 # (3, b)
        for r, t in enumerate(times[:, index]):                                                # (b,)
            xt = torch.cat([corrupt(x[None], s[None], model.cfg.mask_id, rng("masks", seed, r, int(i)))
                            for i, x, s in zip(index, x0, t)])                                 # (b, L)
            nll = model(x0.to(device), xt.to(device), t.to(device), soft).cpu().double()       # (b,)
            part += torch.stack((nll, nll * t, (xt == model.cfg.mask_id).sum(1))) / repeats
        parts.append(part)
    model.train(was_training)
    nll, ce, masked = torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.float64)  # (m,) each
    if not nll.isfinite().all():
        raise Refused(f"the bound is not a number on {(~nll.isfinite()).sum()} of {len(nll)} rows: the weights are broken, "
                      f"or they do not bear this dtype")
    return nll, ce, masked


def val_ppl(model, rows, soft, seed=0, **how):
    """(sum_nll, n_tokens) of `bound`: exp(sum_nll / n_tokens) is the perplexity                                App. C.1

    Over all L positions of every row, those that were never masked too, and BOS and EOS: the published convention
    [code]. Sharded with rank and world, add both numbers over the ranks first.
    """
    nll = bound(model, rows, soft, seed, **how)[0]
    return nll.sum().item(), nll.numel() * rows.shape[1]


def bits_per_byte(nats_per_token, L, split):
    """Comparable across tokenizers. split: its part of meta.json; its bytes per token stand for those of any of its rows."""
    return nats_per_token / math.log(2) * L / ((L - 2) * split["bytes"] / split["tokens"])


def ppl(cfg):
    """A checkpoint on the held-out split of cfg.data, or on cfg.text cut into the same rows by its own tokenizer."""
    device, dtype = machine(cfg.device, cfg.dtype)[2:]
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    ours, L = model.info["tokenizer"], model.cfg.length
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        if cfg.metric == "zero_shot":
            tok, path = data.tokenizer(ours["name"], cfg.tokenizer_dir), os.path.join(tmp, "val.bin")
            end = data.encode(data.documents(data.find_files(cfg.text)), path, tok)[-1]
            tokens = np.memmap(path, np.uint16, "r")
            tokens.tokenizer, split = data.describe(tok), dict(zip(("documents", "tokens", "bytes"), end))
        else:
            tokens, meta = data.open_split(cfg.data, "val")
            split = meta["val"]
        if tokens.tokenizer != ours:
            raise Refused(f"{cfg.text or cfg.data} holds tokens of {tokens.tokenizer}, {cfg.checkpoint} was trained on those "
                          f"of {ours}: prepare the text again with --tokenizer={ours['name']}")
        n = data.n_rows(tokens, L)
        take = min(cfg.rows or n, n)
        rows = data.rows(tokens, torch.arange(take) * n // take, L)                            # (take, L)
    other = MDLM.load(cfg.against, cfg.ema).to(device) if cfg.against else None
    if other and (other.info["tokenizer"] != ours or other.cfg.length < L):
        raise Refused(f"--against={cfg.against} has tokens of {other.info['tokenizer']}, at most {other.cfg.length}, "
                      f"{cfg.checkpoint} those of {ours}, {L}: they cannot be compared")
    values, nll = {}, {}
    context = lambda: torch.autocast(device.type, dtype, enabled=dtype is not None)
    for name in ["soft", "binary"] if model.sm else ["binary"]:
        with context():
            nll[name], ce, masked = bound(model, rows, name == "soft", cfg.seed, cfg.repeats, cfg.batch_size)
        nats, se = mean_and_se(nll[name], np.full(take, L))
        values[name] = {"nats_per_token": nats, "nats_per_token_se": se, "ppl": float(np.exp(nats)),
                        "ppl_se": float(np.exp(nats) * se), "bits_per_byte": bits_per_byte(nats, L, split),
                        "ce_per_masked_token": float(ce.sum() / masked.sum())}
    differences = {"gain": nll["binary"] - nll["soft"]} if model.sm else {}
    if other:
        with context():
            theirs = bound(other, rows, other.sm is not None, cfg.seed, cfg.repeats, cfg.batch_size)[0]
        differences["below_against"] = theirs - next(iter(nll.values()))
    for name, difference in differences.items():  # row by row, so much surer than either of the two
        mean, se = mean_and_se(difference, np.full(take, L))
        values[name] = {"nats_per_token": mean, "nats_per_token_se": se}
    settings = {"step": model.info["step"], "L": L, "tokenizer": ours["name"], "n": take, "text": split,
                "dtype": str(dtype or torch.float32).removeprefix("torch.")}
    write(cfg, cfg.checkpoint, values, settings)


# ---------------------------------------------------------------------------------------------------------------------
# samples


def read_samples(pattern):
    """(samples, settings): the lines of all files of the pattern, one per seed and index, and what they were made with."""
    samples, settings = {}, None
    for path in sorted(glob.glob(pattern)):
        try:
            with open(path, encoding="utf-8") as f:
                lines = [json.loads(line) for line in f]
            samples |= {(line["seed"], line["index"]): line for line in lines}
            if any(len(line["ids"]) < 2 or not all(type(i) is int for i in line["ids"]) or not isinstance(line["text"], str)
                   or not isinstance(line["nfe"], (int, float)) for line in lines):
                raise ValueError
            for line in lines:
                settings = settings or line["settings"]
                if other := differing(settings, line["settings"]):
                    raise Refused(f"{pattern!r} mixes samples of different {', '.join(other)}: evaluate them apart")
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise e if isinstance(e, Refused) else Refused(
                f"{path} is no file of samples: a line has two ids or more, text, nfe, seed, index, settings")
    if not samples:
        raise Refused(f"no samples in {pattern!r}: make some with sample.py, or correct --samples")
    return [samples[key] for key in sorted(samples)], settings


def differing(a, b):
    return sorted(key for key in a | b if a.get(key) != b.get(key))


def entropy(ids):
    """Of the tokens within one sample (L,), in nats: log L if all differ, 0 if all are the same                     App. B.1"""
    counts = torch.unique(torch.as_tensor(ids), return_counts=True)[1]
    return torch.special.entr(counts.double() / counts.sum()).sum().item()


def read_cache(path):
    """{key: line} of what is scored already. A last line that a kill cut short is cut off the file."""
    text = path.read_bytes() if path and path.exists() else b""
    whole = text[:text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    try:
        return {line["key"]: line for line in map(json.loads, whole.splitlines())}
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{path} holds something else than scores: move it away")


@torch.no_grad()
def score(texts, scorer="gpt2-large", cache=None, batch_size=8, device="cpu"):
    """What a causal LM makes of each text: nats, over how many tokens, and its last hidden state                   App. B.1

    The authors' rule: a text is tokenized anew and cut at 1,024 tokens; its first token is not scored, and of the EOS
    tokens only the first counts, where a first token that is EOS, as BOS is in GPT-2, is that one [code].
    cache: Path of a file with a line per text: a stopped run goes on, and gen_ppl and mauve share the work.
    Returns [{nll, tokens, feature (D,)}]. Raises Refused without transformers or the model, for a text with fewer than
    two tokens, and when the model returns NaN.
    """
    keys = [hashlib.blake2b(f"{scorer}\0{text}".encode(errors="replace"), digest_size=12).hexdigest() for text in texts]
    done = read_cache(cache)
    todo = list({key: text for key, text in zip(keys, texts) if key not in done}.items())
    if todo:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            tok, lm = AutoTokenizer.from_pretrained(scorer), AutoModelForCausalLM.from_pretrained(scorer)
        except ImportError:
            raise Refused("scoring samples needs transformers: pip install transformers")
        except Exception as e:  # broken files and hubs raise anything
            reason = f"{type(e).__name__}: {e}".splitlines()[0]
            raise Refused(f"--scorer={scorer} not found, neither a whole folder nor on the hub: {reason}")
        lm = lm.to(device).float().eval()
    for start in tqdm(range(0, len(todo), batch_size), f"scoring {len(todo)} texts", disable=not todo):
        batch = todo[start:start + batch_size]
        # The ends of a document in our tokenizers become the scorer's; GPT-2 under GPT-2 stays as it is.
        texts = [re.sub(r"<\|(endoftext|bos|eos)\|>", tok.eos_token or "", text) for _, text in batch]
        ids = [torch.tensor(tok(text, truncation=True, max_length=1024).input_ids) for text in texts]
        lengths = torch.tensor([len(row) for row in ids])                                      # (b,)
        if lengths.min() < 2:
            raise Refused(f"the text {batch[lengths.argmin()][1]!r} has fewer than two tokens of {scorer}: nothing to score")
        if lengths.max() > (room := getattr(getattr(lm, "config", None), "max_position_embeddings", 1024)):
            raise Refused(f"a text has {lengths.max()} tokens, {scorer} takes {room}: use a scorer with 1,024, as the rule has it")
        x = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)                  # (b, T)
        real = (torch.arange(x.shape[1]) < lengths[:, None]).to(device)                        # (b, T)
        out = lm(input_ids=x, attention_mask=real.long(), output_hidden_states=True)
        # V last: with V in the middle, torch's log-softmax on the CPU is ten times less exact, 1e-4 nats per token.
        nll = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")  # (b · (T-1),)
        nll = nll.view(len(x), -1)                                                             # (b, T-1)
        eos = x == tok.eos_token_id                                                            # (b, T)
        counts = (real & (~eos | (eos.cumsum(1) == 1)))[:, 1:]                                 # (b, T-1)
        sums = torch.where(counts, nll, 0).cpu().double().sum(1).tolist()                      # (b,)
        features = out.hidden_states[-1][range(len(x)), lengths - 1].float().cpu().numpy()     # (b, D)
        for (key, text), nats, n, feature in zip(batch, sums, counts.sum(1).tolist(), features):
            if not math.isfinite(nats):
                raise Refused(f"{scorer} finds {nats} nats in the text {text[:60]!r}: its weights are broken")
            done[key] = {"key": key, "nll": nats, "tokens": n, "feature": base64.b64encode(feature.tobytes()).decode()}
        if cache:
            with open(cache, "a") as f:
                f.writelines(json.dumps(done[key]) + "\n" for key, _ in batch)
    return [done[key] | {"feature": np.frombuffer(base64.b64decode(done[key]["feature"]), np.float32)} for key in keys]


def gen_ppl(texts, scorer="gpt2-large", **how):
    """Generative perplexity, over the tokens of all texts together, and its standard error over texts     §4.1, App. B.1"""
    scores = score(texts, scorer, **how)
    if not any(s["tokens"] for s in scores):
        raise Refused("no text has a token to score besides ends of documents: the samples are empty")
    nats, se = mean_and_se([s["nll"] for s in scores], [s["tokens"] for s in scores])
    return math.exp(nats), math.exp(nats) * se


def mauve(texts_p, texts_q, scale=5, seed=25, scorer="gpt2-large", **how):
    """MAUVE of samples against held-out text, in (0, 1], in the feature space of `scorer`                §4.1, App. B.1

    It depends on the number of texts and on the clusters' seed: report both. Published ones have 5,000 on either side.
    """
    try:
        import mauve as instrument
    except ImportError:
        raise Refused("MAUVE needs the package mauve-text: pip install mauve-text")
    p, q = (np.stack([s["feature"] for s in score(texts, scorer, **how)]) for texts in (texts_p, texts_q))  # (n, D)
    return float(instrument.compute_mauve(p_features=p, q_features=q, mauve_scaling_factor=scale, seed=seed).mauve)


def of_samples(cfg):
    """entropy, gen_ppl or mauve of a file of samples; the entropy always, since a low one flatters the other two."""
    samples, settings = read_samples(cfg.samples)
    texts, L = [sample["text"] for sample in samples], len(samples[0]["ids"])
    spread = [entropy(sample["ids"]) for sample in samples]
    values = {"entropy": statistics.mean(spread), "entropy_min": min(spread),
              "nfe": statistics.mean(sample["nfe"] for sample in samples)}
    stem = re.sub(r"[*?]|\.jsonl$", "", cfg.samples)
    how = {"cache": Path(stem).parent / "scores.jsonl", "batch_size": cfg.batch_size, "device": machine(cfg.device)[2]}
    if cfg.metric == "gen_ppl":
        values["gen_ppl"], values["gen_ppl_se"] = gen_ppl(texts, cfg.scorer, **how)
    if cfg.metric == "mauve":
        tokens, meta = data.open_split(cfg.data, "val")
        if tokens.tokenizer["name"] != settings.get("tokenizer"):
            raise Refused(f"{cfg.samples} is of tokenizer {settings.get('tokenizer')}, {cfg.data} of "
                          f"{tokens.tokenizer['name']}: give the data that the model was trained on")
        n, tok = data.n_rows(tokens, L), data.tokenizer(tokens.tokenizer["name"], cfg.tokenizer_dir)
        rows = data.rows(tokens, torch.randperm(n, generator=rng("reference", cfg.seed))[:len(texts)], L)  # (n, L)
        values["mauve"] = mauve(texts, [tok.decode(row.tolist()) for row in rows], cfg.scale, cfg.seed, cfg.scorer, **how)
        values["references"] = len(rows)
    write(cfg, stem, values, settings | {"L": L, "n": len(samples), "seeds": sorted({sample["seed"] for sample in samples})})


# ---------------------------------------------------------------------------------------------------------------------
# results


def write(cfg, stem, values, settings):
    """The result as JSON: values, how the thing was made, how it was measured, with which versions."""
    versions = {"python": platform.python_version(), "git": git_version()}
    for package in "torch", "transformers", "mauve-text":
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    # what was measured on or with is in the name: two of them must not overwrite each other
    by = {"ppl": cfg.data, "zero_shot": cfg.text, "gen_ppl": cfg.scorer, "mauve": cfg.data}.get(cfg.metric, "")
    below = "below-" + re.sub(r"\W+", "-", cfg.against) if cfg.against else ""
    path = cfg.out or ".".join(filter(None, (stem.rstrip("."), cfg.metric, os.path.basename(by.rstrip("/")).split(".")[0], below, "json")))
    result = {"metric": cfg.metric, "values": values, "settings": settings, "evaluation": asdict(cfg), "versions": versions}
    for name, row in values.items() if cfg.metric in ("ppl", "zero_shot") else ((cfg.metric, values),):
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in row.items()))
    with atomic(path) as tmp, open(tmp, "w") as f:
        json.dump(result, f, indent=2)
    print(f"written to {path}")


# column of the table: its heading, its decimals, and what of the evaluation must be equal all along it
COLUMNS = {"mauve": ("MAUVE ↑", 3, ("scorer", "scale", "seed", "data")), "gen_ppl": ("gen. PPL ↓", 2, ("scorer",)),
           "entropy": ("entropy ↑", 3, ()), "ppl": ("PPL ↓", 2, ("seed", "repeats", "ema"))}


def entries(result):
    """What one result says: [(row, column, run, value, what must be equal along the column, and in the cell)]."""
    metric, values, s, e = (result[key] for key in ("metric", "values", "settings", "evaluation"))
    label = e["label"] or s.get("checkpoint") or e["checkpoint"]
    if metric in ("ppl", "zero_shot"):
        feedback = "soft" if "soft" in values else "binary"
        column = "ppl", os.path.basename(e["text"] or e["data"])
        found = [(("", feedback, label), column, e["checkpoint"], values[feedback]["ppl"])]
    else:
        row = ("ReMDM" if s["sampler"].startswith("remdm") else "standard", "soft" if s["soft"] else "binary", label)
        found = [(row, (name, "{}/{}".format(*Fraction(s["steps"], s["L"]).as_integer_ratio())), e["samples"], values[name])
                 for name in ("mauve", "gen_ppl", "entropy") if name in values]
    same = {key: s.get(key) for key in ("L", "n", "top_p", "tokenizer", "text", "dtype")}
    cell = {key: s.get(key) for key in ("sampler", "eta", "t_on", "t_off", "alpha_on", "ema", "step", "prompt", "infill")}
    more = lambda name: {key: e[key] for key in COLUMNS[name][2]} | ({"references": values.get("references")} if name == "mauve" else {})
    return [(*entry, same | more(entry[1][0]), cell) for entry in found]


def table(cfg):
    """Results side by side, as in Tables 1, 2, 4-7: unmasking × feedback down, budget (NFE / L) across, mean (± sd) of runs.

    A soft row is followed by its gain over the binary row of its label, else over the last binary row.
    """
    cells, first = collections.defaultdict(lambda: collections.defaultdict(dict)), {}
    for path in sorted(glob.glob(cfg.results)):
        try:
            with open(path) as f:
                found = entries(json.load(f))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise Refused(f"{path} is not a result of eval.py: correct --results")
        for row, column, run_, value, same, cell in found:
            for key, made, place in ((column[0] + column[1] * (column[0] == "ppl"), same, "table"), ((row, column), cell, "row, --label")):
                where, before = first.setdefault(key, (path, made))
                if other := differing(before, made):
                    raise Refused(f"{where} and {path} differ in {', '.join(f'{k} ({before.get(k)}, {made.get(k)})' for k in other)}: "
                                  f"such numbers do not belong in one {place}")
            if not math.isfinite(value):
                raise Refused(f"{column[0]} in {path} is {value}: measure it again")
            cells[row][column][run_] = value
    if not cells:
        raise Refused(f"no results match --results={cfg.results!r}")
    columns = sorted({column for row in cells.values() for column in row},
                     key=lambda c: (list(COLUMNS).index(c[0]), c[0] != "ppl" and Fraction(c[1]), c[1]))
    mean = lambda row, column: statistics.mean(cells[row][column].values())

    def line(row, cell):
        return f"| {' | '.join(row)} | {' | '.join(cell(c, COLUMNS[c[0]][1]) for c in columns)} |"

    def measured(c, digits):
        runs = cells[row].get(c, {}).values()
        sd = f" (± {statistics.stdev(runs):.{digits}f})" if len(runs) > 1 else ""
        return f"{mean(row, c):.{digits}f}{sd}" if runs else ""

    def gained(c, digits):
        return f"{mean(row, c) - mean(base, c):+.{digits}f}" if c in cells[row] and c in cells[base] else ""

    lines = [line(("unmasking", "feedback", "model"), lambda c, _: f"{COLUMNS[c[0]][0]} {c[1]}"),
             "|---" * 3 + "|--:" * len(columns) + "|"]
    for row in sorted(cells, key=lambda row: (row[0] == "ReMDM", row[1])):  # binary before soft, standard before ReMDM
        lines.append(line(row, measured))
        bases = sorted((base[2] == row[2], base) for base in cells if base[:2] == (row[0], "binary"))
        if row[1] == "soft" and bases:
            base = bases[-1][1]
            lines.append(line(("", "gain", ""), gained))
    print("\n".join(lines))
    if cfg.out:
        with atomic(cfg.out) as tmp, open(tmp, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")


def main(cfg):
    verbs = {"ppl": ppl, "zero_shot": ppl, "table": table, **dict.fromkeys(("entropy", "gen_ppl", "mauve"), of_samples)}
    if cfg.metric not in verbs:
        raise Refused(f"{cfg.metric!r} is not something to measure: use {', '.join(verbs)}")
    if min(cfg.batch_size, cfg.repeats, cfg.rows + 1) < 1:
        raise Refused(f"--batch_size={cfg.batch_size} --repeats={cfg.repeats} --rows={cfg.rows}: at least 1, 1 and 0")
    verbs[cfg.metric](cfg)


if __name__ == "__main__":
    run(main, Config, PRESETS)
