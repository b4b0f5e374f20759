"""Prompt sets and the order in which they are drawn."""

from raypo.data.prompts import LoadedPrompts, load_prompts, peek
from raypo.data.stream import Draw, PromptStream

__all__ = ["Draw", "LoadedPrompts", "PromptStream", "load_prompts", "peek"]
