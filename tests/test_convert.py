"""Checkpoints: ours, and lab/convert.py of files written here as the original code writes them."""

import collections
import json
import os
import resource
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import convert
import dream
import launch
from conftest import random_mdlm, refused, save_mdlm, start
from dream import read_safetensors, write_safetensors
from mdlm import MDLM
from sample import Config, with_omega
from softmask import SoftMask

TINY = dict(n_layer=2, n_head=4, n_embd=32, n_cond=16, vocab_size=30, mask_id=29, length=8,
            omega_s=0.3)
HUB = dict(n_blocks=2, n_heads=4, hidden_dim=32, cond_dim=16, vocab_size=30, model_length=512,
           dropout=0.2, time_conditioning=True, model_type="mdlm", architectures=["MDLM"])
DENSE = {"transparency_alg": "mixinputs_with_temp"}
INV_FREQ = "backbone.rotary_emb.inv_freq"

trained = lambda **changes: random_mdlm(0.1, **TINY | changes).eval()
pairs = lambda a, b: zip(a.parameters(), b.parameters(), strict=True)
same = lambda a, b: all(torch.equal(x, y) for x, y in pairs(a, b))
frequencies = lambda base: base ** (-torch.arange(0, 8, 2) / 8)  # of heads of width 8


def node(value):
    """A value as omegaconf keeps it, in objects of a foreign class"""
    if isinstance(value, dict):
        return types.SimpleNamespace(_content={k: node(v) for k, v in value.items()})
    return types.SimpleNamespace(_val=value)


def published(model, prefix="backbone."):
    state = model.net.state_dict() | {"rotary_emb.inv_freq": frequencies(10000)}
    return {prefix + name: t for name, t in state.items()}


def training_file(path, model, /, tensors=None, **settings):
    """The authors' training checkpoint."""
    omega = {"tran_head.raw_scale": model.sm.raw_s, "tran_head.raw_steep": model.sm.raw_a,
             "tran_head.raw_centre_neg": model.sm.raw_b,
             "tran_head.raw_temperature": torch.tensor(0.5)}
    state = collections.OrderedDict(published(model) | omega | (tensors or {}))
    config = {"algo": {"parameterization": "subs", "causal_attention": False,
                       "tran_head": {"mixinputs_k": 2}},
              "model": {"length": 8, "hidden_size": 32, "n_heads": 4, "dropout": 0.0},
              "data": {"tokenizer_name_or_path": "gpt2"}, "optim": {"sm_prob": 0.8}}
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    shadow = [p.data + 1 for p in model.net.parameters()]
    torch.save({"state_dict": state, "ema": {"decay": 0.9999, "shadow_params": shadow},
                "global_step": 9, "hyper_parameters": {"config": node(config)},
                "more": [collections.defaultdict(list), collections.deque([1])]}, path)
    return path


def load_mdlm(path, **options):
    """What MDLM.load makes of what lab/convert.py makes of a file."""
    start("convert", path, "converted.pt")
    return MDLM.load("converted.pt", **options)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wrong(message, function, *args, **kwargs):
    with pytest.raises(ValueError, match=message):
        function(*args, **kwargs)


def test_save_and_load_are_inverse():
    path, model, other = "last.pt", trained(), trained(seed=3)
    save_mdlm(path, model, step=3, ema=other.net.state_dict(), optimizer={})
    averaged, raw = MDLM.load(path), MDLM.load(path, ema=False)
    assert same(raw, model) and same(averaged.net, other.net) and same(averaged.sm, model.sm)
    assert averaged.info["step"] == 3 and not averaged.training
    start("convert", path)
    save_mdlm(path, model)
    wrong("one set of weights", MDLM.load, path, ema=False)
    model.net.output_layer.linear.weight.data *= float("nan")
    save_mdlm(path, model)
    wrong("not finite", MDLM.load, path)


