"""The arithmetic of the laws, on plain tensors: bounds, the fit of a gradient, its causes, the judge of an update."""
