"""docs/models.md: which causal model types of transformers are right, and why the others are refused.

python -m tests.support.models_page                    writes the page from docs/models.jsonl
python -m tests.support.models_page --sweep            computes these results first, in about ten minutes
python -m tests.support.models_page --sweep llama …    computes those of some types; others keep theirs
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path

import transformers

from tests.support.client_page import table
from tests.support.families import FAMILIES, PATTERNS, SETTINGS, Outcome, both_in_a_child

PAGE = Path(__file__).parents[2] / "docs/models.md"
RESULTS = PAGE.with_suffix(".jsonl")
DTYPES = ("float32", "bfloat16")
KINDS = {
    "right": "right",
    "refused": "refused at load, with the reason",
    "wrong": "wrong",
    "unclear": "an error without a reason, a crash or a hang",
    "not built": "not built",
}
RUNS = {"decoder": "native layers", "kernels": "module, our kernels", "torch": "module, torch's products"}
Found = dict[str, dict[str, Outcome]]
"""outcomes by family and dtype"""


def read() -> Found:
    """Return the results beside the page."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {each["family"]: {dtype: Outcome(**each[dtype]) for dtype in DTYPES} for each in lines}


def write(found: Found) -> None:
    """Store results, differences to one digit."""
    rounded = {name: {d: each._replace(worst=float(f"{each.worst:.0e}")) for d, each in found[name].items()} for name in found}
    lines = [{"family": name, **{d: rounded[name][d]._asdict() for d in DTYPES}} for name in FAMILIES if name in rounded]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))


def counts(found: Found, dtype: str) -> Counter[str]:
    """Return how many families have each kind of outcome."""
    return Counter(each[dtype].kind for each in found.values())


def page(found: Found) -> str:
    """Write the page of some results."""
    by_dtype = [counts(found, dtype) for dtype in DTYPES]
    summary = [(text, *(str(count[kind]) for count in by_dtype)) for kind, text in KINDS.items()]
    worst = {kind: [name for name, each in found.items() if worst_kind(each) == kind] for kind in KINDS}
    right = sorted(worst["right"], key=lambda name: list(RUNS).index(found[name]["bfloat16"].runs))
    bad = worst["wrong"] + worst["unclear"]
    return TEXT.format(
        transformers=transformers.__version__,
        types=len(found),
        right=len(worst["right"]),
        refused_types=len(worst["refused"]),
        not_built_types=len(worst["not built"]),
        settings=", ".join(SETTINGS),
        summary=table(("", *DTYPES), summary),
        runs=table(
            ("runs", "types"), [(RUNS[kind], str(sum(found[n]["bfloat16"].runs == kind for n in right))) for kind in RUNS]
        ),
        served=table(("type", "layers", "runs", "largest difference in fp32"), [served(name, found[name]) for name in right]),
        refused=table(("type", "reason"), [(f"`{n}`", reason(found[n])) for n in worst["refused"]]),
        bad="\n## Wrong or unclear\n\n" * bool(bad)
        + table(("type", "what"), [(f"`{n}`", reason(found[n])) for n in bad]) * bool(bad),
        not_built=table(("type", "reason"), [(f"`{n}`", reason(found[n])) for n in worst["not built"]]),
    )


def worst_kind(each: dict[str, Outcome]) -> str:
    """Return the outcome of a family in both dtypes: right only if it is right in both."""
    order = ("wrong", "unclear", "refused", "not built", "right")
    return min((each[dtype].kind for dtype in DTYPES), key=order.index)


def served(name: str, each: dict[str, Outcome]) -> tuple[str, ...]:
    """Return the row of a family that is right."""
    bf16, fp32 = each["bfloat16"].runs, each["float32"].runs
    runs = RUNS[bf16] + (f"; in fp32 {RUNS[fp32]}" if fp32 != bf16 else "")
    return f"`{name}`", layers(name), runs, f"{each['float32'].worst:.0e}"


def layers(name: str) -> str:
    """Return the layers of the model that is tested, such as "3 × linear_attention, full_attention"."""
    pattern = PATTERNS.get(name) or PATTERNS.get(f"{name}_text") or ["attention"] * 4
    runs = [(kind, len(list(same))) for kind, same in groupby(pattern)]
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in runs)


def reason(each: dict[str, Outcome]) -> str:
    """Return why a family is not right, without its own name and without figures of one run."""
    bad = min(each.values(), key=lambda one: one.kind == "right")
    said = re.sub(r"^[\w-]+ \([\w-]+\): ", "", " ".join(bad.says.split()))
    said = said.partition(" You can install it")[0].removesuffix(" is not supported").removesuffix(",")
    return re.sub(r": by \S+ on average, of which.*", " (self-check)", said)


TEXT = """# Models

<!-- written by python -m tests.support.models_page -->

A causal language model runs unmodified if it calls transformers' functions for attention, recurrence and experts. Of the
{types} causal model types of transformers {transformers}, {right} are right, {refused_types} are refused at load with an error
that gives the reason, and {not_built_types} could not be tested. [refused.md](decisions/refused.md) describes the checks.

The tested model of a type is small and has random weights, at least four layers, and the kinds of layers of published
checkpoints. Its log-probs are compared with those of the module's plain forward in each of these settings: {settings}.
A type is right in fp32 if they differ by at most 1e-5 in all settings. If they differ by more, and in bf16, the engine and
the plain forward are both compared with a forward in a wider format (fp64 for fp32, fp32 for bf16). On average, the engine may
differ from it at most 3 times as much as the plain forward. Configurations: `tests/support/families.py`. Results:
[models.jsonl](models.jsonl).

{summary}
## Right

{runs}
*Native layers*: C code runs the decoder layers, in one call if the model has no experts. *Module, our kernels*: transformers'
code runs with the products, attention, convolutions and scans of this package. In both cases a token's bits do not depend on
the batch. *Module, torch's products*: torch computes some product, so the last bits of samples may depend on the batch; the
log gives the reason at load. The column is for the tested model in bf16 on an x86 CPU. Native layers need heads whose size is
a multiple of 32. The tested models of `glm4_moe`, `mixtral`, `olmoe` and `qwen3_moe` have smaller heads; the published ones
run as native layers. On CUDA, recurrent layers run in Triton, and with `exact` experts too: see
[cuda.md](decisions/cuda.md). Modules that are not reached by text, such as vision towers, do not change.

{served}
## Refused

{refused}{bad}
## Not built

There is no small test model of these types. Only the self-check at load tests them.

{not_built}"""


def main() -> None:
    """Write the page, after a sweep if asked for."""
    names = sys.argv[2:] or FAMILIES
    if sys.argv[1:2] == ["--sweep"]:
        found = read() if RESULTS.exists() and sys.argv[2:] else {}
        for name in names:
            found[name] = both_in_a_child(name)
            print(name, *(found[name][dtype].kind for dtype in DTYPES), flush=True)
            write(found)
    PAGE.write_text(page(read()))


if __name__ == "__main__":
    main()
