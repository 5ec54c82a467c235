"""What the alert rules do, by Prometheus' own tool: each alert has a scene in which it fires, and one that is close and is none.

A scene is samples of a minute each, and what fires at its end. `promtool` comes from `scripts/setup --tests`; without it the tests
are skipped, and tests/api/test_alerts.py reads the rules by a parser of PromQL all the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.harness.installed import ROOT
from tests.harness.promtool import run_promtool

RULES = ROOT / "deploy" / "prometheus" / "holdfast.rules.yml"

ONE, TWO = 'instance="a:8080",job="holdfast"', 'instance="b:8080",job="holdfast"'
"""Labels that Prometheus gives to what it reads of either member."""
JOB = 'job_id="1f",job_name="flights"'
OF_JOB = {"job_id": "1f", "job_name": "flights"}
RUNS = {f'holdfast_job_state{{{ONE},{JOB},state="RUNNING"}}': "1x60", f'holdfast_job_state{{{ONE},{JOB},state="FAILED"}}': "0x60"}


@dataclass(frozen=True)
class Scene:
    """`series`: in promtool's notation, `1x60` for sixty-one samples of 1, `0+2x60` for 0, 2, 4 ..., `_` for none.
    `told`: labels and summary of the alert that fires `at_min` minutes after the first sample; None: it does not."""

    name: str
    alert: str
    series: dict[str, str]
    at_min: int
    told: tuple[dict[str, str], str] | None = None


def member(name: str, one: str, two: str) -> dict[str, str]:
    """A metric of two members."""
    return {f"{name}{{{ONE}}}": one, f"{name}{{{TWO}}}": two}


def of_job(name: str, values: str, labels: str = "", instance: str = ONE) -> dict[str, str]:
    return {f"{name}{{{instance},{JOB}{',' if labels else ''}{labels}}}": values}


def state(value: str) -> dict[str, str]:
    return of_job("holdfast_job_state", "1x60", f'state="{value}"')


def one_of(*words: str) -> tuple[dict[str, str], str]:
    return {"instance": "a:8080"}, " ".join(words)


SCENES = (
    Scene("a member is away", "HoldfastDown", member("up", "1x60", "1x5 0x60"), 10,
          ({"instance": "b:8080", "job": "holdfast"}, "Coordinator b:8080 does not answer")),
    Scene("one scrape failed", "HoldfastDown", member("up", "1x60", "1x5 0 1x60"), 10),
    Scene("recovery takes long", "HoldfastNotReady", {f"holdfast_ready{{{ONE}}}": "0x60"}, 6,
          ({"instance": "a:8080", "job": "holdfast"}, "Coordinator a:8080 has not recovered all jobs of its state directory")),
    Scene("recovery takes a while", "HoldfastNotReady", {f"holdfast_ready{{{ONE}}}": "0x3 1x60"}, 6),
    Scene("a job has a record that is damaged", "HoldfastJobUnreadable", member("holdfast_jobs_unreadable", "0x5 2x60", "0x60"), 11,
          ({"job": "holdfast"}, "Records of 2 jobs of holdfast can't be read, and nobody leads these jobs")),
    Scene("storage is away for a while", "HoldfastJobUnreadable", member("holdfast_jobs_unreadable", "0x5 2x3 0x60", "0x60"), 11),
    Scene("a request in a minute is a bug", "HoldfastRequestsFail",
          {f'holdfast_http_requests_total{{{ONE},method="GET",route="/x",status="500"}}': "0+1x60"}, 20,
          one_of("Coordinator a:8080 answers requests with 500, which is a bug")),
    Scene("storage is away", "HoldfastRequestsFail",
          {f'holdfast_http_requests_total{{{ONE},method="GET",route="/x",status="503"}}': "0+9x60"}, 20),
    Scene("a flood of connections", "HoldfastConnectionsRefused",
          {f'holdfast_connections_closed_total{{{ONE},reason="address_full"}}': "0+90x60"}, 25,
          ({"instance": "a:8080", "reason": "address_full"},
           "Coordinator a:8080 closes more than a connection a second (address_full)")),
    Scene("some slow clients", "HoldfastConnectionsRefused",
          {f'holdfast_connections_closed_total{{{ONE},reason="header_timeout"}}': "0+30x60"}, 25),
    Scene("few descriptors are left", "HoldfastDescriptorsShort",
          {f"process_open_fds{{{ONE}}}": "900x60", f"process_max_fds{{{ONE}}}": "1024x60",
           f'holdfast_build_info{{{ONE},version="1"}}': "1x60"}, 15,
          ({"instance": "a:8080", "job": "holdfast"}, "Coordinator a:8080 has used 80 % of its file descriptors")),
    Scene("another program is short of them", "HoldfastDescriptorsShort",
          {'process_open_fds{instance="c:1",job="x"}': "900x60", 'process_max_fds{instance="c:1",job="x"}': "1024x60",
           f'holdfast_build_info{{{ONE},version="1"}}': "1x60"}, 15),
    Scene("more jobs than are shown", "HoldfastMetricsLeftOut", {f'holdfast_metrics_left_out{{{ONE},kind="jobs"}}': "12x60"}, 40,
          ({"instance": "a:8080", "kind": "jobs"}, "Metrics of 12 jobs are left out at a:8080")),
    Scene("all are shown", "HoldfastMetricsLeftOut", {f'holdfast_metrics_left_out{{{ONE},kind="jobs"}}': "0x60"}, 40),
    Scene("nobody leads", "HoldfastNoActiveMember", member("holdfast_member_active", "1x5 0x60", "0x60"), 10,
          ({"job": "holdfast"}, "None of the members of holdfast is the active one, and nobody takes checkpoints")),
    Scene("one takes over from the other", "HoldfastNoActiveMember", member("holdfast_member_active", "1x5 _x60", "0x5 1x60"), 10),
    Scene("the lead goes to and fro", "HoldfastLeadersChange", member("holdfast_member_epoch", "3x10 4x10 6x10 8x30", "3x60"), 50,
          ({"job": "holdfast"}, "The active member of holdfast changed 5 times within an hour")),
    Scene("a rolling upgrade", "HoldfastLeadersChange", member("holdfast_member_epoch", "3x10 4x10 5x40", "3x10 4x10 5x40"), 50),
    Scene("a job failed", "HoldfastJobFailed", state("FAILED"), 1,
          (OF_JOB, "Job flights has failed and will not restart by itself")),
    Scene("a job was cancelled", "HoldfastJobFailed", state("CANCELED"), 1),
    Scene("a job restarts each three minutes", "HoldfastJobRestarting",
          of_job("holdfast_job_restarts_total", "0 0 0 1 1 1 2 2 2 3 3 3 4 4 4 5 5 5"), 16,
          (OF_JOB, "Job flights restarted 5 times within 15 minutes")),
    Scene("the new active member counts from where the old one was", "HoldfastJobRestarting",
          of_job("holdfast_job_restarts_total", "7x5 _x60") | of_job("holdfast_job_restarts_total", "_x5 7x60", instance=TWO), 16),
    Scene("an executor did not come back", "HoldfastWorkersMissing",
          RUNS | of_job("holdfast_job_slots", "4x60") | of_job("holdfast_job_workers", "4x5 3x60"), 15,
          (OF_JOB, "Job flights lacks 1 workers")),
    Scene("the job has ended", "HoldfastWorkersMissing",
          state("FINISHED") | of_job("holdfast_job_slots", "4x60") | of_job("holdfast_job_workers", "0x60"), 15),
    Scene("checkpoints stopped", "HoldfastNoCheckpoint", RUNS | of_job("holdfast_last_checkpoint_timestamp_seconds", "120x60"), 20,
          (OF_JOB, "The newest checkpoint of flights is 18m 0s old")),
    Scene("checkpoints go on", "HoldfastNoCheckpoint", RUNS | of_job("holdfast_last_checkpoint_timestamp_seconds", "0+60x60"), 20),
    Scene("no checkpoint ever", "HoldfastNeverCheckpointed", RUNS, 31,
          (OF_JOB, "Job flights has run for half an hour without a checkpoint")),
    Scene("the first one came late", "HoldfastNeverCheckpointed", RUNS | of_job("holdfast_last_checkpoint_id", "_x20 1x60"), 31),
    Scene("each checkpoint fails", "HoldfastCheckpointsFail",
          of_job("holdfast_checkpoints_total", "0+1x60", 'outcome="failed"'), 20,
          (OF_JOB, "Checkpoints of flights fail")),
    Scene("each one completes", "HoldfastCheckpointsFail",
          of_job("holdfast_checkpoints_total", "0+1x60", 'outcome="completed"'), 20),
    Scene("checkpoints take minutes", "HoldfastCheckpointSlow", of_job("holdfast_last_checkpoint_duration_seconds", "90x60"), 16,
          (OF_JOB, "Checkpoints of flights take 1m 30s")),
    Scene("one of them did", "HoldfastCheckpointSlow", of_job("holdfast_last_checkpoint_duration_seconds", "1x5 90 1x60"), 16),
    Scene("a drill found damage", "HoldfastDrillFailed", of_job("holdfast_last_drill_failed", "0x5 1x60"), 6,
          (OF_JOB, "The newest drill of flights found a snapshot that can't be restored")),
    Scene("a drill passed since", "HoldfastDrillFailed", of_job("holdfast_last_drill_failed", "1x5 0x60"), 6),
    Scene("no drill for hours", "HoldfastDrillOverdue", of_job("holdfast_drill_overdue_seconds", "7500x60"), 6,
          (OF_JOB, "A drill of flights has been due for 2h 5m 0s")),
    Scene("a drill waits for another one", "HoldfastDrillOverdue", of_job("holdfast_drill_overdue_seconds", "600x60"), 6),
    Scene("a partition is idle", "HoldfastWatermarkLags",
          of_job("holdfast_subtask_watermark_lag_seconds", "900x60", 'vertex="w",subtask="1"'), 16,
          (OF_JOB, "Event time of flights is 15m 0s behind")),
    Scene("it catches up", "HoldfastWatermarkLags",
          of_job("holdfast_subtask_watermark_lag_seconds", "900-100x9 0x60", 'vertex="w",subtask="1"'), 16),
    Scene("a sink is slow", "HoldfastBackpressured",
          of_job("holdfast_subtask_time_ratio", "0.95x60", 'vertex="w",subtask="1",activity="backpressured"'), 35,
          (OF_JOB, "A subtask of flights waits for those behind it nearly all the time")),
    Scene("it is busy", "HoldfastBackpressured",
          of_job("holdfast_subtask_time_ratio", "0.95x60", 'vertex="w",subtask="1",activity="busy"'), 35),
    Scene("a target is away", "HoldfastCommitLags",
          of_job("holdfast_sink_commit_lag_seconds", "0+60x60", 'vertex="out",subtask="0"'), 16,
          (OF_JOB, "Output of flights has not been committed for 16m 0s")),
    Scene("it comes back", "HoldfastCommitLags",
          of_job("holdfast_sink_commit_lag_seconds", "0+60x12 0x60", 'vertex="out",subtask="0"'), 16),
    Scene("rows are left out", "HoldfastRowsSkipped",
          of_job("holdfast_operator_rows_skipped_total", "0x5 3x60", 'operator="score"'), 10,
          (OF_JOB | {"operator": "score"}, "Operator score of flights leaves rows out because its function fails on them")),
    Scene("rows were left out an hour ago", "HoldfastRowsSkipped",
          of_job("holdfast_operator_rows_skipped_total", "0x5 3x60", 'operator="score"'), 60),
    Scene("late records go on coming", "HoldfastLateRecords",
          of_job("holdfast_operator_late_records_dropped_total", "0+5x60", 'operator="hourly"'), 20,
          (OF_JOB | {"operator": "hourly"}, "Operator hourly of flights drops late records")),
    Scene("some at the start", "HoldfastLateRecords",
          of_job("holdfast_operator_late_records_dropped_total", "0 5x60", 'operator="hourly"'), 20),
    Scene("a stranger's frames", "HoldfastFramesRefused", of_job("holdfast_job_frames_refused_total", "0x5 1x60"), 10,
          (OF_JOB, "Data ports of flights got frames from somebody who is none of its workers")),
    Scene("none came", "HoldfastFramesRefused", of_job("holdfast_job_frames_refused_total", "1x60"), 10),
    Scene("a webhook's host is away", "HoldfastWebhookFails",
          {f'holdfast_webhook_failing_seconds{{{ONE},webhook="pager"}}': "0+60x60"}, 15,
          ({"instance": "a:8080", "webhook": "pager"}, "Webhook pager has taken no event for 15m 0s")),
    Scene("it is back", "HoldfastWebhookFails",
          {f'holdfast_webhook_failing_seconds{{{ONE},webhook="pager"}}': "0+60x12 0x60"}, 15),
    Scene("a webhook refuses events", "HoldfastWebhookGaveUp",
          {f'holdfast_webhook_events_total{{{ONE},webhook="pager",outcome="given_up"}}': "0x5 2x60"}, 10,
          ({"instance": "a:8080", "webhook": "pager"}, "Webhook pager refused events, which were given up")),
    Scene("it takes them", "HoldfastWebhookGaveUp",
          {f'holdfast_webhook_events_total{{{ONE},webhook="pager",outcome="delivered"}}': "0+2x60"}, 10),
)


@cache
def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def unit_test(scenes: tuple[Scene, ...]) -> dict[str, Any]:
    """The file that promtool takes."""
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "name": scene.name,
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in scene.series.items()],
                "alert_rule_test": [{"eval_time": f"{scene.at_min}m", "alertname": scene.alert, "exp_alerts": expected(scene)}],
            }
            for scene in scenes
        ],
    }


def expected(scene: Scene) -> list[dict[str, Any]]:
    if scene.told is None:
        return []
    labels, summary = scene.told
    rule = rules()[scene.alert]
    return [
        {
            "exp_labels": {**labels, **rule["labels"]},
            "exp_annotations": {"summary": summary, "runbook_url": rule["annotations"]["runbook_url"]},
        }
    ]


def judged(scenes: tuple[Scene, ...], folder: Path) -> tuple[int, str]:
    file = folder / "scenes.yml"
    file.write_text(yaml.safe_dump(unit_test(scenes)))
    return run_promtool("test", "rules", str(file))


def test_each_alert_has_a_scene_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    shown = {(scene.alert, scene.told is not None) for scene in SCENES}
    assert shown == {(alert, fires) for alert in rules() for fires in (True, False)}


def test_prometheus_takes_the_rules() -> None:
    assert run_promtool("check", "rules", str(RULES))[0] == 0


def test_alerts_fire_when_they_are_to_and_say_so(tmp_path: Path) -> None:
    code, said = judged(SCENES, tmp_path)
    assert code == 0, said


def test_a_scene_that_comes_out_otherwise_is_seen(tmp_path: Path) -> None:
    quiet = next(scene for scene in SCENES if scene.alert == "HoldfastDown" and scene.told is None)
    loud = Scene(quiet.name, quiet.alert, quiet.series | {f"up{{{ONE}}}": "0x60"}, quiet.at_min)
    code, said = judged((loud,), tmp_path)
    assert code != 0
    assert "HoldfastDown" in said
