"""Writes the tables of README.md and docs/ from committed files of results.

    python tools/tables.py            # writes the tables again
    python tools/tables.py --check    # changes nothing; the exit code is 1 if a table would change

A page has the line `<!-- table NAME ARGUMENT ... -->` before a table and `<!-- end -->` after it.
NAME is a function of TABLES. The figures are in docs/results/ and in tools/benchmark/baselines/,
which the commands beside the tables write. Files in docs/results/recorded/ are older tables, whose
figures were taken down with their conditions, but without the file that the command wrote.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results_plot import by_size, compared

from brt.planning.topologies import CHIPS
from brt.tasks.differences import Difference

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"(<!-- table (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MILLION, GIB = 1e6, 2**30
DISTRIBUTIONS = {
    "random": "independent queries", "tight": "around 50 modes",
    "loose": "farther from 50 modes", "sharp": "close to 50 sharp modes",
    "retrieval": "one key for each query",
}  # fmt: skip
WIDTH = 110  # Longer lines of an output are cut.
FAULTS = "tests/faults/faults.json"
ADDITIONS = {
    "Slide:6L:256": "a window of 256 instead of 128 tokens",
    "Slide:7L": "a seventh layer",
    "Rec:fixed:skip": "a recurrence with fixed gates",
    "Rec:lstm:skip": "a recurrence with lstm gates",
}


def results(name: str) -> dict[str, Any]:
    """Returns the contents of a file of docs/results/."""
    return json.loads((ROOT / f"docs/results/{name}.json").read_text())


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


def shown(found: Difference | None, several_seeds: bool = False) -> str:
    """Returns a difference with its interval; bold if the interval holds the seeds and not zero."""
    if found is None:
        return "-"
    if not found.half_width:
        return f"{found.value:+.3f}"
    low, high = found.value - found.half_width, found.value + found.half_width
    text = f"{found.value:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if several_seeds and low * high > 0 else text


def additions(*names: str) -> str:
    """Returns what each addition to Slide:6L changes, for the runs with seed 0 of each file."""
    columns = {}
    for name in names:
        found = results(name)
        runs = [run for run in found["runs"] if run["seed"] == 0]
        (group,) = (
            own for own in by_size(runs).values() if any(r["name"] == "Slide:6L" for r in own)
        )
        columns[found["name"]] = group
    rows = [
        (text, model, *(shown(compared(runs, model, "Slide:6L")) for runs in columns.values()))
        for model, text in ADDITIONS.items()
    ]
    return markdown(("addition", "model", *columns), rows)


def trainings(model: str, baseline: str, *names: str) -> str:
    """Returns the difference of two models for each length of training and size."""
    rows = []
    for name in names:
        found = results(name)
        for (width, per_step, tokens), runs in by_size(found["runs"]).items():
            difference = compared(runs, model, baseline)
            if difference is None:
                continue
            seeds = sorted(run["seed"] for run in runs if run["name"] == model)
            each = [compared([r for r in runs if r["seed"] == s], model, baseline) for s in seeds]
            rows.append((
                found["name"], f"{tokens / MILLION:.0f}", str(width), f"{per_step:,}",
                ", ".join(f"{one.value:+.3f}" for one in each if one),
                shown(difference, len(seeds) > 1),
            ))  # fmt: skip
    heads = ("corpus", "million tokens", "width", "tokens a step", "each seed", "mean and interval")
    return markdown(heads, rows)


def answers(name: str) -> str:
    """Returns the exact answers of memory tasks by distance, with all seeds in a cell."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(results(name)["runs"], key=lambda run: run["seed"]):
        by_model.setdefault(run["name"], []).append(run)
    first = next(iter(by_model.values()))[0]
    heads = ["model", "learning rate", "seeds"]
    heads += [f"up to {row['windows']}" for row in first["answers"]]
    rows = [
        (model, f"{own[0]['learning_rate']:g}", ", ".join(str(run["seed"]) for run in own),
         *(", ".join(f"{run['answers'][i]['answers_exact']:.0f}" for run in own)
           for i in range(len(first["answers"]))))
        for model, own in by_model.items()
    ]  # fmt: skip
    return markdown(heads, rows)


def memory_kinds(name: str) -> str:
    """Returns the sizes of the models that tools/memory_kinds.py has written."""
    heads = ("model", "parameters", "carried, bytes a lane", "FLOPs a token")
    keys = ("parameters", "carried", "flops")
    return markdown(
        heads, [(row["model"], *(f"{row[key]:,}" for key in keys)) for row in results(name)]
    )


