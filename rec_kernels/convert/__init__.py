"""Tables of torch, TorchRec and FBGEMM as tables of this package, and back: weights and optimizer state."""
