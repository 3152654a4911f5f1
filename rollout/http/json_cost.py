"""Bounds what a JSON text costs to decode, before it is decoded.

Decoding holds the interpreter lock, so no other request is served meanwhile. A token id takes some 10 ns, but an array or
object 0.3 µs, and a fraction of many digits 6 µs: 32 MiB of such would take seconds. Requests of texts and ids have few.
"""

from __future__ import annotations

import numpy as np

from rollout.http.errors import bad
from rollout.http.settings import RequestLimits

COSTLY, DIGIT, COMMA = 1, 2, 3
KINDS = np.zeros(256, np.uint8)
"""of bytes outside strings. COSTLY: of an array or object, a value of a key, a fraction or exponent"""
for _kind, _bytes in ((COSTLY, b"[{:.eE"), (DIGIT, b"0123456789"), (COMMA, b",")):
    KINDS[list(_bytes)] = _kind
RUN = 16
"""digits: aligned pieces of numbers that are longer than any token id count as costly"""


def check_cost(data: bytes | bytearray, limits: RequestLimits, what: str, param: str | None = None) -> None:
    """Raises HttpError 400 for a JSON text with more structure or values than a request needs, in some 8 ns a byte. What can be
    decoded of an invalid text is counted. what: name of the text in messages."""
    if len(data) <= limits.max_body_structure:
        return
    kinds = kinds_of(data)
    pieces = (kinds[: len(kinds) // RUN * RUN] == DIGIT).reshape(-1, RUN).all(1)
    structure = np.count_nonzero(kinds == COSTLY) + np.count_nonzero(pieces)
    if structure > limits.max_body_structure:
        raise bad(
            f"{what} has more than {limits.max_body_structure} arrays, objects, keys, fractions and long numbers "
            "(max_body_structure): send less in one request",
            param,
        )
    if np.count_nonzero(kinds == COMMA) > limits.max_body_values:
        raise bad(f"{what} has more than {limits.max_body_values} values (max_body_values): send less in one request", param)


def kinds_of(data: bytes | bytearray) -> np.ndarray:
    """Return the kind of each byte, uint8, 0 for those in strings. Escapes of quotes and backslashes are left out."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(data, np.uint8)
    quotes = np.cumsum(text == ord('"'), dtype=np.uint8)  # its parity survives that it wraps
    return KINDS[text] * (~quotes & 1)
