# SPDX-License-Identifier: MIT
"""softmask.py in a pretrained model of others (results/antiberty.py)."""

import importlib.util
import os
import re
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT, refused
from launch import Refused
from softmask import SoftMask

# Not `import`: the script has the name of the package.
SPEC = importlib.util.spec_from_file_location(
    "results_antiberty", os.path.join(ROOT, "results", "antiberty.py"))
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)
    monkeypatch.setattr(metadata, "version", version)
    refused("needs antiberty 0.1.3, found none: " + re.escape(script.PIP), script.load)


@pytest.fixture(scope="module")
def antiberty():
    try:
        return script.load()
    except Refused as e:
        pytest.skip(f"{e}. Would check λ = 0 bit for bit, and that feedback reaches the model")


def test_no_feedback_is_the_plain_model_bit_for_bit(antiberty):
    model, tokenizer = antiberty
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


def test_a_fixed_omega_reaches_the_model(antiberty):
    sm = SoftMask(antiberty[1].mask_token_id, omega_s=0.5, omega_b=-2.25)
    texts, keys = script.antibodies(2, 0), [(0, 0), (0, 1)]
    plain, soft = script.measure(*antiberty, texts, [0.9, 0.9], keys, [sm])  # (2, 3) each
    print("λ", soft[:, 2])
    assert (soft[:, 2] > 0.01).all() and (plain[:, 2] == 0).all()
    assert soft.isfinite().all() and (soft[:, 0] != plain[:, 0]).all()
