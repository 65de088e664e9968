"""CPU seconds of a process and all its descendants: on a shared machine they hold better than wall time."""

from __future__ import annotations

import os
import time

import psutil


def tree_cpu_s(pid: int | None = None) -> float:
    """User and system time of `pid` (default: this process) and of every descendant that is still there. A process
    alone is read at full resolution, descendants in clock ticks."""
    process = psutil.Process(pid)
    own = time.process_time() if process.pid == os.getpid() else _cpu_s(process)
    return own + sum(_cpu_s(child) for child in process.children(recursive=True))


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads of one other process, in nanoseconds' resolution: its clock by the kernel's
    own number for it (clock_getcpuclockid in <time.h>, which Python has for threads only). Linux."""
    return time.clock_gettime((~pid << 3) | 2)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
