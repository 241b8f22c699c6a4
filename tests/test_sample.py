"""sample.py against §2.1's posterior, Eq. 1, Alg. 2, App. B.1, and the authors' transitions."""

import io
import itertools
import json
import math
import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoint
import data
import oracles
import sample
from conftest import GOLDEN, gen, refused, spy
from dream import Tokenizer
from mdlm import MDLM, ModelConfig
from sample import (
    SAMPLERS,
    Config,
    generate,
    main,
    nucleus,
    sample_categorical,
    schedule_flips,
    step_probs,
)
from show import cell_text, frame, show

SMALL = dict(n_layer=2, n_head=2, n_embd=16, n_cond=8, vocab_size=12, mask_id=11, length=10,
             dropout=0.3, omega_s=0.7, omega_a=2.5, omega_b=-1.3)
MASK = 11
WAYS = [(sampler, soft) for sampler in SAMPLERS for soft in (True, False)]


def model_of(seed=0, scale=0.35, **changes):
    """A random network, opinionated enough that feedback changes what it says."""
    torch.manual_seed(seed)
    model = MDLM(ModelConfig(**SMALL | changes))
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(scale * torch.randn_like(p))
    return model


def generators(n, seed=0):
    return [data.rng("test", seed, i) for i in range(n)]


def steps_of(T):
    """[(t, s)] of all T steps."""
    dt = (1 - sample.T_END) / T
    return [(1 - i * dt, 1 - i * dt - dt) for i in range(T)]


# ---- §2.1 posterior, Eq. 1


def test_step_probs_are_the_posterior_of_bayes():
    """q(x_s | x_t, x_0) = q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0), for all pairs of 3 symbols."""
    m, V, (t, s) = 2, 3, (0.7, 0.45)
    marginal = lambda a, b, keep: keep * (a == b) + (1 - keep) * (a == m)  # q(a | b)
    forward = lambda xs, xt: marginal(xt, xs, (1 - t) / (1 - s)) if xs != m else float(xt == m)
    reveal, remask = step_probs(t, s)
    step = lambda xt, xs, x0: (float(xt == xs) if xt != m else
                               reveal * (xs == x0) + (1 - reveal) * (xs == m))
    assert remask == 0
    pairs = list(itertools.product(range(V), repeat=2))
    for x0, xt, xs in itertools.product(itertools.product(range(m), repeat=2), pairs, pairs):
        evidence = math.prod(marginal(a, b, 1 - t) for a, b in zip(xt, x0))
        if evidence:
            joint = math.prod(forward(b, a) * marginal(b, c, 1 - s) for a, b, c in zip(xt, xs, x0))
            chain = math.prod(step(a, b, c) for a, b, c in zip(xt, xs, x0))
            assert chain == pytest.approx(joint / evidence, abs=1e-12)


def test_every_sampler_carries_the_masked_share_from_t_to_s():
    t_on, t_off, alpha_on = 0.55, 0.05, 0.9

    def loop_share(t):  # remdm-loop's 1 − α
        if t > t_on:
            return 1 - (1 - t) * alpha_on / (1 - t_on)
        return t * (1 - alpha_on) / t_off if t <= t_off else 1 - alpha_on

    for T, sampler in itertools.product((16, 20, 64, 1000), SAMPLERS):
        loop = sampler == "remdm-loop"
        for t, s in steps_of(T):
            reveal, remask = step_probs(t, s, sampler)
            assert 0 <= reveal <= 1 and 0 <= remask <= SAMPLERS[sampler]
            before, after = (loop_share(t), loop_share(s)) if loop else (t, s)
            # A step across an edge of the loop follows the rule of its start.
            if not loop or (t > t_on) == (s > t_on) and (t > t_off) == (s > t_off):
                share = before * (1 - reveal) + (1 - before) * remask
                assert share == pytest.approx(after, abs=1e-12)


def test_remdm_without_remasking_is_mdlm_and_the_loop_has_a_plateau():
    for t, s in steps_of(7):
        assert step_probs(t, s, "remdm-cap", eta=0.0) == step_probs(t, s)
    assert step_probs(0.5, 0.4, "remdm-loop") == pytest.approx((0.18, 0.02))
    assert step_probs(0.5, 0.4, "remdm-loop", eta=0.1) == pytest.approx((0.9, 0.1))
    # T = 1: the clock of the first phase ends long before s.
    assert step_probs(1.0, sample.T_END, "remdm-loop")[0] == 1


