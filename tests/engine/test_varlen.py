"""Prompts of large steps by `varlen_attn` in place of tiles: which ones, what is refused, an engine that does so. The kernel is
a stand-in here; what tiles and it make of one step together is in tests/engine/test_triton_attention.py, and the real one in
tests/gpu/test_varlen_on_a_device.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.config import EngineConfig  # noqa: E402
from engine.cuda import tiles, varlen  # noqa: E402
from engine.cuda.attention import TritonAttention  # noqa: E402
from engine.cuda.varlen import MOST_RUNS, Varlen, VarlenUnavailable, by_torch, refusal, starts_of, try_attend  # noqa: E402
from engine.devices import CpuDevice, CudaDevice, StepCapacity, device_of, fuse  # noqa: E402
from engine.engine import Engine  # noqa: E402
from tests.support.by_sdpa import BySdpa  # noqa: E402
from tests.support.tiny import plain_logprobs, tiny, tiny_engine  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "num_hidden_layers": 1}
CAPACITY = StepCapacity(8192, 16, 64, 8, 2, 64, 2)


@pytest.fixture
def small_chunks() -> Iterator[None]:
    """And no comparison at each start, which takes as long as a test here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_TOKENS", 16)
        patch.setattr("engine.worker.try_out", lambda *_: None)
        patch.setattr("engine.worker.judge", lambda *_: None)
        yield


def runs_of(rows: list[tuple[int, int]], more_than: int = 0) -> list[tuple[int, int, int, list[int]]]:
    """Of rows of (first position, tokens): tokens from and to, the longest, and where each begins."""
    starts = np.cumsum([0, *(count for _, count in rows)]).astype(np.int32)
    lens = np.array([first + count for first, count in rows], np.int32)
    found = Varlen(BySdpa(), more_than).runs(starts, lens)
    return [(run.tokens.start, run.tokens.stop, run.longest, run.starts.tolist()) for run in found]


def test_prompts_that_begin_in_a_step_are_found() -> None:
    assert runs_of([(9, 1), (0, 20), (0, 30), (32, 40), (0, 25), (7, 1)]) == [
        (1, 51, 30, [0, 20, 50]),
        (91, 116, 25, [0, 25]),
    ], "not decode, and not what goes on behind a cached prefix or an earlier chunk"
    assert not runs_of([(0, 1), (0, 16), (3, 40)]), "small tiles serve short ones"
    assert runs_of([(0, 17)], more_than=16) and not runs_of([(0, 17)], more_than=17), "a step that is replayed"
    short, long = [(0, 20), (5, 1)], [(0, 30), (5, 1)]
    found = runs_of([*short, *long * MOST_RUNS, *short])
    assert len(found) == MOST_RUNS and all(longest == 30 for _, _, longest, _ in found), "the largest, if there are too many"
    assert [begin for begin, *_ in found] == sorted(begin for begin, *_ in found)


def test_there_is_room_for_all_of_their_starts() -> None:
    one = Varlen(BySdpa(), 0)
    for rows in ([(0, 20)] * 16, [(0, 20), (1, 1)] * 8, [(0, 20)] * 13 + [(1, 1), (0, 20)] + [(1, 1)]):
        counts = np.array([count for _, count in rows])
        runs = one.runs(np.cumsum([0, *counts]).astype(np.int32), counts + [first for first, _ in rows])
        assert len(starts_of(runs)) <= one.most_starts(16)


def old(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool) -> None: ...


def ungrouped(query: Any, key: Any, value: Any, *starts: Any, scale: float, window_size: tuple[int, int]) -> Any:
    return scale, window_size


def grouped(query: Any, key: Any, value: Any, *starts: Any, scale: float, window_size: Any, enable_gqa: bool) -> Any:
    return scale, window_size, enable_gqa


@pytest.mark.parametrize(
    ("changed", "capability", "kernel", "why"),
    [
        ({}, 90, grouped, ""),
        ({}, 80, ungrouped, ""),
        ({}, 90, old, "has no scale, window_size: take 2.11"),
        ({}, 75, grouped, r"compute capability 8\.0, and this device has 7\.5"),
        ({"itemsize": 4}, 90, grouped, 'dtype="bfloat16"'),
        ({"head_dim": 12}, 90, grouped, "a multiple of 8 up to 256 numbers, not 12"),
        ({"head_dim": 512}, 90, grouped, "not 512"),
        ({"tokens": 2048}, 90, grouped, "no step has more than 2048 tokens.*give max_batch_tokens=8192"),
    ],
)
def test_what_it_does_not_serve_is_refused_by_name(changed: dict[str, int], capability: int, kernel: Any, why: str) -> None:
    told = refusal(replace(CAPACITY, **changed), capability, kernel)
    assert bool(told) == bool(why) and re.search(why, told)


