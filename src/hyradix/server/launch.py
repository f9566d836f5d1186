"""Runs a server: the port, the engine process, uvicorn, signals, and the order of their ends.

Owns: the life of the two processes. Does not know: endpoints, the command line.
Invariants: the port is tried before anything is loaded; torch is never imported here; one signal
finishes or cancels what runs and ends with code 0 within ten seconds, a second one kills.
Read next: ``app.py``, ``engine/client.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from hyradix.config import Settings
from hyradix.engine.client import DEFAULT_FACTORY, EngineClient
from hyradix.engine.loading_bar import LoadingBar
from hyradix.engine.messages import EngineInfo
from hyradix.errors import ConfigError, EngineDeadError, HyradixError, ModelLoadError
from hyradix.server.app import create_app
from hyradix.server.frontend import ChatTemplate, ServerConfig, Tokenizer

EXIT_FAILED, EXIT_USAGE, EXIT_KILLED = 1, 2, 130
FINISH_S = 3.0
"""How long running requests may go on after the first signal before they are cancelled."""
CLOSE_S = 5
"""How long connections may stay open after it (clients that do not read)."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: theirs to close, or a request meets a closed one."""
MIB = 1 << 20

TextLoader = Callable[[Path], tuple[Tokenizer, ChatTemplate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What ``hyradix serve`` can be told."""

    settings: Settings
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    api_key: str | None = None
    max_body_mib: int = 32
    cors_origins: tuple[str, ...] = ()
    log_level: str = "info"


def run_server(
    options: ServeOptions, load_text: TextLoader, *, factory: str = DEFAULT_FACTORY
) -> int:
    """Serve until told to stop; returns the exit code. Errors are one line on stderr."""
    try:
        configure_logging(options.log_level)
        with bind(options.host, options.port) as listener:
            return asyncio.run(Supervisor(options, load_text, factory).run(listener))
    except (ConfigError, ModelLoadError) as error:
        return _fail(error.message, EXIT_USAGE)
    except HyradixError as error:
        return _fail(error.message, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_KILLED


def _fail(message: str, code: int) -> int:
    print(f"hyradix: error: {message}", file=sys.stderr)
    return code


def configure_logging(level: str) -> None:
    """Log to stderr; uvicorn's own lines only where they are warnings."""
    known = logging.getLevelNamesMapping()
    if level.upper() not in known:
        raise ConfigError(f"--log-level must be one of {', '.join(known).lower()}, got {level!r}")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    noisy = logging.NOTSET if level.upper() == "DEBUG" else logging.WARNING
    for name in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(noisy)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError) as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _port_error(host, port, error) from None
    return listener


def _port_error(host: str, port: int, error: Exception) -> ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another one with --port")
    return ConfigError(f"cannot listen on {host} port {port}: {error}")


class Supervisor:
    """Starts the parts, waits for a signal, stops them in the reverse order."""

    def __init__(self, options: ServeOptions, load_text: TextLoader, factory: str) -> None:
        self._options = options
        self._load_text = load_text
        self._client = EngineClient(options.settings, factory=factory, log_level=options.log_level)
        self._log = logging.getLogger("hyradix.server")
        self._server: QuietServer | None = None
        self._finishing: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket) -> int:
        """Serve on ``listener``. Raises what the engine's start-up failed with."""
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._client.start()
        try:
            if await self._load():
                await self._serve(listener)
        finally:
            await self._client.stop()
            if self._finishing is not None:
                self._finishing.cancel()
        return 0

    async def _load(self) -> bool:
        """Wait for the engine. False if a signal came first."""
        with LoadingBar(is_shown=sys.stderr.isatty()) as bar:
            ready = asyncio.create_task(self._client.wait_ready(bar.update))
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not ready.done():
            ready.cancel()
            return False
        ready.result()
        return not self._stop.is_set()

    async def _serve(self, listener: socket.socket) -> None:
        info = self._client.info
        tokenizer, template = self._load_text(Path(info.model_dir))
        random_source = random.Random(self._options.settings.seed)
        app = create_app(
            self._client,
            tokenizer,
            template,
            self._server_config(info),
            draw_seed=lambda: random_source.getrandbits(63),
        )
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=self._options.log_level == "debug",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = QuietServer(config, on_started=lambda: self._announce(listener))
        try:
            await self._server.serve(sockets=[listener])
        except OSError as error:
            raise _port_error(self._options.host, self._options.port, error) from None

    def _server_config(self, info: EngineInfo) -> ServerConfig:
        options, aliases = self._options, frozenset[str]()
        if options.settings.random_weights is None:
            aliases = frozenset({Path(info.model_dir).name, options.settings.model})
        return ServerConfig(
            served_model_name=info.model_name,
            model_aliases=aliases,
            api_key=options.api_key,
            max_body_bytes=options.max_body_mib * MIB,
            cors_origins=options.cors_origins,
        )

    def _announce(self, listener: socket.socket) -> None:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        port = listener.getsockname()[1]
        print(
            f"Hyradix serves {self._client.info.model_name} at http://{host}:{port}/v1", flush=True
        )

    # ---- the end ---------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._client.kill()
            os._exit(EXIT_KILLED)
        self._log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()
        if self._server is not None:
            self._server.should_exit = True
            self._finishing = asyncio.create_task(self._finish_or_cancel())

    async def _finish_or_cancel(self) -> None:
        deadline = time.monotonic() + FINISH_S
        while self._client.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._client.cancel_all(EngineDeadError("the server is shutting down"))


class QuietServer(uvicorn.Server):
    """uvicorn, with signals left to the supervisor and a callback when it listens."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone (uvicorn would raise them again at the end)."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_started()
