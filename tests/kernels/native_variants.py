"""The fixture `native`: each variant of the C++ kernels that was built and that this CPU can run, one after another."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from blockplane.kernels.native import library

RUNNABLE = library.runnable()


@pytest.fixture(
    params=RUNNABLE or [pytest.param(None, marks=pytest.mark.skip("no C++ kernels were built for this CPU"))]
)
def native(request: pytest.FixtureRequest, modules: tuple[ModuleType, ...]) -> Iterator[str]:
    """`modules`, a fixture of the test's own, bind the variant's functions while the test runs."""
    own = library._library
    library._library = library.load(request.param)
    library.set_num_threads(2)
    for module in modules:
        importlib.reload(module)
    yield request.param
    library.set_num_threads(1)
    library._library = own
    for module in modules:
        importlib.reload(module)
