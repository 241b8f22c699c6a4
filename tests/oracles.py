"""The paper read literally: for loops and Python floats, slow on purpose.

    soft_mask    §3.1 sm(·,·), Eq. 3      checks softmask.SoftMask
    dense_nll    Eq. 2, Alg. 1 l.5-8      checks mdlm.MDLM.forward, mdlm.TwoPass.token_nll
    nucleus      App. B.1                 checks sample.nucleus
    draw                                  checks sample.sample_categorical
    alg2         Alg. 2                   checks sample.generate
    alg1         Alg. 1, App. B.1         checks train.train

Nothing is imported from the code under test. Networks come as functions of embeddings.
"""

import math

import torch


def omega(sm):
    """The settings of a SoftMask, as the functions below take them."""
    tau = 1.0 if sm.k is not None else math.log1p(math.exp(sm.raw_tau.item()))
    values = dict(zip(("omega_s", "omega_a", "omega_b"), (w.item() for w in sm.omega)))
    return values | {"k": sm.k, "tau": tau}


def softmax(logits, tau=1.0):
    """A tensor (V,) → a list of V probabilities, which sum to 1."""
    z = [v / tau for v in logits.tolist()]
    z = [math.exp(v - max(z)) for v in z]
    return [v / sum(z) for v in z]


def soft_mask(logits, table, mask_id, k, omega_s, omega_a, omega_b, tau=1.0):
    """What one masked position looks like: (D,) float64                         §3.1 sm(·,·), Eq. 3

    logits: (V,).   table: (V, D).   k: None is all of |V|.
    """
    p = softmax(logits, tau)
    minus_H = sum(v * math.log(v) for v in p if v > 0)
    lam = omega_s / (1 + math.exp(-omega_a * (minus_H - omega_b)))
    top = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    total = sum(p[i] for i in top)
    guess = sum(p[i] / total * table[i].double() for i in top)
    return (1 - lam) * table[mask_id].double() + lam * guess


def dense_nll(predict, table, x0, xt, t, mask_id, soft=None):
    """−1/t Σ_l 1[x_t^l = m] log p(x_0^l), token by token: (B,) float64          Eq. 2, Alg. 1 l.5-8

    predict: (emb (B, L, D), t (B,)) → logits (B, L, V).
    soft: {k, omega_s, omega_a, omega_b, tau} for two passes; None for one.
    """
    emb, masked = table[xt].detach().clone(), (xt == mask_id).nonzero().tolist()
    if soft is not None:
        logits = predict(emb, t)                                     # l.6
        for b, l in masked:                                          # l.7
            emb[b, l] = soft_mask(logits[b, l], table, mask_id, **soft)
    logits, nll = predict(emb, t), torch.zeros(len(t), dtype=torch.float64)
    for b, l in masked:                                              # l.8
        nll[b] -= math.log(softmax(logits[b, l])[x0[b, l]]) / t[b].item()
    return nll


def nucleus(p, top_p):
    """A list of V probabilities without its tail. The token that crosses top_p is dropped."""
    if top_p == 1:
        return p
    total, kept = 0.0, {}
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        total += p[i]
        if total > top_p and kept:
            break
        kept[i] = p[i]
    return [kept.get(i, 0.0) / sum(kept.values()) for i in range(len(p))]


def draw(p, u):
    """The token in whose part of the cumulative sum u falls, for a list of any positive sum."""
    total = 0.0
    for i, v in enumerate(p):
        total += v
        if u * sum(p) < total:
            return i


def certain(token, like):
    """Logits (V,) of a token that is known: its p is 1 (SUBS)."""
    logits = torch.full_like(like, -math.inf)
    logits[token] = 0
    return logits


