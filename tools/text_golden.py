#!/usr/bin/env python3
"""Writes what the text room is held against: tests/data/chat/golden.json, chat templates, conversations and the prompts
transformers makes of them; tests/data/smollm2/encodings.json, odd texts and the ids the demo model's tokenizer gives
them in Python, where another regex engine splits the text.

Two ChatML templates with thinking and tools, written for this test in the manner of published ones, and many short
templates that each try one thing templates do. A case whose `expected` is null is one that transformers refuses.
"""

import datetime
import json
import pathlib
import sys

try:
    import transformers.utils.chat_template_utils as chat_template_utils
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
except ImportError as missing:
    sys.exit(f"{missing}. Install what this script needs: pip install torch 'transformers>=5,<5.40' tokenizers")

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "data" / "chat" / "golden.json"
ENCODINGS = ROOT / "tests" / "data" / "smollm2" / "encodings.json"
TEXTS = [
    "",
    " ",
    "\n\n\n  \t x  \n",
    "In 1984, 3.14159 x 10^23 = 42%; 007 and 1,000,000.",
    "I'm, you're, we'll, they've, IT'S, l'été, o'clock''",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ ☕ 🫠 e\u0301 ñ Å",
    "日本語のテキスト、中文字符。한국어 العربية हिन्दी ไทย",
    "٣٤٥ Ⅷ ½ ² ① 𝟘𝟙",
    "def f(x):\n    return x ** 2  # 🐍\n\n\nprint(f(12))\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <|endoftext|> <|im_start",
    "a" * 60 + " " * 40 + "b" * 3,
    "\u00a0non\u2003breaking\u200bzero\u3000wide\ufeff",
    "\u0000\u0001\u007f\u0085\ufffd",
    "https://example.org/a_b-c?d=1&e=%20#f",
    "MiXeD cAsE ÄÖÜß ǆ ŉ ﬁ",
    "The end.   \n   ",
]
NOW = datetime.datetime(2026, 3, 7, 9, 5, 4, tzinfo=datetime.timezone.utc)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

THINKING = """\
{%- set last = messages | length - 1 %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=last, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set at = last - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
            and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.question = at %}
        {%- set ns.searching = false %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

DATED = """\
{# A template in the other common manner: blocks on lines of their own, macros, a date. #}
{% macro turn(role, text) %}
<|im_start|>{{ role }}
{{ text | trim }}<|im_end|>
{% endmacro %}
{{ bos_token }}
{% set date = date_string if date_string is defined else strftime_now("%d %B %Y") %}
{% if messages[0]["role"] == "system" %}
    {% set system = messages[0]["content"] %}
    {% set rest = messages[1:] %}
{% else %}
    {% set system = "You are helpful." %}
    {% set rest = messages %}
{% endif %}
{{ turn("system", "Today is " + date + ".\\n" + system) }}
{% for message in rest %}
    {% if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{ raise_exception("user and assistant must alternate, message " ~ loop.index) }}
    {% endif %}
    {% if message["content"] is string %}
{{ turn(message["role"], message["content"]) }}
    {% else %}
        {% for part in message["content"] %}
            {% if part["type"] != "text" %}{% continue %}{% endif %}
{{ turn(message["role"], part["text"]) }}
        {% endfor %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What's 2 < 3 & \"4\"? 🐳\n"}
ANSWER = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nTrue."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather's state, in <b>°C</b>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1, "maximum": 7.5}},
                "required": ["city"],
                "nothing": None,
                "strict": True,
            },
        },
    }
]
CALLS = [
    SYSTEM,
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Ask the tool.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}},
            {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        ],
    },
    {"role": "tool", "content": "12°"},
    {"role": "tool", "content": "21°"},
]

# (name, template, messages, add_generation_prompt, variables)
CASES = [
    ("thinking", THINKING, [USER], True, {}),
    ("thinking off", THINKING, [SYSTEM, USER], True, {"enable_thinking": False}),
    ("thinking on", THINKING, [SYSTEM, USER], True, {"enable_thinking": True}),
    ("thinking history", THINKING, [SYSTEM, USER, ANSWER, USER], True, {}),
    ("thinking last answer", THINKING, [USER, ANSWER], False, {}),
    ("thinking tools", THINKING, [SYSTEM, USER], True, {"tools": TOOLS}),
    ("thinking tool calls", THINKING, CALLS, True, {"tools": TOOLS}),
    ("thinking no system with tools", THINKING, [USER], True, {"tools": TOOLS + TOOLS}),
    ("dated", DATED, [SYSTEM, USER, ANSWER, USER], True, {}),
    ("dated given date", DATED, [USER], False, {"date_string": "1 May 2030"}),
    ("dated refuses", DATED, [USER, USER], True, {}),
    (
        "dated parts",
        DATED,
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see "}, {"type": "text", "text": "it"}]}],
        True,
        {},
    ),
]

