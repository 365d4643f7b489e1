"""Lowering of block programs: one path, with the loops of a host core or of a block of threads."""
