"""The colours of code and Markdown in an answer, from the theme."""

from __future__ import annotations

from collections.abc import Mapping

from rich.color import Color as RichColor
from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.theme import Theme
from textual.color import Color, ColorParseError

from localllm_tui.widgets.contrast import readable

# Each style consists of one of the theme's colours ("-": no colour) and text attributes.
_MARKS = {
    "heading.h1": "accent-text bold underline",
    "heading.h2": "accent-text bold",
    "heading.h3": "- bold",
    "heading.h4": "- bold underline",
    "heading.h5": "- bold",
    "heading.h6": "hint bold",
    "bullet": "accent-text",
    "quote": "hint",
    "rule": "hint",
    "link": "- underline",
    "table.head": "accent-text bold",
    "found": "- bold underline",
    "found.now": "- bold reverse",
    "code.inline": "text-warning",
    "code.label": "hint",
}
_TOKENS = {
    "code.Comment": "hint",
    "code.Error": "text-error",
    "code.Keyword": "text-accent",
    "code.Keyword.Constant": "text-success bold",
    "code.Keyword.Namespace": "text-error",
    "code.Keyword.Type": "- bold",
    "code.Literal.Number": "text-warning",
    "code.Literal.String": "text-success",
    "code.Name": "text-primary",
    "code.Name.Attribute": "text-warning",
    "code.Name.Builtin": "text-accent",
    "code.Name.Class": "text-warning bold",
    "code.Name.Constant": "text-error",
    "code.Name.Decorator": "text-primary bold",
    "code.Name.Function": "text-warning underline",
    "code.Name.Tag": "text-primary bold",
    "code.Name.Variable": "text-secondary",
    "code.Operator": "- bold",
    "code.Operator.Word": "text-error bold",
    "code.Generic.Heading": "text-primary underline",
    "code.Generic.Subheading": "text-primary",
    "code.Generic.Inserted": "text-success",
    "code.Generic.Deleted": "text-error",
}
STYLES = _MARKS | _TOKENS
_ANSI_BLUE = 4
# Added and removed lines of a diff have a tinted background.
_CHANGED = {"code.Generic.Inserted": "success", "code.Generic.Deleted": "error"}
_TINT = 0.16
# The share of the theme's foreground or warning in the background of code.
_BACKGROUND_SHARE = 0.06
_INLINE_BACKGROUND_SHARE = 0.1


def palette(variables: Mapping[str, str]) -> Console:
    """A console whose theme maps the names of `STYLES` to a theme's variables."""
    backgrounds = _backgrounds(variables)
    grounds = tuple(backgrounds.values())
    styles = {name: _style(variables, look, grounds) for name, look in STYLES.items()}
    styles["code.block"] = Style()
    for name in styles.keys() & backgrounds.keys():
        styles[name] += Style(bgcolor=_rich(backgrounds[name]))
    styles["code.label"] += styles["code.block"]
    return Console(theme=Theme(styles), width=80)


def _backgrounds(variables: Mapping[str, str]) -> dict[str, Color]:
    """Return the background colours of text, by style ("": the screen's background).

    The result is empty if the terminal's own colours are used, because they have no shades.
    """
    backgrounds = _colour(variables, "background")
    front = _colour(variables, "foreground")
    warning = _colour(variables, "warning")
    if backgrounds is None or backgrounds.ansi is not None or front is None or warning is None:
        return {}
    grounds = {
        "": backgrounds,
        "code.block": backgrounds.blend(front, _BACKGROUND_SHARE),
        "code.inline": backgrounds.blend(warning, _INLINE_BACKGROUND_SHARE),
    }
    for name, token in _CHANGED.items():
        colour = _colour(variables, token)
        if colour is not None:
            grounds[name] = backgrounds.blend(colour, _TINT)
    return grounds


def _style(variables: Mapping[str, str], look: str, grounds: tuple[Color, ...]) -> Style:
    token, _, marks = look.partition(" ")
    colour = _colour(variables, token)
    if colour is not None and grounds:
        colour = readable(colour, grounds)
    if colour is not None and colour.ansi == _ANSI_BLUE:
        colour = None  # this blue is unreadable on black
    return Style.parse(marks or "none") + Style(color=_rich(colour))


def _colour(variables: Mapping[str, str], name: str) -> Color | None:
    try:
        return Color.parse(variables[name])
    except (KeyError, ColorParseError):
        return None


def _rich(colour: Color | None) -> RichColor | None:
    return colour.rich_color if colour is not None else None


def highlighted(code: str, language: str) -> Text:
    """Code with its styles; without styles if the language is unknown."""
    from pygments.lexers import get_lexer_by_name  # most answers have no code
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False, ensurenl=False)
    except ClassNotFound:
        return Text(code, "code.block")
    text = Text(style="code.block")
    # some lexers need the final line break
    for kind, piece in lexer.get_tokens(f"{code}\n"):
        while kind is not None and f"code.{str(kind)[6:]}" not in STYLES:
            kind = kind.parent
        text.append(piece, f"code.{str(kind)[6:]}" if kind is not None else "")
    text.right_crop(1)
    return text
