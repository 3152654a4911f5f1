"""Calls that give a service new weights. What they do is in `rollout.client.refresh`."""

from __future__ import annotations

from engine.types import KVPolicy, Refreshed
from rollout.client.controls import ServiceCalls
from rollout.client.link import Link
from rollout.client.lora import Adapters, AdapterSource
from rollout.client.refresh import NamedTensors, RefreshHandle, RefreshRequest, WeightSender
from transport.weights import Via


class WeightCalls(ServiceCalls):
    """Refreshes the weights of one service, over `link`. refresh_host: an address of this machine, for gloo and nccl."""

    def __init__(self, link: Link, refresh_host: str) -> None:
        super().__init__(link)
        self._pusher = WeightSender(link, refresh_host)
        self._adapters = Adapters()

    def refresh(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> Refreshed:
        """Refresh the service's weights, in place and all or nothing, while it goes on generating. Returns when they are live.

        Args:
            named_tensors: the model, its state dict or any iterable of (name, tensor), on any device, of any
                float dtype (cast to the model's). Or the path of a folder of safetensors that the service sees as well.
            version: above the live one; None = the next.
            kv: running samples "keep" their KV and go on over it (their version spans say so), "recompute" it under the new
                weights, or end ("abort").
            via: "shm" (same host: written once, read there), "inline" (any host), "files" (a folder), "cuda_ipc" (same host:
                read where it lies on the GPU), "gloo" or "nccl" (torch.distributed, any host; nccl from one GPU to another).
                "auto" takes cuda_ipc for tensors on GPUs that a service on CUDA sees as well, shm where both ends see the same
                memory, else inline. "delta" (any host; tensors or a folder) sends in messages what has changed since the last
                refresh by "delta", of which this client keeps a copy in host memory; where there is none that the service
                still has, or where it does not pay, "auto" sends all, and `Refreshed.reason` says why.
            partial: tensors that are not given stay as they are; without it a missing one is an error.

        Raises WeightsRefused naming the tensor, Busy naming the owner while another refresh is staged, SourceUnreachable,
        RequestTimeout, ServiceLost. The old weights serve on then; after the last two `weights_status` tells which ones do."""
        return self.refresh_async(named_tensors, version=version, kv=kv, via=via, partial=partial, timeout=timeout).result()

    def refresh_async(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        partial: bool = False,
        timeout: float = 600.0,
    ) -> RefreshHandle:
        """Begin a `refresh`; returns when the tensors have been read. With shm they may change from then on. With all others
        they must not until the handle is done: if they do, the refresh is refused, because the digests no longer fit."""
        return self._pusher.start(named_tensors, RefreshRequest(version, kv, partial), via, timeout)

    def refresh_lora(
        self,
        adapter: AdapterSource,
        *,
        scale: float = 1.0,
        base: str | None = None,
        version: int | None = None,
        kv: KVPolicy = "keep",
        via: Via = "auto",
        timeout: float = 600.0,
    ) -> Refreshed:
        """Refresh the service's weights to base + adapter. Only A and B travel; the service adds scale · B A to base weights
        that it keeps in host memory: its checkpoint, or what the last refresh of whole tensors has put in its place. Otherwise
        as `refresh`: checked, all or nothing, with a version. Tensors that the adapter before has changed and this one does
        not go back to their base.

        On the CPU the sum has the bits of PEFT's `merge_and_unload()`, in fp32 and bf16.

        Args:
            adapter: a PeftModel with one active LoRA adapter that is not merged; or the folder that its `save_pretrained`
                wrote, which is read here. Linear layers; whole modules in `modules_to_save`.
            scale: factor on the adapter's own lora_alpha / r (or / √r with rslora), as PEFT's `scale_layer`.
            base: digest of the weights that it was trained on, as `weights_status()["base_digest"]` gives it. None: of a
                PeftModel it is taken from its frozen weights, once for each model; of a folder it is not compared.
            version, kv, via, timeout: as for `refresh`; via="files" is for whole checkpoints.

        Raises WrongBase (a WeightsRefused) where the service's base is another, WeightsRefused for what cannot be merged (DoRA
        and other variants, embeddings, trained biases, tied weights, quantised layers), naming the fix, and as `refresh`."""
        pairs, read = self._adapters.read(adapter, scale, base)
        return self._pusher.start(pairs, RefreshRequest(version, kv, False, read), via, timeout).result()
