"""The chat page: what is served, and what a person sees and does in a browser.

The second half needs Chromium (`apt-get install chromium`) and is slow.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from serve.api import listening, made, script
from serve.browser import Browser, find

from baltoro.model.model import Model
from baltoro.serve.server import PAGE, PAGE_FILES, Server, create_app


@pytest.fixture(scope="module")
def server(nano: Model) -> Server:
    return made(nano)


def test_the_page_is_served_with_a_policy_that_keeps_it_at_home(nano: Model) -> None:
    with TestClient(create_app(made(nano))) as client:
        for path, (name, kind) in PAGE_FILES.items():
            got = client.get(path)
            assert got.status_code == 200 and got.content == (PAGE / name).read_bytes()
            assert got.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in got.headers["content-security-policy"]
        assert "/page.js" not in client.get("/openapi.json").json()["paths"]


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    files = {name: (PAGE / name).read_text() for name, _ in PAGE_FILES.values()}
    assert not [name for name, text in files.items() if re.search(r"https?://|//cdn|@import", text)]
    html = files["index.html"]
    linked = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert {link for link in linked if not link.startswith("data:")} == {"page.css", "page.js"}
    assert not re.search(r"\son\w+=|<script>|<style|style=", html), "the policy forbids inline code"
    assert "innerHTML" not in files["page.js"] and "insertAdjacent" not in files["page.js"]


def test_the_page_talks_to_routes_that_there_are(server: Server) -> None:
    text = (PAGE / "page.js").read_text()
    called = set(re.findall(r'fetch\("([^"]+)"', text))
    routes = {getattr(route, "path", "") for route in create_app(server).routes}
    assert called == {"v1/chat/completions", "v1/models"}
    assert {f"/{path}" for path in called} <= routes


def test_the_page_offers_the_efforts_that_the_server_takes() -> None:
    from_page = re.findall(r'<option value="(\w+)"', (PAGE / "index.html").read_text())
    from_server = ("none", "low", "high", "max")
    assert tuple(from_page) == from_server


def test_every_control_of_the_page_has_a_name() -> None:
    html = (PAGE / "index.html").read_text()
    for tag in re.findall(r"<(?:input|textarea|select)\b[^>]*>", html):
        (name,) = re.findall(r'id="(\w+)"', tag)
        labelled = f'for="{name}"' in html or "aria-label=" in tag
        inside = re.search(rf'<label[^>]*>[^<]*<\w+ id="{name}"', html.replace("\n", " "))
        nested = re.search(rf'<label[^>]*>\s*[^<]*\s*<\w+ id="{name}"', html)
        assert labelled or inside or nested, name


# in a browser

MESSAGE = "<|close|>message<|sep|>"
ANSWER = f"let me see<|close|>think<|sep|><|open|>response<|sep|>A <b>bold</b> 答え{MESSAGE}"
CALL = (
    "<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="read" index="1"<|sep|><|open|>argument key="path" type="string"<|sep|>'
    f"a.txt<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>{MESSAGE}"
)
TOOLS = '[{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]'
LAST = "[...document.querySelectorAll('article.assistant')].at(-1)"
IS_IDLE = "document.getElementById('stop').hidden"


@pytest.fixture(scope="module")
def address(server: Server) -> Iterator[str]:
    with listening(server) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("the chat page was not tried in a browser: apt-get install chromium")
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Browser]:
    browser.problems.clear()
    browser.resize(1000, 800)
    browser.open(address)
    browser.wait("document.title === 'nano'")
    yield browser
    assert all(url.startswith((address, "about:", "data:")) for url in browser.requested)


def say(page: Browser, text: str) -> None:
    page.get("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(f"!document.getElementById('text').value && {IS_IDLE}")


@pytest.mark.slow
def test_a_conversation_shows_thinking_folded_text_as_text_and_what_it_cost(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, ANSWER)
    say(page, "Hello")
    assert page.get(f"{LAST}.querySelector('details.thinking').open") is False
    title = page.get(f"{LAST}.querySelector('summary').textContent")
    assert re.fullmatch(r"Thought for \d+ tokens", title)
    assert page.get(f"{LAST}.querySelector('.thinking .text').textContent") == "let me see"
    assert page.get(f"{LAST}.querySelector('.body > .text').textContent") == "A <b>bold</b> 答え"
    assert page.get("document.querySelector('main b')") is None
    stats = page.get(f"{LAST}.querySelector('.stats').textContent")
    assert re.search(
        r"\d+ tokens · [\d.]+ tokens/s · first after [\d.]+ s · 0 of \d+ prompt", stats
    )
    say(page, "And again, with the whole history before it")
    stats = page.get(f"{LAST}.querySelector('.stats').textContent")
    cached, total = map(int, re.findall(r"(\d+) of (\d+) prompt tokens from the cache", stats)[0])
    assert 0 < cached < total
    assert page.get("document.activeElement.id") == "text"
    assert not page.problems


@pytest.mark.slow
def test_a_tool_call_is_shown_and_its_result_goes_back(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, CALL, ANSWER)
    page.get(f"document.getElementById('tools').value = {TOOLS!r}")
    say(page, "Read it")
    assert page.get(f"{LAST}.querySelector('.call code').textContent") == "read"
    assert '"path": "a.txt"' in page.get(f"{LAST}.querySelector('.call pre').textContent")
    assert page.get("document.activeElement.dataset.call").startswith("call-")
    page.type("the file's text")
    page.press("Tab")
    page.press("Enter")
    page.wait(f"{IS_IDLE} && document.querySelectorAll('article.assistant').length === 2")
    page.wait(f"{LAST}.querySelector('.body > .text')?.textContent.startsWith('A <b>')")
    assert not page.problems


@pytest.mark.slow
def test_a_picture_goes_along(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(server, monkeypatch, ANSWER)
    Image.effect_noise((60, 40), 80).convert("RGB").save(tmp_path / "noise.png")
    page.choose_file("#file", tmp_path / "noise.png")
    page.wait("document.querySelectorAll('#pictures img').length === 1")
    say(page, "What is this?")
    assert page.get("document.querySelectorAll('#pictures img').length") == 0
    assert page.get("document.querySelectorAll('article.user img').length") == 1
    assert page.get(f"{LAST}.querySelector('.stats').textContent").count("tokens")
    assert not page.problems


@pytest.mark.slow
def test_escape_stops_a_reply_and_frees_the_engine(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, "on and on " * 200)
    page.type("Go on")
    page.press("Enter")
    page.wait(f"{LAST}?.querySelector('.thinking .text')?.textContent.length > 5")
    page.press("Escape")
    page.wait(IS_IDLE)
    assert "stopped" in page.get(f"{LAST}.querySelector('.stats').textContent")
    deadline = time.monotonic() + 20
    while not server.background.engine.is_idle and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.background.engine.is_idle


@pytest.mark.slow
def test_an_error_is_shown_and_the_message_can_be_edited_or_sent_again(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, ANSWER)
    page.get("document.getElementById('limit').value = 99999999")
    say(page, "Too much")
    assert "exceed" in page.get("document.querySelector('[role=alert]').textContent")
    page.get("[...document.querySelectorAll('.error button')].at(-1).click()")
    assert page.get("document.getElementById('text').value") == "Too much"
    assert page.get("document.querySelectorAll('main > *').length") == 0
    page.press("Enter")
    page.wait("document.querySelector('[role=alert]')")
    page.get("document.getElementById('limit').value = ''")
    page.get("document.querySelector('.error button').click()")
    page.wait(f"{IS_IDLE} && {LAST}?.querySelector('.stats')")
    assert page.get("document.querySelectorAll('[role=alert]').length") == 0
    page.get("document.getElementById('tools').value = '[{'")
    say(page, "With tools that are no JSON")
    assert "not JSON" in page.get("document.querySelector('[role=alert]').textContent")


@pytest.mark.slow
def test_every_control_is_reached_by_the_tab_key(page: Browser) -> None:
    page.get("document.activeElement.blur()")
    reached = []
    for _ in range(9):
        page.press("Tab")
        reached.append(page.get("document.activeElement.id || document.activeElement.tagName"))
    assert {"effort", "new", "SUMMARY", "text", "file", "send"} <= set(reached)


@pytest.mark.slow
def test_the_page_fits_a_phone(
    page: Browser, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(server, monkeypatch, "<|close|>think<|sep|>" + "longword" * 30 + MESSAGE)
    page.resize(360, 640)
    say(page, "x" * 200)
    assert page.get("document.documentElement.scrollWidth") <= 360
    assert page.get("document.querySelector('main').clientHeight") > 200
    bottom = page.get("document.getElementById('send').getBoundingClientRect().bottom")
    assert bottom <= 640
    size = page.get("parseFloat(getComputedStyle(document.getElementById('text')).fontSize)")
    assert size >= 16  # smaller, and a phone zooms in on focus
