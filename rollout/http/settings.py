"""Options and limits of the gateway."""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout.http.access import LOOPBACK, check_names, normalized

Overlong = Literal["refuse", "empty"]
MIN_TOKEN = 16
"""characters of an access token"""


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times that bound requests. A request over a limit is refused; nothing is clamped."""

    max_body_bytes: int = 32 << 20
    """of one request"""
    max_body_structure: int = 1 << 16
    """arrays, objects, keys, fractions and long numbers in the JSON of one request: they take most of the time to decode it"""
    max_body_values: int = 1 << 21
    """values in the JSON of one request, such as token ids"""
    max_buffered_bytes: int = 256 << 20
    """of all bodies being read, and of all prompts waiting to be tokenized"""
    max_connections: int = 4096
    max_head_bytes: int = 65_536
    """request line and headers"""
    max_prompts: int = 4096
    """of one request"""
    max_samples: int = 16_384
    """of one request: prompts × n"""
    max_groups: int = 65_536
    """unfinished groups of all requests"""
    stream_every: int = 4
    """tokens of a child per event of a stream"""
    max_waiting_chunks: int = 256
    """of one stream, not yet read by its client; later tokens come with the finished sample"""
    max_joined: int = 64
    """children of a group made of equal requests: a fleet runs a group on one replica"""
    join_quiet_s: float = 0.002
    """time without a new request after which equal requests are sent as one group"""
    join_wait_s: float = 0.05
    """maximum delay of a request that waits for equal ones"""
    prompt_processes: int = 2
    """maximum number of processes that render chat templates and tokenize"""
    prompt_timeout_s: float = 20.0
    """for rendering and tokenizing one prompt"""
    prompt_memory_bytes: int = 1 << 30
    """that a prompt process may allocate"""
    head_timeout_s: float = 10.0
    """from a new connection, or the first byte of a request, to the end of the head"""
    body_timeout_s: float = 30.0
    """from the end of the head to the last byte of the body"""
    idle_timeout_s: float = 75.0
    """of a connection between two requests"""
    probe_interval_s: float = 0.25
    """between checks of a client that has closed its sending side"""
    status_age_s: float = 0.25
    """maximum age of a service status that is reused"""
    grace_s: float = 10.0
    """for requests to finish after SIGTERM"""
    abort_grace_s: float = 10.0
    """for aborted requests to return after `grace_s`"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, access and model names of a gateway."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 = a free one"""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    """for pause, weights and sleep; None = the main port"""
    token: str | None = None
    """required in `Authorization: Bearer`; mandatory for any address but loopback"""
    allowed_hosts: tuple[str, ...] = ()
    """additional names accepted in `Host`"""
    names: tuple[str, ...] = ()
    """of the model; () = the name that the service reports"""
    overlong: Overlong = "refuse"
    """result of a prompt that leaves no room for `max_tokens`. "refuse": 400, as vLLM. "empty": as many tokens as fit, possibly
    none, with finish_reason "length"; TRL's worker retries a 400 for minutes"""
    request_log: bool = True
    """log a line per request"""
    limits: RequestLimits = RequestLimits()

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid address, and for one that other machines can reach without a token."""
        for name, port in (("--port", self.port), ("--admin-port", self.admin_port or 0)):
            if not 0 <= port <= 65_535:
                raise ValueError(f"{name} {port}: must be 1 to 65535, or 0 for a free one")
        check_names(self.allowed_hosts)
        for host in (self.host, *([self.admin_host] if self.admin_port is not None else [])):
            if host not in LOOPBACK and self.token is None:
                raise ValueError(f"{host} is open to other machines: give --token-file, or listen at 127.0.0.1")
        if self.token is not None and not (len(self.token) >= MIN_TOKEN and self.token.isascii() and self.token.isprintable()):
            raise ValueError(f"the token must be at least {MIN_TOKEN} printable ASCII characters")

    def hosts(self) -> frozenset[str] | None:
        """Return the names accepted in `Host`; None = any. Beyond loopback every request needs the token, which no web page
        has, and pods, services and proxies use names that this process cannot know."""
        bound = {self.host} if self.admin_port is None else {self.host, self.admin_host}
        if not bound <= LOOPBACK and not self.allowed_hosts:
            return None
        return frozenset(map(normalized, {*LOOPBACK, *bound, *self.allowed_hosts}))
