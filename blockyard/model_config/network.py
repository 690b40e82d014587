"""Reads config.json into one frozen dataclass, `DecoderConfig`, and refuses every unsupported setting.

Reads files of transformers 5 and of older versions as transformers 5 does. A field that transformers reads is honoured
or refused; an unknown field gets a remark. Reads no weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.errors import BlockyardError, Violation
from blockyard.model_config.decoder_config import DTYPES, DecoderConfig, Experts, Mlp
from blockyard.model_config.families import (
    cohere,
    encoders,
    gemma,
    gpt,
    granite,
    hybrids,
    llama,
    mamba,
    mixtures,
    multimodal,
    olmo,
    relatives,
)
from blockyard.model_config.fields import FIELDS as OWN_CODE
from blockyard.model_config.fields import Fields, read_object, refuse_own_code, unusable
from blockyard.model_config.other_fields import HARMLESS, REFUSED
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_config.stored_weights import CONFIG_FIELDS, StoredWeights, read_stored_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard.model_config.families.family import Family
    from blockyard.model_config.pooling.rule import PoolingRule


# Suffixes of architectures without a head that generates tokens.
_OTHER_BODIES = ("ForSequenceClassification", "ForMaskedLM", "Model")

_STEMS = ("ForCausalLM", "LMHeadModel")

MODULES = (llama, gemma, granite, relatives, olmo, cohere, gpt, mixtures, multimodal, hybrids, mamba)

FAMILIES: dict[str, Family] = {name: family for module in MODULES for name, family in module.FAMILIES.items()}


def find_family(architecture: str) -> Family | None:
    """Returns the family of an architecture, also of one without a head or with another head; None: not supported."""
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    stem = next((architecture.removesuffix(body) for body in _OTHER_BODIES if architecture.endswith(body)), "")
    decoders = (FAMILIES.get(stem + suffix) for suffix in _STEMS)
    return encoders.FAMILIES.get(f"{stem}Model") or next(filter(None, decoders), None)


# Top-level fields of a multimodal config.json that apply to the text model too.
_OF_ALL_MODELS = ("architectures", "model_type", *OWN_CODE, "dtype", "torch_dtype", "tie_word_embeddings")

_TEXT = "text_config"


def read_network(folder: Path, dtype: str = "auto", task: Task = Task.UNSPECIFIED) -> DecoderConfig:
    """Reads a model folder's config.json.

    Args:
        folder: the model's folder.
        dtype: the dtype to compute in; auto: as config.json says, float32 if it does not say.
        task: the task to serve; UNSPECIFIED: as the model's files say.

    Raises:
        BlockyardError: MODEL_NOT_LOADED with all violations, if the file is missing, damaged or asks for something
            unsupported.
    """
    fields = Fields(read_object(folder / "config.json"))
    network = _read(fields, dtype, folder, task)
    if network is None or fields.violations:
        message = "; ".join(violation.description for violation in fields.violations)
        raise unusable(message, tuple(fields.violations))
    return network


def find_violations(folder: Path, dtype: str = "auto", task: Task = Task.UNSPECIFIED) -> tuple[Violation, ...]:
    """Returns the reasons why a model cannot be served, by its config.json; empty: it can be served.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the file is missing or damaged.
    """
    fields = Fields(read_object(folder / "config.json"))
    _read(fields, dtype, folder, task)
    return tuple(fields.violations)


def _read(fields: Fields, dtype: str, folder: Path, task: Task) -> DecoderConfig | None:
    """Reads the whole configuration; None if no architecture is supported."""
    architecture, family = _family(fields)
    stored = _read_stored(fields, family.unpacked if family else "")
    dtype_name = read_dtype(fields, dtype)
    if family is None:
        return None
    read = _enter_text_model(fields, family) if family.texts else family.read
    fields.renamed = family.renamed
    config = read(fields)
    if next(config.attentions, None) is None:
        fields.refuse("layer_types", "config.json: no layer has attention, and models without attention are not served")
        return None
    _require_factors(fields, config)
    _refuse_others(fields)
    pooling = _pooling(fields, folder, task, architecture)
    config = replace(config, architecture=architecture, dtype_name=dtype_name, names=family.names, pooling=pooling)
    config = replace(config, stored=stored)
    _refuse_misfits(fields, config)
    return replace(config, remarks=tuple(fields.remarks))


def _pooling(fields: Fields, folder: Path, task: Task, architecture: str) -> PoolingRule | None:
    try:
        return read_rule(folder, task, architecture)
    except BlockyardError as error:
        fields.refuse("task", error.message)
        return None


def _require_factors(fields: Fields, config: DecoderConfig) -> None:
    """Refuses rotary embeddings that do not have one factor for each frequency."""
    for rotary in config.rotaries:
        count = rotary.rotated(config.head_dim) // 2
        if {len(rotary.short_factors), len(rotary.long_factors)} - {0, count}:
            problem = f"must have {count} numbers each, one for each frequency"
            fields.refuse("rope_scaling", f"config.json: short_factor and long_factor {problem}")


def _enter_text_model(fields: Fields, family: Family) -> Callable[[Fields], DecoderConfig]:
    """Replaces the fields by the text model's in a multimodal config.json; returns the text model's reader.

    Older files have the text model's fields at the top level.
    """
    fields.remarks.append("of the models that config.json has, the text model alone is served")
    inner = fields.get(_TEXT)
    if inner is None and fields.has("hidden_size"):
        fields.get("vision_config")
        inner = fields.values
    if not isinstance(inner, dict):
        fields.refuse(_TEXT, f"config.json: {_TEXT} must be an object, the text model's own fields, not {inner!r}")
        inner = {}
    model_type = inner.get("model_type", "")
    read = family.read if model_type in ("", family.model_type) else family.texts.get(model_type)
    if read is None:
        supported = ", ".join(family.texts)
        fields.refuse(_TEXT, f"config.json: {_TEXT} is of a {model_type!r}, not supported (supported: {supported})")
    if stored := [name for name in CONFIG_FIELDS if inner.get(name) is not None and inner is not fields.values]:
        fields.refuse(
            stored[0], f"config.json: {stored[0]} stands in {_TEXT}, where it is not read: move it to the top"
        )
    outer = {name: fields.get(name) for name in _OF_ALL_MODELS if fields.has(name)}
    fields.values = {**inner, "tie_word_embeddings": family.is_tied, **outer}
    return read or family.read


def _read_stored(fields: Fields, unpacked: str) -> StoredWeights | None:
    """Reads how weights are quantized. `unpacked`: the method that is dequantized at loading; returns None for it."""
    given = fields.get(CONFIG_FIELDS[0])
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not unpacked or method != unpacked:
        return read_stored_weights(fields)
    held = "they are held in the model's dtype, which takes four times as much memory or more"
    fields.remarks.append(f"weights that are quantized as {unpacked} are turned into numbers when loaded: {held}")
    for name in CONFIG_FIELDS[1:]:
        if fields.get(name) is not None:
            fields.refuse(name, f"config.json has {name} beside {CONFIG_FIELDS[0]}, which is not supported")
    return None


def _refuse_misfits(fields: Fields, config: DecoderConfig) -> None:
    """Refuses quantized weights that the kernels cannot hold."""
    if config.stored is None:
        return
    names, heads = config.names, config.num_heads * config.head_dim
    inputs = {names.query: config.hidden_size, names.up: config.hidden_size, names.output: heads}
    problems = {
        problem
        for index in range(config.num_layers)
        for module, width in (*inputs.items(), *_down_inputs(names.down, config.layers[index].feed))
        if config.stored.covers(names.prefixes[0] + names.layer.format(index) + module)
        and (problem := config.stored.misfit(width))
    }
    if config.names.are_transposed:
        problems.add("this architecture's weights are stored transposed")
    if any(isinstance(layer.feed, Experts) for layer in config.layers):
        problems = {"experts are not served quantized yet"}
    for problem in sorted(problems):
        fields.refuse("quantization_config", f"config.json: quantization_config cannot be served: {problem}")


def _down_inputs(name: str, feed: Mlp | Experts | None) -> tuple[tuple[str, int], ...]:
    return ((name, feed.inner_features),) if feed is not None else ()


def find_architecture(fields: Fields) -> str:
    """Returns the model's first supported architecture; empty: there is none."""
    given = fields.get("architectures")
    return next((str(name) for name in given if find_family(str(name))), "") if isinstance(given, list) else ""


