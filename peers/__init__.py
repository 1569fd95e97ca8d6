"""Named tensors between authenticated peers, over libp2p."""
