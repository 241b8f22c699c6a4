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


@pytest.fixture
def path(request):
    weights = os.environ.get(request.param, "")
    if not os.path.exists(weights):
        pytest.skip(f"needs {request.param}, a path of released weights: would load them and "
                    "write one text")
    return weights


@pytest.mark.parametrize("path", ["MDLM_WEIGHTS"], indirect=True)
def test_mdlm(path, tmp_path):
    model, out = MDLM.load(path), str(tmp_path / "samples.jsonl")
    x = torch.full((1, 8), model.mask_id)
    with torch.no_grad():
        h = model.net.trunk(F.embedding(x, model.net.table), torch.ones(1))
        assert model.net.head(h.flatten(0, 1)).softmax(-1).isfinite().all()
    sample.main(sample.Config(checkpoint=path, length=32, steps=8, out=out))
    [line] = read_jsonl(out)
    assert len(line["ids"]) == 32 and model.mask_id not in line["ids"] and line["text"]


@pytest.mark.parametrize("path", ["DREAM_WEIGHTS"], indirect=True)
def test_dream(path, capsys):
    net, ids = Dream.load(path), Tokenizer(path).encode("Hello")
    x = sample_dream.pad_prompts(net.cfg, [ids], 4)
    with torch.no_grad():
        rows = torch.arange(len(ids), len(ids) + 4)
        h = net.hidden(F.embedding(x, net.table), rows, torch.ones(1))
        assert net.head(h).isfinite().all()
    del net
    sample_dream.main(sample_dream.Config(model=path, prompt="Say hello.", gen_len=16))
    assert "16 tokens" in capsys.readouterr().err
