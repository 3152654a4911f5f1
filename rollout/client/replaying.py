"""Replay: generates samples again from their receipts, also those that were generated during refreshes.

    receipt ──→ stages ──→ for each version of the weights, ascending: make it live, run the stages of it ──→ Reproduced

    weight_versions [(0, 4), (9, 5)]    stage of version 4: a child of 9 tokens, whose KV stays pinned
    kv_versions [(9, 0, 4), (9, 28, 5)] refresh with kv="keep"
                                        stage of version 5: the child continues after its 9 tokens, with that KV

So a child waits at token t until the next version is live. KV of older weights that the child did not compute itself, such as
that of its prompt, is built by prefills of its first tokens under those weights. The spans of the new sample say whether all
KV was the right one; where it was not, because it was evicted, the child is made again alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from rollout.client.receipts import Receipt
from rollout.client.verification import Here
from rollout.engine.values import Group, PartialSample, Refreshed, Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic
from rollout.identity import DRAWN_BY, WORDS, first_difference, prompt_digest, result_digest, short
from rollout.transport.errors import InvalidRequest

MOST_AT_ONCE = 256
"""children that are made at once"""
TTL_S = 3600.0
"""seconds for which KV waits for the next version"""
STOPPED: tuple[Any, ...] = ("cut", "deadline", "aborted", "stale")
"""finish reasons of children that something outside of their arguments has ended"""

Weights = tuple[int, str]
"""version and digest, as in `Receipt.weights`"""


class Reproduced(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the replay of one receipt."""

    index: int
    """of the child"""
    equal: bool | None
    """True: the sample has the digest of the receipt. False: it has another one, so the receipt is not of these arguments.
    None: it cannot be made here, or was changed"""
    sample: Sample | None = None
    """as it was made here, with the versions of the receipt; None: it was not made"""
    why: str = ""
    """in words; "" if `equal`"""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is other than in the receipt, from a token on.

    Example:
        Change(token=900, sampling={"seed": 7, "temperature": 0.7})
        Change(token=40, append=tool_ids)     # another answer of a tool: the next turn, behind 40 tokens
    """

    token: int
    """tokens that stay as they were"""
    sampling: dict[str, Any] = {}
    """fields of `Sampling` with other values"""
    append: Sequence[int] | np.ndarray | None = None
    """[tokens] that follow, as the prompt of a next turn; None: the sample continues"""


class MakeLive(NamedTuple):
    """Asks for a refresh."""

    version: int
    """of the receipts"""


class Stage(NamedTuple):
    """A part of the life of a child under one set of weights."""

    weights: Weights
    kv: Literal["fresh", "kept", "built"]
    """fresh: computed by these weights; kept: that of the stage before; built: that of the prefills before"""
    end: int | None
    """tokens of output at its end; None: as many as come"""
    prefill: int = 0
    """first tokens of prompt and output whose KV it computes, without output; 0: it samples"""


Step = MakeLive | list[Group]
Steps = Generator[Step, Any, None]
"""what a client does next; it gets a `Refreshed`, or the samples of the groups"""


class Child:
    """A sample that is made again.

    Args:
        ends: tokens and finish reason of the sample, if they are known: then no more tokens are made."""

    def __init__(
        self, receipt: Receipt, prompt: np.ndarray | None, ends: tuple[int, str] | None, change: Change | None
    ) -> None:
        self.receipt, self.change = receipt, change
        self._prompt = np.zeros(0, np.int32) if prompt is None else prompt
        self._ends = ends
        self.verdict: Reproduced | None = None
        self.stages: list[Stage] = []
        self._at, self._early = 0, False
        """stages that are done; whether the sample ended before its last one"""
        self._sample: Sample | None = None
        self._names: dict[str, str] = {}
        """ids of the newest groups, by what they leave: "sample" or "prefill" """
        if ends is not None and ends[1] in ("error", "scored"):
            self.unknown(f"it ended as {ends[1]!r}")
            return
        if prompt is None:
            self.unknown("its prompt was not given")
            return
        try:
            self.stages = list(self._stages())
        except ValueError as error:
            self.unknown(str(error))

    @property
    def next(self) -> Stage | None:
        """Return what is to be done next; None: nothing."""
        return None if self.verdict is not None or self._at == len(self.stages) else self.stages[self._at]

    @property
    def begins(self) -> bool:
        """Return whether the next stage is the first one, with the prompt and no KV of before."""
        stage = self.next
        return stage is not None and self._sample is None and not stage.prefill and stage.kv == "fresh"

    @property
    def index(self) -> int:
        """Return the index of the child in the groups of its next stage."""
        return 0 if self.next is not None and self.next.prefill else self.receipt.index

    def rename(self, id: str) -> None:
        """Run the next stage in another group than `group` made."""
        self._names["sample"] = id

    def unknown(self, why: str) -> None:
        """End the replay: the sample cannot be made here."""
        self.verdict = Reproduced(index=self.receipt.index, equal=None, why=f"cannot be replayed here: {why}")

    def again(self) -> None:
        """Begin again."""
        self._at, self._early, self._sample, self.verdict = 0, False, None, None

    def group(self, id: str, pinned_s: float) -> Group:
        """Make the group of the next stage. pinned_s: how long KV for later stages is kept."""
        stage = self.next
        assert stage is not None
        after = self._names["prefill" if stage.kv == "built" else "sample"] if stage.kv != "fresh" else None
        index = self.receipt.index
        if stage.prefill:
            sampling = Sampling(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, kv_ttl_s=pinned_s)
            group = Group(id, self._tokens()[: stage.prefill], sampling)
            self._names["prefill"] = id
            return group if after is None else msgspec.structs.replace(group, after=(after, 0))
        own = 0 if stage.kv == "built" else index
        is_last = self._at + 1 == len(self.stages)
        sampling = self._sampling(stage, is_last, pinned_s)
        partials = () if self._sample is None else (PartialSample.of(self._sample),)
        prompt = self._prompt
        if is_last and self.change is not None and self.change.append is not None:
            prompt, partials = np.concatenate([self._tokens(), np.asarray(self.change.append, np.int32)]), ()
        self._names["sample"] = id
        return Group(id, prompt, sampling, (index,), partials, after=None if after is None else (after, own))

    def take(self, sample: Sample) -> None:
        """Take the sample of the stage."""
        stage = self.next
        assert stage is not None
        self._at += 1
        if sample.finish_reason not in ("stop", "length"):
            self.unknown(f"it ended as {sample.finish_reason!r}: {sample.error or 'by a request'}")
        elif not stage.prefill:
            self._sample = sample
            if stage.end is not None and len(sample.token_ids) < stage.end:
                self._at, self._early = len(self.stages), True

    def judge(self, versions: Mapping[int, int]) -> bool:
        """Compare what was made with the receipt. versions: those of the receipts, by those of this service. Returns whether
        the KV was the right one; if it was not, the verdict says so."""
        if self.verdict is not None:
            return True
        receipt = self.receipt
        made = self._sample if self._sample is not None else _nothing(receipt, len(self._prompt))
        spans = [(first, versions.get(version, -1)) for first, version in made.weight_versions]
        kv = [(first, position, versions.get(version, -1)) for first, position, version in made.kv_versions]
        made = msgspec.structs.replace(made, weight_versions=spans, kv_versions=kv)
        if self.change is not None and self._early:
            self.unknown(f"it ends after {len(made.token_ids)} tokens, and is to change from token {self.change.token} on")
            return True
        if self.change is not None:
            why = f"changed from token {self.change.token} on"
            self.verdict = Reproduced(index=receipt.index, equal=None, sample=made, why=why)
            return True
        whole = (tuple(spans), tuple(kv)) == (tuple(receipt.weight_versions), tuple(receipt.kv_versions))
        if not whole and self._stopped_early(made):
            why = f"it ends after {len(made.token_ids)} tokens, before version {receipt.weight_versions[-1][1]}"
            self.verdict = Reproduced(index=receipt.index, equal=False, sample=made, why=why)
            return True
        if not whole:
            self.unknown(f"KV of older weights was evicted: it has {kv}, the receipt {list(receipt.kv_versions)}")
            return False
        self.verdict = self._compared(made)
        return True

    # ── stages ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stages(self) -> Iterable[Stage]:
        """Yield the stages in the order of the versions. Raises ValueError for spans that no service gives."""
        receipt = self.receipt
        digests = dict(receipt.weights)
        end = self._end
        if receipt.weight_versions and receipt.weight_versions[0][0]:
            raise ValueError("no version is named for token 0")
        starts = sorted({first for first, _ in receipt.weight_versions} | {first for first, *_ in receipt.kv_versions})
        starts = [start for start in starts if end is None or start < end] or starts[:1]
        stages: list[Stage] = []
        before: tuple[tuple[int, int], ...] = ()
        for place, start in enumerate(starts):
            version = _version_at(receipt.weight_versions, start)
            kv = _kv_at(receipt.kv_versions, start) or ((0, version),)
            position = len(self._prompt) + start - 1
            if kv[-1][1] != version or kv[-1][0] > position or kv[0][0] or version < max(each for _, each in kv):
                raise ValueError(f"KV {list(kv)} of token {start} is not possible under version {version}")
            kept = before if before and before[-1][1] == version else (*before, (position, version))
            how: Literal["fresh", "kept", "built"] = "kept" if before and kv == kept else "built" if len(kv) > 1 else "fresh"
            if how == "built":
                prefills = zip(kv[:-1], kv[1:], strict=True)
                for i, ((_, old), (until, _)) in enumerate(prefills):
                    stages.append(Stage((old, digests.get(old, "")), "built" if i else "fresh", None, until))
            if how == "kept" and stages[-1].weights[0] == version and not stages[-1].prefill:
                stages[-1] = stages[-1]._replace(end=end if place + 1 == len(starts) else starts[place + 1])
            else:
                until_token = end if place + 1 == len(starts) else starts[place + 1]
                stages.append(Stage((version, digests.get(version, "")), how, until_token or None))
            before = kv
        if self.change is not None and self.change.token and stages:
            stages.append(stages[-1]._replace(kv="fresh" if len(before) == 1 else "kept", end=None))
        # stages that sample are in this order already; a prefill comes behind those of its version
        return sorted(stages, key=lambda stage: (stage.weights[0], bool(stage.prefill)))

    @property
    def _end(self) -> int | None:
        """Return how many tokens are made of the receipt; None: as many as come."""
        if self.change is not None:
            return self.change.token
        if self._ends is not None and self._ends[1] in STOPPED:
            return self._ends[0]
        return None

    def _sampling(self, stage: Stage, is_last: bool, pinned_s: float) -> Sampling:
        own = self.receipt.sampling
        later = [each.kv for each in self.stages[self._at + 1 :] if not each.prefill][:1]
        fields: dict[str, Any] = {"n": self.receipt.index + 1, "kv_ttl_s": pinned_s if later == ["kept"] else 0.0}
        if stage.end is not None:
            end = min(stage.end, own.max_tokens)
            fields |= {"max_tokens": end, "min_tokens": min(own.min_tokens, end)}
        elif is_last and self.change is not None:
            fields |= self.change.sampling
        return msgspec.structs.replace(own, **fields)

    def _tokens(self) -> np.ndarray:
        """Return the tokens of prompt and output so far."""
        output = np.zeros(0, np.int32) if self._sample is None else self._sample.token_ids
        return np.concatenate([self._prompt, output])

    # ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stopped_early(self, made: Sample) -> bool:
        """Return whether the sample ended before all versions of the receipt were live."""
        last = max([first for first, _ in self.receipt.weight_versions] + [first for first, *_ in self.receipt.kv_versions])
        return len(made.token_ids) <= last

    def _compared(self, made: Sample) -> Reproduced:
        """Compare digests, also of a sample that something outside has ended earlier."""
        if result_digest(made) == self.receipt.result:
            return Reproduced(index=made.index, equal=True, sample=made)
        known = self._ends
        lengths = range(len(made.token_ids), -1, -1) if known is None else [min(known[0], len(made.token_ids))]
        for length in lengths:
            for reason in STOPPED:
                columns = made.slice(0, length).columns()
                cut = msgspec.structs.replace(made, finish_reason=reason, stopped_by=None, text_end=None, **columns)
                if result_digest(cut) == self.receipt.result:
                    return Reproduced(index=made.index, equal=True, sample=cut)
        why = "the same arguments give another sample: the digests differ"
        return Reproduced(index=made.index, equal=False, sample=made, why=why)


class Way(NamedTuple):
    """How a service makes samples again."""

    here: Here
    known: frozenset[int]
    """versions whose weights can be made live"""
    pinned_s: float
    """longest time for which the service keeps KV for the next stage"""
    new_id: Callable[[], str]
    """returns a new group id"""


class Replay:
    """Makes samples again on a service.

    Args:
        prompts: token ids of the groups, in any order.
        ends: tokens and finish reason of each sample, if they are known.

    Raises InvalidRequest for ends that are not one each, and for an impossible change."""

    def __init__(
        self,
        receipts: Sequence[Receipt],
        prompts: Iterable[np.ndarray],
        way: Way,
        ends: Sequence[tuple[int, str]] | None = None,
        change: Change | None = None,
    ) -> None:
        if ends is not None and len(ends) != len(receipts):
            raise InvalidRequest(f"{len(receipts)} receipts, {len(ends)} ends: must be as many")
        ids = {prompt_digest(prompt): prompt for prompt in prompts}
        if change is not None:
            check_change(change)
        self._way = way
        self._live = way.here.version, short(way.here.digest_of(way.here.version))
        """version and digest of what is live on the service"""
        self._children = [
            Child(receipt, ids.get(receipt.prompt), None if ends is None else ends[i], change)
            for i, receipt in enumerate(receipts)
        ]
        for child in self._children:
            self._refuse(child)
        self._steps = self._all_steps()

    @property
    def results(self) -> list[Reproduced]:
        """Return the results, in the order of the receipts."""
        results = [child.verdict for child in self._children]
        assert None not in results, "the steps were done"
        return results  # type: ignore[return-value]

    def run(self, refresh: Callable[[int], Refreshed], generate: Callable[[list[Group]], list[Sample]]) -> None:
        """Do all steps. refresh: makes the weights of a version live and keeps KV; generate: runs groups."""
        done: Refreshed | list[Sample] | None = None
        while (step := self.next_step(done)) is not None:
            done = refresh(step.version) if isinstance(step, MakeLive) else generate(step)

    def next_step(self, done: Refreshed | list[Sample] | None) -> Step | None:
        """Return what to do next; None: everything is done. done: the result of the step before; None: there was none."""
        try:
            return next(self._steps) if done is None else self._steps.send(done)
        except StopIteration:
            return None

    def _all_steps(self) -> Steps:
        """Yield what to do: refreshes and groups."""
        alone: list[Child] = []
        for first in range(0, len(self._children), MOST_AT_ONCE):
            some = [child for child in self._children[first : first + MOST_AT_ONCE] if child.verdict is None]
            alone += yield from self._made(some)
        for child in alone:
            child.again()
            yield from self._made([child])

    def _made(self, children: list[Child]) -> Generator[Step, Any, list[Child]]:
        """Make samples. Returns the children whose KV was evicted."""
        versions: dict[int, int] = {}
        for weights in sorted({stage.weights for child in children for stage in child.stages}):
            waiting = [child for child in children if child.next is not None and child.next.weights == weights]
            if not waiting:
                continue
            if not self._is_live(weights) and not (yield from self._make_live(weights, waiting)):
                continue
            versions[self._live[0]] = weights[0]
            while groups := self._groups(waiting, weights):
                samples = yield [group for group, _ in groups]
                taken = {(sample.group_id, sample.index): sample for sample in samples}
                for group, some in groups:
                    for child in some:
                        child.take(taken[group.id, child.index])
        return [child for child in children if not child.judge(versions)]

    def _groups(self, waiting: list[Child], weights: Weights) -> list[tuple[Group, list[Child]]]:
        """Return the groups of the next stages under these weights. Children that begin with the same prompt share one."""
        groups: list[tuple[Group, list[Child]]] = []
        open_groups: dict[Any, int] = {}
        for child in waiting:
            if child.next is None or child.next.weights != weights:
                continue
            group = child.group(self._way.new_id(), self._way.pinned_s)
            key = child.receipt.prompt, repr(msgspec.structs.replace(group.sampling, n=1))
            place = open_groups.get(key)
            if not child.begins or place is None or child.index <= groups[place][1][-1].index:
                open_groups |= {key: len(groups)} if child.begins else {}
                groups.append((group, [child]))
                continue
            shared, others = groups[place]
            child.rename(shared.id)
            indices = (*shared.wanted, child.index)
            groups[place] = msgspec.structs.replace(shared, sampling=group.sampling, indices=indices), [*others, child]
        return groups

    def _is_live(self, weights: Weights) -> bool:
        version, digest = weights
        live, live_digest = self._live
        return digest == live_digest if digest and live_digest else version == live and version not in self._way.known

    def _make_live(self, weights: Weights, waiting: list[Child]) -> Generator[Step, Refreshed, bool]:
        """Refresh the service, and return whether these weights are live now; otherwise their children cannot be made."""
        version, digest = weights
        if version not in self._way.known:
            for child in waiting:
                child.unknown(f"the weights of version {version} ({digest or 'of unknown digest'}) were not given")
            return False
        refreshed = yield MakeLive(version)
        self._live = refreshed.version, short(refreshed.digest)
        if digest and self._live[1] != digest:
            for child in waiting:
                child.unknown(f"the weights given as version {version} have digest {self._live[1]}, the receipt has {digest}")
            return False
        return True

    def _refuse(self, child: Child) -> None:
        """End the replay of a receipt that this service cannot compute, whatever its weights."""
        info, receipt = self._way.here.info, child.receipt
        if child.verdict is not None:
            return
        if (name := first_difference(receipt, info, receipt.sampling)) is not None:
            child.unknown(f"it was sampled with {WORDS[name]} {getattr(receipt, name)}, this service has {getattr(info, name)}")
        if Arithmetic.parse(receipt.arithmetic).by_batch:
            child.unknown(f"the bits of arithmetic {receipt.arithmetic} depend on the batch")
        if not self._way.pinned_s and any(stage.kv != "fresh" for stage in child.stages):
            child.unknown("it needs KV that is kept over a refresh, and Limits.max_kv_ttl_s is 0 here")


def check_change(change: Change) -> None:
    """Check a change. Raises InvalidRequest."""
    if not isinstance(change, Change):
        raise InvalidRequest(f"change is a {type(change).__name__}: give Change(token=…, sampling={{…}})")
    if change.token < 0:
        raise InvalidRequest(f"Change.token={change.token}: must be 0 or a number of tokens")
    unknown = [name for name in change.sampling if name not in DRAWN_BY]
    if unknown:
        raise InvalidRequest(f"Change.sampling has {unknown[0]!r}: it may have {', '.join(DRAWN_BY)}")


def _nothing(receipt: Receipt, prompt_tokens: int) -> Sample:
    """Return a sample without tokens."""
    return Sample(
        group_id="",
        index=receipt.index,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        weight_versions=[],
        finish_reason="aborted",
        prompt_tokens=prompt_tokens,
        seed=receipt.sampling.seed or 0,
    )


def _version_at(spans: Sequence[tuple[int, int]], token: int) -> int:
    """Return the version of a token. spans: from token 0 on."""
    return spans[bisect_right(spans, token, key=lambda span: span[0]) - 1][1]


def _kv_at(spans: Sequence[tuple[int, int, int]], token: int) -> tuple[tuple[int, int], ...]:
    """Return which versions computed the KV that a token attended to; () where it follows from the version of the token."""
    found: tuple[tuple[int, int], ...] = ()
    for first, position, version in spans:
        if first <= token:
            found = *(span for span in found if span[0] < position), (position, version)
    return found
