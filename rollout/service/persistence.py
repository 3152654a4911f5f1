"""What a session writes down of itself, so that it may outlive the process: nothing, unless there is a journal."""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import FinishReason, Served
from transport.frames import Frame


class Persistence:
    """This one keeps nothing. `rollout.service.journal` has the one that does."""

    lasting = False
    """sessions are there again after a restart"""

    def opened(self, key: str, session: str, name: str, number: int) -> None:
        """Keep a session; `number`: the service's for it."""

    def closed(self, key: str, session: str) -> None:
        """Forget a session and its groups."""

    def accepted(self, key: str, session: str, engine_id: str, submit: Sequence[Frame], seed: int | None, live: Served) -> None:
        """Keep a group. `submit`: as it came; `live`: oldest weights that it may be sampled from after a restart."""

    def ended(self, engine_id: str, index: int, reason: FinishReason, sample: Sequence[Frame]) -> None:
        """Keep a child that has ended, until it is acked."""

    def acked(self, engine_id: str, index: int) -> None:
        """Forget the content of a child that the client has."""

    def dropped(self, engine_id: str) -> None:
        """Forget a group."""

    def served(self, live: Served) -> None:
        """Write which weights are live, if they are new."""

    def commit(self, live: Served) -> None:
        """Write what came since the last call, all or nothing; `live`: the weights."""

    def close(self, live: Served | None = None) -> None:
        """Write what came since the last commit, if the `live` weights are given, and close the file. May be repeated."""
