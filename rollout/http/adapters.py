"""LoRA adapters from a folder, by name, as in vLLM and SGLang.

The service has one set of weights, so one adapter at a time is merged into it (`RolloutClient.refresh_lora`). While it is
loaded, its name is another name of the model, and every name samples the sum. This suits a trainer of one policy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from rollout.engine.values import KVPolicy
from rollout.http.control import ServiceControl, step_of
from rollout.http.endpoints import Endpoints
from rollout.http.errors import HttpError, bad, not_served
from rollout.http.generation import checked_name
from rollout.http.upstream import LoadedAdapter


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /load_lora_adapter and /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """folder with adapter_config.json and adapter_model.safetensors, readable by this process"""
    load_inplace: bool = False
    """accepted and ignored: loading a name again always replaces its adapter"""
    lora_int_id: int | None = None
    base_model_name: str | None = None
    pinned: bool | None = None


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /unload_lora_adapter and /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    """The routes. names: of the model."""

    def __init__(self, control: ServiceControl, names: Sequence[str]) -> None:
        self._control, self._upstream, self._names = control, control.upstream, names

    def routes(self, endpoints: Endpoints) -> list[Route]:
        post = endpoints.post
        return [
            post("/load_lora_adapter", self.load, LoadAdapter),
            post("/v1/load_lora_adapter", self.load, LoadAdapter),
            post("/unload_lora_adapter", self.unload, UnloadAdapter),
            post("/v1/unload_lora_adapter", self.unload, UnloadAdapter),
        ]

    async def load(self, request: Request, body: LoadAdapter) -> dict[str, Any]:
        """Merge an adapter into the base weights."""
        name, base = checked_name(body.lora_name, "lora_name"), body.base_model_name
        if name in self._names:
            raise bad(f"lora_name={name!r}: is the model's own name; give another", "lora_name")
        if base is not None and base not in self._names:
            raise HttpError(404, f"the model {base[:200]!r} is unknown", "base_model_name")
        with self._upstream.changing_weights():
            loaded = self._upstream.adapter
            if loaded is not None and loaded.name != name:
                raise bad(f"adapter {loaded.name!r} is loaded, and only one at a time can be: unload it first", "lora_name")
            version = await self._merge(body.lora_path, 1.0, step_of(body.lora_path), self._control.kv_policy)
            self._upstream.adapter = LoadedAdapter(body.lora_name, body.lora_path)
        return done(version, {body.lora_name: body.lora_path})

    async def unload(self, request: Request, body: UnloadAdapter) -> dict[str, Any]:
        """Restore the base weights of the tensors that the adapter's folder names."""
        with self._upstream.changing_weights():
            loaded = self._upstream.adapter
            if loaded is None or loaded.name != body.lora_name:
                raise HttpError(404, f"no adapter {body.lora_name[:200]!r} is loaded", "lora_name")
            version = await self._merge(loaded.path, 0.0, None, self._control.kv_policy)
            self._upstream.adapter = None
        return done(version, {})

    async def _merge(self, path: str, scale: float, version: int | None, kv: KVPolicy) -> int:
        """Add `scale` times the adapter to the base weights. Returns the live version. Raises as `Upstream.refresh`, and
        HttpError if peft is not installed."""
        merge = self._upstream.client.refresh_lora
        try:
            await self._upstream.control(partial(check_folder, path))
            return await self._upstream.refresh(
                lambda wanted: merge(path, scale=scale, version=wanted, kv=kv), path, version, "lora_path"
            )
        except ModuleNotFoundError as error:
            instead = f"{error.name} is not installed in the gateway's environment: pip install 'rl-rollout[lora]'"
            raise not_served("an adapter", instead) from None


def check_folder(path: str) -> None:
    """Raise HttpError for an adapter whose files are missing (404) or not complete (500), as in vLLM: clients of a network file
    system, which shows files late, try again after these two."""
    from safetensors import SafetensorError, safe_open

    if not path or "\0" in path:
        return  # refused by name later
    config, tensors = (os.path.join(path, name) for name in ("adapter_config.json", "adapter_model.safetensors"))
    try:
        with open(config, "rb") as file:
            msgspec.json.decode(file.read(), type=dict)
        with safe_open(tensors, "np"):
            pass
    except (FileNotFoundError, NotADirectoryError):
        raise HttpError(404, f"{path[:500]} has no adapter_config.json and adapter_model.safetensors", "lora_path") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, SafetensorError) as error:
        why = f"{path[:500]} has an adapter that cannot be read: {error}; is it still being written?"
        raise HttpError(500, why, "lora_path", passes=True) from None
    except OSError as error:
        raise HttpError(400, f"lora_path: {error.strerror or error}") from None


def done(version: int, adapters: dict[str, str]) -> dict[str, Any]:
    return {"status": "ok", "success": True, "weight_version": str(version), "loaded_adapters": adapters}
