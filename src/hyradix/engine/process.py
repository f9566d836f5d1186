"""The engine process: one loop that takes messages, steps the engine and sends what came out.

Owns: the loop, its sockets, its signals and its death. Does not know: HTTP, tokenizers, and of
the engine only ``SteppableEngine``.
Invariants: messages are handled between steps, never during one; an idle engine blocks on its
socket; one bad request never ends the process, an exception out of ``step()`` always does (its
state is unknown then); the process never outlives its parent.
Read next: ``client.py`` (the other end), ``engine.py`` (what a step is).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Protocol, cast

import msgspec
import zmq

from hyradix.config import Settings
from hyradix.engine.messages import (
    Abort,
    Cache,
    CacheView,
    EngineInfo,
    EngineStats,
    Failed,
    Flush,
    Flushed,
    FromEngine,
    GetCache,
    GetStats,
    Outputs,
    Progress,
    Ready,
    RequestOutput,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    refusal_of,
)
from hyradix.engine.step_log import StepLog, pool_lines
from hyradix.errors import HyradixError
from hyradix.request import Request

IDLE_POLL_MS = 500
"""How long an idle engine sleeps on its socket before it looks at its flags."""
DRAIN_S = 1.5
"""How long a stopping engine goes on stepping to deliver the ends of what it aborted."""
LINGER_MS = 1000
LENGTH_BYTES = 4
PROGRESS_INTERVAL_S = 0.05

ProgressCallback = Callable[[str, int, int], None]


class SteppableEngine(Protocol):
    """The engine as this process sees it."""

    info: EngineInfo

    def add(self, request: Request) -> RequestOutput | None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def cache_view(self) -> CacheView: ...
    def flush_cache(self) -> bool: ...


EngineFactory = Callable[[Settings, ProgressCallback], SteppableEngine]


class Launch(msgspec.Struct, kw_only=True):
    """What the parent writes to the child's standard input: a length, then this as msgpack."""

    settings: Settings
    factory: str
    """Dotted name of an ``EngineFactory``: ``package.module:function``."""
    directory: str
    """Private directory of the two sockets."""
    log_level: str = "info"


def socket_addresses(directory: str) -> tuple[str, str]:
    """ZeroMQ addresses (to the engine, from the engine) in a private directory."""
    return f"ipc://{directory}/to-engine", f"ipc://{directory}/from-engine"


class EngineChannel:
    """The engine's end of the two sockets."""

    def __init__(self, to_engine: str, from_engine: str) -> None:
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.set_hwm(0)
            socket.linger = LINGER_MS
        self._pull.connect(to_engine)
        self._push.connect(from_engine)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """Return every message that is there, waiting up to ``timeout_ms`` for the first."""
        messages: list[ToEngine] = []
        while self._pull.poll(0 if messages else timeout_ms):
            messages.append(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._push.send(self._encoder.encode(message))

    def close(self) -> None:
        """Deliver what is queued (for up to ``LINGER_MS``) and close."""
        self._pull.close()
        self._push.close()
        self._context.term()


class EngineLoop:
    """Takes messages, steps, sends outputs, until told to stop."""

    def __init__(self, engine: SteppableEngine, channel: EngineChannel, step_log: StepLog) -> None:
        self._engine = engine
        self._channel = channel
        self._step_log = step_log
        self._log = logging.getLogger("hyradix.engine")
        self._open_ids: set[str] = set()
        self._is_stopping = False

    def request_stop(self) -> None:
        """Make ``run`` return soon. Safe in a signal handler."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve until stopped, then abort what is open. Raises whatever ``step()`` raises."""
        self._step_log.update(self._engine.stats)
        while not self._is_stopping:
            timeout_ms = 0 if self._engine.has_work() else IDLE_POLL_MS
            for message in self._channel.receive(timeout_ms):
                self._handle(message)
            if self._engine.has_work():
                self._send_outputs(self._engine.step())
            self._step_log.update(self._engine.stats)
        self._drain()

    def _drain(self) -> None:
        for request_id in sorted(self._open_ids):
            self._engine.abort(request_id)
        deadline = time.monotonic() + DRAIN_S
        while self._engine.has_work() and time.monotonic() < deadline:
            self._send_outputs(self._engine.step())

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request=request):
                self._add(request)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    if request_id in self._open_ids:
                        self._engine.abort(request_id)
            case GetStats(call_id=call_id):
                self._channel.send(Stats(call_id=call_id, stats=self._engine.stats()))
            case GetCache(call_id=call_id):
                self._channel.send(Cache(call_id=call_id, view=self._engine.cache_view()))
            case Flush(call_id=call_id):
                self._channel.send(Flushed(call_id=call_id, is_done=self._engine.flush_cache()))
            case Shutdown():
                self._is_stopping = True

    def _add(self, request: Request) -> None:
        self._open_ids.add(request.request_id)
        refusal: RequestOutput | None
        try:
            refusal = self._engine.add(request)
        except HyradixError as error:
            refusal = refusal_of(request, error)
        except Exception as error:
            self._log.exception("request %s could not be added", request.request_id)
            refusal = refusal_of(request, HyradixError(f"internal error: {error}"))
        if refusal is not None:
            self._send_outputs([refusal])

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._open_ids.difference_update(o.request_id for o in outputs if o.is_finished)
            self._channel.send(Outputs(outputs=outputs))


