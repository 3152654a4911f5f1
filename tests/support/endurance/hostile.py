"""Headers of safetensors that lie: as a folder, and over the wire by a client that has not read them."""

from __future__ import annotations

import json
import secrets
import struct
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engine.values import TensorInfo
from rollout.transport import messages as m
from rollout.transport.weights import manifest
from rollout.transport.weights.files import FilesOffer
from tests.support.keyed import RawDealer

SHAPES = {
    "100,000 lengths": json.dumps([2**63 - 1] * 100_000),
    "lengths of 1": json.dumps([1] * 100_000),
    "1e999": "[1e999]",
    "2**63": f"[{2**63}]",
    "2**64 by product": f"[{2**32}, {2**32}]",
    "a number of 5,000 digits": f"[{'9' * 5000}]",
    "negative": "[-1]",
    "true": "[true]",
    "NaN": "[NaN]",
    "brackets": "[" * 50_000 + "]" * 50_000,
}
NAMES = {"a lone surrogate": r'"\ud800"', "a NUL": r'"a\u0000b"', "a long name": json.dumps("x" * 100_000)}
OFFSETS = {"offsets 1e999": "[0, 1e999]", "offsets of 2**64": f"[0, {2**64}]", "three offsets": "[0, 4, 8]"}
KINDS = (*SHAPES, *NAMES, *OFFSETS, "a length of 2**63", "a header that is no object")


def write(folder: Path, kind: str) -> Path:
    """Write a folder with one file whose header is of a kind. Returns the folder."""
    folder.mkdir(exist_ok=True)
    name, shape, offsets = NAMES.get(kind, '"a"'), SHAPES.get(kind, "[1]"), OFFSETS.get(kind, "[0, 4]")
    header = f'{{{name}: {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()
    if kind == "a header that is no object":
        header = b"[1, 2]"
    length = 2**63 if kind == "a length of 2**63" else len(header)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + bytes(4))
    return folder


def offer(address: str, folder: Path, name: str, wait: float) -> m.Refused | m.Lease | None:
    """Offer a folder to a service without having read it. Returns its answer; None: it has given none."""
    request = secrets.randbelow(2**31)
    listed = manifest.pack_manifest([TensorInfo(name, "float32", (1,), "0" * 32)])
    begin = m.Begin(request, secrets.token_hex(16), np.frombuffer(listed, np.uint8), FilesOffer(str(folder)), partial=True)
    dealer = RawDealer(address, None)
    try:
        dealer.send(m.Hello(m.PROTOCOL, secrets.token_hex(16), 1, "hostile"), begin)
        while got := dealer.receive(wait, 1):
            answer: Any = got[0]
            if isinstance(answer, m.Refused | m.Lease) and answer.request_id in (None, request):
                return answer
        return None
    finally:
        dealer.close()
