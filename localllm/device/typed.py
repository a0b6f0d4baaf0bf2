"""What people type for a machine, taken apart: words, how many of it, sizes of memory, GPU cores,
the computer around it.

The words are brand, series, number and suffix ("rtx 4070 ti super"). Letters that are glued to a
number come apart, and what drivers, shops and PCI lists call a laptop's part is one word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device.ram import NO_RAM, StatedRam
from localllm.errors import UsageError


@dataclass(frozen=True, slots=True)
class Typed:
    """One part of a typed name: its words, how many of it, the sizes of memory it says (GB) and
    which of them is called the card's own, GPU cores, the system memory that is said with it, its
    `text`, sizes left out, and the `rest` of the words, that name nothing."""

    words: tuple[str, ...]
    sizes_gb: tuple[float, ...] = ()
    own_gb: float | None = None
    cores: int | None = None
    count: int = 1
    ram: StatedRam | None = None
    text: str = ""
    rest: tuple[str, ...] = ()

    @property
    def memory_gb(self) -> float | None:
        """The size that is the part's own as far as the words tell."""
        if self.own_gb is not None:
            return self.own_gb
        if self.sizes_gb:
            return self.sizes_gb[0]
        return None


def split(name: str) -> list[str]:
    """The parts that a name joins: with a plus or a comma, or with "and" where another machine or a
    size of memory follows."""
    text = re.sub(r"(?<=gb )\([1-8]\s?[x×]\s?[0-9]{1,3}(?:\s?gb)?\)", " ", name, flags=re.I)
    text = _STICKS.sub(lambda found: f"{int(found[1]) * int(found[2])}gb", text)
    text = re.sub(r"\bmax\s?\+(?=\s*(?:pro\s*)?[34][0-9]{2})|\bmax\+", "max ", text, flags=re.I)
    text = re.sub(r"\bpro\+(?=\s)", "pro ", text, flags=re.I)
    text = re.sub(r"(?<=[0-9])\+(?=\s|$)(?!\s*\S)", " ", text)
    parts: list[str] = []
    for part in filter(None, map(str.strip, _JOINED.split(text))):
        # "Mac Studio with M2 Ultra": what has no number is no part of its own.
        if parts and not re.search(r"[0-9]|\btitan|\bvii\b", parts[-1], re.I):
            if re.match(_MANY, part, re.I):
                part = f"{part} {parts.pop()}"
            else:
                part = f"{parts.pop()} {part}"
        parts.append(part)
    return parts


# How many of something, and the brands that may stand between that and its number.
_MANY = r"(?:(?:[1-9]|1[0-6])\s?[x×*]|(?:dual|two|triple|three|quad|four)\b)\s?"
_BRANDS = (
    r"(?:(?:nvidia|amd|intel|tesla|quadro|geforce|radeon|instinct|rtx|gtx|rx|arc|pro|ai|xeon|epyc|"
    r"gold|silver|platinum)\s?)*"
)
# Commas inside parentheses join nothing, nor do those of a table's own names ("7840U,8840U").
_JOINED = re.compile(
    r"\s*\+\s*|\s*,\s+(?![^(]*\))"
    r"|(?:(?<=[0-9]{4})|(?<=[0-9] ti)|(?<=[0-9]ti)|(?<=super)|(?<=xt)|(?<=xtx))\s*/\s*(?=[0-9]{4})"
    rf"|\s+(?={_MANY}(?:{_BRANDS}[a-z]{{0,2}}[0-9]{{1,4}}|titan)(?![0-9]|\s?(?:gb|ch)))"
    r"|(?<!\bx)\s(?:and|with|&|plus)\s+(?:an?\s+|another\s+)?(?!max-?q)"
    rf"(?={_BRANDS}\S*[0-9])",
    re.I,
)
# Modules of memory: "2x48gb"; behind a size in parentheses they say it again.
_STICKS = re.compile(r"\b([1-9]|1[0-6])\s?[x×*]\s?([0-9]{1,3})\s?gb\b", re.I)


