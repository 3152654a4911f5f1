"""What only some clients use, imported when one of them does. No other file of the client says where it is.

refresh ──→ transport.weights.sending                the first weights that are sent
lora                                                 the first adapter
proofs ──→ replaying ──→ verification ──→ receipts   the first receipt, verification or replay
memo, memo_offline                                   a client with a memo
token_text                                           the first text of a sample
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.client.session import ClientSession
from rollout.client.submission import TokenIds
from rollout.engine.values import KVPolicy, Sample, Sampling
from rollout.transport.sockets import ClientTransport
from rollout.transport.weights import Via

if TYPE_CHECKING:
    from rollout.client.lora import Adapters, AdapterSource
    from rollout.client.memo import Memo
    from rollout.client.receipts import Receipt
    from rollout.client.refresh import NamedTensors, RefreshHandle, WeightSender
    from rollout.client.replaying import Change, Replay
    from rollout.client.token_text import TokenText
    from rollout.client.verification import GroupCheck


def open_memo(folder: Path, gib: float) -> Memo:
    """Open a memo. Raises ValueError, OSError."""
    from rollout.client.memo import Memo

    return Memo(folder, gib)


def offline_end(memo: Memo) -> ClientTransport:
    """Return the end of a connection to the recorded service. Raises ValueError if none was recorded."""
    from rollout.client.memo_offline import OfflineEnd

    return OfflineEnd(memo)


def token_text(tokenizer: Any) -> TokenText:
    """Return what makes text of the tokens of a tokenizer of transformers."""
    from rollout.client.token_text import TokenText

    return TokenText(tokenizer)


class ClientParts:
    """The optional parts of one client. Thread-safe.

    Args:
        refresh_host: an address of this machine that the service can reach; None = the one by which this client reaches it."""

    def __init__(self, session: ClientSession, refresh_host: str | None) -> None:
        self._session, self._host = session, refresh_host
        self._lock = threading.Lock()
        """held while a part is made"""
        self._sender: WeightSender | None = None
        self._adapters: Adapters | None = None

    def start_refresh(
        self, named_tensors: NamedTensors, version: int | None, kv: KVPolicy, partial: bool, via: Via, timeout: float
    ) -> RefreshHandle:
        """Read tensors and begin to send them. As `RolloutClient.refresh_async`."""
        from rollout.client.refresh import RefreshRequest

        return self._sending().start(named_tensors, RefreshRequest(version, kv, partial), via, timeout)

    def start_lora(
        self,
        adapter: AdapterSource,
        scale: float,
        base: str | None,
        version: int | None,
        kv: KVPolicy,
        via: Via,
        timeout: float,
    ) -> RefreshHandle:
        """Read an adapter and begin to send it. As `RolloutClient.refresh_lora`."""
        from rollout.client.lora import Adapters
        from rollout.client.refresh import RefreshRequest

        with self._lock:
            adapters = self._adapters = self._adapters or Adapters()
        pairs, read = adapters.read(adapter, scale, base)
        return self._sending().start(pairs, RefreshRequest(version, kv, False, read), via, timeout)

    def receipt(self, sample: Sample, prompt: TokenIds, sampling: Sampling) -> Receipt:
        """Make the receipt of a sample. Raises InvalidRequest."""
        from rollout.client import proofs

        return proofs.receipt(self._session, sample, prompt, sampling)

    def checks(
        self,
        groups: Sequence[Sequence[Sample]],
        prompts: Sequence[TokenIds],
        sampling: Sampling | Sequence[Sampling],
        receipts: Sequence[Sequence[Receipt]] | None,
    ) -> list[GroupCheck]:
        """Make the checks of groups of samples. Raises InvalidRequest."""
        from rollout.client import proofs

        return proofs.checks(self._session, groups, prompts, sampling, receipts)

    def replaying(
        self,
        receipts: Sequence[Receipt],
        prompts: Sequence[TokenIds],
        known: Iterable[int],
        ends: Sequence[tuple[int, str]] | None,
        change: Change | None,
    ) -> Replay:
        """Make the replay of receipts. known: versions whose weights were given. Raises InvalidRequest."""
        from rollout.client import proofs

        return proofs.replaying(self._session, receipts, prompts, known, ends, change)

    def close(self) -> None:
        """Free the memory of what sent weights, when no refresh runs."""
        with self._lock:
            sender = self._sender
        if sender is not None:
            sender.close()

    def _sending(self) -> WeightSender:
        """Return what sends weights: one for all refreshes, which it does one after the other."""
        from rollout.client.refresh import WeightSender
        from rollout.transport.weights.group import own_address

        with self._lock:
            if self._sender is None:
                session, memo = self._session, self._session.memo
                observer = None
                if memo is not None and not session.offline:
                    from rollout.client.memo_offline import RefreshRecorder

                    observer = RefreshRecorder(memo)
                self._sender = WeightSender(session.link, self._host or own_address(session.address), observer)
            return self._sender
