# SPDX-License-Identifier: MIT
"""The time of a call of each arm of "Fewer calls", two cells a call: one puzzle, and 100 at once.

    OMP_NUM_THREADS=1 python results/call_time.py     # a minute on an idle core

Weights are random, and feedback is as strong as after training. The arms take turns. Printed are
milliseconds of CPU time per call, the median over turns, and the median ratio to binary in a turn.
"""

import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from selfcond import SelfConditioned  # noqa: E402

import data  # noqa: E402
import grids  # noqa: E402
import sample  # noqa: E402
from mdlm import MDLM, ModelConfig  # noqa: E402

SIZE = dict(n_head=8, n_embd=128, n_cond=32, vocab_size=259, mask_id=258, length=39, dropout=0.0,
            omega_s=0.5, omega_a=1.0, omega_b=-2.8)
MASKS, CALLS, TURNS = 24, 12, 9


def build(cls=MDLM, n_layer=2, **changes):
    torch.manual_seed(1)
    model = cls(ModelConfig(n_layer=n_layer, **SIZE | changes)).eval()
    nn.init.normal_(model.net.output_layer.linear.weight, std=0.3)
    return model


def measure(arms, count):
    """{arm: {"ms a call", "to binary"}} for `count` puzzles at once"""
    mask = 258
    draws = [data.rng("fewer calls", i) for i in range(count)]
    texts = grids.texts(count, data.rng("fewer calls"))
    x = grids.puzzles(grids.ids_of(texts, mask), 36 - MASKS, mask, draws)
    times = {name: [] for name in arms}
    for turn in range(TURNS + 1):
        for name, model in arms.items():
            generators = [data.rng("sample", 1, i) for i in range(count)]
            began = time.process_time()
            sample.generate_in_order(model, count, CALLS, "entropy", 1e-12, generators, x=x)
            if turn:  # the first warms up
                times[name].append(1000 * (time.process_time() - began) / CALLS)
    return {name: {"ms a call": round(statistics.median(ms), 2),
                   "to binary": round(statistics.median(
                       a / b for a, b in zip(ms, times["binary"])), 2)}
            for name, ms in times.items()}


def main():
    arms = {"binary": build(soft_mask=False), "ours": build(),
            "constant3": build(variant="constant", omega_s=0.3),
            "selfcond": build(SelfConditioned), "deep": build(soft_mask=False, n_layer=4)}
    found = {f"{count} at once": measure(arms, count) for count in (1, 100)}
    found["machine"] = {"torch": torch.__version__, "threads": torch.get_num_threads(),
                        "load": os.getloadavg()[0]}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
