"""finetune_dream.py against Alg. 1, App. B.2, and recorded numbers."""

import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import checkpoint
import chunks
import dora
import finetune_dream as ft
import launch
import oracles
from conftest import digest, dying, gen, plain_omega, recorded_adapter, refused, sigterm, torchrun
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


@pytest.mark.parametrize("k, soft", [(None, True), (1, True), (3, True), (1, False)])
def test_chunks_of_rows_equal_the_dense_algorithm(tiny_dream, batch, monkeypatch, k, soft):
    monkeypatch.setattr(chunks, "CPU_LOGITS", 4 * 200 * 3)  # bytes of 3 rows
    (x0, xt, _), model = batch, two_pass(tiny_dream, k, tau=1.3)
    net = model.net
    dense = oracles.dense_nll(lambda emb, t: net.lm_head(net.trunk(emb)[0]).roll(1, 1), net.table,
                              x0, xt, torch.ones(2), 194, plain_omega(model.sm) if soft else None)
    parts = model(x0, xt, soft).double().split((xt == 194).sum(1).tolist())
    for found, expected in zip(parts, dense):
        torch.testing.assert_close(found.sum(), expected, rtol=1e-5, atol=0)


def test_recorded_loss_and_all_gradients(tiny_dream, recorded, batch):
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
    assert t + ft.MASK_FLOOR * (1 - t) == pytest.approx(c("b1_p_mask").item(), rel=1e-6)
    assert torch.equal(mask_response(padded, 24, t, 194, gen(1231)), c("b1_input_ids"))
    for name in ("b2", "b2t"):
        xt, labels, t = c(name + "_input_ids"), c(name + "_labels"), 1 / c(name + "_dsigma").item()
        x0, n = torch.where(labels == -100, xt, labels), c(name + "_prompt_lengths")[:, None]
        assert torch.equal(mask_response(x0, n, t, 194, gen(1231)), xt)
    # t < 0 leaves only the forced mask.
    x0, n, xt = c("alo_in")[:1], c("alo_prompt")[0].item(), c("alo_ids")[:1]
    draws = [mask_response(x0, n, -1.0, 194, gen(seed)) for seed in range(500)]
    assert {(x == 194).nonzero()[:, 1].item() for x in draws} == {*range(n, x0.shape[1])}
    assert any(torch.equal(x, xt) for x in draws)


