"""sample.py against Eq. 1, Alg. 2, App. B.1, and the authors' transition matrices."""

import os
import re
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoint
import data
import oracles
import sample
import show
from conftest import gen, plain_omega, random_mdlm, recording, refused, save_mdlm, spy
from launch import append_jsonl, read_jsonl
from sample import SAMPLERS, generate, generate_in_order, nucleus, step_probs

SMALL = dict(n_layer=2, vocab_size=12, mask_id=11, length=10, dropout=0.3, omega_s=0.7, omega_a=2.5,
             omega_b=-1.3)
MASK, TABLE = 11, "net.vocab_embed.embedding"
BYTES = data.tokenizer("bytes")
BLANK = torch.full((10,), MASK)
ROWS = torch.stack((BLANK.index_fill(0, torch.tensor([0, 4]), 2), BLANK,
                    BLANK.index_fill(0, torch.arange(1, 5), 3)))
OF_BYTES = dict(scale=0.15, vocab_size=259, mask_id=258, length=32)
# A random network whose predictions feedback changes
model_of = lambda seed=0, scale=0.35, **changes: random_mdlm(scale, seed, **SMALL | changes)
generators = lambda n, seed=0: [data.rng("test", seed, i) for i in range(n)]


def steps_of(T):
    dt = (1 - sample.T_END) / T
    return [(1 - i * dt, 1 - i * dt - dt) for i in range(T)]


def test_every_sampler_carries_the_masked_share_from_t_to_s():
    edges = 0, 0.05, 0.55, 1  # t_off and t_on of remdm-loop
    for T, sampler, eta in product((1, 16, 20, 64, 1000), SAMPLERS, (None, 0.0, 0.1)):
        loop, most = sampler == "remdm-loop", SAMPLERS[sampler] if eta is None else eta
        shares = (0, 0.1, 0.1, 1) if loop else edges  # 1 − α there
        for t, s in steps_of(T):
            reveal, remask = step_probs(t, s, sampler, eta)
            assert 0 <= reveal <= 1 and 0 <= remask <= most
            assert remask == most or not (loop and 0.05 < t <= 0.55)
            # A step across an edge of the loop follows the rule of the side where it starts.
            if not loop or np.searchsorted(edges, t) == np.searchsorted(edges, s):
                before, after = np.interp((t, s), edges, shares)
                share = before * (1 - reveal) + (1 - before) * remask
                assert share == pytest.approx(after, abs=1e-12)


def test_recorded_transition_matrices():
    """q(x_s | x_t) of the authors' three samplers, with and without a nucleus."""
    z = recording("sampler_transitions")
    x, probs, mask = z["xt"], z["log_probs"].exp(), 61                    # (2, 12), (2, 12, V)
    matrices = {key: q for key, q in z.items() if "/" in key}
    assert len(matrices) == 24
    for key, expected in matrices.items():
        sampler, p, T, i = key.split("/")
        reveal, remask = step_probs(*steps_of(int(T[1:]))[int(i[1:])], sampler)
        q = F.one_hot(x, probs.shape[-1]) * (1 - remask)                  # (2, 12, V)
        q[..., mask] = remask
        masked = x == mask
        q[masked] = reveal * nucleus(probs[masked], float(p[1:]))
        q[..., mask][masked] = 1 - reveal
        assert (q - expected).abs().max() < 1e-6, key
    cases = zip(z["cases"], z["mask_probabilities"].tolist(), strict=True)  # all 96
    for case, (t, dt, stays, goes) in cases:
        reveal, remask = step_probs(t, t - dt, case.split("/")[0])
        assert (1 - reveal, remask) == pytest.approx((stays, goes), abs=2e-6), case


def test_nucleus_is_its_definition():
    """Also of a large vocabulary: the top 1,024 reach p in all, some or no rows."""
    for V, p, spread in ((40, 0.3, 2), (40, 0.999, 2), (5000, 0.9, 0), (5000, 0.9, 0.5),
                         (5000, 0.9, 4)):
        logits = spread * torch.randn(6, V, generator=gen(2), dtype=torch.float64)
        logits[:2] *= 8
        probs = (logits + 1e-6 * torch.arange(V)).softmax(-1)  # no ties
        expected = [oracles.nucleus(row, p) for row in probs.tolist()]
        torch.testing.assert_close(nucleus(probs, p), torch.tensor(expected, dtype=torch.float64))


