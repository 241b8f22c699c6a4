# SPDX-License-Identifier: MIT
"""Every number of the paper's language-modelling tables.                       §4.1, App. B.1, C.1

A bound on the perplexity of held-out text:

    python eval.py ppl --checkpoint=out/last.pt --data=data/owt
    python eval.py zero_shot --checkpoint=out/last.pt --text=wikitext.txt  # of another text

The same bound, split by t and by what is fed back. It shows at which t soft-masking pays, and
whether it is the content of the feedback that helps. An adapter of finetune_dream.py is measured
on the dialogues that its run held out:

    python eval.py feedback --checkpoint=out/last.pt --data=data/owt
    python eval.py feedback --checkpoint=out/dream/best

Three opinions on samples: how varied their tokens are (low where a sample repeats itself), how
likely GPT-2 large finds them, and how far they are from held-out text:

    python eval.py entropy --samples=samples.jsonl
    python eval.py sudoku --samples=samples.jsonl  # or how many are grids without a mistake
    python eval.py gen_ppl --samples=samples.jsonl
    python eval.py mauve --samples=samples.jsonl --data=data/owt
    python eval.py gen_ppl --samples= --data=data/owt --rows=5000  # of held-out rows: "Data"

A result is a JSON file with all settings, versions, n and seed. GPT-2 and MAUVE come from
`pip install transformers mauve-text`: published numbers depend on these very instruments.

Not here: generation (sample.py), tables and figures (plot.py).
"""

import base64
import contextlib
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import data
import finetune_dream as dream
import sudoku
from arms import soft_mask
from data import rng
from dream import load_adapter
from launch import (
    Count,
    Refused,
    Size,
    append_jsonl,
    machine,
    progress,
    read_json,
    read_jsonl,
    run,
    write_text,
)
from mdlm import ALPHA_FLOOR, MDLM, TwoPass, corrupt, sample_times


@dataclass
class Config:
    metric: str = ""                # the first word: ppl, zero_shot, feedback, entropy, sudoku, …
    out: str = ""                   # result (default: beside the input, NAME.METRIC.SETTINGS.json)
    label: str = ""                 # row of the table, such as 1M+100k (default: the checkpoint)
    device: str = "auto"            # cuda, else mps, else cpu
    batch_size: Size = 8            # changes the speed and no result
    seed: int = 1                   # of masks and times; of MAUVE's reference rows and clusters
    tokenizer_dir: str = ""         # GPT-2's vocabulary, for machines without a network
    # ppl, zero_shot, feedback
    checkpoint: str = ""            # anything that `python checkpoint.py` can describe; for
                                    # feedback also a folder of finetune_dream.py, best or last
    ema: bool = True                # take its averaged backbone
    data: str = "data/owt"          # ppl, feedback measure its val.bin; MAUVE compares with it
    text: str = ""                  # zero_shot measures these files, read as data.py reads them
    rows: Count = 0                 # so many rows, evenly spaced (default: all; of "Data": half)
    repeats: Size = 1               # draws of times and masks per row
    against: str = ""               # another checkpoint, measured on the same masks
    dtype: str = "auto"             # bfloat16 where the GPU has it [code], else float32
    # entropy, gen_ppl, mauve
    samples: str = "samples.jsonl"  # of sample.py; shards NAME.RANK.jsonl of a run are one file
    length: Annotated[int, 3, 2**31] = 1024  # tokens of a held-out row, where --samples= is empty
    scorer: str = "gpt2-large"      # a causal LM, by its name on the hub or its folder
    scale: float = 5.0              # of MAUVE, App. B.1


FEEDBACKS = "none", "own", "permuted", "truth"  # see `bound_by_feedback`
BINS = 10                                       # of t, as wide as each other


def mean_and_se(total, count):
    """Σ total / Σ count and its standard error over n sequences, two floats.

    total, count: (n,). One sequence has no error: nan.
    """
    total, count = np.asarray(total, np.float64), np.asarray(count, np.float64)
    n, mean = len(total), total.sum() / count.sum()
    if n == 1:
        return mean, math.nan
    squares = ((total - mean * count) ** 2).sum()
    return mean, math.sqrt(n / (n - 1) * squares) / count.sum()


