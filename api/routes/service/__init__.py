"""The paths of the service itself: its members, tokens, audit log, metrics, events and pages."""
