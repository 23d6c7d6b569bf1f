"""``chatsvc serve``: the server's life, from the first check to the last stream."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import click
import uvicorn

from chatsvc.api.app import create_app
from chatsvc.api.keys import KeyFile
from chatsvc.api.quota import Quotas
from chatsvc.api.seeds import Seeds
from chatsvc.api.server import server_config
from chatsvc.api.services import ApiSettings, Services
from chatsvc.api.tracing import NoTracing, Tracing, make_tracing
from chatsvc.api.turns import Turns
from chatsvc.cli.options import GroupedCommand, given, options_of
from chatsvc.cli.remarks import remarks
from chatsvc.config import ServeConfig
from chatsvc.engine import remote
from chatsvc.engine.garbage import Collector, settle
from chatsvc.engine.protocol import Built, ServedEngine
from chatsvc.errors import ChatsvcError, ConfigError, EngineDead, StoreError
from chatsvc.sessions.base import SessionStore
from chatsvc.sessions.quotas import SharedQuotas
from chatsvc.sessions.select import open_quotas, open_store
from chatsvc.sessions.watched import WatchedStore

log = logging.getLogger("chatsvc")

LOOK_FOR_DEATH = 0.2  # seconds between looks
CLOSE_AT_ONCE = 2.0  # seconds for each part
STORE_AT_LEAST = 3.0  # seconds, for the last texts when nothing of the drain time is left
ENGINE_THREADS = ("chatsvc-engine", "chatsvc-sim")


@click.command("serve", cls=GroupedCommand, context_settings={"max_content_width": 120})
@options_of(ServeConfig)
def command(**values: Any) -> None:
    """Serve chats over HTTP. Every flag is also an environment variable: CHATSVC_<FLAG>."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "huggingface_hub", "sse_starlette", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    gc.disable()  # until it is ready: see settle
    config = ServeConfig.of(**given(values))
    for remark in remarks(config, os.environ):
        log.warning("%s", remark)
    server = Server(config, click.get_current_context().find_object(float))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        status = runner.run(server.run())
        if server.at_once.is_set() or engine_hangs():
            leave(status)
    sys.exit(status)


def _loop_factory() -> Any:
    return uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()


def build(config: ServeConfig) -> Built[ServedEngine]:
    """The engine in this process. torch is imported only where the engine runs, and that may be elsewhere."""
    built: Built[ServedEngine] = importlib.import_module("chatsvc.engine.build").build(config)
    return built


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything slow happens. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}; choose another --host or --port") from e
    return sock


class _Uvicorn(uvicorn.Server):
    """Signals are ours: the first one drains instead of closing the door on running streams."""

    def install_signal_handlers(self) -> None:
        return None

    def capture_signals(self) -> Any:
        return _NoSignals()


