"""mdlm.py against §2.1, Eq. 2, Alg. 1 and App. C.3, and recorded numbers of the authors' code."""

import copy
import functools
import itertools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import chunks
import oracles
from chunks import in_chunks
from conftest import digest, plain_omega, spy
from mdlm import MDLM, ModelConfig, corrupt, sample_times

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=64, n_cond=32, vocab_size=62, mask_id=61, length=16,
                   dropout=0.0, omega_s=0.7, omega_a=2.5, omega_b=-1.3)
SCALES = {"embedding": 0.3, "norm": 0.2, "adaLN_modulation.weight": 0.15, "adaLN": 0.3,
          "output_layer.linear": 0.5, "weight": 0.05}  # of the first that is in the name, else 0.2


def recorded_model(**changes):
    """The tiny network of the recordings, rebuilt from its two seeds. Digests are checked below."""
    torch.manual_seed(0)
    model = MDLM(replace(TINY, **changes))
    g = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, p in model.net.named_parameters():
            scale = next((s for part, s in SCALES.items() if part in name), 0.2)
            noise = scale * torch.randn(p.shape, generator=g)
            p.copy_(noise if "mlp" in name and "bias" in name else p + noise)
    return model


@pytest.fixture(scope="module")
def golden():
    with np.load(os.path.join(os.path.dirname(__file__), "golden", "mdlm.npz")) as z:
        return {name: torch.from_numpy(z[name]) for name in z}


def example(model, B=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x0 = torch.randint(0, model.cfg.mask_id, (B, model.cfg.length), generator=g)  # (B, L)
    t = sample_times(B, g)                                                        # (B,)
    return x0, corrupt(x0, t, model.cfg.mask_id, g), t


# ---- Eq. 2, Alg. 1


@pytest.mark.parametrize("changes", [{}, dict(k=1), dict(k=None), dict(time_conditioning=True)])
def test_loss_is_eq_2_and_alg_1_token_by_token(changes):
    """From dense logits without the [MASK] column, unlike the model."""
    model = recorded_model(**changes)
    x0, xt, t = example(model)
    net, last = model.net, model.net.output_layer.linear
    predict = lambda emb, t: (net.trunk(emb, t) @ last.weight.T + last.bias)[..., :61]
    nll = {}
    for soft in (False, True):
        nll[soft] = model(x0, xt, t, soft=soft).double()
        by_hand = oracles.dense_nll(predict, net.table, x0, xt, t, 61,
                                    plain_omega(model.sm) if soft else None)
        torch.testing.assert_close(nll[soft], by_hand, rtol=1e-5, atol=0)
    assert (nll[True] - nll[False]).abs().max() > 1e-2  # SM is on in this comparison


# ---- rows and chunks


@pytest.mark.parametrize("k", [3, None])
def test_chunks_equal_whole_and_two_updates_are_others(k, monkeypatch):
    """Loss and all gradients, θ and ω, whatever the size of chunks and whether they run again.

    App. C.3: the first pass gets a gradient. The table is in the mix, too: attention is probed.
    """
    attention = []
    for two_updates, size in itertools.product((False, True), (4096, 7)):
        monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * 62 * size)
        monkeypatch.setattr(chunks, "BUDGET", 4 * 62 * size)
        model = recorded_model(k=k, two_updates=two_updates)
        heads = spy(monkeypatch, model.net, "head")
        nll = model(*example(model), soft=True)
        whole_passes = len(heads)  # two, in as many chunks each
        nll.sum().backward()
        again = whole_passes // 2 * (1 + (two_updates or k is None)) if size == 7 else 0
        assert len(heads) - whole_passes == again
        results = [nll.detach(), *(p.grad for p in model.parameters())]
        if size == 4096:
            whole = results
            attention.append(model.net.blocks[0].attn_qkv.weight.grad)
        torch.testing.assert_close(results, whole, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*attention, rtol=1e-3)


def test_in_chunks_keeps_to_its_budget(monkeypatch):
    V, sizes = 10, []
    monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * V * 5)
    monkeypatch.setattr(chunks, "BUDGET", 4 * V * 24)

    def fn(h, u):
        sizes.append(len(h))
        return h * u, h.sum(1)

    h, u = torch.randn(12, V, requires_grad=True), torch.rand(12, 1)
    for N, keeps, forward, backward in ((12, 2, [5, 5, 2], []), (12, 3, [5, 5, 2], [2, 5, 5]),
                                        (5, 9, [5], []), (0, 9, [0], [])):
        sizes.clear()
        outs = in_chunks(fn, h[:N], u[:N], V=V, keeps=keeps)
        assert sizes == forward and [len(out) for out in outs] == [N, N]
        sum(out.sum() for out in outs).backward()
        assert sizes[len(forward):] == backward  # beyond the budget, each chunk runs again
    sizes.clear()
    with torch.no_grad():
        in_chunks(fn, h, u, V=V, keeps=3)
    monkeypatch.setattr(chunks, "BUDGET", 4 * V * 7 * 4)
    in_chunks(fn, h.detach().to("meta"), u.to("meta"), V=V)  # not a CPU: 7 tensors share BUDGET
    assert sizes == [5, 5, 2, 4, 4, 4]


