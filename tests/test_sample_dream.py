"""sample_dream.py against §2.2, Alg. 2, Fast-dLLM, and recorded runs of the authors' code."""

import copy
import functools
import io
import itertools
import math
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import dora
import finetune_dream
import pretend
import sample_dream as S
from conftest import gen, plain_omega, recorded_adapter, recording, refused, spy
from dream import Dream
from mdlm import TwoPass
from oracles import draw, fading, floor_counts, in_order, slow_blocks
from sample import Pick, nucleus, reveal
from softmask import SoftMask

MASK = 194
RECORDED = recording("decode_recorded")
PROMPT = RECORDED["prompt"][0].tolist()  # 8 ids
CACHES = "none", "prefix", "dual"
soft = lambda k: SoftMask(MASK, k, omega_s=0.4, omega_a=2.0, omega_b=-2.5, tau=1.3)


@pytest.fixture(scope="module")
def model(tiny_dream):
    return Dream.load(tiny_dream)


def decode(model, prompt, gen_len, steps, sm=None, schedule="none", switch=0.5, block=0,
           cache="prefix", **pick):
    """x after every pass, (passes, L). With `block`, block after block."""
    seen, x = [], S.pad_prompt(model.cfg, prompt, gen_len)
    two, pick = TwoPass(model, sm, model.cfg.mask_token_id), Pick(**pick)
    gain = functools.partial(S.time_gain, schedule=schedule, switch=switch)

    def told(x, lam, masks, h, revealed):
        """λ is that of masks that stay, also of later blocks, from the states that predict them."""
        seen.append(x[0])
        assert not torch.is_grad_enabled()
        if x.is_cuda:  # it would have to wait for the rest
            return
        assert torch.equal(revealed, x[masks] != two.mask_id)
        strength = sm(model.head(h))[0] if sm else torch.zeros(len(h))
        left = (x == two.mask_id).sum().item() / gen_len
        torch.testing.assert_close(lam[masks], gain(left) * strength * ~revealed, equal_nan=True)
        assert lam.count_nonzero() == lam[masks].count_nonzero()
    steps = steps * block // gen_len if block else steps
    shares = S.reveal_shares(steps) if pick.threshold is None else (block or gen_len) * [1]
    if block:
        last = S.decode_blocks(two, x, gen_len, shares, block, cache, pick, gain, told)
    else:
        last = S.decode(two, x, shares, pick, gain, told)
    assert torch.equal(last[0], seen[-1].cpu())
    return torch.stack(seen)


def loving(model, token):
    """The same Dream, but one token is likelier by 100 nats."""
    other, more = copy.copy(model), 100.0 * F.one_hot(torch.tensor(token), model.cfg.vocab_size)
    other.head = lambda h: model.head(h) + more
    return other


def propose(logits, forced=False, **pick):
    """x0 and conf for rows of logits (n, V). The last token is [MASK]."""
    return S.propose(logits, logits.shape[1] - 1, forced, Pick(**pick))


def filtered(logits, temperature, top_p):
    """Probabilities (n, V) after temperature and Dream's top-p"""
    return nucleus((logits / (temperature or 1)).softmax(-1), top_p, keep_crossing=True)


def shifted(model, emb, lo=0, past=None):
    """The network as an oracle calls it: logits (n, V) from emb (n, D), and past."""
    h, past = model.trunk(emb[None], past, lo)
    return model.head(h[0]).roll(1, 0), past


def test_probabilities_and_confidences_equal_the_recorded():
    """But for tokens that were drawn: versions of torch draw others."""
    logits = RECORDED["filter/logits"]
    for name, temperature, top_p in (("t0.0_pNone_kNone", 0, 1), ("t0.1_p0.9_kNone", 0.1, 0.9)):
        how = dict(temperature=temperature, top_p=top_p)
        probs = filtered(logits, **how)
        x0, minus_H = propose(logits, generator=gen(), **how)
        _, p = propose(logits, confidence="maskgit_plus", generator=gen(), **how)
        for found, key in (probs, "filtered_probs"), (minus_H, "negent_conf"):
            torch.testing.assert_close(found, RECORDED[f"filter/{name}_{key}"], atol=1e-6, rtol=0)
        assert torch.equal(p, probs.gather(-1, x0[:, None])[:, 0])
        assert temperature or torch.equal(x0, RECORDED[f"filter/{name}_x0_seed0"])


