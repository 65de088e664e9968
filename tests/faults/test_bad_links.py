"""A worker behind a link of its own, which is slow, or cut in the middle of a transfer and mended later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns
from tests.support.cluster import Cluster, WorkerProcess, running, wait_until
from tests.support.load import HealthWatch, Load, undisturbed
from tests.support.tiny_model import make_tiny_model

WHY_NOT = netns.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

FLAGS = ["--num-blocks", "400", "--max-batch-tokens", "256", "--no-prefix-caching", "--fabric-silence-s", "2"]
GATEWAY_FLAGS = [
    *("--local-prefill-max-tokens", "0", "--poll-s", "0.3", "--poll-timeout-s", "1", "--lost-after-s", "1.5"),
    *("--recovery-wait-s", "30", "--max-attempts", "5", "--connect-timeout-s", "1"),
]
SLOW = "3mbit"
"""150 KB of KV take half a second."""


@pytest.fixture(params=["prefill", "decode"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cluster, netns.Namespace, WorkerProcess]]:
    """Two workers of each role; one of the parameter's role is behind the link."""
    role = request.param
    model = make_tiny_model(tmp_path / "tiny", hidden=128, layers=4)
    with (
        netns.namespace() as link,
        running(
            model,
            ["prefill", "prefill", "decode", "decode"],
            worker_flags={"prefill": FLAGS, "decode": FLAGS},
            gateway_flags=GATEWAY_FLAGS,
            behind={role: link},
        ) as cluster,
    ):
        yield cluster, link, cluster.of_role(role)[0]


def test_a_link_is_slow_and_then_cut(far: tuple[Cluster, netns.Namespace, WorkerProcess]) -> None:
    cluster, link, worker = far
    expected = undisturbed(cluster, range(6))
    side = "sender" if worker.role == "prefill" else "receiver"
    near = [other for other in cluster.workers if other is not worker]

    link.slow(SLOW)
    moved = worker.ledger()[side]["bytes"]
    with Load(cluster, 3, expected) as load:
        load.wait_for(6)
    load.assert_right()
    assert worker.ledger()[side]["bytes"] > moved, "KV went over the slow link"

    with Load(cluster, 3, expected) as load, HealthWatch([w.url for w in (*near, cluster.gateway)]) as health:
        wait_until(lambda: worker.ledger()[side]["open"] > 0, "a transfer is under way", worker)
        link.cut()
        load.wait_for(9)
        health_while_cut = health
    health_while_cut.assert_prompt()
    load.assert_right()

    link.mend()
    link.fast()
    cluster.wait_usable(timeout_s=30)
    cluster.assert_idle()
    moved = worker.ledger()[side]["bytes"]
    with Load(cluster, 3, expected) as load:
        wait_until(lambda: worker.ledger()[side]["bytes"] > moved, "it is used again", worker, timeout_s=30)
    load.assert_right()
    cluster.assert_idle()
