# SPDX-License-Identifier: MIT
"""Finetune Dream-7B with soft masks: Alg. 1 on dialogues, a DoRA adapter and ω instead of all weights.    §4.2, App. B.2

    python finetune_dream.py tiny                                        # under a minute on a CPU: no weights, no data
    python finetune_dream.py --model=DIR --data=chats.jsonl              # lines {"messages": [{"role": …, "content": …}]}
    torchrun --nproc_per_node=8 finetune_dream.py --model=DIR --data=mix # the paper's dialogues (pip install datasets)
    python finetune_dream.py iso-compute --model=DIR --data=coding       # half the updates, for two passes each
    python finetune_dream.py binary --model=DIR --data=mix               # the baseline without feedback

The last answer of each dialogue is masked and predicted. Writes into `out`: best/ and last/, adapter folders that
sample_dream.py, peft and the authors' code read; last.pt to resume from; log.jsonl. Every draw is keyed by what it is for
(data.rng), so a resumed run, or one on more GPUs, is the same run.

Not here: decoding (sample_dream.py), the maths of DoRA (dora.py) and of SM (softmask.py), full finetuning.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
import launch
import dora
from launch import Refused, atomic
from data import order, rng
from dream import Dream, DreamConfig, Tokenizer
from mdlm import in_chunks
from softmask import SoftMask

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # where DoRA goes
ROLES = {"system": "system", "user": "user", "assistant": "assistant",
         "SYSTEM": "system", "HUMAN": "user", "ASSISTANT": "assistant"}
HUB = {"mix": "allenai/tulu-3-sft-mixture", "coding": "inclusionAI/Ling-Coder-SFT"}
# what may be another in a resumed run: model and data are compared by their contents
FREE = ("model", "data", "out", "resume", "overwrite", "checkpointing", "device", "log_every", "save_every", "eval_every")
MASK_FLOOR = 1e-3  # a token is masked with probability t (1 − floor) + floor, but weighted by 1/t [code]


@dataclass
class Config:
    model: str = ""             # folder of Dream-v0-Instruct-7B or Dream-Coder-v0-Instruct-7B, as published
    data: str = ""              # a .jsonl, or the paper's: mix (Tulu 3 + SmolTalk), coding (Ling-Coder-SFT)
    out: str = "out/dream"
    resume: bool = False        # go on from out/last.pt
    overwrite: bool = False     # start anew although out holds a run
    seed: int = 1231            # the authors' five runs: 1231 … 1235
    # dialogues
    n_train: int = 300_000      # drawn before the filters, which leave 270k
    n_val: int = 500            # held out; at most a tenth of a .jsonl
    max_length: int = 2048      # tokens of prompt and response: longer ones are dropped, not cut
    min_response: int = 5       # tokens, of which the end of turn takes two
    # optimisation
    epochs: float = 1.0         # 33.5k updates of 8 in the paper
    steps: int = 0              # updates; 0: epochs
    batch_size: int = 8         # dialogues per update, one per pass
    loss: str = "authors"       # mean over a dialogue's masks, summed over the batch [code]; paper: the other way round
    eta_bb: float = 1e-5        # learning rate of DoRA
    eta_sm: float = 1e-2        # of ω: it has far to go
    warmup: float = 0.03        # share of the updates; then a cosine down to 0
    clip: float = 7.0           # of the norm over DoRA and ω together
    r: int = 16                 # DoRA's rank
    alpha: int = 16
    b_l: float = 0.2            # t ~ U(b_l, b_h)
    b_h: float = 0.8
    # soft-masking
    p_sm: float = 0.5           # probability of two passes; 0 finetunes a binary model
    k: int | None = 1           # 1 is what the released configurations train; none: all tokens (App. C.3)
    omega_s: float = 1e-6       # start next to binary masking
    omega_a: float = 10 / 1.5   # App. B.2: 95% of −H lie above −1.5 nats
    omega_b: float = -0.75
    # the machine
    checkpointing: bool = True  # 24 GB; false: 40 GB and a quarter less time
    chunk: int = 256            # rows of logits that exist at once: 0.16 GB in fp32
    device: str = "auto"        # cuda, else mps, else cpu
    dtype: str = "auto"         # of the frozen weights: bfloat16 on a GPU that has it, float32 elsewhere
    log_every: int = 10
    save_every: int = 100       # last/ and last.pt, and a line in the log: it is then the same after a resume
    eval_every: int = 500       # and best/; the authors' 100 would be a third of the run


PRESETS = {
    # ω starts where feedback shows at once; from the paper's start it takes a thousand updates
    "tiny": dict(model="out/tiny_dream/model", data="out/tiny_dream/dialogues.jsonl", out="out/tiny_dream", steps=60,
                 eta_bb=1e-2, omega_s=0.3, omega_b=-2.5, save_every=20, eval_every=20),
    "iso-update": {},
    "iso-compute": dict(epochs=0.5, out="out/dream-iso-compute"),  # SM's two passes for the price of the baseline's one
    "binary": dict(p_sm=0.0, out="out/dream-binary"),
}


# ---------------------------------------------------------------------------------------------------------------------
# dialogues


def conversation(record, where):
    """The messages up to the last answer, roles by their usual names.   record: dict or JSON; where: its name if Refused."""
    try:
        record = json.loads(record) if isinstance(record, str) else record
        messages = [{"role": ROLES.get(m["role"], m["role"]), "content": m["content"] + ""} for m in record["messages"]]
    except ValueError as e:
        raise Refused(f"{where} is not JSON: {e}")
    except (KeyError, TypeError):  # the empty string is added to find what is no text
        raise Refused(f'{where} is not {{"messages": [{{"role": …, "content": "…"}}, …]}}')
    unknown = [m["role"] for m in messages if m["role"] not in ROLES.values()]
    if unknown:
        raise Refused(f"{where} has the role {unknown[0]!r}: use {', '.join(ROLES)}")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise Refused(f"{where} has no assistant turn, so there is nothing to learn from it: remove it")
    return messages


def read_jsonl(cfg):
    """[train, val], each (how many, iterable of (where, record)): the lines in an order by seed, the first ones held out."""
    try:
        with open(cfg.data, encoding="utf-8") as f:
            lines = [(f"{cfg.data} line {i}", line) for i, line in enumerate(f, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise Refused(f"--data={cfg.data} cannot be read ({e}): give a .jsonl file, or mix or coding")
    n_val = min(cfg.n_val, len(lines) // 10)
    lines = [lines[i] for i in order(len(lines), "held out", cfg.seed)]
    return [(len(part), part) for part in (lines[n_val:][:cfg.n_train], lines[:n_val])]


def read_hub(cfg):
    """The same, of the paper's corpora. 1% of a corpus without a test part is held out (10% in the code)."""
    try:
        from datasets import concatenate_datasets, load_dataset
        whole = load_dataset(HUB[cfg.data], split="train").select_columns(["messages"])
        parts = [whole.train_test_split(0.01, seed=cfg.seed)]
        if cfg.data == "mix":
            parts.append(load_dataset("HuggingFaceTB/smoltalk", "all").select_columns(["messages"]))
    except ImportError:
        raise Refused(f"--data={cfg.data} comes from the hub: pip install datasets, or give a .jsonl file")
    except OSError as e:  # every error of a network is one
        raise Refused(f"--data={cfg.data} could not be fetched from the hub ({type(e).__name__}): try again, or give a .jsonl")

    def drawn(split, n):
        rows = concatenate_datasets([part[split] for part in parts]).shuffle(seed=cfg.seed)
        rows = rows.select(range(min(n, len(rows))))
        return len(rows), ((f"{cfg.data} {split} {i}", row) for i, row in enumerate(rows))
    return [drawn("train", cfg.n_train), drawn("test", cfg.n_val)]


