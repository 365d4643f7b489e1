"""The version of portmm.

Owns one string, kept apart so that a cache key can name it without importing
package metadata (several milliseconds). Imports nothing.
"""

VERSION = "0.1.0"
