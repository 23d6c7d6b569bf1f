"""One server for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clientserver import Clients


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    served = Clients(tmp_path_factory.mktemp("clients"))
    try:
        served.wait()
        yield served
        served.idle()
    finally:
        assert served.stop() == 0, served.text
        assert "Traceback" not in served.text, served.text
