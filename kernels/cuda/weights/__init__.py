"""Packed weights on the device: planes, layouts, launch geometry."""
