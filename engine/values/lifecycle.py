"""Modes of an engine, and what ends its process."""

from __future__ import annotations

import enum
from typing import Literal

Tag = Literal["weights", "kv"]
"""a part of an engine's memory that sleep releases and wake can allocate by itself"""


class Mode(enum.Enum):
    """Lifecycle state of an engine."""

    RUNNING = "running"
    DRAINING = "draining"
    """started groups run to their end, no others start"""
    PAUSED = "paused"
    """no steps; submitted groups wait"""
    ASLEEP = "asleep"
    """paused, with memory released"""
    WITHOUT_WEIGHTS = "without weights"
    """awake after a sleep that dropped the weights, until a refresh of all tensors"""
    TORN = "torn"
    """the undo of a failed refresh failed too: nothing is sampled any more"""

    @property
    def rests(self) -> bool:
        """Whether the engine plans no steps until another mode is requested."""
        return self in (Mode.PAUSED, Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)


class DeviceLost(RuntimeError):
    """The device fails every call: the process must end, so that another one takes over its groups."""


class RankLost(DeviceLost):
    """Another rank of the replica has ended, did not come in time, or is out of step: this one must end, too."""
