"""The chat page: its modules in node, and what no browser is needed to see."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from chatsvc.api.app import STATIC, page_routes

SCRIPTS = {p.name: p.read_text() for p in sorted(STATIC.glob("*.js"))}
HTML = (STATIC / "index.html").read_text()


def test_the_modules_in_node() -> None:
    """UI-01, UI-04, UI-05."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("NO NODE: the page's stream parser, rejoining and Markdown are NOT TESTED")
    script = Path(__file__).with_name("page_test.mjs")
    done = subprocess.run([node, str(script), str(STATIC)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "page: OK"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style") and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def page() -> Tags:
    tags = Tags()
    tags.feed(HTML)
    return tags


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(page: Tags) -> None:
    assert page.inline == []
    for tag, attributes in page.tags:
        assert tag != "style"
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style", (tag, name)
            if name in ("src", "href"):
                assert value is not None and value.startswith(("/static/", "#")), value
                if value.startswith("/static/"):
                    assert (STATIC / value.removeprefix("/static/")).is_file(), value


def test_every_id_is_there_once_and_controls_have_names(page: Tags) -> None:
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for name, text in SCRIPTS.items():
        for wanted in re.findall(r'\$\("([\w-]+)"\)', text):
            assert wanted in ids, (name, wanted)
    for _, attributes in page.tags:
        if (icon := attributes.get("href") or "").startswith("#i-"):
            assert icon[1:] in ids
    used = set(re.findall(r'(?:icon\(|button\([^,]+, )"([a-z]+)"', "".join(SCRIPTS.values())))
    assert {f"i-{name}" for name in used} <= set(ids) and used
    labelled = {a["for"] for tag, a in page.tags if tag == "label"}
    for tag, attributes in page.tags:
        if tag in ("input", "textarea", "select"):
            assert attributes["id"] in labelled, attributes


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"]
)
def test_text_can_only_become_text(word: str) -> None:
    """UI-01: the ways from a string to markup or code are not used at all."""
    assert [name for name, text in SCRIPTS.items() if word in text] == []


def test_attributes_are_set_by_fixed_names() -> None:
    for name, text in SCRIPTS.items():
        for attribute in re.findall(r"setAttribute\(([^,]+),", text):
            assert re.fullmatch(r'"(aria-[a-z]+|href|role|contenteditable)"', attribute), (name, attribute)


async def test_the_page_is_served_with_a_strict_policy() -> None:
    transport = httpx.ASGITransport(app=Starlette(routes=page_routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as http:
        for path in ("/", "/static/app.js", "/static/style.css"):
            response = await http.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        assert (await http.get("/static/..%2fapp.py")).status_code == 404
        types = {p: (await http.get(f"/static/{p}")).headers["content-type"] for p in ("app.js", "icon.svg")}
        assert "javascript" in types["app.js"] and types["icon.svg"] == "image/svg+xml"