def errors(name: str) -> str:
    """Returns the errors that tools/benchmark/clustered.py wrote, by distribution of queries."""
    rows = results(name)["found"]["errors"]
    columns = [column for column in rows[0] if column != "kind"]
    heads = ("", *(DISTRIBUTIONS[column] for column in columns))
    return markdown(
        heads, [(row["kind"], *(f"{row[column]:.3f}" for column in columns)) for row in rows]
    )


def recorded(name: str) -> str:
    """Returns a table of docs/results/recorded/ and a line with its command and conditions."""
    found = results(f"recorded/{name}")
    told = f"{found['date']}, `{found['command']}`: {found['conditions']}."
    return f"{markdown(found['heads'], found['rows'])}\n\n{told}"


def output(name: str, *patterns: str) -> str:
    """Returns the lines that match a pattern (all without one) of what a command printed; lines
    that begin with "#" are about the command.
    """
    lines = (ROOT / f"docs/results/{name}.txt").read_text().splitlines()
    own = [line for line in lines if not line.startswith("#")]
    shown = [line for line in own if not patterns or any(re.search(p, line) for p in patterns)]
    cut = [line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in shown]
    return "\n".join(("```", *cut, "```"))


def faults() -> str:
    """Returns the table of the faults that tests inject, from tests/faults/faults.json."""
    rows = json.loads((ROOT / FAULTS).read_text())
    return markdown(("fault", "what holds"), [(row["fault"], row["must_hold"]) for row in rows])


def gigabytes(found: Mapping[str, Any], cost: Mapping[str, float]) -> str:
    """Returns the traffic of a part; "-" of baselines that count whole operands of gathers."""
    return f"{cost['bytes'] / 1e9:.1f}" if "date" in found else "-"


def steps(*names: str) -> str:
    """Returns the steps of baselines: costs of a device, and the least time of the step, whose
    share of the peak counts the FLOPs of the model. Collectives are known of some baselines.
    """
    rows = []
    for name in names:
        found = json.loads((ROOT / f"tools/benchmark/baselines/{name}.json").read_text())
        machine, cost = found["case"]["topology"], found["parts"]["all"]
        chip = CHIPS[machine.partition(":")[0]]
        devices = math.prod(int(n) for n in machine.partition(":")[2].split("x"))
        computing, waiting = cost["cycles"] / chip.clock, 0.0 if devices == 1 else math.nan
        if "step_seconds" in found:
            waiting = found["step_seconds"]["network"] - found["covered_network_seconds"]
        share = found["model_flops"] / devices / chip.flops / (computing + waiting)
        numbers = f"{1e3 * computing:.1f}", f"{1e3 * waiting:.1f}", f"{share:.1%}"
        rows.append((
            name, machine, f"{found['tokens_per_step']:,}", f"{cost['cycles'] / 1e6:.1f}",
            gigabytes(found, cost), f"{found['temporary_bytes'] / GIB:.2f}",
            *(number.replace("nan%", "-").replace("nan", "-") for number in numbers),
        ))  # fmt: skip
    heads = ("baseline", "machine", "tokens of a step", "Mcycles", "GB", "temporaries, GiB",
             "computation, ms", "network outside of it, ms", "share of the peak")  # fmt: skip
    return markdown(heads, rows)


def parts(name: str) -> str:
    """Returns the parts of a baseline's step."""
    found = json.loads((ROOT / f"tools/benchmark/baselines/{name}.json").read_text())
    rows = [
        (part, f"{cost['cycles'] / 1e6:.1f}", gigabytes(found, cost))
        for part, cost in found["parts"].items()
    ]
    return markdown(("part", "Mcycles", "GB"), rows)


TABLES: Mapping[str, Callable[..., str]] = {
    "additions": additions, "trainings": trainings, "answers": answers,
    "memory_kinds": memory_kinds, "steps": steps, "parts": parts, "recorded": recorded,
    "output": output, "faults": faults, "errors": errors,
}  # fmt: skip


def rewritten(page: str) -> str:
    """Returns a page with its tables as the files of results have them."""

    def table(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}{TABLES[name](*arguments)}\n{match[4]}"

    return MARK.sub(table, page)


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--check", action="store_true", help="only say which pages would change")
    check = flags.parse_args(arguments).check
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    changed = {
        page: new for page in pages if (new := rewritten(page.read_text())) != page.read_text()
    }
    for page, new in changed.items():
        print(
            f"{page.relative_to(ROOT)}: {'has other' if check else 'new'} tables", file=sys.stderr
        )
        if not check:
            page.write_text(new)
    if check and changed:
        print("python tools/tables.py writes the tables of the files of results", file=sys.stderr)
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
