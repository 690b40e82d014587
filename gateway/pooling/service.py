"""Answers calls for vectors, scores and labels, for all fronts. Knows neither protobuf messages nor HTTP."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from operator import mul
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.clock import SYSTEM, Clock
from blockyard.contract.events import Usage
from blockyard.contract.models import Task
from blockyard.contract.pooling import (
    Classification,
    Classifications,
    Embeddings,
    ScoredDocument,
    Scores,
)
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason, Violation, quote
from gateway.observe.request_log import TokenCounts, begin_request_log
from gateway.pooling import checks
from gateway.pooling.model import PooledModel, PooledModels
from gateway.pooling.parts import Part, PartResult, Parts, read_values
from gateway.text.encoding import Encoding, run_all

if TYPE_CHECKING:
    from array import array
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from blockyard.contract.scheduling import ModelFacts
    from gateway.live.live_requests import Admission, LiveRequests
    from gateway.pooling.inputs import EncodedPair
    from gateway.pooling.model import RuleReader
    from gateway.pooling_calls import CallOptions, ClassifyCall, EmbedCall, Input, ScoreCall
    from gateway.text.tokenizer import Tokenizer
    from gateway.text.vocabulary import Steps

T = TypeVar("T")
# The names that sentence-transformers looks up for prompts of queries and of documents.
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
_NO_INSTRUCTION = "instruction: the model takes none, and it was left out"


class PoolingService:
    """Answers pooling calls. A process has one object.

    Args:
        tokenizer: the model's tokenizer.
        live: runs requests.
        encoding: runs the tokenizer, in threads for long texts.
        admission: limits the requests of the gateway.
        model_name: the model's name in requests.
        find_facts: returns the scheduler's facts of the model; raises BlockyardError NO_READY_WORKER.
        resolve_model: raises BlockyardError MODEL_NOT_FOUND for a name that is not served.
        read_rule: reads the rule in the model's files.
        clock: draws the ids of calls without one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        live: LiveRequests,
        encoding: Encoding,
        admission: Admission,
        *,
        model_name: str,
        find_facts: Callable[[], Awaitable[ModelFacts]],
        resolve_model: Callable[[str], None],
        read_rule: RuleReader,
        shares_prefixes: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._encoding = encoding
        self._admission = admission
        self._model_name = model_name
        self._clock = clock
        self._find_facts = find_facts
        self._resolve_model = resolve_model
        self._models = PooledModels(tokenizer, read_rule)
        self._parts = Parts(live, tokenizer, model_name, shares_prefixes=shares_prefixes)

    def cancel(self, wire_ids: Sequence[str]) -> list[str]:
        return self._parts.cancel(wire_ids)

    def find_width(self, facts: ModelFacts) -> int:
        """Returns the number of values in the model's vectors; 0 if it makes none or its files do not say."""
        if facts.task is not Task.EMBED:
            return 0
        try:
            return self._models.rule_of(facts.task).width
        except BlockyardError:
            return 0

    # Each method raises BlockyardError: all violations together, FEATURE_DISABLED if the model is served for another
    # task, and the errors of any request. A call is answered completely or not at all.

    async def embed(self, call: EmbedCall) -> Embeddings:
        def prepare(model: PooledModel) -> Steps[list[Part]]:
            checks.require([*checks.check_dimensions(call.dimensions, len(call.inputs), model)])
            prompt = _find_prompt(model, call.prompt_name)
            encoded = yield from run_all(_encode_each(model, call.inputs, call.options, prompt))
            pooling = model.make_pooling(normalise=call.normalise, dimensions=call.dimensions or 0)
            _require_tokens("inputs", encoded, model)
            return [Part(each.token_ids, pooling) for each in encoded]

        violations = checks.check_inputs("inputs", call.inputs)
        given = {"inputs": call.inputs}
        _, results, facts = await self._run(call.options, "embeddings", (Task.EMBED,), violations, prepare, given)
        return Embeddings(vectors=[read_values(result.values) for result in results], **facts)

    async def classify(self, call: ClassifyCall) -> Classifications:
        def prepare(model: PooledModel) -> Steps[list[Part]]:
            encoded = yield from run_all(_encode_each(model, call.inputs, call.options))
            _require_tokens("inputs", encoded, model)
            return [Part(each.token_ids, model.make_pooling(leaves_raw=call.raw)) for each in encoded]

        violations = checks.check_inputs("inputs", call.inputs)
        given = {"inputs": call.inputs}
        model, results, facts = await self._run(call.options, "classify", (Task.CLASSIFY,), violations, prepare, given)
        labels = model.rule.labels
        each = [_classify(read_values(result.values), labels) for result in results]
        return Classifications(classifications=each, labels=labels, **facts)

    async def score(self, call: ScoreCall) -> Scores:
        """Scores how well documents answer queries: a reranker scores pairs, an embedding model compares vectors."""

        def prepare(model: PooledModel) -> Steps[list[Part]]:
            is_reranker = model.task is Task.SCORE
            checks.require([*_check_texts(call)] if is_reranker else [])
            return (yield from _pair(call, model) if is_reranker else _separate(call, model))

        violations = [*checks.check_inputs("query", call.queries), *checks.check_inputs("documents", call.documents)]
        violations += _check_score(call)
        tasks = (Task.SCORE, Task.EMBED)
        given = {"query": call.queries, "documents": call.documents}
        model, results, facts = await self._run(call.options, "score", tasks, iter(violations), prepare, given)
        if model.task is Task.SCORE:
            # With two labels the last one means yes.
            scores = [read_values(each.values)[-1] for each in results]
        else:
            scores = _cosines([read_values(each.values) for each in results], len(call.queries))
        takes_instruction = model.task is Task.SCORE and bool(model.label_token_ids)
        if call.instruction and not takes_instruction:
            facts["warnings"] = (_NO_INSTRUCTION,)
        documents = [ScoredDocument(index, score) for index, score in enumerate(scores)]
        if call.top_n is not None:
            documents = sorted(documents, key=lambda each: (-each.score, each.index))[: call.top_n]
        return Scores(documents=documents, **facts)

    async def _run(
        self,
        options: CallOptions,
        operation: str,
        tasks: tuple[Task, ...],
        violations: Iterator[Violation],
        prepare: Callable[[PooledModel], Steps[list[Part]]],
        given: Mapping[str, Sequence[Input]],
    ) -> tuple[PooledModel, list[PartResult], dict[str, Any]]:
        """Runs a call: checks it, makes its parts, and waits for all of them.

        Returns the model, the results of the parts, and the fields of `PoolingFacts`.
        """
        if not options.request_id:
            options = replace(options, request_id=f"{operation}-{self._clock.token_hex(12)}")
        request_log = begin_request_log(options.tenant, options.request_id, self._model_name, operation)
        with request_log.beginning(), self._admission.beginning(is_new=True):
            self._resolve_model(options.model)
            facts = await self._find_facts()
            model = self._models.find(facts, *tasks)
            checks.require([*self._check_adapter(options), *checks.check_options(options), *violations])
            for field, inputs in given.items():
                checks.require(checks.check_characters(field, inputs, options, model))
            num_characters = sum(len(each) for inputs in given.values() for each in inputs)
            parts = await self._encoding.take(options.tenant, num_characters, prepare(model))
        counts = TokenCounts(sum(len(part.token_ids) for part in parts), 0, 0)
        try:
            results = await self._parts.run(parts, options, facts.determinism_id, request_log.span.context)
        except BlockyardError as error:
            request_log.on_failed(counts, error)
            raise
        counts = counts._replace(num_cached_tokens=sum(each.num_cached_tokens for each in results))
        request_log.on_finished(counts, [FinishReason.STOP], [])
        ids = {each.determinism_id for each in results}
        determinism_id = ids.pop() if len(ids) == 1 else ""
        made_by = {
            "request_id": options.request_id,
            "model": self._model_name,
            "usage": Usage(counts.num_prompt_tokens, counts.num_cached_tokens),
            "determinism_id": determinism_id,
        }
        return model, results, made_by

    def _check_adapter(self, options: CallOptions) -> Iterator[Violation]:
        if options.model not in ("", self._model_name):
            yield Violation(
                "model",
                "is an adapter; Embed, Score and Classify do not support adapters yet",
                Reason.UNSUPPORTED_PARAMETER,
            )


