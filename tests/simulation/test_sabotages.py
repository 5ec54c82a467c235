"""Each sabotage in a scene that makes it show: a checker catches it, with an invariant that it is expected to break, and the
same run holds without it. `make test` shows enough of them that each invariant and each workload has one; `make chaos` shows all,
and looks for each over drawn faults, without a scene."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cli import make_campaign
from holdfast.chaos.cluster.results import ViolationRecord
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.faults.faults import Fault, check_plan
from holdfast.chaos.sabotage import SABOTAGES
from holdfast.chaos.sabotage.base import throughout

SEEDS_MAX = 12
"""Seeds from the first one of a scene on; the first ones of all have been seen to do, until a workload draws otherwise. Scenes of
a workload share a seed where one shows several sabotages: half of the time goes to runs without them."""


def at(ms: int, kind: str, target: str = "", *, amount: int = 0, duration_ms: int = 0) -> Fault:
    return Fault(kind, target, at_ms=ms, amount=amount, duration_ms=duration_ms)


@dataclass(frozen=True, slots=True)
class Scene:
    """A job and what goes wrong in it."""

    workload: str
    plan: tuple[Fault, ...] = ()
    first: int = 0
    """Seed."""
    backend: str | None = None
    """State backend instead of the workload's."""


def drawn(name: str, *, first: int) -> Scene:
    """The faults that it brings, in the first of its workloads."""
    sabotage = SABOTAGES[name]
    assert sabotage.plan is not None
    return Scene(sabotage.workloads[0], sabotage.plan, first, sabotage.backend)


UNEVEN_LINKS = throughout("slow_link", "all", amount=10, probability=0.5)
SLOW_LINKS = throughout("slow_link", "all", amount=30, probability=0.5)
SLOW_WRITES = throughout("store_slow", "worker:WriteFile", amount=60)
UPLOADS_FAIL = throughout("store_fails", "worker:UploadFile", probability=0.1)
FORGED = throughout("forged_ack", "workers", probability=0.5)
COUNT_FAILS = at(600, "user_error", "count")
COORDINATOR_DIES = at(600, "kill_coordinator", amount=1)
WORKERS_DIE = tuple(at(ms, "kill_worker", "workers") for ms in (400, 700, 1_000))
SAVEPOINT = at(500, "savepoint")
STOP = at(500, "restore")
RESCALE = at(500, "rescale", amount=3)

