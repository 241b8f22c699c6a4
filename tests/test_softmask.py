"""softmask.py against §3.1, Eq. 3, §3.3, App. B.1, C.3, C.9, and numbers of the authors' code."""

import math

import pytest
import torch
import torch.nn.functional as F

import oracles
import softmask
from conftest import gen, recording
from softmask import SoftMask

V, D, MASK = 11, 6, 7  # [MASK] need not be the last
OPEN = dict(omega_s=0.8, omega_a=2.0, omega_b=-1.5)  # ω at which SM does something


def example():
    g = gen()
    x = torch.randint(0, MASK, (2, 5), generator=g)                    # (B, L)
    x[torch.rand(2, 5, generator=g) < 0.6] = MASK
    return x, 2 * torch.randn(2, 5, V, generator=g), torch.randn(V, D, generator=g)


@pytest.mark.parametrize("k", [1, 3, V, None])
def test_sm_is_the_case_equation(k):
    """§3.1. Σπ = 1 and λ ∈ [0, ω_s): the mix is convex. §3.3: λ = 0 is MDLM bit for bit."""
    x, logits, table = example()
    sm, tau = SoftMask(MASK, k=k, tau=1.3, **OPEN), 1.3 if k is None else 1.0
    expected = [oracles.softened(table.double(), *row, dict(k=k, tau=tau, **OPEN))
                for row in zip(x, [MASK] * 2, logits)]
    lam, _, pi = sm(logits.flatten(0, 1))
    assert ((0 <= lam) & (lam < OPEN["omega_s"])).all() and (pi >= 0).all()
    torch.testing.assert_close(pi.sum(-1), torch.ones(len(pi)))
    whole, rows = torch.compile(sm.embed, fullgraph=True, backend="aot_eager"), logits[x == MASK]
    for embed, given in (sm.embed, logits), (sm.embed, rows), (whole, logits):
        soft = embed(table, x, given).double()
        torch.testing.assert_close(soft, torch.stack(expected), rtol=0, atol=5e-6)
    with torch.autocast("cpu", torch.bfloat16):  # λ, π and the mix stay in fp32
        mixed, half = sm.embed(table, x, logits.bfloat16()), logits.bfloat16().float()
    assert torch.equal(mixed, sm.embed(table, x, half))
    inputs = rows[:2].double().requires_grad_(), table.double().requires_grad_()
    torch.autograd.gradcheck(lambda rows, table: sm.mix(table, *sm(rows)), inputs, eps=1e-3,
                             atol=1e-3, rtol=1e-3)  # nothing is detached
    sm.raw_s.data.fill_(-1e3)  # ω_s = 0
    for given in logits, rows:
        assert torch.equal(sm.embed(table, x, given), F.embedding(x, table))


def test_reparameterisation():
    """App. B.1: ω comes back as given, and its constraints hold for any raw values."""
    sm, start = SoftMask(MASK), (1e-6, 10 / 1.5, -0.75)  # the paper's, App. B.2
    assert [w.item() for w in sm.omega] == pytest.approx(start, rel=0.03)
    for omega in (0.0, 1.0, -2.0), (0.3, 6.66, -0.75), (0.999, 100.0, -9.0):
        back = [w.item() for w in SoftMask(MASK, 3, *omega).omega]
        assert back == pytest.approx(omega, rel=2e-5, abs=2e-6)
    for raw in (-200.0, 0.0, 200.0):
        for p in sm.parameters():
            p.data.fill_(raw)
        omega_s, omega_a, omega_b = sm.omega
        assert 0 <= omega_s <= 1 and omega_a > 0 and omega_b < 0


def test_what_would_be_silently_wrong_is_refused():
    x, logits, table = example()
    for message, given, changes in (
            ("omega_s = 1.0", logits, dict(omega_s=1.0)), ("tau = 0", logits, dict(tau=0.0)),
            ("omega_a = 0", logits, dict(omega_a=0.0)), ("k = 0", logits, dict(k=0)),
            ("omega_b = nan", logits, dict(omega_b=math.nan)), ("k = 99", logits, dict(k=99)),
            ("mask_id = None", logits, dict(mask_id=None)),
            ("logits of 10 tokens for a table of", logits[..., :-1], {}),
            ("1 rows of logits for", logits[x == MASK][:1], {})):
        with pytest.raises(ValueError, match=message):
            SoftMask(**{"mask_id": MASK} | changes).embed(table, x, given)
    assert SoftMask(MASK).embed(table, x, logits * math.nan)[x == MASK].isnan().all()


