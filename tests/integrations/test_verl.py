"""verl's manager, router, clients and worker group over our replicas, in Ray, in an environment of verl's own.

VERL names its interpreter. verl wants an older transformers than the engine, so the two never share an environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_steps_of_a_trainer(tiny_model: Path) -> None:
    python = os.environ.get("VERL")
    if not python:
        pytest.skip("VERL names no interpreter with verl")
    command = [python, "tests/integrations/verl_program.py", str(tiny_model), sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"verl {seen['verl']}")
    assert set(seen["lengths"]) == {96} and seen["logprobs"] == seen["lengths"]
    assert set(seen["first_steps"]) == {0} and set(seen["second_steps"]) == {1}
    assert seen["logprob_error"] < 1e-4, "fp32 of transformers' own attention and sums"
    assert set(seen["stop_reasons"]) == {"completed"}, "a refresh aborts nothing"
    steps = [[step for _, step in spans] for spans in seen["third_spans"]]
    assert all(each in ([1, 2], [2]) for each in steps)
    assert seen["rejected"] == "aborted" and "best_of" in seen["refused"]
