"""Reads sentence-transformers' files beside a model: modules.json and its modules, prompts and limits."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockyard.contract.pooling import PoolingKind
from blockyard.model_config.activation import Activation
from blockyard.model_config.fields import read_object, unusable
from blockyard.model_config.pooling.rule import Dense, PoolingRule
from blockyard.paths import read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.models import Task

# sentence-transformers' names of pooling modes, and the flags for them in its older files.
_MODES = {"lasttoken": PoolingKind.LAST, "cls": PoolingKind.FIRST, "mean": PoolingKind.MEAN}
_OLD_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {
    "Identity": None,
    "Tanh": Activation.TANH,
    "ReLU": Activation.RELU,
    "SiLU": Activation.SILU,
    "GELU": Activation.GELU_ERF,
}

# Fields of sentence_bert_config.json that change results, and the values with which they do not.
_NEUTRAL = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    **dict.fromkeys(("processing_kwargs", "config_args", "config_kwargs"), None),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), None),
}


@dataclass(slots=True)
class Modules:
    folder: Path
    kind: PoolingKind | None = None
    source: str = ""
    products: list[Dense] = field(default_factory=list[Dense])
    normalise: bool = False
    label_token_ids: tuple[int, ...] = ()

    @property
    def makes_vectors(self) -> bool:
        """Whether the modules pool rows into a vector."""
        return self.kind is not None

    def make_rule(self, task: Task) -> PoolingRule:
        assert self.kind is not None
        words, limits = _read(self.folder, "config_sentence_transformers.json"), self._limits()
        prompts, chosen = words.get("prompts") or {}, words.get("default_prompt_name") or ""
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise unusable("config_sentence_transformers.json: prompts must be texts by name")
        if chosen and chosen not in prompts:
            raise unusable(f"config_sentence_transformers.json has no prompt {chosen!r}, its default_prompt_name")
        return PoolingRule(
            task=task,
            kind=self.kind,
            rows=self.kind,
            products=tuple(self.products),
            normalise=self.normalise,
            prompts=prompts,
            default_prompt=chosen,
            max_tokens=_integer(limits, "max_seq_length", "sentence_bert_config.json") or 0,
            lowers_case=limits.get("do_lower_case") is True,
            source=self.source,
        )

    def _limits(self) -> dict[str, Any]:
        path = "sentence_bert_config.json"
        limits = _read(self.folder, path)
        for name, neutral in _NEUTRAL.items():
            if (value := limits.get(name)) and value != neutral:
                raise unusable(f"{path}: {name} is {value!r}, which is not supported where rows make a vector")
        return limits


def read_modules(folder: Path) -> Modules | None:
    """Reads modules.json and the modules' files; None: there is no modules.json."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    try:
        listed = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in json.loads(read_file(path))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise unusable(f"{path} is not what sentence-transformers writes: download it again") from None
    modules = Modules(folder)
    for place, (kind, name) in enumerate(listed):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise unusable(f"modules.json names a folder outside of the model's: {name!r}")
        match kind:
            case "Transformer" if place == 0 and not name:
                pass
            case "Pooling" if place and not modules.makes_vectors and not modules.products:
                modules.kind, modules.source = _read_pooling(folder, name)
            case "Dense" if not modules.normalise:
                modules.products.append(_read_dense(folder, name))
            case "Normalize":
                modules.normalise = True
            case "LogitScore":
                modules.label_token_ids = _read_answers(folder, name)
            case _:
                where = "the model's own folder" if kind == "Transformer" else f"place {place + 1}"
                raise unusable(f"modules.json has {kind} where it is not supported (in {where}, {name!r})")
    return modules


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing."""
    return read_object(folder / name) if (folder / name).exists() else {}


def _integer(values: Mapping[str, Any], name: str, path: str) -> int | None:
    value = values.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise unusable(f"{path}: {name} must be a number from 0 on, not {value!r}")
    return value


def _read_pooling(folder: Path, name: str) -> tuple[PoolingKind, str]:
    path = f"{name}/config.json"
    config = read_object(folder / path)
    modes = config.get("pooling_mode") or [mode for old, mode in _OLD_MODES.items() if config.get(old)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        named = " and ".join(map(str, modes)) if isinstance(modes, list) and modes else "nothing"
        raise unusable(f"{path} pools by {named}, which is not supported (supported: {', '.join(_MODES)})")
    if config.get("include_prompt") is False:
        raise unusable(f"{path} leaves a prompt's tokens out (include_prompt), which is not supported")
    return _MODES[modes[0]], f"{path}: {modes[0]}"


def _read_dense(folder: Path, name: str) -> Dense:
    path = f"{name}/config.json"
    config = read_object(folder / path)
    given = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = given.rpartition(".")[2]
    if not given.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise unusable(f"{path}: activation_function is {given}, not supported (supported: {', '.join(_ACTIVATIONS)})")
    read = config.get("module_input_name", "sentence_embedding")
    if config.get("use_residual") or {read, config.get("module_output_name") or read} != {"sentence_embedding"}:
        raise unusable(f"{path} has use_residual, or other rows than what was pooled, which is not supported")
    sizes = [_integer(config, side, path) for side in ("in_features", "out_features")]
    if not all(sizes):
        raise unusable(f"{path} lacks in_features or out_features")
    return Dense(
        name=f"{name}.linear",
        folder=name,
        in_features=sizes[0] or 0,
        out_features=sizes[1] or 0,
        has_bias=config.get("bias") is not False,
        activation=_ACTIVATIONS[activation],
    )


def _read_answers(folder: Path, name: str) -> tuple[int, ...]:
    path = f"{name}/config.json"
    config = read_object(folder / path)
    ids = [_integer(config, which, path) for which in ("false_token_id", "true_token_id")]
    if None in ids:
        raise unusable(f"{path} lacks true_token_id or false_token_id, and a single logit is no score here")
    return tuple(number for number in ids if number is not None)
