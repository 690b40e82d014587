"""Routes each token of a message to the sequence that it belongs to: the gateway's inner loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.scheduling import TokenUpdate
    from gateway.live.answer import SequenceAnswer
    from gateway.live.request_state import RequestState

    Listener = Callable[[RequestState, SequenceAnswer], None]


log = EventLogger(__name__)


class TokenRouter:
    """Knows the running sequences by the scheduler's ids.

    Args:
        on_stop: called when a stop string has ended a sequence that the scheduler still runs.
        on_end: called when the scheduler has ended one.
        on_failure: called when tokens of a request could not be taken: it alone ends.
    """

    def __init__(
        self, on_stop: Listener, on_end: Listener, on_failure: Callable[[RequestState, BlockyardError], None]
    ) -> None:
        self._routes: dict[int, tuple[RequestState, SequenceAnswer]] = {}
        self._on_stop = on_stop
        self._on_end = on_end
        self._on_failure = on_failure

    def add(self, state: RequestState) -> None:
        """Adds the running sequences of a request that the scheduler has accepted."""
        for answer in state.answers:
            if answer.ended is None:
                self._routes[state.sequence_id_of(answer)] = (state, answer)

    def remove(self, state: RequestState, answer: SequenceAnswer) -> None:
        """Removes a sequence. Idempotent."""
        if self._routes.get(sequence_id := state.sequence_id_of(answer)) == (state, answer):
            del self._routes[sequence_id]

    def clear(self) -> None:
        """Removes all sequences: the scheduler's ids have become invalid."""
        self._routes.clear()

    def route(self, update: TokenUpdate) -> None:
        """Routes what steps generated. Tokens of a sequence that has ended here are dropped."""
        self._apply_prompts(update)
        routes = self._routes
        # Before the tokens: when one of these ends the answer, its log probabilities are there.
        for sequence_id, candidates in update.logprobs:
            if (route := routes.get(sequence_id)) is not None:
                route[1].push_logprobs(candidates)
        for sequence_id, token_id in zip(update.sequence_ids, update.token_ids, strict=True):
            route = routes.get(sequence_id)
            if route is None:
                continue
            state, answer = route
            try:
                is_stopped = answer.push(token_id)
            except Exception:  # noqa: BLE001 - must not end the stream of all requests
                self._fail(state)
                continue
            if is_stopped:
                self._on_stop(state, answer)
            for reader in state.readers:
                if not reader.is_patient:
                    reader.wake()
        pooled = dict(update.pooled)
        for sequence_id, reason, score, error in update.ended:
            route = routes.get(sequence_id)
            if route is None:
                continue
            state, answer = route
            try:
                answer.finish(reason, score, error, pooled.get(sequence_id, b""))
            except Exception:  # noqa: BLE001 - as above
                self._fail(state)
                continue
            self._on_end(state, answer)
            state.wake()

    def _fail(self, state: RequestState) -> None:
        log.exception("the tokens of a request could not be taken", request_id=state.wire_id)
        self._on_failure(state, BlockyardError(Reason.BUG, "internal error; the gateway's log has more"))

    def _apply_prompts(self, update: TokenUpdate) -> None:
        for sequence_id, num_cached_tokens in update.prefilled:
            if (route := self._routes.get(sequence_id)) is not None:
                route[0].num_cached_tokens = num_cached_tokens
                route[0].request_log.on_prefilled()
                route[0].meter.on_first_token()
        for sequence_id, piece in update.prompt_logprobs:
            if (route := self._routes.get(sequence_id)) is not None:
                route[0].add_prompt_piece(piece)