@pytest.mark.parametrize("k, two_updates", [(3, False), (3, True), (None, True)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: would check its compiled chunks"))])
def test_compiled_chunks_equal_eager_ones_and_compile_once(k, two_updates, device, monkeypatch):
    """For any number of rows; once with gradients and once without."""
    if device == "cpu":  # what is traced is the same, and nothing waits for a C++ compiler
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters["stats"]
    torch.manual_seed(0)
    cfg = replace(TINY, vocab_size=3100, mask_id=3099, k=k, two_updates=two_updates, n_layer=1)
    model = MDLM(cfg).to(device)
    torch.nn.init.normal_(model.net.output_layer.linear.weight, std=0.3)
    fast = copy.deepcopy(model)
    chunks.compile_parts(fast)
    graphs = []
    for N in (5000, 700, 0, 1, 2, 4097):
        h, x = torch.randn(N, 64, device=device), torch.randint(3099, (N,), device=device)
        results = []
        for one in (fast, model):
            one.zero_grad()
            here = h.clone().requires_grad_()
            mixed, lam, _ = one.feedback(here)                               # (N, D), (N,)
            nll = one.cross_entropy(here, x)                                 # (N,)
            (nll.sum() + mixed.square().sum()).backward()
            results.append([mixed, lam, nll, here.grad, *(p.grad for p in one.parameters())])
            with torch.no_grad():
                torch.testing.assert_close(one.feedback(here)[1], lam)
                torch.testing.assert_close(one.cross_entropy(here, x), nll)
        for ours, eager in zip(*results):
            if eager is not None:
                torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4 * (1 + N) ** 0.5)
        graphs.append(counted["unique_graphs"])
    assert len(set(graphs)) == 1, graphs  # two functions, with gradients and without
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: would check its gradients in bf16"))])
def test_compiled_gradients_in_bf16_are_as_near_to_those_in_fp32(device, monkeypatch):
    """Each parameter's, as near as eager ones are."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    eager = recorded_model().to(device)
    batch = [x.to(device) for x in example(eager, B=16)]
    fast = copy.deepcopy(eager)
    chunks.compile_parts(fast)

    def gradients(model, half):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=False):
            nll = model(*batch, soft=True)
        nll.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    exact, ours, theirs = gradients(eager, False), gradients(fast, True), gradients(eager, True)
    for name, g in exact.items():
        compiled, not_compiled = ((half[name] - g).norm() / g.norm() for half in (ours, theirs))
        # A gradient of one number, as those of ω, may be nearly exact in bf16 by chance.
        slack = 1e-3 if g.dim() else 0.05
        assert g.norm() > 0 and compiled < 1.5 * not_compiled + slack, name


def test_a_padded_vocabulary_gives_the_same_logits(monkeypatch):
    """As in compiled code."""
    net, h = recorded_model().net, torch.randn(5, 64)
    expected, products, whole = net.head(h), [], F.linear
    monkeypatch.setattr(F, "linear", lambda *args: products.append(whole(*args)) or products[-1])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    logits = net.head(h)
    assert products[0].shape == (5, 64) and logits.shape == (5, 62)
    torch.testing.assert_close(logits, expected)


class Watch(TorchDispatchMode):
    """Looks at every operation: the most rows of vocabulary size, and the waits for the device."""
    rows, waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, aten = func(*args, **(kwargs or {})), torch.ops.aten
        self.waits += func in (aten.nonzero.default, aten._local_scalar_dense.default)
        for x in out if isinstance(out, (tuple, list)) else [out]:
            new = isinstance(x, torch.Tensor) and func is not aten.t.default  # t: a view of weights
            if new and x.dim() > 1 and x.shape[-1] == 62:
                self.rows = max(self.rows, x.numel() // 62)
        return out


@pytest.mark.parametrize("k", [3, None])
def test_vocabulary_tensors_fit_a_chunk_and_the_device_is_waited_for_once(k, monkeypatch):
    """No (B, L, V) tensor in either pass, and one `nonzero` in a forward, soft or not."""
    monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * 62 * 5)
    model = recorded_model(k=k)
    batch = example(model)
    for soft in (True, False):
        with Watch() as watch:
            model(*batch, soft=soft)
        assert 0 < watch.rows <= 5 and watch.waits == 1


def test_omega_is_in_the_graph_of_a_binary_step_and_no_masks_cost_nothing():
    """Or DDP waits for its gradient, or applies a wrong one, when the coin says no."""
    model = recorded_model()
    x0, xt, t = example(model)
    assert torch.equal(model(x0, x0, t, soft=True), torch.zeros(3))
    model(x0, xt, t, soft=False).sum().backward()
    assert all(p.grad is not None and p.grad == 0 for p in model.sm.parameters())
    model(x0, xt, t, soft=True).sum().backward()  # added to the zeros, each to its own
    once = recorded_model()
    once(x0, xt, t, soft=True).sum().backward()
    for p, same in zip(model.sm.parameters(), once.sm.parameters()):
        torch.testing.assert_close(p.grad, same.grad)


# ---- the network


def test_dropout_is_on_in_training():
    """In both passes: λ is of the first [code], the loss of the second."""
    model = recorded_model(dropout=0.5)
    (nll, lam), (other, of_other) = ((model(*example(model), soft=True), model.lam)
                                     for _ in range(2))
    assert not torch.equal(nll, other) and lam != of_other


def test_bf16_autocast_stays_close_and_returns_fp32():
    model = recorded_model()
    batch = example(model)
    with torch.autocast("cpu", torch.bfloat16):
        nll = model(*batch, soft=True)
        assert model.net.head(torch.randn(2, 64)).dtype == torch.float32
        inside = model.net.time_embedding(batch[2])
    assert torch.equal(inside, model.net.time_embedding(batch[2]))
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, model(*batch, soft=True), rtol=0.05, atol=0.05)


def test_weights_in_bf16_give_the_bits_of_autocast_and_positions_stay_fp32():
    model = recorded_model(time_conditioning=True).eval()
    fast = copy.deepcopy(model)
    fast.net.cast_linears_(torch.bfloat16)
    assert fast.net.blocks[0].mlp[0].weight.dtype == torch.bfloat16
    emb, t = torch.randn(2, 12, 64), torch.rand(2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = [one.net.trunk(emb, t) for one in (model, fast)]
        assert torch.equal(*hidden)
        assert torch.equal(*(one.net.head(hidden[0][0]) for one in (model, fast)))
    cos = model.net.cos
    assert torch.equal(model.bfloat16().net.cos, cos) and cos.dtype == torch.float32
    assert not any("cos" in name for name in model.state_dict())


# ---- the authors' code


def test_parameter_count_of_the_paper():
    with torch.device("meta"):
        assert sum(p.numel() for p in MDLM(ModelConfig()).net.parameters()) == 169_627_218


def test_recorded_weights_are_rebuilt(golden):
    """Fresh init equals theirs under the same seed, and so does the perturbed state."""
    torch.manual_seed(0)
    for model, name in ((MDLM(TINY), "init"), (recorded_model(), "state")):
        rebuilt = np.stack([digest(p) for p in model.net.state_dict().values()])
        np.testing.assert_allclose(rebuilt, golden[name], rtol=1e-12)


def test_recorded_corruption_and_logits(golden, monkeypatch):
    x0, xt, t = golden["x0"], golden["xt"], golden["t"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", lambda *shape, **_: golden["u_mask"])
        assert torch.equal(corrupt(x0, t, 61, None), xt)
    masked = xt == 61
    for name, conditioned in (("raw_logits", False), ("raw_logits_timecond", True)):
        net = recorded_model(time_conditioning=conditioned).net
        logits = net.head(net.trunk(F.embedding(xt, net.table), t)[masked])[:, :61]
        torch.testing.assert_close(logits, golden[name][masked][:, :61], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, changes", [
    ("binary", {}), ("sm_k3_init", dict(omega_s=1e-6, omega_a=6.66, omega_b=-0.75)),
    ("sm_k3", {}), ("sm_k1", dict(k=1)), ("sm_temp", dict(k=None))])
def test_recorded_two_pass_loss_and_gradients(golden, name, changes):
    model = recorded_model(**changes)
    if name == "sm_temp":
        model.sm.raw_tau.data.fill_(math.log(math.expm1(0.8)))  # τ = 0.8 in the recording
    batch = [golden[part] for part in ("x0_2", "xt_2", "t_2")]
    loss = model(*batch, soft=name != "binary").sum() / batch[0].numel()
    loss.backward()
    assert loss.item() == pytest.approx(golden[f"{name}/loss"].item(), rel=1e-5)
    grads = {raw: p.grad.item() for raw, p in model.sm.named_parameters()}
    omega = np.array([grads.get(raw, 0.0) for raw in ("raw_s", "raw_a", "raw_b", "raw_tau")])
    atol = 5e-6 if name == "sm_temp" else 5e-7
    np.testing.assert_allclose(omega, golden[f"{name}/omega"], rtol=1e-4, atol=atol)
    norm = torch.cat([p.grad.flatten() for p in model.net.parameters()]).norm().item()
    assert norm == pytest.approx(golden[f"{name}/norm"].item(), rel=2e-5)
    if f"{name}/grad" in golden:  # every tensor of θ, in five numbers each
        digests = np.stack([digest(p.grad) for p in model.net.parameters()])
        expected = golden[f"{name}/grad"].numpy()
        scale = expected[:, :1]
        np.testing.assert_allclose(digests / scale, expected / scale, rtol=0, atol=1e-5)
