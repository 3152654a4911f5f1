"""Runs the recurrent layers of unmodified transformers models on the state slots of a step.

A recurrent mixer of transformers calls two functions that mix tokens, `causal_conv1d_fn` and at most one scan; everything else
in it is computed token by token. Both receive the keyword arguments of `model(...)`, so the step (`rollout=…`) reaches them.
`rebind` gives one mixer instance the same code with other functions under these two names:

    without a step           the module's own functions
    while a model is probed  notes of the shapes, from which the geometry of the state follows
    in a step                each row continues from its slot and leaves its state in one (`StateRows`)

With `TokenMixers` of the device, these compute all rows of a step token by token. Without, torch does: rows of one token go
through the module's scan together, with chunks of one token, and longer rows one by one, in the module's chunks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from transformers.activations import ACT2FN

from rollout.engine.forward.attention import AttentionCall
from rollout.engine.forward.batch import StateRows
from rollout.engine.forward.paged import AttentionProbe
from rollout.engine.kv.states import StateGeometry, StateLayer, StatePages

CONV = "causal_conv1d_fn"
CACHES = frozenset(("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"))
"""methods of transformers' caches that read or write recurrent state"""
OF_TOKENS = ("query", "key", "value", "g", "beta", "hidden_states", "dt", "B", "C")
"""arguments of scans of shape [1, tokens, …]"""


class Scan(NamedTuple):
    """A scan function of transformers."""

    first: str
    """its argument for the state before the first token"""
    wanted: str
    """its argument that asks for the state after the last token"""
    always_pairs: bool
    """whether it returns a pair when that state is not asked for"""
    shape: Callable[[dict[str, Any]], tuple[int, ...]]
    """takes its arguments, returns the shape of the state of one sequence"""


def _delta_shape(given: dict[str, Any]) -> tuple[int, ...]:
    value = given["value"]
    return value.shape[2], given["key"].shape[3], value.shape[3]


def _mamba_shape(given: dict[str, Any]) -> tuple[int, ...]:
    hidden = given["hidden_states"]
    return hidden.shape[2], hidden.shape[3], given["B"].shape[3]


SCANS = {
    "torch_chunk_gated_delta_rule": Scan("initial_state", "output_final_state", True, _delta_shape),
    "chunk_kimi_delta_attention": Scan("initial_state", "output_final_state", True, _delta_shape),
    "mamba2_chunk_scan": Scan("initial_states", "return_final_states", False, _mamba_shape),
}


Rows = Any
"""`StateRows`, or for kernels of a device `rollout.engine.forward.batch.Batch.state_rows`"""


