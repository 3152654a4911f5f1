"""verl 0.9 on this service, through its plug-in entry point: nothing is patched.

    actor_rollout_ref:
      rollout:
        name: rollout
        tensor_model_parallel_size: 1
        engine_kwargs:
          rollout:
            python: /opt/rollout/.venv/bin/python     # where rollout is installed with its own transformers
            engine: {kv_gib: 20}                      # as in rollout.toml

verl loads `rollout.integrations.verl.plugin` when it is imported (entry points of the group `verl.plugins`), which makes the
name known. verl asks for an older transformers than the engine, so the service usually runs in an environment of its own:
`python`, or `address` of a service that runs already. In verl's own environment `pip install --no-deps .` in the checkout is
enough, beside msgspec, pyzmq, tomli-w and xxhash.

A replica of verl is one actor of Ray (`rollout.integrations.verl.replica`) that holds a service and a client of it. Weights
come as in any refresh, all or nothing, from the rank that verl gives to the replica (`rollout.integrations.verl.adapter`).
verl aborts what runs before it sends weights, and prefills it again afterwards; here it is paused, and goes on over the
refresh. `extra_fields` has the weight versions of each token.
"""

from __future__ import annotations

NAME = "rollout"
ADAPTER = "rollout.integrations.verl.adapter.ServiceAdapter"


def register() -> None:
    """Make the name known to verl. May be repeated."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def replica() -> type:
        from rollout.integrations.verl.replica import ServiceReplica

        return ServiceReplica

    RolloutReplicaRegistry.register(NAME, replica)
    _ROLLOUT_REGISTRY[NAME, "async"] = ADAPTER
