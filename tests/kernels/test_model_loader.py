"""Loading: digests, progress, memory, and every folder that cannot be used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blockyard.errors import BlockyardError, Reason
from blockyard.model_files import model_digest
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import RunnableModel, load_model

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path, dtype: torch.dtype | None = None) -> RunnableModel:
    return load_model(folder, dtype, CPU, lambda done_bytes, total_bytes: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama_sharded"), tmp_path / "sharded"))


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Writes the weights anew, some of them changed or left out."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def complaint_of(folder: Path) -> str:
    with pytest.raises(BlockyardError) as caught:
        load(folder)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def test_what_is_told_of_a_model(folder: Path):
    loaded = load(folder)
    assert loaded.config.architecture == "LlamaForCausalLM"
    assert loaded.model_digest == model_digest(folder)
    assert loaded.parameter_bytes == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert load(folder, torch.bfloat16).parameter_bytes * 2 == loaded.parameter_bytes


def test_progress_grows_to_the_total(folder: Path):
    told: list[tuple[int, int]] = []
    load_model(folder, None, CPU, lambda done_bytes, total_bytes: told.append((done_bytes, total_bytes)))
    done, totals = zip(*told, strict=True)
    assert set(totals) == {sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]
    assert len(told) > 20


def test_shards_are_one_model(folder: Path, shards: Path):
    whole = {}
    for path in shards.glob("*.safetensors"):
        whole |= load_file(path)
    for path in folder.glob("model.safetensors*"):
        path.unlink()
    save_file(whole, folder / "model.safetensors")
    assert load(folder).weights_digest == load(shards).weights_digest
    assert load(folder).model.fingerprint() == load(shards).model.fingerprint()


def test_the_weights_digest_covers_every_tensor(folder: Path):
    digests = {load(folder).weights_digest}
    assert load(folder, torch.bfloat16).weights_digest in digests, "of the files, whatever is made of them"
    tensors = load_file(folder / "model.safetensors")
    for count, name in enumerate(sorted(tensors), start=1):
        changed = tensors[name].clone()
        changed.view(-1)[-1] += 1
        rewrite(folder, {name: changed})
        digests.add(load(folder).weights_digest)
        assert len(digests) == count + 1, name
        rewrite(folder, {name: tensors[name]})
    rewrite(folder, {DOWN: tensors[DOWN].bfloat16()})
    digests.add(load(folder).weights_digest)
    assert len(digests) == len(tensors) + 2, "the stored dtype counts"


def test_large_tensors_are_sampled(folder: Path):
    """A tensor of more than 64 KiB: its first and last bytes count."""
    digests = [load(folder).weights_digest]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding.nbytes > 64 * 1024
    for index in (0, -1):
        changed = embedding.clone()
        changed.view(-1)[index] += 1
        rewrite(folder, {"model.embed_tokens.weight": changed})
        digests.append(load(folder).weights_digest)
    assert len(set(digests)) == 3


def test_tied_embeddings_need_no_head(tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model("llama_tied"), tmp_path / "tied"))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load(folder)
    held = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert loaded.parameter_bytes == held, "the packed head is the table"


def test_a_model_that_says_tied_and_has_two_tables_uses_both(tmp_path: Path):
    """As transformers does: config.json is wrong there, and the weights are not."""
    folder = Path(shutil.copytree(tiny_model("llama_tied"), tmp_path / "tied"))
    tied = load(folder).model.fingerprint()
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": embedding.clone()})
    assert load(folder).model.fingerprint() == tied
    rewrite(folder, {"lm_head.weight": embedding.flip(0).contiguous()})
    token_ids = list(range(40))
    got = StepRunner.load(folder, torch.float32).run("whole", token_ids, [40])
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(got, model(torch.tensor([token_ids])).logits[0], rtol=0, atol=1e-4)
    rewrite(folder, {"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    assert load(folder).model.fingerprint() == tied, "one table under the other name"


def test_a_length_that_no_memory_holds_costs_nothing(folder: Path):
    fingerprint = load(folder).model.fingerprint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**30}))
    assert load(folder).model.fingerprint() == fingerprint


def test_what_shows_in_long_texts_only_changes_the_name_of_results(tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model("mistral"), tmp_path / "mistral"))
    config = json.loads((folder / "config.json").read_text())
    names: set[str] = set()
    for window in (512, 1024):
        (folder / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
        loaded = load(folder)
        names.add(determinism_id(loaded, loaded.model.fingerprint()))
        names.add(determinism_id(load(folder), loaded.model.fingerprint()))
    assert len(names) == 2


def test_unused_tensors_are_told(folder: Path, caplog: pytest.LogCaptureFixture):
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(folder)
    (record,) = caplog.records
    assert record.fields == {"num_tensors": 1, "first": "model.layers.0.self_attn.rotary_emb.inv_freq"}


def test_a_missing_tensor(folder: Path):
    rewrite(folder, {DOWN: None})
    assert f"has no tensor {DOWN}" in complaint_of(folder)


def test_an_unexpected_shape(folder: Path):
    rewrite(folder, {DOWN: torch.zeros(64, 161)})
    told = complaint_of(folder)
    assert f"{DOWN} has shape [64, 161], and config.json asks for [64, 160]" in told


def test_an_unexpected_kind_of_number(folder: Path):
    rewrite(folder, {DOWN: torch.zeros(64, 160, dtype=torch.int8)})
    assert "is stored as I8; supported are F64, F32, F16, BF16: load the model's original weights" in complaint_of(
        folder
    )


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file(folder: Path, kept: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    told = complaint_of(folder)
    assert "model.safetensors is damaged or not complete" in told
    assert "download it again" in told


def test_weights_that_no_memory_holds(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    # The two tables alone take more in float32 than there is.
    config["vocab_size"] = psutil.virtual_memory().total // (4 * config["hidden_size"])
    (folder / "config.json").write_text(json.dumps(config))
    complaint = complaint_of(folder)
    assert re.match(r"the weights take \d+\.\d GiB in float32, and \d+\.\d GiB of memory are free", complaint)


def test_a_file_of_something_else(folder: Path):
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    assert "damaged or not complete" in complaint_of(folder)


def test_missing_shards_are_named(shards: Path):
    for number in (2, 5):
        (shards / f"model-0000{number}-of-00006.safetensors").unlink()
    told = complaint_of(shards)
    assert "lacks model-00002-of-00006.safetensors, model-00005-of-00006.safetensors" in told


def test_a_whole_file_goes_before_an_index(folder: Path):
    weights_digest = load(folder).weights_digest
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {DOWN: "gone.safetensors"}}))
    assert load(folder).weights_digest == weights_digest


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index(shards: Path, content: str):
    (shards / "model.safetensors.index.json").write_text(content)
    told = complaint_of(shards)
    assert re.search(r"index\.json is (damaged|not valid JSON|not a JSON object)", told)
    assert told.endswith("download it again")


def test_a_missing_config(folder: Path):
    (folder / "config.json").unlink()
    assert "has no config.json" in complaint_of(folder)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["tokenizer.model"], "holds a tokenizer only; download the weights too"),
        (["pytorch_model.bin"], "convert them with transformers"),
        (["consolidated.00.pth"], "convert them with transformers"),
        (["model.gguf", "tokenizer.json"], "GGUF files are not supported"),
        (["consolidated.safetensors"], "have other names"),
        ([], "download the weights too"),
    ],
)
def test_a_folder_without_safetensors(folder: Path, files: list[str], advice: str):
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    for name in files:
        (folder / name).touch()
    assert advice in complaint_of(folder)


def test_sizes_that_belong_to_another_model(folder: Path):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    assert "has no tensor model.layers.2." in complaint_of(folder)


MEASURE = """
import re, sys
from pathlib import Path
import psutil, torch
from worker_service.models.loader import load_model

