"""The reader of a ledger: the records of a file as services, refreshes, groups and samples.

run = rollout.ledger.read("run.ledger")
pandas.DataFrame(run.columns("samples"))
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from rollout.client.receipts import Receipt
from rollout.config import InputError
from rollout.engine.values import Sampling, TensorInfo
from rollout.identity import drawn_by, sampling_of, short
from rollout.ledger import records as r
from rollout.ledger.frames import HEADER, DamagedLedger, frames

Table = Literal["services", "refreshes", "groups", "samples"]


class RecordedService(msgspec.Struct, kw_only=True):
    """One start of a service."""

    at: float
    """seconds since 1970"""
    arithmetic: str
    block_size: int
    kv_dtype: str
    vocab_size: int
    context: int
    eos_token_ids: tuple[int, ...]
    configuration: str
    """digest of what the model's forward depends on besides its weights"""
    tokenizer: str
    """digest of the text in which stop strings are searched; "": there is none"""
    model: str
    version: int
    """of the weights that it started with"""
    digest: str
    """`manifest_digest` of these weights, "": unknown"""
    closed: bool = False
    """it ended in order; otherwise it was killed, or still runs"""


class RecordedRefresh(msgspec.Struct, kw_only=True):
    """Weights that became live."""

    service: int
    """place of its service"""
    version: int
    digest: str
    """`manifest_digest` of all live weights"""
    kv: str
    """what happened to the KV of running samples; "": the weights that the service started with"""
    at: float
    sent: bool
    """`changed` is as a trainer sent it, in its dtype; otherwise as it is in the model"""
    partial: bool
    adapter: bool
    changed: dict[str, TensorInfo]
    """tensors that differ from those before, by name; their digests are the first 16 hex digits of xxh3-128"""


class RecordedGroup(msgspec.Struct, kw_only=True):
    """A group."""

    service: int
    number: int
    """in the order of acceptance, from 1"""
    group_id: str
    client: int
    """number of the client's session"""
    version: int
    """of the weights that were live when it was accepted: the step"""
    prompt: str
    """digest of the token ids, as in a receipt"""
    prompt_tokens: int
    sampling: Sampling
    """what decides its samples; the seed is None if the service chose it"""
    indices: tuple[int, ...]
    """requested children"""
    after: tuple[str, int] | None
    """(group id, index) of the child that its prompt continues"""
    given: dict[int, int]
    """number of tokens that children had when it was accepted, by index"""
    given_digest: str = ""
    """digest of these tokens, and of all else that they bring into the samples; "": none had any"""
    samples: dict[int, RecordedSample] = {}
    """samples that its client got, by index"""


class RecordedSample(msgspec.Struct, kw_only=True):
    """A sample that a client got."""

    index: int
    finish_reason: str
    tokens: int
    result: str
    """digest of tokens, log-probs and finish_reason, as in a receipt"""
    token_digest: str
    marks: tuple[str, ...]
    """digests of its first 1, 2, 4, 8, … tokens with their log-probs"""
    weight_versions: tuple[tuple[int, int], ...]
    kv_versions: tuple[tuple[int, int, int], ...]
    seed: int
    token_ids: np.ndarray | None
    """[tokens] int32, if the ledger has tokens"""
    logprobs: np.ndarray | None
    place: int
    """in the order of their ends"""


