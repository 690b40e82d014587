"""Where a setting's value comes from, what is refused, and the way to YAML and flags and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from blockyard import configuration
from blockyard.settings import (
    SettingsError,
    load,
    make_parser,
    option,
    resolve,
    resolve_each,
    settings_of,
    to_flags,
    to_yaml,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Oven:
    degrees: Annotated[int, Field(ge=0, le=300)] = option(180, "how hot, in 100 % of cases")
    fan: bool = option(True, "blow")
    program: str = option("bake", "what to do", choices=("bake", "grill"))
    rack: Path = option(Path("/tmp"), "where")  # noqa: RUF009


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    minutes: float | Literal["auto"] = option("auto", "how long")


@dataclasses.dataclass(frozen=True, slots=True)
class Kitchen:
    oven: Oven
    timer: Timer


def read(flags: dict[str, Any] | None = None, **environment: str) -> Kitchen:
    return resolve(Kitchen, flags or {}, environment=environment)


def test_defaults() -> None:
    assert read() == Kitchen(Oven(), Timer())


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_text("degrees: 100\nminutes: 10\nprogram: grill\n")
    kitchen = read(
        {"config": str(file), "degrees": "120"}, BLOCKYARD_DEGREES="110", BLOCKYARD_MINUTES="11", UNRELATED="1"
    )
    assert kitchen == Kitchen(Oven(degrees=120, program="grill"), Timer(minutes=11.0))


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_text("fan: false\n")
    assert read(BLOCKYARD_CONFIG=str(file)).oven.fan is False


def test_a_list_of_models_is_told_to_be_for_other_commands(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_text("models: [{degrees: 1}]\noven: {}\n")
    with pytest.raises(SettingsError) as caught:
        read({"config": str(file)})
    unknown, models = str(caught.value).splitlines()
    assert unknown == f"--config {file}: unknown settings: oven"
    assert models == (
        f"--config {file}: the list models is for `blockyard serve`, `up` and `run` and for gateways, and here one "
        "model is meant: name it, and give its settings as flags or without the list"
    )


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_text("oven: {}\n7: x\nminutes: soon\n")
    with pytest.raises(SettingsError) as caught:
        read({"config": str(file), "degrees": "301", "fan": "maybe"}, BLOCKYARD_PROGRAM="toast")
    unknown, degrees, fan, program, minutes = str(caught.value).splitlines()
    assert unknown == f"--config {file}: unknown settings: 7, oven"
    assert degrees == "--degrees: '301': Input should be less than or equal to 300"
    assert fan.startswith("--fan: 'maybe': Input should be a valid boolean")
    assert program == "BLOCKYARD_PROGRAM: 'toast' is none of bake, grill"
    assert minutes.startswith(f"minutes in {file}: 'soon'")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"- a\n", "not a mapping"),
        (b"a: [\n", "line 2 is no YAML: expected"),
        (b"\xff\xfe\xfa", "not text in UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, told: str) -> None:
    file = tmp_path / "kitchen.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=told):
        read({"config": str(file)})


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert read({"config": str(tmp_path / "empty.yaml")}) == read()


def test_print_config_gives_back_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--degrees=99", "--no-fan", "--program", "grill", "--minutes=2.5", "--rack=/a b"]
    with pytest.raises(SystemExit) as caught:
        load(Kitchen, "kitchen", "cooks", [*flags, "--print-config"])
    assert caught.value.code == 0
    file = tmp_path / "kitchen.yaml"
    file.write_text(capsys.readouterr().out)
    expected = Kitchen(Oven(99, False, "grill", Path("/a b")), Timer(2.5))
    assert load(Kitchen, "kitchen", "cooks", ["--config", str(file)]) == expected


kitchens = st.builds(
    Kitchen,
    st.builds(Oven, st.integers(0, 300), st.booleans(), st.sampled_from(["bake", "grill"])),
    st.builds(Timer, st.floats(0, 1e9) | st.just("auto")),
)


@given(kitchens)
def test_yaml_and_flags_hold_everything(kitchen: Kitchen) -> None:
    assert resolve(Kitchen, yaml.safe_load(to_yaml(kitchen)), environment={}) == kitchen
    assert load(Kitchen, "kitchen", "", [*to_flags(kitchen.oven), *to_flags(kitchen.timer)]) == kitchen


@pytest.mark.parametrize("flags", [["--deg=1"], ["--unknown=1"], ["--degrees=hot"], ["--fan=no"]])
def test_a_bad_flag_ends_with_status_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Kitchen, "kitchen", "cooks", flags)
    assert caught.value.code == 2
    assert flags[0].split("=")[0] in capsys.readouterr().err


def test_help_tells_default_variable_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Kitchen, "kitchen", "cooks", ["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--degrees VALUE how hot, in 100 % of cases [180] (env BLOCKYARD_DEGREES)" in told
    assert "--fan, --no-fan" in told
    assert "--program {bake,grill}" in told


def test_a_name_stands_in_one_section_only() -> None:
    twice = dataclasses.make_dataclass("Twice", [("a", Oven), ("b", Oven)])
    with pytest.raises(AssertionError, match="two sections"):
        settings_of(twice)


SECTIONS = [value for name, value in vars(configuration).items() if name.endswith("Settings")]


def test_the_sections_of_all_services_fit_into_one_process() -> None:
    together = dataclasses.make_dataclass("Everything", [(section.__name__, section) for section in SECTIONS])
    settings = settings_of(together)
    make_parser(together, "everything", "")
    resolved = resolve(together, {}, environment={})
    assert resolve(together, yaml.safe_load(to_yaml(resolved)), environment={}) == resolved
    assert all(setting.help for setting in settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "0"),
        ("max_model_len", "much"),
        ("swap_space_gib", "inf"),
        ("swap_space_gib", "nan"),
        ("num_host_blocks", "-2"),
        ("grpc_port", "65536"),
        ("device_memory_utilization", "0"),
        ("device_memory_utilization", "1.01"),
        ("log_level", "loud"),
        ("block_size", "1.5"),
        ("allowed_origins", "https://example.org/chat"),
        ("allowed_origins", "example.org"),
        ("allowed_origins", "https://a.org,,https://b.org"),
    ],
)
def test_ranges(name: str, value: str) -> None:
    section = next(section for section in SECTIONS if name in {item.name for item in dataclasses.fields(section)})
    with pytest.raises(SettingsError, match=name.replace("_", "-")):
        resolve(dataclasses.make_dataclass("One", [("section", section)]), {name: value}, environment={})


@pytest.mark.parametrize("arguments", [["--degrese", "3"], ["--degrese=3"]])
def test_a_flag_that_is_misspelt_is_told_which_one_may_be_meant(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(Kitchen, "kitchen", "", arguments)
    assert ended.value.code == 2
    assert f"unknown arguments: {arguments[0]} (did you mean --degrees?)" in capsys.readouterr().err


def test_a_setting_of_the_file_that_is_misspelt_is_told_which_one_may_be_meant(tmp_path: Path) -> None:
    file = tmp_path / "kitchen.yaml"
    file.write_text("minuets: 3\n")
    with pytest.raises(SettingsError, match=r"unknown settings: minuets \(did you mean minutes\?\)"):
        read({"config": str(file)})


MENU = """
program: grill
models:
  - degrees: 200
  - degrees: 90
    minutes: 5
