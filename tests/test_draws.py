"""Every random draw of the program: what its key says. What training does with its draws is in
test_train.py and test_finetune.py, against oracles that draw by themselves.

A draw depends on the words of its key alone. No key has the world size or the device: a rank takes
every world-th j or i. Batch size matters in training alone, because step and j count in batches.

Only dropout is drawn on the device, so there a GPU and a CPU differ. Some draws take the plain
seed: the weights of a new MDLM, the corpora of the hub, the clusters of MAUVE. Not here: what is
tried out in lab/. All seeds here differ from the defaults.
"""

import re
from dataclasses import replace
from itertools import product, repeat
from pathlib import Path

import pytest
import torch

import data
import eval_samples
import finetune_dream
import launch
import oracles
import sample
import sample_dream
import sudoku
import tiny_dream
import train
from conftest import ROOT, random_mdlm, save_mdlm, spy, start
from dream import read_safetensors
from mdlm import MDLM, TwoPass
from sample_dream import Decoding

# The key of each draw. These words stand for values, all others for themselves:
#   seed   of the run; for held-out rows 1, or --seed of eval.py.   r: a repeat
#   step   0 for the first update.   epoch: 0 for the first pass over all rows or dialogues
#   i, j   i: a row, dialogue, sample or puzzle.   j: a micro-batch or dialogue of an update
TABLE = {
    "train: coin":                "seed, p_sm, step",
    "train: times":               "seed, t, step",
    "train: masks":               "seed, q, step, j",
    "train: dropout":             "seed, dropout, step, j",
    "train: order of rows":       "order, epoch, seed",
    "held-out rows: times":       "times, seed",
    "held-out rows: whose":       "deal, seed",
    "held-out rows: masks":       "masks, seed, r, i",
    "Dream: held-out split":      "order, held out, seed",
    "Dream: DoRA's start":        "seed, adapter",
    "Dream: order of dialogues":  "order, epoch, seed",
    "Dream: end tokens":          "seed, n_end, step, j",
    "Dream: times":               "seed, t, step, j",
    "Dream: masks":               "seed, q, step, j",
    "Dream: held-out end tokens": "seed, val n_end, i",  # its held-out times are a grid
    "Dream: held-out masks":      "seed, val q, i",
    "coin=update":                "seed, p_sm, step",
    "coin=dialogue":              "seed, p_sm, step, j",
    "an answer of Dream":         "seed, prompt",        # its ids
    "a sample":                   "sample, seed, i",
    "references for MAUVE":       "reference, seed",
    "grids to train on":          "sudoku, train",
    "grids held out":             "sudoku, val",
    "puzzle: which are given":    "puzzle, i",
    "tiny Dream":                 "tiny, name",          # of a weight
}


def keys(*draws, **values):
    """All keys of the rows that begin with these words.   values: what a word can stand for."""
    rows = [key.split(", ") for draw, key in TABLE.items() if draw.startswith(draws)]
    return {repr(key) for row in rows for key in product(*(values.get(w, [w]) for w in row))}


@pytest.fixture
def drawn(monkeypatch):
    """The keys of a run"""
    found, whole = set(), data.seed_of
    monkeypatch.setattr(data, "seed_of", lambda *key: found.add(repr(key)) or whole(*key))
    data.order.cache_clear()
    return found


