"""How many cores a process may count on: what it is pinned to, and what its cgroup pays for. Linux."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def default_threads(cores: Sequence[int], cgroup: Path = CGROUP) -> int:
    """Threads for one tensor operation of a process on `cores`; empty: on those it was given.

    A container's CPU limit is a quota of time, not a set of cores: more threads than it pays for would be throttled in
    the middle of an operation, all of them waiting for one.
    """
    num_cores = len(cores) or len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return num_cores if quota is None else max(1, min(num_cores, math.floor(quota + 0.5)))


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """CPU seconds a second that the cgroup of this process may use; None: no limit, or none that can be read."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