def _require_tokens(field: str, encoded: Sequence[EncodedPair], model: PooledModel) -> None:
    checks.require([*checks.check_tokens(field, encoded, model)])


def _find_prompt(model: PooledModel, name: str | None) -> str:
    """Finds the prompt to put before inputs; raises BlockyardError FIELD_INVALID for an unknown name."""
    prompts = model.rule.prompts
    if name is not None and name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        checks.require(
            [Violation("prompt_name", f"must be one of {known}, the prompts of the model's files, not {quote(name)}")]
        )
    return prompts.get(model.rule.default_prompt if name is None else name, "")


def _check_score(call: ScoreCall) -> Iterator[Violation]:
    if len(call.queries) not in (1, len(call.documents)):
        yield Violation("query", f"must be one text, or one for each of the {len(call.documents)} documents")
    if call.top_n is not None and call.top_n < 1:
        yield Violation("top_n", f"must be at least 1, not {call.top_n}")


def _check_texts(call: ScoreCall) -> Iterator[Violation]:
    for field, inputs in (("query", call.queries), ("documents", call.documents)):
        for place, given in enumerate(inputs):
            if not isinstance(given, str):
                yield Violation(f"{field}[{place}]", "must be a text: a reranker reads query and document together")


def _pair(call: ScoreCall, model: PooledModel) -> Steps[list[Part]]:
    queries = call.queries if len(call.queries) > 1 else call.queries * len(call.documents)
    encoded = yield from run_all(
        model.encoder.encode_pair(query, document, call.options, call.instruction)
        for query, document in zip(queries, call.documents, strict=True)
    )
    _require_tokens("documents", encoded, model)
    return [Part(each.token_ids, model.make_pooling(second_from=each.second_from)) for each in encoded]


