"""Children: finished ones, unfinished ones, and new tokens of running ones."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Literal

import numpy as np

from rollout.engine.values.columns import TokenColumns, valid_kv_spans
from rollout.engine.values.sampling import Sampling

FinishReason = Literal["stop", "length", "cut", "deadline", "aborted", "stale", "error", "scored"]
"""why a child ended: see `Sample`"""


class Sample(TokenColumns, frozen=True, kw_only=True, eq=False, omit_defaults=True, gc=False):
    """One finished child.

    Example:
        Sample(group_id="step3/17", index=2, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
               finish_reason="stop", weight_versions=[(0, 4), (1, 5)], prompt_tokens=3)
        # version 4 of the weights generated token 0, version 5 token 1 and all later ones

    Attributes:
        group_id: id of its group.
        index: 0 to n - 1.
        token_ids: [tokens] int32, the stop token included.
        logprobs: [tokens] float32: log-probability under the distribution from which each token was sampled, after temperature
            and truncation. At temperature 0, the log-probability at temperature 1.
        weight_versions: (first token, version) spans, ascending from token 0: which weights generated which tokens.
        kv_versions: (token, position, version) spans, ascending by token: from that token on, this version of the weights
            computed the KV of the position in prompt and output, and of all positions after it. Empty if each token attended
            only to KV of the version that generated it.
        finish_reason: why it ended. stop, length: by itself. cut: enough siblings had finished. deadline: of its group.
            aborted: by a client, a refresh or a shutdown. stale: its first token is too many versions old. error: see `error`.
            scored: its given tokens have their log-probs, or were drawn again (`Group.redraw`).
        prompt_tokens: length of the prompt.
        raw_logprobs: [tokens] float32 at temperature 1 without truncation, if `Sampling.raw_logprobs`.
        top_ids: [tokens, k] int32, if `Sampling.top_logprobs` = k: the most probable tokens of the distribution from which each
            token was sampled, most probable first, lower id first among equals; -1 where fewer than k tokens could be sampled.
        top_logprobs: [tokens, k] float32: their log-probs, as in `logprobs`; -inf where the id is -1.
        ranks: [tokens] int32 of scored tokens, if `Sampling.top_logprobs`: 1 + the number of tokens with a larger logit. None
            if the tokens were sampled.
        routed_experts: [tokens, layers with experts, experts chosen] uint8, or uint16 above 256 experts, if
            `Sampling.routed_experts`: row i has the choices at the position whose logits token i was sampled from, which is
            the one before it. In the router's order.
        prompt_routed_experts: [prompt_tokens - 1, layers with experts, experts chosen]: the same for the positions before.
            Together these are the prompt_tokens + tokens - 1 positions of a trainer's forward. An engine returns them once a
            group, with the first child that ends after the prompt was computed; a client gives them to all its samples.
        error: why the child failed, if finish_reason is "error".
        seconds: from the arrival of the group to the end of this child.
        offloads: how often its KV was offloaded to host memory.
        seed: of the group, also if the engine chose it: an unfinished child needs it to continue.
        stopped_by: the string of `Sampling.stop` that ended the child: if its last token completes several, the one that begins
            first.
        text_end: characters of the text before that string: `tokenizer.decode(token_ids)[:text_end]`;
            docs/decisions/stop-strings.md.
        configuration: digest of the configuration of the model that generated it (`Welcome.configuration`), as its client has
            noted it; "" = unknown.
    """

    group_id: str
    index: int
    finish_reason: FinishReason
    prompt_tokens: int
    error: str | None = None
    seconds: float = 0.0
    offloads: int = 0
    seed: int = 0
    stopped_by: str | None = None
    text_end: int | None = None
    prompt_routed_experts: np.ndarray | None = None
    ranks: np.ndarray | None = None
    configuration: str = ""

    def __repr__(self) -> str:
        """Describe the sample in one line."""
        why = self.finish_reason if self.error is None else f"{self.finish_reason}: {self.error!r}"
        mean = f"mean logprob {self.mean_logprob:.2f}, " if len(self.logprobs) else ""
        return f"Sample({self.group_id!r}[{self.index}] {len(self.token_ids)} tokens, {why}, {mean}{self.versions})"

    def _repr_html_(self) -> str:
        return html_table([self])

    @property
    def routes(self) -> np.ndarray | None:
        """Return the routes of all positions of a trainer's forward: [prompt_tokens + tokens - 1, layers, chosen]; None if
        those of the prompt or of the tokens are not there."""
        if self.prompt_routed_experts is None or self.routed_experts is None:
            return None
        return np.concatenate([self.prompt_routed_experts, self.routed_experts])

    def _arrays(self) -> list[tuple[str, np.ndarray]]:
        more = [(name, getattr(self, name)) for name in ("prompt_routed_experts", "ranks")]
        return super()._arrays() + [(name, array) for name, array in more if array is not None]


def html_table(samples: Iterable[Sample]) -> str:
    """Return a table of samples for notebooks."""
    names = ("sample", "tokens", "finish_reason", "mean logprob", "weights", "seconds", "error")
    rows = [
        (f"{each.group_id}[{each.index}]", len(each.token_ids), each.finish_reason, f"{each.mean_logprob:.2f}", each.versions)
        + (f"{each.seconds:.1f}", each.error or "")
        for each in samples
    ]
    lines = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class PartialSample(TokenColumns, frozen=True, kw_only=True, eq=False):
    """The existing tokens of an unfinished child, at least one: it continues with the token after them. A child that already
    has its last token ends at once.

    Example:
        PartialSample.of(sample)
    """

    index: int
    """of the child, 0 to n - 1"""
    configuration: str = ""
    """as in its sample; "": unknown"""

    def __repr__(self) -> str:
        """Describe the tokens in one line."""
        return f"{type(self).__name__}([{self.index}] {len(self.token_ids)} tokens, {self.versions})"

    @classmethod
    def of(cls, sample: Sample) -> PartialSample:
        """Take the tokens of a sample that ended early."""
        return cls(index=sample.index, configuration=sample.configuration, **sample.columns())

    def validate(self, sampling: Sampling, vocab_size: int) -> None:
        """Check dtypes, shapes and values. Raises ValueError naming the child and what would be accepted."""
        who, tokens, most = f"partial sample {self.index}", self.token_ids, sampling.max_tokens
        if tokens.dtype != np.int32 or tokens.ndim != 1 or not 1 <= len(tokens) <= most:
            raise ValueError(f"{who} has token_ids {tokens.dtype} {tokens.shape}: must be int32 [1 to max_tokens={most}]")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"{who} holds token id {bad}: the model's token ids are 0 to {vocab_size - 1}")
        wanted = {"logprobs": self.logprobs, **({"raw_logprobs": self.raw_logprobs} if sampling.raw_logprobs else {})}
        for name, values in wanted.items():
            if values is None or values.dtype != np.float32 or values.shape != tokens.shape:
                found = "none" if values is None else f"{values.dtype} {values.shape}"
                raise ValueError(f"{who} has {name} {found}: must be float32 [{len(tokens)}], one for each token")
        self._validate_top(sampling.top_logprobs, vocab_size)
        if sampling.routed_experts and (self.routed_experts is None or len(self.routed_experts) != len(tokens)):
            found = "none" if self.routed_experts is None else f"of {len(self.routed_experts)} tokens"
            raise ValueError(f"{who} has routed_experts {found}: must be [{len(tokens)}, layers, chosen], as in its sample")
        firsts = [first for first, _ in self.weight_versions]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= len(tokens):
            raise ValueError(f"{who} has weight_versions that begin at {firsts}: must ascend from 0 to below {len(tokens)}")
        if any(version < 0 for _, version in self.weight_versions):
            raise ValueError(f"{who} has a weight version below 0: versions count up from 0")
        if not valid_kv_spans(self.kv_versions, len(tokens)):
            raise ValueError(f"{who} has kv_versions {str(self.kv_versions)[:80]}: must be as in its sample")

    def _validate_top(self, k: int, vocab_size: int) -> None:
        if not k:
            return
        shape, ids = (len(self.token_ids), k), self.top_ids
        for name, values, dtype in (("top_ids", ids, np.int32), ("top_logprobs", self.top_logprobs, np.float32)):
            if values is None or values.dtype != dtype or values.shape != shape:
                found = "none" if values is None else f"{values.dtype} {values.shape}"
                raise ValueError(
                    f"partial sample {self.index} has {name} {found}: must be {np.dtype(dtype).name} {list(shape)}"
                )
        assert ids is not None
        if int(ids.min()) < -1 or int(ids.max()) >= vocab_size:
            raise ValueError(f"partial sample {self.index} has top_ids outside of 0 to {vocab_size - 1}, and -1 for none")

    def ended_as(self, sampling: Sampling, eos: frozenset[int]) -> FinishReason | None:
        """Return how the child has ended, if its last token is one of `eos` or it has all its tokens."""
        tokens = self.token_ids
        if int(tokens[-1]) in eos and len(tokens) > sampling.min_tokens:
            return "stop"
        return "length" if len(tokens) == sampling.max_tokens else None

    def validate_unfinished(self, sampling: Sampling, eos: frozenset[int], version: int) -> None:
        """Raises ValueError if the child has tokens after one of `eos`, or if its first token is older than
        `Sampling.max_version_lag` allows under the live `version`."""
        for at, token in enumerate(self.token_ids[sampling.min_tokens : -1].tolist(), sampling.min_tokens):
            if token in eos:
                raise ValueError(f"partial sample {self.index} has tokens after stop token {token} at position {at}")
        lag, first = sampling.max_version_lag, self.weight_versions[0][1]
        if lag is not None and first < version - lag:
            raise ValueError(
                f"partial sample {self.index} began with version {first}, {version} is live: more than max_version_lag={lag}; "
                "leave it out or raise max_version_lag"
            )


class TokenChunk(PartialSample, frozen=True, kw_only=True, eq=False):
    """New tokens of a running child since the last chunk. Spans count from the first token of the chunk.

    Example:
        TokenChunk(index=2, first=16, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
                   weight_versions=[(0, 4), (1, 5)], seed=7)
        # tokens 16 and 17 of child 2; version 5 of the weights generated the second one
    """

    first: int
    """position of the first token in the output of the child"""
    seed: int
    """of the group, also if the engine chose it"""
