"""How one token is drawn from logits: with stock operators anywhere, with a kernel of ours on a CPU."""