def _separate(call: ScoreCall, model: PooledModel) -> Steps[list[Part]]:
    """Makes a part of each query and of each document, with the prompts that the model has for them."""
    parts: list[Part] = []
    pooling = model.make_pooling(normalise=True)
    for field, inputs, names in (
        ("query", call.queries, _QUERY_PROMPTS),
        ("documents", call.documents, _DOCUMENT_PROMPTS),
    ):
        prompt = next((model.rule.prompts[name] for name in names if name in model.rule.prompts), None)
        prompt = _find_prompt(model, None) if prompt is None else prompt
        encoded = yield from run_all(_encode_each(model, inputs, call.options, prompt))
        _require_tokens(field, encoded, model)
        parts += [Part(each.token_ids, pooling) for each in encoded]
    return parts


def _encode_each(
    model: PooledModel, inputs: Sequence[Input], options: CallOptions, prompt: str = ""
) -> Iterator[Steps[EncodedPair]]:
    return (model.encoder.encode(given, options, prompt) for given in inputs)


def _cosines(vectors: Sequence[array[float]], num_queries: int) -> list[float]:
    """Returns the cosine of each document's vector with its query's vector. All vectors must have the length 1."""
    queries, documents = vectors[:num_queries], vectors[num_queries:]
    pairs = zip(queries if num_queries > 1 else [queries[0]] * len(documents), documents, strict=True)
    # Rounding could make the product of a vector with itself a little larger than 1.
    return [min(max(fsum(map(mul, query, document)), -1.0), 1.0) for query, document in pairs]


def _classify(numbers: array[float], labels: Sequence[str]) -> Classification:
    best = max(range(len(numbers)), key=lambda index: (numbers[index], -index))
    return Classification(list(numbers), labels[best] if best < len(labels) else f"LABEL_{best}")
