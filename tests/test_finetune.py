"""finetune_dream.py against Alg. 1, App. B.2, and recorded numbers."""

import json
import os
import shutil
import signal
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import chunks
import conftest
import dora
import finetune_dream as ft
import launch
import oracles
from conftest import digest, dying, gen, plain_omega, recorded_adapter, refused, sigterm
from dream import Dream, Tokenizer, byte_characters, load_adapter
from finetune_dream import Config, TwoPassDream, finetune, mask_response, objective
from sample_dream import Decoding, load_for_decoding
from softmask import SoftMask

HEAD = dict(omega_s=0.4, omega_a=2.0, omega_b=-2.5)  # of the recordings


@pytest.fixture
def cfg(tiny, tmp_path):
    return Config(model=tiny[0], data=tiny[1], out=str(tmp_path / "out"), steps=4, eta_bb=1e-2,
                  warmup=0.25, omega_s=0.3, omega_a=2.0, omega_b=-4.5, n_val=3, log_every=1,
                  save_every=2, eval_every=4, r=4, alpha=6, device="cpu")


@pytest.fixture
def batch(recorded):
    xt, labels = recorded["c/input_ids"], recorded["c/labels"]
    return torch.where(labels == -100, xt, labels), xt, 1 / recorded["c/dsigma"].item()


def two_pass(folder, k, tau=1.0):
    dream = recorded_adapter(Dream.load(folder))
    return TwoPassDream(dream, SoftMask(194, k, **HEAD, tau=tau), 194)


def trained(model):
    return list(ft.trained(model).values())


@pytest.mark.parametrize("k, soft, rows", [
    (None, True, 3), (1, True, 3), (3, True, 3), (1, False, 3), (3, True, 99)])
def test_rows_and_chunks_equal_the_dense_algorithm(tiny_dream, batch, monkeypatch, k, soft, rows):
    monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * 200 * rows)
    (x0, xt, _), model = batch, two_pass(tiny_dream, k, tau=1.3)
    net = model.net
    dense = oracles.dense_nll(lambda emb, t: net.lm_head(net.trunk(emb)[0]).roll(1, 1), net.table,
                              x0, xt, torch.ones(2), 194, plain_omega(model.sm) if soft else None)
    parts = model(x0, xt, soft).double().split((xt == 194).sum(1).tolist())
    for found, expected in zip(parts, dense):
        torch.testing.assert_close(found.sum(), expected, rtol=1e-5, atol=0)


def test_recorded_loss_and_all_gradients(tiny_dream, recorded, batch):
    """Also those of ω. No gradient goes through the first pass."""
    x0, xt, t = batch
    for name, k in (("binary", None), ("k3", 3)):
        model = two_pass(tiny_dream, k)
        # The recorded batch of two has one t and one mean.
        loss = objective(model(x0, xt, soft=name == "k3"), t, "authors", 1)
        torch.testing.assert_close(loss, recorded[f"c/{name}/loss"], rtol=1e-6, atol=0)
        loss.backward()
        for parameter, want in zip(recorded["names"], recorded[f"c/{name}/grads"]):
            got = digest(model.net.get_parameter(parameter).grad)
            torch.testing.assert_close(got, want.numpy(), rtol=1e-5, atol=1e-5 * want[0].item())
    got = torch.stack([model.sm.raw_s.grad, model.sm.raw_a.grad, model.sm.raw_b.grad])
    torch.testing.assert_close(got, recorded["c/k3/omega_grads"].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.lam, recorded["c/k3/lam"].mean(), rtol=1e-5, atol=0)


def test_recorded_collator_draws(recorded):
    """The released collator restarts its generator for each of its three draws [code]."""
    c = lambda name: recorded["collator/" + name]
    padded = ft.pad_with_eos(c("b1_raw0"), 190, gen(1231))[None]
    t = ft.sample_times(1, gen(1231), 0.2, 0.8).item()
    assert 1 / t == pytest.approx(c("b1_dsigma").item(), rel=1e-6)
    p = (1 - ft.MASK_FLOOR) * t + ft.MASK_FLOOR
    assert p == pytest.approx(c("b1_p_mask").item(), rel=1e-6)
    assert torch.equal(mask_response(padded, 24, t, 194, gen(1231)), c("b1_input_ids"))
    for name in ("b2", "b2t"):
        L, t = c(name + "_input_ids").shape[1], 1 / c(name + "_dsigma").item()
        raw = [c(name + "_raw0"), c(name + "_raw1")]
        x0 = torch.stack([F.pad(row, (0, L - len(row)), value=190) for row in raw])
        xt = mask_response(x0, c(name + "_prompt_lengths")[:, None], t, 194, gen(1231))
        assert torch.equal(xt, c(name + "_input_ids"))
        assert torch.equal(torch.where(xt == 194, x0, -100), c(name + "_labels"))


