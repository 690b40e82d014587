"""Makes the grammar of a request and checks it with llguidance in child processes: workers only get valid grammars.

The check needs no tokenizer: except for the names of special tokens, whether a grammar is valid does not depend on one.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.request import Choices, JsonSchema, Lark, OutputFormat, Regex
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.grammars.limits import HINT, MAX_CHOICES, has_rules, library_version, mark_rules
from blockyard.service.threads import Threads
from gateway.grammars.calls import write_answer, write_calls
from gateway.grammars.compiling.compilers import NUM_COMPILERS, Checks, Compilers
from gateway.grammars.expressions import expression_of, grammar_of
from gateway.grammars.larks import check_lark, may_be_ambiguous
from gateway.grammars.problems import reason_of, schema_text, wrong_schema
from gateway.grammars.schemas import find_place, read_schema
from gateway.grammars.tools import followed, schema_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gateway.dialects.answer_parser import ParsingRule
    from gateway.dialects.dialect import AnswerContext, Dialect
    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer

    Complain = Callable[[str], str]

# The most unfinished checks of one tenant; equal checks count once. All tenants share two processes.
MAX_CHECKS = 1024
RETRY_SECONDS = 1.0
# The number of results kept: clients send the same few grammars.
_MAX_KNOWN = 64


class _Question(NamedTuple):
    """The input of a check: equal inputs give equal results.

    `given`: the client's own grammar, or an empty text. `places`: the paths of the tools' schemas in the request.
    """

    output: OutputFormat | None
    given: str
    rule: ParsingRule | None
    context: AnswerContext | None
    places: tuple[str, ...]


class _Turn:
    """A check that runs or waits for its turn. `num_waiting`: the number of requests that wait for its result."""

    def __init__(self) -> None:
        self.task: asyncio.Future[str]
        self.num_waiting = 0
        self.has_begun = False


class GrammarChecks:
    """Threads and processes in which grammars are checked. A gateway has one object; its creator calls `close`."""

    def __init__(self) -> None:
        self._compilers = Compilers()
        self._threads = Threads(NUM_COMPILERS, "grammars")
        self._running: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Lock] = {}
        self._under_way: dict[tuple[str, _Question], _Turn] = {}
        self._known: OrderedDict[_Question, str] = OrderedDict()

    def close(self) -> None:
        self._threads.close()
        self._compilers.close()

    async def grammar_of(self, request: GenerationRequest, context: AnswerContext | None = None) -> str:
        """Returns the grammar that constrains a request's answers; an empty text if they are unconstrained.

        `context`: the dialect and prompt state of an answer that the gateway parses; None if it is not parsed.

        Raises BlockyardError: FIELD_INVALID with the path of the invalid field; GRAMMAR_TOO_COMPLEX; TENANT_QUOTA;
        FEATURE_DISABLED if llguidance is not installed; UNSUPPORTED_PARAMETER for tool calls that no grammar can force.
        """
        output, given, rule = request.format, request.sampling.grammar, request.parsing
        if not request.has_form:
            return ""
        if not library_version():
            raise BlockyardError(Reason.FEATURE_DISABLED, f"this gateway cannot check grammars: {HINT}")
        if given and (output is not None or (rule is not None and rule.needs_grammar)):
            beside = "a format" if output is not None else "tool calls that a grammar constrains"
            raise invalid([Violation("sampling.grammar", f"is not allowed beside {beside}")])
        question = _Question(output, given, rule, context, tuple(schema_places(request)))
        if (known := self._known.get(question)) is not None:
            self._known.move_to_end(question)
            return known
        # Equal questions at the same time share one check.
        turn = self._under_way.get((request.tenant, question)) or self._begin(request.tenant, question)
        turn.num_waiting += 1
        try:
            return await asyncio.shield(turn.task)
        finally:
            turn.num_waiting -= 1
            self._give_up(request.tenant, question, turn)

    def _begin(self, tenant: str, question: _Question) -> _Turn:
        if self._running[tenant] >= MAX_CHECKS:
            message = f"{MAX_CHECKS} grammars of this tenant are being checked already: try again"
            raise BlockyardError(Reason.TENANT_QUOTA, message, retry_after_seconds=RETRY_SECONDS)
        self._running[tenant] += 1
        turn = self._under_way[tenant, question] = _Turn()
        turn.task = asyncio.ensure_future(self._take_turn(tenant, question, turn))
        turn.task.add_done_callback(functools.partial(self._end, tenant, question, turn))
        return turn

    async def _take_turn(self, tenant: str, question: _Question, turn: _Turn) -> str:
        """Runs a check when the tenant's earlier check has ended, which leaves the second process to other tenants."""
        work = functools.partial(_check, question, self._compilers.begin())
        async with self._turns.setdefault(tenant, asyncio.Lock()):
            turn.has_begun = True
            return await self._threads.run(work)

    def _give_up(self, tenant: str, question: _Question, turn: _Turn) -> None:
        """Cancels a check that no request waits for, unless it has begun: a begun check occupies its process anyway."""
        if turn.num_waiting or turn.has_begun:
            return
        turn.task.cancel()
        # Later requests with an equal question must not join the cancelled check.
        self._under_way.pop((tenant, question), None)

    def _end(self, tenant: str, question: _Question, turn: _Turn, task: asyncio.Future[str]) -> None:
        if self._under_way.get((tenant, question)) is turn:
            del self._under_way[tenant, question]
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            self._turns.pop(tenant, None)
        # Keep the result even if no request waits for it any more.
        if not task.cancelled() and task.exception() is None:
            self._known[question] = task.result()
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)


