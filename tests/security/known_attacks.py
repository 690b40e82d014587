"""Attacks on servers of language models that were published, most in 2025 and 2026, and what each gets here.

`tests/integration/test_known_attacks.py` sends the requests and reads the files. `docs/reliability/attacks.md` is
written from this table:

    python -m tests.security.known_attacks
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.security.code_attacks import CODE, REACH
from tests.security.sampling_attacks import SAMPLING
from tests.security.size_attacks import FILES, SIZES

if TYPE_CHECKING:
    from tests.security.attack import Attack

PAGE = Path(__file__).parents[2] / "docs" / "reliability" / "attacks.md"

GROUPS: dict[str, tuple[Attack, ...]] = {
    "Numbers and ids of a request": SAMPLING,
    "Code in a request": CODE,
    "Reaching elsewhere": REACH,
    "Size, depth and time": SIZES,
    "Files of a model": FILES,
}

_PAGE = """\
# Attacks on other servers

<!-- Written by python -m tests.security.known_attacks. -->

Attacks on servers of language models that were published, most of them in 2025 and 2026, replayed against this one over
every front that has the parameter. `make test` does so (`tests/integration/test_known_attacks.py`): each request is
answered or refused as the last column says, while an innocent stream runs beside it. That stream has the tokens of its
undisturbed run, every process keeps its id, and no epoch is lost. Nothing that was pickled leaves its mark.

Where a number is missing, none was found. [The threats](../../SECURITY.md), and what stands against them, are a page of
their own.
{groups}"""


def make_page() -> str:
    groups = ""
    for title, attacks in GROUPS.items():
        rows = "\n".join(
            f"| {each.name} | {', '.join(each.numbers) or 'no number'} | {each.server} | {each.there} | {each.here} |"
            for each in attacks
        )
        groups += f"\n## {title}\n\n| attack | number | server | what it did there | what it gets here |\n"
        groups += f"|---|---|---|---|---|\n{rows}\n"
    return _PAGE.format(groups=groups)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
