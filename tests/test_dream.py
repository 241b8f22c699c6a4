"""dream.py against recorded numbers of the published code, transformers' Qwen2, and bad folders."""

import gzip
import json
import math
import os
import shutil

import pytest
import torch
import torch.nn.functional as F

import dora
from checkpoint import write_safetensors
from conftest import GOLDEN, digest, gen, recorded_adapter, refused
from dream import Dream, DreamConfig, Tokenizer, load_adapter


@pytest.fixture
def dream(tiny_dream):
    return Dream.load(tiny_dream)


@pytest.fixture
def folder(tiny_dream, tmp_path):
    return shutil.copytree(tiny_dream, tmp_path / "model")


def embed(dream, x):
    return F.embedding(x, dream.table)


def everywhere(dream, x):
    return dream.head(dream.trunk(embed(dream, x))[0])


def close(got, want, atol):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_bf16_is_near_fp32_and_its_logits_are_fp32(tiny_dream, dream):
    """At a length where bf16 would round the positions."""
    x = torch.randint(190, (1, 500), generator=gen(1))
    half = Dream.load(tiny_dream, dtype=torch.bfloat16)
    assert not list(half.buffers())
    logits = everywhere(half, x)
    h = half.trunk(embed(half, x))[0]
    assert h.dtype == half.lm_head(h).dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, half.lm_head(h).float())  # as the released code rounds them
    close(logits, everywhere(dream, x), 0.25)


def test_recorded_logits(dream, recorded):
    logits = everywhere(dream, recorded["a/input_ids"])
    close(digest(logits), recorded["digest/a/logits"].numpy(), 1e-3)
    close(logits[:, ::4, ::8], recorded["a/logits"], 1e-5)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_tied_qwen2_that_sees_all_positions_and_is_shifted_is_a_dream(tmp_path, dtype, atol):
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: would compare logits with Qwen2ForCausalLM")
    theirs = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=200, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=190, tie_word_embeddings=True))
    g = gen()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.04 + ("norm" in name))
    theirs.to(dtype).save_pretrained(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<M>": 194}')
    x = torch.randint(190, (2, 40), generator=g)
    x[:, [1, 7, 39]] = 194
    everything = torch.zeros(2, 1, 40, 40, dtype=dtype)  # what is added to the attention's scores
    with torch.no_grad():
        want, causal = (theirs(input_ids=x, attention_mask=mask).logits[:, [0, 6, 38]].flatten(0, 1)
                        for mask in (everything, None))
        dream = Dream.load(tmp_path)
        masks = (x == dream.cfg.mask_token_id).nonzero(as_tuple=True)
        logits = dream.head(dream.hidden(embed(dream, x), masks))
    close(logits, want.float(), atol)
    assert (logits - causal).abs().max() > 0.5


def one_file(folder, state):
    for shard in folder.glob("model*"):
        shard.unlink()
    write_safetensors(folder / "model.safetensors", state)


def rewrite(folder, name, **changes):
    """None removes a field."""
    file = folder / name
    values = json.loads(file.read_text()) if file.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not None}
    file.write_text(json.dumps(values))


def test_another_variant_and_broken_weights_are_refused(folder, dream):
    """Both would silently give other logits."""
    file = folder / "config.json"
    whole = file.read_text()
    for changes in (dict(use_sliding_window=True), dict(rope_parameters={"rope_type": "yarn"}),
                    dict(hidden_act="gelu"), dict(rope_scaling={"type": "linear"})):
        file.write_text(json.dumps(json.loads(whole) | changes))
        refused("has (use_sliding_window|rope_type|hidden_act|rope_scaling) = ", Dream.load, folder)
    file.write_text(whole)
    state = {name: t.clone() for name, t in dream.state_dict().items()}
    state["model.norm.weight"][7] = -math.inf
    one_file(folder, state)
    refused("model.norm.weight has values that are not finite numbers", Dream.load, folder)


@torch.no_grad()
def test_a_tied_head_is_the_table_whichever_of_the_two_is_in_the_file(folder, dream):
    x, state = torch.randint(190, (2, 12), generator=gen()), dream.state_dict()
    names = "model.embed_tokens.weight", "lm_head.weight"
    table, other = state.pop(names[0]), state.pop(names[1])
    one_file(folder, state | dict.fromkeys(names, table))
    want = everywhere(Dream.load(folder), x)
    rewrite(folder, "config.json", tie_word_embeddings=True)
    prints = set()
    for inside in (names[:1], names[1:], names):
        one_file(folder, state | dict.fromkeys(inside, table))
        tied = Dream.load(folder)
        assert torch.equal(everywhere(tied, x), want)
        assert tied.state_dict().keys() == {*state, names[0]} and not tied.table.requires_grad
        prints.add(tied.fingerprint())
    assert len(prints) == 1
    one_file(folder, state | {names[0]: table, names[1]: other})
    refused("lm_head.weight is not its model.embed_tokens.weight", Dream.load, folder)


