# SPDX-License-Identifier: MIT
"""arms.py: each arm against its formula in float64, and inside a model that trains and decodes.

Not here: the paper's own gate and mix (test_softmask.py).
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from arms import ARMS, Constant, Permuted, Renorm, Slerp
from conftest import refused
from data import rng
from launch import Refused
from mdlm import MDLM, ModelConfig, corrupt, sample_times
from sample import generate
from softmask import SoftMask

MASK, V, D = 5, 6, 8


def rows(n=7, seed=0):
    """logits (n, V) and a table (V, D), random."""
    g = rng("arms", seed)
    return torch.randn(n, V, generator=g) * 3, torch.randn(V, D, generator=g)


def parts(sm, logits, table):
    """λ of every row, m, and g of every row: what §3.1 mixes, in float64."""
    lam, ids, pi = sm(logits)
    guesses = [sum(p * table[i].double() for p, i in zip(row.double(), tokens))
               for row, tokens in zip(pi, ids)]
    return lam.tolist(), table[sm.mask_id].double(), guesses


def test_constant_gives_every_mask_the_same_share_and_does_not_learn_it():
    sm = Constant(MASK, omega_s=0.3)
    logits, table = rows()
    lam, ids, pi = sm(logits)
    torch.testing.assert_close(lam, torch.full((7,), 0.3))
    assert not lam.requires_grad
    torch.testing.assert_close(sm.strength(0.0), torch.tensor(0.3))  # as decoding asks for it


def test_renorm_is_the_convex_mix_at_the_length_of_mask():
    sm = Renorm(MASK, omega_s=0.8, omega_a=1.0, omega_b=-2.0)
    logits, table = rows()
    mixed = sm.mix(table, *sm(logits))
    lams, m, guesses = parts(sm, logits, table)
    for row, lam, g in zip(mixed.double(), lams, guesses):
        convex = (1 - lam) * m + lam * g
        torch.testing.assert_close(row, m.norm() * convex / convex.norm(), rtol=1e-5, atol=1e-5)


def test_permuted_gives_every_mask_the_mix_of_another():
    omega = dict(omega_s=0.8, omega_a=1.0, omega_b=-2.0)
    logits, table = rows()
    own = SoftMask(MASK, **omega)
    other = Permuted(MASK, **omega)
    mixed = other.mix(table, *other(logits))
    torch.testing.assert_close(mixed, own.mix(table, *own(logits))[[4, 5, 6, 0, 1, 2, 3]])


def test_slerp_walks_along_the_great_circle():
    sm = Slerp(MASK, omega_s=0.8, omega_a=1.0, omega_b=-2.0)
    logits, table = rows()
    mixed = sm.mix(table, *sm(logits)).double().detach()
    lams, m, guesses = parts(sm, logits, table)
    for row, lam, g in zip(mixed, lams, guesses):
        theta = math.acos(F.cosine_similarity(m, g, dim=0))
        from_mask = math.acos(min(1, F.cosine_similarity(m, row, dim=0)))
        assert row.norm().item() == pytest.approx(m.norm().item(), rel=1e-5)
        assert from_mask == pytest.approx(lam * theta, abs=1e-4)  # λ of the way
        to_guess = math.acos(min(1, F.cosine_similarity(row, g, dim=0)))
        assert from_mask + to_guess == pytest.approx(theta, abs=1e-4)  # and on the way


def test_no_feedback_is_a_plain_mask_in_every_mix():
    logits, table = rows()
    for arm in (Renorm, Slerp):
        lam, ids, pi = arm(MASK)(logits)
        mixed = arm(MASK).mix(table, 0 * lam, ids, pi)
        torch.testing.assert_close(mixed, table[MASK].expand(7, D), rtol=1e-4, atol=1e-5)


def test_a_guess_that_is_mask_itself_has_a_gradient():
    table = rows()[1].requires_grad_()
    sm = Slerp(MASK, k=1, omega_s=0.5)
    logits = torch.full((1, V), -9.0).index_fill(1, torch.tensor([MASK]), 9.0)
    sm.mix(table, *sm(logits)).sum().backward()
    assert table.grad.isfinite().all() and sm.raw_s.grad.isfinite()


def test_every_arm_trains_and_decodes():
    small = ModelConfig(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=V, mask_id=MASK,
                        length=6, omega_s=0.5, omega_b=-2.0)
    x0 = torch.randint(MASK, (4, 6), generator=rng("x0"))
    t = sample_times(4, rng("t"))
    xt = corrupt(x0, t, MASK, rng("q"))
    for arm, k in itertools.product(ARMS, (2, None)):
        if arm == "permuted" and k is None:
            refused("depends on the size of chunks: give k", MDLM, replace(small, k=k, arm=arm))
            continue
        torch.manual_seed(0)
        model = MDLM(replace(small, k=k, arm=arm))
        with torch.no_grad():
            for p in model.net.parameters():  # a fresh model is uniform: all λ would be the same
                p.add_(0.3 * torch.randn_like(p))
        model(x0, xt, t, soft=True).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert 0 < model.lam < 0.5 + 1e-6 and model.mix_norm > 0
        assert (model.lam_sd > 1e-7) == (arm != "constant"), arm
        if arm in ("renorm", "slerp"):
            torch.testing.assert_close(model.mix_norm, torch.tensor(1.0))
        assert (generate(model, 2, 6, generator=rng("sample"))[0] < MASK).all()


def test_an_unknown_arm_is_refused_by_name():
    with pytest.raises(Refused, match="arm='cubic' is none of constant, renorm, slerp"):
        MDLM(ModelConfig(n_layer=1, arm="cubic", vocab_size=V, mask_id=MASK))


def test_a_constant_of_nothing_is_refused():
    """With the paper's start it would be binary masking for ever, and nothing would show it."""
    with pytest.raises(Refused, match="no feedback: give omega_s"):
        MDLM(ModelConfig(arm="constant"))
