"""sample_dream.py against §2.2, Alg. 2 and Fast-dLLM: slow loops, then the recorded runs."""

import dataclasses
import io
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dora
import mdlm
import sample_dream as S
from checkpoint import write_safetensors
from dream import Dream
from launch import Refused
from oracles import slow_blocks, slow_decode
from softmask import SoftMask

MASK, PAD = 194, 190
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECORDED = np.load(os.path.join(ROOT, "tests", "golden", "decode_recorded.npz"))
PROMPT = torch.from_numpy(RECORDED["prompt"]).long()  # (1, 8)
TEXT = PROMPT[0].tolist()
BLOCKS = sorted(key[7:-2] for key in RECORDED if key.startswith("blocks/") and key.endswith("_x"))


@pytest.fixture(scope="module")
def model(tiny_dream):
    return Dream.load(tiny_dream)


def soft(k):
    return SoftMask(MASK, k, omega_s=0.4, omega_a=2.0, omega_b=-2.5, tau=1.3)  # of the recordings


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def recorded(name):
    values = RECORDED[name]
    return torch.from_numpy(values.astype(np.int64) if values.dtype == np.int16 else values)


def decode(model, prompt, gen_len, steps, **settings):
    """x after every pass, (passes, B, L)."""
    seen, (x, valid) = [], S.pad_prompts(model.cfg, prompt, gen_len)
    last, nfe = S.decode(model, x, MASK, steps, valid=valid,
                         on_step=lambda x, lam, guess: seen.append(x), **settings)
    assert torch.equal(last, seen[-1]) and nfe.tolist() == (steps * (x == MASK).any(1)).tolist()
    return torch.stack(seen)


def decode_blocks(model, prompt, gen_len, *args, **settings):
    """The same in blocks.   args: steps, block, cache, threshold."""
    seen, (x, valid) = [], S.pad_prompts(model.cfg, prompt, gen_len)
    S.decode_blocks(model, x, gen_len, *args, valid=valid, on_step=seen.append, **settings)
    return torch.stack(seen)


class Loves(torch.nn.Module):
    """A Dream that prefers one token everywhere, [MASK] for instance."""

    def __init__(self, model, token):
        super().__init__()
        self.dream, self.token = model, token
        for name in ("cfg", "table", "trunk", "before", "hidden"):
            setattr(self, name, getattr(model, name))

    def head(self, h):
        loved = F.one_hot(torch.tensor(self.token), self.cfg.vocab_size)
        return self.dream.head(h) + 100.0 * loved


# ---- one step


def test_filters_are_temperature_then_top_p_then_top_k():
    logits = torch.randn(6, 30, generator=generator()) * 2
    for temperature, top_p, top_k in ((0, 1, 0), (0.5, 1, 0), (1, 0.7, 0), (1, 1, 5),
                                      (0.3, 0.9, 4), (0, 0.6, 0)):
        got = S.filtered(logits, temperature, top_p, top_k)
        for row, out in zip(logits.double().tolist(), got.tolist()):
            row = [v / temperature for v in row] if temperature else row
            total, mass, kept = sum(map(math.exp, row)), 0.0, []
            for v in sorted(range(30), key=lambda v: -row[v]):
                if mass <= top_p:  # the more likely tokens have not passed p yet
                    kept.append(v)
                mass += math.exp(row[v]) / total
            kept = kept[:top_k or 30]
            total = sum(math.exp(row[v]) for v in kept)
            want = [math.exp(row[v]) / total if v in kept else 0.0 for v in range(30)]
            assert out == pytest.approx(want, abs=1e-6)


def test_top_p_finds_flat_distributions_beyond_its_first_256_tokens():
    p = S.filtered(torch.zeros(2, 1000), top_p=0.5)
    assert ((p > 0).sum(-1) - 501).abs().max() <= 1  # up to rounding of the sum


def test_top_p_keeps_the_token_that_crosses_p():
    p = torch.tensor([[0.5, 0.3, 0.2]])
    kept = S.filtered(p.log(), top_p=0.6).tolist()[0]
    assert kept == pytest.approx([0.625, 0.375, 0])  # MDLM's rule would keep the first alone


