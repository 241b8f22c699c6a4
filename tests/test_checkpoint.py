# SPDX-License-Identifier: MIT
"""checkpoint.py: files of every format, read as what they are or refused, and hostile files.

Files of others are made here, with the names and settings of the code that would write them.
"""

import collections
import json
import os
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F

import checkpoint
from arms import Renorm, Slerp
from checkpoint import load, read_safetensors, rotary_frequencies, save, write_safetensors
from conftest import full_disk, refused
from dream import DreamConfig
from launch import read_json
from mdlm import MDLM, ModelConfig

TINY = dict(n_layer=2, n_head=4, n_embd=32, n_cond=16, vocab_size=30, mask_id=29, length=8,
            omega_s=0.3)
HUB = dict(n_blocks=2, n_heads=4, hidden_dim=32, cond_dim=16, vocab_size=30, model_length=8,
           dropout=0.1, time_conditioning=False, model_type="mdlm", architectures=["MDLM"])
SPECIAL = {"name": "bytes", "vocab_size": 30, "mask_id": 29, "bos": 27, "eos": 28}
THEIRS = {"raw_s": "raw_scale", "raw_a": "raw_steep", "raw_b": "raw_centre_neg"}


def trained(**changes):
    """A model whose every weight counts: new ones predict uniformly."""
    torch.manual_seed(0)
    model = MDLM(ModelConfig(**TINY | changes)).eval()
    for p in model.net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@torch.no_grad()
def logits_of(model):
    x = torch.tensor([[29, 1, 2, 29, 4, 5, 29, 7]])
    hidden = model.net.hidden(F.embedding(x, model.net.table), torch.arange(8), torch.tensor([0.9]))
    return model.net.head(hidden)


def our_file(path, model, **parts):
    save(str(path), **{"kind": "mdlm", "config": vars(model.cfg), "step": 7, "ema": None,
                       "model": model.state_dict(), "tokenizer": SPECIAL} | parts)
    return str(path)


def published(model, prefix="backbone."):
    """The tensors as MDLM's class names them."""
    state = {prefix + name: t for name, t in model.net.state_dict().items()}
    return state | {prefix + "rotary_emb.inv_freq": rotary_frequencies(8)}


def hub_folder(folder, model, **changes):
    write_safetensors(f"{folder}/model.safetensors", published(model), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(HUB | changes))
    return str(folder)


def omegaconf():
    """The modules of a framework that is gone when its file is read: ({name: module}, tree)."""
    modules = {name: types.ModuleType(name) for name in ("omegaconf.dictconfig", "omegaconf.nodes")}
    for module, name in zip(modules, ("DictConfig", "AnyNode")):
        setattr(modules[module], name, type(name, (), {"__module__": module}))

    def tree(value):
        if isinstance(value, dict):
            node = modules["omegaconf.dictconfig"].DictConfig()
            node._content = {k: tree(v) for k, v in value.items()}
        else:
            node = modules["omegaconf.nodes"].AnyNode()
            node._val = value
        return node

    return modules | {"omegaconf": types.ModuleType("omegaconf")}, tree


def training_file(path, model, head=None, tensors=None, hostile=None, **settings):
    """A training checkpoint of the authors' framework.   head: settings of the soft mask.

    tensors: more of them, or others.   hostile: any object.   settings: of sections, or beside.
    """
    state = collections.OrderedDict(published(model) | (tensors or {}))
    if model.sm is not None:
        for raw, theirs in THEIRS.items():
            state["tran_head." + theirs] = getattr(model.sm, raw).data
        state["tran_head.raw_temperature"] = torch.tensor(0.5)
    config = {"algo": {"parameterization": "subs", "causal_attention": False,
                       "tran_head": {"mixinputs_k": 2} | (head or {})},
              "model": {"length": 8, "hidden_size": 32, "n_heads": 4, "dropout": 0.0},
              "data": {"tokenizer_name_or_path": "gpt2"}, "optim": {"sm_prob": 0.8}}
    for name, value in settings.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    shadow = [p.data + 1 for p in model.net.parameters()]
    modules, tree = omegaconf()
    sys.modules.update(modules)
    try:
        torch.save({"state_dict": state, "ema": {"decay": 0.9999, "shadow_params": shadow},
                    "global_step": 9, "hyper_parameters": {"config": tree(config)},
                    "more": collections.defaultdict(list), "hostile": hostile}, path)
    finally:
        for name in modules:
            del sys.modules[name]
    return str(path)


