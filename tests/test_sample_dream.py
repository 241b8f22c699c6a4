"""sample_dream.py against §2.2, Alg. 2, Fast-dLLM, and recorded runs of the authors' code."""

import copy
import functools
import io
import itertools
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import chunks
import dora
import finetune_dream
import pretend
import sample_dream as S
from conftest import gen, plain_omega, recorded_adapter, recording, refused, spy
from dream import Dream
from mdlm import TwoPass
from oracles import slow_blocks, slow_decode
from softmask import SoftMask

MASK = 194
RECORDED = recording("decode_recorded")
PROMPT = RECORDED["prompt"].long()  # (1, 8)
TEXT = PROMPT[0].tolist()
CACHES = "none", "prefix", "dual"
BLOCKS = sorted(key[7:-2] for key in RECORDED if key.startswith("blocks/") and key.endswith("_x"))


@pytest.fixture(scope="module")
def model(tiny_dream):
    return Dream.load(tiny_dream)


def soft(k, mask_id=MASK):
    return SoftMask(mask_id, k, omega_s=0.4, omega_a=2.0, omega_b=-2.5, tau=1.3)


def decode(model, prompt, gen_len, steps, sm=None, **settings):
    """x after every pass, (passes, B, L). With `block`, block after block."""
    seen, x = [], S.pad_prompts(model.cfg, prompt, gen_len)
    two = TwoPass(model, sm, model.cfg.mask_token_id)
    pick = S.Pick(**{name: settings.pop(name) for name in S.Pick._fields if name in settings})

    def on_step(x):
        assert not torch.is_grad_enabled()
        seen.append(x)
    settings |= {"pick": pick, "on_step": on_step}
    if "block" in settings:
        last = S.decode_blocks(two, x, gen_len, steps, **settings)
    else:
        last = S.decode(two, x, steps, **settings)
    assert torch.equal(last, seen[-1])
    return torch.stack(seen)


def loving(model, token):
    """The same Dream, but one token is likelier by 100 nats."""
    other, more = copy.copy(model), 100.0 * F.one_hot(torch.tensor(token), model.cfg.vocab_size)
    other.head = lambda h: model.head(h) + more
    return other


def propose(logits, forced=False, **pick):
    """x0 and conf for rows of logits (n, V). The last token is [MASK]."""
    net = types.SimpleNamespace(head=lambda h: h, table=logits.T)
    model = types.SimpleNamespace(net=net, sm=None, mask_id=logits.shape[1] - 1)
    b = torch.zeros(len(logits), dtype=torch.long)
    return S.propose(model, logits, b, S.Pick(**pick), forced)[:2]


def predict_of(model):
    """The network as an oracle calls it: (emb (n, D), lo, past) → logits (n, V), past."""
    def predict(emb, lo=0, past=None):
        h, past = model.trunk(emb[None], past, lo)
        return model.head(h[0]).roll(1, 0), past                               # shifted
    return predict


def test_probabilities_and_confidences_equal_the_recorded():
    logits = RECORDED["filter/logits"]
    keys = {"entropy": "negent", "maskgit_plus": "prob"}
    for name, temperature, top_p in (("t0.0_pNone_kNone", 0, 1), ("t0.1_p0.9_kNone", 0.1, 0.9)):
        probs = RECORDED[f"filter/{name}_filtered_probs"]
        torch.testing.assert_close(S.filtered(logits, temperature, top_p), probs, atol=1e-6, rtol=0)
        for algorithm, key in keys.items():
            x0, conf = propose(logits, algorithm=algorithm, temperature=temperature, top_p=top_p,
                               generator=gen())
            want = RECORDED[f"filter/{name}_{key}_conf"]
            if temperature and key == "prob":  # versions of torch draw other tokens
                want = probs.gather(-1, x0[:, None])[:, 0]
            torch.testing.assert_close(conf, want, atol=1e-6, rtol=0)
            assert temperature or torch.equal(x0, RECORDED[f"filter/{name}_x0_seed0"])


