"""A gateway as a process, and a trainer that speaks HTTP to it, well and badly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from tests.support.endurance.account import Account
from tests.support.endurance.trainers import WAIT
from tests.support.lasting import ROOT

START_S = 300.0
BROKEN = (
    b"{", b"[]", b"null", b'{"prompt": "x", "n": 1e9}', b'{"prompt": [-1]}', b"\xff\xfe", b'{"prompt": [[[[]]]]}',
    b"[" * 50_000, b'{"prompt": [1], "max_tokens": -5}', b'{"prompt": [1], "temperature": "hot"}',
)  # fmt: skip


class HttpTrainer:
    """number: of this trainer in the run."""

    def __init__(self, number: int, seed: int, endpoint: str, account: Account, over: threading.Event, folder: Path) -> None:
        self.account, self.over, self.number = account, over, number
        self.rng = np.random.default_rng([seed, number])
        self.ready = folder / "http"
        words = ["http", "--address", endpoint, "--port", "0", "--tokenizer", str(account.model.folder)]
        with (folder / "http.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout", *words, "--ready-file", str(self.ready)], cwd=ROOT, stdout=log, stderr=log
            )

    def run(self) -> None:
        """Ask until it is over. For a thread."""
        try:
            deadline = time.monotonic() + START_S
            while not self.ready.exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the gateway does not start")
                time.sleep(0.1)
            with httpx.Client(base_url=self.ready.read_text().split()[0], timeout=WAIT) as client:
                while not self.over.is_set():
                    self.ask(client)
                    self.ask_badly(client)
                    time.sleep(0.1)
        except Exception as error:
            self.account.found("lost", f"the trainer over HTTP failed: {error!r}")
        finally:
            if self.process.poll() is not None:
                self.account.found("crashes", f"the gateway ended with exit status {self.process.returncode}")
            self.process.terminate()
            self.process.wait(60)

    def ask(self, client: httpx.Client) -> None:
        """Ask for a group, as completions with ids; an answer that says that the service is away will do."""
        model = self.account.model
        n, count = int(self.rng.choice([1, 2, 4])), int(self.rng.integers(4, model.plan.longest))
        prompt = self.rng.integers(3, model.vocab_size, self.rng.integers(1, 40)).tolist()
        asked = {
            "prompt": prompt, "n": n, "max_tokens": count, "ignore_eos": True, "return_token_ids": True,
            "seed": int(self.rng.integers(2**31)), "temperature": 1.0, "logprobs": 1,
        }  # fmt: skip
        answer = client.post("/v1/completions", json=asked)
        if answer.status_code in (500, 502, 503, 504):
            self.account.count("http_away")
            return
        if answer.status_code != 200:
            self.account.found("lost", f"HTTP {answer.status_code}: {answer.text[:300]}")
            return
        choices = answer.json()["choices"]
        self.account.count("http_samples", len(choices))
        if sorted(choice["index"] for choice in choices) != list(range(n)):
            self.account.found("lost", f"HTTP: {len(choices)} of {n} choices")
        for choice in choices:
            if len(choice["token_ids"]) != count:
                self.account.found("lost", f"HTTP: {len(choice['token_ids'])} of {count} tokens")

    def ask_badly(self, client: httpx.Client) -> None:
        body = BROKEN[int(self.rng.integers(len(BROKEN)))]
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        self.account.count("http_broken")
        if answer.status_code // 100 != 4 and answer.status_code != 503:
            self.account.found("crashes", f"HTTP {answer.status_code} for {body[:40]!r}: {answer.text[:300]}")
        json.loads(answer.text)
