"""Actions of the users of a simulated job while it runs: rescale, take snapshots, stop and start again.

A user asks the leader, retries without an answer, and gives up in the end, as at a command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any, Protocol

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.tunable import AS_CONFIGURED, CheckpointMode, SettingValue
from holdfast.chaos.checkers.observations import Labelled, Observation, StoreView
from holdfast.chaos.cluster.coordinator_host import RequestResult, UserRequest
from holdfast.chaos.cluster.driver import DriverHost
from holdfast.chaos.sim.control import Call, ControlNetwork, JobClient, Reply
from holdfast.chaos.sim.injector import Injector
from holdfast.chaos.sim.kernel import Kernel, Process, Streams, Trace
from holdfast.chaos.sim.pool import FlowPool
from holdfast.chaos.sim.stores import SimStores
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.coordinator.ha.recorded_job import Completed, decode_decision
from holdfast.coordinator.ha.records import SavepointRecord
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.claims import dispose_snapshot
from holdfast.coordinator.ownership.labels import Mark, add_label, remove_label
from holdfast.statebackends.errors import FencedError, HoldfastError, InvalidConfigError, NotFoundError
from holdfast.statebackends.layout import CLAIM_NAME, METADATA_NAME, JobPaths, parse_checkpoint_name, parse_owner_name
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.storage.port import Flow, ReadFile, run_flow

SAVEPOINTS = "/savepoints"
CLAIM_SHARE = 0.5
"""Share of restores from a savepoint after which the job owns it."""
NATIVE_SHARE = 0.3
"""Share of savepoints in the state backend's own files."""
COPY_SHARE = 0.4
"""Share of restores from a savepoint that use a copy of it, made by the product's own tool while storage is at fault."""
DISPOSE_SHARE = 0.5
"""Share of copies after which another one is made and disposed of, without harm to what lies beside it."""
TOOL_TRIES = 4
SAID_SHARE = 0.8
"""Share of restores from an older snapshot that permit repeated output; the others are refused."""
LABEL_US = 120_000
"""Most time between two uses of labels."""
UNLABEL_SHARE = 0.25
DISPOSE_AFTER_US = 60_000
"""Most delay until a user tries to delete what the job was given with CLAIM: before its first checkpoint, as a rule."""
REQUEST_TRIES = 40
REQUEST_POLL_US = 150_000
RETUNE_TRIES = 5


class UsedCluster(Protocol):
    """The cluster as users see it: job, storage, leader, and starts of drivers."""

    kernel: Kernel
    trace: Trace
    streams: Streams
    scenario: Scenario
    control: ControlNetwork
    stores: SimStores
    injector: Injector
    observe: Callable[[Observation], None]
    driver: DriverHost | None
    parallelism: int | None
    pending: int
    outcome: str

    @property
    def job_id(self) -> str: ...

    @property
    def state(self) -> StoreView: ...

    def store(self, location: str) -> StoreView: ...

    def start_driver(self, restore: str | None) -> DriverHost: ...


