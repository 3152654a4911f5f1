"""The service's arithmetic for trainers on CUDA: attention over whole sequences, products, norms and log-probs.

A service with `exact = true` computes with `rollout.engine.cuda.exact`, `rollout.engine.cuda.attention` and
`rollout.engine.cuda.sampling`. This module installs the same in a trainer's model, so that the log-probs are equal. The
backward is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollout.engine.cuda import exact
from rollout.engine.cuda.attention import arithmetic_on
from rollout.engine.cuda.device import draw_kernel
from rollout.engine.cuda.exact import make_exact, make_plain
from rollout.engine.cuda.fused import NotFused
from rollout.engine.cuda.library_products import LIBRARY, ExactProducts, choose_products, library_products, triton_products
from rollout.engine.cuda.proofs import Linear, Unproven
from rollout.engine.cuda.recurrence import TritonMixers
from rollout.engine.forward.recurrence import CONV, names_in_forward
from rollout.exact.attention import use_exact_attention
from rollout.exact.fused import use_fused_layers
from rollout.exact.recurrence import compute_by


def arithmetic_of(model: torch.nn.Module, device: torch.device, fused: bool = False, products: str = exact.ARITHMETIC) -> str:
    """Return the arithmetic of a service of a model on such a device with `exact = true`, with fused layers or without, and
    with products of this name. Raises TritonUnavailable (a ValueError)."""
    recurrent = any(CONV in names_in_forward(each) for each in model.modules())
    products += exact.FUSED_LAYERS if fused else ""
    parts = [products, *([TritonMixers.arithmetic] if recurrent else []), arithmetic_on(device)]
    return "+".join(parts)


def is_fused(arithmetic: str) -> bool:
    """Return whether a service with this arithmetic computes exact products between fused layers."""
    return arithmetic.startswith("exact") and arithmetic.split("+")[0].endswith(exact.FUSED_LAYERS)


def products_of(model: torch.nn.Module, arithmetic: str | None) -> ExactProducts:
    """Return the products of a service with this arithmetic, as this machine has them; None: those of a service here. Raises
    ValueError if the service multiplies by cuBLASLt, and its rows depend on their number here."""
    if arithmetic is None:
        return choose_products(model, library=True)
    if not arithmetic.startswith("exact"):  # it is refused
        return ExactProducts(exact.product, exact.ARITHMETIC)
    if not arithmetic.startswith(LIBRARY):
        return triton_products(model)
    try:
        return library_products(model)
    except Unproven as error:
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, and here {error}: start the service with "
            "advanced.library_products = false"
        ) from error


def use_products(module: torch.nn.Module, multiply: Linear | None = None) -> Callable[[], None]:
    """Install the products, norms and recurrent mixers of a service with `exact = true` in a module on CUDA. multiply: as for
    `make_exact`. Returns a function that restores it. Raises NotExact (a ValueError) and changes nothing then."""
    make_exact(module, multiply)
    recurrence = use_exact_recurrence_on_device(module)

    def undo() -> None:
        recurrence()
        make_plain(module)

    return undo


def use_exact_recurrence_on_device(model: nn.Module) -> Callable[[], None]:
    """Do what `use_exact_recurrence` does with the kernels of a service on CUDA."""
    mixers = [each for each in model.modules() if CONV in names_in_forward(each)]
    return compute_by(TritonMixers(), mixers) if mixers else lambda: None


def use_exact_on_device(model: Any, arithmetic: str | None, block_size: int) -> tuple[str, Callable[[], None]]:
    """Do what `use_exact` does for a model on CUDA. Returns the name of the products, and a function that restores the model.
    Raises as `use_exact`."""
    fused = arithmetic is None or is_fused(arithmetic)
    products = products_of(model, arithmetic)
    wanted = arithmetic_of(model, model.device, fused, products.name)
    if arithmetic not in (None, wanted):
        raise ValueError(
            f"the service computes with arithmetic {arithmetic!r}, this trainer with {wanted}: start the service with device = "
            "cuda and exact = true, on GPUs of the trainer's compute capability and with its versions of Triton and cuBLASLt"
        )
    undo: list[Callable[[], None]] = []

    def remove() -> None:
        for each in reversed(undo):
            each()

    try:
        undo.append(use_exact_attention(model, block_size))
        undo.append(use_products(model, products.multiply))
        if fused:
            undo.append(use_fused_layers(model, block_size))
    except NotFused as error:
        if arithmetic is not None:
            remove()
            raise ValueError(
                f"the service computes with arithmetic {arithmetic!r}, and this model's layers cannot be fused: {error}"
            ) from error
        wanted = arithmetic_of(model, model.device, False, products.name)  # a service does not fuse them either
    except BaseException:
        remove()
        raise
    return wanted, remove


def has_kernels() -> bool:
    """Whether Triton is available."""
    return draw_kernel() is not None


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probs of tokens [...] under logits [..., V] in float32, by the service's sampling kernel, with the
    gradient of log-softmax."""
    scored: Any = _Scored.apply
    made: torch.Tensor = scored(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), temperature)
    return made.view(tokens.shape)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        from rollout.engine.cuda.sampling import given_logprobs

        ctx.save_for_backward(logits, tokens)
        ctx.scale = temperature or 1.0
        return given_logprobs(logits, tokens, temperature)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        share = torch.softmax(logits.float() / ctx.scale, -1)
        of_logits = share.mul_(-grad[:, None])
        of_logits.scatter_add_(1, tokens.long()[:, None], grad[:, None].float())
        return of_logits.div_(ctx.scale).to(logits.dtype), None, None