SCENES = {
    "queue_not_stored": drawn("queue_not_stored", first=3),
    "output_not_stored": drawn("output_not_stored", first=3),
    "remainder_not_stored": drawn("remainder_not_stored", first=1),
    "wire_not_stored": drawn("wire_not_stored", first=3),
    "stored_behind_barrier": drawn("stored_behind_barrier", first=3),
    "unfiltered_rescale": drawn("unfiltered_rescale", first=0),
    "forgotten_channel": drawn("forgotten_channel", first=13),
    "restored_behind_new": drawn("restored_behind_new", first=3),
    "merged_watermarks": drawn("merged_watermarks", first=0),
    "overtaken_broadcast": drawn("overtaken_broadcast", first=1),
    "overtaken_committables": drawn("overtaken_committables", first=3),
    "overtaking_savepoint": drawn("overtaking_savepoint", first=1),
    "hasty_collection": drawn("hasty_collection", first=3),
    "kept_leftovers": drawn("kept_leftovers", first=11),
    "switch_after_cancel": drawn("switch_after_cancel", first=0),
    "unlimited_in_flight": drawn("unlimited_in_flight", first=16),
    "event_time_of_another": drawn("event_time_of_another", first=8),
    "hasty_shrinking": drawn("hasty_shrinking", first=1),
    "unblocked_channel": Scene("windows", (UNEVEN_LINKS,), 1),
    "hasty_alignment": Scene("windows", (UNEVEN_LINKS,), 1),
    "overtaking_barrier": Scene("timers", (at(600, "user_error", "reorder"),), 9),
    "fastest_watermark": Scene("windows", first=7),
    "fastest_input": Scene("connected"),
    "lost_request": Scene("async", WORKERS_DIE),
    "overtaken_result": Scene("async"),
    "broadcast_behind_barrier": Scene("rules", (SLOW_WRITES,)),
    "belated_side_barrier": Scene("sideoutputs", first=4),
    "deaf_to_silence": Scene("idle"),
    "pause_is_silence": Scene("idle"),
    "returning_turns_time_back": Scene("idle", first=1),
    "maximum_of_an_old_attempt": drawn("maximum_of_an_old_attempt", first=1),
    "final_dropped": Scene("counter"),
    "ignored_backlog": drawn("ignored_backlog", first=0),
    "unasked_hooks": drawn("unasked_hooks", first=0),
    "remembered_settings": drawn("remembered_settings", first=0),
    "overwritten_settings": drawn("overwritten_settings", first=0),
    "forgotten_mode": drawn("forgotten_mode", first=2),
    "believed_silence": Scene("counter", (throughout("store_fails", "PutIfAbsent", probability=0.3),), 11),
    "claimed_name": Scene("counter", (Fault("second_coordinator", on="coordinator.send.trigger", nth=3, duration_ms=800),), 11),
    "unlimited_credit": Scene("windows", (throughout("slow_link", "all", amount=60),), 1),
    "open_data_port": Scene("counter", (at(400, "forged_frames", "workers"),)),
    "revived_window": Scene("late"),
    "forgotten_watermark": Scene("late", (at(900, "user_error", "window"),), first=3),
    "hasty_lateness": Scene("late"),
    "hasty_forwarding": Scene("windows", first=7),
    "lost_latecomers": Scene("latecomers", first=2),
    "kept_contents": Scene("latecomers", first=2),
    "kept_panes": Scene("sliding", first=1),
    "left_out_pane": Scene("sliding", first=1),
    "forgotten_firings": Scene("sliding", WORKERS_DIE),
    "forgetful_merge": Scene("sliding", first=1),
    "hasty_cleaning": Scene("sliding", first=1),
    "merge_without_timer": Scene("sessions", first=1),
    "revived_session": Scene("sessions", tuple(at(ms, "user_error", "sessions") for ms in (300, 500, 700, 900, 1_100)), 1),
    "lateness_of_its_own": Scene("sessions", first=1),
    "early_cleaning": Scene("sessions", first=1),
    "needed_version_dropped": Scene("versions"),
    "stale_version": Scene("versions"),
    "superseded_version_kept": Scene("versions"),
    "asked_again": Scene("versions"),
    "hasty_buffer": Scene("joins", first=4),
    "partner_forgotten": Scene("joins"),
    "pair_made_twice": Scene("joins", first=1),
    "uncleaned_buffer": Scene("joins"),
    "begun_row_forgotten": Scene("window_joins", first=44),
    "hasty_session_join": Scene("window_joins", first=26),
    "late_side_lost": Scene("window_joins", first=5),
    "fired_window_kept": Scene("window_joins"),
    "due_rows_lost": Scene("window_joins", WORKERS_DIE, first=30),
    "emitted_rows_stored": Scene("window_joins", first=30),
    "forgotten_refire": Scene("late_windows"),
    "hasty_forgetting": Scene("late_windows", first=3),
    "lost_late_records": Scene("late_windows", first=2),
    "hasty_threshold": Scene("topn", first=6),
    "lost_deletions": Scene("topn"),
    "fired_top_kept": Scene("window_top"),
    "newest_by_arrival": Scene("topn"),
    "overtaken_by_barrier": Scene("windows", first=4),
    "overtaken_by_watermark": Scene("windows", first=7),
    "combined_twice": Scene("windows", first=7),
    "forgetful_fold": Scene("column_sessions"),
    "apart_when_touching": Scene("column_sessions", first=2),
    "counted_without_contents": Scene("count_windows", WORKERS_DIE, first=1),
    "one_record_short": Scene("count_windows", first=2),
    "full_window_kept": Scene("count_windows"),
    "outside_before_complete": Scene("outside"),
    "target_opened_without_fence": Scene("outside"),
    "target_taken_by_anybody": Scene("outside", WORKERS_DIE),
    "silence_taken_for_success": Scene("outside"),
    "silence_taken_for_failure": Scene("outside"),
    "aborted_rows_dropped": Scene(
        "outside", (Fault("old_leader_wakes", on="coordinator.send.trigger", nth=3, duration_ms=800),), 6
    ),
    "step_one_row_short": Scene("outside"),
    "staged_rows_left": Scene("outside"),
    "staged_again": drawn("staged_again", first=5),
    "merged_again": Scene("merging"),
    "hasty_tracker": Scene("at_least_once", (SLOW_LINKS,), first=1),
    "broadcast_read_on": Scene("at_least_once", (SLOW_LINKS,), first=2),
    "merged_files_deleted_early": Scene("merging"),
    "uncounted_late": Scene("late"),
    "counted_again": Scene("late", (at(900, "user_error", "window"),), first=3),
    "forgotten_counts": Scene("late", (at(900, "user_error", "window"),), first=3),
    "counted_behind_the_cut": Scene("late", (SLOW_WRITES,)),
    "late_emission": Scene("counter", (COUNT_FAILS,)),
    "forgotten_timer": Scene("timers"),
    "hung_for_ever": Scene("counter", (at(400, "hang_worker", "worker-0"),)),
    "early_ack": Scene("counter", (SLOW_WRITES,), 2),
    "finish_before_commit": Scene("counter"),
    "unrepeated_finish": Scene("counter", (throughout("drop", "finish"),)),
    "late_position": Scene("ends", (throughout("store_slow", "worker:", amount=60),), 1),
    "replayed_record": Scene("counter", (COUNT_FAILS,)),
    "skipped_record": Scene("counter", (COUNT_FAILS,)),
    "split_twice": Scene("splits"),
    "split_forgotten": Scene("splits", WORKERS_DIE),
    "fetched_behind_errors": Scene("splits"),
    "told_before_complete": Scene("splits"),
    "shown_expired": Scene("expiring"),
    "refired_timer": Scene("timers", (at(600, "user_error", "reorder"),)),
    "shared_generation": Scene("timers", (SLOW_WRITES,)),
    "shared_page": Scene("counter", (SLOW_WRITES,)),
    "aborted_rollback": drawn("aborted_rollback", first=20),
    "unpinned_rollback": Scene("timers", (at(600, "user_error", "reorder"),)),
    "unmarked_page": Scene("counter", WORKERS_DIE, backend="filesystem"),
    "shared_columns": Scene("aggregate", (SLOW_WRITES,)),
    "shared_panes": Scene("aggregate", (SLOW_WRITES,)),
    "lost_list_entry": Scene("counter", (RESCALE,)),
    "repeated_list_entry": Scene("counter", (RESCALE,)),
    "key_groups_rounded_down": Scene("windows", (RESCALE,), 2),
    "expired_at_the_barrier": Scene("states"),
    "believed_copy": Scene("counter", (at(700, "damage_copies"),)),
    "full_is_corrupt": Scene("counter", (at(600, "local_disk_full", "workers", duration_ms=800),), 1, "rocksdb"),
    "unswept_folders": Scene("counter", WORKERS_DIE, 1, "rocksdb"),
    "swept_living": Scene("counter", WORKERS_DIE, 1, "rocksdb"),
    "forgotten_abort": drawn("forgotten_abort", first=1),
    "stopped_is_ended": Scene("ends", (STOP,)),
    "early_end": Scene("ends"),
    "finished_early": Scene("ends"),
    "revived_timers": Scene("ends", WORKERS_DIE, first=1),
    "no_subsume": drawn("no_subsume", first=0),
    "subsumed_savepoint": drawn("subsumed_savepoint", first=1),
    "unheld_base": drawn("unheld_base", first=10),
    "half_deleted_left": drawn("half_deleted_left", first=0),
    "unsynced_found": drawn("unsynced_found", first=0),
    "emptied_window": drawn("emptied_window", first=2),
    "drained_apart": Scene("windows", (at(400, "drain"),), first=3),
    "trusted_registrations": Scene("counter", (at(400, "forged_registration", "workers"),)),
    "standby_in_a_living_slot": Scene("counter", (), 1),
    "borrowed_proof": Scene("counter", (at(400, "forged_registration", "workers"),)),
    "foreign_decline": drawn("foreign_decline", first=0),
    "unnamed_base": Scene("counter", (STOP,)),
    "late_files_left": drawn("late_files_left", first=4),
    "kept_aborted_ids": Scene("counter", (throughout("store_fails", "worker:WriteFile", probability=0.2),)),
    "early_notice": Scene("counter"),
    "missing_ack": Scene("counter"),
    "counted_acks": Scene("counter", (throughout("duplicate", "acks"),)),
    "hasty_abort": Scene("counter", (throughout("store_fails", "worker:WriteFile", probability=0.5),)),
    "ambiguous_is_done": Scene("counter", (throughout("store_late", "coordinator:PutIfAbsent/_metadata", amount=60),)),
    "savepoint_commits": Scene("counter", (SAVEPOINT,)),
    "untold_abort": Scene("counter", (throughout("store_fails", "worker:WriteFile", probability=0.5),)),
    "half_told_abort": Scene("counter", (throughout("store_fails", "worker:WriteFile", probability=0.5),), first=5),
    "ignored_pause": Scene("counter", (SLOW_WRITES,)),
    "lasting_failures": Scene("windows", (throughout("store_fails", "worker:WriteFile", probability=0.15),)),
    "tolerated_failures": Scene("counter", (throughout("store_fails", "worker:WriteFile", probability=0.5),)),
    "deaf_recovery": drawn("deaf_recovery", first=0),
    "skipped_final": Scene("counter"),
    "newest_dropped": Scene("counter"),
    "repeated_ack_discarded": Scene("windows", (throughout("duplicate", "acks"),)),
    "claim_deleted_last": Scene("counter"),
    "found_written_again": drawn("found_written_again", first=1),
    "forgotten_restarts": drawn("forgotten_restarts", first=0),
    "folded_keys": Scene("keys", first=6),
    "narrow_keys": Scene("keys"),
    "unescaped_keys": Scene("keys", first=2),
    "untried_stop": drawn("untried_stop", first=0),
    "forgotten_stop": drawn("forgotten_stop", first=0),
    "unwaited_savepoint": drawn("unwaited_savepoint", first=0),
    "unasked_claim": Scene("counter", (STOP,)),
    "claimed_deleted_early": Scene("counter", (at(500, "restore"),)),
    "half_a_life": Scene("expiring"),
    "hasty_expiry": Scene("counter", SABOTAGES["hasty_expiry"].plan or ()),
    "no_deadline": Scene("counter", (at(300, "blocked_operator", "count", amount=9_000),)),
    "needed_claim_given_back": Scene("counter", (at(500, "restore"),)),
    "claimed_never_deleted": Scene("counter", (at(500, "restore"),)),
    "needed_shared_file_deleted": Scene("counter", backend="rocksdb"),
    "shared_deleted_first": Scene("counter", backend="rocksdb"),
    "unswept_shared_files": Scene("counter", (UPLOADS_FAIL,), backend="rocksdb"),
    "unasked_rewind": Scene("counter", tuple(at(ms, "rewind") for ms in (500, 700, 900, 1_100))),
    "resumed_line": Scene("counter", (at(900, "rewind"),)),
    "oldest_restored": Scene("counter", (COUNT_FAILS,)),
    "label_ignored": Scene("labels"),
    "older_ones_kept": Scene("forgetting"),
    "erased_behind_the_cut": Scene("forgetting"),
    "erased_in_one_subtask": Scene("forgetting"),
    "unpurged_tables": Scene("forgetting", backend="rocksdb"),
    "reused_id": Scene("counter", (COORDINATOR_DIES,)),
    "stale_acks": drawn("stale_acks", first=1),
    "loser_goes_on": Scene("counter", (Fault("old_leader_wakes", on="coordinator.PutIfAbsent.metadata", nth=3, duration_ms=800),)),
    "unsettled_takeover": Scene("counter", (Fault("kill_coordinator", on="coordinator.send.trigger", nth=4, amount=1),)),
    "exact_commit": Scene("counter", (SAVEPOINT,)),
    "trusted_acks": Scene("counter", (FORGED,)),
    "strays_delete": Scene("counter", (FORGED,), backend="filesystem"),
    "lost_recommit": Scene("counter", (Fault("kill_worker", "workers", on="worker.PutIfAbsent.log", nth=4),)),
    "repeated_commit": Scene("counter", (COUNT_FAILS,)),
    "early_commit": Scene("counter"),
    "unprotected_sweep": Scene("counter", (SAVEPOINT, at(540, "user_error", "count"))),
    "sweep_of_the_living": Scene("fanout", (throughout("store_slow", "worker:", amount=5),), 10),
    "no_sweep": Scene("counter", (Fault("kill_worker", "workers", on="worker.WriteFile.staged.done", nth=3),)),
    "unsynced_write": Scene("counter", (at(600, "power_loss", amount=1),)),
    "probe_trusted_alone": drawn("probe_trusted_alone", first=0),
    "sign_trusted_alone": drawn("sign_trusted_alone", first=0),
    "stays_cut_off": drawn("stays_cut_off", first=0),
    "late_probe": drawn("late_probe", first=0),
    "hasty_restarts": drawn("hasty_restarts", first=0),
    "even_pauses": drawn("even_pauses", first=0),
    "lasting_pauses": drawn("lasting_pauses", first=0),
    "ignored_multiplier": drawn("ignored_multiplier", first=0),
    "unforgotten_failures": drawn("unforgotten_failures", first=0),
    "redrawn_pause": drawn("redrawn_pause", first=0),
    "forgotten_failures": drawn("forgotten_failures", first=0),
    "reset_by_checkpoints": drawn("reset_by_checkpoints", first=3),
    "overwriting_put": Scene("counter", (COORDINATOR_DIES,)),
}


