"""RECIPES.md, and the snippet of README: they run as they stand, on stubs of the models."""

import gzip
import math
import re
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import arena
import data
import finetune_dream
import mdlm
import sample
from conftest import gen, random_mdlm, save_mdlm, spy, start
from launch import read_json
from softmask import SoftMask
from test_readme import page

V, D, MASK = 12, 6, 9
RECIPES = types.SimpleNamespace()
blocks = lambda name: re.findall(r"```python\n(.*?)```", page(name), re.S)
*BLOCKS, SAMPLE, ORDER, GRADIENTS, LOOP, DISTILLED = blocks("RECIPES.md")
for block in BLOCKS:
    exec(block, vars(RECIPES))
small = dict(vocab_size=V, mask_id=MASK, length=6, omega_s=0.9, omega_b=-1.5)
close = torch.testing.assert_close


def soft_mask(on=True, k=3):
    sm = SoftMask(MASK, k, omega_s=0.9, omega_b=-1.5)
    sm.raw_s.data -= 0 if on else 1e3
    return sm


class Hub(nn.Module):
    """A stub of LLaDA and Dream: ids or embeddings, positions that see each other, .logits."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vocab_embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.vocab_embed.embedding = self.vocab_embed.weight  # as it is called in BD3LM and SEDD
        self.get_input_embeddings = lambda: self.vocab_embed

    def read(self, h, n):  # logits of the first n positions, which see all of h
        self.seen = h
        return self.head(h[:, :n] + (h[:, :n] @ h.mT).softmax(-1) @ h)

    def forward(self, input_ids=None, inputs_embeds=None):
        h = self.vocab_embed(input_ids) if inputs_embeds is None else inputs_embeds
        return types.SimpleNamespace(logits=self.read(h, h.shape[1]))


class BD3LM(Hub):
    def forward(self, ids, sigma):  # the noisy half also sees the clean one
        return self.read(self.vocab_embed(ids), ids.shape[1] // 2)


def arguments():
    """Those of RECIPES.bound: a model, its sm, x, x0 (4, 8), t (4,), fixed (4, 8)"""
    x0, t = torch.randint(MASK, (4, 8), generator=gen()), torch.tensor([0.2, 0.4, 0.6, 0.9])
    fixed = (torch.arange(8) < 2).expand(4, -1)
    x = torch.where(fixed, x0, mdlm.corrupt(x0, t, MASK, gen()))
    return Hub(), soft_mask(), x, x0, t, fixed


def test_all_together_runs(capsys):
    [block] = re.findall(r"```text\n(sm = SoftMask.*?)```", page("RECIPES.md"), re.S)
    model, _, *batch = arguments()
    batch = dict(zip(("x", "x0", "t", "fixed"), batch))
    before = model.head.weight.clone()
    exec(block, vars(RECIPES) | dict(model=model, batch=batch, batches=3 * [batch], mask_id=MASK,
                                     x=torch.full((1, 8), MASK)))
    assert not torch.equal(model.head.weight, before)
    *checks, on, off = capsys.readouterr().out.splitlines()
    assert len(checks) == 6 and all("tensor" in x and f" {MASK}" not in x for x in (on, off))


def test_corrupt_masks_with_probability_t_and_never_what_is_fixed():
    x0, fixed = torch.randint(MASK, (2000, 9), generator=gen()), torch.arange(9) % 4 == 0
    torch.manual_seed(0)
    x, t = RECIPES.corrupt(x0, MASK, fixed.expand(2000, -1))
    assert torch.equal(x[:, fixed], x0[:, fixed]) and 1e-3 <= t.min() < 0.01 and t.max() > 0.99
    assert ((x == x0) | (x == MASK)).all()
    share = (x[:, ~fixed] == MASK).float().mean(1)
    for near in t < 0.2, t > 0.8:
        assert abs(share[near].mean() - t[near].mean()) < 0.03


def test_the_snippet_of_the_readme_runs():
    [block] = blocks("README.md")
    scope = {}
    exec(block, scope)
    learn = [scope["table"], *scope["head"].parameters(), *scope["sm"].parameters()]
    assert all(p.grad is not None and p.grad.any() for p in learn)


@pytest.mark.parametrize("name, shift", [("one_pass", 0), ("dream_pass", 1)])
def test_a_pass_feeds_back_to_every_mask_what_was_predicted_there(name, shift):
    """All but [MASK], which is likeliest. Dream's prediction stands one place to the left."""
    model, one_pass, x = Hub(), getattr(RECIPES, name), torch.tensor([[1, 5, MASK, 7, MASK, MASK]])
    model.head.bias.data[MASK] = 9.0
    first, own = one_pass(model, x, None), model(input_ids=x).logits[0]
    assert torch.equal(first[0, shift:], own[:6 - shift])
    sm, table = soft_mask(k=1), model.vocab_embed.weight
    one_pass(model, x, sm, first)
    own[:, MASK], expected = -torch.inf, table[x[0]]
    for i in 2, 4, 5:
        lam, guess = sm(own[i - shift, None])[0], own[i - shift].argmax()
        expected[i] = torch.lerp(table[MASK], table[guess], lam)
    close(model.seen[0], expected)


