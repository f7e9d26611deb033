"""Captured PyTorch graphs joined into one graph in which the GPU chooses what runs: driver, setters, composition."""
