"""prime-rl's orchestrator client and slime's helpers, out of checkouts of theirs: neither is on PyPI.

PRIME_RL and SLIME name the checkouts. What prime-rl's module imports of the rest of it, a logger and a type, is stood in.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support import adapters
from tests.support.waiting import until

pytestmark = pytest.mark.integrations


def checkout(name: str) -> Path:
    path = os.environ.get(name)
    if not path:
        pytest.skip(f"{name} names no checkout")
    return Path(path)


@pytest.fixture
def prime_rl(monkeypatch: pytest.MonkeyPatch) -> Any:
    source = checkout("PRIME_RL") / "src/prime_rl/utils/client.py"
    shared, logger = ModuleType("prime_rl.configs.shared"), ModuleType("prime_rl.utils.logger")
    shared.ClientConfig = SimpleNamespace  # type: ignore[attr-defined]
    logger.get_logger = lambda: logging.getLogger("prime_rl")  # type: ignore[attr-defined]
    for module in (ModuleType("prime_rl"), ModuleType("prime_rl.configs"), ModuleType("prime_rl.utils"), shared, logger):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("prime_rl.utils.client", source)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_prime_rl_s_orchestrator_client(live: Any, prime_rl: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = SimpleNamespace(
        base_url=f"{live.url}/v1", admin_base_url=None, api_key_var="NO_SUCH_KEY", headers={}, headers_from_env={},
        skip_model_check=False, wait_for_ready_timeout=60,
    )  # fmt: skip
    version = live.client.status()["version"] + 3
    folder = tmp_path / f"step_{version}"
    AutoModelForCausalLM.from_pretrained(live.folder).save_pretrained(folder)

    async def run() -> None:
        pool = prime_rl.InferencePool(config, "tiny", train_client_type="renderer")
        assert pool.train_client.base_url == config.base_url
        await pool.wait_for_ready("tiny", timeout=30)
        with pytest.raises(ValueError, match="was not found"):
            await pool.wait_for_ready("another", timeout=30)
        await pool.update_weights(folder, step=version)
        with pytest.raises(httpx.HTTPStatusError, match="400"):  # at once: prime-rl repeats 5xx only
            await pool.update_weights(tmp_path / "step_nothing", step=version + 1)
        adapter = adapters.write(tmp_path / f"step_{version + 4}", width=32)
        await pool.update_weights(adapter, lora_name="r4-a8", step=version + 4)
        pool.update_model_name("r4-a8")
        await prime_rl.maybe_check_has_model(pool._admin_clients, "r4-a8")
        await prime_rl.unload_lora_adapter(pool._admin_clients, "r4-a8")
        await pool.stop()

    asyncio.run(run())
    status = live.client.status()
    assert status["version"] == version + 5 and status["state"] == "running"


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(checkout("SLIME")))
    modules = ("slime.utils.http_utils", "slime.backends.sglang_utils.server_control", "slime.backends.sglang_utils.external")
    return [importlib.import_module(name) for name in modules]


def test_slime_s_external_engine(live: Any, slime: Any) -> None:
    http_utils, server_control, external = slime
    (info,) = external.discover_external_engines([live.url])
    assert (info.url, info.num_gpus, info.worker_type, info.is_pd_worker) == (live.url, 1, "regular", False)
    assert info.parallel_config["tp_size"] == 1
    http_utils.init_http_client(SimpleNamespace(rollout_num_engines=1, sglang_server_concurrency=8, use_distributed_post=False))
    params = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8000, "stop": None, "stop_token_ids": None,
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
        "ignore_eos": True,
    }  # fmt: skip
    answers: list[Any] = []
    body = {"input_ids": [5, 6], "sampling_params": params, "return_logprob": True}

    async def generate_and_abort() -> None:
        task = asyncio.create_task(http_utils.post(f"{live.url}/generate", body))
        await asyncio.to_thread(until, lambda: live.client.status()["running"] > 0 or task.done())
        workers = (await http_utils.get(f"{live.url}/workers"))["workers"]
        await server_control.abort_servers_until_idle([worker["url"] for worker in workers])
        answers.append(await task)

    asyncio.run(generate_and_abort())
    meta = answers[0]["meta_info"]
    assert (
        meta["finish_reason"]["type"] in ("abort", "stop") and len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    )
