"""Calls of the client that prove what made a sample: verification and replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.client.base import BaseClient
from rollout.client.receipts import Receipt
from rollout.client.refresh import NamedTensors, RefreshRequest
from rollout.client.replaying import Change, Reproduced
from rollout.client.streams import finished
from rollout.client.submission import Samples
from rollout.client.text import Prompt
from rollout.client.verification import Verified
from rollout.engine.values import Refreshed, Sample, Sampling

REFRESH_S = 600.0
"""longest time for a refresh of a replay"""


class ProvingClient(BaseClient):
    """The part of `RolloutClient` that computes samples again."""

    def verify(
        self,
        samples: Samples,
        prompt: Prompt,
        sampling: Sampling,
        *,
        receipts: Sequence[Receipt] | None = None,
        timeout: float | None = None,
    ) -> list[Verified]:
        """Compute samples of one group again, as one prefill, and draw each token again with its own counter. Returns one
        result for each sample, in their order. The prompt is prefilled once.

        Args:
            samples: of this service or another one. Those of other weights or of another arithmetic than this service has now
                cannot be verified here (`Verified.ok` is None).
            prompt, sampling: those of their group. With a seed in `sampling`, a child has one right sample; without one, the
                samples' own seeds are used, and a choice among many of them is not noticed.
            receipts: one for each sample; None: they were generated with this service's arithmetic and weights.
            timeout: maximum seconds.

        Raises InvalidRequest for arguments that no group can have, GroupFailed if the service aborted the verification,
        ServiceLost, RequestTimeout."""
        given = None if receipts is None else [receipts]
        mine = [samples] if isinstance(samples, Sample) else samples
        (verdicts,) = self.verify_groups([mine], [prompt], sampling, receipts=given, timeout=timeout)
        return verdicts

    def verify_groups(
        self,
        groups: Sequence[Sequence[Sample]],
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        *,
        receipts: Sequence[Sequence[Receipt]] | None = None,
        timeout: float | None = None,
    ) -> list[list[Verified]]:
        """Verify several groups at once. prompts: one for each group; sampling: for all groups, or one each; timeout: maximum
        seconds for one group. Otherwise as `verify`."""
        checks = self._session.checks(groups, self._text.all_ids(prompts), sampling, receipts)
        drawn = finished(self._session.compute, [group for check in checks for group in check.groups], timeout)
        return [check.judge(drawn) for check in checks]

    def replay(
        self,
        receipts: Sequence[Receipt],
        prompts: Sequence[Prompt],
        *,
        weights: Mapping[int, NamedTensors] | None = None,
        ends: Sequence[tuple[int, str]] | None = None,
        change: Change | None = None,
        timeout: float | None = None,
    ) -> list[Reproduced]:
        """Make samples again from their receipts, and compare them with the digests there. Returns one result for each receipt,
        in their order. For samples that were generated during refreshes with kv="keep", the refreshes are repeated.

        Args:
            receipts: of any service of the same arithmetic; those of another one cannot be made here (`Reproduced.equal` is
                None).
            prompts: of their groups, in any order; each once.
            weights: by version, as for `refresh`; not needed for weights that are live. With them, the service is refreshed,
                and keeps the last ones.
            ends: number of tokens and finish reason of each sample. Without them, a sample that something outside has ended
                ("cut", "aborted", …) is made to its own end, and found in it.
            change: what is other than in the receipts, from a token on.
            timeout: maximum seconds for one group.

        Raises InvalidRequest for arguments that no group can have, WeightsRefused, ServiceLost, RequestTimeout."""
        given = {} if weights is None else weights
        replay = self._session.replaying(receipts, self._text.all_ids(prompts), given, ends, change)

        def refresh(version: int) -> Refreshed:
            return self._sender.start(given[version], RefreshRequest(None, "keep", False), "auto", REFRESH_S).result()

        replay.run(refresh, lambda groups: finished(self._session.compute, groups, timeout))
        return replay.results
