"""Graphs without a GPU, as strict as those of one: a replay repeats the launches that were recorded, with the addresses
and numbers that they had then, and runs none of the Python that made them. What the recorded work allocated holds
nonsense before each replay, and a recording that reads memory of the host is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

POISON = {torch.int64: 1 << 40, torch.int32: 1 << 30, torch.int8: 1 << 6, torch.bool: True}


class _Launches(TorchDispatchMode):
    """Takes note of torch's ops and of Triton's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.again: list[Callable[[], Any]] = []
        self.allocated: list[Tensor] = []
        self._is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_launching:
            return result
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host would wait for the device"
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        made = [each for each in tree_leaves(result) if _is_tensor(each)]
        new = [each for each in made if each.untyped_storage().data_ptr() not in given]
        self.allocated += new

        def repeat() -> None:
            results = [each for each in tree_leaves(func(*args, **kwargs)) if _is_tensor(each)]
            for place, found in zip(made, results, strict=True):
                if place.data_ptr() != found.data_ptr():
                    place.copy_(found)

        self.again.append(repeat)
        return result

    def bring(self, array: Any, plain: Callable[[Any], Tensor] = torch.from_numpy) -> Tensor:
        """Refuses to bring an array to the device; Triton's interpreter may."""
        assert self._is_launching, "a graph would read this array of the host again, at each replay"
        return plain(array)

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Launches a kernel of Triton's."""
        self._is_launching = True
        _run(kernel, *args, grid=grid, warmup=warmup, **options)
        self._is_launching = False
        self.again.append(lambda: _run(kernel, *args, grid=grid, warmup=warmup, **options))


_run = InterpretedFunction.run


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


class StrictRecording:
    """See `blockyard_kernels.cuda.graphs.Recording`."""

    def __init__(self, work: Callable[[], Tensor], pool: Any) -> None:
        launches = _Launches()

        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            launches.launch(kernel, *args, **options)

        patches = mock.patch.object(InterpretedFunction, "run", launch), mock.patch("torch.from_numpy", launches.bring)
        with patches[0], patches[1], launches:
            self.output = work()
        self._launches = launches
        self.num_launches = len(launches.again)

    def replay(self) -> None:
        """Does again what was launched."""
        for each in self._launches.allocated:
            each.fill_(POISON.get(each.dtype, float("nan")))
        for again in self._launches.again:
            again()
