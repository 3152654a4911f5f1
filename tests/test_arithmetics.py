"""The machines of `make test-arithmetic`: that one is imitated, and that what depends on arithmetic runs as on each."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.engine.cpu import isa
from tests.support.arithmetics import APART, MACHINES, ROOT, WITHOUT_VECTORS, chosen_tests, missing

SAME_KERNELS = {"Zen": "Haswell", "Prescott": "Katmai"}
"""what OpenBLAS answers to some names where it was built without kernels of their own, as in numpy's wheels"""


def openblas_core() -> str:
    """What numpy's OpenBLAS takes this CPU for; "" where numpy has another library."""
    found = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64*"))
    if not found:
        return ""
    core = ctypes.CDLL(str(found[0])).scipy_openblas_get_corename64_
    core.restype = ctypes.c_char_p
    return str(core().decode())


def test_the_variables_are_heard() -> None:
    """Of whichever machine this process is: what each library says that it runs. oneDNN, MKL and libm cannot be asked."""
    asked = os.environ.get
    assert isa.best() == asked("TESTS_ISA", isa.best()) or isa.lacking(asked("TESTS_ISA", "plain"))
    capability = asked("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability())
    assert torch.backends.cpu.get_cpu_capability().lower() == capability.lower()
    hidden = asked("NPY_DISABLE_CPU_FEATURES", "").split()
    assert not any(np._core._multiarray_umath.__cpu_features__[name] for name in hidden)
    core = openblas_core()
    wanted = asked("OPENBLAS_CORETYPE", core)
    assert core.lower() in (wanted.lower(), SAME_KERNELS.get(wanted, "").lower())


TOLD = """
import math, hashlib, numpy, torch
from torch.nn.functional import scaled_dot_product_attention, silu
torch.set_num_threads(1)
a, b = torch.randn(2, 96, 96, generator=torch.Generator().manual_seed(0))
made = {"torch's products": a[5:7] @ b, "torch's exp": a.exp(), "torch's silu": silu(a), "torch's sums": a.log_softmax(-1),
        "numpy's products": torch.from_numpy(a.numpy() @ b.numpy()), "numpy's exp": torch.from_numpy(numpy.exp2(a.numpy())),
        "libm's exp": torch.tensor([math.exp(x) for x in a.flatten().tolist()], dtype=torch.float64)}
for name, each in made.items():
    print(name, hashlib.md5(each.numpy().tobytes()).hexdigest(), sep=": ")
"""


@pytest.mark.long  # `make test-arithmetic` runs it
@pytest.mark.skipif(bool(isa.lacking("avx512")) or "TESTS_ISA" in os.environ, reason="this CPU is itself one of them")
def test_their_bits_are_others() -> None:
    """The negative control: the libraries of the two that are furthest from a CPU with AVX-512 have other bits than it has."""
    machines: dict[str, dict[str, str]] = {"this": {}} | {name: MACHINES[name].environment for name in ("zen3", "nehalem")}
    running = {
        name: subprocess.Popen([sys.executable, "-c", TOLD], env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        for name, variables in machines.items()
    }
    told = {name: set(process.communicate(timeout=100)[0].splitlines()) for name, process in running.items()}
    differ = {name: {line.partition(":")[0] for line in lines - told["this"]} for name, lines in told.items()}
    print(differ)  # torch's products and exp are MKL's, which takes an AMD for older than it is
    assert all(len(lines) == 7 for lines in told.values())
    products = set() if openblas_core() == "Haswell" else {"numpy's products"}  # what OpenBLAS takes an AMD Zen 5 for
    assert differ["zen3"] >= {"torch's sums", "numpy's exp"} | products
    assert differ["nehalem"] >= {"torch's sums", "torch's silu", "numpy's products", "numpy's exp", "libm's exp"}


def test_what_depends_on_arithmetic_runs_as_on_each() -> None:
    """By itself: the engine's tests with torch in them, and Triton's interpreter where numpy is another."""
    chosen = {name: set(chosen_tests(machine)) for name, machine in MACHINES.items()}
    assert all("tests/engine/test_cpu_products.py" in paths for paths in chosen.values())
    assert {name for name, paths in chosen.items() if "tests/rollout/test_exact.py" not in paths} == {"nehalem"}
    assert {name for name, paths in chosen.items() if "tests/engine/test_exact.py" in paths} == {"zen3", "nehalem"}
    assert not APART.keys() & chosen["zen3"] and all(
        (ROOT / path).exists() for path in [*chosen["zen3"], *APART, *WITHOUT_VECTORS]
    )


def test_what_a_cpu_cannot_imitate_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    assert {name for name, machine in MACHINES.items() if not missing(machine)} == {"zen3", "nehalem", "mixed"}
