"""Bisection: the first difference of two runs, and its kind.

    services ──→ weights 0 ──→ groups of 0 ──→ samples of 0 ──→ weights 1 ──→ …        in the order of causes

Training is a loop: after one other token, all weights and samples are others. So ledgers are compared in the order in which one
thing follows from another: an epoch is the time under one set of weights, its groups are those that were accepted in it, and a
sample belongs to the epoch in which it first differs. Groups are matched by their ids, or by their order where ids are random.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from rollout.client.replaying import STOPPED
from rollout.engine.values import OPTIONS, TensorInfo
from rollout.identity import COMPUTED_BY, first_difference
from rollout.ledger.reader import RecordedGroup, RecordedRefresh, RecordedRun, RecordedSample, RecordedService
from rollout.ledger.records import ROLES, mark_lengths

Kind = Literal[
    "configuration", "tokenizer", "arithmetic", "block size", "dtype", "model", "tensor",
    "lost refresh", "doubled refresh", "order of refreshes",
    "kv policy", "prompt", "tool answer", "sampling", "truncation", "seed", "group", "refresh at another token", "other KV",
    "token", "log-prob", "end", "shorter",
]  # fmt: skip
KINDS: dict[str, Kind] = {"block_size": "block size", "kv_dtype": "dtype", "arithmetic": "arithmetic",
                         "configuration": "configuration", "tokenizer": "tokenizer"}  # fmt: skip
"""kinds of a difference in how services compute"""
MOST_NAMES = 3


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of two runs.

    Example:
        Difference(kind="tensor", why="version 412: model.layers.7.mlp.up_proj.weight has other bytes", step=412,
                   a="5a1f…", b="90cd…", samples_equal=26_368)
    """

    kind: Kind
    why: str
    """in words"""
    step: int | None = None
    """version of the weights in the first run; None: before any weights"""
    group_id: str = ""
    """in the first run"""
    index: int | None = None
    """of the child"""
    tokens: tuple[int, int] | None = None
    """the first token that differs is one of these: from the first number to before the second"""
    a: Any = None
    b: Any = None
    """what the runs have"""
    samples_equal: int = 0
    """samples that were compared before, all equal"""


class Pair(NamedTuple):
    """One sample in both runs."""

    a_group: RecordedGroup
    a: RecordedSample
    b_group: RecordedGroup
    b: RecordedSample


class Epoch(NamedTuple):
    """A set of weights, and what was accepted under it."""

    version: int
    digest: str
    refresh: RecordedRefresh | None
    """None: those that the service started with"""
    tensors: dict[str, TensorInfo]
    """as far as the ledger has them"""
    groups: list[RecordedGroup]


class Different(Exception):
    """Carries the first difference to `bisect`."""

    def __init__(self, kind: Kind, why: str, **fields: Any) -> None:
        super().__init__(why)
        self.difference = Difference(kind=kind, why=why, **fields)


def bisect(a: RecordedRun, b: RecordedRun) -> Difference | None:
    """Return the first difference of two runs; None: there is none."""
    counted = [0]
    try:
        _compare(a, b, counted)
    except Different as found:
        return msgspec.structs.replace(found.difference, samples_equal=counted[0])
    return None


def different_samples(a: RecordedRun, b: RecordedRun) -> Iterator[Pair]:
    """Yield the samples that differ, in the order of the first run, whatever differs before them."""
    others = _by_id(b.groups)
    for key, group in _by_id(a.groups).items():
        other = others.get(key)
        for index, sample in group.samples.items() if other is not None else ():
            if other is not None and index in other.samples and other.samples[index].result != sample.result:
                yield Pair(group, sample, other, other.samples[index])


def first_other_token(a: RecordedSample, b: RecordedSample) -> tuple[int, int]:
    """Return from where to where the first token or log-prob that differs is, by the marks, or by the tokens if the ledgers
    have them."""
    if a.token_ids is not None and b.token_ids is not None and a.logprobs is not None and b.logprobs is not None:
        length = min(len(a.token_ids), len(b.token_ids))
        differ = a.token_ids[:length] != b.token_ids[:length]
        differ |= a.logprobs[:length].view(np.uint32) != b.logprobs[:length].view(np.uint32)
        at = int(differ.argmax()) if differ.any() else length
        return at, at + 1
    equal = 0
    for length, mine, other in zip(mark_lengths(min(a.tokens, b.tokens)), a.marks, b.marks, strict=False):
        if mine != other:
            return equal, length
        equal = length
    return equal, max(a.tokens, b.tokens)


