"""Subcommands of `hybridspec`, one a file: each adds its parser and runs its arguments."""