def violations(scene: Scene, seed: int, sabotage: str | None) -> tuple[ViolationRecord, ...]:
    request = RunRequest(seed, scene.workload, plan=scene.plan, sabotage=sabotage, backend=scene.backend)
    return run_seed(request).result.violations


@cache
def holds(scene: Scene, seed: int) -> bool:
    """Without a sabotage. A seed gives the same run each time, and many sabotages share a scene."""
    return violations(scene, seed, None) == ()


def shows(name: str) -> set[str]:
    return {SCENES[name].workload, *SABOTAGES[name].invariants}


def shown() -> set[str]:
    """The few of `make test`: each adds most to the invariants and workloads that those before it show, and of equals one whose run
    without it shows others too."""
    sharing = Counter(SCENES[name] for name in SABOTAGES)
    chosen: set[str] = set()
    met: set[str] = set()
    while met != set().union(*map(shows, SABOTAGES)):
        best = max(SABOTAGES, key=lambda name: (len(shows(name) - met), sharing[SCENES[name]]))
        chosen.add(best)
        met |= shows(best)
    return chosen


SHOWN = shown()


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHOWN else pytest.mark.endurance) for name in SABOTAGES])
def test_it_is_caught_and_the_same_run_holds_without_it(name: str) -> None:
    scene = SCENES[name]
    check_plan(scene.plan)
    found: list[str] = []
    for seed in range(scene.first, scene.first + SEEDS_MAX):
        broken = violations(scene, seed, name)
        found += [each.invariant for each in broken]
        if set(SABOTAGES[name].invariants) & {each.invariant for each in broken}:
            assert holds(scene, seed)
            return
    pytest.fail(f"{name} broke {found or 'nothing'} in {SEEDS_MAX} seeds of its scene; find another: chaos sim --sabotage {name}")


