"""mdlm.py read against §2.1, Eq. 2, Alg. 1 and App. C.3, then against recorded numbers of the authors' code."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoint
import launch
import mdlm
from mdlm import MDLM, ModelConfig, corrupt, sample_times

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=64, n_cond=32, vocab_size=62, mask_id=61, length=16, dropout=0.0,
                   omega_s=0.7, omega_a=2.5, omega_b=-1.3)


def recorded_model(**changes):
    """The tiny network of the recordings, rebuilt from its two seeds (their digests are checked below)."""
    cfg = replace(TINY, **changes)
    torch.manual_seed(0)
    model = MDLM(cfg)
    g = torch.Generator().manual_seed(1234)
    scale = lambda name: (0.3 if "embedding" in name else 0.2 if "norm" in name else 0.15 if "adaLN" in name and "weight" in name
                          else 0.3 if "adaLN" in name else 0.5 if "output_layer.linear" in name
                          else 0.05 if "weight" in name else 0.2)
    with torch.no_grad():
        for name, p in model.net.named_parameters():
            noise = scale(name) * torch.randn(p.shape, generator=g)
            p.copy_(noise if "mlp" in name and "bias" in name else p + noise)
    return model


def digest(tensor):
    """A tensor in five numbers: its norm and four projections on fixed noise. Two tensors that agree here, agree."""
    x = tensor.detach().double().flatten()
    probes = torch.randn(4, x.numel(), generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)
    return torch.cat((x.norm()[None], probes @ x)).numpy()


@pytest.fixture(scope="module")
def golden():
    with np.load(os.path.join(os.path.dirname(__file__), "golden", "mdlm.npz")) as z:
        return {name: torch.from_numpy(z[name]) for name in z}


def example(model, B=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x0 = torch.randint(0, model.cfg.mask_id, (B, model.cfg.length), generator=g)  # (B, L)
    t = sample_times(B, g)                                                        # (B,)
    return x0, corrupt(x0, t, model.cfg.mask_id, g), t


# ---- §2.1 and Alg. 1 l.3-4


def test_masked_share_is_one_minus_alpha():
    t = torch.tensor([0.1, 0.5, 1.0])
    xt = corrupt(torch.zeros(3, 200_000, dtype=torch.long), t, 9, torch.Generator().manual_seed(0))
    torch.testing.assert_close((xt == 9).float().mean(1), 0.999 * t, rtol=0, atol=5e-3)
    assert ((xt == 9) | (xt == 0)).all()


def test_times_are_stratified_and_in_bounds():
    t = sample_times(64, torch.Generator().manual_seed(0), 0.2, 0.8)
    edges = torch.linspace(0.2, 0.8, 65)
    assert ((edges[:-1] <= t) & (t <= edges[1:] + 1e-6)).all()  # one in every slice
    micro = sample_times(512, torch.Generator().manual_seed(0))[3::16]
    assert abs(micro.mean() - 0.5) < 0.02  # strided micro-batches are stratified as well


# ---- Eq. 2, Alg. 1


def test_eq2_by_hand():
    """−1/t Σ_l 1[x_t^l = m] log p(x_0^l), token by token, from softmaxes without the [MASK] column."""
    model = recorded_model()
    x0, xt, t = example(model)
    h = model.net.trunk(F.embedding(xt, model.net.table), t)
    logits = (h @ model.net.output_layer.linear.weight.T + model.net.output_layer.linear.bias)[..., :61]
    for b in range(3):
        total = 0.0
        for l in range(16):
            if xt[b, l] == 61:
                z = [math.exp(v) for v in logits[b, l].tolist()]
                total -= math.log(z[x0[b, l]] / sum(z))
        assert model(x0, xt, t, soft=False)[b].item() == pytest.approx(total / t[b].item(), rel=1e-5)


def test_soft_forward_is_alg1_line_by_line():
    """l.6: p̃ from a plain pass; l.7: p from sm(x_t, p̃); l.8 the same loss. With (B, L, V) tensors, unlike the model."""
    model = recorded_model()
    x0, xt, t = example(model)
    net, table = model.net, model.net.table
    dense = lambda emb: net.head(net.trunk(emb, t).flatten(0, 1)).view(3, 16, 62)
    p = dense(model.sm.embed(table, xt, dense(F.embedding(xt, table)).detach())).log_softmax(-1)
    nll = -(p.gather(-1, x0[..., None]).squeeze(-1) * (xt == 61)).sum(1) / t
    torch.testing.assert_close(model(x0, xt, t, soft=True), nll)
    assert (model(x0, xt, t, soft=False) - nll).abs().max() > 1e-2  # SM is on in this comparison


def test_first_pass_has_no_gradient():
    """l.5: g at a detached θ. The table is used by the mix too, so pass 1 is probed through the attention weights."""
    grads = {}
    for two_updates in (False, True):
        model = recorded_model(k=None, two_updates=two_updates)
        x0, xt, t = example(model)
        model(x0, xt, t, soft=True).sum().backward()
        grads[two_updates] = model.net.blocks[0].attn_qkv.weight.grad
    model = recorded_model(k=None)
    soft = model.sm.embed(model.net.table, xt, model.net.head(model.net.trunk(F.embedding(xt, model.net.table), t)
                                                            .flatten(0, 1)[(xt == 61).flatten()]).detach())
    rows = model.net.head(model.net.trunk(soft, t).flatten(0, 1)[(xt == 61).flatten()])
    ce = F.cross_entropy(rows, x0[xt == 61], reduction="none")
    (ce / t.repeat_interleave((xt == 61).sum(1))).sum().backward()
    torch.testing.assert_close(grads[False], model.net.blocks[0].attn_qkv.weight.grad)
    assert not torch.allclose(grads[True], grads[False], rtol=1e-3)


@pytest.mark.parametrize("k", [3, None])
@pytest.mark.parametrize("two_updates", [False, True])
def test_chunks_equal_whole(k, two_updates, monkeypatch):
    """Loss and every gradient, θ and ω, whatever the size of the chunks and whether they are recomputed."""
    results = []
    for size in (4096, 7):
        monkeypatch.setattr(mdlm, "CPU_LOGITS", 4 * 62 * size)
        monkeypatch.setattr(mdlm, "BUDGET", 4 * 62 * size)
        model = recorded_model(k=k, two_updates=two_updates)
        x0, xt, t = example(model)
        nll = model(x0, xt, t, soft=True)
        nll.sum().backward()
        results.append([nll.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_vocabulary_tensors_never_exceed_a_chunk(monkeypatch):
    """The convention of the file: no (B, L, V) tensor, in neither pass. Watches every operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Widest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                new = isinstance(x, torch.Tensor) and func is not torch.ops.aten.t.default  # a weight, seen from the side
                if new and x.dim() > 1 and x.shape[-1] == 62:
                    self.rows = max(self.rows, x.numel() // 62)
            return out

    monkeypatch.setattr(mdlm, "CPU_LOGITS", 4 * 62 * 5)
    model = recorded_model()
    x0, xt, t = example(model)
    with Widest() as widest:
        model(x0, xt, t, soft=True)
    assert 0 < widest.rows <= 5


def test_no_masks_cost_nothing():
    model = recorded_model()
    x0, _, t = example(model)
    assert torch.equal(model(x0, x0, t, soft=True), torch.zeros(3))


def test_omega_is_in_the_graph_of_a_binary_step():
    """Or DDP waits for its gradient, or applies a wrong one, when the coin says no."""
    model = recorded_model()
    model(*example(model), soft=False).sum().backward()
    assert all(p.grad is not None and p.grad == 0 for p in model.sm.parameters())


def test_mask_is_never_predicted():
    model = recorded_model()
    probs = model.net.head(torch.randn(9, 64)).softmax(-1)
    assert (probs[:, 61] == 0).all()


def test_fresh_model_is_uniform_so_its_perplexity_is_the_vocabulary():
    model = MDLM(replace(TINY, omega_s=1e-6))
    x0, _, _ = example(model, B=8)
    xt = torch.full_like(x0, 61)
    nll = model(x0, xt, torch.ones(8), soft=True)
    assert math.exp(nll.sum().item() / x0.numel()) == pytest.approx(61, rel=1e-5)  # all but [MASK]


def test_dropout_is_on_in_training_and_off_in_eval():
    model = recorded_model(dropout=0.5)
    x0, xt, t = example(model)
    loss = lambda: model(x0, xt, t, soft=True)
    assert not torch.equal(loss(), loss())
    model.eval()
    assert torch.equal(loss(), loss())


def test_trunk_compiles_in_one_graph_and_state_dict_keeps_its_names():
    model = recorded_model()
    x0, xt, t = example(model)
    eager, names = model(x0, xt, t, soft=True), list(model.state_dict())
    model.net.trunk = torch.compile(model.net.trunk, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(x0, xt, t, soft=True), eager)
    assert list(model.state_dict()) == names


def test_bf16_autocast_stays_close_and_returns_fp32():
    model = recorded_model()
    x0, xt, t = example(model)
    with torch.autocast("cpu", torch.bfloat16):
        nll = model(x0, xt, t, soft=True)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, model(x0, xt, t, soft=True), rtol=0.05, atol=0.05)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(launch.Refused, match="n_embd=62 does not divide into n_head=4"):
        MDLM(replace(TINY, n_embd=62))
    with pytest.raises(launch.Refused, match="mask_id=62 is outside"):
        MDLM(replace(TINY, mask_id=62))
    with pytest.raises(launch.Refused, match="omega_b=0.5"):
        MDLM(replace(TINY, omega_b=0.5))


