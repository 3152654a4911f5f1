"""Says which tensors a cast to the model's dtype rounds, and by how much: a router's biases 0.001 apart may become equal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

MEASURED = 1 << 18
"""elements of a tensor whose change is measured. Larger ones are matrices, of which the log has the bound"""
LISTED = 16
"""tensors that are named"""


class Rounded(NamedTuple):
    """A tensor that a cast rounds."""

    sent: torch.dtype
    kept: torch.dtype
    most: float | None
    """largest change of a value; None: not measured"""


def loses(sent: torch.dtype, kept: torch.dtype) -> bool:
    """Return whether values of a dtype may be rounded in another one."""
    if sent == kept or not (sent.is_floating_point and kept.is_floating_point):
        return False
    theirs, ours = torch.finfo(sent), torch.finfo(kept)
    return ours.eps > theirs.eps or ours.max < theirs.max or ours.tiny > theirs.tiny


class Roundings:
    """What one load or one refresh rounds, by names of the model's tensors."""

    def __init__(self) -> None:
        self.found: dict[str, Rounded] = {}
        self._launched: list[tuple[str, Rounded, torch.Tensor]] = []
        """measured on a device: [] float64"""

    def add(self, name: str, size: int, sent: torch.Tensor, kept: torch.Tensor) -> None:
        """Note a tensor, or a piece of it, [elements] as sent and as kept. size: elements of the whole tensor."""
        self.launch(name, size, sent, kept)
        self.read()

    def launch(self, name: str, size: int, sent: torch.Tensor, kept: torch.Tensor) -> None:
        """Do the same on a device, which the host does not wait for before `read`."""
        if size > MEASURED:
            self.note(name, sent.dtype, kept.dtype)
        elif sent.numel() and loses(sent.dtype, kept.dtype):
            kind = Rounded(sent.dtype, kept.dtype, None)
            self._launched.append((name, kind, (sent.detach().double() - kept.detach().double()).abs().max()))

    def note(self, name: str, sent: torch.dtype, kept: torch.dtype) -> None:
        """Note a tensor whose change is not measured."""
        if loses(sent, kept):
            self.found[name] = Rounded(sent, kept, None)

    def read(self) -> None:
        """Wait for what was launched."""
        for name, kind, change in self._launched:
            before = self.found.get(name)
            most = max(float(change), 0.0 if before is None else before.most or 0.0)
            if most > 0:
                self.found[name] = kind._replace(most=most)
        self._launched.clear()


class RoundingLog:
    """Logs roundings, unless the same ones were logged before."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def say(self, what: str, found: Mapping[str, Rounded], buffers: frozenset[str]) -> None:
        """Log tensors that were not rounded from these dtypes before. what: the source, such as "refresh". buffers: names of
        those that come first."""
        new = {name: each for name, each in found.items() if self._said.get(name) != (each.sent, each.kept)}
        if not new:
            return
        self._said |= {name: (each.sent, each.kept) for name, each in new.items()}
        log.warning("weights were rounded at=%r tensors=%d names=%r", what, len(new), described(new, buffers))


def described(found: Mapping[str, Rounded], buffers: frozenset[str]) -> str:
    """Return the names of measured tensors, with their largest change, and the bound of the others."""
    measured = sorted(
        ((name, each) for name, each in found.items() if each.most is not None),
        key=lambda pair: (pair[0] not in buffers, -(pair[1].most or 0)),
    )
    said = [f"{name} ({_dtypes(each)}, by up to {each.most:.2g})" for name, each in measured[:LISTED]]
    if len(measured) > LISTED:
        said.append(f"{len(measured) - LISTED} more by up to {max(each.most or 0 for _, each in measured[LISTED:]):.2g}")
    for kind in dict.fromkeys(_dtypes(each) for each in found.values() if each.most is None):
        large = [each for each in found.values() if each.most is None and _dtypes(each) == kind]
        said.append(f"{len(large)} matrices ({kind}, by up to {torch.finfo(large[0].kept).eps / 2:.2g} of each value)")
    return ", ".join(said)


def _dtypes(each: Rounded) -> str:
    return f"{each.sent} to {each.kept}".replace("torch.", "")