def test_recorded_transition_matrices():
    """q(x_s | x_t) of the authors' three samplers, with and without nucleus."""
    with np.load(os.path.join(GOLDEN, "sampler_transitions.npz")) as z:
        x = torch.from_numpy(z["xt"].astype(np.int64))                               # (2, 12)
        probs = torch.from_numpy(z["log_probs"]).exp()                               # (2, 12, V)
        mask, V = 61, probs.shape[-1]
        keys = [key for key in z if "/" in key]
        for key in keys:
            sampler, p, T, i = key.split("/")
            reveal, remask = step_probs(*steps_of(int(T[1:]))[int(i[1:])], sampler)
            q = F.one_hot(x, V) * (1 - remask)                                       # (2, 12, V)
            q[..., mask] = remask
            masked = x == mask
            q[masked] = reveal * nucleus(probs[masked], float(p[1:]))
            q[..., mask][masked] = 1 - reveal
            assert (q - torch.from_numpy(z[key])).abs().max() < 1e-6, key
        assert len(keys) == 24
        for case, (t, dt, stays, goes) in zip(z["cases"], z["mask_probabilities"]):  # of all 96
            reveal, remask = step_probs(t, t - dt, case.split("/")[0])
            assert (1 - reveal, remask) == pytest.approx((stays, goes), abs=2e-6), case


# ---- App. B.1 nucleus


def test_nucleus_is_its_definition():
    """Of a large vocabulary too: the top 1,024 reach p in all rows, in some, or in none."""
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.95, 0.0, 0.0]])
    kept = nucleus(probs, 0.9).tolist()  # a first token that is beyond p alone stays
    assert kept == [pytest.approx([0.625, 0.375, 0, 0]), [0, 1, 0, 0]]
    assert nucleus(probs, 1) is probs
    small = torch.randn(50, 40, generator=data.rng(1)).mul(2).softmax(-1).double()
    for p in (0.3, 0.9, 0.999):
        expected = [oracles.nucleus(row, p) for row in small.tolist()]
        torch.testing.assert_close(nucleus(small, p), torch.tensor(expected, dtype=torch.float64))
    for spread in (0.0, 0.5, 4.0):
        logits = spread * torch.randn(6, 5000, generator=data.rng(2), dtype=torch.float64)
        logits[:2] *= 8
        probs = (logits + 1e-6 * torch.arange(5000)).softmax(-1)  # no ties
        expected = torch.tensor([oracles.nucleus(row, 0.9) for row in probs.tolist()])
        torch.testing.assert_close(nucleus(probs, 0.9), expected.double())


# ---- the draw


def test_draw_has_the_given_probabilities():
    probs, n = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0]), 100_000
    u = torch.rand(n, dtype=torch.float64, generator=data.rng(2))
    drawn = sample_categorical(3 * probs.expand(n, -1), u)  # any sum will do
    counts = drawn.bincount(minlength=6) / n
    assert counts[1] == counts[5] == 0
    assert (counts - probs).abs().max() < 5 * math.sqrt(0.25 / n)
    assert drawn[:200].tolist() == [oracles.draw(probs.tolist(), v) for v in u[:200].tolist()]
    edges = torch.tensor([0, 0.5], dtype=torch.float64)
    assert sample_categorical(torch.tensor([[0, 0.5, 0, 0.5]] * 2), edges).tolist() == [1, 3]


def test_draw_reaches_what_fp32_noise_cannot():
    u = torch.tensor([0.0, 0.9e-12, 1.1e-12, 0.5, 1 - 1.1e-12, 1 - 0.9e-12, 1 - 2**-53],
                     dtype=torch.float64)
    probs = torch.tensor([[1e-12, 1.0, 1e-12]])
    assert sample_categorical(probs.expand(7, -1), u).tolist() == [0, 0, 1, 1, 1, 2, 2]


# ---- when a token appears


