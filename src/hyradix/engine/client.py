"""The API server's end of the engine process: starts it, talks to it, notices its death.

Owns: the child process, the sockets, and which stream waits for which request. Does not know:
HTTP, text. Everything here runs on one asyncio loop, except one thread that waits for the child.
Invariants: every stream ends, with its last output or with ``EngineDeadError``; a stream that is
closed early aborts its requests; after the engine's death nothing waits and nothing is accepted.
Read next: ``streams.py``, ``process.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

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
)
from hyradix.engine.process import LENGTH_BYTES, Launch, ProgressCallback, socket_addresses
from hyradix.engine.streams import OutputStream
from hyradix.errors import (
    BusyError,
    ConfigError,
    EngineDeadError,
    HyradixError,
    ModelLoadError,
)
from hyradix.request import Request

DEFAULT_FACTORY = "hyradix.engine.build:build_engine"
FAILED_GRACE_S = 0.2
"""How long after the child's death its last words may still arrive."""
SHUTDOWN_WAIT_S, TERMINATE_WAIT_S = 2.5, 1.0
MAX_IPC_PATH = 80
"""A Unix socket path holds 107 bytes; a long TMPDIR would not leave room for ours."""

T = TypeVar("T")
_START_ERRORS = {error.code: error for error in (ConfigError, ModelLoadError)}


