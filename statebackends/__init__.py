"""Keys, state, backends, snapshot format, storage.

A number in a comment here, such as I11 or K06, is a rule of docs/invariants.md."""