def test_flips_follow_the_schedule():
    """The masked share after a step is α's, for 20,000 positions to within five standard errors.

    remdm-loop in up to 20 steps ends on its plateau: a tenth is left for the last call.
    """
    L, cases = 20_000, [(sampler, 16) for sampler in SAMPLERS]
    for sampler, T in [*cases, ("remdm-loop", 20), ("remdm-loop", 21)]:
        masked, share = np.ones(L, bool), 1.0
        flips = {t: at for t, at, _ in schedule_flips(masked, T, data.rng(3), sampler=sampler)}
        for t, s in steps_of(T):
            reveal, remask = step_probs(t, s, sampler)
            share = share * (1 - reveal) + (1 - share) * remask
            masked = masked ^ flips.get(t, False)
            assert abs(masked.mean() - share) < 5 * math.sqrt(0.25 / L)
        left = 0.1 if sampler == "remdm-loop" and T < 21 else 0
        assert share == pytest.approx(left, abs=0.02)


def test_flips_leave_out_steps_without_change_and_kept_positions():
    free = np.arange(30) % 3 > 0
    for sampler in SAMPLERS:
        turns = list(schedule_flips(free, 200, data.rng(4), sampler=sampler))
        assert len(turns) < 200 and all(flips.any() for _, flips, _ in turns)
        assert all(free[flips].all() and len(u) == 30 for _, flips, u in turns)
        turns = schedule_flips(free, 200, data.rng(4), every=True, sampler=sampler)
        assert [t for t, _, _ in turns] == [t for t, _ in steps_of(200)]


# ---- Alg. 2


@pytest.mark.parametrize("sampler, soft", WAYS)
@pytest.mark.parametrize("k, t_end", [(3, 1e-5), (None, 1e-5), (3, 0.3)])
def test_generate_is_alg_2(sampler, soft, k, t_end, monkeypatch):
    """The schedule, the rows and the skipped calls against the dense loop in Python floats.

    With an early end, masks are left for the argmax.
    """
    monkeypatch.setattr(sample, "T_END", t_end)
    model, eta = model_of(k=k).eval(), 0.3 if "remdm" in sampler else 0.0
    net, omega = model.net, oracles.omega(model.sm) if soft else None
    predict = lambda emb, t: net.head(net.trunk(emb[None], torch.tensor([t]))[0])    # (L, V)
    probs = lambda t, s: step_probs(t, s, sampler, eta)
    kept = torch.full((10,), MASK).index_fill(0, torch.tensor([0, 4]), 2)
    starts = (0.9, torch.full((10,), MASK)), (1.0, kept)
    for T, (top_p, x) in itertools.product((1, 3, 8, 24), starts):
        ids, nfe = generate(model, 2, T, sampler, top_p, generators(2, T), x=x, soft=soft, eta=eta)
        for row, calls, g in zip(ids, nfe, generators(2, T)):
            with torch.no_grad():
                expected, at_most = oracles.alg2(predict, net.table, x, MASK, steps_of(T), probs,
                                                 top_p, g, omega)
            assert row.tolist() == expected.tolist()
            # Not made: a last call without a mask left, and one before it.
            assert calls <= at_most <= calls + 2


def test_more_passes_plain_starts_and_every_step_are_alg_2_as_well():
    """--passes, --fresh, --every against the same oracle, and each of them changes what is said."""
    model = model_of(scale=0.5).eval()
    net, omega, T = model.net, oracles.omega(model.sm), 8
    predict = lambda emb, t: net.head(net.trunk(emb[None], torch.tensor([t]))[0])    # (L, V)
    start, said = torch.full((10,), MASK), {}
    for sampler, eta in (("mdlm", 0.0), ("remdm-cap", 0.3)):
        probs = lambda t, s: step_probs(t, s, sampler, eta)  # noqa: B023
        for passes, fresh, every in itertools.product((1, 2, 3), (False, True), (False, True)):
            ids, nfe = generate(model, 3, T, sampler, 1.0, generators(3), eta=eta, passes=passes,
                                fresh=fresh, every=every)
            for row, calls, g in zip(ids, nfe, generators(3)):
                with torch.no_grad():
                    expected, at_most = oracles.alg2(
                        predict, net.table, start, MASK, steps_of(T), probs, 1.0, g, omega, every,
                        passes, fresh)
                assert row.tolist() == expected.tolist()
                assert calls <= at_most <= calls + 2 * passes and calls % passes == 0
                assert not every or calls >= T * passes
            said[sampler, passes, fresh, every] = ids.tolist()
    assert len({str(ids) for ids in said.values()}) > 12


