"""Our reconstruction of EVICT for a chain of draft tokens: the best ratio of tokens to time among all lengths."""

from .ratio import RatioPolicy


class EvictPolicy(RatioPolicy):
    """Verify the length with the best `(1 + sum_{i<w} a_i) / time(w)`, a_i from uncalibrated confidences.

    EVICT's method section is not public. Known is that it keeps the cost-effective prefix of a draft, by drafter
    signals and profiled verification costs. Whether its cost includes drafting is not; it does here, as for the other
    rules. Of equal ratios the shorter length is taken.
    """
