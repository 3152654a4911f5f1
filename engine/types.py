"""The value types under the name that they had before 0.2: import them from `rollout`, or from `rollout.engine.values`."""

from rollout.engine.values import *  # noqa: F403