# ---- ours


def test_save_and_load_are_inverse_and_a_full_disk_keeps_the_old_file(tmp_path):
    path = str(tmp_path / "deep" / "last.pt")
    save(path, kind="dream-adapter", config={}, step=3, model={"w": torch.arange(3)})
    with full_disk(), pytest.raises(RuntimeError):
        save(path, model=torch.zeros(10**6))
    ckpt = load(path)
    assert ckpt["step"] == 3 and torch.equal(ckpt["model"]["w"], torch.arange(3))
    assert "torch" in ckpt["versions"] and "last.pt" in os.listdir(tmp_path / "deep")
    version = ckpt["git"]
    assert version == {} or len(version["commit"]) == 40 and isinstance(version["dirty"], bool)


def test_safetensors_round_trip_with_every_dtype(tmp_path):
    path, dtypes = str(tmp_path / "w.safetensors"), checkpoint.DTYPES.values()
    tensors = {str(dtype): (torch.arange(6) % 2).to(dtype).view(2, 3) for dtype in dtypes}
    tensors |= {"odd": torch.ones(3, dtype=torch.uint8), "after odd": torch.ones(2),
                "scalar": torch.tensor(1.5), "empty": torch.ones(0, 4)}
    write_safetensors(path, tensors, {"a": "b"})
    back = read_safetensors(path, metadata := {})
    assert metadata == {"a": "b"} and list(back) == list(tensors)
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())


def test_safetensors_equal_the_library_s(tmp_path):
    reason = "needs safetensors: would check both directions against it"
    library = pytest.importorskip("safetensors.torch", reason=reason)
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    write_safetensors(str(tmp_path / "ours"), tensors)
    library.save_file(tensors, str(tmp_path / "theirs"))
    for back in (library.load_file(tmp_path / "ours"), read_safetensors(tmp_path / "theirs")):
        assert all(torch.equal(back[n], t) for n, t in tensors.items())


# ---- theirs


def test_training_checkpoint_without_its_framework(tmp_path):
    model = trained()
    path = training_file(tmp_path / "x.ckpt", model)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)  # this is why there is a reader
    averaged, raw = MDLM.load(path), MDLM.load(path, ema=False)
    cfg = averaged.cfg
    assert (cfg.k, cfg.arm, cfg.n_head, cfg.length, averaged.info["step"]) == (2, "", 4, 8, 9)
    assert same(raw, model) and same(averaged.sm, model.sm)  # ω has no average
    pairs = zip(averaged.net.parameters(), model.net.parameters())
    assert all(torch.equal(a, b + 1) for a, b in pairs)
    dense = MDLM.load(training_file(path, model, {"transparency_alg": "mixinputs_with_temp"}))
    assert dense.cfg.k is None and dense.sm.raw_tau == 0.5


