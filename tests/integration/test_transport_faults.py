"""A fault in any message: the handoff ends as it must, nothing wrong is written, memory comes back, the next works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fault_bodies import CASES, DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("faults", CASES)
@pytest.mark.parametrize("plane", ["inproc", "ucx"])
def test_a_fault_is_survived(plane: str, faults: str) -> None:
    command = [sys.executable, "-m", "tests.support.fault_bodies", plane, faults, CASES[faults]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S + 30, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
