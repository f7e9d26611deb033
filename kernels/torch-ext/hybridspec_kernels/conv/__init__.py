"""The causal convolution in front of a GDN layer, and the commit of its window."""
