"""The farm as a fixture: `pytest_plugins = "pipedream_plugin"` in a test file."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import marked_processes
from pipedream_farm import Farm, Order


@pytest.fixture(scope="session")
def farm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Places the orders of all tests that will run; fails if a process is left behind."""
    found = Farm(tmp_path_factory.mktemp("farm"))
    try:
        for item in request.session.items:
            for value in getattr(getattr(item, "callspec", None), "params", {}).values():
                for order in _orders(value):
                    found.start(order, urgent=False)
        yield found
    finally:
        code = found.close()
        left = marked_processes(found.mark)
        for process in left:
            process.kill()
    assert not left, f"processes left behind: {left}"
    assert code == 0


def _orders(value: Any) -> list[Order]:
    if isinstance(value, Order):
        return [value]
    return [order for item in value for order in _orders(item)] if isinstance(value, list | tuple) else []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums as the ranks compute them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
