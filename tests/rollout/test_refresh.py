"""Refresh through client and service: the protocol message by message, then the client over both transports."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

from rollout.client.api import RolloutClient
from rollout.client.refresh import WeightSender
from rollout.engine.engine import Engine
from rollout.engine.values import Limits, Mode, Sample, Sampling, TensorInfo, manifest_digest
from rollout.engine.weights.live import Weights
from rollout.engine.weights.staging import Staging
from rollout.service.loop import Service, ServiceTiming
from rollout.service.refresh import REMEMBERED, RefreshTiming
from rollout.transport import messages as m
from rollout.transport.columns import unpack_samples
from rollout.transport.errors import (
    Busy,
    ClientClosed,
    InvalidRequest,
    RequestTimeout,
    SourceUnreachable,
    StaleWeights,
    WeightsRefused,
)
from rollout.transport.frames import Decoder, pack
from rollout.transport.loopback import LoopbackService
from rollout.transport.weights import distributed, inline
from rollout.transport.weights.cuda_ipc import CudaIpcPayload, ExportedStorages
from rollout.transport.weights.distributed import Broadcaster
from rollout.transport.weights.ends import Channel
from rollout.transport.weights.inline import InlineOffer, InlineSender, chunks
from rollout.transport.weights.manifest import pack_manifest
from rollout.transport.weights.receiving import capabilities
from rollout.transport.weights.shm import Segment, SegmentView, ShmOffer, host_key
from tests.support.broken_commit import fail_commit
from tests.support.clock import Clock
from tests.support.described import described, digest_of
from tests.support.fake_device import EagerStreams, FakeDeviceMemory, HostHashes
from tests.support.fake_gpu import FakeGPU
from tests.support.faulty_link import Proxy
from tests.support.invariants import check
from tests.support.waiting import until
from tests.support.watermark import check_marks, token_of, watermark_engine, weights_of
from tests.support.weights import ON_DEVICE
from tests.support.wire import service_of, serving

IDS = [f"{i:032x}" for i in range(200)]
SAMPLING = Sampling(n=16, max_tokens=50_000, ignore_eos=True)
"""longer than any test: it is cancelled"""
WAIT = 60.0
"""for what comes: a bound for hangs only"""

needs_shm = pytest.mark.skipif(host_key() is None, reason="no memfd on this system")


def roomy_engine() -> Engine:
    """All samples of a group of SAMPLING run at once, to their end."""
    return watermark_engine(context=51_200, kv_tokens=SAMPLING.n * 51_200)


# ── message by message: the test turns the loop ───────────────────────────────────────────────────────────────────────────


class Raw:
    """A client that sends exactly what it is told to."""

    def __init__(self, end: LoopbackService, service: Service, name: str, number: int) -> None:
        self.service = service
        self.end = end.connect()
        self.decoder: Decoder[Any] = Decoder(m.ServiceMessage, Limits())
        self.requests = 0
        self.got: list[Any] = []
        self.send(m.Hello(m.PROTOCOL, IDS[-number], name=name))

    def send(self, message: msgspec.Struct) -> None:
        assert self.end.send(pack(message))
        self.turn()

    def turn(self) -> None:
        self.service.run_once()
        while frames := self.end.receive(0):
            self.got += [self.decoder.unpack(each) for each in frames]

    def ask(self, kind: Callable[..., Any], *fields: Any, turns: int = 30, **named: Any) -> Any:
        """Send a request; its answer. None if there is none after so many turns."""
        self.requests += 1
        self.send(kind(self.requests, *fields, **named))
        for _ in range(turns):
            for message in self.got:
                if getattr(message, "request_id", None) == self.requests:
                    return message
            self.turn()
        return None


class Stage:
    """A service over the watermark model, with 16 samples running, and clients A and B. Its time moves when a test says so, and
    its clients are never forgotten for silence."""

    def __init__(self, refresh: RefreshTiming | None = None) -> None:
        self.clock = Clock()
        self.engine: Engine = roomy_engine()
        self.end = LoopbackService()
        timing = ServiceTiming(refresh=refresh or RefreshTiming())
        self.service = service_of(
            self.engine, transport=self.end, lease_s=30.0, client_grace_s=1e6, timing=timing, clock=self.clock
        )
        self.a, self.b = Raw(self.end, self.service, "A", 1), Raw(self.end, self.service, "B", 2)
        self.a.send(m.Submit("g", np.array([1, 2, 3], np.int32), SAMPLING))
        self.push(1)

    def push(self, version: int) -> None:
        """What is pushed from now on."""
        self.manifest, self.arrays = described(version)
        self.digest = manifest_digest(self.manifest)

    def begin(self, client: Raw, id: str = IDS[0], **fields: Any) -> Any:
        return client.ask(m.Begin, id, pack_manifest(self.manifest), fields.pop("offer", InlineOffer()), **fields)

    def send_chunks(self, client: Raw, id: str = IDS[0], skip: int = 0) -> list[Any]:
        every = list(chunks(self.arrays, Limits(max_frame_bytes=1_000_000)))[skip:]
        return [client.ask(m.Chunk, id, offset, views) for offset, views in every]

    def assert_live(self, version: int) -> None:
        weights = self.engine.weights
        assert self.engine.version == version and weights.live_digest() == weights.digest == digest_of(version)
        assert self.engine.model.read() == token_of(version)  # type: ignore[attr-defined]

    def samples(self) -> list[Sample]:
        self.a.send(m.Abort(["g"]))
        self.a.turn()
        return [sample for message in self.a.got if isinstance(message, m.SamplesDone) for sample in unpack_samples(message)]


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(getattr(request, "param", None))
    yield stage
    samples = stage.samples()
    assert len(samples) == 16 and check_marks(samples) > 16
    check(stage.engine.scheduler)


@needs_shm
def test_the_live_weights_are_shared(stage: Stage) -> None:
    """What another service makes of them has the digest of the ones that are live."""
    answer = msgspec.json.decode(stage.b.ask(m.Share).status)
    assert (answer["version"], answer["digest"]) == (0, stage.engine.weights.live_digest())
    payload = SegmentView().open(msgspec.convert(answer["offer"], ShmOffer))
    at = 0
    for info in msgspec.convert(answer["manifest"], list[TensorInfo]):
        tensor = stage.engine.weights.inventory.tensors[info.name]
        assert (info.dtype, info.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        piece = payload[at : at + tensor.nbytes]
        assert xxhash.xxh3_128_hexdigest(piece.tobytes()) == info.digest
        at += tensor.nbytes
    assert at == len(payload) > 0
    stage.b.send(m.Goodbye())
    stage.b.turn()  # nobody needs it any more


def test_begin_chunks_commit(stage: Stage) -> None:
    lease = stage.begin(stage.a)
    assert isinstance(lease, m.Lease) and lease.version == 1 and lease.lease_s == 30.0
    assert all(isinstance(answer, m.Staged) for answer in stage.send_chunks(stage.a))
    stage.assert_live(0)
    status = msgspec.json.decode(stage.b.ask(m.WeightsRequest).status)
    assert status["staged"] == {
        "version": 1,
        "owner": "client 1 (A)",
        "via": "inline",
        "received": 7_200_000,
        "total": 7_200_000,
    }
    applied = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert isinstance(applied, m.Applied) and applied.refreshed.version == 1 and applied.refreshed.digest == digest_of(1)
    stage.assert_live(1)
    status = msgspec.json.decode(stage.b.ask(m.WeightsRequest, True).status)
    last = status.pop("last")
    assert (last["version"], last["via"], last["bytes"], last["sent_bytes"]) == (1, "inline", 7_200_000, 7_200_000)
    assert status == {
        "version": 1,
        "digest": digest_of(1),
        "base_digest": digest_of(1),
        "names": 6,
        "live_digest": digest_of(1),
        "staged": None,
    }


def test_prepare_is_answered_when_all_is_staged_and_checked(stage: Stage) -> None:
    stage.begin(stage.a)
    assert stage.a.ask(m.Prepare, IDS[0]).kind == "weights_refused", "nothing has come yet"
    stage.send_chunks(stage.a)
    for _ in range(2):
        assert isinstance(stage.a.ask(m.Prepare, IDS[0]), m.Staged)
    stage.assert_live(0)
    assert stage.a.ask(m.Commit, IDS[0], stage.digest, "abort").refreshed.version == 1
    stage.assert_live(1)
    stage.a.turn()
    ended = [sample for message in stage.a.got if isinstance(message, m.SamplesDone) for sample in unpack_samples(message)]
    assert {sample.finish_reason for sample in ended} == {"aborted"}, "Commit's policy, not Begin's"


def test_prepare_is_refused_with_what_is_wrong(stage: Stage) -> None:
    stage.arrays[3][5] ^= 1
    stage.begin(stage.a)
    stage.send_chunks(stage.a)
    refused = stage.a.ask(m.Prepare, IDS[0])
    assert refused.kind == "weights_refused" and "digest" in refused.message


def test_every_request_may_be_repeated(stage: Stage) -> None:
    assert stage.begin(stage.a).version == stage.begin(stage.a).version == 1
    stage.send_chunks(stage.a)
    assert all(isinstance(answer, m.Staged) for answer in stage.send_chunks(stage.a)), "what came twice counts once"
    first = stage.a.ask(m.Commit, IDS[0], stage.digest)
    again = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert isinstance(first, m.Applied) and again.refreshed == first.refreshed and stage.engine.version == 1
    assert stage.begin(stage.a).version == 1
    assert isinstance(stage.send_chunks(stage.a)[-1], m.Staged)
    refused = stage.a.ask(m.Abandon, IDS[0])
    assert refused.kind == "weights_refused" and "live already" in refused.message
    stage.assert_live(1)


def test_a_second_pusher_is_told_who_the_first_is(stage: Stage) -> None:
    stage.push(7)
    stage.begin(stage.a, version=7)
    refused = stage.begin(stage.b, IDS[1])
    assert refused.kind == "busy" and "client 1 (A) is staging version 7" in refused.message
    for kind, fields in ((m.Chunk, (0, [])), (m.Commit, (stage.digest,))):
        stolen = stage.b.ask(kind, IDS[0], *fields)
        assert stolen.kind == "weights_refused" and "no such refresh" in stolen.message
    assert isinstance(stage.b.ask(m.Abandon, IDS[0]), m.Done), "which does nothing to another client's"
    stage.send_chunks(stage.a)
    assert stage.a.ask(m.Commit, IDS[0], stage.digest).refreshed.version == 7
    assert isinstance(stage.begin(stage.b, IDS[1]), m.Lease)


def test_a_lease_that_runs_out_frees_the_staging(stage: Stage) -> None:
    stage.begin(stage.a)
    stage.send_chunks(stage.a)
    stage.clock.now += 29
    stage.a.ask(m.Chunk, IDS[0], 0, [])  # renews it
    stage.clock.now += 29
    stage.a.turn()
    assert stage.begin(stage.b, IDS[1]).kind == "busy"
    stage.clock.now += 2
    stage.a.send(m.Heartbeat())
    stage.b.send(m.Heartbeat())
    refused = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert refused.kind == "weights_refused" and "lease ran out" in refused.message
    stage.assert_live(0)
    assert isinstance(stage.begin(stage.b, IDS[1]), m.Lease)


def test_a_client_that_goes_frees_the_staging(stage: Stage) -> None:
    stage.begin(stage.b)
    stage.b.send(m.Goodbye())
    assert isinstance(stage.begin(stage.a, IDS[1]), m.Lease)
    stage.assert_live(0)


def test_a_refresh_makes_way_when_the_connection_of_its_client_has_ended(stage: Stage) -> None:
    """Not at once: a client that connects again goes on. And only for another one."""
    timing, clock = RefreshTiming(), stage.clock
    look = timing.look_s * 1.01

    def turns(seconds: float) -> None:
        for _ in range(round(seconds / look)):
            clock.now += look
            stage.a.turn()

    stage.begin(stage.b)
    stage.send_chunks(stage.b)
    turns(60 * look)
    assert stage.begin(stage.a, IDS[1]).kind == "busy", "its connection lives (SIGSTOP looks like that): the lease counts"
    stage.b.end.close()
    turns(0.8 * timing.gone_s)
    assert stage.begin(stage.a, IDS[1]).kind == "busy"
    stage.b.end = stage.end.connect()
    stage.b.send(m.Hello(m.PROTOCOL, IDS[-2], 2, name="B"))
    turns(3 * timing.gone_s)
    assert stage.begin(stage.a, IDS[1]).kind == "busy", "it has connected again"
    stage.b.end.close()
    turns(3 * timing.gone_s)
    assert stage.service._refreshes.owner == "client 2 (B)", "nobody else wants to refresh"
    assert isinstance(stage.begin(stage.a, IDS[1]), m.Lease)
    stage.b.end = stage.end.connect()
    stage.b.send(m.Hello(m.PROTOCOL, IDS[-2], 3, name="B"))
    refused = stage.b.ask(m.Commit, IDS[0], stage.digest)
    assert refused.kind == "weights_refused" and "connection ended" in refused.message
    stage.assert_live(0)


def test_abandon(stage: Stage) -> None:
    stage.begin(stage.a)
    assert isinstance(stage.a.ask(m.Abandon, IDS[0]), m.Done)
    assert isinstance(stage.a.ask(m.Abandon, IDS[0]), m.Done)
    assert stage.begin(stage.a).kind == "weights_refused", "the same push does not begin twice"
    assert isinstance(stage.begin(stage.a, IDS[1]), m.Lease)
    stage.assert_live(0)


def test_commit_before_the_last_byte(stage: Stage) -> None:
    stage.begin(stage.a)
    every = list(chunks(stage.arrays, Limits()))
    stage.a.ask(m.Chunk, IDS[0], *every[0])
    refused = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert refused.kind == "weights_refused" and "of 7200000 bytes" in refused.message
    stage.a.ask(m.Chunk, IDS[0], *every[1])
    assert isinstance(stage.a.ask(m.Commit, IDS[0], stage.digest), m.Applied), "it may still come"


def test_commit_of_another_manifest(stage: Stage) -> None:
    stage.begin(stage.a)
    stage.send_chunks(stage.a)
    assert "manifests of Commit and Begin differ" in stage.a.ask(m.Commit, IDS[0], digest_of(2)).message
    stage.assert_live(0)


def test_a_flipped_byte_is_refused_by_name(stage: Stage) -> None:
    stage.begin(stage.a)
    stage.arrays[3] = stage.arrays[3].copy()
    stage.arrays[3][600_000] ^= 4
    answers = stage.send_chunks(stage.a)
    assert answers[-1].kind == "weights_refused" and "'w3'" in answers[-1].message
    refused = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert refused.kind == "weights_refused" and "'w3'" in refused.message
    stage.assert_live(0)


@pytest.mark.parametrize("bad", ["hole", "strangers", "float"])
def test_chunks_that_do_not_fit(stage: Stage, bad: str) -> None:
    stage.begin(stage.a)
    chunk: dict[str, Any] = {
        "hole": (10, [np.zeros(5, np.uint8)]),
        "strangers": (0, [np.zeros(7_200_001, np.uint8)]),
        "float": (0, [np.zeros(5, np.float32)]),
    }
    assert stage.a.ask(m.Chunk, IDS[0], *chunk[bad]).kind == "invalid_request"
    stage.send_chunks(stage.a)
    assert isinstance(stage.a.ask(m.Commit, IDS[0], stage.digest), m.Applied)


def test_a_manifest_that_is_none(stage: Stage) -> None:
    refused = stage.a.ask(m.Begin, IDS[0], np.arange(50, dtype=np.uint8), InlineOffer())
    assert refused.kind == "invalid_request"
    assert isinstance(stage.begin(stage.a, IDS[1]), m.Lease)


@pytest.mark.parametrize("k", [0, 5, 11])
def test_a_failure_while_applying(stage: Stage, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.begin(stage.a)
    stage.send_chunks(stage.a)
    fail_commit(monkeypatch, k, "writing")
    refused = stage.a.ask(m.Commit, IDS[0], stage.digest)
    assert refused.kind == "group_failed" and "MemoryError: injected" in refused.message
    monkeypatch.undo()
    stage.assert_live(0)
    assert isinstance(stage.a.ask(m.Abandon, IDS[0]), m.Done)
    stage.begin(stage.a, IDS[1])
    stage.send_chunks(stage.a, IDS[1])
    assert isinstance(stage.a.ask(m.Commit, IDS[1], stage.digest), m.Applied)


def test_what_is_remembered_is_bounded(stage: Stage) -> None:
    for id in IDS[: REMEMBERED + 20]:
        stage.begin(stage.a, id)
        stage.a.ask(m.Abandon, id)
    assert len(stage.service._refreshes._ended._ended) == REMEMBERED


@pytest.mark.parametrize("how", [ValueError, WeightsRefused, "abandoned", "applied"])
def test_what_has_ended_holds_numbers_only(stage: Stage, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Staging, payload, all that a refresh was made of go at once, and not when garbage is looked for: why it failed names no
    frame that names it. An engine raises the one error, a router the other."""

    def fail(staging: Staging, source: Any) -> int:
        raise how("not what the manifest says")

    gc.disable()
    try:
        assert isinstance(stage.begin(stage.a), m.Lease)
        push = stage.service._refreshes._open
        assert push is not None
        parts = [weakref.ref(part) for part in (push, push.staging, push.payload, push.staging._work)]
        del push
        if not isinstance(how, str):
            monkeypatch.setattr(Staging, "feed", fail)
        if how == "applied":
            stage.send_chunks(stage.a)
        answer = stage.a.ask(m.Abandon if how == "abandoned" else m.Commit, IDS[0], *[stage.digest][how == "abandoned" :])
        assert isinstance(answer, {"abandoned": m.Done, "applied": m.Applied}.get(how, m.Refused))
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


