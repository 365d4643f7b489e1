"""Block programs: what is written once for all targets, in portmm's loop language."""
