"""dora.py against its equation, recorded numbers of peft, and peft itself."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from conftest import digest, gen, recorded_adapter
from dora import DoRALinear, adapter_state, attach, layers, merge_
from dream import Dream, load_adapter
from finetune_dream import Config, save_adapter

close = torch.testing.assert_close


@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_the_equation(bias):
    """In float64, with s = α/r = 2. W is not square, so that a wrong axis shows."""
    linear = nn.Linear(5, 6, bias)
    layer = DoRALinear(linear, 3, 6, gen())
    layer.lora_B.data = torch.randn(6, 3, generator=gen(1))
    layer.lora_magnitude_vector.data += 0.3 * torch.rand(6, generator=gen(2))
    x = torch.randn(4, 5, generator=gen(9))
    W, A, B = (w.double() for w in (linear.weight, layer.lora_A, layer.lora_B))
    V = W + 2 * B @ A
    n = V.square().sum(1).sqrt()
    y = x.double() @ V.T * layer.lora_magnitude_vector / n + (linear.bias if bias else 0)
    close(layer(x).double(), y, rtol=1e-5, atol=1e-5)
    model = nn.Sequential(layer)
    merge_(model)
    assert type(model[0]) is nn.Linear
    close(model(x).double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapter_is_exactly_the_layer(dtype):
    linear, x = nn.Linear(64, 48).to(dtype), torch.randn(7, 64, generator=gen()).to(dtype)
    layer = DoRALinear(linear, generator=gen())
    y = layer(x)
    assert torch.equal(y, linear(x)) and y.dtype == dtype
    assert torch.equal(layer.lora_A, (2 * torch.rand(16, 64, generator=gen()) - 1) / 64 ** 0.5)
    y.square().sum().backward()
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() for p in trained)
    assert layer.lora_B.grad.any()


def test_autocast_does_not_round_the_norm():
    layer = DoRALinear(nn.Linear(64, 48), generator=gen())
    layer.lora_B.data = torch.randn(48, 16, generator=gen(1))
    n = layer.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.norm(), n)
        layer(torch.ones(7, 64)).sum().backward()
    assert layer.lora_B.grad.any()


def test_a_misspelt_layer_is_refused():
    with pytest.raises(ValueError, match="no linear layer called qproj"):
        attach(nn.ModuleDict({"q_proj": nn.Linear(2, 2)}), ["q_proj", "qproj"])


def test_recorded_logits_and_only_the_adapter_is_trained(tiny_dream, recorded):
    dream = recorded_adapter(Dream.load(tiny_dream).requires_grad_())
    assert all("lora_" in name for name, p in dream.named_parameters() if p.requires_grad)
    run = lambda: dream.head(dream.trunk(F.embedding(recorded["b/input_ids"], dream.table))[0])
    logits = run()
    close(logits[:, ::6, ::8], recorded["b/logits"], rtol=0, atol=1e-5)
    close(digest(logits), recorded["digest/b/logits"].numpy(), rtol=0, atol=1e-3)
    merge_(dream)
    close(run()[:, ::6, ::8], recorded["b/logits_merged"], rtol=0, atol=1e-5)
    for key in recorded:
        if key.startswith("digest/b/model."):  # recorded in bf16
            got = dream.get_parameter(key.removeprefix("digest/b/") + ".weight").bfloat16()
            close(digest(got), recorded[key].numpy(), rtol=1e-5, atol=1e-5)


def test_peft_reads_ours_and_we_read_peft(tiny_dream, tmp_path):
    needs = "needs peft and transformers: would exchange adapters with them both ways"
    peft = pytest.importorskip("peft", reason=needs)
    transformers = pytest.importorskip("transformers", reason=needs)
    dream = recorded_adapter(Dream.load(tiny_dream), alpha=40)
    save_adapter(str(tmp_path / "ours"), dream, None, Config(model=tiny_dream, alpha=40))
    # Dream's weights in Qwen2, which differs by its causal mask alone.
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**vars(dream.cfg)))
    theirs.load_state_dict(Dream.load(tiny_dream).state_dict())
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours")
    x = torch.randn(2, 5, 64, generator=gen(3))
    for name, layer in layers(dream).items():
        close(layer(x), theirs.get_submodule(f"base_model.model.{name}")(x), rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    back = Dream.load(tiny_dream)
    assert load_adapter(back, tmp_path / "theirs") is None
    close(adapter_state(back), adapter_state(dream), rtol=0, atol=0)
