"""Finds Python in a kernel's source that the NKI compiler rejects; knows the rules' table, and runs nothing.

An emulator runs any Python, as AWS's own simulator does, "but fail to compile for hardware" (guides/nki_simulator.rst).
So the source is checked beside it. What the compiler accepts is a subset of Python that no document lists whole; the
rules of `lint_rules.py` are what the public documents forbid, and what neither they nor any published kernel uses.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Source:
    """A module of kernels: its tree, and the full names behind those that it uses."""

    tree: ast.Module

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """Every import: the name that it binds, and the full name of what it imports."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.asname or alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        return found

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Full names by the short ones that stand for them, such as nki.language by nl."""
        return {bound: full for bound, full in self.imports if "." not in bound}

    def name(self, node: ast.AST | None) -> str:
        """The full dotted name of a name or attribute, such as nki.language.divide; "" of anything else."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.name(node.value)):
            return f"{owner}.{node.attr}"
        return ""

    @cached_property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]

    @cached_property
    def kernels(self) -> list[ast.FunctionDef]:
        """What `nki.jit` decorates."""
        return [each for each in self.functions if any(self.decorator(one) == "nki.jit" for one in each.decorator_list)]

    def decorator(self, node: ast.expr) -> str:
        return self.name(node.func if isinstance(node, ast.Call) else node)

    @cached_property
    def inside(self) -> list[ast.AST]:
        """Every node of a function's body or defaults, or of a class; annotations say nothing to the compiler."""
        outer = [node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        return [node for each in outer for node in _walk_without_annotations(each)]


def _walk_without_annotations(node: ast.AST) -> Iterable[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk_without_annotations(child)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a kernel must not contain.

    Attributes:
        name: for tests and messages. instead: a sentence that says what is wrong and what to write.
        source: where it is said; "inferred" where only by silence: see `lint_rules.py`.
        find: the nodes of a source that break it.
    """

    name: str
    instead: str
    source: str
    find: Callable[[Source], Iterable[ast.AST]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that breaks a rule."""

    rule: str
    line: int
    sentence: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.sentence}"


def is_kernel_source(source: str) -> bool:
    """Whether a module holds code for the compiler: it imports nki's language or instructions."""
    imported = [full for _, full in Source(ast.parse(source)).imports]
    return any(name.startswith(("nki.isa", "nki.language", "neuronxcc")) for name in imported)


def findings(source: str, rules: Iterable[Rule]) -> list[Finding]:
    """What a module's source does against the rules, by line."""
    module = Source(ast.parse(source))
    found = [
        Finding(rule.name, getattr(node, "lineno", 1), f"{rule.instead} ({rule.source})")
        for rule in rules
        for node in rule.find(module)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def check_folder(folder: Path, rules: Iterable[Rule]) -> dict[str, list[Finding]]:
    """The findings of every kernel module of a folder, by file name; host code, which imports no nki, is left alone."""
    rules = list(rules)
    sources = {path.name: path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {name: findings(source, rules) for name, source in sources.items() if is_kernel_source(source)}
