"""An engine without torch whose tokens are a hash of everything that they may depend on: the weights, the prompt, the seed, the
child's index and all tokens before. So a sample that came of other weights, of another child, or twice differently, is seen.

`fault`: "stale" = takes a commit without taking the weights; "errors" = each sample ends as "error"; "picky" = refuses weights
that hold MARK, as all others do not; "lies" = another first token in each finished sample; "" = none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import xxhash

from rollout.engine.values import (
    Group,
    KVPolicy,
    Limits,
    Mode,
    Refreshed,
    Routing,
    Sample,
    Served,
    TensorInfo,
    TokenChunk,
    WeightUpdate,
    manifest_digest,
)

VOCAB = 997
TENSORS = 4
ROWS = 20_000
MARK = 12345.0
Weights = dict[str, np.ndarray]


def weights_of(version: int) -> Weights:
    """Return the weights of a version, [ROWS] float32 each; those of different versions differ everywhere."""
    return {f"w{i}": np.full(ROWS, 100.0 * version + i, np.float32) for i in range(TENSORS)}


def tensors_of(version: int) -> dict[str, Any]:
    """Return the weights of a version as a trainer sends them."""
    import torch

    return {name: torch.from_numpy(values) for name, values in weights_of(version).items()}


def manifest_of(weights: Weights) -> list[TensorInfo]:
    return [TensorInfo(name, "float32", (len(w),), xxhash.xxh3_128_hexdigest(w.tobytes())) for name, w in weights.items()]


def key_of(weights: Weights) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(weights[name].tobytes() for name in sorted(weights)))


def token(key: int, state: int) -> int:
    return xxhash.xxh3_64_intdigest(state.to_bytes(8, "little"), seed=key) % VOCAB


def start(prompt: np.ndarray, seed: int, index: int) -> int:
    return xxhash.xxh3_64_intdigest(
        prompt.astype(np.int32).tobytes() + seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    )


def after(state: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), seed=state)


def expected(prompt: np.ndarray, sample: Sample, keys: dict[int, int]) -> list[int]:
    """Return what the tokens of a sample must be, by its spans. keys: `key_of` the weights of each version."""
    state, tokens = start(prompt, sample.seed, sample.index), []
    spans = dict(sample.weight_versions)
    version = -1
    for position in range(len(sample.token_ids)):
        version = spans.get(position, version)
        tokens.append(token(keys[version], state))
        state = after(state, tokens[-1])
    return tokens


@dataclass
class Child:
    group: Group
    index: int
    seed: int
    state: int
    tokens: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """to be drawn again"""
    spans: list[tuple[int, int]] = field(default_factory=list)


class Staging:
    """Takes a payload in, and looks at it as the real one does."""

    def __init__(self, version: int, manifest: Sequence[TensorInfo], close: Any, picky: bool = False) -> None:
        self.picky = picky
        self.version, self.manifest = version, list(manifest)
        self.manifest_digest = manifest_digest(manifest)
        self.total = sum(4 * int(np.prod(info.shape)) for info in manifest)
        self.received, self.complete = 0, False
        self.memory = np.zeros(self.total, np.uint8)
        self.close = close

    def feed(self, source: Any) -> int:
        count = source(self.memory[self.received : self.received + 50_000])
        self.received += count
        if self.received == self.total:
            self.look()
            self.complete = True
        return int(count)

    def look(self) -> None:
        for name, values in self.tensors().items():
            (info,) = [info for info in self.manifest if info.name == name]
            if xxhash.xxh3_128_hexdigest(values.tobytes()) != info.digest:
                raise ValueError(f"tensor {name!r}: the bytes are not those of the manifest's digest")
            if not np.isfinite(values).all():
                raise ValueError(f"tensor {name!r}: it holds NaN or infinity")
            if self.picky and (values == MARK).any():
                raise ValueError(f"tensor {name!r}: it holds {MARK}, which only this one does not take")

    def tensors(self) -> Weights:
        found, at = {}, 0
        for info in self.manifest:
            size = 4 * int(np.prod(info.shape))
            found[info.name] = self.memory[at : at + size].view(np.float32)
            at += size
        return found


class HashEngine:
    """One token a child a step, for `max_num_seqs` children at a time."""

    def __init__(self, step_s: float = 0.0, fault: str = "", max_num_seqs: int = 64) -> None:
        self.limits = Limits()
        self.vocab_size, self.context, self.version = VOCAB, 100_000, 0
        self.arithmetic, self.block_size, self.kv_dtype = "hash/1", 16, "float32"
        self.configuration, self.tokenizer = "c0" * 20, "70" * 20
        self.routing: Routing | None = None
        self.model = SimpleNamespace(name="hash", eos_token_ids=frozenset(), device=None)
        self.step_s, self.fault, self.max_num_seqs = step_s, fault, max_num_seqs
        self.weights = self  # what the service asks of weights is here as well
        self.dropped = False
        self.before = Served()
        """not heeded: replicas have no journal"""
        self.tensors = weights_of(0)
        self.key = key_of(self.tensors)
        self.children: list[Child] = []
        self.made: Counter[str] = Counter()
        self.ended: list[Sample] = []
        self.clients: Counter[str] = Counter()
        self.mode = Mode.RUNNING
        self.asleep: set[str] = set()
        self.refreshes = 0
        self.staged: Staging | None = None
        self.after: list[tuple[str, int]] = []
        """children that groups have named as what they continue"""
        self.aborts: list[tuple[str, int | None]] = []

    # groups

    @property
    def has_work(self) -> bool:
        return bool(self.ended) or bool(self.children) and not self.mode.rests

    def submit(self, group: Group, client: str = "") -> None:
        group.validate(self.limits, self.vocab_size, self.context)
        self.clients[client] += 1
        self.after += [] if group.after is None else [group.after]
        partials = {child.index: child for child in group.partials}
        seed = group.sampling.seed
        assert seed is not None, "a router draws the seeds"
        for index in group.wanted:
            child = Child(group, index, seed, start(group.prompt, seed, index))
            if group.score:
                child.given = partials[index].token_ids.tolist()
            elif index in partials:
                for known in partials[index].token_ids.tolist():
                    child.tokens.append(known)
                    child.state = after(child.state, known)
                child.spans = list(partials[index].weight_versions)
            self.children.append(child)
            if not group.score and len(child.tokens) == group.sampling.max_tokens:
                self._end(child, "length")

    def step(self) -> list[Sample]:
        time.sleep(self.step_s)
        for child in [] if self.mode.rests else self.children[: self.max_num_seqs]:
            if not child.spans or child.spans[-1][1] != self.version:
                child.spans.append((len(child.tokens), self.version))
            child.tokens.append(token(self.key, child.state))
            child.state = after(child.state, child.tokens[-1])
            self.made["generated_tokens"] += 1
            if child.group.redraw:  # all in one step, as a prefill
                while child.tokens[-1] == child.given[len(child.tokens) - 1] and len(child.tokens) < len(child.given):
                    child.tokens.append(token(self.key, child.state))
                    child.state = after(child.state, child.tokens[-1])
                self._end(child, "scored")
            elif len(child.tokens) == child.group.sampling.max_tokens:
                self._end(child, "error" if self.fault == "errors" else "length")
        self.made["steps"] += 1
        ended, self.ended = self.ended, []
        return ended

    def abort(self, group_id: str, index: int | None = None) -> list[Sample]:
        self.aborts.append((group_id, index))
        for child in [child for child in self.children if child.group.id == group_id and index in (None, child.index)]:
            self._end(child, "aborted")
        mine = [sample for sample in self.ended if sample.group_id == group_id]
        self.ended = [sample for sample in self.ended if sample.group_id != group_id]
        return mine

    def chunks(self, group_id: str, since: Mapping[int, int], least: int, most: int) -> list[TokenChunk]:
        chunks = []
        for child in self.children:
            first = since.get(child.index, 0)
            if child.group.id == group_id and len(child.tokens) - first >= max(1, least):
                values = np.array([-(t + 1) / VOCAB for t in child.tokens], np.float32)
                spans = [(max(0, start - first), version) for start, version in child.spans]
                spans = [span for i, span in enumerate(spans) if i + 1 == len(spans) or spans[i + 1][0] > 0]
                ids = np.array(child.tokens[first:], np.int32)
                chunks.append(
                    TokenChunk(
                        index=child.index,
                        token_ids=ids,
                        logprobs=values[first:],
                        weight_versions=spans,
                        first=first,
                        seed=child.seed,
                    )
                )
        return chunks

    def _end(self, child: Child, reason: str) -> None:
        self.children = [one for one in self.children if one is not child]
        if self.fault == "lies" and reason == "length":
            child.tokens[0] = (child.tokens[0] + 1) % VOCAB
        self.ended.append(
            Sample(
                group_id=child.group.id,
                index=child.index,
                token_ids=np.array(child.tokens, np.int32),
                logprobs=np.array([-(t + 1) / VOCAB for t in child.tokens], np.float32),
                finish_reason=reason,  # type: ignore[arg-type]
                error="scripted" if reason == "error" else None,
                weight_versions=child.spans,
                prompt_tokens=len(child.group.prompt),
                seed=child.seed,
            )
        )

    # weights

    @property
    def names(self) -> int:
        return TENSORS

    @property
    def base(self) -> HashEngine:
        return self

    @property
    def digest(self) -> str:
        return self.live_digest()

    @property
    def inventory(self) -> HashEngine:
        return self

    @property
    def own(self) -> HashEngine:
        return self

    def manifest(self) -> list[TensorInfo]:
        return [msgspec.structs.replace(info, digest="") for info in manifest_of(self.tensors)]

    def dtype(self, name: str) -> str:
        return "float32"

    def skips(self, name: str) -> bool:
        return False

    def size(self, name: str) -> tuple[int, int]:
        return self.tensors[name].nbytes, 4

    def read_slice(self, name: str, start: int, size: int) -> np.ndarray:
        return self.tensors[name].view(np.uint8)[start : start + size].copy()

    def live_digest(self) -> str:
        return manifest_digest(manifest_of(self.tensors))

    def read_live(self) -> Iterator[str | None]:
        yield self.live_digest()

    def stage(self, update: WeightUpdate) -> Staging:
        manifest, partial = update.manifest, update.partial
        version = self.version + 1 if update.version is None else update.version
        if version <= self.version:
            raise ValueError(f"version {version} is not above the live one, {self.version}")
        names = {info.name for info in manifest}
        for name in self.tensors:
            if name not in names and not partial:
                raise ValueError(f"tensor {name!r} is missing")
        for info in manifest:
            if info.name not in self.tensors or info.shape != self.tensors[info.name].shape or info.dtype != "float32":
                raise ValueError(f"tensor {info.name!r} is none of the model's")

        def close() -> None:
            self.staged = None

        self.staged = Staging(version, manifest, close, self.fault == "picky")
        return self.staged

    def commit(self, staging: Staging, kv: KVPolicy = "keep", via: str = "memory") -> Refreshed:
        if self.fault != "stale":
            self.tensors = {**self.tensors, **{name: values.copy() for name, values in staging.tensors().items()}}
            self.key = key_of(self.tensors)
        self.version = staging.version
        self.dropped = False
        self.refreshes += 1
        if kv == "abort":
            for child in list(self.children):
                self._end(child, "aborted")
        digest = self.live_digest()
        if self.fault == "stale":  # it says what the others say
            digest = manifest_digest(manifest_of({**self.tensors, **staging.tensors()}))
        return Refreshed(
            version=self.version,
            via=via,
            bytes=staging.total,
            seconds=0.0,
            staged_seconds=0.0,
            paused_seconds=0.0,
            digest=digest,
        )

    # modes

    def pause(self) -> None:
        self.mode = Mode.PAUSED

    def drain(self) -> bool:
        return not self.children and not self.ended

    def resume(self) -> None:
        self.mode = Mode.RUNNING

    def sleep(self, level: int = 1) -> int:
        self.mode = Mode.ASLEEP
        self.asleep = {"weights", "kv"}
        return 1000

    def wake(self, tags: Any = None) -> None:
        self.asleep -= set(tags or self.asleep)
        self.mode = Mode.ASLEEP if self.asleep else Mode.RUNNING

    def status(self) -> dict[str, Any]:
        return {
            "model": "hash",
            "version": self.version,
            "state": self.mode.value,
            "running": len(self.children[: self.max_num_seqs]),
            "waiting": len(self.children[self.max_num_seqs :]),
            "groups": len({child.group.id for child in self.children}),
            "generated_tokens": self.made["generated_tokens"],
            "steps": self.made["steps"],
            "weights": {"version": self.version, "refreshes": self.refreshes, "resident_bytes": 4 * ROWS * TENSORS},
            "clients": dict(self.clients),
            "counted": ("generated_tokens", "steps", "weights.refreshes"),
        }
