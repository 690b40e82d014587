from __future__ import annotations

import pytest

from blockyard.contract.chat import Conversation, Message, Role
from blockyard.contract.events import (
    Delta,
    Finished,
    TokenLogprobs,
    Usage,
)
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError
from blockyard.inference.v1 import inference_pb2
from gateway.codec import public as codec
from tests.unit.blockyard.contract.codec.test_events import BEST, CHOSEN


def test_each_call_has_prompts_of_its_own() -> None:
    text, ids = inference_pb2.GenerationSpec(text="x"), inference_pb2.GenerationSpec(token_ids={"ids": [1]})
    chat = inference_pb2.GenerationSpec(conversation={"messages": [{"role": inference_pb2.ROLE_USER}]})
    assert codec.decode_generation(text).prompt == "x"
    assert codec.decode_generation(ids).prompt == (1,)
    assert codec.decode_chat(chat).prompt == Conversation((Message(Role.USER),))
    # With nothing in it, for the core to tell with all else.
    assert codec.decode_chat(inference_pb2.GenerationSpec()).prompt == Conversation(())
    for decode, spec, field in (
        (codec.decode_generation, chat, "conversation"),
        (codec.decode_chat, text, "text"),
        (codec.decode_chat, ids, "token_ids"),
    ):
        with pytest.raises(BlockyardError) as raised:
            decode(spec)
        assert raised.value.violations[0].field == field


def test_a_chat_is_resumed_with_its_spec() -> None:
    spec = inference_pb2.GenerationSpec(conversation={"messages": [{"role": inference_pb2.ROLE_USER}]})
    resume = codec.decode_resume(inference_pb2.ResumeGenerateRequest(request_id="r", spec=spec, seed=3))
    assert resume.request is not None
    assert resume.request.prompt == Conversation((Message(Role.USER),))


def test_a_whole_sequence_is_its_deltas_in_one() -> None:
    told = (TokenLogprobs(BEST), TokenLogprobs(CHOSEN, (BEST,)))
    deltas = [Delta(1, "b", (7,), 1, 1, told[:1]), Delta(1, "a", (9,), 2, 2, told[1:])]
    choice = codec.encode_choice(deltas, Finished(1, FinishReason.LENGTH, None, Usage(1, 0, 2), ""))
    assert (choice.index, choice.text, list(choice.token_ids)) == (1, "ba", [7, 9])
    assert choice.finished.usage.num_completion_tokens == 2
    assert [place.chosen.text for place in choice.logprobs] == ["b", "a"]
    assert [len(place.top) for place in choice.logprobs] == [0, 1]
