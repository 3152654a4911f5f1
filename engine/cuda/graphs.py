"""Decode under CUDA graphs: the forward of a step, captured once for each batch size and then replayed with one launch.

A graph remembers addresses, so what the forward reads lies where it lay at the capture:

    input ids, positions          here; each step copies its own in, and what is behind them up to the captured size is padding
    index arrays of attention     `TritonAttention`, which writes a step's arrays over the last one's; with prefixes in common
                                  there are large tiles, and graphs of their own that launch them
    KV pool, parameters           written in place, by moves and by refreshes

Only `sleep` gives memory back and takes other; the graphs are forgotten then. Padding has no tile and no slot: it computes
something, and nobody reads it. Graphs of padded batch sizes: vLLM.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch

from engine.forward.attention import Backend
from engine.forward.batch import Batch
from engine.kv.pages import PagedKV

log = logging.getLogger("rollout.engine")

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""runs a forward and returns what repeats it: the same work on the same addresses, and the same tensor"""


class Ring(Protocol):
    """What graphs need of weight offload (`engine.weights.offload.Ring`): the same slots at the beginning and end of each."""

    def join(self) -> None: ...
    def fill(self) -> None: ...


def sizes(largest: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, multiples of 8 up to 64, then of 32; at most a fifth or so of a step is padding."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, largest, 32)]
    return [*(size for size in steps if size < largest), largest]


class DecodeGraphs:
    """`forward`: of a batch, on addresses that stay. `largest`: most rows of a step. `new_capture`: called at the start
    and when all graphs are forgotten. `ring`: of weight offload, if it is on."""

    def __init__(
        self,
        forward: Callable[[Batch, PagedKV, Backend], torch.Tensor],
        largest: int,
        device: torch.device,
        new_capture: Callable[[], Capture],
        ring: Ring | None = None,
    ) -> None:
        self._forward = forward
        self._ring = ring
        self._new_capture = new_capture
        self._capture = new_capture()
        self._sizes = sizes(largest)
        self._ids = torch.zeros((1, largest), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, largest), dtype=torch.int64, device=device)
        self._at = torch.arange(largest, device=device)
        self._replays: dict[tuple[int, bool], Run] = {}
        """by batch size, and whether there are large tiles of attention"""
        self._logits: torch.Tensor | None = None
        """[largest, vocabulary]: where every graph leaves its logits; each would keep its own otherwise"""

    def covers(self, batch: Batch) -> bool:
        """Every row has one token and wants its logits. Nothing is covered once a capture has failed, as it does where the host
        must wait for the device in the middle of a forward (some mixtures of experts)."""
        fits = bool(self._sizes) and batch.input_ids.shape[1] <= self._sizes[-1]
        return fits and batch.num_tokens == len(batch.context_lens) == batch.num_logits

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """[S, vocabulary] logits, which the next call overwrites."""
        n = batch.num_tokens
        size = next(size for size in self._sizes if size >= batch.input_ids.shape[1])
        self._ids[:, :n].copy_(batch.input_ids[:, :n])
        self._positions[:, :n].copy_(batch.position_ids[:, :n])
        large = batch.attention.launched[1]
        if (size, large) not in self._replays:
            try:
                self._replays[size, large] = self._captured(size, batch, kv, backend)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a forward, larger steps run without graphs sequences=%d", size)
                self._sizes = [smaller for smaller in self._sizes if smaller < size]
                if not self._replays:
                    self._capture = self._new_capture()  # torch forgets a pool whose only graph has failed
                return self._forward(batch, kv, backend)
            except RuntimeError as error:
                log.warning("decode runs without CUDA graphs, the forward cannot be captured reason=%r", str(error))
                self._sizes = []
                return self._forward(batch, kv, backend)
        if self._ring is not None:
            self._ring.join()
        return self._replays[size, large]()[:n]

    def forget(self) -> None:
        """Addresses have changed: capture again as sizes come up."""
        self._replays.clear()
        self._logits = None
        self._capture = self._new_capture()

    def _captured(self, size: int, batch: Batch, kv: PagedKV, backend: Backend) -> Run:
        launched = True, batch.attention.launched[1], True  # what a step of this size may want, and padding's zeros
        static = replace(
            batch, input_ids=self._ids[:, :size], position_ids=self._positions[:, :size], num_tokens=size,
            logits_at=self._at[:size], num_logits=size, attention=batch.attention._replace(launched=launched),
        )  # fmt: skip
        started = time.perf_counter()

        def run() -> torch.Tensor:
            logits = self._forward(static, kv, backend)
            if self._logits is None:
                self._logits = logits.new_empty(self._at.shape + logits.shape[1:])
            self._logits[:size].copy_(logits)
            if self._ring is not None:
                self._ring.join()
            return self._logits[:size]

        try:
            replay = self._capture(run)
        except BaseException:
            if self._ring is not None:
                self._ring.fill()
            raise
        log.info("captured a forward sequences=%d seconds=%.2f", size, time.perf_counter() - started)
        return replay


def cuda_capture(aside: torch.cuda.Stream) -> Capture:
    """Captures into CUDA graphs, whose intermediate results share one pool of memory: they are replayed one after the other.
    `aside`: the stream to capture on, always the same one, since cuBLAS keeps memory for each that it has seen."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> Run:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # what an object does that ends in the middle of a capture might break it
        try:
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                run()  # what is compiled, allocated and chosen on first use is not captured; and it ends with `Ring.join`
                torch.cuda.synchronize()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    try:
                        graph.capture_end()
                    except RuntimeError:  # the capture is void: the allocator is not told, and would keep all memory for ever
                        with suppress(RuntimeError):
                            torch._C._cuda_endAllocateToPool(current.device_index, pool)
                    raise
                graph.capture_end()
            current.wait_stream(aside)
        finally:
            if collects:
                gc.enable()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture
