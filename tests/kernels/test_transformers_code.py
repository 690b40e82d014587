"""Models that transformers' code computes: exact where they say so, near transformers, and refused where not served."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import LoraLimits
from blockyard.errors import BlockyardError
from blockyard.model_config import fallback
from blockyard_kernels.select import get_backend
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.kernels.backends import BEST, CPU, REFERENCE
from tests.kit.kernels.families import VOCAB_SIZE, family_model
from tests.kit.kernels.foreign_families import REFUSED, SERVED, foreign_model, refused_model
from tests.kit.kernels.step_runner import StepRunner
from worker_service.lora.store import make_loras
from worker_service.models.fallback import model as fallback_model
from worker_service.models.fallback.attention import IMPLEMENTATION, attend
from worker_service.models.fallback.loading import load_network
from worker_service.models.fallback.survey import Survey
from worker_service.models.fallback.trial import find_refusal
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.models.fallback.loading import LoadedNetwork
    from worker_service.models.loader import RunnableModel

LENGTH = 110
TOKEN_IDS = tuple(random.Random(3).choices(range(VOCAB_SIZE), k=LENGTH))
# Each family by our kernels; by torch's those whose functions and experts are not modules.
RUNS = [(name, BEST) for name in SERVED] + [(name, REFERENCE) for name in ("ApertusConfig", "GptOssConfig")]


def load(folder: Path, kernels: str = BEST) -> LoadedNetwork:
    return load_network(folder, torch.float32, CPU, lambda done_bytes, total_bytes: None, kernels)


def load_as_a_worker(folder: Path, **more: Any) -> RunnableModel:
    return load_model(folder, None, CPU, lambda done_bytes, total_bytes: None, **more)


@torch.no_grad()
def transformers_logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()(torch.tensor([TOKEN_IDS])).logits[0].float()


@pytest.mark.parametrize(("name", "kernels"), RUNS)
def test_logits_are_those_of_transformers_and_the_same_bits_under_any_schedule(name: str, kernels: str) -> None:
    loaded = load(foreign_model(name), kernels)
    runner = StepRunner(loaded.model, loaded.backend).probe()
    assert runner.is_exact
    whole, expected = runner.run("whole", TOKEN_IDS, [LENGTH]), transformers_logits(foreign_model(name))
    assert (whole - expected).abs().max() <= 2e-5 * expected.abs().max()
    mates = [("one", TOKEN_IDS[:37]), ("other", TOKEN_IDS[5:6])]
    first = runner.step([*mates, ("subject", TOKEN_IDS[:60])])[2]
    middle = [runner.step([("subject", TOKEN_IDS[start : start + 7]), ("one", [7])])[0] for start in range(60, 102, 7)]
    last = [runner.step([("subject", [token_id])])[0] for token_id in TOKEN_IDS[102:]]
    assert torch.equal(torch.cat([first, *middle, *last]), whole)


def test_a_model_of_ours_gives_by_it_what_it_gives_by_our_code() -> None:
    folder = family_model("qwen3")
    own, by_transformers = (load_as_a_worker(folder, model_code=code) for code in ("auto", "transformers"))
    assert not own.foreign_code
    assert by_transformers.foreign_code.startswith(f"transformers {transformers.__version__} ")
    runs = [StepRunner(each.model, each.backend).run("x", TOKEN_IDS, [LENGTH]) for each in (own, by_transformers)]
    assert (runs[0] - runs[1]).abs().max() <= 1e-5
    # In no tensor more is held than in our own: a tied table once.
    assert by_transformers.parameter_bytes <= own.parameter_bytes * 1.01


def test_bfloat16_is_as_near_as_transformers_own_is() -> None:
    folder = foreign_model("VaultGemmaConfig")
    loaded = load_network(folder, torch.bfloat16, CPU, lambda done_bytes, total_bytes: None)
    runner = StepRunner(loaded.model, loaded.backend).probe()
    assert runner.is_exact
    got, expected = runner.run("x", TOKEN_IDS, [LENGTH]), transformers_logits(folder)
    theirs = (transformers_logits(folder, torch.bfloat16) - expected).abs().mean()
    assert (got - expected).abs().mean() <= 1.5 * theirs


def test_a_function_that_torch_computes_otherwise_at_the_end_denies_the_promise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fallback_model, "compute_inside", lambda module, mode: None)
    model = load(foreign_model("ApertusConfig")).model
    assert not model.probe()
    assert "softplus in model.layers.0.mlp.act_fn" in str(vars(caplog.records[-1]))


def test_a_product_of_its_own_denies_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = transformers.models.hyperclovax.modeling_hyperclovax.HyperCLOVAXMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * (x @ x.transpose(1, 2) @ x)

    monkeypatch.setattr(attention, "forward", forward)
    model = load(foreign_model("HyperCLOVAXConfig")).model
    assert {op.name for op in model.foreign_ops} == {"bmm"}
    assert not model.probe()


def test_the_checks_find_results_that_depend_on_other_rows() -> None:
    model = load(foreign_model("HyperCLOVAXConfig")).model
    compute = model.compute
    assert model.checks.first_difference(compute, None) == ""
    assert model.checks.first_difference(lambda ids, *step: compute(ids, *step) + len(ids) * 1e-3, None) == "together"


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_attention_does_not_compute_is_refused(name: str) -> None:
    with pytest.raises(BlockyardError, match=f"cannot be served: .*{REFUSED[name][1]}"):
        load(refused_model(name))


def test_a_trial_needs_no_weights(tmp_path: Path) -> None:
    shutil.copy(foreign_model("ApertusConfig") / "config.json", tmp_path)
    assert find_refusal(tmp_path, "auto") == ""
    shutil.copy(refused_model("DeepseekV3Config") / "config.json", tmp_path)
    assert "our attention takes one width" in find_refusal(tmp_path, "auto")


def test_an_unknown_keyword_of_attention_is_refused() -> None:
    module = nn.Module()
    survey = Survey("NewForCausalLM", 64, {module: "layers.0.attention"})
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(BlockyardError, match="attention takes alibi, which our attention does not support"):
        survey.attend(module, heads, heads, heads, None, {"scaling": 1.0, "alibi": heads, "position_ids": heads})


def test_attention_that_no_step_runs_is_no_attention() -> None:
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(AssertionError):
        attend(nn.Module(), heads, heads, heads, None)
    assert IMPLEMENTATION in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


def changed(folder: Path, target: Path, **fields: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("code", ["auto", "native", "transformers"])
@pytest.mark.parametrize("field", [{"auto_map": {"AutoModelForCausalLM": "own.Model"}}, {"trust_remote_code": True}])
@pytest.mark.parametrize("own", ["llama", None])
def test_code_that_comes_with_a_model_is_refused_in_the_same_words_everywhere(
    code: str, field: dict[str, Any], own: str | None, tmp_path: Path
) -> None:
    folder = changed(family_model(own) if own else foreign_model("HyperCLOVAXConfig"), tmp_path / "model", **field)
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    words = f"config.json has {next(iter(field))}: it asks for code that comes with the model, and such code is never "
    with pytest.raises(BlockyardError, match=words):
        load_as_a_worker(folder, model_code=code)
    with pytest.raises(BlockyardError, match=words):
        load_tokenizer(folder)


def test_a_tensor_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    folder = changed(foreign_model("HyperCLOVAXConfig"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BlockyardError, match=r"do not belong to its config.json \(missing keys: model.layers.1.mlp.up"):
        load(folder)


def test_it_is_chosen_where_there_is_no_code_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = foreign_model("HyperCLOVAXConfig")
    assert not fallback.needs_transformers(family_model("llama"), "auto")
    assert fallback.needs_transformers(family_model("llama"), "transformers")
    assert fallback.needs_transformers(folder, "auto")
    assert not fallback.needs_transformers(folder, "native")
    unheard_of = changed(folder, tmp_path / "model", architectures=["UnheardOfForCausalLM"])
    assert not fallback.needs_transformers(unheard_of, "auto")
    with pytest.raises(BlockyardError, match=r"is not supported \(supported: Llama.*pip install"):
        load_as_a_worker(folder, model_code="native")
    with pytest.raises(BlockyardError, match="no architecture that transformers installed here has"):
        load_as_a_worker(unheard_of, model_code="transformers")
    monkeypatch.setattr(fallback, "PACKAGE", "not_installed_here")
    fallback.list_of_models.cache_clear()
    assert not fallback.needs_transformers(folder, "auto")
    with pytest.raises(BlockyardError, match=r"pip install 'blockyard\[transformers\]'"):
        load_as_a_worker(folder, model_code="transformers")
    fallback.list_of_models.cache_clear()


def test_what_our_own_code_alone_takes_is_refused() -> None:
    folder = foreign_model("HyperCLOVAXConfig")
    words = "takes no --quantization int8, no --kv-cache-dtype int8, no --load-format random, no replica of 2 workers"
    more: dict[str, Any] = {"quantization": "int8", "kv_cache_dtype": "int8", "load_format": "random"}
    more["parallel"] = Parallel(2)
    with pytest.raises(BlockyardError, match=words):
        load_as_a_worker(folder, **more)
    loaded = load_as_a_worker(folder)
    with pytest.raises(BlockyardError, match=r"does not support adapters \(--max-loras\)"):
        make_loras(loaded, LoraLimits(1, 8, 1, 0), None)
    assert "by cpu/" in loaded.model.describe(loaded.backend.name) or loaded.backend is get_backend(CPU, torch.float32)
    assert {module.name for module in loaded.model.modules()} >= {"model.layers.0.self_attn.o_proj", "lm_head"}
