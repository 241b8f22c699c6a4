# SPDX-License-Identifier: MIT
"""Finetune a Dream model with soft-masking: Alg. 1 on dialogues, for DoRA and ω.    §4.2, App. B.2

    python finetune_dream.py --model=DIR --data=yours.jsonl  # dialogues, see Config
    torchrun --nproc_per_node=8 finetune_dream.py --model=DIR --data=mix     # pip install datasets
    python finetune_dream.py iso-compute --model=DIR --data=coding           # half the updates
    python finetune_dream.py binary --model=DIR --data=mix                   # without feedback

The model learns to fill in the last answer of each dialogue. Alg. 1 sums the loss over a dialogue's
masks. The default here is the mean [code]. The folder `out` gets log.jsonl, last.pt to resume from,
and two adapters, best/ and last/, in a format that sample_dream.py, peft and the authors' code can
read. As in train.py, neither a resume nor the number of GPUs changes a random draw.

`finetune` is the whole run, from top to bottom, in the order of train.train.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import data
import dora
import launch
import mdlm
from data import rng
from dream import Dream, DreamConfig, Tokenizer, write_safetensors
from launch import Count, NotNegative, Positive, Refused, Share, Size, progress, write_text
from mdlm import TwoPass, own_class, sample_times
from softmask import SoftMask

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # where DoRA goes
HUB = {"mix": "allenai/tulu-3-sft-mixture", "coding": "inclusionAI/Ling-Coder-SFT"}
MASK_FLOOR = 1e-3  # [code], see mask_response


@dataclass
class Config:
    model: str = "Dream-v0-Instruct-7B"  # folder of a Dream, Dream-Coder or open-dCoder model
    # mix (Tulu 3 + SmolTalk), coding (Ling-Coder-SFT), or a .jsonl with one dialogue on each line:
    # {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, with
    # "system" allowed as a role, or {"prompt": "…", "response": "…"}. RECIPES.md converts others.
    data: str = ""              # the last answer of each dialogue is what the model learns
    out: str = "out/dream"
    resume: bool = False        # continue from last.pt in `out`, or start if there is none
    seed: int = 1231            # the authors' five runs use 1231 to 1235 [code]
    # dialogues
    n_train: Size = 300_000     # before filtering, which leaves 270k
    n_val: Count = 500          # held out; at most a tenth of a .jsonl
    max_length: int = 2048      # tokens of prompt and answer; longer ones are dropped: App. B.2
    min_response: int = 5       # tokens, App. B.2, counting the two that end the turn [code]
    # optimisation
    epochs: Positive = 1.0      # 33.5k updates of 8 dialogues in the paper
    steps: Count = 0            # updates (default: computed from epochs)
    batch_size: Size = 8        # dialogues per update, one per forward pass
    # authors: the mean over a dialogue's masks [code]; paper: the sum. Both are divided by t.
    loss: Literal["authors", "paper"] = "authors"
    eta_bb: NotNegative = 1e-5  # learning rate of DoRA
    eta_sm: NotNegative = 1e-2  # learning rate of ω, which has a long way to go
    warmup: Share = 0.03        # share of the updates; then a cosine down to 0
    clip: Positive = 7.0        # maximum gradient norm, over DoRA and ω together [code]
    r: Size = 16                # rank of DoRA (torchrun refuses --r: put -- before the script)
    alpha: Size = 16            # DoRA's update is scaled by alpha / r
    b_l: Positive = 0.2         # t ~ U(b_l, b_h)
    b_h: Share = 0.8
    # soft-masking
    p_sm: Share = 0.5           # probability of feedback, in two passes; 0: a binary model
    # One coin toss per update [ours], or one per dialogue [code]: then more updates train ω.
    coin: Literal["update", "dialogue"] = "update"
    k: int | None = 1           # as in Table 3; none: all tokens (App. C.8)
    omega_s: float = 1e-6       # close to 0 (App. B.2); this value: [code]
    omega_a: float = 10 / 1.5   # 10 over 1.5 nats: 95% of the entropies H are below 1.5, App. B.2
    omega_b: float = -0.75      # half of −1.5 nats
    # the machine
    checkpointing: bool = True  # saves memory, costs time: see dream.Dream
    device: str = "auto"        # cuda, else mps, else cpu
    dtype: launch.DType = "auto"  # of the frozen weights (default: as stored)
    log_every: Size = 10
    save_every: Size = 100      # writes last.pt, last/ and a line of the log
    eval_every: Count = 500     # may write best/; 0: never; the authors: 100 [code]
    code: str = ""              # a Python file to run first: its SoftMask replaces ours


PRESETS = {
    "iso-compute": dict(epochs=0.5, out="out/dream-iso-compute"),  # half the updates: §4, App. C.7
    "binary": dict(p_sm=0.0, out="out/dream-binary"),
}

# If one of these has changed, a run cannot be resumed. Other changes are only printed.
IDENTITY = "seed batch_size r alpha loss k b_l b_h omega_s omega_a omega_b".split()


def finetune(cfg):
    """Alg. 1 on dialogues, or the rest of it. Returns the TwoPassDream."""
    # ---- the machine
    machine = launch.machine(cfg.device)
    launch.join(machine)
    master = machine.rank == 0
    if cfg.code and not cfg.p_sm:
        raise Refused("--code does nothing with --p_sm=0: there is no soft mask")
    sm_class = launch.soft_mask_class(cfg.code)
    dream_cfg = DreamConfig.read(cfg.model)
    mask_id = dream_cfg.mask_token_id
    M = cfg.batch_size  # dialogues of an update, over all ranks
    if M % machine.world:
        raise Refused(f"--batch_size={M} is not a multiple of the {machine.world} ranks")
    if cfg.k and cfg.k > dream_cfg.vocab_size:
        raise Refused(f"--k={cfg.k} is more than all {dream_cfg.vocab_size} tokens")
    if cfg.b_l > cfg.b_h:
        raise Refused(f"--b_l={cfg.b_l} is above --b_h={cfg.b_h}")

    with launch.lock(cfg.out, master), launch.Stop() as stop:
        # ---- the data
        last = f"{cfg.out}/last.pt"
        # Before the dialogues, which take minutes to read
        resuming = launch.resumes(cfg.out, cfg.resume, "best", "last")
        dialogues, val, left_out = load_dialogues(cfg, Tokenizer(cfg.model), mask_id)
        steps = cfg.steps or max(1, int(cfg.epochs * len(dialogues) / M))

        # ---- the model: a frozen Dream, with a new DoRA and ω
        model = model_of(cfg, machine, sm_class)
        pad_id = model.net.cfg.pad_token_id
        omega = model.sm.parameters() if model.sm else []
        optimizer = torch.optim.AdamW([{"params": trained(model.net).values()},  # DoRA
                                       {"params": omega}],
                                      betas=(0.9, 0.999), weight_decay=0.0)  # [code]
        identity = {name: getattr(cfg, name) for name in IDENTITY} | {
            "p_sm > 0": cfg.p_sm > 0, "SoftMask": own_class(model.sm), "keys": data.KEYS,
            "dialogues": digest_of(dialogues + val), "base": model.net.fingerprint()}
        about = dict(kind="dream-adapter", config=asdict(cfg), identity=identity)

        # ---- what to start from
        start = 0      # updates made
        metrics = {}   # of the last evaluation
        if resuming:
            with launch.input_errors():
                ckpt = mdlm.read_checkpoint(last, "dream-adapter")
            launch.check_run(last, ckpt, identity, asdict(cfg))
            for name, p in trained(model).items():
                p.data.copy_(ckpt["model"][name])
            optimizer.load_state_dict(ckpt["optimizer"])
            start = ckpt["step"]
            metrics = ckpt["metrics"]
        parallel = launch.ddp(model, machine)
        if master:
            print(f"{len(dialogues):,} dialogues, {len(val)} held out; {left_out}\n"
                  f"updates {start:,} to {steps:,}{'' if start < steps else ': all made'}, "
                  f"{machine.device} × {machine.world}")
        log = launch.Log(f"{cfg.out}/log.jsonl", start, steps, master)
        made = start

        def save_last():
            if master:
                launch.save(last, **about, step=made, metrics=metrics, model=trained(model),
                            optimizer=optimizer.state_dict())

        if not resuming:  # so that no adapter is ever without a last.pt
            save_last()

        # ---- Alg. 1
        stopped = stop()
        for step in range(start, steps):                                       #          l.1, l.10
            model.train()  # evaluate() puts it into eval mode
            # Every rank tosses all M coins (equal ones, unless --coin=dialogue), so that each knows
            # whether any dialogue has feedback. If none has, ω must not move.
            keys = [(step, j) if cfg.coin == "dialogue" else (step,) for j in range(M)]
            softs = [torch.rand((), generator=rng(cfg.seed, "p_sm", *key)).item() < cfg.p_sm
                     for key in keys]                                          #               §3.2
            for j in range(machine.rank, M, machine.world):
                epoch, row = divmod(step * M + j, len(dialogues))
                order = data.order(len(dialogues), epoch, cfg.seed)
                ids, prompt_len = dialogues[order[row]]                        #                l.2
                x0 = pad_with_eos(ids, pad_id, rng(cfg.seed, "n_end", step, j))  # (1, L)
                t = sample_times(1, rng(cfg.seed, "t", step, j), cfg.b_l, cfg.b_h).item()  #    l.3
                xt = mask_response(x0, prompt_len, t, mask_id,
                                   rng(cfg.seed, "q", step, j))                # (1, L)         l.4
                # Found on the CPU: on a GPU, nonzero() would be a host sync.
                masks = (xt == mask_id).nonzero(as_tuple=True)                 # 2 × (N,)
                x0, xt, b, l = (launch.to_device(x, machine.device) for x in (x0, xt, *masks))
                # DDP: average gradients only in this rank's last dialogue
                parallel.require_backward_grad_sync = j + machine.world >= M
                nll = parallel(x0, xt, softs[j], (b, l))                       # (N,)         l.5-8
                # DDP averages gradients over ranks, and `world` undoes that.
                (objective(nll, t, cfg.loss, M) * machine.world).backward()
                nll = nll.detach()
                log.add(loss=objective(nll, t, cfg.loss, 1), n=1, ce=nll.sum(), masks=len(nll),
                        tokens=x0.numel(), soft=softs[j], lam=model.lam if softs[j] else 0)
            if model.sm and not any(softs):
                # ω's gradient is 0 (TwoPass.token_nll), and Adam's momentum would still move ω.
                # Without a gradient, Adam skips it [ours].
                model.sm.zero_grad(set_to_none=True)
            norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), cfg.clip)
            for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):  # DoRA, ω
                group["lr"] = eta * lr_at(step, steps, cfg.warmup)
            optimizer.step()                                                   #                l.9
            optimizer.zero_grad()
            made = step + 1
            log.bar.update()

            # ---- report and save: the log's line, best/, last/, last.pt
            stopped = made < steps and stop()
            evaluating = val and launch.is_due(made, cfg.eval_every, steps)
            saving = launch.is_due(made, cfg.save_every, steps) or stopped
            logging = launch.is_due(made, cfg.log_every, steps) or made == 1
            if logging or evaluating or saving:
                line = log.line(made, optimizer, model.sm, norm)  # refuses NaN
                if evaluating:
                    losses = evaluate(model, val, cfg, machine)
                    # best/ has the lowest loss with feedback in all dialogues [ours]. The authors
                    # toss a coin for each [code].
                    loss = losses["val_soft" if model.sm else "val_plain"]
                    metrics = {"step": made, **losses, "best": min(loss, metrics.get("best", loss))}
                    line |= metrics
                log.write(line)
            if evaluating and loss == metrics["best"] and master:
                save_adapter(f"{cfg.out}/best", model.net, model.sm, cfg)
            if saving and master:
                save_adapter(f"{cfg.out}/last", model.net, model.sm, cfg)
            if saving:  # last of all: a kill before this costs repeated updates, but no data
                save_last()
            if stopped:
                break

    adapter = f"{cfg.out}/{'best' if metrics else 'last'}"  # no evaluation, no best/
    command = ["python", "sample_dream.py", f"--model={cfg.model}", f"--adapter={adapter}",
               "--chat"]
    launch.end_run(machine, log, command, cfg.code, made, stopped)
    return model


def pad_with_eos(ids, pad_id, generator):
    """x0 (1, L): ids, 0 to 49 end tokens, up to 7 more for a multiple of 8 [code]      App. B.2"""
    # The end tokens are masked and predicted, too: the model learns where to stop.
    n_end = torch.randint(0, 50, (1,), generator=generator).item()
    n_end += -(len(ids) + n_end) % 8
    return F.pad(torch.as_tensor(ids).long(), (0, n_end), value=pad_id)[None]  # (1, L)


def mask_response(x0, prompt_len, t, mask_id, generator):
    """x0 (1, L) with its response masked: x_t.   prompt_len: int.                       Alg. 1 l.4

    Each token of the response is masked with probability (1 − MASK_FLOOR) t + MASK_FLOOR [code].
    If none is, one is chosen [code]. All draws are made on the CPU, so all devices have the same
    masks.
    """
    p = (1 - MASK_FLOOR) * t + MASK_FLOOR
    response = torch.arange(x0.shape[1]) >= prompt_len                         # (L,)
    masked = (torch.rand(x0.shape, generator=generator) < p) & response        # (1, L)
    if not masked.any():
        place = torch.randint(x0.shape[1] - prompt_len, (1,), generator=generator)
        masked[:, prompt_len + place] = True
    return x0.masked_fill(masked, mask_id)


class TwoPassDream(TwoPass):
    """Both passes of Dream in one forward, for DDP                                  Alg. 1 l.5-8"""

    def forward(self, x0, xt, soft, masks=None):
        return self.token_nll(x0, xt, None, soft, masks)[0]  # (N,)  Dream ignores t


def objective(nll, t, kind, batch_size):
    """What one dialogue adds to the loss of an update, 0-d, from the nll (N,) of its masks

    paper    1/t Σ over its masks, averaged over the batch                        Alg. 1 l.8, Eq. 2
    authors  1/t · mean over its masks, summed over the batch [code]. So a long answer counts no
             more than a short one, and clipping sees batch_size times the mean gradient.
    """
    total = nll.mean() if kind == "authors" else nll.sum() / batch_size
    return total / t


def lr_at(step, steps, warmup):
    """Factor on both learning rates after `step` updates: warm-up from 0 [code], then a cosine"""
    warm = math.ceil(warmup * steps)
    if step < warm:
        return step / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def load_dialogues(cfg, tok, mask_id):
    """train and val, [(ids, prompt length)], and a line that says what was dropped or not read"""
    counts = Counter()  # of dropped dialogues, by reason
    unread = set()      # names of fields. The readers below add to both
    if not cfg.data:
        raise Refused(f"--data is needed: a .jsonl of dialogues, or {' or '.join(HUB)}")
    parts = read_hub(cfg, counts) if cfg.data in HUB else read_file(cfg, unread)
    train, val = (encode_all(dialogues, cfg, tok, mask_id, counts) for dialogues in parts)
    held_out = {ids.tobytes() for ids, _ in val}
    n_read = len(train)
    train = [(ids, n) for ids, n in train if ids.tobytes() not in held_out]
    counts["also held out"] = n_read - len(train)
    left_out = [f"dropped: {why} ({n:,})" for why, n in counts.items() if n]
    if unread:
        left_out.append(f"not read: {', '.join(sorted(unread))}")
    left_out = "; ".join(left_out) or "none dropped"
    if not train:
        raise Refused(f"no dialogue of {cfg.data} is left to train on; {left_out}")
    return train, val, left_out


def read_file(cfg, unread):
    """[train, val] of a .jsonl, lists of (place, messages), shuffled by the seed"""
    dialogues = [*data.numbered(messages_in(cfg.data, unread), cfg.data,
                                " (forms: see --help; RECIPES.md converts others)")]
    n_val = min(cfg.n_val, len(dialogues) // 10)
    dialogues = [dialogues[i] for i in data.order(len(dialogues), "held out", cfg.seed)]
    return [dialogues[n_val:][:cfg.n_train], dialogues[:n_val]]


def messages_in(path, unread):
    """Yields the messages of each line. `unread` gets the names of fields that are not read."""
    for record in data.json_lines(path):
        yield as_messages(record)
        read = {"messages"} if "messages" in record else {"prompt", "response"}
        unread |= record.keys() - read


def as_messages(record):
    """[{role, content}] up to the last answer. Raises an error if the record has another form."""
    if "messages" in record:
        turns = record["messages"]
    else:
        turns = [{"role": "user", "content": record["prompt"]},
                 {"role": "assistant", "content": record["response"]}]
    for turn in turns:
        if not (turn.keys() == {"role", "content"} and isinstance(turn["content"], str)
                and turn["role"] in ("system", "user", "assistant")):
            kind = type(turn.get("content")).__name__
            raise ValueError(f"a turn has the fields {[*turn]}, role {turn.get('role')!r} and a "
                             f"content of type {kind}")
        turn["content"].encode()  # raises if it has half a surrogate pair
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    if not turns:
        raise ValueError("no turn is by the assistant")
    return turns


def read_hub(cfg, counts):
    """[train, val] of the paper's corpora. Without a test split, 1% is held out (10% [code])."""
    from datasets import concatenate_datasets, load_dataset
    parts = [load_dataset(HUB[cfg.data], split="train").train_test_split(0.01, seed=cfg.seed)]
    if cfg.data == "mix":
        parts.append(load_dataset("HuggingFaceTB/smoltalk", "all"))
    drawn = []
    for split, n in (("train", cfg.n_train), ("test", cfg.n_val)):
        rows = concatenate_datasets([part[split].select_columns(["messages"]) for part in parts])
        rows = rows.shuffle(seed=cfg.seed).select(range(min(n, len(rows))))
        drawn.append(hub_dialogues(rows, counts))
    return drawn


