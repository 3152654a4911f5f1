"""Differences: their coding bit for bit, and a way that falls back to whole tensors, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rollout.client.api import RolloutClient
from rollout.engine.engine import Engine
from rollout.engine.values import Sampling, TensorInfo
from rollout.service import refresh as pushes
from rollout.transport.errors import InvalidRequest, WrongBase
from rollout.transport.loopback import LoopbackService
from rollout.transport.weights import delta
from rollout.transport.weights.delta import HEAD_BYTES, DeltaOffer, DeltaPayload, decode, encode, rest_bytes
from rollout.transport.weights.ends import Sender, WeightTransport
from rollout.transport.weights.files import FilesPayload, describe_folder
from rollout.transport.weights.inline import InlineOffer
from rollout.transport.weights.receiving import open_payload
from rollout.transport.weights.shm import SegmentView
from tests.support.tiny import tiny, tiny_engine
from tests.support.wire import serving

WAIT = 60.0


def coded_and_back(old: np.ndarray, new: np.ndarray) -> int:
    """Codes a slice and decodes it again. Returns the coded bytes."""
    code = np.frombuffer(encode(old, new), np.uint8)
    head = code[:HEAD_BYTES].view("<u4")
    assert rest_bytes(head, len(old), old.itemsize) == len(code) - HEAD_BYTES
    got = old.copy()
    decode(head, code[HEAD_BYTES:], got)
    np.testing.assert_array_equal(got, new)
    return len(code)


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("step", [1, 127, 128, 60_000])
def test_any_change_comes_back(dtype: str, share: float, step: int) -> None:
    r = np.random.default_rng(0)
    for size in (1, 2, 255, 256, 257, 513, 20_000):
        top = np.iinfo(dtype).max
        old = r.integers(0, top, size, dtype, endpoint=True)
        moved = r.random(size) < share
        change = r.integers(1, min(step, int(top)), size, np.int64, endpoint=True) * r.choice([-1, 1], size)
        coded_and_back(old, np.where(moved, old + change.astype(dtype), old).astype(dtype))


@pytest.mark.parametrize("at", [[0], [255], [256], [512], [513], [0, 256], [0, 257], [19_999], [0, 19_999], []])
def test_long_gaps(at: list[int]) -> None:
    old = np.zeros(20_000, np.uint16)
    new = old.copy()
    new[at] = 1
    assert coded_and_back(old, new) <= HEAD_BYTES + 2 * (len(at) + 20_000 // 256)


def test_a_change_to_a_neighbour_takes_two_bytes() -> None:
    old = np.arange(100_000, dtype=np.uint16)
    new = old.copy()
    new[::10] += 1
    assert coded_and_back(old, new) == HEAD_BYTES + 2 * 10_000
    new[::2] += 1  # a bit an element is less than a byte a change from an eighth on
    assert coded_and_back(old, new) == HEAD_BYTES + 100_000 // 8 + 50_000


@pytest.mark.parametrize("bad", ["count", "wide", "kind", "bits", "marks", "position"])
def test_what_is_damaged_is_refused(bad: str) -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[[5, 900]] = 1, 1000
    code = np.frombuffer(encode(old, new), np.uint8).copy()
    head, rest = code[:HEAD_BYTES].view("<u4"), code[HEAD_BYTES:]
    match bad:
        case "count":
            head[0] = 1001
        case "wide":
            head[1] = head[0] + 1
        case "kind":
            head[2] = 2
        case "bits":
            head[2], rest = 1, np.resize(rest, 125 + int(head[0]) + 2)
        case "marks":
            rest[int(head[0])] = 0x80
        case "position":
            rest[: int(head[0])] = 255
    with pytest.raises(InvalidRequest):
        rest_bytes(head, 1000, 2)
        decode(head, rest, old.copy())


# ── the way ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def served() -> Iterator[tuple[Engine, Callable[[], RolloutClient]]]:
    """A service of the tiny llama in bf16, and a maker of clients."""
    engine, end = tiny_engine(dtype="bfloat16"), LoopbackService()
    clients: list[RolloutClient] = []
    with serving(engine, end) as service:

        def connect() -> RolloutClient:
            clients.append(RolloutClient(transport=end.connect(), connect_timeout_s=WAIT))
            return clients[-1]

        yield engine, connect
        for client in clients:
            client.close()
        del service


class Trainer:
    """AdamW on fp32 masters of a bf16 model."""

    def __init__(self, rate: float = 1e-6) -> None:
        self.model = tiny("llama", torch.bfloat16)
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.adam = torch.optim.AdamW(self.masters, lr=rate)
        self.generator = torch.Generator().manual_seed(0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for master in self.masters:
                master.grad = torch.randn(master.shape, generator=self.generator)
            self.adam.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)

    def digest(self) -> str:
        return tiny_engine(dtype="bfloat16", model=self.model).weights.digest


def test_small_steps_send_little(served: Any) -> None:
    engine, connect = served
    client, trainer = connect(), Trainer()
    first = client.refresh(trainer.model, via="delta")
    assert first.via != "delta" and "nothing is known to be live" in first.reason and first.sent_bytes == first.bytes
    trainer.steps(20)
    done = client.refresh(trainer.model, via="delta")
    assert (done.via, done.bytes) == ("delta", first.bytes) and 0 < done.sent_bytes < 0.2 * done.bytes
    assert done.digest == engine.weights.live_digest() == trainer.digest() != first.digest
    last = client.weights_status()["last"]
    assert (last["sent_bytes"], last["via"]) == (done.sent_bytes, "delta")
    same = client.refresh(trainer.model, via="delta")
    assert same.sent_bytes == HEAD_BYTES * len(trainer.masters) and same.digest == done.digest
    trainer.steps(1)
    third = client.refresh(trainer.model, via="delta", kv="recompute")
    assert third.via == "delta" and third.digest == engine.weights.live_digest() == trainer.digest()
    (sample,) = client.submit([5, 6, 7], Sampling(max_tokens=3, ignore_eos=True)).result(WAIT)
    assert sample.weight_versions == [(0, 4)]


def test_what_does_not_pay_goes_whole_and_says_so(served: Any) -> None:
    engine, connect = served
    client = connect()
    client.refresh(tiny("llama", torch.bfloat16, seed=1), via="delta")
    other = client.refresh(tiny("llama", torch.bfloat16, seed=2), via="delta")
    assert other.via != "delta" and "does not pay" in other.reason and other.sent_bytes == other.bytes
    assert (
        engine.weights.live_digest()
        == tiny_engine(dtype="bfloat16", model=tiny("llama", torch.bfloat16, seed=2)).weights.digest
    )
    again = client.refresh(tiny("llama", torch.bfloat16, seed=2), via="delta")
    assert again.via == "delta" and again.digest == other.digest


def test_weights_that_somebody_else_has_changed(served: Any) -> None:
    """The service refuses, with a type and both versions; the client sends whole tensors, and says why."""
    engine, connect = served
    client, other, trainer = connect(), connect(), Trainer()
    client.refresh(trainer.model, via="delta")
    other.refresh(tiny("llama", torch.bfloat16, seed=1))
    trainer.steps(20)
    done = client.refresh(trainer.model, via="delta")
    assert done.via != "delta" and "against version 1" in done.reason and "live is version 2" in done.reason
    assert done.version == 3 and engine.weights.live_digest() == trainer.digest()
    trainer.steps(20)
    assert client.refresh(trainer.model, via="delta").via == "delta"


def test_a_wrong_base_is_refused_with_its_type(served: Any) -> None:
    engine, _ = served
    weights = engine.weights
    live = DeltaOffer(weights.version, weights.digest, 12)
    infos = [TensorInfo("model.norm.weight", "bfloat16", (64,), "")]

    def opened(offer: DeltaOffer) -> Any:
        return open_payload(offer, infos, 128, SegmentView(), None, weights)

    assert opened(live).sent_bytes == 12
    for wrong in (DeltaOffer(1, weights.digest, 12), DeltaOffer(0, "ab" * 32, 12)):
        with pytest.raises(WrongBase, match="the differences are against version"):
            opened(wrong)
    for size in (-1, 2**40):
        with pytest.raises(InvalidRequest, match="bytes of differences for 128 bytes"):
            opened(DeltaOffer(weights.version, weights.digest, size))
    engine.sleep(2)
    with pytest.raises(WrongBase):
        opened(live)


class Endless:
    """Live tensors of which one has 2**50 bytes."""

    def size(self, name: str) -> tuple[int, int]:
        return 2**50, 2


def test_slices_are_made_one_by_one() -> None:
    """Of a tensor of any size, the first costs no more than that."""
    info = TensorInfo("mtp.weight", "bfloat16", (2**49,), "")
    first = next(delta.slices(info, Endless()))  # type: ignore[arg-type]
    assert first == (info, 0, delta.SLICE_BYTES, 2)
    assert DeltaPayload(12, [info], Endless()).read_bytes == 0  # type: ignore[arg-type]


def test_tensors_in_another_dtype_go_whole(served: Any) -> None:
    engine, connect = served
    client, model = connect(), tiny("llama")
    client.refresh(model, via="delta")
    done = client.refresh(model, via="delta")
    assert "is sent as float32, the live one is bfloat16" in done.reason and done.via != "delta"


def test_after_a_failure_the_next_goes_whole(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences that arrive damaged are refused by their digest, and nobody knows then what the copies stand for."""
    engine, connect = served
    client, trainer = connect(), Trainer()
    client.refresh(trainer.model, via="delta")
    before = engine.weights.live_digest()
    trainer.steps(20)
    right = delta.encode

    def wrong(old: np.ndarray, new: np.ndarray) -> bytes:
        return right(old, new ^ np.ones_like(new))

    with monkeypatch.context() as patch:
        patch.setattr(delta, "encode", wrong)
        patch.setattr(delta, "PAYS", 10.0)
        with pytest.raises(ValueError, match="digest"):
            client.refresh(trainer.model, via="delta")
    assert engine.version == 1 and engine.weights.live_digest() == before and not engine.weights.staging
    done = client.refresh(trainer.model, via="delta")
    assert done.via != "delta" and engine.weights.live_digest() == trainer.digest()


