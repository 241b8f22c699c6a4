"""finetune_dream.py read against Alg. 1 and App. B.2, then against recorded numbers of the authors' code."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import launch
import dora
import finetune_dream as ft
from launch import Refused
from conftest import digest, recorded_adapter
from dream import Dream, DreamConfig, Tokenizer, load_adapter
from finetune_dream import Config, TwoPass, conversation, corrupt, encode_chat, finetune, keep, lr_at, objective, pad_with_eos
from softmask import SoftMask

gen = lambda seed=0: torch.Generator().manual_seed(seed)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEAD = dict(omega_s=0.4, omega_a=2.0, omega_b=-2.5)  # of the recordings


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(model folder, dialogues) of the `tiny` preset."""
    folder = tmp_path_factory.mktemp("tiny")
    ft.make_tiny(str(folder / "model"), str(folder / "dialogues.jsonl"))
    return str(folder / "model"), str(folder / "dialogues.jsonl")


@pytest.fixture
def cfg(tiny, tmp_path):
    return Config(model=tiny[0], data=tiny[1], out=str(tmp_path / "out"), steps=4, eta_bb=1e-2, warmup=0.25, omega_s=0.3,
                  omega_b=-2.5, n_val=3, log_every=1, save_every=2, eval_every=4, device="cpu")


@pytest.fixture
def batch(recorded):
    """The recorded micro-batch: x0, xt (2, 48), t."""
    xt, labels = recorded["c/input_ids"], recorded["c/labels"]
    return torch.where(labels == -100, xt, labels), xt, 1 / recorded["c/dsigma"].item()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def dense_nll(dream, sm, x0, xt, soft):
    """Both passes as the paper writes them: one-hot vectors, (B, L, V) everywhere, no rows and no chunks."""
    shifted = lambda emb: (lambda z: torch.cat([z[:, :1], z[:, :-1]], 1))(dream.lm_head(dream.trunk(emb)[0]))
    masked, P = xt == dream.cfg.mask_token_id, F.one_hot(xt, dream.cfg.vocab_size).float()          # (B, L, V)
    if soft:
        with torch.no_grad():
            logits = shifted(P @ dream.table)
        logits = logits / (F.softplus(sm.raw_tau) + 1e-6) if sm.k is None else logits
        p = logits.softmax(-1)
        omega_s, omega_a, omega_b = torch.sigmoid(sm.raw_s), F.softplus(sm.raw_a) + 1e-6, -F.softplus(sm.raw_b) - 1e-6
        lam = omega_s * torch.sigmoid(omega_a * ((p * (p + 1e-10).log()).sum(-1, keepdim=True) - omega_b))
        top = p if sm.k is None else p * torch.zeros_like(p).scatter(-1, p.topk(sm.k).indices, 1.0)
        pi = top / top.sum(-1, keepdim=True)
        P = torch.where(masked[..., None], (1 - lam) * P + lam * pi, P)
    return F.cross_entropy(shifted(P @ dream.table)[masked], x0[masked], reduction="none")


# ---- Alg. 1 l.5-8


@pytest.mark.parametrize("k, soft", [(None, True), (1, True), (3, True), (1, False)], ids=["all", "k1", "k3", "binary"])
@pytest.mark.parametrize("chunk", [256, 3])
def test_rows_and_chunks_equal_the_dense_algorithm(tiny_dream, batch, k, soft, chunk):
    x0, xt, t = batch
    results = []
    for dense in (False, True):
        dream, sm = recorded_adapter(Dream.load(tiny_dream)), SoftMask(194, k, **HEAD, tau=1.3)
        dream.checkpointing = not dense
        nll = dense_nll(dream, sm, x0, xt, soft) if dense else TwoPass(dream, sm, chunk)(x0, xt, soft)
        objective(nll, t, "authors", 1).backward()
        results.append((nll, trained(dream), list(sm.parameters())))
    (nll, theta, omega), (nll_dense, theta_dense, omega_dense) = results
    torch.testing.assert_close(nll, nll_dense, rtol=0, atol=1e-5)
    for p, q in zip(theta + omega * soft, theta_dense + omega_dense * soft):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-5 * q.grad.abs().max().item())
    if not soft:  # in the graph all the same, for DDP
        assert all(p.grad == 0 for p in omega)