class Hostile:
    """Unpickles into a call of any function with any argument."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def test_no_foreign_function_is_ever_called(tmp_path, monkeypatch):
    owned, path = str(tmp_path / "owned"), tmp_path / "x.ckpt"
    for function, *args in ((os.mkdir, owned), (eval, f"__import__('os').mkdir({owned!r})"),
                            (getattr, "", "upper"), (__import__, "antigravity"),
                            (torch.hub.load_state_dict_from_url, f"file://{tmp_path}/x")):
        MDLM.load(training_file(path, trained(), hostile=Hostile(function, *args)))
        assert not os.path.exists(owned) and "antigravity" not in sys.modules
    # The bomb works where it is let.
    find = checkpoint.InertUnpickler.find_class
    monkeypatch.setattr(checkpoint.InertUnpickler, "find_class", lambda self, module, name:
                        os.mkdir if name == "mkdir" else find(self, module, name))
    MDLM.load(training_file(path, trained(), hostile=Hostile(os.mkdir, owned)))
    assert os.path.exists(owned)


def test_hub_layouts(tmp_path):
    """A folder with one of two files, or a file alone, whatever the wrapper's prefix."""
    model = trained(soft_mask=False)
    writers = {"pytorch_model.bin": torch.save, "model.safetensors": lambda state, path:
               write_safetensors(path, state)}
    for prefix in ("backbone.", "", "module.backbone."):
        for name, write in writers.items():
            folder = tmp_path / (prefix + name.split(".")[0])
            folder.mkdir()
            write(published(model, prefix), str(folder / name))
            for path in (folder, folder / name):
                loaded = MDLM.load(str(path))
                assert loaded.sm is None and loaded.cfg.n_head == 4 and same(loaded.net, model.net)


def test_settings_of_every_layout_are_read(tmp_path, capsys):
    """MDLM's own training code has time_conditioning beside the sections, later code in `algo`."""
    model = trained(soft_mask=False, time_conditioning=True)
    said = dict(time_conditioning=True, model_length=512, dropout=0.2)
    folder = hub_folder(tmp_path, model, **said)
    for path in (folder, folder + "/model.safetensors"):
        loaded = MDLM.load(path)
        cfg = loaded.cfg
        assert (cfg.time_conditioning, cfg.length, cfg.dropout) == (True, 512, 0.2)
        assert torch.equal(logits_of(loaded), logits_of(model))
        assert loaded.info["tokenizer"]["name"] == "gpt2"
    checkpoint.main(checkpoint.Config(folder))
    assert "a continuation from an EMA is not the paper's" in capsys.readouterr().out
    for where in ({"time_conditioning": True}, {"algo": {"time_conditioning": True}}):
        loaded = MDLM.load(training_file(tmp_path / "x.ckpt", model, **where), ema=False)
        assert torch.equal(logits_of(loaded), logits_of(model))


def test_soft_masks_of_forks_are_loaded_as_what_they_are_or_refused_by_name(tmp_path):
    model, path = trained(), tmp_path / "x.ckpt"
    for name, cls in (("lerp_renorm", Renorm), ("slerp_euclid_mean", Slerp)):
        loaded = MDLM.load(training_file(path, model, {"transparency_alg": name}))
        assert type(loaded.sm) is cls and loaded.sm.k == 2 and same(loaded.sm, model.sm)
    fixed = {"transparency_alg": "mixinputs_with_topk", "fixed_lambda": 0.25}
    constant = MDLM.load(training_file(path, model, fixed))
    torch.testing.assert_close(constant.sm(logits_of(model))[0], torch.full((8,), 0.25))
    for name, value in (("slerp_sm", None), ("lerp_renorm", 0.3), ("mixinputs_with_temp", 0.3),
                        ("mixinputs_with_topk", 1.5)):
        head = {"transparency_alg": name, "fixed_lambda": value}
        refused(f"transparency_alg = '{name}', fixed_lambda = {value} is not",
                load, training_file(path, model, head))


