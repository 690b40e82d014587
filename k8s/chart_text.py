"""Writes objects that differ between cases as one template of Helm, with conditions where they differ.

A case is one overlay of the chart alone, or with one component. The text for several components follows from those for
each: what a component adds is there if it is on, and what it removes is there if it is off.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import yaml

from k8s.chart_values import VALUES, Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Case = tuple[str, str]
"""An overlay of the chart, and the one component that is added to it, or ""."""
Nodes = dict[Case, Any]
"""The value at one address, by the cases that have one."""
Chain = list[tuple[str, list[str]]]
"""Conditions and the lines of each: the first that holds counts, and "" always holds."""


class Expression(str):
    """Helm's text in place of a scalar."""

    __slots__ = ()


class Conditions:
    """Helm's expressions for sets of cases."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = {*cases}
        self._shapes = [*dict.fromkeys(shape for shape, _ in cases)]
        self._options = [*dict.fromkeys(option for _, option in cases if option)]

    def of(self, present: Iterable[Case], domain: Iterable[Case]) -> str:
        """The expression for "the case is one of `present`", where it is one of `domain`; "" where that is certain."""
        present, domain = {*present}, {*domain}
        if present == domain:
            return ""
        shapes = [shape for shape in self._shapes if any(name == shape for name, _ in domain)]
        there, changing = dict[str, bool](), dict[str, set[str]]()
        for shape in shapes:
            known, having = ({option for name, option in those if name == shape} for those in (domain, present))
            there[shape] = "" in having
            changing[shape] = known - having if there[shape] else having
        groups = dict[tuple[bool, tuple[str, ...]], list[str]]()
        for shape in shapes:
            alike = set[str]().union(*(changing[name] for name in shapes if there[name] == there[shape]))
            # A component that does not go with this overlay changes nothing there, so the condition may name it or not.
            told = changing[shape] | {option for option in alike if (shape, option) not in self._cases}
            key = there[shape], tuple(option for option in self._options if option in told)
            groups.setdefault(key, []).append(shape)
        alternatives = [
            [*self.overlays(those, shapes), *_components(is_there, options)]
            for (is_there, options), those in groups.items()
            if is_there or options
        ]
        return "" if [] in alternatives else joined("or", [joined("and", terms) for terms in alternatives])

    def overlays(self, those: list[str], among: list[str]) -> list[str]:
        """The terms for "the overlay is one of those", where it is among some."""
        others = [shape for shape in among if shape not in those]
        if len(others) == 1 < len(those):
            return [f'ne .Values.overlay "{others[0]}"']
        return [" ".join(["eq .Values.overlay", *map(json.dumps, those)])] if others else []


def _components(is_there: bool, options: tuple[str, ...]) -> list[str]:
    if not options:
        return []
    named = joined("or", [f".Values.components.{name}" for name in options])
    return [f"not {_bracketed(named)}" if is_there else named]


def joined(word: str, terms: list[str]) -> str:
    """Terms as one."""
    return terms[0] if len(terms) == 1 else " ".join([word, *map(_bracketed, terms)])


def _bracketed(term: str) -> str:
    return f"({term})" if " " in term else term


def conditional(chain: Chain, indent: str = "") -> list[str]:
    """The lines of a chain."""
    if not chain[0][0]:
        return chain[0][1]
    out = list[str]()
    for i, (told, lines) in enumerate(chain):
        word = f"if {told}" if not i else f"else if {told}" if told else "else"
        out += [f"{indent}{{{{- {word} }}}}", *lines]
    return [*out, f"{indent}{{{{- end }}}}"]


def grouped(entries: Chain, indent: str = "") -> list[str]:
    """The lines of all entries, with one condition around those that follow each other and have the same."""
    out = list[str]()
    for told, those in itertools.groupby(entries, lambda entry: entry[0]):
        out += conditional([(told, [line for _, lines in those for line in lines])], indent)
    return out


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class Writer:
    """Writes the text of an address for all cases. `blocks`: those that the texts include, by their names."""

    def __init__(self, conditions: Conditions, block_at: Callable[[Address, Any], tuple[str, str] | None]) -> None:
        self._conditions = conditions
        self._block_at = block_at
        self.blocks: dict[str, tuple[Address, Nodes]] = {}

    def entry(self, key: str, nodes: Nodes, address: Address, depth: int) -> Chain:
        """An entry of a map, or an element of a list, whose key is ""."""
        variants = dict[str, Nodes]()
        for case, node in nodes.items():
            is_filled = bool(node) and isinstance(node, dict | list)
            variants.setdefault(type(node).__name__ if is_filled else json.dumps(node), {})[case] = node
        chain, left = Chain(), set(nodes)
        # A component's goes before that of the overlay alone, and what most overlays have is the last.
        for variant in sorted(variants.values(), key=lambda variant: sum(not option for _, option in variant)):
            chain.append((self._conditions.of(variant, left), self._variant(key, variant, address, depth)))
            left -= set(variant)
        return chain

    def _variant(self, key: str, nodes: Nodes, address: Address, depth: int) -> list[str]:
        first, indent = next(iter(nodes.values())), "  " * depth
        head = f"{indent}{key}:" if key else f"{indent}-"
        if isinstance(first, Expression):
            return [f"{head} {first}"]
        if not first or not isinstance(first, dict | list):
            dumped = yaml.dump({"": first}, Dumper=_Dumper, width=10**6, allow_unicode=True).partition(":")[2]
            text, *others = dumped.rstrip("\n").replace("{{", '{{ "{{" }}').split("\n")
            return [head + text, *(indent + line if line else "" for line in others)]
        if block := self._block_at(address, first):
            name, expression = block
            self.blocks.setdefault(name, (address, {}))[1].update(nodes)
            return [head, f"{indent}  {{{{- {expression} | nindent {2 * depth + 2} }}}}"]
        inner = (self.map_lines if isinstance(first, dict) else self._list_lines)(nodes, address, depth + 1)
        if key or inner[0].lstrip().startswith("{{"):
            return [head, *inner]
        return [f"{head} {inner[0].lstrip()}", *inner[1:]]

    def map_lines(self, nodes: Nodes, address: Address, depth: int) -> list[str]:
        """The entries of a map, the name first."""
        given = {path[-1] for path in VALUES if path[:-1] == address}
        keys = sorted({*itertools.chain.from_iterable(nodes.values()), *given}, key=lambda key: (key != "name", key))
        indent, entries = "  " * depth, Chain()
        for key in keys:
            having = {case: node[key] for case, node in nodes.items() if key in node}
            place = below(address, key)
            chain = self.entry(key, having, place, depth) if having else []
            told = self._conditions.of(having, nodes) if having else ""
            is_merged = bool(having) and all(isinstance(node, dict) for node in having.values())
            if key in given and not is_merged:
                # An entry that a component removes stays away, whatever the value. A value also adds its entry to cases
                # that have none.
                is_removed = {shape for shape, option in having if not option} == {shape for shape, _ in nodes}
                if told and not is_removed:
                    chain, told = [(told, conditional(chain, indent))], ""
                value = f".Values.{VALUES[place]}"
                chain = [(f"ne {value} nil", [f"{indent}{key}: {{{{ toJson {value} }}}}"]), *chain]
            entries.append((told, conditional(chain, indent)))
        return grouped(entries, indent)

    def _list_lines(self, nodes: Nodes, address: Address, depth: int) -> list[str]:
        named = {case: {identity(element): element for element in node} for case, node in nodes.items()}
        indent, entries = "  " * depth, Chain()
        for name in _in_order(named.values()):
            having = {case: elements[name] for case, elements in named.items() if name in elements}
            lines = conditional(self.entry("", having, (*address, name), depth), indent)
            entries.append((self._conditions.of(having, nodes), lines))
        return grouped(entries, indent)


def below(address: Address, key: str) -> Address:
    """The address of an entry of a map. A workload's pods are `pod/…`, whatever the workload is."""
    if key in ("template", "workerTemplate") and len(address) > 1:
        return (f"pod/{address[0].partition('/')[2]}",)
    return (*address, key)


def identity(element: Any) -> str:
    """The key by which elements of two lists are the same: their mount path or name, or else their whole text."""
    named = element if isinstance(element, dict) else {}
    return str(named.get("mountPath") or named.get("name") or json.dumps(element, sort_keys=True))


def _in_order(lists: Iterable[Iterable[str]]) -> list[str]:
    """All that lists have, each behind what stands before it in its own list."""
    out = list[str]()
    for each in lists:
        place = 0
        for name in each:
            if name in out:
                place = out.index(name) + 1
            else:
                out.insert(place, name)
                place += 1
    return out
