"""Stop strings: the bytes of tokens, what is found across their borders, and where a text is cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from rollout.client.api import RolloutClient
from rollout.engine.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.scheduling.stops import Stops
from rollout.engine.values import Group, PartialSample, Sample, Sampling
from rollout.engine.vocabulary import LETTERS, NoVocabulary, Vocabulary
from rollout.transport.errors import InvalidRequest
from rollout.transport.loopback import LoopbackService
from tests.support.equivalence import assert_same
from tests.support.toy import VOCAB, ToyModel, group, run
from tests.support.toy import engine as toy_engine
from tests.support.wire import serving

ALPHABET = "ab\né€"
PIECES = st.lists(st.binary(max_size=3) | st.text(ALPHABET, max_size=4).map(str.encode), min_size=1, max_size=12)
STRINGS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def first_by_hand(pieces: list[bytes], strings: tuple[str, ...], min_tokens: int) -> tuple[int, int, str] | None:
    """The token that completes a stop string, where in the text the first one of these begins, and which: by plain search."""
    for at in range(min_tokens, len(pieces)):
        text, before = b"".join(pieces[: at + 1]), len(b"".join(pieces[:at]))
        found = []
        for which, string in enumerate(strings):
            ends = range(before + 1, len(text) + 1)
            found += [(e - len(string.encode()), which) for e in ends if text[:e].endswith(string.encode())]
        if found:
            begin, which = min(found)
            return at, begin, strings[which]
    return None


@settings(max_examples=300, deadline=None)
@given(PIECES, STRINGS, st.integers(0, 3))
def test_what_is_found_is_what_a_plain_search_finds(pieces: list[bytes], strings: tuple[str, ...], min_tokens: int) -> None:
    """Token by token, with tokens that end within a character, hold more than a string, or nothing at all."""
    stops, want = Stops(strings, Vocabulary(pieces)), first_by_hand(pieces, strings, min_tokens)
    assert stops.ending(range(len(pieces)), min_tokens) == (None if want is None else want[0])
    tail = b""
    for token in range(len(pieces)):
        tail, found = stops.find(tail, token)
        assert len(tail) < max(len(string.encode()) for string in strings)
        if want is not None and token == want[0]:
            assert found is not None and strings[found[0]] == want[2]
            text = b"".join(pieces[: token + 1])
            assert len(text) - found[1] == want[1]
            assert stops.text_end(range(token + 1), found[1]) == len(text[: want[1]].decode("utf-8", "replace"))
    if min_tokens == 0:  # nothing is missed
        whole = b"".join(pieces)
        assert (want is not None) == any(string.encode() in whole for string in strings)


# ── the bytes of tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_of_smollm2_are_those_of_its_tokenizer(smollm2: Path) -> None:
    """Of any tokens, cut anywhere: with characters that span tokens, digits, newlines and special tokens."""
    vocabulary, tokenizer, r = Vocabulary.load(smollm2), AutoTokenizer.from_pretrained(smollm2), random.Random(0)
    sequences = [[r.randrange(len(tokenizer)) for _ in range(40)] for _ in range(50)]
    for text in (
        "naïve 東京 🤖🤖\n\n\tdef f(x):\n  return x  # 1234\r\n",
        "<|im_start|>user\nHi<|im_end|>",
        "\u200d👩\u200d🚀 é",
    ):
        ids = tokenizer(text)["input_ids"]
        assert vocabulary.text(ids).decode() == text
        sequences += [ids[:cut] for cut in range(len(ids))]
    for ids in sequences:
        want = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert vocabulary.text(ids).decode("utf-8", "replace") == want


def sentencepiece(kind: str) -> Tokenizer:
    """A small tokenizer with the decoder of Llama 2: ▁ for spaces, bytes for what has no piece."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁the", "e\n", "▁▁", "nd", "é"]
    if kind == "bpe":
        model = models.BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    else:
        model = models.Unigram([(name, -1.0) for name in names], 0, True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_bytes_of_sentencepiece_are_those_of_its_tokenizer(kind: str) -> None:
    tokenizer, r = sentencepiece(kind), random.Random(1)
    vocabulary = Vocabulary.of(json.loads(tokenizer.to_str()))
    euro = [1 + byte for byte in "€".encode()]
    sequences = [[r.choice([*range(257, 264), *euro, 264, 0]) for _ in range(12)] for _ in range(50)]
    for ids in [[259, *euro, 260], [264, 258], *(ids for ids in sequences if is_text(ids, vocabulary))]:
        assert vocabulary.text(ids).decode() == tokenizer.decode(ids, skip_special_tokens=False)
    assert Stops(("€e",), vocabulary).ending([259, *euro, 260], 0) == 4, "a character of three tokens"
    assert Stops((" the e",), vocabulary).ending([258, 259, 257, 260], 0) == 3, "a space is a space"


def is_text(ids: list[int], vocabulary: Vocabulary) -> bool:
    """Bytes that are no UTF-8 are replaced one by one by that decoder: no two decoders agree there."""
    try:
        return bool(vocabulary.text(ids).decode())
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (None, "cannot be read: stop strings need the model's tokenizer"),
        ("{", "is no tokenizer"),
        ("[]", "is no tokenizer"),
        ('{"decoder": {"type": "WordPiece"}, "model": {"vocab": {}}}', "a tokenizer of \\['WordPiece'\\]"),
        ('{"decoder": {"type": "ByteLevel"}}', "is no tokenizer"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": "b"}}}', "is no tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(contents: str | None, reason: str, tmp_path: Path) -> None:
    if contents is not None:
        (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(NoVocabulary, match=reason):
        Vocabulary.load(tmp_path)


def test_added_tokens_and_ids_without_a_token() -> None:
    added = [{"id": 5, "content": "<|é|>"}]
    contents = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"Ġa": 0, "Ċ": 2}}, "added_tokens": added}
    vocabulary = Vocabulary.of(contents)  # type: ignore[arg-type]
    assert [vocabulary[token] for token in range(7)] == [b" a", b"", b"\n", b"", b"", "<|é|>".encode(), b""]
    assert sorted(pre_tokenizers.ByteLevel.alphabet()) == sorted(LETTERS) and sorted(LETTERS.values()) == [*range(256)]


