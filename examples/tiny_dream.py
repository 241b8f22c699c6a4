# SPDX-License-Identifier: MIT
"""A dry run of finetune_dream.py without weights or data, too short to learn to add.

    python examples/tiny_dream.py            # with any flag of finetune_dream.py, --resume too
    python sample_dream.py --model=out/tiny_dream/model --adapter=out/tiny_dream/last \
        --gen_len=32 --prompt="3 + 4 = ?"
"""

import json
import os
import sys
from dataclasses import dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import finetune_dream
import launch
from data import rng
from dream import Dream, DreamConfig, byte_characters, write_safetensors
from launch import Count, NotNegative, Size, write_text


@dataclass
class Config(finetune_dream.Config):
    """finetune_dream.Config, with these defaults"""
    model: str = "out/tiny_dream/model"
    data: str = "out/tiny_dream/dialogues.jsonl"
    out: str = "out/tiny_dream"
    steps: Count = 200
    eta_bb: NotNegative = 1e-2
    # From this ω, the log shows feedback after about ten updates. From the paper's, it does not
    # within 2,000.
    omega_s: float = 0.3
    omega_b: float = -2.5
    save_every: Size = 20
    eval_every: Count = 20


def make(model, data):
    """Write a random model of 2 layers, whose tokens are bytes, and 120 dialogues."""
    if os.path.exists(data):  # written last
        return
    special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258, "<tool_call>": 259,
               "</tool_call>": 260, "<|mask|>": 261}
    cfg = dict(vocab_size=264, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
               num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6,
               mask_token_id=261, pad_token_id=256, eos_token_id=256)
    with torch.device("meta"):
        state = Dream(DreamConfig(**cfg)).state_dict()
    for name, t in state.items():
        noise = torch.randn(t.shape, generator=rng("tiny", name)) * t.shape[-1] ** -0.5
        state[name] = torch.ones(t.shape) if "norm" in name else noise
    write_safetensors(f"{model}/model.safetensors", state)
    write_text(f"{model}/config.json", json.dumps(cfg))
    write_text(f"{model}/vocab.json", json.dumps(byte_characters()))
    write_text(f"{model}/added_tokens.json", json.dumps(special))
    lines = [json.dumps({"messages": [{"role": "user", "content": f"{a} + {b} = ?"},
                                      {"role": "assistant", "content": f"It is {a + b}."}]})
             for a in range(12) for b in range(10)]
    write_text(data, "\n".join(lines) + "\n")


def main(cfg):
    here = launch.machine(cfg.device, cfg.dtype)
    launch.join(here)
    launch.first_rank(here, lambda: make(Config.model, Config.data))
    finetune_dream.finetune(cfg)


if __name__ == "__main__":
    launch.run(main, Config, ranks=True)