@pytest.mark.parametrize("soft", [False, True])
def test_bound_is_eq_2_of_the_second_pass(soft):
    model, sm, x, x0, t, _ = given = arguments()
    logits = model(input_ids=x).logits
    if soft:
        logits = RECIPES.one_pass(model, x, sm, logits)
    expected = 0.0
    for b, i in (x == MASK).nonzero():
        expected -= logits[b, i].log_softmax(-1)[x0[b, i]].item() / t[b].item()
    found = RECIPES.bound(RECIPES.one_pass, *given, soft)
    assert found.item() == pytest.approx(expected / 24, rel=1e-5)  # two of eight are fixed
    found.backward()  # pass 1 has no gradient, pass 2 has one to the model and, if soft, to ω
    assert model.head.weight.grad.any()
    assert all((p.grad is not None and p.grad.any()) == soft for p in sm.parameters())


@pytest.mark.parametrize("name, ahead", [("one_pass", 0), ("dream_pass", 0), ("one_pass", 1)])
def test_check_prints_what_is_wrong(name, ahead, capsys):
    """A model that knows the token at its own position or the one after it, by either rule."""
    model, sm, x, x0, *_ = given = arguments()
    known = 9 * F.one_hot(x0.roll(-ahead, 1), V)
    knows = lambda *args: getattr(RECIPES, name)(*args) + known
    RECIPES.check(knows, *given)
    off, *lines = capsys.readouterr().out.splitlines()
    shares = [*map(float, lines.pop(1).split()[-3:])]  # of tokens before, here and after
    assert off == "1. off is off: True"
    assert shares.pop(1 + ahead) == 1 and max(shares) < 0.5
    assert len({*map(float, lines.pop(2).split()[4:])} - {0.0}) == 3  # gradients
    first = RECIPES.without_mask(knows(model, x, sm)[x == MASK], MASK)
    entropy = torch.distributions.Categorical(logits=first).entropy().mean()
    plain, soft = (RECIPES.bound(knows, *given, on) for on in (False, True))
    (lam, ids, pi), table = sm(first), model.vocab_embed.weight
    m, mean = table[MASK], (pi[..., None] * table[ids]).sum(1)
    norm = torch.lerp(m, mean, lam[:, None]).norm(dim=1).mean() / m.norm()
    angle = torch.acos(F.cosine_similarity(mean, m, dim=-1)).rad2deg().mean()
    assert lines == [
        f"2. mean λ: {lam.mean() / 0.9:.0%} of ω_s, mean entropy: {entropy:.2f}",
        f"4. loss {plain:.3f} without feedback, with it {soft - plain:+.1e}",
        f"6. norm of the mix {norm:.2f} of [MASK]'s, angle of Σ π v {angle:.0f}°"]
    assert sm.raw_s.item() == soft_mask().raw_s.item()
    assert all(p.grad is None for p in (*sm.parameters(), *model.parameters()))


def watched(sm, batch, moved):
    """The batch, sixty times. Appends whether the update moved ω_s. sm: a function."""
    for _ in range(60):
        before = sm().raw_s.item()
        yield batch
        moved.append(sm().raw_s.item() != before)


def test_fit_trains_and_moves_omega_with_feedback_alone(monkeypatch):
    torch.manual_seed(0)
    model, sm, x, _, t, fixed = arguments()
    x0, moved, calls = torch.full_like(x, 3), [], spy(monkeypatch, RECIPES, "one_pass")
    batch = {"x": torch.where(x == MASK, x, x0), "x0": x0, "t": t, "fixed": fixed}
    RECIPES.fit(RECIPES.one_pass, model, sm, watched(lambda: sm, batch, moved), eta=1e-2)
    assert 40 < sum(moved) < 56 and len(calls) == 60 + sum(moved)
    assert RECIPES.bound(RECIPES.one_pass, model, sm, **batch, soft=True) < 0.5


