"""sample.py against Eq. 1, Alg. 2, App. B.1, and the authors' transition matrices."""

import re
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
from launch import append_jsonl, read_jsonl
from mdlm import DiT
from sample import SAMPLERS, Pick, decode, generate, nucleus, shares_of, step_probs

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
        for keeps in False, True:
            expected = [oracles.nucleus(row, p, keeps) for row in probs.tolist()]
            torch.testing.assert_close(nucleus(probs, p, keeps), probs.new_tensor(expected))


def test_a_token_is_drawn_where_u_falls_in_its_part_of_the_cumulative_sum():
    for probs, u, tokens in (  # any sum, edges, and tokens that fp32 noise cannot reach
            ([0, 1.5, 0, 1.5], [0, 0.4, 0.5, 0.9], [1, 1, 3, 3]),
            ([1e-12, 1, 1e-12], [0, 0.9e-12, 1.1e-12, 1 - 1.1e-12, 1 - 2**-53], [0, 0, 1, 1, 2])):
        rows, u = torch.tensor([probs] * len(u)), torch.tensor(u, dtype=torch.float64)
        assert sample.categorical(rows, u).tolist() == tokens


class Gated(DiT):
    """A backbone of one's own, which is sampled through its `hidden`"""
    def hidden(self, emb, masks, t):
        return 1.2 * super().hidden(emb, masks, t)


def oracle_of(model, soft):
    """The network as an oracle calls it: (emb (L, D), t) → logits (L, V). And its ω.

    The model is left without ω if not soft, and in training: dropout must be off in decoding.
    """
    net = model.train().net
    net.__class__ = Gated
    omega = plain_omega(model.sm) if soft else None
    model.sm = model.sm if soft else None
    every = torch.zeros(10, dtype=torch.long), torch.arange(10)
    predict = lambda emb, t: net.head(net.hidden(emb[None], every, torch.tensor([t])))
    return predict, omega


@pytest.mark.parametrize("sampler, soft", [*product(SAMPLERS, (True, False))])
@pytest.mark.parametrize("changes, t_end, every", [
    ({}, 1e-5, False), (dict(k=None), 1e-5, False), ({}, 0.2, False), ({}, 1e-5, True),
    (dict(time_conditioning=True), 0.1, True)])
def test_generate_is_alg_2(sampler, soft, changes, t_end, every, monkeypatch):
    monkeypatch.setattr(sample, "T_END", t_end)
    eta = 0.3 if "remdm" in sampler else 0.0
    monkeypatch.setitem(SAMPLERS, sampler, eta)
    model = model_of(**changes)
    predict, omega = oracle_of(model, soft)
    probs = lambda t, s: step_probs(t, s, sampler, eta)
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


margin = lambda p: p.topk(2).values @ torch.tensor([1.0, -1.0])  # an order of one's own
PICKS = (dict(), dict(top_p=0.7, confidence="maskgit_plus"), dict(confidence="margin"),
         dict(confidence=margin), dict(temperature=0.8, top_p=0.9),
         dict(temperature=1.5, confidence="random"), dict(threshold=0.8),
         dict(threshold=0.5, temperature=1.2, confidence="random"))


@pytest.mark.parametrize("changes, soft", [
    ({}, True), (dict(k=None), True), (dict(time_conditioning=True), False)])
def test_decode_is_its_loop(changes, soft):
    """Any number of tokens in a step. Rows side by side give what each gives alone."""
    model, passes = model_of(6, 0.3, **changes), set()
    predict, omega = oracle_of(model, soft)
    rows = torch.stack([ROWS[2].roll(i) for i in range(3)])                       # 6 masks each
    for how, counts in product(PICKS, ([1] * 6, [1, 2, 2, 1], [2, 4], [6])):
        shares = repeat(1) if "threshold" in how else shares_of(counts)
        literal = how | {"confidence": "margin"} if how.get("confidence") == margin else how
        for x, own, g in zip(rows, generators(3, 1), generators(3, 1)):
            seen = []
            ids = decode(model.train(), x[None], shares, Pick(**how, generator=own),
                         on_step=lambda x, *_: seen.append(x[0]))  # noqa: B023
            with torch.no_grad():
                expected = oracles.in_order(predict, model.net.table, x, MASK, counts, omega,
                                            **literal, generator=g)
            assert torch.equal(torch.stack(seen), expected) and torch.equal(ids[0], expected[-1])
            passes |= {len(seen)} if "threshold" in how else set()
        if "temperature" not in how:
            alone = [decode(model, x[None], shares, Pick(**how)) for x in rows]
            assert torch.equal(decode(model, rows, shares, Pick(**how)), torch.cat(alone))
    assert len(passes) > 2  # the threshold was passed, and not always by all


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_an_order_of_ones_own_may_give_any_numbers(threshold):
    """Infinite ones, other types, and with a threshold numbers that are no probabilities"""
    model, seen = model_of(6, 0.3), []
    shares = repeat(1) if threshold else shares_of([1] * 6)
    for order in (lambda p: p[:, 0].log() - torch.inf, lambda p: p.argmax(-1),
                  lambda p: p[:, 0].double()):
        rows = ROWS if threshold else ROWS[2:]
        assert (decode(model, rows, shares, Pick(order, threshold=threshold)) != MASK).all()
    decode(model, BLANK[None], repeat(1), Pick(lambda p: torch.arange(len(p)) / len(p), 0, 1, 0.5),
           on_step=lambda x, lam, masks, h, revealed: seen.append(revealed.tolist()))
    assert seen[0] == [False] * 5 + [True] * 5


