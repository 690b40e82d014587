from __future__ import annotations

from scheduler_service.requests.deaths import Deaths

LIVE = {"a": 0.0, "b": 0.0, "c": 0.0}


def test_three_deaths_without_a_token_are_told_by_one_without_another_suspect() -> None:
    deaths = Deaths()
    deaths.note({"a": 5, "b": 5}, LIVE)
    assert (deaths.suspects, deaths.poison) == ([], [])
    deaths.note({"a": 5, "b": 5, "c": 1}, LIVE)
    assert (deaths.suspects, deaths.poison) == (["a", "b"], [])
    deaths.note({"b": 5}, LIVE)
    assert (deaths.suspects, deaths.poison) == (["a", "b"], ["b"])


def test_a_token_clears() -> None:
    deaths = Deaths()
    for num_outputs in range(20):
        deaths.note({"a": num_outputs}, LIVE)
        assert deaths.suspects == []


def test_a_request_that_ended_is_forgotten_and_its_name_is_free() -> None:
    deaths = Deaths()
    deaths.note({"a": 0}, LIVE)
    deaths.note({"a": 0}, LIVE)
    deaths.note({}, {"b": 0.0})
    assert deaths.suspects == []
    deaths.note({"a": 0}, LIVE)
    assert deaths.suspects == []


def test_wrong_answers_make_suspects_and_only_with_proof_poison() -> None:
    deaths = Deaths()
    for _ in range(20):
        deaths.note({"a": 5}, LIVE, is_proof=False)
    assert (deaths.suspects, deaths.poison) == (["a"], [])
    deaths.note({"a": 5}, LIVE)
    assert deaths.poison == ["a"]


def test_proof_alone_is_not_enough() -> None:
    deaths = Deaths()
    deaths.note({"a": 5}, LIVE, is_proof=False)
    deaths.note({"a": 5}, LIVE, is_proof=True)
    assert (deaths.suspects, deaths.poison) == (["a"], [])
