"""Reads texts of messages from the product's syntax trees. Knows Python, and none of Blockyard's classes.

A text is a constant, an f-string, or a name whose value stands in the same function, in the module, or at the calls of
the function. What only a run can tell stays a hole: `{max_model_len}`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_ALTERNATIVES = 12
MAX_CALLERS_DEEP = 4
# Calls that are named after their argument, and after what they are called of.
_IDENTITIES = frozenset(
    {"quote", "repr", "str", "sorted", "list", "tuple", "set", "listed", "join", "round", "max", "type"}
)
_WITHOUT_NAME = frozenset(
    {"decode", "split", "strip", "replace", "removeprefix", "removesuffix", "lower", "title", "get"}
)


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed file. `name`: with dots. `imports`: of each imported name its module and its name there."""

    name: str
    imports: dict[str, tuple[str, str]]
    values: Mapping[str, Sequence[ast.expr]]
    classes: dict[str, ast.ClassDef]
    functions: dict[str, list[Function]]
    calls: list[tuple[ast.Call, Scope]]

    @cached_property
    def imported(self) -> frozenset[str]:
        """The modules that it imports something of."""
        return frozenset(name for name, _ in self.imports.values())


@dataclass(frozen=True, eq=False)
class Scope:
    """Where an expression stands. `arguments`: what a caller gave for parameters, and where the caller stands."""

    module: Module
    function: Function | None = None
    outer: Scope | None = None
    arguments: Mapping[str, tuple[ast.expr, Scope]] = field(default_factory=dict)


def last_name(node: ast.expr) -> str:
    """Returns the name that a hole is shown by: the last one of an expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call():
            return _called_name(node)
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
            return last_name(value)
        case ast.BinOp(left=ast.Constant(), right=side) | ast.BinOp(left=side) | ast.UnaryOp(operand=side):
            return last_name(side)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return last_name(element)
        case ast.BoolOp(values=[first, *_]):
            return last_name(first)
        case ast.IfExp(body=body):
            return last_name(body)
        case ast.JoinedStr(values=values):
            holes = [part.value for part in values if isinstance(part, ast.FormattedValue)]
            return last_name(holes[0]) if holes else "…"
        case _:
            return "…"


def _called_name(call: ast.Call) -> str:
    match call:
        case ast.Call(func=ast.Name(id="len"), args=[several]):
            return f"num_{last_name(several).removeprefix('num_')}"
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Name(id="map"), args=[_, several]):
            return last_name(several)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
            return key
        case ast.Call(func=ast.Attribute(value=ast.expr() as owner, attr=name)) if name in _WITHOUT_NAME:
            return last_name(owner)
        case ast.Call(func=function, args=[first, *_]) if last_name(function) in _IDENTITIES:
            return last_name(first)
        case _:
            return last_name(call.func)


def parse(path: Path, name: str) -> Module:
    """Parses a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values: dict[str, list[ast.expr]] = defaultdict(list)
    for node in tree.body:
        for target, value in assigned(node):
            values[target].append(value)
    module = Module(name, {}, values, {}, defaultdict(list), [])
    stack: list[tuple[ast.AST, Scope]] = [(tree, Scope(module))]
    while stack:
        node, scope = stack.pop()
        if isinstance(node, ast.Call):
            module.calls.append((node, scope))
        elif not isinstance(node, ast.expr):
            scope = _declare(node, scope)
        stack.extend((child, scope) for child in ast.iter_child_nodes(node))
    return module


def _declare(node: ast.AST, scope: Scope) -> Scope:
    """Notes what a statement declares, and returns the scope of what is inside it."""
    module = scope.module
    if isinstance(node, ast.ImportFrom) and node.module:
        module.imports.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
    elif isinstance(node, ast.Import):
        module.imports.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
    elif isinstance(node, ast.ClassDef):
        module.classes[node.name] = node
        makers = [part for part in node.body if isinstance(part, FUNCTIONS) and part.name == "__init__"]
        module.functions[node.name].extend(makers)
    elif isinstance(node, FUNCTIONS):
        module.functions[node.name].append(node)
        return Scope(module, node, scope)
    return scope


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names that a statement gives a value, and the value."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = zip(targets, values, strict=False)
        case ast.Assign(
            targets=[ast.Tuple(elts=targets)], value=ast.IfExp(body=ast.Tuple() as a, orelse=ast.Tuple() as b)
        ):
            pairs = [pair for side in (a, b) for pair in zip(targets, side.elts, strict=False)]
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
            pairs = [(target, ast.Subscript(value, ast.Constant(place))) for place, target in enumerate(targets)]
        case ast.Assign(targets=targets, value=value):
            pairs = [(target, value) for target in targets]
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            pairs = [(target, value)]
        case ast.AugAssign(target=ast.Name() as target, op=ast.Add(), value=value):
            pairs = [(target, ast.BinOp(target, ast.Add(), value))]
        case _:
            pairs = []
    for target, value in pairs:
        if isinstance(target, ast.Name):
            yield target.id, value


