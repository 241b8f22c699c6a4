"""eval.py: the bound against Eq. 2 integrated by hand, the authors' scoring rules against loops, results and tables."""

import itertools
import glob
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import data
import eval as evaluation
from launch import Refused, from_cli
from eval import PRESETS, Config, bits_per_byte, bound, entropy, gen_ppl, mean_and_se, score, val_ppl
from mdlm import ALPHA_FLOOR, MDLM, ModelConfig

ROOT = Path(evaluation.__file__).parent
TINY = dict(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=259, mask_id=258, length=16, dropout=0.1)


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
    """Stands where MDLM does: remembers what it was asked, and finds the number of masks over t."""

    def __init__(self, nll=None):
        super().__init__()
        self.p, self.cfg, self.seen, self.nll = nn.Parameter(torch.zeros(())), types.SimpleNamespace(mask_id=258), [], nll

    def forward(self, x0, xt, t, soft):
        self.seen += [(tuple(x.tolist()), tuple(m.tolist()), s.item()) for x, m, s in zip(x0, xt, t)]
        return (xt == 258).sum(1) / t if self.nll is None else torch.full((len(t),), self.nll)


# the bound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [True, False])
def test_bound_is_eq2_integrated_by_hand(soft):
    """All 16 masks of a row of 4 tokens, weighed by their probability at t, over t, integrated numerically in float64."""
    model = model_of(vocab_size=7, mask_id=6, length=4, omega_s=0.6, omega_b=-3.0).eval()
    x0, ones = rows_of(1, 4, 6), torch.ones(1)
    t = np.linspace(ALPHA_FLOOR, 1, 20001)
    p, exact = (1 - ALPHA_FLOOR) * t, 0.0
    for pattern in itertools.product([False, True], repeat=4):
        m, mask = sum(pattern), torch.tensor([pattern])
        with torch.no_grad():
            ce = model(x0, x0.masked_fill(mask, 6), ones, soft).item() if m else 0.0
        f = p**m * (1 - p)**(4 - m) * ce / t
        exact += ((f[1:] + f[:-1]) / 2 * np.diff(t)).sum() / (1 - ALPHA_FLOOR)
    nll, ce, masked = bound(model, x0.expand(500, -1), soft, seed=3, repeats=8, batch_size=250)
    mean, se = mean_and_se(nll, np.ones(500))
    assert abs(mean - exact) < 4 * se and se < 0.02 * exact


def test_uniform_model_has_ppl_v():
    """A fresh head knows nothing: every mask costs log(V − 1), since [MASK] itself is never the answer."""
    model = MDLM(ModelConfig(**TINY))
    nll, ce, masked = bound(model, rows_of(400), soft=True, repeats=4, batch_size=100)
    torch.testing.assert_close(ce, masked * math.log(258), rtol=1e-6, atol=0)
    mean, se = mean_and_se(nll, np.full(400, 16))
    assert abs(mean - (1 - ALPHA_FLOOR) * math.log(258)) < 4 * se


def test_bound_does_not_depend_on_batches_or_ranks():
    model, rows = model_of(omega_s=0.5), rows_of(21)
    whole = bound(model, rows, True, seed=5, repeats=2, batch_size=21)
    for batch_size in 1, 4:
        torch.testing.assert_close(bound(model, rows, True, seed=5, repeats=2, batch_size=batch_size), whole, rtol=1e-5, atol=1e-6)
    shards = [val_ppl(model, rows, True, seed=5, repeats=2, batch_size=4, rank=rank, world=3) for rank in range(3)]
    total, tokens = map(sum, zip(*shards))
    assert tokens == 21 * 16 and total == pytest.approx(whole[0].sum().item(), rel=1e-5)
    assert val_ppl(model, rows[:2], True, batch_size=2, rank=1, world=2) == (0.0, 0)  # more ranks than batches


