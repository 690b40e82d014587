"""Reads the tensors of recurrences: a rank has some heads of each, or some features of a convolution without heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard.model_config.recurrent import RecurrentKind as Kind
from blockyard_kernels.recurrent.ops import RecurrentKind, RecurrentShape, RecurrentWeights
from worker_service.models.mixers.recurrent import RecurrentMixer
from worker_service.models.part_reader import PartReader
from worker_service.models.projections import Cut, parts_order, stacked_parts

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard.model_config.recurrent import Recurrent
    from worker_service.models.projections import ProjectionRows

# The modules of the first product if their rows are grouped by key head.
NUM_GROUPED = 2


class RecurrentReader(PartReader):
    def _recurrent(self, prefix: str, recurrent: Recurrent) -> RecurrentMixer:
        """Reads the recurrence of a layer. `prefix`: of the layer's names."""
        names, share = self._config.names.recurrent, self._share
        mine = recurrent.share(share.tensor_parallel_size)
        parts = self._inputs(recurrent)
        if recurrent.kind is Kind.MAMBA2:
            modules = (self._mamba_module(prefix, recurrent),)
        elif recurrent.num_value_heads and len(names.inputs) == NUM_GROUPED:
            modules = self._grouped_modules(prefix, recurrent)
        else:
            sizes = (sum(cut.size for cut in cuts) for cuts in parts)
            modules = tuple(
                self._rows(prefix + name, size, stacked_parts(cuts))
                for name, size, cuts in zip(names.inputs, sizes, parts, strict=True)
            )
        features = Cut(recurrent.out_features, share.part(recurrent.out_features))
        return RecurrentMixer(
            shape=RecurrentShape(
                RecurrentKind(mine.kind.value),
                mine.conv_features,
                mine.conv_width,
                mine.num_key_heads,
                mine.num_value_heads,
                mine.key_dim,
                mine.value_dim,
                mine.epsilon,
            ),
            inputs=self._linear(modules, bias=recurrent.in_bias),
            weights=self._recurrent_weights(prefix, recurrent, parts[0]),
            output=self._row_parallel(prefix + names.output, features, share.mixer_leaves, bias=recurrent.out_bias),
        )

    def _mamba_module(self, prefix: str, recurrent: Recurrent) -> ProjectionRows:
        """Returns the module of Mamba's first product. Its gates are stored first, and packed behind the inputs."""
        mixed, gates, times = self._inputs(recurrent)
        stored = (*gates, *mixed, *times)
        rows = torch.arange(sum(cut.num_features for cut in stored))
        num_gates, num_mixed = gates[0].num_features, sum(cut.num_features for cut in mixed)
        order = torch.cat([rows[num_gates : num_gates + num_mixed], rows[:num_gates], rows[num_gates + num_mixed :]])
        name = prefix + self._config.names.recurrent.inputs[0]
        return self._rows(name, sum(cut.size for cut in stored), stacked_parts(stored), order=order)

    def _grouped_modules(self, prefix: str, recurrent: Recurrent) -> tuple[ProjectionRows, ...]:
        """Returns the modules of the first product if their rows are grouped by key head: see `RecurrentNames`."""
        heads, num_values = self._share.part(recurrent.num_key_heads), recurrent.num_value_heads
        values = num_values // recurrent.num_key_heads
        sizes = (recurrent.key_dim,) * 2 + (values * recurrent.value_dim,) * 2, (values,) * 2
        cuts = [Cut(recurrent.num_key_heads, heads, sum(each)) for each in sizes]
        return tuple(
            self._rows(prefix + name, cut.size, (cut.part,), order=parts_order(each, len(heads)))
            for name, cut, each in zip(self._config.names.recurrent.inputs, cuts, sizes, strict=True)
        )

    def _inputs(self, recurrent: Recurrent) -> tuple[tuple[Cut, ...], ...]:
        """Cuts the outputs of each module of the first product."""
        share = self._share
        if not recurrent.num_value_heads:
            features = Cut(recurrent.conv_features, share.part(recurrent.conv_features))
            return ((features, features, features),)
        keys = Cut(recurrent.num_key_heads, share.part(recurrent.num_key_heads), recurrent.key_dim)
        heads = share.part(recurrent.num_value_heads)
        values = Cut(recurrent.num_value_heads, heads, recurrent.value_dim)
        each = Cut(recurrent.num_value_heads, heads)
        if recurrent.kind is Kind.MAMBA2:
            return (values, keys, keys), (values,), (each,)
        return (keys, keys, values), (values,), (each,), (each,)

    def _recurrent_weights(self, prefix: str, recurrent: Recurrent, mixed: tuple[Cut, ...]) -> RecurrentWeights:
        names, width = self._config.names.recurrent, recurrent.conv_width
        part = (stacked_parts(mixed if recurrent.num_value_heads else mixed[:1]),)
        conv = self._keep(self._read(f"{prefix}{names.conv}.weight", recurrent.conv_features, 1, width, part=part))
        bias = None
        if recurrent.conv_bias:
            bias = self._keep(self._read(f"{prefix}{names.conv}.bias", recurrent.conv_features, part=part))
        if not recurrent.num_value_heads:
            return RecurrentWeights(conv.flatten(1), bias)
        heads = self._share.part(recurrent.num_value_heads)
        decay_log, step_bias = (
            self._head_numbers(prefix + name, recurrent.num_value_heads, slice(heads.start, heads.stop))
            for name in (names.decay_log, names.step_bias)
        )
        if recurrent.kind is not Kind.MAMBA2:
            norm = self._norm_tensor(f"{prefix}{names.norm}.weight", recurrent.value_dim, self._config.dtype)
            return RecurrentWeights(conv.flatten(1), bias, decay_log, step_bias, norm)
        part = ((mixed[0].part,),)
        norm = self._keep(self._read(f"{prefix}{names.norm}.weight", recurrent.norm_features, part=part))
        skip = self._head_numbers(prefix + names.skip, recurrent.num_value_heads, slice(heads.start, heads.stop))
        return RecurrentWeights(conv.flatten(1), bias, decay_log, step_bias, norm, skip)

    def _head_numbers(self, name: str, count: int, part: slice) -> Tensor:
        return self._keep(self._read(name, count, part=((part,),), dtype=torch.float32))
