"""What a model's files say of pooling, and what is refused since they do not say it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.cli.doctor.findings import Level
from blockyard.cli.doctor.model import look_at_model
from blockyard.configuration import ModelSettings, SystemConfiguration
from blockyard.contract.models import Task
from blockyard.contract.pooling import PoolingKind
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.activation import Activation
from blockyard.model_config.pooling.reading import read_rule
from blockyard.model_config.pooling.rule import Dense, Finish
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
NORMALIZE = {"path": "3_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"1_Pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}}
IDENTITY = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
SIGMOID = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
LIMITS = "sentence_bert_config.json"
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


def write(folder: Path, config: dict[str, Any], modules: list[Any] | None = None, **files: Any) -> Path:
    """Writes a model's files; those named like a module are that module's config.json."""
    named = {"config.json": {"architectures": ["LlamaModel"], "hidden_size": 8} | config}
    if modules is not None:
        named["modules.json"] = modules
    named |= {name if name.endswith(".json") else f"{name}/config.json": each for name, each in files.items()}
    for name, values in named.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def test_modules_of_sentence_transformers_make_a_rule(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "2_Dense": {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.Tanh"},
        "config_sentence_transformers.json": {"prompts": {"query": "find: "}, "default_prompt_name": "query"},
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
    }
    rule = read_rule(write(tmp_path, {}, [TRANSFORMER, POOLING, DENSE, NORMALIZE], **MEAN, **files))
    assert rule is not None
    assert (rule.task, rule.kind, rule.normalise, rule.width) == (Task.EMBED, PoolingKind.MEAN, True, 4)
    dense = Dense(
        name="2_Dense.linear",
        in_features=8,
        out_features=4,
        has_bias=False,
        activation=Activation.TANH,
        folder="2_Dense",
    )
    assert rule.products == (dense,)
    assert (rule.prompts, rule.default_prompt) == ({"query": "find: "}, "query")
    assert (rule.max_tokens, rule.lowers_case) == (256, True)
    assert rule.source == "1_Pooling/config.json: mean"


@pytest.mark.parametrize(
    ("config", "task", "finish", "labels"),
    [
        ({"num_labels": 1}, Task.SCORE, Finish.SIGMOID, ("LABEL_0",)),
        ({"num_labels": 1, **IDENTITY}, Task.SCORE, Finish.NONE, ("LABEL_0",)),
        ({"num_labels": 1, "sentence_transformers": {}, **IDENTITY}, Task.SCORE, Finish.NONE, ("LABEL_0",)),
        ({"num_labels": 1, "sentence_transformers": SIGMOID, **IDENTITY}, Task.SCORE, Finish.SIGMOID, ("LABEL_0",)),
        ({}, Task.CLASSIFY, Finish.SOFTMAX, ("LABEL_0", "LABEL_1")),
        ({"id2label": {"1": "no", "0": "yes"}}, Task.CLASSIFY, Finish.SOFTMAX, ("yes", "no")),
        ({"problem_type": "multi_label_classification"}, Task.CLASSIFY, Finish.SIGMOID, ("LABEL_0", "LABEL_1")),
        ({"problem_type": "regression"}, Task.CLASSIFY, Finish.NONE, ("LABEL_0", "LABEL_1")),
    ],
)
def test_heads_are_read(tmp_path: Path, config: dict[str, Any], task: Task, finish: Finish, labels: Any) -> None:
    rule = read_rule(write(tmp_path, {**CLASSIFIER, **config}))
    assert rule is not None
    assert (rule.task, rule.finish, rule.labels, rule.width) == (task, finish, labels, len(labels))
    assert (rule.kind, rule.rows, rule.kinds) == (PoolingKind.CLASSIFY, PoolingKind.LAST, {PoolingKind.CLASSIFY})


def test_one_model_serves_several_tasks(tmp_path: Path) -> None:
    folder = write(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    assert read_rule(folder) is None
    assert read_rule(folder, Task.GENERATE) is None
    rule = read_rule(folder, Task.SCORE)
    assert rule is not None
    assert (rule.kind, rule.labels) == (PoolingKind.LABEL_LOGITS, ("no", "yes"))
    modules = [TRANSFORMER, {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}]
    rule = read_rule(write(tmp_path, {}, modules, **{"1_LogitScore": {"true_token_id": 7, "false_token_id": 5}}))
    assert rule is not None
    assert (rule.task, rule.label_token_ids) == (Task.SCORE, (5, 7))


@pytest.mark.parametrize(
    ("config", "modules", "files", "task", "words"),
    [
        ({}, None, {}, Task.UNSPECIFIED, "not guessed"),
        ({"architectures": ["LlamaForCausalLM"]}, None, {}, Task.EMBED, "not guessed"),
        ({"architectures": ["LlamaForCausalLM"]}, None, {}, Task.SCORE, "no head"),
        ({}, None, {}, Task.GENERATE, "does not generate tokens"),
        (CLASSIFIER, None, {}, Task.SCORE, "2 labels"),
        ({**CLASSIFIER, "num_labels": 0}, None, {}, Task.UNSPECIFIED, "num_labels"),
        ({**CLASSIFIER, "id2label": {"1": "a", "2": "b"}}, None, {}, Task.UNSPECIFIED, "id2label"),
        ({**CLASSIFIER, "problem_type": "ordinal"}, None, {}, Task.UNSPECIFIED, "problem_type"),
        (
            {**CLASSIFIER, "num_labels": 1, "sentence_transformers": {"activation_fn": "x.F"}},
            None,
            {},
            Task.UNSPECIFIED,
            "'x.F'",
        ),
        ({}, [TRANSFORMER, POOLING], {"1_Pooling": {"pooling_mode": "max"}}, Task.UNSPECIFIED, "max"),
        (
            {},
            [TRANSFORMER, POOLING],
            {"1_Pooling": {"pooling_mode": ["cls", "mean"]}},
            Task.UNSPECIFIED,
            "cls and mean",
        ),
        (
            {},
            [TRANSFORMER, POOLING],
            {"1_Pooling": {"pooling_mode": "mean", "include_prompt": False}},
            Task.UNSPECIFIED,
            "prompt",
        ),
        ({}, [TRANSFORMER, POOLING, NORMALIZE, DENSE], MEAN, Task.UNSPECIFIED, "Dense"),
        ({}, [{**TRANSFORMER, "path": "0_Transformer"}, POOLING], MEAN, Task.UNSPECIFIED, "own folder"),
        ({}, [POOLING, NORMALIZE], MEAN, Task.UNSPECIFIED, "Pooling where it is not supported"),
        (
            {},
            [TRANSFORMER, POOLING],
            {**MEAN, LIMITS: {"transformer_task": "fill-mask"}},
            Task.UNSPECIFIED,
            "transformer_task",
        ),
        ({}, [TRANSFORMER, POOLING], {**MEAN, LIMITS: {"query_length": 32}}, Task.UNSPECIFIED, "query_length"),
        ({}, [{**TRANSFORMER, "path": "../other"}, POOLING], MEAN, Task.UNSPECIFIED, "outside"),
        (
            {},
            [TRANSFORMER, {"path": "", "type": "a.WeightedLayerPooling"}],
            {},
            Task.UNSPECIFIED,
            "WeightedLayerPooling",
        ),
        ({}, {"not": "a list"}, {}, Task.UNSPECIFIED, "sentence-transformers"),
        ({}, [TRANSFORMER, POOLING], {**MEAN, LIMITS: {"max_seq_length": "x"}}, Task.UNSPECIFIED, "max_seq"),
        (
            {},
            [TRANSFORMER, POOLING, DENSE],
            {**MEAN, "2_Dense": {"in_features": 8, "out_features": 8, "activation_function": "mine.Act"}},
            Task.UNSPECIFIED,
            "activation_function",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, [TRANSFORMER, POOLING], MEAN, Task.SCORE, "--task embed"),
    ],
)
def test_what_no_file_states_is_refused(
    tmp_path: Path, config: dict[str, Any], modules: Any, files: dict[str, Any], task: Task, words: str
) -> None:
    with pytest.raises(BlockyardError, match=words) as caught:
        read_rule(write(tmp_path, config, modules, **files), task)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED


def test_a_plan_refuses_what_a_worker_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    fields = {**dict.fromkeys(sizes, 32), "hidden_size": 64, "architectures": ["BertModel"], "model_type": "bert"}
    folder = str(write(tmp_path, fields, [TRANSFORMER, POOLING], **MEAN))
    for flags, words in (
        (("--tensor-parallel-size", "2"), "one worker, not by a group"),
        (("--max-loras", "1"), "takes no adapters"),
        (("--gpu", "h100"), "our kernels for GPUs lack operations that BertModel needs"),
        (("--task", "score"), "has no head that makes labels or scores"),
    ):
        assert run("plan", folder, *flags, "--json") == 1
        assert words in json.loads(capsys.readouterr().out)["refusal"]
    assert run("plan", folder, "--memory", "8GiB") == 0
    assert "to embed, as 1_Pooling/config.json: mean says" in capsys.readouterr().out


def test_doctor_says_which_file_was_believed(tmp_path: Path) -> None:
    def look() -> list[tuple[Level, str]]:
        configuration = SystemConfiguration(model=ModelSettings(model=str(tmp_path)))
        return [(each.level, each.text) for each in look_at_model(configuration) if each.subject == "task"]

    write(tmp_path, {})
    assert [level for level, _ in look()] == [Level.FAIL]
    write(tmp_path, {}, [TRANSFORMER, POOLING], **MEAN)
    assert look() == [(Level.OK, "to embed, as 1_Pooling/config.json: mean says")]
    assert list(look_at_model(SystemConfiguration())) == []
