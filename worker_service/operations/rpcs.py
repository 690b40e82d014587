"""Answers those RPCs of WorkerService that look into a worker: decodes, asks, encodes. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.worker.v1 import worker_pb2
from worker_service.operations.codec import call_operation, decode_timeout
from worker_service.operations.operations import deadline

if TYPE_CHECKING:
    from worker_service.operations.operations import WorkerOperations


class OperationsRpcs:
    """A part of the worker's servicer."""

    def __init__(self, operations: WorkerOperations) -> None:
        self._operations = operations

    async def InspectModel(self, request: worker_pb2.InspectModelRequest, context: Any) -> Any:
        """Describes the network."""
        return worker_pb2.InspectModelResponse(text=await self._operations.inspect())

    async def CallOperation(self, request: worker_pb2.CallOperationRequest, context: Any) -> Any:
        """Runs an operation of the closed list."""
        async with deadline(decode_timeout(request)):
            result = await call_operation(self._operations, request.operation)
        return worker_pb2.CallOperationResponse(result=result)

    async def CallExtension(self, request: worker_pb2.CallExtensionRequest, context: Any) -> Any:
        """Runs an operation of an extension."""
        async with deadline(decode_timeout(request)):
            names = request.extension, request.operation
            result = await self._operations.call_extension(*names, request.payload)
        return worker_pb2.CallExtensionResponse(result=result)
