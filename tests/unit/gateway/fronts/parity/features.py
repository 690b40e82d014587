"""Each feature once: what every front answers, with the same answer, asking the same of the scheduler."""

from __future__ import annotations

from typing import Any

from tests.unit.gateway.fronts.parity.case import (
    BAD_WORD,
    CALL,
    HI,
    LONG_TEXT,
    NO_CHOICE_OF_SEVERAL,
    NOT_IN_OPENAI,
    TOKEN_IDS,
    Case,
)
from tests.unit.gateway.harness import demo_tokenizer

STOP_STRING = demo_tokenizer().decode(TOKEN_IDS)[3:6]
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
    Case("a suffix", {"suffix": "behind it"}, family="text"),
    Case("several sequences", {"n": 3}),
    Case("token ids beside the text", {"return_token_ids": True}),
    Case("special tokens in the text", {"skip_special_tokens": False}),
    Case("a salt for the prefix cache", {"cache_salt": "x"}),
    Case("a request that is kept", {"on_disconnect": "keep"}),
    Case("a request that is not kept", {"on_disconnect": "abort"}, has_effect=False),
    Case("a request that fails with its weights", {"on_update": "fail"}),
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
    Case("predicted tokens", {"sampling.predicted_token_ids": [10, 11]}),
    Case("no drafts", {"sampling.speculation": False}),
    Case("bad words", {"sampling.bad_words": [BAD_WORD, "two words"]}),
    Case("bad sequences", {"sampling.bad_token_sequences": [[5], [6, 7]]}, only="grpc", why=NOT_IN_OPENAI),
    Case("log probabilities", {"sampling.logprobs": 1}),
    Case("log probabilities of chosen tokens", {"sampling.logprobs": 0}),
    Case("log probabilities of the prompt", {"sampling.prompt_logprobs": 1}),
    Case("a budget of reasoning", {"sampling.thinking_token_budget": 0}),
    Case(
        "tokens of reasoning",
        {
            "sampling.thinking_tokens.end_token_id": 5,
            "sampling.thinking_tokens.begins": [[6]],
            "sampling.thinking_tokens.is_open": True,
            "sampling.thinking_tokens.begins_anywhere": True,
        },
        only="grpc",
        why="the gateway sets them, whatever a client says",
        has_effect=False,
    ),
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
    # Forms of the answer.
    Case("JSON by a schema", {"format.json_schema.schema": '{"type": "object"}'}),
    Case("compact JSON", {"format.json_schema.schema": '{"type": "object"}', "format.json_schema.compact": True}),
    Case("a JSON object", {"format.json_object": True}),
    Case("a regular expression", {"format.regex": "a+/b"}),
    Case("one of several texts", {"format.choices.texts": ["yes", "no"]}),
    Case("a text of a grammar", {"format.grammar": 'start: "a"'}),
    Case("a grammar", {"sampling.grammar": 'start: "a"'}, only="grpc", why="over HTTP it is a text of a grammar"),
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
    Case(
        "tools", {"conversation.tools": [TOOL, {"name": "wait", "strict": False}, {"name": "think", "parameters": {}}]}
    ),
    Case("tools at will", {"conversation.tools": [TOOL], "conversation.tool_choice": "auto"}),
    Case("tools to be called", {"conversation.tools": [TOOL], "conversation.tool_choice": "required"}),
    Case(
        "a tool to be called",
        {
            "conversation.tools": [TOOL, {"name": "wait"}],
            "conversation.tool_choice": "required",
            "conversation.named_tool": "wait",
        },
    ),
    Case(
        "tools of which some may be called",
        {"conversation.tools": [TOOL, {"name": "wait"}], "conversation.allowed_tools": ["wait"]},
        only="http",
        why=NO_CHOICE_OF_SEVERAL,
    ),
    Case("tools to the letter", {"conversation.tools": [{**TOOL, "strict": True}]}),
    Case("one call at most", {"conversation.tools": [TOOL], "conversation.one_tool_call": True}),
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