def test_three_omegas_replace_a_soft_mask_with_its_k():
    omega = dict(omega_s=0.9, omega_a=2.0, omega_b=-1.0)
    for sm, k in (SoftMask(5, 2, 0.3), 2), (SoftMask(5, None, tau=1.7), None), (None, 3):
        assert with_omega(sm, None, 5, Config(**omega)).k == k
        assert with_omega(sm, None, 5, Config()) is sm
    for wrong in {"omega_a": None}, {"omega_b": 1.0}:
        refused("give all three|give 0 <=", with_omega, None, None, 5, Config(**omega | wrong))


def test_safetensors_round_trip_with_every_dtype():
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dream.DTYPES.values()}
    tensors |= {"odd": torch.ones(3, dtype=torch.uint8), "after odd": torch.ones(2),
                "scalar": torch.tensor(1.5), "empty": torch.ones(0, 4)}
    write_safetensors("w.safetensors", tensors)
    back = read_safetensors("w.safetensors")
    torch.testing.assert_close(back, tensors, rtol=0, atol=0)
    assert list(back) == list(tensors) and Path("w.safetensors").read_bytes()[0] % 8 == 0
    assert b'{"__metadata__": {"format": "pt"}' in Path("w.safetensors").read_bytes()


def test_a_full_disk_is_named_and_the_old_file_stays(request):
    """torch.save raises another error, and leaves a file that ends anywhere."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    launch.save("last.pt", step=1)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    for size in 30_000, 400_000:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            launch.save("last.pt", model={str(i): torch.zeros(50, 500) for i in range(5)})
        assert torch.load("last.pt")["step"] == 1 and os.listdir() == ["last.pt"]


def test_training_checkpoint_without_its_framework():
    model = trained()
    path = training_file("x.ckpt", model)
    averaged, raw = load_mdlm(path), load_mdlm(path, ema=False)
    assert averaged.cfg == replace(model.cfg, k=2, omega_s=1e-6, dropout=0.0)
    assert same(raw, model) and same(averaged.sm, model.sm)  # ω has no average
    assert all(torch.equal(a, b + 1) for a, b in pairs(averaged.net, model.net))
    assert averaged.info["step"] == 9 and averaged.info["tokenizer"] == {
        "name": "gpt2", "vocab_size": 30, "mask_id": 29, "bos": 28, "eos": 28}
    dense = load_mdlm(training_file(path, model, algo={"tran_head": DENSE}))
    assert dense.cfg.k is None and dense.sm.raw_tau == 0.5
    # MDLM's code has it beside the sections, later code in one.
    for where in ({"time_conditioning": True}, {"algo": {"time_conditioning": True}}):
        assert load_mdlm(training_file(path, model, **where)).cfg.time_conditioning


def test_no_foreign_function_is_ever_called():
    for f, arg in (os.mkdir, "owned"), (eval, "__import__('os').mkdir('owned')"):
        hostile = type("Hostile", (), {"__reduce__": lambda self, call=(f, (arg,)): call})()
        load_mdlm(training_file("x.ckpt", trained(), hostile=hostile))
        launch.save("ours.pt", kind="mdlm", hostile=hostile)
        wrong("is not a whole checkpoint", MDLM.load, "ours.pt")
        assert not os.path.exists("owned")


def test_hub_layouts():
    model = trained(soft_mask=False, time_conditioning=True)
    Path("config.json").write_text(json.dumps(HUB))
    torch.save(published(model), "pytorch_model.bin")
    of_bin = load_mdlm("."), load_mdlm("pytorch_model.bin")
    write_safetensors("model.safetensors", published(model, prefix=""))
    os.remove("pytorch_model.bin")
    for loaded in *of_bin, load_mdlm("."), load_mdlm("model.safetensors"):
        assert loaded.cfg == replace(model.cfg, length=512, dropout=0.2, omega_s=1e-6)
        assert loaded.sm is None and same(loaded.net, model.net)
        assert loaded.info["tokenizer"]["name"] == "gpt2"


@pytest.mark.parametrize("change", [
    {"data": {"tokenizer_name_or_path": "bert"}},  # its mask is in the middle
    {"model": {"n_heads": 2}}, {"model": {"n_blocks": 3}},
    {"algo": {"parameterization": "ar"}}, {"algo": {"causal_attention": True}},
    {"optim": {"sm_t_min": 0.2}}, {"optim": {"sm_t_max": 0.8}}, {"model_type": "bd3lm"},
    {"algo": {"tran_head": DENSE | {"fixed_lambda": 0.3}}},
    {"algo": {"tran_head": {"transparency_alg": "add"}}},
    {"tensors": {"initial_nll": torch.tensor(7.0)}},
    {"tensors": {INV_FREQ: frequencies(11000)}},
    {"tensors": {"backbone.blocks.1.norm2.weight": torch.ones(31)}}])
def test_what_makes_another_model_of_the_same_tensors_is_refused(change):
    refused("ckpt has .* works here|not that of base 10000|x.ckpt: .*Error",
            convert.read, training_file("x.ckpt", trained(), **change))


def test_what_a_file_of_mdlms_family_may_lack():
    """inv_freq, if n_heads is known; and global_step. Any EMA but the authors' list is refused."""
    model = trained()
    whole = torch.load(training_file("x.ckpt", model), weights_only=False)
    shadow = whole["ema"]["shadow_params"]
    for ema in shadow[1:], shadow[::-1]:
        torch.save(whole | {"ema": {"shadow_params": ema}}, "x.ckpt")
        refused("x.ckpt: .*Error", convert.read, "x.ckpt")
    del whole["state_dict"][INV_FREQ]
    weights = {"state_dict": whole["state_dict"]}
    torch.save(weights | {"hyper_parameters": {"config": {"model": {"n_heads": 4}}}}, "x.ckpt")
    assert same(load_mdlm("x.ckpt"), model) and convert.read("x.ckpt")["step"] == 0
    torch.save(weights, "x.ckpt")
    refused("x.ckpt: give n_heads", convert.read, "x.ckpt")
    Path("config.json").write_text('{"n_heads": 8}')
    assert convert.read("x.ckpt")["config"]["n_head"] == 8


