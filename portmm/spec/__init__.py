"""Specification of computations: dtypes, problems, expressions and epilogues."""
