"""Names the extra that installs a module: the base installation has the client and its commands only."""

from __future__ import annotations

DISTRIBUTION = "rl-rollout"
EXTRA_OF = {
    "transformers": "text",
    "jinja2": "text",
    "tqdm": "text",
    "torch": "serve",
    "accelerate": "serve",
    "gguf": "serve",
    "huggingface_hub": "serve",
    "psutil": "serve",
    "safetensors": "serve",
    "tokenizers": "serve",
    "httptools": "http",
    "starlette": "http",
    "uvicorn": "http",
    "uvloop": "http",
    "prometheus_client": "metrics",
    "wandb": "wandb",
    "ray": "ray",
    "peft": "lora",
    "matplotlib": "grpo",
    "reasoning_gym": "reasoning-gym",
    "trl": "trl",
}
"""extra by module, as in pyproject.toml; the smallest one where several have it"""


COMMANDS = {"serve": "serve", "demo": "serve", "http": "http"}
"""commands that need more than a tokenizer"""


def missing(error: ImportError, command: str = "") -> str | None:
    """Return a sentence that names the module and how to install it, or None for a module of no extra."""
    module = (error.name or "").split(".")[0]
    if module not in EXTRA_OF:
        return None
    extra = EXTRA_OF[module]
    return f"{module} is not installed: {install(COMMANDS.get(command, extra) if extra == 'text' else extra)}"


def install(extra: str) -> str:
    """Return the command that adds an extra to an installation: pip keeps the package and installs what the extra needs."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
