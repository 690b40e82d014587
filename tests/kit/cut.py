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
        "test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule": 12,
        "test_two_ranks_give_the_bits_of_one": 4,
    },
    "tests/kernels/test_family_fields.py": {"test_a_field_counts_as_in_transformers_or_is_refused": 12},
    "tests/kernels/test_truth.py": {
        "test_greedy_decoding_picks_the_winners_of_transformers": 8,
        "test_float32_logits_are_those_of_transformers": 3,
        "test_half_float_logits_are_as_good_as_those_of_transformers": 3,
    },
    "tests/kernels/test_exactness.py": {
        "test_every_schedule_gives_the_same_bits": 4,
        "test_every_schedule_gives_the_same_bits_replayed_or_not": 4,
        "test_plain_torch_fails_the_battery": 2,
        "test_threads_block_sizes_and_places_do_not_matter": 4,
    },
    "tests/kernels/test_transformers_code.py": {
        "test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule": 6
    },
    "tests/kernels/test_poison.py": {"test_a_bad_weight_is_told_of_in_a_piece_of_any_length": 3},
    "tests/kernels/test_quantized_models.py": {
        "test_schedules_do_not_matter_and_logits_are_near_those_of_the_plain_weights": 3
    },
    "tests/kernels/test_int8_network.py": {"test_schedules_do_not_matter": 3},
    "tests/kernels/test_cpu_sampling.py": {
        "test_what_is_filtered_is_the_winner_among_those_that_pass": 3,
        "test_a_draw_is_the_winner_of_the_race": 3,
        "test_the_first_token_is_the_largest_with_the_lowest_id": 3,
        "test_tokens_without_a_bit_become_impossible_and_nothing_else_changes": 3,
    },
    "tests/kernels/test_attention.py": {
        "test_any_mix_of_pieces_and_decodes": 3,
        "test_a_row_is_the_same_bits_in_a_piece_and_alone": 3,
        "test_blocks_of_every_size_with_lengths_at_their_edges": 3,
        "test_scores_that_are_not_finite_show_where_the_reference_shows_them": 2,
        "test_scores_are_capped_and_sinks_take_their_share": 3,
        "test_caps_and_sinks_keep_the_bits_of_rows": 3,
    },
    "tests/kernels/test_linear.py": {
        "test_it_multiplies": 3,
        "test_a_gated_weight_gives_the_activated_rows": 3,
        "test_wide_results_are_float32": 3,
    },
    "tests/kernels/test_elementwise.py": {
        "test_a_part_of_a_head_is_rotated": 3,
        "test_rotary_and_cache": 3,
        "test_every_activation_of_numbers_of_every_size": 3,
        "test_a_row_is_the_same_bits_wherever_it_stands": 2,
    },
    "tests/kernels/test_packing.py": {"test_rows_are_the_columns_of_panels": 5},
    "tests/kernels/test_pools.py": {"test_the_first_and_the_last_block_end_where_they_end": 3},
    "tests/kernels/test_quantized_weights.py": {"test_the_bits_of_four_are_those_of_the_definition": 3},
    "tests/kernels/test_int8.py": {"test_the_bits_are_those_of_the_definition": 3},
    "tests/kernels/test_leaves.py": {"test_any_number_of_devices_comes_to_the_same_bits": 3},
    "tests/kernels/test_captured.py": {"test_a_replay_gives_the_bits_of_the_ops_one_by_one": 2},
    "tests/kernels/test_beam_search.py": {"test_it_is_the_beam_search_of_transformers": 6},
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
    "tests/kernels/triton/test_families.py": {"test_logits_are_those_of_the_reference_in_pieces_and_beside_others": 10},
    "tests/kernels/triton/test_network.py": {
        "test_logits_are_those_of_the_reference": 2,
        "test_logits_with_adapters_are_those_of_the_reference": 0,
    },
    "tests/kernels/triton/test_lora.py": {"test_rows_get_what_their_adapters_add": 3},
    "tests/kernels/triton/test_oracle.py": {"test_any_way_gives_the_tokens_of_running_alone": 0},
    "tests/kernels/triton/test_warm_up.py": {"test_no_step_waits_for_a_compiler": 0},
    "tests/kernels/triton/test_gemm.py": {"test_products_are_those_of_float64": 3},
    "tests/kernels/triton/test_norms.py": {"test_norms_are_the_references": 3},
    "tests/kernels/triton/test_rotary.py": {"test_rotations_and_what_they_write_are_the_references": 4},
    "tests/kernels/triton/test_attention.py": {"test_a_row_has_the_same_bits_alone_and_in_company": 3},
    "tests/kernels/triton/test_quantized.py": {"test_products_in_int8_are_the_bits_of_the_definition": 2},
    "tests/kernels/triton/test_hopper.py": {
        "test_the_other_ops_compile_and_fit": 0,
        "test_products_of_adapters_compile_and_fit_and_use_the_matrix_instructions": 0,
    },
    "tests/kernels/triton/test_linear.py": {"test_the_library_serves_where_its_rows_and_columns_keep_their_bits": 4},
    "tests/kernels/test_encoder_fields.py": {"test_a_field_counts_as_in_transformers_or_is_refused": 2},
    "tests/unit/gateway/dialects/test_dialects.py": {
        "test_what_comes_out_depends_on_what_came_alone": 3,
        "test_broken_calls_come_out_alike_from_whatever_has_come": 3,
    },
    "tests/unit/gateway/fronts/http/test_wrong_bodies.py": {"test_of_many_wrong_entries_few_are_told": 3},
    "tests/unit/gateway/fronts/openai/test_resume.py": {
        "test_a_stream_goes_on_behind_any_of_its_events": 3,
        "test_a_stream_goes_on_behind_any_of_its_events_where_nobody_remembers_it": 3,
    },
    "tests/unit/gateway/grammars/test_calls.py": {"test_a_model_that_must_call_calls": 3},
    "tests/unit/kit/test_protocol_spec.py": {"test_a_planted_mistake_is_found": 3},
    "tests/unit/worker_service/sampling/test_sampler.py": {
        "test_a_penalty_at_the_ends_of_its_range_leaves_the_others_alone": 3
    },
    "tests/unit/worker_service/models/test_capacity.py": {
        "test_weights_are_counted_to_the_byte": 6,
        "test_the_arena_of_a_step_is_bounded": 3,
    },
    "tests/integration/deploy/test_rendered.py": {
        "test_what_is_rendered_keeps_to_every_rule": 6,
        "test_what_is_rendered_has_the_labels_of_kubernetes": 3,
        "test_what_is_rendered_can_be_applied_over_the_demo_and_back": 3,
    },
    "tests/integration/kit/simulation/test_repetition.py": {"test_a_seed_repeats": 3},
    "tests/integration/test_chat.py": {"test_a_prompt_is_the_one_that_transformers_makes": 3},
    "tests/integration/simulation/test_planted.py": {"test_a_planted_mistake_is_found": 2},
    "tests/integration/worker_service/steps/test_rank_schedules.py": {
        "test_any_number_of_ranks_gives_the_answers_of_running_alone_on_one": 5
    },
    "tests/integration/test_model_kinds.py": {"test_answers_are_those_of_running_alone": 2},
    "tests/integration/test_windows.py": {"test_the_reference_kernels_keep_the_promise_too": 0},
    "tests/integration/benchmarks/groups/test_rank_speed.py": {"test_each_way_is_measured": 0},
    "tests/integration/test_master_oracle.py": {
        "test_any_way_gives_the_answers_of_running_alone": 2,
        "test_the_reference_kernels_keep_the_promise_too": 0,
    },
    "tests/integration/simulation/test_simulation.py": {"test_seeds_keep_every_promise": 2},
    "tests/integration/scheduler_service/replicas/test_wrong_answers.py": {
        "test_whatever_one_worker_says_the_other_serves_on": 4
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
