"""Who is owed what: each sample is looked for once, and looked at.

    owe -> settle -> (every sample: whole, labelled, of its version's class) -> (some: scored again by an engine of our own,
    and made again where one version made all of it)

Written by any thread, under a lock.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from rollout.client.submission import scored_group
from rollout.engine.engine import Engine
from rollout.engine.values import Group as EngineGroup
from rollout.engine.values import Sample, Sampling
from rollout.identity import result_digest
from tests.support.endurance.models import TestModel

MOST_NOTES = 60
MOST_TO_JUDGE = 400
ENDS = {"length", "stop"}
CUT_SHORT = {"cut", "aborted", "deadline"}
RECORDED = {*ENDS, *CUT_SHORT}
"""how samples end that a ledger has"""


class Group(NamedTuple):
    """One that was submitted."""

    key: str
    """unique in the run"""
    prompt: np.ndarray
    sampling: Sampling
    floor: int
    """version that was live when it was submitted"""
    life: int
    """of the router, then"""
    before: frozenset[int] = frozenset()
    """versions that made the conversation which it continues: a turn reads its own KV, whichever weights computed it"""


class Account:
    """`counts`: samples, owed, lost, doubled, mixed, unequal, given_up, judged, remade and what was done, by name."""

    def __init__(self, model: TestModel, seed: int) -> None:
        self.model = model
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self.version = 0
        """the last one known to be live"""
        self.life = 1
        """of the router"""
        self.exhausted = False
        """the router has no descriptors left, and may say so"""
        self.may_serve = {0}
        """versions that anybody may have had"""
        self.waiting: dict[str, float] = {}
        """by key, since when a trainer has waited for it"""
        self._owed: dict[tuple[str, int], Group] = {}
        self._lock = threading.Lock()
        self._rng = random.Random(seed)
        self.arrived: dict[str, str] = {}
        """samples that trainers have got: digest of the result, as in a receipt → name"""
        self.to_judge: queue.Queue[tuple[Group, Sample]] = queue.Queue(MOST_TO_JUDGE)

    # what is owed

    def owe(self, group: Group, indices: Iterable[int]) -> None:
        with self._lock:
            self.waiting[group.key] = time.monotonic()
            for index in indices:
                self._owed[group.key, index] = group
                self.counts["owed"] += 1

    def group(self, key: str, prompt: np.ndarray, sampling: Sampling, children: Iterable[int] | None = None) -> Group:
        """Note that a group is to be submitted. children: its children, where they have tokens already."""
        group = Group(key, prompt, sampling, self.version if children is None else 0, self.life)
        self.owe(group, range(sampling.n) if children is None else children)
        return group

    def settle(self, group: Group, samples: Iterable[Sample], ends: set[str] = ENDS) -> None:
        """Take what came of a group, all of it. ends: reasons for which its children may end."""
        for sample in samples:
            with self._lock:
                owed = self._owed.pop((group.key, sample.index), None)
            if owed is None:
                self.found("doubled", f"{group.key}: child {sample.index} came though it was not owed")
                continue
            self.count("samples")
            if len(sample.token_ids) and sample.finish_reason in RECORDED:
                self.arrived[result_digest(sample)] = f"{group.key}: child {sample.index}, {sample.finish_reason}"
            if sample.finish_reason == "error" and "replicas were lost while they ran this group" in (sample.error or ""):
                self.count("given_up")  # P22, in words
            elif sample.finish_reason not in ends:
                self.found("lost", f"{group.key}: child {sample.index} ended as {sample.finish_reason}: {sample.error}")
            else:
                self.look(group, sample)
        self.close(group, "not among the samples of its group")

    def close(self, group: Group, why: str) -> None:
        """Count what is still owed of a group as lost."""
        with self._lock:
            self.waiting.pop(group.key, None)
            missing = [key for key in self._owed if key[0] == group.key]
            for key in missing:
                del self._owed[key]
        for _, index in missing:
            self.found("lost", f"{group.key}: child {index}: {why}")

    def finish(self) -> None:
        """Count whatever nobody has settled as lost."""
        for group in {group.key: group for group in self._owed.values()}.values():
            self.close(group, "nobody took it")

    # what came

    def look(self, group: Group, sample: Sample) -> None:
        """Compare a sample with what it says of itself."""
        starts = [start for start, _ in sample.weight_versions]
        versions = [version for _, version in sample.weight_versions]
        name = f"{group.key}: child {sample.index}, spans {sample.weight_versions}"
        count = len(sample.token_ids)
        if sample.finish_reason == "length" and count != group.sampling.max_tokens:
            return self.found("lost", f"{name}: {count} tokens of {group.sampling.max_tokens}")
        if starts != sorted(set(starts)) or versions != sorted(set(versions)) or (count and starts[:1] != [0]):
            return self.found("mixed", f"{name}: spans are out of order")
        if not set(versions) <= self.may_serve:
            return self.found("mixed", f"{name}: a version that was refused")
        if versions and versions[0] < group.floor and group.life == self.life:
            return self.found("mixed", f"{name}: version {group.floor} was live when it was submitted")
        if not (np.isfinite(sample.logprobs).all() and len(sample.logprobs) == count):
            return self.found("mixed", f"{name}: log-probs that are none")
        for start, end, version in spans(sample):
            for at in range(start, end):
                if self.model.wrong_token(int(sample.token_ids[at]), version):
                    return self.found("mixed", f"{name}: token {at}, {sample.token_ids[at]}, is none of version {version}")
        if count and group.before <= {versions[0]} and self._rng.random() < self.model.plan.judged:
            try:
                self.to_judge.put_nowait((group, sample))
            except queue.Full:
                self.count("not_judged")

    def same_scores(self, group: Group, sample: Sample, scored: Sample, who: str) -> bool:
        """Compare the first span of a sample with log-probs of the same tokens under the same weights: equal to the bit."""
        _, end, _ = next(spans(sample))
        if np.array_equal(sample.logprobs[:end], scored.logprobs[:end]):
            return True
        apart = np.flatnonzero(sample.logprobs[:end] != scored.logprobs[:end])
        self.found(
            "mixed",
            f"{group.key}: child {sample.index}, spans {sample.weight_versions}: {who} scores {len(apart)} of {end} tokens "
            f"otherwise, from token {apart[0]} on: {sample.logprobs[apart[0]]} and {scored.logprobs[apart[0]]}",
        )
        return False

    def same_sample(self, group: Group, sample: Sample, remade: Sample) -> bool:
        """Compare a sample with the same child of an engine that ran it alone: tokens and log-probs are equal to the bit."""
        count = len(sample.token_ids)
        equal = [
            len(remade.token_ids) >= count and np.array_equal(getattr(sample, name), getattr(remade, name)[:count])
            for name in ("token_ids", "logprobs")
        ]
        if not all(equal):
            self.found(
                "unequal", f"{group.key}: child {sample.index}, seed {sample.seed}: {count} tokens differ when made again"
            )
        return all(equal)

    # notes

    def count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self.counts[name] += more

    def found(self, name: str, text: str) -> None:
        """Note a violation."""
        self.count(name)
        self.note(f"{name}: {text}")

    def note(self, text: str) -> None:
        with self._lock:
            self.notes.append(text)
            if len(self.notes) <= MOST_NOTES:
                print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)


def spans(sample: Sample) -> Iterator[tuple[int, int, int]]:
    """Yield (first token, end, version)."""
    ends = [*(start for start, _ in sample.weight_versions), len(sample.token_ids)][1:]
    for (start, version), end in zip(sample.weight_versions, ends, strict=True):
        yield start, end, version


class Judge:
    """Scores samples again, as far as one version made them, in an engine that no adversary reaches. `run` is a thread's."""

    def __init__(self, account: Account, seed: int) -> None:
        self._account = account
        self._engine = Engine(account.model.config(seed))
        self._content = 0
        """version of the service whose weights our engine has"""

    def run(self, over: threading.Event) -> None:
        """Judge until it is over and nothing is left."""
        try:
            while not (over.is_set() and self._account.to_judge.empty()):
                self._some()
        except Exception as error:  # the run would be worth nothing
            self._account.found("crashes", f"the judge failed: {error!r}")
            raise

    def _some(self) -> None:
        cases: dict[int, list[tuple[Group, Sample]]] = defaultdict(list)
        wait_s = 0.2
        try:
            while True:
                group, sample = self._account.to_judge.get(timeout=wait_s)
                cases[sample.weight_versions[0][1]].append((group, sample))
                wait_s = 0.01
        except queue.Empty:
            pass
        for version in sorted(cases):
            if version != self._content:
                self._engine.refresh(self._account.model.weights(version))
                self._content = version
            for group, sample in cases[version]:
                self._judge(group, sample)

    def _judge(self, group: Group, sample: Sample) -> None:
        _, end, _ = next(spans(sample))
        self._engine.submit(scored_group("judged", group.prompt, [sample.token_ids[:end]], group.sampling))
        scored: list[Sample] = []
        while not scored:
            scored = self._engine.step()
        self._account.count("judged")
        self._account.same_scores(group, sample, scored[0], "the judge")
        if len(sample.weight_versions) == 1 and not group.before and sample.finish_reason in ENDS:
            self._account.count("remade")
            self._account.same_sample(group, sample, self._remade(group, sample))

    def _remade(self, group: Group, sample: Sample) -> Sample:
        """Make a child again, alone, from its prompt and seed."""
        sampling = msgspec.structs.replace(group.sampling, seed=sample.seed, finish_after=None, deadline_s=None, stream_every=0)
        self._engine.submit(EngineGroup("remade", group.prompt, sampling, indices=(sample.index,)))
        made: list[Sample] = []
        while not made:
            made = self._engine.step()
        return made[0]
