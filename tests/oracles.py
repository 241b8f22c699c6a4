"""The paper read literally: for loops and Python floats, slow on purpose.

Nothing is imported from the code under test. Draws are made here, from keys that are written out.
predict: a network, as a function from embeddings (L, D) and a time to logits (L, V).
soft: ω as `omega` gives it, or None for no feedback.
"""

import hashlib
import math
from itertools import accumulate, repeat

import torch


def omega(k, raw_s, raw_a, raw_b, raw_tau=None):
    """ω as the functions below take it, from the raw numbers that are trained           App. B.1"""
    softplus = lambda raw: math.log1p(math.exp(raw)) + 1e-6
    return {"k": k, "omega_s": 1 / (1 + math.exp(-raw_s)), "omega_a": softplus(raw_a),
            "omega_b": -softplus(raw_b), "tau": 1.0 if raw_tau is None else softplus(raw_tau)}


def softmax(logits, tau=1.0):
    """A tensor (V,) → a list of V probabilities, which sum to 1."""
    z = [v / tau for v in logits.tolist()]
    z = [math.exp(v - max(z)) for v in z]
    return [v / sum(z) for v in z]


def soft_mask(logits, table, mask_id, k, omega_s, omega_a, omega_b, tau=1.0, gain=1.0):
    """What one mask with logits (V,) looks like: (D,) float64                   §3.1 sm(·,·), Eq. 3

    table: (V, D).   k: None is all of |V|.   gain: a factor on λ, see `fading`.
    """
    p = softmax(logits, tau)
    lam = gain * strength(p, omega_s, omega_a, omega_b)
    top = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    total = sum(p[i] for i in top)
    guess = sum(p[i] / total * table[i].double() for i in top)
    return (1 - lam) * table[mask_id].double() + lam * guess


def softened(table, x, mask_id, logits, soft, gain=1.0):
    """Embeddings of x (L,), softened by its logits (L, V), if there are any"""
    emb = table[x].detach().clone()
    for l in (x == mask_id).nonzero()[:, 0] if soft and logits is not None else ():
        emb[l] = soft_mask(logits[l], table, mask_id, **soft, gain=gain)
    return emb


def strength(p, omega_s, omega_a, omega_b, **others):
    """λ of one prediction, a list of V probabilities                                       Eq. 3"""
    minus_H = sum(v * math.log(v) for v in p if v > 0)
    return omega_s / (1 + math.exp(-omega_a * (minus_H - omega_b)))


def dense_nll(predict, table, x0, xt, t, mask_id, soft=None):
    """−1/t Σ_l 1[x_t^l = m] log p(x_0^l), token by token: (B,) float64       Eq. 2, Alg. 1 l.5-8"""
    emb, nll = table[xt], torch.zeros(len(t), dtype=torch.float64)
    if soft:
        rows = zip(xt, predict(emb, t))                              # l.6
        emb = torch.stack([softened(table, x, mask_id, z, soft) for x, z in rows])  # l.7
    logits = predict(emb, t)
    for b, l in (xt == mask_id).nonzero().tolist():                  # l.8
        nll[b] -= math.log(softmax(logits[b, l])[x0[b, l]]) / t[b].item()
    return nll


def nucleus(p, top_p, keeps_crossing=False):
    """A list of V probabilities without its tail. The token across top_p is dropped, or kept."""
    if top_p == 1:
        return p
    total, kept = 0.0, {}
    for i in sorted(range(len(p)), key=lambda i: -p[i]):
        if kept and (total if keeps_crossing else total + p[i]) > top_p:
            break
        total, kept[i] = total + p[i], p[i]
    return [kept.get(i, 0.0) / total for i in range(len(p))]


minus_entropy = lambda p: sum(v * math.log(v + 1e-10) for v in p)  # −H(p), guarded [code]


def draw(p, u):
    """The token in whose part of the cumulative sum u falls, for a list of any positive sum."""
    return next(i for i, total in enumerate(accumulate(p)) if u * sum(p) < total)


