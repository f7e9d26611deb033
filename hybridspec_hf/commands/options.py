"""What several commands take: a policy, a number, a device, a dtype."""

import argparse

import torch

from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.pair import AUTOREGRESSIVE

DTYPES = ["auto", "float32", "bfloat16"]


def policy_name(text: str) -> str:
    """A policy given on the command line, checked by argparse before any model is loaded."""
    if text != AUTOREGRESSIVE:
        try:
            HybridSpecConfig(policy=text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f'{error} Or "ar": autoregressive.') from error
    return text


def positive(text: str) -> int:
    """A whole number from 1 given on the command line, checked by argparse before any model is loaded."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def pick_device(name: str) -> str:
    """`auto` is the first GPU if there is one.

    Raises:
        ValueError: for a GPU that torch cannot use.
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this torch sees no GPU. Use --device cpu, or install torch with CUDA.")
    if name != "auto":
        return name
    return "cuda:0" if torch.cuda.is_available() else "cpu"