def test_mask_and_pad_that_config_does_not_name(folder):
    """No id is guessed: a wrong [MASK] would be an ordinary token to the model."""
    refused("there is no config.json: --model is the folder of a Dream", DreamConfig.read, "")
    rewrite(folder, "config.json", mask_token_id=None, pad_token_id=None)
    rewrite(folder, "added_tokens.json", **{"<M>": 193, "[MASK]": 194})
    refused("has <M> and .MASK", DreamConfig.read, folder)
    rewrite(folder, "added_tokens.json", **{"[MASK]": None})
    cfg = DreamConfig.read(folder)
    assert (cfg.mask_token_id, cfg.pad_token_id) == (193, cfg.eos_token_id)
    rewrite(folder, "config.json", mask_token_id=0, pad_token_id=0)
    cfg = DreamConfig.read(folder)
    assert (cfg.mask_token_id, cfg.pad_token_id) == (0, 0) != cfg.eos_token_id


THEIRS = {"transparency_alg": "mixinputs_with_topk", "transparency_scale": 0.4,
          "transparency_steepness": 2.0, "transparency_centre": -2.5, "mixture_temp": 1.0,
          "mixinputs_k": 1, "transparency_scheduling": "none"}


def test_adapters_of_others(tiny_dream, tmp_path):
    """No value is guessed: a field with another meaning would change the output."""
    state = dora.adapter_state(recorded_adapter(Dream.load(tiny_dream)))

    def read(omega=None, **changes):
        dream = Dream.load(tiny_dream)
        folder = tmp_path / f"adapter{len(list(tmp_path.iterdir()))}"
        write_safetensors(folder / "adapter_model.safetensors", state, {"format": "pt"})
        config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=16, lora_alpha=40, bias="none",
                      use_dora=True, rank_pattern={},
                      target_modules=["q_proj", "v_proj", "o_proj", "k_proj"]) | changes
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        if omega is not None:
            (folder / "transparency_config.json").write_text(json.dumps(omega))
        found = load_adapter(dream, folder)
        assert {layer.s for layer in dora.layers(dream).values()} == {40 / 16}
        return found
    assert read() is None and read({"transparency_alg": "none", "mixture_temp": 1.0}) is None
    assert read(THEIRS | {"mixinputs_k": 2}) == {"mask_id": 194, "k": 2, "omega_s": 0.4,
                                                 "omega_a": 2.0, "omega_b": -2.5, "tau": 1.0}
    # bf16 has no number between 0.998 and 1
    assert 0.99 < read(THEIRS | {"transparency_scale": 1.0})["omega_s"] < 1
    refused("transparency_scheduling", read, THEIRS | {"transparency_scheduling": "linear"})
    refused("use_dora = False, only True", read, use_dora=None)  # peft's default
    for field, value in (("use_dora", False), ("use_rslora", True), ("bias", "all"),
                         ("rank_pattern", {"q_proj": 8}), ("alpha_pattern", {"q_proj": 8})):
        refused(f"{field} = .*, only", read, **{field: value})
    for error, omega, changes in ((KeyError, {"transparency_alg": "slerp_sm"}, {}),
                                  (ValueError, {}, {"r": 8})):
        with pytest.raises(error, match="slerp_sm|lora_A"):
            read(THEIRS | omega, **changes)
    name, tensor = next(iter(state.items()))
    for wrong in state | {"more": tensor}, {n: p for n, p in state.items() if n != name}:
        with pytest.raises(ValueError, match="in only one of model and adapter"):
            dora.load_adapter_state(recorded_adapter(Dream.load(tiny_dream)), wrong)
    tensor[0] = math.nan
    refused("not finite", read)


@pytest.fixture
def recorded_tokenizer(tmp_path):
    with gzip.open(os.path.join(GOLDEN, "dream_tokenizer.json.gz"), "rt", encoding="utf-8") as f:
        numbers = json.load(f)
    for name in ("vocab", "added_tokens"):
        (tmp_path / f"{name}.json").write_text(json.dumps(numbers[name]))
    return Tokenizer(tmp_path), numbers


def test_recorded_ids_and_chats(recorded_tokenizer):
    """Markup in a text stays text, the two ways to write é are one, unknown ids give nothing."""
    tok, numbers = recorded_tokenizer
    assert len(numbers["cases"]) == 60
    for text, ids in numbers["cases"]:
        assert tok.encode(text, special=True) == ids
        assert tok.encode(tok.decode(ids), special=True) == ids
    for case in numbers["chat"]:
        begin = "" if case["add_generation_prompt"] else "<|im_start|>assistant\n"
        assert tok.chat(case["messages"]) == case["text"] + begin
        assert tok.encode(case["text"], special=True) == case["ids"]
    plain = tok.encode("<|im_end|>")
    assert 151645 not in plain
    assert tok.decode(plain) == "<|im_end|>"
    assert tok.encode("cafe\u0301") == tok.encode("caf\u00e9")
    text, ids = numbers["cases"][0]
    assert tok.decode([152063, *ids, 151667]) == text
