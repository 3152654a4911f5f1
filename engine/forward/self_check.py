"""Self-check at load: compares the engine's log-probs with those of the module's own forward. A silent mismatch would show up
only as a policy that fails to learn.

When an engine is made, a few short texts are computed in two ways:

    engine      a prompt in two chunks after another row, paged KV, the engine's backend, the native decoder if there is one; a
                recurrent state goes to host memory and back into another slot between the chunks, and two rows read it
    plain       the whole text alone, transformers' own eager attention, masks and positions

The distributions of the next token must agree. Each of three texts detects a kind of mistake that would be silent:

    short                a module that counts positions itself instead of using the given ones, attention that is called
                         otherwise than its probe saw, logits of other tokens than asked for
    at the end           scaling of queries or frequencies that depends on the position: the last positions of the context. The
                         plain forward has a cache that claims to hold all earlier tokens and returns none of them
    narrowed windows     a window that only the mask has: the short text with every window of the configuration and of the
                         layers narrowed, so that a hundred tokens test a window of 4,096

If they differ by more than rounding, the model is rejected. The check stores KV in the model's dtype. If the engine stores it
in fp8, the check also logs the effect of fp8 on the short text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from rollout.engine.forward.attention import Backend, CannotAttend, Scores, prepared
from rollout.engine.forward.batch import MIN_ROWS, Batch, StateRows, padded
from rollout.engine.forward.interface import windows_of
from rollout.engine.forward.load import in_one_line
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.kv.block import BlockCopies, SlotCounts
from rollout.engine.kv.pages import KVGeometry, PagedKV
from rollout.engine.kv.sizing import PoolSizes
from rollout.engine.kv.states import StatePages
from rollout.engine.memory import DeviceMemory
from rollout.engine.scheduling.plan import plan_by_hand

log = logging.getLogger(__name__)

TOKENS = 96
"""length of a text"""
BESIDE = 7
"""tokens of the row before it"""
LOOK_EVERY = 5
"""distance of the positions whose logits are compared"""
NARROW = 16
"""width of a narrowed window, in tokens; the texts are much longer"""
TRIES = 3
"""texts that must differ before a model is rejected: rounding sometimes routes a token to another expert, while a mistake shows
in every text"""
SPREAD = 4.0
"""× the effect of rounding every input embedding the other way, which is the noise of one rounding through the whole model. The
engine and the module round differently in each layer, so they may differ by the square root of the number of layers, and some
margin"""
LEAST = {torch.float32: 1e-6, torch.bfloat16: 2**-9, torch.float16: 2**-12}
"""× the mean logit: differences up to this are rounding, for any spread"""


class ForwardPath(NamedTuple):
    """Forward of the engine to check, and the first position of the text."""

    first: int
    forward: Callable[[Batch, PagedKV, Backend], torch.Tensor]
    window: int
    """widest window of the layers whose windows free memory; 0: there are none"""


class LoadedModel(NamedTuple):
    """A model as an engine runs it."""

    model: Model
    backend: Backend
    block_size: int
    most_tokens: int
    """largest step, in tokens"""
    memory: DeviceMemory
    kept: KVGeometry
    """geometry of the KV pools"""


def check_model(served: LoadedModel) -> None:
    """Compare the engine with the plain forward. Raises UnsupportedModel with the difference, or with the reason why they
    cannot be compared."""
    began, model = time.perf_counter(), served.model
    windows, widest = _windows(model.module), max(windows_of(model), default=0)
    try:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            short = min(TOKENS, model.context)
            _agree(served, ForwardPath(0, model.forward, widest), "")
            if model.context >= 2 * short:
                where = f" at positions {model.context - short} to {model.context - 1}"
                _agree(served, ForwardPath(model.context - short, model.forward, widest), where)
            if windows:
                with _narrowed(windows):
                    where = f" beyond a window (of {NARROW} tokens, for the comparison)"
                    _agree(served, ForwardPath(0, model.forward_transformers, min(widest, NARROW)), where)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{model.name} ({model.module.config.model_type}): its own forward and the engine's cannot be compared: "
            f"{in_one_line(error)}"
        ) from error
    log.info("self-check passed model=%s seconds=%.1f", model.name, time.perf_counter() - began)
    if served.kept.fp8:
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            ids = _text(model, 0)
            way = ForwardPath(0, model.forward, widest)
            plain, kept = (_engine(served, ids, way, each) for each in (model.geometry, served.kept))
        log.info("KV in fp8 model=%s mean_abs_logprob_difference=%.2g", model.name, _difference(plain, kept))


def try_out(model: Model, kept: KVGeometry, block_size: int, memory: DeviceMemory, backend: Backend) -> None:
    """Attend with rows of one and of several tokens, in the shapes of each kind of layer, to KV of geometry `kept`. Raises
    CannotAttend."""
    rows = [(LOOK_EVERY, 1), (0, NARROW - 1)]
    tables = np.arange(2 * -(-NARROW // block_size), dtype=np.int32).reshape(2, -1)
    kv = PagedKV(kept, PoolSizes(block_size, tables.size, 0), memory)
    kinds = {
        (asked["q_heads"], asked["softcap"], asked["sinks"], kept.shapes[place.layer]): place.layer
        for asked, place in zip(model.asked.values(), model.places.values(), strict=True)
    }
    for (q_heads, softcap, sinks, (kv_heads, head_dim, value_dim)), layer in kinds.items():
        served = LoadedModel(model, backend, block_size, NARROW, memory, kept)
        batch = _batch(served, torch.zeros(NARROW, dtype=torch.int64), rows, 0, tables, torch.zeros(1, dtype=torch.int64))
        shapes = ((q_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
        q, k, v = (torch.zeros(batch.input_ids.shape[1], *each, dtype=kept.dtype, device=model.device) for each in shapes)
        try:
            batch = replace(batch, attention=backend.prepare(batch, kv))
            scores = Scores(1.0, 0, softcap, None if sinks is None else q.new_zeros(sinks))
            backend.attend(layer, q, k, v, batch, kv, scores)
        except Exception as error:
            raise CannotAttend(
                f"{q_heads} query heads over {kv_heads} of {head_dim} dimensions, values of {value_dim}: {in_one_line(error)}"
            ) from error


def _agree(served: LoadedModel, way: ForwardPath, where: str) -> None:
    """Raise UnsupportedModel if all of TRIES texts differ."""
    model, worst = served.model, (0.0, 0.0)
    for seed in range(TRIES):
        ids = _text(model, seed)
        plain = _plain(model, ids, way.first)
        made = _engine(served, ids, way, model.geometry)
        difference = _difference(plain, made)
        allowed = LEAST.get(model.module.dtype, 1e-6) * float(plain.abs().mean())
        if difference <= allowed:
            return
        with _rounded_otherwise(model.module, seed):
            allowed = max(allowed, SPREAD * _difference(plain, _plain(model, ids, way.first)))
        if difference <= allowed:
            return
        worst = difference, allowed
    raise UnsupportedModel(
        f"{model.name} ({model.module.config.model_type}): the engine's log-probs differ from those of the model's own forward"
        f"{where}: by {worst[0]:.1e} on average, of which rounding explains {worst[1]:.1e}"
    )


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean difference of log-probs; infinity if one is not finite."""
    difference = float((one - other).abs().mean())
    return difference if np.isfinite(difference) else float("inf")


