"""Fixtures that several test files share."""

import json
import os
import sys

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))  # so that plain `pytest` finds the scripts too

from checkpoint import write_safetensors

GOLDEN = os.path.join(os.path.dirname(__file__), "golden")


@pytest.fixture(scope="session")
def tiny_dream(tmp_path_factory):
    """The folder of the random model behind every recorded Dream number: 3 layers, V = 200, in three shards."""
    folder = tmp_path_factory.mktemp("tiny_dream")
    with open(os.path.join(GOLDEN, "dream_tiny.json")) as f:
        (folder / "config.json").write_text(f.read())
    arrays = np.load(os.path.join(GOLDEN, "dream_tiny.npz"))
    number = lambda name: 3 if "lm_head" in name else 1 if "embed" in name or "layers.0" in name else 2
    weight_map = {name: f"model-0000{number(name)}-of-00003.safetensors" for name in arrays}
    for file in set(weight_map.values()):
        shard = {name: torch.from_numpy(arrays[name]) for name in arrays if weight_map[name] == file}
        write_safetensors(folder / file, shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def digest(tensor):
    """A tensor in five numbers: its norm and four projections on fixed noise. Two tensors that agree here, agree."""
    x = torch.as_tensor(tensor).detach().double().flatten()
    probes = torch.randn(4, x.numel(), generator=torch.Generator().manual_seed(x.numel()), dtype=torch.float64)
    return torch.cat((x.norm()[None], probes @ x)).numpy()


@pytest.fixture(scope="session")
def recorded():
    """Numbers of the authors' Dream code: {"a/…": forward, "b/…": DoRA, "c/…": finetuning loss, "digest/…": see `digest`}."""
    arrays = np.load(os.path.join(GOLDEN, "dream_recorded.npz"))
    return {k: torch.from_numpy(v.astype(np.int64) if v.dtype == np.int16 else v) if v.dtype.kind != "U" else list(v)
            for k, v in arrays.items()}


def recorded_adapter(dream):
    """Attach the DoRA adapter of the recordings: it was drawn from one seed, so it need not be stored."""
    import dora
    dora.attach(dream, ["q_proj", "k_proj", "v_proj", "o_proj"], 16, 16, torch.Generator())
    g = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for layer in dora.layers(dream).values():
            layer.lora_A.copy_(0.15 * torch.randn(layer.lora_A.shape, generator=g))
            layer.lora_B.copy_(0.15 * torch.randn(layer.lora_B.shape, generator=g))
            n = layer.base.weight.norm(dim=1)
            layer.lora_magnitude_vector.copy_(n * (1 + 0.25 * torch.randn(n.shape, generator=g)))
    return dream


@pytest.fixture(scope="session")
def talking_dream(tiny_dream, tmp_path_factory):
    """The random model with a tokenizer: a token per printable ASCII character, and the special ones of its config."""
    folder = tmp_path_factory.mktemp("talking_dream")
    for name in os.listdir(tiny_dream):
        os.link(os.path.join(tiny_dream, name), folder / name)
    characters = [chr(b) for b in range(33, 127)] + ["Ġ", "Ċ"]  # as vocabulary files write space and new line
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(characters)}))
    specials = {"<|endoftext|>": 190, "<|im_start|>": 191, "<|im_end|>": 192, "<|mask|>": 194}
    (folder / "added_tokens.json").write_text(json.dumps(specials))
    return str(folder)
