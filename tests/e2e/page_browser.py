"""Looks at the page in a headless Chromium, as `test_page.py` asks, and prints what it saw as JSON.

    python page_browser.py SCENARIO URL [ARGUMENT]

It runs in an environment of its own, with `playwright` and `axe-playwright-python` in it.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import axe_playwright_python
from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page, Route

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    # Names are not looked up: what is not the gateway is not reached.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
TIMEOUT_MILLISECONDS = 20_000
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
PROMPT = "def read_lines(path):\n"
# As in a tab in the background.
DRAW_NOTHING = "() => { window.requestAnimationFrame = () => 0; }"
NOTE_REQUESTS = """() => {
  window.times = [];
  const ask = window.fetch;
  window.fetch = (...request) => {
    window.times.push(performance.now());
    return ask(...request);
  };
}"""
HIDE = """(isHidden) => {
  Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
NOTHING_RUNS = """async () => {
  const { scheduler } = await (await fetch("status")).json();
  return scheduler.replicas[0].ready && !scheduler.replicas[0].num_running_sequences;
}"""
TOO_WIDE = """() => Array.from(document.querySelectorAll("html, .board, .board .panel, .board .panel > *"))
  .filter((each) => each.scrollWidth > each.clientWidth)
  .map((each) => `${each.localName}#${each.id}.${each.className}: ${each.scrollWidth} > ${each.clientWidth}`)"""
CHARTS = """() => Array.from(document.querySelectorAll(".chart"), (chart) => ({
  title: chart.querySelector("figcaption").textContent,
  told: chart.querySelector("svg").getAttribute("aria-label"),
  drawn: Array.from(chart.querySelectorAll(".mark"), (mark) => mark.getAttribute("d")).join("|"),
}))"""


class Watch:
    """What a page said and asked for while it was looked at."""

    def __init__(self, page: Page, url: str) -> None:
        self.console: list[str] = []
        self.errors: list[str] = []
        self.origins: set[str] = set()
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.context.on("request", lambda request: self.origins.add(origin(request.url)))
        self._own = origin(url)

    def told(self) -> dict[str, Any]:
        """Gives what a page that is well has none of."""
        return {
            "console": self.console,
            "errors": self.errors,
            "elsewhere": sorted(self.origins - {self._own}),
        }


def origin(url: str) -> str:
    """The scheme, host and port of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


@contextmanager
def opened(
    browser: Browser, url: str, prepare: Callable[[Page], object] = lambda page: None, **options: Any
) -> Iterator[tuple[Page, Watch]]:
    """Opens the page, prepared before it loads."""
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **options})
    context.set_default_timeout(TIMEOUT_MILLISECONDS)
    page = context.new_page()
    watch = Watch(page, url)
    prepare(page)
    page.goto(url)
    yield page, watch
    context.close()


def tell(what: Any) -> None:
    """Says it to the test."""
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def ask_for(what: str) -> None:
    """Asks the test for something, and waits until it says that this is done."""
    tell(what)
    sys.stdin.readline()


def wait_until_ready(page: Page) -> None:
    """Waits until the page says that the gateway is ready."""
    expect(page.locator("#readiness")).to_have_text("ready")


def wait_until_done(page: Page) -> None:
    """Waits until no answer is read any more."""
    expect(page.locator("#stop")).to_be_disabled(timeout=2 * TIMEOUT_MILLISECONDS)


def choose(page: Page, mode: str) -> None:
    """Chooses whether to complete or to chat."""
    page.get_by_role("radio", name=mode).check()


def say(page: Page, message: str) -> None:
    """Sends a message by the keyboard."""
    page.fill("#prompt", message)
    page.press("#prompt", "Enter")


def said(page: Page) -> list[str]:
    """The texts of a conversation, answers as they are shown."""
    return page.locator("#conversation :is(.said, .rendered)").all_text_contents()


def generate(page: Page, prompt: str = PROMPT, **parameters: str) -> None:
    """Asks for a completion."""
    choose(page, "Completion")
    page.fill("#prompt", prompt)
    for name, value in parameters.items():
        page.fill(f"[name={name}]", value)
    page.click("#run")


def answers(page: Page) -> list[str]:
    """The texts of the answers."""
    return page.locator(".answer").all_text_contents()


def violations(page: Page) -> list[str]:
    """What axe finds wrong for those who do not see the page, or do not use a mouse."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run()")["violations"]
    return [f"{each['id']}: {', '.join(node['html'][:120] for node in each['nodes'])}" for each in found]


