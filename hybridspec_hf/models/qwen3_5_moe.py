"""Split forward of qwen3_5_moe (Qwen3.5/3.6 A3B, A10B), text class and the text part of the image-text class.

Follows transformers 5.24 `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.
"""

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import apply_rotary_pos_emb

from .qwen3_5 import Qwen3_5Target


class Qwen3_5MoeTarget(Qwen3_5Target):
    """qwen3_5's token mixers with a mixture-of-experts block in every layer."""

    MODEL_CLASSES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    apply_rotary = staticmethod(apply_rotary_pos_emb)
