"""What went wrong elsewhere (rule 10 of checkpoints under pressure): Flink's issues, and the tests that show it does not here."""

from __future__ import annotations

GATE = "tests/barriers/alignment/test_overtaking.py"
OUTPUT = "tests/barriers/exchange/test_output_overtaking.py"
TASK = "tests/operators/task/test_urgent_barriers.py"
EDGES = "tests/operators/datastream/test_overtaking.py"
RESTORE = "tests/coordinator/restore/test_in_flight.py"
COORDINATOR = "tests/coordinator/checkpoints/test_checkpoint_coordinator.py"
DEBLOAT = "tests/barriers/exchange/test_debloat.py"
BACKLOG = "tests/coordinator/checkpoints/test_backlog.py"
JOB = "tests/operators/worker/test_loop.py"

KNOWN_FAILURES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "wrong channels or buffers stored, with two gates, old barriers, cancellations": (
        (18139, 20645, 20654),
        (
            "tests/barriers/alignment/test_gate_model.py::test_the_gate_does_what_the_rules_say",
            f"{GATE}::test_state_and_in_flight_data_are_all_in_front_of_the_barrier",
            f"{OUTPUT}::test_what_is_no_record_of_the_past_is_not_stored",
        ),
    ),
    "abort raced with collecting; late result; task failed as subsumed": (
        (17869, 20331, 28474),
        (
            f"{GATE}::test_an_abort_before_the_first_barrier_lets_it_overtake_nothing",
            f"{GATE}::test_c14_an_abort_while_channels_are_collected_leaves_nothing",
            f"{OUTPUT}::test_one_that_is_aborted_or_replaced_overtakes_nothing_any_more",
            f"{TASK}::test_an_abort_forgets_what_was_collected_and_the_next_checkpoint_is_clean",
            f"{TASK}::test_an_abort_behind_the_acknowledgement_leaves_the_next_checkpoint_clean",
            f"{TASK}::test_a_checkpoint_that_is_given_up_while_its_hook_runs_is_answered_once",
            f"{TASK}::test_barriers_of_two_checkpoints_leave_a_turn_to_others",
        ),
    ),
    "a savepoint overtook data; savepoint beside a pending unaligned one": (
        (18252, 17342),
        (
            f"{GATE}::test_c15_a_savepoint_aligns_where_checkpoints_overtake",
            f"{GATE}::test_d13_savepoints_between_checkpoints_that_switch",
            f"{OUTPUT}::test_a_savepoint_behind_it_keeps_no_barrier_from_overtaking",
            f"{COORDINATOR}::test_only_checkpoints_are_told_that_they_may_overtake",
            f"{COORDINATOR}::test_nothing_that_may_overtake_is_triggered_beside_another_or_beside_a_savepoint",
        ),
    ),
    "broadcast and committables overtaken; then all edges disabled; timeout ignored the ban": (
        (22815, 36287, 37870, 33693),
        (
            f"{EDGES}::test_the_partitioning_and_the_columns_decide",
            f"{EDGES}::test_one_edge_in_line_holds_all_edges_into_the_same_vertex",
            f"{EDGES}::test_other_edges_of_the_job_are_overtaken_still",
            f"{EDGES}::test_committables_stay_in_line_whatever_the_parallelism",
            f"{OUTPUT}::test_an_edge_in_line_is_not_overtaken_whatever_the_barrier_says",
            f"{JOB}::test_c18_barriers_stay_in_line_on_edges_that_can_not_be_dealt_out_again",
        ),
    ),
    "rescale lost or refused data: stateless operators, mixed edges": (
        (31963, 38267, 35351),
        (
            f"{RESTORE}::test_channels_without_keys_go_round_whatever_the_parallelism_was",
            f"{RESTORE}::test_each_row_by_key_is_restored_once_and_in_order",
            f"{RESTORE}::test_each_edge_is_dealt_out_by_itself",
            f"{RESTORE}::test_mixed_edges_are_dealt_out_at_any_parallelism",
        ),
    ),
    "merged channels' watermark dropped records as late; rare loss at 7 -> 2": (
        (40517, 38544),
        (
            f"{RESTORE}::test_each_row_by_key_is_restored_once_and_in_order",
            "tests/operators/task/test_restored_event_time.py::test_its_own_event_time_unless_the_job_was_rescaled",
            "tests/operators/functions/windows/test_kept_watermark.py::test_the_highest_of_all_is_restored_and_the_lowest_where_records_are_in_flight",
        ),
    ),
    "barrier stuck in the producer's queue; type shown wrong": (
        (27251, 31588),
        (
            f"{OUTPUT}::test_a_barrier_that_waits_overtakes_at_its_age_and_says_so",
            f"{JOB}::test_barriers_overtake_full_queues_at_either_end",
            "tests/coordinator/test_stats.py::test_a_checkpoint_is_unaligned_if_a_subtask_was_and_tells_what_was_stored_in_flight",
        ),
    ),
    "long timers held barriers; barriers held the watermark, alarms starved": (
        (20217, 40101, 39898),
        (
            f"{TASK}::test_timers_that_a_barrier_interrupts_go_on_and_their_watermark_leaves_behind_them",
            f"{TASK}::test_however_many_barriers_come_timers_fire_alarms_do_and_the_watermark_leaves",
        ),
    ),
    "tiny buffers blocked, could not grow": (
        (33077, 36555, 24690),
        (
            f"{DEBLOAT}::test_it_grows_back_from_the_floor_within_five_periods",
            f"{DEBLOAT}::test_growth_does_not_wait_for_the_look_and_is_not_taken_back",
            "tests/barriers/exchange/test_channels.py::test_no_frame_is_above_a_quarter_unless_it_is_one_row",
        ),
    ),
    "first checkpoint ignored the backlog interval": (
        (39108,),
        (
            f"{BACKLOG}::test_with_interval_0_none_begins_from_the_start_and_the_end_brings_one_at_once",
            f"{BACKLOG}::test_the_backlog_interval_holds_from_the_first_checkpoint_on",
        ),
    ),
}
"""What happened -> (FLINK-n, tests)."""
