"""Changes of a fleet that people ask for: more or fewer replicas, one that is to go, all restarted in turn."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.fleet.launcher import LauncherLike
from rollout.fleet.replica import Replica, State
from transport.messages import MOST_REPLICAS

USE = (State.DEAD, State.JOINING, State.STALE, State.SUSPECT, State.SERVING)
"""least first"""


class Changes:
    """Written by the service's thread. replicas: those of `Members`, by name."""

    def __init__(self, launcher: LauncherLike, replicas: Mapping[str, Replica]) -> None:
        self._launcher = launcher
        self._replicas = replicas
        self._to_roll: list[str] = []

    def change(self, action: str, count: int, name: str) -> None:
        """Scale to `count` replicas, drain the one of this name, or roll: restart all, in turn. Raises ValueError."""
        if action == "scale" and not 1 <= count <= MOST_REPLICAS:
            raise ValueError(f"scale to {count} replicas: must be 1 to {MOST_REPLICAS}")
        if action == "drain" and name not in self._replicas:
            raise ValueError(f"no replica {name!r}: there are {', '.join(self._replicas)}")
        for going in self._launcher.scale(count, self._use) if action == "scale" else [name] if action == "drain" else []:
            self.retire(going)
        self._to_roll = list(self._replicas) if action == "roll" else self._to_roll

    def tend(self, serving: int) -> None:
        """Do what is due: end those that go and run nothing, restart the next one when all serve. serving: how many do."""
        for replica in self._replicas.values():
            if replica.leaving and not replica.load:
                self._launcher.remove(replica.name)
        if self._to_roll and serving == self._launcher.wanted:
            self.restart(self._to_roll.pop(0))

    def retire(self, name: str) -> None:
        """Give a replica nothing more, and end it when nothing runs there. Raises KeyError."""
        replica = self._replicas.get(name)
        if replica is None:
            self._launcher.remove(name)
        else:
            replica.leaving = True

    def restart(self, name: str) -> None:
        """Stop a replica in order, if it is there; what it runs goes on elsewhere from the tokens it has."""
        if name in self._replicas:
            self._replicas[name].restarting = True
            self._launcher.restart(name)

    def _use(self, name: str) -> tuple[int, int]:
        """Rank a replica by what is lost without it: one that is dead or starts does nothing, one that serves has its load."""
        replica = self._replicas.get(name)
        return (USE.index(State.JOINING), 0) if replica is None else (USE.index(replica.state), replica.load)
