"""The messages, as msgspec tagged unions. docs/wire.md tells when each is sent and what answers it.

    client -> service:  Hello Submit Abort Ack StatusRequest Heartbeat Goodbye
                        Begin Chunk Prepare Commit Abandon WeightsRequest Share Control Replicas Sleep Wake
    replica -> front:   Join Leave          front -> replica:   Joined Refused
    service -> client:  Welcome Refused SampleDone SamplesDone Progress StatusReply Alive Closing
                        Lease Staged Applied Asleep Done

A message with a request_id is answered by one with the same request_id, a Refused if it is refused.

Adding one: define the Struct with its own tag, put it into the union of its direction, a request into ANSWERS as well, handle
it on that side. A changed meaning or a changed field raises PROTOCOL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from engine.types import FinishReason, KVPolicy, Limits, Refreshed, Sample, Sampling, Tag
from transport.partial import PartialColumns
from transport.weights import Offer

PROTOCOL = 2
TAKEN = "taken"
"""capability of both ends: Alive says how much the service has taken, and the client waits for it"""
BATCHES = "batches"
"""capability of a client: it takes SamplesDone in place of many SampleDone"""
DIGESTS = "digests"
"""capability of both ends: a version is told with the digest of its weights, by Alive and by Submit"""
GATHERS = "gathers"
"""capability of a client that is a front: its samples may wait for each other for some milliseconds, while more are made"""
UNTAKEN_BYTES = 8 << 20
"""that a client sends ahead of what the service says it has taken; chunks of weights have their own window"""
DIGEST_BYTES = 16
MOST_REPLICAS = 1024
"""of a fleet"""

SessionId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
PushId = SessionId
"""made by the client for one refresh: whoever repeats a request about it means the same one"""


class Hello(msgspec.Struct, frozen=True, eq=False, tag="hello"):
    """First message on every connection. Unknown fields pass, so that an end of another version can be told so."""

    protocol: int
    session: SessionId
    """made by the client, 128 random bits; who knows it owns the session's groups"""
    number: int = 0
    """raised by the client whenever its state has changed since its last Hello; Welcome repeats it"""
    name: str = ""
    """for people: logs, status"""
    capabilities: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """[groups, DIGEST_BYTES] uint8: digests of the groups sent before and still wanted. Whatever else the service holds for
    this session is dropped, so aborts and acks that a broken link swallowed are made good here."""
    alone: bool = False
    """all other fronts' sessions of this key end: a front has its replicas for itself, and the one before it is dead"""


class Submit(msgspec.Struct, frozen=True, eq=False, tag="submit", forbid_unknown_fields=True, omit_defaults=True):
    """Take a group. Repeating it is harmless."""

    group_id: str
    prompt: np.ndarray
    """[prompt_tokens] int32"""
    sampling: Sampling
    serial: int = 0
    """part of the digest: tells two groups apart that use one id, one after the other, with the same content"""
    require_version: int = 0
    """refuse the group if the live weights are older than this"""
    indices: tuple[int, ...] | None = None
    """which of the n children are wanted, ascending; None = all"""
    partials: PartialColumns | None = None
    """children that have tokens already and go on from there"""
    score: bool = False
    """those of `partials` are the tokens whose log-probs are wanted; nothing is drawn"""
    after: tuple[str, int] | None = None
    """(group id, index) of the child of this session that the group continues: a hint, see `Group.after`"""
    client: str = ""
    """on whose behalf a front asks: its clients share as if each had come by itself"""
    require_digest: str = ""
    """refuse the group if the live weights are of `require_version` and have another digest; left out for services without
    DIGESTS"""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """End these groups, and these single children of others; what is unfinished of them comes back as "aborted", what is kept
    of them is given up. Unknown ids are nothing to do."""

    group_ids: list[str]
    children: list[tuple[str, int]] = []
    """(group id, index)"""


