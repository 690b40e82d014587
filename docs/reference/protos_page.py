"""Writes the page of services and messages from the comments in `protos/`. Run `generate.py`, which imports this.

protoc reads the files (comments are no part of the committed bindings); nothing here knows what any of them is about.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOS = Path(__file__).parents[2] / "protos"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"
PUBLIC = ("blockyard.inference.v1", "blockyard.admin.v1", "blockyard.common.v1", "inference")
INTERNAL = ("blockyard.scheduler.v1", "blockyard.gateway.v1", "blockyard.worker.v1")

# Numbers of fields in descriptor.proto, of which the paths to comments are made.
FILE_PACKAGE, FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 2, 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
MEMBER = 2  # of an enum: its value; of a service: its method

PAGE = """\
# Services and messages
{note}

What is in [protos/](../../protos/), whose comments are the specification. [The protocol](../concepts/protocol.md) tells
how the calls belong together, [call it](../guides/call.md) how to make them, and [errors](errors.md) how they fail.

**Public:** {public}. Inside a version they grow and do not change.

**Between the services:** {internal}. They grow in the same way; nobody else is meant to call them.

A field that is *optional* tells an absent value from zero.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A declaration in a file: its full name, and the way to it through the descriptors."""

    name: str
    path: tuple[int, ...]

    def inside(self, name: str, *path: int) -> Place:
        """A declaration in this one."""
        return Place(f"{self.name}.{name}", (*self.path, *path))


def _one_line(comment: str) -> str:
    """A comment as one cell of a table."""
    return " ".join(comment.split()).replace("|", "\\|")


def _heading(level: int, place: Place, title: str) -> str:
    """A heading with its full name as an anchor: short names repeat from package to package."""
    return f'<a id="{place.name}"></a>\n{"#" * level} {title}\n'


def _table(titles: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows]) + "\n"


class File:
    """One .proto with its comments."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(location.path): location.leading_comments for location in file.source_code_info.location
        }

    @property
    def package(self) -> str:
        """The package that it is of."""
        return self.file.package

    @cached_property
    def _maps(self) -> dict[str, DescriptorProto]:
        """The messages that stand for entries of maps, by the name that a field has as its type."""
        nested = ((message.name, each) for message in self.file.message_type for each in _all_nested(message))
        return {f".{self.package}.{owner}.{name}": entry for owner, (name, entry) in nested if entry.options.map_entry}

    def comment(self, *path: int) -> str:
        """What stands above a declaration."""
        return _one_line(self._comments.get(path, ""))

    def sections(self) -> Iterator[str]:
        """The comment above the package, services, then messages and enums, in their order."""
        if about := self.comment(FILE_PACKAGE):
            yield f"{about}\n"
        here = Place(self.package, ())
        for index, service in enumerate(self.file.service):
            yield self._service(service, here.inside(service.name, FILE_SERVICE, index))
        for index, message in enumerate(self.file.message_type):
            yield from self._message(message, here.inside(message.name, FILE_MESSAGE, index))
        for index, enum in enumerate(self.file.enum_type):
            yield self._enum(enum, here.inside(enum.name, FILE_ENUM, index))

    def _title(self, place: Place) -> str:
        return f"`{place.name.removeprefix(self.package + '.')}`"

    def _service(self, service: ServiceDescriptorProto, place: Place) -> str:
        rows = [
            f"| `{method.name}` | {self._streamed(method.input_type, method.client_streaming)} "
            f"| {self._streamed(method.output_type, method.server_streaming)} "
            f"| {self.comment(*place.path, MEMBER, index)} |"
            for index, method in enumerate(service.method)
        ]
        titles = ("rpc", "request", "response", "what it does")
        return self._with_head(place, f"service {self._title(place)}", _table(titles, rows))

    def _with_head(self, place: Place, title: str, table: str) -> str:
        return "\n".join([_heading(3, place, title), self.comment(*place.path) + "\n", table])

    def _streamed(self, type_name: str, streams: bool) -> str:
        return ("stream of " if streams else "") + self._link(type_name)

    def _message(self, message: DescriptorProto, place: Place) -> Iterator[str]:
        rows = [self._field(field, *place.path, MESSAGE_FIELD, index) for index, field in enumerate(message.field)]
        table = _table(("field", "", "type", "what it is"), rows) if rows else "No fields.\n"
        yield self._with_head(place, self._title(place), self._choices(message, place) + table)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, place.inside(nested.name, MESSAGE_NESTED, index))
        for index, enum in enumerate(message.enum_type):
            yield self._enum(enum, place.inside(enum.name, MESSAGE_ENUM, index))

    def _field(self, field: FieldDescriptorProto, *path: int) -> str:
        return f"| `{field.name}` | {field.number} | {self._type(field)} | {self.comment(*path)} |"

    def _choices(self, message: DescriptorProto, place: Place) -> str:
        """A line for each `oneof`, but for those that stand for an `optional`."""
        named: dict[int, list[str]] = {}
        for field in message.field:
            if field.HasField("oneof_index") and not field.proto3_optional:
                named.setdefault(field.oneof_index, []).append(f"`{field.name}`")
        return "".join(
            f"`{message.oneof_decl[index].name}` is one of {', '.join(names)}: "
            f"{self.comment(*place.path, MESSAGE_ONEOF, index)}\n\n"
            for index, names in named.items()
        )

    def _type(self, field: FieldDescriptorProto) -> str:
        if (entry := self._maps.get(field.type_name)) is not None:
            return f"map of {self._plain_type(entry.field[0])} to {self._plain_type(entry.field[1])}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {self._plain_type(field)}"
        return ("optional " if field.proto3_optional else "") + self._plain_type(field)

    def _plain_type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"

    def _link(self, type_name: str) -> str:
        full = type_name.removeprefix(".")
        shown = full.removeprefix(self.package + ".").removeprefix("blockyard.")
        return f"`{shown}`" if full.startswith("google.") else f"[`{shown}`](#{full})"

    def _enum(self, enum: EnumDescriptorProto, place: Place) -> str:
        rows = [
            f"| `{value.name}` | {value.number} | {self.comment(*place.path, MEMBER, index)} |"
            for index, value in enumerate(enum.value)
        ]
        return self._with_head(place, f"enum {self._title(place)}", _table(("value", "", "what it means"), rows))


