"""checkpoint.py: files of every format, written here as the original code writes them."""

import collections
import json
import os
import resource
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint import FORMAT, load, load_mdlm, read_safetensors, with_omega, write_safetensors
from conftest import random_mdlm, refused, save_mdlm
from sample import Config
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


def test_save_and_load_are_inverse(tmp_path):
    path, model = str(tmp_path / "run" / "last.pt"), trained()
    save_mdlm(path, model, step=3)
    for name in path, str(tmp_path / "run"):
        assert same(load_mdlm(name), model) and load(name)["step"] == 3
    refused("one set of weights", load_mdlm, path, ema=False)
    assert "torch" in load(path)["versions"] and os.listdir(tmp_path / "run") == ["last.pt"]
    model.net.output_layer.linear.weight.data *= float("nan")
    save_mdlm(path, model)
    refused("not finite", load_mdlm, path)


@pytest.mark.parametrize("k, soft", [(3, True), (None, True), (3, False)])
def test_shared_weights_are_read(tmp_path, k, soft):
    path, model = str(tmp_path / "w.safetensors"), trained(soft_mask=soft, k=k)
    tensors = {name: t if name.startswith("sm.") else t.bfloat16()
               for name, t in model.state_dict().items()}
    rest = dict(format=FORMAT, kind="mdlm", config=vars(model.cfg), step=6000, tokenizer=SPECIAL)
    write_safetensors(path, tensors, {FORMAT: json.dumps(rest)})
    loaded = load_mdlm(path)
    assert loaded.cfg == model.cfg and (loaded.sm is not None) == soft
    assert loaded.info["step"] == 6000 and loaded.info["tokenizer"] == SPECIAL
    assert all(torch.equal(t, tensors[name].float()) for name, t in loaded.state_dict().items())


def test_another_omega_leaves_the_rest_of_a_soft_mask_alone():
    for k in 2, None:
        sm = SoftMask(5, k, omega_s=0.3, omega_a=2.0, omega_b=-1.0, tau=1.7)
        assert with_omega(sm, 5, Config()) is sm
        assert with_omega(sm, 5, Config(omega_s=0.9)) is sm and (k or abs(sm.tau - 1.7) < 1e-5)
        torch.testing.assert_close(torch.stack(sm.omega), torch.tensor([0.9, 2.0, -1.0]))
    of_binary = with_omega(None, 5, Config(omega_s=0.5, omega_b=-2.0))
    torch.testing.assert_close(torch.stack(of_binary.omega), torch.tensor([0.5, 10 / 1.5, -2.0]))
    assert with_omega(None, 5, Config()) is None and of_binary.k == 3
    refused("without SM", with_omega, None, 5, Config(omega_a=2.0))


def test_safetensors_round_trip_with_every_dtype(tmp_path):
    path, dtypes = str(tmp_path / "w.safetensors"), checkpoint.DTYPES.values()
    tensors = {str(dtype): (torch.arange(6) % 2).to(dtype).view(2, 3) for dtype in dtypes}
    tensors |= {"odd": torch.ones(3, dtype=torch.uint8), "after odd": torch.ones(2),
                "scalar": torch.tensor(1.5), "empty": torch.ones(0, 4)}
    write_safetensors(path, tensors, {"a": "b"})
    for tensor in read_safetensors(path).values():
        tensor.zero_()  # the file stays as it is
    back, metadata = read_safetensors(path, with_metadata=True)
    assert metadata == {"a": "b"} and Path(path).read_bytes()[0] % 8 == 0
    assert list(back) == list(tensors)
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())


