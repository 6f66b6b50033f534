"""The direction of imports, and what the sources never use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minillm

SOURCE = Path(minillm.__file__).parent
RANKS = {"core": 0, "errors": 0, "models": 1, "attention": 1, "memory": 1, "runner": 2, "engine": 3}
TOP = 4
"""Rank of all other modules: cli, bench, doctor ... ."""
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of all modules that a file imports, at its top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            base = node.module or ""
            yield from (f"{base}.{alias.name}" if base == "minillm" else base for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1]
            yield ".".join([*parent, node.module] if node.module else parent)


def rank(module: str) -> int:
    parts = module.split(".")
    return RANKS.get(parts[1], TOP) if len(parts) > 1 else TOP


def upward_imports(source: str, module: str, package: str) -> list[str]:
    mine = rank(module)
    names = imported_modules(ast.parse(source), package)
    return [name for name in names if name.split(".")[0] == "minillm" and rank(name) > mine]


def foreign_imports(source: str, package: str) -> list[str]:
    """Imports of a core module that are neither the standard library nor the core."""
    names = imported_modules(ast.parse(source), package)
    return [
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names
        and name != "minillm.core"
        and not name.startswith("minillm.core.")
    ]


def unsafe_uses(source: str) -> list[str]:
    """Uses of pickle in any form, and `trust_remote_code` that is not plainly False."""
    tree = ast.parse(source)
    names = imported_modules(tree, "minillm")
    found = [f"import {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            is_false = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if is_false else [node.arg]
        elif isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            found += [f"torch.{node.attr}"] if is_torch else []
    return found


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downwards_only(path: Path) -> None:
    assert upward_imports(path.read_text(), module_name(path), package_of(path)) == []


@pytest.mark.parametrize("path", sorted((SOURCE / "core").rglob("*.py")), ids=module_name)
def test_core_imports_only_the_standard_library_and_itself(path: Path) -> None:
    assert foreign_imports(path.read_text(), package_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_pickle_and_no_remote_code(path: Path) -> None:
    assert unsafe_uses(path.read_text()) == []


def test_the_checks_see_what_they_are_for() -> None:
    lazy = "def f():\n    from minillm.engine.llm import LLM\n"
    assert upward_imports(lazy, "minillm.runner.x", "minillm.runner") == ["minillm.engine.llm"]
    assert upward_imports("from ..engine import llm", "minillm.runner.x", "minillm.runner") == ["minillm.engine"]
    assert upward_imports("from minillm import cli", "minillm.engine.x", "minillm.engine") == ["minillm.cli"]
    assert upward_imports("from minillm import core, errors", "minillm.core.x", "minillm.core") == []
    assert foreign_imports("import os, torch", "minillm.core") == ["torch"]
    assert foreign_imports("from minillm.models import gguf", "minillm.core") == ["minillm.models"]
    assert unsafe_uses("import pickle") == ["import pickle"]
    assert unsafe_uses("torch.load('x')") == ["torch.load"]
    assert unsafe_uses("f(trust_remote_code=flag)") == ["trust_remote_code"]
    assert unsafe_uses("f(trust_remote_code=False)") == []
    assert unsafe_uses("np.load(p, allow_pickle=True)") == ["allow_pickle"]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_every_core_module_imports_with_no_third_party_package_to_be_had() -> None:
    modules = sorted(module_name(path) for path in (SOURCE / "core").rglob("*.py"))
    code = f"""
import sys
allowed = set(sys.stdlib_module_names) | {{"minillm"}}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
import importlib
for name in {modules!r}:
    importlib.import_module(name)
print("torch" in sys.modules)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
