"""Runs a service of the version in whose folder this file lies: `python -P -m run_service MODULE [FLAG ...]`.

`trees.py` puts a copy of this file into the folder of each version. In a version whose messages have the field of a
later version, this program fills that field in each message that the service encodes, at every depth.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

from google.protobuf.message_factory import GetMessageClass

FIELD = "from_later_version"
ROOT = Path(__file__).parent
_filled: set[str] = set()


def _fill(message: Any) -> None:
    """Fills the field in a message and in all messages inside it."""
    descriptor = message.DESCRIPTOR
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            values = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        else:
            values = value if field.is_repeated else (value,)
        for each in values:
            _fill(each)
    if FIELD in descriptor.fields_by_name:
        setattr(message, FIELD, "text of a later version")
        if descriptor.full_name not in _filled:
            _filled.add(descriptor.full_name)
            sys.stderr.write(f"fills {descriptor.full_name}\n")


def _fill_when_encoded(descriptor: Any) -> None:
    """Replaces the function that encodes a message, also for gRPC, which takes it from the class."""
    message_class: Any = GetMessageClass(descriptor)
    encode = message_class.SerializeToString

    def fill_and_encode(message: Any, **options: Any) -> bytes:
        _fill(message)
        return encode(message, **options)

    message_class.SerializeToString = fill_and_encode
    for nested in descriptor.nested_types:
        if not nested.GetOptions().map_entry:
            _fill_when_encoded(nested)


def main() -> None:
    """The program."""
    module, *flags = sys.argv[1:]
    sys.stderr.write(f"runs {module} of {ROOT}\n")
    for path in sorted(ROOT.glob("blockyard/*/v?/*_pb2.py")):
        generated = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        assert generated.__file__ == str(path)
        for descriptor in generated.DESCRIPTOR.message_types_by_name.values():
            if FIELD in descriptor.fields_by_name:
                _fill_when_encoded(descriptor)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
