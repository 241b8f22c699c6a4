# SPDX-License-Identifier: MIT
"""Convert a checkpoint of MDLM's code or of the authors' into one of this project.

    python lab/convert.py mdlm.ckpt mdlm.pt       # MDLM's training checkpoint, or the authors' (SM)
    python lab/convert.py mdlm-owt mdlm-owt.pt    # a folder of the model hub
    python lab/convert.py DIR/transparency_config.json DIR/softmask.pt    # ω of the authors' Dream
    python lab/convert.py mdlm.pt                 # what is in a file, ours too

Settings come from the file, or from a config.json beside it. No code in a file can run, and the
packages that wrote it are not needed.
"""

import os
import pickle
import sys
from dataclasses import dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import launch
from dream import check_settings, read_safetensors
from launch import Refused, read_json, readable
from mdlm import MDLM, ModelConfig
from softmask import SoftMask

OMEGA = {"tran_head.raw_scale": "sm.raw_s", "tran_head.raw_steep": "sm.raw_a",
         "tran_head.raw_centre_neg": "sm.raw_b", "tran_head.raw_temperature": "sm.raw_tau"}


def read(path):
    """The dict of launch.save, from a file of ours or of others, or from a folder."""
    for name in "model.safetensors", "pytorch_model.bin":
        if os.path.exists(os.path.join(path, name)):
            path = os.path.join(path, name)
    with readable(path):
        if path.endswith("transparency_config.json"):
            return from_authors_adapter(read_json(path), path)
        if path.endswith(".safetensors"):
            return from_mdlm_family(read_safetensors(path), path)
        try:
            ckpt = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # a training framework's, which need not be installed
            ckpt = torch.load(path, "cpu", InertPickle, weights_only=False)
        return ckpt if {"kind", "model"} <= ckpt.keys() else from_mdlm_family(ckpt, path)


def from_mdlm_family(file, path):
    """Our dict from weights of MDLM or of the authors' SM. Only prefixes and ω's names change.

    file: a training checkpoint, or {name: tensor} with any prefix, as on the hub.
    Its settings are its own, or those of a config.json beside it (default: as released).
    """
    state = file.get("state_dict", file)
    beside = os.path.join(os.path.dirname(path), "config.json")
    tables = [name for name in state if name.endswith("vocab_embed.embedding")]
    if not tables:
        raise Refused(f"{path} is not a model of MDLM's family: it has no vocab_embed.embedding")
    prefix = min(tables, key=len).removesuffix("vocab_embed.embedding")
    settings = plain_values(file.get("hyper_parameters") or {}).get("config")
    settings = settings or (read_json(beside) if os.path.exists(beside) else {})
    for section in "algo", "model", "data", "optim", "tran_head":  # a hub model's are not nested
        settings |= settings.get(section) or {}
    check_settings(settings, path, {
        "model_type": "mdlm", "parameterization": "subs", "causal_attention": False,
        "tokenizer_name_or_path": "gpt2", "fixed_lambda": None, "sm_t_min": 0, "sm_t_max": 1})
    # Cloned: torch.save cannot write views of one memory in several dtypes.
    model = {OMEGA.get(name, name.replace(prefix, "net.", 1)): t.clone()
             for name, t in state.items()}
    V, D = model["net.vocab_embed.embedding"].shape
    n_head = int(settings.get("n_heads") or 0)
    inv_freq = model.pop("net.rotary_emb.inv_freq", None)                      # (head width / 2,)
    if inv_freq is not None:
        d = 2 * len(inv_freq)
        n_head = n_head or D // d
        expected = 10000 ** (-torch.arange(0, d, 2) / d)
        if n_head * d != D or not torch.allclose(inv_freq.float(), expected, rtol=0.01):  # bf16
            raise Refused(f"{path}: inv_freq is not that of base 10000 with n_heads = {n_head}")
    if not n_head:
        raise Refused(f"{path}: give n_heads, its number of heads, in a config.json beside it")
    alg = settings.get("transparency_alg", "mixinputs_with_topk")
    k = {"mixinputs_with_topk": settings.get("mixinputs_k", 3), "mixinputs_with_temp": None}[alg]
    if k:  # top-k has a temperature, too, but ignores it [code]
        model.pop("sm.raw_tau", None)
    blocks = {name.split(".")[2] for name in model if name.startswith("net.blocks.")}
    cfg = ModelConfig(
        n_layer=int(settings.get("n_blocks") or len(blocks)), n_head=n_head, n_embd=D, vocab_size=V,
        n_cond=len(model["net.sigma_map.mlp.2.weight"]), mask_id=V - 1, k=k,
        length=settings.get("length", settings.get("model_length", 1024)),
        dropout=settings.get("dropout", 0.1), soft_mask="sm.raw_s" in model,
        time_conditioning=settings.get("time_conditioning", False))
    with torch.device("meta"):
        empty = MDLM(cfg)
    empty.load_state_dict(model, assign=True)  # raises if a tensor is missing, or nothing reads it
    ema = file.get("ema")
    if ema:  # a bare list in the order of the parameters [code]
        names = [name for name, _ in empty.net.named_parameters()]
        ema = dict(zip(names, ema["shadow_params"], strict=True))
        empty.net.load_state_dict(ema, assign=True)
    return {"kind": "mdlm", "config": vars(cfg), "model": model, "ema": ema,
            "step": int(file.get("global_step", 0)), "tokenizer": {
                "name": "gpt2", "vocab_size": V, "mask_id": V - 1, "bos": V - 2, "eos": V - 2}}