def test_decode_fills_every_mask_and_shows_each_pass_the_last(monkeypatch):
    calls = spy(monkeypatch, RECIPES, "one_pass")
    x = torch.tensor([[1, 5, MASK, 7, MASK, MASK, MASK, MASK]])
    filled = RECIPES.decode(RECIPES.one_pass, Hub(), soft_mask(), x, 2)
    assert torch.equal(filled[x != MASK], x[x != MASK]) and not (filled == MASK).any()
    assert [((x == MASK).sum(), fed is None) for _, x, _, fed in calls] == [
        (5, True), (3, False), (1, False)]


def test_bd3lm_softens_the_noisy_half_alone():
    net, sigma = BD3LM(), torch.zeros(2)
    net.head.bias.data[MASK] = 9.0  # the likeliest, as it may be in SEDD
    x0 = torch.randint(9, (2, 5), generator=gen())
    xt = x0.masked_fill(torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 1]]).bool(), MASK)
    both = torch.cat((xt, x0), 1)
    own = net(both, sigma)
    assert torch.equal(RECIPES.soft_pass(net, xt, sigma, soft_mask(False), own, x0), own)
    expected = net.vocab_embed(both)
    rows = RECIPES.without_mask(own[xt == MASK], MASK)
    expected[both == MASK] = soft_mask().embed(net.vocab_embed.weight, xt, rows)[xt == MASK]
    for x, logits, clean in (xt, own, x0), (both, own.repeat(1, 2, 1), None):  # None: SEDD
        RECIPES.soft_pass(net, x, sigma, soft_mask(), logits, clean)
        close(net.seen, expected)
    assert torch.equal(net(both, sigma), own)  # the hook is gone


def test_a_lambda_and_a_mix_of_ones_own():
    model = random_mdlm(**small)
    x0, t = torch.randint(MASK, (4, 6), generator=gen()), torch.full((4,), 0.7)
    for kind in RECIPES.Constant, RECIPES.OnTheSphere, RECIPES.Slerp:
        model.sm = kind(MASK, omega_s=0.4)
        model(x0, mdlm.corrupt(x0, t, MASK, gen()), t, soft=True).sum().backward()
        assert model.sm.raw_s.grad and 0 < model.lam < 0.4 + 1e-6
        lam, ids, pi = model.predict_sm(torch.randn(5, 16, generator=gen()))
        mixed = model.sm.mix(model.net.table, lam, ids, pi)
        assert (lam.std() == 0) == (kind is RECIPES.Constant)
        same = mixed.norm(dim=1).isclose(model.net.table[MASK].norm())
        assert same.all() == (kind is not RECIPES.Constant)
    # test_arena.py compares Slerp with the formula
    assert torch.equal(mixed, arena.Slerp(MASK).mix(model.net.table, lam, ids, pi))


@pytest.mark.parametrize("keep", [0.0, 0.75])
def test_a_rule_with_memory_feeds_back_the_average_at_every_mask(keep, monkeypatch):
    model = random_mdlm(**small | {"length": 8})
    x = torch.tensor([[1, 5, MASK, 7, MASK, MASK, MASK, MASK]])
    plain = sample.decode(model, x, sample.shares_of([2, 2, 1]), sample.Pick("maskgit_plus"))
    hidden = spy(monkeypatch, model.net, "hidden")  # emb, masks, t of each pass
    head = spy(monkeypatch, model.net, "head")  # what hidden returns
    fed = spy(monkeypatch, model.sm, "forward")
    assert torch.equal(RECIPES.decode_with_memory(model, x, 2, keep), plain) or keep
    memory = {}
    for (_, masks, _), [h], [rows] in zip(hidden, [*head], fed, strict=True):
        for i, z, row in zip(masks[1].tolist(), model.net.head(h), rows, strict=True):
            p = z.softmax(-1)
            memory[i] = keep * memory.get(i, p) + (1 - keep) * p
            close(row.exp(), memory[i])