def test_what_decode_cannot_do_is_refused():
    """Rows stay equal only without [MASK] among the predictions. `topk_margin` is Dream's word."""
    model = model_of(6, 0.3)
    for rows, order, message in ((ROWS, "entropy", "equally many masks"),
                                 (ROWS[:1], "topk_margin", "topk_margin")):
        with pytest.raises(ValueError, match=message):
            decode(model, rows, shares_of([1]), Pick(order))


@pytest.mark.parametrize("confidence", [*sample.ORDERS, lambda p: p[:, 0] * torch.nan])
def test_what_is_not_finite_is_seen(confidence):
    model = model_of(6, 0.3)
    if not callable(confidence):
        model.net.output_layer.linear.bias.data[5] = torch.nan
    refused("not finite", decode, model, ROWS[2:], shares_of([1] * 6), Pick(confidence))


def test_shares_reveal_the_counts_exactly():
    for counts in [1] * 49, [1, *[2] * 11, 1], [3, 0, 4], [5, 5, 0]:
        left, found = sum(counts), []
        for share in shares_of(counts):
            found.append(int(left * share))
            left -= found[-1]
        assert found == counts


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


def test_rows_and_torchs_own_generator_draw_other_tokens():
    rows = decode(model_of(), BLANK.expand(4, -1), shares_of([1] * 10), Pick("random", 1.0))
    assert len(rows.unique(dim=0)) == 4


