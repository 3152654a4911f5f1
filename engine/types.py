"""What goes into the engine and what comes out: value types, no torch.

A `Group` is a prompt and `sampling.n` children; a `Sample` is one finished child. `transport` and `rollout.client` import this
module and nothing else of the engine, until a trainer gives tensors: `engine.weights.tensors` reads those, and
`engine.cuda.digests` digests them where they lie on a GPU.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "cut", "deadline", "aborted", "stale", "error", "scored"]
"""how a child ended: by itself (stop, length), because enough siblings had (cut), at its group's deadline, or by others;
scored: its tokens were given and have their log-probs"""
KVPolicy = Literal["keep", "recompute", "abort"]
"""what a refresh does with the KV of the groups that run: go on over it, prefill it again, or end the groups"""
Tag = Literal["weights", "kv"]
"""a part of an engine's memory that sleep gives back, and that can be woken by itself"""

SEED_LIMIT = 2**63
MAX_PRIORITY = 1_000_000
LARGEST_LIMIT = 2**40


class Mode(enum.Enum):
    """What an engine does with its steps."""

    RUNNING = "running"
    DRAINING = "draining"
    """groups that have started run to their end, no others start"""
    PAUSED = "paused"
    """nothing is computed; what is submitted waits"""
    ASLEEP = "asleep"
    """paused, and memory was given back"""
    WITHOUT_WEIGHTS = "without weights"
    """awake after a sleep that dropped the weights: a whole refresh must come first"""
    TORN = "torn"
    """the undo of a refresh failed: nothing may be sampled any more"""

    @property
    def rests(self) -> bool:
        """No step is planned, until somebody asks for another mode."""
        return self in (Mode.PAUSED, Mode.ASLEEP, Mode.WITHOUT_WEIGHTS)


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a client can make large, checked before anything is allocated. The table in docs/limits.md is this struct."""

    max_n: int = 1024
    """children of one group"""
    max_tokens: int = 131_072
    """`Sampling.max_tokens` of one child"""
    max_prompt_tokens: int = 131_072
    """token ids in one prompt"""
    max_stop_token_ids: int = 64
    """entries of `Sampling.stop_token_ids`"""
    max_id_bytes: int = 128
    """UTF-8 bytes of a group id or a client name"""
    max_groups_per_client: int = 4096
    """groups of one client that are not finished"""
    max_samples_per_client: int = 65_536
    """samples (n of each group, summed) of one client that are not finished"""
    max_clients: int = 256
    """client sessions at a time"""
    max_header_bytes: int = 65_536
    """the first frame of a message"""
    max_frame_bytes: int = 16_777_216
    """any other frame"""
    max_frames: int = 64
    """frames of one message"""
    max_kv_lag: int = 1_000_000
    """`Sampling.max_kv_lag` and `Sampling.max_version_lag`"""
    max_top_logprobs: int = 20
    """`Sampling.top_logprobs`"""
    max_kv_ttl_s: int = 3600
    """`Sampling.kv_ttl_s`: seconds for which KV of a child that has ended is kept"""
    max_logit_bias: int = 1024
    """entries of `Sampling.logit_bias`"""
    max_allowed_token_ids: int = 4096
    """entries of `Sampling.allowed_token_ids`"""
    max_stop_strings: int = 16
    """entries of `Sampling.stop`"""
    max_stop_bytes: int = 256
    """UTF-8 bytes of one of them"""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field and what it accepts."""
        for name in self.__struct_fields__:
            least = 2 if name == "max_frames" else 0 if name in ("max_kv_lag", "max_kv_ttl_s") else 1
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
            if getattr(self, name) > LARGEST_LIMIT:
                raise ValueError(f"{name}={getattr(self, name)}: must be at most {LARGEST_LIMIT}")


