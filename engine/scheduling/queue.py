"""Who waits, and who is next: fair over clients, then by rank (`Sequence.rank`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

from engine.scheduling.sequence import Sequence

Place = tuple[int, ...]
"""Within a client, by priority. Of equal ones those that are held go first, as they would run; then those that have started
(preempted, reset, forked): their KV or their siblings hold memory already. Then by rank."""


class WaitingQueue:
    """Sequences that do not run. The next one comes from the client that runs the fewest, ties in turn, so that a client with
    thousands of groups does not starve one with a single group."""

    def __init__(self) -> None:
        self._clients: dict[str, list[Sequence]] = {}
        self._places: dict[Sequence, Place] = {}
        """as of `put`: a child of a fork waits before its first token is noted"""
        self._served: dict[str, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._clients.values():
            yield from sequences

    def counts(self) -> dict[str, int]:
        """Count the sequences of each client."""
        return {client: len(sequences) for client, sequences in self._clients.items()}

    def put(self, sequence: Sequence) -> None:
        """Add a sequence, at the place that it has now within its client."""
        priority, *rest = sequence.rank
        self._places[sequence] = (priority, not sequence.held, not sequence.started, *rest)
        insort(self._clients.setdefault(sequence.state.client, []), sequence, key=self._places.__getitem__)

    def clients(self, started: bool = False) -> list[str]:
        """List the clients that have sequences here; `started`: that have started."""
        return [client for client, sequences in self._clients.items() if self._first(sequences, started) is not None]

    def of(self, clients: Collection[str], started: bool = False) -> Iterator[Sequence]:
        """Yield the sequences of these clients, each client's in order; `started`: only those that have."""
        for client, sequences in self._clients.items():
            if client in clients:
                yield from (seq for seq in sequences if seq.started or not started)

    def next(self, running: Counter[str], of: Collection[str] | None = None, started: bool = False) -> Sequence | None:
        """Look at the next one. running: counts the running sequences of each client. of: the clients to choose from; None =
        all. started: only of those that have."""
        clients = [client for client in self.clients(started) if of is None or client in of]
        if not clients:
            return None
        client = min(clients, key=lambda name: (running[name], self._served.get(name, 0)))
        return self._first(self._clients[client], started)

    @staticmethod
    def _first(sequences: list[Sequence], started: bool) -> Sequence | None:
        return next((sequence for sequence in sequences if sequence.started), None) if started else sequences[0]

    def remove(self, sequence: Sequence, served: bool = False) -> None:
        """Remove a sequence. served: it starts, so that the turn goes to other clients."""
        client = sequence.state.client
        sequences = self._clients[client]
        at = bisect_left(sequences, self._places[sequence], key=self._places.__getitem__)
        assert sequences[at] is sequence
        del sequences[at], self._places[sequence]
        if not sequences:
            del self._clients[client]
        if served:
            self._turn += 1
            self._served[client] = self._turn
        if not self._clients:
            self._served.clear()
