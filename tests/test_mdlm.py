"""mdlm.py against §2.1, Eq. 2, Alg. 1, App. C.3, and numbers recorded from the authors' code."""

import copy
import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracles
from conftest import digest, gen, plain_omega, recording, spy
from mdlm import MDLM, LayerNorm, ModelConfig, compile_parts, corrupt, sample_times

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=64, n_cond=32, vocab_size=62, mask_id=61, length=16,
                   dropout=0.0, omega_s=0.7, omega_a=2.5, omega_b=-1.3)
SCALES = {"embedding": 0.3, "norm": 0.2, "adaLN_modulation.weight": 0.15, "adaLN": 0.3,
          "output_layer.linear": 0.5, "weight": 0.05}  # the first that is in a name, else 0.2


def recorded_model(**changes):
    torch.manual_seed(0)
    model, g = MDLM(replace(TINY, **changes)), gen(1234)
    for name, p in model.net.named_parameters():
        scale = next((s for part, s in SCALES.items() if part in name), 0.2)
        noise = scale * torch.randn(p.shape, generator=g)
        p.data = noise if "mlp" in name and "bias" in name else p.data + noise
    return model


def example(model, B=3):
    g = gen()
    x0 = torch.randint(0, model.cfg.mask_id, (B, model.cfg.length), generator=g)  # (B, L)
    t = sample_times(B, g)                                                        # (B,)
    return x0, corrupt(x0, t, model.cfg.mask_id, g), t


@pytest.mark.parametrize("changes", [{}, dict(k=1), dict(k=None), dict(time_conditioning=True)])
def test_loss_is_eq_2_and_alg_1_token_by_token(changes):
    """The oracle drops the [MASK] column from its logits. The model sets it to −1e6."""
    model, nll = recorded_model(**changes), []
    x0, xt, t = example(model)
    net, last, omega = model.net, model.net.output_layer.linear, plain_omega(model.sm)
    predict = lambda emb, t: (net.trunk(emb, t) @ last.weight.T + last.bias)[..., :61]
    for soft in None, omega:
        nll.append(model(x0, xt, t, soft=bool(soft)).double())
        by_hand = oracles.dense_nll(predict, net.table, x0, xt, t, 61, soft)
        torch.testing.assert_close(nll[-1], by_hand, rtol=1e-5, atol=0)
    assert (nll[1] - nll[0]).abs().max() > 1e-2  # SM is on in this comparison
    lam = [oracles.strength(oracles.softmax(z, omega["tau"]), **omega)
           for z in predict(F.embedding(xt, net.table), t)[xt == 61]]
    assert model.lam.item() == pytest.approx(sum(lam) / len(lam)) and not model.lam.requires_grad


@pytest.mark.parametrize("k, two_updates", [(3, False), (3, True), (None, False), (None, True)])
def test_pass_1_has_gradients_only_with_two_updates(k, two_updates, monkeypatch):
    """App. C.3. The head runs once a pass, and only on the masks: there is no (B, L, V) tensor."""
    model = recorded_model(k=k, two_updates=two_updates)
    x0, xt, t = example(model)
    heads, fed = spy(monkeypatch, model.net, "head"), spy(monkeypatch, model.sm, "forward")
    model(x0, xt, t, soft=True)
    assert [len(h) for h, in heads] == [(xt == 61).sum()] * 2
    assert [h.requires_grad for h, in heads] == [two_updates, True]
    assert fed[0][0].requires_grad == two_updates


@pytest.mark.parametrize("changes", [{}, dict(k=None, two_updates=True)])
def test_gradients_compiled_in_bf16_are_as_near_to_fp32_as_eager_ones(changes, monkeypatch):
    """On CUDA or on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    eager = recorded_model(**changes).to(device)
    batch = [x.to(device) for x in example(eager, B=16)]
    compile_parts(fast := copy.deepcopy(eager))
    gradients = []
    for model, half in (eager, False), (fast, True), (eager, True):
        with torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=False):
            nll = model(*batch, soft=True)
        gradients.append(torch.autograd.grad(nll.sum(), [*model.parameters()]))
    for g, *halves in zip(*gradients):
        compiled, not_compiled = ((half - g).norm() / g.norm() for half in halves)
        # The gradient of a single number, such as ω_s, may be nearly exact in bf16 by chance.
        assert g.norm() > 0 and compiled < 1.5 * not_compiled + (1e-3 if g.dim() else 0.05)


def test_omega_is_in_the_graph_of_a_binary_step_and_no_masks_cost_nothing():
    """Otherwise DDP waits for ω's gradient, or applies a wrong one."""
    model = recorded_model()
    x0, xt, t = example(model)
    assert torch.equal(model(x0, x0, t, soft=True), torch.zeros(3)) and model.lam == 0
    nll = model(x0, xt, t, soft=False).sum()
    assert not any(torch.autograd.grad(nll, [*model.sm.parameters()]))


