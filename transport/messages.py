"""Messages as msgspec tagged unions. docs/wire.md describes when each is sent and how it is answered.

    client -> service:  Hello Submit Abort Ack StatusRequest Heartbeat Goodbye
                        Begin Chunk Prepare Commit Abandon WeightsRequest Share Control Replicas Sleep Wake
    replica -> router:   Join Leave          router -> replica:   Joined Refused
    service -> client:  Welcome Refused SamplesDone Progress StatusReply Alive Closing
                        Lease Staged Applied Asleep Done

A request has a request_id; its answer, or Refused, has the same one.

To add a message: define a Struct with its own tag, add it to the union of its direction, and a request also to ANSWERS, and
handle it at the receiving end. A changed field or meaning raises PROTOCOL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from rollout.engine.values import FinishReason, KVPolicy, Limits, Refreshed, Routing, Sampling, Tag
from rollout.transport.weights import Offer

PROTOCOL = 5
DIGESTS = "digests"
"""capability of both ends: Alive and Submit name a weight version together with the digest of its weights"""
GATHERS = "gathers"
"""capability of a router: its samples may wait some milliseconds to share a message"""
UNTAKEN_BYTES = 8 << 20
"""bytes that a client may send ahead of `Alive.taken_bytes`; the chunks of a refresh have their own window"""
DIGEST_BYTES = 16
MOST_REPLICAS = 1024
"""of a fleet"""
ROUTES_FRAME_BYTES = 4 << 20
"""routes of experts travel in frames of at most so many bytes, since those of a long sample exceed `Limits.max_frame_bytes`"""
OTHER_FRAMES = 16
"""more than a message with routes has besides them"""

SessionId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
PushId = SessionId
"""the client's id of one refresh; repeated requests about it carry the same id"""


class Hello(msgspec.Struct, frozen=True, eq=False, tag="hello"):
    """First message on every connection. Unknown fields are ignored, so that another version can be answered."""

    protocol: int
    session: SessionId
    """128 random bits chosen by the client; they authorize access to the groups of the session"""
    number: int = 0
    """incremented when the state of the client has changed since its last Hello; Welcome repeats it"""
    name: str = ""
    """shown in logs and status"""
    capabilities: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """[groups, DIGEST_BYTES] uint8: digests of the sent groups that the client still needs. The service drops the other groups
    of the session, which repairs a lost Abort or Ack"""
    alone: bool = False
    """end all sessions of other routers with this key: a router owns its replicas, so the previous router is dead"""