def test_draws_follow_the_filtered_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(20_000, 1)
    draw = lambda: propose(logits, temperature=0.8, top_p=0.9, generator=gen())[0]
    x0, want = draw(), S.filtered(logits[:1], 0.8, 0.9)[0]
    torch.testing.assert_close(x0.bincount(minlength=4) / 20_000, want, atol=0.012, rtol=0)
    assert want[3] == 0 and 3 not in x0
    assert torch.equal(x0, draw())


def test_rows_in_pieces_equal_rows_at_once(model, monkeypatch):
    """No vocabulary-sized tensor has more rows than a chunk."""
    h, two = torch.randn(30, 64, generator=gen()), TwoPass(model, soft(3), MASK)
    b = torch.arange(30) // 15

    def ask(n):
        pick = S.Pick("maskgit_plus", 1.0, 1.0, [gen(0), gen(1)])
        return S.propose(two, h, b[:n], pick, forced=True)
    x0, conf, mixed = ask(30)
    monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * 200 * 7)  # bytes of 7 rows
    calls = spy(monkeypatch, model, "head")
    close = lambda got, want: torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    close(ask(30), (x0, conf, mixed))
    close(ask(9), (x0[:9], conf[:9], mixed))  # no proposal for the others, but feedback
    assert [len(rows) for rows, in calls] == [7, 7, 7, 7, 2] + [7, 2] + [7, 7, 7]


def test_reveal_counts_equal_the_recorded():
    keys = [key for key in RECORDED if key.startswith("counts/")]
    assert len(keys) == 13
    for key in keys:
        masked, steps = map(int, key[7:].split("_"))
        x, left = torch.full((1, masked), MASK), [masked]
        for share in S.reveal_shares(steps):
            ids = torch.zeros(left[-1], dtype=torch.long)
            x = S.reveal(x, (x == MASK).nonzero(as_tuple=True), ids, ids.float(), share)
            left.append(int((x == MASK).sum()))
        assert (-np.diff(left)).tolist() == RECORDED[key].tolist() and left[-1] == 0, key


def test_trajectories_equal_the_recorded(model):
    for name, k, schedule in (("binary_s16", 0, "none"), ("binary_s4", 0, "none"),
                              ("k3_s8", 3, "none"), ("k1_linear_s16", 1, "linear"),
                              ("k1_stepwise_s4", 1, "stepwise")):
        want = RECORDED[name + "_history"]
        got = decode(model, PROMPT, 16, len(want), sm=soft(k) if k else None, schedule=schedule)
        assert torch.equal(got, want), name


def test_decode_is_algorithm_2(model):
    """Feedback comes from the raw logits: top-p changes tokens and order, not λ and π."""
    [x] = S.pad_prompts(model.cfg, PROMPT, 16)
    predict = lambda emb: predict_of(model)(emb)[0]
    for k, schedule, switch in (
            (0, "none", 0.5), (1, "none", 0.5), (3, "none", 0.5), (None, "none", 0.5),
            (1, "linear", 0.5), (3, "linear-late", 0.5), (None, "stepwise", 0.2),
            (1, "stepwise", 0.5), (3, "stepwise-late", 0.8)):
        sm = None if k == 0 else soft(k)
        omega = sm and plain_omega(sm)
        want = slow_decode(predict, model.table, x, MASK, 10, omega, schedule, switch, top_p=0.3)
        got = decode(model, PROMPT, 16, 10, sm=sm, schedule=schedule, switch=switch, top_p=0.3)
        assert torch.equal(got[:, 0], want), (k, schedule)
        assert len(got.flatten(1).unique(dim=0)) > 5 and not (got[-1] == MASK).any()


