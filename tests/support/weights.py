"""What the weights of one device have besides, where payloads are staged there."""

from __future__ import annotations

from rollout.engine.weights.in_place import stage_on_device
from rollout.engine.weights.lora import AdapterBase
from rollout.engine.weights.parts import WeightParts

ON_DEVICE = WeightParts(adapters=AdapterBase, on_device=stage_on_device)
