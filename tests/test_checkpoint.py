"""checkpoint.py: flags, atomic files, and every format that a model may come in, hostile ones too."""

import collections
import os
import pickle
import sys
import types
from dataclasses import dataclass, replace

import pytest
import torch

import checkpoint
import launch
from checkpoint import load, read_safetensors, save, write_safetensors
from launch import Refused, atomic, from_cli
from mdlm import MDLM, ModelConfig

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=32, n_cond=16, vocab_size=30, mask_id=29, length=8, omega_s=0.3)


@dataclass
class Config:
    steps: int = 3    # how many
    rate: float = 0.1
    name: str = "a"
    fast: bool = False
    k: int | None = 3


@dataclass
class More(Config):
    perhaps: bool | None = None  # or not


# ---- the command line


def test_flags_become_typed_fields():
    assert from_cli(Config, []) == Config()
    assert from_cli(Config, ["--steps=7", "--rate=1e-3", "--name=x=y", "--fast", "--k=none"]) == Config(7, 1e-3, "x=y", True, None)
    assert from_cli(Config, ["--fast=false", "--k=5"]) == Config(k=5)
    assert from_cli(More, ["--perhaps", "--steps=2"]) == More(steps=2, perhaps=True)


def test_preset_first_then_overrides():
    presets = {"quick": dict(steps=1, rate=0.5)}
    assert from_cli(Config, ["quick", "--steps=2"], presets) == Config(2, 0.5)


@pytest.mark.parametrize("argv, message", [
    (["--stepz=1"], "unknown argument '--stepz=1'.*steps"), (["--steps=1.5"], "--steps=1.5 is not of type int"),
    (["--steps"], "--steps needs a value"), (["--fast=maybe"], "--fast=maybe is not true or false"), (["fast"], "unknown preset 'fast'"),
    (["--k=three"], "--k=three is not of type int"), (["--name=a", "stray"], "unknown argument 'stray'")])
def test_bad_flags_are_refused(argv, message):
    with pytest.raises(Refused, match=message):
        from_cli(Config, argv, {"quick": {}})


def test_help_is_the_commented_class(capsys):
    with pytest.raises(SystemExit) as stop:
        from_cli(More, ["--help"], {"quick": dict(steps=1)})
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "steps: int = 3    # how many" in out and "perhaps: bool | None = None  # or not" in out and "preset quick" in out


