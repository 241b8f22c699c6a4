# SPDX-License-Identifier: MIT
"""Three measures of samples.                                                §4.1, App. B.1, C.2

Entropy (low if a sample repeats itself), perplexity under GPT-2 large, closeness to text (MAUVE):

    python lab/eval_samples.py --samples=samples.jsonl --data=data/owt
    python lab/eval_samples.py --samples= --data=data/owt --rows=5000  # held-out: Data in Table 1

The last two need `pip install transformers mauve-text`: published numbers depend on these tools.
"""

import contextlib
import functools
import importlib.metadata
import math
import os
import re
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import launch
import sample
from eval import mean_and_se, result_path, write_result
from launch import Count, Refused, Size, machine, progress, run


@dataclass
class Config:
    samples: str = "samples.jsonl"  # from sample.py; NAME.jsonl includes all NAME.rankN.jsonl
    data: str = "data/owt"          # MAUVE compares samples with its held-out rows ("": no MAUVE)
    rows: Count = 0                 # how many held-out rows, if --samples= is empty (0: half)
    length: Size = 1024             # tokens in such a row
    seed: int = 1                   # for MAUVE's reference rows and clusters
    scorer: str = "gpt2-large"      # a causal LM: its name on the hub, or its folder
    out: str = ""                   # the result (default: NAME.samples.json)
    label: str = ""                 # its row in `lab/plot.py --table` (default: the checkpoint)
    batch_size: Size = 8            # affects the speed only
    device: str = "auto"            # cuda, else mps, else cpu


def read_samples(path):
    """(samples, settings): the lines of all ranks, each index once, and their settings"""
    lines = sample.read_samples(path)
    if not lines:
        raise Refused(f"no samples in {path}: make some with sample.py, or correct --samples")
    settings = lines[0]["settings"]
    if any(line["settings"] != settings for line in lines):  # seeds, too
        raise Refused(f"{path} and NAME.rankN.jsonl beside it mix settings or seeds: give each run "
                      "a name of its own")
    if settings.get("prompt"):
        raise Refused(f"{path} has samples of a prompt, which would be measured, too: make some "
                      "without one")
    samples = {line["index"]: line for line in lines}
    return [line for _, line in sorted(samples.items())], settings


def held_out_samples(cfg, L, n=None):
    """(samples, settings), as from `read_samples`, but of shuffled held-out rows"""
    tokens, _ = data.open_split(cfg.data, "val")
    tok = data.tokenizer(tokens.tokenizer["name"])
    shuffled = torch.randperm(data.n_rows(tokens, L), generator=data.rng("reference", cfg.seed))
    half = len(shuffled) // 2
    # References come first. The samples of "Data" in Table 1 come last, from the other half.
    index = shuffled[:n] if n else shuffled[-min(cfg.rows or half, half):]
    samples = [{"ids": row, "text": tok.decode(row), "nfe": 0, "seed": cfg.seed}
               for row in data.rows(tokens, index, L).tolist()]
    return samples, {"sampler": "data", "checkpoint": cfg.data, "tokenizer": tok.name}


def entropy(ids):
    """Entropy of the tokens in one sample, ids (L,), in nats [code]; at most log L      App. B.1"""
    counts = torch.unique(torch.as_tensor(ids), return_counts=True)[1]
    return torch.special.entr(counts.double() / counts.sum()).sum().item()


@torch.no_grad()
def score(texts, scorer="gpt2-large", batch_size=8, device="cpu"):
    """Nats (n,), tokens scored (n,) and last hidden states (n, D), from a causal LM       App. B.1

    The authors' rule [code]: each text is tokenized again and cut at 1,024 tokens. Its first token
    is not scored. Of its EOS tokens, only the first is scored, and none if the text begins with
    one, because GPT-2's BOS is the same token.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    with launch.readable(scorer):
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
        # With (b, V, T−1), torch's log-softmax would have errors of 1e-4 nats on the CPU.
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


def mauve(features, references, seed):
    """MAUVE of samples against texts, from features (n, D) and (m, D) of `score`  §4.1, App. B.1"""
    # It depends on the seed and both counts. The authors compare 5,000 with 5,000 [code].
    from mauve import compute_mauve
    return float(compute_mauve(p_features=features, q_features=references, seed=seed,
                               mauve_scaling_factor=5.0).mauve)


def main(cfg):
    samples, settings = (read_samples(cfg.samples) if cfg.samples else
                         held_out_samples(cfg, cfg.length))
    source = cfg.samples.removesuffix(".jsonl") or os.path.join(cfg.data, "val")
    L = len(samples[0]["ids"])
    settings |= {"L": L, "n": len(samples), "seeds": sorted({s["seed"] for s in samples})}
    path = result_path(cfg, source, "samples", settings)
    device = machine(cfg.device).device
    if cfg.data:
        rows, theirs = held_out_samples(cfg, L, len(samples))
        launch.check_same(cfg.data, theirs, settings, ["tokenizer"],
                          ": give the data that the model was trained on")
    for package in "transformers", "mauve-text":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            settings[package] = importlib.metadata.version(package)
    # The entropy comes first: if it is low, generative perplexity flatters the samples (App. C.2).
    entropies = [entropy(sample["ids"]) for sample in samples]
    values = {"entropy": np.mean(entropies), "entropy_min": min(entropies),
              "nfe": np.mean([sample["nfe"] for sample in samples]), "n": len(samples)}
    write = functools.partial(write_result, cfg, path, "samples", {"samples": values}, settings)
    write()  # now, because the other measures need a package that may be missing
    scores = functools.partial(score, scorer=cfg.scorer, batch_size=cfg.batch_size, device=device)
    nats, tokens, features = scores([sample["text"] for sample in samples])
    values["gen_ppl"], values["gen_ppl_se"] = gen_ppl(nats, tokens)
    write()
    if cfg.data:
        references = scores([row["text"] for row in rows])[2]
        values["mauve"] = mauve(features, references, cfg.seed)
        values |= {"references": len(rows), "seed": cfg.seed}
        write()


if __name__ == "__main__":
    run(main, Config)
