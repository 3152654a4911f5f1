"""Selects the CPU execution path of a model at load time, by comparing outputs.

    our products       must be as close to the exact sum as rounding allows, in any order of summation
    the exact module   the transformers module with our products, as in a trainer with `rollout.exact.use_exact`
    a decoder          runs all layers in one call; used if it has the exact module's bits, at several numbers of rows
    batch invariance   the same tokens in forwards of few and of many rows must have the same bits

If no decoder supports the model, the exact module runs, so that samples do not depend on the batch on any CPU; its element-wise
functions run in whole vectors (`rollout.engine.cpu.functions`). If they do depend on it, the name of the arithmetic ends in
`/batch`. `torch_bits` reports whether plain torch has the same bits; nothing depends on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.engine.cpu.decoder import CHECKED_ROWS, EchoAttention, NativeDecoder
from rollout.engine.cpu.exact_modules import NotServed, plain_products, unreached, use_products
from rollout.engine.cpu.functions import Callers, callers, use_whole_vectors
from rollout.engine.cpu.int8 import Int8Linear, int8_kernels
from rollout.engine.cpu.int8_modules import codes_in
from rollout.engine.cpu.layer_steps import NotNative
from rollout.engine.cpu.products import NativeProducts, Products, products_of, sensitive
from rollout.engine.forward.arithmetic import torch_arithmetic
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.interface import ExecutionPath, NativeLayers
from rollout.engine.forward.summed import Summed, summed_of
from rollout.engine.memory import HostMemory
from rollout.engine.scheduling.plan import plan_by_hand
from rollout.engine.values.arithmetic import BATCH

log = logging.getLogger(__name__)

TOKENS = 5
"""of a row, in a comparison where a recurrent state goes on from token to token"""
OUTPUTS = 256
"""outputs of each product that are compared with the exact sum"""
"""suffix of an arithmetic whose results depend on the batch"""
Forward = Callable[[Any, Any, Any], torch.Tensor]


def decide(
    module: nn.Module, name: str, asked: dict[int, dict[str, Any]], module_forward: Forward, isa: str, whole: bool
) -> ExecutionPath:
    """Install the products of `isa` in `module` (torch's if those are wrong), and choose a decoder.

    Args:
        asked: attention arguments of each layer.
        module_forward: the module's own forward, with the signature of a decoder's.
        whole: all layers are in memory at once, as decoders need.
    """
    plain_products(module)
    with callers(module) as called:
        plain = _logits(module_forward, module)
    products, decoder, room, why = _products(module, name, asked, isa, whole)
    try:
        install(module, products, called)
        exact, arithmetic = _logits(module_forward, module), products.arithmetic
    except NotServed as error:  # of a matrix, or in the forward
        plain_products(module)
        use_whole_vectors(called.found.values())
        log.warning("torch's own products are used, so samples may depend on the batch model=%s reason=%r", name, str(error))
        decoder, arithmetic, why = None, f"{torch_arithmetic()}{BATCH}", str(error)
        exact = _logits(module_forward, module)
    in_eight_bits = bool(codes_in(module))
    torch_bits = (
        not in_eight_bits
        and not _differ(exact, plain)
        and (arithmetic.endswith(BATCH) or products_like_torch(module, products))
    )
    if decoder is not None and (failed := why_not(decoder, module, exact, module_forward)):
        decoder, why = None, failed
        log.warning("transformers runs the layers, which is slower model=%s reason=%r", name, why)
    if (crowded := in_a_crowd(exact)) and not arithmetic.endswith(BATCH):
        arithmetic, why = arithmetic + BATCH, f"with {crowded} rows a token has other bits than with {max(CHECKED_ROWS)} rows"
        log.warning("samples depend on the batch model=%s reason=%r", name, why)
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


def install(module: nn.Module, products: Products, called: Callers) -> None:
    """Let a module multiply with our products, and compute its element-wise functions in whole vectors. called: what its
    forward reaches. Raises NotServed."""
    use_whole_vectors(called.found.values())
    use_products(module, products.isa, {*unreached(module, called)})


def _products(
    module: nn.Module, name: str, asked: dict[int, dict[str, Any]], isa: str, whole: bool
) -> tuple[Products, NativeLayers | None, float, str]:
    """Choose products, and a decoder if one supports them. Also returns the products' distance from the exact sum, and why
    nothing better is used."""
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
            "there are no kernels for a decoder"
            if whole
            else "a decoder runs all layers in one call; weight_offload streams them"
        )
    except NotNative as error:
        why = str(error)
    except (AttributeError, TypeError) as error:  # the module has another structure than decoders expect
        why = f"unsupported kind of model ({error})"
    return products, None, room, why


def why_not(decoder: NativeLayers, module: nn.Module, exact: list[torch.Tensor], module_forward: Forward) -> str:
    """Return why the decoder cannot replace the module with our products, whose logits are `exact`; "" if it can. Unsupported
    rotary embeddings show only in a forward."""
    differ = f"the results of the {type(decoder).__name__} differ from the module's with"
    try:
        if rows := _differ(_logits(decoder.forward, module), exact):
            return f"{differ} {rows} rows"
        longer = (_logits_of_rows(forward, module) for forward in (decoder.forward, module_forward))
        return "" if torch.equal(*longer) else f"{differ} rows of {TOKENS} tokens"
    except NotNative as error:
        return str(error)


class WrongNumbers(Exception):
    """A product is further from the exact sum than any order of summation allows."""


@torch.no_grad()
def check_products(module: nn.Module, products: Products) -> float:
    """Compare one product of each shape with the sum in float64. Returns the largest distance, as a fraction of the bound.

    The bound: K products are summed in fp32 in any order, with an error of at most K · 2⁻²⁴ · Σ|x·w| (Higham, "Accuracy and
    Stability of Numerical Algorithms", 4.2), and the sum is rounded once to bf16, by at most 2⁻⁸ of itself. Raises WrongNumbers
    beyond it. In eight bits the sum is that of the numbers that the codes stand for, and their scales are rounded, too."""
    worst = 0.0
    for name, linear in _one_of_each_shape(module).items():
        weight, bias = linear.weight, linear.bias
        outputs = torch.linspace(0, len(weight) - 1, min(OUTPUTS, len(weight))).long()
        x = torch.randn(CHECKED_ROWS[-2], weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        w, b = weight[outputs], 0.0 if bias is None else bias[outputs].double()
        summed = summed_of(linear)
        if isinstance(linear, Int8Linear):
            kernels = int8_kernels(linear.isa)
            got, x, w = linear(x), kernels.rounded(x.float(), False), kernels.rounded(w.float(), True)
        elif summed is not None and products.sums is not None:
            got = products.sums.linear(x, weight, bias, Summed(summed.slices, None))
        else:
            got = products.linear(x, weight, bias)
        got, x, w = got[:, outputs].double(), x.double(), w.double()
        sums, sizes = x @ w.T + b, x.abs() @ w.abs().T + abs(b)
        bound = (weight.shape[1] + (4 if isinstance(linear, Int8Linear) else 1)) * 2.0**-24 * sizes
        if weight.dtype == torch.bfloat16:
            bound += 2.0**-8 * (sums.abs() + bound)
        far = float(((got - sums).abs() / (bound + 1e-30)).nan_to_num(torch.inf).max())
        if far > 1:
            raise WrongNumbers(f"the product {name} is {far:.1f} × as far from the exact sum as rounding allows")
        worst = max(worst, far)
    return worst


@torch.no_grad()
def products_like_torch(module: nn.Module, products: Products) -> bool:
    """Return whether torch gives the bits of our products at every number of rows of CHECKED_ROWS, tested on one sensitive
    product of each shape."""
    for linear in _one_of_each_shape(module).values():
        x, weight = sensitive(max(CHECKED_ROWS), linear.weight)
        if not all(
            torch.equal(products.linear(x[:rows], weight, None), nn.functional.linear(x[: max(2, rows)], weight)[:rows])
            for rows in CHECKED_ROWS
        ):
            return False
    return True


def _one_of_each_shape(module: nn.Module) -> dict[str, nn.Linear]:
    """Return the first Linear of each shape, by name."""
    found: dict[tuple[Any, ...], tuple[str, nn.Linear]] = {}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            found.setdefault((*each.weight.shape, each.bias is None, summed_of(each) is None), (name, each))
    return dict(found.values())


def _logits(forward: Forward, module: Any) -> list[torch.Tensor]:
    """Return [rows, vocabulary] logits for each of CHECKED_ROWS, of tokens at positions from the first to the last of the
    context: all of them for the most rows, otherwise those of `_among`."""
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


def _logits_of_rows(forward: Forward, module: Any) -> torch.Tensor:
    """Return [7, vocabulary] logits behind rows of TOKENS tokens."""
    rows = 7
    config = module.config.get_text_config()
    vocabulary = module.get_input_embeddings().num_embeddings
    tokens = min(TOKENS, config.max_position_embeddings)
    ids = np.random.default_rng(2).integers(0, vocabulary, (rows, tokens))
    plan = plan_by_hand(ids, np.zeros(rows), np.zeros((rows, 1)))
    batch = Batch.build(plan, config.max_position_embeddings, HostMemory(), module.dtype)
    with torch.inference_mode():
        return forward(batch, None, EchoAttention())


def _among(most: int, rows: int) -> np.ndarray:
    """Return [rows] indices of `most` tokens, evenly spaced, ending with the last one."""
    return np.sort(np.linspace(most - 1, 0, rows).astype(np.int64))


def in_a_crowd(logits: list[torch.Tensor]) -> int:
    """Return the first number of rows of CHECKED_ROWS at which tokens have other bits than in the largest batch; 0: none."""
    crowd = logits[-1]
    pairs = zip(CHECKED_ROWS, logits, strict=True)
    return next((rows for rows, few in pairs if not torch.equal(few, crowd[_among(len(crowd), rows)])), 0)


def _differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    """Return the number of rows of the first pair with different bits, or 0."""
    pairs = zip(CHECKED_ROWS, some, others, strict=True)
    return next((rows for rows, one, other in pairs if not torch.equal(one, other)), 0)


def _furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest |Δ log-prob|."""
    pairs = ((a.float().log_softmax(-1), b.float().log_softmax(-1)) for a, b in zip(some, others, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)