def _text(model: Model, seed: int) -> torch.Tensor:
    """Return [tokens] ids from the middle of the vocabulary; its ends have ids for images and padding."""
    low, high = model.vocab_size // 8, max(model.vocab_size // 2, model.vocab_size // 8 + 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (min(TOKENS, model.context),), generator=generator)


def _looked_at(tokens: int) -> torch.Tensor:
    return torch.arange(tokens - 1, -1, -LOOK_EVERY).flip(0)


class _Forgetful(DynamicCache):  # type: ignore[misc]
    """A cache that claims to hold `first` tokens and returns only the new ones."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self.first

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return key_states, value_states


def _plain(model: Model, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return [compared positions, vocabulary] fp32 log-probs of the unmodified module, which counts positions itself."""
    arguments: dict[str, Any] = {"past_key_values": _Forgetful(first), "use_cache": True} if first else {"use_cache": False}
    if first and model.states is not None:  # the cache has no recurrent state to forget
        positions = torch.arange(first, first + len(ids), device=model.device)
        arguments = {"position_ids": positions[None], "use_cache": False}
    with _own_attention(model.module):
        output = model.module(input_ids=ids[None].to(model.device), **arguments)
    logits: torch.Tensor = output.logits[0, _looked_at(len(ids)).to(model.device)]
    return logits.float().log_softmax(-1)


