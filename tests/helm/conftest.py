import pytest

from tests.support.chart import Helm, tools


@pytest.fixture(params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Helm:
    return Helm(tools() / request.param)


@pytest.fixture
def helm4() -> Helm:
    return Helm(tools() / "helm4")
