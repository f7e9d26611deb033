"""The latency curve of the 35B's shape on one H200: an example, for what is modelled on any machine."""

import numpy as np

from hybridspec_generation import CostTable, ExpertTable

# milliseconds of whole rounds of generate at fixed lengths, bf16, behind CONTEXT tokens: values of the quadratic that
# scripts/bench_decode.py --modes contexts fitted to what it measured
ROUND_MS = {2: 3.412, 4: 4.013, 8: 4.976, 12: 5.617, 16: 5.937}
CONTEXT = 1024
# of the time that 16 tokens take more than 4, that of the MoE blocks, by the same script: 1.80 of 2.00 ms
EXPERTS_SHARE = 0.9
# a row of a kernel: graphs run Stage 0 on the whole block, whatever its length
STAGE0_TOKEN_SECONDS = 0.16e-6


def example_cost(experts: ExpertTable | None = None) -> CostTable:
    """A quadratic through `ROUND_MS`.

    Args:
        experts: of the pair whose rounds are judged, for a block of 16: eta is such that its average pairs make up
            `EXPERTS_SHARE` of the increase from 2 tokens to 16. None: eta is 0.
    """
    lengths, times = zip(*ROUND_MS.items(), strict=True)
    longest = max(lengths)
    fit = np.polyval(np.polyfit(lengths, times, 2), np.arange(longest + 1)) / 1e3
    pairs = sum(experts.mean_new_pairs[2:longest]) if experts else 0.0
    return CostTable(
        target_cost=(0.0, 0.0, *(float(seconds - fit[2]) for seconds in fit[2:])),
        fixed_cost=float(fit[2]),
        stage0_token_cost=STAGE0_TOKEN_SECONDS,
        expert_cost=EXPERTS_SHARE * float(fit[longest] - fit[2]) / pairs if pairs else 0.0,
        context=CONTEXT,
        source="whole rounds of the 35B's shape on an NVIDIA H200, a quadratic through five lengths",
    )
