"""Runs the loop of an agent with a tool that is forced, by a client of others: python agent_loops.py CLIENT URL

Writes a JSON object: the arguments that the tool was called with, and what was said in the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL, QUESTION, MAX_TOKENS = "demo", "How warm is it?", 200
CITIES = ["Oslo", "Lima"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "temperature", "description": "Tells how warm it is in a city.", "parameters": SCHEMA}
CALLED: list[str] = []


def temperature(city: str) -> str:
    CALLED.append(city)
    return "4 degrees"


def run_anthropic(url: str) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tools: Any = [{"name": "temperature", "description": FUNCTION["description"], "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    while True:
        asked: dict[str, Any] = {"messages": messages, "tools": tools, "tool_choice": choice}
        with client.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, **asked) as stream:
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        uses: list[Any] = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": temperature(**use.input)} for use in uses]
        messages.append({"role": "user", "content": results})
        choice = {"type": "none"}


def run_litellm(url: str) -> str:
    import litellm

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    choice = "required"
    while True:
        answer: Any = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{url}/v1",
            api_key="none",
            messages=messages,
            tools=[{"type": "function", "function": FUNCTION}],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            content = temperature(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        choice = "none"


def run_agents(url: str) -> str:
    """OpenAI's agents SDK, which speaks the Responses API; what it keeps of a run is an input again."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI, OpenAI

    set_tracing_disabled(True)

    @function_tool(name_override="temperature")
    def tool(city: str) -> str:
        """Tells how warm it is in a city."""
        return temperature(city)

    agent = Agent(
        name="thermometer",
        instructions="Be brief.",
        tools=[tool],
        # It takes an answer that its length ends for a failure, and this model knows no end.
        tool_use_behavior="stop_on_first_tool",
        model=OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)),
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=MAX_TOKENS
        ),
    )
    result = Runner.run_sync(agent, QUESTION, max_turns=6)
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.responses.create(model=MODEL, input=result.to_input_list(), max_output_tokens=20).output_text


RUNS = {"anthropic": run_anthropic, "litellm": run_litellm, "agents": run_agents}

if __name__ == "__main__":
    said = RUNS[sys.argv[1]](sys.argv[2])
    sys.stdout.write(json.dumps({"called": CALLED, "said": said}) + "\n")