@needs_shm
def test_shm_that_cannot_be_seen(stage: Stage) -> None:
    refused = stage.begin(stage.a, offer=ShmOffer(1, 0, 0, 7_200_000, "00"))
    assert refused.kind == "source_unreachable"
    assert isinstance(stage.begin(stage.a, IDS[1]), m.Lease), "nothing is left staged"


@needs_shm
@pytest.mark.parametrize("stage", [RefreshTiming(slice_s=1e-9)], indirect=True)
def test_staging_is_dosed(stage: Stage) -> None:
    """While groups run, an iteration of the loop stages for a limited time and then makes a step."""
    stage.clock.tick = 0.001
    segment = Segment()
    stage.begin(stage.a, offer=segment.write(stage.arrays)[0])
    steps = stage.engine.counters.steps
    assert isinstance(stage.a.ask(m.Commit, IDS[0], stage.digest, turns=1000), m.Applied)
    assert stage.engine.counters.steps > steps + 5
    segment.close()


# ── the client ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["loopback", "sockets"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Callable[..., RolloutClient]]]:
    """A service in a thread, and a maker of clients."""
    engine = roomy_engine()
    loopback = LoopbackService() if request.param == "loopback" else None
    clients: list[RolloutClient] = []
    with serving(engine, loopback, lease_s=2 * WAIT) as service:

        def connect(**options: Any) -> RolloutClient:
            options = {"connect_timeout_s": WAIT, "link_timeout_s": WAIT, **options}
            where: dict[str, Any] = {"transport": loopback.connect()} if loopback else {"address": service.endpoint}
            made = RolloutClient(**where, **options)
            clients.append(made)
            return made

        yield engine, connect
        for client in clients:
            client.close()
    check(engine.scheduler)


