"""Small chat templates with the guards of the families' own, and what each of them takes."""

from __future__ import annotations

from gateway.text.template_roles import TemplateRoles

_PROMPT = "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
_CALLS = "{%- for call in m.tool_calls %}{{- '<call>' ~ call.function.name }}{%- endfor %}"
_TURN = "{{- '<' ~ m.role ~ '>' ~ m.content }}" + _CALLS + "{{- '</>' }}"
_ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."


def _guard(condition: str, message: str) -> str:
    return f"{{%- if {condition} %}}{{{{- raise_exception('{message}') }}}}{{%- endif %}}"


_WRONG_PARITY = _guard("(m.role == 'user') != (loop.index0 % 2 == 0)", _ALTERNATE)

PLAIN = "{%- for m in messages %}" + _TURN + "{%- endfor %}" + _PROMPT

# Qwen3.5: the reasoning of answers before the last user's turn is left out.
QWEN = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + _guard("ns.last < 0", "No user query found in messages.")
    + "{%- for m in messages %}"
    + _guard("m.role == 'system' and not loop.first", "System message must be at the beginning.")
    + "{{- '<' ~ m.role ~ '>' }}{%- if m.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>' ~ m.reasoning_content ~ '</think>' }}{%- endif %}{{- m.content }}" + _CALLS + "{{- '</>' }}"
    "{%- endfor %}" + _PROMPT
)

# Gemma 1 and 2.
GEMMA = (
    "{{- bos_token }}"
    + _guard("messages[0].role == 'system'", "System role not supported")
    + "{%- for m in messages %}" + _WRONG_PARITY + "{{- '<' ~ m.role ~ '>' ~ m.content | trim ~ '</>' }}{%- endfor %}"
    + _PROMPT
)  # fmt: skip

# Gemma 3 writes the system's text into the first turn by itself.
GEMMA_3 = (
    "{%- if messages[0].role == 'system' %}{%- set first = messages[0].content ~ '\n\n' %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set first = '' %}{%- set turns = messages %}{%- endif %}"
    "{%- for m in turns %}" + _WRONG_PARITY + "{{- '<' ~ m.role ~ '>' ~ (first if loop.first else '') }}"
    "{{- m.content | trim ~ '</>' }}{%- endfor %}" + _PROMPT
)

# Mistral 7B v0.1: no other roles at all.
MISTRAL_7B = (
    "{%- for m in messages %}" + _WRONG_PARITY
    + _guard("m.role not in ['user', 'assistant']", "Only user and assistant roles are supported!")
    + _TURN + "{%- endfor %}" + _PROMPT
)  # fmt: skip

# Mistral Small 3: calls and results do not count, so that nothing but an answer may stand behind a result.
MISTRAL = (
    "{%- set first = messages[0].role == 'system' %}{%- set turns = messages[1:] if first else messages %}"
    "{%- if first %}{{- '<system>' ~ messages[0].content ~ '</>' }}{%- endif %}"
    "{%- set ns = namespace(n=0) %}{%- for m in turns if m.role != 'tool' and not m.tool_calls %}"
    + _guard("(m.role == 'user') != (ns.n % 2 == 0)", "After the optional system message: " + _ALTERNATE)
    + "{%- set ns.n = ns.n + 1 %}{%- endfor %}{%- for m in turns %}"
    + _guard("m.role == 'system'", "Only user, assistant and tool roles are supported, and an initial system message!")
    + _TURN + "{%- endfor %}" + _PROMPT
)  # fmt: skip

# Mistral 7B v0.3 and Nemo write the system's text into the last turn, if that is the user's, and lose it else.
MOVING = (
    "{%- set first = messages[0].role == 'system' %}{%- set turns = messages[1:] if first else messages %}"
    "{%- for m in turns %}{%- if m.role == 'user' and loop.last and first %}"
    "{{- '<user>' ~ messages[0].content ~ '\n\n' ~ m.content ~ '</>' }}{%- else %}"
    + _guard("m.role == 'system'", "Only user, assistant and tool roles are supported, and an initial system message!")
    + _TURN + "{%- endif %}{%- endfor %}" + _PROMPT
)  # fmt: skip

# DeepSeek V3 collects what the system says at the beginning; gpt-oss and MiniMax M2 lose it.
HOISTING = (
    "{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
    "{%- for m in messages if m.role != 'system' %}" + _TURN + "{%- endfor %}" + _PROMPT
)
LOSING = (
    "{%- if messages[0].role == 'system' %}{{- '<system>' ~ messages[0].content ~ '</>' }}{%- endif %}"
    "{%- for m in messages if m.role != 'system' %}" + _TURN + "{%- endfor %}" + _PROMPT
)
# It writes the first message whatever its role is; a system's text behind it, only where tools are.
WITH_TOOLS = (
    "{%- for m in messages %}"
    + _guard("tools and m.role == 'system' and not loop.first", "Not with tools.")
    + _TURN + "{%- endfor %}" + _PROMPT
)  # fmt: skip
# What refuses all or writes nothing says nothing of its roles.
REFUSING = "{{ raise_exception('no') }}"

ONE_SYSTEM = TemplateRoles(takes_later_system=False)
ALTERNATING = TemplateRoles(takes_later_system=False, takes_turns_in_a_row=False)
TEMPLATES = {
    "plain": (PLAIN, TemplateRoles()),
    "Qwen3.5": (QWEN, TemplateRoles(takes_later_system=False, keeps_turns_before_user=False)),
    "Gemma 2": (GEMMA, TemplateRoles(takes_system=False, takes_later_system=False, takes_turns_in_a_row=False)),
    "Gemma 3": (GEMMA_3, ALTERNATING),
    "Mistral 7B": (
        MISTRAL_7B,
        TemplateRoles(takes_system=False, takes_later_system=False, takes_turns_in_a_row=False),
    ),
    "Mistral Small": (
        MISTRAL,
        TemplateRoles(takes_later_system=False, takes_turns_in_a_row=False, takes_user_behind_tool=False),
    ),
    "moving": (MOVING, TemplateRoles(takes_system=False, takes_later_system=False)),
    "hoisting": (HOISTING, ONE_SYSTEM),
    "losing": (LOSING, ONE_SYSTEM),
    "with tools": (WITH_TOOLS, ONE_SYSTEM),
    "refusing": (REFUSING, TemplateRoles()),
    "silent": ("{{ bos_token }}", TemplateRoles()),
}
