"""sample.py read against §2.1's posterior, Eq. 1, Alg. 2 and App. B.1, then against recorded transitions of the authors' code."""

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import checkpoint
import data
import sample
from launch import Refused
from mdlm import MDLM, ModelConfig
from sample import SAMPLERS, Config, generate, main, nucleus, sample_categorical, schedule_flips, step_probs
from show import show

GOLDEN = os.path.join(os.path.dirname(__file__), "golden", "sampler_transitions.npz")
SMALL = dict(n_layer=2, n_head=2, n_embd=16, n_cond=8, vocab_size=12, mask_id=11, length=10, dropout=0.3, omega_s=0.7,
             omega_a=2.5, omega_b=-1.3)


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


def test_rates_are_the_posterior_of_bayes():
    """q(x_s | x_t, x_0) = q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0), enumerated over two positions and three symbols."""
    m, V, (t, s) = 2, 3, (0.7, 0.45)
    marginal = lambda a, b, keep: keep * (a == b) + (1 - keep) * (a == m)          # q(a | b) with P[keep]
    forward = lambda xs, xt: marginal(xt, xs, (1 - t) / (1 - s)) if xs != m else float(xt == m)
    reveal, remask = step_probs(t, s)
    assert remask == 0
    for x0 in itertools.product(range(m), repeat=2):
        for xt in itertools.product(range(V), repeat=2):
            evidence = math.prod(marginal(a, b, 1 - t) for a, b in zip(xt, x0))
            if not evidence:
                continue
            for xs in itertools.product(range(V), repeat=2):
                bayes = math.prod(forward(b, a) * marginal(b, c, 1 - s) for a, b, c in zip(xt, xs, x0)) / evidence
                step = math.prod((reveal * (b == c) + (1 - reveal) * (b == m)) if a == m else float(a == b)
                                 for a, b, c in zip(xt, xs, x0))
                assert step == pytest.approx(bayes, abs=1e-12)


@pytest.mark.parametrize("T", [16, 20, 64, 1000])
def test_every_sampler_carries_the_masked_share_from_t_to_s(T):
    t_on, t_off, alpha_on = 0.55, 0.05, 0.9
    def masked(t):  # remdm-loop's 1 − α
        return 1 - (1 - t) * alpha_on / (1 - t_on) if t > t_on else t * (1 - alpha_on) / t_off if t <= t_off else 1 - alpha_on
    for t, s in steps_of(T):
        for sampler in SAMPLERS:
            reveal, remask = step_probs(t, s, sampler)
            assert 0 <= reveal <= 1 and 0 <= remask <= SAMPLERS[sampler]
            if sampler != "remdm-loop":
                assert t * (1 - reveal) + (1 - t) * remask == pytest.approx(s, abs=1e-12)
            elif (t > t_on) == (s > t_on) and (t > t_off) == (s > t_off):  # a step across an edge follows the rule of its start
                assert masked(t) * (1 - reveal) + (1 - masked(t)) * remask == pytest.approx(masked(s), abs=1e-12)


def test_remdm_without_remasking_is_mdlm():
    for t, s in steps_of(7):
        assert step_probs(t, s, "remdm-cap", eta=0.0) == step_probs(t, s)


def test_loop_stays_on_its_plateau():
    assert step_probs(0.5, 0.4, "remdm-loop") == pytest.approx((0.18, 0.02))
    assert step_probs(0.5, 0.4, "remdm-loop", eta=0.1) == pytest.approx((0.9, 0.1))
    assert step_probs(1.0, sample.T_END, "remdm-loop")[0] == 1  # T = 1: the clock of the first phase ends long before s