@pytest.mark.some(4)
@pytest.mark.parametrize("via", ["auto", pytest.param("shm", marks=needs_shm), "inline", "gloo"])
def test_refresh_under_running_samples(served: Any, via: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline, "CHUNK_BYTES", 700_001)
    monkeypatch.setattr(distributed, "SLOT_BYTES", 700_001)
    engine, connect = served
    client = connect()
    handle = client.submit([1, 2, 3], SAMPLING)
    until(lambda: engine.counters.steps > 3)
    for version in range(1, 6):
        refreshed = client.refresh(weights_of(version), version=version, via=via, timeout=WAIT)
        assert (refreshed.version, refreshed.bytes, refreshed.digest) == (version, 7_200_000, digest_of(version))
        assert refreshed.via == (("shm" if host_key() else "inline") if via == "auto" else via)
        assert refreshed.seconds >= refreshed.staged_seconds > 0 and refreshed.paused_seconds > 0
        assert client.weights_status(verify=True)["live_digest"] == refreshed.digest
    handle.cancel()
    samples = handle.result(WAIT)
    assert check_marks(samples) > 16 and {len(sample.weight_versions) for sample in samples} == {6}
    status = client.status()
    assert status["version"] == 5 and status["weights"]["refreshes"] == 5 and status["weights"]["bytes"] == 7_200_000


