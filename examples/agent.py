"""An agent by OpenAI's own client: a loop in which the model calls a tool, and an answer parsed into a pydantic model.

Needs a gateway whose model can call tools (`blockyard serve MODEL`): python examples/agent.py [URL [TOOL_CHOICE]]

The demo model calls none by itself. It can be made to: `blockyard serve --chat-template examples/tools.jinja`, and
`required` as TOOL_CHOICE, which is that of the first turn.
"""

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

MAX_TURNS = 4
TEMPERATURES = {"Oslo": 4, "Lima": 19}


def temperature(city: str) -> str:
    """Tells how warm it is in a city, in degrees Celsius."""
    return f"{TEMPERATURES[city]} °C" if city in TEMPERATURES else f"{city} is not known"


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": temperature.__doc__,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(TEMPERATURES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Clothes(BaseModel):
    """What to wear."""

    coat: Literal["none", "thin", "thick"]
    layers: int = Field(ge=1, le=4)


def run(client: openai.OpenAI, model: str, question: str, tool_choice: Any) -> list[Any]:
    """Asks, and runs the tools that the model calls, until it calls none; returns the conversation."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[TOOL],
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            max_completion_tokens=200,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        if not calls:
            break
        for call in calls:
            print(f"calls {call.function.name}({call.function.arguments})")
            result = temperature(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "auto"
    return messages


def main() -> None:
    """Runs the loop, then asks for a conclusion of a fixed form."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    tool_choice = sys.argv[2] if len(sys.argv) > 2 else "auto"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = next(iter(client.models.list())).id
        messages = run(client, model, "How warm is it in Oslo?", tool_choice)
        print(f"says {messages[-1].get('content')!r}")

        messages.append({"role": "user", "content": "What should I wear?"})
        parsed = client.chat.completions.parse(
            model=model, messages=messages, response_format=Clothes, max_completion_tokens=200
        )
        print(f"parsed {parsed.choices[0].message.parsed!r}")


if __name__ == "__main__":
    main()
