"""What sinks keep in a state directory, and how it is read."""
