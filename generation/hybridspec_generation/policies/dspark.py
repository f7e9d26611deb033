"""DSpark-style: lengthen the input for as long as expected tokens per second rise, by calibrated confidences."""

from .ratio import RatioPolicy


class DSparkPolicy(RatioPolicy):
    """Verify the length before the first that does not raise `(1 + sum_{i<w} a_i) * steps per second(w)`.

    This is DSpark's Algorithm 1 for one request, on a drafter without its confidence head: the top-1 probability
    stands for the head, and the isotonic rows of the acceptance table for its sequential temperature scaling. The
    search starts at 2, the shortest length of a round.
    """

    calibrated = True
    rising = True
