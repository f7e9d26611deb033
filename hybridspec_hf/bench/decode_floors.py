"""A pair's modules -> the bytes that a round has to move, by part, and the time below which it cannot get.

Every weight that a round uses is read once, whatever its number of tokens; of the experts only the distinct ones.
Activations are not counted: a round's fit into the caches.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..drafters.dflash import DFlashDrafter
from ..models.kernel_target import front_weights
from .gdn_floors import STATE_BYTES

# a module's name -> the part that its weights belong to; the first match counts
PARTS = (
    ("embed_tokens", "embedding"), ("lm_head", "head"), ("linear_attn", "gdn"), ("self_attn", "attention"),
    ("mlp.experts", "experts"), ("mlp.shared_expert", "shared_experts"), ("mlp.gate.", "router"), ("mlp", "mlp"),
)  # fmt: skip


def weight_bytes(model: Any) -> Counter[str]:
    """Bytes of a target's weights by part; norms count as "norms"."""
    found: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = next((part for key, part in PARTS if key in name), "norms")
        found[part] += parameter.numel() * parameter.itemsize
    # a head that is tied to the embedding has no name of its own
    found["head"] = model.lm_head.weight.nbytes
    return found


class DecodeFloors:
    """Bytes of rounds of one pair.

    Args:
        target: the transformers model. drafter: its drafter.
        distinct: length -> mean distinct experts of a MoE layer; empty for a dense target.
        context: committed tokens in front of the round.
    """

    def __init__(self, target: Any, drafter: DFlashDrafter, distinct: dict[int, float], context: int) -> None:
        self.config, self.weights, self.distinct, self.context = (
            target.config, weight_bytes(target), distinct, context
        )  # fmt: skip
        self.element = target.lm_head.weight.itemsize
        self.drafter, self.first = drafter, target.model.layers[0]

    def verification(self, w: int) -> dict[str, float]:
        """Bytes of verifying w tokens by part, without the commit; w = 1 is a token of autoregressive decoding."""
        c, types = self.config, list(self.config.layer_types)
        parts: dict[str, float] = {
            part: float(size) for part, size in self.weights.items() if part not in ("embedding", "experts")
        }
        parts["embedding"] = w * c.hidden_size * self.element
        if self.distinct:
            parts["experts"] = self.weights["experts"] * self.distinct[w] / c.num_experts
        parts["states"] = types.count("linear_attention") * self.state()
        row = 2 * c.num_key_value_heads * c.head_dim * self.element
        parts["kv"] = types.count("full_attention") * row * (self.context + 2 * w)
        return parts

    def state(self) -> float:
        """Bytes of one GDN layer's state."""
        c = self.config
        return float(c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * STATE_BYTES)

    def stage0(self) -> dict[str, float]:
        """Bytes of Layer 0 up to its router, which is computed beside the shared expert's projections."""
        front = front_weights(self.first.mlp) if hasattr(self.first.mlp, "experts") else ()
        return {"gdn": size_of(self.first.linear_attn.parameters()), "router": size_of(front), "states": self.state()}

    def commit(self) -> dict[str, float]:
        """Bytes of a commit: all states, read and written, and what makes the drafter's context of the features."""
        attentions = [layer.self_attn for layer in self.drafter.layers]
        context = [w for each in attentions for w in (each.k_proj.weight, each.v_proj.weight)]
        layers = list(self.config.layer_types).count("linear_attention")
        return {"states": 2 * layers * self.state(), "drafter": size_of([self.drafter.fc.weight, *context])}

    def draft(self) -> dict[str, float]:
        """Bytes of a draft by part: the drafter but for what the commit runs, its context and the target's head."""
        c = self.drafter.config
        row = 2 * c.num_key_value_heads * c.head_dim * self.drafter.fc.weight.itemsize
        seen = [min(self.context, c.window(layer) or self.context) for layer in range(c.num_hidden_layers)]
        return {
            "drafter": size_of(self.drafter.parameters()) - size_of([self.drafter.fc.weight]),
            "kv": float(row * sum(seen)),
            "head": float(self.weights["head"]),
        }

    def to_dict(self, lengths: list[int], bandwidth: float | None) -> dict[str, Any]:
        """JSON types: bytes of a draft and of each length, and with a bandwidth (bytes per second) milliseconds."""

        def entry(parts: dict[str, float]) -> dict[str, Any]:
            total = sum(parts.values())
            return {"bytes": total, "parts": parts, "floor_ms": floor_ms(total, bandwidth)}

        return {
            "bandwidth": bandwidth,
            "context": self.context,
            "weights": dict(self.weights),
            "draft": entry(self.draft()),
            "stage0": entry(self.stage0()),
            "commit": entry(self.commit()),
            "verification": {str(w): entry(self.verification(w)) for w in lengths},
        }


def size_of(tensors: Iterable[Tensor]) -> float:
    """Bytes of tensors."""
    return float(sum(tensor.nbytes for tensor in tensors))


def floor_ms(count: float, bandwidth: float | None) -> float | None:
    """Milliseconds that so many bytes take; None without a measured bandwidth."""
    return None if bandwidth is None else 1e3 * count / bandwidth
