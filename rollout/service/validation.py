"""Validates requests of clients before the service acts on them. Each function raises the typed error that the client gets."""

from __future__ import annotations

import numpy as np

from rollout.engine.values import Group, Limits, Routing, Sampling
from rollout.service.engine_api import EngineLike
from rollout.service.session import Session
from rollout.transport import messages as m
from rollout.transport.columns import positions_per_frame, unpack_partials
from rollout.transport.errors import Busy, InvalidRequest, LimitExceeded, VersionMismatch
from rollout.transport.weights.receiving import capabilities


def check_hello(hello: m.Hello, limits: Limits) -> set[bytes]:
    """Check a Hello. Returns the digests of the groups that the client still wants. Raises VersionMismatch, LimitExceeded,
    InvalidRequest."""
    if hello.protocol != m.PROTOCOL:
        raise VersionMismatch(
            f"the client has protocol {hello.protocol}, the service {m.PROTOCOL}: install the same version at both ends"
        )
    if len(hello.name.encode()) > limits.max_id_bytes:
        raise LimitExceeded(
            f"client name of {len(hello.name.encode())} bytes: must be at most {limits.max_id_bytes} (Limits.max_id_bytes)"
        )
    groups = hello.groups if hello.groups is not None else np.zeros((0, m.DIGEST_BYTES), np.uint8)
    if groups.dtype != np.uint8 or groups.ndim != 2 or groups.shape[1] != m.DIGEST_BYTES:
        raise InvalidRequest(f"Hello.groups is {groups.dtype} {groups.shape}: must be uint8 [groups, {m.DIGEST_BYTES}]")
    if len(groups) > limits.max_groups_per_client:
        raise LimitExceeded(
            f"Hello names {len(groups)} groups: at most {limits.max_groups_per_client} (Limits.max_groups_per_client)"
        )
    return {row.tobytes() for row in groups}


def checked_group(submit: m.Submit, engine_id: str, after: tuple[str, int] | None, engine: EngineLike) -> Group:
    """Validate a Submit and return its group.

    Args:
        engine_id: the engine's id for the group.
        after: engine id and index of the child that the group continues as the next turn.

    Raises LimitExceeded, InvalidRequest."""
    limits, size = engine.limits, len(submit.group_id.encode())
    if size > limits.max_id_bytes:  # the error does not repeat the id
        raise LimitExceeded(f"a group id of {size} bytes: at most {limits.max_id_bytes} (Limits.max_id_bytes)")
    if not size:
        raise InvalidRequest(f"group id of 0 bytes: must be 1 to {limits.max_id_bytes} bytes (Limits.max_id_bytes)", "")
    if len(submit.client.encode()) > limits.max_id_bytes:
        raise LimitExceeded(f"client of more than {limits.max_id_bytes} bytes (Limits.max_id_bytes)", submit.group_id)
    try:
        partials = unpack_partials(submit.partials, limits.max_n)
        fields = submit.prompt, submit.sampling, submit.indices, partials, submit.score, after, submit.redraw
        group = Group(engine_id, *fields, label=submit.group_id)
        group.validate(limits, engine.vocab_size, engine.context)
        group.validate_routes(engine.routing)
        check_sample_frames(submit.sampling, limits)
        if submit.sampling.routed_experts and engine.routing is not None:
            check_route_frames(group, limits, engine.routing)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, submit.group_id) from None
    except ValueError as error:
        raise InvalidRequest(str(error), submit.group_id) from None
    return group


def check_sample_frames(sampling: Sampling, limits: Limits) -> None:
    """Check that the largest array of a sample fits into a frame. Raises ValueError."""
    if 4 * sampling.top_logprobs * sampling.max_tokens > limits.max_frame_bytes:
        raise ValueError(
            f"top_logprobs={sampling.top_logprobs} of max_tokens={sampling.max_tokens} do not fit a frame of "
            f"{limits.max_frame_bytes} bytes (Limits.max_frame_bytes); lower max_tokens to "
            f"{limits.max_frame_bytes // (4 * sampling.top_logprobs)}"
        )


def check_route_frames(group: Group, limits: Limits, routing: Routing) -> None:
    """Check that the routes of a sample, and of the prompt, fit into the frames of a message. Raises ValueError."""
    if limits.max_frame_bytes < m.ROUTES_FRAME_BYTES:
        raise ValueError(
            f"routed_experts=True: routes are sent in frames of {m.ROUTES_FRAME_BYTES} bytes, Limits.max_frame_bytes is "
            f"{limits.max_frame_bytes}; raise it"
        )
    in_frame, frames = positions_per_frame(routing.bytes_per_token), limits.max_frames - m.OTHER_FRAMES
    prompt, tokens = (-(-positions // in_frame) for positions in (len(group.prompt), group.sampling.max_tokens))
    if prompt + tokens > frames:
        raise ValueError(
            f"routed_experts=True: {routing.bytes_per_token} bytes for each of {len(group.prompt)} prompt tokens and "
            f"max_tokens={group.sampling.max_tokens} do not fit into {max(0, frames)} frames of {m.ROUTES_FRAME_BYTES} bytes "
            "(Limits.max_frames); lower max_tokens, or raise the limit"
        )


def check_room(session: Session, group_id: str, n: int, limits: Limits, max_outbox_bytes: int) -> None:
    """Check that a session may have a new group of `n` samples. Raises Busy, LimitExceeded."""
    if session.unacked_bytes > max_outbox_bytes:
        raise Busy(f"{session.unacked_bytes} bytes of samples wait to be read; read them and submit again", group_id)
    if len(session.groups) >= limits.max_groups_per_client:
        raise LimitExceeded(
            f"{len(session.groups)} groups are live (Limits.max_groups_per_client): wait until one ends", group_id
        )
    if session.samples + n > limits.max_samples_per_client:
        raise LimitExceeded(
            f"{session.samples} samples are live and {n} more requested: at most {limits.max_samples_per_client} "
            "(Limits.max_samples_per_client); wait until some end",
            group_id,
        )


def welcome(
    hello: m.Hello, session: Session, engine: EngineLike, incarnation: str, starts: int, served_model_name: str = ""
) -> m.Welcome:
    """Make the answer to a Hello: the model, the limits, and which groups of the client the service has."""
    return m.Welcome(
        protocol=m.PROTOCOL,
        hello=hello.number,
        incarnation=incarnation,
        model=engine.model.name,
        served_model_name=served_model_name,
        vocab_size=engine.vocab_size,
        context=engine.context,
        eos_token_ids=tuple(sorted(engine.model.eos_token_ids)),
        version=engine.version,
        digest=engine.weights.digest,
        limits=engine.limits,
        capabilities=(m.DIGESTS, *capabilities(engine.model.device)),
        arithmetic=engine.arithmetic,
        configuration=engine.configuration,
        tokenizer=engine.tokenizer,
        block_size=engine.block_size,
        kv_dtype=engine.kv_dtype,
        starts=starts,
        groups=m.digests(held.digest for held in session.groups.values()),
        routing=engine.routing,
    )
