"""`rollout keys`: make and revoke the keys of a service's clients."""

from __future__ import annotations

from pathlib import Path

from rollout.commands.arguments import KeysArgs
from rollout.config import InputError
from rollout.transport.keys import files
from rollout.transport.keys.curve import check_libzmq
from rollout.transport.sockets import check_bind

TAKES = {"init": ("address",), "add": ("address", "role", "out"), "revoke": (), "show": ()}
"""flags of each action, beside --file"""


def run(args: KeysArgs) -> int:
    """Do what was asked for. Returns the exit status. Raises InputError, BadKeys."""
    check_libzmq()
    file = Path(args.file)
    if args.action in ("init", "show") and args.name:
        raise InputError(f"rollout keys {args.action} {args.name}: takes no name, leave it out")
    if args.action in ("add", "revoke") and not args.name:
        raise InputError(f"rollout keys {args.action}: give the name of the client")
    if args.action != "init" and not file.exists():
        raise InputError(
            f"{file} does not exist: `rollout keys init --address tcp://HOST:PORT` makes it, or --file names another one"
        )
    for flag in ("address", "role", "out"):
        if getattr(args, flag) and flag not in TAKES[args.action]:
            raise InputError(f"rollout keys {args.action}: takes no --{flag}, leave it out")
    match args.action:
        case "init":
            init(file, args.address)
        case "add":
            out = Path(args.out) if args.out else file.parent / f"{args.name}.json"
            files.add(file, args.name, args.role, out, checked(args.address) if args.address else "")
            print(f"{out}: give it to the client over a safe way, e.g. scp; RolloutClient({str(out)!r}), --address {out}")
        case "revoke":
            files.revoke(file, args.name)
            print(f"{args.name} is revoked; a running service ends its sessions within a second")
        case "show":
            show(file)
    return 0


def init(file: Path, address: str) -> None:
    """Make the service's file. Raises InputError for an address that clients cannot connect to, BadKeys."""
    files.create(file, checked(address))
    port = address.rpartition(":")[2]
    print(f"{file}: made. rollout serve --service.keys {file} --service.endpoint tcp://*:{port} …")
    print(f"a key for a client: rollout keys add NAME --role rollout weights read --file {file}")


def checked(address: str) -> str:
    """Return an address that others can connect to. Raises InputError for one that they cannot."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or host in ("*", "0.0.0.0", "[::]") or not port.isdigit() or port == "0":
        raise InputError(f"--address {address!r}: give the address at which clients reach the service, tcp://HOST:PORT")
    check_bind(address, keyed=True)
    return address


def show(file: Path) -> None:
    """Print who has a key, and no secret."""
    keys = files.read_service(file)
    print(f"{keys.address}  public key {keys.public}")
    for client in keys.clients:
        print(f"{client.name}  {','.join(client.roles)}  {client.public}")
    for client in keys.revoked:
        print(f"{client.name}  revoked  {client.public}")
