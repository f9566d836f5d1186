"""A real server with a real engine process that runs a fake engine.

``python -m tests.support.fake_server FACTORY PORT [NAME=VALUE ...]`` is what ``FakeServer`` starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from hyradix.config import Settings
from hyradix.server.launch import ServeOptions, run_server
from tests.support.fake_text import load_fake_text


class FakeServer:
    """Starts the server process and stops it. A context manager."""

    def __init__(self, factory: str = "build", *, port: int = 0, **options: Any) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        listed = [f"{name}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_server", factory, str(port), *listed],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.url = ""

    def __enter__(self) -> FakeServer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "http" not in line:
            _, errors = self.process.communicate(timeout=10)
            raise AssertionError(f"the server did not start: {line}{errors}")
        self.url = line.split()[-1].removesuffix("/v1")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        children: list[str] = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += (task / "children").read_text().split()
        (engine,) = children
        return int(engine)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, float]:
        """Send a signal; returns the exit code, stderr and the seconds it took."""
        started = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.wait(started)

    def wait(self, started: float | None = None) -> tuple[int, str, float]:
        """Wait for the end of the process; kills it after 15 seconds."""
        started = time.monotonic() if started is None else started
        try:
            _, errors = self.process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
        except ValueError:  # communicated before
            errors = ""
        return self.process.returncode, errors, time.monotonic() - started


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition: Any, timeout_s: float = 5.0) -> bool:
    """Poll until ``condition()`` holds; False when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def main() -> int:
    factory, port, *listed = sys.argv[1:]
    options: dict[str, Any] = dict(item.split("=", 1) for item in listed)
    settings = Settings(model="fake", max_context=8192)
    numbers = {name: int(options.pop(name)) for name in ("max_body_mib",) if name in options}
    serve = ServeOptions(settings=settings, port=int(port), **numbers, **options)
    return run_server(serve, load_fake_text, factory=f"tests.support.fake_engine:{factory}")


if __name__ == "__main__":
    sys.exit(main())
