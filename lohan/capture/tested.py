"""Model classes that `python docs/models_sweep.py` found exact: docs/models.md."""

TESTED = frozenset({"LlamaForCausalLM"})
