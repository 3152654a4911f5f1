"""The arithmetic that an engine computes, as a value: docs/decisions/arithmetic.md."""

from __future__ import annotations

import re
from typing import NamedTuple

BATCH = "/batch"
"""in `Arithmetic.base` if bits depend on the other rows of a step"""
TREE = "tree8/1"
"""`Arithmetic.sums` if products whose inputs tensor parallelism cuts are summed in a tree over eight slices"""
RANKS = "ranks{}/1"
"""the same with the number of ranks, if each rank's sum is the library's, rounded to the model's dtype, and these are added in
the order of the ranks"""
INT8, LATENT, FP8 = "int8_g64/1", "latent/1", "fp8_e4m3/1"
"""parts of a name: weights in eight bits, 64 inputs to a scale; latents stored by latent attention; KV in fp8"""
NAME = re.compile(
    rf"(?P<base>.*?)(?P<int8>\+{INT8})?(?:\+(?P<sums>{TREE}|{RANKS.format('[0-9]+')}))?(?P<latent>\+{LATENT})?(?P<fp8>\+{FP8})?"
)


class Arithmetic(NamedTuple):
    """What an engine computes with: engines with equal names, weights, tokens, seeds and torch versions give equal samples, to
    the bit. `str` makes the name that messages and files have, and `parse` reads it.

    Example:
        Arithmetic.parse("fma/1+tree8/1+latent/1") == Arithmetic("fma/1", sums=TREE, latent=True)
    """

    base: str
    """versioned name of the products, "+" that of attention if it is another one"""
    int8: bool = False
    """every nn.Linear multiplies in eight bits"""
    sums: str = ""
    """TREE, or RANKS with a number; "": sums are whole"""
    latent: bool = False
    """layers of latent attention store latents"""
    fp8: bool = False
    """KV is stored in fp8"""

    @classmethod
    def parse(cls, name: str) -> Arithmetic:
        """Read a name; what is not known of it stays in `base`."""
        found = NAME.fullmatch(name)
        assert found is not None, "base matches what the others do not"
        given = found.groupdict()
        return cls(given["base"], bool(given["int8"]), given["sums"] or "", bool(given["latent"]), bool(given["fp8"]))

    def __str__(self) -> str:
        parts = (INT8 if self.int8 else "", self.sums, LATENT if self.latent else "", FP8 if self.fp8 else "")
        return "+".join([self.base, *filter(None, parts)])

    @property
    def by_batch(self) -> bool:
        """Whether the bits of a token depend on the other rows of its step."""
        return BATCH in self.base
