"""What programs with OpenAI's own client or with litellm do, run in an environment of its own.

    python openai_features.py openai|litellm URL

Imports nothing of ours. Writes a JSON object: for each feature "ok", or what went wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "demo"
PROMPT = "def read_lines(path):\n"
HELLO = [{"role": "user", "content": "What is a list?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "finds pages",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
    },
}


class OpenAI:
    """OpenAI's package. What OpenAI does not have goes into `extra_body`."""

    def __init__(self, url: str) -> None:
        import openai

        self.package = openai
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.root = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.root.close()

    def complete(self, prompt: Any = PROMPT, **asked: Any) -> Any:
        return self.client.completions.create(model=asked.pop("model", MODEL), prompt=prompt, **asked)

    def chat(self, messages: Any = HELLO, **asked: Any) -> Any:
        return self.client.chat.completions.create(model=asked.pop("model", MODEL), messages=messages, **asked)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.root.post(path, cast_to=object, body=body)


class LiteLLM:
    """litellm, as it talks to a server that speaks OpenAI's language."""

    def __init__(self, url: str) -> None:
        import litellm

        litellm.suppress_debug_info = True
        litellm.num_retries = 0
        self.package = litellm
        self._where = {"api_base": f"{url}/v1", "api_key": "none"}

    def complete(self, prompt: Any = PROMPT, **asked: Any) -> Any:
        model = f"text-completion-openai/{asked.pop('model', MODEL)}"
        return self.package.text_completion(model=model, prompt=prompt, **asked, **self._where)

    def chat(self, messages: Any = HELLO, **asked: Any) -> Any:
        model = f"openai/{asked.pop('model', MODEL)}"
        return self.package.completion(model=model, messages=messages, **asked, **self._where)


Api = Any
FEATURES: dict[str, Callable[[Api], None]] = {}
# Of the package, not of what it sends.
OPENAI_ALONE: set[str] = set()


def feature(check: Callable[[Api], None]) -> Callable[[Api], None]:
    FEATURES[check.__name__] = check
    return check


def openai_alone(check: Callable[[Api], None]) -> Callable[[Api], None]:
    OPENAI_ALONE.add(check.__name__)
    return feature(check)


def text_of(answer: Any, index: int = 0) -> str:
    choice = answer.choices[index]
    return choice.message.content if hasattr(choice, "message") else choice.text


def ids_of(choice: Any) -> Any:
    """The choice's ids; litellm keeps what it does not know in a dictionary."""
    told = getattr(choice, "token_ids", None)
    return told if told is not None else choice.provider_specific_fields["token_ids"]


def streamed(chunks: Any, count: int = 1) -> list[str]:
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] += piece or ""
    return texts


def refused(api: Api, call: Callable[[], Any], error: str = "BadRequestError") -> Any:
    try:
        call()
    except getattr(api.package, error) as raised:
        return raised
    raise AssertionError("it was taken")


@openai_alone
def models(api: Api) -> None:
    (model,) = api.client.models.list()
    assert (model.id, model.max_model_len > 0) == (MODEL, True)
    assert api.client.models.retrieve(MODEL) == model
    refused(api, lambda: api.client.models.retrieve("other"), "NotFoundError")


@feature
def completion_whole_and_streamed(api: Api) -> None:
    whole = api.complete(**GREEDY)
    assert text_of(whole)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert streamed(api.complete(stream=True, **GREEDY)) == [text_of(whole)]


@feature
def chat_whole_and_streamed(api: Api) -> None:
    whole = api.chat(**GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert text_of(whole)
    assert streamed(api.chat(stream=True, **GREEDY)) == [text_of(whole)]


@openai_alone
def prompts_of_every_form(api: Api) -> None:
    alone = text_of(api.complete(**GREEDY))
    ids = api.post("/tokenize", {"prompt": PROMPT})["tokens"]
    other = text_of(api.complete("x = 1\n", **GREEDY))
    assert text_of(api.complete(ids, **GREEDY)) == alone
    assert [choice.text for choice in api.complete([PROMPT, "x = 1\n"], **GREEDY).choices] == [alone, other]
    assert [choice.text for choice in api.complete([ids, ids], **GREEDY).choices] == [alone, alone]


@feature
def n_and_seed(api: Api) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 12, "temperature": 0.9}
    first = [choice.text for choice in api.complete(**asked).choices]
    assert len(first) == len(set(first)) == 3
    assert [choice.text for choice in api.complete(**asked).choices] == first
    assert [choice.text for choice in api.complete(**{**asked, "seed": 6}).choices] != first


