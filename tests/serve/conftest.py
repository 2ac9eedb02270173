"""A server that the files of this folder share: starting one compiles all its programs."""

import pytest
from live_server import KEY, start, tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def running(model):
    found = start(model, keys=(KEY, "another"))
    yield found
    found.close()
