# SPDX-License-Identifier: MIT
"""Files of others: read as what they are or refused, and written so that others can read them.

Every file here is made by the test, with the names and settings of the code that would write it.
"""

import json

import pytest
import torch
import torch.nn.functional as F

import checkpoint
from arms import Renorm, Slerp
from checkpoint import read_safetensors, rotary_frequencies, write_safetensors
from dream import DreamConfig
from launch import Refused
from mdlm import MDLM, ModelConfig

TINY = dict(n_layer=2, n_head=4, n_embd=32, n_cond=16, vocab_size=30, mask_id=29, length=8)
HUB = dict(n_blocks=2, n_heads=4, hidden_dim=32, cond_dim=16, vocab_size=30, model_length=8,
           dropout=0.1, time_conditioning=False, model_type="mdlm", architectures=["MDLM"])
TRAN_HEAD = {"sm.raw_s": "raw_scale", "sm.raw_a": "raw_steep", "sm.raw_b": "raw_centre_neg"}


def trained(**changes):
    """A model whose every weight counts: new ones predict uniformly."""
    torch.manual_seed(0)
    model = MDLM(ModelConfig(**TINY | {"omega_s": 0.3} | changes)).eval()
    for p in model.net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def published(model):
    """The tensors as MDLM's class names them."""
    state = {"backbone." + k: t for k, t in model.net.state_dict().items()}
    return state | {"backbone.rotary_emb.inv_freq": rotary_frequencies(8)}


def hub_folder(folder, model, **changes):
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", published(model), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(HUB | changes))
    return str(folder)


def training_file(path, model, head=None, tensors=None, **settings):
    """A training checkpoint of the authors' layout.   head: settings of the soft mask."""
    state = published(model) | (tensors or {})
    if model.sm is not None:
        state |= {"tran_head." + theirs: model.sm.state_dict()[ours.removeprefix("sm.")]
                  for ours, theirs in TRAN_HEAD.items()}
        state["tran_head.raw_temperature"] = torch.tensor(0.5)
    config = {"algo": {"time_conditioning": False, "parameterization": "subs",
                       "causal_attention": False, "tran_head": head or {}},
              "model": {"length": 8, "hidden_size": 32, "n_heads": 4, "dropout": 0.0},
              "data": {"tokenizer_name_or_path": "gpt2"}, "optim": {"sm_prob": 0.8}}
    for section, values in settings.items():
        config[section] = config.get(section, {}) | values if isinstance(values, dict) else values
    parts = {"state_dict": state, "global_step": 9, "hyper_parameters": {"config": config}}
    torch.save(parts, path)
    return str(path)


@torch.no_grad()
def logits_of(model, t=0.5):
    x = torch.tensor([[29, 1, 2, 29, 4, 5, 29, 7]])
    emb = F.embedding(x, model.net.table)
    return model.net.head(model.net.hidden(emb, torch.arange(8), torch.tensor([t])))


# ---- soft masks of forks


def test_a_soft_mask_that_is_not_implemented_is_refused_by_its_name(tmp_path):
    for head in ({"transparency_alg": "slerp_sm"}, {"transparency_alg": "softer"},
                 {"transparency_alg": "lerp_renorm", "fixed_lambda": 0.3},
                 {"transparency_alg": "mixinputs_with_temp", "fixed_lambda": 0.3},
                 {"transparency_alg": "mixinputs_with_topk", "fixed_lambda": 1.5}):
        path = training_file(tmp_path / "x.ckpt", trained(), head)
        name = head["transparency_alg"]
        with pytest.raises(Refused, match=f"transparency_alg = '{name}', fixed_lambda = .* is not"):
            MDLM.load(path)


def test_what_arms_implements_is_loaded_as_what_it_is(tmp_path):
    """Against the mixes of published forks, written out here, on the same λ, tokens and shares."""
    model = trained()
    def load(**head):
        return MDLM.load(training_file(tmp_path / "x.ckpt", model, head | {"mixinputs_k": 2}))

    table, mask = model.net.table.detach(), model.net.table[29].detach()
    logits = logits_of(model)
    for name, cls in (("lerp_renorm", Renorm), ("slerp_euclid_mean", Slerp)):
        loaded = load(transparency_alg=name, fixed_lambda=None)
        assert type(loaded.sm) is cls and loaded.sm.k == 2
        assert torch.equal(loaded.sm.raw_s, model.sm.raw_s)
        lam, ids, pi = loaded.sm(logits)
        mixed = loaded.sm.mix(table, lam, ids, pi)
        for n in range(len(logits)):
            goal = sum(p * table[i] for p, i in zip(pi[n], ids[n]))
            if name == "lerp_renorm":
                want = (1 - lam[n]) * mask + lam[n] * goal
                want = mask.norm() * want / want.norm()
            else:
                a, b = mask / mask.norm(), goal / goal.norm()
                angle = torch.acos(a @ b)
                want = torch.sin((1 - lam[n]) * angle) * a + torch.sin(lam[n] * angle) * b
                want = mask.norm() * want / torch.sin(angle)
            torch.testing.assert_close(mixed[n], want, atol=1e-6, rtol=1e-5)
    constant = load(transparency_alg="mixinputs_with_topk", fixed_lambda=0.25)
    torch.testing.assert_close(constant.sm(logits)[0], torch.full((8,), 0.25))
    assert (load().cfg.arm, load(transparency_alg="mixinputs_with_temp").cfg.k) == ("", None)


