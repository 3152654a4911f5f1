"""Chooses a transport for via="auto"."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from rollout.transport.errors import SourceUnreachable
from rollout.transport.weights.ends import Sender, WeightTransport
from rollout.transport.weights.inline import Inline
from rollout.transport.weights.shm import Shm
from rollout.transport.weights.tensors import Tensors


class Automatic(WeightTransport):
    """Sends a folder by `files`, and tensors by the first transport that both ends have (`choose`). If the service cannot read
    the source, the next one is tried; the last one is `inline`, which needs only the connection.

    Args:
        on_gpus: transports to try first for tensors that are all on GPUs.
        shm: for other tensors, and for those on GPUs whose memory the service cannot open."""

    via = "auto"

    def __init__(self, files: WeightTransport, on_gpus: list[WeightTransport], shm: Shm, inline: Inline) -> None:
        self._files = files
        self._on_gpus = on_gpus
        self._shm = shm
        self._inline = inline

    def offer_folder(self, folder: Path) -> Sender:
        return self._files.offer_folder(folder)

    def offer_tensors(self, tensors: Tensors, capabilities: Collection[str]) -> Sender:
        candidates = [*(self._on_gpus if tensors.on_gpus else []), self._shm, self._inline]
        chosen, sender = choose(candidates, tensors, capabilities)
        sender.fallback = partial(self._after, capabilities) if chosen in self._on_gpus else self._inline.after
        return sender

    def _after(self, capabilities: Collection[str], other: Sender) -> Sender:
        try:
            sender = self._shm.after(other, capabilities)
        except SourceUnreachable:
            return self._inline.after(other)
        sender.fallback = self._inline.after
        return sender


def choose(
    candidates: list[WeightTransport], tensors: Tensors, capabilities: Collection[str]
) -> tuple[WeightTransport, Sender]:
    """Offer tensors by the first transport that both ends have. Returns it and its sender, whose `reason` says why the earlier
    ones failed. Raises SourceUnreachable if all fail."""
    failures: list[str] = []
    for candidate in candidates:
        try:
            sender = candidate.offer_tensors(tensors, capabilities)
        except SourceUnreachable as error:
            failures.append(f"{candidate.via}: {error.message}")
        else:
            sender.reason = "; ".join(failures) or "the first that both ends have"
            return candidate, sender
    raise SourceUnreachable("; ".join(failures))