INTEGERS = (
    "n", "max_tokens", "min_tokens", "top_k", "seed", "max_kv_lag", "max_version_lag", "finish_after", "min_len_to_cut",
    "priority", "stream_every", "top_logprobs",
)  # fmt: skip
"""fields of a Sampling"""
NUMBERS = (
    "temperature", "top_p", "min_p", "deadline_s", "kv_ttl_s", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
MAY_BE_NONE = frozenset(("seed", "max_version_lag", "finish_after", "deadline_s"))


def is_integer(value: object) -> bool:
    """Whether it is an integer, Python's or numpy's; True and False are not."""
    return type(value) is int or isinstance(value, np.integer)


def is_number(value: object) -> bool:
    """Whether it is an integer or a float, Python's or numpy's."""
    return type(value) is float or is_integer(value) or isinstance(value, np.floating)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the children of a group are drawn.

    Example:
        Sampling(n=8, temperature=1.0, top_p=0.95, max_tokens=2048, seed=7)
    """

    n: int = 1
    """children of the group (`num_return_sequences`)"""
    max_tokens: int = 256
    """a child ends with "length" after this many tokens"""
    min_tokens: int = 0
    """stop tokens cannot be drawn before this many tokens exist"""
    temperature: float = 1.0
    """0 = greedy"""
    top_k: int = 0
    """0 = off. Order and ties of truncation: docs/decisions/logprobs.md"""
    top_p: float = 1.0
    """in (0, 1]"""
    min_p: float = 0.0
    """in [0, 1): tokens less likely than min_p x the likeliest are cut"""
    stop_token_ids: tuple[int, ...] = ()
    """end a child with "stop", besides the model's own end tokens"""
    ignore_eos: bool = False
    """the model's own end tokens do not end a child (`stop_token_ids` still do)"""
    seed: int | None = None
    """None: the engine gives the group one of its own"""
    raw_logprobs: bool = False
    """also return log-probs at temperature 1 without truncation"""
    max_kv_lag: int = 0
    """maximum age, in weight versions, of cached prompt KV that a new sample may use, and of KV from before a refresh with
    kv="keep" in the middle of its prefill. A refresh with kv="recompute" recomputes all KV of started groups regardless"""
    max_version_lag: int | None = None
    """a child whose first token is further behind the live weights than this ends as "stale"; None = no bound"""
    finish_after: int | None = None
    """end the group once so many of its children have ended by themselves ("stop" or "length"): the others come back as "cut",
    with what they have. Which ones count where several end in one step, and the bias: docs/decisions/long-tail.md"""
    min_len_to_cut: int = 0
    """a child is cut no sooner than at this many tokens"""
    deadline_s: float | None = None
    """seconds from the arrival of the group: children that have not ended by then come back as "deadline" """
    priority: int = 0
    """of a client's groups those with a higher one start first, and are preempted last"""
    stream_every: int = 0
    """tokens of children that run are sent whenever so many are new; 0 = with their samples only"""
    top_logprobs: int = 0
    """also return the ids and log-probs of so many most probable tokens of each distribution that was drawn from"""
    kv_ttl_s: float = 0.0
    """seconds for which the KV of a child that has ended is kept for a turn that continues it (`Group.after`), at most
    `Limits.max_kv_ttl_s`; 0 = until its room is needed, and whole blocks only. All that is kept is at most half of the KV pools:
    docs/decisions/turns.md"""
    logit_bias: dict[int, float] | None = None
    """added to the logits of these token ids, from -100 to 100"""
    allowed_token_ids: tuple[int, ...] | None = None
    """no other token is drawn; None = all may be"""
    repetition_penalty: float = 1.0
    """from 0.01 to 100: logits of tokens of the prompt and the output are divided by it where they are positive, multiplied
    where they are not. What it means, and in which order logits are changed: docs/decisions/logprobs.md"""
    presence_penalty: float = 0.0
    """from -2 to 2: subtracted from the logits of tokens that are in the output"""
    frequency_penalty: float = 0.0
    """from -2 to 2: the same, times how often they are there"""
    stop: tuple[str, ...] = ()
    """strings that end a child with "stop", with the token that completes one in its text: `Sample.stopped_by`, `text_end`. The
    text is that of all its tokens, special ones included. Before there are more than `min_tokens` tokens they do nothing"""

    def validate(self, limits: Limits, vocab_size: int) -> None:
        """Raises ValueError naming the field, its value and what would be accepted."""
        self._validate_types()
        self._validate_draws(limits, vocab_size)
        self._validate_ends(limits)
        self._validate_top(limits)
        self._validate_logits(limits, vocab_size)
        self._validate_stop(limits)

    def _validate_types(self) -> None:
        """For those who make a group in this process: what comes over the wire has its types."""
        for name in INTEGERS:
            if not is_integer(value := getattr(self, name)) and not (value is None and name in MAY_BE_NONE):
                raise ValueError(f"{name}={value!r:.40}: must be an integer")
        for name in NUMBERS:
            if not is_number(value := getattr(self, name)) and not (value is None and name in MAY_BE_NONE):
                raise ValueError(f"{name}={value!r:.40}: must be a number")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = [value for value in getattr(self, name) or () if not is_integer(value)]
            if wrong:
                raise ValueError(f"{name} holds {wrong[0]!r:.40}: must be integers")
        wrong = [value for value in (self.logit_bias or {}).values() if not is_number(value)]
        if wrong:
            raise ValueError(f"logit_bias holds {wrong[0]!r:.40}: must be numbers")

    @property
    def changes_logits(self) -> bool:
        """Tokens are drawn from other logits than the model's."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == self.frequency_penalty == 0
        return bool(self.logit_bias) or self.allowed_token_ids is not None or not neutral

    def _validate_logits(self, limits: Limits, vocab_size: int) -> None:
        bias, allowed = self.logit_bias or {}, self.allowed_token_ids
        for name, ids, most in (
            ("logit_bias", bias, limits.max_logit_bias),
            ("allowed_token_ids", allowed or (), limits.max_allowed_token_ids),
        ):
            if len(ids) > most:
                raise ValueError(f"{len(ids)} entries of {name}: at most {most} (Limits.max_{name})")
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} holds {token}: the model's token ids are 0 to {vocab_size - 1}")
        if allowed is not None and not allowed:
            raise ValueError("allowed_token_ids=(): no token is left to draw; give some, or None for all")
        for token, value in bias.items():
            if not -100.0 <= value <= 100.0:
                raise ValueError(f"logit_bias of token {token} is {value}: must be between -100 and 100")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be between 0.01 and 100; 1 is none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)}: must be between -2 and 2; 0 is none")

    def _validate_stop(self, limits: Limits) -> None:
        if not isinstance(self.stop, tuple):
            raise ValueError(f"stop={self.stop!r:.40}: must be a tuple of strings")
        if len(self.stop) > limits.max_stop_strings:
            raise ValueError(f"{len(self.stop)} stop strings: at most {limits.max_stop_strings} (Limits.max_stop_strings)")
        for string in self.stop:
            try:
                size = len(string.encode())
            except UnicodeEncodeError:
                raise ValueError(f"stop holds {string!r:.40}: must be Unicode text, without lone surrogates") from None
            if not 1 <= size <= limits.max_stop_bytes:
                raise ValueError(f"a stop string of {size} bytes: must be 1 to {limits.max_stop_bytes} (Limits.max_stop_bytes)")

    def _validate_top(self, limits: Limits) -> None:
        if not 0 <= self.top_logprobs <= limits.max_top_logprobs:
            most = limits.max_top_logprobs
            raise ValueError(f"top_logprobs={self.top_logprobs}: must be between 0 and {most} (Limits.max_top_logprobs)")

    def _validate_ends(self, limits: Limits) -> None:
        if not 0 <= self.max_kv_lag <= limits.max_kv_lag:
            raise ValueError(f"max_kv_lag={self.max_kv_lag}: must be between 0 and {limits.max_kv_lag} (Limits.max_kv_lag)")
        if self.max_version_lag is not None and not 0 <= self.max_version_lag <= limits.max_kv_lag:
            raise ValueError(f"max_version_lag={self.max_version_lag}: must be None or between 0 and {limits.max_kv_lag}")
        if self.finish_after is not None and not 1 <= self.finish_after <= self.n:
            raise ValueError(f"finish_after={self.finish_after}: must be None or between 1 and n={self.n}")
        if not 0 <= self.min_len_to_cut <= self.max_tokens:
            raise ValueError(f"min_len_to_cut={self.min_len_to_cut}: must be between 0 and max_tokens={self.max_tokens}")
        if self.min_len_to_cut and self.finish_after is None:
            raise ValueError(f"min_len_to_cut={self.min_len_to_cut} without finish_after: nothing is cut; set finish_after")
        if self.deadline_s is not None and not 0.0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s={self.deadline_s}: must be None or a positive, finite number of seconds")
        if not 0.0 <= self.kv_ttl_s <= limits.max_kv_ttl_s:
            raise ValueError(f"kv_ttl_s={self.kv_ttl_s}: must be between 0 and {limits.max_kv_ttl_s} (Limits.max_kv_ttl_s)")
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority={self.priority}: must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
        if self.stream_every < 0:
            raise ValueError(f"stream_every={self.stream_every}: must be 0 (off) or a number of tokens")

    def _validate_draws(self, limits: Limits, vocab_size: int) -> None:
        if not 1 <= self.n <= limits.max_n:
            raise ValueError(f"n={self.n}: must be between 1 and {limits.max_n} (Limits.max_n)")
        if not 1 <= self.max_tokens <= limits.max_tokens:
            raise ValueError(f"max_tokens={self.max_tokens}: must be between 1 and {limits.max_tokens} (Limits.max_tokens)")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens}: must be between 0 and max_tokens={self.max_tokens}")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or a finite number up to 100")
        if 0.0 < self.temperature < 1e-3:
            raise ValueError(f"temperature={self.temperature}: too small to divide by; use 0 for greedy or at least 0.001")
        if not 0 <= self.top_k <= 2**31 - 1:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or a positive 32-bit integer")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p={self.min_p}: must be in [0, 1)")
        if len(self.stop_token_ids) > limits.max_stop_token_ids:
            raise ValueError(
                f"{len(self.stop_token_ids)} stop_token_ids: at most {limits.max_stop_token_ids} (Limits.max_stop_token_ids)"
            )
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_token_ids holds {token}: the model's token ids are 0 to {vocab_size - 1}")
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed={self.seed}: must be between 0 and 2**63 - 1, or None")


class PartialSample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a child already has: it goes on from there, as if it had never stopped.

    Example:
        PartialSample(index=2, token_ids=sample.token_ids, logprobs=sample.logprobs, weight_versions=sample.weight_versions)
    """

    index: int
    """of the child, 0 to n - 1"""
    token_ids: np.ndarray
    """[tokens] int32, at least one and at most `Sampling.max_tokens`. A child that has its last one ends at once"""
    logprobs: np.ndarray
    """[tokens] float32"""
    weight_versions: list[tuple[int, int]]
    """(first token, version) spans, ascending from token 0"""
    raw_logprobs: np.ndarray | None = None
    """[tokens] float32, if `Sampling.raw_logprobs`"""
    top_ids: np.ndarray | None = None
    """[tokens, k] int32, if `Sampling.top_logprobs` = k"""
    top_logprobs: np.ndarray | None = None
    """[tokens, k] float32, as many"""

    @classmethod
    def of(cls, sample: Sample) -> PartialSample:
        """Make it of a sample that did not end by itself."""
        return cls(
            index=sample.index,
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            weight_versions=sample.weight_versions,
            raw_logprobs=sample.raw_logprobs,
            top_ids=sample.top_ids,
            top_logprobs=sample.top_logprobs,
        )

    def validate(self, sampling: Sampling, vocab_size: int) -> None:
        """Raises ValueError naming the child and what would be accepted."""
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
        firsts = [first for first, _ in self.weight_versions]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] >= len(tokens):
            raise ValueError(f"{who} has weight_versions that begin at {firsts}: must ascend from 0 to below {len(tokens)}")
        if any(version < 0 for _, version in self.weight_versions):
            raise ValueError(f"{who} has a weight version below 0: versions count up from 0")

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
        """How the child has ended, if it has: its last token is one of `eos`, or it has all its tokens."""
        tokens = self.token_ids
        if int(tokens[-1]) in eos and len(tokens) > sampling.min_tokens:
            return "stop"
        return "length" if len(tokens) == sampling.max_tokens else None

    def validate_unfinished(self, sampling: Sampling, eos: frozenset[int], version: int) -> None:
        """Raises ValueError if the child goes on behind one of the tokens `eos`, or if its first token is further behind
        `version`, the live one, than `Sampling.max_version_lag`."""
        for at, token in enumerate(self.token_ids[sampling.min_tokens : -1].tolist(), sampling.min_tokens):
            if token in eos:
                raise ValueError(f"partial sample {self.index} goes on behind its token {at}, the stop token {token}")
        lag, first = sampling.max_version_lag, self.weight_versions[0][1]
        if lag is not None and first < version - lag:
            raise ValueError(
                f"partial sample {self.index} began with version {first} and {version} is live: more than max_version_lag={lag}; "
                "leave it out or raise max_version_lag"
            )