def alg2(predict, table, x, mask_id, times, probs, top_p, generator, soft=None, always=False,
         passes=1, fresh=False):
    """Alg. 2 for one sequence: ids (L,) and the number of network calls.

    predict: (emb (L, D), t) → logits (L, V).   x: (L,) ids.   times: [(t, s)] of all T steps.
    probs: (t, s) → (P[reveal], P[re-mask]).   soft: as in `dense_nll`.
    always: call the network in every step; otherwise only after a token changed [code].
    passes: calls in each step, each on the feedback of the one before.   fresh: not the first.
    """
    def call(t):
        """l.6 of the last turn, then l.3. What is visible is certain (SUBS [code])."""
        seen = None if fresh else feedback
        for _ in range(passes):
            emb = table[x].clone()
            for l in range(len(x)):
                if soft and seen is not None and x[l] == mask_id:
                    emb[l] = soft_mask(seen[l], table, mask_id, **soft)
            logits = predict(emb, t)
            seen = [z if token == mask_id else certain(token, z) for token, z in zip(x, logits)]
        return seen

    free, feedback, calls, stale = x == mask_id, None, 0, True
    for t, s in times:
        if stale:
            feedback, calls = call(t), calls + passes
        reveal, remask = probs(t, s)
        coin, u = torch.rand(2, len(x), dtype=torch.float64, generator=generator)
        before, x = x, x.clone()
        for l in free.nonzero()[:, 0]:
            if before[l] == mask_id and coin[l] < reveal:
                x[l] = draw(nucleus(softmax(feedback[l]), top_p), u[l].item())  # l.4-5
            if before[l] != mask_id and coin[l] < remask:
                x[l] = mask_id
        stale = always or (x != before).any()
    left, logits = (x == mask_id).nonzero()[:, 0], call(times[-1][1])
    for l in left:  # no nucleus at the end [code]
        x[l] = logits[l].argmax()
    return x, calls + passes


# -------------------------------------------------------------------------------------------------
# training


def alg1(model, batch, rng, cfg, mask_id):
    """Alg. 1 with AdamW and an average of θ, one parameter after the other.      Alg. 1, App. B.1

    model: (x0, xt, t, soft) → nats of each sequence over t; changed in place.
    batch: step → x0 (B, L).   rng: key → generator.   cfg: train.Config, for its numbers.
    Yields after each update what the log says of it, and the average of θ in float64.
    """
    B, M = cfg.batch_size, cfg.batch_size // cfg.micro_batch
    theta, omega = list(model.net.parameters()), list(model.sm.parameters())
    average = [p.detach().double() for p in theta]
    moments = {p: (0, 0.0, 0.0) for p in theta + omega}  # number of updates, m, v
    for step in range(cfg.steps):
        soft = torch.rand((), generator=rng(cfg.seed, "p_sm", step)).item() < cfg.p_sm
        x0, loss, ce, masks = batch(step), 0, 0, 0                                         # l.2
        u = torch.rand(B, generator=rng(cfg.seed, "t", step))
        t = torch.tensor([cfg.b_l + (cfg.b_h - cfg.b_l) * (i + u[i]) / B for i in range(B)])  # l.3
        for j in range(M):  # micro-batch j has the sequences j, j + M, j + 2M, …
            x, times = x0[j::M], t[j::M]
            u = torch.rand(x.shape, generator=rng(cfg.seed, "q", step, j))
            xt = torch.where(u < (1 - 1e-3) * times[:, None], mask_id, x)                  # l.4
            nll = model(x, xt, times, soft)                                                # l.5-8
            loss = loss + nll.sum() / x0.numel()
            ce, masks = ce + (nll * times).sum().item(), masks + (xt == mask_id).sum().item()
        used = theta + omega if soft else theta
        grads = torch.autograd.grad(loss, used)                                            # l.9
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        warm = min(1, step / cfg.warmup)
        for i, (p, g) in enumerate(zip(used, grads)):
            g = g.double() * min(1, cfg.clip / (norm + 1e-6))
            n, m, v = moments[p]
            n, m, v = n + 1, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            moments[p] = n, m, v
            eta = warm * (cfg.eta_bb if i < len(theta) else cfg.eta_sm)
            p.data -= eta * (m / (1 - 0.9 ** n)) / ((v / (1 - 0.999 ** n)).sqrt() + 1e-8)
        d = min(cfg.ema, (2 + step) / (11 + step))
        average = [d * a + (1 - d) * p.detach().double() for a, p in zip(average, theta)]
        yield {"loss": loss.item(), "ce_per_mask": ce / masks, "grad_norm": norm,
               "lr": warm * cfg.eta_bb}, average
