"""Mixture of experts: the router, and the experts' matmuls on weights as stored."""
