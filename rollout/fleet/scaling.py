"""Commands of an administrator to a fleet: change the number of replicas, drain one, restart all one after another."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.fleet.join_listener import JoinListener
from rollout.fleet.launcher import LauncherLike
from rollout.fleet.replica import Replica, State
from rollout.transport.messages import MOST_REPLICAS

RANK = (State.DEAD, State.JOINING, State.STALE, State.SUSPECT, State.SERVING)
"""removed first to last"""


class Scaling:
    """Written by the service's thread. replicas: those of `ReplicaSet`, by name."""

    def __init__(self, joins: JoinListener, launcher: LauncherLike | None, replicas: Mapping[str, Replica]) -> None:
        self._joins = joins
        self._launcher = launcher
        self._replicas = replicas
        self._to_restart: list[str] = []

    @property
    def names(self) -> set[str]:
        """Names of the replicas that should run."""
        return {*self._joins.names, *(self._launcher.names if self._launcher is not None else ())}

    def change(self, action: str, count: int, name: str) -> None:
        """Scale to `count` replicas, drain the one of this name, or roll: restart all, in turn. Raises ValueError."""
        match action:
            case "scale":
                if not 1 <= count <= MOST_REPLICAS:
                    raise ValueError(f"scale to {count} replicas: must be 1 to {MOST_REPLICAS}")
                for removed in (self._launcher or self._joins).scale(count, self._rank):
                    self.drain(removed)
            case "drain":
                if name not in self._replicas:
                    raise ValueError(f"no replica {name!r}: there are {', '.join(self._replicas)}")
                self.drain(name)
            case "roll":
                self._to_restart = list(self._replicas)

    def poll(self, serving: int) -> None:
        """Remove drained replicas that are idle; restart the next one once all serve. serving: how many do."""
        for replica in self._replicas.values():
            if replica.draining and not replica.load:
                self.remove(replica.name)
        if self._to_restart and serving == len(self.names):
            self.restart(self._to_restart.pop(0))

    def drain(self, name: str) -> None:
        """Give a replica no more groups, and remove it once it is idle."""
        replica = self._replicas.get(name)
        if replica is None:
            self.remove(name)
        else:
            replica.draining = True

    def remove(self, name: str) -> None:
        """Stop a replica for good."""
        self._joins.remove(name)
        if self._launcher is not None:
            self._launcher.remove(name)

    def restart(self, name: str) -> None:
        """Stop a replica in order, if it is there; its children continue elsewhere from the tokens they have."""
        if name in self._replicas:
            self._replicas[name].restarting = True
            self._joins.restart(name)

    def _rank(self, name: str) -> tuple[int, int]:
        """Rank a replica by what its removal costs: a dead or starting one does nothing, a serving one has its load."""
        replica = self._replicas.get(name)
        return (RANK.index(State.JOINING), 0) if replica is None else (RANK.index(replica.state), replica.load)