def test_dropout_is_on_in_training(monkeypatch):
    """Twice in each of two blocks, in both passes [code]"""
    model, calls = recorded_model(dropout=0.3), spy(monkeypatch, F, "dropout")
    nll, other, fixed, same = (model.train(training)(*example(model), soft=True)
                               for training in (True, True, False, False))
    assert [call[1:3] for call in calls] == [(0.3, True)] * 16 + [(0.3, False)] * 16
    assert torch.equal(fixed, same) and not torch.equal(nll, other)


def test_norms_are_fp32_for_bf16_input():
    x, zero = torch.randn(2, 3, 64).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
    assert LayerNorm(64)(x, zero, zero).dtype == torch.float32


def test_weights_in_bf16_give_the_bits_of_autocast():
    model = recorded_model(time_conditioning=True).eval()
    fast, emb, t = copy.deepcopy(model), torch.randn(2, 12, 64), torch.rand(2)
    fast.net.cast_linears_(torch.bfloat16)
    assert fast.net.blocks[0].mlp[0].weight.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, same = (one.net.trunk(emb, t) for one in (model, fast))
        logits, equal = (one.net.head(hidden[0]) for one in (model, fast))
        time = model.net.time_embedding(t)
    assert torch.equal(hidden, same) and torch.equal(logits, equal)
    assert logits.dtype == hidden.dtype == torch.float32
    assert torch.equal(time, model.net.time_embedding(t))


def test_a_fresh_model_and_the_size_of_the_papers():
    fresh = MDLM(TINY)
    x0, xt, t = example(fresh)
    nll = fresh(x0, xt, t, soft=True)  # all tokens are equally likely, and [MASK] impossible
    assert (fresh.net.head(torch.zeros(1, 64)).softmax(-1)[:, 61] == 0).all()
    torch.testing.assert_close(nll, (xt == 61).sum(1) * math.log(61) / t)
    with torch.device("meta"):
        assert sum(p.numel() for p in MDLM(ModelConfig()).net.parameters()) == 169_627_218
    for name, size in (("n_layer", 0), ("n_head", 0), ("n_embd", 20), ("length", 2), ("dropout", 1),
                       ("k", 63)):
        with pytest.raises(ValueError, match=name):
            MDLM(replace(TINY, **{name: size}))


def test_recorded_corruption_and_logits(monkeypatch):
    golden = recording("mdlm")
    x0, xt, t, masked = golden["x0"], golden["xt"], golden["t"], golden["xt"] == 61
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: golden["u_mask"])
    assert torch.equal(corrupt(x0, t, 61, None), xt)
    for name, conditioned in (("raw_logits", False), ("raw_logits_timecond", True)):
        net = recorded_model(time_conditioning=conditioned).net
        logits = net.head(net.trunk(F.embedding(xt, net.table), t)[masked])[:, :61]
        torch.testing.assert_close(logits, golden[name][masked][:, :61], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, changes", [
    ("binary", {}), ("sm_k3_init", dict(omega_s=1e-6, omega_a=6.66, omega_b=-0.75)),
    ("sm_k3", {}), ("sm_k1", dict(k=1)), ("sm_temp", dict(k=None))])
def test_recorded_two_pass_loss_and_gradients(name, changes):
    golden, model = recording("mdlm"), recorded_model(**changes)
    if name == "sm_temp":
        model.sm.raw_tau.data.fill_(math.log(math.expm1(0.8)))  # τ = 0.8 in the recording
    batch = [golden[part] for part in ("x0_2", "xt_2", "t_2")]
    loss = model(*batch, soft=name != "binary").sum() / batch[0].numel()
    loss.backward()
    assert loss.item() == pytest.approx(golden[f"{name}/loss"].item(), rel=1e-5)
    omega = [p.grad.item() for p in model.sm.parameters()] + [0.0]  # no τ, unless k is None
    atol = 5e-6 if name == "sm_temp" else 5e-7
    np.testing.assert_allclose(omega[:4], golden[f"{name}/omega"], rtol=1e-4, atol=atol)
    norm = torch.cat([p.grad.flatten() for p in model.net.parameters()]).norm()
    assert norm.item() == pytest.approx(golden[f"{name}/norm"].item(), rel=2e-5)
    if f"{name}/grad" in golden:  # every tensor of θ, in five numbers each
        for p, theirs in zip(model.net.parameters(), golden[f"{name}/grad"].numpy(), strict=True):
            np.testing.assert_allclose(digest(p.grad), theirs, rtol=0, atol=1e-5 * theirs[0])
