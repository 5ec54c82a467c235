"""Flink's monitoring dialect, field by field: task managers, logs, thread dumps and the coordinator's own process.

A worker process has one slot, and tells nothing of its memory and processors: those fields are unknown, -1 or null."""

from __future__ import annotations

from pydantic import Field

from holdfast.api.flink.schemas import UNKNOWN, HexId, Record


class ResourceProfile(Record):
    cpuCores: float = UNKNOWN
    taskHeapMemory: int = UNKNOWN
    taskOffHeapMemory: int = UNKNOWN
    managedMemory: int = UNKNOWN
    networkMemory: int = UNKNOWN
    extendedResources: dict[str, float] = Field(default_factory=dict)


class Hardware(Record):
    cpuCores: int = UNKNOWN
    physicalMemory: int = UNKNOWN
    freeMemory: int = UNKNOWN
    managedMemory: int = UNKNOWN


class MemoryConfiguration(Record):
    frameworkHeap: int | None = None
    taskHeap: int | None = None
    frameworkOffHeap: int | None = None
    taskOffHeap: int | None = None
    networkMemory: int | None = None
    managedMemory: int | None = None
    jvmMetaspace: int | None = None
    jvmOverhead: int | None = None
    totalFlinkMemory: int | None = None
    totalProcessMemory: int | None = None


class TaskManager(Record):
    """A worker process."""

    id: str
    path: str
    """Where it takes records."""
    dataPort: int
    jmxPort: int = UNKNOWN
    timeSinceLastHeartbeat: int
    """When it was last heard of, whatever Flink calls it."""
    slotsNumber: int = 1
    freeSlots: int
    assignedTasks: int
    totalResource: ResourceProfile = ResourceProfile()
    freeResource: ResourceProfile = ResourceProfile()
    hardware: Hardware = Hardware()
    memoryConfiguration: MemoryConfiguration = MemoryConfiguration()


class TaskManagers(Record):
    taskmanagers: list[TaskManager]


class AllocatedSlot(Record):
    jobId: HexId
    resource: ResourceProfile = ResourceProfile()
    assignedTasks: int


class GarbageCollector(Record):
    name: str
    count: int
    time: int


class TaskManagerMetrics(Record):
    heapUsed: int = UNKNOWN
    heapCommitted: int = UNKNOWN
    heapMax: int = UNKNOWN
    nonHeapUsed: int = UNKNOWN
    nonHeapCommitted: int = UNKNOWN
    nonHeapMax: int = UNKNOWN
    directCount: int = UNKNOWN
    directUsed: int = UNKNOWN
    directMax: int = UNKNOWN
    mappedCount: int = UNKNOWN
    mappedUsed: int = UNKNOWN
    mappedMax: int = UNKNOWN
    nettyShuffleMemorySegmentsAvailable: int = UNKNOWN
    nettyShuffleMemorySegmentsUsed: int = UNKNOWN
    nettyShuffleMemorySegmentsTotal: int = UNKNOWN
    nettyShuffleMemoryAvailable: int = UNKNOWN
    nettyShuffleMemoryUsed: int = UNKNOWN
    nettyShuffleMemoryTotal: int = UNKNOWN
    garbageCollectors: list[GarbageCollector] = Field(default_factory=list)


class TaskManagerDetails(TaskManager):
    allocatedSlots: list[AllocatedSlot]
    metrics: TaskManagerMetrics = TaskManagerMetrics()


# -------------------------------------------------------------------------------------------------------- the process


class LogFile(Record):
    name: str
    size: int
    mtime: int


class LogFiles(Record):
    logs: list[LogFile]


class ThreadInfo(Record):
    threadName: str
    stringifiedThreadInfo: str


class ThreadDump(Record):
    threadInfos: list[ThreadInfo]


class ConfigurationEntry(Record):
    key: str
    value: str


class Interpreter(Record):
    version: str
    arch: str
    options: list[str]


class Environment(Record):
    """Of the process, in Flink's words."""

    jvm: Interpreter
    classpath: list[str]


class LogUrl(Record):
    url: str
