"""Reads a model's pooling rule from its files: the pooled rows, the products after them, and the labels.

The gateway requests what the rule says, the worker computes it, and `blockyard doctor` prints it. A rule that no file
states is refused and never guessed: a wrong pooling gives plausible but wrong numbers. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockyard.contract.models import Task
from blockyard.contract.pooling import PoolingKind
from blockyard.model_config.activation import Activation
from blockyard.model_config.fields import read_object, unusable
from blockyard.model_config.pooling.rule import Dense, Finish, PoolingRule
from blockyard.model_config.pooling.sentence_modules import Modules, read_modules

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Head:
    """The head of a family's `ForSequenceClassification`: hidden products, then the last product."""

    before: tuple[tuple[str, Activation], ...]
    last: str
    has_bias: bool
    rows: PoolingKind


_DECODER_HEAD = _Head((), "score", has_bias=False, rows=PoolingKind.LAST)
_BERT = _Head((("bert.pooler.dense", Activation.TANH),), "classifier", has_bias=True, rows=PoolingKind.FIRST)
_ROBERTA = replace(_BERT, before=(("classifier.dense", Activation.TANH),), last="classifier.out_proj")
_HEADS = {
    "Bert": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "DistilBert": replace(_BERT, before=(("pre_classifier", Activation.RELU),)),
}
MAX_LABELS = 2**16
_CLASSIFIER, _CAUSAL = "ForSequenceClassification", ("ForCausalLM", "LMHeadModel")
# Decoders that may be rerankers, which answer with one of two tokens. Their files do not say so; `task` does.
_ANSWERS = {"Qwen3ForCausalLM": ("no", "yes")}


def read_rule(folder: Path, task: Task = Task.UNSPECIFIED, architecture: str = "") -> PoolingRule | None:
    """Reads a model's pooling rule; None: the model generates tokens.

    Args:
        folder: the model's folder, with config.json and sentence-transformers' files.
        task: the task to serve; UNSPECIFIED: as the model's files say.
        architecture: one of config.json's architectures; empty: the first.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the files state no rule or an unsupported one.
    """
    config = read_object(folder / "config.json")
    names = config.get("architectures")
    architecture = architecture or (str(names[0]) if isinstance(names, list) and names else "")
    modules = read_modules(folder)
    if task is Task.UNSPECIFIED:
        task = _find_task(architecture, config, modules)
    match task:
        case Task.GENERATE:
            if architecture and not architecture.endswith((*_CAUSAL, "ForConditionalGeneration")):
                raise unusable(
                    f"{architecture} does not generate tokens: serve it with another --task, if its files name one"
                )
            return None
        case Task.EMBED:
            if modules is None or not modules.makes_vectors:
                raise unusable(_unstated(architecture))
            return modules.make_rule(task)
        case Task.SCORE if architecture in _ANSWERS or (modules and modules.label_token_ids):
            return _answers_rule(architecture, modules)
        case _:
            if not architecture.endswith(_CLASSIFIER):
                raise unusable(f"{architecture or 'the model'} has no head that makes labels or scores")
            return _classifier_rule(architecture, config, task)


def _unstated(architecture: str) -> str:
    return (
        f"no file says which rows of {architecture or 'the model'} make a vector, and that is not guessed: "
        "modules.json and 1_Pooling/config.json do, as sentence-transformers writes them"
    )


def _find_task(architecture: str, config: Mapping[str, Any], modules: Modules | None) -> Task:
    if modules is not None and modules.makes_vectors:
        return Task.EMBED
    if architecture.endswith(_CLASSIFIER):
        return Task.SCORE if len(_read_labels(config)) == 1 else Task.CLASSIFY
    if modules is not None and modules.label_token_ids:
        return Task.SCORE
    if architecture.endswith("Model") and not architecture.endswith(_CAUSAL):
        raise unusable(_unstated(architecture))
    return Task.GENERATE


def _answers_rule(architecture: str, modules: Modules | None) -> PoolingRule:
    if modules is not None and modules.makes_vectors:
        raise unusable(f"modules.json makes vectors, not scores: serve {architecture} with --task embed")
    token_ids = modules.label_token_ids if modules else ()
    texts = () if token_ids else _ANSWERS[architecture]
    return PoolingRule(
        task=Task.SCORE,
        kind=PoolingKind.LABEL_LOGITS,
        rows=PoolingKind.LAST,
        labels=texts,
        label_token_ids=token_ids,
        source=f"the logits of {' and '.join(map(str, token_ids or texts))}, at the last token",
    )


