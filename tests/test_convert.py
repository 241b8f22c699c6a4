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
SPECIAL = {"name": "bytes", "vocab_size": 30, "mask_id": 29, "bos": 27, "eos": 28}
THEIRS = {"raw_s": "raw_scale", "raw_a": "raw_steep", "raw_b": "raw_centre_neg",
          "raw_tau": "raw_temperature"}
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
    state = collections.OrderedDict(published(model) | (tensors or {}))
    for raw, theirs in THEIRS.items():
        state["tran_head." + theirs] = getattr(model.sm, raw, torch.tensor(0.5))
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
    return str(path)


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


def test_save_and_load_are_inverse(tmp_path):
    path, model, other = str(tmp_path / "last.pt"), trained(), trained(seed=3)
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


def test_three_omegas_replace_a_soft_mask():
    for sm, k in (SoftMask(5, 2, 0.3), 2), (SoftMask(5, None, tau=1.7), None), (None, 3):
        assert with_omega(sm, 5, Config()) is sm
        new = with_omega(sm, 5, Config(omega_s=0.9, omega_a=2.0, omega_b=-1.0))
        torch.testing.assert_close(torch.stack(new.omega), torch.tensor([0.9, 2.0, -1.0]))
        assert new.k == k and (k or new.tau.item() == pytest.approx(1))
        refused("give all three", with_omega, sm, 5, Config(omega_s=0.9))
    wrong = Config(omega_s=0.9, omega_a=2.0, omega_b=1.0)
    refused("omega_b = 1.0.* must hold", with_omega, None, 5, wrong)


def test_safetensors_round_trip_with_every_dtype(tmp_path):
    path, dtypes = str(tmp_path / "w.safetensors"), dream.DTYPES.values()
    tensors = {str(dtype): (torch.arange(6) % 2).to(dtype).view(2, 3) for dtype in dtypes}
    tensors |= {"odd": torch.ones(3, dtype=torch.uint8), "after odd": torch.ones(2),
                "scalar": torch.tensor(1.5), "empty": torch.ones(0, 4)}
    write_safetensors(path, tensors, {"a": "b"})
    back = read_safetensors(path)
    assert list(back) == list(tensors) and Path(path).read_bytes()[0] % 8 == 0
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path, request):
    """torch.save raises another error, and leaves a file that ends anywhere."""
    path, limits = str(tmp_path / "last.pt"), resource.getrlimit(resource.RLIMIT_FSIZE)
    launch.save(path, step=1)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    for size in 30_000, 65_536, 400_000:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            launch.save(path, model={str(i): torch.zeros(50, 500) for i in range(5)})
        assert torch.load(path)["step"] == 1 and os.listdir(tmp_path) == ["last.pt"]


def test_training_checkpoint_without_its_framework(tmp_path):
    model = trained()
    path = training_file(tmp_path / "x.ckpt", model)
    averaged, raw = load_mdlm(path), load_mdlm(path, ema=False)
    assert averaged.cfg == replace(model.cfg, k=2, omega_s=1e-6, dropout=0.0)
    assert same(raw, model) and same(averaged.sm, model.sm)  # ω has no average
    assert all(torch.equal(a, b + 1) for a, b in pairs(averaged.net, model.net))
    tokenizer = SPECIAL | {"name": "gpt2", "bos": 28}
    assert averaged.info["step"] == 9 and averaged.info["tokenizer"] == tokenizer
    dense = load_mdlm(training_file(path, model, algo={"tran_head": DENSE}))
    assert dense.cfg.k is None and dense.sm.raw_tau == 0.5
    # MDLM's code has it beside the sections, later code in one.
    for where in ({"time_conditioning": True}, {"algo": {"time_conditioning": True}}):
        assert load_mdlm(training_file(path, model, **where)).cfg.time_conditioning


def test_no_foreign_function_is_ever_called(tmp_path):
    owned, path = str(tmp_path / "owned"), tmp_path / "x.ckpt"
    for f, arg in (os.mkdir, owned), (eval, f"__import__('os').mkdir({owned!r})"):
        hostile = type("Hostile", (), {"__reduce__": lambda self, call=(f, (arg,)): call})()
        load_mdlm(training_file(path, trained(), hostile=hostile))
        assert not os.path.exists(owned)


