"""Verification: computes the tokens of samples again as one prefill, and samples each position again with its random number.

    samples ──→ GroupCheck ──→ groups to redraw ──→ service ──→ draws ──→ GroupCheck.judge ──→ Verified

A sample is a function of its arguments, so one token or one bit of a log-prob that differs proves that it was not computed from
them. What cannot be computed here (other weights, another arithmetic) is neither right nor wrong: `Verified.ok` is None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.client.receipts import Receipt
from rollout.client.submission import TokenIds, check_scored, checked, token_array
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.engine.values.arithmetic import Arithmetic
from rollout.identity import WORDS, drawn_by, first_difference, prompt_digest, result_digest, short
from rollout.transport.checks import Bounds, check_sample
from rollout.transport.errors import InvalidRequest
from rollout.transport.messages import Welcome

COLUMNS = ("logprobs", "raw_logprobs", "top_ids", "top_logprobs", "routed_experts")
"""arrays of a sample that are compared token by token, in addition to its tokens"""
ENDS = ("stopped_by", "text_end")
"""fields that are compared for a child that ended by itself"""
CHECKED = {
    "index": "its tokens are drawn with the counters of this child",
    "seed": "its tokens are drawn with it; `check_sample` compares it with `Sampling.seed`",
    "prompt_tokens": "`check_sample` compares it with the prompt",
    "weight_versions": "must be those of the weights that draw it again",
    "kv_versions": "without spans, its log-probs are of KV of the same weights; with spans, it cannot be verified",
    "configuration": "a client notes it; a sample or a receipt of another one cannot be verified",
    "error": "`check_sample` allows it for failed children only",
}
"""fields that decide what is drawn again, or are compared with the request"""
NOT_COMPARED = {
    "group_id": "a name",
    "seconds": "when it ended is no function of its arguments",
    "offloads": "what happened to its KV changes no bit",
    "ranks": "scored tokens alone have them, and those are not drawn",
}
"""fields that no verification compares, and why. All fields of a sample are in one of these tables"""


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the verification of one sample.

    Example:
        Verified(group_id="g", index=3, ok=False, field="token_ids", first_bad=17, expected=42, got=5,
                 why="token 17 is 5, drawn again it is 42")
    """

    group_id: str
    index: int
    ok: bool | None
    """True: all tokens, log-probs and the end are as computed here. False: proven wrong. None: cannot be verified here"""
    field: str = ""
    """field of the sample or receipt that is wrong"""
    first_bad: int | None = None
    """the first wrong position; None: no single position is"""
    expected: Any = None
    """value of the field that was computed here"""
    got: Any = None
    """value of the field in the sample"""
    why: str = ""
    """in words; "" if `ok`"""


class Here(NamedTuple):
    """What a service computes with now."""

    info: Welcome
    version: int
    """of the live weights"""
    digest_of: Callable[[int], str]
    """returns the digest of the weights of a version, "" if it is unknown"""


