"""What a person sees of `kvbaton serve`: a bar while weights load, one line as each process becomes ready."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ServeConsole:
    """Writes to standard error, so that standard output stays free. Use as a context around start-up."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def loading(self, name: str, fraction: float) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0)
        self._progress.update(self._tasks[name], completed=fraction)

    def ready(self, name: str, text: str) -> None:
        if name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))
        self.say(f"[green]ready[/green] {escape(name):<10} {escape(text)}")

    def say(self, text: str) -> None:
        """`text` is rich markup."""
        self._console.print(text, soft_wrap=True)

    def log(self, name: str, line: str) -> None:
        self.say(f"[dim]{escape(name)}[/dim] {escape(line)}")

    def crashed(self, name: str, status: int, last_lines: list[str]) -> None:
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self.say(f"[red]crash[/red] {escape(name)} {how}{'; its last lines:' if last_lines else ''}")
        for line in last_lines:
            self.say(f"      {escape(line)}")