def test_what_makes_another_model_of_the_same_tensors_is_refused(tmp_path):
    """Score models, BERT's mask in the middle, feedback in a band of t only, other rotations."""
    path, model = tmp_path / "x.ckpt", trained()
    for settings in ({"algo": {"parameterization": "ar"}}, {"algo": {"causal_attention": True}},
                     {"data": {"tokenizer_name_or_path": "bert"}}, {"optim": {"sm_t_min": 0.2}},
                     {"optim": {"sm_t_max": 0.8}}, {"model_type": "bd3lm"}):
        [(name, value)] = settings.items()
        name = next(iter(value)) if isinstance(value, dict) else name
        refused(f"has {name} = .*, only .* is implemented",
                load, training_file(path, model, **settings))
    annealed = {"initial_nll": torch.tensor(7.0), "current_nll_ema": torch.tensor(3.0)}
    refused("tensors that nothing here reads, as initial_nll",
            load, training_file(path, model, tensors=annealed))
    name = "backbone.rotary_emb.inv_freq"
    load(training_file(path, model, tensors={name: rotary_frequencies(8).bfloat16()}))
    other = {name: 11000 ** (-torch.arange(0, 8, 2) / 8)}
    refused("is not that of base 10000 with 4", load, training_file(path, model, tensors=other))
    refused("is not that .* with 2", load, hub_folder(tmp_path, model, n_heads=2))


# ---- the command


def test_command_describes_and_converts(tmp_path, capsys):
    model = trained()
    source = training_file(tmp_path / "x.ckpt", model)
    omega = "ω_s {:.4g}, ω_a {:.4g}, ω_b {:.4g}\n".format(*model.sm.omega)
    for out in ("a.pt", "b.safetensors"):
        checkpoint.main(checkpoint.Config(source, str(tmp_path / out)))
        said = capsys.readouterr().out
        assert all(part in said for part in ("step 9, with EMA", "'k': 2", "gpt2", omega))
        a, b = MDLM.load(source), MDLM.load(str(tmp_path / out))
        assert a.cfg == b.cfg and same(a, b)
    checkpoint.main(checkpoint.Config(source, str(tmp_path / "half.safetensors"), bf16=True))
    half = MDLM.load(str(tmp_path / "half.safetensors"))
    assert same(half.sm, a.sm) and same(half.net, a.net.bfloat16().float())
    refused("--bf16 is of a file", checkpoint.main, checkpoint.Config(source, "half.pt", bf16=True))


def test_an_exported_folder_is_the_published_layout_and_loads_as_the_average(tmp_path, capsys):
    model, average = trained(), trained()
    for p in average.net.parameters():
        p.data += 0.1
    ema = {"net." + k: t for k, t in average.net.state_dict().items()}
    path = our_file(tmp_path / "last.pt", model, ema=ema)
    assert same(MDLM.load(str(tmp_path)), MDLM.load(path))  # the folder of a run
    folder = f"{tmp_path}/hub/"
    checkpoint.main(checkpoint.Config(path, folder))
    assert f"ω is not in {folder}, so the model there decodes" in capsys.readouterr().out
    assert HUB.items() <= json.loads((tmp_path / "hub" / "config.json").read_text()).items()
    tensors, want = read_safetensors(folder + "model.safetensors"), published(average)
    assert tensors.keys() == want.keys() and all(torch.equal(tensors[k], want[k]) for k in want)
    loaded = MDLM.load(folder)
    assert torch.equal(logits_of(loaded), logits_of(average))
    checkpoint.main(checkpoint.Config(path, f"{tmp_path}/"))
    refused("is a run's folder with an export in it", load, str(tmp_path))
    assert loaded.sm is None and loaded.info["tokenizer"] == SPECIAL
    # That class would take the last token for [MASK].
    for change in ({"config": vars(trained(mask_id=3).cfg)}, {"kind": "dream-adapter"}):
        our_file(path, model, **change)
        refused("only be written of an MDLM whose .MASK. is the last",
                checkpoint.main, checkpoint.Config(path, folder))


# ---- bad files


