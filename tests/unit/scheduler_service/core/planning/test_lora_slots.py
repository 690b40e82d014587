"""Adapters in slots: who begins, who passes whom, and that nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.blocks.prefix_lookup import hash_block
from tests.unit.scheduler_service.core.harness import Bench, configure, make_lora, make_spec

PATIENCE = 3.0
LONGEST = 8
# Of a step that is in flight, and of the one that a prompt takes.
SLACK = 3


def make_bench(max_loras: int = 1, **changes: object) -> Bench:
    sizes = {"num_device_blocks": 400, "max_num_seqs": 100, "max_num_batched_tokens": 2000, **changes}
    return Bench(configure(max_loras=max_loras, lora_patience_seconds=PATIENCE, **sizes))


def running(bench: Bench) -> list[str]:
    return sorted(sequence.group.spec.request_id for sequence in bench.scheduler._queues.running)


def test_adapters_come_into_slots_as_sequences_begin() -> None:
    bench = make_bench(2)
    for name, lora_id in (("a", 7), ("b", 9), ("base", 0), ("a2", 7)):
        bench.add(make_spec(name, lora_id=lora_id))
    step = bench.step()
    assert step.activated_loras == ((0, 7), (1, 9))
    assert running(bench) == ["a", "a2", "b", "base"]
    assert bench.step().activated_loras == ()
    bench.run()
    bench.check_tokens()


def test_an_adapter_stays_in_its_slot_until_another_needs_it() -> None:
    bench = make_bench(1)
    bench.add(make_spec("a", lora_id=1))
    bench.run()
    bench.add(make_spec("a2", lora_id=1))
    assert bench.step().activated_loras == ()
    bench.run()
    bench.add(make_spec("b", lora_id=2))
    assert bench.step().activated_loras == ((0, 2),)
    assert bench.scheduler.lora_slots.resident_ids == [2]


def test_what_needs_no_slot_passes_one_that_waits_for_one() -> None:
    bench = make_bench(1)
    bench.add(make_spec("a", lora_id=1, max_tokens=5))
    bench.step()
    for number in range(20):
        bench.add(make_spec(f"b{number}", lora_id=2 + number))
    bench.add(make_spec("base"))
    bench.add(make_spec("a2", lora_id=1))
    bench.step()
    assert running(bench) == ["a", "a2", "base"]
    bench.run()
    bench.check_tokens()


def flood(bench: Bench, lora_id: int, num_steps: int) -> None:
    """A request of an adapter with every step, so that some of it always run."""
    for _ in range(num_steps):
        bench.add(make_spec(f"flood-{lora_id}-{bench.now}", 2, LONGEST, lora_id=lora_id))
        bench.step()
        bench.now += 1


def test_who_is_passed_for_longer_than_the_patience_has_one_drained() -> None:
    bench = make_bench(1)
    flood(bench, 1, 3)
    bench.add(make_spec("b", lora_id=2))
    flood(bench, 1, int(PATIENCE))
    assert "b" not in running(bench)
    flood(bench, 1, LONGEST + SLACK)
    assert running(bench) == ["b"], "no sequence of the other one begins before"
    assert PATIENCE <= bench.scheduler.lora_slots.passed_seconds["adapter-2"] <= PATIENCE + LONGEST + SLACK


def test_the_one_that_will_be_done_first_is_drained() -> None:
    bench = make_bench(2)
    bench.add(make_spec("long", lora_id=1, max_tokens=60))
    bench.add(make_spec("short", lora_id=2, max_tokens=20))
    bench.step()
    bench.now = 10.0
    bench.add(make_spec("b", lora_id=3))
    bench.step()
    bench.now += PATIENCE
    bench.step()
    bench.add(make_spec("long2", lora_id=1))
    bench.add(make_spec("short2", lora_id=2))
    bench.step()
    assert running(bench) == ["long", "long2", "short"]
    bench.run()
    bench.check_tokens()


def test_a_claim_ends_with_who_made_it() -> None:
    bench = make_bench(1)
    bench.add(make_spec("a", lora_id=1, max_tokens=60))
    bench.step()
    bench.now = 10.0
    bench.add(make_spec("b", lora_id=2))
    bench.step()
    bench.now += PATIENCE
    bench.step()
    bench.add(make_spec("a2", lora_id=1))
    bench.step()
    assert running(bench) == ["a"]
    bench.scheduler.abort("b")
    bench.step()
    assert running(bench) == ["a", "a2"]


def test_one_that_gave_way_comes_back_to_its_adapter_though_it_is_drained() -> None:
    bench = make_bench(1, num_device_blocks=5, preemption_mode="recompute", max_num_seqs=4, max_num_batched_tokens=16)
    bench.add(make_spec("a", 7, 6, lora_id=1))
    bench.add(make_spec("b", 4, 6, lora_id=1))
    bench.add(make_spec("c", 4, 6, lora_id=2))
    for _ in range(4):
        bench.step()
        bench.now += PATIENCE
    assert bench.scheduler.stats().num_preemptions_total
    bench.run()
    bench.check_tokens()


def test_with_its_worker_lost_all_slots_are_empty() -> None:
    bench = make_bench(2)
    bench.add(make_spec("a", lora_id=4, max_tokens=20))
    bench.step()
    bench.lose_worker()
    assert bench.scheduler.lora_slots.resident_ids == []
    assert bench.step().activated_loras == ((0, 4),)
    bench.run()
    bench.check_tokens()


def test_children_and_beams_have_their_parents_adapter() -> None:
    bench = make_bench(1)
    bench.add(make_spec("a", lora_id=1, n=3))
    bench.add(make_spec("b", lora_id=2))
    bench.run()
    bench.check_tokens()


def test_kv_is_found_again_by_the_adapters_content_and_no_other() -> None:
    bench = make_bench(3)
    prompt = tuple(range(12))
    for name, lora_id, num_cached in (("base", 0, 0), ("a", 1, 0), ("base2", 0, 8), ("a2", 1, 8), ("b", 2, 0)):
        bench.add(make_spec(name, prompt, 2, lora_id=lora_id))
        bench.run()
        assert bench.prefilled[name] // 8 * 8 == num_cached, name
    assert hash_block(b"", prompt, make_lora(1).digest) != hash_block(b"", prompt)


def test_one_of_each_adapter_that_waits_is_taken_in() -> None:
    bench = make_bench(1)
    bench.add(make_spec("a", lora_id=1, max_tokens=20))
    bench.step()
    room = bench.scheduler.find_room()
    assert room.takes(4, 1, 1)
    assert room.takes(4, 1, 0)
    assert room.takes(4, 1, 2)
    room.take(4, 1, lora_id=2)
    assert not room.takes(4, 1, 2)
    assert room.takes(4, 1, 3)
    bench.add(make_spec("b", lora_id=2))
    assert not bench.scheduler.find_room().takes(4, 1, 2), "one waits there already"


@settings(max_examples=60, deadline=None)
@given(
    max_loras=st.integers(1, 3),
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(1, LONGEST)), min_size=1, max_size=25
    ),
    flooding=st.sets(st.integers(1, 5), max_size=3),
    depth=st.integers(1, 2),
)
def test_every_request_begins_in_its_turn(
    max_loras: int, arrivals: list[tuple[int, int, int]], flooding: set[int], depth: int
) -> None:
    """Within its patience and the longest running, where fewer adapters wait than there are slots, and so on."""
    bench = make_bench(max_loras)
    adapters: dict[str, int] = {}
    latest: dict[str, float] = {}
    begun: set[str] = set()

    def add(lora_id: int, max_tokens: int) -> None:
        name = f"r{len(adapters)}"
        adapters[name] = lora_id
        bench.add(make_spec(name, 2, max_tokens, lora_id=lora_id), bench.now)

    for second in range(31 + 5 * int(PATIENCE + LONGEST + SLACK)):
        for _, lora_id, max_tokens in (each for each in arrivals if each[0] == second):
            add(lora_id, max_tokens)
        for lora_id in flooding if second < 31 else ():
            add(lora_id, LONGEST)
        waiting = {adapters[name] for name in adapters.keys() - begun}
        for name in adapters.keys() - latest.keys():
            num_rounds = 1 + len(waiting - {adapters[name]}) // max_loras
            latest[name] = bench.now + num_rounds * (PATIENCE + LONGEST + SLACK)
        while len(bench.in_flight) < depth and bench.scheduler.can_schedule() and (step := bench.schedule()):
            begun |= {new.spec.request_id for new in step.new_sequences}
            used = {bench.worker.rows[key].spec.lora_id for key in step.sequence_ids if key in bench.worker.rows}
            assert len(used - {0}) <= max_loras + 1
        assert not [name for name in adapters if name not in begun and latest[name] < bench.now]
        if bench.in_flight:
            bench.answer()
        bench.now += 1
    bench.run(depth)
    bench.check_tokens()
    bench.scheduler.check_integrity()