@pytest.fixture
def ranks(monkeypatch):
    """Lets this process be one rank after the other, which hears nothing of the others."""
    monkeypatch.setattr(launch, "DistributedDataParallel", lambda model, **_: model)
    for name in "init_process_group", "barrier", "destroy_process_group":
        monkeypatch.setattr(torch.distributed, name, lambda *_: None)

    def ranks(world):
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world))
            yield rank
    return ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Its folder, and its held-out rows"""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["".join(f"{i}·{i * i * factor}, " for i in range(30)) for factor in (3, 7)]
    data.prepare(enumerate(texts), str(folder), data.tokenizer("bytes"), val_docs=1)
    val, _ = data.open_split(folder, "val")
    return str(folder), data.rows(val, range(data.n_rows(val, 22)), 22)


def test_the_table_has_every_draw():
    words = {word for key in TABLE.values() for word in key.split(", ")}
    for path in *Path(ROOT).glob("*.py"), Path(ROOT, "lab", "eval_samples.py"):
        for key in re.findall(r"\b(?:rng|seed_of|data\.order)\(([^()]*)", path.read_text("utf-8")):
            assert words.issuperset(re.findall('"(.*?)"', key)), (path, key)


def test_training(corpus, tmp_path, drawn, ranks):
    """Three updates of 12 rows, 2 at a time, over three epochs, by two ranks"""
    cfg = train.Config(data=corpus[0], device="cpu", n_layer=1, n_head=2, n_embd=16, n_cond=8,
                       length=22, dropout=0.2, seed=5, steps=3, batch_size=12, micro_batch=2,
                       eval_every=3, eval_rows=9)
    for rank in ranks(2):
        train.train(replace(cfg, out_dir=str(tmp_path / str(rank))))
    assert drawn == (keys("train", seed=[5], step=range(3), j=range(6), epoch=range(3))
                     | keys("held-out rows", seed=[1], r=[0], i=range(9)))


@pytest.mark.parametrize("coin", ["dialogue", "update"])
def test_finetuning(tiny, tmp_path, drawn, ranks, coin):
    """Three updates of 8 over three epochs of 9 dialogues, three of 120 being held out."""
    cfg = finetune_dream.Config(model=tiny[0], data=tiny[1], n_val=3, n_train=9, seed=5, steps=3,
                                coin=coin, eval_every=3, device="cpu")
    for rank in ranks(2):
        finetune_dream.finetune(replace(cfg, out=str(tmp_path / str(rank))))
    assert drawn == keys("Dream", f"coin={coin}", seed=[5], step=range(3), j=range(8),
                         epoch=range(3), i=range(3))


without = lambda model: TwoPass(model.net, None, model.mask_id)


@pytest.mark.parametrize("words, decode", [
    ("--steps=9 --sampler=remdm-loop --top_p=0.5",
     lambda model, x, g: sample.generate(model, x, 9, "remdm-loop", 0.5, g)),
    ("--soft=False --prompt=ab",
     lambda model, x, g: sample.generate(without(model), x, 22, "mdlm", 0.9, g)),
    ("--sampler=margin --top_p=0.5 --prompt=ab", lambda model, x, g: sample.decode(
        model, x[None], sample.shares_of(19 * [1]), sample.Pick("margin", 1, 0.5, generator=g))[0]),
    ("--sampler=random --temperature=0.7 --threshold=0.1", lambda model, x, g: sample.decode(
        model, x[None], repeat(1), sample.Pick("random", 0.7, 0.9, 0.1, g))[0])])
def test_samples(tmp_path, drawn, ranks, words, decode):
    """Of the average of the weights, as the flags say, each by one rank"""
    path, x = str(tmp_path / "last.pt"), torch.full((22,), 258)
    model, average = (random_mdlm(seed=seed, vocab_size=259, mask_id=258, length=22, omega_s=0.7,
                                  omega_a=1.0, omega_b=-5.0) for seed in (0, 3))
    save_mdlm(path, model, ema=average.net.state_dict())
    words = f"{words} --count=5 --seed=5 --device=cpu --checkpoint={path} --out={tmp_path}/s.jsonl"
    if "--prompt=ab" in words:
        x[:3] = torch.tensor([256, 97, 98])
    for _ in ranks(2):
        start("sample", *words.split())
    assert drawn == keys("a sample", seed=[5], i=range(5))
    lines = sample.read_samples(f"{tmp_path}/s.jsonl")
    assert {line["index"]: line["ids"] for line in lines} == {
        i: decode(average, x, oracles.rng("sample", 5, i)).tolist() for i in range(5)}
    assert len(lines) == 5


@pytest.mark.parametrize("blocks", [{}, dict(block=4, cache="dual", threshold=0.4)])
def test_cuda_or_cpu_answers_in_bf16_and_as_asked(tiny, drawn, blocks):
    cfg = Decoding(tiny[0], gen_len=8, steps=6, algorithm="topk_margin", seed=5, temperature=0.7,
                   top_p=0.6, dtype="bfloat16", omega_s=0.4, omega_a=6.0, omega_b=-0.75,
                   schedule="stepwise", switch=0.3, **blocks)
    dream, tok, sm = sample_dream.load_for_decoding(cfg)
    assert sm.raw_s.device == dream.table.device and dream.table.dtype == torch.bfloat16
    text, stats = sample_dream.answer(dream, tok, sm, [1, 2], cfg)
    assert drawn == keys("an answer", seed=[5], prompt=[[1, 2]])
    two, x = TwoPass(dream, sm, 261), torch.tensor([[1, 2, *8 * [261]]])
    pick = sample.Pick("margin", 0.7, 0.6, cfg.threshold, oracles.rng(5, [1, 2]))
    gain = lambda left: float(left > 0.3)
    if blocks:
        x = sample_dream.decode_blocks(two, x, 8, 4 * [1], 4, "dual", pick, gain)
    else:
        x = sample.decode(two, x, sample_dream.reveal_shares(6), pick, gain)
    new = x[0, 2:].tolist()
    assert (text, stats["tokens"]) == (tok.decode(new[:[*new, 256].index(256)]), 8)


def test_references(corpus, drawn):
    folder, val = corpus
    shuffled = val[torch.randperm(len(val), generator=oracles.rng("reference", 5))].tolist()
    half, decode = len(val) // 2, data.tokenizer("bytes").decode
    for n, rows, expected in ((half, 3, shuffled[:half]), (None, 3, shuffled[-3:]),
                              (None, 0, shuffled[-half:]), (None, 99, shuffled[-half:])):
        cfg = eval_samples.Config(data=folder, seed=5, rows=rows)
        found, _ = eval_samples.held_out_samples(cfg, 22, n)  # without n, the row "Data"
        assert [(row["ids"], row["text"]) for row in found] == [(r, decode(r)) for r in expected]
    assert drawn == keys("references", seed=[5])


def test_grids_and_the_tiny_dream(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(sudoku, "HELD_OUT", 3)
    sudoku.prepare(sudoku.Data(str(tmp_path), grids=5))
    for split, n in ("train", 5), ("val", 3):
        texts = sudoku.texts(n, oracles.rng("sudoku", split))
        ids = data.open_split(tmp_path, split)[0].ids.tolist()
        assert ids == [i for text in texts for i in (*text.encode(), 257)]
    tiny_dream.make(str(tmp_path), str(tmp_path / "dialogues.jsonl"))
    weights = read_safetensors(tmp_path / "model.safetensors")
    assert drawn == keys("grids", "tiny Dream", name=weights)
    for name, w in weights.items():
        noise = torch.randn(w.shape, generator=oracles.rng("tiny", name)) * w.shape[-1] ** -0.5
        assert torch.equal(w, torch.ones(w.shape) if "norm" in name else noise)


def test_puzzles(drawn, monkeypatch):
    model, calls = MDLM.load(sudoku.SHIPPED), spy(monkeypatch, sudoku, "fill")
    sudoku.demonstrate(model, 2)
    assert len(calls) == 4 and all(x is calls[0][1] for _, x, _ in calls)
    assert drawn == keys("grids held out", "puzzle", i=range(2))
    _, x, _ = calls[0]
    for way, counts in sudoku.WAYS.items():
        ids = sample.decode(model, x, sample.shares_of(counts), sample.Pick())
        assert sudoku.fill(model, x, way)["with feedback"] == sudoku.cells_of(ids, 258)