def test_probabilities_and_confidences_equal_the_recorded():
    logits = recorded("filter/logits")
    keys = {"entropy": "negent", "maskgit_plus": "prob", "topk_margin": "margin"}
    for name, temperature, top_p in (("t0.0_pNone_kNone", 0, 1), ("t0.1_p0.9_kNone", 0.1, 0.9)):
        want = recorded(f"filter/{name}_filtered_probs")
        torch.testing.assert_close(S.filtered(logits, temperature, top_p), want, atol=1e-6, rtol=0)
        for algorithm, key in keys.items():
            x0, conf = S.propose(logits, None, algorithm, temperature, top_p, 0, generator())
            want = recorded(f"filter/{name}_{key}_conf")
            torch.testing.assert_close(conf, want, atol=1e-6, rtol=0)
            assert temperature or torch.equal(x0, recorded(f"filter/{name}_x0_seed0"))


def test_draws_follow_the_filtered_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(20_000, 1)
    draw = lambda: S.propose(logits, temperature=0.8, top_p=0.9, generator=generator())[0]
    x0, want = draw(), S.filtered(logits[:1], 0.8, 0.9)[0]
    torch.testing.assert_close(x0.bincount(minlength=4) / 20_000, want, atol=0.012, rtol=0)
    assert want[3] == 0 and 3 not in x0
    assert torch.equal(x0, draw())


