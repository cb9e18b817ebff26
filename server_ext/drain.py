"""How a server leaves: a first SIGTERM or SIGINT drains it within a deadline, a second one ends it at once.

SGLang looks for a signal every five seconds, waits for running requests without limit, takes new ones meanwhile, and
drops all of them if its last health check failed. Uvicorn's own handlers cut streams off. Both are replaced while the
server runs.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import psutil

from server_ext.hooks import Hook
from server_ext.openai_api import AsgiApp, Message, Send, error_body

logger = logging.getLogger(__name__)

EXIT_SECONDS = 20.0
"""Time for the engine to release its memory after the drain; SGLang itself waits up to 15 s for its schedulers."""

_ABORT_SECONDS = 5.0  # for the aborted requests to send their last chunk
_POLL_SECONDS = 0.05
_PROBES = ("/health", "/ready", "/metrics")  # the same that SGLang leaves open when it has a key


def end_children() -> None:
    """Kill every process below this one."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def leave(status: int) -> NoReturn:
    """End this process with `status` and every process below it, now."""
    end_children()
    os._exit(status)


class Drain:
    """One server's way out.

    Exit statuses: 0 after a drain, whether or not the deadline cut requests off; 128 + signal (143 for SIGTERM) when a
    signal comes before the server is ready, or a second time.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._manager: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requested = asyncio.Event()
        self._draining = False
        self._in_flight = 0

    @property
    def serving(self) -> bool:
        """Whether the engine has come as far as taking requests."""
        return self._loop is not None

    def install(self) -> None:
        """Take SIGTERM and SIGINT, which a process with id 1 would otherwise not even notice."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def hooks(self) -> tuple[Hook, ...]:
        """Return the hooks on SGLang and Uvicorn."""
        signals = "sglang.srt.managers.tokenizer_manager"
        return (
            Hook(f"{signals}.SignalHandler.sigterm_handler", lambda _: self._on_signal(signal.SIGTERM), "replace"),
            Hook(f"{signals}.TokenizerManager.sigterm_watchdog", self._watch, "around"),
            Hook("uvicorn.server.Server.capture_signals", lambda _: contextlib.nullcontext(), "replace"),
        )

    def guard(self, app: AsgiApp) -> AsgiApp:
        """Count the requests that `app` is answering, and refuse new ones during the drain."""

        async def guarded(scope: Message, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                _start_watching()
                await app(scope, receive, send)
            elif scope["path"].startswith(_PROBES):
                await app(scope, receive, send)
            elif self._draining:
                await _refuse(scope, send)
            else:
                self._in_flight += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self._in_flight -= 1

        return guarded

    def _on_signal(self, signum: int, _frame: object = None) -> None:
        name = signal.Signals(signum).name
        if not self._loop or self._manager.server_status.value == "Starting":
            _tell(f"{name} during start-up: stopping at once")
            leave(128 + signum)
        if self._draining:
            _tell(f"second signal ({name}): stopping at once")
            leave(128 + signum)
        _tell(f"{name}: finishing {self._in_flight} running requests within {self._timeout_seconds:g} s")
        self._draining = True
        self._manager.gracefully_exit = True
        last_resort = threading.Timer(self._timeout_seconds + EXIT_SECONDS, _give_up)
        last_resort.daemon = True
        last_resort.start()
        self._loop.call_soon_threadsafe(self._requested.set)

    async def _watch(self, shut_down: Callable[[Any], Awaitable[None]], manager: Any) -> None:
        """Stand in for SGLang's signal watchdog; `shut_down` is the original, which only has to end the engine."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        self._manager, self._loop = manager, asyncio.get_running_loop()
        await self._requested.wait()
        if not await self._settled(self._timeout_seconds):
            logger.warning("drain deadline: cutting off %d requests", self._in_flight)
            manager.abort_request(abort_all=True)
            await self._settled(_ABORT_SECONDS)
        manager.server_status = ServerStatus.Up  # a failed health check must not skip the engine's own way out
        await shut_down(manager)

    async def _settled(self, timeout_seconds: float) -> bool:
        """Wait until no request runs, at most `timeout_seconds`, and say whether that came true."""
        deadline = time.monotonic() + timeout_seconds
        while self._in_flight or self._manager.rid_to_state:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _start_watching() -> None:
    """Make SGLang start its signal watchdog, `Drain._watch`, now and not with the first request."""
    from sglang.srt.entrypoints.http_server import get_global_state

    get_global_state().tokenizer_manager.auto_create_handle_loop()


def _give_up() -> None:
    _tell(f"still running {EXIT_SECONDS:g} s after the drain deadline: stopping at once")
    leave(0)


def _tell(text: str) -> None:
    """Write a line to standard error from a signal handler, where logging could deadlock."""
    os.write(2, f"sglang-dflash serve: {text}\n".encode())


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013})  # "try again later", RFC 6455 registry
        return
    message = "The server is shutting down and takes no new requests; try again."
    body = json.dumps(error_body(message, 503, code="service_unavailable")).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "retry-after": "1",  # seconds; by then a load balancer knows
        "connection": "close",  # the next request must open a connection, to another replica
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 503, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