class EngineClient:
    """One engine process and its open requests. Use: start, wait_ready, generate ..., stop."""

    def __init__(
        self, settings: Settings, *, factory: str = DEFAULT_FACTORY, log_level: str = "info"
    ) -> None:
        self._settings = settings
        self._factory = factory
        self._log_level = log_level
        self._log = logging.getLogger("hyradix.client")
        self._streams: dict[str, OutputStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._on_progress: ProgressCallback | None = None
        self._error: HyradixError | None = None
        self._info: EngineInfo | None = None
        self._is_stopping = False

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process; returns at once (see ``wait_ready``)."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._exited = asyncio.Event()
        root = None if len(tempfile.gettempdir()) < MAX_IPC_PATH else "/tmp"
        self._directory = tempfile.mkdtemp(prefix="hyradix-", dir=root)
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        # Plain, not asyncio: a send is queued without waiting, so that submitting never yields.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._push = plain.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.set_hwm(0)
            socket.linger = 0
        to_engine, from_engine = socket_addresses(self._directory)
        self._push.bind(to_engine)
        self._pull.bind(from_engine)
        self._receiver = asyncio.create_task(self._receive_all(), name="hyradix-receive")
        self._process = self._spawn()
        self._watcher = threading.Thread(
            target=self._watch, args=(self._process,), name="hyradix-engine-watch", daemon=True
        )
        self._watcher.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Run ``python -m hyradix.engine.process``: a fresh interpreter, whatever our main is."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hyradix.engine.process"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        launch = self._encoder.encode(
            Launch(
                settings=self._settings,
                factory=self._factory,
                directory=self._directory,
                log_level=self._log_level,
            )
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(len(launch).to_bytes(LENGTH_BYTES, "little") + launch)
            process.stdin.flush()
        return process

    async def wait_ready(self, on_progress: ProgressCallback | None = None) -> EngineInfo:
        """Wait until the model is loaded. Raises what the engine's start-up failed with."""
        self._on_progress = on_progress
        return await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """End the process: ask, then terminate, then kill. Takes under four seconds."""
        self._is_stopping = True
        with contextlib.suppress(EngineDeadError):
            self._send(Shutdown())
        for wait_s, action in (
            (SHUTDOWN_WAIT_S if self._ready.done() else 0.0, self._process.terminate),
            (TERMINATE_WAIT_S, self._process.kill),
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), wait_s)
            if not self._exited.is_set():
                action()
        await self._exited.wait()
        await self._close()

    async def _close(self) -> None:
        # One turn of the loop delivers the ends that the engine sent last.
        await asyncio.sleep(0)
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._die(EngineDeadError("the engine has been stopped"))
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._watcher.join()
        self._pull.close()
        self._push.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once and clean up; for a parent that is about to exit itself."""
        self._process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    # ---- requests --------------------------------------------------------------------------------

    def generate(self, *requests: Request) -> OutputStream:
        """Submit requests and return the stream of their outputs (told apart by ``request_id``).

        Closing the stream, or cancelling whoever waits for it, aborts what is unfinished.
        Raises ``EngineDeadError``. Refusals are outputs with ``error`` set.
        """
        self._require_alive()
        # All are encoded before any is sent: one that cannot be leaves nothing behind.
        messages = [self._encoder.encode(Submit(request=request)) for request in requests]
        stream = OutputStream([r.request_id for r in requests], on_close=self.abort)
        for request, message in zip(requests, messages, strict=True):
            assert request.request_id not in self._streams, "request ids are unique"
            self._streams[request.request_id] = stream
            self._send_encoded(message)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Stop these and forget them; unknown ids are ignored. Their streams get nothing more."""
        known = [i for i in request_ids if self._streams.pop(i, None) is not None]
        if known:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(request_ids=known))

    def cancel_all(self, error: HyradixError) -> None:
        """Abort every open request and end its stream with ``error``."""
        streams = set(self._streams.values())
        self.abort(list(self._streams))
        for stream in streams:
            stream.fail(error)

    async def stats(self) -> EngineStats:
        """Ask for the counters. Raises ``EngineDeadError``, ``BusyError`` (in a long step)."""
        stats: EngineStats = await self._call(GetStats)
        return stats

    async def cache_view(self) -> CacheView:
        """Ask for the radix tree and the pools. Raises as ``stats`` does."""
        view: CacheView = await self._call(GetCache)
        return view

    async def flush_cache(self) -> None:
        """Forget every unpinned prefix. Raises ``BusyError`` while requests run or wait."""
        if not await self._call(Flush):
            raise BusyError("the cache is flushed only when no request runs or waits")

    async def _call(
        self, kind: type[GetStats] | type[GetCache] | type[Flush], *, timeout_s: float = 2.0
    ) -> Any:
        self._require_alive()
        call_id = next(self._call_ids)
        self._calls[call_id] = self._loop.create_future()
        self._send(kind(call_id=call_id))
        try:
            return await asyncio.wait_for(self._calls[call_id], timeout_s)
        except TimeoutError:
            raise BusyError("the engine is in a long step; try again") from None
        finally:
            self._calls.pop(call_id, None)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def info(self) -> EngineInfo:
        """What the engine told when it became ready."""
        assert self._info is not None, "wait_ready first"
        return self._info

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the engine is ready and has not failed."""
        return self._info is not None and self._error is None

    @property
    def error(self) -> HyradixError | None:
        """Why the engine is dead; None while it lives."""
        return self._error

    # ---- wire ------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        self._send_encoded(self._encoder.encode(message))

    def _send_encoded(self, message: bytes) -> None:
        try:
            self._push.send(message, zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine process does not answer") from None

    async def _receive_all(self) -> None:
        try:
            while True:
                self._receive(self._decoder.decode(await self._pull.recv()))
        except Exception as error:
            # A bug of ours; without this every stream would wait for ever.
            self._log.exception("receiving from the engine failed")
            self._die(EngineDeadError(f"receiving from the engine failed: {error}"))
            self._process.kill()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case Stats(call_id=call_id, stats=stats):
                _resolve(self._calls.get(call_id), stats)
            case Cache(call_id=call_id, view=view):
                _resolve(self._calls.get(call_id), view)
            case Flushed(call_id=call_id, is_done=is_done):
                _resolve(self._calls.get(call_id), is_done)
            case Progress(stage=stage, done=done, total=total):
                if self._on_progress is not None:
                    self._on_progress(stage, done, total)
            case Ready(info=info):
                self._info = info
                _resolve(self._ready, info)
            case Failed(message=text, code=code):
                self._die(_START_ERRORS.get(code, EngineDeadError)(text))

    def _deliver(self, output: RequestOutput) -> None:
        """Pass an output on; those of requests that were given up are dropped."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.is_finished:
            del self._streams[output.request_id]
        stream.push(output)

    # ---- death -----------------------------------------------------------------------------------

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread: wait for the child, then tell the loop."""
        returncode = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_exit, returncode)

    def _on_exit(self, returncode: int) -> None:
        self._exited.set()
        if self._is_stopping:
            return
        how = f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"
        message = f"the engine process ended {how}"
        self._log.error("%s", message)
        self._loop.call_later(FAILED_GRACE_S, self._die, EngineDeadError(message))

    def _die(self, error: HyradixError) -> None:
        """Record the first error and end everything that waits."""
        if self._error is not None:
            return
        self._error = error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: nobody needs to wait for a start that failed
        death = EngineDeadError(error.message)
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(death)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(death)

    def _require_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error.message)
        assert self._info is not None, "wait_ready first"


def _resolve(future: asyncio.Future[T] | None, value: T) -> None:
    if future is not None and not future.done():
        future.set_result(value)