def load(folder):
    return load_model(Path(folder), None, torch.device("cpu"), lambda done_bytes, total_bytes: None)

torch.set_num_threads(1)
load(sys.argv[1])
before = psutil.Process().memory_info().rss
loaded = load(sys.argv[2])
# Of this program alone: ru_maxrss would keep what its parent held when it started this one.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(peak - before, loaded.parameter_bytes)
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MB in three shards: as many layers as make its largest tensor a small part of it."""
    folder = tmp_path_factory.mktemp("large")
    hidden, inner, layers, vocab = 768, 2048, 8, 1024
    fields = json.loads((tiny_model("llama") / "config.json").read_text())
    fields |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    fields |= {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = {"q": (hidden, hidden), "k": (hidden, hidden), "v": (hidden, hidden), "o": (hidden, hidden)}
    weight_map: dict[str, str] = {}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        tensors = {f"{prefix}self_attn.{name}_proj.weight": torch.rand(shape) for name, shape in shapes.items()}
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            tensors[f"{prefix}mlp.{name}_proj.weight"] = torch.rand(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
        if index == 0:
            tensors["model.embed_tokens.weight"] = torch.rand(vocab, hidden)
            tensors["lm_head.weight"] = torch.rand(vocab, hidden)
            tensors["model.norm.weight"] = torch.ones(hidden)
        file = f"part-{index}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_memory_stays_near_one_copy(large_model: Path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny_model("llama")), str(large_model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    growth_bytes, parameter_bytes = map(int, done.stdout.split())
    assert parameter_bytes > 190e6
    assert growth_bytes < 1.35 * parameter_bytes, growth_bytes / parameter_bytes
