"""Stock Spark queries that write to our sinks, each batch once."""
