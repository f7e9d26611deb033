"""Matrix products of few tokens: linear layers and gated pairs of them, bound by the weights' bytes."""
