# SPDX-License-Identifier: MIT
"""Work on rows of vocabulary size, a chunk at a time: nothing here is in the paper.          [ours]

    in_chunks        fn(rows), in chunks of rows
    in_pieces        SM of one chunk, in pieces that fit a CPU's caches
    compile_parts    a TwoPass whose trunk and whose work on a chunk are compiled
    likeliest        the largest probabilities of each row, without sorting all of V

A (B, L, V) tensor in fp32 takes 6.6 GB for one micro-batch of the paper. So logits have a row for
each masked position only, and exist only inside `in_chunks`.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint as recomputed

BUDGET = 1e9        # bytes of (n, V) tensors in use, and of those kept: little beside a model
SM_IN_USE = 7       # (n, V) tensors in fp32 that SM over all of |V| holds at once, more than others
SM_KEEPS = 6        # and keeps for a backward pass: logits, clamped, logp, clamped, exp, π
CPU_LOGITS = 52e6   # bytes of a chunk's logits on a CPU, so that its allocator reuses one buffer
CPU_CACHE = 1.6e6   # bytes of logits that stay in a CPU's caches while SM passes over them often
COMPILED_ROWS = 4096  # of a compiled chunk: large matrix products, 0.4 GB of logits in bf16


def in_chunks(fn, *rows, V, keeps=0, whole=False):
    """fn(*rows) in chunks of rows, outputs concatenated.

    fn: maps tensors (n, …) to one (n, …), or a tuple of them.   rows: tensors (N, …), N may be 0.
    keeps: number of fp32 (n, V) tensors that fn keeps for its backward pass. If those of all chunks
        take more than BUDGET, none is kept, and the backward pass runs fn again.
    whole: if fn is compiled, take all rows at once, because each chunk pays for the whole (V, D)
        weight: padded, cast, and a dense gradient. A compiled fn keeps its logits, in the dtype of
        the product, and is not recomputed.
    """
    N, one_row = len(rows[0]), 4 * V  # bytes of a row of fp32 logits
    compiled = getattr(fn, "compiled", False)
    room = CPU_LOGITS if rows[0].device.type == "cpu" else BUDGET / SM_IN_USE
    size = max(1, int(room / one_row))
    if compiled:  # always split, even into one part: torch would compile again for what is no view
        size = max(1, N) if whole else COMPILED_ROWS
    elif N <= size:
        return fn(*rows)
    if torch.is_grad_enabled() and keeps * N * one_row > BUDGET and not compiled:
        fn = partial(recomputed, fn, use_reentrant=False, preserve_rng_state=False)
    return joined([fn(*chunk) for chunk in zip(*(r.split(size) for r in rows))])


def joined(parts):
    """Outputs of chunks, tensors or tuples of them, as one. None stays None."""
    if isinstance(parts[0], tuple):
        return tuple(None if part[0] is None else torch.cat(part) for part in zip(*parts))
    return torch.cat(parts)


def in_pieces(sm, logits):
    """sm(logits) for logits (n, V), piece by piece on a CPU: there it is faster."""
    if torch.compiler.is_compiling() or not logits.is_cpu:
        return sm(logits)
    pieces = logits.split(max(1, int(CPU_CACHE / 4 / logits.shape[1])))
    return joined([sm(piece) for piece in pieces])


def compile_parts(model, mode=None):
    """Compile the slow parts of a TwoPass: its trunk and its work on a chunk.

    mode: of the trunk; "reduce-overhead" makes CUDA graphs. Chunks have none: their length changes.
    Methods are compiled, not modules, because those would change the names in the state_dict. Copy
    a model before: the compiled methods of a deepcopy would use the weights of the original.
    """
    # DDP would cut the trunk every 25 MB, in the first pass too, so that gradients travel while the
    # backward pass runs. Each cut breaks a fused kernel and draws another dropout mask.
    torch._dynamo.config.optimize_ddp = False
    model.net.trunk = torch.compile(model.net.trunk, mode=mode)
    model.score = compiled_rows(model.score)
    if model.sm is None or model.sm.k is not None:
        model.weigh = compiled_rows(model.weigh)
    else:
        model.feedback_chunk = compiled_rows(model.feedback_chunk)


def compiled_rows(fn):
    """fn, compiled once for all numbers of rows."""
    fast = torch.compile(fn)

    def call(*rows):
        if len(rows[0]) < 2:  # torch would compile once more for 0 rows and for 1
            return fn(*rows)
        for x in rows:
            # With torch.compile(dynamic=True), V would be a symbol too, and torch 2.6 cannot pad by
            # a symbolic size. Without a mark, as many rows as n_embd would be a graph of its own.
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return fast(*rows)
    call.compiled = True
    return call


def likeliest(probs, p):
    """The m largest of each row of probs (n, V). In every row, their sum is above p, or m = V.

    Returns values and ids (n, m), descending. Sorting all of V would cost as much as the network.
    """
    V = probs.shape[1]
    sizes = (min(1024, V), min(8192, V), V)
    if probs.is_cuda and probs.numel() < 1e6:
        sizes = (V,)  # `all` makes the host wait for a GPU; 1e6 is a guess, not measured
    for m in sizes:
        top, ids = probs.topk(m)                                               # 2 × (n, m)
        if m == V or (top.cumsum(-1)[:, -1] > p).all():
            return top, ids
