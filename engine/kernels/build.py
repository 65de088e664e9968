"""Builds the native kernels once for each source, torch, Python and processor, and loads them.

    ~/.cache/kvbaton/kernels/<key>.lock      held while building: a second worker waits and finds the result
    ~/.cache/kvbaton/kernels/<key>/          appears whole, by a rename

Blocking, on any thread. Without a compiler there are no kernels: `load` returns why, and plain torch computes.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

NAME = "kvbaton_kernels"
SOURCES = Path(__file__).parent / "native"
CACHE_ENV = "KVBATON__CACHE_DIR"
SANITIZE_ENV = "KVBATON_KERNELS_SANITIZE"
"""Set to 1: address and undefined behaviour sanitizers (`make test-kernels`)."""


@functools.cache
def load() -> Any | str:
    """The extension module, or the reason why there is none. Logs one line where it builds or cannot."""
    try:
        path = _built()
        return _import(path)
    except (OSError, RuntimeError, ImportError) as error:
        reason = _one_line(error)
        logger.warning("no native CPU kernels, computing in plain torch: %s", reason)
        return reason


def compiler() -> str | None:
    """The path of the C++ compiler: $CXX or c++."""
    return shutil.which(os.environ.get("CXX", "c++"))


def cache_dir() -> Path:
    """As services.model_store.cache_dir, which the engine must not import. Raises RuntimeError without a home."""
    if stated := os.environ.get(CACHE_ENV):
        return Path(stated) / "kernels"
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "kvbaton" / "kernels"


def build_key() -> str:
    """Whatever the binary depends on."""
    digest = hashlib.blake2b(digest_size=10)
    for path in _source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    parts = (torch.__version__, sys.implementation.cache_tag, platform.machine(), *_flags(), _cpu_flags())
    digest.update("\0".join(str(part) for part in parts).encode())
    return digest.hexdigest()


def _built() -> Path:
    """The shared library, built if it is not there yet."""
    root = cache_dir()
    key = build_key()
    library = _library(root / key)
    if library is None:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            if _library(root / key) is None:
                _build(root, key)
        library = _library(root / key)
    assert library is not None
    return library


def _library(directory: Path) -> Path | None:
    """torch numbers the names of what one process builds again."""
    return next(directory.glob(f"{NAME}*.so"), None)


def _build(root: Path, key: str) -> None:
    if compiler() is None:
        raise RuntimeError(f"no C++ compiler ({os.environ.get('CXX', 'c++')}); install g++ or clang++")
    # Imported here: it looks for compilers and CUDA when imported.
    from torch.utils import cpp_extension

    logger.warning("building the native CPU kernels, once for this machine (about half a minute)")
    started = time.monotonic()
    directory = tempfile.mkdtemp(prefix=f"{key}.", dir=root)
    try:
        with _ninja_on_path():
            cpp_extension.load(
                name=NAME,
                sources=[str(path) for path in _source_files() if path.suffix == ".cpp"],
                extra_cflags=_flags(),
                extra_ldflags=["-fopenmp", *_sanitizer_flags()],
                build_directory=directory,
                is_python_module=False,
            )
        os.rename(directory, root / key)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    logger.warning("built the native CPU kernels in %.0f s", time.monotonic() - started)


def _one_line(error: Exception) -> str:
    """The compiler's first complaint, of all that a failed build prints."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if " error: " in line), lines[0])


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _flags() -> list[str]:
    """ATen's vector types have the width that torch itself chose for this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    if platform.machine() in ("x86_64", "AMD64"):
        vectors += {"AVX512": ["-march=native"], "AVX2": ["-mavx2", "-mfma", "-mf16c"]}.get(capability, [])
    elif platform.machine() == "aarch64":
        vectors += ["-mcpu=native"]
    quiet = ["-Wno-unknown-pragmas", "-Wno-ignored-attributes"]
    return [
        "-O3",
        "-fopenmp",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        *vectors,
        *quiet,
        *_sanitizer_flags(),
    ]


def _sanitizer_flags() -> list[str]:
    if os.environ.get(SANITIZE_ENV) != "1":
        return []
    # vptr needs the type information of pybind11's classes, which torch was built without.
    return ["-g", "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"]


def _cpu_flags() -> str:
    """What -march=native depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """The ninja of our own environment, which need not be activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), before))
    try:
        yield
    finally:
        os.environ["PATH"] = before
