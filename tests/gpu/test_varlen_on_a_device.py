"""torch's `varlen_attn` for the prompts of large steps, on a device: against double precision beside tiles in one step, and an
engine that uses it beside one that does not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.cuda import tiles, varlen  # noqa: E402
from engine.devices import StepCapacity  # noqa: E402
from engine.engine import Engine  # noqa: E402
from tests.support.on_device import DEVICE, Samples, agree, engine, needs_cuda  # noqa: E402
from tests.support.production import BLOCK, Heads, assert_right, attend, pages  # noqa: E402
from tests.support.tiny import tiny  # noqa: E402
from tests.support.toy import group, run  # noqa: E402

pytestmark = [pytest.mark.gpu, needs_cuda]
LENGTHS = [640, 1, 2049, 17, 300, 4100]


@pytest.mark.parametrize("heads", [Heads(), Heads(kv=4, group=7), Heads(dim=64), Heads(kv=4, dim=256, group=2)])
def test_prompts_beside_tiles(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, a token of one, and the last 100 tokens of another, K and V read back from the pool."""
    monkeypatch.setattr(tiles, "CHUNK_TOKENS", 256)
    made, counts = pages(heads, LENGTHS), [*LENGTHS[:-2], 100, 4100]
    columns = -(-max(LENGTHS) // BLOCK)
    capacity = StepCapacity(sum(counts), 16, columns, heads.kv * heads.group, heads.kv, heads.dim, heads.dtype.itemsize)
    one = varlen.open_varlen(torch.device(DEVICE), capacity)
    assert_right(made, counts, *attend(made, counts, share=False, attends=one.attend))


def prompts(e: Engine) -> Samples:
    """Prompts of 300 tokens, nine in a step, two of which begin alike; and one of 5,000 tokens, which takes two steps."""
    texts = [[3 + (seed * i + i) % 190 for i in range(300)] for seed in range(1, 10)]
    texts += [texts[0][:256] + [7] * 44, [3 + i * i % 190 for i in range(5000)]]
    return run(e, [group(f"p{i}", ids, n=2, max_tokens=8, seed=i, ignore_eos=True) for i, ids in enumerate(texts)])


def test_an_engine_makes_the_same_samples_up_to_rounding() -> None:
    plain, other = (
        engine(
            dtype="bfloat16", model=tiny("llama", torch.bfloat16, max_position_embeddings=8192), kv_tokens=16_384,
            max_batch_tokens=4096, prefill_attention=name,
        )
        for name in ("paged", "varlen")
    )  # fmt: skip
    assert other.arithmetic == f"{plain.arithmetic}+varlen"
    agree(prompts(plain), prompts(other), atol=0.1, alike=0.5)
