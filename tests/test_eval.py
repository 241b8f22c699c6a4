"""lab/eval.py, lab/feedback.py and lab/eval_samples.py: how bounds and samples are measured."""

import functools
import math
import shutil
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import data
import eval as lab_eval
import eval_samples
import feedback
import oracles
from conftest import GOLDEN, gen, plain_omega, random_mdlm, refused, save_mdlm, start, torchrun
from eval_samples import gen_ppl, score
from launch import append_jsonl, read_json
from mdlm import MDLM
from sample import Pick, decode, shares_of
from train import bound

BYTES = data.tokenizer("bytes")
OPEN = dict(omega_s=0.5, omega_a=1.0, omega_b=-5.0)  # ω at which SM does something
model_of = functools.partial(random_mdlm, vocab_size=259, mask_id=258, length=16, dropout=0.1)


@pytest.mark.parametrize("soft, floor", [(True, 1e-3), (False, 1e-3), (True, 0.3)])
def test_bound_is_eq_2_at_fixed_times_and_masks(soft, floor):
    """Means over the repeats. Of two ranks, one takes rows 0, 1 and 4, the other rows 2 and 3."""
    rows, model = torch.randint(258, (5, 16), generator=gen()), model_of(two_updates=True, **OPEN)
    measure = functools.partial(bound, model, rows, soft, 5, repeats=2, floor=floor)
    found = measure(batch_size=3)
    assert model.training and not found.requires_grad  # as before
    net, expected = model.eval().net, torch.zeros(3, 5, dtype=torch.float64)
    predict = lambda emb, t: net.head(net.trunk(emb, t)[0])[None]
    drawn = oracles.held_out(rows, 258, 5, repeats=2, floor=floor)
    for i, (x0, xt, t) in enumerate(drawn):
        nll = oracles.dense_nll(predict, net.table, x0[None], xt[None], t[None], 258,
                                plain_omega(model.sm) if soft else None)
        expected[:, i % 5] += torch.tensor([nll, nll * t, (xt == 258).sum()]) / 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    both = [measure(batch_size=2, rank=rank, world=2) for rank in (0, 1)]
    assert not both[0][:, [2, 3]].any() and not both[1][:, [0, 1, 4]].any()
    torch.testing.assert_close(sum(both), found, rtol=1e-5, atol=1e-6)


def test_a_span_is_right_where_the_model_writes_it_itself():
    model, L, width = model_of(omega_s=0.9, omega_b=-9.0).eval(), 16, 5
    span = feedback.spans(200, L, width, seed=1)
    places = {tuple(row.nonzero()[:, 0].tolist()) for row in span}
    assert places == {tuple(range(i, i + width)) for i in range(1, L - width)}
    x = torch.full((200, L), 7).masked_fill(span, 258)
    rows = decode(model, x, shares_of([1, 1, 1]), Pick())
    rows[7, span[7].nonzero()[2]] += 1  # one token of five
    on, off = (feedback.right(model, rows, span, 3, soft, batch_size=64) for soft in (True, False))
    assert on.sum() == 199 and not on[7] and off.sum() < 180


def test_entropy_is_the_recorded_one():
    golden = read_json(f"{GOLDEN}/language_misc.json")["entropy"]
    assert [*map(eval_samples.entropy, golden["tokens"])] == pytest.approx(golden["nats"], abs=1e-6)


class LM(torch.nn.Linear):
    """A simple causal model: a running mean of embeddings, and the same table as the head."""

    def forward(self, input_ids, attention_mask, output_hidden_states):
        assert output_hidden_states and not self.training
        h = self.weight[input_ids].cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return types.SimpleNamespace(logits=super().forward(h), hidden_states=(None, h))


@pytest.fixture
def lm(monkeypatch):
    """In place of transformers: this model, and bytes as tokens. The end of a text is a $."""
    def tok(text, truncation, max_length):
        return types.SimpleNamespace(input_ids=[*text.encode()[:truncation * max_length]])
    tok.eos_token, tok.eos_token_id = "$", ord("$")
    torch.manual_seed(0)
    lm = LM(5, 128).requires_grad_(False).bfloat16()
    lm.weight.mul_(5)
    auto = lambda thing: types.SimpleNamespace(from_pretrained=lambda name: thing)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(
        AutoTokenizer=auto(tok), AutoModelForCausalLM=auto(lm)))
    return lm


