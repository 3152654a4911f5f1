"""Rules for weight versions: they only grow, also over restarts, and each version has one digest."""

from __future__ import annotations

from rollout.engine.values import Served
from rollout.engine.weights.tensors import InvalidWeights

VERSION_LIMIT = 2**63


def next_version(live: int, before: Served, asked: int | None) -> int:
    """Return the version of the next weights. Raises InvalidWeights.

    Args:
        before: newest weights served before a restart.
        asked: version to use; None: one more than all versions so far.
    """
    version = max(live, before.version) + 1 if asked is None else asked
    if not live < version < VERSION_LIMIT:
        raise InvalidWeights(f"version {version} is not above the live one, {live}: versions only grow")
    if version < before.version:
        raise InvalidWeights(
            f"version {version}: version {before.version} was served before the restart, and versions only grow. Pass a higher "
            f"version or none; or pass version {before.version} with the same weights"
        )
    return version


def check_named(weights: Served, before: Served) -> None:
    """Raises InvalidWeights if a version that was served before a restart now has other weights."""
    if weights.differ(before):
        raise InvalidWeights(
            f"version {weights.version} was served before the restart with other weights (digest {before.digest:.12}…, now "
            f"{weights.digest:.12}…): pass a higher version or none"
        )
