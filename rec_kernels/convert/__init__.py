"""Conversion of tables of torch, TorchRec and FBGEMM to and from this package: rows and optimizer state."""
