"""Several coordinators on one state directory: which one is active, and what the others do meanwhile."""
