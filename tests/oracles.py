"""The paper, once more and slowly: what the code is tested against.

One position after the other, dense one-hot vectors, no chunks. Not here: tests.
"""

import math

import torch
import torch.nn.functional as F

import sample_dream
from softmask import time_gain

# -------------------------------------------------------------------------------------------------
# Dream


def slow_forward(state, cfg, x):
    """Qwen2.5 without a causal mask, one position and one head at a time, in float64.

    state: {name: tensor}.   cfg: DreamConfig.   x: (L,) ids.   Returns logits (L, V).
    """
    w = {name.removeprefix("model."): t.double() for name, t in state.items()}
    d, group = cfg.head_dim, cfg.num_attention_heads // cfg.num_key_value_heads

    def norm(v, name):
        return v / (v.square().mean() + cfg.rms_norm_eps).sqrt() * w[name + ".weight"]

    def linear(name, v):
        return w[name + ".weight"] @ v + w.get(name + ".bias", 0)

    def turned(v, position):
        out = v.clone()
        for i in range(d // 2):
            a = position * cfg.rope_theta ** (-2 * i / d)
            out[i] = v[i] * math.cos(a) - v[i + d // 2] * math.sin(a)
            out[i + d // 2] = v[i + d // 2] * math.cos(a) + v[i] * math.sin(a)
        return out

    h = [w["embed_tokens.weight"][i] for i in x]
    for n in range(cfg.num_hidden_layers):
        p = f"layers.{n}."
        normed = [norm(v, p + "input_layernorm") for v in h]
        q, k, v = ([linear(f"{p}self_attn.{c}_proj", u).split(d) for u in normed] for c in "qkv")
        for i in range(len(h)):
            heads = []
            for a in range(cfg.num_attention_heads):
                keys = [turned(k[j][a // group], j) for j in range(len(x))]
                scores = torch.stack([turned(q[i][a], i) @ key for key in keys])
                share = (scores / d ** 0.5).softmax(0)
                heads.append(sum(s * v[j][a // group] for j, s in enumerate(share)))
            u = h[i] + linear(p + "self_attn.o_proj", torch.cat(heads))
            m = norm(u, p + "post_attention_layernorm")
            gate = F.silu(linear(p + "mlp.gate_proj", m))
            h[i] = u + linear(p + "mlp.down_proj", gate * linear(p + "mlp.up_proj", m))
    return torch.stack([w["lm_head.weight"] @ norm(v, "norm") for v in h])


def dense_nll(dream, sm, x0, xt, soft):
    """Alg. 1 l.5-8 as the paper writes it: one-hot vectors, (B, L, V) everywhere, no rows.

    Returns −log p(x0) of the masked tokens (N,).
    """
    def shifted(emb):
        z = dream.lm_head(dream.trunk(emb)[0])                          # (B, L, V)
        return torch.cat([z[:, :1], z[:, :-1]], 1)

    masked = xt == dream.cfg.mask_token_id                              # (B, L)
    P = F.one_hot(xt, dream.cfg.vocab_size).float()                     # (B, L, V)
    if soft:
        with torch.no_grad():
            logits = shifted(P @ dream.table)
        if sm.k is None:
            logits = logits / (F.softplus(sm.raw_tau) + 1e-6)
        p = logits.softmax(-1)
        omega_s, omega_a = torch.sigmoid(sm.raw_s), F.softplus(sm.raw_a) + 1e-6
        omega_b = -F.softplus(sm.raw_b) - 1e-6
        neg_entropy = (p * (p + 1e-10).log()).sum(-1, keepdim=True)
        lam = omega_s * torch.sigmoid(omega_a * (neg_entropy - omega_b))         # (B, L, 1)
        top = p
        if sm.k is not None:
            top = p * torch.zeros_like(p).scatter(-1, p.topk(sm.k).indices, 1.0)
        pi = top / top.sum(-1, keepdim=True)                            # (B, L, V)
        P = torch.where(masked[..., None], (1 - lam) * P + lam * pi, P)
    return F.cross_entropy(shifted(P @ dream.table)[masked], x0[masked], reduction="none")


def neg_entropy(p):
    return (p * (p + 1e-10).log()).sum()


@torch.no_grad()
def slow_decode(model, x, steps, sm, schedule="none", switch=0.5, top_p=1.0):
    """Alg. 2 with greedy tokens for one sequence: dense logits, one position after the other.

    Feedback comes from the raw logits of the pass, without top-p [code]. Returns x after each
    step.
    """
    mask_id, emb = model.cfg.mask_token_id, F.embedding(x, model.table)
    times = torch.linspace(1, 1e-3, steps + 1)
    masks = start = int((x == mask_id).sum())
    states = []
    for i in range(steps):
        logits = model.lm_head(model.trunk(emb)[0])[0].roll(1, 0)       # (L, V)  shifted
        p = sample_dream.filtered(logits, 0.0, top_p).double()
        places = [l for l in range(x.shape[1]) if x[0, l] == mask_id]
        n = masks if i == steps - 1 else int(masks * (1 - times[i + 1] / times[i]))
        x = x.clone()
        for l in sorted(places, key=lambda l: -neg_entropy(p[l]))[:n]:
            x[0, l] = p[l].argmax()
        masks = int((x == mask_id).sum())
        gain = time_gain(schedule, masks / start, switch)
        emb = F.embedding(x, model.table)
        if sm:
            emb = sm.embed(model.table, x, logits[None], gain)
        states.append(x)
    return torch.stack(states)


@torch.no_grad()
def slow_blocks(model, x, gen_len, steps, block, cache, threshold, sm, schedule):
    """Fast-dLLM with feedback, greedy, for one sequence.

    Each position keeps its latest logits, and every input is made of them anew. Returns x after
    each pass.
    """
    mask_id, L, per_block = model.cfg.mask_token_id, x.shape[1], steps * block // gen_len
    latest, gains, states = {}, {}, []
    times = torch.linspace(1, 1e-3, per_block + 1)

    def looks(l):
        if x[0, l] == mask_id and l in latest:
            return sm.embed(model.table, x[:, l:l + 1], latest[l][None, None], gains[l])[0, 0]
        return model.table[x[0, l]]

    for b in range(L - gen_len, L, block):
        i = 0
        while i == 0 or (x[0, b:b + block] == mask_id).any():
            lo, hi = (0, L) if i == 0 or cache == "none" else (b, L)
            hi = b + block if cache == "dual" and i else hi
            emb = torch.stack([looks(l) for l in range(lo, hi)])[None]
            h, kv = model.trunk(emb, past=past if lo else None, start=lo)
            past = kv if i == 0 else past
            logits = model.lm_head(h)[0]
            fresh = {l: logits[l - 1 - lo] for l in range(lo + 1, hi)}
            p = {l: v.softmax(-1) for l, v in fresh.items()}
            inside = [l for l in range(b, b + block) if x[0, l] == mask_id]
            if i == 0:
                chosen = inside[:1]
            elif threshold:
                best = max(inside, key=lambda l: p[l].max())
                chosen = [l for l in inside if l == best or p[l].max() >= threshold]
            else:
                last = i == per_block - 1
                n = len(inside) if last else int(len(inside) * (1 - times[i + 1] / times[i]))
                chosen = sorted(inside, key=lambda l: -neg_entropy(p[l]))[:n]
            x = x.clone()
            for l in chosen:
                x[0, l] = p[l].argmax()
            latest.update(fresh)
            gain = time_gain(schedule, int((x == mask_id).sum()) / gen_len, 0.5)
            gains.update(dict.fromkeys(fresh, gain))
            states.append(x)
            i += 1
    return torch.stack(states)