def hub_dialogues(rows, counts):
    """Yields (place, messages) of the rows that are dialogues, and counts the others."""
    for n, row in enumerate(rows):
        try:
            # Ling-Coder's roles are HUMAN, ASSISTANT, SYSTEM. The authors' chat template does not
            # know SYSTEM, and adds its default system turn. Here, SYSTEM is that turn [ours].
            turns = [turn | {"role": turn["role"].lower().replace("human", "user")}
                     for turn in row["messages"]]
            messages = as_messages({"messages": turns})
        except (AttributeError, LookupError, TypeError, ValueError):
            counts["of another form"] += 1
        else:
            yield f"row {n}", messages


def encode_all(dialogues, cfg, tok, mask_id, counts):
    """[(ids, prompt length)] of the dialogues kept. `counts` gets why others are dropped."""
    kept = []
    calls = {tok.special.get("<tool_call>"), tok.special.get("</tool_call>")}
    for place, messages in progress(dialogues, desc="dialogues", delay=5):
        with launch.readable(place):
            ids, prompt_len = encode_chat(messages, tok)
        reasons = {  # App. B.2
            f"over {cfg.max_length} tokens": len(ids) > cfg.max_length,
            f"response under {cfg.min_response} tokens": len(ids) - prompt_len < cfg.min_response,
            "tool calls": calls & {*ids},
            "[MASK] in the text": mask_id in ids}  # [ours]: it would count as masked
        why = [reason for reason, holds in reasons.items() if holds]
        if why:
            counts[why[0]] += 1
        else:
            kept.append((np.array(ids, np.int32), prompt_len))
    return kept


