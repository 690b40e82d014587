"""A replica of two ranks that saves its weights under load, and one that starts from them, by commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard import AsyncClient
from tests.integration.test_admin import SCHEDULER_FLAGS, admin, load
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path


async def test_answers_go_on_where_saved_weights_are_loaded(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    flags = ["--num-threads", "1", "--worker-save-root", str(root)]
    layout = {"replica_sizes": (2,), "num_gateways": 1}
    async with Cluster(
        tiny_model("llama"), tmp_path / "first", scheduler_flags=SCHEDULER_FLAGS, worker_flags=flags, **layout
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(6, 2))
            async with load(client, known):
                told = await admin(cluster, "save", "llama")
        assert [worker["folder"] for worker in told["workers"]] == [str(root / "llama")] * 2
        assert "model-rank-1-part-0.safetensors" in told["workers"][1]["files"]
        cluster.check()
    format_flags = [*SCHEDULER_FLAGS, "--load-format", "sharded"]
    async with Cluster(root / "llama", tmp_path / "second", scheduler_flags=format_flags, **layout) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            assert [(await one.check(client, f"again-{number}"))[1] for number, one in enumerate(known)] == ["", ""]
