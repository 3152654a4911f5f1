"""Mixtures of experts in Triton, in its interpreter where there is no GPU: products of experts, bits that do not depend on
which rows share an expert, and models of an exact service on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import exact, experts, experts_kernels  # noqa: E402
from rollout.engine.cuda.exact import exact_linear, make_exact, make_plain  # noqa: E402
from rollout.engine.cuda.experts import exact_experts, group  # noqa: E402
from tests.support.families import build  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ["qwen3_moe", "gpt_oss", "nemotron_h"]
"""gate and up, transposed with biases and a gate of its own, up alone"""
MIXTURES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "gpt_oss",
    "olmoe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2"))]  # fmt: skip
TILE = exact.TILES[4]


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def choices(kind: str, tokens: int, k: int, count: int, seed: int = 0) -> torch.Tensor:
    """Return [tokens, k] different experts of each token."""
    r = torch.Generator().manual_seed(seed)
    if kind == "one expert has them all":
        first = torch.full((tokens, 1), count - 1)
        others = torch.rand(tokens, count - 1, generator=r).topk(k - 1).indices
        return torch.cat([first, others], 1).to(DEVICE)
    if kind == "one token each":
        return (torch.arange(tokens * k).view(tokens, k) % count).to(DEVICE)
    if kind == "two experts, the others empty":
        return torch.tensor([1, 3]).repeat(tokens, 1).to(DEVICE)
    return torch.rand(tokens, count, generator=r).topk(k).indices.to(DEVICE)


KINDS = ("uneven", "one expert has them all", "one token each", "two experts, the others empty")


# ── sorting ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_rows_are_sorted_and_tiles_have_one_expert_each(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With choices of no expert (6 and above), in several passes over them."""
    monkeypatch.setattr(experts, "CHOICES_AT_ONCE", 16)
    chosen = choices(kind, tokens, 2, 8)
    grouping = group(chosen, 6, 4)
    flat = chosen.flatten().cpu().numpy()
    order = np.argsort(flat, kind="stable")[: int((flat < 6).sum())]
    assert grouping.order.cpu().numpy()[: len(order)].tolist() == order.tolist()
    assert grouping.counts.tolist() == np.bincount(flat, minlength=8)[:6].tolist()
    place = np.full(len(flat), -1)
    place[order] = np.arange(len(order))
    assert grouping.place.flatten().tolist() == place.tolist()
    of, begin, end, total = (each.cpu().numpy() for each in grouping.tiles)
    count, rows = int(total[0]), []
    assert count <= len(of)
    for tile in range(count):
        mine = range(begin[tile], end[tile])
        assert 1 <= len(mine) <= 4 and {int(flat[order[row]]) for row in mine} == {int(of[tile])}
        rows += mine
    assert rows == [*range(len(order))], "each row is in one tile"


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.long)])
@pytest.mark.parametrize("by_input", [False, True])
def test_grouped_products_are_those_of_an_exact_layer_each(dtype: torch.dtype, by_input: bool) -> None:
    """To the bit, in both layouts, with odd sizes: 75 outputs and 67 inputs."""
    weight, bias, x = normal(5, 75, 67, dtype=dtype, seed=1), normal(5, 75, dtype=dtype, seed=2), normal(37, 67, dtype=dtype)
    laid = weight.mT.contiguous() if by_input else weight
    tile = exact.TILES[x.element_size()]
    chosen = choices("uneven", 37, 2, 5)
    grouping = group(chosen, 5, tile.rows)
    got = experts.product(x, laid, bias, grouping, tile, 2, by_input)
    for row, choice in enumerate(grouping.order.tolist()):
        expert = int(chosen.flatten()[choice])
        assert torch.equal(got[row], exact_linear(x[choice // 2 : choice // 2 + 1], weight[expert], bias[expert])[0])


def of(name: str, dtype: torch.dtype = FP32) -> tuple[Any, Any]:
    """Return the same module of experts twice: exact, and transformers' loop."""
    ours, plain = (
        next(each for each in build(name, dtype).modules() if hasattr(each, "is_transposed")).to(DEVICE) for _ in "12"
    )
    ours.forward = exact._experts.__get__(ours)
    plain.config._experts_implementation = "eager"
    return ours.requires_grad_(False), plain.requires_grad_(False)


@pytest.mark.some(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_uneven_and_single_experts(name: str, kind: str) -> None:
    """As transformers' loop over experts."""
    ours, plain = of(name)
    for tokens in (0, 1, 2, 37):
        hidden, index = normal(tokens, 64), choices(kind, tokens, 2, 4)
        weights = torch.rand(tokens, 2, device=DEVICE)
        torch.testing.assert_close(ours(hidden, index, weights), plain(hidden, index, weights), atol=1e-5, rtol=1e-4)


def changed(name: str, dtype: torch.dtype, kind: str) -> int:
    """Return how many of some rows have other bits alone, and among a few, than in a crowd."""
    ours, _ = of(name, dtype)
    tile = exact.TILES[2 if dtype == BF16 else 4]
    hidden, index, weights = normal(70, 64, dtype=dtype), choices(kind, 70, 2, 4), normal(70, 2, dtype=dtype, seed=3)
    crowd, found = exact_experts(ours, hidden, index, weights, tile), 0
    for rows in ([0], [41], [69, 3], [*range(20, 60)]):
        found += not torch.equal(exact_experts(ours, hidden[rows], index[rows], weights[rows], tile), crowd[rows])
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["uneven", "one expert has them all"])
def test_a_row_is_the_same_among_others(name: str, kind: str, dtype: torch.dtype) -> None:
    assert changed(name, dtype, kind) == 0


@pytest.mark.parametrize("mutant", ["tiles that mix experts", "sums in halves for few rows", "a sum in order of choice"])
def test_mutants_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls."""
    if mutant == "tiles that mix experts":
        right = experts.group

        def mixed(chosen: torch.Tensor, count: int, rows: int) -> Any:
            """One tile for all rows of two experts, with the matrix of the first."""
            made = right(chosen, count, rows)
            expert, begin, end, total = (each.clone() for each in made.tiles)
            if total[0] > 1:
                expert[1], begin[1] = expert[0], begin[1]
            return made._replace(tiles=(expert, begin, end, total))

        monkeypatch.setattr(experts, "group", mixed)
        ours, plain = of("qwen3_moe")
        hidden, index, weights = normal(37, 64), choices("uneven", 37, 2, 4), torch.rand(37, 2, device=DEVICE)
        assert not torch.allclose(ours(hidden, index, weights), plain(hidden, index, weights), atol=1e-3)
    elif mutant == "sums in halves for few rows":
        whole = experts.product

        def halves(x: torch.Tensor, weight: torch.Tensor, bias: Any, grouping: Any, tile: Any, *rest: Any) -> torch.Tensor:
            if grouping.place.numel() >= 128:
                return whole(x, weight, bias, grouping, tile, *rest)
            half, by_input = x.shape[1] // 2, rest[1]
            cut = [weight[:, part] if by_input else weight[..., part] for part in (slice(half), slice(half, None))]
            first = whole(x[:, :half].contiguous(), cut[0], bias, grouping, tile, *rest)
            return first + whole(x[:, half:].contiguous(), cut[1], None, grouping, tile, *rest)

        monkeypatch.setattr(experts, "product", halves)
        assert changed("qwen3_moe", FP32, "uneven")
    else:
        weights, x = torch.tensor([[0.1, 0.7, 0.3]], device=DEVICE), normal(3, 400)
        for index, equal in (([[0, 1, 2]], True), ([[2, 0, 1]], False)):
            grouping = group(torch.tensor(index, device=DEVICE), 3, 4)
            got = experts._Combined.apply(x, weights, grouping)[0]  # type: ignore[no-untyped-call]
            terms = [x[int(grouping.place[0, i])] * weights[0, i] for i in range(3)]
            of_choice = terms[0] + terms[1] + terms[2]
            of_rows = torch.zeros(400, device=DEVICE)
            for row in range(3):
                of_rows = of_rows + x[row] * weights[0, int(grouping.order[row])]
            assert torch.equal(got, of_rows)
            assert torch.equal(of_choice, of_rows) == equal


def test_nothing_waits_for_the_device() -> None:
    """The number of programs and of tiles follows from shapes: as a graph needs it."""
    launched: list[tuple[int, ...]] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            kernel = getattr(experts_kernels, name)

            class Launch:
                def __getitem__(_, grid: Any) -> Any:  # noqa: N805
                    launched.append((name, *grid))
                    return kernel[grid]

            return Launch()

    ours, _ = of("qwen3_moe")
    hidden, weights = normal(37, 64), torch.rand(37, 2, device=DEVICE)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.engine.cuda.experts_kernels", Noted())
        import rollout.engine.cuda

        patch.setattr(rollout.engine.cuda, "experts_kernels", Noted())
        for kind in KINDS:
            launched.clear()
            ours(hidden, choices(kind, 37, 2, 4), weights)
            seen.append([*launched])
    assert seen[0] and all(each == seen[0] for each in seen)
    assert [name for name, *_ in seen[0]] == ["count", "sort", "grouped", "grouped", "combine"]


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return made


@pytest.mark.parametrize("name", MIXTURES)
def test_a_model_its_gradients_and_what_is_undone(name: str) -> None:
    """The module's own up to rounding."""
    plain, made = (build(name).to(DEVICE) for _ in range(2))
    make_exact(made)
    ids = torch.arange(3, 12, device=DEVICE)[None]
    for model in (plain, made):
        model.requires_grad_(True)
        logits(model, ids).log_softmax(-1)[0, :, 7].sum().backward()
    torch.testing.assert_close(logits(made, ids), logits(plain, ids), rtol=1e-4, atol=1e-4)
    for (key, one), (_, other) in zip(plain.named_parameters(), made.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).abs().max() <= 2e-3 * one.grad.abs().max() + 1e-5, key
    make_plain(made)
    assert all("forward" not in vars(each) for each in made.modules())
    assert torch.equal(logits(made, ids), logits(plain, ids))


def test_a_token_of_a_mixture_is_the_same_in_a_longer_batch() -> None:
    """Routers, experts and what is around them: rows beside each other are of other texts."""
    made = build("qwen3_moe").to(DEVICE)
    make_exact(made)
    block = made.model.layers[1].mlp
    hidden = normal(1, 70, 64)
    with torch.no_grad():
        whole = block(hidden)
        for rows in ([0], [5, 60], [*range(30)]):
            assert torch.equal(block(hidden[:, rows]), whole[:, rows])
