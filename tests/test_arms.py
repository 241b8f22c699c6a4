"""arms.py: each arm against its formula in float64, and inside a model that trains and decodes."""

import itertools

import torch
import torch.nn.functional as F

from arms import ARMS, Constant, Permuted, Renorm, Slerp, with_omega
from conftest import random_mdlm, refused
from data import rng
from mdlm import corrupt, sample_times
from sample import generate
from softmask import SoftMask

MASK, V, D = 5, 6, 8


def rows():
    """logits (7, V) and a table (V, D), random."""
    g = rng("arms", 0)
    return torch.randn(7, V, generator=g) * 3, torch.randn(V, D, generator=g)


def mixes(arm):
    """λ (N, 1), m (D,), g = Σ_i π_i v_i (N, D), which §3.1 mixes, and the mixes (N, D) of the arm.

    All in float64.
    """
    sm, (logits, table) = arm(MASK, omega_s=0.8, omega_a=1.0, omega_b=-2.0), rows()
    lam, ids, pi = sm(logits)
    guess = (pi.double()[..., None] * table[ids].double()).sum(1)
    return lam.double()[:, None], table[MASK].double(), guess, sm.mix(table, lam, ids, pi).double()


def test_constant_gives_every_mask_the_same_share_and_does_not_learn_it():
    sm = Constant(MASK, omega_s=0.3)
    lam, _, _ = sm(rows()[0])
    torch.testing.assert_close(lam, torch.full((7,), 0.3))
    assert not lam.requires_grad
    torch.testing.assert_close(sm.strength(0.0), torch.tensor(0.3))  # as decoding asks for it


def test_renorm_is_the_convex_mix_at_the_length_of_mask():
    lam, m, g, mixed = mixes(Renorm)
    expected = m.norm() * F.normalize((1 - lam) * m + lam * g, dim=1)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)


def test_permuted_gives_every_mask_the_mix_of_another():
    own, others = mixes(SoftMask)[-1], mixes(Permuted)[-1]
    torch.testing.assert_close(others, own[[4, 5, 6, 0, 1, 2, 3]])


def test_slerp_walks_along_the_great_circle():
    def angle(a, b):
        return F.cosine_similarity(a, b, dim=-1).clamp(max=1).acos()
    lam, m, g, mixed = mixes(Slerp)
    torch.testing.assert_close(mixed.norm(dim=1), m.norm().expand(7), rtol=1e-5, atol=0)
    for to, share in (m, lam[:, 0]), (g, 1 - lam[:, 0]):  # λ of the way, and on the way
        torch.testing.assert_close(angle(to, mixed), share * angle(m, g), rtol=0, atol=1e-4)


def test_a_guess_that_is_mask_itself_has_a_gradient():
    table = rows()[1].requires_grad_()
    sm = Slerp(MASK, k=1, omega_s=0.5)
    logits = torch.full((1, V), -9.0).index_fill(1, torch.tensor([MASK]), 9.0)
    sm.mix(table, *sm(logits)).sum().backward()
    assert table.grad.isfinite().all() and sm.raw_s.grad.isfinite()


def test_every_arm_trains_and_decodes():
    x0 = torch.randint(MASK, (4, 6), generator=rng("x0"))
    t = sample_times(4, rng("t"))
    xt = corrupt(x0, t, MASK, rng("q"))
    for arm, k in itertools.product(ARMS, (2, None)):
        model = random_mdlm(vocab_size=V, mask_id=MASK, length=6, omega_s=0.5, omega_b=-2.0, k=k,
                            arm=arm)
        model(x0, xt, t, soft=True).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert 0 < model.lam < 0.5 + 1e-6
        _, lam, _ = model.feedback(torch.randn(9, model.cfg.n_embd))
        assert (lam.std() > 1e-7) == (arm != "constant"), arm
        assert (generate(model, 2, 6, generator=rng("sample"))[0] < MASK).all()


def test_another_omega_leaves_the_rest_of_a_soft_mask_alone():
    for arm, k in (SoftMask, 2), (Slerp, None):
        sm = arm(MASK, k, omega_s=0.3, omega_a=2.0, omega_b=-1.0, tau=1.7)
        assert with_omega(sm, MASK) is sm
        assert with_omega(sm, MASK, omega_s=0.9) is sm and (k or abs(sm.tau - 1.7) < 1e-5)
        torch.testing.assert_close(torch.stack(sm.omega), torch.tensor([0.9, 2.0, -1.0]))
    of_binary = with_omega(None, MASK, omega_s=0.5, omega_b=-2.0)
    torch.testing.assert_close(torch.stack(of_binary.omega), torch.tensor([0.5, 10 / 1.5, -2.0]))
    assert with_omega(None, MASK) is None and of_binary.k == 3
    refused("without SM: give it --omega_s, too", with_omega, None, MASK, omega_a=2.0)
