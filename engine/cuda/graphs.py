"""CUDA graphs of steps: the forward of a step is captured once per size and then replayed with one launch.

A decode step has one token and one row of logits per sequence. All other steps of up to MOST_TOKENS tokens contain prefill;
their graphs also have a number of rows of logits. For larger steps, launching kernel by kernel takes the host less time than
the device needs to run them.

A graph uses the captured addresses, so the inputs of the forward must stay there:

    input ids, positions,         buffers here; each step copies its own into them, and pads up to the captured size
    tokens that need logits
    slots of recurrent state      a buffer here; rows that a step does not have are empty, and write no slot
    index arrays of attention     `TritonAttention` overwrites the previous step's arrays; with shared prefixes there are large
                                  tiles, which graphs of their own launch
    pools, parameters             written in place, by copies and by refreshes

Only `sleep` releases memory; the graphs are dropped then. Padding has no tile and no slot, and its results are not read. Graphs
of padded batch sizes follow vLLM.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from rollout.engine.forward.attention import Backend, StepCapacity
from rollout.engine.forward.batch import Batch
from rollout.engine.kv.pages import PagedKV

log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""may run a forward, and returns a function that repeats it: the same work, the same addresses, the same result tensor"""


class LayerRing(Protocol):
    """Part of weight offload (`rollout.engine.weights.offload.SlotRing`) that graphs need: the same slots at the beginning and
    the end of each graph."""

    def join(self) -> None: ...
    def fill(self) -> None: ...


MOST_TOKENS = 2048
"""largest step with prefill that is captured"""
FEW_LOGITS = 64
"""rows of logits of a step with prefill that has no more; others have the most that there may be"""


