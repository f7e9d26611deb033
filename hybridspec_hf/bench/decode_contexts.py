"""A random pair -> the target's latency behind short and long prompts, and what knowing each gains over one curve."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridspec_generation import CostTable, HybridSpecConfig

from ..calibration.contexts import CONTEXTS, measure_contexts
from ..calibration.gains import config_gain
from ..calibration.tables import pooled_throughput
from .decode_models import RandomPair
from .decode_script import Script, scripted
from .decode_traces import load_acceptance


@dataclass(frozen=True)
class ContextCost:
    """The curve behind one number of tokens.

    Attributes:
        cost: with its rho on the traces' rounds.
        gain: modelled throughput with this curve over that with the first context's curve, both paying this one.
    """

    cost: CostTable
    gain: float


def compare_contexts(
    pair: RandomPair, script: Script, say: Callable[[str], object], contexts: Sequence[int] = CONTEXTS
) -> list[ContextCost]:
    """One for each of `contexts`, ascending, that fits into memory; `say` hears of the others. Rounds are scripted."""
    acceptance, text = load_acceptance(), pair.text(max(contexts))
    script.reset()
    with scripted(pair.target, pair.drafter, script):
        measured = measure_contexts(pair.target, pair.drafter, [text], contexts, say)
    costs = [replace(cost, throughput=pooled_throughput(acceptance, cost)) for cost in measured]
    gains = config_gain(HybridSpecConfig(acceptance=acceptance, cost=tuple(costs)))
    return [ContextCost(cost, gains[str(cost.context)]) for cost in costs]