@pytest.mark.parametrize("order", ["entropy", "random"])
def test_decoding_in_order_is_its_loop(order):
    """Every state, in one batch and in others; with as many steps as masks, one token a call."""
    given = torch.full((10,), MASK).index_fill(0, torch.tensor([0, 4]), 2)
    for model, soft, passes in ((model_of(), True, 1), (model_of(k=None), True, 2),
                                (model_of(time_conditioning=True), False, 1)):
        net, omega = model.eval().net, oracles.omega(model.sm) if soft else None
        predict = lambda emb, t: net.head(net.trunk(emb[None], torch.tensor([t]))[0])  # noqa: B023
        for x, steps, top_p in ((torch.full((10,), MASK), 10, 1.0), (given, 8, 0.7), (given, 3, 1)):
            seen, how = [], dict(x=x, soft=soft, passes=passes)
            ids, nfe = sample.generate_in_order(
                model, 3, steps, order, top_p, generators(3, steps), **how,
                on_step=lambda *state: seen.append(state[:3]))  # noqa: B023
            for i, g in enumerate(generators(3, steps)):
                with torch.no_grad():
                    expected, states = oracles.in_order(predict, net.table, x, MASK, steps, order,
                                                        top_p, g, omega, passes)
                assert [row[i].tolist() for row, _, _ in seen] == [s.tolist() for s in states]
                assert ids[i].tolist() == expected.tolist() and nfe[i] == steps * passes
            for row, lam, guess in seen:
                assert ((lam > 0) == (row == MASK)).all() if soft else not lam.any()
                assert ((guess == row) == (row != MASK)).all() if soft else (guess == row).all()
            own = [generators(3, steps)[i] for i in (2, 0)]
            some, _ = sample.generate_in_order(model, 2, steps, order, top_p, own, **how)
            assert some.tolist() == ids[[2, 0]].tolist()
    said = [sample.generate_in_order(model_of(scale=0.5), 8, 5, order, 1.0, generators(8),
                                     soft=soft, passes=passes)[0].tolist()
            for soft, passes in ((False, 1), (True, 1), (True, 2))]
    assert said[0] != said[1] != said[2] != said[0]
    model = model_of(scale=0.5)
    keyed = [sample.generate_in_order(model, 2, 5, order, generator=gen(seed))[0].tolist()
             for seed in (0, 0, 1)]
    assert keyed[0] == keyed[1] != keyed[2]
    sample.generate_in_order(model, 2, 5, order)  # torch's own generator
    refused("order='origin' is none of random, entropy", sample.generate_in_order, model, 2, 5,
            "origin")
    model = model_of(scale=0.5)  # whoever redefines the feedback of a model is heard
    plain = model.net.table[MASK].detach()
    model.feedback = lambda h: (plain.expand(len(h), -1), h.new_zeros(len(h)), h.new_zeros(len(h)))
    assert sample.generate_in_order(model, 8, 5, order, 1.0, generators(8))[0].tolist() == said[0]