def wait_until_free(client: RolloutClient) -> None:
    """What another client said last may come after this client's next word. The lease is longer than this waits."""
    until(lambda: client.weights_status()["staged"] is None)


def test_a_link_that_breaks_again_and_again_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not answered is sent again, in order; what came twice counts once."""
    monkeypatch.setattr(inline, "CHUNK_BYTES", 300_001)
    with (
        serving(watermark_engine(), lease_s=2 * WAIT) as service,
        Proxy(service.endpoint) as proxy,
        RolloutClient(proxy.address, connect_timeout_s=WAIT, link_timeout_s=WAIT) as client,
    ):
        handle = client.submit([1, 2, 3], Sampling(n=16, max_tokens=3000, ignore_eos=True))
        proxy.cut_after = (1_000_000, 4_000_000)
        proxy.cut()
        for version in (1, 2):
            assert client.refresh(weights_of(version), via="inline", timeout=WAIT).version == version
        assert proxy.cuts >= 3
        proxy.cut_after = None
        assert client.weights_status(verify=True)["live_digest"] == digest_of(2)
        handle.cancel()
        check_marks(handle.result(WAIT))


def test_refresh_async_and_two_at_once(served: Any) -> None:
    _, connect = served
    client = connect()
    first = client.refresh_async(weights_of(1))
    second = client.refresh_async(weights_of(2))  # waits its turn
    assert first.result(WAIT).version == 1 and first.done
    assert second.result(WAIT).version == 2
    with pytest.raises(WeightsRefused, match="not above the live one, 2"):
        client.refresh(weights_of(2), version=2)


def test_refresh_from_a_folder(served: Any, tmp_path: Path) -> None:
    _, connect = served
    client = connect()
    every = weights_of(3)
    save_file({name: every[name] for name in ("w0", "w1")}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsRefused, match="'w2': it is missing"):
        client.refresh(tmp_path)
    save_file({name: every[name] for name in ("w2", "w3", "w4", "w5")}, tmp_path / "b.safetensors")
    refreshed = client.refresh(tmp_path, version=3)
    assert refreshed.via == "files" and client.weights_status(verify=True)["live_digest"] == digest_of(3)
    with pytest.raises(InvalidRequest, match="path of a folder"):
        client.refresh(every, via="files")
    with pytest.raises(InvalidRequest, match="takes tensors"):
        client.refresh(tmp_path, via="inline")
    with pytest.raises(SourceUnreachable, match=r"no \*.safetensors"):
        client.refresh(tmp_path / "nowhere")


def test_wrong_tensors_are_told_by_name(served: Any) -> None:
    _, connect = served
    client = connect()
    nan = weights_of(1)
    nan["w4"][7, 7] = float("nan")
    for named, message in (
        ({**weights_of(1), "w9": torch.ones(3)}, "'w9': the model has no tensor"),
        ({"w0": weights_of(1)["w0"]}, "'w1': it is missing"),
        (nan, "'w4': it holds NaN"),
        ({**weights_of(1), "w0": torch.ones(3)}, "'w0': has shape"),
        ({**weights_of(1), "w0": [1, 2]}, "'w0': cannot be sent"),
        (iter([]), "no tensors at all"),
    ):
        for via in ("auto", "inline", "gloo"):
            with pytest.raises(WeightsRefused, match=message):
                client.refresh(named, via=via)  # type: ignore[arg-type]
    assert client.weights_status()["version"] == 0
    client.refresh({"w0": weights_of(0)["w0"]}, partial=True)
    assert client.weights_status(verify=True)["live_digest"] == digest_of(0)


@pytest.mark.parametrize("via", ["auto", "inline"])
def test_names_that_are_numpy_s_strings(served: Any, via: str) -> None:
    _, connect = served
    done = connect().refresh({np.str_(name): tensor for name, tensor in weights_of(1).items()}, via=via)
    assert done.digest == digest_of(1)


@needs_shm
def test_auto_falls_back_to_inline(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    client = connect()
    write = Segment.write

    def elsewhere(self: Segment, arrays: Any) -> tuple[ShmOffer, list[str]]:
        offer, digests = write(self, arrays)
        return msgspec.structs.replace(offer, inode=1), digests

    monkeypatch.setattr(Segment, "write", elsewhere)
    assert client.refresh(weights_of(1)).via == "inline"
    with pytest.raises(SourceUnreachable, match="not the memory that was offered"):
        client.refresh(weights_of(2), via="shm")
    monkeypatch.setattr(Segment, "write", _no_memory)
    assert client.refresh(weights_of(2)).via == "inline"
    with pytest.raises(SourceUnreachable, match="No space"):
        client.refresh(weights_of(3), via="shm")
    monkeypatch.setattr("rollout.transport.weights.shm.host_key", lambda: "shm:another:host:0")
    assert client.refresh(weights_of(3)).via == "inline"
    with pytest.raises(SourceUnreachable, match="another host"):
        client.refresh(weights_of(4), via="shm")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """All tensors lie on a GPU that the service sees as well."""
    gpu = FakeGPU(live=True)
    monkeypatch.setattr("rollout.transport.weights.tensors.on_gpu", lambda tensor: True)
    monkeypatch.setattr("rollout.transport.weights.tensors.synchronize", lambda devices: None)
    monkeypatch.setattr("rollout.transport.weights.cuda_ipc.gpu_key", lambda device: "cuda_ipc:fake")
    monkeypatch.setattr("rollout.transport.weights.cuda_ipc.ExportedStorages", lambda: ExportedStorages(gpu.export))
    monkeypatch.setattr("rollout.engine.cuda.digests.has_triton", lambda: False)  # they lie on the CPU in truth
    monkeypatch.setattr("rollout.service.validation.capabilities", lambda device: (*capabilities(device), "cuda_ipc:fake"))
    monkeypatch.setattr(
        "rollout.transport.weights.cuda_ipc.CudaIpcPayload", partial(CudaIpcPayload, open_memory=gpu.open, copy=gpu.copy)
    )
    return gpu


@pytest.mark.parametrize("via", ["auto", "cuda_ipc"])
def test_tensors_on_a_gpu_of_both_are_read_where_they_lie(gpu: FakeGPU, served: Any, via: Any) -> None:
    engine, connect = served
    client, new = connect(), weights_of(0)
    handle = client.submit([1, 2, 3], SAMPLING)
    until(lambda: engine.counters.steps > 3)
    for version in (1, 2):
        for tensor in new.values():
            tensor.fill_(version)
        refreshed = client.refresh(new, via=via)
        assert refreshed.via == "cuda_ipc" and refreshed.digest == digest_of(version)
    assert len(gpu.storages) == 6 and len(gpu.opened) == 12, "exported once, opened once a refresh"
    handle.cancel()
    check_marks(handle.result(WAIT))


@pytest.mark.parametrize("shared", [True, False])
def test_memory_that_does_not_open_travels_by_the_next_way(
    gpu: FakeGPU, served: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """In shared memory where both ends see that, else in messages."""
    _, connect = served
    client = connect()
    gpu.refuse = b"all"
    if not shared:
        monkeypatch.setattr("rollout.transport.weights.shm.host_key", lambda: "shm:another:host:0")
    assert client.refresh(weights_of(1)).via == ("shm" if shared and host_key() else "inline")
    with pytest.raises(SourceUnreachable, match="cannot be opened"):
        client.refresh(weights_of(2), via="cuda_ipc")
    assert client.weights_status(verify=True)["live_digest"] == digest_of(1)


def test_on_one_device_it_is_staged_there(gpu: FakeGPU, served: Any) -> None:
    """The service's device takes the bytes, hashes and checks them; no buffer in host memory is made."""
    engine, connect = served
    client, memory = connect(), FakeDeviceMemory(streams=EagerStreams(), hashes=HostHashes)
    engine.worker.weights = Weights(engine.model.module, ON_DEVICE, memory=memory)
    handle = client.submit([1, 2, 3], SAMPLING)
    until(lambda: engine.counters.steps > 3)
    for version in (1, 2):
        refreshed = client.refresh(weights_of(version), via="cuda_ipc")
        assert refreshed.via == "cuda_ipc" and refreshed.digest == digest_of(version)
        assert len(memory.taken_rooms) == version and engine.weights._buffers.host is None
    damaged = weights_of(3)
    damaged["w4"][-1, -1] = float("nan")
    with pytest.raises(WeightsRefused, match="'w4': it holds NaN or infinity"):
        client.refresh(damaged, via="cuda_ipc")
    assert client.weights_status(verify=True)["live_digest"] == digest_of(2)
    handle.cancel()
    check_marks(handle.result(WAIT))


