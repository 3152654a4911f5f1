"""The name of an arithmetic is read as it is written, whatever stands in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.values.arithmetic import FP8, INT8, LATENT, TREE, Arithmetic

BASES = ["fma/1", "fma/1/batch", "torch/2.13.0+dpbf16/1", "torch/2.13.0/fused+triton/3+library-12.8-a1b2/1", "", "x+y+z"]


@given(
    st.sampled_from(BASES), st.booleans(), st.sampled_from(["", TREE, "ranks2/1", "ranks16/1"]), st.booleans(), st.booleans()
)
def test_a_name_is_read_as_it_was_written(base: str, int8: bool, sums: str, latent: bool, fp8: bool) -> None:
    made = Arithmetic(base, int8, sums, latent, fp8)
    assert Arithmetic.parse(str(made)) == made and made.by_batch == ("/batch" in base)


@given(st.text(alphabet=f"{INT8}{TREE}{LATENT}{FP8}+ranks0123456789/", max_size=60))
def test_any_name_comes_back(name: str) -> None:
    """Also one of another version, of which some parts are not known."""
    assert str(Arithmetic.parse(name)) == name


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (f"fma/1+{LATENT}+{INT8}", f"fma/1+{LATENT}"),
        ("fma/1+int8_g64/2", "fma/1+int8_g64/2"),
        (f"fma/1+{FP8}x", f"fma/1+{FP8}x"),
        ("fma/1+ranks/1", "fma/1+ranks/1"),
    ],
)
def test_what_is_out_of_place_or_of_another_version_stays_in_the_base(name: str, base: str) -> None:
    assert Arithmetic.parse(name).base == base
