"""Mixture of experts: the router, and the experts' matmuls on weights where they lie."""
