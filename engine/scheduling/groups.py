"""The groups that are not finished, and their children: submit, fork, end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from engine.config import EngineConfig
from engine.kv.store import BlockStore
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.conversations import ConversationIndex
from engine.scheduling.counters import Counters
from engine.scheduling.fairness import Fairness
from engine.scheduling.pinned import PinnedKV
from engine.scheduling.plan import TopLogprobs
from engine.scheduling.queue import WaitingQueue
from engine.scheduling.running import RunningTable
from engine.scheduling.sequence import GroupState, Sequence
from engine.scheduling.stops import Stops
from engine.scheduling.timers import Timers
from engine.types import FinishReason, Group, Sample, TokenChunk

CONTINUED = frozenset(("stop", "length", "cut", "deadline"))
"""how a child ends that another turn may follow"""


class Groups:
    """A part of the scheduler: keeps which children there are. Sequences are made and ended here only."""

    def __init__(
        self,
        config: EngineConfig,
        store: BlockStore,
        tables: BlockTables,
        running_table: RunningTable,
        waiting: WaitingQueue,
        shares: Fairness,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.block_size = config.block_size
        self.min_run_tokens = config.advanced.min_run_tokens
        self.store = store
        self.tables = tables
        self.running_table = running_table
        self.waiting = waiting
        self.shares = shares
        self.counters = counters
        self.kept = PinnedKV(store, tables)
        self.turns = ConversationIndex(config.block_size)
        self.of_id: dict[str, GroupState] = {}
        self._clock = clock
        self._submitted = 0
        self._deadlines: Timers[GroupState] = Timers(lambda state: self.of_id.get(state.group.id) is state)

    def submit(self, group: Group, client: str, seed: int, eos: frozenset[int], stops: Stops | None) -> list[Sample]:
        """Queue a group. Returns the children that are complete already. Raises ValueError if the id is taken, one child
        could never fit into the pool or goes on behind a stop string, or as many are complete as end the group."""
        if group.id in self.of_id:
            raise ValueError(f"group id {group.id!r} is in use by a group that is not finished; choose another")
        need = -(-(len(group.prompt) + group.sampling.max_tokens) // self.block_size)
        if need > self.store.device.size:
            raise ValueError(
                f"prompt of {len(group.prompt)} + max_tokens {group.sampling.max_tokens} need {need} KV blocks of "
                f"{self.block_size} tokens, the pool has {self.store.device.size}; lower max_tokens or raise kv_tokens"
            )
        state = GroupState(group, client, self._submitted, seed, self._clock(), eos, stops)
        enough = group.sampling.finish_after
        if enough is not None and len(state.complete) >= enough:
            raise ValueError(
                f"finish_after={enough}: {len(state.complete)} of the partial samples are complete; leave them out"
            )
        self._submitted += 1
        state.finished = len(state.complete)
        complete = [(Sequence(state, partial.index, partial), state.complete.get(partial.index)) for partial in group.partials]
        samples = [self._count_end(child, reason, 0.0) for child, reason in complete if reason is not None]
        if not state.fresh and not state.resumed:
            return samples
        self.of_id[group.id] = state
        turn = self.turns.find(group, client)
        if turn is not None:
            state.order, state.own = (turn.since, state.number), turn.kv
        for index in state.fresh[:1] or state.resumed:
            state.sequences[index] = seq = Sequence(state, index)
            if turn is not None:
                self.counters.kept_tokens += self.kept.hand_over(group.after, seq)
            self.waiting.put(seq)
        if group.sampling.deadline_s is not None:
            self._deadlines.add(state.arrived + group.sampling.deadline_s, state)
        self.shares.arrived(client, state.arrived)
        return samples

    def _count_end(self, child: Sequence, reason: FinishReason, seconds: float, error: str | None = None) -> Sample:
        """Count a child that ends without having been scheduled. Returns its sample."""
        self.counters.ended[reason] += 1
        return child.sample(reason, seconds, error)

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        """End the children that are not finished, or one of them. Returns them with what they have; [] for an unknown id or
        index. A child of a group that has not forked ends when it does, unless none is left then. KV is not kept any more."""
        self.kept.release(group_id, index)
        state = self.of_id.get(group_id)
        if state is None:
            return []
        if index is None:
            return self.end_all(state, "aborted")
        if state.forked:
            return [self.end(state.sequences[index], "aborted")] if index in state.sequences else []
        if index in state.fresh or index in state.resumed:
            state.cancelled.add(index)
        return [] if state.uncancelled else self.end_all(state, "aborted")

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        """Return what unfinished children have drawn beyond their first `since` tokens (by index; all, of those not named): of
        those that have `least` or more there, and at most `most` tokens in all, first of those that have most. [] for an
        unknown id."""
        state = self.of_id.get(group_id)
        return [] if state is None or not state.forked else chunks_of(state.sequences.values(), since, least, most)

    @property
    def overdue(self) -> bool:
        """True if a group may be past its deadline, or a child have been kept long enough."""
        now = self._clock()
        return self._deadlines.due(now) or self.kept.due(now)

    def expire(self) -> list[Sample]:
        """End the groups that are past their deadline, and give up KV that was kept long enough. Returns the unfinished
        children of these groups with what they have."""
        now = self._clock()
        self.kept.expire(now)
        return [sample for state in self._deadlines.take(now) for sample in self.end_all(state, "deadline")]

    def refresh(self, version: int, kv: str) -> list[Sample]:
        """Apply `kv` to live groups once the weights are another version: "keep" their KV, "recompute" it, or "abort" them.
        Recomputed is all KV of groups that have started, whatever their `max_kv_lag`. A prompt of which nothing was drawn
        yet, or of a child that goes on, keeps KV as old as that allows. Returns the samples that this ends."""
        assert kv in ("keep", "recompute", "abort")
        samples: list[Sample] = []
        if kv != "keep":
            self.kept.release_all()
            self.turns.forget_kv(version)
        for state in list(self.of_id.values()):
            if kv == "abort" and state.started:
                samples += self.end_all(state, "aborted")
                continue
            if kv != "keep":
                state.own = None
            if kv == "recompute" and state.started:
                state.oldest_kv = version
            samples += self._end_stale(state, version)
            for seq in list(state.sequences.values()):
                if kv == "recompute" or not seq.drew:
                    self.tables.drop_older(seq, state.readable_from(version))
        return samples

    def _end_stale(self, state: GroupState, version: int) -> list[Sample]:
        """End the children whose first token is too far behind `version`, also where they wait for their group to fork."""
        lag = state.group.sampling.max_version_lag
        if lag is None:
            return []
        samples = [self.end(seq, "stale") for seq in list(state.sequences.values()) if is_stale(seq, version - lag)]
        if not state.forked:
            stale = [child for index in state.resumed if is_stale(child := Sequence(state, index), version - lag)]
            samples += [self._count_end(child, "stale", self._clock() - state.arrived) for child in stale]
            state.leave_out([child.index for child in stale])
            samples += [] if state.uncancelled else self.end_all(state, "aborted")
        return samples

    # ── after a step ──────────────────────────────────────────────────────────────────────────────────────────────────
    def fork(self, seq: Sequence) -> list[Sequence]:
        """Make the children of a sequence that has the prompt cached; all share its blocks. Those that find no place to run
        wait like anyone else, and so do those that have more to prefill. Returns the fresh ones, in order of their draws."""
        seq.state.forked = True
        seq.num_next_samples = 1
        children = [seq, *seq.fork()]
        for child in children[1:]:
            seq.state.sequences[child.index] = child
            self.store.share(child.blocks)
            if self.running_table.has_place and child.index not in seq.state.resumed:
                for block in child.blocks:
                    self.store.pin(block, full=True)
                self.running_table.enter(child, self.min_run_tokens)
            else:
                self.waiting.put(child)
        self.counters.forks += len(children) - 1
        self.counters.fork_saved_tokens += (len(children) - 1) * seq.num_prompt
        self.counters.fork_shared_blocks += (len(children) - 1) * (seq.num_prompt // self.block_size)
        return children[: len(seq.state.fresh)]

    def take_token(
        self,
        seq: Sequence,
        token: int,
        logprob: float,
        raw: float | None,
        finite: bool,
        version: int,
        top: TopLogprobs | None,
        draw: int,
    ) -> FinishReason | None:
        """Append a token that was drawn by the weights `version`, as draw number `draw` of its step. Returns why that ends the
        child, if it does."""
        if not finite:
            self.tables.distrust(seq)
            return "error"
        seq.append(token, logprob, raw, version)
        if seq.tracked is not None:
            seq.tracked.append(token)
            if top is not None:
                seq.tracked.append_top(top, draw)
        if seq.given is not None:
            self.counters.scored_tokens += 1
            return "scored" if len(seq.output) == len(seq.given) else None
        self.counters.generated_tokens += 1
        return reason_behind(seq, token)

    def end_races(self, racing: list[tuple[Sequence, FinishReason]]) -> list[Sample]:
        """End children that a step has ended, of groups that end with their first `finish_after`, and the siblings that are to
        be cut then. The shorter child counts first, of equal ones the lower index; what comes too late is cut too, if longer
        than `min_len_to_cut`: a shorter one would have ended by itself in a later step as well."""
        samples = []
        for seq, reason in sorted(racing, key=lambda each: (each[0].state.number, len(each[0].output), each[0].index)):
            if not seq.ended:  # cancelled where its group forked
                counts = seq.state.races or len(seq.output) <= seq.state.group.sampling.min_len_to_cut
                samples.append(self.end(seq, reason if counts else "cut"))
        for state in {seq.state.number: seq.state for seq, _ in racing if not seq.state.races}.values():
            state.cut_at = state.group.sampling.min_len_to_cut
            samples += [self.end(seq, "cut") for seq in list(state.sequences.values()) if len(seq.output) >= state.cut_at]
        return samples

    def end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> Sample:
        """End a child, which runs or waits, and give its blocks up. Returns its sample."""
        seq_ran = seq.running
        if seq_ran:
            self.running_table.leave(seq)
        else:
            self.waiting.remove(seq)
        seq.ended = True
        state, now = seq.state, self._clock()
        self._leave_blocks(seq, seq_ran, now, continues=reason in CONTINUED)
        del state.sequences[seq.index]
        if reason in ("stop", "length"):
            state.finished += 1
        if not state.sequences:
            del self.of_id[state.group.id]
            self.shares.left(state.client, now)
        self.counters.ended[reason] += 1
        return state.heard(seq.sample(reason, now - state.arrived, error))

    def _leave_blocks(self, seq: Sequence, ran: bool, now: float, continues: bool) -> None:
        """Keep the blocks of a child that ends, if its group wants that, or give them up. `continues`: a turn may follow."""
        if continues and not ran:
            self.tables.cut_lost(seq)
        if continues and seq.output and seq.cached:
            self.turns.note(seq)
            if kv_ttl_s := seq.state.group.sampling.kv_ttl_s:
                self.kept.keep(seq, now + kv_ttl_s, ran)
                return
        for block in reversed(seq.blocks):  # so that the least recently used end of a chain is its tail, not its root
            self.store.disown(block, used=ran)
        seq.blocks.clear()

    def end_all(self, state: GroupState, reason: FinishReason, error: str | None = None) -> list[Sample]:
        """End every child that is not finished; before the fork that is all n of them."""
        if not state.forked:
            only = self.end(state.sequences[state.fresh[0]], reason, error)
            others = [Sequence(state, index) for index in (*state.fresh[1:], *state.resumed)]
            return [only, *(self._count_end(child, reason, only.seconds, error) for child in others)]
        return [self.end(seq, reason, error) for seq in list(state.sequences.values())]


def is_stale(seq: Sequence, oldest: int) -> bool:
    """True if weights before version `oldest` drew its first token."""
    return bool(seq.spans) and seq.spans[0][1] < oldest


def chunks_of(sequences: Iterable[Sequence], since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
    """Return what these have drawn; see `Groups.chunks`."""
    new = [(len(seq.output) - since.get(seq.index, 0), seq) for seq in sequences]
    chunks = []
    for count, seq in sorted((each for each in new if each[0] >= least), key=lambda each: (-each[0], each[1].index)):
        if most > 0:
            chunks.append(seq.chunk(len(seq.output) - count, min(count, most)))
        most -= count
    return chunks


def reason_behind(seq: Sequence, token: int) -> FinishReason | None:
    """Return why a child ends behind `token`, its newest; None: it goes on."""
    state = seq.state
    if seq.tracked is not None and seq.tracked.found and len(seq.output) > state.group.sampling.min_tokens:
        return "stop"
    if token in state.eos and len(seq.output) > state.group.sampling.min_tokens:
        return "stop"
    if seq.num_prompt + len(seq.output) == seq.limit:
        return "length"
    return "cut" if state.cut_at is not None and len(seq.output) >= state.cut_at else None
