"""`rollout bench http`: the same tokens both ways."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.bench import http
from rollout.bench.harness import BenchFailed
from tests.support.bench import bench_rows

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
    assert [http.response(one) for one, _ in pairs] == [b"body"] * 3
    thread.join(30)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbody", b"HTTP/1.1 503 Busy\r\n\r\n"])
def test_what_is_no_answer_ends_the_run(pairs: list[tuple[socket.socket, socket.socket]], sent: bytes) -> None:
    for _, end in pairs:
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)
    with pytest.raises(BenchFailed):
        http.response(pairs[0][0])


def test_fewer_tokens_than_asked_for_are_no_result() -> None:
    http.check(http.PROMPTS * http.N * 5, 5)
    with pytest.raises(BenchFailed, match="means nothing"):
        http.check(http.PROMPTS * http.N * 5 - 1, 5)


@pytest.mark.long
def test_both_ways_make_the_same_tokens(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn", reason="pip install 'rl-rollout[http]'")
    monkeypatch.setattr(http, "PROMPTS", 2)
    monkeypatch.setattr(http, "N", 4)
    rows = bench_rows(tmp_path, "http", model=tiny_model)
    assert [row["model"] for row in rows if "summary" in row] == ["tiny", tiny_model.name]
    assert all(row["ratio_to_native"] > 0 and math.isfinite(row["microseconds_per_request"]) for row in rows)
