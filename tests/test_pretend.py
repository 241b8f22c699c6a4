"""On a pretended GPU (pretend.py): devices are not mixed, and host syncs are counted."""

import pytest
import torch

import data
import finetune_dream
import launch
import train
from conftest import start
from pretend import gpu
from sample import Pick, decode, generate, shares_of
from tiny_dream import make

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests named cuda use the GPU")
TINY = ("--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=39 --batch_size=4 --micro_batch=2 "
        "--steps=6 --eval_rows=4 --p_sm=1 --omega_s=0.5 --data=data").split()


@pytest.mark.parametrize("rank, device", [("1", "auto"), ("0", "cuda:1")])
def test_every_script_works_on_the_current_device(rank, device, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with gpu():
        assert launch.machine(device, "float32").device == torch.device("cuda:1")
        torch.cuda.set_device.assert_called_once_with("cuda:1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = 30 * ["0 1 2 3 " * 40]
    data.prepare(enumerate(texts), "data", data.tokenizer("bytes"), val_docs=9)
    make("dream", "dialogues.jsonl")


@pytest.mark.parametrize("script, words, draw, first, last", [
    (train, [*TINY, "--eval_every=0", "--p_sm=0.15"], "sample_times", 1, 5),
    (finetune_dream, "--data=dialogues.jsonl --model=dream --omega_s=0.3 --batch_size=2 --steps=6"
     .split(), "mask_response", 2, 10)])
def test_an_update_waits_for_nothing(folder, monkeypatch, script, words, draw, first, last):
    """The one copy is of the clipping factor. With a real GPU, it is there already."""
    whole, starts = getattr(script, draw), []
    with gpu() as waits:
        monkeypatch.setattr(script, draw, lambda *key: starts.append(len(waits)) or whole(*key))
        start(script.__name__, *words)
        assert waits[starts[first]:starts[last]] == 4 * ["to"]


@pytest.mark.parametrize("k", [3, None])
def test_mdlm_keeps_to_one_device_and_waits_only_for_what_it_returns(folder, k):
    with gpu() as waits:
        start("train", *TINY, f"--k={k}", "--out_dir=out", "--steps=4")
        model, ema = start("train", *TINY, f"--k={k}", "--out_dir=out", "--resume")
        assert model.sm.raw_s.is_cuda and ema.net.table.is_cuda
        for words in ("sample --sampler=remdm-loop --show", "trajectory --sampler=entropy",
                      "sample --sampler=random --soft=False --count=2", "trajectory"):
            start(*words.split(), "--steps=8", "--checkpoint=out/last.pt")
        for script in "eval", "feedback":
            start(script, "--data=data", "--rows=4", "--checkpoint=out/last.pt")
        x, generator = torch.full((39,), 258), data.rng(9)
        waits.clear()
        for sampler in "mdlm", "remdm-loop":
            generate(model, x, 8, sampler, generator=generator)
        decode(model, x[None], shares_of(8 * [1]), Pick("entropy", 1.0, 0.9, generator=generator))
        train.bound(model, torch.zeros(11, 39, dtype=torch.long), True, batch_size=3, repeats=2)
        assert waits == (2 + 8 + 1 + 1) * ["to"]  # in an order, for how many masks are left, too