@openai_alone
def n_in_a_stream(api: Api) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 12}
    whole = api.chat(**asked)
    assert streamed(api.chat(stream=True, **asked), 3) == [choice.message.content for choice in whole.choices]


@openai_alone
def beam_search_and_best_of(api: Api) -> None:
    told = api.complete(n=2, best_of=4, max_tokens=8, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    scores = [choice.score for choice in told.choices]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)
    refused(api, lambda: api.complete(best_of=2))


@feature
def stop_strings(api: Api) -> None:
    text = text_of(api.complete(temperature=0, max_tokens=24))
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for form in (stop, [stop, "never written"]):
        told = api.complete(temperature=0, max_tokens=24, stop=form)
        assert text_of(told) == text[: text.index(stop)]
        assert told.choices[0].finish_reason == "stop"
    told = api.complete(temperature=0, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert text_of(told) == text[: text.index(stop) + len(stop)]


@openai_alone
def stop_token_ids_min_tokens_and_ignore_eos(api: Api) -> None:
    ids = ids_of(api.complete(**GREEDY, extra_body={"return_token_ids": True}).choices[0])
    told = api.complete(**GREEDY, extra_body={"stop_token_ids": [ids[5]]})
    assert told.choices[0].stop_reason == ids[5]
    assert told.usage.completion_tokens <= 6
    extra = {"stop_token_ids": ids, "min_tokens": 9, "ignore_eos": True}
    assert api.complete(**GREEDY, extra_body=extra).usage.completion_tokens >= 9
    assert api.complete(max_tokens=64, extra_body={"ignore_eos": True}).usage.completion_tokens == 64


@feature
def sampling(api: Api) -> None:
    extra = {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1}
    for ask in (api.complete, api.chat):
        asked = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 12, "seed": 3, "extra_body": extra}
        assert text_of(ask(**asked)) == text_of(ask(**asked))
    # The likeliest alone: as good as greedy.
    assert text_of(api.complete(max_tokens=12, extra_body={"top_k": 1})) == text_of(
        api.complete(max_tokens=12, temperature=0)
    )


@openai_alone
def penalties(api: Api) -> None:
    plain = text_of(api.complete(temperature=0, max_tokens=40, extra_body={"ignore_eos": True}))
    extra = {"ignore_eos": True, "repetition_penalty": 1.8}
    assert text_of(api.complete(temperature=0, max_tokens=40, extra_body=extra)) != plain
    both = {"presence_penalty": 2, "frequency_penalty": 2, "extra_body": {"ignore_eos": True}}
    assert text_of(api.complete(temperature=0, max_tokens=40, **both)) != plain


@openai_alone
def which_tokens_may_be_chosen(api: Api) -> None:
    (wanted,) = api.post("/tokenize", {"prompt": "a", "add_special_tokens": False})["tokens"]
    extra = {"return_token_ids": True, "ignore_eos": True}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    biased = api.complete(**asked, logit_bias={str(wanted): 100}, extra_body=extra)
    allowed = api.complete(**asked, extra_body={**extra, "allowed_token_ids": [wanted]})
    assert ids_of(biased.choices[0]) == ids_of(allowed.choices[0]) == [wanted] * 5
    plain = text_of(api.complete(temperature=0, max_tokens=24))
    word = plain.split()[0]
    assert text_of(api.complete(temperature=0, max_tokens=24, extra_body={"bad_words": [word]})) != plain


