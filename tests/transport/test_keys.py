"""Key files, and what is refused without keys."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq

from rollout.commands.main import main
from rollout.engine.values import Limits
from rollout.transport.keys import files
from rollout.transport.keys.files import BadKeys
from rollout.transport.sockets import ClientEnd, ServiceEnd

ADDRESS = "tcp://10.0.0.1:5655"


@pytest.fixture
def service(tmp_path: Path) -> Path:
    path = tmp_path / "keys" / "service.json"
    assert main(["keys", "init", "--file", str(path), "--address", ADDRESS]) == 0
    return path


def add(service: Path, name: str, *roles: str) -> Path:
    assert main(["keys", "add", name, "--role", *roles, "--file", str(service)]) == 0
    return service.with_name(f"{name}.json")


def test_keys_are_made_listed_and_revoked(service: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = add(service, "trainer", "weights", "rollout")
    mine, keys = files.read_client(path), files.read_service(service)
    assert mine.address == ADDRESS and mine.server == keys.public and mine.version == files.FILE_VERSION
    assert [(client.name, client.public, client.roles) for client in keys.clients] == [
        ("trainer", mine.public, ("rollout", "weights"))
    ]
    assert mine.secret not in service.read_text()
    capsys.readouterr()
    assert main(["keys", "show", "--file", str(service)]) == 0
    shown = capsys.readouterr().out
    assert "trainer  rollout,weights" in shown and keys.secret not in shown and mine.secret not in shown
    assert main(["keys", "revoke", "trainer", "--file", str(service)]) == 0
    assert not files.read_service(service).clients and files.read_service(service).revoked[0].public == mine.public


def test_secrets_are_their_owners_alone(service: Path) -> None:
    for path in (service, add(service, "one", "read")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(service.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o660, 0o644])
def test_files_that_others_can_read_or_write_are_refused(service: Path, mode: int) -> None:
    path = add(service, "one", "read")
    for each in (service, path):
        each.chmod(mode)
    with pytest.raises(BadKeys, match=r"chmod 600"):
        ServiceEnd("tcp://127.0.0.1:*", Limits(), str(service))
    with pytest.raises(BadKeys, match=r"chmod 600"):
        ClientEnd(str(path), Limits())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('"version": 1', '"version": 2'), "has version 2: this rollout reads version 1"),
        (('"secret"', '"sekret"'), "sekret"),
        (('"kind"', '"kynd"'), "kind"),
        (("{", "["), "key file"),
    ],
)
def test_files_that_are_none(service: Path, change: tuple[str, str], reason: str) -> None:
    service.write_text(service.read_text().replace(*change, 1))
    with pytest.raises(BadKeys, match=reason):
        files.read_service(service)


def test_one_kind_of_file_is_not_taken_for_the_other(service: Path) -> None:
    path = add(service, "one", "read")
    with pytest.raises(BadKeys, match="service's own file"):
        ClientEnd(str(service), Limits())
    with pytest.raises(BadKeys, match="connection file of a client"):
        ServiceEnd("tcp://127.0.0.1:*", Limits(), str(path))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["add", "one", "--role", "read"], "'one' has a key"),
        (["add", "../x", "--role", "read"], "name '../x'"),
        (["add", "two"], "give --role"),
        (["add"], "give the name"),
        (["revoke", "two"], "no key of 'two'"),
        (["show", "one"], "takes no name"),
        (["show", "--role", "read"], "takes no --role"),
        (["revoke", "one", "--out", "one.json"], "takes no --out"),
        (["init", "--address", ADDRESS], "File exists"),
        (["init", "--address", "tcp://*:5655"], "give the address at which clients reach"),
        (["init"], "give the address at which clients reach"),
    ],
)
def test_mistakes_change_nothing(service: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    add(service, "one", "read")
    before = {path: path.read_bytes() for path in service.parent.iterdir()}
    assert main(["keys", *words, "--file", str(service)]) == 1
    assert reason in capsys.readouterr().err
    assert {path: path.read_bytes() for path in service.parent.iterdir()} == before


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match="nowhere of the key file: No such file"):
        files.revoke(tmp_path / "nowhere" / "service.json", "one")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
def test_others_may_reach_a_service_with_keys(service: Path, endpoint: str) -> None:
    with pytest.raises(ValueError, match="rollout keys init --address"):
        ServiceEnd(endpoint, Limits())
    end = ServiceEnd(endpoint, Limits(), str(service))
    end.close()


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:5655", "tcp://example.com:1", "tcp://127.0.0.1;10.0.0.1:5", "tcp://[::2]:1"]
)
def test_a_client_speaks_to_another_host_with_a_key_only(address: str) -> None:
    with pytest.raises(ValueError, match="rollout keys add"):
        ClientEnd(address, Limits())


def test_an_old_libzmq_is_not_trusted_with_keys(service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add(service, "one", "read")
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(ValueError, match="libzmq 4.3.5 or later"):
        ServiceEnd("tcp://127.0.0.1:*", Limits(), str(service))
    with pytest.raises(ValueError, match="libzmq 4.3.5 or later"):
        ClientEnd(str(path), Limits())
    assert main(["keys", "show", "--file", str(service)]) == 1
    ServiceEnd("tcp://127.0.0.1:*", Limits()).close()
