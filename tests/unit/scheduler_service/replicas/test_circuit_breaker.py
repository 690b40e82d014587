from __future__ import annotations

from scheduler_service.replicas.circuit_breaker import SOUND_STEPS, CircuitBreaker


def broken(breaker: CircuitBreaker, incarnations: tuple[str, ...] = ("i",), num_answers: int = 0) -> CircuitBreaker:
    breaker.begin_epoch(incarnations)
    for _ in range(num_answers):
        breaker.on_answered()
    breaker.on_epoch_broken()
    return breaker


def test_the_pauses_grow_from_the_third_epoch_that_breaks_at_once() -> None:
    breaker = CircuitBreaker()
    assert [broken(breaker).pause_seconds for _ in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    breaker.num_unsound_epochs = 10**6
    assert breaker.pause_seconds == 30


def test_an_epoch_that_was_sound_clears() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        broken(breaker, num_answers=SOUND_STEPS - 1)
    assert breaker.pause_seconds == 4
    assert not breaker.is_sound
    broken(breaker, num_answers=SOUND_STEPS)
    assert breaker.is_sound
    assert (breaker.num_unsound_epochs, breaker.pause_seconds) == (0, 0)


def test_another_process_is_judged_anew() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        broken(breaker)
    breaker.begin_epoch(("i", "another"))
    assert breaker.pause_seconds == 0