@feature
def logprobs_of_a_completion(api: Api) -> None:
    told = api.complete(**GREEDY, logprobs=3).choices[0]
    columns = told.logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.top_logprobs)
    assert "".join(columns.tokens).startswith(told.text)
    assert all(value <= 0 for value in columns.token_logprobs)
    # Greedy: each is the likeliest.
    assert all(
        value == max(top.values()) for value, top in zip(columns.token_logprobs, columns.top_logprobs, strict=True)
    )


@feature
def logprobs_of_a_chat(api: Api) -> None:
    told = api.chat(**GREEDY, logprobs=True, top_logprobs=2).choices[0]
    content = told.logprobs.content
    assert bytes(byte for token in content for byte in token.bytes or ()).decode() == told.message.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    pieces = [chunk.choices[0].logprobs for chunk in api.chat(**GREEDY, logprobs=True, top_logprobs=2, stream=True)]
    names = [token.token for piece in pieces if piece for token in piece.content]
    assert names == [token.token for token in content]


@openai_alone
def echo_with_the_prompts_logprobs(api: Api) -> None:
    told = api.complete(**GREEDY, echo=True, logprobs=0)
    assert text_of(told).startswith(PROMPT)
    columns = told.choices[0].logprobs
    assert columns.token_logprobs[0] is None
    assert len(columns.tokens) == told.usage.total_tokens
    assert streamed(api.complete(**GREEDY, echo=True, stream=True)) == [text_of(told)]


