"""How far a client goes ahead of the service."""

from __future__ import annotations

from rollout.client.connection import SendQueue, split_ids
from rollout.engine.values import Limits
from rollout.transport.frames import Frame, pack
from rollout.transport.messages import UNTAKEN_BYTES, Ack

PIECE = UNTAKEN_BYTES // 4


def sent(outgoing: SendQueue) -> int:
    """Messages that go out now."""
    gone: list[list[Frame]] = []
    outgoing.send(lambda frames: gone.append(frames) is None)
    return len(gone)


def test_no_further_than_agreed() -> None:
    outgoing = SendQueue()
    outgoing.restart(paced=True)
    outgoing.add(*([bytes(PIECE)] for _ in range(10)))
    assert sent(outgoing) == 4 and outgoing.blocked
    outgoing.taken(PIECE)
    assert sent(outgoing) == 1
    outgoing.taken(5 * PIECE)
    assert sent(outgoing) == 4
    outgoing.restart(paced=True)  # another connection: what waits is dropped, and bytes count from 0
    assert not outgoing
    outgoing.add([bytes(PIECE)])
    assert sent(outgoing) == 1


def test_whatever_is_longer_goes_alone() -> None:
    outgoing = SendQueue()
    outgoing.restart(paced=True)
    outgoing.add([bytes(2 * UNTAKEN_BYTES)], [b"x"])
    assert sent(outgoing) == 1 and outgoing.blocked
    outgoing.taken(2 * UNTAKEN_BYTES)
    assert sent(outgoing) == 1


def test_a_service_that_does_not_say_what_it_took_is_not_waited_for() -> None:
    outgoing = SendQueue()
    outgoing.restart(paced=False)
    outgoing.add(*([bytes(PIECE)] for _ in range(10)))
    assert sent(outgoing) == 10


def test_chunks_have_their_own_window() -> None:
    outgoing = SendQueue()
    outgoing.restart(paced=True)
    chunks: list[list[Frame]] = [[bytes(PIECE)] for _ in range(8)]
    for number, chunk in enumerate(chunks):
        outgoing.add_chunk(number, chunk)
    outgoing.add(*chunks)
    assert sent(outgoing) == 8 and not outgoing.blocked
    for number in range(8):
        outgoing.answered(number)
    outgoing.add([b"x"])
    assert outgoing.blocked, "answered, and not yet said to be taken"
    outgoing.taken(8 * PIECE)
    assert sent(outgoing) == 1


def test_ids_are_sent_in_portions_that_a_header_holds() -> None:
    limits = Limits(max_header_bytes=2000, max_id_bytes=50)
    acks = [("g" * 50, i) for i in range(1000)]
    some = list(split_ids(acks, limits))
    assert [ack for portion in some for ack in portion] == acks
    assert all(len(pack(Ack(portion))[0]) <= limits.max_header_bytes for portion in some) and len(some) > 1