# -------------------------------------------------------------------------------------------------
# held-out text


def corrupted(rows, mask_id, seed=0, repeats=1, batch_size=8, rank=0, world=1, floor=ALPHA_FLOOR):
    """Yields (index (b,), x0 (b, L), x_t (b, L), t (b,)): all rows, each with `repeats` times.

    The arguments are those of `bound`. The times of all rows together are one stratified sample,
    and so are those of each row. They are dealt out to the rows at random. Masks are keyed by the
    row, so batch_size and world do not change them.
    """
    n = len(rows)
    deal = torch.randperm(n, generator=rng("deal", seed))
    times = sample_times(n * repeats, rng("times", seed), low=max(floor, 1e-6))       # (repeats·n,)
    times = times.view(repeats, n)[:, deal]                                          # (repeats, n)
    mine = torch.arange(n).split(batch_size)[rank::world]
    # disable=None hides the bar where stderr is no terminal.
    for index in progress(mine, "held-out rows", leave=False, disable=True if rank else None):
        for r, t in enumerate(times[:, index]):                                      # (b,)
            xt = torch.cat([
                corrupt(x[None], s[None], mask_id, rng("masks", seed, r, int(i)), floor)
                for i, x, s in zip(index, rows[index], t)])                          # (b, L)
            yield index, rows[index], xt, t


@torch.no_grad()
def bound(model, rows, soft, seed=0, repeats=1, batch_size=8, rank=0, world=1,
          floor=ALPHA_FLOOR):
    """Eq. 2 on fixed rows, row by row.                                            Eq. 2, App. C.1

    model: MDLM, which is in eval mode meanwhile.   rows: (n, L) ids, on the CPU.
    soft: with feedback, in two passes.   repeats: draws of t and x_t per row.
    rank, world: this process takes every world-th batch. They hold m of the n rows.
    floor: the smallest t and α. The default is the published convention, 0.1 to 0.3 % too small.
        With 0, the expectation is the bound itself (tests/test_bound.py enumerates both).
    Returns three (m,) float64 tensors, means over the repeats: the bound in nats, and for the same
    masks the cross-entropy without the weight 1/t, in nats, and the number of masks.
    Raises Refused where the bound is not a number.

    With one seed, feedback on and off see the same masks (`corrupted`): their difference is much
    surer than either number.
    """
    device, was_training = next(model.parameters()).device, model.training
    total = torch.zeros(3, len(rows), dtype=torch.float64)                           # (3, n)
    mine = torch.zeros(len(rows), dtype=torch.bool)                                  # (n,)
    model.eval()
    for index, x0, xt, t in corrupted(rows, model.cfg.mask_id, seed, repeats, batch_size, rank,
                                      world, floor):
        nll = model(x0.to(device), xt.to(device), t.to(device), soft).cpu().double()  # (b,)
        masked = (xt == model.cfg.mask_id).sum(1)                                    # (b,)
        total[:, index] += torch.stack((nll, nll * t, masked)) / repeats
        mine[index] = True
    model.train(was_training)
    nll, ce, masked = total[:, mine]                                                 # (m,) each
    if not nll.isfinite().all():
        raise Refused(f"the bound is not a number on {(~nll.isfinite()).sum()} of {len(nll)} "
                      f"rows: the weights are broken, or they do not bear this dtype")
    return nll, ce, masked


def val_ppl(model, rows, soft, seed=0, **how):
    """(sum_nll, n_tokens) of `bound`: exp(sum_nll / n_tokens) is the perplexity.         App. C.1

    n_tokens counts all L positions of every row, also BOS, EOS and those that were never masked,
    as for the published numbers [code]. Over several ranks, add up both numbers first.
    """
    nll = bound(model, rows, soft, seed, **how)[0]
    return nll.sum().item(), nll.numel() * rows.shape[1]


def bits_per_byte(nats_per_token, L, split):
    """The bound in a unit that compares across tokenizers.

    split: {tokens, bytes} of the whole text. Every row is taken to have as many bytes per token.
    """
    bytes_in_a_row = (L - 2) * split["bytes"] / split["tokens"]
    return nats_per_token / math.log(2) * L / bytes_in_a_row


