"""Which of several models are loaded: single decisions, and a day of random requests in which none waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from blockyard.switching.policy import Act, Limits, ModelState, Phase, decide

if TYPE_CHECKING:
    from collections.abc import Mapping

LOAD_SECONDS, END_SECONDS = 3, 1


def loaded(name: str, requests: int = 0, *, used_at: float = 0.0, since: float = 0.0) -> ModelState:
    return ModelState(name, Phase.LOADED, requests, used_at, since)


def waiting(name: str, since: float = 0.0) -> ModelState:
    return ModelState(name, Phase.UNLOADED, 1, since, since)


def test_a_model_is_loaded_into_a_free_place_at_its_first_request() -> None:
    unused = ModelState("unused", Phase.UNLOADED, 0, 0.0, inf)
    assert decide([loaded("a", 1), unused, waiting("b")], 1.0, Limits(2)) == [(Act.LOAD, "b")]


def test_who_waits_longest_comes_first() -> None:
    models = [waiting("late", 2.0), waiting("early", 1.0), loaded("busy", 1, since=inf)]
    assert decide(models, 3.0, Limits(2)) == [(Act.LOAD, "early")]


def test_the_model_that_is_idle_for_longest_gives_its_place_up() -> None:
    models = [loaded("recent", used_at=5.0), loaded("old", used_at=4.0), waiting("b", 6.0)]
    assert decide(models, 6.0, Limits(2)) == [(Act.UNLOAD, "old")]


def test_a_place_that_becomes_free_is_not_asked_for_twice() -> None:
    for leaving in (Phase.ENDING, Phase.HELD):
        models = [ModelState("old", leaving, 0, 0.0, 0.0), loaded("idle"), waiting("b")]
        assert decide(models, 1.0, Limits(2)) == []


def test_a_busy_model_is_held_after_its_turn_and_unloaded_once_it_is_drained() -> None:
    limits = Limits(1, turn_seconds=10.0)
    assert decide([loaded("a", 5, since=0.0), waiting("b")], 9.9, limits) == []
    assert decide([loaded("a", 5, since=0.0), waiting("b")], 10.0, limits) == [(Act.HOLD, "a")]
    held = ModelState("a", Phase.HELD, 5, 10.0, 10.0)
    assert decide([held, waiting("b")], 19.9, limits) == []
    assert decide([held, waiting("b")], 20.0, limits) == [(Act.UNLOAD, "a")], "answers that do not end wait too"
    drained = ModelState("a", Phase.HELD, 5, 10.0, 10.0, is_drained=True)
    assert decide([drained, waiting("b")], 10.1, limits) == [(Act.UNLOAD, "a")]


def test_a_model_that_is_still_loading_keeps_its_place() -> None:
    assert decide([loaded("a", 5, since=inf), waiting("b")], 1000.0, Limits(1)) == []


def test_an_idle_model_is_unloaded_after_a_while_if_that_is_wanted() -> None:
    models = [loaded("busy", 1, used_at=9.0), loaded("idle", used_at=1.0)]
    assert decide(models, 9.0, Limits(2)) == []
    assert decide(models, 9.0, Limits(2, idle_unload_seconds=9.0)) == []
    assert decide(models, 10.0, Limits(2, idle_unload_seconds=9.0)) == [(Act.UNLOAD, "idle")]


@dataclass
class World:
    """Models that load, compute and end, second by second: a request takes a second of its loaded model's time."""

    limits: Limits
    work: dict[str, list[int]]
    now: int = 0
    phases: dict[str, Phase] = field(default_factory=dict[str, Phase])
    since: dict[str, float] = field(default_factory=dict[str, float])
    used_at: dict[str, float] = field(default_factory=dict[str, float])
    done_at: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        for name in self.work:
            self.phases[name], self.since[name], self.used_at[name] = Phase.UNLOADED, inf, 0.0

    def state(self, name: str) -> ModelState:
        num_requests = len(self.work[name])
        if num_requests:
            self.used_at[name] = self.now
        if self.phases[name] is Phase.UNLOADED:
            self.since[name] = min(self.since[name], self.now) if num_requests else inf
        # The answers under way end within two seconds.
        is_drained = self.phases[name] is Phase.HELD and self.now - self.since[name] >= 2
        return ModelState(
            name, self.phases[name], num_requests, self.used_at[name], self.since[name], is_drained=is_drained
        )

    def step(self, arrivals: Mapping[str, int]) -> None:
        """One second: requests arrive, the policy decides, processes start and end, a request of each model is done."""
        self.now += 1
        for name, number in arrivals.items():
            self.work[name] += [self.now] * number
        for name, done_at in list(self.done_at.items()):
            if done_at <= self.now:
                del self.done_at[name]
                is_ending = self.phases[name] is Phase.ENDING
                self.phases[name] = Phase.UNLOADED if is_ending else Phase.LOADED
                self.since[name] = inf if is_ending else self.now
        for name, phase in self.phases.items():
            if phase is Phase.LOADED and self.since[name] < inf and self.work[name]:
                self.work[name].pop(0)
        states = [self.state(name) for name in self.work]
        for act, name in decide(states, self.now, self.limits):
            self.apply(act, name)
        assert sum(phase is not Phase.UNLOADED for phase in self.phases.values()) <= self.limits.num_places

    def apply(self, act: Act, name: str) -> None:
        was = self.phases[name]
        if act is Act.LOAD:
            assert was is Phase.UNLOADED
            assert self.work[name], "nobody asked for it"
            self.phases[name], self.since[name] = Phase.LOADED, inf
            self.done_at[name] = self.now + LOAD_SECONDS
        elif act is Act.HOLD:
            assert was is Phase.LOADED
            assert self.since[name] < inf, "it has not answered anything yet"
            self.phases[name], self.since[name] = Phase.HELD, self.now
        else:
            assert was in (Phase.LOADED, Phase.HELD)
            self.phases[name], self.since[name] = Phase.ENDING, inf
            self.done_at[name] = self.now + END_SECONDS

    @property
    def longest_wait(self) -> float:
        """The longest time for which an unloaded model has had requests until now."""
        return max(
            (self.now - self.since[name] for name, phase in self.phases.items() if phase is Phase.UNLOADED),
            default=-inf,
        )


