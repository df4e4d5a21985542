"""Counts what a GPU would make the host wait for, on a CPU: reads of values that a model has computed.

Some tensors are said to be on the device; so is all that is computed from them. What depends on their values is a read:
an item, a copy to the CPU, a boolean index, a comparison of whole tensors. Copies to the device are not seen here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import epo_trl

OURS = str(Path(epo_trl.__file__).parent)
LIBRARIES = tuple(f"/site-packages/{name}/" for name in ("trl", "transformers", "accelerate", "peft"))
READS = {
    "aten::nonzero", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::masked_select", "aten::equal",
    "aten::bincount", "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave",
}  # fmt: skip
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
COPIES = {Tensor.cpu, Tensor.numpy, Tensor.tolist}


class DeviceReads:
    """Counts reads inside of a `with` block.

    Args:
        on_device: Tensors that are said to be on the device.

    Attributes:
        ours: Number of reads by file and line of ours; those by a line of a library are not among them.
    """

    def __init__(self, on_device: Iterable[Any]):
        self.ours: Counter[str] = Counter()
        self._storages: dict[int, Any] = {}  # held, so that no other takes the place of one
        self._stack = ExitStack()
        for tensor in on_device:
            self.add(tensor)

    def __enter__(self) -> DeviceReads:
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def add(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._storages

    def read(self, what: str) -> None:
        """Counts a read if the innermost line that is ours or a library's is ours."""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(OURS):
                self.ours[f"{Path(file).name}:{frame.f_lineno} {what}"] += 1
            if file.startswith(OURS) or any(library in file for library in LIBRARIES):
                return
            frame = frame.f_back


class _Operations(TorchDispatchMode):
    def __init__(self, reads: DeviceReads):
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = tree_leaves((args, kwargs))
        if any(map(self._reads.has, inputs)):
            name = func._schema.name
            masks = name in INDEXING and any(
                isinstance(x, Tensor) and x.dtype is torch.bool for x in tree_leaves(args[1])
            )
            if name in READS or masks:
                self._reads.read(name.removeprefix("aten::"))
            output = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(output):
                self._reads.add(tensor)
            return output
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Sees the copies to the CPU, which do nothing to a tensor that is there."""

    def __init__(self, reads: DeviceReads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES and self._reads.has(args[0]):
            self._reads.read(func.__name__)
            if func is Tensor.cpu:
                return torch.tensor(args[0].detach().tolist(), dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))
