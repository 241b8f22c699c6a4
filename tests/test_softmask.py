"""softmask.py read against §3.1, Eq. 3, §3.3, App. B.1, C.3 and C.9, then against recorded numbers of the authors' code."""

import copy
import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from softmask import SoftMask, time_gain

V, D, MASK = 11, 6, 10
OPEN = dict(omega_s=0.8, omega_a=2.0, omega_b=-1.5)  # ω at which SM does something


def example(seed=0, B=2, L=5):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, MASK, (B, L), generator=g)                    # (B, L)
    x[torch.rand(B, L, generator=g) < 0.6] = MASK
    return x, 2 * torch.randn(B, L, V, generator=g), torch.randn(V, D, generator=g)


def oracle(x, logits, table, k, omega_s, omega_a, omega_b, tau=1.0):
    """§3.1 sm(x̂, p) and Eq. 3, position by position and entry by entry, in Python floats."""
    out = np.zeros((*x.shape, D))
    for b in range(x.shape[0]):
        for l in range(x.shape[1]):
            if x[b, l] != MASK:
                out[b, l] = table[x[b, l]].double()
                continue
            z = [math.exp(v / tau) for v in logits[b, l].tolist()]
            p = [v / sum(z) for v in z]
            minus_H = sum(v * math.log(v) for v in p)
            lam = omega_s / (1 + math.exp(-omega_a * (minus_H - omega_b)))
            top = sorted(range(V), key=lambda i: -p[i])[:k]
            for d in range(D):
                guess = sum(p[i] / sum(p[j] for j in top) * table[i, d].item() for i in top)
                out[b, l, d] = (1 - lam) * table[MASK, d].item() + lam * guess
    return torch.from_numpy(out)