def test_a_batch_equals_single_runs(model):
    """Unequal gaps, and a prompt with nothing to fill."""
    prompts = [TEXT, TEXT[::-1], TEXT[3:] + TEXT[:3]]
    gaps = [TEXT + 12 * [MASK], TEXT + 4 * [MASK] + TEXT[:8], TEXT + TEXT + TEXT[:4]]
    blocks = [(prompts, 16, dict(block=8, cache=cache, threshold=threshold))
              for cache, threshold in itertools.product(CACHES, (None, 0.15))]
    for texts, gen_len, settings in [
            (prompts, 16, {}), (prompts, 16, dict(schedule="linear")), (gaps, 0, {}),
            (gaps, 0, dict(schedule="linear")), (gaps, 0, dict(schedule="stepwise-late")), *blocks]:
        for temperature in (0.0, 1.0):
            run = functools.partial(decode, model, gen_len=gen_len, steps=8, sm=soft(1),
                                    temperature=temperature, **settings)
            together = run(texts, generator=[gen(b) for b in range(3)])
            for b, prompt in enumerate(texts):
                alone = run([prompt], generator=gen(b))
                assert torch.equal(together[-1, b], alone[-1, 0]), settings


def test_no_mask_is_left_though_the_model_predicts_masks(model):
    """The released code leaves these masks in its answer. With a threshold it never ends."""
    stubborn = loving(model, MASK)
    for temperature in (0.0, 1.0):
        pick = dict(temperature=temperature, generator=gen())
        history = decode(stubborn, PROMPT, 16, 8, **pick)
        assert (history[:-1, 0, 8:] == MASK).all()  # until the last step [code]
        runs = [decode(stubborn, PROMPT, 16, steps, block=8, cache=cache, threshold=p, **pick)
                for steps, p in ((16, None), (2, None), (16, 0.9)) for cache in CACHES]
        assert not any((run[-1] == MASK).any() for run in [history, *runs])


def test_a_threshold_is_about_the_token_that_is_written():
    """In the second row Dream is sure of [MASK], and unsure of the token that replaces it."""
    p = torch.tensor([[0.99, 0.004, 0.003, 0.003], [0.02, 0.015, 0.015, 0.95]])
    x0, conf = propose(p.log(), forced=True, algorithm="maskgit_plus")
    assert x0.tolist() == [0, 0] and conf.tolist() == pytest.approx([0.99, 0.02])


def test_a_mask_that_was_drawn_becomes_the_best_real_token_and_others_stay():
    logits, draws = torch.randn(99, 6, generator=gen(1)), dict(temperature=1.0)
    drawn, forced = (propose(logits, f, **draws, generator=gen(2))[0] for f in (False, True))
    best = logits[:, :5].argmax(-1)
    assert torch.equal(forced, torch.where(drawn == 5, best, drawn))
    assert {5, *best.tolist()} == {*drawn[drawn != best].tolist(), *logits.argmax(-1).tolist()}


def test_ties_go_left_to_right_and_a_threshold_can_be_reached():
    x, ids = torch.full((1, 40), MASK), torch.zeros(40, dtype=torch.long)
    masks = (x == MASK).nonzero(as_tuple=True)
    assert S.reveal(x, masks, ids, torch.zeros(40), 0.25)[0].tolist() == 10 * [0] + 30 * [MASK]
    assert not S.reveal(x, masks, ids, torch.ones(40), threshold=1.0).any()


def test_gaps_that_cannot_be_filled_are_refused(model):
    refused("position 0 is masked", S.pad_prompts, model.cfg, [[1, 2], [MASK, 2]], 4)
    refused("use --block=0 to infill", decode, model, [[1, MASK, 2]], 4, 4, block=2)