@pytest.mark.parametrize("name, k", [("binary", None), ("k3", 3)])
def test_recorded_loss_and_all_gradients(tiny_dream, recorded, batch, name, k):
    x0, xt, t = batch
    model = TwoPass(recorded_adapter(Dream.load(tiny_dream)), SoftMask(194, k, **HEAD))
    nll = model(x0, xt, soft=name == "k3")
    loss = objective(nll, t, "authors", 1)  # the recorded batch of two has one t and one mean
    torch.testing.assert_close(loss, recorded[f"c/{name}/loss"], rtol=1e-6, atol=0)
    loss.backward()
    for parameter, want in zip(recorded["names"], recorded[f"c/{name}/grads"]):
        got = digest(model.dream.get_parameter(parameter).grad)
        torch.testing.assert_close(got, want.numpy(), rtol=1e-5, atol=1e-5 * want[0].item())
    if name == "k3":
        got = torch.stack([model.sm.raw_s.grad, model.sm.raw_a.grad, model.sm.raw_b.grad])
        torch.testing.assert_close(got, recorded["c/k3/omega_grads"].float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.lam, recorded["c/k3/lam"].mean(), rtol=1e-5, atol=0)


class LargestTensor(TorchDispatchMode):
    """numel: of the largest tensor with a dimension of V = 200, or as many values as rows × V (flattened)."""
    numel = 0

    def __init__(self, rows):
        super().__init__()
        self.flat = rows * 200

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and (200 in t.shape or t.numel() == self.flat):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("k", [1, None])
def test_no_tensor_of_all_positions_and_the_vocabulary_exists(tiny_dream, k):
    """Of all vocabulary-wide tensors that forward and backward make, none has more rows than a chunk."""
    dream = recorded_adapter(Dream.load(tiny_dream))
    x0 = torch.randint(190, (1, 512), generator=gen())
    xt = corrupt(x0, 8, 0.8, 194, gen())
    N = (xt == 194).sum().item()
    for chunk, largest in ((64, 64 * 200), (512, N * 200)):  # the second shows that the first could have been seen
        with LargestTensor(N) as mode:
            TwoPass(dream, SoftMask(194, k, **HEAD), chunk)(x0, xt, True).mean().backward()
        assert mode.numel == largest and N > 256


def one_update(sizes, device, checkpointing, k):
    """Two updates with feedback on 2,048 tokens with random bf16 weights.

    Returns (the peak of the GPU's memory in bytes, [the gradients of the second]).
    """
    with torch.device("meta"):
        dream = Dream(DreamConfig(*sizes)).to(torch.bfloat16).requires_grad_(False)
    dream.to_empty(device=device).checkpointing = checkpointing
    for p in dream.parameters():
        p.normal_(0, 0.02)
    dora.attach(dream, ft.TARGETS, 16, 16, gen())
    model = TwoPass(dream, SoftMask(sizes[9], k, **HEAD).to(device))
    optimizer = torch.optim.AdamW(trained(model))
    x0 = torch.randint(100, (1, 2048), generator=gen())
    xt = corrupt(x0, 16, 0.8, sizes[9], gen())
    for _ in range(2):  # the second has Adam's moments as well
        optimizer.zero_grad()
        objective(model(x0.to(device), xt.to(device), True), 0.8, "authors", 8).backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0, [p.grad for p in trained(model)]


def test_update_in_bf16_on_2048_tokens():
    """The memory test below on a model small enough for every machine: DoRA and ω learn on a frozen bf16 model."""
    _, grads = one_update((200, 32, 64, 1, 2, 1, 1e-6, 1e6, 4096, 199, 0, 0), "cpu", True, 1)
    assert len(grads) == 4 * 3 + 3 and all(g.dtype == torch.float32 and g.isfinite().all() and g.any() for g in grads)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 42e9, reason=(
    "needs a 42 GB GPU: would train a full-size random Dream in 24 GB with checkpointing and in 40 GB without"))
@pytest.mark.parametrize("k", [1, None])
@pytest.mark.parametrize("checkpointing, limit", [(True, 24e9), (False, 40e9)])
def test_full_size_dream_trains_on_the_cards_it_should(checkpointing, limit, k):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    dream_7b = (152064, 3584, 18944, 28, 28, 4, 1e-6, 1e6, 131072, 151666, 151643, 151643)
    assert one_update(dream_7b, "cuda", checkpointing, k)[0] < limit - 1e9  # CUDA itself takes up to a gigabyte


def test_first_pass_has_no_gradient(tiny_dream, batch, monkeypatch):
    dream, seen = recorded_adapter(Dream.load(tiny_dream)), []
    trunk = dream.trunk
    monkeypatch.setattr(dream, "trunk", lambda emb: (seen.append(torch.is_grad_enabled()), trunk(emb))[1])
    TwoPass(dream, SoftMask(194, 1, **HEAD))(*batch[:2], True)
    assert seen == [False, True]


def test_no_feedback_is_binary(tiny_dream, batch):
    """ω_s at its start of 1e-6 is binary masking to the eye."""
    dream = recorded_adapter(Dream.load(tiny_dream))
    model = TwoPass(dream, SoftMask(194, 1))
    torch.testing.assert_close(model(*batch[:2], True), model(*batch[:2], False), rtol=0, atol=1e-4)
    assert TwoPass(dream, None)(*batch[:2], False).equal(model(*batch[:2], False))


