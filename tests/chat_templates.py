"""Chat templates in the manners of the field, for the tokenizer of tests: one token a character.

Those of TOOL_TEMPLATES behave as published ones do: what they refuse, and which tokens end a turn.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

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


class Family(NamedTuple):
    """The structure of a family's tokenizer: its template, its marks, and what ends a turn."""

    template: str
    bos: str | None
    eos: str
    stops: tuple[str, ...]
    """As generation_config.json lists them."""
    marks: tuple[str, ...] = ()
    """Other special tokens."""
    adds_bos: bool = False
    end: str = ""
    """End of an answer."""
    end_of_call: str = ""
    """End of a tool call. Empty if the template knows no tools."""
    rewrites: bool = False
    """True if the template writes an answer differently once other messages follow."""


_CALLS = "{% for c in m.tool_calls %}"
_NAME_AND_ARGUMENTS = (
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
)
FAMILIES = {
    "Llama 3": Family(
        "{{ bos_token }}"
        + _EACH
        + "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% if 'tool_calls' in m %}" + _CALLS + _NAME_AND_ARGUMENTS + "{% endfor %}<|eot_id|>"
        "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        marks=("<|start_header_id|>", "<|end_header_id|>"),
        adds_bos=True,
        end="<|eot_id|>",
        end_of_call="<|eot_id|>",
    ),
    "Qwen 3": Family(  # thoughts stand in the last answer only, empty ones too
        _EACH + "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
        "</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}" + _CALLS + "<tool_call>\n" + _NAME_AND_ARGUMENTS + "\n</tool_call>"
        "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        bos=None,
        eos="<|im_end|>",
        stops=("<|im_end|>", "<|endoftext|>"),
        marks=("<|im_start|>",),
        end="<|im_end|>",
        end_of_call="<|im_end|>",
        rewrites=True,
    ),
    "Gemma 3": Family(  # the tokenizer's end is not the turn's; no system message, no tools
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        + _EACH
        + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        bos="<bos>",
        eos="<eos>",
        stops=("<eos>", "<end_of_turn>"),
        marks=("<start_of_turn>",),
        adds_bos=True,
        end="<end_of_turn>",
    ),
    "GLM 4": Family(  # the mark of the next role is what a model ends its turn with
        "[gMASK]<sop>"
        + _EACH
        + "{% if m.tool_calls %}"
        + _CALLS
        + "<|assistant|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
        "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        bos=None,
        eos="<|endoftext|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        marks=("[gMASK]", "<sop>", "<|assistant|>", "<|system|>"),
        end="<|user|>",
        end_of_call="<|observation|>",
    ),
    "Mistral": Family(
        "{{ bos_token }}" + _EACH + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] ["
        + _CALLS
        + _NAME_AND_ARGUMENTS
        + "{% endfor %}]</s>{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
        "{% endfor %}",
        bos="<s>",
        eos="</s>",
        stops=("</s>",),
        marks=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        adds_bos=True,
        end="</s>",
        end_of_call="</s>",
    ),
    "gpt-oss": Family(
        TOOL_TEMPLATES["gpt-oss"],
        bos=None,
        eos="<|return|>",
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),
        marks=("<|start|>", "<|message|>", "<|end|>"),
        end="<|return|>",
        end_of_call="<|call|>",
        rewrites=True,
    ),
}
"""Small tokenizers with the published structure of real ones: one token for each character."""


def family_tokenizer(name: str, folder: Path, *, adds_eos: bool = False) -> Any:
    """Make a tokenizer of a family's structure."""
    family = FAMILIES[name]
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(folder))
    special = dict.fromkeys((family.bos, *family.stops, *family.marks))
    made.add_special_tokens({"additional_special_tokens": [each for each in special if each]})
    made.bos_token = family.bos
    made.eos_token = family.eos
    made.chat_template = family.template
    named = [token for token in (family.bos if family.adds_bos else None, family.eos) if token]
    begin = f"{family.bos} " if family.adds_bos else ""
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin}$A{f' {family.eos}' if adds_eos else ''}",
        special_tokens=[(token, made.convert_tokens_to_ids(token)) for token in named],
    )
    return made


def stop_ids(name: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of a family's stop tokens, as generation_config.json has them."""
    return tuple(tokenizer.convert_tokens_to_ids(list(FAMILIES[name].stops)))