def _family(fields: Fields) -> tuple[str, Family | None]:
    """Returns the first supported architecture and its family; refuses the model if there is none."""
    given = fields.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    chosen = find_architecture(fields)
    family = find_family(chosen)
    refuse_own_code(fields)
    if family is not None:
        model_type = fields.text("model_type", "")
        # With several architectures, model_type may belong to another of them.
        if model_type not in ("", family.model_type) and len(names) == 1:
            problem = f"config.json names the architecture {chosen} and the model_type {model_type!r} of another one"
            fields.refuse("model_type", problem)
        return chosen, family
    problem = f"architecture {', '.join(map(repr, names))} is not supported" if names else ""
    problem = problem or "config.json names no architecture"
    others = "others as transformers computes them, where that is installed: pip install 'blockyard[transformers]'"
    # Use short names: the length of an error message is limited.
    supported = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
    fields.refuse("architectures", f"{problem} (supported: {supported}; {others})")
    return "", None


def _refuse_others(fields: Fields) -> None:
    """Refuses unread fields that would change results, and remarks on unknown fields."""
    read = {*fields.read, "dtype", "torch_dtype", "rope_theta"}
    for name, neutral in REFUSED.items():
        if name not in read:
            fields.require(name, *neutral)
    for name in sorted(fields.renamed.keys() & fields.values.keys() - read):
        fields.refuse_other_name(name)
    if unknown := sorted(fields.values.keys() - read - HARMLESS - REFUSED.keys()):
        fields.remarks.append(f"fields of config.json that are not known, and not read: {', '.join(unknown)}")


def read_dtype(fields: Fields, dtype: str) -> str:
    """Returns the dtype to compute in; `dtype`: as for `read_network`."""
    if dtype != "auto":
        return dtype
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name in DTYPES:
        return name
    fields.refuse("dtype", f"config.json asks for dtype {name!r}: set --dtype to one of {', '.join(DTYPES)}")
    return "float32"
