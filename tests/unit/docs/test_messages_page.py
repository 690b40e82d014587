"""The page of messages has every message of the code, and each reads like a sentence."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text(encoding="utf-8")

# Words that come from elsewhere, by the function that passes them on: a server, pydantic, llguidance, another error.
FROM_ELSEWHERE = {
    ("from_status", "status.message[:MAX_STATUS_BYTES]"),
    ("_make_error", "content_error.get('message', f'HTTP {status}')"),
    ("_violation", "message"),
    ("_refusal", "complaint"),
    ("_give", "message"),
    ("main", "problem"),
    # The problems of all settings, each of which is on the page.
    ("_build", r"'\n'.join(problems)"),
    # The rest of their calls are resolved: one passes a caught error on.
    ("unusable", "message"),
    ("__init__", "message"),
}
RIDDLES = re.compile(r"(?:it|its|that|those|these|they|them|what|who|whom|whose|whoever|nobody|of)\b", re.IGNORECASE)


@pytest.fixture(scope="module", name="pages")
def makes_pages() -> dict[str, Any]:
    """The pages that are made from the code, by their names."""
    return runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))["PAGES"]


@pytest.fixture(scope="module", name="reader")
def reads_the_code(pages: dict[str, Any]) -> Any:
    """The module that reads messages, for the page as well: it reads the code once."""
    return sys.modules["messages_page"]


def test_it_is_current(pages: dict[str, Any]) -> None:
    assert pages["messages.md"]() == PAGE, "run: python docs/reference/generate.py"


def test_the_words_of_every_call_are_found(reader: Any) -> None:
    found = reader.find_messages(ROOT)
    assert len(found.messages) > 900
    unresolved = {(function, text): f"{module}:{line}" for module, line, function, text in found.unresolved}
    assert {place for key, place in unresolved.items() if key not in FROM_ELSEWHERE} == set()
    assert FROM_ELSEWHERE - set(unresolved) == set(), "an exception that nothing needs"


def test_no_message_begins_with_a_pronoun_that_names_nothing(reader: Any) -> None:
    assert [message for message in reader.find_messages(ROOT).messages if RIDDLES.match(message.text)] == []


def test_a_group_has_its_reason_and_what_helps() -> None:
    groups = re.findall(r"^## (.+)\n\n(.+)$", PAGE, re.MULTILINE)
    assert len(groups) > 30
    assert [title for title, head in groups if "**What helps:**" not in head] == []


# One of each form that the code has: where its words stand.
KNOWN = [
    ("a number of the module", r"`stop\.stop_strings` \| must have at most 16 entries"),
    ("an instance of a dataclass", r"`sampling\.top_p` \| must be .*, not \{value\} "),
    ("a helper that is given the words", r"\| the pooled values are not finite numbers: "),
    ("a local variable", r"\| request_id \{request_id\} belongs to another request: choose another id \|"),
    ("a generator of pairs", r"`num_beam_candidates` \| "),
    ("a table of reasons and words", r"\| too many requests wait \(--max-waiting-requests\): try again \|"),
    ("an exception at the start", r"\| --tls-certificate and --tls-key go together \|"),
    ("a body over HTTP", r"\| should be true, false or 'never' \|"),
]


@pytest.mark.parametrize("words", [words for _, words in KNOWN])
def test_words_are_followed_to_where_they_stand(words: str) -> None:
    assert re.search(words, PAGE)
