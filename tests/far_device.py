"""Pretended devices, so that code for GPUs can be tested without one.

A ``Far`` tensor says that it is on the device "meta" or "meta:1", and holds its values in a CPU tensor. Kernels compute
on the CPU. Operands on two devices are refused, as CUDA refuses them, and whatever makes a host wait is counted. Not
covered: code that asks for CUDA by name, and derivatives in forward mode.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, attach_execution_device_hook
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fragility_numerics.nested import map_tensors, tensors
from fragility_offload.lockstep import Passes

CPU, FAR, FARTHER = map(torch.device, ("cpu", "meta", "meta:1"))
aten = torch.ops.aten

TRANSFERS = {aten._to_copy.default, aten.copy_.default}
READ_BY_THE_HOST = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.equal.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
}  # fmt: skip
INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip

waits: Counter[str] = Counter()  # how often a host would have waited since the last ``clear``, by cause


class Far(Tensor):
    """A tensor on a far device."""

    @staticmethod
    def __new__(cls, near: Tensor, device: torch.device = FAR):
        outside = Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), storage_offset=near.storage_offset(), dtype=near.dtype,
            device=device,
        )  # fmt: skip
        outside.near = near
        return outside

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"Far({self.near!r})"

    @property
    def data(self):
        return Far(self.near.data, self.device)

    @data.setter
    def data(self, value):
        Tensor.data.__set__(self, value)
        self.near = value.near

    def untyped_storage(self):
        return self.near.untyped_storage()

    def _is_view(self):
        return self.near._is_view() or Tensor._is_view(self)

    def tolist(self):
        waits["tolist"] += 1
        return self.near.tolist()

    def numpy(self):
        raise TypeError("numpy() of a tensor on another device")


def is_far(x) -> bool:
    return isinstance(x, Far)


def near(x):
    return x.near if is_far(x) else x


def put(x: Tensor, device: torch.device) -> Tensor:
    return x if is_far(x) or device == CPU else Far(x, device)


def run(func, args: tuple, kwargs: dict):
    """Compute ``func`` on the CPU and put its results on the device that would hold them."""
    given = [*tensors((args, kwargs))]
    place = next((x.device for x in given if is_far(x)), CPU)
    if kwargs.get("device") is not None:
        place = torch.device(kwargs["device"])
        kwargs = kwargs | {"device": CPU}
    note_waits(func, args, given, place)
    inside = {id(near(x)): x for x in given}  # an argument that is changed in place is returned itself
    results = func(*map_tensors(args, near), **map_tensors(kwargs, near))
    if func is aten._to_copy.default and place != args[0].device:
        results = results.clone()

    return map_tensors(results, lambda y: inside[id(y)] if id(y) in inside else put(y, place))


def note_waits(func, args: tuple, given: list[Tensor], place: torch.device) -> None:
    """Count what a host would wait for. Raises RuntimeError for operands on two devices."""
    if func is aten._to_copy.default:
        note_transfer(args[0].device, place)
    elif func is aten.copy_.default and args[1].ndim:
        note_transfer(args[1].device, args[0].device)
    if not any(map(is_far, given)) or func in TRANSFERS:
        return
    if func in READ_BY_THE_HOST:
        waits[func.name()] += 1
    if func in INDEXING:
        for index in args[1]:
            if index is not None and (not is_far(index) or index.dtype == torch.bool):
                waits["an index or mask"] += 1
        return
    apart = [tuple(x.shape) for x in given if x.device != place and (is_far(x) or x.ndim)]
    if apart or (func._schema.is_mutable and not is_far(args[0]) and isinstance(args[0], Tensor)):
        raise RuntimeError(f"{func.name()} has operands on two devices: not on {place} are those of shapes {apart}")


def note_transfer(source: torch.device, target: torch.device) -> None:
    """Count a transfer if a host would wait for it; it does not for one between two far devices."""
    if (source == CPU) != (target == CPU):
        waits["to the host" if target == CPU else "to the device"] += 1


class FarMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is aten.to:  # not yet unfolded inside of another mode
            with self:
                return func.decompose(*args, **kwargs or {})
        return run(func, args, kwargs or {})


@contextmanager
def far_device(monkeypatch) -> Iterator[torch.device]:
    """The far device, also the default of ``load_model``. Functions that torch implements in C++ are replaced."""
    make, run_pass = torch.tensor, Passes.run

    class Generator(torch.Generator):
        """Draws on the CPU for the device that it is said to be on."""

        def __new__(cls, device="cpu"):
            made = super().__new__(cls)
            made.place = torch.device(device)
            return made

        @property
        def device(self):
            return self.place

    def run_far(passes, number, one):  # in a thread of its own, which has no modes
        with FarMode():
            return run_pass(passes, number, one)

    def tensor(data, *, device=None, pin_memory=False, **options):
        made = make(data, **options)
        if device is None or torch.device(device) == CPU:
            return made
        waits["to the device"] += 1
        return put(made, torch.device(device))

    monkeypatch.setattr("fragility_lab.inputs.checkpoints.default_device", lambda: FAR.type)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_: None)
    monkeypatch.setattr(Passes, "run", run_far)
    with FarMode():
        waits.clear()
        yield FAR


def spread(model: nn.Module, places: dict[str, torch.device]) -> nn.Module:
    """``model``, changed in place, with its modules at ``places``, as ``accelerate.dispatch_model`` has them.

    That function itself would take "cpu" for a place from which weights are read anew, and "meta" for no place at all.
    """
    for path, device in places.items():
        module = model.get_submodule(path).to(device)
        add_hook_to_module(module, AlignDevicesHook(device, place_submodules=True, skip_keys="past_key_values"))
        attach_execution_device_hook(module, device, skip_keys="past_key_values")
    first = next(iter(places.values()))
    add_hook_to_module(model, AlignDevicesHook(first, io_same_device=True, skip_keys="past_key_values"))
    model.hf_device_map = places
    return model
