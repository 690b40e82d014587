"""A short cut of benchmarks/gateway/burst.py: two thousand streams at once, on a gateway and a fake scheduler."""

from __future__ import annotations

from benchmarks.gateway import burst

NUM_STREAMS, NUM_TAKEN = 2_000, 1_700


def test_thousands_at_once_are_whole_and_what_is_too_much_is_queue_full_with_a_time_to_try_again() -> None:
    flags = [f"--streams={NUM_STREAMS}", f"--max-requests={NUM_TAKEN}", "--connections=20", "--tokens=3"]
    told = burst.measure(burst.parse(flags))
    num_refused = NUM_STREAMS - NUM_TAKEN
    assert told["ends"] == {"whole": NUM_TAKEN, "RESOURCE_EXHAUSTED QUEUE_FULL": num_refused}
    assert told["num_retry_infos"] == num_refused
    assert told["num_tokens"] == 3 * NUM_TAKEN
    assert told["num_scheduler_losses"] == 0