@openai_alone
def prompt_logprobs_and_token_ids(api: Api) -> None:
    extra = {"prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = api.complete(**GREEDY, logprobs=0, extra_body=extra).choices[0]
    assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
    assert choice.prompt_logprobs[0] is None
    assert str(choice.prompt_token_ids[1]) in choice.prompt_logprobs[1]
    assert choice.logprobs.tokens == [f"token_id:{token_id}" for token_id in choice.token_ids]


@openai_alone
def special_tokens(api: Api) -> None:
    with_them = api.post("/tokenize", {"prompt": "a"})["tokens"]
    extra = {"return_token_ids": True, "add_special_tokens": False, "skip_special_tokens": False}
    choice = api.complete("a", max_tokens=1, extra_body=extra).choices[0]
    assert choice.prompt_token_ids == api.post("/tokenize", {"prompt": "a", "add_special_tokens": False})["tokens"]
    assert with_them[-len(choice.prompt_token_ids) :] == choice.prompt_token_ids


@feature
def prompts_are_cut(api: Api) -> None:
    for ask in (api.complete, api.chat):
        assert ask(max_tokens=1, extra_body={"truncate_prompt_tokens": 2}).usage.prompt_tokens == 2
    long, extra = "word " * 5000, {"truncate_prompt_tokens": -1}
    assert api.complete(long, max_tokens=4, extra_body=extra).usage.prompt_tokens > 99
    refused(api, lambda: api.complete(long, max_tokens=4))


@feature
def usage_of_a_stream(api: Api) -> None:
    whole = api.chat(**GREEDY)
    *_, last = api.chat(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@openai_alone
def usage_of_every_chunk(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for ask in (api.complete, api.chat):
        counts = [chunk.usage.completion_tokens for chunk in ask(**GREEDY, stream=True, stream_options=options)]
        assert counts == sorted(counts)
        assert counts[-1] > counts[0]


@openai_alone
def names_and_labels(api: Api) -> None:
    name = "a-name-of-mine"
    told = api.complete(max_tokens=2, user="me", extra_body={"request_id": name, "priority": 3, "session_id": "s"})
    assert told.id == told._request_id == name
    labels: dict[str, Any] = {
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "x",
        "service_tier": "auto",
        "store": True,
        "user": "me",
    }
    assert api.chat(max_completion_tokens=2, **labels).usage.completion_tokens <= 2


@feature
def tools_are_taken(api: Api) -> None:
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"words": "list"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a list is a list"},
    ]
    for choice in ("auto", "none"):
        assert api.chat(history, **GREEDY, tools=[TOOL], tool_choice=choice).usage.prompt_tokens > 0
    forced = {"type": "function", "function": {"name": "search"}}
    for choice in ("required", forced):
        error = refused(api, lambda choice=choice: api.chat(tools=[TOOL], tool_choice=choice, max_tokens=1))
        assert "tool_choice" in str(error)


@feature
def response_formats(api: Api) -> None:
    assert text_of(api.chat(**GREEDY, response_format={"type": "text"}))
    assert text_of(api.chat(**GREEDY, response_format={"type": "json_object"})).lstrip().startswith("{")
    schema = {"name": "found", "strict": True, "schema": {"enum": ["yes", "no"]}}
    asked = {**GREEDY, "response_format": {"type": "json_schema", "json_schema": schema}}
    assert text_of(api.chat(**asked)).strip() in ('"yes"', '"no"')
    error = refused(api, lambda: api.chat(**GREEDY, response_format={"type": "xml"}))
    assert "response_format" in str(error)


@feature
def a_final_message_goes_on(api: Api) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "A list is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    alone = text_of(api.chat(messages, **GREEDY, extra_body=extra))
    assert text_of(api.chat(messages, **GREEDY, extra_body={**extra, "echo": True})) == f"A list is{alone}"
    told = api.chat(**GREEDY, extra_body={"chat_template_kwargs": {"enable_thinking": False}, "documents": []})
    assert text_of(told) == text_of(api.chat(**GREEDY))


@openai_alone
def tokenize_and_detokenize(api: Api) -> None:
    told = api.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) < told["max_model_len"]
    assert api.post("/detokenize", {"tokens": told["tokens"]})["prompt"].endswith(PROMPT)
    chat = api.post("/tokenize", {"messages": HELLO})
    assert chat["count"] == api.chat(max_tokens=1).usage.prompt_tokens


@openai_alone
def errors_name_what_is_wrong(api: Api) -> None:
    error = refused(api, lambda: api.complete(top_p=7, presence_penalty=-3, extra_body={"temprature": 1}))
    assert (error.param, error.code) == ("temprature", "FIELD_INVALID")
    error = refused(api, lambda: api.complete(top_p=7, presence_penalty=-3))
    assert {violation["param"] for violation in error.body["violations"]} == {"top_p", "presence_penalty"}
    error = refused(api, lambda: api.complete(suffix="x"))
    assert (error.param, error.code) == ("suffix", "UNSUPPORTED_PARAMETER")


@feature
def what_is_too_long_is_recognised(api: Api) -> None:
    kind = "BadRequestError" if isinstance(api, OpenAI) else "ContextWindowExceededError"
    long = [{"role": "user", "content": "word " * 100_000}]
    for error in (
        refused(api, lambda: api.chat(long, max_tokens=1), kind),
        refused(api, lambda: api.chat([{"role": "user", "content": "word " * 500}], max_tokens=900), kind),
        refused(api, lambda: api.complete("word " * 100_000, max_tokens=1), kind),
    ):
        assert "context_length_exceeded" in str(error), error
        assert "maximum context length is" in str(error), error


@openai_alone
def tools_come_with_a_warning(api: Api) -> None:
    (warning,) = api.chat(**GREEDY, tools=[TOOL]).warnings
    assert "tool_calls" in warning
    assert not hasattr(api.chat(**GREEDY), "warnings")


@feature
def errors_have_the_packages_types(api: Api) -> None:
    assert "top_p" in str(refused(api, lambda: api.chat(top_p=7, max_tokens=1)))
    refused(api, lambda: api.chat(model="other", max_tokens=1), "NotFoundError")


def outcome(check: Callable[[Api], None], api: Api) -> str:
    try:
        check(api)
    except Exception:  # noqa: BLE001 - whatever it is, it is told
        return traceback.format_exc()
    return "ok"


def main(kind: str, url: str) -> None:
    api = OpenAI(url) if kind == "openai" else LiteLLM(url)
    told = {
        name: outcome(check, api) for name, check in FEATURES.items() if kind == "openai" or name not in OPENAI_ALONE
    }
    told["version"] = importlib.metadata.version(kind)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
