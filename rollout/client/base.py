"""Base class of both clients: the session, the description of the service, and texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rollout.client.config import ClientConfig, ClientFields
from rollout.client.parts import ClientParts, offline_end, open_memo
from rollout.client.session import ClientSession, end_of
from rollout.client.submission import TokenIds
from rollout.client.text import Messages, Prompt, TextCodec
from rollout.engine.values import Sample, Sampling
from rollout.transport.messages import Welcome

if TYPE_CHECKING:
    from rollout.client.memo import Memo
    from rollout.client.receipts import Receipt


class BaseClient:
    """Opens a session, without waiting for the service. The arguments are those of `RolloutClient`."""

    def __init__(self, address: str | None = None, config: ClientConfig | None = None, **fields: Unpack[ClientFields]) -> None:
        self._config = config = ClientConfig.of(config, fields)
        memo = None if config.memo is None else open_memo(Path(config.memo), config.memo_gib)
        try:
            offline = memo is not None and address is None and config.transport is None
            end = offline_end(memo) if memo is not None and offline else end_of(address, config.transport)
            self._session = ClientSession(end, config, memo, offline)
        except BaseException:
            if memo is not None:
                memo.close()
            raise
        self._parts = ClientParts(self._session, config.refresh_host)
        self._text = TextCodec(config.tokenizer, lambda: self.info.model)

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
