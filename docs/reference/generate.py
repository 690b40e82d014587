"""Writes the pages of this folder that are made from the code: errors, messages, settings, metrics, parameters, protos.

    python docs/reference/generate.py

A test holds the committed pages against what this writes.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

from agents_page import agents_page  # noqa: E402
from dashboard import dashboard, prometheus_rule  # noqa: E402
from messages_page import messages_page  # noqa: E402
from metrics_page import metrics_page  # noqa: E402
from models_page import models_page  # noqa: E402
from protos_page import protos_page  # noqa: E402
from settings_page import settings_page  # noqa: E402

from blockyard.errors import DOMAIN, TABLE, Reason  # noqa: E402
from gateway.fronts.http_calls.body_types import Neutral  # noqa: E402
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody  # noqa: E402

if TYPE_CHECKING:
    from pydantic import BaseModel


NOTE = "<!-- Written by docs/reference/generate.py. -->"

# What each reason means, and what helps.
MEANINGS: dict[Reason, tuple[str, str]] = {
    Reason.FIELD_INVALID: (
        "A field has a value out of its range or of the wrong type, or does not exist.",
        "Correct the fields that the violations name: they list everything that is wrong.",
    ),
    Reason.PROMPT_TOO_LONG: (
        "The prompt leaves no room for an answer in the model's context.",
        "Shorten the prompt, or ask for fewer tokens.",
    ),
    Reason.UNSUPPORTED_PARAMETER: (
        "The API knows the parameter, and this version does not serve it.",
        "Leave it out, or give its neutral value.",
    ),
    Reason.UNAUTHENTICATED: (
        "The call brings no key, or one that is unknown or has expired.",
        "Send a key: `authorization: Bearer KEY`.",
    ),
    Reason.PERMISSION_DENIED: (
        "The key or the certificate is good, but not for this port, or not for this tenant.",
        "Use the right one, and leave the tenant to it.",
    ),
    Reason.MODEL_NOT_FOUND: ("No model of this name is served.", "Take a name from ListModels or /v1/models."),
    Reason.REQUEST_ID_CONFLICT: (
        "A different request with this request_id runs, or ended less than --resume-window-seconds ago. The same "
        "request, sent again, is no conflict: it is read from its beginning.",
        "Choose another id, or leave the choice to the gateway.",
    ),
    Reason.MODEL_NOT_LOADED: (
        "The model's files cannot be read or used.",
        "The message names the file and what is wrong with it.",
    ),
    Reason.FEATURE_DISABLED: (
        "The model or the process lacks the feature that the call needs, such as a chat template.",
        "The message says how to enable it.",
    ),
    Reason.WRONG_STATE: (
        "The worker or the replica is in a state that does not allow this call.",
        "Only operators and our own services see it: do first what the message says.",
    ),
    Reason.NO_TOKEN_POSSIBLE: (
        "A sequence cannot go on: the request excludes every token, and does not let it end yet.",
        "Look at allowed_token_ids, bad_words and min_tokens together.",
    ),
    Reason.GRAMMAR_DEAD_END: (
        "A sequence cannot go on: the request forbids every token that its grammar needs next.",
        "Look at allowed_token_ids and bad_words beside the format.",
    ),
    Reason.GRAMMAR_TOO_COMPLEX: (
        "The format, or the grammar made of it, reaches a limit of size, depth or work.",
        "Make it smaller: fewer or shorter patterns, smaller bounds, less nesting.",
    ),
    Reason.REQUEST_EXPIRED: (
        "No service knows a request with this id, or it ended too long ago.",
        "Send it again, or resume it with its spec: then it is generated again and only the rest is sent.",
    ),
    Reason.QUEUE_FULL: (
        "The gateway has reached its limit of requests or connections, or the scheduler its limit of waiting requests.",
        "Try again after the time that comes with the error.",
    ),
    Reason.TOKEN_BACKLOG: (
        "The requests that wait hold too many tokens.",
        "Try again after the time that comes with the error.",
    ),
    Reason.TENANT_QUOTA: (
        "This tenant has too many requests waiting.",
        "Try again after the time that comes with the error.",
    ),
    Reason.MESSAGE_TOO_LARGE: ("The request has more than 16 MiB.", "Send less."),
    Reason.NEVER_FITS: (
        "The request needs more KV blocks than the worker has, even alone.",
        "Shorten the prompt or max_tokens, or give the worker more memory.",
    ),
    Reason.CLIENT_CANCELLED: ("The client cancelled the request, or has left.", "Nothing has to be done."),
    Reason.POISON_REQUEST: (
        "The worker died three times in a row while it computed this request.",
        "Do not send it again; the service's log has the details, please report it.",
    ),
    Reason.NOT_FINITE: (
        "The model's logits were infinite or not a number, so nothing could be sampled.",
        "Check the model's files, and load it in a wider dtype: bfloat16 or float32 instead of float16.",
    ),
    Reason.BUG: ("An error in Blockyard.", "The service's log has the details; please report it."),
    Reason.NO_READY_WORKER: (
        "No worker can take requests now: it is starting, loading, or gone.",
        "Try again after the time that comes with the error.",
    ),
    Reason.QUEUE_DEADLINE: (
        "The request waited for its first step longer than max_queue_time.",
        "Try again later, or allow it more time in the queue.",
    ),
    Reason.GENERATION_DEADLINE: (
        "The deadline that the client gave its call has passed.",
        "Give it more time, or ask for fewer tokens.",
    ),
    Reason.OPERATION_DEADLINE: (
        "An operator's call to workers took longer than its timeout; the message names the ranks that did not answer.",
        "Give it more time, or look at those workers.",
    ),
    Reason.EXTENSION_FAILED: (
        "An operation of a worker's extension failed with an error of its own.",
        "Look at the worker's log, and correct the extension.",
    ),
    Reason.DRAINING: ("The process is stopping.", "Try again: a successor may be there already."),
    Reason.SLEEPING: ("All replicas are asleep.", "Wake one: `blockyard admin wake`."),
    Reason.GROUP_BROKEN: (
        "A worker of a replica lost another worker of it. The replica is set up again, and requests go on.",
        "Nothing has to be done: clients do not see it.",
    ),
}


ERRORS = """\
# Errors
{note}

