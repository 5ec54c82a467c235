from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right; two processes and Spark share it.
settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")
