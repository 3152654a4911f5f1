"""Runs all layers of a decoder, including native attention and recurrent layers, in one parallel region. Eager torch takes
about fifty small kernels and as many barriers per layer. bf16 and fp32, with the products of any instruction set. What a layer
may be made of is in `rollout.engine.cpu.layer_steps`.

The reference is the transformers module with our products and our recurrence (`rollout.engine.cpu.select_path`).
`NativeDecoder` reads the module's parameters in place, so it sees an in-place refresh. Before it is used, its logits must equal
the module's in every bit. So a trainer's module with our products and attention has exactly the engine's log-probs. Layers
compiled by inductor do not have this property: they keep fp32 where eager torch rounds, and reduce in another order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.engine.cpu.attention import LayerCalls, LayerScores, NativeAttention
from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.functions import in_whole_vectors
from rollout.engine.cpu.int8_modules import codes_in
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.cpu.layer_steps import STRUCTS, ForwardStruct, NotNative, Steps, StepStruct, model_steps, need
from rollout.engine.cpu.recurrence import ROW_ERRORS, RowsStruct, rows_struct
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward import recurrence
from rollout.engine.forward.attention import AttentionCall, Backend, Scores, located, plain_scores
from rollout.engine.forward.batch import Batch, StateRows
from rollout.engine.forward.shards import parts_of_head
from rollout.engine.kv.pages import PagedKV

__all__ = ["CHECKED_ROWS", "EchoAttention", "NativeDecoder", "NotNative"]

CHECKED_ROWS = (1, 2, 3, 5, 7, 17, 33, 130)
KEPT_TOKENS = 64
"""most tokens of a forward whose tensors are kept for the next one: allocating them takes as long as a small layer"""
POSITIONS = 256
"""rotary embeddings are computed of so many positions at once"""


class NativeDecoder:
    """A decoder in C. asked: attention arguments of each layer with attention (scaling and window). Raises NotNative."""

    def __init__(self, module: Any, asked: dict[int, dict[str, Any]], kernels: Kernels) -> None:
        self.kernels, self.module, self.sums = kernels, module, SumKernels(kernels)
        check_layout(kernels.library, "rollout_layout_layers", **STRUCTS)
        kernels.library.rollout_forward.restype = c_int64
        self.body = module.base_model
        self.parameters = [*module.parameters(), *codes_in(module)]
        """parameters, and codes of those that products read in eight bits"""
        self.steps = model_steps(module)
        called = {parameter for each in self.steps.modules.values() for parameter in each.parameters()}  # as router weights
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter not in called}
        need(dtypes in ({torch.bfloat16}, {torch.float32}), f"parameters in {', '.join(sorted(map(str, dtypes)))}")
        self.addresses = self._addresses()
        """of the parameters that the steps read"""
        self._checked = 0
        self._kept = ForwardBuffers(self.steps, 0)
        self.rotary = {name: RotaryTable(self.body, kind) for name, kind in self.steps.rotary.items()}
        scores = plain_scores(asked)
        need(scores is not None, "attention with sinks or soft caps")
        self.attention: list[Scores] = scores or []
        self.asked = LayerScores(self.attention)
        need(len(self.attention) == len(self.steps.attends), "attention in other layers than expected")

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""
        n = batch.num_tokens
        self._check_next_address()
        steps, x = self.steps, self.body.embed_tokens(batch.input_ids[0, :n])
        buffers = self._kept if self._kept.tokens == n else ForwardBuffers(steps, n)
        if n <= KEPT_TOKENS:
            self._kept = buffers
        tensors = {**buffers.like(x), "x": x}
        for name, table in self.rotary.items():
            tensors[name], tensors[name.replace("cos", "sin")] = table.at(batch.position_ids[:, :n], x)
        if steps.decays:  # torch's exp has other bits than ours
            tensors["rates"] = -in_whole_vectors(torch.exp, (torch.cat(steps.decays).float(),), {})
        states = _States(steps, batch, kv, backend)
        stops: list[tuple[int, int, Callable[[], None]]] = [
            (at, at, partial(_add_module, module, tensors, n)) for at, module in steps.modules.items()
        ]
        calls = None
        if steps.heads is not None:
            q, k, v, out = _heads(steps, tensors)
            if isinstance(backend, NativeAttention):
                calls = backend.layer_calls(self.asked, q, k, v, out, batch, kv)
            else:

                def attend(layer: int) -> None:
                    place, of, pools = located(layer, batch, kv)
                    out.copy_(backend.attend(place, q, k, v, of, pools, self.attention[layer]))

                stops += [(at, at + 1, partial(attend, layer)) for layer, at in enumerate(steps.attends)]
        if batch.num_logits == n:  # of all tokens, in order
            tensors["logits"] = x.new_empty(n * steps.widths["logits"])
            self._run_between(sorted(stops, key=itemgetter(0)), len(steps.made), tensors, states, calls)
            return self._whole(tensors["logits"].view(n, -1))
        self._run_between(sorted(stops, key=itemgetter(0)), steps.head, tensors, states, calls)
        return self._logits(x[batch.logits_at[: batch.num_logits]])

    def weights_moved(self) -> None:
        """Make the steps for where the parameters are now."""
        self.steps, self.addresses = model_steps(self.module), self._addresses()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.parameters]

    def _check_next_address(self) -> None:
        """Check that one parameter is where the steps read it, each time another one: all of them take as long as a layer."""
        at, self._checked = self._checked, (self._checked + 1) % len(self.parameters)
        assert self.parameters[at].data_ptr() == self.addresses[at], "a parameter has moved: call weights_moved()"

    def _work(self, array: Any, tensors: dict[str, torch.Tensor], states: _States | None) -> ForwardStruct:
        """Describe a forward. Its arguments must outlive it, and `_keep` is what else must."""
        steps, x = self.steps, tensors["x"]
        buffers = (c_void_p * len(steps.widths))(
            *(tensors[name].data_ptr() if name in tensors else None for name in steps.widths)
        )
        packed = self.kernels.packed(len(x), steps.inputs, x.dtype, steps.int8)
        for inputs, slices in steps.summed:
            packed = max(packed, self.sums.packed(len(x), inputs, slices, x.dtype), key=len)
        work = ForwardStruct(
            ctypes.addressof(array), len(array), len(x), x.dtype == torch.bfloat16, ctypes.addressof(buffers),
            packed.data_ptr(),
        )  # fmt: skip
        if states is not None:
            states.put(work)
        work._keep = buffers, packed, array, tensors
        return work

    def _call(self, work: ForwardStruct) -> None:
        if error := self.kernels.library.rollout_forward(ctypes.byref(self.kernels.team()), ctypes.byref(work)):
            raise ValueError(ROW_ERRORS[error])
        if self.steps.exchange is not None:
            self.steps.exchange.check()

    def _run_between(
        self,
        stops: list[tuple[int, int, Callable[[], None]]],
        last: int,
        tensors: dict[str, torch.Tensor],
        states: _States,
        calls: LayerCalls | None,
    ) -> None:
        """Run the steps before `last`. stops: in order: a step, the one to go on with, and what is called from Python between
        both. calls: of attention; None: it is among the stops."""
        array, begin = self.steps.array, 0
        for end, then, call in [*stops, (last, last, lambda: None)]:
            if end > begin:
                part = array if end - begin == len(array) else (StepStruct * (end - begin))(*array[begin:end])
                work = self._work(part, tensors, states)
                if calls is not None:
                    work.attend, work.calls, work.call_bytes = calls.function, ctypes.addressof(calls.calls), calls.size
                self._call(work)
            call()
            begin = then

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Run the last norm and the head. x: [S, hidden]."""
        widths, array = self.steps.widths, self.steps.array
        tensors = {name: x.new_empty(len(x) * widths[name]) for name in ("normed", "logits")}
        if len(x):
            head = (StepStruct * (len(array) - self.steps.head))(*array[self.steps.head :])
            self._call(self._work(head, {**tensors, "x": x}, None))
        return self._whole(tensors["logits"].view(len(x), widths["logits"]))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all tokens of the vocabulary, of those of this rank."""
        parts = parts_of_head(self.module.get_output_embeddings())
        return logits if parts is None else parts.joined(logits)


class ForwardBuffers:
    """The tensors between the steps of a forward of so many tokens, which the next one of as many overwrites."""

    def __init__(self, steps: Steps, tokens: int) -> None:
        given = {"x", "logits", "rates", *steps.rotary, *(name.replace("cos", "sin") for name in steps.rotary)}
        self.tokens = tokens
        self._widths = {name: width for name, width in steps.widths.items() if name not in given}
        self._tensors: dict[str, torch.Tensor] = {}

    def like(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return them, flat, by name, of the dtype of x [T, hidden]."""
        if not self._tensors:
            self._tensors = {name: x.new_empty(self.tokens * width) for name, width in self._widths.items()}
        return self._tensors


