"""Low-bit arithmetic. Acts on tensors and `nn.Linear`; never imports the model."""
