"""From what a trainer gives to a group that can be sent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from engine.types import Limits, Sampling
from rollout.client.handle import Handle
from transport.errors import InvalidRequest, LimitExceeded
from transport.frames import Frame, pack
from transport.messages import Submit, digest

Prompt = Sequence[int] | np.ndarray
"""[prompt_tokens] token ids"""


def sendable(group_id: str, prompt: Prompt, sampling: Sampling, *, serial: int, require_version: int, limits: Limits) -> Handle:
    """Make the handle of a group, with its frames. Checks types and sizes, without which it could not even be sent; values are
    the service's to check.

    Raises InvalidRequest, LimitExceeded."""
    tokens = token_array(prompt)
    submit = Submit(group_id, tokens, plain(sampling), serial, require_version)
    try:
        check_types(submit)
        frames, content = pack(submit), digest(submit)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"this group cannot be sent: {error}") from None
    check_sizes(submit, frames, limits)
    return Handle(group_id, submit.sampling.n, len(tokens), frames, content)


def plain(sampling: Sampling) -> Sampling:
    """Turn numpy's numbers into Python's. Raises InvalidRequest for anything that is no Sampling."""
    if not isinstance(sampling, Sampling):
        raise InvalidRequest(f"sampling is a {type(sampling).__name__}: give Sampling(n=…, max_tokens=…, …)")
    of_numpy = {name: value for name, value in msgspec.structs.asdict(sampling).items() if isinstance(value, np.generic)}
    return msgspec.structs.replace(sampling, **{name: value.item() for name, value in of_numpy.items()})


def check_types(submit: Submit) -> None:
    """Check field types. Raises TypeError, ValueError or OverflowError for one that the service would decode to another."""
    for value, kind in ((submit.group_id, str), (submit.require_version, int), (submit.sampling, Sampling)):
        msgspec.convert(msgspec.to_builtins(value), kind)


def check_sizes(submit: Submit, frames: list[Frame], limits: Limits) -> None:
    """Check sizes. Raises LimitExceeded naming the limit of the service."""
    for what, size, most, name in (
        ("a group id", len(submit.group_id.encode()), limits.max_id_bytes, "max_id_bytes"),
        ("a header", len(frames[0]), limits.max_header_bytes, "max_header_bytes"),
        ("a prompt", submit.prompt.nbytes, limits.max_frame_bytes, "max_frame_bytes"),
    ):
        if size > most:
            raise LimitExceeded(f"{what} of {size} bytes: at most {most} (Limits.{name})")


def token_array(prompt: Prompt) -> np.ndarray:
    """Copy token ids to [prompt_tokens] int32. Raises InvalidRequest for anything that is not integers of 32 bits, in one
    dimension."""
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"prompt: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"prompt is {array.dtype} of shape {array.shape}: must be integer token ids [prompt_tokens]")
    low, high = int(array.min()), int(array.max())
    if low < -(2**31) or high >= 2**31:
        raise InvalidRequest(f"prompt holds {low if low < -(2**31) else high}: token ids are 32-bit integers")
    return np.array(array, np.int32)
