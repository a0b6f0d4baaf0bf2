"""A conversation as one HTML page, without scripts and without references to other files."""

from __future__ import annotations

from html import escape

from markdown_it import MarkdownIt

from localllm.conversation.history import StoredMessage
from localllm_tui.control.session import Session

_PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 48rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.55 system-ui, sans-serif; }}
section {{ border-left: 3px solid #8888; padding-left: 1rem; margin: 1.5rem 0; }}
section.user {{ border-color: #48f; }}
h2 {{ font-size: 1rem; }}
pre, code {{ background: #8882; border-radius: 4px; }}
pre {{ padding: .6rem; overflow-x: auto; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #8888; padding: .2rem .5rem; }}
img {{ max-width: 100%; }} summary {{ cursor: pointer; opacity: .8; }}
</style></head><body>
<h1>{title}</h1>
{turns}
</body></html>
"""


def to_html(session: Session) -> str:
    """The branch that is shown, with the other versions of each turn folded."""
    markdown = MarkdownIt("gfm-like", {"html": False})
    turns = []
    if session.system:
        turns.append(_section("system", "System", markdown.render(session.system)))
    for turn in session.turns:
        who = "You"
        if turn.role == "assistant":
            who = str(turn.meta.get("model") or session.model)
        inside = _body(markdown, turn)
        versions = session.versions(turn)
        for n, other in enumerate(versions, 1):
            if other.id != turn.id:
                inside += _folded(f"version {n} of {len(versions)}", _body(markdown, other))
        turns.append(_section(turn.role, who, inside))
    return _PAGE.format(title=escape(session.title or "Conversation"), turns="\n".join(turns))


def _body(markdown: MarkdownIt, turn: StoredMessage) -> str:
    text = str(markdown.render(turn.content))
    thought = (turn.reasoning or "").strip()
    if thought:
        return _folded("thinking", str(markdown.render(thought))) + text
    return text


def _section(kind: str, who: str, inside: str) -> str:
    return f'<section class="{kind}"><h2>{escape(who)}</h2>{inside}</section>'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{title}</summary>{inside}</details>"
