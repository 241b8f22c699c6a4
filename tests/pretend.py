"""A GPU that is not there, so that a machine without one can see where tensors would be.

Inside `gpu()`, `--device=auto` finds one GPU. Its tensors are on the CPU and say cuda. An operation
on tensors of both devices is an error, as on a real one. What this cannot show: memory, time,
the kernels of CUDA, torch.compile (it does nothing in here), and NCCL.
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
ours = {}  # {address of a storage on the GPU: a reference, so that no other gets this address}


def there(x):
    return x.layout == torch.strided and x.untyped_storage()._cdata in ours


def put(x, on_gpu=True):
    storage = x.untyped_storage()
    ours.pop(storage._cdata, None)
    if on_gpu:
        ours[storage._cdata] = StorageWeakRef(storage)
    return x


def tensors(*nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


class Operations(TorchDispatchMode):
    """Refuses what mixes devices. A result is where its inputs are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, inputs = func._schema.name.removeprefix("aten::"), tensors(args, kwargs)
        if name in ("copy_", "_to_copy"):
            on_gpu = there(inputs[0])
        else:
            on_gpu = any(map(there, inputs))
            if name in ("index", "index_put_", "_index_put_impl_") and there(args[0]):
                inputs = [args[0], *tensors(args[2:])]  # indices may come from the CPU
            # So may a single number.
            other = [x for x in inputs if not there(x) and (x.dim() or name in ("cat", "stack"))]
            assert not (on_gpu and other), f"{name} of tensors on the CPU and on the GPU"
        out = func(*args, **kwargs or {})
        if on_gpu and name != "copy_":
            for x in tensors(out):
                put(x)
        return out


class Calls(TorchFunctionMode):
    """Turns the calls that name a device into calls for the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, device = dict(kwargs or {}), getattr(func, "__name__", ""), None
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("to", "cpu", "cuda") and x is not None:
            words = [*args[1:], *kwargs.values(), *{"cpu": [CPU], "cuda": [CUDA]}.get(name, [])]
            device = next((w for w in words if isinstance(w, (str, torch.device))), None)
            dtype = next((w for w in words if isinstance(w, torch.dtype)), x.dtype)
            if device is None or torch.device(device).type == "meta":
                return func(*args, **kwargs)
            on_gpu = torch.device(device).type == "cuda"
            copy = kwargs.get("copy", False) or on_gpu != there(x)
            return put(torch.Tensor.to(x, CPU, dtype, copy=copy), on_gpu)
        if name in ("numpy", "__array__", "tolist") and there(x):
            assert name == "tolist", "a tensor on the GPU is no array"
            x = x.detach()
        if name == "pin_memory":
            return x
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            kwargs["device"] = CPU if device.type == "cuda" else device
        if kwargs.get("generator") is not None:
            where = device or (CPU if x is None else x.device)
            assert kwargs["generator"].device.type == where.type, f"{name}: generator elsewhere"
        out = func(*args, **kwargs)
        return put(out) if device is not None and device.type == "cuda" else out


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


@contextlib.contextmanager
def gpu():
    """In this block there is one GPU, which has bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(lambda x: CUDA if there(x) else really(x)))
        patch.setattr(torch.Tensor, "is_cuda", property(there))
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "autocast", Autocast)
        patch.setattr(torch, "compile", lambda function, **how: function)
        patch.setattr(F, "embedding_bag", lambda ids, table, per_sample_weights, mode: (
            F.embedding(ids, table) * per_sample_weights[..., None]).sum(1))
        for name in "is_autocast_enabled", "get_autocast_dtype":
            whole = getattr(torch, name)
            patch.setattr(torch, name, lambda kind, ask=whole: ask("cpu"))
        for name, value in dict(is_available=True, device_count=1, is_bf16_supported=True,
                                get_device_name="H100", max_memory_allocated=0).items():
            patch.setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
        with Calls(), Operations():
            yield
    ours.clear()
