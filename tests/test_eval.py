# SPDX-License-Identifier: MIT
"""eval.py: how the bound is measured, the authors' scoring rule as a loop, files of results.

Not here: what the bound is (test_bound.py).
"""

import glob
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import conftest
import data
import eval as evaluation
import finetune_dream
import sudoku
from arms import Slerp
from conftest import Killed, gen, kill, refused
from eval import PRESETS, Config, bound, gen_ppl, mean_and_se, score_with_lm, val_ppl
from launch import from_cli, write_text
from mdlm import ALPHA_FLOOR, MDLM, ModelConfig

ROOT = Path(evaluation.__file__).parent
BYTES = data.tokenizer("bytes")
TINY = dict(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=259, mask_id=258, length=16,
            dropout=0.1)
GPT2 = {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257, "bos": 50256, "eos": 50256}


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    model = MDLM(ModelConfig(**{**TINY, **changes}))
    with torch.no_grad():
        for p in model.net.parameters():  # a fresh one predicts the same everywhere
            p.add_(0.3 * torch.randn(p.shape))
    return model


def rows_of(n, L=16, V=258, seed=0):
    return torch.randint(V, (n, L), generator=torch.Generator().manual_seed(seed))


class Spy(nn.Module):
    """Stands where MDLM does: remembers what it was asked, and finds (number of masks) / t."""

    def __init__(self, nll=None):
        super().__init__()
        self.p, self.cfg = nn.Parameter(torch.zeros(())), types.SimpleNamespace(mask_id=258)
        self.seen, self.nll = [], nll

    def forward(self, x0, xt, t, soft):
        for x, masked, s in zip(x0, xt, t):
            self.seen.append((tuple(x.tolist()), tuple(masked.tolist()), s.item()))
        return (xt == 258).sum(1) / t if self.nll is None else torch.full((len(t),), self.nll)


def test_bound_does_not_depend_on_batches_or_ranks():
    model, rows, how = model_of(omega_s=0.5), rows_of(21), dict(seed=5, repeats=2)
    whole, parts = (bound(model, rows, True, batch_size=size, **how) for size in (21, 4))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    assert model.training and not whole[0].requires_grad  # it is left as it was
    other = bound(model, rows, True, **how | {"seed": 6})
    assert not torch.equal(other[2], whole[2])  # other masks
    shards = [val_ppl(model, rows, True, batch_size=4, rank=rank, world=3, **how)
              for rank in range(3)]
    total, tokens = map(sum, zip(*shards))
    assert tokens == 21 * 16 and total == pytest.approx(whole[0].sum().item(), rel=1e-5)
    # more ranks than batches
    assert val_ppl(model, rows[:2], True, batch_size=2, rank=1, world=2) == (0.0, 0)


def test_measures_of_a_model_that_knows_nothing_or_is_broken():
    """Every mask costs log(V − 1), as [MASK] is never the answer."""
    nll, ce, masked = bound(MDLM(ModelConfig(**TINY)), rows_of(40), soft=True)
    torch.testing.assert_close(ce, masked * math.log(258), rtol=1e-6, atol=0)
    refused("not a number on 3 of 3 rows", val_ppl, Spy(nll=math.nan), rows_of(3), True)


def test_times_are_stratified_over_rows_and_within_each():
    spy, n, repeats = Spy(), 10, 4
    bound(spy, torch.arange(n)[:, None].expand(n, 16), True, repeats=repeats)
    u = [sorted((t - ALPHA_FLOOR) / (1 - ALPHA_FLOOR) for x, _, t in spy.seen if x[0] == i)
         for i in range(n)]
    assert all([int(t * repeats) for t in row] == list(range(repeats)) for row in u)
    assert sorted(int(t * n * repeats) for row in u for t in row) == list(range(n * repeats))
    first = [row[0] for row in u]
    assert first != sorted(first)  # a row's place in the text says nothing about its times


