"""Every system on a GPU that is not there (pretend.py): in bf16, with all tensors in one place."""

import json
import os

import pytest
import torch

import data
from conftest import configure, gen
from pretend import gpu

TINY = ("--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=39 --batch_size=4 --micro_batch=2 "
        "--steps=4 --eval_rows=4 --eval_every=2 --p_sm=1 --omega_s=0.5 --data=data").split()


def start(script, *words):
    module, cfg = configure(script, words)
    name = {"train": "train", "finetune_dream": "finetune"}.get(script, "main")
    return getattr(module, name)(cfg)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests named cuda use it")
@pytest.mark.parametrize("mix", [
    lambda here, there: here + there, lambda here, there: here[there.long()],
    lambda here, there: torch.cat([here, there]), lambda here, there: there.numpy(),
    lambda here, there: torch.rand(3, generator=torch.Generator("cuda")),
    lambda here, there: there.uniform_(generator=gen())])
def test_what_a_gpu_refuses_is_refused(mix):
    with gpu():
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        assert (there[here.long()] + torch.tensor(1.0)).device.type == "cuda"
        with pytest.raises(AssertionError):
            mix(here, there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests named cuda use it")
def test_mdlm_keeps_to_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(str(i * j) for i in range(90)) for j in range(30)]
    data.prepare(((text, True) for text in texts), "data", data.tokenizer("bytes"), val_docs=9)
    with gpu():
        for k in "--k=3", "--k=none":
            model, ema = start("train", *TINY, k, "--out_dir=run", "--overwrite")
            start("train", *TINY, k, "--out_dir=run", "--resume", "--steps=6")
            assert model.sm.raw_s.is_cuda and ema.net.table.is_cuda
            for i, words in enumerate(("--sampler=remdm-loop", "--sampler=mdlm --passes=2",
                                       "--order=entropy", "--order=random --soft=False")):
                start("sample", "--checkpoint=run/last.pt", "--count=2", "--steps=8",
                      f"--out={k}{i}.jsonl", *words.split())
            start("eval", "ppl", "--checkpoint=run/last.pt", "--data=data", "--rows=4")
            start("eval", "feedback", "--checkpoint=run/last.pt", "--data=data", "--rows=4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests named cuda use it")
def test_dream_keeps_to_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with gpu():
        for k in "--k=3", "--k=none":
            start("finetune_dream", "tiny", "--steps=2", k, "--overwrite")
            adapter = "--adapter=out/tiny_dream/last"
            for words in ("", "--block=8 --cache=dual", "--block=8 --threshold=0.5",
                          "--temperature=0.5 --top_p=0.9 --schedule=linear"):
                start("sample_dream", "--model=out/tiny_dream/model", adapter, "--gen_len=16",
                      "--prompt=1", *words.split())
            start("eval", "feedback", "--checkpoint=out/tiny_dream/last", "--rows=4")
    assert json.load(open(os.path.join("out/tiny_dream/last", "finetune.json")))
