"""Chat and StreamChat over gRPC, on the gateway's core and a fake scheduler."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from blockyard.errors import Reason
from blockyard.inference.v1 import inference_pb2
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.kit.refusals import refused
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, Front, demo_tokenizer, ids_of, rest_of, serving

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.text.tokenizer import Tokenizer

KEEP = inference_pb2.ON_DISCONNECT_KEEP
HI = [("user", "Hi"), ("assistant", "Hello."), ("user", "Who are you?")]
PROMPT = "<|endoftext|><|user|>Hi<|end|><|assistant|>Hello.<|end|><|user|>Who are you?<|end|><|assistant|>"


def message(role: str, text: str) -> inference_pb2.Message:
    content = [inference_pb2.ContentPart(text=text)]
    return inference_pb2.Message(role=inference_pb2.Role.Value(f"ROLE_{role.upper()}"), content=content)


def chat(messages: list[tuple[str, str]] = HI, max_tokens: int = 8, **fields: Any) -> inference_pb2.GenerationSpec:
    told = {"messages": [message(role, text) for role, text in messages], **fields.pop("conversation", {})}
    return inference_pb2.GenerationSpec(conversation=told, stop={"max_tokens": max_tokens}, **fields)


def stream(front: Front, spec: inference_pb2.GenerationSpec) -> Any:
    return front.stub.StreamChat(inference_pb2.StreamChatRequest(spec=spec))


async def whole(front: Front, spec: inference_pb2.GenerationSpec) -> inference_pb2.ChatResponse:
    return await front.stub.Chat(inference_pb2.ChatRequest(spec=spec))


def text_of(events: list[inference_pb2.GenerationEvent]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


async def test_a_chat_is_a_generation_whose_prompt_the_template_made(front: Front) -> None:
    front.scheduler.script = scripted(*ids_of("I am nobody."), END_OF_TURN)
    answer = await whole(front, chat(request_id="c", max_tokens=50))
    assert answer.choices[0].text == "I am nobody."
    (added,) = front.scheduler.added
    assert list(added.prompt_token_ids) == demo_tokenizer().encode(PROMPT, add_special_tokens=False)
    assert (answer.accepted.request_id, answer.accepted.num_prompt_tokens) == ("c", len(added.prompt_token_ids))


async def test_a_streamed_chat_says_the_same(front: Front) -> None:
    spec = chat(n=2, return_token_ids=True, sampling={"seed": 3})
    events = await rest_of(stream(front, spec))
    answer = await whole(front, spec)
    assert [event.seq for event in events] == list(range(len(events)))
    for choice in answer.choices:
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == choice.index]
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(choice.token_ids)


async def test_an_answer_goes_on_with_the_last_message(front: Front) -> None:
    spec = chat([("user", "Hi"), ("assistant", "Well, ")], conversation={"continue_final_message": True})
    await whole(front, spec)
    told = demo_tokenizer().decode(front.scheduler.added[0].prompt_token_ids, skip_special_tokens=False)
    assert told == "<|endoftext|><|user|>Hi<|end|><|assistant|>Well, "


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_chat_is_resumed_at_another_gateway(front: Front, forgotten: bool) -> None:
    spec = chat(request_id="c", max_tokens=20, on_disconnect=KEEP, return_token_ids=True)
    front.scheduler.pause()
    call = stream(front, spec)
    accepted = (await call.read()).event.accepted
    await front.scheduler.step(6)
    events = [(await call.read()).event]
    call.cancel()
    await front.wait_until_unread()
    had = events[-1].delta
    position = {"num_tokens": had.num_tokens, "num_text_bytes": had.num_text_bytes, "token_ids": had.token_ids}
    if forgotten:
        front.scheduler.forget()
    front.scheduler.go_on()
    async with serving(front.scheduler) as other:
        fields = {"positions": [position], "spec": spec, "seed": accepted.seed}
        rest = await rest_of(other.resume("c", **fields))
        again = await rest_of(stream(other, spec))
    assert rest[0].accepted == accepted
    assert had.text + text_of(rest) == text_of(again)
    assert rest[-1].finished.usage.num_completion_tokens == 20
    assert len(front.scheduler.added) == 1 + forgotten


async def test_a_chat_that_is_sent_again_is_read_from_its_beginning(front: Front) -> None:
    spec = chat(request_id="c", on_disconnect=KEEP)
    first, second = await rest_of(stream(front, spec)), await rest_of(stream(front, spec))
    assert text_of(first) == text_of(second)
    assert len(front.scheduler.added) == 1
    other = chat([("user", "Ho")], request_id="c", on_disconnect=KEEP)
    assert (await refused(whole(front, other))).reason is Reason.REQUEST_ID_CONFLICT


async def test_a_chat_is_cancelled_by_its_id(front: Front) -> None:
    front.scheduler.pause()
    call = stream(front, chat(request_id="c"))
    await call.read()
    told = await front.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["c"]))
    assert told.cancelled_request_ids == ["c"]
    assert (await refused(call)).reason is Reason.CLIENT_CANCELLED


async def test_a_client_that_leaves_ends_its_chat(front: Front) -> None:
    front.scheduler.pause()
    call = stream(front, chat(request_id="c"))
    await call.read()
    call.cancel()
    await front.scheduler.wait_until(lambda: [abort.request_id for abort in front.scheduler.aborted] == ["c"])


async def test_what_is_wrong_with_the_messages_is_told_with_all_else(front: Front) -> None:
    spec = chat([], n=65, sampling={"top_p": 2.0}, conversation={"tools": [{"name": ""}]})
    error = await refused(whole(front, spec))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.FIELD_INVALID)
    assert {violation.field for violation in error.violations} == {
        "conversation.messages",
        "conversation.tools[0].name",
        "n",
        "sampling.top_p",
    }
    assert front.scheduler.added == []


async def test_each_call_takes_its_own_prompts(front: Front) -> None:
    text = inference_pb2.GenerationSpec(text="x")
    assert (await refused(whole(front, text))).violations[0].field == "text"
    assert (await refused(stream(front, text))).violations[0].field == "text"
    assert (await refused(front.generate(chat()))).violations[0].field == "conversation"
    assert (await refused(front.stream(chat()))).violations[0].field == "conversation"


async def test_a_long_chat_is_rendered_like_a_short_one(front: Front) -> None:
    messages = [("user", "the cat sat on the mat. " * 8), ("assistant", "Did it? ")] * 11
    await whole(front, chat(messages))
    (added,) = front.scheduler.added
    told = demo_tokenizer().decode(added.prompt_token_ids, skip_special_tokens=False)
    assert told.count("<|user|>the cat") == 11


async def test_a_chat_is_tokenized_as_its_prompt_is(front: Front) -> None:
    request = inference_pb2.TokenizeRequest(conversation=chat().conversation)
    told = await front.stub.Tokenize(request)
    await whole(front, chat())
    assert told.token_ids == list(front.scheduler.added[0].prompt_token_ids)
    request.text = "x"
    assert (await refused(front.stub.Tokenize(request))).violations[0].field == "text"
    empty = inference_pb2.TokenizeRequest(conversation=inference_pb2.Conversation())
    empty.conversation.SetInParent()
    assert (await refused(front.stub.Tokenize(empty))).violations[0].field == "conversation.messages"


@pytest.fixture
def without_template(tmp_path: Path) -> Tokenizer:
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path / name)
    return load_tokenizer(tmp_path)


async def test_a_model_without_a_template_says_so(scheduler: FakeScheduler, without_template: Tokenizer) -> None:
    async with serving(scheduler, tokenizer=without_template) as front:
        for call in (whole(front, chat()), stream(front, chat())):
            error = await refused(call)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.FEATURE_DISABLED)
            assert "chat template" in error.message
        (model,) = (await front.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert not model.has_chat_template