class RotaryTable:
    """Cosines and sines of positions, as a model's module computes them: in pieces of POSITIONS, each when one of its positions
    first occurs. No rotary embedding that is served depends on the other positions of a step. kind: of layers; None: of all."""

    def __init__(self, body: Any, kind: str | None) -> None:
        self._body, self._kind = body, [] if kind is None else [kind]
        self._pieces: dict[int, int] = {}
        """number of a piece -> its place in the table"""
        self._table: tuple[torch.Tensor, ...] = ()
        """cosines and sines, [pieces · POSITIONS, numbers] each"""

    def at(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines, [T, numbers] each. positions: [1, T]; x: [T, hidden], of the dtype that they get."""
        pieces, offsets = np.divmod(positions[0].numpy(), POSITIONS)
        numbers = pieces.tolist()
        for piece in numbers:
            if piece not in self._pieces:
                self._add(piece, x)
        rows = torch.from_numpy(np.array([self._pieces[piece] for piece in numbers], np.int64) * POSITIONS + offsets)
        return tuple(table.index_select(0, rows) for table in self._table)

    def _add(self, piece: int, x: torch.Tensor) -> None:
        positions = torch.arange(piece * POSITIONS, (piece + 1) * POSITIONS)[None]
        made = [each.reshape(POSITIONS, -1) for each in self._body.rotary_emb(x[None], positions, *self._kind)]
        need(all(each.dtype == x.dtype for each in made), "unsupported rotary embeddings")
        self._table = tuple(map(torch.cat, zip(self._table, made, strict=True))) if self._table else tuple(made)
        self._pieces[piece] = len(self._pieces)


def _add_module(module: Any, tensors: dict[str, torch.Tensor], tokens: int) -> None:
    """x += module(normed)."""
    hidden = tensors["x"].shape[-1]
    normed = tensors["normed"][: tokens * hidden].view(1, tokens, hidden)
    out = module(normed)
    tensors["x"].add_((out[0] if isinstance(out, tuple) else out).view(tokens, hidden))


class _States:
    """The recurrent state of a step's rows, for C; without a pool each row begins with zeros, and its state is not kept."""

    def __init__(self, steps: Steps, batch: Batch, kv: PagedKV, backend: Backend) -> None:
        self.pages = recurrence.pages_of(AttentionCall(backend, batch, kv, {}))
        self.rows: StateRows | None = None
        self.struct = RowsStruct()
        if steps.recurrent:
            self.rows = recurrence.rows_of(AttentionCall(backend, batch, kv, {}))
            self.struct = rows_struct(self.rows, batch.num_tokens, None if self.pages is None else self.pages.data)
        if self.pages is not None:
            scans = [each for each in self.pages.scans if each is not None]
            assert len(self.pages.convs) == steps.recurrent and len(scans) == steps.scans
            self.columns = (c_void_p * len(self.pages.convs))(*(each.data_ptr() for each in self.pages.convs))
            self.states = (c_void_p * len(scans))(*(each.data_ptr() for each in scans))
            self.apart = self.pages.convs[0].stride(0), scans[0].stride(0) if scans else 0

    def put(self, work: ForwardStruct) -> None:
        """Fill in a forward, which this object must outlive."""
        work.rows = self.struct
        if self.pages is not None:
            work.columns, work.states = ctypes.addressof(self.columns), ctypes.addressof(self.states)
            work.columns_slot, work.states_slot = self.apart


def _heads(steps: Steps, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and the result of attention, [T, heads, head_dim] each."""
    assert steps.heads is not None
    heads, kv_heads, dim, apart = steps.heads
    n = len(tensors["x"])
    q, out = tensors["q"].view(n, heads, apart)[..., :dim], tensors["attended"].view(n, heads, dim)
    return q, tensors["k"].view(n, kv_heads, dim), tensors["v"].view(n, kv_heads, dim), out


class EchoAttention:
    """Replaces attention in comparisons: its result depends on every bit of q, k and v."""

    name = "echo"

    def __init__(self) -> None:
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """K and V of each layer, for those that share them"""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, *_: Any
    ) -> torch.Tensor:
        if key is None or value is None:
            key, value = self._stored[layer]
        self._stored[layer] = key, value
        group, width = query.shape[1] // key.shape[1], value.shape[2]
        scores = query * 0.5 + key.repeat_interleave(group, 1) * 0.25
        return nn.functional.pad(scores, (0, max(0, width - scores.shape[2])))[..., :width] + value.repeat_interleave(group, 1)
