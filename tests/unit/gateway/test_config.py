"""How the settings of a gateway name several models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.settings import SettingsError, resolve, resolve_each
from gateway.config import OF_MODEL, GatewayConfiguration, split_models
from gateway.server import Server
from tests.unit.gateway.harness import DEMO_MODEL

if TYPE_CHECKING:
    from pathlib import Path

PORTS = {"grpc_port": 0, "http_port": 0, "admin_port": 0}


def split(**values: Any) -> list[GatewayConfiguration]:
    return split_models([resolve(GatewayConfiguration, values, environment={})])


def test_addresses_with_names_are_a_model_each() -> None:
    first, second = split(model="a=/models/a, b=org/b", scheduler_address="a=unix:/run/a,b=10.0.0.2:50060", seed="7")
    assert (first.model.model, first.service.scheduler_address) == ("/models/a", "unix:/run/a")
    assert (second.model.model, second.service.scheduler_address) == ("org/b", "10.0.0.2:50060")
    assert [each.text.served_model_name for each in (first, second)] == ["a", "b"]
    assert [each.text.seed for each in (first, second)] == [7, 7]


def test_an_address_without_a_name_is_the_only_models() -> None:
    [only] = split(model="/models/a=1", scheduler_address="unix:/run/a")
    assert only.model.model == "/models/a=1"


@pytest.mark.parametrize(
    ("model", "address", "problem"),
    [
        ("a=/models/a", "a=unix:/a,b=unix:/b", "names a, b, and --model names a: name the same models"),
        ("", "a=unix:/a", "names a, and --model names none"),
        ("/models/a", "a=unix:/a", "--model '/models/a': give NAME=VALUE of each model"),
        ("a=/m", "a=unix:/a,a=unix:/b", "--scheduler-address 'a=unix:/a,a=unix:/b': give NAME=VALUE"),
        ("a=/m", "a=", "give NAME=VALUE"),
    ],
)
def test_names_that_do_not_fit_are_refused(model: str, address: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        split(model=model, scheduler_address=address)
    assert problem in str(refused.value)


def configurations(tmp_path: Path, text: str) -> list[GatewayConfiguration]:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    return resolve_each(GatewayConfiguration, {"config": str(file), **PORTS}, OF_MODEL, environment={})


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    entry = f"{{model: {DEMO_MODEL}, scheduler_address: 'unix:/a'}}"
    with pytest.raises(SettingsError, match="several models have the name demo"):
        Server(*configurations(tmp_path, f"models: [{entry}, {entry}]"))


def test_a_setting_of_the_whole_gateway_is_refused_in_an_entry(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="unknown settings: enable_page"):
        configurations(tmp_path, "models: [{enable_page: true}]")