# ---- the authors' code


def test_parameter_count_of_the_paper():
    with torch.device("meta"):
        assert sum(p.numel() for p in MDLM(ModelConfig()).net.parameters()) == 169_627_218


def test_recorded_weights_are_rebuilt(golden):
    """Fresh init equals theirs under the same seed, and the perturbed state equals the recorded one."""
    torch.manual_seed(0)
    for model, name in ((MDLM(TINY), "init"), (recorded_model(), "state")):
        rebuilt = np.stack([digest(p) for p in model.net.state_dict().values()])
        np.testing.assert_allclose(rebuilt, golden[name], rtol=1e-12)


def test_recorded_corruption_and_logits(golden):
    assert torch.equal(torch.where(golden["u_mask"] < (1 - mdlm.ALPHA_FLOOR) * golden["t"][:, None], 61, golden["x0"]), golden["xt"])
    masked = golden["xt"] == 61
    for name, conditioned in (("raw_logits", False), ("raw_logits_timecond", True)):
        net = recorded_model(time_conditioning=conditioned).net
        logits = net.head(net.trunk(F.embedding(golden["xt"], net.table), golden["t"])[masked])[:, :61]
        torch.testing.assert_close(logits, golden[name][masked][:, :61], rtol=1e-5, atol=1e-5)