def test_another_gpu_or_a_service_on_the_cpu(gpu: FakeGPU, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    client = connect()
    monkeypatch.setattr("rollout.transport.weights.cuda_ipc.gpu_key", lambda device: "cuda_ipc:another")
    assert client.refresh(weights_of(1)).via == ("shm" if host_key() else "inline")
    with pytest.raises(SourceUnreachable, match="share no GPU"):
        client.refresh(weights_of(2), via="cuda_ipc")
    assert not gpu.storages


def test_gpu_memory_that_changes_while_it_is_read_is_refused(
    gpu: FakeGPU, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, connect = served
    client, new = connect(), weights_of(1)
    copy = gpu.copy

    def change(memory: np.ndarray, data: np.ndarray) -> None:
        copy(memory, data)
        new["w5"][-1, -1] += 1

    monkeypatch.setattr(gpu, "copy", change)
    monkeypatch.setattr(
        "rollout.transport.weights.cuda_ipc.CudaIpcPayload", partial(CudaIpcPayload, open_memory=gpu.open, copy=change)
    )
    with pytest.raises(WeightsRefused, match="'w5'.*digest"):
        client.refresh(new, via="cuda_ipc")


@pytest.mark.parametrize("via", ["cuda_ipc", "nccl"])
def test_tensors_that_are_on_no_gpu_are_told_by_name(served: Any, via: Any) -> None:
    _, connect = served
    with pytest.raises(WeightsRefused, match=rf"""'w0' is on cpu: via="{via}" takes tensors on a CUDA device; use "shm" """):
        connect().refresh(weights_of(1), via=via)


def test_a_backend_that_the_service_does_not_have(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    monkeypatch.setattr("rollout.service.validation.capabilities", lambda device: ())
    with pytest.raises(SourceUnreachable, match="the service has no gloo here"):
        connect().refresh(weights_of(1), via="gloo")


def test_a_meeting_place_that_is_not_here(served: Any) -> None:
    _, connect = served
    with pytest.raises(SourceUnreachable, match="192.0.2.1"):
        connect(refresh_host="192.0.2.1").refresh(weights_of(1), via="gloo")
    assert connect(refresh_host="localhost").refresh(weights_of(1), via="gloo").via == "gloo"


def test_a_service_that_cannot_reach_the_trainer(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so at once and not when it has given up, the trainer hears it, and the staging is free."""
    monkeypatch.setattr(distributed, "REACH_S", 10 * WAIT)
    _, connect = served
    client = connect()
    init = Broadcaster.__init__

    def elsewhere(self: Broadcaster, *arguments: Any) -> None:
        init(self, *arguments)
        self.offer = msgspec.structs.replace(self.offer, port=1)

    with monkeypatch.context() as patch:
        patch.setattr(Broadcaster, "__init__", elsewhere)
        with pytest.raises(SourceUnreachable, match="no group with the trainer at 127.0.0.1:1: ."):
            client.refresh(weights_of(1), via="gloo", timeout=WAIT)
    assert client.refresh(weights_of(1), via="gloo").version == 1


def _no_memory(self: Segment, arrays: Any) -> tuple[ShmOffer, list[str]]:
    raise OSError(28, "No space left on device")


def test_tensors_that_change_while_they_are_sent_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    client, new = connect(), weights_of(1)
    offer = WeightSender._offer

    def change(self: WeightSender, *arguments: Any) -> Any:
        sender = offer(self, *arguments)
        new["w5"][-1, -1] += 1
        return sender

    monkeypatch.setattr(WeightSender, "_offer", change)
    for via in ("inline", "gloo"):
        with pytest.raises(WeightsRefused, match="'w5'.*digest"):
            client.refresh(new, via=via)
    if host_key():
        assert client.refresh(new, via="shm").version == 1, "what lies in shared memory is the trainer's no more"


def test_a_timeout_abandons_the_refresh(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, connect = served
    client, other = connect(name="slow"), connect()
    monkeypatch.setattr(InlineSender, "before_commit", lambda *arguments: time.sleep(0.3))
    refused = client.refresh_async(weights_of(1), via="inline", timeout=0.2)
    with pytest.raises((RequestTimeout, WeightsRefused)):
        refused.result(WAIT)
    monkeypatch.undo()
    wait_until_free(other)
    assert other.refresh(weights_of(1), timeout=WAIT).version == 1


def maps() -> int:
    """Maps of shared memory, the trainer's and the service's: both ends are this process. What tests before have left in
    circles of references is let go of first."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("rollout-weights")


@needs_shm
def test_shared_memory_goes_with_its_service() -> None:
    end = LoopbackService()
    with serving(watermark_engine(), end, lease_s=2 * WAIT) as service:
        client = RolloutClient(transport=end.connect())
        client.refresh(weights_of(1), via="shm")
        assert maps() == 2
    assert maps() == 1 and service.incarnation, "the trainer keeps its own, though nobody has let go of the service"
    client.close()
    assert maps() == 0


@needs_shm
def test_shared_memory_goes_with_its_client(served: Any) -> None:
    _, connect = served
    client, other = connect(), connect()
    client.refresh(weights_of(1), via="shm")
    assert maps() == 2
    client.close()
    until(lambda: maps() == 0)
    assert other.refresh(weights_of(2), via="shm").version == 2


def test_busy_names_the_owner(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    slow, other = connect(name="slow"), connect()
    inside, go_on = threading.Event(), threading.Event()

    def hold(self: InlineSender, channel: Channel) -> None:
        channel.window_bytes()
        inside.set()
        assert go_on.wait(WAIT)

    with monkeypatch.context() as patch:
        patch.setattr(InlineSender, "before_commit", hold)
        handle = slow.refresh_async(weights_of(1), via="inline")
        assert inside.wait(WAIT)
    with pytest.raises(Busy, match=r"client \d+ \(slow\) is staging version 1"):
        other.refresh(weights_of(1))
    assert other.weights_status()["staged"]["owner"].endswith("(slow)")
    go_on.set()
    with pytest.raises(WeightsRefused, match="of 7200000 bytes"):
        handle.result(WAIT)
    wait_until_free(other)
    assert other.refresh(weights_of(1)).version == 1


def test_closing_the_client_ends_its_refresh(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, connect = served
    client, other = connect(), connect()
    inside = threading.Event()

    def wait_for_ever(self: InlineSender, channel: Channel) -> None:
        channel.window_bytes()
        inside.set()
        channel.chunk(0, [self.data[0][:10]])()
        client._session.link.request(lambda id: m.Control(id, "drain")).result(WAIT)

    other.submit([1, 2, 3], SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(InlineSender, "before_commit", wait_for_ever)
        handle = client.refresh_async(weights_of(1), via="inline")
        assert inside.wait(WAIT)
        client.close()
    with pytest.raises(ClientClosed):
        handle.result(WAIT)
    wait_until_free(other)
    assert other.refresh(weights_of(1), timeout=WAIT).version == 1


def test_require_version(served: Any) -> None:
    _, connect = served
    trainer, picky = connect(), connect(require_version=2)
    asked = Sampling(max_tokens=2, ignore_eos=True)
    with pytest.raises(StaleWeights, match="require_version=2: the weights are version 0"):
        picky.submit([1], asked).result(WAIT)
    trainer.refresh(weights_of(2), version=2)
    assert picky.submit([1], asked).result(WAIT)[0].weight_versions == [(0, 2)]
    picky.require_version = 3
    with pytest.raises(StaleWeights):
        picky.submit([1], asked).result(WAIT)


def test_a_restart_shows_in_the_incarnation_and_to_require_version() -> None:
    """The same address, another process: version 0 again, and a client that has seen more does not train on it."""
    incarnations = []
    for _ in range(2):
        end = LoopbackService()
        with (
            serving(watermark_engine(), end, lease_s=2 * WAIT),
            RolloutClient(transport=end.connect(), require_version=0 if not incarnations else 4) as client,
        ):
            incarnations.append(client.info.incarnation)
            if len(incarnations) == 1:
                client.refresh(weights_of(4), version=4)
            else:
                with pytest.raises(StaleWeights):
                    client.submit([1], Sampling()).result(WAIT)
    assert incarnations[0] != incarnations[1]


def test_pause_and_resume(served: Any) -> None:
    engine, connect = served
    client, other = connect(), connect()
    handle = client.submit([1, 2, 3], SAMPLING)
    until(lambda: engine.counters.steps > 3)
    client.pause()
    steps = engine.counters.steps
    assert other.status()["state"] == "paused"
    assert other.refresh(weights_of(1)).version == 1, "a paused service takes weights"
    assert engine.counters.steps == steps
    other.resume()
    until(lambda: engine.counters.steps > steps)
    handle.cancel()
    assert check_marks(handle.result(WAIT)) > 16


@pytest.mark.parametrize("hold", ["pause", "sleep"])
def test_who_holds_the_service_and_goes_lets_go(served: Any, hold: str) -> None:
    engine, connect = served
    client, other = connect(), connect()
    getattr(client, hold)()
    assert engine.mode in (Mode.PAUSED, Mode.ASLEEP)
    handle = other.submit([1, 2, 3], Sampling(max_tokens=3, ignore_eos=True))
    client.close()
    assert len(handle.result(WAIT)) == 1 and engine.mode is Mode.RUNNING


def test_drain(served: Any) -> None:
    engine, connect = served
    client, other = connect(), connect()
    begun = client.submit([1, 2, 3], Sampling(n=4, max_tokens=200, ignore_eos=True))
    until(lambda: engine.counters.steps > 3)
    client.drain(timeout=WAIT)
    assert begun.done and {sample.finish_reason for sample in begun.result(0)} == {"length"}
    later = other.submit([1, 2, 3], Sampling(max_tokens=3, ignore_eos=True))
    assert other.status()["state"] == "draining" and other.status()["waiting"] == 1
    client.resume()
    assert len(later.result(WAIT)) == 1


def test_a_drain_that_is_resumed_is_told(served: Any) -> None:
    engine, connect = served
    client, other = connect(), connect()
    client.submit([1, 2, 3], SAMPLING)
    until(lambda: engine.counters.steps > 3)
    request = client._session.link.request(lambda id: m.Control(id, "drain"))
    until(lambda: engine.mode is Mode.DRAINING)
    other.resume()
    with pytest.raises(Busy, match="resumed before"):
        request.result(WAIT)


def test_sleep_and_wake(served: Any) -> None:
    engine, connect = served
    client, other = connect(), connect()
    running = client.submit([1, 2, 3], Sampling(n=4, max_tokens=50_000, ignore_eos=True))
    until(lambda: engine.counters.steps > 3)
    assert client.sleep() >= 0
    steps = engine.counters.steps
    waiting = other.submit([1, 2, 3], Sampling(max_tokens=3, ignore_eos=True))
    assert other.status()["state"] == "asleep" and other.status()["waiting"] == 5
    with pytest.raises(InvalidRequest, match="asleep already"):
        other.sleep(2)
    with pytest.raises(WeightsRefused, match="weights are asleep: wake all"):
        other.refresh(weights_of(1))
    with pytest.raises(Busy, match="asleep, so no group can finish"):
        other.drain(timeout=WAIT)
    with pytest.raises(InvalidRequest, match="level=3"):
        other.sleep(3)
    assert engine.counters.steps == steps
    other.wake()
    assert len(waiting.result(WAIT)) == 1
    until(lambda: engine.counters.steps > steps + 10)
    running.cancel()
    assert check_marks(running.result(WAIT)) > 40
    with pytest.raises(InvalidRequest, match="not asleep"):
        client.wake()


def test_dropped_weights_wait_for_a_refresh(served: Any) -> None:
    engine, connect = served
    client = connect()
    handle = client.submit([1, 2, 3], Sampling(n=4, max_tokens=50_000, ignore_eos=True))
    until(lambda: engine.counters.steps > 3)
    client.sleep(level=2)
    client.wake()
    steps = engine.counters.steps
    assert client.status()["state"] == "without weights" and engine.counters.steps == steps
    with pytest.raises(WeightsRefused, match="all tensors must come first"):
        client.refresh(weights_of(1), partial=True)
    with pytest.raises(Busy, match="without weights"):
        client.drain(timeout=WAIT)
    assert client.refresh(weights_of(1)).version == 1
    until(lambda: engine.counters.steps > steps + 8)  # each child has tokens of the new weights
    handle.cancel()
    samples = handle.result(WAIT)
    assert check_marks(samples) > 12 and {sample.weight_versions[-1][1] for sample in samples} == {1}


def test_a_trainer_on_the_same_device_wakes_part_by_part(served: Any) -> None:
    engine, connect = served
    client = connect()
    handle = client.submit([1, 2, 3], Sampling(n=4, max_tokens=50_000, ignore_eos=True))
    until(lambda: engine.counters.steps > 3)
    client.sleep(level=2)
    for tags in ("kv", (), ("graphs",)):
        with pytest.raises(InvalidRequest, match="must be"):
            client.wake(tags=tags)
    client.wake(tags=("weights",))
    with pytest.raises(InvalidRequest, match="not asleep with its weights"):
        client.wake(tags=("weights",))
    with pytest.raises(InvalidRequest, match="asleep already"):
        client.sleep()
    assert client.refresh(weights_of(1)).version == 1
    assert client.status()["asleep"] == ["kv"]
    steps = engine.counters.steps
    client.wake(tags=("kv",))
    until(lambda: engine.counters.steps > steps + 8)  # each child has tokens of the new weights
    handle.cancel()
    samples = handle.result(WAIT)
    assert check_marks(samples) > 12 and {sample.weight_versions[-1][1] for sample in samples} == {1}


def test_a_part_woken_twice_by_one_request_is_woken_once(stage: Stage) -> None:
    b = stage.b
    b.ask(m.Sleep, 1)
    assert isinstance(b.ask(m.Wake, ("weights",)), m.Done)
    b.send(m.Wake(b.requests, ("weights",)))
    assert not any(isinstance(each, m.Refused) for each in b.got)
    assert stage.engine.status()["asleep"] == ["kv"]
    b.send(m.Goodbye())
    assert stage.engine.mode is Mode.RUNNING, "who sent it to sleep and goes wakes the rest"


def test_sleep_and_wake_asked_again(stage: Stage) -> None:
    """A request that is repeated after a reconnect, because the answer was lost, is answered again."""
    a, b = stage.a, stage.b
    first = a.ask(m.Sleep, 1)
    a.send(m.Sleep(first.request_id, 1))
    assert [each for each in a.got if isinstance(each, m.Asleep)] == [first, first]
    assert isinstance(b.ask(m.Sleep, 1), m.Refused)
    assert isinstance(b.ask(m.Wake), m.Done) and stage.engine.mode is not Mode.ASLEEP
    b.send(m.Wake(b.requests))
    assert not any(isinstance(each, m.Refused) and each.request_id == b.requests for each in b.got)
    assert isinstance(a.ask(m.Wake), m.Refused)


def test_no_sleep_while_a_refresh_is_staged(stage: Stage) -> None:
    stage.begin(stage.a)
    refused = stage.b.ask(m.Sleep, 1)
    assert refused.kind == "busy" and "client 1 (A) is staging a refresh" in refused.message


def test_abort_all(served: Any) -> None:
    engine, connect = served
    client, other = connect(), connect()
    handles = [each.submit([1, 2, 3], SAMPLING) for each in (client, other)]
    until(lambda: len(engine.scheduler.state.groups) == 2)
    client.abort_all()
    assert {sample.finish_reason for handle in handles for sample in handle.result(WAIT)} == {"aborted"}


@pytest.mark.parametrize("kv", ["recompute", "abort"])
def test_what_happens_to_running_groups(served: Any, kv: Any) -> None:
    engine, connect = served
    client = connect()
    length = 50_000 if kv == "abort" else 300
    handle = client.submit([1, 2, 3], Sampling(n=4, max_tokens=length, ignore_eos=True))
    stale = client.submit([1, 2, 3], Sampling(n=2, max_tokens=50_000, ignore_eos=True, max_version_lag=0))
    until(lambda: engine.counters.generated_tokens > 30)
    client.refresh(weights_of(1), kv=kv)
    reasons = {sample.finish_reason for sample in handle.result(WAIT)}
    assert reasons == ({"aborted"} if kv == "abort" else {"length"})
    assert {s.finish_reason for s in stale.result(WAIT)} == ({"aborted"} if kv == "abort" else {"stale"})
    check_marks([*handle.result(0), *stale.result(0)])
