"""What docs/cases.md names exists, and it names what it should; knows no case."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = (TESTS.parent / "docs" / "cases.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", CASES)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_has_a_row_and_every_row_a_test() -> None:
    rows = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", CASES, re.MULTILINE)}
    assert list(rows) == list(range(1, 46))
    assert all("::test_" in row for row in rows.values())


def test_no_test_is_named_in_another_way() -> None:
    assert len(NAMED) == CASES.count("::")
