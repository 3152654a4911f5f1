"""Why a measurement has no result."""

from __future__ import annotations


class BenchFailed(RuntimeError):
    """A run did not do the work it was given, so its speed means nothing."""


class PeerFailed(BenchFailed):
    """A peer did not start, ended, or said what is no result; its own words are on standard error."""


class BoundBroken(BenchFailed):
    """A run was faster than what was measured as this machine's bound, so that one of the two measurements is wrong."""
