"""What a replica of verl does, without Ray and without verl: a service, a client of it, and verl's words for both.

generate ──> Sampling ──> service ──> sample ──> token ids, log-probs, steps of the trainer
abort_all_requests ──> pause       resume_generation ──> resume
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from rollout.client.api import RolloutClient
from rollout.client.handle import Handle
from rollout.config import Config
from rollout.engine.config import EngineConfig
from rollout.engine.values import KVPolicy, Sample, Sampling, Tag
from rollout.transport.errors import GroupFailed, InvalidRequest

TAGS: dict[str, Tag] = {"weights": "weights", "kv_cache": "kv"}
"""verl's names of what sleeps"""
IGNORED = {"logprobs", "max_tokens", "max_new_tokens"}
"""of verl's sampling parameters, those that are served otherwise: log-probs always come"""


class VerlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine_kwargs.rollout` of verl's configuration."""

    address: str | None = None
    """of a service that runs already; None = start one"""
    python: str | None = None
    """interpreter of the environment that the service runs in; None = this one's"""
    engine: EngineConfig = EngineConfig()
    """the table [engine] of a service that is started; verl's own keys fill in what is not said here"""
    kv: KVPolicy = "keep"
    """what a refresh does with KV of what runs"""
    start_timeout_s: float = 600.0
    routed_experts: bool = False
    """return routes of experts: verl's `rollout.enable_rollout_routing_replay`"""


class VerlOutput(msgspec.Struct, frozen=True):
    """What verl's TokenOutput is made of."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]
    routed_experts: np.ndarray | None = None
    """[prompt + response - 1, decoder layers, chosen]: slot l is decoder layer l, 0 in layers without experts"""


class VerlService:
    """A service and a client of it.

    Args:
        options: `engine_kwargs.rollout`.
        model: folder or hub id, of a service that is started.
        response_length, prompt_length: verl's, for requests without max_tokens.
        max_model_len: verl's bound of prompt and response; None = the model's.
    """

    def __init__(
        self, options: VerlOptions, model: str, response_length: int, prompt_length: int, max_model_len: int | None = None
    ) -> None:
        self._opened = ExitStack()
        self._response, self._prompt, self.kv = response_length, prompt_length, options.kv
        address = options.address
        if address is None:
            from rollout.process import service_process

            kept = options.engine.routed_experts or options.routed_experts
            config = Config(engine=msgspec.structs.replace(options.engine, model=model, routed_experts=kept))
            service = service_process(config, start_timeout_s=options.start_timeout_s, python=options.python)
            address = self._opened.enter_context(service).endpoint
        self.address = address
        self.client = self._opened.enter_context(RolloutClient(address, name="verl"))
        self._routed = options.routed_experts
        if self._routed and self.client.info.routing is None:
            raise ValueError(
                f"enable_rollout_routing_replay: the service at {address} keeps no routes; start it with routed_experts"
            )
        context = self.client.info.context
        self._context = context if max_model_len is None else min(context, max_model_len)
        self._steps: list[tuple[int, int]] = [(self.client.info.version, 0)]
        """(version of the weights, the trainer's step), ascending"""
        self._rejects = False
        self._running: dict[str, Handle] = {}

    def close(self) -> None:
        """End the client, and the service if it was started here."""
        self._opened.close()

    def note(self, version: int, step: int) -> None:
        """Note which step of the trainer a version of the weights is, before it can have made a token."""
        self._steps = [pair for pair in self._steps if pair[0] < version] + [(version, step)]

    def version(self) -> int:
        """Ask for the version of the live weights."""
        return int(self.client.weights_status()["version"])

    @property
    def step(self) -> int:
        """Of the newest weights."""
        return self._steps[-1][1]

    def step_of(self, version: int) -> int:
        """Return the trainer's step of a version; of one that was not noted, that of the last one before it."""
        at = bisect_right(self._steps, version, key=lambda pair: pair[0]) - 1
        return self._steps[max(0, at)][1]

    async def generate(
        self, prompt: Sequence[int], params: Mapping[str, Any], request_id: str, priority: int = 0
    ) -> VerlOutput:
        """Sample one child. Raises InvalidRequest for parameters that are not served, what the service refuses, GroupFailed."""
        if self._rejects:
            return VerlOutput([], [], "aborted", {"global_steps": self.step})
        sampling = self.sampling_of(params, len(prompt), priority)
        handle = self.client.submit(list(prompt), sampling)
        self._running[request_id] = handle
        try:
            sample = await ended(handle)
        finally:
            del self._running[request_id]
        if sample.finish_reason == "error":
            raise GroupFailed(sample.error or "the service failed on this request")
        return self._told(sample)

    def sampling_of(self, params: Mapping[str, Any], prompt_tokens: int, priority: int = 0) -> Sampling:
        """Turn verl's sampling parameters into ours. Raises InvalidRequest naming what cannot be served."""
        room = self._context - prompt_tokens
        if room < 1:
            raise InvalidRequest(f"a prompt of {prompt_tokens} tokens leaves no room in a context of {self._context}")
        wanted = params.get("max_tokens", params.get("max_new_tokens"))
        if wanted is None:
            wanted = min(self._response, self._prompt + self._response - prompt_tokens)
        ours: dict[str, Any] = {"max_tokens": max(1, min(int(wanted), room)), "priority": -priority}
        ours["routed_experts"] = self._routed
        known = set(Sampling.__struct_fields__)
        for name, value in params.items():
            if name in IGNORED or value is None:
                continue
            if name == "top_k":
                value = max(0, value)  # -1 is off
            if name == "n" and value != 1:
                raise InvalidRequest(f"n={value!r}: a request is one response; send as many requests")
            if name not in known:
                raise InvalidRequest(f"{name}={value!r}: the service does not have this sampling parameter; leave it out")
            ours[name] = (value,) if name == "stop" and isinstance(value, str) else value
        try:
            return msgspec.convert(ours, Sampling)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"sampling parameters: {error}") from None

    def _told(self, sample: Sample) -> VerlOutput:
        steps = [self.step_of(version) for _, version in sample.weight_versions] or [self.step]
        starts = [start for start, _ in sample.weight_versions]
        fields = {
            "global_steps": steps[-1],
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
            "weight_versions": sample.weight_versions,
            "global_steps_spans": list(zip(starts, steps, strict=False)),
        }
        reason = "aborted" if sample.finish_reason in ("aborted", "cut", "deadline", "stale") else "completed"
        routing, routes = self.client.info.routing, sample.routes
        whole = None if routing is None or routes is None else routing.by_decoder_layer(routes)
        return VerlOutput(sample.token_ids.tolist(), sample.logprobs.tolist(), reason, fields, whole)

    def pause(self, reject: bool) -> int:
        """Stop between two steps; what runs goes on after `resume`, over a refresh as well. With `reject` it is ended instead,
        and what comes meanwhile is sent back as aborted. Returns how many requests that ends."""
        count = len(self._running) if reject else 0
        self._rejects = reject
        if reject:
            self.client.abort_all()
        self.client.pause()
        return count

    def resume(self) -> None:
        """Undo `pause`."""
        self._rejects = False
        self.client.resume()

    def abort(self, request_id: str) -> bool:
        """End one request; it comes back as aborted. Returns whether it ran."""
        handle = self._running.get(request_id)
        if handle is not None:
            handle.cancel()
        return handle is not None

    def wake(self, tags: Sequence[str] | None) -> None:
        """Wake what sleeps of `tags` (weights, kv_cache); None = all. Nothing to do for what is awake."""
        wanted = {TAGS[tag] for tag in tags} if tags is not None else set(TAGS.values())
        asleep = set(self.client.status()["asleep"])
        if wanted & asleep:
            self.client.wake(tags=sorted(wanted & asleep, reverse=True))

    def sleep(self, level: int) -> None:
        """Give memory back; nothing to do while asleep. Level 2 drops the weights, which the next push brings."""
        if not self.client.status()["asleep"]:
            self.client.sleep(level)


def ended(handle: Handle) -> asyncio.Future[Sample]:
    """Return a future of the running loop with the only sample of a group, or why it failed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Sample] = loop.create_future()

    def settle(sample: Sample | None) -> None:
        if future.cancelled():
            handle.cancel()
        elif sample is not None:
            future.set_result(sample)
        else:
            try:
                handle.result(0)
            except Exception as error:
                future.set_exception(error)

    def tell(_: Handle, sample: Sample | None) -> None:
        loop.call_soon_threadsafe(settle, sample)

    handle.listen(tell)
    future.add_done_callback(lambda done: handle.cancel() if done.cancelled() else None)
    return future
