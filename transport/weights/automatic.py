"""The way that is taken where nobody names one."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from transport.errors import SourceUnreachable
from transport.weights.ends import Sender, WeightTransport
from transport.weights.inline import Inline
from transport.weights.shm import Shm
from transport.weights.tensors import Tensors


class Automatic(WeightTransport):
    """Sends a folder by `files`, and tensors as `choose` says. Where the service turns out not to see what is offered, tensors
    travel by the next way that both ends have; at last by `inline`, which needs no more than the connection.

    Args:
        on_gpus: ways to try first for tensors that are all on GPUs.
        shm: the way to try for all tensors, and for those on GPUs whose memory the service cannot open."""

    via = "auto"

    def __init__(self, files: WeightTransport, on_gpus: list[WeightTransport], shm: Shm, inline: Inline) -> None:
        self._files = files
        self._on_gpus = on_gpus
        self._shm = shm
        self._inline = inline

    def offer_folder(self, folder: Path) -> Sender:
        return self._files.offer_folder(folder)

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        ways = [*(self._on_gpus if tensors.on_gpus else []), self._shm, self._inline]
        way, sender = choose(ways, tensors, capabilities)
        sender.instead = partial(self._after, capabilities) if way in self._on_gpus else self._inline.after
        return sender

    def _after(self, capabilities: Collection[str], other: Sender) -> Sender:
        try:
            sender = self._shm.after(other, capabilities)
        except SourceUnreachable:
            return self._inline.after(other)
        sender.instead = self._inline.after
        return sender


def choose(ways: list[WeightTransport], tensors: Tensors, capabilities: Collection[str]) -> tuple[WeightTransport, Sender]:
    """Offer tensors by the first way that both ends have, and say which that is. The sender's `reason` says what is wrong with
    those before it. Raises SourceUnreachable if none is left."""
    failures: list[str] = []
    for way in ways:
        try:
            sender = way.offer_tensors(tensors, capabilities)
        except SourceUnreachable as error:
            failures.append(f"{way.via}: {error.message}")
        else:
            sender.reason = "; ".join(failures) or "the first that both ends have"
            return way, sender
    raise SourceUnreachable("; ".join(failures))
