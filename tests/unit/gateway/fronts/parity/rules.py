"""Each rule once: what every front refuses, with the same reason and field."""

from __future__ import annotations

from typing import Any

from blockyard.contract import chat
from blockyard.errors import Reason
from gateway import validation
from tests.unit.gateway.fronts.parity.case import (
    BAD_WORD,
    CALL,
    HI,
    LONG_TEXT,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NO_CHOICE_OF_SEVERAL,
    NOT_IN_OPENAI,
    VOCAB_SIZE,
    Case,
)
from tests.unit.gateway.harness import demo_tokenizer

TYPE_HOLDS_ALL_RIGHT = "the type of the proto's field holds nothing wrong"
READ_FASTER = "JSON is read at once, messages of the proto one by one"
BAD_WORD_IDS = sorted(ids[0] for ids in demo_tokenizer().encode_bad_words([BAD_WORD]) if len(ids) == 1)


def rule(name: str, asked: dict[str, Any], *wrong: str, **fields: Any) -> Case:
    """Something that is refused; the fields that are told are all that is asked, unless they are given."""
    return Case(name, asked, wrong or tuple(asked), **fields)


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
    rule(
        "a suffix of a prompt that is cut",
        {"suffix": "end", "truncate_prompt_tokens": 3},
        "suffix",
        reason=Reason.UNSUPPORTED_PARAMETER,
        family="text",
    ),
    rule("a suffix of ids", {"prompt": [9, 9], "suffix": "end"}, "suffix"),
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
    rule("thinking_token_budget", {"sampling.thinking_token_budget": 2**32}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule(
        "reasoning of beams",
        {"sampling.thinking_token_budget": 5, "beam_search.width": 2},
        "sampling.thinking_token_budget",
        reason=Reason.UNSUPPORTED_PARAMETER,
    ),
    rule(
        "reasoning in a grammar",
        {"sampling.thinking_token_budget": 5, "sampling.grammar": 'start: "a"'},
        "sampling.thinking_token_budget",
        reason=Reason.UNSUPPORTED_PARAMETER,
        only="grpc",
        why="over HTTP it is a text of a grammar",
    ),
    rule("max_tokens", {"stop.max_tokens": 0}),
    rule("min_tokens", {"stop.min_tokens": -1}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("priority", {"priority": 2**31}, only="http", why=TYPE_HOLDS_ALL_RIGHT),
    rule("max_queue_time", {"max_queue_time": 0.0}),
    rule("beam_search.width", {"beam_search.width": 1}),
    rule("stop ids of beams", {"beam_search.width": 2, "stop.stop_token_ids": list(range(33))}, "stop.stop_token_ids"),
    rule("length_penalty", {"beam_search.width": 2, "beam_search.length_penalty": 1e39}, "beam_search.length_penalty"),
    # Tokens and words.
    rule("a foreign bias", {"sampling.logit_bias": {VOCAB_SIZE: 1.0}}),
    rule("many biases", {"sampling.logit_bias": dict.fromkeys(range(validation.MAX_LOGIT_BIASES + 1), 1.0)}),
    rule("a large bias", {"sampling.logit_bias": {7: 100.5}}),
    rule("a foreign allowed token", {"sampling.allowed_token_ids": [7, VOCAB_SIZE]}),
    rule(
        "nothing is allowed",
        {"sampling.allowed_token_ids": BAD_WORD_IDS, "sampling.bad_words": [BAD_WORD]},
        "sampling.allowed_token_ids",
    ),
    rule("a foreign predicted token", {"sampling.predicted_token_ids": [VOCAB_SIZE]}),
    rule(
        "more predicted tokens than the model's length",
        {"sampling.predicted_token_ids": [7] * (MAX_MODEL_LEN + 1)},
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
    rule("more than the model's length", {"stop.max_tokens": MAX_MODEL_LEN}),
    rule("more than there is room for", {"stop.max_tokens": MAX_MODEL_LEN - 1}, reason=Reason.PROMPT_TOO_LONG),
    rule("more sequences than run at once", {"n": MAX_NUM_SEQS + 1}),
    rule("more beams than run at once", {"beam_search.width": MAX_NUM_SEQS + 1}),
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
    rule(
        "an end of beams that is none",
        {"beam_search.width": 2, "beam_search.early_stopping": "sometimes"},
        "beam_search.early_stopping",
    ),
    # Forms of the answer.
    rule("a keyword that is not served", {"format.json_schema.schema": '{"not": {}}'}, "format.json_schema.schema.not"),
    rule("a form by no schema", {"format.json_schema.schema": "[]"}),
    rule("a regular expression that is none", {"format.regex": "("}),
    rule("no choices", {"format.choices.texts": []}),
    rule("a grammar that is none", {"format.grammar": "start: ("}),
    rule("a form that is none", {"format.json_object": False}, "format", only="grpc", why="over HTTP it asks for none"),
    rule(
        "two grammars",
        {"format.regex": "a", "sampling.grammar": 'start: "a"'},
        "sampling.grammar",
        only="grpc",
        why="over HTTP there is no other place for one",
    ),
    rule("a form that goes on", {"format.regex": "a", "stop.ignore_eos": True}, "stop.ignore_eos"),
    rule(
        "beams in a form",
        {"format.json_object": True, "beam_search.width": 2},
        "format",
        reason=Reason.UNSUPPORTED_PARAMETER,
    ),
    rule("a salt that is too long", {"cache_salt": "x" * 257}),
    rule("a way to leave that is none", {"on_disconnect": "sometimes"}),
    rule("an end of weights that is none", {"on_update": "sometimes"}),
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
        {"conversation.template_arguments": {"mood": "x" * (chat.MAX_ARGUMENTS_BYTES + 1)}},
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
    rule("a call of no tool", {"conversation.tool_choice": "required"}),
    rule(
        "a call of another tool",
        {
            "conversation.tools": [{"name": "f"}],
            "conversation.tool_choice": "required",
            "conversation.named_tool": "g",
        },
        "conversation.named_tool",
    ),
    rule(
        "a named tool at will",
        {"conversation.tools": [{"name": "f"}], "conversation.named_tool": "f"},
        "conversation.named_tool",
        only="grpc",
        why="over HTTP whoever names a tool requires it",
    ),
    rule(
        "tools that there are not to choose from",
        {"conversation.tools": [{"name": "f"}], "conversation.allowed_tools": ["f", "g"]},
        "conversation.allowed_tools",
        only="http",
        why=NO_CHOICE_OF_SEVERAL,
    ),
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
