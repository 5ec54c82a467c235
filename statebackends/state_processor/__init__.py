"""Tools on whole snapshots: read a state as a stream, verify, compare, export, copy.

They need a storage and a `_metadata`: no job, no coordinator, none of the user's classes. Nothing is ever unpickled, and
memory is bounded by a batch of rows or by one key group, whatever the size of the state."""
