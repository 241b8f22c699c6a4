"""checkpoint.py: every format that a model may come in, hostile files too."""

import collections
import os
import pickle
import sys
import types
from dataclasses import replace

import pytest
import torch

import checkpoint
from conftest import full_disk
from checkpoint import load, read_safetensors, save, write_safetensors
from launch import Refused
from mdlm import MDLM, ModelConfig

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=32, n_cond=16, vocab_size=30, mask_id=29, length=8,
                   omega_s=0.3)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def ours(tmp_path, **changes):
    """A model, and the path of its checkpoint in our format."""
    torch.manual_seed(0)
    model = MDLM(replace(TINY, **changes))
    for p in model.net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = str(tmp_path / "ours.pt")
    save(path, kind="mdlm", config=vars(model.cfg), step=7, seed=1, model=model.state_dict(),
         ema=None, tokenizer={"name": "gpt2"})
    return model, path


def omegaconf():
    """The modules of a framework that is gone when its file is read: ({name: module}, tree)."""
    modules = {name: types.ModuleType(name) for name in
               ("omegaconf", "omegaconf.dictconfig", "omegaconf.nodes")}

    def node_class(module, name):
        cls = type(name, (), {"__module__": module})
        setattr(modules[module], name, cls)
        return cls

    DictConfig = node_class("omegaconf.dictconfig", "DictConfig")
    AnyNode = node_class("omegaconf.nodes", "AnyNode")

    def tree(value):
        if not isinstance(value, dict):
            node = AnyNode()
            node.__dict__ = {"_val": value}
            return node
        node = DictConfig()
        node.__dict__ = {"_content": {k: tree(v) for k, v in value.items()}}
        return node

    return modules, tree


def lightning(tmp_path, model, hostile=None, dense=False):
    """The path of a training checkpoint as MDLM's framework writes it."""
    state = collections.OrderedDict((f"backbone.{k}", v) for k, v in model.net.state_dict().items())
    state["backbone.rotary_emb.inv_freq"] = 10000 ** (-torch.arange(0, 8, 2) / 8)
    for raw, theirs in (("raw_s", "scale"), ("raw_a", "steep"), ("raw_b", "centre_neg")):
        state[f"tran_head.raw_{theirs}"] = getattr(model.sm, raw).data
    state["tran_head.raw_temperature"] = torch.tensor(0.5)
    head = {"mixinputs_k": 2, "transparency_alg": "mixinputs_with_" + ("temp" if dense else "topk")}
    config = {"algo": {"time_conditioning": False, "tran_head": head},
              "model": {"length": 8, "dropout": 0.0}}
    shadow = [p.data + 1 for p in model.net.parameters()]
    path, (modules, tree) = str(tmp_path / "model.ckpt"), omegaconf()
    sys.modules.update(modules)
    try:
        torch.save({"state_dict": state, "ema": {"decay": 0.9999, "shadow_params": shadow},
                    "global_step": 9, "hyper_parameters": {"config": tree(config)},
                    "more": collections.defaultdict(list), "hostile": hostile}, path)
    finally:
        for name in modules:
            del sys.modules[name]
    return path


# ---- ours


def test_save_and_load_are_inverse_and_nothing_is_left_over(tmp_path):
    path = str(tmp_path / "deep" / "last.pt")
    save(path, kind="dream-adapter", config={}, step=3, model={"w": torch.arange(3)})
    ckpt = load(path)
    assert ckpt["step"] == 3 and torch.equal(ckpt["model"]["w"], torch.arange(3))
    assert "torch" in ckpt["versions"] and os.listdir(tmp_path / "deep") == ["last.pt"]
    version = ckpt["git"]
    assert version == {} or len(version["commit"]) == 40 and isinstance(version["dirty"], bool)


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    """torch.save raises an error of its own kind."""
    path = str(tmp_path / "last.pt")
    save(path, kind="dream-adapter", config={}, step=1, model={})
    with full_disk(), pytest.raises(Refused, match="could not write .*last.pt.*free some space"):
        save(path, step=2, model={"w": torch.zeros(10**6)})
    assert load(path)["step"] == 1 and os.listdir(tmp_path) == ["last.pt"]


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


def test_lightning_checkpoint_without_its_framework(tmp_path):
    model, _ = ours(tmp_path)
    path = lightning(tmp_path, model)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)  # this is why there is a reader
    averaged, raw = MDLM.load(path), MDLM.load(path, ema=False)
    cfg = averaged.cfg
    assert (cfg.k, cfg.n_head, cfg.length, averaged.info["step"]) == (2, 4, 8, 9)
    assert same(raw, model) and same(averaged.sm, model.sm)  # ω has no average
    pairs = zip(averaged.net.parameters(), model.net.parameters())
    assert all(torch.equal(a, b + 1) for a, b in pairs)
    dense = MDLM.load(lightning(tmp_path, model, dense=True))
    assert dense.cfg.k is None and dense.sm.raw_tau == 0.5


