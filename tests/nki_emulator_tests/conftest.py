"""These tests import the emulator, which lies beside `nki`."""

from pathlib import Path

import pytest
from nki_on_cpu import ensure_nki

# With AWS's `nki` what remains is the documentation's own examples, which hold there too.
if not ensure_nki():
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if "golden" not in path.name]


@pytest.fixture
def trn2():
    from on_core import on_generation

    yield from on_generation(3)


@pytest.fixture
def trn3():
    from on_core import on_generation

    yield from on_generation(4)