class _NoSignals:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class Server:
    """The server's life.

    Args:
        began: when the program did, by ``time.perf_counter``.

    Attributes:
        at_once: set when the process has to end without waiting: by a second signal, or by one while it loads. What
            can hang (a step, the compiler) is not waited for then; the process ends with :func:`leave`.
    """

    def __init__(self, config: ServeConfig, began: float | None = None) -> None:
        self.config = config
        self.at_once = asyncio.Event()
        self._began = time.perf_counter() if began is None else began
        self._tracing: Tracing = NoTracing()
        self._signals = 0
        self._status = 0
        self._engine_stopped = False
        self._drain_ends = 0.0  # monotonic seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._loading: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Returns the exit status. Raises: ConfigError, ModelError."""
        config = self.config
        self._tracing = make_tracing()
        keys = KeyFile(config.api_key_file) if config.api_key_file is not None else None
        sock = listen(config.host, config.port)
        loop = asyncio.get_running_loop()
        if keys is not None:
            loop.add_signal_handler(signal.SIGHUP, keys.nudge)
            self._tasks.append(asyncio.create_task(keys.watch()))
        else:  # nothing to read again, which is no reason to end
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal_early, sig)
        elsewhere = config.engine == "process"
        # May compile: signals are heard meanwhile.
        building: asyncio.Task[Built[ServedEngine]] = asyncio.create_task(
            remote.launch(config) if elsewhere else asyncio.to_thread(build, config)
        )
        if not await self._unless_at_once(building):
            return self._status
        built = building.result()
        store = WatchedStore(
            open_store(config.session_store, config.session_ttl), built.engine.metrics.store_errors.inc
        )
        shared = open_quotas(config.session_store, built.engine.metrics.quota_fallbacks.inc) if keys else None
        services = self._services(built, store, keys, Quotas(shared=shared))
        turns = Turns(services, store)
        app = create_app(services, turns=turns)
        uv = _Uvicorn(server_config(app, host=config.host, port=config.port, grace=5))
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal, sig, uv, built, services, turns)
        url = f"http://{config.host}:{sock.getsockname()[1]}/"
        self._tasks.append(asyncio.create_task(self._end_with(built.engine, uv, services, turns)))
        try:
            await self._open(store)
            if shared is not None:
                await shared.open()
            self._loading = asyncio.create_task(self._load(uv, built, url))
            await self._unless_at_once(asyncio.create_task(uv.serve(sockets=[sock])))
        finally:
            await self._close(built, turns, store, shared)
        return self._status

    async def _unless_at_once(self, work: asyncio.Task[Any]) -> bool:
        """Wait for ``work``; False when the process has to end before it is done."""
        stop = asyncio.create_task(self.at_once.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
        return work.done()

    def _services(
        self, built: Built[ServedEngine], store: WatchedStore, keys: KeyFile | None, quotas: Quotas
    ) -> Services:
        config = self.config
        return Services(
            engine=built.engine,
            tokenizer=built.tokenizer,
            template=built.template,
            model_name=config.served_model_name or built.files.name,
            settings=ApiSettings(
                ping_interval=config.ping_interval,
                max_n=config.max_n,
                max_prompts=min(64, config.max_queue),  # each of them stands in the queue
                resume_grace=config.resume_grace,
                cors_origins=config.cors_origins,
                request_timeout=config.request_timeout or None,
            ),
            store=store,
            store_answers=lambda: store.answers,
            created=int(time.time()),
            seeds=Seeds(config.seed),
            keys=None if keys is None else lambda: keys.current,
            quotas=quotas,
            tracing=self._tracing,
        )

    async def _open(self, store: SessionStore) -> None:
        await store.open()
        try:
            interrupted = await store.interrupt_running()
        except StoreError as e:  # a Redis that comes later than we do: sessions answer 503 until it is there
            log.warning("sessions are not available yet: %s", e)
            return
        if interrupted:
            log.info("%d answers were cut off by the last stop and are marked interrupted", interrupted)

    async def _load(self, uv: uvicorn.Server, built: Built[ServedEngine], url: str) -> None:
        try:
            await built.engine.start()
        except EngineDead:  # a signal came while it loaded
            return
        except ChatsvcError as e:
            log.error("%s", e)
            self._status = 1
            uv.should_exit = True
            return
        except Exception:
            log.exception("loading failed")
            self._status = 1
            uv.should_exit = True
            return
        settle()
        self._tasks.append(asyncio.create_task(Collector(lambda: built.engine.num_requests > 0).run()))
        capacity = built.engine.capacity
        log.info(
            "ready in %.1f s: %s, %d KV blocks, up to %d tokens a sequence",
            time.perf_counter() - self._began,
            built.files.name,
            capacity.num_blocks,
            capacity.max_model_len,
        )
        print(f"\n  Chat page:  {url}\n  OpenAI API: {url}v1\n", flush=True)

    async def _end_with(self, engine: ServedEngine, uv: uvicorn.Server, services: Services, turns: Turns) -> None:
        """An engine that died does not come back, and whoever watches over servers (systemd, Docker) starts those again
        that ended, not those that stay and complain. Its streams have been told; their texts are stored on the way."""
        while engine.dead is None:  # noqa: ASYNC110  what dies may be in another process
            await asyncio.sleep(LOOK_FOR_DEATH)
        if self._signals:
            return
        log.error("ending with exit status 1, to be started again: %s", engine.dead)
        self._status = 1
        services.uploads.close()
        turns.let_go()
        uv.should_exit = True

    def _on_signal_early(self, sig: signal.Signals) -> None:
        self._signals += 1
        log.info("%s while the model is loading: ending", sig.name)
        self.at_once.set()

    def _on_signal(
        self, sig: signal.Signals, uv: uvicorn.Server, built: Built[ServedEngine], services: Services, turns: Turns
    ) -> None:
        if self._loading is None or not self._loading.done():
            self._on_signal_early(sig)
            return
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal (%s): ending at once", sig.name)
            self._status = 128 + sig
            self.at_once.set()
            return
        log.info("%s: draining; running answers may take up to %g s more", sig.name, self.config.drain_timeout)
        built.engine.begin_drain()
        services.uploads.close()
        self._drain_ends = time.monotonic() + self.config.drain_timeout
        self._tasks.append(asyncio.create_task(self._finish(uv, built, turns)))

    async def _finish(self, uv: uvicorn.Server, built: Built[ServedEngine], turns: Turns) -> None:
        done = await built.engine.drained(self.config.drain_timeout)
        if not done:
            log.warning("%d answers were still running and are ended", built.engine.num_requests)
        await built.engine.stop()
        self._engine_stopped = True
        turns.let_go()
        uv.should_exit = True

    async def _close(
        self, built: Built[ServedEngine], turns: Turns, store: SessionStore, shared: SharedQuotas | None
    ) -> None:
        # Texts that a store which is away does not take are tried again for as long as answers may be waited for.
        patience = max(STORE_AT_LEAST, self._drain_ends - time.monotonic())
        closings: list[Callable[[], Coroutine[Any, Any, None]]] = [
            partial(turns.close, patience),
            store.close,
            *([] if shared is None else [shared.close]),
            partial(asyncio.to_thread, self._tracing.close),
        ]
        if not self._engine_stopped:
            closings.insert(0, built.engine.stop)
        for closing in closings:
            task = asyncio.create_task(closing())
            # At once: an engine that hangs gets a second, the texts of sessions a little longer to be stored.
            if not await self._unless_at_once(task):
                await asyncio.wait({task}, timeout=CLOSE_AT_ONCE)
                if task.done():
                    task.result()
        log.info("ended")


def engine_hangs() -> bool:
    """Whether a thread of the engine goes on although the engine was stopped: joining it would wait for ever."""
    return any(t.name.startswith(ENGINE_THREADS) for t in threading.enumerate())


def leave(status: int) -> None:
    """End the process without joining its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
