"""String formats in schemas: those that llguidance supports, and expressions for others."""

from __future__ import annotations

# llguidance's formats. Any other is an annotation, which the specification allows for all of them
# (draft 2020-12, validation 7.2.1).
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Further formats of the specification that an expression can check, at least approximately.
_TOKEN = r"(?:~[01]|[^~/])*"
_CLASS = r"\[\^?(?:a-z|A-Z|0-9|[\w .,:;@#%&=+*?(){}|<>!~$'\"`/]|\\[\w.*+?^$|()\[\]{}/\\-])+-?\]"
_PLAIN = r"[^\\\[\](){}*+?|^$]|\\[dDwWsS.*+?^$|()\[\]{}/\\-]"
_TIMES = r"(?:[*+?]|\{(?:[0-9]{1,3},?|[0-9],[1-9][0-9]{1,2})\})?\??"
_ATOM = rf"(?:(?:{_PLAIN}|{_CLASS}){_TIMES}|[\^$|])"
_URI = r"[\w.~@!$&'()+*,;=-]|%[0-9a-fA-F]{2}"
EXPRESSIONS = {
    "json-pointer": f"^(?:/{_TOKEN})*$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|(?:/{_TOKEN})*)$",
    "uri-reference": rf"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?:{_URI})*(?:[/?#](?:{_URI}|[:/?#])*)?$",
    "iri": r'^[A-Za-z][A-Za-z0-9+.-]*:[^\s<>"{}|\\^`]*$',
    "iri-reference": r'^[^\s<>"{}|\\^`]*$',
    "uri-template": r"^(?:[^\x00-\x20\"'%<>\\^`{|}]|%[0-9a-fA-F]{2}|\{[+#./;?&=,!@|]?[\w.%,*:]+\})*$",
    "idn-hostname": r"^[^\s.@/]{1,63}(?:\.[^\s.@/]{1,63})*$",
    "idn-email": r"^[^\s@]+@[^\s@]+$",
    "regex": rf"^(?:{_ATOM}|\((?:\?:)?{_ATOM}*\)(?:[*+?]\??)?)*$",
}
