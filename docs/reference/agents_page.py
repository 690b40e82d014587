"""Makes the page of the Messages and the Responses API: what works, what has no effect, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

AGENTS = """\
# The Messages and the Responses API
{note}

Two APIs that agents speak, on the HTTP port beside [the OpenAI API](openai.md): [how to point an agent
here](../guides/agents.md). What that page says of bodies, limits, tenants and keys holds here too. A parameter, a tool,
a block or an item that an API knows and that is not served is refused with `UNSUPPORTED_PARAMETER` by its name; one
that nobody knows with `FIELD_INVALID`.

## /v1/messages, /v1/messages/count_tokens

{messages}

- Blocks are `text`, `thinking`, `redacted_thinking` (left out: nobody can read it here), `tool_use` and `tool_result`.
  The first line of a system text is left out if it begins with `x-anthropic-billing-header:`: it is for a provider, and
  it changes with every request, so that no prefix would be found in the cache.
- `system` is a system message before the others. What becomes of system messages in places where the model's chat
  template takes none: [the guide](../guides/agents.md#system-messages-behind-others).
- `thinking` sets the template's `enable_thinking`, `output_config.effort` its `reasoning_effort`. What the model thinks
  comes in `thinking` blocks, whose `signature` is empty; with `display: "omitted"` they are empty.
  `budget_tokens` is [the most tokens of it](../guides/tools.md); any number is taken. `cache_control` is taken without
  effect: the prefix cache works by itself, and `cache_read_input_tokens` says how much it found.
- `is_error` of a `tool_result` and `eager_input_streaming` of a tool are taken without effect: the text of an error
  says so, and arguments always come as they are written. `display` of `thinking` and `output_config.format` do not
  change what `count_tokens` counts.
- `output_config.format` is a JSON schema that the answer keeps to.
- An answer goes on with a final message of the assistant.
- `max_tokens` gives way where the model's length leaves less; an answer that ends there has the `stop_reason`
  `model_context_window_exceeded`. The others are `end_turn`, `max_tokens`, `stop_sequence` and `tool_use`.
- `tool_use.input` is an object: arguments that are no JSON object, as of a call that was cut off, are an empty one. In
  a stream they come as the model writes them.
- Errors have Anthropic's form, `{{"type": "error", "error": {{"type", "message"}}}}`, with our `reason` and
  `violations`, which name the block that they are about. A message on a prompt that is too long begins with
  `prompt is too long`, by which agents know to shorten it.
- `anthropic-beta` and the value of `anthropic-version` are not read. `HEAD /` is answered with 200.

`/v1/messages/count_tokens` takes the parameters of the prompt: {count}.

`GET /v1/models` and `GET /v1/models/ID` answer in Anthropic's form, all on one page, where the call has the header
`anthropic-version`, which Anthropic's clients send.

## /v1/responses, /v1/responses/input_tokens

{responses}

- `input` is a text or items: messages, `function_call`, `function_call_output` and `reasoning`. The consecutive items
  of an answer become one message of the assistant; `instructions` are a system message before them.
- Nothing is stored: `store: true`, `previous_response_id` and `conversation` are refused. Send the earlier items again:
  the prefix cache has them.
- Tools are functions, and namespaces of them. The model is shown a function of a namespace as `namespace__name`, the
  namespace's description before its own; a `function_call` has `name` and `namespace` apart, in an answer and in
  `input`. Two functions that the model would know by one name are refused. A `tool_choice` has a function's own name,
  or `namespace__name` where several have that.
- `text.format` is `text`, `json_object` or `json_schema`, which is kept strictly. `reasoning.effort` is the template's
  `reasoning_effort`; `none` sets `enable_thinking` to false, too.
- Of items `id`, `status`, `phase`, `logprobs`, `encrypted_content`, `prompt_cache_breakpoint` and the `name` and
  `namespace` of a `function_call_output` are taken without effect; so are `output_schema` of a tool, `summary` and
  `generate_summary` of `reasoning` (all of it is told), and `description` and `strict` of a form.
- `include` takes `message.output_text.logprobs`, of which `top_logprobs` says how many, and
  `reasoning.encrypted_content`: reasoning is not encrypted here, but told in `content`.
- `usage.output_tokens_details.reasoning_tokens` is how many tokens the text of the reasoning has by itself.
- `background: true` answers at once. The response runs on without its client, and can be had at any gateway as long as
  it runs and for `--resume-window-seconds` after: `GET /v1/responses/{{id}}` returns it, with `stream=true` it is
  streamed, `starting_after=N` leaves out the events up to the sequence number N, and
  `POST /v1/responses/{{id}}/cancel` cancels it and returns what has come, for the last time: one that was cancelled is
  not kept.
- `sequence_number` grows with every event, by the number of its characters where it is a piece of a text: so it is the
  same for every reader ([why](../adr/0032-sequence-numbers-count-characters.md)).
- Errors are those of the OpenAI API; a violation names the item of `input` or the tool that it is about. A stream ends
  with `response.completed`, `response.incomplete` (`max_output_tokens`) or `response.failed`.

`/v1/responses/input_tokens` counts the tokens of a prompt. It takes its parameters: {input_tokens}.
"""


def agents_page(
    note: str, parameters: Callable[[type[BaseModel]], str], working: Callable[[type[BaseModel]], str]
) -> str:
    """Returns the page. `parameters`: describes those of a body; `working`: names those that do something."""
    return AGENTS.format(
        note=note,
        messages=parameters(MessagesBody),
        count=working(CountBody),
        responses=parameters(ResponseBody),
        input_tokens=working(InputTokensBody),
    )