def held_out_rows(cfg, special, L):
    """(rows (n, L), counts): val.bin of cfg.data, or cfg.text in rows of the same layout.

    special: the model's tokenizer, as `data.describe` describes it.
    counts: {documents, tokens, bytes} of the whole text.
    Raises Refused if the data has another tokenizer.
    """
    if cfg.metric == "zero_shot":
        tok = data.tokenizer(special["name"], cfg.tokenizer_dir)
        theirs = data.describe(tok)
        whole, counts = data.text_rows(data.documents(data.find_files(cfg.text)), tok, L)
        n, pick = len(whole), lambda index: whole[index]
    else:
        tokens, meta = data.open_split(cfg.data, "val")
        theirs, counts, n = tokens.tokenizer, meta["val"], data.n_rows(tokens, L)
        pick = lambda index: data.rows(tokens, index, L)
    if theirs != special:
        raise Refused(f"{cfg.text or cfg.data} holds tokens of {theirs}, {cfg.checkpoint} was "
                      f"trained on those of {special}: prepare the text again with "
                      f"--tokenizer={special['name']}")
    take = min(cfg.rows or n, n)
    return pick(torch.arange(take) * n // take), counts


def measure_bound(cfg):
    """ppl and zero_shot: a checkpoint on held-out text, with feedback and without."""
    device, dtype = machine(cfg.device, cfg.dtype)[2:]
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    special, L = model.info["tokenizer"], model.cfg.length
    rows, text = held_out_rows(cfg, special, L)                                      # (n, L)
    if cfg.against:
        other = MDLM.load(cfg.against, cfg.ema).to(device)
        theirs = other.info["tokenizer"]
        if theirs != special or other.cfg.length < L:
            raise Refused(f"--against={cfg.against} has tokens of {theirs}, at most "
                          f"{other.cfg.length}, {cfg.checkpoint} those of {special}, {L}: they "
                          "cannot be compared")
    tokens = np.full(len(rows), L)                                                   # (n,)

    def measure(model, soft, **floor):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return bound(model, rows, soft, cfg.seed, cfg.repeats, cfg.batch_size, **floor)

    def in_nats(total, name="nats_per_token"):
        return dict(zip((name, name + "_se"), mean_and_se(total, tokens)))

    values, nll = {}, {}
    for name in ["soft", "binary"] if model.sm else ["binary"]:
        nll[name], ce, masked = measure(model, name == "soft")
        values[name] = in_nats(nll[name])
        nats, se = values[name].values()
        values[name] |= {
            "ppl": float(np.exp(nats)), "ppl_se": float(np.exp(nats) * se),
            "bits_per_byte": bits_per_byte(nats, L, text),
            "ce_per_masked_token": float(ce.sum() / masked.sum()),
            **in_nats(measure(model, name == "soft", floor=0.0)[0], "unbiased_nats")}
    if model.sm:
        values["gain"] = in_nats(nll["binary"] - nll["soft"])
    if cfg.against:
        ours = nll["soft" if model.sm else "binary"]
        values["below_against"] = in_nats(measure(other, other.sm is not None)[0] - ours)
    settings = {"step": model.info["step"], "L": L, "tokenizer": special["name"], "n": len(rows),
                "text": text, "dtype": str(dtype or torch.float32).removeprefix("torch."),
                "training": training_of(cfg.checkpoint, model.info["step"])}
    write_result(cfg, cfg.checkpoint, values, settings)


# -------------------------------------------------------------------------------------------------
# what is fed back


@torch.no_grad()
def bound_by_feedback(model, x0, xt, t, other):
    """The terms of Eq. 2 under four feedbacks: is it the content that helps?

    none      plain masks, in one pass
    own       what the model thinks of this mask, as in training
    permuted  what it thinks of a mask in another text: as sure on average, but of other tokens
    truth     the masked token itself, with H = 0 and the largest λ: all that feedback could do

    model: TwoPass with a soft mask.   x0, xt: (B, L) ids.   t: (B,) times.
    other: ids of other texts, masked at these times. The n-th mask of xt gets the feedback of the
        n-th mask of other, counted over the batch. Where other has fewer, it starts again.
    Returns (4, B) float64, nats per sequence. `none` and `own` are MDLM.forward, bit for bit.
    """
    net, (B, L) = model.net, xt.shape
    rows, theirs = ((x == model.mask_id).flatten().nonzero().squeeze(1) for x in (xt, other))
    tokens, plain = x0.flatten()[rows], F.embedding(xt, net.table)         # (N,), (B, L, D)

    def after(mixed):
        emb = plain.flatten(0, 1).index_copy(0, rows, mixed.to(plain.dtype)).view_as(plain)
        return net.hidden(emb, rows, t)                                    # (N, D)

    none = net.hidden(plain, rows, t)                                      # (N, D)
    own = model.feedback(none)[0]                                          # (N, D)
    h = net.hidden(F.embedding(other, net.table), theirs, t)               # (M, D)
    at = torch.arange(len(rows), device=rows.device) % max(1, len(theirs))  # (N,)
    permuted = model.feedback(h)[0][at]                                    # (N, D)
    truth = model.feedback_of_certain(tokens)[0]                           # (N, D)
    hs = none, after(own), after(permuted), after(truth)
    nll = torch.stack([model.cross_entropy(h, tokens) for h in hs])        # (4, N)
    return (nll.new_zeros(4, B).index_add(1, rows // L, nll) / t).cpu().double()


def feedback_on_text(cfg):
    """A checkpoint on val.bin: [(terms (4, b), t (b,), tokens (b,))], and the settings.

    ALPHA_FLOOR is not used, so `none` and `own` have the `unbiased` values of ppl as their means.
    """
    device, dtype = machine(cfg.device, cfg.dtype)[2:]
    model = MDLM.load(cfg.checkpoint, cfg.ema).to(device)
    rows, _ = held_out_rows(cfg, model.info["tokenizer"], model.cfg.length)          # (n, L)
    n, L = rows.shape
    if model.sm is None or n < 2:
        raise Refused(f"{cfg.checkpoint} on {n} rows: to compare feedbacks, give a model with soft "
                      f"masks, and two rows")
    parts = []
    for index, x0, xt, t in corrupted(rows, model.mask_id, cfg.seed, cfg.repeats, cfg.batch_size,
                                      floor=0.0):
        masked = xt == model.mask_id                                                 # (b, L)
        other = rows[(index + 1) % n].masked_fill(masked, model.mask_id)             # (b, L)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            terms = bound_by_feedback(model, *(v.to(device) for v in (x0, xt, t, other)))
        parts.append((terms, t, torch.full_like(t, L)))
    return parts, {"step": model.info["step"], "L": L, "n": n}


def feedback_on_dialogues(cfg):
    """The same for an adapter, on the dialogues that its run held out. Responses are masked.

    The model and the dialogues are those of its finetune.json.
    """
    made = read_json(os.path.join(cfg.checkpoint, "finetune.json"))
    names = made.keys() & {f.name for f in fields(dream.Config)}
    run_cfg, device = dream.Config(**{name: made[name] for name in names}), machine(cfg.device)[2]
    tok, net = dream.Tokenizer(run_cfg.model), dream.Dream.load(run_cfg.model, device)
    omega, mask_id = load_adapter(net, cfg.checkpoint), net.cfg.mask_token_id
    held_out = (dream.read_hub if run_cfg.data in dream.HUB else dream.read_lines)(run_cfg)[1]
    val = dream.encode_all(*held_out, run_cfg, tok, mask_id, True)[0]
    if made.get("held_out") not in (None, dream.digest_of(val)):  # an older run has none
        raise Refused(f"{run_cfg.data} has changed since {cfg.checkpoint} was trained: some of the "
                      f"dialogues to measure may be among those it learned. Bring the file back")
    val = val[:cfg.rows or None]
    n = len(val)
    if omega is None or n < 2:
        raise Refused(f"{cfg.checkpoint} on {n} held-out dialogues: to compare feedbacks, give an "
                      f"adapter with ω, of a run that held out two")
    model = TwoPass(net, soft_mask(**omega).to(device), mask_id)
    x0s = [dream.pad_with_eos(ids, net.cfg.pad_token_id, rng("n_end", cfg.seed, i))[None]
           for i, (ids, _) in enumerate(val)]                                        # (1, L) each
    times, parts = sample_times(n * cfg.repeats, rng("times", cfg.seed), low=1e-6), []
    bar = progress(times[:, None], "held-out dialogues", leave=False, disable=None)
    for j, t in enumerate(bar):                                                      # t: (1,)
        i, k = j % n, (j + 1) % n  # the permuted feedback is that of dialogue k
        x0, prompt = x0s[i], val[i][1]
        xt = corrupt(x0, t, mask_id, rng("masks", cfg.seed, j), 0.0)                 # (1, L)
        xt[:, :prompt] = x0[:, :prompt]
        other = dream.mask_response(x0s[k], val[k][1], t, mask_id, rng("other", cfg.seed, j))
        terms = bound_by_feedback(model, *(v.to(device) for v in (x0, xt, t, other)))
        parts.append((terms, t, torch.full_like(t, x0.shape[1] - prompt)))
    return parts, {"model": run_cfg.model, "dialogues": run_cfg.data, "n": n}


def measure_feedback(cfg):
    """Eq. 2 by bins of t under four feedbacks, in nats per token that may be masked.

    The gain of a feedback is how far it lies below none, on the same masks. Its error takes all
    draws for independent, so many --repeats of few rows make it too small.
    """
    folder = os.path.exists(os.path.join(cfg.checkpoint, "adapter_config.json"))
    parts, settings = (feedback_on_dialogues if folder else feedback_on_text)(cfg)
    terms, t, tokens = (torch.cat(part, -1) for part in zip(*parts))       # (4, n), (n,), (n,)
    if not terms.isfinite().all():
        raise Refused(f"the bound of {cfg.checkpoint} is not a number: the weights are broken, or "
                      f"they do not bear this dtype")
    which, values = (t * BINS).long().clamp_max(BINS - 1), {}              # (n,)
    groups = {f"{b / BINS:.1f} to {(b + 1) / BINS:.1f}": which == b for b in range(BINS)}
    for name, at in ({"all": which >= 0} | groups).items():                # at: (n,)
        if not at.any():
            continue
        row = {"t": t[at].mean().item(), "draws": int(at.sum())}
        row |= {f: mean_and_se(term, tokens[at])[0] for f, term in zip(FEEDBACKS, terms[:, at])}
        for f, term in zip(FEEDBACKS[1:], terms[1:, at]):
            row[f + "_gain"], row[f + "_gain_se"] = mean_and_se(terms[0, at] - term, tokens[at])
        values[name] = row
    write_result(cfg, cfg.checkpoint.rstrip("/"), values, settings)


# -------------------------------------------------------------------------------------------------
# samples


def is_sample(line):
    """Whether a value has what sample.py writes for a sample."""
    try:
        ids, text, nfe = line["ids"], line["text"], line["nfe"]
        return (len(ids) > 1 and all(type(i) is int for i in ids) and isinstance(text, str)
                and isinstance(nfe, (int, float)) and isinstance(line["settings"], dict)
                and {"seed", "index"} <= line.keys())
    except (KeyError, TypeError, AttributeError):
        return False


def read_samples(pattern):
    """(samples, settings): the lines of all files, and what they were made with.

    pattern: of files. NAME.jsonl also stands for NAME.RANK.jsonl, the shards that torchrun leaves.
    Of two samples with the same seed and index, one counts.
    Raises Refused for files that hold something else, and for samples of different settings.
    """
    samples, settings = {}, None
    shards = pattern.removesuffix(".jsonl") + ".[0-9]*.jsonl"
    for path in sorted({*glob.glob(pattern), *glob.glob(shards)}):
        for line in read_jsonl(path):
            if not is_sample(line):
                raise Refused(f"{path} is no file of samples: a line has two ids or more, text, "
                              "nfe, seed, index, settings")
            made = line["settings"]
            settings = settings or made
            if differ := sorted(k for k in settings | made if settings.get(k) != made.get(k)):
                raise Refused(f"{pattern!r} mixes samples of different {', '.join(differ)}: "
                              "evaluate them apart")
            samples[line["seed"], line["index"]] = line
    if not samples:
        raise Refused(f"no samples in {pattern!r}: make some with sample.py, or correct --samples")
    return [samples[key] for key in sorted(samples)], settings


def entropy(ids):
    """Entropy of the tokens within one sample, in nats.                                  App. B.1

    ids: (L,). It is log L if all tokens differ, and 0 if all are the same.
    """
    counts = torch.unique(torch.as_tensor(ids), return_counts=True)[1]
    return torch.special.entr(counts.double() / counts.sum()).sum().item()


def load_lm(scorer, device):
    """(tokenizer, causal LM in float32) by the name on the hub or the folder."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        tok = AutoTokenizer.from_pretrained(scorer)
        lm = AutoModelForCausalLM.from_pretrained(scorer)
    except ImportError:
        raise Refused("scoring samples needs transformers: pip install transformers")
    except Exception as e:  # broken files and hubs raise anything
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise Refused(f"--scorer={scorer} not found, neither a whole folder nor on the hub: "
                      f"{reason}")
    return tok, lm.to(device).float().eval()


@torch.no_grad()
def score_batch(texts, tok, lm, scorer, device):
    """The rule of `score_with_lm` on b texts: nats, tokens and features, three lists."""
    # Ends of a document in our tokenizers become that of the scorer. For GPT-2 they are the same.
    replaced = [re.sub(r"<\|(endoftext|bos|eos)\|>", tok.eos_token or "", text) for text in texts]
    ids = [torch.tensor(tok(text, truncation=True, max_length=1024).input_ids)
           for text in replaced]
    lengths = torch.tensor([len(row) for row in ids])                                # (b,)
    if lengths.min() < 2:
        raise Refused(f"the text {texts[lengths.argmin()]!r} has fewer than two tokens of "
                      f"{scorer}: nothing to score")
    room = getattr(lm.config, "max_position_embeddings", 1024)
    if lengths.max() > room:
        raise Refused(f"a text has {lengths.max()} tokens, {scorer} takes {room}: use a scorer "
                      "with 1,024, as the rule has it")
    x = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)            # (b, T)
    real = (torch.arange(x.shape[1]) < lengths[:, None]).to(device)                  # (b, T)
    out = lm(input_ids=x, attention_mask=real.long(), output_hidden_states=True)
    # V comes last: with V in the middle, torch's log-softmax on the CPU is ten times less exact
    # (an error of 1e-4 nats per token).
    logits = out.logits[:, :-1].flatten(0, 1)                                        # (b·(T−1), V)
    nll = F.cross_entropy(logits, x[:, 1:].flatten(), reduction="none")              # (b·(T−1),)
    eos = x == tok.eos_token_id                                                      # (b, T)
    scored = (real & (~eos | (eos.cumsum(1) == 1)))[:, 1:]                           # (b, T−1)
    nats = torch.where(scored, nll.view(scored.shape), 0).cpu().double().sum(1)      # (b,)
    features = out.hidden_states[-1][range(len(x)), lengths - 1].float().cpu()       # (b, D)
    for text, value in zip(texts, nats.tolist()):
        if not math.isfinite(value):
            raise Refused(f"{scorer} finds {value} nats in the text {text[:60]!r}: its weights "
                          "are broken")
    return nats.tolist(), scored.sum(1).tolist(), list(features.numpy())


def score_with_lm(texts, scorer="gpt2-large", cache=None, batch_size=8, device="cpu"):
    """What a causal LM makes of each text.                                                App. B.1

    The authors' rule [code]: a text is tokenized anew and cut at 1,024 tokens. Its first token is
    not scored. Of the EOS tokens only the first counts, and none if the text begins with one:
    GPT-2 has the same token for BOS.
    cache: a file with a line per text, so that a stopped run goes on, and gen_ppl and mauve share
        the work.
    Returns [{nll in nats, tokens scored, feature: last hidden state (D,) float32}].
    Raises Refused without transformers or the model, for a text with fewer than two tokens or too
    many, and when the model returns NaN.
    """
    weights = ""  # in a folder they can change, and then older scores are not theirs
    if os.path.isdir(scorer):
        weights = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns)
                         for e in os.scandir(scorer) if e.name.endswith((".safetensors", ".bin")))
    names = [f"{scorer}{weights}\0{text}".encode(errors="replace") for text in texts]
    keys = [hashlib.blake2b(name, digest_size=12).hexdigest() for name in names]
    try:
        done = {line["key"]: line for line in (read_jsonl(cache, repair=True) if cache else [])}
    except (Refused, KeyError, TypeError):
        raise Refused(f"{cache} holds something else than scores: move it away")
    todo = list({key: text for key, text in zip(keys, texts) if key not in done}.items())
    if todo:
        tok, lm = load_lm(scorer, device)
    starts = range(0, len(todo), batch_size)
    for start in progress(starts, f"scoring {len(todo)} texts", disable=not todo):
        new_keys, new_texts = zip(*todo[start:start + batch_size])
        scores = score_batch(new_texts, tok, lm, scorer, device)
        for key, nats, n, feature in zip(new_keys, *scores):
            done[key] = {"key": key, "nll": nats, "tokens": n,
                         "feature": base64.b64encode(feature.tobytes()).decode()}
        if cache:
            append_jsonl(cache, *(done[key] for key in new_keys))
    decode = lambda feature: np.frombuffer(base64.b64decode(feature), np.float32)
    return [done[key] | {"feature": decode(done[key]["feature"])} for key in keys]


def gen_ppl(texts, scorer="gpt2-large", **how):
    """Generative perplexity and its standard error over texts.                     §4.1, App. B.1

    The tokens of all texts are averaged together. how: see `score_with_lm`.
    """
    scores = score_with_lm(texts, scorer, **how)
    if not any(s["tokens"] for s in scores):
        raise Refused("no text has a token to score besides ends of documents: the samples are "
                      "empty")
    nats, se = mean_and_se([s["nll"] for s in scores], [s["tokens"] for s in scores])
    return math.exp(nats), math.exp(nats) * se


def mauve(texts_p, texts_q, scale=5, seed=25, scorer="gpt2-large", **how):
    """MAUVE of samples against held-out text, in (0, 1].                           §4.1, App. B.1

    It compares the features that `scorer` has of the texts. how: see `score_with_lm`.
    It depends on the number of texts and on the seed of the clusters: report both. The paper has
    5,000 texts on either side.
    """
    try:
        import mauve as package
    except ImportError:
        raise Refused("MAUVE needs the package mauve-text: pip install mauve-text")
    p, q = (np.stack([s["feature"] for s in score_with_lm(texts, scorer, **how)])
            for texts in (texts_p, texts_q))                                         # (n, D)
    result = package.compute_mauve(p_features=p, q_features=q, seed=seed,
                                   mauve_scaling_factor=scale)
    return float(result.mauve)


def held_out_samples(cfg, L, name="", n=None):
    """(samples, settings), as `read_samples`: held-out rows of cfg.data, drawn at random.

    name: tokenizer of the samples that they are compared with.
    n: take the n rows that are drawn first, the references of MAUVE. Without n, take the --rows
        that are drawn last, at most half of all, so that the row "Data" shares no row with them.
    Raises Refused if the data has another tokenizer.
    """
    tokens, _ = data.open_split(cfg.data, "val")
    theirs = tokens.tokenizer["name"]
    if name not in ("", theirs):
        raise Refused(f"{cfg.samples} is of tokenizer {name}, {cfg.data} of {theirs}: give the "
                      "data that the model was trained on")
    tok = data.tokenizer(theirs, cfg.tokenizer_dir)
    shuffled = torch.randperm(data.n_rows(tokens, L), generator=rng("reference", cfg.seed))
    half = max(1, len(shuffled) // 2)
    index = shuffled[:n] if n else shuffled[-min(cfg.rows or half, half):]
    samples = [{"ids": row, "text": tok.decode(row), "nfe": 0, "seed": cfg.seed}
               for row in data.rows(tokens, index, L).tolist()]
    return samples, {"sampler": "data", "checkpoint": cfg.data, "tokenizer": theirs}


def training_of(path, step):
    """What Tables 1 and 4 count of a run, from its checkpoint after `step` updates.

    Returns {start: its --init_from, passes: network passes over a batch, loss tokens: those that
    were masked}, or {} if the file is gone, is of another update, or was made by other code.
    """
    with contextlib.suppress(Refused):
        ckpt = checkpoint.load(path)
        config = ckpt["config"]
        if ckpt["step"] == step and "batch_size" in config:
            masked = config["batch_size"] * config["length"] * (config["b_l"] + config["b_h"]) / 2
            return {"start": config["init_from"], "loss tokens": step * masked,
                    "passes": step * (1 + config["p_sm"] * config["soft_mask"])}
    return {}


def measure_samples(cfg):
    """entropy, sudoku, gen_ppl or mauve of a file of samples, or of the data if there is none.

    The entropy is always reported: where it is low, the other two flatter the samples.
    """
    if cfg.samples:
        samples, settings = read_samples(cfg.samples)
        trained = training_of(settings.get("checkpoint", ""), settings.get("step"))
        settings |= {"training": trained}
        stem = re.sub(r"[*?]|\.jsonl$", "", cfg.samples)
    else:
        samples, settings = held_out_samples(cfg, cfg.length)
        stem = os.path.join(cfg.data, "val")
    texts, L = [sample["text"] for sample in samples], len(samples[0]["ids"])
    entropies = [entropy(sample["ids"]) for sample in samples]
    values = {"entropy": statistics.mean(entropies), "entropy_min": min(entropies),
              "nfe": statistics.mean(sample["nfe"] for sample in samples)}
    how = {"scorer": cfg.scorer, "cache": Path(stem).parent / "scores.jsonl",
           "batch_size": cfg.batch_size, "device": machine(cfg.device)[2]}
    if cfg.metric == "sudoku":
        values |= sudoku.right(texts)
    if cfg.metric == "gen_ppl":
        values["gen_ppl"], values["gen_ppl_se"] = gen_ppl(texts, **how)
    if cfg.metric == "mauve":
        rows, _ = held_out_samples(cfg, L, settings.get("tokenizer"), len(texts))
        references = [row["text"] for row in rows]
        values["mauve"] = mauve(texts, references, cfg.scale, cfg.seed, **how)
        values["references"] = len(references)
    seeds = sorted({sample["seed"] for sample in samples})
    write_result(cfg, stem, values, settings | {"L": L, "n": len(samples), "seeds": seeds})


# -------------------------------------------------------------------------------------------------
# results


def write_result(cfg, stem, values, settings):
    """Print the values, and write them as JSON with the settings and versions they depend on.

    stem: start of the file's name.   settings: how the thing that was measured was made.
    """
    versions = {"python": platform.python_version(), "git": checkpoint.git_version()}
    for package in "torch", "transformers", "mauve-text":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    # The name says on what or with what it was measured, so that two results are two files.
    source = {"ppl": cfg.data, "zero_shot": cfg.text, "gen_ppl": cfg.scorer,
              "mauve": f"{cfg.data}-{cfg.scorer}",
              "feedback": settings.get("dialogues", cfg.data)}
    of = re.sub(r"\W+", "-", source.get(cfg.metric, ""))[-100:].strip("-")  # a name has 255 bytes
    flags = [f"{name}-{getattr(cfg, name)}"
             for name in ("seed", "rows", "repeats", "ema", "dtype", "length", "scale")
             if getattr(cfg, name) != getattr(Config, name)]
    below = "below-" + re.sub(r"\W+", "-", cfg.against) if cfg.against else ""
    parts = stem.rstrip("./"), cfg.metric, of, *flags, below, "json"
    path = cfg.out or ".".join(part for part in parts if part)
    result = {"metric": cfg.metric, "values": values, "settings": settings,
              "evaluation": asdict(cfg), "versions": versions}
    by_row = cfg.metric in ("ppl", "zero_shot", "feedback")
    rows = values.items() if by_row else [(cfg.metric, values)]
    for name, row in rows:
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in row.items()))
    write_text(path, json.dumps(result, indent=2))
    print(f"written to {path}")


VERBS = {"ppl": measure_bound, "zero_shot": measure_bound, "feedback": measure_feedback,
         "entropy": measure_samples, "sudoku": measure_samples, "gen_ppl": measure_samples,
         "mauve": measure_samples}
PRESETS = {name: {"metric": name} for name in VERBS}


def main(cfg):
    if cfg.metric not in VERBS:
        raise Refused(f"{cfg.metric!r} is not something to measure: use {', '.join(VERBS)}")
    VERBS[cfg.metric](cfg)


if __name__ == "__main__":
    run(main, Config, PRESETS)