def test_feedback_without_training_by_an_omega_given_at_decoding(saved, tmp_path):
    """A binary checkpoint with some ω is the same weights with that ω."""
    binary = str(tmp_path / "binary.pt")
    ckpt = checkpoint.load(saved)
    net = {k: t for k, t in ckpt["model"].items() if k.startswith("net.")}
    checkpoint.save(binary, kind="mdlm", config=ckpt["config"] | {"soft_mask": False}, step=7,
                    seed=0, model=net, tokenizer=ckpt["tokenizer"])
    how = dict(omega_s=0.9, omega_a=1.5, omega_b=-2.0)
    given = run(binary, tmp_path / "given", count=2, **how)["samples.jsonl"]
    assert all(given[0]["settings"][name] == value for name, value in how.items())
    soft = run(saved, tmp_path / "soft", count=2, **how)
    plain = run(binary, tmp_path / "plain", count=2)
    assert [line["ids"] for line in soft["samples.jsonl"]] == [line["ids"] for line in given]
    assert [line["ids"] for line in plain["samples.jsonl"]] != [line["ids"] for line in given]
    refused("give --omega_s", run, binary, tmp_path, omega_b=-2.0)
    refused("about feedback, and there is none", run, binary, tmp_path, passes=2)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_chain_has_the_distribution_of_eq_1(sampler):
    """Two positions, two tokens, four steps: 8,000 samples against the product of transitions."""
    model = model_of(scale=0.15, vocab_size=3, mask_id=2, length=2).eval()
    n, T, m = 8_000, 4, 2
    states = list(itertools.product(range(3), repeat=2))
    with torch.no_grad():
        emb = model.net.table[torch.tensor(states)]                                  # (9, 2, D)
        says = model.net.head(model.net.trunk(emb, torch.zeros(9)).flatten(0, 1)).softmax(-1)
    says = dict(zip(states, says.view(9, 2, 3).tolist()))  # p of both positions in every state

    def one(a, b, p, reveal, remask):  # P[a → b] of a position
        if a == m:
            return reveal * p[b] * (b != m) + (1 - reveal) * (b == m)
        return (1 - remask) * (a == b) + remask * (b == m)

    law = {state: float(state == (m, m)) for state in states}
    for t, s in steps_of(T):
        rates = step_probs(t, s, sampler)
        law = {y: sum(law[x] * math.prod(one(*step, *rates) for step in zip(x, y, says[x]))
                      for x in states) for y in states}
    assert sum(law.values()) == pytest.approx(1)
    # What is still masked at the end becomes the argmax.
    best = {x: tuple(v if v < m else int(np.argmax(p)) for v, p in zip(x, says[x])) for x in states}
    ids, _ = generate(model, n, T, sampler, 1.0, data.rng(5), soft=False)
    for y in itertools.product(range(m), repeat=2):
        p = sum(law[x] for x in states if best[x] == y)
        share = (ids == torch.tensor(y)).all(1).double().mean()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("sampler, soft", WAYS)
def test_a_sample_does_not_depend_on_its_neighbours(sampler, soft, monkeypatch):
    monkeypatch.setattr(sample, "T_END", 0.3)  # so that the argmax at the end is part of it
    model = model_of()
    ids, nfe = generate(model, 6, 20, sampler, 0.9, generators(6), soft=soft)
    for batch in ([0], [3, 1], [5, 4, 2]):
        own = [generators(6)[i] for i in batch]
        some, calls = generate(model, len(batch), 20, sampler, 0.9, own, soft=soft)
        assert some.tolist() == ids[batch].tolist() and calls.tolist() == nfe[batch].tolist()


def test_one_generator_gives_each_sequence_its_own_and_dropout_is_off():
    model = model_of().train()
    ids, again = (generate(model, 4, 20, generator=data.rng(6))[0].tolist() for _ in range(2))
    assert ids == again and len(set(map(tuple, ids))) > 1 and model.training
    full, calls = generate(model, 1, 5, generator=data.rng(7), x=torch.arange(10))
    assert full.tolist() == [list(range(10))] and calls.tolist() == [0]  # nothing to fill
    hard, soft = (generate(model, 16, 24, "remdm-cap", 1.0, generators(16), soft=soft, eta=0.3)[0]
                  for soft in (False, True))
    assert (hard != soft).any(1).float().mean() > 0.5  # or a sampler could forget the feedback


def calls_of(model, **how):
    """[t], [rows of the head] and [x] of every network call of one sequence, and its ids."""
    states, heads = [], []
    with pytest.MonkeyPatch.context() as patch:
        asked = spy(patch, model.net, "head")

        def watch(x, *_):
            heads.append([len(h) for h, in asked])
            asked.clear()
            states.append(x[0].clone())
        trunk = spy(patch, model.net, "trunk")
        ids, nfe = generate(model, 1, generator=generators(1), on_step=watch, **how)
    assert nfe.item() == len(trunk) == len(states)
    return [t.item() for _, t in trunk], heads, states, ids[0]


def test_the_head_runs_on_rows_that_appear_and_with_sm_on_those_that_stay():
    for soft in (True, False):
        _, heads, states, _ = calls_of(model_of(), steps=20, soft=soft)
        for rows, x, xs in zip(heads, [torch.full((10,), MASK), *states], states):
            new, stay = (x == MASK) & (xs != MASK), (x == MASK) & (xs == MASK)
            assert rows == [new.sum(), stay.sum()][:1 + soft]


