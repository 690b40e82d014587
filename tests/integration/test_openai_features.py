"""Every feature of the OpenAI API on the real services, by OpenAI's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.openai_features import FEATURES, OpenAI

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.processes.system import System


@pytest.fixture(scope="module")
def api(demo: System) -> Iterator[OpenAI]:
    api = OpenAI(demo.http_url)
    yield api
    api.close()


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_works(api: OpenAI, name: str) -> None:
    FEATURES[name](api)
