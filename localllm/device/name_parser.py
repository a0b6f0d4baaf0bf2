"""Split a typed machine name into words, count, memory sizes, GPU cores and the computer's parts.

The words are brand, series, number and suffix ("rtx 4070 ti super"). Letters attached to a number
are separated. The variants that drivers, shops and PCI lists use for a laptop GPU become one word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device.ram import NO_RAM, StatedRam
from localllm.errors import UsageError


@dataclass(frozen=True, slots=True)
class ParsedName:
    """One part of a typed name.

    - `words`: the words that identify it.
    - `sizes_gb`: the stated memory sizes (GB).
    - `own_gb`: the size that is called the card's own.
    - `cores`: GPU cores.
    - `count`: how many of it.
    - `ram`: system memory stated with it.
    - `text`: its text without sizes.
    - `rest`: words that identify no part.
    """

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
        """The memory size of the part itself, as far as the words show."""
        if self.own_gb is not None:
            return self.own_gb
        if self.sizes_gb:
            return self.sizes_gb[0]
        return None


def split(name: str) -> list[str]:
    """Split a name into its parts.

    Parts are joined by a plus or a comma, or by "and" if another machine or a memory size follows.
    """
    text = re.sub(r"(?<=gb )\([1-8]\s?[x×]\s?[0-9]{1,3}(?:\s?gb)?\)", " ", name, flags=re.I)
    text = _MODULES.sub(lambda match: f"{int(match[1]) * int(match[2])}gb", text)
    text = _PLUS_OF_NAME.sub(lambda match: match[0].replace("+", _PLUS_MARK), text)
    text = re.sub(r"(?<=[0-9])\+(?=\s|$)(?!\s*\S)", " ", text)
    parts: list[str] = []
    for piece in filter(None, map(str.strip, _JOINED.split(text))):
        part = piece.replace(_PLUS_MARK, "+")
        # "Mac Studio with M2 Ultra": text without a number is not a part of its own.
        if parts and not re.search(r"[0-9]|\btitan|\bvii\b", parts[-1], re.I):
            if re.match(_COUNT_PATTERN, part, re.I):
                part = f"{part} {parts.pop()}"
            else:
                part = f"{parts.pop()} {part}"
        parts.append(part)
    return parts


# A plus that belongs to a part's name ("Max+ 395", "PRO+") is hidden from the pattern that splits.
_PLUS_OF_NAME = re.compile(
    r"\bmax\s?\+(?=\s*(?:pro\s*)?[34][0-9]{2})|\bmax\+|\bpro\+(?=\s)", re.IGNORECASE
)
_PLUS_MARK = "\ue000"

# A count, and the brands that may come between it and the number.
_COUNT_PATTERN = r"(?:(?:[1-9]|1[0-6])\s?[x×*]|(?:dual|two|triple|three|quad|four)\b)\s?"
_BRANDS = (
    r"(?:(?:nvidia|amd|intel|tesla|quadro|geforce|radeon|instinct|rtx|gtx|rx|arc|pro|ai|xeon|epyc|"
    r"gold|silver|platinum)\s?)*"
)
# Commas inside parentheses do not separate parts. Neither do those in the table's own names
# ("7840U,8840U").
_JOINED = re.compile(
    r"\s*\+\s*|\s*,\s+(?![^(]*\))|,(?=[1-9]\s?[x×])"
    r"|(?:(?<=[0-9]{4})|(?<=[0-9] ti)|(?<=[0-9]ti)|(?<=super)|(?<=xt)|(?<=xtx))\s*/\s*(?=[0-9]{4})"
    rf"|\s+(?={_COUNT_PATTERN}(?:{_BRANDS}[a-z]{{0,2}}[0-9]{{1,4}}|titan)(?![0-9]|\s?(?:gb|ch)))"
    r"|(?<!\bx)\s(?:and|with|&|plus)\s+(?:an?\s+|another\s+)?(?!max-?q)"
    rf"(?={_BRANDS}\S*[0-9])",
    re.I,
)
# Memory modules: "2x48gb". In parentheses after a size, they repeat it.
_MODULES = re.compile(r"\b([1-9]|1[0-6])\s?[x×*]\s?([0-9]{1,3})\s?gb\b", re.I)


# "24g", "24gb", "24 gigs" and French "24 Go". A four-digit number with a "G" is a part number
# (Ryzen 7 5750G).
_SIZE = (
    r"(?P<number>[0-9]{1,3}(?:\.[0-9]+)?|[0-9]{4,5}(?=\s*(?:gb|gib|tb|mib)))\s*"
    r"(?P<unit>gbs?|gib|gigs?|gigabytes?|go|g|tb|to|mib)\b"
)
_KIND = r"(?P<kind>lpddr[3-5]x?|ddr[2-5])"
# A card's number may follow a kind of memory.
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
_COUNT_BEFORE_NAME = re.compile(
    rf"(?:([1-9]|1[0-6])\s*(?:[x×*]\s*(?=[a-z])|[x×*]\s*(?=[0-9]{{4}})|×\s*|x\s+|\s[x*]\s+)|({'|'.join(_COUNTS)})[\s-]+)"
    r"(?=[a-z0-9])(?!channel)"
)
_COUNT_AFTER_NAME = re.compile(
    r"(?:\s[x×*]\s*|(?<=[0-9a-z])[×*]\s*|(?<=[0-9]{2})x|(?<=[a-z]\s)x)([1-9]|1[0-6])"
    r"(?=\s*$|\s+(?:[0-9]+\s?[gt]b|l?p?ddr))"
)


# Laptop series, and words between such a name and a part's name.
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
# Unifies different spellings, in this order.
_TYPED_SPELLINGS = [
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
        # Power draw and price.
        (r"@?\s*(?<![\w.-])[0-9.]+\s*(?:k?w|watts?|tops)\b|[$€]\s?[0-9.,]+k?\b", " "),
        (r"(?<=[a-z])(?=[0-9]{2,3}gb\b)", " "),
        (r"\b(hx|ultra)(?=[0-9]{3}[a-z]{0,2}\b)", r"\1 "),
        # Series of desktops and servers with plain numbers, which cards have too.
        (
            r"\b(precision|optiplex|elitedesk|prodesk|thinkcentre|supermicro|esprimo|celsius|vostro)"
            r"[\s-]+(?=[0-9]{3,4}[a-z]{0,2}\b(?!\s?(?:gb|tb)))",
            r"\1",
        ),
        # Memory and disk: "16/256", "16gb/1tb".
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


def read(part: str) -> ParsedName:
    """Parse one part of a name."""
    text = _rewritten(part.lower().strip(), _TYPED_SPELLINGS)
    without_sizes = re.sub(rf"(?<![\w.]){_SIZE}", " ", text)
    count, text = _split_count(text)
    ram, text = _split_ram(text)
    own_gb = None
    # Drivers print "A100-SXM4-40GB".
    match = re.search(rf"{_SIZE}\s*vram", text) or re.search(rf"(?<=[a-z0-9]-){_SIZE}", text)
    if match:
        own_gb = _gigabytes(match[1], match[2])
        text = _remove_match(match)
    sizes_gb = tuple(
        _gigabytes(number, unit) for number, unit in re.findall(rf"(?<![\w.]){_SIZE}", text)
    )
    text = re.sub(rf"(?<![\w.]){_SIZE}", " ", text)
    cores, memory_gb, text = _split_cores(text)
    if memory_gb is not None and not sizes_gb:
        sizes_gb = (memory_gb,)
    for size_gb in (*sizes_gb, own_gb, ram.size_gb if ram else None):
        if size_gb is not None and not 0 < size_gb < 1e6:
            raise UsageError(f"{part!r} contains {size_gb:g} GB of memory")
    return ParsedName(
        words(text, several=count > 1), sizes_gb, own_gb, cores, count, ram, without_sizes
    )


def _rewritten(text: str, rules: Sequence[tuple[re.Pattern[str], str]]) -> str:
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return text


def _gigabytes(number: str, unit: str) -> float:
    """Return GB as sold.

    Drivers print MiB and omit a small part: 32607 MiB are 32 GB, 23034 MiB are 24 GB.
    """
    if unit == "mib":
        gib = float(number) / 1024
        if gib.is_integer():
            return gib
        return math.ceil(gib / 2) * 2
    if unit.startswith("t"):
        return float(number) * 1024
    return float(number)


def _remove_match(match: re.Match[str]) -> str:
    """Return the searched text with the match replaced by a blank."""
    return f"{match.string[: match.start()]} {match.string[match.end() :]}"


def _split_count(text: str) -> tuple[int, str]:
    """Return the count and the remaining text.

    Formats are "2x rtx 3090", "2x3090", "dual 3090s", "rtx 3090 x2" and "3090x2".
    """
    count_match = _COUNT_BEFORE_NAME.match(text)
    if count_match:
        digits, word = count_match.groups()
        count = int(digits) if digits else _COUNTS[word]
        return count, text[count_match.end() :]
    text = re.sub(r"\(\s*([1-9]|1[0-6])\s*[x×*]\s*\)\s*$", r" x\1", text)
    bare_count = re.match(r"([2-9]|1[0-6])\s+(?=(?:[rg]tx\s?)?[0-9]{4}\b)", text)
    match = bare_count or _COUNT_AFTER_NAME.search(text)
    if match is None:
        return 1, text
    return int(match[1]), _remove_match(match).strip()


def _split_ram(text: str) -> tuple[StatedRam | None, str]:
    channels = 0
    match = _CHANNELS.search(text)
    if match:
        channels = _CHANNEL_WORDS.get(match[1]) or int(match[1])
        text = _remove_match(match)
    for pattern in _RAM:
        match = pattern.search(text)
        if match is None:
            continue
        groups = match.groupdict()
        size_gb = None
        if groups.get("number"):
            size_gb = _gigabytes(groups["number"], groups["unit"])
        megatransfers_s = int(groups.get("rate") or 0)
        return StatedRam(
            size_gb, groups.get("kind") or "", megatransfers_s, channels
        ), _remove_match(match)
    if channels:
        return NO_RAM._replace(channels=channels), text
    return None, text


def _split_cores(text: str) -> tuple[int | None, float | None, str]:
    """Return GPU cores, memory in GB and the remaining text.

    Formats are "30-core GPU", "16c/40c" and Apple's "12/19/32" (CPU, GPU, GB).
    """
    match = re.search(r"\(?\b([0-9]{1,2})/([0-9]{1,2})(?:/([0-9]{1,3}))?\b\)?", text)
    if match:
        memory = float(match[3]) if match[3] else None
        return int(match[2]), memory, _remove_match(match)
    pattern = r"\b([0-9]{1,5})[\s-]*(?:cores?|c)\b[\s-]*(gpu|cpu)?"
    counts = re.findall(pattern, text)
    remaining = re.sub(pattern, " ", text)
    gpu_counts = [int(number) for number, kind in counts if kind == "gpu"]
    other_counts = [int(number) for number, kind in counts if not kind]
    cores = gpu_counts or other_counts
    return cores[-1] if cores else None, None, remaining


# Words around a Mac's chip: the model, the screen size in inches, and the year.
_INCHES = r"(?:\.[0-9])?(?:[\s-]*(?:inch|in|\"))?(?=\s|$)"
_MAC = (
    rf"\b(?:mac\s?book\s?air|mba)\b(?:[\s,]*1[135]{_INCHES})?"
    rf"|\b(?:mac\s?book(?:\s?pro)?|mbp)\b(?:[\s,]*1[2-7]{_INCHES})?"
    rf"|\bimac(?:\s?pro)?\b(?:[\s,]*2[147]{_INCHES})?"
    r"|\bmac\s?(?:studio|mini|pro)\b|\b(?:mac|mini|studio)\b"
)
_WHEN = r"\b(?:(?:early|mid|late|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\w*\s+)?20[12][0-9]\b|\b1[1-9][\s-]*(?:inch|in)\b"
# Unifies the spellings of drivers, shops and PCI lists, in this order.
_DRIVER_SPELLINGS = [
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
        # NVIDIA has not used "Max-Q" in names since the 30 series. People who use it mean the
        # laptop GPU.
        (r"\b([345]0[5-9]0\b.*)\bmaxq\b", r"\1laptop"),
    )
]
_LAPTOP = re.compile(r"\bmax[\s-]?q\s*/\s*mobile\b|\b(?:mobile|notebook|laptop)(?:\s+gpu)?\b")

# Words that neither name nor distinguish parts: vendors, and words that shops and drivers add to a
# number.
IGNORED = {
    "nvidia", "amd", "intel", "apple", "qualcomm", "geforce", "radeon", "gpu", "gpus", "graphics",
    "the", "a", "with", "w",
    "edition", "chip", "tesla", "unified", "memory", "ram", "vram", "developer", "kit", "devkit",
    "instinct", "founders",
    "generation", "design", "mac", "macbook", "mini", "imac", "air", "core", "channel", "nvlink",
    "sli",
}  # fmt: skip
# If a name gains or loses one of these words, it is another part.
SUFFIXES = {
    "ti", "super", "xt", "xtx", "gre", "d", "v2", "laptop", "maxq", "max", "pro", "plus", "ultra",
    "ada", "server", "orin",
    "xavier", "agx", "nx", "nano", "thor", "pcie", "sxm", "nvl", "quadro",
    "lite", "le",
    "hbm2", "hbm3", "mig", "gddr5", "gddr6", "gddr6x", "mini", "go", "extreme", "elite",
    "blackwell", "turing",
    "ampere", "titan", "ipad", "iphone", "raspberry",
}  # fmt: skip
# The same chip on another board or with more memory. The size decides which.
FORMS = {"pcie", "sxm", "nvl"}
# Words that board vendors and shops put directly after a card's number.
DECORATIONS = {
    "oc", "fe", "lhr", "gaming", "trio", "windforce", "eagle", "ventus", "suprim", "tuf", "rog",
    "strix", "aorus", "ftw3", "dual",
    "card", "cards", "desktop", "pc", "rig", "build", "workstation", "workstations", "nitro",
    "pulse", "box", "hybrid", "new", "used", "my", "modded", "egpu", "aio",
}  # fmt: skip


def words(text: str, *, several: bool = False) -> tuple[str, ...]:
    """Normalise text into comparable words.

    "rtx5090" and "RTX-5090" become rtx 5090, "m4max" m4 max, "max+" max. If `several`, a plural is
    accepted.
    """
    kept_words = [word for word in spelled(text, several=several) if word not in IGNORED]
    if "laptop" in kept_words:
        return tuple(dict.fromkeys(kept_words))
    return tuple(kept_words)


def spelled(text: str, *, several: bool = False) -> list[str]:
    """Return all words of a text, in the spelling that `words` compares."""
    text = re.sub(r"\bmax[\s-]?q\b", " maxq ", _LAPTOP.sub(" laptop ", text.lower()))
    if several:
        text = re.sub(r"\b([0-9]{4}|[ahvp][0-9]{2,3}|mi[0-9]{2,3})s\b", r"\1", text)
    if re.search(r"\bm[1-9]\b|\bm[1-9](?:pro|max|ultra)\b", text):
        text = re.sub(_WHEN, " ", re.sub(_MAC, " ", text))
    return _rewritten(text, _DRIVER_SPELLINGS).split()


# An unknown word after a number may make it another part, if it is as short as vendors' suffixes.
_MAX_SUFFIX_CHARS = 4


def is_number(word: str) -> bool:
    """Return True for a word that could be a part's number: three digits or more."""
    return sum(c.isdigit() for c in word) >= 3


def is_separate(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return False if the word before or after a part's name could make it another part."""
    word_before = "".join(before[-1:])
    word_after = "".join(after[:1])
    is_short = word_after.isalpha() and len(word_after) <= _MAX_SUFFIX_CHARS
    makes_another = word_after in SUFFIXES or (is_short and word_after not in DECORATIONS)
    return not makes_another and word_before not in SUFFIXES - {"laptop"}


def without_number(parsed: ParsedName) -> ParsedName | None:
    """Return `parsed` with a bare number at its end read as memory ("M3 Ultra 512").

    Returns None if there is no such number or a size was stated.
    """
    last_word = parsed.words[-1] if parsed.words else ""
    if parsed.sizes_gb or not last_word.isdecimal() or len(last_word) > 4:
        return None
    return replace(parsed, words=parsed.words[:-1], sizes_gb=(float(last_word),))
