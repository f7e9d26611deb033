"""Tensor operations of HybridSpec decoding: GDN verification and commit, convolution, length selection.

Every operation lives in one file that begins with its plain PyTorch reference. Tensors in, tensors out: nothing here
knows a model, a config object or transformers. `kernels/README.md` derives the equations that the docstrings cite.
"""

from .conv.commit import conv_commit_ref
from .conv.verify import conv_verify_ref
from .gdn.commit import gdn_commit_ref
from .gdn.recurrent import gdn_recurrent_ref
from .gdn.verify import CompactFactors, gdn_verify_ref
from .selection.acceptance import conditional_acceptance_ref, prefix_probabilities_ref
from .selection.correct import correct_length_ref, new_experts_ref
from .selection.select import select_length_ref

__all__ = [
    "CompactFactors",
    "conditional_acceptance_ref",
    "conv_commit_ref",
    "conv_verify_ref",
    "correct_length_ref",
    "gdn_commit_ref",
    "gdn_recurrent_ref",
    "gdn_verify_ref",
    "new_experts_ref",
    "prefix_probabilities_ref",
    "select_length_ref",
]