# "24g" and "24gb"; a number of four digits with a "G" is a part's (Ryzen 7 5750G).
_SIZE = r"(?P<number>[0-9]{1,3}(?:\.[0-9]+)?|[0-9]{4,5}(?=\s*(?:gb|gib|tb|mib)))\s*(?P<unit>gb|gib|g|tb|mib)\b"
_KIND = r"(?P<kind>lpddr[3-5]x?|ddr[2-5])"
# A card's number may stand behind a kind of memory.
_RATE = r"(?:[\s-]*(?P<rate>(?![2-5]0[5-9]0\b)[0-9]{4,5})(?:\s*(?:mhz|mt/s))?(?!\s*(?:g|xt|gre)))"
_RAM = [
    re.compile(rf"{_SIZE}\s*(?:of\s+)?{_KIND}{_RATE}?(?:\s+ram)?"),
    re.compile(rf"{_KIND}{_RATE}?\s+{_SIZE}(?:\s+ram)?"),
    re.compile(rf"{_SIZE}\s*(?:of\s+)?(?:system\s+)?(?:ram|memory)\b"),
    re.compile(rf"{_KIND}{_RATE}?(?:\s+ram)?"),
]
_CHANNELS = re.compile(r"\b([0-9]{1,2}|single|dual|quad|octa)[\s-]*(?:ch|channels?)\b")
_CHANNEL_WORDS = {"single": 1, "dual": 2, "quad": 4, "octa": 8}
_COUNTS = {
    "dual": 2,
    "two": 2,
    "double": 2,
    "pair of": 2,
    "triple": 3,
    "three": 3,
    "quad": 4,
    "four": 4,
}
_BEFORE = re.compile(
    rf"(?:([1-9]|1[0-6])\s*(?:[x×*]\s*(?=[a-z])|[x×*]\s*(?=[0-9]{{4}})|×\s*|x\s+|\s[x*]\s+)|({'|'.join(_COUNTS)})[\s-]+)"
    r"(?=[a-z0-9])(?!channel)"
)
_BEHIND = re.compile(
    r"(?:\s[x×*]\s*|(?<=[0-9a-z])[×*]\s*|(?<=[0-9]{2})x|(?<=[a-z]\s)x)([1-9]|1[0-6])"
    r"(?=\s*$|\s+(?:[0-9]+\s?[gt]b|l?p?ddr))"
)


# Lines of laptops, and what stands between such a name and a part's.
_LAPTOP_LINES = (
    "legion(?! go)", "thinkpad", "ideapad", "yoga", "zenbook", "vivobook", "zephyrus", "scar", "tuf gaming",
    "omen", "victus", "elitebook", "probook", "zbook(?! ultra)", "spectre", "envy", "pavilion", "xps",
    "inspiron", "latitude", "alienware", "blade", "swift", "predator", "helios", "katana", "stealth",
    "framework(?= 1[236])", "surface", "gram", "matebook", "galaxy book", "omnibook", "aero",
)  # fmt: skip
_LAPTOP_MODEL = (
    r"(?:[\s-]+(?:pro|slim|air|studio|carbon|extreme|plus|flip|gen|laptop|book|"
    r"(?!(?:i[3579]|[mz][1-9])\b)[a-z]{0,2}[0-9]{1,2}[a-z]?)\b(?!\s*(?:gb|tb)))*"
)
# How one thing is written in several ways, in the order in which they are made one.
_SAID_OTHERWISE = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\((?:tm|r|c)\)|™|®|\bup to\b|\b(?:nvlink(?:ed)?|sli)\b", " "),
        (r"\b(?:unified memory|vram)\b", " vram "),
        (r"\b(rtx|gtx|rx)(?=[0-9]{1,3}\s*gb)", r"\1 "),
        (r"\b[0-9.]+\s*[gt]b\s*(?:of\s+)?(?:ssd|nvme|storage|disk|hdd|emmc)\b", " "),
        (r"\bgaming x\b", "gaming"),
        (r"(?:\b(?:early|mid|late)\s+)?(?<![\w-])20[12][0-9]\b(?!\s?[gmt]b)", " "),
        (r"^((?:nvidia |geforce )*[rg]tx\s?(?:16[56]0|20[678]0|40[78]0))s\b", r"\1 super"),
        (r"\b(40[78]0\s?ti)\s?s\b", r"\1 super"),
        (r"\b(?:xeon )?w-(?=2[12][0-9]{2}\b)", "xeon "),
        # what it draws and costs
        (r"@?\s*\b[0-9.]+\s*(?:k?w|watts?|tops)\b|[$€]\s?[0-9.,]+k?\b", " "),
        (r"(?<=[a-z])(?=[0-9]{2,3}gb\b)", " "),
        (r"\b(hx|ultra)(?=[0-9]{3}[a-z]{0,2}\b)", r"\1 "),
        # lines of desktops and servers with bare numbers, which cards have too
        (
            r"\b(precision|optiplex|elitedesk|prodesk|thinkcentre|supermicro|esprimo|celsius|vostro)"
            r"[\s-]+(?=[0-9]{3,4}[a-z]{0,2}\b(?!\s?(?:gb|tb)))",
            r"\1",
        ),
        # memory and disk: "16/256", "16gb/1tb"
        (
            r"\b([0-9]{1,3})(?:\s*gb)?\s*/\s*(?:(?:128|256|512|1024|2048)(?:\s*gb)?|[1-8]\s*tb)\b",
            r"\1gb",
        ),
        (
            rf"\b(?:lenovo |asus |dell |hp |acer |msi |razer )?(?:{'|'.join(_LAPTOP_LINES)})\b"
            rf"{_LAPTOP_MODEL}",
            " laptop ",
        ),
    )
]


