"""The audit: log-probs that the service gave, against a plain transformers forward of the live weights.

A trainer divides its own log-probs by the service's; this tells how far the two are apart before any training. The forward is
the trainer's: the same module code with transformers' own attention over the whole sequence. It shares every parameter with the
serving model, so a refresh in place reaches it and it costs no memory.

Runs between two steps of the engine, so its time is bounded: one sample at a time, at most `max_tokens` tokens of it, and no
more than `max_share` of all time. Only samples whose tokens are all of the live version can be scored.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout.config import TrackingConfig
from rollout.engine.values import Group, Sample
from rollout.engine.weights.offload import OffloadedModel
from rollout.exact import sample_logprobs
from rollout.metrics.meters import Row

OUTSIDE = 0.1
"""importance ratios further than this from 1 count as outside"""


class Audit:
    """Scores every `config.audit_every`-th finished sample.

    Args:
        module: the model that serves; it is not changed.
        streamed: the offload of its layers, if it is on.
        ready: False while the weights are asleep or dropped; nothing is scored then."""

    def __init__(
        self,
        module: PreTrainedModel,
        config: TrackingConfig,
        clock: Callable[[], float] = time.perf_counter,
        streamed: OffloadedModel | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        assert config.audit_every > 0
        self._plain = plain_twin(module)
        if streamed is not None:
            streamed.attach(self._plain)
        self._config = config
        self._clock = clock
        self._ready = ready
        self._finished = itertools.count(1)
        self._next: tuple[Group, Sample] | None = None
        self._not_before = 0.0
        self._window: deque[tuple[float, np.ndarray]] = deque()
        self._scored_tokens = self._skipped = 0
        self._seconds = 0.0

    def offer(self, group: Group, sample: Sample) -> None:
        """Keep every so many-th finished sample until `run`, the newest only."""
        if sample.finish_reason in ("stop", "length") and next(self._finished) % self._config.audit_every == 0:
            self._skipped += self._next is not None
            self._next = (group, sample)

    def run(self, version: int, now: float) -> None:
        """Score the kept sample, if it is time; `version`: of the live weights."""
        if self._next is None or now < self._not_before or not self._ready():
            return
        (group, sample), self._next = self._next, None
        count = min(len(sample.token_ids), self._config.audit_max_tokens - len(group.prompt))
        served = comparable(group, sample)
        if served is None or count < 1 or sample.weight_versions != [(0, version)]:
            self._skipped += 1
            return
        temperature, logprobs = served
        began = self._clock()
        try:
            with torch.inference_mode():
                (scored,) = sample_logprobs(self._plain, [(group.prompt, sample.token_ids[:count])], temperature)
            plain = scored.cpu().numpy()
        except Exception:
            self._skipped += 1
            raise
        seconds = self._clock() - began
        self._not_before = now + seconds / self._config.audit_max_share
        self._seconds += seconds
        self._scored_tokens += count
        self._window.append((now, plain - logprobs[:count]))

    def row(self, now: float) -> Row:
        while self._window and self._window[0][0] < now - self._config.window_s:
            self._window.popleft()
        row: Row = {
            "mismatch/audited_tokens": float(self._scored_tokens),
            "mismatch/skipped_samples": float(self._skipped),
            "mismatch/audit_s": self._seconds,
        }
        if self._window:
            difference = np.concatenate([part for _, part in self._window]).astype(np.float64)
            ratio = np.exp(difference)
            row["mismatch/logprob_abs_mean"] = float(np.abs(difference).mean())
            row["mismatch/logprob_abs_max"] = float(np.abs(difference).max())
            row["mismatch/kl"] = float((ratio - 1 - difference).mean())
            row["mismatch/outside_ratio"] = float((np.abs(ratio - 1) > OUTSIDE).mean())
        return row


def comparable(group: Group, sample: Sample) -> tuple[float, np.ndarray] | None:
    """Return (temperature, [tokens] log-probs of the service at that temperature over the whole vocabulary); None if the sample
    has none such, because its distribution was truncated or its logits were changed, and no raw log-probs were asked for, or
    because it may have read KV of older weights."""
    sampling = group.sampling
    if sampling.max_kv_lag:
        return None
    if sample.raw_logprobs is not None:
        return 1.0, sample.raw_logprobs
    if sampling.truncates or sampling.min_tokens or sampling.changes_logits:
        return None
    return sampling.temperature or 1.0, sample.logprobs


def plain_twin(module: PreTrainedModel) -> PreTrainedModel:
    """Build the model as transformers does, with sdpa attention, over the tensors of `module`, without the changes that
    serving made to its modules."""
    with torch.device("meta"):
        twin: PreTrainedModel = type(module)(copy.deepcopy(module.config))
    twin.requires_grad_(False).eval()
    twin.load_state_dict(module.state_dict(keep_vars=True), assign=True)
    for name, buffer in module.named_buffers():  # some are in no state dict
        parent, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(parent), leaf, buffer)
    twin.set_attn_implementation("sdpa")
    return twin
