"""The shape of the repository: who imports whom, what is slim, what is exported, and that the README is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from rollout.models import without_collection
from tests.support.house import closure, modules_of

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "transport", "rollout", "recipes")
IN_A_CHECKOUT = re.compile(r"^rollout\.(?=(?:engine|transport|recipes)\b)")
MAY_IMPORT = {
    "engine": (),
    "transport": ("engine.values", "engine.model_files"),
    "rollout": ("engine", "transport"),
    "recipes": ("engine", "transport", "rollout"),
}
VALUE_TYPES = (*(f"engine/values/{path.name}" for path in sorted((ROOT / "engine/values").glob("*.py"))), "engine/config.py")
"""no torch in these: the wire and the command line need them"""


@cache
def parsed(source: str) -> ast.Module:
    with without_collection():  # of millions of nodes, which all stay: it takes four fifths of the time
        return ast.parse(source)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement in a node, at any depth. Expressions are not descended into, which makes this ten times `ast.walk`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@cache
def imported(source: str, module: str) -> set[str]:
    """Dotted names that a module imports, wherever in the file; `from a import b` counts as a and as a.b. Names of our rooms
    are those of the folders: `engine.values` for `rollout.engine.values`."""
    names: set[str] = set()
    for node in statements(parsed(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            names |= {parent} | {f"{parent}.{alias.name}" for alias in node.names}
    return {IN_A_CHECKOUT.sub("", name) for name in names}


def forbidden(source: str, module: str) -> set[str]:
    """Names of our own rooms that this module may not import."""
    room = module.split(".")[0]
    allowed = (room, *MAY_IMPORT[room])

    def fine(name: str) -> bool:
        # `from engine import values` gives "engine" as well: the longer name decides
        inside = any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
        return inside or any(prefix.startswith(name + ".") for prefix in allowed)

    return {name for name in imported(source, module) if name.split(".")[0] in ROOMS and not fine(name)}


def modules() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def test_imports_point_down() -> None:
    wrong = {}
    for path in modules():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names = forbidden(path.read_text(), module)
        if names:
            wrong[module] = names
    assert not wrong


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def file_arrows(package: str) -> set[tuple[str, str]]:
    """(importer, imported) among the modules of a package, for type checking only or inside functions included."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = {name_of(path) for path in paths}
    found = set()
    for path in paths:
        for name in imported(path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts)):
            target = name if name in names else name.rpartition(".")[0]
            # `from rollout.bench import inputs` names the package as well: the longer name decides
            if target in names and not (target == name and any(longer.startswith(f"{name}.") for longer in names)):
                found.add((name_of(path), target))
    return {(one, other) for one, other in found if one != other}


def arrows(package: str) -> set[tuple[str, str]]:
    """(importer, imported) among the rooms of a package: its folders, and the files beside them."""

    def room(module: str) -> str:
        return [*module.split("."), package][1]

    return {(room(one), room(other)) for one, other in file_arrows(package) if room(one) != room(other)}


def circle(found: set[tuple[str, str]]) -> set[str]:
    """What is left of a graph when whatever imports nothing of the rest is taken away, again and again."""
    while found:
        importers = {one for one, _ in found}
        left = {(one, other) for one, other in found if other in importers}
        if left == found:
            return importers
        found = left
    return set()


MOST = {"engine": (21, 77), "transport": (10, 15), "rollout": (18, 50)}
"""rooms, and arrows between them"""


@pytest.mark.parametrize("package", MOST)
def test_rooms_and_files_form_no_circle(package: str) -> None:
    """Nothing imports what imports it. What a trainer holds and what serves it never meet."""
    found, files = arrows(package), file_arrows(package)
    rooms = {room for arrow in found for room in arrow}
    print(f"{package}: {len(rooms)} rooms, {len(found)} arrows; {len(files)} between files")
    assert (len(rooms), len(found)) <= MOST[package] and len(found) <= MOST[package][1]
    assert not circle(found) and not circle(files)
    assert not {("client", "service"), ("service", "client")} & found


