"""Who computes a model on the CPU, decided once when it is loaded, by comparing numbers.

    our products       against the exact sum: no further from it than rounding can be, in any order
    the exact module   the transformers module with our products: what a trainer has with `rollout.exact.use_exact`
    a decoder          layers in one go: used if it has the exact module's bits, at several numbers of rows
    alone, in a crowd  the same tokens in forwards of few rows and of many: they must have the same bits

Where a decoder cannot be had the exact module runs, so that samples do not depend on the batch on any CPU; its element-wise
functions are computed in whole vectors (`engine.cpu.functions`). Where they do depend on it the arithmetic's name ends in
`/batch`. Whether plain torch has the same bits is told (`torch_bits`), and nothing depends on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.cpu.decoder import CHECKED_ROWS, EchoAttention, NativeDecoder, NotNative
from engine.cpu.functions import callers, use_whole_vectors
from engine.cpu.products import (
    NativeProducts,
    NotServed,
    Products,
    plain_products,
    products_of,
    sensitive,
    use_products,
)
from engine.forward.arithmetic import torch_arithmetic
from engine.forward.batch import Batch
from engine.forward.model import ExecutionPath, NativeLayers
from engine.memory import HostMemory
from engine.scheduling.plan import plan_by_hand

log = logging.getLogger("rollout.engine.cpu")

OUTPUTS = 256
"""of each product that are compared with the exact sum"""
BATCH = "/batch"
"""at the end of a name: numbers depend on the batch"""
Forward = Callable[[Any, Any, Any], torch.Tensor]


def decide(
    module: nn.Module, name: str, asked: dict[int, dict[str, Any]], module_forward: Forward, isa: str, whole: bool
) -> ExecutionPath:
    """Give `module` the products of `isa` in place, torch's if those are wrong, and choose a decoder.

    asked: what each layer asks of its attention. module_forward: the module's own forward behind the signature of a decoder's.
    whole: all layers are in memory at once, as decoders need."""
    plain_products(module)
    with callers(module) as called:
        plain = _logits(module_forward, module)
    products, decoder, room, why = _products(module, name, asked, isa, whole)
    use_whole_vectors(called.found.values())
    try:
        use_products(module, products.isa)
        arithmetic = products.arithmetic
    except NotServed as error:
        log.warning("products are torch's own, and samples may depend on their batch model=%s reason=%r", name, str(error))
        decoder, arithmetic, why = None, f"{torch_arithmetic()}{BATCH}", str(error)
    exact = _logits(module_forward, module)
    torch_bits = not _differ(exact, plain) and (arithmetic.endswith(BATCH) or products_like_torch(module, products))
    if decoder is not None and (failed := why_not(decoder, module, exact)):
        decoder, why = None, failed
        log.warning("the module runs, which is slower model=%s reason=%r", name, why)
    if (crowded := in_a_crowd(exact)) and not arithmetic.endswith(BATCH):
        arithmetic, why = arithmetic + BATCH, f"with {crowded} rows a token has other bits than among {max(CHECKED_ROWS)}"
        log.warning("samples depend on their batch model=%s reason=%r", name, why)
    log.info(
        "runs %s model=%s products=%s reason=%r of_rounding=%.2f torch_bits=%s furthest_logprob=%.2g",
        "through transformers" if decoder is None else f"by the {type(decoder).__name__}",
        name,
        arithmetic,
        why,
        room,
        torch_bits,
        0.0 if torch_bits else _furthest(exact, plain),
    )
    return ExecutionPath(decoder, arithmetic, torch_bits, why, not crowded)


def _products(
    module: nn.Module, name: str, asked: dict[int, dict[str, Any]], isa: str, whole: bool
) -> tuple[Products, NativeLayers | None, float, str]:
    """Choose products, and a decoder by them if there is one; with them: how far a product is from the exact sum, and why
    nothing better computes."""
    products, room, why = products_of(isa), 0.0, ""
    try:
        try:
            room = check_products(module, products)
        except WrongNumbers as error:
            log.warning("products are not used model=%s isa=%s reason=%r", name, isa, str(error))
            products, why = products_of("torch"), f"{isa}: {error}"
            room = check_products(module, products)
        if whole and isinstance(products, NativeProducts):
            return products, NativeDecoder(module, asked, products.kernels), room, why
        why = why or (
            "without kernels the module runs" if whole else "all layers would be one call, and weight_offload streams them"
        )
    except NotNative as error:
        why = str(error)
    except (AttributeError, TypeError) as error:  # a module that is not put together as a decoder reads it
        why = f"a model of another kind ({error})"
    return products, None, room, why


def why_not(decoder: NativeLayers, module: nn.Module, exact: list[torch.Tensor]) -> str:
    """Tell why the decoder cannot stand for the module with our products, whose logits are `exact`; "" if it can. What rotary
    embeddings are shows only in a forward."""
    try:
        rows = _differ(_logits(decoder.forward, module), exact)
    except NotNative as error:
        return str(error)
    return f"the {type(decoder).__name__} has numbers that differ from the module's with {rows} rows" if rows else ""


class WrongNumbers(Exception):
    """A product is further from the exact sum than any order of sums can be."""


@torch.no_grad()
def check_products(module: nn.Module, products: Products) -> float:
    """Compare one product of each shape with the sum in float64; returns how far it is, in parts of the bound.

    The bound: K products of the inputs are added in fp32, in any order, which is off by at most K · 2⁻²⁴ · Σ|x·w| (Higham,
    "Accuracy and Stability of Numerical Algorithms", 4.2), then the sum is rounded once to bf16, by at most 2⁻⁸ of itself.
    Raises WrongNumbers beyond it."""
    worst = 0.0
    for name, linear in _one_of_each_shape(module).items():
        weight, bias = linear.weight, linear.bias
        outputs = torch.linspace(0, len(weight) - 1, min(OUTPUTS, len(weight))).long()
        x = torch.randn(CHECKED_ROWS[-2], weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        got = products.linear(x, weight, bias)[:, outputs].double()
        w, b = weight[outputs].double(), 0.0 if bias is None else bias[outputs].double()
        sums, sizes = x.double() @ w.T + b, x.double().abs() @ w.abs().T + (b if bias is None else b.abs())
        bound = (weight.shape[1] + 1) * 2.0**-24 * sizes
        if weight.dtype == torch.bfloat16:
            bound += 2.0**-8 * (sums.abs() + bound)
        far = float(((got - sums).abs() / (bound + 1e-30)).nan_to_num(torch.inf).max())
        if far > 1:
            raise WrongNumbers(f"the product {name} is {far:.1f} × as far from the exact sum as rounding allows")
        worst = max(worst, far)
    return worst


@torch.no_grad()
def products_like_torch(module: nn.Module, products: Products) -> bool:
    """Torch has the bits of our products at every number of rows of CHECKED_ROWS, looking closely at one of each shape."""
    for linear in _one_of_each_shape(module).values():
        x, weight = sensitive(max(CHECKED_ROWS), linear.weight)
        if not all(
            torch.equal(products.linear(x[:rows], weight, None), nn.functional.linear(x[: max(2, rows)], weight)[:rows])
            for rows in CHECKED_ROWS
        ):
            return False
    return True


def _one_of_each_shape(module: nn.Module) -> dict[str, nn.Linear]:
    """The first Linear of each shape, by name."""
    found: dict[tuple[Any, ...], tuple[str, nn.Linear]] = {}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            found.setdefault((*each.weight.shape, each.bias is None), (name, each))
    return dict(found.values())


def _logits(forward: Forward, module: Any) -> list[torch.Tensor]:
    """For each of CHECKED_ROWS [rows, vocabulary] of tokens at positions from the first to the last one of the context: all of
    them where there are most rows, and elsewhere those of `_among`."""
    most = max(CHECKED_ROWS)
    vocabulary = module.get_input_embeddings().num_embeddings
    last = module.config.get_text_config().max_position_embeddings - 1
    ids = torch.randint(vocabulary, (most,), generator=torch.Generator().manual_seed(0)).numpy()
    starts, logits = np.arange(most) * last // (most - 1), []
    for rows in CHECKED_ROWS:
        at = _among(most, rows)
        plan = plan_by_hand(ids[at, None], starts[at], np.zeros((rows, 1)))
        batch = Batch.build(plan, last + 1, HostMemory(), module.dtype)
        with torch.inference_mode():
            logits.append(forward(batch, None, EchoAttention()))
    return logits


def _among(most: int, rows: int) -> np.ndarray:
    """[rows] of `most` tokens, from the last one on, as far from each other as they can be."""
    return np.sort(np.linspace(most - 1, 0, rows).astype(np.int64))


def in_a_crowd(logits: list[torch.Tensor]) -> int:
    """Return the first number of rows, of CHECKED_ROWS, at which tokens have other bits than among the most; 0: at none."""
    crowd = logits[-1]
    pairs = zip(CHECKED_ROWS, logits, strict=True)
    return next((rows for rows, few in pairs if not torch.equal(few, crowd[_among(len(crowd), rows)])), 0)


def _differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    """Rows of the first pair that differs in a bit, or 0."""
    pairs = zip(CHECKED_ROWS, some, others, strict=True)
    return next((rows for rows, one, other in pairs if not torch.equal(one, other)), 0)


def _furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Largest |Δ log-prob|."""
    pairs = ((a.float().log_softmax(-1), b.float().log_softmax(-1)) for a, b in zip(some, others, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)
