"""A reduced chat template for each format of calls, written from the format's definition.

With these, every format is tested also without published templates.
"""

from __future__ import annotations

_MACROS = """\
{%- macro raw(v) %}{{ v if v is string else v | tojson }}{% endmacro -%}
"""


def _template(calls: str, opened: str = "<{}>", ended: str = "<end>") -> str:
    """Return a template that writes `calls` for an assistant's calls."""
    role, assistant = opened.format("{{ m.role }}"), opened.format("assistant")
    return (
        _MACROS
        + "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        + role
        + "{{ "
        "m.content "
        "}}"
        "{% if m.tool_calls %}" + calls + "{% endif %}" + ended + "{% endfor %}"
        "{% if add_generation_prompt %}" + assistant + "{% endif %}"
    )


def _each(call: str, between: str = "") -> str:
    """Return Jinja that writes `call` for each call `c` of a turn."""
    joined = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for t in m.tool_calls %}{% set c = t.function %}" + call + joined + "{% endfor %}"


def _pairs(pair: str, between: str = "") -> str:
    """Return Jinja that writes `pair` for each argument `k`, `v` of a call."""
    joined = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for k, v in c.arguments.items() %}" + pair + joined + "{% endfor %}"


_JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_ARRAY = "[" + _each(_JSON, ", ") + "]"
_ATEM = "<atem:function_calls>\n" + '<atem:invoke name="{{ c.name }}">\n'
_M3 = "]<]minimax[>["
_M3_VALUE = (
    "{%- macro tags(v) %}{% if v is mapping %}{% for k, w in v.items() %}" + _M3 + "<{{ k }}>{{ tags(w) }}" + _M3
    + "</{{ k }}>{% endfor %}{% elif v is string or v is not iterable %}{{ raw(v) if v is not none else '' }}{% else %}"
    "{% for w in v %}" + _M3 + "<item>{{ tags(w) }}" + _M3 + "</item>{% endfor %}{% endif %}{% endmacro -%}"
)  # fmt: skip
_GEMMA = """\
{%- macro gemma(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}\
{% for k, w in v | dictsort %}{{ k }}:{{ gemma(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}\
{% elif v is iterable %}[{% for w in v %}{{ gemma(w) }}{{ ',' if not loop.last }}{% endfor %}]\
{% else %}{{ v | tojson }}{% endif %}{% endmacro -%}"""
_QWEN = (
    "<function={{ c.name }}>\n"
    + _pairs("<parameter={{ k }}>\nVALUE\n</parameter>\n")
    + "</function>"
)
_DSML = (
    '<｜DSML｜invoke name="{{ c.name }}">\n'
    + _pairs(
        '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">{{ raw(v) '
        "}}</｜DSML｜parameter>\n"
    )
    + "</｜DSML｜invoke>\n"
)
_K3_TYPE = (
    "{{ 'string' if v is string else 'boolean' if v is boolean else 'null' if v is none else "
    "'number' if v is number "
    "else 'object' if v is mapping else 'array' }}"
)
_K3 = (
    '<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>'
    + _pairs(
        '<|open|>argument key="{{ k }}" type="' + _K3_TYPE + '"<|sep|>{{ raw(v) '
        "}}<|close|>argument<|sep|>"
    )
    + "<|close|>call<|sep|>"
)
_CDATA = (
    "{% if v is string and ('<' in v or '&' in v or '\\n' in v) %}<![CDATA[{{ v }}]]>{% else "
    "%}{{ "
    "v }}{% endif %}"
)