def test_two_objectives():
    """Eq. 2 over a batch, and the released one: mean over masks, sum over dialogues."""
    nll = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    ts = [0.5, 0.25]
    total = lambda kind: sum(objective(n, t, kind, 2) for n, t in zip(nll, ts)).item()
    assert total("paper") == pytest.approx((6 / 0.5 + 4 / 0.25) / 2)
    assert total("authors") == pytest.approx(2 / 0.5 + 4 / 0.25)


# ---- l.2-4: dialogues, ends, masks


def test_recorded_collator_draws(recorded):
    """The released collator restarts one generator for each of its three draws; so fed, ours makes the same batches."""
    c = lambda name: recorded["collator/" + name]
    padded = pad_with_eos(c("b1_raw0"), 190, gen(1231))[None]
    t = ft.sample_time(0.2, 0.8, gen(1231))
    assert 1 / t == pytest.approx(c("b1_dsigma").item(), rel=1e-6)
    assert (1 - ft.MASK_FLOOR) * t + ft.MASK_FLOOR == pytest.approx(c("b1_p_mask").item(), rel=1e-6)
    assert torch.equal(corrupt(padded, 24, t, 194, gen(1231)), c("b1_input_ids"))
    for name in ("b2", "b2t"):
        rows = [c(name + "_raw0"), c(name + "_raw1")]
        L = c(name + "_input_ids").shape[1]
        x0 = torch.stack([F.pad(r, (0, L - len(r)), value=190) for r in rows])
        prompt_len = c(name + "_prompt_lengths")[:, None]
        t = 1 / c(name + "_dsigma").item()
        xt = corrupt(x0, prompt_len, t, 194, gen(1231))
        assert torch.equal(xt, c(name + "_input_ids"))
        assert torch.equal(torch.where(xt == 194, x0, -100), c(name + "_labels"))


def test_recorded_at_least_one_mask(recorded):
    x0, prompt_len = recorded["collator/alo_in"], recorded["collator/alo_prompt"][:, None]
    xt = next(xt for seed in range(2000) for xt in [corrupt(x0, prompt_len, -1.0, 194, gen(seed))]
              if torch.equal(xt, recorded["collator/alo_ids"]))  # t < 0: no mask but the forced one, at one place for both rows
    assert (xt == 194).sum(1).tolist() == [1, 1]


def test_masks_are_in_the_response_only_with_probability_t():
    x0 = torch.zeros(1, 20_000, dtype=torch.long)
    masked = corrupt(x0, 5000, 0.3, 9, gen())[0] == 9
    assert not masked[:5000].any() and masked[5000:].float().mean().item() == pytest.approx(0.3, abs=0.015)


def test_ends_are_uniform_and_rounded_to_eight():
    lengths = [len(pad_with_eos([1] * 11, 7, gen(s))) for s in range(400)]
    assert {n % 8 for n in lengths} == {0} and min(lengths) == 16 and max(lengths) == 64
    assert pad_with_eos([1, 2, 3], 7, gen())[3:].eq(7).all()


def test_times_fill_the_clipped_interval():
    ts = [ft.sample_time(0.2, 0.8, gen(s)) for s in range(500)]
    assert 0.2 <= min(ts) < 0.22 and 0.78 < max(ts) <= 0.8


