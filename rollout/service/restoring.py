"""From a journal to the sessions and groups of a service that starts again.

KeptGroup -> HeldGroup of its session, with what was not acked -> Parked until the weights are there -> engine
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.types import FinishReason, Group, Limits, Sample
from rollout.logs import logger
from rollout.service.admission import checked_group
from rollout.service.engine_api import EngineLike
from rollout.service.group_names import number_of
from rollout.service.journal import Journal, JournaledGroup
from rollout.service.running import Running
from rollout.service.session import HeldGroup, Session, Sessions
from transport import messages as m
from transport.columns import unpack_samples
from transport.errors import RolloutError
from transport.frames import Decoder, Frame

log = logger(__name__)

LEAST_DEADLINE_S = 1e-3
TAKEN_BEFORE = Limits(max_header_bytes=1 << 40, max_frame_bytes=1 << 40, max_frames=1 << 20)
"""of messages that were taken once: they are checked as groups"""


def restore(journal: Journal, sessions: Sessions, running: Running, engine: EngineLike, limits: Limits) -> None:
    """Bring back what the journal has; versions go on from its own. A group that this configuration does not take any more is
    dropped: its client submits it again, and is told why. Raises InputError for a journal that is damaged."""
    engine.weights.before = journal.weights
    for kept in journal.sessions():
        sessions.bring_back(kept.key, kept.id, kept.name, kept.number)
    groups, samples = 0, 0
    for group in journal.groups():
        with journal.reading(f"table groups, row {group.engine_id!r}"):
            session, submit = session_of(sessions, group), submit_of(group)
        try:
            whole = checked_group(submit, group.engine_id, None, limits, engine.vocab_size, engine.context)
        except RolloutError as error:
            journal.dropped(group.engine_id)
            log.warning("group of the journal not taken any more engine_id=%s reason=%r", group.engine_id, error.message)
            continue
        held = HeldGroup(submit.group_id, group.engine_id, m.digest(submit), whole.wanted)
        held.ended, held.acked = len(group.ended), sum(frames is None for _, frames in group.ended.values())
        session.hold(held)
        for index, (_, frames) in group.ended.items():
            with journal.reading(f"table samples, row {(group.engine_id, index)}"):
                sample = sample_of(frames, index, whole)
            if sample is not None:
                session.keep(held, sample)
        if held.running:
            running.park(session, held, rest(whole, group), group.live)
        groups, samples = groups + 1, samples + len(held.unacked)
    log.info("journal read sessions=%d groups=%d samples=%d starts=%d", len(list(sessions)), groups, samples, journal.starts)


def session_of(sessions: Sessions, group: JournaledGroup) -> Session:
    """Find the session of a group. Raises ValueError."""
    try:
        return sessions.of(group.key, group.session)
    except KeyError:
        raise ValueError(f"its session {group.session!r} is not there") from None


def submit_of(group: JournaledGroup) -> m.Submit:
    """Return the Submit that a group came by. Raises ProtocolError, ValueError."""
    submit = Decoder[m.ClientMessage](m.ClientMessage, TAKEN_BEFORE).unpack(group.submit)
    if not isinstance(submit, m.Submit):
        raise ValueError(f"its message is a {type(submit).__name__}")
    number_of(group.engine_id)
    return submit


def sample_of(frames: Sequence[Frame] | None, index: int, group: Group) -> Sample | None:
    """Return the sample in a SamplesDone of the journal; None: its client has it. Raises ProtocolError, ValueError."""
    if index not in group.wanted:
        raise ValueError("the group has no such child")
    if frames is None:
        return None
    done = Decoder[m.ServiceMessage](m.ServiceMessage, TAKEN_BEFORE).unpack(frames)
    samples = unpack_samples(done) if isinstance(done, m.SamplesDone) else []
    if [sample.index for sample in samples] != [index]:
        raise ValueError("its message is not that child")
    return samples[0]


def rest(whole: Group, kept: JournaledGroup) -> Group:
    """Make the group of those children that have not ended: under the same seed, with what is left of its time and of the
    children that must end by themselves."""
    left = tuple(index for index in whole.wanted if index not in kept.ended)
    sampling = whole.sampling
    fields: dict[str, object] = {"seed": kept.seed if sampling.seed is None else sampling.seed}
    if sampling.finish_after is not None:
        fields["finish_after"] = min(len(left), max(1, sampling.finish_after - by_themselves(kept.ended.values())))
    if sampling.deadline_s is not None:
        fields["deadline_s"] = max(LEAST_DEADLINE_S, sampling.deadline_s - kept.age_s)
    partials = tuple(child for child in whole.partials if child.index in left)
    return msgspec.structs.replace(whole, sampling=msgspec.structs.replace(sampling, **fields), indices=left, partials=partials)


def by_themselves(ended: Iterable[tuple[FinishReason, object]]) -> int:
    """Count the children that ended by themselves."""
    return sum(reason in ("stop", "length") for reason, _ in ended)
