"""Chat templates in the form that the families publish, shortened to what they write of calls of tools."""

from __future__ import annotations

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_LOOP = "{% for message in messages %}"
_END = "{% endfor %}"


def _chatml(calls: str, prompt: str = "<|im_start|>assistant\n") -> str:
    return (
        f"<|im_start|>system\n{_TOOLS}<|im_end|>\n{_LOOP}<|im_start|>{{{{ message.role }}}}\n{{{{ message.content }}}}"
        "{% if message.tool_calls %}" + calls + "{% endif %}<|im_end|>\n" + _END + "{% if add_generation_prompt %}"
        f"{{{{ {prompt!r} }}}}{{% endif %}}"
    )


def _each(body: str) -> str:
    return (
        "{% for tool_call in message.tool_calls %}{% set call = tool_call.function %}{% set args = call.arguments %}"
        + body
        + "{% endfor %}"
    )


def _dsml(block: str) -> str:
    return (
        "{% set dsml = '｜DSML｜' %}{{ bos_token }}" + _TOOLS + _LOOP + "{% if message.role == 'user' %}"
        "<｜User｜>{{ message.content }}<｜Assistant｜>{% elif message.tool_calls %}"
        "</think>{{ '\n\n<' + dsml + '" + block + ">\n' }}"
        + _each(
            "<{{ dsml }}invoke name=\"{{ call.name }}\">\n{% for k, v in args.items() %}<{{ dsml }}parameter "
            "name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
            "{{ v if v is string else v | tojson }}</{{ dsml }}parameter>\n{% endfor %}</{{ dsml }}invoke>\n"
        )
        + "</{{ dsml }}" + block + "><｜end▁of▁sentence｜>{% endif %}" + _END
        + "{% if add_generation_prompt %}</think>{% endif %}"
    )  # fmt: skip


