"""finetune_dream.py against Alg. 1, App. B.2, and recorded numbers."""

import json
import shutil
import signal
from collections import Counter, defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import dora
import finetune_dream as ft
import launch
import oracles
from conftest import digest, dying, gen, logged, recorded_adapter, refused, sigterm, torchrun
from dream import Dream, Tokenizer, load_adapter, read_safetensors, write_safetensors
from finetune_dream import Config, TwoPassDream, finetune, mask_response, objective
from sample_dream import Decoding, load_for_decoding
from softmask import SoftMask

said = lambda *turns: {"messages": [{"role": role, "content": text} for role, text in turns]}
encoded = lambda record, tok: ft.encode_chat(ft.as_messages(record), tok)
files = lambda folder: {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The settings of an uninterrupted run, which saves after 2, 4 and 5 and measures after 3, 5"""
    cfg = Config(
        model=tiny[0], data=tiny[1], out=str(tmp_path_factory.mktemp("whole")), steps=5, n_val=3,
        eta_bb=1e-2, warmup=0.25, omega_s=0.3, omega_a=2.0, omega_b=-4.5, log_every=1,
        save_every=2, eval_every=3, r=4, alpha=6, device="cpu")
    finetune(cfg)
    return cfg


@pytest.fixture
def cfg(whole, tmp_path):
    return replace(whole, out=str(tmp_path / "out"))


def test_recorded_loss_and_all_gradients(tiny_dream, recorded):
    xt, labels = recorded["c/input_ids"], recorded["c/labels"]
    x0 = torch.where(labels == -100, xt, labels)
    for name, k in (("binary", None), ("k3", 3)):
        dream = recorded_adapter(Dream.load(tiny_dream))
        model = TwoPassDream(dream, SoftMask(194, k, 0.4, 2.0, -2.5), 194)
        # The recorded batch of two has one t and one mean.
        nll = model(x0, xt, soft=name == "k3")
        loss = objective(nll, 1 / recorded["c/dsigma"].item(), "authors", 1)
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
    padded = ft.pad_with_eos(c("b1_raw0"), 190, gen(1231))
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


def test_response_is_the_last_assistant_turn_and_the_prompt_is_as_in_decoding(tiny, tmp_path):
    model = shutil.copytree(tiny[0], tmp_path / "model")
    vocab = launch.read_json(model / "vocab.json")
    (model / "vocab.json").write_text(json.dumps(vocab | {"ĊĊ": 262}))
    tok = Tokenizer(model)
    turns = ("system", "a"), ("user", "a"), ("assistant", "a"), ("system", "a"), ("user", "b")
    ids, prompt_len = encoded(said(*turns, ("assistant", "\nd"), ("user", "e")), tok)
    prompt = tok.encode(tok.chat(said(*turns)["messages"]), special=True)
    assert (ids[:prompt_len], tok.decode(ids[prompt_len:])) == (prompt, "\nd<|im_end|>\n")
    assert len(tok.encode(tok.decode(ids), special=True)) == len(ids) - 1  # \n\n is one token


BAD = ["prompt", {"prompt": "a"}, {"messages": None}, {"messages": ["a"]}, said(("user", "a")),
       {"prompt": "a", "response": 10**6 * "\t" + "b"},  # tiktoken panics
       {"prompt": "a", "response": "\ud83d"}, said(("tool", "a"), ("assistant", "b")),
       {"messages": [{"role": "assistant", "content": "b", "weight": 0}]},
       said(("user", None), ("assistant", "b"))]


def test_another_form_is_refused_in_a_file_and_dropped_from_the_hub(tiny, tmp_path):
    tok = Tokenizer(tiny[0])
    cfg = Config(data=str(tmp_path / "own.jsonl"))
    rows = [said(("HUMAN", "a"), ("ASSISTANT", "b"), ("HUMAN", "c")),
            said(("SYSTEM", "s"), ("assistant", "b")), *BAD]
    counts = Counter()
    found = [{"messages": messages} for _, messages in ft.hub_dialogues(rows, counts)]
    assert found == [said(("user", "a"), ("assistant", "b")),
                     said(("system", "s"), ("assistant", "b"))]
    assert counts == {"of another form": len(BAD)}
    for bad in BAD:
        Path(cfg.data).write_text(f"{json.dumps(found[0])}\n{json.dumps(bad)}")
        refused("own.jsonl, record 2: ", ft.load_dialogues, cfg, tok, 261)


def test_both_forms_are_read_and_app_b2_drops_the_rest(tiny, tmp_path):
    """All twice: a dialogue is in one part only."""
    tok = Tokenizer(tiny[0])
    cfg = Config(max_length=200, n_val=1, seed=9, data=str(tmp_path / "own.jsonl"))
    talk = lambda prompt="a", answer="abc": {"prompt": prompt, "response": answer}
    room = 200 - len(encoded(talk(""), tok)[0])
    same = said(("user", "0"), ("assistant", "abc"), ("user", "c"), ("system", "d"))
    kept = [same | {"id": 1}, talk("1"), talk("a" * room)]
    dropped = {
        "response under 5 tokens": [talk(answer="ab")],  # abc: 3 bytes, <|im_end|>, line break
        "over 200 tokens": [talk("a" * (room + 1)), talk(answer="a" * 200)],
        "tool calls": [talk(answer="abc</tool_call>"), talk("<tool_call>")],
        "[MASK] in the text": [talk("a <|mask|>")]}
    records = 2 * [*kept, *sum(dropped.values(), [])]
    launch.append_jsonl(cfg.data, *records)
    train, val, left_out = ft.load_dialogues(cfg, tok, 261)
    train, val = ([(ids.tolist(), n) for ids, n in part] for part in (train, val))
    expected, [held_out] = oracles.split([encoded(record, tok) for record in records], 1, cfg.seed)
    kept = [encoded(talk("0"), tok), *(encoded(record, tok) for record in kept[1:])]
    assert val == [held_out] and held_out in kept
    assert train == [pair for pair in expected if pair in kept and pair != held_out]
    assert {*left_out.split("; ")} == {
        "not read: id", "dropped: also held out (1)",
        *(f"dropped: {why} ({2 * len(talks)})" for why, talks in dropped.items())}


def test_the_papers_corpora(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs datasets: would draw from its corpora")
    part = lambda *ids: datasets.Dataset.from_dict({"messages": [
        said(("user", str(i)), ("assistant", "b"))["messages"] for i in range(*ids)]})
    hub = {name: part(400) for name in ft.HUB.values()} | {
        "HuggingFaceTB/smoltalk": datasets.DatasetDict(train=part(400, 500), test=part(500, 505))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: hub[name])
    read = lambda **words: [{int(messages[0]["content"]) for _, messages in part}
                            for part in ft.read_hub(Config(**words), Counter())]
    (train, val), (coding, held_out) = read(data="mix", n_train=300), read(data="coding", n_val=3)
    assert len(train) == 300 and min(train) < 20 and 480 < max(train) < 500 and not train & val
    assert len(val) == 4 + 5 and {*range(500, 505)} < val
    assert len(coding) == 396 and len(held_out) == 3 and not coding & held_out


@pytest.mark.parametrize("kind, k, coin", [
    ("authors", 1, "update"), ("paper", 3, "update"), ("authors", None, "dialogue")])
def test_four_updates_are_adam_by_hand(cfg, kind, k, coin):
    """Of 5 dialogues each, over three epochs, with a line after 1, 2 and 4, and an evaluation."""
    cfg = replace(cfg, loss=kind, k=k, coin=coin, clip=0.7, p_sm=0.4, warmup=0.2, batch_size=5,
                  n_train=9, b_l=0.1, b_h=0.7, eta_sm=3e-2, steps=4, log_every=2, eval_every=4)
    model, tok = finetune(cfg), Tokenizer(cfg.model)
    dialogues = [encoded(record, tok) for record in launch.read_jsonl(cfg.data)]
    dialogues, val = oracles.split(dialogues, cfg.n_val, cfg.seed)
    loss = lambda nll, t, n: nll.mean() / t if kind == "authors" else nll.sum() / t / n
    dream, sm = Dream.load(cfg.model), SoftMask(261, k, 0.3, 2.0, -4.5)
    dora.attach(dream, ft.TARGETS, 4, 6, oracles.rng(cfg.seed, "adapter"))
    reference = TwoPassDream(dream, sm, 261)
    theta = list(ft.trained(dream).values())
    etas = dict.fromkeys(theta, cfg.eta_bb) | dict.fromkeys(sm.parameters(), cfg.eta_sm)
    moments, tossed, since, lines = {}, set(), defaultdict(list), iter(logged(cfg.out))
    for step, lr in enumerate([0, 1, 0.75, 0.25]):  # warm-up of ceil(0.2 · 4), cosine over three
        softs = []
        for x0, xt, t, soft in oracles.dialogues_of_update(dialogues[:9], step, mask_id=261,
                                                           eos=256, **asdict(cfg)):
            softs.append(soft)
            nll = reference(x0, xt, soft)
            loss(nll, t, 5).backward()
            since["loss"].append(loss(nll, t, 1).item())
            since["ce_per_mask"] += nll.tolist()
            since["lam"] += [reference.lam.item()] * soft
        tossed.add(sum(softs))
        have = list(etas) if any(softs) else theta  # ω stays as it is in a binary update
        norm = sum(p.grad.square().sum() for p in have).sqrt().item()
        for p in have:
            oracles.adam(p, p.grad * 0.7 / (norm + 1e-6), etas[p] * lr, moments)
            p.grad = None
        if step != 2:
            line = next(lines)
            expected = {name: sum(found) / len(found) for name, found in since.items() if found}
            expected |= {"eta_bb": lr * cfg.eta_bb, "grad_norm": norm}
            assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-4)
            since.clear()
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
    """(step, all tensors of a run: what is trained, Adam's moments, and both adapters)"""
    ckpt = torch.load(f"{folder}/last.pt")
    states = [ckpt["model"], *ckpt["optimizer"]["state"].values()]
    states += map(read_safetensors, sorted(Path(folder).glob("*/*.safetensors")))
    return ckpt["step"], [t for state in states for t in state.values()]


@pytest.mark.parametrize("module, name, at, then", [
    *[(torch.optim.AdamW, "step", n, [lambda: (sigterm(), sigterm())]) for n in (1, 3)],
    *[(torch.optim.AdamW, "step", 3, []), (ft, "evaluate", 1, []), (launch.Log, "write", 3, [])],
    # last.pt, softmask.pt of last/, last.pt, softmask.pt of best/ and of last/, last.pt
    *[(launch, "save", n, []) for n in range(1, 7)]])
def test_a_run_that_ends_at_any_moment_is_the_whole_one(whole, cfg, module, name, at, then):
    """torchrun sends two SIGTERMs. An evaluation is due at the second stop, and made first."""
    with dying(module, name, at, *then) as stopped:
        finetune(cfg)
    if then:
        assert stopped.value.code == 128 + signal.SIGTERM and parts(cfg.out)[0] == at
        assert logged(cfg.out) == logged(whole.out)[:at]
    finetune(replace(cfg, resume=True))
    assert all(map(torch.equal, parts(cfg.out)[1], parts(whole.out)[1]))
    assert logged(cfg.out) == logged(whole.out)


def test_a_run_without_an_evaluation_has_no_best_adapter(cfg, capsys):
    finetune(replace(cfg, steps=1, eval_every=0))
    out = capsys.readouterr().out
    assert f"--adapter={cfg.out}/last --chat\n" in out and "; none dropped\n" in out


@pytest.mark.parametrize("p_sm", [0.5, 0.0])
def test_best_is_the_adapter_of_the_lowest_loss_with_feedback(cfg, monkeypatch, p_sm):
    """Also over a resume. Without feedback, the worst of these would be the best."""
    cfg = replace(cfg, p_sm=p_sm, batch_size=2, warmup=0.0, eval_every=1, save_every=9)
    losses = iter([{"val_soft": loss, "val_plain": 9 - loss} if p_sm else {"val_plain": loss}
                   for loss in (3.0, 4.0, 2.0, 2.5, 2.2)])
    monkeypatch.setattr(ft, "evaluate", lambda *_: next(losses))
    with dying(torch.optim.AdamW, "step", 3, sigterm):  # which stops after update 3
        finetune(cfg)
    third = files(f"{cfg.out}/last")
    finetune(replace(cfg, resume=True))
    assert files(f"{cfg.out}/best") == third != files(f"{cfg.out}/last")
    assert [line["best"] for line in logged(cfg.out)] == [3.0, 3.0, 2.0, 2.0, 2.0]


def test_two_ranks_are_one_also_with_a_soft_mask_of_ones_own(cfg, mine):
    """From finetuning to decoding, by flags alone"""
    one = replace(cfg, code=mine, p_sm=0.6)
    two = replace(one, out=cfg.out + "-two")
    torchrun("--", "finetune_dream.py", cfg=two, check=True)  # else --r would be torchrun's
    finetune(one)
    torch.testing.assert_close(parts(one.out), parts(two.out), rtol=1e-5, atol=2e-6)
    assert logged(one.out) == [pytest.approx(line, rel=1e-5) for line in logged(two.out)]
    refused("SoftMask .*there", finetune, replace(two, resume=True, code="", steps=6))
    decoding = Decoding(cfg.model, f"{two.out}/last", device="cpu")
    refused("--code=FILE.py", load_for_decoding, decoding)
    theirs = launch.read_json(f"{two.out}/last/transparency_config.json")
    assert theirs == {"transparency_alg": "SoftMask"}  # which their code does not know
    *_, sm = load_for_decoding(replace(decoding, code=mine))
    assert torch.equal(sm.bias, torch.load(f"{two.out}/last.pt")["model"]["sm.bias"])
    untrained = replace(decoding, adapter="", code=mine, omega_s=0.3, omega_a=1.0, omega_b=-3.0)
    *_, sm = load_for_decoding(untrained)
    assert sm.k == 3 and not sm.bias.any()
    refused("--code needs a soft mask", load_for_decoding, replace(untrained, **dict.fromkeys(
        ("omega_s", "omega_a", "omega_b"))))


def test_bf16_weights_stay_bf16_on_cuda_or_cpu_and_all_that_is_trained_is_fp32(cfg, tmp_path):
    """The run goes on wherever its model is, in any dtype, but not with another of its shapes."""
    folder = shutil.copytree(cfg.model, tmp_path / "model")
    state = Dream.load(cfg.model, dtype=torch.bfloat16).state_dict()
    write_safetensors(folder / "model.safetensors", state)
    half = replace(cfg, model=str(folder), device="auto", p_sm=1.0, warmup=0, steps=0, epochs=0.19)
    model, before = finetune(half), ft.trained(ft.model_of(half, launch.machine("cpu")))
    assert model.net.table.dtype == torch.bfloat16
    for name, p in ft.trained(model).items():
        assert p.dtype == torch.float32 and not torch.equal(p.cpu(), before[name])
    finetune(replace(half, model=cfg.model, resume=True))
    assert torch.load(f"{cfg.out}/last.pt")["step"] == 2  # of 2.8
    state["model.layers.0.mlp.up_proj.weight"] += 0.01
    write_safetensors(folder / "model.safetensors", state)
    refused("other settings: base", finetune, replace(half, resume=True))
    refused("of the one that was in", load_adapter, Dream.load(folder), cfg.out + "/last")
