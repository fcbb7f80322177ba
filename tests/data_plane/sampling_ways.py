"""The fixture `way`: a module's tests run with the C++ sampler, where it was built, and once more with torch's."""

from collections.abc import Iterator

import pytest

from blockplane.kernels.native import library, sampling

NATIVE = pytest.param("native", marks=pytest.mark.skipif(not library.is_there(), reason="no C++ kernels were built"))


@pytest.fixture(scope="module", autouse=True, params=[NATIVE, "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(sampling, "takes_logits", lambda logits: False)
        yield request.param