def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path, request):
    """torch.save raises another error, and leaves a file that ends anywhere."""
    path, limits = str(tmp_path / "last.pt"), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint.save(path, step=1)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    for size in 30_000, 65_536, 400_000:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            checkpoint.save(path, model={str(i): torch.zeros(50, 500) for i in range(5)})
        assert load(path)["step"] == 1 and os.listdir(tmp_path) == ["last.pt"]


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
    for f, *args in ((os.mkdir, owned), (eval, f"__import__('os').mkdir({owned!r})"),
                     (getattr, "", "upper"), (__import__, "antigravity"),
                     (torch.hub.load_state_dict_from_url, f"file://{tmp_path}/x")):
        hostile = type("Hostile", (), {"__reduce__": lambda self, call=(f, tuple(args)): call})()
        load_mdlm(training_file(path, trained(), hostile=hostile))
        assert not os.path.exists(owned) and "antigravity" not in sys.modules


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
    {"model": {"n_heads": 2}}, {"model": {"n_heads": "four"}}, {"model": {"n_blocks": 3}},
    {"algo": {"parameterization": "ar"}}, {"algo": {"causal_attention": True}},
    {"optim": {"sm_t_min": 0.2}}, {"optim": {"sm_t_max": 0.8}}, {"model_type": "bd3lm"},
    {"algo": {"tran_head": DENSE | {"fixed_lambda": 0.3}}},
    {"algo": {"tran_head": {"transparency_alg": "add"}}},
    {"tensors": {"initial_nll": torch.tensor(7.0)}}, {"tensors": {"tran_head.x": torch.ones(())}},
    {"tensors": {INV_FREQ: frequencies(11000)}}, {"tensors": {INV_FREQ: torch.ones(0)}},
    {"tensors": {"e.vocab_embed.embedding": torch.ones(9)}},
    {"tensors": {"backbone.blocks.0.norm1.bias": torch.zeros(32)}},
    {"tensors": {"backbone.blocks.1.norm2.weight": torch.ones(31)}},
])
def test_what_makes_another_model_of_the_same_tensors_is_refused(tmp_path, change):
    refused("ckpt has .* works here|not that of base 10000|is not a complete checkpoint",
            load, training_file(tmp_path / "x.ckpt", trained(), **change))


def test_what_a_file_of_mdlms_family_may_lack(tmp_path):
    """inv_freq, if n_heads is known; and global_step. Any EMA but the authors' list is refused."""
    model, path, hub = trained(), str(tmp_path / "x.ckpt"), tmp_path / "config.json"
    whole = torch.load(training_file(path, model), weights_only=False)
    del whole["global_step"]
    shadow = whole["ema"]["shadow_params"]
    for ema in shadow[1:], [*shadow, shadow[0]], shadow[0][0, 0], shadow[::-1]:
        torch.save(whole | {"ema": {"shadow_params": ema}}, path)
        refused("is not a complete checkpoint.*Error", load_mdlm, path)
    del whole["state_dict"][INV_FREQ]
    torch.save(whole | {"hyper_parameters": {"config": {"model": {"n_heads": 4}}}}, path)
    assert same(load_mdlm(path, ema=False), model) and load(path)["step"] == 0
    torch.save({"state_dict": whole["state_dict"]}, path)
    refused("x.ckpt: give n_heads", load, path)
    hub.write_text('{"n_heads": 8}')
    assert load(path)["config"]["n_head"] == 8


def test_a_soft_mask_of_ones_own_is_loaded_and_continued_as_what_it_is(tmp_path):
    path, model = str(tmp_path / "x.pt"), trained()
    one, two, copy = (type(name, (SoftMask,), {}) for name in ("One", "Two", "SoftMask"))
    for own, wrong in (one, SoftMask), (one, two), (SoftMask, one), (copy, SoftMask):
        model.sm.__class__ = own
        config = vars(model.cfg) | {"SoftMask": checkpoint.class_of(model.sm)}
        save_mdlm(path, model, config=config, data={"keys": 3, "path": "there"})
        assert type(load_mdlm(path, SoftMask=own).sm) is own
        refused(rf"load_mdlm\(path, SoftMask={own.__name__}\)", load_mdlm, path, SoftMask=wrong)
    save_mdlm(path, trained(), data={"keys": 3, "path": "there"})  # without the name
    last = lambda sm: checkpoint.load_last(path, "mdlm", model.cfg, sm,
                                           {"keys": 3, "path": "here"}, {"path"}, ": no")
    assert last(SoftMask(29))["step"] == 1
    refused(r"SoftMask \(None there, 'Two' here\): no", last, two(29))


def test_a_file_that_is_no_checkpoint_or_not_whole_is_refused(tmp_path):
    model, ours, shared = trained(), str(tmp_path / "ours.pt"), str(tmp_path / "ours.safetensors")
    save_mdlm(ours, model)
    write_safetensors(shared, model.state_dict())
    for path in ours, shared:
        whole = Path(path).read_bytes()
        for size in 0, 5, 100, len(whole) // 2, len(whole) - 1:
            Path(path).write_bytes(whole[:size])
            refused("is not a complete checkpoint", load, path)
    torch.save({"w": torch.ones(2)}, ours)
    refused("is not a model of MDLM's family", load, ours)
