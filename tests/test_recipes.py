"""RECIPES.md: its blocks run as they stand, on stubs with the interfaces of the models."""

import contextlib
import re
import types
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import checkpoint
import data
import mdlm
import sample_dream
from conftest import random_mdlm
from mdlm import TwoPass
from softmask import SoftMask

V, D, MASK = 12, 6, 9
RECIPES = types.SimpleNamespace(torch=torch, contextlib=contextlib)
PAGE = (Path(__file__).parents[1] / "RECIPES.md").read_text(encoding="utf-8")
*BLOCKS, SAMPLE, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.S)
for block in BLOCKS:
    exec(block, vars(RECIPES))


def soft_mask(on=True, k=3):
    sm = SoftMask(MASK, k, omega_s=0.9, omega_b=-1.5)
    if not on:
        sm.raw_s.data.fill_(-1e3)
    return sm


class Hub(nn.Module):
    """A stub of LLaDA and Dream: ids or embeddings, positions that see each other, .logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.get_input_embeddings = lambda: self.emb

    def forward(self, input_ids=None, inputs_embeds=None):
        h = self.emb(input_ids) if inputs_embeds is None else inputs_embeds
        self.seen = h
        return types.SimpleNamespace(logits=self.head(h + (h @ h.mT).softmax(-1) @ h))


class Ids(nn.Module):
    """A stub of BD3LM's and SEDD's backbones: ids and a noise level, and no embeddings."""

    def __init__(self, of_scores=False):
        super().__init__()
        torch.manual_seed(1)
        self.vocab_embed, self.head, self.of_scores = nn.Embedding(V, D), nn.Linear(D, V), of_scores
        self.vocab_embed.embedding = self.vocab_embed.weight  # as it is called there

    def forward(self, ids, sigma):
        self.seen = h = self.vocab_embed(ids)
        if self.of_scores:  # scaled by the noise, and 0 for the token that is there
            scores = self.head(h + (h @ h.mT).softmax(-1) @ h) - sigma[:, None, None]
            return scores.scatter(-1, ids[..., None], 0.0)
        n = ids.shape[1] // 2  # the noisy half also sees the clean one
        return self.head(h[:, :n] + (h[:, :n] @ h.mT).softmax(-1) @ h)


def test_mask_among_the_top_k_feeds_nothing_back():
    table, logits = torch.randn(V, D), torch.zeros(1, V)
    logits[0, MASK], logits[0, 2] = 9.0, 5.0
    sm = soft_mask(k=1)
    torch.testing.assert_close(sm.mix(table, *sm(logits))[0], table[MASK])
    assert sm(logits)[0] > 0.5
    lam, ids, _ = sm(RECIPES.without_mask(logits, MASK))
    assert ids.tolist() == [[2]] and 0 < lam < 0.9 and logits[0, MASK] == 9


def test_llada_keeps_what_is_known_and_feeds_back_at_every_mask():
    model, x = Hub(), torch.tensor([[1, 5, 3, 7] + 8 * [MASK]])
    plain = model(input_ids=x).logits
    assert torch.equal(RECIPES.llada_step(model, x, soft_mask()), plain)  # the first step
    assert torch.equal(RECIPES.llada_step(model, x, soft_mask(False), plain), plain)
    assert not torch.equal(RECIPES.llada_step(model, x, soft_mask(), plain), plain)
    assert torch.equal(model.seen[:, :4], model.emb(x[:, :4]))
    assert not torch.isclose(model.seen[:, 4:], model.emb(x[:, 4:])).all(-1).any()  # later blocks


def test_dream_shifts_before_it_feeds_back():
    model, x = Hub(), torch.tensor([[1, 5, MASK, 7, MASK, MASK]])
    first, own = RECIPES.dream_step(model, x, None), model(input_ids=x).logits
    assert torch.equal(first[:, 1:], own[:, :-1])
    assert torch.equal(RECIPES.dream_step(model, x, soft_mask(False), first), first)
    sm = soft_mask(k=1)
    assert not torch.equal(RECIPES.dream_step(model, x, sm, first), first)
    for i in 2, 4, 5:  # a mix of [MASK] and the guess that stands one place to the left
        lam, guess = sm(own[:, i - 1])[0], own[0, i - 1].argmax()
        expected = torch.lerp(model.emb.weight[MASK], model.emb.weight[guess], lam)
        torch.testing.assert_close(model.seen[0, i], expected)


def test_bd3lm_softens_the_noisy_half_alone():
    net, sigma = Ids(), torch.zeros(2)
    x0 = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))
    xt = x0.masked_fill(torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 1]]).bool(), MASK)
    own = net(torch.cat((xt, x0), 1), sigma)
    logits = RECIPES.bd3lm_feedback(net, xt, x0, sigma, MASK)
    off, on = (RECIPES.bd3lm_second_pass(net, xt, x0, sigma, soft_mask(on), logits)
               for on in (False, True))
    assert torch.equal(off, own) and not torch.equal(on, own)
    assert torch.equal(net.seen[:, 5:], net.vocab_embed(x0))
    assert ((net.seen[:, :5] != net.vocab_embed(xt)).any(-1) == (xt == MASK)).all()
    done = RECIPES.bd3lm_second_pass(net, x0, x0, sigma, soft_mask(), logits[:0])  # into the cache
    assert torch.equal(done, net(torch.cat((x0, x0), 1), sigma))
    assert torch.equal(net(torch.cat((xt, x0), 1), sigma), own)  # the hook is gone


def test_sedd_scores_become_probabilities_first():
    model, x = Ids(of_scores=True), torch.tensor([[1, MASK, 4, MASK]])
    sm, seen = soft_mask(), []
    for noise in 0.5, 5.0:
        sigma = torch.tensor([noise])
        own = model(x, sigma)
        assert torch.equal(RECIPES.sedd_second_pass(model, x, sigma, soft_mask(False), own), own)
        assert not torch.equal(RECIPES.sedd_second_pass(model, x, sigma, sm, own), own)
        seen.append(model.seen)
    torch.testing.assert_close(*seen)  # p does not know the noise, which scales all scores alike


def test_samples_from_python(tmp_path, monkeypatch, capsys):
    tok = data.tokenizer("bytes")
    model = random_mdlm(vocab_size=259, mask_id=258, length=12, omega_s=0.5)
    checkpoint.save(tmp_path / "out/stdlib/last.pt", kind="mdlm", step=1, seed=1,
                    config=vars(model.cfg), model=model.state_dict(), tokenizer=data.describe(tok))
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(SAMPLE, scope)
    rows = scope["ids"].tolist()
    assert len(rows) == 2 and len(rows[0]) == 12 and 258 not in rows[0] + rows[1]
    assert capsys.readouterr().out == "".join(tok.decode(row) + "\n" for row in rows)


def run_loop(net, x0, updates):
    """[(with feedback, whether ω moved, cross-entropy)] of the loop's updates."""
    torch.manual_seed(0)
    found = []

    def batches():
        for _ in range(updates):
            before = scope["model"].sm.raw_s.item()
            yield x0
            moved = scope["model"].sm.raw_s.item() != before
            found.append((scope["soft"], moved, scope["nll"].mean().item()))

    scope = {"torch": torch, "mdlm": mdlm, "SoftMask": SoftMask, "net": net, "mask_id": MASK,
             "batches": batches()}
    exec(LOOP, scope)
    return found


