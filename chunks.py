# SPDX-License-Identifier: MIT
"""Work on (n, V) tensors, a chunk of rows at a time. Nothing here is in the paper.           [ours]

    in_chunks        fn(rows), in chunks of rows
    in_pieces        SM of one chunk, in pieces that fit a CPU's caches
    compile_parts    compiles the trunk of a TwoPass, and its work on a chunk
    likeliest        the largest probabilities of each row, without sorting all of V
    categorical      a draw from each row

A (B, L, V) tensor of the paper's micro-batch would take 6.6 GB in fp32.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as recomputed

from launch import to_device

BUDGET = 1e9        # bytes of (n, V) tensors in use; as many again may be kept for backward
SM_IN_USE = 7       # fp32 (n, V) tensors that SM with k = |V| holds at once, the worst case
SM_KEEPS = 6        # those kept for the backward pass: logits and logp, each also clamped; exp; π
CPU_LOGITS = 52e6   # bytes of a chunk's logits on a CPU, where more rows are no faster
CPU_CACHE = 1.6e6   # bytes of logits that fit a CPU's caches: SM reads them several times
COMPILED_ROWS = 4096  # rows of a compiled chunk, for large matrix products; 0.4 GB of bf16 logits


def in_chunks(fn, *rows, V, keeps=0):
    """fn(*rows), chunk by chunk, with the outputs concatenated.

    fn: maps tensors (n, …) to one (n, …), or a tuple of them.   rows: tensors (N, …), N may be 0.
    keeps: how many fp32 (n, V) tensors fn keeps for its backward pass. If those of all chunks would
        exceed BUDGET, the backward pass recomputes them. (Not for a compiled fn: it keeps few.)
    """
    N, one_row = len(rows[0]), 4 * V  # bytes of a row of fp32 logits
    room = CPU_LOGITS if rows[0].device.type == "cpu" else BUDGET / SM_IN_USE
    size = max(1, int(room / one_row))
    training = torch.is_grad_enabled()
    if getattr(fn, "compiled", False):
        # In training, each chunk would cast the (V, D) weight, and make a dense gradient for it.
        size = N if training else COMPILED_ROWS
    elif training and keeps * N * one_row > BUDGET:
        fn = partial(recomputed, fn, use_reentrant=False, preserve_rng_state=False)
    if N <= size:
        return fn(*rows)
    return joined([fn(*chunk) for chunk in zip(*(r.split(size) for r in rows))])


def joined(parts):
    """The outputs of all chunks, concatenated: tensors, or tuples of tensors (ids can be None)."""
    if isinstance(parts[0], tuple):
        return tuple(None if part[0] is None else torch.cat(part) for part in zip(*parts))
    return torch.cat(parts)


def in_pieces(sm, logits):
    """sm(logits) for logits (n, V). On a CPU, piece by piece, which is faster there."""
    if torch.compiler.is_compiling() or not logits.is_cpu:
        return sm(logits)
    pieces = logits.split(max(1, int(CPU_CACHE / 4 / logits.shape[1])))
    return joined([sm(piece) for piece in pieces])


def compile_parts(model, mode=None):
    """Compile the slow parts of a TwoPass: its trunk and its work on a chunk.

    mode: of the trunk; "reduce-overhead" uses CUDA graphs. Chunks cannot: their length varies.
    """
    # Methods are compiled, because compiled modules have other names in the state_dict. Copy the
    # model before this call: methods in a deepcopy would use the original's weights.
    # DDP would split the trunk every 25 MB, to send gradients while the backward pass runs. The
    # splits would break fused kernels and change the dropout masks.
    torch._dynamo.config.optimize_ddp = False
    model.net.trunk = torch.compile(model.net.trunk, mode=mode)
    model.score = compiled_rows(model.score)
    model.weigh = compiled_rows(model.weigh)


def compiled_rows(fn):
    """fn, compiled once for any number of rows."""
    fast = torch.compile(fn)

    def call(*rows):
        if len(rows[0]) < 2:  # torch would compile again for 0 rows and for 1 row
            return fn(*rows)
        for x in rows:
            # dynamic=True would make V symbolic too, and torch 2.6 cannot pad by a symbolic size.
            # Without maybe_mark_dynamic, torch would compile again when n happens to equal n_embd.
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return fast(*rows)
    call.compiled = True
    return call


def likeliest(probs, p):
    """The m largest of each row of probs (n, V), descending: values and ids (n, m).

    m is V, or large enough for the m values of every row to add up to more than p. Sorting all of V
    costs too much, so m grows until they do.
    """
    V = probs.shape[1]
    sizes = (min(1024, V), min(8192, V), V)
    if probs.is_cuda and probs.numel() < 1e6:
        sizes = (V,)  # a small sort costs less than waiting; 1e6 is a guess, not measured
    for m in sizes:
        top, ids = probs.topk(m)                                               # 2 × (n, m)
        if m == V or (top.cumsum(-1)[:, -1] > p).all():  # .all() syncs. Callers repeat the cumsum
            return top, ids


def categorical(probs, u):
    """Draw one token per row, (n,): the first whose cumulative sum exceeds u Σ p

    probs: (n, V), with any positive sum per row.   u: (n,) float64, uniform in [0, 1).
    One number per row [ours] gives the same distribution as V exponentials [code]. With an fp32 u,
    only a few of the tokens rarer than 6e-8 could be drawn, and those too often. torch.multinomial
    would cost two host syncs.
    """
    device = "cpu" if probs.device.type == "mps" else probs.device  # MPS has no float64
    cdf = probs.to(device, torch.float64).cumsum(-1)                           # (n, V)
    if u.device != cdf.device:
        u = to_device(u, cdf.device)
    drawn = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)  # never one with p = 0
    return drawn[:, 0].to(probs.device)                                        # (n,)
