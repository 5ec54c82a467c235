"""Keys, state, backends, snapshot format, storage.

Scenarios that comments name by a letter and a number (P06) are listed in docs/invariants.md."""
