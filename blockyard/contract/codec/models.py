"""Encodes and decodes a model's task, and the models that a gateway lists."""

from __future__ import annotations

from blockyard.common.v1 import pooling_pb2
from blockyard.contract.codec.messages import EnumCodec, MessageCodec
from blockyard.contract.models import Model, Task
from blockyard.inference.v1 import inference_pb2

TASKS = EnumCodec(Task, pooling_pb2.Task.items(), "TASK_")
MODEL = MessageCodec(Model, inference_pb2.Model, task=TASKS)
