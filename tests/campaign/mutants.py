"""Changes the pure modules in one place at a time, and tells which changes no unit or property test notices.

cosmic-ray makes the changes: another comparison, a number, `not`, a loop that never runs … Of all of them, a sample is
tried, each in a copy of the checkout, with the tests that import the changed module. What survives is printed as a
difference; some of it is equivalent to the original, and only a reader can tell.
"""

import argparse
import ast
import concurrent.futures
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

TOP = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """A change to a module: what cosmic-ray's operator of this name makes of the place with this number."""

    module: str
    operator: str
    occurrence: int


def modules() -> list[str]:
    """Return the paths of the pure modules: those that are held to full branch coverage."""
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["coverage"]
    names = [name.replace(".", "/") for name in settings["run"]["source_pkgs"]]
    left_out = {pattern.removeprefix("*/") for pattern in settings["run"].get("omit", ())}
    files = [path for name in names for path in [*TOP.glob(f"{name}.py"), *TOP.glob(f"{name}/*.py")]]
    return sorted({str(path.relative_to(TOP)) for path in files} - left_out)


def without_hints(code: str) -> str:
    """Return the program as text, without its type hints and docstrings: what remains can make a difference."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("hint", ast.Load())
    return ast.dump(tree)


def changed(mutant: Mutant) -> str | None:
    """Return the changed text of the module.

    None: there is no such place, only a type hint would change, or it would not be Python (`**` between braces, which
    cosmic-ray takes for a power).
    """
    from cosmic_ray import plugins  # noqa: PLC0415 (not among what the tests need)
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415

    code = (TOP / mutant.module).read_text()
    made: str | None = mutate_code(code, plugins.get_operator(mutant.operator)(), mutant.occurrence)
    try:
        return None if made is None or without_hints(made) == without_hints(code) else made
    except SyntaxError:
        return None


def all_mutants(paths: list[str]) -> list[Mutant]:
    """Return every change that can be made to these modules, type hints included."""
    from cosmic_ray import plugins  # noqa: PLC0415
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415

    found = []
    for path in paths:
        nodes = list(ast_nodes(get_ast((TOP / path).read_text())))
        for name in plugins.operator_names():
            if "/Variable" in name:  # these need to be told which variable
                continue
            operator = plugins.get_operator(name)()
            places = sum(1 for node in nodes for _ in operator.mutation_positions(node))
            found += [Mutant(path, name, occurrence) for occurrence in range(places)]
    return found


def tests_of(path: str) -> list[str]:
    """Return the unit and property tests that import this module, or otherwise any of its package; all if none does."""
    module = path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    found, of_package = [], []
    for test in sorted([*TOP.glob("tests/unit/test_*.py"), *TOP.glob("tests/property/test_*.py")]):
        for node in ast.walk(ast.parse(test.read_text())):
            if isinstance(node, ast.ImportFrom) and (
                node.module == module or (node.module == package and name in [alias.name for alias in node.names])
            ):
                found.append(str(test.relative_to(TOP)))
                break
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.") and "." in package:
                of_package.append(str(test.relative_to(TOP)))
    return found or sorted(set(of_package)) or ["tests/unit", "tests/property"]


def survives(mutant: Mutant, made: str, seconds: float) -> bool:
    """Whether all tests of the module pass with this change, within so many seconds."""
    with tempfile.TemporaryDirectory() as base:
        copy = Path(base, "checkout")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*cache")
        shutil.copytree(TOP, copy, ignore=ignored, symlinks=True)
        (copy / mutant.module).write_text(made)
        try:
            # The copy is first in the path of modules, before what is installed.
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests_of(mutant.module)],
                cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def difference(mutant: Mutant, made: str) -> str:
    """Return what was changed."""
    code = (TOP / mutant.module).read_text()
    lines = difflib.unified_diff(code.splitlines(), made.splitlines(), mutant.module, mutant.operator, "", "", 1, "")
    return "\n".join(lines)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="scripts/campaign mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=200, help="how many changes are tried (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--module", action="append", help="only this module (path); repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--seconds", type=float, default=900.0, help="tests that take longer have noticed the change")
    parser.add_argument("--json", action="store_true", help="print the summary for a program to read")
    options = parser.parse_args()
    try:
        import cosmic_ray  # noqa: F401, PLC0415
    except ImportError:
        print(f"mutants: needs cosmic-ray: {sys.executable} -m pip install cosmic-ray", file=sys.stderr)
        return 2
    print(f"mutants: seed {options.seed}", file=sys.stderr)
    chosen = all_mutants(options.module or modules())
    random.Random(options.seed).shuffle(chosen)
    tried: list[tuple[Mutant, str]] = []
    for mutant in chosen:
        if len(tried) == options.sample:
            break
        made = changed(mutant)
        if made is not None:
            tried.append((mutant, made))
    survivors: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # Tests that fail in a copy anyway would notice every change.
        paths = sorted({mutant.module for mutant, _ in tried})
        passing = pool.map(lambda path: survives(Mutant(path, "", 0), (TOP / path).read_text(), options.seconds), paths)
        unfit = [path for path, passes in zip(paths, passing, strict=True) if not passes]
        if unfit:
            print(f"mutants: the tests of these fail, or take too long, unchanged: {', '.join(unfit)}", file=sys.stderr)
            return 2
        outcomes = pool.map(lambda one: survives(one[0], one[1], options.seconds), tried)
        for at, ((mutant, made), lives) in enumerate(zip(tried, outcomes, strict=True), 1):
            if lives:
                survivors.append({**mutant._asdict(), "difference": difference(mutant, made)})
                print(survivors[-1]["difference"], file=sys.stderr)
            print(f"mutants: {at} of {len(tried)} tried, {len(survivors)} survived", file=sys.stderr)
    if options.json:
        summary = {"seed": options.seed, "places": len(chosen), "tried": len(tried), "survivors": survivors}
        print(json.dumps(summary, indent=1))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