def encode_chat(messages, tok):
    """(ids, prompt length) of messages, the last of which is the answer to learn"""
    # Encoded separately [ours]: in one text, line breaks where the two meet could become one token.
    prompt = tok.encode(tok.chat(messages[:-1]), special=True)
    response = tok.encode(messages[-1]["content"] + "<|im_end|>\n", special=True)
    return prompt + response, len(prompt)


def digest_of(dialogues):
    """A hash of [(ids, prompt length)], 16 hex digits."""
    digest = hashlib.sha256()
    for ids, prompt_len in dialogues:
        digest.update(ids.tobytes() + prompt_len.to_bytes(4, "little"))
    return digest.hexdigest()[:16]


def model_of(cfg, machine, sm_class=None):
    """A frozen Dream with a new DoRA and, if p_sm > 0, a soft mask                      App. B.2"""
    dtype = None if cfg.dtype == "auto" else getattr(torch, cfg.dtype)  # None: as stored
    dream = Dream.load(cfg.model, machine.device, dtype)
    dream.checkpointing = cfg.checkpointing
    dora.attach(dream, TARGETS, cfg.r, cfg.alpha, rng(cfg.seed, "adapter"))
    mask_id = dream.cfg.mask_token_id
    soft_mask = None
    if cfg.p_sm:
        with launch.input_errors():
            soft_mask = (sm_class or SoftMask)(mask_id, cfg.k, cfg.omega_s, cfg.omega_a,
                                               cfg.omega_b)
    return TwoPassDream(dream, soft_mask, mask_id).to(machine.device)