def fill(x, logits, n, mask_id, confidence="entropy", temperature=0, top_p=1.0, threshold=None,
         generator=None):
    """x (L,) with the n surest proposals, or those as likely as a threshold, or one.

    logits: {l: (V,)} of the masks that may be filled.
    """
    masks, x = list(logits), x.clone()
    p = {l: nucleus(softmax(logits[l], temperature or 1), top_p, True) for l in masks}
    token = {l: p[l].index(max(p[l])) for l in masks}                                      # l.4
    if temperature:
        u = torch.rand(len(masks), dtype=torch.float64, generator=generator).tolist()
        token = {l: draw(p[l], value) for l, value in zip(masks, u)}
    for l in masks if threshold or n == len(masks) else ():  # no mask may be left
        if token[l] == mask_id:
            token[l] = logits[l].index_fill(0, torch.tensor(mask_id), -math.inf).argmax().item()
    if threshold or confidence == "maskgit_plus":
        sure = {l: p[l][token[l]] for l in masks}
    elif confidence == "entropy":
        sure = {l: minus_entropy(p[l]) for l in masks}
    elif confidence == "topk_margin":
        sure = {l: sorted(p[l])[-1] - sorted(p[l])[-2] for l in masks}
    else:
        sure = dict(zip(masks, torch.rand(len(masks), generator=generator).tolist()))
    order = sorted(masks, key=sure.get, reverse=True)
    if threshold:
        n = max(1, sum(value >= threshold for value in sure.values()))
    for l in order[:n]:                                                                    # l.5
        x[l] = token[l]
    return x


def alg2(predict, table, x, mask_id, times, probs, top_p, generator, soft=None, always=False):
    """Alg. 2 for one sequence x (L,): its ids in the end, and the number of network calls.

    times: [(t, s)] of all T steps.   probs: (t, s) → (P[reveal], P[re-mask]).
    always: call the network in every step; otherwise only after a token changed [code].
    """
    def call(t):
        """l.6 of the last turn, then l.3. What is visible is certain (SUBS [code])."""
        logits = predict(softened(table, x, mask_id, feedback, soft), t)
        known = torch.eye(logits.shape[1]).log()
        return [z if token == mask_id else known[token] for token, z in zip(x, logits)]

    free, feedback, calls, stale = x == mask_id, None, 0, True
    for t, s in times:
        if stale:
            feedback, calls = call(t), calls + 1
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
    useless = not (always or stale or len(left))  # a call after the last change, with no mask left
    return x, calls + bool(len(left)) - useless


def in_order(predict, table, x, mask_id, counts, soft=None, schedule="none", switch=0.5, **how):
    """Alg. 2 in an order, for one sequence x (L,): x after each step.

    counts: how many tokens each step reveals, without a threshold.   how: see `fill`.
    Feedback comes from the raw logits, without temperature and nucleus [code].
    """
    emb, states = table[x], []                                                             # l.1
    masks = start = (x == mask_id).nonzero()[:, 0].tolist()
    for n in repeat(None) if how.get("threshold") else counts:                             # l.2
        if not masks:
            break
        logits = predict(emb, len(masks) / len(x))                                         # l.3
        x = fill(x, {l: logits[l] for l in masks}, n, mask_id, **how)                    # l.4-5
        masks = [l for l in masks if x[l] == mask_id]
        gain = fading(schedule, len(masks) / len(start), switch)
        emb = softened(table, x, mask_id, logits, soft, gain)                              # l.6
        states.append(x)
    return torch.stack(states)


def floor_counts(n, steps, first=0):
    """How many of n masks each step from `first` on reveals, rounded down [code]"""
    times, counts = torch.linspace(1, 1e-3, steps + 1), []
    for i in range(first, steps):
        share = 1 - times[i + 1] / times[i] if i < steps - 1 else 1
        counts.append(int((n - sum(counts)) * share))
    return counts