TEMPLATES = {
    "hermes, Qwen2.5": (
        "hermes",
        _chatml(
            _each(
                '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
                "{{- args | tojson }}{{- '}\\n</tool_call>' }}"
            )
        ),
    ),
    "hermes, Qwen3": (
        "hermes",
        _chatml(
            "{{- '<think>\\n\\n</think>\\n\\n' }}"
            + _each(
                '{{- \'<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
                "{{- args | tojson }}{{- '}\\n</tool_call>' }}"
            ),
            "<|im_start|>assistant\n<think>\n",
        ),
    ),
    "qwen3_coder": (
        "qwen3_coder",
        _chatml(
            _each(
                "{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}"
                "{% for name, value in args | items %}{{- '<parameter=' + name + '>\\n' }}"
                "{% set value = value | tojson | safe if value is iterable and value is not string"
                " else value | string %}{{- value }}{{- '\\n</parameter>\\n' }}{% endfor %}"
                "{{- '</function>\\n</tool_call>' }}"
            )
        ),
    ),
    "llama3_json": (
        "llama3_json",
        "{{ bos_token }}{# <|python_tag|> #}" + _TOOLS + _LOOP + "{% if message.tool_calls %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        + _each('{"name": "{{ call.name }}", "parameters": {{ args | tojson }}}')
        + "<|eot_id|>{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}"
        "<|eot_id|>{% endif %}" + _END
        + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "mistral, 7B v0.3": (
        "mistral",
        "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + _LOOP
        + "{% if message.tool_calls %}[TOOL_CALLS] ["
        "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('9!') }}{% endif %}"
        "{% set out = call.function | tojson %}{{ out[:-1] }}, \"id\": \"{{ call.id }}\"}"
        "{{ ', ' if not loop.last else ']' + eos_token }}{% endfor %}"
        "{% elif message.role == 'user' %}[INST] {{ message.content }}[/INST]{% else %} {{ message.content }}"
        "{% endif %}" + _END,
    ),
    "mistral, Ministral 3": (
        "mistral",
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}" + _LOOP
        + "{% if message.tool_calls %}"
        + _each("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + args | tojson }}")
        + "{{ eos_token }}{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% else %}{{ message.content }}{% endif %}" + _END,
    ),
    "granite": (
        "granite",
        "{# respond with <|tool_call|> followed by a JSON list of tools used #}" + _TOOLS + _LOOP
        + "<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
        "{% if message.tool_calls %}<|tool_call|>["
        + _each('{"name": "{{ call.name }}", "arguments": {{ args | tojson }}}{{ ", " if not loop.last }}')
        + "]{% endif %}<|end_of_text|>\n" + _END
        + "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    ),
    "phi4": (
        "phi4",
        "<|system|>{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|end|>" + _LOOP
        + "<|{{ message.role }}|>{{ message.content }}{% if message.tool_calls %}<|tool_call|>["
        + _each('{"name": "{{ call.name }}", "arguments": {{ args | tojson }}}{{ ", " if not loop.last }}')
        + "]<|/tool_call|>{% endif %}<|end|>" + _END + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ),
    "deepseek, V3": (
        "deepseek",
        _TOOLS + _LOOP + "{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% elif message.tool_calls %}"
        "<｜Assistant｜><｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>{{ tool_call.type }}<｜tool▁sep｜>{{ call.name }}\n```json\n{{ args | tojson }}\n"
            "```<｜tool▁call▁end｜>{{ '\\n' if not loop.last }}"
        )
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}" + _END
        + "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    ),
    "deepseek, V3.1": (
        "deepseek",
        _TOOLS + _LOOP + "{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% elif message.tool_calls %}"
        "<｜Assistant｜></think><｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ args | tojson }}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}" + _END
        + "{% if add_generation_prompt %}<｜Assistant｜></think>{% endif %}",
    ),
    "deepseek_v32": ("deepseek_v32", _dsml("function_calls")),
    "deepseek_v4": ("deepseek_v4", _dsml("tool_calls")),
    "glm": (
        "glm",
        "[gMASK]<sop>" + _TOOLS + _LOOP + "<|{{ message.role }}|>\n{{ message.content }}{% if message.tool_calls %}"
        "<think></think>"
        + _each(
            "\n<tool_call>{{ call.name }}\n{% for k, v in args.items() %}<arg_key>{{ k }}</arg_key>\n"
            "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>"
        )
        + "{% endif %}" + _END + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    "kimi": (
        "kimi",
        _TOOLS + _LOOP + "<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}"
        "{% if message.tool_calls %}<|tool_calls_section_begin|>"
        + _each(
            "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
            "{{ args | tojson }}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>{% endif %}<|im_end|>" + _END
        + "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    ),
    "minimax": (
        "minimax",
        _TOOLS + _LOOP + "]~b]{{ message.role }}\n{{ message.content }}{% if message.tool_calls %}"
        "\n<minimax:tool_call>\n"
        + _each(
            '<invoke name="{{ call.name }}">\n{% for k, v in args.items() %}<parameter name="{{ k }}">'
            "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n"
        )
        + "</minimax:tool_call>{% endif %}[e~[\n" + _END + "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
    ),
    "minimax_m1": (
        "minimax_m1",
        "{% if tools %}{{ 'Please respond with <tool_calls></tool_calls> XML tags:\n<tool_calls>\n"
        "{\"name\": <tool-name>, \"arguments\": <args-json-object>}\n</tool_calls>' }}{% endif %}" + _TOOLS + _LOOP
        + "<beginning_of_sentence>{{ 'ai' if message.role == 'assistant' else message.role }}\n{{ message.content }}"
        "{% if message.tool_calls %}<tool_calls>\n"
        + _each('{{ \'{"name": "\' + call.name + \'", "arguments": \' + args | tojson + \'}\n\' }}')
        + "</tool_calls>{% endif %}<end_of_sentence>\n" + _END
        + "{% if add_generation_prompt %}<beginning_of_sentence>ai\n{% endif %}",
    ),
    "function_gemma": (
        "function_gemma",
        _TOOLS + _LOOP + "<start_of_turn>{{ message.role }}\n{{ message.content }}{% if message.tool_calls %}"
        + _each(
            "<start_function_call>call:{{ call.name }}{{ '{' }}{% for k, v in args.items() %}{{ k }}:"
            "{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<end_function_call>"
        )
        + "{% endif %}<end_of_turn>\n" + _END + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    "lfm2": (
        "lfm2",
        _chatml(
            "<|tool_call_start|>["
            + _each(
                "{{ call.name }}({% for k, v in args.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
                "{% endfor %}){{ ', ' if not loop.last }}"
            )
            + "]<|tool_call_end|>"
        ),
    ),
    "olmo3": (
        "olmo3",
        _chatml(
            "<function_calls>"
            + _each(
                "{{ call.name }}({% for k, v in args.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
                "{% endfor %}){{ '\\n' if not loop.last }}"
            )
            + "</function_calls>"
        ),
    ),
    "harmony": (
        "harmony",
        "<|start|>system<|message|>{# <|channel|> #}<|end|>" + _TOOLS + _LOOP + "{% if message.tool_calls %}"
        + _each(
            "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
            "{{ args | tojson }}<|call|>"
        )
        + "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}" + _END
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
}  # fmt: skip
