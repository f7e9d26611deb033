"""Matrix products of few tokens: linear layers, gated pairs of them and gated inputs, bound by the weights' bytes."""
