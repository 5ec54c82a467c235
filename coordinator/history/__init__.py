"""The history of a job: what happened to it, as files in its directory. It survives leader and job; nothing rests on it."""
