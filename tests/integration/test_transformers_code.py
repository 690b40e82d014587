"""The three services with a model that transformers' code computes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from blockyard import LLM, BlockyardError
from blockyard.local.supervisor import StartError
from tests.kit.kernels.tiny_models import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {"num_device_blocks": 60, "num_host_blocks": 0, "dtype": "float32", "num_threads": 1}
EXTENSION = "tests.kit.worker_extension:Example"
PROMPTS = [f"Question {number}: what is" for number in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Apertus, with the tokenizer of the other tiny models."""
    folder = tmp_path_factory.mktemp("apertus")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))
    config = transformers.ApertusConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_gives_together_what_it_gives_alone(model: Path) -> None:
    with LLM(str(model), **SMALL, worker_extension=EXTENSION) as llm:
        alone = [llm.generate([prompt], max_tokens=12, temperature=0)[0].text for prompt in PROMPTS]
        assert [completion.text for completion in llm.generate(PROMPTS, max_tokens=12, temperature=0)] == alone
        assert "transformers' own code computes this model" in llm.model.warnings[0]
        assert llm.chat([[{"role": "user", "content": "Hello"}]], max_tokens=3)
        assert json.loads(llm.apply_model("example.imports", b"transformers")[0]) == {"transformers": True}
        with pytest.raises(BlockyardError, match="does not support Sleep"):
            llm.sleep()


def test_what_it_does_not_take_is_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises((StartError, BlockyardError), match=r"takes no --quantization int8, no replica of 2 workers"):
        LLM(str(model), **SMALL, quantization="int8", tensor_parallel_size=2)