def test_scores_follow_the_rule_token_by_token(lm):
    """The authors' rule: all tokens but the first, and only the first EOS of the others."""
    texts, expected, features = ["hello", "$world$again$", "a$b$c", "zz", "q" * 40], [], []
    W, b, n = lm.weight.double(), lm.bias.double(), [4, 10, 3, 1, 39]
    for text in texts:
        ids = [ord(letter) for letter in text]
        scored = [i for i in range(1, len(ids)) if text[i] != "$" or "$" not in text[:i]]
        logits = [W @ W[ids[:i]].mean(0) + b for i in scored]
        expected.append(-sum(z.log_softmax(0)[ids[i]].item() for i, z in zip(scored, logits)))
        features.append(W[ids].mean(0))
    ends = [text.replace("$", "<|endoftext|>") for text in texts]  # become the scorer's
    for batch_size in 1, 2, 5:
        nats, tokens, found = score(ends, batch_size=batch_size)
        assert nats == pytest.approx(expected, rel=1e-5) and [*tokens] == n
        np.testing.assert_allclose(found, torch.stack(features), rtol=1e-5)
    mean = sum(expected) / sum(n)  # a ratio of two sums over texts, and its standard error
    se = np.std(np.subtract(expected, mean * np.array(n)), ddof=1) * 5**0.5 / sum(n)
    assert gen_ppl(nats, tokens) == pytest.approx((math.exp(mean), math.exp(mean) * se))
    assert score(["x" * 3000])[1] == [1023]


def samples_file(path, texts, start=0, **settings):
    settings = {"tokenizer": "bytes", "seed": 1, "prompt": ""} | settings
    for i, text in enumerate(texts, start):
        append_jsonl(path, {
            "ids": list(text.encode()), "text": f"<|bos|>{text}<|eos|><|eos|>", "nfe": 3 + i,
            "seed": 1, "index": i, "settings": settings})


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = (" ".join(str(i * j * j) for j in range(9, 25)) for i in range(20))
    data.prepare(enumerate(texts), "data", BYTES, val_docs=9)
    model = model_of(**OPEN)
    ema = {k: v + 0.01 for k, v in model.net.state_dict().items()}
    save_mdlm("last.pt", model, ema=ema, step=9)
    save_mdlm("binary.pt", model_of(soft_mask=False))


def test_samples_of_all_ranks_count_once(world):
    for name, texts, first in (("s", "ab", 0), ("s.rank0", "cd", 2), ("s.rank1", "bc", 1),
                               ("s.4", "e", 4)):
        samples_file(f"{name}.jsonl", texts, first)
    samples, _ = eval_samples.read_samples("s.jsonl")
    assert [sample["ids"] for sample in samples] == [[i] for i in b"abcd"]
    samples_file("s.rank2.jsonl", "e", 4, seed=2)
    samples_file("prompt.jsonl", "e", prompt="Once")
    for name in "s", "prompt":
        refused("mix settings or seeds|a prompt", eval_samples.read_samples, f"{name}.jsonl")


def result(*words, script="eval"):
    Path("r.json").unlink(missing_ok=True)
    start(script, *words, "--out=r.json")
    return read_json("r.json")


def test_the_text_of_the_training_is_measured_unless_it_has_changed(world):
    _, meta = data.open_split("data", "train")
    save_mdlm("own.pt", model_of(omega_s=0.5), data=meta["train"] | {"path": "data"})
    own = result("--checkpoint=own.pt")["values"]
    assert own == result("--checkpoint=own.pt", "--data=data")["values"]
    shutil.rmtree("data")
    data.prepare(enumerate(["another text"] * 99), "data", BYTES)
    refused("data has changed since own.pt was", result, "--checkpoint=own.pt")
    save_mdlm("gpt2.pt", model_of(), tokenizer={"name": "gpt2"})
    refused("has other settings: name", result, "--checkpoint=gpt2.pt", "--data=data")