# ── the walk ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _compare(a: RecordedRun, b: RecordedRun, counted: list[int]) -> None:
    """Raise the first difference. counted: [samples that are equal]."""
    _services(a, b)
    ones, others = _epochs(a), _epochs(b)
    places = {epoch.version: i for i, epoch in enumerate(ones)}, {epoch.version: i for i, epoch in enumerate(others)}
    left = Unmatched.of(ones, others), Unmatched.of(others, ones)
    later: dict[int, list[Pair]] = defaultdict(list)
    for i in range(min(len(ones), len(others))):
        _weights(ones, others, i)
        for one, other in _matched(ones[i], others[i], i, left):
            _group(a, b, one, other)
            for pair in _samples(one, other):
                later[max(i, _epoch_of(pair, places))].append(pair)
            counted[0] += sum(_same(one, other, index) for index in one.samples)
        for pair in later.pop(i, ()):
            _sample(pair, ones[i].version)
        _doubled(ones, others, i + 1)
        _accepted_elsewhere(ones, others, i, left)
        _missing(ones, others, i, left)
    _ends(ones, others)


def _services(a: RecordedRun, b: RecordedRun) -> None:
    """Compare what the runs computed with."""
    if not a.services or not b.services:
        if bool(a.services) != bool(b.services):
            raise Different("shorter", f"{'b' if a.services else 'a'} has no records")
        return
    one, other = a.services[0], b.services[0]
    for name in (*COMPUTED_BY, "vocab_size", "eos_token_ids", "context"):
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            raise Different(KINDS.get(name, "model"), f"{name} is {x} in a, {y} in b", a=x, b=y)


def _epochs(run: RecordedRun) -> list[Epoch]:
    """Return the sets of weights of a run with their groups. Weights that a service had before its restart are those of
    before."""
    tensors: dict[str, TensorInfo] = {}
    epochs: list[Epoch] = []
    places: dict[tuple[int, int], int] = {}
    for number, service in enumerate(run.services):
        mine = [refresh for refresh in run.refreshes if refresh.service == number]
        if not epochs:
            first = next((refresh for refresh in mine if not refresh.kv), None)
            tensors = tensors | (first.changed if first is not None else {})
            epochs.append(Epoch(service.version, service.digest, None, tensors, []))
        known = {(epoch.version, epoch.digest): i for i, epoch in enumerate(epochs)}
        places[number, service.version] = known.get((service.version, service.digest), len(epochs) - 1)
        for refresh in (each for each in mine if each.kv):
            if number and (refresh.version, refresh.digest) in known:
                places[number, refresh.version] = known[refresh.version, refresh.digest]
                continue
            tensors = tensors | refresh.changed
            places[number, refresh.version] = len(epochs)
            epochs.append(Epoch(refresh.version, refresh.digest, refresh, tensors, []))
    for group in _whole(run.services, run.groups):
        epochs[places.get((group.service, group.version), len(epochs) - 1)].groups.append(group)
    return epochs


def _whole(services: Sequence[RecordedService], groups: Sequence[RecordedGroup]) -> list[RecordedGroup]:
    """Join the groups that a service continued after its restart with those that its predecessor had accepted."""
    whole: list[RecordedGroup] = []
    places: dict[str, int] = {}
    for group in groups:
        place = places.get(group.group_id)
        before = None if place is None else whole[place]
        if place is not None and before is not None and _goes_on(services, before, group):
            whole[place] = msgspec.structs.replace(before, samples=before.samples | group.samples)
            continue
        places[group.group_id] = len(whole)
        whole.append(group)
    return whole


def _goes_on(services: Sequence[RecordedService], before: RecordedGroup, group: RecordedGroup) -> bool:
    """Return whether a group is what was left of another one."""
    if group.service <= before.service:
        return False
    if first_difference(services[before.service], services[group.service], group.sampling) is not None:
        return False
    same = before.prompt == group.prompt and _seed(group) in (None, _seed(before)) and len(before.samples) < len(before.indices)
    return same and all(
        before.samples[i].result == group.samples[i].result for i in before.samples.keys() & group.samples.keys()
    )


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _weights(a: list[Epoch], b: list[Epoch], i: int) -> None:
    """Compare the weights of an epoch, and what they did to running samples."""
    one, other = a[i], b[i]
    if "" not in (one.digest, other.digest) and one.digest != other.digest:
        _other_weights(a, b, i)
    if one.refresh is not None and other.refresh is not None and one.refresh.kv != other.refresh.kv:
        x, y = one.refresh.kv, other.refresh.kv
        raise Different(
            "kv policy", f"the refresh to version {one.version} has kv={x!r} in a, {y!r} in b", step=one.version, a=x, b=y
        )


