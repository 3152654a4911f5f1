"""openai, renderers, verifiers, TRL's client, lm_eval and AReaL, unmodified, against the gateway."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8]
USER = [{"role": "user", "content": "ab"}]


# openai


@pytest.fixture
def openai(live: Any) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{live.url}/v1", api_key="EMPTY", max_retries=0)


def test_openai_completions(openai: Any, service_logprobs: Any) -> None:
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, n=2, logprobs=2, seed=1, extra_body=extra)
    for choice in answer.choices:
        assert np.array_equal(np.array(choice.logprobs.token_logprobs, np.float32), service_logprobs(PROMPT, choice.token_ids))
        assert len(choice.logprobs.top_logprobs) == 6
    assert answer.usage.completion_tokens == 12
    assert [card.id for card in openai.models.list().data][0] == "tiny"


def test_openai_chat_stream_and_turns(openai: Any) -> None:
    options = {"model": "tiny", "max_tokens": 8, "seed": 2, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    headers = {"X-Session-ID": "s"}
    first = openai.chat.completions.create(messages=USER, extra_headers=headers, logprobs=True, top_logprobs=1, **options)
    chunks = list(openai.chat.completions.create(messages=USER, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == first.choices[0].message.content
    assert len(chunks) > 1, "it comes in pieces"
    text = openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, seed=3)
    pieces = list(openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, seed=3, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text and len(pieces) > 1
    message = {"role": "assistant", "content": first.choices[0].message.content}
    second = openai.chat.completions.create(messages=[*USER, message, *USER], extra_headers=headers, **options)
    exact = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(exact)] == exact


def test_openai_sees_typed_errors(openai: Any) -> None:
    errors = pytest.importorskip("openai")
    with pytest.raises(errors.BadRequestError, match="exceeds the context"):
        openai.completions.create(model="tiny", prompt=[5] * 9000, max_tokens=5)
    with pytest.raises(errors.NotFoundError, match="is unknown"):
        openai.completions.create(model="another", prompt=PROMPT)
    with pytest.raises(errors.BadRequestError, match="n=0"):
        openai.completions.create(model="tiny", prompt=PROMPT, n=0)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda client: client.embeddings.create(model="tiny", input="a"), "NotFoundError"),
        (lambda client: client.responses.create(model="tiny", input="a"), "NotFoundError"),
        (lambda client: chat(client, response_format={"type": "json_object"}), "BadRequestError"),
        (lambda client: chat(client, reasoning_effort="high"), "BadRequestError"),
        (lambda client: chat(client, service_tier="flex"), "BadRequestError"),
        (lambda client: chat(client, extra_body={"no_such_field": 1}), "BadRequestError"),
        (lambda client: chat(client, messages=[{"role": "user", "content": [IMAGE]}]), "BadRequestError"),
    ],
)
def test_openai_repeats_no_request_that_cannot_be_served(live: Any, ask: Any, error: str) -> None:
    sent: list[httpx.Request] = []
    errors = pytest.importorskip("openai")
    with httpx.Client(event_hooks={"request": [sent.append]}, timeout=60) as http:
        client = errors.OpenAI(base_url=f"{live.url}/v1", api_key="EMPTY", max_retries=2, http_client=http)
        with pytest.raises(getattr(errors, error)) as raised:
            ask(client)
        assert len(sent) == 1 and len(raised.value.body["message"]) > 20
        assert chat(client, service_tier="auto", metadata={"run": "1"}).choices[0].message.content is not None


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, "max_tokens": 4, **options})


def test_the_program_in_the_docs_runs(live: Any) -> None:
    pytest.importorskip("openai")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/http.md").read_text(), re.DOTALL)
    text = program.replace("http://127.0.0.1:8000", live.url).replace("n=4)", "n=4, max_tokens=4)")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(ast.literal_eval(done.stdout)) == 4, done.stderr


# renderers, verifiers


def test_renderers_generate(live: Any, service_logprobs: Any) -> None:
    from openai import AsyncOpenAI
    from renderers.base import create_renderer
    from renderers.client import OverlongPromptError, generate
    from renderers.configs import DefaultRendererConfig
    from transformers import AutoTokenizer

    renderer = create_renderer(AutoTokenizer.from_pretrained(live.folder), DefaultRendererConfig())

    async def run(content: str) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="EMPTY", max_retries=0) as client:
            return await generate(
                client=client, renderer=renderer, messages=[{"role": "user", "content": content}], model="tiny",
                sampling_params={"max_tokens": 12, "temperature": 0.7, "top_p": 1.0}, cache_salt="0",
            )  # fmt: skip

    answer = asyncio.run(run("ab"))
    prompt, ids = answer["prompt_ids"], answer["completion_ids"]
    from rollout import Sampling

    (sample,) = live.client.score([prompt], [[ids]], Sampling(temperature=0.7))[0]
    assert ids and np.array_equal(np.array(answer["completion_logprobs"], np.float32), sample.logprobs)
    with pytest.raises(OverlongPromptError):  # found from /v1/models, before anything is sent
        asyncio.run(run("a" * 9000))


def verifiers_client(live: Any) -> Any:
    from renderers.configs import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig

    config = TrainClientConfig(
        base_url=f"{live.url}/v1", api_key_var="NO_KEY", renderer=DefaultRendererConfig(), renderer_model_name=str(live.folder)
    )
    return TrainClient(config)


async def verifiers_turn(client: Any, messages: list[dict[str, Any]], **sampling: Any) -> Any:
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.types import SamplingConfig

    body = {"model": "tiny", "messages": messages}
    return await client.get_response(ChatDialect(), body, SamplingConfig(**sampling), session_id="episode")


def test_verifiers_train_client(live: Any, service_logprobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.setenv("NO_KEY", "EMPTY")

    async def run() -> Any:
        client = verifiers_client(live)
        try:
            return await verifiers_turn(client, USER, temperature=1.0, max_tokens=10, cache_salt="0")
        finally:
            await client.close()

    tokens = asyncio.run(run()).tokens
    ids = list(tokens.completion_ids)
    assert np.array_equal(np.array(tokens.completion_logprobs, np.float32), service_logprobs(list(tokens.prompt_ids), ids))


# prime-rl's steps: verifiers samples, a trainer of ours learns and writes the folder, the weights change while it goes on


def test_steps_of_a_trainer_that_writes_folders(live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from rollout.exact import sample_logprobs

    pytest.importorskip("verifiers")
    monkeypatch.setenv("NO_KEY", "EMPTY")
    model = AutoModelForCausalLM.from_pretrained(live.folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = live.client.status()["version"]

    async def sample() -> list[Any]:
        client = verifiers_client(live)
        try:
            turns = [verifiers_turn(client, USER, temperature=1.0, max_tokens=8, cache_salt=str(first)) for _ in range(8)]
            return list(await asyncio.gather(*turns))
        finally:
            await client.close()

    rewards = []
    for step in range(1, 5):
        batch = [answer.tokens for answer in asyncio.run(sample())]
        rows = [(np.array(tokens.prompt_ids), np.array(tokens.completion_ids)) for tokens in batch]
        reward = torch.tensor([sum(97 + 3 <= id for id in ids) / len(ids) for _, ids in rows])
        rewards.append(float(reward.mean()))
        with torch.no_grad():
            ours = sample_logprobs(model, rows, 1.0)
        for tokens, mine in zip(batch, ours, strict=True):  # the live weights are the trainer's
            assert np.abs(np.array(tokens.completion_logprobs) - mine.numpy()).max() < 1e-3
        loss = -sum(
            a * logprobs.sum() for a, logprobs in zip(reward - reward.mean(), sample_logprobs(model, rows, 1.0), strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        folder = tmp_path / f"step_{first + step}"
        model.save_pretrained(folder)
        update_weights(live.url, folder)
        assert live.client.status()["version"] == first + step
    assert len(set(rewards)) > 1
    update_weights(live.url, live.folder)


def update_weights(url: str, folder: Path) -> None:
    """The requests that prime-rl's orchestrator sends at a step."""
    with httpx.Client(base_url=url, timeout=60) as http:
        http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        http.post("/update_weights", json={"weight_dir": folder.as_posix()}).raise_for_status()
        http.post("/resume").raise_for_status()