def encode_chat(messages, tok):
    """(ids, prompt length): the response, its <|im_end|> and the line break come after the prompt that decoding will see."""
    prompt = tok.encode(tok.chat(messages[:-1]), special=True)
    return prompt + tok.encode(messages[-1]["content"] + "<|im_end|>\n", special=True), len(prompt)


def keep(ids, prompt_len, cfg, tok, mask_id):
    """"" for a dialogue to train on, or why not. The three filters of the paper, and one [ours]: a [MASK] in the text itself
    would be taken for one of Alg. 1's."""
    if len(ids) > cfg.max_length:
        return f"over {cfg.max_length} tokens"
    if len(ids) - prompt_len < cfg.min_response:
        return f"response under {cfg.min_response} tokens"
    if {tok.special.get("<tool_call>"), tok.special.get("</tool_call>")} & set(ids):
        return "tool calls"
    return "[MASK] in the text" if mask_id in ids else ""


def encode_all(n, records, cfg, tok, mask_id, show):
    """[(ids, prompt length)] of what the filters keep, and {reason: how many} of the rest."""
    kept, dropped = [], Counter()
    for where, record in tqdm(records, total=n, desc="dialogues", disable=not show, delay=5):
        try:
            ids, prompt_len = encode_chat(conversation(record, where), tok)
            reason = keep(ids, prompt_len, cfg, tok, mask_id)
        except Refused:  # the user can mend a .jsonl, but not the one odd dialogue of a corpus
            if cfg.data not in HUB:
                raise
            reason = "malformed"
        if reason:
            dropped[reason] += 1
        else:
            kept.append((np.array(ids, np.int32), prompt_len))
    return kept, dropped


