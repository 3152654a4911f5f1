"""`rollout bench http`: the same tokens both ways."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from rollout.bench import http
from rollout.bench.errors import BenchFailed
from rollout.bench.inputs import PromptText
from rollout.models import load_tokenizer

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 4\r\n\r\nbody"


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


def test_answers_are_read_in_pieces(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    def send() -> None:
        for i in range(len(ANSWER)):
            for _, end in reversed(pairs):
                end.sendall(ANSWER[i : i + 1])

    thread = threading.Thread(target=send)
    thread.start()
    assert http.answers([one for one, _ in pairs]) == [b"body"] * 3
    thread.join(30)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbody", b"HTTP/1.1 503 Busy\r\n\r\n"])
def test_what_is_no_answer_ends_the_run(pairs: list[tuple[socket.socket, socket.socket]], sent: bytes) -> None:
    for _, end in pairs:
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)
    with pytest.raises(BenchFailed):
        http.answers([one for one, _ in pairs])


def test_fewer_tokens_than_asked_for_are_no_result() -> None:
    http.check(http.PROMPTS * http.N * 5, 5)
    with pytest.raises(BenchFailed, match="means nothing"):
        http.check(http.PROMPTS * http.N * 5 - 1, 5)


@pytest.mark.long
def test_both_ways_make_the_same_tokens(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="pip install -e '.[http]'")
    monkeypatch.setattr(http, "PROMPTS", 2)
    monkeypatch.setattr(http, "N", 4)
    engine, text = EngineConfig(dtype="float32", threads=1), PromptText(load_tokenizer(tiny_model))
    rows: list[dict[str, Any]] = list(http.measure(tiny_model, engine, 0.1, 1, text))
    assert [row["model"] for row in rows if "summary" in row] == ["tiny", tiny_model.name]
    assert all(row["ratio_to_native"] > 0 and row["microseconds_per_request"] > 0 for row in rows)
