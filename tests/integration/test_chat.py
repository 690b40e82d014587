"""Chats on the real services: as transformers has them, and the same through every front, library and failure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import httpx
import pytest

from blockyard import AsyncClient, Client, Delta, Message
from blockyard.client.chat import ChatOptions
from blockyard.contract.chat import Conversation, Role, Tool, ToolCall
from blockyard.contract.chat import Message as Said
from blockyard.inference.v1 import inference_pb2_grpc
from gateway.chat import prompt_of
from gateway.text.tokenizer_files import load_tokenizer
from tests.integration.conftest import DEMO
from tests.kit.processes.cluster import Cluster
from tests.unit.gateway.fronts.parity.case import Case, named
from tests.unit.gateway.fronts.parity.cases import CASES
from tests.unit.gateway.fronts.parity.fronts import FRONTS, Answer, Gateway, Refusal

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.processes.system import System

MESSAGES = [Message("system", "Be brief."), Message("user", "What is a list?")]
NUM_TOKENS = 32

# A few of each kind: all of them are asked of a fake scheduler.
SAMPLE = {
    "token ids as a prompt",
    "no special tokens",
    "a prompt that is cut",
    "several sequences",
    "token ids beside the text",
    "a seed",
    "biases",
    "bad words",
    "log probabilities",
    "log probabilities of the prompt",
    "a stop string in the text",
    "beams",
    "a conversation",
    "an answer to go on with",
    "another model",
    "everything at once",
    "everything in a chat at once",
    "a picture",
}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What transformers says, greedily, in float32."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    messages = [{"role": str(message.role), "content": message.content} for message in MESSAGES]
    told = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    num_prompt_tokens = told["input_ids"].shape[1]
    with torch.inference_mode():
        output = model.generate(**told, max_new_tokens=NUM_TOKENS, do_sample=False)[0, num_prompt_tokens:].tolist()
    return {"num_prompt_tokens": num_prompt_tokens, "text": tokenizer.decode(output, skip_special_tokens=True)}


def test_a_chat_says_what_transformers_says(demo: System, reference: dict[str, Any]) -> None:
    with Client(demo.grpc_target) as client:
        answer = client.chat(MESSAGES, max_tokens=NUM_TOKENS, temperature=0.0)
        assert answer.text == reference["text"]
        assert answer.usage.num_prompt_tokens == reference["num_prompt_tokens"]
        streamed = client.stream_chat(MESSAGES, max_tokens=NUM_TOKENS, temperature=0.0)
        assert "".join(streamed.text_deltas()) == reference["text"]


async def test_an_answer_that_is_continued_is_the_answer(demo: System, reference: dict[str, Any]) -> None:
    text: str = reference["text"]
    half = text[: len(text) // 2]
    async with AsyncClient(demo.grpc_target) as client:
        answer = await client.chat(
            [*MESSAGES, Message("assistant", half)],
            continue_final_message=True,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
        )
    # Its tokens may be cut elsewhere, but not its beginning.
    assert answer.usage.num_prompt_tokens > reference["num_prompt_tokens"]
    assert answer.text


FLAGS = ["--dtype", "float32", "--num-device-blocks", "64", "--num-host-blocks", "8"]
# What is lost in the midst of an answer: its gateway, then all that remembers it but the client.
LOSSES = [["gateway-0"], ["gateway-0", "gateway-1", "scheduler"]]


async def test_a_chat_outlives_its_gateway_and_all_that_remembers_it(tmp_path: Path) -> None:
    options = ChatOptions(max_tokens=250, temperature=0.9, seed=7, ignore_eos=True)
    async with Cluster(DEMO, tmp_path, replica_sizes=[1], num_gateways=2, scheduler_flags=FLAGS) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            undisturbed = await client.chat(MESSAGES, **options)
            losses = iter(LOSSES)
            async with client.stream_chat(MESSAGES, **options) as stream:
                async for event in stream:
                    if isinstance(event, Delta) and event.num_tokens in range(20, 200):
                        for name in next(losses, ()):
                            cluster.kill(name)
                answer = await stream.result()
            assert answer.text == undisturbed.text
            assert stream.num_resumes >= 1
            assert next(losses, None) is None
        cluster.check()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
async def test_every_front_says_the_same(demo: System, case: Case) -> None:
    told: dict[str, Answer] = {}
    async with (
        grpc.aio.insecure_channel(demo.grpc_target) as channel,
        httpx.AsyncClient(base_url=demo.http_url, timeout=60, verify=False) as http,
    ):
        gateway = Gateway(inference_pb2_grpc.InferenceServiceStub(channel), http)
        for front in filter(case.concerns, FRONTS):
            request_id = f"{case.name.replace(' ', '-')}-{front.name}"
            outcome = await gateway.ask(front, named(case, request_id).ask(front))
            if case.wrong:
                assert isinstance(outcome, Refusal)
                assert outcome.reason is case.reason
                assert sorted(violation.field for violation in outcome.violations) == case.fields(front)
                continue
            assert isinstance(outcome, Answer), outcome
            # What is cached depends on who came before.
            answer = replace(outcome, num_cached_tokens=0)
            assert told.setdefault(front.family, answer) == answer, front


def test_the_sample_is_of_the_list() -> None:
    assert {case.name for case in CASES} >= SAMPLE


# What models' own templates do: with tools and calls of them, with trimmed messages, with thoughts.
TEMPLATES = {
    "chatml": (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
        "{%- for call in message.tool_calls or [] %}"
        '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- endif %}"
    ),
    "trimmed": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|eot|>' }}"
        "{% if message.tool_call_id is defined %}{{ message.tool_call_id }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
}
TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Looks up.",
    "parameters": {"type": "object", "properties": {"wörd": {"type": "string"}}, "required": ["wörd"]},
}
# In transformers' form, and in ours.
HISTORY: list[tuple[dict[str, Any], Said]] = [
    ({"role": "system", "content": " Be brief. "}, Said(Role.SYSTEM, " Be brief. ")),
    ({"role": "user", "content": "What is a yard?"}, Said(Role.USER, "What is a yard?")),
    (
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"wörd": "yard"}}}
            ],
        },
        Said(Role.ASSISTANT, "Let me see.", tool_calls=(ToolCall("look_up", '{"wörd": "yard"}', "1"),)),
    ),
    (
        {"role": "tool", "content": "three feet", "tool_call_id": "1"},
        Said(Role.TOOL, "three feet", tool_call_id="1"),
    ),
    ({"role": "assistant", "content": "Three "}, Said(Role.ASSISTANT, "Three ")),
]


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """The demo model's, which knows no template of its own here."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("num_messages", range(1, len(HISTORY) + 1))
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"enable_thinking": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_tools", [False, True])
def test_a_prompt_is_the_one_that_transformers_makes(
    transformers_tokenizer: Any,
    tmp_path: Path,
    template: str,
    num_messages: int,
    asked: dict[str, Any],
    has_tools: bool,
) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text(TEMPLATES[template])
    theirs, ours = zip(*HISTORY[:num_messages], strict=True)
    expected = transformers_tokenizer.apply_chat_template(
        list(theirs),
        tools=[{"type": "function", "function": TOOL}] if has_tools else None,
        chat_template=TEMPLATES[template],
        tokenize=False,
        **{"add_generation_prompt": True, **asked},
    )
    conversation = Conversation(
        ours,
        tools=(Tool("look_up", "Looks up.", json.dumps(TOOL["parameters"])),) if has_tools else (),
        add_generation_prompt=asked.get("add_generation_prompt"),
        continue_final_message=asked.get("continue_final_message", False),
        template_arguments={name: value for name, value in asked.items() if name == "enable_thinking"},
    )
    assert prompt_of(conversation, load_tokenizer(DEMO, chat_template_file=file)) == expected