def test_feedback_is_measured_on_the_same_masks():
    seen = []
    for soft in True, False:
        spy = Spy()
        bound(spy, rows_of(9), soft, seed=2, repeats=3)
        seen.append(spy.seen)
    assert seen[0] == seen[1]
    other = Spy()
    bound(other, rows_of(9), True, seed=3, repeats=3)
    assert other.seen != seen[0]


def test_times_are_stratified_over_rows_and_within_each():
    spy, n, repeats = Spy(), 10, 4
    bound(spy, torch.arange(n)[:, None].expand(n, 16), True, repeats=repeats)
    u = {i: sorted((t - ALPHA_FLOOR) / (1 - ALPHA_FLOOR) for x, _, t in spy.seen if x[0] == i) for i in range(n)}
    assert all([int(t * repeats) for t in u[i]] == list(range(repeats)) for i in u)                    # one in each quarter
    assert sorted(int(t * n * repeats) for ts in u.values() for t in ts) == list(range(n * repeats))   # one in each slice
    first = [u[i][0] for i in range(n)]
    assert first != sorted(first)  # dealt out at random: a row's place in the text says nothing about its times


def test_measuring_leaves_the_model_in_its_mode_and_drops_nothing_out():
    model = model_of().train()
    a, b = (bound(model, rows_of(4), True)[0] for _ in range(2))
    assert model.training and torch.equal(a, b)
    assert not bound(model.eval(), rows_of(4), True)[0].requires_grad and not model.training


def test_standard_error_of_a_ratio():
    x = np.random.default_rng(0).normal(3, 1, 50)
    mean, se = mean_and_se(x * 7, np.full(50, 7))
    assert mean == pytest.approx(x.mean()) and se == pytest.approx(x.std(ddof=1) / 50**0.5)
    assert mean_and_se([2.0, 30.0], [1, 10])[0] == pytest.approx(32 / 11)
    assert math.isnan(mean_and_se([2.0], [1])[1])


def test_bits_per_byte_counts_what_the_rows_hold():
    """1,000 tokens for 4,000 bytes of text: L positions are paid for, L − 2 of them carry text."""
    assert bits_per_byte(math.log(2), 12, {"tokens": 1000, "bytes": 4000}) == pytest.approx(12 / 10 / 4)


def test_a_bound_that_is_not_a_number_is_refused():
    with pytest.raises(Refused, match="not a number on 3 of 3 rows"):
        val_ppl(Spy(nll=math.nan), rows_of(3), True)


# samples --------------------------------------------------------------------------------------------------------------


def test_entropy_is_the_recorded_one():
    with open(ROOT / "tests/golden/language_misc.json") as f:
        golden = json.load(f)["entropy"]
    assert [entropy(ids) for ids in golden["tokens"]] == pytest.approx(golden["nats"], abs=1e-6)
    assert entropy(range(32)) == pytest.approx(math.log(32))


class Tok:
    """Letters a…z are ids 2…27, the end of a text is id 1."""
    eos_token, eos_token_id = "$", 1

    def __call__(self, text, truncation, max_length):
        assert truncation and max_length == 1024
        return types.SimpleNamespace(input_ids=[1 if c == "$" else ord(c) - 95 for c in text][:max_length])