def test_omega_never_becomes_bf16():
    """Near raw_s = −14, bf16 would round all of Adam's steps of 1e-2 away, and ω at once."""
    sm, moved = SoftMask(MASK), SoftMask(MASK).to("meta").to_empty(device="cpu")
    sm.register_buffer("ids", torch.arange(3))  # of a subclass
    host = torch.nn.ModuleDict({"sm": sm, "layer": torch.nn.Linear(2, 2)}).bfloat16()
    assert host["layer"].weight.dtype == torch.bfloat16 and sm.ids.dtype == torch.int64
    assert all(p.dtype == torch.float32 for p in moved.parameters())
    torch.testing.assert_close([*sm.parameters()], [*SoftMask(MASK).parameters()], rtol=0, atol=0)
    sm.load_state_dict({k: v.bfloat16() for k, v in sm.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="bfloat16, not float32"):
        sm.strength(torch.tensor(0.0))
    sm.float().strength(torch.tensor(0.0))


def test_a_bf16_table_gives_the_mix_and_the_gradients_of_an_fp32_one():
    x, logits, table = example()
    sm, table, rows = SoftMask(MASK, **OPEN), table.bfloat16(), logits[x == MASK].requires_grad_()
    copies = [table.clone().requires_grad_(), table.float().requires_grad_()]
    mixed, exact = (sm.mix(copy, *sm(rows)) for copy in copies)
    assert torch.equal(mixed, exact.bfloat16())  # rounded once, at the end
    R = torch.randn(mixed.shape, generator=gen()).bfloat16()
    found = torch.autograd.grad(mixed, (copies[0], rows), R)
    expected = torch.autograd.grad(exact, (copies[1], rows), R.float())
    assert [grad.dtype for grad in found] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=16e-3, check_dtype=False)


@pytest.mark.parametrize("k, vocabulary", [(3, 259), (1, 50_258), (3, 50_258), (6, 50_258)])
def test_the_largest_by_groups_are_the_largest(k, vocabulary):
    logits = torch.randn(5, vocabulary, generator=gen()).round(decimals=2)  # with ties
    logits[1, :-1] = -math.inf
    top, ids = softmask.largest(logits.requires_grad_(), k)
    assert torch.equal(top, logits.topk(k).values) and torch.equal(top, logits.gather(1, ids))
    assert all(len(set(row)) == k for row in ids.tolist())
    [grad] = torch.autograd.grad(top.sum(), logits)
    assert torch.equal(grad, torch.zeros_like(logits).scatter(1, ids, 1.0))


@pytest.mark.parametrize("k", [3, None])
def test_minus_infinity_and_a_row_of_nan_in_the_padding_give_no_nan(k):
    x, logits, table = example()
    x[0, 1] = 1
    logits[..., MASK] = -math.inf  # as a caller may set the logit of [MASK]
    logits[0, 0, 1:] = -math.inf   # a certain row
    logits[0, 1] = math.nan
    sm = SoftMask(MASK, k=k, **OPEN)
    out = sm.embed(table.requires_grad_(), x, logits.requires_grad_())
    grads = torch.autograd.grad(out.square().sum(), (table, logits, *sm.parameters()))
    assert all(part.isfinite().all() for part in (out, *grads))
    x = torch.zeros(2, 3, dtype=torch.long)  # no masks at all
    assert torch.equal(SoftMask(MASK, k).embed(table, x, torch.empty(0, V)), F.embedding(x, table))


@pytest.mark.parametrize("head", ["init/topk3", "half/topk3", "half/dense_T1.0"])
@pytest.mark.parametrize("inputs", ["rawlogits", "logp", "logp_remask", "logp_uniformrow"])
def test_recorded_numbers(head, inputs):
    """The authors' λ, tokens, embeddings, and gradients of a random linear functional of these."""
    gold = recording("softmask")
    get = lambda name: gold[f"{head}/{inputs}/{name}"]
    x, masked, init = gold["ids"], gold["maskpos"], gold[f"{head}/init"].tolist()
    sm = SoftMask(int(x[masked][0]), None if "dense" in head else 3, *init)
    rows = gold[f"in/{inputs}"][masked]
    lam, ids, _ = sm(rows)
    torch.testing.assert_close(lam, get("lambda")[masked], rtol=1e-5, atol=1e-12)
    if ids is not None and inputs != "logp_uniformrow":  # a uniform row has no order
        assert torch.equal(ids, get("indices")[masked][:, 1:])
    emb = sm.embed(gold["table"], x, rows)
    torch.testing.assert_close(emb, get("mixed_embedding"), rtol=1e-5, atol=1e-6)
    (emb * gold["R"]).sum().backward()
    for p, theirs in zip(sm.parameters(), ("scale", "steep", "centre_neg", "temperature")):
        grad = get(f"grad_raw_{theirs}")
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=2e-6 * init[0] + 1e-11)
