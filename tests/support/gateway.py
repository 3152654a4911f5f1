"""An HTTP gateway in a thread, over a client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollout.client.api import RolloutClient

WAIT_S = 60.0
"""for the gateway's thread to begin and to end: a bound for hangs only"""


class Gateway(msgspec.Struct):
    """Where it listens, and what ends it."""

    url: str
    admin_url: str
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)


@contextmanager
def gateway(client: RolloutClient, folder: Path, **settings: Any) -> Iterator[Gateway]:
    """Serve HTTP on free ports until the block ends, with the tokenizer in `folder`."""
    from rollout.http.gateway import run
    from rollout.http.settings import Settings
    from rollout.models import load_tokenizer

    ready: Future[Gateway] = Future()
    tokenizer = load_tokenizer(folder)

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        listening = lambda url, admin: ready.set_result(Gateway(url, admin, loop, stop))  # noqa: E731
        try:
            await run(client, tokenizer, Settings(port=0, **settings), listening, stop)
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gateway")
    thread.start()
    try:
        running = ready.result(WAIT_S)
        yield running
    finally:
        if ready.done() and ready.exception() is None:
            if thread.is_alive():
                ready.result().end()
        thread.join(WAIT_S)
    assert not thread.is_alive()
