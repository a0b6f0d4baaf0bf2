"""MiniCPM 5: `<function name="f"><param name="k">value</param></function>`, with CDATA for values
that contain markup."""

from __future__ import annotations

import re

from localllm.conversation.tools.call_grammars import NAME, TagGrammar
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format
from localllm.conversation.tools.values import PYTHON

_PATTERNS = TagPatterns(
    re.compile(r'([^">]+)"\s*>'),
    "",
    re.compile(r'\s*<param name="([^">]+)">'),
    "</param>",
    quoted=re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL),
)
_GRAMMAR = TagGrammar(
    head=f'{NAME}">',
    before=f'<param name="{NAME}">',
    after="</param>",
    end="</function>",
    text='"<![CDATA[" cdata "</param>" | /[^<&\\n]*/ "</param>"\ncdata[suffix="]]>"]: /(?s:.*)/',
    spelling=PYTHON,
)
FORMATS = (
    tagged_format(
        name="minicpm",
        signs=("<param name=",),
        markers=('<function name="',),
        closing="</function>",
        patterns=_PATTERNS,
        grammar=_GRAMMAR,
    ),
)
