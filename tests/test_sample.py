"""sample.py against Eq. 1, Alg. 2, App. B.1, and the authors' transition matrices."""

import os
from itertools import product, repeat
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import launch
import oracles
import sample
from conftest import gen, plain_omega, random_mdlm, recording, refused, save_mdlm, spy
from launch import Refused, append_jsonl, read_jsonl
from sample import SAMPLERS, Pick, decode, generate, nucleus, shares_of, step_probs

SMALL = dict(n_layer=2, vocab_size=12, mask_id=11, length=10, dropout=0.3, omega_s=0.7, omega_a=2.5,
             omega_b=-1.3)
MASK, ANY = 11, "net.blocks.0.attn_qkv.weight"
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


def test_every_sampler_carries_the_masked_share_from_t_to_s(monkeypatch):
    """A step of remdm-loop across t_off or t_on follows the rule of the side where it starts."""
    edges = 0, 0.05, 0.55, 1
    shares = {"remdm-loop": (0, 0.1, 0.1, 1)}  # 1 − α there
    for T, sampler, eta in product((1, 20, 64, 1000), SAMPLERS, (0.0, 0.1)):
        monkeypatch.setitem(SAMPLERS, sampler, eta)
        for t, s in steps_of(T):
            reveal, remask = step_probs(t, s, sampler)
            assert 0 <= reveal <= 1 and 0 <= remask <= eta
            if sampler != "remdm-loop" or np.searchsorted(edges, t) == np.searchsorted(edges, s):
                before, after = np.interp((t, s), edges, shares.get(sampler, edges))
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
        for keeps in False, True:
            expected = [oracles.nucleus(row, p, keeps) for row in probs.tolist()]
            torch.testing.assert_close(nucleus(probs, p, keeps), probs.new_tensor(expected))


def test_a_token_is_drawn_where_u_falls_in_its_part_of_the_cumulative_sum():
    for probs, u, tokens in (  # any sum, edges, and tokens that fp32 noise cannot reach
            ([0, 1.5, 0, 1.5], [0, 0.4, 0.5, 0.9], [1, 1, 3, 3]),
            ([1e-12, 1, 1e-12], [0, 0.9e-12, 1.1e-12, 1 - 1.1e-12, 1 - 2**-53], [0, 0, 1, 1, 2])):
        rows, u = torch.tensor([probs] * len(u)), torch.tensor(u, dtype=torch.float64)
        assert sample.categorical(rows, u).tolist() == tokens


def oracle_of(model, soft):
    """`predict` of an oracle, and ω. The model is left in training: decoding ends dropout."""
    net, omega = model.train().net, plain_omega(model.sm) if soft else None
    model.sm = model.sm if soft else None
    net.hidden = lambda emb, masks, t: 1.2 * net.trunk(emb, t)[masks]  # of one's own
    return lambda emb, t: net.head(1.2 * net.trunk(emb[None], torch.tensor([t]))[0]), omega


@pytest.mark.parametrize("sampler, soft", [*product(SAMPLERS, (True, False))])
@pytest.mark.parametrize("changes, t_end, every", [
    ({}, 1e-5, False), (dict(k=None), 1e-5, False), ({}, 0.2, False), ({}, 1e-5, True),
    (dict(time_conditioning=True), 0.1, True)])
def test_generate_is_alg_2(sampler, soft, changes, t_end, every, monkeypatch):
    monkeypatch.setattr(sample, "T_END", t_end)
    monkeypatch.setitem(SAMPLERS, sampler, 0.3 if "remdm" in sampler else 0.0)
    model = model_of(**changes)
    predict, omega = oracle_of(model, soft)
    probs = lambda t, s: step_probs(t, s, sampler)
    for T, (top_p, x) in product((1, 24), ((0.9, BLANK), (1.0, ROWS))):
        for start, own, g in zip(x.expand(3, -1), generators(3, T), generators(3, T)):
            passes = []
            ids = generate(model, start, T, sampler, top_p, own, every,
                           lambda x, *_: passes.append(x[0]))  # noqa: B023
            with torch.no_grad():
                expected, needed = oracles.alg2(predict, model.net.table, start, MASK, steps_of(T),
                                                probs, top_p, g, omega, every)
            assert ids.tolist() == expected.tolist() and len(passes) == needed
            assert not passes or ids.tolist() == passes[-1].tolist()


