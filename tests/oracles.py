"""The paper read literally: for loops and Python floats, slow on purpose.

    alg1         Alg. 1, App. B.1         checks train.train

Nothing is imported from the code under test. Networks come as functions of embeddings.
"""

import math

import torch

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
