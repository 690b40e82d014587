"""Holds a grammar in llguidance's kind of Lark while it is written, rule by rule.

start: (begin thought)? answer
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.grammars.expressions import quote

if TYPE_CHECKING:
    from gateway.dialects.dialect import Speech

_SPACE = r"/[\n ]{0,2}/"


class Grammar:
    """One text for llguidance."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._rules: list[str] = []

    @property
    def text(self) -> str:
        """The whole."""
        return "\n".join(self._rules)

    @property
    def before_text(self) -> str:
        """What stands for that which goes before a text."""
        return self.literal(self._speech.dialect.before_text)

    def is_special(self, text: str) -> bool:
        """Returns whether a text begins with a special token."""
        return text.startswith(tuple(self._speech.special_ids))

    def add(self, name: str, expression: str) -> str:
        """Adds a rule, and returns its name."""
        self._rules.append(f"{name}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """Returns what stands for a text in which special tokens may be."""
        written: list[str] = []
        special = sorted((each for each in self._speech.special_ids if each in text), key=len, reverse=True)
        while text:
            found = [(text.find(each), each) for each in special if each in text]
            place, token = min(found, key=lambda each: (each[0], -len(each[1]))) if found else (len(text), "")
            written += [quote(text[:place])] if place else []
            written += [f"<[{self._speech.special_ids[token]}]>"] if token else []
            text = text[place + len(token) :]
        return " ".join(written)

    def until(self, name: str, end: str, length: tuple[int, int | None] = (0, None)) -> str:
        """Adds a rule for any text, of a least and a largest length, and the end that follows it; returns its name."""
        least, most = length
        places = [end.find(each) for each in self._speech.special_ids if each in end]
        if not places:
            self._rules.append(f"{name}[suffix={quote(end)}]: /(?s:.{{{least},{'' if most is None else most}}})/")
            return name
        # What stands before the token is a part of the text: no grammar could tell them apart.
        place = min(places)
        least, most = least + place, "" if most is None else most + place
        self._rules.append(f"{name.upper()}_TEXT: /(?s:.{{{max(least, 1)},{most}}})/")
        return self.add(name, f"{name.upper()}_TEXT{'' if least else '?'} {self.literal(end[place:])}")

    def thought(self) -> str:
        """Adds what may be thought before anything is said, and returns what stands for it."""
        reasoning = self._speech.dialect.reasoning
        if reasoning is None or not self._speech.may_think:
            return ""
        behind = self.literal(self._speech.dialect.behind_reasoning) or _SPACE
        thought = f"{self.until('thought', reasoning.ends[0])} {behind}"
        if self._speech.reasoning_is_open:
            return f"{thought} "
        return f"({self.literal(reasoning.begins[0])} {thought})? "
