"""The benchmark models: whole, the same each time, and of the shape that they are told to have."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.kit import models
from benchmarks.kit.models import Recipe
from worker_service.models.model_config import read_config

LLAMA = Recipe(32, 2, 4, 2, 48, 320, tied=False, qkv_bias=False)
QWEN2 = Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=True)


@pytest.fixture(params=[LLAMA, QWEN2], ids=["llama", "qwen2"])
def recipe(request):
    return request.param


def test_transformers_finds_every_weight_and_no_other(tmp_path, recipe):
    folder = models.write_model(recipe, tmp_path / "model")
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    logits = model(torch.arange(40).reshape(1, 40)).logits
    assert logits.isfinite().all()


def test_the_worker_reads_its_configuration(tmp_path, recipe):
    config = read_config(models.write_model(recipe, tmp_path / "model"), None)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (32, 2, 320)
    assert (config.num_kv_heads, config.head_dim, config.max_model_len) == (2, 8, models.MAX_LEN)
    assert config.attention.qkv_bias == recipe.qkv_bias
    assert config.head.is_tied == recipe.tied


def test_weights_are_small_and_of_their_own_seeds(recipe):
    weights = models.make_weights(recipe)
    first = weights["model.layers.0.mlp.gate_proj.weight"].float()
    assert first.std() == pytest.approx(models.WEIGHT_STD, rel=0.1)
    assert not torch.equal(first, weights["model.layers.1.mlp.gate_proj.weight"].float())
    assert (weights["model.norm.weight"] == 1).all()


def test_the_same_recipe_makes_the_same_files(tmp_path, recipe):
    first, second = (models.write_model(recipe, tmp_path / name / "model") for name in ("one", "two"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_keeps_what_is_there_and_replaces_what_is_of_another_recipe(tmp_path):
    folder = models.write_model(LLAMA, tmp_path / "model")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    models.write_model(LLAMA, tmp_path / "model")
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    other = replace(LLAMA, seed=2)
    models.write_model(other, tmp_path / "model")
    assert json.loads((folder / models.RECIPE_FILE).read_text())["seed"] == 2
    drawn = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(drawn, models.make_weights(other)["lm_head.weight"])


def test_leaves_nothing_beside_the_model(tmp_path):
    models.write_model(LLAMA, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("vocab_size", [258, 320, 20_000])
def test_every_id_has_a_piece_of_its_own(vocab_size):
    tokenizer = models.make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert all(tokenizer.id_to_token(token_id) is not None for token_id in range(vocab_size))


def test_any_text_comes_back(tmp_path):
    models.make_tokenizer(20_000).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world", "naïve café, 漢字 🙂", "a  b\n\tc", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_words_are_of_fewer_tokens_than_letters():
    tokenizer = models.make_tokenizer(20_000)
    assert len(tokenizer.encode("something").ids) <= 5
    assert len(tokenizer.encode("aaaa").ids) == 2


def test_the_real_recipes_have_their_number_of_parameters():
    millions = {name: _num_parameters(recipe) / 1e6 for name, recipe in models.RECIPES.items()}
    assert millions["llama-135m"] == pytest.approx(134.5, abs=0.1)
    assert millions["qwen2-0.5b"] == pytest.approx(494.0, abs=0.1)
    assert millions["llama-1.1b"] == pytest.approx(1100.0, abs=1)


def _num_parameters(recipe):
    return sum(torch.Size(shape).numel() for _, shape in models.weight_shapes(recipe))


def test_the_command_refuses_an_unknown_name(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["models.py", "gpt-9"])
    with pytest.raises(SystemExit):
        models.main()
    assert "there is no model gpt-9" in capsys.readouterr().err
