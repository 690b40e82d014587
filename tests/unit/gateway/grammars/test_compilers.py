"""A grammar is compiled in a process of its own, which it can end, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLTokenizer

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import MAX_CHECK_SECONDS, MAX_GRAMMAR_BYTES, MAX_REQUEST_SECONDS
from gateway.grammars.compiling import compilers as module
from gateway.grammars.compiling.compiler_process import complain
from gateway.grammars.compiling.compilers import NUM_COMPILERS, Compilers
from gateway.grammars.compiling.lark_tokens import without_specials
from gateway.grammars.problems import reason_of, schema_text

if TYPE_CHECKING:
    from collections.abc import Iterator

FINE = 'start: "a"'
MULTIPLES = [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23)]
ENDLESS = schema_text({"type": "integer", "allOf": MULTIPLES})
LARGE = schema_text({"type": "integer", "multipleOf": 99991})
BYTES = LLTokenizer("byte")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    """Compilers with one process."""
    monkeypatch.setattr(module, "NUM_COMPILERS", 1)
    made = Compilers()
    yield made
    made.close()


def children() -> set[int]:
    """The processes of this one that compile."""
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "compiler_process"], capture_output=True, text=True, check=False
    )
    return set(map(int, listed.stdout.split()))


def test_work_is_bounded_and_the_next_one_is_served(own: Compilers) -> None:
    checks = own.begin()
    complaint = checks.complain(ENDLESS)
    assert "processor time" in complaint
    assert reason_of(complaint) is Reason.GRAMMAR_TOO_COMPLEX
    assert checks.complain(FINE) == ""
    assert own.begin().complain("start: (")
    # What is known costs nothing.
    assert own.begin().complain(ENDLESS) == checks.complain(ENDLESS)


def test_memory_is_bounded(own: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHECK_BYTES", 16 * 1024 * 1024)
    _, complaint = own.ask(LARGE, 60)
    assert "MiB" in complaint
    assert reason_of(complaint) is Reason.GRAMMAR_TOO_COMPLEX
    assert own.begin().complain(FINE) == ""


def test_one_request_has_so_much_for_all_its_checks(own: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def ask(text: str, seconds: float) -> tuple[float, str]:
        asked.append(seconds)
        return 0.75, ""

    monkeypatch.setattr(own, "ask", ask)
    checks = own.begin()
    complaints = [checks.complain(f'start: "{place}"') for place in range(4)]
    # What asks takes its part of it, too.
    assert asked == [MAX_CHECK_SECONDS, MAX_CHECK_SECONDS, pytest.approx(MAX_REQUEST_SECONDS - 1.5, abs=0.1)]
    assert asked[-1] < MAX_REQUEST_SECONDS - 1.5
    assert complaints[:3] == ["", "", ""]
    assert reason_of(complaints[3]) is Reason.GRAMMAR_TOO_COMPLEX
    assert own.find('start: "3"') is None


def test_a_process_that_is_killed_is_replaced(own: Compilers) -> None:
    before = children()
    assert own.begin().complain('start: "b"') == ""
    [process] = children() - before
    os.kill(process, signal.SIGKILL)
    assert own.begin().complain('start: "c"') == ""
    assert len(children() - before) == 1
    assert process not in children()


def test_it_ends_with_those_who_made_it(own: Compilers) -> None:
    before = children()
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(own.ask, ENDLESS, 600.0)
        while not children() - before:
            time.sleep(0.01)
        own.close()
        with pytest.raises(BlockyardError) as raised:
            asked.result(30)
    assert raised.value.reason is Reason.DRAINING
    assert children() == before


def test_it_ends_with_its_input() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.grammars.compiling.compiler_process", "100000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_several_are_compiled_at_once(compilers: Compilers) -> None:
    with ThreadPoolExecutor(NUM_COMPILERS * 2) as executor:
        found = executor.map(lambda place: compilers.begin().complain(f'start: "{place}"'), range(40))
        assert not any(found)


def test_what_is_no_text_or_too_large_is_not_sent(own: Compilers) -> None:
    checks = own.begin()
    assert "surrogate" in checks.complain("start: \ud800")
    assert reason_of(checks.complain("x" * (MAX_GRAMMAR_BYTES + 1))) is Reason.GRAMMAR_TOO_COMPLEX


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('start: "a" <|no_such|> <[151000]> "b"', ""),
        ("start: <[1]> (", "Expected"),
        (f'start: %json {{"type": "integer", "multipleOf": 99991, "minimum": 3, "maximum": {10**15}}} <|x|>', "fuel"),
        ('start: "a" %json [', "json"),
        (json.dumps({"grammars": [{"lark_grammar": "start: <|x|>"}]}), ""),
        ('start: %json {"$ref": "#"}', "no finite text"),
        ('start: rest\nrest: rest "x"', "no finite text"),
        ("start: /[^\\s\\S]/", "no finite text"),
        ('start: ("a" | "b" rest)\nrest: rest "x"', ""),
        *((f"start: {end}", "") for end in ('""', '" "', "<|x|>", '<[9]> "a"', "<[*]>")),
    ],
)
def test_only_what_does_not_depend_on_tokens_is_told(text: str, says: str) -> None:
    complaint = complain(BYTES, text)
    assert (says in complaint) if says else not complaint


def test_special_tokens_are_replaced_where_they_are_some() -> None:
    text = 'start: <|a|> "<|b|>" /(?<c>x)/ %json {"const": "<|d|>"} <[7]> // <|e|>\n'
    assert without_specials(text, "<S>") == text.replace("<|a|>", "<S>").replace("<[7]>", "<S>")
    odd: list[Any] = ["", "a", '"', "/", "<", "start: %"]
    assert [without_specials(each, "<S>") for each in odd] == odd