class GroupCheck:
    """Checks samples of one group.

    Args:
        sampling: of the group. Without a seed, the samples' own: then nothing proves that it was the first one that was tried.
        receipts: one for each sample; None: the samples are of this arithmetic.
        new_id: returns a new group id.
        prompt_routes: whether each sample has the routes of its prompt, if they were requested, as a client's samples do;
            of a service's samples one in a group has them.

    Raises InvalidRequest for arguments of other types, and for receipts that are not one each."""

    def __init__(
        self,
        samples: Sequence[Sample],
        prompt: TokenIds,
        sampling: Sampling,
        receipts: Sequence[Receipt] | None,
        here: Here,
        new_id: Callable[[], str],
        prompt_routes: bool = True,
    ) -> None:
        if receipts is not None and len(receipts) != len(samples):
            raise InvalidRequest(f"{len(samples)} samples, {len(receipts)} receipts: must be as many")
        self._samples, self._here, self._prompt_routes = samples, here, prompt_routes
        self._prompt, self._sampling = token_array(prompt), checked(sampling)
        if not 0 < len(self._prompt) < here.info.context:
            raise InvalidRequest(f"prompt of {len(self._prompt)} tokens: must be 1 to {here.info.context - 1}")
        self._verdicts: list[Verified | None] = [
            self._at_once(sample, None if receipts is None else receipts[i]) for i, sample in enumerate(samples)
        ]
        self._places: dict[tuple[str, int], int] = {}
        """(id of the group to redraw, index) → place of the sample"""
        self.groups = list(self._to_redraw(new_id))
        """groups whose tokens the service draws again"""

    def judge(self, drawn: Iterable[Sample]) -> list[Verified]:
        """Return the results, in the order of the samples. drawn: all samples of `groups`; others are ignored. Raises
        GroupFailed for one that was not drawn to its end."""
        for again in drawn:
            place = self._places.get((again.group_id, again.index))
            if place is not None:
                check_scored([again])
                self._verdicts[place] = self._compared(self._samples[place], again)
        verdicts = [verdict for verdict in self._verdicts if verdict is not None]
        assert len(verdicts) == len(self._samples)
        return verdicts

    def _compared(self, sample: Sample, again: Sample) -> Verified:
        """Compare a sample with its tokens drawn again, and the routes of its prompt."""
        verdict = compare(sample, again, self._sampling, self._ends)
        theirs, ours = sample.prompt_routed_experts, again.prompt_routed_experts
        if not verdict.ok or ours is None or (theirs is None and not self._prompt_routes):
            return verdict
        return _compare_prompt_routes(sample, theirs, ours)

    @property
    def _ends(self) -> frozenset[int]:
        """Return the tokens that end a child."""
        return frozenset(drawn_by(self._sampling, 0, self._here.info.eos_token_ids).stop_token_ids)

    def _at_once(self, sample: Sample, receipt: Receipt | None) -> Verified | None:
        """Return the result for a sample that is impossible, or that cannot be computed here; None: draw it again."""
        info, sampling = self._here.info, self._sampling
        bounds = Bounds(info.vocab_size, frozenset(info.eos_token_ids), routing=info.routing, any_kv=True)
        if sample.finish_reason == "scored":
            return _unknown(sample, "its tokens were given, not sampled")
        try:
            check_sample(sample, Group(sample.group_id, self._prompt, sampling), None, bounds)
        except ValueError as error:
            return _wrong(sample, "", str(error))
        wrong = None if receipt is None else self._forged(sample, receipt)
        if wrong is not None:
            return wrong
        reason = self._elsewhere(sample, receipt)
        if reason:
            return _unknown(sample, reason)
        return None if len(sample.token_ids) else _right(sample)

    def _forged(self, sample: Sample, receipt: Receipt) -> Verified | None:
        """Return the result for a receipt that is not of this sample, prompt and sampling."""
        own: dict[str, Any] = {
            "prompt": prompt_digest(self._prompt),
            "sampling": drawn_by(self._sampling, sample.seed, self._here.info.eos_token_ids),
            "index": sample.index,
            "weight_versions": tuple(sample.weight_versions),
            "kv_versions": tuple(sample.kv_versions),
            "result": result_digest(sample),
        }
        for name, expected in own.items():
            if (got := getattr(receipt, name)) != expected:
                why = f"the receipt has {name} {got!r:.80}, the sample {expected!r:.80}"
                return _wrong(sample, f"receipt.{name}", why, expected=expected, got=got)
        return None

    def _elsewhere(self, sample: Sample, receipt: Receipt | None) -> str:
        """Return why a sample cannot be computed here; "" if it can."""
        info, versions = self._here.info, {version for _, version in sample.weight_versions}
        if Arithmetic.parse(info.arithmetic).by_batch:
            return f"the bits of arithmetic {info.arithmetic} depend on the batch"
        if sample.configuration not in ("", info.configuration):
            return f"it was sampled with {WORDS['configuration']} {sample.configuration}, this service has {info.configuration}"
        if receipt is not None and (name := first_difference(receipt, info, self._sampling)) is not None:
            return f"it was sampled with {WORDS[name]} {getattr(receipt, name)}, this service has {getattr(info, name)}"
        if len(versions) > 1 or sample.kv_versions:
            return f"it was generated during a refresh: {sample.versions}" + ", and KV of others" * bool(sample.kv_versions)
        live = self._here.version
        if versions and versions != {live}:
            return f"it was sampled from {sample.versions} of the weights, version {live} is live"
        digests = {short(self._here.digest_of(live)), *(digest for _, digest in receipt.weights)} if receipt is not None else ()
        if versions and len({*digests} - {""}) > 1:
            return f"its receipt has other weights as version {live}"
        return ""

    def _to_redraw(self, new_id: Callable[[], str]) -> Iterable[Group]:
        """Yield groups of the samples that are left: one for each seed, and more if an index occurs several times."""
        rounds: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for place, sample in enumerate(self._samples):
            if self._verdicts[place] is None:
                number = 0
                while sample.index in rounds[sample.seed, number]:
                    number += 1
                rounds[sample.seed, number][sample.index] = place
        for (seed, _), mine in rounds.items():
            group_id, indices = new_id(), tuple(sorted(mine))
            self._places |= {(group_id, index): place for index, place in mine.items()}
            partials = tuple(_given(self._samples[mine[index]]) for index in indices)
            sampling = msgspec.structs.replace(
                self._sampling, seed=seed, finish_after=None, min_len_to_cut=0, deadline_s=None, max_version_lag=None,
                max_kv_lag=0, stream_every=0, kv_ttl_s=0.0,
            )  # fmt: skip
            yield Group(group_id, self._prompt, sampling, indices, partials, score=True, redraw=True)