def test_recorded_transition_matrices():
    """q(x_s | x_t) of the authors' three samplers, with and without nucleus, from their log-probabilities."""
    with np.load(GOLDEN) as z:
        x, probs = torch.from_numpy(z["xt"].astype(np.int64)), torch.from_numpy(z["log_probs"]).exp()  # (2, 12), (2, 12, V)
        mask, V = 61, probs.shape[-1]
        keys = [key for key in z if "/" in key]
        for key in keys:
            sampler, p, T, i = key.split("/")
            reveal, remask = step_probs(*steps_of(int(T[1:]))[int(i[1:])], sampler)
            q = torch.nn.functional.one_hot(x, V) * (1 - remask)                                       # (2, 12, V)
            q[..., mask] = remask
            masked = x == mask
            q[masked] = reveal * nucleus(probs[masked], float(p[1:]))
            q[..., mask][masked] = 1 - reveal
            assert (q - torch.from_numpy(z[key])).abs().max() < 1e-6, key
        assert len(keys) == 24
        for case, (t, dt, stays, goes) in zip(z["cases"], z["mask_probabilities"]):  # of all 96: T = 64 too
            reveal, remask = step_probs(t, t - dt, case.split("/")[0])
            assert (1 - reveal, remask) == pytest.approx((stays, goes), abs=2e-6), case


# ---- App. B.1 nucleus


def test_nucleus_drops_the_token_that_crosses_p():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.95, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    out = nucleus(probs, 0.9)
    assert out[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert out[1].tolist() == [0, 1, 0, 0]  # the first alone is beyond p, and stays
    assert out[2].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0]) or sorted(out[2].tolist())[0] == 0
    assert nucleus(probs, 1) is probs