"""


def read_each(tmp_path: Path, text: str, **flags: Any) -> list[Kitchen]:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return resolve_each(Kitchen, {"config": str(file), **flags}, {"degrees", "minutes"}, environment={})


def test_each_model_of_a_file_has_the_settings_of_its_entry_and_else_those_of_the_file(tmp_path: Path) -> None:
    first, second = read_each(tmp_path, MENU, degrees="30", fan=False)
    assert (first.oven.degrees, first.timer.minutes) == (200, "auto")
    assert (second.oven.degrees, second.timer.minutes) == (90, 5)
    assert (first.oven.program, first.oven.fan) == ("grill", False)
    assert read_each(tmp_path, "degrees: 7") == [resolve(Kitchen, {"degrees": 7}, environment={})]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: demo", "models must be a list with a mapping of settings for each model"),
        ("models: []", "models must be a list"),
        ("models: [{degrees: 900}]", "degrees of models[0] in"),
        ("models: [{program: bake}]", "models[0] in"),
        ("models: [{degree: 1}]", "unknown settings: degree (did you mean degrees?)"),
        ("tyme: 1\nmodels: [{degrees: 1}]", "unknown settings: tyme"),
    ],
)
def test_an_entry_of_a_model_that_cannot_be_read_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_each(tmp_path, text)
    assert problem in str(refused.value)
