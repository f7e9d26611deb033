"""Softmax attention of a block of tokens over a static key/value cache, and the cache's slots."""
