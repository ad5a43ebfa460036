from collections.abc import Iterator

import pytest
from torch.overrides import _get_current_function_mode_stack

from tilewise.frontend.dispatch import observers, requested_backend
from tilewise.integrations.routing import _steps


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    assert (requested_backend(None)[0], observers, _steps.stack, _get_current_function_mode_stack()) == ("auto", [], [], [])
