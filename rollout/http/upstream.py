"""The service as seen by the gateway: status, control, weights.

Blocking calls of the client run in two small thread pools, one of them for status alone, so that a long drain does not delay
health checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

from rollout.client.api import RolloutClient
from rollout.engine.values import Refreshed
from rollout.http.errors import bad
from rollout.transport.errors import Busy, SourceUnreachable
from rollout.transport.messages import Welcome

CONTROLS = 4
"""control calls at a time"""

T = TypeVar("T")


class LoadedAdapter(msgspec.Struct, frozen=True):
    """The LoRA adapter that is merged into the live weights."""

    name: str
    path: str


class Upstream:
    """One service, over one client. For one event loop."""

    def __init__(self, client: RolloutClient, status_age_s: float) -> None:
        self.client = client
        self.adapter: LoadedAdapter | None = None
        """loaded through this process"""
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, int] = {}
        """newest version seen, of the current incarnation"""
        self._status_threads = ThreadPoolExecutor(1, "rollout-http-status")
        self._control_threads = ThreadPoolExecutor(CONTROLS, "rollout-http-control")
        self._changing_weights = False
        self._status: asyncio.Future[dict[str, Any]] | None = None
        self._status_age_s, self._status_at = status_age_s, 0.0

    @property
    def info(self) -> Welcome:
        return self.client.info

    @property
    def version(self) -> int:
        """Newest weight version that this process has seen."""
        return max(self.info.version, self._live.get(self.info.incarnation, 0))

    def saw(self, version: int) -> None:
        """Record a weight version."""
        if version > self._live.get(self.info.incarnation, -1):
            self._live = {self.info.incarnation: version}

    async def status(self) -> dict[str, Any]:
        """Return the service's status; concurrent calls share one request. Raises RolloutError."""
        now = self._loop.time()
        if self._status is None or (self._status.done() and now - self._status_at > self._status_age_s):
            self._status_at = now
            self._status = asyncio.ensure_future(self._loop.run_in_executor(self._status_threads, self.client.status))
            self._status.add_done_callback(_retrieve_error)
        status: dict[str, Any] = await asyncio.shield(self._status)
        self.saw(int(status["version"]))
        return status

    async def control(self, call: Callable[[], T]) -> T:
        """Run a blocking call that changes the service. Discards the stored status."""
        try:
            return await self._loop.run_in_executor(self._control_threads, call)
        finally:
            self._status = None

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """Hold the right to change weights and `adapter` in the block. Raises Busy while another request holds it."""
        if self._changing_weights:
            raise Busy("another request is changing the weights: try again")
        self._changing_weights = True
        try:
            yield
        finally:
            self._changing_weights = False

    async def refresh(
        self, call: Callable[[int | None], Refreshed], folder: str, version: int | None, param: str, exact: bool = False
    ) -> int:
        """Update the weights from a folder that the service can read, while `changing_weights`. Returns the live version.

        Args:
            call: updates to a version; None = the next one.
            version: used if it is above the live version.
            exact: if it is not, the update is refused; otherwise the next version is used.
            param: name of the field that holds the folder.

        Raises HttpError for an invalid path or version, and the errors of `RolloutClient.refresh` and `refresh_lora`."""
        if not folder or "\0" in folder:
            raise bad(f"{param} is empty or not a path", param)
        live = int((await self.status())["version"])
        if exact and version is not None and version <= live:
            fix = f"version {live} is live; give a larger one, or null for the next"
            raise bad(f"weight_version={version}: {fix}", "weight_version")
        wanted = version if version is not None and version > live else None
        try:
            refreshed = await self.control(partial(call, wanted))
        except OSError as error:
            raise bad(f"{param}: {error.strerror or error}", param) from None
        except SourceUnreachable as error:
            raise bad(f"{param}: {error.message}", param) from None
        self.saw(refreshed.version)
        return refreshed.version

    def close(self) -> None:
        """End the threads. The client stays open."""
        self._status_threads.shutdown(wait=False, cancel_futures=True)
        self._control_threads.shutdown(wait=False, cancel_futures=True)


def model_name(info: Welcome) -> str:
    """Return the name of the service's model without its folder."""
    return info.served_model_name or PurePath(info.model).name


def _retrieve_error(status: asyncio.Future[dict[str, Any]]) -> None:
    """Retrieve the error of a status that no request awaits any more; asyncio would log it."""
    if not status.cancelled():
        status.exception()
