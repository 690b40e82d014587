"""Reads how a checkpoint's weights are quantized (`quantization_config`), and refuses unsupported formats.

The formats are those of compressed-tensors (llm-compressor), AutoAWQ and GPTQ. Reads no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.model_config.fields import Fields

CONFIG_FIELDS = ("quantization_config", "compression_config", "quantization")
HELD_GROUPS = (128, 64, 32)
"""Group sizes of the kernels: the first that divides the checkpoint's group size is used."""
SMALLEST_GROUP = HELD_GROUPS[-1]
SUPPORTED = (
    "supported are compressed-tensors int-quantized W8A8 and pack-quantized W4A16, AWQ (gemm, 4 bits) and GPTQ "
    "(4 bits): take one of these, or the model's original weights"
)
_HARMLESS = frozenset({
    "quant_method", "version", "quantization_status", "global_compression_ratio", "run_compressed", "damp_percent",
    "damp_auto_increment", "true_sequential", "model_name_or_path", "model_file_base_name", "static_groups", "meta",
    "model_seqlen", "block_name_to_quantize", "dataset", "tokenizer", "batch_size", "pad_token_id", "max_input_length",
    "cache_block_outputs", "use_cuda_fp16", "disable_exllama", "use_exllama", "exllama_config", "backend", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "module_name_preceding_first_block", "kernel", "offload_to_disk", "mse",
})  # fmt: skip


class Packing(StrEnum):
    """The layout of quantized values and scales in a checkpoint's tensors."""

    BYTES = "compressed-tensors int-quantized"
    WORDS = "compressed-tensors pack-quantized"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    GPTQ_V2 = "GPTQ v2"
    """Zero points are stored unchanged; in GPTQ v1 they are stored minus 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The quantization format of a checkpoint's linear layers."""

    packing: Packing
    bits: int
    group: int
    """Number of inputs that share a scale; 0: all inputs of a row."""
    is_symmetric: bool
    is_ordered: bool = False
    """Whether a group's inputs are not adjacent but listed by `g_idx`."""
    targets: tuple[str, ...] = (".*",)
    """Regular expressions, matched from the beginning, for the names of quantized modules."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for the names of modules that are not quantized after all."""
    has_head: bool = True
    """Whether `targets` and `ignored` apply to the head too; if not, the head is not quantized."""

    @property
    def method(self) -> str:
        """The quantization's name in logs and answers: int8 or int4."""
        return "int8" if self.bits == 8 else "int4"

    @property
    def title(self) -> str:
        if self.packing is Packing.BYTES:
            return f"{self.packing} W8A8"
        group = f"groups of {self.group}" if self.group else "a scale for each output"
        order = ", in order of activations" if self.is_ordered else ""
        return f"{self.packing} W4A16, {group}, {'symmetric' if self.is_symmetric else 'asymmetric'}{order}"

    def covers(self, module: str) -> bool:
        """Returns whether a module, other than the head, is quantized."""
        return _matches(module, self.targets) and not _matches(module, self.ignored)

    def held_group(self, in_features: int) -> int:
        """Returns the kernels' group size for a weight, which divides the checkpoint's."""
        return next(size for size in HELD_GROUPS if (self.group or in_features) % size == 0)

    def leaf_unit(self, in_features: int) -> int:
        """Returns how many inputs of a weight must stay in one leaf."""
        if self.bits == 8:
            return 1
        return in_features if self.is_ordered else self.held_group(in_features)

    def misfit(self, in_features: int) -> str:
        """Returns why a weight with `in_features` inputs cannot be held in groups; empty: it can."""
        if self.bits == 8 or in_features % (self.group or SMALLEST_GROUP) == 0:
            return ""
        return f"{in_features} inputs are not a multiple of {self.group or SMALLEST_GROUP}"


def _matches(module: str, expressions: Sequence[str]) -> bool:
    return any(re.match(expression, module) for expression in expressions)


def read_stored_weights(fields: Fields) -> StoredWeights | None:
    """Reads the quantization format; None: the weights are not quantized, or a violation was recorded."""
    found = [name for name in CONFIG_FIELDS if fields.get(name) is not None]
    if not found:
        return None
    config = fields.get(found[0])
    reader = _Reader(fields, found[0], config if isinstance(config, dict) else {})
    stored = reader.read() if found == found[:1] and found[0] != "quantization" else None
    if stored is None and not reader.is_refused:
        reader.refuse("is not a known form of quantization")
    return None if reader.is_refused else stored


