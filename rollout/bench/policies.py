"""`rollout bench policies`: which of the orders of `engine.scheduling.order` ends a batch of groups soonest.

The costs of a step are measured on the engine, then the scheduler is simulated with them (`rollout.bench.simulator`) over
distributions of lengths, children a group and sizes of the KV pool. Two of these also run on the engine: `simulator_error`.

    tail      seconds from when nine tenths of the children have ended until all have (Seer, arXiv 2511.14617, calls it so)
    ratio     the first-come order's seconds over another's: above 1 it is shorter
    most      seconds until all children but one of each group have ended

Some cases tell the engine the lengths (`known`), and have as few slots that most children wait. These are simulated with the
costs of a device as well whose steps take nearly as long with one row as with 64 (`flat`), as a GPU's do. `bound`: how many
times sooner than first-come any order could be, were there room for all KV."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from rich.console import Console

from engine.config import EngineConfig, OrderName
from engine.engine import Engine
from engine.forward.model import ModelLike
from engine.kv.block import BlockCopies
from engine.types import Group, Sampling
from rollout.bench.simulator import Costs, SimulatedBatch, SimulatedEnds, follow, least_seconds, simulate, waited_for
from rollout.models import hide_progress_bars

NAME = "policies"
LENGTHS = ("lognormal", "bimodal", "long")
KINDS = ("independent", *LENGTHS)
CHILDREN, N, POOLS = 512, (8, 16, 64), (1.0, 0.5, 1 / 3, 0.2)
"""of all groups, of one, and the pool as a share of what all need at their longest"""
MEAN_TOKENS, MOST_TOKENS, PROMPT_TOKENS = 128, 768, 64
TIGHT = 1 / 3
"""pool at which orders are compared"""
SLOTS = 16, 64, 256
"""of cases with few: most children wait"""
FLAT = Costs(tokens=(1, 64), seconds=(0.9 * 0.01 + 0.1 * 0.01 / 64, 0.01), per_draw=0.0, per_kv_token=0.0, per_block=1e-6)
"""nine tenths of a step of 64 rows are there with one"""
REAL = ("lognormal", "bimodal")
REAL_GROUPS, REAL_N, REAL_MEAN, REAL_SLOTS = 8, 8, 48, 32
ROWS, CHUNKS = (1, 2, 4, 8, 16, 32), (64, 128, 256)
FIGURES = "half", "total", "tail", "most"
DECODED = 8
"""steps at least in which all rows decode"""
WORSE = 0.98
"""the best order's total may not be longer than first-come's by more than this ratio says"""


def lengths(kind: str, groups: int, n: int, mean: int, most: int, seed: int) -> np.ndarray:
    """Draw [groups, n] lengths: "lognormal" with half of the variance between groups, since children of a hard question are all
    long; "independent", lognormal as well, with none; "bimodal", a fifth of the groups eight times as long; "long", all nearly
    as long as they may be."""
    random = np.random.default_rng(seed)
    if kind == "long":
        drawn = most * random.uniform(0.85, 1.0, (groups, n))
    elif kind == "bimodal":
        drawn = mean * np.where(random.random((groups, 1)) < 0.2, 3.4, 0.4) * np.exp(0.2 * random.normal(size=(groups, n)))
    else:
        shared, own = random.normal(size=(groups, 1)), random.normal(size=(groups, n))
        alike = 0.0 if kind == "independent" else 0.5
        drawn = mean * np.exp(0.9 * (alike**0.5 * shared + (1 - alike) ** 0.5 * own) - 0.9**2 / 2)
    return np.clip(drawn, 2, most).astype(int)


class Case(NamedTuple):
    """What is simulated, under every order."""

    lengths: str
    n: int
    pool: float
    known: float = 0.0
    """the engine is told at most so many times the lengths; 0 = nothing"""
    slots: int = 0
    """0 = as many as the engine has"""
    flat: bool = False
    """with the costs FLAT"""

    def work(self, scale: float, seed: int) -> SimulatedBatch:
        mean, most = (max(4, round(tokens * scale)) for tokens in (MEAN_TOKENS, MOST_TOKENS))
        drawn = lengths(self.lengths, CHILDREN // self.n, self.n, mean, most, seed)
        factors = np.random.default_rng(seed).uniform(1.0, max(1.0, self.known), drawn.shape)
        told = np.minimum(drawn * factors, most).astype(int) if self.known else None
        return SimulatedBatch(PROMPT_TOKENS, most, drawn, told)


def few_slots() -> list[Case]:
    """Return the cases in which most children wait for a slot: lengths known, in a roomy pool and one that is tight even so;
    known to a factor of two; and not known, but for what siblings show."""
    whole = [Case(kind, N[0], 1.0, 1.0, slots, flat) for flat in (False, True) for kind in KINDS for slots in SLOTS]
    tight = [Case(kind, N[0], 1 / 12, 1.0, SLOTS[1]) for kind in LENGTHS]
    vague = [Case(KINDS[0], N[0], 1.0, known, SLOTS[1], flat) for known in (2.0, 0.0) for flat in (False, True)]
    return [*whole, *tight, *vague]


def measure(folder: Path, config: EngineConfig, scale: float, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield the costs, a row an order and case (means of `repeat` draws of the lengths), the runs on the engine, and the
    summary."""
    from engine.devices import device_of
    from engine.forward.model import open_model

    hide_progress_bars()
    config = msgspec.structs.replace(config, model=str(folder), block_size=16, drafts=0)
    model = open_model(config, device_of(config).memory)
    costs = measure_costs(model, config)
    yield {"workload": NAME, "costs": msgspec.to_builtins(costs)}
    rows = []
    for case in [*(Case(*each) for each in product(LENGTHS, N, POOLS)), *few_slots()]:
        for row in compared(case, config, FLAT if case.flat else costs, scale, repeat):
            rows.append(row)
            yield row
    errors = []
    for kind in REAL:
        row = on_engine(kind, model, config, costs, scale)
        errors.append(row["error"])
        yield row
    yield summary(rows) | {"simulator_error": max(errors), "model": str(folder)}


