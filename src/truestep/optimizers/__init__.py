"""Knowing optimizers: the replica, the same optimizer object on plain tensors."""
