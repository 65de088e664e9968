"""The network: checkpoint files, weights, and the forward pass of Llama-architecture decoders."""