def read(part: str) -> Typed:
    """One part taken apart."""
    text = _rewritten(part.lower().strip(), _SAID_OTHERWISE)
    whole = re.sub(rf"(?<![\w.]){_SIZE}", " ", text)
    count, text = _counted(text)
    ram, text = _ram(text)
    own = None
    # "A100-SXM4-40GB" is what a driver calls it.
    found = re.search(rf"{_SIZE}\s*vram", text) or re.search(rf"(?<=[a-z0-9]-){_SIZE}", text)
    if found:
        own = _gigabytes(found[1], found[2])
        text = _without(found)
    sizes = tuple(
        _gigabytes(number, unit) for number, unit in re.findall(rf"(?<![\w.]){_SIZE}", text)
    )
    text = re.sub(rf"(?<![\w.]){_SIZE}", " ", text)
    cores, memory, text = _cores(text)
    if memory is not None and not sizes:
        sizes = (memory,)
    for size in (*sizes, own, ram.size_gb if ram else None):
        if size is not None and not 0 < size < 1e6:
            raise UsageError(f"{part!r} asks for {size:g} GB of memory")
    return Typed(words(text, several=count > 1), sizes, own, cores, count, ram, whole)


def _rewritten(text: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return text


def _gigabytes(number: str, unit: str) -> float:
    """GB as sold. Of MiB, as drivers print them, a part is not shown: 32607 are 32, 23034 are
    24."""
    if unit == "mib":
        shown = float(number) / 1024
        if shown.is_integer():
            return shown
        return math.ceil(shown / 2) * 2
    if unit.startswith("t"):
        return float(number) * 1024
    return float(number)


def _without(found: re.Match[str]) -> str:
    """The text that was searched, a blank in place of what was found."""
    return f"{found.string[: found.start()]} {found.string[found.end() :]}"


def _counted(text: str) -> tuple[int, str]:
    """How many of what: "2x rtx 3090", "2x3090", "dual 3090s", "rtx 3090 x2", "3090x2"."""
    before = _BEFORE.match(text)
    if before:
        digits, word = before.groups()
        count = int(digits) if digits else _COUNTS[word]
        return count, text[before.end() :]
    text = re.sub(r"\(\s*([1-9]|1[0-6])\s*[x×*]\s*\)\s*$", r" x\1", text)
    alone = re.match(r"([2-9]|1[0-6])\s+(?=(?:[rg]tx\s?)?[0-9]{4}\b)", text)
    found = alone or _BEHIND.search(text)
    if found is None:
        return 1, text
    return int(found[1]), _without(found).strip()


def _ram(text: str) -> tuple[StatedRam | None, str]:
    channels = 0
    found = _CHANNELS.search(text)
    if found:
        channels = _CHANNEL_WORDS.get(found[1]) or int(found[1])
        text = _without(found)
    for pattern in _RAM:
        found = pattern.search(text)
        if found is None:
            continue
        said = found.groupdict()
        size = None
        if said.get("number"):
            size = _gigabytes(said["number"], said["unit"])
        rate = int(said.get("rate") or 0)
        return StatedRam(size, said.get("kind") or "", rate, channels), _without(found)
    if channels:
        return replace(NO_RAM, channels=channels), text
    return None, text


def _cores(text: str) -> tuple[int | None, float | None, str]:
    """(GPU cores, GB, the rest): "30-core GPU", "16c/40c" and Apple's "12/19/32" (CPU, GPU, GB)."""
    found = re.search(r"\(?\b([0-9]{1,2})/([0-9]{1,2})(?:/([0-9]{1,3}))?\b\)?", text)
    if found:
        memory = float(found[3]) if found[3] else None
        return int(found[2]), memory, _without(found)
    pattern = r"\b([0-9]{1,3})[\s-]*(?:cores?|c)\b[\s-]*(gpu|cpu)?"
    counts = re.findall(pattern, text)
    rest = re.sub(pattern, " ", text)
    of_gpu = [int(n) for n, of in counts if of == "gpu"]
    unnamed = [int(n) for n, of in counts if not of]
    cores = of_gpu or unnamed
    return cores[-1] if cores else None, None, rest


# What stands around a Mac's chip: its body, the inches of one that has a screen, and the year.
_INCHES = r"(?:\.[0-9])?(?:[\s-]*(?:inch|in|\"))?(?=\s|$)"
_MAC = (
    rf"\b(?:mac\s?book\s?air|mba)\b(?:[\s,]*1[135]{_INCHES})?"
    rf"|\b(?:mac\s?book(?:\s?pro)?|mbp)\b(?:[\s,]*1[2-7]{_INCHES})?"
    rf"|\bimac(?:\s?pro)?\b(?:[\s,]*2[147]{_INCHES})?"
    r"|\bmac\s?(?:studio|mini|pro)\b|\b(?:mac|mini|studio)\b"
)
_WHEN = r"\b(?:(?:early|mid|late|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\w*\s+)?20[12][0-9]\b|\b1[1-9][\s-]*(?:inch|in)\b"
# What drivers, shops and PCI lists write otherwise, in the order in which it is made one.
_SPELLED_OTHERWISE = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"[^a-z0-9.]+", " "),
        (r"\bdgx (?=[abh][0-9])", " "),
        (r"\bsxm[0-9]\b", "sxm"),
        (r"\b(rtx|gtx|rx|arc|vega)(?=[0-9]|[abw][0-9])", r"\1 "),
        (r"\b(m[1-9])(pro|max|ultra)\b", r"\1 \2"),
        (
            r"\b([0-9]{3,4}|[a-z][0-9]{4})[\s-]*(ti|super|xtx|xt|gre|ada)(?:[\s-]*(super|ada))?\b",
            r"\1 \2 \3",
        ),
        (r"\b([2-9][0-9]{3})(d)\b|\b(a[0-9]{4})(ada)\b", r"\1\3 \2\4"),
        (r"\b([2-5]0[5-9]0)m\b", r"\1 laptop"),
        (
            r"\b(dgx|jetson|strix|iphone|orin|agx)(spark|orin|halo|point|17|nano|nx|agx|thor)",
            r"\1 \2",
        ),
        (r"\b(orin)(nano|nx)", r"\1 \2"),
        # NVIDIA calls no part "Max-Q" since its 30 series: what people still call so is the laptop's.
        (r"\b([345]0[5-9]0\b.*)\bmaxq\b", r"\1laptop"),
    )
]
_LAPTOP = re.compile(r"\bmax[\s-]?q\s*/\s*mobile\b|\b(?:mobile|notebook|laptop)(?:\s+gpu)?\b")

