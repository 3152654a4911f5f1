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
from rollout.service.journal import Journal, KeptGroup
from rollout.service.running import Running
from rollout.service.session import HeldGroup, Sessions
from transport import messages as m
from transport.errors import RolloutError
from transport.frames import Decoder, Frame

log = logger("rollout.service.loop")

LEAST_DEADLINE_S = 1e-3


def restore(journal: Journal, sessions: Sessions, running: Running, engine: EngineLike, limits: Limits) -> None:
    """Bring back what the journal has. A group that this configuration does not take any more is dropped: its client submits it
    again, and is told why."""
    decoder: Decoder[m.ClientMessage] = Decoder(m.ClientMessage, limits)
    for kept in journal.sessions():
        sessions.bring_back(kept.key, kept.id, kept.name, kept.number)
    groups, samples = 0, 0
    for group in journal.groups():
        session = sessions.of(group.key, group.session)
        try:
            submit = decoder.unpack(group.submit)
            assert isinstance(submit, m.Submit)
            whole = checked_group(submit, group.engine_id, None, limits, engine.vocab_size, engine.context)
        except RolloutError as error:
            journal.dropped(group.engine_id)
            log.warning("group of the journal not taken any more engine_id=%s reason=%r", group.engine_id, error.message)
            continue
        held = HeldGroup(submit.group_id, group.engine_id, m.digest(submit), whole.wanted)
        held.ended, held.acked = len(group.ended), sum(frames is None for _, frames in group.ended.values())
        session.hold(held)
        for _, frames in group.ended.values():
            if frames is not None:
                session.keep(held, sample_of(frames))
        if held.running:
            running.park(session, held, rest(whole, group), group.version)
        groups, samples = groups + 1, samples + len(held.unacked)
    log.info("journal read sessions=%d groups=%d samples=%d starts=%d", len(list(sessions)), groups, samples, journal.starts)


def sample_of(frames: Sequence[Frame]) -> Sample:
    """Return the child that a SampleDone of the journal is about."""
    done = Decoder[m.ServiceMessage](m.ServiceMessage, m.answer_limits(Limits())).unpack(frames)
    assert isinstance(done, m.SampleDone)
    return done.sample


def rest(whole: Group, kept: KeptGroup) -> Group:
    """Make the group of those children that have not ended: under the same seed, with what is left of its time and of the
    children that must end by themselves."""
    left = tuple(index for index in whole.wanted if index not in kept.ended)
    sampling = whole.sampling
    fields: dict[str, object] = {"seed": kept.seed if sampling.seed is None else sampling.seed}
    if sampling.finish_after is not None:
        fields["finish_after"] = min(len(left), max(1, sampling.finish_after - by_themselves(kept.ended.values())))
    if sampling.deadline_s is not None:
        fields["deadline_s"] = max(LEAST_DEADLINE_S, sampling.deadline_s - kept.age_s)
    begun = tuple(child for child in whole.begun if child.index in left)
    return msgspec.structs.replace(whole, sampling=msgspec.structs.replace(sampling, **fields), indices=left, begun=begun)


def by_themselves(ended: Iterable[tuple[FinishReason, object]]) -> int:
    """Count the children that ended by themselves."""
    return sum(reason in ("stop", "length") for reason, _ in ended)
