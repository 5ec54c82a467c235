"""Workloads on real workers without a coordinator or a simulated world: run, crash, redeploy, and look at what was committed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from holdfast.barriers.messages import CheckpointKind, SubtaskKey
from holdfast.chaos.checkers.oracle import CommittedOutput, Sequences, compare, compare_states, counted
from holdfast.chaos.checkers.state_reading import SnapshotView
from holdfast.chaos.sim.objectstore import SimObjectStore
from holdfast.chaos.workloads.scenario import CutExpectation, Scenario, SinkExpectation
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.operators.base import JobPlan
from holdfast.operators.worker.main import pickle_plan
from holdfast.statebackends.handles import OperatorState, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from tests.harness.mini import Completed, MiniCluster
from tests.harness.restoring import plan_restore

STATE = "/state"


class QuickCluster(MiniCluster):
    """Time jumps to what is due next."""

    def _pass_time(self) -> None:
        for worker in self.workers:
            worker.prepare_wait()
            worker.run_once()
        wakeups = [wakeup for worker in self.workers if (wakeup := worker.next_wakeup_ms()) is not None]
        self.clock.now_ms = max(self.clock.now_ms + 1, min(wakeups, default=0))


class Run:
    """One job of a scenario, from its start over crashes to its end."""

    def __init__(self, scenario: Scenario, seed: int, local_directory: Path) -> None:
        """`local_directory`: for backends that need one."""
        self.scenario = scenario
        self.store = SimObjectStore()
        self.state_view = self.store.view(STATE)
        self.random = random.Random(seed)
        self.plan = scenario.plan(None)
        self.cluster = QuickCluster(
            self.plan,
            self.store.storage(STATE),
            local_directory=str(local_directory),
            seed=seed,
        )
        self.completed: list[tuple[Completed, SnapshotMetadata]] = []

    @property
    def interval_ms(self) -> int:
        interval_ms = self.plan.graph.config.checkpoint_interval_ms
        assert interval_ms is not None
        return interval_ms

    def start(self) -> None:
        self.cluster.deploy()
        self._until(lambda: self.cluster.coordinator.all_running)

    def go_on(self, checkpoints: int) -> bool:
        """So many checkpoints, one each interval; False when the input ends before."""
        cluster, coordinator = self.cluster, self.cluster.coordinator
        for _ in range(checkpoints):
            due_ms = cluster.clock.now_ms + self.interval_ms
            self._until(lambda due_ms=due_ms: cluster.clock.now_ms >= due_ms or coordinator.all_drained)  # type: ignore[misc]
            if coordinator.all_drained:
                return False
            coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
            self._until(lambda: coordinator.pending is None)
        return True

    def crash_in_the_middle(self, parallelism: int | None = None) -> None:
        """A moment in the middle of anything, perhaps of a checkpoint; then as `crash`."""
        if self.random.random() < 0.7:
            self.cluster.coordinator.trigger(CheckpointKind.CHECKPOINT, self.cluster.clock.now_ms)
        for _ in range(self.random.randrange(400)):
            self.cluster.step()
        self.crash(parallelism)

    def crash(self, parallelism: int | None = None) -> None:
        """Every process dies; new ones start from the newest checkpoint, at another parallelism if one is given."""
        self._note_completed()
        self._restore(self.plan if parallelism is None else self.scenario.plan(parallelism))
        self.cluster.crash()
        self.start()

    def finish(self) -> None:
        self.cluster.run_to_end()
        self._note_completed()

    def _until(self, condition: Callable[[], bool]) -> None:
        self.cluster.run_until(condition, steps_max=10**6)

    # ------------------------------------------------------------------------------------------------------ snapshots

    def _note_completed(self) -> None:
        known = {completed.checkpoint_id for completed, _ in self.completed}
        for completed in self.cluster.coordinator.completed:
            if completed.checkpoint_id not in known:
                self.completed.append((completed, metadata_of(self.plan, completed)))

    def _restore(self, plan: JobPlan) -> None:
        """The newest checkpoint's state is dealt out anew, as a coordinator does at every restore."""
        coordinator = self.cluster.coordinator
        if self.completed:
            completed, metadata = self.completed[-1]
            graph = plan_restore(metadata, plan.graph).graph
            view = SnapshotView(self.state_view, completed.folder, metadata)
            lists = {(state.uid, name): view.list_entries(state.uid, name) for state, name in find_list_states(metadata, graph)}
            states = assign_state(metadata, graph, lists)
            coordinator.completed.append(Completed(completed.checkpoint_id, completed.folder, states))
        self.plan = plan
        coordinator.graph = plan.graph
        self.cluster._plan = pickle_plan(plan)

    # --------------------------------------------------------------------------------------------------------- verdict

    def problems(self) -> list[str]:
        """What the oracle finds wrong with the output and with every cut."""
        found = []
        for sink in self.scenario.sinks:
            found += [f"{sink.sink_id}: {problem}" for problem in self._sink_problems(sink)]
        for completed, metadata in self.completed:
            for cut in self.scenario.cuts:
                problem = self._cut_problem(cut, completed, metadata)
                if problem is not None:
                    found.append(f"checkpoint {completed.checkpoint_id}, {cut.operator_uid}: {problem}")
        return found

    def output(self, sink: SinkExpectation) -> CommittedOutput:
        output = CommittedOutput(self.store.view(sink.path), sink.sink_id)
        output.refresh()
        return output

    def _sink_problems(self, sink: SinkExpectation) -> list[str]:
        files = self.output(sink).files
        found: list[str | None] = [] if sink.rows is None else [compare(sink.rows(), counted(files, sink))]
        if sink.judge is not None:
            problem = sink.judge([row for file in files for row in file.rows])
            found.append(None if problem is None else problem.message)
        sequences = Sequences(sink)
        found += [f"{wrong[0]} {wrong[1]}" for file in files if (wrong := sequences.add(file)) is not None]
        if sink.at_cut is not None:
            for completed, metadata in self.completed:
                view = SnapshotView(self.state_view, completed.folder, metadata)
                expected = sink.at_cut(view.positions(self.plan.sources))
                so_far = counted((file for file in files if file.checkpoint_id <= completed.checkpoint_id), sink)
                found.append(compare(expected, so_far))
        return [problem for problem in found if problem is not None]

    def _cut_problem(self, cut: CutExpectation, completed: Completed, metadata: SnapshotMetadata) -> str | None:
        view = SnapshotView(self.state_view, completed.folder, metadata)
        expected = cut.expected(view.positions(cut.source_uids))
        # Others, such as timers of sessions, may have a key in several namespaces.
        return compare_states(expected, view.keyed_state(cut.operator_uid, expected))


def metadata_of(plan: JobPlan, completed: Completed) -> SnapshotMetadata:
    """What a coordinator would have stored of a completed checkpoint."""
    operators = [
        OperatorState(
            operator.uid,
            operator.operator_id,
            operator.name,
            vertex.parallelism,
            vertex.max_parallelism,
            tuple(
                completed.states.get(SubtaskKey(vertex.vertex_id, subtask), {}).get(operator.uid, OperatorSubtaskState())
                for subtask in range(vertex.parallelism)
            ),
        )
        for vertex in plan.graph.vertices
        for operator in vertex.operators
    ]
    return SnapshotMetadata(
        job_id="job",
        job_name=plan.graph.name,
        checkpoint_id=completed.checkpoint_id,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
        operators=tuple(operators),
    )