def test_recorded_at_least_one_mask(recorded):
    """t < 0 leaves only the forced mask, at one place for both rows."""
    x0, prompt_len = recorded["collator/alo_in"], recorded["collator/alo_prompt"][:, None]
    draws = (mask_response(x0, prompt_len, -1.0, 194, gen(seed)) for seed in range(2000))
    xt = next(xt for xt in draws if torch.equal(xt, recorded["collator/alo_ids"]))
    assert (xt == 194).sum(1).tolist() == [1, 1]


def said(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_response_is_the_last_assistant_turn_and_the_prompt_is_as_in_decoding(tmp_path):
    """Also where the prompt ends, and the response begins, with a line break."""
    vocab = [*byte_characters(), "ĊĊ"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 257, "<|im_end|>": 258}')
    tok = Tokenizer(tmp_path)
    ids, prompt_len = ft.encode_chat(said(("HUMAN", "a"), ("ASSISTANT", "b"), ("user", "c"),
                                          ("assistant", "\nd"), ("user", "e")), tok)
    prompt = tok.chat(said(("user", "a"), ("assistant", "b"), ("user", "c"))["messages"])
    assert tok.decode(ids) == prompt + "\nd<|im_end|>\n"
    assert ids[:prompt_len] == tok.encode(prompt, special=True)
    assert len(tok.encode(tok.decode(ids), special=True)) == len(ids) - 1  # \n\n is one token


def test_dialogues_in_the_formats_that_people_have(tmp_path):
    path = tmp_path / "own.json"
    pair = said(("user", "a"), ("assistant", "b"))
    records = [pair, {"prompt": "a", "response": "b"}, {"instruction": "a", "output": "b"},
               {"instruction": "a", "input": "", "output": "b"},
               {"conversations": [{"from": "user", "value": "a"},
                                  {"from": "assistant", "value": "b"}]}]
    lines = "\n\n".join(map(json.dumps, records))
    for text in lines, "\ufeff" + lines, json.dumps(records, indent=1):
        path.write_text(text, encoding="utf-8")
        train, val = ft.read_lines(Config(data=str(path)))
        assert train == 5 * [pair] and not val
    path.write_text(json.dumps({"instruction": "a", "input": "c", "output": "b"}))
    [record] = ft.read_lines(Config(data=str(path)))[0]
    assert record == said(("user", "a\n\nc"), ("assistant", "b"))
    for wrong in '{"text": "a"}', lines[:20], "[1", "3", '{"messages": [{"role": "user"}]}':
        path.write_text(wrong if wrong == "[1" else f"{json.dumps(pair)}\n{wrong}")
        where = 1 if wrong == "[1" else 2
        refused(f'own.json, line {where}: .*"messages"', ft.read_lines, Config(data=str(path)))


def test_the_filters_and_the_held_out_dialogues(tiny):
    tok, cfg = Tokenizer(tiny[0]), Config(max_length=200)
    talk = lambda prompt, answer: said(("user", prompt), ("assistant", answer))
    overhead = len(ft.encode_chat(talk("", "abc"), tok)[0])
    kept = talk("a", "abc"), talk("a" * (200 - overhead), "abc")  # 3 bytes, <|im_end|>, line break
    dropped = {"response under 5 tokens": (talk("a", "ab"),),
               "no text by a role named assistant or gpt": (
                   said(("user", "a")), talk("a", None), said(("user", "a"), ("bot", "b"))),
               "over 200 tokens": (talk("a" * (201 - overhead), "abc"),),
               "tool calls": (talk("a", "abc</tool_call>"),),
               "[MASK] in the text": (talk("a <|mask|>", "abc"),)}
    found, why = ft.encode_all([*kept, *sum(dropped.values(), ())], cfg, tok, 261)
    assert [tok.decode(ids) for ids, _ in found] == [
        tok.decode(ft.encode_chat(record, tok)[0]) for record in kept]
    assert why == {reason: len(records) for reason, records in dropped.items()}
    train, val = ft.read_lines(Config(data=tiny[1], n_val=5))  # none is held out and trained on
    assert (len(train), len(val)) == (115, 5)
    assert len({record["messages"][0]["content"] for record in train + val}) == 120
    assert len({ft.digest_of([(ids, n)]) for ids, _ in found for n in (3, 4)}) == 4


@pytest.mark.parametrize("kind, k, coin", [
    ("authors", 1, "update"), ("paper", 3, "update"), ("authors", None, "dialogue")])
def test_four_updates_are_adam_by_hand(cfg, kind, k, coin):
    """Of 5 dialogues each, over three epochs, with a line after 1, 2 and 4, and an evaluation."""
    cfg = replace(cfg, loss=kind, k=k, coin=coin, clip=0.7, p_sm=0.4, warmup=0.2, batch_size=5,
                  n_train=9, b_l=0.1, b_h=0.7, eta_sm=3e-2, log_every=2)
    model = finetune(cfg)

    tok = Tokenizer(cfg.model)
    with open(cfg.data) as f:
        dialogues = [ft.encode_chat(json.loads(line), tok) for line in f]
    dialogues, val = oracles.split(dialogues, cfg.n_val, cfg.seed)
    loss = lambda nll, t, n: nll.mean() / t if kind == "authors" else nll.sum() / t / n
    dream = Dream.load(cfg.model)
    sm = SoftMask(261, k, 0.3, 2.0, -4.5)
    dora.attach(dream, ft.TARGETS, 4, 6, oracles.rng(cfg.seed, "adapter"))
    reference = TwoPassDream(dream, sm, 261)
    etas = {p: cfg.eta_bb for p in trained(dream)} | {p: cfg.eta_sm for p in sm.parameters()}
    moments, tossed, losses, nlls, lams, lines = {}, set(), [], [], [], iter(logged(cfg.out))
    for step, lr in enumerate([0, 1, 0.75, 0.25]):  # warm-up of ceil(0.2 · 4), cosine over three
        softs = []
        for x0, xt, t, soft in oracles.dialogues_of_update(dialogues[:9], step, mask_id=261,
                                                           eos=256, **asdict(cfg)):
            softs.append(soft)
            nll = reference(x0, xt, soft)
            loss(nll, t, 5).backward()
            losses.append(loss(nll, t, 1).item())
            nlls += nll.tolist()
            lams += [reference.lam.item()] * soft
        tossed.add(sum(softs))
        have = list(etas) if any(softs) else trained(dream)  # ω stays as it is in a binary update
        norm = sum(p.grad.square().sum() for p in have).sqrt().item()
        assert norm > 0.7
        for p in have:
            oracles.adam(p, p.grad * 0.7 / (norm + 1e-6), etas[p] * lr, moments)
            p.grad = None
        if step != 2:
            line, sums = next(lines), {"loss": losses, "ce_per_mask": nlls, "lam": lams}
            expected = {name: sum(found) / len(found) for name, found in sums.items() if found}
            expected |= {"eta_bb": lr * cfg.eta_bb, "grad_norm": norm}
            assert {name: line.get(name) for name in expected} == pytest.approx(expected, rel=1e-4)
            assert ("lam" in line) == any(lams)
            losses, nlls, lams = [], [], []
    assert tossed == {0, 5} if coin == "update" else tossed - {0, 5}
    for name, soft in ("val_soft", True), ("val_plain", False):
        total = 0
        for i, (ids, prompt_len) in enumerate(val):
            t, keys = 0.1 + 0.6 * i / 2, [(cfg.seed, word, i) for word in ("val n_end", "val q")]
            x0, xt = oracles.masked_dialogue(ids, prompt_len, t, 261, 256,
                                             *(oracles.rng(*key) for key in keys))
            total += loss(reference(x0[None], xt[None], soft), t, 1).item()
        assert line[name] == pytest.approx(total / 3, rel=1e-4)
    for ours, theirs in zip(trained(model), etas, strict=True):
        # Steps are up to 1e-2. The rounding of tiny gradients moves a weight by 2.6e-6.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def parts(folder):
    """(step, all tensors of a run: what is trained, and Adam's moments)"""
    ckpt = checkpoint.load(os.path.join(folder, "last.pt"))
    moments = [t for s in ckpt["optimizer"]["state"].values() for t in s.values()]
    return ckpt["step"], [*ckpt["model"].values(), *moments]


def logged(folder):
    lines = launch.read_jsonl(os.path.join(folder, "log.jsonl"))
    measured = ("tokens_per_s", "seconds")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]