# ── what a step costs ─────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_costs(model: ModelLike, config: EngineConfig) -> Costs:
    """Time steps of an engine: of some rows that decode, of chunks of prompts, over long contexts, and copies of blocks."""
    most = max(max(CHUNKS), max(ROWS))
    options = {"kv_tokens": 64 * most, "cpu_offload_gib": 0.05, "max_num_seqs": max(ROWS), "max_batch_tokens": most}
    engine = Engine(msgspec.structs.replace(config, kv_gib=None, **options), model)
    decode = {rows: step_seconds(engine, 1, rows, 4) for rows in ROWS}
    chunk = {tokens: prompt_seconds(engine, tokens) for tokens in CHUNKS}
    over_long = step_seconds(engine, 8, 1, 256)
    row = (decode[32] - decode[1]) / 31
    token = (chunk[256] - chunk[64]) / (256 - 64)
    per_draw = max(0.0, row - token)
    seconds = np.maximum.accumulate([decode[rows] - rows * per_draw for rows in ROWS] + [chunk[t] - per_draw for t in CHUNKS])
    return Costs(
        tokens=(*ROWS, *CHUNKS),
        seconds=tuple(float(each) for each in seconds),
        per_draw=per_draw,
        per_kv_token=max(0.0, (over_long - decode[8]) / (8 * 256)),
        per_block=copy_seconds(engine),
    )


def step_seconds(engine: Engine, groups: int, n: int, prompt_tokens: int) -> float:
    """Return the median seconds of steps in which all children of the groups decode."""
    random, seconds = np.random.default_rng(groups * n), []
    for number in range(groups):
        prompt = random.integers(16, engine.vocab_size, prompt_tokens).astype(np.int32)
        engine.submit(Group(f"{number}", prompt, Sampling(n=n, max_tokens=DECODED + 4 * groups, ignore_eos=True, seed=number)))
    while engine.has_work:
        before, started = engine.counters.decode_tokens, time.perf_counter()
        engine.step()
        if engine.counters.decode_tokens == before + groups * n:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def prompt_seconds(engine: Engine, tokens: int) -> float:
    """Return the median seconds of a step that computes a prompt and draws one token."""
    random, seconds = np.random.default_rng(tokens), []
    for number in range(3):
        prompt = random.integers(16, engine.vocab_size, tokens).astype(np.int32)
        engine.submit(Group(f"{number}", prompt, Sampling(max_tokens=1, ignore_eos=True, seed=number)))
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def copy_seconds(engine: Engine, blocks: int = 16) -> float:
    """Return the seconds for which a block is copied from one pool to the other, while nothing runs."""
    pairs = [(slot, slot) for slot in range(blocks)]
    engine.worker.kv.move(BlockCopies(offloads=pairs))
    started = time.perf_counter()
    engine.worker.kv.move(BlockCopies(offloads=pairs))
    engine.worker.kv.move(BlockCopies(restores=pairs))
    return (time.perf_counter() - started) / (2 * blocks)