def test_a_folder(served: Any, tmp_path: Path) -> None:
    engine, connect = served
    client, trainer = connect(), Trainer()

    def save() -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        save_file({name: p.detach() for name, p in trainer.model.named_parameters()}, folder / "model.safetensors")
        return folder

    assert client.refresh(save(), via="delta").via == "files"
    trainer.steps(20)
    done = client.refresh(save(), via="delta")
    assert done.via == "delta" and done.sent_bytes < 0.2 * done.bytes
    assert engine.weights.live_digest() == trainer.digest()


class Whole(WeightTransport):
    via = "whole"

    def offer_folder(self, folder: Path) -> Sender:
        return Sender(self.via, InlineOffer(), [], [])


def test_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first offer, which makes the copies, and at those of differences."""
    tensors = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.zeros(7)}
    sizes, read = list[int](), FilesPayload.read
    monkeypatch.setattr(FilesPayload, "read", lambda self, memory: sizes.append(read(self, memory)) or sizes[-1])
    way = delta.Delta(Whole())
    for i, via in enumerate(("whole", "delta", "delta")):
        tensors["a"][i] = 1
        save_file(tensors, tmp_path / "model.safetensors")
        sizes.clear()
        sender = way.offer_folder(tmp_path)
        assert sender.via == via and sum(sizes) == 2028
        assert via == "whole" or sender.manifest == describe_folder(tmp_path)
        sender.applied(SimpleNamespace(version=i + 1, digest="d"))  # type: ignore[arg-type]


def test_a_service_without_weights_of_its_own(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, connect = served
    client, trainer = connect(), Trainer()
    client.refresh(trainer.model, via="delta")
    open_payload = pushes.open_payload
    monkeypatch.setattr(pushes, "open_payload", lambda *fields: open_payload(*fields[:-1], None))
    done = client.refresh(trainer.model, via="delta")
    assert done.via != "delta" and "no weights of its own" in done.reason
