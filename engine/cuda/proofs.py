"""Proves at load that a row of a product does not depend on the number of rows, for the shapes of a model.

A library chooses its kernel by the shape of a product, not by its numbers. So a product is tried with every number of rows with
which it will be called, and its rows are compared to the bit with those of the largest one. The same numbers are made on every
device, so a digest of the results says whether two machines compute the same sums.

In 16 bits a result seldom shows the last bits of its sum. So the sums of every other output cancel: such a result consists of
rounding errors, which nearly every other order changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""product of x [rows, inputs] and a weight [outs, inputs], and a bias [outs]"""
STACKED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""layers that fused layers multiply as one, and a trainer's module one by one"""
SAMPLES = 32
"""rows that are tried alone, and that the digest is of"""
CHUNK = 512
"""rows of a matrix that are made at a time"""


class Unproven(Exception):
    """A row of this product may depend on the number of rows; the message says what was found."""


class WeightShape(NamedTuple):
    outs: tuple[int, ...]
    """of the layers that are multiplied as one"""
    inputs: int


def shapes_of(module: nn.Module) -> list[WeightShape]:
    """Return the shapes of a model's linear layers, each once; without those of adapters, which a service does not have."""
    found: dict[WeightShape, None] = {}
    for path, parent in module.named_modules():
        if hasattr(parent, "base_layer") or any(part.startswith("lora_") for part in path.split(".")):
            continue
        whole = {name: getattr(each, "base_layer", each) for name, each in parent.named_children()}
        left = {name: each for name, each in whole.items() if isinstance(each, nn.Linear) and not name.startswith("lora_")}
        for names in STACKED:
            if all(name in left for name in names):
                linears: list[Any] = [left.pop(name) for name in names]
                found[WeightShape(tuple(each.out_features for each in linears), linears[0].in_features)] = None
        for each in left.values():
            found[WeightShape((each.out_features,), each.in_features)] = None
    return list(found)


@torch.no_grad()
def prove_row_invariant(
    product: Linear,
    shapes: Sequence[WeightShape],
    rows: Sequence[int],
    like: torch.Tensor,
    against: Linear | None = None,
) -> str:
    """Return a digest of the results of a product whose rows are the same, to the bit, with each number of rows in `rows`, at
    any place, alone, and for layers that are multiplied as one or one by one.

    Args:
        like: a tensor of the dtype, on the device.
        against: a product whose rows they must equal; None: its own of the most rows.

    Raises:
        Unproven: they are not, or a result is wrong.
    """
    digest = hashlib.blake2b(digest_size=4)
    most = max(rows)
    for shape in shapes:
        ends = [sum(shape.outs[:i]) for i in range(len(shape.outs) + 1)]
        parts = dict.fromkeys([(0, ends[-1]), *zip(ends, ends[1:], strict=False)])
        x, weight = factors(most, ends[-1], shape.inputs, like)
        want = (against or product)(x, weight, None)
        samples = torch.arange(0, most, -(-most // SAMPLES), device=like.device)
        _check_right(want[samples, :64], x[samples], weight[:64], shape)
        pieces = [(37 * count % (most - count + 1), count) for count in rows] + [(at, 1) for at in samples.tolist()]
        for at, count in pieces:
            for first, end in parts:
                made = product(x[at : at + count].clone(), weight[first:end], None)
                if not torch.equal(made, want[at : at + count, first:end]):
                    raise Unproven(f"products of {count} rows, {shape.inputs} inputs and {end - first} outputs have other bits")
        digest.update(want[samples].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def factors(rows: int, outs: int, inputs: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make x [rows, inputs] and a weight [outs, inputs], of which every other output is 0 but for the rounding of its sum."""
    x, weight = numbers(rows, inputs, 1, like), numbers(outs, inputs, 2, like)
    half = inputs // 2
    x[:, half : 2 * half] = x[:, :half]
    x[:, 2 * half :] = 0
    weight[::2, half : 2 * half] = -weight[::2, :half]
    return x, weight


def _check_right(made: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, shape: WeightShape) -> None:
    """Raise Unproven if a product is not right up to rounding: one of zeros does not depend on rows either."""
    want = x.double() @ weight.double().T
    if not torch.allclose(made.double(), want, rtol=4 * torch.finfo(made.dtype).eps, atol=1e-3 * shape.inputs**0.5):
        raise Unproven(f"products of {shape.inputs} inputs and {sum(shape.outs)} outputs are wrong")


def numbers(rows: int, columns: int, seed: int, like: torch.Tensor) -> torch.Tensor:
    """Make [rows, columns] of numbers between -1 and 1 that are the same on every device: integers mixed by products and
    shifts."""
    made = like.new_empty(rows, columns)
    column = torch.arange(columns, device=like.device) * 40503 + seed
    for at in range(0, rows, CHUNK):
        row = torch.arange(at, min(at + CHUNK, rows), device=like.device)[:, None] * 2654435761
        mixed = ((row ^ column) * 2246822519) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 3266489917) & 0xFFFFFFFF
        made[at : at + CHUNK] = ((mixed >> 8).float() / (1 << 23) - 1).to(made.dtype)
    return made