def test_time_conditioned_models_are_asked_at_every_step():
    model = model_of(time_conditioning=True)
    net, g = model.net, generators(1)[0]
    times, _, _, ids = calls_of(model, steps=30)
    assert times == pytest.approx([t for t, _ in steps_of(30)])
    predict = lambda emb, t: net.head(net.trunk(emb[None], torch.tensor([t]))[0])    # (L, V)
    model.eval()
    with torch.no_grad():
        x = torch.full((10,), MASK)
        expected, _ = oracles.alg2(predict, net.table, x, MASK, steps_of(30), step_probs, 0.9, g,
                                   oracles.omega(model.sm), always=True)
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("device, how", [
    ("cpu", dict(backend="eager", fullgraph=True, dynamic=False)),
    pytest.param("cuda", dict(mode="reduce-overhead"), marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: would check its graphs of the trunk"))])
def test_a_compiled_trunk_gives_the_same_samples(device, how):
    model = model_of().to(device)
    expected = generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0]
    model.net.trunk = torch.compile(model.net.trunk, **how)
    assert torch.equal(generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0], expected)


def test_settings_out_of_range_are_refused():
    for how in (dict(steps=0), dict(top_p=1.1), dict(sampler="ddim"), dict(eta=2.0),
                dict(t_on=0.04), dict(alpha_on=1.0)):
        refused("{}={}".format(*list(how.items())[0]), generate, model_of(),
                **{"n": 1, "steps": 2, "generator": data.rng(0)} | how)


# ---- App. C.5


def test_show_draws_confidence_and_tokens(monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((4, 3)))
    tok = data.tokenizer("bytes")
    step = show(tok, tok.n_vocab, pause=0)
    x = torch.tensor([[ord("a"), 258, 258, 10, 27]])
    step(x, torch.tensor([[0.0, 1.0, 0.0, 0, 0]]), torch.tensor([[0, ord("b"), 258, 0, 0]]))
    first = sys.stdout.getvalue()
    assert "\x1b[1ma\x1b[0m" in first                                 # a token: bold
    assert "48;2;0;100;0;" in first and "48;2;220;246;220;" in first  # λ = 1 deep green, 0 pale
    assert "mb\x1b[0m" in first and "m·\x1b[0m" in first              # top guess, and none yet
    # No end of line and no escape of the text's own.
    assert "↵" in first and "\x1b\x1b" not in first and first.count("\n") == 2
    step(x, torch.zeros(1, 5), x)
    assert "\x1b[2F\x1b[J" in sys.stdout.getvalue()[len(first):]      # redrawn in place
    sys.stdout.truncate(0)
    show(tok, tok.n_vocab, pause=0)(torch.tensor([list(b"abcdefghijkl")]), *torch.zeros(2, 1, 12))
    assert "j" in sys.stdout.getvalue() and "d" not in sys.stdout.getvalue()  # the end is in view


def test_show_draws_a_sudoku_as_a_grid():
    tok = data.tokenizer("bytes")
    digits = [ord(c) for c in "123456" * 6]
    x = [256, *digits, 257, 257]
    x[8] = 258                                                        # row 2, column 2
    lines = frame(x, [1.0] * 39, x[:8] + [ord("5")] + x[9:], 258, cell_text(tok, 258), 80)
    assert len(lines) == 8 and lines[2] == lines[5] == ""             # room between the boxes
    cells = ["".join(re.findall(r"m (.) ", line)) for line in lines]
    assert cells == ["123456", "153456", "", "123456", "123456", "", "123456", "123456"]
    assert lines[1].count("48;2;") == 1 and lines[1].count(" \x1b[0m  ") == 2


def test_show_prints_a_few_plain_lines_where_there_is_no_terminal(saved, tmp_path, capsys):
    tok = data.tokenizer("bytes")
    step = show(tok, tok.n_vocab)
    for n in range(17):
        x = torch.tensor([[97] * n + [258] * (16 - n)])
        step(x, torch.zeros(1, 16), torch.full((1, 16), 258))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{25 * i:3d}% " + "a" * 4 * i + "·" * (16 - 4 * i) for i in range(5)]
    for _ in range(2):  # watching again makes no second copy
        assert len(run(saved, tmp_path, show=True)["samples.jsonl"]) == 1
        assert "100% " in capsys.readouterr().out


# ---- the command


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path, tok = tmp_path_factory.mktemp("sample") / "tiny.pt", data.tokenizer("bytes")
    model = model_of(scale=0.15, vocab_size=259, mask_id=258, length=32)
    checkpoint.save(path, kind="mdlm", config=vars(model.cfg), step=7, seed=1,
                    model=model.state_dict(), ema=None, tokenizer=data.describe(tok))
    return str(path)


def run(saved, folder, **how):
    out = str(folder / "samples.jsonl")
    main(Config(**{"checkpoint": saved, "steps": 8, "device": "cpu", "out": out} | how))
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()]
            for file in folder.glob("*.jsonl")}