class TokenChunk(PartialSample, frozen=True, kw_only=True, eq=False):
    """Tokens of a child that runs, those that follow what was told of it before. Spans count from the chunk's first token.

    Example:
        Chunk(index=2, first=16, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
              weight_versions=[(0, 4), (1, 5)], seed=7)
        # tokens 16 and 17 of child 2; the second one was made by version 5 of the weights
    """

    first: int
    """position of the first token among those of the child"""
    seed: int
    """the group's, also where the engine chose it"""


class Group(msgspec.Struct, frozen=True, eq=False):
    """One prompt and how its children are sampled.

    Example:
        Group(id="step3/17", prompt=np.array([1, 42, 7], np.int32), sampling=Sampling(n=8))
    """

    id: str
    prompt: np.ndarray
    """[prompt_tokens] int32 token ids"""
    sampling: Sampling
    indices: tuple[int, ...] | None = None
    """which of the n children are wanted here, ascending; None = all. Another engine may have the others: a child's numbers
    depend on its own index only"""
    partials: tuple[PartialSample, ...] = ()
    """children that have tokens already"""
    score: bool = False
    """nothing is drawn: the children come back as "scored" with the log-probs of the tokens in `partials`, those that they would
    have if they were drawn with this sampling"""
    after: tuple[str, int] | None = None
    """(group id, index) of the child that this group continues, where the prompt is that child's prompt and tokens and more: a
    hint, that KV of this turn may be taken over whichever weights computed it. The child of an unknown id, or of another
    client's group, changes nothing"""

    @property
    def wanted(self) -> Sequence[int]:
        """Indices of the children that this group asks for, ascending."""
        return range(self.sampling.n) if self.indices is None else self.indices

    def validate(self, limits: Limits, vocab_size: int, context: int) -> None:
        """Raises ValueError with the reason. `vocab_size`: rows of the embedding; `context`: positions of the model."""
        size = len(self.id.encode())
        if not 1 <= size <= limits.max_id_bytes:
            raise ValueError(f"group id of {size} bytes: must be 1 to {limits.max_id_bytes} bytes (Limits.max_id_bytes)")
        if self.prompt.ndim != 1 or self.prompt.dtype != np.int32:
            raise ValueError(f"prompt is {self.prompt.dtype} of shape {self.prompt.shape}: must be int32 [prompt_tokens]")
        if not 1 <= len(self.prompt) <= limits.max_prompt_tokens:
            raise ValueError(
                f"prompt of {len(self.prompt)} tokens: must be 1 to {limits.max_prompt_tokens} (Limits.max_prompt_tokens)"
            )
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

    def _validate_children(self, vocab_size: int) -> None:
        n = self.sampling.n
        if self.indices is not None:
            if list(self.indices) != sorted(set(self.indices)) or not self.indices:
                raise ValueError(f"indices={self.indices}: must be ascending, each once, and at least one")
            if self.indices[0] < 0 or self.indices[-1] >= n:
                raise ValueError(f"indices={self.indices}: must be between 0 and n - 1 = {n - 1}")
            if self.sampling.finish_after is not None and self.sampling.finish_after > len(self.indices):
                raise ValueError(f"finish_after={self.sampling.finish_after}: at most the {len(self.indices)} wanted children")
        having = [child.index for child in self.partials]
        if len(set(having)) < len(having) or not set(having) <= set(self.wanted):
            raise ValueError(f"partial samples {having}: each must be one of the wanted ones, once")
        sampling = self.sampling
        if self.score:  # what is asked for is not there yet
            sampling = msgspec.structs.replace(sampling, raw_logprobs=False, top_logprobs=0)
        for child in self.partials:
            child.validate(sampling, vocab_size)
        if self.score and set(having) != set(self.wanted):
            raise ValueError(
                f"score of children {list(self.wanted)[:20]}, given {having[:20]}: give the tokens of all, in partials"
            )
        if self.score and self.sampling.finish_after is not None:
            raise ValueError(f"finish_after={self.sampling.finish_after} with score: all children end; leave it out")


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False, omit_defaults=True, gc=False):
    """One finished child.

    Example:
        Sample(group_id="step3/17", index=2, token_ids=array([11, 5], int32), logprobs=array([-0.1, -2.3], float32),
               finish_reason="stop", weight_versions=[(0, 4), (1, 5)], prompt_tokens=3)
        # token 0 was made by version 4 of the weights, token 1 and everything after it by version 5
    """

    group_id: str
    index: int
    """0 to n - 1"""
    token_ids: np.ndarray
    """[tokens] int32, the stop token included"""
    logprobs: np.ndarray
    """[tokens] float32: log-probability under the distribution each token was drawn from (temperature and truncation
    included). At temperature 0 that distribution is a point mass, so the value is the one at temperature 1 instead."""
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]]
    """(first token, version) spans, ascending"""
    prompt_tokens: int
    raw_logprobs: np.ndarray | None = None
    """[tokens] float32 at temperature 1 without truncation, if `Sampling.raw_logprobs`"""
    error: str | None = None
    """why, when finish_reason is "error" """
    seconds: float = 0.0
    """from the arrival of the group to the end of this child"""
    offloads: int = 0
    """times its KV left the device for host memory"""
    seed: int = 0
    """the group's, also where the engine chose it: with it, a child that did not end by itself can go on"""
    top_ids: np.ndarray | None = None
    """[tokens, k] int32, if `Sampling.top_logprobs` = k: the most probable tokens of the distribution that each token was drawn
    from, the likeliest first, of equal ones the lower id. -1 where fewer than k were left to draw from"""
    top_logprobs: np.ndarray | None = None
    """[tokens, k] float32: their log-probs there, as in `logprobs`; -inf where the id is -1"""
    stopped_by: str | None = None
    """which of `Sampling.stop` ended it: of those that the last token completes the one that begins first; None: none did"""
    text_end: int | None = None
    """characters of the text before that string: `tokenizer.decode(token_ids)[:text_end]`; docs/decisions/stop-strings.md"""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of a manifest: what is known of a tensor before its bytes come.

    Example:
        TensorInfo("model.norm.weight", "bfloat16", (576,), "5a1f…")
    """

    name: str
    dtype: str
    """as torch names it, e.g. "bfloat16": the one it is sent in, whatever the model's is"""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128, 32 hex digits, of its elements in C order, little-endian"""


