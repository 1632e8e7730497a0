"""A pretended device for the tests of code for GPUs."""

import pytest
from far_device import far_device


@pytest.fixture
def device(monkeypatch):
    with far_device(monkeypatch) as device:
        yield device