def test_recorded_nll(golden):
    nll = recorded_model()(golden["x0"], golden["xt"], golden["t"], soft=False)
    torch.testing.assert_close(nll, golden["nll_per_token"].sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, changes", [
    ("binary", {}), ("sm_k3_init", dict(omega_s=1e-6, omega_a=6.66, omega_b=-0.75)), ("sm_k3", {}), ("sm_k1", dict(k=1)),
    ("sm_temp", dict(k=None))])
def test_recorded_two_pass_loss_and_gradients(golden, name, changes):
    model = recorded_model(**changes)
    if name == "sm_temp":
        model.sm.raw_tau.data.fill_(math.log(math.expm1(0.8)))  # τ = 0.8 in the recording
    loss = model(golden["x0_2"], golden["xt_2"], golden["t_2"], soft=name != "binary").sum() / golden["x0_2"].numel()
    loss.backward()
    assert loss.item() == pytest.approx(golden[f"{name}/loss"].item(), rel=1e-5)
    omega = [getattr(model.sm, raw).grad if hasattr(model.sm, raw) else 0 for raw in ("raw_s", "raw_a", "raw_b", "raw_tau")]
    np.testing.assert_allclose(np.array([float(g) for g in omega]), golden[f"{name}/omega"], rtol=1e-4, atol=5e-6 if name == "sm_temp" else 5e-7)
    norm = torch.cat([p.grad.flatten() for p in model.net.parameters()]).norm().item()
    assert norm == pytest.approx(golden[f"{name}/norm"].item(), rel=2e-5)
    if f"{name}/grad" in golden:  # every tensor of θ, in five numbers each
        digests = np.stack([digest(p.grad) for p in model.net.parameters()])
        scale = golden[f"{name}/grad"][:, :1].numpy()
        np.testing.assert_allclose(digests / scale, golden[f"{name}/grad"].numpy() / scale, rtol=0, atol=1e-5)
