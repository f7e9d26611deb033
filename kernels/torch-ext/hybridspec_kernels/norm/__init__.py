"""Root-mean-square norms: with the residual stream's addition, and with a GDN layer's output gate."""