def _other_weights(a: list[Epoch], b: list[Epoch], i: int) -> None:
    """Say why the weights of an epoch differ."""
    one, other = a[i], b[i]
    fields = {"step": one.version, "a": one.digest, "b": other.digest}
    _doubled(a, b, i)
    following = [run[i + 1].digest if i + 1 < len(run) else None for run in (a, b)]
    if following == [other.digest, one.digest]:
        raise Different(
            "order of refreshes", f"versions {one.version} and {a[i + 1].version} of a have changed places in b", **fields
        )
    for mine, there, here in (("b", a, b), ("a", b, a)):
        if i + 1 < len(there) and _is_next(there[i + 1], here[i], there[i]):
            raise Different("lost refresh", f"{mine} has no version {there[i].version}", **fields)
    _tensors(one, other, fields)


def _doubled(a: list[Epoch], b: list[Epoch], i: int) -> None:
    """Find weights that one run has twice."""
    for mine, here, there in (("a", a, b), ("b", b, a)):
        twice = 0 < i < len(here) and here[i].digest == here[i - 1].digest != ""
        if twice and (i >= len(there) or there[i].digest != here[i].digest):
            why = f"{mine} has the weights of version {here[i - 1].version} twice, the second time as version {here[i].version}"
            raise Different("doubled refresh", why, step=a[min(i, len(a) - 1)].version)


def _is_next(there: Epoch, here: Epoch, skipped: Epoch) -> bool:
    """Return whether `here` is what the other run has one refresh later."""
    return there.digest == here.digest or (here.version == there.version and here.version > skipped.version)


def _tensors(one: Epoch, other: Epoch, fields: dict[str, Any]) -> None:
    """Name the tensors that differ."""
    sent = [epoch.refresh is not None and epoch.refresh.sent for epoch in (one, other)]
    both = one.tensors.keys() & other.tensors.keys() if sent[0] == sent[1] else set[str]()
    where = f"version {one.version}" if one.refresh is not None else "the weights that the services started with"
    for kind, name in (("dtype", "dtype"), ("tensor", "shape"), ("tensor", "digest")):
        names = sorted(each for each in both if getattr(one.tensors[each], name) != getattr(other.tensors[each], name))
        if names:
            x, y = getattr(one.tensors[names[0]], name), getattr(other.tensors[names[0]], name)
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            listed = ", ".join(names[:MOST_NAMES]) + more
            what = f"{name} {x} in a, {y} in b" if name != "digest" else "other bytes"
            raise Different(kind, f"{where}: {what}: {listed}", **fields | {"a": str(x), "b": str(y)})  # type: ignore[arg-type]
    raise Different("tensor", f"{where}: the digests of all weights differ; the ledgers do not say in which tensors", **fields)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _by_id(groups: Sequence[RecordedGroup]) -> dict[tuple[str, int], RecordedGroup]:
    """Return groups by their ids, and by how often the id occurred before."""
    seen: dict[str, int] = defaultdict(int)
    found = {}
    for group in groups:
        found[group.group_id, seen[group.group_id]] = group
        seen[group.group_id] += 1
    return found


class Unmatched(NamedTuple):
    """Groups of a run whose id the other run has less often in the same epoch, or not at all."""

    groups: list[list[RecordedGroup]]
    """of each epoch"""
    places: dict[str, int]
    """first epoch of each id"""

    @classmethod
    def of(cls, here: list[Epoch], there: list[Epoch]) -> Unmatched:
        """Find them in `here`."""
        left, places = [], dict[str, int]()
        for i, epoch in enumerate(here):
            known = _by_id(there[i].groups if i < len(there) else ())
            left.append([group for key, group in _by_id(epoch.groups).items() if key not in known])
            places |= {group.group_id: places.get(group.group_id, i) for group in left[i]}
        return cls(left, places)

    def alone(self, i: int, other: Unmatched) -> list[RecordedGroup]:
        """Return those of an epoch that the other run has in no epoch."""
        return [group for group in self.groups[i] if group.group_id not in other.places]


Both = tuple[Unmatched, Unmatched]
"""of the first run and of the second one"""


