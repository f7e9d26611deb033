"""DSpark-style: lengthen the input for as long as expected tokens per second rise, by calibrated confidences."""

from torch import Tensor

from hybridspec_kernels.selection.acceptance import interpolate

from .ratio import RatioPolicy


class DSparkPolicy(RatioPolicy):
    """Verify the length before the first that does not raise `(1 + sum_{i<w} a_i) * steps per second(w)`.

    This is DSpark's Algorithm 1 for one request, on a drafter without its confidence head: the top-1 probability
    stands for the head, and the isotonic rows of the acceptance table for its sequential temperature scaling. The
    search starts at 2, the shortest length of a round.
    """

    def acceptance(self, confidence: Tensor) -> Tensor:
        """The isotonic table's acceptance rate at each confidence."""
        t = self.tables
        return interpolate(confidence, t.confidence_knots, t.acceptance_knots)

    def choose(self, ratio: Tensor) -> Tensor:
        """2, and one more for each rise before the first ratio that does not rise, NaN included."""
        return 2 + (ratio[1:] > ratio[:-1]).cumprod(0).sum(0, keepdim=True)
