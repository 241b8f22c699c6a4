"""variants.py: slerp against its formula, and all variants in a model that trains and decodes."""

import itertools

import torch
import torch.nn.functional as F

from conftest import random_mdlm
from data import rng
from mdlm import corrupt, sample_times
from sample import generate
from variants import VARIANTS, Slerp

MASK, V, D = 5, 6, 8


def test_slerp_walks_along_the_great_circle():
    """From m to g = Σ_i π_i v_i, at the length of m."""
    def angle(a, b):
        return F.cosine_similarity(a, b, dim=-1).clamp(max=1).acos()
    sm, g = Slerp(MASK, omega_s=0.8, omega_a=1.0, omega_b=-2.0), rng("variants", 0)
    logits, table = torch.randn(7, V, generator=g) * 3, torch.randn(V, D, generator=g)
    lam, ids, pi = sm(logits)
    mixed = sm.mix(table, lam, ids, pi).double()                                   # (7, D)
    m, lam = table[MASK].double(), lam.double()                                    # (D,), (7,)
    g = (pi.double()[..., None] * table[ids].double()).sum(1)                      # (7, D)
    torch.testing.assert_close(mixed.norm(dim=1), m.norm().expand(7), rtol=1e-5, atol=0)
    for to, share in (m, lam), (g, 1 - lam):  # λ of the way
        torch.testing.assert_close(angle(to, mixed), share * angle(m, g), rtol=0, atol=1e-4)


def test_every_variant_trains_and_decodes():
    x0 = torch.randint(MASK, (4, 6), generator=rng("x0"))
    t = sample_times(4, rng("t"))
    xt = corrupt(x0, t, MASK, rng("q"))
    for variant, k in itertools.product(VARIANTS, (2, None)):
        model = random_mdlm(vocab_size=V, mask_id=MASK, length=6, omega_s=0.5, omega_b=-2.0, k=k,
                            variant=variant)
        model(x0, xt, t, soft=True).sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert 0 < model.lam < 0.5 + 1e-6
        assert bool(model.sm.raw_s.grad) == (variant != "constant")  # whose λ is not learned
        _, lam, _ = model.feedback(torch.randn(9, model.cfg.n_embd))
        assert (lam.std() > 1e-7) == (variant != "constant"), variant
        assert (generate(model, 2, 6, generator=rng("sample"))[0] < MASK).all()