Every error has a reason. It is the same on both APIs, and it decides the status code:

| reason | gRPC | HTTP | meaning, and what helps |
|---|---|---|---|
{rows}

[Every message](messages.md) of each reason is a page of its own.

## Over gRPC

The status carries a `google.rpc.Status` with `ErrorInfo` (the reason, domain `{domain}`), `BadRequest` with every
violation (the path of the field in the proto, what it should be, a reason of its own), and `RetryInfo` when trying
again makes sense. The client library raises it as `blockyard.errors.BlockyardError`; code of your own decodes it with
`blockyard.errors.from_rpc_error`.

## Over HTTP

```json
{{"error": {{"message": "top_p: must be above 0 and at most 1, not 7.0", "type": "invalid_request_error",
           "param": "top_p", "code": "FIELD_INVALID", "reason": "FIELD_INVALID",
           "violations": [{{"param": "top_p", "message": "must be above 0 and at most 1, not 7.0",
                           "code": "FIELD_INVALID"}}]}}}}
```

`reason` is the reason, and `code` is the same but for `PROMPT_TOO_LONG`: there it is OpenAI's
`context_length_exceeded`, and the message says `This model's maximum context length is N tokens`, as litellm, langchain
and others expect it. `param` is the first violation's parameter. When trying again makes sense, the headers
`Retry-After` (seconds), `retry-after-ms` and `x-should-retry: true` say so; on every other error `x-should-retry` is
`false`. OpenAI's own clients obey all three. `x-request-id` (`request-id` of `/v1/messages`) is the name of the request
that the gateway's log has, unless the body led to none.

