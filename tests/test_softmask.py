# SPDX-License-Identifier: MIT
"""softmask.py against §3.1, Eq. 3, §3.3, App. B.1, C.3, C.9, and the authors' numbers."""

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracles
import softmask
from softmask import SoftMask, time_gain

V, D, MASK = 11, 6, 10
OPEN = dict(omega_s=0.8, omega_a=2.0, omega_b=-1.5)  # ω at which SM does something


def example(seed=0, B=2, L=5):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, MASK, (B, L), generator=g)                    # (B, L)
    x[torch.rand(B, L, generator=g) < 0.6] = MASK
    return x, 2 * torch.randn(B, L, V, generator=g), torch.randn(V, D, generator=g)


@pytest.mark.parametrize("k", [1, 3, V, None])
def test_sm_is_the_case_equation(k):
    """Σπ = 1 and λ ∈ [0, ω_s): the mix is convex."""
    x, logits, table = example()
    sm, tau = SoftMask(MASK, k=k, tau=1.3, **OPEN), 1.3 if k is None else 1.0
    expected = table[x].double()
    for b, l in (x == MASK).nonzero():
        expected[b, l] = oracles.soft_mask(logits[b, l], table, MASK, k, tau=tau, **OPEN)
    for given in (logits, logits[x == MASK]):
        soft = sm.embed(table, x, given).double()
        torch.testing.assert_close(soft, expected, rtol=0, atol=5e-6)
    lam, _, pi = sm(logits.flatten(0, 1))
    assert ((0 <= lam) & (lam < OPEN["omega_s"])).all() and (pi >= 0).all()
    torch.testing.assert_close(pi.sum(-1), torch.ones(len(pi)))


def test_the_two_ends_of_the_interpolation():
    """§3.3: λ = 0 is MDLM bit for bit; λ = 1 with k = 1 embeds the most likely token."""
    x, logits, table = example()
    for given in (logits, logits[x == MASK]):
        soft = SoftMask(MASK, **OPEN).embed(table, x, given, gain=0.0)
        assert torch.equal(soft, F.embedding(x, table))
    rows, sm = logits.flatten(0, 1), SoftMask(MASK, k=1)
    soft = sm.mix(table, torch.ones(x.numel()), *sm(rows)[1:])
    assert torch.equal(soft, table[rows.argmax(-1)])


def test_reparameterisation():
    """App. B.1: ω comes back as it was given, and its constraints hold for any raw values."""
    for omega in ((0.3, 6.66, -0.75), (1e-6, 10 / 1.5, -0.01), (0.999, 40.0, -9.0)):
        back = [w.item() for w in SoftMask(MASK, 3, *omega).omega]
        assert back == pytest.approx(omega, rel=2e-5, abs=2e-6)
    sm = SoftMask(MASK)
    for raw in (-50.0, 0.0, 50.0):
        for p in sm.parameters():
            p.data.fill_(raw)
        omega_s, omega_a, omega_b = sm.omega
        assert 0 <= omega_s <= 1 and omega_a > 0 and omega_b < 0


def test_what_cannot_work_is_said_at_once():
    for bad in (dict(omega_s=1.0), dict(omega_s=-0.1), dict(omega_a=0.0), dict(omega_b=0.1),
                dict(k=0), dict(tau=0.0), dict(omega_a=math.inf), dict(omega_b=math.nan)):
        with pytest.raises(ValueError, match="SoftMask needs"):
            SoftMask(MASK, **bad)
    x, logits, table = example()
    with pytest.raises(ValueError, match="1 rows of logits for"):
        SoftMask(MASK).embed(table, x, logits[x == MASK][:1])
    with pytest.raises(ValueError, match="token id of \\[MASK\\]"):
        SoftMask(None)
    with pytest.raises(ValueError, match="k=99 of 11 tokens"):
        SoftMask(MASK, k=99).embed(table, x, logits)


