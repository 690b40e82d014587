from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blockyard.retention import Retention


def make(*, age: float = 60.0, entries: int = 10, weight: int = 100) -> Retention[str, int]:
    return Retention(max_age_seconds=age, max_entries=entries, max_weight=weight)


def test_what_is_kept_is_found_until_it_is_too_old() -> None:
    kept = make()
    kept.add("a", 1, 5, now=0.0)
    kept.expire(59.0)
    assert kept.get("a") == 1
    kept.expire(60.0)
    assert kept.get("a") is None
    assert len(kept) == 0


def test_the_oldest_goes_first() -> None:
    kept = make(entries=2)
    for number, name in enumerate("abc"):
        kept.add(name, number, 1, now=0.0)
    assert [kept.get(name) for name in "abc"] == [None, 1, 2]
    kept = make(weight=10)
    for number, name in enumerate("abc"):
        kept.add(name, number, 4, now=0.0)
    assert [kept.get(name) for name in "abc"] == [None, 1, 2]


def test_what_is_too_heavy_alone_is_not_kept() -> None:
    kept = make(weight=10)
    kept.add("a", 1, 11, now=0.0)
    assert kept.get("a") is None
    kept.add("b", 2, 10, now=0.0)
    assert kept.get("b") == 2


def test_a_key_added_again_is_as_new() -> None:
    kept = make()
    kept.add("a", 1, 50, now=0.0)
    kept.add("a", 2, 50, now=30.0)
    kept.add("b", 3, 50, now=30.0)
    kept.expire(61.0)
    assert (kept.get("a"), kept.get("b")) == (2, 3)
    assert kept.pop("a") == 2
    assert kept.pop("a") is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.floats(0, 50)), max_size=40),
    st.integers(1, 5),
    st.integers(20, 60),
)
def test_the_bounds_hold(adds: list[tuple[int, int, float]], max_entries: int, max_weight: int) -> None:
    kept = Retention[int, int](max_age_seconds=100.0, max_entries=max_entries, max_weight=max_weight)
    now, model = 0.0, dict[int, tuple[int, float]]()
    for key, weight, seconds in adds:
        now += seconds
        kept.add(key, weight, weight, now)
        model.pop(key, None)
        model[key] = (weight, now)
        while len(model) > max_entries or sum(each for each, _ in model.values()) > max_weight:
            del model[next(iter(model))]
        model = {each: told for each, told in model.items() if told[1] > now - 100.0}
        assert {each: kept.get(each) for each in model} == {each: told[0] for each, told in model.items()}
        assert len(kept) == len(model)
