"""Mixture of experts: the router and the experts' matmuls, defined in torch."""
