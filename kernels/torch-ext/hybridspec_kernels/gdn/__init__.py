"""Gated DeltaNet: gates, verification of a block of tokens, and the commit of its accepted prefix."""
