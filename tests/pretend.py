"""A GPU that is not there: inside `gpu()`, --device=auto finds one. Its tensors are on the CPU and
say cuda. Mixing devices is an error, and operations that the host would wait for are counted.
"""
import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INDEXING = "index", "index_put", "index_put_", "_index_put_impl_"
WAITING = "nonzero", "masked_select", "equal", "_local_scalar_dense", "bincount"
waits = []  # names of operations


def on_gpu(x):
    return isinstance(x, torch.Tensor) and getattr(x.untyped_storage(), "on_gpu", False)


def tensors(nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, inputs = func._schema.name.removeprefix("aten::"), tensors((args, kwargs))
        if name == "index_put":  # its backward pass makes values that nothing is known of
            inputs = tensors(args[:2])
        result_on_gpu = any(map(on_gpu, inputs)) and name != "copy_"
        if name in INDEXING and on_gpu(args[0]):
            # An index or a number (x[i] = 7) from the CPU is a wait. So is the size of a mask.
            indices = tensors(args[1])
            if not all(map(on_gpu, inputs)) or any(i.dtype == torch.bool for i in indices):
                waits.append(name)
            inputs = [args[0], *inputs[1 + len(indices):]]
        elif (name in WAITING and result_on_gpu
              or name == "copy_" and on_gpu(args[0]) != on_gpu(args[1])):  # x[7] = 1.0 is one, too
            waits.append(name)
        mixed = [x for x in inputs if x.dim() and not on_gpu(x)]  # a number may be on the CPU
        assert not (result_on_gpu and mixed), f"{name} mixes CPU and GPU"
        out = func(*args, **kwargs or {})
        for x in tensors(out):
            x.untyped_storage().on_gpu = result_on_gpu or on_gpu(x)
        return out


class Calls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, x = func.__name__, kwargs or {}, args[0] if args else None
        assert not (on_gpu(x) and name in ("numpy", "__array__")), f"{name} of a tensor on the GPU"
        word = args[1] if name == "to" and len(args) > 1 else kwargs.get("device")
        device = getattr(word, "device", word)  # `to` also takes a tensor to follow
        kind = str(device or getattr(x, "device", "cpu")).partition(":")[0]
        generator = kwargs.get("generator")
        assert not generator or generator.device.type == kind, f"{name}: a generator elsewhere"
        if not device or kind not in ("cpu", "cuda"):  # a dtype, or meta
            return func(*args, **kwargs)
        args = ["cpu" if arg is device else arg for arg in args]
        out = func(*args, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))
        if name == "to" and on_gpu(x) != (kind == "cuda"):
            out = out.clone()
            if not (getattr(x.untyped_storage(), "pinned", False) and kwargs.get("non_blocking")):
                waits.append(name)
        elif name in ("tensor", "as_tensor") and kind == "cuda" and not on_gpu(x):
            waits.append(name)
        out.untyped_storage().on_gpu = kind == "cuda"
        return out


def pin_memory(x):
    x = x.clone()
    x.untyped_storage().pinned = True
    return x


@contextlib.contextmanager
def gpu():
    """In this block there is a GPU without bf16. Yields `waits`, which is empty at first."""
    waits.clear()
    device, cuda, tolist = torch.Tensor.device.__get__, torch.device("cuda:0"), torch.Tensor.tolist
    of_tensors = mock.patch.multiple(
        torch.Tensor, cpu=lambda x: x.to("cpu"), tolist=lambda x: tolist(x.to("cpu")),
        device=property(lambda x: cuda if on_gpu(x) else device(x)), is_cuda=property(on_gpu),
        pin_memory=pin_memory)
    of_torch = mock.patch.object(torch, "compile", lambda f, **options: f)
    # is_available stays False, or AdamW would ask whether CUDA captures a graph.
    one_gpu = mock.patch.multiple(torch.cuda, device_count=lambda: 1, set_device=mock.Mock())
    with of_tensors, of_torch, one_gpu, Calls(), Operations():
        yield waits