VARIABLES = {
    "yes": True,
    "no": False,
    "nil": None,
    "n": 7,
    "x": 2.5,
    "one": 1.0,
    "tiny": 1e-7,
    "huge": 1e22,
    "s": "it's \"fine\"\t✓",
    "items": [3, "a'b", None, True, 1.5, [], {}],
    "d": {"b": 1, "a": [1, 2], "items": "field", "é": "<&>"},
    "empty": [],
    "people": [{"name": "Zoe", "age": 3}, {"name": "adam", "age": 30}, {"name": "Bob"}],
}
SNIPPETS = """
{{ yes }} {{ no }} {{ nil }} {{ n }} {{ x }} {{ one }} {{ tiny }} {{ huge }} {{ missing }}
{{ items }} {{ d }} {{ empty }}
{{ s }} {{ [s] }} {{ ["\\n", "a\\\\b", 'q"', "\\u00a0", "\\u200b"] }}
{{ items | tojson }} {{ d | tojson }} {{ s | tojson }}
{{ d | tojson(indent=2) }}|{{ empty | tojson(indent=4) }}|{{ {} | tojson }}
{{ d | tojson(sort_keys=true, ensure_ascii=true) }} {{ d | tojson(separators=(',', ':')) }}
{{ "\\u0001\\u007f\\b\\f/" | tojson }} {{ tiny | tojson }} {{ huge | tojson }} {{ one | tojson }}
{{ missing | tojson }}
{{ missing.field }}
{{ nil.field }}|{{ nil["x"] }}
{{ nil.a.b }}
{% for p in d.items() %}{{ p[0] }}:{{ p | last }},{% endfor %}{{ d["items"] }} {{ d.get("zz") }} {{ d.get("b", 5) }} {{ d.keys() | list }} {{ d.values() | list }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for k in d %}{{ k }};{% endfor %}{% for c in "héy" %}[{{ c }}]{% endfor %}
{% for k, v in d | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for i in items if i %}{{ loop.index }}{{ i }}{% else %}none{% endfor %}{% for i in empty %}{% else %}none{% endfor %}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in range(2, 9, 3) %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %} {{ range(3) | list }}
{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}
{% set q = 1 %}{% for i in range(3) %}{% set q = q + i %}{% endfor %}{{ q }}{% if yes %}{% set q = 9 %}{% endif %}{{ q }}
{% set block %}a {{ n }} b{% endset %}[{{ block }}]{% set a, b = 1, 2 %}{{ a }}{{ b }}
{% macro m(x, y=2) %}<{{ x }}-{{ y }}>{% endmacro %}{{ m(1) }}{{ m(1, y=3) }}{{ m(y=4, x=0) }}
{{ " a b ".strip() }}|{{ " a b ".lstrip() }}|{{ " a b ".rstrip() }}|{{ "xxaxx".strip("x") }}|{{ "a,b,,c".split(",") }}|{{ " a  b ".split() }}
{{ "a-b-c".split("-", 1) }} {{ "a-b".replace("-", "+") }} {{ "Abc".upper() }} {{ "Abc".lower() }} {{ "abc def".title() }} {{ "abc".capitalize() }}
{{ "abc".startswith("a") }} {{ "abc".endswith(("x", "c")) }} {{ "abcabc".find("c") }} {{ "abcabc".count("bc") }} {{ "-".join(["a", "b"]) }}
{{ "abc"[0] }} {{ "abc"[-1] }} {{ "abcdef"[1:4] }} {{ "abc"[::-1] }} {{ items[0] }} {{ items[-2] }} {{ items[:2] }} {{ items[::-1] }} {{ items[99] }}
{{ "a" in "abc" }} {{ 3 in items }} {{ "b" in d }} {{ "x" not in d }} {{ "a" in missing }}
{{ 7 / 2 }} {{ 6 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 2 ** 3 }} {{ 1 + 2.5 }} {{ "a" * 3 }} {{ -n }}
{{ "a" ~ n ~ "b" }} {{ "a" + "b" }} {{ [1] + [2] }}
{{ "a" + n }}
{{ "a" + nil }}
{{ "a" + missing }}
{{ 1 if yes }} [{{ 1 if no }}] {{ 1 if no else 2 }} {{ yes and 5 }} {{ no or "z" }} {{ not yes }} {{ nil or empty or "last" }}
{{ n == 7 }} {{ n != 7 }} {{ 1 < 2 }} {{ "a" < "b" }} {{ 1 == 1.0 }} {{ nil == none }} {{ yes == true }} {{ [1] == [1] }}
{{ s is string }} {{ d is mapping }} {{ items is sequence }} {{ s is sequence }} {{ d is iterable }} {{ s is iterable }} {{ n is iterable }} {{ missing is iterable }}
{{ n is number }} {{ x is number }} {{ x is float }} {{ n is integer }} {{ yes is boolean }} {{ yes is true }} {{ nil is none }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }}
{{ missing is defined }} {{ missing is undefined }} {{ nil is defined }} {{ d.zz is defined }} {{ tools is defined }} {{ tools is none }} {{ documents is none }}
{{ items | length }} {{ s | length }} {{ d | length }} {{ items | first }} {{ items | last }} {{ "a" | default("z") }} {{ missing | default("z") }} {{ "" | default("z", true) }} {{ nil | default("z") }}
{{ nil | length }}
{{ people | map(attribute="name") | list }} {{ people | map(attribute="name") | join(", ") }} {{ people | selectattr("age", "defined") | map(attribute="age") | sum }}
{{ people | selectattr("name", "equalto", "Bob") | list | length }} {{ people | rejectattr("name", "in", ["Bob"]) | map(attribute="name") | list }}
{{ people | sort(attribute="name") | map(attribute="name") | join(",") }} {{ [3, 1, 2] | sort(reverse=true) }} {{ ["b", "A"] | sort }} {{ [1, 1, 2] | unique | list }}
{{ ["x", none, true, 1.0] | join("|") }} {{ [1, 2] | reverse | list }} {{ "abc" | reverse }} {{ [1, 5, 2] | max }} {{ [1, 5, 2] | min }}
{{ " a " | trim }}. {{ "ab" | upper }} {{ "AB" | lower }} {{ "ab cd" | title }} {{ "ab" | capitalize }} {{ "aab" | replace("a", "b", 1) }} {{ "<b>" | string }} {{ "a\\nb" | indent(2) }}
{{ "3" | int }} {{ "x" | int }} {{ 3.9 | int }} {{ "2.5" | float }} {{ 2.567 | round(1) }} {{ 2 | round }} {{ -3 | abs }} {{ true | string }} {{ 1 | string }}
{{ "7.9" | int }} {{ "q" | int(5) }} {{ nil | int(default=6) }} {{ " 12 " | int }} {{ no | int }} {{ "z" | float }} {{ "z" | float(1.5) }} {{ 3 | float }} {{ "aaa" | replace("a", "b", count=2) }}
{{ "a b" | safe }} {{ "<a>" | safe }} {{ "<&>'" }} {{ "<a>" | e }}
{%- if yes -%}  tight  {%- endif -%}  x
  {% if yes %}
  indented
  {% endif %}
after
{# a comment #}line{# another #}
{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}
{% generation %}inner{% set leak = 1 %}{% endgeneration %}{{ leak }}
a{%- generation -%}  tight  {%- endgeneration -%}  b
{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}
{{ strftime_now("%Y-%m-%d %H:%M:%S") }} {{ strftime_now("%d %b %Y, %A %a %B") }} {{ strftime_now("%-d/%-m %I %p %y %j %e %%") }}
{{ raise_exception("no " + s) }}
{{ messages[0].content }} {{ messages[0]["role"] }} {{ messages[-1].content | trim }} {{ messages | length }}
{{ messages[0].nothing is defined }} {{ messages[0].get("content") }} {{ "content" in messages[0] }}
{{ dict(a=1, b="x") }} {{ {"k": [1, [2, 3]]} }} {{ namespace(a=1).a }}
{% with a = 1 %}{{ a }}{% endwith %}{{ a }}{% filter upper %}loud{% endfilter %}
{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.cycle("a", "b") }}{% endfor %}
{% raw %}{{ not this }}{% generation %}{% endraw %}
{{ undefined_function() }}
{{ "%s is %d" | format("a", 3) }}
{{ "a" if n > 3 and x < 3 else "b" }}{{ 1 if n is defined and n }}
{{ items.append(4) }}
{{ "ab".foo() }}
{{ yes | int }} {{ [true, false] | map("string") | join }} {{ 10000000000000000000 }} {{ 1000000 * 1000000 }}
{{ ["a", "b"] | map("upper") | list }} {{ items | select("string") | list }} {{ items | reject("none") | list | length }}
"""


