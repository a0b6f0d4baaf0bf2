"""Colours that can be read: a theme's own, moved away from its background as far as that takes."""

from __future__ import annotations

from collections.abc import Mapping

from textual.color import Color

# Share of the foreground colour in the background of the selected turn.
SELECTED = 0.08
_TROUGHS = ("background", "background-hover", "background-active", "corner-color")
# Minimum contrast of text (WCAG 2.2, 1.4.3).
READABLE = 4.5


def contrast(first: Color, second: Color) -> float:
    """The contrast of two colours, 1 to 21 (WCAG 2.2, from their relative luminance)."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Color) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2)."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def readable(colour: Color, grounds: tuple[Color, ...]) -> Color:
    """`colour`, made lighter or darker only as far as it must be to be readable on each of
    these."""
    if colour.ansi is not None or any(ground.ansi is not None for ground in grounds):
        return colour  # the terminal's own colours, chosen by its user
    towards = Color(0, 0, 0)
    white = Color(255, 255, 255)
    if _least_contrast(white, grounds) > _least_contrast(towards, grounds):
        towards = white
    for step in range(41):
        moved = colour.blend(towards, step / 40)
        if all(contrast(moved, ground) >= READABLE for ground in grounds):
            return moved
    return towards


def _least_contrast(colour: Color, grounds: tuple[Color, ...]) -> float:
    return min(contrast(colour, ground) for ground in grounds)


def readable_tokens(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the theme variables that the apps add or change.

    `hint` (explanations) and `accent-text` (emphasis) are readable on the theme's background and
    panels. Scrollbars, cursors and frames use the theme's greys and accent.
    """
    grounds = tuple(Color.parse(variables[name]) for name in ("background", "surface"))
    foreground = Color.parse(variables["foreground"])
    accent = Color.parse(variables["accent"])
    # the terminal's own colours, which have no shades
    if foreground.ansi is not None or accent.ansi is not None:
        return {"hint": foreground.css, "accent-text": accent.css, "scrollbar": "ansi_bright_black"}
    grounds += (grounds[0].blend(foreground, SELECTED),)
    thumb_used = grounds[0].blend(foreground, 0.45).hex
    cursor = grounds[1].blend(accent, 0.3)
    on_cursor = readable(foreground, (cursor,)).hex
    found = {
        "hint": readable(foreground.blend(grounds[0], 0.35), grounds).hex,
        "accent-text": readable(accent, grounds).hex,
        "scrollbar": grounds[0].blend(foreground, 0.25).hex,
        "scrollbar-hover": thumb_used,
        "scrollbar-active": thumb_used,
        # A single accent, which list cursors also have, with and without the focus.
        "block-cursor-background": cursor.hex,
        "block-cursor-blurred-background": cursor.hex,
        "block-cursor-foreground": on_cursor,
        "block-cursor-blurred-foreground": on_cursor,
        "border": variables["accent"],
    }
    return found | {f"scrollbar-{part}": grounds[0].hex for part in _TROUGHS}
