"""The one list of what both fronts have in common: each rule and each feature once, in the proto's own words.

What is missing here is found by `test_complete`, which looks at the code, the proto and the bodies of the OpenAI API.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockyard.errors import Reason
from gateway import chat, conversation_codec, validation
from tests.unit.gateway.harness import demo_tokenizer
from tests.unit.gateway_parity.asking import parameter_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.gateway_parity.asking import Ask
    from tests.unit.gateway_parity.fronts import Front

# The model of the fake scheduler.
VOCAB_SIZE, MAX_MODEL_LEN = 4096, 1024
SEED = 5
# What the fake scheduler answers to that seed.
TOKEN_IDS = [5 + (SEED + 104729 * (position + 1)) % 4000 for position in range(6)]
HI = [{"role": "user", "content": "Once upon a time"}]

# What every request asks for, unless a case says otherwise.
COMMON: Ask = {"sampling.seed": SEED, "stop.max_tokens": len(TOKEN_IDS)}
BASE: dict[str, Ask] = {"text": {"prompt": "Once upon a time"}, "chat": {"conversation.messages": HI}}

# Shows everything that a message may have, behind it what else there is, and refuses or forgets if it is told to.
TEMPLATE = (
    "{{ bos_token }}"
    "{% if refuse is defined %}{{ raise_exception('not like this') }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if mood is defined %}{{ mood | tojson }}{% endif %}"
    "{% for message in messages %}"
    "<|{{ message.role }}|>"
    "{% for name in ['name', 'tool_calls', 'tool_call_id', 'reasoning_content'] %}"
    "{% if name in message %}{{ message[name] | tojson }}{% endif %}"
    "{% endfor %}"
    "{% if forget is not defined %}{{ message.content }}{% endif %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One thing that is asked of every front that it concerns.

    Attributes:
        name: of the case.
        asked: beside what every request asks for; None takes one of these away.
        wrong: the fields that are told, in the proto's paths; none for what is answered.
        reason: of each of them.
        only: the wire that can say it, where `why` tells why the other cannot.
        family: the calls that it concerns, if that is not plain from what is asked.
        has_effect: the answer, or what the scheduler is asked, is another one than without.
    """

    name: str
    asked: Ask
    wrong: tuple[str, ...] = ()
    reason: Reason = Reason.FIELD_INVALID
    only: str = ""
    why: str = ""
    family: str = ""
    has_effect: bool = True

    def concerns(self, front: Front) -> bool:
        """Whether it is asked there."""
        if any(path.startswith("conversation.") for path in self.asked):
            family = "chat"
        elif "prompt" in self.asked:
            family = "text"
        else:
            family = self.family
        return family in ("", front.family) and self.only in ("", front.wire)

    def fields(self, front: Front) -> list[str]:
        """What is told there to be wrong."""
        return sorted(field if front.wire == "grpc" else parameter_of(field, front.family) for field in self.wrong)

    def ask(self, front: Front) -> Ask:
        """What is asked there, but for the request's id."""
        asked = {**BASE[front.family], **COMMON, **self.asked}
        return {path: value for path, value in asked.items() if value is not None}


def rule(name: str, asked: dict[str, Any], *wrong: str, **fields: Any) -> Case:
    """Something that is refused; the fields that are told are all that is asked, unless they are given."""
    return Case(name, asked, wrong or tuple(asked), **fields)


TYPE_HOLDS_ALL_RIGHT = "the type of the proto's field holds nothing wrong"
NOT_IN_OPENAI = "the OpenAI API has no such parameter; vLLM has none either"
CALL = {"id": "call-1", "name": "look_up", "arguments": '{"word": "yard"}'}
READ_FASTER = "JSON is read at once, messages of the proto one by one"
LONG_TEXT = "once " * MAX_MODEL_LEN
BAD_WORD = "the"
BAD_WORD_IDS = sorted(ids[0] for ids in demo_tokenizer().encode_bad_words([BAD_WORD]) if len(ids) == 1)
STOP_STRING = demo_tokenizer().decode(TOKEN_IDS)[3:6]

