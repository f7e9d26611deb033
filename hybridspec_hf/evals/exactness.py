"""Policies against plain generate, token for token; every difference comes with the margin it happened at."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import HybridSpecConfig

from ..drafters.dflash import DFlashDrafter


@dataclass(frozen=True)
class Divergence:
    """The first token in which an output differs from plain generate's.

    Attributes:
        prompt, position: index of the prompt, and of the token among the new ones.
        plain, ours: the two tokens (-1: the sequence had ended).
        margin: logit of the best minus the second best token there, by one forward of the model over the text.
        spacing: distance between neighbouring numbers of the model's dtype at the best logit.
        gap_fp32: logit of `plain` minus that of `ours` in an fp32 copy of the model: the true difference.
    """

    prompt: int
    position: int
    plain: int
    ours: int
    margin: float
    spacing: float
    gap_fp32: float


@dataclass(frozen=True)
class PolicyResult:
    """One policy over all prompts.

    Attributes:
        prompts, identical: number of prompts, and of outputs equal to plain generate's.
        tokens, rounds, verified: new tokens, verification rounds and verified tokens over all prompts.
        divergences: the first difference of every output that is not identical.
    """

    policy: str
    prompts: int
    identical: int
    tokens: int
    rounds: int
    verified: int
    divergences: tuple[Divergence, ...]

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)


def generate_options(policy: str, drafter: DFlashDrafter) -> dict[str, Any]:
    """Keyword arguments of generate for a policy; "ar" decodes without the drafter."""
    options: dict[str, Any] = {"generation_mode": "hybridspec", "do_sample": False, "return_dict_in_generate": True}
    if policy != "ar":
        options |= {"assistant_model": drafter, "hybridspec_config": HybridSpecConfig(policy=policy)}
    return options


def check_exactness(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    policies: Sequence[str],
    *,
    max_new_tokens: int,
    fp32_model: Any = None,
) -> list[PolicyResult]:
    """Decode every prompt with plain generate and with each policy; EOS is ignored, so every output is full length.

    Args:
        prompts: token ids `[1, T]` each. fp32_model: an fp32 copy of the model for `Divergence.gap_fp32`
            (default: the model itself).
    """
    bar = tqdm(total=len(prompts) * (1 + len(policies)), desc="exactness", unit="request", disable=None)
    length: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": None}
    plain = []
    for ids in prompts:
        plain.append(model.generate(input_ids=ids, do_sample=False, **length)[0])
        bar.update()
    results = []
    for policy in policies:
        outputs = []
        for ids in prompts:
            options = generate_options(policy, drafter)
            outputs.append(model.generate(input_ids=ids, **length, **options))
            bar.update()
        results.append(compare(policy, model, fp32_model or model, prompts, plain, outputs))
    bar.close()
    return results


def compare(
    policy: str, model: Any, fp32_model: Any, prompts: Sequence[Tensor], plain: list[Tensor], outputs: list[Any]
) -> PolicyResult:
    """One policy's outputs against plain generate's sequences `[T + new]`."""
    divergences = []
    for i, (ids, want, out) in enumerate(zip(prompts, plain, outputs, strict=True)):
        got = out.sequences[0]
        if not torch.equal(got, want):
            divergences.append(divergence(i, model, fp32_model, ids.shape[1], want, got))
    return PolicyResult(
        policy=policy,
        prompts=len(prompts),
        identical=len(prompts) - len(divergences),
        tokens=sum(out.report.new_tokens for out in outputs),
        rounds=sum(out.report.rounds for out in outputs),
        verified=sum(out.report.verified_tokens for out in outputs),
        divergences=tuple(divergences),
    )


@torch.no_grad()
def divergence(prompt: int, model: Any, fp32_model: Any, start: int, want: Tensor, got: Tensor) -> Divergence:
    """Where and how closely the two sequences part."""
    shared = min(len(want), len(got))
    different = (want[:shared] != got[:shared]).nonzero()
    at = int(different[0]) if len(different) else shared
    text = want[None, :at]
    logits = model(input_ids=text).logits[0, -1].float()
    exact = fp32_model(input_ids=text).logits[0, -1].float()
    best = logits.topk(2).values
    tokens = [int(s[at]) if at < len(s) else -1 for s in (want, got)]
    gap = float(exact[tokens[0]] - exact[tokens[1]]) if min(tokens) >= 0 else float("nan")
    return Divergence(
        prompt=prompt,
        position=at - start,
        plain=tokens[0],
        ours=tokens[1],
        margin=float(best[0] - best[1]),
        spacing=float(best[0].abs()) * torch.finfo(model.dtype).eps,
        gap_fp32=gap,
    )


def worst_margin(result: PolicyResult) -> float:
    """The largest margin of a divergence, in spacings of the model's dtype; 0 without divergences."""
    return max((d.margin / d.spacing for d in result.divergences), default=0.0)


def provenance() -> dict[str, Any]:
    """What a stored result needs to be understood later: command line, machine and versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "argv": sys.argv[1:],
        "machine": platform.machine(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
