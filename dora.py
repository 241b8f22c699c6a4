# SPDX-License-Identifier: MIT
"""DoRA: a frozen linear layer with a low-rank update and a trained norm for each row.      App. B.2

arXiv 2402.09353. With W (out, in) frozen, A (r, in), B (out, r), m (out,), s = α/r:

    y = b + m/n · (W x + s B A x)         n_j = |W_j + s (B A)_j|

n has one value for each output row. No gradient goes through it.

    attach(model, ["q_proj", "v_proj"], r=16, alpha=16)      # in place; the rest is frozen
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    safetensors.torch.save_file(adapter_state(model), "adapter_model.safetensors")  # peft reads it
    merge_(model)                                            # plain linear layers again

Torch only, made to be copied. Not here: dropout, other adapters, quantised layers.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class DoRALinear(nn.Module):
    """A frozen linear layer with its adapter.

    r: rank.   alpha: the update is scaled by α/r.   generator: draws A (default: torch's own).
    A, B and m are fp32, whatever the dtype of W. At the start, B = 0 and m = n, so m/n is exactly 1
    and the output does not change at all. This needs the initial m in fp32 [ours]. peft computes it
    in the model's dtype, so a fresh adapter changes the logits of a bf16 model.
    As in peft, no row of W may be all zeros: its n would be 0.
    """

    def __init__(self, linear, r=16, alpha=16, generator=None):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.s = alpha / r
        options = dict(dtype=torch.float32, device=linear.weight.device)
        # Uniform in ±1/√in, as in peft
        A = 2 * torch.rand(r, linear.in_features, generator=generator) - 1       # (r, in)
        self.lora_A = nn.Parameter(A.to(**options) / linear.in_features ** 0.5)  # (r, in)
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, r, **options))  # (out, r)
        # W is frozen, so |W|² of each row is computed once. The other terms of n are cheap.
        square = linear.weight.float().pow(2).sum(1)                             # (out,)
        self.register_buffer("square", square, persistent=False)
        self.lora_magnitude_vector = nn.Parameter(self.norm())                   # (out,)

    @torch.no_grad()
    def norm(self):
        """n (out,), fp32, without forming B A: n² = |W|² + 2s (W Aᵀ)·B + s² (B A Aᵀ)·B, per row."""
        A = self.lora_A
        B = self.lora_B
        s = self.s
        with torch.autocast(A.device.type, enabled=False):  # it would round these products
            cross = (self.base.weight.float() @ A.T * B).sum(1)                  # (out,)
            update = (B @ (A @ A.T) * B).sum(1)                                  # (out,)
        return (self.square + 2 * s * cross + s * s * update).sqrt()

    def forward(self, x):
        """(..., in) → (..., out), in the dtype of x"""
        y = F.linear(x, self.base.weight, self.base.bias)                        # (..., out)
        u = F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))  # B A x
        gain = self.lora_magnitude_vector / self.norm()                          # (out,)  m/n
        Wx = y if self.base.bias is None else y - self.base.bias
        # b + gain (W x + s B A x), but exactly y if gain = 1 and u = 0
        return (y + ((gain - 1) * Wx + gain * self.s * u)).to(x.dtype)

    @torch.no_grad()
    def merged(self):
        """The layer as one matrix (out, in), fp32: m/n · (W + s B A)."""
        updated = self.base.weight.float() + self.s * self.lora_B @ self.lora_A  # (out, in)
        gain = self.lora_magnitude_vector / updated.norm(dim=1)                  # (out,)  m/n
        return gain[:, None] * updated


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, DoRALinear)}


def attach(model, names, r=16, alpha=16, generator=None):
    """In place, put DoRA on each nn.Linear with one of these names ("q_proj"). Freeze the rest."""
    model.requires_grad_(False)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    missing = {*names} - {name.split(".")[-1] for name in linears}
    if missing:  # else a misspelt name would silently train nothing
        raise ValueError(f"the model has no linear layer called {', '.join(missing)}")
    for name, module in linears.items():
        if name.split(".")[-1] in names:
            model.set_submodule(name, DoRALinear(module, r, alpha, generator))


def adapter_state(model):
    """{name: tensor} of all that is trained, with peft's names and shapes."""
    state = {}
    for name, layer in layers(model).items():
        path = f"base_model.model.{name}."
        state[path + "lora_A.weight"] = layer.lora_A.detach()
        state[path + "lora_B.weight"] = layer.lora_B.detach()
        state[path + "lora_magnitude_vector"] = layer.lora_magnitude_vector.detach()
    return state


def load_adapter_state(model, state):
    """Copy an `adapter_state` into attached layers. Raises ValueError if names or shapes differ."""
    own = adapter_state(model)
    if own.keys() != state.keys():
        raise ValueError(f"only the model or only the adapter has {min(own.keys() ^ state.keys())}")
    for name, p in own.items():
        if p.shape != state[name].shape:  # `copy_` might broadcast it
            raise ValueError(f"{name} has another shape in the model")
        p.copy_(state[name])


def merge_(model):
    """Replace every DoRALinear by an nn.Linear that computes the same up to rounding, in place.

    Returns the largest relative change of a weight matrix, before it is rounded to the dtype of W.
    Neighbouring bf16 numbers are 0.4 to 0.8 % apart: a change below half of that is rounded away.
    """
    changes = [0.0]
    for name, layer in layers(model).items():
        W = layer.base.weight                                                    # (out, in)
        merged = layer.merged()                                                  # (out, in)
        changes.append(((merged - W).norm() / W.float().norm()).item())
        layer.base.weight = nn.Parameter(merged.to(W.dtype), requires_grad=False)
        model.set_submodule(name, layer.base)
    return max(changes)
