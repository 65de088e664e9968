"""Every plane holds the same contract: one process a body, as UCX belongs to one event loop of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plane_bodies import BODIES, DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("plane", ["inproc", "ucx"])
def test_contract(plane: str, body: str) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.support.plane_bodies", plane, body]
    if plane == "ucx":  # its library warns at import
        command[1:3] = []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S + 30, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "WARNING Listener" not in done.stdout + done.stderr
