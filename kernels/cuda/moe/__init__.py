"""Mixture of experts: the router, and the matmuls of each row's experts on packed weights."""
