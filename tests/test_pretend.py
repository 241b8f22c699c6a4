"""On a pretended GPU (pretend.py): devices are not mixed, and host syncs are counted."""

import pytest
import torch

import data
import finetune_dream
import launch
import train
from conftest import gen, random_mdlm, start
from pretend import gpu
from sample import ORDERS, Pick, decode, generate, shares_of
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


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("sampler", ["mdlm", "remdm-loop", *ORDERS])
def test_sampling_waits_only_for_what_it_returns(sampler, soft):
    """In order, every step also waits for the masks that are left."""
    model = random_mdlm(vocab_size=1100, mask_id=1099, length=10, omega_s=0.7)  # nucleus: 1,024
    model.sm = model.sm if soft else None
    x, generator = torch.full((10,), 1099), data.rng(9)
    with gpu() as waits:
        model.to("cuda")
        waits.clear()
        if sampler in ORDERS:
            pick = Pick(sampler, 1.0, 0.9, generator=generator)
            decode(model, x.expand(3, -1), shares_of(8 * [1]), pick)
        else:
            generate(model, x, 8, sampler, generator=generator)
    assert waits == (8 * (sampler in ORDERS) + 1) * ["to"]


def test_an_evaluation_waits_once_with_feedback_and_once_without(tiny_dream):
    """However many batches or dialogues it has"""
    model, rows = random_mdlm(length=9, omega_s=0.7), torch.randint(9, (11, 9), generator=gen())
    val = 3 * [(torch.arange(12).numpy(), 5)]
    with gpu() as waits:
        cfg, here = finetune_dream.Config(model=tiny_dream), launch.machine()
        dream, model = finetune_dream.model_of(cfg, here), model.to("cuda")
        waits.clear()
        train.evaluate(model, rows, here)
        finetune_dream.evaluate(dream, val, cfg, here)
        assert waits == 4 * ["to"]


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


def test_mdlm_keeps_to_one_device(folder):
    with gpu():
        for k in "--k=3", "--k=none":
            start("train", *TINY, k, f"--out_dir={k}", "--steps=4")
            model, ema = start("train", *TINY, k, f"--out_dir={k}", "--resume")
            assert model.sm.raw_s.is_cuda and ema.net.table.is_cuda
            for words in ("sample --sampler=remdm-loop --show", "trajectory --sampler=entropy",
                          "sample --sampler=random --soft=False --count=2", "trajectory"):
                start(*words.split(), "--steps=8", f"--checkpoint={k}/last.pt")
            for script in "eval", "feedback":
                start(script, "--data=data", "--rows=4", f"--checkpoint={k}/last.pt")
