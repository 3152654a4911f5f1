"""Reads the file of an offline wandb run back: a LevelDB log of protobuf records.

7 bytes          :W&B, 0xBEE1, version
blocks of 32 KiB (the first one holds those 7 bytes), each a row of chunks; a block's last < 7 bytes are zeros
    crc32 (4)  length (2)  type (1: whole, 2: first, 3: middle, 4: last)  data
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is not a wandb file"
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        chunk = data[at + 7 : at + 7 + length]
        at += 7 + length
        part = chunk if kind in (WHOLE, FIRST) else part + chunk
        if kind in (WHOLE, LAST):
            found.append(part)
    return found


def history(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Read the one run under `folder`: (rows of `run.log`, {metric or pattern: its step metric})."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (one for one in folder.rglob("run-*.wandb") if not one.parent.is_symlink())
    rows, axes = [], {}
    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
        if record.HasField("metric"):
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return rows, axes
