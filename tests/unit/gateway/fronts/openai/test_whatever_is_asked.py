"""Whatever is asked, a body is understood or refused by its reason: nothing is the server's fault."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.contract.scheduling import ModelFacts
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.openai.call_spec import understand_chat, understand_completion, with_token_ids
from gateway.fronts.openai.errors import error_object, rename
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.grammars.checking import GrammarChecks
from gateway.preparation import Preparation
from gateway.text.adapter_tokenizers import AdapterTokenizers
from gateway.text.encoding import Encoding
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.request import GenerationRequest

FACTS = ModelFacts("", vocab_size=4096, max_model_len=64, block_size=16, determinism_id="d", batch_invariant=True)
REFUSALS = {Reason.FIELD_INVALID, Reason.UNSUPPORTED_PARAMETER, Reason.PROMPT_TOO_LONG, Reason.MODEL_NOT_FOUND}
HELLO = [{"role": "user", "content": "Hi"}]


@dataclass
class Core:
    """As much of the core as comes before the scheduler."""

    preparation: Preparation
    tokenizer = demo_tokenizer()
    vocab_size = FACTS.vocab_size

    async def prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        return await self.preparation.prompt_of(request, lambda: FACTS, self.tokenizer)

    async def text_of(self, token_ids: Sequence[int], model: str, tenant: str) -> str:
        return self.tokenizer.decode(token_ids)

    async def find_tokenizer(self, name: str) -> object:
        return self.tokenizer

    def model_of(self, name: str) -> Core:
        return self


@contextmanager
def a_core() -> Iterator[Core]:
    tokenizer = demo_tokenizer()
    encoding = Encoding()
    try:
        tokenizers, grammars = AdapterTokenizers(tokenizer, None), GrammarChecks()
        yield Core(Preparation(tokenizers, encoding, model_name="demo", seed=0, grammars=grammars))
    finally:
        encoding.close()


async def ask(core: Any, body: dict[str, Any]) -> None:
    """Does all that is done with a body before the scheduler hears of it."""
    raw = json.dumps(body).encode()
    if "messages" in body:
        call = understand_chat(parse_body(ChatBody, raw))
    else:
        call = understand_completion(parse_body(CompletionBody, raw))
    try:
        for request in (await with_token_ids(call, core)).requests:
            await core.preparation.prepare(request, lambda: FACTS, {})
    except BlockyardError as error:
        raise rename(error, call.names) from None


NUMBERS = st.integers(-3, 3) | st.integers(-(2**70), 2**70) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
TOKEN_IDS = st.lists(st.integers(-2, 5000) | st.integers(-(2**70), 2**70), min_size=1, max_size=4)
PROMPTS = st.text(max_size=20) | TOKEN_IDS | st.lists(TOKEN_IDS, min_size=1, max_size=2) | VALUES
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "pilot"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=8) | VALUES}, optional={"tool_calls": VALUES}),
    max_size=3,
)
SHOWN = {name: st.booleans() for name in ("echo", "return_token_ids", "return_tokens_as_token_ids", "stream")}
FLAGS = st.fixed_dictionaries({}, optional=SHOWN | {"truncate_prompt_tokens": st.integers(-2, 3)})


def parameters(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(kind.model_fields.keys() - {"prompt", "messages"})
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=6), VALUES, max_size=3)


BODIES = st.builds(
    lambda prompt, flags, others: {**flags, **others, "prompt": prompt}, PROMPTS, FLAGS, parameters(CompletionBody)
) | st.builds(
    lambda messages, flags, others: {**flags, **others, "messages": messages},
    MESSAGES | st.just(HELLO),
    FLAGS,
    parameters(ChatBody),
)


@settings(max_examples=300, deadline=None)
@given(body=BODIES)
async def test_a_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    with a_core() as core:
        try:
            await ask(core, body)
        except BlockyardError as error:
            assert error.violations
            assert {violation.reason for violation in error.violations} <= REFUSALS, error
            json.dumps({"error": error_object(error)}).encode()
