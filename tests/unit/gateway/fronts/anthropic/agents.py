"""Bodies as coding agents send them, written by hand."""

from __future__ import annotations

from typing import Any

# A turn in the middle of a task.
CODING_AGENT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1.0,
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.9.ab3; cc_entrypoint=cli; cch=1f2e3;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "The directory is /src.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}},
            "eager_input_streaming": True,
        },
        {"name": "Bash", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "Fix the test.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A file first.", "signature": ""},
                {"type": "text", "text": "I look.", "citations": None},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "Read",
                    "input": {"file_path": "/src/a.py", "limit": 5},
                    "caller": {"type": "direct"},
                },
                {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1\tdef f():"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "ls: not found"}],
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}

# A short question beside the task, whose answer is begun for the model.
TITLE_OF_AGENT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 512,
    "system": "Find a title. Answer with JSON.",
    "messages": [{"role": "user", "content": "Fix the test."}, {"role": "assistant", "content": "{"}],
}
