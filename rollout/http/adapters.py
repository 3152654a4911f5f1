"""LoRA adapters in a folder, as vLLM's and SGLang's servers load them by name.

There is one set of weights here, so one adapter at a time, added to it by `RolloutClient.refresh_lora`: while it is loaded its
name is one more name of the model, and every name samples the sum. That is what a trainer of one policy wants; several adapters
side by side are not served.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from engine.types import KVPolicy, Refreshed
from rollout.http.answers import json
from rollout.http.app import Answer, BodyReader, Route
from rollout.http.control import from_folder, step_of, version_above
from rollout.http.data import CompletionRoutes, name_of
from rollout.http.errors import HttpError, bad, not_served
from rollout.http.upstream import LoadedAdapter


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /load_lora_adapter and /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """a folder with adapter_config.json and adapter_model.safetensors, that this process sees"""
    load_inplace: bool = False
    """may be said: a name that is loaded is always replaced"""
    lora_int_id: int | None = None
    base_model_name: str | None = None
    pinned: bool | None = None


class Unload(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /unload_lora_adapter and /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    """The routes, for administrators."""

    def __init__(self, data: CompletionRoutes, bodies: BodyReader) -> None:
        self._data, self._upstream, self._bodies = data, data.upstream, bodies
        self._load, self._unload = msgspec.json.Decoder(Load), msgspec.json.Decoder(Unload)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/load_lora_adapter", self.load),
            Route("POST", "/v1/load_lora_adapter", self.load),
            Route("POST", "/unload_lora_adapter", self.unload),
            Route("POST", "/v1/unload_lora_adapter", self.unload),
        ]

    async def load(self, request: Request) -> Answer:
        asked = await self._bodies.decode(request, self._load)
        name = name_of(asked.lora_name, "lora_name")
        if asked.lora_name in self._data.names:
            raise bad(f"lora_name={name!r}: is the model's own name; give another", "lora_name")
        if asked.base_model_name is not None and asked.base_model_name not in self._data.names:
            raise HttpError(404, f"the model {asked.base_model_name[:200]!r} is not here", "base_model_name")
        with self._upstream.changing_weights():
            loaded = self._upstream.adapter
            if loaded is not None and loaded.name != name:
                raise bad(f"adapter {loaded.name!r} is loaded, and there is one at a time: unload it first", "lora_name")
            version = await self._refresh(asked.lora_path, 1.0, step_of(asked.lora_path), self._upstream.kv)
            self._upstream.adapter = LoadedAdapter(asked.lora_name, asked.lora_path)
        return json({**done(version), "loaded_adapters": {asked.lora_name: asked.lora_path}})

    async def unload(self, request: Request) -> Answer:
        """Put the base weights back: the adapter's folder says which tensors these are."""
        asked = await self._bodies.decode(request, self._unload)
        with self._upstream.changing_weights():
            loaded = self._upstream.adapter
            if loaded is None or loaded.name != asked.lora_name:
                raise HttpError(404, f"no adapter {asked.lora_name[:200]!r} is loaded", "lora_name")
            version = await self._refresh(loaded.path, 0.0, None, self._upstream.kv)
            self._upstream.adapter = None
        return json({**done(version), "loaded_adapters": {}})

    async def _refresh(self, path: str, scale: float, version: int | None, kv: KVPolicy) -> int:
        """Add the adapter to the base weights. Returns the version that is live. Raises HttpError, and as `refresh_lora`."""
        client = self._upstream.client
        wanted = await version_above(self._upstream, version)

        def refresh() -> Refreshed:
            return client.refresh_lora(path, scale=scale, version=wanted, kv=kv)

        try:
            return (await from_folder(self._upstream, path, refresh, "lora_path")).version
        except ModuleNotFoundError as error:
            instead = f"{error.name} is not installed with the facade: pip install -e '.[lora]'"
            raise not_served("an adapter", instead) from None


def done(version: int) -> dict[str, object]:
    return {"status": "ok", "success": True, "weight_version": str(version)}