def engine_main(settings: Settings, channel: EngineChannel, factory: EngineFactory) -> int:
    """Build the engine, serve until stopped, and return the exit code.

    Whatever goes wrong is sent as ``Failed`` before this returns 1: at start-up as the error's own
    code, later as a crash (with a traceback in the log).
    """
    log = logging.getLogger("hyradix.engine")
    try:
        engine = factory(settings, progress_sender(channel))
        gc.collect()
        gc.freeze()  # what was built stays: no collection need walk it while requests run
        for line in pool_lines(engine.info):
            log.info("%s", line)
        loop = EngineLoop(engine, channel, StepLog(log))
        signal.signal(signal.SIGTERM, lambda *_: loop.request_stop())
        channel.send(Ready(info=engine.info))
        loop.run()
    except HyradixError as error:
        log.debug("the engine failed", exc_info=error)
        channel.send(Failed(message=error.message, code=error.code))
        return 1
    except Exception as error:
        log.exception("the engine cannot go on")
        message = f"the engine failed: {type(error).__name__}: {error}"
        channel.send(Failed(message=message, code=HyradixError.code))
        return 1
    return 0


def progress_sender(
    channel: EngineChannel, *, clock: Callable[[], float] = time.monotonic
) -> ProgressCallback:
    """A callback that passes progress on, at a bounded rate; starts and ends of stages always."""
    last_sent = -PROGRESS_INTERVAL_S
    last_stage = ""

    def on_progress(stage: str, done: int, total: int) -> None:
        nonlocal last_sent, last_stage
        now = clock()
        if stage != last_stage or done >= total or now - last_sent >= PROGRESS_INTERVAL_S:
            last_sent, last_stage = now, stage
            channel.send(Progress(stage=stage, done=done, total=total))

    return on_progress


def load_factory(name: str) -> EngineFactory:
    """Import an engine factory by its dotted name. This is where torch enters the process.

    The one place at which the environment is prepared: thread counts are read by libraries when
    they load, so it must come first.
    """
    if importlib.util.find_spec("hyradix.runner.threads") is not None:
        importlib.import_module("hyradix.runner.threads").prepare_environment()
    module_name, _, function_name = name.partition(":")
    return cast(EngineFactory, getattr(importlib.import_module(module_name), function_name))


def exit_with_parent(stdin_fd: int, directory: str) -> None:
    """End this process at once when the parent is gone: its end of our standard input closes.

    Removes the sockets' ``directory``, since nobody else can any more.
    """

    def watch() -> None:
        # os.read, not a buffered reader: a lock held by a daemon thread is fatal at exit.
        while os.read(stdin_fd, 1):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="hyradix-parent-watch", daemon=True).start()


def read_launch(stdin: BinaryIO) -> Launch:
    """Read the frame that the parent writes first."""
    length = int.from_bytes(stdin.read(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(stdin.read(length), type=Launch)


def main() -> int:
    """Entry point of ``python -m hyradix.engine.process``; started by ``EngineClient`` only."""
    # Ctrl-C reaches the whole terminal group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = read_launch(sys.stdin.buffer)
    exit_with_parent(sys.stdin.fileno(), launch.directory)
    logging.basicConfig(
        level=launch.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    channel = EngineChannel(*socket_addresses(launch.directory))
    try:
        return engine_main(launch.settings, channel, _factory_of(launch))
    finally:
        channel.close()


def _factory_of(launch: Launch) -> EngineFactory:
    """Import late, inside ``engine_main``, so that a failing import is reported like the rest."""

    def build(settings: Settings, on_progress: ProgressCallback) -> SteppableEngine:
        return load_factory(launch.factory)(settings, on_progress)

    return build


if __name__ == "__main__":
    sys.exit(main())
