"""A service that is killed behind its journal, and a trainer whose refreshes give no version: the service chooses them.

    content 7 ─ refresh() → version 3 ─ SIGKILL ─ content 8 ─ refresh() → a version above 3, though this life served none

A version names one content for ever, versions rise over all lives, and groups that were open when the service died come. The
content of a token is its watermark (tests.support.endurance.models), so two contents under one version are seen.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import numpy as np

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.config import Config, ServiceConfig
from rollout.engine.values import Sample, Sampling
from rollout.transport.errors import RolloutError
from tests.support.endurance.account import Account, spans
from tests.support.endurance.models import CLASSES, TestModel
from tests.support.endurance.serving import Router
from tests.support.ports import free_port

WAIT = 200.0
LIFE_S = 20.0
"""mean seconds of a life of the service, once it serves"""
OPEN = 2
"""groups that are open when it is killed"""
TOKENS = 400


class Contents:
    """Which content each version has. Written by one thread."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.classes = {0: 0}
        """watermark by version; 0 is the checkpoint"""
        self.highest = 0

    def pushed(self, version: int, content: int) -> None:
        """Note the version that the service has chosen for a content."""
        if version <= self.highest:
            self._account.found("mixed", f"a refresh without a number became version {version} behind {self.highest}")
        self.highest = max(self.highest, version)
        self._seen(version, content % CLASSES, "it was refreshed")

    def look(self, sample: Sample) -> None:
        """Compare the tokens of a sample with what is known of the versions that it names."""
        for start, end, version in spans(sample):
            for token in sample.token_ids[start:end]:
                self._seen(version, int(token) % CLASSES, f"a token of {sample.group_id}, child {sample.index}")
            self.highest = max(self.highest, version)

    def _seen(self, version: int, mark: int, where: str) -> None:
        if self.classes.setdefault(version, mark) != mark:
            self._account.found("mixed", f"version {version} has two contents: {self.classes[version]}, and {mark} by {where}")


class Numberless:
    """One service and its trainer. `run` is a thread's."""

    def __init__(self, account: Account, seed: int, folder: Path, over: threading.Event) -> None:
        self._account, self._over = account, over
        self._rng = random.Random(seed)
        folder.mkdir()
        self._model = TestModel("tiny", folder)
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        service = ServiceConfig(endpoint=endpoint, journal=str(folder / "journal"))
        self._router = Router(Config(engine=self._model.config(seed), service=service), folder)
        self._contents = Contents(account)
        self._content = 0

    def run(self) -> None:
        """Refresh, sample and kill until it is over; then see what was open come."""
        try:
            self._router.start()
            with RolloutClient(
                self._router.endpoint, name="numberless", connect_timeout_s=WAIT, link_timeout_s=WAIT, restart_timeout_s=WAIT
            ) as client:
                opened: list[Handle] = []
                while not self._over.is_set():
                    opened = self._live(client, opened)
                    self._router.kill()
                    self._account.count("numberless_kills")
                    self._router.start()
                self._refresh(client)
                self._take(opened)
        except Exception as error:
            self._account.found("lost", f"refreshes without a number failed: {error!r}")
        finally:
            self._router.stop()
        for line in self._router.failures():
            self._account.found("crashes", line[-800:])

    def _live(self, client: RolloutClient, opened: list[Handle]) -> list[Handle]:
        """Live one life of the service. opened: groups of the one before. Returns those that are open at its end."""
        until = time.monotonic() + self._rng.uniform(0.2, 1.8) * LIFE_S
        self._refresh(client)
        self._take(opened)
        while time.monotonic() < until and not self._over.is_set():
            self._take([self._submit(client, 8)])
            self._refresh(client)
            self._over.wait(self._rng.uniform(0.5, 3.0))
        return [self._submit(client, TOKENS) for _ in range(OPEN)]

    def _submit(self, client: RolloutClient, tokens: int) -> Handle:
        prompt = np.array([self._rng.randrange(3, self._model.vocab_size) for _ in range(8)], np.int32)
        return client.submit(prompt, Sampling(n=2, max_tokens=tokens, seed=self._rng.getrandbits(31), ignore_eos=True))

    def _refresh(self, client: RolloutClient) -> None:
        self._content += 1
        self._contents.pushed(client.refresh(self._model.weights(self._content), timeout=WAIT).version, self._content)
        self._account.count("numberless_refreshes")

    def _take(self, handles: list[Handle]) -> None:
        for handle in handles:
            try:
                samples = handle.result(WAIT)
            except RolloutError as error:
                self._account.found("lost", f"a group open when its service was killed: {error!r}")
                continue
            for sample in samples:
                if sample.finish_reason != "length":
                    self._account.found("lost", f"{sample.group_id}: ended as {sample.finish_reason}: {sample.error}")
                self._contents.look(sample)
                self._account.count("numberless_samples")