def test_nucleus_is_its_definition():
    probs = torch.randn(50, 40, generator=data.rng(1)).mul(2).softmax(-1)
    for p in (0.3, 0.9, 0.999):
        for row, out in zip(probs.double().tolist(), nucleus(probs.double(), p).tolist()):
            total, kept = 0.0, {}
            for i in sorted(range(40), key=lambda i: -row[i]):
                total += row[i]
                if total > p and kept:
                    break
                kept[i] = row[i]
            assert out == pytest.approx([kept.get(i, 0) / sum(kept.values()) for i in range(40)], abs=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(spread):
    """Whether the top 1,024 reach p (in all rows, in some, in none) or not."""
    logits = spread * torch.randn(6, 5000, generator=data.rng(2), dtype=torch.float64)
    logits[:2] *= 8
    probs = (logits + 1e-6 * torch.arange(5000)).softmax(-1)  # no ties
    top, ids = probs.sort(-1, descending=True)
    kept = top * (top.cumsum(-1) <= 0.9)
    kept[:, 0] = top[:, 0]
    assert torch.equal(nucleus(probs, 0.9), torch.zeros_like(probs).scatter(1, ids, kept / kept.sum(-1, keepdim=True)))


# ---- the draw


def test_draw_has_the_given_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    n = 100_000
    counts = sample_categorical(3 * probs.expand(n, -1), torch.rand(n, dtype=torch.float64, generator=data.rng(2))).bincount(minlength=6) / n  # any sum will do
    assert counts[1] == counts[5] == 0
    assert (counts - probs).abs().max() < 5 * math.sqrt(0.25 / n)
    assert sample_categorical(torch.tensor([[0, 0.5, 0, 0.5]]).expand(2, -1), torch.tensor([0, 0.5], dtype=torch.float64)).tolist() == [1, 3]


def test_draw_reaches_what_fp32_noise_cannot():
    probs = torch.tensor([[1e-12, 1.0, 1e-12]])
    of = lambda u: sample_categorical(probs, torch.tensor([u], dtype=torch.float64)).item()
    assert (of(0.0), of(0.9e-12), of(1.1e-12), of(0.5), of(1 - 1.1e-12), of(1 - 0.9e-12), of(1 - 2**-53)) == (0, 0, 1, 1, 1, 2, 2)


# ---- when: the plan


def test_plan_follows_the_schedule():
    """The masked share after a step is α's, for 20,000 positions to within five standard errors."""
    L, T = 20_000, 16
    for sampler in SAMPLERS:
        masked, events = np.ones(L, bool), list(schedule_flips(np.ones(L, bool), T, data.rng(3), sampler=sampler))
        share, at_t = 1.0, {t: at for t, at, _ in events}
        for t, s in steps_of(T):
            reveal, remask = step_probs(t, s, sampler)
            share = share * (1 - reveal) + (1 - share) * remask
            masked ^= at_t.get(t, False)
            assert abs(masked.mean() - share) < 5 * math.sqrt(0.25 / L)


def test_plan_leaves_out_steps_without_change_and_kept_positions():
    free = np.arange(30) % 3 > 0
    for sampler in SAMPLERS:
        events = list(schedule_flips(free, 200, data.rng(4), sampler=sampler))
        assert len(events) < 200 and all(at.any() for _, at, _ in events) and all(len(at) == len(u) for _, at, u in events)
        assert all(free[at].all() for _, at, _ in events)
        times = [t for t, _, _ in schedule_flips(free, 200, data.rng(4), every=True, sampler=sampler)]
        assert times == [t for t, _ in steps_of(200)]


# ---- Alg. 2


def alg2(model, steps, generator, sampler, top_p, x, soft):
    """Alg. 2 the long way, one sequence: dense, every step in turn, predictions kept until a token changes   Returns x, calls."""
    net, sm, mask, calls = model.net, model.sm if soft else None, model.cfg.mask_id, 0
    free, p, feedback = x == mask, None, None
    for t, s in steps_of(steps):
        if p is None:
            logp, calls = forward(net, sm, x, feedback, mask), calls + 1
            p, feedback = logp.exp(), logp
        reveal, remask = step_probs(t, s, sampler)
        coin, u = torch.rand(2, len(x), dtype=torch.float64, generator=generator)
        xs = x.clone()
        for l in range(len(x)):
            if free[l] and x[l] == mask and coin[l] < reveal:
                xs[l] = sample_categorical(nucleus(p[l][None], top_p), u[l][None])
            if free[l] and x[l] != mask and coin[l] < remask:
                xs[l] = mask
        if (xs != x).any() or model.cfg.time_conditioning:
            x, p = xs, None
    return torch.where(x == mask, forward(net, sm, x, feedback, mask).argmax(-1), x), calls + 1


def forward(net, sm, x, feedback, mask):
    """log p (L, V) with SUBS: nothing is [MASK], and what is visible is certain."""
    emb = net.table[x]                                                                                 # (L, D)
    if sm and feedback is not None:
        lam, ids, pi = sm(feedback)
        emb = torch.where((x == mask)[:, None], sm.mix(net.table, lam, ids, pi), emb)
    logp = net.head(net.trunk(emb[None], torch.zeros(1))[0]).log_softmax(-1)                           # (L, V)
    logp[x != mask] = torch.nn.functional.one_hot(x[x != mask], logp.shape[1]).float().log().clamp_min(-1e6)
    return logp


@pytest.mark.parametrize("sampler, soft", list(itertools.product(SAMPLERS, (True, False))))
@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("k, t_end", [(3, 1e-5), (None, 1e-5), (3, 0.3)])
def test_generate_is_alg_2(sampler, soft, top_p, k, t_end, monkeypatch):
    """The plan, the rows and the skipped calls against the dense loop, which keeps its last prediction until a token changes.
    With an early end, masks are left for the argmax."""
    monkeypatch.setattr(sample, "T_END", t_end)
    model = model_of(k=k).eval()
    kept = torch.full((10,), 11).index_fill(0, torch.tensor([0, 4]), 2)
    for T, x in itertools.product((1, 3, 8, 24), (torch.full((10,), 11), kept)):
        ids, nfe = generate(model, 3, T, sampler, top_p, generators(3, T), x=x, soft=soft, eta=0.3 if "remdm" in sampler else None)
        for row, calls, g in zip(ids, nfe, generators(3, T)):
            with pytest.MonkeyPatch.context() as m:
                m.setitem(SAMPLERS, sampler, 0.3 if "remdm" in sampler else 0.0)
                with torch.no_grad():
                    expected, at_most = alg2(model, T, g, sampler, top_p, x, soft)
            assert row.tolist() == expected.tolist()
            assert calls <= at_most <= calls + 2  # not made: a last call without a mask left, and one before it


def test_feedback_changes_the_samples():
    """Or the test above would hold for a sampler that forgot it."""
    model = model_of()
    runs = [generate(model, 16, 24, "remdm-cap", 1.0, generators(16), soft=soft, eta=0.3)[0] for soft in (True, False)]
    assert (runs[0] != runs[1]).any(1).float().mean() > 0.5


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_chain_has_the_distribution_of_eq_1(sampler):
    """Two positions, two tokens, four steps: 8,000 samples against the product of all transition matrices."""
    model = model_of(scale=0.15, vocab_size=3, mask_id=2, length=2).eval()
    states, n, T = list(itertools.product(range(3), repeat=2)), 8_000, 4
    law = {state: float(state == (2, 2)) for state in states}
    with torch.no_grad():
        says = {x: forward(model.net, None, torch.tensor(x), None, 2).exp() for x in states}
    for t, s in steps_of(T):
        reveal, remask = step_probs(t, s, sampler)
        one = lambda a, b, p: (reveal * p[b].item() * (b != 2) + (1 - reveal) * (b == 2)) if a == 2 else \
            (1 - remask) * (a == b) + remask * (b == 2)
        law = {y: sum(law[x] * one(x[0], y[0], says[x][0]) * one(x[1], y[1], says[x][1]) for x in states) for y in states}
    assert sum(law.values()) == pytest.approx(1)
    ids, _ = generate(model, n, T, sampler, 1.0, data.rng(5), soft=False)
    for y in itertools.product(range(2), repeat=2):  # what is masked at the end (1e-5, the loop more) becomes an argmax
        best = lambda x: tuple(v if v < 2 else int(says[x][l].argmax()) for l, v in enumerate(x))
        p = sum(law[x] for x in states if best(x) == y)
        assert abs((ids == torch.tensor(y)).all(1).double().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("sampler, soft", list(itertools.product(SAMPLERS, (True, False))))
def test_a_sample_does_not_depend_on_its_neighbours(sampler, soft, monkeypatch):
    monkeypatch.setattr(sample, "T_END", 0.3)  # so that the argmax at the end is part of it
    model = model_of()
    ids, nfe = generate(model, 6, 20, sampler, 0.9, generators(6), soft=soft)
    for batch in ([0], [3, 1], [5, 4, 2]):
        some, calls = generate(model, len(batch), 20, sampler, 0.9, [generators(6)[i] for i in batch], soft=soft)
        assert some.tolist() == ids[batch].tolist() and calls.tolist() == nfe[batch].tolist()


def test_one_generator_gives_each_sequence_its_own():
    model = model_of()
    ids, _ = generate(model, 4, 20, generator=data.rng(6))
    assert ids.tolist() == generate(model, 4, 20, generator=data.rng(6))[0].tolist()
    assert len(set(map(tuple, ids.tolist()))) > 1


def calls_of(model, **how):
    """[(emb, rows of the head)] of every network call of one sequence, its states, and the result."""
    seen, states, net = [], [], model.net
    trunk, head = net.trunk, net.head
    net.trunk = lambda emb, t: (seen.append([emb.clone(), t.clone(), []]), trunk(emb, t))[1]
    net.head = lambda h: (seen[-1][2].append(len(h)), head(h))[1]
    try:
        ids, nfe = generate(model, 1, generator=generators(1), on_step=lambda x, lam, ids: states.append(
            (x[0].clone(), lam[0].clone(), ids[0].clone())), **how)
    finally:
        del net.trunk, net.head
    return seen, states, ids[0], nfe.item()


def test_the_head_runs_on_rows_that_appear_and_with_sm_on_those_that_stay():
    model, mask = model_of(), 11
    for soft in (True, False):
        seen, states, _, nfe = calls_of(model, steps=20, soft=soft)
        before = [torch.full((10,), mask)] + [x for x, _, _ in states[:-1]]
        assert len(seen) == len(states) == nfe
        for (_, _, rows), x, (xs, _, _) in zip(seen, before, states):
            new, stay = (x == mask) & (xs != mask), (x == mask) & (xs == mask)
            assert rows == [new.sum(), stay.sum()][:1 + soft]


def test_a_remasked_token_is_fed_back_as_a_point_mass():
    """λ = ω_s σ(−ω_a ω_b) of the token just lost; the released code gets there through SUBS, where it is certain."""
    model, mask, found = model_of(), 11, 0
    seen, states, _, _ = calls_of(model, steps=40, sampler="remdm-cap", eta=0.3)
    omega_s, omega_a, omega_b = model.sm.omega
    lam = omega_s * torch.sigmoid(-omega_a * omega_b)
    for (x, _, _), (xs, strength, guess), (emb, _, _) in zip(states, states[1:], seen[2:]):
        for l in ((x != mask) & (xs == mask)).nonzero()[:, 0]:
            expected = (1 - lam) * model.net.table[mask] + lam * model.net.table[x[l]]
            assert torch.allclose(emb[0, l], expected) and guess[l] == x[l] and strength[l] == lam
            found += 1
    assert found > 3


def test_the_first_call_has_no_feedback_and_binary_decoding_never_has():
    model, mask = model_of(), 11
    seen, _, _, _ = calls_of(model, steps=20)
    assert torch.equal(seen[0][0][0], model.net.table[mask].expand(10, -1))
    assert not torch.equal(seen[1][0], seen[0][0])
    seen, states, _, _ = calls_of(model, steps=20, sampler="remdm-cap", soft=False, eta=0.3)
    for (emb, _, _), (x, lam, _) in zip(seen[1:], states):
        assert torch.equal(emb[0], model.net.table[x]) and not lam.any()


def test_what_is_left_at_the_end_gets_an_argmax_with_feedback(monkeypatch):
    monkeypatch.setattr(sample, "T_END", 0.6)
    model, mask = model_of(), 11
    seen, states, ids, nfe = calls_of(model, steps=8)
    model.eval()
    x, (emb, _, rows) = states[-2][0], seen[-1]
    left = x == mask
    assert left.any() and nfe == len(seen) and rows == [left.sum()] and not torch.equal(emb[0], model.net.table[x])
    assert ids[left].tolist() == model.net.head(model.net.trunk(emb, torch.zeros(1))[0])[left].argmax(-1).tolist()


def test_time_conditioned_models_are_asked_at_every_step():
    seen, _, _, nfe = calls_of(model_of(time_conditioning=True), steps=30)
    assert nfe == 30 and [t.item() for _, t, _ in seen] == pytest.approx([t for t, _ in steps_of(30)])


def test_kept_tokens_are_never_touched():
    x = torch.full((3, 10), 11)
    x[:, ::3], x[1, 5] = 7, 2
    keep = x != 11
    for sampler, soft in itertools.product(SAMPLERS, (True, False)):
        watch = lambda y, lam, ids: seen.append(torch.equal(y[keep], x[keep]))
        seen = []
        ids, _ = generate(model_of(), 3, 30, sampler, generator=data.rng(7), x=x, soft=soft, on_step=watch, eta=0.3)
        assert all(seen) and len(seen) >= 5 and torch.equal(ids[keep], x[keep]) and (ids < 11).all()
    full, calls = generate(model_of(), 1, 5, generator=data.rng(7), x=torch.arange(10))
    assert full.tolist() == [list(range(10))] and calls.tolist() == [0]


def test_dropout_is_off_and_the_mode_is_given_back():
    model = model_of().train()
    runs = [generate(model, 2, 20, generator=data.rng(8))[0].tolist() for _ in range(2)]
    assert runs[0] == runs[1] and model.training


def test_a_compiled_trunk_gives_the_same_samples():
    model = model_of(k=3)
    expected = generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0]
    model.net.trunk = torch.compile(model.net.trunk, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0], expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: would check that CUDA graphs of the trunk change no sample")
def test_cuda_graphs_give_the_same_samples():
    model = model_of().cuda().eval()
    expected = generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0]
    model.net.trunk = torch.compile(model.net.trunk, mode="reduce-overhead")
    assert torch.equal(generate(model, 3, 20, "remdm-cap", generator=data.rng(9))[0], expected)


