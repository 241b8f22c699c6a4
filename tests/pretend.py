"""A GPU that is not there, so that a machine without one can see where tensors would be.

Inside `gpu()`, `--device=auto` finds one GPU. Its tensors are on the CPU and say cuda. An operation
on tensors of both devices is an error, as on a real one, and each operation for which the host
would wait is counted. What this cannot show: memory, time, the kernels of CUDA and its list of
what autocast rounds, gradients on another device than their parameter, torch.compile, which is left
out, and NCCL.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
really = torch._C.TensorBase.device.__get__  # the device without pretending
storages = {}  # {address of a storage on the GPU: a reference, so that no other gets this address}
waits = []     # names of the operations for which the host would have waited


def there(x):
    return x.layout == torch.strided and x.untyped_storage()._cdata in storages


def put(x, on_gpu=True):
    storage = x.untyped_storage()
    storages.pop(storage._cdata, None)
    if on_gpu:
        storages[storage._cdata] = StorageWeakRef(storage)
    return x


def tensors(*nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Refuses what mixes devices. A result is where its inputs are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, inputs = func._schema.name.removeprefix("aten::"), tensors(args, kwargs)
        on_gpu = any(map(there, inputs))
        if name in ("copy_", "_to_copy"):
            on_gpu = there(inputs[0])
        elif on_gpu:
            self.check(func, name, inputs, args)
        out = func(*args, **kwargs or {})
        if on_gpu and name != "copy_":
            for x in tensors(out):
                put(x)
        return out

    def check(self, func, name, inputs, args):
        if name in ("nonzero", "masked_select", "equal", "_local_scalar_dense", "bincount"):
            waits.append(name)
        if name in ("index", "index_put_", "_index_put_impl_") and there(args[0]):
            # Indices may come from the CPU, and so may a number: x[i] = 7.
            boolean = any(i is not None and i.dtype == torch.bool for i in args[1])
            if boolean or not all(map(there, inputs)):
                waits.append(name)
            inputs = [args[0], *tensors(args[2:])]
        # A number of the CPU may come along where every element is treated alike, as an input.
        alike = torch.Tag.pointwise in func.tags or name.startswith(
            ("index_put", "_index_put", "_foreach", "_fused", "fill_"))
        written = args[0] if name.endswith("_") else None
        other = [x for x in inputs if not there(x) and (x.dim() or not alike or x is written)]
        assert not other, f"{name} of tensors on the CPU and on the GPU"


class Calls(TorchFunctionMode):
    """Turns the calls that name a device into calls for the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, device = dict(kwargs or {}), getattr(func, "__name__", ""), None
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("to", "cpu", "cuda") and x is not None:
            return self.move(func, name, x, args, kwargs)
        if name in ("numpy", "__array__", "tolist", "pin_memory") and there(x):
            assert name == "tolist", f"{name} of a tensor on the GPU"
            waits.append(name)
            x = x.detach()
        if name == "pin_memory":
            x = x.clone()
            x.pinned = True
            return x
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            kwargs["device"] = CPU if device.type == "cuda" else device
        if kwargs.get("generator") is not None:
            where = device or (CPU if x is None else x.device)
            assert kwargs["generator"].device.type == where.type, f"{name}: generator elsewhere"
        out = func(*args, **kwargs)
        if device is None or device.type == "meta":
            return out
        return put(out.clone() if out is x else out, device.type == "cuda")

    def move(self, func, name, x, args, kwargs):
        words = [*args[1:], *kwargs.values(), *{"cpu": [CPU], "cuda": [CUDA]}.get(name, [])]
        words += [like for other in tensors(words) for like in (other.device, other.dtype)]
        device = next((w for w in words if isinstance(w, (str, torch.device))), None)
        dtype = next((w for w in words if isinstance(w, torch.dtype)), x.dtype)
        if device is None or torch.device(device).type == "meta":
            return func(x, *args[1:], **kwargs)
        on_gpu = torch.device(device).type == "cuda"
        moves = on_gpu != there(x)
        if moves and not (kwargs.get("non_blocking") and hasattr(x, "pinned")):
            waits.append(name)
        return put(torch.Tensor.to(x, CPU, dtype, copy=moves or kwargs.get("copy", False)), on_gpu)


class Generator(torch.Generator):
    """Says the device that it was made for."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, "cpu")
        generator.place = torch.device(device)
        return generator

    device = property(lambda self: self.place)


class Autocast(torch.autocast):
    def __init__(self, kind, *args, **kwargs):
        super().__init__("cpu" if kind == "cuda" else kind, *args, **kwargs)


def embedding_bag(ids, table, per_sample_weights, mode):
    """torch's own makes offsets on ids.device, in Python, where `Calls` is not asked."""
    return (F.embedding(ids, table) * per_sample_weights[..., None]).sum(1)


@contextlib.contextmanager
def gpu():
    """In this block there is one GPU, which has bf16. Yields `waits`, which is empty at first."""
    waits.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda x: CUDA if there(x) else really(x)))
        patch.setattr(torch.Tensor, "is_cuda", property(there))
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "autocast", Autocast)
        patch.setattr(torch, "compile", lambda function, **how: function)
        patch.setattr(F, "embedding_bag", embedding_bag)
        for name in "is_autocast_enabled", "get_autocast_dtype":
            whole = getattr(torch, name)
            patch.setattr(torch, name, lambda kind="cpu", ask=whole: ask("cpu"))
        # Not is_available: AdamW would then ask the driver.
        for name, value in dict(device_count=1, is_bf16_supported=True, get_device_name="H100",
                                max_memory_allocated=0).items():
            patch.setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
        try:
            with Calls(), Operations():
                yield waits
        finally:
            storages.clear()