def test_how_torch_is_asked() -> None:
    """A window of W tokens has the query itself in it; torch counts those beside it."""
    from torch.nn.attention.varlen import varlen_attn

    q = torch.zeros(0)
    assert by_torch(grouped)(q, q, q, q, 5, 0.5, 0) == (0.5, (-1, 0), True)  # type: ignore[comparison-overlap]
    assert by_torch(ungrouped)(q, q, q, q, 5, 0.5, 7) == (0.5, (6, 0))  # type: ignore[comparison-overlap]
    assert not refusal(CAPACITY, 90, varlen_attn), "this torch has it"


def test_it_is_tried_at_the_start() -> None:
    trial = partial(try_attend, capacity=CAPACITY, device=torch.device("cpu"), dtype=torch.bfloat16)
    one = BySdpa()
    trial(one)
    assert [window for _, _, window in one.asked] == [0, 5]
    for off in (1, -1):
        with pytest.raises(VarlenUnavailable, match="differs from attention in fp32"):
            trial(BySdpa(off))

    def no_number(q: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.full_like(q, torch.nan)

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("head_size should be\na multiple of 8")

    with pytest.raises(VarlenUnavailable, match="by nan"):
        trial(no_number)
    with pytest.raises(VarlenUnavailable, match="fails with the model's heads: head_size should be a multiple of 8"):
        trial(broken)


def test_without_a_device_or_torch_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has of it on the CPU does not run there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(VarlenUnavailable, match='^prefill_attention="varlen": varlen_attn fails with the model'):
        varlen.open_varlen(torch.device("cpu"), CAPACITY)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(VarlenUnavailable, match="has no varlen_attn: take 2.11"):
        varlen.open_varlen(torch.device("cpu"), CAPACITY)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"exact": True}, "depend on what the prefix index holds, which exact rules out"),
        ({"attention": "auto"}, "give attention=\"triton\" with it, not 'auto'"),
        ({"attention": "reference"}, 'give attention="triton"'),
        ({"dtype": "float32"}, "dtype='float32' cannot have it"),
        ({"kv_dtype": "fp8_e4m3"}, "as they were before kv_dtype='fp8_e4m3' rounds them"),
        ({"prefill_attention": "flash"}, "must be one of paged, varlen"),
    ],
)
def test_what_it_excludes_is_refused(changed: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"device": "cuda", "attention": "triton", "prefill_attention": "varlen"}
    assert EngineConfig(**wanted).prefill_attention == "varlen" and EngineConfig().prefill_attention == "paged"
    with pytest.raises(ValueError, match=f'^prefill_attention="{(wanted | changed)["prefill_attention"]}": .*{message}'):
        EngineConfig(**wanted | changed)


def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ValueError, match='prefill_attention="varlen" runs on CUDA only'):
        device_of(EngineConfig(attention="triton", prefill_attention="varlen"))


def engine_with(patch: pytest.MonkeyPatch, attend: BySdpa, fused: bool) -> Engine:
    more = Varlen(attend, 20)
    kind = CpuDevice if DEVICE == "cpu" else CudaDevice
    patch.setattr(kind, "backend", lambda self, name, capacity: TritonAttention(self.memory.device, capacity, varlen=more))
    if fused:
        patch.setattr(kind, "equip", lambda self, model, config, backend: fuse(model, backend))
    return tiny_engine(
        model=tiny("qwen3", **SMALL, head_dim=16), attention="triton", device=DEVICE, kv_tokens=512, max_num_seqs=16,
        max_batch_tokens=40, cuda_graphs=False,
    )  # fmt: skip


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_engine_whose_prompts_go_elsewhere(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs of a full forward of the module for a prompt that fits a step, one whose beginning is found in the index, and
    one that takes two steps, beside samples that decode. Which of them begins in a large step is counted."""
    first, other = list(range(3, 27)), list(range(60, 110))
    prompts = {"first": first, "found": [*first, 7, 8, 9], "chunked": other}
    attend = BySdpa()
    engine = engine_with(monkeypatch, attend, fused)
    assert engine.arithmetic.endswith("triton/1+varlen") and engine.status()["arithmetic"] == engine.arithmetic
    plain = tiny("qwen3", **SMALL, head_dim=16).to(DEVICE)
    asked = []
    for tag, prompt in prompts.items():
        beside = group(f"beside {tag}", [5, 6, 7], n=1, max_tokens=2, ignore_eos=True)
        samples = run(engine, [beside, group(tag, prompt, n=1, max_tokens=2, ignore_eos=True)])
        for (name, _), sample in samples.items():
            want = plain_logprobs(plain, np.array(prompts.get(name, [5, 6, 7]), np.int32), sample)
            np.testing.assert_allclose(sample.logprobs, want, atol=1e-4)
        asked.append([starts for starts, _, _ in attend.asked])
        attend.asked.clear()
    assert asked[0] == [[0, 24]] and asked[1] == [], "of the second prompt only the end is computed, by tiles"
    assert asked[2] == [[0, 37]], "the first of two chunks"
    engine.check()
