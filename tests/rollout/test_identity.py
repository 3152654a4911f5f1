"""What identifies a sample: equal weights under another configuration are another model, wherever samples are compared, joined
or continued."""

from __future__ import annotations

import copy
import json
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import identity, ledger
from rollout.client.api import RolloutClient
from rollout.config import InputError
from rollout.engine.forward.configuration import NEUTRAL, configuration_digest
from rollout.engine.forward.model import Model, UnsupportedModel
from rollout.engine.values import PartialSample, Sample, Sampling
from rollout.engine.vocabulary import Vocabulary
from rollout.fleet.replica import State
from rollout.ledger.bisect import bisect
from rollout.ledger.writer import LedgerWriter
from rollout.service.journal import Journal
from rollout.service.restoring import restore
from rollout.service.session import SendLimits, Sessions
from rollout.transport.errors import InvalidRequest, ServiceRestarted
from tests.support.fleet import WAIT, fleet_of
from tests.support.hash_engine import HashEngine
from tests.support.ledgers import ROOM
from tests.support.ports import free_port
from tests.support.tiny import MODELS, tiny, tiny_engine
from tests.support.tiny_folder import make_tiny_folder
from tests.support.waiting import until
from tests.support.wire import serving, serving_at

OTHER = "0f" * 20
PROMPT, ASKED = [5, 6, 7], Sampling(n=2, max_tokens=6, seed=3)
DECIDES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.3, "hidden_act": "gelu",
    "attention_bias": True, "max_position_embeddings": 4096, "tie_word_embeddings": True, "num_attention_heads": 8,
    "an_option_of_a_later_version": 3,
    "router_jitter_noise": 0.3,  # phimoe masks the logits of its router with it, in eval too
}  # fmt: skip
NOISE: dict[str, Any] = {
    "_name_or_path": "/elsewhere", "transformers_version": "1.0", "architectures": ["Other"], "use_cache": False,
    "pad_token_id": 7, "eos_token_id": [3, 4], "attention_dropout": 0.5, "initializer_range": 1.0, "rms_norm_eps": 1e-6,
    "output_attentions": True, "unset": None,
}  # fmt: skip


# ── the digest ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_a_forward_changes_the_digest(name: str) -> None:
    config = tiny("llama").config
    before = configuration_digest(config)
    setattr(config, name, DECIDES[name])
    assert configuration_digest(config) != before


@pytest.mark.parametrize("name", NOISE)
def test_names_and_what_acts_in_training_do_not(name: str) -> None:
    config = tiny("llama").config
    before = configuration_digest(config)
    setattr(config, name, NOISE[name])
    assert configuration_digest(config) == before


def test_every_field_of_every_family_decides_or_is_known_to_be_neutral() -> None:
    """Each field of a configuration that is not NEUTRAL changes the digest, in whatever family."""
    for family in MODELS:
        config = tiny(family).config
        before, fields = configuration_digest(config), config.to_dict()
        for name in sorted(fields.keys() - NEUTRAL - {"model_type", "num_local_experts"}):
            changed = type(config).from_dict({**fields, name: fields[name]})
            vars(changed)[name] = "another value"
            assert configuration_digest(changed) != before, (family, name)


class Kind(Enum):
    ONE = "one"


@pytest.mark.parametrize(
    "value",
    [torch.float32, Kind.ONE, {"a", "b"}, ("a", 1), {"x": [torch.int8]}],
    ids=["dtype", "enum", "set", "tuple", "dictionary"],
)
def test_a_field_of_any_of_these_types_has_one_spelling(value: Any) -> None:
    config = tiny("llama").config
    config.of_a_kind = value
    before = configuration_digest(config)
    config.of_a_kind = copy.deepcopy(value)
    assert configuration_digest(config) == before


def test_a_field_without_a_spelling_of_its_own_is_named() -> None:
    """The text of an object may hold its address, which differs from process to process."""
    model = tiny("llama")
    model.config.rope = {"function": object()}
    with pytest.raises(ValueError, match=r"config.json, rope, function is a object, which may have another text"):
        configuration_digest(model.config)
    with pytest.raises(UnsupportedModel, match=r"tiny: config.json, rope, function is a object"):
        Model(model, "tiny")