def manifest_digest(tensors: Iterable[TensorInfo]) -> str:
    """Return the SHA-256, in hex, of a manifest, whatever its order."""
    lines = sorted(f"{len(t.name)}:{t.name}\t{t.dtype}\t{t.shape}\t{t.digest}\n" for t in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Served(NamedTuple):
    """Weights that are live, or were. A version names one digest, for as long as anybody remembers it."""

    version: int = 0
    digest: str = ""
    """`manifest_digest` of all of them in the model's dtype; "": not known"""

    def differ(self, other: Served) -> bool:
        """Whether these and the others are known to be other weights under one version."""
        return self.version == other.version and "" not in (self.digest, other.digest) and self.digest != other.digest

    def follow(self, before: Served) -> bool:
        """Whether what came under the weights `before` may go on under these: newer ones, or the same."""
        return self.version >= before.version and not self.differ(before)


NONE_SERVED = Served()


class LoraTarget(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor that an adapter changes: weight + scale · B A.

    Example:
        LoraTarget("model.layers.0.mlp.up_proj.weight", "….lora_A.weight", "….lora_B.weight", 2.0)
    """

    weight: str
    """the model's name for it"""
    a: str
    """name in the manifest, [rank, in]"""
    b: str
    """name in the manifest, [out, rank]"""
    scale: float
    transposed: bool = False
    """the weight is [in, out], as in transformers' Conv1D (`fan_in_fan_out`)"""


class Adapter(msgspec.Struct, frozen=True):
    """What the tensors of a LoRA refresh are for. Tensors of the manifest that are no target's A or B are whole ones."""

    base: str | None
    """`manifest_digest` of the weights that it was trained on; None: unknown, so not compared"""
    targets: list[LoraTarget]


class BaseMismatch(ValueError):
    """A refresh that says how weights change was made for other weights than these."""


class Refreshed(msgspec.Struct, frozen=True, kw_only=True):
    """A refresh that is live."""

    version: int
    via: str
    """how the tensors came: memory, shm, inline, delta, files, cuda_ipc, gloo or nccl"""
    bytes: int
    """of the tensors that are new, as they were sent; with an adapter, of the whole model"""
    seconds: float
    """from the call to the answer"""
    staged_seconds: float
    """from the manifest to the last checked byte, beside generation"""
    paused_seconds: float
    """without a step: the exchange of the weights"""
    digest: str
    """`manifest_digest` of all live weights in the model's dtype"""
    sent_bytes: int = 0
    """that travelled: less than `bytes` for an adapter, and via delta"""
    reason: str = ""
    """why they came this way, told by the client"""