def compare(sample: Sample, again: Sample, sampling: Sampling, ends: frozenset[int]) -> Verified:
    """Compare a sample with its tokens drawn again. ends: tokens that end a child."""
    if again.weight_versions != sample.weight_versions or again.kv_versions:
        return _unknown(sample, "the weights changed while it was verified; verify it again")
    tokens, length = again.token_ids, len(again.token_ids)
    same = _first(tokens, sample.token_ids[:length])
    bad = [("token_ids", same)] if same < length else []
    for name in COLUMNS:
        theirs, ours = getattr(sample, name), getattr(again, name)
        if theirs is not None and ours is not None and (at := _first(ours[:same], theirs[:same])) < same:
            bad.append((name, at))
    if bad:
        name, at = min(bad, key=lambda each: each[1])
        expected, got = getattr(again, name)[at].tolist(), getattr(sample, name)[at].tolist()
        return _wrong(sample, name, f"{name}[{at}] is {got}, computed again it is {expected}", at, expected, got)
    if length < len(sample.token_ids):
        got = int(sample.token_ids[length])
        return _wrong(sample, "token_ids", f"token {length - 1} ends the sample, but more tokens follow", length, None, got)
    stopped = length > sampling.min_tokens and (again.stopped_by is not None or int(tokens[-1]) in ends)
    return _compare_ends(sample, again, stopped)


def _compare_ends(sample: Sample, again: Sample, stopped: bool) -> Verified:
    """Compare how a sample and its tokens drawn again have ended. stopped: the last token ends the child."""
    # a child that ended by itself in the step in which enough others had ended is cut nevertheless
    if sample.finish_reason == "stop" and not stopped:
        return _wrong(sample, "finish_reason", "none of its tokens ends the sample", expected=None, got="stop")
    for name in ENDS if sample.finish_reason == "stop" else ():
        expected, got = getattr(again, name), getattr(sample, name)
        if expected != got:
            return _wrong(sample, name, f"{name} is {got!r}, computed again it is {expected!r}", None, expected, got)
    if sample.finish_reason == "length" and stopped:
        return _wrong(sample, "finish_reason", "its last token ends the sample", expected="stop", got="length")
    return _right(sample)


def _compare_prompt_routes(sample: Sample, theirs: np.ndarray | None, ours: np.ndarray) -> Verified:
    """Compare the routes of a prompt. ours: computed here."""
    name = "prompt_routed_experts"
    if theirs is None:
        return _wrong(sample, name, f"{name} was requested, and is missing")
    at = _first(ours, theirs)
    if at == len(ours) == len(theirs):
        return _right(sample)
    expected, got = ours[at].tolist(), theirs[at].tolist()
    return _wrong(sample, name, f"{name}[{at}] is {got}, computed again it is {expected}", at, expected, got)


def _first(one: np.ndarray, other: np.ndarray) -> int:
    """Return the first row in which two arrays differ in any bit; their length if none does."""
    differ = one.view(np.uint32) != other.view(np.uint32) if one.dtype == np.float32 else one != other
    rows = differ.any(tuple(range(1, differ.ndim)))
    return int(rows.argmax()) if rows.any() else len(one)


def _given(sample: Sample) -> PartialSample:
    """Return the tokens of a sample, to be drawn again."""
    zeros = np.zeros(len(sample.token_ids), np.float32)  # ignored by the service
    return PartialSample(index=sample.index, token_ids=sample.token_ids, logprobs=zeros, weight_versions=[(0, 0)])


def _right(sample: Sample) -> Verified:
    return Verified(group_id=sample.group_id, index=sample.index, ok=True)


def _unknown(sample: Sample, reason: str) -> Verified:
    return Verified(group_id=sample.group_id, index=sample.index, ok=None, why=f"cannot be verified here: {reason}")


def _wrong(
    sample: Sample, field: str, why: str, first_bad: int | None = None, expected: Any = None, got: Any = None
) -> Verified:
    own = {"field": field, "first_bad": first_bad, "expected": expected, "got": got, "why": why}
    return Verified(group_id=sample.group_id, index=sample.index, ok=False, **own)