class LM(nn.Module):
    """A causal model that anybody can follow: the running mean of embeddings, then a linear layer."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.table, self.out = (nn.Parameter(2 * torch.randn(s, generator=g)) for s in ((28, 5), (5, 28)))
        self.batches = []

    def forward(self, input_ids, attention_mask, output_hidden_states):
        assert output_hidden_states
        self.batches.append(input_ids.shape)
        h = self.table[input_ids].cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return types.SimpleNamespace(logits=h @ self.out, hidden_states=(None, h))


@pytest.fixture
def lm(monkeypatch):
    lm, loaded = LM(), []
    auto = lambda thing: types.SimpleNamespace(from_pretrained=lambda name: loaded.append(name) or thing)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=auto(Tok()), AutoModelForCausalLM=auto(lm)))
    lm.loaded = loaded
    return lm


TEXTS = ["hello", "$world$again$", "a$b$c", "zz", "q" * 40]


def slow(lm, text):
    """The authors' rule in a loop: all tokens but the first, of the EOS only the one that comes first."""
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
    for batch_size in 1, 2, 5:
        for text, s in zip(TEXTS, score(TEXTS, "some-lm", batch_size=batch_size)):
            nats, n, feature = slow(lm, text)
            assert s["nll"] == pytest.approx(nats, rel=1e-5) and s["tokens"] == n
            np.testing.assert_allclose(s["feature"], feature, rtol=1e-5)
    assert [s["tokens"] for s in score(TEXTS)] == [4, 10, 3, 1, 39]
    assert score(["x" * 3000])[0]["tokens"] == 1023


def test_scores_are_exact_for_a_large_vocabulary(lm):
    """With V in the middle of the logits the CPU's log-softmax is off by 4e-5 nats per token here, and by more in real models."""
    lm.out = nn.Parameter(torch.randn(5, 50_000, generator=torch.Generator().manual_seed(1)))
    for text, s in zip(TEXTS, score(TEXTS)):
        assert s["nll"] == pytest.approx(slow(lm, text)[0], abs=1e-5 * s["tokens"])


def test_generative_perplexity_is_over_all_tokens_together(lm):
    nats, n, _ = zip(*(slow(lm, text) for text in TEXTS))
    assert gen_ppl(TEXTS)[0] == pytest.approx(math.exp(sum(nats) / sum(n)), rel=1e-5)


def test_our_document_ends_become_the_scorers(lm):
    assert score(["<|bos|>ab<|eos|>"])[0]["nll"] == score(["<|endoftext|>ab<|endoftext|>"])[0]["nll"] == score(["$ab$"])[0]["nll"]


def test_scoring_goes_on_where_it_was_stopped(lm, tmp_path):
    whole, cache, forward, calls = score(TEXTS, batch_size=1), tmp_path / "scores.jsonl", lm.forward, []

    def dies(**inputs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(**inputs)
    lm.forward = dies
    with pytest.raises(KeyboardInterrupt):
        score(TEXTS, cache=cache, batch_size=1)
    assert len(cache.read_text().splitlines()) == 3
    with open(cache, "a") as f:
        f.write('{"key": "cut in the mid')  # as a kill leaves it
    again = score(TEXTS, cache=cache, batch_size=1)
    assert len(calls) == 6 and [s["nll"] for s in again] == [s["nll"] for s in whole]
    lm.loaded.clear()
    np.testing.assert_array_equal(score(TEXTS, cache=cache)[1]["feature"], whole[1]["feature"])
    assert lm.loaded == [] and len(calls) == 6                 # nothing left to do: not even loaded
    score(TEXTS[:1], "another", cache=cache)
    assert lm.loaded == ["another", "another"]                 # another scorer, another score
    cache.write_text("something else\n")
    with pytest.raises(Refused, match="something else than scores"):
        score(TEXTS, cache=cache)


def test_what_cannot_be_scored_is_refused(lm, monkeypatch):
    for text in "", "a":
        with pytest.raises(Refused, match="fewer than two tokens"):
            score(["long enough".replace(" ", ""), text])
    lm.out.data[0, 5] = math.nan
    with pytest.raises(Refused, match="finds nan nats"):
        score(["abcd"])

    def missing(name):
        raise OSError(f"{name} is not a local folder\nand more")
    sys.modules["transformers"].AutoTokenizer.from_pretrained = missing
    with pytest.raises(Refused, match="--scorer=nowhere not found.*not a local folder$"):
        score(["abcd"], "nowhere")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Refused, match="pip install transformers"):
        score(["abcd"])


