"""The dashboard in a real headless Chromium: it draws, moves, chats, turns dark, and runs nothing that it is sent.

Screenshots go to the folder that MINILLM_SCREENSHOTS names, if it is set (docs/images has those of the docs).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import WAIT
from pressure_scene import ANSWER, dashboard_server, press
from server_fakes import RunningServer

from minillm.core.sampling_params import SamplingParams

playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs: pip install playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; install it, e.g. apt-get install chromium")

PATIENCE = 120_000
"""Milliseconds: a browser that draws in software on a busy machine takes its time."""
EVIL_ID = "<img src=x onerror=document.title='owned'>"
EVIL_TEXT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


SCENE = """(() => {
  const row = page.frame.queue.find((r) => r.state === 'swapped');
  if (!row || page.frame.stats.swapped < 2 || page.frame.running.length < 4) return false;
  if (page.selected !== row.id) select(row.id);
  return page.story?.id === row.id && page.story.state === 'swapped' && !page.drawing;
})()"""
"""Some run, several are swapped out, and the story of the first of those is shown."""


class Tab:
    """A page on the dashboard, and everything that it complained about."""

    def __init__(self, page: Any, server: RunningServer) -> None:
        self.page = page
        self.server = server
        self.complaints: list[str] = []
        self.outside: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith(server.url) or self.outside.append(r.url))

    def open(self) -> None:
        """Load it, and wait for the first frame."""
        self.page.goto(f"{self.server.url}/dashboard")
        self.wait("page.frame !== null && !page.drawing")

    def wait(self, condition: str) -> None:
        """Wait for a condition in the page (playwright's own way needs eval there, which the page's policy forbids)."""
        end = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not come true"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return self.page.evaluate("(s) => document.querySelector(s).textContent", selector)

    def say(self, text: str) -> None:
        """Type into the chat box, and send."""
        self.page.fill("#chat-text", text)
        self.page.press("#chat-text", "Enter")

    def wait_for_scene(self) -> None:
        """Let the device stand still in a step after which SCENE holds."""
        goes_on = self.server.runner.goes_on  # type: ignore[attr-defined]
        for _ in range(100):
            goes_on.set()
            self.wait(SCENE)
            goes_on.clear()
            time.sleep(1.0)  # the frames of the step that stands still
            if self.page.evaluate(SCENE):
                return
        raise AssertionError("the scene never lasted")

    def shoot(self, name: str) -> None:
        """A screenshot, where they are wanted."""
        if folder := os.environ.get("MINILLM_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"dashboard-{name}.png", timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with dashboard_server() as server:
        context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
        yield Tab(context.new_page(), server)
        context.close()


@pytest.fixture
def pressure(tab: Tab) -> Iterator[None]:
    """More requests than the pool holds, for as long as the test takes."""
    end = threading.Event()
    live: list[Any] = []

    def keep_up() -> None:
        seed = 0
        while not end.is_set():
            live[:] = [future for future in live if not future.done()]
            if len(live) < 22:
                # A batch of low priority, then higher ones that push parts of it out.
                live.extend(press(tab.server.runtime, 4, seed, (2,) if seed < 3 else (0, 1, 2, 2)))
                seed += 1
            end.wait(0.05)

    thread = threading.Thread(target=keep_up)
    thread.start()
    yield
    end.set()
    thread.join(WAIT)
    for future in live:
        future.cancel()


def test_idle(tab: Tab) -> None:
    tab.open()
    assert tab.text("#status") == "live · step 0"
    assert tab.text("#t-running") == "0" and tab.text("#b-free") == "120"
    assert "toy" in tab.text("#facts") and "nothing is waiting" in tab.text("#queue")
    size = tab.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert size[0] <= 1440 and size[1] <= 900, "it fits a laptop's screen"
    tab.shoot("idle")
    assert tab.complaints == [] and tab.outside == []


def test_under_pressure_numbers_move_and_swaps_are_seen(tab: Tab, pressure: None) -> None:
    tab.open()
    tab.say("What happens here?")
    tab.wait(f"document.querySelector('.msg.assistant')?.textContent === {ANSWER!r}")
    tab.wait("document.querySelector('.meta')?.textContent.includes('tokens')")
    tab.wait("page.frame.stats.swapped > 0 && page.frame.stats.blocks.shared > 0 && page.frame.running.length > 5")
    before = tab.page.evaluate("page.frame.stats.generated_tokens")
    tab.wait(f"page.frame.stats.generated_tokens > {before}")
    tab.wait("Number(document.querySelector('#t-preempt').textContent) > 0")
    tab.wait("document.querySelectorAll('#queue .state[data-state=swapped]').length > 0")
    tab.wait("/more KV blocks|sequence slots/.test(document.querySelector('#queue').textContent)")
    # The pixels of the map: free blocks' colour is not all that there is.
    # Waited for: each frame shows another mix of requests.
    tab.wait(
        """(() => { const c = document.querySelector('#blocks'), n = new Set();
        // Read from a copy: of a canvas that is read again and again the browser complains.
        const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', { willReadFrequently: true });
        copy.drawImage(c, 0, 0);
        const d = copy.getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < d.length; i += 4) if (d[i + 3]) n.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return n.size > 6; })()"""
    )
    tab.page.evaluate("document.querySelector('#queue .id').click()")
    tab.wait("document.querySelectorAll('#story li').length > 1")
    tab.wait_for_scene()
    tab.shoot("pressure")
    tab.page.evaluate("document.querySelector('#theme').click()")
    tab.wait(SCENE)
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    tab.shoot("dark")
    tab.server.runner.goes_on.set()  # type: ignore[attr-defined]
    assert tab.complaints == [] and tab.outside == []


def test_the_systems_dark_mode_is_followed(tab: Tab) -> None:
    tab.page.emulate_media(color_scheme="dark")
    tab.open()
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.page.emulate_media(color_scheme="light")
    tab.wait("document.documentElement.dataset.theme === 'light'")
    assert tab.text("#theme") == "Dark"


def test_what_clients_send_is_text(tab: Tab) -> None:
    """Ids, users, model output and errors are never markup."""
    tab.open()
    runtime = tab.server.runtime
    params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    running = runtime.submit("abc", params, request_id=EVIL_ID, user=EVIL_TEXT)
    tab.wait(f"page.frame.running.some((r) => r.id === {EVIL_ID!r})")
    tab.page.evaluate("document.querySelector('#batch .id').click()")
    tab.wait(f"document.querySelector('#story-id').textContent === {EVIL_ID!r}")
    tab.wait("document.querySelectorAll('#story li').length > 1")
    tab.page.evaluate("(text) => { say('assistant', text); say('error', text); }", EVIL_TEXT)
    tab.say(EVIL_TEXT)
    tab.wait(f"document.querySelectorAll('.msg.assistant')[1]?.textContent === {ANSWER!r}")
    assert tab.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert tab.page.title() == "MiniLLM Runtime"
    assert EVIL_TEXT in tab.text("#chat-log")
    running.cancel()
    assert tab.complaints == [] and tab.outside == []


def test_a_conversation_that_is_cleared_in_mid_answer_is_empty(tab: Tab) -> None:
    tab.open()
    runner: Any = tab.server.runner  # type: ignore[attr-defined]
    runner.seconds = 0.1
    tab.say("first")
    tab.wait("document.querySelector('.msg.assistant')?.textContent")
    runner.goes_on.clear()
    ended = tab.page.evaluate(
        "async () => { const begun = Boolean(speaking && document.querySelector('.msg.assistant').textContent);"
        " $('chat-clear').click(); while (speaking) await new Promise((r) => setTimeout(r, 10));"
        " return [begun, conversation.length, $('chat-log').children.length]; }"
    )
    runner.goes_on.set()
    assert ended == [True, 0, 0]


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Any) -> None:
    with dashboard_server({"api_keys": ("right",)}) as server:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        tab = Tab(context.new_page(), server)
        tab.page.goto(f"{server.url}/dashboard")
        tab.wait("document.querySelector('#key-dialog').open")
        tab.page.fill("#key-value", "right")
        tab.page.press("#key-value", "Enter")
        tab.wait("page.frame !== null")
        assert tab.text("#status").startswith("live")
        assert tab.page.evaluate("[localStorage.length, sessionStorage.getItem('minillm-key')]") == [0, "right"]
        tab.say("hello")
        tab.wait(f"document.querySelector('.msg.assistant')?.textContent === {ANSWER!r}")
        context.close()


def test_a_lost_connection_is_shown_and_comes_back(tab: Tab) -> None:
    tab.page.route("**/dashboard/events", lambda route: route.abort())
    tab.page.goto(f"{tab.server.url}/dashboard")
    tab.wait("document.querySelector('#status').textContent.startsWith('not connected')")
    tab.page.unroute("**/dashboard/events")
    tab.wait("document.querySelector('#status').textContent.startsWith('live')")