def test_hub_layouts(tmp_path):
    model = trained(soft_mask=False, time_conditioning=True)
    write = lambda state, path: write_safetensors(path, state, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    for prefix, name, save_as in (("backbone.", "pytorch_model.bin", torch.save),
                                  ("", "model.safetensors", write)):
        path = tmp_path / name
        save_as(published(model, prefix), str(path))
        for loaded in load_mdlm(str(tmp_path)), load_mdlm(str(path)):
            assert loaded.cfg == replace(model.cfg, length=512, dropout=0.2, omega_s=1e-6)
            assert loaded.sm is None and same(loaded.net, model.net)
            assert loaded.info["tokenizer"]["name"] == "gpt2"
        path.unlink()


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
def test_what_makes_another_model_of_the_same_tensors_is_refused(tmp_path, change):
    refused("ckpt has .* works here|not that of base 10000|x.ckpt: .*Error",
            convert.read, training_file(tmp_path / "x.ckpt", trained(), **change))


def test_what_a_file_of_mdlms_family_may_lack(tmp_path):
    """inv_freq, if n_heads is known; and global_step. Any EMA but the authors' list is refused."""
    model, path, hub = trained(), str(tmp_path / "x.ckpt"), tmp_path / "config.json"
    whole = torch.load(training_file(path, model), weights_only=False)
    del whole["global_step"]
    shadow = whole["ema"]["shadow_params"]
    for ema in shadow[1:], shadow[::-1]:
        torch.save(whole | {"ema": {"shadow_params": ema}}, path)
        refused("x.ckpt: .*Error", convert.read, path)
    del whole["state_dict"][INV_FREQ]
    torch.save(whole | {"hyper_parameters": {"config": {"model": {"n_heads": 4}}}}, path)
    assert same(load_mdlm(path, ema=False), model) and convert.read(path)["step"] == 0
    torch.save({"state_dict": whole["state_dict"]}, path)
    refused("x.ckpt: give n_heads", convert.read, path)
    hub.write_text('{"n_heads": 8}')
    assert convert.read(path)["config"]["n_head"] == 8


def test_a_class_of_ones_own_is_loaded_as_what_it_is(tmp_path):
    path, model = str(tmp_path / "x.pt"), trained()
    one, copy = (type(name, (SoftMask,), {}) for name in ("One", "SoftMask"))
    for own, other in (one, None), (None, one), (copy, None):
        model.sm = (own or SoftMask)(29)
        save_mdlm(path, model)
        assert type(MDLM.load(path, sm=own).sm) is (own or SoftMask)
        wrong("was trained with class .*--code", MDLM.load, path, sm=other)
    net = type("Mine", (type(model.net),), {})(model.cfg)
    save_mdlm(path, MDLM(model.cfg, net))
    wrong("was trained with class Mine, not None", MDLM.load, path)


def test_a_file_that_is_no_checkpoint_or_not_whole_is_refused(tmp_path):
    model, ours, shared = trained(), str(tmp_path / "ours.pt"), str(tmp_path / "x.safetensors")
    save_mdlm(ours, model)
    write_safetensors(shared, published(model))
    for path in ours, shared:
        whole = Path(path).read_bytes()
        for size in 0, 100, len(whole) - 1:
            Path(path).write_bytes(whole[:size])
            refused(r": \w+:", convert.read, path)
            wrong("is not a whole checkpoint of this project", MDLM.load, path)
    torch.save({"w": torch.ones(2)}, ours)
    refused("is not a model of MDLM's family", convert.read, ours)
    foreign = training_file(tmp_path / "x.ckpt", model)
    refused(f"python lab/convert.py {foreign} OUT.pt", start, "sample", f"--checkpoint={foreign}")
    launch.save(ours, kind="dream-adapter")
    wrong("is of kind 'dream-adapter', but 'mdlm' is needed", MDLM.load, ours)