@pytest.mark.parametrize("how", [dict(steps=0), dict(n=0), dict(top_p=0.0), dict(top_p=1.1), dict(sampler="ddim"), dict(eta=2.0),
                                 dict(t_on=0.04), dict(t_off=0.0), dict(alpha_on=1.0)])
def test_bad_settings_are_refused(how):
    with pytest.raises(Refused, match=str(list(how.values())[0])):
        generate(model_of(), **{"n": 1, "steps": 2, "generator": data.rng(0)} | how)


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
    assert "\x1b[1ma\x1b[0m" in first                                        # a token: bold
    assert "48;2;0;100;0;" in first and "48;2;220;246;220;" in first         # λ = 1 deep green, λ = 0 pale
    assert "mb\x1b[0m" in first and "m·\x1b[0m" in first                     # top guess, and none yet
    assert "↵" in first and "\x1b\x1b" not in first and first.count("\n") == 2  # no newline or escape of the text's own
    step(x, torch.zeros(1, 5), x)
    assert "\x1b[2F\x1b[J" in sys.stdout.getvalue()[len(first):]             # redrawn in place


def test_show_prints_a_few_plain_lines_where_there_is_no_terminal(capsys):
    tok = data.tokenizer("bytes")
    step = show(tok, tok.n_vocab)
    for n in range(17):
        step(torch.tensor([[97] * n + [258] * (16 - n)]), torch.zeros(1, 16), torch.full((1, 16), 258))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{25 * i:3d}% " + "a" * 4 * i + "·" * (16 - 4 * i) for i in range(5)]