def test_ppl_of_a_checkpoint(world):
    ppl = "--checkpoint=last.pt", "--data=data", "--repeats=2", "--rows=5"
    start("eval", *ppl, "--label=tiny")
    found = read_json("last.pt.ppl.json")
    tokens, meta = data.open_split("data", "val")
    text, n = meta["val"], data.n_rows(tokens, 16)
    rows, nats = data.rows(tokens, [i * n // 5 for i in range(5)], 16), {}
    for name in "soft", "plain":
        nll, ce, masks = bound(MDLM.load("last.pt", ema=True), rows, name == "soft", 1, repeats=2)
        nats[name] = nll / 16
        mean, se = nats[name].mean().item(), nats[name].std().item() / 5**0.5
        # the loss is over L positions, the text in L − 2 of them
        bits = mean / math.log(2) * 16 / 14 / (text["bytes"] / text["tokens"])
        assert found["values"][name] == pytest.approx({
            "nats_per_token": mean, "nats_per_token_se": se, "ppl": math.exp(mean),
            "ppl_se": math.exp(mean) * se, "bits_per_byte": bits,
            "ce_per_masked_token": ce.sum().item() / masks.sum().item()})
    gain = nats["plain"] - nats["soft"]
    assert found["values"]["gain"] == pytest.approx({
        "nats_per_token": gain.mean().item(), "nats_per_token_se": gain.std().item() / 5**0.5})
    for other in "ema=False", "seed=2", "floor=0", "repeats=1", "dtype=bfloat16":
        other = *ppl, f"--{other}"
        refused("^last.pt.ppl.json has other settings: ", start, "eval", *other)
        assert result(*other)["values"] != found["values"]
    binary = result("--checkpoint=binary.pt", "--data=data", "--rows=1")["values"]
    nll = bound(MDLM.load("binary.pt"), data.rows(tokens, [0], 16), False, 1)[0]
    assert [*binary] == ["binary"] and binary["binary"]["nats_per_token"] == nll.item() / 16
    assert binary["binary"]["ppl_se"] is None  # and not NaN


def test_two_ranks_measure_what_one_does_and_write_once(world):
    words = "--checkpoint=last.pt", "--data=data", "--batch_size=3", "--device=cpu"
    done = torchrun(lab_eval.__file__, *words, "--out=two.json", cwd=".")
    assert (done.returncode, done.stdout.count("written to two.json")) == (0, 1), done.stderr
    assert read_json("two.json")["values"] == result(*words)["values"]


def test_a_result_is_not_lost_on_a_full_disk(world, monkeypatch, capsys):
    words = "--checkpoint=last.pt", "--data=data", "--rows=5"
    monkeypatch.setattr(lab_eval, "write_text", Mock(side_effect=OSError))
    with pytest.raises(OSError):
        result(*words)
    assert "with feedback: nats_per_token " in capsys.readouterr().out


def test_feedback_tells_shares_of_spans_and_the_bound_by_t(world, monkeypatch):
    def right(model, rows, span, passes, soft, batch_size):
        assert (span.sum(1) == 4).all()
        return (torch.arange(len(rows)) % passes < 1 + soft).double()
    monkeypatch.setattr(feedback, "right", right)
    words = "--checkpoint=last.pt", "--data=data", "--rows=20"
    found = result(*words, "--width=4", "--passes=4,2", script="feedback")["values"]
    for n, plain, soft in (4, 5, 10), (2, 10, 20):  # of 20
        shares = {"plain": plain / 20, "soft": soft / 20, "gain": (soft - plain) / 20}
        errors = {f"{name}_se": math.sqrt(p * (1 - p) / 19) for name, p in shares.items()}
        assert found[f"spans right in {n} passes"] == pytest.approx(shares | errors)
    ppl = result(*words, "--floor=0")
    tenths = [row for title, row in found.items() if title.startswith("nats")]
    assert len(tenths) == 10
    for name in "plain", "gain":
        mean = np.mean([tenth[name] for tenth in tenths])
        assert mean == pytest.approx(ppl["values"][name]["nats_per_token"], rel=1e-4)


def test_three_opinions_on_samples(world, lm, monkeypatch):
    mauve = {}  # the arguments of its last call
    compute = lambda **given: mauve.update(given) or types.SimpleNamespace(mauve=0.25)
    monkeypatch.setitem(sys.modules, "mauve", types.SimpleNamespace(compute_mauve=compute))
    samples_file("samples.jsonl", ["abcdef", "bcdefg", "cdefgh", "defgh"])
    data.prepare(enumerate(["abcdefghij" * 9] * 9), "letters", BYTES, val_docs=3)
    words = "--samples=samples.jsonl", "--data=letters", "--seed=7"
    found = result(*words, script="eval_samples")
    nats, tokens, features = score(["$abcdef$$", "$bcdefg$$", "$cdefgh$$", "$defgh$$"])
    ppl, se = gen_ppl(nats, tokens)
    assert found["values"]["samples"] == pytest.approx({
        "gen_ppl": ppl, "gen_ppl_se": se, "nfe": 4.5, "mauve": 0.25, "n": 4,
        "entropy": math.log(6**3 * 5) / 4, "entropy_min": math.log(5), "references": 4, "seed": 7})
    assert (mauve["mauve_scaling_factor"], mauve["seed"]) == (5, 7)
    np.testing.assert_array_equal(mauve["p_features"], features)
    rows, _ = eval_samples.held_out_samples(eval_samples.Config(data="letters", seed=7), 6, 4)
    theirs = score([row["text"] for row in rows])[2]
    np.testing.assert_array_equal(mauve["q_features"], theirs)
    own = result("--samples=", *words[1:], "--length=16", "--rows=3", script="eval_samples")
    assert own["values"]["samples"].items() >= {"n": 3, "references": 3, "nfe": 0}.items()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError):
        start("eval_samples", *words)
    assert "entropy" in read_json("samples.samples.json")["values"]["samples"]  # needs no package
