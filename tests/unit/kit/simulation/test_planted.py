"""The planted mistakes: each fits the product as it is, and says what it does to it."""

from __future__ import annotations

import re

import pytest

from tests.kit.simulation.planted.mistakes import COPIED, Finding, Planted, applies, find_planted, write_table

PLANTED = find_planted()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_each_fits_the_product(planted: Planted) -> None:
    assert applies(planted), f"{planted.path} fits no more: make it again for the code as it is, or another instead"


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_each_says_what_is_wrong_and_changes_what_is_copied(planted: Planted) -> None:
    assert planted.sentence[0].isupper() and planted.sentence.endswith(".")
    changed = re.findall(r"^\+\+\+ b/(\S+)", planted.path.read_text(), re.MULTILINE)
    assert changed and all(path.startswith(COPIED) for path in changed)


def test_there_are_twenty() -> None:
    assert len(PLANTED) >= 20


def test_the_table_tells_which_seed_found_it() -> None:
    found, missed = Finding(PLANTED[0], 3, 4, 5.4, "a|b\nc"), Finding(PLANTED[1], None, 9, 20.0)
    _, _, first, second = write_table([found, missed])
    assert first.endswith("| 3 | 4 | 5 | `a\\|b c` |")
    assert second.endswith("| – | 9 | 20 | nothing |")
