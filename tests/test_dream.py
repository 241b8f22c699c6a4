"""dream.py against a slow transformer, against recorded numbers of the published model code, and against bad folders."""

import gzip
import json
import math
import os
import shutil
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

import dora
from causal_to_dream import convert
from checkpoint import read_safetensors, write_safetensors
from launch import Refused
from conftest import GOLDEN, digest, recorded_adapter
from dream import Dream, DreamConfig, Tokenizer, byte_characters, load_adapter, rope
from softmask import SoftMask

gen = lambda seed=0: torch.Generator().manual_seed(seed)


@pytest.fixture
def dream(tiny_dream):
    return Dream.load(tiny_dream)


@pytest.fixture
def folder(tiny_dream, tmp_path):
    """A copy of the tiny model, to spoil."""
    return shutil.copytree(tiny_dream, tmp_path / "model")


def embed(dream, x):
    return F.embedding(x, dream.table)


def everywhere(dream, *args, **kwargs):
    return dream.lm_head(dream.trunk(*args, **kwargs)[0])


# ---- the architecture


def slow_forward(state, cfg, x):
    """Qwen2.5 without a causal mask, one position and one head at a time, in float64.   x: (L,).   Returns (L, V)"""
    w = {name.removeprefix("model."): t.double() for name, t in state.items()}
    d, group = cfg.head_dim, cfg.num_attention_heads // cfg.num_key_value_heads
    norm = lambda v, name: v / (v.square().mean() + cfg.rms_norm_eps).sqrt() * w[name + ".weight"]

    def turned(v, position):
        out = v.clone()
        for i in range(d // 2):
            a = position * cfg.rope_theta ** (-2 * i / d)
            out[i] = v[i] * math.cos(a) - v[i + d // 2] * math.sin(a)
            out[i + d // 2] = v[i + d // 2] * math.cos(a) + v[i] * math.sin(a)
        return out

    h = [w["embed_tokens.weight"][i] for i in x]
    for n in range(cfg.num_hidden_layers):
        p = f"layers.{n}."
        lin = lambda name, v: w[p + name + ".weight"] @ v + w.get(p + name + ".bias", 0)
        normed = [norm(v, p + "input_layernorm") for v in h]
        q, k, v = ([lin(f"self_attn.{c}_proj", u).split(d) for u in normed] for c in "qkv")
        for i in range(len(h)):
            heads = []
            for a in range(cfg.num_attention_heads):
                scores = torch.stack([turned(q[i][a], i) @ turned(k[j][a // group], j) for j in range(len(x))]) / d ** 0.5
                heads.append(sum(s * v[j][a // group] for j, s in enumerate(scores.softmax(0))))
            u = h[i] + lin("self_attn.o_proj", torch.cat(heads))
            m = norm(u, p + "post_attention_layernorm")
            h[i] = u + lin("mlp.down_proj", F.silu(lin("mlp.gate_proj", m)) * lin("mlp.up_proj", m))
    return torch.stack([w["lm_head.weight"] @ norm(v, "norm") for v in h])


def test_forward_is_the_slow_transformer(dream):
    x = torch.randint(200, (1, 5), generator=gen(4))
    torch.testing.assert_close(everywhere(dream, embed(dream, x))[0].double(), slow_forward(dream.state_dict(), dream.cfg, x[0]),
                               rtol=0, atol=2e-5)


def test_position_i_is_predicted_from_hidden_state_before_it(dream):
    x = torch.randint(190, (2, 9), generator=gen(1))
    mask = torch.rand(2, 9, generator=gen(2)) < 0.5
    mask[:, 0] = False
    h, _ = dream.trunk(embed(dream, x))
    want = [dream.lm_head.weight @ h[b, i - 1] for b in range(2) for i in range(9) if mask[b, i]]
    torch.testing.assert_close(dream.head_at(h, mask), torch.stack(want))
    assert dream.head_at(h, torch.zeros_like(mask)).shape == (0, 200)
    mask[1, 0] = True
    with pytest.raises(Refused, match="position 0"):
        dream.head_at(h, mask)


def test_later_tokens_matter(dream):
    """No causal mask: the last token changes the first hidden state."""
    x = torch.randint(190, (1, 9), generator=gen(1))
    other = x.clone()
    other[0, -1] = (x[0, -1] + 1) % 190
    assert (dream.trunk(embed(dream, x))[0][0, 0] - dream.trunk(embed(dream, other))[0][0, 0]).abs().max() > 1e-3


def test_padding_changes_nothing(dream):
    x = torch.randint(190, (1, 9), generator=gen(1))
    padded = torch.cat([torch.full((1, 4), 190), x], 1)
    valid = torch.arange(13)[None] >= 4
    h, _ = dream.trunk(embed(dream, padded), valid=valid)
    torch.testing.assert_close(h[:, 4:], dream.trunk(embed(dream, x))[0], rtol=0, atol=1e-5)
    assert h.isfinite().all()


@pytest.mark.parametrize("start, end", [(6, 12), (6, 9)], ids=["prefix cache", "dual cache"])
def test_cached_call_replaces_its_positions(dream, start, end):
    """Unchanged input: the cached call is the full one. Changed input: as if only these positions had been computed anew."""
    x = torch.randint(190, (2, 12), generator=gen(1))
    valid = torch.tensor([[True] * 12, [False] * 2 + [True] * 10])
    full, kv = dream.trunk(embed(dream, x), valid=valid)
    again, _ = dream.trunk(embed(dream, x)[:, start:end], past=kv, start=start, valid=valid)
    torch.testing.assert_close(again, full[:, start:end], rtol=0, atol=1e-5)

    other = x.clone()
    other[:, start:end] = (x[:, start:end] + 7) % 190
    part, new = dream.trunk(embed(dream, other)[:, start:end], past=kv, start=start, valid=valid)
    assert (part - full[:, start:end]).abs().max() > 0.1
    for (k, v), (k_old, v_old) in zip(new, kv):
        outside = [i for i in range(12) if not start <= i < end]
        assert torch.equal(k[:, outside], k_old[:, outside]) and torch.equal(v[:, outside], v_old[:, outside])
    # The first layer's keys and values depend on nothing but its own positions, so there the cache is exact.
    first = dream.trunk(embed(dream, other), valid=valid)[1][0]
    torch.testing.assert_close(new[0], first, rtol=0, atol=1e-5)


def test_checkpointing_changes_no_gradient(dream):
    recorded_adapter(dream)
    grads = []
    for dream.checkpointing in (False, True):
        dream.zero_grad()
        h, kv = dream.trunk(embed(dream, torch.arange(9)[None]))
        h.square().mean().backward()
        grads.append([p.grad.clone() for p in dream.parameters() if p.requires_grad])
        assert len(kv) == (0 if dream.checkpointing else 3)
    assert all(torch.equal(a, b) for a, b in zip(*grads)) and max(g.abs().max() for g in grads[0]) > 0
    with torch.no_grad():
        assert len(dream.trunk(embed(dream, torch.arange(9)[None]))[1]) == 3  # decoding keeps its cache


def test_frequencies_stay_fp32(tiny_dream):
    half = Dream.load(tiny_dream, dtype=torch.bfloat16)
    assert not list(half.buffers())
    cos, _ = rope(torch.tensor([[4000]]), half.to(torch.bfloat16).cfg)
    d = half.cfg.head_dim
    want = [math.cos(4000 * half.cfg.rope_theta ** (-2 * i / d)) for i in range(d // 2)]
    torch.testing.assert_close(cos[0, 0, 0, :d // 2].double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-3)


def test_bf16_is_near_fp32(tiny_dream, dream):
    x = torch.randint(190, (1, 9), generator=gen(1))
    half = Dream.load(tiny_dream, dtype=torch.bfloat16)
    logits = everywhere(half, embed(half, x))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), everywhere(dream, embed(dream, x)), rtol=0, atol=0.25)


# ---- recorded


def test_recorded_logits(dream, recorded):
    x = recorded["a/input_ids"]
    for name, logits in (("logits", everywhere(dream, embed(dream, x))),
                         ("logits_posids", everywhere(dream, embed(dream, x), recorded["a/position_ids"]))):
        torch.testing.assert_close(logits[:, ::4, ::8], recorded["a/" + name], rtol=0, atol=1e-5)
        torch.testing.assert_close(digest(logits), recorded["digest/a/" + name].numpy(), rtol=0, atol=1e-3)


def test_recorded_logits_of_a_padded_batch(dream, recorded):
    valid = recorded["a/pad_attention_mask_2d"].bool()
    logits = everywhere(dream, embed(dream, recorded["a/pad_input_ids"]), valid=valid)
    torch.testing.assert_close(digest(logits[valid]), recorded["digest/a/pad_logits"].numpy(), rtol=0, atol=1e-3)
    seen = valid[:, ::4]
    torch.testing.assert_close(logits[:, ::4, ::8][seen], recorded["a/pad_logits"][seen], rtol=0, atol=1e-5)


def test_recorded_rotation(dream, recorded):
    cos, sin = rope(torch.arange(24)[None], dream.cfg)
    torch.testing.assert_close(cos[0, :, 0], recorded["a/rope_cos"], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, :, 0], recorded["a/rope_sin"], rtol=0, atol=1e-6)


# ---- loading


def test_weights_are_the_mapped_files(tiny_dream, dream):
    """No copy: tensors of one shard are windows on one mapping, and nothing is trained by default."""
    a, b = (dream.model["layers"][0].mlp.get_parameter(f"{n}_proj.weight") for n in ("gate", "up"))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.data_ptr() != b.data_ptr()
    assert not any(p.requires_grad for p in dream.parameters()) and not dream.training


def test_one_file_or_shards(folder, dream):
    state = dream.state_dict()
    for shard in folder.glob("model*"):
        shard.unlink()
    write_safetensors(folder / "model.safetensors", state)
    assert all(torch.equal(t, state[name]) for name, t in Dream.load(folder).state_dict().items())


def test_causal_model_in_dreams_layout(dream, tmp_path):
    """The converter: a tied causal model without biases computes the same here, unmasked, and has one more token."""
    state = {n: t for n, t in dream.state_dict().items() if "bias" not in n and "lm_head" not in n}
    vocab = {c: i for i, c in enumerate(byte_characters())} | {"<|endoftext|>": 150}
    convert(state, {f.name: getattr(dream.cfg, f.name) for f in fields(DreamConfig)}, vocab, {"<|endoftext|>": 150}, tmp_path)
    other, x = Dream.load(tmp_path), torch.randint(200, (1, 5), generator=gen(4))
    want = slow_forward(state | {"lm_head.weight": dream.table}, dream.cfg, x[0])
    logits = everywhere(other, embed(other, x))[0].double()
    torch.testing.assert_close(logits[:, :-1], want, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits[:, -1], want.mean(1), rtol=0, atol=2e-5)
    assert other.cfg.mask_token_id == 200 and Tokenizer(tmp_path).encode("<|mask|>", special=True) == [200]


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


@pytest.mark.parametrize("changes, message", [
    (dict(tie_word_embeddings=True), "tie_word_embeddings = True, only False"),
    (dict(rope_scaling={"type": "yarn"}), "rope_scaling"),
    (dict(mask_token_id="gone"), "no number for mask_token_id"),
    (dict(mask_token_id=200), "beyond vocab_size = 200"),
    (dict(num_hidden_layers=4), r"lacks model.layers.3.input_layernorm.weight \(12 such"),
    (dict(num_hidden_layers=2), "has an unknown model.layers.2.input_layernorm.weight"),
    (dict(intermediate_size=161), r"mlp.gate_proj.weight is \(160, 64\), but \(161, 64\) by config.json"),
])
def test_a_config_that_does_not_fit_is_refused(folder, changes, message):
    edited(folder, **changes)
    with pytest.raises(Refused, match=message):
        Dream.load(folder)


def test_broken_folders_are_refused(folder):
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:1000])
    with pytest.raises(Refused, match="00002-of-00003.safetensors is truncated"):
        Dream.load(folder)
    shard.unlink()
    with pytest.raises(Refused, match="00002-of-00003.safetensors does not exist"):
        Dream.load(folder)
    for text, message in (("{}", "index.json has no weight_map"), ("[]", "index.json holds no JSON object but a list")):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(Refused, match=message):
            Dream.load(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(Refused, match="index.json is not JSON"):
        Dream.load(folder)
    with pytest.raises(Refused, match="config.json does not exist"):
        Dream.load(folder / "elsewhere")


# ---- adapters


def adapter_folder(path, dream, omega=None, **changes):
    os.makedirs(path, exist_ok=True)
    write_safetensors(f"{path}/adapter_model.safetensors", dora.adapter_state(dream), {"format": "pt"})
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=16, lora_alpha=16, bias="none", use_dora=True,
                  rank_pattern={}, target_modules=["q_proj", "v_proj", "o_proj", "k_proj"]) | changes
    with open(f"{path}/adapter_config.json", "w") as f:
        json.dump(config, f)
    if omega:
        with open(f"{path}/transparency_config.json", "w") as f:
            json.dump(omega, f)


def test_authors_adapter_folder(tiny_dream, dream, recorded, tmp_path):
    """DoRA as peft wrote it, ω as in the recorded transparency_config.json (bf16 values)."""
    adapter_folder(tmp_path, recorded_adapter(Dream.load(tiny_dream)), {
        "transparency_alg": "mixinputs_with_topk", "transparency_scale": 0.400390625, "transparency_steepness": 2.0,
        "transparency_centre": -2.5, "mixture_temp": 1.0, "mixinputs_k": 1, "transparency_scheduling": "none"})
    sm = SoftMask(**load_adapter(dream, tmp_path))
    assert sm.k == 1 and sm.mask_id == 194 and sm.omega[0].item() == pytest.approx(0.400390625)
    logits = everywhere(dream, embed(dream, recorded["b/input_ids"]))
    torch.testing.assert_close(logits[:, ::6, ::8], recorded["b/logits"], rtol=0, atol=1e-5)


def test_dense_and_saturated_heads_are_read(tiny_dream, dream, tmp_path):
    adapter_folder(tmp_path, recorded_adapter(Dream.load(tiny_dream)), {
        "transparency_alg": "mixinputs_with_temp", "transparency_scale": 1.0, "transparency_steepness": 2.0,
        "transparency_centre": -2.5, "mixture_temp": 1.25, "mixinputs_k": 3, "transparency_scheduling": "none"})
    sm = SoftMask(**load_adapter(dream, tmp_path))  # bf16 has no number between 0.998 and 1
    assert sm.k is None and 0.99 < sm.omega[0].item() < 1
    assert F.softplus(sm.raw_tau).item() == pytest.approx(1.25, abs=1e-5)


@pytest.mark.parametrize("changes, message", [
    (dict(use_dora=False), "use_dora = False, only True"),
    (dict(use_rslora=True), "use_rslora = True"),
    (dict(rank_pattern={"q_proj": 8}), "rank_pattern"),
    (dict(r=8), r"\(16, 64\), the model needs \(8, 64\)"),
    (dict(target_modules=["q_proj"]), "not an adapter of this model"),
    (dict(target_modules=["c_attn"]), "no linear layer is called c_attn"),
    (dict(target_modules="all-linear"), "a list of names and a rank of at least 1, not 'all-linear'"),
    (dict(r=0), "a rank of at least 1"),
    (dict(r="16"), "a rank of at least 1"),
    (dict(lora_alpha="x"), "not an adapter of this model"),
])
def test_other_adapters_are_refused(tiny_dream, dream, tmp_path, changes, message):
    adapter_folder(tmp_path, recorded_adapter(Dream.load(tiny_dream)), **changes)
    with pytest.raises(Refused, match=message):
        load_adapter(dream, tmp_path)


OURS = {"mask_id": 194, "k": 3, "omega_s": 0.4, "omega_a": 2.0, "omega_b": -2.5, "tau": 1.0}
THEIRS = {"transparency_alg": "mixinputs_with_topk", "transparency_scale": 0.4, "transparency_steepness": 2.0,
          "transparency_centre": -2.5, "mixture_temp": 1.0, "mixinputs_k": 1, "transparency_scheduling": "none"}


@pytest.mark.parametrize("values, message", [
    (OURS | {"mask_id": 3}, "mask_id = 3, k = 3: of another model than this one with mask 194 and 200 tokens"),
    (OURS | {"k": 999}, "k = 999: of another model"),
    (OURS | {"k": 1.5}, "k = 1.5"),
    (OURS | {"k": "3"}, "not a soft mask"),
    (OURS | {"omega_s": 1.7}, "0 <= omega_s < 1"),
    (OURS | {"omega_b": 0.5}, "omega_b < 0"),
    (OURS | {"omega_c": 0.5}, "omega_c"),
    ({n: v for n, v in OURS.items() if n != "omega_b"}, "'omega_b' is missing"),
    ([OURS], "softmask.json holds no JSON object"),
    (THEIRS | {"transparency_alg": "mixinputs_with_mean"}, "'mixinputs_with_mean' is missing, or not known here"),
    (THEIRS | {"transparency_scheduling": "linear"}, "decode with --schedule=linear"),
    (THEIRS | {"mixinputs_k": 999}, "k = 999: of another model"),
    ({n: v for n, v in THEIRS.items() if n != "mixinputs_k"}, "'mixinputs_k' is missing"),
    ({n: v for n, v in THEIRS.items() if n != "transparency_scale"}, "'transparency_scale' is missing"),
])
def test_other_soft_masks_are_refused(tiny_dream, dream, tmp_path, values, message):
    """No value of such a file is guessed at: a field that means something else here would change what the model says."""
    adapter_folder(tmp_path, recorded_adapter(Dream.load(tiny_dream)))
    name = "transparency_config.json" if "mixture_temp" in values else "softmask.json"
    (tmp_path / name).write_text(json.dumps(values))
    with pytest.raises(Refused, match=message):
        load_adapter(dream, tmp_path)


def test_fingerprint_is_of_the_weights_alone(tiny_dream, dream):
    """Not of the dtype, nor of an adapter on top."""
    own = dream.fingerprint()
    assert Dream.load(tiny_dream, dtype=torch.float64).fingerprint() == Dream.load(tiny_dream, dtype=torch.bfloat16).fingerprint() == own
    assert recorded_adapter(dream).fingerprint() == own
    dora.merge_(dream)
    assert dream.fingerprint() != own


def test_adapter_of_another_model_is_refused(tiny_dream, dream, folder, tmp_path):
    adapter_folder(tmp_path / "adapter", recorded_adapter(dream))
    edited(folder, num_hidden_layers=2)
    state = {n: t for n, t in Dream.load(tiny_dream).state_dict().items() if "layers.2." not in n}
    for shard in folder.glob("model*"):
        shard.unlink()
    write_safetensors(folder / "model.safetensors", state)
    with pytest.raises(Refused, match="not an adapter of this model.*layers.2"):
        load_adapter(Dream.load(folder), tmp_path / "adapter")


# ---- the tokenizer


@pytest.fixture(scope="module")
def recorded_tokenizer(tmp_path_factory):
    """(Tokenizer, recordings): of the vocabulary, every entry that could occur in the recorded texts."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with gzip.open(os.path.join(GOLDEN, "dream_tokenizer.json.gz"), "rt", encoding="utf-8") as f:
        numbers = json.load(f)
    for name in ("vocab", "added_tokens"):
        (folder / f"{name}.json").write_text(json.dumps(numbers[name]))
    return Tokenizer(folder), numbers


def test_recorded_ids(recorded_tokenizer):
    tok, numbers = recorded_tokenizer
    assert len(numbers["cases"]) == 60 and tok.n_vocab == 151667
    for text, ids in numbers["cases"]:
        assert tok.encode(text, special=True) == ids
        assert tok.encode(tok.decode(ids), special=True) == ids


def test_recorded_chats(recorded_tokenizer):
    tok, numbers = recorded_tokenizer
    for case in numbers["chat"]:
        assert tok.chat(case["messages"], case["add_generation_prompt"]) == case["text"]
        assert tok.encode(case["text"], special=True) == case["ids"]


def test_markup_in_a_text_is_text(recorded_tokenizer):
    tok, _ = recorded_tokenizer
    assert tok.encode("<|im_end|>", special=True) == [151645]
    assert 151645 not in tok.encode("<|im_end|>") and tok.decode(tok.encode("<|im_end|>")) == "<|im_end|>"


def test_composed_and_decomposed_accents_are_one(recorded_tokenizer):
    tok, _ = recorded_tokenizer
    assert tok.encode("cafe\u0301") == tok.encode("caf\u00e9")


def test_unused_ids_decode_to_nothing(recorded_tokenizer):
    tok, numbers = recorded_tokenizer
    text, ids = numbers["cases"][0]
    assert tok.decode([152063, *ids, 151667]) == text


def test_merges_alone_are_the_vocabulary(tmp_path):
    """Against byte pair encoding by hand: merge the earliest pair of the list until none is left."""
    pairs = [("l", "o"), ("lo", "w"), ("e", "r"), ("Ġ", "low"), ("n", "e"), ("ne", "w"), ("Ġlow", "er"), ("w", "er")]
    (tmp_path / "merges.txt").write_bytes(("#version: 0.2\r\n" + "".join(f"{a} {b}\r\n" for a, b in pairs)).encode())
    (tmp_path / "added_tokens.json").write_text('{"<|mask|>": 300}')
    tok, to_char = Tokenizer(tmp_path), {b: c for c, b in byte_characters().items()}
    ids = {c: i for i, c in enumerate(byte_characters())} | {a + b: 256 + i for i, (a, b) in enumerate(pairs)}
    for word in ("low", " lower", "newer", "flow", "wer", " é"):
        parts = [to_char[b] for b in word.encode()]
        while True:
            ranks = [(pairs.index(p), i) for i, p in enumerate(zip(parts, parts[1:])) if p in pairs]
            if not ranks:
                break
            i = min(ranks)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        assert tok.encode(word) == [ids[p] for p in parts]
    assert tok.n_vocab == 301


def test_missing_vocabulary_is_refused(tmp_path):
    with pytest.raises(Refused, match="neither vocab.json nor merges.txt"):
        Tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text('{"日": 0}')
    with pytest.raises(Refused, match="added_tokens.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text("{}")
    with pytest.raises(Refused, match="not a character of a byte-level vocabulary"):
        Tokenizer(tmp_path)