def test_a_token_is_drawn_where_u_falls_in_its_part_of_the_cumulative_sum():
    for probs, u, tokens in (  # any sum, edges, and tokens that fp32 noise cannot reach
            ([0, 1.5, 0, 1.5], [0, 0.4, 0.5, 0.9], [1, 1, 3, 3]),
            ([1e-12, 1, 1e-12], [0, 0.9e-12, 1.1e-12, 1 - 1.1e-12, 1 - 2**-53], [0, 0, 1, 1, 2])):
        rows, u = torch.tensor([probs] * len(u)), torch.tensor(u, dtype=torch.float64)
        assert sample.categorical(rows, u).tolist() == tokens


def oracle_of(model, soft):
    """The network as an oracle calls it: (emb (L, D), t) → logits (L, V). And its ω."""
    net = model.eval().net
    predict = lambda emb, t: net.head(net.trunk(emb[None], torch.tensor([t]))[0])
    return predict, plain_omega(model.sm) if soft else None


@pytest.mark.parametrize("sampler, soft", [*product(SAMPLERS, (True, False))])
@pytest.mark.parametrize("changes, t_end, every", [
    ({}, 1e-5, False), (dict(k=None), 1e-5, False), ({}, 0.2, False), ({}, 1e-5, True),
    (dict(time_conditioning=True), 0.1, False)])
def test_generate_is_alg_2(sampler, soft, changes, t_end, every, monkeypatch):
    monkeypatch.setattr(sample, "T_END", t_end)
    model, eta = model_of(**changes), 0.3 if "remdm" in sampler else 0.0
    predict, omega = oracle_of(model, soft)
    probs = lambda t, s: step_probs(t, s, sampler, eta)
    always = every or model.cfg.time_conditioning
    for T, (top_p, x) in product((1, 24), ((0.9, BLANK), (1.0, ROWS))):
        for start, own, g in zip(x.expand(3, -1), generators(3, T), generators(3, T)):
            ids, nfe = generate(model, T, sampler, top_p, own, x=start, soft=soft, eta=eta,
                                every=every)
            with torch.no_grad():
                expected, needed = oracles.alg2(predict, model.net.table, start, MASK, steps_of(T),
                                                probs, top_p, g, omega, always)
            assert ids.tolist() == expected.tolist() and nfe == needed


@pytest.mark.parametrize("order", ["entropy", "random"])
@pytest.mark.parametrize("changes, soft", [
    ({}, True), (dict(k=None), True), (dict(time_conditioning=True), False)])
def test_decoding_in_order_is_its_loop(order, changes, soft):
    """One token a call if there are as many steps as masks, or more that pass a threshold."""
    model, calls = model_of(6, 0.3, **changes), set()
    predict, omega = oracle_of(model, soft)
    for x, steps, top_p, p in ((BLANK, 10, 1.0, None), (ROWS, 10, 0.7, None), (ROWS, 3, 1, None),
                               (BLANK, 10, 1.0, 0.8), (ROWS, 10, 0.3, 0.8)):
        seen, own = [], generators(3, steps)
        decode = partial(generate_in_order, model, steps=steps, order=order, top_p=top_p,
                         soft=soft, threshold=p)
        ids, nfe = decode(3, generator=own, x=x, on_step=lambda x, *_: seen.append(x))  # noqa: B023
        x = x.expand(3, -1)
        for i, g in enumerate(generators(3, steps)):
            with torch.no_grad():
                expected, states = oracles.in_order(predict, model.net.table, x[i], MASK, steps,
                                                    order, top_p, g, omega, p or 2)
            rows = [row[i].tolist() for row in seen]
            assert rows == [state.tolist() for state in states[:len(seen)]]
            needed = 1 + sum((state == MASK).any().item() for state in states)
            assert ids[i].tolist() == expected.tolist() and nfe[i] == needed
            assert needed == min(steps, (x[i] == MASK).sum()) or p
            calls |= {needed} if p else set()
        _, first, last = generators(3, steps)
        assert torch.equal(decode(2, generator=[last, first], x=x[[2, 1]])[0], ids[[2, 1]])
    assert len(calls) > 2  # the threshold was passed, and not always by all


