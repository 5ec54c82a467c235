"""Records between subtasks: partitioners, channels, credit, and their frames."""