def pad_with_eos(ids, eos, generator):
    """ids (L,) and n_end ~ U{0..49} end tokens, and up to 7 more to a multiple of 8 [code] -> (L',)

    They belong to the response: masked, predicted and attended to, which is how the model learns where to stop.
    """
    n_end = torch.randint(0, 50, (1,), generator=generator).item()
    return F.pad(torch.as_tensor(ids).long(), (0, n_end + -(len(ids) + n_end) % 8), value=eos)


def sample_time(b_l, b_h, generator):
    return b_l + (b_h - b_l) * torch.rand((), generator=generator).item()                    # Alg. 1 l.3


def corrupt(x0, prompt_len, t, mask_id, generator):
    """x0 (B, L), its response masked with probability t, at least once.   prompt_len: int or (B, 1).       Alg. 1 l.4"""
    p = (1 - MASK_FLOOR) * t + MASK_FLOOR
    masked = (torch.rand(x0.shape, generator=generator) < p) & (torch.arange(x0.shape[1]) >= prompt_len)    # (B, L)
    none = ~masked.any(1)
    if none.any():
        low = torch.as_tensor(prompt_len).expand(len(x0), 1)[none][0].item()
        masked[none, low + torch.randint(x0.shape[1] - low, (1,), generator=generator)] = True
    return x0.masked_fill(masked, mask_id)


# ---------------------------------------------------------------------------------------------------------------------
# Alg. 1 l.5-8


class TwoPass(nn.Module):
    """Both passes as one module, so that DDP sees one forward per backward.   sm: SoftMask, or None for a binary model.

    lam: mean λ of the last pass with feedback, 0-d, for the log.
    """

    def __init__(self, dream, sm, chunk=256):
        super().__init__()
        self.dream, self.sm, self.chunk = dream, sm, chunk
        self.lam = torch.zeros(())

    def forward(self, x0, xt, soft):
        """−log p of every masked token (N,), fp32, row-major.   x0, xt: (B, L).   soft: with feedback.

        Vocabulary-sized tensors are chunks of the N rows at masks: at 2,048 tokens a whole one is 1.2 GB in fp32.
        """
        dream, sm, masked = self.dream, self.sm, xt == self.dream.cfg.mask_token_id
        emb = F.embedding(xt, dream.table)                                                   # (B, L, D)
        if soft:
            with torch.no_grad():                                                            # l.5-6
                rows = dream.rows_at(dream.trunk(emb)[0], masked)                            # (N, D)

            def feedback(rows):
                lam, ids, pi = sm(dream.lm_head(rows))
                return sm.mix(dream.table, lam, ids, pi), lam.detach()
            mixed, lam = in_chunks(feedback, rows, V=len(dream.table), keeps=5)          # (N, D), (N,)
            emb = emb.index_put((masked,), mixed)                                            # (B, L, D)
            self.lam = lam.mean()
        rows = dream.rows_at(dream.trunk(emb)[0], masked)                                    # (N, D)          l.7
        score = lambda rows, y: F.cross_entropy(dream.lm_head(rows).float(), y, reduction="none")
        nll = in_chunks(score, rows, x0[masked], V=len(dream.table), keeps=1)            # (N,)            l.8
        # DDP must find a gradient for ω in every pass, or its ranks part ways without an error.
        return nll if sm is None else nll + 0 * sum(p for p in sm.parameters())


