# SPDX-License-Identifier: MIT
"""Released weights, where they are at hand: a strict load, finite logits, one text.

    MDLM_WEIGHTS=mdlm-owt DREAM_WEIGHTS=Dream-v0-Instruct-7B python -m pytest tests/test_weights.py

Not here: what others have measured with them (REPRODUCE.md).
"""

import os

import pytest
import torch
import torch.nn.functional as F

import sample
import sample_dream
from dream import Dream, Tokenizer
from launch import read_jsonl
from mdlm import MDLM

PATHS = {name: os.environ.get(name, "") for name in ("MDLM_WEIGHTS", "DREAM_WEIGHTS")}


def needs(name):
    reason = f"needs {name}, a path of released weights: would load them and write one text"
    return pytest.mark.skipif(not PATHS[name], reason=reason)


@needs("MDLM_WEIGHTS")
def test_mdlm(tmp_path):
    model, out = MDLM.load(PATHS["MDLM_WEIGHTS"]), str(tmp_path / "samples.jsonl")
    x = torch.full((1, 8), model.mask_id)
    with torch.no_grad():
        h = model.net.trunk(F.embedding(x, model.net.table), torch.ones(1))
        assert model.net.head(h.flatten(0, 1)).softmax(-1).isfinite().all()
    sample.main(sample.Config(checkpoint=PATHS["MDLM_WEIGHTS"], length=32, steps=8, out=out))
    [line] = read_jsonl(out)
    assert len(line["ids"]) == 32 and model.mask_id not in line["ids"] and line["text"]


@needs("DREAM_WEIGHTS")
def test_dream(capsys):
    path = PATHS["DREAM_WEIGHTS"]
    net, ids = Dream.load(path), Tokenizer(path).encode("Hello")
    x, _ = sample_dream.pad_prompts(net.cfg, [ids], 4)
    with torch.no_grad():
        rows = torch.arange(len(ids), len(ids) + 4)
        h = net.hidden(F.embedding(x, net.table), rows, torch.ones(1))
        assert net.head(h).isfinite().all()
    del net
    sample_dream.main(sample_dream.Config(model=path, prompt="Say hello.", gen_len=16, show=False))
    assert "16 tokens" in capsys.readouterr().err
