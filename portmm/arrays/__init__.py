"""Operands: arrays of every library, their layouts, and copies into other layouts."""
