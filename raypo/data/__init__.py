"""Prompt sets and the order in which they are drawn."""

from raypo.data.prompts import LoadedPrompts, load_prompts, peek
from raypo.data.rows import absolute
from raypo.data.stream import Draw, PromptStream

__all__ = ["Draw", "LoadedPrompts", "PromptStream", "absolute", "load_prompts", "peek"]
