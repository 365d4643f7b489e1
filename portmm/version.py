"""Version of portmm.

Owns one string, in a module of its own so that a cache key can contain it without an
import of package metadata (several milliseconds).
"""

VERSION = "0.1.0"