# ── simulated and real ────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(case: Case, config: EngineConfig, costs: Costs, scale: float, repeat: int) -> list[dict[str, Any]]:
    """Simulate a case under every order. Returns a row for each."""
    ends: dict[str, list[SimulatedEnds]] = {order: [] for order in get_args(OrderName)}
    slots, bounds = case.slots or config.most_seqs, []
    for seed in range(repeat):
        work = case.work(scale, seed)
        need = work.needed_blocks(config.block_size)
        pool = max(round(need * case.pool), work.longest_blocks(config.block_size))
        for order in ends:
            options = {"kv_tokens": pool * config.block_size, "max_num_seqs": slots, "order": order}
            ordered = msgspec.structs.replace(config, kv_gib=None, **options)
            ends[order].append(simulate(work, ordered, costs, pool, need))
        bounds.append([getattr(ends["first_come"][-1], name) / bound(work, costs, ordered, name) for name in ("most", "total")])
    first = ends["first_come"]
    most, total = (round(geometric([*each]), 4) for each in zip(*bounds, strict=True))
    return [
        {"workload": NAME, **case._asdict(), "order": order, "most_bound": most, "total_bound": total}
        | {f"{name}_seconds": round(mean([getattr(each, name) for each in runs]), 4) for name in FIGURES}
        | {
            f"{name}_ratio": round(
                geometric([ratio(getattr(a, name), getattr(b, name)) for a, b in zip(first, runs, strict=True)]), 4
            )
            for name in FIGURES
        }
        | {"steps": round(mean([each.steps for each in runs])), "offloads": round(mean([each.offloads for each in runs]))}
        for order, runs in ends.items()
    ]


def bound(work: SimulatedBatch, costs: Costs, config: EngineConfig, name: str) -> float:
    """Return the seconds below which no order ends all children, or "most": all but one of each group."""
    groups, n = work.lengths.shape
    drawn, steps = waited_for(work.lengths, n - 1 if name == "most" and n > 1 else n)
    slots = min(config.most_seqs, work.lengths.size)
    computed = drawn + groups * work.prompt_tokens
    return costs.per_draw * drawn + least_seconds(costs.table(config.most_tokens), computed, max(steps, drawn / slots))


