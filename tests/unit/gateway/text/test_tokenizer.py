from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.text.tokenizer_files import load_tokenizer
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model's text files, to change."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    return tmp_path


def change(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    content.update(fields)
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(BlockyardError) as raised:
        load_tokenizer(folder, **options)
    assert raised.value.reason is Reason.MODEL_NOT_LOADED
    return raised.value.message


def test_the_begin_token_is_added_once() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.encode("hi").count(0) == 1
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(rendered, add_special_tokens=False).count(0) == 1


def test_ids_without_a_piece_have_no_text() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.decode([*tokenizer.encode("hi"), 4096, 2**31]) == "hi"


@pytest.mark.parametrize("word", ["hello", " hello", "   hello"])
def test_a_bad_word_stands_at_the_beginning_and_behind_a_space(word: str) -> None:
    tokenizer = demo_tokenizer()
    spellings = [tokenizer.encode(text, False) for text in ("hello", " hello")]
    assert len(spellings[0]) == len(spellings[1])
    assert tokenizer.encode_bad_words([word]) == [tuple(spelling) for spelling in spellings]


def test_a_bad_word_that_is_longer_behind_a_space_stands_alone() -> None:
    tokenizer = demo_tokenizer()
    assert len(tokenizer.encode(" \n", False)) > len(tokenizer.encode("\n", False))
    assert tokenizer.encode_bad_words(["\n"]) == [tuple(tokenizer.encode("\n", False))]


def test_a_bad_word_of_spaces_is_not_another_number_of_spaces() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.encode_bad_words(["  "]) == [tuple(tokenizer.encode("  ", False))]


def test_an_empty_bad_word_has_no_tokens() -> None:
    assert demo_tokenizer().encode_bad_words(["", "x"]) == demo_tokenizer().encode_bad_words(["x"])


def test_half_a_surrogate_pair_is_told_with_its_field() -> None:
    with pytest.raises(BlockyardError) as raised:
        demo_tokenizer().encode_bad_words(["\ud800"])
    assert [violation.field for violation in raised.value.violations] == ["sampling.bad_words"]
    with pytest.raises(BlockyardError) as raised:
        demo_tokenizer().encode("\ud800")
    assert [violation.field for violation in raised.value.violations] == ["prompt"]


def test_the_digest_is_that_of_config_json(folder: Path) -> None:
    expected = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    assert load_tokenizer(folder).model_digest == expected


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "expected"),
    [
        (0, [0, 3], "<|endoftext|>", {0, 3}),
        ([1, 2], 5, None, {1, 2, 5}),
        (-1, [-1, 5, 2**40, True], None, {5}),
        (None, None, "<|end|>", {3}),
        (..., ..., {"content": "<|end|>", "special": True}, {3}),
        (..., ..., None, set()),
        (..., ..., "no such token", set()),
    ],
)
def test_end_tokens_are_those_of_all_files(
    folder: Path, config: Any, generation: Any, eos_token: Any, expected: set[int]
) -> None:
    change(folder / "config.json", eos_token_id=config)
    change(folder / "generation_config.json", eos_token_id=generation)
    change(folder / "tokenizer_config.json", eos_token=eos_token)
    assert load_tokenizer(folder).end_token_ids == expected


def test_end_tokens_of_a_nested_text_config_count(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=..., text_config={"eos_token_id": 9})
    assert 9 in load_tokenizer(folder).end_token_ids


def test_only_the_defaults_that_the_file_has_apply(folder: Path) -> None:
    assert load_tokenizer(folder).generation_defaults == {}
    change(folder / "generation_config.json", temperature=0.6, top_k=-1, top_p=None, do_sample=False, max_length=20)
    assert load_tokenizer(folder).generation_defaults == {"temperature": 0.6, "top_k": 0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", float("nan")),
        ("top_k", 1e12),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_a_default_that_no_request_may_have_is_told(folder: Path, name: str, value: float) -> None:
    change(folder / "generation_config.json", **{name: value})
    assert f"generation_config.json: {name} must be" in refusal(folder)


def test_a_folder_needs_no_files_but_two(folder: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    assert not tokenizer.has_chat_template


def test_settings_of_the_training_do_not_cut_prompts(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding.update({"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"})
    change(folder / "tokenizer.json", truncation=cut, padding=padding)
    text = "a prompt of more than four tokens"
    assert load_tokenizer(folder).encode(text) == demo_tokenizer().encode(text)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(folder: Path, file: str) -> None:
    change(folder / file, auto_map={"AutoTokenizer": ["x.Y", None]})
    assert "auto_map" in refusal(folder)


def test_fields_of_generation_that_are_not_applied_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "stop_strings": None, "suppress_tokens": [], "temperature": 0.5}
    change(folder / "generation_config.json", **neutral)
    load_tokenizer(folder)
    assert not caplog.records
    change(folder / "generation_config.json", max_new_tokens=20, no_repeat_ngram_size=3)
    load_tokenizer(folder)
    assert caplog.records[-1].fields == {"fields": "max_new_tokens,no_repeat_ngram_size"}


def test_a_default_that_is_no_number_is_told(folder: Path) -> None:
    change(folder / "generation_config.json", temperature="0.6")
    assert "temperature must be a number, not '0.6'" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_file_that_is_no_object_is_named(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(folder)


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert "tokenizer.json" in refusal(folder)


def test_a_template_file_goes_before_the_models_own(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (folder / "chat_template.jinja").write_text("own")
    assert load_tokenizer(folder).apply_chat_template(messages) == "own"
    given = folder / "given.jinja"
    given.write_text("given {{ messages[0].content }}")
    assert load_tokenizer(folder, chat_template_file=given).apply_chat_template(messages) == "given hi"


def test_a_template_file_that_is_not_there_is_told(folder: Path) -> None:
    assert "--chat-template" in refusal(folder, chat_template_file=folder / "none")


def test_of_named_templates_the_default_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(folder).apply_chat_template([]) == "plain"
    change(folder / "tokenizer_config.json", chat_template=named[:1])
    assert load_tokenizer(folder).apply_chat_template([]) == "tools"


def test_a_broken_template_is_an_error_at_start(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("a\n{% if %}")
    assert "line 2" in refusal(folder)


def test_special_tokens_of_the_map_are_known_to_templates(folder: Path) -> None:
    change(folder / "tokenizer_config.json", bos_token=..., chat_template="{{ bos_token }}|{{ eos_token }}")
    change(folder / "special_tokens_map.json", bos_token={"content": "<|user|>"}, eos_token="other")
    assert load_tokenizer(folder).apply_chat_template([]) == "<|user|>|<|endoftext|>"


def test_without_a_template_messages_are_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(BlockyardError) as raised:
        load_tokenizer(folder).apply_chat_template([])
    assert raised.value.reason is Reason.FEATURE_DISABLED
    assert "--chat-template" in raised.value.message
