"""Layout of a trainer's batch for the attention kernel: one padded sequence per row, packed sequences, or a tree of them.

The kernel reads keys and values through block tables, as in the service. Every sequence, from the root to a leaf of the tree,
becomes one row of a table. Sequences share blocks:

    the batch     p p p p p p a a b b b         prompt p, completions a and b that do not see each other
    blocks of 4   │p p p p│p p a a│             sequence p…a
                  │   ″   │p p b b│b│           sequence p…b shares the first block of p…a; the p p before b are copied
"""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class BatchLayout:
    """Index arrays of one batch [B, L] for the attention kernel, without padding; the same for all layers."""

    def __init__(self, paths: list[np.ndarray], shape: tuple[int, int], block_size: int, seen: torch.Tensor | None) -> None:
        """paths: for each sequence, the indices of its tokens in the flattened batch, in order. seen: [B, L, L] bool if
        sequences share tokens, else None."""
        self.block_size, self.shape = block_size, shape
        self.paths, self._seen = paths, seen
        tokens, slots, tables, starts = [], [], [], [0]
        block_that_ends_with: dict[int, int] = {}
        blocks = 0
        for path in paths:
            ends = path[block_size - 1 :: block_size].tolist()
            table = [block_that_ends_with[end] for end in ends if end in block_that_ends_with]
            begin = len(table) * block_size
            table += range(blocks, blocks - len(table) - (-len(path) // block_size))
            blocks = max(blocks, table[-1] + 1)
            block_that_ends_with.update(zip(ends, table, strict=False))
            at = np.arange(begin, len(path))
            tokens.append(path[begin:])
            slots.append(np.array(table)[at // block_size] * block_size + at % block_size)
            tables.append(table)
            starts.append(starts[-1] + len(at))
        self.blocks = blocks
        self.context = np.array([len(path) for path in paths], np.int32)
        """[R] length of each sequence"""
        self.starts = np.array(starts, np.int32)
        """[R + 1] row r computes tokens starts[r] to starts[r + 1] - 1"""
        self.table = np.zeros((len(paths), max(map(len, tables))), np.int32)
        """[R, M] blocks of each sequence"""
        for row, table in zip(self.table, tables, strict=True):
            row[: len(table)] = table
        self.slots = np.concatenate(slots)
        """[T] int64: block · block_size + offset"""
        self.tokens = torch.from_numpy(np.concatenate(tokens))
        """[T] int64: indices in the flattened batch; a duplicate gets the same output twice"""
        self._there: dict[torch.device, DeviceLayout] = {}

    @property
    def shares_tokens(self) -> bool:
        """Return whether sequences share tokens."""
        return self._seen is not None

    @cached_property
    def batch(self) -> Any:
        """Return the fields of `rollout.engine.forward.batch.Batch` that an attention backend reads."""
        return SimpleNamespace(
            num_tokens=len(self.tokens),
            slots=torch.from_numpy(self.slots),
            query_starts=self.starts,
            context_lens=self.context,
            block_table=self.table,
            shared=np.zeros((0, 3), np.int32),
            attention={},
        )

    def __getitem__(self, index: tuple[slice, ...]) -> BatchLayout:
        """Return itself for all tokens: models whose last layers share KV cut their mask to `logits_to_keep` tokens. Raises
        ValueError for fewer."""
        if all(each in (slice(None), slice(0, None)) for each in index):
            return self
        raise ValueError(
            "the service's attention needs all tokens in layers that share KV: pass logits_to_keep as a tensor of indices"
        )

    def on(self, device: torch.device) -> DeviceLayout:
        """Return the tensors for forward and backward on a device. They are copied once."""
        if device not in self._there:
            self._there[device] = DeviceLayout(self, device)
        return self._there[device]

    @cached_property
    def depth(self) -> torch.Tensor:
        """Return [B, L] int64: the position of each token in its sequence; 0 for padding."""
        depth = np.zeros(self.shape[0] * self.shape[1], np.int64)
        for path in self.paths:
            depth[path] = np.arange(len(path))
        return torch.from_numpy(depth).view(self.shape)

    @cached_property
    def seen(self) -> torch.Tensor:
        """Return [B, L, L] bool: [b, i, j] token i attends to token j. Padding attends to itself, to avoid NaN in its
        softmax."""
        seen = self._seen
        if seen is None:
            owner = np.full(self.shape[0] * self.shape[1], -1, np.int64)
            for number, path in enumerate(self.paths):
                owner[path] = number
            of = torch.from_numpy(owner).view(self.shape)
            seen = ((of[:, :, None] == of[:, None, :]) & (of >= 0)[:, None, :]).tril()
        return seen | torch.eye(self.shape[1], dtype=torch.bool)


class DeviceLayout:
    """Tensors of `BatchLayout` on a device."""

    def __init__(self, rows: BatchLayout, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.tokens = rows.tokens.to(device)
        self.depth = rows.depth.to(device)

    @cached_property
    def seen(self) -> torch.Tensor:
        return self._rows.seen.to(self._device)


def rows_of(
    shape: tuple[int, int], mask: torch.Tensor | None, position_ids: torch.Tensor | None, block_size: int
) -> BatchLayout:
    """Compute the layout of a batch [B, L].

    mask: None; [B, L], 0 for padding; or [B or 1, 1, L, L], bool or additive, in which a token attends to itself and to the
    tokens that its predecessor attends to. position_ids: [B or 1, L] or None; a new sequence begins where they do not increase
    by one. Raises ValueError for other masks, and for positions that do not count from 0 in each sequence."""
    position_ids = None if position_ids is None else position_ids.cpu()
    if mask is not None and mask.ndim == 4:
        rows = _tree(shape, mask.cpu(), block_size)
    else:
        real = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool().cpu()
        if tuple(real.shape) != shape:
            raise ValueError(f"attention_mask {tuple(real.shape)} for a batch {shape}: need the same shape, or [B, 1, L, L]")
        rows = BatchLayout(_chains(real.numpy(), position_ids), shape, block_size, None)
    if position_ids is not None:
        given = position_ids.expand(shape).flatten()[rows.tokens]
        if not torch.equal(given, rows.depth.flatten()[rows.tokens]):
            raise ValueError("position_ids do not count each sequence from 0: leave them out, and the model counts them")
    return rows


def _chains(real: np.ndarray, position_ids: torch.Tensor | None) -> list[np.ndarray]:
    at = np.flatnonzero(real)
    if not len(at):
        raise ValueError("the batch has only padding: attention_mask must be 1 for at least one token")
    first = np.diff(at // real.shape[1], prepend=-1) != 0
    if position_ids is not None:
        position = position_ids.expand(real.shape).numpy().ravel()[at]
        first |= np.diff(position, prepend=position[0]) != 1
    return np.split(at, np.flatnonzero(first)[1:])


def _tree(shape: tuple[int, int], mask: torch.Tensor, block_size: int) -> BatchLayout:
    seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).expand(shape[0], -1, -1, -1)
    if tuple(seen.shape) != (shape[0], 1, shape[1], shape[1]):
        raise ValueError(f"attention_mask {tuple(mask.shape)} for a batch {shape}: need [B, 1, L, L], the same for all heads")
    paths = []
    for row, sees in enumerate(seen[:, 0].numpy()):
        real = sees.any(1)
        for leaf in np.flatnonzero(real & (sees[real].sum(0) == 1)):
            path = np.flatnonzero(sees[leaf])
            inside = sees[np.ix_(path, path)]
            if not np.array_equal(inside, np.tri(len(path), dtype=bool)) or sees[path].sum() != inside.sum():
                raise ValueError("attention_mask: each token must attend to itself and to what the token before it attends to")
            paths.append(path + row * shape[1])
    if not paths or len(np.unique(np.concatenate(paths))) != int(seen.any(-1).sum()):
        raise ValueError("attention_mask: some tokens belong to no sequence")
    return BatchLayout(paths, shape, block_size, seen[:, 0])