def test_blocks_and_their_calls_equal_the_recorded(model, monkeypatch):
    calls = spy(monkeypatch, model, "trunk")
    for name in BLOCKS:
        kind, block, rule = name.split("_", 2)
        cache = {"nocache": "none"}.get(kind, kind)
        threshold = float(rule[3:]) if rule.startswith("thr") else None
        steps = 16 if threshold else int(rule.split("_s")[1])
        calls.clear()
        got = decode(model, PROMPT, 16, steps, block=int(block[1:]), cache=cache,
                     threshold=threshold)
        assert torch.equal(got[:, 0], RECORDED[f"blocks/{name}_x"][1:]), name
        seen = [[start, emb.shape[1]] for emb, _, start in calls]
        want = RECORDED[f"blocks/{name}_call"].tolist()
        # Without a cache, the recording has the slices that were used, of all 24 positions.
        assert seen == (want if cache != "none" else [[0, 24]] * len(want)), name
    assert len(BLOCKS) == 15


def test_feedback_in_blocks_is_that_of_the_latest_prediction(model):
    """At this ω, no two proposals are so close that rounding decides between them."""
    [x] = S.pad_prompts(model.cfg, PROMPT, 16)
    heads, differs = itertools.cycle([(1, "none"), (3, "stepwise"), (None, "linear")]), []
    for cache, threshold, block in itertools.product(CACHES, (None, 0.12), (4, 8)):
        (k, schedule), blocks = next(heads), dict(block=block, cache=cache, threshold=threshold)
        sm = SoftMask(MASK, k, omega_s=0.9, omega_a=2.0, omega_b=-5.0)
        want = slow_blocks(predict_of(model), model.table, x, MASK, 16, 16, soft=plain_omega(sm),
                           schedule=schedule, switch=0.7, **blocks)
        got = decode(model, PROMPT, 16, 16, sm=sm, schedule=schedule, switch=0.7, **blocks)
        assert torch.equal(got[:, 0], want), (k, blocks)
        binary = decode(model, PROMPT, 16, 16, **blocks)
        differs.append(not torch.equal(got[-1], binary[-1]))
    assert sum(differs) > 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: pretends that one is")
def test_cuda_is_waited_for_once_in_a_pass(model):
    """The vocabulary is so small that `likeliest` sorts it, without a sync."""
    drawn = {"temperature": 1.0, "top_p": 0.9}
    cases = ({"schedule": "linear"}, drawn, drawn | {"block": 4, "cache": "dual"},
             {"block": 4, "threshold": 0.5})
    for words, sm in itertools.product(cases, (None, soft(3))):
        want = decode(model, [TEXT, TEXT[::-1]], 8, 4, sm=sm, generator=gen(), **words)
        with pretend.gpu() as waits:
            two = TwoPass(copy.deepcopy(model), copy.deepcopy(sm), MASK).to("cuda")
            waits.clear()
            generator = torch.Generator("cuda").manual_seed(0)
            got = decode(two.net, [TEXT, TEXT[::-1]], 8, 4, sm=two.sm, generator=generator, **words)
        once = ["to"] * len(got) + ["equal"]  # the last is of `decode` above
        assert waits == once, words
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
    assert compiled.state_dict().keys() == eager.state_dict().keys()

    def same(prompt, **blocks):
        sm = soft(3).to(device)
        runs = (decode(model, [prompt], 16, 8, sm=sm, **blocks) for model in (eager, compiled))
        return torch.equal(*runs)
    assert same(TEXT, block=4, cache="dual") and same(TEXT)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert same(TEXT[:5]) and all(same(TEXT[:5], block=8, cache=cache) for cache in CACHES)


def test_an_answer_ends_at_the_end_token_and_counts_what_it_cost(tiny):
    cfg = S.Decoding(model=tiny[0], gen_len=16, steps=4, temperature=0.0)
    model, tok, _ = S.load_for_decoding(cfg)
    prompt, x = tok.encode("abc"), loving(model, tok.encode("x")[0])
    text, stats = S.answer(loving(model, 256), tok, None, prompt, cfg)
    assert text == "" and stats.pop("seconds") > 0
    assert stats == {"nfe": 4, "tokens": 16, "kept": 0}
    assert S.answer(x, tok, None, prompt, cfg)[0] == 16 * "x"
    assert S.answer(x, tok, None, prompt, cfg, ["y", "xxxxx"])[0] == ""


