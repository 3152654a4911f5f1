"""What is asked of an engine: a prompt, and how to sample its children."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rollout.engine.values.columns import Routing
from rollout.engine.values.limits import Limits
from rollout.engine.values.sample import PartialSample
from rollout.engine.values.sampling import Sampling


class Group(msgspec.Struct, frozen=True, eq=False):
    """One prompt, and how to sample its children.

    Example:
        Group(id="step3/17", prompt=np.array([1, 42, 7], np.int32), sampling=Sampling(n=8))
    """

    id: str
    prompt: np.ndarray
    """[prompt_tokens] int32 token ids"""
    sampling: Sampling
    indices: tuple[int, ...] | None = None
    """requested children of the n, ascending; None = all. Another engine may generate the others: the tokens of a child depend
    on its own index only"""
    partials: tuple[PartialSample, ...] = ()
    """existing tokens of children, which continue from there"""
    score: bool = False
    """score the tokens in `partials`: nothing is sampled, and the children return as "scored" with the log-probs that these
    tokens have under `sampling`"""
    after: tuple[str, int] | None = None
    """(group id, index) of the child that this group continues: its prompt is that child's prompt and tokens, and more. A hint
    that allows reuse of the child's KV, whichever weights computed it; an unknown child, or one of another client, is
    ignored"""
    redraw: bool = False
    """with `score`: draw each token of `partials` again, with the counters of its child. A child ends with the first draw that
    is another token, or that ends a child; its tokens are the draws"""
    label: str = ""
    """the client's id of the group where `id` is another one, for messages to people"""

    def __repr__(self) -> str:
        """Describe the group in one line."""
        more = "".join(f", {name}={value!r}" for name, value in (("indices", self.indices), ("after", self.after)) if value)
        partials = f", {len(self.partials)} partials" if self.partials else ""
        return f"Group({self.id!r} {len(self.prompt)} prompt tokens, {self.sampling!r}{more}{partials})"

    @property
    def wanted(self) -> Sequence[int]:
        """Indices of the requested children, ascending."""
        return range(self.sampling.n) if self.indices is None else self.indices

    def validate(self, limits: Limits, vocab_size: int, context: int) -> None:
        """Check the group. vocab_size: rows of the embedding; context: positions of the model. Raises ValueError."""
        size = len(self.id.encode())
        if not 1 <= size <= limits.max_id_bytes:
            raise ValueError(f"group id of {size} bytes: must be 1 to {limits.max_id_bytes} bytes (Limits.max_id_bytes)")
        kind = type(self.prompt).__name__
        if kind != "ndarray":
            raise ValueError(f"prompt is a {kind}: must be int32 [prompt_tokens], np.array(tokenizer.encode(text), np.int32)")
        if self.prompt.ndim != 1 or self.prompt.dtype != np.int32:
            raise ValueError(f"prompt is {self.prompt.dtype} of shape {self.prompt.shape}: must be int32 [prompt_tokens]")
        most = min(limits.max_prompt_tokens, context - 1)
        if not 1 <= len(self.prompt) <= limits.max_prompt_tokens:
            bound = "Limits.max_prompt_tokens" if most == limits.max_prompt_tokens else f"the context of {context} tokens"
            raise ValueError(f"prompt of {len(self.prompt)} tokens: must be 1 to {most} ({bound})")
        low, high = int(self.prompt.min()), int(self.prompt.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"prompt holds token id {bad}: the model's token ids are 0 to {vocab_size - 1}")
        self.sampling.validate(limits, vocab_size)
        self._validate_children(vocab_size)
        if len(self.prompt) + self.sampling.max_tokens > context:
            left = context - len(self.prompt)
            fix = f"lower max_tokens to {left}" if left > 0 else f"shorten the prompt to less than {context}"
            raise ValueError(
                f"prompt of {len(self.prompt)} + max_tokens {self.sampling.max_tokens} exceeds the context of {context} "
                f"tokens; {fix}"
            )

    def validate_routes(self, routing: Routing | None) -> None:
        """Check what concerns routes. routing: of an engine that keeps them; None: it keeps none. Raises ValueError."""
        if not self.sampling.routed_experts:
            return
        if routing is None:
            raise ValueError(
                "routed_experts=True: no routes are kept; start the service of a mixture of experts with "
                "routed_experts = true, or leave it out"
            )
        for child in () if self.score else self.partials:
            if child.routed_experts is not None:
                who = f"partial sample {child.index} has routed_experts"
                routing.check(child.routed_experts, len(child.token_ids), who)

    def _validate_children(self, vocab_size: int) -> None:
        n = self.sampling.n
        if self.indices is not None:
            if list(self.indices) != sorted(set(self.indices)) or not self.indices:
                raise ValueError(f"indices={self.indices}: must be ascending, each once, and at least one")
            if self.indices[0] < 0 or self.indices[-1] >= n:
                raise ValueError(f"indices={self.indices}: must be between 0 and n - 1 = {n - 1}")
            if self.sampling.finish_after is not None and self.sampling.finish_after > len(self.indices):
                raise ValueError(
                    f"finish_after={self.sampling.finish_after}: at most the {len(self.indices)} requested children"
                )
        having = [child.index for child in self.partials]
        if len(set(having)) < len(having) or not set(having) <= set(self.wanted):
            raise ValueError(f"partial samples of children {having}: each must be requested, once")
        sampling = self.sampling
        if self.score:  # the service computes these columns
            sampling = msgspec.structs.replace(sampling, raw_logprobs=False, top_logprobs=0, routed_experts=False)
        for child in self.partials:
            child.validate(sampling, vocab_size)
        if self.score and set(having) != set(self.wanted):
            raise ValueError(
                f"score of children {list(self.wanted)[:20]}, given {having[:20]}: give the tokens of all, in partials"
            )
        if self.redraw and not self.score:
            raise ValueError("redraw=True without score: only given tokens are drawn again; set score, or leave it out")
        if self.score and self.sampling.finish_after is not None:
            raise ValueError(f"finish_after={self.sampling.finish_after} with score: all children end; leave it out")
