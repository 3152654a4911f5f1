"""The settings of a client: one value, and the keywords that make one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, TypedDict

import msgspec

from rollout.client.connection import LinkTiming
from rollout.engine.values import NearestField, nearest
from rollout.transport.sockets import ClientTransport


class ClientConfig(msgspec.Struct, metaclass=NearestField, frozen=True, kw_only=True):
    """Settings of a client, given as `RolloutClient(address, ClientConfig(name="trainer"))` or as keywords,
    `RolloutClient(address, name="trainer")`."""

    name: str = ""
    """shown in logs and status"""
    transport: ClientTransport | None = None
    """replaces the socket, e.g. `LoopbackService().connect()`"""
    connect_timeout_s: float = 10.0
    """how long the constructor waits for the service, before it raises ServiceLost"""
    link_timeout_s: float = 4.0
    """seconds without a connection after which open groups and calls fail with ServiceLost. A call made without a connection
    waits as long; calls made during that wait share its deadline. A connection that is restored sooner loses nothing. A stopped
    process is noticed 4 s before this clock starts"""
    stall_timeout_s: float = 300.0
    """seconds without a message from a connected service after which open groups fail with ServiceLost. A single engine step
    may take minutes"""
    require_version: int = 0
    """oldest weights to sample from. A service with older ones, e.g. after a restart, refuses groups of this client with
    StaleWeights. It may be set later, e.g. to the version that `refresh` returned; then the service also refuses groups if
    other weights have that version, as after a restart without a journal"""
    refresh_host: str | None = None
    """an address of this machine that the service can reach, for refreshes via gloo and nccl; None = the one by which this
    client reaches the service"""
    budget: int | None = None
    """maximum tokens of this client in flight: the prompts of its groups that are sent and have not ended, and `max_tokens` of
    each of their children whose sample has not arrived. Groups over the budget wait in the client, higher priority first, then
    in order; they start under the weights that are live then. None = only the service's limits. `submit` refuses a group that
    exceeds the budget alone"""
    restart_timeout_s: float = 300.0
    """replaces `link_timeout_s`, if longer, with `resubmit` or if the service has a journal"""
    resubmit: bool = False
    """submit open groups again, with the same seeds, to a service that restarted without them, once its weights are as new as
    before. Otherwise they fail with ServiceRestarted, as other calls do"""
    tokenizer: Any = None
    """for prompts of text and for `decode`: a transformers tokenizer, or where to load one from: a folder, a hub id or smollm2.
    None = from the service's model, which must then be on this host. Loaded when it is first needed"""
    memo: str | os.PathLike[str] | None = None
    """a folder in which groups with a seed are stored, and from which they are answered when all that decides their samples is
    the same (docs/memo.md). Without address and transport, the client needs no service: it answers what is in the folder, and
    other groups fail. Raises ValueError for a folder that is another user's, or is neither empty nor a memo"""
    memo_gib: float = 50.0
    """size of that folder; the answers that were used longest ago are deleted first"""
    timing: LinkTiming | None = None
    """further intervals of the connection; the timeouts above replace its own"""
    clock: Callable[[], float] = time.monotonic
    """seconds, as time.monotonic"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field."""
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget={self.budget}: must be None (no bound) or a positive number of tokens")

    @classmethod
    def of(cls, config: Self | None, fields: Mapping[str, Any]) -> Self:
        """Return a configuration with some fields replaced; None: the defaults. Raises TypeError naming the nearest field for
        one that does not exist, ValueError for a value out of range."""
        known = ("address", *cls.__struct_fields__)
        for name in fields:
            if name not in cls.__struct_fields__:
                raise TypeError(f"a client has no argument {name!r}; {nearest(name, known)}")
        return msgspec.structs.replace(cls() if config is None else config, **fields)

    @property
    def intervals(self) -> LinkTiming:
        """Return the intervals of the connection, with the timeouts that are fields here."""
        timing = LinkTiming() if self.timing is None else self.timing
        return timing._replace(link_s=self.link_timeout_s, stall_s=self.stall_timeout_s, restart_s=self.restart_timeout_s)


class ClientFields(TypedDict, total=False):
    """The fields of `ClientConfig` as keywords, for type checkers."""

    name: str
    transport: ClientTransport | None
    connect_timeout_s: float
    link_timeout_s: float
    stall_timeout_s: float
    require_version: int
    refresh_host: str | None
    budget: int | None
    restart_timeout_s: float
    resubmit: bool
    tokenizer: Any
    memo: str | os.PathLike[str] | None
    memo_gib: float
    timing: LinkTiming | None
    clock: Callable[[], float]
