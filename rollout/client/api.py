"""The client of a rollout service. Imports neither torch nor an engine.

with RolloutClient("tcp://127.0.0.1:5655") as client:
    for sample in client.generate([{"role": "user", "content": "6 x 7?"}], Sampling(n=8, max_tokens=256)):
        print(sample.index, client.decode(sample))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from rollout.client.base import BaseClient
from rollout.client.config import ClientConfig, ClientFields
from rollout.client.connection import answer
from rollout.client.handle import Handle
from rollout.client.streams import Generation, finished
from rollout.client.submission import (
    Samples,
    TokenIds,
    check_scored,
    continued_group,
    group_of,
    groups_of,
    scored_group,
    scored_groups,
    turn_group,
)
from rollout.client.text import Prompt
from rollout.engine.values import KVPolicy, PartialSample, Refreshed, Sample, Sampling, Tag
from rollout.transport.weights import Via

if TYPE_CHECKING:
    from rollout.client.lora import AdapterSource
    from rollout.client.receipts import Receipt
    from rollout.client.refresh import NamedTensors, RefreshHandle
    from rollout.client.replaying import Change, Reproduced
    from rollout.client.verification import Verified


class RolloutClient(BaseClient):
    """Connects to a rollout service. Thread-safe. One background thread sends, receives and exchanges heartbeats, so the
    trainer may compute for as long as it needs.

    Args:
        address: as `rollout serve` prints it, e.g. tcp://127.0.0.1:5655, or the path of a connection file (`rollout keys add`),
            which has the address and the keys.
        config: settings; None = the defaults.
        fields: of `ClientConfig`, in place of those of `config`: `RolloutClient(address, name="trainer")`.

    Raises ServiceLost if the service does not answer in time, ValueError for settings out of range, TypeError for an unknown
    one, naming the nearest."""

    def __init__(self, address: str | None = None, config: ClientConfig | None = None, **fields: Unpack[ClientFields]) -> None:
        super().__init__(address, config, **fields)
        wait_s = self._config.connect_timeout_s
        try:
            self._session.link.first_welcome.result(wait_s)
        except TimeoutError:
            error = self._session.unreachable(wait_s)
            self.close()
            raise error from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the session: the service aborts its open groups, and waiting callers get ClientClosed. May be repeated."""
        self._close()

    # groups

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
            prompt: [prompt_tokens] token ids, as a list of int or an integer array (copied). Or a text, tokenized as it stands.
                Or messages, [{"role": "user", "content": "…"}], for the model's chat template.
            group_id: any text that no live group of this client has; None = a new one.
            indices: requested children of the n, ascending; None = all. With a seed, another service may generate the others:
                the tokens of a child depend on its own index only.
            partials: existing tokens of children, which continue from there; see `continue_samples`.

        Raises InvalidRequest or LimitExceeded for a group that cannot be sent; NoTokenizer for text. The handle raises what the
        service refuses."""
        ids = self._text.ids(prompt)
        return self._session.submit(group_of(self._session.group_id(group_id), ids, sampling, indices, partials))

    def continue_samples(
        self,
        samples: Samples | Handle,
        prompt: Prompt | None = None,
        sampling: Sampling | None = None,
        group_id: str | None = None,
    ) -> Handle:
        """Continue samples that ended early ("cut", "deadline", "aborted", "stale") as a new group; returns at once.

        The new samples contain all tokens, the old ones included, and their version spans say which weights generated which. A
        sample that already had its last token returns at once. With the same weights and arithmetic, a continued sample is
        equal bit for bit to one that was never stopped, also on another service.

        Args:
            samples: unfinished samples of one group. Or the handle of a group whose service is gone: its remaining children
                continue from their streamed tokens (`Sampling.stream_every`), with the group's own prompt and sampling.
                `finish_after` counts the samples that have arrived; a deadline starts again.
            prompt, sampling: those of the group of the samples; leave them out for a handle. `sampling.seed` may be None: the
                samples carry the seed.
            group_id: as for `submit`.

        Raises InvalidRequest for samples that ended by themselves or belong to different groups; otherwise as `submit`."""
        ids = None if prompt is None else self._text.ids(prompt)
        return self._session.submit(continued_group(self._session.group_id(group_id), samples, ids, sampling))

    def next_turn(
        self,
        sample: Sample,
        prompt: Prompt,
        sampling: Sampling | None = None,
        group_id: str | None = None,
        *,
        append: Prompt,
    ) -> Handle:
        """Start the next turn of a conversation; returns at once. The prompt of the new group is `prompt`, the tokens of
        `sample`, and `append`. The service reuses the KV of the sample (`Sampling.kv_ttl_s`).

        Args:
            sample: the sample to continue, with any finish_reason but "error".
            prompt: the prompt of the sample's group.
            sampling: of the new turn, its seed included.
            group_id: as for `submit`.
            append: [tokens] token ids that follow the sample, e.g. the answer of a tool. Or a text, tokenized as it stands. Or
                messages: what the chat template writes after an assistant's message, up to the beginning of the next one.

        Raises InvalidRequest for a prompt of another length than the sample's, and for an empty `append`; otherwise as
        `submit`."""
        before, more = self._text.ids(prompt), self._text.next_ids(sample, append)
        return self._session.submit(turn_group(self._session.group_id(group_id), sample, before, sampling, more))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[Sample]:
        """Yield the samples of all groups as they finish. The first step of the iteration sends the groups; leaving it early
        cancels them.

        Args:
            prompts: one for each group, as for `submit`. One text or one conversation may be given without a list.
            sampling: for all groups, or one each.
            group_ids: one each; None = new ones.
            timeout: maximum seconds between two samples.

        Raises the error of the first group that fails, and cancels the others; RequestTimeout."""
        with Generation(self._session.submit) as generation:
            generation.submit_all(groups_of(self._session.group_id, self._text.all_ids(prompts), sampling, group_ids))
            yield from generation.samples(timeout)

    def generate_groups(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[list[Sample]]:
        """Yield whole groups (n samples, sorted by index) in the order of the prompts. timeout: maximum seconds for one group.
        Otherwise as `generate`."""
        with Generation(self._session.submit) as generation:
            generation.submit_all(groups_of(self._session.group_id, self._text.all_ids(prompts), sampling, group_ids))
            yield from generation.groups(timeout)

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[TokenIds | str]],
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
    ) -> list[list[Sample]]:
        """Compute the log-probs of given tokens. Returns for each prompt one sample per completion, in their order, with
        finish_reason "scored". Nothing is sampled, and each prompt is prefilled once. Under equal weights, the log-probs are
        equal bit for bit to those returned when the tokens were sampled.

        Args:
            prompts: one for each group, as for `submit`.
            completions: for each prompt, one or more completions: token ids, or a text, tokenized without special tokens.
            sampling: how the tokens were or would be sampled, and whether raw_logprobs and top_logprobs are wanted; None =
                temperature 1 without truncation. n, max_tokens, seed and finish_after are ignored.
            timeout: maximum seconds for the completions of one prompt.

        Raises InvalidRequest and LimitExceeded for refused tokens, GroupFailed for a completion that was not scored to its end,
        ServiceLost, RequestTimeout."""
        with Generation(self._session.submit) as generation:
            texts = [self._text.completion_ids(mine) for mine in completions]
            generation.submit_all(scored_groups(self._session.group_id, self._text.all_ids(prompts), texts, sampling))
            groups = list(generation.groups(timeout))
        for group in groups:
            check_scored(group)
        return groups

    def submit_score(
        self,
        prompt: Prompt,
        completions: Sequence[TokenIds | str],
        sampling: Sampling | None = None,
        group_id: str | None = None,
    ) -> Handle:
        """Send one prompt whose completions are to be scored; returns at once. The samples end as "scored", or as "aborted" if
        they were aborted before. Otherwise as `score` and `submit`."""
        ids, texts = self._text.ids(prompt), self._text.completion_ids(completions)
        return self._session.submit(scored_group(self._session.group_id(group_id), ids, texts, sampling))

    # proofs

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
        checks = self._parts.checks(groups, self._text.all_ids(prompts), sampling, receipts)
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
        replay = self._parts.replaying(receipts, self._text.all_ids(prompts), given, ends, change)

        def refresh(version: int) -> Refreshed:
            return self.refresh(given[version], kv="keep")

        replay.run(refresh, lambda groups: finished(self._session.compute, groups, timeout))
        return replay.results

    # the service, for all clients

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the service's status. Raises RequestTimeout, ServiceLost."""
        return answer(self._session.status(), timeout, "status")

    def pause(self, timeout: float = 60.0) -> None:
        """Stop between two steps, for all clients; refreshes are still accepted. It ends when any client calls `resume`, or
        when all clients that paused have disconnected."""
        answer(self._session.control("pause"), timeout, "pause")

    def resume(self, timeout: float = 60.0) -> None:
        """Undo `pause` and `drain`, of any client."""
        answer(self._session.control("resume"), timeout, "resumption")

    def drain(self, timeout: float = 3600.0) -> None:
        """Finish the started groups of all clients and start no others until `resume`. Returns when nothing runs. After a
        RequestTimeout the service continues to drain: wait again, or `resume`."""
        answer(self._session.control("drain"), timeout, "end of the drain")

    def abort_all(self, timeout: float = 60.0) -> None:
        """Abort all groups of all clients; samples return as "aborted" with their tokens so far."""
        answer(self._session.control("abort_all"), timeout, "end of all groups")

    def change_replicas(
        self, action: Literal["scale", "drain", "roll"], *, count: int = 0, name: str = "", timeout: float = 60.0
    ) -> None:
        """Change the replicas of a fleet; returns when the change has started, and `status` shows its progress. "scale" to
        `count` replicas; "drain" the replica `name`: it finishes its samples, then stops; "roll": restart all, one after the
        other, while the others continue their samples. Raises InvalidRequest, also for a service that is no fleet."""
        answer(self._session.change_replicas(action, count, name), timeout, "change of replicas")

    def sleep(self, level: int = 1, timeout: float = 300.0) -> int:
        """Release the service's device memory between two steps, e.g. for a trainer on the same device. Returns the released
        bytes. Running samples are preempted; after `wake` they continue from KV in host memory, as far as it had room.

        Level 1 moves the weights to host memory; level 2 drops them, so that after `wake` a refresh of all tensors must come
        before the next token. While the weights are asleep, refreshes are refused. When the client disconnects, the service
        wakes.

        Raises InvalidRequest while asleep, Busy while a refresh is staged, RequestTimeout, ServiceLost."""
        return answer(self._session.sleep(level), timeout, "sleep").freed_bytes

    def wake(self, timeout: float = 300.0, *, tags: Sequence[Tag] | None = None) -> None:
        """Undo `sleep`, for all memory or a part of it; samples continue when everything is awake.

        tags: "weights", "kv" or both; None = all that are asleep. For a trainer on the same device: `wake(tags=("weights",))`,
        `refresh`, then, when the trainer has released its memory, `wake(tags=("kv",))`. After `sleep(level=2)` that refresh is
        written in place, without a second copy of the weights.

        Raises InvalidRequest if none of these parts is asleep."""
        answer(self._session.wake(tags), timeout, "wake-up")

    # weights

    def weights_status(self, verify: bool = False, timeout: float = 60.0) -> dict[str, Any]:
        """Return the live version and digest, and which client stages which weights. verify: also `live_digest`, computed from
        the live bytes. That costs the service one pass over its weights, as does the first digest of weights never
        refreshed."""
        return answer(self._session.weights_status(verify), timeout, "status of the weights")

    def refresh(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> Refreshed:
        """Replace the service's weights in place, all or none, while generation continues. Returns when they are live.

        Args:
            named_tensors: a module, its state dict or any iterable of (name, tensor), on any device, of any float dtype (cast
                to the model's). Or the path of a folder of safetensors that the service can read too.
            version: above the live one; None = the next.
            kv: running samples "keep" their KV (their version spans show the change), "recompute" it under the new weights, or
                end ("abort").
            via: "shm" (same host: written once, read there), "inline" (any host), "files" (a folder), "cuda_ipc" (same host:
                read on the GPU), "gloo" or "nccl" (torch.distributed, any host; nccl between two GPUs), "delta" (any host:
                sends what changed since the last refresh by "delta", of which the client keeps a copy in host memory; without a
                usable copy it sends as "auto", and `Refreshed.reason` says why). "auto": cuda_ipc for tensors on GPUs that the
                service sees too, shm if both ends share memory, else inline.
            partial: tensors that are not given keep their values; otherwise a missing one is an error.

        Raises WeightsRefused naming the tensor, Busy naming the client whose refresh is staged, SourceUnreachable,
        RequestTimeout, ServiceLost. The old weights stay live then; after the last two, `weights_status` tells which weights
        are live."""
        return self.refresh_async(named_tensors, version=version, kv=kv, via=via, partial=partial, timeout=timeout).result()

    def refresh_async(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> RefreshHandle:
        """Start a `refresh`; returns when the tensors have been read. With shm they may change from then on; otherwise not
        before the handle is done: the digests would differ, and the refresh would be refused."""
        return self._parts.start_refresh(named_tensors, version, kv, partial, via, timeout)

    def refresh_lora(
        self,
        adapter: AdapterSource,
        *,
        scale: float = 1.0,
        base: str | None = None,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        timeout: float = 600.0,
    ) -> Refreshed:
        """Replace the service's weights by base + adapter. Only A and B are sent; the service adds scale · B A to base weights
        that it keeps in host memory: its checkpoint, or the last refresh of whole tensors. Tensors that only the previous
        adapter changed return to their base. Otherwise as `refresh`.

        On the CPU the sum has the bits of PEFT's `merge_and_unload()`, in fp32 and bf16.

        Args:
            adapter: a PeftModel with one active, unmerged LoRA adapter, or the folder that its `save_pretrained` wrote. Linear
                layers, and whole modules in `modules_to_save`.
            scale: factor on the adapter's own lora_alpha / r (or / √r with rslora), as PEFT's `scale_layer`.
            base: digest of the weights that the adapter was trained on, as `weights_status()["base_digest"]` gives it. None:
                taken from the frozen weights of a PeftModel, once per model; not compared for a folder.
            version, kv, via, timeout: as for `refresh`; via="files" is for whole checkpoints.

        Raises WrongBase (a WeightsRefused) if the service's base differs; WeightsRefused for an adapter that cannot be merged
        (DoRA and other variants, embeddings, trained biases, tied weights, quantised layers), naming the fix; otherwise as
        `refresh`."""
        return self._parts.start_lora(adapter, scale, base, version, kv, via, timeout).result()