PICKS = (dict(), dict(top_p=0.7, confidence="maskgit_plus"), dict(confidence="topk_margin"),
         dict(temperature=0.8, top_p=0.9), dict(temperature=1.5, confidence="random"),
         dict(threshold=0.8), dict(threshold=0.5, temperature=1.2, confidence="random"))


@pytest.mark.parametrize("changes, soft", [
    ({}, True), (dict(k=None), True), (dict(time_conditioning=True), False)])
def test_decode_is_its_loop(changes, soft):
    """Any number of tokens in a step. Rows side by side give what each gives alone."""
    model, passes = model_of(6, 0.3, **changes), set()
    predict, omega = oracle_of(model, soft)
    rows = torch.stack([ROWS[2].roll(i) for i in range(3)])                       # 6 masks each
    for how, counts in product(PICKS, ([1] * 6, [1, 2, 2, 1], [2, 4], [6])):
        shares = repeat(1) if "threshold" in how else shares_of(counts)
        for x, own, g in zip(rows, generators(3, 1), generators(3, 1)):
            seen = []
            ids = decode(model.train(), x[None], shares, Pick(**how, generator=own),
                         on_step=lambda x, *_: seen.append(x[0]))  # noqa: B023
            with torch.no_grad():
                expected = oracles.in_order(predict, model.net.table, x, MASK, counts, omega,
                                            **how, generator=g)
            assert torch.equal(torch.stack(seen), expected) and torch.equal(ids[0], expected[-1])
            passes |= {len(seen)} if "threshold" in how else set()
        if "temperature" not in how:
            alone = [decode(model, x[None], shares, Pick(**how)) for x in rows]
            assert torch.equal(decode(model, rows, shares, Pick(**how)), torch.cat(alone))
    assert len(passes) > 2  # the threshold was passed, and not always by all
    for order in lambda p: p[:, 0].log() - torch.inf, lambda p: p[:, 0].double():  # any numbers
        assert (decode(model, rows, shares_of([1] * 6), Pick(order)) != MASK).all()


@pytest.mark.parametrize("error, message, rows, order", [
    (ValueError, "equally many masks", ROWS, "entropy"),
    (ValueError, "unknown confidence", ROWS[:1], "origin"),
    (Refused, "not finite", ROWS[2:], lambda p: p[:, 0] * torch.nan),
    (Refused, "not finite", ROWS[2:], "random")])
def test_what_decode_cannot_do(error, message, rows, order):
    model = model_of(6, 0.3)
    if order == "random":
        model.net.output_layer.linear.bias.data[5] = torch.nan
    for threshold in [None] if "equally" in message else [None, 0.5]:
        with pytest.raises(error, match=message):
            decode(model, rows, shares_of([1] * 6), Pick(order, threshold=threshold))


def test_shares_reveal_the_counts_exactly():
    for counts in [1] * 49, [1, *[2] * 11, 1], [3, 0, 4], [5, 5, 0]:
        left = [sum(counts[i:]) for i in range(len(counts))]
        assert [int(n * share) for n, share in zip(left, shares_of(counts))] == counts


