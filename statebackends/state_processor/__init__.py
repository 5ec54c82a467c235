"""Tools on whole snapshots (Flink: State Processor API): read a state as a stream, verify, compare, export, copy, edit, bootstrap.

They need a storage and a `_metadata`: no job, no coordinator, none of the user's classes. They unpickle nothing, and hold a batch
of rows or one key group in memory, whatever the size of the state."""