def test_a_campaign_draws_what_makes_it_show() -> None:
    campaign = make_campaign(None, 0, (), None, "lost_recommit", None)
    sabotage = SABOTAGES["lost_recommit"]
    assert (campaign.workloads, campaign.kinds, campaign.seeds) == (sabotage.workloads, sabotage.kinds, sabotage.seeds_max)
    assert make_campaign(None, 0, (), "drop", "lost_recommit", None).kinds == ("drop",)
    assert make_campaign(None, 0, (), None, "missing_ack", None).kinds == ()


def test_a_sabotage_brings_the_backend_in_which_it_shows() -> None:
    assert make_campaign(None, 0, (), None, "needed_shared_file_deleted", None).backend == "rocksdb"
    assert make_campaign(None, 0, (), None, "needed_shared_file_deleted", "memory").backend == "memory"
    assert make_campaign(None, 0, (), None, "missing_ack", None).backend is None


def test_a_sabotage_brings_the_plan_that_makes_it_show() -> None:
    sabotage = SABOTAGES["no_subsume"]
    assert sabotage.plan is not None
    assert make_campaign(None, 0, (), None, "no_subsume", None).plan == sabotage.plan
    assert make_campaign(None, 0, (), "drop", "no_subsume", None).plan is None


def test_a_family_of_faults_is_taken_for_its_kinds() -> None:
    kinds = make_campaign(None, 0, (), None, "loser_goes_on", None).kinds
    assert SABOTAGES["loser_goes_on"].kinds == ("zombies",)
    assert "old_leader_wakes" in kinds
    assert "zombies" not in kinds