@pytest.mark.parametrize("k, soft", [(3, True), (None, True), (3, False)])
@pytest.mark.parametrize("at_random", [True, False])
def test_what_is_told_after_every_pass(at_random, k, soft, monkeypatch):
    """λ of masks that stay, from their h. For a token that became a mask: that of H = 0. The head
    runs once on each row, and in generate without SM only on masks that become tokens."""
    monkeypatch.setitem(SAMPLERS, "remdm-cap", 0.3)
    model = model_of(k=k)
    omega, heads = plain_omega(model.sm), spy(monkeypatch, model.net, "head")
    model.sm = model.sm if soft else None
    before = ROWS[2][None] if at_random else torch.stack((ROWS[2], ROWS[2].roll(1)))
    again = 0

    def told(x, lam, masks, h, revealed):
        nonlocal before, again
        seen = (before != MASK).index_put(masks, torch.tensor(True))  # each mask, once
        assert seen.all() and len(h) == (before == MASK).sum()
        assert torch.equal(revealed, x[masks] != MASK)
        assert sum(len(h) for h, in heads) == (len(h) if soft or not at_random else revealed.sum())
        vanished, expected = (before != MASK) & (x == MASK), torch.zeros(x.shape)
        again += vanished.sum()
        if soft:
            gain = 1 if at_random else 0.5 + (x == MASK).sum() / 24
            lams = [oracles.strength(oracles.softmax(row, omega["tau"]), **omega)
                    for row in model.net.head(h)]
            expected[masks] = gain * torch.tensor(lams) * ~revealed
            expected[vanished] = oracles.strength([1.0], **omega)
        torch.testing.assert_close(lam, expected, rtol=1e-5, atol=0)
        before = x
        heads.clear()
    if at_random:
        generate(model, before[0], 10, "remdm-cap", generator=gen(1), on_step=told)
    else:
        decode(model, before, shares_of([1, 2, 3]), Pick(), lambda left: 0.5 + left / 2, told)
    assert (again > 0) == at_random


def test_a_compiled_trunk_gives_the_same_samples_on_cuda_or_cpu():
    how, device = dict(backend="eager", fullgraph=True, dynamic=False), "cpu"
    if torch.cuda.is_available():
        how, device = dict(mode="reduce-overhead"), "cuda"
    model = model_of(n_layer=1).to(device)
    eager = generate(model, BLANK, 20, "remdm-cap", generator=gen(9))
    model.net.trunk = torch.compile(model.net.trunk, **how)
    assert torch.equal(generate(model, BLANK, 20, "remdm-cap", generator=gen(9)), eager)


@pytest.fixture
def run(tmp_path):
    """A command, and its samples. Each folder has its own file of them, and its own model."""
    def run(folder="", model=None, **flags):
        path, out = f"{tmp_path}/{folder}.pt", f"{tmp_path}/{folder}/samples.jsonl"
        if not os.path.exists(path):
            save_mdlm(path, model_of(**OF_BYTES, **model or {}), ema=None)
        flags = dict(checkpoint=path, steps=8, device="cpu", out=out) | flags
        sample.main(sample.Config(**flags))
        return read_jsonl(out)
    return run


def test_the_same_command_goes_on_where_it_was_on_any_number_of_ranks(run, tmp_path, monkeypatch):
    def ranks(world):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        for rank in range(world):
            monkeypatch.setenv("RANK", str(rank))
            run(checkpoint=whole[0]["settings"]["checkpoint"], count=5, show=True)
        return sorted(sample.read_samples(str(file)), key=lambda line: line["index"])
    whole, file = run("whole", count=5), tmp_path / "samples.jsonl"
    (tmp_path / "samples.2.jsonl").write_text("another run's")
    assert [line["text"] for line in whole] == [BYTES.decode(line["ids"]) for line in whole]
    lines = (tmp_path / "whole" / "samples.jsonl").read_bytes().splitlines(True)
    for cut in lines[0] + lines[1][:-20], lines[0][:40]:  # killed in the middle of a line
        file.write_bytes(cut)
        assert ranks(1) == whole == ranks(1)  # the second time nothing is left to do
    file.write_bytes(cut)
    assert ranks(3) == whole
    (tmp_path / "samples.rank1.jsonl").unlink()
    assert ranks(2) == whole == ranks(1)


def test_passes_are_counted(run, monkeypatch):
    """With time conditioning, every step makes one. In an order, no more than there are masks."""
    monkeypatch.setattr(sample, "compile_parts", compiled := mock.Mock())
    for least, most, flags in ((1, 3, dict(compile=True)), (3, 3, dict(sampler="random")),
                               (20, 20, dict(model=dict(time_conditioning=True)))):
        [line] = run(str(least), prompt=28 * "x", steps=20, **flags)
        assert least <= line["nfe"] <= most
    assert compiled.call_count == 1