def _matched(a: Epoch, b: Epoch, i: int, left: Both) -> list[tuple[RecordedGroup, RecordedGroup]]:
    """Match the groups of an epoch: by id, and those whose ids the other run has nowhere by their order."""
    ones, others = _by_id(a.groups), _by_id(b.groups)
    by_id = [(ones[key], others[key]) for key in ones if key in others]
    return [*by_id, *zip(left[0].alone(i, left[1]), left[1].alone(i, left[0]), strict=False)]


def _accepted_elsewhere(a: list[Epoch], b: list[Epoch], i: int, left: Both) -> None:
    """Compare which groups were accepted under the weights of an epoch."""
    for mine, theirs, here, there, mine_left, theirs_left in (("b", "a", b, a, *left[::-1]), ("a", "b", a, b, *left)):
        moved = next((group for group in mine_left.groups[i] if group.group_id in theirs_left.places), None)
        if moved is None:
            continue
        place = theirs_left.places[moved.group_id]
        fields = {"step": a[i].version, "group_id": moved.group_id}
        under = there[place]
        if place > i and under.digest and under.digest not in {epoch.digest for epoch in here}:
            if i + 1 < len(here) and here[i + 1].version == under.version:
                continue  # other weights: the next epoch says in which tensor
            raise Different(
                "lost refresh", f"{mine} has no version {under.version}, under which {theirs} has this group", **fields
            )
        why = f"the group is of version {here[i].version} in {mine}, of {under.version} in {theirs}"
        raise Different("order of refreshes", why, **fields)


def _missing(a: list[Epoch], b: list[Epoch], i: int, left: Both) -> None:
    """Find a group that one run has nowhere, although both go on after this epoch."""
    if i + 1 >= min(len(a), len(b)):
        return  # `_ends` says which run is shorter
    ones, others = left[0].alone(i, left[1]), left[1].alone(i, left[0])
    for name, more, fewer in (("a", ones, others), ("b", others, ones)):
        if len(more) > len(fewer):
            group = more[len(fewer)]
            why = f"group {group.group_id!r} of version {a[i].version} is only in {name}"
            raise Different("group", why, step=a[i].version, group_id=group.group_id)


def _group(a: RecordedRun, b: RecordedRun, one: RecordedGroup, other: RecordedGroup) -> None:
    """Compare the arguments of a group."""
    fields: dict[str, Any] = {"step": one.version, "group_id": one.group_id}
    services = a.services[one.service], b.services[other.service]
    if (name := first_difference(*services, one.sampling)) is not None:
        x, y = (getattr(service, name) for service in services)
        raise Different(KINDS[name], f"{name} is {x} in a, {y} in b", a=x, b=y, **fields)
    if one.prompt != other.prompt:
        turn = one.after is not None and one.after == other.after
        if turn and _turns_differ(a, one, b, other):
            return  # the sample before is the difference
        kind: Kind = "tool answer" if turn else "prompt"
        what = f"what follows child {one.after[1]} of {one.after[0]!r}" if turn and one.after is not None else "the prompt"
        raise Different(kind, f"{what} is another one: {one.prompt_tokens} tokens in a, {other.prompt_tokens} in b",
                        a=one.prompt, b=other.prompt, **fields)  # fmt: skip
    recorded = [name for name, option in OPTIONS.items() if option.role in ROLES and name != "seed"]
    names = [name for name in recorded if getattr(one.sampling, name) != getattr(other.sampling, name)]
    if names:
        kind = "truncation" if OPTIONS[names[0]].role == "truncates" else "sampling"
        x, y = getattr(one.sampling, names[0]), getattr(other.sampling, names[0])
        also = f"; also {', '.join(names[1:])}" if names[1:] else ""
        raise Different(kind, f"{names[0]} is {x} in a, {y} in b{also}", a=x, b=y, **fields)
    seeds = [_seed(group) for group in (one, other)]
    if seeds[0] != seeds[1] and None not in seeds:
        raise Different("seed", f"the seed is {seeds[0]} in a, {seeds[1]} in b", a=seeds[0], b=seeds[1], **fields)
    compared = ("indices", "requested children"), ("given", "children that had tokens"), ("given_digest", "their tokens")
    for name, what in compared:
        x, y = getattr(one, name), getattr(other, name)
        if x != y:
            raise Different("group", f"{what}: {x} in a, {y} in b", a=x, b=y, **fields)