class Grown(SoftMask):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("more", torch.zeros(0))


def test_a_class_of_ones_own_is_loaded_as_what_it_is():
    model = trained()
    one, copy = (type(name, (SoftMask,), {}) for name in ("One", "SoftMask"))
    for own, other in (one, None), (None, one), (copy, None):
        model.sm = (own or SoftMask)(29)
        save_mdlm("x.pt", model)
        assert type(MDLM.load("x.pt", sm_class=own).sm) is (own or SoftMask)
        wrong("was trained with class .*--code", MDLM.load, "x.pt", sm_class=other)
    model.sm = Grown(29)
    save_mdlm("x.pt", model)
    assert type(MDLM.load("x.pt", sm_class=Grown).sm) is Grown
    wrong('Unexpected.*"sm.more"', MDLM.load, "x.pt", sm_class=type("Grown", (SoftMask,), {}))
    save_mdlm("x.pt", MDLM(model.cfg, type("Mine", (type(model.net),), {})(model.cfg)))
    wrong("was trained with class Mine, not None", MDLM.load, "x.pt")


def test_a_file_that_is_no_checkpoint_or_not_whole_is_refused():
    save_mdlm("ours.pt", trained())
    write_safetensors("x.safetensors", published(trained()))
    for path in "ours.pt", "x.safetensors":
        whole = Path(path).read_bytes()
        for size in 0, 100, len(whole) - 1:
            Path(path).write_bytes(whole[:size])
            refused(r": \w+:", convert.read, path)
            wrong("is not a whole checkpoint of this project", MDLM.load, path)
    torch.save({"w": torch.ones(2)}, "ours.pt")
    refused("is not a model of MDLM's family", convert.read, "ours.pt")
    foreign = training_file("x.ckpt", trained())
    refused("python lab/convert.py x.ckpt OUT.pt", start, "sample", f"--checkpoint={foreign}")
    launch.save("ours.pt", kind="dream-adapter")
    wrong("is of kind 'dream-adapter', but 'mdlm' is needed", MDLM.load, "ours.pt")
