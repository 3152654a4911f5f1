"""What proves how a sample was made: receipts, verification, replay, for the samples of one session. They are functions beside
the clients, which wait each in their own way for the groups that these make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.client.receipts import Receipt, receipt_of
from rollout.client.replaying import TTL_S, Change, Replay, Way
from rollout.client.session import ClientSession
from rollout.client.submission import TokenIds, checked, token_array
from rollout.client.verification import GroupCheck, Here
from rollout.engine.values import Sample, Sampling
from rollout.transport.errors import InvalidRequest


def receipt(session: ClientSession, sample: Sample, prompt: TokenIds, sampling: Sampling) -> Receipt:
    """Make the receipt of a sample. Raises InvalidRequest."""
    return receipt_of(sample, prompt, checked(sampling), session.info, session.link.weights.digest)


def checks(
    session: ClientSession,
    groups: Sequence[Sequence[Sample]],
    prompts: Sequence[TokenIds],
    sampling: Sampling | Sequence[Sampling],
    receipts: Sequence[Sequence[Receipt]] | None,
) -> list[GroupCheck]:
    """Make the checks of groups of samples. Raises InvalidRequest."""
    samplings = [sampling] * len(groups) if isinstance(sampling, Sampling) else list(sampling)
    own = [None] * len(groups) if receipts is None else list(receipts)
    if not len(groups) == len(prompts) == len(samplings) == len(own):
        raise InvalidRequest(
            f"{len(groups)} groups of samples, {len(prompts)} prompts, {len(samplings)} samplings, {len(own)} lists of "
            "receipts: must be as many"
        )
    here = _here(session)
    return [
        GroupCheck(mine, prompt, one, given, here, lambda: session.group_id(None))
        for mine, prompt, one, given in zip(groups, prompts, samplings, own, strict=True)
    ]


def replaying(
    session: ClientSession,
    receipts: Sequence[Receipt],
    prompts: Sequence[TokenIds],
    known: Iterable[int],
    ends: Sequence[tuple[int, str]] | None,
    change: Change | None,
) -> Replay:
    """Make the replay of receipts. known: versions whose weights were given. Raises InvalidRequest."""
    ttl_s = min(TTL_S, session.info.limits.max_kv_ttl_s)
    way = Way(_here(session), frozenset(known), ttl_s, lambda: session.group_id(None))
    return Replay(receipts, [token_array(prompt) for prompt in prompts], way, ends, change)


def _here(session: ClientSession) -> Here:
    weights = session.link.weights
    return Here(session.info, weights.live.version, weights.digest)