def test_a_circle_is_seen() -> None:
    straight = {("a", "b"), ("b", "c"), ("a", "c"), ("d", "a")}
    assert circle(straight) == set()
    assert circle(straight | {("c", "a")}) == {"a", "b", "c", "d"}
    assert circle(straight | {("c", "b")}) >= {"b", "c"}


OPTIONAL = {
    *(f"engine.{each}" for each in ("cpu", "cuda", "parallel", "model_files", "paths", "processes", "vocabulary")),
    *(f"engine.forward.{each}" for each in (
        "configuration", "experts", "latent", "load", "model", "paged", "random_weights", "recurrence", "reference", "routes",
        "saved_parts", "self_check", "shaped", "shapes", "shards", "summed",
    )),
    *(f"engine.kv.{each}" for each in ("cells", "fp8", "routes", "states", "windows")),
    *(f"engine.scheduling.{each}" for each in ("drafts", "ngrams", "states", "step_seconds", "stops", "windows")),
    *(f"engine.weights.{each}" for each in (
        "cuts", "device_staging", "in_place", "layer_cuts", "lora", "offload", "twins",
    )),
}  # fmt: skip
"""parts of the engine that a configuration, a model or a device asks for"""
CHOOSE = {"engine.build", "engine.scheduling.build"}
"""files that may name them, inside functions, since they choose"""
NAMED: set[tuple[str, str]] = {
    ("engine.devices", "engine.forward.model"),
    ("engine.forward.interface", "engine.kv.states"),
    ("engine.kv.pages", "engine.kv.routes"),
    ("engine.kv.pages", "engine.kv.states"),
    ("engine.scheduling.block_tables", "engine.scheduling.states"),
    ("engine.scheduling.block_tables", "engine.scheduling.windows"),
    ("engine.scheduling.state", "engine.scheduling.states"),
    ("engine.scheduling.state", "engine.scheduling.windows"),
}
"""(core file, part) where a file of the core names the type of a part, for type checkers alone; nothing may be added. An
interface of the core takes the place of each"""


def part_of(name: str) -> str | None:
    """The optional part that a dotted name leads to."""
    return next((part for part in OPTIONAL if name == part or name.startswith(f"{part}.")), None)


def core() -> dict[str, Path]:
    """Files that importing the engine reads, by names of their modules."""
    known = modules_of(ROOT)
    return {IN_A_CHECKOUT.sub("", name): known[name] for name in closure("rollout.engine.engine", known)}


def test_the_core_imports_no_optional_part() -> None:
    """They are imported where they are chosen, and reached through an interface that the core has."""
    files = {name: path for name, path in core().items() if name.startswith("engine")}
    assert {"engine.worker", "engine.scheduling.scheduler", "engine.weights.live"} <= files.keys()
    assert not {name for name in files if part_of(name)}, "import it in build.py, inside the function that chooses it"
    named = {
        (name, part)
        for name, path in files.items()
        if name not in CHOOSE
        for each in imported(path.read_text(), name)
        if (part := part_of(each))
    }
    assert named <= NAMED, "define what the core needs of it as a Protocol, beside the code that needs it"
    assert NAMED <= named, "no longer named: take it off the list"


def test_every_file_of_the_engine_is_core_or_optional() -> None:
    files = {name_of(path) for path in (ROOT / "engine").rglob("*.py")} - {"engine.types"}
    assert {name for name in files if not part_of(name)} == {name for name in core() if name.startswith("engine")}
    assert all(part_of(each) for each in ("engine.cuda.tiles", "engine.kv.states")) and not part_of("engine.kv.store")


ASKS = re.compile(
    r"\.device\.type\b|\bdevice\.type\b|\bis_cuda\b|[!=]= *[\"'](?:cpu|cuda)[\"']|\.startswith\([\"'](?:cpu|cuda)"
)
MAY_ASK = ("engine/build.py", "engine/parallel/devices.py", "engine/cpu/", "engine/cuda/")


def test_one_place_asks_for_the_kind_of_device() -> None:
    asking = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "engine").rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(MAY_ASK)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ASKS.search(line)
    }
    assert not asking, "hand in what differs (`rollout.engine.devices.Device`, `rollout.engine.memory.Memory`)"


