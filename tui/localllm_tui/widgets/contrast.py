"""Colours that can be read: a theme's own, moved away from its background as far as that takes."""

from __future__ import annotations

from collections.abc import Mapping

from textual.color import Color

# WCAG 2.2, 1.4.3: the least contrast of text.
READABLE = 4.5


def contrast(one: Color, other: Color) -> float:
    """The contrast of two colours, 1 to 21 (WCAG 2.2, from their relative luminance)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: Color) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.2)."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour.normalized]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def readable(colour: Color, grounds: tuple[Color, ...], least: float = READABLE) -> Color:
    """`colour`, or as little lighter or darker as it can be read on each of these."""
    if colour.ansi is not None or any(ground.ansi is not None for ground in grounds):
        return colour  # the terminal's own: it has chosen them
    towards = max((Color(0, 0, 0), Color(255, 255, 255)), key=lambda end: min(contrast(end, g) for g in grounds))
    for step in range(41):
        moved = colour.blend(towards, step / 40)
        if all(contrast(moved, ground) >= least for ground in grounds):
            return moved
    return towards


def readable_tokens(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a theme's variables those that text here is written in: `hint` for what explains, `accent-text` for what leads the
    eye, and the texts of code and marks; each readable on the background, panels and shades of the theme."""
    grounds = tuple(Color.parse(variables[name]) for name in ("background", "surface"))
    foreground = Color.parse(variables["foreground"])
    found = {
        "hint": readable(foreground.blend(grounds[0], 0.35) if foreground.ansi is None else foreground, grounds),
        "accent-text": readable(Color.parse(variables["accent"]), grounds),
    }
    return {name: colour.css if colour.ansi is not None else colour.hex for name, colour in found.items()}
