"""Decentralized, peer-to-peer pre-training of language models."""