class RecordedRun:
    """What a ledger says, in the order of the records."""

    def __init__(self) -> None:
        self.services: list[RecordedService] = []
        self.refreshes: list[RecordedRefresh] = []
        self.groups: list[RecordedGroup] = []
        self.prompts: dict[str, np.ndarray] = {}
        """[prompt_tokens] int32 by digest, if the ledger has prompts"""
        self.lost: list[r.Lost] = []
        """where records are missing, because the file could not be written"""
        self.bytes = 0
        self.torn_bytes = 0
        """of a last frame whose end is missing: the service was killed while it wrote"""
        self.digest = ""
        """of the last frame: names the whole file"""
        self._weights: dict[int, tuple[int, dict[int, str]]] = {}
        """number of refreshes, and digests of weights by version, of each service"""

    def __repr__(self) -> str:
        """Describe the run in one line."""
        count = sum(len(group.samples) for group in self.groups)
        return f"RecordedRun({len(self.refreshes)} refreshes, {len(self.groups)} groups, {count} samples)"

    def samples(self) -> Iterator[tuple[RecordedGroup, RecordedSample]]:
        """Yield the samples with their groups, in the order of their ends."""
        pairs = [(group, sample) for group in self.groups for sample in group.samples.values()]
        return iter(sorted(pairs, key=lambda pair: pair[1].place))

    def steps(self) -> list[int]:
        """Return the versions of the weights for which groups were accepted, ascending."""
        return sorted({group.version for group in self.groups})

    def step(self, version: int) -> list[RecordedGroup]:
        """Return the groups that were accepted while a version of the weights was live."""
        return [group for group in self.groups if group.version == version]

    def weights(self, service: int) -> dict[int, str]:
        """Return the digests of the weights of a service by version, "" for unknown ones."""
        count, digests = self._weights.get(service, (-1, {}))
        if count != len(self.refreshes):
            first = self.services[service]
            digests = {refresh.version: refresh.digest for refresh in self.refreshes if refresh.service == service}
            digests = {first.version: first.digest} | digests
            self._weights[service] = len(self.refreshes), digests
        return digests

    def receipt(self, group: RecordedGroup, sample: RecordedSample) -> Receipt:
        """Return the receipt of a sample, as `client.receipt` gives it."""
        service, digests = self.services[group.service], self.weights(group.service)
        used = {version for _, version in sample.weight_versions} | {version for *_, version in sample.kv_versions}
        return Receipt(
            configuration=service.configuration,
            tokenizer=service.tokenizer if group.sampling.stop else "",
            arithmetic=service.arithmetic,
            block_size=service.block_size,
            kv_dtype=service.kv_dtype,
            weights=tuple((version, short(digests.get(version, ""))) for version in sorted(used)),
            weight_versions=sample.weight_versions,
            kv_versions=sample.kv_versions,
            prompt=group.prompt,
            sampling=drawn_by(group.sampling, sample.seed, service.eos_token_ids),
            index=sample.index,
            result=sample.result,
        )

    def rows(self, table: Table) -> list[dict[str, Any]]:
        """Return a table as plain rows: numbers, text and lists."""
        match table:
            case "services":
                return [_plain(each) for each in self.services]
            case "refreshes":
                bare = [msgspec.structs.replace(each, changed={}) for each in self.refreshes]
                names = [sorted(each.changed) for each in self.refreshes]
                return [_plain(each) | {"changed": some} for each, some in zip(bare, names, strict=True)]
            case "groups":
                empty = [msgspec.structs.replace(each, samples={}) for each in self.groups]
                return [_plain(each) | {"samples": len(mine.samples)} for each, mine in zip(empty, self.groups, strict=True)]
            case "samples":
                return [self._row(group, sample) for group, sample in self.samples()]

    def columns(self, table: Table) -> dict[str, list[Any]]:
        """Return a table as columns, for `pandas.DataFrame` or `pyarrow.table`."""
        rows = self.rows(table)
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def _row(self, group: RecordedGroup, sample: RecordedSample) -> dict[str, Any]:
        arrays = {name: getattr(sample, name) for name in ("token_ids", "logprobs")}
        return {
            "service": group.service,
            "group": group.number,
            "group_id": group.group_id,
            "step": group.version,
            "prompt": group.prompt,
            "prompt_tokens": group.prompt_tokens,
            **_plain(msgspec.structs.replace(sample, token_ids=None, logprobs=None)),
            **{name: None if array is None else array.tolist() for name, array in arrays.items()},
        }


