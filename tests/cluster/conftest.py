"""The cluster, started once for all tests here."""

from collections.abc import Iterator

import pytest

from cluster import Cluster
from server import Servers


@pytest.fixture(scope="session")
def cluster(servers: Servers) -> Iterator[Cluster]:
    """A running cluster; at the end nothing of it is left, or the last test has an error."""
    servers.close()  # two engines of a rollout are enough beside it
    cluster = Cluster.from_environment()
    try:
        yield cluster.start()
    finally:
        cluster.stop()
