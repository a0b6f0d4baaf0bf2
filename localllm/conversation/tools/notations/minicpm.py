"""MiniCPM 5: `<function name="f"><param name="k">value</param></function>`, with CDATA where a
value holds markup."""

from __future__ import annotations

import re

from localllm.conversation.tools.call_grammars import TagGrammar
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format
from localllm.conversation.tools.values import PYTHON

FORMATS = (
    tagged_format(
        name="minicpm",
        signs=("<param name=",),
        markers=('<function name="',),
        closing="</function>",
        patterns=TagPatterns(
            re.compile(r'([^">]+)"\s*>'),
            "",
            re.compile(r'\s*<param name="([^">]+)">'),
            "</param>",
            quoted=re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL),
        ),
        grammar=TagGrammar(
            head=lambda name: f'{name}">',
            before=lambda key, kind: f'<param name="{key}">',
            after="</param>",
            end="</function>",
            text='"<![CDATA[" cdata "</param>" | /[^<&\\n]*/ "</param>"\n'
            'cdata[suffix="]]>"]: /(?s:.*)/',
            spelling=PYTHON,
        ),
    ),
)