def test_reveal_counts_equal_the_recorded_and_ties_go_left_to_right():
    keys = [key for key in RECORDED if key.startswith("counts/")]
    assert len(keys) == 13
    for key in keys:
        masked, steps = map(int, key[7:].split("_"))
        x, counts = torch.full((masked,), MASK), []
        for share in S.reveal_shares(steps):
            l = (x == MASK).nonzero()[:, 0]
            x = reveal(x[None], (0 * l, l), 0 * l, l.float(), share)[0]
            counts.append(len(l) - int((x == MASK).sum()))
        assert counts == RECORDED[key].tolist() and sum(counts) == masked, key
    x, ids, masks = torch.full((2, 20), MASK), torch.zeros(40, dtype=torch.long), torch.ones(2, 20)
    masks = masks.nonzero(as_tuple=True)
    first = 5 * [0] + 15 * [MASK]
    assert reveal(x, masks, ids, torch.zeros(40), 0.25).tolist() == [first, first]
    assert not reveal(x, masks, ids, torch.ones(40), 0, threshold=1.0).any()  # 1 can be reached


def test_trajectories_equal_the_recorded(model):
    for name, k, schedule in (("binary_s16", 0, "none"), ("binary_s4", 0, "none"),
                              ("k3_s8", 3, "none"), ("k1_linear_s16", 1, "linear"),
                              ("k1_stepwise_s4", 1, "stepwise")):
        want = RECORDED[name + "_history"]
        got = decode(model, PROMPT, 16, len(want), sm=soft(k) if k else None, schedule=schedule)
        assert torch.equal(got, want[:, 0]), name


def test_time_gain_table():
    """App. C.9. The switch is strict [code]."""
    schedules = "none", "linear", "stepwise", "linear-late", "stepwise-late"
    for schedule, t in itertools.product(schedules, (0.8, math.nextafter(0.5, 1), 0.5, 0.1)):
        assert S.time_gain(t, schedule, 0.5) == fading(schedule, t, 0.5)


def test_decode_is_algorithm_2(model):
    """Feedback comes from the raw logits: top-p changes tokens and order, not λ and π."""
    [x] = S.pad_prompt(model.cfg, PROMPT, 16)
    predict, counts = lambda emb, t: shifted(model, emb)[0], floor_counts(16, 10)
    for k, schedule, confidence in (
            (0, "none", "entropy"), (1, "none", "margin"), (3, "none", "maskgit_plus"),
            (None, "none", "entropy"), (1, "linear", "entropy"), (3, "linear-late", "margin"),
            (None, "stepwise", "entropy"), (3, "stepwise-late", "maskgit_plus")):
        sm = None if k == 0 else soft(k)
        how = dict(schedule=schedule, switch=0.5, top_p=0.3, confidence=confidence)
        want = in_order(predict, model.table, x, MASK, counts, sm and plain_omega(sm), **how)
        got = decode(model, PROMPT, 16, 10, sm=sm, **how)
        assert torch.equal(got, want), (k, schedule)
        assert len(got.unique(dim=0)) > 5 and not (got[-1] == MASK).any()


def test_no_mask_is_left_though_the_model_predicts_masks(model):
    """The released code leaves these masks in its answer. With a threshold it never ends."""
    stubborn = loving(model, MASK)
    for temperature in (0.0, 1.0):
        pick = dict(temperature=temperature, generator=gen())
        history = decode(stubborn, PROMPT, 16, 8, **pick)
        assert (history[:-1, 8:] == MASK).all()  # until the last step [code]
        runs = [decode(stubborn, PROMPT, 16, steps, block=8, cache=cache, threshold=p, **pick)
                for steps, p in ((16, None), (2, None), (16, 0.9)) for cache in CACHES]
        assert not any((run[-1] == MASK).any() for run in [history, *runs])