class PackedChildren(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """Columns of C children, end to end: T tokens and S version spans in all.

    Example:
        children 2 and 5 have three tokens and one; version 4 generated the last two tokens of child 2

        indices [2, 5]   lengths [3, 1]   token_ids [11, 5, 7, 40]   spans [[0, 0, 3], [0, 1, 4], [1, 0, 3]]
    """

    indices: np.ndarray
    """[C] int32: index of each child"""
    lengths: np.ndarray
    """[C] int32: tokens of each child"""
    token_ids: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32"""
    spans: np.ndarray
    """[S, 3] int64: place among the C children, first token, version"""
    kv_spans: np.ndarray | None = None
    """[K, 4] int64: place among the C children, token, position, version, see `Sample.kv_versions`; None: there are none"""
    raw_logprobs: np.ndarray | None = None
    """[T] float32, if the group asks for them"""
    top_ids: np.ndarray | None = None
    """[T, k] int32, if the group asks for the k most probable tokens"""
    top_logprobs: np.ndarray | None = None
    """[T, k] float32"""
    routed_experts: list[np.ndarray] | None = None
    """[T, layers, chosen] uint8 or uint16 in frames of at most ROUTES_FRAME_BYTES, if the group asks for routes"""

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield every array, in the order of the fields."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, list):
                yield from value
            elif value is not None:
                yield value


class Submit(msgspec.Struct, frozen=True, eq=False, tag="submit", forbid_unknown_fields=True, omit_defaults=True):
    """Submit a group. Idempotent."""

    group_id: str
    prompt: np.ndarray
    """[prompt_tokens] int32"""
    sampling: Sampling
    serial: int = 0
    """part of the digest: distinguishes consecutive groups of one id and content"""
    require_version: int = 0
    """refuse the group if the live weights are older"""
    indices: tuple[int, ...] | None = None
    """requested children, ascending; None = all n"""
    partials: PackedChildren | None = None
    """existing tokens of children, which continue from there"""
    score: bool = False
    """score the tokens in `partials`; sample nothing"""
    after: tuple[str, int] | None = None
    """(group id, index) of the child of this session that the group continues: a hint, see `Group.after`"""
    client: str = ""
    """client of the router that sends this: the service shares its capacity between these, not between routers"""
    require_digest: str = ""
    """refuse the group if the live weights have version `require_version` and another digest; empty for services without
    DIGESTS"""
    redraw: bool = False
    """with `score`: draw the tokens again, see `Group.redraw`"""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End these groups, and these single children of others. Unfinished children return as "aborted"; pinned KV of finished
    ones is released. Unknown ids are ignored."""

    group_ids: list[str]
    children: list[tuple[str, int]] = []
    """(group id, index)"""


class Ack(msgspec.Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """Acknowledge samples (group id, index); the service drops them."""

    samples: list[tuple[str, int]]
    progress: int = 0
    """number of the last Progress received on this connection; 0 = none"""


class StatusRequest(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    request_id: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """Sent once a second."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """End the session: abort its groups. Also the answer to Closing."""


class Begin(msgspec.Struct, frozen=True, eq=False, tag="begin", forbid_unknown_fields=True):
    """Stage new weights. Answer: Lease; Busy names the owner of the refresh in progress, WeightsRefused the tensor."""

    request_id: int
    push_id: PushId
    manifest: np.ndarray
    """[bytes] uint8, see rollout.transport.weights.manifest"""
    offer: Offer
    version: int | None = None
    """above the live one; None = the next"""
    partial: bool = False
    """tensors that are not in the manifest keep their values"""
    kv: KVPolicy = "keep"
    adapter: np.ndarray | None = None
    """[bytes] uint8, see rollout.transport.weights.manifest: targets of a LoRA adapter, whose tensors the manifest lists; the
    new weights are base + adapter"""
    base: str | None = None
    """digest of the weights that the adapter was trained on; None = unknown. If the service's base differs: WrongBase"""


class Chunk(msgspec.Struct, frozen=True, eq=False, tag="chunk", forbid_unknown_fields=True):
    """The next bytes of an inline payload. Answer: Staged, after they are staged."""

    request_id: int
    push_id: PushId
    offset: int
    data: list[np.ndarray]
    """each [bytes] uint8"""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True):
    """Ask for an answer when everything is staged and checked. A router that commits on several services sends it to all
    before the first Commit. Answer: Staged."""

    request_id: int
    push_id: PushId


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Apply the staged weights at the next step boundary after everything is staged. Answer: Applied."""

    request_id: int
    push_id: PushId
    digest: str
    """of the manifest"""
    kv: KVPolicy | None = None
    """replaces the one of Begin"""


class Abandon(msgspec.Struct, frozen=True, tag="abandon", forbid_unknown_fields=True):
    """Discard the staged weights. Answer: Done; WeightsRefused if they are live already."""

    request_id: int
    push_id: PushId


class WeightsRequest(msgspec.Struct, frozen=True, tag="weights", forbid_unknown_fields=True):
    """Query live and staged weights. Answer: StatusReply."""

    request_id: int
    verify: bool = False
    """also digest the live bytes: one pass over all weights between two steps"""


class Share(msgspec.Struct, frozen=True, tag="share", forbid_unknown_fields=True):
    """Write the live weights to shared memory, for another service on this host. Answer: StatusReply with `version`, `digest`,
    `manifest` and `offer`; the offer ends when other weights become live."""

    request_id: int


class Control(msgspec.Struct, frozen=True, tag="control", forbid_unknown_fields=True):
    """Pause, resume, drain or abort the groups of all clients. Answer: Done; for drain, when nothing runs."""

    request_id: int
    action: Literal["pause", "resume", "drain", "abort_all"]


class Replicas(msgspec.Struct, frozen=True, tag="replicas", forbid_unknown_fields=True):
    """Change the replicas of a fleet: scale to `count`, drain one, or restart all one after the other. Answer: Done, when the
    change has started."""

    request_id: int
    action: Literal["scale", "drain", "roll"]
    count: int = 0
    """replicas, for scale"""
    name: str = ""
    """replica, for drain"""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", forbid_unknown_fields=True):
    """Release device memory until Wake. Answer: Asleep."""

    request_id: int
    level: Literal[1, 2] = 1
    """1: move the weights to host memory; 2: drop them"""


class Wake(msgspec.Struct, frozen=True, tag="wake", forbid_unknown_fields=True):
    """Allocate the memory again. Answer: Done."""

    request_id: int
    tags: tuple[Tag, ...] | None = None
    """parts to wake; None = all that are asleep"""


class Welcome(msgspec.Struct, frozen=True, eq=False, tag="welcome"):
    """Answer to Hello. Unknown fields are ignored."""

    protocol: int
    hello: int
    """number of the answered Hello; the client ignores answers to older ones"""
    incarnation: str
    """random hex, new at each start of the service; with a journal, it survives restarts"""
    model: str
    """folder of the model on the service's host, for its tokenizer"""
    vocab_size: int
    """rows of the embedding: token ids are 0 to vocab_size - 1"""
    context: int
    """maximum of prompt tokens + max_tokens"""
    eos_token_ids: tuple[int, ...]
    version: int
    """of the weights"""
    limits: Limits
    capabilities: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """[groups, DIGEST_BYTES] uint8: digests of the groups in Hello that the service has; the client submits the others
    again"""
    arithmetic: str = ""
    """name/version of the arithmetic: services with equal arithmetic, configuration, block_size, kv_dtype, weights, prompts and
    seeds generate equal samples"""
    configuration: str = ""
    """digest of what the model's forward depends on besides its weights, 40 hex digits; "": unknown"""
    tokenizer: str = ""
    """digest of the text of each token, in which stop strings are searched, 40 hex digits; "": the service has none"""
    block_size: int = 0
    """tokens of a KV block; 0: unknown"""
    kv_dtype: str = ""
    """dtype in which KV is stored; "": unknown"""
    starts: int = 0
    """number of starts of this incarnation, if the service has a journal; 0: no journal, and a restart loses all groups"""
    digest: str = ""
    """of the weights; "": unknown"""
    served_model_name: str = ""
    """under which HTTP clients know the model; "": the name of its folder"""
    routing: Routing | None = None
    """shape of the routes of experts that it keeps for `Sampling.routed_experts`; None: it keeps none"""

    def __repr__(self) -> str:
        """Describe the service in one line."""
        return f"Welcome({self.model!r} version {self.version}, context {self.context}, {self.vocab_size} token ids)"


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Reject a group or a request. `kind` is one of `rollout.transport.errors.KINDS`; without ids, the message itself was
    invalid."""

    kind: str
    message: str
    group_id: str | None = None
    request_id: int | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One child of SamplesDone, without its arrays. Fields as in `Sample`."""

    group: Annotated[int, msgspec.Meta(ge=0)]
    """place among the G groups"""
    index: int
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    """number of its rows in the arrays; the children follow each other"""
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]]
    seconds: float
    offloads: int
    error: str | None
    stopped_by: str | None
    text_end: int | None
    prompt_routes: Annotated[int, msgspec.Meta(ge=0)] | None
    """number of its rows in `SamplesDone.prompt_routes`; None: it has none"""
    kv_versions: list[tuple[int, int, int]] = []


