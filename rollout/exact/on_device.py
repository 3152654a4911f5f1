"""The service's arithmetic for trainers on CUDA: attention over whole sequences, products, norms and log-probs.

A service with `exact = true` computes with `rollout.engine.cuda.exact`, `rollout.engine.cuda.attention` and
`rollout.engine.cuda.sampling`. This module installs the same in a trainer's model, so that the log-probs are equal. The
backward is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout.engine.cuda import exact
from rollout.engine.cuda.attention import TritonAttention, arithmetic_on
from rollout.engine.cuda.device import draw_kernel
from rollout.engine.cuda.exact import make_exact, make_plain
from rollout.engine.cuda.library_products import LIBRARY, ExactProducts, choose_products, library_products, triton_products
from rollout.engine.cuda.proofs import Linear, Unproven
from rollout.engine.cuda.recurrence import TritonMixers
from rollout.engine.forward.attention import Scores, StepCapacity
from rollout.engine.forward.recurrence import CONV, names_in_forward
from rollout.exact.recurrence import use_exact_recurrence_on_device


def arithmetic_of(model: torch.nn.Module, device: torch.device, fused: bool = False, products: str = exact.ARITHMETIC) -> str:
    """Return the arithmetic of a service of a model on such a device with `exact = true`, with fused layers or without, and
    with products of this name. Raises TritonUnavailable (a ValueError)."""
    recurrent = any(CONV in names_in_forward(each) for each in model.modules())
    products += exact.FUSED_LAYERS if fused else ""
    parts = [products, *([TritonMixers.arithmetic] if recurrent else []), arithmetic_on(device)]
    return "+".join(parts)


Heads = tuple[int, int, int, int, int]
"""query heads, KV heads, widths of K and of V, bytes of a number"""


class DeviceAttention:
    """`rollout.engine.forward.attention.Backend` on a GPU for batches of any size. Its arrays grow to the largest batch so
    far. A batch is prepared once for all layers of one shape. programs: concurrent programs of the kernel; None = chosen for
    the device."""

    def __init__(self, device: torch.device, programs: int | None = None) -> None:
        self._device = device
        self._programs = programs
        self._kinds: dict[Heads, TritonAttention] = {}
        self._prepared: dict[Heads, tuple[Any, Any]] = {}
        """the batch that the arrays describe, and what `prepare` returned for it"""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Any,
        kv: Any,
        scores: Scores,
    ) -> torch.Tensor:
        wanted = StepCapacity(
            tokens=max(len(query), 16), rows=max(len(batch.block_table), 16), columns=batch.block_table.shape[1],
            q_heads=query.shape[1], kv_heads=key.shape[1], head_dim=key.shape[2], itemsize=query.element_size(),
            other_value_dim=None if value.shape[2] == key.shape[2] else value.shape[2],
        )  # fmt: skip
        kind = heads_of(wanted)
        inner = self._fitting(kind, wanted)
        if kind not in self._prepared or self._prepared[kind][0] is not batch:
            self._prepared[kind] = batch, inner.prepare(batch, kv)
        batch.attention = self._prepared[kind][1]
        return inner.attend(layer, query, key, value, batch, kv, scores)

    def _fitting(self, kind: Heads, wanted: StepCapacity) -> TritonAttention:
        inner = self._kinds.get(kind)
        if inner is None or not _fits(wanted, inner.capacity):
            self._kinds[kind] = inner = TritonAttention(self._device, wanted, self._programs)
            self._prepared.pop(kind, None)
        return inner


def heads_of(capacity: StepCapacity) -> Heads:
    """Return what the arrays of one `TritonAttention` are for."""
    return capacity.q_heads, capacity.kv_heads, capacity.head_dim, capacity.value_dim, capacity.itemsize


def _fits(wanted: StepCapacity, has: StepCapacity) -> bool:
    table = wanted.rows * wanted.columns <= has.rows * has.columns
    return wanted.tokens <= has.tokens and wanted.rows <= has.rows and table


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
