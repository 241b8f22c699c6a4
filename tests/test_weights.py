"""Released weights, where they are at hand: a strict load, finite logits, one text.

    MDLM_WEIGHTS=mdlm-owt DREAM_WEIGHTS=Dream-v0-Instruct-7B python -m pytest tests/test_weights.py

And AntiBERTy, whose weights come with its package (results/antiberty.py).
Not here: what others have measured with them (REPRODUCE.md).
"""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F

import sample
import sample_dream
from conftest import ROOT
from dream import Dream, Tokenizer
from launch import Refused, read_jsonl
from mdlm import MDLM
from softmask import SoftMask

# Not `import`: the script has the name of the package.
SPEC = importlib.util.spec_from_file_location(
    "results_antiberty", os.path.join(ROOT, "results", "antiberty.py"))
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


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


def test_no_feedback_is_antiberty_itself_bit_for_bit():
    try:
        model, tokenizer = script.load()
    except Refused as e:
        pytest.skip(f"{e}. Would check λ = 0 bit for bit")
    words = [script.corrupt(text, 0.5, (0, i)) for i, text in enumerate(script.antibodies(2, 0))]
    read = tokenizer(words, padding=True, return_tensors="pt")
    x, valid, table = read["input_ids"], read["attention_mask"], model.get_input_embeddings().weight
    masked = x == tokenizer.mask_token_id
    sm = SoftMask(tokenizer.mask_token_id)
    sm.raw_s.data.fill_(-1e3)  # ω_s is then 0, and not only 1e-6
    with torch.no_grad():
        plain = model(x, attention_mask=valid).prediction_logits[masked]
        first = script.predict(model, F.embedding(x, table), valid, masked)
        second = script.predict(model, sm.embed(table, x, first), valid, masked)
    assert sm.omega[0] == 0 and torch.equal(second, first)
    torch.testing.assert_close(first[:, 5:], plain[:, 5:])
