"""The farm as a fixture: `pytest_plugins = "pipedream_plugin"` in a test file."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import marked_processes
from pipedream_farm import Farm, Order


@pytest.fixture(scope="module")
def farm(request: pytest.FixtureRequest, one_farm: Farm) -> Farm:
    """Places the orders of the file's tests; other files may be another process's."""
    for item in request.session.items:
        if item.path == request.path and item.get_closest_marker("skip") is None:
            for value in getattr(getattr(item, "callspec", None), "params", {}).values():
                for order in _orders(value):
                    one_farm.start(order, urgent=False)
    return one_farm


@pytest.fixture(scope="session")
def one_farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Fails if a process is left behind."""
    found = Farm(tmp_path_factory.mktemp("farm"))
    try:
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