def test_settings_that_make_another_model_of_the_same_tensors_are_refused(tmp_path):
    """Autoregressive and score models, BERT's mask in the middle, feedback in a band of t only."""
    for name, settings in {"parameterization": {"algo": {"parameterization": "ar"}},
                           "causal_attention": {"algo": {"causal_attention": True}},
                           "tokenizer_name_or_path": {"data": {"tokenizer_name_or_path": "bert"}},
                           "sm_t_min": {"optim": {"sm_t_min": 0.2}},
                           "sm_t_max": {"optim": {"sm_t_max": 0.8}}}.items():
        path = training_file(tmp_path / "x.ckpt", trained(), **settings)
        with pytest.raises(Refused, match=f"has {name} = .*, only .* is implemented"):
            MDLM.load(path)
    annealed = {"initial_nll": torch.tensor(7.0), "current_nll_ema": torch.tensor(3.0)}
    path = training_file(tmp_path / "x.ckpt", trained(), tensors=annealed)
    with pytest.raises(Refused, match="tensors that nothing here reads, as initial_nll"):
        MDLM.load(path)


def test_time_conditioning_of_either_layout_is_read(tmp_path):
    """MDLM's own training code has it beside the sections, later code in `algo`."""
    model = trained(time_conditioning=True)
    early = training_file(tmp_path / "early.ckpt", model, algo={}, time_conditioning=True)
    config = torch.load(early, weights_only=True)
    del config["hyper_parameters"]["config"]["algo"]["time_conditioning"]
    torch.save(config, early)
    late = training_file(tmp_path / "late.ckpt", model, algo={"time_conditioning": True})
    for path in (early, late):
        assert torch.equal(logits_of(MDLM.load(path), 0.9), logits_of(model, 0.9))


# ---- folders of the hub


def test_config_json_of_a_hub_folder_is_read(tmp_path):
    model = trained(soft_mask=False, time_conditioning=True)
    said = dict(time_conditioning=True, model_length=512, dropout=0.2)
    folder = hub_folder(tmp_path / "hub", model, **said)
    for path in (folder, folder + "/model.safetensors"):
        loaded = MDLM.load(path)
        cfg = loaded.cfg
        assert (cfg.time_conditioning, cfg.length, cfg.dropout) == (True, 512, 0.2)
        assert torch.equal(logits_of(loaded, 0.9), logits_of(model, 0.9))
        assert loaded.info["tokenizer"]["name"] == "gpt2"


def test_config_json_that_contradicts_the_tensors_is_refused(tmp_path):
    model = trained(soft_mask=False)
    for field, value, name in (("hidden_dim", 64, "n_embd"), ("cond_dim", 128, "n_cond"),
                               ("n_blocks", 12, "n_layer"), ("vocab_size", 50258, "vocab_size"),
                               ("time_conditioning", "yes", "time_conditioning")):
        with pytest.raises(Refused, match=f"fit its configuration: {name} = {value!r}, they"):
            MDLM.load(hub_folder(tmp_path / "hub", model, **{field: value}))
    with pytest.raises(Refused, match="inv_freq of this checkpoint is not that .* with 2 heads"):
        MDLM.load(hub_folder(tmp_path / "hub", model, n_heads=2))
    with pytest.raises(Refused, match="has model_type = 'bd3lm', only 'mdlm'"):
        MDLM.load(hub_folder(tmp_path / "hub", model, model_type="bd3lm"))
    (tmp_path / "hub" / "config.json").write_text("{")
    with pytest.raises(Refused, match="config.json is not JSON"):
        MDLM.load(str(tmp_path / "hub"))


def test_rotary_frequencies_of_another_base_are_refused(tmp_path):
    model = trained()
    name = "backbone.rotary_emb.inv_freq"
    rounded = rotary_frequencies(8).bfloat16()
    MDLM.load(training_file(tmp_path / "x.ckpt", model, tensors={name: rounded}))
    other = 11000 ** (-torch.arange(0, 8, 2) / 8)
    folder = hub_folder(tmp_path / "hub", model)
    write_safetensors(folder + "/model.safetensors", published(model) | {name: other})
    for path in (folder, training_file(tmp_path / "x.ckpt", model, tensors={name: other})):
        with pytest.raises(Refused, match="is not that of base 10000"):
            MDLM.load(path)