def objective(nll, t, kind, batch_size):
    """The share of one dialogue in the loss of an update: what its backward is called on.   nll: (N,).   Returns 0-d.

    paper    1/t Σ over its masks, averaged over the batch                                             Alg. 1 l.8, Eq. 2
    authors  1/t · mean over its masks, summed over the batch [code]: a long answer counts like a short one, a small t
             twice (it also means fewer masks), and the gradient is batch_size times a mean when the clip sees it
    """
    return nll.mean() / t if kind == "authors" else nll.sum() / t / batch_size


def lr_at(step, steps, warmup):
    """Factor on both learning rates before update `step` (from 0), which has 0 [code]."""
    warm = math.ceil(warmup * steps)
    return step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


# ---------------------------------------------------------------------------------------------------------------------
# files


def save_adapter(folder, dream, sm, cfg):
    """An adapter folder: DoRA as peft has it, ω as we and as the authors write it, and this run's settings."""
    files = {"finetune.json": asdict(cfg) | {"base": dream.fingerprint()},
             "adapter_config.json": dict(
                 peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=cfg.model, r=cfg.r, lora_alpha=cfg.alpha,
                 lora_dropout=0.0, bias="none", use_dora=True, target_modules=TARGETS, inference_mode=True)}
    if sm:
        omega = dict(zip(("omega_s", "omega_a", "omega_b"), (w.item() for w in sm.omega)))
        omega["omega_s"] = min(omega["omega_s"], 1 - 1e-6)  # in fp32 the sigmoid reaches 1, which SoftMask does not take
        tau = (F.softplus(sm.raw_tau) + 1e-6).item() if sm.k is None else 1.0
        files["softmask.json"] = dict(mask_id=sm.mask_id, k=sm.k, tau=tau, **omega)
        files["transparency_config.json"] = dict(
            transparency_alg="mixinputs_with_temp" if sm.k is None else "mixinputs_with_topk", mixture_temp=tau,
            transparency_scale=omega["omega_s"], transparency_steepness=omega["omega_a"],
            transparency_centre=omega["omega_b"], mixinputs_k=sm.k or 1, transparency_scheduling="none")
    path = os.path.join(folder, "adapter_model.safetensors")
    checkpoint.write_safetensors(path, dora.adapter_state(dream), {"format": "pt"})
    for name, values in files.items():
        with atomic(os.path.join(folder, name)) as tmp, open(tmp, "w", encoding="utf-8") as f:
            json.dump(values, f, indent=1)
    for name in {"softmask.json", "transparency_config.json"} - files.keys():
        with contextlib.suppress(FileNotFoundError):  # a binary adapter must not find the ω of an older run
            os.remove(os.path.join(folder, name))


