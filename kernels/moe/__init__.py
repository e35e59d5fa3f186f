"""Mixture of experts for every backend: router and experts defined in torch, experts in host memory."""
