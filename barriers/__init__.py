"""What flows between subtasks, and the protocol between workers and coordinator.

A number in a comment here, such as I11 or K06, is a rule of docs/invariants.md."""
