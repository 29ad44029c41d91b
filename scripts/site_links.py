"""MkDocs hook: point links that leave docs/ to the source, or make them text if its address is unknown."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")


def rewrite(markdown: str, page: str, source_url: str) -> str:
    """`page`: path of the page under docs/, which decides what `../` means."""

    def target(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
        if path.startswith("docs/"):
            return match[0]
        return f"[{text}]({source_url.rstrip('/')}/{path}{anchor})" if source_url else text

    return LINK.sub(target, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    return rewrite(markdown, page.file.src_uri, config["extra"]["source_url"] or "")