def trained(model):
    """{name: parameter} of all that is trained, in the optimizer's order: DoRA, then ω."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def evaluate(model, val, cfg, machine):
    """{name: mean loss over the held-out dialogues}, with feedback and without."""
    model.eval()
    losses = {}
    pad_id = model.net.cfg.pad_token_id
    mask_id = model.mask_id
    for soft in [True, False] if model.sm else [False]:
        terms = [torch.zeros((), device=machine.device)]  # a rank may have no dialogue
        for i in range(machine.rank, len(val), machine.world):
            ids, prompt_len = val[i]
            x0 = pad_with_eos(ids, pad_id, rng(cfg.seed, "val n_end", i))      # (1, L)
            t = cfg.b_l + (cfg.b_h - cfg.b_l) * i / max(1, len(val) - 1)  # evenly spaced [code]
            xt = mask_response(x0, prompt_len, t, mask_id, rng(cfg.seed, "val q", i))  # (1, L)
            inputs = x0, xt, *(xt == mask_id).nonzero(as_tuple=True)
            x0, xt, *masks = (launch.to_device(x, machine.device) for x in inputs)
            terms.append(objective(model(x0, xt, soft, tuple(masks)), t, cfg.loss, 1))
        total = torch.stack(terms).cpu().double().sum()  # the only host sync
        losses["val_soft" if soft else "val_plain"] = launch.over_ranks(total).item() / len(val)
    return losses


def save_adapter(folder, dream, sm, cfg):
    """Write an adapter folder: DoRA in peft's format, ω in the authors' and in ours, and cfg."""
    files = {"finetune.json": asdict(cfg) | {"base": dream.fingerprint()},
             "adapter_config.json": dict(
                 peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=cfg.model,
                 r=cfg.r, lora_alpha=cfg.alpha, lora_dropout=0.0, bias="none", use_dora=True,
                 target_modules=TARGETS, inference_mode=True),
             # Only softmask.pt can hold a soft mask of another class.
             "transparency_config.json": {"transparency_alg": own_class(sm) or "none"}}
    if sm and not own_class(sm):  # ours
        s, a, b = (w.item() for w in sm.omega)
        files["transparency_config.json"] = dict(
            transparency_alg="mixinputs_with_topk" if sm.k else "mixinputs_with_temp",
            transparency_scheduling="none", transparency_scale=s, transparency_steepness=a,
            transparency_centre=b, mixture_temp=1.0 if sm.k else sm.tau.item(),
            mixinputs_k=sm.k or 1)
    write_safetensors(f"{folder}/adapter_model.safetensors", dora.adapter_state(dream))
    for name, values in files.items():
        write_text(f"{folder}/{name}", json.dumps(values, indent=1))
    launch.save(f"{folder}/softmask.pt", kind="soft mask", SoftMask=own_class(sm), k=cfg.k,
                model=sm.state_dict() if sm else None)


if __name__ == "__main__":
    launch.run(finetune, Config, PRESETS, ranks=True)
