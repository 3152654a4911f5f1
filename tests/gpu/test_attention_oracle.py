"""Attention at production sizes: the configuration that runs is the one that is compared. Chunks of 256 tokens and the launches
of the device, every head size and group that models have, contexts from one token to many spans. The smallest case of this is
in tests/engine/test_triton_attention.py, in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import tiles  # noqa: E402
from tests.support.production import BLOCK, DEVICE, Heads, assert_right, attend, pages  # noqa: E402

CONTEXTS = [1, 255, 256, 257, 640, 2048, 2049, 9000]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="hours in the interpreter")]


@pytest.fixture(autouse=True)
def chunks_of_production(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests here have small ones."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 256)


ALL = [
    Heads(), Heads(group=2), Heads(kv=4, group=7), Heads(kv=1, group=16), Heads(dim=64), Heads(kv=4, dim=256, group=2),
    Heads(kv=2, dim=64, dtype=torch.float32), Heads(fp8=True), Heads(kv=3, group=3, dim=64, fp8=True),
]  # fmt: skip


def text(heads: Heads) -> str:
    return f"{heads.kv}x{heads.group}x{heads.dim}-{str(heads.dtype).removeprefix('torch.')}" + "-fp8" * heads.fp8


@pytest.mark.parametrize("heads", ALL, ids=text)
@pytest.mark.parametrize("what", ["decode", "prefill", "both"])
def test_every_context(heads: Heads, what: str) -> None:
    """Decode, prefill of all of a context up to 2,049 tokens (of the last 300 beyond), and both in one step."""
    counts = {
        "decode": [1] * len(CONTEXTS),
        "prefill": [length if length <= 2049 else 300 for length in CONTEXTS],
        "both": [1 if i % 2 else min(length, 300) for i, length in enumerate(CONTEXTS)],
    }[what]
    made = pages(heads, CONTEXTS)
    assert_right(made, counts, *attend(made, counts, share=False))


@pytest.mark.parametrize("heads", ALL, ids=text)
@pytest.mark.parametrize("shared", [8, 20, 128])
def test_sixteen_rows_over_a_prefix(heads: Heads, shared: int) -> None:
    """Right; and the same bits as each row for itself, as in one program, as alone: from large tiles, small ones, and split."""
    lengths = [shared * BLOCK + 1 + 37 * i for i in range(16)]
    made = pages(heads, lengths, shared)
    counts = [1] * 16
    query, out = attend(made, counts, share=True)
    assert_right(made, counts, query, out)
    for share, programs in ((False, None), (True, heads.kv), (False, heads.kv)):
        assert torch.equal(out, attend(made, counts, share, programs)[1]), (share, programs)
