"""The paths of what happens to snapshots between their making and their end."""