class TokenMixers(Protocol):
    """Kernels of a device that mix tokens. A token's result depends on the tokens of its own sequence alone, to the bit, and
    not on where these are cut into rows."""

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        states: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """Convolve x [P, channels] → [P, channels]; weight [channels, k], states [slots, channels, k - 1]."""

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: Rows,
        *,
        l2norm: bool = False,
    ) -> torch.Tensor:
        """Run the gated delta rule: query, key [P, heads, K], value [P, heads, V], g [P, heads] or [P, heads, K] → as value;
        states [slots, heads, K, V]."""

    def mamba2(
        self,
        hidden: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        states: torch.Tensor,
        rows: Rows,
        *,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        """Run Mamba-2: hidden [P, heads, channels] → fp32 as hidden; states [slots, heads, channels, N]."""


@dataclass(slots=True)
class MixerShapes:
    """What a mixer asked for while the model was probed."""

    convs: int = 0
    scans: int = 0
    conv: tuple[int, int] = (0, 0)
    scan: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


class Recurrence:
    """The recurrent mixers of a model, rebound."""

    def __init__(self, module: nn.Module) -> None:
        """Rebind the mixers of a module. Raises ValueError naming a layer whose state is kept in another way."""
        self.mixers: list[tuple[int, MixerShapes]] = []
        """(decoder layer, shapes) of each mixer, in the order of the module"""
        self.kernels: TokenMixers | None = None
        """mix the tokens; None: torch does"""
        self.keeps_inputs = False
        """whether inputs of rows that write no state are kept, from which the next plan may advance it"""
        self._kept: dict[tuple[int, str], tuple[StateRows, dict[str, Any]]] = {}
        """rows and arguments of the functions of each mixer, in the newest step with rows that wrote no state"""
        for name, each in module.named_modules():
            names = names_in_forward(each)
            if CONV in names:
                self._rebind(each)
            elif names & CACHES:
                raise ValueError(f"the recurrent state of {name} ({type(each).__name__})")

    @property
    def layers(self) -> set[int]:
        """Decoder layers that have a mixer."""
        return {layer for layer, _ in self.mixers}

    def geometry(self) -> StateGeometry | None:
        """Return the shapes of the state of one sequence, after the model was probed; None: the model has no recurrent layers.
        Raises ValueError naming a layer whose functions were not called as expected."""
        for layer, shapes in self.mixers:
            if shapes.convs != 1 or shapes.scans > 1:
                raise ValueError(f"{shapes.convs} convolutions and {shapes.scans} scans in layer {layer}")
        if not self.mixers:
            return None
        dtypes = {shapes.dtype for _, shapes in self.mixers}
        if len(dtypes) > 1:
            raise ValueError(f"convolutions of different dtypes ({', '.join(sorted(map(str, dtypes)))})")
        return StateGeometry(tuple(StateLayer(shapes.conv, shapes.scan) for _, shapes in self.mixers), dtypes.pop())

    def advance(self, pages: StatePages, advances: np.ndarray) -> None:
        """Advance the states of rows that wrote none in the newest step by their first tokens: see `Plan.state_advances`. Token
        by token, as a row of these tokens alone would: so a state has the same bits with and without drafts."""
        assert self.kernels is not None and len(self._kept) >= len(self.mixers), "no inputs were kept to advance states by"
        for (index, name), (rows, given) in self._kept.items():
            at, some = rows_of_advances(rows, advances)
            parts = pages.convs if name == CONV else pages.scans
            run_kernel(self.kernels, name, tokens_at(name, given, at), parts[index], some)

    def _rebind(self, mixer: nn.Module) -> None:
        inner: Any = inspect.unwrap(type(mixer).forward)
        index, shapes = len(self.mixers), MixerShapes()
        self.mixers.append((int(mixer.layer_idx), shapes))  # type: ignore[arg-type]
        found = {name: inner.__globals__[name] for name in (CONV, *SCANS) if name in names_in_forward(mixer)}
        functions = {name: self._replacement(name, original, index, shapes) for name, original in found.items()}
        rebind(mixer, inner, functions)

    def _replacement(self, name: str, original: Any, index: int, shapes: MixerShapes) -> Any:
        """Make the function that mixer number `index` calls in place of `original`."""
        signature = inspect.signature(original)

        def function(*args: Any, **kwargs: Any) -> Any:
            call = kwargs.get("rollout")
            if call is None:
                return original(*args, **kwargs)
            given = dict(signature.bind(*args, **kwargs).arguments)
            given.update(given.pop("kwargs", {}))
            del given["rollout"]
            if isinstance(call, AttentionProbe):
                return note(name, given, shapes)
            if self.kernels is not None:
                if self.keeps_inputs and (rows := call.batch.states) is not None and (rows.writes < 0).any():
                    self._kept[index, name] = rows, {key: kept(value) for key, value in given.items()}
                return mixed(self.kernels, call, index, name, given)
            return convolve(call, index, given) if name == CONV else scan(call, index, name, original, given)

        return function


def names_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the global names and attributes that the forward of a module's class uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def rebind(mixer: nn.Module, inner: Any, functions: dict[str, Any]) -> None:
    """Let the forward of this mixer alone find other functions under these global names. inner: forward of its class."""
    mixer.forward = MethodType(with_globals(inner, functions), mixer)


def with_globals(inner: Any, functions: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that finds other functions under these global names."""
    made = FunctionType(
        inner.__code__, {**inner.__globals__, **functions}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


def note(name: str, given: dict[str, Any], shapes: MixerShapes) -> Any:
    """Record the arguments of a function of a mixer. Returns zeros of the shape of its result."""
    if name == CONV:
        x = given["hidden_states"]
        shapes.convs, shapes.conv, shapes.dtype = shapes.convs + 1, (x.shape[1], given["weight"].shape[-1] - 1), x.dtype
        return torch.zeros_like(x)
    kind = SCANS[name]
    shapes.scans, shapes.scan = shapes.scans + 1, kind.shape(given)
    out = torch.zeros_like(given["value"] if "value" in given else given["hidden_states"])
    return (out, None) if kind.always_pairs or given.get(kind.wanted) else out


# ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def pages_of(call: AttentionCall) -> StatePages | None:
    """Return the pools of recurrent state; None in a comparison of kernels, which has no pools."""
    return None if call.kv is None else call.kv.states


def rows_of(call: AttentionCall) -> StateRows:
    """Return the slots of a step's rows; without a pool each row begins with zeros, and its state is not kept."""
    if call.batch.states is not None:
        return call.batch.states
    assert pages_of(call) is None, "a step of a recurrent model without slots"
    none = np.full(len(call.batch.query_starts) - 1, -1, np.int32)
    return StateRows(call.batch.query_starts, none, none)


def mixed(kernels: TokenMixers, call: AttentionCall, index: int, name: str, given: dict[str, Any]) -> Any:
    """Run a function of a mixer with the kernels of the device. Returns what the module's own returns."""
    pages, rows = pages_of(call), getattr(call.batch, "state_rows", None)
    parts = None if pages is None else pages.convs if name == CONV else pages.scans
    out = run_kernel(kernels, name, given, None if parts is None else parts[index], rows_of(call) if rows is None else rows)
    return out if name == CONV or not (SCANS[name].always_pairs or given.get(SCANS[name].wanted)) else (out, None)


def kept(value: Any) -> Any:
    """Return an argument for use after the step: parameters may have changed by then."""
    return value.clone() if isinstance(value, nn.Parameter) else value


def rows_of_advances(rows: StateRows, advances: np.ndarray) -> tuple[torch.Tensor, StateRows]:
    """Return the tokens of a step by which states advance, [T] int64, and the rows that they are now. advances: as
    `Plan.state_advances`."""
    numbers, counts, reads, writes = (np.ascontiguousarray(column) for column in advances.T)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    at = np.repeat(rows.query_starts[numbers] - starts[:-1], counts) + np.arange(starts[-1])
    return torch.from_numpy(at.astype(np.int64)), StateRows(starts, reads, writes)


def tokens_at(name: str, given: dict[str, Any], at: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a function of a mixer for the tokens `at` alone."""
    if name == CONV:
        return {**given, "hidden_states": given["hidden_states"][0].T[at].T[None]}
    return {key: value[:, at] if key in OF_TOKENS else value for key, value in given.items()}


def run_kernel(kernels: TokenMixers, name: str, given: dict[str, Any], states: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """Run the kernel in place of the function `name`, whose arguments are `given`, for rows that lie side by side. states:
    slots; None: every row begins with zeros. Returns what the function returns, without a state."""
    if name == CONV:
        x, weight = given["hidden_states"][0].T, given["weight"]
        slots = x.new_zeros(1, x.shape[1], weight.shape[-1] - 1) if states is None else states
        return kernels.convolve(x, weight, given.get("bias"), given.get("activation"), slots, rows).T[None]
    tokens = {key: value[0] for key, value in given.items() if key in OF_TOKENS}
    first = tokens.get("value", tokens.get("hidden_states")).new_zeros  # type: ignore[union-attr]
    slots = first((1, *SCANS[name].shape(given)), dtype=torch.float32) if states is None else states
    if "value" in tokens:
        normed = bool(given.get("use_qk_l2norm_in_kernel"))
        return kernels.delta_rule(**tokens, states=slots, rows=rows, l2norm=normed)[None]
    options = {key: given[key] for key in ("D", "dt_bias", "dt_softplus", "dt_limit") if key in given}
    return kernels.mamba2(tokens.pop("hidden_states"), A=given["A"], **tokens, states=slots, rows=rows, **options)[None]


# ── a step, by torch ──────────────────────────────────────────────────────────────────────────────────────────────────
def convolve(call: AttentionCall, index: int, given: dict[str, Any]) -> torch.Tensor:
    """Convolve x [1, channels, P] with weight [channels, k], each row after the columns of its slot. Sums are fp32, rounded
    once to the dtype of x before the activation. Returns [1, channels, P], zero for padding."""
    x, weight, bias, activation = given["hidden_states"][0], given["weight"], given.get("bias"), given.get("activation")
    rows, columns = rows_of(call), weight.shape[-1] - 1
    pages = pages_of(call)
    states = None if pages is None else pages.convs[index]
    before = read(states, rows.reads, (len(x), columns), x)  # [R, channels, columns]
    inputs = torch.cat([before.transpose(0, 1).flatten(1), x[:, : rows.query_starts[-1]]], 1)
    windows = torch.from_numpy(windows_of(rows, columns)).to(x.device)
    taps = inputs[:, windows]  # [channels, T, k]
    out = (taps.float() * weight.float()[:, None]).sum(-1)
    if bias is not None:
        out = out + bias.float()[:, None]
    out = out.to(x.dtype)
    write(states, rows.writes, taps[:, torch.from_numpy(rows.query_starts[1:].astype(np.int64) - 1)][..., 1:].transpose(0, 1))
    result = torch.zeros_like(x)
    result[:, : out.shape[1]] = out if activation is None else ACT2FN[activation](out)
    return result[None]


def windows_of(rows: StateRows, columns: int) -> np.ndarray:
    """Return [T, columns + 1] int64: for each token the places of its inputs among the columns of R slots, then all tokens."""
    starts = rows.query_starts.astype(np.int64)
    row_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    at = (np.arange(starts[-1]) - starts[row_of])[:, None] + np.arange(-columns, 1)  # position in the row's own tokens
    kept = (len(starts) - 1) * columns
    return np.where(at >= 0, kept + starts[row_of][:, None] + at, (row_of[:, None] + 1) * columns + at)


def scan(call: AttentionCall, index: int, name: str, original: Any, given: dict[str, Any]) -> Any:
    """Run a scan over the rows of a step, each from the state of its slot. Returns what `original` returns."""
    kind, rows = SCANS[name], rows_of(call)
    tokens = {key: value for key, value in given.items() if key in OF_TOKENS}
    others = {key: value for key, value in given.items() if key not in (*OF_TOKENS, kind.first, kind.wanted, "cu_seqlens")}
    like = tokens["value"] if "value" in tokens else tokens["hidden_states"]
    pages = pages_of(call)
    states = None if pages is None else pages.scans[index]
    before = read(states, rows.reads, kind.shape(given), like.float())  # [R, *state]
    starts, counts = rows.query_starts[:-1].tolist(), np.diff(rows.query_starts)
    result, after = (
        torch.zeros_like(like, dtype=torch.float32 if name == "mamba2_chunk_scan" else None),
        torch.empty_like(before),
    )
    if len(single := np.flatnonzero(counts == 1)):
        at, chosen = (torch.from_numpy(each.astype(np.int64)).to(like.device) for each in (rows.query_starts[single], single))
        out, last = original(
            **{key: value[0, at][:, None] for key, value in tokens.items()},
            **{**others, "chunk_size": 1, kind.first: before[chosen], kind.wanted: True},
        )
        result[0, at], after[chosen] = out[:, 0].to(result.dtype), last.float()
    for row in np.flatnonzero(counts > 1).tolist():
        part = slice(starts[row], starts[row] + int(counts[row]))
        out, last = original(
            **{key: value[:, part] for key, value in tokens.items()},
            **{**others, kind.first: before[row : row + 1], kind.wanted: True},
        )
        result[:, part], after[row] = out.to(result.dtype), last[0].float()
    write(states, rows.writes, after)
    return (result, None) if kind.always_pairs or given.get(kind.wanted) else result


def read(states: torch.Tensor | None, slots: np.ndarray, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return [R, *shape] states of slots, zeros where the slot is -1. like: has their dtype and device."""
    if states is None:
        return like.new_zeros(len(slots), *shape)
    known = torch.from_numpy(slots >= 0).to(states.device)
    found = states[torch.from_numpy(np.maximum(slots, 0).astype(np.int64)).to(states.device)]
    return torch.where(known.view(-1, *[1] * len(shape)), found, found.new_zeros(()))


def write(states: torch.Tensor | None, slots: np.ndarray, values: torch.Tensor) -> None:
    """Store [R, *shape] states into slots, none where the slot is -1."""
    if states is not None and len(kept := np.flatnonzero(slots >= 0)):
        at, rows = (torch.from_numpy(each.astype(np.int64)).to(states.device) for each in (slots[kept], kept))
        states[at] = values[rows].to(states.dtype)