def _classifier_rule(architecture: str, config: Mapping[str, Any], task: Task) -> PoolingRule:
    labels = _read_labels(config)
    if task is Task.SCORE and len(labels) > 1:
        raise unusable(f"{architecture} has {len(labels)} labels, and none of them is a score: serve it to classify")
    head = _HEADS.get(architecture.removesuffix(_CLASSIFIER), _DECODER_HEAD)
    width = _hidden_size(config)
    before = [Dense(name=name, in_features=width, out_features=width, activation=act) for name, act in head.before]
    rows = head.rows
    if architecture.startswith("ModernBert"):
        before, rows, head = [_modern_dense(config, width)], _modern_rows(config), _BERT
    last = Dense(name=head.last, in_features=width, out_features=len(labels), has_bias=head.has_bias)
    return PoolingRule(
        task=task,
        kind=PoolingKind.CLASSIFY,
        rows=rows,
        products=(*before, last),
        finish=_read_score_finish(config) if task is Task.SCORE else _read_finish(config, len(labels)),
        labels=labels,
        source=f"config.json: the head of {architecture}",
    )


def _modern_dense(config: Mapping[str, Any], width: int) -> Dense:
    activations = {"gelu": Activation.GELU_ERF, "relu": Activation.RELU, "silu": Activation.SILU}
    name, epsilon = config.get("classifier_activation", "gelu"), config.get("norm_eps", 1e-5)
    if name not in activations or config.get("norm_bias") or not isinstance(epsilon, float):
        raise unusable("config.json: classifier_activation or norm_bias is not supported in a head of ModernBERT")
    return Dense(
        name="head.dense",
        in_features=width,
        out_features=width,
        has_bias=config.get("classifier_bias") is True,
        activation=activations[name],
        norm="head.norm",
        norm_epsilon=epsilon,
    )


def _modern_rows(config: Mapping[str, Any]) -> PoolingKind:
    match config.get("classifier_pooling", "cls"):
        case "cls":
            return PoolingKind.FIRST
        case "mean":
            return PoolingKind.MEAN
        case other:
            raise unusable(f"config.json: classifier_pooling is {other!r}, which is not supported")


def _hidden_size(config: Mapping[str, Any]) -> int:
    for name in ("hidden_size", "n_embd", "dim"):
        if isinstance(size := config.get(name), int) and size > 0:
            return size
    raise unusable("config.json has no hidden_size: is this a model of a supported architecture?")


def _read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Reads the labels' names in the order of the head's rows, as transformers does; by default there are two."""
    named, count = config.get("id2label"), config.get("num_labels")
    if isinstance(named, dict) and named:
        try:
            by_id = {int(number): str(name) for number, name in named.items()}
        except ValueError:
            raise unusable("config.json: id2label must name labels by number") from None
        if sorted(by_id) != list(range(len(by_id))):
            raise unusable("config.json: id2label must name the labels from 0 on, each once")
        return tuple(by_id[number] for number in range(len(by_id)))
    count = 2 if count is None else count
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_LABELS:
        raise unusable(f"config.json: num_labels must be from 1 to {MAX_LABELS}, not {count!r}")
    return tuple(f"LABEL_{number}" for number in range(count))


def _read_finish(config: Mapping[str, Any], num_labels: int) -> Finish:
    match config.get("problem_type"):
        case None | "single_label_classification":
            return Finish.SOFTMAX if num_labels > 1 else Finish.SIGMOID
        case "multi_label_classification":
            return Finish.SIGMOID
        case "regression":
            return Finish.NONE
        case other:
            raise unusable(f"config.json: problem_type is {other!r}, which is not supported")


def _read_score_finish(config: Mapping[str, Any]) -> Finish:
    """Reads the function that turns a head's single output into a score, as sentence-transformers does.

    The default is a sigmoid. Newer files have the field in the object `sentence_transformers`.
    """
    own = config.get("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, dict) else None
    name = given if given is not None else config.get("sbert_ce_default_activation_function")
    match str(name).rpartition(".")[2] if name is None or str(name).startswith("torch.nn.") else "":
        case "None" | "Sigmoid":
            return Finish.SIGMOID
        case "Identity":
            return Finish.NONE
        case _:
            raise unusable(
                f"config.json: a score's activation is {name!r}, not supported (supported: Sigmoid, Identity)"
            )
