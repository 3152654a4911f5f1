"""HTTP gateway: the APIs of vLLM, OpenAI and SGLang in front of a running service.

    HTTP client --> server.py (uvicorn) --> access.py --> vllm.py, chat.py, sglang.py, control.py (Starlette routes)
                                                            └-> generation.py, upstream.py --ZeroMQ--> service

The gateway is a process of its own with a `RolloutClient` and a tokenizer. It stores no samples and no weights: when it exits,
the service aborts its groups, and groups of other clients continue. starlette and uvicorn come with the extra `http`; only the
command `rollout http` imports them.
"""