def sizes(largest: int) -> list[int]:
    """Return the decode batch sizes to capture: 1, 2, 4, 8, multiples of 8 up to 64, of 32 up to 256, then four per power of
    two; at most about a fifth of a step is padding."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32)]
    steps += [start + start // 4 * i for start in (2**n for n in range(8, 20)) for i in range(4)]
    return [*(size for size in steps if size < largest), largest]


def mixed_sizes(largest: int) -> list[int]:
    """Return the numbers of tokens of steps with prefill to capture: two per power of two from 16 on."""
    return sorted({min(largest, size) for n in range(4, 12) for size in (2**n, 3 * 2 ** (n - 1))} | {largest})


class GraphKey(NamedTuple):
    """Size of a captured graph."""

    tokens: int
    logits: int
    """rows of logits; 0 = one per token, in order"""
    large: bool
    """whether attention has large tiles"""


class StepGraphs:
    """Graphs of steps.

    Args:
        forward: of a batch, at fixed addresses.
        largest: sizes of the largest step.
        new_capture: called at the start and after all graphs were dropped.
        ring: of weight offload, if on.
    """

    def __init__(
        self,
        forward: Callable[[Batch, PagedKV, Backend], torch.Tensor],
        largest: StepCapacity,
        device: torch.device,
        new_capture: Callable[[], Capture],
        ring: LayerRing | None = None,
    ) -> None:
        rows, tokens = largest.rows, largest.tokens
        self._forward = forward
        self._ring = ring
        self._new_capture = new_capture
        self._capture = new_capture()
        self.sizes = sizes(rows)
        """of decode steps"""
        self.mixed = mixed_sizes(min(tokens, MOST_TOKENS))
        """of other steps"""
        room = max(rows, self.mixed[-1])
        self._ids = torch.zeros((1, room), dtype=torch.int64, device=device)
        self._positions = torch.zeros((1, room), dtype=torch.int64, device=device)
        self._rows = rows
        self._every = torch.arange(rows, device=device)
        self._places = {size: place for place, size in enumerate(self.mixed)}
        self._logits_at = torch.zeros((len(self.mixed), rows), dtype=torch.int64, device=device)
        """[mixed sizes, rows]: unused entries are tokens that every step of that size has"""
        self._state_rows = torch.zeros((3, rows + 1), dtype=torch.int64, device=device)
        """`Batch.state_rows` with empty rows up to the largest step's"""
        self._replays: dict[GraphKey, Run] = {}
        self._logits: torch.Tensor | None = None
        """[rows, vocabulary]: all graphs write their logits here, instead of one buffer each"""

    def covers(self, batch: Batch) -> bool:
        """Return whether there is a graph for a batch, or may be one. After a failed capture, no step of that kind (decode, or
        with prefill) is covered. A capture fails if the host must wait for the device within a forward (some mixtures of
        experts)."""
        return self._size(batch) is not None

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits; the next call overwrites them."""
        shape, n = self._shape(batch), batch.num_tokens
        self._ids[:, :n].copy_(batch.input_ids[:, :n])
        self._positions[:, :n].copy_(batch.position_ids[:, :n])
        if shape.logits:
            count = min(shape.logits, len(batch.logits_at))
            self._wanted(shape)[:count].copy_(batch.logits_at[:count])
        if batch.state_rows is not None:
            self._send_state_rows(batch.state_rows, n)
        if shape not in self._replays:
            try:
                self._replays[shape] = self._captured(shape, batch, kv, backend)
            except torch.OutOfMemoryError:
                log.warning("no memory is left to capture a forward, larger steps run without graphs tokens=%d", shape.tokens)
                for made in (self.sizes, self.mixed):
                    made[:] = [smaller for smaller in made if smaller < shape.tokens]
                self._renew_unused()
                return self._forward(batch, kv, backend)
            except RuntimeError as error:
                kind = "steps with prefill run" if shape.logits else "decode runs"
                log.warning("%s without CUDA graphs, the forward cannot be captured reason=%r", kind, str(error))
                (self.mixed if shape.logits else self.sizes).clear()
                self._renew_unused()
                return self._forward(batch, kv, backend)
        if self._ring is not None:
            self._ring.join()
        return self._replays[shape]()[: batch.num_logits]

    def warm(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Run `forward` with the graph that has large tiles of attention, and then with the one without."""
        for large in (True, False):
            logits = self.forward(launching(batch, (True, large, True)), kv, backend)
        return logits

    def forget(self) -> None:
        """Drop all graphs, since addresses have changed; they are captured again when needed."""
        self._replays.clear()
        self._logits = None
        self._capture = self._new_capture()

    def _renew_unused(self) -> None:
        """Capture into another pool if no graph is in this one: torch drops a pool whose only graph has failed."""
        if not self._replays:
            self._capture = self._new_capture()

    def _size(self, batch: Batch) -> int | None:
        """Return the tokens of the graph for a step; None: there is none. Rows that write no state have drafts: the host keeps
        their inputs, which a graph would overwrite."""
        if batch.num_logits > self._rows or (batch.states is not None and (batch.states.writes < 0).any()):
            return None
        decodes = batch.num_tokens == len(batch.context_lens) == batch.num_logits
        return next((size for size in (self.sizes if decodes else self.mixed) if size >= batch.input_ids.shape[1]), None)

    def _shape(self, batch: Batch) -> GraphKey:
        """Return the graph of a step that is covered."""
        tokens, large = self._size(batch), any(each.attention.launched[1] for each in (batch, batch.windowed) if each)
        assert tokens is not None
        if batch.num_tokens == len(batch.context_lens) == batch.num_logits:
            return GraphKey(tokens, 0, large)
        return GraphKey(tokens, min(FEW_LOGITS, self._rows) if batch.num_logits <= FEW_LOGITS else self._rows, True)

    def warm_up_shapes(self, context: int) -> Iterator[tuple[int, int]]:
        """Yield (rows, tokens of each row) of steps that capture the graphs, the largest first: with prefill, of each number of
        tokens few rows, and as many as have two tokens; then decode. context: most tokens of a row."""
        for tokens in reversed(self.mixed):
            if FEW_LOGITS < tokens // 2 <= self._rows:
                yield tokens // 2, 2
            few = -(-tokens // context)
            if few <= self._rows and tokens > few:
                yield few, tokens // few
        yield from ((rows, 1) for rows in reversed(self.sizes))

    def _wanted(self, shape: GraphKey) -> torch.Tensor:
        """Return [logits] int64: the tokens whose logits are computed."""
        return self._logits_at[self._places[shape.tokens], : shape.logits] if shape.logits else self._every[: shape.tokens]

    def _send_state_rows(self, rows: torch.Tensor, end: int) -> None:
        """Copy the rows of a step of `end` tokens to their place. All further rows are empty."""
        self._state_rows[0].fill_(end)
        self._state_rows[1:].fill_(-1)
        self._state_rows[:, : rows.shape[1]].copy_(rows)

    def _captured(self, shape: GraphKey, batch: Batch, kv: PagedKV, backend: Backend) -> Run:
        launched = True, shape.large, True  # all kernels that a step of this size may need; `merge` also zeroes padding
        size, rows = shape.tokens, shape.logits or shape.tokens
        batch = launching(batch, launched)
        static = replace(
            batch, input_ids=self._ids[:, :size], position_ids=self._positions[:, :size], num_tokens=size,
            logits_at=self._wanted(shape), num_logits=rows,
            windowed=None if batch.windowed is None else replace(batch.windowed, num_tokens=size),
            state_rows=None if batch.state_rows is None else self._state_rows[:, : min(size, self._rows) + 1],
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

        writes = self._state_rows[2].clone()
        self._state_rows[2].fill_(-1)  # a capture may run the forward, and its replay would advance states a second time
        try:
            replay = self._capture(run)
        except BaseException:
            if self._ring is not None:
                self._ring.fill()
            raise
        finally:
            self._state_rows[2].copy_(writes)
        log.info("captured a forward tokens=%d logits=%d seconds=%.2f", size, rows, time.perf_counter() - started)
        return replay


def launching(batch: Batch, launched: tuple[bool, bool, bool]) -> Batch:
    """Return a batch whose attention launches these kernels, in layers of each kind."""
    windowed = None if batch.windowed is None else launching(batch.windowed, launched)
    return replace(batch, attention=batch.attention._replace(launched=launched), windowed=windowed)


def cuda_capture(aside: torch.cuda.Stream) -> Capture:
    """Return a function that captures CUDA graphs. Their intermediate results share one memory pool, since they are replayed
    one at a time. aside: stream for captures, always the same, since cuBLAS allocates memory for each stream that it uses."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> Run:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()  # a finaliser that runs during a capture could break it
        try:
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                run()  # compiles and allocates outside the capture; ends with `LayerRing.join`
                torch.cuda.synchronize()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = run()
                except BaseException:
                    try:
                        graph.capture_end()
                    except RuntimeError:  # otherwise the allocator would keep the memory of the failed capture for ever
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