def adapter_is_of_the_checkpoint(folder):
    state = checkpoint.load(folder + "/last.pt")["model"]
    saved = checkpoint.read_safetensors(folder + "/last/adapter_model.safetensors")
    layer = "model.layers.1.self_attn.v_proj.lora_B"
    return saved[f"base_model.model.{layer}.weight"].equal(state[f"net.{layer}"])


def test_a_run_killed_three_times_is_the_uninterrupted_one_and_its_adapter_follows(cfg):
    """Killed before a save, by SIGTERM, and between last.pt and last/. Bit for bit."""
    cfg = replace(cfg, log_every=3)
    whole = replace(cfg, out=cfg.out + "-whole")
    finetune(whole)
    with dying(checkpoint, "save", 2):
        finetune(cfg)
    assert parts(cfg.out)[0] == 2 and adapter_is_of_the_checkpoint(cfg.out)
    cfg = replace(cfg, resume="auto")
    twice = lambda: (sigterm(), sigterm())  # as torchrun sends it
    with dying(torch.optim.AdamW, "step", 1, twice) as stopped:
        finetune(cfg)
    assert stopped.value.code == 128 + signal.SIGTERM and parts(cfg.out)[0] == 3
    with dying(ft, "save_adapter", 3):  # after last/ at its start, and best/
        finetune(cfg)
    assert parts(cfg.out)[0] == 4 and not adapter_is_of_the_checkpoint(cfg.out)
    finetune(cfg)
    assert adapter_is_of_the_checkpoint(cfg.out)
    assert all(map(torch.equal, parts(cfg.out)[1], parts(whole.out)[1]))
    assert logged(cfg.out) == logged(whole.out)