def rng(*key):
    """The generator of a draw, seeded by 56 bits of a hash of its key"""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def order(n, epoch, seed):
    """A permutation of n rows, or dialogues, for each epoch"""
    return torch.randperm(n, generator=rng("order", epoch, seed)).tolist()


def micro_batches(rows, step, *, mask_id, seed, batch_size, micro_batch, p_sm, b_l, b_h, **others):
    """Yields x0, xt, t and the coin for each micro-batch of an update, from all rows (n, L).

    others: fields of the Config that are not used here.                              Alg. 1 l.2-4
    """
    B, M, n = batch_size, batch_size // micro_batch, len(rows)
    soft = torch.rand((), generator=rng(seed, "p_sm", step)).item() < p_sm
    numbers = range(step * B, step * B + B)
    x0 = torch.stack([rows[order(n, i // n, seed)[i % n]] for i in numbers])               # l.2
    u = torch.rand(B, generator=rng(seed, "t", step))
    t = torch.tensor([b_l + (b_h - b_l) * ((i + u[i]) / B) for i in range(B)])             # l.3
    for j in range(M):  # micro-batch j has the sequences j, j + M, j + 2M, …
        x, times = x0[j::M], t[j::M]
        u = torch.rand(x.shape, generator=rng(seed, "q", step, j))
        yield x, torch.where(u < (1 - 1e-3) * times[:, None], mask_id, x), times, soft     # l.4


def held_out(rows, mask_id, seed, repeats=1, floor=1e-3):
    """Yields x0, xt and t of every row, `repeats` times.                              App. C.1

    One time is drawn from each of n · repeats equal slices. Repeat r deals the r-th n to the rows.
    """
    n = len(rows)
    deal = torch.randperm(n, generator=rng("deal", seed)).tolist()
    u = torch.rand(n * repeats, generator=rng("times", seed))
    for r in range(repeats):
        for i, x in enumerate(rows):
            place = r * n + deal[i]
            t = floor + (1 - floor) * ((place + u[place]) / (n * repeats))
            u_mask = torch.rand(x.shape, generator=rng("masks", seed, r, i))
            yield x, torch.where(u_mask < (1 - floor) * t, mask_id, x), t


def split(dialogues, n_val, seed):
    """(train, val) of all dialogues, in the order of their file"""
    shuffled = [dialogues[i] for i in order(len(dialogues), "held out", seed)]
    return shuffled[n_val:], shuffled[:n_val]


def masked_dialogue(ids, prompt_len, t, mask_id, eos, ends, masks):
    """x0 and xt (L,) of a dialogue.   ends, masks: two generators.          App. B.2, Alg. 1 l.4"""
    n_end = torch.randint(0, 50, (1,), generator=ends).item()
    x0 = [*ids, *[eos] * (n_end + -(len(ids) + n_end) % 8)]
    u = torch.rand(len(x0), generator=masks)
    hidden = [l for l in range(prompt_len, len(x0)) if u[l] < (1 - 1e-3) * t + 1e-3]
    if not hidden:
        hidden = prompt_len + torch.randint(len(x0) - prompt_len, (1,), generator=masks)
    x0 = torch.tensor(x0)
    return x0, x0.index_fill(0, torch.as_tensor(hidden), mask_id)


def dialogues_of_update(dialogues, step, *, mask_id, eos, seed, batch_size, p_sm, coin, b_l, b_h,
                        **others):
    """Yields x0, xt (1, L), t and the coin for each of [(ids, prompt length)].     Alg. 1 l.2-4"""
    n = len(dialogues)
    for j in range(batch_size):
        toss = (step, j) if coin == "dialogue" else (step,)
        soft = torch.rand((), generator=rng(seed, "p_sm", *toss)).item() < p_sm
        i = step * batch_size + j
        ids, prompt_len = dialogues[order(n, i // n, seed)[i % n]]                         # l.2
        t = b_l + (b_h - b_l) * torch.rand(1, generator=rng(seed, "t", step, j)).item()    # l.3
        x0, xt = masked_dialogue(ids, prompt_len, t, mask_id, eos, rng(seed, "n_end", step, j),
                                 rng(seed, "q", step, j))                                  # l.4
        yield x0[None], xt[None], t, soft


def adam(p, g, eta, moments):
    """One update of p, in place. moments: for each parameter, the updates made, m and v."""
    n, m, v = moments.get(p, (0, 0.0, 0.0))
    n += 1
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    moments[p] = n, m, v
    p.data -= eta * (m / (1 - 0.9 ** n)) / ((v / (1 - 0.999 ** n)).sqrt() + 1e-8)


def alg1(nll, theta, omega, rows, *, steps, eta_bb, eta_sm, warmup, clip, ema, **draws):
    """Alg. 1 with AdamW and an average of θ, one parameter after the other.      Alg. 1, App. B.1

    nll: (x0, xt, t, soft) → nats of each sequence over t.   theta, omega: trained in place.
    Yields the log's numbers after each update, and the average of θ in float64.
    """
    average, moments = [p.detach().double() for p in theta], {}
    for step in range(steps):
        loss, ce, masks, tokens = 0, 0, 0, 0
        for x0, xt, t, soft in micro_batches(rows, step, **draws):                         # l.2-4
            nats = nll(x0, xt, t, soft)                                                    # l.5-8
            loss = loss + nats.sum()
            ce += (nats * t).sum().item()
            masks += (xt != x0).sum().item()
            tokens += x0.numel()
        loss = loss / tokens
        used = theta + omega if soft else theta
        grads = torch.autograd.grad(loss, used)                                            # l.9
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
        warm = min(1, step / warmup)
        for i, (p, g) in enumerate(zip(used, grads)):
            g = g.double() * min(1, clip / (norm + 1e-6))
            adam(p, g, warm * (eta_bb if i < len(theta) else eta_sm), moments)
        d = min(ema, (2 + step) / (11 + step))
        average = [d * a + (1 - d) * p.detach().double() for a, p in zip(average, theta)]
        yield {"loss": loss.item(), "ce_per_mask": ce / masks, "grad_norm": norm,
               "eta_bb": warm * eta_bb}, average


def fading(schedule, t, switch):
    """App. C.9: the factor on λ when the share t of the masks is left."""
    return {"none": 1, "linear": t, "linear-late": 1 - t, "stepwise": int(t > switch),
            "stepwise-late": int(t <= switch)}[schedule]


def slow_blocks(predict, table, x, mask_id, gen_len, steps, block, cache, threshold, soft,
                schedule, switch):
    """Fast-dLLM with feedback, greedy: x after each pass. A mask looks as its latest logits say.

    predict: (emb (n, D) from position lo on, lo, past) → logits (n, V), and a later call's past.
    """
    L, per_block = len(x), steps * block // gen_len
    looks, states, past = table[x].detach().clone(), [], None
    counts = [1, *floor_counts(block - 1, per_block, first=1)]
    for b in range(L - gen_len, L, block):
        i = 0
        while i == 0 or (x[b:b + block] == mask_id).any():
            lo, hi = (0, L) if i == 0 or cache == "none" else (b, L)
            hi = b + block if cache == "dual" and i else hi
            logits, kv = predict(looks[lo:hi], lo, past if lo else None)
            past = kv if i == 0 else past
            inside = [l for l in range(b, b + block) if x[l] == mask_id]
            rows = {l: logits[l - lo] for l in (inside if i else inside[:1])}
            x = fill(x, rows, counts[i], mask_id, threshold=threshold)
            gain = fading(schedule, int((x == mask_id).sum()) / gen_len, switch)
            looks[lo + 1:hi] = softened(table, x[lo + 1:hi], mask_id, logits[1:], soft, gain)
            states.append(x)
            i += 1
    return torch.stack(states)
