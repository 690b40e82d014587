"""The guide to the logs names events that are written, and the guide to traces spans that are made."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICES = ("gateway", "scheduler_service", "worker_service", "blockyard")
SOURCE = "\n".join(path.read_text() for service in SERVICES for path in (ROOT / service).rglob("*.py"))
LOGS = (ROOT / "docs" / "guides" / "logs.md").read_text()
TRACES = (ROOT / "docs" / "guides" / "tracing.md").read_text()
MAKERS = r"(?:begin_span|begin_server_span|begin_root_span|_add_step_span|spans\.step)"
SPANS = {*re.findall(MAKERS + r'\(\s*"([^"]+)"', SOURCE), "queue", "prefill", "decode"}


def is_written(event: str) -> bool:
    """Whether the code has it in quotes, or puts it together of a phase's name."""
    return f'"{event}"' in SOURCE or event in ("request leaves queue", "request leaves prefill")


def test_events_that_are_named_are_written() -> None:
    named = re.findall(r"`((?:request|first|sequence|requests|a step|a handler|nothing)\b[^`]* [^`]+)`", LOGS)
    assert len(named) >= 15
    assert [event for event in named if not is_written(event)] == []


def test_lines_that_are_shown_begin_with_an_event_and_have_its_fields() -> None:
    shown = re.findall(r"^    (?:[\d:.]+ )?[WI] (?:gateway +)?([a-z ]+?) (\w+)=", LOGS, re.MULTILINE)
    assert len(shown) >= 7
    for event, field in shown:
        assert is_written(event), event
        assert re.search(rf"\b{field}=", SOURCE) or f'"{field}"' in SOURCE, field


def test_spans_that_are_named_are_made() -> None:
    table = re.findall(r"^\|[^|]*\| `([^`]+)` \|", TRACES, re.MULTILINE)
    assert len(table) == 15
    assert set(table) <= SPANS
    assert SPANS - set(table) == {"decode step"}
