"""The device's KV pages. Which sequence owns which page is the scheduler's affair."""

from crossdock.cache.kv import KVCache, page_bytes

__all__ = ["KVCache", "page_bytes"]
