"""Restores sessions and groups from the journal when a service starts again.

JournaledGroup → AcceptedGroup in its session, with its unacknowledged samples → parked until its weights are live → engine
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rollout.engine.values import FinishReason, Group, Limits, Sample
from rollout.identity import WORDS
from rollout.logs import logger
from rollout.service.engine_api import EngineLike
from rollout.service.engine_groups import EngineGroups, ParkedGroup
from rollout.service.group_names import number_of
from rollout.service.journal import Journal, JournaledGroup
from rollout.service.session import AcceptedGroup, Session, Sessions
from rollout.service.validation import checked_group
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.errors import RolloutError
from rollout.transport.frames import Decoder, Frame

log = logger(__name__)

LEAST_DEADLINE_S = 1e-3
UNLIMITED = Limits(max_header_bytes=1 << 40, max_frame_bytes=1 << 40, max_frames=1 << 20)
"""for messages of the journal, which were checked when they were received; as groups they are checked again"""


def restore(journal: Journal, sessions: Sessions, running: EngineGroups, engine: EngineLike) -> None:
    """Restore sessions and groups; versions continue from the journal's. A group that the present configuration refuses is
    dropped: its client submits it again and gets the reason. Raises InputError for a damaged journal, and for
    one whose groups another model or arithmetic began."""
    journal.continued_by({name: getattr(engine, name) for name in WORDS})
    engine.weights.before = journal.weights
    for session in journal.sessions():
        sessions.restore(session)
    groups, samples = 0, 0
    for group in journal.groups():
        with journal.reading(f"table groups, row {group.engine_id!r}"):
            owner, submit = session_of(sessions, group), submit_of(group)
        try:
            whole = checked_group(submit, group.engine_id, None, engine)
        except RolloutError as error:
            journal.dropped(group.engine_id)
            log.warning("group of the journal refused engine_id=%s reason=%r", group.engine_id, error.message)
            continue
        accepted = AcceptedGroup(submit.group_id, group.engine_id, m.digest(submit), whole.wanted)
        accepted.ended, accepted.acked = len(group.ended), sum(frames is None for _, frames in group.ended.values())
        owner.hold(accepted)
        for index, (_, frames) in group.ended.items():
            with journal.reading(f"table samples, row {(group.engine_id, index)}"):
                sample = sample_of(frames, index, whole)
            if sample is not None:
                owner.queue_sample(accepted, sample)
        if accepted.running:
            running.park(group.engine_id, ParkedGroup(owner, accepted, rest(whole, group), group.live))
        groups, samples = groups + 1, samples + len(accepted.unacked)
    log.info("journal read sessions=%d groups=%d samples=%d starts=%d", len(list(sessions)), groups, samples, journal.starts)


def session_of(sessions: Sessions, group: JournaledGroup) -> Session:
    """Return the session of a group. Raises ValueError."""
    try:
        return sessions.of(group.key, group.session)
    except KeyError:
        raise ValueError(f"its session {group.session!r} is missing") from None


def submit_of(group: JournaledGroup) -> m.Submit:
    """Return the Submit message of a group. Raises ProtocolError, ValueError."""
    submit = Decoder[m.ClientMessage](m.ClientMessage, UNLIMITED).unpack(group.submit)
    if not isinstance(submit, m.Submit):
        raise ValueError(f"its message is a {type(submit).__name__}")
    number_of(group.engine_id)
    return submit


def sample_of(frames: Sequence[Frame] | None, index: int, group: Group) -> Sample | None:
    """Return the sample of a stored SamplesDone; None if the client has acknowledged it. Raises ProtocolError, ValueError."""
    if index not in group.wanted:
        raise ValueError("the group has no such child")
    if frames is None:
        return None
    done = Decoder[m.ServiceMessage](m.ServiceMessage, UNLIMITED).unpack(frames)
    samples = unpack_samples(done) if isinstance(done, m.SamplesDone) else []
    if [sample.index for sample in samples] != [index]:
        raise ValueError("its message is not that child")
    return samples[0]


def rest(whole: Group, stored: JournaledGroup) -> Group:
    """Return the group of the unfinished children, with the same seed, and with the remaining `deadline_s` and
    `finish_after`."""
    left = tuple(index for index in whole.wanted if index not in stored.ended)
    sampling = whole.sampling
    fields: dict[str, object] = {"seed": stored.seed if sampling.seed is None else sampling.seed}
    if sampling.finish_after is not None:
        fields["finish_after"] = min(len(left), max(1, sampling.finish_after - by_themselves(stored.ended.values())))
    if sampling.deadline_s is not None:
        fields["deadline_s"] = max(LEAST_DEADLINE_S, sampling.deadline_s - stored.age_s)
    partials = tuple(child for child in whole.partials if child.index in left)
    return msgspec.structs.replace(whole, sampling=msgspec.structs.replace(sampling, **fields), indices=left, partials=partials)


def by_themselves(ended: Iterable[tuple[FinishReason, object]]) -> int:
    """Count the children that finished with "stop" or "length"."""
    return sum(reason in ("stop", "length") for reason, _ in ended)