TEMPLATES: dict[str, str] = {
    "hermes": _template(_each("<tool_call>\n" + _JSON + "\n</tool_call>", "\n")),
    "llama3": _template(
        _each('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}', "; ") + "{# "
        "<|python_tag|> "
        "#}"
    ),
    "mistral": _template("[TOOL_CALLS][" + _each(_JSON[:-1] + ', "id": "{{ t.id }}"}', ", ") + "]"),
    "mistral, name first": _template(
        _each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}")
    ),
    "phi": _template("<|tool_call|>" + _ARRAY + "<|/tool_call|>"),
    "nemotron_v2": _template("<TOOLCALL>" + _ARRAY + "</TOOLCALL>"),
    "apriel": _template("<tool_calls>" + _ARRAY + "</tool_calls>"),
    "minimax_m1": "{# <beginning_of_sentence>ai name= #}"
    + _template("<tool_calls>\n" + _each(_JSON + "\n") + "</tool_calls>"),
    "apertus": _template(
        "<|tools_prefix|>["
        + _each('{"{{ c.name }}": {{ c.arguments | tojson }}}', ", ")
        + "]<|tools_suffix|>"
    ),
    "cohere": _template(
        "<|START_ACTION|>[\n"
        + _each(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
            '"parameters": {{ c.arguments | tojson }}}',
            ",\n",
        )
        + "\n]<|END_ACTION|>"
    ),
    "functionary": "{# <function=example_function_name>{ #}"
    + _template(_each("<function={{ c.name }}>{{ c.arguments | tojson }}</function>")),
    "gigachat": _template("<|function_call|>{% set c = m.tool_calls[0].function %}" + _JSON),
    "deepseek": _template(
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson "
            "}}<｜tool▁call▁end｜>"
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek, fenced": _template(
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | "
            "tojson }}\n```<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi": _template(
        "<|tool_calls_section_begin|>"
        + _each(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 "
            "}}<|tool_call_argument_begin|>"
            "{{ c.arguments | tojson }}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>"
    ),
    "kimi_k3": _template("<|open|>tools<|sep|>" + _each(_K3) + "<|close|>tools<|sep|>"),
    "harmony": _template(
        "{% set c = m.tool_calls[0].function %} to=functions.{{ c.name }}<|channel|>commentary "
        "json<|message|>"
        "{{ c.arguments | tojson }}<|call|>",
        "<|start|>{}",
        "",
    ),
    "muse": _template(
        _each(
            " to={{ c.name }}<|message|>"
            + _ATEM
            + _pairs('<atem:parameter name="{{ k }}">{{ raw(v) }}</atem:parameter>\n')
            + "</atem:invoke>\n</atem:function_calls>",
            "<|eom|><|start|>assistant",
        )
        + "<|eot|>",
        "<|start|>{}",
        "",
    ),
    "qwen_coder": _template(
        _each(
            "<tool_call>\n"
            + _QWEN.replace(
                "VALUE",
                "{{ v | tojson if v is mapping or (v is iterable and v is not string) "
                "else "
                "v "
                "| string }}",
            )
            + "\n</tool_call>",
            "\n",
        )
    ),
    "seed": _template(
        _each(
            "<seed:tool_call>\n"
            + _QWEN.replace("\nVALUE\n", "{{ v | string }}")
            + "\n</seed:tool_call>",
            "\n",
        )
    ),
    "glm, with newlines": _template(
        _each(
            "<tool_call>{{ c.name }}\n"
            + _pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ raw(v) }}</arg_value>\n")
            + "</tool_call>",
            "\n",
        )
    ),
    "glm, without": _template(
        _each(
            "<tool_call>{{ c.name }}"
            + _pairs("<arg_key>{{ k }}</arg_key><arg_value>{{ raw(v) }}</arg_value>")
            + "</tool_call>"
        )
    ),
    "minimax": _template(
        "<minimax:tool_call>\n"
        + _each(
            '<invoke name="{{ c.name }}">\n'
            + _pairs('<parameter name="{{ k }}">{{ raw(v) }}</parameter>\n')
            + "</invoke>\n"
        )
        + "</minimax:tool_call>"
    ),
    "minimax_m3": _M3_VALUE
    + _template(
        _M3
        + "<tool_call>\n"
        + _each(_M3 + '<invoke name="{{ c.name }}">{{ tags(c.arguments) }}' + _M3 + "</invoke>\n")
        + _M3
        + "</tool_call>"
    ),
    "dsml": _template("<｜DSML｜tool_calls>\n" + _each(_DSML) + "</｜DSML｜tool_calls>"),
    "minicpm": _template(
        _each(
            '<function name="{{ c.name }}">'
            + _pairs('<param name="{{ k }}">' + _CDATA + "</param>")
            + "</function>",
            "\n",
        )
    ),
    "lfm": _template(
        "<|tool_call_start|>["
        + _each("{{ c.name }}(" + _pairs("{{ k }}={{ v | tojson }}", ", ") + ")", ", ")
        + "]<|tool_call_end|>"
    ),
    "function_gemma": _GEMMA.replace("QUOTE", "<escape>")
    + _template(
        _each("<start_function_call>call:{{ c.name }}{{ gemma(c.arguments) }}<end_function_call>")
    ),
    "gemma4": _GEMMA.replace("QUOTE", '<|"|>')
    + _template(_each("<|tool_call>call:{{ c.name }}{{ gemma(c.arguments) }}<tool_call|>")),
}