def completion(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A completion: it streams, its tokens can be asked about, and charts move."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        before = page.evaluate(CHARTS)
        generate(page, temperature="1", seed="3", max_tokens="300", n="2")
        wait_until_done(page)
        expect(page.locator(".chart svg").nth(2)).not_to_have_attribute("aria-label", re.compile("p95 –"))
        told = {
            "answers": answers(page),
            "tokens": page.locator(".answer").first.locator(".token").count(),
            "facts": page.locator("#facts").text_content(),
            "model": page.locator("#model").text_content(),
            "replicas": page.locator("#replicas tr:not(.place)").all_inner_texts(),
            "command": page.locator("#command").text_content(),
            "before": before,
            "after": page.evaluate(CHARTS),
        }
        page.locator(".token").nth(2).hover()
        expect(page.locator("#card")).to_be_visible()
        told["card"] = page.locator("#card tr").all_inner_texts()
        page.locator(".answer").first.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        told["announced"] = page.locator("#announcer").text_content()
        told["current"] = page.locator(".token.current").text_content()
        page.keyboard.press("Escape")
        told["card_is_hidden"] = page.locator("#card").is_hidden()
        return told | watch.told()


def chat(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A chat by the keyboard: two turns, another answer, another question, all of it after a reload, and none of it."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        expect(page.locator("#playground")).to_have_attribute("data-mode", "chat")
        bodies: list[Any] = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        page.click("#settings > summary")
        page.fill("[name=max_tokens]", "24")
        page.fill("#prompt", "What does")
        page.press("#prompt", "Shift+Enter")
        page.keyboard.type("os.path.join do?")
        page.press("#prompt", "Enter")
        wait_until_done(page)
        say(page, "And os.path.split?")
        wait_until_done(page)
        told: dict[str, Any] = {"turns": said(page), "announced": page.locator("#announcer").text_content()}
        page.locator("#conversation").get_by_role("button", name="Regenerate").click()
        wait_until_done(page)
        told["again"] = said(page)
        page.get_by_role("button", name="Edit").first.click()
        told["edited"] = page.input_value("#prompt")
        page.keyboard.press("Escape")
        told["not_edited"] = page.input_value("#prompt")
        page.get_by_role("button", name="Edit").first.click()
        say(page, "What is a generator?")
        wait_until_done(page)
        told["changed"] = said(page)
        page.reload()
        wait_until_ready(page)
        told["reloaded"] = said(page)
        page.click("#clear")
        page.reload()
        wait_until_ready(page)
        return {**told, "cleared": said(page), "bodies": bodies, **watch.told()}


def reload(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A page that is loaded again while an answer is read, and once more when the answer has been forgotten."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        page.click("#settings > summary")
        page.fill("[name=seed]", "3")
        page.fill("[name=max_tokens]", "200")
        posts: list[str] = []
        page.on("request", lambda request: request.method == "POST" and posts.append(request.url))
        say(page, "What is a class?")
        expect(page.locator(".rendered")).not_to_be_empty()
        ask_for("halt")
        page.reload()
        expect(page.locator("#stop")).to_be_enabled()
        ask_for("go on")
        wait_until_done(page)
        wait_until_ready(page)
        told: dict[str, Any] = {"read_on": said(page), "seed": page.input_value("[name=seed]")}
        told |= {"marks": page.locator(".cut").count(), "posts": len(posts)}
        # As a page leaves it that is closed in the middle of an answer, of which nobody knows later.
        page.evaluate(
            """() => {
              const key = Object.keys(localStorage).find((name) => name.endsWith(":chat"));
              const kept = JSON.parse(localStorage[key]);
              Object.assign(kept.messages.at(-1), { content: "half an", isWhole: false });
              localStorage[key] = JSON.stringify(kept);
            }"""
        )
        fresh = page.context.new_page()
        fresh.add_init_script("sessionStorage['blockyard:/:running'] = 'page-forgotten'")
        fresh.goto(url)
        wait_until_ready(fresh)
        wait_until_done(fresh)
        told["forgotten"] = said(fresh)
        told["mark"] = fresh.locator(".cut").all_text_contents()
        return told | watch.told()


def follow(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """An answer that grows: the end is followed until somebody scrolls up, and again from the end on."""
    with opened(browser, url, viewport={"width": 1280, "height": 500}) as (page, watch):
        wait_until_ready(page)
        distance = "(log) => log.scrollHeight - log.scrollTop - log.clientHeight"
        log = page.locator("#conversation")
        say(page, "Write much.")
        wait_until_done(page)
        told: dict[str, Any] = {"followed": log.evaluate(distance)}
        log.evaluate("(log) => { log.scrollTop = 0; }")
        expect(page.locator("#to-end")).to_be_visible()
        page.locator("#conversation .again").last.dispatch_event("click")
        wait_until_done(page)
        log.evaluate("(log) => { log.scrollTop = 0; }")
        expect(page.locator("#to-end")).to_be_visible()
        page.evaluate("() => document.querySelector('.rendered').append('one more line')")
        told["stayed"] = log.evaluate("(log) => log.scrollTop")
        page.click("#to-end")
        told["returned"] = log.evaluate(distance)
        box, panel = page.locator("#prompt").bounding_box(), page.locator("#playground").bounding_box()
        assert box is not None
        assert panel is not None
        told["foot"] = [box["y"] + box["height"], panel["y"] + panel["height"]]
        return told | watch.told()


def stop(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A long answer is stopped."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        generate(page, max_tokens="200", temperature="1", seed="1", n="8")
        expect(page.locator(".token").nth(5)).to_be_visible()
        ask_for("halt")
        page.click("#stop")
        wait_until_done(page)
        told: dict[str, Any] = {"notice": page.locator("#notice").text_content()}
        stopped = answers(page)
        ask_for("go on")
        page.wait_for_function(NOTHING_RUNS)
        return {**told, "grew_on": answers(page) != stopped, **watch.told()}


def refusal(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """What is wrong with a request is told at its fields."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        generate(page, top_p="2", temperature="-1")
        wait_until_done(page)
        marked = "(all) => all.filter((each) => each.checkVisibility()).map((each) => each.name)"
        told = {
            "problem": page.locator("#problem").inner_text(),
            "marked": page.locator("[aria-invalid]").evaluate_all(marked),
        }
        choose(page, "Chat")
        page.click("#settings > summary")
        page.fill("#schema", '{"type": ')
        page.click("#settings > summary")
        say(page, "Go.")
        wait_until_done(page)
        told["marked_in_chat"] = page.locator("[aria-invalid]").evaluate_all(marked)
        return told | watch.told()


def outlive(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """An answer whose gateway dies and comes back."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        generate(page, max_tokens="200", seed="7", temperature="1", n="4")
        expect(page.locator(".token").nth(5)).to_be_visible()
        ask_for("halt")
        expect(page.locator("#notice")).to_contain_text("broke")
        ask_for("go on")
        expect(page.locator("#facts")).to_contain_text("1 reconnect", timeout=2 * TIMEOUT_MILLISECONDS)
        wait_until_done(page)
        facts = page.locator("#facts").text_content()
        return {"answers": answers(page), "facts": facts, **watch.told()}


def hostile(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A model whose output is an attack."""
    with opened(browser, url) as (page, watch):
        choose(page, "Completion")
        page.evaluate("() => { window.owned = []; }")
        generate(page)
        wait_until_done(page)
        for index in range(page.locator(".token").count()):
            page.locator(".token").nth(index).dispatch_event("pointerover", {"bubbles": True})
        told = {
            "text": answers(page)[0],
            "problem": page.locator("#problem").text_content(),
            "elements": page.locator("#answers *, #card *, #problem *, #facts *").evaluate_all(
                "(all) => [...new Set(all.map((each) => each.localName))]"
            ),
            "owned": page.evaluate("() => window.owned"),
        }
        return told | watch.told()


def markdown(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A chat whose answer is Markdown that attacks, and long."""
    with opened(browser, url) as (page, watch):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("() => { window.owned = []; }")
        choose(page, "Chat")
        say(page, "Attack me.")
        wait_until_done(page)
        copied = []
        for button in (page.locator(".code .copy").first, page.locator("article[data-role=assistant] .tools button")):
            page.evaluate("() => { document.getElementById('announcer').textContent = ''; }")
            button.first.click()
            expect(page.locator("#announcer")).to_have_text("Copied")
            copied.append(page.evaluate("() => navigator.clipboard.readText()"))
        return {
            "text": page.locator(".rendered").text_content(),
            "elements": page.locator("#conversation *").evaluate_all(
                "(all) => [...new Set(all.map((each) => each.localName))]"
            ),
            "links": page.locator(".rendered a").evaluate_all("(all) => all.map((a) => [a.href, a.rel, a.target])"),
            "owned": page.evaluate("() => window.owned"),
            "code": page.locator(".code code").first.text_content(),
            "copied": copied,
            **watch.told(),
        }


def tools(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A chat whose answer thinks and calls tools, before and after a reload; and what was asked for."""
    with opened(browser, url) as (page, watch):
        asked: list[dict[str, Any]] = []
        page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
        choose(page, "Chat")
        page.locator("#settings > summary").click()
        page.fill("#tools", '[{"name": "read", "parameters": {}}]')
        page.fill("#schema", '{"type": "object"}')
        say(page, "Go.")
        wait_until_done(page)
        seen = [parts(page)]
        page.reload()
        wait_until_ready(page)
        return {"parts": [*seen, parts(page)], "asked": asked[0], **watch.told()}


def parts(page: Page) -> list[list[str]]:
    """What an answer thinks, says and calls."""
    return [page.locator(each).all_text_contents() for each in (".reasoning", ".rendered", ".calls li")]


def key(browser: Browser, url: str, secret: str) -> dict[str, Any]:
    """A gateway that wants a key."""
    with opened(browser, url) as (page, watch):
        expect(page.locator("#readiness")).to_have_text("needs an API key")
        generate(page, max_tokens="4")
        wait_until_done(page)
        told = {"refused": page.locator("#problem").inner_text(), "key_is_shown": page.locator("#key").is_visible()}
        page.fill("#key", secret)
        page.press("#key", "Enter")
        wait_until_ready(page)
        generate(page, max_tokens="4")
        wait_until_done(page)
        told["tokens"] = page.locator(".token").count()
        told["command"] = page.locator("#command").text_content()
        page.reload()
        wait_until_ready(page)
        told["stored"] = page.evaluate(
            "() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        )
        return told | watch.told()


def looking(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A page that is seen, then not, then seen again: what it asks for, and how long it waits in between."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.evaluate(NOTE_REQUESTS)
        wait_for_requests(page, 3)
        page.evaluate(HIDE, True)
        page.wait_for_timeout(300)
        before = len(page.evaluate("() => window.times"))
        page.wait_for_timeout(3000)
        hidden = len(page.evaluate("() => window.times")) - before
        seen = page.evaluate("() => window.times.splice(0)")
        page.evaluate(HIDE, False)
        wait_for_requests(page, 3)
        again = page.evaluate("() => window.times")
        gaps = [later - earlier for times in (seen, again) for earlier, later in itertools.pairwise(times)]
        return {"hidden": hidden, "gaps": gaps, "asked": sorted(set(asked)), **watch.told()}


def wait_for_requests(page: Page, number: int) -> None:
    """Waits until the page has asked so often since it was looked at last."""
    page.wait_for_function("(number) => window.times.length >= number", arg=number)


def early(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """A page whose gateway takes long to say which models there are: nobody touches the form, or somebody does."""
    told: dict[str, Any] = {}
    held: list[Route] = []
    hold = lambda page: page.route("**/v1/models", lambda route: held.append(route))  # noqa: E731
    for case in ("untouched", "touched"):
        with opened(browser, url, hold) as (page, watch):
            while not held:
                # The browser's events come only while it is waited for.
                page.wait_for_timeout(20)
            told[f"{case}, said"] = page.locator("#readiness").text_content()
            if case == "touched":
                page.fill("[name=temperature]", "0.1")
            held.pop().continue_()
            wait_until_ready(page)
            mode = page.locator("#playground").get_attribute("data-mode")
            told[case] = [mode, page.input_value("[name=temperature]"), page.locator("#model").text_content()]
            told |= watch.told()
    return told


def unpainted(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """Answers on a page whose frames do not come: they are there when they are done."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        page.evaluate(DRAW_NOTHING)
        told: dict[str, Any] = {}
        choose(page, "Chat")
        say(page, "Go.")
        wait_until_done(page)
        told["chat"] = said(page)
        choose(page, "Completion")
        generate(page)
        wait_until_done(page)
        told["completion"] = answers(page)
        return told | watch.told()


def access(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """For everybody: what axe finds, in light and dark, and whether narrow screens have to be scrolled sideways."""
    told: dict[str, Any] = {"violations": {}, "overflow": {}}
    for scheme in ("light", "dark"):
        with opened(browser, url, color_scheme=scheme, reduced_motion="reduce") as (page, _watch):
            wait_until_ready(page)
            generate(page, top_p="2")
            expect(page.locator("#problem")).to_be_visible()
            page.fill("[name=top_p]", "")
            generate(page, max_tokens="12")
            wait_until_done(page)
            told["violations"][scheme] = violations(page)
            choose(page, "Chat")
            page.click("#settings > summary")
            page.fill("[name=max_tokens]", "60")
            say(page, "What is a class?")
            wait_until_done(page)
            told["violations"][scheme] += violations(page)
    for width in (320, 390, 768, 1024, 1280, 1920):
        with opened(browser, url, viewport={"width": width, "height": 800}) as (page, _watch):
            wait_until_ready(page)
            say(page, "What is a class?")
            wait_until_done(page)
            overflow = "() => document.documentElement.scrollWidth - innerWidth"
            told["overflow"][f"chat {width}"] = page.evaluate(overflow)
            generate(page, max_tokens="40", n="2")
            wait_until_done(page)
            told["overflow"][width] = page.evaluate(overflow)
    return told


def fits(browser: Browser, url: str, _: str) -> dict[str, Any]:
    """Several models and replicas with long names: what each width shows, and what does not fit its card."""
    told: dict[str, Any] = {}
    for width in (1280, 390):
        with opened(browser, url, viewport={"width": width, "height": 800}) as (page, watch):
            expect(page.locator("#replicas th")).to_have_count(3)
            told[str(width)] = {
                "models": page.locator("#models > div").all_inner_texts(),
                "loads": page.get_by_role("button", name="Load").count(),
                "replicas": page.locator("#replicas").inner_text(),
                "too_wide": page.evaluate(TOO_WIDE),
                "violations": violations(page),
            }
            told |= watch.told()
    return told


def models(browser: Browser, url: str, name: str) -> dict[str, Any]:
    """Several models of which none is loaded: one is chosen, loaded and asked, and stays chosen."""
    with opened(browser, url) as (page, watch):
        wait_until_ready(page)
        expect(page.locator("#models > div")).to_have_count(3)
        told: dict[str, Any] = {"before": page.locator("#models .chip").all_inner_texts()}
        page.get_by_role("radio", name=name).check()
        expect(page.locator("#model")).to_have_text(name)
        expect(page.locator("#totals")).to_have_text("The model is not loaded.")
        page.get_by_role("button", name=f"Load {name}").click()
        expect(page.locator("#models > div", has_text=name).locator(".chip")).to_have_text(
            "loaded", timeout=5 * TIMEOUT_MILLISECONDS
        )
        expect(page.locator("#replicas th")).to_have_count(1)
        told["after"] = page.locator("#models .chip").all_inner_texts()
        # Without alternatives the answer is shown as it came, though bytes of a random model are no characters.
        generate(page, max_tokens="8", temperature="0", logprobs="")
        wait_until_done(page)
        told["answers"] = answers(page)
        page.reload()
        expect(page.get_by_role("radio", name=name)).to_be_checked()
        expect(page.locator("#model")).to_have_text(name)
        expect(page.locator("#replicas th")).to_have_count(1)
        return told | watch.told()


def screenshot(browser: Browser, url: str, target: str) -> dict[str, Any]:
    """Takes the picture of the guide: an answer, a token that is pointed at, and charts of the last minute."""
    size = {"width": 1360, "height": 890}
    with opened(browser, url, viewport=size, color_scheme="light") as (page, watch):
        wait_until_ready(page)
        for seed in range(4):
            generate(page, max_tokens="96", temperature="0.7", seed=str(seed))
            wait_until_done(page)
            page.wait_for_timeout(20_000)
        generate(page, max_tokens="96", temperature="0.7", seed="5")
        wait_until_done(page)
        page.wait_for_timeout(1500)
        unlikely = "(all) => all.findIndex((each) => Number(each.style.getPropertyValue('--surprise')) > 0.5)"
        page.locator(".token").nth(max(0, page.locator(".token").evaluate_all(unlikely))).hover()
        page.screenshot(path=target)
        return watch.told()


SCENARIOS: dict[str, Callable[[Browser, str, str], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        *(completion, chat, reload, follow, stop, refusal, outlive, hostile, markdown),
        *(tools, key, looking, early, unpainted, access, fits, models, screenshot),
    )
}


def main(scenario: str, url: str, argument: str = "") -> None:
    """Runs one of them."""
    expect.set_options(timeout=TIMEOUT_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            tell(SCENARIOS[scenario](browser, url, argument))
        finally:
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
