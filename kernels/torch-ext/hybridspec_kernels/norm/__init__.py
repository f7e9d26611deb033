"""Root-mean-square norms with the residual stream's addition."""
