"""The rules of the code base that no linter knows: who may import whom, what loads without torch,
what is documented, and how long files and functions may be."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hyperopt", "ckpt", "cli")

# From the bottom up. A module imports from its own layer and from those above it in this table;
# imports for type checking only do not count. A new module must be given its place here.
LAYERS = {
    "hyperopt": (
        ("ownership",),
        ("sharing", "replica_count"),
        ("symmetric",),
        ("newton_schulz", "layout", "hyperparameters", "hooks", "blocks", "torch_hooks"),
        ("compiled",),
        ("rules", "plan", "control", "torch_muon"),
        ("planning",),
        ("comm",),
        ("executor", "state", "preflight", "guard"),
        ("state_dicts", "loading", "agreement"),
        ("assembly",),
        ("seam",),
        ("distributed",),
        ("muon", "adamw", "chained_views", "chained", "recipes"),
    ),
    "ckpt": (
        ("errors", "names", "dtypes", "schema", "processes"),
        ("progress", "preemption", "heartbeat", "retention", "exiting"),
        (
            *("manifest_checks", "formats", "formats.inert_pickle", "formats.pickle_writer"),
            *("formats.zip_records", "state", "state.values"),
        ),
        ("manifest", "topology"),
        ("storage.protocol", "storage.spans"),
        ("storage.faults", "storage.local", "storage.clients"),
        ("storage.s3",),
        ("storage.remote",),
        (
            *("storage", "ranges", "data_file", "planner", "state.merge", "reshard.streams"),
            *("formats.torch_archive", "formats.dcp_reader", "formats.dcp", "coverage"),
            "verify_data",
        ),
        (
            *("formats.dcp_writer", "formats.target", "formats.record", "formats.state_tree"),
            *("reshard.rounding", "lease", "metrics", "renaming", "selection"),
        ),
        ("formats.safetensors", "formats.torch_file", "formats.dcp_objects", "reshard.rewrite"),
        ("formats.safetensors_reader", "formats.torch_reader"),
        ("formats.ranks",),
        ("formats.foreign",),
        ("reporting",),
        ("checkpoint", "commit", "summary", "marks"),
        ("reshard.plan", "reshard.view"),
        ("reshard.execute", "verify", "runs", "diff", "resume_plan", "environment"),
        ("cleanup", "adopt"),
        ("reshard", "coordinator", "state.tensors", "state.rng", "state.part", "state.groups"),
        ("state.modules", "state.objects", "state.owned_optimizer", "state.torch_optimizer"),
        ("app_state",),
        ("state.capture", "reading"),
        ("sharing",),
        ("saving", "loading", "staging"),
        ("background",),
        ("saver",),
        # What speaks to the server is below the manager; the server itself is above everything.
        ("server.messages", "server.outbox"),
        ("server.problems", "server.summaries"),
        ("server.client",),
        ("server.reporter",),
        ("server.link",),
        ("manager",),
        (
            *("server", "server.actors", "server.api", "server.api.parameters", "server.database"),
            *("server.models", "server.roots", "server.settings"),
        ),
        ("server.context",),
        ("server.events",),
        ("server.checkpoints", "server.migrating"),
        ("server.runs",),
        ("server.saves",),
        ("server.registry",),
        ("server.api.access",),
        (
            *("server.api.checkpoints", "server.api.events", "server.api.health"),
            *("server.api.runs", "server.api.saves"),
        ),
        ("server.app",),
        ("server.serving",),
    ),
}

LEAVES = ("hyperopt.ownership", "hyperopt.sharing")

# All that may import torch; everything else in ckpt and cli, and the leaf of hyperopt, must not.
NEEDS_TORCH = (
    *("ckpt.app_state", "ckpt.state.", "ckpt.coordinator"),
    *("ckpt.saving", "ckpt.loading", "ckpt.reading", "ckpt.sharing", "ckpt.manager", "cli.demo."),
    *("ckpt.staging", "ckpt.background", "ckpt.saver"),
    "ckpt.formats.dcp.",
)

MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 70


@dataclass(frozen=True)
class Import:
    """Module `source` imports module (or name in a module) `target`, on a line."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _modules() -> dict[str, Path]:
    return {_module(path): path for path in _sources(*PACKAGES)}


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without the bodies of `if TYPE_CHECKING:`."""
    yield node
    checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in node.orelse if checking else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from _runtime_nodes(child)


def _imports_of(module: str, text: str) -> Iterator[Import]:
    """What a module imports at run time, also inside functions."""
    for node in _runtime_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                yield Import(module, _target(node.module or "", alias.name), node.lineno)


def _target(module: str, name: str) -> str:
    """`from a import b` imports module a.b where there is one, else a name from module a."""
    return f"{module}.{name}" if f"{module}.{name}" in _modules() else module


@functools.cache
def _imports() -> tuple[Import, ...]:
    texts = {module: path.read_text() for module, path in _modules().items()}
    return tuple(found for item in texts.items() for found in _imports_of(*item))


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _layer(module: str) -> int:
    package, _, name = module.partition(".")
    for index, names in enumerate(LAYERS[package]):
        if name in names:
            return index
    raise AssertionError(f"{module} has no place in LAYERS")


def _forbidden(found: Import) -> str | None:
    """Why an import between the packages is not allowed, or None."""
    source, target = found.source, found.target
    if _within(source, "hyperopt") and (_within(target, "ckpt") or _within(target, "cli")):
        return "hyperopt knows neither ckpt nor cli"
    if _within(source, "ckpt") and _within(target, "cli"):
        return "ckpt does not know cli"
    if _within(source, "ckpt") and _within(target, "hyperopt") and target not in LEAVES:
        return f"of hyperopt, ckpt may import its torch-free leaves only: {LEAVES}"
    if target.partition(".")[0] in ("tests", "benchmarks"):
        return "shipped code imports no tests or benchmarks"
    return None


_IMPORTS = """
import ckpt.errors
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
else:
    from ckpt import errors
