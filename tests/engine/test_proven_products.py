"""Products of a library for `exact`: taken where a check proves that their rows do not depend on the number of rows, refused
otherwise. The libraries are stand-ins on the CPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout.engine.cuda import exact, library_products  # noqa: E402
from rollout.engine.cuda.device import equip_exact  # noqa: E402
from rollout.engine.cuda.exact import make_plain  # noqa: E402
from rollout.engine.cuda.library_products import (  # noqa: E402
    ROWS,
    PaddedProduct,
    ProvenProduct,
    aligned,
    choose_products,
    proven,
    without_splits,
)
from rollout.engine.cuda.proofs import Unproven, WeightShape, numbers, prove_row_invariant, shapes_of  # noqa: E402
from rollout.engine.forward.model import Model  # noqa: E402
from rollout.engine.forward.reference import ReferenceAttention  # noqa: E402
from rollout.exact import on_device  # noqa: E402
from tests.support.tiny import tiny  # noqa: E402

SHAPES = [WeightShape((24, 8, 8), 40), WeightShape((40,), 24)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW = (1, 2, 3, 5, 8, 13, 16)
"""numbers of rows"""
LIKE = torch.empty(0, dtype=torch.bfloat16)
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "intermediate_size": 32,
}  # fmt: skip


def in_pieces(x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return [rows, outs], whose sums along the inputs are cut into pieces, number by number in fp32."""
    out = torch.zeros(len(x), len(weight))
    for piece in torch.arange(x.shape[1]).chunk(pieces):
        part = torch.zeros_like(out)
        for i in piece.tolist():
            part += x[:, i : i + 1].float() * weight[:, i].float()
        out += part
    return out.to(x.dtype)


def one_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return in_pieces(x, weight, 1)


def split_for_few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Split the sums of few rows, as a library does to fill a device."""
    return in_pieces(x, weight, 4 if len(x) < 4 else 1)


def split_for_few_outs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return in_pieces(x, weight, 4 if len(weight) < 16 else 1)


def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum odd rows in another order."""
    out = one_order(x, weight)
    out[1::2] = in_pieces(x[1::2], weight, 4)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_of_one_order_is_proven(dtype: torch.dtype) -> None:
    product = PaddedProduct(one_order, FEW)
    made = proven(product, SHAPES, "13.1.0", LIKE.to(dtype))
    assert made.name.startswith("exact_lt/1/cublas13.1.0-")
    assert made.name == proven(product, SHAPES, "13.1.0", LIKE.to(dtype)).name
    other = proven(PaddedProduct(lambda x, weight: in_pieces(x, weight, 4), FEW), SHAPES, "13.1.0", LIKE.to(dtype))
    assert other.name != made.name, "sums of another order, the same for all rows, have another digest"


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (split_for_few, "products of 1 rows, 40 inputs and 40 outputs have other bits"),
        (split_for_few_outs, "products of 1 rows, 40 inputs and 8 outputs have other bits"),
        (by_place, "have other bits"),
        (lambda x, weight: x.new_zeros(len(x), len(weight)), "products of 40 inputs and 40 outputs are wrong"),
    ],
)
def test_products_that_depend_on_the_rows_are_refused(product: Any, why: str) -> None:
    """The negative control: on their number, their place, what is multiplied beside them; and one that is wrong."""
    with pytest.raises(Unproven, match=why):
        proven(PaddedProduct(product, FEW), SHAPES[:1], "13.1.0", LIKE)