@pytest.mark.parametrize("k, soft", [(3, True), (None, True), (3, False)])
@pytest.mark.parametrize("at_random", [True, False])
def test_what_is_told_after_every_step(at_random, k, soft, monkeypatch):
    """λ and the likeliest token of masks that stay, from their h. For a token that became a mask:
    itself, and H = 0. The head runs on masks that become tokens and, with SM, on the others."""
    model, decode, x = model_of(k=k), partial(generate_in_order, n=3, order="entropy"), ROWS
    if at_random:
        decode, x = partial(generate, sampler="remdm-cap", eta=0.3), ROWS[0]
    before = x.view(-1, 10)
    lost = torch.full_like(before, MASK)
    omega, heads = plain_omega(model.sm), spy(monkeypatch, model.net, "head")

    def told(x, lam, guess, masks, h):
        nonlocal before
        assert torch.equal(torch.stack(masks, 1), ((before == MASK) & (x == MASK)).nonzero())
        rows = [((before == MASK) & (x != MASK)).sum(), len(h)]
        assert [len(h) for h, in heads] == (rows[:1 + soft] if at_random else [sum(rows)])
        predicted = [oracles.softmax(logits, omega["tau"]) for logits in model.net.head(h)]
        again = ((before != MASK) & (x == MASK)).nonzero(as_tuple=True)
        lost[again] = before[again]
        for b, l, p in [*zip(*masks, predicted), *((b, l, None) for b, l in zip(*again))]:
            strength = oracles.strength(p or [1.0], **omega) if soft else 0
            assert lam[b, l].item() == pytest.approx(strength, rel=1e-5)
            assert guess[b, l] == (p.index(max(p)) if p and soft else lost[b, l])
        before = x
        heads.clear()
    own = gen(1) if at_random else generators(3)
    decode(model=model, steps=10, generator=own, x=x, soft=soft, on_step=told)
    assert (lost != MASK).any() == at_random


def test_a_generator_decides_all_and_dropout_is_off():
    """In order, one generator gives each sequence its own."""
    model = model_of().train()
    for decode in (lambda g: generate(model, 8, generator=g)[0][None],
                   lambda g: generate_in_order(model, 4, 8, "random", generator=g)[0]):
        ids, again, other = (decode(gen(seed)).tolist() for seed in (6, 6, 7))
        assert ids == again != other and len(set(map(tuple, ids))) == len(ids) and model.training
        decode(None)  # torch's own generator


