"""Follows expressions of text to where their words stand. Knows Python, and none of Blockyard's classes."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from messages_source import (
    MAX_ALTERNATIVES,
    MAX_CALLERS_DEEP,
    Function,
    Scope,
    Source,
    assigned,
    bind,
    combine,
    last_name,
    own_nodes,
    own_values,
    parameters_of,
    values_at,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_DEPTH = 12


def is_sentence(texts: Sequence[str] | None) -> bool:
    """Returns whether texts have words of their own."""
    return bool(texts) and any(" " in text.strip() for text in texts)


class Texts:
    """Resolves expressions of a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def of(self, node: ast.expr | None, scope: Scope, depth: int = 0) -> list[str] | None:
        """Returns what an expression may say; None: its words are not in the source."""
        if node is None or depth > MAX_DEPTH:
            return None
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return [f"{number:,}"]
            case ast.JoinedStr(values=values):
                return combine([self._part(value, scope, depth + 1) for value in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                sides = [self.of(left, scope, depth + 1), self.of(right, scope, depth + 1)]
                if not any(side and not side[0].replace(",", "").isdigit() for side in sides):
                    return None
                return combine([sides[0] or [f"{{{last_name(left)}}}"], sides[1] or [f"{{{last_name(right)}}}"]])
            case ast.BinOp():
                number = _calculated(node)
                return None if number is None else [f"{number:,}"]
            case ast.IfExp(body=first, orelse=second):
                return self._either([first, second], scope, depth)
            case ast.BoolOp(values=values):
                return [text for text in self._either(values, scope, depth) or () if text] or None
            case _:
                return self._referred(node, scope, depth)

    def _referred(self, node: ast.expr, scope: Scope, depth: int) -> list[str] | None:
        match node:
            case ast.NamedExpr(value=value):
                return self.of(value, scope, depth + 1)
            case ast.Name(id=name):
                return self._named(name, scope, depth, node.lineno if hasattr(node, "lineno") else 0)
            case ast.Call():
                return self._called(node, scope, depth)
            case ast.Attribute(value=ast.Name() as owner, attr=name):
                return self._attribute(owner, name, scope, depth)
            case ast.Subscript(value=ast.Name() as table, slice=key) if not isinstance(key, ast.Constant):
                return self._entries(table, None, scope, depth)
            case ast.Subscript(value=value, slice=ast.Constant(value=int(place))):
                return self._entries(value, place, scope, depth)
            case _:
                return None

    def _either(self, nodes: Sequence[ast.expr], scope: Scope, depth: int) -> list[str] | None:
        found = [self.of(node, scope, depth + 1) for node in nodes]
        texts = [
            text
            for node, some in zip(nodes, found, strict=True)
            for text in (some if some is not None else [f"{{{last_name(node)}}}"])
        ]
        return texts[:MAX_ALTERNATIVES] if any(some is not None for some in found) else None

    def _part(self, node: ast.expr, scope: Scope, depth: int) -> list[str]:
        if not isinstance(node, ast.FormattedValue):
            return self.of(node, scope, depth) or [""]
        texts = self.of(node.value, scope, depth)
        # One number is a limit; one of several is what a run chooses.
        is_open = not texts or (len(texts) > 1 and any(text.replace(",", "").isdigit() for text in texts))
        return [f"{{{last_name(node.value)}}}"] if is_open or not texts else texts

    def _named(self, name: str, scope: Scope, depth: int, line: int = 0) -> list[str] | None:
        if name in scope.arguments:
            node, caller = scope.arguments[name]
            return self.of(node, caller, depth + 1)
        if scope.function is not None:
            if values := values_at(scope.function, name, line):
                plain = [
                    value for value in values if getattr(value, "lineno", 0) < line or not _names_itself(value, name)
                ]
                return self._either(plain, scope, depth) if plain else None
            if (looped := self._looped(name, scope, depth)) is not None:
                return looped
            if name in parameters_of(scope.function):
                return None
        if scope.outer is not None:
            return self._named(name, scope.outer, depth)
        if name in scope.module.values:
            return self._either(scope.module.values[name], Scope(scope.module), depth)
        home = self.source.modules.get(scope.module.imports.get(name, ("", ""))[0])
        if home is not None and scope.module.imports[name][1] in home.values:
            return self._either(home.values[scope.module.imports[name][1]], Scope(home), depth)
        return None

    def _looped(self, name: str, scope: Scope, depth: int) -> list[str] | None:
        """What a name of a loop may be: an element of a list that is written, or what a generator of ours yields."""
        assert scope.function is not None
        for node in own_nodes(scope.function):
            if not isinstance(node, ast.For | ast.comprehension):
                continue
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
            if name not in names:
                continue
            texts: list[str] = []
            for element, home in self.elements(node.iter, scope, depth):
                parts = element.elts if isinstance(element, ast.Tuple) and len(names) > 1 else [element]
                if len(parts) == len(names):
                    texts += self.of(parts[names.index(name)], home, depth + 1) or []
            return texts or None
        return None

    def elements(self, node: ast.expr, scope: Scope, depth: int = 0) -> Iterator[tuple[ast.expr, Scope]]:
        """Yields the elements of something that is looped over, where they are written."""
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                for element in elements:
                    if isinstance(element, ast.Starred):
                        several = list(self.elements(element.value, scope, depth + 1))
                        yield from several or [(element.value, scope)]
                    else:
                        yield element, scope
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if key is not None:
                        yield ast.Tuple([key, value], ast.Load()), scope
            case ast.Call(func=ast.Attribute(value=ast.Name() as owner, attr="items" | "values")):
                yield from self.elements(owner, scope, depth + 1)
            case ast.Call(
                func=ast.Name(id="islice" | "chain" | "list" | "tuple" | "enumerate" | "sorted" | "map"), args=args
            ):
                for arg in args:
                    yield from self.elements(arg, scope, depth + 1)
            case ast.IfExp(body=first, orelse=second):
                yield from self.elements(first, scope, depth + 1)
                yield from self.elements(second, scope, depth + 1)
            case _:
                yield from self._elements_elsewhere(node, scope, depth)

    def _elements_elsewhere(self, node: ast.expr, scope: Scope, depth: int) -> Iterator[tuple[ast.expr, Scope]]:
        match node:
            case ast.Name(id=name) if depth < MAX_DEPTH:
                for value, home in self.values(name, scope):
                    yield from self.elements(value, home, depth + 1)
            case ast.Call() if depth < MAX_DEPTH:
                for function, home in self.source.functions_of(node, scope):
                    bound = Scope(
                        home, function, None, {key: (arg, scope) for key, arg in bind(node, function).items()}
                    )
                    yield from self.yielded(function, bound, depth + 1)
            case _:
                pass

    def yielded(self, function: Function, scope: Scope, depth: int = 0) -> Iterator[tuple[ast.expr, Scope]]:
        """Yields what a generator or a function that returns a list yields."""
        for node in own_nodes(function):
            if isinstance(node, ast.Yield) and node.value is not None:
                yield from ((node.value, turn) for turn in self._bound_to_loops(scope, [node.value]))
            elif isinstance(node, ast.YieldFrom) or (isinstance(node, ast.Return) and node.value is not None):
                yield from self.elements(node.value, scope, depth + 1)  # type: ignore[arg-type]

    def values(self, name: str, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        if name in scope.arguments:
            yield scope.arguments[name]
            return
        if scope.function is not None and (given := own_values(scope.function).get(name)):
            yield from ((value, scope) for _, value in given)
            return
        home_name, there = scope.module.imports.get(name, (scope.module.name, name))
        home = self.source.modules.get(home_name)
        if home is not None:
            yield from ((value, Scope(home)) for value in home.values.get(there, ()))

    def _called(self, call: ast.Call, scope: Scope, depth: int) -> list[str] | None:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("strip", "format", "rstrip", "capitalize"):
            return self.of(call.func.value, scope, depth + 1)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "join" and call.args:
            return self._joined(call.func.value, call.args[0], scope, depth)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and isinstance(call.func.value, ast.Name):
            return self._entries(call.func.value, None, scope, depth)
        texts: list[str] = []
        for function, home in self.source.functions_of(call, scope):
            bound = Scope(home, function, None, {key: (arg, scope) for key, arg in bind(call, function).items()})
            for node in own_nodes(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    texts += self.of(node.value, bound, depth + 1) or []
        return texts[:MAX_ALTERNATIVES] if is_sentence(texts) else None

    def _joined(self, divider: ast.expr, parts: ast.expr, scope: Scope, depth: int) -> list[str] | None:
        """Returns the texts that are joined: each by itself if they are sentences, else a list."""
        match parts:
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name() as function, several]) if function.id != "str":
                return self.of(ast.Call(function, [several], []), scope, depth + 1)
            case ast.GeneratorExp(elt=element):
                texts = self.of(element, scope, depth + 1)
                return texts if is_sentence(texts) else None
        found = [self.of(element, home, depth + 1) for element, home in self.elements(parts, scope, depth)]
        texts = [text for some in found if some is not None for text in some]
        if is_sentence(texts):
            return texts[:MAX_ALTERNATIVES]
        if not texts or len(texts) != len(found) or len({*texts}) < 2:
            return None
        between = divider.value if isinstance(divider, ast.Constant) else ", "
        return [str(between).join(texts)]

    def _attribute(self, owner: ast.Name, name: str, scope: Scope, depth: int) -> list[str] | None:
        if owner.id in scope.module.imports:
            home_name, part = scope.module.imports[owner.id]
            home = self.source.modules.get(f"{home_name}.{part}" if part else home_name)
            if home is not None and name in home.values:
                return self._either(home.values[name], Scope(home), depth)
        if (given := scope.arguments.get(f"self.{name}")) and owner.id == "self":
            return self.of(*given, depth + 1)
        if owner.id == "self":
            owning = next(
                (c for c in scope.module.classes.values() if any(scope.function is part for part in c.body)), None
            )
            values = [v for part in (owning.body if owning else ()) for t, v in assigned(part) if t == name]
            return self._either(values, scope, depth) if values else None
        return None

    def _entries(self, table: ast.expr, place: int | None, scope: Scope, depth: int) -> list[str] | None:
        """What a dict that is written holds, or one part of a tuple that it holds or that a function returns."""
        found: list[tuple[ast.expr, Scope]] = []
        if isinstance(table, ast.Call):
            for function, home in self.source.functions_of(table, scope):
                bound = Scope(home, function, None, {key: (arg, scope) for key, arg in bind(table, function).items()})
                returned = [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]
                found += [(value, bound) for value in returned if value is not None]
        else:
            name = table.value if isinstance(table, ast.Subscript) else table
            pairs = self.elements(name, scope, depth)
            found = [(e.elts[1], home) for e, home in pairs if isinstance(e, ast.Tuple) and len(e.elts) == 2]
        texts: list[str] = []
        for value, home in found:
            if place is None:
                texts += self.of(value, home, depth + 1) or []
            elif isinstance(value, ast.Tuple) and place < len(value.elts):
                texts += self.of(value.elts[place], home, depth + 1) or []
        return texts[:MAX_ALTERNATIVES] or None

    def bound(
        self, scope: Scope, nodes: Sequence[ast.expr | None], *, forced: bool = False, deep: int = 0
    ) -> Iterator[Scope]:
        """Yields the scope once for each call of its function, or turn of its loop, that gives a part of the texts.

        Once as it is where none does. `forced`: a call counts even if it gives no words, such as one that gives the
        reason.
        """
        for called in self._bound_to_callers(scope, nodes, forced=forced, deep=deep):
            for turn in self._bound_to_loops(called, nodes):
                yield from self._bound_to_instances(turn, nodes)

    def _bound_to_instances(self, scope: Scope, nodes: Sequence[ast.expr | None]) -> Iterator[Scope]:
        """Yields the scope once for each instance that is written of its dataclass, if its fields are of the texts."""
        attributes = {
            part.attr
            for node in nodes
            if node is not None
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
        }
        owner = next((c for c in scope.module.classes.values() if scope.function in c.body), None)
        fields = [
            part.target.id
            for part in (owner.body if owner else ())
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        ]
        instances: list[Scope] = []
        if owner is not None and attributes & {*fields}:
            for call, place in self.source.calls_of(owner.name, scope.module):
                given = dict(zip(fields, call.args, strict=False)) | {
                    word.arg: word.value for word in call.keywords if word.arg
                }
                written = {f"self.{name}": (value, place) for name, value in given.items() if name in attributes}
                if any(is_sentence(self.of(value, place)) for value, _ in written.values()):
                    instances.append(replace(scope, arguments={**scope.arguments, **written}))
        yield from instances or [scope]

    def _bound_to_loops(self, scope: Scope, nodes: Sequence[ast.expr | None]) -> Iterator[Scope]:
        names = _names(nodes, scope.function)
        for node in own_nodes(scope.function) if scope.function else ():
            match node:
                case ast.For(target=ast.Tuple(elts=parts), iter=several):
                    found = self.elements(several, scope)
                case ast.comprehension(target=ast.Tuple(elts=parts), iter=several):
                    found = self.elements(several, scope)
                case ast.Assign(targets=[ast.Tuple(elts=parts)], value=ast.Subscript(value=ast.Name() as table)):
                    entries = [(entry, home) for entry, home in self.elements(table, scope)]
                    found = ((entry.elts[1], home) for entry, home in entries if isinstance(entry, ast.Tuple))
                case _:
                    continue
            targets = [part.id if isinstance(part, ast.Name) else "" for part in parts]
            if len(names & {*targets}) < 2:
                continue
            turns = [
                dict(zip(targets, ((part, home) for part in element.elts), strict=False))
                for element, home in found
                if isinstance(element, ast.Tuple)
            ]
            if turns:
                yield from (replace(scope, arguments={**scope.arguments, **turn}) for turn in turns)
                return
        yield scope

    def _bound_to_callers(
        self, scope: Scope, nodes: Sequence[ast.expr | None], *, forced: bool, deep: int
    ) -> Iterator[Scope]:
        function = scope.function
        names = _names(nodes, function)
        needed = (
            sorted({*parameters_of(function), *(a.arg for a in function.args.kwonlyargs)} & names) if function else []
        )
        if function is None or not needed or deep > MAX_CALLERS_DEEP:
            yield scope
            return
        found: list[Scope] = []
        is_needed = forced
        for call, place in self.source.callers(function, scope.module):
            arguments = bind(call, function)
            for caller in self.bound(place, [arguments.get(name) for name in needed], deep=deep + 1):
                found.append(
                    Scope(scope.module, function, scope.outer, {key: (a, caller) for key, a in arguments.items()})
                )
                is_needed |= any(is_sentence(self.of(arguments.get(name), caller)) for name in needed)
        if found and is_needed:
            yield from found
        else:
            yield scope


def _names(nodes: Sequence[ast.expr | None], function: Function | None) -> set[str]:
    names = {part.id for node in nodes if node is not None for part in ast.walk(node) if isinstance(part, ast.Name)}
    if function is not None:
        for _ in range(3):
            values = [value for name in names for _, value in own_values(function).get(name, ())]
            names |= {part.id for value in values for part in ast.walk(value) if isinstance(part, ast.Name)}
    return names


def _calculated(node: ast.expr) -> int | None:
    """Returns the number that a product, a power or a shift of numbers makes."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=ast.Mult() | ast.Pow() | ast.LShift() as operator, right=right):
            sides = _calculated(left), _calculated(right)
            if sides[0] is None or sides[1] is None:
                return None
            if isinstance(operator, ast.Mult):
                return sides[0] * sides[1]
            return sides[0] ** sides[1] if isinstance(operator, ast.Pow) else sides[0] << sides[1]
        case _:
            return None


def _names_itself(value: ast.expr, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(value))