A stream that fails after it has begun ends with one event `data: {{"error": …}}` and without `data: [DONE]`.

## A sequence that fails by itself

`NOT_FINITE`, `NO_TOKEN_POSSIBLE`, `GRAMMAR_DEAD_END` and, where a limit is reached while it runs, `GRAMMAR_TOO_COMPLEX`
are of one sequence: the other sequences and prompts of its call go on. Its `Finished` has the reason
`FINISH_REASON_ERROR` and an `error`, a `google.rpc.Status`; over HTTP its choice, or the last chunk of it, has
`"finish_reason": "error"` and an `"error"` in the form above. If every sequence of a call fails, the call fails with
the error of the first: an answer at once has its status code, and a stream ends with it after the last `Finished` or
the last chunk.

## Wrong ports

A call that reaches another port than it is meant for, or speaks TLS where there is none, gets what the server's library
answers. The client library and `blockyard` add what to try to what gRPC says:

| what calls | where | what it sees |
|---|---|---|
| the public API | the admin port | `UNIMPLEMENTED: Method not found!`; and the reverse |
| a gRPC client | the HTTP port | `UNAVAILABLE: … Trying to connect an http1.x server` |
| an HTTP client | a gRPC port | bytes that are not HTTP/1.1: curl says `Received HTTP/0.9 when not allowed` |
| a client with TLS | a port without | `WRONG_VERSION_NUMBER` |
| a client without TLS | a port with | the connection closes at once: `Socket closed`, `Empty reply from server` |
"""


def errors_page() -> str:
    """The table of errors."""
    rows = [
        f"| `{reason}` | `{rule.code.name}` | {rule.http_status} | {' '.join(MEANINGS[reason])} |"
        for reason, rule in TABLE.items()
    ]
    return ERRORS.format(note=NOTE, domain=DOMAIN, rows="\n".join(rows))


def _is_neutral(field: Any) -> bool:
    hints = [*field.metadata, *getattr(field.annotation, "__metadata__", ())]
    return any(isinstance(item, Neutral) for item in hints)


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _working(body: type[BaseModel]) -> str:
    ignored: frozenset[str] = getattr(body, "WITHOUT_EFFECT", frozenset())
    return _named([name for name, field in body.model_fields.items() if not _is_neutral(field) and name not in ignored])


def _parameters(body: type[BaseModel]) -> str:
    fields = body.model_fields
    refused = [name for name, field in fields.items() if _is_neutral(field)]
    ignored: frozenset[str] = typing.cast("Any", body).WITHOUT_EFFECT
    return (
        f"**Work:** {_working(body)}.\n\n"
        f"**Taken, without effect:** {_named([name for name in fields if name in ignored])}.\n\n"
        f"**Not served yet:** {_named(refused)}."
    )


OPENAI = """\
# The OpenAI API
{note}

| | |
|---|---|
| `POST /v1/completions`, `POST /v1/chat/completions` | the calls that generate |
| `GET /v1/requests/{{id}}/stream`, `DELETE /v1/requests/{{id}}` | read it again, end it: [how](../guides/resume.md) |
| `GET /v1/models`, `GET /v1/models/{{id}}` | the model that is served, its length, and whether it takes messages |
| `POST /v1/models/load` | load `model`, one of several, before its first request: [how](../guides/several-models.md) |
| `POST /tokenize`, `POST /detokenize` | the ids of a prompt or a chat, the text of ids |
| `GET /health/ready` (and `/health`) | 200 when requests can be served now, else 503, why not, and `Retry-After` |
| `GET /health/live`, `GET /health/startup` | 200 while the process works, and once it has started |
| `GET /version` | the version |
| `GET /openapi.json` | all of this for programs: bodies, their ranges, and the reasons of errors |

