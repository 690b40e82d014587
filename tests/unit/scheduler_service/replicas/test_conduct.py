from __future__ import annotations

from scheduler_service.replicas.conduct import SOUND_STEPS, Conduct


def broken(conduct: Conduct, incarnations: tuple[str, ...] = ("i",), num_answers: int = 0) -> Conduct:
    conduct.begin_epoch(incarnations)
    for _ in range(num_answers):
        conduct.on_answered()
    conduct.on_epoch_broken()
    return conduct


def test_the_pauses_grow_from_the_third_epoch_that_breaks_at_once() -> None:
    conduct = Conduct()
    assert [broken(conduct).pause_seconds for _ in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    conduct.num_unsound_epochs = 10**6
    assert conduct.pause_seconds == 30


def test_an_epoch_that_was_sound_clears() -> None:
    conduct = Conduct()
    for _ in range(5):
        broken(conduct, num_answers=SOUND_STEPS - 1)
    assert conduct.pause_seconds == 4
    assert not conduct.is_sound
    broken(conduct, num_answers=SOUND_STEPS)
    assert conduct.is_sound
    assert (conduct.num_unsound_epochs, conduct.pause_seconds) == (0, 0)


def test_another_process_is_judged_anew() -> None:
    conduct = Conduct()
    for _ in range(5):
        broken(conduct)
    conduct.begin_epoch(("i", "another"))
    assert conduct.pause_seconds == 0
