"""Chat templates in the manners of the field, for the tokenizer of tests: one token a character."""

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
