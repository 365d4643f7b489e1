"""The loop language as text, a module per language."""