def test_a_folder_that_was_saved_again_has_the_same_digest(tmp_path: Path) -> None:
    """A trainer's checkpoint is the same function of other weights."""
    make_tiny_folder(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16)
    model.config.use_cache = False
    model.save_pretrained(tmp_path / "two")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert configuration_digest(saved.config) == configuration_digest(model.config)


def test_the_text_of_tokens_has_a_digest(tmp_path: Path) -> None:
    make_tiny_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    before, text = Vocabulary.load(tmp_path).digest, json.loads(file.read_text())
    text["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(text))
    assert Vocabulary.load(tmp_path).digest == before, "how prompts are cut ends no child"
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(text))
    assert Vocabulary.load(tmp_path).digest != before


def test_an_engine_says_what_it_is() -> None:
    engine, other = tiny_engine(), tiny_engine(model=tiny("llama", rms_norm_eps=0.3))
    assert len(engine.configuration) == 40 and engine.configuration != other.configuration
    assert engine.weights.digest == other.weights.digest, "nothing else tells them apart"
    assert engine.tokenizer == "", "its folder has none"


# ── one table ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tokenizer_decides_only_where_text_ends_a_child() -> None:
    one = ledger.RecordedService(
        at=0.0, arithmetic="a", block_size=16, kv_dtype="b", vocab_size=9, context=9, eos_token_ids=(), configuration="c",
        tokenizer="d", model="m", version=0, digest="",
    )  # fmt: skip
    other = msgspec.structs.replace(one, tokenizer="e")
    assert identity.first_difference(one, other, Sampling()) is None
    assert identity.first_difference(one, other, Sampling(stop=("x",))) == "tokenizer"
    for name in identity.COMPUTED_BY:
        assert identity.first_difference(one, msgspec.structs.replace(one, **{name: "?"}), Sampling()) == name


