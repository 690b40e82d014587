"""The demo model's files agree with one another; no weights are loaded, no torch is needed.

Whether its text is any good is measured by models/demo/evaluate.py.
"""

from __future__ import annotations

import json
import math
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
TEXTS = [
    "",
    " ",
    "\n",
    "def add(a, b):\n    return a + b\n",
    "\tif x:\r\n\t\tpass  \n\n\n",
    "naïve café — “quotes” … ½ × €",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 \u00e9 \u200b\ufeff \x00\x7f",  # combining, composed, invisible: none is normalized
    "".join(map(chr, range(1, 0x250))),
    "  indented   text    with     runs  ",
    "1234567890 3.14e-10 0xFF",
]


@cache
def read(name: str) -> dict[str, Any]:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_all_files_fit_in_twelve_megabytes():
    files = [path for path in DEMO.iterdir() if path.is_file()]
    needed = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    needed |= {"tokenizer.json", "tokenizer_config.json", "train.py", "evaluate.py"}
    assert needed <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_config_describes_a_small_llama():
    config = read("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 4096
    assert config["max_position_embeddings"] == 1024
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_end_ids_agree_everywhere(tokenizer: Tokenizer):
    ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")]
    settings = read("tokenizer_config.json")
    for name in ("config.json", "generation_config.json"):
        assert read(name)["eos_token_id"] == ends
        assert read(name)["bos_token_id"] == tokenizer.token_to_id(settings["bos_token"])
        assert read(name)["pad_token_id"] == tokenizer.token_to_id(settings["pad_token"])
    assert tokenizer.token_to_id(settings["eos_token"]) in ends
    assert settings["model_max_length"] == read("config.json")["max_position_embeddings"]


def test_weights_have_the_shapes_of_the_config():
    with (DEMO / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert header.pop("__metadata__", {"format": "pt"}) == {"format": "pt"}
    config = read("config.json")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [heads, hidden],
        "self_attn.k_proj.weight": [kv_heads, hidden],
        "self_attn.v_proj.weight": [kv_heads, hidden],
        "self_attn.o_proj.weight": [hidden, heads],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "mlp.down_proj.weight": [hidden, inner],
    }
    expected = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    expected["model.embed_tokens.weight"] = [config["vocab_size"], hidden]
    expected["model.norm.weight"] = [hidden]
    assert {name: entry["shape"] for name, entry in header.items()} == expected  # no lm_head
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    num_parameters = sum(math.prod(shape) for shape in expected.values())
    size = (DEMO / "model.safetensors").stat().st_size
    assert size == 8 + length + 2 * num_parameters


def test_vocabulary_is_full_and_starts_with_the_special_tokens(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 4096
    assert sorted(tokenizer.get_vocab().values()) == list(range(4096))
    assert [tokenizer.id_to_token(index) for index in range(5)] == SPECIAL_TOKENS


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back_unchanged(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_separator_is_prepended_once_and_only_on_request(tokenizer: Tokenizer):
    plain = tokenizer.encode("import os", add_special_tokens=False).ids
    assert 0 not in plain
    assert tokenizer.encode("import os").ids == [0, *plain]
    assert tokenizer.encode("").ids == [0]


def test_special_tokens_are_one_token_each(tokenizer: Tokenizer):
    text = "".join(SPECIAL_TOKENS)
    assert tokenizer.encode(text, add_special_tokens=False).ids == [0, 1, 2, 3, 4]
    assert tokenizer.decode([0, 1, 2, 3, 4], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("roles", "generate", "expected"),
    [
        (["user"], True, "<|endoftext|><|user|>user 0<|end|><|assistant|>"),
        (["user"], False, "<|endoftext|><|user|>user 0<|end|>"),
        (
            ["system", "user", "assistant", "user"],
            True,
            "<|endoftext|><|system|>system 0<|end|><|user|>user 1<|end|>"
            "<|assistant|>assistant 2<|end|><|user|>user 3<|end|><|assistant|>",
        ),
    ],
)
def test_chat_template_renders(roles: list[str], generate: bool, expected: str):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    template = jinja2.Environment().from_string(read("tokenizer_config.json")["chat_template"])
    text = template.render(messages=messages, add_generation_prompt=generate, bos_token="<|endoftext|>")
    assert text == expected


def test_rendered_chat_needs_no_added_special_tokens(tokenizer: Tokenizer):
    text = "<|endoftext|><|user|>hi<|end|><|assistant|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[:2] == [0, 1]
    assert ids[-2:] == [3, 2]
