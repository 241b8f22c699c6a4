"""A GPU that is not there: inside `gpu()`, --device=auto finds one. Its tensors are on the CPU and
say cuda. What mixes devices is an error, and operations that the host would wait for are counted.
"""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = "nonzero", "masked_select", "equal", "_local_scalar_dense", "bincount"
waits = []  # names of operations


def there(x):
    return isinstance(x, torch.Tensor) and getattr(x.untyped_storage(), "on_gpu", False)


def tensors(nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, inputs = func._schema.name.removeprefix("aten::"), tensors((args, kwargs))
        on_gpu = any(map(there, inputs)) and name != "copy_"
        if on_gpu:
            self.check(name, inputs, args)
        out = func(*args, **kwargs or {})
        for x in tensors(out):
            x.untyped_storage().on_gpu = on_gpu or there(x)
        return out

    def check(self, name, inputs, args):
        if name in ("index", "index_put_", "_index_put_impl_") and there(args[0]):
            # Indices and a number, x[i] = 7, may come from the CPU. The size of a mask does.
            if not all(map(there, inputs)) or any(i.dtype == torch.bool for i in tensors(args[1])):
                waits.append(name)
            inputs = [args[0], *tensors(args[2:])]
        elif name in WAITING:
            waits.append(name)
        # Most operations take a number of the CPU.
        assert all(there(x) or not x.dim() for x in inputs), f"{name} mixes CPU and GPU"


class Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, x = func.__name__, dict(kwargs or {}), args[0] if args else None
        assert not (there(x) and name in ("numpy", "__array__")), f"{name} of a tensor on the GPU"
        word = args[1] if name == "to" and len(args) > 1 else kwargs.get("device")
        device = getattr(word, "device", word)  # of a tensor, if x is to be like it
        kind = str(device or getattr(x, "device", "cpu")).partition(":")[0]
        generator = kwargs.get("generator")
        assert not generator or generator.device.type == kind, f"{name}: a generator elsewhere"
        if not device or kind not in ("cpu", "cuda"):  # it is a dtype, or meta
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        elif word is device:
            args = (x, "cpu", *args[2:])
        out = func(*args, **kwargs)
        if name == "to" and there(x) != (kind == "cuda"):
            out = out.clone()
            if not kwargs.get("non_blocking"):
                waits.append(name)
        out.untyped_storage().on_gpu = kind == "cuda"
        return out


class Generator(torch.Generator):
    device = torch.device("cpu")

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls)
        generator.device = torch.device(device)
        return generator


@contextlib.contextmanager
def gpu():
    """In this block there is a GPU without bf16. Yields `waits`, which is empty at first."""
    waits.clear()
    really, cuda, tolist = torch.Tensor.device.__get__, torch.device("cuda", 0), torch.Tensor.tolist
    changes = {
        "Tensor.device": property(lambda x: cuda if there(x) else really(x)),
        "Tensor.is_cuda": property(there),
        "Tensor.cpu": lambda x: x.to("cpu"),
        "Tensor.tolist": lambda x: tolist(x.to("cpu")),
        "Tensor.pin_memory": lambda x: x,
        "Generator": Generator,
        "compile": lambda function, **options: function,
        "cuda.device_count": lambda: 1}  # not is_available: AdamW would then ask the driver
    with pytest.MonkeyPatch.context() as patch, Calls(), Operations():
        for name, change in changes.items():
            patch.setattr(f"torch.{name}", change)
        yield waits