def test_shapes_that_are_not_proven_are_left_to_triton() -> None:
    """Each shape is proven for itself. Which ones are, and how they are summed, is in the name."""

    def split_for_few_of_24(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return in_pieces(x, weight, 4 if len(x) < 4 and x.shape[1] == 24 else 1)

    def other(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_full((len(x), len(weight)), 7)

    made = proven(PaddedProduct(split_for_few_of_24, FEW), SHAPES, "13.1.0", LIKE, other)
    x, weight = numbers(3, 40, 1, LIKE), numbers(24, 40, 2, LIKE)
    assert torch.equal(made.multiply(x, weight, None), one_order(x, weight))
    assert (made.multiply(numbers(3, 24, 1, LIKE), numbers(40, 24, 2, LIKE), None) == 7).all()
    names = {proven(PaddedProduct(one_order, FEW), shapes, "13.1.0", LIKE).name for shapes in (SHAPES, SHAPES[:1], SHAPES[1:])}
    assert len(names) == 3 and made.name in names


def test_a_product_that_fails_is_refused() -> None:
    def fails(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(Unproven, match="a product failed: CUDA out of memory"):
        proven(PaddedProduct(fails, FEW), SHAPES, "13.1.0", LIKE)


def test_only_proven_numbers_of_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are padded, more than the most are cut into pieces; a bias is added to the rounded product."""
    monkeypatch.setattr(library_products, "ALIGNED_BYTES", 64)  # what the CPU's allocator aligns to
    seen: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        assert x.is_contiguous() and weight.is_contiguous()
        assert x.data_ptr() % 64 == weight.data_ptr() % 64 == 0
        return one_order(x, weight)

    product = PaddedProduct(counted, FEW)
    x, weight, bias = numbers(40, 24, 1, LIKE), numbers(10, 24, 2, LIKE), numbers(1, 10, 3, LIKE)[0]
    for rows, calls in ((1, [1]), (4, [5]), (9, [13]), (16, [16]), (40, [16, 16, 8]), (0, [1])):
        seen.clear()
        made = product(x[:rows], weight, bias)
        assert seen == calls
        assert torch.equal(made, one_order(x[:rows], weight) + bias)
    assert torch.equal(product(x[3:9, 1:], weight[2:, 1:]), one_order(x[3:9, 1:], weight[2:, 1:])), "neither is aligned"
    assert aligned(weight) is weight
    assert ROWS[0] == 1 and ROWS[-1] == 8192 and list(ROWS) == sorted(set(ROWS))


def test_numbers_are_the_same_everywhere() -> None:
    """A digest of results names sums, so what is summed may not change, with the number of rows or with the version."""
    made = numbers(700, 50, 1, torch.empty(0))
    assert torch.equal(made[:9], numbers(9, 50, 1, torch.empty(0))) and not torch.equal(made[0], made[1])
    assert made.abs().max() <= 1 and abs(float(made.mean())) < 0.02 and 0.55 < float(made.std()) < 0.6
    assert [round(float(each), 6) for each in made[0, :3]] == [-0.298496, 0.17396, -0.424143]


def test_the_shapes_of_a_model() -> None:
    shapes = shapes_of(tiny("qwen3", **SMALL | {"head_dim": 16}))
    assert set(shapes) == {
        WeightShape((32, 16, 16), 32), WeightShape((32,), 32), WeightShape((32, 32), 32), WeightShape((64,), 32),
    }  # fmt: skip


def test_shapes_that_are_not_proven_are_triton_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an adapter, which the service does not have; the shapes of its model are the same with one and without."""
    peft = pytest.importorskip("peft")
    made = tiny("qwen3", **SMALL | {"head_dim": 16})
    shapes = shapes_of(made)
    adapted = peft.get_peft_model(made, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
    assert shapes_of(adapted.get_base_model()) == shapes
    seen: list[str] = []

    def stand_in(name: str) -> Any:
        def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(name)
            return x @ weight.T

        return multiply

    monkeypatch.setattr(exact, "product", stand_in("triton"))
    multiply = ProvenProduct(PaddedProduct(stand_in("library"), FEW), shapes)
    x = numbers(2, 32, 1, torch.empty(0))
    for outs in (32, 16, 64, 4):
        multiply(x, numbers(outs, 32, 2, torch.empty(0)))
    assert seen == ["library", "library", "library", "triton"]


def test_a_tile_by_rows_is_proven_against_the_fixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, for some numbers of rows; the control sums the inputs of few rows in halves."""
    monkeypatch.setattr(library_products, "FEW_ROWS", 4)
    shapes, rows, like = [WeightShape((33,), 100)], (1, 3, 5), LIKE.to(DEVICE)
    prove_row_invariant(library_products.by_rows, shapes, rows, like, against=exact.product)

    def halves(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return exact.product(x[:, :50], weight[:, :50]) + exact.product(x[:, 50:], weight[:, 50:])

    with pytest.raises(Unproven, match="products of 1 rows"):
        prove_row_invariant(halves, shapes, rows, like, against=exact.product)


def test_settings_are_those_of_a_product_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt without splits while it multiplies; torch's own before and after, also where it fails."""
    library = ["cublas"]

    def preferred(name: str | None = None) -> str:
        library.append(name or library[-1])
        return library[-1]

    monkeypatch.setattr("torch.backends.cuda.preferred_blas_library", preferred)
    settings: Any = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction{of}" for dtype in ("bf16", "fp16") for of in ("", "_split_k")]
    before = [getattr(settings, name) for name in names]
    assert all(before)
    with pytest.raises(KeyError), without_splits():
        assert library[-1] == "cublaslt" and not any(getattr(settings, name) for name in names)
        raise KeyError
    assert library[-1] == "cublas" and [getattr(settings, name) for name in names] == before


def test_without_a_library_the_products_are_triton_s(caplog: pytest.LogCaptureFixture) -> None:
    """And the log says why; a service of the library's arithmetic is refused."""
    made = tiny("qwen3", torch.bfloat16, **SMALL | {"head_dim": 16})
    with caplog.at_level(logging.INFO, "rollout"):
        chosen = choose_products(made, library=True)
    assert chosen.name == "exact/1" and chosen.multiply is exact.product
    assert "cuBLASLt multiplies in 16 bits on CUDA, and the model is in torch.bfloat16 on cpu" in caplog.text
    with pytest.raises(ValueError, match=r"exact_lt/1/cublas13.*library_products = false"):
        on_device.products_of(made, "exact_lt/1/cublas13.1.0-00000000/fused+triton/1/t3.9/sm90")
    if torch.version.cuda is None:
        with pytest.raises(Unproven, match="version is unknown"):
            library_products.library_version()


def of_stand_in(module: Any) -> library_products.ExactProducts:
    """Return a stand-in of the library's products, of one order."""
    return proven(PaddedProduct(one_order, FEW), shapes_of(module), "13.1.0", torch.empty(0, dtype=module.dtype))


@pytest.mark.skipif(DEVICE == "cuda", reason="the library is a stand-in on the CPU, which Triton's norms there cannot read")
def test_a_service_and_a_trainer_with_the_library_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name says it, and both multiply by it: stacked, in the service, and layer by layer. The control is Triton's product:
    in the interpreter it has one order too, but other tiles of inputs."""
    monkeypatch.setattr(library_products, "library_products", of_stand_in)
    monkeypatch.setattr(on_device, "library_products", of_stand_in)
    served, trained = (tiny("qwen3", **SMALL | {"head_dim": 16, "hidden_size": 48}) for _ in range(2))
    path = equip_exact(Model(served, "tiny"), ReferenceAttention(), fused=False, library=True)
    assert path.arithmetic.startswith("exact_lt/1/cublas13.1.0-")
    products = on_device.products_of(trained, f"{path.arithmetic}+triton/1/t3.9/sm90")
    assert products.name == path.arithmetic != on_device.products_of(trained, "exact/1+triton/1/t3.9/sm90").name
    undo = on_device.use_products(trained, products.multiply)
    mlp, other = (each.model.layers[0].mlp for each in (served, trained))
    x = numbers(21, 48, 5, torch.empty(0))
    with torch.no_grad():
        want = one_order(x, mlp.gate_proj.weight)
        assert torch.equal(mlp.gate_proj(x), want) and torch.equal(other.gate_proj(x), want)
        stacked = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal(products.multiply(x, stacked, None)[:, :32], want)
    weight = other.gate_proj.weight
    other.gate_proj(x).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(32, 48), rtol=1e-4, atol=1e-4)
    undo()
    assert all("forward" not in vars(each) for each in trained.modules())
    make_plain(served)
    assert all("forward" not in vars(each) for each in served.modules())