def test_standard_error_of_a_ratio():
    x = np.random.default_rng(0).normal(3, 1, 50)
    mean, se = mean_and_se(x * 7, np.full(50, 7))
    assert mean == pytest.approx(x.mean()) and se == pytest.approx(x.std(ddof=1) / 50**0.5)
    assert mean_and_se([2.0, 30.0], [1, 10])[0] == pytest.approx(32 / 11)
    assert math.isnan(mean_and_se([2.0], [1])[1])


def test_feedbacks_are_what_they_are_called():
    """None and own are the loss itself; of one text twice, permuted is own; truth shows x0."""
    model = model_of(omega_s=1 - 1e-6, omega_b=-9.0).eval()
    x0, t = rows_of(1).expand(3, -1), torch.tensor([0.2, 0.5, 1.0])
    xt = torch.where(rows_of(3, V=2, seed=1) == 0, 258, x0)
    terms = evaluation.bound_by_feedback(model, x0, xt, t, xt)
    with torch.no_grad():
        off, on = (model(x0, xt, t, soft).double() for soft in (False, True))
        masked = (xt == 258).flatten().nonzero()[:, 0]
        h = model.net.hidden(F.embedding(x0, model.net.table), masked, t)
        shown = model.cross_entropy(h, x0.flatten()[masked]).sum()
    assert torch.equal(terms[0], off) and torch.equal(terms[1], on)
    assert torch.equal(terms[2], on) and not torch.equal(on, off)
    torch.testing.assert_close((terms[3] * t).sum(), shown.double(), rtol=1e-4, atol=0)


def test_feedback_by_bins_of_t_adds_up_to_the_bound(world):
    found = {}
    for metric in "feedback", "ppl":
        evaluation.main(Config(metric, "f.json", checkpoint="last.pt", data="data", device="cpu",
                               repeats=2))
        found[metric] = json.loads(Path("f.json").read_text())["values"]
    values, ppl = found.values()
    whole = values.pop("all")
    assert [whole["none"], whole["own"]] == pytest.approx(
        [ppl[name]["unbiased_nats"] for name in ("binary", "soft")])
    for name in "own", "permuted", "truth_gain":
        mean = sum(row["draws"] * row[name] for row in values.values()) / whole["draws"]
        assert mean == pytest.approx(whole[name])
    assert all(float(name[:3]) <= row["t"] <= float(name[-3:]) for name, row in values.items())
    save("binary.pt", model_of(soft_mask=False))
    refused("give a model with soft masks, and two rows", evaluation.main,
            Config("feedback", checkpoint="binary.pt", data="data", device="cpu"))