def _turns_differ(a: RecordedRun, one: RecordedGroup, b: RecordedRun, other: RecordedGroup) -> bool:
    """Return whether the children that two groups continue differ."""
    results = []
    for run, group in ((a, one), (b, other)):
        assert group.after is not None
        id, index = group.after
        before = [
            each for each in run.groups if each.group_id == id and each.service == group.service and each.number < group.number
        ]
        sample = before[-1].samples.get(index) if before else None
        results.append(None if sample is None else sample.result)
    return results[0] != results[1]


def _seed(group: RecordedGroup) -> int | None:
    """Return the seed of a group, also if the service chose it; None: no sample says it."""
    return next((sample.seed for sample in group.samples.values()), group.sampling.seed)


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _same(one: RecordedGroup, other: RecordedGroup, index: int) -> bool:
    return index in other.samples and one.samples[index].result == other.samples[index].result


def _samples(one: RecordedGroup, other: RecordedGroup) -> Iterator[Pair]:
    """Yield the samples of a group that differ."""
    for index in one.samples:
        if index in other.samples and not _same(one, other, index):
            yield Pair(one, one.samples[index], other, other.samples[index])


def _epoch_of(pair: Pair, places: tuple[dict[int, int], dict[int, int]]) -> int:
    """Return the epoch in which two samples first differ, as far as the marks say."""
    _, until = first_other_token(pair.a, pair.b)
    return max(
        (place[version] for sample, place in zip((pair.a, pair.b), places, strict=True)
         for first, version in sample.weight_versions if first < until and version in place),
        default=0,
    )  # fmt: skip


def _sample(pair: Pair, version: int) -> None:
    """Say how two samples of equal arguments differ."""
    one, other = pair.a, pair.b
    low, high = first_other_token(one, other)
    fields: dict[str, Any] = {"step": pair.a_group.version, "group_id": pair.a_group.group_id, "index": one.index}
    met = [_versions_until(sample, high) for sample in (one, other)]
    if met[0] != met[1]:
        raise Different(
            "refresh at another token", f"versions from token on: {met[0]} in a, {met[1]} in b", a=met[0], b=met[1], **fields
        )
    kv = [[span for span in sample.kv_versions if span[0] < high] for sample in (one, other)]
    if kv[0] != kv[1]:
        raise Different(
            "other KV", f"it attended to KV of other weights: {kv[0]} in a, {kv[1]} in b", a=kv[0], b=kv[1], **fields
        )
    fields["tokens"] = low, high
    between = f"token {low}" if high == low + 1 else f"one of tokens {low} to {high - 1}"
    ends = [(sample.tokens, sample.finish_reason) for sample in (one, other)]
    stopped = any(reason in STOPPED for _, reason in ends)
    alike = low >= min(one.tokens, other.tokens) or one.token_digest == other.token_digest
    if ends[0] != ends[1] and (alike or (stopped and high >= max(one.tokens, other.tokens))):
        fields["tokens"] = None
        raise Different("end", f"it ends after {ends[0]} in a, {ends[1]} in b", a=ends[0], b=ends[1], **fields)
    same_tokens = one.token_digest == other.token_digest
    kind: Kind = "log-prob" if same_tokens else "token"
    what = "all tokens are equal, but not all log-probs: the first other one is of" if same_tokens else "the first other one is"
    why = (
        f"{what} {between}, and all arguments are equal, the arithmetic included: one of the runs has not computed what it says"
    )
    raise Different(kind, why, a=one.result, b=other.result, **fields)


def _versions_until(sample: RecordedSample, token: int) -> list[tuple[int, int]]:
    """Return the spans of the tokens before `token`."""
    return [span for span in sample.weight_versions if span[0] < token]


def _ends(a: list[Epoch], b: list[Epoch]) -> None:
    """Compare what only one of the runs has."""
    if len(a) != len(b):
        shorter, longer, name = (a, b, "a") if len(a) < len(b) else (b, a, "b")
        version = longer[len(shorter)].version
        raise Different(
            "shorter", f"{name} ends before version {version}; equal until then", step=shorter[-1].version if shorter else None
        )
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        counts = [sum(len(group.samples) for group in epoch.groups) for epoch in (one, other)]
        sizes = len(one.groups), len(other.groups)
        if sizes[0] != sizes[1] or counts[0] != counts[1]:
            name = "a" if (sizes[0], counts[0]) < (sizes[1], counts[1]) else "b"
            have = [f"{size} groups with {count} samples" for size, count in zip(sizes, counts, strict=True)]
            why = f"{name} has less of version {a[i].version}: {have[0]} in a, {have[1]} in b"
            raise Different("shorter", why, step=one.version, a=counts[0], b=counts[1])
