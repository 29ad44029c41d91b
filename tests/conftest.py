"""Settings of the tests as a whole."""

import pytest
from hypothesis import settings

pytest_plugins = ["tests.fixtures"]

# A busy machine is no counterexample; what must end in time has a deadline of its own in its test.
settings.register_profile("headrace", deadline=None, print_blob=True)
settings.load_profile("headrace")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what scenarios do into their files")
