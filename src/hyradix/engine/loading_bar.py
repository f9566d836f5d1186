"""Progress bars of the offline engine: loading a model, running a batch.

Owns: how progress looks (rich, on stderr). Does not know: what is in progress.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hyradix.engine.messages import RequestOutput


class _Bar:
    """Shown inside its ``with`` block, and gone behind it."""

    def __init__(self, *, is_shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not is_shown,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class LoadingBar(_Bar):
    """One bar per stage of loading."""

    def __init__(self, *, is_shown: bool) -> None:
        super().__init__(is_shown=is_shown)
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        """``stage`` is ``done`` of ``total``."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, note="")
        self._progress.update(self._tasks[stage], completed=done, total=total)


class BatchBar(_Bar):
    """Prompts finished, and tokens generated."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        super().__init__(is_shown=is_shown)
        self._task = self._progress.add_task("Generating", total=total, note="")
        self._num_tokens = 0

    def advance(self, output: RequestOutput, *, is_last: bool) -> None:
        """Count what ``output`` brought; ``is_last``: it completes its prompt."""
        self._num_tokens += len(output.token_ids)
        self._progress.update(self._task, advance=int(is_last), note=f"{self._num_tokens} tokens")


def batch_bar(total: int, *, is_shown: bool) -> BatchBar:
    """A bar for ``total`` prompts."""
    return BatchBar(total, is_shown=is_shown)