def test_run_says_bad_input_in_one_line_and_exits_2(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--steps=no"])
    with pytest.raises(SystemExit) as stop:
        launch.run(lambda cfg: None, Config)
    assert stop.value.code == 2 and capsys.readouterr().err == "x.py: --steps=no is not of type int\n"


# ---- files


def test_save_and_load_are_inverse_and_nothing_is_left_over(tmp_path):
    path = str(tmp_path / "deep" / "last.pt")
    save(path, kind="dream-adapter", config={}, step=3, model={"w": torch.arange(3)})
    ckpt = load(path)
    assert ckpt["step"] == 3 and torch.equal(ckpt["model"]["w"], torch.arange(3)) and "torch" in ckpt["versions"]
    assert os.listdir(tmp_path / "deep") == ["last.pt"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full: would check a real full disk")
def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    """The real error, from a device that is always full."""
    path = str(tmp_path / "last.pt")
    save(path, kind="dream-adapter", config={}, step=1, model={})
    write = torch.save
    monkeypatch.setattr(torch, "save", lambda parts, tmp: write(parts, os.symlink("/dev/full", tmp) or tmp))
    with pytest.raises(Refused, match="could not write .*last.pt.*free some space"):
        save(path, step=2, model={"w": torch.zeros(10**6)})
    assert load(path)["step"] == 1 and os.listdir(tmp_path) == ["last.pt"]


def test_crash_while_writing_keeps_the_old_file(tmp_path):
    path = str(tmp_path / "f")
    (tmp_path / "f").write_text("old")
    with pytest.raises(ZeroDivisionError):
        with atomic(path) as tmp:
            open(tmp, "w").write("half")
            1 / 0
    assert (tmp_path / "f").read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_git_version_names_a_commit():
    version = checkpoint.git_version()
    assert version == {} or len(version["commit"]) == 40 and isinstance(version["dirty"], bool)


def test_safetensors_round_trip_with_every_dtype(tmp_path):
    path = str(tmp_path / "w.safetensors")
    tensors = {str(d): (torch.arange(6) % 2).to(d).view(2, 3) for d in checkpoint.DTYPES.values()}
    tensors |= {"odd": torch.ones(3, dtype=torch.uint8), "after odd": torch.ones(2), "scalar": torch.tensor(1.5), "empty": torch.ones(0, 4)}
    write_safetensors(path, tensors, {"a": "b"})
    back = read_safetensors(path, metadata := {})
    assert metadata == {"a": "b"} and list(back) == list(tensors)
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in tensors.items())


def test_safetensors_equal_the_library_s(tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors: would check both directions against it")
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    write_safetensors(str(tmp_path / "ours"), tensors)
    library.save_file(tensors, str(tmp_path / "theirs.safetensors"))
    for read in (library.load_file(str(tmp_path / "ours")), read_safetensors(str(tmp_path / "theirs.safetensors"))):
        assert all(torch.equal(read[n], t) for n, t in tensors.items())


# ---- formats


def ours(tmp_path, **changes):
    torch.manual_seed(0)
    model = MDLM(replace(TINY, **changes))
    for p in model.net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = str(tmp_path / "ours.pt")
    save(path, kind="mdlm", config=vars(model.cfg), step=7, seed=1, model=model.state_dict(), ema=None, tokenizer={"name": "gpt2"})
    return model, path


def lightning(tmp_path, model, hostile=None, dense=False):
    """A training checkpoint as MDLM's framework writes it: classes that are not here any more when it is read."""
    fakes = {name: types.ModuleType(name) for name in ("omegaconf", "omegaconf.dictconfig", "omegaconf.nodes")}
    def node_class(module, name):
        cls = type(name, (), {"__module__": module})
        setattr(fakes[module], name, cls)
        return cls
    DictConfig, AnyNode = node_class("omegaconf.dictconfig", "DictConfig"), node_class("omegaconf.nodes", "AnyNode")
    def tree(value):
        node = (DictConfig if isinstance(value, dict) else AnyNode)()
        node.__dict__ = {"_content": {k: tree(v) for k, v in value.items()}} if isinstance(value, dict) else {"_val": value}
        return node
    inv_freq = 10000 ** (-torch.arange(0, 8, 2) / 8)
    state = collections.OrderedDict((f"backbone.{k}", v) for k, v in model.net.state_dict().items())
    state["backbone.rotary_emb.inv_freq"] = inv_freq
    state |= {f"tran_head.{theirs}": getattr(model.sm, raw).data for raw, theirs in
              (("raw_s", "raw_scale"), ("raw_a", "raw_steep"), ("raw_b", "raw_centre_neg"))}
    state["tran_head.raw_temperature"] = torch.tensor(0.5)
    config = {"algo": {"time_conditioning": False, "tran_head": {
                  "mixinputs_k": 2, "transparency_alg": "mixinputs_with_temp" if dense else "mixinputs_with_topk"}},
              "model": {"length": 8, "dropout": 0.0}}
    path = str(tmp_path / "model.ckpt")
    sys.modules.update(fakes)
    try:
        torch.save({"state_dict": state, "ema": {"decay": 0.9999, "shadow_params": [p.data + 1 for p in model.net.parameters()]},
                    "global_step": 9, "hyper_parameters": {"config": tree(config)}, "more": collections.defaultdict(list), "hostile": hostile}, path)
    finally:
        for name in fakes:
            del sys.modules[name]
    return path


def test_lightning_checkpoint_without_its_framework(tmp_path):
    model, _ = ours(tmp_path)
    path = lightning(tmp_path, model)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)  # this is why there is a reader
    averaged, raw = MDLM.load(path), MDLM.load(path, ema=False)
    assert (averaged.cfg.k, averaged.cfg.n_head, averaged.cfg.length, averaged.info["step"]) == (2, 4, 8, 9)
    assert all(torch.equal(a, b) for a, b in zip(raw.parameters(), model.parameters()))
    assert all(torch.equal(a, b + 1) for a, b in zip(averaged.net.parameters(), model.net.parameters()))
    assert torch.equal(averaged.sm.raw_b, model.sm.raw_b)  # ω has no average
    dense = MDLM.load(lightning(tmp_path, model, dense=True))
    assert dense.cfg.k is None and dense.sm.raw_tau == 0.5


class Hostile:
    """Unpickles into a call of any function with any argument."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("function, args", [(os.mkdir, ("{}/owned",)), (eval, ("__import__('os').mkdir('{}/owned')",)),
                                            (exec, ("import os; os.mkdir('{}/owned')",)), (getattr, ("", "upper")),
                                            (__import__, ("antigravity",)), (torch.hub.load_state_dict_from_url, ("file://{}/x",))])
def test_no_foreign_function_is_ever_called(tmp_path, function, args):
    model, _ = ours(tmp_path)
    bomb = Hostile(function, *(a.format(tmp_path) if isinstance(a, str) else a for a in args))
    path = lightning(tmp_path, model, hostile=bomb)
    if function is os.mkdir:  # the bomb works where it is let
        torch.load(path, weights_only=False, pickle_module=types.SimpleNamespace(
            __name__="pickle", Unpickler=type("U", (checkpoint.InertUnpickler,), {"find_class": lambda self, m, n:
                os.mkdir if n == "mkdir" else checkpoint.InertUnpickler.find_class(self, m, n)})))
        os.rmdir(tmp_path / "owned")
    MDLM.load(path)
    assert not (tmp_path / "owned").exists() and "antigravity" not in sys.modules


@pytest.mark.parametrize("prefix", ["backbone.", "", "module.backbone."])
def test_hub_layouts(tmp_path, prefix):
    """mdlm-owt on the hub: a folder with model.safetensors or pytorch_model.bin, binary, whatever the wrapper's prefix.

    The hub's own class keeps its DiT as `backbone`; the names below it are those of the Lightning file, rotary buffer included.
    """
    model, _ = ours(tmp_path, soft_mask=False, n_head=4)
    state = {prefix + k: v for k, v in model.net.state_dict().items()} | {prefix + "rotary_emb.inv_freq": checkpoint.rotary_frequencies(8)}
    for name, write in (("pytorch_model.bin", torch.save), ("model.safetensors", lambda s, p: write_safetensors(str(p), s))):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        write(state, folder / name)
        loaded = MDLM.load(str(folder))
        assert loaded.sm is None and loaded.cfg.n_head == 4 and loaded.cfg.vocab_size == 30
        assert all(torch.equal(a, b) for a, b in zip(loaded.net.parameters(), model.net.parameters()))


def test_command_describes_and_converts(tmp_path, capsys):
    model, _ = ours(tmp_path)
    source = lightning(tmp_path, model)
    for out in ("a.pt", "b.safetensors"):
        checkpoint.main(checkpoint.Config(source, str(tmp_path / out)))
        said = capsys.readouterr().out
        assert "step 9, with EMA" in said and "'k': 2" in said and "gpt2" in said and "'sm.raw_s'" in said
        a, b = MDLM.load(source), MDLM.load(str(tmp_path / out))
        assert a.cfg == b.cfg and all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


# ---- bad files


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip", pickle.dumps({"a": 1})])
@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.safetensors", "pytorch_model.bin"])
def test_foreign_bytes_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match="truncated or not a|no MDLM in this checkpoint"):
        load(str(tmp_path / name))


def test_truncated_files_are_refused(tmp_path):
    model, path = ours(tmp_path)
    write_safetensors(str(tmp_path / "w.safetensors"), model.state_dict())
    for file in (path, lightning(tmp_path, model), str(tmp_path / "w.safetensors")):
        data = open(file, "rb").read()
        for size in (len(data) // 2, len(data) - 10):
            open(file, "wb").write(data[:size])
            with pytest.raises(Refused, match="truncated or not a"):
                load(file)


def test_other_models_are_refused(tmp_path):
    torch.save({"layer.weight": torch.ones(2)}, tmp_path / "gpt.pt")
    with pytest.raises(Refused, match="no MDLM in this checkpoint: none of its 1 tensors"):
        load(str(tmp_path / "gpt.pt"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(Refused, match="truncated or not a checkpoint"):
        load(str(tmp_path / "list.pt"))
    torch.save({"format": "soft-masked-mdlm/99"}, tmp_path / "new.pt")
    with pytest.raises(Refused, match="not a whole checkpoint of format soft-masked-mdlm/1"):
        load(str(tmp_path / "new.pt"))
    with pytest.raises(Refused, match="no checkpoint at"):
        load(str(tmp_path / "nowhere.pt"))
    model, path = ours(tmp_path)
    ckpt = load(path)
    save(path, **{**ckpt, "kind": "dream-adapter"})
    with pytest.raises(Refused, match="holds a dream-adapter, not an MDLM"):
        MDLM.load(path)
    save(path, **{**ckpt, "config": {**ckpt["config"], "n_layer": 3}})
    with pytest.raises(Refused, match="do not fit its configuration: n_layer = 3, they need 2"):
        MDLM.load(path)


@pytest.mark.parametrize("change", [
    dict(ema=None), dict(hyper_parameters=None), dict(ema={"shadow_params": 3}), dict(state_dict=[1]), dict(hyper_parameters=[1]),
    dict(state_dict={"backbone.vocab_embed.embedding": torch.ones(3, 4)}), dict(global_step="x")])
def test_crippled_checkpoints_load_or_are_refused(tmp_path, change):
    model, _ = ours(tmp_path)
    ckpt = checkpoint.load_inert(lightning(tmp_path, model))
    torch.save({k: v for k, v in {**ckpt, **change}.items() if k in ("state_dict", "ema", "global_step") or k in change}, tmp_path / "x.ckpt")
    try:
        MDLM.load(str(tmp_path / "x.ckpt"))
    except Refused as e:
        assert "\n" not in str(e)


def test_our_format_without_its_parts_is_refused(tmp_path):
    model, path = ours(tmp_path)
    ckpt = load(path)
    for part in ("kind", "config", "model", "step"):
        torch.save({k: v for k, v in ckpt.items() if k != part}, tmp_path / "x.pt")
        with pytest.raises(Refused, match=f"not a whole checkpoint of format .*: {part}"):
            load(str(tmp_path / "x.pt"))
    for config in ({"n_layer": "two"}, {"n_head": 0}, [1]):
        save(path, **{**ckpt, "config": config})
        with pytest.raises(Refused, match="do not fit its configuration|not a checkpoint"):
            MDLM.load(path)


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    model, path = ours(tmp_path)
    ckpt = load(path)
    ckpt["model"]["net.output_layer.linear.weight"][0, 0] = float("nan")
    save(path, **ckpt)
    with pytest.raises(Refused, match="are not all numbers: its run diverged"):
        MDLM.load(path)


def test_ema_of_another_model_is_refused(tmp_path):
    model, _ = ours(tmp_path)
    ckpt = checkpoint.load_inert(lightning(tmp_path, model))
    ckpt["ema"]["shadow_params"].pop()
    torch.save({k: v for k, v in ckpt.items() if k in ("state_dict", "ema")}, tmp_path / "x.ckpt")
    with pytest.raises(Refused, match="the EMA has .* tensors for"):
        load(str(tmp_path / "x.ckpt"))
