"""Memory between canaries, in which nothing is 0 by chance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

# A multiple of what loads and stores are aligned to.
_PAD = 64


class Guards:
    """Stands behind `Tensor.new_empty` until the test ends, and keeps all that it gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._buffers: list[Tensor] = []
        self._plain = torch.Tensor.new_empty

        def new_empty(like: Tensor, *size: Any, **options: Any) -> Tensor:
            return self.make(like, *size, **options)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def make(self, like: Tensor, *size: Any, **options: Any) -> Tensor:
        """Returns a tensor of poison, of a dtype and a device as `new_empty` has them."""
        shape = size if all(isinstance(each, int) for each in size) else tuple(size[0])
        count = math.prod(shape)
        if not count:
            return self._plain(like, shape, **options)
        buffer = self._plain(like, count + 2 * _PAD, **options)
        self._buffers.append(buffer.fill_(_poison(buffer.dtype)))
        return buffer[_PAD:-_PAD].view(shape)

    def check(self) -> None:
        """Asserts that something was made, and that nothing around it was written."""
        assert self._buffers
        for buffer in self._buffers:
            around = torch.cat([buffer[:_PAD], buffer[-_PAD:]])
            assert bool((around.isnan() if buffer.is_floating_point() else around == _poison(buffer.dtype)).all())


def _poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min + 7
