"""The prefill server: computes prompts and writes their KV pages into decode slots.

Nothing is imported here: the entry point comes through this file before it answers signals.
"""

__all__: list[str] = []
