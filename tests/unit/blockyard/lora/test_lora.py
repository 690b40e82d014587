"""Settings of adapters, and adapters as users of LLM name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard import LoRARequest
from blockyard.configuration import SystemConfiguration
from blockyard.lora.settings import split_modules
from blockyard.settings import SettingsError, resolve

if TYPE_CHECKING:
    from blockyard.lora.settings import LoraSettings


def read(**flags: object) -> LoraSettings:
    return resolve(SystemConfiguration, flags, environment={}).lora


def test_modules_are_names_and_folders() -> None:
    assert split_modules(read(lora_modules=" sql=/a/b, chat = c=d ,").lora_modules) == [
        ("sql", "/a/b"),
        ("chat", "c=d"),
    ]
    assert split_modules("") == []


@pytest.mark.parametrize("text", ["sql", "=folder", "sql=", "a=b,c"])
def test_a_module_without_a_name_or_a_folder_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="name=folder"):
        read(lora_modules=text)


def test_a_request_has_what_it_needs() -> None:
    assert LoRARequest("sql", 1, "sql").lora_name == "sql"
    for wrong in (("", 1, "sql"), ("sql", 1, ""), ("sql", 0, "sql")):
        with pytest.raises(ValueError, match=r"adapter|lora_int_id"):
            LoRARequest(*wrong)
    assert LoRARequest("sql", 1, "sql", long_lora_max_len=0)
    with pytest.raises(ValueError, match="long_lora_max_len must be 0 or absent"):
        LoRARequest("sql", 1, "sql", long_lora_max_len=8192)