def test_response_is_the_last_assistant_turn(tiny):
    tok = Tokenizer(tiny[0])
    turns = [("HUMAN", "a"), ("ASSISTANT", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    messages = conversation({"messages": [{"role": r, "content": c} for r, c in turns]}, "here")
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    ids, prompt_len = encode_chat(messages, tok)
    assert tok.decode(ids[prompt_len:]) == "d<|im_end|>\n"
    assert tok.decode(ids) == tok.chat(messages, generate=False)
    assert ids[:prompt_len] == tok.encode(tok.chat(messages[:-1]), special=True)  # what decoding will be given


def test_the_filters(tiny):
    tok, cfg = Tokenizer(tiny[0]), Config(max_length=200)
    pair = lambda prompt, answer: [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    check = lambda prompt, answer: keep(*encode_chat(pair(prompt, answer), tok), cfg, tok, 261)
    overhead = len(encode_chat(pair("", "abc"), tok)[0])
    assert check("a", "abc") == ""                     # 3 bytes, <|im_end|>, line break: five tokens
    assert check("a", "ab") == "response under 5 tokens"
    assert check("a" * (200 - overhead), "abc") == "" and check("a" * (201 - overhead), "abc") == "over 200 tokens"
    assert check("a <tool_call>", "abc") == "tool calls" and check("a", "abc</tool_call>") == "tool calls"
    assert check("a <|mask|>", "abc") == "[MASK] in the text"


def test_paper_mixes(monkeypatch):
    """mix: Tulu 3 with 1% held out beside SmolTalk's own test part; coding: Ling-Coder. A stand-in for `datasets`."""
    class Rows(list):
        def select_columns(self, names):
            return self if names == ["messages"] else None
        def train_test_split(self, share, seed):
            return {"train": Rows(self[int(len(self) * share):]), "test": Rows(self[:int(len(self) * share)])}
        def shuffle(self, seed):
            return Rows(self[i] for i in torch.randperm(len(self), generator=gen(seed)))
        def select(self, index):
            return Rows(self[i] for i in index)

    class Splits(dict):
        select_columns = Rows.select_columns
    corpora = {"allenai/tulu-3-sft-mixture": Rows(f"tulu {i}" for i in range(1000)),
               "HuggingFaceTB/smoltalk": Splits(train=Rows(f"smol {i}" for i in range(500)),
                                                test=Rows(f"smol-test {i}" for i in range(20))),
               "inclusionAI/Ling-Coder-SFT": Rows(f"ling {i}" for i in range(300))}
    fake = types.SimpleNamespace(load_dataset=lambda name, part=None, split=None: corpora[name],
                                 concatenate_datasets=lambda parts: Rows(sum(parts, [])))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (n, train), (n_val, val) = ft.read_hub(Config(data="mix", n_train=1200, n_val=500))
    train, val = [r for _, r in train], [r for _, r in val]
    assert (n, n_val) == (len(train), len(val)) == (1200, 30)
    assert {r.split()[0] for r in train} == {"tulu", "smol"} and {r.split()[0] for r in val} == {"tulu", "smol-test"}
    assert not set(train) & set(val)
    (n, train), (n_val, _) = ft.read_hub(Config(data="coding"))
    assert (n, n_val) == (297, 3) and next(iter(train))[0] == "coding train 0"
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe hub")
    monkeypatch.setattr(fake, "load_dataset", unreachable)
    with pytest.raises(Refused, match=r"--data=mix could not be fetched from the hub \(ConnectionError\)"):
        ft.read_hub(Config(data="mix"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Refused, match="pip install datasets"):
        ft.read_hub(Config(data="mix"))


def test_odd_dialogues_of_a_corpus_are_dropped_and_counted(tiny):
    """A user can mend a .jsonl, so there they are refused; 300,000 dialogues of a hub must not end on one of them."""
    turns = lambda *roles: {"messages": [{"role": role, "content": "hello"} for role in roles]}
    records = [("a", turns("SYSTEM", "HUMAN", "ASSISTANT")), ("b", turns("ipython")), ("c", turns("user")), ("d", {"text": ""})]
    run = lambda data: ft.encode_all(4, records, Config(data=data), Tokenizer(tiny[0]), 261, False)
    kept, dropped = run("coding")
    assert len(kept) == 1 and dropped == {"malformed": 3}
    assert Tokenizer(tiny[0]).decode(kept[0][0].tolist()).startswith("<|im_start|>system\nhello<|im_end|>\n<|im_start|>user")
    with pytest.raises(Refused, match="b has the role 'ipython'"):
        run("my.jsonl")


def test_held_out_dialogues_are_not_trained_on(tiny):
    (n, train), (n_val, val) = ft.read_jsonl(Config(data=tiny[1], n_val=5))
    assert (n, n_val) == (115, 5) and not {w for w, _ in train} & {w for w, _ in val}
    assert len({w for w, _ in train}) == 115
    assert [w for w, _ in train] != [w for w, _ in ft.read_jsonl(Config(data=tiny[1], n_val=5, seed=2))[0][1]]
    line = lambda where: int(where.split()[-1]) - 1
    assert [line(w) for w, _ in val + train] != ft.order(120, 0, 1231).tolist()  # a draw of its own, not that of epoch 0


# ---- l.9: the update


def test_schedule_is_warm_up_then_cosine():
    N, warm = 100, 3
    for step in range(N):
        want = step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (N - warm)))
        assert lr_at(step, N, 0.03) == pytest.approx(want)
    assert lr_at(0, N, 0.03) == 0 and lr_at(3, N, 0.03) == 1 and lr_at(0, 10, 0.0) == 1
    assert math.ceil(0.03 * 101) == 4 and lr_at(3, 101, 0.03) == 0.75


def training_passes(monkeypatch):
    """A list that takes up (x0, xt, soft) of every forward that will be followed by a backward."""
    seen, forward = [], TwoPass.forward
    monkeypatch.setattr(TwoPass, "forward", lambda self, *a: (torch.is_grad_enabled() and seen.append(a), forward(self, *a))[1])
    return seen


@pytest.mark.parametrize("kind, k", [("authors", 1), ("paper", 3), ("authors", None)])
def test_four_updates_are_adam_on_the_dense_algorithm(cfg, monkeypatch, kind, k):
    """The whole run against a loop of its own: dense passes, gradients summed, joint clip at 7, Adam and schedule by hand."""
    cfg, times = replace(cfg, loss=kind, k=k, clip=0.7, p_sm=0.4), []
    calls, goal = training_passes(monkeypatch), ft.objective
    monkeypatch.setattr(ft, "objective", lambda nll, t, *a: (nll.requires_grad and times.append(t), goal(nll, t, *a))[1])
    model = finetune(cfg)
    assert len(calls) == len(times) == 32 and {soft for _, _, soft in calls} == {True, False}

    dream, sm = Dream.load(cfg.model), SoftMask(261, k, 0.3, 10 / 1.5, -2.5)
    dora.attach(dream, ft.TARGETS, 16, 16, ft.rng(cfg.seed, "adapter"))
    groups, clipped = [(trained(dream), cfg.eta_bb), (list(sm.parameters()), cfg.eta_sm)], 0
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p), 0) for ps, _ in groups for p in ps}
    for step in range(4):
        for (x0, xt, soft), t in zip(calls[8 * step:8 * step + 8], times[8 * step:]):
            nll = dense_nll(dream, sm, x0, xt, soft)
            (nll.mean() / t if kind == "authors" else nll.sum() / t / 8).backward()
        have = [p for p in moments if p.grad is not None]
        assert (sm.raw_s.grad is not None) == calls[8 * step][2]
        norm = sum(p.grad.square().sum() for p in have).sqrt()
        clipped += norm > 0.7
        lr = [0, 1, 0.75, 0.25][step]  # warm-up of ceil(0.25 · 4), then cosine over three
        for ps, eta in groups:
            for p in filter(lambda p: p.grad is not None, ps):
                g = p.grad * min(1, 0.7 / (norm + 1e-6))
                m, v, n = moments[p]
                m, v, n = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, n + 1
                moments[p] = m, v, n
                p.data = p.data - eta * lr * (m / (1 - 0.9 ** n)) / ((v / (1 - 0.999 ** n)).sqrt() + 1e-8)
                p.grad = None
    assert clipped == 4
    for ours, theirs in zip(trained(model.dream) + list(model.sm.parameters()), trained(dream) + list(sm.parameters())):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # of steps of up to 1e-2


