"""What the tests of compiled kernels share."""

from collections.abc import Iterator

import pytest

from tilewise.core import store


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A kernel store of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(store.VARIABLE, str(tmp_path_factory.mktemp("kernels") / "store"))
        yield
