# SPDX-License-Identifier: MIT
"""softmask.py in a pretrained masked LM that was never trained with it: AntiBERTy, 26M, antibodies.

    pip install "transformers<5" && pip install --no-deps antiberty==0.1.3 abnativ==2.0.9
    OMP_NUM_THREADS=1 python results/antiberty.py

Nothing is trained. Pass 1 reads a masked antibody; pass 2 reads it with its own prediction fed
back at the masks, by a fixed ω. ω is chosen on one half of the antibodies. The table is of the
other half, and goes to stdout.

antiberty brings the model. abnativ brings antibodies of its own test set, as a text file, and none
of its code runs. `antibodies` takes only those that AntiBERTy cannot have seen.

Not here: training.
"""

import csv
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
# Not this folder: there, `import antiberty` would find this file instead of the package.
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from arms import Constant, Permuted  # noqa: E402
from data import rng  # noqa: E402
from launch import Refused, Size, progress, run  # noqa: E402
from softmask import SoftMask  # noqa: E402

PIP = 'pip install "transformers<5" && pip install --no-deps antiberty==0.1.3 abnativ==2.0.9'
# antiberty 1.0 has no weights, and with transformers 5 those of 0.1.3 do not load.
VERSIONS = {"antiberty": "0.1.3", "abnativ": "2.0.9", "transformers": "4."}
RATES = (0.15, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
CELLS = "model/percentiles/test_vpaired_v2_abnativ_seq_scores.csv"


@dataclass
class Config:
    n: Size = 240           # antibodies: half of them to choose ω, the others for the table
    batch_size: Size = 20   # antibodies in one call
    seed: int = 0


def load():
    """(model, tokenizer) of AntiBERTy. Raises Refused without the versions that work."""
    for name, version in VERSIONS.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        if not found.startswith(version):
            raise Refused(f"needs {name} {version}, found {found}: {PIP}")
    from antiberty import AntiBERTyRunner
    runner = AntiBERTyRunner()
    return runner.model.cpu(), runner.tokenizer


def antibodies(n, seed):
    """n human antibodies, as strings: heavy and light chains in turn, each of another cell.

    AntiBERTy's weights were packed in April 2022. NCBI numbers its projects as they are registered:
    900,000 is later. Relatives of these chains were in its training data nevertheless: most of a
    chain is a germline gene, of which there are few.
    """
    cells = {}
    with open(Path(util.find_spec("abnativ").origin).parent / CELLS, encoding="utf-8") as f:
        for row in csv.DictReader(f):
            project = row["seq_id"].partition("PRJNA")[2].partition("|")[0]
            if project and int(project) >= 900_000:
                cells[row["input_seq_vh"]] = row["input_seq_vl"]  # of equal heavy chains, one stays
    if n > len(cells):
        raise Refused(f"--n={n}, but there are {len(cells)} such antibodies: give at most so many")
    cells = list(cells.items())
    chosen = torch.randperm(len(cells), generator=rng(seed, "cells"))[:n].tolist()
    return [cells[cell][i % 2] for i, cell in enumerate(chosen)]


def corrupt(text, rate, key):
    """Words of the text, a share `rate` of them (at least one) replaced by [MASK]."""
    words = list(text)
    order = torch.randperm(len(words), generator=rng(*key, "mask", rate)).tolist()
    for i in order[:max(1, round(rate * len(words)))]:
        words[i] = "[MASK]"
    return " ".join(words)


def predict(model, emb, valid, masked):
    """Logits of the masked residues (N, V), row-major, of the amino acids alone.

    emb: (B, L, D).   valid: (B, L), 0 at padding.   masked: (B, L) bool.
    The package's own forward needs token ids. These are its two parts.
    """
    h = model.bert(inputs_embeds=emb, attention_mask=valid).last_hidden_state      # (B, L, D)
    logits = model.cls.predictions(h[masked])                                      # (N, V)
    logits[:, :5] = -torch.inf  # [PAD] to [MASK], as the package itself does
    return logits


@torch.no_grad()
def measure(model, tokenizer, texts, rates, keys, sms):
    """What is known of each text, with a plain mask and with each soft mask.

    texts: [str] of one batch.   rates: [share of masks], one for each.   keys: [what draws a mask].
    Returns (1 + len(sms), B, 3) float64: NLL in nats per masked residue, share of them that is
    right, mean λ. Plain masks come first.
    """
    words = [" ".join(text) for text in texts]
    x0 = tokenizer(words, padding=True, return_tensors="pt")["input_ids"]          # (B, L)
    words = [corrupt(*of) for of in zip(texts, rates, keys)]
    read = tokenizer(words, padding=True, return_tensors="pt")
    xt, valid = read["input_ids"], read["attention_mask"]                          # (B, L) each
    masked = xt == tokenizer.mask_token_id                                         # (B, L)
    table = model.get_input_embeddings().weight                                    # (V, D)
    first = predict(model, F.embedding(xt, table), valid, masked)                  # (N, V)
    passes = [(first, torch.zeros(len(first)))]
    for sm in sms:
        emb = sm.embed(table, xt, first)                                           # (B, L, D)
        passes.append((predict(model, emb, valid, masked), sm(first)[0]))
    row = masked.nonzero()[:, 0]                                                   # (N,)
    means = torch.zeros(len(passes), len(texts), 3, dtype=torch.float64)
    for mean, (logits, lam) in zip(means, passes):
        nll = F.cross_entropy(logits, x0[masked], reduction="none")                # (N,)
        right = logits.argmax(-1) == x0[masked]                                    # (N,)
        mean.index_add_(0, row, torch.stack((nll, right, lam), 1).double())
    return means / masked.sum(1)[:, None]


def candidates(mask_id):
    """{name: soft mask}: constant λ, and the gate with the paper's ω_b and with two lower ones."""
    lams = 0.1, 0.2, 0.4, 0.6
    sms = {f"constant λ {lam}": Constant(mask_id, omega_s=lam) for lam in lams}
    for omega_b in -0.75, -1.5, -2.25:
        for omega_s in 0.25, 0.5, 0.75:
            sm = SoftMask(mask_id, omega_s=omega_s, omega_b=omega_b)
            sms[f"ω_s {omega_s}, ω_b {omega_b}"] = sm
    return sms


def placebo(sm):
    """The same ω, and each mask gets the feedback of another."""
    class Placebo(Permuted, type(sm)):
        pass
    omega_s, omega_a, omega_b = (w.item() for w in sm.omega)
    return Placebo(sm.mask_id, sm.k, omega_s, omega_a=omega_a, omega_b=omega_b)


def change(soft, plain):
    """Mean ± standard error of the difference, paired by antibody. soft, plain: (n,)"""
    d = soft - plain
    return f"{d.mean():+.4f} ± {d.std() / len(d) ** 0.5:.4f}"


def main(cfg):
    if cfg.n < 4:
        raise Refused(f"--n={cfg.n} is too few for two halves with errors: give 4 at least")
    model, tokenizer = load()
    texts, sms = antibodies(cfg.n, cfg.seed), candidates(tokenizer.mask_token_id)
    halves = [list(range(half, cfg.n, 4)) + list(range(half + 1, cfg.n, 4)) for half in (0, 2)]
    passes = len(halves[0]) * (1 + len(sms)) + 3 * len(RATES) * len(halves[1])
    with progress(total=passes, unit="pass") as bar:

        def over(half, rate, sms):
            parts = []
            for i in range(0, len(half), cfg.batch_size):
                batch = half[i:i + cfg.batch_size]
                rates = [rate or RATES[j // 4 % len(RATES)] for j in batch]
                keys = [(cfg.seed, j) for j in batch]
                parts.append(measure(model, tokenizer, [texts[j] for j in batch], rates, keys, sms))
                bar.update(len(batch) * (1 + len(sms)))
            return torch.cat(parts, 1)                                   # (1 + sms, n/2, 3)

        # Each antibody at one of the rates, in turn: a scan over all would take too long.
        scan = over(halves[0], None, sms.values())
        best = scan[1:, :, 0].mean(1).argmin().item()
        name, sm = list(sms.items())[best]
        rows = [over(halves[1], rate, [sm, placebo(sm)]) for rate in RATES]
    print(f"Scan over {len(halves[0])} antibodies, all rates (change of NLL, mean λ):")
    for other, soft in zip(sms, scan[1:]):
        print(f"    {other}: {change(soft[:, 0], scan[0][:, 0])}, λ {soft[:, 2].mean():.3f}")
    print(f"\nChosen: {name}. The other {len(halves[1])} antibodies:\n")
    print("| masks | NLL, plain | SM | permuted | right, plain | SM | permuted | mean λ |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rate, (plain, soft, other) in zip(RATES, rows):
        cells = [f"{rate:.0%}"]
        for i in 0, 1:
            cells += [f"{plain[:, i].mean():.3f}", *(change(o[:, i], plain[:, i])
                                                     for o in (soft, other))]
        print("|", " | ".join([*cells, f"{soft[:, 2].mean():.3f}"]), "|")


if __name__ == "__main__":
    run(main, Config)
