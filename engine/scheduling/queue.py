"""Waiting sequences, in the order in which they start; running sequences, with their block tables and sampling options in
arrays."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from rollout.engine.scheduling.plan import SAMPLING
from rollout.engine.scheduling.sequence import Sequence
from rollout.engine.values.sampling import draw_columns_of

Place = tuple[int, ...]
"""Of a waiting sequence within its client: by priority; of equal ones first those that were stopped for another client, then
those that have run before (preempted, forked), whose KV or siblings hold memory already; then by `Sequence.rank`."""


class WaitingQueue:
    """Sequences that do not run. The next one belongs to the client that runs the fewest sequences; ties take turns, so that a
    client with thousands of groups does not starve one with a single group."""

    def __init__(self) -> None:
        self._clients: dict[str, list[Sequence]] = {}
        self._places: dict[Sequence, Place] = {}
        """of each sequence as of `put`: a child of a fork waits before its first token is appended"""
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
        """Add a sequence, at its present place within its client."""
        priority, *rest = sequence.rank
        self._places[sequence] = (priority, not sequence.held, not sequence.started, *rest)
        insort(self._clients.setdefault(sequence.state.client, []), sequence, key=self._places.__getitem__)

    def clients(self, started: bool = False) -> list[str]:
        """List the clients that have sequences here. started: only sequences that have run before."""
        return [client for client, sequences in self._clients.items() if self._first(sequences, started) is not None]

    def of(self, clients: Collection[str], started: bool = False) -> Iterator[Sequence]:
        """Yield the sequences of these clients, each client's in order. started: only those that have run before."""
        for client, sequences in self._clients.items():
            if client in clients:
                yield from (seq for seq in sequences if seq.started or not started)

    def next(self, running: Counter[str], of: Collection[str] | None = None, started: bool = False) -> Sequence | None:
        """Return the next sequence without removing it. running: running sequences of each client. of: the clients to choose
        from, None = all. started: only sequences that have run before."""
        clients = [client for client in self.clients(started) if of is None or client in of]
        if not clients:
            return None
        client = min(clients, key=lambda name: (running[name], self._served.get(name, 0)))
        return self._first(self._clients[client], started)

    @staticmethod
    def _first(sequences: list[Sequence], started: bool) -> Sequence | None:
        return next((sequence for sequence in sequences if sequence.started), None) if started else sequences[0]

    def remove(self, sequence: Sequence, served: bool = False) -> None:
        """Remove a sequence. served: it starts, so that other clients are next."""
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


class RunningTable:
    """One place for each sequence that runs.

        place        0             1             2          … places - 1
        table    [ 7 3 9 0 … ] [ 7 3 4 0 … ] [ 0 0 0 0 … ]    device slots of its blocks, then 0
        sampling ( 17, 0, …  ) ( 17, 1, …  ) (    free   )    constant while the sequence runs

    A sequence keeps its place until it stops. Written by `SchedulerState` only: sequences here, blocks through `Sequence.table`
    as they are appended. Persistent batch arrays: vLLM's input batch.
    """

    def __init__(self, places: int, max_blocks: int, windows: bool = False) -> None:
        """windows: some layers have a sliding window."""
        self.table = np.zeros((places, max_blocks), np.int32)
        """[places, max_blocks] int32"""
        self.windows = np.zeros_like(self.table) if windows else None
        """the same for blocks of windows, 0 also before the first one"""
        self.sampling = np.zeros(places, SAMPLING)
        """[places] SAMPLING"""
        self.sequences: list[Sequence] = []
        """the running sequences, oldest first"""
        self.of_client: Counter[str] = Counter()
        """running sequences of each client that has some"""
        self._free = list(range(places - 1, -1, -1))

    @property
    def has_place(self) -> bool:
        """Return whether one more sequence can run."""
        return bool(self._free)

    def enter(self, seq: Sequence, least_run: int = 0) -> None:
        """Add a sequence whose blocks are on the device. least_run: tokens to sample before it may be preempted."""
        self._fill(seq, self._free.pop())
        seq.running = seq.started = True
        seq.held = False
        seq.num_output_at_start = len(seq.output)
        seq.least_run = least_run
        insort(self.sequences, seq, key=lambda s: s.age)
        self.of_client[seq.state.client] += 1

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence."""
        seq.running = False
        self.sequences.remove(seq)
        self.of_client[seq.state.client] -= 1
        if not self.of_client[seq.state.client]:
            del self.of_client[seq.state.client]
        self._clear(seq)

    def _fill(self, seq: Sequence, place: int) -> None:
        seq.place, seq.table = place, self.table[place]
        seq.table[: len(seq.blocks)] = slots_of(seq)
        if self.windows is not None:
            seq.window_table = self.windows[place]
            seq.window_table[seq.window_first : len(seq.blocks)] = [block.device for block in seq.window]
        self.sampling[place] = sampling_of(seq)

    def _clear(self, seq: Sequence) -> None:
        assert seq.place is not None and seq.table is not None
        seq.table[: len(seq.blocks)] = 0
        if seq.window_table is not None:
            seq.window_table[: len(seq.blocks)] = 0
        self._free.append(seq.place)
        seq.place = seq.table = seq.window_table = None


def slots_of(seq: Sequence) -> list[int]:
    """Return the device slots of the blocks of a sequence that runs."""
    return [block.device for block in seq.blocks if block.device is not None]


def sampling_of(seq: Sequence) -> tuple[object, ...]:
    """Return the record of a sequence, in the order of SAMPLING."""
    state, sampling = seq.state, seq.state.group.sampling
    least = sampling.min_tokens if state.stop_ids else 0
    own = state.seed, seq.index, seq.num_prompt, least, state.rules is not None, state.group.redraw
    return *own, *draw_columns_of(sampling)
