"""Steps under CUDA graphs: the forward of a step, captured once for each size and then replayed with one launch.

A step that decodes has one token and one row of logits a sequence; in all others, up to MOST_TOKENS of them, prefill is among
the tokens, and the rows of logits are counted for themselves. Larger ones take the device longer than the host takes to launch
them kernel by kernel.

A graph remembers addresses, so what the forward reads lies where it lay at the capture:

    input ids, positions,         here; each step copies its own in, and what is behind them up to the captured size is padding
    tokens that want logits
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
from typing import NamedTuple, Protocol

import torch

from engine.forward.attention import Backend
from engine.forward.batch import Batch
from engine.kv.pages import PagedKV

log = logging.getLogger("rollout.engine.cuda")

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""runs a forward and returns what repeats it: the same work on the same addresses, and the same tensor"""


class LayerRing(Protocol):
    """What graphs need of weight offload (`engine.weights.offload.Ring`): the same slots at the beginning and end of each."""

    def join(self) -> None: ...
    def fill(self) -> None: ...


MOST_TOKENS = 2048
"""of a step with prefill that is captured"""
LOGITS = 4
"""times as many rows of logits has the next larger graph of as many tokens"""


def sizes(largest: int) -> list[int]:
    """Batch sizes of decode to capture: 1, 2, 4, 8, multiples of 8 up to 64, of 32 up to 256, then four to each power of two;
    at most a fifth or so of a step is padding."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32)]
    steps += [start + start // 4 * i for start in (2**n for n in range(8, 20)) for i in range(4)]
    return [*(size for size in steps if size < largest), largest]


def mixed_sizes(largest: int) -> list[int]:
    """Tokens of a step with prefill: two sizes to each power of two from 16 on."""
    return sorted({min(largest, size) for n in range(4, 12) for size in (2**n, 3 * 2 ** (n - 1))} | {largest})


class GraphKey(NamedTuple):
    """What a graph was captured for."""

    tokens: int
    logits: int
    """rows of them; 0 = of every token, in order"""
    large: bool
    """there are large tiles of attention"""


class StepGraphs:
    """`forward`: of a batch, on addresses that stay. `rows`, `tokens`: most of a step. `new_capture`: called at the start
    and when all graphs are forgotten. `ring`: of weight offload, if it is on."""

    def __init__(
        self,
        forward: Callable[[Batch, PagedKV, Backend], torch.Tensor],
        rows: int,
        tokens: int,
        device: torch.device,
        new_capture: Callable[[], Capture],
        ring: LayerRing | None = None,
    ) -> None:
        self._forward = forward
        self._ring = ring
        self._new_capture = new_capture
        self._capture = new_capture()
        self.sizes = sizes(rows)
        """of decode"""
        self.mixed = mixed_sizes(min(tokens, MOST_TOKENS))
        """of other steps"""
        room = max(rows, self.mixed[-1])
        self._ids = torch.zeros((1, room), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, room), dtype=torch.int64, device=device)
        self._rows = rows
        self._every = torch.arange(rows, device=device)
        self._places = {size: place for place, size in enumerate(self.mixed)}
        self._logits_at = torch.zeros((len(self.mixed), rows), dtype=torch.int64, device=device)
        """[mixed sizes, rows]: what a step leaves behind its own is a token that every step of that size has"""
        self._replays: dict[GraphKey, Run] = {}
        self._logits: torch.Tensor | None = None
        """[rows, vocabulary]: where every graph leaves its logits; each would keep its own otherwise"""

    def covers(self, batch: Batch) -> bool:
        """There is a graph for it, or may be one. Nothing of its kind (decode, or with prefill) is covered once a capture has
        failed, as it does where the host must wait for the device in the middle of a forward (some mixtures of experts)."""
        return self._size(batch) is not None

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """[S, vocabulary] logits, which the next call overwrites."""
        shape, n = self._shape(batch), batch.num_tokens
        self._ids[:, :n].copy_(batch.input_ids[:, :n])
        self._positions[:, :n].copy_(batch.position_ids[:, :n])
        if shape.logits:
            count = min(shape.logits, len(batch.logits_at))
            self._wanted(shape)[:count].copy_(batch.logits_at[:count])
        if shape not in self._replays:
            try:
                self._replays[shape] = self._captured(shape, batch, kv, backend)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a forward, larger steps run without graphs tokens=%d", shape.tokens)
                for made in (self.sizes, self.mixed):
                    made[:] = [smaller for smaller in made if smaller < shape.tokens]
                if not self._replays:
                    self._capture = self._new_capture()  # torch forgets a pool whose only graph has failed
                return self._forward(batch, kv, backend)
            except RuntimeError as error:
                kind = "steps with prefill run" if shape.logits else "decode runs"
                log.warning("%s without CUDA graphs, the forward cannot be captured reason=%r", kind, str(error))
                (self.mixed if shape.logits else self.sizes).clear()
                return self._forward(batch, kv, backend)
        if self._ring is not None:
            self._ring.join()
        return self._replays[shape]()[: batch.num_logits]

    def warm(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """`forward`, by the graph with large tiles of attention and then by the one without."""
        for large in (True, False):
            attention = batch.attention._replace(launched=(True, large, True))
            logits = self.forward(replace(batch, attention=attention), kv, backend)
        return logits

    def forget(self) -> None:
        """Addresses have changed: capture again as sizes come up."""
        self._replays.clear()
        self._logits = None
        self._capture = self._new_capture()

    def _size(self, batch: Batch) -> int | None:
        """Tokens of the graph for a step; None: there is none."""
        if batch.num_logits > self._rows:
            return None
        decodes = batch.num_tokens == len(batch.context_lens) == batch.num_logits
        return next((size for size in (self.sizes if decodes else self.mixed) if size >= batch.input_ids.shape[1]), None)

    def _shape(self, batch: Batch) -> GraphKey:
        """Of a step that is covered."""
        tokens, large = self._size(batch), batch.attention.launched[1]
        assert tokens is not None
        if batch.num_tokens == len(batch.context_lens) == batch.num_logits:
            return GraphKey(tokens, 0, large)
        logits = min(16, self._rows)
        while logits < batch.num_logits:
            logits = min(LOGITS * logits, self._rows)
        return GraphKey(tokens, logits, large)

    def _wanted(self, shape: GraphKey) -> torch.Tensor:
        """[logits] int64: the tokens whose logits are computed."""
        return self._logits_at[self._places[shape.tokens], : shape.logits] if shape.logits else self._every[: shape.tokens]

    def _captured(self, shape: GraphKey, batch: Batch, kv: PagedKV, backend: Backend) -> Run:
        launched = True, shape.large, True  # what a step of this size may want, and padding's zeros
        size, rows = shape.tokens, shape.logits or shape.tokens
        static = replace(
            batch, input_ids=self._ids[:, :size], position_ids=self._positions[:, :size], num_tokens=size,
            logits_at=self._wanted(shape), num_logits=rows, attention=batch.attention._replace(launched=launched),
        )  # fmt: skip
        started = time.perf_counter()

        def run() -> torch.Tensor:
            logits = self._forward(static, kv, backend)
            if self._logits is None:
                self._logits = logits.new_empty((self._rows, *logits.shape[1:]))
            self._logits[:rows].copy_(logits)
            if self._ring is not None:
                self._ring.join()
            return self._logits[:rows]

        try:
            replay = self._capture(run)
        except BaseException:
            if self._ring is not None:
                self._ring.fill()
            raise
        log.info("captured a forward tokens=%d logits=%d seconds=%.2f", size, rows, time.perf_counter() - started)
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
                run()  # what is compiled, allocated and chosen on first use is not captured; and it ends with `LayerRing.join`
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
