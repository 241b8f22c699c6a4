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
from oracles import fading, floor_counts, in_order, rng, slow_blocks
from sample import Pick, nucleus
from softmask import SoftMask

MASK = 194
RECORDED = recording("decode_recorded")
PROMPT = RECORDED["prompt"][0].tolist()  # 8 ids
CACHES = "none", "prefix", "dual"
soft = lambda k: SoftMask(MASK, k, omega_s=0.4, omega_a=2.0, omega_b=-2.5, tau=1.3)


@pytest.fixture(scope="module")
def model(tiny_dream):
    return Dream.load(tiny_dream)


def decode(model, steps, sm=None, prompt=PROMPT, gen_len=16, **how):
    """x after every pass, (passes, L), by the function that answers"""
    seen = []
    cfg = S.Decoding(gen_len=gen_len, steps=steps, **dict(temperature=0.0, top_p=1.0) | how)
    S.answer(model, mock.Mock(), sm, prompt, cfg, on_step=lambda x, *_: seen.append(x[0]))
    return torch.stack(seen)


def loving(model, token, nats=100.0):
    """The same Dream, but one token is likelier."""
    other = copy.copy(model)
    more = nats * F.one_hot(torch.tensor(token), model.cfg.vocab_size)
    other.head = lambda h: model.head(h) + more
    return other


def shifted(model, emb, lo=0, past=None):
    """The network as an oracle calls it: logits (n, V) from emb (n, D), and past."""
    h, past = model.trunk(emb[None], past, lo)
    return model.head(h[0]).roll(1, 0), past


def test_probabilities_and_confidences_equal_the_recorded():
    """But for tokens that were drawn: versions of torch draw others."""
    logits = RECORDED["filter/logits"]
    for name, temperature, top_p in (("t0.0_pNone_kNone", 0, 1), ("t0.1_p0.9_kNone", 0.1, 0.9)):
        propose = lambda *how: S.propose(logits, MASK, False, Pick(*how, generator=gen()))
        x0, minus_H = propose("entropy", temperature, top_p)
        _, p = propose("maskgit_plus", temperature, top_p)
        probs = nucleus((logits / (temperature or 1)).softmax(-1), top_p, keep_crossing=True)
        for found, key in (probs, "filtered_probs"), (minus_H, "negent_conf"):
            torch.testing.assert_close(found, RECORDED[f"filter/{name}_{key}"], atol=1e-6, rtol=0)
        assert torch.equal(p, probs.gather(-1, x0[:, None])[:, 0])
        assert temperature or torch.equal(x0, RECORDED[f"filter/{name}_x0_seed0"])


def test_reveal_counts_equal_the_recorded():
    for key in [key for key in RECORDED if key.startswith("counts/")]:
        left, steps = map(int, key[7:].split("_"))
        counts = []
        for share in S.reveal_shares(steps):
            counts.append(int(left * share))
            left -= counts[-1]
        assert counts == RECORDED[key].tolist() and left == 0, key


def test_trajectories_equal_the_recorded(model):
    for name, k, schedule in (("binary_s16", 0, "none"), ("binary_s4", 0, "none"),
                              ("k3_s8", 3, "none"), ("k1_linear_s16", 1, "linear"),
                              ("k1_stepwise_s4", 1, "stepwise")):
        want = RECORDED[name + "_history"]
        got = decode(model, len(want), soft(k) if k else None, schedule=schedule)
        assert torch.equal(got, want[:, 0]), name