class Ack(msgspec.Struct, frozen=True, tag="ack", forbid_unknown_fields=True):
    """These samples (group id, index) have arrived; the service may forget them."""

    samples: list[tuple[str, int]]
    progress: int = 0
    """number of the last Progress that has arrived on this connection; the service may send further ones"""


class StatusRequest(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    request_id: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", forbid_unknown_fields=True):
    """The client lives; once a second."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """The session ends now: abort its groups, forget it. Also the answer to Closing."""


class Begin(msgspec.Struct, frozen=True, eq=False, tag="begin", forbid_unknown_fields=True):
    """Stage new weights. Answer: Lease, or Busy with the owner, WeightsRefused with the tensor, SourceUnreachable."""

    request_id: int
    push_id: PushId
    manifest: np.ndarray
    """[bytes] uint8, see transport.weights.manifest"""
    offer: Offer
    version: int | None = None
    """above the live one; None = the next"""
    partial: bool = False
    """tensors that are not in the manifest stay as they are"""
    kv: KVPolicy = "keep"
    adapter: np.ndarray | None = None
    """[bytes] uint8, see transport.weights.manifest: the tensors are those of a LoRA adapter, the weights are to be base +
    adapter"""
    base: str | None = None
    """digest of the weights that the adapter was trained on; None = unknown. Answer to another one: WrongBase"""


class Chunk(msgspec.Struct, frozen=True, eq=False, tag="chunk", forbid_unknown_fields=True):
    """The next bytes of an inline payload. Answer: Staged, once they are."""

    request_id: int
    push_id: PushId
    offset: int
    data: list[np.ndarray]
    """each [bytes] uint8"""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True):
    """Say when all of it is staged and checked: Commit can then fail only as a machine can. For whoever commits in several
    services at once. Answer: Staged, or why not."""

    request_id: int
    push_id: PushId


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Apply it at the next step boundary at which all of it is staged. Answer: Applied, or why not."""

    request_id: int
    push_id: PushId
    digest: str
    """of the manifest"""
    kv: KVPolicy | None = None
    """in place of Begin's"""


class Abandon(msgspec.Struct, frozen=True, tag="abandon", forbid_unknown_fields=True):
    """Forget what is staged. Answer: Done; WeightsRefused if it is live already."""

    request_id: int
    push_id: PushId


class WeightsRequest(msgspec.Struct, frozen=True, tag="weights", forbid_unknown_fields=True):
    """What is live and what is staged. Answer: StatusReply."""

    request_id: int
    verify: bool = False
    """also take the digest of the live bytes, which costs a pass over all of them between two steps"""


class Share(msgspec.Struct, frozen=True, tag="share", forbid_unknown_fields=True):
    """Write the live weights into shared memory, for another service of this host to read. Answer: StatusReply, with `version`,
    `digest`, the `manifest` and the `offer`, which is void once other weights are live."""

    request_id: int


class Control(msgspec.Struct, frozen=True, tag="control", forbid_unknown_fields=True):
    """For the service as a whole, all clients' groups. Answer: Done; to drain: when nothing runs any more."""

    request_id: int
    action: Literal["pause", "resume", "drain", "abort_all"]


class Replicas(msgspec.Struct, frozen=True, tag="replicas", forbid_unknown_fields=True):
    """Change the replicas of a fleet: how many there are, one that is to go, all restarted one after the other. Answer: Done,
    once it has started."""

    request_id: int
    action: Literal["scale", "drain", "roll"]
    count: int = 0
    """of scale"""
    name: str = ""
    """of drain: the replica"""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", forbid_unknown_fields=True):
    """Give the device's memory to others until Wake. Answer: Asleep, or why not."""

    request_id: int
    level: Literal[1, 2] = 1
    """1: weights go to host memory; 2: they are dropped"""


class Wake(msgspec.Struct, frozen=True, tag="wake", forbid_unknown_fields=True):
    """Take it back. Answer: Done."""

    request_id: int
    tags: tuple[Tag, ...] | None = None
    """which parts; None = all that is asleep"""


class Welcome(msgspec.Struct, frozen=True, eq=False, tag="welcome"):
    """Answer to Hello. Unknown fields pass, as in Hello."""

    protocol: int
    hello: int
    """number of the Hello that this answers; an older one's is out of date"""
    incarnation: str
    """random hex, new at each start of the service, or with a journal its own"""
    model: str
    vocab_size: int
    """rows of the embedding: token ids are 0 to vocab_size - 1"""
    context: int
    """most tokens of prompt + max_tokens"""
    eos_token_ids: tuple[int, ...]
    version: int
    """of the weights"""
    limits: Limits
    capabilities: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    """[groups, DIGEST_BYTES] uint8: digests of those named by Hello that the service still has; the others are to be sent
    again"""
    arithmetic: str = ""
    """name/version of what computes; equal ones, with equal weights, tokens and seeds, give equal samples"""
    starts: int = 0
    """of an incarnation with a journal, this one included; 0: there is no journal, and nothing outlives a restart"""
    digest: str = ""
    """of the weights; "": the service does not know it"""


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """A request is not served. `kind` is one of transport.errors.KINDS; with neither id it is about the message itself."""

    kind: str
    message: str
    group_id: str | None = None
    request_id: int | None = None


class SampleDone(msgspec.Struct, frozen=True, eq=False, tag="sample", forbid_unknown_fields=True):
    """One child has ended. Repeated after a reconnect until it is acked: tell repeats by (group_id, index)."""

    sample: Sample


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What SamplesDone says of one child besides its columns: the fields of `Sample`, under their names."""

    group: Annotated[int, msgspec.Meta(ge=0)]
    """which of the G groups"""
    index: int
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    """how many of the T are its own: those behind the tokens of the children before it"""
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int]]
    seconds: float
    offloads: int
    error: str | None
    stopped_by: str | None
    text_end: int | None


class SamplesDone(msgspec.Struct, frozen=True, eq=False, tag="samples", forbid_unknown_fields=True):
    """Children of G groups have ended, with T tokens in all: what as many SampleDone would say, for clients with BATCHES."""

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


class Progress(msgspec.Struct, frozen=True, eq=False, tag="progress", forbid_unknown_fields=True):
    """New tokens of C children that run, of G groups with `Sampling.stream_every`. On a new connection they come again from the
    first one on. Samples are whole without them."""

    number: int
    """counts up from 1 on each connection"""
    group_ids: list[str]
    seeds: list[int]
    """[G] of each group"""
    groups: np.ndarray
    """[C] int32: which of the G groups"""
    firsts: np.ndarray
    """[C] int32: position of the first token that is new"""
    children: PartialColumns
    """the tokens; spans count from each child's first one here"""


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply", forbid_unknown_fields=True):
    request_id: int
    status: bytes
    """a JSON object"""


class Lease(msgspec.Struct, frozen=True, tag="lease", forbid_unknown_fields=True):
    """The staging is the client's, until it has said nothing about it for lease_s seconds."""

    request_id: int
    version: int
    """that the weights will have"""
    lease_s: float
    window_bytes: int
    """of chunks that may be under way without an answer"""


class Staged(msgspec.Struct, frozen=True, tag="staged", forbid_unknown_fields=True):
    """That chunk is staged, and so is all before it; to Prepare: all of it is, and is what the manifest says."""

    request_id: int


class Applied(msgspec.Struct, frozen=True, tag="applied", forbid_unknown_fields=True):
    """The weights are live: every token from now on is theirs."""

    request_id: int
    refreshed: Refreshed


class Asleep(msgspec.Struct, frozen=True, tag="asleep", forbid_unknown_fields=True):
    request_id: int
    freed_bytes: int
    """that went back to the device, or to the machine where there is none"""


class Done(msgspec.Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    request_id: int


class Alive(msgspec.Struct, frozen=True, tag="alive", forbid_unknown_fields=True, omit_defaults=True):
    """The service's loop turns; once a second, and when much was taken."""

    steps: int
    """steps of the engine since the service started"""
    version: int
    """of the weights"""
    taken_bytes: int = 0
    """of messages that the loop has taken from this connection since it sent Welcome; left out for clients without TAKEN"""
    digest: str = ""
    """of the weights; left out for clients without DIGESTS"""


class Closing(msgspec.Struct, frozen=True, tag="closing", forbid_unknown_fields=True):
    """The service stops; nothing comes after this. Answered by Goodbye: then the client has everything."""

    reason: str


# between a replica that joins and its front, at an address of their own


ReplicaName = Annotated[str, msgspec.Meta(pattern=r"\A(?!\d+\Z)[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}\Z")]
"""numbers are the names of replicas that a front starts itself"""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Be a replica of this front, or go on being one; once a second. Answer: Joined, or Refused. Unknown fields pass, as in
    Hello."""

    protocol: int
    name: ReplicaName
    incarnation: SessionId
    """of the process"""
    address: str
    """where its service listens, for the front"""
    server: str = ""
    """public key of that service, which knows the front by the front's own; "": it has no keys"""
    pid: int = 0


class Leave(msgspec.Struct, frozen=True, tag="leave", forbid_unknown_fields=True):
    """The replica has stopped in order: nothing more comes of it."""

    name: ReplicaName
    incarnation: SessionId


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The front knows the replica."""

    leave: Literal["", "restart", "stop"] = ""
    """the process is to stop in order; "restart": for another one to take its place"""
    why: str = ""


ReplicaMessage = Join | Leave
FrontMessage = Joined | Refused

WeightMessage = Begin | Chunk | Prepare | Commit | Abandon
AdminMessage = WeightsRequest | Share | Control | Replicas | Sleep | Wake
ClientMessage = Hello | Submit | Abort | Ack | StatusRequest | Heartbeat | Goodbye | WeightMessage | AdminMessage
Answer = Lease | Staged | Applied | Asleep | Done
ServiceMessage = Welcome | Refused | SampleDone | SamplesDone | Progress | StatusReply | Alive | Closing | Answer

ANSWERS: dict[type, type] = {
    **dict.fromkeys((StatusRequest, WeightsRequest, Share), StatusReply),
    **dict.fromkeys((Chunk, Prepare), Staged),
    **dict.fromkeys((Abandon, Control, Replicas, Wake), Done),
    Begin: Lease,
    Commit: Applied,
    Sleep: Asleep,
}
"""of each request, unless it is refused"""


ANSWER_HEADER_BYTES = 1 << 24


def answer_limits(limits: Limits) -> Limits:
    """Widen limits for what the service sends: the header of a status grows with the number of clients."""
    return msgspec.structs.replace(limits, max_header_bytes=max(limits.max_header_bytes, ANSWER_HEADER_BYTES))


@lru_cache(64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return what numpy calls a dtype, which takes numpy itself 4 microseconds."""
    return dtype.name


def digest(submit: Submit) -> bytes:
    """Take DIGEST_BYTES bytes that two Submits share only if they ask for the same (BLAKE2b; a NaN equals itself)."""
    arrays = [submit.prompt, *(() if submit.partials is None else submit.partials.arrays())]
    kinds = [(dtype_name(array.dtype), array.shape) for array in arrays]
    fields = (submit.group_id, submit.serial, submit.sampling, submit.indices, submit.after, kinds, submit.score)
    state = hashlib.blake2b(msgspec.msgpack.encode(fields), digest_size=DIGEST_BYTES)
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.digest()


def digests(of: Iterable[bytes]) -> np.ndarray:
    """Join digests to [groups, DIGEST_BYTES] uint8, as Hello and Welcome list them."""
    return np.frombuffer(b"".join(of), np.uint8).reshape(-1, DIGEST_BYTES)