def test_a_loop_of_ones_own_trains_and_moves_omega_with_feedback_alone():
    net = random_mdlm(vocab_size=V, mask_id=MASK, length=6).net
    soft, moved, nll = zip(*run_loop(net, torch.full((8, 6), 3), 60))
    assert soft == moved and 40 < sum(soft) < 56
    assert sum(nll[-20:]) < 0.3 * sum(nll[:20])


def test_modern_bert_is_a_backbone():
    transformers = pytest.importorskip(
        "transformers", reason="would train and decode a random ModernBertForMaskedLM")
    torch.manual_seed(0)
    bert = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=2, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2))
    net, x0 = RECIPES.Encoder(bert.eval()), torch.randint(3, 9, (2, 6))
    xt = torch.where(torch.arange(6) % 2 == 0, MASK, x0)
    h = bert.model(input_ids=xt)[0]                                            # (2, 6, D)
    assert torch.equal(net.head(h), bert(input_ids=xt).logits)
    # Of the masked rows alone: some CPUs round products of other sizes differently.
    own = F.cross_entropy(net.head(h[xt == MASK]), x0[xt == MASK], reduction="none")
    off, plain, on = (TwoPass(net, soft_mask(on), MASK).token_nll(x0, xt, None, soft)[0]
                      for on, soft in ((False, True), (True, False), (True, True)))
    assert torch.equal(plain, own) and torch.equal(off, own) and not torch.equal(on, own)
    two = TwoPass(net, soft_mask(), MASK)
    two.token_nll(x0, xt, None, True)[0].sum().backward()
    assert two.sm.raw_s.grad != 0 and 0 < two.lam < 0.9
    ids = sample_dream.decode(two, xt, 3)
    assert torch.equal(ids[:, 1::2], x0[:, 1::2])
    for soft, moved, _ in run_loop(net, x0, 9):
        assert soft == moved