@pytest.mark.parametrize(
    "line", ['if device.type == "cuda":', "pin = tensor.is_cuda", 'self.device != "cpu"', "x.device.type", "kind == 'cuda'"]
)
def test_whoever_asks_for_the_kind_of_device_is_seen(line: str) -> None:
    assert ASKS.search(line)


def test_no_module_reaches_another_room_by_its_path() -> None:
    for path in modules():
        assert "parents[" not in path.read_text(), f"{path}: resources lie beside the module that reads them"


@pytest.mark.parametrize(
    ("source", "module", "seen"),
    [
        ("import rollout.client", "engine.engine", {"rollout.client"}),
        ("def f():\n    from transport import frames", "engine.kv.pages", {"transport", "transport.frames"}),
        ("from engine.engine import Engine", "transport.frames", {"engine.engine", "engine.engine.Engine"}),
        ("from rollout.engine.values import Group", "transport.frames", set()),
        ("from engine import values", "transport.frames", set()),
        ("from engine import kv", "transport.frames", {"engine.kv"}),
        ("from ..engine import kv", "transport.frames", {"engine.kv"}),
        ("from engine.engine import Engine", "rollout.service.loop", set()),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str, seen: set[str]) -> None:
    assert forbidden(source, module) == seen


def test_value_types_import_no_torch() -> None:
    for path in VALUE_TYPES:
        assert not {"torch", "transformers"} & {name.split(".")[0] for name in imported((ROOT / path).read_text(), "engine.x")}


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_client_is_slim() -> None:
    loaded = run_python("import rollout.client, sys; print(*sorted(sys.modules))").split()
    heavy = {
        "torch",
        "transformers",
        "tyro",
        "rich",
        "wandb",
        "rollout.engine.engine",
        "rollout.engine.scheduling",
        "rollout.engine.kv",
    }
    assert not heavy & set(loaded)


WITHOUT_A_MODEL = """
import sys
from rollout.commands.main import main

for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit:
        pass
    print(words, "loads", *{"torch", "transformers"} & set(sys.modules), file=sys.stderr)
"""
COMMANDS = (
    "--help", "serve --help", "keys init --file {folder}/keys.json", "serve --model /nowhere --ready-file /nowhere/ready",
    "status --address tcp://127.0.0.1:1 --timeout 0.1", "top --address tcp://127.0.0.1:1 --once --timeout 0.1",
    "pause --address tcp://127.0.0.1:1 --timeout 0.1", "refresh /nowhere --address tcp://127.0.0.1:1 --timeout 0.1",
    "--version", "fleet drain --address tcp://127.0.0.1:1", "generate --prompts /nowhere --out - --address tcp://127.0.0.1:1",
)  # fmt: skip


def test_commands_that_load_no_model_load_no_torch(tmp_path: Path) -> None:
    """Nor does a router import it: its replicas hold the models."""
    words = [command.format(folder=tmp_path) for command in COMMANDS]
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_MODEL, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if " loads" in line]
    assert told == [f"{each} loads" for each in words], done.stderr
    router = "rollout.fleet.fleet, rollout.service.loop, rollout.commands.serve_fleet, rollout.commands.starting"
    assert not {"torch", "transformers"} & set(run_python(f"import sys, {router}; print(*sys.modules)").split())


def test_torch_would_be_noticed(tmp_path: Path) -> None:
    """The negative control. An empty module stands in for torch, which takes seconds to import."""
    (tmp_path / "torch.py").write_text("")
    attempt = "try:\n    import rollout.engine.kv.pages\nexcept (AttributeError, ImportError):\n    pass\n"
    assert "torch" in run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{attempt}print(*sys.modules)").split()


