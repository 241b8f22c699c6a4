"""dream.py against recorded numbers of the published code, transformers' Qwen2 and bad folders."""

import gzip
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import convert
import dora
import launch
from conftest import GOLDEN, digest, gen, recorded_adapter, refused
from dream import Dream, DreamConfig, Tokenizer, load_adapter, write_safetensors
from finetune_dream import TARGETS

everywhere = lambda dream, x: dream.head(dream.trunk(F.embedding(x, dream.table))[0])
close = lambda got, want, atol: torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.fixture
def dream(tiny_dream):
    return Dream.load(tiny_dream)


@pytest.fixture
def folder(tiny_dream, tmp_path):
    return shutil.copytree(tiny_dream, tmp_path / "model", ignore=shutil.ignore_patterns("model*"))


def test_logits_equal_the_recorded_and_bf16_is_near(tiny_dream, dream, recorded):
    logits = everywhere(dream, recorded["a/input_ids"])
    close(digest(logits), recorded["digest/a/logits"].numpy(), 1e-3)
    close(logits[:, ::4, ::8], recorded["a/logits"], 1e-5)
    x = torch.randint(190, (1, 500), generator=gen(1))  # bf16 would round the later positions
    half = Dream.load(tiny_dream, dtype=torch.bfloat16)
    rounded = half.lm_head(half.trunk(F.embedding(x, half.table))[0])
    assert rounded.dtype == torch.bfloat16 and not list(half.buffers())
    logits = everywhere(half, x)
    assert logits.dtype == torch.float32 and torch.equal(logits, rounded.float())  # [code]
    close(logits, everywhere(dream, x), 0.25)


def write(path, **fields):
    path.write_text(json.dumps(fields))


def test_configs_as_published_and_as_transformers_5_writes_them_and_no_others(folder):
    """No id is guessed: a wrong [MASK] would be an ordinary token to the model."""
    raw = json.loads(Path(GOLDEN, "dream_config.json").read_text())
    new = {"rope_parameters": {"rope_theta": 10**6, "rope_type": "default"}, "rope_theta": None,
           "layer_types": ["full_attention"] * 28, "eos_token_id": [151643, 151645],
           "pad_token_id": None, "mask_token_id": None}
    write(folder / "added_tokens.json", **{"<M>": 0, "[MASK]": 194})
    for changes, ends, mask_id in (({"rope_scaling": None, "head_dim": 128}, [151643], 151666),
                                   (new, [151643, 151645], 0)):
        write(folder / "config.json", **raw | changes)
        cfg = DreamConfig.read(folder)
        assert (cfg.rope_theta, cfg.head_dim, cfg.pad_token_id) == (1e6, 128, 151643)
        assert (cfg.eos_token_id, cfg.mask_token_id) == (ends, mask_id)
    (folder / "added_tokens.json").unlink()
    for name, value in (
            ("num_hidden_layers", 3.0), ("num_key_value_heads", None), ("rope_theta", "3"),
            ("mask_token_id", None), ("mask_token_id", True), ("pad_token_id", -1),
            ("mask_token_id", raw["vocab_size"]),
            ("eos_token_id", [190, raw["vocab_size"]]), ("hidden_act", "gelu"), ("head_dim", 8),
            ("rope_scaling", {"type": "linear"}), ("rope_parameters", {"rope_type": "yarn"}),
            ("rope_parameters", {"partial_rotary_factor": 0.25}), ("use_sliding_window", True),
            ("quantization_config", {"bits": 4}), ("layer_types", 28 * ["linear_attention"])):
        write(folder / "config.json", **raw | {name: value})
        refused("config.json", DreamConfig.read, folder)


def test_weights_of_another_model_are_refused_and_a_head_may_be_tied(folder, dream):
    state, q = dream.state_dict(), "model.layers.1.self_attn.q_proj.weight"
    save = lambda tensors: write_safetensors(folder / "model.safetensors", tensors)
    for name, t in ((q, torch.ones(64, 48)), (q, torch.ones(64, 64).char()),
                    (q + ".absmax", torch.ones(9)), ("lm_head.weight", dream.table - math.inf)):
        save(state | {name: t})
        refused(f"Error.*{name}|{name} has values", Dream.load, folder, dtype=torch.half)
    frequencies = "model.layers.2.self_attn.rotary_emb.inv_freq"
    save(state | {frequencies: torch.ones(8), q: state[q].bfloat16()})  # loaded as the table is
    assert {t.dtype for t in Dream.load(folder).state_dict().values()} == {torch.float32}
    x = torch.randint(190, (2, 12), generator=gen())
    tied = F.linear(dream.trunk(F.embedding(x, dream.table))[0], dream.table)
    cfg = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", **cfg | {"tie_word_embeddings": True})
    for weights in state, {name: state[name] for name in state if name != "lm_head.weight"}:
        save(weights)
        assert torch.equal(everywhere(Dream.load(folder), x), tied)