# Words that neither name a part nor tell two apart: makers, and what shops and drivers put around a
# number.
IGNORED = {
    "nvidia", "amd", "intel", "apple", "qualcomm", "geforce", "radeon", "gpu", "gpus", "graphics",
    "the", "a", "with", "w",
    "edition", "chip", "tesla", "unified", "memory", "ram", "vram", "developer", "kit", "devkit",
    "instinct", "founders",
    "generation", "design", "mac", "macbook", "mini", "imac", "air", "core", "channel", "nvlink",
    "sli",
}  # fmt: skip
# Words of which one more or less is another part.
SUFFIXES = {
    "ti", "super", "xt", "xtx", "gre", "d", "v2", "laptop", "maxq", "max", "pro", "plus", "ultra",
    "ada", "server", "orin",
    "xavier", "agx", "nx", "nano", "thor", "pcie", "sxm", "nvl", "quadro",
    "lite", "le",
    "hbm2", "hbm3", "mig", "gddr5", "gddr6", "gddr6x", "mini", "go", "extreme", "elite",
    "blackwell", "turing",
    "ampere", "titan", "ipad", "iphone", "raspberry",
}  # fmt: skip
# The same chip on another board or with more memory: the size tells which.
FORMS = {"pcie", "sxm", "nvl"}
# What makers of boards and shops say of a card directly behind its number.
DECORATIONS = {
    "oc", "fe", "lhr", "gaming", "trio", "windforce", "eagle", "ventus", "suprim", "tuf", "rog",
    "strix", "aorus", "ftw3", "dual",
    "card", "cards", "desktop", "pc", "rig", "build", "workstation", "workstations", "nitro",
    "pulse", "box", "hybrid", "new", "used", "my", "modded", "egpu", "aio",
}  # fmt: skip


