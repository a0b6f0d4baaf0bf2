"""Chat templates that want memory, time or an error of Python's own, by what they do; each is
measured in a process of its own:

python -m conversation.hostile_templates NAME...   # one line each: MiB of growth, seconds of
                                                   processor, what was said
"""

# ruff: noqa: UP031 - attacks are read best on one line each

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from localllm.conversation.template import ChatTemplate, TemplateError

# Takes a second or more of processor time, most of it until the limit of time.
SLOW = frozenset(
    {
        "many macros", "many blocks", "many fors", "many calls", "deep adds", "deep dots",
        "deep filters", "compares", "find",
        "count", "replace", "cycler", "joiner", "map string", "items", "floats", "namespaces",
        "gens", "loops kept",
    }
)  # fmt: skip
# fmt: off
ATTACKS = {
    "format zeros":"{{ '{:.000000000000199999999f}'.format(1.5)|length }}",
    "percent zeros":"{{ '%.000000000000199999999f'|format(1.5)|length }}",
    "sort":"{% set a='a'*9000000 %}{{ ([a]*200)|sort|length }}",
    "sort2":"{% set a='A'*60000 %}{% set l=[] %}{% for i in range(1000) %}{% set _=l.append(a) "
            "%}{% "
            "endfor %}{{ l|sort|length }}",
    "unique":"{% set a='A'*9000000 %}{{ ([a]*100)|unique|list|length }}",
    "groupby":"{% set a='A'*9000000 %}{{ ([{'x':a}]*100)|groupby('x')|length }}",
    "dictsort":"{% set a='A'*9000000 %}{{ "
               "{'x':a,'y':a,'z':a,'w':a,'q':a,'r':a,'s':a,'t':a}|dictsort(by='value')|length }}",
    "minmax":"{% set a='A'*9000000 %}{{ ([a]*100)|max|length }}",
    "title":"{{ ('a '*8000000)|title|length }}",
    "wordcount":"{{ ('a '*8000000)|wordcount }}",
    "striptags":"{{ ('a '*8000000)|striptags|length }}",
    "urlencode":"{{ ('a '*8000000)|urlencode|length }}",
    "escape":"{{ ('<'*8000000)|escape|length }}",
    "upper":"{{ ('é'*16000000)|upper|length }}",
    "upperm":"{{ ('é'*16000000).upper()|length }}",
    "casefold":"{{ ('é'*16000000).casefold()|length }}",
    "titlem":"{{ ('é'*16000000).title()|length }}",
    "swap":"{{ ('é'*16000000).swapcase()|length }}",
    "capitalize":"{{ ('é'*16000000)|capitalize|length }}",
    "appendloop":"{% set l=[1] %}{% for x in l %}{% set _=l.append('a'*4000 ~ x) %}{% endfor %}{{ "
                 "l|length "
                 "}}",
    "append small":"{% set l=[] %}{% for j in range(99) %}{% for i in range(99999) %}{% set "
                   "_=l.append('a'*3000 ~ i) %}{% endfor %}{% endfor %}",
    "append dict":"{% set l=[] %}{% for j in range(99) %}{% for i in range(99999) %}{% set "
                  "_=l.append({'a':i,'b':i}) %}{% endfor %}{% endfor %}",
    "nested literal":"{% set n=namespace(x=[1]) %}{% for j in range(99) %}{% for i in range(99999) "
                     "%}{% "
                     "set "
                     "n.x=[n.x,"+",".join("{'a':i}" for _ in range(100))+"] %}{% endfor %}{% "
                                                                         "endfor "
                                                                         "%}",
    "tuples":"{% set n=namespace(x=(1,)) %}{% for j in range(99) %}{% for i in range(99999) %}{% "
             "set "
             "n.x=(n.x,"+",".join("(i,i)" for _ in range(100))+") %}{% endfor %}{% endfor %}",
    "compare":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] %}{% "
              "set "
              "n.y=[n.y,n.y] %}{% endfor %}{{ n.x==n.y }}",
    "compare less":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] "
                   "%}{% "
                   "set "
                   "n.y=[n.y,n.y] %}{% endfor %}{{ n.x < n.y }}",
    "in":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] %}{% set "
         "n.y=[n.y,n.y] %}{% endfor %}{{ n.x in [n.y] }}",
    "hash":"{% set n=namespace(x=(1,2)) %}{% for i in range(60) %}{% set n.x=(n.x,n.x) %}{% endfor "
           "%}{{ {n.x:1}|length }}",
    "uniqhash":"{% set n=namespace(x=(1,2)) %}{% for i in range(60) %}{% set n.x=(n.x,n.x) %}{% "
               "endfor "
               "%}{{ [n.x]|unique|list|length }}",
    "test eq":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] %}{% "
              "set "
              "n.y=[n.y,n.y] %}{% endfor %}{{ n.x is eq(n.y) }}",
    "select eq":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] "
                "%}{% "
                "set "
                "n.y=[n.y,n.y] %}{% endfor %}{{ [n.x]|select('equalto',n.y)|list|length }}",
    "sort nested":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x,n.x] "
                  "%}{% "
                  "set "
                  "n.y=[n.y,n.y] %}{% endfor %}{{ [n.x,n.y]|sort|length }}",
    "append nested":"{% set a=[1] %}{% set b=[1] %}{% set n=namespace(x=a,y=b) %}{% for i in "
                    "range(60) "
                    "%}{% "
                    "set p=[] %}{% set q=[] %}{% set _=p.append(n.x) %}{% set _=p.append(n.x) "
                    "%}{% set _=q.append(n.y) %}{% set _=q.append(n.y) %}{% set n.x=p %}{% set "
                    "n.y=q %}{% endfor %}{{ n.x==n.y }}",
    "times nested":"{% set n=namespace(x=[1],y=[1]) %}{% for i in range(60) %}{% set n.x=[n.x]*2 "
                   "%}{% "
                   "set "
                   "n.y=[n.y]*2 %}{% endfor %}{{ n.x==n.y }}",
    "dict nested":"{% set n=namespace(x={},y={}) %}{% for i in range(60) %}{% set "
                  "n.x={'a':n.x,'b':n.x} "
                  "%}{% set n.y={'a':n.y,'b':n.y} %}{% endfor %}{{ n.x==n.y }}",
    "dictcall nested":"{% set n=namespace(x={},y={}) %}{% for i in range(60) %}{% set "
                      "n.x=dict(a=n.x,b=n.x) "
                      "%}{% set n.y=dict(a=n.y,b=n.y) %}{% endfor %}{{ n.x==n.y }}",
    "number":"{{ "+"9"*400000+" }}",
    "number int":"{{ ('9'*400000)|int }}",
    "number float":"{{ ('9'*400000)|float|int }}",
    "many macros":"".join("{%% macro m%d() %%}x{%% endmacro %%}"%i for i in range(25000)),
    "many ifs":"{% if a %}"*3000+"{% endif %}"*3000,
    "many sets":"".join("{%% set a%d=%d %%}"%(i,i) for i in range(50000)),
    "many blocks":"".join("{%% block b%d %%}x{%% endblock %%}"%i for i in range(25000)),
    "many calls":"{{"+"+".join("x()" for _ in range(100000))+"}}",
    "many fors":"".join("{% for x in y %}x{% endfor %}" for i in range(30000)),
    "deep parens":"{{"+"("*100000+"1"+")"*100000+"}}",
    "deep lists":"{{"+"["*5000+"1"+"]"*5000+"}}",
    "deep adds":"{{"+"1+"*200000+"1}}",
    "deep neg":"{{"+"-"*100000+"1}}",
    "deep not":"{{"+"not "*100000+"1}}",
    "deep dots":"{{ a"+".b"*200000+"}}",
    "deep filters":"{{ 'a'"+"|upper"*100000+"}}",
    "punycode":"{{ ('a'*1000000).encode('punycode').decode('punycode') }}",
    "punycode attr":"{{ (('a'*1000000)|attr('encode'))('punycode') }}",
    "punycode map":"{{ [('é'*100000)]|map('attr','encode')|list }}",
    "constfold":"{{ ("+"'a'*9000000~"*20+"'a')|length }}",
    "constfold2":"{{ 'a'*9000000|length }}"+"{{ ('a'*9000000)|length }}"*2000,
    "constfold pow":"{{ 9**9**9 }}",
    "constfold shift":"{{ 10**300 }}",
    "slices":"{% set a='a'*9000000 %}{{ "+"+".join("a[%d:]|length"%i for i in range(2000))+" }}",
    "compares":"{% set a='a'*9000000 %}{% set b='a'*8999999~'b' %}{{ "+" or ".join("a==b" for i in range(30000))+" }}",
    "contains":"{% set a='a'*9000000 %}{% set b='a'*100000~'b' %}{{ "+" or ".join("b in a" for i in range(3000))+" }}",
    "find":"{% set a='a'*9000000 %}{% set b='a'*100000~'b' %}{% for i in range(99999) %}{{ "
           "a.find(b) "
           "}}{% endfor %}",
    "count":"{% set a='ab'*4000000 %}{% for i in range(99999) %}{{ a.count('ba') }}{% endfor %}",
    "replace":"{% set a='ab'*4000000 %}{% for i in range(99999) %}{% set b=a.replace('a','c') %}{% "
              "endfor %}",
    "recursion":"{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "cycler":"{% set c=cycler(1,2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ "
             "c.next() "
             "}}{% endfor %}{% endfor %}",
    "joiner":"{% for i in range(99999) %}{% for j in range(99999) %}{% set x=joiner('a') %}{% "
             "endfor "
             "%}{% endfor %}",
    "strftime":"{{ strftime_now('%Y'*4000000) }}",
    "strftime2":"{{ strftime_now('%A'*5000000)|length }}",
    "truncate":"{{ ('a '*8000000)|truncate(15000000)|length }}",
    "filesize":"{{ (10**70)|filesizeformat }}",
    "random":"{{ ([1]*200000)|random }}",
    "map upper":"{% set a='a'*60000 %}{{ ([a]*200000)|map('upper')|list|length }}",
    "map string":"{{ range(100000)|map('string')|list|length }}"*40,
    "range lists":"{% set l=[] %}{% for i in range(2000) %}{% set _=l.append(range(100000)|list) "
                  "%}{% "
                  "endfor %}",
    "dict big":"{% set l=[] %}{% for i in range(99999) %}{% set "
               "_=l.append(dict(a=i,b=i,c=i,d=i,e=i,f=i,g=i,h=i,i=i)) %}{% endfor %}{% for i in "
               "range(99999) %}{% set _=l.append(dict(a=i,b=i,c=i,d=i,e=i,f=i,g=i,h=i,i=i)) %}{% "
               "endfor %}",
    "items":"{% set l=[] %}{% for i in range(99999) %}{% set _=l.append({'a':i}.items()|list) %}{% "
            "endfor %}{% for i in range(99999) %}{% set _=l.append({'a':i}.items()|list) %}{% "
            "endfor %}",
    "splitlists":"{% set l=[] %}{% for i in range(20000) %}{% set _=l.append('a b c d e f g h i j "
                 "k "
                 "l "
                 "m "
                 "n "
                 "o p'.split()) %}{% endfor %}"*5,
    "namespaces":"{% set l=[] %}{% for j in range(9) %}{% for i in range(99999) %}{% set "
                 "_=l.append(namespace(a=i)) %}{% endfor %}{% endfor %}",
    "floats":"{% set l=[] %}{% for j in range(9) %}{% for i in range(99999) %}{% set "
             "_=l.append(i/7) "
             "%}{% endfor %}{% endfor %}",
    "loops kept":"{% set l=[] %}{% for j in range(99) %}{% for i in range(9999) %}{% set "
                 "_=l.append(loop) "
                 "%}{% endfor %}{% endfor %}",
    "macros kept":"{% set l=[] %}{% for j in range(99) %}{% for i in range(9999) %}{% macro m() "
                  "%}x{% "
                  "endmacro %}{% set _=l.append(m) %}{% endfor %}{% endfor %}",
    "gens":"{% set l=[] %}{% for j in range(99) %}{% for i in range(9999) %}{% set "
           "_=l.append([i]|map('string')) %}{% endfor %}{% endfor %}",
    "bound":"{% set l=[] %}{% for j in range(99) %}{% for i in range(9999) %}{% set "
            "_=l.append('a'.join) %}{% endfor %}{% endfor %}",
    "undefs":"{% set l=[] %}{% for j in range(99) %}{% for i in range(9999) %}{% set "
             "_=l.append(nope) "
             "%}{% endfor %}{% endfor %}",
}
# fmt: on
_ASKED = [{"role": "user", "content": "x"}]


def peak_mib() -> float:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return int(line.split()[1]) / 1024


def measure(source: str) -> str:
    """What rendering it takes, in this process."""
    before, began = peak_mib(), time.process_time()
    try:
        ChatTemplate(source).render(_ASKED)
        said = "rendered"
    except TemplateError:
        said = "refused"
    except BaseException as e:  # not ours: a user would see it
        said = type(e).__name__
    return f"{peak_mib() - before:.1f} {time.process_time() - began:.2f} {said}"


def main(names: list[str]) -> None:
    ChatTemplate("{{ messages[0].content | upper | title }}").render(_ASKED)  # what is loaded once
    for name in names:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            Path("/proc/self/clear_refs").write_text("5")
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            print(f"{name}|{measure(ATTACKS[name])}", flush=True)
            sys.exit()
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
