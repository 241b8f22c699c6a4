"""`torchrun train.py`, compiled as on a GPU, on two ranks of a CPU, against eager code.

With the padded head, and DDP as it ships. .ci/run also tries inductor, with GPT-2's vocabulary.
"""

import functools
import json
import os

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import launch
import train
from conftest import logged, random_mdlm, save_mdlm, torchrun

BACKEND = os.environ.get("BACKEND", "aot_eager")
V = 3_202 if BACKEND == "aot_eager" else 50_258
SIZES = dict(n_layer=2, n_head=2, n_embd=48, n_cond=16, length=64)
FLAGS = ("--data=. --device=cpu --batch_size=16 --micro_batch=4 --steps=5 --warmup=2 "
         "--eval_every=5 --eval_rows=5 --log_every=1 --eta_bb=2e-3 --p_sm=0.5 --seed=3 "
         "--init_from=start.pt").split()
FLAGS += [f"--{name}={size}" for name, size in SIZES.items()]
FLAGS += ["--dropout=0.1" if BACKEND == "aot_eager" else "--dropout=0"]  # inductor draws others


def test_two_compiled_ranks_equal_one_eager_process(tmp_path, monkeypatch):
    """Up to rounding, which grows. A micro-batch has its own dropout, whichever rank it is on."""
    monkeypatch.chdir(tmp_path)
    special = {"name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}
    meta, noise = {"tokenizer": special}, np.random.default_rng(0)
    for split, n in ("train", 6000), ("val", 600):
        ids = np.minimum(noise.zipf(1.2, n) - 1, V - 3).astype(np.uint16)
        ids.tofile(f"{split}.bin")
        meta[split] = {"tokens": n, "sha256": split}
    launch.write_text("meta.json", json.dumps(meta))
    model = random_mdlm(0.1, vocab_size=V, mask_id=V - 1, omega_s=0.5, omega_a=1.0, omega_b=-9.0,
                        **SIZES)
    save_mdlm("start.pt", model, tokenizer=special, step=0)
    train.train(launch.from_cli(train.Config, [*FLAGS, "--out_dir=eager"]))
    done = torchrun(__file__, *FLAGS, "--compile=True", "--out_dir=ranks", cwd=".")
    assert done.returncode == 0, done.stderr
    eager, ranks = logged("eager"), logged("ranks")
    assert {line.get("lam", 0) > 0 for line in eager[1:]} == {True, False}
    assert "val_soft" in eager[0] and "val_plain" in eager[5]
    for expected, line in zip(eager, ranks, strict=True):
        assert line == pytest.approx(expected, rel=1e-6 if line["step"] < 2 else 1e-5)
    for rank in 0, 1:  # trunk with and without a graph, the loss, the feedback
        assert launch.read_json(f"ranks/counts.{rank}.json") == {"graphs": 4, "breaks": 0}


if __name__ == "__main__":  # what each rank runs: train.py with another backend
    torch.compile = functools.partial(torch.compile, backend=BACKEND)
    # As many buckets as at the real size. DDP must not split the trunk at each of them.
    launch.DistributedDataParallel = functools.partial(DistributedDataParallel, bucket_cap_mb=0.05)
    launch.run(train.train, train.Config, ranks=True)
    counters = torch._dynamo.utils.counters
    found = {"graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])}
    launch.write_text(f"ranks/counts.{os.environ['RANK']}.json", json.dumps(found))