@dataclass(slots=True)
class _Reader:
    fields: Fields
    name: str
    config: dict[str, Any]
    is_refused: bool = False
    known: set[str] = field(default_factory=set[str])

    def refuse(self, problem: str) -> None:
        self.is_refused = True
        self.fields.refuse(self.name, f"config.json: {self.name} {problem}; {SUPPORTED}")

    def get(self, *names: str) -> Any:
        """Returns the first of the fields that is present and not null; None: none is."""
        self.known.update(names)
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a field whose value is neither null nor one of `allowed`."""
        value = self.get(name)
        if value not in (None, *allowed):
            self.refuse(f"has {name} {value!r}, which is not supported")

    def read(self) -> StoredWeights | None:
        method = self.get("quant_method") or ("compressed-tensors" if self.get("config_groups") else None)
        match method:
            case "compressed-tensors":
                stored = self._compressed_tensors()
            case "awq":
                stored = self._awq()
            case "gptq":
                stored = self._gptq()
            case _:
                self.refuse(f"has quant_method {method!r}")
                return None
        if unknown := sorted(self.config.keys() - self.known - _HARMLESS):
            self.fields.remarks.append(f"fields of {self.name} that are not known, and not read: {', '.join(unknown)}")
        return stored

    def _compressed_tensors(self) -> StoredWeights | None:
        form = self.get("format")
        if form not in ("int-quantized", "pack-quantized"):
            self.refuse(f"has format {form!r}")
            return None
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            value = self.get(name)
            if value and not (name == "sparsity_config" and _value(value, "format") == "dense"):
                self.refuse(f"has {name}, which is not supported")
        groups = self.get("config_groups")
        schemes = list(cast("dict[str, Any]", groups).values()) if isinstance(groups, dict) else []
        if len(schemes) != 1 or not isinstance(schemes[0], dict):
            self.refuse("must have one of config_groups: layers of several kinds are not supported")
            return None
        scheme = cast("dict[str, Any]", schemes[0])
        if scheme.get("format") not in (None, form):
            self.refuse(f"has a group of format {scheme['format']!r}")
        if scheme.get("output_activations") is not None:
            self.refuse("quantizes outputs (output_activations)")
        targets = self._expressions("targets", scheme.get("targets"), {"Linear": ".*"})
        ignored = self._expressions("ignore", self.get("ignore") or [], {})
        weights, inputs = scheme.get("weights"), scheme.get("input_activations")
        bits = 8 if form == "int-quantized" else 4
        self._compressed_weights(weights, bits)
        if bits == 8:
            self._token_inputs(inputs)
        elif inputs is not None:
            self.refuse("quantizes inputs beside weights of 4 bits (input_activations)")
        if self.is_refused:
            return None
        return StoredWeights(
            packing=Packing.BYTES if bits == 8 else Packing.WORDS,
            bits=bits,
            group=_value(weights, "group_size") if _value(weights, "strategy") == "group" else 0,
            is_symmetric=_value(weights, "symmetric") is not False,
            is_ordered=_value(weights, "actorder") in ("group", "dynamic"),
            targets=targets,
            ignored=ignored,
        )

    def _compressed_weights(self, weights: Any, bits: int) -> None:
        strategies = ("channel",) if bits == 8 else ("channel", "group")
        strategy = _value(weights, "strategy")
        problems = {
            f"of num_bits {_value(weights, 'num_bits')!r}, not {bits}": _value(weights, "num_bits") != bits,
            f"of type {_value(weights, 'type')!r}": _value(weights, "type") not in (None, "int"),
            f"of strategy {strategy!r}": strategy not in strategies,
            "with dynamic scales": bool(_value(weights, "dynamic")),
            "that are asymmetric in 8 bits": bits == 8 and _value(weights, "symmetric") is False,
            f"of actorder {_value(weights, 'actorder')!r}": _value(weights, "actorder")
            not in (None, False, "weight", "static", *(("group", "dynamic") if strategy == "group" else ())),
            "in blocks": _value(weights, "block_structure") is not None,
        }
        for problem, is_so in problems.items():
            if is_so:
                self.refuse(f"has weights {problem}")
        if strategy == "group":
            self._check_group(_value(weights, "group_size"))

    def _token_inputs(self, inputs: Any) -> None:
        if inputs is None:
            self.refuse("leaves the inputs of 8-bit weights as they are (W8A16)")
        elif _value(inputs, "dynamic") is not True:
            self.refuse("has static scales of activations")
        elif (_value(inputs, "num_bits"), _value(inputs, "type") or "int") != (8, "int") or _value(
            inputs, "strategy"
        ) != "token":
            self.refuse("quantizes inputs otherwise than in 8 bits, token by token")
        elif _value(inputs, "symmetric") is False:
            self.refuse("quantizes inputs asymmetrically")

    def _awq(self) -> StoredWeights | None:
        version = str(self.get("version") or "gemm").lower()
        if version != "gemm":
            self.refuse(f"has version {version!r} of AWQ")
        bits, group = self.get("bits", "w_bit"), self.get("group_size", "q_group_size")
        self._check_bits(bits)
        if self.get("zero_point") is False:
            self.refuse("has AWQ without zero points")
        ignored = self.get("modules_to_not_convert") or []
        if not _is_texts(ignored):
            self.refuse("has modules_to_not_convert that are no list of names")
        group = self._group_or_all(group)
        if self.is_refused:
            return None
        return StoredWeights(
            packing=Packing.AWQ,
            bits=4,
            group=group,
            is_symmetric=False,
            ignored=tuple(f".*{re.escape(name)}" for name in ignored),
            has_head=False,
        )

    def _gptq(self) -> StoredWeights | None:
        form = self.get("checkpoint_format", "format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            self.refuse(f"has checkpoint_format {form!r}")
        self._check_bits(self.get("bits"))
        self.require("pack_dtype", "int32")
        self.require("is_marlin_format", False)
        self.require("method", "gptq")
        for name in ("dynamic", "adapter", "rotation"):
            if self.get(name):
                self.refuse(f"has {name}, which is not supported")
        names = self.get("modules_in_block_to_quantize", "modules_to_quantize") or []
        flat = [name for each in names for name in each] if _is_lists(names) else names
        if not _is_texts(flat):
            self.refuse("has modules_in_block_to_quantize that are no lists of names")
        group = self._group_or_all(self.get("group_size"))
        if self.is_refused:
            return None
        return StoredWeights(
            packing=Packing.GPTQ_V2 if form == "gptq_v2" else Packing.GPTQ,
            bits=4,
            group=group,
            is_symmetric=self.get("sym") is not False,
            is_ordered=bool(self.get("desc_act")),
            targets=tuple(rf".*\.{re.escape(name)}$" for name in flat) or (".*",),
            has_head=bool(self.get("lm_head")),
        )

    def _check_bits(self, bits: Any) -> None:
        if bits != 4:
            self.refuse(f"has weights of {bits!r} bits, not 4")

    def _group_or_all(self, group: Any) -> int:
        if group == -1:
            return 0
        self._check_group(group)
        return group if isinstance(group, int) else 0

    def _check_group(self, group: Any) -> None:
        if not isinstance(group, int) or isinstance(group, bool) or group < 1 or group % SMALLEST_GROUP:
            self.refuse(f"has groups of {group!r} weights: they must be multiples of {SMALLEST_GROUP}")

    def _expressions(self, name: str, texts: Any, classes: dict[str, str]) -> tuple[str, ...]:
        if not _is_texts(texts):
            self.refuse(f"has {name} that are no list of names")
            return ()
        found = tuple(
            classes.get(text) or (text[3:] if text.startswith("re:") else f"{re.escape(text)}$") for text in texts
        )
        for expression in found:
            try:
                re.compile(expression)
            except re.error as error:
                self.refuse(f"has {name} with {expression!r}, which is no regular expression ({error})")
        return found


def _value(described: Any, name: str) -> Any:
    return cast("dict[str, Any]", described).get(name) if isinstance(described, dict) else None


def _is_lists(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, list) for value in cast("list[Any]", values))


def _is_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in cast("list[Any]", values))
