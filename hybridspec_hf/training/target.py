"""Token documents → a trained Qwen3.5-MoE target: model, dense training experts, and the training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5MoeTextConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hybridspec_hf.training.graphs import GradientStep
from hybridspec_hf.training.loop import Budget, Documents, TrainLog, adamw, autocast, run_steps

NUM_EXPERTS, TOP_K = 32, 4
BALANCE = 0.005
# the corpus is small: the target sees its natural part some thirty times
DROPOUT = 0.1
# a prompt is somebody else's text: predicting it matters less
PROMPT_WEIGHT = 0.2


def dense_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by the routing; the same sum as transformers' sparse implementations.

    Cheaper than gathering while experts are this small, and no value is read on the host.

    Args:
        hidden_states: `[T, H]`. top_k_index, top_k_weights: `[T, k]`.

    Returns:
        `[T, H]`.
    """
    experts, width, hidden = module.gate_up_proj.shape
    # [T, E, 2I] -> [T, E, I]
    gate, up = F.linear(hidden_states, module.gate_up_proj.reshape(-1, hidden)).view(-1, experts, width).chunk(2, -1)
    weights = torch.zeros(len(hidden_states), experts, dtype=gate.dtype, device=gate.device)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(gate.dtype))
    inner = module.act_fn(gate) * up * weights[:, :, None]
    return F.linear(inner.flatten(1), module.down_proj.transpose(0, 1).reshape(hidden, -1)).to(hidden_states.dtype)


def use_dense_experts(model: Any) -> None:
    """Switch a model's experts to `dense_experts`; `save_pretrained` does not record it."""
    if "hybridspec_dense" not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register("hybridspec_dense", dense_experts)
    model.set_experts_implementation("hybridspec_dense")


def target_config(vocab_size: int, **overrides: Any) -> Qwen3_5MoeTextConfig:
    """The tiny target's shape: 8 layers, GDN and full attention 3:1, 32 experts top-4 and a shared one."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 160,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 128,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    return Qwen3_5MoeTextConfig(**(sizes | overrides))


def balance_loss(router_logits: tuple[Tensor, ...], real: Tensor) -> Tensor:
    """Load balancing of Switch Transformers, mean over layers; 1 when experts are used evenly.

    Args:
        router_logits: per layer `[T, E]`. real: `[T]`, 1 on tokens and 0 on padding.
    """
    logits = torch.stack(router_logits).float()
    probs = (logits.softmax(-1) * real[:, None]).sum(1) / real.sum()
    chosen = torch.zeros_like(logits).scatter(2, logits.topk(TOP_K, dim=-1).indices, 1.0)
    share = (chosen * real[:, None]).sum(1) / (TOP_K * real.sum())
    return logits.shape[-1] * (probs * share.detach()).sum(-1).mean()


def target_loss(model: Any, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Training loss and plain cross entropy of right-padded documents.

    Args:
        ids: `[B, T]`. weights: `[B, T]`, loss weight of each token as a label, 0 on padding.
    """
    out = model(input_ids=ids, use_cache=False, output_router_logits=True)
    labels, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    nll = F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), labels, reduction="none")
    ce = (nll * weight).sum() / weight.sum().clamp_min(1)
    loss = ce + BALANCE * balance_loss(out.router_logits, (weights > 0).flatten().float())
    return loss, ce.detach()


@contextmanager
def dropout(model: Any, rate: float) -> Iterator[None]:
    """Dropout on the embeddings and on what each token mixer and expert block adds to the residual stream."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if not model.training:
            return output
        if isinstance(output, tuple):
            return F.dropout(output[0], rate), *output[1:]
        return F.dropout(output, rate)

    modules = [model.model.embed_tokens, *(layer.mlp for layer in model.model.layers)]
    modules += [getattr(layer, "linear_attn", None) or layer.self_attn for layer in model.model.layers]
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def train_target(
    model: Any, train: Documents, held_out: Documents, budget: Budget, log: TrainLog, lr: float = 3e-3
) -> float:
    """Train in place within the time budget and return the held-out cross entropy (nats a token, answers only)."""
    use_dense_experts(model)
    optimizer = adamw(model, lr, weight_decay=0.1)

    def loss(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(model.device):
            return target_loss(model, ids, weights)

    with dropout(model, DROPOUT):
        model.train()
        step = GradientStep(model, loss)
        batches = train.batches(model.device, seed=budget.steps)
        run_steps(model, optimizer, step, batches, budget, log, lambda: evaluate_target(model, held_out))
    return evaluate_target(model, held_out)


@torch.no_grad()
def evaluate_target(model: Any, held_out: Documents, limit: int = 8) -> float:
    """Cross entropy of the answers' tokens over the first batches of held-out documents."""
    total, count = 0.0, 0.0
    training = model.training
    model.eval()
    for i, (ids, weights) in enumerate(held_out.batches(model.device, seed=None)):
        if i == limit:
            break
        answers = (weights == 1).float()
        with autocast(model.device):
            _, ce = target_loss(model, ids, answers)
        total, count = total + ce.item() * answers.sum().item(), count + answers.sum().item()
    model.train(training)
    return total / max(count, 1)