# TRL


def test_trl_vllm_client(live: Any, service_logprobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class wants the distribution vllm to be there, which it uses for nothing but weights over NCCL."""
    module = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    client = module.VLLMClient(base_url=live.url)
    assert client.model == "tiny" and client.get_world_size() == 1
    assert client.get_server_info()["model_config"]["logprobs_mode"] == "processed_logprobs"
    answer = client.generate([PROMPT, [9, 10]], n=2, max_tokens=5, logprobs=0, generation_kwargs={"seed": 3})
    assert answer["prompt_ids"] == [PROMPT, [9, 10]] or answer["prompt_ids"] == [PROMPT, PROMPT, [9, 10], [9, 10]]
    prompts = [PROMPT, PROMPT, [9, 10], [9, 10]]
    for prompt, ids, logprobs in zip(prompts, answer["completion_ids"], answer["logprobs"], strict=True):
        flat = [one[0] if isinstance(one, list) else one for one in logprobs]
        assert np.array_equal(np.array(flat, np.float32), service_logprobs(prompt, ids))


# lm_eval


def test_lm_eval_generates_and_scores(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    model = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="tiny",
        tokenizer=str(live.folder),
        tokenizer_backend="huggingface",
        max_length=512,
    )
    arguments = ({"max_gen_toks": 6, "do_sample": False, "temperature": 0, "until": []},)
    requests = [Instance("generate_until", {}, (text, *arguments), i) for i, text in enumerate(["ab", "abc"])]
    answers = model.generate_until(requests)
    pairs = [("ab", "cde"), ("question", "answer")]
    likely = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (context, rest), (logprob, _) in zip(pairs, likely, strict=True):
        ids, whole = (
            httpx.post(f"{live.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in (context, context + rest)
        )
        (sample,) = live.client.score([ids], [[whole[len(ids) :]]])[0]
        assert abs(logprob - float(sample.logprobs.sum())) < 1e-4
    greedy = {"prompt": "ab", "max_tokens": 6, "temperature": 0}
    assert answers[0] == httpx.post(f"{live.url}/v1/completions", json=greedy).json()["choices"][0]["text"]


# AReaL


def areal_backend(tmp_path: Path) -> Any:
    """Its backend of SGLang, out of its own source: the module around it imports a cluster's worth of packages."""
    found = importlib.util.find_spec("areal")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("areal is not installed: make integrations")
    source = Path(next(iter(found.submodule_search_locations))) / "engine" / "sglang_remote.py"
    tree = ast.parse(source.read_text())
    (backend,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SGLangBackend"]
    values = lambda **fields: SimpleNamespace(**{"method": "POST", **fields})  # noqa: E731
    names = {"HttpRequest": values, "HttpGenerationResult": values, "WeightUpdateRequests": values, "np": np}
    module = ModuleType("areal_backend")
    module.__dict__.update(names)
    part = tmp_path / "areal_backend.py"
    part.write_text("from __future__ import annotations\n\n" + ast.unparse(backend))
    spec = importlib.util.spec_from_file_location("areal_backend", part)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module)
    return module.__dict__["SGLangBackend"]()


def test_areal_s_backend(live: Any, service_logprobs: Any, tmp_path: Path) -> None:
    backend = areal_backend(tmp_path)
    config = SimpleNamespace(
        stop_token_ids=[2], stop=None, use_beam_search=False, top_p=1.0, top_k=-1, max_new_tokens=7, greedy=False,
        temperature=1.0, ignore_eos=False, skip_special_tokens=False, frequency_penalty=0.0,
    )  # fmt: skip
    asked = SimpleNamespace(gconfig=config, input_ids=PROMPT, image_data=None, metadata={})

    def send(request: Any) -> Any:
        response = httpx.request(request.method, live.url + request.endpoint, json=request.payload or None, timeout=60)
        response.raise_for_status()
        return response.json()

    send(backend.get_health_check_request())
    answer = backend.parse_generation_response(send(backend.build_generation_request(asked, False, 0)))
    assert answer.stop_reason in ("stop", "length")
    assert np.array_equal(np.array(answer.output_logprobs, np.float32), service_logprobs(PROMPT, answer.output_tokens))
    before = live.client.status()["version"]
    send(backend.get_pause_request())
    meta = SimpleNamespace(use_lora=False, path=live.folder)
    for request in backend.build_disk_weight_update_requests(meta).requests:
        assert send(request)["success"] is True
    send(backend.get_resume_request())
    assert live.client.status()["version"] == before + 1
    send(backend.get_offload_request())
    send(backend.get_onload_request(["weights"]))
    send(backend.get_onload_request(["kv_cache"]))


def test_the_clients_are_told_apart_from_ours() -> None:
    """A run without the packages would be green for nothing."""
    missing = [
        name
        for name in ("openai", "renderers", "verifiers", "trl", "lm_eval", "areal")
        if importlib.util.find_spec(name) is None
    ]
    assert not missing, f"{missing}: make integrations installs them"
