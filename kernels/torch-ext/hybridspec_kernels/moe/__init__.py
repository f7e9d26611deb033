"""Mixture of experts for few tokens: routing, the list of distinct experts, their products, each expert read once."""