def test_adapters_of_others(tiny_dream, tmp_path):
    """No value is guessed: a field with another meaning would change the output."""
    theirs = {"transparency_alg": "mixinputs_with_topk", "transparency_scale": 0.4,
              "transparency_steepness": 2.0, "transparency_centre": -2.5, "mixture_temp": 1.0,
              "mixinputs_k": 2, "transparency_scheduling": "none"}
    state = dora.adapter_state(recorded_adapter(Dream.load(tiny_dream)))

    def read(omega=None, **changes):
        folder = tmp_path / f"adapter{len(list(tmp_path.iterdir()))}"
        write_safetensors(folder / "adapter_model.safetensors", state)
        config = dict(peft_type="LORA", r=16, lora_alpha=40, bias="none", use_dora=True, new=1,
                      target_modules=TARGETS[::-1], init_lora_weights="orthogonal")
        write(folder / "adapter_config.json", **config | changes)
        if omega:
            write(folder / "transparency_config.json", **omega)
            refused("python lab/convert.py", load_adapter, Dream.load(tiny_dream), folder)
            found = convert.read(f"{folder}/transparency_config.json")
            launch.save(f"{folder}/softmask.pt", **found)
        return load_adapter(Dream.load(tiny_dream), folder)
    assert read() is None and read({"transparency_alg": "none"}) is None
    sm, rounded = read(theirs), read(theirs | {"transparency_scale": 1.0})  # by bf16
    assert (sm.mask_id, sm.k) == (194, 2) and 0.99 < rounded.omega[0] < 1
    assert [w.item() for w in sm.omega] == pytest.approx([0.4, 2.0, -2.5])
    whole = read(theirs | {"transparency_alg": "mixinputs_with_temp", "mixture_temp": 0.7})
    assert whole.k is None and whole.tau.item() == pytest.approx(0.7, rel=1e-5)
    for name, wrong in ("alg", "slerp"), ("scheduling", "linear"):
        refused(f"= '{wrong}', ", read, theirs | {f"transparency_{name}": wrong})
    for name, wrong in (
            ("use_dora", False), ("use_rslora", True), ("bias", "all"), ("peft_type", "ADALORA"),
            ("rank_pattern", {"q_proj": 8}), ("alpha_pattern", {"q_proj": 8}), ("r", 8),
            ("init_lora_weights", "olora"), ("layer_replication", [[1, 3]]), ("lora_alpha", "x"),
            ("layers_to_transform", [0]),
            ("target_modules", TARGETS[1:]), ("target_modules", [*TARGETS, "up_proj"])):
        refused(f"has {name} = |another shape|TypeError|only the model or", read, **{name: wrong})
    state[min(state)].fill_(math.nan)
    refused("not finite", read)


def test_recorded_ids_and_chats(tmp_path):
    """Markup in a text stays text, the two ways to write é are one, unknown ids give nothing."""
    numbers = json.loads(gzip.decompress(Path(GOLDEN, "dream_tokenizer.json.gz").read_bytes()))
    for name in "vocab", "added_tokens":
        write(tmp_path / f"{name}.json", **numbers[name])
    shutil.copy(Path(GOLDEN, "dream_config.json"), tmp_path / "config.json")
    tok = Tokenizer(tmp_path)
    for text, ids in numbers["cases"]:
        back = tok.decode([152063, *ids, 151667])  # ids around it that are no token
        assert tok.encode(text, special=True) == tok.encode(back, special=True) == ids
    for case in numbers["chat"]:
        begin = "" if case["add_generation_prompt"] else "<|im_start|>assistant\n"
        assert tok.chat(case["messages"]) == case["text"] + begin
        assert tok.encode(case["text"], special=True) == case["ids"]
    plain = tok.encode("<|im_end|>")
    assert 151645 not in plain and tok.decode(plain) == "<|im_end|>"
    assert tok.encode("cafe\u0301") == tok.encode("caf\u00e9")
