"""An AddRequest whose serialized parts are still messages, so that tests can change any field of it."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.scheduler.v1 import scheduler_pb2


class Draft:
    """An AddRequest in the making: `build` serializes the parts of `submission`, and it."""

    def __init__(self, handle: int = 0, **fields: Any) -> None:
        self.add = scheduler_pb2.AddRequest(handle=handle)
        self.submission = scheduler_pb2.Submission(**fields)
        self.sampling = sampling_pb2.SamplingParams()
        self.pooling = pooling_pb2.Pooling()

    def build(self) -> scheduler_pb2.AddRequest:
        """Returns the message. Without a field of its own, a pooling is absent."""
        self.submission.sampling = self.sampling.SerializeToString()
        self.submission.pooling = self.pooling.SerializeToString()
        self.add.submission = self.submission.SerializeToString()
        return self.add

    def put(self, path: str, value: Any) -> None:
        """Sets a field by its path; of messages in a list the first one's."""
        first, *rest = path.split(".")
        if first in ("sampling", "pooling"):
            _put(getattr(self, first), rest, value)
        elif first in scheduler_pb2.Submission.DESCRIPTOR.fields_by_name:
            _put(self.submission, [first, *rest], value)
        else:
            _put(self.add, [first, *rest], value)


def _put(message: Any, path: list[str], value: Any) -> None:
    *outer, name = path
    for part in outer:
        inner = getattr(message, part)
        message = inner if isinstance(inner, Message) else (inner[0] if len(inner) else inner.add())
    if isinstance(value, Message):
        getattr(message, name).CopyFrom(value)
    elif isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
        message.SetInParent()
    else:
        setattr(message, name, value)