RULES = [
    # Who and what.
    rule("another model", {"model": "other"}, reason=Reason.MODEL_NOT_FOUND),
    rule("a name that is none", {"request_id": "a b"}),
    rule("an empty text", {"prompt": ""}),
    rule("no token ids", {"prompt": []}),
    rule("a foreign token id", {"prompt": [5, VOCAB_SIZE]}),
    rule("a long prompt", {"prompt": [9] * MAX_MODEL_LEN}, reason=Reason.PROMPT_TOO_LONG),
    rule(
        "a long chat",
        {"conversation.messages": [{"role": "user", "content": LONG_TEXT}]},
        "prompt",
        reason=Reason.PROMPT_TOO_LONG,
    ),
    rule("a cut that leaves nothing", {"truncate_prompt_tokens": 0}),
    # Ranges.
    rule("no sequences", {"n": 0}),
    rule("too many sequences", {"n": validation.MAX_N + 1}),
    rule("temperature", {"sampling.temperature": -0.5}),
    rule("top_p", {"sampling.top_p": 0.0}),
    rule("top_k", {"sampling.top_k": 2**32}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("min_p", {"sampling.min_p": 1.5}),
    rule("presence_penalty", {"sampling.presence_penalty": 2.5}),
    rule("frequency_penalty", {"sampling.frequency_penalty": -2.5}),
    rule("repetition_penalty", {"sampling.repetition_penalty": 0.0}),
    rule("an infinite penalty", {"sampling.repetition_penalty": 1e39}),
    rule("seed", {"sampling.seed": -1}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("logprobs", {"sampling.logprobs": validation.MAX_LOGPROBS + 1}),
    rule("prompt_logprobs", {"sampling.prompt_logprobs": validation.MAX_LOGPROBS + 1}),
    rule("max_tokens", {"stop.max_tokens": 0}),
    rule("min_tokens", {"stop.min_tokens": -1}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("priority", {"priority": 2**31}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("max_queue_time", {"max_queue_time": 0.0}),
    rule("beam_search.width", {"beam_search.width": 1}),
    rule("length_penalty", {"beam_search.width": 2, "beam_search.length_penalty": 1e39}, "beam_search.length_penalty"),
    # Tokens and words.
    rule("a foreign bias", {"sampling.logit_bias": {VOCAB_SIZE: 1.0}}),
    rule("a large bias", {"sampling.logit_bias": {7: 100.5}}),
    rule("a foreign allowed token", {"sampling.allowed_token_ids": [7, VOCAB_SIZE]}),
    rule(
        "nothing is allowed",
        {"sampling.allowed_token_ids": BAD_WORD_IDS, "sampling.bad_words": [BAD_WORD]},
        "sampling.allowed_token_ids",
    ),
    rule("many bad words", {"sampling.bad_words": ["a"] * (validation.MAX_BAD_WORDS + 1)}),
    rule("an empty bad word", {"sampling.bad_words": ["a", ""]}),
    rule("a long bad word", {"sampling.bad_words": ["a" * (validation.MAX_BAD_WORD_CHARACTERS + 1)]}),
    rule(
        "a long bad sequence",
        {"sampling.bad_token_sequences": [[7] * (validation.MAX_BAD_SEQUENCE_TOKENS + 1)]},
        only="grpc",
        why=NOT_IN_OPENAI,
    ),
    # Ends.
    rule("many stop strings", {"stop.stop_strings": ["a"] * (validation.MAX_STOP_STRINGS + 1)}),
    rule("an empty stop string", {"stop.stop_strings": ["a", ""]}),
    rule("a long stop string", {"stop.stop_strings": ["a" * (validation.MAX_STOP_STRING_CHARACTERS + 1)]}),
    rule("a foreign stop token", {"stop.stop_token_ids": [VOCAB_SIZE]}),
    rule("more than there is room for", {"stop.max_tokens": MAX_MODEL_LEN}),
    rule("a minimum above the maximum", {"stop.min_tokens": 9, "stop.max_tokens": 8}, "stop.min_tokens"),
    rule(
        "a minimum above the room",
        {"stop.min_tokens": MAX_MODEL_LEN, "stop.max_tokens": None},
        "stop.min_tokens",
        family="chat",
    ),
    # Beams.
    rule("more answers than beams", {"n": 3, "beam_search.width": 2}, "n"),
    rule(
        "beams that end by a text",
        {"beam_search.width": 2, "stop.stop_strings": ["a"]},
        "stop.stop_strings",
        reason=Reason.UNSUPPORTED_PARAMETER,
    ),
    rule(
        "beams with log probabilities",
        {"beam_search.width": 2, "sampling.logprobs": 1},
        "sampling.logprobs",
        reason=Reason.UNSUPPORTED_PARAMETER,
    ),
    # Conversations.
    rule("no messages", {"conversation.messages": []}),
    rule("many messages", {"conversation.messages": HI * (chat.MAX_MESSAGES + 1)}),
    rule("nobody's message", {"conversation.messages": [{"content": "a"}]}, "conversation.messages[0].role"),
    rule(
        "a pilot's message",
        {"conversation.messages": [*HI, {"role": "pilot", "content": "a"}]},
        "conversation.messages[1].role",
    ),
    rule(
        "a picture",
        {"conversation.messages": [{"role": "user", "content": ["see", None]}]},
        "conversation.messages[0].content",
        reason=Reason.UNSUPPORTED_PARAMETER,
    ),
    rule(
        "many parts",
        {"conversation.messages": [{"role": "user", "content": ["a"] * (chat.MAX_PARTS + 1)}]},
        "conversation.messages[0].content",
    ),
    rule(
        "many calls",
        {"conversation.messages": [{"role": "assistant", "tool_calls": [CALL] * (chat.MAX_TOOLS + 1)}]},
        "conversation.messages[0].tool_calls",
    ),
    rule(
        "many calls in all",
        {"conversation.messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}] * 17},
        only="grpc",
        why=READ_FASTER,
    ),
    rule(
        "long arguments",
        {"conversation.template_arguments": {"mood": "x" * (conversation_codec.MAX_ARGUMENTS_BYTES + 1)}},
        only="grpc",
        why=READ_FASTER,
    ),
    rule(
        "calls of the user's",
        {"conversation.messages": [{**HI[0], "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]}]},
        "conversation.messages[0].tool_calls",
    ),
    rule(
        "an answer of the user's",
        {"conversation.messages": [{**HI[0], "tool_call_id": "1"}]},
        "conversation.messages[0].tool_call_id",
    ),
    rule(
        "a call of nothing",
        {
            "conversation.messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "name": "", "arguments": ""}]},
            ]
        },
        "conversation.messages[0].tool_calls[0].name",
    ),
    rule("many tools", {"conversation.tools": [{"name": "f"}] * (chat.MAX_TOOLS + 1)}),
    rule("a nameless tool", {"conversation.tools": [{"name": "f"}, {"name": ""}]}, "conversation.tools[1].name"),
    rule(
        "a schema that is none",
        {"conversation.tools": [{"name": "f", "parameters": "[]"}]},
        "conversation.tools[0].parameters",
    ),
    rule("a choice that is none", {"conversation.tool_choice": "sometimes"}),
    rule("arguments that are the call's", {"conversation.template_arguments": {"messages": []}}),
    rule(
        "two ends",
        {"conversation.add_generation_prompt": True, "conversation.continue_final_message": True},
        "conversation.continue_final_message",
    ),
    rule(
        "an end that is not there",
        {"conversation.messages": [*HI, {"role": "assistant"}], "conversation.continue_final_message": True},
        "conversation.continue_final_message",
    ),
    rule(
        "an end that the template leaves out",
        {"conversation.continue_final_message": True, "conversation.template_arguments": {"forget": True}},
        "conversation.continue_final_message",
    ),
    rule(
        "messages that the template refuses",
        {"conversation.template_arguments": {"refuse": True}},
        "conversation.messages",
    ),
    rule(
        "special tokens in a chat",
        {"add_special_tokens": True},
        reason=Reason.UNSUPPORTED_PARAMETER,
        family="chat",
    ),
    # Several at once.
    rule(
        "everything at once", {"n": 0, "sampling.top_p": 2.0, "stop.max_tokens": 0, "stop.stop_token_ids": [VOCAB_SIZE]}
    ),
    rule(
        "everything in a chat at once",
        {
            "conversation.messages": [{**HI[0], "tool_call_id": "1"}],
            "conversation.tools": [{"name": ""}],
            "n": 0,
            "sampling.top_p": 2.0,
        },
        "conversation.messages[0].tool_call_id",
        "conversation.tools[0].name",
        "n",
        "sampling.top_p",
    ),
]

TOOL: dict[str, Any] = {
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}

FEATURES = [
    Case("the model by its name", {"model": "demo"}, has_effect=False),
    Case("token ids as a prompt", {"prompt": [5, 6, 7]}),
    Case("a prompt of many scripts", {"prompt": "wörld 😀 東京"}),
    Case("no special tokens", {"add_special_tokens": False}, family="text"),
    Case("none but those of the template", {"add_special_tokens": False}, family="chat", has_effect=False),
    Case("a prompt that is cut", {"truncate_prompt_tokens": 2}),
    Case("a prompt that is cut to fit", {"prompt": LONG_TEXT, "truncate_prompt_tokens": -1}),
    Case("several sequences", {"n": 3}),
    Case("token ids beside the text", {"return_token_ids": True}),
    Case("special tokens in the text", {"skip_special_tokens": False}),
    Case("a request that is kept", {"on_disconnect": "keep"}),
    Case("a request that is not kept", {"on_disconnect": "abort"}, has_effect=False),
    Case("a priority", {"priority": -3}),
    Case("a queue deadline", {"max_queue_time": 99.5}),
    Case("a temperature", {"sampling.temperature": 0.5}),
    Case("the best token", {"sampling.temperature": 0.0}),
    Case("a nucleus", {"sampling.top_p": 0.5}),
    Case("the best tokens", {"sampling.top_k": 5}),
    Case("likely tokens", {"sampling.min_p": 0.25}),
    Case("a presence penalty", {"sampling.presence_penalty": 0.5}),
    Case("a frequency penalty", {"sampling.frequency_penalty": -0.5}),
    Case("a repetition penalty", {"sampling.repetition_penalty": 1.5}),
    Case("a seed", {"sampling.seed": 2**63 + 1}),
    Case("biases", {"sampling.logit_bias": {7: 2.5, 8: -100.0}}),
    Case("allowed tokens", {"sampling.allowed_token_ids": [10, 11]}),
    Case("bad words", {"sampling.bad_words": [BAD_WORD, "two words"]}),
    Case("bad sequences", {"sampling.bad_token_sequences": [[5], [6, 7]]}, only="grpc", why=NOT_IN_OPENAI),
    Case("log probabilities", {"sampling.logprobs": 1}),
    Case("log probabilities of chosen tokens", {"sampling.logprobs": 0}),
    Case("log probabilities of the prompt", {"sampling.prompt_logprobs": 1}),
    Case("a length", {"stop.max_tokens": 3}),
    Case("a least length", {"stop.min_tokens": 2}),
    Case("a stop string", {"stop.stop_strings": [STOP_STRING, "never"]}),
    Case("a stop string in the text", {"stop.stop_strings": [STOP_STRING], "stop.include_stop_in_output": True}),
    Case("a stop token", {"stop.stop_token_ids": [TOKEN_IDS[2]]}),
    Case("a stop token in the text", {"stop.stop_token_ids": [TOKEN_IDS[2]], "stop.include_stop_in_output": True}),
    Case("no end", {"stop.ignore_eos": True}),
    Case("beams", {"n": 2, "beam_search.width": 3}),
    Case("beams by their length", {"beam_search.width": 2, "beam_search.length_penalty": -0.5}),
    Case("beams that end early", {"beam_search.width": 2, "beam_search.early_stopping": "first"}),
    Case("beams that never end early", {"beam_search.width": 2, "beam_search.early_stopping": "never"}),
    # Conversations.
    Case(
        "a conversation",
        {
            "conversation.messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": ["Who", "are you?"], "name": "Ann"},
                {"role": "assistant", "content": "Nobody.", "reasoning_content": "A name?"},
                {"role": "user", "content": ""},
            ]
        },
    ),
    Case("tools", {"conversation.tools": [TOOL, {"name": "wait"}, {"name": "think", "parameters": {}}]}),
    Case("tools at will", {"conversation.tools": [TOOL], "conversation.tool_choice": "auto"}),
    Case(
        "tools that are not to be called",
        {"conversation.tools": [TOOL], "conversation.tool_choice": "none"},
        has_effect=False,
    ),
    Case(
        "calls and their answers",
        {
            "conversation.messages": [
                *HI,
                {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call-2", "arguments": "not JSON"}]},
                {"role": "tool", "content": "a place", "tool_call_id": "call-1", "name": "look_up"},
            ],
            "conversation.tools": [TOOL],
        },
    ),
    Case("an open end", {"conversation.add_generation_prompt": False}),
    Case("the assistant's turn", {"conversation.add_generation_prompt": True}, has_effect=False),
    Case(
        "an answer to go on with",
        {
            "conversation.messages": [*HI, {"role": "assistant", "content": "There was "}],
            "conversation.continue_final_message": True,
        },
    ),
    Case(
        "variables of the template",
        {"conversation.template_arguments": {"mood": {"b": -3, "deep": [1, 0.5, None, True, "x"]}}},
    ),
]

CASES = [*RULES, *FEATURES]
BASES = Case("nothing beside", {})


def cases_of(front: Front) -> Iterator[Case]:
    """Those that a front is asked."""
    return (case for case in CASES if case.concerns(front))


def named(case: Case, request_id: str) -> Case:
    """The same case under a request's name, unless it brings one."""
    return case if "request_id" in case.asked else replace(case, asked={**case.asked, "request_id": request_id})
