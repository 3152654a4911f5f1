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

import torch
from torch import nn

from rollout.engine.cpu.attention import LayerCalls, NativeAttention
from rollout.engine.cpu.build import check_layout
from rollout.engine.cpu.functions import in_whole_vectors
from rollout.engine.cpu.int8_modules import codes_in
from rollout.engine.cpu.kernels import Kernels
from rollout.engine.cpu.layer_steps import STRUCTS, ForwardStruct, NotNative, Steps, StepStruct, head_steps, layer_steps, need
from rollout.engine.cpu.recurrence import ROW_ERRORS, RowsStruct, rows_struct
from rollout.engine.cpu.sums import SumKernels
from rollout.engine.forward import recurrence
from rollout.engine.forward.attention import AttentionCall, Backend, Scores, located, plain_scores
from rollout.engine.forward.batch import Batch
from rollout.engine.forward.shards import parts_of_head
from rollout.engine.kv.pages import PagedKV
from rollout.engine.kv.states import StateRows

__all__ = ["CHECKED_ROWS", "EchoAttention", "NativeDecoder", "NotNative"]

CHECKED_ROWS = (1, 2, 3, 5, 7, 17, 33, 130)


class NativeDecoder:
    """A decoder in C. asked: attention arguments of each layer with attention (scaling and window). Raises NotNative."""

    def __init__(self, module: Any, asked: dict[int, dict[str, Any]], kernels: Kernels) -> None:
        self.kernels, self.module, self.sums = kernels, module, SumKernels(kernels)
        check_layout(kernels.library, "rollout_layout_layers", **STRUCTS)
        kernels.library.rollout_forward.restype = c_int64
        dtypes = {parameter.dtype for parameter in module.parameters()}
        need(dtypes in ({torch.bfloat16}, {torch.float32}), f"parameters in {', '.join(sorted(map(str, dtypes)))}")
        self.body = module.base_model
        self.parameters = [*module.parameters(), *codes_in(module)]
        """parameters, and codes of those that products read in eight bits"""
        self.addresses: list[int] = []
        """of the parameters that the steps read"""
        self.layers, self.head = self._read()
        scores = plain_scores(asked)
        need(scores is not None, "attention with sinks or soft caps")
        self.attention: list[Scores] = scores or []
        need(len(self.attention) == len(self.layers.attends), "attention in other layers than expected")

    def forward(self, batch: Batch, kv: PagedKV, backend: Backend) -> torch.Tensor:
        """Return [S, vocabulary] logits of the tokens `batch.logits_at`."""
        n = batch.num_tokens
        if [parameter.data_ptr() for parameter in self.parameters] != self.addresses:
            self.layers, self.head = self._read()
        x = self.body.embed_tokens(batch.input_ids[0, :n])
        tensors = self._tensors(self.layers, x)
        for name, kind in self.layers.rotary.items():
            made = self.body.rotary_emb(x[None], batch.position_ids[:, :n], *([] if kind is None else [kind]))
            cos, sin = (each.reshape(n, -1).contiguous() for each in made)
            need(cos.dtype == sin.dtype == x.dtype, "unsupported rotary embeddings")
            tensors[name], tensors[name.replace("cos", "sin")] = cos, sin
        if self.layers.decays:  # torch's exp has other bits than ours
            tensors["rates"] = -in_whole_vectors(torch.exp, (torch.cat(self.layers.decays).float(),), {})
        states = _States(self.layers, batch, kv, backend)
        stops: list[tuple[int, int, Callable[[], None]]] = [
            (at, at, partial(_add_module, module, tensors, n)) for at, module in self.layers.modules.items()
        ]
        calls = None
        if self.layers.heads is not None:
            q, k, v, out = _heads(self.layers, tensors)
            if isinstance(backend, NativeAttention):
                calls = backend.layer_calls(self.attention, q, k, v, out, batch, kv)
            else:

                def attend(layer: int) -> None:
                    place, of, pools = located(layer, batch, kv)
                    out.copy_(backend.attend(place, q, k, v, of, pools, self.attention[layer]))

                stops += [(at, at + 1, partial(attend, layer)) for layer, at in enumerate(self.layers.attends)]
        self._run_between(sorted(stops, key=itemgetter(0)), tensors, states, calls)
        return self._logits(x[batch.logits_at[: batch.num_logits]])

    def weights_moved(self) -> None:
        """Do nothing: each forward reads the addresses of the parameters."""

    def _read(self) -> tuple[Steps, Steps]:
        """Return the steps of the layers and of the head, for where the parameters are now."""
        self.addresses = [parameter.data_ptr() for parameter in self.parameters]
        return layer_steps(self.module), head_steps(self.module)

    def _tensors(self, steps: Steps, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Allocate the tensors of a forward, flat."""
        return {name: x if name == "x" else x.new_empty(len(x) * width) for name, width in steps.widths.items()}

    def _work(self, steps: Steps, array: Any, tensors: dict[str, torch.Tensor], states: _States | None) -> ForwardStruct:
        """Describe a forward. Its arguments must outlive it, and `_keep` is what else must."""
        x = tensors["x"]
        buffers = (c_void_p * len(steps.widths))(*(tensors[name].data_ptr() for name in steps.widths))
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

    def _run(self, steps: Steps, array: Any, tensors: dict[str, torch.Tensor], states: _States | None) -> None:
        self._call(steps, self._work(steps, array, tensors, states))

    def _call(self, steps: Steps, work: ForwardStruct) -> None:
        if error := self.kernels.library.rollout_forward(ctypes.byref(self.kernels.team()), ctypes.byref(work)):
            raise ValueError(ROW_ERRORS[error])
        if steps.exchange is not None:
            steps.exchange.check()

    def _run_between(
        self,
        stops: list[tuple[int, int, Callable[[], None]]],
        tensors: dict[str, torch.Tensor],
        states: _States,
        calls: LayerCalls | None,
    ) -> None:
        """Run the layers. stops: in order: a step, the one to go on with, and what is called from Python between both. calls:
        of attention; None: it is among the stops."""
        steps, begin = self.layers.array, 0
        for end, then, call in [*stops, (len(steps), len(steps), lambda: None)]:
            if end > begin:
                part = steps if end - begin == len(steps) else (StepStruct * (end - begin))(*steps[begin:end])
                work = self._work(self.layers, part, tensors, states)
                if calls is not None:
                    work.attend, work.calls, work.call_bytes = calls.function, ctypes.addressof(calls.calls), calls.size
                self._call(self.layers, work)
            call()
            begin = then

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        tensors = self._tensors(self.head, x)
        if len(x):
            self._run(self.head, self.head.array, tensors, None)
        logits = tensors["logits"].view(len(x), self.head.widths["logits"])
        parts = parts_of_head(self.module.get_output_embeddings())
        return logits if parts is None else parts.joined(logits)


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
