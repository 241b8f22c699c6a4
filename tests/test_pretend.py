"""MDLM and Dream on a GPU that is not there (pretend.py). Dream's waits: test_sample_dream.py."""

import pytest
import torch

import data
import finetune_dream
import launch
import train
from conftest import gen, random_mdlm, start
from pretend import gpu
from sample import SAMPLERS, generate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(),
                                reason="a GPU is there: tests named cuda use it")
TINY = ("--n_layer=1 --n_head=2 --n_embd=16 --n_cond=8 --length=39 --batch_size=4 --micro_batch=2 "
        "--steps=4 --eval_rows=4 --eval_every=2 --p_sm=1 --omega_s=0.5 "
        "--data=data").split()


def test_what_a_gpu_refuses_is_refused():
    """Mixed devices, what numpy cannot see, and a generator elsewhere."""
    with gpu():
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        for mix in (lambda: here + there, lambda: here[there.long()],
                    lambda: here.add_(there.sum()), lambda: torch.cat([here, there]),
                    lambda: there.numpy(), lambda: there.uniform_(generator=gen()),
                    lambda: torch.rand(3, generator=torch.Generator("cuda"))):
            with pytest.raises(AssertionError):
                mix()


def test_what_a_gpu_takes_is_taken_and_what_it_is_waited_for_is_known():
    with gpu() as waits:
        here, there = torch.zeros(3), torch.zeros(3, device="cuda")
        taken = there[here.long()] + torch.tensor(1.0), there.new_zeros(2), torch.zeros_like(there)
        assert all(x.device.type == "cuda" for x in taken)
        moved = here.to(there), there.cpu(), torch.zeros_like(there, device="cpu")
        assert [x.device.type for x in moved] == ["cuda", "cpu", "cpu"]
        here.pin_memory().to("cuda", non_blocking=True)
        assert waits == ["index", "to", "to"]
        waits.clear()
        there[there > 0], there.tolist(), there.sum().item(), there.nonzero()
        there[there.long()] = 7
        assert waits == ["index", "to", "_local_scalar_dense", "nonzero", "index_put_"]


@pytest.mark.parametrize("rank, device", [("1", "auto"), ("1", "cuda"), ("0", "cuda:1")])
def test_every_script_works_on_the_current_device(rank, device, monkeypatch):
    """CUDA captures its graphs there, whatever device the tensors are on."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    with gpu():
        here = launch.machine(device, "float32")
        torch.cuda.set_device.assert_called_once_with("cuda:1")
    assert here.device == torch.device("cuda:1")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_generate_waits_only_for_what_it_returns(sampler):
    """It waits at the start, too, for the model and the ids to be there."""
    model = random_mdlm(vocab_size=1100, mask_id=1099, length=10, omega_s=0.7)  # nucleus: 1,024
    starts = []
    with gpu() as waits:
        generate(model.to("cuda"), 3, 20, sampler, generator=data.rng(9), top_p=0.9,
                 on_step=lambda *args: starts.append(len(waits)))
        assert len(starts) > 5 and waits[starts[0]:] == ["to"]


def test_an_update_waits_for_nothing(tmp_path, monkeypatch):
    """One copy is counted, of the factor that clips. A real GPU makes none: it is there already."""
    monkeypatch.chdir(tmp_path)
    data.prepare([" ".join(map(str, range(90)))] * 30, "data", data.tokenizer("bytes"), val_docs=9)
    times, starts = train.sample_times, []
    with gpu() as waits:
        monkeypatch.setattr(train, "sample_times",
                            lambda *key: starts.append(len(waits)) or times(*key))
        start("train", *TINY, "--out_dir=run", "--steps=6", "--eval_every=0", "--p_sm=0.15")
        assert waits[starts[1]:starts[-1]] == 4 * ["to"]


def test_an_update_of_dream_waits_for_nothing(tmp_path, monkeypatch):
    """Nor does a dialogue, of which an update has eight. The copy is that of the test above."""
    monkeypatch.chdir(tmp_path)
    respond, starts = finetune_dream.mask_response, []
    with gpu() as waits:
        monkeypatch.setattr(finetune_dream, "mask_response",
                            lambda *args: starts.append(len(waits)) or respond(*args))
        start("finetune_dream", "tiny", "--steps=6")
        assert waits[starts[8]:starts[40]] == 4 * ["to"]


def test_mdlm_keeps_to_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(str(i * j) for i in range(90)) for j in range(30)]
    data.prepare(texts, "data", data.tokenizer("bytes"), val_docs=9)
    with gpu():
        for k in "--k=3", "--k=none":
            model, ema = start("train", *TINY, k, "--out_dir=run", "--overwrite")
            start("train", *TINY, k, "--out_dir=run", "--resume", "--steps=6")
            assert model.sm.raw_s.is_cuda and ema.net.table.is_cuda
            for i, words in enumerate((
                    "--sampler=remdm-loop --count=2", "--sampler=remdm-cap --soft=False",
                    "--every --show", "--sampler=entropy --trace=trace.jsonl",
                    "--sampler=random --soft=False --count=2")):
                start("sample", "--checkpoint=run/last.pt", "--steps=8", f"--out={k}{i}.jsonl",
                      *words.split())
            for words in (["eval", "ppl"], ["feedback"]):
                start(*words, "--checkpoint=run/last.pt", "--data=data", "--rows=4")


def test_dream_keeps_to_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with gpu():
        for k in "--k=3", "--k=none":
            model = start("finetune_dream", "tiny", "--steps=2", k, "--overwrite")
            assert all(p.is_cuda for p in model.parameters())
            for words in ("--algorithm=maskgit_plus", "--block=8 --cache=dual --schedule=linear",
                          "--block=8 --threshold=0.5"):
                start("sample_dream", "--model=out/tiny_dream/model", "--gen_len=16",
                      "--adapter=out/tiny_dream/last", "--prompt=1", *words.split())
