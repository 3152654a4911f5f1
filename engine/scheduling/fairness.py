"""Fairness between clients: which clients' sequences run, and which sequences stop so that other clients get slots.

While several clients have work, the *priority clients* are those with the highest level of credit (`credit.py`), and only they
are computed. Among these, slots are shared evenly: a waiting client with less than its share gets slots of the client with the
most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping

from rollout.engine.scheduling.sequence import Row, Sequence
from rollout.engine.scheduling.state import Decision, SchedulerState


def priority_clients(state: SchedulerState) -> Collection[str]:
    """Return the clients whose sequences may be computed now."""
    return state.credit.priority({*state.table.of_client, *state.waiting.clients(started=not state.admitting)})


def apply_priority(state: SchedulerState) -> Decision:
    """Decide to stop the sequences of all clients but `state.clients`. Their KV stays while there is room."""
    if all(client in state.clients for client in state.table.of_client):
        return Decision([])
    return Decision([seq for seq in state.running if seq.state.client not in state.clients], held=True)


def others_wait(state: SchedulerState) -> bool:
    """Return whether clients other than `state.clients` have sequences that could start."""
    return any(client not in state.clients for client in state.waiting.clients(started=not state.admitting))


def rebalance_slots(state: SchedulerState) -> Decision:
    """Decide to stop sequences of clients with more than their share of the slots, if all slots are taken and the next client
    in turn has less than its share. Their KV stays while there is room."""
    if state.table.has_place:
        return Decision([])
    first = first_waiting(state)
    if first is None:
        return Decision([])
    waiting = {client: count for client, count in state.waiting.counts().items() if client in state.clients}
    return Decision(over_share(state, first.state.client, waiting))


def first_waiting(state: SchedulerState) -> Sequence | None:
    """Return the sequence of the priority clients that is next in the queue."""
    return state.waiting.next(state.table.of_client, state.clients, started=not state.admitting)


def over_share(state: SchedulerState, client: str, waiting: Mapping[str, int]) -> list[Sequence]:
    """Return the running sequences to stop so that `client` gets its share of all slots: the last in rank of the clients with
    the most slots, which keep their own share. waiting: sequences that wait, by client."""
    has = +state.table.of_client
    share = max(1, state.config.most_seqs // len(waiting.keys() | has.keys()))
    chosen: list[Sequence] = []
    for _ in range(min(share - has[client], waiting[client])):
        other, most = max(has.items(), key=lambda item: item[1])
        rested = [seq for seq in state.running if seq.state.client == other and seq.ran >= seq.least_run and seq not in chosen]
        if most <= share or not rested:
            break
        chosen.append(max(rested, key=lambda seq: seq.rank))
        has[other] -= 1
    return chosen


def tokens_by_client(rows: list[Row], total: int, only_client: str | None) -> Mapping[str, int]:
    """Count the tokens of a step by client. only_client: the client of all rows, if that is known."""
    if only_client is not None:
        return {only_client: total}
    tokens = Counter[str]()
    for row in rows:
        tokens[row.seq.state.client] += row.count
    return tokens


class RoundRobin:
    """Chooses which sequences decode in a step that is too short for all: equally many of each client, taking turns."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        """age of the last sequence that was chosen, by client"""

    def take(self, decoding: list[Sequence], most: int) -> list[Sequence]:
        """Return at most `most` of the sequences. Both lists are sorted by age."""
        if len(decoding) <= most:
            return decoding
        of_client: dict[str, list[Sequence]] = {}
        for seq in decoding:
            of_client.setdefault(seq.state.client, []).append(seq)
        self._last = {client: age for client, age in self._last.items() if client in of_client}
        turn: list[Sequence] = []
        clients = sorted(of_client, key=lambda client: len(of_client[client]))
        for i, client in enumerate(clients):
            sequences = of_client[client]
            part = min(len(sequences), (most - len(turn)) // (len(clients) - i))
            first = bisect_right(sequences, self._last.get(client, (-1, -1)), key=lambda seq: seq.age)
            mine = [*sequences[first:], *sequences[:first]][:part]
            if mine:
                self._last[client] = mine[-1].age
            turn += mine
        return sorted(turn, key=lambda seq: seq.age)
