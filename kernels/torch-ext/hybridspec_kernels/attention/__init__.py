"""Softmax attention of a block of tokens over a static key/value cache: its inputs, and its verification."""