class SamplesDone(msgspec.Struct, frozen=True, eq=False, tag="samples", forbid_unknown_fields=True):
    """Finished children of G groups, with T tokens in all. Sent again after a reconnect until acknowledged: the client
    identifies repeats by (group id, index)."""

    group_ids: list[str]
    seeds: list[int]
    """[G] of each group"""
    prompt_tokens: list[int]
    """[G] of each group"""
    ended: list[Ended]
    token_ids: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32"""
    raw_logprobs: np.ndarray | None = None
    """[T] float32"""
    top_ids: np.ndarray | None = None
    """[T, k] int32"""
    top_logprobs: np.ndarray | None = None
    """[T, k] float32"""
    ranks: np.ndarray | None = None
    """[T] int32, 0 for tokens of children without ranks"""
    routed_experts: list[np.ndarray] | None = None
    """[T, layers, chosen] uint8 or uint16, in frames as in PackedChildren"""
    prompt_routes: list[np.ndarray] | None = None
    """[positions, layers, chosen] of prompts, in frames: of the children that have them, one after the other"""


class Progress(msgspec.Struct, frozen=True, eq=False, tag="progress", forbid_unknown_fields=True):
    """New tokens of C running children, of G groups with `Sampling.stream_every`. On a new connection they start again from the
    first token. Samples are complete without them."""

    number: int
    """counts up from 1 on each connection"""
    group_ids: list[str]
    seeds: list[int]
    """[G] of each group"""
    groups: np.ndarray
    """[C] int32: place among the G groups"""
    firsts: np.ndarray
    """[C] int32: position of each child's first new token"""
    children: PackedChildren
    """the new tokens; spans count from each child's first new token"""


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply", forbid_unknown_fields=True):
    request_id: int
    status: bytes
    """a JSON object"""


class Lease(msgspec.Struct, frozen=True, tag="lease", forbid_unknown_fields=True):
    """The client owns the staging area until it sends nothing about this refresh for lease_s seconds."""

    request_id: int
    version: int
    """of the weights after Commit"""
    lease_s: float
    window_bytes: int
    """bytes of unanswered chunks that may be in flight"""