def test_draws_follow_the_filtered_probabilities_and_a_mask_becomes_the_best_real_token():
    """A threshold is about the token that is written, even if Dream is surer of [MASK]."""
    logits, how = torch.randn(99, 6, generator=gen(1)), dict(temperature=0.8, top_p=0.9)
    (drawn, _), (x0, conf) = (propose(logits, forced, confidence="maskgit_plus", generator=gen(2),
                                      **how) for forced in (False, True))
    p, u = filtered(logits, **how), torch.rand(99, dtype=torch.float64, generator=gen(2))
    assert drawn.tolist() == list(map(draw, p.tolist(), u.tolist()))
    best = logits[:, :5].argmax(-1)
    assert torch.equal(x0, torch.where(drawn == 5, best, drawn)) and 5 in drawn
    assert torch.equal(conf, p.gather(-1, x0[:, None])[:, 0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_end_the_decoding(model, value):
    """Otherwise NaN is the surest of all, or no mask is ever filled."""
    broken = copy.copy(model)
    broken.head = lambda h: model.head(h) + torch.where(h.sum(-1, keepdim=True) > 3, value, 0.0)
    for how, algorithm, temperature in itertools.product(
            ({}, dict(block=4), dict(block=8, threshold=0.4)), ("entropy", "margin"), (0, 1)):
        how |= dict(confidence=algorithm, temperature=temperature, top_p=0.9, generator=gen())
        refused("not finite", decode, broken, PROMPT, 16, 16, sm=soft(3), **how)


def test_blocks_and_their_calls_equal_the_recorded(model, monkeypatch):
    calls = spy(monkeypatch, model, "trunk")
    names = [key[7:-2] for key in RECORDED if key.startswith("blocks/") and key.endswith("_x")]
    assert len(names) == 15
    for name in names:
        kind, block, rule = name.split("_", 2)
        cache = {"nocache": "none"}.get(kind, kind)
        threshold = float(rule[3:]) if rule.startswith("thr") else None
        steps = 16 if threshold else int(rule.split("_s")[1])
        calls.clear()
        got = decode(model, PROMPT, 16, steps, block=int(block[1:]), cache=cache,
                     threshold=threshold)
        assert torch.equal(got, RECORDED[f"blocks/{name}_x"][1:]), name
        seen = [[start, emb.shape[1]] for emb, _, start in calls]
        want = RECORDED[f"blocks/{name}_call"].tolist()
        # Without a cache, the recording has the slices that were used, of all 24 positions.
        assert seen == (want if cache != "none" else [[0, 24]] * len(want)), name


def test_a_threshold_without_blocks(model):
    [x] = S.pad_prompt(model.cfg, PROMPT, 16)
    predict, passes = lambda emb, t: shifted(model, emb)[0], set()
    for p in 0.11, 0.15, 0.9:
        sm = soft(3)
        want = in_order(predict, model.table, x, MASK, None, plain_omega(sm), threshold=p)
        got = decode(model, PROMPT, 16, 16, sm=sm, threshold=p)
        assert torch.equal(got, want)
        passes.add(len(got))
    assert len(passes) == 3 and max(passes) == 16


def test_feedback_in_blocks_is_that_of_the_latest_prediction(model):
    """At this ω, no two proposals are so close that rounding decides between them."""
    [x], predict = S.pad_prompt(model.cfg, PROMPT, 16), functools.partial(shifted, model)
    heads, differs = itertools.cycle([(1, "none"), (3, "stepwise"), (None, "linear")]), []
    for cache, threshold, block in itertools.product(CACHES, (None, 0.12), (4, 8)):
        k, schedule = next(heads)
        how = dict(block=block, cache=cache, threshold=threshold, schedule=schedule, switch=0.7)
        sm = SoftMask(MASK, k, omega_s=0.9, omega_a=2.0, omega_b=-5.0)
        want = slow_blocks(predict, model.table, x, MASK, 16, 16, soft=plain_omega(sm), **how)
        got, binary = (decode(model, PROMPT, 16, 16, sm=head, **how) for head in (sm, None))
        assert torch.equal(got, want), (k, how)
        differs.append(not torch.equal(got[-1], binary[-1]))
    assert sum(differs) > 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: pretends that one is")
def test_cuda_is_waited_for_once_in_a_pass(model):
    """The vocabulary is so small that `likeliest` sorts it, without a sync."""
    drawn = {"temperature": 1.0, "top_p": 0.9}
    cases = ({"schedule": "linear"}, drawn, drawn | {"block": 4, "cache": "dual"},
             {"block": 4, "threshold": 0.5})
    for words, sm in itertools.product(cases, (None, soft(3))):
        want = decode(model, PROMPT, 8, 4, sm=sm, generator=gen(), **words)
        with pretend.gpu() as waits:
            two = TwoPass(copy.deepcopy(model), copy.deepcopy(sm), MASK).to("cuda")
            waits.clear()
            got = decode(two.net, PROMPT, 8, 4, sm=two.sm, generator=gen(), **words)
        assert waits == ["to"] * (len(got) + 2), words  # the last are of the result, twice
        assert torch.equal(got, want), words


@pytest.mark.parametrize("device, backend", [("cpu", "aot_eager"), pytest.param(
    "cuda", "inductor", marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs CUDA: would check its compiled kernels"))])
def test_cuda_and_cpu_compile_the_trunk_once(tiny_dream, monkeypatch, device, backend):
    """The CPU checks the graphs alone: to compile them takes half a minute."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    eager = Dream.load(tiny_dream, device)
    eager.model["layers"] = eager.model["layers"][:1]
    compiled = copy.deepcopy(eager)
    compiled.trunk = torch.compile(compiled.trunk, dynamic=True)
    run = lambda model, x, how: decode(model, x, 16, 8, sm=soft(3).to(device), **how)
    same = lambda x, **how: torch.equal(run(eager, x, how), run(compiled, x, how))
    assert same(PROMPT, block=4, cache="dual") and same(PROMPT)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same(PROMPT[:5]) and all(same(PROMPT[:5], block=8, cache=cache) for cache in CACHES)


def test_an_answer_ends_at_the_end_token_and_counts_what_it_cost(tiny):
    cfg = S.Decoding(model=tiny[0], gen_len=16, steps=4, temperature=0.0)
    model, tok, _ = S.load_for_decoding(cfg)
    prompt, x = tok.encode("abc"), loving(model, tok.encode("x")[0])
    text, stats = S.answer(loving(model, 256), tok, None, prompt, cfg)
    assert stats.pop("seconds") > 0 and (text, stats) == ("", {"nfe": 4, "tokens": 16, "kept": 0})
    assert S.answer(x, tok, None, prompt, cfg)[0] == 16 * "x"
    assert S.answer(x, tok, None, prompt, cfg, ["y", "xxxxx"])[0] == ""


def test_merged_and_unmerged_adapter_decode_alike(tiny, tmp_path):
    scaled = recorded_adapter(Dream.load(tiny[0]), alpha=40)
    head = SoftMask(261, 3, omega_s=0.9, omega_a=2.0, omega_b=-4.5)
    finetune_dream.save_adapter(str(tmp_path), scaled, head, finetune_dream.Config(alpha=40, k=3))

    def run(**flags):
        model, _, sm = S.load_for_decoding(S.Decoding(tiny[0], str(tmp_path), **flags))
        return len(dora.layers(model)), decode(model, PROMPT, 16, 16, sm=sm)
    (none, merged), (eight, beside) = run(), run(merge=False)
    assert (none, eight) == (0, 8) and torch.equal(merged, beside)
    assert torch.equal(merged, decode(scaled, PROMPT, 16, 16, sm=head))
    for other in ({"soft": False}, dict(omega_s=0.9, omega_a=2.0, omega_b=-1.5)):
        assert not torch.equal(merged, run(**other)[1])


@pytest.mark.parametrize("change, dtype, told", [
    (1e-4, "bfloat16", True), (1e-4, "float32", False), (0.1, "bfloat16", False)])
def test_a_merge_that_rounds_an_adapter_away_says_so(tiny, tmp_path, capsys, change, dtype, told):
    dream = recorded_adapter(Dream.load(tiny[0]))
    for layer in dora.layers(dream).values():
        layer.lora_B.data.zero_()
        layer.lora_magnitude_vector.data = (1 + change) * layer.norm()
    finetune_dream.save_adapter(str(tmp_path), dream, None, finetune_dream.Config())
    S.load_for_decoding(S.Decoding(tiny[0], str(tmp_path), dtype=dtype))
    assert ("--merge=False keeps" in capsys.readouterr().err) == told


@pytest.fixture
def go(tiny, capsys, monkeypatch):
    def go(typed="", **flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        S.main(S.Config(model=tiny[0], gen_len=8, **flags))
        return capsys.readouterr()
    return go


def test_the_command_answers_and_infills(go):
    omega = dict(omega_s=0.9, omega_a=2.0, omega_b=-3.0)
    err = go(prompt="hello", **omega, block=4, threshold=1e-9, schedule="linear").err
    assert "8 tokens (8 before the end) in 4 passes" in err and "; SoftMask(k=3, omega_s=0.9" in err
    for blank in "___", 9 * "_":
        filled, err = go(infill=f"def __f__():\\n    {blank} # end", steps=4)
        assert "8 tokens" in err and "in 4 passes" in err
        assert filled.startswith("def __f__():\n    ") and filled.endswith(" # end\n")
        assert "___" not in filled
    mask = r"^<\|mask\|> would become"
    for message, flags in (
            ("give one of", {}), ("give one of", {"prompt": "a", "chat": True}),
            ("position 0 is masked", {"infill": "___ # end"}),
            ("use --block=0 to infill", {"infill": "a ___ b", "block": 4}),
            ("--schedule=linear scales the feedback", {"prompt": "a", "schedule": "linear"}),
            (mask, {"prompt": "a <|mask|>"}), (mask, {"infill": "<|mask|> ___"}),
            (mask, {"chat": True})):
        refused(message, go, typed="<|mask|>b\n", **flags)


def test_a_chat_is_made_of_turns_and_an_infill_is_not(go, monkeypatch):
    answer = mock.Mock(return_value=("hi", {"nfe": 1, "tokens": 8, "kept": 2, "seconds": 1.0}))
    monkeypatch.setattr(S, "answer", answer)
    assert go(typed="hello\nagain\n", chat=True).out == "hi\nhi\n"
    go(prompt="hello")
    go(infill="a")
    calls = [call.args for call in answer.call_args_list]
    first, second, turn, _ = (ids for _, _, _, ids, *_ in calls)
    assert first == turn and {257, 258} < set(first)  # the chat's markers are tokens
    more = "hi<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    tok = calls[0][1]
    assert second == first + tok.encode(more, special=True)
    until = [call[5] for call in calls]
    assert until[2] == ["<|im_end|>"] and not until[3]