def make_tiny(model, data):
    """A random model folder (2 layers, bytes as tokens) and 120 dialogues, for a run without downloads. Replaces no file."""
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|mask|>")
    special = {name: 256 + i for i, name in enumerate(names)}
    cfg = dict(vocab_size=264, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=4096, mask_token_id=261,
               pad_token_id=256, eos_token_id=256)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Dream(DreamConfig(**cfg)).state_dict().items()}
    noise = lambda name, shape: torch.randn(shape, generator=rng("tiny", name)) * shape[-1] ** -0.5
    if not os.path.exists(f"{model}/model.safetensors"):
        checkpoint.write_safetensors(f"{model}/model.safetensors", {
            name: torch.ones(shape) if "norm" in name else noise(name, shape) for name, shape in shapes.items()})
    ask = lambda a, b: [{"role": "user", "content": f"{a} + {b} = ?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    dialogues = "".join(json.dumps({"messages": ask(a, b)}) + "\n" for a in range(12) for b in range(10))
    for path, text in ((f"{model}/config.json", json.dumps(cfg)), (f"{model}/added_tokens.json", json.dumps(special)),
                       (f"{model}/merges.txt", "#version: 0.2\n"), (data, dialogues)):
        if not os.path.exists(path):
            with atomic(path) as tmp, open(tmp, "w", encoding="utf-8") as f:
                f.write(text)


# ---------------------------------------------------------------------------------------------------------------------
# the run


def checked(cfg):
    """cfg, or Refused for values that cannot be run."""
    positive = ("n_train", "n_val", "max_length", "batch_size", "r", "chunk", "log_every", "save_every", "eval_every")
    limits = {name: getattr(cfg, name) >= 1 for name in positive}
    limits |= {"steps": cfg.steps >= 0, "epochs": cfg.epochs > 0, "loss": cfg.loss in ("authors", "paper"),
               "b_l": 0 < cfg.b_l < cfg.b_h, "b_h": cfg.b_h <= 1, "p_sm": 0 <= cfg.p_sm <= 1, "warmup": 0 <= cfg.warmup < 1,
               "alpha": cfg.alpha > 0, "clip": cfg.clip > 0, "eta_bb": cfg.eta_bb >= 0, "eta_sm": cfg.eta_sm >= 0}
    for name, ok in limits.items():
        if not ok:
            raise Refused(f"--{name}={getattr(cfg, name)} is out of range: sizes and *_every are at least 1, 0 < b_l < b_h "
                          f"<= 1, p_sm and warmup shares, eta_* not negative, loss authors or paper")
    if not cfg.model or not cfg.data:
        raise Refused("give --model=FOLDER and --data=FILE.jsonl, mix or coding, or try `python finetune_dream.py tiny`")
    return cfg


def resumable(ckpt, cfg, source, last):
    """Raises Refused unless going on from this checkpoint repeats the run that it was cut from."""
    if ckpt["kind"] != "dream-adapter":
        raise Refused(f"{last} holds a {ckpt['kind']}, not a run of finetune_dream.py: give its --out")
    settings = lambda config, source: {name: v for name, v in config.items() if name not in FREE} | source
    there, here = settings(ckpt["config"], ckpt["data"]), settings(asdict(cfg), source)
    different = [f"{n} ({there.get(n)} there, {v} here)" for n, v in here.items() if there.get(n) != v]
    if different:
        raise Refused(f"cannot resume: {', '.join(different)} differ from {last}; give the same, or another --out")


def finetune(cfg):
    """Alg. 1, top to bottom. Returns the trained TwoPass, for tests and notebooks."""
    # ---- what is to be trained
    cfg = checked(cfg)
    rank, world, device, dtype = launch.machine(cfg.device, cfg.dtype)
    master, last, log_path = rank == 0, os.path.join(cfg.out, "last.pt"), os.path.join(cfg.out, "log.jsonl")
    accum, rest = divmod(cfg.batch_size, world)
    if rest:
        raise Refused(f"--batch_size={cfg.batch_size} is not a multiple of the {world} processes: give one that is")
    if os.path.exists(last) and not (cfg.resume or cfg.overwrite):
        raise Refused(f"{cfg.out} already holds a run: --resume goes on, --overwrite replaces it, --out=… starts another")
    launch.join(world, device)
    own = PRESETS["tiny"]
    if master and (cfg.model == own["model"] or cfg.data == own["data"]):
        make_tiny(own["model"], own["data"])
    if world > 1:
        dist.barrier()
    tok, dream = Tokenizer(cfg.model), Dream.load(cfg.model, device, dtype or torch.float32)
    mask_id, eos = dream.cfg.mask_token_id, dream.cfg.pad_token_id
    if tok.n_vocab > dream.cfg.vocab_size:
        raise Refused(f"{cfg.model}: the tokenizer has {tok.n_vocab} ids, the model only {dream.cfg.vocab_size}: two models")
    if (cfg.k or 1) > dream.cfg.vocab_size:
        raise Refused(f"--k={cfg.k} is more than the {dream.cfg.vocab_size} tokens of {cfg.model}: give fewer, or none for all")
    dream.checkpointing = cfg.checkpointing
    dora.attach(dream, TARGETS, cfg.r, cfg.alpha, rng(cfg.seed, "adapter"))
    try:
        sm = SoftMask(mask_id, cfg.k, cfg.omega_s, cfg.omega_a, cfg.omega_b).to(device) if cfg.p_sm > 0 else None
    except ValueError as e:
        raise Refused(str(e))
    model = TwoPass(dream, sm, cfg.chunk)
    theta, omega = [p for p in dream.parameters() if p.requires_grad], list(sm.parameters()) if sm else []
    optimizer = torch.optim.AdamW([{"params": p} for p in (theta, omega) if p], betas=(0.9, 0.999), weight_decay=0.0)

    # ---- the dialogues
    read = read_hub if cfg.data in HUB else read_jsonl
    (train, dropped), (val, _) = (encode_all(*part, cfg, tok, mask_id, master) for part in read(cfg))
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "none"
    if not train:
        raise Refused(f"no dialogue of {cfg.data} is left to train on; dropped: {reasons}")
    digest = hashlib.sha256()
    for ids, prompt_len in train + val:
        digest.update(ids.tobytes() + prompt_len.to_bytes(4, "little"))
    source = {"dialogues": digest.hexdigest()[:16], "base": dream.fingerprint()}
    cfg = replace(cfg, steps=cfg.steps or max(1, int(cfg.epochs * len(train) / cfg.batch_size)))

    start, metrics = 0, {}
    if cfg.resume:
        ckpt = checkpoint.load(last)
        resumable(ckpt, cfg, source, last)
        start, metrics = ckpt["step"], ckpt["metrics"]
        model.load_state_dict(ckpt["model"], strict=False)  # it has what is trained, and not the frozen 15 GB
        optimizer.load_state_dict(ckpt["optimizer"])
    # Every rank has made the same adapter, and nobody needs 15 GB of frozen weights sent around.
    net = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False) if world > 1 else model

    # ---- what an update needs
    permutation = functools.lru_cache(1)(lambda epoch: order(len(train), epoch, cfg.seed))

    def dialogue(step, j):
        """Dialogue j of the update: x0 (1, L), its prompt length. A function of its number: nothing is seen twice.   l.2"""
        epoch, row = divmod(step * cfg.batch_size + j, len(train))
        ids, prompt_len = train[permutation(epoch)[row]]
        return pad_with_eos(ids, eos, rng(cfg.seed, "n_end", step, j))[None], prompt_len

    def save():
        if master:
            save_adapter(os.path.join(cfg.out, "last"), dream, sm, cfg)
            trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
            checkpoint.save(last, kind="dream-adapter", config=asdict(cfg), step=done, seed=cfg.seed, model=trained,
                            optimizer=optimizer.state_dict(), data=source, metrics=metrics)

    def over_ranks(t, how=dist.ReduceOp.SUM):
        if world > 1:
            dist.all_reduce(t, how)
        return t

    @torch.no_grad()
    def evaluate():
        """Loss and nats per mask of the held-out dialogues, with feedback and without; the same masks every time."""
        out = {}
        for soft in ([True, False] if sm else [False]):
            total = torch.zeros(3, dtype=torch.float64)
            for i in range(rank, len(val), world):
                t = cfg.b_l + (cfg.b_h - cfg.b_l) * i / max(1, len(val) - 1)  # a grid of times, for less noise [code]
                x0 = pad_with_eos(val[i][0], eos, rng(cfg.seed, "val n_end", i))[None]
                xt = corrupt(x0, val[i][1], t, mask_id, rng(cfg.seed, "val q", i))
                nll = model(x0.to(device), xt.to(device), soft).cpu().double()
                total += torch.stack((objective(nll, t, cfg.loss, 1), nll.sum(), torch.tensor(float(len(nll)))))
            loss, nll, masks = over_ranks(total).tolist()
            name = "val_soft" if soft else "val_binary"
            out |= {name: loss / len(val), name + "_ce": nll / masks}
        return out

    done = start
    if master:
        os.makedirs(cfg.out, exist_ok=True)
        old = launch.log_until(log_path, start)
        if not start and os.path.exists(last):
            os.remove(last)  # or a --resume of this run, killed before its first save, would go on with the old one
        with atomic(log_path) as tmp, open(tmp, "w") as f:  # without the lines of updates that will be made again
            f.writelines(old)
        n_tokens = sum(len(ids) for ids, _ in train)
        print(f"{len(train):,} dialogues, {n_tokens:,} tokens, {len(val)} held out; dropped: {reasons}\n"
              f"{sum(p.numel() for p in theta):,} parameters of DoRA, {len(omega)} of SM, {device} × {world}, "
              f"{dream.table.dtype}; updates {start:,} to {cfg.steps:,} of {cfg.batch_size}", flush=True)
    seen, mark, clock, first = torch.zeros(6, dtype=torch.float64), start, time.time(), time.time()

    def report(norm):
        """One line on screen, one in log.jsonl: means since the last one, over all ranks."""
        nonlocal mark, clock
        loss, nll, masks, tokens, lam, softs = over_ranks(seen).tolist()
        if not math.isfinite(loss + norm.item()):
            raise Refused(f"the loss or its gradient is not a number by update {done:,}: --resume goes back to the last save, "
                          f"in {last}; a lower --eta_bb needs a run of its own")
        now = time.time()
        line = {"step": done, "loss": loss / ((done - mark) * cfg.batch_size), "ce_per_mask": nll / masks,
                "grad_norm": norm.item(), "tokens_per_s": tokens / (now - clock)}
        if sm:
            line |= {"omega_" + name: w.item() for name, w in zip("sab", sm.omega)} | {"lam": lam / max(1, softs)}
        line |= metrics if metrics.get("step") == done else {}
        line |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if device.type == "cuda" else {}
        left = (now - first) / (done - start) * (cfg.steps - done) / 60
        seen.zero_()
        mark, clock = done, now
        if not master:
            return
        print("  ".join(f"{k} {v:.4g}" for k, v in line.items()) + f"  of {cfg.steps:,}, {left:,.1f} min left", flush=True)
        line |= {"lr": cfg.eta_bb * lr_at(done - 1, cfg.steps, cfg.warmup), "seconds": now - first}
        launch.log_line(log_path, line)

    # ---- Alg. 1
    with launch.signals() as stop:  # only now: until here Ctrl-C loses nothing
        for step in range(start, cfg.steps):
            # p_sm: one coin per update, the same on every rank [ours]; the released code tosses one per dialogue
            soft = sm is not None and torch.rand((), generator=rng(cfg.seed, "p_sm", step)).item() < cfg.p_sm
            for group, eta in zip(optimizer.param_groups, (cfg.eta_bb, cfg.eta_sm)):
                group["lr"] = eta * lr_at(step, cfg.steps, cfg.warmup)
            for i in range(accum):
                j = i * world + rank                           # global number: who computes it changes nothing
                x0, prompt_len = dialogue(step, j)                                           # (1, L)          l.2
                t = sample_time(cfg.b_l, cfg.b_h, rng(cfg.seed, "t", step, j))               #                 l.3
                xt = corrupt(x0, prompt_len, t, mask_id, rng(cfg.seed, "q", step, j))        # (1, L)          l.4
                with net.no_sync() if world > 1 and i + 1 < accum else contextlib.nullcontext():
                    nll = net(x0.to(device), xt.to(device), soft)                            # (N,)            l.5-8
                    (objective(nll, t, cfg.loss, cfg.batch_size) * world).backward()  # DDP will divide by world
                nll = nll.detach()
                seen += torch.tensor([objective(nll, t, cfg.loss, 1).item(), nll.sum().item(), len(nll), x0.numel(),
                                      model.lam.item() * soft, soft])
            if not soft:  # DDP needs the zero gradient of ω that the loss made; Adam would still move ω by its momentum
                for p in omega:
                    p.grad = None
            norm = nn.utils.clip_grad_norm_(theta + omega, cfg.clip)
            optimizer.step()                                                                 #                 l.9
            optimizer.zero_grad(set_to_none=True)
            done = step + 1

            told = over_ranks(torch.tensor(max(stop, default=0)), dist.ReduceOp.MAX).item()  # by a signal, any rank: all leave
            end = told or done == cfg.steps
            saving = end or done % cfg.save_every == 0
            if val and not told and (done % cfg.eval_every == 0 or done == cfg.steps):
                metrics = {**metrics, "step": done, **evaluate()}
                score = metrics["val_soft" if sm else "val_binary"]
                if score < metrics.get("best", math.inf):
                    metrics["best"] = score
                    if master:
                        save_adapter(os.path.join(cfg.out, "best"), dream, sm, cfg)
            if done % cfg.log_every == 0 or saving or metrics.get("step") == done:
                report(norm)  # refuses what is not a number, so before the save
            if saving:
                save()
            if end:
                break

    if done < cfg.steps:
        launch.leave(world, f"stopped after update {done:,}, saved in {last}: the same command with --resume goes on", 128 + told)
    launch.leave(world, f"python sample_dream.py --model={cfg.model} --adapter={cfg.out}/{'best' if val else 'last'} --prompt=…", 0)
    return model


if __name__ == "__main__":
    launch.run(finetune, Config, PRESETS)