def test_options_are_numbered_for_good() -> None:
    """Receipts and ledgers on disk name options by their places."""
    first = ("seed", "temperature", "max_tokens", "min_tokens", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos")
    assert identity.NAMES[: len(first)] == first and identity.NAMES[15] == "n" and identity.NAMES[-1] == "kv_ttl_s"
    for number, name in enumerate(identity.NAMES):
        role = identity.OPTIONS[name].role
        value = {
            "top_p": 0.5,
            "min_p": 0.1,
            "stop": ("x",),
            "stop_token_ids": (1,),
            "logit_bias": {1: 1.0},
            "allowed_token_ids": (1,),
        }
        changed = Sampling(**{"n": 2, "finish_after": 2, name: value.get(name, 2 if name not in FLAGS else True)})
        assert (number in identity.numbered(changed, [role])) == (
            changed != Sampling() and getattr(changed, name) != DEFAULT[name]
        )
    with pytest.raises(LookupError, match="no option 99"):
        identity.sampling_of({99: 1}, ["draws"])
    with pytest.raises(LookupError, match="no option 15"):
        identity.sampling_of({15: 1}, ["draws"])


FLAGS = ("ignore_eos", "raw_logprobs", "routed_experts")
DEFAULT = msgspec.structs.asdict(Sampling())


# ── joined, continued, compared ───────────────────────────────────────────────────────────────────────────────────────────
class Another(HashEngine):
    """Equal weights, another configuration."""

    def __init__(self, field: str = "configuration", value: Any = OTHER) -> None:
        super().__init__()
        setattr(self, field, value)


@pytest.mark.parametrize("field", ["configuration", "tokenizer"])
def test_a_replica_of_another_model_is_refused_by_name(field: str) -> None:
    engines = iter([HashEngine(), HashEngine(), Another(field)])
    with fleet_of(2, make=lambda: next(engines)) as (fleet, threads):
        assert len(fleet.replicas.serving()) == 2, "control: an equal one serves"
        threads.scale(3)

        def refused() -> bool:
            fleet.step()
            return any(one.state is State.DEAD for one in fleet.replicas.by_name.values())

        until(refused, "the third is refused", WAIT)
        (dead,) = [one for one in fleet.replicas.by_name.values() if one.state is State.DEAD]
        assert "its configuration differs from the fleet's" in dead.why and f"{field} '{OTHER}'" in dead.why
        assert len(fleet.replicas.serving()) == 2


def test_tokens_of_another_model_do_not_continue() -> None:
    with serving(HashEngine()) as one, serving(Another()) as two, serving(HashEngine()) as equal:
        with RolloutClient(one.endpoint) as client, RolloutClient(two.endpoint) as other, RolloutClient(equal.endpoint) as same:
            samples = client.submit(PROMPT, ASKED).result(WAIT)
            cut = [msgspec.structs.replace(each, finish_reason="cut", **each.slice(0, 3).columns()) for each in samples]
            with pytest.raises(InvalidRequest, match="child 0 was generated with configuration c0.* this service has 0f"):
                other.continue_samples(cut, PROMPT, ASKED)
            with pytest.raises(InvalidRequest, match="child 1 was generated with"):
                other.submit(PROMPT, ASKED, indices=[1], partials=[PartialSample.of(cut[1])])
            continued = same.continue_samples(cut, PROMPT, ASKED).result(WAIT)
            assert [told(each) for each in continued] == [told(each) for each in samples], "control"
            handle = client.submit(PROMPT, Sampling(max_tokens=90_000, stream_every=1, seed=1))
            until(lambda: handle.partial_samples(), "some tokens", WAIT)
            handle.cancel()
            with pytest.raises(InvalidRequest, match="was generated with configuration"):
                other.submit(PROMPT, handle.group.sampling, partials=handle.partial_samples())
            with pytest.raises(InvalidRequest, match="ask the client of the service that generated it"):
                other.receipt(samples[0], PROMPT, ASKED)


def told(sample: Sample) -> Any:
    return sample.index, sample.token_ids.tolist(), sample.logprobs.tolist()


def test_receipts_of_another_model_are_neither_right_nor_wrong() -> None:
    with serving(HashEngine()) as one, serving(Another()) as two:
        with RolloutClient(one.endpoint) as client, RolloutClient(two.endpoint) as other:
            samples = client.submit(PROMPT, ASKED).result(WAIT)
            receipts = [client.receipt(each, PROMPT, ASKED) for each in samples]
            verdicts = other.verify(samples, PROMPT, ASKED, receipts=receipts, timeout=WAIT)
            made = other.replay(receipts, [PROMPT], timeout=WAIT)
            assert [each.ok for each in verdicts] == [None, None] == [each.equal for each in made]
            assert all("configuration of the model" in each.why for each in (*verdicts, *made))
            assert [each.ok for each in client.verify(samples, PROMPT, ASKED, receipts=receipts, timeout=WAIT)] == [True, True]


@pytest.mark.parametrize(("field", "stop", "kind"), [("configuration", (), "configuration"), ("tokenizer", ("a",), "tokenizer"),
                                                     ("tokenizer", (), None)])  # fmt: skip
def test_bisect_names_another_model(field: str, stop: tuple[str, ...], kind: str | None, tmp_path: Path) -> None:
    runs = []
    for name, engine in (("a", HashEngine()), ("b", Another(field))):
        with serving(engine, ledger=LedgerWriter(str(tmp_path / name), ROOM)) as service:
            with RolloutClient(service.endpoint) as client:
                client.submit(PROMPT, msgspec.structs.replace(ASKED, stop=stop), "0/0").result(WAIT)
        runs.append(ledger.read(tmp_path / name))
    found = bisect(*runs)
    assert (None if found is None else found.kind) == kind
    assert getattr(runs[1].services[0], field) == OTHER


def test_a_later_service_of_a_run_is_compared_too(tmp_path: Path) -> None:
    """A run that goes on under another configuration: the difference has its kind, and nobody is accused."""
    runs = []
    for name, second in (("a", HashEngine()), ("b", Another())):
        for engine, group in ((HashEngine(), "0/0"), (second, "0/1")):
            with serving(engine, ledger=LedgerWriter(str(tmp_path / name), ROOM)) as service:
                with RolloutClient(service.endpoint) as client:
                    client.submit(PROMPT, ASKED, group).result(WAIT)
        runs.append(ledger.read(tmp_path / name))
    found = bisect(*runs)
    assert found is not None and (found.kind, found.group_id) == ("configuration", "0/1")


@pytest.mark.parametrize("field", ["configuration", "arithmetic", "tokenizer", "block_size", "kv_dtype"])
def test_a_journal_with_groups_is_continued_by_the_same_model_only(field: str, tmp_path: Path) -> None:
    path = str(tmp_path / "journal")

    def start(engine: HashEngine) -> None:
        journal = Journal(path, "hash")
        try:
            restore(journal, Sessions(9, journal, SendLimits()), running(engine), engine)
        finally:
            journal.close()

    value: Any = 32 if field == "block_size" else OTHER
    start(HashEngine())
    start(Another(field, value))  # no groups: nothing would be mixed
    start(HashEngine())
    add_group(path)
    start(HashEngine())
    with pytest.raises(InputError, match=f"has groups of a service with {field} .* start it as before, or move the file away"):
        start(Another(field, value))


def running(engine: HashEngine) -> Any:
    from rollout.metrics.tracker import Tracker
    from rollout.service.engine_groups import EngineGroups

    return EngineGroups(engine, Tracker(), 1 << 20, lambda: 0.0)


def add_group(path: str) -> None:
    """Write a group of a session as a killed service leaves it."""
    from rollout.engine.values import Served
    from rollout.service.persistence import SessionIdentity
    from rollout.transport.frames import pack
    from tests.support.wire import submit

    journal = Journal(path, "hash")
    journal.opened(SessionIdentity("", "0" * 32, "x", 1))
    journal.accepted("", "0" * 32, "1", pack(submit()), 1, Served())
    journal.commit(Served())
    journal.close()


@pytest.mark.parametrize(("engine", "lost"), [(Another, True), (HashEngine, False)])
def test_groups_are_not_resubmitted_to_another_model(engine: type[HashEngine], lost: bool) -> None:
    """A service that is killed and started again with another config.json: its groups fail, those of equal ones run again."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with (
        serving_at(HashEngine(), address) as first,
        RolloutClient(address, resubmit=True, restart_timeout_s=WAIT, link_timeout_s=WAIT) as client,
    ):
        pending = client._session.link._pending
        old = client.info
        new = msgspec.structs.replace(old, incarnation="another", configuration=engine().configuration)
        handle = client.submit(PROMPT, Sampling(max_tokens=90_000, seed=1))
        until(lambda: handle.sent_at is not None, "it is sent", WAIT)
        client._session.link.calls.put(lambda _: pending.restarted(old, new, "it", True), None)
        if lost:
            with pytest.raises(ServiceRestarted, match="with another configuration of the model"):
                handle.result(WAIT)
        else:
            client.status()
            assert handle.error is None
        del first


def test_arrays_of_given_children_are_part_of_the_identity() -> None:
    child = PartialSample(
        index=0, token_ids=np.array([1, 2], np.int32), logprobs=np.zeros(2, np.float32), weight_versions=[(0, 0)]
    )
    replace = msgspec.structs.replace
    others = [
        replace(child, index=1), replace(child, token_ids=np.array([1, 3], np.int32)),
        replace(child, logprobs=np.array([0, -1], np.float32)), replace(child, weight_versions=[(0, 1)]),
        replace(child, kv_versions=[(0, 0, 0)]), replace(child, raw_logprobs=np.zeros(2, np.float32)),
    ]  # fmt: skip
    renumbered = msgspec.structs.replace(child, weight_versions=[(0, 99)])
    same = [identity.given_digest(identity.unnumbered([each])) for each in (child, renumbered)]
    assert same[0] == same[1] and identity.given_digest([child]) != identity.given_digest([renumbered])
    digests = {identity.given_digest([each]) for each in (child, *others)}
    assert len(digests) == 1 + len(others) and identity.given_digest([]) == ""
