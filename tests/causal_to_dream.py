"""Bring a small pretrained causal model into Dream's layout, to finetune something real on a CPU.

The result is not Dream. It keeps the weights of a LLaMA-like model and drops its causal mask. The
biases of q, k and v are zero. The head is a copy of the table, and both get one more row for
[MASK], the mean of the table. The model must learn to look ahead and to fill in before it is of
any use.

    pip install transformers gguf accelerate
    python tests/causal_to_dream.py MODEL OUT    # MODEL: a Hugging Face folder, or one .gguf file
"""

import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from checkpoint import write_safetensors  # noqa: E402


def convert(state, config, vocab, special, folder):
    """Write `folder` as dream.Dream and dream.Tokenizer read it.

    state: {name: tensor} of the causal model, names as in Qwen2 and LLaMA.
    config: its sizes, names as in config.json.   vocab: {token: id}, byte-level.
    special: {token: id} of the added tokens, <|endoftext|> among them.
    """
    V, out = len(state["model.embed_tokens.weight"]), dict(state)
    for i in range(config["num_hidden_layers"]):
        for name in ("q", "k", "v"):
            proj = f"model.layers.{i}.self_attn.{name}_proj."
            out.setdefault(proj + "bias", torch.zeros(len(state[proj + "weight"])))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = state.get(name, state["model.embed_tokens.weight"])
        out[name] = torch.cat([table, table.mean(0, keepdim=True)])
    write_safetensors(os.path.join(folder, "model.safetensors"), out, {"format": "pt"})
    end = special["<|endoftext|>"]
    ids = dict(vocab_size=V + 1, mask_token_id=V, pad_token_id=end, eos_token_id=end)
    texts = {"config.json": config | ids | {"tie_word_embeddings": False},
             "vocab.json": vocab, "added_tokens.json": special | {"<|mask|>": V}}
    for name, values in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
            json.dump(values, f)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, gguf = sys.argv[1], None
    if path.endswith(".gguf"):
        path, gguf = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf, dtype=torch.float32)
    tok = AutoTokenizer.from_pretrained(path, gguf_file=gguf)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    sizes = {name: getattr(model.config, name) for name in names}
    sizes["rope_theta"] = model.config.rope_parameters["rope_theta"]
    convert(model.state_dict(), sizes, tok.get_vocab(), tok.get_added_vocab(), sys.argv[2])
