"""dora.py against its equation, recorded numbers of peft, and peft itself."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import launch
from conftest import digest, gen, recorded_adapter
from dora import DoRALinear, adapter_state, layers, merge_
from dream import Dream, load_adapter


@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_the_equation(bias):
    """In float64, with s = α/r = 2. It is not square, so that a wrong axis shows."""
    layer = DoRALinear(nn.Linear(5, 6, bias), 3, 6, gen())
    with torch.no_grad():
        layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=gen(1)))
        layer.lora_magnitude_vector.mul_(1 + 0.3 * torch.rand(6, generator=gen(2)))
    x = torch.randn(4, 5, generator=gen(9))
    W, A, B = (w.double() for w in (layer.base.weight, layer.lora_A, layer.lora_B))
    V = W + 2 * B @ A
    n = V.square().sum(1).sqrt()
    y = x.double() @ V.T * layer.lora_magnitude_vector / n + (layer.base.bias if bias else 0)
    torch.testing.assert_close(layer(x).double(), y, rtol=1e-5, atol=1e-5)
    model = nn.Sequential(layer)
    merge_(model)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x).double(), y, rtol=1e-5, atol=1e-5)


def test_fresh_adapter_is_exactly_the_layer():
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(64, 48).to(dtype)
        layer = DoRALinear(linear, generator=gen())
        x = torch.randn(7, 64, generator=gen()).to(dtype)
        assert torch.equal(layer(x), linear(x)) and layer(x).dtype == dtype
        assert torch.equal(layer.lora_magnitude_vector / layer.norm(), torch.ones(48))
        assert torch.equal(layer.lora_A, (2 * torch.rand(16, 64, generator=gen()) - 1) / 64 ** 0.5)
        assert {p.dtype for p in layer.parameters() if p.requires_grad} == {torch.float32}


def test_gain_of_a_row_of_zeros_is_1():
    """Also in a gradient, in a row that training has moved, and in the merged layer."""
    linear = nn.Linear(12, 5)
    linear.weight.data[3] = 0
    layer, x = DoRALinear(linear, 2, 4, gen()), torch.randn(7, 12, generator=gen(1))
    assert torch.equal(layer(x), linear(x))
    torch.testing.assert_close(layer.merged(), linear.weight)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)
    assert layer.lora_B.grad[3].any() and not layer.lora_magnitude_vector.grad[3]
    with torch.no_grad():
        layer.lora_B[3] = 0.1
        layer.lora_magnitude_vector[3] = 2
    update = (layer.lora_A.sum(0) * 0.1).detach()  # times s = 2, but only its direction counts
    want = x @ (2 * update / update.norm()) + linear.bias[3]
    torch.testing.assert_close(layer(x)[:, 3], want)
    torch.testing.assert_close(layer.merged()[3], 2 * update / update.norm())


def test_recorded_logits_and_merge_and_only_the_adapter_is_trained(tiny_dream, recorded):
    dream = recorded_adapter(Dream.load(tiny_dream).requires_grad_())
    names = {name.split(".")[-1] for name, p in dream.named_parameters() if p.requires_grad}
    assert names == {"lora_A", "lora_B", "lora_magnitude_vector"}
    close = torch.testing.assert_close
    run = lambda: dream.head(dream.trunk(F.embedding(recorded["b/input_ids"], dream.table))[0])
    logits = run()
    close(logits[:, ::6, ::8], recorded["b/logits"], rtol=0, atol=1e-5)
    close(digest(logits), recorded["digest/b/logits"].numpy(), rtol=0, atol=1e-3)
    merge_(dream)
    close(run()[:, ::6, ::8], recorded["b/logits_merged"], rtol=0, atol=1e-5)
    merged = [key for key in recorded if key.startswith("digest/b/model.")]
    assert merged
    for key in merged:  # these were recorded in bf16
        got = dream.get_parameter(key.removeprefix("digest/b/") + ".weight").bfloat16()
        close(digest(got), recorded[key].numpy(), rtol=1e-5, atol=1e-5)


def test_peft_reads_ours_and_we_read_peft(tiny_dream, tmp_path):
    needs = "needs peft and transformers: would exchange adapters with them both ways"
    peft = pytest.importorskip("peft", reason=needs)
    transformers = pytest.importorskip("transformers", reason=needs)
    from finetune_dream import Config, save_adapter
    dream = recorded_adapter(Dream.load(tiny_dream), alpha=40)
    save_adapter(str(tmp_path / "ours"), dream, None, Config(model=tiny_dream, alpha=40))
    # Dream's weights in Qwen2, which differs by its causal mask alone.
    raw = launch.read_json(f"{tiny_dream}/config.json") | {"model_type": "qwen2"}
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**raw))
    theirs.load_state_dict(Dream.load(tiny_dream).state_dict())
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours")
    x = torch.randn(2, 5, 64, generator=gen(3))
    for name, layer in layers(dream).items():
        want = theirs.get_submodule(f"base_model.model.{name}")(x)
        torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    back = Dream.load(tiny_dream)
    assert load_adapter(back, tmp_path / "theirs") is None
    torch.testing.assert_close(adapter_state(back), adapter_state(dream), rtol=0, atol=0)
