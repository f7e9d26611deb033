"""Checks and evaluations of a target with its drafter."""