def test_omega_never_becomes_bf16():
    """Near raw_s = −14, Adam's steps of 1e-2 would all round away."""
    host = torch.nn.ModuleDict({"sm": SoftMask(MASK), "layer": torch.nn.Linear(2, 2)}).bfloat16()
    sm, moved = host["sm"], SoftMask(MASK).to("meta").to_empty(device="cpu")
    assert host["layer"].weight.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in (*sm.parameters(), *moved.parameters()))
    sm.load_state_dict({k: v.bfloat16() for k, v in sm.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="bfloat16 would not learn"):
        sm.strength(torch.tensor(0.0))


@pytest.mark.parametrize("k", [3, None])
def test_gradients_of_logits_and_table_are_those_of_the_formula(k):
    """By differences, with a wide step: SM computes in fp32. Those of ω are recorded.

    So nothing is detached (App. C.3): the caller's no_grad decides.
    """
    x, logits, table = example()
    sm, rows = SoftMask(MASK, k=k, **OPEN), logits[x == MASK][:2]
    inputs = rows.double().requires_grad_(), table.double().requires_grad_()
    torch.autograd.gradcheck(lambda rows, table: sm.mix(table, *sm(rows)), inputs, eps=1e-3,
                             atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("k", [3, None])
def test_minus_infinity_logits_give_no_nan(k):
    x, logits, table = example()
    logits[..., MASK] = -math.inf  # what a caller does with the mask's own logit
    logits[0, 0, 1:] = -math.inf   # a certain row
    logits.requires_grad_()
    sm = SoftMask(MASK, k=k, **OPEN)
    out = sm.embed(table, x, logits)
    out.square().sum().backward()
    assert out.isfinite().all() and logits.grad.isfinite().all()
    assert all(p.grad.isfinite() for p in sm.parameters())
    x = torch.zeros(2, 3, dtype=torch.long)  # no masks at all
    assert torch.equal(SoftMask(MASK, k).embed(table, x, torch.empty(0, V)), F.embedding(x, table))


@pytest.mark.parametrize("k", [3, None])
def test_full_logits_compile_in_one_graph_under_autocast_too(k):
    x, logits, table = example()
    sm = SoftMask(MASK, k=k, **OPEN)
    whole = torch.compile(sm.embed, fullgraph=True, backend="aot_eager")
    expected = sm.embed(table, x, logits)
    torch.testing.assert_close(whole(table, x, logits), expected)
    with torch.autocast("cpu", torch.bfloat16):
        half = sm.embed(table, x, logits.bfloat16())
    # only what comes in is rounded, not the mix
    torch.testing.assert_close(half, sm.embed(table, x, logits.bfloat16()))
    assert sm.embed(table.bfloat16(), x, logits).dtype == torch.bfloat16  # the table's dtype
    rows = logits.flatten(0, 1).bfloat16()
    for out, same in zip(sm(rows), sm(rows.float())):  # λ and π are fp32 for logits of any dtype
        assert out is same is None or out.dtype == same.dtype and torch.equal(out, same)


def test_time_gain_table():
    """App. C.9. The switch is strict [code], so at t = t' one of the step functions is 1."""
    times = 0.8, math.nextafter(0.5, 1), 0.5, 0.1
    expected = {"none": (1, 1, 1, 1), "linear": times, "linear-late": [1 - t for t in times],
                "stepwise": (1, 1, 0, 0), "stepwise-late": (0, 0, 1, 1)}
    for schedule, gains in expected.items():
        assert [time_gain(schedule, t, 0.5) for t in times] == pytest.approx(gains)
    with pytest.raises(ValueError, match="'quadratic'.*stepwise-late"):
        time_gain("quadratic", 0.5, 0.5)


RECORDED = os.path.join(os.path.dirname(__file__), "golden", "softmask.npz")
THEIRS = dict(raw_s="raw_scale", raw_a="raw_steep", raw_b="raw_centre_neg",
              raw_tau="raw_temperature")


@pytest.mark.parametrize("head", ["init/topk3", "half/topk3", "half/dense_T1.0"])
@pytest.mark.parametrize("inputs", ["rawlogits", "logp", "logp_remask", "logp_uniformrow"])
def test_recorded_numbers(head, inputs):
    """The authors' λ, tokens, embeddings, and gradients of a random linear functional of these."""
    with np.load(RECORDED) as z:
        gold = {name: torch.from_numpy(z[name]) for name in z}
    get = lambda name: gold[f"{head}/{inputs}/{name}"]
    x, masked, table = gold["ids"], gold["maskpos"], gold["table"]
    init = gold[f"{head}/init"].tolist()
    sm = SoftMask(int(x[masked][0]), None if "dense" in head else 3, *init)
    rows = gold[f"in/{inputs}"][masked]
    lam, ids, pi = sm(rows)
    torch.testing.assert_close(lam, get("lambda")[masked], rtol=1e-5, atol=1e-12)
    if ids is not None and inputs != "logp_uniformrow":  # a uniform row has no order
        assert torch.equal(ids, get("indices")[masked][:, 1:])
    emb = sm.embed(table, x, rows)
    torch.testing.assert_close(emb, get("mixed_embedding"), rtol=1e-5, atol=1e-6)
    (emb * gold["R"]).sum().backward()
    for name, p in sm.named_parameters():
        grad = get(f"grad_{THEIRS[name]}")
        torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=2e-6 * init[0] + 1e-11)


def test_the_worked_example_is_right(capsys):
    """`python softmask.py`: its numbers are those of the oracle, and the module says its ω."""
    softmask.example()
    out = capsys.readouterr().out
    logits = torch.tensor([2.0, 1.2, -0.5, -1.0, -math.inf])
    p = oracles.softmax(logits)
    minus_H = sum(v * math.log(v) for v in p if v > 0)
    lam = 0.9 / (1 + math.exp(-3 * (minus_H + 1)))
    assert f"cat {p[0]:.3f}" in out and f"−H(p)   {minus_H:.3f} nats" in out
    assert f"λ       {lam:.3g}  (Eq. 3)" in out and f"cat {p[0] / sum(p[:3]):.3f}" in out
    assert "SoftMask(k=3, omega_s=0.9, omega_a=3, omega_b=-1)" in out