def _all_nested(message: DescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    """Messages inside a message at any depth, with their names below it."""
    for nested in message.nested_type:
        yield nested.name, nested
        for name, inner in _all_nested(nested):
            yield f"{nested.name}.{name}", inner


def read_protos() -> list[File]:
    """Reads our own files, by name.

    Raises:
        RuntimeError: protoc refused them; it has told why on standard error.
    """
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("blockyard/**/*.proto"))
    with tempfile.NamedTemporaryFile() as told:
        options = [f"-I{PROTOS}", f"-I{WELL_KNOWN}", "--include_source_info", f"--descriptor_set_out={told.name}"]
        if protoc.main(["protoc", *options, *names]):
            raise RuntimeError("protoc does not read the protos")
        descriptors = FileDescriptorSet.FromString(Path(told.name).read_bytes())
    return [File(file) for file in descriptors.file]


def _links_to(packages: tuple[str, ...]) -> str:
    return ", ".join(f"[`{package}`](#{package})" for package in packages)


def _package_sections(package: str, files: list[File]) -> Iterator[str]:
    yield _heading(2, Place(package, ()), f"`{package}`")
    for file in files:
        if file.package == package:
            yield from file.sections()


def protos_page(note: str) -> str:
    """Every service, rpc, message, field, enum and value, with its comment."""
    files = read_protos()
    if unsorted := {file.package for file in files} - {*PUBLIC, *INTERNAL}:
        raise ValueError(f"neither PUBLIC nor INTERNAL: {', '.join(sorted(unsorted))}")
    head = PAGE.format(note=note, public=_links_to(PUBLIC), internal=_links_to(INTERNAL))
    sections = [section for package in (*PUBLIC, *INTERNAL) for section in _package_sections(package, files)]
    return "\n".join([head, *sections])
