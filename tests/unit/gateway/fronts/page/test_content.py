"""What the page's files may and may not hold: nothing from elsewhere, no markup made of text, names that exist."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gateway.fronts.page.routes import INDEX, load_assets

ASSETS = {name: asset.content.decode() for name, asset in load_assets().items()}
SCRIPTS = {name: text for name, text in ASSETS.items() if name.endswith(".js")}
STYLE = ASSETS["style.css"]
MAX_BYTES = 132_000
MAX_LINES = 400
VOID = {"img", "input", "link", "meta"}
# WCAG 2.2, level AA: of text, and of what else one has to see to use the page.
TEXT_CONTRAST = 4.5
OTHER_CONTRAST = 3.0


class Page(HTMLParser):
    """Collects the elements, and checks that they are nested as they end."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.labelled: set[int] = set()
        self.feed(ASSETS[INDEX])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if "label" in self.open:
            self.labelled.add(len(self.elements))
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, *tags: str) -> list[dict[str, Any]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


PAGE = Page()
IDS = [attributes["id"] for _, attributes in PAGE.elements if "id" in attributes]


def test_nothing_comes_from_elsewhere() -> None:
    for name, text in ASSETS.items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", re.sub(r"^\s*// .*", "", text, flags=re.M)))
        assert found <= {"http://www.w3.org/2000/svg"}, name
    assert not re.search(r"@import|url\(", STYLE)


def test_every_file_is_used_and_every_used_file_exists() -> None:
    used = {INDEX}
    for attributes in PAGE.all("link", "script", "img"):
        used.add((attributes.get("href") or attributes["src"]).removeprefix("page/"))
    for text in SCRIPTS.values():
        imported = re.findall(r'from "(.+?)";', text)
        assert all(path.startswith("./") for path in imported)
        used.update(path[2:] for path in imported)
    assert used == set(ASSETS)


def test_every_import_is_exported_and_used() -> None:
    for name, text in SCRIPTS.items():
        for names, path in re.findall(r'import \{ (.+?) \} from "\./(.+?)";', text):
            for imported in names.split(", "):
                assert re.search(rf"export (?:async )?(?:function\*? |class |const ){imported}\b", ASSETS[path]), (
                    imported
                )
                assert len(re.findall(rf"\b{imported}\b", text)) > 1, f"{name} does not use {imported}"


def test_no_markup_is_made_of_text_and_no_code_of_strings() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    code = r"\beval\(|new Function|setTimeout\(\s*[\"'`]|javascript:|\.cookie"
    for name, text in SCRIPTS.items():
        assert not re.search(f"{sinks}|{code}", text), name


def test_what_a_browser_keeps_is_kept_in_one_place() -> None:
    assert {name for name, text in SCRIPTS.items() if re.search("localStorage|sessionStorage", text)} == {"store.js"}


def test_no_scripts_handlers_or_styles_stand_in_the_markup() -> None:
    for tag, attributes in PAGE.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    assert all(script.keys() == {"type", "src"} for script in PAGE.all("script"))
    assert not PAGE.all("style", "iframe", "object", "embed", "base", "a[target]")
    assert not PAGE.open


def test_ids_are_there_once_and_all_that_are_named_exist() -> None:
    assert len(set(IDS)) == len(IDS)
    named = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("(.+?)"\)', text)}
    assert named <= set(IDS)
    for attributes in PAGE.all("label"):
        assert attributes.get("for", IDS[0]) in IDS
    for _, attributes in PAGE.elements:
        assert attributes.get("aria-labelledby", IDS[0]) in IDS
        assert (attributes.get("href") or "page/").startswith("page/") or (attributes["href"] or "")[1:] in IDS


def test_every_field_has_a_label_and_every_button_a_word() -> None:
    of_ids = {attributes.get("for") for attributes in PAGE.all("label")}
    for number, (tag, attributes) in enumerate(PAGE.elements):
        if tag in ("input", "textarea", "select"):
            assert number in PAGE.labelled or attributes["id"] in of_ids, attributes
    assert all(attributes["type"] in ("button", "submit") for attributes in PAGE.all("button"))
    assert all("alt" in attributes for attributes in PAGE.all("img"))
    assert PAGE.all("html") == [{"lang": "en"}]
    assert len(PAGE.all("h1")) == len(PAGE.all("main")) == 1


def test_unlikely_tokens_are_tinted_in_completions_and_in_chats() -> None:
    assert ".tinted .token" in STYLE
    tinted = [attributes["id"] for attributes in PAGE.all("div") if "tinted" in (attributes.get("class") or "").split()]
    assert tinted == ["conversation", "answers"]


def test_fields_are_named_as_the_api_names_them() -> None:
    names = {attributes.get("name") for attributes in PAGE.all("input", "textarea")} - {None}
    parameters = {"temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "n"}
    assert names == parameters | {"mode", "system", "prompt", "tokens", "schema", "tools"}


def test_files_are_small() -> None:
    assert sum(map(len, ASSETS.values())) < MAX_BYTES
    for name, text in SCRIPTS.items():
        assert text.count("\n") < MAX_LINES, name
        assert text.startswith("// "), f"{name} does not say what it owns"


def palettes() -> dict[str, dict[str, str]]:
    """The colours by name, of the light page and of the dark one."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in (light, dark)]
    assert colours[0].keys() == colours[1].keys()
    return {"light": colours[0], "dark": colours[1]}


def channels(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def luminance(colour: list[float]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: list[float], second: list[float]) -> float:
    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_can_be_told_apart(name: str) -> None:
    colours = {key: channels(value) for key, value in palettes()[name].items()}
    grounds = [colours["panel"], colours["ground"]]
    for key in ("text", "faint", "good", "middling", "bad", "accent"):
        assert min(contrast(colours[key], ground) for ground in grounds) >= TEXT_CONTRAST, key
    assert contrast(colours["on-accent"], colours["accent"]) >= TEXT_CONTRAST
    for key in ("field-edge", "series-1", "series-2", "series-3"):
        assert contrast(colours[key], colours["panel"]) >= OTHER_CONTRAST, key


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_unlikeliest_token_can_still_be_read(name: str) -> None:
    colours = {key: channels(value) for key, value in palettes()[name].items()}
    (share,) = re.findall(r"calc\(var\(--surprise\) \* (\d+)%\)", STYLE)
    for ground in (colours["ground"], colours["panel"]):
        tinted = [
            int(share) / 100 * t + (1 - int(share) / 100) * g for t, g in zip(colours["tint"], ground, strict=True)
        ]
        assert contrast(colours["text"], tinted) >= TEXT_CONTRAST


def test_colours_are_named_once_and_motion_can_be_turned_off() -> None:
    rules = STYLE[STYLE.index("* {") :]
    assert not re.findall(r"#[0-9a-f]{3,8}\b", rules)
    used, defined = (set(re.findall(pattern, STYLE)) for pattern in (r"var\(--([\w-]+)", r"--([\w-]+):"))
    assert used - defined == {"surprise", "share", "head"}, "these are set by scripts"
    assert "prefers-reduced-motion" in STYLE


def test_the_folder_holds_nothing_else() -> None:
    folder = Path(__file__).parents[5] / "gateway" / "fronts" / "page" / "static"
    assert {file.name for file in folder.iterdir()} == set(ASSETS)