OMEGA = dict(omega_s=0.9, omega_a=2.0, omega_b=-4.5)


@pytest.fixture
def adapter(tiny, tmp_path):
    sm = SoftMask(261, 3, **OMEGA)
    model = recorded_adapter(Dream.load(tiny[0]), alpha=40)
    finetune_dream.save_adapter(str(tmp_path), model, sm, finetune_dream.Config(alpha=40))
    return str(tmp_path)


def test_merged_and_unmerged_adapter_decode_alike(tiny, adapter):
    def run(**flags):
        model, _, sm = S.load_for_decoding(S.Decoding(tiny[0], adapter, **flags))
        return len(dora.layers(model)), decode(model, PROMPT, 16, 16, sm=sm)
    (none, merged), (eight, beside) = run(), run(merge=False)
    assert (none, eight) == (0, 8) and torch.equal(merged, beside)
    scaled, sm = recorded_adapter(Dream.load(tiny[0]), alpha=40), SoftMask(261, 3, **OMEGA)
    assert torch.equal(merged, decode(scaled, PROMPT, 16, 16, sm=sm))
    for other in ({"soft": False}, {"omega_b": -1.5}):
        assert not torch.equal(merged, run(**other)[1])


def test_command_line_prompts_chats_and_infills(tiny, adapter, capsys, monkeypatch):
    def go(**flags):
        S.main(S.Config(model=tiny[0], gen_len=8, **flags))
        return capsys.readouterr()
    err = go(prompt="hello", adapter=adapter, block=4, threshold=1e-9, schedule="linear").err
    assert "NFE 4" in err and "SM k=3, schedule=linear" in err
    filled = go(infill="def f():\\n    ___ # end").out
    assert filled.startswith("def f():\n    ") and filled.endswith(" # end\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    seen, stats = [], {"nfe": 1, "tokens": 8, "kept": 2, "seconds": 1.0}

    def said(model, tok, sm, ids, *rest):
        seen.append(tok.decode(ids))
        return "hi", stats
    monkeypatch.setattr(S, "answer", said)
    assert go(chat=True).out == "hi\nhi\n"
    more = "hi<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert seen[1] == seen[0] + more


@pytest.mark.parametrize("blocks", [{}, dict(block=4, cache="dual", threshold=0.4)])
def test_an_answer_is_decoded_as_asked(tiny, monkeypatch, blocks):
    how = dict(schedule="stepwise", switch=0.3)
    cfg = S.Decoding(tiny[0], gen_len=8, steps=6, algorithm="maskgit_plus", temperature=0.7,
                     top_p=0.6, **how, **blocks)
    (dream, tok, _), sm, seen = S.load_for_decoding(cfg), soft(3, 261), []

    def decode(model, x, *words, pick, on_step, **given):
        seen.append((model.sm, words, pick[:3], given))
        return x
    monkeypatch.setattr(S, "decode_blocks" if blocks else "decode", decode)
    S.answer(dream, tok, sm, [1, 2], cfg)
    words = (8, 6, 4, "dual", 0.4) if blocks else (6,)
    assert seen == [(sm, words, ("maskgit_plus", 0.7, 0.6), how)]


@pytest.mark.parametrize("flags", [{}, {"block": 8, "cache": "dual"}])
def test_cuda_or_cpu_decodes_in_bf16_with_feedback(tiny, flags):
    """Neither devices nor dtypes are mixed."""
    cfg = S.Decoding(tiny[0], dtype="bfloat16", gen_len=16, schedule="linear", **flags)
    model, tok, _ = S.load_for_decoding(cfg)
    ask = lambda: S.answer(model, tok, soft(3, 261).to(model.table.device), tok.encode("abc"), cfg)
    (text, stats), (text_too, _) = ask(), ask()
    assert stats["tokens"] == 16 and text == text_too