def parameters_of(function: Function) -> list[str]:
    """Returns the names of the parameters that can be given by position, without self, and then the others."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@cache
def bind(call: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Returns the expressions that a call gives for the parameters, with the defaults of the others."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {
        argument.arg: value
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if value is not None
    }
    given = {
        name: value
        for name, value in zip(parameters_of(function), call.args, strict=False)
        if not isinstance(value, ast.Starred)
    }
    return defaults | given | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


class Source:
    """The modules of some packages below a folder."""

    def __init__(self, root: Path, packages: Sequence[str]) -> None:
        self.modules = {
            name: parse(path, name)
            for package in packages
            for path in sorted((root / package).rglob("*.py"))
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
            for name in [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")]
        }
        self._reached: dict[ast.Call, list[tuple[Function, Module]]] = {}
        self._callers: dict[Function, list[tuple[ast.Call, Scope]]] = {}

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Scope]]:
        """Every call, and where it stands."""
        return [found for module in self.modules.values() for found in module.calls]

    @cached_property
    def _calls_by_name(self) -> Mapping[str, list[tuple[ast.Call, Scope]]]:
        found: dict[str, list[tuple[ast.Call, Scope]]] = defaultdict(list)
        for call, scope in self.calls:
            if isinstance(call.func, ast.Name | ast.Attribute):
                written = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
                found[scope.module.imports.get(written, ("", written))[1] or written].append((call, scope))
        return found

    def calls_of(self, name: str, module: Module) -> list[tuple[ast.Call, Scope]]:
        """Returns the calls of a class of a module, by its name."""
        return [
            (call, scope)
            for call, scope in self._calls_by_name.get(name, ())
            if scope.module is module or module.name in scope.module.imported
        ]

    def functions_of(self, call: ast.Call, scope: Scope) -> list[tuple[Function, Module]]:
        """Returns the functions of ours that a call may reach."""
        if call not in self._reached:
            self._reached[call] = self._find_functions(call, scope)
        return self._reached[call]

    def _find_functions(self, call: ast.Call, scope: Scope) -> list[tuple[Function, Module]]:
        match call.func:
            case ast.Name(id=name) if name in scope.module.imports:
                home, name = scope.module.imports[name]
                homes = [self.modules.get(home)]
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                homes = [scope.module]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in scope.module.imports:
                home, part = scope.module.imports[owner]
                homes = [self.modules.get(f"{home}.{part}" if part else home) or self.modules.get(home)]
            case ast.Attribute(attr=name):
                homes = [scope.module, *(self.modules.get(module) for module in sorted(scope.module.imported))]
            case _:
                return []
        return [
            (function, home)
            for home in homes
            if home is not None
            for function in home.functions.get(name, ())
            if self._takes(function, call)
        ]

    @staticmethod
    def _takes(function: Function, call: ast.Call) -> bool:
        names = [*parameters_of(function), *(argument.arg for argument in function.args.kwonlyargs)]
        return function.args.vararg is not None or (
            len(call.args) <= len(parameters_of(function))
            and all(name in names for name in (keyword.arg for keyword in call.keywords) if name)
            and set(parameters_of(function)) <= {*bind(call, function)}
        )

    def callers(self, function: Function, module: Module) -> list[tuple[ast.Call, Scope]]:
        """Returns the calls that reach a function."""
        if function not in self._callers:
            self._callers[function] = self._find_callers(function, module)
        return self._callers[function]

    def _find_callers(self, function: Function, module: Module) -> list[tuple[ast.Call, Scope]]:
        name = function.name
        if name == "__init__":
            name = next((key for key, node in module.classes.items() if function in node.body), name)
        return [
            (call, scope)
            for call, scope in self._calls_by_name.get(name, ())
            if any(reached is function for reached, _ in self.functions_of(call, scope))
        ]


@cache
def own_nodes(function: Function) -> list[ast.AST]:
    """Returns what a function consists of, without the functions inside it, in the order of the text."""
    found: list[ast.AST] = []
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        found.append(node)
        if not isinstance(node, FUNCTIONS):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))
    return found


@cache
def own_values(function: Function) -> Mapping[str, list[tuple[ast.AST, ast.expr]]]:
    """Returns the values that a function gives its names, with the statement that does."""
    found: dict[str, list[tuple[ast.AST, ast.expr]]] = defaultdict(list)
    for node in own_nodes(function):
        for name, value in assigned(node):
            found[name].append((node, value))
    return found


def values_at(function: Function, name: str, line: int) -> list[ast.expr]:
    """Returns the values that a name may have at a line: the last that it surely has, and those given between."""
    given = own_values(function).get(name, [])
    before = [(node, value) for node, value in given if isinstance(node, ast.stmt) and node.lineno < line]
    for node, _ in reversed(before):
        assert isinstance(node, ast.stmt)
        between = [
            other.col_offset
            for other in own_nodes(function)
            if isinstance(other, ast.stmt) and node.lineno < other.lineno <= line
        ]
        if all(column >= node.col_offset for column in between):
            return [value for other, value in given if node.lineno <= getattr(other, "lineno", 0) <= line]
    return [value for _, value in given]


def combine(parts: Sequence[Sequence[str]]) -> list[str]:
    """Returns every text that consists of one alternative of each part."""
    return ["".join(choice) for choice in product(*parts)][:MAX_ALTERNATIVES]