@pytest.mark.parametrize("device, how", [
    ("cpu", dict(backend="eager", fullgraph=True, dynamic=False)),
    pytest.param("cuda", dict(mode="reduce-overhead"), marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: would check its graphs of the trunk"))])
def test_a_compiled_trunk_gives_the_same_samples(device, how):
    model = model_of(n_layer=1).to(device)
    decode = lambda: generate(model, 20, "remdm-cap", generator=gen(9))[0]
    expected = decode()
    model.net.trunk = torch.compile(model.net.trunk, **how)
    assert torch.equal(decode(), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("sample") / "tiny.pt")
    save_mdlm(path, model_of(**OF_BYTES), ema=None)
    return path


@pytest.fixture
def run(saved, tmp_path):
    def run(folder="", **flags):
        out = str(tmp_path / folder / "samples.jsonl")
        flags = {"checkpoint": saved, "steps": 8, "device": "cpu", "out": out} | flags
        sample.main(sample.Config(**flags))
        return read_jsonl(out)
    return run


def test_the_same_command_goes_on_where_it_was(run, tmp_path):
    whole = run("whole", count=5)
    assert [line["text"] for line in whole] == [BYTES.decode(line["ids"]) for line in whole]
    run(count=2)
    file = tmp_path / "samples.jsonl"
    for cut in file.read_bytes()[:-20], file.read_bytes()[:40]:  # killed in the middle of a line
        file.write_bytes(cut)
        for _ in range(2):  # the second time nothing is left to do
            assert run(count=5, show=True) == whole
    refused("--length=99 exceeds the 32 of training", run, length=99)
    for other in dict(sampler="mdlm"), dict(sampler="entropy", steps=8):
        refused("--threshold needs", run, **{"steps": None, "threshold": 0.9} | other)
    assert run(count=5) == whole


def test_samples_of_other_settings_are_refused(run, saved, tmp_path):
    made, own = dict(count=2, checkpoint=str(tmp_path / "own.pt")), checkpoint.load(saved)
    checkpoint.save(made["checkpoint"], **own)
    *_, line = run(**made)
    anything = {"count", "seed", "out", "show", "device", "compile"}
    facts = {"step", "weights", "tokenizer", "dtype"}
    assert line["settings"].keys() == vars(sample.Config()).keys() - anything | facts
    other = "has other settings"
    for change in dict(seed=2), dict(top_p=0.8), dict(checkpoint=saved):
        refused(other, run, **made | change)
    for change in dict(step=2), dict(model=own["model"] | {TABLE: own["model"][TABLE] + 1}):
        checkpoint.save(made["checkpoint"], **own | change)
        refused(other, run, **made)
    checkpoint.save(made["checkpoint"], **own)
    append_jsonl(tmp_path / "samples.jsonl", line | {"index": 2, "seed": 2})  # only the last line
    refused(other, run, **made)
    refused("--eta does nothing with --sampler=entropy", run, sampler="entropy", eta=0.1)
    save_mdlm(made["checkpoint"], model_of(vocab_size=260, mask_id=259))
    refused("has 259 tokens, but bytes 258", run, **made)


def test_a_sample_is_drawn_in_place(monkeypatch, capsys):
    """Tokens in bold, and guesses on green, darker for larger λ. Each picture replaces the last."""
    for name, value in ("sys.stdout.isatty", True), ("time.sleep", None):
        monkeypatch.setattr(name, lambda *_, value=value: value)
    size = SimpleNamespace(get_terminal_size=lambda: os.terminal_size((4, 9)))
    monkeypatch.setattr(show, "shutil", size)  # pytest itself uses the real one
    x, guess = ([97, 258, 258, 10, 258, 98], 6 * [99]), ([99, 100, 258, 99, 101, 99], 6 * [99])
    lam = [0.9, 0.0, 1.0, 0.9, 0.5, 0.9], 6 * [0.0]
    watch = show.show(BYTES, 258)
    for _ in range(2):
        watch(torch.tensor(x), torch.tensor(lam), torch.tensor(guess), None, None)
    first, second = capsys.readouterr().out.split("\x1b[2F\x1b[J")  # two lines up
    assert first == second and re.sub("\x1b.*?m", "", first) == "ad·↵\neb\n"
    assert re.findall("\x1b.1m(.)", first) == ["a", "↵", "b"]
    assert re.findall(r"48;2;(\d+)", first) == ["220", "0", "110"]


def test_prompt_and_infill_stay_as_given(run):
    lines = run(prompt="def f(x):", count=3, sampler="remdm-cap", eta=0.5)
    assert all(line["ids"][:10] == [256, *b"def f(x):"] for line in lines)
    [line] = run("infill", infill="a\\n= ___; b = ___!", length=20)
    ids = line["ids"]
    assert ids[:5] == [256, *b"a\n= "] and ids[-2:] == [ord("!"), 257] and len(ids) == 20
    assert bytes(ids[9:15]) == b"; b = "  # gaps of 4 and 3
    [line] = run("both", prompt="a\\n=", infill=" ___; b = ___!", length=20)
    assert line["ids"] == ids
    refused("fills all 32 positions", run, prompt="x" * 31)


def test_decoding_takes_another_omega_also_for_a_binary_model(run, tmp_path):
    binary, omega = str(tmp_path / "binary.pt"), dict(omega_s=0.9, omega_a=1.5, omega_b=-2.0)
    save_mdlm(binary, model_of(**OF_BYTES, soft_mask=False), ema=None)
    [own], [soft] = run("own"), run("soft", **omega)
    [plain], [given] = run("plain", checkpoint=binary), run("given", checkpoint=binary, **omega)
    assert own["ids"] != soft["ids"] == given["ids"] != plain["ids"]
    assert given["settings"].items() >= omega.items() and not plain["settings"]["soft"]