def test_samples_of_other_settings_and_useless_flags_are_refused(run, tmp_path, mine):
    [line], path, mdlm = run("a"), f"{tmp_path}/a.pt", "do nothing with --sampler=mdlm"
    assert line["settings"].keys() == set(vars(sample.Config())) - {
        "count", "out", "show", "device", "compile"} | {"step", "weights", "tokenizer", "dtype",
                                                       "soft_mask"}
    for message, change in (
            ("other settings", dict(seed=2)), ("other settings", dict(top_p=1)),
            ("--length=99 exceeds the 32 of training", dict(length=99)),
            ("leave --steps out", dict(sampler="entropy", threshold=0.9)),
            (mdlm, dict(threshold=0.9)), (mdlm, dict(temperature=0.5)),
            ("fills all 32 positions", dict(prompt="x" * 31))):
        refused(message, run, "a", **change)
    own = torch.load(path)
    for part, name in ("step", ""), ("model", ANY), ("model", "sm.raw_s"):
        new = own[part] | {name: own[part][name].nextafter(torch.tensor(9.0))} if name else 2
        launch.save(path, **own | {part: new})
        refused("other settings", run, "a")
    launch.save(path, **own)
    assert run("a", checkpoint=f"{tmp_path}/./a.pt") == [line]  # the same file
    coded = dict(model=dict(soft_mask=False), code=mine)
    refused("--code needs a soft mask", run, "b", **coded)
    coded |= dict(omega_s=0.5, omega_a=1.0, omega_b=-3.0)
    run("b", **coded)
    with open(mine, "a") as f:
        f.write("# edited")
    refused("other settings", run, "b", **coded)
    append_jsonl(tmp_path / "a" / "samples.jsonl", 3)  # a file of something else
    refused("samples.jsonl: TypeError", run, "a")


def test_what_is_printed(run, monkeypatch, capsys, tmp_path):
    """In a pipe, a text up to its end, and nothing else. One rank draws on a terminal."""
    special = {"bos": 257, "eos": 257}  # as of GPT-2
    assert sample.text_of_sample(BYTES, [257, *b"ab", 257, *b"cd", 257], special, 0) == "ab"
    save_mdlm(tmp_path / ".pt", model_of(**OF_BYTES), ema=None)
    own = torch.load(tmp_path / ".pt")
    for bos, prompt, ids, text in (  # a last blank ends at its EOS, an inner one does not
            (256, "Hi ___", [256, *b"Hi there", 257, *b"ab", 257], "Hi there"),
            (256, "a___b", [256, *b"a", 257, *b"x", 257, *b"b", 257], "axb"),
            (257, "___", [257, *b"ab", 257], "ab")):
        launch.save(tmp_path / ".pt", **own | {"tokenizer": own["tokenizer"] | {"bos": bos}})
        with monkeypatch.context() as patch:
            patch.setattr(sample, "sample", lambda *_: torch.tensor(ids))  # noqa: B023
            run(out="", prompt=prompt, length=len(ids))
        assert capsys.readouterr() == (text + "\n---\n", "")
    monkeypatch.setattr(sample.sys.stdout, "isatty", lambda: True, raising=False)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        run(rank, show=True, count=2)
        assert ("\x1b[48;2;" in capsys.readouterr().out) == (rank == "0")


def test_a_prompt_and_its_blanks_share_the_row():
    """A special token in a prompt is text. Blanks have about equal widths."""
    special, mask = {"bos": 256, "eos": 257, "mask_id": 258}, [258]
    for prompt, ids in (
            ("", mask * 20), ("<|eos|>x", [256, *b"<|eos|>x", *mask * 11]),
            ("a\\n= ___; b = ____!", [256, *b"a\n= ", *mask * 4, *b"; b = ", *mask * 3, 33, 257])):
        assert sample.starting_ids(prompt, 20, BYTES, special).tolist() == ids