def test_samples_file_says_what_and_how(saved, tmp_path):
    line = run(saved, tmp_path, count=2, sampler="remdm-cap")["samples.jsonl"][1]
    assert set(line) == {"ids", "text", "nfe", "seed", "index", "settings"}
    assert len(line["ids"]) == 32 and 0 < line["nfe"] <= 9
    assert line["index"] == 1 and line["seed"] == 1
    assert line["text"] == data.tokenizer("bytes").decode(line["ids"])
    assert line["settings"] == {
        "checkpoint": saved, "step": 7, "ema": True, "tokenizer": "bytes", "length": 32, "steps": 8,
        "sampler": "remdm-cap", "eta": 0.04, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9,
        "top_p": 0.9, "soft": True, "prompt": "", "infill": "", "dtype": "float32"}


def test_samples_in_order_are_one_token_a_call(saved, tmp_path):
    how = dict(order="entropy", steps=None, prompt="def", passes=2, batch_size=2)
    lines = run(saved, tmp_path, count=3, **how)["samples.jsonl"]
    assert [line["nfe"] for line in lines] == 3 * [2 * 28]
    assert lines[0]["settings"]["order"] == "entropy" and lines[0]["settings"]["steps"] == 28
    assert run(saved, tmp_path, count=3, **how | {"batch_size": 3})["samples.jsonl"] == lines
    run(saved, tmp_path, trace=str(tmp_path / "t"), **how)
    states = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()]
    left = [sum(lam is not None for _, lam, *_ in cells) for cells in states]
    assert left == list(range(27, -1, -1))


def test_the_same_command_goes_on_where_it_was(saved, tmp_path):
    whole = run(saved, tmp_path / "whole", count=5, batch_size=3)["samples.jsonl"]
    run(saved, tmp_path, count=2)
    file = tmp_path / "samples.jsonl"
    for cut in (file.read_bytes()[:-20], file.read_bytes()[:40]):  # killed in the middle of a line
        file.write_bytes(cut)
        for _ in range(2):  # the second time nothing is left to do
            assert run(saved, tmp_path, count=5)["samples.jsonl"] == whole
    other = run(saved, tmp_path, count=1, seed=2)["samples.jsonl"]
    assert other[:5] == whole and other[5]["seed"] == 2 and other[5]["ids"] != whole[0]["ids"]