def _engine(served: LoadedModel, ids: torch.Tensor, way: ForwardPath, kept: KVGeometry) -> torch.Tensor:
    """Return [compared positions, vocabulary] fp32 log-probs of the engine: in two chunks or more, after another row, from KV
    of geometry `kept`. Blocks that have left a window are gone: their columns name a block that holds NaN."""
    backend, block_size = served.backend, served.block_size
    blocks = -(-len(ids) // block_size)
    geometry = served.model.states
    states = None if geometry is None else StatePages(geometry, SlotCounts(4, 1), served.memory)
    kv = _pools(served, kept, 3 * blocks, states)
    tables = np.random.default_rng(0).permutation(3 * blocks).astype(np.int32).reshape(3, blocks)
    looked_at, parts = _looked_at(len(ids)), []
    chunk = max(1, min(-(-len(ids) * 3 // 5), served.most_tokens - BESIDE))
    for step, start in enumerate(range(0, len(ids), chunk)):
        end = min(start + chunk, len(ids))
        beside = (0, min(BESIDE, len(ids))) if step == 0 else (min(BESIDE + step, len(ids)) - 1, 1)
        wanted = looked_at[(looked_at >= start) & (looked_at < end)] - start + beside[1]
        rows = [beside, (start, end - start)]
        if states is not None and step:
            rows.append((start, 1))  # a fork: it reads the state of the row before, and its own KV is not looked at
        batch = prepared(_batch(served, ids, rows, way.first, tables, wanted, way.window), backend, kv)
        if states is not None:
            batch = replace(batch, states=_slots(states, batch, step))
        parts.append(way.forward(batch, kv, backend).float().log_softmax(-1))
    return torch.cat(parts)


def _pools(served: LoadedModel, kept: KVGeometry, blocks: int, states: StatePages | None) -> PagedKV:
    """Allocate KV of geometry `kept`, with pools of their own for layers with a window, whose last block holds NaN."""
    windowed, size, memory = [window > 0 for window in windows_of(served.model)], served.block_size, served.memory
    if not any(windowed):
        return PagedKV(kept, PoolSizes(size, blocks, 0), memory, states=states)
    full, window = (kept.part([i for i, each in enumerate(windowed) if each == kind]) for kind in (False, True))
    kv, beside = PagedKV(full, PoolSizes(size, blocks, 0), memory), PagedKV(window, PoolSizes(size, blocks + 1, 0), memory)
    beside.data[blocks].fill_(255 if kept.fp8 else torch.nan)  # 255 is NaN in e4m3 and, twice, in bf16
    kv.join(beside, windowed)
    return kv


def _slots(states: StatePages, batch: Batch, step: int) -> StateRows:
    """Return the slots of a step: slot 0 is of the row beside; the text's state is in slot 1 or 2 in turn, and between steps it
    goes to host memory and back; a fork writes slot 3."""
    starts = batch.query_starts
    if not step:
        return StateRows(starts, np.full(2, -1, np.int32), np.array([0, 1], np.int32))
    written, read = 1 + step % 2, 2 - step % 2
    states.move(BlockCopies(offloads=[(read, 0)]))
    states.data[read].zero_()
    states.move(BlockCopies(restores=[(0, read)]))
    return StateRows(starts, np.array([0, read, read], np.int32), np.array([0, written, 3], np.int32))


def _batch(
    served: LoadedModel,
    ids: torch.Tensor,
    rows: list[tuple[int, int]],
    first: int,
    tables: np.ndarray,
    wanted: torch.Tensor,
    window: int = 0,
) -> Batch:
    """Build the batch of rows (start, count) of this text, at model positions from `first` on, with logits of the tokens
    `wanted`. KV of earlier positions does not exist, in either way. window: of layers whose windows free memory."""
    size, dtype = served.block_size, served.model.geometry.dtype
    blocks = -(-max(start + count for start, count in rows) // size)
    starts, counts = (np.array(each, np.int32) for each in zip(*rows, strict=True))
    texts = [ids.numpy()[start : start + count] for start, count in rows]
    plan = plan_by_hand(np.zeros((len(rows), 1)), starts, tables[: len(rows), :blocks])
    plan = plan._replace(counts=counts, token_ids=np.concatenate(texts).astype(np.int32))
    if window:
        behind = np.maximum(0, starts - window + 1) // size
        gone = np.arange(blocks) < behind[:, None]
        plan = plan._replace(window_table=np.where(gone, tables.size, plan.block_table).astype(np.int32))
    batch = Batch.build(plan, size, served.memory, dtype)
    (logits_at,) = served.memory.send([padded(wanted.numpy(), MIN_ROWS.get(dtype, 16))])
    return replace(batch, position_ids=batch.position_ids + first, logits_at=logits_at, num_logits=len(wanted))


@contextmanager
def _own_attention(module: Any) -> Iterator[None]:
    """Let the module use its own attention for a while. A model may contain submodels with their own configurations, so each
    configuration gets its own value back, inner ones last, since outer ones pass theirs down."""
    configs = {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}
    names = [(config, config._attn_implementation) for config in configs.values()]
    for config, _ in names:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, name in names:
            config._attn_implementation = name


@contextmanager
def _rounded_otherwise(module: Any, seed: int) -> Iterator[None]:
    """Change the input embeddings by one rounding for a while."""

    def disturb(embeddings: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, output.shape, generator=generator).to(output.device, output.dtype) * 2 - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    hook = module.get_input_embeddings().register_forward_hook(disturb)
    try:
        yield
    finally:
        hook.remove()


def _windows(module: torch.nn.Module) -> list[tuple[Any, str, int]]:
    """Find windows wider than NARROW in configurations and layers: (holder, attribute, width)."""
    holders: dict[int, Any] = {}
    for each in module.modules():
        for holder in (each, getattr(each, "config", None)):
            if holder is not None:
                holders[id(holder)] = holder
    found = []
    for holder in holders.values():
        for name in ("sliding_window", "window_size", "attention_window"):
            width = getattr(holder, name, None)
            if isinstance(width, int) and not isinstance(width, bool) and width > NARROW:
                found.append((holder, name, width))
    return found


@contextmanager
def _narrowed(windows: list[tuple[Any, str, int]]) -> Iterator[None]:
    for holder, name, _ in windows:
        setattr(holder, name, NARROW)
    try:
        yield
    finally:
        for holder, name, width in windows:
            setattr(holder, name, width)
