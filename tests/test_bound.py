"""What Eq. 2 bounds, on a language that can be enumerated: every text, mask and order.

There are three tokens, and L = 3. With one token revealed at a time, in an order drawn at random,
the sampler's likelihood is a mean over orders, and Eq. 2 is the mean of its negative logarithm
(Jensen). With two passes from plain masks in every step, the same holds: the network is then a
function of x_t.

Not here: how a checkpoint is measured (test_eval.py).
"""

import itertools
import math

import numpy as np
import pytest
import torch

from conftest import random_mdlm
from eval import bound
from mdlm import ALPHA_FLOOR

V, L, MASK = 3, 3, 3
ORDERS = list(itertools.permutations(range(L)))
TEXTS = list(itertools.product(range(V), repeat=L))
MASKS = list(itertools.product((False, True), repeat=L))


def published(t):
    """P[a token is masked] at time t with the floor of the released code."""
    return (1 - ALPHA_FLOOR) * t


@pytest.fixture(scope="module")
def model():
    """A random network with feedback strong enough to matter."""
    return random_mdlm(0.5, vocab_size=V + 1, mask_id=MASK, length=L, k=2,
                       omega_s=0.9, omega_a=1.0, omega_b=-1.0).eval()


@pytest.fixture(scope="module")
def tables(model):
    """{soft: {(x0, mask): −log p of each masked token, (L,), 0 where it is visible}}.

    The two differ, so no test confuses them.
    """
    tables = {False: {}, True: {}}
    for soft, x0, mask in itertools.product(tables, TEXTS, MASKS):
        x, m = torch.tensor([x0]), torch.tensor([mask])
        with torch.no_grad():
            nll, rows = model.token_nll(x, torch.where(m, MASK, x), torch.ones(1), soft)
        tables[soft][x0, mask] = torch.zeros(L).index_put((rows,), nll).double().numpy()
    assert any(abs(tables[True][key] - nll).max() > 1e-2 for key, nll in tables[False].items())
    return tables


def along(order, x0, table):
    """−log p(x0) of a sampler that reveals in this order."""
    return sum(table[x0, tuple(j in order[i:] for j in range(L))][order[i]] for i in range(L))


def integral(low, high, q, x0, table):
    """E over t ~ U(low, high) of Eq. 2, where a token is masked with probability q(t).

    By trapezoids in log t.
    """
    u = np.linspace(math.log(low), math.log(high), 40_001)
    p, total = q(np.exp(u)), 0.0
    for mask in MASKS:
        n = sum(mask)
        total = total + p ** n * (1 - p) ** (L - n) * table[x0, mask].sum()  # 1/t · dt = du
    return (total[1:] + total[:-1]).sum() / 2 * (u[1] - u[0]) / (high - low)


def test_eq2_is_the_mean_over_orders_and_bounds_the_exact_likelihood(tables):
    for table in tables.values():
        total = 0.0
        for x0 in TEXTS:
            nlls = [along(order, x0, table) for order in ORDERS]
            exact = -math.log(np.mean(np.exp([-nll for nll in nlls])))
            eq2 = integral(1e-9, 1, lambda t: t, x0, table)
            # These two hold for any table of numbers: they say what Eq. 2 is.
            assert eq2 == pytest.approx(np.mean(nlls), rel=1e-6)
            assert np.mean(nlls) >= exact
            total += math.exp(-exact)
        assert total == pytest.approx(1, abs=1e-5)  # a likelihood: all texts together have p = 1


def test_the_floor_makes_the_published_bound_a_little_too_small(tables):
    for table in tables.values():
        for x0 in TEXTS:
            true = np.mean([along(order, x0, table) for order in ORDERS])
            assert 0.998 < integral(ALPHA_FLOOR, 1, published, x0, table) / true < 1


def test_the_code_measures_it(model, tables):
    """eval.bound against the integral, within five standard errors of 3,000 repeats."""
    x0 = (2, 0, 1)
    rows = torch.tensor([x0]).repeat(3000, 1)
    for soft, table in tables.items():
        nll = bound(model, rows, soft, seed=1, batch_size=500, floor=0.0)[0]
        expected = integral(1e-9, 1, lambda t: t, x0, table)
        assert abs(nll.mean() - expected) < 5 * nll.std() / math.sqrt(3000)