# ── in an engine ──────────────────────────────────────────────────────────────────────────────────────────────────────────

TOY = Vocabulary([b"", *("abcé€\n"[i % 6].encode() * (1 + i // 12) for i in range(VOCAB - 3)), b"\xe2\x82", b"\xac"])
STOP = ("ca", "éé", "€\n")


def engine(**options: Any) -> Engine:
    made = toy_engine(**options)
    made.texts.vocabulary = lambda: TOY  # type: ignore[attr-defined]
    return made


def cut_by_hand(asked: Group, whole: dict[tuple[str, int], Sample]) -> dict[int, tuple[int, str, str | None]]:
    """Of each child: tokens, the text that is left, and what stopped it."""
    want = {}
    for (_, index), sample in whole.items():
        ids = sample.token_ids.tolist()
        found = first_by_hand([TOY[token] for token in ids], asked.sampling.stop, asked.sampling.min_tokens)
        if found is None:
            want[index] = len(ids), TOY.text(ids).decode("utf-8", "replace"), None
        else:
            at, begin, string = found
            want[index] = at + 1, TOY.text(ids)[:begin].decode("utf-8", "replace"), string
    return want


def told(samples: dict[tuple[str, int], Sample]) -> dict[int, tuple[int, str, str | None]]:
    got = {}
    for (_, index), sample in samples.items():
        text = TOY.text(sample.token_ids.tolist()).decode("utf-8", "replace")
        got[index] = len(sample.token_ids), text[: sample.text_end], sample.stopped_by
        assert (sample.stopped_by is None) == (sample.text_end is None)
    return got


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {"kv_tokens": 1024},
    "overlapped": {"kv_tokens": 1024, "overlap_steps": True},
    "preempted": {"kv_tokens": 96},
    "offloaded, overlapped": {"kv_tokens": 96, "cpu_offload_gib": 0.001, "overlap_steps": True},
}


@pytest.mark.parametrize("min_tokens", [0, 9])
@pytest.mark.parametrize("way", WAYS)
def test_children_end_with_the_token_that_completes_a_string(way: str, min_tokens: int) -> None:
    asked = group("g", [5, 6, 7], n=8, max_tokens=40, seed=3, stop=STOP, min_tokens=min_tokens)
    plain = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, stop=()))
    whole = run(engine(), [plain])
    want = cut_by_hand(asked, whole)
    got = run(engine(**WAYS[way]), [asked])
    assert told(got) == want
    stopped = [sample for sample in got.values() if sample.stopped_by]
    assert len({sample.stopped_by for sample in stopped}) > 1 and all(sample.finish_reason == "stop" for sample in stopped)
    for key, sample in got.items():
        assert sample.token_ids.tolist() == whole[key].token_ids.tolist()[: len(sample.token_ids)]
        assert sample.logprobs.tobytes() == whole[key].logprobs[: len(sample.token_ids)].tobytes()


@pytest.mark.parametrize("have", [1, 3, 4])
def test_children_that_go_on_are_stopped_where_they_would_have_been(have: int) -> None:
    """Also where the string has begun in the tokens that they had; one that had its last token comes back at once."""
    asked = group("g", [5, 6, 7], n=8, max_tokens=40, seed=3, stop=STOP)
    whole = run(engine(), [asked])
    partials = tuple(
        PartialSample(index=index, token_ids=s.token_ids[:have], logprobs=s.logprobs[:have], weight_versions=[(0, 0)])
        for (_, index), s in whole.items()
    )
    got = run(engine(), [msgspec.structs.replace(asked, partials=partials)])
    assert_same(whole, got)
    assert told(got) == told(whole)


def test_a_child_that_goes_on_behind_a_string_is_refused() -> None:
    asked = group("g", [5, 6, 7], n=8, max_tokens=40, seed=3, stop=STOP)
    stopped = next(sample for sample in run(engine(), [asked]).values() if sample.stopped_by)
    ids = np.append(stopped.token_ids, np.int32(1))
    partial = PartialSample(index=0, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), weight_versions=[(0, 0)])
    e = engine()
    with pytest.raises(ValueError, match=f"has tokens after token {len(ids) - 2}, which completes a stop string"):
        e.submit(msgspec.structs.replace(asked, partials=(partial,)))
    assert not e.has_work


