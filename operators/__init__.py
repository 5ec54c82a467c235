"""Package of the DSL, operators, sources, sinks, the task runtime, and workers on Spark.

A number in a comment here, such as I11 or K06, is a rule of docs/invariants.md."""