def test_feedback_of_an_adapter_is_measured_on_responses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finetune_dream.finetune(from_cli(
        finetune_dream.Config, ["tiny", "--steps=1", "--device=cpu"], finetune_dream.PRESETS))
    asked, models = [], []

    def spy(model, x0, xt, t, other):
        asked.append((x0, xt))
        models.append(model)
        return torch.full((4, 1), 2.0 * x0.shape[1], dtype=torch.float64)
    monkeypatch.setattr(evaluation, "bound_by_feedback", spy)
    file = Path("out/tiny_dream/last/softmask.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"arm": "slerp"}))
    evaluation.main(Config("feedback", checkpoint="out/tiny_dream/last", rows=9, device="cpu"))
    assert isinstance(models[0].sm, Slerp)
    file = Path("out/tiny_dream/last.feedback.out-tiny_dream-dialogues-jsonl.rows-9.json")
    found = json.loads(file.read_text())["values"]
    assert found["all"]["draws"] == len(asked) == 9 and found["all"]["own"] > 2
    tok = finetune_dream.Tokenizer("out/tiny_dream/model")
    for x0, xt in asked:
        assert ((xt == x0) | (xt == 261)).all()
        before = tok.decode(x0[(xt == 261).cumsum(1) == 0].tolist())
        assert "<|im_start|>assistant\n" in before
    with open("out/tiny_dream/dialogues.jsonl", "a+") as f:  # with one more, others are held out
        f.write(next(iter(Path(f.name).open())))
    refused("dialogues.jsonl has changed since out/tiny_dream/last was trained", evaluation.main,
            Config("feedback", checkpoint="out/tiny_dream/last", device="cpu"))


def test_entropy_is_the_recorded_one():
    golden = json.loads((ROOT / "tests/golden/language_misc.json").read_text())["entropy"]
    found = [evaluation.entropy(ids) for ids in golden["tokens"]]
    assert found == pytest.approx(golden["nats"], abs=1e-6)
    assert evaluation.entropy(range(32)) == pytest.approx(math.log(32))


class Tok:
    """Letters a…z are ids 2…27, the end of a text is id 1."""
    eos_token, eos_token_id = "$", 1

    def __call__(self, text, truncation, max_length):
        assert truncation and max_length == 1024
        ids = [1 if c == "$" else ord(c) - 95 for c in text]
        return types.SimpleNamespace(input_ids=ids[:max_length])


class LM(nn.Module):
    """A causal model that is easy to follow: a running mean of embeddings, then a linear layer."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(2 * torch.randn(28, 5, generator=g))
        self.out = nn.Parameter(2 * torch.randn(5, 28, generator=g))
        self.batches, self.config = [], types.SimpleNamespace()

    def forward(self, input_ids, attention_mask, output_hidden_states):
        assert output_hidden_states
        self.batches.append(input_ids.shape)
        h = self.table[input_ids].cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return types.SimpleNamespace(logits=h @ self.out, hidden_states=(None, h))


@pytest.fixture
def lm(monkeypatch):
    lm, loaded = LM(), []
    auto = lambda thing: types.SimpleNamespace(
        from_pretrained=lambda name: loaded.append(name) or thing)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(
        AutoTokenizer=auto(Tok()), AutoModelForCausalLM=auto(lm)))
    lm.loaded = loaded
    return lm


TEXTS = ["hello", "$world$again$", "a$b$c", "zz", "q" * 40]


def slow(lm, text):
    """The authors' rule in a loop: all tokens but the first, of the EOS only the first one."""
    ids, nats, n = Tok()(text, True, 1024).input_ids, 0.0, 0
    with torch.no_grad():
        for i in range(1, len(ids)):
            if ids[i] == 1 and 1 in ids[:i]:
                continue
            mean = lm.table[ids[:i]].double().mean(0)
            nats -= F.log_softmax(mean @ lm.out.double(), 0)[ids[i]].item()
            n += 1
        return nats, n, lm.table[ids].mean(0)


def test_scores_follow_the_rule_token_by_token(lm):
    nats, n, features = zip(*(slow(lm, text) for text in TEXTS))
    assert n == (4, 10, 3, 1, 39)
    for batch_size in 1, 2, 5:
        scores = score_with_lm(TEXTS, "some-lm", batch_size=batch_size)
        assert [s["nll"] for s in scores] == pytest.approx(nats, rel=1e-5)
        assert tuple(s["tokens"] for s in scores) == n
        for s, feature in zip(scores, features):
            np.testing.assert_allclose(s["feature"], feature, rtol=1e-5)
    assert gen_ppl(TEXTS)[0] == pytest.approx(math.exp(sum(nats) / sum(n)), rel=1e-5)
    assert score_with_lm(["x" * 3000])[0]["tokens"] == 1023
    ours, gpt2, own = score_with_lm(["<|bos|>ab<|eos|>", "<|endoftext|>ab<|endoftext|>", "$ab$"])
    assert ours["nll"] == gpt2["nll"] == own["nll"]  # our ends of a document become the scorer's


def test_scores_are_exact_for_a_large_vocabulary(lm):
    """With V in the middle of the logits, the CPU's log-softmax is off by 4e-5 nats a token."""
    lm.out = nn.Parameter(torch.randn(5, 50_000, generator=torch.Generator().manual_seed(1)))
    for text, s in zip(TEXTS, score_with_lm(TEXTS)):
        assert s["nll"] == pytest.approx(slow(lm, text)[0], abs=1e-5 * s["tokens"])


def test_scoring_goes_on_where_it_was_stopped(lm, tmp_path):
    whole, cache = score_with_lm(TEXTS, batch_size=1), tmp_path / "scores.jsonl"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        conftest.spy(patch, lm, "forward", 4, kill)
        score_with_lm(TEXTS, cache=cache, batch_size=1)
    assert len(cache.read_text().splitlines()) == 3
    with open(cache, "a") as f:
        f.write('{"key": "cut in the mid')  # as a kill leaves it
    lm.batches.clear()
    again = score_with_lm(TEXTS, cache=cache, batch_size=1)
    assert len(lm.batches) == 2 and [s["nll"] for s in again] == [s["nll"] for s in whole]
    lm.loaded.clear()
    feature = score_with_lm(TEXTS, cache=cache)[1]["feature"]
    np.testing.assert_array_equal(feature, whole[1]["feature"])
    assert lm.loaded == []                          # nothing left to do: the model is not loaded
    score_with_lm(TEXTS[:1], "another", cache=cache)
    assert lm.loaded == ["another", "another"]      # another scorer, another score
    (tmp_path / "lm").mkdir()
    for weights in "old", "newer":                  # a folder with other weights is another scorer
        (tmp_path / "lm" / "model.safetensors").write_text(weights)
        score_with_lm(TEXTS[:1], str(tmp_path / "lm"), cache=cache)
    assert lm.loaded[2:] == 4 * [str(tmp_path / "lm")]
    cache.write_text("something else\n")
    refused("something else than scores", score_with_lm, TEXTS, cache=cache)


def test_scores_equal_the_loss_of_transformers(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: would compare with its own loss and features")
    from tokenizers import Tokenizer, models, pre_tokenizers
    torch.manual_seed(0)
    size = dict(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    lm = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    lm.save_pretrained(tmp_path)
    vocab = {"<|endoftext|>": 0} | {chr(i): i for i in range(32, 127)}
    tok = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|endoftext|>")
    tok.save_pretrained(tmp_path)
    texts = ["It was a dark night.", "and stormy", "<|endoftext|>so", "x" * 50]
    for text, s in zip(texts, score_with_lm(texts, str(tmp_path), batch_size=3)):
        ids = torch.tensor([tok(text).input_ids])
        with torch.no_grad():
            out = lm.eval()(ids, labels=ids, output_hidden_states=True)
        assert s["nll"] / s["tokens"] == pytest.approx(out.loss.item(), abs=1e-5)
        last = out.hidden_states[-1][0, -1]
        np.testing.assert_allclose(s["feature"], last, rtol=1e-4, atol=1e-5)


@pytest.fixture
def mauve(monkeypatch):
    """{argument: value} of the last call of MAUVE."""
    got = {}
    compute = lambda **how: got.update(how) or types.SimpleNamespace(mauve=0.25)
    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=compute))
    return got


SETTINGS = {"checkpoint": "last.pt", "step": 9, "sampler": "mdlm", "steps": 4, "top_p": 0.9,
            "soft": True, "tokenizer": "bytes"}


def samples_file(path, n=4, start=0, **changes):
    texts = {i: "abcdefgh"[i:i + 6] for i in range(start, start + n)}
    lines = [{"ids": list(text.encode()), "text": text, "nfe": 3 + i, "seed": 1, "index": i,
              "settings": SETTINGS | changes} for i, text in texts.items()]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def save(path, net, **changes):
    saved = dict(kind="mdlm", config=vars(net.cfg), model=net.state_dict(), step=9, seed=1,
                 tokenizer=data.describe(BYTES))
    checkpoint.save(path, **saved | changes)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with data, a checkpoint trained on it, and samples."""
    monkeypatch.chdir(tmp_path)
    texts = (" ".join(str(i * j * j) for j in range(9, 25)) for i in range(20))
    data.prepare(texts, "data", BYTES, val_docs=9)
    model = model_of(omega_s=0.5)
    ema = {k: v + 0.01 for k, v in model.state_dict().items() if k.startswith("net.")}
    save("last.pt", model, ema=ema)
    samples_file("samples.jsonl")
    return tmp_path


def main(*argv):
    evaluation.main(from_cli(Config, argv, PRESETS))


def result(*argv):
    """What a command writes to its result file."""
    main(*argv, "--out=r.json")
    return json.loads(Path("r.json").read_text())


def test_ppl_of_a_checkpoint(world):
    """EMA is the default, and the rows are spread over the text."""
    ppl = "ppl", "--checkpoint=last.pt", "--data=data", "--repeats=2"
    main(*ppl, "--rows=5", "--label=tiny")
    found = json.loads(Path("last.pt.ppl.data.rows-5.repeats-2.json").read_text())
    tokens, meta = data.open_split("data", "val")
    text = meta["val"]
    n = data.n_rows(tokens, 16)
    rows = data.rows(tokens, [i * n // 5 for i in range(5)], 16)
    for name in "soft", "binary":
        got = found["values"][name]
        nll, count = val_ppl(MDLM.load("last.pt"), rows, name == "soft", seed=1, repeats=2)
        assert got["nats_per_token"] == pytest.approx(nll / count, rel=1e-5)
        assert got["ppl"] == pytest.approx(math.exp(nll / count), rel=1e-5)
        # L positions are paid for, and L − 2 of them carry text
        expected = nll / count / math.log(2) * 16 / 14 / (text["bytes"] / text["tokens"])
        assert got["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    soft, binary, gain = (found["values"][k]["nats_per_token"] for k in ("soft", "binary", "gain"))
    assert gain == pytest.approx(binary - soft, abs=1e-9)
    assert found["settings"] == {"step": 9, "L": 16, "tokenizer": "bytes", "n": 5,
                                 "text": text, "dtype": "float32", "training": {}}
    assert found["evaluation"]["seed"] == 1 and {"python", "torch", "git"} <= set(found["versions"])
    for other in "--ema=False", "--seed=2":
        assert result(*ppl, "--rows=5", other)["values"] != found["values"]
    assert result(*ppl)["settings"]["n"] == n
    write_text("a/v1.2/other.txt", "some other text\n" * 30)
    main("zero_shot", "--checkpoint=last.pt", "--text=./a/v1.2/other.txt")
    zero_shot = json.loads(Path("last.pt.zero_shot.a-v1-2-other-txt.json").read_text())["settings"]
    assert zero_shot["n"] == (16 * 30 + 1) // 14 and zero_shot["text"]["bytes"] == 480


def test_two_checkpoints_are_compared_on_the_same_masks(world):
    """The difference is that of the two results apart, and surer than they are."""
    weights = MDLM.load("last.pt").net.state_dict()
    binary = model_of(soft_mask=False)
    save("binary.pt", binary, model={f"net.{k}": v + 0.02 for k, v in weights.items()})
    ppl = "ppl", "--data=data"
    soft = result(*ppl, "--checkpoint=last.pt", "--against=binary.pt")["values"]
    hard = result(*ppl, "--checkpoint=binary.pt", "--against=last.pt")["values"]
    assert set(hard) == {"binary", "below_against"}
    apart = hard["binary"]["nats_per_token"] - soft["soft"]["nats_per_token"]
    for values, name, sign in (soft, "soft", 1), (hard, "binary", -1):
        below = values["below_against"]
        assert below["nats_per_token"] == pytest.approx(sign * apart, abs=1e-9) and apart != 0
        assert 0 < below["nats_per_token_se"] < values[name]["nats_per_token_se"]
    main(*ppl, "--checkpoint=last.pt", "--against=binary.pt")
    assert glob.glob("last.pt.ppl*") == ["last.pt.ppl.data.below-binary-pt.json"]
    save("gpt2.pt", binary, tokenizer=data.describe(BYTES) | {"name": "gpt2"})
    refused("--against=gpt2.pt has tokens of .*gpt2.* be compared", main, *ppl,
            "--checkpoint=last.pt", "--against=gpt2.pt")


def test_gen_ppl_and_mauve_share_their_scores(world, lm, mauve):
    main("gen_ppl", "--samples=samples.jsonl", "--scorer=x")
    found = json.loads(Path("samples.gen_ppl.x.json").read_text())
    texts = ["abcdef", "bcdefg", "cdefgh", "defgh"]
    assert found["values"].items() >= {
        "gen_ppl": pytest.approx(gen_ppl(texts, "x")[0]), "nfe": 4.5,
        "entropy": pytest.approx(np.mean([math.log(len(text)) for text in texts])),
        "entropy_min": pytest.approx(math.log(5))}.items()
    assert found["settings"].items() >= (SETTINGS | {"n": 4, "seeds": [1]}).items()
    data.prepare(["abcdefghij" * 9] * 9, "letters", BYTES, val_docs=3)
    lm.batches.clear()
    values = result("mauve", "--samples=samples.jsonl", "--scorer=x", "--data=letters",
                    "--scale=3", "--seed=7")["values"]
    assert {"mauve": 0.25, "references": 4, "nfe": 4.5}.items() <= values.items()
    assert sum(shape[0] for shape in lm.batches) <= 4  # the references alone
    assert (mauve["mauve_scaling_factor"], mauve["seed"]) == (3, 7)
    assert mauve["p_features"].shape == mauve["q_features"].shape == (4, 5)


def test_held_out_rows_stand_where_samples_do(world, lm, mauve):
    """The row "Data": rows of --length, half of all at most, and none of them is a reference."""
    data.prepare(["".join(c * 5 for c in "abcdefghijklmn")] * 3, "letters", BYTES,
                 val_docs=1)
    tokens = data.open_split("letters", "val")[0]
    held_out = [row.tolist() for row in data.rows(tokens, range(14), 7)]
    assert len({*map(tuple, held_out)}) == 14 == data.n_rows(tokens, 7)
    flags = "--samples=", "--data=letters", "--length=7", "--scorer=x"
    found = result("gen_ppl", *flags, "--rows=4")
    assert found["settings"] == {"sampler": "data", "checkpoint": "letters", "tokenizer": "bytes",
                                 "L": 7, "n": 4, "seeds": [1]}
    rows = evaluation.held_out_samples(Config(data="letters", rows=4), 7)[0]
    assert all(row["ids"] in held_out and row["text"] == BYTES.decode(row["ids"]) for row in rows)
    values = found["values"]
    assert values["gen_ppl"] == pytest.approx(gen_ppl([row["text"] for row in rows], "x")[0])
    expected = np.mean([evaluation.entropy(row["ids"]) for row in rows])
    assert values["entropy"] == pytest.approx(expected) and values["nfe"] == 0
    main("mauve", *flags)
    found = json.loads(Path("letters/val.mauve.letters-x.length-7.json").read_text())
    assert (found["settings"]["n"], found["values"]["references"]) == (7, 7)
    features = np.concatenate((mauve["p_features"], mauve["q_features"]))
    assert len(np.unique(features.round(6), axis=0)) == 14
    # MAUVE's references: as many rows, at random
    drawn = [[row["ids"] for row in evaluation.held_out_samples(
        Config(data="letters", seed=seed), 7, "bytes", 4)[0]] for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1] and held_out[:4] not in drawn
    assert all(len({*map(tuple, ids)}) == 4 for ids in drawn)
    assert all(row in held_out for ids in drawn for row in ids)


def test_a_result_says_what_training_cost(world):
    """Tables 1 and 4: p_sm of the updates make a pass more, half of the tokens are masked."""
    run = {"batch_size": 4, "p_sm": 0.8, "b_l": 0.2, "b_h": 0.8, "init_from": "mdlm.ckpt"}
    model, binary, cost = model_of(), model_of(soft_mask=False), {
        "start": "mdlm.ckpt", "passes": pytest.approx(9 * 1.8), "loss tokens": 9 * 4 * 16 / 2}
    of = lambda *command: result(*command)["settings"]["training"]
    save("last.pt", model, config=vars(model.cfg) | run)
    assert of("ppl", "--checkpoint=last.pt", "--data=data", "--rows=2") == of("entropy") == cost
    save("last.pt", binary, config=vars(binary.cfg) | run)
    assert of("entropy")["passes"] == 9
    save("last.pt", model, config=vars(model.cfg) | run, step=10)  # the run went on
    assert of("entropy") == {}
    Path("last.pt").unlink()
    assert of("entropy") == {}


def test_samples_are_of_one_run(tmp_path):
    """The shards of torchrun are one file. What was made twice counts once."""
    read = lambda name: evaluation.read_samples(str(tmp_path / name))
    refused("no samples in", read, "s*.jsonl")
    whole = {"ids": [1, 2], "text": "ab", "nfe": 1, "seed": 1, "index": 0, "settings": {}}
    for line in ({k: v for k, v in whole.items() if k != "seed"}, whole | {"ids": [1]},
                 whole | {"ids": ["a", "b"]}, whole | {"text": 5}, [1]):
        (tmp_path / "s.0.jsonl").write_text(json.dumps(line) + "\n")
        refused("is no file of samples", read, "s.jsonl")
    for name, start in ("s.0", 0), ("s.1", 1), ("s.trace", 5):  # the last is no shard
        samples_file(tmp_path / f"{name}.jsonl", n=2, start=start)
    for name in "s.jsonl", "s.[01].jsonl":
        samples, settings = read(name)
        assert [s["index"] for s in samples] == [0, 1, 2] and settings["sampler"] == "mdlm"
    samples_file(tmp_path / "s.1.jsonl", n=2, top_p=1.0, steps=8)
    refused("different steps, top_p", read, "s.jsonl")


def test_what_cannot_be_scored_is_refused(lm, monkeypatch):
    refused("fewer than two tokens", score_with_lm, ["longenough", "a"])
    lm.config = types.SimpleNamespace(max_position_embeddings=5)
    refused("a text has 6 tokens, gpt2-large takes 5", score_with_lm, ["abcdef"])
    lm.out.data[0, 5] = math.nan
    refused("finds nan nats", score_with_lm, ["abcd"])
    with monkeypatch.context() as patch:
        ends = [{"nll": 0.0, "tokens": 0, "feature": None}] * 2
        patch.setattr(evaluation, "score_with_lm", lambda *texts, **how: ends)
        refused("no text has a token to score", gen_ppl, ["<|endoftext|>"] * 2)
    sys.modules["transformers"].AutoTokenizer.from_pretrained = open
    refused("--scorer=nowhere not found.*No such file", score_with_lm, ["abcd"], "nowhere")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("pip install transformers", score_with_lm, ["abcd"])
    monkeypatch.setitem(sys.modules, "mauve", None)
    refused("pip install mauve-text", evaluation.mauve, TEXTS, TEXTS)


def test_bad_input_is_refused(world):
    ppl = "ppl", "--checkpoint=last.pt", "--data=data"
    for flag in "--rows=-1", "--device=cuda:99":
        refused(flag, main, *ppl, flag)
    refused("^--length=2 must be at least 3$", main, *ppl, "--length=2")
    refused("'' is not something to measure", main)
    meta = json.loads(Path("data/meta.json").read_text())
    Path("data/meta.json").write_text(json.dumps(meta | {"tokenizer": GPT2}))
    refused("prepare the text again with --tokenizer=bytes", main, *ppl)
    refused("samples.jsonl is of tokenizer bytes, data of gpt2", main, "mauve",
            "--samples=samples.jsonl", "--data=data")


def test_sudoku_counts_whole_grids():
    """Drawn grids are right; one wrong digit, a missing one or a repeated box is not."""
    texts = [f"<|bos|>{text}<|eos|><|eos|>" for text in sudoku.texts(50, gen())]
    assert sudoku.right(texts) == {"right": 1.0, "right_se": 0.0, "distinct": 50, "commonest": 0.02}
    grid = texts[0][7:43]
    latin = "".join("123456"[i:] + "123456"[:i] for i in range(6))  # rows and columns, no boxes
    wrong = grid[:-1] + ("1" if grid[-1] != "1" else "2")
    bad = [wrong, grid[:-1], grid + "1", "7" + grid[1:], latin]
    found = sudoku.right([*bad, grid, grid.translate(str.maketrans("123456", "234561")), grid])
    assert found["right"] == 3 / 8 and found["distinct"] == 2 and found["commonest"] == 1
    assert found["right_se"] == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 8))
    assert sudoku.right(bad)["right"] == 0