def test_weights_without_an_average_are_said_to_be_one(tmp_path, capsys):
    folder = hub_folder(tmp_path / "hub", trained(soft_mask=False))
    checkpoint.main(checkpoint.Config(folder))
    assert "a continuation from an EMA is not the paper's" in capsys.readouterr().out


# ---- export


def test_an_exported_folder_has_the_layout_of_the_published_one_and_loads_as_the_average(
        tmp_path, capsys):
    model, average = trained(), trained()
    for p in average.net.parameters():
        p.data += 0.1
    special = {"name": "bytes", "vocab_size": 30, "mask_id": 29, "bos": 27, "eos": 28}
    ema = {"net." + k: t for k, t in average.net.state_dict().items()}
    path, folder = str(tmp_path / "last.pt"), str(tmp_path / "hub") + "/"
    checkpoint.save(path, kind="mdlm", config=vars(model.cfg), step=7, seed=1, ema=ema,
                    model=model.state_dict(), tokenizer=special)
    checkpoint.main(checkpoint.Config(path, folder))
    assert f"ω is not in {folder}, so the model there decodes with plain masks only" \
        in capsys.readouterr().out
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert HUB.items() <= config.items()
    tensors = read_safetensors(folder + "model.safetensors", metadata := {})
    want = published(average)
    assert tensors.keys() == want.keys() and metadata == {"format": "pt"}
    assert all(torch.equal(tensors[k], want[k]) for k in want)
    loaded = MDLM.load(folder)
    assert torch.equal(logits_of(loaded), logits_of(average))
    assert loaded.sm is None and loaded.info["tokenizer"] == special


def test_what_that_layout_would_misread_is_not_exported(tmp_path):
    model = trained(mask_id=3)
    path = str(tmp_path / "last.pt")
    parts = dict(kind="mdlm", config=vars(model.cfg), step=7, model=model.state_dict(),
                 tokenizer={"name": "bytes"})
    for change in ({}, {"kind": "dream-adapter"}):
        checkpoint.save(path, **parts | change)
        with pytest.raises(Refused, match="only be written of an MDLM whose .MASK. is the last"):
            checkpoint.main(checkpoint.Config(path, str(tmp_path / "hub") + "/"))


# ---- configurations and tensors


def test_a_configuration_is_refused_before_anything_is_built_from_it(tmp_path, monkeypatch):
    model, path = trained(), str(tmp_path / "x.pt")
    parts = dict(kind="mdlm", step=7, model=model.state_dict(), tokenizer={"name": "gpt2"})
    monkeypatch.setattr("mdlm.DiT", None)
    for name, value in {"n_layer": 10**7, "length": 10**9, "k": 31, "n_head": 0, "mask_id": 30,
                        "soft_mask": False, "n_embd": "32", "vocab_size": None}.items():
        checkpoint.save(path, config=vars(model.cfg) | {name: value}, **parts)
        with pytest.raises(Refused, match=f"fit its configuration: {name} = {value!r}, they"):
            MDLM.load(path)
    checkpoint.save(path, config=vars(model.cfg) | {"length": "a"}, **parts)
    with pytest.raises(Refused, match="length = 'a', they need 1 to 1048575"):
        MDLM.load(path)
    checkpoint.save(path, config=vars(model.cfg), **parts | {"tokenizer": None})
    with pytest.raises(Refused, match="not a whole checkpoint of format .*: tokenizer"):
        MDLM.load(path)
    large_k = training_file(tmp_path / "x.ckpt", model, {"mixinputs_k": 31})
    with pytest.raises(Refused, match="k = 31, they need 1 to 30"):
        MDLM.load(large_k)


# ---- Dream


def test_rope_parameters_of_transformers_5_are_read(tmp_path, tiny_dream):
    with open(f"{tiny_dream}/config.json") as f:
        raw = json.load(f)
    old, theta = DreamConfig.read(tiny_dream), raw.pop("rope_theta")
    raw.pop("rope_scaling", None)
    write = lambda **rope: (tmp_path / "config.json").write_text(json.dumps(raw | rope))
    write(rope_parameters={"rope_theta": theta, "rope_type": "default"})
    assert DreamConfig.read(str(tmp_path)) == old
    for other in ({"rope_theta": theta, "rope_type": "yarn", "factor": 2.0}, {"rope_theta": 3.0},
                  {"rope_theta": theta, "rope_type": "default", "partial_rotary_factor": 0.5}):
        write(rope_parameters=other)
        with pytest.raises(Refused, match="has rope_parameters = .*only rope_type 'default'"):
            DreamConfig.read(str(tmp_path))
    write(rope_parameters={"rope_theta": theta, "rope_type": "default"}, rope_theta=theta + 1)
    with pytest.raises(Refused, match="has rope_parameters"):
        DreamConfig.read(str(tmp_path))
