"""Root-mean-square norms with what precedes them: the embedding, or the residual stream's addition."""