# ---- the command


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "tiny.pt"
    tok = data.describe(data.tokenizer("bytes"))
    model = model_of(scale=0.15, vocab_size=259, mask_id=258, length=32)
    checkpoint.save(path, kind="mdlm", config=vars(model.cfg), step=7, seed=1, model=model.state_dict(), ema=None, tokenizer=tok)
    return str(path)


def run(saved, tmp_path, **how):
    main(Config(**{"checkpoint": saved, "steps": 8, "device": "cpu", "out": str(tmp_path / "samples.jsonl")} | how))
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in tmp_path.glob("*.jsonl")}


def test_samples_file_says_what_and_how(saved, tmp_path):
    line = run(saved, tmp_path, count=2, sampler="remdm-cap")["samples.jsonl"][1]
    assert set(line) == {"ids", "text", "nfe", "seed", "index", "settings"}
    assert len(line["ids"]) == 32 and line["index"] == 1 and line["seed"] == 1 and 0 < line["nfe"] <= 9
    assert line["text"] == data.tokenizer("bytes").decode(line["ids"])
    assert line["settings"] == {"checkpoint": saved, "step": 7, "ema": True, "tokenizer": "bytes", "length": 32, "steps": 8,
                                "sampler": "remdm-cap", "eta": 0.04, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9, "top_p": 0.9,
                                "soft": True, "prompt": "", "infill": "", "dtype": "float32"}


