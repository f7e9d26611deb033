"""Tensor operations of HybridSpec decoding: GDN verification and commit, attention, experts, head, selection.

Every operation lives in one file that begins with its plain PyTorch reference, `<op>_ref`; where a Triton kernel
exists, `<op>` launches it. Tensors in, tensors out: nothing here knows a model, a config object or transformers.
`kernels/README.md` derives the equations that the docstrings cite.
"""

from .acceptance.greedy import Emission, accept_greedy, accept_greedy_ref
from .attention.store import attention_store, attention_store_ref
from .attention.verify import AttentionScratch, attention_splits, attention_verify, attention_verify_ref
from .checks import INPUT_DTYPES, MAX_TOKENS
from .conv.commit import conv_commit, conv_commit_ref
from .conv.verify import conv_verify, conv_verify_ref
from .dense.gated_linear import gated_linear, gated_linear_ref
from .dense.linear import MAX_PARTS, linear, linear_parts, linear_ref
from .dense.swiglu import swiglu_linear, swiglu_linear_ref
from .gdn.commit import gdn_commit, gdn_commit_ref
from .gdn.project import GDNProjection, gdn_project, gdn_project_ref
from .gdn.recurrent import gdn_recurrent_ref
from .gdn.recurrent_commit import gdn_recurrent_commit, gdn_recurrent_commit_ref
from .gdn.recurrent_verify import gdn_recurrent_verify, gdn_recurrent_verify_ref
from .gdn.replay_commit import gdn_replay_commit, gdn_replay_commit_ref
from .gdn.replay_verify import gdn_replay_verify, gdn_replay_verify_ref, replay_ref, ring_capacity
from .gdn.verify import CompactFactors, gdn_verify, gdn_verify_ref
from .head.choose import HeadScratch, head_argmax, head_argmax_ref
from .head.draft import head_draft, head_draft_ref
from .moe.combine import moe_combine_norm, moe_combine_norm_ref
from .moe.experts import ExpertWeights, moe_experts, moe_experts_ref
from .moe.route import ExpertSlots, Routing, moe_route, moe_route_ref, moe_slots_ref
from .norm.add_rms import add_rms_norm, add_rms_norm_ref
from .norm.embed import embed_rms_norm, embed_rms_norm_ref
from .selection.acceptance import conditional_acceptance_ref, prefix_probabilities_ref
from .selection.correct import correct_length, correct_length_ref, new_experts_ref
from .selection.limit import fix_length, fix_length_ref, limit_length_ref
from .selection.ratio import select_ratio, select_ratio_ref
from .selection.select import select_length, select_length_ref
from .triton_support import compile_only, has_kernels

__all__ = [
    "INPUT_DTYPES",
    "MAX_PARTS",
    "MAX_TOKENS",
    "AttentionScratch",
    "CompactFactors",
    "Emission",
    "ExpertSlots",
    "ExpertWeights",
    "GDNProjection",
    "HeadScratch",
    "Routing",
    "accept_greedy",
    "accept_greedy_ref",
    "add_rms_norm",
    "add_rms_norm_ref",
    "attention_splits",
    "attention_store",
    "attention_store_ref",
    "attention_verify",
    "attention_verify_ref",
    "compile_only",
    "conditional_acceptance_ref",
    "conv_commit",
    "conv_commit_ref",
    "conv_verify",
    "conv_verify_ref",
    "correct_length",
    "correct_length_ref",
    "embed_rms_norm",
    "embed_rms_norm_ref",
    "fix_length",
    "fix_length_ref",
    "gated_linear",
    "gated_linear_ref",
    "gdn_commit",
    "gdn_commit_ref",
    "gdn_project",
    "gdn_project_ref",
    "gdn_recurrent_commit",
    "gdn_recurrent_commit_ref",
    "gdn_recurrent_ref",
    "gdn_recurrent_verify",
    "gdn_recurrent_verify_ref",
    "gdn_replay_commit",
    "gdn_replay_commit_ref",
    "gdn_replay_verify",
    "gdn_replay_verify_ref",
    "gdn_verify",
    "gdn_verify_ref",
    "has_kernels",
    "head_argmax",
    "head_argmax_ref",
    "head_draft",
    "head_draft_ref",
    "limit_length_ref",
    "linear",
    "linear_parts",
    "linear_ref",
    "moe_combine_norm",
    "moe_combine_norm_ref",
    "moe_experts",
    "moe_experts_ref",
    "moe_route",
    "moe_route_ref",
    "moe_slots_ref",
    "new_experts_ref",
    "prefix_probabilities_ref",
    "replay_ref",
    "ring_capacity",
    "select_length",
    "select_length_ref",
    "select_ratio",
    "select_ratio_ref",
    "swiglu_linear",
    "swiglu_linear_ref",
]