def words(text: str, *, several: bool = False) -> tuple[str, ...]:
    """Comparable words: "rtx5090" and "RTX-5090" become rtx 5090, "m4max" m4 max, "max+" max;
    `several`: a plural may stand."""
    text = re.sub(r"\bmax[\s-]?q\b", " maxq ", _LAPTOP.sub(" laptop ", text.lower()))
    if several:
        text = re.sub(r"\b([0-9]{4}|[ahvp][0-9]{2,3}|mi[0-9]{2,3})s\b", r"\1", text)
    if re.search(r"\bm[1-9]\b|\bm[1-9](?:pro|max|ultra)\b", text):
        text = re.sub(_WHEN, " ", re.sub(_MAC, " ", text))
    text = _rewritten(text, _SPELLED_OTHERWISE)
    found = [word for word in text.split() if word not in IGNORED]
    if "laptop" in found:
        return tuple(dict.fromkeys(found))
    return tuple(found)


# A word behind a number that nobody knows may make another part of it, if it is as short as those
# are that makers use.
_LONGEST_SUFFIX = 4


def is_number(word: str) -> bool:
    """A word that could be a part's number: three digits or more."""
    return sum(c.isdigit() for c in word) >= 3


def is_apart(before: Sequence[str], after: Sequence[str]) -> bool:
    """False where the word before a part's name, or after it, could make it another part."""
    last = "".join(before[-1:])
    following = "".join(after[:1])
    is_short = following.isalpha() and len(following) <= _LONGEST_SUFFIX
    makes_another = following in SUFFIXES or (is_short and following not in DECORATIONS)
    return not makes_another and last not in SUFFIXES - {"laptop"}


def without_number(typed: Typed) -> Typed | None:
    """`typed` with a bare number at its end read as memory ("M3 Ultra 512"); None where there is
    none or a size was said."""
    last = typed.words[-1] if typed.words else ""
    if typed.sizes_gb or not last.isdecimal() or len(last) > 4:
        return None
    return replace(typed, words=typed.words[:-1], sizes_gb=(float(last),))