def from_authors_adapter(raw, path):
    """Our dict of a soft mask from the fields of an adapter's transparency_config.json."""
    check_settings(raw, path, {"transparency_scheduling": "none"})  # else: --schedule
    none = {"kind": "soft mask", "SoftMask": None, "k": None, "model": None}
    alg = raw["transparency_alg"]
    if alg == "none":
        return none
    if alg not in ("mixinputs_with_topk", "mixinputs_with_temp"):  # another mix, or a user's class
        raise Refused(f"{path} has transparency_alg = {alg!r}, and nothing here reads it")
    k = int(raw["mixinputs_k"] or 0) if alg == "mixinputs_with_topk" else None
    # The authors save ω_s in bf16: above 0.998 it becomes 1, which SoftMask rejects.
    sm = SoftMask(0, k, min(raw["transparency_scale"], 1 - 1e-6), raw["transparency_steepness"],
                  raw["transparency_centre"], raw["mixture_temp"])
    return none | {"k": sm.k, "model": sm.state_dict()}


class InertPickle:
    """In place of the module pickle. Whatever a file names becomes Inert, except for tensors."""
    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if f"{module}.{name}" in ("collections.OrderedDict", "torch._utils._rebuild_tensor_v2",
                                      "torch._utils._rebuild_parameter"):
                return super().find_class(module, name)
            return Inert  # torch.load reads the tensors' data itself, without find_class

    def load(f, **options):
        return InertPickle.Unpickler(f, **options).load()


class Inert(dict):
    """Stands in for any foreign class: accepts all arguments, and keeps only the pickled state."""
    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.update(state if isinstance(state, dict) else {})

    def append(self, item):  # for a deque and its like
        pass


def plain_values(node):
    """The plain values in an inert omegaconf tree, which keeps them in _content and _val."""
    if isinstance(node, dict):
        node = node.get("_content", node.get("_val", node))
    return {k: plain_values(v) for k, v in node.items()} if isinstance(node, dict) else node


@dataclass
class Config:
    files: list = ()  # FILE [OUT]: a file or folder to read, and the file to write


def main(cfg):
    if len(cfg.files) not in (1, 2):
        raise Refused("give a file to describe, or also the file to write: mdlm.ckpt mdlm.pt")
    path, *out = cfg.files
    ckpt = read(path)
    if out:
        launch.save(*out, **ckpt)
        print(f"written to {out[0]}")
    print(f"{path}: {sum(t.numel() for t in (ckpt.pop('model') or {}).values()):,} parameters")
    for name, value in ckpt.items():
        print(f"{name}: {'yes' if value and name in ('ema', 'optimizer') else value}")


if __name__ == "__main__":
    launch.run(main, Config)