def test_records_of_others_become_dialogues_and_texts(tmp_path):
    whole = RECIPES.dialogue([("system", "s"), ("user", "a\n\nc"), ("assistant", "b")])["messages"]
    turns = [{"from": "human", "value": "a\n\nc"}, {"from": "gpt", "value": "b"}]
    for record in (RECIPES.alpaca({"instruction": "a", "input": "c", "output": "b"}),
                   RECIPES.sharegpt({"conversations": turns, "system": "s"}),
                   RECIPES.trl({"prompt": whole[:2], "completion": whole[2:]}),
                   RECIPES.trl({"prompt": "a\n\nc", "completion": "b"})):
        found = finetune_dream.as_messages(record)
        assert found == whole[-len(found):] and len(found) > 1
    (tmp_path / "a.txt").write_text("once\n<|endoftext|>\ntwice\n")
    RECIPES.write_lines(tmp_path / "b.jsonl", RECIPES.stories(tmp_path / "a.txt"))
    (tmp_path / "c.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    assert [*RECIPES.unpacked(tmp_path / "c.gz")] == [{"text": "once"}, {"text": "twice"}]


def test_a_corpus_of_another_tokenizer_trains_and_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tok = types.SimpleNamespace(eos_token_id=70_001, encode=lambda n, **_: range(n))
    ids = RECIPES.ids_of(tok, 40 * [9])
    assert ids == 40 * [*range(9), 70_001]
    RECIPES.write_corpus("mine", 9 * ids, ids, val_bytes=720, vocab_size=70_002, bos=70_000,
                         eos=70_001)
    start("train", "--data=mine", "--out_dir=run", "--n_layer=1", "--n_head=2", "--n_embd=8",
          "--n_cond=8", "--length=12", "--batch_size=4", "--micro_batch=4", "--steps=2",
          "--device=cpu")
    start("eval", "--checkpoint=run/last.pt", "--device=cpu")
    values = read_json("run/last.pt.ppl.json")["values"]["soft"]
    nats = values["nats_per_token"] * 12 / (10 * 720 / 400)  # per byte of a row
    assert values["bits_per_byte"] * math.log(2) == pytest.approx(nats)


def test_samples_from_python(tmp_path, monkeypatch, capsys):
    save_mdlm(tmp_path / "out/small/last.pt", random_mdlm(vocab_size=259, mask_id=258, length=12))
    monkeypatch.chdir(tmp_path)
    exec(SAMPLE, scope := {})
    text = data.tokenizer("bytes").decode(scope["ids"].tolist())
    assert capsys.readouterr().out == text + "\n"
    exec(ORDER + GRADIENTS, scope)
    logp, [ids], total = scope["logp"], scope["ids"], scope["total"]
    assert len(scope["reads"]) == 6 and (logp < 0).all() and not (ids == 258).any()
    close(total, logp.sum())
    total.backward()
    assert scope["model"].net.blocks[0].attn_qkv.weight.grad.any()


def test_a_loop_of_ones_own_trains_and_moves_omega_with_feedback_alone(monkeypatch):
    moved, calls = [], spy(monkeypatch, mdlm.TwoPass, "token_nll")
    batches = watched(lambda: scope["model"].sm, torch.full((8, 6), 3), moved)
    scope = {"torch": torch, "mdlm": mdlm, "SoftMask": SoftMask, "net": random_mdlm(**small).net,
             "mask_id": MASK, "batches": batches}
    exec(LOOP, scope)
    assert [soft for *_, soft in calls] == moved and 40 < sum(moved) < 56
    assert scope["nll"].mean() < 0.5


def test_a_distilled_model_gets_the_divergence_from_its_teacher_at_every_mask():
    nets = [random_mdlm(**small, seed=seed, dropout=0.0).net for seed in (0, 1)]
    exec(DISTILLED, scope := {"mdlm": mdlm})
    model = scope["Distilled"](nets[0], soft_mask(), MASK)
    x0, t = torch.randint(MASK, (4, 6), generator=gen()), torch.full((4,), 0.6)
    xt = mdlm.corrupt(x0, t, MASK, gen())
    masks = (xt == MASK).nonzero(as_tuple=True)
    own, teacher = (net.head(net.hidden(F.embedding(xt, net.table), masks, t)) for net in nets)
    model.teacher = teacher
    p, q = teacher.softmax(-1), own.softmax(-1)
    close(model.token_nll(x0, xt, t, False)[0], (p * (p / q).log()).nansum(-1))
    model.token_nll(x0, xt, t, True)[0].sum().backward()
    assert model.sm.raw_s.grad


def test_modern_bert_takes_feedback_before_its_norm():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    bert = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=2, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2))
    bert.eval()
    x0 = torch.randint(3, 9, (2, 6))
    fixed = (torch.arange(6) > 3).expand(2, -1)
    sm = soft_mask()
    x, t = torch.where(torch.arange(6) % 2 == 0, MASK, x0), torch.full((2,), 0.5)
    own = bert(input_ids=x).logits
    assert torch.equal(RECIPES.one_pass(bert, x, soft_mask(False), own), own)
    first, second = (RECIPES.bound(RECIPES.one_pass, bert, sm, torch.where(fixed, pad, x), x0, t,
                                   fixed, True, attention_mask=~fixed) for pad in (1, 2))
    close(first, second)  # padding changes nothing
    first.backward()
    assert sm.raw_s.grad != 0 and bert.get_input_embeddings().weight.grad[MASK].any()
