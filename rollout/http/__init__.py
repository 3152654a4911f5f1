"""Other people's dialects of HTTP on this service: a process that is nothing but a `RolloutClient` and a tokenizer.

    trainer, agent --HTTP--> frame: token, sizes, errors -> a dialect's route -> sampling.py -> Upstream --ZeroMQ--> service

It keeps no samples and no weights: when it ends, the service aborts its groups and goes on with everybody else's. starlette and
uvicorn come with `pip install -e '.[http]'` and are imported by the command `rollout http` alone.
"""
