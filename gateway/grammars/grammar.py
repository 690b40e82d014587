"""Collects a grammar in llguidance's variant of Lark, rule by rule.

start: (begin thought)? answer
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blockyard.errors import Reason, Violation, invalid
from blockyard.grammars.limits import MAX_GRAMMAR_BYTES
from gateway.grammars.expressions import quote

if TYPE_CHECKING:
    from gateway.dialects.dialect import AnswerContext

_SPACE = r"/[\n ]{0,2}/"


def pattern_of(text: str) -> str:
    """Returns a regular expression in Lark that matches exactly this text."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


class Grammar:
    """Collects the rules of one grammar for llguidance."""

    def __init__(self, context: AnswerContext, field: str) -> None:
        """`field`: the field of the request to name in errors."""
        self._context = context
        self._field = field
        self._rules: list[str] = []
        self._size = 0

    @property
    def text(self) -> str:
        return "\n".join(self._rules)

    @property
    def before_text(self) -> str:
        """The expression for the markers that the dialect writes before a text."""
        return self.literal(self._context.dialect.before_text)

    def is_special(self, text: str) -> bool:
        return text.startswith(tuple(self._context.special_ids))

    def add(self, name: str, expression: str) -> str:
        """Adds a rule and returns its name; raises BlockyardError GRAMMAR_TOO_COMPLEX if the grammar gets too large."""
        self._append(f"{name}: {expression}")
        return name

    def _append(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > MAX_GRAMMAR_BYTES:
            # Each argument between tags repeats the schema's definitions: tools of 16 MiB would make gigabytes.
            description = f"too large: the grammar made of it has more than {MAX_GRAMMAR_BYTES} bytes"
            raise invalid([Violation(self._field, description, Reason.GRAMMAR_TOO_COMPLEX)])
        self._rules.append(rule)

    def literal(self, text: str) -> str:
        """Returns the expression for a text that may contain special tokens."""
        written: list[str] = []
        special = sorted((each for each in self._context.special_ids if each in text), key=len, reverse=True)
        while text:
            found = [(text.find(each), each) for each in special if each in text]
            place, token = min(found, key=lambda each: (each[0], -len(each[1]))) if found else (len(text), "")
            written += [quote(text[:place])] if place else []
            written += [f"<[{self._context.special_ids[token]}]>"] if token else []
            text = text[place + len(token) :]
        return " ".join(written)

    def until(self, name: str, end: str, length: tuple[int, int | None] = (0, None)) -> str:
        """Adds a rule for any text followed by `end`, and returns its name.

        `length`: the least and the largest number of characters of the text; None: no limit.
        """
        least, most = length
        before, rest = self.split(end)
        if not rest:
            self._append(f"{name}[suffix={quote(end)}]: /(?s:.{{{least},{'' if most is None else most}}})/")
            return name
        # The end's characters before its special token belong to the text's lexeme: no token separates the two.
        may_be_empty = not (least or before)
        text = f"/(?s:.{{{1 if may_be_empty else least},{'' if most is None else most}}}){pattern_of(before)}/"
        self._append(f"{name.upper()}_TEXT: {text}")
        return self.add(name, f"{name.upper()}_TEXT{'?' if may_be_empty else ''} {self.literal(rest)}")

    def split(self, text: str) -> tuple[str, str]:
        """Cuts a text before its first special token; without special tokens the second part is empty."""
        place = min((text.find(each) for each in self._context.special_ids if each in text), default=len(text))
        return text[:place], text[place:]

    def thought(self) -> str:
        """Adds rules for the reasoning before the answer, and returns their expression."""
        reasoning = self._context.dialect.reasoning
        if reasoning is None or not self._context.may_think:
            return ""
        behind = self.literal(self._context.dialect.behind_reasoning) or _SPACE
        thought = f"{self.until('thought', reasoning.ends[0])} {behind}"
        if self._context.reasoning_is_open:
            return f"{thought} "
        return f"({self.literal(reasoning.begins[0])} {thought})? "
