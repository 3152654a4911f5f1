"""The two protocols of TRL's AsyncGRPOTrainer (`trl.experimental.async_grpo`), as objects; see `rollout.integrations.trl`.

dataset → submit → service → groups as they finish → reward_funcs → advantages → rollout_buffer → trainer
                      ↑                                                                              │
                      └────────────────────── ServiceWeights.send_weights ──────────────────────────┘
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.engine.values import KVPolicy, Sample, Sampling
from rollout.integrations.common import encode, finished, full_buffers, seed_of
from rollout.transport.errors import RequestTimeout
from rollout.transport.weights import Via


class ServiceWeights:
    """`WeightTransferProtocol`: the trainer's weights go to the service as one transaction, while generation goes on.

    The trainer counts its pushes from 1. The service's versions only grow, and it may have seen another training, so they are
    counted from the version that is live when this is made; `ServiceRolloutWorker` takes the same number off again. Make both
    before the training begins.

    The trainer sends parameters alone. `model`: its model, whose persistent buffers go along; needed where there are some,
    since the service refuses weights without them."""

    def __init__(
        self,
        client: RolloutClient,
        *,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        timeout: float = 1800.0,
        model: Any = None,
    ) -> None:
        self._client = client
        self._model = model
        self._kv, self._via, self._timeout = kv, via, timeout
        self.version = int(client.status()["version"])
        """of the last push, by the service's count"""

    def init_weight_transfer(self) -> None:
        """Raises ServiceLost or RequestTimeout if the service does not answer."""
        self._client.status()

    def pause(self) -> None:
        """Nothing to do: weights are staged beside the live ones and change between two steps."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Returns when the weights are live. On any error the old ones serve on."""
        weights = iterator if self._model is None else itertools.chain(iterator, full_buffers(self._model))
        self._client.refresh(weights, version=self.version + 1, kv=self._kv, via=self._via, timeout=self._timeout)
        self.version += 1

    def resume(self) -> None:
        """Nothing to do, see `pause`."""

    def destroy(self) -> None:
        """Do nothing: the caller closes the client."""


@dataclass
class RolloutSample:
    """Field for field TRL's class of this name (`trl.experimental.async_grpo.async_rollout_worker`)."""

    prompt: Any
    completion: Any
    input_ids: np.ndarray
    """[prompt + completion tokens] int64"""
    completion_mask: np.ndarray
    """[the same] int64, 1 = trained"""
    old_log_probs: np.ndarray
    """[the same] float32, 0 in the prompt"""
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


