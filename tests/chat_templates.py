"""Chat templates in the manners of the field, for the tokenizer of tests: one token a character.

Those of TOOL_TEMPLATES behave as published ones do: what they refuse, and which tokens end a turn.
"""

from tests.tiny import CHAT_TEMPLATE

_EACH = "{% for m in messages %}"
CHAT_TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "ends turns with the stop token": (
        _EACH + "<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
    ),
    "writes a system message, trims, and counts": (
        "{% if messages[0].role != 'system' %}<bos>system\nBe brief.<eos>{% endif %}"
        + _EACH
        + "[{{ loop.index }}{{ m.role }}] {{ m.content | trim }} <eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    ),
    "rewrites earlier turns": (  # as those do that leave out what was thought
        _EACH + "<bos>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content.split('</think>')[-1] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant\n<think>{% endif %}"
    ),
    "wants roles to alternate": (
        _EACH + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    ),
}
MARKS = tuple(
    f"<|{name}|>"
    for name in ("start", "message", "call", "end", "return", "user", "assistant", "observation")
)
"""Special tokens of the templates below, beside <bos> and <eos>."""
TOOL_TEMPLATES = {
    "Hermes, Qwen": (  # a tool's message may follow whatever was said
        _EACH + "<bos>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        "{{ c.function | tojson }}\n</tool_call>{% endfor %}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
    ),
    "Mistral": (  # roles alternate, but for tools; calls and results have ids of 9 characters
        "{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
        + _EACH
        + "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id | length < 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id[-9:] }}"}{% endfor %}]<eos>'
        "{% elif m.role == 'assistant' %}{{ m.content }}<eos>"
        "{% elif m.tool_call_id is not defined or m.tool_call_id | length < 9 %}"
        "{{ raise_exception('ids have 9 characters') }}"
        '{% else %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": '
        '"{{ m.tool_call_id[-9:] }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
    ),
    "gpt-oss": (  # no result without a call; of three ends only two are sampled
        "{% set called = namespace(name=none) %}"
        + _EACH
        + "{% if m.role == 'assistant' and m.tool_calls %}"
        "{% set called.name = m.tool_calls[0].function.name %}"
        "<|start|>assistant to=functions.{{ called.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|message|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|return|>"
        "{% else %}{% set called.name = none %}<|end|>{% endif %}"
        "{% elif m.role == 'tool' and called.name is none %}{{ raise_exception('no call') }}"
        "{% elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|message|>"
        "{{ m.content | tojson }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "GLM": (  # the mark of the next message is what a model ends its turn with
        _EACH
        + "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "ends the last turn only": (
        _EACH + "{{ m.role }}: {{ m.content }}"
        "{{ '<eos>' if loop.last and not add_generation_prompt else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
}
