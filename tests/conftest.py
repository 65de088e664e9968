"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# A machine that is busy with other work makes any single example slow: that is no fault of the code.
settings.register_profile("kvbaton", deadline=None)
settings.load_profile("kvbaton")
