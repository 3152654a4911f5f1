"""Who waits, and who is next: fair over clients, then the oldest group, then the child that is least far."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from engine.scheduling.sequence import Sequence

Place = tuple[int, bool, int, int, int]
"""Within a client, by priority; of equal ones those that have begun (preempted, reset, forked) go before prompts that have not:
their KV or their siblings hold memory already. Then by rank."""


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
        """How many wait, by client."""
        return {client: len(sequences) for client, sequences in self._clients.items()}

    def put(self, sequence: Sequence) -> None:
        priority, *rank = sequence.rank
        self._places[sequence] = (priority, not sequence.begun, *rank)
        insort(self._clients.setdefault(sequence.state.client, []), sequence, key=self._places.__getitem__)

    def next(self, running: Counter[str], begun: bool = False) -> Sequence | None:
        """Look at the next one; `running` counts the running sequences of each client. `begun`: only of those that have."""
        first = {name: self._first(sequences, begun) for name, sequences in self._clients.items()}
        clients = [name for name, sequence in first.items() if sequence is not None]
        if not clients:
            return None
        return first[min(clients, key=lambda name: (running[name], self._served.get(name, 0)))]

    @staticmethod
    def _first(sequences: list[Sequence], begun: bool) -> Sequence | None:
        return next((sequence for sequence in sequences if sequence.begun), None) if begun else sequences[0]

    def remove(self, sequence: Sequence, served: bool = False) -> None:
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
