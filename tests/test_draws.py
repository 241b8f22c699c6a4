"""Every random draw of the program: what its key says. What training does with its draws is in
test_train.py and test_finetune.py, against oracles that draw by themselves.

A draw depends on the words of its key alone, not on the world size (see the tests of two ranks) or
the device, except for dropout. Some draws take the plain seed: the weights of a new MDLM, the
corpora of the hub, the clusters of MAUVE. All seeds here differ from the defaults.
"""

import re
from itertools import product, repeat
from pathlib import Path

import pytest
import torch

import data
import eval_samples
import feedback
import oracles
import sample
import sample_dream
import sudoku
import tiny_dream
import train
from conftest import ROOT, random_mdlm, save_mdlm, start
from dream import read_safetensors
from mdlm import MDLM, TwoPass
from sample import Pick, decode, generate, shares_of
from sample_dream import Decoding
from softmask import SoftMask

# The keys of all draws. These words stand for values, all others for themselves:
#   seed   of the run; for held-out rows 1, or --seed of eval.py.   r: a repeat
#   step   0 for the first update.   epoch: 0 for the first pass over all rows or dialogues
#   i, j   i: a row, dialogue, sample or puzzle.   j: a micro-batch or dialogue of an update
TABLE = {
    "train": "seed, p_sm, step; seed, t, step; seed, q, step, j; seed, dropout, step, j; "
             "order, epoch, seed",
    "held-out rows": "times, seed; deal, seed; masks, seed, r, i",
    "Dream": "order, held out, seed; seed, adapter; order, epoch, seed; seed, n_end, step, j; "
             "seed, t, step, j; seed, q, step, j; seed, val n_end, i; seed, val q, i; "
             "seed, p_sm, step",
    "Dream, coin=dialogue": "seed, p_sm, step, j",
    "an answer of Dream": "seed, prompt",  # its ids
    "a sample": "sample, seed, i",
    "references for MAUVE": "reference, seed",
    "spans": "spans, seed",                # masked by lab/feedback.py
    "grids": "sudoku, train; sudoku, val",
    "puzzles": "sudoku, val; puzzle, i",
    "tiny Dream": "tiny, name",            # of a weight
}


def keys(*draws, **values):
    """All keys of these draws.   values: what a word can stand for."""
    rows = [key.split(", ") for draw in draws for key in TABLE[draw].split("; ")]
    return {repr(key) for row in rows for key in product(*(values.get(w, [w]) for w in row))}