def test_rows_in_pieces_equal_rows_at_once(model, monkeypatch):
    """Of all vocabulary-wide tensors of a pass, none has more rows than a chunk."""
    h, rows, head = torch.randn(30, 64, generator=generator()), [], model.head
    look = lambda: S.look(model, h, soft(3), MASK, "topk_margin")
    wanted = torch.arange(30) % 4 == 1
    wanted[7:14] = False  # a chunk in which nothing is wanted
    at_once = look()
    monkeypatch.setattr(mdlm, "CPU_LOGITS", 4 * 200 * 7)  # bytes of 7 rows
    monkeypatch.setattr(model, "head", lambda h: (rows.append(len(h)), head(h))[1])
    for got, want in zip(look(), at_once, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    some = S.look(model, h, soft(3), MASK, "topk_margin", wanted)
    for got, want in zip(some, (*(v[wanted] for v in at_once[:2]), *at_once[2:]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert rows == 2 * [7, 7, 7, 7, 2]


def test_reveal_counts_equal_the_recorded():
    keys = [key for key in RECORDED if key.startswith("counts/")]
    for key in keys:
        masked, steps = map(int, key[7:].split("_"))
        times, left, counts = torch.linspace(1, 1e-3, steps + 1), torch.tensor([masked]), []
        for i in range(steps):
            counts.append(int(S.reveal_count(left, times[i], times[i + 1], i == steps - 1)))
            left = left - counts[-1]
        assert counts == RECORDED[key].tolist() and left == 0, key
    assert len(keys) == 13


def test_a_step_reveals_the_most_confident_of_each_sequence():
    x = torch.randint(0, 50, (3, 12), generator=generator())
    masked = torch.rand(3, 12, generator=generator(1)) < 0.7
    x[masked] = MASK
    logits = torch.randn(int(masked.sum()), 200, generator=generator(2)) * 3
    places, times = masked.nonzero().tolist(), (torch.tensor(0.8), torch.tensor(0.4))
    measures = {"entropy": lambda p: sum(v * math.log(v) for v in p),
                "maskgit_plus": lambda p: p[0], "topk_margin": lambda p: p[0] - p[1]}
    for algorithm, measure in measures.items():
        want, conf = x.clone(), [measure(sorted(row.tolist(), reverse=True))
                                 for row in logits.double().softmax(-1)]
        for b in range(3):
            own = [n for n, place in enumerate(places) if place[0] == b]
            for n in sorted(own, key=lambda n: -conf[n])[:len(own) // 2]:  # 1 − s/t = ½
                want[b, places[n][1]] = logits[n].argmax()
        got = S.reveal(x, masked, *S.propose(logits, None, algorithm), *times, algorithm=algorithm)
        assert torch.equal(got, want)


def test_origin_tosses_a_coin_for_each_token():
    x = torch.full((4, 5000), MASK)
    logits = torch.randn(20_000, 8, generator=generator())
    found = S.propose(logits, None, "origin", generator=generator())
    step = lambda last: S.reveal(x, x == MASK, *found, 0.8, 0.6, last, algorithm="origin") == MASK
    left = step(False).float().mean(-1)
    torch.testing.assert_close(left, torch.full((4,), 0.75), atol=0.03, rtol=0)  # s / t
    assert left.unique().numel() > 1 and not step(True).any()


# ---- whole responses


def test_trajectories_equal_the_recorded(model):
    for name, k, schedule in (("binary_s16", 0, "none"), ("binary_s4", 0, "none"),
                              ("k3_s8", 3, "none"), ("k1_linear_s16", 1, "linear"),
                              ("k1_stepwise_s4", 1, "stepwise")):
        want = recorded(name + "_history")
        got = decode(model, PROMPT, 16, len(want), sm=soft(k) if k else None, schedule=schedule)
        assert torch.equal(got, want), name


def test_decode_is_algorithm_2(model):
    """Feedback comes from the raw logits: top-p changes tokens and order, not λ and π."""
    x, _ = S.pad_prompts(model.cfg, PROMPT, 16)
    schedules = (("none", 0.5), ("linear", 0.5), ("linear-late", 0.5), ("stepwise", 0.2),
                 ("stepwise-late", 0.8))
    for k, (schedule, switch) in itertools.product((0, 1, 3, None), schedules):
        sm = None if k == 0 else soft(k)
        want = slow_decode(model, x, 10, sm, schedule, switch, top_p=0.3)
        got = decode(model, PROMPT, 16, 10, sm=sm, schedule=schedule, switch=switch, top_p=0.3)
        assert torch.equal(got, want), (k, schedule)
        assert len(got.flatten(1).unique(dim=0)) > 5 and not (got[-1] == MASK).any()


def test_decode_takes_any_backbone(model):
    """It asks for table, hidden and head, and tells the share of masks that is left as the time."""
    torch.manual_seed(0)
    cfg = mdlm.ModelConfig(n_layer=1, n_head=2, n_embd=32, n_cond=16, vocab_size=40, mask_id=39,
                           time_conditioning=True, omega_s=0.5)
    other, times = mdlm.MDLM(cfg).eval(), []
    torch.nn.init.normal_(other.net.output_layer.linear.weight)
    trunk = other.net.trunk
    other.net.trunk = lambda emb, t: (times.append(t.tolist()), trunk(emb, t))[1]
    x = torch.full((2, 12), 39)
    x[1, :6] = torch.arange(6)
    got, _ = S.decode(other.net, x, 39, 6, sm=other.sm)
    assert not (got == 39).any() and torch.equal(got[1, :6], x[1, :6])
    assert times[0] == [1.0, 0.5] and times == sorted(times, reverse=True) and len(times) == 6


def test_schedules_end_where_they_should(model):
    """A switch that is never reached is no feedback, one that is always passed is all of it."""
    always = decode(model, PROMPT, 16, 16, sm=soft(1))
    never = decode(model, PROMPT, 16, 16)
    assert not torch.equal(always, never)
    for schedule, switch, want in (("stepwise", 1.0, never), ("stepwise", 0.0, always),
                                   ("stepwise-late", 1.0, always), ("stepwise-late", 0.0, never)):
        got = decode(model, PROMPT, 16, 16, sm=soft(1), schedule=schedule, switch=switch)
        assert torch.equal(got, want)


def test_a_batch_equals_single_runs(model):
    """Padding, unequal gaps, a prompt with nothing to fill: no sequence feels its neighbours."""
    attend = recorded("batch_attention_mask").bool()
    pairs = zip(recorded("batch_prompt"), attend)
    ragged = [row[keep].tolist() for row, keep in pairs]  # 8 and 5 tokens
    gaps = [TEXT + 12 * [MASK], TEXT + 4 * [MASK] + TEXT, TEXT]
    for prompts, gen_len, steps, k, schedule in (
            (ragged, 16, 8, 0, "none"), (ragged, 16, 8, 1, "linear"), (gaps, 0, 4, 1, "linear"),
            (gaps, 0, 4, 1, "none"), (gaps, 0, 4, 1, "stepwise-late")):
        settings = dict(sm=soft(k) if k else None, schedule=schedule)
        together = decode(model, prompts, gen_len, steps, **settings)
        assert (together[:, 1, :together.shape[2] - len(prompts[1]) - gen_len] == PAD).all()
        for b, prompt in enumerate(prompts):
            own = together[:, b, -len(prompt) - gen_len:]
            if MASK in prompt or gen_len:
                assert torch.equal(own, decode(model, [prompt], gen_len, steps, **settings)[:, 0])
            else:
                assert own[-1].tolist() == prompt


def test_a_batch_in_blocks_equals_single_runs(model):
    prompts = [TEXT, TEXT[3:], TEXT[1:7]]
    for cache, threshold in itertools.product(("none", "prefix", "dual"), (None, 0.15)):
        settings = (16, 8, 8, cache, threshold)
        together = decode_blocks(model, prompts, *settings, sm=soft(1))[-1]
        for b, prompt in enumerate(prompts):
            alone = decode_blocks(model, [prompt], *settings, sm=soft(1))[-1]
            assert torch.equal(together[b, -16:], alone[0, -16:])


def test_infilling_keeps_prefix_and_suffix(model):
    x = decode(model, [TEXT[:4] + 6 * [MASK] + TEXT[4:]], 0, 3, sm=soft(3))[-1, 0].tolist()
    assert x[:4] == TEXT[:4] and x[10:] == TEXT[4:] and MASK not in x


def test_no_mask_is_left_though_the_model_predicts_masks(model):
    """The original leaves all of these masks in its answer; with a threshold it never returns."""
    stubborn = Loves(model, MASK)
    for temperature in (0.0, 1.0):
        pick = dict(temperature=temperature, generator=generator())
        history = decode(stubborn, PROMPT, 16, 8, **pick)
        assert (history[:-1, 0, 8:] == MASK).all()  # until the last step [code]
        assert not (history[-1] == MASK).any()
        for steps, threshold in ((16, None), (2, None), (16, 0.9)):
            for cache in ("none", "prefix", "dual"):
                x = decode_blocks(stubborn, PROMPT, 16, steps, 8, cache, threshold, **pick)[-1]
                assert not (x == MASK).any()


def test_draws_are_keyed_by_the_generator(model):
    run = lambda g: decode(model, PROMPT, 16, 8, temperature=1.0, generator=g).tolist()
    assert run(generator(1)) == run(generator(1)) != run(generator(2))


def test_a_bf16_model_decodes_through_fp32_logits(tiny_dream, monkeypatch):
    half = Dream.load(tiny_dream, dtype=torch.bfloat16)
    seen, propose = set(), S.propose
    monkeypatch.setattr(S, "propose", lambda z, *a, **how: (
        seen.add(z.dtype), propose(z, *a, **how))[1])
    for schedule in ("none", "linear"):
        assert not (decode(half, PROMPT, 16, 8, sm=soft(3), schedule=schedule)[-1] == MASK).any()
        x = decode_blocks(half, PROMPT, 16, 8, 8, "dual", sm=soft(3), schedule=schedule)[-1]
        assert not (x == MASK).any()
    assert seen == {torch.float32}


# ---- blocks


def test_blocks_and_their_calls_equal_the_recorded(model, monkeypatch):
    calls, trunk = [], model.trunk
    monkeypatch.setattr(model, "trunk", lambda emb, valid=None, past=None, start=0: (
        calls.append([start, emb.shape[1]]), trunk(emb, valid, past, start))[1])
    for name in BLOCKS:
        kind, block, rule = name.split("_", 2)
        cache = {"nocache": "none"}.get(kind, kind)
        threshold = float(rule[3:]) if rule.startswith("thr") else None
        steps = 16 if threshold else int(rule.split("_s")[1])
        calls.clear()
        got = decode_blocks(model, PROMPT, 16, steps, int(block[1:]), cache, threshold)
        assert torch.equal(got[:, 0], recorded(f"blocks/{name}_x")[1:]), name
        want = RECORDED[f"blocks/{name}_call"].tolist()
        if cache == "none":  # recorded: the slices looked at. All 24 positions were computed.
            want = [[0, 24]] * len(want)
        assert calls == want, name
    assert len(BLOCKS) == 15


def test_feedback_in_blocks_is_that_of_the_latest_prediction(model):
    x, _ = S.pad_prompts(model.cfg, PROMPT, 16)
    for k, schedule in ((1, "none"), (3, "none"), (None, "linear")):
        sm = SoftMask(MASK, k, omega_s=0.9, omega_a=2.0, omega_b=-4.5)
        for cache, threshold in itertools.product(("none", "prefix", "dual"), (None, 0.12)):
            differs = False
            for block in (4, 8):
                want = slow_blocks(model, x, 16, 16, block, cache, threshold, sm, schedule)
                got = decode_blocks(model, PROMPT, 16, 16, block, cache, threshold, sm=sm,
                                    schedule=schedule)
                assert torch.equal(got, want), (k, cache, threshold, block)
                binary = decode_blocks(model, PROMPT, 16, 16, block, cache, threshold)
                differs |= not torch.equal(got[-1], binary[-1])
            assert differs


@torch.no_grad()
def test_cached_equals_uncached_while_nothing_changes(model):
    x, _ = S.pad_prompts(model.cfg, PROMPT, 16)
    emb = soft(3).embed(model.table, x, torch.randn(16, 200, generator=generator()))
    full, kv = model.trunk(emb)
    for lo, hi in ((12, 24), (12, 16)):  # prefix, dual
        part, _ = model.trunk(emb[:, lo:hi], past=kv, start=lo)
        torch.testing.assert_close(part, full[:, lo:hi], atol=2e-5, rtol=0)


def test_the_number_of_passes(model):
    """A block of one step is filled by it, where the original leaves 12 of 16 masks.

    With a threshold above all it is one token a pass; with one below all, two passes a block.
    """
    for cache in ("none", "prefix", "dual"):
        got = decode_blocks(model, PROMPT, 16, 4, 4, cache)
        assert len(got) == 4 and not (got[-1] == MASK).any()
    assert len(decode_blocks(model, PROMPT, 16, 16, 8, "dual", threshold=1.0)) == 16
    assert len(decode_blocks(model, PROMPT, 16, 16, 8, "dual", threshold=1e-9)) == 4


# ---- bad input


@pytest.mark.parametrize("settings, message", [
    ({"steps": 17}, "steps 17 must be between 1 and 16, the number of masks"),
    ({"gen_len": 0}, "nothing to fill"),
    ({"algorithm": "confidence"}, "unknown algorithm 'confidence': use one of entropy"),
    ({"schedule": "cosine"}, "unknown schedule 'cosine'"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"temperature": 1.0}, "temperature 1.0 and entropy make draws: give generator"),
    ({"top_p": 0.0}, "top_p 0.0"), ({"top_k": -1}, "top_k -1"), ({"switch": 1.5}, "switch 1.5"),
    ({"gen_len": 600}, "608 tokens, the model takes 512"),
    ({"block": 5}, "gen_len 16 is not a multiple of block 5"),
    ({"block": 32}, "gen_len 16 is not a multiple of block 32"),
    ({"steps": 6, "block": 4}, "steps 6 cannot be shared evenly by 4 blocks"),
    ({"block": 8, "threshold": 1.5}, "threshold 1.5 must be in"),
    ({"block": 8, "cache": "double"}, "unknown cache 'double'"),
    ({"block": 8, "prompt": [[1, MASK, 2]]}, "contains the mask token"),
    ({"block": 8, "prompt": [[]]}, "position 0 is masked"),
    ({"block": 0, "threshold": 0.5}, "works on blocks"),
])
def test_bad_settings_are_refused(model, settings, message):
    with pytest.raises(Refused, match=message):
        decoder = decode_blocks if "block" in settings else decode
        decoder(model, **{"prompt": PROMPT, "gen_len": 16, "steps": 16} | settings)


@pytest.mark.parametrize("flags, message", [
    ({}, "nothing to do"), ({"prompt": "a", "chat": True}, "nothing to do"),
    ({"infill": "no gap"}, "exactly one ___"), ({"infill": "a ___ b", "block": 8}, "--block=0"),
    ({"prompt": "a", "dtype": "int8"}, "dtype 'int8'"), ({"prompt": "a", "steps": 999}, "steps 9"),
    ({"prompt": "a", "device": "tpu"}, "--device=tpu"), ({"prompt": "a", "model": ""}, "no model"),
    ({"prompt": "a", "model": "/nowhere"}, "/nowhere"),
])
def test_bad_flags_are_refused(talking_dream, flags, message):
    with pytest.raises(Refused, match=message):
        S.main(S.Config(**{"model": talking_dream} | flags))


def test_a_bad_flag_is_one_line_and_exit_2():
    command = [sys.executable, os.path.join(ROOT, "sample_dream.py"), "--prompt=x", "--block=7"]
    done = subprocess.run(command, capture_output=True, text=True)
    want = "sample_dream.py: gen_len 256 is not a multiple of block 7: change one of them\n"
    assert done.returncode == 2 and done.stderr == want


# ---- texts


def test_text_ends_at_each_stop_string_in_turn():
    assert S.cut("one\ndef two\nclass three", ["\nclass", "\ndef"]) == "one"
    assert S.cut("one", ["two"]) == "one"


def test_an_answer_ends_at_the_end_token_and_counts_what_it_cost(talking_dream):
    cfg = S.Decoding(model=talking_dream, gen_len=16, steps=4, temperature=0.0)
    model, tok, _ = S.load_for_decoding(cfg)
    text, stats = S.answer(Loves(model, PAD), tok, None, tok.encode("abc"), cfg)
    assert text == "" and stats.pop("seconds") > 0
    assert stats == {"n": 1, "nfe": 4, "tokens": 16, "kept": 0}
    lover = Loves(model, tok.encode("x")[0])
    text, stats = S.answer(lover, tok, None, tok.encode("abc"), cfg)
    assert text == 16 * "x" and stats["kept"] == 16


def test_an_answer_depends_on_seed_and_prompt_only(talking_dream):
    cfg = S.Decoding(model=talking_dream, gen_len=8, temperature=1.0, top_p=1.0)
    model, tok, _ = S.load_for_decoding(cfg)

    def ask(text, seed=0):
        return S.answer(model, tok, None, tok.encode(text), dataclasses.replace(cfg, seed=seed))[0]
    first = ask("abc")
    ask("something else")
    assert ask("abc") == first != ask("abc", seed=1)


def test_the_picture_shows_masks_and_text(talking_dream):
    model, tok, _ = S.load_for_decoding(S.Decoding(model=talking_dream))
    ids = tok.encode("ab") + [MASK, MASK] + tok.encode("c") + [PAD]
    assert S.picture(tok, ids, model.cfg) == "ab░░c"


def adapter(folder, model, k):
    targets = ["q_proj", "o_proj"]
    dora.attach(model, targets, 4, 4, generator())
    for i, layer in enumerate(dora.layers(model).values()):
        layer.lora_B.data = 0.3 * torch.randn(layer.lora_B.shape, generator=generator(i))
    write_safetensors(str(folder / "adapter_model.safetensors"), dora.adapter_state(model))
    config = dict(peft_type="LORA", use_dora=True, r=4, lora_alpha=4, target_modules=targets)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "softmask.json").write_text(json.dumps({
        "mask_id": MASK, "k": k, "omega_s": 0.9, "omega_a": 2.0, "omega_b": -4.5}))
    return str(folder)


def test_merged_and_unmerged_adapter_decode_alike(talking_dream, tmp_path):
    folder, runs = adapter(tmp_path, Dream.load(talking_dream), 3), {}
    for name, flags in {"plain": {}, "merged": {"adapter": folder},
                        "beside": {"adapter": folder, "merge": False},
                        "binary": {"adapter": folder, "soft": False}}.items():
        model, _, sm = S.load_for_decoding(S.Decoding(model=talking_dream, **flags))
        assert len(dora.layers(model)) == (6 if name == "beside" else 0)
        assert (sm is None) == (name in ("plain", "binary"))
        runs[name] = decode(model, PROMPT, 16, 16, sm=sm)
    assert torch.equal(runs["merged"], runs["beside"])
    assert not torch.equal(runs["merged"], runs["plain"])
    assert not torch.equal(runs["merged"], runs["binary"])


def test_a_gpu_that_is_not_there_is_refused(talking_dream, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(Refused, match="--device=cuda"):
        S.load_for_decoding(S.Decoding(model=talking_dream, device="cuda"))


def test_the_closing_line_says_what_fed_the_masks(talking_dream, tmp_path, capsys):
    def said(**flags):
        cfg = S.Config(model=talking_dream, adapter=str(tmp_path), prompt="x", gen_len=4, **flags)
        S.main(cfg)
        return capsys.readouterr().err.strip().split("tokens/s; ")[1]
    for k, flags, want in ((3, {}, "SM k=3, ω_s = 0.9"), (3, {"soft": False}, "SM off"),
                           (None, {"schedule": "linear"}, "SM k=|V|, linear, ω_s = 0.9"),
                           (1, {"schedule": "stepwise", "switch": 0.2},
                            "SM k=1, stepwise 0.2, ω_s = 0.9")):
        adapter(tmp_path, Dream.load(talking_dream), k)
        assert said(**flags) == want
    os.remove(tmp_path / "softmask.json")
    assert said() == "binary"


def test_command_line_prompts_chats_and_infills(talking_dream, capsys, monkeypatch):
    def go(**flags):
        S.main(S.Config(model=talking_dream, gen_len=8, **flags))
        return capsys.readouterr()
    out, err = go(prompt="hello", temperature=0.0)
    assert "8 tokens" in err and "NFE 8" in err
    assert out == go(prompt="hello", temperature=0.0, show=False).out
    assert out != go(prompt="hello", temperature=0.0, raw=True).out
    stopped = go(prompt="hello", temperature=0.0, stop=f"zzz|{out[2]}").out
    assert stopped.rstrip("\n") == out[:-1].split(out[2])[0]
    filled = go(infill="def f():\\n    ___ # end").out
    assert filled.startswith("def f():\n    ") and filled.endswith(" # end\n")
    assert "NFE 4" in go(prompt="hello", block=4, threshold=1e-9, cache="dual").err
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    seen, stats = [], {"n": 1, "nfe": 1, "tokens": 8, "kept": 2, "seconds": 1.0}
    monkeypatch.setattr(S, "answer", lambda model, tok, sm, ids, *rest: (
        seen.append(tok.decode(ids)), ("hi", stats))[1])
    assert go(chat=True).out == "hi\nhi\n"
    more = "hi<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert seen[1] == seen[0] + more


def test_a_terminal_sees_the_text_fill(talking_dream, monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    monkeypatch.setattr(sys, "stdout", Terminal())
    S.main(S.Config(model=talking_dream, gen_len=8, prompt="hello", temperature=0.0))
    frames = sys.stdout.getvalue().split("\x1b[H\x1b[J")[1:]
    assert [frame.count("░") for frame in frames] == [8, 7, 6, 5, 4, 3, 2, 0]  # 0, 1, …, 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason=(
    "needs CUDA: would check that devices and bf16 mix nowhere, with draws and feedback"))
@pytest.mark.parametrize("flags", [{}, {"block": 8, "cache": "dual"},
                                   {"block": 8, "threshold": 0.5}])
def test_cuda_in_bf16_decodes_with_feedback(talking_dream, flags):
    cfg = S.Decoding(model=talking_dream, device="cuda", dtype="bfloat16", gen_len=16,
                     schedule="linear", **flags)
    model, tok, _ = S.load_for_decoding(cfg)
    run = lambda: S.answer(model, tok, soft(3).cuda(), tok.encode("abc"), cfg)
    (text, stats), (again, more) = run(), run()
    assert stats["tokens"] == 16 and (text, stats["nfe"]) == (again, more["nfe"])