def read(path: str | os.PathLike[str]) -> RecordedRun:
    """Read a ledger. A torn last frame is left out and counted in `torn_bytes`. Raises InputError for a file that cannot be
    read; DamagedLedger, an InputError, for one that is no ledger, or has any other bytes than those that were written."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return RecordedRun()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                return _run_of(view)
    except OSError as error:
        raise InputError(f"ledger {path}: {error.strerror}") from None
    except DamagedLedger as error:
        raise DamagedLedger(f"ledger {path}: {error}") from None


def _run_of(data: memoryview) -> RecordedRun:
    tables = _Tables()
    end = len(HEADER) if len(data) >= len(HEADER) else 0
    for frame in frames(data):
        try:
            tables.add(r.decode(frame.payload))
        except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
            raise DamagedLedger(f"the record before byte {frame.end} is none: {error}") from None
        finally:
            frame.payload.release()
        end, tables.run.digest = frame.end, frame.digest.hex()
    tables.run.bytes, tables.run.torn_bytes = len(data), max(0, len(data) - end)
    return tables.run


class _Tables:
    """Makes a run of the records of a file."""

    def __init__(self) -> None:
        self.run = RecordedRun()
        self._tensors: dict[int, TensorInfo] = {}
        self._hows: dict[int, dict[int, Any]] = {}
        self._groups: dict[int, RecordedGroup] = {}
        self._places = 0

    def add(self, record: r.AnyRecord) -> None:
        """Add a record. Raises LookupError for one that names what is not there, ValueError for impossible values."""
        run = self.run
        match record:
            case r.Started():
                self._started(record)
            case r.TensorNamed():
                self._tensors[record.number] = TensorInfo(record.name, record.dtype, record.shape, "")
            case r.WeightsLive():
                self._weights(record)
            case r.HowSampled():
                self._hows[record.number] = record.fields
            case r.PromptTokens():
                run.prompts[record.digest.hex()] = np.frombuffer(record.ids, "<i4").astype(np.int32)
            case r.GroupOpened():
                self._group(record)
            case r.SampleEnded():
                self._sample(record)
            case r.Lost():
                run.lost.append(record)
            case r.Stopped():
                run.services[-1].closed = not record.full

    def _started(self, record: r.Started) -> None:
        self._tensors, self._hows = {}, {}
        if record.goes_on and self.run.services:
            return
        self._groups = {}
        fields = {name: getattr(record, name) for name in record.__struct_fields__}
        del fields["goes_on"]
        digests = {name: fields.pop(name).hex() for name in ("configuration", "tokenizer")}
        self.run.services.append(RecordedService(digest=fields.pop("weights").hex(), **digests, **fields))

    def _weights(self, record: r.WeightsLive) -> None:
        changed, size = {}, r.TENSOR_DIGEST
        numbers = record.numbers or range(len(record.digests) // size)
        if len(record.digests) != size * len(numbers):
            raise ValueError(f"{len(record.digests)} bytes of digests for {len(numbers)} tensors")
        for i, number in enumerate(numbers):
            digest = record.digests[size * i : size * (i + 1)].hex()
            info = self._tensors[number] = msgspec.structs.replace(self._tensors[number], digest=digest)
            changed[info.name] = info
        service = len(self.run.services) - 1
        last = self.run.refreshes[-1] if self.run.refreshes else None
        if last is not None and (last.service, last.version, last.at) == (service, record.version, record.at):
            return  # written once more, for the records behind it
        self.run.refreshes.append(
            RecordedRefresh(
                service=service,
                version=record.version,
                digest=record.digest.hex(),
                kv="" if record.kv < 0 else r.POLICIES[record.kv],
                at=record.at,
                sent=record.sent,
                partial=record.partial,
                adapter=record.adapter,
                changed=changed,
            )
        )

    def _group(self, record: r.GroupOpened) -> None:
        if record.number in self._groups:
            return  # written once more, for its samples
        sampling = sampling_of(self._hows[record.how], r.ROLES, seed=record.seed)
        group = self._groups[record.number] = RecordedGroup(
            service=len(self.run.services) - 1,
            number=record.number,
            group_id=record.group_id,
            client=record.client,
            version=record.version,
            prompt=record.prompt.hex(),
            prompt_tokens=record.prompt_tokens,
            sampling=sampling,
            indices=tuple(range(sampling.n)) if record.indices is None else record.indices,
            after=record.after,
            given=dict(record.given),
            given_digest=record.given_digest.hex(),
        )
        self.run.groups.append(group)

    def _sample(self, record: r.SampleEnded) -> None:
        group = self._groups[record.group]
        seed = record.seed if group.sampling.seed is None else group.sampling.seed
        if seed is None or record.index not in group.indices or record.index in group.samples:
            raise ValueError(f"sample {record.index} of group {record.group} is impossible")
        spans = tuple(r.spans_of(record.weight_versions, 2)) or (((0, group.version),) if record.tokens else ())
        marks = record.marks
        self._places += 1
        group.samples[record.index] = RecordedSample(
            index=record.index,
            finish_reason=r.REASONS[record.reason],
            tokens=record.tokens,
            result=record.result.hex(),
            token_digest=record.token_digest.hex(),
            marks=tuple(marks[i : i + r.MARK].hex() for i in range(0, len(marks), r.MARK)),
            weight_versions=spans,  # type: ignore[arg-type]
            kv_versions=tuple(r.spans_of(record.kv_versions, 3)),  # type: ignore[arg-type]
            seed=seed,
            token_ids=np.frombuffer(record.ids, "<i4").astype(np.int32) if record.ids else None,
            logprobs=np.frombuffer(record.logprobs, "<f4").astype(np.float32) if record.logprobs else None,
            place=self._places,
        )


def _plain(record: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a record as JSON has them."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    return plain
