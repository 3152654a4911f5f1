"""Calls that concern the whole service, and not one group: its status, pauses, sleep."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast, get_args

from engine.types import Tag
from rollout.client.link import Link
from rollout.client.refresh import answer
from transport.errors import InvalidRequest
from transport.messages import Asleep, Control, Replicas, Sleep, StatusRequest, Wake, WeightsRequest


class ServiceCalls:
    """Asks one service, over `link`, for what all its clients feel."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def close(self) -> None:
        """End the session. May be repeated."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """Ask for the service's status. Raises RequestTimeout, ServiceLost."""
        status: dict[str, Any] = answer(self._link.request(StatusRequest), timeout, "status")
        return status

    def weights_status(self, verify: bool = False, timeout: float = 60.0) -> dict[str, Any]:
        """Ask for the live version and digest, and what is being staged by whom. `verify`: also `live_digest`, of the bytes as
        they lie there. That costs the service a pass over its weights, as does the first digest of those never refreshed."""
        if not isinstance(verify, bool):
            raise InvalidRequest(f"verify={verify!r}: must be True or False")
        request = self._link.request(lambda id: WeightsRequest(id, verify))
        status: dict[str, Any] = answer(request, timeout, "status of the weights")
        return status

    def pause(self, timeout: float = 60.0) -> None:
        """Stop the service between two steps, for all clients; a refresh may still come. Ends by `resume` of any client, or
        when all clients that paused it are gone."""
        answer(self._link.request(lambda id: Control(id, "pause")), timeout, "pause")

    def resume(self, timeout: float = 60.0) -> None:
        """Undo `pause` and `drain`, of any client."""
        answer(self._link.request(lambda id: Control(id, "resume")), timeout, "resumption")

    def drain(self, timeout: float = 3600.0) -> None:
        """Finish every group that has begun, of all clients, and start no other until `resume`. Returns when nothing runs.
        After a RequestTimeout the service goes on draining: wait again, or `resume`."""
        answer(self._link.request(lambda id: Control(id, "drain")), timeout, "end of what runs")

    def change_replicas(
        self, action: Literal["scale", "drain", "roll"], *, count: int = 0, name: str = "", timeout: float = 60.0
    ) -> None:
        """Change the replicas of a fleet; returns when that has begun, the status tells the rest. "scale": have `count`;
        "drain": the one of this name finishes what it runs, and goes; "roll": all are restarted in turn, and what they run
        goes on elsewhere. Raises InvalidRequest, also for a service that has one engine."""
        answer(self._link.request(lambda id: Replicas(id, action, count, name)), timeout, "change of replicas")

    def abort_all(self, timeout: float = 60.0) -> None:
        """End every group of every client as "aborted", with the tokens it has."""
        answer(self._link.request(lambda id: Control(id, "abort_all")), timeout, "end of all groups")

    def sleep(self, level: int = 1, timeout: float = 300.0) -> int:
        """Let the service give its memory back, for a trainer on the same device; between two steps, for all clients. Returns
        the bytes that went back. What runs goes on after `wake`, from its KV in host memory as far as that has room.

        Level 1 moves the weights to host memory; level 2 drops them, so that after `wake` a refresh of all tensors must come
        before the next token. A refresh while the weights are asleep is refused. A client that goes away wakes what it sent to
        sleep.

        Raises InvalidRequest while asleep, Busy while a refresh is staged, RequestTimeout, ServiceLost."""
        if type(level) is not int or level not in (1, 2):
            raise InvalidRequest(f"level={level!r}: must be 1 (weights to host memory) or 2 (weights dropped)")
        slept: Asleep = answer(self._link.request(lambda id: Sleep(id, cast(Literal[1, 2], level))), timeout, "sleep")
        return slept.freed_bytes

    def wake(self, timeout: float = 300.0, *, tags: Sequence[Tag] | None = None) -> None:
        """Undo `sleep`, of all memory or of a part; groups go on when all is awake.

        tags: "weights", "kv" or both; None = all that is asleep. For a trainer on the same device:
        `wake(tags=("weights",))`, `refresh`, then, when the trainer has let its memory go, `wake(tags=("kv",))`. After
        `sleep(level=2)` that refresh is written straight into place, without a second copy of the weights.

        Raises InvalidRequest if nothing of that is asleep."""
        if tags is not None and (isinstance(tags, str) or not tags or not set(tags) <= set(get_args(Tag))):
            raise InvalidRequest(f'tags={tags!r}: must be ("weights",), ("kv",), both, or None for all that is asleep')
        answer(self._link.request(lambda id: Wake(id, None if tags is None else tuple(tags))), timeout, "waking")