def said(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_response_is_the_last_assistant_turn_and_the_prompt_is_as_in_decoding(tiny, tmp_path):
    vocab = [*byte_characters(), "ĊĊ"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 257, "<|im_end|>": 258}')
    shutil.copy(f"{tiny[0]}/config.json", tmp_path)
    tok = Tokenizer(tmp_path)
    ids, prompt_len = ft.encode_chat(said(("HUMAN", "a"), ("ASSISTANT", "b"), ("user", "c"),
                                          ("assistant", "\nd"), ("user", "e")), tok)
    prompt = tok.chat(said(("user", "a"), ("assistant", "b"), ("user", "c"))["messages"])
    assert tok.decode(ids) == prompt + "\nd<|im_end|>\n"
    assert ids[:prompt_len] == tok.encode(prompt, special=True)
    assert len(tok.encode(tok.decode(ids), special=True)) == len(ids) - 1  # \n\n is one token


def test_dialogues_in_the_formats_that_people_have(tmp_path):
    path, ask = tmp_path / "own.json", "a\n\nc"
    pair = said(("user", ask), ("assistant", "b"))
    turns = [{"from": turn["role"], "value": turn["content"]} for turn in pair["messages"]]
    alpaca = {"instruction": ask, "output": "b"}
    records = [pair, {"conversations": turns}, {"prompt": ask, "response": "b"}, alpaca,
               alpaca | {"input": ""}, alpaca | {"instruction": "a", "input": "c"}]
    lines = "\n\n".join(map(json.dumps, records))
    for text in lines, "\ufeff" + lines, json.dumps(records, indent=1):
        path.write_text(text, encoding="utf-8")
        train, val = ft.read_lines(Config(data=str(path)))
        assert train == 6 * [pair] and not val
    for n, wrong in ((1, '{"text": "a"}'), (1, "[1"), (2, json.dumps([pair, 3])), (2, "\n3"),
                     (3, "\n\n" + lines[:20]), (1, '{"messages": [{"role": "user"}]}')):
        path.write_text(wrong)
        refused(f'own.json, line {n}: .*"messages"', ft.read_lines, Config(data=str(path)))


def test_the_papers_corpora(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="would draw from numbers instead of texts")
    part = lambda *ids: datasets.Dataset.from_dict({"messages": range(*ids)})
    hub = {name: part(400) for name in ft.HUB.values()} | {
        "HuggingFaceTB/smoltalk": datasets.DatasetDict(train=part(400, 500), test=part(500, 505))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: hub[name])
    read = lambda **words: [{*part["messages"]} for part in ft.read_hub(Config(**words))]
    (train, val), (coding, held_out) = read(data="mix", n_train=300), read(data="coding", n_val=3)
    assert len(train) == 300 and min(train) < 20 and 480 < max(train) < 500 and not train & val
    assert len(val) == 4 + 5 and {*range(500, 505)} < val
    assert len(coding) == 396 and len(held_out) == 3 and not coding & held_out


def test_the_filters(tiny, tmp_path):
    tok, cfg = Tokenizer(tiny[0]), Config(max_length=200, data=str(tmp_path / "own.jsonl"))
    talk = lambda prompt, answer: said(("user", prompt), ("assistant", answer))
    overhead = len(ft.encode_chat(talk("", "abc"), tok)[0])
    kept = talk("a", "abc"), talk("a" * (200 - overhead), "abc")  # 3 bytes, <|im_end|>, line break
    dropped = {"response under 5 tokens": (talk("a", "ab"),),
               "no answer by assistant, or a non-text turn": (talk("a", None), said(("bot", "b"))),
               "over 200 tokens": (talk("a" * (201 - overhead), "abc"),),
               "tool calls": (talk("a", "abc</tool_call>"),),
               "[MASK] in the text": (talk("a <|mask|>", "abc"),)}
    found, why = ft.encode_all([*kept, *sum(dropped.values(), ())], cfg, tok, 261)
    assert [(ids.tolist(), n) for ids, n in found] == [ft.encode_chat(talk, tok) for talk in kept]
    assert why == {reason: len(records) for reason, records in dropped.items()}
    assert len({ft.digest_of([(ids, n)]) for ids, _ in found for n in (3, 4)}) == 4
    Path(cfg.data).write_text("\n".join(30 * [*map(json.dumps, sum(dropped.values(), ()))]))
    refused("dropped: .*60 no answer by", ft.load_dialogues, replace(cfg, n_val=99), tok, 261)


@pytest.mark.parametrize("kind, k, coin", [
    ("authors", 1, "update"), ("paper", 3, "update"), ("authors", None, "dialogue")])
def test_four_updates_are_adam_by_hand(cfg, kind, k, coin):
    """Of 5 dialogues each, over three epochs, with a line after 1, 2 and 4, and an evaluation."""
    cfg = replace(cfg, loss=kind, k=k, coin=coin, clip=0.7, p_sm=0.4, warmup=0.2, batch_size=5,
                  n_train=9, b_l=0.1, b_h=0.7, eta_sm=3e-2, log_every=2)
    model, tok = finetune(cfg), Tokenizer(cfg.model)
    dialogues = [ft.encode_chat(record, tok) for record in launch.read_jsonl(cfg.data)]
    dialogues, val = oracles.split(dialogues, cfg.n_val, cfg.seed)
    loss = lambda nll, t, n: nll.mean() / t if kind == "authors" else nll.sum() / t / n
    dream, sm = Dream.load(cfg.model), SoftMask(261, k, 0.3, 2.0, -4.5)
    dora.attach(dream, ft.TARGETS, 4, 6, oracles.rng(cfg.seed, "adapter"))
    reference = TwoPassDream(dream, sm, 261)
    theta = list(ft.trained(dream).values())
    etas = dict.fromkeys(theta, cfg.eta_bb) | dict.fromkeys(sm.parameters(), cfg.eta_sm)
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
        have = list(etas) if any(softs) else theta  # ω stays as it is in a binary update
        norm = sum(p.grad.square().sum() for p in have).sqrt().item()
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
        for i in range(3):
            t, rngs = 0.1 + 0.3 * i, (oracles.rng(cfg.seed, f"val {w}", i) for w in ("n_end", "q"))
            x0, xt = oracles.masked_dialogue(*val[i], t, 261, 256, *rngs)
            total += loss(reference(x0[None], xt[None], soft), t, 1).item()
        assert line[name] == pytest.approx(total / 3, rel=1e-4)
    # Steps are up to 1e-2. The rounding of tiny gradients moves a weight by 2.6e-6.
    torch.testing.assert_close([*ft.trained(model).values()], [*etas], rtol=0, atol=5e-6)


def parts(folder):
    """(step, all tensors of a run: what is trained, and Adam's moments)"""
    ckpt = checkpoint.load(os.path.join(folder, "last.pt"))
    moments = [t for s in ckpt["optimizer"]["state"].values() for t in s.values()]
    return ckpt["step"], [*ckpt["model"].values(), *moments]


def logged(folder):
    lines = launch.read_jsonl(f"{folder}/log.jsonl")
    return [line | {"tokens_per_s": 0, "seconds": 0} for line in lines]  # both are measured


def adapter_is_of_the_checkpoint(folder):
    state = checkpoint.load(folder + "/last.pt")["model"]
    saved = checkpoint.read_safetensors(folder + "/last/adapter_model.safetensors")
    layer = "model.layers.1.self_attn.v_proj.lora_B"
    return saved[f"base_model.model.{layer}.weight"].equal(state[f"net.{layer}"])


def test_a_run_killed_three_times_is_the_uninterrupted_one_and_its_adapter_follows(cfg):
    """Killed before a save, by torchrun's two SIGTERMs, and between last.pt and last/."""
    cfg = replace(cfg, log_every=3)
    whole = replace(cfg, out=cfg.out + "-whole")
    finetune(whole)
    with dying(checkpoint, "save", 2):
        finetune(cfg)
    assert parts(cfg.out)[0] == 2 and adapter_is_of_the_checkpoint(cfg.out)
    cfg = replace(cfg, resume="auto")
    with dying(torch.optim.AdamW, "step", 1, lambda: (sigterm(), sigterm())) as stopped:
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
def test_best_is_the_adapter_of_the_lowest_loss_with_feedback(cfg, tmp_path, monkeypatch, p_sm):
    """Also over a resume. Without feedback, the worst of these would be the best."""
    cfg = replace(cfg, p_sm=p_sm, steps=5, warmup=0.0, eval_every=1, save_every=9)
    losses, seen = [3.0, 4.0, 2.0, 2.5, 2.2], []
    files = lambda folder: {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def evaluate(model, val, cfg, here):
        ft.save_adapter(str(tmp_path / "now"), model.net, model.sm, cfg)
        seen.append(files(tmp_path / "now"))
        loss = losses[len(seen) - 1]
        return {"val_soft": loss, "val_plain": 9 - loss} if p_sm else {"val_plain": loss}
    monkeypatch.setattr(ft, "evaluate", evaluate)
    with dying(torch.optim.AdamW, "step", 4, sigterm):
        finetune(cfg)
    assert len(seen) == 3 and files(f"{cfg.out}/best") == seen[2]  # no evaluation delays the stop
    for _ in range(2):
        finetune(replace(cfg, resume=True))
    assert len(seen) == 5 and files(f"{cfg.out}/best") == seen[2]
    assert [line["best"] for line in logged(cfg.out)] == [3.0, 3.0, 2.0, 2.0, 2.0]


def test_two_ranks_are_one(cfg):
    finetune(cfg)
    two = replace(cfg, out=cfg.out + "-two")
    flags = (f"--{name}={v}" for name, v in vars(two).items() if v != getattr(Config, name))
    torchrun("--", "finetune_dream.py", *flags, check=True)  # else --r would be torchrun's
    torch.testing.assert_close(parts(cfg.out), parts(two.out), rtol=1e-5, atol=2e-6)
    for a, b in zip(logged(cfg.out), logged(two.out), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_run_and_adapter_know_their_model_and_dialogues_wherever_they_are(cfg, tmp_path):
    cfg = replace(cfg, steps=0, epochs=0.19)
    finetune(cfg)  # 2.8 updates, so 2, which the file must not say: it depends on the filters
    assert checkpoint.load(cfg.out)["step"] == 2
    for name in "last", "best":
        assert launch.read_json(f"{cfg.out}/{name}/finetune.json")["steps"] == 0
    moved = shutil.copytree(cfg.model, str(tmp_path / "moved"))
    data = shutil.copy(cfg.data, str(tmp_path / "moved.jsonl"))
    cfg = replace(cfg, model=moved, data=data, resume=True)
    finetune(cfg)
    assert load_adapter(Dream.load(moved, dtype=torch.bfloat16), cfg.out + "/last")["k"] == 1
    state = {name: t.clone() for name, t in Dream.load(moved).state_dict().items()}
    state["model.layers.0.mlp.up_proj.weight"] += 0.01  # another model of the same shapes
    checkpoint.write_safetensors(f"{moved}/model.safetensors", state)
    refused("other settings: base.*, steps.*the cosine", finetune, replace(cfg, steps=4))
    refused("of the one that was in", load_adapter, Dream.load(moved), cfg.out + "/last")


def test_adapter_folder_brings_back_dora_and_every_omega(tiny_dream, tmp_path):
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
    assert launch.read_json(tmp_path / "adapter_config.json") == dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path="", use_dora=True, r=16,
        lora_alpha=40, lora_dropout=0, bias="none", target_modules=ft.TARGETS, inference_mode=True)
    assert load_adapter(Dream.load(tiny_dream), tmp_path) is None  # no ω is left


def test_bf16_weights_stay_bf16_on_cuda_or_cpu_and_all_that_is_trained_is_fp32(cfg, tmp_path):
    folder = shutil.copytree(cfg.model, tmp_path / "model")
    state = Dream.load(cfg.model, dtype=torch.bfloat16).state_dict()
    checkpoint.write_safetensors(folder / "model.safetensors", state)
    cfg = replace(cfg, model=str(folder), device="auto", p_sm=1.0, warmup=0.0)
    model, start = finetune(cfg), ft.trained(ft.model_of(cfg, launch.machine("cpu")))
    assert model.net.table.dtype == torch.bfloat16
    for name, p in ft.trained(model).items():
        assert p.dtype == torch.float32 and not torch.equal(p.cpu(), start[name])
    for dtype in torch.float32, torch.bfloat16:
        words = dict(model=cfg.model, device="cpu", dtype=str(dtype).removeprefix("torch."))
        tuned = ft.model_of(Config(**words), launch.machine("cpu", words["dtype"])).net
        assert tuned.table.dtype == load_for_decoding(Decoding(**words))[0].table.dtype == dtype


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