def test_ranks_write_their_own_shards(saved, tmp_path, monkeypatch):
    whole = run(saved, tmp_path / "one", count=5)["samples.jsonl"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        shards = run(saved, tmp_path / "two", count=5)
    indices = [[line["index"] for line in shards[f"samples.{rank}.jsonl"]] for rank in range(2)]
    assert indices == [[0, 2, 4], [1, 3]]
    assert sorted(sum(shards.values(), []), key=lambda line: line["index"]) == whole


def test_the_text_is_printed_when_it_is_made_and_when_it_was_there(saved, tmp_path, capsys):
    for watched in False, False, True:
        [line] = run(saved, tmp_path, show=watched, prompt="a\\nb")["samples.jsonl"]
        assert line["text"] + "\n" in capsys.readouterr().out
        assert line["ids"][1:4] == list(b"a\nb")


def test_prompt_and_infill_stay_as_given(saved, tmp_path):
    lines = run(saved, tmp_path, prompt="def f(x):", count=3, sampler="remdm-cap", eta=0.5)
    assert all(line["ids"][:10] == [256, *b"def f(x):"] for line in lines["samples.jsonl"])
    lines = run(saved, tmp_path, infill="a\\n= ___; b = ___!", length=20)["samples.jsonl"]
    ids = lines[-1]["ids"]
    assert ids[:5] == [256, *b"a\n= "] and ids[-2:] == [ord("!"), 257] and len(ids) == 20
    assert bytes(ids[9:15]) == b"; b = " and len(lines) == 4  # gaps of 4 and 3


@pytest.mark.parametrize("how", [{}, dict(sampler="remdm-cap", eta=0.5), dict(order="entropy")])
def test_a_puzzle_is_filled_where_it_has_dots(saved, tmp_path, how):
    given = "12..3.......................5"
    [line] = run(saved, tmp_path, given=given, steps=None, **how)["samples.jsonl"]
    ids = line["ids"]
    assert [ids[0], *ids[-2:]] == [256, 257, 257] and len(ids) == 32
    assert all(c == "." or ids[1 + i] == ord(c) for i, c in enumerate(given))
    assert line["settings"]["given"] == given and ("order" not in how or line["nfe"] == 25)


def test_a_smaller_last_batch_has_the_shape_of_the_others_if_compiled(saved, tmp_path, monkeypatch):
    shapes = []

    def watched(trunk, **how):
        return lambda emb, t: (shapes.append(len(emb)), trunk(emb, t))[1]
    monkeypatch.setattr(torch, "compile", watched)
    for how in (dict(batch_size=3), dict(batch_size=9), dict(batch_size=3, order="random")):
        shapes.clear()
        plain = run(saved, tmp_path / f"plain{how}", count=5, **how)
        assert run(saved, tmp_path / f"{how}", count=5, compile=True, **how) == plain
        assert set(shapes) == {min(5, how["batch_size"])}


def test_bad_input_is_refused_and_leaves_nothing(saved, tmp_path):
    for how, message in ((dict(checkpoint="nowhere.pt"), "nowhere.pt"), (dict(count=0), "count=0"),
                         (dict(prompt="x" * 31), "31 tokens"), (dict(infill="no gap"), "___"),
                         (dict(infill="a ___", prompt="b"), "no --prompt"),
                         (dict(length=33), "length=33"), (dict(length=2), "length=2"),
                         (dict(given="1.3"), "must have 29 characters in length 32, .* it has 3$"),
                         (dict(given="é." + 27 * "1"), "one token each, .*: 'é' is not"),
                         (dict(given=29 * "1"), "and dots for"),
                         (dict(given=29 * ".", prompt="a"), "--given stands alone"),
                         (dict(order="any"), "order=any is none of random, entropy"),
                         (dict(order="random", eta=0.1), "--eta belongs to the samplers that"),
                         (dict(order="entropy", steps=33), "between 1 and 32, the number of mas"),
                         (dict(order="entropy", passes=2, soft=False), "about feedback, and there"),
                         (dict(trace="t", count=2), "--trace=t follows one sample")):
        refused(message, run, saved, tmp_path, **how)
    assert not list(tmp_path.iterdir())
    refused("holds an MDLM, not a Dream: `python sample.py --checkpoint=", Tokenizer, saved)
    for text in ("my notes", '{"a": 1}\n'):
        (tmp_path / "samples.jsonl").write_text(text)
        refused("something else", run, saved, tmp_path)
        assert (tmp_path / "samples.jsonl").read_text() == text
    other, model = str(tmp_path / "other.pt"), model_of(vocab_size=300, mask_id=299, length=32)
    checkpoint.save(other, kind="mdlm", config=vars(model.cfg), step=0, seed=0,
                    model=model.state_dict(), tokenizer=checkpoint.load(saved)["tokenizer"])
    refused("bytes has 258 ids", run, other, tmp_path)


def test_torchrun_leaves_our_flags_alone():
    """It reads abbreviations of its options even behind the script's name: --n would be one."""
    from torch.distributed.run import get_args_parser
    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    ours = Config.__dataclass_fields__
    assert not [name for name in ours if any(o.startswith(f"--{name}") for o in theirs)]