def classes_by_name(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """List where each class name is defined. sources: text of each file, by path."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in statements(parsed(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return found


def test_a_class_name_means_one_thing() -> None:
    sources = {
        str(path): path.read_text()
        for folder in ("engine", "transport", "rollout")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert len(sources) > 200
    assert not {name: paths for name, paths in classes_by_name(sources).items() if len(paths) > 1}
    assert classes_by_name({"a.py": "class Turns: ...", "b.py": "class Turns: ..."}) == {"Turns": ["a.py", "b.py"]}


def test_exported_names() -> None:
    import rollout

    assert rollout.__all__ == sorted(rollout.__all__) and set(rollout.__all__) <= set(dir(rollout))
    for name in rollout.__all__:
        assert getattr(rollout, name).__name__ == name if name != "__version__" else rollout.__version__
    static = ast.parse((ROOT / "rollout/__init__.py").read_text()).body
    (checked,) = (each for each in static if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    imported = {alias.name for each in checked.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert imported | {"__version__"} == set(rollout.__all__), "what type checkers and editors see"
    with pytest.raises(AttributeError, match="no attribute 'HOME'"):
        rollout.HOME  # noqa: B018


def test_a_name_is_imported_when_it_is_asked_for() -> None:
    """Values and errors without sockets."""
    program = "from rollout import Group, Sampling, ServiceLost; import sys; print(*sys.modules)"
    loaded = set(run_python(program).split())
    assert "rollout.engine.values" in loaded and not {"zmq", "rollout.client", "torch"} & loaded
    assert "zmq" in run_python("from rollout import RolloutClient; import sys; print(*sys.modules)").split()


def test_every_error_is_exported() -> None:
    import rollout
    from rollout.transport.errors import KINDS, NoSession

    errors = {kind.__name__ for kind in KINDS.values()} - {NoSession.__name__}  # the client answers it by itself
    assert len(errors) > 15 and errors <= set(rollout.__all__)


def test_the_version_is_the_distribution_s() -> None:
    import rollout

    assert rollout.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_log_probs_are_scored_in_one_place() -> None:
    """What trains, audits and measures calls `rollout.exact`."""
    places = {str(path.relative_to(ROOT)) for path in modules() if "log_softmax" in path.read_text()}
    elsewhere = ("engine/", "rollout/bench/peers/")  # the sampler; scripts of other environments, which have none of our code
    assert {path for path in places if not path.startswith(elsewhere)} == {"rollout/exact/module.py"}


def test_files_that_the_documents_name_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = document.read_text()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for path in re.findall(r"\b(?:engine|transport|rollout|recipes|tests|docs)/[\w/]+\.(?:py|c|md)\b", text):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def missing(name: str) -> bool:
    """Whether a dotted name leads to no module, and to nothing that a module defines."""
    parts = IN_A_CHECKOUT.sub("", name).split(".")
    at = ROOT
    while parts and ((at / parts[0]).is_dir() or (at / f"{parts[0]}.py").is_file()):
        at = at / parts.pop(0)
    source = at.with_suffix(".py") if at.with_suffix(".py").is_file() else at / "__init__.py"
    text = source.read_text() if source.is_file() else ""
    return len(parts) > 1 or not all(re.search(rf"\b(def|class|import)\b.*\b{part}\b|^{part}\b", text, re.M) for part in parts)


def test_dotted_names_of_the_documents_exist() -> None:
    wrong = {}
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        names = re.findall(r"(?<![-\[/\w.])(?:rollout|engine|transport)(?:\.[a-z_]\w*)+(?!\w*[-/.]\w)", document.read_text())
        names = [name for name in names if name.split(".")[-1] not in ("toml", "py", "md", "x", "refresh")]
        if found := {name for name in names if missing(name)}:
            wrong[document.name] = found
    assert not wrong
    assert missing("rollout.sinks.define_metrics") and not missing("rollout.metrics.sinks.define_metrics")
    assert not missing("rollout.engine.values") and not missing("rollout.exact.use_exact")


def test_every_folder_and_file_of_the_engine_is_in_the_map() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/architecture.md").read_text()))
    files = [path for path in (ROOT / "engine").iterdir() if path.name[0] not in "_." and path.suffix in ("", ".py")]
    here = {path.name + ("/" if path.is_dir() else "") for path in files}
    assert here <= named


RECEIVERS = {
    "self.scheduler": "Scheduler", "self.kv": "PagedKV", "self.kv.states": "StatePages",
    "Batch": "Batch", "self.backend": "Backend", "run": "Model",
    "self.device": "Device",
}  # fmt: skip
"""what the names in `rollout.engine.pipeline.Pipeline` and `rollout.engine.worker.Worker` stand for in the picture"""
BESIDE_THE_PICTURE = {
    "Device.mark", "Scheduler.advanced", "Scheduler.moved", "Scheduler.grow_host", "Scheduler.fail_stuck",
    "Scheduler.step_failed",
}  # fmt: skip
"""clocks, notes and failures"""


def calls(path: str, owner: str, method: str) -> list[str]:
    """Dotted names that a method calls, in the order of the source."""
    (found,) = (
        node
        for each in parsed((ROOT / path).read_text()).body
        if isinstance(each, ast.ClassDef) and each.name == owner
        for node in each.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    )
    made = [node for node in ast.walk(found) if isinstance(node, ast.Call)]
    return [ast.unparse(node.func) for node in sorted(made, key=lambda node: (node.lineno, node.col_offset))]


def picture() -> tuple[dict[str, list[str]], list[str]]:
    """Of docs/architecture.md: the calls behind each line of `Engine.step`, and the boxes in order."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.split("| line of `Engine.step` | calls |")[1].split("\n\n")[0]
    lines = {line: re.findall(r"`([A-Z]\w+\.\w+)`", rest) for line, rest in re.findall(r"\| `(\w+)` \| (.*) \|", table)}
    return lines, re.findall(r'\["([A-Z]\w+\.\w+)', text.split("```mermaid")[1].split("```")[0])


def calls_with_the_worker_s(line: str) -> list[str]:
    """Dotted names that a method of the pipeline calls, those of the worker's methods that it calls in their place."""
    made = []
    for name in calls("engine/pipeline.py", "Pipeline", line):
        owner, _, method = name.rpartition(".")
        made += calls("engine/worker.py", "Worker", method) if owner == "self.worker" else [name]
    return made


def test_a_step_reads_as_the_picture() -> None:
    lines, boxes = picture()
    step = [name.removeprefix("pipeline.") for name in calls("engine/engine.py", "Engine", "step")]
    assert [name for name in step if name in lines] == list(lines) == ["plan", "move", "execute", "commit"]
    for line, want in lines.items():
        made = [name.rpartition(".") for name in calls_with_the_worker_s(line)]
        known = [f"{RECEIVERS[owner]}.{name}" for owner, _, name in made if owner in RECEIVERS]
        assert [name for name in known if name not in BESIDE_THE_PICTURE] == want
    assert boxes == [name for names in lines.values() for name in names]


HEART = (
    "engine/engine.py", "engine/pipeline.py", "engine/worker.py", "engine/scheduling", "engine/kv", "engine/weights",
    "rollout/service", "rollout/fleet",
)  # fmt: skip
"""files and folders in which no constructor has more than MOST_PARTS parameters"""
MOST_PARTS = 5


def given(made: ast.FunctionDef) -> list[str]:
    """List the parameters of an `__init__`, whatever their kind, without `self`."""
    every = made.args
    named = [*[*every.posonlyargs, *every.args][1:], every.vararg, *every.kwonlyargs, every.kwarg]
    return [each.arg for each in named if each is not None]


def collaborators(source: str) -> dict[str, list[str]]:
    """Map the classes of a module to what their constructors are given: the parameters of `__init__`, or the fields without a
    default of a dataclass that can change and has methods. Other classes are not in it: values (NamedTuples, structs, other
    dataclasses), protocols, and classes that inherit their constructor."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        kinds = [ast.unparse(each) for each in node.decorator_list]
        if "__init__" in methods:
            found[node.name] = given(methods["__init__"])
        elif methods and any(kind.startswith("dataclass") and "frozen=True" not in kind for kind in kinds):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is None]
            found[node.name] = [ast.unparse(each.target) for each in fields]
    return found


def test_the_heart_is_made_of_few_parts() -> None:
    paths = [path for name in HEART for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).glob("*.py")))]
    made = {f"{path.stem}.{name}": parts for path in paths for name, parts in collaborators(path.read_text()).items()}
    assert len(made) > 80 and {"engine.Engine", "scheduler.Scheduler", "loop.Service", "fleet.Fleet"} <= made.keys()
    assert not {name: parts for name, parts in made.items() if len(parts) > MOST_PARTS}, "group settings, or let it make parts"


def test_a_constructor_with_many_parts_is_seen() -> None:
    few = "class Few:\n def __init__(self, a, b, *, c, d, e=None): ...\n"
    many = "class Many:\n def __init__(self, a, /, b, *c, d=None, e, **f): ...\n"
    changing = "@dataclass(slots=True)\nclass Changing:\n a: A\n b: int = 0\n def act(self): ...\n"
    made = {name: len(parts) for name, parts in collaborators(few + many + changing).items()}
    assert made == {"Few": 5, "Many": 6, "Changing": 1}
    fields = "".join(f" {name}: int\n" for name in "abcdefg")
    assert not collaborators(f"class Value(NamedTuple):\n{fields}@dataclass(frozen=True)\nclass Other:\n{fields}")


def stagings(source: str) -> list[str]:
    """List the parameters of each method `stage` of a module."""
    found = [node for node in statements(parsed(source)) if isinstance(node, ast.FunctionDef) and node.name == "stage"]
    return [ast.unparse(node.args) for node in found]


def test_stage_has_one_signature() -> None:
    """From the service's engine, which may be a router's fleet, down to the weights of a device."""
    found = [each for path in modules() for each in stagings(path.read_text())]
    assert len(found) >= 6 and set(found) == {"self, update: WeightUpdate"}
    assert stagings("class A:\n def stage(self, manifest, version=None): ...") == ["self, manifest, version=None"]


def of_the_scheduler(source: str) -> set[str]:
    """Modules of `rollout.engine.scheduling` that a module imports, other than the plan."""
    names = {
        name
        for name in imported(source, "engine.x")
        if name.startswith(("engine.scheduling", "engine.engine", "engine.pipeline"))
    }
    return {name for name in names if not name.startswith("engine.scheduling.plan")}


def test_a_worker_knows_no_scheduler() -> None:
    """What several devices replicate gets plans, and nothing else of who made them."""
    assert not of_the_scheduler((ROOT / "engine/worker.py").read_text())
    assert of_the_scheduler((ROOT / "engine/pipeline.py").read_text()), "the negative control"


def test_one_class_writes_the_samples_that_ended() -> None:
    writers = {str(path.relative_to(ROOT)) for path in modules() if re.search(r"\._ended\b.*[^=!<>]=[^=]", path.read_text())}
    assert writers & {"engine/engine.py", "engine/pipeline.py", "engine/worker.py"} == {"engine/pipeline.py"}


def test_the_engine_is_short() -> None:
    lengths = {name: length for (path, name), (_, length) in definitions().items() if path == "engine/engine.py"}
    assert lengths["Engine.step"] <= 15 and lengths["Engine"] <= 250 and lengths["Engine.__init__"] <= 50


def test_tests_share_only_what_is_in_support() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text, module = path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not re.search(r"from (?:tests import|\.)|\btests\.(?!support|bench)", text):
            continue
        others = {name for name in imported(text, module) if re.match(r"tests\.(?!support|bench)", name)}
        assert not others, (
            f"{path.name} imports {others}: what tests share lies in tests/support, and benchmarks in tests/bench"
        )


def assigned_from_outside(source: str) -> set[str]:
    """Attributes of an engine that a module assigns, other than to hold on to the engine itself."""
    found = set()
    for node in statements(parsed(source)):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Attribute) and re.search(r"(^|\.)_?engine$", ast.unparse(target.value)):
                found.add(ast.unparse(target))
    return found


def test_nobody_writes_into_the_engine() -> None:
    for path in modules():
        if not path.is_relative_to(ROOT / "engine"):
            assert not assigned_from_outside(path.read_text()), f"{path}: call a method (`Engine.pause`)"


@pytest.mark.parametrize("line", ["engine.paused = True", "self._engine.asleep = False", "bench.engine.overlap |= x"])
def test_whoever_writes_into_the_engine_is_seen(line: str) -> None:
    assert assigned_from_outside(line) and not assigned_from_outside("self.engine = engine")


def test_one_maker_of_batches() -> None:
    for path in modules():
        text = path.read_text()
        if not re.search(r"\bBatch\(|\bSimpleNamespace\b", text):
            continue
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and path.name != "batch.py":
                assert ast.unparse(node.func) != "Batch", f"{path}: `Batch.build` makes batches"
            if isinstance(node, ast.Name) and path.is_relative_to(ROOT / "engine"):
                assert node.id != "SimpleNamespace", f"{path}: a stand-in for a value has a name and a type"


MOST_LINES = {"function": 50, "class": 250}


def docstring_lines(node: ast.AST) -> int:
    """Lines of the docstrings in a function or class, its own included."""
    strings = (each.value for each in statements(node) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    return sum((each.end_lineno or 0) - each.lineno + 1 for each in strings if isinstance(each.value, str))


@cache
def definitions() -> dict[tuple[str, str], tuple[str, int]]:
    """The kind, of MOST_LINES, and the lines without docstrings of each function and class, by path and dotted name."""
    found: dict[tuple[str, str], tuple[str, int]] = {}

    def look(path: str, prefix: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, kind = f"{prefix}{child.name}", "class" if isinstance(child, ast.ClassDef) else "function"
                found[path, name] = kind, (child.end_lineno or 0) - child.lineno + 1 - docstring_lines(child)
                look(path, f"{name}.", child)
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                look(path, prefix, child)

    for path in modules():
        look(str(path.relative_to(ROOT)), "", parsed(path.read_text()))
    return found


@pytest.mark.parametrize("kind", MOST_LINES)
def test_functions_and_classes_stay_readable(kind: str) -> None:
    lengths = {f"{path}:{name}": length for (path, name), (its, length) in definitions().items() if its == kind}
    long = {name for name, length in lengths.items() if length > MOST_LINES[kind]}
    assert long <= STILL_LONG, "cut it into parts that have names"
    mine = STILL_LONG & lengths.keys()
    assert mine <= long, "no longer too long: take it off STILL_LONG"


STILL_LONG: set[str] = set()
"""what is still to be cut; nothing may be added"""


def test_nothing_is_on_the_list_that_is_gone() -> None:
    assert all(tuple(name.split(":")) in definitions() for name in STILL_LONG)


def quick() -> set[str]:
    """Test files of `make quick`."""
    shown = subprocess.run(["make", "--dry-run", "quick"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return set(re.findall(r"tests/[\w/]+\.py", shown.stdout))


WHOLE = {
    "tests/engine/test_equivalence.py": "whole models",
    "tests/engine/test_kv_versions.py": "whole models",
    "tests/engine/test_cuda_static.py": "compiles every kernel",
    "tests/engine/test_long_tail.py": "schedules of thousands of steps",
    "tests/engine/test_simulated.py": "schedules of thousands of steps",
    "tests/engine/test_pressure.py": "a pool that is too small for seconds on end",
    "tests/engine/test_schedules.py": "hundreds of schedules",
    "tests/engine/test_loads.py": "whole models",
    "tests/engine/test_versions.py": "loads the engine",
}
"""no torch in them, and yet not quick"""


def test_quick_has_every_small_test_of_the_engine() -> None:
    """Those that import no torch: scheduling, blocks, tables, plans."""
    small = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/engine").glob("test_*.py")
        if "torch" not in {name.split(".")[0] for name in imported(path.read_text(), "tests.engine.x")}
    }
    assert small - WHOLE.keys() <= quick(), "name it in QUICK of the Makefile, or in WHOLE with a reason"
    assert all((ROOT / path).exists() for path in quick() | WHOLE.keys())