@pytest.mark.parametrize("p_sm", [0.5, 0.0])
def test_best_is_the_adapter_of_the_lowest_loss_with_feedback(cfg, monkeypatch, p_sm):
    """Also over a resume. Without feedback, the worst of these would be the best."""
    cfg = replace(cfg, p_sm=p_sm, steps=5, warmup=0.0, eval_every=1, save_every=9)
    losses, seen = [3.0, 4.0, 2.0, 2.5, 2.2], []

    def adapter(model):
        state = {name: p.clone() for name, p in dora.adapter_state(model.net).items()}
        return state, model.sm and model.sm.omega[0].item()

    def best_is_the_best(evaluations):
        best = Dream.load(cfg.model)
        omega = load_adapter(best, cfg.out + "/best")
        found = dora.adapter_state(best), omega and omega["omega_s"]
        want = seen[losses.index(min(losses[:evaluations]))]
        assert len(seen) == evaluations and found[1] == want[1]
        torch.testing.assert_close(found[0], want[0], rtol=0, atol=0)

    def evaluate(model, *_):
        if seen:
            best_is_the_best(len(seen))
        seen.append(adapter(model))
        loss = losses[len(seen) - 1]
        return {"val_soft": loss, "val_plain": 9 - loss} if p_sm else {"val_plain": loss}
    monkeypatch.setattr(ft, "evaluate", evaluate)
    with dying(torch.optim.AdamW, "step", 4, sigterm):
        finetune(cfg)
    best_is_the_best(3)  # the fourth would delay the stop, and is made up
    for _ in range(2):
        finetune(replace(cfg, resume=True))
    best_is_the_best(5)
    assert [line["best"] for line in logged(cfg.out)] == [3.0, 3.0, 2.0, 2.0, 2.0]