def test_foreign_and_truncated_bytes_are_refused(tmp_path):
    model = trained()
    write_safetensors(str(tmp_path / "w.safetensors"), model.state_dict())
    our_file(tmp_path / "x.pt", model)
    training_file(tmp_path / "x.ckpt", model)
    for name in ("x.pt", "x.ckpt", "w.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for content in (b"", b"not a checkpoint", b"PK\x03\x04 half a zip", pickle.dumps({"a": 1}),
                        whole[:len(whole) // 2], whole[:-10]):
            (tmp_path / name).write_bytes(content)
            refused("truncated or not a|no MDLM in this checkpoint", load, str(tmp_path / name))
    refused("no checkpoint at", load, str(tmp_path / "nowhere.pt"))


def test_our_format_with_wrong_parts_is_refused(tmp_path):
    path = our_file(tmp_path / "x.pt", trained())
    ckpt, name = load(path), "net.output_layer.linear.weight"
    less = {k: t for k, t in ckpt["model"].items() if k != name}
    nan = ckpt["model"] | {name: ckpt["model"][name] * float("nan")}
    for change, message in (
            ({"format": "soft-masked-mdlm/99"}, "not a whole checkpoint of .*: .*/99"),
            ({"model": None}, "not a whole checkpoint of format .*mdlm/1: model"),
            ({"tokenizer": None}, "not a whole checkpoint of .*: tokenizer"),
            ({"ema": 5}, "not a whole checkpoint of .*: ema"),
            ({"kind": "dream-adapter"}, "holds a dream-adapter, not an MDLM"),
            ({"tokenizer": {}}, "tokenizer's mask_id = None, they need 0 to"),
            ({"model": less}, "fit its configuration: RuntimeError, Missing key.*linear.weight"),
            ({"model": nan}, "are not all numbers: its run diverged")):
        torch.save(ckpt | change, path)
        refused(message, MDLM.load, path)


def test_a_configuration_is_refused_before_anything_is_built_from_it(tmp_path, monkeypatch):
    model, path = trained(), str(tmp_path / "x.pt")
    monkeypatch.setattr("mdlm.DiT", None)
    for name, value in {"n_layer": 10**7, "length": 10**9, "k": 31, "mask_id": 30, "dropout": 7,
                        "soft_mask": False, "n_embd": "32", "vocab_size": None}.items():
        our_file(path, model, config=vars(model.cfg) | {name: value})
        refused(f"fit its configuration: {name} = {value!r}, they need ", MDLM.load, path)


def test_crippled_checkpoints_load_or_are_refused(tmp_path):
    model, path = trained(), str(tmp_path / "x.ckpt")
    whole = checkpoint.load_inert(training_file(path, model))
    ckpt = {name: whole[name] for name in ("state_dict", "ema", "global_step")}
    for change in (dict(ema=None), dict(hyper_parameters=None)):
        torch.save(ckpt | change, path)
        assert same(MDLM.load(path, ema="ema" in change), model)
    torch.save(ckpt | dict(ema=None), path)
    refused("holds one set of weights", MDLM.load, path, ema=False)
    few = {"backbone.vocab_embed.embedding": torch.ones(3, 4)}
    shadow = ckpt["ema"]["shadow_params"][1:]
    for change, message in ((dict(hyper_parameters=[1]), "not a checkpoint"),
                            (dict(state_dict=few, ema=None), "not a checkpoint"),
                            (dict(global_step="x"), "not a whole checkpoint of .*: step"),
                            (dict(ema={"shadow_params": shadow}), "29 tensors for 30 param")):
        torch.save(ckpt | change, path)
        refused(message, load, path)


# ---- Dream


def test_rope_parameters_of_transformers_5_are_read(tmp_path, tiny_dream):
    raw = read_json(f"{tiny_dream}/config.json")
    rope = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"}
    raw.pop("rope_scaling", None)
    write = lambda **rope: (tmp_path / "config.json").write_text(json.dumps(raw | rope))
    write(rope_parameters=rope)
    assert DreamConfig.read(str(tmp_path)) == DreamConfig.read(tiny_dream)
    for other in (rope | {"rope_type": "yarn", "factor": 2.0}, {"rope_theta": 3.0},
                  rope | {"partial_rotary_factor": 0.5}):
        write(rope_parameters=other)
        refused("has rope_parameters = .*only rope_type 'default'", DreamConfig.read, tmp_path)