def test_stopped_children_count_among_those_that_have_ended() -> None:
    asked = group("g", [5, 6, 7], n=8, max_tokens=40, seed=3, stop=STOP, ignore_eos=True, finish_after=2)
    reasons = [sample.finish_reason for sample in run(engine(), [asked]).values()]
    assert sorted(reasons) == ["cut"] * 6 + ["stop"] * 2


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(sentencepiece("bpe").to_str())
    return tmp_path


def test_through_the_service_and_from_the_models_folder(model_folder: Path) -> None:
    """The tokenizer is read once. Without one only such groups are refused."""
    config = EngineConfig(model=str(model_folder), dtype="float32", block_size=4, kv_tokens=1024, cpu_offload_gib=0)
    made, without, ends = Engine(config, ToyModel()), toy_engine(), (LoopbackService(), LoopbackService())
    asked, ends_by = Sampling(n=4, max_tokens=60, seed=3, logit_bias={0: -100.0}), ("\x05", "\x07\x02")
    with serving(made, ends[0]), serving(without, ends[1]):
        with RolloutClient(transport=ends[0].connect()) as client, RolloutClient(transport=ends[1].connect()) as other:
            plain = {sample.index: sample.token_ids.tolist() for sample in client.submit([5, 6], asked).result(60)}
            with_stops = msgspec.structs.replace(asked, stop=ends_by)
            for sample in client.submit([5, 6], with_stops).result(60):
                ids, text = plain[sample.index], "".join(map(chr, [each - 1 for each in plain[sample.index]]))
                at, string = min((text.find(string), string) for string in ends_by if string in text)
                assert (sample.stopped_by, sample.text_end) == (string, at)
                assert sample.token_ids.tolist() == ids[: at + len(string)]
            assert made.texts.vocabulary.cache_info().misses == 1  # type: ignore[attr-defined]
            with pytest.raises(InvalidRequest, match="stop strings need the model's tokenizer"):
                other.submit([5, 6], with_stops).result(60)
            assert len(other.submit([5, 6], asked).result(60)) == 4