class Users:
    """All users of one job. Each method returns False if it finds nothing to act on."""

    def __init__(self, cluster: UsedCluster) -> None:
        self._cluster = cluster
        self._user = Process("user", "user")
        self._client = JobClient(cluster.control)
        self._requests = 0
        self._random = cluster.streams.of("claims")
        self._tools = cluster.streams.of("tools")
        self.claims: set[str | None] = set()
        """Savepoints that the job is to own when it is started from them."""
        self.rewinds: set[str | None] = set()
        """Snapshots that a user goes back to, with repeated output permitted."""
        self._older: set[str] = set()
        """Snapshots that a user tried to go back to."""
        self._labelling: FlowPool | None = None
        self._label_storage: RoutedStorage
        self._labels: set[int] = set()
        """Ids whose labels were given, and are not being taken back."""
        self._busy: set[int] = set()
        """Ids that were labelled once: a label that is given and taken back at once may be either."""
        self._unsure = False
        """The result of a user's stop is unknown."""

    def rescale(self, parallelism: int) -> bool:
        """Submit the job at another parallelism while it runs."""
        cluster = self._cluster
        if cluster.pending or cluster.outcome or not cluster.scenario.may_rescale:
            return False
        cluster.parallelism = parallelism
        cluster.start_driver(cluster.driver.unanswered_restore if cluster.driver is not None else None)
        return True

    def snapshot(self, kind: CheckpointKind) -> bool:
        """Request a checkpoint or a savepoint, and do not wait for its result."""
        if self._cluster.outcome:
            return False
        is_savepoint = kind is CheckpointKind.SAVEPOINT
        native = is_savepoint and self._random.random() < NATIVE_SHARE
        target, trigger_id = SAVEPOINTS if is_savepoint else None, self._trigger_id()
        mode = AS_CONFIGURED if is_savepoint else draw_mode(self._cluster.streams.of("modes"))
        request = UserRequest(kind, trigger_id, target=target, native=native, mode=mode)
        said = "" if mode == AS_CONFIGURED else f" unaligned={mode.unaligned} aligned_timeout_ms={mode.aligned_timeout_ms}"
        self._cluster.trace.add("user", f"asks for {kind}", f"{trigger_id}{said}")
        self._ask("wish", request, str, lambda answer: None)
        return True

    def restore(self, *, drain: bool) -> bool:
        """Stop the job with a savepoint, drained or not, and start it again from there."""
        if self._cluster.pending or self._cluster.outcome:
            return False
        self._cluster.pending += 1
        native = self._random.random() < NATIVE_SHARE
        request = UserRequest(CheckpointKind.STOP_SAVEPOINT, self._trigger_id(), target=SAVEPOINTS, drain=drain, native=native)
        self._cluster.trace.add("user", "drains the job" if drain else "stops the job", request.trigger_id)
        self._stop_job(request, REQUEST_TRIES)
        return True

    def retune(self) -> bool:
        """Change settings of the job while it runs."""
        if self._cluster.outcome:
            return False
        settings = draw_changes(self._cluster.streams.of("settings"))
        request = UserRequest(None, self._trigger_id(), settings=settings)
        self._cluster.trace.add("user", "changes settings", f"{request.trigger_id} {settings}")
        self._change_settings(request, RETUNE_TRIES)
        return True

    def rewind(self) -> bool:
        """Start the job again from one of its older snapshots while it runs."""
        cluster = self._cluster
        if cluster.pending or cluster.outcome:
            return False
        choices = older_snapshots(cluster.state, cluster.job_id, cluster.store(SAVEPOINTS), self.claims)
        if not choices:
            return False
        chosen = self._random.choice(choices)
        self._older.add(chosen)
        if self._random.random() < SAID_SHARE:
            self.rewinds.add(chosen)
        if "/" in chosen and self._random.random() < CLAIM_SHARE:
            self.claims.add(chosen)
        cluster.trace.add("user", "goes back" if chosen in self.rewinds else "would go back", chosen)
        cluster.start_driver(chosen)
        return True

    def begin_labelling(self) -> None:
        """Label checkpoints with a tool beside the leader, from now on until the job ends, and take some labels back."""
        kernel, process = self._cluster.kernel, Process("labeller", "user")
        client = self._cluster.stores.client(process)
        self._labelling = FlowPool(kernel, process, client, self._cluster.injector, threads=2)
        self._label_storage = RoutedStorage(client)
        kernel.after(LABEL_US, self._label_next, process)

    def _label_next(self) -> None:
        cluster = self._cluster
        if cluster.outcome or self._labelling is None:
            return
        rng = cluster.streams.of("labels")
        cluster.kernel.after(rng.randint(LABEL_US // 4, LABEL_US), self._label_next, self._user)
        known = completed_ids(cluster.state, cluster.job_id)
        free = [number for number in known if number not in self._busy]
        kept = sorted(self._labels)
        paths, mark = JobPaths(cluster.job_id), Mark(f"labeller-{self._trigger_id()}", cluster.kernel.now_ms)
        if kept and rng.random() < UNLABEL_SHARE:
            number = rng.choice(kept)
            self._labels.discard(number)
            cluster.observe(Labelled(cluster.kernel.now_ms, number, keeps=False))
            self._begin(f"takes the label of {number} back", remove_label(paths, f"l-{number}", mark), lambda: None)
        elif free:
            number = rng.choice(free)
            self._busy.add(number)
            self._begin(f"labels {number}", add_label(paths, number, f"l-{number}", mark), lambda: self._labelled(number))

    def _labelled(self, number: int) -> None:
        self._labels.add(number)
        self._cluster.observe(Labelled(self._cluster.kernel.now_ms, number, keeps=True))

    def _begin(self, what: str, flow: Flow[Any], done: Callable[[], None]) -> None:
        """Run a tool's flow, an operation an event. It is told apart whether it ended well: an error promises nothing."""
        assert self._labelling is not None
        trace = self._cluster.trace
        trace.add("user", what)

        def ended(result: Any, error: BaseException | None) -> None:
            if error is None:
                done()
            else:
                trace.add("user", f"could not: {what}", type(error).__name__)

        self._labelling.drive(flow, ended, self._label_storage)

    def say_again(self) -> str | None:
        """The next driver's restore: until the job has a checkpoint since it went back, each submission has to permit it."""
        if not self.rewinds:
            return None
        self.rewinds.add("latest")
        return "latest"

    def misses(self, restore: str | None) -> bool:
        """Whether it names an older snapshot that existed when a user chose it, and has been deleted by retention since."""
        if restore not in self._older:
            return False
        cluster = self._cluster
        if "/" in restore:
            return cluster.store(restore).size(METADATA_NAME) is None
        return any(cluster.state.size(f"{cluster.job_id}/chk-{restore}/{name}") is None for name in (CLAIM_NAME, METADATA_NAME))

    def job_ended(self) -> None:
        """The job may have been stopped with its result unknown: its user then starts from the last checkpoint."""
        if self._unsure:
            self._unsure = False
            self._cluster.start_driver("latest")

    # ------------------------------------------------------------------------------------------------------------- steps

    def _trigger_id(self) -> str:
        self._requests += 1
        return f"wish-{self._requests}"

    def _ask(self, request: str, body: Any, kind: Any, reply: Reply) -> None:
        self._client.ask(Call(self._user, request, self._cluster.job_id), body, kind, reply)

    def _stop_job(self, request: UserRequest, tries: int) -> None:
        """Retry until the request is accepted, then poll until it has ended."""

        def asked(answer: Any) -> None:
            if isinstance(answer, HoldfastError):
                self._again(tries, lambda: self._stop_job(request, tries - 1))
            else:
                self._follow(request, REQUEST_TRIES)

        self._ask("wish", request, str, asked)

    def _change_settings(self, request: UserRequest, tries: int) -> None:
        """Retry until the change is made or refused."""

        def asked(answer: Any) -> None:
            refused = isinstance(answer, InvalidConfigError | FencedError)
            if isinstance(answer, HoldfastError) and not refused and tries > 0 and not self._cluster.outcome:
                self._cluster.kernel.after(REQUEST_POLL_US, lambda: self._change_settings(request, tries - 1), self._user)

        self._ask("wish", request, JobConfig, asked)

    def _again(self, tries: int, act: Callable[[], None]) -> None:
        cluster = self._cluster
        if tries > 0 and not (cluster.outcome and cluster.outcome != "FINISHED"):
            cluster.kernel.after(REQUEST_POLL_US, act, self._user)
        else:
            cluster.pending -= 1
            cluster.trace.add("user", "gives up")
            self._unsure = True
            if cluster.outcome:
                self.job_ended()

    def _follow(self, request: UserRequest, tries: int) -> None:
        def told(answer: Any) -> None:
            if isinstance(answer, RequestResult) and not answer.in_progress:
                if answer.location:
                    self._restore_from(answer.location, REQUEST_TRIES)
                else:
                    self._again(0, lambda: None)
            elif isinstance(answer, NotFoundError):
                self._again(0, lambda: None)
            else:
                self._again(tries, lambda: self._follow(request, tries - 1))

        self._ask("outcome", request.trigger_id, RequestResult, told)

    def _restore_from(self, location: str, tries: int) -> None:
        """Start the stopped job again once it has ended."""
        cluster = self._cluster
        if not cluster.outcome:
            self._again(tries, lambda: self._restore_from(location, tries - 1))
            return
        cluster.pending -= 1
        if self._tools.random() < COPY_SHARE:
            location = self._moved(location)
        if self._random.random() < CLAIM_SHARE:
            self.claims.add(location)
        cluster.trace.add("user", "claims" if location in self.claims else "restores", location.rpartition("/")[0])
        cluster.start_driver(location)
        if location in self.claims:
            cluster.kernel.after(DISPOSE_AFTER_US, lambda: self._dispose_claimed(location), self._user)

    # ------------------------------------------------------------------------------------------------------------- tools

    def _moved(self, location: str) -> str:
        """Location of a copy of the savepoint; its own if storage let none succeed."""
        folder = location.rstrip("/").removesuffix(f"/{METADATA_NAME}")
        copied = self._copy(folder, "copy")
        if copied and self._tools.random() < DISPOSE_SHARE:
            unwanted = self._copy(folder, "unwanted")
            if unwanted:
                self._dispose(unwanted)
        return copied or location

    def _copy(self, folder: str, what: str) -> str | None:
        """Try some folders: one with remains of a failed try is not written again."""
        cluster = self._cluster
        parent, _, name = folder.rpartition("/")
        storage = cluster.stores.client(self._user).at(parent)
        for number in range(1, TOOL_TRIES + 1):
            target = f"{name}-{what}-{number}"
            try:
                metadata = decode_metadata(storage.execute(ReadFile(f"{name}/{METADATA_NAME}")), folder)
                copy_snapshot(StoredSnapshot(metadata, storage, name), storage, target, nonce=target)
            except HoldfastError as error:
                cluster.trace.add("user", "could not copy", f"{target}: {type(error).__name__}")
            else:
                cluster.trace.add("user", "copied", target)
                return f"{parent}/{target}"
        return None

    def _dispose_claimed(self, location: str) -> None:
        """Try to delete what a running job was given: it is refused as long as the job may need it."""
        folder = location.rstrip("/").removesuffix(f"/{METADATA_NAME}")
        if self._cluster.outcome or not is_claimed(self._cluster.store(folder)):
            return
        self._dispose(folder, tries=1)

    def _dispose(self, folder: str, tries: int = TOOL_TRIES) -> None:
        cluster = self._cluster
        storage = RoutedStorage(cluster.stores.client(self._user))
        for number in range(1, tries + 1):
            try:
                run_flow(dispose_snapshot(folder, f"user-{number}", cluster.kernel.now_ms), storage)
            except HoldfastError as error:
                cluster.trace.add("user", "could not dispose of", f"{folder.rpartition('/')[2]}: {type(error).__name__}")
            else:
                cluster.trace.add("user", "disposed of", folder.rpartition("/")[2])
                return


def draw_changes(rng: random.Random) -> dict[str, SettingValue]:
    """One to three settings, with values that a job may have; together with its others they may be refused."""
    choices: dict[str, tuple[SettingValue, ...]] = {
        "checkpoint_interval_ms": (None, 40, 80, 150, 300),
        "checkpoint_interval_during_backlog_ms": (None, 0, 200, 600),
        "checkpoint_timeout_ms": (2_000, 3_000, 5_000),
        "min_pause_ms": (0, 20, 80),
        "tolerable_failed_checkpoints": (0, 1, 3, 10),
        "unaligned_checkpoints": (False, True, True),
        "aligned_checkpoint_timeout_ms": (0, 5, 40, 1_000),
    }
    return {name: rng.choice(choices[name]) for name in rng.sample(sorted(choices), rng.randint(1, 3))}


def draw_mode(rng: random.Random) -> CheckpointMode:
    """Of a checkpoint by hand; half of them are as the job's settings say. A job may have to refuse it."""
    return CheckpointMode(rng.choice((None, None, None, False, True, True)), rng.choice((None, None, None, 0, 20, 1_000)))


def older_snapshots(state: StoreView, job_id: str, savepoints: StoreView, claimed: Collection[str | None]) -> list[str]:
    """Snapshots that a submission can name to go back: ids of the job's snapshots but the newest one, and folders of savepoints.

    `claimed`: folders that the job owns; their ids name nothing any more once it has checkpoints of its own."""
    numbers = []
    for path in state.paths(job_id):
        folder, _, name = path.removeprefix(f"{job_id}/").partition("/")
        number = parse_checkpoint_name(folder)
        if number is None or name != METADATA_NAME or state.size(f"{job_id}/{folder}/{CLAIM_NAME}") is None:
            continue
        decision = decode_decision(state.peek(path) or b"", path)
        if isinstance(decision, Completed) or (isinstance(decision, SavepointRecord) and decision.folder not in claimed):
            numbers.append(number)
    found = [path.split("/") for path in savepoints.paths()]
    folders = [parts[0] for parts in found if parts[1:] == [METADATA_NAME] and "-unwanted-" not in parts[0]]
    return [str(number) for number in sorted(numbers)[:-1]] + [f"{SAVEPOINTS}/{folder}" for folder in sorted(folders)]


def completed_ids(state: StoreView, job_id: str) -> list[int]:
    """Ids of completed checkpoints of a job, ascending."""
    found = []
    for path in state.paths(job_id):
        folder, _, name = path.removeprefix(f"{job_id}/").partition("/")
        number = parse_checkpoint_name(folder)
        if number is not None and name == METADATA_NAME and isinstance(decode_decision(state.peek(path) or b"", path), Completed):
            found.append(number)
    return sorted(found)


def is_claimed(snapshot: StoreView) -> bool:
    """Whether a job has recorded its ownership in a snapshot's folder."""
    return any(parse_owner_name(path) is not None for path in snapshot.paths())
