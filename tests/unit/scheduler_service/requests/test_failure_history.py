from __future__ import annotations

from scheduler_service.requests.failure_history import Deaths, Refusals

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


def test_who_meets_the_same_twice_without_a_token_is_hopeless() -> None:
    refusals, live = Refusals(), {"a": 0.0, "b": 0.0, "c": 0.0}
    assert refusals.note("step 9: broken", {"a": 5, "b": 2}, live) == []
    assert refusals.note("step 3: broken", {"a": 5, "b": 3, "c": 5}, live) == ["a"]
    assert refusals.note("step 4: broken", {"b": 3, "c": 6}, live) == ["b"]


def test_another_refusal_is_another_matter() -> None:
    refusals, live = Refusals(), {"a": 0.0}
    assert refusals.note("broken", {"a": 5}, live) == []
    assert refusals.note("torn", {"a": 5}, live) == []
    assert refusals.note("torn", {"a": 5}, live) == ["a"]


def test_a_refusal_of_others_in_between_does_not_clear_it() -> None:
    refusals, live = Refusals(), {"a": 0.0, "b": 0.0}
    refusals.note("broken", {"a": 5}, live)
    refusals.note("broken", {"b": 5}, live)
    assert refusals.note("broken", {"a": 5}, live) == ["a"]


def test_a_later_request_of_the_same_name_is_not_to_blame() -> None:
    refusals = Refusals()
    refusals.note("broken", {"a": 0}, {"a": 0.0})
    refusals.note("broken", {"b": 0}, {"b": 0.0})
    assert refusals.note("broken", {"a": 0}, {"a": 0.0, "b": 0.0}) == []
