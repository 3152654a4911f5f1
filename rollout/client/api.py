"""The trainer's end. Imports neither torch nor an engine.

with RolloutClient("tcp://127.0.0.1:5655") as client:
    for sample in client.generate([[1, 2, 3], [4, 5]], Sampling(n=8, max_tokens=256)):
        print(sample.group_id, sample.index, sample.token_ids, sample.finish_reason)
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import overload

from engine.types import Group, Limits, PartialSample, Refreshed, Sample, Sampling, Served
from rollout.client.generation import Generation
from rollout.client.handle import Handle, OnChange
from rollout.client.link import Link
from rollout.client.refresh import RefreshHandle, answer
from rollout.client.scoring import score_all, scored_group
from rollout.client.submission import Prompt, Samples, check_budget, group_of, resumption, seeded, sendable
from rollout.client.timeouts import Timeouts
from rollout.client.weights import WeightCalls
from transport.errors import ServiceLost
from transport.messages import DIGESTS, Control, Welcome
from transport.sockets import ClientEnd, ClientTransport
from transport.weights.group import own_address

__all__ = ["PartialSample", "Handle", "RefreshHandle", "Refreshed", "RolloutClient", "Sample", "Sampling"]


class RolloutClient(WeightCalls):
    """Connects to a rollout service. Thread-safe; one background thread does all the talking, heartbeats included, so a trainer
    may be busy for as long as it likes.

    Args:
        address: as `rollout serve` prints it, e.g. tcp://127.0.0.1:5655, or the path of a connection file (`rollout keys add`),
            which has the address and the keys.
        name: for people, in logs and in the status.
        transport: another end instead of a socket, e.g. `LoopbackService().connect()`.
        connect_timeout_s: how long to wait for the service here. ServiceLost after that, saying what to check.
        link_timeout_s: seconds without a connection after which open groups and calls fail with ServiceLost. A call made while
            disconnected waits as long; calls made during that wait share its deadline. A link that heals sooner loses nothing.
            A stopped process is noticed 4 s before that clock starts.
        stall_timeout_s: connected, but the service's loop says nothing for so long (a single engine step may take minutes):
            open groups fail with ServiceLost.
        require_version: oldest weights to sample from. A service with older ones, e.g. after a restart, refuses groups of this
            client with StaleWeights. May be set later, e.g. to what `refresh` returned: then other weights under that version,
            which a service may have that was started again without a journal, are refused as well.
        refresh_host: an address of this machine that the service can reach, where refreshes via gloo and nccl meet it;
            None = the one by which this client reaches the service.
        budget: most tokens of this client in flight: the prompts of its groups that are sent and have not ended, and
            `max_tokens` of each of their children that has not come back. Groups over it wait here, those of a higher priority
            first, then in order; they start under whatever weights are live then. None = no bound but the service's limits.
            A group that is over it alone is refused by `submit`.
        restart_timeout_s: in place of `link_timeout_s`, if longer, with `resubmit` or where the service has a journal.
        resubmit: a service that comes back without its groups gets the open ones again, with the same seeds, once its weights
            are as new as they were. Without it, and for other calls: ServiceRestarted.
    """

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
    ) -> None:
        if budget is not None and budget < 1:
            raise ValueError(f"budget={budget}: must be None (no bound) or a positive number of tokens")
        end = end_of(address, transport)
        self._budget = budget
        self._ids = itertools.count()
        self._serials = itertools.count(1)
        self._required = Served(require_version)
        self._resubmit = resubmit
        patience = Timeouts(link_timeout_s, stall_timeout_s, restart_timeout_s, resubmit)
        link = Link(end, secrets.token_hex(16), name, patience, budget)
        super().__init__(link, refresh_host or own_address(end.address))
        try:
            wait_for_welcome(self._link, end, connect_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> Welcome:
        """Return what the service said of itself when this client last connected: model, vocab_size, context, eos_token_ids,
        version, limits, incarnation."""
        assert self._link.welcome is not None, "the constructor waits for it"
        return self._link.welcome

    @property
    def require_version(self) -> int:
        """Return the oldest version of the weights to sample from."""
        return self._required.version

    @require_version.setter
    def require_version(self, version: int) -> None:
        """Set it; weights that this client has seen under that version are meant, and no others."""
        self._required = Served(version, self._link.seen.digest(version))

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        group_id: str | None = None,
        *,
        indices: Sequence[int] | None = None,
        partials: Sequence[PartialSample] = (),
    ) -> Handle:
        """Send one group; returns at once.

        Args:
            prompt: [prompt_tokens] token ids, as a list of int or an integer array (copied).
            group_id: any text that no live group of this client has; made up if None.
            indices: which of the n children are wanted, ascending; None = all. With a seed, the others may be another
                service's: a child's numbers depend on its own index only.
            partials: children that have tokens already and go on from there; see `resume`.

        Raises InvalidRequest or LimitExceeded for what cannot even be sent. What the service refuses is raised by the handle.
        """
        return self._submit(group_of(self._id(group_id), prompt, sampling, indices, partials))

    @overload
    def resume(self, *, timeout: float = 60.0) -> None: ...

    @overload
    def resume(self, samples: Handle, *, group_id: str | None = None) -> Handle: ...

    @overload
    def resume(
        self, samples: Samples, prompt: Prompt, sampling: Sampling, group_id: str | None = None, *, append: Prompt | None = None
    ) -> Handle: ...

    def resume(
        self,
        samples: Samples | Handle | None = None,
        prompt: Prompt = (),
        sampling: Sampling | None = None,
        group_id: str | None = None,
        *,
        append: Prompt | None = None,
        timeout: float = 60.0,
    ) -> Handle | None:
        """Without samples, undo `pause` and `drain`. With samples, go on with children that were cut short ("cut", "deadline",
        "aborted", "stale"), as a group of their own; returns at once. The samples that come hold all tokens, those from before
        included, and their spans say which weights made which. A child that had its last token comes back at once.

        With the same weights and arithmetic a child comes out equal to the bit to one that was never stopped: by another
        service, after a restart, days later.

        Args:
            samples: unfinished children of one group. Or the handle of a group whose service is gone: the children that have
                not come back go on from what was streamed of them (`Sampling.stream_every`), with the group's own prompt and
                sampling. `finish_after` counts those that have come back, a deadline begins again.
            prompt, sampling: as that group had them. `sampling.seed` may be None; the samples have the seed.
            group_id: as for `submit`.
            append: begin the next turn of a conversation instead: a group of its own behind one sample, however that ended, and
                these tokens. `sampling` is the turn's own, its seed too. KV of the sample is reused (`Sampling.kv_ttl_s`).

        Raises InvalidRequest for children that have ended by themselves, or that are not of one group; otherwise as `submit`.
        """
        if samples is None:
            answer(self._link.request(lambda id: Control(id, "resume")), timeout, "resumption")
            return None
        return self._submit(resumption(self._id(group_id), samples, prompt, sampling, append))

    def _id(self, group_id: str | None) -> str:
        return group_id if group_id is not None else f"#{next(self._ids)}"

    def _submit(self, group: Group, on_change: OnChange | None = None) -> Handle:
        serial, limits, required = next(self._serials), self.info.limits, self._required
        group = seeded(group) if self._resubmit else group
        digest = required.digest if DIGESTS in self.info.capabilities else ""
        handle = sendable(group, serial=serial, require_version=required.version, require_digest=digest, limits=limits)
        check_budget(handle, self._budget)
        handle.on_cancel, handle.on_change = self._link.cancel, on_change
        self._link.submit(handle)
        return handle

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Sample]:
        """Yield samples of all groups as they finish. Groups are sent when the iteration starts; ending it early cancels them.

        Args:
            prompts: one group each.
            sampling: for all of them, or one for each.
            group_ids: one for each; made up if None.
            timeout: seconds between two samples, at most.

        Raises the typed error of the first group that fails (the others are cancelled), RequestTimeout."""
        with Generation(self._submit, self._id) as generation:
            generation.submit_all(prompts, sampling, group_ids)
            yield from generation.samples(timeout)

    def generate_groups(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[list[Sample]]:
        """Yield whole groups (n samples, sorted by index) in the order of the prompts. Otherwise as `generate`; `timeout` is
        the longest wait for one group."""
        with Generation(self._submit, self._id) as generation:
            generation.submit_all(prompts, sampling, group_ids)
            yield from generation.groups(timeout)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Prompt]],
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
    ) -> list[list[Sample]]:
        """Compute log-probs of given tokens. Returns for each prompt a sample of each of its completions, in their order, which
        ended as "scored". Nothing is drawn, a prompt is prefilled once, and with equal weights the log-probs are equal to the
        bit to those that were returned when these tokens were drawn.

        Args:
            prompts: [prompt_tokens] token ids each.
            completions: for each prompt, token ids of one or more completions.
            sampling: how the tokens are, or would be, drawn, and whether raw_logprobs and top_logprobs are wanted; None =
                temperature 1 without truncation. n, max_tokens, seed and finish_after do not matter.
            timeout: seconds, longest wait for the completions of one prompt.

        Raises InvalidRequest and LimitExceeded for what is refused, GroupFailed for a completion that was not scored to its
        end, ServiceLost, RequestTimeout."""
        with Generation(self._submit, self._id) as generation:
            return score_all(generation, lambda: self._id(None), prompts, completions, sampling, timeout)

    def submit_score(
        self,
        prompt: Prompt,
        completions: Sequence[Prompt],
        sampling: Sampling | None = None,
        group_id: str | None = None,
    ) -> Handle:
        """Send one prompt whose completions are to be scored; returns at once. The samples of the handle end as "scored", or
        as "aborted" if somebody ended them before. Otherwise as `score`, and as `submit`."""
        return self._submit(scored_group(self._id(group_id), prompt, completions, sampling))

    def close(self) -> None:
        """End the session: the service aborts what is still open, waiting callers get ClientClosed. May be repeated."""
        super().close()
        self._pusher.close()


def end_of(address: str | None, transport: ClientTransport | None) -> ClientTransport:
    """Return the client's end of the connection. Raises ValueError unless just one of the two is given."""
    if (address is None) == (transport is None):
        raise ValueError("give an address or a transport, one of the two")
    return transport if transport is not None else ClientEnd(str(address), Limits())


def wait_for_welcome(link: Link, end: ClientTransport, seconds: float) -> None:
    """Wait until the service has answered. Raises ServiceLost saying what to check, and what the service refused."""
    try:
        link.first_welcome.result(seconds)
    except TimeoutError:
        raise no_answer(end.address, end.connected, seconds) from None


def no_answer(address: str, connected: bool, seconds: float) -> ServiceLost:
    """Say why a service may not have answered, and what to check."""
    if connected:
        return ServiceLost(
            f"{address} accepts connections but did not answer within {seconds} s: it is in a long step, it is stopped, or it "
            "is not a rollout service"
        )
    return ServiceLost(
        f"no service at {address} within {seconds} s: is `rollout serve` running, is this the endpoint that it printed, and if "
        "it has keys, is the connection file of this service given in place of the address?"
    )
