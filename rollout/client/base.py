"""Base class of both clients: the session, the description of the service, and texts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.client.connection import LinkTiming
from rollout.client.parts import ClientParts, offline_end, open_memo
from rollout.client.session import ClientSession, end_of
from rollout.client.submission import TokenIds
from rollout.client.text import Messages, Prompt, TextCodec
from rollout.engine.values import Sample, Sampling
from rollout.transport.messages import Welcome
from rollout.transport.sockets import ClientTransport

if TYPE_CHECKING:
    from rollout.client.memo import Memo
    from rollout.client.receipts import Receipt

MEMO_GIB = 50.0
"""bound of the folder of a memo"""


class BaseClient:
    """Opens a session, without waiting for the service. The arguments are those of `RolloutClient`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        transport: ClientTransport | None = None,
        connect_timeout_s: float = 10.0,
        link_timeout_s: float = 4.0,
        stall_timeout_s: float = 300.0,
        require_version: int = 0,
        refresh_host: str | None = None,
        budget: int | None = None,
        restart_timeout_s: float = 300.0,
        resubmit: bool = False,
        tokenizer: Any = None,
        memo: str | os.PathLike[str] | None = None,
        memo_gib: float = MEMO_GIB,
        timing: LinkTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        timing = LinkTiming() if timing is None else timing
        if budget is not None and budget < 1:
            raise ValueError(f"budget={budget}: must be None (no bound) or a positive number of tokens")
        kept = None if memo is None else open_memo(Path(memo), memo_gib)
        offline = kept is not None and address is None and transport is None
        try:
            self._session = ClientSession(
                offline_end(kept) if kept is not None and offline else end_of(address, transport),
                name,
                budget=budget,
                require_version=require_version,
                resubmit=resubmit,
                timing=timing._replace(link_s=link_timeout_s, stall_s=stall_timeout_s, restart_s=restart_timeout_s),
                clock=clock,
                memo=kept,
                offline=offline,
            )
        except BaseException:
            if kept is not None:
                kept.close()
            raise
        self._connect_timeout_s = connect_timeout_s
        self._parts = ClientParts(self._session, refresh_host)
        self._text = TextCodec(tokenizer, lambda: self.info.model)

    def __repr__(self) -> str:
        """Describe the client in one line."""
        return f"{type(self).__name__}({self._session.summary})"

    def _close(self) -> None:
        self._session.close()
        self._parts.close()

    @property
    def info(self) -> Welcome:
        """Return the service's description of itself at the last connection: model, vocab_size, context, eos_token_ids,
        version, limits, incarnation."""
        return self._session.info

    @property
    def require_version(self) -> int:
        """Return the oldest version of the weights to sample from."""
        return self._session.require_version

    @require_version.setter
    def require_version(self, version: int) -> None:
        """Set it, together with the digest that this client has seen for the version."""
        self._session.require_version = version

    @property
    def memo(self) -> Memo | None:
        """Return the memo, whose `status()` counts hits and misses; None: there is none."""
        return self._session.memo

    # receipts

    def receipt(self, sample: Sample, prompt: Prompt, sampling: Sampling) -> Receipt:
        """Return all that a sample of this service is a function of. prompt, sampling: those of its group. Raises
        InvalidRequest for a prompt of another length, and for a sample whose tokens were given."""
        return self._parts.receipt(sample, self._text.ids(prompt), sampling)

    # texts

    @property
    def tokenizer(self) -> Any:
        """Return the transformers tokenizer of the model, loaded at the first use. Raises NoTokenizer."""
        return self._text.tokenizer

    def encode(self, prompt: str | Messages, **template: Any) -> TokenIds:
        """Return the token ids that a prompt has in every call of this client.

        Args:
            prompt: a text, with the special tokens that the model puts at the start, or messages, through the chat template.
            template: arguments of the chat template, e.g. tools=[…] or enable_thinking=False.

        Raises InvalidRequest for messages that the template refuses, NoTokenizer."""
        return self._text.ids(prompt, **template)

    def decode(self, sample: Sample, *, skip_special: bool = True, keep_stop: bool = False) -> str:
        """Return the text of a sample, as the HTTP API does: without special tokens, and without the stop string that ended it
        unless `keep_stop`. Raises NoTokenizer."""
        return self._text.decode(sample, skip_special=skip_special, keep_stop=keep_stop)