@pytest.fixture
def drawn(monkeypatch):
    """The keys of a run"""
    found, whole = set(), data.seed_of
    monkeypatch.setattr(data, "seed_of", lambda *key: found.add(repr(key)) or whole(*key))
    data.order.cache_clear()
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Its folder, and its held-out rows"""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["".join(f"{i}·{i * i * factor}, " for i in range(30)) for factor in (3, 7)]
    data.prepare(enumerate(texts), str(folder), data.tokenizer("bytes"), val_docs=1)
    val, _ = data.open_split(folder, "val")
    return str(folder), data.rows(val, range(data.n_rows(val, 22)), 22)


def test_the_table_has_every_draw():
    words = set(re.split("[;,] ", "; ".join(TABLE.values())))
    labs = [Path(ROOT, "lab", f"{name}.py") for name in ("eval_samples", "feedback", "trajectory")]
    for path in *Path(ROOT).glob("*.py"), *labs:
        for key in re.findall(r"\b(?:rng|seed_of|data\.order)\(([^()]*)", path.read_text("utf-8")):
            assert words.issuperset(re.findall('"(.*?)"', key)), (path, key)


def test_training(corpus, tmp_path, drawn):
    """Three updates of 12 rows, 2 at a time, over three epochs"""
    train.train(train.Config(
        data=corpus[0], out_dir=str(tmp_path), device="cpu", n_layer=1, n_head=2, n_embd=16,
        n_cond=8, length=22, dropout=0.2, seed=5, steps=3, batch_size=12, micro_batch=2,
        eval_every=3, eval_rows=9))
    assert drawn == (keys("train", seed=[5], step=range(3), j=range(6), epoch=range(3))
                     | keys("held-out rows", seed=[1], r=[0], i=range(9)))


@pytest.mark.parametrize("words, own", [
    ("--steps=9 --sampler=remdm-loop --top_p=0.5",
     lambda model, x, g: generate(model, x, 9, "remdm-loop", 0.5, g)),
    ("--soft=False --prompt=ab", lambda model, x, g: generate(
        TwoPass(model.net, None, 258), x, 22, "mdlm", 0.9, g)),
    ("--sampler=topk_margin --steps=4 --top_p=0.5 --prompt=ab", lambda model, x, g: decode(
        model, x[None], shares_of(4 * [1]), Pick("topk_margin", 1, 0.5, generator=g))[0]),
    ("--sampler=random --temperature=0.7 --threshold=0.1 --omega_s=0.9 --omega_a=1.5 --omega_b=-2",
     lambda model, x, g: decode(TwoPass(model.net, SoftMask(258, 3, 0.9, 1.5, -2.0), 258),
                                x[None], repeat(1), Pick("random", 0.7, 0.9, 0.1, g))[0])])
def test_samples(tmp_path, drawn, words, own):
    """Of the average of the weights, as the flags say"""
    path, out, prompt = tmp_path / "last.pt", tmp_path / "s.jsonl", words.partition("prompt=")[2]
    model, average = (random_mdlm(seed=seed, vocab_size=259, mask_id=258, length=22, omega_s=0.7,
                                  omega_a=1.0, omega_b=-5.0) for seed in (0, 3))
    save_mdlm(path, model, ema=average.net.state_dict())
    start("sample", *words.split(), "--count=5", "--seed=5", "--device=cpu",
          f"--checkpoint={path}", f"--out={out}")
    assert drawn == keys("a sample", seed=[5], i=range(5))
    x = torch.full((22,), 258)
    x[:3] = torch.tensor([256, 97, 98] if prompt else [258] * 3)
    expected = [own(average, x, oracles.rng("sample", 5, i)).tolist() for i in range(5)]
    assert [line["ids"] for line in sample.read_samples(str(out))] == expected


@pytest.mark.parametrize("blocks", [{}, dict(block=4, cache="dual", threshold=0.4)])
def test_cuda_or_cpu_answers_in_bf16_and_as_asked(tiny, drawn, blocks):
    cfg = Decoding(tiny[0], gen_len=8, steps=6, algorithm="topk_margin", seed=5, temperature=0.7,
                   top_p=0.6, dtype="bfloat16", omega_s=0.4, omega_a=6.0, omega_b=-0.75,
                   schedule="stepwise", switch=0.3, **blocks)
    dream, tok, sm = sample_dream.load_for_decoding(cfg)
    assert sm.raw_s.device == dream.table.device and dream.table.dtype == torch.bfloat16
    text, stats = sample_dream.answer(dream, tok, sm, [1, 2], cfg)
    assert drawn == keys("an answer of Dream", seed=[5], prompt=[[1, 2]])
    two, x = TwoPass(dream, sm, 261), torch.tensor([[1, 2, *8 * [261]]])
    pick = Pick("topk_margin", 0.7, 0.6, cfg.threshold, oracles.rng(5, [1, 2]))
    gain = lambda left: float(left > 0.3)
    if blocks:
        x = sample_dream.decode_blocks(two, x, 4 * [1], 4, "dual", pick, gain)
    else:
        x = decode(two, x, sample_dream.reveal_shares(6), pick, gain)
    new = x[0, 2:].tolist()
    assert (text, stats["tokens"]) == (tok.decode(new[:[*new, 256].index(256)]), 8)


def test_references(corpus, drawn):
    folder, val = corpus
    shuffled = val[torch.randperm(len(val), generator=oracles.rng("reference", 5))].tolist()
    half, decoded = len(val) // 2, data.tokenizer("bytes").decode
    for n, rows, expected in ((half, 3, shuffled[:half]), (None, 3, shuffled[-3:]),
                              (None, 0, shuffled[-half:]), (None, 99, shuffled[-half:])):
        cfg = eval_samples.Config(data=folder, seed=5, rows=rows)
        found, _ = eval_samples.held_out_samples(cfg, 22, n)  # without n, the row "Data"
        assert [(row["ids"], row["text"]) for row in found] == [(r, decoded(r)) for r in expected]
    assert drawn == keys("references for MAUVE", seed=[5])


def test_spans(drawn):
    masked = feedback.spans(50, 22, 6, seed=5)
    first = torch.randint(1, 16, (50, 1), generator=oracles.rng("spans", 5))
    assert drawn == keys("spans", seed=[5])
    assert [row.nonzero()[:, 0].tolist() for row in masked] == [
        list(range(i, i + 6)) for i in first[:, 0].tolist()]


def test_the_examples(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(sudoku, "HELD_OUT", 3)
    sudoku.prepare(sudoku.Data(str(tmp_path), grids=5))
    tiny_dream.make(str(tmp_path), str(tmp_path / "dialogues.jsonl"))
    weights = read_safetensors(tmp_path / "model.safetensors")
    assert drawn == keys("grids", "tiny Dream", name=weights)
    drawn.clear()
    sudoku.demonstrate(MDLM.load(sudoku.SHIPPED), 2)
    assert drawn == keys("puzzles", i=range(2))