class Hostile:
    """Unpickles into a call of any function with any argument."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def test_no_foreign_function_is_ever_called(tmp_path, monkeypatch):
    model, _ = ours(tmp_path)
    owned = str(tmp_path / "owned")
    for function, *args in ((os.mkdir, owned), (eval, f"__import__('os').mkdir({owned!r})"),
                            (exec, f"import os; os.mkdir({owned!r})"), (getattr, "", "upper"),
                            (__import__, "antigravity"),
                            (torch.hub.load_state_dict_from_url, f"file://{tmp_path}/x")):
        path = lightning(tmp_path, model, hostile=Hostile(function, *args))
        MDLM.load(path)
        assert not os.path.exists(owned) and "antigravity" not in sys.modules
    # The bomb works where it is let.
    path = lightning(tmp_path, model, hostile=Hostile(os.mkdir, owned))
    find = checkpoint.InertUnpickler.find_class
    monkeypatch.setattr(checkpoint.InertUnpickler, "find_class", lambda self, module, name:
                        os.mkdir if name == "mkdir" else find(self, module, name))
    MDLM.load(path)
    assert os.path.exists(owned)


def test_hub_layouts(tmp_path):
    """mdlm-owt on the hub: a folder with one of two files, binary, whatever the wrapper's prefix.

    The hub's own class keeps its DiT as `backbone`. The names below it are those of the Lightning
    file, rotary buffer included.
    """
    model, _ = ours(tmp_path, soft_mask=False, n_head=4)
    writers = {"pytorch_model.bin": torch.save, "model.safetensors": lambda state, path:
               write_safetensors(path, state)}
    for prefix in ("backbone.", "", "module.backbone."):
        state = {prefix + k: v for k, v in model.net.state_dict().items()}
        state[prefix + "rotary_emb.inv_freq"] = checkpoint.rotary_frequencies(8)
        for name, write in writers.items():
            folder = tmp_path / (prefix + name.split(".")[0])
            folder.mkdir()
            write(state, str(folder / name))
            loaded = MDLM.load(str(folder))
            assert loaded.sm is None and loaded.cfg.n_head == 4 and loaded.cfg.vocab_size == 30
            assert same(loaded.net, model.net)


def test_command_describes_and_converts(tmp_path, capsys):
    model, _ = ours(tmp_path)
    source = lightning(tmp_path, model)
    for out in ("a.pt", "b.safetensors"):
        checkpoint.main(checkpoint.Config(source, str(tmp_path / out)))
        said = capsys.readouterr().out
        assert all(part in said for part in ("step 9, with EMA", "'k': 2", "gpt2", "'sm.raw_s'"))
        a, b = MDLM.load(source), MDLM.load(str(tmp_path / out))
        assert a.cfg == b.cfg and same(a, b)


# ---- bad files


def test_foreign_and_truncated_bytes_are_refused(tmp_path):
    model, path = ours(tmp_path)
    write_safetensors(str(tmp_path / "w.safetensors"), model.state_dict())
    files = {name: [b"", b"not a checkpoint", b"PK\x03\x04 half a zip", pickle.dumps({"a": 1})]
             for name in ("x.pt", "x.ckpt", "x.safetensors", "pytorch_model.bin")}
    for whole in (path, lightning(tmp_path, model), str(tmp_path / "w.safetensors")):
        with open(whole, "rb") as f:
            content = f.read()
        files[os.path.basename(whole)] = [content[:len(content) // 2], content[:-10]]
    for name, contents in files.items():
        for content in contents:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(Refused, match="truncated or not a|no MDLM in this checkpoint"):
                load(str(tmp_path / name))


def test_other_things_are_refused(tmp_path):
    path = str(tmp_path / "x.pt")
    for content, message in (
            ({"layer.weight": torch.ones(2)}, "no MDLM in this checkpoint: none of its 1 tensors"),
            ([1, 2], "truncated or not a checkpoint"),
            ({"format": "soft-masked-mdlm/99"}, "not a whole checkpoint of format .*mdlm/1")):
        torch.save(content, path)
        with pytest.raises(Refused, match=message):
            load(path)
    with pytest.raises(Refused, match="no checkpoint at"):
        load(str(tmp_path / "nowhere.pt"))


def test_our_format_with_wrong_parts_is_refused(tmp_path):
    _, path = ours(tmp_path)
    ckpt = load(path)
    for part in ("kind", "config", "model", "step"):
        torch.save({k: v for k, v in ckpt.items() if k != part}, path)
        with pytest.raises(Refused, match=f"not a whole checkpoint of format .*: {part}"):
            load(path)
    name = "net.output_layer.linear.weight"
    less = {k: t for k, t in ckpt["model"].items() if k != name}
    nan = {**ckpt["model"], name: ckpt["model"][name] * float("nan")}
    fit = "do not fit its configuration"
    for change, message in (({"kind": "dream-adapter"}, "holds a dream-adapter, not an MDLM"),
                            ({"config": {**ckpt["config"], "n_layer": 3}}, f"{fit}: n_layer = 3"),
                            ({"model": less}, f"{fit}: RuntimeError, Missing key.*linear.weight"),
                            ({"config": {"n_layer": "two"}}, fit), ({"config": {"n_head": 0}}, fit),
                            ({"config": [1]}, "not a checkpoint"),
                            ({"model": nan}, "are not all numbers: its run diverged")):
        save(path, **{**ckpt, **change})
        with pytest.raises(Refused, match=message):
            MDLM.load(path)


def test_crippled_checkpoints_load_or_are_refused(tmp_path):
    model, _ = ours(tmp_path)
    ckpt, path = checkpoint.load_inert(lightning(tmp_path, model)), str(tmp_path / "x.ckpt")
    ckpt = {name: ckpt[name] for name in ("state_dict", "ema", "global_step")}
    loads = (dict(ema=None), dict(hyper_parameters=None), dict(global_step="x"))
    few = {"backbone.vocab_embed.embedding": torch.ones(3, 4)}
    refused = (dict(ema={"shadow_params": 3}), dict(state_dict=[1]), dict(hyper_parameters=[1]),
               dict(state_dict=few), dict(ema={"shadow_params": ckpt["ema"]["shadow_params"][1:]}))
    for change in loads:
        torch.save({**ckpt, **change}, path)
        assert same(MDLM.load(path, ema=False), model)
    for change in refused:
        torch.save({**ckpt, **change}, path)
        with pytest.raises(Refused) as error:
            MDLM.load(path)
        assert "\n" not in str(error.value)
    assert "the EMA has 29 tensors for 30 parameters" in str(error.value)
