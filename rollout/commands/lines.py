"""The lines that commands print about a service, as text. No sockets, no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from rollout.config import Config

GIB = 2**30
SLOW = ("plain", "torch")
"""instruction sets whose reason is worth a line"""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: 1 sample, 1,024 samples. plural: if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def model_name(status: Mapping[str, Any]) -> str:
    """Return the name by which the model of a service is known: as it was given, or that of its folder."""
    name: str = status.get("service", {}).get("served_model_name") or PurePath(status["model"]).name
    return name


def short(number: float) -> str:
    """Write a large number with three digits: 1.2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (size if unit != 'k' else 1e3):.3g}{unit}"
    return f"{number:,.0f}"


def bytes_of(number: float) -> str:
    """Write a size: 269 MB, 14.9 GB, 3.0 KB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def gib(number: float) -> str:
    """Write a size in GiB, or a small one in MiB."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 100 else f"{number / 2**20:,.1f} MiB"


def duration(seconds: float) -> str:
    """Write a duration as H:MM:SS."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}"


def weights_bytes(folder: Path) -> int:
    """Return the size of a model's files of weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def engine_lines(status: Mapping[str, Any], threads: int | None) -> list[str]:
    """Describe what an engine computes with and the size of its KV pools. threads: of the CPU; None on a GPU."""
    lines = []
    if isa := status.get("isa"):
        on = "" if threads is None else f" on {counted(threads, 'thread')}"
        if ranks := status.get("ranks"):
            on += f" of each of {counted(len(ranks), 'rank')}"
        kernels = {"cuda": "computes on CUDA", "torch": "computes with torch alone"}.get(isa, f"computes with {isa} kernels")
        lines.append(f"{kernels}{on}, {status['attention']} attention, arithmetic {status['arithmetic']}")
        slow = isa in SLOW and status.get("isa_reason") or status.get("computed_by_reason")
        if slow:
            lines.append(f"slower than possible: {slow}")
    if (kv := status.get("kv", {})).get("device_blocks"):
        lines.append(f"KV for {kv_size(kv, 'device')} on the device, {kv_size(kv, 'host')} in host memory")
    if (windows := status.get("windows", {})).get("device_blocks"):
        sizes = [gib(windows[f"{pool}_blocks"] * windows["block_bytes"]) for pool in ("device", "host")]
        layers = f"{windows['window_layers']} layers with a window of {windows['window_tokens']:,} tokens"
        lines.append(f"KV of {layers}: another {sizes[0]} on the device and {sizes[1]} in host memory")
    if slots := status.get("states", {}).get("slots", 0):
        lines.append(f"{slots} slots of recurrent state, {bytes_of(status['states']['bytes'])} each")
    return lines


def kv_size(kv: Mapping[str, Any], pool: str) -> str:
    blocks = kv[f"{pool}_blocks"]
    if not blocks:
        return "no tokens"
    return f"{blocks * kv['block_size']:,} tokens ({gib(blocks * kv['block_bytes'])})"


def clients_of(config: Config) -> str:
    """Say who may connect."""
    router = config.fleet.join
    if router is not None and "://" not in router:
        return "for its router alone"  # by the keys that it makes for itself
    return "for this user on this host" if config.service.keys is None else "for those with keys"


def next_lines(endpoint: str, config: Config) -> list[str]:
    """Name the commands that a person may type next, in another terminal."""
    if config.fleet.join is not None:
        return []
    if config.service.keys is not None:
        keys = shlex.quote(config.service.keys)
        return [
            f"make a key for a client: rollout keys add NAME --role rollout read --file {keys}",
            f"watch it: rollout top --address {Path(config.service.keys).parent / 'NAME.json'}",
        ]
    program = f"from rollout import RolloutClient; print(*RolloutClient('{endpoint}').generate([[1, 2, 3]]))"
    return [f"watch it: rollout top --address {endpoint}", f'try it: python -c "{program}"']


def stopping_line(unfinished: int) -> str:
    return f"stopping: {counted(unfinished, 'sample')} aborted" if unfinished else "stopping: nothing was running"


def stopped_line(status: Mapping[str, Any]) -> str:
    """Describe what a service did. status: its last one."""
    row = status["metrics"]
    samples, tokens = int(row.get("rollout/samples", 0)), row.get("rollout/sample_tokens", 0.0)
    return f"stopped after {status['service']['uptime_s']:,.0f} s, {counted(samples, 'sample')}, {short(tokens)} tokens"
