"""A model that says what a test tells it to, behind a service and a gateway of this process.

Its hidden state is a one-hot of the position, and its head is the script: which token follows at which position. Any text can
be put into its mouth, and everything between the engine and the HTTP client is the product's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from rollout.client.api import RolloutClient
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.http.settings import RequestLimits
from tests.support.gateway import gateway
from tests.support.wire import serving

CONTEXT = 768
END = "<|end|>"
SPECIALS = ("<|stop|>", "<|turn|>", END)
PLAIN = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content if m.content else '' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""a chat template that writes every turn as it is, and no tools"""
USER = [{"role": "user", "content": "go"}]


def byte_level(folder: Path, specials: Sequence[str] = SPECIALS, merges: Sequence[tuple[str, str]] = ()) -> Any:
    """Make a byte-level tokenizer: 256 bytes, merged tokens, special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: at for at, piece in enumerate([*letters, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def byte_fallback(folder: Path, strip: bool = False) -> Any:
    """Make a sentencepiece-like tokenizer: ASCII letters, everything else as bytes. strip: the first space, as Llama 2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *SPECIALS)])
    return tokenizer


def word_pieces(folder: Path) -> Any:
    """Make a tokenizer whose bytes are unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["[UNK]", "he", "##llo", "##y", "world", "do", "##n", "'", "t", ".", ",", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("[UNK]", *SPECIALS)])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Any, template: str = PLAIN, eos: str = END) -> None:
    """Write the files of a tokenizer of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


class Scripted:
    """A gateway of the model. Its samples are greedy and end with `end` unless a test says otherwise."""

    def __init__(self, folder: Path, tokenizer: Any, ends: list[int], client: RolloutClient, url: str) -> None:
        from safetensors.torch import load_file

        self.folder, self.tokenizer, self.client, self.url = folder, tokenizer, client, url
        self.ends = ends
        self.http = httpx.Client(base_url=url, timeout=60)
        self._weights = load_file(str(folder / "model.safetensors"))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def put(self, scripts: Mapping[int, Sequence[int]]) -> None:
        """Let the model continue a prompt of so many tokens with these ids."""
        import torch

        head = torch.zeros(self.tokenizer.get_vocab_size(), CONTEXT)
        for length, ids in scripts.items():
            for at, id in enumerate(ids):
                head[id, length - 1 + at] = 1.0
        self.client.refresh({**self._weights, "lm_head.weight": head})

    def post(self, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return the JSON of a response with its status."""
        response = self.http.post(path, json=body, **options)
        answer: dict[str, Any] = response.json()
        return answer | {"status": response.status_code}

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream, as the standard reads them."""
        response = self.http.post(path, json=body | {"stream": True})
        parts = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
        assert response.status_code == 200 and parts.pop() == "[DONE]", response.text
        return [json.loads(part) for part in parts]

    def chat(self, said: str | Sequence[int], messages: Any = None, **body: Any) -> dict[str, Any]:
        """Have the model answer a conversation. Returns the response, and checks that a stream has the same message."""
        messages, headers = messages or USER, body.pop("headers", None)
        tools = {"tools": body["tools"]} if body.get("tools") and body.get("tool_choice") != "none" else {}
        length = self.post("/tokenize", {"messages": messages, **tools})["count"]
        self.put({length: [*self.ids(said), self.ends[0]] if isinstance(said, str) else said})
        body = {"messages": messages, "temperature": 0, "max_tokens": 400, **body}
        answer = self.post("/v1/chat/completions", body, headers=headers)
        if answer["status"] == 200 and headers is None:
            self._same_in_a_stream(answer["choices"][0], body)
        return answer

    def _same_in_a_stream(self, whole: dict[str, Any], body: dict[str, Any]) -> None:
        deltas = [choice for event in self.events("/v1/chat/completions", body) for choice in event["choices"]]
        message = whole["message"]
        assert "".join(choice["delta"]["content"] or "" for choice in deltas) == (message["content"] or "")
        made = [call for choice in deltas for call in choice["delta"].get("tool_calls", ())]
        assert functions(made) == functions(message.get("tool_calls", ()))
        assert deltas[-1]["finish_reason"] == whole["finish_reason"]

    def complete(self, prompt: str | list[int], said: str | Sequence[int], **body: Any) -> dict[str, Any]:
        """Have the model continue a prompt. Returns the choice, and checks that a stream has the same text."""
        ids = self.ids(prompt) if isinstance(prompt, str) else prompt
        self.put({len(ids): [*self.ids(said), self.ends[0]] if isinstance(said, str) else said})
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 200, **body}
        answer = self.post("/v1/completions", body)
        if answer["status"] != 200:
            return answer
        (choice,) = answer["choices"]
        streamed = [one for event in self.events("/v1/completions", body) for one in event["choices"]]
        assert "".join(one["text"] for one in streamed) == choice["text"]
        return dict(choice)


def functions(calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return name and arguments of calls."""
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    """Make a tool. parameters: their types, or schemas."""
    properties = {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in parameters.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@contextmanager
def scripted(
    folder: Path, tokenizer: Any, template: str = PLAIN, eos: str = END, ends: Sequence[str] = (END,), stream_every: int = 1
) -> Iterator[Scripted]:
    """Serve the model until the block ends. ends: texts of the tokens that end a sequence."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    write_tokenizer(folder, tokenizer, template, eos)
    ids = [tokenizer.token_to_id(text) for text in ends]
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=CONTEXT, n_embd=CONTEXT, n_layer=1, n_head=8, n_inner=8,
        eos_token_id=ids, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(CONTEXT))
        model.transformer.ln_f.weight.fill_(1.0)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", kv_tokens=8192, cpu_offload_gib=0, threads=1))
    limits = RequestLimits(stream_every=stream_every)
    with (
        serving(engine) as service,
        RolloutClient(service.endpoint) as client,
        gateway(client, folder, names=("scripted",), limits=limits) as running,
    ):
        made = Scripted(folder, tokenizer, ids, client, running.url)
        with made.http:
            yield made