def test_scores_equal_the_loss_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: would compare with its own loss and features")
    torch.manual_seed(0)
    lm = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    lm.save_pretrained(tmp_path)
    vocab = {"<|endoftext|>": 0} | {chr(i): i for i in range(32, 127)}
    from tokenizers import Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    texts = ["It was a dark night.", "and stormy", "<|endoftext|>so", "x" * 50]
    for text, s in zip(texts, score(texts, str(tmp_path), batch_size=3)):
        ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(tmp_path)(text).input_ids])
        with torch.no_grad():
            out = lm.eval()(ids, labels=ids, output_hidden_states=True)
        assert s["nll"] / s["tokens"] == pytest.approx(out.loss.item(), abs=1e-5)
        np.testing.assert_allclose(s["feature"], out.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-5)


def test_mauve_gets_the_features_and_the_settings(lm, monkeypatch):
    got = {}
    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(
        compute_mauve=lambda **kwargs: got.update(kwargs) or types.SimpleNamespace(mauve=0.25)))
    assert evaluation.mauve(TEXTS, TEXTS[:2], scale=5, seed=7) == 0.25
    assert (got["mauve_scaling_factor"], got["seed"], got["p_features"].shape, got["q_features"].shape) == (5, 7, (5, 5), (2, 5))
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(Refused, match="pip install mauve-text"):
        evaluation.mauve(TEXTS, TEXTS)


def test_mauve_of_equal_sets_is_one_and_of_disjoint_ones_zero(request):
    pytest.importorskip("mauve", reason="needs mauve-text: would compare equal and disjoint sets of texts")
    request.getfixturevalue("lm")  # after the import of mauve, which needs the real transformers
    sure = lambda letters: ["".join(letters[(i * j) % len(letters)] for j in range(1, 9)) for i in range(60)]
    assert evaluation.mauve(sure("abcdefg"), sure("abcdefg")) > 0.95
    assert evaluation.mauve(sure("abc"), sure("xyz")) < 0.05


# files and tables -----------------------------------------------------------------------------------------------------