def tokenizer():
    inner = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW.replace(tzinfo=tz)


def main():
    chat_template_utils.datetime = FixedClock
    renderer = tokenizer()
    lines, snippets = SNIPPETS.strip("\n").split("\n"), []
    while lines:
        # The one template of several lines.
        count = 5 if lines[0].startswith("  {% if") or lines[0].startswith("{%- if") else 1
        snippets.append("\n".join(lines[:count]))
        lines = lines[count:]
    cases = CASES + [(s, s, [SYSTEM, USER], False, VARIABLES) for s in snippets]
    cases.append(("trailing newlines", "a{{ n }}\n\n", [USER], False, VARIABLES))
    plain = Tokenizer.from_file(str(ROOT / "tools" / "demo-model" / "tokenizer.json"))
    encodings = [{"text": text, "ids": plain.encode(text, add_special_tokens=False).ids} for text in TEXTS]
    ENCODINGS.write_text("[\n" + ",\n".join(json.dumps(e, ensure_ascii=True) for e in encodings) + "\n]\n")
    written, refused = [], 0
    for name, template, messages, add_generation_prompt, variables in cases:
        options = dict(variables)
        tools = options.pop("tools", None)
        try:
            expected = renderer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        except Exception as error:
            print(f"refused: {name[:70]!r}: {type(error).__name__}: {error}")
            expected, refused = None, refused + 1
        written.append(
            {
                "name": name,
                "template": template,
                "special_tokens": SPECIAL,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "variables": variables,
                "expected": expected,
            }
        )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"now": int(NOW.timestamp()), "cases": written}, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(written)} cases, {refused} refused")


if __name__ == "__main__":
    main()