Give OpenAI's own client `http://127.0.0.1:8000/v1` as `base_url`, and any `api_key` where the gateway asks for none;
litellm the model `openai/NAME` and the same address as `api_base`; guidellm
`--backend kind=openai_http,target=http://127.0.0.1:8000/v1`. `tests/e2e/test_openai_clients.py` does so, with every
feature of this page, and has schemathesis hold bodies and statuses against the document.
A body must come with `Content-Type: application/json`; another one is refused with 415, since a web page may send it to
any address without asking. It has at most 16 MiB (413), and the request line and headers together 16 KiB (431). Web
pages of other origins need `--allowed-origins`: [how](../guides/security.md#web-pages-of-others).

A parameter that is not served yet is refused with `UNSUPPORTED_PARAMETER`, unless its value is neutral
(`logprobs: null`, `response_format: {{"type": "text"}}`). One that nobody knows is refused with `FIELD_INVALID`: a
misspelt parameter would otherwise change the answer in silence. The names and types of a body are checked first, then
its values; each time all that is wrong is told at once.

## /v1/completions

{completion}

`prompt` is a text, token ids, or a list of either; of a list, choice `i * n + k` is sequence `k` of prompt `i`.
`max_tokens` is 16 when it is left out, or less where the model's length leaves less. `logprobs` is how many of the
likeliest tokens are told beside each, 0 to 20; with `echo`, those of the prompt are told too.

With `suffix` the model fills in what is between `prompt`, a text, and it, with the tokens that its tokenizer has for
this: those of Qwen2.5-Coder and Qwen3-Coder, CodeGemma, Granite, StarCoder, SantaCoder, Code Llama, DeepSeek-Coder and
Codestral are known. Such a token also ends the answer, and is its `stop_reason`. A model without them, `echo` and
`truncate_prompt_tokens` are refused beside it.

## /v1/chat/completions

{chat}

Messages have the roles `system`, `developer` (which the chat template gets as `system`), `user`, `assistant` and
`tool`, and a text, whole or in parts. The model's chat template makes a prompt of them, in
[an order of roles that it takes](../guides/agents.md#system-messages-behind-others); `chat_template_kwargs`,
`documents` and `reasoning_effort` are its variables; `"none"` sets `enable_thinking` to false, too. Without
`max_tokens` or `max_completion_tokens` an answer may be as long as the model allows. The `bytes` of the tokens in
`logprobs` together are the text, but for what a stop cuts off; they are null for a special token, which is not in it.
`prompt_cache_breakpoint` of a part, and `description` and `strict` of a `json_schema`, which is always kept, have no
effect. Tools are functions: calls, tools and choices of
other types are refused by name, and so is the role `function`.

`tools`, the calls of tools in the assistant's messages and the messages of tools go through the chat template, in the
form that `transformers` gives them. Calls that the model makes come as `tool_calls`, and what it thinks as
`reasoning_content` and `reasoning`, where it is known how it writes them ([the guide](../guides/tools.md)); else they
are in the answer's text, and `warnings` says so. `tool_choice` is `auto`, `required`, a tool's name,
`allowed_tools`, with which all are shown and those alone are called, or `none`, with which the template is told of no
tools.

With `continue_final_message` the answer goes on with the last message instead of beginning one of its own; with `echo`
it begins with the text of that message.

## /tokenize and /detokenize

vLLM's: `/tokenize` takes a `prompt` (and `add_special_tokens`) or a whole body of `/v1/chat/completions`,
`/v1/responses`, or, with the header `anthropic-version`, of `/v1/messages`, whatever else that asks for. It answers
`tokens`, their `count`, the model's `max_model_len`, and with `return_token_strs` the vocabulary's spelling of each.
`/detokenize` takes `tokens` and answers their text as `prompt`, special tokens too.

## Beyond OpenAI

- `truncate_prompt_tokens`: only the last so many tokens of the prompt are used; `-1`: as many as leave room for
  `max_tokens`.
- `stream_options: {{"include_usage": true, "continuous_usage_stats": true}}`: every chunk tells what the call cost so
  far.
- `return_tokens_as_token_ids`: `logprobs` name tokens `token_id:17`, since two tokens may have one text.
- `prompt_logprobs` (0 to 20): how likely each token of the prompt was, by id as vLLM tells it: in each choice of a
  completion, once in a chat, and in a stream before the first text.
- `thinking_token_budget`: the most tokens of reasoning ([how](../guides/tools.md)); `-1`: no limit.
- `predicted_token_ids`, our own, and in chats OpenAI's `prediction`, a text: what the answer may repeat in part, for
  example a file that it edits. Its tokens come sooner where workers draft (`--speculation`), and no answer changes. At
  most as many tokens as the model's length are read of a text. `usage.completion_tokens_details` has
  `accepted_prediction_tokens` and `rejected_prediction_tokens` where a request has one of them: the drafts that it says
  and that were right, and wrong. They count work, and depend on the load; both are 0 where workers do not draft.
- `speculation`, our own: `false` lets no worker draft for the request. No answer changes, only its time.
- `use_beam_search`: beam search instead of sampling. `best_of` is its width (default `n`), `n` of its answers are
  returned, each with its `score`; `length_penalty` and `early_stopping` (`false`, `true`, `"never"`) are those of
  transformers. Temperature, `top_p`, `top_k`, `min_p` and `seed` have no effect on it. Without it, `best_of` has to
  equal `n`.
- `cache_salt`, as vLLM has it: only requests with the same salt and of the same tenant find each other's prompts in the
  [prefix cache](../guides/security.md#the-prefix-cache).
- `max_queue_time`: seconds that a request may wait for its first step; then it fails with `QUEUE_DEADLINE`.
- `on_disconnect`: `"abort"` (the default) or `"keep"`: what a lost connection means for the request.
- `on_update`: `"continue"` (the default) or `"fail"`: whether an answer that has begun may go on with other weights.

## Answers

`id` and the header `x-request-id`, which errors have too, are the request's id: yours if you gave a `request_id`. Under
this name it can be cancelled over gRPC and found in the logs. Several prompts of one call are requests of their own,
`id-0`, `id-1` and so on. `system_fingerprint` is the model's determinism id: two answers under one fingerprint, to
equal requests with one `seed`, are equal bit for bit where the model is batch-invariant; that of an adapter has a part
of the digest of its content behind it. `stop_reason` is the stop string or stop token that ended a choice, and null for
the model's own end. With `return_token_ids` an answer has `token_ids` and `prompt_token_ids` as well.

`warnings`, a list of sentences, is there where something was not done as asked: in a stream in its last chunk. Over
gRPC it is a field of `Accepted`. With `tools`, it says that calls are not parsed; with `--clamp-max-tokens`, what
became of a `max_tokens` that does not fit behind its prompt. Without that setting such a request is refused.

A request is aborted when its client closes the connection, streamed or not. Errors are those of the [table](errors.md);
a stream that fails ends with its error, and never with `[DONE]`.
"""


def openai_page() -> str:
    """The parameters of the OpenAI API."""
    return OPENAI.format(note=NOTE, completion=_parameters(CompletionBody), chat=_parameters(ChatBody))


PAGES = {
    "errors.md": errors_page,
    "messages.md": lambda: messages_page(NOTE, MEANINGS),
    "configuration.md": lambda: settings_page(NOTE),
    "dashboard.json": dashboard,
    # Kustomize reads nothing outside of its folder.
    "../../k8s/components/monitoring/dashboard.json": dashboard,
    "../../k8s/components/monitoring/alerts.yaml": lambda: prometheus_rule((HERE / "../guides/watch.md").read_text()),
    "metrics.md": lambda: metrics_page(NOTE),
    "models.md": lambda: models_page(NOTE),
    "openai.md": openai_page,
    "agents.md": lambda: agents_page(NOTE, _parameters, _working),
    "protos.md": lambda: protos_page(NOTE),
}


if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
