"""Which versions weights may have: they only grow, over restarts as well, and each names one digest."""

from __future__ import annotations

from engine.types import Served
from engine.weights.tensors import InvalidWeights

VERSION_LIMIT = 2**63


def next_version(live: int, before: Served, asked: int | None) -> int:
    """Return the version of the next weights. Raises InvalidWeights.

    Args:
        before: the newest weights that were served before a restart.
        asked: None = above all there were."""
    version = max(live, before.version) + 1 if asked is None else asked
    if not live < version < VERSION_LIMIT:
        raise InvalidWeights(f"version {version} is not above the live one, {live}: versions only grow")
    if version < before.version:
        raise InvalidWeights(
            f"version {version}: version {before.version} was served before the restart, and versions only grow. Give a higher "
            f"one, or none; or version {before.version} with the weights that it was"
        )
    return version


def check_named(weights: Served, before: Served) -> None:
    """Raises InvalidWeights for other weights under the version that was served before a restart."""
    if weights.differ(before):
        raise InvalidWeights(
            f"version {weights.version} was served before the restart with other weights (digest {before.digest:.12}…, these "
            f"have {weights.digest:.12}…): give these a higher one, or none"
        )
