"""Fixtures that several test files share."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = ROOT, os.path.join(ROOT, "lab"), os.path.join(ROOT, "examples")
sys.path[:0] = FOLDERS  # so that plain `pytest` finds the scripts

import data  # noqa: E402
import dora  # noqa: E402
import launch  # noqa: E402
import oracles  # noqa: E402
from dream import write_safetensors  # noqa: E402
from launch import Refused, from_cli  # noqa: E402
from mdlm import MDLM, ModelConfig, own_class  # noqa: E402
from tiny_dream import make  # noqa: E402

GOLDEN = os.path.join(ROOT, "tests", "golden")
torch.set_num_threads(1)  # models here are too small for more threads

gen = lambda seed=0: torch.Generator().manual_seed(seed)
sigterm = lambda: os.kill(os.getpid(), signal.SIGTERM)
# ω of a SoftMask in plain numbers, as the oracles take it
plain_omega = lambda sm: oracles.omega(sm.k, *(raw.item() for raw in sm.parameters()))


def refused(message, function, *args, **kwargs):
    with pytest.raises(Refused, match=message):
        function(*args, **kwargs)


def torchrun(*words, cfg=None, ranks=2, cwd=ROOT, **options):
    """The finished process of a script.   cfg: a Config, for its flags."""
    program = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node={ranks}"
    flags = [f"--{name}={value}" for name, value in vars(cfg).items()
             if value != getattr(type(cfg), name)] if cfg else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.run([*program.split(), *map(str, words), *flags], cwd=cwd, env=env,
                          timeout=200, capture_output=True, text=True, **options)


def random_mdlm(scale=0.3, seed=0, **fields):
    """A small MDLM with noise on its network: a fresh one predicts the same everywhere."""
    torch.manual_seed(seed)
    model = MDLM(ModelConfig(**dict(n_layer=1, n_head=2, n_embd=16, n_cond=8) | fields))
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(scale * torch.randn_like(p))
    return model


def save_mdlm(path, model, **others):
    """A checkpoint as train.py writes it, of bytes."""
    tokenizer = data.describe(data.tokenizer("bytes"))
    fields = dict(step=1, config=vars(model.cfg), model=model.state_dict(), tokenizer=tokenizer,
                  net=own_class(model.net), SoftMask=own_class(model.sm)) | others
    launch.save(path, kind="mdlm", **fields)


def recording(name):
    """A file of tests/golden: its tensors by name, and lists of its words."""
    values = {}
    for key, v in np.load(os.path.join(GOLDEN, f"{name}.npz")).items():
        v = v.astype(np.int64) if v.dtype == np.int16 else v
        values[key] = list(v) if v.dtype.kind == "U" else torch.from_numpy(v)
    return values


class Killed(BaseException):
    """No `except Exception` catches it, as if the process were gone."""


kill = Mock(side_effect=Killed)


def spy(monkeypatch, module, name, at=None, then=None):
    """A list of the arguments of all calls. then() runs before call number `at`."""
    calls, whole = [], getattr(module, name)

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            then()
        return whole(*args, **kwargs)
    monkeypatch.setattr(module, name, call)
    return calls


@contextlib.contextmanager
def dying(module, name, at, then=kill):
    """then(), a kill or a SIGTERM, comes before call number `at`, and must end this block."""
    how = Killed if then is kill else SystemExit
    with pytest.MonkeyPatch.context() as patch, pytest.raises(how) as stopped:
        spy(patch, module, name, at, then)
        yield stopped


def configure(script, words):
    """The main function of a script, and its Config from the words of a command line."""
    module = importlib.import_module(os.path.basename(script))
    name = {"train": "train", "finetune_dream": "finetune"}.get(script, "main")
    whole = getattr(module, name), module.Config, getattr(module, "PRESETS", ())
    main, Config, presets = getattr(module, "COMMANDS", {}).get("".join(words[:1]), whole)
    return main, from_cli(Config, words, presets)


def start(script, *words):
    main, cfg = configure(script, words)
    return main(cfg)


def logged(folder):
    """The lines of a run's log, without the numbers that are measured"""
    lines = launch.read_jsonl(os.path.join(folder, "log.jsonl"))
    return [line | {"tokens_per_s": 0, "seconds": 0} for line in lines]


@pytest.fixture(scope="session")
def tiny_dream(tmp_path_factory):
    """The folder of the random model behind every recorded number: 3 layers, V = 200, 3 shards."""
    folder = tmp_path_factory.mktemp("tiny_dream")
    shutil.copy(os.path.join(GOLDEN, "dream_tiny.json"), folder / "config.json")
    tensors, shard_of = [*recording("dream_tiny").items()], {}
    for i in range(3):
        shard, inside = f"model-0000{i + 1}-of-00003.safetensors", dict(tensors[i::3])
        write_safetensors(folder / shard, inside)
        shard_of |= dict.fromkeys(inside, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """(model folder, dialogues) of examples/tiny_dream.py: bytes as tokens, [MASK] 261."""
    paths = [f"{tmp_path_factory.mktemp('tiny')}/{name}" for name in ("model", "dialogues.jsonl")]
    make(*paths)
    return paths


@pytest.fixture
def mine(tmp_path):
    """A file for --code with a SoftMask whose λ also depends on which token is likeliest"""
    (tmp_path / "beside.py").write_text("from softmask import SoftMask as Ours")
    path = tmp_path / "mine.py"
    path.write_text("""
import beside, torch
class SoftMask(beside.Ours):
    def __init__(self, mask_id, k, omega_s, omega_a, omega_b):
        super().__init__(mask_id, k, omega_s, omega_a, omega_b)
        self.bias = torch.nn.Parameter(torch.zeros(300))
    def forward(self, logits):
        assert self.training == torch.is_grad_enabled()
        lam, ids, pi = super().forward(logits)
        return lam * 2 * torch.sigmoid(self.bias[logits.argmax(-1)]), ids, pi
""")
    return str(path)


def digest(tensor):
    """A tensor in five numbers: its norm, and four projections on fixed noise"""
    x = torch.as_tensor(tensor).detach().double().flatten()
    probes = torch.randn(4, x.numel(), generator=gen(x.numel()), dtype=torch.float64)
    return torch.cat((x.norm()[None], probes @ x)).numpy()


@pytest.fixture(scope="session")
def recorded():
    """Numbers of the authors' Dream code. a/: forward, b/: DoRA, c/: finetuning loss"""
    return recording("dream_recorded")


def recorded_adapter(dream, alpha=16):
    """Attach the DoRA adapter of the recordings. It was drawn from one seed: nothing is stored."""
    g = gen(99)
    dora.attach(dream, ["q_proj", "k_proj", "v_proj", "o_proj"], 16, alpha, torch.Generator())
    with torch.no_grad():
        for layer in dora.layers(dream).values():
            layer.lora_A.copy_(0.15 * torch.randn(layer.lora_A.shape, generator=g))
            layer.lora_B.copy_(0.15 * torch.randn(layer.lora_B.shape, generator=g))
            n = layer.base.weight.norm(dim=1)
            layer.lora_magnitude_vector.copy_(n * (1 + 0.25 * torch.randn(n.shape, generator=g)))
    return dream
