"""What a script has two workers of one replica do beside their steps, through `LLM`; answers stay as they are."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import LLM, BlockyardError
from tests.kit.kernels.tiny_models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"num_device_blocks": 60, "num_host_blocks": 0, "dtype": "float32", "num_threads": 1}
PROMPTS = [[number, 5, 7, 11, 13] for number in range(1, 9)]
QUERY = "model.layers.0.self_attn.q_proj.weight"


def answers(llm: LLM) -> list[tuple[int, ...]]:
    completions = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)
    return [completion.token_ids for completion in completions]


def test_a_script_operates_its_system(tmp_path: Path) -> None:
    extension = "tests.kit.worker_extension:Example"
    with LLM(str(tiny_model("llama")), **SMALL, tensor_parallel_size=2, worker_extension=extension) as llm:
        expected = answers(llm)
        groups = llm.collective_rpc("describe_group")
        assert [(group["rank"], group["tensor_parallel_size"]) for group in groups] == [(0, 2), (1, 2)]
        norms = llm.collective_rpc("weight_norms", kwargs={"names": [QUERY]})
        shapes = [[int(size) for size in norm["weights"][0]["shape"]] for norm in norms]
        counted = [json.loads(told)["sizes"][QUERY] for told in llm.apply_model("example.count", QUERY.encode())]
        assert counted == [rows * columns for rows, columns in shapes]
        assert llm.collective_rpc("example.echo", 5.0, args=(b"\xff",)) == [b"\xff"] * 2
        # A model of ours needs nothing of transformers'.
        told = llm.apply_model("example.imports", b"torch,transformers")
        assert [json.loads(each) for each in told] == [{"torch": True, "transformers": False}] * 2
        with pytest.raises(BlockyardError, match=r"rank 0 \(.*\): example\.fail raised ValueError: as it was told"):
            llm.collective_rpc("example.fail")
        with pytest.raises(TypeError, match="Put it into a class"):
            llm.apply_model(lambda model: model)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="there is no operation 'reload'"):
            llm.collective_rpc("reload")
        llm.start_profile()
        assert answers(llm) == expected
        files = llm.stop_profile(tmp_path)
        assert [len(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]) > 2 for file in files] == [True] * 2
        assert llm.reset_prefix_cache()
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up(["weights"])
            llm.wake_up()
            assert answers(llm) == expected
        with pytest.raises(TypeError, match="unknown tags: kv; there are weights, kv_cache"):
            llm.wake_up(["kv"])
        # An exit ends the workers, which are started again.
        with pytest.raises(BlockyardError):
            llm.collective_rpc("example.leave")
        assert answers(llm) == expected