@pytest.mark.parametrize("k", [1, 3, V, None])
def test_sm_is_the_case_equation(k):
    x, logits, table = example()
    sm = SoftMask(MASK, k=k, tau=1.3, **OPEN)
    expected = oracle(x, logits, table, k or V, tau=1.3 if k is None else 1.0, **OPEN)
    torch.testing.assert_close(sm.embed(table, x, logits).double(), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(sm.embed(table, x, logits[x == MASK]).double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("k", [1, 3, None])
def test_soft_mask_stays_on_the_simplex(k):
    """Σπ = 1, λ ∈ [0, 1): the mix is convex, so it never leaves the box that the embeddings span."""
    _, logits, table = example()
    lam, ids, pi = SoftMask(MASK, k=k, omega_s=0.999999)(logits.flatten(0, 1))
    assert ((0 <= lam) & (lam < 1)).all() and (pi >= 0).all()
    torch.testing.assert_close(pi.sum(-1), torch.ones(len(pi)))
    mixed = SoftMask(MASK, k=k).mix(table, lam, ids, pi)
    assert (mixed >= table.min(0).values - 1e-6).all() and (mixed <= table.max(0).values + 1e-6).all()


def test_eq3_at_five_points():
    sm = SoftMask(MASK, **OPEN)
    for minus_H in (0.0, -0.5, -1.5, -3.0, -10.0):
        lam = 0.8 / (1 + math.exp(-2.0 * (minus_H + 1.5)))
        assert sm.strength(torch.tensor(minus_H)).item() == pytest.approx(lam, rel=1e-5)


def test_certain_means_more_feedback():
    lam = SoftMask(MASK).strength(torch.linspace(-8, 0, 50))
    assert (lam.diff() > 0).all()


def test_zero_scale_is_binary_masking():
    """§3.3: λ = 0 is MDLM, bit for bit."""
    x, logits, table = example()
    for rows in (logits, logits[x == MASK]):
        assert torch.equal(SoftMask(MASK, **OPEN).embed(table, x, rows, gain=0.0), F.embedding(x, table))


def test_full_scale_top1_is_the_argmax():
    """§3.3: λ = 1, k = 1 embeds the most likely token."""
    x, logits, table = example()
    soft = SoftMask(MASK, k=1).mix(table, torch.ones(x.numel()), *SoftMask(MASK, k=1)(logits.flatten(0, 1))[1:])
    assert torch.equal(soft, table[logits.flatten(0, 1).argmax(-1)])


def test_reparameterisation_round_trip():
    for omega in ((0.3, 6.66, -0.75), (1e-6, 10 / 1.5, -0.01), (0.999, 40.0, -9.0)):
        assert [w.item() for w in SoftMask(MASK, 3, *omega).omega] == pytest.approx(omega, rel=2e-5, abs=2e-6)


def test_constraints_hold_wherever_the_raw_values_go():
    sm = SoftMask(MASK)
    for raw in (-50.0, 0.0, 50.0):
        for p in sm.parameters():
            p.data.fill_(raw)
        omega_s, omega_a, omega_b = sm.omega
        assert 0 <= omega_s <= 1 and omega_a > 0 and omega_b < 0


@pytest.mark.parametrize("bad", [dict(omega_s=1.0), dict(omega_s=-0.1), dict(omega_a=0.0), dict(omega_b=0.1), dict(k=0), dict(tau=0.0)])
def test_omega_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match="SoftMask needs"):
        SoftMask(MASK, **bad)


def test_bf16_host_does_not_freeze_omega():
    """In bf16, near raw_s = −14, 200 steps of 1e-2 would all round away."""
    host = torch.nn.ModuleDict({"sm": SoftMask(MASK), "layer": torch.nn.Linear(2, 2)}).to(torch.bfloat16)
    sm, before = host["sm"], host["sm"].omega[0].item()
    assert host["layer"].weight.dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in sm.parameters())
    optimizer = torch.optim.Adam(sm.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        (-sm.strength(torch.tensor(-0.1))).backward()
        optimizer.step()
    assert sm.omega[0].item() > 5 * before


def test_omega_in_bf16_is_refused():
    sm = SoftMask(MASK)
    sm.load_state_dict({k: v.bfloat16() for k, v in sm.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="bfloat16 would not learn"):
        sm.omega
    assert all(p.dtype == torch.float32 for p in SoftMask(MASK).to("meta").to_empty(device="cpu").parameters())


def test_rows_that_do_not_match_the_masks_are_refused():
    x, logits, table = example()
    with pytest.raises(ValueError, match="1 rows of logits for"):
        SoftMask(MASK).embed(table, x, logits[x == MASK][:1])


def test_parameters_are_three_scalars_and_tau_only_for_the_whole_vocabulary():
    assert sorted(SoftMask(MASK).state_dict()) == ["raw_a", "raw_b", "raw_s"]
    assert sorted(SoftMask(MASK, k=None).state_dict()) == ["raw_a", "raw_b", "raw_s", "raw_tau"]
    for k in (3, None):  # and every one of them learns: an unused parameter would stop DDP
        x, logits, table = example()
        sm = SoftMask(MASK, k=k, **OPEN)
        sm.embed(table, x, logits).square().sum().backward()
        assert all(p.grad is not None and p.grad != 0 for p in sm.parameters())


@pytest.mark.parametrize("k", [3, None])
def test_gradient_reaches_pass_one_only_if_asked(k):
    """App. C.3: SM does not detach; the caller's no_grad does."""
    x, logits, table = example()
    sm = SoftMask(MASK, k=k, **OPEN)
    logits.requires_grad_()
    sm.embed(table, x, logits).square().sum().backward()
    assert logits.grad[x == MASK].abs().sum() > 0 and logits.grad[x != MASK].abs().sum() == 0
    assert sm.embed(table, x, logits.detach()).requires_grad  # ω still learns
    with torch.no_grad():
        assert not sm.embed(table, x, logits).requires_grad


@pytest.mark.parametrize("k", [3, None])
def test_gradients_are_those_of_the_formula(k):
    sm = SoftMask(MASK, k=k, **OPEN).double()
    x, logits, table = example()
    rows = logits[x == MASK][:2]
    raws = [p.detach().clone() for p in sm.parameters()]

    def loss(*raws):  # fp32 inside, so a wide step
        for p, raw in zip(sm.parameters(), raws):
            p.data = raw
        return sm.mix(table, *sm(rows)).square().sum()

    loss(*raws).backward()
    for i, p in enumerate(sm.parameters()):
        up, down = ([r + h * (i == j) for j, r in enumerate(raws)] for h in (1e-2, -1e-2))
        grad = p.grad.item()
        assert grad == pytest.approx((loss(*up) - loss(*down)).item() / 2e-2, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("k", [3, None])
def test_minus_infinity_logits_give_no_nan(k):
    x, logits, table = example()
    logits[..., MASK] = -math.inf  # what a caller does with the mask's own logit
    logits[0, 0, 1:] = -math.inf   # a certain row
    logits.requires_grad_()
    out = SoftMask(MASK, k=k, **OPEN).embed(table, x, logits)
    out.square().sum().backward()
    assert out.isfinite().all() and logits.grad.isfinite().all()


def test_no_masks_is_legal():
    table, x = torch.randn(V, D), torch.zeros(2, 3, dtype=torch.long)
    assert torch.equal(SoftMask(MASK).embed(table, x, torch.empty(0, V)), F.embedding(x, table))


def test_bag_is_the_weighted_sum_with_the_same_gradients():
    _, logits, table = example()
    sm, grads = SoftMask(MASK, **OPEN), []
    lam, ids, pi = (t.detach() for t in sm(logits.flatten(0, 1)))
    for mix in (sm.mix, lambda t, lam, ids, pi: (1 - lam)[:, None] * t[MASK] + lam[:, None] * (pi[..., None] * t[ids]).sum(1)):
        t, p = table.clone().requires_grad_(), pi.clone().requires_grad_()
        mix(t, lam, ids, p).sin().sum().backward()
        grads.append((t.grad, p.grad))
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("k", [3, None])
def test_full_logits_compile_in_one_graph_under_autocast_too(k):
    x, logits, table = example()
    sm = SoftMask(MASK, k=k, **OPEN)
    whole = torch.compile(sm.embed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(table, x, logits), sm.embed(table, x, logits))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(sm.embed(table, x, logits.bfloat16()), sm.embed(table, x, logits), rtol=0.05, atol=0.05)
    assert sm.embed(table.bfloat16(), x, logits).dtype == torch.bfloat16  # the table's dtype comes out


def test_deepcopy_is_independent():
    sm = SoftMask(MASK)
    twin = copy.deepcopy(sm)
    twin.raw_s.data += 1
    assert sm.omega[0] != twin.omega[0]


def test_time_gain_table():
    """App. C.9, the strict switch of the released code: at t = t' the two step functions still exclude each other."""
    expected = {"none": (1, 1, 1), "linear": (0.8, 0.5, 0.1), "stepwise": (1, 0, 0),
                "linear-late": (0.2, 0.5, 0.9), "stepwise-late": (0, 1, 1)}
    for schedule, gains in expected.items():
        assert [time_gain(schedule, t, 0.5) for t in (0.8, 0.5, 0.1)] == pytest.approx(gains)
    assert [time_gain("stepwise", 0.3, switch) for switch in (0.2, 0.5)] == [1, 0]
    with pytest.raises(ValueError, match="'quadratic'.*stepwise-late"):
        time_gain("quadratic", 0.5, 0.5)


def test_with_a_model_that_takes_embeddings():
    """The ten lines of the docstring, on a stand-in with Hugging Face's interface: ω and the model learn together."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.layer, self.head = torch.nn.Embedding(V, D), torch.nn.Conv1d(D, D, 3, padding=1), torch.nn.Linear(D, V)

        def get_input_embeddings(self):
            return self.emb

        def forward(self, input_ids=None, inputs_embeds=None):
            h = self.emb(input_ids) if inputs_embeds is None else inputs_embeds
            output = type("Output", (), {})()
            output.logits = self.head(torch.relu(self.layer(h.mT).mT))
            return output

    model, sm, x = Model(), SoftMask(mask_id=MASK, k=3, **OPEN), example()[0]
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        logits = model(input_ids=x).logits
    emb = sm.embed(table, x, logits)
    out = model(inputs_embeds=emb).logits
    assert not torch.equal(out, logits)
    F.cross_entropy(out[x == MASK], torch.zeros_like(x[x == MASK])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in [*sm.parameters(), *model.parameters()])


RECORDED = os.path.join(os.path.dirname(__file__), "golden", "softmask.npz")


@pytest.mark.parametrize("head", ["init/topk3", "half/topk3", "half/dense_T1.0"])
@pytest.mark.parametrize("inputs", ["rawlogits", "logp", "logp_remask", "logp_uniformrow"])
def test_recorded_numbers(head, inputs):
    """Their λ, tokens, embeddings, and gradients of a random linear functional of the embeddings."""
    with np.load(RECORDED) as z:
        gold = {name: torch.from_numpy(z[name]) for name in z}
    get = lambda name: gold[f"{head}/{inputs}/{name}"]
    if f"{head}/{inputs}/lambda" not in gold:
        pytest.fail("recording is not there")
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
    theirs = dict(raw_s="raw_scale", raw_a="raw_steep", raw_b="raw_centre_neg", raw_tau="raw_temperature")
    for name, p in sm.named_parameters():
        torch.testing.assert_close(p.grad, get(f"grad_{theirs[name]}"), rtol=1e-5, atol=2e-6 * init[0] + 1e-11)