class ServiceRolloutWorker:
    """`RolloutWorkerProtocol`: keeps groups running on the service and puts scored samples into `rollout_buffer`. Their
    `model_version` is the trainer's count: 0 for the weights that are live when this is made.

    Args:
        dataset: rows with a "prompt" (text or messages); read over and over.
        tokenizer: of the model that the service runs.
        reward_funcs: as TRL's: called with `prompts`, `completions`, `completion_ids` and the row's other columns, each a list
            with one entry for each sample of a group, they return as many floats, or None where they have no opinion. Summed.
        sampling: see `sampling_of`; n is the size of a group. A seed in it gives each group one of its own.
        groups_in_flight: groups that run on the service at the same time.
        buffer: samples that may wait for the trainer. groups_in_flight · n + buffer, divided by the samples of a step, is how
            many versions old a sample can get: keep it below `max_staleness`, or TRL drops what was sampled for nothing.
    """

    def __init__(
        self,
        client: RolloutClient,
        dataset: Iterable[dict[str, Any]],
        tokenizer: Any,
        reward_funcs: Sequence[Callable[..., list[float | None]]],
        sampling: Sampling,
        *,
        groups_in_flight: int,
        buffer: int,
    ) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(buffer)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.model_version = 0
        self._first_version = int(client.status()["version"])
        self._client, self._tokenizer, self._sampling = client, tokenizer, sampling
        self._rewards = list(reward_funcs)
        self._rows = enumerate(itertools.cycle(dataset))
        self._groups_in_flight = groups_in_flight
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)
        self._error: BaseException | None = None
        self._progress = self._delivered = time.monotonic()

    def start(self) -> None:
        self._progress = self._delivered = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Cancels what runs. Returns when the thread has ended; the client stays open."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError if the worker died, or no group came for so long although there was room for one."""
        if self._error is not None:
            raise RuntimeError(f"the rollout worker failed: {self._error}") from self._error
        silent = time.monotonic() - self._progress
        if silent > stale_after_s:
            raise RuntimeError(f"no group came from the service for {silent:.0f} s (allowed: {stale_after_s:.0f} s)")

    def _run(self) -> None:
        running: list[tuple[int, dict[str, Any], list[int], Handle]] = []
        try:
            while not self._stopping.is_set():
                while len(running) < self._groups_in_flight:
                    number, row = next(self._rows)
                    ids = encode(self._tokenizer, row["prompt"])
                    running.append((number, row, ids, self._client.submit(ids, self._sampling_of(number))))
                done = next((group for group in running if group[3].done), None)
                if done is None:
                    _wait(running[0][3], 0.05)
                    continue
                running.remove(done)
                number, row, ids, handle = done
                self._deliver(number, row, ids, handle.result(0))
        except BaseException as error:
            self._error = error
        finally:
            for *_, handle in running:
                handle.cancel()

    def _sampling_of(self, number: int) -> Sampling:
        seed = self._sampling.seed
        return self._sampling if seed is None else msgspec.structs.replace(self._sampling, seed=seed_of(seed, number))

    def _deliver(self, number: int, row: dict[str, Any], ids: list[int], group: list[Sample]) -> None:
        started = time.monotonic()
        samples = self._score(number, row, ids, [finished(sample) for sample in group])
        tokens = sum(len(sample.token_ids) for sample in group)
        self.metrics_queue.put(
            {
                "rollout/score_s": time.monotonic() - started,
                "rollout/generated_tok_s": (float(tokens), started - self._delivered),
                "rollout/completion_length": (float(tokens), float(len(group))),
            }
        )
        self._delivered = started
        for sample in samples:
            while not self._stopping.is_set():
                sample.enqueued_at = time.time()
                self._progress = time.monotonic()  # a full buffer is the trainer's business, not a stall
                try:
                    self.rollout_buffer.put(sample, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def _score(self, number: int, row: dict[str, Any], ids: list[int], group: list[Sample]) -> list[RolloutSample]:
        texts = [self._tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True) for sample in group]
        chat = not isinstance(row["prompt"], str)
        completions: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        columns = {name: [value] * len(group) for name, value in row.items() if name != "prompt"}
        token_ids = [sample.token_ids.tolist() for sample in group]
        table = np.array(
            [
                func(prompts=[row["prompt"]] * len(group), completions=completions, completion_ids=token_ids, **columns)
                for func in self._rewards
            ],
            dtype=float,
        )  # [functions, n], None becomes NaN
        rewards = np.where(np.isnan(table).all(0), np.nan, np.nansum(table, 0))
        advantages = group_advantages(rewards)
        scored = rewards[~np.isnan(rewards)]
        spread = float(scored.std()) if len(scored) else float("nan")
        samples = []
        for i, sample in enumerate(group):
            n, m = len(ids), len(sample.token_ids)
            samples.append(
                RolloutSample(
                    prompt=row["prompt"],
                    completion=completions[i],
                    input_ids=np.concatenate([np.array(ids, np.int64), sample.token_ids.astype(np.int64)]),
                    completion_mask=np.repeat(np.array([0, 1], np.int64), [n, m]),
                    old_log_probs=np.concatenate([np.zeros(n, np.float32), sample.logprobs]),
                    advantage=float(advantages[i]),
                    model_version=sample.weight_versions[0][1] - self._first_version,
                    group_id=number,
                    metrics={
                        "reward": float(rewards[i]),
                        "reward_std": spread,
                        **{
                            f"rewards/{getattr(func, '__name__', type(func).__name__)}": float(table[f, i])
                            for f, func in enumerate(self._rewards)
                        },
                    },
                )
            )
        return samples


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """[n] rewards → [n] standardised within the group; NaN (no reward function gave a value) is ignored and gets 0."""
    scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if scored.any():
        advantages[scored] = (rewards[scored] - rewards[scored].mean()) / (rewards[scored].std() + 1e-8)
    return advantages


def _wait(handle: Handle, seconds: float) -> None:
    try:
        handle.result(seconds)
    except RequestTimeout:
        pass