def function():
    try:
        from hyperopt.ownership import Box
    except ImportError:
        import cli
"""


def test_imports_are_found_where_they_hide() -> None:
    found = {item.target for item in _imports_of("ckpt.example", _IMPORTS)}
    assert found == {"ckpt.errors", "typing", "hyperopt.ownership", "cli"}


@pytest.mark.parametrize(
    ("source", "target", "allowed"),
    [
        ("hyperopt.muon", "ckpt.errors", False),
        ("hyperopt", "cli", False),
        ("ckpt.runs", "cli.main", False),
        ("ckpt.planner", "hyperopt.plan", False),
        ("ckpt.planner", "hyperopt", False),
        ("ckpt.planner", "hyperopt.ownership", True),
        ("ckpt.topology", "hyperopt.sharing", True),
        ("cli.main", "hyperopt.muon", True),
        ("cli.main", "tests.distributed", False),
    ],
)
def test_rules_between_packages(source: str, target: str, allowed: bool) -> None:
    assert (_forbidden(Import(source, target, 1)) is None) == allowed


def test_packages_keep_apart() -> None:
    breaches = [f"{found}: {reason}" for found in _imports() if (reason := _forbidden(found))]
    assert breaches == []


@pytest.mark.parametrize("package", LAYERS)
def test_modules_import_only_their_own_layer_and_lower_ones(package: str) -> None:
    inner = [
        found
        for found in _imports()
        if found.source.startswith(package + ".") and found.target.startswith(package + ".")
    ]
    assert [str(found) for found in inner if _layer(found.target) > _layer(found.source)] == []


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_a_layer(package: str) -> None:
    for module in _modules():
        if module.startswith(package + "."):
            assert _layer(module) >= 0


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in _modules()}
    for found in _imports():
        if found.target in graph and found.target != found.source:
            graph[found.source].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def _torch_free() -> list[str]:
    leaf = ["hyperopt", *LEAVES]
    rest = [name for name in _modules() if not _within(name, "hyperopt")]
    return leaf + [name for name in rest if not f"{name}.".startswith(NEEDS_TORCH)]


_IMPORT_WITHOUT_TORCH = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{importing} imports {name}")

sys.meta_path.insert(0, Refuse())
for importing in sys.argv[1:]:
    if not importing.endswith("__main__"):
        importlib.import_module(importing)
"""


def test_torch_free_modules_load_without_torch() -> None:
    command = [sys.executable, "-c", _IMPORT_WITHOUT_TORCH, *_torch_free()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_loading_without_torch_is_really_checked() -> None:
    command = [sys.executable, "-c", _IMPORT_WITHOUT_TORCH, "hyperopt.layout"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "hyperopt.layout imports torch" in run.stderr


def _lazy(package: str) -> dict[str, str]:
    """Where the exported names of a package come from."""
    found: dict[str, str] = vars(importlib.import_module(package))["_MODULES"]
    return found


def _exports() -> list[tuple[str, str]]:
    packages = [importlib.import_module(name) for name in ("hyperopt", "ckpt")]
    return [(package.__name__, name) for package in packages for name in package.__all__]


@pytest.mark.parametrize(("package", "name"), _exports())
def test_exported_name_is_there_and_documented(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    assert not isinstance(value, types.ModuleType), f"module {package}.{name} hides the function"
    assert inspect.getdoc(value)
    assert re.search(rf"\b{name}\b", _manual()), f"no page of docs/ and no README names {name}"


@pytest.mark.parametrize("package", ["hyperopt", "ckpt"])
def test_no_module_hides_an_exported_name(package: str) -> None:
    """Importing a submodule sets an attribute of that name on its package."""
    exported = importlib.import_module(package).__all__
    assert [name for name in exported if f"{package}.{name}" in _modules()] == []


@pytest.mark.parametrize("package", ["hyperopt", "ckpt"])
def test_type_checkers_see_what_is_exported(package: str) -> None:
    """The lazy names, those under TYPE_CHECKING and `__all__` are the same."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    shown = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "typing")
        for alias in node.names
    }
    assert shown == _lazy(package)
    assert sorted(shown) == importlib.import_module(package).__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    for package in ("hyperopt", "ckpt"):
        with pytest.raises(AttributeError, match="nonsense"):
            importlib.import_module(package).nonsense  # noqa: B018


@functools.cache
def _manual() -> str:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(page.read_text() for page in pages)


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in _sources(*PACKAGES, "benchmarks", "tests")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": _length(node)
        for path in _sources(*PACKAGES, "benchmarks")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1