def test_binary_updates_leave_omega_alone_and_soft_ones_move_it(cfg):
    omega = lambda model: [p.item() for p in model.sm.parameters()]
    start = [p.item() for p in SoftMask(261, 1, 0.3, 10 / 1.5, -2.5).parameters()]
    assert omega(finetune(replace(cfg, p_sm=1e-9))) == start  # coins that never show heads
    moved = finetune(replace(cfg, p_sm=1.0, out=cfg.out + "2"))
    assert all(abs(a - b) > 1e-3 for a, b in zip(omega(moved), start)) and moved.lam > 0
    assert finetune(replace(cfg, p_sm=0.0, out=cfg.out + "3")).sm is None


def test_coin_is_one_per_update(cfg, monkeypatch):
    passes = training_passes(monkeypatch)
    finetune(replace(cfg, steps=12, eval_every=100))
    updates = [{soft for _, _, soft in passes[8 * i:8 * i + 8]} for i in range(12)]
    assert {True} in updates and {False} in updates and {True, False} not in updates


def test_presets_are_the_paper():
    base = launch.from_cli(Config, ["iso-update"], ft.PRESETS)
    assert (base.p_sm, base.k, base.batch_size, base.clip, base.eta_bb, base.eta_sm, base.warmup, base.r, base.alpha) == \
        (0.5, 1, 8, 7.0, 1e-5, 1e-2, 0.03, 16, 16)
    assert (base.b_l, base.b_h, base.max_length, base.min_response) == (0.2, 0.8, 2048, 5)
    assert (base.n_train, base.n_val, base.epochs) == (300_000, 500, 1)
    assert launch.from_cli(Config, ["iso-compute"], ft.PRESETS).epochs == base.epochs / 2
    assert launch.from_cli(Config, ["binary"], ft.PRESETS).p_sm == 0


# ---- resume, ranks, files


def parts(folder):
    ckpt = checkpoint.load(os.path.join(folder, "last.pt"))
    moments = [t for s in ckpt["optimizer"]["state"].values() for t in s.values()]
    return ckpt["step"], [*ckpt["model"].values(), *moments]


