"""docs/reference/protos.md has all that the bindings have, with a comment each, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, pooling_pb2, sampling_pb2, status_pb2, trace_pb2
from blockyard.gateway.v1 import state_pb2
from blockyard.inference.v1 import inference_pb2
from blockyard.open_inference.v2 import open_inference_pb2
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "protos.md").read_text(encoding="utf-8")
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (
        *(inference_pb2, admin_pb2, open_inference_pb2, scheduler_pb2, worker_pb2, state_pb2),
        *(administration_pb2, pooling_pb2, sampling_pb2, status_pb2, trace_pb2),
    )
]


def section(name: str) -> str:
    """What stands below a declaration's heading, up to the next one."""
    return PAGE.partition(f'<a id="{name}"></a>')[2].partition("<a id=")[0]


def rows(name: str) -> dict[str, list[str]]:
    """The cells of a declaration's table, by the name in the first."""
    found = re.findall(r"^\| `([^`]+)` \| (.*) \|$", section(name), re.MULTILINE)
    return {first: re.split(r"(?<!\\) \| ", rest) for first, rest in found}


def with_nested(messages: dict[str, Descriptor]) -> Iterator[Descriptor]:
    for message in messages.values():
        if not message.GetOptions().map_entry:
            yield message
            yield from with_nested(message.nested_types_by_name)


MESSAGES = [message for file in FILES for message in with_nested(file.message_types_by_name)]
ENUMS: list[EnumDescriptor] = [
    *(enum for file in FILES for enum in file.enum_types_by_name.values()),
    *(enum for message in MESSAGES for enum in message.enum_types_by_name.values()),
]
SERVICES = [service for file in FILES for service in file.services_by_name.values()]


def test_these_are_all_files() -> None:
    assert {str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos" / "blockyard").rglob("*.proto")} == {
        file.name for file in FILES
    }


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.full_name)
def test_every_field_is_told(message: Descriptor) -> None:
    told = rows(message.full_name)
    assert {name: int(cells[0]) for name, cells in told.items()} == {
        field.name: field.number for field in message.fields
    }
    assert all(len(cells) == 3 and cells[2].endswith((".", "…")) for cells in told.values())
    for field in message.fields:
        assert told[field.name][1].startswith("optional ") == bool(field.has_presence and is_optional(field))
        if field.is_repeated:
            assert told[field.name][1].startswith(("repeated ", "map of "))
    for choice in message.oneofs:
        if not choice.name.startswith("_"):
            names = ", ".join(f"`{field.name}`" for field in choice.fields)
            assert f"\n`{choice.name}` is one of {names}: " in section(message.full_name)


def is_optional(field: object) -> bool:
    """Whether a field is `optional`: by itself in a oneof that the compiler made."""
    choice = getattr(field, "containing_oneof", None)
    return choice is not None and choice.name == f"_{getattr(field, 'name', '')}"


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.full_name)
def test_every_value_is_told(enum: EnumDescriptor) -> None:
    told = rows(enum.full_name)
    assert {name: int(cells[0]) for name, cells in told.items()} == {value.name: value.number for value in enum.values}
    assert all(len(cells) == 2 and cells[1].endswith(".") for cells in told.values())


def test_every_call_is_told_with_what_streams() -> None:
    for service in SERVICES:
        told = rows(service.full_name)
        assert set(told) == set(service.methods_by_name)
        for name, method in service.methods_by_name.items():
            request, response, comment = told[name]
            assert request.startswith("stream of ") == bool(method.client_streaming)
            assert response.startswith("stream of ") == bool(method.server_streaming)
            assert request.endswith(f"(#{method.input_type.full_name})")
            assert response.endswith(f"(#{method.output_type.full_name})")
            assert comment.endswith(".")


def test_links_within_the_page_lead_somewhere() -> None:
    anchors = re.findall(r'<a id="([^"]+)"></a>', PAGE)
    assert len(set(anchors)) == len(anchors) > 100
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= set(anchors)


def test_what_clients_call_comes_first() -> None:
    public = ["blockyard.inference.v1", "blockyard.admin.v1", "blockyard.common.v1", "inference"]
    assert re.findall(r"^## `(.+)`$", PAGE, re.MULTILINE)[:4] == public
