"""The real server with the demo model, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--kv-slots", "65536", "--states", "256")


def environment() -> dict[str, str]:
    """For child processes: they find the package and ``tests``, whatever runs us."""
    path = [str(ROOT / "src"), str(ROOT), *(entry for entry in sys.path if entry)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


class RealServer:
    """``hyradix serve`` on a free port. A context manager; ``url`` has no /v1."""

    def __init__(self, *options: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hyradix", "serve", "--port", "0", *SMALL, *options],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        self.url = ""

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def __enter__(self) -> RealServer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "http" not in line:
            self.process.wait(10)
            raise AssertionError(f"the server did not start: {line}{self.errors}")
        self.url = line.split()[-1].removesuffix("/v1")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
