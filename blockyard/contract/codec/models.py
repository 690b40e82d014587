"""Encodes and decodes what a model is served for, and the models that a gateway lists."""

from __future__ import annotations

from blockyard.common.v1 import pooling_pb2
from blockyard.contract.codec.enums import EnumCodec
from blockyard.contract.models import Model, Task
from blockyard.inference.v1 import inference_pb2

_TASKS = EnumCodec(Task, pooling_pb2.Task.items(), "TASK_")


def encode_task(task: Task) -> pooling_pb2.Task.ValueType:
    """Encodes what a model is served for."""
    return _TASKS.encode(task)


def find_task(number: int) -> Task | None:
    """Decodes what a model is to be served for; None for a task of a later version."""
    return _TASKS.find(number)


def decode_task(number: int) -> Task:
    """Decodes what a model is served for; a task of a later version is unspecified."""
    return _TASKS.find(number) or Task.UNSPECIFIED


def encode_model(model: Model) -> inference_pb2.Model:
    """Encodes a model."""
    return inference_pb2.Model(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        has_chat_template=model.has_chat_template,
        determinism_id=model.determinism_id,
        batch_invariant=model.batch_invariant,
        parent=model.parent,
        task=encode_task(model.task),
        embedding_size=model.embedding_size,
        warnings=model.warnings,
        dialect=model.dialect,
    )


def decode_model(message: inference_pb2.Model) -> Model:
    """Decodes a model."""
    return Model(
        message.name,
        message.max_model_len,
        message.vocab_size,
        message.has_chat_template,
        message.determinism_id,
        message.batch_invariant,
        message.parent,
        decode_task(message.task),
        message.embedding_size,
        tuple(message.warnings),
        message.dialect,
    )