def test_decode_is_algorithm_2(model):
    """Feedback comes from the raw logits: top-p changes tokens and order, not λ and π. At a
    top-p of 0.01, all tokens are certain: such ties go left to right, and reach a threshold of 1.
    A threshold is about the token that is written, even if Dream is surer of [MASK] [ours]."""
    [x], fond, passes = S.pad_prompt(model.cfg, PROMPT, 16), loving(model, MASK, 5.5), []
    for net, k, algorithm, how in (
            (model, 0, "entropy", {}), (model, 1, "topk_margin", {}),
            (model, 3, "maskgit_plus", {}), (model, None, "entropy", {}),
            (model, 1, "entropy", dict(schedule="linear", top_p=0.01)),
            (model, 3, "topk_margin", dict(schedule="linear-late")),
            (model, None, "entropy", dict(schedule="stepwise")),
            (model, 3, "maskgit_plus", dict(schedule="stepwise-late")),
            (model, 3, "entropy", dict(threshold=1.0, top_p=0.01)),
            *[(fond, 1, "entropy", dict(threshold=0.15, temperature=t)) for t in (0.0, 0.8)],
            *[(model, 3, "entropy", dict(threshold=p, top_p=1.0)) for p in (0.11, 0.15, 0.9)]):
        sm = None if k == 0 else soft(k)
        how = dict(top_p=0.9 if net is fond else 0.3) | how
        got = decode(net, 10, sm, algorithm=algorithm, **how)
        want = in_order(lambda emb, t: shifted(net, emb)[0], model.table, x, MASK,  # noqa: B023
                        floor_counts(16, 10), sm and plain_omega(sm), generator=rng(0, PROMPT),
                        confidence=algorithm, **how)
        assert torch.equal(got, want), (k, algorithm, how)
        passes.append(len(got))
    assert len({*passes[-3:]}) == 3 and max(passes) == 16
    for schedule in "stepwise", "stepwise-late":  # the switch is strict [code]
        assert S.time_gain(0.5, schedule, 0.5) == fading(schedule, 0.5, 0.5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_mask_is_left_though_the_model_predicts_masks(model, temperature):
    """The released code leaves them in its answer. With a threshold, it never ends."""
    how = dict(temperature=temperature, top_p=0.9)
    history = decode(loving(model, MASK), 8, **how)
    assert (history[:-1, 8:] == MASK).all() and MASK not in history[-1]
    for cache, (steps, p) in itertools.product(CACHES, ((16, None), (2, None), (16, 0.9))):
        history = decode(loving(model, MASK), steps, block=8, cache=cache, threshold=p, **how)
        assert MASK not in history[-1]
    refused("not finite", decode, loving(model, 3, math.nan), 16, block=8)


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
        got = decode(model, steps, block=int(block[1:]), cache=cache, threshold=threshold)
        assert torch.equal(got, RECORDED[f"blocks/{name}_x"][1:]), name
        seen = [[start, emb.shape[1]] for emb, _, start in calls]
        want = RECORDED[f"blocks/{name}_call"].tolist()
        # Without a cache, the recording has the slices that were used, of all 24 positions.
        assert seen == (want if cache != "none" else [[0, 24]] * len(want)), name


def test_feedback_in_blocks_is_that_of_the_latest_prediction(model):
    """At this ω, no two proposals are so close that rounding decides between them."""
    [x], predict = S.pad_prompt(model.cfg, PROMPT, 16), functools.partial(shifted, model)
    heads = itertools.cycle([(1, "stepwise-late"), (3, "stepwise"), (None, "linear")])
    for cache, threshold, block in itertools.product(CACHES, (None, 0.12), (4, 8)):
        k, schedule = next(heads)
        how = dict(block=block, cache=cache, threshold=threshold, schedule=schedule, switch=9 / 16)
        sm = SoftMask(MASK, k, omega_s=0.9, omega_a=2.0, omega_b=-5.0)
        want = slow_blocks(predict, model.table, x, MASK, 16, 16, soft=plain_omega(sm), **how)
        assert torch.equal(decode(model, 16, sm, **how), want), (k, how)


def test_what_blocks_tell_after_a_pass(model):
    """λ of each mask that stays, from its h, and 0 elsewhere"""
    sm, seen = soft(3), []
    cfg = S.Decoding(gen_len=16, steps=8, block=8, temperature=0.0)
    S.answer(model, mock.Mock(), sm, PROMPT, cfg, on_step=lambda *now: seen.append(now))
    for x, lam, masks, h, revealed in seen:
        assert torch.equal(revealed, x[masks] != MASK)
        expected = torch.zeros(x.shape).index_put(masks, sm(model.head(h))[0] * ~revealed)
        torch.testing.assert_close(lam, expected)
    assert len(seen) == 8 and seen[0][1].any() and not sm.training


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: pretends that one is")
def test_cuda_is_waited_for_once_in_a_pass(model):
    """The vocabulary is so small that `likeliest` sorts it, without a sync."""
    cases = (dict(schedule="linear", temperature=1.0, top_p=0.9), dict(block=4, threshold=0.5),
             dict(temperature=1.0, block=4, cache="dual"))
    for how, sm in itertools.product(cases, (None, soft(3))):
        want = decode(model, 4, sm, gen_len=8, **how)
        with pretend.gpu() as waits:
            two = TwoPass(copy.deepcopy(model), copy.deepcopy(sm), MASK).to("cuda")
            waits.clear()
            got = decode(two.net, 4, two.sm, gen_len=8, **how)
        assert waits == ["to"] * (len(got) + 1), how  # the last is of the result
        assert torch.equal(got, want), how


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
    run = lambda model, x, how: decode(model, 8, soft(3).to(device), x, **how)
    same = lambda x, **how: torch.equal(run(eager, x, how), run(compiled, x, how))
    assert same(PROMPT, block=4, cache="dual") and same(PROMPT)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same(PROMPT[:5]) and all(same(PROMPT[:5], block=8, cache=cache) for cache in CACHES)


def test_an_answer_ends_at_the_end_token_and_counts_what_it_cost(tiny):
    cfg = S.Decoding(model=tiny[0], gen_len=16, steps=4, temperature=0.0)
    model, tok, _ = S.load_for_decoding(cfg)
    prompt, x = tok.encode("abc"), loving(model, tok.encode("x")[0])
    model.cfg.eos_token_id = [256, 258]
    for end in 256, 258:
        text, stats = S.answer(loving(model, end), tok, None, prompt, cfg)
        assert stats.pop("seconds") > 0 and text == ""
        assert stats == {"nfe": 4, "tokens": 16, "kept": 0}
    assert S.answer(x, tok, None, prompt, cfg)[0] == 16 * "x"
    assert S.answer(x, tok, None, prompt, cfg, ["y", "xxxxx"])[0] == ""


def test_merged_and_unmerged_adapter_decode_alike(tiny, tmp_path):
    """With every ω, and with none where there was another"""
    scaled = recorded_adapter(Dream.load(tiny[0]), alpha=40)
    heads = [SoftMask(261, k, omega_s=0.9, omega_a=2.0, omega_b=-4.5, tau=1.3) for k in (3, None)]
    heads[0].raw_s.data.fill_(20.0)  # ω_s is 1 in fp32
    load = lambda **flags: S.load_for_decoding(S.Decoding(tiny[0], str(tmp_path), **flags))
    for head in *heads, None:
        cfg = finetune_dream.Config(alpha=40, k=head and head.k)
        finetune_dream.save_adapter(str(tmp_path), scaled, head, cfg)
        want = decode(scaled, 16, head)
        for merge in True, False:
            model, _, sm = load(merge=merge)
            assert len(dora.layers(model)) == (0 if merge else 8) and repr(sm) == repr(head)
            assert torch.equal(decode(model, 16, sm), want)
        assert load(soft=False)[2] is None


def test_the_command_answers_infills_and_chats(tiny, capsys, monkeypatch):
    def go(typed="", **flags):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        S.main(S.Config(model=tiny[0], gen_len=8, **flags))
        return capsys.readouterr()
    omega = dict(omega_s=0.9, omega_a=2.0, omega_b=-3.0)
    err = go(prompt="hello", **omega, block=4, threshold=1e-9, schedule="linear").err
    assert "8 tokens (8 before the end) in 4 passes" in err and "; SoftMask(k=3, omega_s=0.9" in err
    assert "8 tokens (8 before the end) in 8 passes" in go(infill="a ___").err
    filled, err = go(infill="def __f__():\\n    _____ # end", steps=4)
    assert "in 4 passes" in err and "___" not in filled
    assert filled.startswith("def __f__():\n    ") and filled.endswith(" # end\n")
    asked = spy(monkeypatch, S, "answer")
    go(typed="hello\nagain\n", chat=True)
    (_, tok, _, first, _, until, _), (_, _, _, second, *_) = asked
    more = "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    more = tok.encode(more, special=True)
    assert second[:len(first)] == first and second[-len(more):] == more and until == ["<|im_end|>"]
    for message, flags in (
            ("give one of", {"prompt": "a", "chat": True}),
            ("position 0 is masked", {"infill": "___ # end"}),
            ("--block=0", {"infill": "a ___ b", "block": 4}),
            ("leave --steps out", {"prompt": "a", "threshold": 0.5, "steps": 4}),
            ("scales the feedback", {"prompt": "a", "schedule": "linear"}),
            ("become a .MASK.", {"infill": "<|mask|> ___"}), ("become a .MASK.", {"chat": True})):
        refused(message, go, typed="<|mask|>b\n", **flags)
