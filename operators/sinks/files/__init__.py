"""The exactly-once sinks of files: rows become staged files, a log commits them, merges tidy up."""