def _check(question: _Question, checks: Checks) -> str:
    if question.given:
        return _check_given(question.given, checks.complain)
    return _check_said(question.output, question.rule, question.context, question.places, checks)


def _check_given(text: str, complain: Complain) -> str:
    check_lark(text, "sampling.grammar")
    grammar = _marked(text, text)
    _require(grammar, "sampling.grammar", complain)
    return grammar


def _marked(grammar: str, given: str) -> str:
    """Marks the rules of a grammar, to bound them, if the client's text may be ambiguous."""
    return mark_rules(grammar) if may_be_ambiguous(given) else grammar


def _check_said(
    output: OutputFormat | None,
    rule: ParsingRule | None,
    context: AnswerContext | None,
    places: Sequence[str],
    checks: Checks,
) -> str:
    """Checks the format and the tools' schemas separately, and returns one grammar of reasoning, calls and format.

    `places`: the paths of the tools' schemas in the request.
    """
    complain = checks.complain
    form = text = "" if output is None else check_format(output, complain)
    answer = "" if output is None else expression_of(output)
    if rule is not None and rule.tools and (output is not None or rule.needs_grammar):
        dialect = context.dialect if context else None
        if dialect is not None and dialect.calls is not None:
            assert context is not None
            if output is not None and dialect.calls.bare and not rule.must_call:
                description = f"is not supported beside tools for models of the dialect {dialect.name}"
                raise invalid([Violation("format", description, Reason.UNSUPPORTED_PARAMETER)])
            placed = zip(rule.tools, places, strict=True)
            tools = [followed(tool, complain, place, lambda: checks.is_spent) for tool, place in placed]
            text = write_calls(context, tools, must_call=rule.must_call, one_call=rule.one_call, answer=answer)
        elif rule.needs_grammar:
            raise _no_form(rule, dialect)
    elif context is not None and (context.may_think or context.dialect.before_text):
        text = write_answer(context, answer)
    if text and has_rules(form):
        text = mark_rules(text)
    # The text is empty if no tool is left to call; the request then gets a warning elsewhere.
    if text and (complaint := complain(text)):
        raise _refusal("conversation.tools" if rule is not None and rule.tools else "format", complaint)
    return text


def _no_form(rule: ParsingRule, dialect: Dialect | None) -> BlockyardError:
    field = "conversation.tool_choice" if rule.must_call or rule.is_limited else "conversation.tools"
    unknown = "the form in which this model writes calls is not known, or --dialect none is set"
    why = f"models that speak {dialect.name} write none" if dialect else unknown
    description = f"calls of tools cannot be forced into a form: {why}. Use auto, all tools, and no strict tool"
    return invalid([Violation(field, description, Reason.UNSUPPORTED_PARAMETER)])


def check_format(output: OutputFormat, complain: Complain) -> str:
    """Makes the grammar of a format; raises BlockyardError as `GrammarChecks.grammar_of` does.

    `complain`: returns the compiler's error for a grammar, or an empty text if the grammar is valid.
    """
    match output:
        case JsonSchema():
            schema = read_schema(output.schema, "format.json_schema.schema")
            if violations := wrong_schema(schema, "format.json_schema.schema"):
                raise invalid(violations)
            text = grammar_of(output)
            if complaint := complain(text):
                path = find_place(schema, complaint, lambda part: complain(schema_text(part)))
                raise _refusal(f"format.json_schema.schema{path}", complaint)
            return text
        case Choices():
            _check_choices(output.texts)
            field = "format.choices.texts"
        case Regex():
            field = "format.regex"
        case Lark():
            field = "format.grammar"
            check_lark(output.text, field)
        case _:
            field = "format"
    text = grammar_of(output)
    if isinstance(output, Lark):
        text = _marked(text, output.text)
    _require(text, field, complain)
    return text


def _check_choices(texts: tuple[str, ...]) -> None:
    field = "format.choices.texts"
    if not texts or not all(texts):
        raise invalid([Violation(field, "must have at least one choice, and none of them may be empty")])
    if len(texts) > MAX_CHOICES:
        raise invalid(
            [Violation(field, f"must have at most {MAX_CHOICES} entries, not {len(texts)}", Reason.GRAMMAR_TOO_COMPLEX)]
        )


def _require(text: str, field: str, complain: Complain) -> None:
    if complaint := complain(text):
        raise _refusal(field, complaint)


def _refusal(field: str, complaint: str) -> BlockyardError:
    return invalid([Violation(field, complaint, reason_of(complaint))])


def wrong_format(request: GenerationRequest, tokenizer: Tokenizer, model: Tokenizer) -> Iterator[Violation]:
    """Finds the fields of a request that conflict with its format or grammar.

    Args:
        request: the request as received.
        tokenizer: the request's tokenizer, which an adapter may bring.
        model: the model's tokenizer, from whose vocabulary workers make token masks.
    """
    if not request.has_form:
        return
    field = (
        "format" if request.format else "sampling.grammar" if request.sampling.grammar else "conversation.tool_choice"
    )
    if request.beam_search is not None:
        yield Violation(field, "is not supported with a beam search", Reason.UNSUPPORTED_PARAMETER)
    if tokenizer.backend is not model.backend:
        description = f"is not supported with {request.model!r}, which has a vocabulary of its own"
        yield Violation(field, description, Reason.UNSUPPORTED_PARAMETER)
    if request.stop.ignore_eos:
        yield Violation("stop.ignore_eos", "is not allowed with a format, which says where the answer ends")
    elif not tokenizer.end_token_ids and not request.stop.stop_token_ids:
        yield Violation(field, "can never end, since the model has no end token: give stop_token_ids")
