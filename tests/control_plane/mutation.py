"""Breaks one line of the scheduler, its rows, blocks or cache at a time, and sees whether a test notices.

`python tests/control_plane/mutation.py --seed 1 --count 60` draws the lines by the seed, works on copies of the tree,
and ends with 1 if more than `--survivors` mutants live. Where a survivor means the same as the original, `EXPLAINED`
says why; such ones are drawn and counted like all others.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "control_plane/engine"
FILES = tuple(
    f"{ENGINE}/{name}.py"
    for name in (
        "scheduler",
        "answers",
        "planner",
        "running",
        "stops",
        "steady",
        "step",
        "rows",
        "waiting",
        "kv_blocks",
        "block_pool",
        "prefix_cache",
        "kv_needs",
    )
)
# The quick ones first: most mutants do not live to see the walk.
TESTS = tuple(
    f"tests/control_plane/test_{name}.py"
    for name in (
        "scheduler",
        "block_pool",
        "prefix_cache",
        "kv_blocks",
        "kv_needs",
        "stops",
        "waiting",
        "statistics",
        "two_in_flight",
        "steady",
        "preemption",
        "aborts",
        "prefix_sharing",
        "drafts",
        "told",
        "scheduler_walk",
    )
)
SECONDS_PER_MUTANT = 300

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: the `index`-th of all that `Mutator` knows there."""

    path: str
    index: int
    line: int
    change: str

    def __str__(self) -> str:
        text = (ROOT / self.path).read_text().splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {self.change}: {text}"


class Mutator(ast.NodeTransformer):
    """Counts the places where a tree can be changed, and changes the one that is wanted."""

    def __init__(self, path: str, wanted: int | None = None) -> None:
        self.mutants: list[Mutant] = []
        self._path, self._wanted = path, wanted

    def _is_wanted(self, node: ast.expr | ast.stmt, change: str) -> bool:
        self.mutants.append(Mutant(self._path, len(self.mutants), node.lineno, change))
        return len(self.mutants) - 1 == self._wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        new = _COMPARISONS[type(node.ops[0])]
        if self._is_wanted(node, f"{type(node.ops[0]).__name__} -> {new.__name__}"):
            node.ops[0] = new()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        new = _OPERATORS.get(type(node.op))
        if new is not None and self._is_wanted(node, f"{type(node.op).__name__} -> {new.__name__}"):
            node.op = new()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, "and <-> or"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.Invert) and self._is_wanted(node, "negation removed"):
            return node.operand
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_wanted(node, "flipped"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int) and self._is_wanted(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        is_call = isinstance(node.value, ast.Call) and not ast.unparse(node.value).startswith("logger.")
        if is_call and self._is_wanted(node, "statement removed"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, "statement removed"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        # Types say nothing at run time.
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node


def draw(seed: int, count: int) -> list[Mutant]:
    """So many lines, drawn by the seed, with one change of each."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in FILES:
        mutator = Mutator(path)
        mutator.visit(ast.parse((ROOT / path).read_text()))
        for mutant in mutator.mutants:
            by_line.setdefault((path, mutant.line), []).append(mutant)
    rng = random.Random(seed)
    return [rng.choice(by_line[line]) for line in rng.sample(sorted(by_line), count)]


def mutated(mutant: Mutant | None, source: str) -> str:
    """The source with a mutant in it; None = as it is, though laid out alike."""
    tree = ast.parse(source)
    if mutant is not None:
        tree = Mutator(mutant.path, mutant.index).visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def is_caught(mutant: Mutant, tree: Path) -> bool:
    """Whether a test fails on a copy of the tree that has the mutant in it; the copy is as before afterwards."""
    path = tree / mutant.path
    source = path.read_text()
    path.write_text(mutated(mutant, source))
    command = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
    try:
        environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=tree, env=environ, capture_output=True, timeout=SECONDS_PER_MUTANT)
        return run.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)


def survivors(mutants: list[Mutant], num_workers: int) -> Iterator[Mutant]:
    """Those that no test notices."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(num_workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(num_workers):
            tree = Path(directory) / str(number)
            shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__"))
            trees.put(tree)

        def check(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                return is_caught(mutant, tree)
            finally:
                trees.put(tree)

        for mutant, caught in zip(mutants, pool.map(check, mutants), strict=True):
            if not caught:
                yield mutant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--survivors", type=int, default=3, help="so many may live")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    alive = []
    for mutant in survivors(draw(arguments.seed, arguments.count), arguments.workers):
        print("survived:", mutant, flush=True)
        alive.append(mutant)
    print(f"{arguments.count - len(alive)} of {arguments.count} mutants caught (seed {arguments.seed})")
    return int(len(alive) > arguments.survivors)


if __name__ == "__main__":
    sys.exit(main())