class Staged(msgspec.Struct, frozen=True, tag="staged", forbid_unknown_fields=True):
    """The chunk and all before it are staged; for Prepare: everything is staged and matches the manifest."""

    request_id: int


class Applied(msgspec.Struct, frozen=True, tag="applied", forbid_unknown_fields=True):
    """The weights are live: they generate every further token."""

    request_id: int
    refreshed: Refreshed


class Asleep(msgspec.Struct, frozen=True, tag="asleep", forbid_unknown_fields=True):
    request_id: int
    freed_bytes: int
    """device memory that was released; without a device, host memory"""


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    request_id: int


class Alive(msgspec.Struct, frozen=True, tag="alive", forbid_unknown_fields=True, omit_defaults=True):
    """Heartbeat of the service's loop: sent once a second, and after every quarter of UNTAKEN_BYTES received."""

    steps: int
    """steps of the engine since the service started"""
    version: int
    """of the weights"""
    taken_bytes: int = 0
    """bytes of messages that the loop has received on this connection since Welcome"""
    digest: str = ""
    """of the weights; empty for clients without DIGESTS"""


class Closing(msgspec.Struct, frozen=True, tag="closing", forbid_unknown_fields=True):
    """The service is shutting down; this is its last message. The client has received everything and answers with Goodbye."""

    reason: str


# between a joining replica and its router, at the router's address for replicas


ReplicaName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\d+\Z)[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}\Z")]
"""not a number: those are names of replicas that a router starts itself"""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join a router as a replica; repeated every second. Answer: Joined, or Refused. Unknown fields are ignored."""

    protocol: int
    name: ReplicaName
    incarnation: SessionId
    """of the process"""
    address: str
    """of the replica's service, as the router reaches it"""
    server: str = ""
    """public key of that service; "": it has no keys"""
    pid: int = 0


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """The replica has shut down in an orderly way."""

    name: ReplicaName
    incarnation: SessionId


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The router has the replica."""

    leave: Literal["", "restart", "stop"] = ""
    """request to shut down: "stop" for good, "restart" to be replaced by a new process"""
    why: str = ""


ReplicaMessage = Join | Leave
RouterMessage = Joined | Refused

WeightMessage = Begin | Chunk | Prepare | Commit | Abandon
AdminMessage = WeightsRequest | Share | Control | Replicas | Sleep | Wake
ClientMessage = Hello | Submit | Abort | Ack | StatusRequest | Heartbeat | Goodbye | WeightMessage | AdminMessage
Answer = Lease | Staged | Applied | Asleep | Done
ServiceMessage = Welcome | Refused | SamplesDone | Progress | StatusReply | Alive | Closing | Answer

ANSWERS: dict[type, type] = {
    **dict.fromkeys((StatusRequest, WeightsRequest, Share), StatusReply),
    **dict.fromkeys((Chunk, Prepare), Staged),
    **dict.fromkeys((Abandon, Control, Replicas, Wake), Done),
    Begin: Lease,
    Commit: Applied,
    Sleep: Asleep,
}
"""answer of each request, other than Refused"""


ANSWER_HEADER_BYTES = 1 << 24
REPLICA_HEADER_BYTES = 1 << 20
"""of a replica, which has one client and may lie: its messages are decoded in the router's process"""


def answer_limits(limits: Limits, header_bytes: int | None = None) -> Limits:
    """Return the limits for messages of a service. header_bytes: of their headers; None: wide, as the header of a status grows
    with the number of clients."""
    widened = max(limits.max_header_bytes, ANSWER_HEADER_BYTES)
    return msgspec.structs.replace(limits, max_header_bytes=widened if header_bytes is None else header_bytes)


@lru_cache(64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; cached, since numpy takes 4 microseconds for it."""
    return dtype.name


def digest(submit: Submit) -> bytes:
    """Hash what a Submit asks for, with BLAKE2b, to DIGEST_BYTES bytes. A NaN equals itself."""
    arrays = [submit.prompt, *(() if submit.partials is None else submit.partials.arrays())]
    kinds = [(dtype_name(array.dtype), array.shape) for array in arrays]
    fields = (submit.group_id, submit.serial, submit.sampling, submit.indices, submit.after, kinds, submit.score, submit.redraw)
    state = hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=DIGEST_BYTES)
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.digest()


def digests(of: Iterable[bytes]) -> np.ndarray:
    """Join digests to [groups, DIGEST_BYTES] uint8, as Hello and Welcome list them."""
    return np.frombuffer(b"".join(of), np.uint8).reshape(-1, DIGEST_BYTES)