@pytest.mark.parametrize("device, how", [
    ("cpu", dict(backend="eager", fullgraph=True, dynamic=False)),
    pytest.param("cuda", dict(mode="reduce-overhead"), marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: would check its graphs of the trunk"))])
def test_a_compiled_trunk_gives_the_same_samples(device, how):
    model = model_of(n_layer=1).to(device)
    run = lambda: generate(model, BLANK, 20, "remdm-cap", generator=gen(9))
    expected = run()
    model.net.trunk = torch.compile(model.net.trunk, **how)
    assert torch.equal(run(), expected)


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
    refused("leave --steps out", run, sampler="entropy", threshold=0.9)
    for other in dict(threshold=0.9), dict(temperature=0.5):
        refused("do nothing with --sampler=mdlm", run, **other)
    refused("fills all 32 positions", run, prompt="x" * 31)
    assert run(count=5) == whole


def test_passes_are_counted(run, tmp_path, monkeypatch):
    """With time conditioning, every step makes one. In an order, no more than there are masks."""
    timed = str(tmp_path / "timed.pt")
    save_mdlm(timed, model_of(**OF_BYTES, time_conditioning=True), ema=None)
    monkeypatch.setattr(sample, "compile_parts", compiled := mock.Mock())
    [line] = run("some", prompt=28 * "x", steps=20, compile=True)
    assert 1 <= line["nfe"] <= 3 and line["settings"]["steps"] == 20 and compiled.called
    [line] = run("all", prompt=28 * "x", steps=20, checkpoint=timed)
    assert line["nfe"] == 20 and compiled.call_count == 1
    [line] = run("ordered", prompt=28 * "x", steps=20, sampler="entropy")
    assert line["nfe"] == line["settings"]["steps"] == 3


def test_one_rank_draws_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr(sample.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sample, "show", drawn := mock.Mock())
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        run(show=True, count=4)
    run("other")
    assert drawn.call_count == 1


def test_samples_of_other_settings_are_refused(run, saved, tmp_path):
    made, own = dict(count=2, checkpoint=str(tmp_path / "own.pt")), torch.load(saved)
    launch.save(made["checkpoint"], **own)
    *_, line = run(**made)
    anything = {"count", "out", "show", "device", "compile"}
    facts = {"step", "weights", "tokenizer", "dtype"}
    assert line["settings"].keys() == vars(sample.Config()).keys() - anything | facts
    other = "has other settings"
    for change in dict(seed=2), dict(top_p=0.8), dict(steps=7):
        refused(other, run, **made | change)
    for change in dict(step=2), *(dict(model=own["model"] | {name: own["model"][name] + 1})
                                  for name in (TABLE, "sm.raw_s")):
        launch.save(made["checkpoint"], **own | change)
        refused(other, run, **made)
    launch.save(made["checkpoint"], **own)
    run(**made | dict(checkpoint=f"{tmp_path}/./own.pt"))  # the same file
    append_jsonl(tmp_path / "samples.jsonl", 3)  # a file of something else
    refused("samples.jsonl: TypeError", run, **made)


def test_a_sample_is_drawn_on_a_terminal(monkeypatch, capsys):
    """Guesses on green, darker for larger λ, in place of masks. As much as the terminal holds"""
    monkeypatch.setenv("COLUMNS", "4")
    monkeypatch.setenv("LINES", "3")
    model = model_of(**OF_BYTES)
    x = torch.tensor([[97, 258, 258, 10, 258, 98, 99, 99, 99]])
    lam = torch.tensor([[0, 0.0, 1.0, 0, 0.5, 0, 0, 0, 0]])
    masks = torch.zeros(4, dtype=torch.long), torch.tensor([1, 2, 3, 4])  # 3 was revealed
    model.net.head = lambda h: F.one_hot(torch.tensor([100, 101, 0, 102]), 259)
    sample.show(BYTES, model)(x, lam, masks, None, None)
    out = capsys.readouterr().out
    assert re.sub("\x1b.*?[mHJ]", "", out) == "ade↵fbc\n"
    assert re.findall(r"48;2;(\d+)", out) == ["220", "0", "110"]


def test_a_text_ends_where_it_ends(run, capsys, monkeypatch):
    """On the screen. The file keeps all ids. In a pipe, nothing but the text is printed."""
    for bos in 256, 257:  # GPT-2 has one token for both ends
        special = {"bos": bos, "eos": 257}
        assert sample.shown(BYTES, [bos, *b"ab", 257, *b"cd", 257], special) == "ab"
    texts = iter([[256, *b"Hi there", 257, *b"ab", 257], [256, *b"a", 257, *b"x", 257, *b"b", 257]])
    with monkeypatch.context() as patch:  # a last blank ends at its EOS, an inner one does not
        patch.setattr(sample, "sample", lambda *_: torch.tensor(next(texts)))
        run(out="", prompt="Hi ___", length=13)
        run(out="", prompt="a___b", length=7)
    assert capsys.readouterr().out == "Hi there\n---\naxb\n---\n"
    run(out="", prompt="x", count=2)
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n---\n") == 2 and out[0] == "x" and "<|bos|>" not in out


def test_other_ranks_go_on_with_what_is_left(run, tmp_path, monkeypatch):
    def ranks(world):
        for rank in map(str, range(world)):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", str(world))
            run(count=7)
        lines = sample.read_samples(str(tmp_path / "samples.jsonl"))
        return sorted((line["index"], line["ids"]) for line in lines)
    run(count=2)
    whole = ranks(3)
    (tmp_path / "samples.1.jsonl").unlink()
    assert ranks(2) == whole == ranks(1) and [i for i, _ in whole] == [*range(7)]


def test_prompt_and_infill_stay_as_given(run, capsys):
    """A special token in a prompt is text."""
    for line in run(prompt="<|eos|>f(x):", count=3, sampler="remdm-cap"):
        assert line["ids"][:13] == [256, *b"<|eos|>f(x):"]
    assert capsys.readouterr().err.startswith("<|eos|> in the prompt is text")
    [line] = run("infill", prompt="a\\n= ___; b = ___!", length=20)
    ids = line["ids"]
    assert ids[:5] == [256, *b"a\n= "] and ids[-2:] == [ord("!"), 257] and len(ids) == 20
    assert bytes(ids[9:15]) == b"; b = "  # gaps of 4 and 3


def test_decoding_takes_another_omega_also_for_a_binary_model(run, tmp_path):
    binary, omega = str(tmp_path / "binary.pt"), dict(omega_s=0.9, omega_a=1.5, omega_b=-2.0)
    save_mdlm(binary, model_of(**OF_BYTES, soft_mask=False), ema=None)
    [own], [soft] = run("own"), run("soft", **omega)
    [plain], [given] = run("plain", checkpoint=binary), run("given", checkpoint=binary, **omega)
    assert own["ids"] != soft["ids"] == given["ids"] != plain["ids"]
    assert given["settings"].items() >= omega.items() and not plain["settings"]["soft"]
