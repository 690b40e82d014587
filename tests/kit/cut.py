"""Lists the cases that `make test` leaves to `make whole`, so that it ends in minutes on two cores.

A function that is listed keeps one of each group of so many successive cases, not always the same place of the group: a
parameter with as many values comes up with each value of the others. 0: `make whole` alone has the function.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

CASES: dict[str, dict[str, int]] = {
    "tests/kernels/test_families.py": {
        "test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule": 4,
        "test_two_ranks_give_the_bits_of_one": 2,
    },
    "tests/kernels/test_family_fields.py": {"test_a_field_counts_as_in_transformers_or_is_refused": 4},
    "tests/kernels/test_truth.py": {"test_greedy_decoding_picks_the_winners_of_transformers": 4},
    "tests/kernels/test_exactness.py": {
        "test_every_schedule_gives_the_same_bits": 2,
        "test_threads_block_sizes_and_places_do_not_matter": 2,
    },
    "tests/kernels/test_transformers_code.py": {
        "test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule": 3
    },
    "tests/kernels/test_beam_search.py": {"test_it_is_the_beam_search_of_transformers": 3},
    "tests/kernels/test_pooling.py": {
        "test_encoders_are_those_of_transformers_and_the_same_bits_beside_others": 3,
        "test_numbers_are_those_of_transformers_and_the_same_bits_under_any_schedule": 3,
    },
    "tests/kernels/test_windows.py": {"test_what_is_given_back_is_not_missed": 3},
    "tests/kernels/test_reference_linear.py": {
        "test_what_the_probe_says_of_rows_holds_for_counts_that_it_did_not_try": 3
    },
    "tests/kernels/triton/test_self_test.py": {
        "test_right_kernels_pass": 3,
        "test_others_are_told_and_not_taken": 2,
    },
    "tests/kernels/triton/test_families.py": {"test_logits_are_those_of_the_reference_in_pieces_and_beside_others": 5},
    "tests/kernels/triton/test_network.py": {"test_logits_are_those_of_the_reference": 2},
    "tests/kernels/triton/test_oracle.py": {"test_any_way_gives_the_tokens_of_running_alone": 0},
    "tests/kernels/triton/test_warm_up.py": {"test_no_step_waits_for_a_compiler": 0},
    "tests/kernels/triton/test_rotary.py": {"test_rotations_and_what_they_write_are_the_references": 4},
    "tests/kernels/triton/test_attention.py": {"test_a_row_has_the_same_bits_alone_and_in_company": 3},
    "tests/kernels/triton/test_quantized.py": {"test_products_in_int8_are_the_bits_of_the_definition": 2},
    "tests/kernels/triton/test_hopper.py": {
        "test_the_other_ops_compile_and_fit": 0,
        "test_products_of_adapters_compile_and_fit_and_use_the_matrix_instructions": 0,
    },
    "tests/kernels/triton/test_linear.py": {"test_the_library_serves_where_its_rows_and_columns_keep_their_bits": 4},
    "tests/kernels/test_encoder_fields.py": {"test_a_field_counts_as_in_transformers_or_is_refused": 2},
    "tests/unit/worker_service/models/test_capacity.py": {"test_weights_are_counted_to_the_byte": 3},
    "tests/integration/deploy/test_rendered.py": {"test_what_is_rendered_keeps_to_every_rule": 3},
    "tests/integration/worker_service/steps/test_rank_schedules.py": {
        "test_any_number_of_ranks_gives_the_answers_of_running_alone_on_one": 2
    },
    "tests/integration/test_windows.py": {"test_the_reference_kernels_keep_the_promise_too": 0},
    "tests/integration/benchmarks/groups/test_rank_speed.py": {"test_each_way_is_measured": 0},
    "tests/integration/test_master_oracle.py": {"test_the_reference_kernels_keep_the_promise_too": 0},
    "tests/integration/scheduler_service/replicas/test_wrong_answers.py": {
        "test_whatever_one_worker_says_the_other_serves_on": 2
    },
    "tests/integration/benchmarks/test_gpu_day.py": {"test_a_dry_day_leaves_every_result": 0},
    "tests/integration/benchmarks/test_host_cost.py": {"test_every_process_costs_something": 0},
    "tests/integration/benchmarks/test_start.py": {"test_workers_start_in_stages": 0},
    "tests/unit/benchmarks/test_ceilings.py": {"test_measures_every_ceiling": 3},
}


def cut(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cases that `CASES` leaves out, unless a test is named or BLOCKYARD_TEST_WHOLE is set."""
    if os.environ.get("BLOCKYARD_TEST_WHOLE") or any("::" in arg for arg in config.args):
        return
    seen, kept, left = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        name, _, _ = item.nodeid.partition("[")
        path, _, function = name.partition("::")
        every = CASES.get(path, {}).get(function, 1)
        group, place = divmod(seen[name], max(every, 1))
        seen[name] += 1
        (kept if every and place == group % every else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