def on_engine(kind: str, model: ModelLike, config: EngineConfig, costs: Costs, scale: float) -> dict[str, Any]:
    """Run one case on the engine as well, in the default order. Returns the row with both."""
    mean_tokens = max(4, round(REAL_MEAN * scale))
    work = SimulatedBatch(PROMPT_TOKENS, 4 * mean_tokens, lengths(kind, REAL_GROUPS, REAL_N, mean_tokens, 4 * mean_tokens, 0))
    need = work.needed_blocks(config.block_size)
    pool = max(round(need * TIGHT), work.longest_blocks(config.block_size))
    options = {"kv_tokens": pool * config.block_size, "max_num_seqs": REAL_SLOTS, "max_batch_tokens": max(CHUNKS)}
    config = msgspec.structs.replace(config, kv_gib=None, cpu_offload_gib=0.25, **options)
    engine = Engine(config, model)
    follow(engine.scheduler, work.lengths)
    for group in work.groups():
        engine.submit(group)
    ends, started = list[float](), time.perf_counter()
    while engine.has_work:
        ended = engine.step()
        ends += [time.perf_counter() - started] * len(ended)
    real = SimulatedEnds(np.array(ends), engine.counters.steps, engine.counters.offloads, most=ends[-1])
    simulated = simulate(work, config, costs, pool, engine.scheduler.store.host.size)
    return {
        "workload": NAME,
        "lengths": kind,
        "engine_seconds": round(real.total, 4),
        "simulated_seconds": round(simulated.total, 4),
        "engine_tail_seconds": round(real.tail, 4),
        "simulated_tail_seconds": round(simulated.tail, 4),
        "engine_steps": real.steps,
        "simulated_steps": simulated.steps,
        "error": round(abs(simulated.total / real.total - 1), 4),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Choose the best order: the shortest tail where the pool is a third of the need, by the geometric mean over lengths and n,
    of those whose total is no longer than first-come's."""
    figures = ratios([row for row in rows if row["pool"] == TIGHT and not row["slots"]], ("total_ratio", "tail_ratio"))
    known = {
        flat: ratios([row for row in rows if row["known"] == 1 and row["flat"] == flat], ("total_ratio", "most_ratio"))
        for flat in (False, True)
    }
    best = max(
        (order for order in figures if figures[order]["total_ratio"] >= WORSE), key=lambda name: figures[name]["tail_ratio"]
    )
    return {
        "workload": NAME,
        "summary": True,
        "best": best,
        "tail_ratio_to_first_come": round(figures[best]["tail_ratio"], 4),
        "total_ratio_to_first_come": round(figures[best]["total_ratio"], 4),
        "orders": rounded(figures),
        "known_lengths": rounded(known[False]),
        "known_lengths_flat": rounded(known[True]),
    }


def ratios(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the geometric means of some figures of the rows, by order."""
    return {
        order: {name: geometric([row[name] for row in rows if row["order"] == order]) for name in names}
        for order in dict.fromkeys(row["order"] for row in rows)
    }


def rounded(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {order: {name: round(value, 4) for name, value in each.items()} for order, each in figures.items()}


def ratio(first: float, other: float) -> float:
    return first / max(other, 1e-9) if first else 1.0


def mean(values: list[float]) -> float:
    return float(np.mean(values))


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def print_row(console: Console, row: dict[str, Any]) -> None:
    if "summary" in row:
        tail, total = row["tail_ratio_to_first_come"], row["total_ratio_to_first_come"]
        console.print(
            f"{NAME}: best {row['best']}; with a third of the KV first-come's tail is {tail:.2f} × as long, its total "
            f"{total:.2f} ×; simulator off by {100 * row['simulator_error']:.1f} %"
        )
    elif "error" in row:
        console.print(
            f"  {row['lengths']}: {row['engine_seconds']:.2f} s on the engine ({row['engine_steps']} steps), "
            f"{row['simulated_seconds']:.2f} s simulated ({row['simulated_steps']})"
        )
    elif "order" in row:
        console.print(
            f"  {row['lengths']}, n = {row['n']}, pool {row['pool']:.2f}, {row['order']}: {row['total_seconds']:.1f} s, "
            f"tail {row['tail_seconds']:.1f} s ({row['tail_ratio']:.2f} ×)" + of_few_slots(row)
        )
    else:
        console.print(f"{NAME}: a step of one token {1e3 * row['costs']['seconds'][0]:.1f} ms; {CHILDREN} children")


def of_few_slots(row: dict[str, Any]) -> str:
    """Return what a line says besides of a case with few slots; of others nothing."""
    if not row["slots"]:
        return ""
    kind = " flat" if row["flat"] else ""
    return (
        f"; {row['slots']} slots{kind}, told {row['known']:.0f}: most {row['most_ratio']:.2f} of {row['most_bound']:.2f} ×, "
        f"all {row['total_ratio']:.2f} of {row['total_bound']:.2f} ×"
    )


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw tail ratios over the size of the pool, a panel for each distribution of lengths. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    for axis, kind in zip(figure.subplots(1, len(LENGTHS)), LENGTHS, strict=True):
        for order in get_args(OrderName):
            mine = [row for row in rows if row.get("order") == order and row["lengths"] == kind and not row["slots"]]
            tails = [geometric([row["tail_ratio"] for row in mine if row["pool"] == pool]) for pool in POOLS]
            axis.plot(POOLS, tails, marker="o", label=order)
        axis.set(title=kind, xlabel="KV pool / need", ylabel="tail, ratio to first come")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path)
