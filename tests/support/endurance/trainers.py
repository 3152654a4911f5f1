"""Trainers, as threads: one that waits for whole groups, one whose groups are cut and go on, one that scores."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.client.api import RolloutClient
from rollout.engine.values import Sample, Sampling
from rollout.transport.errors import Busy, RolloutError, ServiceLost, StaleWeights
from tests.support.endurance.account import CUT_SHORT, ENDS, Account, Group, spans
from tests.support.endurance.foreign import Foreign

WAIT = 400.0
"""for what comes: a bound for hangs only. A router that is killed has to load its model again"""


MEMO_GIB, MEMO_GROUPS = 1e-4, 6
"""room of a memo, and groups for which it is open"""


class Trainer:
    """One client and what it asks for, in a thread. number: of this trainer in the run."""

    def __init__(self, number: int, seed: int, address: str, account: Account, over: threading.Event) -> None:
        self.number, self.account, self.over = number, account, over
        self.address = address
        self.rng = np.random.default_rng([seed, number])
        self.made = 0

    def run(self) -> None:
        try:
            with RolloutClient(
                self.address, name=f"trainer {self.number}", connect_timeout_s=WAIT, link_timeout_s=WAIT, restart_timeout_s=WAIT
            ) as client:
                self.train(client)
        except Exception as error:
            self.account.found("lost", f"trainer {self.number} failed: {error!r}")

    def train(self, client: RolloutClient) -> None:
        raise NotImplementedError

    def draw(self, **options: Any) -> tuple[str, np.ndarray, Sampling]:
        """Make a group: a name, a prompt, and sampling with a seed."""
        self.made += 1
        rng, model = self.rng, self.account.model
        prompt = rng.integers(3, model.vocab_size, rng.integers(1, 48)).astype(np.int32)
        longest = int(rng.integers(4, model.plan.longest))
        sampling = Sampling(
            **{
                "n": int(rng.choice([1, 2, 4, 8])),
                "max_tokens": longest,
                "seed": int(rng.integers(2**31)),
                "ignore_eos": True,
                "temperature": float(rng.choice([0.7, 1.0])),
                "stream_every": int(rng.choice([0, 8])),
                **options,
            }
        )
        return f"{self.number}/{self.made}", prompt, sampling

    def wait(self, group: Group, handle: Any, ends: set[str] = ENDS) -> list[Sample] | None:
        """Wait for a group and settle it. None where it failed, which is told."""
        try:
            samples: list[Sample] = handle.result(WAIT)
        except RolloutError as error:
            self.account.close(group, repr(error))
            return None
        self.account.settle(group, samples, ends)
        return samples

    def submit(self, client: RolloutClient, **options: Any) -> tuple[Group, Any]:
        key, prompt, sampling = self.draw(**options)
        group = self.account.group(key, prompt, sampling)
        return group, client.submit(prompt, sampling)


class Whole(Trainer):
    """Has a few groups open at a time."""

    def train(self, client: RolloutClient) -> None:
        waiting: deque[tuple[Group, Any]] = deque()
        while not self.over.is_set() or waiting:
            while not self.over.is_set() and len(waiting) < self.account.model.plan.open_groups:
                waiting.append(self.submit(client))
            if waiting:
                self.wait(*waiting.popleft())


class Cut(Trainer):
    """Has groups ended early, in three ways, and goes on with what was not finished."""

    def train(self, client: RolloutClient) -> None:
        while not self.over.is_set():
            stops = tuple(map(int, self.rng.choice(np.arange(3, self.account.model.vocab_size), 16, replace=False)))
            how = int(self.rng.integers(3))
            options: dict[str, Any] = [
                {"finish_after": 2, "n": 6, "stop_token_ids": stops},
                {"deadline_s": float(self.rng.uniform(0.02, 0.4))},
                {},
            ][how]
            group, handle = self.submit(client, **options)
            if how == 2:
                time.sleep(float(self.rng.uniform(0, 0.2)))
                handle.cancel()
            samples = self.wait(group, handle, ENDS | CUT_SHORT)
            if samples is not None:
                self.go_on(client, group, samples)

    def go_on(self, client: RolloutClient, group: Group, samples: list[Sample]) -> None:
        short = [sample for sample in samples if sample.finish_reason in CUT_SHORT]
        if not short:
            return
        sampling = msgspec.structs.replace(group.sampling, finish_after=None, deadline_s=None)
        again = self.account.group(f"{group.key}+", group.prompt, sampling, [sample.index for sample in short])
        resumed = self.wait(again, client.continue_samples(short, group.prompt, sampling))
        before = {sample.index: sample.token_ids for sample in short}
        for sample in resumed or []:
            known = before[sample.index]
            if not np.array_equal(sample.token_ids[: len(known)], known):
                self.account.found("mixed", f"{again.key}: child {sample.index} has other tokens than before it was cut")
        self.account.count("resumed", len(resumed or []))


class Scoring(Trainer):
    """Has the samples of a group scored by the service: those of the same weights have the same log-probs."""

    def train(self, client: RolloutClient) -> None:
        while not self.over.is_set():
            group, handle = self.submit(client)
            samples = self.wait(group, handle) or []
            whole = [sample for sample in samples if len(sample.weight_versions) == 1]
            if not whole:
                continue
            try:
                completions = [sample.token_ids for sample in whole]
                (scored,) = client.score([group.prompt], [completions], group.sampling, timeout=WAIT)
            except (ServiceLost, Busy, StaleWeights):
                self.account.count("score_again")  # such a call ends with the service, in words
                continue
            for sample, score in zip(whole, scored, strict=True):
                self.account.count("scored")
                if [version for _, _, version in spans(score)] == [version for _, _, version in spans(sample)]:
                    self.account.same_scores(group, sample, score, "the service")


class Agent(Trainer):
    """Talks in turns: each continues a sample of the one before, behind tokens of a tool; KV is kept for it."""

    def train(self, client: RolloutClient) -> None:
        while not self.over.is_set():
            group, handle = self.submit(client, n=1, kv_ttl_s=10.0)
            before = set[int]()
            for turn in range(int(self.rng.integers(1, 5))):
                samples = self.wait(group, handle)
                if not samples or self.over.is_set():
                    handle = None
                    break
                _, answer, sampling = self.draw(n=1, kv_ttl_s=10.0)
                handle = client.next_turn(samples[0], group.prompt, sampling, append=answer)
                before |= {version for _, _, version in spans(samples[0])}
                group = self.account.group(f"{group.key.partition(':')[0]}:{turn}", handle.group.prompt, sampling)
                group = group._replace(before=frozenset(before))
                self.account.count("turns")
            if handle is not None:
                self.wait(group, handle)


class Remembering(Trainer):
    """Asks for each group twice, with a memo that is opened again and again and has room for a few groups. memo: its folder;
    the user's files come into it once it is there."""

    def __init__(self, *args: Any, memo: Path) -> None:
        super().__init__(*args)
        self.memo = memo
        self.foreign: Foreign | None = None

    def train(self, client: RolloutClient) -> None:
        while not self.over.is_set():
            with RolloutClient(
                self.address, name="remembering", memo=self.memo, memo_gib=MEMO_GIB,
                connect_timeout_s=WAIT, link_timeout_s=WAIT, restart_timeout_s=WAIT,
            ) as remembering:  # fmt: skip
                self.foreign = self.foreign or Foreign(self.memo)
                for _ in range(MEMO_GROUPS):
                    if not self.over.is_set():
                        self.twice(remembering)
                assert remembering.memo is not None
                self.account.count("memo_hits", remembering.memo.hits)

    def twice(self, client: RolloutClient) -> None:
        """Ask for a group, and again; the memo may answer with what its client knows to be live, so no version is required."""
        key, prompt, sampling = self.draw()
        first, second = (self.account.group(key + what, prompt, sampling, range(sampling.n)) for what in ("", " again"))
        one = self.wait(first, client.submit(prompt, sampling))
        two = self.wait(second, client.submit(prompt, sampling))
        for a, b in zip(one or [], two or [], strict=False):
            same = a.weight_versions == b.weight_versions and len(a.weight_versions) == 1
            if same and not np.array_equal(a.token_ids, b.token_ids):
                self.account.found(
                    "unequal", f"{key}: child {a.index}: the memo has other tokens of version {a.weight_versions}"
                )


KINDS = (Whole, Cut, Scoring, Agent)