NAMES = ("a", "b", "c", "d")


@given(
    st.integers(1, 4),
    st.sampled_from([0.0, 4.0]),
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3)), min_size=20, max_size=150),
)
def test_every_model_gets_its_turn_whatever_arrives(
    num_places: int, idle_seconds: float, arrivals: list[dict[str, int]]
) -> None:
    turn_seconds = 5.0
    world = World(Limits(num_places, idle_seconds, turn_seconds), {name: [] for name in NAMES})
    # Each of the others may be loaded before, keep its place for a turn, take another one to drain, and end.
    rounds = -(-(len(NAMES) - num_places) // num_places) + 1
    longest = rounds * (LOAD_SECONDS + 2 * turn_seconds + END_SECONDS + 3)
    for each in arrivals:
        world.step(each)
        assert world.longest_wait <= longest
    deadline = world.now + 1000
    while any(world.work.values()):
        assert world.now < deadline, "all are answered"
        world.step({})
    # Longer than a model that idles is kept, drains and ends.
    for _ in range(50):
        world.step({})
    assert not idle_seconds or set(world.phases.values()) == {Phase.UNLOADED}


def test_models_that_are_always_busy_take_turns() -> None:
    """Three models, two places, and more requests for each than are ever done."""
    world = World(Limits(2, turn_seconds=5.0), {name: [] for name in NAMES[:3]})
    seconds_loaded = dict.fromkeys(world.work, 0)
    for _ in range(600):
        world.step(dict.fromkeys(world.work, 2))
        for name, phase in world.phases.items():
            seconds_loaded[name] += phase is Phase.LOADED and world.since[name] < inf
    assert min(seconds_loaded.values()) > 0.9 * max(seconds_loaded.values())
