"""Fixtures that several test files share."""

import json
import os
import sys

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))  # so that plain `pytest` finds the scripts too

from checkpoint import write_safetensors  # noqa: E402

GOLDEN = os.path.join(os.path.dirname(__file__), "golden")


@pytest.fixture(scope="session")
def tiny_dream(tmp_path_factory):
    """The folder of the random model behind every recorded Dream number: 3 layers, V = 200, in three shards."""
    folder = tmp_path_factory.mktemp("tiny_dream")
    with open(os.path.join(GOLDEN, "dream_tiny.json")) as f:
        (folder / "config.json").write_text(f.read())
    arrays = np.load(os.path.join(GOLDEN, "dream_tiny.npz"))
    shard = lambda name: f"model-0000{3 if 'lm_head' in name else 1 if 'embed' in name or 'layers.0' in name else 2}-of-00003.safetensors"
    weight_map = {name: shard(name) for name in arrays}
    for file in set(weight_map.values()):
        write_safetensors(folder / file, {n: torch.from_numpy(arrays[n]) for n in arrays if weight_map[n] == file}, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)
