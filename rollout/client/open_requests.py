"""The requests that somebody waits for, as the client's I/O thread keeps them.

add -> open, asked for again after a reconnect -> answer, once
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from transport.frames import Frame


class OpenRequests:
    """Keeps requests until they are answered. For one thread. True while somebody waits for an answer."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[list[Frame], Future[Any]]] = {}
        """by request id, in the order of asking"""

    def __bool__(self) -> bool:
        return not all(future.cancelled() for _, future in self._open.values())

    def add(self, request_id: int, frames: list[Frame], future: Future[Any]) -> None:
        """Keep a request until it is answered."""
        self._open[request_id] = frames, future

    def wanted(self) -> Iterator[list[Frame]]:
        """Yield the frames of those whose caller has not given up."""
        return (frames for frames, future in self._open.values() if not future.cancelled())

    def answer(self, request_id: int, result: Any) -> None:
        """Give the caller a result, or raise an error there. Nothing to do for one that was answered or given up before."""
        _, future = self._open.pop(request_id, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    @property
    def ids(self) -> list[int]:
        """Request ids, in the order of asking."""
        return list(self._open)
