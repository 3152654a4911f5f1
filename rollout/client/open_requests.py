"""The requests that somebody waits for, as the client's I/O thread keeps them.

add -> open, asked for again after a reconnect -> answer, once
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from transport.errors import NotBelieved
from transport.frames import Frame
from transport.messages import StatusReply


class OpenRequests:
    """Keeps requests until they are answered. For one thread. True while somebody waits for an answer."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[list[Frame], Future[Any], type]] = {}
        """by request id, in the order of asking"""

    def __bool__(self) -> bool:
        return not all(future.cancelled() for _, future, _ in self._open.values())

    def add(self, request_id: int, frames: list[Frame], future: Future[Any], kind: type) -> None:
        """Keep a request until it is answered. kind: of the answer."""
        self._open[request_id] = frames, future, kind

    def wanted(self) -> Iterator[list[Frame]]:
        """Yield the frames of those whose caller has not given up."""
        return (frames for frames, future, _ in self._open.values() if not future.cancelled())

    def answer(self, request_id: int, result: Any) -> None:
        """Give the caller a result (of StatusReply what it holds), or raise an error there, which an answer to another kind of
        request is. Nothing to do for one that was answered or given up before."""
        _, future, kind = self._open.pop(request_id, (None, None, object))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if not isinstance(result, BaseException | (dict if kind is StatusReply else kind)):
            result = NotBelieved(f"a {kind.__name__} was asked for, and a {type(result).__name__} came")
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    @property
    def ids(self) -> list[int]:
        """Request ids, in the order of asking."""
        return list(self._open)
