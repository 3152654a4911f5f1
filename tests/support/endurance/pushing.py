"""The trainer that refreshes, and breaks: weights and adapters that hold and weights that must be refused, at random times."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from rollout.client.api import RolloutClient
from rollout.engine.values import Mode
from rollout.transport import messages as m
from rollout.transport.errors import (
    Busy,
    GroupFailed,
    InvalidRequest,
    RequestTimeout,
    ServiceLost,
    SourceUnreachable,
    WeightsRefused,
)
from tests.support.endurance import hostile
from tests.support.endurance.account import Account
from tests.support.endurance.models import BROKEN
from tests.support.lasting import ROOT

WAIT = 400.0
LOOK_S = 0.5
ADAPTERS = 0.5
"""share of the refreshes that are adapters, where the weights under them are known"""
DAMAGED = 0.2
"""share of the broken pushes that break in a process of its own, under way: a byte that flips, a SIGKILL"""


HOSTILE = 0.2
"""share of the others that are folders with headers that lie"""
HOSTILE_S = 30.0
HOSTILE_ANSWERS = {"invalid_request", "weights_refused", "source_unreachable", "limit_exceeded", "busy", "no_session"}


class Whole(NamedTuple):
    """Whole weights that are live, and which adapters may be added to."""

    version: int
    digest: str
    life: int
    """of the router that serves them"""


class Pushing:
    """One client. A version number is used once, whatever became of it, so its number says which weights they are. over: from
    then on only a service that has fallen back is given weights, for groups wait for them; settled: none does any more."""

    def __init__(
        self, account: Account, address: str, seed: int, scratch: Path, over: threading.Event, settled: threading.Event
    ) -> None:
        self.account, self.model, self.address = account, account.model, address
        self.over, self.settled = over, settled
        self.rng = random.Random(seed)
        self.next_version = 1
        self.last_live = 0
        self.whole: Whole | None = None
        """None: adapters are not sent, for nobody knows what they would be added to"""
        self.adapter = scratch / "adapter"
        self.hostile = scratch / "hostile"
        self.breaking = subprocess.Popen(
            [sys.executable, "-m", "tests.support.endurance.breaking", self.model.kind, str(scratch)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self) -> None:
        """Push until no group waits for weights any more. For a thread."""
        try:
            with RolloutClient(
                self.address, name="pusher", connect_timeout_s=WAIT, link_timeout_s=WAIT, restart_timeout_s=WAIT
            ) as client:
                self._push_on(client)
        except Exception as error:
            self.account.found("lost", f"the pusher failed: {error!r}")
        finally:
            assert self.breaking.stdin is not None
            self.breaking.stdin.close()
            self.breaking.wait(60)
            assert self.breaking.stdout is not None
            self.breaking.stdout.close()

    def _push_on(self, client: RolloutClient) -> None:
        plan, now = self.model.plan, time.monotonic()
        good_at, broken_at = now, now + plan.break_s
        while not self.settled.wait(LOOK_S):
            now, going = time.monotonic(), not self.over.is_set()
            try:
                if (going and now >= good_at) or self._fell_back(client):
                    self._good(client)
                    good_at = now + self.rng.uniform(0.5, 1.5) * plan.refresh_s
                elif going and now >= broken_at:
                    self._broken(client)
                    broken_at = now + self.rng.uniform(0.5, 1.5) * plan.break_s
            except (Busy, ServiceLost, RequestTimeout, SourceUnreachable, GroupFailed) as error:
                self.account.count("push_again")
                self.account.counts[f"push_again_{error.kind}"] += 1

    def _fell_back(self, client: RolloutClient) -> bool:
        """Whether the service serves older weights than it did, or has none: it was started again."""
        status = client.status(timeout=WAIT)
        return int(status["version"]) < self.last_live or status["state"] == Mode.WITHOUT_WEIGHTS.value

    def take(self) -> int:
        """Take the next number."""
        self.next_version += 1
        return self.next_version - 1

    def _good(self, client: RolloutClient) -> None:
        version, life, whole = self.take(), self.account.life, self.whole
        self.account.may_serve.add(version)  # also if we shall not hear of it
        kv, via = self.rng.choice(["keep", "recompute"]), self.rng.choice(["shm", "shm", "inline"])
        options: dict[str, Any] = {"version": version, "kv": kv, "via": via, "timeout": WAIT}
        adapted = whole is not None and whole.life == life and self.rng.random() < ADAPTERS
        if not adapted:
            self.whole = None
        try:
            if adapted and whole is not None:
                folder = self.model.save_adapter(version, whole.version, self.adapter)
                client.refresh_lora(folder, base=whole.digest, **options)
            else:
                done = client.refresh(self.model.weights(version), **options)
                self.whole = Whole(version, done.digest, life)
        except WeightsRefused as error:
            if self.account.exhausted or self.account.life != life:
                self.account.count("push_again")  # the service has none left, or is another one than it began with
            else:
                self.account.found("lost", f"version {version} was refused: {error}")
            return
        self._live(version, life)
        self.account.count("adapters" if adapted else "refreshes")

    def _live(self, version: int, life: int) -> None:
        """Note that a version is live, if it is the same life of the service still in which it was pushed."""
        self.last_live = version
        if self.account.life == life:
            self.account.version = version

    def _broken(self, client: RolloutClient) -> None:
        version = self.take()
        if self.rng.random() < DAMAGED:
            self._damaged(version)
            return
        if self.rng.random() < HOSTILE:
            self._hostile(client, version)
            return
        how = self.rng.choice([*BROKEN, "old version"])
        if how == "old version":
            named, number = self.model.weights(version), self.last_live
        else:
            named, number = self.model.broken(version, how, self.rng), version
        try:
            client.refresh(named, version=number, via=self.rng.choice(["shm", "inline"]), timeout=WAIT)  # type: ignore[arg-type]
        except (WeightsRefused, SourceUnreachable):
            self.account.count("broken_pushes")
        else:
            self.account.found("mixed", f"version {number} is live, though it is broken: {how}")

    def _hostile(self, client: RolloutClient, version: int) -> None:
        """Push a folder whose header lies, read by the client, and not read."""
        kind = self.rng.choice(hostile.KINDS)
        folder = hostile.write(self.hostile, kind)
        try:
            client.refresh(folder, version=version, timeout=WAIT)
        except (InvalidRequest, WeightsRefused, SourceUnreachable):
            self.account.count("hostile_headers")
        else:
            self.account.found("mixed", f"version {version} is live, though its header lies: {kind}")
        life = self.account.life
        answer = hostile.offer(self.address, folder, self.rng.choice(["a", *self.model.base]), HOSTILE_S)
        if isinstance(answer, m.Refused) and answer.kind in HOSTILE_ANSWERS:
            self.account.count("hostile_offers")
        elif isinstance(answer, m.Lease) or (answer is not None and not self.account.exhausted):
            self.account.found("crashes", f"a header that lies, {kind}, is answered by {answer}")
        elif life == self.account.life and not self.account.exhausted:
            self.account.count("hostile_unanswered")

    def _damaged(self, version: int) -> None:
        fault, life = self.rng.choice(["flip", "die"]), self.account.life
        if fault == "die":
            self.account.may_serve.add(version)  # it may come through before
            self.whole = None
        job = {"address": self.address, "version": version, "fault": fault, "where": self.rng.random()}
        answer = self._ask(job)
        if fault == "flip" and "ok" in answer:
            self.account.found("mixed", f"version {version} is live with a byte flipped")
        if "ok" in answer:  # it lived for too long
            self._live(version, life)
        elif "killed" in answer or "WeightsRefused" in answer.get("error", ""):
            self.account.count("broken_pushes")
            self.account.count("kills_of_pushers", "killed" in answer)

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.breaking.stdin is not None and self.breaking.stdout is not None
        self.breaking.stdin.write(json.dumps(job) + "\n")
        self.breaking.stdin.flush()
        line = self.breaking.stdout.readline()
        while line == "ready\n":
            line = self.breaking.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer
