"""One line an event, for people and for machines."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

import grpc
import pytest

from blockyard.telemetry import EventLogger, configure_logging
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

log = EventLogger("blockyard.test")


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


Captured = pytest.CaptureFixture[str]


def test_text_is_one_line_with_its_fields(capsys: Captured) -> None:
    configure_logging("gateway")
    log.info("request accepted", request_id="r-1", num_tokens=3)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} I gateway   request accepted request_id=r-1 num_tokens=3\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [("a\nb", r'"a\nb"'), ("a b", '"a b"'), ("a=b", '"a=b"'), ("", '""'), ("é", "é"), (1.5, "1.5"), (False, "False")],
)
def test_a_value_cannot_break_the_line(capsys: Captured, value: object, told: str) -> None:
    configure_logging("gateway")
    log.warning("odd", value=value)
    assert capsys.readouterr().err.endswith(f" odd value={told}\n")


def test_what_grpc_says_of_its_peers_is_left_out(capsys: Captured) -> None:
    configure_logging("scheduler")
    assert grpc._common.deserialize(b"\xff", worker_pb2.ExecuteModelResponse.FromString) is None  # type: ignore[attr-defined]
    of_core = logging.getLogger("grpc._cython.cygrpc")
    of_core.error("ExecuteBatchError raised in core by servicer method [/a.B/C]")
    assert capsys.readouterr().err == ""
    of_core.error("Unexpected [KeyError] raised by servicer method [/a.B/C]")
    assert "KeyError" in capsys.readouterr().err


def test_json_is_one_object_a_line(capsys: Captured) -> None:
    configure_logging("worker", log_format="json")
    log.error("a step failed", step_id=7, path=re.compile("x"))
    event = json.loads(capsys.readouterr().err)
    assert {"level": "error", "service": "worker", "message": "a step failed", "step_id": 7}.items() <= event.items()
    assert event["logger"] == "blockyard.test"
    assert "T" in event["time"]


def test_a_field_called_as_ours_hides_nothing(capsys: Captured) -> None:
    configure_logging("worker", log_format="json")
    log.info("not ready", message="no worker", level=3)
    event = json.loads(capsys.readouterr().err)
    assert (event["message"], event["message_"], event["level"], event["level_"]) == (
        "not ready",
        "no worker",
        "info",
        3,
    )


def test_levels(capsys: Captured) -> None:
    configure_logging("worker", level="warning")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    logging.getLogger("somebody.else").info("no")
    logging.getLogger("somebody.else").warning("theirs")
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == ["yes", "theirs"]
    configure_logging("worker", level="debug")
    log.debug("now")
    assert "now" in capsys.readouterr().err


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_exception_brings_its_stack(capsys: Captured, log_format: str) -> None:
    configure_logging("worker", log_format=log_format)
    try:
        raise ValueError("deep")
    except ValueError:
        log.exception("it broke", step_id=1)
    written = capsys.readouterr().err
    assert "ValueError: deep" in written
    assert "test_telemetry.py" in written
