"""Running a command as the user that admission gave a pod, who has no entry in passwd and no home.

The interpreter, its packages or the checkout may lie in a folder that only root may enter. Then the process gets a
mount namespace in which that folder is an empty one with those paths in it. Needs root; without it pods run as the
caller.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def as_user(uid: int, command: list[str], scratch: Path) -> list[str]:
    """The command line that root runs; the command keeps its process id. `scratch` is an empty folder of ours."""
    drop = ["setpriv", f"--reuid={uid}", "--regid=0", "--clear-groups", *command]
    closed = _closed_folders()
    if not closed:
        return drop
    return [
        "unshare",
        "--mount",
        "--propagation=private",
        "sh",
        "-ec",
        f'{_opening(closed, scratch)}\nexec "$@"',
        "sh",
        *drop,
    ]


def _needed() -> list[Path]:
    prefixes = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    return sorted(path for path in prefixes if not any(other in path.parents for other in prefixes))


def _closed_folders() -> dict[Path, list[Path]]:
    """Outermost folders that others may not enter, with the needed paths below."""
    found: dict[Path, list[Path]] = {}
    for path in _needed():
        for folder in [*reversed(path.parents), path]:
            if not os.stat(folder).st_mode & stat.S_IXOTH:
                found.setdefault(folder, []).append(path)
                break
    return found


def _opening(closed: dict[Path, list[Path]], scratch: Path) -> str:
    lines = []
    for folder, paths in closed.items():
        for number, path in enumerate(paths):
            hold = scratch / f"hold-{number}"
            hold.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(path))} {shlex.quote(str(hold))}")
        lines.append(f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}")
        for number, path in enumerate(paths):
            where = shlex.quote(str(path))
            lines.append(f"mkdir -p {where}\nmount --bind {shlex.quote(str(scratch / f'hold-{number}'))} {where}")
    return "\n".join(lines)