def logged(folder):
    drop = ("tokens_per_s", "seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in open(os.path.join(folder, "log.jsonl"))]


@pytest.mark.parametrize("log_every", [1, 3])
def test_resumed_run_is_the_uninterrupted_one(cfg, monkeypatch, log_every):
    """Killed in update 3 after a save at 2, resumed: bit for bit, log included, wherever its lines fall."""
    cfg = replace(cfg, log_every=log_every)
    whole = replace(cfg, out=cfg.out + "-whole")
    finetune(whole)
    draw, count = ft.corrupt, []
    def fails(*args):
        count.append(1)
        if len(count) > 20:
            raise KeyboardInterrupt
        return draw(*args)
    monkeypatch.setattr(ft, "corrupt", fails)
    with pytest.raises(KeyboardInterrupt):
        finetune(cfg)
    monkeypatch.setattr(ft, "corrupt", draw)
    assert parts(cfg.out)[0] == 2
    with open(cfg.out + "/log.jsonl", "a") as f:
        f.write('{"step": 3, "lo')  # as a kill leaves it
    finetune(replace(cfg, resume=True))
    (step, ours), (_, theirs) = parts(cfg.out), parts(whole.out)
    assert step == 4 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert logged(cfg.out) == logged(whole.out)


def test_sigterm_saves_and_leaves(cfg, monkeypatch):
    steps, schedule = [], ft.lr_at
    def kills(step, *args):
        if step == 1 and not steps:
            steps.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # torchrun sends it again
        return schedule(step, *args)
    monkeypatch.setattr(ft, "lr_at", kills)
    with pytest.raises(SystemExit) as stopped:
        finetune(cfg)
    assert stopped.value.code == 128 + signal.SIGTERM and parts(cfg.out)[0] == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_before_the_first_update_just_ends(cfg, monkeypatch):
    """Nothing is lost yet, and reading a corpus takes long: the handlers that wait for an update come after it."""
    seen, encode = [], ft.encode_all
    monkeypatch.setattr(ft, "encode_all", lambda *a: (seen.append(signal.getsignal(signal.SIGINT)), encode(*a))[1])
    before = signal.getsignal(signal.SIGINT)
    finetune(replace(cfg, steps=1, n_train=8))
    assert seen == [before, before] and signal.getsignal(signal.SIGINT) == before


def test_what_is_not_a_number_is_not_saved(cfg, monkeypatch):
    objective, count = ft.objective, []
    monkeypatch.setattr(ft, "objective", lambda *a: (count.append(1), objective(*a) * (math.nan if len(count) > 50 else 1))[1])
    with pytest.raises(Refused, match="not a number by update 4: --resume goes back"):
        finetune(replace(cfg, eval_every=100))
    step, tensors = parts(cfg.out)
    assert step == 2 and all(t.isfinite().all() for t in tensors)


def test_an_overwritten_run_is_gone_before_the_first_save(cfg, monkeypatch):
    finetune(replace(cfg, steps=2))
    monkeypatch.setattr(ft, "corrupt", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        finetune(replace(cfg, steps=2, overwrite=True))
    with pytest.raises(Refused, match="no checkpoint at"):
        finetune(replace(cfg, steps=2, resume=True))


def test_a_moved_run_is_resumed_and_one_on_other_weights_is_not(cfg, tmp_path):
    finetune(replace(cfg, steps=2))
    shutil.copytree(cfg.model, tmp_path / "moved")
    shutil.copy(cfg.data, tmp_path / "moved.jsonl")
    moved = replace(cfg, steps=2, model=str(tmp_path / "moved"), data=str(tmp_path / "moved.jsonl"), resume=True)
    finetune(moved)
    other_weights(tmp_path / "moved")
    with pytest.raises(Refused, match=r"cannot resume: base \(\w{16} there, \w{16} here\)"):
        finetune(moved)


def test_two_ranks_are_one(cfg):
    finetune(cfg)
    settings = asdict(replace(cfg, out=cfg.out + "-two"))
    flags = [f"--{name}={value}" for name, value in settings.items() if value != getattr(Config, name)]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "finetune_dream.py"]
    subprocess.run(ranks + flags, cwd=ROOT, check=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (step, one), (step_two, two) = parts(cfg.out), parts(cfg.out + "-two")
    assert step == step_two == 4
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    for a, b in zip(logged(cfg.out), logged(cfg.out + "-two"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_adapter_folder_brings_back_the_model(cfg, tiny):
    model = finetune(cfg)
    dream = Dream.load(tiny[0])
    sm = SoftMask(**load_adapter(dream, cfg.out + "/last"))
    torch.testing.assert_close(torch.stack(sm.omega), torch.stack(model.sm.omega), rtol=1e-6, atol=0)
    for name, p in dora.adapter_state(model.dream).items():
        assert torch.equal(dora.adapter_state(dream)[name], p)
    os.remove(cfg.out + "/last/softmask.json")  # what is left is what the authors' code has
    theirs = load_adapter(Dream.load(tiny[0]), cfg.out + "/last")
    assert theirs["k"] == 1 and theirs["omega_b"] == pytest.approx(model.sm.omega[2].item())
    assert set(json.load(open(cfg.out + "/last/transparency_config.json"))) == {
        "transparency_alg", "transparency_scale", "transparency_steepness", "transparency_centre", "mixture_temp",
        "mixinputs_k", "transparency_scheduling"}
    assert json.load(open(cfg.out + "/best/finetune.json"))["steps"] == 4


def other_weights(folder):
    """Another model of the same shapes in a folder of `make_tiny`."""
    state = Dream.load(folder).state_dict()
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"] + 0.01
    checkpoint.write_safetensors(f"{folder}/model.safetensors", {name: t.clone() for name, t in state.items()})


def test_adapter_of_another_model_of_the_same_shapes_is_refused(cfg, tmp_path):
    finetune(replace(cfg, steps=1))
    shutil.copytree(cfg.model, tmp_path / "other")
    assert load_adapter(Dream.load(tmp_path / "other", dtype=torch.bfloat16), cfg.out + "/last")["k"] == 1  # the very model
    other_weights(tmp_path / "other")
    with pytest.raises(Refused, match="not an adapter of this model but of the one that was in .*/model: same shapes"):
        load_adapter(Dream.load(tmp_path / "other"), cfg.out + "/last")


def test_saturated_omega_survives_the_folder(tiny_dream, tmp_path):
    dream, sm = recorded_adapter(Dream.load(tiny_dream)), SoftMask(194, 1, **HEAD)
    sm.raw_s.data.fill_(20.0)
    assert sm.omega[0] == 1  # in fp32
    ft.save_adapter(str(tmp_path), dream, sm, Config())
    for name, field in (("softmask.json", "omega_s"), ("transparency_config.json", "transparency_scale")):
        assert json.load(open(tmp_path / name))[field] < 1
        assert 0.99 < SoftMask(**load_adapter(Dream.load(tiny_dream), tmp_path)).omega[0] < 1
        os.remove(tmp_path / name)


@pytest.mark.parametrize("failing", range(5))
def test_an_interrupted_save_leaves_a_soft_adapter_soft(tiny_dream, tmp_path, monkeypatch, failing):
    dream, sm, writes = recorded_adapter(Dream.load(tiny_dream)), SoftMask(194, 1, **HEAD), []
    ft.save_adapter(str(tmp_path), dream, sm, Config())
    replace_file = os.replace
    def killed(*args):
        writes.append(args)
        if len(writes) > failing:
            raise KeyboardInterrupt
        replace_file(*args)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        ft.save_adapter(str(tmp_path), dream, sm, Config())
    omega = load_adapter(Dream.load(tiny_dream), tmp_path)
    assert omega is not None and omega["omega_s"] == pytest.approx(0.4)


def test_dense_head_survives_the_folder(tiny_dream, tmp_path):
    dream, sm = recorded_adapter(Dream.load(tiny_dream)), SoftMask(194, None, **HEAD, tau=1.3)
    ft.save_adapter(str(tmp_path), dream, sm, Config())
    for name in ("softmask.json", "transparency_config.json"):
        back = SoftMask(**load_adapter(Dream.load(tiny_dream), tmp_path))
        assert back.k is None and back.raw_tau.item() == pytest.approx(sm.raw_tau.item(), abs=1e-5)
        os.remove(tmp_path / name)
    ft.save_adapter(str(tmp_path), dream, sm, Config())
    ft.save_adapter(str(tmp_path), dream, None, Config())
    assert load_adapter(Dream.load(tiny_dream), tmp_path) is None  # no ω of an earlier run is left


def test_validation_is_the_same_every_time_and_best_is_kept(cfg):
    finetune(replace(cfg, steps=6, eval_every=2, eta_bb=0.0, eta_sm=0.0))  # nothing learns, so nothing may change
    values = [{k: v for k, v in line.items() if k.startswith("val")} for line in logged(cfg.out) if "val_soft" in line]
    assert len(values) == 3 and values[0] == values[1] == values[2]
    assert set(values[0]) == {"val_soft", "val_soft_ce", "val_binary", "val_binary_ce"}
    assert os.path.exists(cfg.out + "/best/adapter_model.safetensors")


# ---- bad input


def lines(path, *records):
    with open(path, "w") as f:
        f.writelines((r if isinstance(r, str) else json.dumps({"messages": r})) + "\n" for r in records)
    return str(path)


USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello you"}


@pytest.mark.parametrize("record, message", [
    ([USER], "line 1 has no assistant turn"),
    ([USER, {"role": "bot", "content": "hi"}], "line 1 has the role 'bot': use system, user, assistant, SYSTEM, HUMAN, ASSISTANT"),
    ([USER, {"role": "assistant"}], 'line 1 is not {"messages"'),
    ("{", "line 1 is not JSON"),
    ('{"text": "x"}', 'line 1 is not {"messages"'),
    ([{"role": "user", "content": "x" * 2048}, ANSWER], "no dialogue of .* is left to train on; dropped: 1 over 2048 tokens"),
    ([USER, {"role": "assistant", "content": "y"}], "dropped: 1 response under 5 tokens"),
])
def test_bad_dialogues_are_refused(cfg, tmp_path, record, message):
    with pytest.raises(Refused, match=message):
        finetune(replace(cfg, data=lines(tmp_path / "d.jsonl", record), n_val=1))
    assert not os.path.exists(cfg.out)


@pytest.mark.parametrize("changes, message", [
    (dict(model=""), "give --model"),
    (dict(model="nowhere"), "nowhere/added_tokens.json|nowhere has neither"),
    (dict(data="nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    (dict(loss="mean"), "--loss=mean is out of range"),
    (dict(p_sm=1.5), "--p_sm=1.5"),
    (dict(b_l=0.0), "--b_l=0.0"),
    (dict(omega_b=0.5), "omega_b < 0"),
    (dict(k=0), "k >= 1"),
    (dict(k=500), "--k=500 is more than the 264 tokens"),
    (dict(eta_sm=-1.0), "--eta_sm=-1.0"),
    (dict(clip=math.nan), "--clip=nan"),
    (dict(device="cuda" if not torch.cuda.is_available() else "tpu"), "this machine has 0 of it"),
    (dict(dtype="int8"), "--dtype=int8"),
    (dict(device="tpu"), "--device=tpu"),
    (dict(save_every=0), "--save_every=0"),
])
def test_bad_settings_are_refused(cfg, changes, message):
    with pytest.raises(Refused, match=message):
        finetune(replace(cfg, **changes))


def test_a_run_is_neither_overwritten_nor_mixed(cfg, tmp_path):
    finetune(replace(cfg, steps=2))
    with pytest.raises(Refused, match="already holds a run"):
        finetune(cfg)
    with pytest.raises(Refused, match=r"steps \(2 there, 4 here\)"):
        finetune(replace(cfg, resume=True))
    finetune(replace(cfg, steps=2, overwrite=True))
    with pytest.raises(Refused, match="no checkpoint at"):
        finetune(replace(cfg, out=cfg.out + "-none", resume=True))
    checkpoint.save(cfg.out + "/last.pt", kind="other", config={}, model={}, step=0, seed=0)
    with pytest.raises(Refused, match="last.pt holds a other, not a run of finetune_dream.py"):
        finetune(replace(cfg, steps=2, resume=True))


def test_changed_dialogues_are_not_resumed(cfg, tmp_path):
    data = lines(tmp_path / "d.jsonl", *[[USER, ANSWER]] * 12)
    finetune(replace(cfg, steps=2, data=data))
    lines(data, *[[USER, ANSWER]] * 11, [USER, {"role": "assistant", "content": "something else"}])
    with pytest.raises(Refused, match=r"cannot resume: dialogues \(\w{16} there, \w{16} here\)"):
        finetune(replace(cfg, steps=2, data=data, resume=True))


def test_script_refuses_in_one_line():
    done = subprocess.run([sys.executable, "finetune_dream.py", "--p_sm=2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("finetune_dream.py: --p_sm=2.0 is out of range")


def test_tiny_preset_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finetune(launch.from_cli(Config, ["tiny", "--steps=20", "--device=cpu"], ft.PRESETS))
    log = logged("out/tiny_dream")
    assert log[-1]["val_soft"] < 0.8 * log[0]["loss"] and log[-1]["lam"] > 0


def test_tiny_preset_replaces_nothing(tmp_path, monkeypatch):
    """Neither the user's model, dialogues and runs, nor its own."""
    monkeypatch.chdir(tmp_path)
    os.makedirs("mymodel"), os.makedirs("out/dream"), os.makedirs("out/tiny_dream/model")
    mine = {"mymodel/config.json": "{}", "mine.jsonl": "mine", "out/dream/last.pt": "a week", "out/tiny_dream/model/merges.txt": "x y"}
    for path, text in mine.items():
        with open(path, "w") as f:
            f.write(text)
    for flags in (["--model=mymodel", "--data=mine.jsonl"], ["--data=mine.jsonl"], ["--model=mymodel"], ["--out=out/dream"]):
        with pytest.raises(Refused):
            finetune(launch.from_cli(Config, ["tiny", "--device=cpu", *flags], ft.PRESETS))
    for path, text in mine.items():
        assert open(path).read() == text
    with pytest.raises(Refused, match="unknown argument '--tiny'"):
        launch.from_cli(Config, ["--tiny", "--model=mymodel", "--data=mine.jsonl"], ft.PRESETS)
    ft.make_tiny("new", "new.jsonl")
    other_weights("new")
    weights = Dream.load("new").fingerprint()
    ft.make_tiny("new", "new.jsonl")
    assert Dream.load("new").fingerprint() == weights