def test_the_same_command_goes_on_where_it_was(saved, tmp_path):
    whole = run(saved, tmp_path / "whole", count=5, batch_size=3)["samples.jsonl"]
    run(saved, tmp_path / "parts", count=2)
    file = tmp_path / "parts" / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # killed in the middle of a line
    assert run(saved, tmp_path / "parts", count=5)["samples.jsonl"] == whole
    assert run(saved, tmp_path / "parts", count=5)["samples.jsonl"] == whole  # nothing left to do
    other = run(saved, tmp_path / "parts", count=1, seed=2)["samples.jsonl"]
    assert other[:5] == whole and other[5]["seed"] == 2 and other[5]["ids"] != whole[0]["ids"]


def test_ranks_write_their_own_shards(saved, tmp_path, monkeypatch):
    whole = run(saved, tmp_path / "one", count=5)["samples.jsonl"]
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank)), monkeypatch.setenv("WORLD_SIZE", "2")
        shards = run(saved, tmp_path / "two", count=5)
    assert [[line["index"] for line in shards[f"samples.{rank}.jsonl"]] for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert sorted(sum(shards.values(), []), key=lambda line: line["index"]) == whole


def test_prompt_and_infill_stay_as_given(saved, tmp_path):
    text = run(saved, tmp_path, prompt="def f(x):", count=3, sampler="remdm-cap", eta=0.5)["samples.jsonl"]
    assert all(line["ids"][:10] == [256, *b"def f(x):"] for line in text)
    lines = run(saved, tmp_path, infill="a = ___; b = ___!", length=20)["samples.jsonl"]
    ids = lines[-1]["ids"]
    assert ids[:5] == [256, *b"a = "] and ids[-2:] == [ord("!"), 257] and len(ids) == 20
    assert bytes(ids[9:15]) == b"; b = " and len(lines) == 4  # gaps of 4 and 3


def test_show_on_the_command_line(saved, tmp_path, capsys):
    for _ in range(2):  # watching again makes no second copy
        assert len(run(saved, tmp_path, show=True)["samples.jsonl"]) == 1
        assert "100% " in capsys.readouterr().out


@pytest.mark.parametrize("how, message", [
    (dict(checkpoint="nowhere.pt"), "nowhere.pt"), (dict(prompt="x" * 31), "31 tokens"), (dict(infill="no gap"), "___"),
    (dict(infill="a ___", prompt="b"), "no --prompt"), (dict(infill="x" * 30 + "___"), "30 tokens"), (dict(steps=0), "steps=0"),
    (dict(top_p=0.0), "top_p=0.0"), (dict(sampler="euler"), "euler"), (dict(length=33), "length=33"), (dict(length=0), "length=0"), (dict(count=0), "count=0"),
    (dict(device="cuda:9"), "cuda:9"), (dict(dtype="int4"), "int4"), (dict(device="abacus"), "abacus"), (dict(batch_size=0), "batch_size=0")])
def test_bad_input_is_refused(saved, tmp_path, how, message):
    with pytest.raises(Refused, match=message):
        run(saved, tmp_path, **how)
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_not_appended_to(saved, tmp_path):
    for text in ("my notes", "my notes\n", '{"a": 1}\n', '{"a": 1}'):
        (tmp_path / "samples.jsonl").write_text(text)
        with pytest.raises(Refused, match="something else"):
            run(saved, tmp_path)
        assert (tmp_path / "samples.jsonl").read_text() == text


def test_a_first_line_cut_by_a_kill_is_made_again(saved, tmp_path):
    whole = run(saved, tmp_path)["samples.jsonl"]
    text = (tmp_path / "samples.jsonl").read_text()
    (tmp_path / "samples.jsonl").write_text(text[:40])
    assert run(saved, tmp_path)["samples.jsonl"] == whole
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(Refused, match="cannot be read|something else"):
        run(saved, tmp_path)


def test_the_vocabulary_must_be_the_checkpoints(saved, tmp_path):
    other, model = str(tmp_path / "other.pt"), model_of(vocab_size=60, mask_id=59, length=32)
    checkpoint.save(other, kind="mdlm", config=vars(model.cfg), step=0, seed=0, model=model.state_dict(),
                    tokenizer=checkpoint.load(saved)["tokenizer"])
    with pytest.raises(Refused, match="bytes has 258 ids"):
        run(other, tmp_path)


def test_torchrun_leaves_our_flags_alone():
    """It reads abbreviations of its own options even behind the script's name: --n would be one."""
    from torch.distributed.run import get_args_parser
    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    assert not [(ours, o) for ours in Config.__dataclass_fields__ for o in theirs if o.startswith(f"--{ours}")]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    result = subprocess.run([sys.executable, sample.__file__, "--checkpoint=nowhere.pt"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "nowhere.pt" in result.stderr
