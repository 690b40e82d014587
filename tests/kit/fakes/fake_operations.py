"""What a fake worker does for operators: takes note, and gives a file of its own as a profile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import administration_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_STEPS = 77


class FakeOperations:
    """The part of a fake worker that operators see."""

    # Given piece by piece.
    profile_pieces: tuple[bytes, ...] = (b"one", b"two", b"three")
    is_profiling = False
    # What a save fails with.
    save_refusal: BlockyardError | None = None
    log_level = administration_pb2.LOG_LEVEL_INFO
    # What extensions were asked.
    called: tuple[worker_pb2.CallExtensionRequest, ...] = ()
    refuses_extensions = hangs_in_extensions = False

    async def SaveState(self, request: worker_pb2.SaveStateRequest, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.SaveStateResponse(progress=worker_pb2.LoadProgress(done_bytes=1, total_bytes=2))
        if self.save_refusal is not None:
            raise self.save_refusal
        saved = administration_pb2.SavedState(folder=f"/root/{request.folder}", files=["a"], num_bytes=2)
        yield worker_pb2.SaveStateResponse(saved=saved)

    async def StartProfile(self, request: worker_pb2.StartProfileRequest, context: Any) -> Any:
        if self.is_profiling:
            raise BlockyardError(Reason.WRONG_STATE, "a profile is recorded already")
        self.is_profiling = True
        options = request.options
        chosen = options.detail or administration_pb2.PROFILE_DETAIL_STEPS
        told = administration_pb2.ProfileOptions(
            detail=chosen, max_steps=min(options.max_steps or MAX_STEPS, MAX_STEPS)
        )
        return worker_pb2.StartProfileResponse(options=told)

    async def StopProfile(self, request: worker_pb2.StopProfileRequest, context: Any) -> AsyncIterator[Any]:
        if not self.is_profiling:
            raise BlockyardError(Reason.WRONG_STATE, "no profile was begun")
        self.is_profiling = False
        num_bytes = sum(map(len, self.profile_pieces))
        yield worker_pb2.StopProfileResponse(
            summary=administration_pb2.ProfileSummary(num_steps=5, num_bytes=num_bytes, worker="fake x")
        )
        for piece in self.profile_pieces:
            yield worker_pb2.StopProfileResponse(data=piece)

    async def SetLogLevel(self, request: worker_pb2.SetLogLevelRequest, context: Any) -> Any:
        previous, self.log_level = self.log_level, request.level
        return worker_pb2.SetLogLevelResponse(previous_level=previous)

    async def CallExtension(self, request: worker_pb2.CallExtensionRequest, context: Any) -> Any:
        self.called += (request,)
        if self.hangs_in_extensions:
            await asyncio.Event().wait()
        if self.refuses_extensions:
            raise BlockyardError(Reason.EXTENSION_FAILED, "it failed")
        return worker_pb2.CallExtensionResponse(result=request.payload[::-1])
