"""Plans as tests see them: sent as bytes, and read as rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.plan import Plan
from engine.scheduler import Scheduler


class PlanRow(NamedTuple):
    """A row of a plan, with the child that the scheduler made it for."""

    group: str
    child: int
    start: int
    count: int
    samples: int


def rows(scheduler: Scheduler, plan: Plan) -> list[PlanRow]:
    """The rows of a plan that is not committed, in order."""
    numbers = zip(plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True)
    children = [(seq.state.group.id, seq.index) for seq in scheduler.sequences_of(plan)]
    return [PlanRow(*child, *row) for child, row in zip(children, numbers, strict=True)]


def encoded(plan: Plan) -> bytes:
    """A plan as msgpack. Raises TypeError for whatever is neither a value of msgpack nor an array."""
    return msgspec.msgpack.encode(plan, enc_hook=_array_fields)


def decoded(data: bytes) -> Plan:
    return msgspec.msgpack.decode(data, type=Plan, dec_hook=_array)


def sent(plan: Plan) -> Plan:
    """A plan as another process gets it."""
    return decoded(encoded(plan))


def _array_fields(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a plan holds a {type(value).__name__}")
    return np.lib.format.dtype_to_descr(value.dtype), value.shape, value.tobytes()


def _array(kind: Any, fields: Any) -> Any:
    assert kind is np.ndarray
    descr, shape, data = fields
    dtype = np.dtype(descr if isinstance(descr, str) else [tuple(field) for field in descr])
    return np.frombuffer(data, dtype).reshape(shape).copy()