def samples_file(path, n=4, seed=1, texts=None, start=0, **changes):
    settings = {"checkpoint": "last.pt", "step": 9, "sampler": "mdlm", "steps": 4, "top_p": 0.9, "soft": True, "tokenizer": "bytes"}
    with open(path, "w") as f:
        for i in range(start, start + n):
            text = texts[i] if texts else "abcdefgh"[i:i + 6]
            f.write(json.dumps({"ids": list(text.encode()), "text": text, "nfe": 3 + i, "seed": seed, "index": i,
                                "settings": settings | changes}) + "\n")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with data, a checkpoint trained on it, and samples."""
    monkeypatch.chdir(tmp_path)
    data.prepare(iter([(" ".join(str(i * j * j) for j in range(9, 25)), True) for i in range(20)]), "data", data.tokenizer("bytes"), val_docs=9)
    model = model_of(omega_s=0.5)
    special = data.describe(data.tokenizer("bytes"))
    checkpoint.save("last.pt", kind="mdlm", config=vars(model.cfg), model=model.state_dict(), step=9, seed=1, tokenizer=special,
                    ema={k: v + 0.01 for k, v in model.state_dict().items() if k.startswith("net.")})
    samples_file("samples.jsonl")
    return tmp_path


def main(*argv):
    evaluation.main(from_cli(Config, argv, PRESETS))


def read(pattern):
    (path,) = glob.glob(pattern)
    with open(path) as f:
        return json.load(f)


def test_ppl_of_a_checkpoint(world):
    main("ppl", "--checkpoint=last.pt", "--data=data", "--repeats=2", "--label=tiny")
    result = read("last.pt.ppl.*.json")
    tokens, meta = data.open_split("data", "val")
    rows = data.rows(tokens, range(data.n_rows(tokens, 16)), 16)
    for name in "soft", "binary":
        got = result["values"][name]
        total, count = val_ppl(MDLM.load("last.pt"), rows, name == "soft", seed=1, repeats=2)
        assert got["nats_per_token"] == pytest.approx(total / count, rel=1e-5) and got["ppl"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert got["bits_per_byte"] == pytest.approx(bits_per_byte(total / count, 16, meta["val"]), rel=1e-5)
    assert result["values"]["gain"]["nats_per_token"] == pytest.approx(
        result["values"]["binary"]["nats_per_token"] - result["values"]["soft"]["nats_per_token"], abs=1e-9)
    assert result["settings"] | {"text": None} == {"step": 9, "L": 16, "tokenizer": "bytes", "n": len(rows), "text": None,
                                                   "dtype": "float32"}
    assert result["evaluation"]["seed"] == 1 and {"python", "torch", "git"} <= set(result["versions"])


def test_ema_is_the_default_and_rows_are_spread(world):
    values = []
    for flags in ([], ["--ema=False"], ["--rows=5"]):
        main("ppl", "--checkpoint=last.pt", "--data=data", "--out=r.json", *flags)
        values.append(read("r.json"))
    assert values[0]["values"] != values[1]["values"] and values[2]["settings"]["n"] == 5
    tokens, _ = data.open_split("data", "val")
    n = data.n_rows(tokens, 16)
    some = data.rows(tokens, [i * n // 5 for i in range(5)], 16)
    total, count = val_ppl(MDLM.load("last.pt"), some, True, seed=1)
    assert values[2]["values"]["soft"]["nats_per_token"] == pytest.approx(total / count, rel=1e-5)


def test_zero_shot_cuts_a_text_with_the_models_tokenizer(world):
    Path("other.txt").write_text("some other text\n" * 30)
    main("zero_shot", "--checkpoint=last.pt", "--text=other.txt")
    result = read("last.pt.zero_shot.*.json")
    assert result["settings"]["n"] == (16 * 30 + 1) // 14 and result["settings"]["text"]["bytes"] == 480
    with pytest.raises(Refused, match="'nowhere.txt' is neither"):
        main("zero_shot", "--checkpoint=last.pt", "--text=nowhere.txt")


def test_binary_models_have_no_feedback_to_measure(world):
    model = model_of(soft_mask=False)
    checkpoint.save("binary.pt", kind="mdlm", config=vars(model.cfg), model=model.state_dict(), step=0, seed=1,
                    tokenizer=data.describe(data.tokenizer("bytes")))
    main("ppl", "--checkpoint=binary.pt", "--data=data")
    assert set(read("binary.pt.ppl.*.json")["values"]) == {"binary"}


def test_two_checkpoints_are_compared_on_the_same_masks(world):
    """The difference is that of the two results apart, and surer than they are; feedback is on wherever there is some."""
    weights = {k: v + 0.02 for k, v in MDLM.load("last.pt").state_dict().items() if k.startswith("net.")}
    model = model_of(soft_mask=False)
    saved = dict(kind="mdlm", config=vars(model.cfg), model=weights, step=0, seed=1, tokenizer=data.describe(data.tokenizer("bytes")))
    checkpoint.save("binary.pt", **saved)
    values = {}
    for name, flags in {"soft": ["--checkpoint=last.pt", "--against=binary.pt"], "binary": ["--checkpoint=binary.pt", "--against=last.pt"]}.items():
        main("ppl", "--data=data", "--out=r.json", *flags)
        values[name] = read("r.json")["values"]
    apart = values["binary"]["binary"]["nats_per_token"] - values["soft"]["soft"]["nats_per_token"]
    for name, sign in ("soft", 1), ("binary", -1):
        assert values[name]["below_against"]["nats_per_token"] == pytest.approx(sign * apart, abs=1e-9) and apart != 0
        assert 0 < values[name]["below_against"]["nats_per_token_se"] < values[name][name]["nats_per_token_se"]
    checkpoint.save("gpt2.pt", **saved | {"tokenizer": saved["tokenizer"] | {"name": "gpt2"}})
    main("ppl", "--data=data", "--checkpoint=last.pt", "--against=binary.pt")
    assert Path("last.pt.ppl.data.below-binary-pt.json").exists() and not Path("last.pt.ppl.data.json").exists()
    with pytest.raises(Refused, match="--against=gpt2.pt has tokens of .*gpt2.* cannot be compared"):
        main("ppl", "--data=data", "--checkpoint=last.pt", "--against=gpt2.pt")


def test_data_of_another_tokenizer_is_refused(world):
    meta = read("data/meta.json")
    meta["tokenizer"] |= {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257, "bos": 50256, "eos": 50256}
    Path("data/meta.json").write_text(json.dumps(meta))
    with pytest.raises(Refused, match="prepare the text again with --tokenizer=bytes"):
        main("ppl", "--checkpoint=last.pt", "--data=data")
    with pytest.raises(Refused, match="samples.jsonl is of tokenizer bytes, data of gpt2"):
        main("mauve", "--samples=samples.jsonl", "--data=data")


def test_entropy_of_samples_and_everything_that_made_them(world):
    main("entropy", "--samples=samples.jsonl")
    result = read("samples.entropy.json")
    assert result["values"] == {"entropy": pytest.approx(np.mean([math.log(len(set("abcdefgh"[i:i + 6]))) for i in range(4)])),
                                "entropy_min": pytest.approx(math.log(5)), "nfe": 4.5}
    assert {"checkpoint", "step", "sampler", "steps", "top_p", "soft", "tokenizer"} < set(result["settings"])
    assert result["settings"]["n"] == 4 and result["settings"]["seeds"] == [1]


def test_gen_ppl_and_mauve_share_their_scores(world, lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=lambda **kw: types.SimpleNamespace(mauve=0.5)))
    data.prepare(iter([("abcdefghij" * 9, True)] * 9), "letters", data.tokenizer("bytes"), val_docs=3)
    main("gen_ppl", "--samples=samples.jsonl", "--scorer=x")
    result = read("samples.gen_ppl.*.json")["values"]
    assert result["gen_ppl"] == pytest.approx(gen_ppl([f"{'abcdefgh'[i:i + 6]}" for i in range(4)], "x")[0]) and "entropy" in result
    lm.batches.clear()
    main("mauve", "--samples=samples.jsonl", "--scorer=x", "--data=letters")
    assert read("samples.mauve.*.json")["values"] | {"entropy": 0, "entropy_min": 0} == {
        "entropy": 0, "entropy_min": 0, "nfe": 4.5, "mauve": 0.5, "references": 4}
    assert sum(shape[0] for shape in lm.batches) <= 4                                                  # the references alone


def test_mauve_compares_with_held_out_rows_of_the_same_length_at_random(world, monkeypatch):
    drawn = []
    monkeypatch.setattr(evaluation, "mauve", lambda texts, references, *rest, **how: drawn.append(references) or 0.5)
    for seed in 1, 2, 1:
        main("mauve", "--samples=samples.jsonl", "--data=data", f"--seed={seed}")
    tokens, tok = data.open_split("data", "val")[0], data.tokenizer("bytes")
    held_out = [tok.decode(row.tolist()) for row in data.rows(tokens, range(data.n_rows(tokens, 6)), 6)]
    assert drawn[0] == drawn[2] and len({*map(tuple, drawn), tuple(held_out[:4])}) == 3
    assert all(len(set(texts)) == len(texts) == 4 and set(texts) <= set(held_out) for texts in drawn)


def test_shards_are_read_together(tmp_path):
    samples_file(tmp_path / "s.0.jsonl", n=2)
    samples_file(tmp_path / "s.1.jsonl", n=2, start=2)
    samples, settings = evaluation.read_samples(str(tmp_path / "s.*.jsonl"))
    assert [s["index"] for s in samples] == [0, 1, 2, 3] and settings["sampler"] == "mdlm"
    samples_file(tmp_path / "s.1.jsonl", n=4)  # the same again counts once
    assert len(evaluation.read_samples(str(tmp_path / "s.*.jsonl"))[0]) == 4


def test_bad_samples_are_refused(tmp_path):
    path = str(tmp_path / "s*.jsonl")
    with pytest.raises(Refused, match="no samples in"):
        evaluation.read_samples(path)
    (tmp_path / "s.jsonl").write_text("")
    with pytest.raises(Refused, match="no samples in"):
        evaluation.read_samples(path)
    whole = {"ids": [1, 2], "text": "ab", "nfe": 1, "seed": 1, "index": 0, "settings": {}}
    lines = [json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole] + [json.dumps(whole | {"ids": [1]})]
    for foreign in "no json\n", "[1]\n", *lines:
        (tmp_path / "s.jsonl").write_text(foreign)
        with pytest.raises(Refused, match="is no file of samples"):
            evaluation.read_samples(path)
    samples_file(tmp_path / "s.jsonl", n=2)
    samples_file(tmp_path / "s2.jsonl", n=2, top_p=1.0, steps=8)  # of the same numbers
    with pytest.raises(Refused, match="different steps, top_p"):
        evaluation.read_samples(path)


def result_file(path, value, metric="gen_ppl", run=None, label="", L=1024, n=5000, **settings):
    values = {metric: value} if metric != "ppl" else {"soft" if settings["soft"] else "binary": {"ppl": value}}
    settings = {"checkpoint": "x.pt", "sampler": "mdlm", "steps": 128, "soft": True, "top_p": 0.9, "tokenizer": "gpt2", "L": L, "n": n} | settings
    evaluation_ = vars(Config(metric=metric, samples=run or str(path), checkpoint=str(path), label=label))
    path.write_text(json.dumps({"metric": metric, "values": values, "settings": settings, "evaluation": evaluation_}))


def test_table_lays_results_out_as_the_paper_does(tmp_path, capsys):
    numbers = {("mdlm", False): (60.02, 50.46), ("mdlm", True): (39.61, 23.53), ("remdm", False): (42.53, 28.62), ("remdm", True): (29.62, 16.72)}
    for (sampler, soft), (eighth, whole) in numbers.items():
        for steps, value in (128, eighth), (1024, whole):
            name = sampler if sampler == "mdlm" else "remdm-loop" if steps == 1024 else "remdm-cap"
            result_file(tmp_path / f"{sampler}{soft}{steps}.json", value, label="1M", sampler=name, soft=soft, steps=steps)
    main("table", f"--results={tmp_path}/*.json", f"--out={tmp_path}/table.md")
    assert (tmp_path / "table.md").read_text() == capsys.readouterr().out == (
        "| unmasking | feedback | model | gen. PPL ↓ 1/8 | gen. PPL ↓ 1/1 |\n|---|---|---|--:|--:|\n"
        "| standard | binary | 1M | 60.02 | 50.46 |\n| standard | soft | 1M | 39.61 | 23.53 |\n|  | gain |  | -20.41 | -26.93 |\n"
        "| ReMDM | binary | 1M | 42.53 | 28.62 |\n| ReMDM | soft | 1M | 29.62 | 16.72 |\n|  | gain |  | -12.91 | -11.90 |\n")


def test_table_gives_mean_and_deviation_of_runs(tmp_path, capsys):
    for seed, value in (1, 0.2), (2, 0.3), (3, 0.4):
        result_file(tmp_path / f"{seed}.json", value, "mauve", label="1M+100k")
    result_file(tmp_path / "4.json", 0.4, "mauve", label="1M+100k", run=str(tmp_path / "3.json"))  # measured twice, one run
    main("table", f"--results={tmp_path}/*.json")
    assert "| standard | soft | 1M+100k | 0.300 (± 0.100) |" in capsys.readouterr().out


def test_table_of_perplexities(tmp_path, capsys):
    result_file(tmp_path / "a.json", 23.21, "ppl", label="1M", soft=False)
    result_file(tmp_path / "b.json", 21.47, "ppl", label="1M, soft", soft=True)
    main("table", f"--results={tmp_path}/*.json")
    out = capsys.readouterr().out
    assert "|  | binary | 1M | 23.21 |" in out and "|  | soft | 1M, soft | 21.47 |" in out and "|  | gain |  | -1.74 |" in out


@pytest.mark.parametrize("change, named", [({"sampler": "remdm-cap"}, "sampler"), ({"ema": False}, "ema"), ({"step": 7}, "step"), ({"eta": 0.1}, "eta")])
def test_a_cell_averages_runs_of_one_kind_only(tmp_path, change, named):
    """Two samplers of ReMDM, EMA and raw weights, an earlier and a later state of one run are no seeds of each other."""
    result_file(tmp_path / "a.json", 1.0, label="1M", **({"sampler": "remdm-loop"} if named == "sampler" else {}))
    result_file(tmp_path / "b.json", 2.0, label="1M", **change)
    with pytest.raises(Refused, match=rf"a.json and .*b.json differ in {named} \(.* one row, --label"):
        main("table", f"--results={tmp_path}/*.json")


def test_texts_of_ends_only_are_refused():
    with pytest.raises(Refused, match="no text has a token to score"):
        evaluation_of_nothing = [{"nll": 0.0, "tokens": 0, "feature": None}] * 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "score", lambda *a, **k: evaluation_of_nothing)
            gen_ppl(["<|endoftext|>"] * 2)


@pytest.mark.parametrize("line", [{"ids": ["a", "b"]}, {"text": 5}, {"nfe": "x"}])
def test_lines_that_are_no_samples_are_refused(tmp_path, line):
    good = {"ids": [1, 2], "text": "a", "nfe": 1, "seed": 1, "index": 0, "settings": {}}
    (tmp_path / "s.jsonl").write_text(json.dumps(good | line) + "\n")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("s.jsonl", "folder.jsonl"):
        with pytest.raises(Refused, match="is no file of samples"):
            main("entropy", f"--samples={tmp_path}/{name}")


@pytest.mark.parametrize("change, named", [({"n": 100}, "n"), ({"L": 512}, "L"), ({"top_p": 1.0}, "top_p"), ({"tokenizer": "bytes"}, "tokenizer")])
def test_mixed_settings_in_one_table_are_refused(tmp_path, change, named):
    result_file(tmp_path / "a.json", 1.0)
    result_file(tmp_path / "b.json", 2.0, **change)
    with pytest.raises(Refused, match=rf"a.json and .*b.json differ in {named} \("):
        main("table", f"--results={tmp_path}/*.json")


def test_tables_of_nothing_of_nan_and_of_other_files_are_refused(tmp_path):
    with pytest.raises(Refused, match="no results match"):
        main("table", f"--results={tmp_path}/*.json")
    result_file(tmp_path / "a.json", math.nan)
    with pytest.raises(Refused, match="gen_ppl in .*a.json is nan"):
        main("table", f"--results={tmp_path}/*.json")
    for foreign in "{}", "[]", "no json":
        (tmp_path / "a.json").write_text(foreign)
        with pytest.raises(Refused, match="is not a result of eval.py"):
            main("table", f"--results={tmp_path}/*.json")


def test_unknown_metrics_sizes_and_devices_are_refused(world):
    for flag in "--rows=-1", "--repeats=0", "--batch_size=0":
        with pytest.raises(Refused, match=flag):
            main("ppl", "--checkpoint=last.pt", "--data=data", flag)
    with pytest.raises(Refused, match="'' is not something to measure"):
        main()
    for device in "cuda:99", "tpu":
        with pytest.raises(Refused, match=f"--device={device}"):
            main("ppl", "--checkpoint=last.pt", "--data=data", f"--device={device}")


def test_bad_input_exits_with_two_and_one_sentence(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "eval.py", "ppl", "--checkpoint=no.pt"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no.pt" in done.stderr
