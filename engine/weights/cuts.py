"""Which part of each tensor of a model a rank has, where several devices run one replica.

    q, k, v, gate, up, and their biases   rows: whole heads, or numbers of the MLP
    o, down                               columns: the same ones; their biases are whole
    embedding, head                       rows: tokens of the vocabulary
    norms                                 whole

`cuts_of` finds the cuts in the tree of modules. Names, shapes and digests of manifests are those of whole tensors; a `Part`
maps elements of a whole tensor, in C order, to those of one rank's part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

RANKS = (1, 2, 4, 8)
"""numbers of ranks whose sums have the same bits"""
SLICES = 8
"""of the inputs of o and down: see `rollout.engine.cpu.sums`"""
ROWS, COLUMNS = 0, 1
NORMS = frozenset(
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)  # fmt: skip
SERVED = "dense models of Llama's kind (llama, mistral, qwen2, qwen3): serve this one whole (tp = 1), several with --replicas"


class NotCut(ValueError):
    """A model cannot be divided among ranks; the message names the model and the reason."""


class Cut(NamedTuple):
    """How a tensor is divided."""

    dim: int | None
    """ROWS or COLUMNS; None: each rank has the whole tensor"""
    units: int = 1
    """parts of this dimension that stay whole, such as heads. Fewer than ranks: several ranks have the same one"""

    def span(self, size: int, rank: int, ranks: int) -> tuple[int, int]:
        """Return the first index of a rank's part of a dimension of `size`, and the one behind it."""
        units = max(self.units, ranks)
        first, last = units * rank // ranks, units * (rank + 1) // ranks
        if self.units < ranks:
            first = self.units * rank // ranks
            last = first + 1
        return first * (size // self.units), last * (size // self.units)


WHOLE = Cut(None)


class Part(NamedTuple):
    """One rank's part of a tensor."""

    shape: tuple[int, ...]
    """of the whole tensor"""
    cut: Cut
    rank: int
    ranks: int

    @property
    def here(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        if self.cut.dim is None:
            return self.shape
        first, last = self._span
        return (*self.shape[: self.cut.dim], last - first, *self.shape[self.cut.dim + 1 :])

    @property
    def _span(self) -> tuple[int, int]:
        assert self.cut.dim is not None
        return self.cut.span(self.shape[self.cut.dim], self.rank, self.ranks)

    def touches(self, start: int, count: int) -> bool:
        """Return whether the part may have some of `count` elements of the whole tensor from number `start` on."""
        if self.cut.dim != ROWS:
            return True
        columns, (first, last) = math.prod(self.shape[1:]), self._span
        return start < last * columns and start + count > first * columns

    def where(self) -> tuple[slice, ...]:
        """Return the index of the part in the whole tensor."""
        return () if self.cut.dim is None else (slice(None),) * self.cut.dim + (slice(*self._span),)

    def overlap(self, piece: torch.Tensor, start: int, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of views of equal shape: of `piece`, the elements of the whole tensor from number `start` on, and of
        `part`, the rank's part: the elements that both have."""
        columns = math.prod(self.shape[1:])
        local = part.view(self.here[0], -1) if len(self.here) else part.view(1, 1)
        for row, rows, column, width in _blocks(start, len(piece), columns):
            at = row * columns + column - start
            block = piece[at : at + rows * width].view(rows, width)
            if self.cut.dim is None:
                yield block, local[row : row + rows, column : column + width]
                continue
            first, last = self._span
            begin, count = (row, rows) if self.cut.dim == ROWS else (column, width)
            low, high = max(begin, first), min(begin + count, last)
            if low >= high:
                continue
            here, there = slice(low - begin, high - begin), slice(low - first, high - first)
            if self.cut.dim == ROWS:
                yield block[here], local[there, column : column + width]
            else:
                yield block[:, here], local[row : row + rows, there]


def _blocks(start: int, count: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide elements of a matrix into blocks: the rest of a row, whole rows, the beginning of one. Yields row, rows, column,
    columns of each."""
    at, end = start, start + count
    while at < end:
        row, column = divmod(at, columns)
        rows = (end - at) // columns if not column else 0
        width = columns if rows else min(columns - column, end - at)
        yield row, max(1, rows), column, width
        at += max(1, rows) * width


class HeadCounts(NamedTuple):
    """What of a model must be divisible by the number of ranks."""

    heads: int
    kv_heads: int
    inner: int
    """numbers of the MLP"""
    width: int
    """numbers of all heads"""


def cuts_of(module: Any) -> dict[str, Cut]:
    """Return the cut of each parameter and persistent buffer of a whole model, by its name. Raises NotCut."""
    kind, head, body = module.config.model_type, module.get_output_embeddings(), module.base_model
    embedding = getattr(body, "embed_tokens", None)
    layers = getattr(body, "layers", None)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or not isinstance(layers, nn.ModuleList):
        raise NotCut(f"{kind} cannot be divided among ranks: tensor parallelism serves {SERVED}")
    vocabulary = Cut(ROWS, embedding.num_embeddings)
    of: dict[int, Cut] = {id(each): vocabulary for each in (embedding.weight, *head.parameters(recurse=False))}
    norm = getattr(body, "norm", None)
    of |= {id(each): WHOLE for each in (norm.parameters() if norm is not None else ())}
    for layer in layers:
        of |= _cuts_of_layer(layer)
    found = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *_buffers(module)):
        if id(tensor) not in of:
            raise NotCut(f"{kind} has {name}, which cannot be divided among ranks: tensor parallelism serves {SERVED}")
        found[name] = of[id(tensor)]
    return found


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in each._non_persistent_buffers_set:
                yield name, buffer


def _cuts_of_layer(layer: nn.Module) -> dict[int, Cut]:
    """Return the cuts of the parameters of a layer that are known, by their ids."""
    counts = counts_of(layer)
    if counts is None:
        return {}
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    units = {"q_proj": counts.heads, "k_proj": counts.kv_heads, "v_proj": counts.kv_heads}
    units |= {"gate_proj": counts.inner, "up_proj": counts.inner}
    of: dict[int, Cut] = {}
    for parent in (attention, mlp):
        for name, child in parent.named_children():
            linear = type(child) is nn.Linear
            if name in units and linear:
                of |= {id(each): Cut(ROWS, units[name]) for each in child.parameters(recurse=False)}
            elif name in ("o_proj", "down_proj") and linear:
                columns = Cut(COLUMNS, counts.heads if name == "o_proj" else counts.inner)
                of |= {id(each): columns if each.ndim == 2 else WHOLE for each in child.parameters(recurse=False)}
            elif name in ("q_norm", "k_norm"):  # of each head, or of all heads together, which is not known then
                of |= {id(each): WHOLE for each in child.parameters() if each.numel() == counts.width // counts.heads}
    for name in NORMS & {name for name, _ in layer.named_children()}:
        of |= {id(each): WHOLE for each in layer.get_submodule(name).parameters()}
    return of


def counts_of(layer: nn.Module) -> HeadCounts | None:
    """Return the heads and the MLP's numbers of a layer; None: it is none of Llama's kind."""
    try:
        q, k, o = (layer.get_submodule(f"self_attn.{name}_proj") for name in "qko")
        gate, down = layer.get_submodule("mlp.gate_proj"), layer.get_submodule("mlp.down_proj")
        dim: int = layer.get_submodule("self_attn").head_dim  # type: ignore[assignment]
    except AttributeError:
        return None
    if not all(type(each) is nn.Linear for each in (q, k, o, gate, down)) or not isinstance(dim, int):
        return None
    shapes = [each.weight.shape for each in (q, k, o, gate, down)]
    (q_rows, _), (k_rows, _), (_, width), (inner, _), (_, inputs) = shapes  # type: ignore[misc]
    if q_rows != width or inner != inputs or width % dim or k_rows % dim:
        return None
    return HeadCounts(width // dim, k_rows // dim, inner, width)


def check_ranks(module: Any, ranks: int) -> None:
    """Raise NotCut if a model of `cuts_of` cannot be divided among so many ranks, or its sums not into eight slices."""
    assert ranks in RANKS
    kind, layers = module.config.model_type, module.base_model.layers
    for number, counts in enumerate(map(counts_of, layers)):
        assert counts is not None, "cuts_of refuses"
        where = f"{kind}: layer {number} has"
        if counts.heads % ranks:
            raise NotCut(f"{where} {counts.heads} query heads, which {ranks} ranks cannot share evenly: lower tp")
        if counts.kv_heads % ranks and ranks % counts.kv_heads:
            raise NotCut(f"{where} {counts.kv_heads} KV heads, of which {ranks} ranks cannot have equally many: lower tp")
        for what, size in (("numbers in its heads", counts.width), ("numbers in its MLP", counts.inner)):
            if size % (2 * SLICES):
                raise NotCut(f"{where} {size} {what}, which are no multiple of {2 * SLICES}: its sums have no eight slices")


def summed_linears(module: Any) -> list[nn.Linear]:
    """Return the products of a whole model whose inputs are cut: o and down of each layer. Raises NotCut."""
    cuts_of(module)
    check_ranks(module, 1)
    return summed_linears_of(module)


def summed_linears_of(module: Any) -> list[nn.Linear]:
    """Return the same of a whole model, or of a rank's part of one, that is known to be of the kind of `cuts_of`."""
    return [layer.get_submodule(name) for layer in module.base_model.layers for name in ("self_attn.o_proj", "mlp.down_proj")]


def parts_of(cuts: Mapping[str, Cut], shapes: Mapping[str, Sequence[int]], rank: int, ranks: int) -> dict[str, Part]:
    """Return a rank's part of each tensor. shapes: of the whole tensors."""
    return {name: Part(tuple(shape), cuts[name], rank, ranks) for name, shape in shapes.items()}