def test_two_ranks_are_one(cfg):
    finetune(cfg)
    two = replace(cfg, out=cfg.out + "-two")
    flags = [f"--{name}={v}" for name, v in vars(two).items() if v != getattr(Config, name)]
    conftest.torchrun("--", "finetune_dream.py", *flags, check=True)  # else --r would be torchrun's
    (step, one), (step_two, two) = parts(cfg.out), parts(cfg.out + "-two")
    assert step == step_two == 4
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    for a, b in zip(logged(cfg.out), logged(cfg.out + "-two"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_run_and_adapter_know_their_model_and_dialogues_wherever_they_are(cfg, tmp_path):
    cfg = replace(cfg, steps=0, epochs=0.19)
    finetune(cfg)  # 2.8 updates, so 2, which the file must not say: it depends on the filters
    assert checkpoint.load(cfg.out)["step"] == 2
    for name in "last", "best":
        assert launch.read_json(f"{cfg.out}/{name}/finetune.json")["steps"] == 0
    moved, data = str(tmp_path / "moved"), str(tmp_path / "moved.jsonl")
    shutil.copytree(cfg.model, moved)
    shutil.copy(cfg.data, data)
    cfg = replace(cfg, model=moved, data=data, resume=True)
    finetune(cfg)
    assert load_adapter(Dream.load(moved, dtype=torch.bfloat16), cfg.out + "/last")["k"] == 1
    state = {name: t.clone() for name, t in Dream.load(moved).state_dict().items()}
    state["model.layers.0.mlp.up_proj.weight"] += 0.01  # another model of the same shapes
    checkpoint.write_safetensors(f"{moved}/model.safetensors", state)
    refused("other settings: base.*, steps.*the cosine", finetune, replace(cfg, steps=4))
    refused("of the one that was in", load_adapter, Dream.load(moved), cfg.out + "/last")


def test_adapter_folder_brings_back_dora_and_every_omega(tiny_dream, tmp_path):
    """A saturated ω, and the dense head."""
    dream = recorded_adapter(Dream.load(tiny_dream), alpha=40)
    full = SoftMask(194, 2, **HEAD)
    full.raw_s.data.fill_(20.0)
    assert full.omega[0] == 1  # in fp32
    for sm in (full, SoftMask(194, None, **HEAD, tau=1.3)):
        ft.save_adapter(str(tmp_path), dream, sm, Config(alpha=40))
        back = Dream.load(tiny_dream)
        omega = SoftMask(**load_adapter(back, tmp_path))
        torch.testing.assert_close(omega.omega, sm.omega, rtol=0, atol=1e-4)
        assert omega.k == sm.k and (sm.k or abs(omega.tau - sm.tau) < 1e-5)
        os.remove(tmp_path / "transparency_config.json")
    torch.testing.assert_close(dora.adapter_state(back), dora.adapter_state(dream), rtol=0, atol=0)
    assert {layer.s for layer in dora.layers(back).values()} == {40 / 16}
    assert load_adapter(Dream.load(tiny_dream), tmp_path) is None  # no ω is left


def test_bf16_weights_stay_bf16_on_cuda_or_cpu_and_all_that_is_trained_is_fp32(cfg, tmp_path):
    folder = shutil.copytree(cfg.model, tmp_path / "model")
    state = Dream.load(cfg.model, dtype=torch.bfloat16).state_dict()
    checkpoint.write_safetensors(folder / "model.safetensors", state)
    cfg = replace(cfg, model=str(folder), device="auto", p_sm=1.0, warmup=0.0)
    model, start = finetune(cfg), ft.model_of(cfg, launch.machine("cpu"))
    assert model.net.table.dtype == torch.bfloat16
    for ours, before in zip(trained(model), trained(start), strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours.cpu(), before)
    for dtype in torch.float32, torch.bfloat16:
        words = dict(model=cfg.model, device="cpu", dtype=str(dtype).removeprefix("torch."))
        tuned = ft.model_of(Config(**words), launch.machine("cpu", words["dtype"])).net
        assert tuned.table.dtype == load_for_decoding(Decoding(**words))[0].table.dtype == dtype


def test_a_batch_is_shared_by_all_ranks_and_k_is_below_the_vocabulary(cfg):
    for message, wrong in ("multiple of the 3", cfg), ("below the 264", replace(cfg, k=264)):
        refused(message, launch.check_training, wrong, 264, 3)


def test_a_binary_run_takes_the_place_of_another_only_when_asked(cfg):
    """It leaves no ω of the other run, even if it is killed."""
    finetune(replace(cfg, steps=2))
    cfg = replace(cfg, p_sm=0.0)
    refused("already holds a run", finetune, cfg)
    with dying(checkpoint, "save", 1):
        finetune(replace(cfg, overwrite=True))
    assert not {"last", "last.pt"} & {*os.listdir(cfg.out)}
    finetune(replace(cfg, resume="auto"))
    os.rename(cfg.out + "/last.pt", cfg.out + "/mine.pt")
    refused("already holds a run without last.pt", finetune, cfg)
    assert os.listdir(cfg.out + "/best") == os.listdir(cfg.out + "/last")
    assert load_adapter(Dream.load(cfg.model), cfg.out + "/best") is None
